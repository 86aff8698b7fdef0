"""Foreign JSON files: read within bounds and with places for errors, written whole or not at all.

A file of another system is as little trusted as any: its size is looked at before it is read, its depth while it is
read; a member that stands twice in one object, NaN, or a number that no double holds is an error; and every error names
the file and the place in it.
"""

from __future__ import annotations

import json
import math
import os
import re
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from tuning._atomic import write_atomically
from tuning._bounded import count_values
from tuning._table_schema import fail
from tuning.spec import Json

__all__ = [
    "MAX_BYTES",
    "MAX_DEPTH",
    "MAX_VALUES",
    "MAX_VALUE_DEPTH",
    "Node",
    "find_files",
    "parse",
    "read_bytes",
    "write_bytes",
]

MAX_BYTES = 16 * 1024 * 1024
"""Largest foreign file that is read. A Megatron-LM table of 40,000 keys takes about as much."""

MAX_VALUES = 1 << 20
"""Most values in one: that table has half as many. Parsing so many takes at worst some 400 MiB of memory."""

MAX_DEPTH = 12
"""Deepest nesting in a foreign file. None of the formats goes deeper than six by itself; key values may be nested."""

MAX_VALUE_DEPTH = 5
"""Deepest nesting in a key value or parameter. Our encoding of it nests up to three times as deep, and a journal takes
sixteen levels."""

_NAME = re.compile(r"[^\W\d]\w*")


class _Constant:
    """Stands for NaN or an infinity, which Python's parser accepts and JSON has not."""

    def __init__(self, text: str) -> None:
        self.text = text


def _quote(text: str) -> str:
    return json.dumps(text if len(text) <= 60 else text[:57] + "...")


def _words(value: object) -> str:
    """A value in words: short whatever it is."""
    if isinstance(value, dict):
        return "an object" if value else "an empty object"
    if isinstance(value, list):
        return "an array" if value else "an empty array"
    if isinstance(value, str):
        return f"the string {_quote(value)}"
    if isinstance(value, int) and value.bit_length() > 200:
        return f"an integer of {value.bit_length()} bits"
    return json.dumps(value)


def _step(where: str, step: str | int) -> str:
    if isinstance(step, int):
        return f"{where}[{step}]"
    return f"{where}.{step}" if _NAME.fullmatch(step) else f"{where}[{_quote(step)}]"


class Node:
    """A value of a document, together with its place.

    Attributes:
        value: the value.
        file: the file that it stands in.
        where: its path in it, such as ``$.kernels["a.b"]``.
    """

    __slots__ = ("file", "value", "where")

    def __init__(self, value: Json, file: str, where: str = "$") -> None:
        self.value = value
        self.file = file
        self.where = where

    @property
    def place(self) -> str:
        """File and path."""
        return f"{self.file}: {self.where}"

    def fail(self, expected: str, found: str | None = None, advice: str = "") -> NoReturn:
        """Raise the error that this value is not what was expected.

        Raises:
            TableError: always.
        """
        fail(self.file, self.where, expected, _words(self.value) if found is None else found, advice)

    def members(self, what: str, needed: Iterable[str] = ()) -> dict[str, Node]:
        """The members of an object that has at least the ``needed`` ones."""
        if type(self.value) is not dict:
            self.fail(what)
        for name in needed:
            if name not in self.value:
                self.fail(f"{what} with the member {_quote(name)}", "no such member")
        return {name: Node(value, self.file, _step(self.where, name)) for name, value in self.value.items()}

    def items(self, what: str) -> list[Node]:
        """The items of an array."""
        if type(self.value) is not list:
            self.fail(what)
        return [Node(value, self.file, _step(self.where, index)) for index, value in enumerate(self.value)]

    def text(self, what: str, pattern: re.Pattern[str] | None = None, *, empty: bool = False) -> str:
        """A string, all of which matches ``pattern``."""
        value = self.value
        if type(value) is not str or (not value and not empty) or (pattern and not pattern.fullmatch(value)):
            self.fail(what)
        return value

    def argument(self) -> Json:
        """A value that a kernel may be given: any, nested at most :data:`MAX_VALUE_DEPTH` levels."""
        if _depth(self.value) > MAX_VALUE_DEPTH:
            self.fail(f"a value nested at most {MAX_VALUE_DEPTH} levels deep", "a deeper one")
        return self.value

    def count(self, what: str, least: int) -> int:
        """An integer of at least ``least``, and no longer than 18 digits."""
        value = self.value
        if type(value) is not int or not least <= value < 10**18:
            self.fail(what)
        return value


def _depth(value: Json) -> int:
    if not isinstance(value, (dict, list)):
        return 0
    return 1 + max(map(_depth, value.values() if isinstance(value, dict) else value), default=0)


