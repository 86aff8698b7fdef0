"""The demo's worker processes: started with a clean environment, watched, and never left behind."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ._demo_worker import Request
from .errors import TuningError
from .spec import Json

__all__ = ["Job", "clean_environment", "run_workers"]

# What would decide in the caller's shell how the workers tune, which rank they are, or where they find each other.
_DECIDES = re.compile(
    r"TRITON_(?:INTERPRET|CACHE_\w+|PRINT_AUTOTUNING|AUTOTUNE_\w+|ALWAYS_COMPILE|KERNEL_\w+)"
    r"|(?:MAMBA|CAUSAL_CONV1D|FLA|TORCHELASTIC|NCCL|GLOO|MASTER)_\w+"
    r"|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|ROLE_RANK|OMP_NUM_THREADS"
)


def clean_environment(environment: Mapping[str, str], *, cache: str, interpreted: bool) -> dict[str, str]:
    """The environment of a worker: the caller's, without what would decide how it tunes.

    Args:
        environment: the caller's.
        cache: folder for Triton's compile cache.
        interpreted: for Triton's interpreter; else for a GPU.
    """
    kept = {name: value for name, value in environment.items() if not _DECIDES.fullmatch(name)}
    package = str(Path(__file__).resolve().parents[1])
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [package, kept.get("PYTHONPATH", "")]))
    kept["TRITON_CACHE_DIR"] = cache
    kept["GLOO_SOCKET_IFNAME"] = "lo"  # the host's name may not resolve, and nothing leaves the host
    # Sums on the CPU, and cuBLAS's on a GPU, are then added in one order.
    kept["OMP_NUM_THREADS"] = "1"
    kept["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    if interpreted:
        kept["TRITON_INTERPRET"] = "1"
    return kept


@dataclass
class Job:
    """One worker.

    Attributes:
        name: for its log and for messages.
        request: what it is asked to do.
        environment: its environment, whole.
        choices: how many choices it has told of so far.
        result: what it answered.
    """

    name: str
    request: Request
    environment: Mapping[str, str]
    choices: int = 0
    result: dict[str, Any] | None = None
    _process: subprocess.Popen[str] | None = field(default=None, repr=False)
    _log: str = ""

    def start(self, logs: Path) -> threading.Thread:
        """Start the process and a thread that reads its events."""
        self._log = str(logs / f"{self.name}.log")
        environment = {
            **self.environment,
            "RANK": str(self.request.rank),
            "WORLD_SIZE": str(self.request.ranks),
        }
        with open(self._log, "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tuning._demo_worker", self.request.to_json()],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                encoding="utf-8",
                start_new_session=True,  # a group of its own, so that what it starts ends with it
            )
        reader = threading.Thread(target=self._read, daemon=True)
        reader.start()
        return reader

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        with self._process.stdout as events:
            for line in events:
                message: Json = json.loads(line)
                if message["event"] == "choices":
                    self.choices = message["count"]
                elif message["event"] == "result":
                    self.result = message["value"]

    @property
    def ended(self) -> int | None:
        """Exit status, or None while it runs."""
        return None if self._process is None else self._process.poll()

    def kill(self) -> None:
        """End it and everything that it started."""
        if self._process is not None and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def complaint(self) -> str:
        """The last line that it wrote, with the place of the rest."""
        try:
            lines = Path(self._log).read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            lines = []
        last = next((line.strip() for line in reversed(lines) if line.strip()), "it wrote nothing")
        return f"{last} (all of it: {self._log})"


def run_workers(
    jobs: Sequence[Job], logs: Path, *, timeout_s: float, watch: Callable[[Sequence[Job]], None] = lambda jobs: None
) -> list[dict[str, Any]]:
    """Run workers side by side and return their results, in order.

    Args:
        jobs: the workers.
        logs: folder for what they write.
        timeout_s: when to give up, in seconds.
        watch: called with the jobs from time to time while they run.

    Raises:
        TuningError: one failed, or did not end in time. The others are ended, as they are if anything else is raised.
    """
    readers: list[threading.Thread] = []
    try:
        readers.extend(job.start(logs) for job in jobs)
        deadline = time.monotonic() + timeout_s
        while any(job.ended is None for job in jobs):
            failed = next((job for job in jobs if job.ended not in (None, 0)), None)
            if failed is not None:
                break
            if time.monotonic() > deadline:
                late = next(job for job in jobs if job.ended is None)
                raise TuningError(f"demo: {late.name} did not end within {timeout_s:g} s: {late.complaint()}")
            watch(jobs)
            time.sleep(0.1)
    finally:
        for job in jobs:
            job.kill()
        for reader in readers:
            reader.join()
    results = []
    for job in jobs:
        if job.ended != 0 or job.result is None:
            culprit = next((each for each in jobs if (each.ended or 0) > 0), job)
            raise TuningError(f"demo: {culprit.name} failed: {culprit.complaint()}")
        results.append(job.result)
    return results
