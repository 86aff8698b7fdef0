"""The seam on the real autotuner: what is launched, when, with which state left behind."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
import triton
from stub_kernels import Bench, FakeTensor, StubKernel, autotuner, configs, launch
from triton.language import constexpr as C
from triton.runtime.autotuner import Autotuner, Heuristics
from triton.runtime.errors import OutOfResources

from tuning._launch_key import constexpr_names
from tuning.interception import AutotunerFacts, Interception, facts, find_autotuner, kernel_name, source_hash
from tuning.spec import Choice, Kernel, Key, LaunchConfig, TuningRecord

pytestmark = pytest.mark.stub


@dataclass
class Decision:
    choice: Choice
    order: Sequence[Any]


@dataclass
class Recorder:
    """Callbacks that choose by BLOCK and keep everything they are told."""

    block: Any = 32
    treatment: str = "pinned"
    choices: list[Choice] = field(default_factory=list)
    records: list[TuningRecord] = field(default_factory=list)
    facts: list[AutotunerFacts] = field(default_factory=list)
    decisions: list[Key] = field(default_factory=list)
    benchmarks: int = 0

    def reached(self, autotuner: AutotunerFacts) -> Any:
        self.facts.append(autotuner)
        return self.treatment

    def in_scope(self, kernel: str) -> bool:
        return self.treatment != "ignore"

    def decide(self, kernel: Kernel, key: Key, arch: str, candidates: Sequence[Any]) -> Decision:
        self.decisions.append(key)
        block = self.block(key) if callable(self.block) else self.block
        order = sorted(candidates, key=lambda config: (config.kwargs["BLOCK"] != block, config.kwargs["BLOCK"]))
        return Decision(Choice(kernel.qualified_name, key, order[0], "exact", None, arch), order)

    def chosen(self, choice: Choice) -> None:
        self.choices.append(choice)

    def recorded(self, record: TuningRecord) -> None:
        self.records.append(record)

    def benchmarked(self, kernel: str) -> None:
        self.benchmarks += 1


@pytest.fixture
def recorder():
    recorder = Recorder()
    interception = Interception(recorder)
    interception.apply()
    yield recorder
    interception.undo()


def blocks(tuner: Any) -> list[int]:
    return [int(dict(config.kwargs)["BLOCK"]) for config in tuner.fn.launches]


def state(tuner: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(tuner).items() if name != "best_config"}


def test_a_pinned_launch_never_benchmarks(recorder):
    tuner = autotuner(configs(16, 32, 64))
    before = state(tuner)
    for _ in range(3):
        launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
    assert state(tuner) == before
    assert blocks(tuner) == [32, 32, 32]
    assert tuner.do_bench.calls == 0
    assert recorder.benchmarks == 0
    assert len(recorder.decisions) == len(recorder.choices) == 1
    assert tuner.best_config is tuner.configs[1]


def test_the_result_of_the_launch_is_returned(recorder):
    tuner = autotuner(configs(16, 32))
    first = launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
    second = launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
    assert first == second
    assert first.startswith("launched BLOCK=32")


def test_best_config_names_the_launched_config_after_every_launch(recorder):
    recorder.block = lambda key: {"1": 16, "2": 32, "3": 64}[dict(key.values)["n"]]
    tuner = autotuner(configs(16, 32, 64))
    for n in (1, 2, 3, 1, 3, 2, 1):
        launch(tuner, FakeTensor(), FakeTensor(), n, flag=True)
        assert tuner.best_config.kwargs["BLOCK"] == blocks(tuner)[-1] == {1: 16, 2: 32, 3: 64}[n]


def test_two_policies_in_turn(recorder):
    tuner = autotuner(configs(16, 32, 64))
    launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
    other = Interception(Recorder(block=64))
    other.apply()
    launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
    assert tuner.best_config.kwargs["BLOCK"] == 64
    other.undo()
    launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
    assert blocks(tuner) == [32, 64, 32]
    assert tuner.best_config.kwargs["BLOCK"] == 32


def test_dtypes_and_typed_values_are_separate_keys(recorder):
    tuner = autotuner(configs(16, 32))
    for value in (True, 1, 1.0, None, "1", (1,), (True,), 0.0, -0.0):
        for _ in range(2):
            launch(tuner, FakeTensor(), FakeTensor(), value, flag=True)
    launch(tuner, FakeTensor("torch.bfloat16"), FakeTensor(), 1, flag=True)
    assert len({choice.key.text for choice in recorder.choices}) == 10
    assert len(recorder.decisions) == 10


def test_a_dtype_in_place_of_a_tensor_is_its_own_key_at_every_launch(recorder):
    torch = pytest.importorskip("torch")
    tuner = autotuner(configs(16, 32))
    dtypes = [torch.float16, torch.float32, torch.bfloat16]
    for dtype in [*dtypes, *dtypes, FakeTensor("torch.float16")]:
        launch(tuner, FakeTensor(), dtype, 8, flag=True)
    assert [dict(key.dtypes)["y"] for key in recorder.decisions] == ["float16", "float32", "bfloat16"]


def aliased(x, dtype: C, n, BLOCK: C):
    """Names ``constexpr`` otherwise, and by text alone: this module's annotations are not evaluated."""


