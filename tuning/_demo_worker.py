"""One process of the demo: ``python -m tuning._demo_worker REQUEST``, started by :mod:`tuning.demo`.

The request is a JSON object (:class:`Request`). What happens is told as JSON lines on standard output, one object a
line with a member ``event``: ``choices`` while it runs, ``result`` once at the end. Everything else, the output of
other packages included, goes to standard error.
"""

from __future__ import annotations

import contextlib
import datetime
import hashlib
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal, TextIO

from . import _demo_workloads, interpreter
from .errors import DisagreementError
from .policy import AutotunePolicy
from .spec import Json

__all__ = ["Request", "Task", "main"]

Task = Literal["list", "compile", "record", "pinned"]
"""``list``: import the kernels and list their autotuners. ``compile``: fill Triton's compile cache, on a GPU.
``record`` and ``pinned``: run the workload under a policy of that mode."""


@dataclass(frozen=True)
class Request:
    """What a worker is asked to do.

    Attributes:
        task: see :data:`Task`.
        package: which workload.
        device: ``cuda``, or ``cpu`` for Triton's interpreter.
        size: how large to run it.
        rank, ranks: of the process and how many there are.
        steps: how often the workload runs; its digest is taken each time.
        fields: of the policy.
        store: path of the file through which the ranks find each other; None: each runs alone.
        timeout_s: how long ranks wait for each other, in seconds.
        turn: path of a file that workers lock while they run the workload, where they must not do so at once.
        picks: for ``compile``, which candidates: those that ranks of these numbers get under chaos.
    """

    task: Task
    package: str
    device: str
    size: _demo_workloads.Size = "interpreter"
    rank: int = 0
    ranks: int = 1
    steps: int = 1
    fields: dict[str, Any] | None = None
    store: str | None = None
    timeout_s: float = 300.0
    turn: str | None = None
    picks: tuple[int, ...] = ()

    def to_json(self) -> str:
        """As one line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Request:
        """Inverse of :meth:`to_json`."""
        members = json.loads(text)
        return cls(**{**members, "picks": tuple(members.get("picks", ()))})


class _Events:
    """Writes events to what was standard output, from any thread."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lock = threading.Lock()

    def send(self, event: str, **members: Json) -> None:
        with self._lock:
            self._stream.write(json.dumps({"event": event, **members}) + "\n")
            self._stream.flush()


def _take_stdout() -> _Events:
    """Keep standard output for events: what packages print goes to standard error from here on."""
    events = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return _Events(events)


def _digest(tensors: dict[str, Any]) -> str:
    """SHA-256 over names, dtypes, shapes and bytes."""
    import torch

    total = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().contiguous().cpu()
        total.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode())
        total.update(tensor.view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


class _Watch:
    """Tells how many choices were made, as their number grows."""

    def __init__(self, events: _Events, count: Callable[[], int]) -> None:
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, args=(events, count), daemon=True)

    def _run(self, events: _Events, count: Callable[[], int]) -> None:
        last = 0
        while not self._stop.wait(0.25):
            now = count()
            if now != last:
                events.send("choices", count=now)
                last = now

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join()


def _prepare(device: str) -> None:
    if device == "cpu":
        interpreter.use_interpreter()
        interpreter.stand_in_for_cuda()
    else:
        import torch

        torch.cuda.set_device(0)


def _list(request: Request, workload: _demo_workloads.Workload) -> Json:
    from .inventory import take_inventory

    workload.step(request.device, "interpreter")
    found = take_inventory(list(workload.modules))
    widest = max((len(info.candidates) for info in found.autotuners), default=0)
    return {"inventory": found.to_json(), "widest": widest, **_circumstances(request, workload)}


def _circumstances(request: Request, workload: _demo_workloads.Workload) -> dict[str, Json]:
    import importlib.metadata

    import torch
    import triton

    package = workload.package.partition(".")[0]
    providers = sorted(set(importlib.metadata.packages_distributions().get(package, [])))
    versions = {"triton": str(triton.__version__), "torch": str(torch.__version__)}
    versions |= {name: importlib.metadata.version(name) for name in providers}
    if request.device == "cpu":
        return {"versions": versions, "device": "", "memory": 0}
    properties = torch.cuda.get_device_properties(0)
    return {"versions": versions, "device": properties.name, "memory": properties.total_memory}


def _compile(request: Request, workload: _demo_workloads.Workload) -> Json:
    """Launch each kernel with some of its candidates, to fill Triton's compile cache; other processes take the rest.

    Compiling is nearly all of what a recording costs, and Triton compiles one candidate after the other. ``chaos``
    gives each rank another candidate of every kernel.
    """
    from . import installation

    step = workload.step(request.device, "compile")
    _be_deterministic()
    for pick in request.picks:
        os.environ["RANK"] = str(pick)
        with installation.install(AutotunePolicy(mode="pinned", modules=workload.modules, chaos=True)):
            step()
    return {}


def _be_deterministic() -> None:
    import torch

    # After the kernels were imported: mamba_ssm cuts its candidates to one where it sees this flag at import.
    torch.use_deterministic_algorithms(True)


def _run(request: Request, workload: _demo_workloads.Workload, events: _Events) -> Json:
    from . import installation

    installed = installation.install(AutotunePolicy(modules=workload.modules, **(request.fields or {})))
    step = workload.step(request.device, request.size)
    _be_deterministic()
    if request.store is not None:
        _join(request)
    digests: list[str] = []
    verdicts: list[bool | None] = []
    problem: DisagreementError | None = None
    with installed, _Watch(events, lambda: len(installed.choices)), _turn(request.turn):
        for number in range(1, request.steps + 1):
            digests.append(_digest(step()))
            try:
                verdicts.append(installation.maybe_verify_choices(number))
            except DisagreementError as error:
                problem = error
                verdicts.append(False)
                break
        choices = [choice.to_json() for choice in installed.choices]
        benchmarks = installed.benchmarks
    return {
        "digests": digests,
        "verdicts": verdicts,
        "disagreements": list(problem.disagreements) if problem else [],
        "problem": problem.message if problem else None,
        "choices": choices,
        "benchmarks": benchmarks,
        "journal": installed.journal_path,
    }


@contextlib.contextmanager
def _turn(path: str | None) -> Iterator[None]:
    """Hold the lock of a file; the system lets go of it if this process dies."""
    if path is None:
        yield
        return
    import fcntl  # not on every system, and this module is imported with the command line

    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _join(request: Request) -> None:
    import torch.distributed

    dist: Any = torch.distributed
    assert request.store is not None
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(request.store, request.ranks),
        rank=request.rank,
        world_size=request.ranks,
        timeout=datetime.timedelta(seconds=request.timeout_s),
    )


def _leave() -> None:
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def main() -> int:
    """Entry point."""
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    events = _take_stdout()
    request = Request.from_json(sys.argv[1])
    workload = {each.package: each for each in _demo_workloads.WORKLOADS}[request.package]
    _prepare(request.device)
    try:
        if request.task == "list":
            result = _list(request, workload)
        elif request.task == "compile":
            result = _compile(request, workload)
        else:
            result = _run(request, workload, events)
    finally:
        _leave()
    events.send("result", value=result)
    return 0


if __name__ == "__main__":
    sys.exit(main())
