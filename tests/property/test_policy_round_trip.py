"""For every valid policy: policy -> argv -> policy, -> mapping -> policy and -> YAML file -> policy are the identity.

And for any value at all: a policy or one PolicyError that names the field, never another exception.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import pickle
import tempfile
from collections.abc import Callable

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tuning.arguments import add_arguments, policy_from_args, policy_from_mapping, policy_from_yaml, policy_to_argv
from tuning.errors import PolicyError
from tuning.policy import UNAVAILABLE, AutotunePolicy, policy_fields

FIELDS = {spec.name: spec for spec in policy_fields()}

identifiers = st.one_of(
    st.sampled_from(["a", "mamba_ssm", "_k", "BLOCK_M", "class", "é", "核"]),
    st.from_regex(r"[A-Za-z_][A-Za-z0-9_]{0,8}", fullmatch=True),
)
dotted = st.lists(identifiers, min_size=1, max_size=4).map(".".join)
qualified = st.builds(
    lambda module, inner, name: ".".join([module, *(part for outer in inner for part in (outer, "<locals>")), name]),
    dotted,
    st.lists(identifiers, max_size=2),
    identifiers,
)
awkward = st.sampled_from(
    [
        "-",
        "--",
        "---",
        "-x",
        "--triton-autotune-chaos",
        "-1",
        "-1e5",
        "=",
        "a=b",
        "@file",
        "--x=y z",
        " ",
        "'",
        "\n",
        "~",
    ]
)
text_paths = st.one_of(awkward, st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1))
# On Linux any bytes but NUL are a path; Python holds those that are no UTF-8 as lone surrogates.
paths = st.one_of(text_paths, st.binary(min_size=1).filter(lambda data: b"\0" not in data).map(os.fsdecode))
counts = st.one_of(st.integers(0, 10), st.integers(0, 2**63 - 1))
sizes = st.one_of(st.integers(1, 256), st.integers(1, 2**63 - 1))


def usable(name: str) -> st.SearchStrategy[str]:
    return st.sampled_from([choice for choice in FIELDS[name].choices if (name, choice) not in UNAVAILABLE])


@st.composite
def policies(draw: st.DrawFn, paths: st.SearchStrategy[str] = paths) -> AutotunePolicy:
    mode = draw(st.one_of(st.none(), usable("mode")))
    record_paths = {None: st.one_of(st.none(), paths), "record": paths, "auto": st.none(), "pinned": st.none()}
    record_path = draw(record_paths[mode])
    fields = {
        "mode": mode,
        "modules": draw(st.lists(dotted, max_size=3)),
        "config_invariant": draw(st.lists(qualified, max_size=3)),
        "table_path": draw(st.lists(paths, max_size=3)),
        "record_path": record_path,
        "remeasure": record_path is not None and draw(st.booleans()),
        "check_outputs": record_path is not None and draw(st.booleans()),
        "on_miss": draw(usable("on_miss")),
        "block_sizes": draw(st.dictionaries(identifiers, sizes, max_size=3)),
        "verify_every": draw(counts),
        "verify_strict": draw(st.booleans()),
        "enumerate_autotuners": draw(st.booleans()),
        "manifest_path": draw(st.one_of(st.none(), paths)),
        "within_class": draw(usable("within_class")),
        "chaos": draw(st.booleans()) if mode == "pinned" else False,
    }
    assert fields.keys() == FIELDS.keys(), "every field takes part"
    kept = draw(st.sets(st.sampled_from(sorted(fields))))
    # Leaving a field out tries its default; the pairs that depend on each other stay together.
    kept |= {"mode", "record_path", "remeasure", "check_outputs", "chaos"}
    return AutotunePolicy(**{name: value for name, value in fields.items() if name in kept})


def parsers() -> list[argparse.ArgumentParser]:
    """The default parser, and one with whatever could make argparse read an argument in another way."""
    strict = argparse.ArgumentParser(allow_abbrev=False, fromfile_prefix_chars="@", prefix_chars="-+")
    strict.add_argument("-1", dest="one")  # numbers with a minus sign become flags
    return [add_arguments(argparse.ArgumentParser()), add_arguments(strict)]


PARSERS = parsers()


@given(policies())
def test_argv_round_trip(policy):
    argv = policy_to_argv(policy)
    assert all(type(word) is str and "\0" not in word for word in argv)
    for parser in PARSERS:
        assert policy_from_args(parser.parse_args(argv)) == policy


@given(policies())
def test_argv_says_exactly_what_differs_from_the_default(policy):
    given_flags = vars(PARSERS[0].parse_args(policy_to_argv(policy)))
    assert set(given_flags) - {"deterministic_mode"} == {f"triton_autotune_{name}" for name in policy.changes()}


@given(policies())
def test_argv_round_trip_after_other_arguments(policy):
    parser = add_arguments(argparse.ArgumentParser())
    parser.add_argument("script")
    parser.add_argument("--also", nargs="*")
    args = parser.parse_args(["script.py", "--also", "x", "y", *policy_to_argv(policy), "--also"])
    assert (args.script, args.also, policy_from_args(args)) == ("script.py", [], policy)


@given(policies())
def test_other_round_trips(policy):
    assert policy_from_mapping(policy.changes()) == policy
    assert policy_from_mapping(dataclasses.asdict(policy)) == policy
    assert dataclasses.replace(policy) == policy
    assert pickle.loads(pickle.dumps(policy)) == policy
    assert eval(repr(policy)) == policy
    assert hash(policy) == hash(dataclasses.replace(policy))


@given(policies(paths=text_paths), st.booleans())
@settings(max_examples=50)
def test_yaml_round_trip(policy, as_mapping):
    section = {name: list(value) if isinstance(value, tuple) else value for name, value in policy.changes().items()}
    if "block_sizes" in section:
        pairs = section["block_sizes"]
        section["block_sizes"] = dict(pairs) if as_mapping else [list(pair) for pair in pairs]
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "run.yaml")
        file.write_bytes(yaml.safe_dump({"lr": 1, "triton_autotune": section}, allow_unicode=True, encoding="utf-8"))
        assert policy_from_yaml(file) == policy


anything = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(),
        st.floats(),
        st.text(),
        st.binary(),
        st.builds(object),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.text(max_size=4), inner, max_size=3),
        st.tuples(st.text(max_size=4), inner).map(lambda pair: [pair]),
    ),
    max_leaves=6,
)


def outcome(function: Callable[..., AutotunePolicy], *args: object, **fields: object) -> AutotunePolicy | PolicyError:
    try:
        return function(*args, **fields)
    except PolicyError as error:
        return error


@given(st.sampled_from(sorted(FIELDS)), anything)
def test_any_value_gives_a_policy_or_one_policy_error(name, value):
    result = outcome(AutotunePolicy, **{name: value})
    if isinstance(result, AutotunePolicy):
        assert policy_from_args(PARSERS[0].parse_args(policy_to_argv(result))) == result
    else:
        assert result.field in (name, "record_path")
        assert str(result).startswith(result.field)
        assert result.expected in str(result)
        assert "\n" not in str(result)


@given(
    st.one_of(anything, st.dictionaries(st.one_of(st.sampled_from(sorted(FIELDS)), st.text()), anything, max_size=3))
)
def test_any_section_gives_a_policy_or_one_policy_error(section):
    result = outcome(policy_from_mapping, section)
    if isinstance(result, PolicyError):
        assert str(result).startswith("triton_autotune")
        assert "\n" not in str(result)


@given(st.text(st.characters(exclude_categories=["Cs"])), st.booleans())
def test_any_text_as_a_file_gives_a_policy_or_one_policy_error(content, inside):
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "run.yaml")
        file.write_bytes((f"triton_autotune: {content}" if inside else content).encode())
        result = outcome(policy_from_yaml, file)
    if isinstance(result, PolicyError):
        assert str(result).startswith(str(file))
        assert "\n" not in str(result)
