"""Operators of mamba_ssm and FLA, forward and backward, against the references that the packages ship; for pytest.

The packages' distributions hold references beside their kernels (``*_ref``, ``naive_*``) and no test of the operators.
``bench.packages`` runs these checks with and without a pinned policy. As a pytest plugin this module also lets
mamba_ssm's kernels be imported where its CUDA extension is not built.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SMALL = DEVICE == "cpu"  # in the interpreter
BATCH, LENGTH, HEADS, WIDTH = (1, 64, 2, 16) if SMALL else (2, 512, 4, 64)
RATIO = 0.02
"""Largest root mean square of a difference, as a share of the reference's: float32 inputs, products in tf32."""
HALF = torch.float16 if SMALL else torch.bfloat16
"""For kernels that refuse float32. numpy, and so the interpreter, has no bfloat16."""
HALF_RATIO = 0.04
"""The same for inputs in :data:`HALF`, whose results are rounded to 8 bits once for each operator on the way."""

_open: list[Any] = []


def pytest_configure(config: pytest.Config) -> None:
    """Keep a stand-in for mamba_ssm's own ``__init__`` for as long as the process lives."""
    from tuning.inventory import package_without_init

    if SMALL:
        from tuning.interpreter import stand_in_for_cuda, use_interpreter

        use_interpreter()
        stand_in_for_cuda()
    _open.append(package_without_init("mamba_ssm"))
    _open[-1].__enter__()


def named(path: str) -> Any:
    """A function of a package, imported when it is needed."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def inputs(*shapes: Sequence[int]) -> list[torch.Tensor]:
    """Reproducible float32 tensors that ask for gradients."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(*shape, generator=generator).to(DEVICE).requires_grad_() for shape in shapes]


def compare(
    kernel: Callable[..., Any], reference: Callable[..., Any], tensors: Sequence[torch.Tensor], ratio: float = RATIO
) -> None:
    """Outputs, and then every gradient, of two functions."""

    def gradients(output: torch.Tensor) -> list[Any]:
        for tensor in tensors:
            tensor.grad = None
        weights = torch.linspace(-1, 1, output.numel(), device=output.device).reshape(output.shape)
        output.backward(weights.to(output.dtype))
        return [tensor.grad for tensor in tensors]

    expected, got = reference(*tensors), kernel(*tensors)
    near(got.detach(), expected.detach(), ratio)  # before the backward, which a package may refuse
    wanted = gradients(expected)
    for found, gradient in zip(gradients(got), wanted, strict=True):
        near(found, gradient, ratio)


def near(got: torch.Tensor, expected: torch.Tensor, ratio: float) -> None:
    """Finite, and within a share of what is expected."""
    assert torch.isfinite(got).all()
    difference = (got.float() - expected.float()).square().mean().sqrt()
    assert difference <= ratio * expected.float().square().mean().sqrt() + 1e-6


HEADED = (BATCH, LENGTH, HEADS, WIDTH)


def gates(tensor: torch.Tensor) -> torch.Tensor:
    """Logarithms of forget gates."""
    return torch.nn.functional.logsigmoid(tensor)


def by_heads(function: Any) -> Any:
    """A reference that takes the heads before the time."""
    return lambda *tensors: function(*(tensor.transpose(1, 2) for tensor in tensors)).transpose(1, 2)


def test_fla_gla() -> None:
    """Gated linear attention, in chunks."""
    kernel, reference = named("fla.ops.gla.chunk_gla"), named("fla.ops.gla.naive.naive_recurrent_gla")
    compare(
        lambda q, k, v, g: kernel(q, k, v, gates(g))[0],
        lambda q, k, v, g: reference(q, k, v, gates(g))[0],
        inputs(HEADED, HEADED, HEADED, HEADED),
    )


def test_fla_gla_recurrent() -> None:
    """Gated linear attention, step by step."""
    kernel, reference = named("fla.ops.gla.fused_recurrent_gla"), named("fla.ops.gla.naive.naive_recurrent_gla")
    compare(
        lambda q, k, v, g: kernel(q, k, v, gates(g))[0],
        lambda q, k, v, g: reference(q, k, v, gates(g))[0],
        inputs(HEADED, HEADED, HEADED, HEADED),
    )


def test_fla_simple_gla() -> None:
    """One gate for each head."""
    kernel = named("fla.ops.simple_gla.chunk_simple_gla")
    reference = named("fla.ops.simple_gla.naive.naive_recurrent_simple_gla")
    compare(
        lambda q, k, v, g: kernel(q, k, v, gates(g))[0],
        lambda q, k, v, g: reference(q, k, v, gates(g))[0],
        inputs(HEADED, HEADED, HEADED, HEADED[:3]),
    )


def test_fla_retention() -> None:
    """Retention."""
    kernel, reference = named("fla.ops.retention.chunk_retention"), named("fla.ops.retention.naive.naive_retention")
    compare(lambda q, k, v: kernel(q, k, v)[0], by_heads(reference), inputs(HEADED, HEADED, HEADED))


def test_fla_linear_attention() -> None:
    """Linear attention, without a gate."""
    kernel = named("fla.ops.linear_attn.chunk_linear_attn")
    reference = named("fla.ops.linear_attn.naive.naive_recurrent_linear_attn")
    compare(
        lambda q, k, v: kernel(q, k, v, normalize=False)[0],
        lambda q, k, v: reference(q, k, v)[0],
        inputs(HEADED, HEADED, HEADED),
    )


