"""Say which bytes of two checkpoints differ, and whether they are trained values or unwritten padding."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from .._console import Console, UsageError
from ._common import add_json

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "which bytes of two checkpoints differ: trained values or padding"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("first", type=Path, help="checkpoint file or folder")
    parser.add_argument("second", type=Path, help="the other one")
    parser.add_argument(
        "--trained",
        type=Path,
        metavar="FILE",
        help='JSON object {"tensor": [[first, end], ...]}: which elements of a padded tensor hold trained values',
    )
    add_json(parser)


def run(options: argparse.Namespace, console: Console) -> int:
    """Do it and return the exit code: 1 where trained values differ."""
    from ..determinism import compare_checkpoints

    trained = None if options.trained is None else _ranges(options.trained)
    comparison = compare_checkpoints(options.first, options.second, trained=trained)
    if options.json:
        console.json(comparison.to_json())
    else:
        for line in comparison.lines():
            console.text(line, hanging=2)
        console.line(comparison.verdict, "bold green" if comparison.trained_equal else "bold red")
    return int(not comparison.trained_equal)


def _ranges(path: Path) -> dict[str, list[tuple[int, int]]]:
    expected = 'a JSON object {"tensor": [[first, end], ...]} of integers'
    try:
        data: Any = json.loads(path.read_text(encoding="utf-8"))
        found = {name: [(first, end) for first, end in ranges] for name, ranges in data.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise UsageError(f"{path}: expected {expected}, found {error}") from None
    if not all(type(edge) is int for ranges in found.values() for pair in ranges for edge in pair):
        raise UsageError(f"{path}: expected {expected}, found another type in a range")
    return found
