"""Training over two processes that is resumed after its tables have changed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

from tuning.callbacks.loops import CHOICES_FILE
from tuning.spec import LaunchConfig
from tuning.tables import Entry, TableFile, write_table

pytestmark = pytest.mark.multiprocess

WORKER = Path(__file__).with_name("training_worker.py")
PYTHONPATH = os.pathsep.join(str(folder) for folder in WORKER.parents[1:3])

# (step, key of each rank). After the checkpoint the ranks have changed places on keys that only one of them has met.
BEFORE = [(1, (0, 0)), (2, (1, 2)), (3, (0, 0))]
AFTER = [(4, (0, 0)), (5, (2, 1)), (6, (0, 0))]
NEW_KEY = [(7, (9, 9))]


@pytest.fixture
def train(tmp_path):
    """Train on two ranks; ``block`` is what the tables of the day say."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()

    def run(block: int, steps: list[Any], **task: Any) -> list[dict[str, Any]]:
        config = LaunchConfig.build({"BLOCK": block}, num_stages=TRITONS_STAGES)
        entry = Entry("stub_kernels.kernel", None, None, None, config, {"source": "a test"})
        write_table(
            tmp_path / "tables", TableFile("cpu", "stub_kernels", "1", triton.__version__, "none", (entry,), (), None)
        )
        task = {
            "store": str(tmp_path / f"store-{len(list(tmp_path.iterdir()))}"),
            "checkpoint": str(folder),
            "steps": steps,
            "policy": {
                "mode": "pinned",
                "modules": ["stub_kernels"],
                "table_path": [str(tmp_path / "tables")],
                "verify_every": 1,
                "verify_strict": True,
            },
            **task,
        }
        processes = [
            subprocess.Popen(
                [sys.executable, "-W", "ignore", str(WORKER), json.dumps(task)],
                env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "PYTHONPATH": PYTHONPATH},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
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

    run.folder = folder  # type: ignore[attr-defined]
    return run


TRITONS_STAGES = triton.Config({}).num_stages


def test_resumed_training_keeps_its_choices_and_so_its_bits(train):
    whole = train(32, BEFORE + AFTER, save_at=3)
    assert [result["blocks"] for result in whole] == [[32] * 6] * 2
    assert whole[0]["weights"] == whole[1]["weights"]
    state = json.loads((train.folder / CHOICES_FILE).read_text())
    assert [row["key"]["values"] for row in state["choices"]] == [[["n", 0]], [["n", 1]], [["n", 2]]]

    resumed = train(64, AFTER + NEW_KEY, resume=True)
    for result in resumed:
        assert result["error"] is None
        assert result["verdicts"] == [True] * 4
        assert result["blocks"] == [32, 32, 32, 64]
        assert result["weights"]["6"] == whole[0]["weights"]["6"]

    without = train(64, AFTER, resume=True, carried_on=[])
    assert [result["blocks"] for result in without] == [[64] * 3] * 2
    assert without[0]["weights"]["6"] != whole[0]["weights"]["6"]  # the change of tables does change bits


def test_a_rank_that_did_not_load_is_found_on_both(train):
    train(32, BEFORE, save_at=3)
    for result in train(64, AFTER, resume=True, carried_on=[1]):
        assert result["error"].startswith("DisagreementError")
        assert "rank 0: BLOCK=64" in result["error"]
        assert "rank 1: BLOCK=32" in result["error"]