def test_fla_delta_rule() -> None:
    """The delta rule, on unit keys."""
    kernel = named("fla.ops.delta_rule.chunk_delta_rule")
    reference = named("fla.ops.delta_rule.naive.delta_rule_recurrence")

    def unit(tensor: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(tensor, dim=-1)

    def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
        parts = (q, unit(k), v, beta.sigmoid())
        return reference(*(part.transpose(1, 2) for part in parts))[0].transpose(1, 2)

    def half(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, beta: torch.Tensor) -> list[torch.Tensor]:
        return [part.to(HALF) for part in (q, unit(k), v, beta.sigmoid())]

    # It asserts that its inputs are not float32: the reference computes in float32 from the same rounded ones.
    compare(
        lambda *tensors: kernel(*half(*tensors))[0],
        lambda *tensors: expected(*(part.float() for part in half(*tensors))),
        inputs(HEADED, HEADED, HEADED, HEADED[:3]),
        HALF_RATIO,
    )


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Causal softmax attention as torch's own matrix products, with fewer heads of keys and values than of queries."""
    groups = q.shape[2] // k.shape[2]
    k, v = (part.repeat_interleave(groups, dim=2) for part in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    return torch.einsum("bhqk,bkhd->bqhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


GROUPED = (BATCH, LENGTH, HEADS // 2, WIDTH)


def test_fla_attention() -> None:
    """Causal softmax attention, grouped."""
    kernel = named("fla.ops.attn.parallel_attn")
    compare(
        lambda *tensors: kernel(*(part.to(HALF) for part in tensors)),
        lambda *tensors: attention(*(part.to(HALF).float() for part in tensors)),
        inputs(HEADED, GROUPED, GROUPED),
        HALF_RATIO,
    )


def test_fla_stickbreaking_attention() -> None:
    """Stick-breaking attention, whose kernels are autotuned: each key takes its share of what later ones left."""
    kernel = named("fla.ops.stickbreaking_attn.parallel_stickbreaking_attn")

    def expected(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        logits = torch.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        # Key j is seen by queries after it, and is left what the keys between j and the query did not take.
        seen = torch.ones(logits.shape[-2:], dtype=torch.bool, device=q.device).tril(-1)
        left = torch.nn.functional.logsigmoid(-logits).masked_fill(~seen, 0.0)
        later = left.flip(-1).cumsum(-1).flip(-1) - left
        shares = (torch.nn.functional.logsigmoid(logits) + later).exp().masked_fill(~seen, 0.0)
        return torch.einsum("bhqk,bkhd->bqhd", shares, v)

    compare(
        lambda *tensors: kernel(*(part.to(HALF) for part in tensors), WIDTH**-0.5)[0],
        lambda *tensors: expected(*(part.to(HALF).float() for part in tensors)),
        inputs(HEADED, HEADED, HEADED),
        HALF_RATIO,
    )


def test_fla_hgrn() -> None:
    """A gated recurrence without heads."""
    kernel, reference = named("fla.ops.hgrn.chunk_hgrn"), named("fla.ops.hgrn.naive.naive_recurrent_hgrn")
    shape = (BATCH, LENGTH, HEADS * WIDTH)
    compare(lambda x, g: kernel(x, gates(g))[0], lambda x, g: reference(x, gates(g))[0], inputs(shape, shape))


def test_mamba_scan() -> None:
    """Mamba-2's scan with its decay and skip."""
    kernel = named("mamba_ssm.ops.triton.ssd_combined.mamba_chunk_scan_combined")
    reference = named("mamba_ssm.ops.triton.ssd_combined.ssd_chunk_scan_combined_ref")
    chunk, groups = (16, 1) if SMALL else (64, 1)

    def scan(function: Any) -> Any:
        def run(x: Any, dt: Any, a: Any, b: Any, c: Any, d: Any) -> torch.Tensor:
            output = function(x, torch.nn.functional.softplus(dt - 3), -a.exp(), b, c, chunk, D=d)
            return output if isinstance(output, torch.Tensor) else output[0]

        return run

    shapes = (HEADED, HEADED[:3], (HEADS,), (BATCH, LENGTH, groups, WIDTH), (BATCH, LENGTH, groups, WIDTH), (HEADS,))
    compare(scan(kernel), scan(reference), inputs(*shapes))


def test_mamba_gated_norm() -> None:
    """RMS norm with a gate."""
    kernel = named("mamba_ssm.ops.triton.layernorm_gated.rmsnorm_fn")
    reference = named("mamba_ssm.ops.triton.layernorm_gated.rms_norm_ref")
    shape = (BATCH * LENGTH, HEADS * WIDTH)
    compare(
        lambda x, weight, z: kernel(x, weight, None, z=z),
        lambda x, weight, z: reference(x, weight, None, z=z),
        inputs(shape, shape[1:], shape),
    )


def test_mamba_norm() -> None:
    """Layer norm."""
    kernel = named("mamba_ssm.ops.triton.layer_norm.layer_norm_fn")
    reference = named("mamba_ssm.ops.triton.layer_norm.layer_norm_ref")
    shape = (BATCH * LENGTH, HEADS * WIDTH)
    compare(kernel, reference, inputs(shape, shape[1:], shape[1:]))
