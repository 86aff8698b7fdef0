"""Say what deterministic mode would set, accept and refuse here, and change nothing."""

from __future__ import annotations

import argparse
import itertools

from .._console import Console
from ._common import add_json, imports_elsewhere

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "what deterministic mode would set, accept and refuse here"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("--attention-backend", metavar="NAME", help="also judge this attention backend")
    parser.add_argument(
        "--attention-library",
        choices=("transformer_engine",),
        help="the library whose backend that is, where it is not torch's or diffusers'",
    )
    add_json(parser)


def run(options: argparse.Namespace, console: Console) -> int:
    """Do it and return the exit code."""
    from ..determinism import doctor

    with imports_elsewhere():
        report = doctor(attention_backend=options.attention_backend, attention_library=options.attention_library)
    if options.json:
        console.json(report.to_json())
        return int(bool(report.refused))
    for section, rows in itertools.groupby(report.rows, key=lambda row: row.section):
        console.heading(section)
        for row in rows:
            change = f": {row.found or '(unset)'}" + (f" -> {row.becomes}" if row.becomes else "")
            style = {"refused": "bold red", "warning": "yellow", "set": "cyan"}.get(row.status, "")
            console.line(f"  {row.status:9} {row.name}{change}", style)
            if row.reason:
                console.text(row.reason, indent=12)
    console.line(report.verdict, "bold red" if report.refused else "bold green")
    return int(bool(report.refused))
