"""The bodies of a journal's frames: records and environments to MessagePack, and back with every field checked.

A record keeps kernel, key and candidates apart from the measurements, as MessagePack inside MessagePack: those bytes
are equal on every rank, so a reader of thousands of files decodes and checks them once.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from functools import lru_cache
from typing import Any

import msgpack

from tuning._journal_frames import MAX_BODY
from tuning._journal_measurements import Identity, Measurement
from tuning.errors import JournalError
from tuning.spec import CandidateTiming, Environment, Json, Kernel, Key, LaunchConfig, TuningRecord, canonical_json

__all__ = [
    "MAX_DEPTH",
    "MAX_ITEMS",
    "SCHEMA_VERSION",
    "Malformed",
    "decode",
    "encode_environment",
    "encode_record",
]

SCHEMA_VERSION = 1
"""Version of the bodies. It changes when an older reader could not read a newer file."""

MAX_ITEMS = 4096
"""Most candidates, key values or packages in one record."""

MAX_DEPTH = 16
"""Deepest nesting of a key value, a config parameter or a specialization; tables take no deeper one either."""

_MAX_ERROR_TEXT = 1000
_FEWEST_KEPT = 64  # of a record too long for a frame; less would say little
# Kernel and arch name the file that a merge writes, so neither may be able to be a path elsewhere.
_ARCH = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:+-]*")
_KERNEL = re.compile(r"[^\W\d]\w*(\.[^\s.]+)+")
_HASH = re.compile(r"[0-9a-f]{8,128}")


class Malformed(ValueError):
    """A body whose checksum is right and whose content is not what this schema says."""


def _pack(value: Json) -> bytes:
    return bytes(msgpack.packb(value, use_bin_type=True, strict_types=True))


def encode_environment(environment: Environment, path: str) -> bytes:
    """The body of a frame that says where the records behind it were taken, for the journal at ``path``.

    Raises:
        JournalError: a reader would refuse it.
    """
    values = {field.name: getattr(environment, field.name) for field in fields(Environment)}
    try:
        values["packages"] = [list(pair) for pair in environment.packages]
        body = _pack({"kind": "journal", "schema": SCHEMA_VERSION, "environment": values})
        decode(body)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise JournalError(
            f"journal {path}: this environment cannot be written: {error}", file=path, permanent=True
        ) from error
    return body


def _config_json(config: LaunchConfig) -> Json:
    values = {field.name: getattr(config, field.name) for field in fields(LaunchConfig)}
    return {**values, "kwargs": [list(p) for p in config.kwargs], "extra": [list(p) for p in config.extra]}


def encode_record(record: TuningRecord, path: str) -> tuple[bytes, str]:
    """The body of a record's frame, for the journal at ``path``, and what was left out of it; empty: nothing was.

    A record that a reader would refuse as it is goes without its slower candidates, as far as it is they that are too
    many, and without its specialization: its note says so. What identifies it is never left out.

    Raises:
        JournalError: a reader would refuse it even so; it is ``permanent``.
    """
    first: Exception | None = None
    for attempt, left_out in _ever_less(record):
        try:
            body = _encode_whole(attempt)
        except Exception as error:  # whatever its parts raise that are not what they should be
            first = first or error
            continue
        return body, f"{left_out}: {first}" if left_out else ""
    raise JournalError(
        f"journal {path}: the record of kernel {record.kernel.qualified_name!r} cannot be written: {first}",
        file=path,
        permanent=True,
    ) from first


def _ever_less(record: TuningRecord) -> Iterator[tuple[TuningRecord, str]]:
    """The record, and what is left of it with ever more left out, each with words for what is missing."""
    bare = replace(record, specialization=None)
    wholes = [(record, ""), (bare, "its specialization is left out")][: 1 + (record.specialization is not None)]
    yield from ((_noted(whole, said), said) for whole, said in wholes)
    count = len(record.timings)
    most = MAX_ITEMS - 1  # the winner, should it be none of those that are kept, is one more
    while most >= _FEWEST_KEPT and count > _FEWEST_KEPT:
        if most < count:
            for whole, said in wholes:
                less = f"of its {count} candidates the {most} fastest are kept"
                said = f"{less}, and {said}" if said else less
                yield _noted(replace(whole, timings=_fastest(record.timings, most)), said), said
        most //= 2


def _noted(record: TuningRecord, said: str) -> TuningRecord:
    return replace(record, note="; ".join(filter(None, (record.note, said)))) if said else record


def _fastest(timings: Sequence[CandidateTiming], most: int) -> tuple[CandidateTiming, ...]:
    """The fastest so many, in their order; those that failed are the slowest."""

    def slowness(at: int) -> float:
        times = timings[at].times_ms
        return times[0] if times is not None and _usable(times) else math.inf

    kept = sorted(sorted(range(len(timings)), key=slowness)[:most])
    return tuple(timings[at] for at in kept)


def _encode_whole(record: TuningRecord) -> bytes:
    measurement = Measurement.of(record)
    body = _pack(_record_json(measurement, _MAX_ERROR_TEXT))
    if len(body) > MAX_BODY:
        body = _pack(_record_json(measurement, 80))
    if len(body) > MAX_BODY:
        raise ValueError(f"it takes {len(body)} bytes, more than the {MAX_BODY} of a frame")
    decode(body)
    return body


def _record_json(measurement: Measurement, longest: int) -> Json:
    identity = measurement.identity
    times: list[list[float] | None] = []
    errors: list[list[Any]] = []
    for index, values in enumerate(measurement.times):
        usable = values is not None and _usable(values)
        times.append([float(value) for value in values or ()] if usable else None)
        error = measurement.errors.get(index)
        if error is None and values is not None and not usable:
            error = f"times {tuple(values)} are no finite numbers from 0 up"
        if error is not None:
            errors.append([index, _one_line(error, longest)])
    specialization = identity.specialization
    packed = {
        "kernel": identity.kernel.qualified_name,
        "source_hash": identity.kernel.source_hash,
        "arch": identity.arch,
        "values": [list(pair) for pair in identity.key.values],
        "dtypes": [list(pair) for pair in identity.key.dtypes],
        "call_order": list(identity.key.call_order),
        "configs": [_config_json(config) for config in identity.configs],
        "specialization": None if specialization is None else canonical_json(specialization),
    }
    return {
        "kind": "record",
        "identity": _pack(packed),
        "times": times,
        "errors": errors,
        "winner": measurement.winner,
        "shared": measurement.shared,
        "note": _one_line(measurement.note, longest),
    }


def _usable(times: Iterable[float]) -> bool:
    values = list(times)
    return bool(values) and all(math.isfinite(value) and value >= 0 for value in values)


def _one_line(text: str, longest: int) -> str:
    line = " ".join(text.encode("utf-8", "backslashreplace").decode().split())
    return line if len(line) <= longest else line[: longest - 3] + "..."


def _unpack(body: bytes) -> Any:
    try:
        return msgpack.unpackb(
            body,
            raw=False,
            strict_map_key=True,
            max_str_len=MAX_BODY,
            max_bin_len=MAX_BODY,
            max_array_len=MAX_ITEMS,
            max_map_len=MAX_ITEMS,
            max_ext_len=0,
        )
    except (ValueError, TypeError, RecursionError, OverflowError, msgpack.UnpackException) as error:
        raise Malformed(f"no MessagePack within the limits ({type(error).__name__}: {error})") from error


def _members(value: Any, what: str, names: tuple[str, ...]) -> list[Any]:
    """The members of a map that must have exactly these names."""
    if type(value) is not dict or value.keys() != set(names):
        found = sorted(value) if type(value) is dict else type(value).__name__
        raise Malformed(f"{what} must be a map of {', '.join(names)}, found {str(found)[:200]}")
    return [value[name] for name in names]


def _typed(value: Any, what: str, *kinds: type) -> Any:
    if type(value) not in kinds:
        expected = " or ".join("nil" if kind is type(None) else kind.__name__ for kind in kinds)
        raise Malformed(f"{what} must be {expected}, found {str(value)[:80]!r} ({type(value).__name__})")
    return value


def _pairs(value: Any, what: str) -> tuple[tuple[str, str], ...]:
    for pair in _typed(value, what, list):
        if type(pair) is not list or len(pair) != 2 or type(pair[0]) is not str or type(pair[1]) is not str:
            raise Malformed(f"{what} must be a list of pairs of strings, found {str(pair)[:80]!r}")
    if len({name for name, _ in value}) != len(value):
        raise Malformed(f"{what} names something twice: {str([name for name, _ in value])[:200]}")
    return tuple((name, text) for name, text in value)


def _refuse_number(text: str) -> Any:
    raise ValueError(f"{text} is no encoded value")


def _json(text: str, what: str, *, floats: bool = False) -> Json:
    """The value of canonical JSON text, nested no deeper than :data:`MAX_DEPTH`."""
    refuse = None if floats else _refuse_number
    try:
        value = json.loads(text, parse_float=refuse, parse_constant=_refuse_number)
        level, depth = [value], 0
        while level := [item for item in level if type(item) in (dict, list)]:
            depth += 1
            if depth > MAX_DEPTH:
                raise ValueError(f"nested deeper than {MAX_DEPTH}")
            inner = (item.values() if type(item) is dict else item for item in level)
            level = list(itertools.chain.from_iterable(inner))
        if canonical_json(value) != text:
            raise ValueError("not in canonical form")
    except (ValueError, RecursionError) as error:
        raise Malformed(f"{what} holds {text[:80]!r}, which is no canonical JSON text: {error}") from error
    return value


def _encoded(value: Any, what: str) -> tuple[tuple[str, str], ...]:
    pairs = _pairs(value, what)
    for name, text in pairs:
        _json(text, f"{what}.{name}")
    return pairs


_CONFIG_FIELDS = tuple(field.name for field in fields(LaunchConfig))
_CONFIG_INTS = ("num_warps", "num_stages", "num_ctas", "maxnreg")


def _config(value: Any) -> LaunchConfig:
    data = dict(zip(_CONFIG_FIELDS, _members(value, "config", _CONFIG_FIELDS), strict=True))
    for name in _CONFIG_INTS:
        _typed(data[name], f"config.{name}", int, type(None))
    _typed(data["ir_override"], "config.ir_override", str, type(None))
    for name in ("kwargs", "extra"):
        data[name] = _encoded(data[name], f"config.{name}")
        if data[name] != tuple(sorted(data[name])):
            raise Malformed(f"config.{name} must be sorted by name")
    return LaunchConfig(**data)


_IDENTITY = ("kernel", "source_hash", "arch", "values", "dtypes", "call_order", "configs", "specialization")


def _check_arch(arch: str) -> str:
    if not _ARCH.fullmatch(arch):
        raise Malformed(f"arch must be a name such as sm90, found {arch[:80]!r}")
    return arch


@lru_cache(maxsize=4096)
def _identity(packed: bytes) -> Identity:
    members = _members(_unpack(packed), "identity", _IDENTITY)
    kernel, source_hash, arch, values, dtypes, call_order, configs, specialization = members
    name = _typed(kernel, "kernel", str)
    if not (_KERNEL.fullmatch(name) and name.isprintable()):
        raise Malformed(f"kernel must be a dotted name such as package.module.function, found {name[:80]!r}")
    if source_hash is not None and not _HASH.fullmatch(_typed(source_hash, "source_hash", str, type(None))):
        raise Malformed(f"source_hash must be 8 to 128 lower-case hex digits, found {source_hash[:80]!r}")
    for argument in _typed(call_order, "call_order", list):
        _typed(argument, "call_order", str)
    if specialization is not None:
        specialization = _json(_typed(specialization, "specialization", str), "specialization", floats=True)
    return Identity(
        Kernel(name, source_hash),
        Key(_encoded(values, "values"), _pairs(dtypes, "dtypes"), tuple(call_order)),
        _check_arch(_typed(arch, "arch", str)),
        tuple(_config(config) for config in _typed(configs, "configs", list)),
        specialization,
    )


_RECORD = ("kind", "identity", "times", "errors", "winner", "shared", "note")


def _record(data: dict[str, Any]) -> Measurement:
    _, packed, times, errors, winner, shared, note = _members(data, "record", _RECORD)
    identity = _identity(_typed(packed, "identity", bytes))
    configs = identity.configs
    if type(times) is not list or not len(times) <= len(configs) <= len(times) + 1:
        raise Malformed(f"times must be a list with one item for each of {len(configs)} candidates")
    if type(winner) is not int or not 0 <= winner < len(configs):
        raise Malformed(f"winner must be the index of one of {len(configs)} candidates, found {str(winner)[:80]}")
    measured = times if None not in times else [item for item in times if item is not None]
    if measured:
        if set(map(type, measured)) != {list} or not all(measured):
            raise Malformed("times must hold lists of numbers, or nil for a candidate that failed")
        flat = list(itertools.chain.from_iterable(measured))
        if set(map(type, flat)) != {float} or not all(map(math.isfinite, flat)) or min(flat) < 0:
            raise Malformed("times must be finite floats from 0 up")
    reasons = _reasons(_typed(errors, "errors", list), len(times)) if errors != [] else {}
    return Measurement(identity, times, reasons, winner, _typed(shared, "shared", bool), _typed(note, "note", str))


def _reasons(errors: list[Any], candidates: int) -> dict[int, str]:
    reasons: dict[int, str] = {}
    for item in errors:
        if type(item) is not list or len(item) != 2 or type(item[0]) is not int or type(item[1]) is not str:
            raise Malformed(f"errors must be pairs of an index and a text, found {str(item)[:80]!r}")
        if not 0 <= item[0] < candidates or item[0] in reasons:
            raise Malformed(f"errors must name each candidate at most once, found index {item[0]}")
        reasons[item[0]] = item[1]
    return reasons


_ENVIRONMENT_FIELDS = tuple(field.name for field in fields(Environment))
_ENVIRONMENT_COUNTS = ("multiprocessors", "rank", "world_size")


def _environment(data: dict[str, Any]) -> Environment:
    schema = data.get("schema")
    if type(schema) is int and schema > SCHEMA_VERSION:
        raise Malformed(
            f"schema {schema} is newer than {SCHEMA_VERSION}, the newest that this version reads: update triton-tuning"
        )
    if type(schema) is not int or schema != SCHEMA_VERSION:
        raise Malformed(f"schema must be {SCHEMA_VERSION}, found {str(schema)[:80]}")
    _, _, values = _members(data, "head", ("kind", "schema", "environment"))
    environment = dict(zip(_ENVIRONMENT_FIELDS, _members(values, "environment", _ENVIRONMENT_FIELDS), strict=True))
    for name, value in environment.items():
        if name == "packages":
            environment[name] = _pairs(value, "environment.packages")
        elif name in _ENVIRONMENT_COUNTS:
            if _typed(value, f"environment.{name}", int) < 0:
                raise Malformed(f"environment.{name} must not be negative, found {value}")
        else:
            _typed(value, f"environment.{name}", str)
    if environment["arch"]:
        _check_arch(environment["arch"])
    return Environment(**environment)


def decode(body: bytes) -> Environment | Measurement:
    """What a body says, checked field by field.

    Raises:
        Malformed: it is not of this schema.
    """
    data = _unpack(body)
    kind = data.get("kind") if type(data) is dict else None
    if kind == "record":
        return _record(data)
    if kind == "journal":
        return _environment(data)
    raise Malformed(f"kind must be 'journal' or 'record', found {str(kind)[:80]!r}")
