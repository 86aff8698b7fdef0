"""What deterministic mode costs a hybrid model (SSD, attention, mixture of experts), range by range.

Each side is a process of its own, and all of them stay: they take turns on the GPU, a few steps each, so that a slow
moment falls on all. ``default``: nothing installed, Triton times. ``pinned``: the shipped tables, torch at its
defaults. ``deterministic``: the mode, with the shipped tables. ``deterministic, fill``: the same with torch's filling
of unwritten memory left on. ``deterministic, cheapest``: the mode without any table. Before anything is timed each side
computes the gradients of one step twice: those of the mode must be equal bit for bit, and nothing pinned may time.

So that it is over in minutes, the candidates that the first side has to time are compiled by many processes before it
starts; what they do not finish in ``--compile-seconds``, that side compiles. Sides that are not ready by ``--deadline``
end the case; when it comes during the turns, what is measured by then is the result, and ``rounds`` says how many.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from bench import results

SIDES = ("default", "pinned", "deterministic", "deterministic, fill", "deterministic, cheapest")
SWITCHES = (
    ("configs from the shipped tables in place of timing", "default", "pinned"),
    ("deterministic mode beside pinning alone", "pinned", "deterministic"),
    ("fill_uninitialized_memory", "deterministic", "deterministic, fill"),
    ("cheapest configs in place of the shipped tables", "deterministic", "deterministic, cheapest"),
)


def add_deadlines(parser: argparse.ArgumentParser) -> None:
    """Flags of cases that start a :class:`Worker` for each side."""
    parser.add_argument("--deadline", type=float, default=500.0, metavar="SECONDS", help="for all (default: 500)")
    parser.add_argument(
        "--compile-seconds",
        type=float,
        default=180.0,
        metavar="SECONDS",
        help="after which what is not compiled beforehand is left to the side that times it (default: 180)",
    )


def hear_compilers(compilers: Sequence[Worker]) -> dict[str, float]:
    """Wait for the processes that compile, and end those that fail or are late: the seconds of the others, by name."""

    def seconds(compiler: Worker) -> float | None:
        try:
            return float(compiler.hear()["seconds"])
        except (RuntimeError, TimeoutError) as error:
            print(" ".join(str(error).split())[:200], flush=True)
            compiler.close()
            return None

    heard = {compiler.name: seconds(compiler) for compiler in compilers}
    spent = {name: found for name, found in heard.items() if found is not None}
    if compilers:
        longest = f", the longest took {max(spent.values()):.1f} s" if spent else ""
        print(f"{len(spent)} of {len(compilers)} compilers ended well{longest}", flush=True)
    return spent


def take_turns(sides: Mapping[str, TakesTurns], rounds: int, steps: int, deadline: float) -> int:
    """Let each side run its steps, in turn; how many rounds all sides have done by the deadline.

    A round is begun only where one as long as the longest so far, and what comes after it, still fits.

    Raises:
        TimeoutError: not one round fitted.
    """
    longest = 0.0
    for number in range(rounds):
        began = time.monotonic()
        if number and began + longest + AFTERWARDS_S > deadline:
            print(f"{number} of {rounds} rounds fit into the time", flush=True)
            return number
        for worker in sides.values():
            worker.tell(str(steps))
            worker.hear()
        longest = max(longest, time.monotonic() - began)
    return rounds


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this case."""
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side")
    parser.add_argument("--steps", type=int, default=6, help="steps in each turn")
    parser.add_argument("--compilers", type=int, default=11, help="processes that compile candidates beforehand")
    add_deadlines(parser)
    parser.add_argument("--max-slowdown", type=float, help="exit code 1 if a deterministic step takes longer than so")
    parser.add_argument(
        "--interpret", action="store_true", help="tiny sizes in Triton's interpreter: shows that it works, not a cost"
    )


class TakesTurns(Protocol):
    """A side that is told to run some steps, and says when they are done."""

    def tell(self, line: str) -> None:
        """Have so many steps run."""

    def hear(self) -> dict[str, Any]:
        """Wait for them."""


