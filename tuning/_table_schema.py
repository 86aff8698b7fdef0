"""The strict reader of table files: bytes to :class:`TableFile`, or an error that names the place.

Hand-written rather than driven by ``tables/schema.json``: it needs no further package at run time, it is fast enough
to check everything whenever a process starts (nothing is left for a launch to trip over), its errors carry exact JSON
paths, and it checks what a JSON Schema cannot say: duplicate members and entries, names that must agree with the place
of the file, encoded values in canonical form. A test holds that the two agree on all that both can express.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise
from typing import Any, NoReturn, TypeVar

from tuning._bounded import count_values
from tuning._table_rows import SCHEMA_VERSION, Denied, Entry, Pairs, TableFile
from tuning.errors import TableError
from tuning.spec import Json, LaunchConfig, canonical_json

__all__ = ["ARCH", "MAX_BYTES", "MAX_DEPTH", "PACKAGE", "attempt", "entry_of_text", "fail", "parse"]

MAX_BYTES = 32 * 1024 * 1024
"""Largest table file that is read: room for 60,000 entries."""

MAX_VALUES = 4 << 20
"""Most values in one: 60,000 entries have less than half as many. Memory goes by them: under 1 GiB at worst."""

MAX_DEPTH = 16
"""Deepest nesting inside one encoded value or one entry's evidence."""

ARCH = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+:-]*")
PACKAGE = re.compile(r"[^\W\d]\w*")
_KERNEL = re.compile(r"[^\s.]+(\.[^\s.]+)+")
_NAME = PACKAGE
_DTYPE = re.compile(r"(?!torch\.)\S+")
_WARPS = tuple(1 << power for power in range(11))
_HASH = re.compile(r"[0-9a-f]{8,128}")


# Files hold a few different names and dtypes, a hundred thousand times.
@lru_cache(maxsize=4096)
def _is_name(text: str) -> bool:
    return _NAME.fullmatch(text) is not None


@lru_cache(maxsize=4096)
def _is_dtype(text: str) -> bool:
    return text.isascii() and _DTYPE.fullmatch(text) is not None


_FILE_MEMBERS = {"schema_version", "arch", "package", "package_version", "triton", "device", "entries", "denied"}
_FILE_OPTIONAL = {"multiprocessors"}
_ENTRY_MEMBERS = {"kernel", "key", "config", "evidence"}
_ENTRY_OPTIONAL = {"dtypes", "source_hash", "classes"}
_DENIED_MEMBERS = {"kernel", "key", "config", "reason", "source"}
_DENIED_OPTIONAL = {"dtypes"}
_CONFIG_MEMBERS = {"kwargs", "num_warps", "num_stages"}
_CONFIG_OPTIONAL = {"num_ctas", "maxnreg", "ir_override", "extra"}
_CONFIG_FIELDS = _CONFIG_MEMBERS | _CONFIG_OPTIONAL | {"pre_hook"}


class _Fault(Exception):
    """A fault on its way up; each level adds its own step to the path, so that sound files pay nothing for paths."""

    def __init__(self, expected: str, found: str, *where: str | int) -> None:
        super().__init__(expected)
        self.expected = expected
        self.found = found
        self.where: list[str | int] = list(where)

    def inside(self, *where: str | int) -> _Fault:
        self.where[:0] = where
        return self

    @property
    def path(self) -> str:
        steps = "$"
        for step in self.where:
            if isinstance(step, int):
                steps += f"[{step}]"
            else:
                steps += f".{step}" if re.fullmatch(r"[^\W\d]\w*", step) else f"[{_quote(step)}]"
        return steps


_Item = TypeVar("_Item")


class _Constant:
    """Stands for NaN or an infinity, which Python's parser accepts and JSON has not."""

    def __init__(self, text: str) -> None:
        self.text = text


def _quote(text: str) -> str:
    return json.dumps(text if len(text) <= 60 else text[:57] + "...")


def _found(value: object) -> str:
    """A parsed value in words: short, and never recursive, for it may be nested as deep as the parser allows."""
    kind = type(value)
    if kind is tuple:
        return "an object" if value else "an empty object"
    if kind is list:
        return "an array" if value else "an empty array"
    if isinstance(value, str):
        return f"the string {_quote(value)}"
    if isinstance(value, _Constant):
        return f"{value.text}, which is not JSON"
    if value is None:
        return "null"
    if kind is bool:
        return "true" if value else "false"
    return f"the number {_quote(str(value))[1:-1]}"


# Objects are parsed to tuples of (name, value) pairs and arrays to lists: the two stay apart, the order of members and
# duplicates survive, and no Python function is called for each object.


