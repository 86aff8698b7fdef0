"""Progress of reading many files: a bar where there is a terminal, and nothing elsewhere."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from .._console import Console

__all__ = ["reading"]

_MANY = 32  # fewer are read before anybody wonders
_EVERY_S = 0.1


@contextlib.contextmanager
def reading(console: Console, paths: Sequence[str], *, quiet: bool = False) -> Iterator[Iterator[str]]:
    """The paths one by one, with a bar that is gone when the block ends.

    Args:
        console: where to.
        paths: of the files.
        quiet: show nothing, since the output is JSON.
    """
    if quiet or len(paths) < _MANY or not console.is_terminal:
        yield iter(paths)
        return
    if console.styled is None:
        try:
            yield _in_words(console, paths)
        finally:
            console.transient("")
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = ("reading", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console.styled, transient=True) as bar:
        yield iter(bar.track(paths, update_period=_EVERY_S))


def _in_words(console: Console, paths: Sequence[str]) -> Iterator[str]:
    said = 0.0
    for number, path in enumerate(paths):
        if time.monotonic() - said > _EVERY_S:
            console.transient(f"reading {number} of {len(paths)} journals")
            said = time.monotonic()
        yield path
    console.transient(f"merging {len(paths)} journals")
