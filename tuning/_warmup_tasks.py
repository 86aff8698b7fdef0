"""What there is to compile, read from journals, and what became of it. Plain data that travels as JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import NamedTuple

from ._launch_specialization import identity, unsupported
from .journal import scan_journal
from .spec import Environment, Json, Kernel, Key

__all__ = ["Failure", "Recorded", "Task", "Warmed", "read_recorded"]


@dataclass(frozen=True)
class Task:
    """One launch to compile for: a key as the compiler sees it, all but its config.

    Attributes:
        kernel, key: what a config is chosen for.
        specialization: the launch, as its journal holds it.
        candidates: texts of the configs that were timed; empty where that is not known.
    """

    kernel: Kernel
    key: Key
    specialization: Json
    candidates: tuple[str, ...] = ()

    def to_json(self) -> Json:
        """JSON form, which :meth:`from_json` reads."""
        return {
            "kernel": [self.kernel.qualified_name, self.kernel.source_hash],
            "key": self.key.to_json(),
            "specialization": self.specialization,
            "candidates": list(self.candidates),
        }

    @classmethod
    def from_json(cls, data: Json) -> Task:
        """Inverse of :meth:`to_json`."""
        return cls(
            Kernel(*data["kernel"]), Key.from_json(data["key"]), data["specialization"], tuple(data["candidates"])
        )


@dataclass(frozen=True)
class Warmed:
    """A chosen config that is now in the compile cache.

    Attributes:
        kernel: qualified name.
        key: text of the key.
        config: the config, as text.
        source: the rule that chose it.
        hash: names the entry in Triton's compile cache.
        seconds: what compiling took, its launcher included and importing the kernel not.
        cached: whether it was in the cache before.
        notes: what a reader should know, such as what a fallback replaced.
    """

    kernel: str
    key: str
    config: str
    source: str
    hash: str
    seconds: float
    cached: bool
    notes: tuple[str, ...] = ()

    def to_json(self) -> Json:
        """JSON form."""
        return {**asdict(self), "notes": list(self.notes)}


@dataclass(frozen=True)
class Failure:
    """A key that nothing was compiled for, and why."""

    kernel: str
    key: str
    reason: str

    def to_json(self) -> Json:
        """JSON form."""
        return asdict(self)

    def __str__(self) -> str:
        return f"{self.kernel} [{self.key}]: {self.reason}"


class Recorded(NamedTuple):
    """What journals hold.

    Attributes:
        tasks: launches to compile for, each once, in a fixed order.
        failures: keys and launches that cannot be compiled ahead.
        environments: of the journals that have records.
    """

    tasks: tuple[Task, ...]
    failures: tuple[Failure, ...]
    environments: tuple[Environment, ...]


def read_recorded(paths: Iterable[str]) -> Recorded:
    """Read journals.

    Raises:
        JournalError: a journal cannot be read.
    """
    tasks: dict[tuple[str, str, str], Task] = {}
    refused: dict[tuple[str, str, str], Failure] = {}
    keys: dict[tuple[str, str], tuple[Kernel, Key, set[str]]] = {}
    environments = []
    for path in paths:
        scan = scan_journal(path)
        if scan.measurements:
            environments.append(scan.environment)
        for measurement in scan.measurements:
            found = measurement.identity
            name, text, data = found.kernel.qualified_name, found.key.text, found.specialization
            _, _, configs = keys.setdefault((name, text), (found.kernel, found.key, set()))
            configs.update(config.text for config in found.configs[: len(measurement.times)])
            if data is None:
                continue
            reason = unsupported(data)
            if reason is None:
                tasks.setdefault((name, text, identity(data)), Task(found.kernel, found.key, data))
            else:
                refused.setdefault((name, text, reason), Failure(name, str(found.key), reason))
    with_data = {at[:2] for at in (*tasks, *refused)}
    for (name, text), (_, key, _) in keys.items():
        if (name, text) not in with_data:
            reason = (
                "no journal given holds a specialization of this key, which is what to compile it for: record it again "
                "with this version, on a GPU"
            )
            refused[name, text, reason] = Failure(name, str(key), reason)
    ordered = tuple(
        Task(task.kernel, task.key, task.specialization, tuple(sorted(keys[at[:2]][2])))
        for at, task in sorted(tasks.items(), key=lambda item: item[0])
    )
    return Recorded(ordered, tuple(refused[at] for at in sorted(refused)), tuple(environments))
