"""Merging: what is chosen from which timings, what is denied, what tables say, and how often it comes out the same."""

from __future__ import annotations

import gc
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tracemalloc
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recordings import config, environment, journal, record, ssd_journals

from tuning.errors import JournalError, TuningError
from tuning.journal import Journal, JournalWriter, Scan, read_journal, scan_journal
from tuning.merge import KeyFacts, MergeResult, largest_first, merge, smallest_first
from tuning.spec import Key, LaunchConfig, TuningRecord
from tuning.tables import Denied, Entry, TableFile, load_tables, table_bytes, write_table

A, B, C, D = config(16), config(32), config(64), config(128)


def merged(*runs: Mapping[Any, Any], **options: Any) -> KeyFacts:
    """The facts of one kernel and key of which each of ``runs`` is a recording, by a rank of its own."""
    journals = [journal(record(run), rank=rank) for rank, run in enumerate(runs)]
    (facts,) = merge(journals, **options).keys
    return facts


def only(result: MergeResult) -> KeyFacts:
    (facts,) = result.keys
    return facts


def picks(result: MergeResult) -> dict[tuple[str, str, str], LaunchConfig | None]:
    return {(facts.arch, facts.kernel.qualified_name, facts.key.text): facts.choice for facts in result.keys}


# --------------------------------------------------------------------------------------------------------- choosing


def test_the_fastest_is_chosen() -> None:
    facts = merged({16: 3.0, 32: 1.0, 64: 2.0}, {16: 3.0, 32: 1.1, 64: 2.1})
    assert facts.choice == B
    assert [item.config for item in facts.candidates] == [B, C, A]
    assert facts.confidence == "clear"
    assert facts.near_ties == ()


def test_the_statistic_is_the_median_of_the_20th_percentiles() -> None:
    # In one recording of three something disturbed 32, and in all of them the upper half of its timings.
    facts = merged(
        {16: (1.0, 0.99, 1.01), 32: (1.3, 0.9, 9.0)},
        {16: (1.0, 0.99, 1.01), 32: (5.0, 4.0, 9.0)},
        {16: (1.0, 0.99, 1.01), 32: (1.2, 0.91, 9.0)},
        spread_limit=0,
    )
    assert facts.choice == B
    assert [(item.low_ms, item.median_ms, item.high_ms) for item in facts.candidates] == [
        (0.91, 1.3, 9.0),
        (0.99, 1.0, 1.01),
    ]


def test_a_recording_without_percentiles_counts_with_its_median() -> None:
    facts = merged({16: (1.0,), 32: (2.0,)}, {16: (1.0, 0.9), 32: (2.0, 1.9)})
    assert facts.choice == A
    assert facts.candidates[0].low_ms == pytest.approx(0.95)
    assert facts.candidates[0].median_ms == 1.0


@pytest.mark.parametrize("runs", [1, 2, 5])
def test_within_the_tolerance_the_largest_is_chosen(runs: int) -> None:
    inside, outside = {16: 1.0, 32: 1.004, 64: 1.0099, 128: 1.02}, {16: 1.0, 32: 1.004, 64: 1.011, 128: 1.02}
    assert merged(*[inside] * runs).choice == C
    assert merged(*[outside] * runs).choice == B
    assert merged(*[inside] * runs, tolerance=0).choice == A
    assert merged(*[inside] * runs, tolerance=0.05).choice == D
    assert merged(*[outside] * runs, tie_break=smallest_first).choice == A


def test_the_measured_spread_widens_the_tie() -> None:
    # The best one's median lies 4 % above its 20th percentile: what is 3 % slower may be as fast.
    spread = {16: (1.0, 0.96, 1.2), 32: (1.0, 0.99, 1.0)}
    facts = merged(spread, spread)
    assert facts.choice == B
    assert facts.spread == pytest.approx(0.04)
    assert facts.tolerance == pytest.approx(0.05)
    assert facts.confidence == "tied"
    assert [item.tied for item in facts.candidates] == [True, True]
    assert merged(spread, spread, spread_limit=0.01).choice == A


def test_a_spread_beyond_the_limit_makes_a_choice_noisy() -> None:
    noisy = {16: (1.0, 0.5, 2.0), 32: (0.65, 0.6, 0.7)}
    facts = merged(noisy, noisy)
    assert (facts.choice, facts.confidence) == (A, "noisy")
    assert facts.tolerance == pytest.approx(0.16)


def test_confidence_of_one_recording() -> None:
    assert merged({16: 1.0, 32: 2.0}).confidence == "single"
    assert merged({16: 1.0, 32: 2.0}).stability is None


def test_near_ties_do_not_depend_on_order_or_rank() -> None:
    # Candidates 0.1 % apart, noise of 0.3 %: each recording has another winner, in another order of candidates.
    noise = [[0.3, -0.2, 0.1, 0.0], [-0.3, 0.2, 0.3, -0.1], [0.0, 0.1, -0.3, 0.2], [0.1, 0.0, 0.2, -0.3]]
    runs = [
        {block: 1.0 + 0.001 * index + row[index] / 100 for index, block in enumerate((16, 32, 64, 128))}
        for row in noise
    ]
    assert len({min(run, key=run.__getitem__) for run in runs}) == 4
    for ranks in itertools.permutations(range(4)):
        journals = [
            journal(record(dict(sorted(runs[index].items(), reverse=bool(rank % 2)))), rank=rank)
            for index, rank in enumerate(ranks)
        ]
        (facts,) = merge(journals).keys
        assert facts.choice == D
        assert len(facts.near_ties) == 4
        assert facts.disagrees