def test_a_constexpr_under_another_name_is_one(recorder):
    assert constexpr_names(aliased) == {"dtype", "BLOCK"}
    local = C

    def inner(x, dtype: local, BLOCK: no.such.thing):  # noqa: F821
        return local

    assert constexpr_names(inner) == {"dtype"}


def test_a_value_of_a_new_kind_does_not_disturb_keys_already_known(recorder):
    tuner = autotuner(configs(16, 32))
    for value in (1, float("nan"), 1, [1, 2], 1, [1, 2], float("nan")):
        launch(tuner, FakeTensor(), FakeTensor(), value, flag=True)
    assert [dict(choice.key.values)["n"] for choice in recorder.choices] == [
        "1",
        '{"float":"nan"}',
        '{"list":[1,2]}',
    ]
    assert len(recorder.decisions) == 3


def test_keyword_order_does_not_matter(recorder):
    tuner = autotuner(configs(16, 32))
    x, y = FakeTensor("torch.float16"), FakeTensor("torch.float32")
    launch(tuner, x=x, y=y, n=3, flag=True)
    launch(tuner, flag=True, n=3, y=y, x=x)
    launch(tuner, x, n=3, y=y, flag=True)
    launch(tuner, x, y, 3, True)
    assert len(recorder.decisions) == 1
    assert recorder.choices[0].key.dtypes == (("x", "float16"), ("y", "float32"))


def test_no_argument_is_kept_alive(recorder):
    import gc
    import weakref

    tuner = autotuner(configs(16, 32), key=("n", "x"))
    x = FakeTensor()
    ref = weakref.ref(x)
    for _ in range(3):
        launch(tuner, x, FakeTensor(), 8, flag=True)
    del x
    tuner.fn.launches.clear()
    gc.collect()
    assert ref() is None


def test_a_recorded_launch_keeps_no_argument_until_a_collection(recorder):
    import gc
    import weakref

    recorder.treatment = "record"
    tuner = autotuner(configs(16, 32))
    launch(tuner, FakeTensor(), FakeTensor(), 7, flag=True)  # what happens once in a process is not looked at
    gc.collect()
    gc.disable()
    try:
        x = FakeTensor()
        ref = weakref.ref(x)
        launch(tuner, x, FakeTensor(), 8, flag=True)
        del x
        assert ref() is None
    finally:
        gc.enable()


def test_autotuners_are_forgotten_when_they_die():
    import gc

    interception = Interception(Recorder())
    interception.apply()
    try:
        for _ in range(5):
            launch(autotuner(configs(16, 32)), FakeTensor(), FakeTensor(), 8, flag=True)
        gc.collect()
        assert len(interception._plans) == 0
    finally:
        interception.undo()


