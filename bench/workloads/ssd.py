"""Mamba-2's SSD step at a given shape, with digests of what it computes.

Import this only in a process that may load torch and the workload's package.
"""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import types
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class SsdShape:
    """Sizes of a Mamba-2 SSD step; the defaults are those of a layer of a large hybrid model."""

    batch: int = 1
    seqlen: int = 8192
    nheads: int = 128
    headdim: int = 64
    ngroups: int = 8
    dstate: int = 128
    chunk_size: int = 128
    dtype: str = "bfloat16"


def import_mamba_ssm() -> None:
    """Make ``mamba_ssm.ops.triton`` importable where the package's compiled extension is not.

    ``mamba_ssm/__init__.py`` imports the CUDA extension ``selective_scan_cuda``. The Triton kernels do not need it, so
    a module object that knows only the package's folder stands in for the package.
    """
    if "mamba_ssm" in sys.modules or importlib.util.find_spec("selective_scan_cuda") is not None:
        return
    spec = importlib.util.find_spec("mamba_ssm")
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError("mamba_ssm is not installed: pip install 'triton-tuning[mamba]'")
    package = types.ModuleType("mamba_ssm")
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules["mamba_ssm"] = package


class Ssd:
    """Forward and backward of ``mamba_chunk_scan_combined`` with D, z and dt_bias, on fixed random inputs."""

    def __init__(self, shape: SsdShape, device: str = "cuda", seed: int = 0) -> None:
        import torch

        import_mamba_ssm()
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        self._function = mamba_chunk_scan_combined
        self.shape = s = shape
        generator = torch.Generator(device=device).manual_seed(seed)
        dtype = getattr(torch, s.dtype)

        def make(*sizes: int, dtype: Any = dtype, scale: float = 1.0) -> Any:
            values = torch.randn(*sizes, generator=generator, dtype=torch.float32, device=device) * scale
            return values.to(dtype).requires_grad_()

        self.inputs = {
            "x": make(s.batch, s.seqlen, s.nheads, s.headdim),
            "dt": make(s.batch, s.seqlen, s.nheads),
            "A": (-torch.rand(s.nheads, generator=generator, device=device) - 0.5).requires_grad_(),
            "B": make(s.batch, s.seqlen, s.ngroups, s.dstate, scale=0.3),
            "C": make(s.batch, s.seqlen, s.ngroups, s.dstate, scale=0.3),
            "D": make(s.nheads, dtype=torch.float32),
            "z": make(s.batch, s.seqlen, s.nheads, s.headdim),
            "dt_bias": make(s.nheads, dtype=torch.float32, scale=0.1),
        }
        self._gradient = make(s.batch, s.seqlen, s.nheads, s.headdim).detach()

    def step(self) -> dict[str, Any]:
        """One forward and backward; the output and every gradient, by name."""
        i = self.inputs
        for tensor in i.values():
            tensor.grad = None
        out = self._function(
            i["x"],
            i["dt"],
            i["A"],
            i["B"],
            i["C"],
            self.shape.chunk_size,
            D=i["D"],
            z=i["z"],
            dt_bias=i["dt_bias"],
            dt_softplus=True,
        )
        out.backward(self._gradient)
        return {"out": out.detach(), **{f"grad {name}": tensor.grad for name, tensor in i.items()}}


def digest(tensors: dict[str, Any]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes: one flipped sign of a zero changes it."""
    import torch

    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        total.update(tensor.view(torch.uint8).cpu().numpy().tobytes())
    return total.hexdigest()
