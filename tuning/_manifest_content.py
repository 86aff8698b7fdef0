"""The values that a manifest is made of; :mod:`tuning.manifest` says why it is as it is."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tuning.spec import Choice, ComputedOnce, Environment, Json, Key, LaunchConfig, Source, canonical_json, is_fallback

__all__ = [
    "SCHEMA_VERSION",
    "AutotunerState",
    "AutotunerUse",
    "Launch",
    "Manifest",
    "TableUse",
    "digest_of_run",
    "plain",
]

SCHEMA_VERSION = 1
"""Version of the document that this library writes, and the only one that it reads."""

AutotunerState = Literal["pinned", "recorded", "timed", "single"]
"""What was done with an autotuner: chosen without a clock; timed and journaled; left to Triton's timing; nothing to
choose, since it has one candidate."""


@dataclass(frozen=True)
class TableUse:
    """A table file that choices could come from.

    Attributes:
        path: where it was read from; None where it was built in memory.
        arch, package: what it is for.
        sha256: digest of its canonical bytes, as they were when it was read.
    """

    path: str | None
    arch: str
    package: str
    sha256: str

    @classmethod
    def of(cls, path: str | None, arch: str, package: str, content: bytes) -> TableUse:
        """Describe a table by its bytes."""
        return cls(path, arch, package, hashlib.sha256(content).hexdigest())


@dataclass(frozen=True)
class Launch:
    """One choice, as plain data; see :class:`tuning.spec.Choice`.

    Attributes:
        source_hash: hash of the kernel's source, or None where it is not known.
    """

    kernel: str
    key: Key
    config: LaunchConfig
    source: Source
    origin: str | None
    arch: str
    detail: str = ""
    source_hash: str | None = None

    @classmethod
    def of(cls, choice: Choice, source_hash: str | None = None) -> Launch:
        """The plain form of a choice."""
        return cls(
            choice.kernel,
            choice.key,
            choice.launch_config,
            choice.source,
            choice.origin,
            choice.arch,
            choice.detail,
            source_hash,
        )

    @property
    def place(self) -> tuple[str, str, str]:
        """Kernel, arch and key: what the choice is for."""
        return (self.kernel, self.arch, self.key.text)

    @property
    def is_fallback(self) -> bool:
        """Whether it stands in for a choice that could not be launched."""
        return is_fallback(self.detail)


@dataclass(frozen=True)
class AutotunerUse:
    """An autotuner that was launched.

    Attributes:
        kernel: qualified name.
        candidates: number of its configs.
        key_names: names of its key arguments, in order of declaration.
        state: what was done with it.
        reason: why, in words, where it was left to be timed.
    """

    kernel: str
    candidates: int
    key_names: tuple[str, ...]
    state: AutotunerState
    reason: str = ""


@dataclass(frozen=True)
class Manifest:
    """What ran in one process.

    Attributes:
        library: version of this library.
        mode: the mode that held.
        deterministic: whether the process was in deterministic mode.
        policy: the policy's fields, as JSON.
        environment: device, versions, packages, host and rank.
        compilers: (name, version) of what compiles kernels: ``triton``, and ``cuda`` where torch was loaded and built
            for CUDA (the release that torch was built with).
        tables: the table files in use.
        choices: every choice; see the module's docstring for their order.
        benchmarks: (kernel, number of candidates timed) for the kernels in scope that were timed at all.
        autotuners: every autotuner that was launched, by kernel.
        notices: (kind, message) of each warning about a choice, such as ``stale_source`` where the kernel's source has
            changed since an entry was made; the message names the kernel. The kinds are those of
            :class:`tuning.selection.Notice`; ``compiled`` names each kernel that was traced into a compiled graph.
    """

    library: str
    mode: str
    deterministic: bool
    policy: Mapping[str, Json]
    environment: Environment
    compilers: tuple[tuple[str, str], ...] = ()
    tables: tuple[TableUse, ...] = ()
    choices: tuple[Launch, ...] = ()
    benchmarks: tuple[tuple[str, int], ...] = ()
    autotuners: tuple[AutotunerUse, ...] = ()
    notices: tuple[tuple[str, str], ...] = ()

    @property
    def benchmarks_run(self) -> int:
        """Candidates timed in scope: 0 in a pinned run."""
        return sum(count for _, count in self.benchmarks)

    @property
    def timed(self) -> tuple[AutotunerUse, ...]:
        """Autotuners that were left to Triton's timing."""
        return tuple(each for each in self.autotuners if each.state == "timed")

    @ComputedOnce
    def run(self) -> Json:
        """What ran, as JSON: all but host and rank."""
        where = self.environment
        return {
            "autotuners": [plain(each) for each in self.autotuners],
            "benchmarks": [[kernel, count] for kernel, count in self.benchmarks],
            "choices": [
                {**plain(each), "key": each.key.to_json(), "config": each.config.to_json()} for each in self.choices
            ],
            "compilers": [[name, version] for name, version in self.compilers],
            "deterministic": self.deterministic,
            "device": {
                "arch": where.arch,
                "multiprocessors": where.multiprocessors,
                "name": where.device,
            },
            "library": self.library,
            "mode": self.mode,
            "notices": [[kind, message] for kind, message in self.notices],
            "policy": dict(self.policy),
            "tables": [plain(each) for each in self.tables],
            "versions": {
                "packages": [[name, version] for name, version in where.packages],
                "python": where.python,
                "torch": where.torch,
                "triton": where.triton,
            },
            "world_size": where.world_size,
        }

    @ComputedOnce
    def digest(self) -> str:
        """SHA-256 of the canonical text of :attr:`run` without its paths, in hexadecimal; see :func:`digest_of_run`."""
        return digest_of_run(self.run)

    def to_json(self) -> Json:
        """The whole document."""
        return {
            "digest": self.digest,
            "place": {"host": self.environment.host, "rank": self.environment.rank},
            "run": self.run,
            "schema_version": SCHEMA_VERSION,
        }


