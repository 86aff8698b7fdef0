"""One rank of a run over gloo: the real autotuner over a stub kernel with a scripted stopwatch. Started by the tests.

Reads one JSON object from its arguments and prints one: what was launched, what the check said.
"""

from __future__ import annotations

import json
import os
import sys
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from stub_kernels import FakeTensor, StubKernel, autotuner, configs, launch

import tuning

KEYS, SKEWED = 22, 13


class Stopwatch:
    """Times candidates so that ranks disagree on the first ``SKEWED`` keys, and agree on the others."""

    def __init__(self, stub: StubKernel, rank: int) -> None:
        self.stub = stub
        self.rank = rank

    def __call__(self, call: Any, quantiles: Any) -> list[float]:
        call()
        block = int(dict(self.stub.launches[-1].kwargs)["BLOCK"])
        best = (16, 32, 64)[self.rank % 3] if self.n < SKEWED else 32
        time = 1.0 if block == best else 2.0
        return [time, time, time]

    n = 0


def main() -> None:
    task = json.loads(sys.argv[1])
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group(
        "gloo", store=dist.FileStore(task["store"], size), rank=rank, world_size=size, timeout=timedelta(seconds=30)
    )
    stub = StubKernel()
    bench = Stopwatch(stub, rank)
    tuner = autotuner(configs(16, 32, 64), stub=stub, bench=bench)
    group = None
    for members in task.get("groups", ()):
        made = dist.new_group(members)
        group = made if rank in members else group
    result: dict[str, Any] = {"rank": rank, "verdicts": [], "error": None, "disagreements": []}
    policy = tuning.policy_from_mapping(task["policy"])
    with tuning.install(policy) as installed:
        try:
            for step, keys in enumerate(task.get("steps", [list(range(KEYS))]), start=1):
                for n in keys if isinstance(keys, list) else keys[str(rank)]:
                    bench.n = n
                    launch(tuner, FakeTensor(), FakeTensor(), n, flag=True)
                if task.get("maybe"):
                    result["verdicts"].append(tuning.maybe_verify_choices(step, group))
                else:
                    result["verdicts"].append(tuning.verify_choices(group))
        except tuning.DisagreementError as error:
            result["error"] = type(error).__name__
            result["disagreements"] = list(error.disagreements)
        result["after"] = len(stub.launches)
        result["benchmarks"] = tuning.benchmarks_run()
        result["choices"] = [choice.to_json() for choice in installed.choices]
        result["journal"] = installed.journal_path
    print(json.dumps(result), flush=True)
    dist.barrier()


if __name__ == "__main__":
    main()
