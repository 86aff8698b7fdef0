"""The report's page: whole, self-contained, inert whatever names are in it, and true to the merge."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from recordings import config, journal, record

from tuning._report_page import page
from tuning._report_plots import MOST_ROWS, RankRows
from tuning.cli import main
from tuning.journal import JournalWriter, find_journals, read_journal
from tuning.merge import KeyFacts, MergeResult, merge
from tuning.report import outlook
from tuning.spec import Key

ROOT = Path(__file__).parents[2]
JOURNALS = str(ROOT / "bench" / "data" / "journals")
HOSTILE = "pkg.m.</title></code><script>alert('1')</script><img/src=x>&amp;"
VOID = {"meta", "br", "img", "link", "input", "hr"}


class Page(HTMLParser):
    """Tags with attributes, text, and whether what is opened is closed."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


@pytest.mark.parametrize("time", [5e-324, 1e-320, 1.7976931348623157e308, 0.0])
def test_the_least_and_the_greatest_times_are_drawn(time: float) -> None:
    text = page(merge([journal(record({16: time, 32: time}), record({16: 5e-324, 32: time}, key=Key.of({"n": 1})))]))
    Page(text)
    for drawing in drawings(text):
        assert not any("nan" in value or "inf" in value for part in drawing.iter() for value in part.attrib.values())


def drawings(text: str) -> Iterator[ElementTree.Element]:
    for found in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        yield ElementTree.fromstring(found)


def measured() -> MergeResult:
    return merge(map(read_journal, find_journals([JOURNALS])))


def many(ranks: int, *, kernel: str = "pkg.m.kernel", spread: float = 0.0) -> MergeResult:
    """Each fifth rank finds 32 faster, and rank 1 could not launch 8."""

    def times(rank: int) -> dict[int, Any]:
        swapped = rank % 5 == 4
        return {16: 1.1 if swapped else 1.0, 32: 1.0 if swapped else 1.2, 64: 9.0, 8: None if rank == 1 else 1.5}

    return merge([journal(record(times(rank), kernel=kernel), rank=rank) for rank in range(ranks)])


