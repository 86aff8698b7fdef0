"""Compile, ahead of a run, what it will launch: for every launch that journals hold, the config that the tables choose.

The compiled kernels go into Triton's compile cache (TRITON_CACHE_DIR, default ~/.triton/cache), where the run finds
them if it has the same Triton and the same version of the kernels' packages. No GPU is needed, nor used where there is
one. Tables alone are not enough: only journals hold the types and constants that the compiler needs.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .._console import Console, UsageError
from ._common import add_journals, add_json, add_tables, check_archs

if TYPE_CHECKING:
    from ..warmup import Progress, Report

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "compile what a run with tables will launch, ahead of it and in parallel"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    add_journals(parser)
    add_tables(parser)
    parser.add_argument(
        "--arch", metavar="ARCH", help="what to compile for, such as sm90 (default: what was recorded on)"
    )
    parser.add_argument(
        "--jobs", type=int, metavar="N", help="number of processes (default: one for each CPU that may be used)"
    )
    parser.add_argument(
        "--on-miss",
        choices=("cheapest", "nearest", "model", "error"),
        default="cheapest",
        help="the run's rule for keys that no table has (default: cheapest)",
    )
    add_json(parser)


def run(options: argparse.Namespace, console: Console) -> int:
    """Do it and return the exit code."""
    from ..policy import AutotunePolicy
    from ..warmup import warm_up

    if options.jobs is not None and options.jobs < 1:
        raise UsageError(f"--jobs: expected a positive number, found {options.jobs}")
    check_archs([options.arch] if options.arch else None, options.table)
    policy = AutotunePolicy(mode="pinned", table_path=tuple(options.table), on_miss=options.on_miss)
    with _progress(console, quiet=options.json) as progress:
        report = warm_up(options.journals, arch=options.arch, policy=policy, jobs=options.jobs, progress=progress)
    if options.json:
        console.json(report.to_json())
    else:
        _print(report, console)
    return 1 if report.failures else 0


@contextlib.contextmanager
def _progress(console: Console, *, quiet: bool) -> Iterator[Progress | None]:
    """A bar where there is a terminal and rich, else a line for each launch; nothing where output is JSON."""
    if quiet:
        yield None
        return
    if console.is_terminal:
        try:
            from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bar
        except ImportError:
            pass
        else:
            columns = (
                "compiling",
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[name]}"),
            )
            with Bar(*columns, transient=True) as bar:
                shown = bar.add_task("", total=None, name="starting")

                def advance(count: int, total: int, name: str) -> None:
                    bar.update(shown, completed=count, total=total, name=name.rpartition(".")[2])

                yield advance
            return
    yield lambda count, total, name: console.line(f"{count} of {total}  {name}")


def _print(report: Report, console: Console) -> None:
    if report.warmed:
        console.heading(f"Compiled for {report.arch}")
        rows = [
            (
                "in cache" if item.cached else f"{item.seconds:.1f} s",
                item.source,
                f"{item.kernel} [{item.key}] {item.config}" + "".join(f"; {note}" for note in item.notes),
            )
            for item in report.warmed
        ]
        console.table(("time", "chosen by", "kernel, key and config"), rows)
    if report.failures:
        console.heading("Not compiled")
        for failure in report.failures:
            console.text(str(failure), indent=2, hanging=4)
    console.line()
    known = sum(item.cached for item in report.warmed)
    text = (
        f"{_counted(report.launches, 'launch')} recorded on {', '.join(report.recorded_on)}: "
        f"{len(report.warmed) - known} compiled for {report.arch}, {known} in the cache "
        f"before, {report.same} the same as another, {len(report.failures)} not compiled; {report.seconds:.1f} s with "
        f"{_counted(report.jobs, 'process')} (start-up {report.start_up_s:.1f} s, "
        f"longest compile {report.longest_s:.1f} s)"
    )
    console.text(text)
    if report.warmed and "TRITON_CACHE_DIR" not in os.environ:
        console.text("The cache is Triton's default one; set TRITON_CACHE_DIR for the run and for this command alike.")


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}es"
