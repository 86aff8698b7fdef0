"""Compile ahead what a run with tables will launch, in parallel, without a GPU if need be: a run that starts at once.

A table holds configs and keys; the compiler needs types, alignments and constants too, which journals keep for each
launch. For each launch recorded, a config is chosen exactly as the run will choose it, and only that one is compiled,
into Triton's compile cache (``TRITON_CACHE_DIR``). The entry is the one that the run looks up where these are the same:
Triton, the kernels' package, the arch, and the environment variables that Triton makes part of its keys.

A config that lacks resources (a compile says so, or it needs more shared memory than the arch has) gives way to the
next in the order of the decision, as in a launch. Every other error of a compile is reported, and the others go on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ._launch_target import vendor
from ._warmup_processes import Processes
from ._warmup_tasks import Failure, Task, Warmed, read_recorded
from .errors import JournalError, TuningError
from .journal import find_journals
from .policy import AutotunePolicy
from .spec import Json
from .tables import load_tables

__all__ = ["Failure", "Progress", "Report", "Warmed", "warm_up"]

Progress = Callable[[int, int, str], None]
"""Told of each launch that is dealt with: how many are, of how many, and the last one's kernel."""

_JSON_VERSION = 1


@dataclass(frozen=True)
class Report:
    """What a warmup did.

    Attributes:
        arch: what was compiled for.
        recorded_on: the archs of the journals.
        launches: number of recorded launches, each counted once, that could be compiled for.
        warmed: what is in the cache now, by kernel and key.
        same: number of launches that lead to an entry which another of them leads to too.
        failures: keys that nothing was compiled for.
        jobs: number of processes.
        seconds: all of it.
        start_up_s: from the start of a process until it had chosen for its first launch: loading torch, Triton and
            the kernel; of the slowest process.
        longest_s: the longest compile.
    """

    arch: str
    recorded_on: tuple[str, ...]
    launches: int
    warmed: tuple[Warmed, ...]
    same: int
    failures: tuple[Failure, ...]
    jobs: int
    seconds: float
    start_up_s: float
    longest_s: float

    def to_json(self) -> Json:
        """JSON form."""
        return {
            "version": _JSON_VERSION,
            "arch": self.arch,
            "recorded_on": list(self.recorded_on),
            "launches": self.launches,
            "warmed": [item.to_json() for item in self.warmed],
            "same": self.same,
            "failures": [item.to_json() for item in self.failures],
            "jobs": self.jobs,
            "seconds": self.seconds,
            "start_up_s": self.start_up_s,
            "longest_s": self.longest_s,
        }


def warm_up(
    journals: Iterable[str | os.PathLike[str]],
    *,
    arch: str | None = None,
    policy: AutotunePolicy | None = None,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> Report:
    """Compile what a run under ``policy`` will launch for the launches that journals recorded.

    Args:
        journals: files, folders, globs or prefixes, as :func:`tuning.journal.find_journals` takes them. Journals of
            another GPU of the same vendor serve as well: what the compiler sees of a launch does not depend on it.
        arch: what to compile for; None: what the journals were recorded on.
        policy: the run's; its tables, ``on_miss`` and ``block_sizes`` are what counts. None: the default.
        jobs: number of processes; None: one for each CPU that this process may use.
        progress: called after each launch, from threads, one at a time.

    Raises:
        JournalError: a journal cannot be read, or none has a record for this vendor's GPUs.
        TableError: a table is malformed.
        TuningError: ``arch`` is no GPU, ``jobs`` is no positive number, or the compiling processes cannot start.
        UnsupportedTritonError: Triton is missing or outside the supported range.
    """
    started = time.perf_counter()
    if jobs is not None and (type(jobs) is not int or jobs < 1):
        raise TuningError(f"jobs: expected a positive number, found {jobs!r}")
    policy = policy if policy is not None else AutotunePolicy()
    paths = find_journals(journals)
    recorded = read_recorded(paths)
    archs = tuple(sorted({environment.arch for environment in recorded.environments}))
    arch = arch if arch is not None else _only(archs)
    kind = vendor(arch)
    load_tables(arch, policy.table_path)  # what is wrong with tables is said once, and at once
    if not recorded.tasks and not recorded.failures:
        raise JournalError(f"{', '.join(paths)}: expected recorded keys, found none", file=paths[0])
    if not any(_vendor_of(found) == kind for found in archs):
        raise JournalError(
            f"{', '.join(paths)}: expected records of a {kind} GPU, found those of {', '.join(archs)}; give journals "
            f"that were recorded on one, or another arch than {arch}",
            file=paths[0],
        )
    tasks, invariant = _by_treatment(recorded.tasks, policy)
    jobs = min(jobs if jobs is not None else _cpus(), max(len(tasks), 1))
    count = 0

    def done(task: Task, outcome: Warmed | Failure | None) -> None:
        nonlocal count
        count += 1
        if progress is not None:
            progress(count, len(tasks), task.kernel.qualified_name)

    multiprocessors = {item.multiprocessors for item in recorded.environments if item.arch == arch}
    settings = {
        "arch": arch,
        "table_path": list(policy.table_path),
        "on_miss": policy.on_miss,
        "block_sizes": [list(pair) for pair in policy.block_sizes],
        "multiprocessors": max(multiprocessors, default=0),
    }
    processes = Processes(settings, jobs, done)
    if tasks:
        processes.run(tasks)
    outcomes = [outcome for _, outcome in processes.outcomes]
    warmed = sorted((item for item in outcomes if isinstance(item, Warmed)), key=lambda item: (item.kernel, item.key))
    failed = sorted((item for item in outcomes if isinstance(item, Failure)), key=lambda item: (item.kernel, item.key))
    return Report(
        arch=arch,
        recorded_on=archs,
        launches=len(tasks),
        warmed=tuple(warmed),
        same=sum(outcome is None for outcome in outcomes),
        failures=(*recorded.failures, *invariant, *failed),
        jobs=jobs,
        seconds=time.perf_counter() - started,
        start_up_s=processes.start_up_s,
        longest_s=max((item.seconds for item in warmed), default=0.0),
    )


def _only(archs: tuple[str, ...]) -> str:
    if len(archs) == 1:
        return archs[0]
    raise TuningError(
        f"arch: the journals were recorded on {', '.join(archs) or 'no GPU that is known'}: "
        "say which arch to compile for"
    )


def _vendor_of(arch: str) -> str | None:
    try:
        return vendor(arch)
    except TuningError:
        return None


def _by_treatment(tasks: tuple[Task, ...], policy: AutotunePolicy) -> tuple[list[Task], list[Failure]]:
    """Config-invariant kernels are timed in the run, all their candidates: there is no choice to compile."""
    kept, left = [], []
    for task in tasks:
        if policy.is_config_invariant(task.kernel.qualified_name):
            reason = "config-invariant: the run times all candidates; to pin it, take it out of config_invariant"
            left.append(Failure(task.kernel.qualified_name, str(task.key), reason))
        else:
            kept.append(task)
    return kept, left


def _cpus() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
