"""Low-precision recipes of the suite: linear layers whose three products run in FP8 or FP4, by ``torch._scaled_mm``.

==============  ==============================================================  =========================  ============
recipe          scales                                                          elements                   runs on
==============  ==============================================================  =========================  ============
tensorwise_fp8  one for each tensor, from its own largest magnitude             e4m3, gradients e5m2       sm89, sm90+
delayed_fp8     one for each tensor, from the largest of the last 16 steps      e4m3, gradients e5m2       sm89, sm90+
mxfp8           a power of two for 32 elements (e8m0)                           e4m3                       sm100+
nvfp4           e4m3 for 16 elements                                            e2m1, two to a byte        sm100+
==============  ==============================================================  =========================  ============

The formats are those of the Open Compute Project's "Microscaling Formats (MX) Specification" 1.0; where the scales of
blocks lie is told by cuBLAS's documentation ("1D block scaling factors layout": tiles of 128 rows and 4 columns).
Rounding is to the nearest, never stochastic.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = [
    "RECIPES",
    "LowPrecisionLinear",
    "missing_capability",
    "quantize_mx",
    "quantize_nv",
    "quantize_whole",
    "swap_linears",
    "tiled",
]

_E4M3_MAX, _E5M2_MAX, _E2M1_MAX = 448.0, 57344.0, 6.0
_HISTORY = 16
_LEAST = 2.0**-100  # whose reciprocal float32 still holds, times the largest of a format

RECIPES: dict[str, tuple[int, int]] = {
    "tensorwise_fp8": (8, 9),
    "delayed_fp8": (8, 9),
    "mxfp8": (10, 0),
    "nvfp4": (10, 0),
}
"""Recipe to the least compute capability that runs it."""


def missing_capability(recipe: str, device: torch.device) -> str | None:
    """Why a recipe cannot run on a device, or None where it can."""
    needed = RECIPES[recipe]
    if device.type != "cuda":
        return f"needs a GPU of compute capability {needed[0]}.{needed[1]} or later"
    found = torch.cuda.get_device_capability(device)
    if found < needed:
        return f"needs compute capability {needed[0]}.{needed[1]} or later, found {found[0]}.{found[1]}"
    return None


def _cast(x: Any, scale: Any, dtype: Any, most: float) -> Any:
    return (x.float() * scale).clamp(-most, most).to(dtype)


def quantize_whole(x: Any, amax: Any, gradient: bool) -> tuple[Any, Any]:
    """FP8 elements and the scale that gives them back (float32, 0-d), for a largest magnitude of ``amax``."""
    dtype, most = (torch.float8_e5m2, _E5M2_MAX) if gradient else (torch.float8_e4m3fn, _E4M3_MAX)
    scale = most / amax.float().clamp(min=_LEAST)
    return _cast(x, scale, dtype, most), scale.reciprocal()


def quantize_mx(x: Any) -> tuple[Any, Any]:
    """e4m3 elements (rows, columns) and the exponents of their blocks, biased, as bytes (rows, columns / 32)."""
    blocks = x.float().unflatten(-1, (-1, 32))
    # Largest power of two not above the largest magnitude, over 2**8, the largest power of two of e4m3.
    exponent = torch.frexp(blocks.abs().amax(-1).clamp(min=_LEAST))[1] - 1 - 8
    exponent = exponent.clamp(-127, 127)
    elements = _cast(
        blocks, torch.ldexp(torch.ones_like(blocks[..., :1]), -exponent[..., None]), torch.float8_e4m3fn, 448
    )
    return elements.flatten(-2), (exponent + 127).to(torch.uint8)


def quantize_nv(x: Any) -> tuple[Any, Any]:
    """e2m1 elements, two to a byte, the first in the low half (rows, columns / 2), and e4m3 scales of 16 elements."""
    blocks = x.float().unflatten(-1, (-1, 16))
    scales = (blocks.abs().amax(-1) / _E2M1_MAX).clamp(2.0**-9, _E4M3_MAX).to(torch.float8_e4m3fn)
    scaled = (blocks / scales.float()[..., None]).flatten(-2)
    size = scaled.abs()
    # To the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6; ties to the even code.
    over = [size > 0.25, size >= 0.75, size > 1.25, size >= 1.75, size > 2.5, size >= 3.5, size > 5]
    code = sum((o.to(torch.uint8) for o in over), torch.zeros_like(size, dtype=torch.uint8))
    code = code + (scaled.signbit().to(torch.uint8) << 3)
    return code[..., 0::2] | (code[..., 1::2] << 4), scales


def tiled(scales: Any) -> Any:
    """Scales of blocks (rows, blocks) in the order in which the GPU reads them, padded with zeros."""
    rows, columns = scales.shape
    padded = torch.zeros(-(-rows // 128) * 128, -(-columns // 4) * 4, dtype=torch.uint8, device=scales.device)
    padded[:rows, :columns] = scales.view(torch.uint8)
    tiles = padded.view(padded.shape[0] // 128, 4, 32, padded.shape[1] // 4, 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1)


def _product(recipe: str, a: Any, b: Any, amax: tuple[Any, Any], gradient: bool) -> Any:
    """``a @ b.T`` of two matrices, quantized along their rows; bfloat16."""
    if recipe in ("tensorwise_fp8", "delayed_fp8"):
        left, one = quantize_whole(a, amax[0], gradient)
        right, two = quantize_whole(b, amax[1], False)
    elif recipe == "mxfp8":
        (left, one), (right, two) = quantize_mx(a), quantize_mx(b)
        one, two = (tiled(s).view(torch.float8_e8m0fnu) for s in (one, two))
    else:
        (left, one), (right, two) = quantize_nv(a), quantize_nv(b)
        left, right = (q.contiguous().view(torch.float4_e2m1fn_x2) for q in (left, right))
        one, two = (tiled(s).view(torch.float8_e4m3fn) for s in (one, two))
    return torch._scaled_mm(left.contiguous(), right.contiguous().t(), one, two, out_dtype=torch.bfloat16)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, layer: Any) -> Any:
        rows = x.flatten(0, -2)
        ctx.save_for_backward(rows, weight)
        ctx.layer = layer
        amax = layer.amax("input", rows), layer.amax("weight", weight)
        ctx.amax = amax
        return _product(layer.recipe, rows, weight, amax, False).view(*x.shape[:-1], -1).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        rows, weight = ctx.saved_tensors
        layer, (of_rows, of_weight) = ctx.layer, ctx.amax
        g = gradient.flatten(0, -2)
        of_gradient = layer.amax("gradient", g)
        to_input = _product(layer.recipe, g, weight.t(), (of_gradient, of_weight), True)
        to_weight = _product(layer.recipe, g.t(), rows.t(), (of_gradient, of_rows), True)
        shape = (*gradient.shape[:-1], -1)
        return to_input.view(shape).to(rows.dtype), to_weight.to(weight.dtype), None


class LowPrecisionLinear(nn.Module):
    """A linear layer without bias in one of :data:`RECIPES`.

    Args:
        linear: the layer whose weight it takes.
        recipe: name of the recipe.
    """

    def __init__(self, linear: Any, recipe: str) -> None:
        super().__init__()
        self.weight, self.recipe = linear.weight, recipe
        for role in ("input", "weight", "gradient"):
            self.register_buffer(f"{role}_amax", torch.zeros(_HISTORY, dtype=torch.float32, device=self.weight.device))

    def amax(self, role: str, x: Any) -> Any:
        """The magnitude to scale by: that of ``x``, or, delayed, the largest of the steps before, if there are any."""
        now = x.detach().abs().amax().float()
        if self.recipe != "delayed_fp8":
            return now
        history = getattr(self, f"{role}_amax")
        seen = history.amax()
        history.copy_(torch.cat([now[None], history[:-1]]))
        return torch.where(seen > 0, seen, now)

    def forward(self, x: Any) -> Any:
        """``x``: (..., in features)."""
        return _Linear.apply(x, self.weight, self)  # type: ignore[no-untyped-call]


def swap_linears(model: Any, recipe: str) -> Any:
    """Put :class:`LowPrecisionLinear` in place of each linear layer without bias whose sizes are multiples of 32."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            sizes = (child.in_features, child.out_features) if isinstance(child, nn.Linear) else (1,)
            if isinstance(child, nn.Linear) and child.bias is None and not any(size % 32 for size in sizes):
                setattr(module, name, LowPrecisionLinear(child, recipe))
    return model