def parse(data: bytes, file: str, *, infinite: bool = False) -> Node:
    """The document of a file.

    Args:
        data: its bytes.
        file: its path, for errors.
        infinite: whether ``Infinity``, as Python writes it, is a number here.

    Raises:
        TableError: it is no JSON within the limits; the error says where.
    """
    if len(data) > MAX_BYTES:
        fail(file, "$", f"at most {MAX_BYTES} bytes", "more")
    if count_values(data) > MAX_VALUES:
        fail(file, "$", f"at most {MAX_VALUES} values", "more")
    try:
        text = data.decode("utf-8-sig")
        raw = json.loads(text, object_pairs_hook=tuple, parse_constant=_Constant)
    except UnicodeDecodeError as error:
        fail(file, "$", "UTF-8", f"the byte 0x{data[error.start]:02x} at offset {error.start}")
    except json.JSONDecodeError as error:
        fail(file, "$", "JSON", f"{error.msg} at line {error.lineno} column {error.colno}")
    except RecursionError:
        fail(file, "$", f"values nested at most {MAX_DEPTH} levels deep", "nesting too deep to parse")
    except ValueError as error:  # an integer longer than Python converts
        fail(file, "$", "JSON with integers of reasonable length", str(error).partition(";")[0])
    try:
        return Node(_plain(raw, 0, infinite), file)
    except _Fault as fault:
        where = "$"
        for step in fault.steps:
            where = _step(where, step)
        fail(file, where, fault.expected, fault.found)


class _Fault(Exception):
    """A fault on its way up; each level adds its own step to the path, so that sound files pay nothing for paths."""

    def __init__(self, expected: str, found: str) -> None:
        super().__init__(expected)
        self.expected = expected
        self.found = found
        self.steps: list[str | int] = []

    def inside(self, step: str | int) -> _Fault:
        self.steps.insert(0, step)
        return self


def _plain(raw: Any, depth: int, infinite: bool) -> Json:
    """Pairs to dicts, with every value looked at."""
    kind = type(raw)
    if kind is str:
        return _sound(raw)
    if raw is None or kind is int or kind is bool:
        return raw
    if kind is float:
        if not math.isfinite(raw) and not (infinite and raw > 0):
            raise _Fault("a number that a double can hold", "one that it cannot")
        return raw
    if kind is _Constant:
        if infinite and raw.text == "Infinity":
            return math.inf
        raise _Fault("a JSON value", f"{raw.text}, which is not JSON")
    if depth >= MAX_DEPTH:
        raise _Fault(f"at most {MAX_DEPTH} levels of nesting", "more")
    if kind is list:
        return _plain_items(raw, depth + 1, infinite)
    return _plain_members(raw, depth + 1, infinite)


def _plain_items(raw: list[Any], depth: int, infinite: bool) -> list[Json]:
    items: list[Json] = []
    try:
        for item in raw:
            items.append(_plain(item, depth, infinite))  # noqa: PERF401 (the length says where it stopped)
    except _Fault as fault:
        raise fault.inside(len(items)) from None
    return items


def _plain_members(raw: tuple[tuple[str, Any], ...], depth: int, infinite: bool) -> dict[str, Json]:
    members: dict[str, Json] = {}
    name = ""
    try:
        for name, item in raw:
            if name in members:
                raise _Fault("each member once", "a second member of this name")
            members[_sound(name)] = _plain(item, depth, infinite)
    except _Fault as fault:
        raise fault.inside(name) from None
    return members


def _sound(text: str) -> str:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            raise _Fault("text", "half of a surrogate pair") from None
    return text


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a regular file of at most :data:`MAX_BYTES`.

    Raises:
        TableError: there is no such file, it is something else, or it is larger.
    """
    file = os.fspath(path)
    try:
        # Looked at before it is opened: opening a named pipe would wait for a writer that may never come.
        found = os.stat(file)
        if not stat.S_ISREG(found.st_mode):
            fail(file, "$", "a regular file", "a folder" if stat.S_ISDIR(found.st_mode) else "something else")
        if found.st_size > MAX_BYTES:
            fail(file, "$", f"at most {MAX_BYTES} bytes", str(found.st_size))
        with open(file, "rb") as stream:
            return stream.read(MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        fail(file, "$", "a file that can be read", getattr(error, "strerror", None) or str(error))


def find_files(paths: Iterable[str | os.PathLike[str]], pattern: str, what: str) -> Iterator[str]:
    """The files that paths name: each file as it is, and of each folder those that match ``pattern``, sorted.

    Raises:
        TableError: a path leads to nothing, or no path is given.
    """
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    if not given:
        fail(None, "paths", f"at least one {what}", "none")
    for item in given:
        path = os.fspath(item)
        if not os.path.isdir(path):
            yield path
            continue
        # Hidden files are those of writers and editors.
        inside = sorted(found for found in Path(path).glob(pattern) if not found.name.startswith("."))
        if not inside:
            fail(path, "$", f"a folder with {what} ({pattern})", "none in it")
        yield from map(os.fspath, inside)


def write_bytes(path: Path, data: bytes) -> Path:
    """Write a file whole or not at all, its folder included where that is missing, and return its path.

    Raises:
        TableError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, data)
    except OSError as error:
        fail(os.fspath(path), "$", "a place that can be written", error.strerror or str(error))
    return path
