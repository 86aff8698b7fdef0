"""Say what the journals of recording runs hold: for each kernel and key what a merge would choose, where the recordings
disagree, and what recording again would change. Nothing is written.
"""

from __future__ import annotations

import argparse

from .._console import Console
from ._common import add_journals, add_json, add_rule, no_records

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "say what journals hold: choices, disagreement, near ties, failures, regret"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    add_journals(parser)
    parser.add_argument("--arch", metavar="ARCH", help="report on this arch alone (default: every arch recorded)")
    parser.add_argument(
        "--kernel",
        action="append",
        default=[],
        metavar="NAME",
        help="show the kernels of this name, module or package alone, with every candidate; may be repeated",
    )
    parser.add_argument("--details", action="store_true", help="show every candidate of every kernel")
    add_rule(parser)
    add_json(parser)


def run(options: argparse.Namespace, console: Console) -> int:
    """Do it and return the exit code."""
    from ..journal import find_journals, scan_journal
    from ..merge import merge
    from ..report import report_json, report_rows
    from ._rows import print_rows

    paths = find_journals(options.journals)
    merged = merge(map(scan_journal, paths), rule=options.rule, arch=options.arch)
    if not merged.records:
        raise no_records("report", paths)
    if options.json:
        console.json(report_json(merged))
    else:
        print_rows(console, report_rows(merged, kernels=options.kernel, details=options.details))
    return 0
