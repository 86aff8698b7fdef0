"""Subclasses of Triton's autotuner whose ``run`` never calls the one it replaces, and pruners that make new configs."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import triton
from stub_kernels import FakeTensor, autotuner, configs, launch
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import OutOfResources

import tuning
from tuning import AutotunePolicy
from tuning.interception import facts
from tuning.spec import LaunchConfig

pytestmark = pytest.mark.stub


class Closed(Autotuner):
    """Times its candidates by itself, through Triton's benchmark, and keeps the winners in Triton's cache."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        key = kwargs.get("n", args[2] if len(args) > 2 else None)
        if len(self.configs) > 1 and key not in self.cache:
            self.nargs = dict(zip(self.arg_names, args, strict=False))
            times = {id(config): self._bench(*args, config=config, **kwargs) for config in self.configs}
            self.cache[key] = min(self.configs, key=lambda config: times[id(config)][0])
        self.best_config = self.cache.get(key, self.configs[0])
        return self.fn.run(*args, **kwargs, **self.best_config.all_kwargs())


class Stubborn(Autotuner):
    """Launches what it likes, whatever its candidates are."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.best_config = triton.Config({"BLOCK": 16}, num_stages=3)
        return self.fn.run(*args, **kwargs, **self.best_config.all_kwargs())


@pytest.fixture(autouse=True)
def _restores_everything():
    kinds = (Autotuner, Closed, Stubborn)
    before = [dict(vars(kind)) for kind in kinds]
    yield
    tuning.uninstall()
    assert [dict(vars(kind)) for kind in kinds] == before


def run(tuner: Any, n: int = 8) -> Any:
    return launch(tuner, FakeTensor(), FakeTensor(), n, flag=True)


def blocks(tuner: Any) -> list[int]:
    return [int(dict(config.kwargs)["BLOCK"]) for config in tuner.fn.launches]


def pinned(**fields: Any) -> Any:
    return tuning.install(AutotunePolicy(mode="pinned", modules=("stub_kernels",), **fields))


def test_without_a_policy_it_does_time() -> None:
    tuner = autotuner(configs(64, 32), kind=Closed)
    run(tuner)
    assert tuner.do_bench.calls == 2


def test_it_is_pinned_by_the_one_candidate_that_it_is_given() -> None:
    tuner = autotuner(configs(64, 32), kind=Closed)
    run(tuner, 7)  # timed before the policy: its own cache must not answer afterwards
    timed, launched = tuner.do_bench.calls, len(blocks(tuner))
    with pinned() as installed:
        for n in (7, 8, 7, 8):
            assert str(run(tuner, n)).startswith("launched BLOCK=32")
            assert tuner.best_config is tuner.configs[1]
        assert [(choice.source, str(choice.key)) for choice in installed.choices] == [
            ("cheapest", f"n={n} x:float32 y:float32") for n in (7, 8)
        ]
        assert installed.benchmarks == 0
        assert not facts(tuner).calls_through
    assert blocks(tuner)[launched:] == [32] * 4
    assert tuner.do_bench.calls == timed
    assert len(tuner.configs) == 2


def test_one_that_is_defined_under_a_policy_is_pinned_and_replaced_policies_take_over() -> None:
    with pinned():

        class Late(Closed):
            def run(self, *args: Any, **kwargs: Any) -> Any:
                self.best_config = self.configs[0]
                return self.fn.run(*args, **kwargs, **self.best_config.all_kwargs())

        own = Late.run.__wrapped__
        tuner = autotuner(configs(64, 32), kind=Late)
        run(tuner)
        with pinned(block_sizes=(("BLOCK", 64),)):
            assert Late.run.__wrapped__ is own
            run(tuner)
    assert Late.run is own
    run(tuner)
    assert blocks(tuner) == [32, 64, 64]


def test_one_that_heeds_no_candidates_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    tuner = autotuner(configs(64, 32), kind=Stubborn)
    with pinned():
        run(tuner)
        run(tuner)
    said = [record.message for record in caplog.records if "NOT pinned" in record.message]
    assert len(said) == 1
    assert "Stubborn.run never calls Triton's and launched BLOCK=16" in said[0]


def test_recording_does_not_reach_it_and_says_so(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    tuner = autotuner(configs(64, 32), kind=Closed)
    policy = AutotunePolicy(mode="record", record_path=str(tmp_path / "run"), modules=("stub_kernels",))
    with tuning.install(policy) as installed:
        run(tuner)
        run(tuner)
        assert installed.benchmarks == 2
    assert [record.levelno for record in caplog.records if "nothing is journaled" in record.message] == [
        logging.WARNING
    ]


def test_a_config_that_cannot_be_launched_is_replaced_there_too() -> None:
    def fails(config: LaunchConfig, named: dict[str, Any]) -> BaseException | None:
        return OutOfResources(1, 0, "shared memory") if dict(config.kwargs)["BLOCK"] == "32" else None

    tuner = autotuner(configs(64, 32), kind=Closed)
    tuner.fn.fails = fails
    with pinned() as installed:
        run(tuner)
        run(tuner)
        assert [choice.is_fallback for choice in installed.choices] == [True]
    assert blocks(tuner) == [64, 64]


def test_a_pruner_that_makes_new_configs_at_each_call_is_pinned_by_content() -> None:
    made: list[Any] = []

    def prune(candidates: list[Any], named: dict[str, Any], **kwargs: Any) -> list[Any]:
        fresh = [triton.Config({"BLOCK": block}, num_stages=3) for block in (128, 64)]
        made.extend(fresh)
        return fresh

    tuner = autotuner(configs(256, 512), prune_configs_by={"early_config_prune": prune})
    with pinned(block_sizes=(("BLOCK", 128),)) as installed:
        for n in (8, 8, 9):
            run(tuner, n)
        assert {choice.launch_config for choice in installed.choices} == {LaunchConfig.build({"BLOCK": 128})}
        assert len({id(choice.config) for choice in installed.choices}) == 2  # each the pruner's own, for its key
        assert all(any(choice.config is config for config in made) for choice in installed.choices)
        assert installed.benchmarks == 0
    assert blocks(tuner) == [128, 128, 128]
