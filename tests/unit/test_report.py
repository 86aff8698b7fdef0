"""Reports: what a merge found, as JSON, as rows, and on a terminal, with rich and without."""

from __future__ import annotations

import io
import json
import sys
from typing import Any

import pytest
from recordings import environment, journal, record, ssd_journals

from tuning.journal import Journal
from tuning.merge import KeyFacts, MergeResult, merge
from tuning.report import (
    candidate_rows,
    open_console,
    outlook,
    overview_rows,
    print_report,
    rank_rows,
    rank_text,
    report_json,
    report_rows,
    text_lines,
)
from tuning.spec import Key, LaunchConfig


def disagreeing() -> MergeResult:
    """Eight ranks on two hosts; ranks 0 to 5 find 16 faster, 6 and 7 find 32; 64 fails everywhere."""
    journals = [
        journal(
            record({16: 1.0 if rank < 6 else 1.5, 32: 1.2, 64: None}),
            record({16: 2.0, 32: 1.0}, kernel="pkg.other.clear"),
            rank=rank,
            host=f"host{rank // 4}",
        )
        for rank in range(8)
    ]
    return merge(journals)


def facts_of(result: MergeResult, name: str) -> KeyFacts:
    return next(facts for facts in result.keys if facts.kernel.bare_name == name)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((), ""), ((3,), "3"), ((0, 1, 2), "0-2"), ((7, 0, 2, 1, 5, 5), "0-2, 5, 7"), ((1, 2), "1-2")],
)
def test_ranks_in_words(ranks: tuple[int, ...], text: str) -> None:
    assert rank_text(ranks) == text


# ------------------------------------------------------------------------------------------------------------- JSON


def test_the_json_form_has_all_facts() -> None:
    document = json.loads(json.dumps(report_json(disagreeing()), allow_nan=False))
    assert {name: document[name] for name in ("version", "journals", "keys", "disagreeing_keys", "torn", "notes")} == {
        "version": 1,
        "journals": 8,
        "keys": 2,
        "disagreeing_keys": 1,
        "torn": [],
        "notes": [],
    }
    (result,) = (item for item in document["results"] if item["kernel"] == "pkg.module.kernel")
    small, large, failing = ({"kwargs": {"BLOCK": block}, "num_warps": 4, "num_stages": 3} for block in (16, 32, 64))
    assert (result["choice"], result["time_ms"], result["agreement"], result["recordings"]) == (small, 1.0, 6, 8)
    assert result["winners"] == [{"config": small, "recordings": 6}, {"config": large, "recordings": 2}]
    assert result["failures"] == [{"config": failing, "errors": ["OutOfResources: shared memory"]}]
    assert [item["config"] for item in result["timings"]] == [small, large, failing]
    assert result["timings"][2]["low_ms"] is None  # never timed: infinity is not JSON
    assert [item["worst_regret"] for item in result["by_rank"]] == [0.0] * 6 + [pytest.approx(0.25)] * 2
    assert result["by_rank"][6] == {
        "rank": 6,
        "hosts": ["host1"],
        "recordings": 1,
        "winners": [large],
        "worst_regret": pytest.approx(0.25),
    }
    assert result["by_recording"][7] == {
        "journal": "rec.rank7.journal",
        "rank": 7,
        "host": "host1",
        "device": "NVIDIA H200",
        "winner": large,
        "winner_ms": 1.2,
        "regret": pytest.approx(0.25),
    }
    assert Key.from_json(result["key"]) == Key.of({"n": 128}, {"x_ptr": "bfloat16"})
    assert LaunchConfig.from_json(result["choice"]) == facts_of(disagreeing(), "kernel").choice


def test_single_recordings_can_be_left_out() -> None:
    whole, short = (report_json(disagreeing(), recordings=wanted) for wanted in (True, False))
    for item in whole["results"]:
        del item["by_recording"]
    assert short == whole


def test_what_is_not_known_is_null() -> None:
    broken = merge([journal(record({16: None, 32: None}), record({16: 0.0, 32: 1.0}, kernel="pkg.zero"))])
    document = json.loads(json.dumps(report_json(broken), allow_nan=False))
    nothing, zero = document["results"]
    assert (nothing["choice"], nothing["time_ms"], nothing["worst_regret"]) == (None, None, None)
    assert (zero["time_ms"], zero["worst_regret"]) == (0.0, None)
    assert json.loads(json.dumps(report_json(merge([])), allow_nan=False))["results"] == []


