"""What pinned launches ask of the CUDA driver: to launch, and never to wait."""

from __future__ import annotations

import re
from typing import Any

import pytest
from driver_trace import driver_calls

import tuning
from tuning import AutotunePolicy

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")

WAITS = re.compile(r"Synchronize|EventQuery|StreamQuery|Memcpy(?!.*Async)|MemFree(?!Async)|MemAlloc(?!Async)")
LAUNCHES = re.compile(r"cuLaunchKernel")


@pytest.fixture(autouse=True)
def _clean():
    yield
    tuning.uninstall()


def pinned() -> AutotunePolicy:
    return AutotunePolicy(mode="pinned", modules=("gpu_kernels",))


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (-(-meta["n"] // meta["BLOCK"]),)


def tensors(n: int) -> tuple[Any, Any]:
    x = torch.arange(n, device="cuda", dtype=torch.float32)
    y = torch.zeros_like(x)
    torch.cuda.synchronize()
    return x, y


def waits(calls: list[str]) -> list[str]:
    return [call for call in calls if WAITS.search(call)]


def test_a_wait_would_be_seen():
    """The positive control: torch's own synchronisation, and a copy to the host."""
    x, _ = tensors(8)
    with driver_calls() as calls:
        torch.cuda.synchronize()
        x.sum().item()
    assert len(waits(calls)) >= 2, calls


def test_launches_of_a_known_key_launch_and_do_not_wait():
    from gpu_kernels import add_one

    x, y = tensors(2001)
    with tuning.install(pinned()):
        add_one[grid](x, y, 2001)
        torch.cuda.synchronize()
        with driver_calls() as calls:
            for _ in range(5):
                add_one[grid](x, y, 2001)
    assert waits(calls) == []
    assert len([call for call in calls if LAUNCHES.match(call)]) == 5, calls


def test_the_first_launch_of_a_new_key_does_not_wait():
    """The kernel is compiled and loaded already, for another key: choosing is all that is new."""
    from gpu_kernels import add_one

    x, y = tensors(2004)
    with tuning.install(pinned()):
        add_one[grid](x, y, 2002)
        torch.cuda.synchronize()
        with driver_calls() as calls:
            add_one[grid](x, y, 2003)
        assert len(tuning.choices()) == 2
        assert tuning.benchmarks_run() == 0
    assert waits(calls) == []


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
def test_a_captured_launch_does_not_wait(mode: str):
    from gpu_kernels import add_one

    x, y = tensors(2005)
    with tuning.install(pinned()):
        add_one[grid](x, y, 2005)
        y.zero_()
        graph = torch.cuda.CUDAGraph()
        # The calls within: beginning and ending a capture is torch's.
        with torch.cuda.graph(graph, capture_error_mode=mode), driver_calls() as calls:
            add_one[grid](x, y, 2005)
        graph.replay()
        torch.cuda.synchronize()
    assert waits(calls) == []
    assert len([call for call in calls if LAUNCHES.match(call)]) == 1, calls
    assert torch.equal(y, x + 1)


def test_what_stock_triton_does_on_a_hit_is_the_same():
    """A pinned launch makes no driver call that Triton alone would not make."""
    from gpu_kernels import add_one

    x, y = tensors(2006)
    add_one[grid](x, y, 2006)
    torch.cuda.synchronize()
    with driver_calls() as stock:
        add_one[grid](x, y, 2006)
    with tuning.install(pinned()):
        add_one[grid](x, y, 2006)
        torch.cuda.synchronize()
        with driver_calls() as ours:
            add_one[grid](x, y, 2006)
    assert ours == stock
