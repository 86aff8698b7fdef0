"""Deterministic mode: one flag for everything besides autotuning that can change a run's bits.

Pinning fixes the configs of Triton's autotuners. A run is bit-exact only when the environment of NCCL and cuBLAS,
torch's flags, the attention backend and custom kernels are fixed too. :class:`DeterministicMode` does all of it, or
refuses with one error that lists everything in the way; :func:`doctor` tells beforehand.

::

    with deterministic_mode(args=args, attention_backend="flash"):
        train()

    subprocess.Popen(worker, env=spawn_env(os.environ))   # NCCL and cuBLAS read theirs before a worker's code runs

Four words, as Megatron-LM's determinism pages use them: *bit-exact* (equal bytes), *reproducible* (the same job again
is bit-exact), *cross-allocation* (also on other nodes; not promised here), *fail closed* (refuse what is not known).

Importing this package imports neither torch nor triton. The torch-native forms (:func:`l2_normalize`,
:func:`causal_convolution`, :func:`chunk_gated_delta_rule`, :func:`chunk_gdn2`) are loaded on first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from tuning.determinism.arguments import ArgumentGate, apply_determinism_to_args, register_argument_gate
from tuning.determinism.attention import (
    AttentionVerdict,
    check_attention_backend,
    classify_backend,
    register_attention_backend,
)
from tuning.determinism.candidates import CandidateGuard
from tuning.determinism.causal_conv1d import causal_convolution, require_causal_conv1d
from tuning.determinism.checkpoint import CheckpointComparison, compare_checkpoints
from tuning.determinism.doctor import DoctorReport, DoctorRow, doctor
from tuning.determinism.environment import EnvironmentReport, apply_determinism_env, spawn_env
from tuning.determinism.fla_replacement import FlaReplacement, replace_in_fla
from tuning.determinism.flash import FlashPatch, patch_flash_attention
from tuning.determinism.kernel_checks import register_kernel_check, run_kernel_checks
from tuning.determinism.mode import DeterministicMode, deterministic_mode, mode_from_args
from tuning.determinism.torch_flags import deterministic_torch

if TYPE_CHECKING:
    from tuning.determinism.gated_delta import chunk_gated_delta_rule, chunk_gdn2
    from tuning.determinism.l2norm import l2_normalize

__all__ = [
    "ArgumentGate",
    "AttentionVerdict",
    "CandidateGuard",
    "CheckpointComparison",
    "DeterministicMode",
    "DoctorReport",
    "DoctorRow",
    "EnvironmentReport",
    "FlaReplacement",
    "FlashPatch",
    "apply_determinism_env",
    "apply_determinism_to_args",
    "causal_convolution",
    "check_attention_backend",
    "chunk_gated_delta_rule",
    "chunk_gdn2",
    "classify_backend",
    "compare_checkpoints",
    "deterministic_mode",
    "deterministic_torch",
    "doctor",
    "l2_normalize",
    "mode_from_args",
    "patch_flash_attention",
    "register_argument_gate",
    "register_attention_backend",
    "register_kernel_check",
    "replace_in_fla",
    "require_causal_conv1d",
    "run_kernel_checks",
    "spawn_env",
]

_LAZY = {
    "chunk_gated_delta_rule": ".gated_delta",
    "chunk_gdn2": ".gated_delta",
    "l2_normalize": ".l2norm",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name], __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
