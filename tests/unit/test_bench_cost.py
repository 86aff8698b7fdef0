"""The case ``cost`` without a GPU: what it refuses to time, how candidates are shared out, and what it writes."""

from __future__ import annotations

import argparse
import json
import types
from pathlib import Path
from typing import Any

import pytest

from bench import cost, cost_worker

READY = {
    "same_bits_twice": True,
    "deterministic_algorithms": True,
    "benchmarks": 0,
    "sources": ["cheapest"],
    "digest": "a",
    "seconds": 1.0,
}


def measured(**step: float) -> dict[str, tuple[Any, Any]]:
    def ranges(milliseconds: float) -> dict[str, Any]:
        half = milliseconds / 2
        return {
            "step": {"calls": 1, "host": [9.0] * 3, "device": [milliseconds] * 3},
            "attention, backward": {"calls": 1, "host": [9.0] * 3, "device": [half] * 3},
        }

    return {
        name: (READY, {"device": "NVIDIA H200", "steps": 3, "ranges": ranges(milliseconds)})
        for name, milliseconds in zip(cost.SIDES, step.values(), strict=True)
    }


@pytest.mark.parametrize(
    ("side", "change", "message"),
    [
        ("deterministic", {"same_bits_twice": False}, "computed twice, differ"),
        ("deterministic, fill", {"deterministic_algorithms": False}, "computed twice, differ"),
        ("deterministic, fill", {"digest": "b"}, "something reads it"),
        ("pinned", {"benchmarks": 3}, "3 candidates were timed"),
        ("deterministic, cheapest", {"sources": ["cheapest", "exact"]}, "a table was used"),
    ],
)
def test_nothing_wrong_is_timed(side: str, change: dict[str, Any], message: str) -> None:
    ready = {name: dict(READY) for name in cost.SIDES}
    cost._check(ready)
    ready["default"] |= {"same_bits_twice": False, "benchmarks": None, "digest": "other"}
    cost._check(ready)
    ready[side] |= change
    with pytest.raises(RuntimeError, match=message):
        cost._check(ready)


def test_all_shares_together_are_all_candidates() -> None:
    config = types.SimpleNamespace
    shares = []
    for share in range(4):
        tuners = [
            config(
                base_fn=config(__name__=f"kernel{number}"),
                configs=[config(kwargs={"BLOCK": 16 << place}, num_stages=2) for place in range(count)],
            )
            for number, count in enumerate((9, 3, 1))
        ]
        cost_worker.share_out(share, 4, tuners[::-1])
        shares.append([sorted(c.kwargs["BLOCK"] for c in tuner.configs) for tuner in tuners])
        assert all(tuner.configs for tuner in tuners)
        assert tuners[0].do_bench(lambda: None, quantiles=(0.5,)) == [1.0, 1.0, 1.0]
    for number, count in enumerate((9, 3, 1)):
        assert {block for share in shares for block in share[number]} == {16 << place for place in range(count)}
        largest = 16 << (count - 1)
        assert all(16 in share[number] for share in shares if largest in share[number])
    assert max(len(share[0]) for share in shares) <= 4


@pytest.mark.parametrize("limit", [None, 1.4, 1.6])
def test_the_result_has_every_side_and_the_switches(
    limit: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = measured(default=10, pinned=9, deterministic=15, fill=18, cheapest=20)
    monkeypatch.setattr(cost, "_measure", lambda *arguments: (1, found))
    monkeypatch.setattr(cost, "inexact", lambda *arguments: [])
    options = argparse.Namespace(interpret=False, out=tmp_path, max_slowdown=limit, rounds=1, steps=3, deadline=9)
    result = cost.run(options)
    assert {row["switch"]: row["lost_ms"] for row in result["switches"]} == {
        "configs from the shipped tables in place of timing": -1,
        "deterministic mode beside pinning alone": 6,
        "fill_uninitialized_memory": 3,
        "cheapest configs in place of the shipped tables": 5,
    }
    rows = result["tables"]["deterministic"]["rows"]
    assert [(row["range"], row["lost_ms"]) for row in rows] == [
        ("step", 5),
        ("step, deterministic, fill_uninitialized_memory off and on", 3),
        ("attention, backward", 2.5),
    ]
    assert bool(result["problems"]) == (limit == 1.4)
    assert len(list(tmp_path.glob("cost_table_*.csv"))) == 2
    assert len(list(tmp_path.glob("cost_*.csv"))) == 7
    json.dumps(result)
    assert "fill_uninitialized_memory" in capsys.readouterr().out


def test_a_pinned_side_without_its_own_entries_is_a_problem() -> None:
    assert cost.inexact("pinned", ["exact", "exact"]) == []
    assert cost.inexact("pinned", ["exact", "nearest"]) == [
        "pinned: sources {'exact': 1, 'nearest': 1}: expected entries of the tables alone"
    ]
    assert cost.inexact("pinned", [])


class Scripted:
    """Stands in for a worker: answers, fails or is late."""

    def __init__(self, name: str, answer: Any) -> None:
        self.name, self.answer, self.closed, self.turns = name, answer, False, 0

    def hear(self) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def tell(self, line: str) -> None:
        self.turns += 1

    def close(self) -> None:
        self.closed = True


def test_a_compiler_that_fails_or_is_late_does_not_end_the_case(capsys: pytest.CaptureFixture[str]) -> None:
    good = Scripted("good", {"seconds": 2.0})
    bad = [Scripted("late", TimeoutError("late: not done in time")), Scripted("dead", RuntimeError("dead ended"))]
    assert cost.hear_compilers([bad[0], good, bad[1]]) == {"good": 2.0}  # type: ignore[list-item]
    assert [worker.closed for worker in (*bad, good)] == [True, True, False]
    assert "1 of 3 compilers ended well" in capsys.readouterr().out


def test_turns_end_before_the_deadline_with_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(cost.time, "monotonic", lambda: now[0])

    class Slow(Scripted):
        def hear(self) -> Any:
            now[0] += 10

    sides = {name: Slow(name, None) for name in "ab"}
    assert cost.take_turns(sides, 5, 8, 1000.0) == 5  # type: ignore[arg-type]
    now[0] = 0.0
    # A round takes 20 s, what follows 10: the third would end at 60 and be written by 70.
    assert cost.take_turns(sides, 5, 8, 65.0) == 2  # type: ignore[arg-type]
    assert [side.turns for side in sides.values()] == [7, 7]
