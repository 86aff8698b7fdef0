"""Print the tables of a report at any width: in columns where they fit, else a block for each row."""

from __future__ import annotations

from collections.abc import Sequence

from .._console import Console
from ..report import Rows, text_lines

__all__ = ["print_rows"]

_NAME = 8  # a column wider than this can name a row


def print_rows(console: Console, tables: Sequence[Rows]) -> None:
    """Print tables, an empty line between them."""
    for number, table in enumerate(tables):
        if number:
            console.line()
        title, *lines = text_lines([Rows(table.title, table.header, table.rows)])
        console.text(title, hanging=4, style="bold")
        if all(len(line) <= console.width for line in lines):
            for line in lines:
                console.line(line)
        else:
            _print_blocks(console, table)
        for note in table.notes:
            console.text(note, indent=2, hanging=4)


def _print_blocks(console: Console, table: Rows) -> None:
    naming = next(
        (
            at
            for at, name in enumerate(table.header)
            if name and not name.endswith(":") and any(len(row[at]) > _NAME for row in table.rows)
        ),
        0,
    )
    for row in table.rows:
        console.text(row[naming], indent=2, hanging=6, style="cyan")
        facts = [
            f"{name.removesuffix(':')} {cell}".strip()
            for at, (name, cell) in enumerate(zip(table.header, row, strict=True))
            if cell and at != naming
        ]
        console.text(", ".join(facts), indent=4, hanging=6)
