"""The policy: defaults, normal form, every refusal with its whole message, and what the methods answer."""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import itertools
import pathlib
import pickle
from typing import Literal, get_type_hints

import pytest

import tuning.policy
from tuning.errors import PolicyError, TuningError
from tuning.policy import UNAVAILABLE, AutotunePolicy, policy_fields

PERMUTATION = "transformer_engine.common.triton.permutation"


def refusal(**fields: object) -> PolicyError:
    with pytest.raises(PolicyError) as caught:
        AutotunePolicy(**fields)
    return caught.value


def test_the_default_policy():
    policy = AutotunePolicy()
    assert dataclasses.asdict(policy) == {
        "mode": None,
        "modules": ("mamba_ssm", "transformer_engine", "megatron.core"),
        "config_invariant": (
            f"{PERMUTATION}._permute_kernel",
            f"{PERMUTATION}._sort_chunks_by_map_kernel",
            f"{PERMUTATION}._unpermute_kernel",
        ),
        "table_path": (),
        "record_path": None,
        "remeasure": False,
        "check_outputs": False,
        "on_miss": "cheapest",
        "block_sizes": (),
        "verify_every": 0,
        "verify_strict": False,
        "enumerate_autotuners": False,
        "manifest_path": None,
        "within_class": "pinned",
        "chaos": False,
    }


def test_a_policy_is_frozen_and_takes_keywords_only():
    with pytest.raises(dataclasses.FrozenInstanceError):
        AutotunePolicy().mode = "pinned"
    with pytest.raises(TypeError, match="positional"):
        AutotunePolicy("pinned")
    with pytest.raises(TypeError, match="verify_evry"):
        AutotunePolicy(verify_evry=1)


class Flavour(str, enum.Enum):
    PINNED = "pinned"
    MODULE = "fla.ops"


class Size(enum.IntEnum):
    LARGE = 128


@pytest.mark.parametrize(
    ("name", "given", "held"),
    [
        ("mode", None, None),
        ("mode", "auto", "auto"),
        ("mode", Flavour.PINNED, "pinned"),
        ("modules", ["fla", "a.b"], ("fla", "a.b")),
        ("modules", (), ()),
        ("modules", [Flavour.MODULE], ("fla.ops",)),
        ("config_invariant", [], ()),
        ("config_invariant", ["m.f.<locals>.kernel", "m.C.k"], ("m.f.<locals>.kernel", "m.C.k")),
        ("table_path", [pathlib.PurePosixPath("a/b"), "c d", "-x"], ("a/b", "c d", "-x")),
        ("table_path", ["--"], ("./--",)),
        ("record_path", pathlib.PurePosixPath("runs/a"), "runs/a"),
        ("record_path", "--", "./--"),
        ("manifest_path", "m.json", "m.json"),
        ("on_miss", "error", "error"),
        ("block_sizes", {"Z": 2, "A": 1}, (("A", 1), ("Z", 2))),
        ("block_sizes", [("Z", 2), ["A", 1]], (("A", 1), ("Z", 2))),
        ("block_sizes", ["Z=2", "A=001"], (("A", 1), ("Z", 2))),
        ("block_sizes", {"A": Size.LARGE}, (("A", 128),)),
        ("block_sizes", {"A": 2**63 - 1}, (("A", 2**63 - 1),)),
        ("block_sizes", {}, ()),
        ("verify_every", Size.LARGE, 128),
        ("verify_strict", True, True),
        ("enumerate_autotuners", True, True),
        ("within_class", "pinned", "pinned"),
    ],
)
def test_normal_form(name, given, held):
    value = getattr(AutotunePolicy(**{name: given}), name)
    assert value == held
    assert type(value) is type(held)
    assert repr(value) == repr(held)  # also the types of the items: a str enum equals its value and prints otherwise


