"""The benchmark of merging many files, with few: it writes sound journals, and notices what is lost."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import pytest

from bench import merge as case
from tuning.journal import find_journals, read_journal


def options(*ranks: int) -> argparse.Namespace:
    return argparse.Namespace(ranks=list(ranks), keys=40)


def test_the_case_generates_merges_and_measures(capsys: pytest.CaptureFixture[str]) -> None:
    result = json.loads(json.dumps(case.run(options(3))))
    (row,) = result["rows"]
    assert (row["journals"], row["records"], row["keys"]) == (3, 120, 40)
    assert row["cpu_seconds"] > 0
    assert row["peak_bytes"] > 10 << 20
    assert result["targets"]["wall_seconds"] == {"below": 60.0, "found": None}  # three files say nothing of it
    assert "3 files of 40 keys" in capsys.readouterr().out


def test_the_files_are_journals_whose_winner_is_the_fastest(tmp_path: Path) -> None:
    case.write_files(str(tmp_path), [0, 9], 40)
    first, second = map(read_journal, find_journals([tmp_path]))
    assert (first.environment.rank, second.environment.rank, second.environment.host) == (0, 9, "host1")
    assert len({record.key.text for record in first.records}) > 30
    assert first.records != second.records
    for record in first.records:
        timed = [timing for timing in record.timings if timing.times_ms]
        assert record.winner == min(timed, key=lambda timing: timing.times_ms or ()).config


def test_a_merge_that_loses_something_is_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    def short(journals: Path, out: Path) -> dict[str, Any]:
        next(iter(journals.iterdir())).unlink()
        return measure(journals, out)

    measure = case.measure
    monkeypatch.setattr(case, "measure", short)
    with pytest.raises(RuntimeError, match="merge lost something"):
        case.run(options(3))
