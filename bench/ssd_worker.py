"""One cold process of the SSD workload; prints one JSON object as its last line. Started by ``bench.ssd``."""

from __future__ import annotations

import argparse
import json
import os
import time
from typing import Any


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mode", choices=("auto", "record", "pinned"), required=True)
    parser.add_argument("--record-path")
    parser.add_argument("--remeasure", action="store_true")
    parser.add_argument("--table")
    parser.add_argument("--on-miss", default="cheapest")
    parser.add_argument("--deterministic-algorithms", action="store_true")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--shape", default="{}", help="JSON object of sizes that differ from the default")
    options = parser.parse_args()
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    started = time.perf_counter()
    import torch

    import tuning
    from bench.workloads import Ssd, SsdShape, digest

    policy = tuning.AutotunePolicy(
        mode=options.mode,
        record_path=options.record_path,
        remeasure=options.remeasure,
        table_path=(options.table,) if options.table else (),
        on_miss=options.on_miss,
    )
    tuning.install(policy)
    workload = Ssd(SsdShape(**json.loads(options.shape)))
    if options.deterministic_algorithms:
        # After the kernels are imported: mamba_ssm cuts its candidates to one at import when it sees this flag.
        torch.use_deterministic_algorithms(True)
    torch.cuda.synchronize()
    before = time.perf_counter()
    tensors = workload.step()
    torch.cuda.synchronize()
    first = time.perf_counter() - before
    digests = [digest(tensors)]
    times = []
    for _ in range(options.steps):
        begin = time.perf_counter()
        tensors = workload.step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    digests.append(digest(tensors))
    result: dict[str, Any] = {
        "mode": options.mode,
        "set_up_s": before - started,
        "first_step_s": first,
        "step_ms": [1e3 * value for value in times],
        "digests": digests,
        "benchmarks": tuning.benchmarks_run(),
        "choices": [
            {
                "kernel": c.kernel,
                "key": c.key.text,
                "config": str(c.launch_config),
                "source": c.source,
                "detail": c.detail,
            }
            for c in tuning.choices()
        ],
    }
    tuning.uninstall()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