def test_undo_restores_exactly_what_was_there():
    names = ("run", "warmup", "_bench")
    before = {name: vars(Autotuner)[name] for name in names}
    interception = Interception(Recorder())
    interception.apply()
    assert all(vars(Autotuner)[name] is not before[name] for name in names)
    interception.undo()
    assert {name: vars(Autotuner)[name] for name in names} == before
    tuner = autotuner(configs(16, 32, 64), bench=None)
    launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
    assert tuner.do_bench.calls == 3


@pytest.mark.parametrize(
    ("spec", "module", "expected"),
    [
        ("pkg.train", "__main__", "pkg.train.kernel"),
        ("pkg.train", "__mp_main__", "pkg.train.kernel"),
        ("__main__", "__main__", "__main__.kernel"),
        (None, "__main__", "__main__.kernel"),
        (None, "__mp_main__", "__main__.kernel"),
        ("pkg.train", "pkg.other", "pkg.other.kernel"),
    ],
)
def test_a_kernel_of_a_module_that_is_run_has_the_name_that_it_is_imported_by(spec, module, expected):
    """``python -m pkg.train`` has a spec with the name; a folder's is ``__main__``, and a script has none."""
    names: dict[str, Any] = {"__spec__": spec and ModuleSpec(spec, None), "__name__": module}
    exec("def kernel(): pass", names)
    assert kernel_name(names["kernel"]) == expected


def test_undo_leaves_somebody_elses_patch_alone(caplog, monkeypatch):
    interception = Interception(Recorder())
    interception.apply()
    ours = Autotuner.run

    def theirs(self, *args, **kwargs):
        return ours(self, *args, **kwargs)

    monkeypatch.setattr(Autotuner, "run", theirs)
    original = interception._patches[0].original
    interception.undo()
    assert Autotuner.run is theirs
    assert "patched by somebody else" in caplog.text
    tuner = autotuner(configs(16, 32, 64))
    launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
    assert tuner.do_bench.calls == 3, "ours passes through once undone"
    monkeypatch.setattr(Autotuner, "run", original)


class Subclass(Autotuner):
    def run(self, *args: Any, **kwargs: Any) -> Any:
        return super().run(*args, **kwargs)


class Replaced(Autotuner):
    def run(self, *args: Any, **kwargs: Any) -> Any:
        return None


def test_subclasses_that_call_through_are_covered(recorder):
    tuner = autotuner(configs(16, 32, 64), kind=Subclass)
    launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
    launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
    assert blocks(tuner) == [32, 32]
    assert tuner.do_bench.calls == 0


def test_facts_tell_a_subclass_that_replaces_run_from_one_that_calls_through():
    assert facts(autotuner(configs(16, 32), kind=Subclass)).calls_through
    replaced = facts(autotuner(configs(16, 32), kind=Replaced))
    assert replaced.own_run
    assert not replaced.calls_through
    plain = facts(autotuner(configs(16, 32)))
    assert plain.calls_through
    assert not plain.own_run


@pytest.mark.parametrize("inside", [True, False])
def test_heuristics_on_either_side(recorder, inside):
    stub = StubKernel()
    values = {"flag": lambda args: args["n"] > 4}
    if inside:
        tuner = autotuner(configs(16, 32), stub=Heuristics(stub, stub.arg_names, values))
        top = tuner
    else:
        tuner = autotuner(configs(16, 32), stub=stub)
        top = Heuristics(tuner, stub.arg_names, values)
    for _ in range(2):
        launch(top, FakeTensor(), FakeTensor(), 8)
    assert [int(dict(config.kwargs)["BLOCK"]) for config in stub.launches] == [32, 32]
    assert tuner.do_bench.calls == 0
    found = find_autotuner(top)
    assert found is not None
    assert found[0] is tuner
    assert found[1] == (() if inside else ("Heuristics",))


