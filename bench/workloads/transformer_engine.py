"""Triton operations of Transformer Engine: permutation of a mixture of experts, cross-entropy, and mHC."""

from __future__ import annotations

from .catalog import Tensor, Workload

_SCOPE = ("transformer_engine",)


def _permutation(tokens: int, hidden: int, experts: int, top: int) -> Workload:
    arguments = {
        "tokens": Tensor((tokens, hidden)),
        "routing": Tensor((tokens, experts), "int32", "routing", top),
        "probabilities": Tensor((tokens, experts), "float32", "sigmoid"),
        "top": top,
    }
    name = f"transformer_engine.permutation/t{tokens}x{hidden}e{experts}k{top}"
    return Workload(name, "bench.workloads.adapters:permutation", arguments, None, False, _SCOPE)


def _chunks(tokens: int, hidden: int, splits: int) -> Workload:
    arguments = {
        "tokens": Tensor((tokens, hidden)),
        "splits": Tensor((splits,), "int32", "constant", tokens // splits),
        "order": Tensor((splits,), "int32", "rising", splits),
        "probabilities": Tensor((tokens,), "float32", "sigmoid"),
    }
    name = f"transformer_engine.sort_chunks/t{tokens}x{hidden}s{splits}"
    return Workload(name, "bench.workloads.adapters:sort_chunks", arguments, None, False, _SCOPE)


def _cross_entropy(tokens: int, vocabulary: int, dtype: str) -> Workload:
    arguments = {
        "logits": Tensor((1, tokens, vocabulary), dtype),
        "target": Tensor((1, tokens), "int64", "tokens", vocabulary),
    }
    name = f"transformer_engine.cross_entropy/{tokens}x{vocabulary}{dtype}"
    return Workload(name, "bench.workloads.adapters:cross_entropy", arguments, None, False, _SCOPE)


def _mhc(tokens: int, hidden: int, dtype: str = "float32") -> Workload:
    arguments = {
        "x": Tensor((tokens, 1, hidden, 4)),
        "phi": Tensor((24, 4 * hidden), dtype, scale=0.02),
        "alpha": Tensor((3,), "float32"),
        "beta": Tensor((1, 24), "float32"),
        "bias": Tensor((hidden,)),
    }
    name = f"transformer_engine.mhc/t{tokens}x{hidden}{dtype}"
    return Workload(name, "bench.workloads.adapters:mhc_block", arguments, None, True, _SCOPE)


def _padding(rows: int, columns: int) -> Workload:
    arguments = {"inp": Tensor((rows, columns), "uint8", "tokens", 250)}
    name = f"transformer_engine.pad/{rows}x{columns}"
    call = "transformer_engine.pytorch.triton.pad:pad_columnwise_scale_inv"
    return Workload(name, call, arguments, None, False, _SCOPE)


WORKLOADS: tuple[Workload, ...] = (
    _permutation(8192, 4096, 64, 8),
    _permutation(8192, 2048, 128, 8),
    _permutation(4096, 7168, 256, 8),
    _chunks(65536, 4096, 64),
    _chunks(65536, 2048, 64),
    _cross_entropy(4096, 32000, "bfloat16"),
    _mhc(4096, 2048),
    _mhc(8192, 4096),
    _padding(126, 4096),
)
