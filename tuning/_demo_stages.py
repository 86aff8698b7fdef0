"""The demo's stages, each of which fills in its part of the result."""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import _demo_workloads
from ._console import Console
from ._demo_processes import Job, run_workers
from ._demo_worker import Request, Task
from .errors import TuningError
from .spec import Json, Key, LaunchConfig

__all__ = ["Demo", "Stages"]

_RANKS = 2
_STEPS = 2
_TIMEOUT_S = 600.0
_MEETING_S = 120.0

# In bytes. The SSD step holds some 4 GB at its full size and a quarter of that at the smaller one, and two processes
# share a GPU. One with less memory than the first gets the smaller size; each compiling process is given the second.
_FULL_BYTES = 24 << 30
_COMPILE_BYTES = 3 << 30


@dataclass
class Demo:
    """What a demo found.

    Attributes:
        folder: where everything was left.
        package: whose kernels ran.
        title: what ran, in words.
        device: the GPU's name; ``interpreter`` without one.
        versions: of triton, torch and the package.
        stages: what each stage found, by name, its duration ``seconds`` included.
        keys: what was chosen for each kernel and key, and why.
        files: what was left, as paths relative to the folder, by what it is.
        problems: what went otherwise than it should; empty is success.
    """

    folder: str
    package: str
    title: str
    device: str
    versions: dict[str, str]
    stages: dict[str, dict[str, Json]] = field(default_factory=dict)
    keys: list[dict[str, Json]] = field(default_factory=list)
    files: dict[str, Json] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def to_json(self) -> Json:
        """JSON form."""
        return {"version": 1, "ok": not self.problems, **vars(self)}