def test_config_hooks_run_on_every_launch_with_the_arguments_by_name(recorder):
    seen = []
    candidates = [
        triton.Config(
            {"BLOCK": block}, pre_hook=lambda named, block=block: seen.append((block, named["n"], named["BLOCK"]))
        )
        for block in (16, 32)
    ]
    tuner = autotuner(candidates)
    for _ in range(3):
        launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
    assert seen == [(32, 8, 32)] * 3


def test_reset_and_restore_never_run_when_pinned(recorder):
    """In-place kernels: one launch, and neither argument is touched by anybody else."""
    stub = StubKernel(effect=lambda named: setattr(named["y"], "value", named["y"].value + named["x"].value))
    tuner = autotuner(configs(16, 32), stub=stub, reset_to_zero=["y"], restore_value=["y"])
    y = FakeTensor(value=10.0)
    launch(tuner, FakeTensor(value=1.0), y, 8, flag=True)
    assert y.value == 11.0
    launch(tuner, FakeTensor(value=1.0), y, 8, flag=True)
    assert y.value == 12.0


def test_a_single_config_is_left_to_triton(recorder):
    tuner = autotuner(configs(16))
    launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
    assert blocks(tuner) == [16]
    assert recorder.choices == []


def test_candidates_replaced_after_a_launch_are_noticed(recorder):
    tuner = autotuner(configs(16, 32, 64))
    launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
    tuner.configs = configs(64, 128)
    recorder.block = 128
    launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
    assert blocks(tuner) == [32, 128]


def test_candidates_added_to_a_single_config_are_noticed(recorder):
    tuner = autotuner(configs(16))
    launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
    tuner.configs.append(configs(32)[0])
    launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
    assert tuner.do_bench.calls == 0
    assert blocks(tuner) == [16, 32]


def test_the_kernels_own_pruning_runs_first_and_may_return_new_objects(recorder):
    made = []

    def prune(candidates, named, **kwargs):
        assert named["n"] == 8
        made[:] = configs(64, 32)
        return made

    tuner = autotuner(configs(16, 32, 64), prune_configs_by={"early_config_prune": prune})
    launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
    assert tuner.best_config is made[1]
    assert "nargs" not in vars(tuner) or tuner.nargs is None


def test_many_threads_launch_the_same_new_key_at_once(recorder):
    tuner = autotuner(
        configs(16, 32, 64), prune_configs_by={"early_config_prune": lambda found, named, **kwargs: found}
    )
    before = state(tuner)
    barrier = threading.Barrier(8)
    failures = []

    def work():
        try:
            barrier.wait(10)
            for _ in range(50):
                launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert blocks(tuner) == [32] * 400
    assert len(recorder.choices) == 1
    assert state(tuner) == before


def out_of_resources(*failing: int):
    def fails(config, named):
        return OutOfResources(300, 200, "shared memory") if int(dict(config.kwargs)["BLOCK"]) in failing else None

    return fails


def test_a_config_out_of_resources_falls_back_in_order_and_is_remembered(recorder, caplog):
    stub = StubKernel(fails=out_of_resources(32, 16))
    tuner = autotuner(configs(16, 32, 64, 128), stub=stub)
    with caplog.at_level(logging.WARNING, "tuning"):
        for _ in range(4):
            launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
    assert blocks(tuner) == [64] * 4
    assert tuner.best_config.kwargs["BLOCK"] == 64
    assert len(caplog.records) == 1
    assert "OutOfResources" in caplog.text
    (choice,) = recorder.choices
    assert choice.launch_config.kwargs == (("BLOCK", "64"),)
    assert choice.detail.startswith("in place of BLOCK=32")


def test_a_fallback_belongs_to_the_specialization_that_needed_it(recorder):
    """Alignment is not in the key, yet the compiler sees it: only the launches that fail change config."""

    def fails(config, named):
        bad = named["x"].data_ptr() % 16 and int(dict(config.kwargs)["BLOCK"]) == 32
        return OutOfResources(300, 200, "shared memory") if bad else None

    tuner = autotuner(configs(16, 32, 64), stub=StubKernel(fails=fails))
    addresses = [0, 16, 8, 0, 24, 32]
    for address in addresses:
        launch(tuner, FakeTensor(address=address), FakeTensor(), 8, flag=True)
        assert tuner.best_config.kwargs["BLOCK"] == blocks(tuner)[-1]
    assert blocks(tuner) == [16 if address % 16 else 32 for address in addresses]
    assert len(recorder.choices) == 2


