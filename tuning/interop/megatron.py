"""Megatron-LM's ``core.tuning``: its tables and the files that its ranks record, read and written.

A table is one JSON object for each arch, ``<arch>.json``: ``arch``, ``triton``, ``packages`` (versions by name),
``source`` (text), and ``kernels``: kernel to key to config. A rank file, ``<prefix>.rank<N>.json``, holds arch to
kernel to key to config. (From the description of the format as of 2026; it is in no wheel up to megatron-core 0.19.2.)

A key is one text: ``name=value`` for each key argument in order of declaration, the value by Python's ``str``, then the
dtypes in the order of the call, all joined by ``|``; ``*`` stands for every key without an entry of its own. So types
are lost: ``128`` is read as an integer and ``True`` as a boolean, the strings of these texts are not told apart. What
would come back as something else is noted as it is written.

Of several tables of one arch the first counts alone, as over there, where files do not overlay. Rank files are merged
by their majority, of equal votes by the text of the config, as over there.
"""

from __future__ import annotations

import glob
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from tuning._table_schema import ARCH
from tuning.interop._configs import config_to_json, read_config
from tuning.interop._documents import Node, find_files, parse, read_bytes, write_bytes
from tuning.interop._known import KnownKernels
from tuning.interop._megatron_keys import join_key, read_key, value_parts
from tuning.interop._result import Exported, Imported, Losses
from tuning.interop._rows import Rows, call_sequences, entry_of, entry_place, list_lost_rows, listed
from tuning.interop._values import Unportable
from tuning.journal import Journal, Scan
from tuning.spec import Json, Key, LaunchConfig
from tuning.tables import Entry, TableFile

__all__ = ["parse_rank_file", "parse_table", "read", "write", "write_rank_files"]

_RANK_FILE = re.compile(r".*\.rank\d+\.json", re.DOTALL)
_HEADER = ("arch", "triton", "packages", "source", "kernels")
_SYSTEM = "Megatron-LM"


def read(paths: Iterable[str | os.PathLike[str]], known: KnownKernels, arch: str | None = None) -> Imported:
    """Read tables and rank files; of a folder all that it holds.

    Args:
        paths: files and folders.
        known: resolves bare names, and names the dtypes where it can.
        arch: take over this one alone; None: all.

    Raises:
        TableError: a file is none of the two.
    """
    losses = Losses()
    tables: dict[str, tuple[str, tuple[TableFile, ...]]] = {}
    votes: dict[str, dict[tuple[str, str], Counter[LaunchConfig]]] = {}
    ranks = 0
    for path in find_files(paths, "*.json", "Megatron-LM tables or rank files"):
        document = parse(read_bytes(path), path)
        if _RANK_FILE.fullmatch(os.path.basename(path)):
            ranks += 1
            _count_votes(document, known, losses, arch, votes)
            continue
        found = _read_table(document, known, losses)
        its_arch = found[0]
        if arch not in (None, its_arch):
            losses.add("other_arch", path, f"a table of {its_arch}, not of {arch}")
        elif its_arch in tables:
            first = tables[its_arch][0]
            losses.add("shadowed", path, f"hidden by {first}: Megatron-LM takes the first table of an arch alone")
        else:
            tables[its_arch] = (path, found[1])
    merged = list(_elect(votes, ranks, known, losses, set(tables)))
    both = [table for _, each in tables.values() for table in each] + merged
    return Imported(tuple(sorted(both, key=lambda table: (table.arch, table.package))), losses.all())


def parse_table(data: bytes, file: str, known: KnownKernels) -> Imported:
    """Read the bytes of one table; ``file`` is its path.

    Raises:
        TableError: they are none.
    """
    losses = Losses()
    _, tables = _read_table(parse(data, file), known, losses)
    return Imported(tables, losses.all())


def parse_rank_file(data: bytes, file: str, known: KnownKernels) -> Imported:
    """Read the bytes of one rank file; ``file`` is its path.

    Raises:
        TableError: they are none.
    """
    losses = Losses()
    votes: dict[str, dict[tuple[str, str], Counter[LaunchConfig]]] = {}
    _count_votes(parse(data, file), known, losses, None, votes)
    return Imported(tuple(_elect(votes, 1, known, losses, set())), losses.all())


def _read_table(document: Node, known: KnownKernels, losses: Losses) -> tuple[str, tuple[TableFile, ...]]:
    members = document.members("a table, as an object", ("arch", "kernels"))
    for name in members:
        if name not in _HEADER:
            losses.add("unknown_member", members[name].place, f"the member {name!r} of a table is not read")
    arch = members["arch"].text("the name of an arch, such as sm90", ARCH)
    stem = os.path.basename(document.file).removesuffix(".json")
    if ARCH.fullmatch(stem) and re.fullmatch(r"(sm|gfx)\d\w*", stem) and stem != arch:
        members["arch"].fail(f'"{stem}", as in the name of the file')
    triton = members["triton"].text("a version", empty=True) if "triton" in members else ""
    source = members["source"].text("a text", empty=True) if "source" in members else ""
    evidence = {"reported_by": source or f"Megatron-LM table {os.path.basename(document.file)}", "measured": False}
    rows = Rows(arch, losses)
    for kernel, configs in _kernels(members["kernels"], known, losses):
        for name, node in configs.members("an object of keys").items():
            config = read_config(node, losses)
            key = read_key(name, node, losses)
            if key is None:
                rows.add(Entry(kernel, None, None, None, config, evidence), node.place, triton)
            else:
                rows.add(entry_of(kernel, *key, config, evidence, known), node.place, triton)
    tables = rows.tables()
    versions = _read_versions(members.get("packages"), {table.package for table in tables}, losses)
    return arch, rows.tables(versions=versions)


