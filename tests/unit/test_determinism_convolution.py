"""The torch-native causal convolution against the sum written out, and which causal-conv1d is refused."""

from __future__ import annotations

import itertools
from importlib import metadata
from typing import Any

import pytest
import torch

from tuning.determinism import causal_conv1d as module
from tuning.determinism import causal_convolution, require_causal_conv1d
from tuning.determinism.causal_conv1d import causal_conv1d_problem
from tuning.errors import DeterminismError

B, T, D, W = 2, 9, 5, 4


def tensors(dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"x": (B, T, D), "weight": (D, W), "bias": (D,), "residual": (B, T, D), "initial_state": (B, D, W)}
    return {
        name: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for name, shape in shapes.items()
    }


def written_out(x: Any, weight: Any, bias: Any = None, residual: Any = None, initial_state: Any = None) -> Any:
    """Token by token, with silu."""
    before = x.new_zeros(x.shape[0], W, D) if initial_state is None else initial_state.transpose(1, 2)
    line = torch.cat([before, x], dim=1)
    out = []
    for t in range(x.shape[1]):
        y = sum(weight[:, w] * line[:, t + 1 + w] for w in range(W))
        y = y if bias is None else y + bias
        y = y * torch.sigmoid(y)
        out.append(y if residual is None else y + residual[:, t])
    return torch.stack(out, dim=1), line[:, -W:].transpose(1, 2)


@pytest.mark.parametrize(
    "names", [("x", "weight"), ("x", "weight", "bias"), ("x", "weight", "bias", "residual", "initial_state")]
)
def test_outputs_states_and_gradients(names: tuple[str, ...]) -> None:
    inputs = {name: tensor for name, tensor in tensors().items() if name in names}
    y, state = causal_convolution(**inputs, output_final_state=True, activation="silu")
    expected_y, expected_state = written_out(**inputs)
    assert torch.allclose(y, expected_y, rtol=0, atol=1e-14)
    assert torch.equal(state, expected_state)  # type: ignore[arg-type]
    weights = torch.linspace(-1, 1, y.numel(), dtype=torch.float64).reshape(y.shape)
    loss = (y * weights).sum() + state.square().sum()  # type: ignore[union-attr]
    expected_loss = (expected_y * weights).sum() + expected_state.square().sum()
    found = torch.autograd.grad(loss, list(inputs.values()))
    expected = torch.autograd.grad(expected_loss, list(inputs.values()))
    for one, other in zip(found, expected, strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-13)


def test_no_final_state_unless_asked_and_no_activation() -> None:
    i = tensors()
    y, state = causal_convolution(i["x"], i["weight"])
    assert state is None
    expected = torch.nn.functional.conv1d(i["x"].transpose(1, 2), i["weight"][:, None], padding=W - 1, groups=D)
    assert torch.allclose(y, expected[:, :, :T].transpose(1, 2), atol=1e-14)


def test_a_sequence_shorter_than_the_kernel() -> None:
    i = tensors()
    y, state = causal_convolution(i["x"][:, :2], i["weight"], output_final_state=True, activation="silu")
    expected_y, expected_state = written_out(i["x"][:, :2], i["weight"])
    assert torch.allclose(y, expected_y, atol=1e-14)
    assert torch.equal(state, expected_state)  # type: ignore[arg-type]


def test_rounded_once_at_the_end() -> None:
    i = tensors(torch.bfloat16)
    y, _ = causal_convolution(**i, activation="silu")  # type: ignore[arg-type]
    exact, _ = written_out(**{name: tensor.double() for name, tensor in i.items()})
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, exact.to(torch.bfloat16))


def test_packed_sequences_give_the_bits_that_each_gives_alone() -> None:
    i = tensors(torch.float32)
    x, bounds = i["x"][:1], [0, 4, 4, 9]
    states = torch.randn(3, D, W)
    y, final = causal_convolution(
        x, i["weight"], i["bias"], None, states, True, "silu", cu_seqlens=torch.tensor(bounds)
    )
    for n, (start, stop) in enumerate(itertools.pairwise(bounds)):
        alone, state = causal_convolution(
            x[:, start:stop], i["weight"], i["bias"], None, states[n : n + 1], True, "swish"
        )
        assert torch.equal(y[:, start:stop], alone)
        assert torch.equal(final[n : n + 1], state)  # type: ignore[index, arg-type]


