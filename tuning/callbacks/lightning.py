"""Lightning's ``Trainer``: ``Trainer(callbacks=[tuning.callbacks.lightning.TuningCallback(policy)])``.

Works with ``lightning`` and with ``pytorch_lightning``, whichever the process has imported; ``lightning`` if neither.
"""

from __future__ import annotations

from typing import Any

from tuning.policy import AutotunePolicy

from ._lazy import make_callback
from .loops import STATE_KEY, TrainingHook

__all__ = ["TuningCallback"]

TuningCallback: type[Any]


class _Events:
    """Installs a policy for a ``Trainer``'s run, compares ranks, and keeps choices in its checkpoints.

    Args:
        policy: the policy; None: the one that is installed already, which stays installed afterwards.
        deterministic: as for :func:`tuning.install`.
        require_choices: whether resuming from a checkpoint without choices is an error.

    The policy is installed in ``setup``, before a checkpoint is loaded and before the first batch of the sanity check,
    and uninstalled in ``teardown`` or when training fails. Choices are in checkpoints that hold more than weights.
    """

    def __init__(
        self,
        policy: AutotunePolicy | None = None,
        *,
        deterministic: bool = False,
        require_choices: bool = True,
    ) -> None:
        self.hook = TrainingHook(policy, deterministic=deterministic, require_choices=require_choices)

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Install."""
        self.hook.start()

    def on_load_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Load the choices of the checkpoint that is resumed from."""
        self.hook.load_state_dict(checkpoint)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Compare ranks where it is due; batches that are accumulated into one step count once."""
        if trainer.global_step:  # 0 until the first step is complete
            self.hook.after_step(trainer.global_step)

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Put the choices of all ranks into the checkpoint."""
        checkpoint[STATE_KEY] = self.hook.state_dict()[STATE_KEY]

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Uninstall."""
        self.hook.finish()

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Uninstall, which writes the manifest."""
        self.hook.finish()


def __getattr__(name: str) -> Any:
    if name != "TuningCallback":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    bases = [("lightning.pytorch", "Callback"), ("pytorch_lightning", "Callback")]
    made = make_callback(_Events, __name__, bases, "lightning")
    globals()[name] = made
    return made
