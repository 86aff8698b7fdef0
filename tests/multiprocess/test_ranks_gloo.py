"""Ranks that tune by a skewed stopwatch, and what each mode makes of it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tuning.journal import find_journals, read_journal
from tuning.merge import merge
from tuning.tables import write_table

pytestmark = pytest.mark.multiprocess

WORKER = Path(__file__).with_name("rank_worker.py")
PYTHONPATH = os.pathsep.join(str(folder) for folder in WORKER.parents[1:3])


@pytest.fixture
def ranks(tmp_path):
    def run(size: int, **task: Any) -> list[dict[str, Any]]:
        store = tmp_path / f"store-{len(list(tmp_path.iterdir()))}"
        task = {"store": str(store), **task}
        task["policy"] = {"modules": ["stub_kernels"], **task["policy"]}
        processes = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", str(WORKER), json.dumps(task)],
                env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(size), "PYTHONPATH": PYTHONPATH},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(size)
        ]
        results = []
        try:
            for process in processes:
                out, err = process.communicate(timeout=90)
                assert process.returncode == 0, err
                results.append(json.loads(out.splitlines()[-1]))
        finally:
            for process in processes:
                process.kill()
                process.wait()
        return results

    return run


def test_auto_names_exactly_the_keys_that_disagree_and_raises_on_every_rank(ranks):
    results = ranks(3, policy={"mode": "auto", "verify_strict": True})
    for result in results:
        assert result["error"] == "DisagreementError"
        assert len(result["disagreements"]) == 13
        assert result["disagreements"] == results[0]["disagreements"]
        for n, line in enumerate(sorted(result["disagreements"], key=lambda line: int(line.split("n=")[1].split()[0]))):
            assert f"n={n} " in line
    assert "rank 0: BLOCK=16" in results[0]["disagreements"][0]


def test_auto_without_strict_returns_the_same_verdict_everywhere(ranks):
    assert [result["verdicts"] for result in ranks(2, policy={"mode": "auto"})] == [[False], [False]]


@pytest.mark.stub
def test_pinned_has_one_set_of_configs_and_no_benchmark(ranks):
    results = ranks(4, policy={"mode": "pinned", "verify_every": 1, "verify_strict": True})
    assert [result["verdicts"] for result in results] == [[True]] * 4
    assert [result["benchmarks"] for result in results] == [0] * 4
    assert all(result["choices"] == results[0]["choices"] for result in results)
    assert len(results[0]["choices"]) == 22


def test_recorded_by_all_ranks_merged_and_pinned(ranks, tmp_path):
    recorded = ranks(3, policy={"record_path": str(tmp_path / "journals" / "run")})
    assert len({result["journal"] for result in recorded}) == 3
    journals = [read_journal(path) for path in find_journals([str(tmp_path / "journals")])]
    assert sorted(journal.environment.rank for journal in journals) == [0, 1, 2]
    for table in merge(journals).tables:
        write_table(tmp_path / "tables", table)
    results = ranks(
        2,
        policy={"mode": "pinned", "table_path": [str(tmp_path / "tables")], "on_miss": "error", "verify_strict": True},
    )
    assert [result["verdicts"] for result in results] == [[True], [True]]
    assert {choice["source"] for choice in results[0]["choices"]} == {"exact"}
    assert results[0]["choices"] == results[1]["choices"]


def test_chaos_is_caught_on_every_rank(ranks):
    results = ranks(2, policy={"mode": "pinned", "chaos": True, "verify_strict": True})
    for result in results:
        assert result["error"] == "DisagreementError"
        assert len(result["disagreements"]) == 22


def test_a_choice_of_an_early_step_meets_another_ranks_of_a_later_one(ranks):
    """Rank 0 launches a key at step 1, rank 1 at step 3; one of them launches nothing at all in between."""
    steps = [{"0": [0, 1], "1": [14]}, {"0": [], "1": []}, {"0": [15], "1": [0]}]
    results = ranks(2, policy={"mode": "auto"}, steps=steps)
    assert [result["verdicts"] for result in results] == [[True, True, False]] * 2


def test_checks_are_due_every_so_many_steps(ranks):
    results = ranks(2, policy={"mode": "pinned", "verify_every": 2}, steps=[[0], [1], [2], [3]], maybe=True)
    assert [result["verdicts"] for result in results] == [[None, True, None, True]] * 2


def test_groups_smaller_than_the_world_are_checked_apart(ranks):
    """Ranks 0 and 3 tune alike (their stopwatches do), ranks 1 and 2 do not."""
    results = ranks(4, policy={"mode": "auto"}, groups=[[0, 3], [1, 2]])
    assert [result["verdicts"] for result in results] == [[True], [False], [False], [True]]
