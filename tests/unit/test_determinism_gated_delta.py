"""The torch-native gated delta rules against the recurrences written out token by token, in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tuning.determinism import chunk_gated_delta_rule, chunk_gdn2, l2_normalize
from tuning.errors import DeterminismError

B, T, H, K, V = 2, 75, 3, 8, 6  # T is a multiple of no chunk size

Inputs = dict[str, torch.Tensor]


def make(rule: str, dtype: torch.dtype = torch.float64, *, value_heads: int = H, steep: float = 1.0) -> Inputs:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    i = {
        "q": normal(B, T, H, K),
        "k": l2_normalize(normal(B, T, H, K)),
        "v": normal(B, T, value_heads, V),
        "initial_state": normal(B, value_heads, K, V),
    }
    if rule == "gdn":
        i["g"] = F.logsigmoid(normal(B, T, value_heads)) * steep
        i["beta"] = torch.sigmoid(normal(B, T, value_heads))
    else:
        i["g"] = F.logsigmoid(normal(B, T, H, K)) * steep
        i["b"] = torch.sigmoid(normal(B, T, H, K))
        i["w"] = torch.sigmoid(normal(B, T, H, V))
    return {name: tensor.to(dtype).requires_grad_() for name, tensor in i.items()}


def recurrence(rule: str, i: Inputs) -> tuple[torch.Tensor, torch.Tensor]:
    """One token after the other, in float64."""
    i = {name: tensor.double() for name, tensor in i.items()}
    heads = i["v"].shape[2]
    q, k = (i[name].repeat_interleave(heads // H, dim=2) for name in "qk")
    state, out = i["initial_state"], []
    for t in range(i["q"].shape[1]):
        key = k[:, t, :, :, None]
        if rule == "gdn":
            state = state * i["g"][:, t, :, None, None].exp()
            new = (i["v"][:, t] - (state * key).sum(-2)) * i["beta"][:, t, :, None]
        else:
            state = state * i["g"][:, t, :, :, None].exp()
            new = i["w"][:, t] * i["v"][:, t] - (state * key * i["b"][:, t, :, :, None]).sum(-2)
        state = state + key * new[:, :, None, :]
        out.append((q[:, t, :, :, None] * state).sum(-2) * K**-0.5)
    return torch.stack(out, dim=1), state


def run(rule: str, i: Inputs, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    function: Any = chunk_gated_delta_rule if rule == "gdn" else chunk_gdn2
    found: tuple[torch.Tensor, torch.Tensor] = function(**i, **{"output_final_state": True, **options})
    return found


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = found.detach().double(), expected.detach()
    return float((found - expected).norm() / expected.norm())


def errors(rule: str, i: Inputs, **options: Any) -> dict[str, float]:
    """Relative norms of what differs from the recurrence: output, state and every gradient."""
    o, state = run(rule, i, **options)
    expected_o, expected_state = recurrence(rule, i)
    generator = torch.Generator().manual_seed(1)
    do, ds = (torch.randn(x.shape, generator=generator, dtype=torch.float64) for x in (o, state))
    grads = torch.autograd.grad((o.double() * do).sum() + (state.double() * ds).sum(), list(i.values()))
    expected = torch.autograd.grad((expected_o * do).sum() + (expected_state * ds).sum(), list(i.values()))
    found = {"o": relative(o, expected_o), "state": relative(state, expected_state)}
    return found | {f"d{name}": relative(g, e.double()) for name, g, e in zip(i, grads, expected, strict=True)}


def octets(x: torch.Tensor) -> torch.Tensor:
    return x.detach().contiguous().view(torch.uint8)


both = pytest.mark.parametrize("rule", ["gdn", "gdn2"])


@both
@pytest.mark.parametrize("chunk_size", [1, 2, 16, 64, 128])
def test_output_state_and_gradients_in_float64(rule: str, chunk_size: int) -> None:
    assert max(errors(rule, make(rule), chunk_size=chunk_size).values()) < 1e-12


@both
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_output_state_and_gradients_of_narrow_inputs(rule: str, dtype: torch.dtype, bound: float) -> None:
    i = make(rule, dtype)
    assert max(errors(rule, i).values()) < bound
    o, state = run(rule, i)
    assert (o.dtype, state.dtype) == (dtype, torch.float32)


@both
def test_decays_too_steep_for_their_exponentials_one_by_one(rule: str) -> None:
    # The running sum of g reaches about -3000 within a chunk: exp(+3000) would be infinite. Differences of such sums
    # are exact to about 3000 * 2**-24, and so is what they are the exponents of.
    i = make(rule, torch.float32, steep=50.0)
    assert i["g"].sum(1).min() < -2000
    assert max(errors(rule, i).values()) < 1e-3


@both
def test_run_to_run_the_bits_are_equal(rule: str) -> None:
    def once() -> list[torch.Tensor]:
        i = make(rule, torch.bfloat16)
        o, state = run(rule, i)
        return [o, state, *torch.autograd.grad(o.float().sum() + state.sum(), list(i.values()))]

    for one, other in zip(once(), once(), strict=True):
        assert torch.equal(octets(one), octets(other))


@both
def test_no_state_given_and_none_asked_for(rule: str) -> None:
    i = make(rule)
    zero = {**i, "initial_state": torch.zeros_like(i["initial_state"])}
    del i["initial_state"]
    o, state = run(rule, i, output_final_state=False)
    assert state is None
    assert torch.equal(o, run(rule, zero)[0])


@both
def test_a_state_may_have_its_values_first(rule: str) -> None:
    i = make(rule)
    o, state = run(rule, i)
    turned = {**i, "initial_state": i["initial_state"].transpose(-1, -2)}
    for options in ({"state_v_first": True}, {"transpose_state_layout": True}):
        again_o, again_state = run(rule, turned, **options)
        assert torch.equal(again_o, o)
        assert torch.equal(again_state, state.transpose(-1, -2))


@both
def test_packed_sequences_give_the_bits_that_each_gives_alone(rule: str) -> None:
    i = {name: tensor if name == "initial_state" else tensor[:1] for name, tensor in make(rule, torch.float32).items()}
    bounds = [0, 30, 30, T]
    i["initial_state"] = torch.randn(3, H, K, V)
    o, states = run(rule, i, cu_seqlens=torch.tensor(bounds), chunk_size=16)
    by_cpu, _ = run(rule, i, cu_seqlens_cpu=torch.tensor(bounds), chunk_size=16)
    assert torch.equal(o, by_cpu)
    assert torch.equal(states[1], i["initial_state"][1])  # an empty sequence
    for n in (0, 2):
        start, stop = bounds[n : n + 2]
        alone = {name: x[n : n + 1] if name == "initial_state" else x[:, start:stop] for name, x in i.items()}
        expected_o, expected_state = run(rule, alone, chunk_size=16)
        assert torch.equal(o[:, start:stop], expected_o)
        assert torch.equal(states[n : n + 1], expected_state)


@both
def test_normalisation_inside(rule: str) -> None:
    i = make(rule)
    outside = {**i, "q": l2_normalize(i["q"]), "k": l2_normalize(i["k"])}
    assert torch.equal(run(rule, i, use_qk_l2norm_in_kernel=True)[0], run(rule, outside)[0])


@both
def test_a_scale_of_ones_own(rule: str) -> None:
    i = make(rule)
    assert torch.allclose(run(rule, i, scale=1.0)[0], run(rule, i)[0] * K**0.5, rtol=1e-14)


@both
def test_autocast_does_not_reach_inside(rule: str) -> None:
    i = make(rule, torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = run(rule, i)[0]
    assert torch.equal(inside, run(rule, i)[0])


def test_value_heads_share_query_heads() -> None:
    i = make("gdn", value_heads=2 * H)
    assert max(errors("gdn", i).values()) < 1e-12


def test_gates_computed_inside_gdn() -> None:
    i = make("gdn")
    rate, bias = torch.randn(H, dtype=torch.float64), torch.randn(H, dtype=torch.float64)
    raw = torch.randn(B, T, H, dtype=torch.float64)
    outside = {**i, "g": -rate.exp() * F.softplus(raw + bias), "beta": 2 * torch.sigmoid(i["beta"])}
    inside = run(
        "gdn", {**i, "g": raw}, use_gate_in_kernel=True, A_log=rate, dt_bias=bias, use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=True,
    )  # fmt: skip
    assert torch.allclose(inside[0], run("gdn", outside)[0], rtol=1e-12)


@pytest.mark.parametrize("lower_bound", [None, -5.0])
@pytest.mark.parametrize("with_rate", [True, False])
def test_gates_computed_inside_gdn2(lower_bound: float | None, with_rate: bool) -> None:
    if lower_bound is None and not with_rate:
        return  # refused, see below
    i = make("gdn2")
    rate, bias = torch.randn(H, dtype=torch.float64), torch.randn(H * K, dtype=torch.float64)
    raw = torch.randn(B, T, H, K, dtype=torch.float64)
    shifted, factor = raw + bias.reshape(H, K), rate.exp()[:, None] if with_rate else 1.0
    g = -factor * F.softplus(shifted) if lower_bound is None else lower_bound * torch.sigmoid(factor * shifted)
    inside = run(
        "gdn2", {**i, "g": raw}, use_gate_in_kernel=True, A_log=rate if with_rate else None, dt_bias=bias,
        lower_bound=lower_bound, safe_gate=lower_bound is not None, disable_recompute=True,
    )  # fmt: skip
    assert torch.allclose(inside[0], run("gdn2", {**i, "g": g})[0], rtol=1e-12)


def test_what_is_computed_is_allowed_under_torchs_flag() -> None:
    # On CUDA cumsum, indexing and repeat_interleave have no deterministic form, or only a slow one: none is recorded.
    seen = set()

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.add(str(func).split(".")[1])
            return func(*args, **(kwargs or {}))

    for rule in ("gdn", "gdn2"):
        i = make(rule, torch.float32, value_heads=2 * H if rule == "gdn" else H)
        with Record():
            o, state = run(rule, i, use_qk_l2norm_in_kernel=True)
            torch.autograd.grad(o.sum() + state.sum(), list(i.values()))
    banned = {"cumsum", "index", "index_put", "index_put_", "index_add", "index_add_", "index_select", "gather"}
    banned |= {"scatter", "scatter_", "scatter_add", "scatter_add_", "repeat_interleave", "put_"}
    assert "bmm" in seen
    assert seen & banned == set()


GDN, GDN2 = "chunk_gated_delta_rule", "chunk_gdn2"
UNSUPPORTED = "is not supported by the torch-native {0}, got {1} ({2}): do without it in deterministic mode"
CP = "context parallelism passes states between ranks inside FLA's kernels, which this form does not use"


@pytest.mark.parametrize(
    ("rule", "changes", "problem"),
    [
        ("gdn", {"cp_context": object()}, "cp_context " + UNSUPPORTED.format(GDN, "object", CP)),
        ("gdn2", {"cp_context": object()}, "cp_context " + UNSUPPORTED.format(GDN2, "object", CP)),
        (
            "gdn2",
            {"return_intermediate_states": True},
            "return_intermediate_states "
            + UNSUPPORTED.format(GDN2, "bool", "only FLA's kernels keep the state before each chunk"),
        ),
        (
            "gdn",
            {"head_first": True},
            "head_first " + UNSUPPORTED.format(GDN, "bool", "it does not know this argument"),
        ),
        ("gdn", {"chunk_size": 48}, "chunk_size must be a power of two, got 48: FLA uses 64"),
        ("gdn", {"g": torch.zeros(B, T)}, f"g must have shape [{B}, {T}, {H}], got [{B}, {T}]"),
        ("gdn", {"k": torch.zeros(B, T, H, 1)}, f"k must have shape [{B}, {T}, {H}, {K}], got [{B}, {T}, {H}, 1]"),
        ("gdn2", {"w": torch.zeros(B, T, H, K)}, f"w must have shape [{B}, {T}, {H}, {V}], got [{B}, {T}, {H}, {K}]"),
        ("gdn2", {"b": None}, f"b must have shape [{B}, {T}, {H}, {K}], got None"),
        (
            "gdn",
            {"v": torch.zeros(B, T, 4, V)},
            f"q and v must have shapes [B, T, H, K] and [B, T, HV, V] with HV a multiple of H, got [{B}, {T}, {H}, "
            f"{K}] and "
            f"[{B}, {T}, 4, {V}]",
        ),
        (
            "gdn2",
            {"v": torch.zeros(B, T, V)},
            f"q and v must have shapes [B, T, H, K] and [B, T, H, V], got [{B}, {T}, {H}, {K}] and [{B}, {T}, {V}]",
        ),
        ("gdn", {"use_gate_in_kernel": True}, "A_log must be given with use_gate_in_kernel=True, got None"),
        (
            "gdn2",
            {"use_gate_in_kernel": True},
            "A_log must be given with use_gate_in_kernel=True and no lower_bound, got None",
        ),
        ("gdn", {"allow_neg_eigval": True}, "allow_neg_eigval=True needs use_beta_sigmoid_in_kernel=True, got False"),
        (
            "gdn",
            {"initial_state": torch.zeros(1, H, K, V)},
            f"initial_state must have shape [{B}, {H}, {K}, {V}], got [1, {H}, {K}, {V}]",
        ),
    ],
)
def test_what_cannot_be_used(rule: str, changes: dict[str, Any], problem: str) -> None:
    with pytest.raises(DeterminismError) as caught:
        run(rule, {**make(rule), **changes})
    assert str(caught.value) == f"deterministic mode refuses this gated delta rule: {problem}"


def test_all_problems_are_in_one_error() -> None:
    with pytest.raises(DeterminismError) as caught:
        run("gdn", make("gdn"), chunk_size=0, cp_context=1, allow_neg_eigval=True)
    assert len(caught.value.problems) == 3
