"""Ranks on GPUs. With two or more GPUs over NCCL; with one, two processes share it over gloo."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, Any]:
    if importlib.util.find_spec("mamba_ssm") is None:
        pytest.skip("mamba_ssm is not installed")
    out = tmp_path_factory.mktemp("nccl")
    command = [sys.executable, "-m", "bench", "nccl", "--starts", "1", "--out", str(out), "--name", "nccl"]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    subprocess.run(command, check=True, timeout=600, cwd=root, env=environment)
    return dict(json.loads((out / "nccl.json").read_text()))


def test_the_backend_is_nccl_where_there_are_gpus_enough(found):
    import torch

    assert found["backend"] == ("nccl" if torch.cuda.device_count() >= found["ranks"] else "gloo")


def test_recorded_on_all_ranks_at_once_then_pinned(found):
    record = found["record"]
    assert record["keys"] == 16
    assert min(record["benchmarks while recording, each rank"]) == 120
    assert record["same choices on every rank"] is True
    assert record["benchmarks while pinned"] == 0
    assert record["strict checks passed"] == 10 * found["ranks"]


def test_stock_disagreements_are_named_alike_on_every_rank(found):
    assert all(start["same report on every rank"] for start in found["stock, cold starts"])
    assert all(start["keys"] == 16 for start in found["stock, cold starts"])


def test_chaos_stops_training_on_every_rank(found):
    assert set(found["chaos"]["stopped at step, each rank"]) == {1}
    assert min(found["chaos"]["disagreements, each rank"]) > 0


def test_a_hybrid_model_trains_to_the_same_bits_in_deterministic_mode_only(found):
    assert found["equal digests"] == {"deterministic": True, "default": False}
    for run in found["hybrid model under FSDP2, 20 steps, twice"]["deterministic"]:
        assert run["mode"] == "pinned"
        assert run["checks that agreed"] == 20
        assert {rank["benchmarks"] for rank in run["ranks"]} == {0}