def _kernels(node: Node, known: KnownKernels, losses: Losses) -> Iterable[tuple[str, Node]]:
    """Qualified names with their objects of keys; qualified ones first, as they are looked up over there."""
    taken: dict[str, str] = {}
    kernels = node.members("an object of kernels")
    for name in sorted(kernels, key=lambda name: "." not in name):
        kernel = known.resolve(name, kernels[name], losses)
        if kernel is None:
            continue
        if kernel in taken:
            losses.add(
                "lookup",
                kernels[name].place,
                f"{kernel} stands in the file as {taken[kernel]} too: the keys here that are not there are taken over",
            )
        taken.setdefault(kernel, name)
        yield kernel, kernels[name]


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "_", name).lower()


def _read_versions(node: Node | None, packages: set[str], losses: Losses) -> dict[str, str]:
    """Versions by top-level package: of a distribution of its name, or of one that starts with it."""
    found: dict[str, str] = {}
    for name, member in (node.members("an object of versions") if node else {}).items():
        version = member.text("a version", empty=True)
        exact = [package for package in packages if _plain(package) == _plain(name)]
        longer = [package for package in packages if _plain(name).startswith(f"{_plain(package)}_")]
        owner = next(iter(sorted(exact) or sorted(longer, key=len, reverse=True)), None)
        if owner is None or (owner in found and not exact):
            losses.add(
                "header", member.place, f"the version {version[:80]!r} of {name[:80]!r} has no table to stand in"
            )
        else:
            found[owner] = version if name == owner or not version else f"{name} {version}"
    return found


# --- rank files -------------------------------------------------------------------------------------------------------


def _count_votes(
    document: Node,
    known: KnownKernels,
    losses: Losses,
    arch: str | None,
    votes: dict[str, dict[tuple[str, str], Counter[LaunchConfig]]],
) -> None:
    for name, kernels in document.members("a rank file: an object of archs").items():
        if not ARCH.fullmatch(name):
            kernels.fail("the name of an arch, such as sm90", f"the name {name[:80]!r}")
        if arch not in (None, name):
            losses.add("other_arch", kernels.place, f"records of {name}, not of {arch}")
            continue
        seen = set()
        for kernel, configs in _kernels(kernels, known, losses):
            for key, node in configs.members("an object of keys").items():
                read_key(key, node, losses)
                if (kernel, key) in seen:  # under its bare name too: a rank has one vote
                    continue
                seen.add((kernel, key))
                counter = votes.setdefault(name, {}).setdefault((kernel, key), Counter())
                counter[read_config(node, losses)] += 1


def _serialised(config: LaunchConfig) -> str:
    """The text that decides between equal votes."""
    try:
        return json.dumps(config_to_json(config), sort_keys=True)
    except Unportable:  # a float that is no number: never read from JSON
        return config.text


def _elect(
    votes: dict[str, dict[tuple[str, str], Counter[LaunchConfig]]],
    ranks: int,
    known: KnownKernels,
    losses: Losses,
    archs_with_table: set[str],
) -> Iterable[TableFile]:
    for arch in sorted(votes):
        if arch in archs_with_table:
            losses.add("shadowed", arch, "rank files of an arch whose table was given too are not merged into it")
            continue
        rows = Rows(arch, losses)
        for (kernel, text), counter in sorted(votes[arch].items()):
            most = max(counter.values())
            config = min((each for each, count in counter.items() if count == most), key=_serialised)
            evidence: dict[str, Json] = {
                "reported_by": f"Megatron-LM rank files, majority of {ranks}",
                "measured": False,
                "ranks": sum(counter.values()),
                "agreement": most,
            }
            node = Node(None, f"rank files of {arch}", kernel)
            key = read_key(text, node, losses)
            if key is None:
                rows.add(Entry(kernel, None, None, None, config, evidence), node.place)
            else:
                rows.add(entry_of(kernel, *key, config, evidence, known), node.place)
        yield from rows.tables()


# --- writing ----------------------------------------------------------------------------------------------------------


def write(
    tables: Sequence[TableFile], folder: str | os.PathLike[str], known: KnownKernels, *, source: str | None = None
) -> Exported:
    """Write one table for each arch, ``folder/<arch>.json``.

    Args:
        tables: of several archs and packages, each pair once.
        folder: made where it is missing.
        known: knows the order of calls, where journals or manifests were given.
        source: text for the header; None: who reported the entries, where that is one for all.

    Raises:
        TableError: a file cannot be written.
    """
    losses = Losses()
    list_lost_rows(tables, _SYSTEM, losses, versions=True)
    files = []
    for arch in sorted({table.arch for table in tables}):
        of_arch = [table for table in tables if table.arch == arch]
        document = _table_json(arch, of_arch, known, losses, source)
        files.append(write_bytes(Path(folder) / f"{arch}.json", _bytes(document)))
    return Exported(tuple(files), losses.all())


