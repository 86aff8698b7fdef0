"""Write tables as another system's tuning files.

Exit code 1: something in the tables could not be carried over, as the format has no place for it. The files are written
all the same; what is missing is named by kind, with an example, and --json lists all.
"""

from __future__ import annotations

import argparse

from .._console import Console
from ._common import add_json, add_out, expanded, imports_elsewhere, module_name
from ._losses import show_losses

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "tables as another system's tuning files"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    from ..interop import FORMATS

    formats = [each.name for each in FORMATS.values() if each.writes]
    parser.add_argument("--format", required=True, choices=formats, help="whose files to write")
    parser.add_argument(
        "paths", nargs="+", metavar="PATH", help="table files or folders of them; journals for megatron-ranks"
    )
    add_out(parser, "FOLDER", "folder to write in")
    parser.add_argument(
        "--package",
        type=module_name,
        action="append",
        default=[],
        metavar="MODULE",
        help="package whose autotuners say in which order a kernel takes its arguments; may be repeated",
    )
    add_json(parser)


def run(options: argparse.Namespace, console: Console) -> int:
    """Do it and return the exit code: 1 where something could not come along."""
    from ..interop import FORMATS, write
    from ..inventory import take_inventory
    from ..journal import find_journals, read_journal
    from ._tables import read_tables

    names = None
    if options.package:
        with imports_elsewhere():
            names = take_inventory(options.package).autotuners
    if FORMATS[options.format].of_journals:
        journals = [read_journal(path) for path in find_journals(options.paths)]
        done = write(options.format, (), options.out, names=names, journals=journals)
    else:
        done = write(options.format, read_tables(expanded(options.paths)), options.out, names=names)
    if options.json:
        losses = [loss.to_json() for loss in done.losses]
        console.json({"version": 1, "files": [str(path) for path in done.files], "losses": losses})
        return int(bool(done.losses))
    for path in done.files:
        console.line(str(path))
    show_losses(console, done.losses)
    return int(bool(done.losses))
