"""What ``bench.published_tables`` makes: denied configs with reason and source, measured entries over older ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import triton

from bench import published_tables
from tests.recordings import environment, record
from tuning.errors import TuningError
from tuning.journal import JournalWriter
from tuning.policy import AutotunePolicy
from tuning.selection import choose
from tuning.spec import Kernel, Key, LaunchConfig
from tuning.tables import load_tables

DATA = Path(published_tables.__file__).parent / "data"
DENIED = [
    (arch, row)
    for arch, rows in published_tables.denied_rows(
        json.loads((DATA / "denied_configs.json").read_text(encoding="utf-8"))
    ).items()
    for row in rows
]


def sizes(config: LaunchConfig) -> dict[str, int]:
    return {name: json.loads(text) for name, text in config.kwargs}


def candidate(config: LaunchConfig) -> triton.Config:
    return triton.Config(sizes(config), num_warps=config.num_warps, num_stages=config.num_stages)


@pytest.mark.parametrize(("arch", "row"), DENIED, ids=lambda item: getattr(item, "kernel", item))
@pytest.mark.parametrize("rule", ["cheapest", "model", "nearest"])
def test_a_denied_config_is_never_chosen(arch, row, rule):
    key = Key(row.key or (), ())
    other = candidate(replace(row.config, num_warps=1))
    tables = load_tables(arch)
    policy = AutotunePolicy(mode="pinned", on_miss=rule, block_sizes=sizes(row.config))
    found = choose(Kernel(row.kernel), key, arch, [candidate(row.config), other], tables, policy)
    assert found.config is other
    with pytest.raises(TuningError, match="denied"):
        choose(Kernel(row.kernel), key, arch, [candidate(row.config)], tables, policy)


def test_each_denied_config_says_what_is_wrong_and_who_says_so():
    assert {arch for arch, _ in DENIED} == {"sm90", "sm100", "sm103", "sm120", "sm121"}
    for _, row in DENIED:
        assert row.reason.strip()
        assert "fla-core 0.6.0" in row.source


def test_what_is_denied_for_one_key_is_free_for_others():
    (row,) = {row.kernel: row for arch, row in DENIED if arch == "sm90"}.values()
    tables = load_tables("sm90")
    free = Key.of({"STATE_V_FIRST": False}, {})
    found = choose(
        Kernel(row.kernel),
        free,
        "sm90",
        [candidate(row.config)],
        tables,
        AutotunePolicy(mode="pinned", modules=("fla",)),
    )
    assert LaunchConfig.of(found.config) == row.config


def write(folder: Path, *records, **where) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with JournalWriter(f"{folder}/", environment(**where)) as writer:
        for item in records:
            writer.write(item)


class TestMeasured:
    @pytest.fixture
    def data(self, tmp_path: Path) -> Path:
        for number in (1, 2):
            write(tmp_path / "journals", record({16: 1.0, 32: 2.0 + number}))
        return tmp_path

    def test_entries_of_earlier_recordings_stand_where_both_have_a_key(self, data):
        other = Key.of({"n": 256}, {"x_ptr": "bfloat16"})
        for _ in (1, 2):
            write(data / "recordings" / "2026-12-06", record({16: 3.0, 32: 1.0}), record({16: 3.0, 32: 1.0}, key=other))
        (table,) = published_tables.measured(data, {})
        found = {entry.key: (sizes(entry.config)["BLOCK"], entry.evidence["date"]) for entry in table.entries}
        assert sorted(found.values()) == [(16, published_tables.SSD_DATE), (32, "2026-12-06")]

    def test_a_later_recording_keeps_what_only_an_earlier_one_has(self, data):
        keys = {n: Key.of({"n": n}, {"x_ptr": "bfloat16"}) for n in (256, 512)}
        times = {16: 3.0, 32: 1.0}
        for date, found in (("2026-12-06", keys[256]), ("2026-12-20", keys[512])):
            for package in ("pkg.module.kernel", "other.kernel"):
                write(data / "recordings" / date, record(times, key=found, kernel=package))
        write(data / "recordings" / "2026-12-20", record(times))
        tables = {table.package: table for table in published_tables.measured(data, {})}
        found = {
            name: sorted((dict(entry.key)["n"], entry.evidence["date"]) for entry in table.entries)
            for name, table in tables.items()
        }
        dated = [("256", "2026-12-06"), ("512", "2026-12-20")]
        assert found == {"pkg": [("128", published_tables.SSD_DATE), *dated], "other": dated}

    def test_each_package_gets_a_table_and_evidence_says_how_often_recordings_agreed(self, data):
        for number in (1, 2):
            write(
                data / "recordings" / "2026-12-06",
                record({16: 1.0, 32: 2.0} if number == 1 else {16: 3.0, 32: 2.0}, kernel="other.kernel"),
            )
        tables = {table.package: table for table in published_tables.measured(data, {})}
        (entry,) = tables["other"].entries
        assert entry.evidence["recordings"] == 2
        assert entry.evidence["agreement"] in (1, 2)
        assert entry.evidence["candidates"] == 2
        assert entry.evidence["best_ms"] > 0
        assert entry.evidence["runner_up_ms"] > 0

    def test_a_denied_config_takes_no_part_in_the_merge(self, data):
        fast = record({16: 1.0, 32: 2.0}, kernel="other.kernel")
        for date in ("2026-12-06", "2026-12-06", "2026-12-20"):
            write(data / "recordings" / date, fast)
        rows = {
            "sm90": [
                published_tables.Denied("other.kernel", fast.winner, None, "wrong results", "a report"),
            ]
        }
        tables = {table.package: table for table in published_tables.measured(data, rows)}
        (entry,) = tables["other"].entries
        assert sizes(entry.config)["BLOCK"] == 32
        assert [row.reason for row in tables["other"].denied] == ["wrong results"]