@pytest.mark.parametrize("name", ["GROUP_SIZE_M", "NUM_SMS", "SPLIT_K", "num_ctas"])
def test_what_is_no_tile_does_not_make_a_candidate_large(name: str) -> None:
    tiles = LaunchConfig.build({"BLOCK_M": 128, name: 1}, num_warps=4, num_stages=3)
    counts = LaunchConfig.build({"BLOCK_M": 64, name: 8}, num_warps=4, num_stages=3)
    assert merged({tiles: 1.0, counts: 1.0}).choice == tiles
    assert min((tiles, counts), key=smallest_first) == counts


def test_the_orders_tell_all_candidates_apart() -> None:
    candidates = [
        config(64), config(32, stages=6), config(64, warps=8), config(64, maxnreg=32), config(64, num_ctas=2),
        LaunchConfig.build({"BLOCK": 64, "EVEN": True}), LaunchConfig.build({"BLOCK": 64, "EVEN": False}),
        LaunchConfig.build({"BLOCK": "64"}), LaunchConfig.build({}, num_warps=None, num_stages=None),
    ]  # fmt: skip
    for order in (largest_first, smallest_first):
        expected = sorted(candidates, key=order)
        for shuffled in itertools.islice(itertools.permutations(candidates), 0, 300_000, 9_973):
            assert sorted(shuffled, key=order) == expected
    assert sorted(candidates, key=largest_first)[0] == config(64, warps=8)
    assert sorted(candidates, key=smallest_first)[0] == LaunchConfig.build({}, num_warps=None, num_stages=None)


# --------------------------------------------------------------------------------------------------------- failures


def test_a_candidate_that_failed_once_is_not_chosen() -> None:
    facts = merged({16: 1.0, 32: 5.0}, {16: None, 32: 5.0}, {16: 1.0, 32: 5.0})
    assert facts.choice == B
    assert [(item.config, item.timed, item.failed, item.eligible) for item in facts.candidates] == [
        (A, 2, 1, False),
        (B, 3, 0, True),
    ]
    assert facts.failures[0].errors == ("OutOfResources: shared memory",)


def test_a_candidate_that_some_did_not_try_gives_way_to_those_that_all_did() -> None:
    facts = merged({16: 1.0, 32: 5.0}, {32: 5.0}, {64: 4.0, 32: 5.0})
    assert facts.choice == B
    # With no candidate common to all, the ones that most tried are compared.
    assert merged({16: 1.0, 32: 0.5}, {16: 1.0}, {128: 1.0}).choice == A


def test_what_failed_wherever_it_was_tried_is_denied() -> None:
    key = Key.of({"n": 128}, {"x_ptr": "bfloat16"})
    runs = [{16: 1.0, 32: None, 64: None}, {16: 1.0, 32: None, 64: 2.0}, {16: 1.0}]
    (table,) = merge([journal(record(run, key=key), rank=rank) for rank, run in enumerate(runs)]).tables
    assert [entry.config for entry in table.entries] == [A]
    assert table.denied == (
        Denied(
            "pkg.module.kernel",
            B,
            key.values,
            "failed in each recording: OutOfResources: shared memory",
            "2 recordings on sm90",
            None,
            key.dtypes,
        ),
    )


def test_where_nothing_works_nothing_is_chosen_or_denied() -> None:
    result = merge([journal(record({16: None, 32: None})), journal(record({16: None, 32: 1.0}), rank=1)])
    (facts,) = result.keys
    assert (facts.choice, facts.confidence, facts.stability) == (None, "none", None)
    assert facts.regrets == ()
    assert result.tables == ()
    assert result.notes == (
        "sm90, pkg.module.kernel n=128 x_ptr:bfloat16: no entry, "
        "for no candidate was timed without a failure in another recording",
    )


FAULT = "RuntimeError: CUDA error: an illegal memory access was encountered"


def faulty(times: Mapping[int, float | None], error: str = FAULT, **rest: Any) -> TuningRecord:
    """A record whose failures are those of a broken context."""
    whole = record(times, **rest)
    return replace(
        whole, timings=tuple(replace(item, error=error) if item.times_ms is None else item for item in whole.timings)
    )


def test_what_fails_after_the_context_broke_is_denied_nothing() -> None:
    later = Key.of({"n": 7})
    broken = journal(faulty({16: 9.0, 32: 8.0, 64: None, 128: None}), faulty({16: None, 32: None}, key=later))
    result = merge([broken])
    facts = only(result)
    assert facts.choice == B
    assert [(item.config, item.timed, item.failed) for item in facts.candidates] == [(B, 1, 0), (A, 1, 0), (C, 0, 1)]
    (table,) = result.tables
    assert [(row.config, row.key) for row in table.denied] == [(C, facts.key.values)]
    said = f"{C} broke the device's context once ({FAULT}): 3 failures after it are not held against the candidates"
    assert result.notes == (f"sm90, pkg.module.kernel n=128 x_ptr:bfloat16: {said}",)
    assert table.entries[0].evidence["note"] == said
    assert "failed" not in str([row.reason for row in table.denied if row.config != C])