def test_policies_that_mean_the_same_are_equal():
    first = AutotunePolicy(block_sizes={"B": 2, "A": 1}, table_path=["x"])
    second = AutotunePolicy(block_sizes=(("A", 1), ("B", 2)), table_path=(pathlib.PurePosixPath("x"),))
    assert first == second
    assert hash(first) == hash(second)
    assert repr(first) == repr(second)


def test_replace_and_pickle_keep_a_policy():
    policy = AutotunePolicy(mode="pinned", block_sizes={"B": 2}, chaos=True)
    assert dataclasses.replace(policy) == policy
    assert dataclasses.replace(policy, chaos=False) == AutotunePolicy(mode="pinned", block_sizes={"B": 2})
    assert pickle.loads(pickle.dumps(policy)) == policy


COUNT = "an integer from 0 to 2**63 - 1"
SWITCH = "true or false"
MODULE = "a dotted module name such as 'megatron.core'"
KERNEL = "a qualified name, module and function, such as 'package.module.kernel'"
PATH = "a path (str or os.PathLike)"
FILLED = "a path that is not empty and holds no NUL"
LIST = "put it in a list, even if it is the only one"
PAIR = "a NAME=VALUE pair such as BLOCK_SIZE_M=64"
NAME = "the name of a kernel parameter, such as 'BLOCK_SIZE_M'"
SIZE = "an integer from 1 to 2**63 - 1 for 'A'"
MODE = "'auto', 'pinned', 'record' or None (unset)"
LONG = "x" * 500


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("mode", "fast", f"mode: expected {MODE}, got 'fast'"),
        ("mode", "", f"mode: expected {MODE}, got ''"),
        ("mode", "Pinned", f"mode: expected {MODE}, got 'Pinned'"),
        ("mode", True, f"mode: expected {MODE}, got True"),
        ("mode", ["auto"], f"mode: expected {MODE}, got ['auto']"),
        ("on_miss", None, "on_miss: expected 'cheapest', 'nearest', 'model' or 'error', got None"),
        ("on_miss", "best", "on_miss: expected 'cheapest', 'nearest', 'model' or 'error', got 'best'"),
        ("within_class", "free", "within_class: expected 'pinned' or 'timed', got 'free'"),
        ("modules", "mamba_ssm", f"modules: expected a list of module names, got 'mamba_ssm'; {LIST}"),
        ("modules", None, "modules: expected a list of module names, got None"),
        ("modules", b"a", "modules: expected a list of module names, got b'a'"),
        ("modules", {"a"}, "modules: expected a list of module names, got {'a'}"),
        ("modules", {"a": 1}, "modules: expected a list of module names, got {'a': 1}"),
        ("modules", ["fla", "mamba ssm"], f"modules[1]: expected {MODULE}, got 'mamba ssm'"),
        ("modules", ["fla."], f"modules[0]: expected {MODULE}, got 'fla.'"),
        ("modules", ["a..b"], f"modules[0]: expected {MODULE}, got 'a..b'"),
        ("modules", ["a-b"], f"modules[0]: expected {MODULE}, got 'a-b'"),
        ("modules", [""], f"modules[0]: expected {MODULE}, got ''"),
        ("modules", ["f.<locals>.g"], f"modules[0]: expected {MODULE}, got 'f.<locals>.g'"),
        ("modules", [None], f"modules[0]: expected {MODULE}, got None"),
        ("config_invariant", "a.b", f"config_invariant: expected a list of qualified kernel names, got 'a.b'; {LIST}"),
        ("config_invariant", 1, "config_invariant: expected a list of qualified kernel names, got 1"),
        ("config_invariant", ["_permute_kernel"], f"config_invariant[0]: expected {KERNEL}, got '_permute_kernel'"),
        ("config_invariant", ["m.k", "m.<locals>"], f"config_invariant[1]: expected {KERNEL}, got 'm.<locals>'"),
        ("config_invariant", ["<locals>.k"], f"config_invariant[0]: expected {KERNEL}, got '<locals>.k'"),
        ("config_invariant", ["m.k "], f"config_invariant[0]: expected {KERNEL}, got 'm.k '"),
        ("config_invariant", [7], f"config_invariant[0]: expected {KERNEL}, got 7"),
        ("table_path", "tables", f"table_path: expected a list of folders, got 'tables'; {LIST}"),
        (
            "table_path",
            pathlib.PurePosixPath("t"),
            f"table_path: expected a list of folders, got PurePosixPath('t'); {LIST}",
        ),
        ("table_path", None, "table_path: expected a list of folders, got None"),
        ("table_path", ["a", 3], f"table_path[1]: expected {PATH}, got 3"),
        ("table_path", [b"a"], f"table_path[0]: expected {PATH}, got b'a'"),
        ("table_path", [""], f"table_path[0]: expected {FILLED}, got ''"),
        ("table_path", ["a\0b"], f"table_path[0]: expected {FILLED}, got 'a\\x00b'"),
        ("record_path", 3, f"record_path: expected {PATH}, or None, got 3"),
        ("record_path", "", f"record_path: expected {FILLED}, or None, got ''"),
        ("manifest_path", False, f"manifest_path: expected {PATH}, or None, got False"),
        ("manifest_path", "\0", f"manifest_path: expected {FILLED}, or None, got '\\x00'"),
        ("block_sizes", "A=1", f"block_sizes: expected a list of NAME=VALUE pairs, or a mapping, got 'A=1'; {LIST}"),
        ("block_sizes", 64, "block_sizes: expected a list of NAME=VALUE pairs, or a mapping, got 64"),
        ("block_sizes", None, "block_sizes: expected a list of NAME=VALUE pairs, or a mapping, got None"),
        ("block_sizes", ["AB"], f"block_sizes[0]: expected {PAIR}, got 'AB'"),
        ("block_sizes", [("A",)], f"block_sizes[0]: expected {PAIR}, got ('A',)"),
        ("block_sizes", [64], f"block_sizes[0]: expected {PAIR}, got 64"),
        ("block_sizes", [(1, 2)], f"block_sizes[0]: expected {NAME}, got 1"),
        ("block_sizes", ["=64"], f"block_sizes[0]: expected {NAME}, got ''"),
        ("block_sizes", {"A B": 1}, f"block_sizes: expected {NAME}, got 'A B'"),
        ("block_sizes", [("A", 1), ("A", 1)], "block_sizes[1]: expected one value for 'A', got [1, 1]; keep one"),
        ("block_sizes", ["A=1", "A=2"], "block_sizes[1]: expected one value for 'A', got [1, 2]; keep one"),
        ("block_sizes", {"A": "64"}, f"block_sizes: expected {SIZE}, got '64'"),
        ("block_sizes", {"A": 64.0}, f"block_sizes: expected {SIZE}, got 64.0"),
        ("block_sizes", {"A": True}, f"block_sizes: expected {SIZE}, got True"),
        ("block_sizes", {"A": None}, f"block_sizes: expected {SIZE}, got None"),
        ("block_sizes", {"A": 0}, f"block_sizes: expected {SIZE}, got 0"),
        ("block_sizes", {"A": 2**63}, f"block_sizes: expected {SIZE}, got 9223372036854775808"),
        ("block_sizes", ["A=-1"], f"block_sizes[0]: expected {SIZE}, got -1"),
        ("block_sizes", ["A=1_0"], f"block_sizes[0]: expected {SIZE}, got '1_0'"),
        ("block_sizes", ["A="], f"block_sizes[0]: expected {SIZE}, got ''"),
        ("block_sizes", ["A=" + "9" * 31], f"block_sizes[0]: expected {SIZE}, got '{'9' * 31}'"),
        ("verify_every", -1, f"verify_every: expected {COUNT}, got -1"),
        ("verify_every", True, f"verify_every: expected {COUNT}, got True"),
        ("verify_every", 1.0, f"verify_every: expected {COUNT}, got 1.0"),
        ("verify_every", "10", f"verify_every: expected {COUNT}, got '10'"),
        ("verify_every", None, f"verify_every: expected {COUNT}, got None"),
        ("verify_every", 2**63, f"verify_every: expected {COUNT}, got 9223372036854775808"),
        ("verify_strict", "true", f"verify_strict: expected {SWITCH}, got 'true'; write it without quotes"),
        ("verify_strict", 1, f"verify_strict: expected {SWITCH}, got 1"),
        ("enumerate_autotuners", None, f"enumerate_autotuners: expected {SWITCH}, got None"),
        ("enumerate_autotuners", LONG, f"enumerate_autotuners: expected {SWITCH}, got '{'x' * 116}..."),
        ("chaos", "No", f"chaos: expected {SWITCH}, got 'No'; write it without quotes"),
    ],
)
def test_each_refusal_with_its_whole_message(name, value, message):
    error = refusal(**{name: value})
    assert str(error) == message
    assert error.field == name
    assert error.expected in message
    assert isinstance(error, ValueError)
    assert isinstance(error, TuningError)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.field, again.value, again.expected) == (message, name, error.value, error.expected)


