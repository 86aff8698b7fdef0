"""The value types: a typed, lossless encoding, and identity that is content and nothing else."""

from __future__ import annotations

import dataclasses
import decimal
import enum
import fractions
import functools
import inspect
import json
import os
import pickle
import subprocess
import sys
from collections import Counter, OrderedDict
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgpack
import pytest

from tuning.spec import (
    CONFIG_DEFAULTS,
    SOURCES,
    CandidateTiming,
    Choice,
    Environment,
    Kernel,
    Key,
    LaunchConfig,
    TuningRecord,
    canonical_json,
    dtype_name,
    encode_value,
    natural_order,
)


@dataclasses.dataclass
class Pair:
    one: object
    other: object


class Layout(str, enum.Enum):
    ROW = "row"
    COLUMN = "column"


class Level(enum.IntEnum):
    ONE = 1


class Point(NamedTuple):
    x: int
    y: int


class Name(str):
    pass


class Opaque:
    pass


def activation(x: float) -> float:
    return x


# What each value must look like in a table. Every pair of them must differ: many are equal, or print alike, in Python.
ENCODED: list[tuple[object, str]] = [
    (None, "null"),
    ("None", '"None"'),
    (True, "true"),
    ("True", '"True"'),
    (1, "1"),
    ("1", '"1"'),
    (1.0, '{"float":"1.0"}'),
    ("1.0", '"1.0"'),
    (0, "0"),
    (False, "false"),
    (0.0, '{"float":"0.0"}'),
    (-0.0, '{"float":"-0.0"}'),
    (0.1, '{"float":"0.1"}'),
    (1e22, '{"float":"1e+22"}'),
    (float("inf"), '{"float":"inf"}'),
    (float("nan"), '{"float":"nan"}'),
    (2**70, "1180591620717411303424"),
    (-1, "-1"),
    ("", '""'),
    ("é\n", '"\\u00e9\\n"'),
    (b"1", '{"bytes":"31"}'),
    ((), '{"tuple":[]}'),
    ([], '{"list":[]}'),
    ({}, '{"dict":[]}'),
    ((1, 2.0), '{"tuple":[1,{"float":"2.0"}]}'),
    ([1, 2.0], '{"list":[1,{"float":"2.0"}]}'),
    (((1,), 2), '{"tuple":[{"tuple":[1]},2]}'),
    ((1, (2,)), '{"tuple":[1,{"tuple":[2]}]}'),
    ({"b": 1, "a": None}, '{"dict":[["\\"a\\"",null],["\\"b\\"",1]]}'),
    ({1: "x"}, '{"dict":[["1","x"]]}'),
    ({"1": "x"}, '{"dict":[["\\"1\\"","x"]]}'),
    ({"float": "1.0"}, '{"dict":[["\\"float\\"","1.0"]]}'),
    (Layout.ROW, f'{{"enum":"{__name__}.Layout.ROW"}}'),
    (Layout.COLUMN, f'{{"enum":"{__name__}.Layout.COLUMN"}}'),
    ("row", '"row"'),
    (Level.ONE, f'{{"enum":"{__name__}.Level.ONE"}}'),
    (Name("1"), f'{{"subclass":["{__name__}.Name","1"]}}'),
    (Point(1, 2), f'{{"subclass":["{__name__}.Point",[1,2]]}}'),
    ((1, 2), '{"tuple":[1,2]}'),
    (int, '{"class":"builtins.int"}'),
    (activation, f'{{"function":"{__name__}.activation"}}'),
    (Opaque(), f'{{"opaque":"{__name__}.Opaque"}}'),
]


@pytest.mark.parametrize(("value", "text"), ENCODED, ids=[text for _, text in ENCODED])
def test_encoding(value: object, text: str) -> None:
    assert encode_value(value) == text


def test_no_two_of_these_values_share_a_text() -> None:
    counts = Counter(encode_value(value) for value, _ in ENCODED)
    assert [text for text, count in counts.items() if count > 1] == []


