"""Autotuners of installed packages that are not Triton's plain ones, pinned in each order of import and install."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).with_name("other_autotuners.py")


def run(case: str) -> Any:
    ran = subprocess.run([sys.executable, str(PROGRAM), case], capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.peers("fla")
@pytest.mark.parametrize("order", ["before", "after"])
def test_flas_subclass_and_its_swap_of_triton_autotune_are_pinned_in_both_orders(order: str) -> None:
    seen = run(f"fla {order}")
    assert seen["class"] == seen["late"] == "CachedAutotuner"
    assert seen["swapped"]
    assert seen["candidates"] > 1
    assert seen["asked"] > 0  # FLA does look for a config of its own; what it finds is not launched
    assert seen["same"]
    assert seen["late_same"]
    assert set(seen["choices"]) == {"cheapest"}
    assert seen["benchmarks"] == 0
    assert seen["left"]  # uninstalling leaves FLA's swap as it is


@pytest.mark.peers("transformer_engine")
def test_configs_that_transformer_engines_pruners_make_anew_are_matched_by_content() -> None:
    seen = run("transformer_engine")
    assert len(seen) >= 6
    assert any(kernel["new"] for kernel in seen.values())
    for name, kernel in seen.items():
        assert kernel["by_table"] == [True, True], name
        assert kernel["sources"] == ["wildcard"], name
        assert kernel["benchmarks"] == 0, name


@pytest.mark.peers("mamba_ssm")
@pytest.mark.parametrize("order", ["before", "after"])
def test_candidates_that_were_reduced_at_import_are_warned_of_once_with_the_remedy(order: str) -> None:
    seen = run(f"reduced {order}")
    assert seen["candidates"] == 1
    (warning,) = seen["warnings"]
    assert "_bmm_chunk_fwd_kernel" in warning
    assert "turn the mode on before importing them, or before MAMBA_DETERMINISTIC" in warning
    assert seen["notices"] == ["reduced_at_import"]


@pytest.mark.peers("mamba_ssm")
def test_deterministic_mode_before_the_import_keeps_the_candidates_whole() -> None:
    seen = run("reduced never")
    assert seen["candidates"] > 1
    assert seen["warnings"] == seen["notices"] == []