# ---------------------------------------------------------------------------------------------------------- outlook


def test_the_outlook_says_what_recording_again_would_change() -> None:
    def said(*runs: dict[int, Any], **options: Any) -> str:
        (facts,) = merge([journal(record(run), rank=rank) for rank, run in enumerate(runs)], **options).keys
        return outlook(facts)

    assert said({16: 1.0, 32: 2.0}, {16: 1.0, 32: 2.0}) == ""
    assert said({16: 1.0, 32: 2.0}) == "one recording: record again to see what is noise"
    assert said({16: 1.0, 32: 1.001}, {16: 1.0, 32: 1.001}) == "2 candidates are within 1.0 %: the fixed rule decides"
    assert said({16: None}) == "no candidate works in all recordings: see the failures"
    noisy: dict[int, Any] = {16: (1.0, 0.5, 2.0), 32: (2.0, 1.9, 2.1)}
    assert said(noisy, noisy) == ("timings spread by 50.0 %, more than a tie may cover: record again on an idle device")
    split: list[dict[int, Any]] = [{16: 1.0, 32: 2.0}] * 2 + [{16: 2.0, 32: 1.0}] * 2
    assert said(*split, tolerance=0) == (
        "recording again may choose BLOCK=16 num_warps=4 num_stages=3: so do merges of a part of these recordings"
    )


# ------------------------------------------------------------------------------------------------------------- rows


def test_the_overview_has_one_row_for_each_key() -> None:
    table = overview_rows(disagreeing())
    assert table.header == ("kernel", "key", "choice", "ms:", "agree:", "tied:", "failed:", "regret:", "confidence")
    assert table.rows == (
        ("kernel", "n=128", "BLOCK=16 num_warps=4 num_stages=3", "1", "6/8", "", "1", "25.0 %", "clear"),
        ("clear", "n=128", "BLOCK=32 num_warps=4 num_stages=3", "1", "8/8", "", "", "0.0 %", "clear"),
    )
    assert table.notes == ("2 keys of 2 kernels from 8 journals; recordings disagree on 1 key; near ties: 0",)


def test_names_in_the_overview_tell_rows_apart() -> None:
    def rows(*records: Any) -> list[tuple[str, str]]:
        return [(row[0], row[1]) for row in overview_rows(merge([journal(*records)])).rows]

    same_name = [record({16: 1.0}, kernel=name) for name in ("pkg.a.k", "pkg.b.k", "pkg.b.other")]
    assert [name for name, _ in rows(*same_name)] == ["pkg.a.k", "pkg.b.k", "other"]
    same_values = [record({16: 1.0}, key=Key.of({"n": 1}, {"x": dtype})) for dtype in ("int8", "int16")]
    assert [key for _, key in rows(*same_values)] == ["n=1 x:int16", "n=1 x:int8"]
    both = merge([journal(record({16: 1.0}), record({16: 1.0}, arch="sm103"))])
    assert [row[0] for row in overview_rows(both).rows] == ["sm103", "sm90"]


def test_the_overview_says_what_needs_attention() -> None:
    noisy: dict[int, Any] = {16: (1.0, 0.5, 2.0), 32: (2.0, 1.9, 2.1)}
    records = [record(noisy, key=Key.of({"n": n})) for n in range(30)]
    torn = Journal("torn.journal", environment(), tuple(records), 17)
    once = record({16: 1.0}, kernel="pkg.single")
    notes = overview_rows(merge([torn, journal(*records, once, triton="3.7.1")])).notes
    assert notes[1:4] == (
        "torn.journal: 17 bytes of an interrupted record at the end",
        "sm90, pkg: timings of several Triton versions were pooled: 3.6.0, 3.7.1",
        "kernel n=0: timings spread by 50.0 %, more than a tie may cover: record again on an idle device",
    )
    assert notes[-2:] == (
        "and 10 keys more: see the JSON form",
        "1 key has one recording: record again to see what is noise",
    )


def test_candidates_of_a_key() -> None:
    table = candidate_rows(facts_of(disagreeing(), "kernel"))
    assert table.title == "pkg.module.kernel n=128 x_ptr:bfloat16 on sm90"
    block = "BLOCK={} num_warps=4 num_stages=3".format
    assert table.rows == (
        ("chosen", block(16), "1", "1", "1", "0.0 %", "30.0 %", "8/8", "6", ""),
        ("", block(32), "1.2", "1.2", "1.2", "20.0 %", "0.0 %", "8/8", "2", ""),
        ("out", block(64), "", "", "", "", "0.0 %", "0/8", "", "failed 8: OutOfResources: shared memory"),
    )


