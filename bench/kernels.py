"""Kernel time of Mamba-2's SSD step: timed best, pinned from the shipped table, cheapest.

One process for each side, all on one GPU in turns, so that a slow moment falls on all; torch's profiler gives the
duration of every kernel. ``timed``: Triton times its candidates in that process, which have been compiled by many
processes before. ``table``: pinned, every key from the shipped tables. ``cheapest``: pinned without any table. The
figure of a kernel is the sum, over its launches in a step, of each one's median over the steps: launches of several
keys are not mixed. Only autotuned kernels are counted.

Before anything is timed, output and gradients of one step are compared between the sides, with torch's deterministic
algorithms off as in the timed steps. Other configs add in another order, so bits may differ: each tensor's difference
from the first side's, as root mean square, may be :data:`TOLERANCE` of that tensor's own.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench import results
from bench.cost import Worker, add_deadlines, hear_compilers, inexact, take_turns
from bench.lines import take_output

SIDES = ("timed", "table", "cheapest")
TOLERANCE = 0.02
"""Of results in bfloat16, of 8 bits, each the sum of many products."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this case."""
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side")
    parser.add_argument("--steps", type=int, default=8, help="steps in each turn")
    add_deadlines(parser)
    parser.add_argument("--compilers", type=int, default=13, help="processes that compile candidates beforehand")


def per_step(durations: dict[str, list[float]], steps: int) -> dict[str, dict[str, float]]:
    """For each kernel the launches of a step, and their time in ms: the sum of the medians of each launch.

    Args:
        durations: of every launch, in ms and in the order of launching, by kernel.
        steps: how many steps they are of.

    Raises:
        RuntimeError: the steps do not launch a kernel equally often.
    """
    found = {}
    for name, times in sorted(durations.items()):
        launches, rest = divmod(len(times), steps)
        if rest:
            raise RuntimeError(f"{name}: {len(times)} launches in {steps} steps: expected as many in each")
        places = [times[place::launches] for place in range(launches)]
        found[name] = {
            "launches": launches,
            "ms": sum(map(statistics.median, places)),
            "lowest_ms": sum(map(min, places)),
        }
    return found


def compare_outputs(folder: Path, sides: Sequence[str] = SIDES) -> dict[str, dict[str, float]]:
    """The largest difference between the sides' results, for each tensor, as a share of the first side's.

    Raises:
        RuntimeError: one is over the tolerance, or not a number.
    """
    import torch

    first, *others = (torch.load(folder / f"{side}.pt", weights_only=True) for side in sides)
    found: dict[str, dict[str, float]] = {}
    for side, tensors in zip(sides[1:], others, strict=True):
        if tensors.keys() != first.keys():
            raise RuntimeError(f"{side}: computes {sorted(tensors)}, not {sorted(first)}")
        found[side] = {}
        for name, expected in first.items():
            difference = (tensors[name].double() - expected.double()).square().mean().sqrt()
            share = float(difference / expected.double().square().mean().sqrt())
            found[side][name] = share
            if not share <= TOLERANCE:
                raise RuntimeError(f"{side}: {name} differs from {sides[0]}'s by {share:.3g} of it, over {TOLERANCE}")
    return found


def kernel_durations(events: Iterable[Any], names: set[str]) -> dict[str, list[float]]:
    """The duration in ms of each launch of the named kernels, in order, of a profiler's events on the device."""
    found: dict[str, list[float]] = defaultdict(list)
    launched = [event for event in events if str(event.device_type).endswith("CUDA") and event.name in names]
    for event in sorted(launched, key=lambda event: event.time_range.start):
        found[event.name].append(1e-3 * event.time_range.elapsed_us())
    return found


