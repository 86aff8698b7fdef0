"""The suite: presets under each way to run them on several ranks, and low-precision recipes, each run twice.

A cell passes where the outputs, the losses and every gradient of two runs are equal bit for bit on every rank, in
deterministic mode and pinned. So that equal bits are not those of a wrong computation, each gradient is held against
that of one device too: in float32 up to rounding; in other dtypes the difference is told only. Both runs build the
model anew in the same processes; ``fresh`` starts a second group of processes and compares with those too. Cells share
one group of ranks, since starting it costs more than they do.

On CPUs the ranks speak gloo and models are tiny. On GPUs each rank has one of its own, over NCCL; cells that need more
GPUs than there are, and recipes that the GPU cannot run, are skipped with the reason. A suite of which nothing ran has
not passed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from tuning.determinism import spawn_env
from tuning.spec import Json

__all__ = ["CELLS", "PRESETS", "RANKS", "RECIPE_NAMES", "SCHEMA_VERSION", "SuiteReport", "SuiteRow", "run_suite"]

SCHEMA_VERSION = 1
"""Version of the report's JSON form."""

PRESETS: tuple[str, ...] = ("gpt", "llama", "hybrid")
"""Models."""

CELLS: tuple[str, ...] = ("single", "dp", "fsdp2", "tp", "pp", "vpp", "ep", "fsdp2_tp", "vpp_fsdp2")
"""Ways to run them; :mod:`tuning.bitexact.cells` says what each is."""

RECIPE_NAMES: tuple[str, ...] = ("tensorwise_fp8", "delayed_fp8", "mxfp8", "nvfp4")
"""Low-precision recipes, run with the preset ``llama`` on one device."""

RANKS = 4
"""Ranks of every cell but ``single``."""

_Outcome = Literal["equal", "different", "skipped", "failed"]


@dataclass(frozen=True)
class SuiteRow:
    """What one cell gave.

    Attributes:
        preset: the model.
        cell: how it was run.
        recipe: the low-precision recipe; empty for none.
        outcome: ``equal`` or ``different`` bits; ``skipped``, since it cannot run here; ``failed``, with an error.
        detail: the first difference, the reason or the error.
        ranks: how many ranks reported.
        values: tensors that were compared, over all ranks.
        loss: mean over the ranks that have one; None where none has.
        parity: largest difference of a gradient from one device's, relative to its largest element; None on one device.
        roots: digest of everything that each rank computed.
        seconds: of the slowest rank, both runs together.
    """

    preset: str
    cell: str
    recipe: str = ""
    outcome: _Outcome = "skipped"
    detail: str = ""
    ranks: int = 0
    values: int = 0
    loss: float | None = None
    parity: float | None = None
    roots: tuple[str, ...] = ()
    seconds: float = 0.0

    def to_json(self) -> Json:
        """JSON form."""
        return {
            name: list(v) if isinstance(v := getattr(self, name), tuple) else v for name in self.__dataclass_fields__
        }


@dataclass(frozen=True)
class SuiteReport:
    """What all cells gave.

    Attributes:
        rows: a row for each cell.
        device: ``cpu``, or the GPU's name and how many there are.
        versions: of torch and Triton.
        seconds: of everything, starting the ranks too.
    """

    rows: tuple[SuiteRow, ...]
    device: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def count(self, outcome: _Outcome) -> int:
        """Rows of this outcome."""
        return sum(row.outcome == outcome for row in self.rows)

    @property
    def passed(self) -> bool:
        """Whether something ran and all that ran is equal bit for bit."""
        return self.count("equal") > 0 and not self.count("different") and not self.count("failed")

    @property
    def verdict(self) -> str:
        """One line."""
        counts = ", ".join(f"{self.count(o)} {o}" for o in ("equal", "different", "failed", "skipped"))
        if not self.count("equal") + self.count("different") + self.count("failed"):
            return f"nothing ran, so nothing was shown: {counts}"
        return counts

    def to_json(self) -> Json:
        """JSON form."""
        return {
            "format": "triton-tuning bitexact suite",
            "schema_version": SCHEMA_VERSION,
            "passed": self.passed,
            "device": self.device,
            "versions": dict(self.versions),
            "seconds": round(self.seconds, 2),
            "rows": [row.to_json() for row in self.rows],
        }


