"""The sides of the case ``launch`` over FLA's own autotuner, on a stub kernel."""

from __future__ import annotations

import os

import pytest

from bench import launch

FLA = [title for title, case in launch.CASES.items() if case.get("fla")]


@pytest.mark.peers("fla", "torch")
@pytest.mark.parametrize("title", FLA)
def test_every_side_launches(title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLA_CONFIG_DIR", "mine")
    case = launch.CASES[title]
    with launch._fla_mode(case["fla"]):
        from fla.ops.utils import cache

        assert cache.FLA_CACHE_MODE.value == case["fla"]
        found = launch._measure(case, gpu=False, launches=3, samples=2)
    assert list(found) == ["bare JIT", "stock, one config", "stock, hit", "pinned"]
    assert cache.FLA_CACHE_MODE.value == "disabled"
    assert os.environ["FLA_CONFIG_DIR"] == "mine"


@pytest.mark.peers("fla", "torch")
def test_strict_without_its_file_is_no_measurement() -> None:
    case = launch.CASES["12 arguments, FLA_CACHE_MODE=strict"]
    with launch._fla_mode("strict"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(launch, "_write_fla_config", lambda tuner, values: None)
        with pytest.raises(RuntimeError, match="FLA did not find its config"):
            launch._measure(case, gpu=False, launches=3, samples=2)
