"""Say what changed between two tables, two sets of journals, or the manifests of two runs.

Tables of two archs, one on each side, are compared key by key. A folder of tables is one with <arch>/<package>.json, or
the <arch> in it alone.

The exit code is 1 where a choice changed: a config for a kernel and key that either side has, or a config that one side
alone denies. All else, such as evidence, dates, versions, or the rank and host of a run, is shown and does not count.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from .._console import Console
from .._words import counted
from ._common import add_json

if TYPE_CHECKING:
    from ..manifest import Change

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "what changed between two tables, journals or manifests"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    text = "table, folder of tables, journal, folder or prefix of journals, or manifest"
    parser.add_argument("before", help=text)
    parser.add_argument("after", help="the same kind of thing")
    add_json(parser)


def run(options: argparse.Namespace, console: Console) -> int:
    """Do it and return the exit code: 1 where a choice changed."""
    from ..difference import diff, load_side

    changes = diff(load_side(options.before), load_side(options.after))
    count = sum(map(_changes_a_choice, changes))
    if options.json:
        rows = [
            {"what": c.what, "name": c.name, "before": c.before, "after": c.after, "counts": _changes_a_choice(c)}
            for c in changes
        ]
        console.json({"version": 1, "changed": count > 0, "changes": rows})
        return int(count > 0)
    for change in changes:
        console.text(str(change), hanging=2)
    others = len(changes) - count
    text = counted(count, "change") if count else "no change"
    if others:
        text += f" of what is chosen, and {counted(others, 'other difference')}"
    console.line(text, "bold" if count else "bold green")
    return int(count > 0)


def _changes_a_choice(change: Change) -> bool:
    if change.what == "denied":
        return change.before is None or change.after is None  # else it is denied on both sides, for other reasons
    return change.what in ("config", "near tie")