class Ugly:
    def __repr__(self) -> str:
        return "two\nlines"


def test_a_message_is_one_line_whatever_the_value():
    assert str(refusal(verify_every=Ugly())) == f"verify_every: expected {COUNT}, got two lines"
    # Python refuses to print an integer of this many digits.
    assert str(refusal(verify_every=10**5000)) == f"verify_every: expected {COUNT}, got <int that cannot be printed>"


@pytest.mark.parametrize(
    ("fields", "name", "message"),
    [
        (
            {"mode": "record"},
            "record_path",
            "record_path: expected a journal prefix, since mode is 'record', got None; "
            "give one, such as 'journals/run'",
        ),
        (
            {"mode": "pinned", "record_path": "j"},
            "record_path",
            "record_path: expected None, since mode is 'pinned', which records nothing, got 'j'; "
            "drop it, or set mode to 'record'",
        ),
        (
            {"mode": "auto", "record_path": "j"},
            "record_path",
            "record_path: expected None, since mode is 'auto', which records nothing, got 'j'; "
            "drop it, or set mode to 'record'",
        ),
        (
            {"chaos": True},
            "chaos",
            "chaos: expected False, since mode is None and only pinned choices can be made to differ, got True; "
            "set mode to 'pinned', or drop chaos",
        ),
        (
            {"chaos": True, "mode": "record", "record_path": "j"},
            "chaos",
            "chaos: expected False, since mode is 'record' and only pinned choices can be made to differ, got True; "
            "set mode to 'pinned', or drop chaos",
        ),
    ],
)
def test_fields_that_contradict_each_other(fields, name, message):
    error = refusal(**fields)
    assert str(error) == message
    assert error.field == name


