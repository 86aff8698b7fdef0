"""Say what changed between two tables, two sets of journals, or the manifests of two runs."""

from __future__ import annotations

import argparse

from .._console import Console, counted
from ._common import add_json

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "what changed between two tables, journals or manifests"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    text = "table, folder of tables, journal, folder or prefix of journals, or manifest"
    parser.add_argument("before", help=text)
    parser.add_argument("after", help="the same kind of thing")
    add_json(parser)


def run(options: argparse.Namespace, console: Console) -> int:
    """Do it and return the exit code: 1 where something changed."""
    from ..difference import diff, load_side

    changes = diff(load_side(options.before), load_side(options.after))
    if options.json:
        rows = [{"what": c.what, "name": c.name, "before": c.before, "after": c.after} for c in changes]
        console.json({"version": 1, "changes": rows})
        return int(bool(changes))
    for change in changes:
        console.text(str(change), hanging=2)
    console.line(counted(len(changes), "change") if changes else "no change", "bold" if changes else "bold green")
    return int(bool(changes))
