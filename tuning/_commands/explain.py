"""Explain what would be chosen on an arch, by which rule and table entry, without a GPU of that arch.

Each SOURCE is a journal (file, folder, glob or record_path's prefix), whose recorded keys are explained, or an
installed package or module, of whose autotuners those keys are explained that any table has, and any other key. Exit
code 1: for some key there is no choice, as where every candidate is denied or --on-miss is error.
"""

from __future__ import annotations

import argparse
import itertools
import os
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .._console import Console, UsageError
from .._words import counted
from ._common import add_json, add_tables, check_archs, imports_elsewhere, no_records

if TYPE_CHECKING:
    from ..explanation import Explained
    from ..inventory import Inventory

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "say what would be chosen on an arch, and why, without its GPU"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="journals, or an installed package or module")
    parser.add_argument("--arch", required=True, metavar="ARCH", help="the arch to choose for, such as sm103")
    parser.add_argument(
        "--on-miss",
        choices=("cheapest", "nearest", "model", "error"),
        default="cheapest",
        help="the rule for keys that no table has (default: cheapest)",
    )
    add_tables(parser)
    add_json(parser)


def run(options: argparse.Namespace, console: Console) -> int:
    """Do it and return the exit code."""
    from ..explanation import explain_autotuners, explain_journals
    from ..journal import find_journals
    from ..policy import AutotunePolicy

    check_archs([options.arch], options.table)
    journals, modules = _sorted_out(options.sources)
    policy = AutotunePolicy(on_miss=options.on_miss, table_path=tuple(options.table))
    rows: list[Explained] = []
    problems: list[str] = []
    if journals:
        paths = find_journals(journals)
        rows += explain_journals(paths, options.arch, policy)
        if not rows:
            raise no_records("explain", paths)
    if modules:
        with imports_elsewhere():
            found = _inventory(modules)
        rows += explain_autotuners(found.autotuners, options.arch, policy)
        problems += [str(problem) for problem in found.problems if problem.autotuners]
        if not found.autotuners:
            raise UsageError(f"{' '.join(modules)}: expected autotuners, found none; `triton-tuning list` says more")
    unanswered = sum(bool(row.problem) for row in rows)
    if options.json:
        console.json(
            {
                "version": 1,
                "arch": options.arch,
                "on_miss": options.on_miss,
                "choices": [row.to_json() for row in rows],
                "not_looked_into": problems,
                "without_choice": unanswered,
            }
        )
    else:
        _show(console, rows, problems, options.arch)
    return int(unanswered > 0)


def _inventory(modules: Sequence[str]) -> Inventory:
    from ..errors import InventoryError
    from ..inventory import take_inventory

    try:
        return take_inventory(modules, archs=())
    except InventoryError as error:
        if error.module in modules and "." not in (error.module or ""):
            message = f"{error.message}; nor is there a journal, a folder or a prefix of journals {error.module!r} here"
            raise InventoryError(message, module=error.module, reason=error.reason) from None
        raise


def _sorted_out(sources: Sequence[str]) -> tuple[list[str], list[str]]:
    """Journals, and modules: a dotted name that is no path."""
    modules = [
        name
        for name in sources
        if all(part.isidentifier() for part in name.split("."))
        and not name.endswith(".journal")
        and not os.path.exists(name)
    ]
    return [name for name in sources if name not in modules], modules


def _show(console: Console, rows: Sequence[Explained], problems: Sequence[str], arch: str) -> None:
    for kernel, group in itertools.groupby(rows, key=lambda row: row.kernel):
        mine = list(group)
        console.line(kernel, "bold")
        pruned = f", before pruning by {mine[0].pruner}" if mine[0].pruner else ""
        console.text(counted(mine[0].candidates, "candidate") + pruned, indent=2, hanging=4)
        for row in mine:
            console.text(row.key, indent=2, hanging=6)
            if row.config is not None:
                console.text(f"-> {row.config}", indent=4, hanging=7)
            if row.problem:
                console.text(row.problem, indent=4, hanging=6, style="red")
                continue
            facts = [row.source or "", row.detail, row.origin or ""]
            console.text("; ".join(fact for fact in facts if fact), indent=4, hanging=6)
            for notice in row.notices:
                console.text(f"note: {notice}", indent=4, hanging=6)
    if problems:
        console.heading("Not looked into")
        for problem in problems:
            console.text(problem, indent=2, hanging=6)
    console.line()
    count = Counter(row.source or "no choice" for row in rows)
    shown = ", ".join(f"{source} {number}" for source, number in sorted(count.items()))
    console.text(f"{counted(len(rows), 'choice')} on {arch}: {shown}", hanging=2)