AFTERWARDS_S = 10.0
"""For what comes after the last turn: results are gathered and written."""


class Worker:
    """A process of one side, which speaks lines of JSON."""

    def __init__(
        self, name: str, folder: Path, deadline: float, *arguments: str, module: str = "bench.cost_worker"
    ) -> None:
        self.name = name
        self.deadline = deadline
        self.log = folder / f"{name.replace(', ', '-').replace('/', '-')}.log"
        (folder / "empty").mkdir(exist_ok=True)
        (folder / "empty" / "schema.json").touch()
        environment = {**os.environ, "TRITON_CACHE_DIR": str(folder / "cache")}
        root = str(Path(__file__).resolve().parents[1])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))
        command = [sys.executable, "-m", module, "--empty", str(folder / "empty"), *arguments]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )

    def close(self) -> None:
        """End it, whatever it does."""
        self.process.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self.process.wait()

    def tell(self, line: str) -> None:
        """Send it a line."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: hearing it says why
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """Its next line.

        Raises:
            RuntimeError: it ended without one.
            TimeoutError: the time is up.
        """
        import select

        assert self.process.stdout is not None
        left = self.deadline - time.monotonic()
        if not select.select([self.process.stdout], [], [], max(left, 0))[0]:
            raise TimeoutError(f"{self.name}: not done in time; its last lines: {self.log.read_text()[-1500:]}")
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended with {self.process.wait()}: {self.log.read_text()[-3000:]}")
        found: dict[str, Any] = json.loads(line)
        return found


def _measure(options: argparse.Namespace, folder: Path, deadline: float) -> tuple[int, dict[str, tuple[Any, Any]]]:
    """How many rounds were done, and for each side what it said when it was ready, and its times."""
    device = "cpu" if options.interpret else "cuda"
    # The interpreter would need minutes to time every candidate: there the default is left out.
    names = SIDES[1:] if options.interpret else SIDES
    workers: list[Worker] = []
    compiled = min(deadline, time.monotonic() + options.compile_seconds)

    def start(name: str, *arguments: str, until: float = deadline) -> Worker:
        workers.append(Worker(name, folder, until, "--side", name, "--device", device, *arguments))
        return workers[-1]

    try:
        compilers = [
            start(f"compiler {n}", "--compile", f"{n}/{options.compilers}", until=compiled)
            for n in range(0 if options.interpret else options.compilers)
        ]
        sides = {name: start(name) for name in names if name != "default"}
        hear_compilers(compilers)
        ready = {name: worker.hear() for name, worker in sides.items()}
        if "default" in names:
            # Alone on the GPU while it times: all others wait for their turn.
            sides = {"default": start("default"), **sides}
            ready["default"] = sides["default"].hear()
        for name in names:
            facts = ready[name]
            print(f"{name:24} {facts['seconds']:6.1f} s, {facts['benchmarks']} candidates timed", flush=True)
        _check(ready)
        rounds = take_turns(sides, options.rounds, options.steps, deadline)
        for worker in sides.values():
            worker.tell("")
        return rounds, {name: (ready[name], sides[name].hear()) for name in names}
    finally:
        for worker in workers:
            worker.close()


def _check(ready: dict[str, Any]) -> None:
    """Correct first: the mode's gradients are equal bit for bit, and a pinned side has timed nothing."""
    for name, facts in ready.items():
        if name.startswith("deterministic") and not (facts["same_bits_twice"] and facts["deterministic_algorithms"]):
            raise RuntimeError(f"{name}: gradients of one step, computed twice, differ")
        if facts["benchmarks"]:
            raise RuntimeError(f"{name}: {facts['benchmarks']} candidates were timed: it measures something else")
        if name.endswith("cheapest") and set(facts["sources"]) - {"cheapest"}:
            raise RuntimeError(f"{name}: {facts['sources']}: a table was used")
    if len({ready[name]["digest"] for name in ("deterministic", "deterministic, fill") if name in ready}) > 1:
        raise RuntimeError("filling unwritten memory changed the gradients: something reads it")


