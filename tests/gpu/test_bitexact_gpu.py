"""Digests, planted faults and the suite on a GPU: one run of the benchmark case that does all of it."""

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
    out = tmp_path_factory.mktemp("bitexact")
    command = [sys.executable, "-m", "bench", "bitexact", "--out", str(out), "--name", "bitexact"]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    subprocess.run(command, check=False, timeout=280, cwd=root, env=environment)
    return dict(json.loads((out / "bitexact.json").read_text()))


def test_digests_are_those_of_the_cpu_and_no_fault_escapes(found):
    assert found["problems"] == []
    assert set(found["faults"]) == {
        "NaN payload",
        "sign of zero",
        "unpinned kernel",
        "atomic add in torch",
        "atomic add in a Triton kernel",
    }


def test_a_digest_needs_little_memory(found):
    assert found["digests"]["memory on top, MiB"] <= 512


def test_every_preset_is_equal_on_one_gpu(found):
    rows = [row for row in found["suite"]["rows"] if row["cell"] == "single" and not row["recipe"]]
    assert [(row["preset"], row["outcome"]) for row in rows] == [(p, "equal") for p in ("gpt", "llama", "hybrid")]
    assert found["suite"]["passed"]


def test_recipes_run_where_the_gpu_has_them(found):
    import torch

    able = torch.cuda.get_device_capability()
    rows = {row["recipe"]: row["outcome"] for row in found["suite"]["rows"] if row["recipe"]}
    least = {"tensorwise_fp8": (8, 9), "delayed_fp8": (8, 9), "mxfp8": (10, 0), "nvfp4": (10, 0)}
    assert rows == {name: "equal" if able >= needed else "skipped" for name, needed in least.items()}
