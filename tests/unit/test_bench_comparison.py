"""Comparing two results of a benchmark."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

from bench.__main__ import CASES, main
from bench.comparison import compare

ROOT = Path(__file__).parents[2]


def test_numbers_that_both_have_are_paired_by_place():
    before = {"case": "a", "device": "d", "x": {"ms": 2.0, "gone": 1}, "runs": [{"s": 1}, {"s": 4}], "ok": True}
    after = {"case": "a", "device": "d", "x": {"ms": 3.0}, "runs": [{"s": 1}, {"s": 2}], "ok": False}
    assert compare(before, after) == [("x.ms", 2.0, 3.0), ("runs[0].s", 1.0, 1.0), ("runs[1].s", 4.0, 2.0)]


@pytest.mark.parametrize("name", ["case", "device"])
def test_results_of_another_case_or_device_do_not_compare(name):
    before = {"case": "a", "device": "d"}
    with pytest.raises(ValueError, match=name):
        compare(before, {**before, name: "other"})


@pytest.mark.parametrize("name", ["case", "device"])
def test_a_result_that_does_not_say_what_it_is_compares_with_nothing(name):
    nameless = {"case": "a", "device": "d", name: None}
    with pytest.raises(ValueError, match=f"{name}: expected in both results, found None"):
        compare(nameless, nameless)


def test_the_command_prints_what_changed(tmp_path):
    one = {"case": "a", "device": "d", "ms": 2.0, "same": 1}
    (tmp_path / "one.json").write_text(json.dumps(one))
    (tmp_path / "two.json").write_text(json.dumps({**one, "ms": 1.0}))
    command = [sys.executable, "-m", "bench", "compare", str(tmp_path / "one.json"), str(tmp_path / "two.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "-50.0%" in done.stdout
    assert "2 numbers in both, 1 changed" in done.stdout


def test_every_committed_result_says_where_and_how_it_was_measured():
    listed = (ROOT / "bench" / "README.md").read_text()
    found = sorted((ROOT / "bench" / "results").glob("*.json"))
    assert found
    for path in found:
        result = json.loads(path.read_text())
        assert path.name in listed, path.name
        missing = {"date", "command", "commit", "case", "device"} - result.keys()
        assert missing == set(), path.name
        assert result["case"] in {*CASES, "demo", "determinism"}, path.name
        assert not result["commit"].endswith("-dirty"), path.name
        if result["device"] != "none":
            versions = result.get("versions", result)
            assert all(versions.get(package) for package in ("triton", "torch")), path.name


def test_every_case_says_which_it_is(tmp_path, monkeypatch):
    module = types.SimpleNamespace(add_arguments=lambda parser: None, run=lambda options: {"device": "none"})
    monkeypatch.setattr(importlib, "import_module", lambda name: module)
    for case in CASES:
        monkeypatch.setattr(sys, "argv", ["bench", case, "--out", str(tmp_path), "--name", case])
        main()
        assert json.loads((tmp_path / f"{case}.json").read_text())["case"] == case