def test_library_scalars_and_dtypes_keep_their_type() -> None:
    np = pytest.importorskip("numpy")
    torch = pytest.importorskip("torch")
    values: dict[str, object] = {
        '{"dtype":"bfloat16"}': torch.bfloat16,
        '{"dtype":"float16"}': torch.float16,
        '{"dtype":"numpy.float16"}': np.dtype("float16"),
        '{"class":"numpy.float16"}': np.float16,
        '{"numpy":["float64",{"float":"1.0"}]}': np.float64(1.0),
        '{"numpy":["float32",{"float":"1.0"}]}': np.float32(1.0),
        '{"numpy":["int64",1]}': np.int64(1),
        '{"numpy":["bool",true]}': np.bool_(True),
        '{"tensor":"float32"}': torch.ones(2),
    }
    assert {encode_value(value): text for text, value in values.items()} == {text: text for text in values}


@pytest.mark.stub
def test_triton_values_keep_their_type() -> None:
    import triton.language as tl

    assert encode_value(tl.float32) == '{"dtype":"triton.fp32"}'
    assert encode_value(tl.constexpr(1)) == '{"constexpr":1}'
    assert encode_value(tl.constexpr(1.0)) == '{"constexpr":{"float":"1.0"}}'


def test_a_tensor_is_never_read() -> None:
    class Unreadable:
        dtype = "torch.float32"

        def __getattr__(self, name: str) -> object:
            raise AssertionError(f"{name} was read")

    assert encode_value(Unreadable()) == '{"tensor":"float32"}'


def test_texts_do_not_hold_addresses() -> None:
    assert encode_value(Opaque()) == encode_value(Opaque())
    assert "0x" not in encode_value([Opaque(), activation, object()])


def test_order_of_a_mapping_does_not_matter_but_order_of_a_list_does() -> None:
    assert encode_value({"a": 1, 2: "b"}) == encode_value({2: "b", "a": 1})
    assert encode_value([1, 2]) != encode_value([2, 1])
    assert encode_value(OrderedDict(a=1)) != encode_value({"a": 1})


def test_texts_do_not_depend_on_the_hash_seed() -> None:
    program = (
        "from tuning.spec import *;"
        "print(encode_value({c: {c} for c in 'abcdefgh'}), Key.of({c: c for c in 'abcdefgh'}).text,"
        " LaunchConfig.build({c: c for c in 'abcdefgh'}).text)"
    )
    outputs = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(outputs) == 1
    assert outputs.pop().strip()


def test_canonical_json_is_compact_sorted_ascii_and_refuses_nan() -> None:
    assert canonical_json({"b": [1, None], "a": "é"}) == '{"a":"\\u00e9","b":[1,null]}'
    with pytest.raises(ValueError, match="Out of range float values"):
        canonical_json(float("nan"))


def test_dtype_name_drops_only_the_library() -> None:
    torch = pytest.importorskip("torch")
    assert dtype_name(torch.float8_e4m3fn) == "float8_e4m3fn"
    assert dtype_name("torch.bfloat16") == dtype_name("bfloat16") == "bfloat16"


def test_natural_order_counts_integers() -> None:
    texts = [encode_value(value) for value in (128, 16, 64, "16", True, 8.0, -1)]
    ordered = sorted(texts, key=natural_order)
    assert ordered[:4] == ["-1", "16", "64", "128"]
    assert set(ordered[4:]) == {'"16"', "true", '{"float":"8.0"}'}
    assert len({natural_order(text) for text in texts}) == len(texts)


# --- Kernel -----------------------------------------------------------------------------------------------------------


def test_kernel_names_and_identity() -> None:
    kernel = Kernel("mamba_ssm.ops.triton.ssd_bmm._bmm_chunk_fwd_kernel", "abc")
    assert kernel.package == "mamba_ssm"
    assert kernel.bare_name == "_bmm_chunk_fwd_kernel"
    # The hash tells whether an entry is fresh; it does not make it another kernel.
    assert kernel == Kernel(kernel.qualified_name, "def")
    assert hash(kernel) == hash(Kernel(kernel.qualified_name))


# --- Key --------------------------------------------------------------------------------------------------------------