def test_a_fallback_on_the_very_first_launch_leaves_later_specializations_pinned(recorder):
    def fails(config, named):
        bad = named["n"] == 1 and int(dict(config.kwargs)["BLOCK"]) == 32
        return OutOfResources(300, 200, "shared memory") if bad else None

    tuner = autotuner(configs(16, 32, 64), key=("flag",), stub=StubKernel(fails=fails))
    for n in (1, 2, 1, 2, 2):
        launch(tuner, FakeTensor(), FakeTensor(), n, flag=True)
    assert blocks(tuner) == [16, 32, 16, 32, 32]
    assert [choice.detail == "" for choice in recorder.choices] == [False, True]


def test_what_replaces_a_config_is_replaced_too_where_it_fails_later(recorder):
    failing = {16}

    def fails(config, named):
        return OutOfResources(9, 1, "shared memory") if int(dict(config.kwargs)["BLOCK"]) in failing else None

    recorder.block = 16
    tuner = autotuner(configs(16, 32, 64), stub=StubKernel(fails=fails))
    launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
    failing.add(32)
    for _ in range(2):
        launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
    assert blocks(tuner) == [32, 64, 64]
    assert [choice.launch_config for choice in recorder.choices] == [
        LaunchConfig.of(tuner.configs[1]),
        LaunchConfig.of(tuner.configs[2]),
    ]


def test_a_fallback_is_for_launches_with_the_same_options(recorder):
    class WithOptions(StubKernel):
        def run(self, *args, option=0, **kwargs):
            if kwargs["BLOCK"] == (32 if option else 16):
                raise OutOfResources(9, 1, "shared memory")
            return super().run(*args, **kwargs)

    recorder.block = 16
    tuner = autotuner(configs(16, 32, 64), stub=WithOptions())
    for option in (0, 1, 0, 1):
        launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True, option=option)
    assert blocks(tuner) == [32, 16, 32, 16]


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("fallen", [False, True])
def test_what_a_hook_raises_is_the_callers_whatever_it_is(recorder, known, fallen):
    broken = OutOfResources(9, 1, "of another kernel")
    raising = not known

    def hook(named):
        if raising:
            raise broken

    recorder.block = 16
    tuner = autotuner(
        [triton.Config({"BLOCK": block}, pre_hook=hook) for block in (16, 32, 64)],
        stub=StubKernel(fails=out_of_resources(*([16] if fallen else []))),
    )
    tuner.configs[0].pre_hook = None if fallen else hook
    if known:
        launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
        raising = True
    with pytest.raises(OutOfResources) as caught:
        launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
    assert caught.value is broken
    assert blocks(tuner) == ([32 if fallen else 16] if known else [])


def test_a_hook_that_a_config_is_given_later_is_called(recorder):
    seen = []
    tuner = autotuner(configs(16, 32))
    launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
    tuner.configs[1].pre_hook = lambda named: seen.append(named["BLOCK"])
    for n in (8, 9):
        launch(tuner, FakeTensor(), FakeTensor(), n, flag=True)
    assert seen == [32, 32]


@pytest.mark.parametrize("change", ["del", "replace"])
def test_candidates_changed_in_place_are_noticed_at_the_next_new_key(recorder, change):
    tuner = autotuner(configs(16, 32))
    launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
    if change == "del":
        del tuner.configs[1]
    else:
        tuner.configs[:] = configs(64, 128)
    left = [16] if change == "del" else [64]
    for n in (9, 8):
        launch(tuner, FakeTensor(), FakeTensor(), n, flag=True)
    assert blocks(tuner) == [32, *left, *left]


