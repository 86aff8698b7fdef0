"""The suite on four ranks over gloo: every cell green, and red where something is planted."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tuning import cli
from tuning.bitexact import suite
from tuning.bitexact.suite import CELLS, PRESETS, RECIPE_NAMES, run_suite


@pytest.fixture(scope="module")
def found() -> dict[tuple[str, str, str], Any]:
    report = run_suite(timeout=240)
    return {(row.preset, row.cell, row.recipe): row for row in report.rows} | {("", "", ""): report}


def test_every_preset_runs_in_every_cell_twice_with_equal_bits(found):
    report = found["", "", ""]
    cells = [found[preset, cell, ""] for preset in PRESETS for cell in CELLS]
    assert [(r.preset, r.cell, r.detail) for r in cells if r.outcome != "equal"] == []
    assert report.passed
    assert report.verdict == f"{len(PRESETS) * len(CELLS)} equal, 0 different, 0 failed, {len(RECIPE_NAMES)} skipped"
    assert {r.ranks for r in cells if r.cell != "single"} == {4}
    assert min(r.values for r in cells) > 40
    json.dumps(report.to_json(), allow_nan=False)


def test_every_cell_computes_what_one_device_does(found):
    """Up to rounding: the cells train on the same batch from the same parameters."""
    for preset in PRESETS:
        one = found[preset, "single", ""].loss
        for cell in CELLS[1:]:
            row = found[preset, cell, ""]
            assert row.parity < 1e-4
            if cell != "ep":  # its model has experts
                assert row.loss == pytest.approx(one, rel=1e-6)


def test_ranks_hold_different_parts(found):
    for preset in PRESETS:
        assert len(set(found[preset, "pp", ""].roots)) == 4
        assert len(set(found[preset, "dp", ""].roots)) == 4  # of the batch
        first, second, *alike = found[preset, "vpp", ""].roots
        assert first != second
        assert alike == [first, second]


def test_recipes_are_skipped_where_no_gpu_has_them(found):
    details = {found["llama", "single", recipe].detail for recipe in RECIPE_NAMES}
    assert details == {f"needs a GPU of compute capability {least} or later" for least in ("8.9", "10.0")}


def test_the_suite_turns_red():
    """Over a planted atomic add, equal bits of a wrong gradient, and a rank that fails, which hangs nobody."""
    report = run_suite(cells=["dp"], recipes=[], prepare="planted_faults:plant", timeout=120)
    assert not report.passed
    atomic, wrong, crash = report.rows
    assert (atomic.preset, atomic.outcome) == ("gpt", "different")
    assert "grads.embed.weight[" in atomic.detail
    assert "ulp apart" in atomic.detail
    assert (wrong.preset, wrong.outcome) == ("llama", "failed")
    assert "a gradient is not one device's" in wrong.detail
    assert (crash.preset, crash.outcome) == ("hybrid", "failed")
    assert "rank 2: RuntimeError: out of luck" in crash.detail


def test_fresh_processes_are_compared_too(monkeypatch):
    """Two groups: equal as they are; and a change between the groups is told, which no group sees by itself."""
    arguments: dict[str, Any] = {"presets": ["llama"], "cells": ["single"], "recipes": [], "fresh": True}
    assert run_suite(**arguments).passed
    seeds = iter([0, 1])
    group = suite._run_group
    monkeypatch.setattr(suite, "_run_group", lambda request, t: group({**request, "seed": next(seeds)}, t))
    row = run_suite(**arguments).rows[0]
    assert (row.outcome, row.detail) == ("different", "fresh processes differ on ranks [0]")


def test_a_suite_of_which_nothing_ran_has_not_passed(capsys):
    report = run_suite(presets=[], recipes=RECIPE_NAMES)
    assert not report.passed
    assert report.verdict == "nothing ran, so nothing was shown: 0 equal, 0 different, 0 failed, 4 skipped"
    assert not run_suite(presets=[], recipes=[]).passed
    argv = ["bitexact", "--device", "cuda", "--cell", "dp", "--recipe", "mxfp8"]
    import torch

    if not torch.cuda.is_available():
        assert cli.main(argv) == 1
        assert "nothing ran" in capsys.readouterr().out


def test_the_command_writes_its_report(capsys, tmp_path: Path):
    argv = ["bitexact", "--device", "cpu", "--preset", "gpt", "--cell", "single", "--out", str(tmp_path / "r.json")]
    assert cli.main(argv) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "1 equal, 0 different, 0 failed, 4 skipped"
    written = json.loads((tmp_path / "r.json").read_text())
    assert (written["schema_version"], written["passed"], len(written["rows"])) == (1, True, 5)
    for wrong in (["--timeout", "0"], ["--out", str(tmp_path / "no" / "r.json")]):
        assert cli.main(["bitexact", "--device", "cpu", "--preset", "gpt", "--cell", "single", *wrong]) == 2
    assert "--out: " in capsys.readouterr().err


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=r"cell: expected one of single, dp, .* found 'zero'"):
        run_suite(cells=["zero"])
    with pytest.raises(ValueError, match="runs: expected at least 2, found 1"):
        run_suite(runs=1)


SHARDED = """
import json, sys
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor, DTensor
from tuning.bitexact import digest_tensor, digest_value
rank = int(sys.argv[1])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[2], 2), rank=rank, world_size=2)
mesh = init_device_mesh("cpu", (2,))
found = {}
whole = torch.randn(5, 7, 2, generator=torch.Generator().manual_seed(0))
for dtype in (torch.float32, torch.bfloat16, torch.complex64):
    full = whole.to(dtype)
    layouts = [distribute_tensor(full, mesh, [p]) for p in (Shard(0), Shard(1), Shard(2), Replicate())]
    found[str(dtype)] = [digest_tensor(t) == digest_tensor(full) for t in layouts]
