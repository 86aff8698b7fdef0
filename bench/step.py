"""Time of Mamba-2's SSD step, stock and pinned, with torch's deterministic algorithms off and on (GPU).

One process for each side, all on one GPU. ``stock``: Triton times its candidates and chooses. ``table``: pinned, every
key from the shipped tables. ``cheapest``: pinned without any table. Each side takes a few steps with the deterministic
algorithms off and a few with them on, in turn with all others, so that a slow moment falls on all. The flag is set
after mamba_ssm is imported, which cuts its candidates to one where it sees it before.

A step's time is from the call to the end of all its work on the GPU. Before and between the timed steps digests are
taken of the output and all gradients: a pinned side has one digest with the deterministic algorithms on, or nothing is
written. Results of the sides are compared as in the case ``kernels``.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import results
from bench.cost import Worker, add_deadlines, hear_compilers, inexact, take_turns
from bench.kernels import TOLERANCE, compare_outputs
from bench.lines import take_output
from bench.probe import SMALL

SIDES = ("stock", "table", "cheapest")
STATES = ("off", "on")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this case."""
    parser.add_argument("--rounds", type=int, default=10, help="turns of each side and state")
    parser.add_argument("--steps", type=int, default=10, help="timed steps in each turn")
    parser.add_argument("--compilers", type=int, default=13, help="processes that compile candidates beforehand")
    parser.add_argument(
        "--interpret", action="store_true", help="small tensors in Triton's interpreter, pinned sides alone: no times"
    )
    add_deadlines(parser)


class Turns:
    """One side in one state, as a worker that takes turns; keeps its times in ms and its digests."""

    def __init__(self, worker: Worker, state: str, digests: Sequence[str]) -> None:
        self.worker, self.state = worker, state
        self.times: list[float] = []
        self.digests = list(digests)

    def tell(self, line: str) -> None:
        """Have so many steps timed."""
        self.worker.tell(f"{self.state} {line}")

    def hear(self) -> dict[str, Any]:
        """Wait for them."""
        said = self.worker.hear()
        self.times += said["ms"]
        self.digests.append(said["digest"])
        return said


def figures(times: Sequence[float]) -> dict[str, Any]:
    """Median with 10th and 90th percentile, of two or more times in ms."""
    tenths = statistics.quantiles(times, n=10)
    return {"median_ms": statistics.median(times), "p10_ms": tenths[0], "p90_ms": tenths[8], "steps": len(times)}


def check(ready: Mapping[str, Mapping[str, Any]]) -> None:
    """Correct first.

    Raises:
        RuntimeError: a pinned side has timed candidates, or one that is to have no table used one.
    """
    for side in ("table", "cheapest"):
        if ready[side]["benchmarks"]:
            raise RuntimeError(f"{side}: {ready[side]['benchmarks']} candidates were timed: it measures something else")
    if set(ready["cheapest"]["sources"]) != {"cheapest"}:
        raise RuntimeError(f"cheapest: {ready['cheapest']['sources']}: a table was used")


