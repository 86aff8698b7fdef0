"""Bit classes of Mamba-2's SSD step, forward and backward: which candidates compute the same bits (GPU).

One process. A first pinned step says which launches there are; all their candidates are compiled on all cores into this
process's compile cache; a second step is probed, each launch replayed with every candidate on several inputs; kernels
whose ``best_config`` mamba_ssm reads are judged by the outputs and gradients of whole steps, of several seeds. The
classes go into a table, from which a step is run that may time within them: its bits must be those of the pinned one.

``--interpreter`` shows on the CPU, on small tensors, that all of this runs; what it finds is not what a GPU computes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import results

SMALL = {"seqlen": 32, "nheads": 1, "headdim": 16, "ngroups": 1, "dstate": 16, "chunk_size": 16, "dtype": "float32"}

TURNS, STEPS = 3, 4
"""Turns of a pinned step and of one that is timed within its classes, and the timed steps in each."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this case."""
    parser.add_argument("--inputs", type=int, default=3, help="inputs of each launch")
    parser.add_argument("--seeds", type=int, default=2, help="whole steps for readers of best_config")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes that compile")
    parser.add_argument("--compile-seconds", type=float, default=60.0, help="most time for compiling ahead")
    parser.add_argument("--keep", type=Path, help="folder for the compile cache, the probe and the table")
    parser.add_argument("--interpreter", action="store_true", help="small tensors on the CPU, in Triton's interpreter")


