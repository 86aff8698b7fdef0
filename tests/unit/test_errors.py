"""The error classes: one base, facts as fields, and no fact lost on the way to another process."""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from typing import Any

import pytest

from tuning import errors
from tuning.errors import (
    AbsentRankError,
    CostError,
    DeterminismError,
    DisagreementError,
    InventoryError,
    JournalError,
    MetricStandardError,
    PolicyError,
    TableError,
    TableMissError,
    TuningError,
    UnsupportedTritonError,
)

FIELDS: dict[type[TuningError], dict[str, Any]] = {
    TuningError: {},
    PolicyError: {"field": "verify_every", "value": -1, "expected": "an integer of at least 0"},
    TableError: {"file": "t/sm90/a.json", "where": "$.entries[3].key", "expected": "an object", "found": "7"},
    TableMissError: {"kernel": "a.b.k", "key": "M=1", "arch": "sm90", "closest": ("M=2 instead of M=1",)},
    JournalError: {"file": "run.rank0.journal", "offset": 4096, "permanent": True},
    DisagreementError: {"step": 7, "disagreements": ("a.b.k M=1: ranks 0-5: X; ranks 6,7: Y",)},
    AbsentRankError: {"step": 7, "disagreements": ("x",), "arrived": (0, 2), "missing": (1,)},
    InventoryError: {"module": "pkg.ops", "reason": "ImportError: no module named 'pkg'"},
    MetricStandardError: {"file": "s.json", "where": "$.metrics", "expected": "an object", "found": "7"},
    CostError: {"file": "ranges.csv", "line": 3},
    UnsupportedTritonError: {"found": "3.1.0", "supported": "3.2 to 3.9"},
    DeterminismError: {"problems": ("NCCL_ALGO must be Ring or Tree, got auto", "CUBLAS_WORKSPACE_CONFIG is unset")},
}

everything = pytest.mark.parametrize("cls", FIELDS, ids=lambda cls: cls.__name__)


def test_the_table_above_misses_no_error() -> None:
    assert {cls.__name__ for cls in FIELDS} == set(errors.__all__)


@everything
def test_fields_are_keyword_only_optional_and_documented(cls: type[TuningError]) -> None:
    parameters = list(inspect.signature(cls).parameters.values())
    assert parameters[0].name == "message"
    assert [p.name for p in parameters[1:]] == list(FIELDS[cls])
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in parameters[1:])
    # The fields a class inherits are documented where they are introduced.
    inherited = set(inspect.signature(cls.__mro__[1]).parameters) if cls is not TuningError else set()
    documented = re.findall(r"^\s+(\w+): ", (cls.__doc__ or "").partition("Attributes:")[2], flags=re.MULTILINE)
    assert documented == [name for name in FIELDS[cls] if name not in inherited]


@everything
def test_message_and_fields_are_kept(cls: type[TuningError]) -> None:
    error = cls("what is wrong", **FIELDS[cls])
    assert str(error) == error.message == "what is wrong"
    assert vars(error) == {"message": "what is wrong", **FIELDS[cls]}


@everything
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickling_keeps_type_message_and_fields(cls: type[TuningError], protocol: int) -> None:
    error = cls("what is wrong", **FIELDS[cls])
    error.__notes__ = ["seen on rank 3"]  # what add_note writes on Python 3.11 and later
    back = pickle.loads(pickle.dumps(error, protocol))
    assert type(back) is cls
    assert back.args == error.args == ("what is wrong",)
    assert vars(back) == vars(error)


@everything
def test_copying_keeps_type_message_and_fields(cls: type[TuningError]) -> None:
    error = cls("what is wrong", **FIELDS[cls])
    back = copy.deepcopy(error)
    assert type(back) is cls
    assert (back.args, vars(back)) == (error.args, vars(error))


@everything
def test_message_alone_is_enough(cls: type[TuningError]) -> None:
    error = cls("what is wrong")
    assert all(getattr(error, name) in (None, (), False) for name in FIELDS[cls])


def test_sequences_become_tuples() -> None:
    lines = ["a", "b"]
    assert TableMissError("m", closest=lines).closest == ("a", "b")
    assert DeterminismError("m", problems=lines).problems == ("a", "b")
    error = AbsentRankError("m", disagreements=lines, arrived=[0], missing=range(1, 3))
    assert (error.disagreements, error.arrived, error.missing) == (("a", "b"), (0,), (1, 2))


@pytest.mark.parametrize(
    ("cls", "base"), [(PolicyError, ValueError), (TableMissError, LookupError), (AbsentRankError, DisagreementError)]
)
def test_bases_that_callers_may_catch(cls: type[TuningError], base: type[Exception]) -> None:
    with pytest.raises(base, match="what is wrong"):
        raise cls("what is wrong")


def test_docstring_draws_the_tree_as_it_is() -> None:
    drawn: dict[str, str] = {}
    parents = {0: "Exception"}
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"^    ([│├└─ ]*)(\w+Error)\b", line)
        if match:
            depth = len(match[1]) // 4
            drawn[match[2]] = parents[depth]
            parents[depth + 1] = match[2]
    assert drawn == {cls.__name__: cls.__mro__[1].__name__ for cls in FIELDS}


def test_a_policy_error_about_a_value_that_does_not_pickle_pickles_all_the_same() -> None:
    error = PolicyError("modules: expected names, got a generator", field="modules", value=(n for n in "ab"))
    back = pickle.loads(pickle.dumps(error))
    assert (back.message, back.field) == (error.message, "modules")
    assert back.value.startswith("<generator")


def test_the_older_paths_of_an_error_lead_to_it() -> None:
    from tuning import _package_walk, inventory

    assert inventory.InventoryError is _package_walk.InventoryError is InventoryError