def run_suite(
    *,
    presets: Iterable[str] = PRESETS,
    cells: Iterable[str] = CELLS,
    recipes: Iterable[str] = RECIPE_NAMES,
    device: Literal["cpu", "cuda"] = "cpu",
    runs: int = 2,
    fresh: bool = False,
    seed: int = 0,
    sizes: Mapping[str, Json] | None = None,
    prepare: str | None = None,
    timeout: float = 600.0,
) -> SuiteReport:
    """Run the suite in processes of its own.

    Args:
        presets: models, of :data:`PRESETS`.
        cells: ways to run them, of :data:`CELLS`.
        recipes: low-precision recipes, of :data:`RECIPE_NAMES`.
        device: ``cpu`` over gloo, or ``cuda`` over NCCL.
        runs: how often each cell runs in one group of processes.
        fresh: start a second group of processes, and compare with the first.
        seed: of the data.
        sizes: fields of the models' shapes other than their presets'.
        prepare: ``module:function``, called with each model (a pipeline stage is one) before it is parallelised;
            returns the model to use.
        timeout: seconds for each group of processes.

    Raises:
        ValueError: an unknown preset, cell or recipe, or fewer than two runs.
    """
    started = time.monotonic()
    rows = [
        *(
            SuiteRow(preset, cell)
            for preset in _known("preset", presets, PRESETS)
            for cell in _known("cell", cells, CELLS)
        ),
        *(SuiteRow("llama", "single", recipe) for recipe in _known("recipe", recipes, RECIPE_NAMES)),
    ]
    if runs < 2:
        raise ValueError(f"runs: expected at least 2, found {runs}")
    there, name, versions = _devices(device)
    several = any(row.cell != "single" for row in rows)
    if there == 0:
        rows = [replace(row, detail="needs a CUDA device, found none") for row in rows]
    elif several and there < RANKS:
        reason = f"needs {RANKS} GPUs, found {there}"
        rows = [replace(row, detail=reason) if row.cell != "single" else row for row in rows]
    rows = [replace(row, detail=_incapable(row.recipe, device)) if row.recipe and there else row for row in rows]
    to_run = [number for number, row in enumerate(rows) if not row.detail]
    ranks = RANKS if any(rows[number].cell != "single" for number in to_run) else 1
    request = {
        "cells": [{"preset": r.preset, "cell": r.cell, "recipe": r.recipe} for r in (rows[n] for n in to_run)],
        "device": device, "ranks": ranks, "runs": runs, "seed": seed, "sizes": dict(sizes or {}), "prepare": prepare,
        "timeout": min(timeout, 120.0),
    }  # fmt: skip
    groups = [_run_group(request, timeout) for _ in range(1 + fresh)] if to_run else []
    for place, number in enumerate(to_run):
        found = [_joined(rows[number], group, place, 1 if rows[number].cell == "single" else ranks) for group in groups]
        row = found[0]
        if fresh and {r.outcome for r in found} == {"equal"} and row.roots != found[1].roots:
            differing = [
                rank for rank, pair in enumerate(zip(row.roots, found[1].roots, strict=True)) if len({*pair}) > 1
            ]
            row = replace(row, outcome="different", detail=f"fresh processes differ on ranks {differing}")
        elif fresh and row.outcome == "equal":
            row = replace(found[1], seconds=row.seconds)
        rows[number] = row
    return SuiteReport(tuple(rows), name, versions, time.monotonic() - started)


def _known(what: str, given: Iterable[str], known: Sequence[str]) -> list[str]:
    asked = list(given)
    for name in asked:
        if name not in known:
            raise ValueError(f"{what}: expected one of {', '.join(known)}, found {name!r}")
    return asked


