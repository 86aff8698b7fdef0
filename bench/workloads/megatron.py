"""Operations of megatron-core 0.19.2: RoPE of multi-head latent attention, and its copies of the SSD kernels."""

from __future__ import annotations

from typing import Any

from .catalog import Tensor, Workload

_SCOPE = ("megatron",)
_ROPE = "megatron.core.fusions.fused_mla_yarn_rope_apply"
_SSM = "megatron.core.ssm.ops"


def _rope_q(tokens: int, heads: int, head: int, rotary: int) -> Workload:
    table = Tensor((tokens, 1, 1, rotary), "float32", "uniform", grad=False)
    arguments: dict[str, Any] = {
        # In place, so on something that is no leaf: the adapter copies it.
        "t": Tensor((tokens, 1, heads, head + rotary)),
        "cos": table,
        "sin": table,
        "qk_head_dim": head,
        "emb_dim": rotary,
    }
    name = f"megatron.mla_rope_q/t{tokens}h{heads}d{head}r{rotary}"
    return Workload(name, "bench.workloads.adapters:mla_rope_q", arguments, None, True, _SCOPE)


def _rope_kv(tokens: int, heads: int, head: int, value: int, rotary: int) -> Workload:
    table = Tensor((tokens, 1, 1, rotary), "float32", "uniform", grad=False)
    arguments: dict[str, Any] = {
        "kv": Tensor((tokens, 1, heads, head + value)),
        "k_pos_emb": Tensor((tokens, 1, 1, rotary)),
        "cos": table,
        "sin": table,
        "emb_dim": rotary,
        "k_dim": head,
        "v_dim": value,
    }
    name = f"megatron.mla_rope_kv/t{tokens}h{heads}d{head}v{value}r{rotary}"
    return Workload(name, f"{_ROPE}:fused_apply_mla_rope_for_kv", arguments, None, True, _SCOPE)


def _ssd(tokens: int, heads: int, size: int, groups: int, state: int, chunk: int) -> Workload:
    chunks = tokens // chunk
    arguments: dict[str, Any] = {
        "x": Tensor((tokens, heads, size)),
        "dt": Tensor((tokens, heads)),
        "A": Tensor((heads,), "float32", "constant", -0.7),
        "B": Tensor((tokens, groups, state), scale=0.3),
        "C": Tensor((tokens, groups, state), scale=0.3),
        "chunk_size": chunk,
        "cu_chunk_seqlens": Tensor((chunks + 1,), "int32", "bounds", tokens),
        "last_chunk_indices": Tensor((1,), "int32", "constant", chunks - 1),
        "seq_idx": Tensor((chunks,), "int32", "constant", 0.0),
        "out": Tensor((tokens, heads, size)),
        "D": Tensor((heads,), "float32"),
        "dt_bias": Tensor((heads,), "float32", scale=0.1),
        "dt_softplus": True,
    }
    name = f"megatron.ssd_varlen/t{tokens}h{heads}d{size}g{groups}s{state}c{chunk}"
    return Workload(name, f"{_SSM}.ssd_combined:mamba_chunk_scan_combined_varlen", arguments, None, False, _SCOPE)


def _convolution(tokens: int, channels: int) -> Workload:
    arguments = {
        "x": Tensor((tokens, channels)),
        "weight": Tensor((channels, 4)),
        "bias": Tensor((channels,)),
        "cu_seqlens": Tensor((9,), "int32", "bounds", tokens),
    }
    name = f"megatron.causal_conv1d_varlen/{tokens}x{channels}"
    return Workload(name, f"{_SSM}.causal_conv1d_varlen:causal_conv1d_varlen_fn", arguments, None, False, _SCOPE)


WORKLOADS: tuple[Workload, ...] = (
    _rope_q(4096, 128, 128, 64),
    _rope_q(8192, 16, 128, 64),
    _rope_kv(4096, 128, 128, 128, 64),
    _rope_kv(8192, 16, 128, 128, 64),
    _ssd(8192, 128, 64, 8, 128, 128),
    _ssd(4096, 80, 64, 1, 128, 256),
    _convolution(8192, 10240),
    _convolution(4096, 5376),
)