def test_a_recording_that_a_broken_context_cut_short_gives_way_to_whole_ones() -> None:
    broken = journal(faulty({16: 1.0, 32: 2.0, 64: None, 128: None}))
    whole = [journal(record({16: 9.0, 32: 8.0, 64: 7.0, 128: 1.0}), rank=rank) for rank in (1, 2)]
    for journals in itertools.permutations([broken, *whole]):
        result = merge(journals)
        facts = only(result)
        assert (facts.choice, facts.recordings_count) == (D, 2)
        assert [item.config for item in facts.candidates if not item.eligible] == [C]
        assert result.tables[0].denied == ()


def test_a_context_that_went_on_to_time_anything_was_whole() -> None:
    # Within the record, and in a later one: the failures are the candidates' own.
    for records in (
        [faulty({16: None, 32: None, 64: 1.0})],
        [faulty({64: 1.0, 16: None, 32: None}), record({16: 2.0}, key=Key.of({"n": 7}))],
    ):
        (table,) = merge([journal(*records)]).tables
        assert [row.config for row in table.denied] == [A, B]
    # Other errors break nothing.
    (table,) = merge([journal(record({64: 1.0, 16: None, 32: None}))]).tables
    assert [row.config for row in table.denied] == [A, B]


def test_a_copy_of_a_recording_that_broke_the_context_is_cut_short_too() -> None:
    first = faulty({16: 1.0, 32: None, 64: None}, key=Key.of({"n": 1}))
    copy = faulty({16: 1.0, 32: None, 64: None}, key=Key.of({"n": True}), shared=True)
    (table,) = merge([journal(first, copy)]).tables
    assert [(row.config, str(row.key)) for row in table.denied] == [
        (B, str(key.values)) for key in (first.key, copy.key)
    ]


def test_a_key_of_which_nothing_was_timed_before_the_context_broke_has_no_entry() -> None:
    result = merge([journal(faulty({16: None, 32: None}))])
    assert (result.keys, result.tables) == ((), ())
    assert "broke the device's context once" in result.notes[0]


def test_candidates_that_differ_in_hooks_alone_are_one_and_fail_together() -> None:
    good, bad = record({16: 1.0, 32: 2.0}), record({16: None, 32: 2.0})
    both = record({}, winner=16)
    twice = type(both)(good.kernel, good.key, "sm90", (*good.timings, *bad.timings), B)
    (facts,) = merge([journal(twice)]).keys
    assert facts.choice == B
    assert [(item.config, item.timed, item.failed) for item in facts.candidates] == [(B, 1, 0), (A, 0, 1)]


# --------------------------------------------------------------------------------------------------------- majority


def test_majority_is_the_plain_vote() -> None:
    runs: list[dict[int, float]] = [{16: 1.0, 32: 1.1}, {16: 1.0, 32: 1.1}, {16: 9.0, 32: 1.0}]
    assert merged(*runs, rule="majority").choice == A
    # A winner that failed for somebody has no vote, and equal votes are broken by the fixed rule.
    assert merged(*runs, {16: None, 32: 1.0}, rule="majority").choice == B
    assert merged({16: 1.0, 32: 5.0}, {16: 5.0, 32: 1.0}, rule="majority").choice == B
    assert merged({16: 1.0, 32: 5.0, 64: 7.0}, {16: None, 32: None, 64: 1.0}, rule="majority").choice == C


def test_a_warning_is_neither_a_recording_nor_a_vote() -> None:
    # Ranks 1 and 2 find 64 faster. Rank 0 finds 128 faster, and warns of an argument that is not in the key.
    first = record({64: 1.5, 128: 1.0})
    warning = record({}, winner=128, shared=True, note="argument 'N' is not in the key")
    others = [journal(record({64: 1.0, 128: 1.5}), rank=rank) for rank in (1, 2)]
    for mine in (journal(first, warning), journal(warning, first)):
        facts = only(merge([mine, *others], rule="majority"))
        assert facts.choice == config(64)
        assert facts.winners == ((config(64), 2), (config(128), 1))
        assert facts.recordings_count == 3
        assert facts.notes == ("argument 'N' is not in the key",)
        assert not facts.shared


def test_a_launch_that_the_compiler_sees_otherwise_is_no_vote() -> None:
    again = record({}, winner=128, shared=True, specialization={"seen": 1})
    others = [journal(record({64: 1.0, 128: 1.5}), rank=rank) for rank in (1, 2)]
    facts = only(merge([journal(record({64: 1.5, 128: 1.0}), again), *others], rule="majority"))
    assert (facts.choice, facts.recordings_count) == (config(64), 3)


def test_warnings_alone_give_nothing() -> None:
    result = merge([journal(record({}, winner=64, shared=True, note="a warning"))])
    assert (result.keys, result.tables) == ((), ())


@pytest.mark.parametrize("rule", ["pooled", "majority"])
def test_the_only_candidate_that_pruning_left_is_chosen_though_nothing_was_timed(rule: Any) -> None:
    journals = [journal(record({}, winner=64), rank=rank) for rank in range(3)]
    result = merge(journals, rule=rule)
    facts = only(result)
    assert (facts.choice, facts.agreement, facts.confidence, facts.stability) == (config(64), 3, "clear", None)
    ((entry,),) = [table.entries for table in result.tables]
    assert entry.config == config(64)
    assert entry.evidence["measured"] is False
    assert entry.evidence["best_ms"] == 0.0
    assert entry.evidence["note"] == "the only candidate that pruning left, not timed"
    table_bytes(result.tables[0])  # finite numbers alone
    assert result.notes == ()


