"""Near ties timed again while recording: which, in which order, what stays of it, and what it is good for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from recordings import journal, record
from stub_kernels import FakeTensor, StubKernel, autotuner, configs, launch

import tuning
from tuning.journal import find_journals, read_journal
from tuning.merge import merge, near_ties
from tuning.spec import TuningRecord

pytestmark = pytest.mark.stub

SCOPE = ("stub_kernels",)


@pytest.fixture(autouse=True)
def _uninstalled() -> Iterator[None]:
    yield
    tuning.uninstall()


class Watch:
    """A stopwatch whose time depends on the block and on how many kernels it has timed before."""

    def __init__(self, stub: StubKernel, time_of: Callable[[int, int], Sequence[float]]) -> None:
        self.stub, self.time_of = stub, time_of
        self.blocks: list[int] = []

    def __call__(self, kernel_call: Callable[[], Any], quantiles: Sequence[float]) -> list[float]:
        kernel_call()
        block = int(dict(self.stub.launches[-1].kwargs)["BLOCK"])
        self.blocks.append(block)
        return list(self.time_of(block, len(self.blocks) - 1))


def recorded(
    folder: Path, time_of: Callable[[int, int], Sequence[float]], *blocks: int, remeasure: bool = True, **options: Any
) -> tuple[TuningRecord, Watch, Any, int]:
    """The record of one key, the stopwatch, the autotuner, and the benchmarks counted."""
    stub = options.pop("stub", None) or StubKernel()
    watch = Watch(stub, time_of)
    tuner = autotuner(configs(*blocks), stub=stub, bench=watch, **options)
    policy = tuning.AutotunePolicy(record_path=str(folder / "rec"), modules=SCOPE, remeasure=remeasure)
    with tuning.install(policy) as installed:
        launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
        benchmarks = installed.benchmarks
    (path,) = find_journals([folder / "rec"])
    (found,) = read_journal(path).records
    return found, watch, tuner, benchmarks


def around(middle: float) -> tuple[float, float, float]:
    return (middle, middle * 0.999, middle * 1.001)


TRUE = {16: 3.0, 32: 1.003, 64: 1.0, 128: 1.006}


def drifting(block: int, count: int) -> tuple[float, float, float]:
    """The device gets slower: each benchmark takes 0.4 % longer than the one before it."""
    return around(TRUE[block] * (1 + 0.004 * count))


def winner(found: TuningRecord) -> int:
    return int(dict(found.winner.kwargs)["BLOCK"])


def middles(found: TuningRecord) -> dict[int, float]:
    return {int(dict(t.config.kwargs)["BLOCK"]): t.times_ms[0] for t in found.timings if t.times_ms}


def test_near_ties_are_timed_again_in_turns(tmp_path: Path) -> None:
    found, watch, tuner, benchmarks = recorded(tmp_path, lambda block, count: around(TRUE[block]), 16, 32, 64, 128)
    forwards, backwards = [32, 64, 128], [128, 64, 32]
    assert watch.blocks == [16, 32, 64, 128, 128, 64, 32, 16, *[*forwards, *backwards] * 3]
    assert benchmarks == len(watch.blocks)
    assert winner(found) == 64
    assert middles(found) == TRUE
    assert tuner.best_config.kwargs["BLOCK"] == 64
    assert int(dict(tuner.fn.launches[-1].kwargs)["BLOCK"]) == 64


def test_without_it_nothing_is_timed_twice(tmp_path: Path) -> None:
    found, watch, _, benchmarks = recorded(tmp_path, drifting, 32, 64, 128, remeasure=False)
    assert watch.blocks == [32, 64, 128]
    assert benchmarks == 3
    assert winner(found) == 32


def test_what_is_no_near_tie_is_timed_twice(tmp_path: Path) -> None:
    found, watch, _, _ = recorded(tmp_path, lambda block, count: around(block), 16, 32, 64)
    assert watch.blocks == [16, 32, 64, 64, 32, 16]
    assert winner(found) == 16


def test_drift_falls_on_all_near_ties_alike(tmp_path: Path) -> None:
    """One after the other, the first listed wins by the drift alone; in turns the fastest does, whatever the order."""
    for number, order in enumerate([(16, 32, 64, 128), (16, 128, 32, 64), (64, 128, 32, 16)]):
        found, _, tuner, _ = recorded(tmp_path / str(number), drifting, *order)
        assert winner(found) == tuner.best_config.kwargs["BLOCK"] == 64
        times = middles(found)
        assert times[32] / times[64] == pytest.approx(1.003, abs=0.0002)
        assert times[16] == pytest.approx(3.0 * (1 + 0.004 * order.index(16)))  # timed once, as it was found


def test_a_candidate_that_was_disturbed_once_is_not_lost(tmp_path: Path) -> None:
    """The fastest is hit by something when it is first timed: it would be no near tie, and never be looked at again."""

    def disturbed(block: int, count: int) -> tuple[float, float, float]:
        return around(TRUE[block] * (1.36 if count == 2 else 1))

    found, watch, tuner, _ = recorded(tmp_path / "with", disturbed, 16, 32, 64, 128)
    assert watch.blocks[2] == 64
    assert winner(found) == tuner.best_config.kwargs["BLOCK"] == 64
    without, _, _, _ = recorded(tmp_path / "without", disturbed, 16, 32, 64, 128, remeasure=False)
    assert winner(without) == 32


def test_the_launch_is_of_the_winner_and_happens_once(tmp_path: Path) -> None:
    """Inputs are restored around each benchmark, the repeated ones too: the kernel's effect is there once."""
    stub = StubKernel(effect=lambda named: setattr(named["x"], "value", named["x"].value + 1))
    x = FakeTensor(value=5.0)
    watch = Watch(stub, drifting)
    tuner = autotuner(configs(32, 64, 128), stub=stub, bench=watch, restore_value=["x"])
    with tuning.install(tuning.AutotunePolicy(record_path=str(tmp_path / "rec"), modules=SCOPE, remeasure=True)):
        launch(tuner, x, FakeTensor(), 8, flag=True)
        assert x.value == 6.0
        launch(tuner, x, FakeTensor(), 8, flag=True)
        assert x.value == 7.0
    assert len(watch.blocks) == len(tuner.fn.launches) - 2 > 3 + 3 + 6 * 2
    assert [int(dict(each.kwargs)["BLOCK"]) for each in tuner.fn.launches[-2:]] == [64, 64]


