"""Say what the journals of recording runs hold: for each kernel and key what a merge would choose, where the recordings
disagree, and what recording again would change. Nothing is written, but for the page of --html.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from .._console import Console
from ..errors import TuningError
from ._common import add_journals, add_json, add_rule, no_records
from ._progress import reading

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "say what journals hold: choices, disagreement, near ties, failures, regret"


_WORDS = """Columns:
  ms          median over the recordings of each recording's median, in milliseconds
  agree       recordings whose own winner the choice is, of all
  tied        candidates that timings cannot tell from the choice; `merge --help` has the rule
  failed      candidates that failed in some recording, and are not chosen
  regret      the most by which the choice was slower than the fastest candidate of a recording
  confidence  clear: nothing is tied; tied; noisy: timings spread by more than a tie may cover; single: one recording;
              none: no choice
With --details or --kernel, for each candidate:
  20 %, 80 %  the medians of those percentiles of the recordings' timings, in milliseconds
  slower      than the fastest candidate, by the 20th percentile
  differs     how far recordings are apart: from the 20th to the 80th percentile of them, as a part of the time
  timed, wins recordings that timed it, and those whose winner it was
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.epilog = _WORDS
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
    parser.add_argument(
        "--html", metavar="FILE", help="write the report as one HTML page, with plots, that needs no other file"
    )
    add_json(parser)


def run(options: argparse.Namespace, console: Console) -> int:
    """Do it and return the exit code."""
    from .._report_page import page
    from ..journal import find_journals, scan_journal
    from ..merge import merge
    from ..report import report_json, report_rows, select_kernels
    from ._rows import print_rows

    paths = find_journals(options.journals)
    with reading(console, paths, quiet=options.json) as files:
        merged = merge(map(scan_journal, files), rule=options.rule, arch=options.arch)
    if not merged.records:
        raise no_records("report", paths)
    if options.kernel:
        merged = select_kernels(merged, options.kernel)
    if options.html is not None:
        _write_page(options.html, page(merged))
    if options.json:
        console.json(report_json(merged))
    elif options.html is not None:
        console.line(f"wrote {options.html}")
    else:
        print_rows(console, report_rows(merged, kernels=options.kernel, details=options.details))
    return 0


def _write_page(path: str, text: str) -> None:
    from .._atomic import write_atomically

    try:
        write_atomically(Path(path), text.encode("utf-8", "backslashreplace"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise TuningError(f"--html: {path}: expected a file that can be written: {reason}") from error
