"""The main job on real third-party kernels, from end to end: ``triton-tuning demo``.

List the autotuners of an installed package, record in two processes, merge, and run pinned in two processes which
verify each other after each step. On a GPU that is the real thing at a real size; without one it runs in Triton's
interpreter, where the kernels are the same and the times are not. Everything that an engineer would keep is left in a
folder: journals, table, manifests.

``--chaos`` is the positive control of the verification: both processes choose differently on purpose, and the run is
well when that is caught.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Literal

from . import _demo_processes, _demo_workloads
from ._console import Console, UsageError
from ._demo_stages import Demo, Stages
from .errors import TuningError

__all__ = ["DEVICES", "Demo", "Device", "run_demo"]

Device = Literal["auto", "gpu", "interpreter"]
"""Where to run: ``auto`` takes a GPU where there is one."""

DEVICES: tuple[Device, ...] = ("auto", "gpu", "interpreter")


def run_demo(
    *,
    out: str | None = None,
    chaos: bool = False,
    package: str | None = None,
    device: Device = "auto",
    progress: Console | None = None,
) -> Demo:
    """Run the demo and return what it found; all of it is also left in the folder as ``demo.json``.

    Args:
        out: folder to leave everything in, new or empty; the first free of ``triton-tuning-demo``,
            ``triton-tuning-demo-2`` and so on when None.
        chaos: run the positive control instead.
        package: whose kernels to run; the first installed of those known when None.
        device: where to run.
        progress: says what is going on; standard error when None.

    Raises:
        TuningError: no package with a workload is installed, or a process failed.
        UsageError: ``package`` or ``out`` cannot be used.
    """
    workloads = _candidates(package)
    interpreted = _interpreted(device)
    folder = _folder(out)
    logs = folder / "logs"
    logs.mkdir(parents=True)
    cache = tempfile.mkdtemp(prefix="triton-tuning-demo-cache-")
    try:
        environment = _demo_processes.clean_environment(os.environ, cache=cache, interpreted=interpreted)
        run = Stages(folder, environment, interpreted, progress or Console(sys.stderr))
        demo = run.begin(workloads)
        if chaos:
            run.chaos(demo)
        else:
            run.compile(demo)
            run.record(demo)
            run.merge(demo)
            run.pinned(demo)
        run.describe_files(demo)
        (folder / "demo.json").write_text(json.dumps(demo.to_json(), indent=1) + "\n", encoding="utf-8")
    finally:
        shutil.rmtree(cache, ignore_errors=True)
    return demo


def _candidates(package: str | None) -> tuple[_demo_workloads.Workload, ...]:
    installed = _demo_workloads.installed_workloads()
    known = [workload.package for workload in _demo_workloads.WORKLOADS]
    if package is not None:
        if package not in known:
            raise UsageError(f"--package: expected one of {', '.join(known)}, found {package!r}")
        installed = tuple(workload for workload in installed if workload.package == package)
    if not installed:
        neither = f"neither {' nor '.join([', '.join(known[:-1]), known[-1]])} is installed"
        raise TuningError(
            f"demo: no kernels to run: {neither if package is None else f'{package} is not installed'}; "
            f"{_demo_workloads.how_to_install(package)}"
        )
    return installed


def _interpreted(device: Device) -> bool:
    if device == "interpreter":
        return True
    import torch

    found = torch.cuda.is_available()
    if device == "gpu" and not found:
        raise TuningError("demo: --device gpu: torch finds no GPU here; use --device interpreter")
    return not found


def _folder(out: str | None) -> Path:
    if out is None:
        number = 1
        while True:
            path = Path("triton-tuning-demo" if number == 1 else f"triton-tuning-demo-{number}")
            with suppress(FileExistsError):
                path.mkdir()
                return path.absolute()
            number += 1
    path = Path(out)
    problem = None
    try:
        path.mkdir(parents=True, exist_ok=True)
        if any(path.iterdir()):
            problem = "is not empty"
    except OSError as error:
        problem = f"cannot be used ({error.strerror or error})"
    if problem is not None:
        raise UsageError(f"--out: {out} {problem}; expected a new or empty folder")
    return path.absolute()
