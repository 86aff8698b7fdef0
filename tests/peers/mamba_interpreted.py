"""Run mamba_ssm's SSD forward and backward in Triton's interpreter; started in a process of its own by the tests.

Prints one JSON object: for each policy in turn, in one process, the relative error of the output and of every gradient
against a float64 recurrence, and the choices.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import types
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import torch.nn.functional as F
from triton.runtime.autotuner import Autotuner
from triton.runtime.driver import driver

import tuning
from bench.workloads import Ssd, SsdShape


class Driver:
    """All that the autotuner asks of a driver."""

    def get_benchmarker(self) -> Any:
        def bench(call: Any, quantiles: Any) -> list[float]:
            call()
            return [1.0, 1.0, 1.0]

        return bench


driver.set_active(Driver())
# The wrappers ask a CUDA device for its context and its number of multiprocessors; the kernels run on the CPU.
torch.cuda.device = lambda device: contextlib.nullcontext()
torch.cuda.get_device_properties = lambda device: types.SimpleNamespace(multi_processor_count=4)


def reference(workload: Ssd) -> dict[str, Any]:
    """The recurrence written out, in float64."""
    shape = workload.shape
    i = {name: tensor.detach().double().requires_grad_() for name, tensor in workload.inputs.items()}
    dt = F.softplus(i["dt"] + i["dt_bias"])
    decay = torch.exp(dt * i["A"])
    heads = shape.nheads // shape.ngroups
    b, c = (i[name].repeat_interleave(heads, dim=2) for name in "BC")
    state = torch.zeros(shape.batch, shape.nheads, shape.headdim, shape.dstate, dtype=torch.float64)
    rows = []
    for t in range(shape.seqlen):
        update = (dt[:, t, :, None] * i["x"][:, t])[..., None] * b[:, t, :, None, :]
        state = decay[:, t, :, None, None] * state + update
        rows.append((state * c[:, t, :, None, :]).sum(-1) + i["D"][:, None] * i["x"][:, t])
    out = torch.stack(rows, dim=1) * F.silu(i["z"])
    out.backward(workload._gradient.double())
    return {"out": out.detach(), **{f"grad {name}": tensor.grad for name, tensor in i.items()}}


def keep_best_config_stale() -> None:
    """The fault that ``best_config`` must not have: it stays at the last candidate whatever is launched."""
    launch = Autotuner.run

    def run(self: Autotuner, *args: Any, **kwargs: Any) -> Any:
        result = launch(self, *args, **kwargs)
        self.best_config = max(self.configs, key=lambda config: sum(v for v in config.kwargs.values()))
        return result

    Autotuner.run = run


def main() -> None:
    workload = Ssd(
        SsdShape(seqlen=128, nheads=2, headdim=16, ngroups=1, dstate=16, chunk_size=64, dtype="float32"), device="cpu"
    )
    expected = reference(workload)
    results = []
    for fields in json.loads(sys.argv[1]):
        os.environ["RANK"] = str(fields.pop("rank", 0))
        stale = fields.pop("stale", False)
        with tuning.install(tuning.AutotunePolicy(mode="pinned", **fields)) as installed:
            undo = Autotuner.run
            if stale:
                keep_best_config_stale()
            found = workload.step()
            Autotuner.run = undo
            results.append(
                {
                    "errors": {
                        name: float((found[name].double() - expected[name]).norm() / expected[name].norm())
                        for name in expected
                    },
                    "choices": {c.kernel: str(c.launch_config) for c in installed.choices},
                    "sources": sorted({c.source for c in installed.choices}),
                    "benchmarks": installed.benchmarks,
                }
            )
    print(json.dumps(results))


if __name__ == "__main__":
    main()
