"""Each planted fault is caught: by comparing two runs, and by name down to the op."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from planted_faults import AtomicAdd, AtomicBackward, NanPayload, SwappedZero  # noqa: E402

stub_kernels = pytest.importorskip("stub_kernels")

import tuning  # noqa: E402
from tuning.bitexact import Bisection, bisect_runs, compare_runs  # noqa: E402


class Net(torch.nn.Module):
    """A block, what is planted, and a block."""

    def __init__(self, planted: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.before = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.GELU())
        self.planted = planted
        self.after = torch.nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        x = self.planted(self.before(x))
        x, *rest = x if isinstance(x, tuple) else (x,)
        return self.after(x), rest


def step(model: Any) -> Callable[[], Any]:
    def run() -> dict[str, Any]:
        for parameter in model.parameters():
            parameter.grad = None
        out, rest = model(torch.randn(33, 8))
        loss = out.square().mean()
        loss.backward()
        return {"loss": loss, "rest": rest, "grads": {name: p.grad for name, p in model.named_parameters()}}

    return run


def both(planted: Any) -> tuple[Any, Bisection]:
    model = Net(planted)
    return compare_runs(step(model), state=[model]), bisect_runs(step(model), modules=model, state=[model])


def test_without_a_fault_nothing_differs() -> None:
    comparison, found = both(torch.nn.Dropout(0.5))
    assert comparison.equal
    assert found.equal, found.lines()
    assert found.ops > 20
    assert found.calls == 12  # six modules, forward and backward
    assert found.lines() == [f"no difference in {found.ops} ops and 12 calls of modules"]


def test_an_atomic_add_in_forward() -> None:
    comparison, found = both(AtomicAdd())
    assert comparison.first.kind == "value"
    assert comparison.first.most_ulps > 0
    assert found.op is not None
    assert (found.op.kind, found.op.name, found.op.module) == ("op", "planted.atomic_add.default", "planted")
    assert (found.op.phase, found.op.node) == ("forward", "")
    assert found.module is not None
    assert found.module.name == "planted"
    assert "planted.atomic_add.default in planted, forward" in found.lines()[0]


def test_an_atomic_add_in_backward() -> None:
    comparison, found = both(AtomicBackward())
    assert {d.name for d in comparison.differences} == {"grads.planted.table"}
    assert found.module is None
    assert found.op is not None
    assert (found.op.name, found.op.phase) == ("planted.atomic_add.default", "backward")
    assert found.op.node.endswith("GatherBackward")
    assert found.result is not None
    assert found.result.name == "grads.planted.table"


def test_a_backward_that_differs_is_named_by_its_module() -> None:
    class Noisy(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return AtomicSum.apply(x)

    class AtomicSum(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            places = torch.arange(len(gradient)) % 2
            return torch.ops.planted.atomic_add(gradient, places, 2)[places]

    _, found = both(Noisy())
    assert found.module is None
    assert found.backward is not None
    assert (found.backward.name, found.backward.phase) == ("planted", "backward")


@pytest.mark.parametrize(
    ("planted", "kind", "index"),
    [(NanPayload(), "nan", (1,)), (SwappedZero(), "sign of zero", (2,))],
    ids=["nan_payload", "sign_of_zero"],
)
def test_a_write_behind_torch(planted: Any, kind: str, index: tuple[int, ...]) -> None:
    comparison, found = both(planted)
    assert [(d.name, d.kind, d.index) for d in comparison.differences] == [("rest.0", kind, index)]
    assert found.op is not None
    assert (found.op.kind, found.op.module) == ("outside of torch", "planted")
    assert "after aten.zeros.default" in found.op.detail
    assert "in planted" in found.op.detail


def test_memory_that_was_never_written() -> None:
    buffers = iter([1.0, 2.0])

    class Unwritten(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            y = torch.empty(3)
            y.detach().numpy()[:] = next(buffers)  # what happened to lie there
            return x, y + 1

    model = Net(Unwritten())
    found = bisect_runs(step(model), modules=model, state=[model])
    assert found.op is not None
    assert (found.op.kind, found.op.name) == ("outside of torch", "aten.add.Tensor")
    assert "aten.empty" in found.op.detail


def test_another_sequence_of_ops() -> None:
    runs = itertools.count()

    class Branch(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x.sin() if next(runs) == 0 else x.cos()

    model = Net(Branch())
    found = bisect_runs(step(model), modules=model, state=[model])
    assert found.op is not None
    assert (found.op.kind, found.op.name) == ("sequence", "aten.sin.default")
    assert "aten.cos.default" in found.op.detail


class Autotuned(torch.nn.Module):
    """Sums by a kernel whose block size is the order of its additions; each run tunes it anew, as a process does."""

    def __init__(self) -> None:
        super().__init__()
        stub = stub_kernels.StubKernel(effect=self.sum)
        self.times = itertools.cycle([{4: 1.0, 64: 2.0}, {4: 2.0, 64: 1.0}])
        self.bench = stub_kernels.Bench(stub=stub)
        self.tuner = stub_kernels.autotuner(stub_kernels.configs(4, 64), stub=stub, bench=self.bench)

    @staticmethod
    def sum(named: dict[str, Any]) -> None:
        # Of several scalings, so that on no CPU all sums happen to round alike in both orders.
        scaled = named["x"] * torch.arange(1, 1 + len(named["y"])).unsqueeze(1)
        total = torch.zeros(len(scaled))
        for part in scaled.split(named["BLOCK"], dim=1):
            total += sum(part.unbind(1), torch.zeros(len(scaled)))
        named["y"].numpy()[:] = total.numpy()

    def forward(self, x: Any) -> Any:
        out = torch.zeros(24)
        self.bench.times = next(self.times)
        self.tuner.cache.clear()
        with torch.utils._python_dispatch._disable_current_modes():  # what a kernel does, torch does not see
            stub_kernels.launch(self.tuner, x.detach().flatten(), out, x.numel(), True)
        return x, out + 0


def test_an_unpinned_kernel() -> None:
    comparison, found = both(Autotuned())
    assert [d.name for d in comparison.differences] == ["rest.0"]
    assert comparison.first.ulps > 0
    assert found.op is not None
    assert (found.op.kind, found.op.module) == ("outside of torch", "planted")


def test_the_same_kernel_pinned() -> None:
    with tuning.install(tuning.AutotunePolicy(mode="pinned", modules=("stub_kernels",))) as installed:
        comparison, found = both(Autotuned())
        assert comparison.equal, comparison.lines()
        assert found.equal, found.lines()
        assert installed.choices
        assert installed.benchmarks == 0


# --- programs as they are ---------------------------------------------------------------------------------------------


class InPlace(torch.nn.Module):
    """Changes its input, and what another module returned, in place; returns what torch does not know to look into."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.relu = torch.nn.ReLU(inplace=True)
        self.same = torch.nn.Identity()

    def forward(self, x: Any) -> Any:
        y = self.linear(x)
        y += 1
        return self.same(self.relu(y)) + y