def _compile_ahead(step: Any, policy: Any, keep: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Run a step, and compile all candidates of all its launches."""
    import tuning
    from bench.record_compile import BATCH, Compiling, Work, work_name
    from tuning._launch_replay import Reached, watch_launches
    from tuning._warmup_tasks import Task
    from tuning.interception import device_facts, launch_specialization
    from tuning.spec import LaunchConfig

    todo: dict[tuple[str, str, str], tuple[str, Task]] = {}

    def reached(launch: Reached) -> None:
        seen = launch_specialization(launch.autotuner, launch.args, launch.kwargs)
        configs = tuple(LaunchConfig.of(config).text for config in launch.candidates())
        place = (launch.kernel.qualified_name, launch.key.text, launch.form)
        todo.setdefault(place, (launch.arch, Task(launch.kernel, launch.key, seen, configs)))

    began = time.perf_counter()
    with tuning.install(policy), watch_launches(policy.in_scope, reached):
        step(0)
    first = time.perf_counter() - began
    tasks = [(work_name(task), task) for _, task in todo.values() if task.specialization]
    works = [
        Work(task, task.candidates[at : at + BATCH], name)
        for name, task in tasks
        for at in range(0, len(task.candidates), BATCH)
    ]
    arch = next((arch for arch, _ in todo.values()), "cpu")
    settings = {"arch": arch, "multiprocessors": device_facts()[1]}
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    compiling = Compiling(keep, environment, options.jobs, 60.0, settings)
    began = time.perf_counter()
    compiling.run(works, time.monotonic() + options.compile_seconds, lambda done, total: None)
    return {
        "first_step_s": first,
        "compile_s": time.perf_counter() - began,
        "launches": len(todo),
        "candidates": sum(len(task.candidates) for _, task in todo.values()),
        "compiled_ahead": compiling.compiled,
        "not_compiled": sorted(compiling.failed.values()),
    }


def _timed_within(workloads: list[Any], policy: Any, tables: Path, sync: Any) -> dict[str, Any]:
    """A pinned step and one that may vary within the classes, of the same table: digests and times."""
    from dataclasses import replace

    import tuning
    from bench.workloads import digest

    digests: dict[str, list[list[str]]] = {"pinned": [], "timed": []}
    times: dict[str, list[float]] = {"pinned": [], "timed": []}
    found: dict[str, Any] = {}
    for _ in range(TURNS):
        for within, taken in times.items():
            # Timed again in each turn, within the classes: its bits are to be those of the pinned one each time.
            with tuning.install(replace(policy, table_path=(str(tables),), within_class=within)) as installed:
                digests[within].append([digest(workload.step()) for workload in workloads])
                for _ in range(STEPS):
                    sync()
                    began = time.perf_counter()
                    workloads[0].step()
                    sync()
                    taken.append(1e3 * (time.perf_counter() - began))
                found[within] = {
                    "digests": digests[within][0],
                    "median_step_ms": statistics.median(taken),
                    "benchmarks": installed.benchmarks,
                    "timed_within_class": sum(choice.source == "timed" for choice in installed.choices),
                    "other_config_than_pinned": sum(
                        "within the class" in choice.detail for choice in installed.choices
                    ),
                }
    found["same bits"] = all(each == digests["pinned"][0] for each in (*digests["pinned"], *digests["timed"]))
    return found


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run the case and return the result."""
    keep = options.keep or Path(tempfile.mkdtemp(prefix="bench-probe-"))
    keep.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("TRITON_CACHE_DIR", str(keep / "cache"))
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if options.interpreter:
        from tuning.interpreter import stand_in_for_cuda, use_interpreter

        use_interpreter()
        stand_in_for_cuda()
    import torch

    import tuning
    from bench.workloads import Ssd, SsdShape
    from tuning.bitexact.probe import Probe, probe_launches, probe_steps, write_classes, write_probe

    started = time.perf_counter()
    shape = SsdShape(**SMALL) if options.interpreter else SsdShape()  # type: ignore[arg-type]
    device = "cpu" if options.interpreter else "cuda"
    workloads = [Ssd(shape, device=device, seed=seed) for seed in range(options.seeds)]
    # After the import: mamba_ssm cuts its candidates to one where it sees this flag.
    torch.use_deterministic_algorithms(True)
    policy = tuning.AutotunePolicy(mode="pinned")

    def step(index: int) -> dict[str, Any]:
        return dict(workloads[index].step())

    def sync() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    ahead = {} if options.interpreter else _compile_ahead(step, policy, keep, options)
    seconds: dict[str, float] = {}
    with tuning.install(policy) as installed:
        began = time.perf_counter()
        with probe_launches(policy.in_scope, inputs=options.inputs) as probe:
            step(0)
        sync()
        seconds["launches"] = time.perf_counter() - began
        began = time.perf_counter()
        probe.replace(probe_steps(step, policy.in_scope, inputs=options.seeds))
        seconds["whole steps"] = time.perf_counter() - began
        _, left_out = write_classes(
            keep / "tables", probe.keys, installed.choices, device=probe.device, multiprocessors=probe.multiprocessors
        )
    write_probe(keep / "probe.json", probe)
    within = _timed_within(workloads, policy, keep / "tables", sync)
    _print(probe, left_out)
    judged = [each for each in probe.keys if each.claims]
    summary = {
        "launches probed": len(probe.keys),
        "judged": len(judged),
        "no difference between any candidates": sum(each.single for each in judged),
        "share of judged": sum(each.single for each in judged) / max(len(judged), 1),
        "racy candidates": sum(len(each.racy) for each in probe.keys),
        "step timed within classes has the pinned bits": within["same bits"],
        "total [s]": time.perf_counter() - started,
    }
    for name, value in summary.items():
        print(f"{name}: {value}")
    problems = [] if within["same bits"] else ["a step timed within its classes has other bits than the pinned one"]
    assert isinstance(probe, Probe)
    return {
        "case": "probe",
        **results.circumstances(("triton", "torch", "mamba_ssm")),
        "interpreter": options.interpreter,
        "workload": "mamba_chunk_scan_combined forward+backward, as in the case ssd; whole steps judge readers of "
        "best_config",
        "ahead": ahead,
        "seconds": seconds,
        "summary": summary,
        "within": within,
        "without_classes": list(left_out),
        "probe": probe.to_json(),
        "problems": problems,
    }


def _print(probe: Any, left_out: tuple[str, ...]) -> None:
    from tuning.bitexact.probe import deciding_fields

    print(f"{'kernel':42} {'judged by':9} {'cand.':>5} {'ulps':>10}  verdict; fields that decide")
    for each in probe.keys:
        ulps = [distance.ulps for distance in each.distances]
        worst = "-" if not ulps else "none" if None in ulps else f"{max(ulps):.0f}"
        fields = " ".join(deciding_fields(each.classes).by) if len(each.classes) > 1 else ""
        launchable = sum(not candidate.failure for candidate in each.candidates)
        name = each.kernel.rpartition(".")[2]
        print(f"{name:42} {each.judged_by:9} {launchable:5} {worst:>10}  {each.verdict}{'; ' * bool(fields)}{fields}")
    for line in left_out:
        print(f"no classes written: {line}")
