"""Flags, YAML section and argument list: the frozen flag list, help from metadata, every refusal with its message."""

from __future__ import annotations

import argparse
import copy
import os
import pathlib
import pickle
import subprocess
import sys
import types

import pytest

from tuning.arguments import (
    add_arguments,
    policy_from_args,
    policy_from_mapping,
    policy_from_yaml,
    policy_to_argv,
)
from tuning.errors import PolicyError
from tuning.policy import AutotunePolicy, policy_fields

KEYS = (
    "mode, modules, config_invariant, table_path, record_path, remeasure, check_outputs, on_miss, block_sizes, "
    "verify_every, verify_strict, enumerate_autotuners, manifest_path, within_class, chaos"
)


def parser(**options: object) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="train", **options)
    assert add_arguments(made) is made
    return made


def parse(*argv: str) -> AutotunePolicy:
    return policy_from_args(parser().parse_args(argv))


def refusal(function, *args: object) -> PolicyError:
    with pytest.raises(PolicyError) as caught:
        function(*args)
    error = caught.value
    assert "\n" not in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.field, again.expected) == (str(error), error.field, error.expected)
    return error


# --- flags ---


def flags(made: argparse.ArgumentParser) -> dict[str, argparse.Action]:
    group = next(group for group in made._action_groups if group.title == "Triton autotuning")
    return {" ".join(action.option_strings): action for action in group._group_actions}


def test_the_flag_list_is_frozen():
    assert [(names, action.nargs, action.metavar, action.choices) for names, action in flags(parser()).items()] == [
        ("--triton-autotune-mode", None, None, ("auto", "pinned", "record")),
        ("--triton-autotune-modules", "*", "MODULE", None),
        ("--triton-autotune-config-invariant", "*", "KERNEL", None),
        ("--triton-autotune-table-path", "*", "FOLDER", None),
        ("--triton-autotune-record-path", None, "PREFIX", None),
        ("--triton-autotune-remeasure --no-triton-autotune-remeasure", 0, None, None),
        ("--triton-autotune-check-outputs --no-triton-autotune-check-outputs", 0, None, None),
        ("--triton-autotune-on-miss", None, None, ("cheapest", "nearest", "model", "error")),
        ("--triton-autotune-block-sizes", "*", "NAME=VALUE", None),
        ("--triton-autotune-verify-every", None, "STEPS", None),
        ("--triton-autotune-verify-strict --no-triton-autotune-verify-strict", 0, None, None),
        ("--triton-autotune-enumerate-autotuners --no-triton-autotune-enumerate-autotuners", 0, None, None),
        ("--triton-autotune-manifest-path", None, "FILE", None),
        ("--triton-autotune-within-class", None, None, ("pinned", "timed")),
        ("--triton-autotune-chaos --no-triton-autotune-chaos", 0, None, None),
        ("--deterministic-mode", 0, None, None),
    ]


def test_deterministic_mode_is_off_by_default_and_a_frameworks_own_flag_is_shared():
    assert parser().parse_args([]).deterministic_mode is False
    assert parser().parse_args(["--deterministic-mode"]).deterministic_mode is True
    framework = argparse.ArgumentParser()
    framework.add_argument("--deterministic-mode", action="store_true", help="theirs")
    assert add_arguments(framework).parse_args(["--deterministic-mode"]).deterministic_mode is True
    assert "--deterministic-mode" not in flags(framework)


def test_the_help_of_each_flag_is_the_metadata_of_its_field():
    made = parser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    *helps, _deterministic = [action.help for action in flags(made).values()]
    assert helps == [spec.help for spec in policy_fields()]
    printed = " ".join(made.format_help().split())
    for spec in policy_fields():
        # argparse may break a line after a hyphen.
        assert "".join(spec.help.split()) in "".join(printed.split()), spec.name
    assert "SUPPRESS" not in printed


def test_flags_that_are_not_given_leave_nothing_on_the_namespace():
    assert vars(parser().parse_args([])) == {"deterministic_mode": False}
    assert parse() == AutotunePolicy()
    assert vars(parser().parse_args(["--triton-autotune-verify-every", "0"])) == {
        "triton_autotune_verify_every": 0,
        "deterministic_mode": False,
    }


