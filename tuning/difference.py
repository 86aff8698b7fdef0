"""What changed between two tables, or two sets of journals.

Tables are compared row by row, journals by what each side merges into: kernels and keys on one side only, other
choices, other candidates and failures, times that moved. What decides bits comes first: configs and denied configs,
then where they come from, then headers. Manifests have :func:`tuning.manifest.diff_manifests`, and its
:class:`~tuning.manifest.Change` is what all three give.

Pure but for :func:`load_side`, which reads what a path names.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path

from tuning._config_text import differing_fields
from tuning.errors import TableError
from tuning.journal import SUFFIX, Journal, Scan, find_journals, scan_journal
from tuning.manifest import Change, Manifest, diff_manifests, read_manifest
from tuning.merge import KeyFacts, Rule, merge
from tuning.spec import canonical_json
from tuning.tables import Denied, Entry, TableFile, read_table

__all__ = ["MOVED", "Side", "diff", "diff_journals", "diff_tables", "load_side"]

MOVED = 0.05
"""A time that differs by more than this part of the smaller one has moved. Two recordings of one kernel on one GPU
differ by less, as a rule; their spread is in reports."""

Side = Sequence[TableFile] | Sequence[Journal | Scan] | Manifest
"""One side of a comparison."""

_JOURNAL_SIGN = b"TTJ"
_MANIFEST_SIGN = b'"digest"'


def diff(before: Side, after: Side) -> tuple[Change, ...]:
    """Every difference between two sides: both tables, both journals, both manifests, or tables and journals.

    Journals beside tables are merged, and what they merge into is compared.

    Raises:
        TableError: a manifest beside something else: freeze it first.
        JournalError: journals of one side cannot be merged.
    """
    if isinstance(before, Manifest) and isinstance(after, Manifest):
        return diff_manifests(before, after)
    if isinstance(before, Manifest) or isinstance(after, Manifest):
        found = "a manifest and something else"
        raise TableError(
            f"diff: expected two sides of one kind, found {found}; freeze the manifest and compare the table",
            expected="two sides of one kind",
            found=found,
        )
    journals = [_journals_of(side) for side in (before, after)]
    if journals[0] is not None and journals[1] is not None:
        return diff_journals(journals[0], journals[1])
    return diff_tables(_tables_of(before), _tables_of(after))


def _journals_of(side: Side) -> list[Journal | Scan] | None:
    if isinstance(side, Manifest):
        return None
    found = [item for item in side if isinstance(item, (Journal, Scan))]
    return found or None


def _tables_of(side: Side) -> tuple[TableFile, ...]:
    journals = _journals_of(side)
    if journals is not None:
        return merge(journals).tables
    return tuple(item for item in side if isinstance(item, TableFile)) if not isinstance(side, Manifest) else ()


# --- tables -----------------------------------------------------------------------------------------------------------


def diff_tables(before: TableFile | Iterable[TableFile], after: TableFile | Iterable[TableFile]) -> tuple[Change, ...]:
    """Every difference between two sets of tables, none where their canonical bytes are equal.

    An entry that names its dtypes and one that has them as a sequence are one entry in two forms where no other could
    be meant. For a config and for evidence only what differs is shown. Where each side is of one arch and these differ,
    entries of one kernel and key are compared across the two, and a change of the header says so.

    Args:
        before, after: tables; of several for one arch and package the first is on top, as in ``table_path``.

    Returns:
        Changes with ``what`` in this order: ``config``, ``denied``, ``form``, ``order of key``, ``kernel source``,
        ``bit classes``, ``evidence``, ``header``.
    """
    tables = [(side,) if isinstance(side, TableFile) else tuple(side) for side in (before, after)]
    archs = [sorted({table.arch for table in side}) for side in tables]
    across = (
        " and ".join([*archs[0], *archs[1]])
        if len(archs[0]) == len(archs[1]) == 1 != len({*archs[0], *archs[1]})
        else ""
    )
    old, new = (_Rows(side, across) for side in tables)
    pairs = _paired(old.entries, new.entries)
    changes = [_config_change(pair) for pair in pairs if pair.before is None or pair.after is None or pair.moved]
    changes += _denials(old.denied, new.denied)
    both = [(pair.place, pair.before, pair.after) for pair in pairs if pair.before and pair.after]
    for what, text in _TEXTS.items():
        for place, one, other in both:
            sides = text(one, other), text(other, one)
            if sides[0] != sides[1]:
                changes.append(Change(what, place, *sides))
    if across:
        changes.append(Change("header", "arch, entries compared across the two", archs[0][0], archs[1][0]))
    for name in sorted(old.header.keys() | new.header.keys()):
        if old.header.get(name) != new.header.get(name):
            changes.append(Change("header", name, old.header.get(name), new.header.get(name)))
    return tuple(changes)


class _Rows:
    """The rows of several tables, by arch, or under one name for all of them if ``across`` is not empty."""

    def __init__(self, tables: Iterable[TableFile], across: str) -> None:
        self.entries: dict[tuple[str, object], Entry] = {}
        self.denied: dict[tuple[str, object], Denied] = {}
        self.header: dict[str, str] = {}
        for table in tables:
            arch = across or table.arch
            for entry in table.entries:
                self.entries.setdefault((arch, entry.identity), entry)
            for row in table.denied:
                self.denied.setdefault((arch, row.identity), row)
            place = table.package if across else f"{arch}/{table.package}"
            for name in ("package_version", "triton", "device", "multiprocessors"):
                self.header.setdefault(f"{place} {name}", str(getattr(table, name)))


@dataclass(frozen=True)
class _Pair:
    """What both sides have for one key."""

    place: str
    before: Entry | None
    after: Entry | None

    @property
    def moved(self) -> bool:
        return self.before is not None and self.after is not None and self.before.config != self.after.config


def _paired(old: Mapping[tuple[str, object], Entry], new: Mapping[tuple[str, object], Entry]) -> list[_Pair]:
    """Entries of both sides that are for one key, by kernel, key and arch."""
    found = {place: (old.get(place), new.get(place)) for place in (*old, *new)}
    # What is on one side only may be there in the other form on the other side.
    alone: dict[object, list[tuple[str, object]]] = defaultdict(list)
    for place, (one, other) in found.items():
        entry = one or other
        if entry is not None and (one is None or other is None):
            alone[_unnamed(place[0], entry)].append(place)
    for places in alone.values():
        if len(places) == 2 and (places[0] in old) != (places[1] in old):
            first, second = sorted(places, key=lambda place: place not in old)
            found[first] = (old[first], new[second])
            del found[second]
    pairs = [_Pair(f"{one or other} on {place[0]}", one, other) for place, (one, other) in found.items()]
    return sorted(pairs, key=lambda pair: pair.place)


def _unnamed(arch: str, entry: Entry) -> object:
    """What an entry with named dtypes and one with a sequence of them have in common."""
    dtypes = entry.dtype_sequence or () if entry.dtypes is None else tuple(dtype for _, dtype in entry.dtypes)
    return (arch, entry.kernel, None if entry.key is None else tuple(sorted(entry.key)), tuple(sorted(dtypes)))


def _config_change(pair: _Pair) -> Change:
    if pair.before is None or pair.after is None:
        sides = [None if entry is None else str(entry.config) for entry in (pair.before, pair.after)]
        return Change("config", pair.place, *sides)
    shown = differing_fields([pair.before.config.text, pair.after.config.text])
    return Change("config", pair.place, shown[pair.before.config.text], shown[pair.after.config.text])


def _denials(old: Mapping[tuple[str, object], Denied], new: Mapping[tuple[str, object], Denied]) -> Iterable[Change]:
    for place in sorted(old.keys() | new.keys(), key=repr):
        one, other = old.get(place), new.get(place)
        sides = [None if row is None else f"{row.reason} ({row.source})" for row in (one, other)]
        row = one or other
        if sides[0] != sides[1] and row is not None:
            key = " ".join([*(f"{name}={text}" for name, text in row.key or ()), *_named(row.dtypes)]) or "*"
            yield Change("denied", f"{row.kernel} {key} on {place[0]}: {row.config}", *sides)


def _named(dtypes: Iterable[tuple[str, str]] | None) -> list[str]:
    return [f"{name}:{dtype}" for name, dtype in dtypes or ()]


def _form(entry: Entry, other: Entry) -> str:
    return "dtypes by name" if entry.dtypes is not None else f"dtypes {' '.join(entry.dtype_sequence or ())}"


def _order(entry: Entry, other: Entry) -> str:
    names = [name for name, _ in entry.key or ()]
    if entry.dtypes is not None and other.dtypes is not None:
        names += [name for name, _ in entry.dtypes]
    return " ".join(names)


def _source(entry: Entry, other: Entry) -> str:
    return entry.source_hash or "(unknown)"


def _classes(entry: Entry, other: Entry) -> str:
    if entry.classes is None:
        return "(not probed)"
    groups = sorted(sorted(config.text for config in group) for group in entry.classes)
    # Which candidates they are would fill a page; that they are others must still be seen.
    digest = hashlib.sha256(canonical_json(groups).encode()).hexdigest()[:8]
    return f"{len(groups)} of sizes {', '.join(str(len(group)) for group in groups)} (digest {digest})"


def _evidence(entry: Entry, other: Entry) -> str:
    mine, theirs = ({name: canonical_json(value) for name, value in each.evidence.items()} for each in (entry, other))
    return " ".join(f"{name}={text}" for name, text in sorted(mine.items()) if theirs.get(name) != text)


_TEXTS = {
    "form": _form,
    "order of key": _order,
    "kernel source": _source,
    "bit classes": _classes,
    "evidence": _evidence,
}


# --- journals ---------------------------------------------------------------------------------------------------------


def diff_journals(
    before: Iterable[Journal | Scan], after: Iterable[Journal | Scan], *, rule: Rule = "pooled"
) -> tuple[Change, ...]:
    """What two sets of recordings find differently, each set merged by ``rule``.

    A choice that moved between candidates which both sides hold for tied is a ``near tie``, no ``config``: either side
    might have found the other's. A time has moved where the same choice's median differs by more than :data:`MOVED`.

    Returns:
        Changes with ``what`` in this order: ``config``, ``near tie``, ``winners``, ``candidates``, ``failures``,
        ``time``, ``kernel source``, ``recordings``, ``device``, ``version``.

    Raises:
        JournalError: the journals of one side cannot be merged.
        TuningError: ``rule`` is none.
    """
    journals = list(before), list(after)
    merged = [merge(each, rule=rule) for each in journals]
    old, new = ({(key.arch, key.kernel.qualified_name, key.key.text): key for key in each.keys} for each in merged)
    changes: list[Change] = []
    for place in sorted(old.keys() | new.keys()):
        changes += _key_changes(old.get(place), new.get(place))
    sides = [_surroundings(each) for each in journals]
    for name in sorted(sides[0].keys() | sides[1].keys()):
        if sides[0].get(name) != sides[1].get(name):
            changes.append(Change(name.partition(" ")[0], name, sides[0].get(name), sides[1].get(name)))
    return tuple(sorted(changes, key=lambda change: _ORDER.index(change.what)))


_ORDER = (
    "config",
    "near tie",
    "winners",
    "candidates",
    "failures",
    "time",
    "kernel source",
    "recordings",
    "device",
    "version",
)


def _title(facts: KeyFacts) -> str:
    return f"{facts.kernel.qualified_name} ({facts.key}) on {facts.arch}"


def _key_changes(one: KeyFacts | None, other: KeyFacts | None) -> Iterable[Change]:
    if one is None or other is None:
        facts = one or other
        if facts is not None:
            text = str(facts.choice) if facts.choice is not None else "(no choice)"
            yield Change("config", _title(facts), text if one else None, text if other else None)
        return
    title = _title(one)
    if one.choice != other.choice:
        yield _choice_change(title, one, other)
    winners = [_winners(facts) for facts in (one, other)]
    if winners[0] != winners[1]:
        yield Change("winners", title, *winners)
    for what in ("candidates", "failures"):
        mine, theirs = ({str(item.config) for item in getattr(facts, what)} for facts in (one, other))
        if mine != theirs:
            yield Change(what, title, "; ".join(sorted(mine - theirs)), "; ".join(sorted(theirs - mine)))
    yield from _time_change(title, one, other)
    hashes = [facts.kernel.source_hash or "(unknown)" for facts in (one, other)]
    if hashes[0] != hashes[1]:
        yield Change("kernel source", title, *hashes)


def _choice_change(title: str, one: KeyFacts, other: KeyFacts) -> Change:
    if one.choice is None or other.choice is None:
        sides = [None if facts.choice is None else str(facts.choice) for facts in (one, other)]
        return Change("config", title, *sides)
    tied = [{item.config for item in facts.candidates if item.tied} for facts in (one, other)]
    what = "near tie" if all({one.choice, other.choice} <= each for each in tied) else "config"
    shown = differing_fields([one.choice.text, other.choice.text])
    return Change(what, title, shown[one.choice.text], shown[other.choice.text])


def _winners(facts: KeyFacts) -> str:
    return "; ".join(f"{count} x {config}" for config, count in facts.winners)


def _time_change(title: str, one: KeyFacts, other: KeyFacts) -> Iterable[Change]:
    if one.choice != other.choice or one.chosen is None or other.chosen is None:
        return
    times = one.chosen.median_ms, other.chosen.median_ms
    if max(times) > min(times) * (1 + MOVED):
        ratio = f" ({times[1] / times[0]:.2f} x)" if times[0] > 0 else ""
        yield Change("time", title, f"{times[0]:.4g} ms", f"{times[1]:.4g} ms{ratio}")


def _surroundings(journals: Sequence[Journal | Scan]) -> dict[str, str]:
    """How many recordings there are, where and with what they were made; by the name of a change."""
    values: dict[str, set[str]] = defaultdict(set)
    for journal in journals:
        where = journal.environment
        values["device"].add(where.device)
        for name in ("triton", "torch", "python"):
            values[f"version {name}"].add(getattr(where, name))
        for name, version in where.packages:
            values[f"version package {name}"].add(version)
    texts = {name: ", ".join(sorted(found - {""})) for name, found in values.items()}
    ranks = {journal.environment.rank for journal in journals}
    return {**texts, "recordings": f"{_count(journals, 'journal')} of {_count(ranks, 'rank')}"}


def _count(things: Sized, name: str) -> str:
    return f"{len(things)} {name}{'s' * (len(things) != 1)}"


# --- reading ----------------------------------------------------------------------------------------------------------


def load_side(path: str | os.PathLike[str]) -> Side:
    """What a path names: a table or a folder of them; a journal or several, by folder, glob or prefix; a manifest.

    A folder of tables is laid out as ``<arch>/<package>.json``, or is one ``<arch>`` of these.

    Raises:
        TableError: a table or manifest is malformed.
        JournalError: a journal is damaged, or the path leads to nothing.
    """
    name = os.fspath(path)
    if os.path.isdir(name):
        tables = sorted(found for found in Path(name).glob("*/*.json") if not found.name.startswith("."))
        if tables:
            return [read_table(found) for found in tables]
        files = sorted(found for found in Path(name).glob("*.json") if not found.name.startswith("."))
        if files and not any(found.endswith(SUFFIX) for found in os.listdir(name)):
            return [read_table(found, in_place=False) for found in files]
    elif os.path.isfile(name) and not name.endswith(SUFFIX):
        # Of the files that this library writes each kind says in its first line or two what it is.
        try:
            with open(name, "rb") as stream:
                head = stream.read(64)
        except OSError as error:
            raise TableError(
                f"{name}: expected a file that can be read, found {error.strerror or error}",
                file=name,
                expected="a file that can be read",
                found=str(error),
            ) from error
        if not head.startswith(_JOURNAL_SIGN):
            return read_manifest(name) if _MANIFEST_SIGN in head else [read_table(name, in_place=False)]
    return [scan_journal(found) for found in find_journals([name])]
