"""torch's process-wide flags for a bit-exact run, and the way back.

``use_deterministic_algorithms(True, warn_only=False)``: with ``warn_only`` scaled-dot-product attention keeps its
nondeterministic backward, so a warning is not enough. ``cudnn.deterministic`` and ``cudnn.benchmark`` choose the
convolution algorithms without a stopwatch. ``fill_uninitialized_memory`` is then switched off: with deterministic
algorithms on, torch fills every ``empty`` tensor with NaN, which costs a write of all memory that is allocated, and
changes nothing that a correct program computes. Leaving it on is a way to hunt reads of unwritten memory: they become
NaN instead of yesterday's values.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = ["TorchFlags", "deterministic_torch", "read_torch_flags", "restore_torch_flags", "set_torch_flags"]


@dataclass(frozen=True)
class TorchFlags:
    """The flags that the mode sets; the defaults are the values it sets.

    Attributes:
        deterministic_algorithms: an op without a deterministic form raises.
        warn_only: ... or only warns.
        cudnn_deterministic: cuDNN uses deterministic convolutions only.
        cudnn_benchmark: cuDNN times its convolution algorithms.
        fill_uninitialized_memory: with deterministic algorithms on, ``torch.empty`` fills its memory with NaN.
        inductor_deterministic: Inductor avoids benchmarks that affect numbers; None where torch has no such setting.
            torch sets it with its own flag, so it is restored with it.
    """

    deterministic_algorithms: bool = True
    warn_only: bool = False
    cudnn_deterministic: bool = True
    cudnn_benchmark: bool = False
    fill_uninitialized_memory: bool = False
    inductor_deterministic: bool | None = True


def _inductor_config() -> Any:
    try:
        return importlib.import_module("torch._inductor.config")
    except ImportError:
        return None


def read_torch_flags() -> TorchFlags:
    """The flags as they are now."""
    import torch
    import torch.utils.deterministic

    return TorchFlags(
        deterministic_algorithms=torch.are_deterministic_algorithms_enabled(),
        warn_only=torch.is_deterministic_algorithms_warn_only_enabled(),
        cudnn_deterministic=torch.backends.cudnn.deterministic,
        cudnn_benchmark=torch.backends.cudnn.benchmark,
        fill_uninitialized_memory=torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        inductor_deterministic=getattr(_inductor_config(), "deterministic", None),
    )


def restore_torch_flags(flags: TorchFlags) -> None:
    """Set all flags to what ``flags`` says."""
    import torch
    import torch.utils.deterministic

    torch.use_deterministic_algorithms(flags.deterministic_algorithms, warn_only=flags.warn_only)
    torch.backends.cudnn.deterministic = flags.cudnn_deterministic
    torch.backends.cudnn.benchmark = flags.cudnn_benchmark
    torch.utils.deterministic.fill_uninitialized_memory = flags.fill_uninitialized_memory  # type: ignore[attr-defined]
    config = _inductor_config()
    if flags.inductor_deterministic is not None and hasattr(config, "deterministic"):
        config.deterministic = flags.inductor_deterministic


def set_torch_flags(*, fill_uninitialized_memory: bool = False) -> TorchFlags:
    """Set the flags for a bit-exact run.

    Args:
        fill_uninitialized_memory: leave torch's filling of unwritten memory with NaN on, to hunt reads of it.

    Returns:
        What they were before, for :func:`restore_torch_flags`.
    """
    before = read_torch_flags()
    restore_torch_flags(TorchFlags(fill_uninitialized_memory=fill_uninitialized_memory))
    return before


@contextmanager
def deterministic_torch(*, fill_uninitialized_memory: bool = False) -> Iterator[TorchFlags]:
    """Within the block torch's flags are those of a bit-exact run; afterwards, all of them are what they were.

    Args:
        fill_uninitialized_memory: leave torch's filling of unwritten memory with NaN on, to hunt reads of it.
    """
    before = set_torch_flags(fill_uninitialized_memory=fill_uninitialized_memory)
    try:
        yield before
    finally:
        restore_torch_flags(before)