def check_digests(side: str, state: str, digests: Sequence[str]) -> None:
    """A pinned side computes the same bits each time where torch's algorithms are deterministic.

    Raises:
        RuntimeError: it does not.
    """
    if side != "stock" and state == "on" and len(set(digests)) != 1:
        raise RuntimeError(f"{side}, deterministic algorithms on: {len(set(digests))} digests of {len(digests)} steps")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run the case and return the result."""
    began = time.monotonic()
    deadline = began + options.deadline
    names = SIDES[1:] if options.interpret else SIDES
    extra = ["--interpret"] if options.interpret else []
    workers: list[Worker] = []
    with tempfile.TemporaryDirectory(prefix="bench-step-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)

        def start(name: str, *arguments: str, until: float = deadline) -> Worker:
            workers.append(Worker(name, folder, until, *arguments, *extra, module="bench.step"))
            return workers[-1]

        try:
            compilers = [
                start(f"compiler {n}", "--compile", f"{n}/{options.compilers}", until=began + options.compile_seconds)
                for n in range(0 if options.interpret else options.compilers)
            ]
            sides = {name: start(name, "--side", name) for name in names if name != "stock"}
            hear_compilers(compilers)
            ready = {name: worker.hear() for name, worker in sides.items()}
            if "stock" in names:  # alone on the GPU while it times
                sides["stock"] = start("stock", "--side", "stock")
                ready["stock"] = sides["stock"].hear()
            check(ready)
            differences = {state: compare_outputs(folder / state, names) for state in STATES}
            turns = {
                f"{name}, {state}": Turns(sides[name], state, ready[name]["digests"][state])
                for state in STATES
                for name in names
            }
            rounds = take_turns(turns, options.rounds, options.steps, deadline)
        finally:
            for worker in workers:
                worker.close()
    found: dict[str, dict[str, Any]] = {state: {} for state in STATES}
    print(f"{'step, ms':10} {'algorithms':>10} {'median':>9} {'p10':>9} {'p90':>9} {'over stock':>10}  digests")
    for each in turns.values():
        name = next(name for name in names if sides[name] is each.worker)
        check_digests(name, each.state, each.digests)
        row = found[each.state][name] = {**figures(each.times), "digests": len(set(each.digests))}
    for state, rows in found.items():
        for name in names:
            row = rows[name]
            if "stock" in rows:
                row["over_stock"] = row["median_ms"] / rows["stock"]["median_ms"]
            over = f"{row['over_stock']:10.3f}" if "over_stock" in row else f"{'':10}"
            cells = " ".join(f"{row[at]:9.3f}" for at in ("median_ms", "p10_ms", "p90_ms"))
            print(f"{name:10} {state:>10} {cells} {over}  {row['digests']} of {rounds + 2}")
    problems = [] if options.interpret else inexact("table", ready["table"]["sources"])
    for problem in problems:
        print(problem)
    return {
        "case": "step",
        **results.circumstances(("triton", "torch", "mamba_ssm")),
        "workload": "mamba_chunk_scan_combined forward+backward, as in the case ssd"
        if not options.interpret
        else "a small step in Triton's interpreter: its times say nothing",
        "seconds": time.monotonic() - began,
        "rounds": rounds,
        "steps_per_round": options.steps,
        "deterministic_algorithms": found,
        "sides": {name: {**ready[name], "sources": dict(Counter(ready[name]["sources"]))} for name in names},
        "differences": {"tolerance": TOLERANCE, "from": names[0], **differences},
        "problems": problems,
    }


def worker() -> None:
    """One process: of a side, or one that compiles a share of the candidates. Speaks lines of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--empty", type=Path, required=True, help="folder of no tables")
    parser.add_argument("--compile", help="SHARE/OF")
    parser.add_argument("--interpret", action="store_true")
    options = parser.parse_args()
    say = take_output()
    began = time.perf_counter()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if options.interpret:
        from tuning.interpreter import stand_in_for_cuda, use_interpreter

        use_interpreter()
        stand_in_for_cuda()
    import tuning
    import tuning.tables

    if options.side in ("table", "cheapest"):
        if options.side == "cheapest":
            tuning.tables.bundled_folder = lambda: options.empty
        tuning.install(tuning.AutotunePolicy(mode="pinned"))
    import torch
    from triton.runtime.autotuner import Autotuner

    from bench.cost_worker import share_out
    from bench.workloads import Ssd, SsdShape, digest

    shape = SsdShape(**SMALL) if options.interpret else SsdShape()  # type: ignore[arg-type]
    workload = Ssd(shape, device="cpu" if options.interpret else "cuda")
    sync = (lambda: None) if options.interpret else torch.cuda.synchronize
    if options.compile:
        tuners = [found for found in gc.get_objects() if isinstance(found, Autotuner)]
        share_out(*map(int, options.compile.split("/")), tuners)
    digests: dict[str, list[str]] = {}
    for state in STATES:
        torch.use_deterministic_algorithms(state == "on")
        computed = workload.step()
        if options.side:
            place = options.empty.parent / state
            place.mkdir(exist_ok=True)
            torch.save({name: tensor.cpu() for name, tensor in computed.items()}, place / f"{options.side}.pt")
            digests[state] = [digest(computed), digest(workload.step())]
    sync()
    sources = [choice.source for choice in tuning.choices()]
    seconds = time.perf_counter() - began
    say(ready=True, seconds=seconds, benchmarks=tuning.benchmarks_run(), sources=sources, digests=digests)
    if options.compile:
        return
    for line in sys.stdin:
        state, steps = line.split()
        torch.use_deterministic_algorithms(state == "on")
        computed = workload.step()  # not timed: another side had the GPU
        times = []
        for _ in range(int(steps)):
            sync()
            begin = time.perf_counter()
            computed = workload.step()
            sync()
            times.append(1e3 * (time.perf_counter() - begin))
        say(ms=times, digest=digest(computed))


if __name__ == "__main__":
    worker()