two = init_device_mesh("cpu", (2, 1))
found["2d"] = [digest_tensor(distribute_tensor(whole, two, [Shard(0), Shard(1)])) == digest_tensor(whole)]
other = whole.clone(); other[4, 6, 1] *= -1
shards = distribute_tensor(other, mesh, [Shard(0)])
found["differs"] = [digest_tensor(shards).differing(digest_tensor(whole)) == ("content",)]
alone = digest_tensor(shards, gather=False)
found["part"] = [alone.part]
found["same part"] = [alone == digest_tensor(distribute_tensor(whole, mesh, [Shard(0)]), gather=False)]
pending = DTensor.from_local(torch.full((2,), 1.0 + rank), mesh, [Partial()])
mine = digest_tensor(pending.to_local())
found["pending"] = [digest_tensor(pending).part, digest_tensor(pending).content == mine.content]
try:
    from torch.distributed.tensor.placement_types import _StridedShard
except ImportError:  # torch 2.6 has it elsewhere
    from torch.distributed.tensor._dtensor_spec import _StridedShard
rows = torch.arange(16.0).view(8, 2)
strided = DTensor.from_local(rows[[0, 1, 4, 5] if rank == 0 else [2, 3, 6, 7]], mesh,
                             [_StridedShard(0, split_factor=2)], run_check=False, shape=rows.shape, stride=(2, 1))
found["strided"] = [digest_tensor(strided) == digest_tensor(rows)]
# The second rank's shard alone has another size than its placement says: both have to notice.
misfit = DTensor.from_local(torch.zeros(3, 2), mesh, [Shard(0)], run_check=False, shape=(5, 2), stride=(2, 1))
found["misfit"] = [digest_tensor(misfit).part == "shard [3, 2] at [0, 0] as S(0)"]
several = digest_value({"a": shards, "b": distribute_tensor(other, mesh, [Shard(1)]), "c": torch.ones(2)})
found["several"] = [several["a"] == several["b"] == digest_tensor(other)]
print(json.dumps(found))
dist.barrier()
dist.destroy_process_group()
"""


def test_a_digest_is_that_of_the_whole_tensor_under_every_sharding(tmp_path: Path):
    root = Path(__file__).parents[2]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", SHARDED, str(rank), str(tmp_path / "store")],
            cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for rank, process in enumerate(ranks):
        out, error = process.communicate(timeout=120)
        assert process.returncode == 0, error
        found = json.loads(out.splitlines()[-1])
        part, pending = found.pop("part"), found.pop("pending")
        assert found.pop("same part") == [rank == 0]  # what was changed lies on the other
        assert part == [f"shard {[3 - rank, 7, 2]} at {[3 * rank, 0, 0]} as S(0)"]
        assert pending == ["shard [2] at [0] as P(sum)", True]
        assert {name: all(each) for name, each in found.items()} == dict.fromkeys(found, True)
