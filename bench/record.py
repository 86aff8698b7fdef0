"""Record many workloads on one GPU in little time: collect launches, compile all candidates, then time alone.

Nearly all time of a recording is compilation, so it comes first and on all cores:

1. ``collect``: every workload once, several at a time, one candidate of each autotuner. Their journals hold what the
   compiler sees of each launch, and which candidates the kernel's own pruning leaves. Without a GPU, nothing is
   launched (``--stand-in``); the journals serve as well, and may be given to a recording on one (``--collected``).
2. ``compile``: all candidates of all launches, in a process for each core, into the compile cache.
3. ``time``: each workload in a process of its own, alone on the GPU, in record mode with a short benchmark; twice, so
   that the two recordings say how far they agree. The next processes start up while one is timed.

Everything is kept in the folder given by ``--out``. Started again with it, what is finished is not done again, also
where the run before was killed; what failed is done again with ``--retry-failed`` alone. A budget of seconds ends a run
early in order. At the end stand a table, ``summary.json`` and, with ``--pack``, one file
with the recordings (:mod:`bench.record_pack`).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench import record_pack, results
from bench.record_compile import Compiling, Work, environment_of, works
from bench.workloads import Workload, find
from tuning.errors import TuningError
from tuning.journal import find_journals

SMOKE = (
    "mamba.rms_norm/8192x2048",
    "fla.l2norm/131072x128",
    "megatron.mla_rope_kv/t8192h16d128v128r64",
    "transformer_engine.sort_chunks/t65536x2048s64",
)
"""One workload of each package, of few candidates."""

REFUSED = "produces incorrect results for gated chunk_bwd_dqkwg"
"""In what FLA says where it refuses a backward under Triton 3.4 to 3.7.0 on Hopper. What ran before it is recorded."""

PASSES = ("collect", "compile", "time")
PACKAGES = ("triton", "torch", "mamba_ssm", "fla-core", "megatron-core", "transformer-engine")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this case. ``--out`` is the folder of the recording."""
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="workloads, by name, start or glob")
    parser.add_argument("--workloads", nargs="+", default=[], metavar="MODULE", help="lists of workloads of your own")
    parser.add_argument("--smoke", action="store_true", help="one small workload of each package")
    parser.add_argument("--list", action="store_true", help="name the workloads and stop")
    parser.add_argument("--passes", nargs="+", choices=PASSES, default=list(PASSES))
    parser.add_argument("--budget", type=float, default=float("inf"), metavar="SECONDS", help="for all of this run")
    parser.add_argument("--compile-seconds", type=float, default=float("inf"), metavar="SECONDS")
    parser.add_argument("--compile-timeout", type=float, default=60.0, metavar="SECONDS", help="for one candidate")
    parser.add_argument("--workload-timeout", type=float, default=240.0, metavar="SECONDS")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes that compile")
    parser.add_argument("--collectors", type=int, default=8, help="workloads collected at a time")
    parser.add_argument("--waiting", type=int, default=4, help="processes that start up while one is timed")
    parser.add_argument("--rounds", type=int, default=2, help="recordings of each workload")
    parser.add_argument(
        "--retry-failed", action="store_true", help="run workloads again that failed, but for those a package refuses"
    )
    parser.add_argument("--remeasure", action="store_true", help="settle near ties by timing them again, in turns")
    parser.add_argument("--warmup-ms", type=int, default=5, help="of one candidate's benchmark")
    parser.add_argument("--rep-ms", type=int, default=25, help="of one candidate's benchmark")
    parser.add_argument(
        "--stand-in",
        action="store_true",
        help="without a GPU: collect and compile for an H200; what --passes time then writes is no measurement",
    )
    parser.add_argument(
        "--collected", type=Path, metavar="FILE", help="what another recording packed when it collected"
    )
    parser.add_argument(
        "--uncompiled", action="store_true", help="time workloads whose candidates are not all compiled"
    )
    parser.add_argument("--pack", type=Path, metavar="FILE", help="write the recordings to this .tar.xz")
    parser.add_argument("--unpack", type=Path, metavar="FILE", help="go on from what --pack wrote")
    parser.add_argument("--pack-cache", nargs=2, metavar=("GLOB", "FILE"), help="kernels whose compile cache to pack")
    parser.add_argument("--unpack-cache", nargs="+", type=Path, default=[], metavar="FILE")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run the case and return its summary."""
    if options.smoke:
        options.only = [*options.only, *SMOKE]
    try:
        chosen = find(options.only, options.workloads)
    except ValueError as error:
        sys.exit(str(error))
    if options.list:
        for workload in chosen:
            print(workload.name)
        sys.exit(0)
    if options.out is None:
        sys.exit("--out: a folder for the recording is needed")
    options.name = options.name or "summary"
    return Recording(options, chosen).run()


class Recording:
    """One run of the case, over the folder of a recording."""

    def __init__(self, options: argparse.Namespace, chosen: Sequence[Workload]) -> None:
        self.options = options
        self.workloads = chosen
        self.folder = Path(options.out).resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.cache = self.folder / "cache"
        self.began = time.monotonic()
        self.end = self.began + options.budget
        self.seconds: dict[str, float] = {}
        self.environment = environment_of(self.cache, Path(__file__).parents[1])
        self.compiling: Compiling | None = None
        self.todo: dict[str, list[Work]] = {}
        self.refused: list[str] = []
        self._retried: set[tuple[str, str]] = set()

    def run(self) -> dict[str, Any]:
        """All passes asked for, then the summary."""
        options = self.options
        if options.unpack is not None:
            record_pack.unpack(options.unpack, self.folder)
        if options.collected is not None:
            record_pack.unpack(options.collected, self.folder, only="collect")
        for file in options.unpack_cache:
            record_pack.unpack_cache(file, self.cache)
        if "collect" in options.passes:
            with _Clock(self.seconds, "collect"):
                self._collect()
        if "compile" in options.passes:
            with _Clock(self.seconds, "compile"):
                self._compile()
        if "time" in options.passes:
            for number in range(1, options.rounds + 1):
                with _Clock(self.seconds, f"time {number}"):
                    self._time(number)
        summary = self.summary()
        self._show(summary)
        if options.pack is not None:
            try:
                print(record_pack.pack(self.folder, summary, options.pack))
            except ValueError as error:  # the recording is there all the same
                print(error)
                summary["problems"].append(str(error))
        if options.pack_cache is not None:
            print(record_pack.pack_cache(self.cache, *options.pack_cache))
        return summary

    # -- the passes --

    def _collect(self) -> None:
        names = [item.name for item in self.workloads if self._is_due("collect", item.name)]
        jobs = min(self.options.collectors, self.options.jobs if self.options.stand_in else self.options.collectors)
        self._processes("collect", names, jobs, [])

    def _compile(self) -> None:
        # A workload at a time, in order, so that a budget that ends early leaves whole workloads compiled.
        todo = [work for name in self._plan() for work in self.todo[name]]
        compiling = self._compiler()
        if not todo:
            return
        total = sum(len(work.configs) for work in todo)
        print(f"compile: {total} candidates of {len({work.name for work in todo})} launches", flush=True)
        said = [0.0, -1]

        def progress(count: int, of: int) -> None:
            now = time.monotonic()
            if now - said[0] > 10 or (count == of and said[1] != of):
                said[:] = [now, count]
                failed = len(compiling.failed)
                print(f"compile: {count}/{of}, {failed} cannot be, {now - self.began:.0f} s", flush=True)

        limit = min(self.end - 15, time.monotonic() + self.options.compile_seconds)
        compiling.run(todo, limit, progress)

    def _compiler(self) -> Compiling:
        if self.compiling is None:
            settings = {"arch": "sm90", "multiprocessors": 132}
            self.compiling = Compiling(
                self.folder, self.environment, self.options.jobs, self.options.compile_timeout, settings
            )
        return self.compiling

    def _plan(self) -> list[str]:
        """The collected workloads, in order; what there is to compile for each is kept."""
        if not self.todo:
            owners = {path: item.name for item in self.workloads for path in self._journals("collect", item.name)}
            found, self.refused = works(list(owners))
            self.todo = {name: [] for name in owners.values()}
            for path, work in found:
                self.todo[owners[path]].append(work)
        return list(self.todo)

    def _time(self, number: int) -> None:
        step = f"time{number}"
        self._plan()
        done = self._compiler().done
        ready, late = [], []
        for workload in self.workloads:
            if not self._is_due(step, workload.name):
                continue
            collected = self._result("collect", workload.name)
            if collected is not None and not collected["keys"]:
                continue  # it has no autotuner, or cannot run here
            left = sum(len(rest.configs) for item in self.todo.get(workload.name, ()) if (rest := item.without(done)))
            (late if left else ready).append(workload.name)
        if late and self.options.uncompiled:
            ready += late
        elif late:
            print(f"{step}: {len(late)} workloads wait for candidates to be compiled", flush=True)
        extra = ["--lock", str(self.folder / "gpu.lock"), *(["--remeasure"] if self.options.remeasure else [])]
        extra += ["--warmup-ms", str(self.options.warmup_ms), "--rep-ms", str(self.options.rep_ms)]
        self._processes(step, ready, 1 + self.options.waiting, extra)

    def _processes(self, step: str, names: Iterable[str], jobs: int, extra: Sequence[str]) -> None:
        """Run workers, some at a time, until all are done or the budget is; each has its time, too."""
        waiting = list(names)
        total = len(waiting)
        running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
        count = 0
        while waiting or running:
            over = time.monotonic() > self.end - 10
            while waiting and len(running) < jobs and not over:
                name = waiting.pop(0)
                running[name] = (self._start(step, name, extra), time.monotonic())
            for name, (process, began) in list(running.items()):
                if process.poll() is None:
                    late = time.monotonic() - began > self.options.workload_timeout * (1 if step == "collect" else jobs)
                    if not (late or over):
                        continue
                    process.kill()
                    process.wait()
                    if not over:
                        self._fail(step, name, f"no end after {time.monotonic() - began:.0f} s")
                del running[name]
                count += 1
                self._say(step, name, count, total, over)
            if over:
                return
            time.sleep(0.05)

    def _start(self, step: str, name: str, extra: Sequence[str]) -> subprocess.Popen[bytes]:
        place = self.folder / step / _slug(name)
        found = self._result(step, name)
        if step != "collect" and found is not None and found.get("finished"):
            # It failed. What it timed before is sound, and other workloads rely on it: the new try goes on from it.
            tries = sum(1 for _ in place.parent.glob(f"{place.name}.try*"))
            place.rename(place.with_name(f"{place.name}.try{tries + 1}"))
        shutil.rmtree(place, ignore_errors=True)  # of a run that was ended
        place.mkdir(parents=True)
        command = [sys.executable, "-m", "bench.record_worker", "--name", name]
        command += ["--mode", "collect" if step == "collect" else "time", "--record", f"{place}/"]
        command += ["--result", str(place / "result.json"), *extra]
        command += ["--stand-in"] if self.options.stand_in else []
        command += ["--workloads", *self.options.workloads] if self.options.workloads else []
        with (place / "log").open("wb") as log:
            return subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)

    def _say(self, step: str, name: str, count: int, total: int, over: bool) -> None:
        result = self._result(step, name)
        if result is None and not over:
            log = (self.folder / step / _slug(name) / "log").read_text(encoding="utf-8", errors="replace").strip()
            self._fail(step, name, log.splitlines()[-1][:400] if log else "its process died")
            result = self._result(step, name)
        if result is None:
            return
        found = f"{len(result['kernels'])} kernels, {result['keys']} keys" if result["keys"] else "nothing"
        trouble = f"  {result['error']}" if result["error"] else ""
        after = f"{time.monotonic() - self.began:.0f} s"
        print(f"{step}: {count}/{total} {name}: {found}, {result['seconds']:.1f} s ({after}){trouble}", flush=True)

    # -- what there is --

    def _is_due(self, step: str, name: str) -> bool:
        """Whether a workload is to be run: it has no result, or one that is to be tried again, once in this run."""
        found = self._result(step, name)
        if found is None:
            return True
        failed = found["error"] is not None and REFUSED not in found["error"]
        if not (failed and self.options.retry_failed) or (step, name) in self._retried:
            return False
        self._retried.add((step, name))
        return True

    def _fail(self, step: str, name: str, reason: str) -> None:
        empty: dict[str, Any] = {"kernels": [], "keys": 0, "new_keys": [], "reused": [], "candidates_timed": 0}
        row = {"name": name, "error": reason, "finished": False, **empty, "winners": {}, "broken": "", "seconds": 0.0}
        results.write_whole(self.folder / step / _slug(name) / "result.json", json.dumps(row))

    def _result(self, step: str, name: str) -> dict[str, Any] | None:
        path = self.folder / step / _slug(name) / "result.json"
        if not path.exists():
            return None
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return found

    def _earlier_tries(self, step: str, name: str) -> list[dict[str, Any]]:
        paths = sorted((self.folder / step).glob(f"{_slug(name)}.try*/result.json"))
        return [json.loads(path.read_text(encoding="utf-8")) for path in paths]

    def _journals(self, step: str, name: str) -> tuple[str, ...]:
        try:
            return find_journals([self.folder / step / _slug(name)])
        except TuningError:
            return ()

    def summary(self) -> dict[str, Any]:
        """What was done, so far, in this folder."""
        rows = []
        kernels: dict[str, set[str]] = {}
        steps = ["collect", *(f"time{number}" for number in range(1, self.options.rounds + 1))]
        keys: dict[str, set[str]] = {}
        counts: Counter[str] = Counter()
        for workload in self.workloads:
            found = {step: self._result(step, workload.name) for step in steps}
            row: dict[str, Any] = {"name": workload.name}
            for step, result in found.items():
                if result is None:
                    row[step] = "not run"
                    continue
                refused = result["error"] is not None and REFUSED in result["error"]
                row[step] = f"refused: {result['error']}" if refused else result["error"] or "ok"
                counts[f"{step} refused"] += refused
                kernels.setdefault(step, set()).update(result["kernels"])
                for each in (result, *self._earlier_tries(step, workload.name)):
                    keys.setdefault(step, set()).update(each["new_keys"])
                    counts[f"{step} candidates"] += each["candidates_timed"]
                counts[f"{step} ok"] += result["error"] is None
            rows.append(row)
        compiling = self._compiler()
        circumstances = results.circumstances(PACKAGES)
        return {
            "case": "record",
            **circumstances,
            "stand_in": self.options.stand_in,
            "remeasure": self.options.remeasure,
            "workloads": rows,
            "kernels": {step: sorted(names) for step, names in kernels.items()},
            "counts": {**counts, **{f"{step} keys": len(found) for step, found in keys.items()}},
            "compiled": len(compiling.done) - len(compiling.failed),
            "cannot_be_compiled": sorted(compiling.failed.values()),
            "not_compiled_ahead": self.refused,
            "seconds": {step: round(value, 1) for step, value in self.seconds.items()},
            "seconds_in_all": round(time.monotonic() - self.began, 1),
            "problems": [],
        }

    def _show(self, summary: dict[str, Any]) -> None:
        print()
        for row in summary["workloads"]:
            for step, state in row.items():
                if step != "name" and state not in ("ok", "not run"):
                    print(f"{row['name']} {step}: {state}")
        counts = summary["counts"]
        print(f"{'':9} {'workloads':>9} {'kernels':>8} {'keys':>6} {'candidates':>11} {'seconds':>8}")
        for step, names in summary["kernels"].items():
            seconds = summary["seconds"].get(re.sub(r"(\d)", r" \1", step), 0.0)
            print(
                f"{step:9} {counts[f'{step} ok']:>9} {len(names):>8} {counts[f'{step} keys']:>6} "
                f"{counts[f'{step} candidates']:>11} {seconds:>8.1f}"
            )
        failed = len(summary["cannot_be_compiled"])
        seconds = summary["seconds"].get("compile", 0.0)
        print(f"{'compile':9} {'':9} {'':8} {'':6} {summary['compiled']:>11} {seconds:>8.1f}")
        print(
            f"{failed} candidates cannot be compiled; {len(summary['workloads'])} workloads; "
            f"{summary['seconds_in_all']:.0f} s in all",
            flush=True,
        )


class _Clock:
    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self._seconds, self._name = seconds, name

    def __enter__(self) -> None:
        self._began = time.monotonic()

    def __exit__(self, *error: object) -> None:
        self._seconds[self._name] = time.monotonic() - self._began


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name)
