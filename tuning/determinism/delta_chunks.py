"""The gated delta rule in chunks, in plain torch, for GDN and GDN-2.

Both keep a state ``S`` of shape ``[K, V]`` for each head and change it with every token ``t``:

- GDN (gated delta rule): ``S = exp(g) S``, then ``S += k (beta (v - k^T S))``, with scalars ``g <= 0`` and ``beta``;
- GDN-2: ``S = diag(exp(g)) S``, then ``S += k (w * v - (b * k)^T S)``, with ``g``, ``b`` per key channel and ``w`` per
  value channel;

and give ``o = scale q^T S``. (Definitions: ``fla/ops/gated_delta_rule/naive.py`` and ``fla/ops/gdn2/naive.py`` of
fla-core 0.6.0; Gated DeltaNet, arXiv 2412.06464.)

Within a chunk of C tokens the updates depend on each other through a strictly lower triangular matrix
``A[i, j] = erase_i . (decay from j to i) . k_j``. Solving ``(I + A) [u, w] = [written values, decayed erase keys]``
gives for the state at the chunk's start ``new = u - w S``, after which everything is matrix products. What is computed
how, and why:

- a triangular solve instead of the usual row-by-row substitution: 64 dependent steps, each with a copy for autograd,
  become one call, and it is backward stable, unlike a product of powers of A;
- running sums as log2(C) shifted additions: ``cumsum`` has no deterministic form on CUDA and would be refused;
- GDN-2's decay per channel would need a ``[C, C, K]`` tensor. Instead the lower triangle is halved again and again:
  the lower left quarter is one product, with the decays measured from the first row of its rows, so that both factors
  are exponentials of something that is not positive and nothing overflows; the two triangles left are halved in turn.
No atomics, no benchmark, no data-dependent order: bit-exact from run to run on one kind of device.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["gdn", "gdn2"]


def _running_sum(x: Tensor, dim: int) -> Tensor:
    """Inclusive running sum along one dimension, as log2 shifted additions."""
    length, shift = x.shape[dim], 1
    while shift < length:
        zeros = torch.zeros_like(x.narrow(dim, 0, shift))
        x = x + torch.cat([zeros, x.narrow(dim, 0, length - shift)], dim=dim)
        shift *= 2
    return x


def _decayed_triangle(rows: Tensor, columns: Tensor, diagonal: Tensor, decay: Tensor) -> Tensor:
    """Lower triangle of ``M[i, j] = sum_d rows[i, d] columns[j, d] exp(decay[i, d] - decay[j, d])``; above it, zeros.

    Args:
        rows, columns: shape ``[..., C, K]``, C a power of two.
        diagonal: shape ``[..., C]``, put on the diagonal as it is.
        decay: running sum of log-decays, shape ``[..., C, K]``, not rising along C.

    Returns:
        Shape ``[..., C, C]``.
    """
    lead, length = rows.shape[:-2], rows.shape[-2]
    triangles = diagonal.reshape(*lead, length, 1, 1)
    size = 1
    while size < length:
        pairs = length // (2 * size)

        def halves(x: Tensor, pairs: int = pairs, size: int = size) -> tuple[Tensor, Tensor]:
            first, second = x.reshape(*x.shape[:-2], pairs, 2, size, x.shape[-1]).unbind(-3)
            return first, second

        early, late = halves(decay)
        border = late[..., :1, :]
        below = (halves(rows)[1] * torch.exp(late - border)) @ (
            halves(columns)[0] * torch.exp(border - early)
        ).transpose(-1, -2)
        upper, lower = triangles.reshape(*lead, pairs, 2, size, size).unbind(-3)
        triangles = torch.cat(
            [torch.cat([upper, torch.zeros_like(upper)], dim=-1), torch.cat([below, lower], dim=-1)], dim=-2
        )
        size *= 2
    return triangles.reshape(*lead, length, length)


def _scan(
    query: Tensor, tail: Tensor, solved: Tensor, scores: Tensor, carry: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Go through the chunks, carrying the state.

    Args:
        query: decayed queries, ``[B, H, N, C, K]``.
        tail: keys decayed to the chunk's end, ``[B, H, N, C, K]``.
        solved: ``[u, w]`` side by side, ``[B, H, N, C, V + K]``.
        scores: decayed products of queries and keys, lower triangle, ``[B, H, N, C, C]``.
        carry: decay over the whole chunk, ``[B, H, N, K or 1, 1]``.
        state: ``[B, H, K, V]``.

    Returns:
        Outputs ``[B, H, N, C, V]`` and the state after the last chunk.
    """
    values = state.shape[-1]
    outputs = []
    # unbind, not indexing: its backward is one stack, while indexing adds a full-size tensor for each chunk.
    for q, k, uw, a, decay in zip(*(x.unbind(2) for x in (query, tail, solved, scores, carry)), strict=True):
        new = uw[..., :values] - uw[..., values:] @ state
        outputs.append(q @ state + a @ new)
        state = decay * state + k.transpose(-1, -2) @ new
    return torch.stack(outputs, dim=2), state


