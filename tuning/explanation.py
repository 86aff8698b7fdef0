"""What would be chosen on an arch, and why, without a GPU of it: for the launches of journals, or for whole packages.

A journal holds keys and the candidates that were left after pruning, so its choices are those that a run of the same
launches makes on the other arch, as far as pruning there leaves the same candidates. A package says less: its
autotuners are known, and of their keys only those that a table has. So each kernel gets a row for every key that any
arch's table has for it, and one for any other key (:data:`OTHER_KEY`), where the rule does not depend on the key.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from ._table_fit import key_of
from .errors import TableError, TableMissError
from .inventory import AutotunerInfo
from .journal import scan_journal
from .policy import AutotunePolicy
from .selection import Candidates, decide
from .spec import Json, Kernel, Key, LaunchConfig, Source
from .tables import Entry, Tables, load_tables

__all__ = ["OTHER_KEY", "Explained", "explain_autotuners", "explain_journals"]

OTHER_KEY = "any other key"
"""Stands for the key in the row about keys that no table has."""


@dataclass(frozen=True)
class Explained:
    """What would be chosen for one kernel and key.

    Attributes:
        kernel: qualified name.
        key: the key as text, or :data:`OTHER_KEY`.
        arch: the arch asked about.
        candidates: number of candidates.
        config: the choice; None where there is none, or where it depends on what is not known.
        source: the rule; ``timed`` for kernels that the policy leaves to Triton, None where there is no choice.
        origin: file of the table entry, if one decided.
        detail: more in words, such as the distance of the nearest entry.
        notices: what a run would be told, a line each.
        problem: why there is no choice; empty where there is one.
        pruner: the autotuner's own pruning, which may leave fewer candidates at a launch; None if none is known.
    """

    kernel: str
    key: str
    arch: str
    candidates: int
    config: LaunchConfig | None
    source: Source | None
    origin: str | None = None
    detail: str = ""
    notices: tuple[str, ...] = ()
    problem: str = ""
    pruner: str | None = None

    def to_json(self) -> Json:
        """JSON form."""
        return {
            "kernel": self.kernel,
            "key": self.key,
            "arch": self.arch,
            "candidates": self.candidates,
            "config": None if self.config is None else self.config.to_json(),
            "source": self.source,
            "origin": self.origin,
            "detail": self.detail,
            "notices": list(self.notices),
            "problem": self.problem,
            "pruner": self.pruner,
        }


def explain_journals(
    paths: Iterable[str | os.PathLike[str]], arch: str, policy: AutotunePolicy | None = None
) -> tuple[Explained, ...]:
    """What ``policy`` would choose on ``arch`` for each kernel and key of the journals, by kernel and key.

    Raises:
        JournalError: a journal cannot be read.
        TableError: a table is malformed.
    """
    policy = policy if policy is not None else AutotunePolicy()
    tables = _tables(arch, policy)
    found: dict[tuple[str, str], tuple[Kernel, Key, set[LaunchConfig]]] = {}
    for path in paths:
        for measurement in scan_journal(path).measurements:
            identity = measurement.identity
            at = (identity.kernel.qualified_name, identity.key.text)
            _, _, configs = found.setdefault(at, (identity.kernel, identity.key, set()))
            configs.update(identity.configs)
    return tuple(
        _explained(kernel, key, str(key), arch, sorted(configs, key=lambda config: config.order), tables, policy)
        for _, (kernel, key, configs) in sorted(found.items(), key=lambda item: item[0])
    )


def explain_autotuners(
    autotuners: Iterable[AutotunerInfo], arch: str, policy: AutotunePolicy | None = None
) -> tuple[Explained, ...]:
    """What ``policy`` would choose on ``arch`` for autotuners that were listed; those of one candidate are left out.

    Raises:
        TableError: a table is malformed.
    """
    policy = policy if policy is not None else AutotunePolicy()
    tables = _tables(arch, policy)
    everywhere = load_tables(arch, policy.table_path, neighbours=True)
    rows: list[Explained] = []
    for info in autotuners:
        if len(info.candidates) < 2:
            continue
        kernel = Kernel(info.kernel, info.source_hash)
        known = [entry for each in (everywhere, *everywhere.others) for entry in each.entries(info.kernel)]
        keys = _keys_of(known, info)
        mine = [_explained(kernel, key, shown, arch, info.candidates, tables, policy) for key, shown in keys]
        mine.append(_other_key(kernel, info, arch, tables, policy))
        rows += [replace(row, pruner=info.pruner) for row in mine]
    return tuple(rows)


def _tables(arch: str, policy: AutotunePolicy) -> Tables:
    return load_tables(arch, policy.table_path, neighbours=policy.on_miss in ("nearest", "error"))


def _keys_of(entries: Sequence[Entry], info: AutotunerInfo) -> list[tuple[Key, str]]:
    """The keys of entries, each once, and how to show them; one that names its dtypes stands for one that lists them.

    Dtypes without names get those of the kernel's arguments, where it can be told which: denied configs and named
    entries are looked up by them.
    """
    found: dict[object, tuple[Key, str]] = {}
    for entry in sorted(entries, key=lambda each: each.dtypes is None):
        if entry.key is None:
            continue
        names = _tensors(entries, info, len(entry.dtype_sequence or ()))
        key = key_of(entry, names)
        shown = str(key)
        if entry.dtypes is None and entry.dtype_sequence and not names:
            shown = " ".join([*(f"{name}={text}" for name, text in entry.key), *entry.dtype_sequence])
            shown += " (of which arguments is not known)"
        found.setdefault((tuple(sorted(key.values)), tuple(sorted(key.dtype_sequence))), (key, shown))
    return sorted(found.values(), key=lambda item: item[0].text)


def _tensors(entries: Iterable[Entry], info: AutotunerInfo, count: int) -> tuple[str, ...]:
    """Names of a kernel's ``count`` tensors in the order of its signature; none where it cannot be told which they are.

    Other entries say it. Else there are just as many parameters that a launch passes beside key and config, or just as
    many of these that are named as pointers.
    """
    named = (entry.dtypes for entry in entries if entry.dtypes is not None)
    said = {tuple(name for name, _ in dtypes) for dtypes in named if len(dtypes) == count}
    if len({frozenset(names) for names in said}) == 1:
        names = min(said)
        order = {name: at for at, name in enumerate(info.arg_names)}
        return tuple(sorted(names, key=lambda name: order.get(name, len(order))))
    if said:
        return ()
    bound = {name for config in info.candidates for name, _ in config.kwargs} | set(info.key_names)
    passed = tuple(name for name in info.arg_names if name not in bound)
    pointers = tuple(name for name in passed if name.lower().endswith("ptr"))
    return next((names for names in (passed, pointers) if len(names) == count), ())


def _other_key(kernel: Kernel, info: AutotunerInfo, arch: str, tables: Tables, policy: AutotunePolicy) -> Explained:
    # A key of no name is no key of the kernel's, unless it declares none and has no tensor: no entry matches it.
    nowhere = Key((("", "null"),))
    row = _explained(kernel, nowhere, OTHER_KEY, arch, info.candidates, tables, policy)
    if row.source == "nearest":
        text = "the nearest of the entries above, by the key"
        return replace(row, config=None, origin=None, detail=text, notices=())
    return row


def _explained(
    kernel: Kernel,
    key: Key,
    shown: str,
    arch: str,
    configs: Sequence[LaunchConfig],
    tables: Tables,
    policy: AutotunePolicy,
) -> Explained:
    name = kernel.qualified_name
    count = len(set(configs))
    if policy.is_config_invariant(name):
        text = "config-invariant: every candidate gives the same bits, and Triton times them"
        return Explained(name, shown, arch, count, None, "timed", detail=text)
    try:
        decision = decide(kernel, key, arch, Candidates.of_configs(configs), tables, policy)
    except TableMissError as error:
        if shown == OTHER_KEY:  # what was asked for, and no key of anybody's
            return Explained(name, shown, arch, count, None, None, detail="refused, since on_miss is 'error'")
        problem = error.message.replace(str(key), shown)
        return Explained(name, shown, arch, count, None, None, problem=problem)
    except TableError as error:
        return Explained(name, shown, arch, count, None, None, problem=error.message.replace(str(key), shown))
    choice = decision.choice
    notices = tuple(notice.message for notice in decision.notices)
    return Explained(name, shown, arch, count, choice.config, choice.source, choice.origin, choice.detail, notices)
