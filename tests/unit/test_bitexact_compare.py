"""Two runs of one function: what was restored, what differs first, and by how much."""

from __future__ import annotations

import itertools
import math
import os
import random
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tuning.bitexact import compare_processes, compare_runs, compare_tensors, digest_value  # noqa: E402
from tuning.bitexact.difference import most_ulps  # noqa: E402
from tuning.errors import DeterminismError, TuningError  # noqa: E402


def bits(pattern: int) -> Any:
    return torch.tensor([pattern], dtype=torch.int32).view(torch.float32)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.norm = torch.nn.BatchNorm1d(4)
        self.drop = torch.nn.Dropout(0.5)

    def forward(self, x: Any) -> Any:
        return self.drop(self.norm(self.linear(x)))


def training(model: Any, optimizer: Any) -> Any:
    def run() -> dict[str, Any]:
        numpy = pytest.importorskip("numpy")
        for _ in range(3):
            x = torch.randn(8, 4) + random.random() + float(numpy.random.rand())
            loss = model(x).square().mean()
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()
        model.eval()
        return {"loss": loss, "parameters": dict(model.named_parameters()), "running": model.norm.running_mean}

    return run


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD], ids=["adamw", "sgd"])
def test_a_training_run_is_restored_as_a_whole(make: Any) -> None:
    model = Model()
    optimizer = make(model.parameters(), lr=0.1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = random.getstate()
    comparison = compare_runs(training(model, optimizer), runs=3, state=[model, optimizer])
    assert comparison.equal, comparison.lines()
    assert len({run.root for run in comparison.runs}) == 1
    comparison.require_equal()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not optimizer.state
    assert model.training
    assert all(parameter.grad is None for parameter in model.parameters())
    assert random.getstate() == state


@pytest.mark.parametrize("forgotten", ["model", "optimizer"])
def test_what_is_not_restored_shows(forgotten: str) -> None:
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = [optimizer] if forgotten == "model" else [model]
    assert not compare_runs(training(model, optimizer), state=state).equal


def test_moments_of_another_dtype_come_back_whole() -> None:
    weight = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    optimizer.state[weight]["master"] = torch.full((3,), 1.0009765625)

    def run() -> Any:
        optimizer.state[weight]["master"].add_(1)
        optimizer.param_groups[0]["lr"] *= 0.5
        return [optimizer.state[weight]["master"].clone(), optimizer.param_groups[0]["lr"]]

    assert compare_runs(run, state=[optimizer]).equal
    assert optimizer.state[weight]["master"].tolist() == [1.0009765625] * 3
    assert optimizer.param_groups[0]["lr"] == 0.1


def test_the_last_run_may_stay() -> None:
    x = torch.zeros(2)
    assert compare_runs(lambda: x.add_(1).clone(), state=[x], restore_after=False).equal
    assert x.tolist() == [1.0, 1.0]


def test_the_first_difference_is_named_with_index_and_ulps() -> None:
    numbers = itertools.count()

    def run() -> dict[str, Any]:
        x = torch.ones(3, 4)
        if next(numbers) == 2:
            x[1, 2] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
            x[2, 0] = 1.0 + 5 * 2**-23
        return {"same": torch.ones(2), "other": [x, 1.0]}

    comparison = compare_runs(run, runs=3)
    first = comparison.first
    assert first is not None
    assert (comparison.other, first.name, first.index, first.count) == (2, "other.0", (1, 2), 2)
    assert (first.kind, first.ulps, first.most_ulps) == ("value", 1, 5)
    assert "other.0[1, 2]: 1.0 (0x3f800000) and 1.0000001192092896 (0x3f800001), 1 ulp apart" in comparison.lines()[1]
    with pytest.raises(DeterminismError, match=r"1 of 3 values differ between run 0 and run 2: other\.0\[1, 2\]") as e:
        comparison.require_equal()
    assert len(e.value.problems) == 1


@pytest.mark.parametrize(
    ("one", "two", "kind", "ulps"),
    [
        (0x00000000, -0x80000000, "sign of zero", 0),
        (0x7FC00000, 0x7FC00001, "nan", None),
        (0x7FC00000, 0x3F800000, "nan", None),
        (0x00000001, -0x7FFFFFFF, "value", 2),
        (0x7F7FFFFF, 0x7F800000, "value", 1),
    ],
    ids=["zero", "payload", "nan_and_number", "subnormals", "infinity"],
)
def test_kinds(one: int, two: int, kind: str, ulps: int | None) -> None:
    found = compare_tensors("x", bits(one), bits(two))
    assert found is not None
    assert (found.kind, found.ulps, found.index, found.count) == (kind, ulps, (0,), 1)


def test_ulps_of_other_dtypes() -> None:
    def distance(one: Any, two: Any) -> int | None:
        found = compare_tensors("x", one, two)
        assert found is not None
        return found.ulps

    largest = torch.tensor([torch.finfo(torch.float64).max], dtype=torch.float64)
    assert distance(largest, -largest) == 2 * 0x7FEFFFFFFFFFFFFF
    assert distance(torch.tensor([1.0]).bfloat16(), torch.tensor([1.0078125]).bfloat16()) == 1
    assert distance(torch.tensor([1.0]).half(), torch.tensor([2.0]).half()) == 1024
    fp8 = torch.tensor([1.0, 448.0]).to(torch.float8_e4m3fn)
    assert distance(fp8[:1], torch.tensor([1.125]).to(torch.float8_e4m3fn)) == 1
    assert distance(torch.tensor([1]), torch.tensor([2])) is None
    assert compare_tensors("x", fp8, fp8.clone()) is None
    with pytest.raises(ValueError, match="x: expected tensors of one dtype and shape"):
        compare_tensors("x", fp8, fp8[:1])


@pytest.mark.parametrize(("dtype", "width"), [("float64", 64), ("float32", 32), ("bfloat16", 16), ("float16", 16)])
def test_one_definition_of_a_distance_holds_for_tensors_and_for_metrics(dtype: str, width: int) -> None:
    from tuning.bitexact import metrics_values

    kind = getattr(torch, dtype)
    largest, tiny = torch.finfo(kind).max, torch.finfo(kind).smallest_normal
    numbers = [0.0, -0.0, 1.0, -1.0, tiny, -tiny, largest, -largest, float("inf"), -float("inf")]
    for one, two in itertools.combinations(torch.tensor(numbers, dtype=kind).unbind(), 2):
        found = compare_tensors("x", one, two)
        pair = [int(t.view(getattr(torch, f"int{width}"))) % (1 << width) for t in (one, two)]
        assert found is not None
        assert found.ulps == metrics_values.ulp_distance(dtype, *pair)
    zero = compare_tensors("x", torch.zeros((), dtype=kind), -torch.zeros((), dtype=kind))
    assert zero is not None
    assert (zero.ulps, zero.kind) == (0, "sign of zero")


@pytest.mark.parametrize(
    "dtype", ["float4_e2m1fn_x2", "uint4", "int4", "uint1", "bits8", "float8_e8m0fnu", "uint8", "uint16", "complex32"]
)
def test_a_difference_is_told_of_every_dtype(dtype: str) -> None:
    one = torch.zeros(4, 8, dtype=torch.uint8)
    two = one.clone()
    two[2, 4] = 1
    found = compare_tensors("x", one.view(getattr(torch, dtype)), two.view(getattr(torch, dtype)))
    assert found is not None
    assert (found.index[0], found.count) == (2, 1)
    assert "0x0" in str(found)


@pytest.mark.filterwarnings("ignore:.*prototype stage:UserWarning")
def test_a_difference_is_told_of_every_kind_of_tensor() -> None:
    numpy = pytest.importorskip("numpy")
    two_tensor = pytest.importorskip("torch.testing._internal.two_tensor").TwoTensor
    pairs = {
        "nested": [torch.nested.nested_tensor([torch.ones(2), torch.full((3,), float(n))]) for n in range(2)],
        "sparse": [torch.tensor([0.0, n]).to_sparse() for n in (1.0, 2.0)],
        "wrapper": [two_tensor(torch.ones(2), torch.full((2,), float(n))) for n in range(2)],
    }
    for pair in pairs.values():
        first = compare_runs(iter(pair).__next__).first
        assert first is not None
        assert first.kind in ("bits", "description")
    first = compare_runs(iter([numpy.arange(4.0)[::-1], (numpy.arange(4.0) + 1)[::-1]]).__next__).first
    assert first is not None
    assert (first.index, first.kind) == ((0,), "value")


def test_other_differences_say_what_they_are() -> None:
    answers = iter([{"a": torch.zeros(2), "b": 1, "c": -0.0}, {"a": torch.zeros(2, 1), "c": 0.0, "d": 1}])
    found = compare_runs(lambda: next(answers)).differences
    assert [(d.name, d.kind) for d in found] == [
        ("a", "description"), ("b", "missing"), ("c", "sign of zero"), ("d", "missing")
    ]  # fmt: skip
    assert "shape (2,)" in str(found[0])


def test_digests_alone_need_no_copies() -> None:
    answers = iter([torch.zeros(2), torch.ones(2)])
    first = compare_runs(lambda: next(answers), keep_values=False).first
    assert first is not None
    assert first.kind == "bits"
    assert first.first.startswith("digest ")


def test_what_cannot_be_restored_is_refused() -> None:
    with pytest.raises(TypeError, match=r"state: expected modules, tensors.* found int"):
        compare_runs(lambda: 1, state=[3])
    with pytest.raises(ValueError, match="runs: expected at least 2, found 1"):
        compare_runs(lambda: 1, runs=1)


@pytest.mark.parametrize("nothing", [None, [], {}, [None, ()]])
def test_nothing_to_compare_is_refused(nothing: Any) -> None:
    with pytest.raises(ValueError, match="expected at least one tensor or number to compare, found none"):
        compare_runs(lambda: nothing)
    with pytest.raises(ValueError, match="found none"):
        compare_runs(lambda: nothing, state=[torch.nn.ReLU()])
    assert compare_runs(lambda: 1).lines() == ["1 value equal bit for bit in 2 runs"]


def test_a_step_that_returns_nothing_is_compared_by_what_it_leaves() -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    hidden = itertools.count()

    def run(off: float) -> None:
        optimizer.zero_grad()
        (model(torch.ones(1, 2)).sum() * (1 + off * next(hidden))).backward()
        optimizer.step()

    assert compare_runs(lambda: run(0.0), state=[model, optimizer]).equal
    found = compare_runs(lambda: run(1.0), state=[model, optimizer])
    names = {d.name for d in found.differences}
    assert {"state[0].weight", "state[0].bias.grad", "state[1].state.0.momentum_buffer"} <= names
    assert found.first.ulps is not None


class Rebinding(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("wide", torch.ones(1).expand(4))

    def forward(self, x: Any) -> Any:
        self.count = self.count + 1
        if not hasattr(self, "cache"):
            self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.cache += 1
        self.linear.weight = torch.nn.Parameter(self.linear.weight.detach() * 2)
        self.linear.bias.data = self.linear.bias.data + 1
        self.train(not self.training)
        return self.linear(x) * self.count + self.cache


def test_what_a_run_binds_anew_is_bound_as_before() -> None:
    model = Rebinding()
    before = {
        name: (id(value), value.clone(), value.data_ptr()) for name, value in model.state_dict(keep_vars=True).items()
    }
    assert compare_runs(lambda: model(torch.ones(1, 2)), state=[model]).equal
    after = model.state_dict(keep_vars=True)
    assert after.keys() == before.keys()
    assert not hasattr(model, "cache")
    assert not model._non_persistent_buffers_set
    assert model.training
    for name, (identity, value, address) in before.items():
        assert (id(after[name]), after[name].data_ptr()) == (identity, address)
        assert torch.equal(after[name], value)


def test_a_gradient_stays_a_view_of_its_flat_buffer() -> None:
    weight, flat = torch.nn.Parameter(torch.ones(2)), torch.zeros(2)
    weight.grad = flat.view(2)
    assert compare_runs(lambda: weight.sum().backward(), state=[weight]).equal
    assert flat.tolist() == [0, 0]
    weight.grad.add_(1)
    assert flat.tolist() == [1, 1]


def test_parameter_groups_and_state_of_an_optimizer_are_the_same_objects_again() -> None:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    moment = optimizer.state[weight]["momentum_buffer"] = torch.ones(2)
    groups = list(optimizer.param_groups)

    def run() -> Any:
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
        optimizer.state[weight] = {"momentum_buffer": moment.mul_(2)}
        return moment.clone()

    assert compare_runs(run, state=[optimizer]).equal
    assert [id(group) for group in optimizer.param_groups] == [id(group) for group in groups]
    assert optimizer.state[weight]["momentum_buffer"] is moment
    assert moment.tolist() == [1, 1]


def test_a_generator_and_an_inference_tensor_are_restored() -> None:
    generator = torch.Generator().manual_seed(1)
    with torch.inference_mode():
        kept = torch.ones(2)

    def run() -> Any:
        with torch.inference_mode():
            return kept.add_(1).sum(), torch.rand(1, generator=generator)

    assert compare_runs(run, state=[generator, kept]).equal
    assert kept.tolist() == [1, 1]


def test_a_lazy_module_is_refused_before_anything_runs() -> None:
    runs: list[int] = []
    with pytest.raises(TypeError, match=r"state\[0\]\.weight: expected tensors that hold something"):
        compare_runs(lambda: runs.append(1), state=[torch.nn.LazyLinear(2)])
    assert not runs


def test_cuda_first_used_within_a_run_is_restored_too(monkeypatch: pytest.MonkeyPatch) -> None:
    device = {"started": False, "state": 0}

    def random_number() -> float:
        device.update(started=True, state=device["state"] + 1)
        return float(device["state"])

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: device["started"])
    monkeypatch.setattr("torch.cuda.get_rng_state_all", lambda: device["state"])
    monkeypatch.setattr("torch.cuda.set_rng_state_all", lambda state: device.update(state=state))
    assert compare_runs(random_number).equal


def returns_nothing() -> None:
    """Computes nothing."""


def seeded(seed: int, process_dependent: bool = False) -> Any:
    x = torch.randn(3, generator=torch.Generator().manual_seed(seed))
    return {"x": x, "y": 1.5, "z": torch.tensor([1.0, float(os.getpid() if process_dependent else 2)])}


def failing() -> None:
    raise RuntimeError("no such data")


def test_fresh_processes() -> None:
    comparison = compare_processes(seeded, arguments={"seed": 4})
    assert comparison.equal, comparison.lines()
    assert comparison.runs[0] == digest_value(seeded(4))
    found = compare_processes(seeded, arguments={"seed": 4, "process_dependent": True})
    assert [(d.name, d.index, d.kind) for d in found.differences] == [("z", (1,), "value")]
    expected = "process 0 of .*:failing: expected exit code 0, found 1: RuntimeError: no such data"
    with pytest.raises(TuningError, match=expected):
        compare_processes("test_bitexact_compare:failing")
    with pytest.raises(ValueError, match=r":returns_nothing: expected at least one tensor or number"):
        compare_processes(returns_nothing)
    with pytest.raises(ValueError, match=r"function: expected package\.module:name"):
        compare_processes(lambda: 1)


def test_the_largest_distance_of_all_elements() -> None:
    one = torch.tensor([1.0, 2.0], dtype=torch.float64)
    assert most_ulps(one, one.clone()) == 0
    assert most_ulps(one, torch.nextafter(one, one * 2)) == 1
    assert most_ulps(one, torch.tensor([1.0, 2.0 + 2**-48], dtype=torch.float64)) == 8
    assert most_ulps(torch.tensor([0.0]), torch.tensor([-0.0])) == 0
    nan = torch.tensor([1.0, math.nan])
    assert most_ulps(nan, torch.tensor([1.0 + 2**-23, math.nan])) == 1
    assert most_ulps(nan, torch.tensor([1.0 + 2**-23, 1.0])) is None
    assert most_ulps(torch.complex(*one.view(2, 1)), torch.complex(one[:1], one[1:] + 2**-51)) == 1
    assert most_ulps(torch.tensor([1]), torch.tensor([2])) is None
    assert most_ulps(one, one.float()) is None
    assert most_ulps(one, one[:1]) is None
