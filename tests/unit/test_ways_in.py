"""The README's matrix of ways in, held against the tests that it names; and the way through torch's own operators."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from stub_kernels import autotuner, configs, launch

import tuning

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
SECTION = README.partition("## What is pinned\n")[2].partition("\n## ")[0]
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in SECTION.splitlines()
    if line.startswith("| ") and "---" not in line
][1:]


@cache
def functions_of(file: str) -> set[str]:
    tree = ast.parse((ROOT / "tests" / file).read_text(encoding="utf-8"))
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_the_matrix_has_every_way_in() -> None:
    ways = " ".join(row[0] for row in ROWS)
    for word in ("Python", "before or after", "subclass", "heuristics", "torch.compile", "CUDA graph", "threads"):
        assert word in ways
    assert "custom_op" in ways
    assert len(ROWS) >= 12


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_each_way_in_names_a_test_that_exists(row: list[str]) -> None:
    way, pinned, shown = row
    assert way
    assert re.match(r"(yes|no)\b", pinned)
    named = re.fullmatch(r"`([\w/]+\.py)::(test_\w+)`", shown)
    assert named, shown
    assert named[2] in functions_of(named[1]), shown


@pytest.mark.parametrize("kind", ["custom_op", "triton_op"])
def test_inside_an_operator_of_torch(kind: str) -> None:
    tuner = autotuner(configs(64, 16, 32))
    if not hasattr(torch.library, kind):
        pytest.skip(f"this torch has no {kind}")

    def op(x: torch.Tensor) -> torch.Tensor:
        launch(tuner, x, x, 8, flag=True)
        return x.clone()

    made: Any = getattr(torch.library, kind)(f"ways_in::{kind}", op, mutates_args=())
    x = torch.ones(4, requires_grad=kind == "custom_op")
    with tuning.install(tuning.AutotunePolicy(mode="pinned", modules=("stub_kernels",))) as installed:
        for _ in range(2):
            assert made(x).tolist() == [1.0] * 4
        assert [dict(config.kwargs)["BLOCK"] for config in tuner.fn.launches] == ["16", "16"]
        assert installed.benchmarks == 0
        assert len(installed.choices) == 1
