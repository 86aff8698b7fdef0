"""The case ``kernels`` without a GPU: what is counted of a profile, and what is put side by side."""

from __future__ import annotations

import types
from typing import Any

import pytest

from bench import kernels


def event(name: str, microseconds: float, device: str = "DeviceType.CUDA") -> Any:
    return types.SimpleNamespace(
        name=name, device_type=device, time_range=types.SimpleNamespace(elapsed_us=lambda: microseconds)
    )


def test_only_the_named_kernels_on_the_device_are_counted() -> None:
    events = [event("a", 1000), event("a", 3000), event("a", 500, "DeviceType.CPU"), event("b", 1), event("c", 2000)]
    assert kernels.kernel_durations(events, {"a", "c"}) == {"a": [1, 3], "c": [2]}


def test_a_kernel_is_its_median_times_its_launches() -> None:
    found = kernels.per_step({"a": [1.0, 2.0, 30.0, 1.0, 2.0, 2.0], "b": [4.0, 5.0, 6.0]}, 3)
    assert found == {
        "a": {"launches": 2, "ms": 4, "lowest_ms": 2},
        "b": {"launches": 1, "ms": 5, "lowest_ms": 4},
    }


def side(a: float, b: float, launches: float = 1) -> dict[str, dict[str, float]]:
    return {name: {"launches": launches, "ms": ms, "lowest_ms": ms} for name, ms in (("a", a), ("b", b))}


def test_sides_stand_beside_each_other() -> None:
    found = kernels.summary({"timed": side(1, 3), "table": side(2, 3), "cheapest": side(4, 4)})
    assert found["kernels_ms"]["a"] == {"timed": 1, "table": 2, "cheapest": 4}
    assert found["sum_ms"] == {"timed": 4, "table": 5, "cheapest": 8}
    assert found["over_timed"] == {"timed": 1, "table": 1.25, "cheapest": 2}


@pytest.mark.parametrize("other", [side(1, 1, launches=2), {"a": side(1, 1)["a"]}, {}])
def test_sides_that_launch_other_kernels_are_refused(other: Any) -> None:
    with pytest.raises(RuntimeError, match="the sides launch other kernels"):
        kernels.summary({"timed": side(1, 1), "table": other})
