"""Rows of foreign files to tables and back: what all formats share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tuning._table_schema import ARCH, fail
from tuning.interop._documents import Node
from tuning.interop._known import KnownKernels
from tuning.interop._result import Losses
from tuning.interop._values import encode_foreign
from tuning.spec import Json, Kernel, LaunchConfig
from tuning.tables import Entry, TableFile

__all__ = [
    "Rows",
    "call_sequences",
    "check_arch",
    "dtype_of",
    "entry_of",
    "entry_place",
    "joined",
    "list_lost_rows",
    "listed",
    "python_key",
    "raw_key",
]

_TORCH_DTYPE = re.compile(r"torch\.[A-Za-z]\w*")


def check_arch(arch: str | None, format_name: str) -> str:
    """The arch that a caller has to give, since files of this format do not say it.

    Raises:
        TableError: it is none.
    """
    if arch is None or not ARCH.fullmatch(arch):
        found = "none" if arch is None else repr(arch)
        fail(None, "arch", "the name of an arch, such as sm90", found, f"files of the format {format_name} do not say")
    return arch


def listed(texts: Iterable[str]) -> str:
    """Distinct texts, joined by commas, as a table's header lists them."""
    return ", ".join(sorted({text for text in texts if text}))


class Rows:
    """Entries as they are read, to become one table for each package."""

    def __init__(self, arch: str, losses: Losses) -> None:
        self._arch = arch
        self._losses = losses
        self._entries: dict[object, Entry] = {}
        self._versions: dict[str, list[str]] = {}

    def add(self, entry: Entry, place: str, triton: str = "") -> None:
        """Take an entry. Of two that are one row here, the first stays; it is a loss where their configs differ."""
        known = self._entries.setdefault(entry.identity, entry)
        if known is entry:
            self._versions.setdefault(Kernel(entry.kernel).package, []).append(triton)
        elif known.config != entry.config:
            self._losses.add(
                "duplicate",
                place,
                f"{entry} stands in the files already, with {known.config}: {entry.config} is dropped",
            )

    def tables(
        self,
        *,
        versions: Mapping[str, str] | None = None,
        device: str = "",
    ) -> tuple[TableFile, ...]:
        """The tables, sorted by package.

        Args:
            versions: of packages, by top-level name.
            device: for the header.
        """
        packages: dict[str, list[Entry]] = {}
        for entry in self._entries.values():
            packages.setdefault(Kernel(entry.kernel).package, []).append(entry)
        return tuple(
            TableFile(
                self._arch,
                package,
                (versions or {}).get(package, ""),
                self._triton(package),
                device,
                tuple(sorted(entries, key=str)),
            )
            for package, entries in sorted(packages.items())
        )

    def _triton(self, package: str) -> str:
        found = listed(self._versions[package])
        if ", " in found:
            self._losses.add(
                "header",
                f"{self._arch}/{package}",
                f"the files are of several versions of Triton ({found}): which row is of which is lost",
            )
        return found


def joined(measured: Sequence[TableFile], reported: Sequence[TableFile]) -> tuple[TableFile, ...]:
    """One table for each package; what was measured goes before what was only reported."""
    tables = {table.package: table for table in measured}
    for table in reported:
        known = tables.setdefault(table.package, table)
        taken = {entry.identity for entry in known.entries}
        more = [entry for entry in table.entries if entry.identity not in taken]
        tables[table.package] = replace(known, entries=tuple(sorted([*known.entries, *more], key=str)))
    return tuple(table for _, table in sorted(tables.items()))


def dtype_of(text: str) -> str | None:
    """A dtype of ours for ``str`` of one; None where it is no text that a table takes."""
    name = text.removeprefix("torch.")
    return name if name and not name.startswith("torch.") and not re.search(r"\s", name) else None


def raw_key(
    node: Node, kernel: str, known: KnownKernels, losses: Losses
) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]] | None:
    """Named values and dtypes of a key that is a list of values and then ``str`` of the dtypes in call order.

    None, with the loss noted, where the names of the values are not known.

    Raises:
        TableError: it is no such list.
    """
    raw = node.items("a key, as an array of values and dtypes")
    count = len(raw)
    while count and type(raw[count - 1].value) is str and _TORCH_DTYPE.fullmatch(raw[count - 1].value):
        count -= 1
    names = known.key_names(kernel, count)
    if names is None:
        losses.add(
            "unnamed_key",
            node.place,
            f"{kernel}: the names of {count} key values are not known, so this row is not taken over: give the "
            "installed package, or a table of it",
        )
        return None
    values = tuple((name, encode_foreign(item.argument())) for name, item in zip(names, raw, strict=False))
    return values, tuple(item.value.removeprefix("torch.") for item in raw[count:])


def entry_of(
    kernel: str,
    values: tuple[tuple[str, str], ...],
    sequence: tuple[str, ...],
    config: LaunchConfig,
    evidence: Mapping[str, Json],
    known: KnownKernels,
) -> Entry:
    """An entry whose dtypes have names where those are known, and are a sequence else."""
    key = known.name_dtypes(kernel, values, sequence)
    if key is not None:
        return Entry(kernel, values, key.dtypes, None, config, evidence)
    return Entry(kernel, values, None, sequence, config, evidence)


def entry_place(table: TableFile, entry: Entry) -> str:
    """Table and entry, for a loss."""
    return f"{table.path or f'{table.arch}/{table.package}.json'}: {entry}"


def list_lost_rows(tables: Sequence[TableFile], system: str, losses: Losses, *, versions: bool = False) -> None:
    """Note what neither Megatron-LM nor FLA nor Triton can hold of tables: denied configs and evidence.

    Args:
        versions: whether its files hold the versions of packages.
    """
    for table in tables:
        place = table.path or f"{table.arch}/{table.package}.json"
        for row in table.denied:
            losses.add(
                "denied",
                f"{place}: {row.kernel}",
                f"{system} has no list of denied configs: {row.config} may be launched there ({row.reason})",
            )
        if table.entries:
            probed = sum(entry.classes is not None for entry in table.entries)
            hashed = sum(entry.source_hash is not None for entry in table.entries)
            losses.add(
                "evidence",
                place,
                f"evidence of {len(table.entries)} entries, {hashed} source hashes and {probed} bit classes have no "
                f"place in {system}'s files",
            )
        device = listed([table.device, f"{table.multiprocessors} multiprocessors" if table.multiprocessors else ""])
        if device:
            losses.add("header", place, f"{system}'s files do not say the device ({device})")
        if table.package_version and not versions:
            losses.add(
                "header", place, f"{system}'s files do not say the version of the package ({table.package_version})"
            )


def call_sequences(
    table: TableFile, entry: Entry, known: KnownKernels, system: str, losses: Losses
) -> tuple[tuple[str, ...], ...]:
    """The sequences of dtypes under which an entry is to be written: one for each known order of a call."""
    found = known.call_sequences(entry)
    if found is not None:
        return found
    losses.add(
        "call_order",
        entry_place(table, entry),
        f"{system} looks dtypes up in the order of the call, which the table does not know: they are written in the "
        "order of the signature; a caller that passes its tensors in another order misses the entry. Journals and "
        "manifests of runs know the order: give one",
    )
    return (tuple(dtype for _, dtype in entry.dtypes or ()),)


def python_key(values: Iterable[Any]) -> tuple[Any, ...]:
    """A key as Triton and FLA hold it in memory, where ``True``, ``1`` and ``1.0`` are one."""
    return tuple(python_key(value) if isinstance(value, (list, tuple)) else value for value in values)
