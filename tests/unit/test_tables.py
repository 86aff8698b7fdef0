"""Table files: what is refused and how it is said, canonical bytes, lookup, overlay, and writing."""

from __future__ import annotations

import errno
import json
import os
import pickle
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from table_faults import ALL_FAULTS, BEYOND_THE_SCHEMA, CONFIG, FAULTS, SAMPLE, VALID, changed, encode

import tuning.tables
from tuning._table_scan import _scan, load
from tuning.errors import TableError
from tuning.spec import Key, LaunchConfig
from tuning.tables import (
    MAX_BYTES,
    Denied,
    Entry,
    TableFile,
    Tables,
    bundled_folder,
    load_tables,
    parse_table,
    read_table,
    table_bytes,
    write_table,
)

ROOT = Path(__file__).parents[2]


def schema_says(document: Any) -> bool:
    return SCHEMA.is_valid(document)


SCHEMA = Draft202012Validator(json.loads((ROOT / "tables" / "schema.json").read_text(encoding="utf-8")))


class TestReader:
    @pytest.mark.parametrize("name", ALL_FAULTS)
    def test_a_fault_is_named_with_its_place(self, name: str, tmp_path: Path) -> None:
        where, value, path, expected, found = ALL_FAULTS[name]
        file = tmp_path / "sm90" / "pack.json"
        file.parent.mkdir()
        file.write_bytes(encode(changed(*where, to=value)))
        with pytest.raises(TableError) as caught:
            read_table(file)
        error = caught.value
        assert (error.file, error.where) == (str(file), path)
        assert expected in str(error.expected)
        assert found in str(error.found)
        assert str(error) == f"{file}: {path}: expected {error.expected}, found {error.found}"
        assert "\n" not in str(error)
        assert pickle.loads(pickle.dumps(error)).__dict__ == error.__dict__

    @pytest.mark.parametrize("name", VALID)
    def test_valid_tables_are_read(self, name: str) -> None:
        where, value = VALID[name]
        table = parse_table(encode(changed(*where, to=value)))
        assert parse_table(table_bytes(table)) == table  # the sample stands in canonical order

    def test_the_sample_is_read_in_full(self) -> None:
        table = parse_table(encode(SAMPLE), "here.json")
        assert (table.arch, table.package, table.package_version, table.triton) == ("sm90", "pack", "2.3", "3.6.0")
        assert (table.device, table.multiprocessors, table.path) == ("NVIDIA H200", 132, "here.json")
        star, named, sequence = table.entries
        assert (star.key, star.dtypes, star.dtype_sequence) == (None, None, None)
        assert named.key == (
            ("chunk", "128"),
            ("K", "64"),
            ("causal", "false"),
            ("scale", '{"float":"1.0"}'),
            ("dtype", '{"dtype":"bfloat16"}'),
        )
        assert named.dtypes == (("x_ptr", "bfloat16"), ("out_ptr", "float32"))
        assert sequence.dtype_sequence == ("bfloat16", "float32")
        assert sequence.dtypes is None
        assert named.config == LaunchConfig(
            (("BLOCK_M", "64"), ("BLOCK_N", "32")), 4, 2, 2, 128, "k.ttir", (("waves", "2"),)
        )
        assert named.source_hash == "0123456789abcdef"
        assert named.evidence["best_ms"] == 0.25
        assert named.classes is not None
        assert [len(group) for group in named.classes] == [2, 1]
        assert {entry.origin for entry in table.entries} == {row.origin for row in table.denied} == {"here.json"}
        assert {entry.triton for entry in table.entries} == {"3.6.0"}
        assert [(row.key, row.dtypes, row.reason, row.source) for row in table.denied] == [
            (None, None, "races", "a report"),
            ((("K", "256"),), (("x_ptr", "float32"),), "out of shared memory", "recorded"),
        ]

    @pytest.mark.parametrize(
        ("data", "expected", "found"),
        [
            (b"", "JSON", "Expecting value at line 1 column 1"),
            (b'{"schema_version": 1,}', "JSON", "line 1 column"),
            (b"[1, 2", "JSON", "line 1 column"),
            (b"{} {}", "JSON", "Extra data at line 1 column 4"),
            (b"\xef\xbb\xbf{}", "without a byte order mark", "a byte order mark"),
            (b'{"device": "\xe9"}', "UTF-8", "the byte 0xe9 at offset 12"),
            (json.dumps(SAMPLE).encode("utf-16"), "UTF-8", "the byte 0xff at offset 0"),
            (b"[" * 1_000_000, "nested at most 16 levels", "nesting too deep"),
            (b'{"a":' * 1_000_000, "nested at most 16 levels", "nesting too deep"),
            (b'{"schema_version": ' + b"1" * 100_000 + b"}", "integers of reasonable length", "limit"),
            (b"null", "a table, as an object", "null"),
            (b"[]", "a table, as an object", "an empty array"),
        ],
    )
    def test_what_is_no_json_object_at_all(self, data: bytes, expected: str, found: str) -> None:
        with pytest.raises(TableError) as caught:
            parse_table(data, "f.json")
        assert caught.value.where == "$"
        assert expected in str(caught.value.expected)
        assert found in str(caught.value.found)

    @pytest.mark.parametrize(
        ("old", "new", "where", "found"),
        [
            ('"device": "NVIDIA H200"', '"device": "a", "device": "b"', "$.device", "a second member of this name"),
            ('"chunk": 128', '"chunk": 128, "chunk": 64', "$.entries[1].key.chunk", "a second member of this name"),
            ('"ranks": 8', '"x": {"y": 1, "y": 1}', "$.entries[1].evidence.x.y", "a second member of this name"),
            ('"ranks": 8', '"ranks": 8, "ranks": 8', "$.entries[1].evidence.ranks", "a second member of this name"),
            ('"BLOCK_M": 64', '"BLOCK_M": 64, "BLOCK_M": 64', "$.entries[0].config.kwargs.BLOCK_M", "a second member"),
            ('"best_ms": 0.25', '"best_ms": NaN', "$.entries[1].evidence.best_ms", "NaN, which is not JSON"),
            ('"best_ms": 0.25', '"best_ms": -Infinity', "$.entries[1].evidence.best_ms", "-Infinity, which is not"),
            ('"best_ms": 0.25', '"best_ms": 1e999', "$.entries[1].evidence.best_ms", "one that it cannot"),
            ('"chunk": 128', '"chunk": NaN', "$.entries[1].key.chunk", "NaN, which is not JSON"),
            ('"num_warps": 8', '"num_warps": Infinity', "$.entries[0].config.num_warps", "Infinity, which is not JSON"),
        ],
    )
    def test_what_python_accepts_and_json_does_not(self, old: str, new: str, where: str, found: str) -> None:
        text = json.dumps(SAMPLE)
        assert old in text
        with pytest.raises(TableError) as caught:
            parse_table(text.replace(old, new, 1).encode())
        assert caught.value.where == where
        assert found in str(caught.value.found)

    def test_long_findings_are_shortened(self) -> None:
        with pytest.raises(TableError) as caught:
            parse_table(encode(changed("arch", to="x y" * 10_000)))
        assert len(str(caught.value)) < 300

    def test_a_newer_file_is_refused_before_anything_else_in_it(self) -> None:
        with pytest.raises(TableError, match=r"newest that this library reads"):
            parse_table(b'{"tables": {}, "schema_version": 7}')


