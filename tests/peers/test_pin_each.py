"""Every autotuner of four packages, launched under a pinned policy: one candidate, whatever class, key or pruner."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("pin_each.py")

# Autotuners in the releases named, on a machine without a GPU; those with one candidate have nothing to choose.
PACKAGES = [
    pytest.param("mamba_ssm", "mamba-ssm", "2.3.2.post1", 43, 0, marks=pytest.mark.peers("mamba_ssm")),
    pytest.param("fla", "fla-core", "0.6.0", 255, 6, marks=pytest.mark.peers("fla")),
    pytest.param("megatron.core", "megatron-core", "0.16.1", 4, 0, marks=pytest.mark.peers("megatron.core")),
    pytest.param(
        "transformer_engine", "transformer-engine", "2.20.2", 18, 0, marks=pytest.mark.peers("transformer_engine")
    ),
]


def pin_each(package: str) -> Any:
    result = subprocess.run(
        [sys.executable, str(PROGRAM), package], capture_output=True, text=True, timeout=240, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize(("package", "distribution", "version", "count", "single"), PACKAGES)
def test_every_autotuner_of_a_package_is_pinned(
    package: str, distribution: str, version: str, count: int, single: int
) -> None:
    found = pin_each(package)
    assert found["problems"] == []
    assert found["benchmarks"] == 0
    assert found["pinned"] + found["single"] == found["autotuners"] > 0
    if importlib.metadata.version(distribution) == version:
        assert (found["autotuners"], found["single"]) == (count, single)
