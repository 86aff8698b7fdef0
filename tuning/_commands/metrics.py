"""Show recorded metrics, compare a run with its standard bit for bit, or make a run the standard.

A run is a file that tuning.bitexact.metrics_file.write_metrics wrote. The exit code of compare is 1 where anything
differs beyond the tolerances that the standard holds; record refuses under CI.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from .._console import Console
from .._words import counted
from ._common import add_json

if TYPE_CHECKING:
    from ..bitexact.metrics import Metrics

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "recorded metrics beside their standard, bit for bit: show, compare, record"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    show = actions.add_parser("show", help="what a file holds", description="Say what a file of metrics holds.")
    show.add_argument("file", help="standard, or file of a run")
    add_json(show)
    text = "Compare a run with its standard; exit code 1 where they differ."
    compare = actions.add_parser("compare", help="a run beside its standard", description=text)
    compare.add_argument("standard", help="the committed file")
    compare.add_argument("run_file", metavar="run", help="file of the run")
    compare.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw both, as .html, .png or .svg (needs matplotlib)"
    )
    add_json(compare)
    text = "Make a run the standard, with the tolerances that the standard had. Refused under CI."
    record = actions.add_parser("record", help="make a run the standard", description=text)
    record.add_argument("run_file", metavar="run", help="file of the run")
    record.add_argument("standard", help="file to write")
    add_json(record)


def run(options: argparse.Namespace, console: Console) -> int:
    """Do it and return the exit code: 1 where the run differs."""
    if options.action == "show":
        return _show(options, console)
    return _compare(options, console) if options.action == "compare" else _record(options, console)


def _rows(metrics: Metrics) -> list[dict[str, object]]:
    from ..bitexact.metrics_values import encode

    rows: list[dict[str, object]] = []
    for name, points in metrics.series.items():
        last = points[max(points)]
        shown = encode(last.dtype, last.bits[0]) if not last.shape else f"shape {list(last.shape)}"
        tolerance = metrics.tolerances.get(name)
        rows.append(
            {
                "metric": name,
                "dtype": last.dtype,
                "steps": len(points),
                "first_step": min(points),
                "last_step": max(points),
                "last_value": shown,
                "tolerance": None if tolerance is None else str(tolerance),
            }
        )
    return rows


def _show(options: argparse.Namespace, console: Console) -> int:
    from ..bitexact.metrics_file import read_metrics

    metrics = read_metrics(options.file)
    rows = _rows(metrics)
    if options.json:
        console.json({"version": 1, "provenance": dict(metrics.provenance), "metrics": rows})
        return 0
    console.text(", ".join(f"{name} {value}" for name, value in metrics.provenance.items()))
    console.table(
        ("dtype", "steps", "last value", "tolerance", "metric"),
        [
            (
                str(row["dtype"]),
                f"{row['first_step']}-{row['last_step']} ({row['steps']})",
                str(row["last_value"]),
                str(row["tolerance"] or ""),
                str(row["metric"]),
            )
            for row in rows
        ],
    )
    console.line(counted(len(rows), "metric"))
    return 0


def _compare(options: argparse.Namespace, console: Console) -> int:
    from ..bitexact.metrics import compare_metrics
    from ..bitexact.metrics_file import read_metrics

    standard, found = read_metrics(options.standard), read_metrics(options.run_file)
    comparison = compare_metrics(standard, found)
    if options.plot is not None:
        from ..bitexact.metrics_plot import plot_metrics

        plot_metrics(options.plot, standard, found, comparison)
    if options.json:
        console.json(comparison.to_json())
        return int(not comparison.passed)
    verdict, *lines = comparison.text().splitlines()
    console.line(verdict, "bold green" if comparison.passed else "bold red")
    for line in lines:
        console.text(line.strip(), indent=2, hanging=4)
    if options.plot is not None:
        console.line(f"drawn in {options.plot}")
    return int(not comparison.passed)


def _record(options: argparse.Namespace, console: Console) -> int:
    import dataclasses

    from ..bitexact.metrics import compare_metrics
    from ..bitexact.metrics_file import read_metrics, record_standard, refuse_under_ci

    refuse_under_ci()
    found = read_metrics(options.run_file)
    before = read_metrics(options.standard) if Path(options.standard).exists() else None
    changed = None
    if before is not None:
        kept = {name: tolerance for name, tolerance in before.tolerances.items() if name in found.series}
        found = dataclasses.replace(found, tolerances={**kept, **found.tolerances})
        changed = compare_metrics(before, dataclasses.replace(found, tolerances={}))
    record_standard(options.standard, found)
    if options.json:
        document = None if changed is None else changed.to_json()
        console.json({"version": 1, "standard": options.standard, "metrics": len(found.series), "changed": document})
        return 0
    console.line(f"{options.standard}: {counted(len(found.series), 'metric')} recorded; review and commit it")
    if changed is not None:
        console.text("beside the standard before: " + changed.text().splitlines()[0], indent=2)
    return 0
