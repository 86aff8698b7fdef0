"""Whether it is too late to fill an environment variable in this process.

NCCL reads its variables when a process group starts and cuBLAS its own when a handle is created; a value set later is
not seen. torch is looked at only if it has been imported: an import would cost seconds and, without torch, neither a
group nor a handle of torch's exists.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

__all__ = ["nccl_group", "too_late"]


def _nccl_group(torch: Any) -> str | None:
    """Name of an existing process group that runs on NCCL, or None."""
    distributed = getattr(torch, "distributed", None)
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    world = getattr(distributed.distributed_c10d, "_world", None)
    configs = [str(config) for config in (getattr(world, "pg_backend_config", None) or {}).values()]
    for config in [*configs, str(distributed.get_backend())]:
        if "nccl" in config.lower():
            return config
    return None


def _cublas_handle(torch: Any) -> bool:
    """True where torch may have created a cuBLAS handle: CUDA is up and some tensor has been allocated on it.

    torch shows its handles nowhere, and asking for one would create it. But a product needs operands, so a process
    that never allocated anything on a device has no handle either.
    """
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return False
    try:
        stats = [torch.cuda.memory_stats(device) for device in range(torch.cuda.device_count())]
    except Exception:  # no statistics (another allocator): only the initialisation is known
        return True
    return any(stat.get("allocation.all.allocated", 0) for stat in stats)


def nccl_group() -> str | None:
    """The backend of a process group of this process that runs on NCCL, or None where there is none."""
    torch = sys.modules.get("torch")
    return None if torch is None else _nccl_group(torch)


def too_late(unset: Sequence[str]) -> list[str]:
    """Problems with filling variables in this process: their reader has read them already.

    Args:
        unset: names of the variables that would have to be filled.
    """
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "cuda"):
        return []
    problems = []
    group = _nccl_group(torch)
    nccl = [name for name in unset if name.startswith("NCCL_")]
    if group and nccl:
        problems.append(
            f"{', '.join(nccl)} must be set before the process group starts, got unset with a process group on "
            f"{group} running (NCCL has read its environment): set them in the launcher (spawn_env), or turn the mode "
            "on before init_process_group"
        )
    if "CUBLAS_WORKSPACE_CONFIG" in unset and _cublas_handle(torch):
        problems.append(
            "CUBLAS_WORKSPACE_CONFIG must be set before the first cuBLAS handle, got unset with CUDA in use (a handle "
            "may exist, and keeps the workspace it was created with): set it in the launcher (spawn_env), or turn the "
            "mode on before any work on the device"
        )
    return problems
