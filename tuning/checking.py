"""Hold tables against the packages that are installed: which entries no longer fit, and what to do about each.

Pure: tables and what is known of the installed autotuners come in, findings go out. Nothing is imported or launched.

Only what is certain is a problem. A package that is not installed, or a module that does not import here, leaves its
entries *unchecked*: that says nothing about them. Where an autotuner prunes, a config that it does not list may be a
candidate all the same, because a pruner may return configs of its own: unchecked too.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from ._table_fit import key_of, misfit
from ._table_index import DeniedIndex
from ._words import counted
from .spec import Json, Key, LaunchConfig
from .tables import Denied, Entry, TableFile, Tables

__all__ = ["AutotunerLike", "Finding", "FindingKind", "check_coverage", "check_tables", "modules_of", "unseen_rows"]

FindingKind = Literal[
    "missing_kernel",
    "single_candidate",
    "not_a_candidate",
    "denied_config",
    "other_key",
    "other_arguments",
    "stale_source",
    "other_triton",
    "uncovered",
    "unchecked",
    "idle_denial",
]
"""What is amiss.

``missing_kernel``: its module imports and has no autotuner of that name. ``single_candidate``: it is there, with
nothing to choose. ``not_a_candidate``: the entry's config is none of the candidates, so the entry counts as a miss.
``denied_config``: so it does, as its own table denies its config. ``other_key``: the autotuner's key has other names,
so the entry is never found. ``other_arguments``: nor is one that names the dtype of an argument that the kernel has
not. ``stale_source``: the kernel's source has changed since, so the entry's speed is in doubt. ``other_triton``: so it
is under another Triton. ``uncovered``: an installed autotuner with a choice, of which no table of the arch has an entry
that can be used. ``unchecked``: no problem; it could not be looked at. ``idle_denial``: no problem; what is denied is
no candidate here, and may be one in another version of the package, or on the arch that the table is for.
"""


class AutotunerLike(Protocol):
    """What is read of an installed autotuner."""

    @property
    def kernel(self) -> str:
        """Qualified name."""

    @property
    def candidates(self) -> tuple[LaunchConfig, ...]:
        """Its candidates."""

    @property
    def key_names(self) -> tuple[str, ...]:
        """Its declared key."""

    @property
    def arg_names(self) -> tuple[str, ...]:
        """The kernel's parameters; empty where they are not known."""

    @property
    def source_hash(self) -> str | None:
        """Hash of the kernel's source, where it is known."""

    @property
    def pruner(self) -> str:
        """What prunes its candidates; empty for nothing."""


@dataclass(frozen=True, order=True)
class Finding:
    """One thing about a table that somebody should look at.

    Attributes:
        file: the table.
        kernel: the kernel; empty where it is about the whole table.
        entry: which entry, in words; empty where it is about all entries of the kernel or table.
        kind: see :data:`FindingKind`.
        message: what is amiss and what to do, in one line.
    """

    file: str
    kernel: str
    entry: str
    kind: FindingKind
    message: str

    @property
    def is_problem(self) -> bool:
        """Whether somebody has to act."""
        return self.kind not in ("unchecked", "idle_denial")

    def to_json(self) -> Json:
        """JSON form."""
        return {**vars(self), "problem": self.is_problem}


def modules_of(files: Iterable[TableFile]) -> tuple[str, ...]:
    """The modules whose autotuners the tables speak of, sorted: what has to be imported before checking."""
    return tuple(sorted({_module(kernel) for file in files for kernel in _kernels(file)}))


def _kernels(file: TableFile) -> list[str]:
    return sorted(set(_row_kernels(file)))


def _row_kernels(file: TableFile) -> list[str]:
    """The kernel of each row, entries and denied configs alike."""
    return [entry.kernel for entry in file.entries] + [row.kernel for row in file.denied]


def _module(kernel: str) -> str:
    # A kernel made inside of a function or class is found in the module all the same.
    return kernel.partition(".<locals>")[0].rpartition(".")[0]


