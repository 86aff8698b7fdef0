"""The case ``tables`` on a small table: what it checks first, and what it reports."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from bench import tables


def test_a_small_table_is_checked_and_timed(capsys: pytest.CaptureFixture[str]) -> None:
    result = tables.run(argparse.Namespace(entries=410, processes=1))
    assert (result["case"], result["entries"]) == ("tables", 410)
    assert {"load_ms", "load_cpu_ms", "miss_us", "hit_first_us", "hit_again_us", "unknown_kernel_us", "import_ms",
            "import_and_names_ms"} <= set(result["medians"])  # fmt: skip
    assert all(value > 0 for value in result["medians"].values())
    assert set(result["met"]) == set(tables.TARGETS)
    after_load, after_all = (result["memory"][name]["allocated_MB"] for name in ("after_load", "after_all_lookups"))
    assert 0 < after_load < after_all
    assert "410 entries" in capsys.readouterr().out


def test_an_entry_that_is_not_found_ends_it_before_anything_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tables.make_table(tmp_path, 10)
    assert tables.worker("check", str(tmp_path), 10) == {"missing": 0, "wrong": 0}
    assert tables.worker("check", str(tmp_path), 12) == {"missing": 2, "wrong": 0}
    make = tables.make_table
    monkeypatch.setattr(tables, "make_table", lambda folder, entries: make(folder, entries - 1))
    with pytest.raises(RuntimeError, match="expected all found"):
        tables.run(argparse.Namespace(entries=5, processes=1))