def _members(raw: Any, needed: set[str], optional: set[str], what: str) -> dict[str, Any]:
    if type(raw) is not tuple:
        raise _Fault(what, _found(raw))
    members: dict[str, Any] = dict(raw)
    if len(members) != len(raw):
        raise _duplicate(raw)
    if members.keys() != needed:
        for name in members:
            if name not in needed and name not in optional:
                raise _Fault(f"one of the members {', '.join(sorted(needed | optional))}", "an unknown member", name)
        missing = sorted(needed - members.keys())
        if missing:
            raise _Fault(f"{what} with the member {_quote(missing[0])}", "no such member")
    return members


def _duplicate(raw: tuple[tuple[str, Any], ...]) -> _Fault:
    seen = set()
    for name, _ in raw:
        if name in seen:
            return _Fault("each member once", "a second member of this name", name)
        seen.add(name)
    raise AssertionError("unreachable: the caller counted a duplicate")


def _text(raw: Any, what: str, pattern: re.Pattern[str] | None = None, *, empty: bool = False) -> str:
    if type(raw) is not str or (not raw and not empty) or (pattern and not pattern.fullmatch(raw)):
        raise _Fault(what, _found(raw))
    if not raw.isascii():
        try:
            raw.encode()
        except UnicodeEncodeError:
            raise _Fault("text", "half of a surrogate pair") from None
    return raw


def _each(raw: Any, read: Callable[..., _Item], *args: Any) -> list[_Item]:
    if type(raw) is not list:
        raise _Fault("an array", _found(raw))
    items: list[_Item] = []
    try:
        for item in raw:
            items.append(read(item, *args))  # noqa: PERF401 (the length says where it stopped)
    except _Fault as fault:
        raise fault.inside(len(items)) from None
    return items


def _plain(raw: Any, depth: int = 0) -> Json:
    """Any JSON value, to dicts and lists."""
    kind = type(raw)
    if kind is str:
        return _text(raw, "text", empty=True)
    if raw is None or kind is int or kind is bool:
        return raw
    if kind is float:
        if not math.isfinite(raw):
            raise _Fault("a number that a double can hold", "one that it cannot")
        return raw
    if depth >= MAX_DEPTH:
        raise _Fault(f"at most {MAX_DEPTH} levels of nesting", "more")
    if kind is list:
        return _each(raw, _plain, depth + 1)
    if kind is tuple:
        members: dict[str, Json] = {}
        name = ""
        try:
            for name, item in raw:
                _text(name, "a member name", empty=True)
                if name in members:
                    raise _Fault("each member once", "a second member of this name")
                members[name] = _plain(item, depth + 1)
        except _Fault as fault:
            raise fault.inside(name) from None
        return members
    raise _Fault("a JSON value", _found(raw))


def _encoded(raw: Any) -> str:
    """An encoded value (see :mod:`tuning.spec`), to its canonical text."""
    kind = type(raw)
    if kind is int:
        return str(raw)
    return canonical_json(_value(raw, 0))


def _value(raw: Any, depth: int) -> Json:
    kind = type(raw)
    if raw is None or kind is bool or kind is int:
        return raw
    if kind is str:
        return _text(raw, "text", empty=True)
    if depth >= MAX_DEPTH:
        raise _Fault(f"at most {MAX_DEPTH} levels of nesting", "more")
    if kind is tuple and len(raw) == 1:
        ((tag, content),) = raw
        check = _TAGS.get(tag)
        if check is not None:
            try:
                return {tag: check(content, depth + 1)}
            except _Fault as fault:
                raise fault.inside(tag) from None
    if kind is float:
        raise _Fault(f'a float as {{"float": "{raw!r}"}}', _found(raw))
    raise _Fault(f"null, a boolean, an integer, a string, or an object with one of {', '.join(_TAGS)}", _found(raw))


def _float(raw: Any, depth: int) -> Json:
    what = "the repr of a float, as a string"
    try:
        if repr(float(_text(raw, what))) == raw:
            return raw
    except ValueError:
        pass
    raise _Fault(what, _found(raw))


def _values(raw: Any, depth: int) -> list[Json]:
    return _each(raw, _value, depth)


def _named(raw: Any, depth: int) -> Json:
    return _text(raw, "a name")


def _bytes(raw: Any, depth: int) -> Json:
    return _text(raw, "an even number of hexadecimal digits", re.compile(r"(?:[0-9a-f]{2})*"), empty=True)


