"""Training loops: install before kernels run, compare ranks, leave a manifest, carry choices in checkpoints.

::

    tuning.callbacks.hf.TuningCallback          for Hugging Face's Trainer
    tuning.callbacks.lightning.TuningCallback   for Lightning's Trainer
    tuning.callbacks.loops.TrainingHook         for a loop of your own, Megatron-LM's and torchtitan's among them

Importing any of them imports neither transformers nor lightning: a callback's class is made when it is first asked for.
"""

from __future__ import annotations

__all__ = ["TrainingHook"]

from .loops import TrainingHook
