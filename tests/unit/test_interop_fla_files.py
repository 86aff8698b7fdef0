"""FLA's config folders as files; its own reader is asked in tests/peers/test_interop_fla.py."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recordings import config as block_config
from recordings import journal, record

from tuning import interop
from tuning.cli import main
from tuning.errors import TableError, TuningError
from tuning.interop import Imported, Loss
from tuning.interop.fla import FlaMode, key_hash
from tuning.spec import Key, LaunchConfig
from tuning.tables import Denied, Entry, TableFile, read_table, table_bytes

CONFIG = {"kwargs": {"BLOCK": 64}, "num_warps": 4, "num_stages": 3, "num_ctas": 1, "maxnreg": None, "ir_override": None}
OTHER = {**CONFIG, "num_warps": 8, "maxnreg": 128}
RAW_KEY = [128, True, "abc", None, 1.5, "torch.float32", "torch.bfloat16"]
NAMES = ("n", "flag", "word", "none", "scale")


class Autotuner:
    class_name = "fla.ops.utils.cache.CachedAutotuner"

    def __init__(self, kernel: str, key_names: tuple[str, ...] = NAMES, hooks: tuple[str, ...] = ()) -> None:
        self.kernel, self.key_names, self.hooks = kernel, key_names, hooks


def entries_of(*rows: tuple[list[Any], Any]) -> dict[str, Any]:
    return {
        hashlib.md5(json.dumps(key, separators=(",", ":"), sort_keys=True).encode()).hexdigest(): {
            "autotune_key": key,
            "config": config,
        }
        for key, config in rows
    }


FILE: dict[str, Any] = {
    "kernel_name": "kernel",
    "triton_version": "3.6.0",
    "default_config": OTHER,
    "autotune_entries": entries_of((RAW_KEY, CONFIG)),
}


def read(document: Any, tmp_path: Path, *, names: object = Autotuner("fla.ops.kernel"), **how: Any) -> Imported:
    (tmp_path / "kernel.json").write_text(json.dumps(document))
    return interop.read("fla", [tmp_path], arch="sm90", names=names, **how)


def kinds(losses: tuple[Loss, ...]) -> list[str]:
    """The kinds of losses, but for what FLA does not read: that has a test of its own."""
    return [loss.kind for loss in losses if loss.kind != "unread"]


def test_a_file_becomes_exact_entries_and_a_wildcard(tmp_path: Path) -> None:
    found = read(FILE, tmp_path)
    (table,) = found.tables
    assert (table.arch, table.package, table.triton) == ("sm90", "fla", "3.6.0")
    exact = next(entry for entry in table.entries if entry.key is not None)
    assert exact.key == (
        ("n", "128"),
        ("flag", "true"),
        ("word", '"abc"'),
        ("none", "null"),
        ("scale", '{"float":"1.5"}'),
    )
    assert exact.dtype_sequence == ("float32", "bfloat16")
    assert exact.config == LaunchConfig.build({"BLOCK": 64})
    assert exact.evidence == {"reported_by": "FLA config file kernel.json", "measured": False}
    wildcard = next(entry for entry in table.entries if entry.key is None)
    assert wildcard.config == LaunchConfig.build({"BLOCK": 64}, num_warps=8, maxnreg=128)
    assert kinds(found.losses) == ["lookup"]  # the fuzzy rule of the mode full
    assert table_bytes(table)


def test_theirs_to_ours_to_theirs_is_the_same_file(tmp_path: Path) -> None:
    tables = read(FILE, tmp_path).tables
    written = interop.write("fla", tables, tmp_path / "back", mode="full")
    assert kinds(written.losses) == ["evidence", "lookup"]
    (path,) = written.files
    assert path.name == "kernel.json"
    assert json.loads(path.read_text()) == FILE
    data = path.read_bytes()
    again = interop.read("fla", [path], arch="sm90", names=Autotuner("fla.ops.kernel"))
    assert again.tables == tables
    assert interop.write("fla", again.tables, tmp_path / "back", mode="full").files[0].read_bytes() == data


KEY = Key.of({"n": 128}, {"x": "bfloat16", "y": "float32"}, ("y", "x"))


def entry(key: Key | None = KEY, block: int = 64, kernel: str = "fla.ops.kernel") -> Entry:
    rows = (key.values, key.dtypes) if key else (None, None)
    return Entry(kernel, *rows, None, block_config(block), {"measured": True})


def table(*entries: Entry, **rest: Any) -> TableFile:
    return TableFile("sm90", "fla", "", rest.pop("triton", "3.6.0"), rest.pop("device", ""), entries, **rest)


RECORDED = journal(record({64: 1.0}, kernel="fla.ops.kernel", key=KEY))


def written(tables: list[TableFile], folder: Path, **how: Any) -> tuple[list[Any], list[str]]:
    done = interop.write("fla", tables, folder, **how)
    if not done.files:
        return [], kinds(done.losses)
    document = json.loads((folder / "kernel.json").read_text())
    return [item["autotune_key"] for item in document["autotune_entries"].values()], kinds(done.losses)


def test_ours_to_theirs_to_ours(tmp_path: Path) -> None:
    mine = table(entry(), entry(Key.of({"n": 64}, {"x": "int8", "y": "int8"}), 32), entry(None, 16))
    done = interop.write("fla", [mine], tmp_path, journals=[RECORDED], mode="full")
    back = interop.read("fla", [tmp_path], arch="sm90", names=[RECORDED])
    assert {row.identity: row.config for row in back.tables[0].entries} == {
        row.identity: row.config for row in mine.entries
    }
    assert set(kinds(done.losses)) == {"evidence", "lookup"}


def test_dtypes_are_in_the_order_of_the_call(tmp_path: Path) -> None:
    assert written([table(entry())], tmp_path, journals=[RECORDED]) == (
        [[128, "torch.float32", "torch.bfloat16"]],
        ["evidence"],
    )
    assert written([table(entry())], tmp_path) == (
        [[128, "torch.bfloat16", "torch.float32"]],
        ["evidence", "call_order"],
    )


def test_every_config_field_is_spelt_out(tmp_path: Path) -> None:
    """``num_ctas`` is demanded by FLA from Triton 3.5.1 on; older files do not have it."""
    interop.write("fla", [table(entry(None))], tmp_path, mode="full")
    assert json.loads((tmp_path / "kernel.json").read_text())["default_config"] == CONFIG
    old = {name: CONFIG[name] for name in ("kwargs", "num_warps", "num_stages")}
    assert read({"default_config": old}, tmp_path).tables[0].entries[0].config == block_config(64)


# --- modes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "exact", "wildcard", "lost"),
    [
        ("disabled", False, False, ["mode"]),
        ("strict", True, False, ["mode"]),
        ("fuzzy", True, False, ["lookup", "mode"]),
        ("full", True, True, ["lookup"]),
        ("default", False, True, ["mode"]),
        ("always", False, True, ["mode"]),
    ],
)
def test_reading_takes_what_fla_uses_in_a_mode(
    tmp_path: Path, mode: FlaMode, exact: bool, wildcard: bool, lost: list[str]
) -> None:
    found = read(FILE, tmp_path, mode=mode)
    rows = [row for each in found.tables for row in each.entries]
    assert [row.key is not None for row in rows if row.key is not None] == [True] * exact
    assert sum(row.key is None for row in rows) == wildcard
    assert kinds(found.losses) == lost


@pytest.mark.parametrize(("mode", "used"), [("full", 1), ("strict", 0), ("fuzzy", 0), ("default", 0), ("always", 0)])
def test_a_file_that_is_a_config_by_itself(tmp_path: Path, mode: FlaMode, used: int) -> None:
    found = read({**CONFIG, "kernel_name": "kernel"}, tmp_path, mode=mode)
    assert len([row for each in found.tables for row in each.entries]) == used
    assert kinds(found.losses) == ["unknown_member", *(["mode"] if not used else [])]


@pytest.mark.parametrize(
    ("mode", "lost"),
    [
        ("disabled", ["mode"]),
        ("strict", ["wildcard"]),
        ("fuzzy", ["lookup", "wildcard"]),
        ("full", ["lookup"]),
        ("default", ["mode"]),
        ("always", ["mode"]),
    ],
)
def test_writing_says_what_fla_will_not_use_in_a_mode(tmp_path: Path, mode: FlaMode, lost: list[str]) -> None:
    done = interop.write("fla", [table(entry(), entry(None))], tmp_path, journals=[RECORDED], mode=mode)
    assert sorted(kinds(done.losses)) == sorted(["evidence", *lost])
    document = json.loads(done.files[0].read_text())
    assert len(document["autotune_entries"]) == 1
    assert document["default_config"] == CONFIG


# --- what is lost -----------------------------------------------------------------------------------------------------


def test_kernels_that_nothing_knows_and_ambiguous_ones_are_losses_and_the_others_are_read(tmp_path: Path) -> None:
    assert kinds(read(FILE, tmp_path, names=None).losses) == ["unknown_kernel"]
    known = [Autotuner("fla.b.kernel"), Autotuner("fla.a.kernel"), Autotuner("fla.c.other")]
    (tmp_path / "other.json").write_text(json.dumps({"default_config": CONFIG}))
    found = interop.read("fla", [tmp_path], arch="sm90", names=known)
    assert kinds(found.losses) == ["shared_name"]
    assert found.losses[0].message.endswith("one of fla.a.kernel, fla.b.kernel")
    assert [row.kernel for row in found.tables[0].entries] == ["fla.c.other"]
    told = interop.read("fla", [tmp_path], arch="sm90", names=[known, {"kernel": "fla.a.kernel"}])
    assert {row.kernel for row in told.tables[0].entries} == {"fla.a.kernel", "fla.c.other"}


def test_keys_without_names_are_a_loss(tmp_path: Path) -> None:
    found = read(FILE, tmp_path, names={"kernel": "fla.ops.kernel"})
    assert kinds(found.losses) == ["unnamed_key", "lookup"]
    assert [row.key for row in found.tables[0].entries] == [None]
    other = read(FILE, tmp_path, names=Autotuner("fla.ops.kernel", ("n",)))
    assert kinds(other.losses) == ["unnamed_key", "lookup"]


def test_entries_that_fla_does_not_find_are_left_out(tmp_path: Path) -> None:
    (item,) = FILE["autotune_entries"].values()
    moved = {**FILE, "autotune_entries": {"0" * 32: item, "1" * 32: {"config": CONFIG}}, "default_config": None}
    found = read(moved, tmp_path, mode="strict")
    assert (found.tables, kinds(found.losses)) == ((), ["lookup", "unnamed_key"])


def test_members_that_are_not_read_are_said(tmp_path: Path) -> None:
    ((digest, item),) = FILE["autotune_entries"].items()
    odd = {**FILE, "kernel_name": "other", "x": 1, "autotune_entries": {digest: {**item, "y": 2}}}
    found = read(odd, tmp_path, mode="full")
    assert [(loss.kind, loss.where.partition(": ")[2]) for loss in found.losses] == [
        ("header", "$.kernel_name"),
        ("unknown_member", "$.x"),
        (
            "unknown_member",
            f'$.autotune_entries["{digest}"].y' if digest[0].isdigit() else f"$.autotune_entries.{digest}.y",
        ),
        ("lookup", "$.autotune_entries"),
    ]


def test_files_of_several_versions_of_triton(tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text(json.dumps({"triton_version": "3.4.0", "default_config": CONFIG}))
    names = [Autotuner("fla.ops.kernel"), Autotuner("fla.ops.other")]
    found = read(FILE, tmp_path, names=names, mode="default")
    assert found.tables[0].triton == "3.4.0, 3.6.0"
    assert "header" in kinds(found.losses)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"autotune_entries": []}, "$.autotune_entries"),
        ({"autotune_entries": {"a": 1}}, "$.autotune_entries.a"),
        ({"autotune_entries": {"a": {"config": None}}}, "$.autotune_entries.a.config"),
        ({"autotune_entries": {"a": {"config": CONFIG, "autotune_key": "x"}}}, "$.autotune_entries.a.autotune_key"),
        ({"default_config": []}, "$.default_config"),
        ({"default_config": {**CONFIG, "num_warps": 5}}, "$.default_config.num_warps"),
        ({"triton_version": 3.6}, "$.triton_version"),
    ],
)
def test_what_is_no_config_file(tmp_path: Path, change: Any, place: str) -> None:
    with pytest.raises(TableError) as caught:
        read({**FILE, **change}, tmp_path)
    assert (caught.value.file, caught.value.where) == (str(tmp_path / "kernel.json"), place)


def test_a_key_nested_too_deep_to_be_encoded(tmp_path: Path) -> None:
    deep: Any = 1
    for _ in range(6):
        deep = [deep]
    key = [deep, "torch.int8"]
    with pytest.raises(
        TableError, match=r"autotune_key\[0\]: expected a value nested at most 5 levels deep, found a deeper"
    ):
        read({"autotune_entries": entries_of((key, CONFIG))}, tmp_path, names=Autotuner("fla.ops.kernel", ("n",)))
    nested = {"autotune_entries": entries_of(([[1, [2]], "torch.int8"], CONFIG))}
    found = read(nested, tmp_path, names=Autotuner("fla.ops.kernel", ("n",)), mode="strict")
    assert found.tables[0].entries[0].key == Key.of({"n": (1, (2,))}).values
    keys, _ = written(list(found.tables), tmp_path / "back")
    assert keys == [[[1, [2]], "torch.int8"]]


def test_values_that_json_cannot_hold_are_a_loss(tmp_path: Path) -> None:
    rows = [entry(Key((("n", text),), ())) for text in ('{"dtype":"int8"}', '{"float":"nan"}', '{"enum":"m.E.A"}')]
    assert written([table(*rows)], tmp_path) == ([], ["evidence", "value", "value", "value"])
    assert list(tmp_path.iterdir()) == []
    odd = replace(entry(), config=LaunchConfig.build({"B": 1}, extra={"waves": 2}))
    assert written([table(odd)], tmp_path) == ([], ["evidence", "value"])


def test_typed_keys_that_share_a_slot_in_memory_are_a_loss(tmp_path: Path) -> None:
    """``True``, ``1`` and ``1.0`` have hashes of their own in a file, and one place in FLA's memory."""
    rows = [entry(Key.of({"n": value}), block) for value, block in ((True, 16), (1, 32), (1.0, 64))]
    keys, lost = written([table(*rows)], tmp_path)
    assert sorted(map(json.dumps, keys)) == ["[1.0]", "[1]", "[true]"]
    assert lost == ["evidence", "lookup", "lookup"]


