"""Two results of one case, side by side: every number that both have, and how it changed."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a JSON document with its path; booleans and members of lists longer than 8 are left out."""
    if isinstance(value, bool):
        return
    if isinstance(value, (int, float)):
        yield path, float(value)
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from numbers(inner, f"{path}.{name}" if path else str(name))
    elif isinstance(value, list) and len(value) <= 8:
        for index, inner in enumerate(value):
            yield from numbers(inner, f"{path}[{index}]")


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, float, float]]:
    """(path, before, after) of every number that both results have, in the order of ``before``.

    Raises:
        ValueError: the results are of different cases, or of different devices, whose figures do not compare; or one
            of them does not say which.
    """
    for name in ("case", "device"):
        if before.get(name) is None or after.get(name) is None:
            raise ValueError(f"{name}: expected in both results, found {before.get(name)!r} and {after.get(name)!r}")
        if before.get(name) != after.get(name):
            raise ValueError(f"{name}: {before.get(name)!r} and {after.get(name)!r} do not compare")
    found = dict(numbers(after))
    return [(path, value, found[path]) for path, value in numbers(before) if path in found]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of ``python -m bench compare``."""
    parser.add_argument("before", type=Path)
    parser.add_argument("after", type=Path)
    parser.add_argument("--over", type=float, default=0.05, help="show changes larger than this ratio (default 0.05)")


def main(options: argparse.Namespace) -> int:
    """Print what changed; 0, or 2 where the results do not compare."""
    before, after = (json.loads(path.read_text()) for path in (options.before, options.after))
    try:
        pairs = compare(before, after)
    except ValueError as error:
        print(error)
        return 2
    for name in ("date", "commit", "triton", "torch"):
        print(f"{name}: {before.get(name)} -> {after.get(name)}")
    shown = 0
    for path, one, other in pairs:
        change = other / one - 1 if one else float(other != one)
        if abs(change) > options.over:
            shown += 1
            print(f"{path:60} {one:12.4g} {other:12.4g} {change:+8.1%}")
    print(f"{len(pairs)} numbers in both, {shown} changed by more than {options.over:.0%}")
    return 0
