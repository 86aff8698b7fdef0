"""FLA's config folders (``FLA_CONFIG_DIR``), read and written. Facts: fla-core 0.6.0, ``fla/ops/utils/cache.py``.

A folder holds ``<bare kernel name>.json``: ``autotune_entries``, keyed by the MD5 of the compact JSON of a key, each
with that ``autotune_key`` (values in order of declaration, then ``str`` of the dtypes in the order of the call) and a
``config``; ``default_config``; and, for information only, ``triton_version`` and ``kernel_name``. A file without
``autotune_entries`` may be a config by itself, which is then the default.

What FLA makes of it depends on ``FLA_CACHE_MODE``:

==============  =====================================================================================
``disabled``    nothing is read (this is the default)
``strict``      the entry with the key's hash
``fuzzy``       that, else the first entry whose key differs in numbers only
``full``        that, else ``default_config``, else the file as a config
``default``     ``default_config`` alone
``always``      the same, read again at each launch
==============  =====================================================================================

Our wildcard is ``default_config``, and an exact entry one of ``autotune_entries``. The fuzzy rule has no counterpart:
what a key without an entry gets is decided here by ``on_miss``. Reading takes a mode to say what FLA would use of the
folder; writing takes one to say what FLA will not use of what is written.

The files know bare names, of which twelve stand for several kernels of FLA itself. Reading leaves such a file out, as a
loss, unless a mapping says which one is meant; writing two kernels into one file is noted, as FLA would serve each with
the entries of both.

Only autotuners of FLA's own class read the folder: those under ``fla_cache_autotune`` (62 decorators in the source of
fla-core 0.6.0), and those under ``triton.autotune`` (199) if ``configure_fla_cache_autotune()`` was called before their
import. What is written for another kernel is noted as not read; so is what could not be looked at, for want of an
inventory.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from tuning.errors import TuningError
from tuning.interop._configs import NAME, config_to_json, read_config
from tuning.interop._documents import Node, find_files, parse, read_bytes, write_bytes
from tuning.interop._known import KnownKernels
from tuning.interop._result import Exported, Imported, Losses
from tuning.interop._rows import (
    Rows,
    call_sequences,
    check_arch,
    entry_of,
    entry_place,
    list_lost_rows,
    python_key,
    raw_key,
)
from tuning.interop._values import Unportable, decode
from tuning.spec import Json, Kernel, LaunchConfig
from tuning.tables import Entry, TableFile

__all__ = ["FlaMode", "key_hash", "parse_file", "read", "write"]

FlaMode = Literal["disabled", "strict", "fuzzy", "full", "default", "always"]
"""A value of ``FLA_CACHE_MODE``."""

_MEMBERS = ("autotune_entries", "default_config", "triton_version", "kernel_name")
_SYSTEM = "FLA"
_CLASS = "fla.ops.utils.cache.CachedAutotuner"


def _check_mode(mode: str) -> None:
    if mode not in get_args(FlaMode):
        raise TuningError(f"mode: expected one of {', '.join(get_args(FlaMode))}, found {mode!r}")


def key_hash(key: Sequence[Json]) -> str:
    """The name of an entry: MD5 of the key's compact JSON."""
    text = json.dumps(key, separators=(",", ":"), sort_keys=True)
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


# --- reading ----------------------------------------------------------------------------------------------------------


def read(
    paths: Iterable[str | os.PathLike[str]], known: KnownKernels, arch: str | None, *, mode: FlaMode = "full"
) -> Imported:
    """Read files, and all files of folders.

    Args:
        paths: files and folders.
        known: has the kernels' qualified names and the names of their key arguments.
        arch: what the folder is for; FLA names it by the GPU, if at all.
        mode: take over what FLA uses in this mode; ``full`` is all that a file holds.

    Raises:
        TableError: a file is none of FLA's, or ``arch`` is missing.
        TuningError: ``mode`` is none.
    """
    _check_mode(mode)
    losses = Losses()
    rows = Rows(check_arch(arch, "fla"), losses)
    for path in find_files(paths, "*.json", "FLA config files"):
        if mode == "disabled":
            losses.add("mode", path, "FLA reads no file in the mode disabled")
        else:
            _read_file(parse(read_bytes(path), path), known, losses, rows, mode)
    return Imported(rows.tables(), losses.all())


def parse_file(data: bytes, file: str, known: KnownKernels, arch: str, *, mode: FlaMode = "full") -> Imported:
    """Read the bytes of one file; its name is that of the kernel.

    Raises:
        TableError: they are none of FLA's.
    """
    losses = Losses()
    rows = Rows(arch, losses)
    _read_file(parse(data, file), known, losses, rows, mode)
    return Imported(rows.tables(), losses.all())


