"""Merge the journals of recording runs into tables, FOLDER/<arch>/<package>.json: give FOLDER to
--triton-autotune-table-path.

Where FOLDER has a table of an arch and package that was recorded, the new one continues it: what it denies stays
denied, entries that nothing was recorded for stay, and of candidates within noise of each other the one that it has
stays chosen. --replace starts anew, without reading it. Other tables in FOLDER are left alone.

Tables among the JOURNALs, as files or as folders of them, are merged too, as if they were in FOLDER: what was recorded
goes over them. Without any journal tables alone are joined.

A candidate's time is the median over recordings of each one's 20th percentile. Tied with the fastest are all within 1 %
of it and its own noise, (median - 20th percentile) / median, of which 15 % count at most; of these the largest in tile
sizes times stages is chosen, then the one of most warps. So noisy timings may give a choice up to 16 % slower than the
fastest, and none of the recordings' winners; `report` shows such a key as noisy, and --rule majority chooses by votes.

The result depends on what was measured and on these tables alone, not on the order or the names of the journals.
"""

from __future__ import annotations

import argparse
import datetime
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from .._console import Console
from .._words import counted
from ._common import add_journals, add_json, add_out, add_rule, no_records
from ._progress import reading

if TYPE_CHECKING:
    from ..journal import Scan
    from ..spec import Json
    from ..tables import TableFile

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "merge journals into tables"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    add_journals(parser)
    add_out(parser, "FOLDER", "folder to write the tables to")
    parser.add_argument("--arch", metavar="ARCH", help="merge this arch alone (default: every arch recorded)")
    add_rule(parser)
    parser.add_argument(
        "--date",
        type=_date,
        metavar="YYYY-MM-DD",
        help="date of the measurement, for the entries' evidence (default: today)",
    )
    parser.add_argument(
        "--replace",
        action="store_true",
        help="drop the entries and denied configs of tables that are in FOLDER (default: keep what was not recorded)",
    )
    add_json(parser)


def _date(text: str) -> str:
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", text):
        raise argparse.ArgumentTypeError(f"expected a date such as 2026-01-31, found {text!r}")
    try:
        return datetime.date.fromisoformat(text).isoformat()
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from None


class _Folder:
    """The tables that are in the output folder already, for the archs and packages that the journals have."""

    def __init__(self, folder: str, arch: str | None, replace: bool, given: Sequence[TableFile]) -> None:
        self._folder = folder
        self._arch = arch
        self._replace = replace
        self._given = given
        self._recorded = {(table.arch, table.package) for table in given}
        self.found: dict[tuple[str, str], TableFile] = {}

    def scan(self, paths: Iterable[str]) -> Iterator[Scan]:
        """Read journals, and see whose tables are wanted."""
        from ..journal import scan_journal

        for path in paths:
            scan = scan_journal(path)
            self._recorded.update({(each.identity.arch, each.identity.kernel.package) for each in scan.measurements})
            yield scan

    def tables(self) -> Iterator[TableFile]:
        """The tables, after those given. To be asked for when the journals have been read, as a merge does."""
        from ..tables import read_table

        yield from self._given
        for arch, package in sorted(self._recorded):
            path = self.path(arch, package)
            if not self._replace and self._arch in (None, arch) and path.exists():
                table = self.found[arch, package] = read_table(path)
                yield table

    def path(self, arch: str, package: str) -> Path:
        """Where a table is, or would be."""
        return Path(self._folder) / arch / f"{package}.json"

    def kept(self, table: TableFile) -> dict[str, Json] | None:
        """What a merged table has of the one before it; None where there was none or it was not read."""
        before = self.found.get((table.arch, table.package))
        if before is None:
            return None
        recorded = {entry.identity: entry for entry in table.entries}
        anew = [entry for entry in before.entries if recorded[entry.identity] is not entry]
        return {
            "entries": len(before.entries) - len(anew),
            "denied": len(before.denied),
            "recorded_again": len(anew),
            "changed": sum(recorded[entry.identity].config != entry.config for entry in anew),
        }


def run(options: argparse.Namespace, console: Console) -> int:
    """Do it and return the exit code."""
    from ..errors import JournalError
    from ..journal import find_journals
    from ..merge import merge
    from ..tables import write_table
    from ._tables import read_tables, sorted_by_content

    date = options.date or datetime.date.today().isoformat()
    journals, tables = sorted_by_content(options.journals)
    given = read_tables(tables)
    paths = find_journals(journals)
    folder = _Folder(options.out, options.arch, options.replace, given)
    with reading(console, paths, quiet=options.json) as files:
        merged = merge(folder.scan(files), rule=options.rule, arch=options.arch, date=date, tables=folder.tables())
    if not merged.records and paths:
        raise no_records("merge", paths)
    if paths and all(facts.choice is None for facts in merged.keys):
        raise JournalError(
            f"merge: no entry comes of {counted(merged.records, 'record')} in {counted(len(paths), 'journal')}: "
            "expected at least one key that was timed in record mode; `triton-tuning report` shows what they hold",
            file=paths[0] if len(paths) == 1 else None,
        )
    replaced = {
        (table.arch, table.package)
        for table in merged.tables
        if options.replace and folder.path(table.arch, table.package).exists()
    }
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
                        "kept": folder.kept(table),
                        "replaced": (table.arch, table.package) in replaced,
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
        kept = folder.kept(table)
        if kept is not None:
            console.text(
                f"kept of the table before it: {counted(kept['entries'], 'entry')}, {kept['denied']} denied; recorded "
                f"again: {counted(kept['recorded_again'], 'entry')}, {kept['changed']} with another config",
                indent=2,
                hanging=4,
            )
        elif (table.arch, table.package) in replaced:
            console.text("the table before it was replaced, with what it denied", indent=2, hanging=4)
    console.line(
        f"recordings disagree on {counted(found['disagreeing_keys'], 'key')}; near ties: {found['near_tied_keys']}; "
        f"without a candidate that can be chosen: {found['keys_without_choice']}"
    )
    for path, size in merged.torn:
        console.text(f"{path}: its last frame is torn ({counted(size, 'byte')}), all before it was merged", hanging=2)
    for note in merged.notes:
        console.text(note, hanging=2)
    return 0