def test_key_values_of_every_kind_stay_apart() -> None:
    torch = pytest.importorskip("torch")
    values = [torch.bfloat16, "bfloat16", None, "None", True, 1, 1.0, "1", (1, 2), [1, 2], "(1, 2)", Layout.ROW, "row"]
    keys = [Key.of({"M": value}) for value in values]
    assert len(set(keys)) == len({key.text for key in keys}) == len(values)


def test_a_name_and_its_value_cannot_run_together() -> None:
    assert Key.of({"a": "b=1"}).text != Key.of({"a=b": "1"}).text
    assert Key.of({"a": "x|b=y"}).text != Key.of({"a": "x", "b": "y"}).text
    assert Key.of({"x": "float32"}).text != Key.of({}, {"x": "float32"}).text


def test_key_keeps_the_declared_order_and_compares_by_text_without_it() -> None:
    key = Key.of({"N": 1, "M": 2}, {"y": "float32", "x": "bfloat16"})
    other = Key.of({"M": 2, "N": 1}, {"x": "bfloat16", "y": "float32"})
    assert [name for name, _ in key.values] == ["N", "M"]
    assert key.dtype_sequence == ("float32", "bfloat16")
    assert key.text == other.text
    assert key.values_text == other.values_text
    assert key.values_text == Key.of({"N": 1, "M": 2}).values_text != Key.of({"N": 2, "M": 1}).values_text


def test_keyword_order_of_a_call_is_no_part_of_identity() -> None:
    dtypes = {"x": "bfloat16", "y": "float32"}
    one = Key.of({"M": 1}, dtypes, call_order=("x", "y"))
    two = Key.of({"M": 1}, dtypes, call_order=("y", "x"))
    assert one == two
    assert hash(one) == hash(two)
    assert one.text == two.text
    assert (one.call_dtype_sequence, two.call_dtype_sequence) == (("bfloat16", "float32"), ("float32", "bfloat16"))
    assert Key.of({"M": 1}, dtypes).call_dtype_sequence == one.dtype_sequence == ("bfloat16", "float32")


def test_a_key_takes_dtypes_or_their_names() -> None:
    torch = pytest.importorskip("torch")
    assert Key.of({}, {"x": torch.bfloat16}) == Key.of({}, {"x": "bfloat16"})


def test_key_survives_json_messagepack_and_pickle() -> None:
    # MessagePack ends at 64 bits: a longer integer can travel there only inside a text.
    values = {f"a{i}": value for i, (value, _) in enumerate(ENCODED) if value != 2**70}
    key = Key.of({"z": 1, **values}, {"y": "float32", "x": "bfloat16"}, call_order=("x", "y"))
    assert key.text  # cached values must not get in the way
    for back in (
        Key.from_json(json.loads(canonical_json(key.to_json()))),
        Key.from_json(msgpack.unpackb(msgpack.packb(key.to_json()))),
        pickle.loads(pickle.dumps(key)),
    ):
        assert back == key
        assert back.call_order == key.call_order
        assert back.text == key.text
    assert "call_order" not in Key.of({"M": 1}).to_json()


def test_key_reads_well() -> None:
    key = Key.of({"M": 1, "CAUSAL": True, "name": "a b"}, {"x": "bfloat16"})
    assert str(key) == 'M=1 CAUSAL=true name="a b" x:bfloat16'
    assert str(Key.of({})) == "(empty key)"


# --- LaunchConfig -----------------------------------------------------------------------------------------------------

