"""The callbacks in the trainers that they are for: train, save, change the tables, resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from stub_kernels import FakeTensor, StubKernel, autotuner, launch
from stub_kernels import configs as stub_configs

import tuning
from tuning import AutotunePolicy, installation
from tuning.callbacks.loops import CHOICES_FILE, STATE_KEY
from tuning.manifest import read_manifest

# What these packages warn of themselves is theirs.
pytestmark = [pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def _clean():
    yield
    tuning.uninstall()


@pytest.fixture
def checks(monkeypatch):
    """Steps at which ranks were compared."""
    seen: list[int | None] = []
    monkeypatch.setattr(
        installation.Installation, "verify", lambda self, group=None, *, step=None: seen.append(step) is None
    )
    return seen


def policy(block: int, **fields: Any) -> AutotunePolicy:
    """Pinned; ``block`` stands for what the tables say."""
    return AutotunePolicy(mode="pinned", modules=("stub_kernels",), block_sizes=(("BLOCK", block),), **fields)


class Kernel:
    """The real autotuner over a stub, launched in each forward pass with a key per ``n``."""

    def __init__(self) -> None:
        self.stub = StubKernel()
        self.tuner = autotuner(stub_configs(16, 32, 64, num_stages=3), stub=self.stub)

    def __call__(self, n: int) -> None:
        launch(self.tuner, FakeTensor(), FakeTensor(), n, flag=True)

    @property
    def blocks(self) -> list[int]:
        return [int(dict(config.kwargs)["BLOCK"]) for config in self.stub.launches]


def examples() -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.full((4,), float(index)), "labels": torch.tensor(1.0)} for index in range(16)]


# -- Hugging Face --


def hf_trainer(folder: Path, block: int, steps: int, **options: Any) -> tuple[Any, Kernel]:
    import transformers

    from tuning.callbacks.hf import TuningCallback

    kernel = Kernel()

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 1)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
            kernel(8)
            return {"loss": (self.linear(x).squeeze(-1) - labels).square().mean()}

    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=steps,
        save_strategy="steps",
        save_steps=2,
        logging_steps=1,
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    fields = options.pop("policy", {})
    callback = TuningCallback(policy(block, **fields), **options)
    return transformers.Trainer(Model(), arguments, train_dataset=examples(), callbacks=[callback]), kernel


@pytest.mark.peers("transformers", "accelerate")
def test_trainer_installs_checks_saves_and_leaves_a_manifest(tmp_path, checks):
    manifest = tmp_path / "run.json"
    trainer, kernel = hf_trainer(tmp_path / "out", 32, 4, policy={"verify_every": 2, "manifest_path": str(manifest)})
    assert tuning.active_policy() is not None  # as soon as the trainer is made
    trainer.train()
    assert tuning.active_policy() is None
    assert kernel.blocks == [32] * 4
    assert checks == [2, 4]
    assert len(read_manifest(manifest).choices) == 1
    for step in (2, 4):
        state = json.loads((tmp_path / "out" / f"checkpoint-{step}" / CHOICES_FILE).read_text())
        assert [row["config"]["kwargs"] for row in state["choices"]] == [{"BLOCK": 32}]


@pytest.mark.peers("transformers", "accelerate")
def test_trainer_resumes_with_the_choices_of_the_checkpoint(tmp_path):
    out = tmp_path / "out"
    hf_trainer(out, 32, 2)[0].train()
    trainer, kernel = hf_trainer(out, 64, 4)
    trainer.train(resume_from_checkpoint=True)
    assert kernel.blocks == [32, 32]
    trainer, kernel = hf_trainer(tmp_path / "fresh", 64, 2)
    trainer.train()
    assert kernel.blocks == [64, 64]


@pytest.mark.peers("transformers", "accelerate")
def test_trainer_that_resumes_from_elsewhere_needs_the_folder_named(tmp_path):
    hf_trainer(tmp_path / "one", 32, 2)[0].train()
    folder = tmp_path / "one" / "checkpoint-2"
    trainer, kernel = hf_trainer(tmp_path / "two", 64, 4)
    with pytest.raises(tuning.TuningError, match="pass checkpoint=FOLDER"):
        trainer.train(resume_from_checkpoint=str(folder))
    assert kernel.blocks == []
    tuning.uninstall()
    trainer, kernel = hf_trainer(tmp_path / "two", 64, 4, checkpoint=folder)
    trainer.train(resume_from_checkpoint=str(folder))
    assert kernel.blocks == [32, 32]


# -- Lightning --


def lightning_run(folder: Path, block: int, steps: int, resume: Path | None = None, **options: Any) -> Kernel:
    import lightning.pytorch as lightning

    from tuning.callbacks.lightning import TuningCallback

    kernel = Kernel()

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(4, 1)

        def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
            kernel(8)
            return (self.linear(batch["x"]).squeeze(-1) - batch["labels"]).square().mean()

        def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
            kernel(9)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    fields = options.pop("policy", {})
    trainer = lightning.Trainer(
        max_steps=steps,
        accelerator="cpu",
        devices=1,
        default_root_dir=str(folder),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=1,
        accumulate_grad_batches=2,
        callbacks=[
            TuningCallback(policy(block, **fields), **options),
            lightning.callbacks.ModelCheckpoint(folder, save_last=True, every_n_train_steps=1),
        ],
    )
    loader = torch.utils.data.DataLoader(examples(), batch_size=2)
    trainer.fit(Model(), loader, loader, ckpt_path=None if resume is None else str(resume))
    return kernel


@pytest.mark.peers("lightning")
def test_lightning_installs_checks_saves_and_leaves_a_manifest(tmp_path, checks):
    manifest = tmp_path / "run.json"
    kernel = lightning_run(tmp_path / "out", 32, 2, policy={"verify_every": 1, "manifest_path": str(manifest)})
    assert tuning.active_policy() is None
    assert set(kernel.blocks) == {32}
    assert len(kernel.blocks) >= 1 + 4  # the sanity check, and two steps of two batches
    assert checks == [1, 2]
    assert len(read_manifest(manifest).choices) == 2
    saved = torch.load(tmp_path / "out" / "last.ckpt", weights_only=True)
    assert len(json.loads(saved[STATE_KEY])["choices"]) == 2


@pytest.mark.peers("lightning")
def test_lightning_resumes_with_the_choices_of_the_checkpoint(tmp_path):
    lightning_run(tmp_path / "out", 32, 1)
    kernel = lightning_run(tmp_path / "out", 64, 3, tmp_path / "out" / "last.ckpt")
    assert set(kernel.blocks) == {32}
    assert set(lightning_run(tmp_path / "fresh", 64, 1).blocks) == {64}


@pytest.mark.peers("lightning")
def test_lightning_refuses_a_checkpoint_without_choices(tmp_path):
    lightning_run(tmp_path / "out", 32, 1, policy={"chaos": True})
    last = tmp_path / "out" / "last.ckpt"
    with pytest.raises(tuning.TuningError, match="resuming without the choices"):
        lightning_run(tmp_path / "out", 64, 2, last)
    assert tuning.active_policy() is None  # taken out although it failed
    assert set(lightning_run(tmp_path / "out", 64, 2, last, require_choices=False).blocks) == {64}


@pytest.mark.parametrize("module", ["hf", "lightning"])
def test_the_classes_can_be_pickled(module):
    import importlib
    import pickle

    package = {"hf": "transformers", "lightning": "lightning"}[module]
    pytest.importorskip(package)
    callback = importlib.import_module(f"tuning.callbacks.{module}").TuningCallback(policy(32))
    again = pickle.loads(pickle.dumps(callback))
    assert type(again) is type(callback)
    assert again.hook.policy == callback.hook.policy
