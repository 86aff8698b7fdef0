"""install(deterministic=True): the policy becomes pinned, torch's flags are set, and all of it is undone."""

from __future__ import annotations

import os

import pytest

torch = pytest.importorskip("torch")

import tuning  # noqa: E402
from tuning import AutotunePolicy  # noqa: E402


@pytest.fixture(autouse=True)
def _clean(monkeypatch):
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO", "NCCL_DETERMINISTIC"):
        monkeypatch.delenv(name, raising=False)
    yield
    tuning.uninstall()
    assert not torch.are_deterministic_algorithms_enabled()


def test_an_unset_mode_becomes_pinned_and_everything_is_undone():
    before = dict(os.environ)
    with tuning.install(deterministic=True) as installed:
        assert installed.mode == "pinned"
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.is_deterministic_algorithms_warn_only_enabled()
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not torch.are_deterministic_algorithms_enabled()
    # Importing parts of torch may add variables of its own.
    assert {k: v for k, v in os.environ.items() if not k.startswith("TORCHINDUCTOR")} == before


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