def _incapable(recipe: str, device: str) -> str:
    import torch

    from tuning.bitexact.low_precision import missing_capability

    return missing_capability(recipe, torch.device(device, 0)) or ""


def _devices(device: str) -> tuple[int, str, dict[str, str]]:
    """How many ranks there can be, the device's name, and versions."""
    import torch

    versions = {"torch": str(torch.__version__)}
    try:
        import triton

        versions["triton"] = triton.__version__
    except ImportError:
        pass
    if device == "cpu":
        return RANKS, "cpu", versions
    count = torch.cuda.device_count()
    return count, f"{count} x {torch.cuda.get_device_name(0)}" if count else "no GPU", versions


def _run_group(request: Mapping[str, Any], timeout: float) -> list[tuple[dict[int, Any], str]]:
    """Start the ranks, wait for them; for each rank its rows by number, and what it said last if it failed."""
    environment = spawn_env(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)
    if request["device"] == "cpu":
        environment |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "GLOO_SOCKET_IFNAME": "lo"}
    deadline = time.monotonic() + timeout
    with tempfile.TemporaryDirectory(prefix="triton-tuning-suite-") as folder:
        file = Path(folder, "request.json")
        file.write_text(json.dumps({**request, "store": f"{folder}/store", "results": folder}), encoding="utf-8")
        logs = [Path(folder, f"rank{rank}.log") for rank in range(request["ranks"])]
        workers = []
        try:
            for rank, log in enumerate(logs):
                command = [sys.executable, "-m", "tuning.bitexact.suite_worker", str(file), str(rank)]
                with log.open("wb") as stream:
                    workers.append(subprocess.Popen(command, env=environment, stdout=stream, stderr=stream))
            while time.monotonic() < deadline and any(worker.poll() is None for worker in workers):
                if any(worker.poll() for worker in workers):
                    # The others wait for one that is gone; what they can still report takes no longer than this.
                    deadline = min(deadline, time.monotonic() + 5)
                time.sleep(0.05)
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        found = []
        for rank, log in enumerate(logs):
            results = Path(folder, f"rank{rank}.jsonl")
            lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
            said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            whole = [json.loads(line) for line in lines if line.endswith("}")]
            found.append(({row["number"]: row for row in whole}, said[-1] if said else ""))
        return found


def _joined(row: SuiteRow, group: list[tuple[dict[int, Any], str]], number: int, ranks: int) -> SuiteRow:
    """One row of what every rank reported."""
    found = [rows.get(number) for rows, _ in group[:ranks]]
    failed = [
        (r["at"], rank, r["detail"]) for rank, r in enumerate(found) if r is not None and r["outcome"] == "failed"
    ]
    # The first in time: the other ranks fail since that one is gone.
    errors = [(rank, detail) for _, rank, detail in sorted(failed)]
    absent = [rank for rank, r in enumerate(found) if r is None]
    if errors or absent:
        rank, detail = errors[0] if errors else (absent[0], group[absent[0]][1] or "no result: it was stopped")
        return replace(row, outcome="failed", detail=f"rank {rank}: {detail}", ranks=ranks - len(absent))
    there = [r for r in found if r is not None]
    differing = [(rank, r["detail"]) for rank, r in enumerate(there) if r["outcome"] == "different"]
    losses = [r["loss"] for r in there if r["loss"] is not None]
    return replace(
        row,
        outcome="different" if differing else "equal",
        detail=f"rank {differing[0][0]}: {differing[0][1]}" if differing else "",
        ranks=len(there),
        values=sum(r["values"] for r in there),
        loss=sum(losses) / len(losses) if losses else None,
        parity=max((r["parity"] for r in there if r["parity"] is not None), default=None),
        roots=tuple(r["root"] for r in there),
        seconds=max(r["seconds"] for r in there),
    )