def _typed(raw: Any, depth: int) -> Json:
    if type(raw) is not list or len(raw) != 2:
        raise _Fault("an array of a type's name and a value", _found(raw))
    name, value = raw
    try:
        name = _text(name, "a type's name")
    except _Fault as fault:
        raise fault.inside(0) from None
    try:
        return [name, _values(value, depth) if type(value) is list else _value(value, depth)]
    except _Fault as fault:
        raise fault.inside(1) from None


def _pair(raw: Any, depth: int) -> list[Json]:
    what = "a pair of an encoded key, as its canonical text, and a value"
    if type(raw) is not list or len(raw) != 2:
        raise _Fault(what, _found(raw))
    text, value = raw
    if type(text) is not str or _canonical_text(text) != text:
        raise _Fault(what, _found(text), 0)
    try:
        return [text, _value(value, depth)]
    except _Fault as fault:
        raise fault.inside(1) from None


def _dict(raw: Any, depth: int) -> Json:
    pairs = _each(raw, _pair, depth)
    for index, (earlier, later) in enumerate(pairwise(pairs)):
        if earlier[0] >= later[0]:
            raise _Fault("pairs sorted by key, each key once", _found(later[0]), index + 1, 0)
    return pairs


def _canonical_text(text: str) -> str | None:
    try:
        return _encoded(_load(text))
    except (_Fault, ValueError, RecursionError):
        return None


_TAGS: dict[str, Callable[[Any, int], Json]] = {
    "float": _float,
    "tuple": _values,
    "list": _values,
    "dict": _dict,
    "bytes": _bytes,
    "dtype": _named,
    "enum": _named,
    "class": _named,
    "function": _named,
    "tensor": _named,
    "opaque": _named,
    "constexpr": _value,
    "numpy": _typed,
    "subclass": _typed,
}
"""Tags of encoded values, with what each holds: all that ``tuning.spec.encode_value`` writes, and nothing else, for an
unknown tag could never match."""


def _pairs(raw: Any, encode: Callable[[Any], str], what: str) -> Pairs:
    if type(raw) is not tuple:
        raise _Fault(what, _found(raw))
    pairs: dict[str, str] = {}
    name = ""
    try:
        for name, value in raw:
            if not _is_name(name):
                raise _Fault("the name of an argument", f"the name {_quote(name)}")
            if name in pairs:
                raise _Fault("each member once", "a second member of this name")
            pairs[name] = encode(value)
    except _Fault as fault:
        raise fault.inside(name) from None
    return tuple(pairs.items())


def _dtype(raw: Any) -> str:
    if type(raw) is str and _is_dtype(raw):
        return raw
    return _text(raw, 'a dtype without its library\'s prefix, such as "bfloat16"', _DTYPE)


def _count(raw: Any, what: str, least: int, *, nullable: bool = True) -> int | None:
    if raw is None and nullable:
        return None
    if type(raw) is not int or raw < least:
        raise _Fault(what, _found(raw))
    return raw


def _field(members: dict[str, Any], name: str, read: Callable[..., Any], *args: Any, **options: Any) -> Any:
    try:
        return read(members[name], *args, **options)
    except _Fault as fault:
        raise fault.inside(name) from None


def _warps(raw: Any) -> int | None:
    # Triton refuses other numbers itself; 1,024 is the limit on threads in a block of every device it compiles for.
    if raw is None or (type(raw) is int and raw in _WARPS):
        return raw
    raise _Fault("a power of two up to 1024, or null", _found(raw))


def _ir_override(raw: Any) -> str | None:
    return None if raw is None else _text(raw, "a file name, or null")


def _extra_value(raw: Any) -> str:
    if raw is None or (type(raw) is int and raw == 0):
        raise _Fault("a value other than null and 0, which mean that the field is not set: leave it out", _found(raw))
    return _encoded(raw)


def _extra(raw: Any) -> Pairs:
    pairs = _pairs(raw, _extra_value, "an object of further config fields")
    for name, _ in pairs:
        if name in _CONFIG_FIELDS:
            raise _Fault(f"{name} in its own place in the config", "it among the further fields", name)
    return pairs


def _config(raw: Any) -> LaunchConfig:
    members = _members(raw, _CONFIG_MEMBERS, _CONFIG_OPTIONAL, "a config, as an object")
    optional = len(members) > len(_CONFIG_MEMBERS)
    return LaunchConfig(
        tuple(sorted(_field(members, "kwargs", _pairs, _encoded, "an object of kernel parameters"))),
        _field(members, "num_warps", _warps),
        _field(members, "num_stages", _count, "an integer of at least 0, or null", 0),
        _field(members, "num_ctas", _count, "an integer of at least 1, or null", 1)
        if optional and "num_ctas" in members
        else 1,
        _field(members, "maxnreg", _count, "an integer of at least 1, or null", 1)
        if optional and "maxnreg" in members
        else None,
        _field(members, "ir_override", _ir_override) if optional and "ir_override" in members else None,
        tuple(sorted(_field(members, "extra", _extra))) if optional and "extra" in members else (),
    )


