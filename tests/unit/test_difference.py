"""What changed between two tables, or between two sets of journals."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recordings import FAILED, config, journal, record

from tuning.difference import MOVED, diff, diff_journals, diff_tables, load_side
from tuning.errors import JournalError, TableError
from tuning.journal import JournalWriter, Scan, read_journal
from tuning.manifest import Change, Manifest, build_manifest, write_manifest
from tuning.merge import merge
from tuning.spec import Choice, Environment, Key
from tuning.tables import Denied, Entry, TableFile, write_table

KEY = Key.of({"n": 128, "causal": True}, {"x": "bfloat16", "y": "float32"})
PLACE = "pkg.m.k n=128 causal=true x:bfloat16 y:float32 on sm90"


def entry(block: int = 64, *, key: Key | None = KEY, kernel: str = "pkg.m.k", **rest: Any) -> Entry:
    fields: dict[str, Any] = {"evidence": {"measured": True}, **rest}
    return Entry(kernel, key.values if key else None, key.dtypes if key else None, None, config(block), **fields)


def table(*entries: Entry, denied: tuple[Denied, ...] = (), **rest: Any) -> TableFile:
    fields: dict[str, Any] = {"arch": "sm90", "package": "pkg", "package_version": "1", "triton": "3.6.0", **rest}
    return TableFile(device="", entries=entries, denied=denied, **fields)


def test_equal_tables_do_not_differ() -> None:
    one = table(entry(), entry(32, key=None), denied=(Denied("pkg.m.k", config(16), None, "racy", "me"),))
    turned = replace(one, entries=one.entries[::-1], path="elsewhere")
    assert diff_tables(one, turned) == ()
    assert diff_tables([one], iter([turned])) == ()


def test_of_two_configs_only_what_differs_is_shown() -> None:
    changed = replace(entry(), config=config(64, warps=8))
    (change,) = diff_tables(table(entry()), table(changed))
    assert change == Change("config", PLACE, "num_warps=4", "num_warps=8")


def test_new_and_lost_rows() -> None:
    before, after = table(entry(), entry(32, key=None)), table(entry(), entry(16, kernel="pkg.m.new"))
    assert diff_tables(before, after) == (
        Change("config", "pkg.m.k * on sm90", "BLOCK=32 num_warps=4 num_stages=3", None),
        Change("config", PLACE.replace("m.k", "m.new"), None, "BLOCK=16 num_warps=4 num_stages=3"),
    )


def test_the_same_kernel_on_another_arch_is_another_row_where_a_side_has_several() -> None:
    one, other = table(entry()), table(entry(), arch="sm100")
    changes = diff_tables([one, other], one)
    assert [change.what for change in changes if change.what != "header"] == ["config"]
    assert changes[0].after is None


def test_tables_of_one_arch_each_are_compared_across_the_two() -> None:
    changes = diff_tables(table(entry()), table(entry(), arch="sm100"))
    assert [(change.what, change.name.partition(",")[0]) for change in changes] == [("header", "arch")]
    assert (changes[0].before, changes[0].after) == (table(entry()).arch, "sm100")


def test_denied_configs() -> None:
    racy = Denied("pkg.m.k", config(16), (("n", "128"),), "racy", "me", None, (("x", "bfloat16"),))
    place = "pkg.m.k n=128 x:bfloat16 on sm90: BLOCK=16 num_warps=4 num_stages=3"
    assert diff_tables(table(), table(denied=(racy,))) == (Change("denied", place, None, "racy (me)"),)
    wrong = replace(racy, reason="wrong")
    assert diff_tables(table(denied=(racy,)), table(denied=(wrong,))) == (
        Change("denied", place, "racy (me)", "wrong (me)"),
    )


def test_named_dtypes_and_a_sequence_of_them_are_two_forms_of_one_row() -> None:
    other = replace(entry(32), dtypes=None, dtype_sequence=("float32", "bfloat16"))
    config_change, form = diff_tables(table(entry()), table(other))
    assert (config_change.what, config_change.before, config_change.after) == ("config", "BLOCK=64", "BLOCK=32")
    assert (form.what, form.before, form.after) == ("form", "dtypes by name", "dtypes float32 bfloat16")
    back = diff_tables(table(other), table(entry()))
    assert (back[1].before, back[1].after) == (form.after, form.before)


def test_forms_are_not_matched_where_several_could_be_meant() -> None:
    swapped = Key.of({"n": 128, "causal": True}, {"x": "float32", "y": "bfloat16"})
    other = replace(entry(), dtypes=None, dtype_sequence=("float32", "bfloat16"))
    sides = table(entry(), entry(key=swapped)), table(other)
    assert [change.what for change in diff_tables(*sides)] == ["config"] * 3
    assert [change.what for change in diff_tables(*sides[::-1])] == ["config"] * 3


def test_details_come_after_configs() -> None:
    classes = ((config(64), config(32)), (config(16),))
    others = ((config(64), config(16)), (config(32),))
    one = entry(source_hash="0123abcd", classes=classes, evidence={"best_ms": 1.0, "ranks": 8})
    turned = Key.of({"causal": True, "n": 128}, {"y": "float32", "x": "bfloat16"})
    other = entry(
        key=turned, source_hash="89abcdef", classes=others, evidence={"best_ms": 2.0, "ranks": 8, "note": "n"}
    )
    changes = diff_tables(table(one), table(other, triton="3.7.1"))
    assert [(change.what, change.before, change.after) for change in changes[:2]] == [
        ("order of key", "n causal x y", "causal n y x"),
        ("kernel source", "0123abcd", "89abcdef"),
    ]
    assert changes[2].what == "bit classes"
    assert "2 of sizes" in (changes[2].before or "")
    assert [(change.what, change.before, change.after) for change in changes[3:]] == [
        ("evidence", "best_ms=1.0", 'best_ms=2.0 note="n"'),
        ("header", "3.6.0", "3.7.1"),
    ]
    unprobed = diff_tables(table(entry()), table(entry(classes=classes)))
    assert [(change.what, change.before) for change in unprobed] == [("bit classes", "(not probed)")]


def test_a_table_on_one_side_only_shows_its_header() -> None:
    changes = diff_tables((), table())
    assert ("header", "sm90/pkg triton", None, "3.6.0") in [
        (change.what, change.name, change.before, change.after) for change in changes
    ]


# --- journals ---------------------------------------------------------------------------------------------------------

TITLE = "pkg.module.kernel (n=128 x_ptr:bfloat16) on sm90"


def what(changes: tuple[Change, ...]) -> list[str]:
    return [change.what for change in changes]


def test_recordings_that_say_the_same_do_not_differ() -> None:
    one = [journal(record({64: 1.0, 32: 2.0}), rank=rank) for rank in range(2)]
    other = [journal(record({32: 2.0, 64: 1.0 + MOVED / 2}), rank=rank) for rank in range(2)]
    assert diff_journals(one, other) == ()


def test_another_choice() -> None:
    changes = diff_journals([journal(record({64: 1.0, 32: 2.0}))], [journal(record({64: 3.0, 32: 2.0}))])
    assert changes == (
        Change("config", TITLE, "BLOCK=64", "BLOCK=32"),
        Change("winners", TITLE, "1 x BLOCK=64 num_warps=4 num_stages=3", "1 x BLOCK=32 num_warps=4 num_stages=3"),
    )


def test_a_choice_between_tied_candidates_is_a_near_tie() -> None:
    """By majority a vote may fall either way within noise; pooled, the fixed rule would decide the same twice."""
    sides = [[journal(record({64: 1.0, 32: 1.001}, winner=winner))] for winner in (64, 32)]
    assert what(diff_journals(*sides, rule="majority")) == ["near tie", "winners"]
    assert what(diff_journals(*sides)) == ["winners"]
    clear = [journal(record({64: 2.0, 32: 1.0}))]
    assert what(diff_journals(sides[0], clear, rule="majority")) == ["config", "winners"]


def test_keys_on_one_side_only() -> None:
    one, other = record({64: 1.0}), record({32: 1.0}, kernel="pkg.module.other")
    assert [
        (change.what, change.before, change.after) for change in diff_journals([journal(one)], [journal(other)])
    ] == [
        ("config", "BLOCK=64 num_warps=4 num_stages=3", None),
        ("config", None, "BLOCK=32 num_warps=4 num_stages=3"),
    ]


def test_candidates_failures_times_and_sources() -> None:
    one = record({64: 1.0, 32: 2.0, 16: 3.0})
    other = record({64: 1.2, 32: FAILED, 8: 3.0}, source="89abcdef")
    changes = diff_journals([journal(one)], [journal(other)])
    assert [(change.what, change.before, change.after) for change in changes] == [
        ("candidates", "BLOCK=16 num_warps=4 num_stages=3", "BLOCK=8 num_warps=4 num_stages=3"),
        ("failures", "", "BLOCK=32 num_warps=4 num_stages=3"),
        ("time", "1 ms", "1.2 ms (1.20 x)"),
        ("kernel source", "0123abcd", "89abcdef"),
    ]


def test_a_key_that_no_candidate_can_serve() -> None:
    changes = diff_journals([journal(record({64: 1.0}))], [journal(record({64: FAILED}, winner=64))])
    assert (changes[0].what, changes[0].before, changes[0].after) == (
        "config",
        "BLOCK=64 num_warps=4 num_stages=3",
        None,
    )


def test_where_and_with_what_they_were_made() -> None:
    one = [journal(record({64: 1.0}))]
    other = [
        journal(record({64: 1.0}), rank=rank, triton="3.7.1", device="NVIDIA B200", packages=(("pkg", "2"),))
        for rank in range(2)
    ]
    changes = [change for change in diff_journals(one, other) if change.what != "winners"]
    assert [(change.what, change.name, change.before, change.after) for change in changes] == [
        ("recordings", "recordings", "1 journal of 1 rank", "2 journals of 2 ranks"),
        ("device", "device", "NVIDIA H200", "NVIDIA B200"),
        ("version", "version package pkg", "1.0", "2"),
        ("version", "version triton", "3.6.0", "3.7.1"),
    ]


def test_a_scan_counts_as_its_journal() -> None:
    read = journal(record({64: 1.0}))
    scan = Scan(read.path, read.environment, read.measurements)
    assert diff_journals([read], [scan]) == ()


# --- sides ------------------------------------------------------------------------------------------------------------


def manifest(block: int = 64) -> Manifest:
    where = Environment("sm90")
    choice = Choice("pkg.m.k", KEY, FakeConfig(block), "exact", None, "sm90")
    return build_manifest(library="1", mode="pinned", policy={}, environment=where, choices=[choice])


class FakeConfig:
    def __init__(self, block: int) -> None:
        self.kwargs = {"BLOCK": block}
        self.num_warps = 4
        self.num_stages = 3


def test_journals_beside_a_table_are_merged() -> None:
    recorded = [journal(record({64: 1.0, 32: 2.0}))]
    assert diff(merge(recorded).tables, recorded) == ()
    assert what(diff(recorded, merge([journal(record({64: 3.0, 32: 2.0}))]).tables))[0] == "config"


def test_manifests_are_compared_with_manifests_alone() -> None:
    (change,) = diff(manifest(), manifest(32))
    assert (change.what, change.before, change.after) == ("config", "BLOCK=64", "BLOCK=32")
    for sides in ((manifest(), [table()]), ([table()], manifest()), (manifest(), [journal()])):
        with pytest.raises(TableError, match="freeze the manifest and compare the table"):
            diff(*sides)


def test_what_a_path_names(tmp_path: Path) -> None:
    path = write_table(tmp_path / "tables", table(entry()))
    write_table(tmp_path / "tables", table(entry(), arch="sm100"))
    (tmp_path / "tables" / "sm90" / ".hidden.json").write_text("{")
    assert [side.arch for side in load_side(tmp_path / "tables")] == ["sm100", "sm90"]  # type: ignore[union-attr]
    path.rename(tmp_path / "attached")
    assert diff(load_side(tmp_path / "attached"), [table(entry())]) == ()
    write_manifest(tmp_path / "run.json", manifest())
    assert diff(load_side(tmp_path / "run.json"), manifest()) == ()
    with JournalWriter(str(tmp_path / "rec" / "a"), journal().environment) as writer:
        writer.write(record({64: 1.0}))
    renamed = Path(writer.path).with_name("renamed")
    for named in (writer.path, tmp_path / "rec", tmp_path / "rec" / "a", str(tmp_path / "rec" / "*")):
        assert diff(load_side(named), [read_journal(writer.path)]) == ()
    Path(writer.path).rename(renamed)
    (side,) = load_side(renamed)  # type: ignore[misc]
    assert isinstance(side, Scan)


def test_paths_that_name_nothing(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="no journal at"):
        load_side(tmp_path / "nothing")
    with pytest.raises(JournalError, match="no journal at"):
        load_side(tmp_path)
    (tmp_path / "x.json").write_text("[1, 2")
    with pytest.raises(TableError, match=r"x\.json: \$: expected JSON"):
        load_side(tmp_path / "x.json")
    (tmp_path / "y.json").write_text('{"schema_version":1,"digest":1}')
    with pytest.raises(TableError, match=r"manifest .*y\.json"):
        load_side(tmp_path / "y.json")
    (tmp_path / "z.json").write_bytes(b"TTJ1")
    assert load_side(tmp_path / "z.json")[0].torn_bytes == 4  # type: ignore[index, union-attr]
