"""One rank of a training run over gloo, with a checkpoint. Started by the tests.

The model is one weight vector; its gradient is a sum that a kernel adds up block by block, so its bits depend on the
config that is launched. Reads one JSON object from its arguments and prints one.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from stub_kernels import FakeTensor, StubKernel, autotuner, configs, launch

import tuning
from tuning.callbacks import TrainingHook


class Model:
    """Launches the real autotuner over a stub that adds up in blocks."""

    def __init__(self, rank: int) -> None:
        self.weights = torch.linspace(0.1, 1.1, 512)
        self.data = torch.linspace(-1.0, 3.0, 512).sin() * (rank + 1)
        self.stub = StubKernel(effect=self.add_up)
        self.tuner = autotuner(configs(16, 32, 64), stub=self.stub)
        self.total = torch.zeros(())

    def add_up(self, named: dict[str, Any]) -> None:
        total = torch.zeros(())
        for block in (self.weights * self.data).split(named["BLOCK"]):
            total = total + block.sum()
        self.total = total

    def step(self, n: int) -> None:
        launch(self.tuner, FakeTensor(), FakeTensor(), n, flag=True)
        gradient = self.data * self.total
        dist.all_reduce(gradient)
        self.weights = self.weights - 1e-4 * gradient


def main() -> None:
    task = json.loads(sys.argv[1])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", store=dist.FileStore(task["store"], size), rank=rank, world_size=size, timeout=timedelta(seconds=30)
    )
    model = Model(rank)
    folder = Path(task["checkpoint"])
    result: dict[str, Any] = {"error": None, "verdicts": [], "weights": {}}
    hook = TrainingHook(tuning.policy_from_mapping(task["policy"]))
    with hook:
        if task.get("resume"):
            model.weights = torch.load(folder / "weights.pt", weights_only=True)
            if rank in task.get("carried_on", range(size)):
                hook.load(folder)
        try:
            for step, keys in task["steps"]:
                model.step(keys[rank])
                result["verdicts"].append(hook.after_step(step))
                result["weights"][step] = model.weights.numpy().tobytes().hex()
                if step == task.get("save_at"):
                    hook.save(folder)
                    if rank == 0:
                        torch.save(model.weights, folder / "weights.pt")
        except tuning.TuningError as error:
            result["error"] = f"{type(error).__name__}: {error}"
    result["blocks"] = [int(dict(config.kwargs)["BLOCK"]) for config in model.stub.launches]
    print(json.dumps(result), flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