def test_untimed_recordings_that_launched_different_candidates_choose_none() -> None:
    result = merge([journal(record({}, winner=64)), journal(record({}, winner=128), rank=1)])
    assert only(result).choice is None
    assert result.notes[0].endswith("no candidate was timed, and the recordings launched different ones")


def test_an_untimed_survivor_that_a_table_denies_is_not_chosen() -> None:
    denied = Denied("pkg.module.kernel", config(64), None, "wrong result", "a person")
    table = TableFile("sm90", "pkg", "", "", "", (), (denied,))
    assert only(merge([journal(record({}, winner=64))], tables=[table])).choice is None


def test_timings_count_before_an_untimed_survivor_elsewhere() -> None:
    facts = only(merge([journal(record({64: 1.0, 128: 2.0})), journal(record({}, winner=128), rank=1)]))
    assert (facts.choice, facts.recordings_count) == (config(64), 2)


def test_an_unknown_rule_or_a_wrong_number_is_said() -> None:
    with pytest.raises(TuningError, match="rule: expected pooled or majority, found 'best'"):
        merge([], rule="best")  # type: ignore[arg-type]
    for wrong in (-0.1, float("nan"), float("inf")):
        with pytest.raises(TuningError, match="tolerance: expected a fraction"):
            merge([], tolerance=wrong)
        with pytest.raises(TuningError, match="spread_limit: expected a fraction"):
            merge([], spread_limit=wrong)


# ----------------------------------------------------------------------------------------------------------- copies


def copied(folder: Path, count: int, name: str = "") -> list[Scan]:
    """Scans of a journal of ``count`` candidates and of its copy, under its own name or another."""
    folder.mkdir()
    with JournalWriter(f"{folder}/rec", environment()) as writer:
        writer.write(record({block: 1.0 + block for block in range(count)}))
    copy = folder / "copy" / (name or os.path.basename(writer.path))
    copy.parent.mkdir()
    shutil.copy(writer.path, copy)
    return [scan_journal(path) for path in (writer.path, copy)]


def test_copies_of_one_journal_count_once(tmp_path: Path) -> None:
    for at, scans in enumerate((copied(tmp_path / "a", 2), copied(tmp_path / "b", 40, "other.journal"))):
        result = merge([*scans, journal(record({0: 1.0, 1: 2.0}), rank=1)])
        assert (only(result).recordings_count, result.journals, result.records) == (2, 2, 2), at
        assert result.notes == ("1 journal left out: the same bytes as another one, a copy of it",)


def test_recordings_that_are_equal_by_chance_both_count(tmp_path: Path) -> None:
    first, second = copied(tmp_path / "a", 2, "rec.rank0.host.7.0123abcd.journal")
    assert first.content == second.content != ""
    assert only(merge([first, second])).recordings_count == 2


# ------------------------------------------------------------------------------------------------------------- keys


def test_each_typed_key_has_an_entry_of_its_own() -> None:
    keys = [Key.of({"flag": value}) for value in (True, 1, 1.0)]
    result = merge([journal(*(record({16: 1.0}, key=key, shared=index > 0) for index, key in enumerate(keys)))])
    assert len(result.keys) == len(result.tables[0].entries) == 3
    assert [entry.evidence.get("shared") for entry in result.tables[0].entries].count(True) == 2


def test_keys_in_another_order_are_one_key_and_a_call_order_is_kept() -> None:
    one = Key.of({"n": 1, "m": 2}, {"x": "int8", "y": "int8"}, ["y", "x"])
    two = Key.of({"m": 2, "n": 1}, {"y": "int8", "x": "int8"})
    for journals in itertools.permutations([journal(record({16: 1.0}, key=key)) for key in (one, two)]):
        (facts,) = merge(journals).keys
        assert facts.recordings_count == 2
        assert (facts.key.values, facts.key.call_order) == (one.values, ("y", "x"))


def test_archs_and_packages_are_tables_of_their_own() -> None:
    journals = [
        journal(
            record({16: 1.0}),
            record({16: 1.0}, kernel="other.k"),
            record({16: 1.0}, arch="sm103", source="99999999"),
        )
    ]
    result = merge(journals)
    assert [(table.arch, table.package) for table in result.tables] == [
        ("sm103", "pkg"),
        ("sm90", "other"),
        ("sm90", "pkg"),
    ]
    assert result.archs == ("sm103", "sm90")
    selected = merge(journals, arch="sm103")
    assert [(table.arch, table.package) for table in selected.tables] == [("sm103", "pkg")]
    assert (selected.archs, selected.records, selected.journals) == (("sm103",), 1, 1)


def test_an_arch_that_no_journal_has_is_said() -> None:
    with pytest.raises(JournalError, match=r"arch: no journal has 'sm100'; these journals have sm103, sm90"):
        merge([journal(record({16: 1.0})), journal(record({16: 1.0}, arch="sm103"))], arch="sm100")
    with pytest.raises(JournalError, match="these journals have no records"):
        merge([journal()], arch="sm90")


