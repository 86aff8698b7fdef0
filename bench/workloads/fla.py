"""Operations and modules of fla-core 0.6.0 that its models use, at the head sizes that models have.

Autotuners of FLA are keyed by head counts and sizes, not by the number of tokens: shapes differ in those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from .catalog import Tensor, Workload


class Heads(NamedTuple):
    """Tokens, heads, and sizes of keys and values of a head."""

    heads: int = 16
    key: int = 128
    value: int = 128
    tokens: int = 4096

    @property
    def text(self) -> str:
        """Part of a workload's name."""
        return f"t{self.tokens}h{self.heads}k{self.key}v{self.value}"


LARGE = Heads()
SMALL = Heads(32, 64, 64, 4096)
WIDE = Heads(8, 128, 256, 4096)
SHORT = Heads(16, 128, 128, 1024)
SHORT_SMALL = Heads(16, 64, 64, 1024)
DECODE = Heads(16, 128, 128, 256)

Arguments = Mapping[str, Any]


def qkv(h: Heads) -> dict[str, Any]:
    """Queries, keys and values of every operation here."""
    return {
        "q": Tensor((1, h.tokens, h.heads, h.key)),
        "k": Tensor((1, h.tokens, h.heads, h.key), fill="unit"),
        "v": Tensor((1, h.tokens, h.heads, h.value)),
    }


def per_head(h: Heads, fill: str, dtype: str = "bfloat16", scale: float = 1.0) -> Tensor:
    """A value for each token and head."""
    return Tensor((1, h.tokens, h.heads), dtype, fill, scale)


def per_key(h: Heads, fill: str = "normal", dtype: str = "bfloat16", scale: float = 1.0) -> Tensor:
    """A value for each token, head and key dimension."""
    return Tensor((1, h.tokens, h.heads, h.key), dtype, fill, scale)


def _decay(h: Heads) -> dict[str, Any]:
    return {**qkv(h), "g": per_head(h, "log_decay", "float32", 0.1)}


def _gated_delta(h: Heads) -> dict[str, Any]:
    return {**_decay(h), "beta": per_head(h, "sigmoid")}


def _delta(h: Heads) -> dict[str, Any]:
    return {**qkv(h), "beta": per_head(h, "sigmoid")}


def _gla(h: Heads) -> dict[str, Any]:
    return {**qkv(h), "g": per_key(h, "log_decay", "bfloat16", 0.1)}


def _recurrent_gla(h: Heads) -> dict[str, Any]:
    return {**qkv(h), "gk": per_key(h, "log_decay", "bfloat16", 0.1)}


def _kda(h: Heads) -> dict[str, Any]:
    return {**qkv(h), "g": per_key(h, "log_decay", "float32", 0.1), "beta": per_head(h, "sigmoid")}


def _lightning(h: Heads) -> dict[str, Any]:
    return {**qkv(h), "layer_idx": 2, "num_layers": 24}


def _rwkv6(h: Heads) -> dict[str, Any]:
    found = qkv(h)
    return {
        "r": found["q"],
        "k": found["k"],
        "v": found["v"],
        "w": per_key(h, "log_decay", "bfloat16", 0.5),
        "u": Tensor((h.heads, h.key)),
    }


def _rwkv7(h: Heads) -> dict[str, Any]:
    found = qkv(h)
    return {
        "r": found["q"],
        "w": per_key(h, "log_decay", "bfloat16", 0.5),
        "k": found["k"],
        "v": found["v"],
        "a": per_key(h, "unit", scale=-1.0),
        "b": per_key(h, "unit"),
    }


def _dplr(h: Heads) -> dict[str, Any]:
    return {
        **qkv(h),
        "a": per_key(h, "unit", scale=-1.0),
        "b": per_key(h, "unit"),
        "gk": per_key(h, "log_decay", "bfloat16", 0.5),
    }


def _iplr(h: Heads) -> dict[str, Any]:
    return {**qkv(h), "a": per_key(h, "unit", scale=-1.0), "b": per_key(h, "unit")}


def _comba(h: Heads) -> dict[str, Any]:
    return {**_gated_delta(h), "p": per_key(h, "unit")}


def _slots(h: Heads) -> dict[str, Any]:
    return {**qkv(h), "s": Tensor((1, h.tokens, h.heads, 64))}


def _gsa(h: Heads) -> dict[str, Any]:
    return {**_slots(h), "g": Tensor((1, h.tokens, h.heads, 64), fill="log_decay", scale=0.1)}


