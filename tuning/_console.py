"""How the command line prints: text that stays readable at any width, styled where there is a terminal and rich.

Qualified names of kernels are long, often longer than a terminal is wide, and never broken. So a table has its widest
column last, which is wrapped at spaces; where even that does not fit, each row becomes a block of its own.
"""

from __future__ import annotations

import json
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from .errors import TuningError
from .spec import Json

__all__ = ["Console", "UsageError", "shorten_path"]

_NARROWEST = 40
_LAST_COLUMN = 40  # the least that is left for it


class UsageError(TuningError):
    """The command was called wrongly: it ends with exit code 2."""


class Console:
    """Prints to one stream.

    Args:
        stream: where to; standard output when None.
        width: columns to use; those of the terminal when None, and 80 where there is none.
    """

    def __init__(self, stream: TextIO | None = None, *, width: int | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self.is_terminal = self._stream.isatty()
        self.width = max(width if width is not None else shutil.get_terminal_size((80, 24)).columns, _NARROWEST)
        self._styled = _rich_console(self._stream) if self.is_terminal else None

    @property
    def styled(self) -> Any:
        """A ``rich.console.Console`` on the same stream; None where there is no terminal, or no rich."""
        return self._styled

    def line(self, text: str = "", style: str = "") -> None:
        """One line as it is, however long, but for what could steer a terminal: names and errors come out of files."""
        text = _clean(text)
        if self._styled is not None and style:
            from rich.text import Text

            self._styled.print(Text(text, style=style), soft_wrap=True)
        else:
            self._stream.write(text + "\n")

    def text(self, text: str, *, indent: int = 0, hanging: int | None = None, style: str = "") -> None:
        """A paragraph, broken at spaces only; lines after the first are indented by ``hanging``."""
        further = indent if hanging is None else hanging
        for line in _wrapped(text, self.width, indent, further):
            self.line(line, style)

    def heading(self, text: str) -> None:
        """A heading, with an empty line before it."""
        self.line()
        self.line(text, "bold")

    def table(self, header: Sequence[str], rows: Iterable[Sequence[str]], *, indent: int = 2) -> None:
        """A table. All columns but the last keep their width; the last is wrapped at spaces.

        Where that leaves too little for the last, each row becomes a block: its last cell, and the others below it.
        """
        body = [list(map(str, row)) for row in rows]
        widths = [max(map(len, column)) for column in zip(header, *body, strict=True)]
        before = indent + sum(width + 2 for width in widths[:-1])
        if body and self.width - before < min(widths[-1], _LAST_COLUMN):
            self._blocks(header, body, indent)
        elif body:
            right = [all(map(_is_number, column)) for column in zip(*body, strict=True)]
            for number, row in enumerate([list(header), *body]):
                cells = [
                    cell.rjust(width) if as_number else cell.ljust(width)
                    for cell, width, as_number in zip(row[:-1], widths[:-1], right[:-1], strict=True)
                ]
                lead = " " * indent + "".join(f"{cell}  " for cell in cells)
                first, *rest = _wrapped(row[-1], self.width, before, before)
                self.line((lead + first[before:]).rstrip(), "" if number else "dim")
                for line in rest:
                    self.line(line)

    def _blocks(self, header: Sequence[str], body: Sequence[Sequence[str]], indent: int) -> None:
        for row in body:
            self.text(row[-1], indent=indent, hanging=indent + 4, style="cyan")
            facts = [f"{name} {cell}".strip() for name, cell in zip(header[:-1], row[:-1], strict=True) if cell]
            self.text(", ".join(facts), indent=indent + 2, hanging=indent + 4)

    def json(self, value: Json) -> None:
        """One JSON document, and nothing else may go to the same stream."""
        self._stream.write(json.dumps(value, indent=2, ensure_ascii=True, allow_nan=False) + "\n")

    def transient(self, text: str) -> None:
        """A status line that the next one replaces; nothing where there is no terminal. Empty text removes it."""
        if self.is_terminal:
            self._stream.write("\r\x1b[K" + _clean(text)[: self.width - 1])
            self._stream.flush()


def _clean(text: str) -> str:
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def _wrapped(text: str, width: int, indent: int, hanging: int) -> list[str]:
    lines = textwrap.wrap(
        text,
        width,
        initial_indent=" " * indent,
        subsequent_indent=" " * hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return lines or [""]


def _is_number(text: str) -> bool:
    return not text or text.strip().rstrip("%x").replace(".", "", 1).replace(",", "").lstrip("+-").isdigit()


def _rich_console(stream: TextIO) -> Any:
    try:
        from rich.console import Console as RichConsole
    except ImportError:
        return None
    return RichConsole(file=stream, highlight=False, markup=False)


def shorten_path(path: str, folder: str) -> str:
    """``path`` relative to ``folder`` where it lies in it."""
    prefix = folder.rstrip("/") + "/"
    return path[len(prefix) :] if path.startswith(prefix) else path
