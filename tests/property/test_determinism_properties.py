"""Deterministic mode on arbitrary input: environments, pickles read as text, strided views."""

from __future__ import annotations

import contextlib
import itertools
import pickle
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from tuning.determinism import apply_determinism_env
from tuning.determinism.checkpoint_layout import _runs
from tuning.determinism.environment import VARIABLES
from tuning.determinism.pickle_text import read_pickle_text
from tuning.errors import DeterminismError

values = st.sampled_from(
    ["0", "1", "", "Ring", "Tree", "^NVLS", "Ring,^NVLS", ":4096:8", ":16:8", ":0:0", "/tmp", "1x", "yes"]
)
environments = st.dictionaries(st.sampled_from([variable.name for variable in VARIABLES]), values)


@given(environments)
def test_an_environment_is_refused_whole_or_completed_once(env: dict[str, str]) -> None:
    before = dict(env)
    try:
        report = apply_determinism_env(env)
    except DeterminismError:
        assert env == before
        return
    assert {name: env[name] for name in before} == before  # what was set has won
    assert {**before, **report.filled} == env
    assert dict(apply_determinism_env(env).filled) == {}
    assert all(variable.problem(env.get(variable.name)) is None for variable in VARIABLES)


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text(), inner),
    max_leaves=20,
)


@given(plain, st.integers(2, 5))
def test_a_pickle_of_plain_values_reads_as_those_values(value: Any, protocol: int) -> None:
    def called(found: Any) -> Any:
        # Protocol 2 has no bytes: they are written as a call of an encoder.
        if isinstance(found, (list, tuple)):
            return type(found)(map(called, found))
        if isinstance(found, dict):
            return {name: called(entry) for name, entry in found.items()}
        return "bytes" if isinstance(found, bytes) or type(found).__name__ == "Symbol" else found

    assert called(read_pickle_text(pickle.dumps(value, protocol))) == called(value)


@given(st.binary(max_size=60))
def test_arbitrary_bytes_never_do_worse_than_a_value_error(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        read_pickle_text(data)


@given(
    st.integers(0, 5),
    st.lists(st.tuples(st.integers(0, 4), st.integers(0, 9)), max_size=3),
)
def test_the_runs_of_a_view_are_its_elements(offset: int, dims: list[tuple[int, int]]) -> None:
    size, stride = [count for count, _ in dims], [step for _, step in dims]
    storage = torch.zeros(offset + 1 + sum(max(count - 1, 0) * step for count, step in dims), dtype=torch.int8)
    if storage.numel():
        storage.as_strided(size, stride, offset).fill_(1)
    covered = torch.zeros_like(storage)
    runs = _runs(offset, size, stride)
    for first, end in runs:
        covered[first:end] = 1
    assert torch.equal(covered, storage)
    assert list(runs) == sorted(runs)
    assert all(end < other for (_, end), (other, _) in itertools.pairwise(runs))
