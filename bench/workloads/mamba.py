"""Operations of mamba_ssm 2.3.2.post1: Mamba-2's SSD, its norms, generation, and Mamba-3."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .catalog import Tensor, Workload

_SCOPE = ("mamba_ssm",)
_TRITON = "mamba_ssm.ops.triton"


def _ssd(tokens: int, heads: int, size: int, groups: int, state: int, chunk: int, gated: bool = True) -> Workload:
    arguments: dict[str, Any] = {
        "x": Tensor((1, tokens, heads, size)),
        "dt": Tensor((1, tokens, heads)),
        "A": Tensor((heads,), "float32", "constant", -0.7),
        "B": Tensor((1, tokens, groups, state), scale=0.3),
        "C": Tensor((1, tokens, groups, state), scale=0.3),
        "chunk_size": chunk,
        "D": Tensor((heads,), "float32"),
        "dt_bias": Tensor((heads,), "float32", scale=0.1),
        "dt_softplus": True,
    }
    if gated:
        arguments["z"] = Tensor((1, tokens, heads, size))
    name = f"mamba.ssd{'' if gated else '_plain'}/t{tokens}h{heads}d{size}g{groups}s{state}c{chunk}"
    return Workload(name, f"{_TRITON}.ssd_combined:mamba_chunk_scan_combined", arguments, None, True, _SCOPE)


def _ssd_varlen() -> Workload:
    base = _ssd(8192, 80, 64, 1, 128, 256, gated=False)
    positions = Tensor((1, 8192), "int32", "constant", 0.0)
    return Workload(
        base.name.replace("ssd_plain", "ssd_packed"),
        base.call,
        {**base.arguments, "seq_idx": positions},
        None,
        True,
        _SCOPE,
    )


def _norm(name: str, function: str, tokens: int, hidden: int, **rest: Any) -> Workload:
    weight = Tensor((hidden,), fill="uniform")
    bias = Tensor((hidden,)) if "layer" in function else None
    arguments = {"x": Tensor((tokens, hidden)), "weight": weight, "bias": bias, **rest}
    return Workload(f"mamba.{name}/{tokens}x{hidden}", f"{_TRITON}.{function}", arguments, None, True, _SCOPE)


def _norms() -> Iterator[Workload]:
    for tokens, hidden in ((8192, 4096), (8192, 2048)):
        x = Tensor((tokens, hidden))
        yield _norm("rms_norm", "layer_norm:rms_norm_fn", tokens, hidden)
        yield _norm("rms_norm_residual", "layer_norm:rms_norm_fn", tokens, hidden, residual=x, prenorm=True)
        yield _norm("layer_norm", "layer_norm:layer_norm_fn", tokens, hidden)
    # Without an autotuner in this version, as selective_state_update: there to be seen, and for versions that have one.
    x = Tensor((8192, 4096))
    yield _norm("rms_norm_gated", "layernorm_gated:rmsnorm_fn", 8192, 4096, z=x, norm_before_gate=False)


def _state_update(batch: int, heads: int, size: int, state: int) -> Workload:
    def expanded(*sizes: int) -> Tensor:
        return Tensor(sizes)

    arguments = {
        "state": Tensor((batch, heads, size, state)),
        "x": expanded(batch, heads, size),
        "dt": expanded(batch, heads, size),
        "A": Tensor((heads, size, state), "float32", "constant", -0.7),
        "B": expanded(batch, 1, state),
        "C": expanded(batch, 1, state),
        "D": Tensor((heads, size), "float32"),
        "dt_bias": Tensor((heads, size), "float32", scale=0.1),
        "dt_softplus": True,
    }
    name = f"mamba.selective_state_update/b{batch}h{heads}d{size}s{state}"
    call = f"{_TRITON}.selective_state_update:selective_state_update"
    return Workload(name, call, arguments, None, False, _SCOPE)


def _siso(tokens: int, heads: int, size: int, state: int, gated: bool) -> Workload:
    arguments: dict[str, Any] = {
        "Q": Tensor((1, tokens, heads, state)),
        "K": Tensor((1, tokens, heads, state)),
        "V": Tensor((1, tokens, heads, size)),
        "ADT": Tensor((1, heads, tokens), "float32", "log_decay", 0.1),
        "DT": Tensor((1, heads, tokens), "float32", "sigmoid"),
        "Trap": Tensor((1, heads, tokens), fill="normal"),
        "Q_bias": Tensor((heads, state), "float32"),
        "K_bias": Tensor((heads, state), "float32"),
        "Angles": Tensor((1, tokens, heads, state // 4), "float32"),
        "D": Tensor((heads,), "float32"),
        "Z": Tensor((1, tokens, heads, size)) if gated else None,
        "chunk_size": 64,
    }
    name = f"mamba.mamba3_siso{'' if gated else '_plain'}/t{tokens}h{heads}d{size}s{state}"
    call = f"{_TRITON}.mamba3.mamba3_siso_combined:mamba3_siso_combined"
    return Workload(name, call, arguments, None, True, _SCOPE)


WORKLOADS: tuple[Workload, ...] = (
    _ssd(8192, 128, 64, 8, 128, 128),
    _ssd(4096, 80, 64, 1, 128, 256),
    _ssd(4096, 64, 64, 8, 128, 256, gated=False),
    _ssd_varlen(),
    *_norms(),
    _state_update(64, 80, 64, 128),
    _siso(2048, 32, 64, 128, True),
    _siso(2048, 64, 64, 64, False),
    Workload(
        "mamba.swiglu/8192x11008",
        f"{_TRITON}.k_activations:SwiGLU.apply",
        {"*xy": Tensor((8192, 2 * 11008))},
        None,
        True,
        _SCOPE,
    ),
)
