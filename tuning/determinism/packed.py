"""Packed sequences, and arguments that a torch-native form does not know."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tuning.determinism.refusal import refuse

if TYPE_CHECKING:
    import torch

__all__ = ["no_unknown", "sequence_bounds"]

_WHY = {
    "cp_context": "context parallelism passes states between ranks inside FLA's kernels, which this form does not use",
    "seq_idx": "sequences are given by cu_seqlens here",
    "return_intermediate_states": "only FLA's kernels keep the state before each chunk",
}


def no_unknown(function: str, arguments: Mapping[str, Any]) -> list[str]:
    """Problems with arguments that have no meaning here; None and False are no request and pass."""
    return [
        f"{name} is not supported by the torch-native {function}, got {type(value).__name__} "
        f"({_WHY.get(name, 'it does not know this argument')}): do without it in deterministic mode"
        for name, value in sorted(arguments.items())
        if value is not None and value is not False
    ]


def sequence_bounds(
    x: torch.Tensor, cu_seqlens: torch.Tensor | None, cu_seqlens_cpu: torch.Tensor | None = None
) -> list[tuple[int, int]] | None:
    """The (start, stop) of every packed sequence, or None where the batch is not packed.

    Args:
        x: shape ``[B, T, ...]``.
        cu_seqlens: cumulative lengths, shape ``[N + 1]``, or None.
        cu_seqlens_cpu: the same on the CPU; without it, reading ``cu_seqlens`` synchronises with the device.

    Raises:
        DeterminismError: the bounds do not describe a batch of one with T tokens.
    """
    source = cu_seqlens if cu_seqlens_cpu is None else cu_seqlens_cpu
    if source is None:
        return None
    limits = [int(limit) for limit in source.tolist()] if source.dim() == 1 else []
    problems = []
    if x.shape[0] != 1:
        problems.append(f"the batch size must be 1 with cu_seqlens, got {x.shape[0]}: flatten the sequences into one")
    if len(limits) < 2 or limits[0] != 0 or limits[-1] != x.shape[1] or limits != sorted(limits):
        problems.append(
            f"cu_seqlens must rise from 0 to T={x.shape[1]}, got {limits if limits else list(source.shape)}: pass "
            "cumulative sequence lengths"
        )
    refuse("these packed sequences", problems)
    return list(itertools.pairwise(limits))