def _bytes(document: Json) -> bytes:
    return (json.dumps(document, indent=2, ensure_ascii=True, allow_nan=False) + "\n").encode()


def _table_json(
    arch: str, tables: Sequence[TableFile], known: KnownKernels, losses: Losses, source: str | None
) -> Json:
    kernels: dict[str, dict[str, Json]] = {}
    for table in tables:
        for entry in table.entries:
            place = entry_place(table, entry)
            try:
                config = config_to_json(entry.config)
            except Unportable as error:
                losses.add("value", place, f"{entry.config} cannot be written: {error}")
                continue
            for key in _key_texts(table, entry, known, losses):
                known_config = kernels.setdefault(entry.kernel, {}).setdefault(key, config)
                if known_config != config:
                    losses.add(
                        "duplicate", place, f"the key {key[:200]} is that of another entry too, with another config"
                    )
    packages: dict[str, str] = {}
    for table in tables:
        # Recordings say "distribution version", as distributions and packages have different names.
        name, _, version = table.package_version.partition(" ")
        told = version and " " not in version and _plain(name).startswith(_plain(table.package))
        if table.package_version:
            packages[name if told else table.package] = version if told else table.package_version
    reporters = {entry.evidence.get("reported_by") for table in tables for entry in table.entries}
    reporter = next(iter(reporters)) if len(reporters) == 1 else None
    if source is None:
        source = reporter if isinstance(reporter, str) else "triton-tuning"
        if any(entry.evidence.get("reported_by") for table in tables for entry in table.entries) and not reporter:
            losses.add("evidence", arch, "entries were reported by several: a table has one source for all")
    return {
        "arch": arch,
        "triton": listed(version for table in tables for version in table.triton.split(", ")),
        "packages": dict(sorted(packages.items())),
        "source": source,
        "kernels": {kernel: dict(sorted(configs.items())) for kernel, configs in sorted(kernels.items())},
    }


def _key_texts(table: TableFile, entry: Entry, known: KnownKernels, losses: Losses) -> list[str]:
    """The keys that an entry is written under; none where it cannot be."""
    if entry.key is None:
        return ["*"]
    parts = value_parts(entry.key, entry_place(table, entry), losses)
    if parts is None:
        return []
    return [join_key(parts, dtypes) for dtypes in call_sequences(table, entry, known, _SYSTEM, losses)]


def write_rank_files(
    journals: Iterable[Journal | Scan], folder: str | os.PathLike[str], prefix: str = "tuning"
) -> Exported:
    """Write the winners of journals as rank files, ``folder/<prefix>.rank<N>.json``, one for each rank.

    Where a rank has several journals that disagree, the first by path counts. Timings have no place there. Rank files
    of this prefix that are there and are not replaced stay, and are noted.

    Raises:
        TableError: a file cannot be written.
    """
    losses = Losses()
    ranks: dict[int, dict[str, dict[str, dict[str, Json]]]] = {}
    for journal in sorted(journals, key=lambda journal: (journal.environment.rank, journal.path)):
        archs = ranks.setdefault(journal.environment.rank, {})
        if journal.measurements:
            losses.add("evidence", journal.path, "the timings of its records have no place in a rank file")
        for measurement in journal.measurements:
            identity = measurement.identity
            name = identity.kernel.qualified_name
            winner = identity.configs[measurement.winner]
            place = f"{journal.path}: {name} {identity.key}"
            text = _record_key(identity.key, place, losses)
            try:
                config = config_to_json(winner)
            except Unportable as error:
                losses.add("value", place, f"{winner} cannot be written: {error}")
                continue
            if text is None:
                continue
            kept = archs.setdefault(identity.arch, {}).setdefault(name, {}).setdefault(text, config)
            if kept != config:
                losses.add("duplicate", place, f"another journal of this rank, or another key, has {json.dumps(kept)}")
    files = [
        write_bytes(Path(folder) / f"{prefix}.rank{rank}.json", _bytes(archs)) for rank, archs in sorted(ranks.items())
    ]
    for path in find_files([folder], f"{glob.escape(prefix)}.rank*.json", "rank files"):
        if _RANK_FILE.fullmatch(path) and Path(path) not in files:
            losses.add(
                "stale",
                path,
                "it was there before, for a rank that was not written now: it is read and merged along "
                "with these; remove it, or give a new folder",
            )
    return Exported(tuple(files), losses.all())


def _record_key(key: Key, place: str, losses: Losses) -> str | None:
    if not key.call_order and len(set(key.dtype_sequence)) > 1:
        losses.add("call_order", place, "the order of the call is not known: dtypes are in the order of the signature")
    parts = value_parts(key.values, place, losses)
    return None if parts is None else join_key(parts, key.call_dtype_sequence)
