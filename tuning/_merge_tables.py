"""The tables that a merge gives: entries with their evidence, denied configs, headers, and what was carried over."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from tuning._merge_carried import UNTIMED, carry_over
from tuning._merge_facts import KeyFacts
from tuning._merge_pools import Pool
from tuning._table_index import RowIndex
from tuning.spec import Environment, Json, Kernel, Key, LaunchConfig
from tuning.tables import Denied, Entry, TableFile

__all__ = ["Environments", "TablesInForce", "build_tables", "collect_notes", "entry_of"]

Environments = Mapping[tuple[str, str], Iterable[Environment]]
"""For each arch and package, the distinct environments of the journals that recorded kernels of it."""


class TablesInForce:
    """The tables given to a merge, by kernel and key. Of several that differ, the tie-break's first counts."""

    def __init__(self, tables: Sequence[TableFile], tie_break: Callable[[LaunchConfig], Any]) -> None:
        self.entries: dict[tuple[str, tuple[object, ...]], Entry] = {}
        self.denied: dict[tuple[str, tuple[object, ...]], Denied] = {}
        self.conflicts: set[str] = set()
        self._rows: defaultdict[tuple[str, str], list[Entry]] = defaultdict(list)
        self._indexes: dict[tuple[str, str], RowIndex] = {}
        for table in tables:
            for entry in table.entries:
                name = (table.arch, entry.identity)
                other = self.entries.setdefault(name, entry)
                if other.config != entry.config:
                    self.conflicts.add(f"{entry} on {table.arch}: the tables given differ")
                order = (tie_break(entry.config), json.dumps(dict(entry.evidence), sort_keys=True))
                if order < (tie_break(other.config), json.dumps(dict(other.evidence), sort_keys=True)):
                    self.entries[name] = entry
            for row in table.denied:
                name = (table.arch, row.identity)
                kept = self.denied.setdefault(name, row)
                if (row.reason, row.source) < (kept.reason, kept.source):
                    self.denied[name] = row

    def incumbent(self, arch: str, kernel: str, key: Key) -> LaunchConfig | None:
        """The config that a launch gets for this key by the tables; a wildcard decides nothing about one key."""
        if not self.entries:
            return None
        index = self._indexes.get((arch, kernel))
        if index is None:
            if not self._rows:
                for (where, _), entry in self.entries.items():
                    self._rows[where, entry.kernel].append(entry)
            index = self._indexes[arch, kernel] = RowIndex(self._rows.get((arch, kernel), ()))
        found = index.exact(key)
        return None if found is None else found.config

    def is_denied(self, arch: str, kernel: str, key: Key, config: LaunchConfig) -> bool:
        """Whether a table denies this config for this key."""
        values, dtypes = set(key.values), set(key.dtypes)
        return any(
            where == arch
            and (row.kernel, row.config) == (kernel, config)
            and values.issuperset(row.key or ())
            and dtypes.issuperset(row.dtypes or ())
            for (where, _), row in self.denied.items()
        )


def entry_of(kernel: Kernel, key: Key, config: LaunchConfig, evidence: Mapping[str, Json]) -> Entry:
    """The entry that says: this kernel gets this config for this key."""
    return Entry(kernel.qualified_name, key.values, key.dtypes, None, config, evidence, kernel.source_hash)


def _milliseconds(value: float) -> float:
    # Nanoseconds are below what any clock here resolves: keep them out of the table's diffs.
    return round(value, 6)


def _evidence(facts: KeyFacts, date: str, rule: str) -> dict[str, Json]:
    chosen, second = facts.chosen, facts.runner_up
    evidence: dict[str, Json] = {
        "measured": bool(chosen and chosen.timed),
        "ranks": len(facts.ranks),
        "hosts": len(facts.hosts),
        "devices": list(facts.devices),
        "recordings": facts.recordings_count,
        "candidates": len(facts.candidates),
        "agreement": facts.agreement,
        "tied": len(facts.near_ties),
        "confidence": facts.confidence,
        "rule": rule,
        "best_ms": _milliseconds(chosen.median_ms) if chosen and chosen.timed else 0.0,
        "runner_up_ms": _milliseconds(second.median_ms) if second else None,
    }
    worst, median = facts.worst_regret(), facts.median_regret()
    if worst is not None and median is not None:
        evidence["regret"] = {"median": round(median, 4), "worst": round(worst, 4)}
    if facts.shared:
        evidence["shared"] = True
    notes = facts.notes if evidence["measured"] else (UNTIMED, *facts.notes)
    if notes:
        evidence["note"] = "; ".join(notes)
    if date:
        evidence["date"] = date
    return evidence


def _denied(facts: KeyFacts) -> list[Denied]:
    if facts.choice is None:
        return []
    return [
        Denied(
            facts.kernel.qualified_name,
            item.config,
            facts.key.values,
            "failed in each recording: " + "; ".join(item.errors),
            f"{item.failed} recordings on {facts.arch}",
            None,
            facts.key.dtypes,
        )
        for item in facts.failures
        if not item.timed
    ]