def test_when_every_candidate_fails_the_first_error_is_the_callers(recorder):
    tuner = autotuner(configs(16, 32), stub=StubKernel(fails=out_of_resources(16, 32)))
    for _ in range(2):
        with pytest.raises(OutOfResources):
            launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
    assert recorder.choices == []


def test_any_other_error_of_a_launch_passes_through_unchanged(recorder):
    error = RuntimeError("an illegal memory access was encountered")
    failing = [True]
    stub = StubKernel(fails=lambda config, named: error if failing[0] else None)
    tuner = autotuner(configs(16, 32), stub=stub)
    with pytest.raises(RuntimeError) as caught:
        launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
    assert caught.value is error
    failing[0] = False
    launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
    failing[0] = True
    with pytest.raises(RuntimeError) as caught:
        launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
    assert caught.value is error
    assert blocks(tuner) == [32]


def test_a_plain_error_in_a_candidate_that_is_not_chosen_is_never_met(recorder):
    stub = StubKernel(fails=lambda config, named: RuntimeError("no") if dict(config.kwargs)["BLOCK"] != "32" else None)
    tuner = autotuner(configs(16, 32, 64), stub=stub)
    launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
    assert blocks(tuner) == [32]


def test_warmup_compiles_the_chosen_config_only(recorder):
    tuner = autotuner(configs(16, 32, 64))
    tuner.warmup(FakeTensor(), FakeTensor(), 8, flag=True, grid=(1,))
    assert [dict(config.kwargs)["BLOCK"] for config in tuner.fn.compiled] == ["32"]
    launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
    assert len(recorder.decisions) == len(recorder.choices) == 1


def test_a_plain_error_while_warming_up_falls_back(recorder, caplog):
    stub = StubKernel(fails=lambda config, named: RuntimeError("no") if dict(config.kwargs)["BLOCK"] == "32" else None)
    tuner = autotuner(configs(16, 32, 64), stub=stub)
    tuner.warmup(FakeTensor(), FakeTensor(), 8, flag=True, grid=(1,))
    launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
    launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
    assert blocks(tuner) == [16, 16]
    assert caplog.text.count("in place of") == 1


def test_recording_times_every_candidate_once_and_keeps_it(recorder):
    recorder.treatment = "record"
    stub = StubKernel()
    tuner = autotuner(configs(16, 32, 64), stub=stub, bench=Bench({16: 3.0, 32: 2.0, 64: 1.0}, stub))
    for _ in range(3):
        launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
    (record,) = recorder.records
    assert [timing.times_ms for timing in record.timings] == [(t, t * 0.9, t * 1.1) for t in (3.0, 2.0, 1.0)]
    assert record.winner.kwargs == (("BLOCK", "64"),)
    assert recorder.benchmarks == 3
    assert tuner.best_config.kwargs["BLOCK"] == blocks(tuner)[-1] == 64
    assert recorder.choices[0].source == "timed"


def test_recording_times_afresh_what_triton_has_timed_before(recorder):
    recorder.treatment = "ignore"
    tuner = autotuner(configs(16, 32))
    launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
    calls = tuner.do_bench.calls
    fresh = Recorder(treatment="record")
    interception = Interception(fresh)
    interception.apply()
    try:
        launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
    finally:
        interception.undo()
    assert tuner.do_bench.calls == calls + 2
    assert len(fresh.records) == 1


def test_recording_keeps_a_failing_candidate_with_its_reason_and_goes_on(recorder):
    recorder.treatment = "record"

    def fails(config, named):
        block = dict(config.kwargs)["BLOCK"]
        if block == "16":
            return OutOfResources(300, 200, "shared memory")
        return RuntimeError("ptxas fell over") if block == "32" else None

    tuner = autotuner(configs(16, 32, 64), stub=StubKernel(fails=fails))
    launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
    (record,) = recorder.records
    assert [timing.times_ms is None for timing in record.timings] == [True, True, False]
    assert "shared memory" in (record.timings[0].error or "")
    assert record.timings[1].error == "RuntimeError: ptxas fell over"
    assert blocks(tuner)[-1] == 64


