"""Mamba-2's SSD kernels in the sm90 table: what the four recordings in ``bench/data/journals`` merge into."""

from __future__ import annotations

import itertools
from pathlib import Path

from bench.repeat import choices, winners
from tuning.journal import find_journals, read_journal
from tuning.merge import merge
from tuning.tables import read_table

ROOT = Path(__file__).parents[2]
JOURNALS = [read_journal(path) for path in find_journals([str(ROOT / "bench" / "data" / "journals")])]
TABLE = ROOT / "tables" / "sm90" / "mamba_ssm.json"


(MERGED,) = merge(JOURNALS, date="2026-11-29").tables
SSD = {entry.identity: entry for entry in MERGED.entries}


def test_merging_the_recordings_again_gives_the_same_entries_and_denied_configs():
    table = read_table(TABLE)
    assert {entry.identity: entry for entry in table.entries if entry.identity in SSD} == SSD
    assert {row.identity: row for row in MERGED.denied}.items() <= {row.identity: row for row in table.denied}.items()


def test_every_entry_says_that_it_was_measured_where_and_how_often():
    assert len(SSD) == 16
    for entry in SSD.values():
        assert entry.evidence["measured"] is True
        assert entry.evidence["devices"] == ["NVIDIA H200"]
        assert entry.evidence["recordings"] == 4
        if entry.evidence["confidence"] == "clear":
            assert 0 < entry.evidence["best_ms"] <= entry.evidence["runner_up_ms"]


def agreeing(one: dict[tuple[str, str], str], two: dict[tuple[str, str], str]) -> int:
    assert one.keys() == two.keys()
    return sum(one[name] == two[name] for name in one)


PAIRS = list(itertools.combinations(JOURNALS, 2))


def test_two_halves_of_the_recordings_merge_to_the_same_configs_but_for_one_key():
    """45 of 48, and the key that differs is one of which a recording has the fastest candidate slowed by a third."""
    halves = [((0, 1), (2, 3)), ((0, 2), (1, 3)), ((0, 3), (1, 2))]
    merged = [tuple(choices([JOURNALS[at] for at in half]) for half in both) for both in halves]
    assert [agreeing(one, two) for one, two in merged] == [15, 15, 15]
    differing = {name[0].rpartition(".")[2] for one, two in merged for name in one if one[name] != two[name]}
    assert differing == {"_bmm_chunk_bwd_kernel"}
    (facts,) = (each for each in merge(JOURNALS).keys if each.kernel.bare_name == "_bmm_chunk_bwd_kernel")
    lows = sorted(low for low, _, _ in facts.timings(facts.candidates[0].config))
    assert lows[-1] > 1.3 * lows[-2]
    assert lows[-2] < 1.02 * lows[0]


def test_single_recordings_agree_on_most_keys_as_stock_winners_do():
    """On these four, whose timings differ less than those in h200_ssd_timings.json, of 16 keys."""
    assert [agreeing(winners(one), winners(two)) for one, two in PAIRS] == [15, 15, 14, 16, 15, 15]
    assert [agreeing(choices([one]), choices([two])) for one, two in PAIRS] == [15, 13, 14, 14, 15, 15]


def test_any_two_of_the_recordings_merge_into_nearly_the_same_choices():
    """Ties are broken by a fixed rule: of 16 keys at most one differs from the merge of all, none in most pairs."""
    whole = choices(JOURNALS)
    differing = [16 - agreeing(whole, choices(pair)) for pair in PAIRS]
    assert max(differing) <= 1
    assert differing.count(0) >= 3