BASE: dict[str, Any] = {"num_warps": 4, "num_stages": 3}
# Two configs that differ in one of these alone are two kernels.
DIFFERENCES: dict[str, LaunchConfig] = {
    "none": LaunchConfig.build({"BLOCK": 64}, **BASE),
    "kwargs value": LaunchConfig.build({"BLOCK": 32}, **BASE),
    "kwargs type": LaunchConfig.build({"BLOCK": 64.0}, **BASE),
    "kwargs name": LaunchConfig.build({"BLOCK_M": 64}, **BASE),
    "vendor parameter": LaunchConfig.build({"BLOCK": 64, "waves_per_eu": 2}, **BASE),
    "num_warps": LaunchConfig.build({"BLOCK": 64}, num_warps=8, num_stages=3),
    "num_stages": LaunchConfig.build({"BLOCK": 64}, num_warps=4, num_stages=2),
    "num_ctas": LaunchConfig.build({"BLOCK": 64}, num_ctas=2, **BASE),
    "maxnreg": LaunchConfig.build({"BLOCK": 64}, maxnreg=128, **BASE),
    "other maxnreg": LaunchConfig.build({"BLOCK": 64}, maxnreg=255, **BASE),
    "ir_override": LaunchConfig.build({"BLOCK": 64}, ir_override="a.ttgir", **BASE),
    "other ir_override": LaunchConfig.build({"BLOCK": 64}, ir_override="b.ttgir", **BASE),
    "vendor field": LaunchConfig.build({"BLOCK": 64}, extra={"num_consumer_groups": 2}, **BASE),
    "other vendor field": LaunchConfig.build({"BLOCK": 64}, extra={"num_consumer_groups": 1}, **BASE),
}


@pytest.mark.parametrize("view", ["text", "order", "__str__", "to_json", "__hash__"])
def test_configs_that_differ_in_one_field_differ_in_every_view(view: str) -> None:
    seen: dict[str, str] = {}
    for name, config in DIFFERENCES.items():
        shown = getattr(config, view)
        text = repr(shown() if callable(shown) else shown)
        assert text not in seen, f"{name} looks like {seen[text]}: {text}"
        seen[text] = name


def test_order_of_keyword_arguments_is_no_part_of_identity() -> None:
    one = LaunchConfig.build({"A": 1, "B": 2}, extra={"x": 1, "y": 2})
    two = LaunchConfig.build({"B": 2, "A": 1}, extra={"y": 2, "x": 1})
    assert one == two
    assert one.text == two.text


@pytest.mark.parametrize("name", DIFFERENCES)
def test_config_survives_json_messagepack_and_pickle(name: str) -> None:
    config = DIFFERENCES[name]
    assert config.text
    data = config.to_json()
    for back in (
        LaunchConfig.from_json(json.loads(canonical_json(data))),
        LaunchConfig.from_json(msgpack.unpackb(msgpack.packb(data))),
        pickle.loads(pickle.dumps(config)),
    ):
        assert back == config
        assert back.text == config.text


def test_defaults_are_left_out_of_a_file_and_read_back() -> None:
    assert DIFFERENCES["none"].to_json() == {"kwargs": {"BLOCK": 64}, "num_warps": 4, "num_stages": 3}
    assert LaunchConfig.from_json({"kwargs": {}, "num_warps": 1, "num_stages": 1}) == LaunchConfig.build(
        {}, num_warps=1, num_stages=1, **CONFIG_DEFAULTS
    )


def test_canonical_order_counts_numbers() -> None:
    configs = [LaunchConfig.build({"BLOCK": size}) for size in (128, 16, 1024, 32)]
    ordered = sorted(configs, key=lambda config: config.order)
    assert [json.loads(config.kwargs[0][1]) for config in ordered] == [16, 32, 128, 1024]


def test_canonical_order_is_defined_between_any_two_configs() -> None:
    configs = [*DIFFERENCES.values(), *(LaunchConfig.build({"P": value}) for value, _ in ENCODED)]
    backwards = configs[::-1]
    for listing in (configs, backwards):
        listing.sort(key=lambda config: config.order)
    assert configs == backwards


# --- live configs of the running Triton, whichever it is --------------------------------------------------------------


def accepted(**fields: Any) -> dict[str, Any]:
    """Those of ``fields`` that this Triton's ``Config`` knows."""
    import triton

    return {name: fields[name] for name in fields if name in inspect.signature(triton.Config).parameters}


@pytest.mark.stub
def test_a_live_config_reads_as_its_plain_data() -> None:
    import triton

    config = triton.Config({"BLOCK": 64, "EVEN": True}, num_warps=8, num_stages=4, num_ctas=2, maxnreg=128)
    assert LaunchConfig.of(config) == LaunchConfig.build(
        {"EVEN": True, "BLOCK": 64}, num_warps=8, num_stages=4, num_ctas=2, maxnreg=128
    )