_EVIDENCE: dict[str, tuple[type | tuple[type, ...], str]] = {
    "reported_by": (str, "a string"),
    "measured": (bool, "true or false"),
    "date": (str, "a string"),
    "note": (str, "a string"),
    "ranks": (int, "an integer"),
    "best_ms": ((int, float), "a number of milliseconds"),
    "runner_up_ms": ((int, float, type(None)), "a number of milliseconds, or null"),
    "probe": (dict, "an object that says what the bit classes rest on"),
}


def _evidence(raw: Any) -> dict[str, Json]:
    if type(raw) is not tuple or not raw:
        raise _Fault("an object that says who measured or reported the entry", _found(raw))
    members: dict[str, Json] = _plain(raw)
    for name, (kinds, what) in _EVIDENCE.items():
        if name in members:
            value = members[name]
            if not isinstance(value, kinds) or (isinstance(value, bool) and kinds is not bool):
                raise _Fault(what, _found(value), name)
    return members


def _kernel(raw: Any, package: str) -> str:
    kernel = _text(raw, "a kernel's module and qualified name, joined by a dot", _KERNEL)
    if not kernel.startswith(package + "."):
        raise _Fault(f"a kernel of {package}, the package of this file", _found(raw))
    return kernel


def _key(raw: Any) -> Pairs | None:
    if raw == "*" and type(raw) is str:
        return None
    return _pairs(raw, _encoded, 'an object of key arguments, or "*"')


def _class(raw: Any) -> tuple[LaunchConfig, ...]:
    if not raw:
        raise _Fault("an array of at least one config", _found(raw))
    return tuple(_each(raw, _config))


def _classes(raw: Any, chosen: LaunchConfig) -> tuple[tuple[LaunchConfig, ...], ...]:
    classes = tuple(_each(raw, _class))
    seen: set[LaunchConfig] = set()
    for index, group in enumerate(classes):
        for position, config in enumerate(group):
            if config in seen:
                raise _Fault("each config in one class", "a config that stands in one already", index, position)
            seen.add(config)
    if chosen not in seen:
        raise _Fault("the entry's own config in one of the classes", "it in none")
    return classes


def _entry(raw: Any, package: str, origin: str | None, triton: str) -> Entry:
    members = _members(raw, _ENTRY_MEMBERS, _ENTRY_OPTIONAL, "an entry, as an object")
    kernel = _field(members, "kernel", _kernel, package)
    key = _field(members, "key", _key)
    dtypes: Pairs | None = None
    sequence: tuple[str, ...] | None = None
    if key is None:
        if "dtypes" in members:
            raise _Fault('no dtypes beside the key "*"', _found(members["dtypes"]), "dtypes")
    elif "dtypes" not in members:
        raise _Fault('an entry with the member "dtypes", or the key "*"', "no such member")
    elif type(members["dtypes"]) is list:
        sequence = tuple(_field(members, "dtypes", _each, _dtype))
    else:
        dtypes = _field(members, "dtypes", _pairs, _dtype, "an object of dtypes by argument, or an array of dtypes")
    config = _field(members, "config", _config)
    source_hash = None
    if "source_hash" in members:
        source_hash = _field(members, "source_hash", _text, "8 to 128 hexadecimal digits", _HASH)
    classes = _field(members, "classes", _classes, config) if "classes" in members else None
    evidence = _field(members, "evidence", _evidence)
    return Entry(kernel, key, dtypes, sequence, config, evidence, source_hash, classes, origin, triton)


def _denied(raw: Any, package: str, origin: str | None) -> Denied:
    members = _members(raw, _DENIED_MEMBERS, _DENIED_OPTIONAL, "a denied config, as an object")
    dtypes = None
    if "dtypes" in members:
        dtypes = _field(members, "dtypes", _pairs, _dtype, "an object of dtypes by argument")
    return Denied(
        _field(members, "kernel", _kernel, package),
        _field(members, "config", _config),
        _field(members, "key", _key),
        _field(members, "reason", _text, "what is wrong with the config, in words"),
        _field(members, "source", _text, "who says so, in words"),
        origin,
        dtypes,
    )


def _rows(raw: Any, name: str, read: Callable[..., Any], *args: Any) -> tuple[Any, ...]:
    rows = _each(raw, read, *args)
    first: dict[object, int] = {}
    for index, row in enumerate(rows):
        earlier = first.setdefault(row.identity, index)
        if earlier != index:
            raise _Fault("one row for each kernel and key", f"the same as in $.{name}[{earlier}]", index)
    return tuple(rows)


