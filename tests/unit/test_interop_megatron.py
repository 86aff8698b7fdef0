"""Megatron-LM's ``core.tuning`` files, against the format as it is described: there is no wheel that reads it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recordings import config as block_config
from recordings import journal, record

from tuning import interop
from tuning.errors import TableError
from tuning.interop import Imported, Loss, megatron
from tuning.interop._known import known_kernels
from tuning.manifest import Launch, build_manifest
from tuning.spec import Environment, Key, LaunchConfig
from tuning.tables import Denied, Entry, TableFile, bundled_folder, read_table, table_bytes, write_table

BMM = "mamba_ssm.ops.triton.ssd_bmm._bmm_chunk_fwd_kernel"
KEY = "chunk_size=128|K=128|IS_CAUSAL=False|torch.bfloat16|torch.bfloat16|torch.float32"
CONFIG = {
    "kwargs": {"BLOCK_SIZE_K": 32, "BLOCK_SIZE_M": 128},
    "num_warps": 4,
    "num_stages": 4,
    "num_ctas": 1,
    "maxnreg": None,
    "ir_override": None,
}
OTHER = {**CONFIG, "num_warps": 8, "num_ctas": 2, "maxnreg": 128, "ir_override": "k.ttgir"}
TABLE: dict[str, Any] = {
    "arch": "sm103",
    "triton": "3.6.0",
    "packages": {"mamba-ssm": "2.3.2", "transformer_engine": "2.20.2"},
    "source": "majority of 96 ranks",
    "kernels": {
        BMM: {KEY: CONFIG, "*": OTHER},
        "transformer_engine.x.k": {"": CONFIG, "n=1.0|t=torch.int8|s=abc|none=None": OTHER},
    },
}


def read(table: Any, tmp_path: Path, name: str = "sm103.json", **how: Any) -> Imported:
    (tmp_path / name).write_text(json.dumps(table))
    return interop.read("megatron", [tmp_path / name], **how)


def kinds(losses: tuple[Loss, ...]) -> list[str]:
    return [loss.kind for loss in losses]


def test_a_table_becomes_one_for_each_package(tmp_path: Path) -> None:
    found = read(TABLE, tmp_path)
    assert found.losses == ()
    assert found.journals == ()
    mamba, engine = found.tables
    assert (mamba.arch, mamba.package, mamba.package_version, mamba.triton) == (
        "sm103",
        "mamba_ssm",
        "mamba-ssm 2.3.2",
        "3.6.0",
    )
    assert (engine.package, engine.package_version) == ("transformer_engine", "2.20.2")
    wildcard, exact = sorted(mamba.entries, key=lambda entry: entry.key is not None)
    assert exact.kernel == BMM
    assert exact.key == (("chunk_size", "128"), ("K", "128"), ("IS_CAUSAL", "false"))
    assert (exact.dtypes, exact.dtype_sequence) == (None, ("bfloat16", "bfloat16", "float32"))
    assert exact.config == LaunchConfig.build({"BLOCK_SIZE_K": 32, "BLOCK_SIZE_M": 128}, num_stages=4)
    assert exact.evidence == {"reported_by": "majority of 96 ranks", "measured": False}
    assert wildcard.config == LaunchConfig.build(
        {"BLOCK_SIZE_K": 32, "BLOCK_SIZE_M": 128},
        num_warps=8,
        num_stages=4,
        num_ctas=2,
        maxnreg=128,
        ir_override="k.ttgir",
    )
    empty, typed = sorted(engine.entries, key=lambda entry: len(entry.key or ()))
    assert (empty.key, empty.dtype_sequence) == ((), ())
    assert typed.key == (("n", '{"float":"1.0"}'), ("t", '{"dtype":"int8"}'), ("s", '"abc"'), ("none", "null"))
    for table in found.tables:
        write_table(tmp_path / "ours", table)


def test_theirs_to_ours_to_theirs_has_the_same_content(tmp_path: Path) -> None:
    tables = read(TABLE, tmp_path).tables
    written = interop.write("megatron", tables, tmp_path / "back")
    assert kinds(written.losses) == ["evidence", "evidence"]
    (path,) = written.files
    assert path.name == "sm103.json"
    assert json.loads(path.read_text()) == TABLE
    again = interop.read("megatron", [path])
    assert again.tables == tables
    data = path.read_bytes()
    assert interop.write("megatron", tables[::-1], tmp_path / "back").files[0].read_bytes() == data


def test_configs_of_older_files_have_the_defaults(tmp_path: Path) -> None:
    old = {name: CONFIG[name] for name in ("kwargs", "num_warps", "num_stages")}
    table = {**TABLE, "kernels": {BMM: {KEY: old}}, "packages": {}, "triton": ""}
    written = interop.write("megatron", read(table, tmp_path).tables, tmp_path / "back")
    assert json.loads(written.files[0].read_text())["kernels"] == {BMM: {KEY: CONFIG}}


def test_ours_to_theirs_to_ours_keeps_every_reported_row(tmp_path: Path) -> None:
    shipped = [read_table(path) for path in sorted((bundled_folder() / "sm103").glob("*.json"))]
    ours = [table for table in shipped if table.entries]
    written = interop.write("megatron", ours, tmp_path)
    assert set(kinds(written.losses)) == {"evidence"}
    theirs = interop.read("megatron", written.files)
    assert theirs.losses == ()
    for mine, back in zip(ours, theirs.tables, strict=True):
        assert {entry.identity: entry.config for entry in back.entries} == {
            entry.identity: entry.config for entry in mine.entries
        }
        assert len(mine.entries) > 10
        assert table_bytes(back)


KEYED = Key.of({"n": 128}, {"x": "bfloat16", "y": "float32"}, ("y", "x"))


def entry(key: Key = KEYED, **rest: Any) -> Entry:
    return Entry(
        "pkg.m.k", key.values, key.dtypes, None, rest.pop("config", block_config(64)), {"measured": True}, **rest
    )


def table(*entries: Entry, denied: tuple[Denied, ...] = (), **rest: Any) -> TableFile:
    return TableFile("sm90", "pkg", "", "3.6.0", rest.pop("device", ""), entries, denied, **rest)


def manifest(*keys: Key) -> Any:
    made = build_manifest(library="1", mode="pinned", policy={}, environment=Environment("sm90"))
    return replace(made, choices=tuple(Launch("pkg.m.k", key, block_config(64), "exact", None, "sm90") for key in keys))


def written_keys(tables: list[TableFile], folder: Path, **how: Any) -> tuple[list[str], list[str]]:
    done = interop.write("megatron", tables, folder, **how)
    document = json.loads(done.files[0].read_text())
    return sorted(document["kernels"].get("pkg.m.k", ())), kinds(done.losses)


def test_dtypes_are_written_in_the_order_of_the_call_where_that_is_known(tmp_path: Path) -> None:
    theirs = "n=128|torch.float32|torch.bfloat16"
    assert written_keys([table(entry())], tmp_path, names=manifest(KEYED)) == ([theirs], ["evidence"])
    recorded = journal(record({64: 1.0}, kernel="pkg.m.k", key=KEYED))
    assert written_keys([table(entry())], tmp_path, journals=[recorded])[0] == [theirs]
    back = interop.read("megatron", [tmp_path], names=recorded)
    assert back.tables[0].entries[0].dtypes == KEYED.dtypes
    unnamed = interop.read("megatron", [tmp_path])
    assert unnamed.tables[0].entries[0].dtype_sequence == ("float32", "bfloat16")


def test_every_known_order_of_calls_gets_its_key(tmp_path: Path) -> None:
    two = manifest(KEYED, Key.of({"n": 1}, {"x": "int8", "y": "int8"}, ("x", "y")))
    assert written_keys([table(entry())], tmp_path, names=two)[0] == [
        "n=128|torch.bfloat16|torch.float32",
        "n=128|torch.float32|torch.bfloat16",
    ]


def test_an_unknown_order_of_a_call_is_a_loss(tmp_path: Path) -> None:
    assert written_keys([table(entry())], tmp_path) == (
        ["n=128|torch.bfloat16|torch.float32"],
        ["evidence", "call_order"],
    )
    alike = Key.of({"n": 128}, {"x": "int8", "y": "int8"})
    assert written_keys([table(entry(alike))], tmp_path) == (["n=128|torch.int8|torch.int8"], ["evidence"])


@pytest.mark.parametrize(
    ("value", "text", "lost"),
    [
        (True, "True", []),
        (1, "1", []),
        (1.0, "1.0", []),
        ("1", "1", ["value"]),
        ("True", "True", ["value"]),
        ((1, 2), "(1, 2)", ["value"]),
        ("a|b", None, ["value"]),
        (b"x", None, ["value"]),
    ],
)
def test_values_that_the_text_of_a_key_cannot_hold(
    tmp_path: Path, value: object, text: str | None, lost: list[str]
) -> None:
    keys, losses = written_keys([table(entry(Key.of({"n": value}, {"x": "int8"})))], tmp_path)
    assert keys == ([] if text is None else [f"n={text}|torch.int8"])
    assert losses == ["evidence", *lost]
    if text is not None and not lost:
        (back,) = interop.read("megatron", [tmp_path]).tables
        assert back.entries[0].key == Key.of({"n": value}).values


def test_rows_that_are_one_over_there(tmp_path: Path) -> None:
    rows = [entry(Key.of({"n": value}, {}), config=block_config(block)) for value, block in ((1, 64), ("1", 32))]
    keys, losses = written_keys([table(*rows)], tmp_path)
    assert keys == ["n=1"]
    assert losses == ["evidence", "value", "duplicate"]


def test_what_has_no_place_there_is_said(tmp_path: Path) -> None:
    denied = Denied("pkg.m.k", block_config(16), None, "racy", "me")
    odd = entry(config=LaunchConfig.build({"B": 1}, extra={"waves": 2}))
    full = table(
        entry(Key.of({"n": 1}), classes=((block_config(64),),), source_hash="0123abcd"),
        replace(odd, key=(), dtypes=()),
        denied=(denied,),
        device="NVIDIA H200",
        multiprocessors=132,
    )
    done = interop.write("megatron", [full], tmp_path)
    assert [str(loss) for loss in done.losses] == [
        "sm90/pkg.json: pkg.m.k: Megatron-LM has no list of denied configs: BLOCK=16 num_warps=4 num_stages=3 may be "
        "launched there (racy)",
        "sm90/pkg.json: evidence of 2 entries, 1 source hashes and 1 bit classes have no place in Megatron-LM's files",
        "sm90/pkg.json: Megatron-LM's files do not say the device (132 multiprocessors, NVIDIA H200)",
        "sm90/pkg.json: pkg.m.k: B=1 num_warps=4 num_stages=3 waves=2 cannot be written: the field waves has no place "
        "in it",
    ]
    assert json.loads(done.files[0].read_text())["kernels"]["pkg.m.k"].keys() == {"n=1"}


def test_the_header_that_is_written(tmp_path: Path) -> None:
    told = [
        replace(table(entry()), package_version="pkg-cu12 1.0"),
        TableFile(
            "sm90", "other", "2.0", "3.7.1", "", (replace(entry(), kernel="other.k", evidence={"reported_by": "x"}),)
        ),
        TableFile("sm100", "other", "3.0", "", "", ()),
    ]
    done = interop.write("megatron", told, tmp_path)
    assert [path.name for path in done.files] == ["sm100.json", "sm90.json"]
    document = json.loads((tmp_path / "sm90.json").read_text())
    assert document["triton"] == "3.6.0, 3.7.1"
    assert document["packages"] == {"other": "2.0", "pkg-cu12": "1.0"}
    assert document["source"] == "triton-tuning"
    assert "sm90: entries were reported by several: a table has one source for all" in map(str, done.losses)
    assert json.loads((tmp_path / "sm100.json").read_text())["kernels"] == {}
    interop.write("megatron", told, tmp_path, source="a text")
    assert json.loads((tmp_path / "sm90.json").read_text())["source"] == "a text"


# --- bare names, archs, folders ---------------------------------------------------------------------------------------


def bare(**kernels: Any) -> dict[str, Any]:
    return {"arch": "sm103", "kernels": kernels}


def test_bare_names_of_older_files(tmp_path: Path) -> None:
    old = bare(k={"n=1": CONFIG})
    lost = read(old, tmp_path)
    assert (lost.tables, kinds(lost.losses)) == ((), ["unknown_kernel"])
    (found,) = read(old, tmp_path, names={"k": "pkg.m.k"}).tables
    assert found.entries[0].kernel == "pkg.m.k"
    assert found.entries[0].evidence["reported_by"] == "Megatron-LM table sm103.json"
    shared = read(bare(k={"n=1": CONFIG}, **{"pkg.m.other": {"n=1": CONFIG}}), tmp_path, names={"k": ["a.k", "b.k"]})
    assert ([table.package for table in shared.tables], kinds(shared.losses)) == (["pkg"], ["shared_name"])
    assert str(shared.losses[0]).startswith(f"{tmp_path}/sm103.json: $.kernels.k: 2 kernels are named 'k'")


def test_a_qualified_name_goes_before_the_bare_one(tmp_path: Path) -> None:
    both = bare(k={"n=1": OTHER, "n=2": OTHER}, **{"pkg.m.k": {"n=1": CONFIG}})
    found = read(both, tmp_path, names={"k": "pkg.m.k"})
    assert {entry.key: entry.config.num_warps for entry in found.tables[0].entries} == {
        (("n", "1"),): 4,
        (("n", "2"),): 8,
    }
    assert kinds(found.losses) == ["lookup", "duplicate"]


def test_one_arch_of_several(tmp_path: Path) -> None:
    read(TABLE, tmp_path)
    read({**TABLE, "arch": "sm90"}, tmp_path, "sm90.json")
    both = interop.read("megatron", [tmp_path])
    assert sorted({table.arch for table in both.tables}) == ["sm103", "sm90"]
    one = interop.read("megatron", [tmp_path], arch="sm90")
    assert {table.arch for table in one.tables} == {"sm90"}
    assert kinds(one.losses) == ["other_arch"]


def test_of_several_tables_of_an_arch_the_first_counts_alone(tmp_path: Path) -> None:
    read(TABLE, tmp_path)
    (tmp_path / "b").mkdir()
    read(bare(**{"pkg.m.k": {"n=1": CONFIG}}), tmp_path / "b")
    found = interop.read("megatron", [tmp_path / "sm103.json", tmp_path / "b"])
    assert [table.package for table in found.tables] == ["mamba_ssm", "transformer_engine"]
    assert kinds(found.losses) == ["shadowed"]
    assert str(tmp_path / "b" / "sm103.json") in str(found.losses[0])


def test_members_that_are_not_read_are_said(tmp_path: Path) -> None:
    odd = {**bare(**{"pkg.m.k": {"n=1": {**CONFIG, "x": 1}}}), "note": "n", "packages": {"none": "1", "pkg-a": "2"}}
    found = read(odd, tmp_path)
    assert [(loss.kind, loss.where.partition(": ")[2]) for loss in found.losses] == [
        ("unknown_member", "$.note"),
        ("unknown_member", '$.kernels["pkg.m.k"]["n=1"].x'),
        ("header", "$.packages.none"),
    ]
    assert found.tables[0].package_version == "pkg-a 2"


def test_values_and_dtypes_in_doubt_are_said(tmp_path: Path) -> None:
    found = read(bare(**{"pkg.m.k": {"n=(1, 2)|float32": CONFIG}}), tmp_path)
    assert [str(loss).partition(": ")[2].partition(": ")[2] for loss in found.losses] == [
        "n='(1, 2)': taken for a string, its type is lost",
        "the dtype 'float32' is taken for a torch dtype",
    ]
    assert found.tables[0].entries[0].dtype_sequence == ("float32",)


@pytest.mark.parametrize(
    ("change", "place", "expected"),
    [
        ({"arch": "a/b"}, "$.arch", "the name of an arch"),
        ({"arch": "sm90"}, "$.arch", '"sm103", as in the name of the file'),
        ({"kernels": []}, "$.kernels", "an object of kernels"),
        ({"kernels": {"a b.k": {}}}, '$.kernels["a b.k"]', "the name of a kernel"),
        ({"kernels": {"p.k": []}}, '$.kernels["p.k"]', "an object of keys"),
        ({"kernels": {"p.k": {"n=1|n=2": CONFIG}}}, '$.kernels["p.k"]["n=1|n=2"]', "names each argument once"),
        ({"kernels": {"p.k": {"torch.int8|n=2": CONFIG}}}, '$.kernels["p.k"]["torch.int8|n=2"]', "and then dtypes"),
        ({"kernels": {"p.k": {"n=2||": CONFIG}}}, '$.kernels["p.k"]["n=2||"]', "and then dtypes"),
        ({"kernels": {"p.k": {"*": {}}}}, '$.kernels["p.k"]["*"]', 'with the member "kwargs"'),
        ({"packages": {"p": 1}}, "$.packages.p", "a version"),
        ({"triton": None}, "$.triton", "a version"),
    ],
)
def test_what_is_no_table(tmp_path: Path, change: Any, place: str, expected: str) -> None:
    with pytest.raises(TableError) as caught:
        read({**TABLE, **change}, tmp_path)
    assert (caught.value.file, caught.value.where) == (str(tmp_path / "sm103.json"), place)
    assert expected in str(caught.value)


# --- rank files -------------------------------------------------------------------------------------------------------


def test_ranks_are_merged_by_their_majority(tmp_path: Path) -> None:
    for rank, config in enumerate([OTHER, CONFIG, CONFIG]):
        (tmp_path / f"rec.rank{rank}.json").write_text(json.dumps({"sm90": {BMM: {KEY: config}}}))
    found = interop.read("megatron", [tmp_path])
    assert found.losses == ()
    (row,) = found.tables[0].entries
    assert row.config.num_warps == 4
    assert row.evidence == {
        "reported_by": "Megatron-LM rank files, majority of 3",
        "measured": False,
        "ranks": 3,
        "agreement": 2,
    }
    assert table_bytes(found.tables[0])


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_equal_votes_are_decided_by_the_text_of_the_config(tmp_path: Path, order: tuple[int, int]) -> None:
    for rank, config in zip(order, (OTHER, CONFIG), strict=True):
        (tmp_path / f"rec.rank{rank}.json").write_text(json.dumps({"sm90": {"p.k": {"*": config}}}))
    (row,) = interop.read("megatron", [tmp_path]).tables[0].entries
    assert row.key is None
    assert row.config.ir_override == "k.ttgir"  # '"ir_override": "k' sorts before '"ir_override": null'


def test_a_rank_has_one_vote_for_a_key(tmp_path: Path) -> None:
    twice = {"sm90": {"k": {"n=1": OTHER}, "p.k": {"n=1": CONFIG}}}
    (tmp_path / "rec.rank0.json").write_text(json.dumps(twice))
    (row,) = interop.read("megatron", [tmp_path], names={"k": "p.k"}).tables[0].entries
    assert (row.config.num_warps, row.evidence["ranks"]) == (4, 1)


def test_rank_files_beside_a_table_of_their_arch_are_not_merged_into_it(tmp_path: Path) -> None:
    read(TABLE, tmp_path)
    (tmp_path / "rec.rank0.json").write_text(json.dumps({"sm103": {"p.k": {}}, "sm90": {"p.k": {"n=1": CONFIG}}}))
    found = interop.read("megatron", [tmp_path])
    assert [(table.arch, table.package) for table in found.tables] == [
        ("sm103", "mamba_ssm"),
        ("sm103", "transformer_engine"),
        ("sm90", "p"),
    ]
    only = interop.read("megatron", [tmp_path / "rec.rank0.json"], arch="sm103")
    assert (only.tables, kinds(only.losses)) == ((), ["other_arch"])


@pytest.mark.parametrize(
    ("document", "place"),
    [
        ([], "$"),
        ({"a/b": {}}, '$["a/b"]'),
        ({"sm90": 1}, "$.sm90"),
        ({"sm90": {"p.k": {"*": 1}}}, '$.sm90["p.k"]["*"]'),
    ],
)
def test_what_is_no_rank_file(tmp_path: Path, document: Any, place: str) -> None:
    (tmp_path / "rec.rank0.json").write_text(json.dumps(document))
    with pytest.raises(TableError) as caught:
        interop.read("megatron", [tmp_path])
    assert caught.value.where == place


def test_journals_are_written_as_rank_files_and_read_back(tmp_path: Path) -> None:
    odd = Key.of({"n": "a|b"}, {"x": "int8"})
    journals = [
        journal(
            record({64: 1.0, 32: 2.0 - rank}, kernel="pkg.m.k", key=KEYED),
            record({64: 1.0}, kernel="pkg.m.k", key=odd),
            rank=rank,
        )
        for rank in (0, 2)
    ]
    done = interop.write("megatron-ranks", [], tmp_path, journals=journals)
    assert [path.name for path in done.files] == ["tuning.rank0.json", "tuning.rank2.json"]
    assert kinds(done.losses) == ["evidence", "value", "evidence", "value"]
    key = "n=128|torch.float32|torch.bfloat16"
    winners = [json.loads(path.read_text())["sm90"]["pkg.m.k"][key]["kwargs"]["BLOCK"] for path in done.files]
    assert winners == [64, 32]
    back = interop.read("megatron", done.files[:1], names=journals)
    (row,) = back.tables[0].entries
    assert (row.key, row.dtypes, row.config) == (KEYED.values, KEYED.dtypes, block_config(64))


def test_rank_files_of_a_larger_run_before_are_named(tmp_path: Path) -> None:
    ranks = [journal(record({64: 1.0}, kernel="pkg.m.k", key=KEYED), rank=rank) for rank in range(3)]
    assert "stale" not in kinds(interop.write("megatron-ranks", [], tmp_path, journals=ranks).losses)
    (tmp_path / "other.rank7.json").write_text("{}")
    done = interop.write("megatron-ranks", [], tmp_path, journals=ranks[:2])
    assert [loss.where for loss in done.losses if loss.kind == "stale"] == [str(tmp_path / "tuning.rank2.json")]
    assert (tmp_path / "tuning.rank2.json").exists()


def test_journals_of_one_rank_that_disagree(tmp_path: Path) -> None:
    two = [journal(record({block: 1.0}, kernel="pkg.m.k"), path=f"{block}.journal") for block in (64, 32)]
    results = [interop.write("megatron-ranks", [], tmp_path / "a", journals=each) for each in (two, two[::-1])]
    for done in results:
        assert kinds(done.losses).count("duplicate") == 1
        kernels = json.loads(done.files[0].read_text())["sm90"]["pkg.m.k"]
        assert [config["kwargs"] for config in kernels.values()] == [{"BLOCK": 32}]
    unknown = journal(record({64: 1.0}, key=Key.of({"n": 1}, {"x": "int8", "y": "int32"})))
    done = interop.write("megatron-ranks", [], tmp_path / "b", journals=[unknown])
    assert kinds(done.losses) == ["evidence", "call_order"]


def test_bytes_can_be_read_without_a_file() -> None:
    data = json.dumps(TABLE).encode()
    assert len(megatron.parse_table(data, "sm103.json", known_kernels()).tables) == 2
    ranks = json.dumps({"sm90": {"p.k": {"*": CONFIG}}}).encode()
    assert megatron.parse_rank_file(ranks, "x.rank0.json", known_kernels()).tables[0].package == "p"
