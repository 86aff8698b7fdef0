"""L2 normalisation over the last dimension in plain torch, with the arithmetic of FLA's kernel.

Forward: ``y = x / sqrt(sum(x * x) + eps)``, computed in float32 and rounded to the output's dtype; the epsilon is
added under the root, so a zero row gives zeros. Backward: FLA keeps the *rounded* output and the reciprocal norm in
float32, and computes ``dx = (dy - sum(dy * y) * y) / norm`` from them. Starting from the rounded output is part of the
formula: a gradient computed from ``x`` would differ in the last bits of bfloat16.

Formula as in ``fla/modules/norm/l2norm.py`` (fla-core 0.6.0), whose kernels are autotuned: the number of warps decides
the order of the sum. Here one torch reduction over contiguous rows decides it. float64 inputs are computed in float64,
which FLA does not do; it makes this function its own reference.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["l2_normalize", "l2norm_backward", "l2norm_forward"]


def _inner(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def l2norm_forward(
    x: torch.Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """The normalised rows and the reciprocal norms, without autograd; stands in for FLA's ``l2norm_fwd``.

    Args:
        x: shape ``[..., D]``.
        eps: added to the sum of squares.
        output_dtype: of the normalised rows; None means that of ``x``.

    Returns:
        Rows of shape ``[..., D]`` and reciprocal norms of shape ``[...]`` in float32 (float64 for float64 input).
    """
    # Contiguous first: the order of a reduction may depend on strides, and equal values must give equal bits.
    wide = x.contiguous().to(_inner(x.dtype))
    reciprocal = 1 / torch.sqrt((wide * wide).sum(-1) + eps)
    return (wide * reciprocal.unsqueeze(-1)).to(output_dtype or x.dtype), reciprocal


def l2norm_backward(y: torch.Tensor, rstd: torch.Tensor, dy: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """The gradient of the input from the rounded output; stands in for FLA's ``l2norm_bwd``.

    Args:
        y: the normalised rows, as :func:`l2norm_forward` returned them.
        rstd: the reciprocal norms.
        dy: gradient of ``y``, of any shape with as many elements.
        eps: not used, as in FLA: the reciprocal norms contain it.

    Returns:
        Shape and dtype of ``y``.
    """
    grad = dy.reshape(y.shape).contiguous().to(rstd.dtype)
    wide = y.contiguous().to(rstd.dtype)
    scale = rstd.reshape(y.shape[:-1]).unsqueeze(-1)
    return (grad * scale - (grad * wide).sum(-1, keepdim=True) * wide * scale).to(y.dtype)


class _L2Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, eps: float, output_dtype: torch.dtype | None) -> torch.Tensor:
        y, reciprocal = l2norm_forward(x, eps, output_dtype)
        ctx.save_for_backward(y, reciprocal)
        ctx.input_dtype = x.dtype
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        y, reciprocal = ctx.saved_tensors
        return l2norm_backward(y, reciprocal, dy).to(ctx.input_dtype), None, None


def l2_normalize(x: torch.Tensor, eps: float = 1e-6, output_dtype: torch.dtype | None = None) -> torch.Tensor:
    """Normalise the rows of ``x`` to length one, bit-exact from run to run.

    Args:
        x: shape ``[..., D]``; a query or key of a gated delta net, say.
        eps: added to the sum of squares, under the root.
        output_dtype: of the result; None means that of ``x``.

    Returns:
        Shape of ``x``. Differentiable once.
    """
    result: torch.Tensor = _L2Normalize.apply(x, eps, output_dtype)  # type: ignore[no-untyped-call]
    return result
