"""Where and how a result was measured, and writing it down."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"

_FOLDERS = ("--keep", "--out")


def circumstances(packages: Sequence[str] = ("triton", "torch")) -> dict[str, Any]:
    """Device, versions, commit, date and command of this run; the command without the folders of the machine."""
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
        "command": shlex.join(["python", "-m", "bench", *without_folders(sys.argv[1:])]),
        "commit": os.environ.get("BENCH_COMMIT") or _commit(),
        "python": platform.python_version(),
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "device": "none",
    }
    found |= {package: _version(package) for package in packages}
    try:
        import torch
    except ImportError:
        return found
    if torch.cuda.is_available():
        found["device"] = torch.cuda.get_device_name()
        found["device_count"] = torch.cuda.device_count()
        found["cuda"] = torch.version.cuda
    return found


def without_folders(arguments: Sequence[str]) -> list[str]:
    """Arguments of a benchmark, with ``DIR`` for the folders that its results and its files went to."""
    shown: list[str] = []
    follows = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        is_folder = len(name) > 2 and any(option.startswith(name) for option in _FOLDERS)  # argparse takes --ou, too
        if follows:
            shown.append("DIR")
        else:
            shown.append(f"{name}=DIR" if is_folder and equals else argument)
        follows = is_folder and not equals and not follows
    return shown


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """The commit that is checked out, with ``-dirty`` where tracked files differ from it."""
    here = Path(__file__).parent
    described = ["git", "describe", "--always", "--dirty", "--abbrev=7", "--exclude=*"]
    try:
        run = subprocess.run(described, capture_output=True, text=True, check=False, cwd=here)
    except OSError:
        return "unknown"
    return run.stdout.strip() or "unknown"


def path_of(name: str | None, result: Mapping[str, Any], folder: Path | None = None) -> Path:
    """Where a result goes: by default into the results folder, named after its case and device."""
    device = str(result["device"]).lower().replace("nvidia ", "").replace(" ", "_")
    return (RESULTS if folder is None else folder) / f"{name or '_'.join([result['case'], device])}.json"


def write(name: str | None, result: dict[str, Any], folder: Path | None = None) -> Path:
    """Write one result as JSON under the results folder."""
    path = path_of(name, result, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(result, indent=1, sort_keys=False) + "\n")
    return path


def write_whole(path: Path, text: str) -> None:
    """Write a file, or, where this process is killed meanwhile, leave what was there."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
