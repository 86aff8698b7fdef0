"""The sm90 table is what the committed recordings merge into."""

from __future__ import annotations

from pathlib import Path

from tuning.journal import find_journals, read_journal
from tuning.merge import merge
from tuning.tables import read_table, table_bytes

ROOT = Path(__file__).parents[2]
JOURNALS = [read_journal(path) for path in find_journals([str(ROOT / "bench" / "data" / "journals")])]
TABLE = ROOT / "tables" / "sm90" / "mamba_ssm.json"


def test_merging_the_recordings_again_gives_the_same_bytes():
    (merged,) = merge(JOURNALS, date="2026-11-29").tables
    assert table_bytes(merged) == TABLE.read_bytes()


def test_every_entry_says_that_it_was_measured_where_and_how_often():
    table = read_table(TABLE)
    assert len(table.entries) == 16
    for entry in table.entries:
        assert entry.evidence["measured"] is True
        assert entry.evidence["devices"] == ["NVIDIA H200"]
        assert entry.evidence["recordings"] == 4
        if entry.evidence["confidence"] == "clear":
            assert 0 < entry.evidence["best_ms"] <= entry.evidence["runner_up_ms"]


def test_any_two_of_the_recordings_merge_into_nearly_the_same_choices():
    """Ties are broken by a fixed rule: of 16 keys at most one differs between two halves, none in most splits."""
    whole = {entry.identity: entry.config for entry in read_table(TABLE).entries}
    splits = [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    differing = []
    for pair in splits:
        (half,) = merge([JOURNALS[index] for index in pair], date="").tables
        differing.append(sum(whole[entry.identity] != entry.config for entry in half.entries))
    assert max(differing) <= 1
    assert differing.count(0) >= 3