def test_all_flags_in_the_spelling_of_a_shell():
    command = """
        --triton-autotune-mode pinned --triton-autotune-modules fla mamba_ssm --triton-autotune-config-invariant
        --triton-autotune-table-path a b --triton-autotune-on-miss error
        --triton-autotune-block-sizes BLOCK_M=64 BLOCK_K=32 --triton-autotune-verify-every 100
        --triton-autotune-verify-strict --no-triton-autotune-enumerate-autotuners
        --triton-autotune-manifest-path m.json --triton-autotune-within-class pinned --triton-autotune-chaos
    """
    policy = parse(*command.split())
    assert policy == AutotunePolicy(
        mode="pinned",
        modules=("fla", "mamba_ssm"),
        config_invariant=(),
        table_path=("a", "b"),
        on_miss="error",
        block_sizes={"BLOCK_M": 64, "BLOCK_K": 32},
        verify_every=100,
        verify_strict=True,
        enumerate_autotuners=False,
        manifest_path="m.json",
        within_class="pinned",
        chaos=True,
    )
    assert parse("--triton-autotune-record-path", "j").effective_mode() == "record"


def test_what_is_given_is_plain_data():
    made = parser().parse_args(policy_to_argv(AutotunePolicy(mode="pinned", modules=["a"], chaos=True, verify_every=3)))
    assert {type(value) for value in vars(made).values()} == {str, list, bool, int}


def test_a_repeated_flag_adds_to_a_sequence_and_replaces_a_default():
    made = parser()
    made.set_defaults(triton_autotune_modules=("fla",), triton_autotune_verify_every=7)
    assert policy_from_args(made.parse_args([])) == AutotunePolicy(modules=("fla",), verify_every=7)
    args = ["--triton-autotune-modules", "a", "b", "--triton-autotune-modules=c"]
    for _ in range(2):  # nothing is kept between two parses
        assert policy_from_args(made.parse_args(args)).modules == ("a", "b", "c")
    assert policy_from_args(made.parse_args(["--triton-autotune-modules"])).modules == ()


def test_the_last_of_a_flag_and_its_negation_holds():
    assert parse("--triton-autotune-verify-strict", "--no-triton-autotune-verify-strict") == AutotunePolicy()
    assert parse("--no-triton-autotune-verify-strict", "--triton-autotune-verify-strict").verify_strict


def test_flags_coexist_with_the_parser_of_a_training_framework():
    # As Megatron-LM does it: no abbreviations, groups, a provider that returns the parser, unknown arguments kept.
    made = argparse.ArgumentParser(prog="pretrain", allow_abbrev=False, fromfile_prefix_chars="@")
    group = made.add_argument_group(title="mixed precision")
    group.add_argument("--bf16", action="store_true")
    made.add_argument("--no-triton-rope", action="store_true")
    made.add_argument("--rampup-batch-size", nargs="*", default=None)
    made.add_argument("script")
    made = add_arguments(made)
    argv = ["--bf16", "train.py", "--triton-autotune-mode", "pinned", "--rampup-batch-size", "1", "2", "--other", "x"]
    args, rest = made.parse_known_args(argv)
    assert (args.bf16, args.script, args.rampup_batch_size, rest) == (True, "train.py", ["1", "2"], ["--other", "x"])
    assert policy_from_args(args) == AutotunePolicy(mode="pinned")
    policy = AutotunePolicy(table_path=("@tables", "-t", "a b"), record_path="@j", config_invariant=())
    assert policy_from_args(made.parse_args(["train.py", *policy_to_argv(policy)])) == policy


def test_flags_work_in_a_subcommand():
    made = argparse.ArgumentParser(prog="tool")
    sub = made.add_subparsers(dest="command")
    add_arguments(sub.add_parser("one"))
    add_arguments(sub.add_parser("two"))
    assert policy_from_args(made.parse_args(["two", "--triton-autotune-modules", "a", "b"])).modules == ("a", "b")


@pytest.mark.parametrize("handler", ["error", "resolve"])
def test_adding_the_flags_twice_is_refused_and_changes_nothing(handler):
    made = parser(conflict_handler=handler)
    before = made.format_help()
    error = refusal(add_arguments, made)
    assert str(error) == (
        "add_arguments: the parser already has --triton-autotune-mode; expected a parser without these flags: "
        "call add_arguments once on each parser"
    )
    assert made.format_help() == before
    assert policy_from_args(made.parse_args(["--triton-autotune-chaos", "--triton-autotune-mode=pinned"])).chaos