def _hgrn(h: Heads) -> dict[str, Any]:
    size = (1, h.tokens, h.heads * h.value)
    return {"x": Tensor(size), "g": Tensor(size, fill="log_decay")}


def _path(h: Heads) -> dict[str, Any]:
    return {
        **qkv(h),
        "w": per_key(h, "unit", "float32"),
        "beta": per_head(h, "sigmoid", "float32"),
        "g": per_head(h, "log_decay", "float32", 0.1),
    }


def _forgetting(h: Heads) -> dict[str, Any]:
    return {**qkv(h), "g": per_head(h, "log_decay", "bfloat16", 0.1)}


def _nsa(h: Heads) -> dict[str, Any]:
    queries = Tensor((1, h.tokens, h.heads * 16, h.key))
    gate = Tensor((1, h.tokens, h.heads * 16), fill="sigmoid")
    return {**qkv(h), "q": queries, "g_cmp": gate, "g_slc": gate, "block_counts": 16, "block_size": 64}


def _mesa(h: Heads) -> dict[str, Any]:
    return {
        **qkv(h),
        "g": per_head(h, "log_decay", "float32", 0.1),
        "beta": per_head(h, "sigmoid"),
        "lamb": Tensor((h.heads, h.key), "float32", "uniform"),
        "max_CG_iteration": 8,
    }


def _gated_product(h: Heads) -> dict[str, Any]:
    double = h._replace(tokens=2 * h.tokens)
    return {
        **qkv(double),
        "q": qkv(h)["q"],
        "g": per_head(h, "log_decay", "float32", 0.1),
        "beta": per_head(double, "sigmoid"),
        "num_householder": 2,
    }


def _log_linear(h: Heads) -> dict[str, Any]:
    levels = h.tokens.bit_length()
    one = Heads(1, h.key, h.value, h.tokens)
    return {
        **qkv(h),
        "q": qkv(one)["q"],
        "k": qkv(one)["k"],
        "g": per_head(h, "log_decay", "float32", 0.1),
        "level_scales": Tensor((1, h.tokens, h.heads, levels), fill="sigmoid"),
    }


def _oja(h: Heads) -> dict[str, Any]:
    gate = Tensor((1, h.tokens, h.heads, h.value), "float32", "log_decay", 0.1)
    return {**qkv(h), "gv": gate, "beta": per_head(h, "sigmoid")}


def _ttt(h: Heads) -> dict[str, Any]:
    return {
        **qkv(h),
        "w": Tensor((h.heads, h.value)),
        "b": Tensor((h.heads, h.value)),
        "eta": Tensor((1, h.tokens, h.heads, 1), fill="sigmoid", scale=0.05),
        "chunk_size": 16,
    }


def _gdn2(h: Heads) -> dict[str, Any]:
    return {
        **qkv(h),
        "g": per_key(h, "log_decay", "float32", 0.1),
        "b": per_key(h, "sigmoid"),
        "w": Tensor((1, h.tokens, h.heads, h.value), fill="sigmoid"),
    }


def _preconditioned(h: Heads) -> dict[str, Any]:
    return {
        **_gated_delta(h),
        "g_atk": per_head(h, "log_decay", "float32", 0.1),
        "beta_atk": per_head(h, "sigmoid"),
    }


def _preconditioned_kda(h: Heads) -> dict[str, Any]:
    return {
        **_kda(h),
        "g_atk": per_head(h, "log_decay", "float32", 0.1),
        "beta_atk": per_head(h, "sigmoid"),
    }


def _momentum(h: Heads) -> dict[str, Any]:
    return {
        **_delta(h),
        "log_alpha": per_head(h, "log_decay", "float32", 0.1),
        "log_mu": per_head(h, "log_decay", "float32", 0.1),
    }


def _wall(h: Heads) -> dict[str, Any]:
    return {**qkv(h), "g": per_key(h, "log_decay", "float32", 0.01)}


def _same(h: Heads) -> dict[str, Any]:
    return qkv(h)


Family = tuple[str, Callable[[Heads], Arguments], tuple[Heads, ...], bool]

