"""The strict reader of manifests: bytes to :class:`Manifest`, or an error that names the place."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NoReturn, get_args

from tuning._bounded import count_values
from tuning._manifest_content import (
    SCHEMA_VERSION,
    AutotunerState,
    AutotunerUse,
    Launch,
    Manifest,
    TableUse,
    digest_of_run,
)
from tuning.errors import TableError
from tuning.spec import SOURCES, Environment, Key, LaunchConfig

__all__ = ["CHOICE_SHAPE", "MAX_BYTES", "Reader"]

MAX_BYTES = 64 << 20
"""Largest manifest that is read. One of 100,000 choices takes about 60 MiB, and some 1.6 GiB of memory to read."""

_MAX_VALUES = 8 << 20  # one of 100,000 choices has half as many; so many take no more memory than that


@dataclass(frozen=True)
class _Optional:
    """Marks a member of a shape that may be left out."""

    shape: Any


_PAIRS = [(str, str)]
_CONFIG = {
    "kwargs": dict,
    "num_warps": (int, None),
    "num_stages": (int, None),
    "num_ctas": _Optional((int, None)),
    "maxnreg": _Optional((int, None)),
    "ir_override": _Optional((str, None)),
    "extra": _Optional(dict),
}
# Of these shapes a type stands for its values, a set for its members, a tuple of types and None for alternatives;
# a list of one shape for any number of it; a list of one tuple for pairs.
CHOICE_SHAPE: dict[str, Any] = {
    "kernel": str,
    "key": {"values": [(str, object)], "dtypes": _PAIRS, "call_order": _Optional([str])},
    "config": _CONFIG,
    "source": frozenset(SOURCES),
    "origin": (str, None),
    "arch": str,
    "detail": str,
    "source_hash": (str, None),
}
"""One choice, here and wherever else choices are written as JSON."""

_SHAPE: dict[str, Any] = {
    "schema_version": int,
    "digest": str,
    "place": {"host": str, "rank": int},
    "run": {
        "autotuners": [
            {
                "kernel": str,
                "candidates": int,
                "key_names": [str],
                "state": frozenset(get_args(AutotunerState)),
                "reason": str,
            }
        ],
        "benchmarks": [(str, int)],
        "choices": [CHOICE_SHAPE],
        "compilers": _PAIRS,
        "deterministic": bool,
        "device": {"arch": str, "multiprocessors": int, "name": str},
        "library": str,
        "mode": frozenset(("auto", "pinned", "record")),
        "notices": _PAIRS,
        "policy": dict,
        "tables": [{"path": (str, None), "arch": str, "package": str, "sha256": str}],
        "versions": {"packages": _PAIRS, "python": str, "torch": str, "triton": str},
        "world_size": int,
    },
}
_WORDS = {str: "a string", int: "an integer", bool: "true or false", dict: "an object", list: "an array", None: "null"}


class Reader:
    """Checks a document against ``_SHAPE`` and builds the manifest."""

    def __init__(self, file: str | None) -> None:
        self._file = file

    def _fail(self, where: str, expected: str, found: object, then: str = "") -> NoReturn:
        shown = found if isinstance(found, str) else json.dumps(found)
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        raise TableError(
            f"manifest {self._file or 'in memory'}: at {where}: expected {expected}, found {shown}{then}",
            file=self._file,
            where=where,
            expected=expected,
            found=shown,
        )

    def manifest(self, content: bytes) -> Manifest:
        """See :func:`tuning.manifest.manifest_from_bytes`."""
        if len(content) > MAX_BYTES:
            self._fail("$", f"at most {MAX_BYTES} bytes", f"{len(content)} or more")
        if count_values(content) > _MAX_VALUES:
            self._fail("$", f"at most {_MAX_VALUES} values", "more")
        try:
            document = json.loads(content, object_pairs_hook=self._object, parse_constant=self._constant)
        except (ValueError, RecursionError) as error:
            # A limit on digits or nesting, bytes that are no text, or a place in the text: all are one line.
            self._fail("$", "a JSON document", str(error).splitlines()[0])
        version = document.get("schema_version") if isinstance(document, dict) else None
        if isinstance(document, dict) and type(version) is int and version != SCHEMA_VERSION:
            self._fail("$.schema_version", str(SCHEMA_VERSION), version, "; read it with the version that wrote it")
        self._check(document, _SHAPE, "$")
        run = document["run"]
        if document["digest"] != digest_of_run(run):
            self._fail(
                "$.digest",
                f"{digest_of_run(run)}, the digest of the rest",
                document["digest"],
                "; the file was changed",
            )
        manifest = self._build(run, document["place"])
        if manifest.run != run:
            # Say, a config that spells out a default, with a digest made to fit: no manifest was ever written so.
            self._fail("$.run", "canonical form", "the same facts in another form")
        return manifest

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members: dict[str, Any] = {}
        for name, value in pairs:
            if name in members:
                self._fail("$", "each member once", f"{json.dumps(name)} twice in one object")
            members[name] = value
        return members

    def _constant(self, text: str) -> NoReturn:
        self._fail("$", "a JSON document", f"{text}, which is not JSON")

    def _check(self, value: Any, shape: Any, where: str) -> None:
        if isinstance(shape, dict):
            self._check(value, dict, where)
            for name in sorted(value.keys() - shape.keys()):
                self._fail(f"{where}.{name}", f"one of the members {', '.join(sorted(shape))}", "an unknown member")
            for name, part in shape.items():
                optional = isinstance(part, _Optional)
                if name in value:
                    self._check(value[name], part.shape if optional else part, f"{where}.{name}")
                elif not optional:
                    self._fail(where, f"an object with the member {json.dumps(name)}", "no such member")
        elif isinstance(shape, list):
            self._check(value, list, where)
            pair = isinstance(shape[0], tuple)
            for place, item in enumerate(value):
                if not pair:
                    self._check(item, shape[0], f"{where}[{place}]")
                    continue
                if type(item) is not list or len(item) != len(shape[0]):
                    self._fail(f"{where}[{place}]", f"an array of {len(shape[0])}", item)
                for inner, part in enumerate(shape[0]):
                    self._check(item[inner], part, f"{where}[{place}][{inner}]")
        elif isinstance(shape, frozenset):
            if type(value) is not str or value not in shape:
                self._fail(where, f"one of {', '.join(sorted(shape))}", value)
        elif isinstance(shape, tuple):
            if not any(value is kind if kind is None else type(value) is kind for kind in shape):
                self._fail(where, " or ".join(_WORDS[kind] for kind in shape), value)
        elif shape is not object and type(value) is not shape:
            self._fail(where, _WORDS[shape], value)

    def _build(self, run: dict[str, Any], place: dict[str, Any]) -> Manifest:
        device, versions = run["device"], run["versions"]
        return Manifest(
            library=run["library"],
            mode=run["mode"],
            deterministic=run["deterministic"],
            policy=run["policy"],
            environment=Environment(
                arch=device["arch"],
                device=device["name"],
                multiprocessors=device["multiprocessors"],
                triton=versions["triton"],
                torch=versions["torch"],
                python=versions["python"],
                packages=tuple((name, version) for name, version in versions["packages"]),
                rank=place["rank"],
                world_size=run["world_size"],
                host=place["host"],
            ),
            compilers=tuple((name, version) for name, version in run["compilers"]),
            tables=tuple(TableUse(**each) for each in run["tables"]),
            choices=tuple(
                Launch(**{**each, "key": Key.from_json(each["key"]), "config": LaunchConfig.from_json(each["config"])})
                for each in run["choices"]
            ),
            benchmarks=tuple((kernel, count) for kernel, count in run["benchmarks"]),
            autotuners=tuple(
                AutotunerUse(**{**each, "key_names": tuple(each["key_names"])}) for each in run["autotuners"]
            ),
            notices=tuple((kind, message) for kind, message in run["notices"]),
        )
