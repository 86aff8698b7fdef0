"""The mode as one object: everything is checked before anything changes, and everything comes back."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from tuning.determinism import (
    DeterministicMode,
    causal_conv1d,
    deterministic_mode,
    flash,
    kernel_checks,
    register_kernel_check,
)
from tuning.determinism.environment import VARIABLES
from tuning.determinism.torch_flags import read_torch_flags, restore_torch_flags
from tuning.errors import DeterminismError

FILLED = {
    "NCCL_ALGO": "Ring",
    "NCCL_DETERMINISTIC": "1",
    "NCCL_EP_HT_EM_AG_SCAN_MODE": "1",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
}


def state() -> Any:
    """All that the mode may change in this process."""
    return read_torch_flags(), dict(os.environ), list(sys.meta_path)


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in VARIABLES:
        if variable.name != "TRITON_CACHE_DIR":
            monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setattr(kernel_checks, "_checks", {})
    # Where earlier tests of this process have used a GPU it would be too late; that has tests of its own.
    monkeypatch.setattr("tuning.determinism.environment.too_late", lambda unset: [])
    before = read_torch_flags()
    yield
    restore_torch_flags(before)


@pytest.fixture
def flash_attn(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = ModuleType("flash_attn")
    module.flash_attn_func = lambda q, deterministic=False: deterministic  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", module)
    monkeypatch.setattr(flash, "FLASH_MODULES", ("flash_attn",))
    return module


def test_check_changes_nothing() -> None:
    before = state()
    DeterministicMode(args={}).check()
    assert state() == before


def test_apply_and_restore() -> None:
    before = state()
    mode = DeterministicMode()
    mode.apply()
    assert mode.active
    assert {name: os.environ.get(name) for name in FILLED} == FILLED
    assert torch.are_deterministic_algorithms_enabled()
    now = state()
    mode.apply()  # applied already
    assert state() == now
    mode.restore()
    mode.restore()
    assert state() == before
    assert not mode.active


def test_as_a_block_also_when_it_fails() -> None:
    before = state()
    with pytest.raises(KeyError), DeterministicMode():
        raise KeyError(os.environ.pop("NCCL_ALGO"))  # it was filled
    assert state() == before


def test_the_function_is_on_at_once_and_works_as_a_block() -> None:
    before = state()
    mode = deterministic_mode(fill_uninitialized_memory=True)
    assert mode.active
    assert read_torch_flags().fill_uninitialized_memory
    with mode as same:
        assert same is mode
    assert state() == before
    with deterministic_mode():
        assert torch.are_deterministic_algorithms_enabled()
    assert state() == before


def test_a_variable_that_the_user_set_or_changed_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    monkeypatch.setenv("NCCL_ALGO", "")
    monkeypatch.delenv("NCCL_ALGO")
    with DeterministicMode():
        os.environ["NCCL_ALGO"] = "CollnetChain"
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    assert os.environ["NCCL_ALGO"] == "CollnetChain"
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"


def test_another_environment_can_be_given() -> None:
    env: dict[str, str] = {}
    with DeterministicMode(env=env):
        assert env == FILLED
        assert "NCCL_ALGO" not in os.environ
    assert env == {}


def test_one_error_lists_the_problems_of_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(causal_conv1d.metadata, "version", lambda name: "1.5.0")
    env = {"NCCL_ALGO": "Tree"}
    mode = DeterministicMode(
        env=env, args=argparse.Namespace(tp_comm_overlap=True), attention_backend="sage", causal_conv1d="required"
    )
    before = state()
    for call in (mode.check, mode.apply):
        with pytest.raises(DeterminismError) as caught:
            call()
        starts = [problem.partition(" must ")[0] for problem in caught.value.problems]
        assert starts == [
            "NCCL_ALGO (a comma-separated list)",
            "tp_comm_overlap",
            "the attention backend",
            "causal-conv1d",
        ]
        assert str(caught.value).startswith("deterministic mode refuses this process: 4 problems: (1) NCCL_ALGO")
    assert (state(), env, mode.active) == (before, {"NCCL_ALGO": "Tree"}, False)


@pytest.mark.parametrize(
    ("setting", "version", "refused"),
    [
        ("auto", "1.5.0", True),
        ("auto", "1.6.0", False),
        ("auto", None, False),
        ("required", None, True),
        ("required", "1.6.0", False),
        ("unused", "1.5.0", False),
    ],
)
def test_causal_conv1d(monkeypatch: pytest.MonkeyPatch, setting: Any, version: str | None, refused: bool) -> None:
    monkeypatch.setattr(causal_conv1d, "_installed_version", lambda: version)
    problems = DeterministicMode(causal_conv1d=setting).problems()
    assert [problem.startswith("causal-conv1d must be 1.6.0 or later, got ") for problem in problems] == [
        True
    ] * refused


def test_a_setting_that_is_unknown_is_refused() -> None:
    with pytest.raises(DeterminismError) as caught:
        DeterministicMode(causal_conv1d="maybe").check()  # type: ignore[arg-type]
    assert caught.value.problems == (
        "causal_conv1d must be one of auto, required, unused, got 'maybe' (it says what to check): choose one",
    )


def test_flash_attention_is_patched_where_the_backend_is_of_that_family(flash_attn: Any) -> None:
    original = flash_attn.flash_attn_func
    with DeterministicMode(attention_backend="flash"):
        assert flash_attn.flash_attn_func(1) is True
    assert flash_attn.flash_attn_func is original
    with DeterministicMode(attention_backend="native"):
        assert flash_attn.flash_attn_func is original
    with DeterministicMode(attention_backend="flash", attention_library="transformer_engine"):
        assert flash_attn.flash_attn_func is original


def test_flash_attention_that_cannot_be_patched_rolls_everything_back(flash_attn: Any) -> None:
    flash_attn.flash_attn_func = lambda q: q
    before = state()
    with pytest.raises(DeterminismError, match="no entry point has a parameter 'deterministic'"):
        DeterministicMode(attention_backend="flash").apply()
    assert state() == before


def test_transformer_engine_counts_with_the_value_that_is_filled() -> None:
    assert DeterministicMode(env={}, attention_backend="flash", attention_library="transformer_engine").problems() == []


def test_a_kernel_check_runs_last_and_rolls_everything_back(flash_attn: Any) -> None:
    seen = []

    def check() -> dict[str, bool]:
        seen.append((flash_attn.flash_attn_func(1), torch.are_deterministic_algorithms_enabled(), list(pinned)))
        return {"scan": True, "mix": False}

    pinned: list[str] = []

    def pin() -> Callable[[], object]:
        pinned.append("pinned")
        return lambda: pinned.remove("pinned")

    unregister = register_kernel_check("model", check)
    before = state()
    with pytest.raises(DeterminismError, match="model: kernels not patched: mix; patched: scan"):
        DeterministicMode(attention_backend="flash", pin=pin).apply()
    assert (seen, pinned) == ([(True, True, ["pinned"])], [])
    assert flash_attn.flash_attn_func(1) is False
    assert state() == before
    unregister()


def test_a_pin_is_undone_first() -> None:
    events = []

    def pin() -> Callable[[], object]:
        events.append(f"pin, deterministic {torch.are_deterministic_algorithms_enabled()}")
        return lambda: events.append(f"unpin, deterministic {torch.are_deterministic_algorithms_enabled()}")

    with DeterministicMode(pin=pin) as mode:
        assert mode.keep_candidates
    assert events == ["pin, deterministic True", "unpin, deterministic True"]


@pytest.mark.parametrize(("keep", "pinned"), [(None, False), (True, False), (None, True), (False, True)])
def test_candidates_are_kept_whole_only_with_a_pin(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, keep: bool | None, pinned: bool
) -> None:
    decider = ModuleType("mamba_ssm.utils.determinism")
    decider.autotune_configs = lambda configs: configs[:1]  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "mamba_ssm.utils.determinism", decider)
    # Without FLA, which says what stands in for it wherever another test has imported it.
    mode = DeterministicMode(pin=(lambda: lambda: None) if pinned else None, keep_candidates=keep, fla=False)
    with caplog.at_level(logging.WARNING, logger="tuning"), mode:
        whole = decider.autotune_configs([1, 2]) == [1, 2]
    assert whole == (pinned if keep is None else keep)
    said = [
        "deterministic mode is on without a pinned autotune policy: Triton's timed choices can still change the bits; "
        "install "
        "a policy with deterministic=True"
    ]
    assert [record.getMessage() for record in caplog.records] == ([] if pinned or keep else said)
    assert decider.autotune_configs([1, 2]) == [1]


def test_a_failing_undo_does_not_keep_the_others_from_running(flash_attn: Any) -> None:
    before = state()
    mode = deterministic_mode(attention_backend="flash")
    ours, flash_attn.flash_attn_func = flash_attn.flash_attn_func, len
    with pytest.raises(DeterminismError, match="was replaced by somebody else since"):
        mode.restore()
    assert state() == before
    assert ours is not flash_attn.flash_attn_func


def test_fla_is_replaced_unless_it_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = ModuleType("fla.modules.norm.l2norm")
    fake.l2norm_fwd = fake.l2norm_bwd = lambda x: x  # type: ignore[attr-defined]
    original = fake.l2norm_fwd  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    with DeterministicMode():
        assert fake.l2norm_fwd is not original  # type: ignore[attr-defined]
    assert fake.l2norm_fwd is original  # type: ignore[attr-defined]
    with DeterministicMode(fla=False):
        assert fake.l2norm_fwd is original  # type: ignore[attr-defined]


def test_two_modes_nest() -> None:
    before = state()
    with DeterministicMode(fill_uninitialized_memory=True):
        outer = state()
        with DeterministicMode():
            assert not read_torch_flags().fill_uninitialized_memory
        assert state()[:2] == outer[:2]
    assert state() == before


def test_while_nccl_runs_nothing_of_it_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NCCL_ALGO", "NCCL_EP_HT_EM_AG_SCAN_MODE"):
        monkeypatch.setenv(name, FILLED[name])
    monkeypatch.setattr("tuning.determinism.mode.nccl_group", lambda: "nccl")
    with DeterministicMode():
        assert "NCCL_DETERMINISTIC" not in os.environ