def test_timings_of_different_sources_are_not_pooled() -> None:
    journals = [
        journal(record({16: 1.0}, source=source), path=f"{name}.journal")
        for name, source in (("c", "aaaaaaaa"), ("a", "bbbbbbbb"), ("b", "aaaaaaaa"), ("d", None))
    ]
    for shuffled in itertools.permutations(journals):
        with pytest.raises(
            JournalError, match=r"2 different sources \(aaaaaaaa in b\.journal; bbbbbbbb in a\.j"
        ) as info:
            merge(shuffled)
        assert info.value.file == "a.journal"
    (facts,) = merge([journals[0], journals[3]]).keys
    assert facts.kernel.source_hash == "aaaaaaaa"
    # On another arch it may be another version.
    merge([journal(record({16: 1.0}, source="aaaaaaaa")), journal(record({16: 1.0}, source="bbbbbbbb", arch="sm80"))])


def test_nothing_gives_nothing() -> None:
    result = merge([])
    assert (result.tables, result.keys, result.archs, result.notes) == ((), (), (), ())
    torn = Journal("x", environment(arch=""), (), 12)
    assert merge([torn]).torn == (("x", 12),)


# ----------------------------------------------------------------------------------------------------------- tables


def test_evidence_says_who_measured_what() -> None:
    journals = [
        journal(record({16: 1.0, 32: 2.0, 64: None}), rank=0),
        journal(record({16: 1.2, 32: 1.1, 64: None}, note="depends on eps"), rank=0, host="host1"),
        journal(record({16: 1.0, 32: 2.0, 64: None}), rank=3, device="NVIDIA H100"),
    ]
    (table,) = merge(journals, date="2026-11-29").tables
    (entry,) = table.entries
    assert entry == Entry(
        "pkg.module.kernel",
        Key.of({"n": 128}).values,
        (("x_ptr", "bfloat16"),),
        None,
        A,
        {
            "measured": True,
            "date": "2026-11-29",
            "ranks": 2,
            "hosts": 2,
            "devices": ["NVIDIA H100", "NVIDIA H200"],
            "recordings": 3,
            "candidates": 3,
            "agreement": 2,
            "tied": 0,
            "confidence": "clear",
            "rule": "pooled",
            "best_ms": 1.0,
            "runner_up_ms": 2.0,
            "regret": {"median": 0.0, "worst": 0.0909},
            "note": "depends on eps",
        },
        "0123abcd",
    )
    assert "date" not in merge(journals).tables[0].entries[0].evidence


def test_the_header_lists_what_differs() -> None:
    journals = [
        journal(record({16: 1.0}), rank=0, packages=(("pkg", "1.0"), ("other", "9"))),
        journal(record({16: 1.0}), rank=1, packages=(("pkg-kernels", "7"), ("PKG", "1.1")), triton="3.7.1"),
        journal(record({16: 1.0}), rank=2, packages=(("pkg-core", "0.6.0"),), multiprocessors=78, device="NVIDIA H20"),
        journal(record({16: 1.0}), rank=3, packages=(), triton="", device="", multiprocessors=0),
    ]
    result = merge(journals)
    (table,) = result.tables
    assert (table.package_version, table.triton, table.device) == (
        "0.6.0, 1.0, 1.1",
        "3.6.0, 3.7.1",
        "NVIDIA H20, NVIDIA H200",
    )
    assert table.multiprocessors == 0
    assert result.notes == (
        "sm90, pkg: timings of several Triton versions were pooled: 3.6.0, 3.7.1",
        "sm90, pkg: timings of several devices were pooled: NVIDIA H20, NVIDIA H200",
        "sm90, pkg: timings of several versions of pkg were pooled: 0.6.0, 1.0, 1.1",
    )
    assert merge(journals[:1]).tables[0].multiprocessors == 132
    assert merge(journals[:1]).notes == ()


def test_the_tables_can_be_written_and_loaded(tmp_path: Path) -> None:
    for table in merge(ssd_journals()).tables:
        write_table(tmp_path, table)
    tables = load_tables("sm90", [tmp_path])
    result = merge(ssd_journals())
    for facts in result.keys:
        entry = tables.exact(facts.kernel.qualified_name, facts.key)
        assert entry is not None
        assert entry.config == facts.choice
        assert set(tables.denied(facts.kernel.qualified_name, facts.key)) == {
            item.config for item in facts.failures if not item.timed
        }


def test_a_table_in_force_decides_among_ties_only() -> None:
    runs = [{16: 1.0, 32: 1.005, 64: 1.5}] * 2

    def again(kept: LaunchConfig) -> KeyFacts:
        (table,) = merge(
            [journal(record({16: 1.0, 32: 1.0, 64: 1.0}, winner=kept))], tie_break=lambda c: c != kept
        ).tables
        assert table.entries[0].config == kept
        return merged(*runs, tables=[table])

    assert merged(*runs).choice == B
    assert (again(A).choice, again(A).kept) == (A, True)
    assert (again(B).choice, again(B).kept) == (B, False)
    assert (again(C).choice, again(C).kept) == (B, False)


def table_of(*entries: Entry, denied: tuple[Denied, ...] = (), **header: str) -> TableFile:
    fields = {"arch": "sm90", "package": "pkg", "package_version": "0.9", "triton": "3.5.0", "device": "NVIDIA H100"}
    return TableFile(**{**fields, **header}, entries=entries, denied=denied)  # type: ignore[arg-type]


def entry_of(candidate: LaunchConfig, n: int | None = 1, **evidence: Any) -> Entry:
    key = None if n is None else Key.of({"n": n}).values
    return Entry("pkg.module.kernel", key, None if n is None else (), None, candidate, evidence or {"measured": True})


