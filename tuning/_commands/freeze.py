"""Turn the choices of a run, from its manifest, into tables that make exactly these choices again."""

from __future__ import annotations

import argparse

from .._console import Console
from .._words import counted
from ._common import add_json

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "tables that make exactly the choices of a run again"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("manifests", nargs="+", metavar="MANIFEST", help="manifest of a run; several of its ranks")
    parser.add_argument(
        "-o", "--output", required=True, metavar="FOLDER", help="folder to write <arch>/<package>.json in"
    )
    add_json(parser)


def run(options: argparse.Namespace, console: Console) -> int:
    """Do it and return the exit code: 1 where a key had several configs, of which a table can hold one."""
    from ..freeze import freeze
    from ..manifest import read_manifest
    from ..tables import write_table

    frozen = freeze(read_manifest(path) for path in options.manifests)
    paths = [str(write_table(options.output, table)) for table in frozen.tables]
    if options.json:
        console.json({"version": 1, "files": paths, "conflicts": [each.to_json() for each in frozen.conflicts]})
        return int(not frozen.exact)
    for path, table in zip(paths, frozen.tables, strict=True):
        console.line(f"{path}: {counted(len(table.entries), 'entry')}")
    for conflict in frozen.conflicts:
        console.text(str(conflict), hanging=2, style="yellow")
    return int(not frozen.exact)
