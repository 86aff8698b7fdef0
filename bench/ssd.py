"""Record, merge and pin Mamba-2's SSD step in fresh processes on a GPU, beside stock Triton.

``record``: that many cold processes record, the first with an empty compile cache. Their journals are merged into a
table. ``pinned``: as many cold processes run from it. ``stock``: cold processes in which Triton times and chooses.
Every process prints digests of the output and of all gradients, with torch's deterministic algorithms on.
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
from pathlib import Path
from typing import Any

from bench import results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this case."""
    parser.add_argument("--record", type=int, default=3, help="recording processes")
    parser.add_argument("--pinned", type=int, default=3, help="pinned processes")
    parser.add_argument("--stock", type=int, default=5, help="processes in which Triton times")
    parser.add_argument("--steps", type=int, default=20, help="timed steps after the first")
    parser.add_argument("--keep", type=Path, help="folder for journals, table and compile caches")


def run_worker(cache: Path, *arguments: str) -> dict[str, Any]:
    """One fresh process that runs the step with these arguments of :mod:`bench.ssd_worker`; what it found."""
    environment = {
        **os.environ,
        "TRITON_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "bench.ssd_worker", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    steady = statistics.median(result.pop("step_ms"))
    result["median_step_ms"] = steady
    print(
        f"{arguments[1]:7} first step {result['first_step_s']:7.2f} s   later {steady:6.2f} ms   "
        f"{result['benchmarks']:4} benchmarks   {result['digests'][0][:12]} {result['digests'][1][:12]}",
        flush=True,
    )
    return result


def _disagreeing(runs: list[dict[str, Any]]) -> list[str]:
    seen: dict[str, set[str]] = {}
    for run in runs:
        for choice in run["choices"]:
            seen.setdefault(f"{choice['kernel']} {choice['key']}", set()).add(choice["config"])
    return sorted(name for name, configs in seen.items() if len(configs) > 1)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run the case and return the result."""
    from tuning.journal import find_journals, read_journal
    from tuning.merge import merge
    from tuning.tables import write_table

    keep = options.keep or Path(tempfile.mkdtemp(prefix="bench-ssd-"))
    keep.mkdir(parents=True, exist_ok=True)
    steps = ("--steps", str(options.steps), "--deterministic-algorithms")
    cache = keep / "cache"
    recorded = [
        run_worker(cache, "--mode", "record", "--record-path", str(keep / "journals" / "run"), *steps)
        for _ in range(options.record)
    ]
    merged = merge(read_journal(path) for path in find_journals([str(keep / "journals")]))
    tables = [write_table(keep / "tables", table).relative_to(keep / "tables").as_posix() for table in merged.tables]
    fresh = keep / "cache-pinned"
    pinned = [
        run_worker(fresh, "--mode", "pinned", "--table", str(keep / "tables"), *steps) for _ in range(options.pinned)
    ]
    cheapest = [run_worker(cache, "--mode", "pinned", *steps)] if options.pinned else []
    stock = [run_worker(cache, "--mode", "auto", *steps) for _ in range(options.stock)]
    for folder in (cache, fresh):
        shutil.rmtree(folder, ignore_errors=True)

    def count(runs: list[dict[str, Any]]) -> int:
        return len({value for run in runs for value in run["digests"]})

    result = {
        "case": "ssd",
        **results.circumstances(("triton", "torch", "mamba_ssm")),
        "workload": "mamba_chunk_scan_combined forward+backward, batch 1, 8192 tokens, 128 heads x 64, 8 groups, "
        "state 128, chunk 128, bfloat16, D, z, dt_bias, dt_softplus; torch deterministic algorithms on after import",
        "recorded": recorded,
        "pinned": pinned,
        "pinned_without_table": cheapest,
        "stock": stock,
        "tables": tables,
        "summary": {
            "pinned benchmarks": sum(run["benchmarks"] for run in pinned),
            "pinned digests": count(pinned),
            "stock digests": count(stock),
            "keys on which stock processes disagree": _disagreeing(stock),
            "keys on which recordings disagree": _disagreeing(recorded),
            "keys": len({(choice["kernel"], choice["key"]) for run in pinned for choice in run["choices"]}),
        },
    }
    print(json.dumps(result["summary"], indent=1))
    return result
