"""Compile every candidate of every launch that was collected, on all cores, into Triton's compile cache.

The cache is the state: what is in it is found again in no time. ``compiled.jsonl`` remembers what is done, and which
candidates cannot be compiled, so that a resumed recording does not even start a process for them. What may pass, a
candidate out of time or a process that died, is given up for this run and not remembered.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tuning._launch_specialization import identity
from tuning._warmup_tasks import Task, read_recorded

__all__ = ["Compiling", "Work", "work_name", "works"]

BATCH = 6
"""Candidates handed to a process at once: few, so that the last ones to finish do not keep all others waiting."""


@dataclass(frozen=True)
class Work:
    """Some candidates of one launch.

    Attributes:
        task: the launch.
        configs: texts of the candidates.
        name: identifies launch and kernel, the same in each run.
    """

    task: Task
    configs: tuple[str, ...]
    name: str

    def without(self, done: set[str]) -> Work | None:
        """What is left of it; None if nothing is."""
        left = tuple(config for config in self.configs if f"{self.name} {config}" not in done)
        return Work(self.task, left, self.name) if left else None


def work_name(task: Task) -> str:
    """What identifies a launch to the compiler, in each run the same: its kernel and what is seen of its arguments."""
    text = f"{task.kernel.qualified_name} {identity({**task.specialization, 'heuristics': None})}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def works(journals: Sequence[str]) -> tuple[list[tuple[str, Work]], list[str]]:
    """What there is to compile, each with its journal, and a line for each launch that cannot be compiled ahead.

    Args:
        journals: files, in the order in which their launches are to be compiled; what one has, later ones do not get.
    """
    found: list[tuple[str, Work]] = []
    refused: list[str] = []
    seen: set[str] = set()
    for path in journals:
        recorded = read_recorded([path])
        refused += [str(failure) for failure in recorded.failures]
        for task in recorded.tasks:
            name = work_name(task)
            # Pruning may leave other candidates for another key that the compiler sees alike.
            fresh = tuple(config for config in task.candidates if f"{name} {config}" not in seen)
            seen.update(f"{name} {config}" for config in fresh)
            found += [(path, Work(task, fresh[at : at + BATCH], name)) for at in range(0, len(fresh), BATCH)]
    return found, sorted(set(refused))


@dataclass
class Compiling:
    """Compiles in several processes, until all is done or the time is over.

    Attributes:
        folder: of the recording; ``compiled.jsonl`` is kept there.
        environment: of the processes.
        jobs: number of processes.
        timeout: seconds after which one candidate is given up, from when its kernel's package is imported.
        settings: what each process is told: arch and multiprocessors.
        command: of a process that compiles.
        done: candidates that are compiled or known to fail: name and config.
        failed: why, by name and config.
    """

    folder: Path
    environment: dict[str, str]
    jobs: int
    timeout: float
    settings: dict[str, Any]
    command: Sequence[str] = (sys.executable, "-m", "bench.record_compiler")
    done: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    compiled: int = 0
    start_timeout: float = 300.0
    """Seconds for a process to be ready, and for a kernel's package to be imported, which all processes do at once."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._path = self.folder / "compiled.jsonl"
        self._running: set[subprocess.Popen[str]] = set()
        self._unready = 0
        if self._path.exists():
            for line in self._path.read_text(encoding="utf-8").splitlines():
                with contextlib.suppress(json.JSONDecodeError):
                    self._count(json.loads(line))

    def _count(self, row: dict[str, Any]) -> None:
        at = f"{row['name']} {row['config']}"
        self.done.add(at)
        if "error" in row:
            self.failed[at] = f"{row['kernel']} {row['config']}: {row['error']}"

    def run(self, todo: Sequence[Work], deadline: float, progress: Callable[[int, int], None]) -> None:
        """Compile what is not done yet, in order, until ``deadline`` (of :func:`time.monotonic`)."""
        left = deque(work for work in (item.without(self.done) for item in todo) if work is not None)
        total = sum(len(work.configs) for work in left)
        threads = [
            threading.Thread(target=self._serve, args=(left, deadline), daemon=True)
            for _ in range(min(self.jobs, len(left)))
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            if time.monotonic() > deadline:
                with self._lock:
                    left.clear()
                    for process in list(self._running):
                        process.kill()
                break
            progress(self.compiled, total)
            time.sleep(0.5)
        for thread in threads:
            thread.join(timeout=10)
        progress(self.compiled, total)

    def _serve(self, left: deque[Work], deadline: float) -> None:
        while time.monotonic() < deadline:
            process, answers = self._start()
            try:
                if not self._is_ready(answers, deadline):
                    process.kill()
                    with self._lock:
                        self._unready += 1
                        if self._unready > 2 * self.jobs:
                            return  # it is not this process, then
                    continue
                while True:
                    try:
                        work = left.popleft()
                    except IndexError:
                        return
                    rest = self._compile(process, answers, work, deadline)
                    if rest is not None:  # the process is lost
                        if rest.configs:
                            left.appendleft(rest)
                        break
            except (BrokenPipeError, OSError):
                continue
            finally:
                self._end(process)

    def _start(self) -> tuple[subprocess.Popen[str], queue.Queue[str]]:
        log = open(self.folder / "compilers.log", "a", encoding="utf-8")  # noqa: SIM115 - the process keeps it
        with log:
            process = subprocess.Popen(
                list(self.command),
                env=self.environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        with self._lock:
            self._running.add(process)
        answers: queue.Queue[str] = queue.Queue()

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                answers.put(line)
            answers.put("")

        threading.Thread(target=read, daemon=True).start()
        self._say(process, self.settings)
        return process, answers

    def _is_ready(self, answers: queue.Queue[str], deadline: float) -> bool:
        """Wait until a process has imported what it needs; False where it died or takes too long."""
        try:
            line = answers.get(timeout=max(0.0, min(self.start_timeout, deadline - time.monotonic())))
        except queue.Empty:
            return False
        return bool(line) and "ready" in json.loads(line)

    @staticmethod
    def _say(process: subprocess.Popen[str], value: Any) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(value) + "\n")
        process.stdin.flush()

    def _compile(
        self, process: subprocess.Popen[str], answers: queue.Queue[str], work: Work, deadline: float
    ) -> Work | None:
        """Have some candidates compiled. Returns what is left where the process is lost, else None."""
        self._say(process, {"task": work.task.to_json(), "configs": list(work.configs)})
        waiting = list(work.configs)
        limit = self.start_timeout
        while waiting:
            try:
                line = answers.get(timeout=limit)
            except queue.Empty:
                line = None
            if time.monotonic() > deadline:
                return Work(work.task, (), work.name)
            if line:
                row = json.loads(line)
                limit = self.timeout
                if "loaded" in row:
                    continue
                waiting.remove(row["config"])
                self._keep(work, row)
                continue
            process.kill()
            reason = f"no answer in {limit:.0f} s" if line is None else "its process died"
            self._keep(work, {"config": waiting[0], "error": reason, "seconds": limit, "passing": True})
            return Work(work.task, tuple(waiting[1:]), work.name)
        return None

    def _keep(self, work: Work, row: dict[str, Any]) -> None:
        row = {"name": work.name, "kernel": work.task.kernel.qualified_name, **row}
        with self._lock:
            self.compiled += 1
            self._count(row)
            if row.get("passing"):
                return
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def _end(self, process: subprocess.Popen[str]) -> None:
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with self._lock:
            self._running.discard(process)


def environment_of(cache: Path, root: Path) -> dict[str, str]:
    """What the processes of a recording run in: one compile cache for all, and what this process can import."""
    path = os.pathsep.join(dict.fromkeys([str(root), *(os.path.abspath(item) for item in sys.path)]))
    return {**os.environ, "TRITON_CACHE_DIR": str(cache), "PYTHONPATH": path, "TRITON_INTERPRET": "0"}