def _read_file(document: Node, known: KnownKernels, losses: Losses, rows: Rows, mode: FlaMode) -> None:
    members = document.members("a config file, as an object")
    bare = os.path.basename(document.file).removesuffix(".json")
    kernel = known.resolve(bare, document, losses)
    if kernel is None:
        return
    said = members.get("kernel_name")
    if said is not None and said.value not in (None, bare):
        losses.add("header", said.place, f"the file says another kernel than its name, which FLA goes by: {bare[:80]}")
    version = members.get("triton_version")
    triton = version.text("a version, or null", empty=True) if version is not None and version.value is not None else ""
    evidence = {"reported_by": f"FLA config file {os.path.basename(document.file)}", "measured": False}
    entries, default = members.get("autotune_entries"), members.get("default_config")
    raw = (entries is None or entries.value is None) and (default is None or default.value is None)
    if raw and "kwargs" in members:
        _read_default(document, kernel, evidence, losses, rows, triton, mode, raw=True)
        return
    for name in members:
        if name not in _MEMBERS:
            losses.add("unknown_member", members[name].place, f"the member {name[:80]!r} of a config file is not read")
    if entries is not None and entries.value is not None:
        _read_entries(entries, kernel, known, evidence, losses, rows, triton, mode)
    if default is not None and default.value is not None:
        _read_default(default, kernel, evidence, losses, rows, triton, mode)


def _read_default(
    node: Node,
    kernel: str,
    evidence: Json,
    losses: Losses,
    rows: Rows,
    triton: str,
    mode: FlaMode,
    *,
    raw: bool = False,
) -> None:
    config = read_config(node, losses)
    if mode in ("strict", "fuzzy") or (raw and mode != "full"):
        losses.add("mode", node.place, f"FLA does not use {'a bare config' if raw else 'it'} in the mode {mode}")
        return
    rows.add(Entry(kernel, None, None, None, config, evidence), node.place, triton)


def _read_entries(
    node: Node,
    kernel: str,
    known: KnownKernels,
    evidence: Json,
    losses: Losses,
    rows: Rows,
    triton: str,
    mode: FlaMode,
) -> None:
    entries = node.members("an object of entries")
    for digest, entry in entries.items():
        members = entry.members("an entry, as an object", ("config",))
        for name in members:
            if name not in ("config", "autotune_key"):
                losses.add("unknown_member", members[name].place, f"the member {name[:80]!r} of an entry is not read")
        config = read_config(members["config"], losses)
        key = members.get("autotune_key")
        if key is None or key.value is None:
            losses.add("unnamed_key", entry.place, "an entry without its autotune_key cannot be taken over")
            continue
        found = raw_key(key, kernel, known, losses)
        if found is None:
            continue
        if key_hash(key.value) != digest:
            losses.add(
                "lookup", entry.place, "its name is not the hash of its key, so FLA does not find it: it is left out"
            )
            continue
        if mode in ("default", "always"):
            losses.add("mode", entry.place, f"FLA does not use it in the mode {mode}")
            continue
        rows.add(entry_of(kernel, *found, config, evidence, known), entry.place, triton)
    if mode in ("fuzzy", "full") and entries:
        losses.add(
            "lookup",
            node.place,
            f"for a key without an entry FLA takes the first one here that differs in numbers only (mode {mode}); here "
            "on_miss decides",
        )


# --- writing ----------------------------------------------------------------------------------------------------------


def write(
    tables: Sequence[TableFile],
    folder: str | os.PathLike[str],
    known: KnownKernels,
    *,
    mode: FlaMode = "strict",
) -> Exported:
    """Write one file for each bare kernel name, ``folder/<name>.json``: give the folder to FLA as ``FLA_CONFIG_DIR``.

    Args:
        tables: of one arch, for a folder does not say the arch.
        folder: made where it is missing.
        known: knows the order of calls, other kernels of the same bare name, and hooks.
        mode: the ``FLA_CACHE_MODE`` that the folder is meant for; only the losses depend on it.

    Raises:
        TuningError: the tables are of several archs, or ``mode`` is none.
        TableError: a file cannot be written.
    """
    _check_mode(mode)
    archs = sorted({table.arch for table in tables})
    if len(archs) > 1:
        raise TuningError(f"tables: expected those of one arch for a folder of FLA, found {', '.join(archs)}")
    losses = Losses()
    list_lost_rows(tables, _SYSTEM, losses)
    if mode == "disabled":
        losses.add("mode", os.fspath(folder), "FLA reads no file in the mode disabled")
    by_name: dict[str, list[tuple[TableFile, Entry]]] = {}
    for table in tables:
        for entry in table.entries:
            by_name.setdefault(Kernel(entry.kernel).bare_name, []).append((table, entry))
    _note_unread({entry.kernel for table in tables for entry in table.entries}, known, os.fspath(folder), losses)
    files = []
    for bare, rows in sorted(by_name.items()):
        if not NAME.fullmatch(bare):
            # It becomes the name of a file: whatever it says, it must not lead out of the folder.
            losses.add("value", rows[0][1].kernel, f"{bare[:80]!r} is no name of a function, so it has no file")
            continue
        document = _File(bare, mode, known, losses).document(rows)
        if document is not None:
            data = (json.dumps(document, indent=2, ensure_ascii=True, allow_nan=False) + "\n").encode()
            files.append(write_bytes(Path(folder) / f"{bare}.json", data))
    return Exported(tuple(files), losses.all())