def _version(raw: Any) -> None:
    if type(raw) is int and raw > SCHEMA_VERSION:
        raise _Fault(f"{SCHEMA_VERSION}, the newest that this library reads (upgrade it)", _found(raw))
    if type(raw) is not int or raw != SCHEMA_VERSION:
        raise _Fault(str(SCHEMA_VERSION), _found(raw))


def _table(raw: Any, file: str | None, arch: str | None, package: str | None) -> TableFile:
    # The version comes first: a file of another version may differ in everything else.
    if type(raw) is tuple:
        for name, value in raw:
            if name == "schema_version":
                try:
                    _version(value)
                except _Fault as fault:
                    raise fault.inside("schema_version") from None
    members = _members(raw, _FILE_MEMBERS, _FILE_OPTIONAL, "a table, as an object")
    its_arch = _field(members, "arch", _text, "the name of an arch, such as sm90", ARCH)
    if arch is not None and its_arch != arch:
        raise _Fault(f"{_quote(arch)}, the folder that the file lies in", _found(its_arch), "arch")
    its_package = _field(members, "package", _text, "the name of a top-level package", PACKAGE)
    if package is not None and its_package != package:
        raise _Fault(f"{_quote(package)}, as in the name of the file", _found(its_package), "package")
    triton = _field(members, "triton", _text, "a string", empty=True)
    return TableFile(
        its_arch,
        its_package,
        _field(members, "package_version", _text, "a string", empty=True),
        triton,
        _field(members, "device", _text, "a string", empty=True),
        _field(members, "entries", _rows, "entries", _entry, its_package, file, triton),
        _field(members, "denied", _rows, "denied", _denied, its_package, file),
        file,
        _field(members, "multiprocessors", _count, "an integer of at least 0", 0, nullable=False)
        if "multiprocessors" in members
        else 0,
    )


def _load(text: str) -> Any:
    return json.loads(text, object_pairs_hook=tuple, parse_constant=_Constant)


def fail(file: str | None, where: str | None, expected: str, found: str, advice: str = "") -> NoReturn:
    """Raise the one error that a table file can cause; ``where`` is None if it is the file or folder itself."""
    place = ": ".join(filter(None, (file or "table", where)))
    message = f"{place}: expected {expected}, found {found}" + (f"; {advice}" if advice else "")
    raise TableError(message, file=file, where=where, expected=expected, found=found)


def entry_of_text(text: str, package: str, file: str | None, triton: str) -> Entry | None:
    """The entry that is the whole of a text, or None where there is any fault."""
    try:
        return _entry(_load(text), package, file, triton)
    except (_Fault, ValueError, RecursionError):
        return None


def attempt(text: str, file: str | None, arch: str, package: str) -> TableFile | None:
    """What :func:`parse` returns, or None where it raises an error."""
    try:
        return _table(_load(text), file, arch, package)
    except (_Fault, ValueError, RecursionError):
        return None


def parse(data: bytes, file: str | None = None, *, arch: str | None = None, package: str | None = None) -> TableFile:
    """Check the bytes of a table file in full and return what they hold.

    Args:
        data: the bytes.
        file: their path, for errors and as the origin of entries.
        arch, package: what the header must say; None where the place of the file does not tell.

    Raises:
        TableError: anything at all is wrong with them.
    """
    if len(data) > MAX_BYTES:
        fail(file, "$", f"at most {MAX_BYTES} bytes", str(len(data)), "split the table by package")
    if count_values(data) > MAX_VALUES:
        fail(file, "$", f"at most {MAX_VALUES} values", "more", "split the table by package")
    if data.startswith(b"\xef\xbb\xbf"):
        fail(file, "$", "UTF-8 without a byte order mark", "a byte order mark", "save the file without it")
    try:
        raw = _load(data.decode())
    except UnicodeDecodeError as error:
        fail(file, "$", "UTF-8", f"the byte 0x{data[error.start]:02x} at offset {error.start}")
    except json.JSONDecodeError as error:
        fail(file, "$", "JSON", f"{error.msg} at line {error.lineno} column {error.colno}")
    except RecursionError:
        fail(file, "$", f"values nested at most {MAX_DEPTH} levels deep", "nesting too deep to parse")
    except ValueError as error:  # an integer longer than Python converts
        fail(file, "$", "JSON with integers of reasonable length", str(error).partition(";")[0])
    try:
        return _table(raw, file, arch, package)
    except _Fault as fault:
        fail(file, fault.path, fault.expected, fault.found)
