"""A warmup of mamba_ssm's SSD forward and backward, for a GPU that is not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import fake_gpu
import pytest

from tuning.warmup import warm_up

pytestmark = pytest.mark.peers("torch", "mamba_ssm")


def step(cache: Path, **fields: Any) -> Any:
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, fake_gpu.__file__, "warmup_mamba_step", json.dumps(fields)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_a_pinned_step_after_a_warmup_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step(tmp_path / "recording", mode="record", record_path=str(tmp_path / "journals" / "run"))
    cache = tmp_path / "cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    report = warm_up([tmp_path / "journals"], jobs=2)
    assert report.failures == ()
    assert report.launches == len(report.warmed) + report.same
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    assert len({path.parent for path in before if path.suffix == ".cubin"}) == len(
        {item.hash for item in report.warmed}
    )
    choices = step(cache, mode="pinned")
    after = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    # Kernels without an autotuner are in no journal: what the step adds is theirs alone.
    tuned = {kernel.rpartition(".")[2] for kernel, _, _ in choices}
    assert {path: time for path, time in after.items() if path in before} == before
    assert {path.stem for path in after if path not in before and path.suffix == ".cubin"} & tuned == set()
    assert {(item.kernel, item.key) for item in report.warmed} == {(kernel, key) for kernel, key, _ in choices}
    assert len(choices) >= 15