def test_heads_may_be_a_dimension_of_their_own() -> None:
    i = tensors()
    x = torch.randn(B, T, 2, 3, dtype=torch.float64)
    weight = torch.randn(6, W, dtype=torch.float64)
    y, _ = causal_convolution(x, weight)
    assert y.shape == x.shape
    assert torch.equal(y.reshape(B, T, 6), causal_convolution(x.reshape(B, T, 6), weight)[0])
    assert i


def test_autocast_does_not_reach_inside() -> None:
    i = tensors(torch.float32)
    y, _ = causal_convolution(**i)  # type: ignore[arg-type]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        again, _ = causal_convolution(**i)  # type: ignore[arg-type]
    assert torch.equal(y, again)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            {"activation": "relu"},
            "activation must be one of silu, swish, None, got 'relu' (no other is known): choose one",
        ),
        ({"weight": None}, "weight must have shape [D, W], got None"),
        ({"x": torch.zeros(2, 3, 4)}, "x must have shape [B, T, 5], got [2, 3, 4]"),
        ({"initial_state": torch.zeros(2, 5, 3)}, "initial_state must have shape [2, 5, 4], got [2, 5, 3]"),
        (
            {"cp_context": object()},
            "cp_context is not supported by the torch-native causal_conv1d, got object (context parallelism passes "
            "states "
            "between ranks inside FLA's kernels, which this form does not use): do without it in deterministic mode",
        ),
        (
            {"seq_idx": torch.zeros(1)},
            "seq_idx is not supported by the torch-native causal_conv1d, got Tensor (sequences are given by cu_seqlens "
            "here): do without it in deterministic mode",
        ),
    ],
)
def test_what_cannot_be_used(changes: dict[str, Any], problem: str) -> None:
    i = tensors()
    with pytest.raises(DeterminismError) as caught:
        causal_convolution(**{"x": i["x"], "weight": i["weight"], **changes})
    assert str(caught.value) == f"deterministic mode refuses this convolution: {problem}"


@pytest.mark.parametrize(
    ("batch", "bounds", "problem"),
    [
        (2, [0, 9], "the batch size must be 1 with cu_seqlens, got 2: flatten the sequences into one"),
        (1, [0, 5, 8], "cu_seqlens must rise from 0 to T=9, got [0, 5, 8]: pass cumulative sequence lengths"),
        (1, [0, 6, 5, 9], "cu_seqlens must rise from 0 to T=9, got [0, 6, 5, 9]: pass cumulative sequence lengths"),
        (1, [[0, 9]], "cu_seqlens must rise from 0 to T=9, got [1, 2]: pass cumulative sequence lengths"),
    ],
)
def test_packed_sequences_that_cannot_be_used(batch: int, bounds: list[Any], problem: str) -> None:
    i = tensors()
    with pytest.raises(DeterminismError) as caught:
        causal_convolution(i["x"][:batch], i["weight"], cu_seqlens=torch.tensor(bounds))
    assert str(caught.value) == f"deterministic mode refuses these packed sequences: {problem}"


# -- which causal-conv1d -----------------------------------------------------------------------------------------------

REMEDY = "install causal-conv1d>=1.6.0, or use the torch-native causal_convolution"


def install(monkeypatch: pytest.MonkeyPatch, version: str | None) -> None:
    def found(name: str) -> str:
        assert name == "causal-conv1d"
        if version is None:
            raise metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(module.metadata, "version", found)


@pytest.mark.parametrize("version", ["1.6.0", "1.6.0.post1", "1.6.1", "1.7.0", "1.10", "2.0.0rc1", "1.6.0+cu12"])
def test_an_accepted_version(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    install(monkeypatch, version)
    assert require_causal_conv1d() == version


@pytest.mark.parametrize("version", ["1.5.3.post1", "1.5", "1.6.0rc1", "1.6.0.dev3", "0.9.9", "unknown"])
def test_a_refused_version(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    install(monkeypatch, version)
    with pytest.raises(DeterminismError) as caught:
        require_causal_conv1d()
    assert str(caught.value) == (
        f"deterministic mode refuses this causal-conv1d: causal-conv1d must be 1.6.0 or later, got {version} (earlier "
        f"versions add the gradients of weight and bias with atomics and cannot be told not to): {REMEDY}"
    )


def test_none_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, None)
    with pytest.raises(DeterminismError) as caught:
        require_causal_conv1d()
    assert str(caught.value) == (
        "deterministic mode refuses this causal-conv1d: causal-conv1d must be 1.6.0 or later, got none installed: "
        f"{REMEDY}"
    )
    assert causal_conv1d_problem(required=False) is None