def test_changes_in_place_are_no_obstacle_and_change_no_gradient() -> None:
    model = Net(InPlace())
    plain = step(model)
    torch.manual_seed(3)
    expected = {name: gradient.clone() for name, gradient in plain()["grads"].items()}
    torch.manual_seed(3)
    seen = []

    def run() -> Any:
        seen.append(plain())
        return seen[-1]

    found = bisect_runs(run, modules=model, state=[model])
    assert found.equal, found.lines()
    assert all(torch.equal(seen[0]["grads"][name], gradient) for name, gradient in expected.items())
    comparison, found = both(torch.nn.Sequential(InPlace(), AtomicBackward(), InPlace()))
    assert not comparison.equal
    assert found.op is not None
    assert found.op.name == "planted.atomic_add.default"


def test_an_input_passed_on_keeps_its_module_apart_in_backward() -> None:
    noise = iter([1.0, 2.0])

    class Residual(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.quiet = torch.nn.Linear(8, 8)
            self.same = torch.nn.Identity()
            self.noisy = Noisy()

        def forward(self, x: Any) -> Any:
            return self.quiet(x) + self.same(self.noisy(x))

    class Noise(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return gradient * next(noise)

    class Noisy(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return Noise.apply(x)

    model = Net(Residual())
    found = bisect_runs(step(model), modules=model, state=[model])
    assert found.module is None
    assert found.backward is not None
    assert found.backward.name == "planted.noisy"


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook:FutureWarning")
def test_no_hook_stays_whatever_happens() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    model[1].register_backward_hook(lambda *_: None)

    def counts() -> list[int]:
        return [
            len(table)
            for each in model.modules()
            for table in (each._forward_hooks, each._forward_pre_hooks, each._backward_hooks, each._backward_pre_hooks)
        ]

    before = counts()
    assert bisect_runs(lambda: model(torch.ones(1, 2)), modules=model).equal
    with pytest.raises(ZeroDivisionError):
        bisect_runs(lambda: 1 / 0, modules=model)
    assert counts() == before


@pytest.mark.filterwarnings("ignore:.*torch.jit.*deprecated")
def test_subclasses_functions_and_compiled_modules_are_run() -> None:
    class Named(torch.nn.Parameter):
        """Adds nothing."""

    model = torch.nn.Linear(2, 2)
    model.weight = Named(model.weight.detach())
    assert bisect_runs(lambda: model(torch.ones(1, 2)), modules=model, state=[model]).equal
    scripted = torch.nn.Sequential(model, torch.jit.script(torch.nn.Linear(2, 2)))
    assert bisect_runs(lambda: scripted(torch.ones(1, 2)), modules=scripted).equal
    taken = torch.ops.higher_order.cond
    graph = torch.fx.symbolic_trace(lambda x: (x + 1,))
    found = bisect_runs(lambda: taken(torch.tensor(True), graph, graph, (torch.ones(2),)))
    assert found.equal
    assert found.ops > 1


def test_a_module_that_returns_an_object_is_named() -> None:
    import dataclasses

    runs = itertools.count()

    @dataclasses.dataclass
    class Result:
        inner: Any

    class Wrapping(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return Result([x + next(runs)])

    model = Wrapping()
    found = bisect_runs(lambda: model(torch.ones(2)), modules=model)
    assert found.module is not None
    assert (found.module.name, found.module.output) == ("Wrapping", "output 0.inner.0")


def garbage(runs: Any, shape: tuple[int, ...] = (4,)) -> Any:
    out = torch.empty(shape)
    out.detach().numpy()[:] = next(runs)  # what memory that is used again looks like
    return out


def by_index(out: Any) -> None:
    out.index_copy_(0, torch.tensor([0, 2]), torch.ones(2))
    out.index_copy_(0, torch.tensor([1, 3]), torch.zeros(2))


def by_mask(out: Any) -> None:
    mask = torch.tensor([True, False, True, False])
    out[mask] = 1.0
    out.masked_fill_(~mask, 2.0)


def by_slices(out: Any) -> None:
    torch.add(torch.ones(2), 1, out=out[:2])
    out[2:] = 3.0
    out[:2].mul_(2)


def by_scatter(out: Any) -> None:
    out.scatter_(0, torch.tensor([3, 1]), torch.ones(2))
    out.scatter_(0, torch.tensor([0, 2]), 7.0)
    out.add_(1)


@pytest.mark.parametrize("write", [by_index, by_mask, by_slices, by_scatter])
def test_memory_that_is_written_in_parts_blames_nobody(write: Any) -> None:
    runs = itertools.count(1)

    def run() -> Any:
        out = garbage(runs)
        write(out)
        return out + 0

    assert compare_runs(run).equal
    found = bisect_runs(run)
    assert found.equal, found.lines()


@pytest.mark.parametrize("write", [by_index, by_mask, by_slices, by_scatter])
def test_a_fault_in_a_part_is_found_where_it_is(write: Any) -> None:
    runs, faults = itertools.count(1), itertools.count()

    def run() -> Any:
        out = garbage(runs)
        write(out)
        out[1:3].copy_(torch.ops.planted.atomic_add(torch.ones(2, 1) * next(faults), torch.arange(2), 2)[:, 0])
        return out + 0

    found = bisect_runs(run)
    assert found.op is not None
    assert found.op.name == "aten.mul.Tensor"


def test_reading_what_was_written_in_part_alone_is_found() -> None:
    runs = itertools.count(1)

    def run() -> Any:
        out = garbage(runs)
        out[:3] = 1.0
        return out + 0

    found = bisect_runs(run)
    assert found.op is not None
    assert (found.op.kind, found.op.name) == ("outside of torch", "aten.add.Tensor")
    assert "read though it was never written whole" in found.op.detail


def test_digests_are_read_once_for_each_run(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[Any] = []
    real = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda t: (reads.append(t), real(t))[1])
    bisect_runs(lambda: torch.ones(3).mul(2).add(1))
    assert len(reads) == 4  # a run's trace, and what it returned
