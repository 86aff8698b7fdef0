"""Read table folders, and find the installed autotuners that their rows speak of."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from .._table_continued import continued
from .._table_fit import key_of
from .._words import counted
from ..checking import modules_of
from ..errors import InventoryError, TableError
from ..installation import package_versions
from ..interception import supported_triton
from ..inventory import AutotunerInfo, Inventory, take_inventory
from ..journal import SUFFIX
from ..tables import TableFile, Tables, bundled_folder, read_table, write_table
from ._common import expanded

__all__ = [
    "Installed",
    "Written",
    "installed_autotuners",
    "package_autotuners",
    "read_folders",
    "read_tables",
    "sorted_by_content",
    "write_tables",
]


def read_tables(paths: Sequence[str]) -> list[TableFile]:
    """The tables that are given as files, wherever they lie, or as folders of them.

    Raises:
        TableError: a file is no table, or a folder has none.
    """
    found: list[TableFile] = []
    for path in paths:
        if os.path.isfile(path):
            found.append(read_table(path, in_place=False))
            continue
        tables, unreadable = read_folders([path], None)
        if unreadable:
            raise unreadable[0]
        found += tables
    return found


def sorted_by_content(paths: Sequence[str]) -> tuple[list[str], list[str]]:
    """Journals, and files and folders of tables, by what they hold; a folder of both is both.

    What is neither is among the journals, whose reader says what it expected.
    """
    journals: list[str] = []
    tables: list[str] = []
    for path in paths:
        # As a pattern may match anything, only files and folders that hold something count of what it matches.
        matched = [path] if os.path.lexists(path) else expanded([path])
        for found in matched:
            has_tables = _has_tables(found)
            if has_tables:
                tables.append(found)
            if os.path.isdir(found):
                if (not has_tables and matched == [path]) or any(name.endswith(SUFFIX) for name in os.listdir(found)):
                    journals.append(found)
            elif not has_tables:
                journals.append(found)
    return journals, tables


def _has_tables(path: str) -> bool:
    if os.path.isdir(path):
        return any(not found.name.startswith(".") for found in Path(path).glob("*/*.json"))
    if path.endswith(SUFFIX) or not os.path.isfile(path):
        return False
    try:
        with open(path, "rb") as stream:
            return stream.read(64).lstrip()[:1] == b"{"
    except OSError:
        return False


@dataclass(frozen=True)
class Written:
    """A table that was written.

    Attributes:
        path: where.
        table: what is there now.
        new: what was to be written.
        before: the table that it continues; None where there was none, or where it was replaced.
    """

    path: str
    table: TableFile
    new: TableFile
    before: TableFile | None

    @property
    def overruled(self) -> tuple[str, ...]:
        """The new entries that the table before it denies, and that are never used."""
        tables = Tables(self.table.arch, [[self.table]])
        return tuple(str(row) for row in self.new.entries if row.config in tables.denied(row.kernel, key_of(row)))

    @property
    def text(self) -> str:
        """One line about it."""
        text = f"{self.path}: {counted(len(self.table.entries), 'entry')}"
        if self.before is None:
            return text
        kept = len(self.table.entries) - len(self.new.entries)
        changed = {row.identity: row.config for row in self.before.entries}
        count = sum(changed.get(row.identity, row.config) != row.config for row in self.new.entries)
        return f"{text}; of the table before it {kept} kept, {count} changed, {len(self.before.denied)} denied"


def write_tables(folder: str, tables: Iterable[TableFile], *, replace: bool) -> list[Written]:
    """Write tables, each continuing the one that is there, unless that is to be replaced.

    Raises:
        TableError: a table that is there cannot be read, or one cannot be written.
    """
    found = []
    for new in tables:
        path = Path(folder) / new.arch / f"{new.package}.json"
        before = read_table(path) if path.exists() and not replace else None
        table = new if before is None else continued(new, before)
        found.append(Written(str(write_table(folder, table)), table, new, before))
    return found


def read_folders(folders: Sequence[str], archs: Sequence[str] | None) -> tuple[list[TableFile], list[TableError]]:
    """The tables in folders, those of the library when none is given, and the errors of files that are none.

    Raises:
        TableError: a folder is missing, or has nothing for the archs asked for.
    """
    files: list[TableFile] = []
    unreadable: list[TableError] = []
    for folder in folders or [os.fspath(bundled_folder())]:
        root = Path(folder)
        if not root.is_dir():
            raise TableError(
                f"{folder}: expected a folder with <arch>/<package>.json, found "
                f"{'a file' if root.exists() else 'nothing'}; give the folder that merge wrote to",
                file=folder,
                expected="a folder",
            )
        paths = [path for path in sorted(root.glob("*/*.json")) if not path.name.startswith(".")]
        there = sorted({path.parent.name for path in paths})
        missing = [arch for arch in archs or () if arch not in there]
        if missing or not paths:
            wanted = f"tables of {', '.join(missing)}" if missing else "at least one <arch>/<package>.json"
            raise TableError(
                f"{folder}: expected {wanted}, found those of {', '.join(there) or 'no arch'}",
                file=folder,
                expected=wanted,
                found=", ".join(there),
            )
        for path in paths:
            if archs and path.parent.name not in archs:
                continue
            try:
                files.append(read_table(path))
            except TableError as error:
                unreadable.append(error)
    return files, unreadable


@dataclass(frozen=True)
class Installed:
    """The installed autotuners that tables speak of.

    Attributes:
        autotuners: those found.
        unimported: the modules that could not be looked into, each with the reason. A module that an installed package
            does not have is not among them: its kernels are missing.
        triton: the installed version.
        versions: of the distributions that bring each top-level package, in words.
    """

    autotuners: tuple[AutotunerInfo, ...]
    unimported: dict[str, str]
    triton: str
    versions: dict[str, str]


def installed_autotuners(files: Iterable[TableFile]) -> Installed:
    """Import the modules that tables speak of, and nothing else, and list their autotuners.

    Raises:
        UnsupportedTritonError: Triton is missing or not supported.
    """
    triton = supported_triton()
    tables = tuple(files)
    found: dict[str, AutotunerInfo] = {}
    failed: dict[str, str] = {}
    for module in modules_of(tables):
        inventory = _inventory(module)
        if isinstance(inventory, Inventory):
            found.update((info.kernel, info) for info in inventory.autotuners)
        elif _is_there(module) is not False:
            failed[module] = inventory
    # A module may import only after others of its package: then the whole package is walked.
    for package in sorted({module.partition(".")[0] for module in failed}):
        inventory = _inventory(package)
        if isinstance(inventory, Inventory):
            found.update((info.kernel, info) for info in inventory.autotuners)
            still = {problem.module for problem in inventory.problems}
            for module in [name for name in failed if name.startswith(f"{package}.") and name not in still]:
                del failed[module]
    return Installed(tuple(found.values()), failed, triton, dict(package_versions(modules_of(tables))))


def package_autotuners(files: Iterable[TableFile]) -> tuple[AutotunerInfo, ...]:
    """The autotuners of all modules of the packages that tables are for, as far as they import."""
    found: dict[str, AutotunerInfo] = {}
    for package in sorted({module.partition(".")[0] for module in modules_of(files)}):
        inventory = _inventory(package)
        if isinstance(inventory, Inventory):
            found.update((info.kernel, info) for info in inventory.autotuners)
    return tuple(found.values())


def _inventory(name: str) -> Inventory | str:
    """The autotuners of a module or package, or why they cannot be listed."""
    try:
        return take_inventory(name, archs=())
    except InventoryError as error:
        return error.reason or error.message


def _is_there(module: str) -> bool | None:
    """Whether an installed package has this module; None where the package itself is not installed.

    Nothing is imported, as looking up a dotted name in the ordinary way would.
    """
    name, *rest = module.split(".")
    spec = PathFinder.find_spec(name)
    if spec is None:
        return None
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return False
        name = f"{name}.{part}"
        spec = PathFinder.find_spec(name, spec.submodule_search_locations)
    return spec is not None
