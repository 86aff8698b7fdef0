"""Hugging Face's ``Trainer``: ``trainer.add_callback(tuning.callbacks.hf.TuningCallback(policy))``.

The choices of all ranks lie in ``triton_tuning.json`` in each checkpoint's folder. ``Trainer`` (transformers 4 and 5)
does not tell its callbacks which folder it resumes from; it does give them the state that it read there. So the folder
is looked for in ``args.resume_from_checkpoint`` and under ``args.output_dir``, and taken only if its
``trainer_state.json`` is that very state. The folder can also be named.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tuning.policy import AutotunePolicy

from ._lazy import make_callback
from .loops import TrainingHook

__all__ = ["TuningCallback"]

TuningCallback: type[Any]


class _Events:
    """Installs a policy for a ``Trainer``'s run, compares ranks, and keeps choices in its checkpoints.

    Args:
        policy: the policy; None: the one that is installed already, which stays installed after training.
        deterministic: as for :func:`tuning.install`.
        checkpoint: the folder to resume the choices from, where it is neither ``args.resume_from_checkpoint`` nor under
            ``args.output_dir``.
        require_choices: whether resuming from a checkpoint without choices is an error.

    The policy is installed when the ``Trainer`` has been made, or when training begins if the callback is added later,
    and is uninstalled when training ends; an evaluation after it needs an installation of its own.
    """

    def __init__(
        self,
        policy: AutotunePolicy | None = None,
        *,
        deterministic: bool = False,
        checkpoint: str | os.PathLike[str] | None = None,
        require_choices: bool = True,
    ) -> None:
        self.hook = TrainingHook(policy, deterministic=deterministic, require_choices=require_choices)
        self._checkpoint = checkpoint

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Install."""
        self.hook.start()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Install, and load the choices of the checkpoint that is resumed from."""
        self.hook.start()
        if state.global_step == 0 or (self._checkpoint is None and not self.hook.carries_choices):
            return
        folders = [Path(self._checkpoint)] if self._checkpoint is not None else list(_places(args, state))
        for folder in folders:
            if self._checkpoint is not None or _is_of(folder, state):
                self.hook.load(folder)
                return
        looked = " or ".join(map(str, folders))
        self.hook.without_choices(
            f"the checkpoint of step {state.global_step} is not {looked} (pass checkpoint=FOLDER)"
        )

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Compare ranks where it is due."""
        self.hook.after_step(state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Write the choices of all ranks beside the checkpoint."""
        self.hook.save(_folder(args, state), write=args.should_save)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Uninstall, which writes the manifest."""
        self.hook.finish()


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"checkpoint-{state.global_step}"


def _places(args: Any, state: Any) -> Iterator[Path]:
    named = args.resume_from_checkpoint
    if isinstance(named, (str, os.PathLike)):
        yield Path(named)
    yield _folder(args, state)


def _is_of(folder: Path, state: Any) -> bool:
    """Whether the trainer's state in a folder is this one: the same step, and the same log up to it."""
    try:
        saved = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
        # As text: a logged NaN is not equal to itself.
        return saved["global_step"] == state.global_step and json.dumps(saved["log_history"]) == json.dumps(
            state.log_history
        )
    except (OSError, ValueError, KeyError, TypeError):
        return False


def __getattr__(name: str) -> Any:
    if name != "TuningCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = make_callback(_Events, __name__, [("transformers", "TrainerCallback")], "transformers")
    globals()[name] = made
    return made