def _note_unread(kernels: Iterable[str], known: KnownKernels, folder: str, losses: Losses) -> None:
    then = "call fla.ops.utils.cache.configure_fla_cache_autotune() before its import where the folder is to be read"
    unknown = []
    for kernel in sorted(kernels):
        found = known.classes.get(kernel)
        if found is None:
            unknown.append(kernel)
        elif found != _CLASS:
            losses.add("unread", kernel, f"its autotuner ({found}) does not read FLA's folder: {then}")
    if unknown:
        count = f"{len(unknown)} kernels" if len(unknown) > 1 else unknown[0]
        losses.add(
            "unread",
            folder,
            f"whether the autotuner of {count} reads the folder is not known: give the installed package; else {then}",
        )


class _File:
    """Builds the file of one bare name."""

    def __init__(self, bare: str, mode: FlaMode, known: KnownKernels, losses: Losses) -> None:
        self._bare = bare
        self._mode = mode
        self._known = known
        self._losses = losses
        self._entries: dict[str, Json] = {}
        self._owners: dict[str, str] = {}
        self._slots: dict[tuple[Any, ...], LaunchConfig] = {}
        self._clashes: set[str] = set()
        self._defaults: dict[str, Json] = {}

    def document(self, rows: Sequence[tuple[TableFile, Entry]]) -> Json | None:
        kernels = sorted({entry.kernel for _, entry in rows})
        self._note_names(kernels)
        self._note_hooks(kernels)
        for table, entry in rows:
            place = entry_place(table, entry)
            try:
                config = config_to_json(entry.config)
            except Unportable as error:
                self._losses.add("value", place, f"{entry.config} cannot be written, nor can this row: {error}")
                continue
            if entry.key is None:
                self._add_default(entry, config, place)
            else:
                self._add_entry(table, entry, config, place)
        for digest in self._clashes:
            del self._entries[digest]
        self._note_lookup(kernels)
        if not self._entries and len(self._defaults) != 1:
            return None
        defaults = list(self._defaults.values())
        triton = sorted({table.triton for table, _ in rows if table.triton})
        return {
            "kernel_name": self._bare,
            "triton_version": ", ".join(triton) or None,
            "default_config": defaults[0] if len(defaults) == 1 else None,
            "autotune_entries": dict(
                sorted(self._entries.items(), key=lambda item: json.dumps(item[1], sort_keys=True))
            ),
        }

    def _note_names(self, kernels: Sequence[str]) -> None:
        others = sorted(set(kernels) | set(self._known.qualified(self._bare)))
        if len(others) > 1:
            self._losses.add(
                "shared_name",
                f"{self._bare}.json",
                f"FLA knows bare names only: {', '.join(others)} all read this file, whichever kernel an entry is for",
            )

    def _note_hooks(self, kernels: Sequence[str]) -> None:
        for kernel in kernels:
            if "config.pre_hook" in self._known.hooks.get(kernel, ()):
                self._losses.add("hook", kernel, "its configs have a pre_hook, which FLA does not run with these")

    def _add_default(self, entry: Entry, config: Json, place: str) -> None:
        self._defaults[entry.kernel] = config
        if self._mode in ("strict", "fuzzy"):
            self._losses.add("wildcard", place, f"default_config is not used in the mode {self._mode}")
        if len(self._defaults) > 1:
            self._losses.add("wildcard", place, "several kernels of this bare name have a wildcard: none is written")

    def _add_entry(self, table: TableFile, entry: Entry, config: Json, place: str) -> None:
        try:
            values = [_as_json(decode(text)) for _, text in entry.key or ()]
        except Unportable as error:
            self._losses.add("value", place, f"a key value cannot be written, nor can this row: {error}")
            return
        if self._mode in ("default", "always"):
            self._losses.add("mode", place, f"FLA reads default_config alone in the mode {self._mode}")
        for dtypes in call_sequences(table, entry, self._known, _SYSTEM, self._losses):
            key = [*values, *(f"torch.{dtype}" for dtype in dtypes)]
            digest = key_hash(key)
            written = self._entries.setdefault(digest, {"autotune_key": key, "config": config})
            owner = self._owners.setdefault(digest, entry.kernel)
            if written["config"] != config:
                # Whatever stood there would be wrong for one of the two: then FLA had better time the key itself.
                self._clashes.add(digest)
                what = f"a row of {owner}" if owner != entry.kernel else "another row"
                self._losses.add("duplicate", place, f"{what} has this key and another config: neither is written")
            slot = self._slots.setdefault(python_key(key), entry.config)
            if slot != entry.config and written["config"] == config:
                self._losses.add(
                    "lookup",
                    place,
                    "another row's key is equal in Python (True, 1, 1.0), so FLA keeps one config for both",
                )

    def _note_lookup(self, kernels: Sequence[str]) -> None:
        if self._mode in ("fuzzy", "full") and self._entries:
            self._losses.add(
                "lookup",
                ", ".join(kernels),
                f"in the mode {self._mode} FLA serves a key without an entry with the first one that differs in "
                "numbers only, where this library goes by on_miss",
            )


def _as_json(value: Any) -> Json:
    return [_as_json(item) for item in value] if isinstance(value, (tuple, list)) else value