def summary(sides: dict[str, dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Each kernel on every side, and the sums.

    Raises:
        RuntimeError: the sides do not launch the same kernels equally often.
    """
    launches = {side: {name: value["launches"] for name, value in kernels.items()} for side, kernels in sides.items()}
    if len({json.dumps(counts, sort_keys=True) for counts in launches.values()}) > 1 or not all(launches.values()):
        raise RuntimeError(f"the sides launch other kernels: {launches}")
    kernels = {name: {side: sides[side][name]["ms"] for side in sides} for name in next(iter(sides.values()))}
    sums = {side: sum(kernel[side] for kernel in kernels.values()) for side in sides}
    return {"kernels_ms": kernels, "sum_ms": sums, "over_timed": {side: sums[side] / sums["timed"] for side in sums}}


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run the case and return the result."""
    began = time.monotonic()
    workers: list[Worker] = []
    with tempfile.TemporaryDirectory(prefix="bench-kernels-", ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)

        deadline = began + options.deadline
        compiled = min(deadline, began + options.compile_seconds)

        def start(name: str, *arguments: str, until: float = deadline) -> Worker:
            workers.append(Worker(name, folder, until, *arguments, module="bench.kernels"))
            return workers[-1]

        try:
            compilers = [
                start(f"compiler {n}", "--compile", f"{n}/{options.compilers}", until=compiled)
                for n in range(options.compilers)
            ]
            sides = {name: start(name, "--side", name) for name in SIDES if name != "timed"}
            hear_compilers(compilers)
            ready = {name: worker.hear() for name, worker in sides.items()}
            sides["timed"] = start("timed", "--side", "timed")  # alone on the GPU while it times
            ready["timed"] = sides["timed"].hear()
            for name in ("table", "cheapest"):
                if ready[name]["benchmarks"]:
                    raise RuntimeError(f"{name}: {ready[name]['benchmarks']} candidates were timed")
            if set(ready["cheapest"]["sources"]) != {"cheapest"}:
                raise RuntimeError(f"cheapest: {ready['cheapest']['sources']}: a table was used")
            differences = compare_outputs(folder)
            rounds = take_turns(sides, options.rounds, options.steps, deadline)
            for worker in sides.values():
                worker.tell("")
            measured = {name: sides[name].hear()["kernels"] for name in SIDES}
        finally:
            for worker in workers:
                worker.close()
    found = summary(measured)
    print(f"{'ms of a step':44} {'timed':>9} {'table':>9} {'cheapest':>9}")
    for name, times in sorted(found["kernels_ms"].items(), key=lambda item: -item[1]["timed"]):
        print(f"{name:44} {' '.join(f'{times[side]:9.4f}' for side in SIDES)}")
    for name, sums in (("sum", found["sum_ms"]), ("beside timed", found["over_timed"])):
        print(f"{name:44} {' '.join(f'{sums[side]:9.4f}' for side in SIDES)}")
    worst = {side: max(shares.values()) for side, shares in differences.items()}
    print(f"sources of the table side: {ready['table']['sources']}; largest difference of a result: {worst}")
    problems = inexact("table", Counter(ready["table"]["sources"]).elements())
    for problem in problems:
        print(problem)
    return {
        "case": "kernels",
        **results.circumstances(("triton", "torch", "mamba_ssm")),
        "workload": "mamba_chunk_scan_combined forward+backward, as in the case ssd",
        "seconds": time.monotonic() - began,
        "rounds": rounds,
        "steps_per_round": options.steps,
        **found,
        "sides": {name: {**ready[name], "kernels": measured[name]} for name in SIDES},
        "differences": {"tolerance": TOLERANCE, "from": SIDES[0], **differences},
        "problems": problems,
    }


def worker() -> None:
    """One process: of a side, or one that compiles a share of the candidates. Speaks lines of JSON."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--side", choices=SIDES)
    parser.add_argument("--empty", type=Path, required=True, help="folder of no tables")
    parser.add_argument("--compile", help="SHARE/OF")
    options = parser.parse_args()
    say = take_output()
    import tuning
    import tuning.tables

    if options.side in ("table", "cheapest"):
        if options.side == "cheapest":
            tuning.tables.bundled_folder = lambda: options.empty
        tuning.install(tuning.AutotunePolicy(mode="pinned"))
    import torch
    from triton.runtime.autotuner import Autotuner

    from bench.cost_worker import share_out
    from bench.workloads import Ssd, SsdShape

    workload = Ssd(SsdShape())
    tuners = [found for found in gc.get_objects() if isinstance(found, Autotuner)]
    if options.compile:
        share_out(*map(int, options.compile.split("/")), tuners)
    began = time.perf_counter()
    computed = workload.step()
    torch.cuda.synchronize()
    if options.side:
        torch.save(
            {name: tensor.cpu() for name, tensor in computed.items()}, options.empty.parent / f"{options.side}.pt"
        )
    seconds = time.perf_counter() - began
    say(
        ready=True,
        seconds=seconds,
        benchmarks=tuning.benchmarks_run(),
        sources=_count(choice.source for choice in tuning.choices()),
    )
    if options.compile:
        return
    names = {tuner.base_fn.__name__ for tuner in tuners}
    durations: dict[str, list[float]] = defaultdict(list)
    steps = 0
    for line in sys.stdin:
        if not line.strip():
            break
        workload.step()
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            for _ in range(int(line)):
                workload.step()
            torch.cuda.synchronize()
        steps += int(line)
        for name, found in kernel_durations(profiler.events(), names).items():
            durations[name] += found
        say(measured=int(line))
    say(kernels=per_step(durations, steps))


def _count(sources: Iterable[str]) -> dict[str, int]:
    found: dict[str, int] = defaultdict(int)
    for source in sources:
        found[source] += 1
    return dict(found)


if __name__ == "__main__":
    worker()