@pytest.mark.stub
def test_a_live_config_at_its_defaults_is_the_same_on_every_version() -> None:
    import triton

    # num_stages is given: its default is 2 in Triton 3.2 and 3 later. Fields that only some versions have are neutral.
    read = LaunchConfig.of(triton.Config({"BLOCK": 64}, num_stages=3))
    assert read.text == '{"kwargs":{"BLOCK":64},"num_stages":3,"num_warps":4}'
    # What the interpreter needs on 3.2: the warp-specialisation fields set to None.
    neutral = dict.fromkeys(
        accepted(num_buffers_warp_spec=0, num_consumer_groups=0, reg_dec_producer=0, reg_inc_consumer=0)
    )
    assert LaunchConfig.of(triton.Config({"BLOCK": 64}, num_stages=3, **neutral)) == read


@pytest.mark.stub
def test_every_field_of_a_live_config_counts_except_its_hook() -> None:
    import triton

    def hook(arguments: object) -> None: ...

    values: dict[str, Any] = {
        "kwargs": {"BLOCK": 128},
        "num_warps": 2,
        "num_stages": 5,
        "num_ctas": 2,
        "maxnreg": 64,
        "ir_override": "k.ttgir",
        "pre_hook": hook,
        "num_buffers_warp_spec": 3,
        "num_consumer_groups": 1,
        "reg_dec_producer": 24,
        "reg_inc_consumer": 240,
    }
    fields = list(inspect.signature(triton.Config).parameters)
    assert set(fields) <= set(values), "this Triton's Config has a field that nobody looked at"
    plain = LaunchConfig.of(triton.Config({"BLOCK": 64}))
    read = {name: LaunchConfig.of(triton.Config(**{"kwargs": {"BLOCK": 64}, name: values[name]})) for name in fields}
    assert read.pop("pre_hook") == plain
    assert len({plain.text, *(config.text for config in read.values())}) == len(read) + 1


def test_any_object_with_the_attributes_of_a_config_will_do() -> None:
    candidate = SimpleNamespace(kwargs={"BLOCK": 64}, num_warps=8, num_stages=2)
    assert LaunchConfig.of(candidate) == LaunchConfig.build({"BLOCK": 64}, num_warps=8, num_stages=2)


@pytest.mark.parametrize(("value", "kept"), [(None, False), (0, False), (False, True), (0.0, True), (1, True)])
def test_only_none_and_the_integer_zero_are_neutral(value: object, kept: bool) -> None:
    candidate = SimpleNamespace(kwargs={}, num_warps=4, num_stages=3, vendor=value, _private=7)
    assert LaunchConfig.of(candidate).extra == ((("vendor", encode_value(value)),) if kept else ())


# --- Choice and the records -------------------------------------------------------------------------------------------


def choice(**changes: Any) -> Choice:
    config = SimpleNamespace(kwargs={"BLOCK": 64}, num_warps=4, num_stages=3)
    fields: dict[str, Any] = {
        "kernel": "a.b.k",
        "key": Key.of({"M": 1}),
        "config": config,
        "source": "exact",
        "origin": "tables/sm90/a.json",
        "arch": "sm90",
        "detail": "",
    }
    return Choice(**{**fields, **changes})


def test_choices_compare_by_content_not_by_the_identity_of_the_config() -> None:
    assert choice() == choice()
    assert hash(choice()) == hash(choice())
    assert choice().launch_config == LaunchConfig.build({"BLOCK": 64}, num_warps=4, num_stages=3)


