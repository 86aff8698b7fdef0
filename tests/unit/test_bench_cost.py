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
    monkeypatch.setattr(cost, "_measure", lambda *arguments: found)
    options = argparse.Namespace(interpret=False, out=tmp_path, max_slowdown=limit, rounds=1, steps=3)
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
