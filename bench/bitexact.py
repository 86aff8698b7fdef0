"""Proof on a device: digests against the CPU's and their speed, faults that are caught, and the suite."""

from __future__ import annotations

import argparse
import hashlib
import itertools
import os
import time
from collections.abc import Callable
from typing import Any

from bench import results

_DTYPES = ("float32", "bfloat16", "float16", "float64", "int64", "float8_e4m3fn", "complex64", "bool")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the case's arguments."""
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="cpu: for a look without a GPU")
    parser.add_argument("--mebibytes", type=int, default=2048, help="size of the tensor whose digest is timed")
    parser.add_argument("--fresh", action="store_true", help="the suite in a second group of processes too")
    parser.add_argument("--without-suite", action="store_true", help="digests and faults alone")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure, print a short table, and return the result."""
    from tuning.bitexact.suite import run_suite

    found: dict[str, Any] = results.circumstances()
    problems: list[str] = []
    found["digests"] = _digests(options.device, options.mebibytes, problems)
    print(f"digests: {found['digests']}")
    found["faults"] = _faults(options.device, problems)
    for name, row in found["faults"].items():
        print(f"{name}: {row['found']}; {row.get('repaired', '')}")
    if not options.without_suite:
        report = run_suite(device=options.device, fresh=options.fresh, timeout=240)
        found["suite"] = report.to_json()
        for row in report.rows:
            print(f"{row.preset} {row.cell} {row.recipe}: {row.outcome} {row.detail} {row.values} {row.seconds:.2f} s")
        print(report.verdict)
        if not report.passed:
            problems.append(f"suite: {report.verdict}")
    found["problems"] = problems
    for problem in problems:
        print(f"PROBLEM: {problem}")
    return found


def _digests(device: str, mebibytes: int, problems: list[str]) -> dict[str, Any]:
    import torch

    from tuning.bitexact import digest_tensor, digest_value

    generator = torch.Generator().manual_seed(0)
    for name in _DTYPES:
        x = torch.randn(37, 129, 65, generator=generator).mul(3).to(getattr(torch, name))
        problems += [
            f"digest of {name} {list(case.shape)} differs between {device} and cpu"
            for case in (x, x.permute(2, 0, 1), x[::3, :, 5:])
            if digest_tensor(case.to(device)).content != digest_tensor(case).content
        ]
    x = torch.randn(mebibytes << 19, device=device, dtype=torch.bfloat16)
    digest_tensor(x)
    _wait(device)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    started = time.perf_counter()
    digest_tensor(x)
    _wait(device)
    seconds = time.perf_counter() - started
    row: dict[str, Any] = {"mebibytes, bfloat16": mebibytes, "digest, ms": round(seconds * 1e3, 2)}
    row["digest, GB/s"] = round(x.nbytes / seconds / 1e9, 1)
    if device == "cuda":
        row["memory on top, MiB"] = (torch.cuda.max_memory_allocated() - before) >> 20
    part = x[: 64 << 19]
    started = time.perf_counter()
    hashlib.sha256(part.view(torch.uint8).cpu().numpy()).hexdigest()
    row["copy to the host and SHA-256, GB/s"] = round(part.nbytes / (time.perf_counter() - started) / 1e9, 2)
    count = 300 if device == "cuda" else 3
    few = {str(number): torch.randn(512, 512, device=device) for number in range(count)}
    digest_value(few)
    started = time.perf_counter()
    digest_value(few)
    row[f"{count} tensors of 1 MiB, ms"] = round((time.perf_counter() - started) * 1e3, 2)
    return row


def _wait(device: str) -> None:
    import torch

    if device == "cuda":
        torch.cuda.synchronize()


def _faults(device: str, problems: list[str]) -> dict[str, Any]:
    import torch

    import tuning
    from tuning.bitexact import bisect_runs, compare_runs
    from tuning.determinism import deterministic_torch

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1 << 20, generator=generator).to(device)
    places = torch.randint(0, 8, (1 << 20,), generator=generator).to(device)
    numbers = itertools.count()

    def atomic_in_torch() -> Any:
        return torch.zeros(8, device=device).index_add(0, places, x)

    def atomic_in_triton() -> Any:
        from bench.bitexact_kernels import add_by_atomics

        out = torch.zeros(1, device=device)
        add_by_atomics[(-(-x.numel() // 256),)](x, out, x.numel(), BLOCK=256)
        return out + 0

    def unpinned() -> Callable[[], Any]:
        from bench.bitexact_kernels import autotuned

        # The stopwatch favours one candidate in one run and the other in the next, as a noisy one does.
        times = itertools.cycle([1.0, 2.0, 2.0, 1.0])
        kernel = autotuned(lambda: next(times))

        def run() -> Any:
            kernel.cache.clear()
            out = torch.zeros(1, device=device)
            kernel[(1,)](x, out, 1 << 13)
            return out + 0

        return run

    def nan_payload() -> Any:
        pattern = torch.full((4,), 0x7FC00000 + next(numbers) % 1024, dtype=torch.int32, device=device)
        return pattern.view(torch.float32)

    def sign_of_zero() -> Any:
        sign = -1.0 if next(numbers) % 2 else 1.0
        return torch.zeros(4, device=device) * sign

    found: dict[str, Any] = {}
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"

    def caught(name: str, run: Callable[[], Any], kind: str, op: str, *, attempts: int = 5) -> None:
        comparison = compare_runs(run, runs=2 * attempts)
        bisection = bisect_runs(run)
        for _ in range(attempts):
            if not bisection.equal:
                break
            bisection = bisect_runs(run)
        first = comparison.first
        found[name] = {"found": str(first), "op": str(bisection.op)}
        if first is None or first.kind != kind:
            problems.append(f"{name}: expected a difference of kind {kind}, found {first}")
        if interpreted and op == "outside of torch":
            return  # the interpreter's kernels are torch's ops and numpy's
        if bisection.op is None or op not in f"{bisection.op.kind} {bisection.op.name}":
            problems.append(f"{name}: expected bisect to name {op}, found {bisection.op}")

    def repaired(name: str, run: Callable[[], Any]) -> None:
        comparison = compare_runs(run, runs=10)
        found[name]["repaired"] = comparison.lines()[0]
        if not comparison.equal:
            problems.append(f"{name}: expected equal bits after the repair, found {comparison.first}")

    caught("NaN payload", nan_payload, "nan", "aten.full")
    caught("sign of zero", sign_of_zero, "sign of zero", "aten.mul")
    caught("unpinned kernel", unpinned(), "value", "outside of torch")
    with tuning.install(tuning.AutotunePolicy(mode="pinned", modules=("bench",))):
        repaired("unpinned kernel", unpinned())
    if device == "cuda":
        caught("atomic add in torch", atomic_in_torch, "value", "op aten.index_add")
        with deterministic_torch():
            repaired("atomic add in torch", atomic_in_torch)
        caught("atomic add in a Triton kernel", atomic_in_triton, "value", "outside of torch")
    return found