def test_somebody_elses_flag_of_the_same_name_is_found_before_anything_is_added():
    made = argparse.ArgumentParser(prog="train")
    made.add_argument("--triton-autotune-chaos")
    before = made.format_help()
    assert str(refusal(add_arguments, made)) == (
        "add_arguments: the parser already has --triton-autotune-chaos; expected a parser without these flags: "
        "call add_arguments once on each parser"
    )
    assert made.format_help() == before


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--triton-autotune-mode", "fast"], "argument --triton-autotune-mode: invalid choice: 'fast'"),
        (["--triton-autotune-mode"], "argument --triton-autotune-mode: expected one argument"),
        (["--triton-autotune-verify-every", "x"], "argument --triton-autotune-verify-every: invalid int value: 'x'"),
        (["--triton-autotune-verify-strict=yes"], "ignored explicit argument 'yes'"),
        (["--triton-autotune-nonsense"], "unrecognized arguments: --triton-autotune-nonsense"),
    ],
)
def test_bad_usage_exits_2_in_the_way_of_argparse(argv, message, capsys):
    with pytest.raises(SystemExit) as caught:
        parser().parse_args(argv)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "field", "message"),
    [
        (
            ["--triton-autotune-verify-every=-1"],
            "verify_every",
            "--triton-autotune-verify-every: expected an integer from 0 to 2**63 - 1, got -1",
        ),
        (
            ["--triton-autotune-modules", "fla", "a-b"],
            "modules",
            "--triton-autotune-modules[1]: expected a dotted module name such as 'megatron.core', got 'a-b'",
        ),
        (
            ["--triton-autotune-block-sizes", "BLOCK_M:64"],
            "block_sizes",
            "--triton-autotune-block-sizes[0]: expected a NAME=VALUE pair such as BLOCK_SIZE_M=64, got 'BLOCK_M:64'",
        ),
        (
            ["--triton-autotune-mode=record"],
            "record_path",
            "--triton-autotune-record-path: expected a journal prefix, since mode is 'record', got None; "
            "give one, such as 'journals/run'",
        ),
        (
            ["--triton-autotune-record-path="],
            "record_path",
            "--triton-autotune-record-path: expected a path that is not empty and holds no NUL, or None, got ''",
        ),
    ],
)
def test_values_that_argparse_lets_through_are_refused_by_the_policy(argv, field, message):
    args = parser().parse_args(argv)
    error = refusal(policy_from_args, args)
    assert str(error) == message
    assert error.field == field
    assert error.expected in message


def test_other_attributes_and_other_namespaces_are_fine():
    args = types.SimpleNamespace(lr=1.0, triton_autotune_mode="pinned", triton_autotune_table_path=None)
    before = copy.deepcopy(args)
    assert policy_from_args(args) == AutotunePolicy(mode="pinned")
    assert args == before
    assert policy_from_args(argparse.Namespace()) == AutotunePolicy()


@pytest.mark.parametrize("args", [{"triton_autotune_mode": "pinned"}, ["--triton-autotune-mode=pinned"]])
def test_a_mapping_or_a_list_in_place_of_a_namespace_is_refused(args):
    # Neither has the attributes: the flags would be ignored without a word.
    assert str(refusal(policy_from_args, args)) == (
        f"args: expected an argparse.Namespace, got {args!r}; use policy_from_mapping for a mapping of fields"
    )


# --- YAML section ---


def test_flags_and_a_section_together_are_refused():
    args = parser().parse_args(["--triton-autotune-mode=pinned", "--no-triton-autotune-chaos"])
    error = refusal(policy_from_args, args, {"verify_every": 5, "on_miss": "error"})
    assert str(error) == (
        "flags and YAML section given together: --triton-autotune-mode, --triton-autotune-chaos on the command line, "
        "and triton_autotune (verify_every, on_miss) in YAML; keep one of the two"
    )
    assert error.field is None
    error = refusal(policy_from_args, args, {})
    assert str(error) == (
        "flags and YAML section given together: --triton-autotune-mode, --triton-autotune-chaos on the command line, "
        "and triton_autotune (no keys) in YAML; keep one of the two"
    )


def test_a_section_alone_and_flags_alone():
    args = parser().parse_args([])
    assert policy_from_args(args, {"mode": "pinned"}) == AutotunePolicy(mode="pinned")
    assert policy_from_args(args, {}) == AutotunePolicy()
    assert policy_from_args(args, None) == AutotunePolicy()


