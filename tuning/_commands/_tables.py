"""Read table folders, and find the installed autotuners that their rows speak of."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from ..checking import modules_of
from ..errors import InventoryError, TableError
from ..installation import package_versions
from ..interception import supported_triton
from ..inventory import AutotunerInfo, Inventory, take_inventory
from ..tables import TableFile, bundled_folder, read_table

__all__ = ["Installed", "installed_autotuners", "package_autotuners", "read_folders"]


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
