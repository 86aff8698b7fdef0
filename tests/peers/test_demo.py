"""The demo on real packages: the whole job, its positive control, and each package that it can fall back to."""

from __future__ import annotations

import fnmatch
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tuning import _demo_workloads, cli
from tuning._console import Console
from tuning._demo_processes import Job, clean_environment, run_workers
from tuning._demo_stages import Demo, Stages
from tuning._demo_text import show
from tuning._demo_worker import Request
from tuning.journal import find_journals, read_journal
from tuning.manifest import read_manifest
from tuning.tables import read_table

ROOT = Path(__file__).parents[2]


def demo(*argv: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tuning", "demo", "--device", "interpreter", *argv],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "RANK": "5", "MAMBA_DETERMINISTIC": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )


@pytest.mark.peers("mamba_ssm")
def test_the_main_job_from_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    done = demo("--json", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(done.stdout)
    assert (found["ok"], found["problems"], found["package"]) == (True, [], "mamba_ssm")
    stages = found["stages"]
    assert list(stages) == ["list", "record", "merge", "pinned"]
    assert (stages["list"]["autotuners"], stages["list"]["candidates"]) == (43, 474)
    assert stages["record"]["candidates_timed"] == [114, 114]
    assert stages["merge"]["keys"] == 15
    assert stages["pinned"]["candidates_timed"] == 0
    assert stages["pinned"]["verified"] is True
    digests = stages["pinned"]["digests"]
    assert [len(each) for each in digests] == [2, 2]
    assert len({digest for each in digests for digest in each}) == 1
    assert {row["source"] for row in found["keys"]} == {"exact"}

    folder = tmp_path / "triton-tuning-demo"
    assert found["folder"] == str(folder)
    assert json.loads((folder / "demo.json").read_text()) == found
    check_what_was_left(folder, found)
    check_what_is_suggested(folder, capsys)
    check_what_is_printed(found)


def check_what_was_left(folder: Path, found: Any) -> None:
    journals = [read_journal(path) for path in find_journals([str(folder / "journals")])]
    assert sorted(journal.environment.rank for journal in journals) == [0, 1]
    assert {len(journal.records) for journal in journals} == {15}
    table = read_table(folder / "tables" / "cpu" / "mamba_ssm.json")
    assert {str(entry.config) for entry in table.entries} == {row["config"] for row in found["keys"]}
    manifests = [read_manifest(folder / name) for name in ("manifest.json", "manifest.rank1.json")]
    assert manifests[0].digest == manifests[1].digest
    assert manifests[0].benchmarks_run == 0
    # What the README says is left, and nothing else.
    readme = (ROOT / "README.md").read_text(encoding="utf-8").partition("What it leaves in its folder")[2]
    rows = readme.partition("\n\n## ")[0].splitlines()
    patterns = [
        re.sub(r"<\w+>", "*", pattern)
        for row in rows
        if row.startswith("| `")
        for pattern in re.findall(r"`([^`]*)`", row.split(" | ")[0])
    ]
    files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    assert [file for file in files if not any(fnmatch.fnmatch(file, pattern) for pattern in patterns)] == []
    assert [pattern for pattern in patterns if not fnmatch.filter(files, pattern)] == []
    assert sorted(files) == sorted(path for paths in found["files"].values() for path in paths)


def check_what_is_printed(found: Any) -> None:
    result = Demo(**{name: value for name, value in found.items() if name not in ("version", "ok")})
    stream = io.StringIO()
    show(Console(stream, width=80), result)
    text = " ".join(stream.getvalue().split())
    for row in found["keys"]:
        assert row["kernel"].rpartition(".")[2] in text
        assert row["config"] in text
    for paths in found["files"].values():
        assert all(path in text for path in paths)
    assert "0 candidates timed, one digest" in text
    assert "Pinned from the table: nothing was timed" in text
    result.problems.append("something")
    show(Console(stream, width=80), result)
    assert stream.getvalue().endswith("FAILED: something\n")


def check_what_is_suggested(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The commands that the demo names at its end."""
    capsys.readouterr()
    assert cli.main(["report", str(folder / "journals")]) == 0
    assert "15 keys of 15 kernels from 2 journals" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["check", str(folder / "tables")]) == 0
    assert "1 table, 15 entries" in capsys.readouterr().out
    kernel = "ssd_combined._chunk_scan_chunk_state_bwd_dx_kernel"
    assert cli.main(["show", kernel, str(folder / "journals"), "--table", str(folder / "tables")]) == 0
    assert "on cpu" in capsys.readouterr().out


@pytest.mark.peers("fla", "einops")
def test_the_positive_control_is_caught_on_both_ranks(tmp_path: Path):
    done = demo("--chaos", "--package", "fla", "--out", str(tmp_path / "out"), cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the verifier caught it on 2 of 2" in " ".join(done.stdout.split())
    assert "The disagreement that was made on purpose was caught" in done.stdout
    found = json.loads((tmp_path / "out" / "demo.json").read_text())
    assert len(found["stages"]["chaos"]["disagreements"]) == 12
    assert not (tmp_path / "out" / "tables").exists()


def test_a_control_that_nobody_notices_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The exit code says whether it was caught, and on each rank."""
    import tuning.demo

    workload = _demo_workloads.WORKLOADS[0]
    monkeypatch.setattr(_demo_workloads, "installed_workloads", lambda: (workload,))

    def answer(self: Stages, stage: str, requests: Any) -> list[Any]:
        if stage == "list":
            return [{"inventory": {"autotuners": [], "candidates": 0}, "widest": 1, "versions": {}, "memory": 0}]
        return [{"problem": "seen", "digests": ["a"], "disagreements": ["k"]}, {"problem": None, "digests": ["b"]}]

    monkeypatch.setattr(Stages, "_run", answer)
    found = tuning.demo.run_demo(out=str(tmp_path / "out"), chaos=True, device="interpreter")
    assert found.problems == ["chaos: the disagreement was not noticed on rank 1"]
    assert cli.main(["demo", "--chaos", "--device", "interpreter", "--out", str(tmp_path / "two")]) == 1


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("benchmarks", 3, "3 candidates were timed, expected none"),
        ("digests", ["a", "b"], "outputs and gradients differ"),
        ("verdicts", [True, False], "a check was not passed"),
    ],
)
def test_a_pinned_run_that_goes_wrong_fails(
    field: str, value: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    good = {"digests": ["a", "a"], "benchmarks": 0, "verdicts": [True, True], "problem": None, "choices": []}
    answers = [good, {**good, field: value}]
    monkeypatch.setattr(Stages, "_run", lambda self, stage, requests: answers)
    found = Demo(str(tmp_path), "p", "t", "interpreter", {})
    Stages(tmp_path, {}, True, Console()).pinned(found)
    assert len(found.problems) == 1
    assert said in found.problems[0]
    answers[1] = good
    found.problems.clear()
    Stages(tmp_path, {}, True, Console()).pinned(found)
    assert found.problems == []


@pytest.mark.peers("megatron.core")
def test_the_last_fallback_runs_pinned(tmp_path: Path):
    environment = clean_environment(os.environ, cache=str(tmp_path / "cache"), interpreted=True)
    request = Request("pinned", "megatron.core", "cpu", steps=2, fields={"mode": "pinned"})
    (found,) = run_workers([Job("megatron", request, environment)], tmp_path, timeout_s=200)
    assert found["benchmarks"] == 0
    assert sorted(choice["kernel"].rpartition(".")[2] for choice in found["choices"]) == [
        "rotary_bwd_kv_kernel",
        "rotary_bwd_q_kernel",
        "rotary_fwd_kv_kernel",
        "rotary_fwd_q_kernel",
    ]
    assert found["digests"][0] == found["digests"][1]


@pytest.mark.parametrize("interpreted", [True, False])
def test_recordings_on_one_gpu_take_turns(interpreted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[Request] = []

    def answer(self: Stages, stage: str, requests: Any) -> list[Any]:
        asked.extend(requests.values())
        return [{"benchmarks": 1, "digests": ["a"]} for _ in requests]

    monkeypatch.setattr(Stages, "_run", answer)
    stages = Stages(tmp_path, {"TRITON_CACHE_DIR": "/cache"}, interpreted, Console())
    stages.record(Demo(str(tmp_path), "p", "t", "d", {}))
    assert [request.rank for request in asked] == [0, 1]
    assert {request.turn for request in asked} == {None if interpreted else "/cache/turn"}


def test_what_compiles_ahead_for_a_gpu_takes_each_candidate_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    asked: list[Request] = []
    monkeypatch.setattr(Stages, "_run", lambda self, stage, requests: asked.extend(requests.values()))
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    stages = Stages(tmp_path, {}, False, Console())
    stages._facts = {"widest": 11, "memory": 80 << 30}
    stages.compile(Demo(str(tmp_path), "p", "t", "gpu", {}))
    assert len(asked) == 4
    assert sorted(pick for request in asked for pick in request.picks) == list(range(11))
    assert {request.device for request in asked} == {"cuda"}