def test_recording_gives_values_that_share_a_slot_of_triton_their_own_record(recorder):
    recorder.treatment = "record"
    tuner = autotuner(configs(16, 32))
    for value in (True, 1, 1.0, 2, 1):
        launch(tuner, FakeTensor(), FakeTensor(), value, flag=True)
    assert tuner.do_bench.calls == 4, "two slots of two candidates"
    assert [(dict(r.key.values)["n"], r.shared) for r in recorder.records] == [
        ("true", False),
        ("1", True),
        ('{"float":"1.0"}', True),
        ("2", False),
    ]
    assert recorder.records[0].timings == recorder.records[1].timings


def test_recording_names_an_argument_outside_the_key_that_changes(recorder, caplog):
    recorder.treatment = "record"
    tuner = autotuner(configs(16, 32))
    for flag in (True, True, False, False):
        launch(tuner, FakeTensor(), FakeTensor(), 8, flag=flag)
    assert caplog.text.count("'flag' is not in the autotuner's key") == 1
    assert "'flag'" in recorder.records[-1].note


def test_recording_from_many_threads_records_each_key_once(recorder):
    recorder.treatment = "record"

    class Slow(Bench):
        """Lets other threads come in between, which a stopwatch that takes no time does not."""

        def __call__(self, call: Any, quantiles: Any) -> Any:
            time.sleep(0.001)
            return super().__call__(call, quantiles)

    tuners = [autotuner(configs(16, 32), bench=Slow()) for _ in range(4)]
    failures = []

    def work(offset):
        try:
            for step in range(60):
                tuner = tuners[(step + offset) % 4]
                launch(tuner, FakeTensor(), FakeTensor(), (step + offset) % 10, flag=True)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(offset,)) for offset in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    # Of 4 autotuners and 10 keys the 20 pairs that are launched, each by all threads, are timed and recorded once.
    assert sum(tuner.do_bench.calls for tuner in tuners) == 2 * len(recorder.records)
    assert sorted(Counter(record.key.text for record in recorder.records).values()) == [2] * 10
    for tuner in tuners:
        assert tuner.do_bench.calls == 2 * 5


def test_observing_notes_tritons_own_choice_once_per_key(recorder):
    recorder.treatment = "observe"
    stub = StubKernel()
    tuner = autotuner(configs(16, 32), stub=stub, bench=Bench({16: 2.0, 32: 1.0}, stub))
    for n in (8, 8, 9, 8):
        launch(tuner, FakeTensor(), FakeTensor(), n, flag=True)
    assert [choice.source for choice in recorder.choices] == ["timed", "timed"]
    assert recorder.benchmarks == 4
    assert recorder.choices[0].launch_config.kwargs == (("BLOCK", "32"),)


def test_an_error_while_deciding_reaches_the_caller_and_leaves_nothing(recorder):
    tuner = autotuner(configs(16, 32))
    before = state(tuner)

    def refuse(*args):
        raise LookupError("no entry")

    recorder.decide = refuse
    with pytest.raises(LookupError, match="no entry"):
        launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
    assert blocks(tuner) == []
    assert state(tuner) == before


def test_the_source_hash_ignores_decorators_and_sees_the_body():
    def one(x):
        return x + 1

    def two(x):
        return x + 2

    assert source_hash(one) != source_hash(two)
    assert source_hash(len) is None
    assert source_hash(one) == source_hash(one)


def test_configs_that_differ_in_one_launch_field_are_told_apart(recorder):
    fields = [{"num_ctas": 2}, {"maxnreg": 64}]
    if "ir_override" in vars(triton.Config({})):
        fields.append({"ir_override": "a.ttir"})
    for extra in fields:
        one, two = triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 32}, **extra)
        assert LaunchConfig.of(one).text != LaunchConfig.of(two).text


