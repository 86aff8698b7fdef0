"""Put the times of two sides beside each other, range by range, most time lost first.

A side is a CSV that tuning.bitexact.cost_table.write_ranges wrote, or one of "nsys stats --format csv" (its reports
nvtx_gpu_proj_sum and nvtx_sum). With a threshold it is a gate: the exit code is 1 where a range is beyond it.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

from .._console import Console, UsageError
from .._words import counted
from ._common import add_json

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "what deterministic mode costs, range by range: two CSVs side by side, and a gate"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("before", help="CSV of the one side, such as the default")
    parser.add_argument("after", help="CSV of the other, such as deterministic mode")
    parser.add_argument("--max-slowdown", type=_number, metavar="RATIO", help="how many times as long a range may take")
    parser.add_argument("--max-lost", type=_number, metavar="MS", help="how many ms of a step a range may lose")
    parser.add_argument(
        "--range", action="append", default=[], metavar="NAME", help="judge this range alone; may be repeated"
    )
    parser.add_argument(
        "--ignore-below", type=_number, default=0.0, metavar="MS", help="do not judge ranges shorter than this"
    )
    parser.add_argument(
        "--one-sided", action="append", default=[], metavar="NAME", help="let one side lack this range; may be repeated"
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the table as CSV, too")
    add_json(parser)


def _number(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0, found {text!r}")
    return value


def run(options: argparse.Namespace, console: Console) -> int:
    """Do it and return the exit code: 1 where a range is beyond the gate."""
    from ..bitexact.cost_table import CostGate, join_ranges, read_ranges, write_table

    judged = options.max_slowdown is not None or options.max_lost is not None
    if options.range and not judged:
        raise UsageError("--range: expected --max-slowdown or --max-lost to judge it by, found neither")
    table = join_ranges(read_ranges(options.before), read_ranges(options.after))
    problems: list[str] = []
    if judged:
        gate = CostGate(
            ratio=options.max_slowdown,
            lost=options.max_lost,
            ranges=tuple(options.range),
            ignore_below=options.ignore_below,
            one_sided=tuple(options.one_sided),
        )
        problems = gate.problems(table)
    if options.output is not None:
        write_table(options.output, table)
    if options.json:
        console.json({**table.to_json(), "problems": [*problems]})
        return int(bool(problems))
    before, after = table.sides
    console.text(f"{before} (before) and {after} (after): {table.clock} time in ms for each step, most lost first")
    console.table(
        ("before", "after", "lost", "ratio", "range"),
        [
            (_shown(row.before), _shown(row.after), _shown(row.lost), _shown(row.ratio, 2), row.name)
            for row in table.rows
        ],
    )
    for problem in problems:
        console.text(problem, hanging=2, style="bold red")
    if problems:
        console.line(counted(len(problems), "range") + " beyond the gate", "bold red")
    return int(bool(problems))


def _shown(number: float | None, digits: int = 3) -> str:
    return "" if number is None else f"{number:.{digits}f}"
