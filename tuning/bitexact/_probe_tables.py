"""Bit classes into tables: what a probe found, beside the configs that a run chose.

An entry gets the classes that hold at every form of launch that was probed, the hash of the kernel's source, and in its
evidence what they rest on. Which config a key gets is not changed: an entry that is there keeps its own, and a key
without one gets an entry with the config that the run chose for it, by whatever rule.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from tuning.bitexact._probe_classes import KeyProbe, refined
from tuning.spec import Choice, Json, Kernel, LaunchConfig
from tuning.tables import Entry, TableFile, Tables, read_table, write_table

__all__ = ["write_classes"]


def write_classes(
    folder: str | os.PathLike[str],
    keys: Iterable[KeyProbe],
    choices: Iterable[Choice],
    *,
    device: str = "",
    multiprocessors: int = 0,
    triton: str = "",
    packages: Mapping[str, str] | None = None,
) -> tuple[tuple[Path, ...], tuple[str, ...]]:
    """Write the classes of a probe into the tables of a folder, ``FOLDER/<arch>/<package>.json``.

    Args:
        folder: the folder; made where it is missing.
        keys: what the probe found.
        choices: what the run launched: the configs that the classes are written beside.
        device, multiprocessors, triton, packages: for the header of a table that is new; ``packages`` has versions by
            top-level package.

    Returns:
        The files written, and for each key that was left out why, a line each.

    Raises:
        TableError: a table that is there is malformed, or the folder cannot be written.
    """
    pins = {(each.arch, each.kernel, each.key.text): each for each in choices if each.source != "timed"}
    found: dict[tuple[str, str, str], list[KeyProbe]] = {}
    for each in keys:
        found.setdefault((each.arch, each.kernel, each.key.text), []).append(each)
    tables: dict[tuple[str, str], TableFile] = {}
    left_out: list[str] = []
    for place, probes in sorted(found.items()):
        arch, kernel, _ = place
        package = Kernel(kernel).package
        table = tables.get((arch, package)) or _table(Path(folder), arch, package)
        if table is None:
            version = (packages or {}).get(package, "")
            table = TableFile(arch, package, version, triton, device, (), multiprocessors=multiprocessors)
        reason, table = _with_entry(table, probes, pins.get(place))
        if reason:
            left_out.append(f"{kernel} [{probes[0].key}]: {reason}")
        else:
            tables[arch, package] = table
    return tuple(write_table(folder, tables[name]) for name in sorted(tables)), tuple(left_out)


def _table(folder: Path, arch: str, package: str) -> TableFile | None:
    path = folder / arch / f"{package}.json"
    return read_table(path) if path.exists() else None


def _with_entry(table: TableFile, probes: list[KeyProbe], pin: Choice | None) -> tuple[str, TableFile]:
    first = probes[0]
    silent = [each for each in probes if not each.claims]
    if silent:
        return silent[0].verdict, table
    if first.source_hash is None:
        return "the kernel's source is not at hand, and classes are bound to it", table
    entry = Tables(table.arch, [[table]]).exact(first.kernel, first.key)
    if entry is None and pin is None:
        return "the run chose no config for it without a clock, and the table has none", table
    if entry is not None and entry.source_hash not in (None, first.source_hash):
        return f"the table's entry is of other source ({entry.source_hash}); record it again", table
    config = entry.config if entry is not None else LaunchConfig.of(pin.config) if pin is not None else None
    classes = refined(probes)
    if config is None or not any(config in group for group in classes):
        return f"the chosen config ({config}) is racy or cannot be launched, so it is in no class", table
    rests_on: dict[str, Json] = {
        "compiler": first.compiler,
        "forms": sorted({each.form for each in probes}),
        "inputs": min(each.tried for each in probes),
        "judged_by": first.judged_by,
    }
    if entry is None:
        evidence: dict[str, Json] = {
            "measured": False,
            "rule": pin.source if pin is not None else "",
            "probe": rests_on,
        }
        key = first.key
        made = Entry(first.kernel, key.values, key.dtypes, None, config, evidence, first.source_hash, classes)
        return "", replace(table, entries=(*table.entries, made))
    changed = replace(
        entry,
        classes=classes,
        source_hash=first.source_hash,
        evidence={**entry.evidence, "probe": rests_on},
    )
    return "", replace(table, entries=tuple(changed if each is entry else each for each in table.entries))
