"""Run the compiling processes: one thread of ours for each, which hands it a task at a time.

Processes are started afresh, not forked: this one may hold threads, or a CUDA context. They get tasks as JSON rather
than pickled, as all that this library reads. A process that dies takes one task with it; another follows it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from ._warmup_tasks import Failure, Task, Warmed
from .errors import TuningError
from .spec import Json

__all__ = ["Outcome", "Processes"]

Outcome = Warmed | Failure | None
"""What became of a task; None where another one compiles the same."""


class _Died(Exception):
    pass


class Processes:
    """Compiles tasks in several processes.

    Args:
        settings: what each process is told first.
        jobs: number of processes.
        done: called, by one thread at a time, as each task is done.
    """

    def __init__(self, settings: Json, jobs: int, done: Callable[[Task, Outcome], None]) -> None:
        self.outcomes: list[tuple[Task, Outcome]] = []
        self.start_up_s = 0.0
        self._settings = settings
        self._jobs = jobs
        self._done = done
        self._lock = threading.Lock()
        self._digests: set[str] = set()
        self._refusal: str | None = None
        self._error: BaseException | None = None
        self._running: set[subprocess.Popen[str]] = set()
        self._stopped = False
        self._started = 0

    def run(self, tasks: Sequence[Task]) -> None:
        """Compile all tasks.

        Raises:
            TuningError: a process cannot compile for this target at all.
        """
        queue = deque(tasks)
        threads = [threading.Thread(target=self._serve, args=(queue,)) for _ in range(min(self._jobs, len(tasks)))]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            # Interrupted: the threads end as their processes do.
            with self._lock:
                self._stopped = True
                for process in self._running:
                    process.kill()
        if self._refusal is not None:
            raise TuningError(self._refusal)
        if self._error is not None:
            raise self._error

    def _serve(self, queue: deque[Task]) -> None:
        try:
            while queue and self._refusal is None and not self._stopped:
                self._one_process(queue)
        except BaseException as error:
            self._error = error

    def _one_process(self, queue: deque[Task]) -> None:
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
            started = time.time()
            process = self._start(log)
            if process is None:
                return
            task: Task | None = None
            try:
                with self._lock:
                    self._started += 1
                    first = self._started == 1
                _say(process, {**self._settings, "started": started, "first": first})
                while self._refusal is None and not self._stopped:
                    try:
                        task = queue.popleft()
                    except IndexError:
                        break
                    outcome = self._one_task(process, task)
                    if self._refusal is None:
                        self._keep(task, outcome)
            except (_Died, BrokenPipeError):
                process.wait()
                if task is not None and not self._stopped:
                    reason = f"the process that compiled it ended {_ending(process.returncode)}: {_last_line(log)}"
                    self._keep(task, Failure(task.kernel.qualified_name, str(task.key), reason))
            finally:
                self._end(process)

    def _start(self, log: IO[str]) -> subprocess.Popen[str] | None:
        library = str(Path(__file__).parents[1])
        command = [sys.executable, "-m", f"{__package__}._warmup_worker"]
        # The path of this process: what it can import, the compiling one can. TRITON_INTERPRET would compile nothing.
        path = os.pathsep.join(dict.fromkeys([library, *(os.path.abspath(item) for item in sys.path)]))
        environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0"}
        with self._lock:
            if self._stopped:
                return None
            process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
            )
            self._running.add(process)
        return process

    def _one_task(self, process: subprocess.Popen[str], task: Task) -> Outcome:
        _say(process, task.to_json())
        while True:
            answer = _hear(process)
            if "ready" in answer:
                with self._lock:
                    self.start_up_s = max(self.start_up_s, float(answer["ready"]))
            elif "digest" in answer:
                with self._lock:
                    new = answer["digest"] not in self._digests
                    self._digests.add(answer["digest"])
                _say(process, new)
                if not new:
                    return None
            elif "warmed" in answer:
                return Warmed(**{**answer["warmed"], "notes": tuple(answer["warmed"]["notes"])})
            elif "failed" in answer:
                return Failure(**answer["failed"])
            else:
                self._refusal = str(answer["refused"])
                return None

    def _keep(self, task: Task, outcome: Outcome) -> None:
        with self._lock:
            self.outcomes.append((task, outcome))
            self._done(task, outcome)

    def _end(self, process: subprocess.Popen[str]) -> None:
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                with contextlib.suppress(BrokenPipeError):
                    stream.close()
        process.wait()
        with self._lock:
            self._running.discard(process)


def _say(process: subprocess.Popen[str], value: Json) -> None:
    assert process.stdin is not None
    process.stdin.write(json.dumps(value) + "\n")
    process.stdin.flush()


def _hear(process: subprocess.Popen[str]) -> dict[str, Any]:
    assert process.stdout is not None
    line = process.stdout.readline()
    if not line.endswith("\n"):
        raise _Died
    answer: dict[str, Any] = json.loads(line)
    return answer


def _ending(code: int) -> str:
    if code >= 0:
        return f"with exit code {code}"
    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:
        return f"by signal {-code}"


def _last_line(log: IO[str]) -> str:
    log.seek(0, os.SEEK_END)
    log.seek(max(0, log.tell() - 4096))
    lines = [line.strip() for line in log.read().splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it said nothing"
