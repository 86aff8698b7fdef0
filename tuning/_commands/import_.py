"""Read another system's tuning files and write them as tables.

Exit code 1: something in the files could not be carried over. It is named by kind, with an example; --json lists all.
"""

from __future__ import annotations

import argparse

from .._console import Console
from ..errors import TuningError
from ._common import add_json, add_out, check_archs, expanded, imports_elsewhere, module_name
from ._losses import show_losses

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "another system's tuning files as tables"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    from ..interop import FORMATS

    formats = [each.name for each in FORMATS.values() if each.reads]
    parser.add_argument("--format", required=True, choices=formats, help="whose files they are")
    parser.add_argument("paths", nargs="+", metavar="PATH", help="files, or folders of them")
    add_out(parser, "FOLDER", "folder to write <arch>/<package>.json in; a table that is there is continued")
    text = "drop what tables that are in FOLDER have (default: keep what is not imported, and what they deny)"
    parser.add_argument("--replace", action="store_true", help=text)
    parser.add_argument("--arch", metavar="ARCH", help="the arch that they are for, where the files do not say it")
    parser.add_argument(
        "--package",
        type=module_name,
        action="append",
        default=[],
        metavar="MODULE",
        help="package whose autotuners say what bare kernel names and nameless keys mean; may be repeated",
    )
    parser.add_argument(
        "--kernel",
        type=_kernel,
        action="append",
        default=[],
        metavar="BARE=QUALIFIED",
        help="kernel that a bare name means, where several have it or no package is given; may be repeated",
    )
    add_json(parser)


def _kernel(text: str) -> tuple[str, str]:
    from ..interop import known_kernels

    bare, _, qualified = text.partition("=")
    try:
        known_kernels({bare: qualified})
    except TuningError:
        bare = ""
    if not bare:
        raise argparse.ArgumentTypeError(
            f"expected a bare name and a qualified one, such as kernel=package.module.kernel, found {text!r}"
        )
    return bare, qualified


def run(options: argparse.Namespace, console: Console) -> int:
    """Do it and return the exit code: 1 where something could not come along."""
    from ..interop import read
    from ..inventory import take_inventory
    from ._tables import write_tables

    check_archs([options.arch] if options.arch else None)
    names: list[object] = [dict(options.kernel)]
    if options.package:
        with imports_elsewhere():
            names.append(take_inventory(options.package).autotuners)
    found = read(options.format, expanded(options.paths), arch=options.arch, names=names)
    written = write_tables(options.out, found.tables, replace=options.replace)
    if options.json:
        console.json(
            {
                "version": 1,
                "files": [each.path for each in written],
                "losses": [loss.to_json() for loss in found.losses],
            }
        )
        return int(bool(found.losses))
    for each in written:
        console.line(each.text)
    show_losses(console, found.losses)
    return int(bool(found.losses))
