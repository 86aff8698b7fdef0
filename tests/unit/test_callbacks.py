"""The hook for training loops, with a loop of its own; and what the callbacks need none of the packages for."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from stub_kernels import FakeTensor, StubKernel, autotuner, launch
from stub_kernels import configs as stub_configs

import tuning
from tuning import AutotunePolicy, installation
from tuning.callbacks import TrainingHook, _lazy, hf, lightning
from tuning.callbacks.loops import CHOICES_FILE, STATE_KEY
from tuning.manifest import read_manifest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _clean():
    yield
    tuning.uninstall()


def policy(block: int | None = None, **fields: Any) -> AutotunePolicy:
    """Pinned; ``block`` stands for what the tables say."""
    sizes = {} if block is None else {"block_sizes": (("BLOCK", block),)}
    return AutotunePolicy(**{"mode": "pinned", "modules": ("stub_kernels",), **sizes, **fields})


class Model:
    """Launches one kernel for each step, of a new key every other step."""

    def __init__(self) -> None:
        self.stub = StubKernel()
        self.tuner = autotuner(stub_configs(16, 32, 64, num_stages=3), stub=self.stub)

    def step(self, step: int) -> None:
        launch(self.tuner, FakeTensor(), FakeTensor(), step // 2, flag=True)

    @property
    def blocks(self) -> list[int]:
        return [int(dict(config.kwargs)["BLOCK"]) for config in self.stub.launches]


def loop(hook: TrainingHook, model: Model, steps: range, state: dict[str, Any] | None = None) -> dict[str, Any]:
    """A loop as people write them: resume, step, check, save."""
    with hook:
        if state is not None:
            hook.load_state_dict(json.loads(json.dumps(state)))
        for step in steps:
            model.step(step)
            hook.after_step(step)
        return {"weights": 0, **hook.state_dict()}


@pytest.fixture
def checks(monkeypatch):
    """Steps at which ranks were compared."""
    seen: list[int | None] = []
    monkeypatch.setattr(
        installation.Installation, "verify", lambda self, group=None, *, step=None: seen.append(step) is None
    )
    return seen


def test_a_loop_installs_checks_leaves_a_manifest_and_uninstalls(tmp_path, checks):
    model = Model()
    loop(TrainingHook(policy(32, verify_every=2, manifest_path=str(tmp_path / "run.json"))), model, range(1, 6))
    assert model.blocks == [32] * 5
    assert checks == [2, 4]
    assert tuning.active_policy() is None
    assert len(read_manifest(tmp_path / "run.json").choices) == 3


def test_a_resumed_loop_keeps_its_choices():
    state = loop(TrainingHook(policy(32)), Model(), range(1, 4))
    model = Model()
    loop(TrainingHook(policy(64)), model, range(2, 6), state)
    assert model.blocks == [32, 32, 64, 64]


def test_a_step_is_checked_once_though_told_again(checks):
    hook = TrainingHook(policy(verify_every=2))
    hook.start()
    assert [hook.after_step(step) for step in (1, 2, 2, 3, 4)] == [None, True, None, None, True]
    assert checks == [2, 4]


def test_without_a_policy_it_uses_what_is_installed_and_leaves_it_there():
    with tuning.install(policy(32)) as installed:
        hook = TrainingHook()
        assert hook.start() is installed
        assert hook.start() is installed
        hook.finish()
        assert tuning.active_policy() is installed.policy
    with pytest.raises(tuning.TuningError, match="no policy is installed; give the hook a policy"):
        TrainingHook().start()


def test_a_policy_that_takes_its_place_is_named():
    hook = TrainingHook(policy())
    hook.start()
    with tuning.install(policy()) as other:
        with pytest.raises(tuning.TuningError, match="no longer installed"):
            hook.start()
        hook.finish()
        assert tuning.active_policy() is other.policy


@pytest.mark.parametrize("call", [lambda hook: hook.after_step(1), lambda hook: hook.state_dict()])
def test_what_comes_before_start_is_an_error(call):
    with pytest.raises(tuning.TuningError, match="before start; call start"):
        call(TrainingHook(policy()))


def test_finishing_twice_or_unstarted_does_nothing():
    hook = TrainingHook(policy())
    hook.finish()
    hook.start()
    hook.finish()
    hook.finish()
    assert hook.installation is None


@pytest.mark.parametrize("fields", [{"mode": "auto"}, {"chaos": True}])
def test_where_nothing_can_be_carried_the_state_is_empty(tmp_path, fields):
    with TrainingHook(policy(**fields)) as hook:
        assert hook.state_dict() == {STATE_KEY: ""}
        hook.load_state_dict({STATE_KEY: ""})
        hook.load_state_dict({})
        hook.save(tmp_path)
        assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_with_choices_is_not_resumed_in_a_mode_that_times():
    state = loop(TrainingHook(policy(32)), Model(), range(1, 4))
    with TrainingHook(policy(mode="auto")) as hook, pytest.raises(tuning.PolicyError, match="load_state_dict needs"):
        hook.load_state_dict(state)


@pytest.mark.parametrize("state", [{}, {STATE_KEY: ""}])
def test_a_checkpoint_without_choices_is_an_error_unless_told_otherwise(caplog, state):
    with TrainingHook(policy()) as hook, pytest.raises(tuning.TuningError, match="resuming without the choices"):
        hook.load_state_dict(state)
    with TrainingHook(policy(), require_choices=False) as hook, caplog.at_level(logging.WARNING, logger="tuning"):
        hook.load_state_dict(state)
    assert "resuming without the choices" in caplog.text


def test_the_file_of_a_checkpoint_and_its_name_are_on_the_disk(tmp_path, monkeypatch):
    steps = []
    sync, rename = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (steps.append("sync"), sync(handle))[1])
    monkeypatch.setattr(os, "replace", lambda old, new: (steps.append("replace"), rename(old, new))[1])
    with TrainingHook(policy(32)) as hook:
        Model().step(1)
        hook.save(tmp_path)
    assert steps == ["sync", "replace", "sync"]


def test_a_file_in_the_checkpoints_folder(tmp_path):
    with TrainingHook(policy(32)) as hook:
        Model().step(1)
        hook.save(tmp_path, write=False)
        assert list(tmp_path.iterdir()) == []
        hook.save(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == [CHOICES_FILE]
        with pytest.raises(tuning.TuningError, match="cannot be written"):
            hook.save(tmp_path / "missing")
    model = Model()
    with TrainingHook(policy(64)) as hook:
        hook.load(tmp_path)
        model.step(1)
        with pytest.raises(tuning.TuningError, match=f"missing/{CHOICES_FILE} has none"):
            hook.load(tmp_path / "missing")
    assert model.blocks == [32]


@pytest.mark.parametrize("content", [b"{", b"\xff", b"[1]"])
def test_a_damaged_file_is_an_error_that_names_it_or_the_place(tmp_path, content):
    (tmp_path / CHOICES_FILE).write_bytes(content)
    with TrainingHook(policy(), require_choices=False) as hook, pytest.raises(tuning.TableError) as caught:
        hook.load(tmp_path)
    assert "\n" not in str(caught.value)
    assert caught.value.where == "$.format" or str(tmp_path) in str(caught.value)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torchs_distributed_checkpoint_brings_the_state_back(tmp_path):
    """It restores into what the object holds before it is loaded, which is next to nothing."""
    import torch.distributed.checkpoint as dcp

    class Trainer:
        """Keeps its state as torchtitan's does."""

        def __init__(self, hook: TrainingHook) -> None:
            self.hook, self.step = hook, 0

        def state_dict(self) -> dict[str, Any]:
            return {"step": self.step, **self.hook.state_dict()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.step = state["step"]
            self.hook.load_state_dict(state)

    with TrainingHook(policy(32)) as hook:
        for step in (1, 2):
            Model().step(step)
        trainer = Trainer(hook)
        trainer.step = 2
        dcp.save({"train_state": trainer}, checkpoint_id=tmp_path, no_dist=True)
    model = Model()
    with TrainingHook(policy(64)) as hook:
        trainer = Trainer(hook)
        dcp.load({"train_state": trainer}, checkpoint_id=tmp_path, no_dist=True)
        for step in (1, 2, 4):
            model.step(step)
    assert trainer.step == 2
    assert model.blocks == [32, 32, 64]


# -- the callbacks, without their packages --


def test_importing_them_imports_no_trainer():
    program = (
        "import sys\nimport tuning.callbacks.hf, tuning.callbacks.lightning\n"
        "print([n for n in ('transformers', 'lightning', 'pytorch_lightning', 'torch', 'triton') if n in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("module", "packages"),
    [(hf, ["transformers"]), (lightning, ["lightning", "lightning.pytorch", "pytorch_lightning"])],
)
def test_a_missing_package_is_named(monkeypatch, module, packages):
    for package in packages:
        monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(vars(module), "TuningCallback", raising=False)
    with pytest.raises(tuning.TuningError, match=rf"needs {packages[0]}: .* pip install {packages[0]}") as caught:
        module.TuningCallback  # noqa: B018
    assert "\n" not in str(caught.value)
    with pytest.raises(AttributeError, match="no attribute 'Other'"):
        module.Other  # noqa: B018


def test_of_two_packages_the_one_in_use_is_taken(monkeypatch):
    first, second = type("Callback", (), {}), type("Callback", (), {})
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.setitem(sys.modules, "pytorch_lightning", SimpleNamespace(Callback=second))
    bases = [("lightning.pytorch", "Callback"), ("pytorch_lightning", "Callback")]
    assert issubclass(_lazy.make_callback(lightning._Events, "m", bases, "lightning"), second)
    monkeypatch.setitem(sys.modules, "lightning.pytorch", SimpleNamespace(Callback=first))
    assert issubclass(_lazy.make_callback(lightning._Events, "m", bases, "lightning"), first)


def test_the_folder_of_a_checkpoint_is_taken_only_if_it_is_the_one_resumed_from(tmp_path):
    """Another run has left a checkpoint of the same step under the output folder."""
    log = [{"loss": 1.0, "step": 2}, {"loss": float("nan"), "step": 4}]
    folder = tmp_path / "checkpoint-4"
    folder.mkdir()
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 4, "log_history": log}))
    with TrainingHook(policy(32)) as hook:
        Model().step(1)
        hook.save(folder)
    args = SimpleNamespace(output_dir=str(tmp_path), resume_from_checkpoint=None)

    def resume(state: Any, **options: Any) -> list[int]:
        callback, model = hf._Events(policy(64), **options), Model()
        try:
            callback.on_init_end(args, state, None)
            callback.on_train_begin(args, state, None)
            model.step(1)
        finally:
            callback.on_train_end(args, state, None)
        return model.blocks

    same = SimpleNamespace(global_step=4, log_history=json.loads(json.dumps(log)))
    other = SimpleNamespace(global_step=4, log_history=log[:1])
    assert resume(same) == [32]
    with pytest.raises(tuning.TuningError, match=r"the checkpoint of step 4 is not .*checkpoint-4"):
        resume(other)
    assert resume(other, require_choices=False) == [64]
    assert resume(other, checkpoint=folder) == [32]
    assert resume(SimpleNamespace(global_step=0, log_history=[])) == [64]
