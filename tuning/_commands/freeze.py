"""Turn the choices of a run, from its manifest, into tables that make exactly these choices again.

Exit code 1: the tables do not bring the whole run back: a key had several configs, of which a table can hold one; a
kernel of config_invariant was timed; or the table that was there denies what the run launched.
"""

from __future__ import annotations

import argparse

from .._console import Console
from ._common import add_json, add_out, expanded

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "tables that make exactly the choices of a run again"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    text = "manifest of a run; several of its ranks, or a glob"
    parser.add_argument("manifests", nargs="+", metavar="MANIFEST", help=text)
    add_out(parser, "FOLDER", "folder to write <arch>/<package>.json in; a table that is there is continued")
    text = "drop what tables that are in FOLDER have (default: keep what the run did not launch, and what they deny)"
    parser.add_argument("--replace", action="store_true", help=text)
    add_json(parser)


def run(options: argparse.Namespace, console: Console) -> int:
    """Do it and return the exit code: 1 where the tables do not bring the run back."""
    from ..freeze import freeze
    from ..manifest import read_manifest
    from ._tables import write_tables

    frozen = freeze(read_manifest(path) for path in expanded(options.manifests))
    written = write_tables(options.out, frozen.tables, replace=options.replace)
    overruled = [f"{row} on {each.table.arch}" for each in written for row in each.overruled]
    exact = frozen.exact and not overruled
    if options.json:
        console.json(
            {
                "version": 1,
                "files": [each.path for each in written],
                "exact": exact,
                "conflicts": [each.to_json() for each in frozen.conflicts],
                "left_to_clock": list(frozen.left_to_clock),
                "overruled": overruled,
            }
        )
        return int(not exact)
    for each in written:
        console.line(each.text)
    for conflict in frozen.conflicts:
        console.text(str(conflict), hanging=2, style="yellow")
    for kernel in frozen.left_to_clock:
        console.text(
            f"{kernel}: timed by Triton in the run, as it will be again, whatever the table: it is in "
            "config_invariant; to launch what the run launched, drop it from there",
            hanging=2,
            style="yellow",
        )
    for row in overruled:
        text = "launched by the run, and denied by the table before: it will not be; see --replace"
        console.text(f"{row}: {text}", hanging=2, style="yellow")
    return int(not exact)