def inexact(name: str, sources: Iterable[str]) -> list[str]:
    """The problem of a side that is to be pinned by tables, where a choice is no table's entry for its very key."""
    counts = Counter(sources)
    return [] if set(counts) == {"exact"} else [f"{name}: sources {dict(counts)}: expected entries of the tables alone"]


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run the case and return the result."""
    from tuning.bitexact.cost import STEP, RangeTime, RangeTimes
    from tuning.bitexact.cost_table import CostGate, CostRow, join_ranges, write_ranges, write_table

    began = time.monotonic()
    deadline = began + options.deadline
    with tempfile.TemporaryDirectory(prefix="bench-cost-", ignore_cleanup_errors=True) as folder:
        rounds, measured = _measure(options, Path(folder), deadline)
    times = {}
    for name, (_, said) in measured.items():
        ranges = {
            key: RangeTime(value["calls"], *(tuple(value[c]) if value[c] else None for c in ("host", "device")))
            for key, value in said["ranges"].items()
        }
        times[name] = RangeTimes(name, "events", said["device"], said["steps"], ranges)
    out = options.out or results.RESULTS
    for name, side in times.items():
        write_ranges(out / f"cost_{name.replace(', ', '_')}.csv", side)
    base = "default" if "default" in times else "pinned"
    tables = {}
    fill = join_ranges(times["deterministic"], times["deterministic, fill"])
    step = next(row for row in fill.rows if row.name == STEP)
    for name in ("deterministic", "deterministic, cheapest"):
        table = join_ranges(times[base], times[name])
        if name == "deterministic":
            table = table.with_row(CostRow("step, deterministic, fill_uninitialized_memory off and on", step.before,
                                           step.after))  # fmt: skip
        tables[name] = table
        write_table(out / f"cost_table_{name.replace(', ', '_')}.csv", table)
        print(f"\n{name} beside {base}, {table.clock} ms for each step\n{'before':>9} {'after':>9} {'lost':>9}  range")
        for row in table.rows:
            cells = [f"{value:9.3f}" if value is not None else f"{'':9}" for value in (row.before, row.after, row.lost)]
            print(*cells, "", row.name)
    switches = []
    print(f"\n{'off':>9} {'on':>9} {'lost':>9}  switch, {tables['deterministic'].clock} ms of a step")
    for text, off, on in SWITCHES:
        if off in times and on in times:
            row = next(row for row in join_ranges(times[off], times[on]).rows if row.name == STEP)
            switches.append({"switch": text, "off_ms": row.before, "on_ms": row.after, "lost_ms": row.lost})
            print(f"{row.before:9.3f} {row.after:9.3f} {row.lost:9.3f}  {text}")
    problems: list[str] = []
    if not options.interpret:  # the tables have no key so small
        for name in ("pinned", "deterministic", "deterministic, fill"):
            problems += inexact(name, measured[name][0]["sources"])
    if options.max_slowdown is not None:
        problems += CostGate(ratio=options.max_slowdown, ranges=(STEP,)).problems(tables["deterministic"])
    for problem in problems:
        print(problem)
    return {
        "case": "cost",
        **results.circumstances(("triton", "torch", "mamba_ssm")),
        "workload": "hybrid model of bench/hybrid.py, one block, bfloat16, width 4096, 4096 tokens, AdamW"
        if not options.interpret
        else "tiny hybrid model in Triton's interpreter",
        "seconds": time.monotonic() - began,
        "rounds": rounds,
        "steps_per_round": options.steps,
        "sides": {
            name: {**facts, "ranges": {key: vars(value) for key, value in times[name].ranges.items()}}
            for name, (facts, _) in measured.items()
        },
        "tables": {name: table.to_json() for name, table in tables.items()},
        "switches": switches,
        "problems": problems,
    }