def test_tables_are_carried_over_where_nothing_was_recorded() -> None:
    table = table_of(
        entry_of(A, 1), entry_of(B, 2), entry_of(C, None), denied=(Denied("pkg.k", A, None, "racy", "me"),)
    )
    recorded = journal(record({16: 9.0, 32: 8.0, 64: 1.0}, key=Key.of({"n": 2})))
    (found,) = merge([recorded], tables=[table]).tables
    assert {str(entry): entry.config for entry in found.entries} == {
        "pkg.module.kernel *": C,
        "pkg.module.kernel n=1": A,
        "pkg.module.kernel n=2": C,
    }
    assert found.denied == table.denied
    assert (found.package_version, found.triton, found.device) == (
        "0.9, 1.0",
        "3.5.0, 3.6.0",
        "NVIDIA H100, NVIDIA H200",
    )
    # Tables alone merge as well, and those of other archs or packages stay apart.
    assert merge([], tables=[table]).tables[0].entries == tuple(sorted(table.entries, key=str))
    assert merge([recorded], tables=[table_of(entry_of(A), arch="sm80")], arch="sm80").archs == ("sm80",)


def test_a_table_whose_dtypes_have_no_names_decides_among_ties_too() -> None:
    runs = [{16: 1.0, 32: 1.005, 64: 1.5}] * 2
    key = Key.of({"n": 128}, {"x_ptr": "bfloat16"})
    for dtypes in ((key.dtypes, None), (None, ("bfloat16",))):
        table = table_of(Entry("pkg.module.kernel", key.values, *dtypes, A, {"measured": True}))
        assert merged(*runs, tables=[table]).choice == A
    for other in (("float32",), ("bfloat16", "bfloat16")):
        table = table_of(Entry("pkg.module.kernel", key.values, None, other, A, {"measured": True}))
        assert merged(*runs, tables=[table]).choice == B


PROBE = {"compiler": "triton 3.6.0, backend abc", "forms": ["x"], "inputs": 3}


def probed(note: str = "", **changes: Any) -> Entry:
    key = Key.of({"n": 128}, {"x_ptr": "bfloat16"})
    evidence = {"measured": True, "probe": PROBE, "candidates": 3, **({"note": note} if note else {})}
    whole = Entry("pkg.module.kernel", key.values, key.dtypes, None, A, evidence, "0123abcd", ((A, B), (C,)))
    return replace(whole, **{"triton": "3.6.0", **changes})


def test_bit_classes_and_notes_stay_while_what_they_are_of_does() -> None:
    recorded = journal(record({16: 3.0, 32: 1.0, 64: 2.0}, note="argument 'eps' is not in the key"))
    result = merge([recorded], tables=[table_of(probed("by hand; keep: it"))])
    (entry,) = result.tables[0].entries
    assert (entry.config, entry.classes, entry.evidence["probe"]) == (B, ((A, B), (C,)), PROBE)
    assert entry.evidence["note"] == "argument 'eps' is not in the key; by hand; keep: it"
    assert result.notes == ()
    again = merge([recorded], tables=result.tables)  # a fixed point
    assert again.tables[0].entries == result.tables[0].entries


@pytest.mark.parametrize(
    ("changes", "times", "said"),
    [
        ({"source_hash": "89abcdef"}, {16: 1.0, 32: 2.0, 64: 3.0}, "of the kernel's source 89abcdef"),
        (
            {"evidence": {"probe": {**PROBE, "compiler": "triton 3.5.1, x"}}},
            {16: 1.0, 32: 2.0, 64: 3.0},
            "of Triton 3.5.1",
        ),
        ({}, {16: 1.0, 32: 2.0}, "the candidates are others"),
        ({}, {16: 3.0, 32: 2.0, 64: 2.0, 128: 1.0}, "the candidates are others"),
    ],
)
def test_bit_classes_that_are_left_out_are_named(changes: Any, times: Any, said: str) -> None:
    result = merge([journal(record(times))], tables=[table_of(probed(**changes))])
    (entry,) = result.tables[0].entries
    assert (entry.classes, "probe" in entry.evidence) == (None, False)
    (note,) = result.notes
    assert note.startswith("sm90, pkg.module.kernel n=128 x_ptr:bfloat16: the bit classes of the table are left out: ")
    assert said in note


@pytest.mark.parametrize(
    ("changes", "times"),
    [
        ({"source_hash": "89abcdef"}, {16: 1.0, 32: 2.0, 64: 3.0}),
        ({"triton": "3.5.1"}, {16: 1.0, 32: 2.0, 64: 3.0}),
        ({}, {16: 1.0, 32: 2.0}),
    ],
)
def test_a_note_that_is_left_out_is_named(changes: Any, times: Any) -> None:
    result = merge([journal(record(times))], tables=[table_of(probed("by hand", classes=None, **changes))])
    (entry,) = result.tables[0].entries
    assert "note" not in entry.evidence
    assert "the table's note is left out (by hand): " in result.notes[0]


def test_what_a_merge_itself_noted_is_made_anew() -> None:
    broken = merge([journal(faulty({16: 1.0, 32: None, 64: None}))])
    whole = journal(record({16: 1.0, 32: 2.0, 64: 3.0}), rank=1)
    assert "note" in broken.tables[0].entries[0].evidence
    assert "note" not in merge([whole], tables=broken.tables).tables[0].entries[0].evidence


