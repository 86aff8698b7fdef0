"""Bit classes on a GPU: a race caught, an order of summation seen, a choice that varies within its class."""

from __future__ import annotations

from typing import Any

import pytest

import tuning
from tuning import AutotunePolicy

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def _clean():
    yield
    tuning.uninstall()


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (-(-meta["n"] // meta["BLOCK"]),)


def in_scope(name: str) -> bool:
    return name.startswith("gpu_probe_kernels.")


def pinned(**fields: Any) -> AutotunePolicy:
    return AutotunePolicy(mode="pinned", modules=("gpu_probe_kernels",), **fields)


def spread(n: int) -> Any:
    generator = torch.Generator(device="cuda").manual_seed(0)
    values = torch.randn(n, device="cuda", generator=generator)
    return values * torch.exp2(torch.randint(-10, 10, (n,), device="cuda", generator=generator).float())


def test_an_atomic_add_is_caught_as_racy():
    from gpu_probe_kernels import atomic_total

    from tuning.bitexact.probe import probe_launches

    n = 1 << 22
    with tuning.install(pinned()), probe_launches(in_scope, inputs=2, repeats=20) as probe:
        atomic_total[grid](spread(n), torch.zeros(1, device="cuda"), n)
    (found,) = probe.keys
    assert found.atomics
    assert found.in_place == ("out",)
    assert len(found.racy) >= 1
    assert not found.single
    assert probe.config_invariant == ()


def test_an_order_of_summation_makes_classes_and_warps_may_too():
    from gpu_probe_kernels import total

    from tuning.bitexact.probe import probe_launches

    n = 1 << 16
    x = spread(n)
    before = torch.cuda.get_rng_state()
    with tuning.install(pinned()), probe_launches(in_scope, inputs=3) as probe:
        total[(1,)](x, torch.empty(1, device="cuda"), n)
    (found,) = probe.keys
    assert len(found.classes) > 1
    assert found.tried == 3
    assert not found.racy
    assert torch.equal(before, torch.cuda.get_rng_state())


def test_a_graph_is_captured_while_launches_are_probed():
    from gpu_probe_kernels import double

    from tuning.bitexact.probe import probe_launches

    n = 1 << 12
    x = spread(n)
    y = torch.zeros_like(x)
    with tuning.install(pinned()):
        double[grid](x, y, n)  # compiled before anything is captured
        y.zero_()
        with probe_launches(in_scope, inputs=2) as probe:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                double[grid](x, y, n)
            assert probe.keys == []
            graph.replay()
            torch.cuda.synchronize()
            assert torch.equal(y, x * 2)
            double[grid](x, y, n)
        (found,) = probe.keys
    assert found.single


def test_a_probe_leaves_random_numbers_and_arguments_that_are_read_and_written():
    from gpu_probe_kernels import add_once_or_twice

    from tuning.bitexact.probe import probe_launches

    n = 1 << 12
    x, y = spread(n), torch.ones(n, device="cuda")
    torch.cuda.manual_seed(3)
    with tuning.install(pinned()), probe_launches(in_scope, inputs=2) as probe:
        add_once_or_twice[grid](x, y, n)
    (found,) = probe.keys
    assert found.in_place == ("y",)
    assert len(found.classes) == 2
    drawn = torch.rand(1, device="cuda")
    torch.cuda.manual_seed(3)
    torch.rand(1, device="cuda")  # the run's own launch drew once
    assert torch.equal(drawn, torch.rand(1, device="cuda"))


def test_a_table_of_addresses_is_not_replayed():
    from gpu_probe_kernels import copy_integers

    from tuning.bitexact.probe import probe_launches

    memory = torch.zeros(1 << 20, device="cuda")
    held, plain = (torch.tensor([3, value], device="cuda") for value in (memory.data_ptr() + 64, 1 << 62))
    with tuning.install(pinned()), probe_launches(in_scope, inputs=2) as probe:
        copy_integers[grid](held, torch.zeros_like(held), 2)
        copy_integers[grid](plain, torch.zeros_like(plain)[:2], 2)
    first = probe.keys[0]
    assert not first.claims
    assert "addresses of allocated memory" in first.verdict


def test_ranges_inside_a_capture_are_not_timed():
    from tuning.bitexact.cost import timed_ranges

    x = torch.ones(1 << 12, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with timed_ranges() as timer, timer.step():
        with torch.cuda.nvtx.range("around"), torch.cuda.graph(graph), torch.profiler.record_function("within"):
            x.mul_(2)
        with torch.profiler.record_function("replay"):
            graph.replay()
    found = timer.finish("x").ranges
    assert "within" not in found
    assert {"step", "around", "replay"} <= set(found)


def test_a_choice_timed_within_its_class_keeps_the_bits(tmp_path):
    from gpu_probe_kernels import double

    from tuning.bitexact.probe import probe_launches, write_classes

    n = 1 << 20
    x = spread(n)
    y = torch.empty_like(x)
    with tuning.install(pinned()) as installed:
        with probe_launches(in_scope, inputs=3) as probe:
            double[grid](x, y, n)
        assert probe.config_invariant == ("gpu_probe_kernels.double",)
        write_classes(tmp_path, probe.keys, installed.choices)
    expected = y.clone()
    with tuning.install(pinned(table_path=(str(tmp_path),), within_class="timed")) as installed:
        for _ in range(2):
            y.zero_()
            double[grid](x, y, n)
            assert torch.equal(y, expected)
        (choice,) = installed.choices
    assert choice.source == "timed"
    assert "timed within the class of" in choice.detail
    assert installed.benchmarks == 4


def test_nothing_is_timed_while_a_graph_captures(tmp_path):
    from gpu_probe_kernels import double

    from tuning.bitexact.probe import probe_launches, write_classes

    n = 1 << 12
    x = spread(n)
    y = torch.empty_like(x)
    with tuning.install(pinned()) as installed:
        with probe_launches(in_scope, inputs=1) as probe:
            double[grid](x, y, n)
        write_classes(tmp_path, probe.keys, installed.choices)
    expected = y.clone()
    y.zero_()
    with tuning.install(pinned(table_path=(str(tmp_path),), within_class="timed")) as installed:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="relaxed"):
            double[grid](x, y, n)
        graph.replay()
        torch.cuda.synchronize()
        assert installed.benchmarks == 0
    assert torch.equal(y, expected)