def check_tables(
    files: Iterable[TableFile],
    autotuners: Iterable[AutotunerLike],
    *,
    triton: str,
    unimported: Mapping[str, str] | None = None,
    versions: Mapping[str, str] | None = None,
) -> tuple[Finding, ...]:
    """What of these tables does not fit what is installed.

    Args:
        files: the tables.
        autotuners: those of the modules that were looked into.
        triton: the installed version.
        unimported: modules that could not be looked into, each with the reason.
        versions: installed version of each top-level package, for messages.

    Returns:
        The findings, sorted by file, kernel and entry.
    """
    known = {each.kernel: each for each in autotuners}
    reasons = dict(unimported or {})
    found: list[Finding] = []
    for file in files:
        name = _name(file)
        found += _check_header(name, file, triton)
        for kernel in _kernels(file):
            entries = [entry for entry in file.entries if entry.kernel == kernel]
            denied = [row for row in file.denied if row.kernel == kernel]
            reason = reasons.get(_module(kernel))
            here = (versions or {}).get(kernel.partition(".")[0], "")
            found += _check_kernel(
                name, kernel, entries, denied, known.get(kernel), reason, (here, file.package_version)
            )
    return tuple(sorted(found))


def check_coverage(
    files: Iterable[TableFile], autotuners: Iterable[AutotunerLike], *, beside: Iterable[str] = ()
) -> tuple[Finding, ...]:
    """The installed autotuners with a choice of which the tables of an arch have no usable entry, for each such arch.

    Args:
        files: the tables.
        autotuners: those of the packages that the tables are to cover.
        beside: qualified names that need no entry, such as config-invariant kernels.

    Returns:
        The findings, sorted.
    """
    given = tuple(files)
    exempt = set(beside)
    wanted = {each.kernel: each for each in autotuners if len(each.candidates) > 1 and each.kernel not in exempt}
    found = []
    for arch in sorted({file.arch for file in given}):
        tables = Tables(arch, [[file] for file in given if file.arch == arch])
        for kernel, autotuner in wanted.items():
            entries = tables.entries(kernel)
            if not all(_misfit(entry, autotuner, tables.denied) for entry in entries):
                continue
            has = f"no entry of {arch} can be used" if entries else f"no table of {arch} has an entry"
            found.append(Finding(arch, kernel, "", "uncovered", f"{has}: the on-miss rule chooses; record it"))
    return tuple(sorted(found))


def _misfit(entry: Entry, autotuner: AutotunerLike, denied: Callable[[str, Key], Mapping[LaunchConfig, Denied]]) -> str:
    return misfit(entry, autotuner.candidates, autotuner.key_names, autotuner.arg_names or None, denied)


def unseen_rows(files: Iterable[TableFile], findings: Iterable[Finding]) -> int:
    """How many rows, entries and denied configs alike, are of kernels that could not be looked at.

    Args:
        files: the tables, as given to :func:`check_tables`.
        findings: what it gave.
    """
    unseen = {(each.file, each.kernel) for each in findings if each.kind == "unchecked" and not each.entry}
    rows = ((file, kernel) for file in files for kernel in _row_kernels(file))
    return sum((_name(file), kernel) in unseen for file, kernel in rows)


def _name(file: TableFile) -> str:
    return file.path or f"{file.arch}/{file.package}"


def _release(version: str) -> str:
    match = re.match(r"\d+\.\d+", version)
    return match[0] if match else version


def _check_header(name: str, file: TableFile, triton: str) -> list[Finding]:
    if not file.triton or not triton or _release(file.triton) == _release(triton):
        return []
    count = len(file.entries)
    return [
        Finding(
            name,
            "",
            "",
            "other_triton",
            f"made under Triton {file.triton}, this is {triton}: {counted(count, 'entry')} used as before; record "
            "and merge again to know what is fastest now",
        )
    ]


