"""The process that compiles candidates for ``bench.record``: tasks on standard input, answers on standard output.

A line of JSON each. It says when it is ready, and of each task when the kernel's package is imported, so that no clock
of a candidate runs meanwhile. A task is a launch out of a journal and texts of configs; for each config one answer. All
candidates are compiled, while ``triton-tuning warmup`` compiles the one that a run would choose; and once for each
signature the launcher in C, which the first launch would build while the GPU waits.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from typing import Any

from bench.lines import take_output


def main() -> None:
    """Entry point."""
    answer = take_output()
    warnings.simplefilter("ignore")
    from bench import record_stand_in
    from bench.workloads.steps import import_package
    from tuning._launch_specialization import stand_in_arguments
    from tuning._launch_target import build_launcher, compile_config, compile_for
    from tuning._warmup_tasks import Task
    from tuning._warmup_worker import find_kernel
    from tuning.interception import live_candidates
    from tuning.spec import LaunchConfig

    settings = json.loads(sys.stdin.readline())
    arch = settings["arch"]
    if record_stand_in.needed():
        record_stand_in.pretend()
        arch = record_stand_in.ARCH
    else:
        compile_for(arch, multiprocessors=settings["multiprocessors"])
    packages = {"mamba_ssm": "mamba"}
    signatures: set[str] = set()

    def launcher(compiled: Any) -> str:
        signature = repr((compiled.kernel.src.signature, getattr(compiled.kernel.metadata, "tensordesc_meta", None)))
        if signature in signatures:
            return ""
        signatures.add(signature)
        try:
            build_launcher(compiled, arch)
        except Exception as error:  # the first launch builds it, or says why not
            return _one_line(error)
        return ""

    answer(ready=True)
    for line in sys.stdin:
        data = json.loads(line)
        task = Task.from_json(data["task"])
        try:
            top = task.kernel.package
            import_package(packages.get(top, top))
            autotuner = find_kernel(task.kernel.qualified_name, task.candidates)
            args, kwargs = stand_in_arguments(task.specialization)
            configs = {LaunchConfig.of(config).text: config for config in live_candidates(autotuner, args, kwargs)}
        except Exception as error:
            answer(loaded=True)
            for text in data["configs"]:
                answer(config=text, error=_one_line(error), seconds=0.0, passing=True)
            continue
        answer(loaded=True)
        for text in data["configs"]:
            began = time.perf_counter()
            try:
                if text not in configs:
                    raise LookupError("no candidate here")
                compiled = compile_config(autotuner, configs[text], args, kwargs)
                unbuilt = launcher(compiled)
                said = {"launcher": unbuilt} if unbuilt else {}
                answer(config=text, hash=compiled.hash, shared=compiled.shared_memory, seconds=compiled.seconds, **said)
            except Exception as error:
                seconds = time.perf_counter() - began
                answer(config=text, error=_one_line(error), seconds=seconds, passing=_may_pass(error))


def _may_pass(error: BaseException) -> bool:
    """Whether trying again may succeed: memory, a disk or processes ran short, here or in the assembler."""
    return isinstance(error, (OSError, MemoryError)) or "signal" in str(error)


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


if __name__ == "__main__":
    main()
