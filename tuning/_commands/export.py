"""Write tables as another system's tuning files."""

from __future__ import annotations

import argparse

from .._console import Console
from ._common import add_json, imports_elsewhere, module_name

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
    parser.add_argument("-o", "--output", required=True, metavar="FOLDER", help="folder to write in")
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
    from ._tables import read_folders

    names = None
    if options.package:
        with imports_elsewhere():
            names = take_inventory(options.package).autotuners
    if FORMATS[options.format].of_journals:
        journals = [read_journal(path) for path in find_journals(options.paths)]
        done = write(options.format, (), options.output, names=names, journals=journals)
    else:
        tables, unreadable = read_folders(options.paths, None)
        if unreadable:
            raise unreadable[0]
        done = write(options.format, tables, options.output, names=names)
    if options.json:
        losses = [loss.to_json() for loss in done.losses]
        console.json({"version": 1, "files": [str(path) for path in done.files], "losses": losses})
        return int(bool(done.losses))
    for path in done.files:
        console.line(str(path))
    for loss in done.losses:
        console.text(f"not carried: {loss}", hanging=2, style="yellow")
    return int(bool(done.losses))