def test_rows_that_are_one_over_there_are_both_left_out(tmp_path: Path) -> None:
    kernels = ("fla.a.kernel", "fla.b.kernel")
    rows = [entry(Key.of({"n": 1}), block, kernel) for block, kernel in zip((16, 32), kernels, strict=True)]
    other = entry(Key.of({"n": 2}), 16, kernels[0])
    keys, lost = written([table(*rows, other)], tmp_path)
    assert keys == [[2]]
    assert sorted(lost) == ["duplicate", "evidence", "shared_name"]
    tuples = [entry(Key.of({"n": value}), block) for value, block in (((1,), 16), ([1], 32))]
    assert written([table(*tuples)], tmp_path / "b")[1].count("duplicate") == 1


def test_a_shared_bare_name_is_said_even_where_one_kernel_is_written(tmp_path: Path) -> None:
    names = [Autotuner("fla.other.kernel"), Autotuner("fla.ops.kernel", hooks=("config.pre_hook",))]
    assert sorted(written([table(entry(Key.of({"n": 1})))], tmp_path, names=names)[1]) == [
        "evidence",
        "hook",
        "shared_name",
    ]
    wild = table(entry(None, 16, "fla.a.kernel"), entry(None, 32, "fla.b.kernel"))
    assert written([wild], tmp_path / "b", mode="full") == ([], ["evidence", "shared_name", "wildcard"])


