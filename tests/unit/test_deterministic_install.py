"""install(deterministic=True): the policy becomes pinned, torch's flags are set, and all of it is undone."""

from __future__ import annotations

import argparse
import os

import pytest

torch = pytest.importorskip("torch")

import tuning  # noqa: E402
from tuning import AutotunePolicy  # noqa: E402
from tuning.determinism import DeterministicMode, mode_from_args  # noqa: E402


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NCCL_DETERMINISTIC"):
        monkeypatch.delenv(name, raising=False)
    yield
    tuning.uninstall()
    assert not torch.are_deterministic_algorithms_enabled()


def variables():
    """The environment without what parts of torch add when they are first imported."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TORCHINDUCTOR")}


def test_an_unset_mode_becomes_pinned_and_everything_is_undone():
    before = variables()
    with tuning.install(deterministic=True) as installed:
        assert installed.mode == "pinned"
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.are_deterministic_algorithms_enabled()
    assert variables() == before


def test_a_refusal_leaves_the_earlier_policy_and_the_process_alone(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "none")
    before = tuning.install(AutotunePolicy(mode="pinned"))
    with pytest.raises(tuning.DeterminismError, match="CUBLAS_WORKSPACE_CONFIG") as caught:
        tuning.install(deterministic=True)
    assert len(caught.value.problems) == 1
    assert tuning.active_policy() is before.policy
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_given_mode_wins_and_replacing_it_undoes_the_flags():
    with tuning.install(AutotunePolicy(mode="auto"), deterministic=True) as installed:
        assert installed.mode == "auto"
        tuning.install(AutotunePolicy(mode="pinned"))
        assert not torch.are_deterministic_algorithms_enabled()


def test_replacing_a_deterministic_policy_hands_the_mode_over(monkeypatch):
    """NCCL and cuBLAS have read their variables by then, so undoing and doing again would be refused."""
    from tuning.determinism import lateness

    first = tuning.install(deterministic=True)
    monkeypatch.setattr(lateness, "_cublas_handle", lambda torch: True)
    second = tuning.install(AutotunePolicy(mode="pinned", on_miss="error"), deterministic=True)
    assert tuning.active_policy() is second.policy
    assert torch.are_deterministic_algorithms_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    first.uninstall()
    assert torch.are_deterministic_algorithms_enabled()
    second.uninstall()
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_another_deterministic_mode_in_place_of_one_is_refused_and_changes_nothing():
    first = tuning.install(deterministic=True)
    with pytest.raises(tuning.DeterminismError, match="uninstall first"):
        tuning.install(deterministic=DeterministicMode(fill_uninitialized_memory=True))
    assert tuning.active_policy() is first.policy
    assert torch.are_deterministic_algorithms_enabled()


def test_a_failing_replacement_gives_the_mode_back(monkeypatch):
    first = tuning.install(deterministic=True)

    def refuse(self, previous=None):
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr("tuning.installation.Interception.apply", refuse)
        with pytest.raises(RuntimeError, match="no"):
            tuning.install(AutotunePolicy(mode="auto", modules=("json",)))
        with pytest.raises(RuntimeError, match="no"):
            tuning.install(AutotunePolicy(mode="pinned", on_miss="error"), deterministic=True)
    assert tuning.active_policy() is first.policy
    assert torch.are_deterministic_algorithms_enabled()
    tuning.uninstall()
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_arguments_and_the_attention_backend_of_a_framework_are_checked():
    parser = tuning.add_arguments(argparse.ArgumentParser())
    parser.add_argument("--attention-backend")
    parser.add_argument("--cross-entropy-loss-fusion", action="store_true")
    args = parser.parse_args([])
    assert mode_from_args(args) is False
    args = parser.parse_args(["--deterministic-mode", "--attention-backend=sage", "--cross-entropy-loss-fusion"])
    with pytest.raises(tuning.DeterminismError) as caught:
        tuning.install(tuning.policy_from_args(args), deterministic=mode_from_args(args))
    assert len(caught.value.problems) == 2
    assert "cross_entropy_loss_fusion" in str(caught.value)
    assert "sage" in str(caught.value)
    assert tuning.active_policy() is None
    args = parser.parse_args(["--deterministic-mode"])
    with tuning.install(tuning.policy_from_args(args), deterministic=mode_from_args(args)) as installed:
        assert installed.mode == "pinned"


def test_deterministic_mode_in_one_call_pins():
    with tuning.deterministic_mode(causal_conv1d="unused") as installed:
        assert installed.mode == "pinned"
        assert torch.are_deterministic_algorithms_enabled()


def test_what_is_neither_a_bool_nor_a_mode_is_refused():
    with pytest.raises(tuning.PolicyError, match="expected a bool or a DeterministicMode"):
        tuning.install(deterministic="yes")


@pytest.mark.parametrize("args", [5, "x", None, ["--deterministic-mode"]])
def test_arguments_that_hold_no_options_are_refused(args):
    with pytest.raises(tuning.DeterminismError):
        mode_from_args(args)


def test_a_mapping_serves_as_arguments():
    assert mode_from_args({"deterministic_mode": False}) is False
    assert mode_from_args({"deterministic_mode": True}).args == {"deterministic_mode": True}
