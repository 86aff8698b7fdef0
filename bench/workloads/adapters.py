"""Steps that take several calls of a package, or an argument that is changed in place."""

from __future__ import annotations

import importlib
from typing import Any

__all__ = ["cross_entropy", "mhc_block", "mla_rope_q", "permutation", "sort_chunks"]


def mla_rope_q(t: Any, **rest: Any) -> Any:
    """RoPE of a query, which is changed in place: on a copy."""
    module = importlib.import_module("megatron.core.fusions.fused_mla_yarn_rope_apply")
    return module.fused_apply_mla_rope_for_q(t.clone(), **rest)


def permutation(tokens: Any, routing: Any, probabilities: Any, top: int) -> None:
    """Tokens to experts and back, forward and backward, with and without probabilities to merge by."""
    te = importlib.import_module("transformer_engine.pytorch.triton.permutation")
    (count, hidden), experts = tokens.shape, routing.shape[1]
    row_id_map = te.make_row_id_map(routing, count, experts)
    sent, _, sent_probabilities = te.permute_with_mask_map(
        tokens, row_id_map, probabilities, None, None, count, experts, count * top, hidden, 0
    )[:3]
    te.unpermute_with_mask_map(sent, row_id_map, None, sent_probabilities, None, count, experts, hidden)
    merged, _ = te.unpermute_with_mask_map(sent, row_id_map, probabilities, None, None, count, experts, hidden)[:2]
    te.unpermute_with_mask_map_bwd_with_merging_probs(
        merged, row_id_map, sent, probabilities, None, count, experts, count * top, hidden
    )
    te.permute_with_mask_map(tokens, row_id_map, None, None, None, count, experts, count * top, hidden, 0)


def sort_chunks(tokens: Any, splits: Any, order: Any, probabilities: Any) -> None:
    """Chunks of tokens in another order, and back."""
    te = importlib.import_module("transformer_engine.pytorch.triton.permutation")
    count, hidden = tokens.shape
    row_id_map = te.make_chunk_sort_map(splits, order, count, splits.shape[0])
    sent, sent_probabilities = te.sort_chunks_by_map(tokens, row_id_map, probabilities, count, hidden, True)
    te.sort_chunks_by_map(sent, row_id_map, sent_probabilities, count, hidden, False)
    te.sort_chunks_by_map(sent, row_id_map, None, count, hidden, False)


def cross_entropy(logits: Any, target: Any) -> None:
    """Transformer Engine's cross-entropy, forward and, as far as it is a kernel, backward."""
    te = importlib.import_module("transformer_engine.pytorch.triton.cross_entropy")
    te.cross_entropy_forward(logits, target, 0.0, False, None, -100, False)


def mhc_block(x: Any, phi: Any, alpha: Any, beta: Any, bias: Any) -> Any:
    """One block of a network with hyper-connections, around the identity."""
    te = importlib.import_module("transformer_engine.pytorch.triton.mhc")
    inner, post, residual = te.mhc_generate_mix_and_aggregate(x, phi, alpha, beta)
    return te.mhc_fused_expand_combine(inner, bias, post, x, residual, 4)