TRAINED: tuple[Family, ...] = (
    ("gated_delta_rule:chunk_gated_delta_rule", _gated_delta, (LARGE, SMALL, WIDE), False),
    ("delta_rule:chunk_delta_rule", _delta, (LARGE, SMALL), True),
    ("gla:chunk_gla", _gla, (LARGE, SMALL), True),
    ("simple_gla:chunk_simple_gla", _decay, (LARGE, SMALL), True),
    ("retention:chunk_retention", _same, (WIDE,), True),
    ("kda:chunk_kda", _kda, (LARGE, SMALL), True),
    ("rwkv6:chunk_rwkv6", _rwkv6, (SMALL,), True),
    ("rwkv7:chunk_rwkv7", _rwkv7, (SMALL,), True),
    ("comba:chunk_comba", _comba, (LARGE,), True),
    ("hgrn:chunk_hgrn", _hgrn, (LARGE,), True),
    ("hgrn:fused_recurrent_hgrn", _hgrn, (LARGE,), True),
    ("path_attn:parallel_path_attn", _path, (SHORT_SMALL,), True),
    ("nsa:parallel_nsa", _nsa, (Heads(4, 64, 64, 2048),), True),
    ("gated_delta_product:chunk_gated_delta_product", _gated_product, (LARGE,), True),
    ("log_linear_attn:chunk_log_linear_attn", _log_linear, (SHORT_SMALL,), True),
    ("mesa_net:chunk_mesa_net", _mesa, (SHORT,), True),
    ("generalized_delta_rule:chunk_iplr_delta_rule", _iplr, (SHORT_SMALL,), False),
    ("gated_oja_rule:chunk_gated_oja_rule", _oja, (SHORT_SMALL,), True),
    ("simple_gla:parallel_simple_gla", _decay, (SHORT,), True),
    ("simple_gla:fused_chunk_simple_gla", _decay, (SHORT,), True),
    ("stickbreaking_attn:parallel_stickbreaking_attn", _same, (SHORT_SMALL,), True),
    ("ttt:chunk_ttt_linear", _ttt, (SHORT_SMALL,), True),
    ("gdn2:chunk_gdn2", _gdn2, (SHORT,), True),
    ("precond_gated_delta_rule:chunk_precond_gated_delta_rule", _preconditioned, (SHORT,), True),
    ("precond_kda:chunk_precond_kda", _preconditioned_kda, (SHORT,), True),
    ("momentum_delta_rule:chunk_momentum_delta_rule", _momentum, (SHORT_SMALL,), True),
)
"""Operation, its arguments, heads, and whether it has a backward here. With a gate for each head, the backward of some
refuses Triton 3.4 to 3.7.0 on Hopper (fla-core 0.6.0, fla/ops/common/chunk_o.py); what runs before it is recorded."""

LATER: tuple[Family, ...] = (
    ("lightning_attn:chunk_lightning_attn", _lightning, (LARGE,), True),
    ("forgetting_attn:parallel_forgetting_attn", _forgetting, (LARGE,), True),
    ("gsa:chunk_gsa", _gsa, (LARGE,), True),
    ("linear_attn:chunk_linear_attn", _same, (LARGE,), True),
    ("wall_attn:parallel_wall_attn", _wall, (SHORT_SMALL,), True),
    ("lightnet:chunk_lightnet", _same, (SHORT_SMALL,), True),
)
"""Operations with many candidates for few kernels of their own."""

GATED_BACKWARD: tuple[Family, ...] = (("gated_delta_rule:chunk_gated_delta_rule", _gated_delta, (LARGE,), True),)
"""For versions of Triton that the backward accepts."""

DECODED: tuple[Family, ...] = (
    ("gated_delta_rule:fused_recurrent_gated_delta_rule", _gated_delta, (DECODE,), False),
    ("gla:fused_recurrent_gla", _recurrent_gla, (DECODE,), True),
    ("simple_gla:fused_recurrent_simple_gla", _decay, (DECODE,), True),
    ("rwkv6:fused_recurrent_rwkv6", _rwkv6, (DECODE,), True),
    ("rwkv7:fused_recurrent_rwkv7", _rwkv7, (DECODE,), False),
    ("generalized_delta_rule:fused_recurrent_dplr_delta_rule", _dplr, (DECODE,), False),
    ("generalized_delta_rule:fused_recurrent_iplr_delta_rule", _iplr, (DECODE,), True),
    ("gsa:fused_recurrent_gsa", _gsa, (DECODE,), True),
)
"""Operations that generate, on a few tokens."""


def _operations(families: tuple[Family, ...], label: str = "", rank: int = 0) -> Iterator[Workload]:
    for call, arguments, shapes, backward in families:
        name = call.partition(":")[2]
        for index, heads in enumerate(shapes):
            at = f"fla.{name}{label}/{heads.text}"
            yield Workload(at, f"fla.ops.{call}", arguments(heads), None, backward, ("fla",), rank + index)