def _check_kernel(
    name: str,
    kernel: str,
    entries: Sequence[Entry],
    denied: Sequence[Denied],
    autotuner: AutotunerLike | None,
    unimported: str | None,
    versions: tuple[str, str],
) -> list[Finding]:
    def finding(kind: FindingKind, message: str, entry: str = "") -> Finding:
        return Finding(name, kernel, entry, kind, message)

    count = len(entries) + len(denied)
    rows = counted(count, "row")
    if autotuner is None:
        if unimported is not None:
            return [finding("unchecked", f"{rows} not checked: {unimported}")]
        return [
            finding(
                "missing_kernel",
                f"not in the installed {versions[0] or 'package'}: {rows} never used here; the table is of "
                f"{versions[1] or 'a version that it does not name'}: install a version that has this kernel, or drop "
                "them",
            )
        ]
    if len(autotuner.candidates) == 1:
        return [
            finding(
                "single_candidate",
                f"the installed autotuner has one candidate ({autotuner.candidates[0]}): {rows} never used; if it was "
                "reduced at import, import the package before deterministic algorithms are switched on",
            )
        ]
    found: list[Finding] = []
    stale = sorted({entry.source_hash for entry in entries if entry.source_hash} - {autotuner.source_hash})
    if stale and autotuner.source_hash is not None:
        found.append(
            finding(
                "stale_source",
                f"the kernel's source has changed (table {', '.join(map(str, stale))}, installed "
                f"{autotuner.source_hash}): the entries are used, their speed is in doubt; record this kernel again",
            )
        )
    live = set(autotuner.candidates)
    index = DeniedIndex()
    for row in denied:
        index.add(row)
    for entry in entries:
        text = str(entry).removeprefix(kernel).strip()
        if entry.key is not None:
            found += _check_key(finding, text, entry, autotuner)
        denial = index.matching(key_of(entry)).get(entry.config)
        if denial is not None:
            message = (
                f"{entry.config} is denied by this table ({denial.reason}): the entry counts as a miss; drop it or "
            )
            found.append(finding("denied_config", message + "record this key again", text))
        if entry.config not in live:
            found.append(_not_live(finding, text, entry.config, autotuner))
    for row in denied:
        if row.config not in live:
            text = f"denied {row.config}"
            found.append(finding("idle_denial", f"{row.config} is no candidate here: nothing to deny", text))
    return found


class _MakeFinding(Protocol):
    def __call__(self, kind: FindingKind, message: str, entry: str = "") -> Finding: ...


def _check_key(finding: _MakeFinding, text: str, entry: Entry, autotuner: AutotunerLike) -> list[Finding]:
    # A declared name that is no argument of the kernel is dropped by Triton, and an optional argument may be left out
    # of a call, so an entry may have fewer names than the autotuner declares. It can have no others.
    foreign = sorted({key for key, _ in entry.key or ()} - set(autotuner.key_names))
    absent = sorted({name for name, _ in entry.dtypes or ()} - set(autotuner.arg_names))
    if absent and autotuner.arg_names and not foreign:
        message = f"it names the dtype of {', '.join(absent)}, which the installed kernel has not: it is never found; "
        return [finding("other_arguments", message + "record this kernel again", text)]
    if not foreign:
        return []
    return [
        finding(
            "other_key",
            f"its key has {', '.join(foreign)}, which the installed autotuner's ({', '.join(autotuner.key_names)}) has "
            "not: it is never found; record this kernel again",
            text,
        )
    ]


def _not_live(finding: _MakeFinding, text: str, config: LaunchConfig, autotuner: AutotunerLike) -> Finding:
    if autotuner.pruner:
        return finding(
            "unchecked", f"{config} is not listed, but the autotuner prunes and may return configs of its own", text
        )
    return finding(
        "not_a_candidate",
        f"{config} is none of the {len(autotuner.candidates)} candidates: the entry counts as a miss; record this "
        "key again",
        text,
    )