class Stages:
    """Runs the stages one after the other.

    Args:
        folder: where everything goes.
        environment: of the workers.
        interpreted: whether to run in Triton's interpreter; else on a GPU.
        progress: says what is going on.
    """

    def __init__(self, folder: Path, environment: Mapping[str, str], interpreted: bool, progress: Console) -> None:
        self._folder = folder
        self._environment = environment
        self._interpreted = interpreted
        self._progress = progress
        self._workload: _demo_workloads.Workload = _demo_workloads.WORKLOADS[0]
        self._facts: dict[str, Any] = {}
        self._size: _demo_workloads.Size = "interpreter"
        self._merged: Any = None

    # -- running workers --

    def _request(self, task: Task, **members: Any) -> Request:
        device = "cpu" if self._interpreted else "cuda"
        return Request(task, self._workload.package, device, size=self._size, timeout_s=_MEETING_S, **members)

    def _run(self, stage: str, requests: Mapping[str, Request]) -> list[dict[str, Any]]:
        started = time.monotonic()
        jobs = [Job(name, request, self._environment) for name, request in requests.items()]

        def watch(jobs: Sequence[Job]) -> None:
            counts = ", ".join(f"{job.name}: {job.choices} keys" for job in jobs if job.choices)
            self._progress.transient(f"{stage}  {time.monotonic() - started:.0f} s  {counts}")

        try:
            return run_workers(jobs, self._folder / "logs", timeout_s=_TIMEOUT_S, watch=watch)
        finally:
            self._progress.transient("")

    def _say(self, text: str) -> None:
        self._progress.line(text)

    def _path(self, *parts: str) -> str:
        return str(self._folder.joinpath(*parts))

    # -- stages --

    def begin(self, workloads: Sequence[_demo_workloads.Workload]) -> Demo:
        """List the autotuners of the first package whose kernels import."""
        self._say(f"demo: everything goes to {self._folder}")
        failures: list[str] = []
        for workload in workloads:
            self._workload = workload
            started = time.monotonic()
            self._say(f"list: importing {workload.package} and listing its autotuners")
            try:
                (facts,) = self._run("list", {f"list-{workload.package}": self._request("list")})
            except TuningError as error:
                failures.append(error.message)
                self._say(error.message)
                continue
            self._facts = facts
            if not self._interpreted:
                self._size = "full" if facts["memory"] >= _FULL_BYTES else "compile"
            inventory = facts["inventory"]
            device = "interpreter" if self._interpreted else str(facts["device"])
            demo = Demo(str(self._folder), workload.package, workload.title, device, facts["versions"])
            demo.stages["list"] = {
                "seconds": time.monotonic() - started,
                "modules": list(workload.modules),
                "autotuners": len(inventory["autotuners"]),
                "candidates": inventory["candidates"],
            }
            with open(self._path("autotuners.json"), "w", encoding="utf-8") as file:
                json.dump(inventory, file, indent=1)
            return demo
        raise TuningError(
            f"demo: no installed package's kernels can be imported ({'; '.join(failures)}); "
            f"{_demo_workloads.how_to_install()}"
        )

    def compile(self, demo: Demo) -> None:
        """On a GPU, compile all candidates on all cores, so that recording only has to time them."""
        if self._interpreted:
            return
        widest, memory = int(self._facts["widest"]), int(self._facts["memory"])
        count = max(1, min(widest, os.cpu_count() or 1, memory // _COMPILE_BYTES))
        self._say(f"compile: {count} processes compile the candidates")
        started = time.monotonic()
        picks = [tuple(range(first, widest, count)) for first in range(count)]
        self._run(
            "compile", {f"compile-{number}": self._request("compile", picks=each) for number, each in enumerate(picks)}
        )
        demo.stages["compile"] = {"seconds": time.monotonic() - started, "processes": count}

    def record(self, demo: Demo) -> None:
        """Two processes time every candidate of every key that they reach."""
        fields = {"mode": "record", "record_path": self._path("journals", "demo")}
        # Two at once on one GPU would time each other.
        turn = None if self._interpreted else os.path.join(self._environment["TRITON_CACHE_DIR"], "turn")
        self._say(f"record: {_RANKS} processes time every candidate")
        started = time.monotonic()
        results = self._run(
            "record",
            {
                f"record-{rank}": self._request("record", rank=rank, ranks=_RANKS, fields=fields, turn=turn)
                for rank in range(_RANKS)
            },
        )
        demo.stages["record"] = {
            "seconds": time.monotonic() - started,
            "processes": _RANKS,
            "candidates_timed": [result["benchmarks"] for result in results],
            "digests": [result["digests"][0] for result in results],
        }

    def merge(self, demo: Demo) -> None:
        """Journals become a table."""
        from .journal import find_journals, read_journal
        from .merge import merge
        from .tables import write_table

        started = time.monotonic()
        self._merged = merge(map(read_journal, find_journals([self._path("journals")])))
        paths = [str(write_table(self._path("tables"), table)) for table in self._merged.tables]
        summary = self._merged.summary()
        demo.stages["merge"] = {"seconds": time.monotonic() - started, **summary, "tables": paths}
        demo.keys = [_key_json(facts) for facts in self._merged.keys]
        if summary["keys_without_choice"]:
            demo.problems.append(f"merge: {summary['keys_without_choice']} keys have no candidate that can be chosen")
        self._say(f"merge: {summary['keys']} keys, on {summary['disagreeing_keys']} of which the processes disagreed")

    def pinned(self, demo: Demo) -> None:
        """Two processes run from the table and verify each other after each step."""
        fields = {
            "mode": "pinned",
            "table_path": [self._path("tables")],
            "on_miss": "error",
            "verify_every": 1,
            "verify_strict": True,
            "manifest_path": self._path("manifest.json"),
        }
        self._say(f"pinned: {_RANKS} processes run {_STEPS} steps from the table and verify each other")
        started = time.monotonic()
        results = self._together("pinned", fields)
        digests = [result["digests"] for result in results]
        benchmarks = sum(result["benchmarks"] for result in results)
        verified = all(result["verdicts"] == [True] * _STEPS for result in results)
        demo.stages["pinned"] = {
            "seconds": time.monotonic() - started,
            "processes": _RANKS,
            "steps": _STEPS,
            "candidates_timed": benchmarks,
            "digests": digests,
            "verified": verified,
        }
        if benchmarks:
            demo.problems.append(f"pinned: {benchmarks} candidates were timed, expected none")
        if len({digest for each in digests for digest in each}) != 1:
            demo.problems.append("pinned: outputs and gradients differ between processes or steps")
        if not verified:
            found = next((result["problem"] for result in results if result["problem"]), "a check was not passed")
            demo.problems.append(f"pinned: {found}")
        self._add_choices(demo, results[0]["choices"])

    def chaos(self, demo: Demo) -> None:
        """Two processes choose differently on purpose; whoever compares them must say so, on each of them."""
        fields = {"mode": "pinned", "chaos": True, "verify_every": 1, "verify_strict": True}
        self._say(f"chaos: {_RANKS} processes pick different candidates on purpose and verify each other")
        started = time.monotonic()
        results = self._together("chaos", fields)
        caught = [result["problem"] is not None for result in results]
        demo.stages["chaos"] = {
            "seconds": time.monotonic() - started,
            "processes": _RANKS,
            "caught": caught,
            "digests": [result["digests"][0] for result in results],
            "disagreements": results[0]["disagreements"],
        }
        if not all(caught):
            missed = ", ".join(str(rank) for rank, each in enumerate(caught) if not each)
            demo.problems.append(f"chaos: the disagreement was not noticed on rank {missed}")

    def _together(self, stage: str, fields: Mapping[str, Any]) -> list[dict[str, Any]]:
        with tempfile.TemporaryDirectory(prefix="triton-tuning-demo-store-") as meeting:
            common = {
                "ranks": _RANKS,
                "steps": _STEPS,
                "fields": dict(fields),
                "store": os.path.join(meeting, "store"),
            }
            requests = {f"{stage}-{rank}": self._request("pinned", rank=rank, **common) for rank in range(_RANKS)}
            return self._run(stage, requests)

    def _add_choices(self, demo: Demo, choices: Sequence[Json]) -> None:
        by_key = {(row["kernel"], row["key_text"]): row for row in demo.keys}
        for choice in choices:
            row = by_key.get((choice["kernel"], Key.from_json(choice["key"]).text))
            if row is None:
                demo.problems.append(f"pinned: {choice['kernel']} was launched with a key that was not recorded")
                continue
            row["source"], row["origin"] = choice["source"], choice["origin"]
            config = LaunchConfig.from_json(choice["config"])
            if str(config) != row["config"]:
                demo.problems.append(f"pinned: {choice['kernel']} launched {config}, the table says {row['config']}")

    def describe_files(self, demo: Demo) -> None:
        """Say what was left."""
        patterns = {
            "autotuners": "autotuners.json",
            "journals": "journals/*",
            "tables": "tables/*/*.json",
            "manifests": "manifest*.json",
            "logs": "logs/*.log",
        }
        for name, pattern in patterns.items():
            found = sorted(str(path.relative_to(self._folder)) for path in self._folder.glob(pattern))
            if found:
                demo.files[name] = found
        demo.files["result"] = ["demo.json"]


def _key_json(facts: Any) -> dict[str, Json]:
    """One kernel and key: the merged choice and what speaks for it."""
    chosen, fastest = facts.chosen, facts.candidates[0] if facts.candidates else None
    return {
        "kernel": facts.kernel.qualified_name,
        "key": str(facts.key),
        "values": dict(facts.key.values),
        "key_text": facts.key.text,
        "config": None if facts.choice is None else str(facts.choice),
        "source": None,
        "origin": None,
        "time_ms": None if chosen is None else chosen.low_ms,
        "fastest_ms": None if fastest is None or not fastest.timed else fastest.low_ms,
        "candidates": len(facts.candidates),
        "tied": len(facts.near_ties),
        "confidence": facts.confidence,
        "winners": [[str(config), count] for config, count in facts.winners],
        "failed": len(facts.failures),
    }
