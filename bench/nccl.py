"""Several ranks: recorded at once and pinned, stock in cold starts, chaos, and what a check costs.

One process a GPU over NCCL; with one GPU, two processes on it over gloo; with none, a stub kernel over gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from bench import results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this case."""
    parser.add_argument("--ranks", type=int, default=2, help="processes")
    parser.add_argument("--starts", type=int, default=3, help="cold starts of stock Triton")
    parser.add_argument("--stub", action="store_true", help="a stub kernel and gloo, also where there is a GPU")


def _torchrun(options: argparse.Namespace, folder: Path, *parts: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(options.ranks)]
    command += ["-m", "bench.nccl_worker", *parts, "--folder", str(folder), *(["--stub"] if options.stub else [])]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TRITON_CACHE_DIR": str(folder / "cache"),
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    if "--deterministic" in parts:
        from tuning.determinism import spawn_env

        # NCCL and cuBLAS read theirs before a worker's own code could set them.
        environment = spawn_env(environment)
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    for part in parts:
        if part.startswith("--"):
            continue
        shown = {name: value for name, value in found[part].items() if name != "disagreements"}
        print(f"{part:7} {json.dumps(shown)}", flush=True)
    return found


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run the case and return the result."""
    import torch

    options.stub = options.stub or not torch.cuda.is_available()
    with tempfile.TemporaryDirectory(prefix="bench-nccl-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        found = _torchrun(options, folder, "record", "chaos", "cost")
        starts = [_torchrun(options, folder, "stock")["stock"] for _ in range(options.starts)]
        # A hybrid model under FSDP2, in fresh processes: twice with deterministic mode, twice without.
        trained = {
            name: [_torchrun(options, folder, "fsdp", *flags)["fsdp"] for _ in range(2)]
            for name, flags in (("deterministic", ["--deterministic"]), ("default", []))
            if not options.stub
        }
    return {
        "case": "nccl",
        **results.circumstances(("triton", "torch", "mamba_ssm")),
        "kernels": "stub" if options.stub else "mamba_chunk_scan_combined forward+backward, as in the case ssd",
        **found,
        "stock, cold starts": starts,
        "hybrid model under FSDP2, 20 steps, twice": trained,
        "equal digests": {name: first["ranks"] == second["ranks"] for name, (first, second) in trained.items()},
    }