class TestPublishedSchema:
    def test_it_is_a_schema(self) -> None:
        Draft202012Validator.check_schema(SCHEMA.schema)
        assert SCHEMA.is_valid(SAMPLE)

    @pytest.mark.parametrize("name", FAULTS)
    def test_it_refuses_what_the_reader_refuses(self, name: str) -> None:
        where, value, *_ = FAULTS[name]
        assert not schema_says(changed(*where, to=value))

    @pytest.mark.parametrize("name", BEYOND_THE_SCHEMA)
    def test_what_only_the_reader_can_tell(self, name: str) -> None:
        where, value, *_ = BEYOND_THE_SCHEMA[name]
        assert schema_says(changed(*where, to=value))

    @pytest.mark.parametrize("name", VALID)
    def test_it_accepts_what_the_reader_accepts(self, name: str) -> None:
        where, value = VALID[name]
        assert schema_says(changed(*where, to=value))

    def test_every_member_is_in_the_corpus(self) -> None:
        """A member added to the schema needs its place in the sample, or the two could drift apart unseen."""
        names: set[str] = set()

        def collect(value: Any) -> None:
            if isinstance(value, dict):
                names.update(value)
                list(map(collect, value.values()))
            elif isinstance(value, list):
                list(map(collect, value))

        collect(SAMPLE)
        definitions = SCHEMA.schema["$defs"]
        for part in (SCHEMA.schema, definitions["entry"], definitions["denied"], definitions["config"]):
            assert set(part["properties"]) <= names
        assert set(definitions["evidence"]["properties"]) <= names