def test_the_arch_is_cpu_without_a_driver_and_a_failing_drivers_error_is_the_callers(monkeypatch):
    from triton.runtime.driver import driver

    from tuning.interception import current_arch

    class Target:
        backend, arch = "cuda", 90

    class Driver:
        def get_current_target(self):
            if failing:
                raise RuntimeError("CUDA error: unspecified launch failure")
            return Target

    def none(self):
        raise RuntimeError("0 active drivers")

    failing = False
    monkeypatch.setattr(type(driver), "active", property(lambda self: Driver()), raising=False)
    assert current_arch() == "sm90"
    failing = True
    with pytest.raises(RuntimeError, match="unspecified launch failure"):
        current_arch()
    monkeypatch.setattr(type(driver), "active", property(none), raising=False)
    assert current_arch() == "cpu"


@pytest.mark.parametrize("treatment", ["pinned", "record"])
def test_candidates_that_appear_in_place_are_noticed(recorder, treatment):
    recorder.treatment = treatment
    tuner = autotuner(configs(16))
    launch(tuner, FakeTensor(), FakeTensor(), 1, flag=True)
    tuner.configs[:] = configs(16, 32, 64)
    launch(tuner, FakeTensor(), FakeTensor(), 2, flag=True)
    assert len(recorder.choices) == 1
    assert tuner.do_bench.calls == (0 if treatment == "pinned" else 3)
    assert len(recorder.records) == (0 if treatment == "pinned" else 1)


def test_warming_up_one_specialization_leaves_the_others_their_config(recorder):
    def fails(config, named):
        bad = named["x"].data_ptr() % 16 and int(dict(config.kwargs)["BLOCK"]) == 32
        return RuntimeError("no") if bad else None

    tuner = autotuner(configs(16, 32, 64), stub=StubKernel(fails=fails))
    launch(tuner, FakeTensor(address=0), FakeTensor(), 1, flag=True)
    for _ in range(2):
        tuner.warmup(FakeTensor(address=8), FakeTensor(), 1, flag=True, grid=(1,))
        launch(tuner, FakeTensor(address=0), FakeTensor(), 1, flag=True)
        launch(tuner, FakeTensor(address=8), FakeTensor(), 1, flag=True)
    assert blocks(tuner) == [32, 32, 16, 32, 16]
    assert [dict(config.kwargs)["BLOCK"] for config in tuner.fn.compiled] == ["16", "16"]
    assert len(recorder.choices) == 2


class WithProperty(Autotuner):
    @property
    def configs(self):
        return self.__dict__["_configs"]

    @configs.setter
    def configs(self, value):
        self.__dict__["_configs"] = value


def test_a_subclass_that_keeps_its_candidates_behind_a_property_is_pinned(recorder):
    tuner = autotuner(configs(16, 32, 64), kind=WithProperty)
    for _ in range(2):
        launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
    assert tuner.do_bench.calls == 0
    assert blocks(tuner) == [32, 32]


def test_a_dtype_that_cannot_be_hashed_is_no_obstacle(recorder):
    x = FakeTensor()
    x.dtype = ["float32"]
    tuner = autotuner(configs(16, 32))
    for _ in range(3):
        launch(tuner, x, FakeTensor(), 8, flag=True)
    assert blocks(tuner) == [32] * 3
    assert len(recorder.decisions) == 1


def test_an_error_that_cannot_say_what_it_is_is_recorded_by_its_type(recorder):
    class Mute(RuntimeError):
        def __str__(self):
            raise ValueError("no")

    recorder.treatment = "record"
    stub = StubKernel(fails=lambda config, named: Mute() if dict(config.kwargs)["BLOCK"] == "16" else None)
    tuner = autotuner(configs(16, 32), stub=stub)
    launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
    assert recorder.records[0].timings[0].error == "Mute"


def test_a_key_value_of_unknown_type_is_said_once(recorder, caplog):
    class Thing:
        pass

    tuner = autotuner(configs(16, 32))
    for _ in range(3):
        launch(tuner, FakeTensor(), FakeTensor(), Thing(), flag=True)
    assert len(recorder.decisions) == 1
    assert caplog.text.count("whose content has no stable text") == 1