@pytest.mark.parametrize("make", [measured, lambda: many(7, kernel=HOSTILE), lambda: many(200), lambda: many(1)])
def test_the_page_is_well_formed_and_needs_nothing_else(make: Any) -> None:
    text = page(make())
    read = Page(text)
    assert read.open == []
    assert read.named("script") == read.named("img") == read.named("link") == read.named("iframe") == []
    for tag, attributes in read.tags:
        assert not [name for name in attributes if name.startswith("on")]
        assert "src" not in attributes
        assert tag == "a" or "href" not in attributes
    ids = [attributes["id"] for _, attributes in read.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = {str(attributes["href"]) for attributes in read.named("a")}
    assert targets <= {f"#{name}" for name in ids}
    assert "url(" not in text
    assert "@import" not in text
    assert {"http-equiv": "Content-Security-Policy", "content": "default-src 'none'; style-src 'unsafe-inline'"} in (
        read.named("meta")
    )
    assert list(drawings(text))


def test_hostile_names_are_shown_and_do_nothing() -> None:
    errors = "OutOfResources </svg><b>\x1b[31m\u202e"
    facts = merge([journal(record({16: 1.0, 32: 2.0}, kernel=HOSTILE, key=Key.of({"n": "<b>'\""}), note=errors))])
    text = page(facts)
    assert "alert('1')</script>" in "".join(Page(text).words)
    assert "<script>" not in text
    assert "<b>" not in text
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_the_page_says_what_the_merge_found() -> None:
    result = measured()
    text = page(result)
    words = " ".join("".join(Page(text).words).split())
    for facts in result.keys:
        assert facts.kernel.qualified_name in words
        assert str(facts.choice) in words
        assert outlook(facts) in words
        for item in facts.failures:
            assert f"failed {item.failed}: {'; '.join(item.errors)}" in words
    assert len(Page(text).named("details")) == 16
    # A plot of timings for each key, one of regrets, and one map.
    labels = [drawing.get("aria-label") for drawing in drawings(text)]
    assert sum(str(label).startswith("timings of") for label in labels) == 16
    assert labels.count("winners by rank and key") == 1
    assert labels.count("regret of the merged choice by rank") == 16


def cells(result: MergeResult) -> list[tuple[str, str]]:
    """Fill and tooltip of each square of the map."""
    (drawing,) = (each for each in drawings(page(result)) if each.get("aria-label") == "winners by rank and key")
    found = []
    for square in drawing.iter("rect"):
        title = square.find("title")
        assert title is not None
        found.append((str(square.get("fill")), str(title.text)))
    return found


def test_the_map_shows_which_ranks_found_another_winner() -> None:
    found = cells(many(10))
    assert len(found) == 10
    for rank, (fill, tip) in enumerate(found):
        other = rank % 5 == 4
        assert (fill == found[0][0]) == (not other)
        assert f"rank {rank}: {config(32 if other else 16)} (1 of 1)" in tip


def test_more_ranks_than_rows_share_them() -> None:
    found = cells(many(4 * MOST_ROWS))
    assert len(found) == MOST_ROWS
    assert "rank 4-7: BLOCK=16 num_warps=4 num_stages=3 (3 of 4); BLOCK=32" in found[1][1]


def test_journals_of_one_rank_have_rows_of_their_own() -> None:
    journals = [
        journal(record({16: 1.0, 32: 2.0}), rank=rank, path=path) for rank, path in ((0, "b"), (0, "a"), (7, "c"))
    ]
    (facts,) = merge(journals).keys
    rows = RankRows.of(facts.recordings)
    assert rows.names == ("0", "0 (2)", "7")
    assert [len(found) for found in rows.grouped(facts.recordings)] == [1, 1, 1]


def test_where_all_agree_there_is_no_map() -> None:
    result = merge([journal(record({16: 1.0, 32: 2.0}), rank=rank) for rank in range(3)])
    text = page(result)
    assert "Nowhere: on each key all recordings have one winner" in text
    assert "Nothing: each choice is clear and stable" in text


def bars(facts: KeyFacts, result: MergeResult) -> dict[str, float]:
    del facts
    (drawing,) = (each for each in drawings(page(result)) if str(each.get("aria-label")).startswith("regret"))
    return {str(bar.findtext("title")): float(str(bar.get("height"))) for bar in drawing.iter("rect")}


def test_regret_is_drawn_by_rank() -> None:
    result = many(5)
    found = bars(result.keys[0], result)
    assert len(found) == 5
    assert found["rank 4: 10.0 % slower than the fastest candidate there"] == max(found.values()) == 70.0
    assert found["rank 0: 0.0 % slower than the fastest candidate there"] == 1.0


def test_a_key_that_was_not_timed_has_no_plot() -> None:
    result = merge([journal(record({}, winner=64), rank=rank) for rank in range(2)])
    assert list(drawings(page(result))) == []
    nothing = merge([journal(record({16: None, 32: None}))])
    assert "no choice" in page(nothing)


def test_the_same_merge_gives_the_same_bytes() -> None:
    journals = [read_journal(path) for path in find_journals([JOURNALS])]
    assert page(merge(journals)) == page(merge(journals[::-1]))


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "report.html"
    assert main(["report", JOURNALS, "--html", str(out)]) == 0
    assert capsys.readouterr().out == f"wrote {out}\n"
    assert out.read_text("utf-8") == page(merge(read_journal(path) for path in find_journals([JOURNALS])))
    assert main(["report", JOURNALS, "--json", "--html", str(out)]) == 0
    assert capsys.readouterr().out.startswith("{")


@pytest.mark.parametrize("place", ["no/such/folder.html", "."])
def test_a_page_that_cannot_be_written_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str], place: str) -> None:
    assert main(["report", JOURNALS, "--html", str(tmp_path / place)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert re.fullmatch(r"triton-tuning: error: --html: .*: expected a file that can be written: .*\n", said.err)
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_no_unicode_still_gives_a_page(tmp_path: Path) -> None:
    with JournalWriter(str(tmp_path / "rec"), journal().environment) as writer:
        writer.write(record({16: 1.0}))
    odd = tmp_path / "odd\udcff.journal"
    Path(writer.path).rename(odd)
    with odd.open("ab") as file:
        file.write(b"TTJ1")  # torn: the page names the file
    assert main(["report", str(tmp_path), "--html", str(tmp_path / "r.html")]) == 0
    assert "odd" in (tmp_path / "r.html").read_text("utf-8")