def test_a_candidate_that_fails_when_it_is_timed_again_has_failed(tmp_path: Path) -> None:
    launches = {64: 0}

    def fails(config: Any, named: dict[str, Any]) -> BaseException | None:
        block = int(dict(config.kwargs)["BLOCK"])
        if block == 64:
            launches[64] += 1
        return RuntimeError("misaligned address") if block == 64 and launches[64] == 3 else None

    found, _, tuner, _ = recorded(
        tmp_path, lambda block, count: around(TRUE[block]), 16, 32, 64, stub=StubKernel(fails=fails)
    )
    assert winner(found) == tuner.best_config.kwargs["BLOCK"] == 32
    (failed,) = [timing for timing in found.timings if timing.times_ms is None]
    assert (dict(failed.config.kwargs)["BLOCK"], failed.error) == ("64", "RuntimeError: misaligned address")


def test_only_recording_remeasures() -> None:
    with pytest.raises(tuning.PolicyError, match="remeasure: expected False, since nothing is recorded") as info:
        tuning.AutotunePolicy(remeasure=True)
    assert info.value.field == "remeasure"


@pytest.mark.parametrize(
    ("times", "expected"),
    [
        ([], ()),
        ([None, None], ()),
        ([None, [1.0, 1.0, 1.0]], (1,)),
        ([[1.0, 1.0, 1.0], [1.009, 1.009, 1.1], [1.02, 1.02, 1.1]], (0, 1)),
        ([[1.0], [1.009], [1.02]], (0, 1)),
        ([[1.05, 1.0, 1.1], [1.2, 1.05, 1.3]], (0, 1)),  # the fastest spreads by 5 %
        ([[2.0, 1.0, 3.0], [1.3, 1.2, 1.4]], (0,)),  # of which 15 % count
        ([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [1.0, 1.0, 1.0]], (0, 1)),
    ],
)
def test_near_ties_are_those_of_a_merge(times: list[Any], expected: tuple[int, ...]) -> None:
    assert near_ties(times) == expected
    blocks = [1 << at for at in range(len(times))]
    found = {block: None if each is None else tuple(each) for block, each in zip(blocks, times, strict=True)}
    if expected:
        (facts,) = merge([journal(record(found))]).keys
        tied = {item.config for item in facts.candidates if item.tied}
        assert tied == {each.config for at, each in enumerate(record(found).timings) if at in expected}
