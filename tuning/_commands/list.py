"""List the autotuners that packages define: candidates, keys, table coverage, and what needs attention.

Modules are imported, and everything below them. What cannot be imported is listed too. Where one of several MODULEs is
not there the others are listed, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .._console import Console, UsageError
from .._words import counted
from ._common import add_arch, add_json, add_tables, imports_elsewhere, percentage

if TYPE_CHECKING:
    from ..errors import InventoryError
    from ..inventory import Inventory

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "list the autotuners that packages define, and how far tables cover them"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("modules", nargs="+", metavar="MODULE", help="package or module, such as mamba_ssm or fla.ops")
    add_arch(parser, "look up the tables of this arch (default: of every arch that has one)")
    add_tables(parser)
    parser.add_argument(
        "--fail-under",
        type=percentage,
        metavar="PCT",
        help="exit with 1 if the tables of the one --arch cover less than this percentage of the autotuners",
    )
    add_json(parser)


def run(options: argparse.Namespace, console: Console) -> int:
    """Do it and return the exit code."""
    from ..inventory import coverage

    if options.fail_under is not None and len(options.arch or ()) != 1:
        raise UsageError("--fail-under: expected one --arch with it, such as --arch sm90")
    with imports_elsewhere():
        found, missing = _take(options.modules, options.arch, options.table)
    _complain(missing)
    archs = sorted({item.arch for info in found.autotuners for item in info.tables})
    covered = {arch: coverage(found.autotuners, arch) for arch in options.arch or archs}
    failed = options.fail_under is not None and covered[options.arch[0]].percent < options.fail_under
    if options.json:
        document = found.to_json()
        document["coverage"] = {arch: each._asdict() for arch, each in covered.items()}
        document["failed"] = failed
        console.json(document)
        return int(failed or bool(missing))
    _show(console, found, covered)
    if failed:
        arch = options.arch[0]
        console.line(f"FAILED: {covered[arch].percent:.1f} % covered on {arch}, below {options.fail_under:g} %", "red")
    return int(failed or bool(missing))


def _take(
    modules: Sequence[str], archs: Sequence[str] | None, folders: Sequence[str]
) -> tuple[Inventory, list[InventoryError]]:
    """The inventory of those modules that can be listed, the others among its problems; and their errors.

    Raises:
        InventoryError: none can be listed.
    """
    from ..errors import InventoryError
    from ..inventory import Problem

    left = list(dict.fromkeys(modules))
    missing: list[InventoryError] = []
    found = _inventory(left, archs, folders)
    while isinstance(found, InventoryError):
        if found.module not in left or left == [found.module]:
            _complain(missing)  # of several that are all missing each is named, the last one as any error
            raise found
        left.remove(found.module)
        missing.append(found)
        found = _inventory(left, archs, folders)
    problems = [Problem(error.module or "", "does not import", error.reason or "") for error in missing]
    ordered = sorted((*found.problems, *problems), key=lambda each: (each.module, each.kind, each.reason))
    return replace(found, problems=tuple(ordered)), missing


def _inventory(
    modules: Sequence[str], archs: Sequence[str] | None, folders: Sequence[str]
) -> Inventory | InventoryError:
    from ..errors import InventoryError
    from ..inventory import take_inventory

    try:
        return take_inventory(modules, archs=archs, table_path=folders)
    except InventoryError as error:
        return error


def _complain(errors: Sequence[InventoryError]) -> None:
    for error in errors:
        sys.stderr.write(f"triton-tuning: error: {' '.join(error.message.split())}\n")


def _show(console: Console, found: Any, covered: dict[str, Any]) -> None:
    for module, group in itertools.groupby(found.autotuners, key=lambda info: info.module):
        console.line(module, "bold")
        for info in group:
            name = info.kernel.removeprefix(module + ".")
            console.text(f"{name}  {'; '.join(_facts(info))}", indent=2, hanging=6)
    if found.problems:
        console.heading("Not looked into")
        for problem in found.problems:
            console.text(str(problem), indent=2, hanging=6)
    if found.elsewhere:
        console.heading("Bound here, defined elsewhere")
        for kernel in found.elsewhere:
            console.line(f"  {kernel}")
    console.line()
    total = f"{counted(len(found.autotuners), 'autotuner')}, {counted(found.candidates, 'candidate')}"
    console.line(f"{total} in {' '.join(found.modules)}")
    for arch, each in covered.items():
        console.line(f"{arch}: tables cover {each.covered} of {each.total} ({each.percent:.1f} %)")


def _facts(info: Any) -> list[str]:
    facts = [counted(len(info.candidates), "candidate")]
    facts.append(f"key {', '.join(info.key_names)}" if info.key_names else "no key")
    entries = [str(item) for item in info.tables if item.exact or item.wildcard]
    if entries:
        facts.append(f"entries {', '.join(entries)}")
    if info.wrapped != ("autotuner",):
        facts.append(" > ".join(info.wrapped))
    if info.hooks:
        facts.append(f"hooks {', '.join(info.hooks)}")
    if info.pruner:
        facts.append(f"pruned by {info.pruner}")
    return facts + [note.text for note in info.notes if note.kind != "cache_results"]
