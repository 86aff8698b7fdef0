"""The first step of Mamba-2's SSD after ``triton-tuning warmup``, beside a full and an empty compile cache (GPU).

One process records with an empty cache, which leaves a full one; its journal is merged into a table. The warmup
compiles for it into a fresh cache. Then cold pinned processes run from the table, each on a copy of its cache, in turn:
full, warmed, full, warmed; and one on an empty cache. Last Triton alone on the full cache, as it is and with its own
cache of timings (TRITON_CACHE_AUTOTUNING=1), which the first process writes and the second reads.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import results
from bench.ssd import run_worker

STEPS = ("--steps", "3")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this case."""
    parser.add_argument("--repeat", type=int, default=2, help="cold pinned processes for each cache")
    parser.add_argument("--jobs", type=int, help="processes of the warmup (default: one for each CPU)")
    parser.add_argument("--no-stock", dest="stock", action="store_false", help="leave out Triton alone")
    parser.add_argument("--keep", type=Path, help="folder for journals, table and compile caches")


def _warmup(cache: Path, keep: Path, jobs: int | None) -> dict[str, Any]:
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "tuning", "warmup", "--json", "--table", str(keep / "tables")]
    command += [*(["--jobs", str(jobs)] if jobs else []), str(keep / "journals")]
    started = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    seconds = time.perf_counter() - started
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-3000:]}{done.stderr[-3000:]}")
    report: dict[str, Any] = json.loads(done.stdout)
    report["command_s"] = seconds
    print(
        f"warmup  {seconds:7.2f} s with {report['jobs']} processes   start-up {report['start_up_s']:.2f} s, "
        f"longest compile {report['longest_s']:.2f} s, {len(report['warmed'])} compiled",
        flush=True,
    )
    return report


def _pinned(cache: Path | None, keep: Path, scratch: Path) -> dict[str, Any]:
    shutil.rmtree(scratch, ignore_errors=True)
    if cache is not None:
        shutil.copytree(cache, scratch)  # a run adds to its cache what it lacks: each starts from the same
    return run_worker(scratch, "--mode", "pinned", "--table", str(keep / "tables"), *STEPS)


def _stock(full: Path, scratch: Path) -> dict[str, dict[str, Any]]:
    """Triton alone on a full compile cache: as it is, and twice with its own cache of timings on disk.

    Of those two the first times and writes the timings down, the second reads them.
    """
    found = {}
    shutil.rmtree(scratch, ignore_errors=True)
    shutil.copytree(full, scratch)
    before = os.environ.pop("TRITON_CACHE_AUTOTUNING", None)
    try:
        found["full cache"] = run_worker(scratch, "--mode", "auto", *STEPS)
        os.environ["TRITON_CACHE_AUTOTUNING"] = "1"
        for name in ("TRITON_CACHE_AUTOTUNING=1, writing", "TRITON_CACHE_AUTOTUNING=1, reading"):
            found[name] = run_worker(scratch, "--mode", "auto", *STEPS)
    finally:
        os.environ.pop("TRITON_CACHE_AUTOTUNING", None)
        if before is not None:
            os.environ["TRITON_CACHE_AUTOTUNING"] = before
    return found


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run the case and return the result."""
    from tuning.journal import find_journals, read_journal
    from tuning.merge import merge
    from tuning.tables import write_table

    keep = options.keep or Path(tempfile.mkdtemp(prefix="bench-warmup-"))
    keep.mkdir(parents=True, exist_ok=True)
    full, warmed, scratch = (keep / name for name in ("cache-full", "cache-warmed", "cache-scratch"))
    recorded = run_worker(full, "--mode", "record", "--record-path", str(keep / "journals" / "run"), *STEPS)
    for table in merge(read_journal(path) for path in find_journals([str(keep / "journals")])).tables:
        write_table(keep / "tables", table)
    report = _warmup(warmed, keep, options.jobs)
    caches = {"full cache": full, "after warmup": warmed}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in caches}
    for _ in range(options.repeat):
        for name, cache in caches.items():
            runs[name].append(_pinned(cache, keep, scratch))
    runs["empty cache"] = [_pinned(None, keep, scratch)]
    stock = _stock(full, scratch) if options.stock else {}
    for folder in (full, warmed, scratch):
        shutil.rmtree(folder, ignore_errors=True)
    first = {name: statistics.median(run["first_step_s"] for run in found) for name, found in runs.items()}
    pinned = [run for found in runs.values() for run in found]
    result = {
        "case": "warmup",
        **results.circumstances(("triton", "torch", "mamba_ssm")),
        "workload": "mamba_chunk_scan_combined forward+backward, as in the case ssd",
        "recorded": recorded,
        "warmup": report,
        "runs": runs,
        "stock": stock,
        "summary": {
            "first step, stock tuning, empty cache [s]": recorded["first_step_s"],
            **{f"first step, pinned, {name} [s]": seconds for name, seconds in first.items()},
            **{f"first step, stock, {name} [s]": run["first_step_s"] for name, run in stock.items()},
            "first step after warmup / with a full cache": first["after warmup"] / first["full cache"],
            "warmup [s]": report["command_s"],
            "warmup / (process start-up + longest compile)": report["command_s"]
            / (report["start_up_s"] + report["longest_s"]),
            "benchmarks in pinned runs": sum(run["benchmarks"] for run in pinned),
            "configs of pinned runs agree": len({json.dumps(run["choices"], sort_keys=True) for run in pinned}) == 1,
        },
    }
    print(json.dumps(result["summary"], indent=1))
    return result