@pytest.mark.parametrize(
    "change",
    [
        {"kernel": "a.b.other"},
        {"key": Key.of({"M": True})},
        {"config": SimpleNamespace(kwargs={"BLOCK": 64}, num_warps=8, num_stages=3)},
        {"source": "wildcard"},
        {"origin": None},
        {"arch": "sm100"},
        {"detail": "after a fallback"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_choices_that_differ_in_one_field_differ(change: dict[str, Any]) -> None:
    assert choice(**change) != choice()
    assert canonical_json(choice(**change).to_json()) != canonical_json(choice().to_json())


@pytest.mark.parametrize(
    ("detail", "expected"),
    [
        ("", False),
        ("resumed from a checkpoint", False),
        ("resumed from a checkpoint; footprint 48", False),
        ("in place of BLOCK=32, which failed", True),
        ("resumed from a checkpoint; in place of BLOCK=32, which failed", True),
        ("resumed from a checkpoint; resumed from a checkpoint; in place of BLOCK=32, which failed", True),
        ("nearest entry, in place of none", False),
    ],
)
def test_a_fallback_is_one_after_a_checkpoint_too(detail: str, expected: bool) -> None:
    assert choice(detail=detail).is_fallback is expected


def test_a_choice_is_not_equal_to_something_else() -> None:
    assert choice() != "exact"


def test_a_choice_as_json_holds_every_field() -> None:
    data = choice().to_json()
    assert set(data) == {field.name for field in dataclasses.fields(Choice)}
    assert json.loads(canonical_json(data)) == data
    assert Key.from_json(data["key"]) == choice().key
    assert LaunchConfig.from_json(data["config"]) == choice().launch_config


def test_sources_are_the_rules_in_words() -> None:
    assert SOURCES == ("exact", "block_sizes", "wildcard", "nearest", "model", "cheapest", "chaos", "timed")


def test_records_are_values() -> None:
    record = TuningRecord(
        kernel=Kernel("a.b.k"),
        key=Key.of({"M": 1}),
        arch="sm90",
        timings=(
            CandidateTiming(DIFFERENCES["none"], (0.5, 0.4, 0.6)),
            CandidateTiming(DIFFERENCES["num_warps"], None, "out of resource"),
        ),
        winner=DIFFERENCES["none"],
    )
    assert pickle.loads(pickle.dumps(record)) == record
    assert hash(record) == hash(dataclasses.replace(record))
    assert dataclasses.replace(record, shared=True) != record
    environment = Environment("sm90", rank=3, world_size=8)
    assert pickle.loads(pickle.dumps(environment)) == environment


@pytest.mark.parametrize("cls", [Kernel, Key, LaunchConfig, Choice, Environment, CandidateTiming, TuningRecord])
def test_value_types_cannot_be_changed(cls: type) -> None:
    assert cls.__dataclass_params__.frozen  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "values",
    [
        (1j, 2j, -0j),
        (frozenset({1}), frozenset({2}), {1}),
        (range(3), range(4), range(0, 3, 2)),
        (functools.partial(max, 1), functools.partial(max, 2), functools.partial(min, 1)),
        (10**5000, 10**5000 + 1, -(10**5000)),
        (lambda: 1,
         lambda: 2),
        (Pair(1, 2), Pair(1, 3), Pair(True, 2)),
        (decimal.Decimal("1.0"), decimal.Decimal("1.00"), fractions.Fraction(1)),
    ],
    ids=["complex", "sets", "range", "partial", "huge", "lambda", "dataclass", "decimal"],
)  # fmt: skip
def test_values_of_ordinary_types_are_told_apart(values: tuple[object, ...]) -> None:
    texts = [encode_value(value) for value in values]
    assert len(set(texts)) == len(values)
    assert not any("opaque" in text for text in texts)


def test_the_order_of_a_set_does_not_matter() -> None:
    assert encode_value(frozenset(["b", "a", "c"])) == encode_value(frozenset(["c", "b", "a"]))


def test_a_numpy_value_that_python_has_no_type_for_is_encoded() -> None:
    numpy = pytest.importorskip("numpy")
    assert encode_value(numpy.longdouble(1)) != encode_value(numpy.longdouble(2))


def test_a_numpy_object_that_is_no_value_does_not_put_its_address_into_a_key() -> None:
    numpy = pytest.importorskip("numpy")
    assert encode_value(numpy.random.default_rng(0)) == encode_value(numpy.random.default_rng(1))
    assert encode_value(numpy.dtype("float32")) == '{"dtype":"numpy.float32"}'