def test_what_a_table_denies_is_not_chosen() -> None:
    runs = [{16: 1.0, 32: 2.0}] * 2
    for denied, expected in (
        (Denied("pkg.module.kernel", A, None, "racy", "me"), B),
        (Denied("pkg.module.kernel", A, (("n", "128"),), "racy", "me", None, (("x_ptr", "bfloat16"),)), B),
        (Denied("pkg.module.kernel", A, (("n", "64"),), "racy", "me"), A),
        (Denied("pkg.module.kernel", A, None, "racy", "me", None, (("x_ptr", "float16"),)), A),
        (Denied("pkg.module.other", A, None, "racy", "me"), A),
    ):
        assert merged(*runs, tables=[table_of(denied=(denied,))]).choice == expected
    elsewhere = table_of(denied=(Denied("pkg.module.kernel", A, None, "racy", "me"),), arch="sm80")
    assert merged(*runs, tables=[elsewhere]).choice == A


def test_tables_that_differ_are_settled_by_the_fixed_rule_and_noted() -> None:
    one, two = table_of(entry_of(A, by="a")), table_of(entry_of(B, by="b"))
    for order in itertools.permutations([one, two]):
        result = merge([], tables=order)
        assert [entry.config for entry in result.tables[0].entries] == [B]
        assert result.notes == ("pkg.module.kernel n=1 on sm90: the tables given differ",)


# ------------------------------------------------------------------------------------------------------------ facts


def test_facts_tell_recordings_apart() -> None:
    journals = [
        journal(record({16: 1.0, 32: 1.5}), rank=1, path="b"),
        journal(record({16: 1.0, 32: 1.2}), rank=0, path="c"),
        journal(record({16: 2.0, 32: 1.0}), rank=1, path="a", host="host1"),
        journal(record({32: 1.0, 16: None}), rank=2, path="d"),
    ]
    (facts,) = merge(journals).keys
    assert facts.choice == B
    assert [(item.environment.rank, item.path, item.winner) for item in facts.recordings] == [
        (0, "c", A),
        (1, "b", A),
        (1, "a", B),
        (2, "d", B),
    ]
    assert [item.regret for item in facts.recordings] == [pytest.approx(0.2), pytest.approx(0.5), 0.0, 0.0]
    assert [item.winner_ms for item in facts.recordings] == [1.0, 1.0, 1.0, 1.0]
    assert facts.regrets == (0.0, 0.0, pytest.approx(0.2), pytest.approx(0.5))
    assert (facts.worst_regret(), facts.median_regret()) == (pytest.approx(0.5), pytest.approx(0.1))
    assert facts.winners == ((A, 2), (B, 2))
    assert (facts.agreement, facts.disagrees, facts.ranks, facts.hosts) == (2, True, (0, 1, 2), ("host0", "host1"))
    assert facts.timings(B) == ((1.2,) * 3, (1.5,) * 3, (1.0,) * 3, (1.0,) * 3)
    assert facts.chosen is not None
    assert facts.chosen.wins == 2
    assert facts.runner_up is None  # 16 failed once


def test_the_runner_up_may_be_faster_where_candidates_are_tied() -> None:
    facts = merged({16: 1.0, 32: 1.005, 64: 3.0})
    assert facts.choice == B
    assert facts.runner_up is not None
    assert facts.runner_up.config == A


def test_stability_is_the_share_of_merges_that_choose_the_same() -> None:
    assert merged(*[{16: 1.0, 32: 2.0}] * 5).stability == 1.0
    # Four recordings that decide for 16 by one: without a part of them it is the other.
    split = [{16: 1.0, 32: 2.0}] * 2 + [{16: 2.0, 32: 1.0}] * 2
    facts = merged(*split, tolerance=0)
    assert (facts.choice, facts.stability, facts.alternatives) == (B, 0.5, (A,))


def test_stability_does_not_depend_on_the_order_of_many_recordings() -> None:
    runs = [{16: 1.0, 32: 1.0 + (7 * index % 20 - 9) / 100} for index in range(20)]
    orders = [runs, runs[::-1], sorted(runs, key=lambda run: run[32]), runs[1::2] + runs[::2]]
    found = {merged(*order, tolerance=0.005).stability for order in orders}
    assert len(found) == 1
    assert 0 < found.pop() < 1  # type: ignore[operator]


def test_a_candidate_that_is_not_always_tried_takes_part_in_the_facts() -> None:
    facts = merged({16: 1.0, 32: 1.5}, {16: 1.0}, {16: 1.0, 32: 0.5})
    assert facts.choice == A
    assert facts.regrets == (0.0, 0.0, 1.0)
    by_config = {item.config: item for item in facts.candidates}
    assert (by_config[B].timed, by_config[B].low_ms, by_config[B].eligible) == (2, 1.0, False)
    assert facts.stability == 1.0


def test_torn_journals_are_counted() -> None:
    whole = journal(record({16: 1.0}))
    torn = Journal("torn", whole.environment, whole.records, 7)
    result = merge([whole, torn])
    assert result.torn == (("torn", 7),)
    assert result.summary() == {
        "rule": "pooled",
        "journals": 2,
        "records": 2,
        "archs": ["sm90"],
        "keys": 1,
        "kernels": 1,
        "disagreeing_keys": 0,
        "near_tied_keys": 0,
        "keys_without_choice": 0,
        "torn_journals": 1,
    }


# ------------------------------------------------------------------------------------------- the real recordings