def _module(
    name: str,
    call: str,
    arguments: Arguments,
    construct: Arguments | None = None,
    backward: bool = True,
    rank: int = 0,
) -> Workload:
    return Workload(f"fla.{name}", f"fla.{call}", arguments, construct, backward, ("fla",), rank)


def _norms(tokens: int, hidden: int) -> Iterator[Workload]:
    x = Tensor((tokens, hidden))
    weight, bias = Tensor((hidden,), fill="uniform"), Tensor((hidden,))
    square = Tensor((hidden, hidden), scale=0.02)
    at = f"{tokens}x{hidden}"
    yield _module(f"rms_norm/{at}", "modules.norm.layernorm:rms_norm", {"x": x, "weight": weight, "bias": None})
    yield _module(f"layer_norm/{at}", "modules.norm.layernorm:layer_norm", {"x": x, "weight": weight, "bias": bias})
    yield _module(
        f"rms_norm_residual/{at}",
        "modules.norm.layernorm:rms_norm",
        {"x": x, "weight": weight, "bias": None, "residual": x, "prenorm": True},
    )
    yield _module(
        f"rms_norm_gated/{at}",
        "modules.norm.fused_norm_gate:rms_norm_gated",
        {"x": x, "g": x, "weight": weight, "bias": None},
    )
    yield _module(
        f"layer_norm_gated/{at}",
        "modules.norm.fused_norm_gate:layer_norm_gated",
        {"x": x, "g": x, "weight": weight, "bias": bias},
    )
    if hidden <= 2048:
        yield _module(
            f"rms_norm_linear/{at}",
            "modules.norm.layernorm:rms_norm_linear",
            {"x": x, "norm_weight": weight, "norm_bias": None, "linear_weight": square, "linear_bias": None},
        )