def build_tables(
    keys: Sequence[KeyFacts],
    environments: Environments,
    kept: Sequence[TableFile],
    in_force: TablesInForce,
    rule: str,
    date: str,
) -> tuple[tuple[TableFile, ...], tuple[str, ...]]:
    """One table for each arch and package: what was recorded replaces what a table says, the rest is carried over.

    And what the entries that are replaced had and these have not, a line each.
    """
    left_out: list[str] = []
    entries: defaultdict[tuple[str, str], dict[object, Entry]] = defaultdict(dict)
    denied: defaultdict[tuple[str, str], dict[object, Denied]] = defaultdict(dict)
    for (arch, _), entry in in_force.entries.items():
        entries[arch, Kernel(entry.kernel).package][entry.identity] = entry
    for (arch, _), row in in_force.denied.items():
        denied[arch, Kernel(row.kernel).package][row.identity] = row
    for facts in keys:
        group = (facts.arch, facts.kernel.package)
        if facts.choice is not None:
            entry = entry_of(facts.kernel, facts.key, facts.choice, _evidence(facts, date, rule))
            before = entries[group].get(entry.identity)
            if before is not None:
                entry, lines = carry_over(entry, before, facts, tuple(environments.get(group, ())))
                left_out += [f"{facts.arch}, {entry}: {line}" for line in lines]
            entries[group][entry.identity] = entry
        for row in _denied(facts):
            denied[group].setdefault(row.identity, row)
    tables = tuple(
        _table(group, entries[group], denied[group], environments.get(group, ()), kept)
        for group in sorted(entries.keys() | denied.keys())
        if entries[group] or denied[group]
    )
    return tables, tuple(left_out)


def _table(
    group: tuple[str, str],
    entries: Mapping[object, Entry],
    denied: Mapping[object, Denied],
    environments: Iterable[Environment],
    kept: Sequence[TableFile],
) -> TableFile:
    arch, package = group
    found = list(environments)
    old = [table for table in kept if (table.arch, table.package) == group]
    multiprocessors = {env.multiprocessors for env in found} | {table.multiprocessors for table in old}
    multiprocessors.discard(0)
    return TableFile(
        arch,
        package,
        _listed([*(_version(env, package) for env in found), *(table.package_version for table in old)]),
        _listed([*(env.triton for env in found), *(table.triton for table in old)]),
        _listed([*(env.device for env in found), *(table.device for table in old)]),
        tuple(sorted(entries.values(), key=str)),
        tuple(sorted(denied.values(), key=lambda row: (row.kernel, str(row.key), str(row.dtypes), row.config.order))),
        multiprocessors=multiprocessors.pop() if len(multiprocessors) == 1 else 0,
    )


def _listed(names: Iterable[str]) -> str:
    """Several, joined by commas: a carried-over header may be such a list already."""
    return ", ".join(sorted({name for names_ in names for name in names_.split(", ") if name}))


def _version(environment: Environment, package: str) -> str:
    """Version of the distribution that brings a top-level package: of its name, or of one that starts with it."""

    def plain(name: str) -> str:
        return re.sub(r"[-_.]+", "_", name).lower()

    names = [(plain(name), version) for name, version in environment.packages]
    exact = [version for name, version in names if name == plain(package)]
    return _listed(exact or [version for name, version in names if name.startswith(plain(package) + "_")])


def collect_notes(
    keys: Sequence[KeyFacts],
    environments: Environments,
    in_force: TablesInForce,
    pools: Mapping[tuple[str, str, str], Pool],
) -> tuple[str, ...]:
    """What somebody should know who uses the tables, one line each, sorted."""
    notes = set(in_force.conflicts)
    for (arch, kernel, _), pool in pools.items():
        notes.update(f"{arch}, {kernel} {pool.key}: {config} {found}" for config, found in pool.broken.items())
    for (arch, package), group in environments.items():
        for what, values in (
            ("Triton versions", {env.triton for env in group}),
            ("devices", {env.device for env in group}),
            (f"versions of {package}", {_version(env, package) for env in group}),
        ):
            values.discard("")
            if len(values) > 1:
                notes.add(f"{arch}, {package}: timings of several {what} were pooled: {', '.join(sorted(values))}")
    for facts in keys:
        if facts.choice is None:
            tried = any(item.timed or item.failed for item in facts.candidates)
            why = (
                "no candidate was timed without a failure in another recording"
                if tried or not facts.disagrees
                else "no candidate was timed, and the recordings launched different ones"
            )
            notes.add(f"{facts.arch}, {facts.kernel.qualified_name} {facts.key}: no entry, for {why}")
    return tuple(sorted(notes))
