"""The case ``kernels`` without a GPU: what is counted of a profile, and what is put side by side."""

from __future__ import annotations

import types
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import kernels


def event(name: str, microseconds: float, device: str = "DeviceType.CUDA", start: float = 0) -> Any:
    taken = types.SimpleNamespace(elapsed_us=lambda: microseconds, start=start)
    return types.SimpleNamespace(name=name, device_type=device, time_range=taken)


def test_launches_are_in_the_order_of_the_device() -> None:
    events = [event("a", 3000, start=9), event("b", 1), event("a", 1000, start=2)]
    assert kernels.kernel_durations(events, {"a"}) == {"a": [1, 3]}


def test_only_the_named_kernels_on_the_device_are_counted() -> None:
    events = [event("a", 1000), event("a", 3000), event("a", 500, "DeviceType.CPU"), event("b", 1), event("c", 2000)]
    assert kernels.kernel_durations(events, {"a", "c"}) == {"a": [1, 3], "c": [2]}


def test_a_kernel_is_the_sum_of_the_medians_of_its_launches() -> None:
    found = kernels.per_step({"a": [1.0, 2.0, 30.0, 1.0, 2.0, 2.0], "b": [4.0, 5.0, 6.0]}, 3)
    assert found == {
        "a": {"launches": 2, "ms": 4, "lowest_ms": 2},  # 1, 30, 2 and 2, 1, 2
        "b": {"launches": 1, "ms": 5, "lowest_ms": 4},
    }


def test_launches_of_several_keys_are_not_mixed() -> None:
    assert kernels.per_step({"a": [1.0, 1.0, 3.0] * 2}, 2)["a"] == {"launches": 3, "ms": 5, "lowest_ms": 5}


def test_steps_that_launch_unequally_are_refused() -> None:
    with pytest.raises(RuntimeError, match="a: 3 launches in 2 steps"):
        kernels.per_step({"a": [1.0, 1.0, 3.0]}, 2)


@pytest.mark.parametrize(("change", "message"), [(1.01, None), (1.05, "over 0.02"), (float("nan"), "differs")])
def test_results_of_the_sides_are_compared_before_they_are_timed(
    change: float, message: str | None, tmp_path: Path
) -> None:
    for name in kernels.SIDES:
        torch.save({"out": torch.ones(4) * (change if name == "cheapest" else 1)}, tmp_path / f"{name}.pt")
    if message is None:
        found = kernels.compare_outputs(tmp_path)
        assert (found["table"]["out"], found["cheapest"]["out"]) == (0, pytest.approx(0.01, rel=1e-3))
    else:
        with pytest.raises(RuntimeError, match=message):
            kernels.compare_outputs(tmp_path)


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