@pytest.mark.parametrize(
    "fields",
    [
        {"record_path": "j"},
        {"mode": "record", "record_path": "j"},
        {"mode": "pinned", "chaos": True},
        {"verify_strict": True},
        {"mode": "auto", "table_path": ["t"]},
        {"modules": []},
    ],
)
def test_fields_that_go_together(fields):
    AutotunePolicy(**fields)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("within_class", "timed", "within_class: 'timed' is not available in this version; use 'pinned'"),
    ],
)
def test_what_a_version_cannot_carry_out(name, value, message, monkeypatch):
    monkeypatch.setattr(tuning.policy, "UNAVAILABLE", frozenset({(name, value)}))
    error = refusal(**{name: value})
    assert str(error) == message
    assert (error.field, error.value) == (name, value)
    assert error.expected in message
    # Deleting its line is all that it takes to offer the feature.
    monkeypatch.setattr(tuning.policy, "UNAVAILABLE", frozenset())
    assert getattr(AutotunePolicy(**{name: value}), name) == value


def test_unavailable_choices_exist_and_the_help_names_them():
    by_name = {spec.name: spec for spec in policy_fields()}
    for name, value in UNAVAILABLE:
        assert value in by_name[name].choices
        assert value != by_name[name].default
    assert by_name["on_miss"].help.endswith("(default: cheapest)")
    assert by_name["within_class"].help.endswith("(default: pinned)")