def agreement(sizes: tuple[int, int], **options: Any) -> tuple[int, int]:
    """Over all ways to split the four recordings so: keys on which both merges agree, and keys compared."""
    journals = ssd_journals()
    same = compared = 0
    for ours in itertools.combinations(range(4), sizes[0]):
        for theirs in itertools.combinations(sorted(set(range(4)) - set(ours)), sizes[1]):
            if ours > theirs and sizes[0] == sizes[1]:
                continue  # the same split, the other way round
            one, two = (picks(merge([journals[index] for index in half], **options)) for half in (ours, theirs))
            same += sum(one[name] == two[name] for name in one)
            compared += len(one)
    return same, compared


def slowdown(**options: Any) -> float:
    """Of the sum of all keys' times with the merged choices, against the fastest candidate of each key."""
    result = merge(ssd_journals(), **options)
    chosen = sum(facts.chosen.low_ms for facts in result.keys if facts.chosen)
    return chosen / sum(min(item.low_ms for item in facts.candidates if item.eligible) for facts in result.keys) - 1


def test_stock_winners_disagree_in_three_of_sixteen_keys() -> None:
    result = merge(ssd_journals())
    assert len(result.keys) == 16
    assert sum(facts.disagrees for facts in result.keys) == 3


def test_two_recordings_merge_to_the_same_table() -> None:
    # The figures in the docstring of tuning.merge.
    assert agreement((2, 2)) == (48, 48)
    assert agreement((1, 1)) == (93, 96)
    assert agreement((3, 1)) == (63, 64)
    assert slowdown() == pytest.approx(0.0006, abs=5e-5)


def test_other_rules_repeat_less_well() -> None:
    assert agreement((2, 2), tie_break=smallest_first) == (44, 48)
    assert agreement((1, 1), tie_break=smallest_first) == (89, 96)
    assert slowdown(tie_break=smallest_first) == pytest.approx(0.0018, abs=5e-5)
    assert agreement((2, 2), tolerance=0, spread_limit=0) == (42, 48)
    assert agreement((2, 2), rule="majority") == (41, 48)


def test_the_two_kernels_that_only_noise_tells_apart_are_called_noisy() -> None:
    result = merge(ssd_journals())
    noisy = {facts.kernel.bare_name for facts in result.keys if facts.confidence == "noisy"}
    assert noisy == {"_chunk_cumsum_fwd_kernel", "_chunk_cumsum_bwd_kernel"}
    assert all(facts.stability == 1.0 for facts in result.keys)


# ------------------------------------------------------------------------------------------------- purity and scale


def test_a_merge_lets_go_of_each_journal() -> None:
    alive: list[weakref.ref[Journal]] = []

    def stream() -> Iterator[Journal]:
        for rank in range(5):
            item = journal(record({16: 1.0, 32: 2.0}), rank=rank)
            alive.append(weakref.ref(item))
            yield item
            del item
            gc.collect()
            assert [reference() for reference in alive[:-1]] == [None] * (len(alive) - 1)

    assert merge(stream()).journals == 5


HASH_SEED = """
import sys
sys.path.insert(0, sys.argv[1])
from recordings import ssd_journals
from tuning.merge import merge
from tuning.tables import table_bytes
import hashlib
result = merge(ssd_journals())
print(hashlib.sha256(b"".join(map(table_bytes, result.tables)) + repr(result.keys).encode()).hexdigest())
"""


def test_the_hash_seed_does_not_matter() -> None:
    tests = Path(__file__).parents[1]
    digests = {
        subprocess.run(
            [sys.executable, "-c", HASH_SEED, str(tests)],
            cwd=tests.parent,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4711")
    }
    assert len(digests) == 1


@pytest.fixture(scope="module")
def many() -> Iterator[list[str]]:
    """Forty-eight rank files of twenty keys."""
    with tempfile.TemporaryDirectory() as folder:
        paths = []
        for rank in range(48):
            with JournalWriter(f"{folder}/rec", environment(rank)) as writer:
                for n in range(20):
                    base = {8 << index: 1.0 + ((rank * 7 + n * 3 + index * 5) % 11) / 10 for index in range(8)}
                    times = {block: (value, value * 0.99, value * 1.01) for block, value in base.items()}
                    writer.write(record(times, key=Key.of({"n": n})))
            paths.append(writer.path)
        yield paths


def test_many_files_take_little_time_and_memory(many: list[str]) -> None:
    merge(map(scan_journal, many[:2]))  # fills the reader's memory of identities
    tracemalloc.start()
    merge(map(scan_journal, many))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    start = time.process_time()
    merge(map(scan_journal, many))
    seconds = time.process_time() - start
    # 24 bytes a timing while they are gathered, as much again while they are cut into columns, and the report's share.
    timings = 48 * 20 * 8
    assert peak < 100 * timings + 2_000_000
    # 4,096 files of 300 keys in 60 seconds are 49 microseconds a record. Ten times that is no matter of a busy machine.
    assert seconds / (48 * 20) < 490e-6


def test_a_file_and_its_scan_merge_alike(many: list[str]) -> None:
    one, two = (merge(map(read, many[:4])) for read in (read_journal, scan_journal))
    assert list(map(table_bytes, one.tables)) == list(map(table_bytes, two.tables))
    assert json.dumps(one.summary()) == json.dumps(two.summary())
    assert repr(one.keys) == repr(two.keys)