class TestFile:
    def write(self, folder: Path, *where: str, data: bytes | None = None) -> Path:
        path = folder.joinpath(*where)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(encode(SAMPLE) if data is None else data)
        return path

    def test_arch_and_package_must_be_those_of_the_path(self, tmp_path: Path) -> None:
        assert read_table(self.write(tmp_path, "sm90", "pack.json")).arch == "sm90"
        foreign = self.write(tmp_path, "sm100", "pack.json")
        with pytest.raises(TableError, match=r'\$\.arch: expected "sm100", the folder .*found the string "sm90"'):
            read_table(foreign)
        misnamed = self.write(tmp_path, "sm90", "other.json")
        with pytest.raises(TableError, match=r'\$\.package: expected "other", as in the name'):
            read_table(misnamed)
        assert read_table(misnamed, in_place=False) == read_table(foreign, in_place=False)

    def test_the_place_is_taken_from_a_relative_path_too(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.write(tmp_path, "sm90", "pack.json")
        monkeypatch.chdir(tmp_path / "sm90")
        assert read_table("pack.json").package == "pack"

    @pytest.mark.parametrize("in_place", [True, False])
    def test_what_cannot_be_read(self, tmp_path: Path, in_place: bool) -> None:
        folder = tmp_path / "sm90" / "pack.json"
        folder.mkdir(parents=True)
        for path, found in ((folder, "a folder"), (tmp_path / "none.json", "No such file"), ("a\0b", "null")):
            with pytest.raises(TableError, match=found) as caught:
                read_table(path, in_place=in_place)
            assert (caught.value.file, caught.value.where) == (os.fspath(path), None)
            assert str(caught.value).startswith(f"{path}: expected a ")

    def test_a_pipe_is_not_waited_for(self, tmp_path: Path) -> None:
        pipe = tmp_path / "sm90" / "pack.json"
        pipe.parent.mkdir()
        os.mkfifo(pipe)
        with pytest.raises(TableError, match="a regular file"):
            read_table(pipe)

    def test_a_huge_file_is_refused_unread(self, tmp_path: Path) -> None:
        path = self.write(tmp_path, "sm90", "pack.json")
        os.truncate(path, MAX_BYTES + 1)  # sparse
        with pytest.raises(TableError, match=f"at most {MAX_BYTES} bytes, found {MAX_BYTES + 1}; split"):
            read_table(path)
        with pytest.raises(TableError, match=f"at most {MAX_BYTES} bytes"):
            parse_table(bytes(MAX_BYTES + 1))
        with pytest.raises(TableError, match="at most 4194304 values, found more; split"):
            parse_table(b"[" + b"[]," * (4 << 20) + b"[]]")


def entry(kernel: str = "pack.a.k", stages: int = 2, **fields: Any) -> Entry:
    """An entry whose config is told apart by its stages."""
    config = LaunchConfig.build({"BLOCK": 64}, num_stages=stages)
    defaults: dict[str, Any] = {"key": None, "dtypes": None, "dtype_sequence": None, "config": config}
    return Entry(kernel, evidence={"reported_by": "me"}, **{**defaults, **fields})


def keyed(values: Mapping[str, object], dtypes: Any = (), stages: int = 2, **fields: Any) -> Entry:
    key = Key.of(values)
    form = {"dtypes": tuple(dtypes.items())} if isinstance(dtypes, dict) else {"dtype_sequence": tuple(dtypes)}
    return entry(stages=stages, key=key.values, **form, **fields)


def denial(stages: int = 2, **fields: Any) -> Denied:
    config = LaunchConfig.build({"BLOCK": 64}, num_stages=stages)
    return Denied(**{"kernel": "pack.a.k", "config": config, "key": None, "reason": "r", "source": "s", **fields})


def table(*entries: Entry, denied: tuple[Denied, ...] = (), **fields: Any) -> TableFile:
    header = {"arch": "sm90", "package": "pack", "package_version": "1", "triton": "3.6.0", "device": "d"}
    return TableFile(**{**header, **fields}, entries=entries, denied=denied)


def stages(found: Entry | None) -> int | None:
    return None if found is None else found.config.num_stages


class TestCanonicalBytes:
    def test_layout(self) -> None:
        text = table_bytes(
            table(
                keyed({"b": 2, "a": True}, {"y": "float32", "x": "int32"}, source_hash="00ff00ff"),
                entry(),
                denied=(denial(),),
                multiprocessors=132,
            )
        ).decode()
        config = '"config": {"kwargs": {"BLOCK": 64}, "num_warps": 4, "num_stages": 2}'
        assert text == (
            "{\n"
            '"schema_version": 1,\n'
            '"arch": "sm90",\n'
            '"package": "pack",\n'
            '"package_version": "1",\n'
            '"triton": "3.6.0",\n'
            '"device": "d",\n'
            '"multiprocessors": 132,\n'
            '"entries": [\n'
            f'{{"kernel": "pack.a.k", "key": "*", {config}, "evidence": {{"reported_by": "me"}}}},\n'
            '{"kernel": "pack.a.k", "key": {"b": 2, "a": true}, "dtypes": {"y": "float32", "x": "int32"}, '
            f'{config}, "source_hash": "00ff00ff", "evidence": {{"reported_by": "me"}}}}\n'
            "],\n"
            '"denied": [\n'
            f'{{"kernel": "pack.a.k", "key": "*", {config}, "reason": "r", "source": "s"}}\n'
            "]\n"
            "}\n"
        )

    def test_a_table_without_rows(self) -> None:
        assert table_bytes(table()).decode().endswith('"entries": [],\n"denied": []\n}\n')

    def test_rows_are_sorted_by_kernel_and_key_with_numbers_as_numbers(self) -> None:
        rows = [
            entry(kernel="pack.a.k"),
            keyed({"n": 2}, {"x": "int8"}),
            keyed({"n": 2}, ["int8"]),
            keyed({"n": 16}, {"x": "int8"}),
            keyed({"n": "16"}, {"x": "int8"}),
            entry(kernel="pack.b.k"),
        ]
        denied = [denial(stages=1), denial(stages=3), denial(key=(("n", "2"),)), denial(key=(("n", "16"),))]
        data = table_bytes(table(*rows, denied=tuple(denied)))
        assert parse_table(data).entries == tuple(rows)
        assert parse_table(data).denied == tuple(denied)
        assert table_bytes(table(*reversed(rows), denied=tuple(reversed(denied)))) == data

    def test_the_order_of_declaration_survives(self) -> None:
        key, dtypes = (("z", "1"), ("a", "2")), (("y", "float32"), ("b", "int32"))
        back = parse_table(table_bytes(table(entry(key=key, dtypes=dtypes)))).entries[0]
        assert (back.key, back.dtypes) == (key, dtypes)

    def test_equal_content_gives_equal_bytes(self) -> None:
        long = changed("entries", 2, "config", to={**CONFIG, "num_ctas": 1, "maxnreg": None, "ir_override": None})
        short = SAMPLE
        assert table_bytes(parse_table(encode(long))) == table_bytes(parse_table(encode(short)))
        one, other = (
            {"b": 1, "a": {"d": [1], "c": 2}, "measured": True},
            {"measured": True, "a": {"c": 2, "d": [1]}, "b": 1},
        )
        rows = [replace(entry(), evidence=evidence) for evidence in (one, other)]
        assert table_bytes(table(rows[0])) == table_bytes(table(rows[1]))

    def test_classes_are_sorted(self) -> None:
        groups = parse_table(encode(SAMPLE)).entries[1].classes
        assert groups is not None
        turned = tuple(tuple(reversed(group)) for group in reversed(groups))
        base = parse_table(encode(SAMPLE))
        rows = [replace(row, classes=turned) if row.classes else row for row in base.entries]
        assert table_bytes(replace(base, entries=tuple(rows))) == table_bytes(base)

    @pytest.mark.parametrize(
        ("bad", "message"),
        [
            (table(entry(), entry()), r"\$\.entries\[1\]: expected one row"),
            (table(replace(entry(), evidence={})), r"\$\.entries\[0\]\.evidence: expected an object"),
            (table(replace(entry(), evidence={"x": float("nan")})), "made of JSON values, found ValueError"),
            (table(replace(entry(), evidence={"x": {1}})), "made of JSON values, found TypeError"),
            (table(entry(kernel="other.k")), r"\$\.entries\[0\]\.kernel: expected a kernel of pack"),
            (table(entry(key=(("a", "not JSON"),), dtypes=())), "made of JSON values, found JSONDecodeError"),
            (table(entry(key=(("a", " 1"),), dtypes=())), "canonical encoding, found one that reads back changed"),
            (table(entry(config=LaunchConfig((("B", "1 "),)))), "canonical encoding"),
            (table(entry(config=LaunchConfig((), num_warps=3))), r"num_warps: expected a power of two"),
            (table(keyed({"a": 1}, {"x": "torch.int8"})), r"dtypes\.x: expected a dtype without"),
            (table(replace(keyed({"a": 1}), dtype_sequence=None)), r"\$\.entries\[0\]: expected an entry with"),
            (table(arch="a/b"), r"\$\.arch: expected"),
        ],
    )
    def test_what_could_not_be_read_is_not_written(self, tmp_path: Path, bad: TableFile, message: str) -> None:
        with pytest.raises(TableError, match=message):
            table_bytes(bad)
        with pytest.raises(TableError, match=message):
            write_table(tmp_path, bad)
        assert list(tmp_path.iterdir()) == []


class TestWriting:
    def test_the_path_is_arch_and_package(self, tmp_path: Path) -> None:
        path = write_table(tmp_path / "new", table(entry()))
        assert path == tmp_path / "new" / "sm90" / "pack.json"
        assert read_table(path) == table(entry())
        assert read_table(path).path == str(path)
        assert [child.name for child in path.parent.iterdir()] == ["pack.json"]

    def test_the_umask_decides_who_may_read(self, tmp_path: Path) -> None:
        before = os.umask(0o027)
        try:
            path = write_table(tmp_path, table(entry()))
        finally:
            os.umask(before)
        assert path.stat().st_mode & 0o777 == 0o640

    def test_a_failure_leaves_the_old_file(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = write_table(tmp_path, table(entry()))
        before = path.read_bytes()

        def full(descriptor: int) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(TableError, match=r"pack\.json: .* a place that can be written, found No space left"):
            write_table(tmp_path, table(entry(stages=5)))
        assert path.read_bytes() == before
        assert list(path.parent.iterdir()) == [path]

    def test_a_file_in_the_way(self, tmp_path: Path) -> None:
        (tmp_path / "sm90").write_text("")
        with pytest.raises(TableError, match="a place that can be written"):
            write_table(tmp_path, table(entry()))

    def test_the_content_is_on_disk_before_the_name(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        steps: list[str] = []
        sync, rename = os.fsync, os.replace
        monkeypatch.setattr(os, "fsync", lambda fd: (steps.append("sync"), sync(fd))[1])
        monkeypatch.setattr(os, "replace", lambda old, new: (steps.append("replace"), rename(old, new))[1])
        write_table(tmp_path, table(entry()))
        assert steps == ["sync", "replace", "sync"]


KEY = Key.of({"K": 64, "M": 8}, {"x": "bfloat16", "y": "float32"})


class TestLookup:
    def test_values_and_dtypes_must_all_be_equal(self) -> None:
        tables = Tables("sm90", [[table(keyed({"K": 64, "M": 8}, {"x": "bfloat16", "y": "float32"}))]])
        assert stages(tables.exact("pack.a.k", KEY)) == 2
        assert tables.exact("pack.b.k", KEY) is None
        for other in (
            Key.of({"K": 64, "M": 9}, {"x": "bfloat16", "y": "float32"}),
            Key.of({"K": 64}, {"x": "bfloat16", "y": "float32"}),
            Key.of({"K": 64, "M": 8, "N": 1}, {"x": "bfloat16", "y": "float32"}),
            Key.of({"K": 64, "M": 8}, {"x": "float32", "y": "bfloat16"}),
            Key.of({"K": 64, "M": 8}, {"x": "bfloat16"}),
            Key.of({"K": 64, "M": 8}),
        ):
            assert tables.exact("pack.a.k", other) is None

    def test_the_order_of_declaration_and_of_the_call_do_not_matter(self) -> None:
        tables = Tables("sm90", [[table(keyed({"M": 8, "K": 64}, {"y": "float32", "x": "bfloat16"}))]])
        assert tables.exact("pack.a.k", KEY) is not None
        called = Key.of({"K": 64, "M": 8}, {"x": "bfloat16", "y": "float32"}, call_order=["y", "x"])
        assert tables.exact("pack.a.k", called) is tables.exact("pack.a.k", KEY)

    def test_true_one_and_one_point_zero_are_three_keys(self) -> None:
        values = (True, 1, 1.0, "1", None)
        rows = [keyed({"a": value}, stages=number) for number, value in enumerate(values)]
        tables = Tables("sm90", [[parse_table(table_bytes(table(*rows)))]])
        assert [stages(tables.exact("pack.a.k", Key.of({"a": value}))) for value in values] == [0, 1, 2, 3, 4]

    def test_configs_that_differ_in_one_field_stay_apart(self) -> None:
        configs = [
            LaunchConfig.build({"B": 1}),
            LaunchConfig.build({"B": 1}, ir_override="a.ttir"),
            LaunchConfig.build({"B": 1}, maxnreg=64),
            LaunchConfig.build({"B": 1}, num_ctas=2),
            LaunchConfig.build({"B": 1}, extra={"waves_per_eu": 2}),
            LaunchConfig.build({"B": True}),
        ]
        rows = [keyed({"a": number}, config=config) for number, config in enumerate(configs)]
        denied = tuple(denial(config=config) for config in configs)
        tables = Tables("sm90", [[parse_table(table_bytes(table(*rows, denied=denied)))]])
        found = [tables.exact("pack.a.k", Key.of({"a": number})) for number in range(len(configs))]
        assert [row.config for row in found if row] == configs
        assert set(tables.denied("pack.a.k", KEY)) == set(configs)

    def test_a_sequence_is_compared_in_the_order_of_the_signature(self) -> None:
        values = {"K": 64, "M": 8}
        rows = [keyed(values, ["float32", "bfloat16"], 1), keyed(values, ["bfloat16", "float32"], 2)]
        tables = Tables("sm90", [[table(*rows)]])
        assert stages(tables.exact("pack.a.k", KEY)) == 2
        called = Key.of(values, {"x": "bfloat16", "y": "float32"}, call_order=["y", "x"])
        assert stages(tables.exact("pack.a.k", called)) == 2

    def test_a_sequence_in_another_order_matches_if_it_is_the_only_one(self) -> None:
        values = {"K": 64, "M": 8}
        key = Key.of(values, {"x": "bfloat16", "y": "float32", "z": "int32"})
        one, other = ["int32", "float32", "bfloat16"], ["float32", "int32", "bfloat16"]
        assert stages(Tables("sm90", [[table(keyed(values, one))]]).exact("pack.a.k", key)) == 2
        assert Tables("sm90", [[table(keyed(values, one), keyed(values, other))]]).exact("pack.a.k", key) is None
        third = keyed(values, ["bfloat16", "int32", "float32"])
        assert Tables("sm90", [[table(keyed(values, one), keyed(values, other), third)]]).exact("pack.a.k", key) is None
        fewer = keyed(values, ["int32", "float32"])
        elsewhere = keyed({"K": 64, "M": 9}, other)
        assert stages(Tables("sm90", [[table(keyed(values, one), fewer, elsewhere)]]).exact("pack.a.k", key)) == 2

    def test_named_dtypes_come_before_a_sequence(self) -> None:
        values = {"K": 64, "M": 8}
        rows = [keyed(values, ["bfloat16", "float32"], 1), keyed(values, {"x": "bfloat16", "y": "float32"}, 2)]
        assert stages(Tables("sm90", [[table(*rows)]]).exact("pack.a.k", KEY)) == 2

    def test_the_wildcard_is_no_exact_entry(self) -> None:
        tables = Tables("sm90", [[table(entry(), entry(kernel="pack.b.k", stages=3))]])
        assert tables.exact("pack.a.k", KEY) is None
        assert stages(tables.wildcard("pack.a.k")) == 2
        assert stages(tables.wildcard("pack.b.k")) == 3
        assert tables.wildcard("pack.c.k") is None

    def test_denied_rows_constrain_what_they_name(self) -> None:
        rows = (
            denial(1),
            denial(2, key=(("K", "64"),)),
            denial(3, key=(("K", "65"),)),
            denial(4, key=(("M", "8"), ("K", "64"))),
            denial(5, key=(("other", "64"),)),
            denial(6, dtypes=(("x", "bfloat16"),)),
            denial(7, dtypes=(("y", "bfloat16"),)),
            denial(8, key=(("K", "64"),), dtypes=(("x", "float16"),)),
            denial(9, kernel="pack.b.k"),
            denial(10, key=()),
        )
        tables = Tables("sm90", [[table(denied=rows)]])
        assert sorted(config.num_stages or 0 for config in tables.denied("pack.a.k", KEY)) == [1, 2, 4, 6, 10]
        assert [config.num_stages for config in tables.denied("pack.b.k", KEY)] == [9]
        assert tables.denied("pack.c.k", KEY) == {}
        assert tables.kernels() == ("pack.a.k", "pack.b.k")


class TestOverlay:
    def test_entry_by_entry_the_first_layer_on_top(self) -> None:
        upper = table(keyed({"a": 1}, stages=11), entry(kernel="pack.b.k", stages=12))
        lower = table(keyed({"a": 1}, stages=1), keyed({"a": 2}, stages=2), entry(stages=3))
        tables = Tables("sm90", [[upper], [lower]])
        assert stages(tables.exact("pack.a.k", Key.of({"a": 1}))) == 11
        assert stages(tables.exact("pack.a.k", Key.of({"a": 2}))) == 2
        assert stages(tables.wildcard("pack.a.k")) == 3
        assert [stages(row) for row in tables.entries("pack.a.k")] == [11, 2, 3]
        assert tables.kernels() == ("pack.a.k", "pack.b.k")
        assert tables.files == (upper, lower)

    def test_an_upper_sequence_hides_a_lower_name(self) -> None:
        values = {"K": 64, "M": 8}
        upper = table(keyed(values, ["float32", "bfloat16"], 11))
        lower = table(keyed(values, {"x": "bfloat16", "y": "float32"}, 1))
        assert stages(Tables("sm90", [[upper], [lower]]).exact("pack.a.k", KEY)) == 11

    def test_denied_lists_are_joined_and_nothing_allows_again(self) -> None:
        mine = denial(1, reason="mine")
        theirs = (denial(1, reason="theirs"), denial(2, key=(("K", "64"),), reason="theirs"))
        upper = table(keyed({"K": 64, "M": 8}, {"x": "bfloat16", "y": "float32"}, stages=2), denied=(mine,))
        tables = Tables("sm90", [[upper], [table(denied=theirs)]])
        found = {config.num_stages: row.reason for config, row in tables.denied("pack.a.k", KEY).items()}
        assert found == {1: "mine", 2: "theirs"}

    def test_the_topmost_reason_is_given_whatever_it_constrains(self) -> None:
        narrow, wide = denial(1, key=(("K", "64"),), reason="narrow"), denial(1, reason="wide")
        for rows, reason in (((narrow, wide), "narrow"), ((wide, narrow), "wide")):
            tables = Tables("sm90", [[table(denied=(row,))] for row in rows])
            assert [row.reason for row in tables.denied("pack.a.k", KEY).values()] == [reason]

    def test_a_table_of_another_arch_is_refused(self) -> None:
        with pytest.raises(TableError, match=r'\$\.arch: expected "sm121", found "sm120"'):
            Tables("sm121", [[table(arch="sm120")]])

    def test_representation(self) -> None:
        assert repr(Tables("sm90", [[table()]])) == "Tables('sm90': pack)"
        assert repr(Tables("sm90")) == "Tables('sm90': none)"


class TestLoading:
    def test_an_arch_without_tables_is_empty(self) -> None:
        tables = load_tables("sm999")
        assert (tables.arch, tables.files, tables.kernels()) == ("sm999", (), ())
        assert tables.exact("pack.a.k", KEY) is None

    def test_folders_lie_over_the_packaged_tables(self, tmp_path: Path) -> None:
        packaged = load_tables("sm100")
        kernel = next(name for name in packaged.kernels() if packaged.wildcard(name))
        theirs = packaged.wildcard(kernel)
        package = kernel.partition(".")[0]
        for folder, stages_ in (("first", 7), ("second", 8)):
            write_table(tmp_path / folder, table(entry(kernel=kernel, stages=stages_), arch="sm100", package=package))
        write_table(tmp_path / "second", table(entry(stages=9), arch="sm100"))
        tables = load_tables("sm100", [tmp_path / "first", str(tmp_path / "second")])
        assert stages(tables.wildcard(kernel)) == 7
        assert stages(tables.wildcard("pack.a.k")) == 9
        assert theirs is not None
        assert [file.path for file in tables.files[:3]] == [
            str(tmp_path / "first" / "sm100" / f"{package}.json"),
            str(tmp_path / "second" / "sm100" / f"{package}.json"),
            str(tmp_path / "second" / "sm100" / "pack.json"),
        ]
        found = tables.wildcard(kernel)
        assert found is not None
        assert found.origin == str(tmp_path / "first" / "sm100" / f"{package}.json")

    def test_a_folder_that_does_not_exist(self, tmp_path: Path) -> None:
        with pytest.raises(TableError, match=r"a folder laid out as FOLDER/<arch>/<package>.json, .* found nothing"):
            load_tables("sm90", [tmp_path / "none"])
        (tmp_path / "file").write_text("")
        with pytest.raises(TableError, match="found a file; correct table_path"):
            load_tables("sm90", [tmp_path / "file"])

    def test_a_folder_with_tables_of_other_archs_only(self, tmp_path: Path) -> None:
        write_table(tmp_path, table(entry(), arch="sm120"))
        assert load_tables("sm90", [tmp_path]).wildcard("pack.a.k") is None

    @pytest.mark.parametrize(
        "names", [[], ["pack.json"], ["sm90/readme.md"], ["sm90/.pack.json"], ["sm90/a/pack.json"]]
    )
    def test_a_folder_without_any_table(self, tmp_path: Path, names: list[str]) -> None:
        for name in names:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(encode(SAMPLE))
        with pytest.raises(TableError, match=r"tables at FOLDER/<arch>/<package>.json, such as .*, found no such file"):
            load_tables("sm90", [tmp_path])

    def test_only_json_files_that_are_not_hidden_are_tables(self, tmp_path: Path) -> None:
        path = write_table(tmp_path, table(entry()))
        for name in ("README.md", ".pack.json.1.ab.tmp", ".pack.json", "pack.json~", "pack.json.orig"):
            (path.parent / name).write_text("no table")
        assert stages(load_tables("sm90", [tmp_path]).wildcard("pack.a.k")) == 2

    @pytest.mark.parametrize("arch", ["sm90", "sm91"])
    def test_a_table_for_another_arch_in_this_folder(self, tmp_path: Path, arch: str) -> None:
        """The table of sm120 in the folder of sm121 is refused where it is in the way, and only there."""
        path = write_table(tmp_path, table(entry(), arch="sm91"))
        (tmp_path / "sm90").mkdir()
        path.rename(tmp_path / "sm90" / "pack.json")
        write_table(tmp_path, table(entry(), arch="sm91"))
        if arch == "sm91":
            assert load_tables(arch, [tmp_path]).wildcard("pack.a.k") is not None
        else:
            with pytest.raises(TableError, match=r'sm90/pack\.json: \$\.arch: expected "sm90"'):
                load_tables(arch, [tmp_path])

    @pytest.mark.parametrize("name", ["no-package.json", "a.b.json"])
    def test_a_file_named_after_nothing(self, tmp_path: Path, name: str) -> None:
        (tmp_path / "sm90").mkdir()
        (tmp_path / "sm90" / name).write_bytes(encode(SAMPLE))
        with pytest.raises(TableError, match="a file named after a top-level package"):
            load_tables("sm90", [tmp_path])

    def test_every_line_is_checked_at_once(self, tmp_path: Path) -> None:
        """Nothing is left for a launch to trip over, though entries are made into objects when first asked for."""
        rows = [entry(kernel=f"pack.a.k{number}") for number in range(50)]
        path = write_table(tmp_path, table(*rows))
        path.write_bytes(path.read_bytes().replace(b'k37", "key": "*"', b'k37", "key": "?"'))
        with pytest.raises(TableError) as caught:
            load_tables("sm90", [tmp_path])
        assert str(caught.value.where).endswith(".key")

    @pytest.mark.parametrize("arch", ["", "../sm90", "sm90/x", "sm 90", ".", "sm90\n"])
    def test_an_arch_that_is_no_name(self, arch: str) -> None:
        with pytest.raises(TableError, match="arch: expected a name such as sm90"):
            load_tables(arch)

    def test_one_folder_instead_of_a_sequence(self, tmp_path: Path) -> None:
        for wrong in (str(tmp_path), tmp_path):
            with pytest.raises(TableError, match="table_path: expected a sequence of folders"):
                load_tables("sm90", wrong)  # type: ignore[arg-type]


class TestFastLoading:
    """Canonical files are checked line by line and parsed kernel by kernel, as if by the strict reader."""

    def test_canonical_files_take_the_fast_path(self) -> None:
        data = table_bytes(parse_table(encode(SAMPLE)))
        loaded = _scan(data, "f", "sm90", "pack")
        assert loaded is not None
        assert loaded.table == parse_table(data)
        assert set(loaded.kernels) == {"pack.a.k", "pack.a.other"}

    def test_other_layouts_are_read_all_the_same(self) -> None:
        data = json.dumps(SAMPLE, indent=2).encode()
        assert _scan(data, "f", "sm90", "pack") is None
        assert load(data, "f", "sm90", "pack").table == parse_table(data)

    @pytest.mark.parametrize("name", ALL_FAULTS)
    def test_it_refuses_what_the_strict_reader_refuses(self, name: str) -> None:
        where, value, path, *_ = ALL_FAULTS[name]
        document = changed(*where, to=value)
        if not isinstance(document.get("entries"), list) or not isinstance(document.get("denied"), list):
            return
        # The same fault in canonical layout.
        head = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in document.items() if k not in ("entries", "denied")]
        rows = {part: ",\n".join(map(json.dumps, document[part])) for part in ("entries", "denied")}
        lists = f'"entries": [\n{rows["entries"]}\n],\n"denied": [\n{rows["denied"]}\n]'
        data = ("{\n" + ",\n".join(head) + ",\n" + lists + "\n}\n").encode()
        arch, package = "sm90", "pack"
        assert _scan(data, "f", arch, package) is None
        with pytest.raises(TableError) as caught:
            load(data, "f", arch, package)
        assert caught.value.where == path

    def test_duplicates_are_found_in_any_spelling(self) -> None:
        plain = keyed({"a": 1, "b": "x, y"}, {"p": "int8", "q": "int32"})
        data = table_bytes(table(plain)).decode()
        line = next(row for row in data.split("\n") if row.startswith('{"kernel"'))
        turned = line.replace('"a": 1, "b": "x, y"', '"b": "x, y", "a": 1').replace(
            '"p": "int8", "q": "int32"', '"q":"int32", "p":"int8"'
        )
        assert turned != line
        for second in (line, turned):
            twice = data.replace(line, f"{line},\n{second}").encode()
            with pytest.raises(TableError, match="the same as in"):
                load(twice, "f", "sm90", "pack")

    @pytest.mark.parametrize("members", [({}, {"p": "int8"}), ({"a": 1}, {}), ({}, {})])
    def test_duplicates_without_members_are_found_in_any_spelling(self, members: tuple[Any, Any]) -> None:
        data = table_bytes(table(keyed(*members))).decode()
        line = next(row for row in data.split("\n") if row.startswith('{"kernel"'))
        for second in (line, line.replace('"me"', '"m\\u0065"')):
            twice = data.replace(line, f"{line},\n{second}").encode()
            with pytest.raises(TableError, match="the same as in"):
                load(twice, "f", "sm90", "pack")

    def test_evidence_has_each_member_once(self) -> None:
        data = table_bytes(table(entry())).decode()
        for twice in ('"reported_by": "me", "reported_by": "me"', '"reported_by": "me", "zz": 1, "zz": 2'):
            with pytest.raises(TableError, match=r"once|twice|duplicate"):
                load(data.replace('"reported_by": "me"', twice).encode(), "f", "sm90", "pack")

    def test_bytes_that_are_no_text(self) -> None:
        data = table_bytes(table(entry())).replace(b'"me"', b'"m\xff"')
        with pytest.raises(TableError, match="expected UTF-8, found the byte 0xff"):
            load(data, "f", "sm90", "pack")

    def test_strings_with_commas_are_no_duplicates(self) -> None:
        rows = [keyed({"a": "1, 2", "b": "3"}), keyed({"a": "1", "b": '3", "c": "2'}), keyed({"a": "1", "b": "2, 3"})]
        data = table_bytes(table(*rows))
        assert len(load(data, "f", "sm90", "pack").table.entries) == 3

    def test_shipped_tables_take_the_fast_path(self) -> None:
        for path in (path for path in SHIPPED if read_table(path).entries):  # what only denies has nothing to defer
            assert _scan(path.read_bytes(), str(path), path.parent.name, path.stem) is not None, path


SHIPPED = sorted(bundled_folder().glob("*/*.json"))


class TestShippedFiles:
    @pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}-{path.stem}")
    def test_bytes_are_canonical_and_follow_the_schema(self, path: Path) -> None:
        data = path.read_bytes()
        assert table_bytes(read_table(path)) == data
        SCHEMA.validate(json.loads(data))

    def test_published_archs_are_there(self) -> None:
        assert {"sm100", "sm103"} <= {path.parent.name for path in SHIPPED}

    def test_the_schema_file_is_where_the_tables_are(self) -> None:
        assert bundled_folder() == ROOT / "tables"
        assert (bundled_folder() / "README.md").is_file()

    def test_the_published_tables_can_be_made_again(self, tmp_path: Path) -> None:
        script = ROOT / "bench" / "published_tables.py"
        subprocess.run(
            [sys.executable, script, "-o", tmp_path], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True
        )
        made = {path.relative_to(tmp_path): path.read_bytes() for path in tmp_path.glob("*/*.json")}
        assert made == {path.relative_to(bundled_folder()): path.read_bytes() for path in SHIPPED}

    def test_package_data_comes_before_a_neighbour(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        package = tmp_path / "tuning"
        package.mkdir()
        monkeypatch.setattr(tuning.tables, "__file__", str(package / "tables.py"))
        (tmp_path / "tables").mkdir()  # such as PyTables in site-packages
        (tmp_path / "tables" / "__init__.py").touch()
        with pytest.raises(TableError, match=r"expected the packaged tables with their schema\.json, found neither"):
            bundled_folder()
        (tmp_path / "tables" / "schema.json").touch()
        assert bundled_folder() == tmp_path / "tables"
        (package / "_tables").mkdir()
        (package / "_tables" / "schema.json").touch()
        assert bundled_folder() == package / "_tables"
