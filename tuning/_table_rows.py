"""What a table file holds, as values, and the canonical bytes that they are written as."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

from tuning.spec import Json, LaunchConfig, natural_order

__all__ = ["HEADER", "SCHEMA_VERSION", "Denied", "Entry", "Pairs", "TableFile", "render"]

SCHEMA_VERSION = 1
"""Version of the file layout that this library writes, and the only one that it reads."""

Pairs = tuple[tuple[str, str], ...]
"""Names with their encoded values (or dtypes), in declaration order."""

HEADER = ("schema_version", "arch", "package", "package_version", "triton", "device", "multiprocessors")
"""Header members, in the order in which they are written."""


@dataclass(frozen=True)
class Entry:
    """One line of a table: the config that a kernel gets for one key, or for every key without an entry of its own.

    Attributes:
        kernel: qualified name of the kernel.
        key: (name, encoded value) of each key argument in declaration order; None for the wildcard ``*``.
        dtypes: (argument name, dtype) of each tensor argument, in the order of the kernel's signature; or
        dtype_sequence: the dtypes alone, in the order of a call, where an entry was reported without names. Exactly
            one of the two is given unless the entry is the wildcard, which has neither.
        config: the config.
        evidence: who measured it and how, or who reported it. Free members; those that ``tables/schema.json`` names
            have the types that it gives.
        source_hash: hash of the kernel's source at the time, or None where it is not known.
        classes: where it was probed, every launchable candidate, grouped by identical results; else None.
        origin: path of the file that it was read from.
        triton: version of Triton in that file's header; empty where it is not known.
    """

    kernel: str
    key: Pairs | None
    dtypes: Pairs | None
    dtype_sequence: tuple[str, ...] | None
    config: LaunchConfig
    evidence: Mapping[str, Json]
    source_hash: str | None = None
    classes: tuple[tuple[LaunchConfig, ...], ...] | None = None
    origin: str | None = field(default=None, compare=False)
    triton: str = field(default="", compare=False)

    @property
    def identity(self) -> tuple[object, ...]:
        """Two entries of one file may not share it; an upper layer's entry hides a lower one that does."""
        if self.key is None:
            return (self.kernel,)
        if self.dtypes is not None:
            return (self.kernel, tuple(sorted(self.key)), "named", tuple(sorted(self.dtypes)))
        return (self.kernel, tuple(sorted(self.key)), "sequence", self.dtype_sequence)

    def __str__(self) -> str:
        if self.key is None:
            return f"{self.kernel} *"
        named = [f"{name}:{dtype}" for name, dtype in self.dtypes or ()]
        parts = [f"{name}={text}" for name, text in self.key] + (named or list(self.dtype_sequence or ()))
        return " ".join([self.kernel, *parts])


@dataclass(frozen=True)
class Denied:
    """A config that is never chosen: known to be wrong or racy, or recorded as failing to launch.

    Attributes:
        kernel: qualified name of the kernel.
        config: the config.
        key: (name, encoded value) of the key arguments that must all have these values, others being free; None: every
            key.
        reason: what is wrong with it.
        source: who says so: a report, or a recording.
        origin: path of the file that it was read from.
        dtypes: (argument name, dtype) of the tensor arguments that must all have these dtypes; None: any.
    """

    kernel: str
    config: LaunchConfig
    key: Pairs | None
    reason: str
    source: str
    origin: str | None = field(default=None, compare=False)
    dtypes: Pairs | None = None

    @property
    def identity(self) -> tuple[object, ...]:
        """Two rows of one file may not share it."""
        return (
            self.kernel,
            self.config.text,
            None if self.key is None else tuple(sorted(self.key)),
            None if self.dtypes is None else tuple(sorted(self.dtypes)),
        )


@dataclass(frozen=True)
class TableFile:
    """One table file: the configs of one package's kernels on one arch.

    Attributes:
        arch: Triton's target, such as ``sm90``.
        package: top-level package of every kernel in it.
        package_version, triton, device: what it was recorded with; empty where it is not known.
        entries: the entries.
        denied: the configs that are never chosen.
        path: where it was read from, or None where it was built in memory.
        multiprocessors: of the device; 0 where it is not known.
    """

    arch: str
    package: str
    package_version: str
    triton: str
    device: str
    entries: tuple[Entry, ...]
    denied: tuple[Denied, ...] = ()
    path: str | None = field(default=None, compare=False)
    multiprocessors: int = 0


def _pairs_json(pairs: Pairs) -> Json:
    return {name: json.loads(text) for name, text in pairs}


def _pairs_order(pairs: Pairs) -> tuple[object, ...]:
    return tuple((name, natural_order(text)) for name, text in sorted(pairs))


def _entry_order(entry: Entry) -> tuple[object, ...]:
    if entry.key is None:
        return (entry.kernel, 0)
    form = (0, tuple(sorted(entry.dtypes))) if entry.dtypes is not None else (1, entry.dtype_sequence or ())
    return (entry.kernel, 1, _pairs_order(entry.key), form)


def _denied_order(row: Denied) -> tuple[object, ...]:
    key = (0,) if row.key is None else (1, _pairs_order(row.key))
    dtypes = (0,) if row.dtypes is None else (1, tuple(sorted(row.dtypes)))
    return (row.kernel, key, dtypes, row.config.order)


def _entry_json(entry: Entry) -> Json:
    data: dict[str, Json] = {"kernel": entry.kernel, "key": "*" if entry.key is None else _pairs_json(entry.key)}
    if entry.dtypes is not None:
        data["dtypes"] = dict(entry.dtypes)
    elif entry.dtype_sequence is not None:
        data["dtypes"] = list(entry.dtype_sequence)
    data["config"] = entry.config.to_json()
    if entry.source_hash is not None:
        data["source_hash"] = entry.source_hash
    # Evidence is free: sorting it is what makes its bytes canonical. Keys and dtypes keep the order of declaration.
    data["evidence"] = json.loads(json.dumps(dict(entry.evidence), sort_keys=True, allow_nan=False))
    if entry.classes is not None:
        groups = [sorted(group, key=lambda config: config.order) for group in entry.classes]
        groups.sort(key=lambda group: group[0].order)
        data["classes"] = [[config.to_json() for config in group] for group in groups]
    return data


def _denied_json(row: Denied) -> Json:
    data: dict[str, Json] = {"kernel": row.kernel, "key": "*" if row.key is None else _pairs_json(row.key)}
    if row.dtypes is not None:
        data["dtypes"] = dict(row.dtypes)
    return {**data, "config": row.config.to_json(), "reason": row.reason, "source": row.source}


def _lines(name: str, rows: list[Json], end: str) -> str:
    def line(row: Json) -> str:
        return json.dumps(row, ensure_ascii=True, allow_nan=False)

    body = ",\n".join(map(line, rows))
    return f'"{name}": [\n{body}\n]{end}\n' if rows else f'"{name}": []{end}\n'


def render(table: TableFile) -> str:
    """Canonical text: header members in fixed order, one entry a line, both lists sorted, a newline at the end.

    Raises:
        ValueError, TypeError, RecursionError: evidence that is not JSON.
    """
    header = {name: SCHEMA_VERSION if name == "schema_version" else getattr(table, name) for name in HEADER}
    head = "".join(f"{json.dumps(name)}: {json.dumps(value, allow_nan=False)},\n" for name, value in header.items())
    entries = _lines("entries", list(map(_entry_json, sorted(table.entries, key=_entry_order))), ",")
    denied = _lines("denied", list(map(_denied_json, sorted(table.denied, key=_denied_order))), "")
    return "{\n" + head + entries + denied + "}\n"
