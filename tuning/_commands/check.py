"""Hold tables against the installed packages: which entries no longer fit, and what to do about each.

Without a folder the packaged tables are checked. The packages that a table speaks of are imported. Entries of packages
that are not installed are counted and are no problem, unless nothing at all could be checked: then the exit code is 1.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .._console import Console
from .._words import counted
from ._common import add_arch, add_json, check_archs, imports_elsewhere

if TYPE_CHECKING:
    from ..checking import Finding

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "check tables against the installed packages and Triton"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument(
        "folders", nargs="*", metavar="FOLDER", help="folder with <arch>/<package>.json (default: the packaged tables)"
    )
    add_arch(parser, "check the tables of this arch (default: of every arch in the folder)")
    parser.add_argument(
        "--uncovered",
        action="store_true",
        help="also report, as problems, the autotuners of these packages of which the tables have no entry",
    )
    add_json(parser)


def run(options: argparse.Namespace, console: Console) -> int:
    """Do it and return the exit code."""
    from ..checking import check_coverage, check_tables, unseen_rows
    from ..policy import AutotunePolicy
    from ._tables import installed_autotuners, package_autotuners, read_folders

    check_archs(options.arch, options.folders)
    files, unreadable = read_folders(options.folders, options.arch)
    with imports_elsewhere():
        installed = installed_autotuners(files)
        whole = package_autotuners(files) if options.uncovered else ()
    findings = check_tables(
        files,
        installed.autotuners,
        triton=installed.triton,
        unimported=installed.unimported,
        versions=installed.versions,
    )
    findings += check_coverage(files, whole, beside=AutotunePolicy().config_invariant)
    problems = sum(finding.is_problem for finding in findings) + len(unreadable)
    counts = {
        "files": len(files) + len(unreadable),
        "entries": sum(len(file.entries) for file in files),
        "denied": sum(len(file.denied) for file in files),
        "unchecked": unseen_rows(files, findings),
        "problems": problems,
    }
    rows = counts["entries"] + counts["denied"]
    seen = rows - counts["unchecked"]
    nothing = rows > 0 and seen == 0
    code = int(problems > 0 or nothing)
    if options.json:
        console.json(
            {
                "version": 1,
                "triton": installed.triton,
                **counts,
                "findings": [finding.to_json() for finding in findings],
                "unreadable": [
                    {"file": error.file, "where": error.where, "message": error.message} for error in unreadable
                ],
            }
        )
        return code
    _show(console, findings, unreadable, counts["unchecked"])
    if problems:
        verdict = counted(problems, "problem")
    elif nothing:
        verdict = "nothing could be checked; install the packages that the tables are for"
    else:
        verdict = "no problem" if seen == rows else f"no problem in the {counted(seen, 'row')} that could be checked"
    console.line(
        f"{counted(counts['files'], 'table')}, {counted(counts['entries'], 'entry')}, "
        f"{counted(counts['denied'], 'denied config')} under Triton {installed.triton}: {verdict}",
        "bold red" if code else "bold green",
    )
    return code


def _show(console: Console, findings: Sequence[Finding], unreadable: Sequence[Any], unseen: int) -> None:
    for error in unreadable:
        console.text(f"unreadable: {error.message}", hanging=2)
    for file, group in itertools.groupby(findings, key=lambda finding: finding.file):
        shown = [finding for finding in group if finding.is_problem]
        if shown:
            console.line(file, "bold")
        for kernel, rows in itertools.groupby(shown, key=lambda finding: finding.kernel):
            if kernel:
                console.line(f"  {kernel}", "cyan")
            for finding in rows:
                place = f"{finding.entry}: " if finding.entry else ""
                console.text(f"{finding.kind.replace('_', ' ')}: {place}{finding.message}", indent=4, hanging=6)
    idle = sum(finding.kind == "idle_denial" for finding in findings)
    if idle:
        console.text(
            f"{counted(idle, 'denied config')} that {'is' if idle == 1 else 'are'} no candidate here: nothing to deny",
            style="dim",
        )
    unchecked = [finding for finding in findings if finding.kind == "unchecked"]
    # Of a kernel that was looked at, each row whose config a pruner may still return is a finding of its own.
    count = unseen + sum(bool(finding.entry) for finding in unchecked)
    if count:
        console.line(f"{counted(count, 'row')} could not be checked:", "dim")
        for reason in sorted({each.message.partition("not checked: ")[2] or each.message for each in unchecked}):
            console.text(reason, indent=2, hanging=4)
