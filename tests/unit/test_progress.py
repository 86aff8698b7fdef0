"""Progress of reading many files: for a person at a terminal, gone in the end, and never in anybody's output."""

from __future__ import annotations

import io
import sys

import pytest

from tuning._commands._progress import reading
from tuning._console import Console

PATHS = [f"rec.rank{number}.journal" for number in range(100)]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    stream = Terminal()
    monkeypatch.setattr(sys, "stdout", stream)
    return stream


@pytest.mark.parametrize("rich", [True, False])
def test_a_terminal_shows_how_far_it_is_and_then_nothing(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, rich: bool
) -> None:
    if rich:
        pytest.importorskip("rich")
        monkeypatch.setenv("TERM", "xterm-256color")
    else:
        monkeypatch.setitem(sys.modules, "rich.console", None)
    with reading(Console(terminal), PATHS) as files:
        assert list(files) == PATHS
    shown = terminal.getvalue()
    assert "100" in shown
    assert shown.endswith("\x1b[K") or "\x1b[2K" in shown  # the line is removed


def test_a_bar_does_not_outlive_an_error(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rich.console", None)

    def read() -> None:
        with reading(Console(terminal), PATHS) as files:
            next(files)
            raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        read()
    assert terminal.getvalue().endswith("\r\x1b[K")


@pytest.mark.parametrize(
    ("stream", "count", "quiet"), [(io.StringIO(), 100, False), (Terminal(), 100, True), (Terminal(), 3, False)]
)
def test_no_terminal_json_or_few_files_show_nothing(stream: io.StringIO, count: int, quiet: bool) -> None:
    with reading(Console(stream), PATHS[:count], quiet=quiet) as files:
        assert list(files) == PATHS[:count]
    assert stream.getvalue() == ""
