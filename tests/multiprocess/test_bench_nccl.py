"""The multi-rank benchmark, with a stub kernel over gloo: what it asserts of several GPUs holds here too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.multiprocess


def test_two_ranks_record_pin_disagree_and_are_caught(tmp_path):
    command = [sys.executable, "-W", "ignore", "-m", "bench", "nccl", "--stub", "--starts", "1", "--out", str(tmp_path)]
    subprocess.run(
        [*command, "--name", "nccl"], check=True, timeout=200, cwd=Path(__file__).parents[2], stdout=subprocess.DEVNULL
    )
    found = json.loads((tmp_path / "nccl.json").read_text())
    assert found["record"]["same choices on every rank"] is True
    assert found["record"]["benchmarks while pinned"] == 0
    assert found["record"]["strict checks passed"] == 20
    assert found["record"]["keys on which the recordings of the ranks disagree"] == 4
    assert found["chaos"]["stopped at step, each rank"] == [1, 1]
    assert found["chaos"]["disagreements, each rank"] == [8, 8]
    (start,) = found["stock, cold starts"]
    assert start["same report on every rank"] is True
    assert [line.split("(n=")[1][0] for line in start["disagreements"]] == ["1", "3", "5", "7"]
    assert found["cost"]["later_median_ms"] > 0