def test_null_means_the_default():
    assert policy_from_mapping(None) == AutotunePolicy()
    assert policy_from_mapping({}) == AutotunePolicy()
    assert policy_from_mapping(dict.fromkeys(spec.name for spec in policy_fields())) == AutotunePolicy()


def test_the_types_of_yaml():
    section = types.MappingProxyType(
        {"modules": ["fla"], "config_invariant": [], "block_sizes": {"BLOCK_M": 64}, "verify_strict": True}
    )
    assert policy_from_mapping(section) == AutotunePolicy(
        modules=("fla",), config_invariant=(), block_sizes=(("BLOCK_M", 64),), verify_strict=True
    )
    assert policy_from_mapping({"block_sizes": ["BLOCK_M=64"]}) == AutotunePolicy(block_sizes={"BLOCK_M": 64})


@pytest.mark.parametrize(
    ("section", "field", "message"),
    [
        (
            {"verify_evry": 5},
            "verify_evry",
            "triton_autotune: unknown key 'verify_evry'; did you mean 'verify_every'?",
        ),
        (
            {"record-path": "j"},
            "record-path",
            "triton_autotune: unknown key 'record-path'; did you mean 'record_path'?",
        ),
        ({"MODE": "auto"}, "MODE", "triton_autotune: unknown key 'MODE'; did you mean 'mode'?"),
        (
            {"triton_autotune": {}},
            "triton_autotune",
            "triton_autotune: unknown key 'triton_autotune'; pass the section itself, what stands under this key",
        ),
        ({"zzz": None}, "zzz", f"triton_autotune: unknown key 'zzz'; expected one of {KEYS}"),
        ({True: 1}, "True", f"triton_autotune: unknown key True; expected one of {KEYS}"),
        (
            {"verify_strict": "true"},
            "verify_strict",
            "triton_autotune.verify_strict: expected true or false, got 'true'; write it without quotes",
        ),
        (
            {"verify_every": True},
            "verify_every",
            "triton_autotune.verify_every: expected an integer from 0 to 2**63 - 1, got True",
        ),
        (
            {"verify_every": "5"},
            "verify_every",
            "triton_autotune.verify_every: expected an integer from 0 to 2**63 - 1, got '5'",
        ),
        (
            {"modules": "fla"},
            "modules",
            "triton_autotune.modules: expected a list of module names, got 'fla'; "
            "put it in a list, even if it is the only one",
        ),
        (
            {"modules": ["fla", None]},
            "modules",
            "triton_autotune.modules[1]: expected a dotted module name such as 'megatron.core', got None",
        ),
        (
            {"mode": "auto", "record_path": "j"},
            "record_path",
            "triton_autotune.record_path: expected None, since mode is 'auto', which records nothing, got 'j'; "
            "drop it, or set mode to 'record'",
        ),
        (
            {"within_class": "free"},
            "within_class",
            "triton_autotune.within_class: expected 'pinned' or 'timed', got 'free'",
        ),
    ],
)
def test_each_refusal_of_a_section(section, field, message):
    error = refusal(policy_from_mapping, section)
    assert str(error) == message
    assert error.field == field
    assert error.expected


@pytest.mark.parametrize("section", [["mode"], "mode: auto", 3, False])
def test_a_section_that_is_no_mapping(section):
    message = f"triton_autotune: expected a mapping of policy fields, got {section!r}"
    assert str(refusal(policy_from_mapping, section)) == message
    assert str(refusal(policy_from_args, argparse.Namespace(), section)) == message