@pytest.mark.parametrize(
    ("fields", "deterministic", "mode"),
    [
        ({}, False, "auto"),
        ({}, True, "pinned"),
        ({"record_path": "j"}, False, "record"),
        ({"record_path": "j"}, True, "record"),
        ({"mode": "auto"}, True, "auto"),
        ({"mode": "pinned"}, False, "pinned"),
        ({"mode": "record", "record_path": "j"}, True, "record"),
    ],
)
def test_effective_mode(fields, deterministic, mode):
    assert AutotunePolicy(**fields).effective_mode(deterministic=deterministic) == mode


def test_scope_goes_by_whole_components():
    policy = AutotunePolicy(modules=["mamba_ssm", "megatron.core"])
    inside = ["mamba_ssm", "mamba_ssm.x", "mamba_ssm.ops.triton.k", "megatron.core.ssm.ops.k"]
    outside = ["mamba_ssm_x", "mamba_ssm_x.y", "mamba", "megatron", "megatron.core2.k", "x.mamba_ssm.k", ""]
    assert [name for name in inside + outside if policy.in_scope(name)] == inside
    assert not AutotunePolicy(modules=()).in_scope("mamba_ssm.x")


def test_config_invariance_goes_by_the_exact_name():
    policy = AutotunePolicy()
    assert policy.is_config_invariant(f"{PERMUTATION}._permute_kernel")
    assert not policy.is_config_invariant(f"{PERMUTATION}._permute_kernel.x")
    assert not policy.is_config_invariant("_permute_kernel")
    assert not policy.is_config_invariant(f"{PERMUTATION}._unpermute_bwd_with_merging_probs_kernel")
    assert not AutotunePolicy(config_invariant=()).is_config_invariant(f"{PERMUTATION}._permute_kernel")


def test_changes_are_what_differs_from_the_default():
    assert AutotunePolicy().changes() == {}
    policy = AutotunePolicy(verify_every=5, mode="pinned", on_miss="cheapest", config_invariant=[])
    assert list(policy.changes().items()) == [("mode", "pinned"), ("config_invariant", ()), ("verify_every", 5)]


def test_each_field_has_a_sentence_and_a_help_text():
    body = ast.parse(inspect.getsource(AutotunePolicy)).body[0].body
    sentences = {
        statement.target.id: following.value.value
        for statement, following in itertools.pairwise(body)
        if isinstance(statement, ast.AnnAssign) and isinstance(following, ast.Expr)
    }
    assert list(sentences) == [spec.name for spec in policy_fields()]
    for spec in policy_fields():
        assert sentences[spec.name].endswith("."), spec.name
        assert spec.help, spec.name
        assert "%" not in spec.help, "argparse would read it as a format"
        assert "\n" not in spec.help


def test_the_kind_of_each_field_agrees_with_its_type():
    expected = {
        "choice": None,
        "modules": tuple[str, ...],
        "kernels": tuple[str, ...],
        "paths": tuple[str, ...],
        "path": str | None,
        "pairs": tuple[tuple[str, int], ...],
        "count": int,
        "switch": bool,
    }
    hints = get_type_hints(AutotunePolicy)
    assert hints["mode"] == Literal["auto", "pinned", "record"] | None
    assert hints["on_miss"] == Literal["cheapest", "nearest", "model", "error"]
    assert hints["within_class"] == Literal["pinned", "timed"]
    for spec in policy_fields():
        if spec.kind == "choice":
            assert spec.name in ("mode", "on_miss", "within_class")
        else:
            assert hints[spec.name] == expected[spec.kind], spec.name
            assert spec.choices == ()