def _modules() -> Iterator[Workload]:
    yield from _norms(8192, 2048)
    yield from _norms(8192 * 16, 128)
    yield from _norms(4096, 4096)
    for tokens, size in ((8192 * 16, 128), (8192 * 32, 64), (4096, 2048)):
        yield _module(f"l2norm/{tokens}x{size}", "modules.norm.l2norm:l2norm", {"x": Tensor((tokens, size))})
    for rank, hidden in enumerate((2048, 4096)):
        x = Tensor((1, 4096, hidden))
        yield _module(
            f"causal_conv1d/4096x{hidden}",
            "modules.causal_conv1d:causal_conv1d",
            {"x": x, "weight": Tensor((hidden, 4)), "bias": None, "activation": "silu"},
            rank=rank,
        )
        yield _module(f"token_shift/4096x{hidden}", "modules.token_shift:token_shift", {"x": x}, rank=rank)
    yield _module(
        "causal_conv1d_update/64x2048",
        "modules.causal_conv1d:causal_conv1d_update",
        {"x": Tensor((64, 2048)), "cache": Tensor((64, 2048, 4)), "weight": Tensor((2048, 4)), "activation": "silu"},
        backward=False,
    )
    for rank, (heads, size) in enumerate(((16, 128), (32, 64))):
        table = Tensor((4096, size // 2), fill="uniform", grad=False)
        yield _module(
            f"rotary/4096x{heads}x{size}",
            "modules.rotary:rotary_embedding",
            {"x": Tensor((1, 4096, heads, size)), "cos": table, "sin": table},
            rank=rank,
        )
    for rank, hidden in enumerate((5632, 11008)):
        pair = {"*x": Tensor((8192, hidden)), "*y": Tensor((8192, hidden))}
        yield _module(f"swiglu/8192x{hidden}", "modules.activations:swiglu", pair, rank=2 * rank)
    yield _module("swish/8192x5632", "modules.activations:swish", {"*x": Tensor((8192, 5632))})
    small = Tensor((8192, 2048))
    yield _module("sigmoidglu/8192x2048", "modules.activations:sigmoidglu", {"*x": small, "*y": small})
    yield _module("powglu/8192x2048", "modules.activations:powglu", {"*x": small, "*y": small})
    yield _module("logsigmoid/8192x2048", "modules.activations:logsigmoid", {"*x": small})
    yield _module("sigmoid/8192x2048", "modules.activations:sigmoid", {"*x": small})
    yield _module(
        "swiglu_linear/8192x5632",
        "modules.activations:swiglu_linear",
        {
            "*x": Tensor((8192, 5632)),
            "*y": Tensor((8192, 5632)),
            "*weight": Tensor((2048, 5632), scale=0.02),
            "*bias": None,
        },
    )
    # Without an autotuner in this version: there to be seen, and for versions that have one.
    vocabulary = 32000
    labels = Tensor((4096,), "int64", "tokens", vocabulary)
    yield _module(
        f"cross_entropy/4096x{vocabulary}",
        "modules.fused_cross_entropy:FusedCrossEntropyLoss",
        {"*input": Tensor((4096, vocabulary)), "*target": labels},
        {},
    )
    yield _module(
        f"linear_cross_entropy/4096x2048x{vocabulary}",
        "modules.fused_linear_cross_entropy:FusedLinearCrossEntropyLoss",
        {
            "*x": Tensor((4096, 2048)),
            "*target": labels,
            "*weight": Tensor((vocabulary, 2048), scale=0.02),
            "*bias": None,
        },
        {},
    )
    yield _module(
        "grpo/2x1024x32000",
        "modules.grpo:fused_grpo_loss",
        {
            "logits": Tensor((2, 1025, 32000)),
            "ref_logp": Tensor((2, 1024), "float32", grad=False),
            "input_ids": Tensor((2, 1024), "int64", "tokens", 32000),
            "advantages": Tensor((2,), "float32", grad=False),
        },
    )
    yield _module(
        "bit_linear/4096x2048",
        "modules.fused_bitlinear:FusedBitLinear",
        {"*x": Tensor((1, 4096, 2048))},
        {"in_features": 2048, "out_features": 2048},
    )
    # RWKV-7's own parts
    hidden, mix = Tensor((1, 4096, 2048)), Tensor((1, 1, 2048), fill="uniform")
    yield _module(
        "rwkv7_addcmul/4096x2048",
        "ops.rwkv7.fused_addcmul:fused_addcmul_rwkv7",
        {
            "hidden_states": hidden,
            "delta": hidden,
            **dict.fromkeys(("xr", "xw", "xk", "xv", "xa", "xg"), mix),
        },
    )
    yield _module(
        "rwkv7_k_update/4096x2048",
        "ops.rwkv7.fused_k_update:fused_k_rwkv7",
        {"k": hidden, "a": hidden, "ka": Tensor((2048,))},
    )
    heads = Tensor((1, 4096, 32, 64))
    yield _module(
        "rwkv7_gate_output/4096x32x64",
        "ops.rwkv7.gate_output_correction:gate_output_correction",
        {"o": hidden, "r": heads, "k": heads, "r_k": Tensor((32, 64)), "v": heads, "g": hidden},
    )
    yield _module(
        "rwkv7_channel_mixing/4096x2048",
        "ops.rwkv7.channel_mixing:channel_mixing_rwkv7",
        {
            "x": hidden,
            "x_prev": Tensor((1, 2048)),
            "x_k": Tensor((2048,)),
            "key_weight": Tensor((2048, 8192), scale=0.02),
            "value_weight": Tensor((8192, 2048), scale=0.02),
            "inplace": False,
        },
    )
    yield _module(
        "kda_gate/4096x16x128",
        "ops.kda.gate:fused_kda_gate",
        {
            "g": Tensor((1, 4096, 16, 128)),
            "A_log": Tensor((16,), "float32", "uniform"),
            "dt_bias": Tensor((2048,), "float32"),
        },
    )
    # Generation, and parts that other operations share
    yield _module(
        "attn_decoding/4096x32x128",
        "ops.attn.decoding:attn_decoding_one_step",
        {
            "q": Tensor((1, 4, 32, 128)),
            "k": Tensor((1, 16384, 8, 128)),
            "v": Tensor((1, 16384, 8, 128)),
            "cu_seqlens": Tensor((5,), "int32", "bounds", 16384),
        },
        backward=False,
    )
    yield _module(
        "mean_pooling/8192x16x128",
        "ops.utils.pooling:mean_pooling",
        {"x": Tensor((1, 8192, 16, 128)), "chunk_size": 64},
    )
    yield _module(
        "logsumexp/8192x32000",
        "ops.utils.logsumexp:logsumexp_fwd",
        {"x": Tensor((8192, 32000))},
        backward=False,
    )


WORKLOADS: tuple[Workload, ...] = (
    *_operations(TRAINED),
    *_modules(),
    *_operations(DECODED),
    *_operations(GATED_BACKWARD, "_backward"),
    *_operations(LATER, rank=1),
)
"""Operations first that most models use."""
