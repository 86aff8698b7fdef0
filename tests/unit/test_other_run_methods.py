"""Subclasses of Triton's autotuner whose ``run`` need not call the one it replaces, and pruners of all kinds."""

from __future__ import annotations

import functools
import logging
import types
from typing import Any

import pytest
import triton
from stub_kernels import FakeTensor, autotuner, configs, launch
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import OutOfResources

import tuning
from tuning import AutotunePolicy
from tuning.interception import facts
from tuning.inventory import judge
from tuning.journal import read_journal
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


class Mixin:
    """Brings the method, and is no autotuner itself."""

    run = Closed.run


class FromMixin(Mixin, Autotuner):
    pass


class BelowMixin(FromMixin):
    """Inherits what its parent has from the mixin."""


class PrunesBySuper(Autotuner):
    """Names both ``super`` and ``run``, and never puts one after the other."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        self.nargs = dict(zip(self.arg_names, args, strict=False))
        left = super().prune_configs(kwargs)
        times = {id(config): self._bench(*args, config=config, **kwargs) for config in left if len(left) > 1}
        self.best_config = min(left, key=lambda config: times.get(id(config), [0.0])[0])
        return self.fn.run(*args, **kwargs, **self.best_config.all_kwargs())


_RUN_OF_CLOSED = Closed.run


def _own_way(self: Any, *args: Any, **kwargs: Any) -> Any:
    return _RUN_OF_CLOSED(self, *args, **kwargs)


class InOneBranch(Autotuner):
    def run(self, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("flag") is None:
            return super().run(*args, **kwargs)
        return _own_way(self, *args, **kwargs)


class Partial(Autotuner):
    run = functools.partialmethod(_own_way)


class ByItsOwnClock(Autotuner):
    """Calls the benchmarker itself, and not through ``_bench``."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        if args[2] not in self.cache:
            timed = [
                (
                    self.do_bench(
                        lambda config=config: self.fn.run(*args, **kwargs, **config.all_kwargs()),
                        quantiles=(0.5, 0.2, 0.8),
                    )[0],
                    at,
                )
                for at, config in enumerate(self.configs)
            ]
            self.cache[args[2]] = self.configs[min(timed)[1]]
        self.best_config = self.cache[args[2]]
        return self.fn.run(*args, **kwargs, **self.best_config.all_kwargs())


_RUN_BY_ITS_OWN_CLOCK = ByItsOwnClock.run