# --- YAML file ---


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes ``run.yaml`` in the current folder."""
    monkeypatch.chdir(tmp_path)

    def writer(content: str | bytes) -> str:
        pathlib.Path("run.yaml").write_bytes(content if isinstance(content, bytes) else content.encode())
        return "run.yaml"

    return writer


def test_a_file_of_which_only_the_section_is_read(write):
    file = write(
        "lr: 0.1\n"
        "lr: 0.2\n"  # somebody else's duplicate
        "data: !include other.yaml\n"  # and somebody else's tag
        "triton_autotune:\n"
        "  mode: pinned\n"
        "  modules: [fla, mamba_ssm]\n"
        "  block_sizes:\n"
        "    BLOCK_M: 64\n"
        "  record_path:\n"
        "  verify_strict: yes\n"
    )
    expected = AutotunePolicy(
        mode="pinned", modules=("fla", "mamba_ssm"), block_sizes={"BLOCK_M": 64}, verify_strict=True
    )
    assert policy_from_yaml(file) == expected
    assert policy_from_yaml(pathlib.Path(file)) == expected


@pytest.mark.parametrize(
    "content",
    [
        "triton_autotune:\n",
        "triton_autotune: null\n",
        "triton_autotune: {}\n",
        "\ufefftriton_autotune: ~",
        "{triton_autotune: }",
    ],
)
def test_an_empty_section_is_the_default(write, content):
    assert policy_from_yaml(write(content)) == AutotunePolicy()


def test_anchors_and_merge_keys(write):
    file = write(
        "base: &base\n  mode: pinned\n  verify_every: 3\n"
        "names: &names [fla]\n"
        "triton_autotune:\n  <<: *base\n  verify_every: 5\n  modules: *names\n"
    )
    assert policy_from_yaml(file) == AutotunePolicy(mode="pinned", verify_every=5, modules=("fla",))
    two = "a: &a {mode: pinned}\nb: &b {verify_every: 3}\ntriton_autotune:\n  <<: *a\n  <<: *b\n"
    assert policy_from_yaml(write(two)) == AutotunePolicy(mode="pinned", verify_every=3)
    assert policy_from_yaml(write("x: &x {triton_autotune: {mode: auto}}\n<<: *x\n")) == AutotunePolicy(mode="auto")


EXPECTED_FILE = "expected a YAML file with a 'triton_autotune' section"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "run.yaml: expected a section 'triton_autotune' at the top level, found nothing"),
        ("a: 1\n", "run.yaml: expected a section 'triton_autotune' at the top level, found a"),
        (
            "a: {triton_autotune: {}}\ntriton-autotune: {}\n",
            "run.yaml: expected a section 'triton_autotune' at the top level, found a, triton-autotune",
        ),
        ("\n- a\n", "run.yaml:2: expected a mapping at the top level, got a sequence"),
        (
            "a: 1\nb: [1, 2\nc: 3\n",
            "run.yaml:3: malformed YAML: while parsing a flow sequence, expected ',' or ']', but got ':'",
        ),
        ("a: 'b\n", "run.yaml:2: malformed YAML: while scanning a quoted scalar, found unexpected end of stream"),
        (
            "a: 1\n---\nb: 2\n",
            "run.yaml:2: malformed YAML: expected a single document in the stream, but found another document",
        ),
        ("a: *b\n", "run.yaml:1: malformed YAML: found undefined alias 'b'"),
        (b"a: 1\nb: \xff\n", "run.yaml:2: malformed YAML: byte 0xff is no UTF-8"),
        ("a: 1\nb: \x01\n", "run.yaml:2: malformed YAML: character U+0001 is not allowed"),
        ("a: " + "[" * 1500, "run.yaml:1: malformed YAML: it is nested too deeply, or contains itself"),
        (
            "triton_autotune:\n  mode: auto\n  chaos: false\n  mode: pinned\n",
            "run.yaml:4: key 'mode' stands here and at line 2; keep one",
        ),
        (
            "triton_autotune:\n  block_sizes:\n    A: 1\n    'A': 2\n",
            "run.yaml:4: key 'A' stands here and at line 3; keep one",
        ),
        (
            "triton_autotune:\n  mode: auto\nb: 1\ntriton_autotune: {}\n",
            "run.yaml:4: key 'triton_autotune' stands here and at line 1; keep one",
        ),
        (
            "b: 1\ntriton_autotune:\n  - mode\n",
            "run.yaml:2: triton_autotune: expected a mapping of policy fields, got ['mode']",
        ),
        (
            "triton_autotune:\n  mode: auto\n  verify: 3\n",
            "run.yaml:3: triton_autotune: unknown key 'verify'; did you mean 'verify_every'?",
        ),
        (
            "triton_autotune:\n  mode: pinned\n\n  verify_strict: 'true'\n",
            "run.yaml:4: triton_autotune.verify_strict: expected true or false, got 'true'; write it without quotes",
        ),
        (
            "base: &base\n  verify_every: -3\ntriton_autotune:\n  <<: *base\n",
            "run.yaml:2: triton_autotune.verify_every: expected an integer from 0 to 2**63 - 1, got -3",
        ),
        (
            "b: 1\ntriton_autotune:\n  mode: record\n",
            "run.yaml:2: triton_autotune.record_path: expected a journal prefix, since mode is 'record', got None; "
            "give one, such as 'journals/run'",
        ),
        (
            "triton_autotune:\n  manifest_path: 2025-01-02\n",
            "run.yaml:2: triton_autotune.manifest_path: expected a path (str or os.PathLike), or None, "
            "got datetime.date(2025, 1, 2)",
        ),
        (
            "triton_autotune:\n  manifest_path: 2025-02-30\n",
            "run.yaml:2: malformed YAML: this value cannot be built: ValueError('day is out of range for month')",
        ),
        (
            "triton_autotune:\n  mode: auto\n  chaos: !!bool maybe\n",
            "run.yaml:3: malformed YAML: this value cannot be built: KeyError('maybe')",
        ),
        (
            "triton_autotune: !!timestamp never\n",
            "run.yaml:1: malformed YAML: this value cannot be built: "
            "AttributeError(\"'NoneType' object has no attribute 'groupdict'\")",
        ),
        (
            "triton_autotune:\n  mode: !env MODE\n",
            "run.yaml:2: malformed YAML: could not determine a constructor for the tag '!env'",
        ),
        (
            "triton_autotune:\n  ? [a]\n  : b\n",
            "run.yaml:2: malformed YAML: while constructing a mapping, found unhashable key",
        ),
        (
            "triton_autotune: &a\n  modules: *a\n",
            "run.yaml:1: malformed YAML: found unconstructable recursive node",
        ),
    ],
)
def test_each_refusal_of_a_file(write, content, message):
    error = refusal(policy_from_yaml, write(content))
    assert str(error) == message
    assert error.expected


def test_a_file_that_cannot_be_read(write, tmp_path):
    assert (
        str(refusal(policy_from_yaml, "no.yaml"))
        == f"no.yaml: cannot be read (No such file or directory); {EXPECTED_FILE}"
    )
    assert str(refusal(policy_from_yaml, os.curdir)) == f".: cannot be read (Is a directory); {EXPECTED_FILE}"
    # Opening the pipe would wait for a writer, and the device has no end.
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path / "pipe", "/dev/zero"):
        said = str(refusal(policy_from_yaml, place))
        assert said == f"{place}: cannot be read (not a regular file); {EXPECTED_FILE}"
    large = write("a: 1\n" * ((1 << 20) // 5 + 1))
    assert str(refusal(policy_from_yaml, large)) == (
        f"{large}: cannot be read (it is over 1048576 bytes); {EXPECTED_FILE}: put the section into a file of its own"
    )


def test_without_pyyaml_the_message_says_what_to_install(write, monkeypatch):
    file = write("triton_autotune:\n")
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert str(refusal(policy_from_yaml, file)) == (
        "run.yaml: reading YAML needs PyYAML, which is not installed; run: pip install 'triton-tuning[yaml]'"
    )


def test_flags_need_neither_pyyaml_nor_torch_nor_triton():
    code = (
        "import sys\n"
        "sys.modules.update(yaml=None, torch=None, triton=None)\n"
        "import argparse\n"
        "from tuning.arguments import add_arguments, policy_from_args\n"
        "print(policy_from_args(add_arguments(argparse.ArgumentParser()).parse_args(['--triton-autotune-mode=pinned'])).mode)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "pinned\n"


# --- argument list ---


def test_the_default_policy_needs_no_arguments():
    assert policy_to_argv(AutotunePolicy()) == []


def test_the_argument_list_of_a_policy():
    policy = AutotunePolicy(
        mode="pinned",
        modules=["fla", "a.b"],
        config_invariant=[],
        table_path=["-t", "with space"],
        block_sizes={"B": 2, "A": 1},
        verify_every=5,
        verify_strict=True,
        manifest_path="--m=1",
    )
    argv = policy_to_argv(policy)
    assert argv == [
        "--triton-autotune-mode=pinned",
        "--triton-autotune-modules=fla",
        "--triton-autotune-modules=a.b",
        "--triton-autotune-config-invariant",
        "--triton-autotune-table-path=-t",
        "--triton-autotune-table-path=with space",
        "--triton-autotune-block-sizes=A=1",
        "--triton-autotune-block-sizes=B=2",
        "--triton-autotune-verify-every=5",
        "--triton-autotune-verify-strict",
        "--triton-autotune-manifest-path=--m=1",
    ]
    assert parse(*argv) == policy
