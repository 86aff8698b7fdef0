"""What the command line prints stays readable: names whole, columns aligned, nothing but text where there is no tty."""

from __future__ import annotations

import io
import sys

import pytest

from tuning._console import Console, shorten_path
from tuning._words import counted

NAME = "some_package.with.deep.modules.and_then.a_kernel_with_a_long_name_that_goes_on_and_on_fwd_kernel"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def printed(width: int, header: list[str], *rows: list[str]) -> list[str]:
    stream = io.StringIO()
    Console(stream, width=width).table(header, rows)
    return stream.getvalue().splitlines()


def test_a_table_has_aligned_columns_and_numbers_to_the_right():
    assert printed(80, ["ms", "wins", "config"], ["1.5", "10", "A=1"], ["12.25", "2", "A=2"]) == [
        "     ms  wins  config",
        "    1.5    10  A=1",
        "  12.25     2  A=2",
    ]


def test_the_last_column_is_wrapped_at_spaces_to_its_own_column():
    lines = printed(60, ["n", "config"], ["1", "AAAA=1 BBBB=2 CCCC=3 DDDD=4 EEEE=5 FFFF=6 GGGG=7 HHHH=8 IIII=9"])
    assert lines[1] == "  1  AAAA=1 BBBB=2 CCCC=3 DDDD=4 EEEE=5 FFFF=6 GGGG=7 HHHH=8"
    assert lines[2] == "     IIII=9"


def test_a_name_is_never_broken_however_narrow():
    for width in (1, 40, 60, 80, 120):
        lines = printed(width, ["first", "second", "kernel"], ["x" * 30, "y" * 30, NAME])
        assert [line for line in lines if NAME in line]
        text = io.StringIO()
        Console(text, width=width).text(f"see {NAME} for more", indent=2)
        assert NAME in text.getvalue()


def test_where_columns_do_not_fit_each_row_is_a_block():
    assert printed(60, ["module", "", "kernel"], ["m" * 40, "odd", NAME]) == [
        f"  {NAME}",
        f"    module {'m' * 40}, odd",
    ]


def test_an_empty_table_prints_nothing():
    assert printed(80, ["a", "b"]) == []


def test_a_paragraph_hangs_and_keeps_hyphens():
    stream = io.StringIO()
    Console(stream, width=40).text("Triton times what is known as config-invariant", indent=2, hanging=6)
    assert stream.getvalue().splitlines() == ["  Triton times what is known as", "      config-invariant"]


def test_without_a_terminal_there_are_no_escapes_and_no_progress():
    stream = io.StringIO()
    console = Console(stream, width=80)
    console.line("plain", "bold red")
    console.transient("working")
    assert stream.getvalue() == "plain\n"


def test_a_terminal_gets_styles_and_progress():
    pytest.importorskip("rich")
    stream = Terminal()
    console = Console(stream, width=80)
    console.transient("working")
    console.transient("")
    assert "working" in stream.getvalue()
    console.line(NAME, "bold")
    assert NAME in stream.getvalue()


def test_a_terminal_without_rich_gets_plain_text(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    stream = Terminal()
    Console(stream, width=80).line(NAME, "bold")
    assert stream.getvalue() == f"{NAME}\n"


def test_what_comes_out_of_files_cannot_steer_a_terminal():
    stream = Terminal()
    console = Console(stream, width=80)
    for style in ("", "bold"):
        console.line("a\x1b[2Jb\rc", style)
    assert "\x1b[2J" not in stream.getvalue()
    assert stream.getvalue().count("a\\x1b[2Jb\\rc") == 2


def test_json_is_one_document_and_refuses_what_json_has_not():
    stream = io.StringIO()
    Console(stream).json({"text": "é"})
    assert stream.getvalue() == '{\n  "text": "\\u00e9"\n}\n'
    with pytest.raises(ValueError, match="not JSON compliant"):
        Console(stream).json({"time": float("nan")})


@pytest.mark.parametrize(
    ("count", "noun", "expected"),
    [(0, "key", "0 keys"), (1, "key", "1 key"), (2, "entry", "2 entries"), (3, "denied config", "3 denied configs")],
)
def test_counts_have_their_plural(count: int, noun: str, expected: str):
    assert counted(count, noun) == expected


def test_a_path_is_shortened_only_below_the_folder():
    assert shorten_path("/a/b/c.json", "/a/b") == "c.json"
    assert shorten_path("/a/bc/c.json", "/a/b") == "/a/bc/c.json"
