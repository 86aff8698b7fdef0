"""The case ``step`` without a GPU: what it refuses, and what it makes of the times."""

from __future__ import annotations

from typing import Any

import pytest

from bench import step

READY: dict[str, dict[str, Any]] = {
    "stock": {"benchmarks": 9, "sources": ["timed"]},
    "table": {"benchmarks": 0, "sources": ["exact"]},
    "cheapest": {"benchmarks": 0, "sources": ["cheapest"]},
}


@pytest.mark.parametrize(
    ("side", "change", "message"),
    [
        ("table", {"benchmarks": 3}, "table: 3 candidates were timed"),
        ("cheapest", {"benchmarks": 1}, "cheapest: 1 candidates were timed"),
        ("cheapest", {"sources": ["cheapest", "exact"]}, "a table was used"),
    ],
)
def test_nothing_wrong_is_timed(side: str, change: dict[str, Any], message: str) -> None:
    step.check(READY)
    with pytest.raises(RuntimeError, match=message):
        step.check({**READY, side: {**READY[side], **change}})


def test_a_pinned_side_repeats_its_digest_where_algorithms_are_deterministic() -> None:
    for side, state in (("stock", "on"), ("stock", "off"), ("table", "off")):
        step.check_digests(side, state, ["a", "b"])
    step.check_digests("table", "on", ["a", "a"])
    with pytest.raises(RuntimeError, match="cheapest, deterministic algorithms on: 2 digests of 3 steps"):
        step.check_digests("cheapest", "on", ["a", "b", "a"])


def test_figures_are_a_median_with_quantiles() -> None:
    assert step.figures([float(n) for n in range(1, 12)]) == {
        "median_ms": 6,
        "p10_ms": pytest.approx(1.2),
        "p90_ms": pytest.approx(10.8),
        "steps": 11,
    }
