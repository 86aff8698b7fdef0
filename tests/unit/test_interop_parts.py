"""What all formats share: documents read with suspicion, values, what is known of kernels, the front door."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from recordings import environment, journal, record

from tuning import interop
from tuning.errors import TableError, TuningError
from tuning.interop import FORMATS, Loss, known_kernels
from tuning.interop._configs import config_to_json, read_config
from tuning.interop._documents import MAX_BYTES, MAX_DEPTH, MAX_VALUES, Node, find_files, parse, read_bytes, write_bytes
from tuning.interop._known import KnownKernels
from tuning.interop._result import Losses
from tuning.interop._values import Unportable, decode, decode_scalar, encode_foreign, str_of, value_of_str
from tuning.manifest import AutotunerUse, Launch, build_manifest
from tuning.spec import Key, LaunchConfig, encode_value
from tuning.tables import Entry, TableFile

# --- documents --------------------------------------------------------------------------------------------------------


def refused(data: bytes, **how: Any) -> str:
    with pytest.raises(TableError) as caught:
        parse(data, "f.json", **how)
    error = caught.value
    assert (error.file, bool(error.where), bool(error.expected), bool(error.found)) == ("f.json", True, True, True)
    assert "\n" not in str(error)
    return str(error)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "f.json: $: expected JSON, found Expecting value at line 1 column 1"),
        (b'{"a": [1, 2,]}', "f.json: $: expected JSON, found "),
        (b'{"a": 1}x', "f.json: $: expected JSON, found Extra data at line 1 column 9"),
        (b'\xff"a"', "f.json: $: expected UTF-8, found the byte 0xff at offset 0"),
        (b'{"a": {"b": 1, "b": 2}}', "f.json: $.a.b: expected each member once, found a second member of this name"),
        (b'{"a b": [0, NaN]}', 'f.json: $["a b"][1]: expected a JSON value, found NaN, which is not JSON'),
        (b"[Infinity]", "f.json: $[0]: expected a JSON value, found Infinity, which is not JSON"),
        (b"[1e999]", "f.json: $[0]: expected a number that a double can hold, found one that it cannot"),
        (b'["\\ud800"]', "f.json: $[0]: expected text, found half of a surrogate pair"),
        (b'{"\\ud800": 1}', 'f.json: $["\\ud800"]: expected text, found half of a surrogate pair'),
        (b"1" * 5000, "f.json: $: expected JSON with integers of reasonable length, found Exceeds the limit"),
        (b"[" * 100_000, "f.json: $: expected values nested at most 12 levels deep, found nesting too deep to parse"),
        (b"[" * 13 + b"]" * 13, f"f.json: ${'[0]' * MAX_DEPTH}: expected at most 12 levels of nesting, found more"),
        (b" " * (MAX_BYTES + 1), "f.json: $: expected at most 16777216 bytes, found more"),
        (b"[" + b"[]," * MAX_VALUES + b"1]", "f.json: $: expected at most 1048576 values, found more"),
    ],
)
def test_what_is_no_document(data: bytes, message: str) -> None:
    assert refused(data).startswith(message)


def test_infinity_is_a_number_where_python_wrote_the_file() -> None:
    assert parse(b"[Infinity, 1e999]", "f", infinite=True).value == [float("inf")] * 2
    for text in (b"[-Infinity]", b"[NaN]", b"[-1e999]"):
        refused(text, infinite=True)


def test_a_byte_order_mark_and_any_order_of_members_are_fine() -> None:
    assert parse(b'\xef\xbb\xbf{"b": 1, "a": null}', "f").value == {"b": 1, "a": None}


def test_a_hostile_document_takes_bounded_memory() -> None:
    # Small objects take the most memory for each value; a sixteenth of the largest file, so that tracing stays fast.
    count = MAX_VALUES // 16 // 2
    data = ("[" + ",".join(f'{{"a{at}":[]}}' for at in range(count)) + "]").encode()
    tracemalloc.start()
    try:
        parse(data, "f")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < (400 << 20) // 16


def test_members_and_items_know_their_places() -> None:
    node = parse(b'{"a b": [{"c": 1}], "d": 10000000000000000000}', "f").members("an object")
    inner = node["a b"].items("an array")[0].members("an object", ("c",))["c"]
    assert (inner.where, inner.place, inner.value) == ('$["a b"][0].c', 'f: $["a b"][0].c', 1)
    for read, message in (
        (lambda: node["d"].members("an object"), r"f: \$\.d: expected an object, found 10000000000000000000"),
        (lambda: node["d"].items("an array"), r"f: \$\.d: expected an array, found 10000000000000000000"),
        (lambda: node["d"].text("a name"), r"f: \$\.d: expected a name, found 10000000000000000000"),
        (
            lambda: node["d"].count("a small number", 0),
            r"f: \$\.d: expected a small number, found 10000000000000000000",
        ),
        (lambda: inner.count("2 or more", 2), r"c: expected 2 or more, found 1"),
        (lambda: node["a b"].members("an object"), r'f: \$\["a b"\]: expected an object, found an array'),
        (lambda: Node({}, "f").members("a row", ("x",)), r'f: \$: expected a row with the member "x", found no such'),
        (lambda: Node("", "f").text("a name"), r'expected a name, found the string ""'),
        (lambda: Node(True, "f").count("a number", 0), r"expected a number, found true"),
        (lambda: Node(1 << 300, "f").text("a name"), r"expected a name, found an integer of 301 bits"),
        (lambda: Node("x" * 100, "f").count("a number", 0), r'found the string "x{57}\.\.\."'),
        (lambda: Node({}, "f").items("an array"), "found an empty object"),
        (lambda: Node([], "f").members("an object"), "found an empty array"),
    ):
        with pytest.raises(TableError, match=message):
            read()


def test_only_regular_files_of_bounded_size_are_read(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with open(tmp_path / "large", "wb") as stream:
        stream.truncate(MAX_BYTES + 1)
    for name, found in (
        ("pipe", "something else"),
        (".", "a folder"),
        ("large", str(MAX_BYTES + 1)),
        ("missing", "No such file"),
        ("null\0", "embedded null"),
    ):
        with pytest.raises(TableError, match=found):
            read_bytes(os.path.join(tmp_path, name))


def test_files_of_paths(tmp_path: Path) -> None:
    for name in ("b.json", "a.json", ".hidden.json", "c.txt"):
        (tmp_path / name).write_text("{}")
    found = list(find_files([tmp_path, str(tmp_path / "c.txt")], "*.json", "files"))
    assert [os.path.basename(path) for path in found] == ["a.json", "b.json", "c.txt"]
    assert list(find_files(str(tmp_path / "c.txt"), "*.json", "files")) == [str(tmp_path / "c.txt")]
    with pytest.raises(TableError, match="expected at least one file, found none"):
        list(find_files([], "*.json", "file"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(TableError, match=r"expected a folder with files \(\*\.json\), found none in it"):
        list(find_files([tmp_path / "empty"], "*.json", "files"))


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = write_bytes(tmp_path / "new" / "f.json", b"old")
    assert write_bytes(path, b"new").read_bytes() == b"new"
    assert [found.name for found in path.parent.iterdir()] == ["f.json"]
    (tmp_path / "new" / "link.json").symlink_to("f.json")
    assert write_bytes(tmp_path / "new" / "link.json", b"linked").is_symlink()
    assert path.read_bytes() == b"linked"
    (tmp_path / "folder").mkdir()
    with pytest.raises(TableError, match="expected a place that can be written"):
        write_bytes(tmp_path / "folder", b"x")
    with pytest.raises(TableError, match="expected a place that can be written"):
        write_bytes(path / "below a file", b"x")
    assert sorted(found.name for found in tmp_path.iterdir()) == ["folder", "new"]


# --- values -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (128, "128"),
        (-3, "-3"),
        (True, "True"),
        (None, "None"),
        (1.0, "1.0"),
        (-0.0, "-0.0"),
        (1e-05, "1e-05"),
        (float("inf"), "inf"),
        ("abc", "abc"),
        ("", ""),
        ("a=b", "a=b"),
    ],
)
def test_values_that_survive_their_str(value: object, text: str) -> None:
    assert str_of(encode_value(value)) == text == str(value)
    assert value_of_str(text) == (encode_value(value), True)


@pytest.mark.parametrize(
    ("value", "text"),
    [("128", "128"), ("True", "True"), ("1.0", "1.0"), ((1, "a"), "(1, 'a')"), ([1.5], "[1.5]")],
)
def test_values_that_lose_their_type_in_their_str(value: object, text: str) -> None:
    assert str_of(encode_value(value)) == text == str(value)
    assert value_of_str(text)[0] != encode_value(value)


def test_texts_that_are_in_doubt() -> None:
    assert value_of_str("torch.bfloat16") == ('{"dtype":"bfloat16"}', True)
    assert str_of('{"dtype":"bfloat16"}') == "torch.bfloat16"
    for text in ("(1, 2)", "[]", "{}", "<object>"):
        assert value_of_str(text) == (json.dumps(text), False)
    for text in ("007", "+1", "1_000", " 1", "1" * 41, "1e5", "0x10", "infinity", "-0"):
        assert value_of_str(text) == (json.dumps(text), True)


@pytest.mark.parametrize("text", ['{"dtype":"bfloat16"}', '{"enum":"m.E.A"}', '{"float":"nan"}', '{"bytes":"00"}'])
def test_what_json_cannot_hold(text: str) -> None:
    with pytest.raises(Unportable):
        decode(text)


def test_what_json_can_hold() -> None:
    value = [1, True, None, "a", 1.5, [2, "b"]]
    text = encode_foreign(value)
    assert decode(text) == (1, True, None, "a", 1.5, (2, "b"))
    assert [type(item) for item in decode(text)] == [int, bool, type(None), str, float, tuple]
    assert encode_foreign({"a": [1]}) == encode_value({"a": (1,)})
    assert decode(encode_value([1])) == [1]
    with pytest.raises(Unportable, match="a sequence would come back as a list"):
        decode_scalar(text)
    with pytest.raises(Unportable, match="Python's text of a value of the kind 'enum' is not known"):
        str_of('{"enum":"m.E.A"}')


# --- configs ----------------------------------------------------------------------------------------------------------


def read(value: Any, **how: Any) -> tuple[LaunchConfig, tuple[Loss, ...]]:
    losses = Losses()
    return read_config(Node(value, "f"), losses, **how), losses.all()


def test_a_config_survives_both_ways() -> None:
    config = LaunchConfig.build(
        {"B": 64, "x": "a", "f": 0.5}, num_warps=8, num_stages=2, num_ctas=2, maxnreg=128, ir_override="k.ttir"
    )
    assert read(config_to_json(config)) == (config, ())
    assert read({"kwargs": {}, "num_warps": 4, "num_stages": 3})[0] == LaunchConfig.build({})


def test_members_that_are_not_read() -> None:
    base = {"kwargs": {}, "num_warps": 4, "num_stages": 3, "pre_hook": None, "waves": 2, "zero": 0, "none": None}
    config, losses = read(base)
    assert config == LaunchConfig.build({})
    assert [(loss.kind, loss.where) for loss in losses] == [
        ("unknown_member", "f: $.waves"),
        ("unknown_member", "f: $.zero"),
    ]
    assert read(base, extra=True) == (LaunchConfig.build({}, extra={"waves": 2}), ())
    assert [loss.kind for loss in read({**base, "pre_hook": "f"}, extra=True)[1]] == ["hook"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_warps": 3}, r"\$\.num_warps: expected a power of two up to 1024, or null, found 3"),
        ({"num_warps": True}, r"\$\.num_warps: expected a power of two"),
        ({"num_stages": -1}, r"\$\.num_stages: expected an integer of at least 0, or null, found -1"),
        ({"num_ctas": 0}, r"\$\.num_ctas: expected an integer of at least 1, or null, found 0"),
        ({"maxnreg": 1.5}, r"\$\.maxnreg: expected an integer of at least 1, or null, found 1\.5"),
        ({"ir_override": 1}, r"\$\.ir_override: expected a file name, or null, found 1"),
        ({"kwargs": {"a b": 1}}, r'\$\.kwargs\["a b"\]: expected the name of an argument, found another name'),
        ({"kwargs": []}, r"\$\.kwargs: expected an object of kernel parameters, found an empty array"),
    ],
)
def test_what_is_no_config(change: Any, message: str) -> None:
    with pytest.raises(TableError, match=message):
        read({"kwargs": {}, "num_warps": 4, "num_stages": 3, **change})


def test_configs_that_cannot_be_written() -> None:
    with pytest.raises(Unportable, match="the field waves has no place"):
        config_to_json(LaunchConfig.build({}, extra={"waves": 2}))
    with pytest.raises(Unportable, match="a sequence would come back as a list"):
        config_to_json(LaunchConfig.build({"B": (1, 2)}))


# --- what is known ----------------------------------------------------------------------------------------------------

KEY = Key.of({"n": 128}, {"x": "bfloat16", "y": "float32"}, ("y", "x"))
NAMED = Entry("pkg.a.k", KEY.values, KEY.dtypes, None, LaunchConfig.build({}), {"note": "n"})


def table(*entries: Entry) -> TableFile:
    return TableFile("sm90", "pkg", "", "", "", entries)


def manifest(*keys: Key, kernel: str = "pkg.a.k") -> Any:
    made = build_manifest(
        library="1",
        mode="pinned",
        policy={},
        environment=environment(),
        autotuners=[AutotunerUse("pkg.c.other", 2, ("m", "n"), "pinned")],
    )
    launches = tuple(Launch(kernel, key, LaunchConfig.build({}), "exact", None, "sm90") for key in keys)
    object.__setattr__(made, "choices", launches)
    return made


class Autotuner:
    class_name = "triton.runtime.autotuner.Autotuner"

    def __init__(self, kernel: str, *key_names: str, hooks: tuple[str, ...] = ()) -> None:
        self.kernel, self.key_names, self.hooks = kernel, key_names, hooks


def resolve(known: KnownKernels, name: str) -> tuple[str | None, tuple[Loss, ...]]:
    losses = Losses()
    return known.resolve(name, Node(None, "f"), losses), losses.all()


@pytest.mark.parametrize(
    "source",
    [
        {"k": "pkg.a.k"},
        {"k": ["pkg.a.k"]},
        table(NAMED),
        manifest(KEY),
        journal(record({64: 1.0}, kernel="pkg.a.k")),
        Autotuner("pkg.a.k"),
        [[Autotuner("pkg.a.k")], table(NAMED)],
        known_kernels({"k": "pkg.a.k"}),
    ],
)
def test_every_source_resolves_bare_names(source: object) -> None:
    assert resolve(known_kernels(source), "k") == ("pkg.a.k", ())
    assert known_kernels(source, None).qualified("k") == ("pkg.a.k",)


def test_qualified_names_need_no_source() -> None:
    assert resolve(known_kernels(), "any.where.k") == ("any.where.k", ())
    with pytest.raises(TableError, match=r"expected the name of a kernel, found the name '1\.k'"):
        resolve(known_kernels(), "1.k")


def test_a_bare_name_that_nothing_knows_is_a_loss() -> None:
    name, (loss,) = resolve(known_kernels({"other": "pkg.a.k"}), "k")
    assert name is None
    assert (loss.kind, loss.where) == ("unknown_kernel", "f: $")
    assert str(loss).startswith("f: $: no kernel named 'k' is known")
    assert loss.to_json() == {"kind": "unknown_kernel", "where": "f: $", "message": loss.message}


def test_an_ambiguous_bare_name_is_a_loss_that_names_the_candidates() -> None:
    known = known_kernels([Autotuner("pkg.b.k"), Autotuner("pkg.a.k")])
    name, (loss,) = resolve(known, "k")
    assert (name, loss.kind) == (None, "shared_name")
    assert "2 kernels are named 'k', so nothing of it is taken over: say which is meant" in loss.message
    assert loss.message.endswith("one of pkg.a.k, pkg.b.k")
    assert resolve(known_kernels(known, {"k": "pkg.b.k"}), "k") == ("pkg.b.k", ())
    name, (loss,) = resolve(known_kernels(known, {"k": ["y.k", "x.k"]}), "k")
    assert (name, loss.message.endswith("one of x.k, y.k")) == (None, True)


@pytest.mark.parametrize("source", ["k", 1, {"k": "bare"}, {"k": [1]}, {1: "a.k"}, [object()], {"k": "a b.k"}])
def test_what_says_nothing_about_kernels(source: object) -> None:
    with pytest.raises(TuningError, match="names: expected"):
        known_kernels(source)


def test_names_of_a_key_are_known_by_their_number() -> None:
    known = known_kernels(Autotuner("pkg.a.k", "n", "m"), table(NAMED), Autotuner("pkg.b.k", "n", "n"))
    assert known.key_names("pkg.a.k", 2) == ("n", "m")
    assert known.key_names("pkg.a.k", 1) == ("n",)
    assert known.key_names("pkg.a.k", 3) is None
    assert known.key_names("pkg.b.k", 2) is None
    assert known_kernels(known, Autotuner("pkg.a.k", "m", "n")).key_names("pkg.a.k", 2) is None
    assert known_kernels(manifest()).key_names("pkg.c.other", 2) == ("m", "n")


def test_tensors_are_named_by_the_same_key_or_by_the_only_known_call() -> None:
    values = (("n", "128"),)
    from_call = known_kernels(manifest(KEY))
    named = from_call.name_dtypes("pkg.a.k", values, ("float32", "bfloat16"))
    assert (named, named and named.call_order) == (KEY, ("y", "x"))
    other = from_call.name_dtypes("pkg.a.k", (("n", "64"),), ("int8", "int32"))
    assert other == Key((("n", "64"),), (("x", "int32"), ("y", "int8")))
    assert from_call.name_dtypes("pkg.a.k", values, ("int8",)) is None
    assert from_call.name_dtypes("pkg.b.k", values, ("float32", "bfloat16")) is None
    from_table = known_kernels(table(NAMED))
    assert from_table.name_dtypes("pkg.a.k", values, ("bfloat16", "float32")) == KEY
    # Tensors in another order, or other tensors? A table does not say.
    assert from_table.name_dtypes("pkg.a.k", values, ("float32", "bfloat16")) is None
    swapped = Key.of({"n": 128}, {"x": "bfloat16", "y": "float32"}, ("x", "y"))
    both = known_kernels(from_call, manifest(swapped))
    assert both.name_dtypes("pkg.a.k", values, ("bfloat16", "float32")) == KEY
    assert both.name_dtypes("pkg.a.k", (("n", "64"),), ("int8", "int32")) is None
    ambiguous = known_kernels(
        manifest(KEY, Key.of({"n": 128}, {"x": "float32", "y": "bfloat16"}, ("x", "y"))),
    )
    assert ambiguous.name_dtypes("pkg.a.k", values, ("float32", "bfloat16")) is None


def test_the_order_of_calls() -> None:
    known = known_kernels(manifest(KEY))
    assert known.call_sequences(NAMED) == (("float32", "bfloat16"),)
    assert known_kernels(table(NAMED)).call_sequences(NAMED) is None
    sequence = Entry("pkg.a.k", (), None, ("int8", "int32"), LaunchConfig.build({}), {})
    assert known_kernels().call_sequences(sequence) == (("int8", "int32"),)
    alike = Entry("pkg.a.k", (), (("x", "int8"), ("y", "int8")), None, LaunchConfig.build({}), {})
    assert known_kernels().call_sequences(alike) == (("int8", "int8"),)
    swapped = Key.of({"n": 1}, {"x": "int8", "y": "int32"}, ("x", "y"))
    both = known_kernels(known, manifest(swapped))
    assert both.call_sequences(NAMED) == (("bfloat16", "float32"), ("float32", "bfloat16"))


def test_a_journal_whose_names_no_table_can_hold_names_nothing() -> None:
    odd = Key((("a b", "1"),), (("x", "int8"), ("y z", "int32")), ("x", "y z"))
    known = known_kernels(journal(record({64: 1.0}, key=odd, kernel="pkg.a.k")))
    assert known.key_names("pkg.a.k", 1) is None
    assert known.name_dtypes("pkg.a.k", odd.values, ("int8", "int32")) is None


# --- the front door ---------------------------------------------------------------------------------------------------


def test_the_formats_are_what_they_say() -> None:
    assert sorted(FORMATS) == ["fla", "megatron", "megatron-ranks", "sglang-moe", "triton-cache", "vllm-moe"]
    assert all(name == each.name and each.summary for name, each in FORMATS.items())
    for each in FORMATS.values():
        if each.needs_arch:
            with pytest.raises(TableError, match="arch: expected the name of an arch, such as sm90, found none"):
                interop.read(each.name, ["nothing"])
        if not each.writes:
            with pytest.raises(TuningError, match=f"{each.name} can be read only; writable are megatron, "):
                interop.write(each.name, [table(NAMED)], "nowhere")
        elif not each.of_journals:
            with pytest.raises(TuningError, match=f"{each.name} is written from tables"):
                interop.write(each.name, [], "nowhere")


def test_what_does_not_fit_together_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TuningError, match=r"format: expected one of megatron, .*, found 'csv'"):
        interop.read("csv", [tmp_path])
    with pytest.raises(TuningError, match="found 'csv'"):
        interop.write("csv", [table(NAMED)], tmp_path)
    with pytest.raises(TuningError, match="written from journals: give journals, and no tables"):
        interop.write("megatron-ranks", [table(NAMED)], tmp_path, journals=[journal()])
    with pytest.raises(TuningError, match=r"mode: expected one of disabled, .*, found 'fast'"):
        interop.read("fla", [tmp_path], arch="sm90", mode="fast")  # type: ignore[arg-type]
    with pytest.raises(TableError, match=r"arch: .*found 'a/b'"):
        interop.read("fla", [tmp_path], arch="a/b")
    assert list(tmp_path.iterdir()) == []