def test_autotuners_that_do_not_read_the_folder_are_said(tmp_path: Path) -> None:
    def unread(*names: object) -> list[str]:
        done = interop.write("fla", [table(entry(Key.of({"n": 1})))], tmp_path, names=names)
        return [str(loss) for loss in done.losses if loss.kind == "unread"]

    reader = Autotuner("fla.ops.kernel")
    assert unread(reader) == []
    (message,) = unread()
    assert message.startswith(f"{tmp_path}: whether the autotuner of fla.ops.kernel reads the folder is not known")
    plain = Autotuner("fla.ops.kernel")
    plain.class_name = "triton.runtime.autotuner.Autotuner"
    (message,) = unread(plain)
    assert message.startswith("fla.ops.kernel: its autotuner (triton.runtime.autotuner.Autotuner) does not read")
    assert "configure_fla_cache_autotune() before its import" in message


def test_denied_configs_and_device_are_said(tmp_path: Path) -> None:
    denied = Denied("fla.ops.kernel", block_config(16), None, "racy", "me")
    full = table(entry(Key.of({"n": 1})), denied=(denied,), device="NVIDIA H200")
    assert written([full], tmp_path)[1] == ["denied", "evidence", "header"]


def test_a_name_that_is_no_file_name_leads_nowhere(tmp_path: Path) -> None:
    hostile = entry(Key.of({"n": 1}), kernel="fla.ops./../../kernel")
    done = interop.write("fla", [table(hostile)], tmp_path / "folder")
    assert (done.files, kinds(done.losses)) == ((), ["evidence", "value"])
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_for_one_arch(tmp_path: Path) -> None:
    with pytest.raises(TuningError, match="expected those of one arch for a folder of FLA, found sm100, sm90"):
        interop.write("fla", [table(entry()), replace(table(entry()), arch="sm100")], tmp_path)


def test_the_hash_is_that_of_the_compact_json() -> None:
    assert key_hash([128, True]) == hashlib.md5(b"[128,true]").hexdigest()
    assert key_hash([{"b": 1, "a": "é"}]) == hashlib.md5(b'[{"a":"\\u00e9","b":1}]').hexdigest()


def test_the_command_is_told_which_kernel_a_bare_name_means(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "fla").mkdir()
    (tmp_path / "fla" / "kernel.json").write_text(json.dumps({"default_config": CONFIG}))
    argv = ["import", "--format", "fla", str(tmp_path / "fla"), "--arch", "sm90", "-o", str(tmp_path / "out")]
    assert main([*argv, "--kernel", "kernel=fla.a.kernel"]) == 0
    assert read_table(tmp_path / "out" / "sm90" / "fla.json").entries[0].kernel == "fla.a.kernel"
    for text in ("kernel", "kernel=kernel", "=fla.a.kernel"):
        with pytest.raises(SystemExit) as stopped:
            main([*argv, "--kernel", text])
        assert stopped.value.code == 2
        assert "expected a bare name and a qualified one" in " ".join(capsys.readouterr().err.split())