def plain(value: Any) -> dict[str, Json]:
    """A flat dataclass as JSON; tuples become lists."""
    pairs = ((item.name, getattr(value, item.name)) for item in dataclasses.fields(value))
    return {name: list(content) if isinstance(content, tuple) else content for name, content in pairs}


_PATHS_OF_POLICY = ("manifest_path", "record_path", "table_path")


def digest_of_run(run: Json) -> str:
    """SHA-256 of the canonical text of a run without its paths, in hexadecimal.

    A run is the same whatever folder its tables lie in and its files go to. So the policy's paths are left out, tables
    count by what they hold, and of the path of a table that a choice came from, or a notice speaks of, the end counts
    that says what the table is for: ``<arch>/<package>.json``.
    """
    tables = [{name: value for name, value in table.items() if name != "path"} for table in run["tables"]]
    choices = [{**choice, "origin": _place_in_folder(choice["origin"])} for choice in run["choices"]]
    paths = {table["path"] for table in run["tables"]} | {choice["origin"] for choice in run["choices"]}
    longest_first = sorted(filter(None, paths), key=lambda path: (-len(path), path))
    notices = []
    for kind, message in run["notices"]:
        for path in longest_first:
            message = message.replace(path, _place_in_folder(path))
        notices.append([kind, message])
    content = {
        **run,
        "choices": choices,
        "notices": sorted(notices),
        "policy": {name: value for name, value in run["policy"].items() if name not in _PATHS_OF_POLICY},
        "tables": sorted(tables, key=canonical_json),
    }
    return hashlib.sha256(canonical_json(content).encode()).hexdigest()


def _place_in_folder(path: str | None) -> str | None:
    return None if path is None else "/".join(re.split(r"[\\/]", path)[-2:])