class Silences(Autotuner):
    """Keeps others from seeing that a subclass is defined."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        pass


class Plain(Autotuner):
    pass


CLOSED = (Closed, FromMixin, BelowMixin, PrunesBySuper, InOneBranch, Partial)


@pytest.fixture(autouse=True)
def _restores_everything():
    kinds = (Autotuner, Stubborn, ByItsOwnClock, Plain, Silences, Mixin, *CLOSED)
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

        own = Late.run
        tuner = autotuner(configs(64, 32), kind=Late)
        assert Late.run.__wrapped__ is own
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
    assert "Stubborn.run did not call Triton's and launched BLOCK=16" in said[0]


@pytest.mark.parametrize("kind", CLOSED)
def test_each_way_of_not_calling_through_is_pinned_by_the_one_candidate_that_it_is_given(kind: Any) -> None:
    tuner = autotuner(configs(64, 32), kind=kind)
    with pinned() as installed:
        for n in (8, 9, 8):
            run(tuner, n)
        assert [choice.source for choice in installed.choices] == ["cheapest"] * 2
        assert installed.benchmarks == 0
        assert installed.manifest().notices == ()
        assert not facts(tuner).calls_through
        with pinned(block_sizes=(("BLOCK", 64),)):
            run(tuner)
    assert blocks(tuner) == [32, 32, 32, 64]


def test_a_mixin_serves_its_other_users_as_before() -> None:
    with pinned():
        autotuner(configs(64, 32), kind=FromMixin)
        assert Mixin.run is _RUN_OF_CLOSED
        assert "run" not in vars(BelowMixin)


def test_one_whose_definition_nobody_sees_is_pinned_when_an_object_is_made() -> None:
    with pinned() as installed:

        class Unseen(Silences):
            run = _own_way

        tuner = autotuner(configs(64, 32), kind=Unseen)
        run(tuner)
        assert installed.benchmarks == 0
    assert vars(Unseen)["run"] is _own_way
    assert blocks(tuner) == [32]


def _on_the_class(tuner: Any) -> None:
    Plain.run = _own_way  # type: ignore[method-assign]


def _on_the_object(tuner: Any) -> None:
    tuner.run = types.MethodType(_own_way, tuner)


def _on_tritons(tuner: Any) -> None:
    Autotuner.run = _own_way  # type: ignore[method-assign]


def _by_its_own_clock(tuner: Any) -> None:
    Plain.run = _RUN_BY_ITS_OWN_CLOCK  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("change", "by"),
    [
        (_on_the_class, "test_other_run_methods.Plain.run times"),
        (_on_the_object, "the run that was set on a test_other_run_methods.Plain object times"),
        (_on_tritons, "what replaced Autotuner.run after the policy was installed times"),
        (_by_its_own_clock, "test_other_run_methods.Plain.run times"),
    ],
)
@pytest.mark.parametrize("mode", ["pinned", "record", "auto"])
def test_what_is_timed_past_the_policy_is_counted_and_named(
    change: Any, by: str, mode: Any, caplog: pytest.LogCaptureFixture, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuner = autotuner(configs(64, 32), kind=Plain)
    path = str(tmp_path / "run") if mode == "record" else None
    policy = AutotunePolicy(mode=mode, modules=("stub_kernels",), record_path=path)
    with tuning.install(policy) as installed, monkeypatch.context() as patch:
        patch.setattr(Autotuner, "run", vars(Autotuner)["run"])
        change(tuner)
        run(tuner)
        run(tuner)
        manifest = installed.manifest()
        if "run" in vars(Plain):
            del Plain.run
    assert tuner.do_bench.calls == 2
    assert manifest.benchmarks == (("stub_kernels.kernel", 2),)
    said = [record for record in caplog.records if "past the policy" in record.message]
    if mode == "auto":
        assert said == []
        return
    assert [record.levelno for record in said] == [logging.WARNING]
    assert said[0].message.startswith(f"stub_kernels.kernel: {by} candidates past the policy: ")
    assert ("NOT pinned" if mode == "pinned" else "nothing of that is journaled") in said[0].message
    assert [kind for kind, _ in manifest.notices] == ["unreached"]
    assert [(use.state, use.reason) for use in manifest.autotuners] == [("timed", "its run chooses past the policy")]


def test_a_run_on_the_object_is_never_judged_pinned() -> None:
    tuner = autotuner(configs(64, 32), kind=Plain)
    _on_the_object(tuner)
    state, reason = judge(facts(tuner), AutotunePolicy(mode="pinned", modules=("stub_kernels",)))
    assert state == "not covered"
    assert "set on the object" in reason


def test_one_with_a_clock_of_its_own_times_its_one_candidate_once_for_each_key_and_is_counted() -> None:
    tuner = autotuner(configs(64, 32), kind=ByItsOwnClock)
    with pinned() as installed:
        for n in (8, 8, 9, 8):
            run(tuner, n)
        assert installed.manifest().benchmarks == (("stub_kernels.kernel", 2),)
        assert {str(choice.launch_config) for choice in installed.choices} == {"BLOCK=32 num_warps=4 num_stages=3"}
        assert tuner.do_bench.calls == 2
    assert {dict(config.kwargs)["BLOCK"] for config in tuner.fn.launches} == {"32"}
    assert tuner.do_bench.calls == 2


def test_what_a_benchmark_of_its_own_finds_is_recorded(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    class OwnBench(Autotuner):
        def _bench(self, *args: Any, config: Any, **meta: Any) -> Any:
            self.do_bench(lambda: self.fn.run(*args, **meta, **config.all_kwargs()), quantiles=(0.5, 0.2, 0.8))
            return [float(config.kwargs["BLOCK"])] * 3

    class Doubled(Autotuner):
        def _bench(self, *args: Any, config: Any, **meta: Any) -> Any:
            return [2 * time for time in super()._bench(*args, config=config, **meta)]

    policy = AutotunePolicy(mode="record", record_path=str(tmp_path / "run"), modules=("stub_kernels",))
    times: dict[str, list[Any]] = {}
    with tuning.install(policy) as installed:
        for n, kind in enumerate((OwnBench, Doubled)):
            run(autotuner(configs(64, 32), kind=kind), n)
            assert installed.benchmarks == 2 * n + 2
        path = installed.journal_path
    for record in read_journal(path or "").records:
        times[dict(record.key.values)["n"]] = [timing.times_ms for timing in record.timings]
    assert times == {"0": [(64.0,) * 3, (32.0,) * 3], "1": [(2.0, 1.8, 2.2)] * 2}
    assert [record.message for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_pruner_reads_the_arguments_off_its_kernel_as_in_triton() -> None:
    def prune(candidates: list[Any], named: dict[str, Any], **kwargs: Any) -> list[Any]:
        return [config for config in candidates if config.kwargs["BLOCK"] >= tuner.nargs["n"]]

    tuner = autotuner(configs(64, 16, 32), prune_configs_by={"early_config_prune": prune})
    with pinned():
        run(tuner, 32)
        run(tuner, 16)
    assert blocks(tuner) == [32, 16]
    assert "nargs" not in vars(tuner)


def test_recording_does_not_reach_it_and_says_so(tmp_path: Any, caplog: pytest.LogCaptureFixture) -> None:
    tuner = autotuner(configs(64, 32), kind=Closed)
    policy = AutotunePolicy(mode="record", record_path=str(tmp_path / "run"), modules=("stub_kernels",))
    with tuning.install(policy) as installed:
        run(tuner)
        run(tuner)
        assert installed.benchmarks == 2
    assert [record.levelno for record in caplog.records if "is journaled" in record.message] == [logging.WARNING]


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
