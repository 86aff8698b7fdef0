"""Table files as they are loaded into a process: checked in full at once, turned into objects kernel by kernel.

The strict reader spends some 40 microseconds on an entry, most of it on objects that a process never looks at, since it
uses a few kernels of a table of thousands of entries. A file in canonical layout has one entry a line, and nearly every
line has the plain shape that one regular expression describes. Such lines are *checked* by the expression, and *parsed*
when their kernel is first asked for. The expression accepts only what the strict reader accepts; a file with a line
that it does not match goes to the strict reader, which alone decides what is an error and says where. Nothing is left
unchecked until a launch.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache

from tuning._table_rows import Entry, TableFile
from tuning._table_schema import attempt, entry_of_text, fail, parse

__all__ = ["LoadedFile", "load"]

# All in ASCII mode, and all narrower than what the strict reader allows.
_NAME = r'"[A-Za-z_]\w*"'
_INTEGER = r"(?:0|-?[1-9]\d{0,17})"
_COUNT = r"[1-9]\d{0,8}"
_NUMBER = r"-?(?:0|[1-9]\d{0,17})(?:\.\d{1,30})?(?:e-?\d{1,2})?"
_STRING = r'"[^"\\\x00-\x1f]*"'
_PLAIN = r'"[^"\\\x00-\x1f,]*"'
_SCALAR = rf"(?:{_PLAIN}|{_INTEGER}|true|false|null)"
_DTYPE = r'"\w+"'
_STRINGS = rf"\[(?:{_STRING}(?:, {_STRING})*)?\]"
# Members of evidence that the recorder, the importers and reports write, in the order in which a canonical file has
# them. Each may stand there once, in this order, so that none can be doubled; a line with any other is the strict
# reader's.
_EVIDENCE = {
    "agreement": _INTEGER,
    "best_ms": _NUMBER,
    "candidates": _INTEGER,
    "confidence": _STRING,
    "date": _STRING,
    "devices": _STRINGS,
    "hosts": _INTEGER,
    "measured": "(?:true|false)",
    "note": _STRING,
    "ranks": _INTEGER,
    "recordings": _INTEGER,
    "regret": rf'\{{"median": {_NUMBER}, "worst": {_NUMBER}\}}',
    "reported_by": _STRING,
    "rule": _STRING,
    "runner_up_ms": f"(?:{_NUMBER}|null)",
    "shared": "(?:true|false)",
    "tied": _INTEGER,
}


def _object(member: str) -> str:
    return rf"(?:(?:{member})(?:, (?:{member}))*)?"


@lru_cache(maxsize=64)
def _line(package: str) -> re.Pattern[str]:
    values, dtypes = _object(f"{_NAME}: {_SCALAR}"), _object(f"{_NAME}: {_DTYPE}")
    sequence = _object(_DTYPE)
    evidence = "".join(rf'(?:"{name}": {value}(?:, (?!\}})|(?=\}})))?' for name, value in _EVIDENCE.items())
    return re.compile(
        rf'\{{"kernel": "({re.escape(package)}(?:\.[\w<>]+)+)", '
        rf'"key": (?:"\*"|\{{({values})\}}, "dtypes": (?:\{{({dtypes})\}}|\[({sequence})\])), '
        rf'"config": \{{"kwargs": \{{({values})\}}, "num_warps": (?:1|2|4|8|16|32|64), "num_stages": (?:0|{_COUNT})'
        rf'(?:, "num_ctas": {_COUNT})?(?:, "maxnreg": {_COUNT})?\}}, '
        r'(?:"source_hash": "[0-9a-f]{8,128}", )?'
        rf'"evidence": \{{(?!\}}){evidence}\}}\}}',
        re.ASCII,
    )


_MEMBER_NAMES = re.compile(r'"(\w+)": ', re.ASCII)


class LoadedFile:
    """One checked file. ``head`` is its table without the entries; these come by kernel."""

    def __init__(self, head: TableFile, lines: Mapping[str, list[str]], entries: Iterable[Entry] = ()) -> None:
        self.head = head
        self._lines = lines
        self._entries: dict[str, tuple[Entry, ...]] = {}
        by_kernel: dict[str, list[Entry]] = {}
        for entry in entries:
            by_kernel.setdefault(entry.kernel, []).append(entry)
        for kernel, found in by_kernel.items():
            self._entries[kernel] = tuple(found)
        self._kernels = (*lines, *self._entries)
        self._table: TableFile | None = None

    @classmethod
    def of(cls, table: TableFile) -> LoadedFile:
        """A file that is in memory already."""
        loaded = cls(replace(table, entries=()), {}, table.entries)
        loaded._table = table
        return loaded

    @property
    def kernels(self) -> tuple[str, ...]:
        """Kernels that have entries."""
        return self._kernels

    def entries(self, kernel: str) -> tuple[Entry, ...]:
        """The entries of one kernel, in the order of the file."""
        entries = self._entries.get(kernel)
        if entries is None:
            lines = self._lines.get(kernel, ())
            entries = tuple(self._made(line) for line in lines)
            self._entries[kernel] = entries
        return entries

    def _made(self, line: str) -> Entry:
        entry = entry_of_text(line, self.head.package, self.head.path, self.head.triton)
        if entry is None:
            fail(self.head.path, "$.entries", "a line that was checked to be read", line[:80], "report this as a bug")
        return entry

    @property
    def table(self) -> TableFile:
        """The whole file."""
        if self._table is None:
            entries = tuple(entry for kernel in self._kernels for entry in self.entries(kernel))
            self._table = replace(self.head, entries=entries)
        return self._table


def load(data: bytes, file: str | None, arch: str, package: str) -> LoadedFile:
    """Check the bytes of a file in full, as :func:`tuning._table_schema.parse` does, and defer the making of entries.

    Raises:
        TableError: anything at all is wrong with them.
    """
    loaded = _scan(data, file, arch, package)
    return loaded if loaded is not None else LoadedFile.of(parse(data, file, arch=arch, package=package))


_START, _END = '\n"entries": [\n', '\n],\n"denied": ['


def _scan(data: bytes, file: str | None, arch: str, package: str) -> LoadedFile | None:
    """The file if it is canonical and sound; None where the strict reader must decide."""
    if not data.isascii():
        return None
    text = data.decode("ascii")
    start, end = text.find(_START), text.rfind(_END)
    if start < 0 or end < start:
        return None
    # What is left when the entries are cut out is a table, and what was cut out is a list of complete objects: together
    # they are the table with these entries.
    head = attempt(text[:start] + '\n"entries": [],\n"denied": [' + text[end + len(_END) :], file, arch, package)
    if head is None:
        return None
    lines: dict[str, list[str]] = {}
    seen: set[int] = set()
    # Dtypes and parameters are few different texts, while keys differ in each line.
    dtypes_of: dict[str | None, frozenset[str] | None] = {None: None}
    parameters = {""}
    match = _line(package).fullmatch
    names = _MEMBER_NAMES.findall
    for line in text[start + len(_START) : end].split(",\n"):
        found = match(line)
        if found is not None:
            kernel, key, dtypes, sequence, kwargs = found.groups()
            if (
                (not key or _each_once(names(key)))
                and (dtypes in dtypes_of or _each_once(names(dtypes or "")))
                and (kwargs in parameters or _each_once(names(kwargs)))
            ):
                parameters.add(kwargs)
                if dtypes not in dtypes_of:
                    dtypes_of[dtypes] = frozenset(_members(dtypes))
                identity = _identity(
                    kernel, None if key is None else _members(key), sequence if dtypes is None else dtypes_of[dtypes]
                )
            else:
                found = None
        if found is None:
            entry = entry_of_text(line, package, file, head.triton)
            if entry is None:
                return None
            kernel, identity = entry.kernel, _identity_of(entry)
        if identity in seen:
            return None
        seen.add(identity)
        if kernel in lines:
            lines[kernel].append(line)
        else:
            lines[kernel] = [line]
    return LoadedFile(head, lines)


def _each_once(names: list[str]) -> bool:
    return len(set(names)) == len(names)


def _members(text: str) -> list[str]:
    return text.split(", ") if text else []


def _identity(kernel: str, key: Iterable[str] | None, dtypes: object) -> int:
    # Members in any order are one identity, and the sets of their texts are then equal. A number, because a hundred
    # thousand small containers would keep the garbage collector busy; two that are equal by accident cost a strict
    # reading of the file and no more.
    return hash((kernel, None if key is None else frozenset(key), dtypes))


def _identity_of(entry: Entry) -> int:
    """The same for an entry as for the line that it would have in plain shape."""
    if entry.key is None:
        return _identity(entry.kernel, None, None)
    key = [f'"{name}": {text}' for name, text in entry.key]
    if entry.dtypes is not None:
        return _identity(entry.kernel, key, frozenset(f'"{name}": "{dtype}"' for name, dtype in entry.dtypes))
    return _identity(entry.kernel, key, ", ".join(f'"{dtype}"' for dtype in entry.dtype_sequence or ()))
