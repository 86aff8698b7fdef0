"""The gated delta rule in plain torch, with the arguments of FLA's functions, for GDN and GDN-2.

Computed in float32 (float64 for float64 input, which makes each function its own reference) and rounded once at the
end. Packed sequences are computed one by one, so each gives the bits that it gives alone. Where FLA's functions take
an argument that has no meaning here, context parallelism for one, it is refused by name.

The arithmetic is in :mod:`tuning.determinism.delta_chunks`; arguments and meaning as in ``chunk_gated_delta_rule`` and
``chunk_gdn2`` of fla-core 0.6.0.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tuning.determinism.delta_chunks import gdn, gdn2
from tuning.determinism.l2norm import l2_normalize
from tuning.determinism.packed import no_unknown, sequence_bounds
from tuning.determinism.refusal import refusal, refuse

__all__ = ["chunk_gated_delta_rule", "chunk_gdn2"]


def _power_of_two(chunk_size: int) -> list[str]:
    if isinstance(chunk_size, int) and chunk_size > 0 and chunk_size & (chunk_size - 1) == 0:
        return []
    return [f"chunk_size must be a power of two, got {chunk_size!r}: FLA uses 64"]


def _shape(name: str, x: Tensor | None, expected: tuple[int, ...]) -> list[str]:
    if x is not None and tuple(x.shape) == expected:
        return []
    return [f"{name} must have shape {list(expected)}, got {None if x is None else list(x.shape)}"]


def _layout(state_v_first: bool, unknown: dict[str, Any]) -> bool:
    """The state's layout, also under the name that FLA used before."""
    return bool(state_v_first or unknown.pop("transpose_state_layout", False))