def test_winners_of_a_key_with_their_ranks() -> None:
    table = rank_rows(facts_of(disagreeing(), "kernel"))
    assert table.rows == (
        ("BLOCK=16 num_warps=4 num_stages=3", "6", "0-5", "0.0 %"),
        ("BLOCK=32 num_warps=4 num_stages=3", "2", "6-7", "25.0 %"),
    )


def test_a_report_shows_the_overview_and_where_recordings_disagree() -> None:
    def titles(**options: Any) -> list[str]:
        return [table.title.split(" ")[0] for table in report_rows(disagreeing(), **options)]

    assert titles() == ["Merged", "Winners:"]
    assert titles(details=True) == ["Merged", "pkg.module.kernel", "Winners:", "pkg.other.clear", "Winners:"]
    for name in ("clear", "pkg.other.clear", "pkg.other"):
        assert titles(kernels=[name]) == ["pkg.other.clear", "Winners:"]
    assert titles(kernels=["pkg"]) == ["pkg.module.kernel", "Winners:", "pkg.other.clear", "Winners:"]
    assert titles(kernels=["pk", "lear"]) == []


def test_a_report_on_very_many_keys_stays_short() -> None:
    runs = [
        journal(*(record({16: first, 32: 1.2}, key=Key.of({"n": n})) for n in range(50)), rank=rank)
        for rank, first in enumerate((1.0, 1.0, 1.5))
    ]
    tables = report_rows(merge(runs))
    assert len(tables) == 1 + 20
    assert tables[-1].notes == ("and 30 keys more on which recordings disagree",)


# --------------------------------------------------------------------------------------------------------- terminal


def printed(result: MergeResult, console: Any, stream: io.StringIO) -> str:
    print_report(report_rows(result, details=True), console)
    return stream.getvalue()


def test_plain_text_lines_up() -> None:
    assert text_lines([rank_rows(facts_of(disagreeing(), "kernel"))]) == (
        "Winners: pkg.module.kernel n=128 x_ptr:bfloat16 on sm90",
        "winner                             recordings  ranks  regret",
        "BLOCK=16 num_warps=4 num_stages=3           6  0-5     0.0 %",
        "BLOCK=32 num_warps=4 num_stages=3           2  6-7    25.0 %",
    )


def test_without_rich_the_report_is_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)
    monkeypatch.setitem(sys.modules, "rich.console", None)
    stream = io.StringIO()
    console = open_console(stream)
    assert console is stream
    lines = text_lines(report_rows(disagreeing(), details=True))
    assert printed(disagreeing(), console, stream) == "".join(f"{line}\n" for line in lines)


def test_with_rich_everything_is_there() -> None:
    pytest.importorskip("rich")
    from rich.console import Console

    stream = io.StringIO()
    text = printed(ssd_journals_merged(), Console(file=stream, width=300), stream)
    for facts in ssd_journals_merged().keys:
        assert facts.kernel.bare_name in text
        assert str(facts.choice) in text
    assert "OutOfResources" in text
    assert hasattr(open_console(stream), "print")


def ssd_journals_merged() -> MergeResult:
    return merge(ssd_journals())


@pytest.mark.parametrize("rich", [True, False])
def test_texts_from_files_can_neither_steer_a_terminal_nor_be_markup(rich: bool) -> None:
    if rich:
        pytest.importorskip("rich")
    hostile = "[red]not markup[/red] \x1b[31m\x1b]0;title\x07 \u202e end"
    bad = record({16: 1.0, 32: None})
    timings = (bad.timings[0], type(bad.timings[1])(bad.timings[1].config, None, hostile))
    result = merge([journal(type(bad)(bad.kernel, bad.key, "sm90", timings, bad.winner, note=hostile))])
    stream = io.StringIO()
    if rich:
        from rich.console import Console

        console: Any = Console(file=stream, width=600)
    else:
        console = stream
    text = printed(result, console, stream)
    # As the reason of the failure, and as a note.
    assert text.count("[red]not markup[/red] \\x1b[31m\\x1b]0;title\\x07 \\u202e end") == 2
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "\x07" not in text