def _chunks(x: Tensor, chunk: int) -> Tensor:
    """``[B, T, H, ...]`` to ``[B, H, N, C, ...]``, padded with zeros, which change neither state nor output."""
    batch, length, heads = x.shape[:3]
    missing = -length % chunk
    if missing:
        x = torch.cat([x, x.new_zeros(batch, missing, *x.shape[2:])], dim=1)
    return x.reshape(batch, -1, chunk, heads, *x.shape[3:]).movedim(3, 1).contiguous()


def _tokens(x: Tensor, length: int) -> Tensor:
    """``[B, H, N, C, V]`` back to ``[B, T, H, V]``."""
    return x.movedim(1, 3).flatten(1, 2)[:, :length]


def _solve(triangle: Tensor, written: Tensor, erased: Tensor) -> Tensor:
    # unitriangular: the ones of the identity are implied and the diagonal of ``triangle`` is not read.
    right = torch.cat([written, erased], dim=-1)
    solved: Tensor = torch.linalg.solve_triangular(triangle, right, upper=False, unitriangular=True)
    return solved


def gdn(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """GDN for one batch of equally long sequences, all tensors in the inner dtype; the scale is in ``q``."""
    length = q.shape[1]
    q, k, v, g, beta = (_chunks(x, chunk) for x in (q, k, v, g, beta))
    total = _running_sum(g, -1)  # [B, H, N, C]
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    # Masked before the exponential: above the diagonal the exponent is positive and could overflow.
    decay = torch.exp((total.unsqueeze(-1) - total.unsqueeze(-2)).masked_fill(later, -torch.inf))
    across = k.transpose(-1, -2)
    erase = k * beta.unsqueeze(-1)
    solved = _solve((erase @ across) * decay, v * beta.unsqueeze(-1), erase * torch.exp(total).unsqueeze(-1))
    last = total[..., -1:]
    outputs, state = _scan(
        q * torch.exp(total).unsqueeze(-1),
        k * torch.exp(last - total).unsqueeze(-1),
        solved,
        (q @ across) * decay,
        torch.exp(last).unsqueeze(-1),
        state,
    )
    return _tokens(outputs, length), state


def gdn2(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor, state: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """GDN-2 for one batch of equally long sequences, all tensors in the inner dtype; the scale is in ``q``."""
    length = q.shape[1]
    q, k, v, g, b, w = (_chunks(x, chunk) for x in (q, k, v, g, b, w))
    total = _running_sum(g, -2)  # [B, H, N, C, K]
    erase = b * k
    diagonal = (q * k).sum(-1)
    triangle = _decayed_triangle(erase, k, torch.zeros_like(diagonal), total)
    scores = _decayed_triangle(q, k, diagonal, total)
    solved = _solve(triangle, w * v, erase * torch.exp(total))
    last = total[..., -1:, :]
    outputs, state = _scan(
        q * torch.exp(total),
        k * torch.exp(last - total),
        solved,
        scores,
        torch.exp(last).transpose(-1, -2),
        state,
    )
    return _tokens(outputs, length), state
