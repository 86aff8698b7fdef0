"""Merge the journals of recording runs into tables, FOLDER/<arch>/<package>.json: give FOLDER to
--triton-autotune-table-path. Tables that are there already are replaced.

The result depends on what was measured alone, not on the order or the names of the journals.
"""

from __future__ import annotations

import argparse
import datetime
import re

from .._console import Console, counted
from ._common import add_journals, add_json, add_rule

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "merge journals into tables"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    add_journals(parser)
    parser.add_argument("-o", "--out", required=True, metavar="FOLDER", help="folder to write the tables to")
    parser.add_argument("--arch", metavar="ARCH", help="merge this arch alone (default: every arch recorded)")
    add_rule(parser)
    parser.add_argument(
        "--date",
        type=_date,
        metavar="YYYY-MM-DD",
        help="date of the measurement, for the entries' evidence (default: today)",
    )
    add_json(parser)


def _date(text: str) -> str:
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", text):
        raise argparse.ArgumentTypeError(f"expected a date such as 2026-01-31, found {text!r}")
    try:
        return datetime.date.fromisoformat(text).isoformat()
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


def run(options: argparse.Namespace, console: Console) -> int:
    """Do it and return the exit code."""
    from ..errors import JournalError
    from ..journal import find_journals, read_journal
    from ..merge import merge
    from ..tables import write_table

    date = options.date or datetime.date.today().isoformat()
    paths = find_journals(options.journals)
    merged = merge(map(read_journal, paths), rule=options.rule, arch=options.arch, date=date)
    if not merged.tables:
        raise JournalError(
            f"merge: no entry comes of {counted(merged.records, 'record')} in {counted(len(paths), 'journal')}: "
            "expected at least one key that was timed in record mode; `triton-tuning report` shows what they hold"
        )
    written = [(str(write_table(options.out, table)), table) for table in merged.tables]
    if options.json:
        console.json(
            {
                "version": 1,
                **merged.summary(),
                "tables": [
                    {
                        "path": path,
                        "arch": table.arch,
                        "package": table.package,
                        "entries": len(table.entries),
                        "denied": len(table.denied),
                    }
                    for path, table in written
                ],
                "torn": [{"journal": path, "bytes": size} for path, size in merged.torn],
                "notes": list(merged.notes),
            }
        )
        return 0
    found = merged.summary()
    counts = (counted(found[f"{noun}s"], noun) for noun in ("journal", "record", "key"))
    console.line(", ".join(counts))
    for path, table in written:
        denied = f", {len(table.denied)} denied" if table.denied else ""
        console.line(f"wrote {path}: {counted(len(table.entries), 'entry')}{denied}")
    console.line(
        f"recordings disagree on {counted(found['disagreeing_keys'], 'key')}; near ties: {found['near_tied_keys']}; "
        f"without a candidate that can be chosen: {found['keys_without_choice']}"
    )
    for path, size in merged.torn:
        console.text(f"{path}: its last frame is torn ({size} bytes), all before it was merged", hanging=2)
    for note in merged.notes:
        console.text(note, hanging=2)
    return 0
