"""Outputs looked at while recording: what is found is kept, and a look that fails costs nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from stub_kernels import Bench, FakeTensor, StubKernel, autotuner, configs, launch

import tuning
from tuning._launch_outputs import watch_outputs
from tuning.journal import find_journals, read_journal

pytestmark = pytest.mark.stub


@pytest.fixture(autouse=True)
def _uninstalled() -> Iterator[None]:
    yield
    tuning.uninstall()


def recorded_with(monkeypatch: pytest.MonkeyPatch, prefix: Path, outputs: Any) -> Any:
    """The journal's record of one launch, whose outputs are looked at so."""
    monkeypatch.setattr("tuning.installation.watch_outputs", outputs)
    stub = StubKernel()
    tuner = autotuner(configs(16, 32), stub=stub, bench=Bench({16: 2.0, 32: 1.0}, stub))
    policy = tuning.AutotunePolicy(record_path=str(prefix), modules=("stub_kernels",), check_outputs=True)
    with tuning.install(policy):
        launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
    (path,) = find_journals([prefix])
    (found,) = read_journal(path).records
    return found


def test_what_a_look_at_the_outputs_finds_stands_in_the_journal(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    winners = []

    def outputs(tuner: Any, kernel: Any, args: Any, kwargs: Any) -> Any:
        return lambda winner: winners.append(winner) or "not its own"

    found = recorded_with(monkeypatch, tmp_path / "run", outputs)
    assert found.note == "not its own"
    assert [winner.kwargs["BLOCK"] for winner in winners] == [32]
    assert "not its own" in caplog.text


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_look_at_the_outputs_that_fails_costs_no_recording(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture, when: str
) -> None:
    def fail(*args: Any) -> Any:
        raise MemoryError("no room for copies")

    found = recorded_with(monkeypatch, tmp_path / "run", fail if when == "before" else lambda *args: fail)
    assert len(found.timings) == 2
    assert "no room for copies" in caplog.text
    assert ("no room for copies" in found.note) == (when == "after")


def test_arguments_that_cannot_be_copied_are_recorded_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = recorded_with(monkeypatch, tmp_path / "run", watch_outputs)
    assert (len(found.timings), found.note) == (2, "")