def _run(
    rule: Callable[..., tuple[Tensor, Tensor]],
    sequences: Sequence[Tensor],
    heads: int,
    initial_state: Tensor | None,
    output_final_state: bool,
    state_v_first: bool,
    cu_seqlens: Tensor | None,
    cu_seqlens_cpu: Tensor | None,
) -> tuple[Tensor, Tensor | None]:
    """Run a rule over a batch, or over packed sequences one by one, in the inner dtype.

    Args:
        rule: called with the sequences (time is dimension 1) and the state before them, in the inner dtype; it gives
            outputs and the state after them.
        sequences: query first, values third.
    """
    q, values = sequences[0], sequences[2].shape[-1]
    bounds = sequence_bounds(q, cu_seqlens, cu_seqlens_cpu)
    count, keys = q.shape[0] if bounds is None else len(bounds), q.shape[-1]
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    if initial_state is None:
        state = q.new_zeros(count, heads, keys, values, dtype=wide)
    else:
        layout = (values, keys) if state_v_first else (keys, values)
        refuse("this gated delta rule", _shape("initial_state", initial_state, (count, heads, *layout)))
        state = (initial_state.transpose(-1, -2) if state_v_first else initial_state).to(wide)
    outputs, finals = [], []
    for n, (start, stop) in enumerate(bounds or [(0, q.shape[1])]):
        before = state if bounds is None else state[n : n + 1]
        if start == stop:
            finals.append(before)
            continue
        o, after = rule(*(x[:, start:stop] for x in sequences), before)
        outputs.append(o)
        finals.append(after)
    o = torch.cat(outputs, dim=1) if outputs else q.new_zeros(q.shape[0], 0, heads, values)
    final = torch.cat(finals, dim=0) if output_final_state else None
    if final is not None and state_v_first:
        final = final.transpose(-1, -2).contiguous()
    return o.to(q.dtype), final


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    chunk_indices: Tensor | None = None,
    cp_context: Any = None,
    *,
    chunk_size: int = 64,
    use_gate_in_kernel: bool = False,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    **unknown: Any,
) -> tuple[Tensor, Tensor | None]:
    """The gated delta rule (GDN) in plain torch, with the arguments of FLA's ``chunk_gated_delta_rule``.

    Args:
        q, k: shape ``[B, T, H, K]``.
        v: shape ``[B, T, HV, V]``; HV a multiple of H, and then each query head serves HV / H value heads.
        g: log-decay of shape ``[B, T, HV]``, or the gate before its activation (see ``use_gate_in_kernel``).
        beta: shape ``[B, T, HV]``.
        scale: of the queries; None means ``K ** -0.5``.
        initial_state: shape ``[N, HV, K, V]``, or None for zeros.
        output_final_state: return the state after the last token too.
        use_qk_l2norm_in_kernel: normalise the rows of ``q`` and ``k`` first.
        use_beta_sigmoid_in_kernel: apply a sigmoid to ``beta`` first.
        allow_neg_eigval: double that sigmoid; needs ``use_beta_sigmoid_in_kernel``.
        state_v_first: states have shape ``[N, HV, V, K]``.
        cu_seqlens, cu_seqlens_cpu: bounds of N sequences packed in a batch of one.
        chunk_indices: ignored.
        cp_context: must be None.
        chunk_size: tokens handled at once, a power of two.
        use_gate_in_kernel: the log-decay is ``-exp(A_log) * softplus(g + dt_bias)``.
        A_log, dt_bias: shape ``[HV]``; ``dt_bias`` may be None.
        unknown: must all be None or False.

    Returns:
        Output ``[B, T, HV, V]`` in the dtype of ``q``, and the final state in float32, or None.

    Raises:
        DeterminismError: a shape, bound or argument that cannot be used; all problems are listed.
    """
    state_v_first = _layout(state_v_first, unknown)
    problems = no_unknown("chunk_gated_delta_rule", {"cp_context": cp_context, **unknown}) + _power_of_two(chunk_size)
    if q.dim() != 4 or v.dim() != 4 or v.shape[2] % q.shape[2]:
        problems.append(
            f"q and v must have shapes [B, T, H, K] and [B, T, HV, V] with HV a multiple of H, got {list(q.shape)} and "
            f"{list(v.shape)}"
        )
        raise refusal("this gated delta rule", problems)
    batch, length, key_heads, _ = q.shape
    heads = v.shape[2]
    problems += _shape("k", k, tuple(q.shape)) + _shape("v", v, (batch, length, heads, v.shape[3]))
    problems += _shape("g", g, (batch, length, heads)) + _shape("beta", beta, (batch, length, heads))
    if use_gate_in_kernel and A_log is None:
        problems.append("A_log must be given with use_gate_in_kernel=True, got None")
    if allow_neg_eigval and not use_beta_sigmoid_in_kernel:
        problems.append("allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True, got False")
    refuse("this gated delta rule", problems)

    def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        if use_qk_l2norm_in_kernel:
            q, k = l2_normalize(q), l2_normalize(k)
        q, k, v, g, beta = (x.to(state.dtype) for x in (q, k, v, g, beta))
        if use_gate_in_kernel and A_log is not None:
            biased = g if dt_bias is None else g + dt_bias.to(g.dtype)
            g = -torch.exp(A_log.to(g.dtype)) * torch.nn.functional.softplus(biased)
        if use_beta_sigmoid_in_kernel:
            beta = torch.sigmoid(beta) * (2.0 if allow_neg_eigval else 1.0)
        q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
        if heads != key_heads:
            # expand, not repeat_interleave: the backward of expand is a sum, the other's adds by index.
            q, k = (
                x.unsqueeze(3).expand(-1, -1, -1, heads // key_heads, -1).reshape(*x.shape[:2], heads, -1)
                for x in (q, k)
            )
        return gdn(q, k, v, g, beta, state, chunk_size)

    with torch.autocast(device_type=q.device.type, enabled=False):
        return _run(
            rule, (q, k, v, g, beta), heads, initial_state, output_final_state, state_v_first, cu_seqlens,
            cu_seqlens_cpu,
        )  # fmt: skip


def chunk_gdn2(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    b: Tensor,
    w: Tensor,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    safe_gate: bool = False,
    lower_bound: float | None = None,
    disable_recompute: bool = False,
    return_intermediate_states: bool = False,
    state_v_first: bool = False,
    cp_context: Any = None,
    *,
    chunk_size: int = 64,
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    **unknown: Any,
) -> tuple[Tensor, Tensor | None]:
    """GDN-2 in plain torch, with the arguments of FLA's ``chunk_gdn2``.

    Args:
        q, k: shape ``[B, T, H, K]``.
        v: shape ``[B, T, H, V]``.
        g: log-decay of shape ``[B, T, H, K]``, or the gate before its activation (see ``use_gate_in_kernel``).
        b: erase gate, shape ``[B, T, H, K]``.
        w: write gate, shape ``[B, T, H, V]``.
        scale: of the queries; None means ``K ** -0.5``.
        initial_state: shape ``[N, H, K, V]``, or None for zeros.
        output_final_state: return the state after the last token too.
        use_qk_l2norm_in_kernel: normalise the rows of ``q`` and ``k`` first.
        use_gate_in_kernel: the log-decay is ``-exp(A_log) * softplus(g + dt_bias)``, or with ``lower_bound``
            ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``.
        cu_seqlens, cu_seqlens_cpu: bounds of N sequences packed in a batch of one.
        safe_gate, disable_recompute: ignored; they choose between FLA's kernels.
        lower_bound: see ``use_gate_in_kernel``.
        return_intermediate_states: must be False.
        state_v_first: states have shape ``[N, H, V, K]``.
        cp_context: must be None.
        chunk_size: tokens handled at once, a power of two.
        A_log: shape ``[H]``; may be None with ``lower_bound``.
        dt_bias: ``H * K`` elements, or None.
        unknown: must all be None or False.

    Returns:
        Output ``[B, T, H, V]`` in the dtype of ``q``, and the final state in float32, or None.

    Raises:
        DeterminismError: a shape, bound or argument that cannot be used; all problems are listed.
    """
    state_v_first = _layout(state_v_first, unknown)
    asked = {"cp_context": cp_context, "return_intermediate_states": return_intermediate_states, **unknown}
    problems = no_unknown("chunk_gdn2", asked) + _power_of_two(chunk_size)
    if q.dim() != 4 or v.dim() != 4:
        problems.append(
            f"q and v must have shapes [B, T, H, K] and [B, T, H, V], got {list(q.shape)} and {list(v.shape)}"
        )
        raise refusal("this gated delta rule", problems)
    batch, length, heads, _ = q.shape
    values = (batch, length, heads, v.shape[3])
    problems += _shape("k", k, tuple(q.shape)) + _shape("v", v, values) + _shape("g", g, tuple(q.shape))
    problems += _shape("b", b, tuple(q.shape)) + _shape("w", w, values)
    if use_gate_in_kernel and A_log is None and lower_bound is None:
        problems.append("A_log must be given with use_gate_in_kernel=True and no lower_bound, got None")
    refuse("this gated delta rule", problems)

    def rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, w: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        if use_qk_l2norm_in_kernel:
            q, k = l2_normalize(q), l2_normalize(k)
        q, k, v, g, b, w = (x.to(state.dtype) for x in (q, k, v, g, b, w))
        if use_gate_in_kernel:
            biased = g if dt_bias is None else g + dt_bias.to(g.dtype).reshape(heads, -1)
            rate = None if A_log is None else torch.exp(A_log.to(g.dtype)).reshape(heads, 1)
            if lower_bound is not None:
                g = lower_bound * torch.sigmoid(biased if rate is None else rate * biased)
            elif rate is not None:
                g = -rate * torch.nn.functional.softplus(biased)
        q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
        return gdn2(q, k, v, g, b, w, state, chunk_size)

    with torch.autocast(device_type=q.device.type, enabled=False):
        return _run(
            rule, (q, k, v, g, b, w), heads, initial_state, output_final_state, state_v_first, cu_seqlens,
            cu_seqlens_cpu,
        )  # fmt: skip
