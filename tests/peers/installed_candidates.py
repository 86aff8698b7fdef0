"""Print the autotuners in some modules, as JSON; run as a script, in a process of its own.

``python installed_candidates.py MODULE...`` prints an object. ``kernels``: qualified name to the names in its ``key``,
in order, and the texts of its candidates. ``missing``: modules that the installed packages do not have. ``versions``,
and ``cuda``: whether there is a device.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
import triton
from triton.runtime.autotuner import Autotuner
from triton.runtime.driver import driver

from tuning.spec import LaunchConfig

# Triton 3.2 and 3.3 ask for a driver when an autotuner is made. Only its benchmarker is looked up, and nothing is run.
driver.set_active(SimpleNamespace(get_benchmarker=lambda: None))

DISTRIBUTIONS = ("mamba-ssm", "megatron-core")


def without_running_packages(module: str) -> bool:
    """Let a module be imported without its packages' own code, which wants CUDA extensions; False: no such module."""
    parts = module.split(".")
    spec = importlib.util.find_spec(parts[0])
    folders = list(spec.submodule_search_locations or ()) if spec else []
    found: list[Path] = []
    for depth, name in enumerate(parts[1:], start=1):
        package = ".".join(parts[:depth])
        if package not in sys.modules:
            bare = ModuleType(package)
            bare.__spec__ = ModuleSpec(package, None, is_package=True)
            bare.__path__ = bare.__spec__.submodule_search_locations = folders
            sys.modules[package] = bare
        found = [Path(folder) / name for folder in folders]
        folders = [str(path) for path in found if path.is_dir()]
    return any(path.with_suffix(".py").is_file() for path in found)


def autotuners(module: str) -> dict[str, Any] | None:
    if not without_running_packages(module):
        return None
    if module.startswith("megatron.core."):
        # It looks for Transformer Engine, which its kernels do without and which may be there in part; and its modules
        # import each other in a circle that only works when entered here, as its own package does.
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]
        importlib.import_module("megatron.core.parallel_state")
    kernels: dict[str, Any] = {}
    for value in vars(importlib.import_module(module)).values():
        tuner: Any = value
        while tuner is not None and not isinstance(tuner, Autotuner):
            tuner = getattr(tuner, "fn", None) if type(tuner).__module__.startswith("triton.") else None
        if tuner is not None:
            function = tuner.base_fn
            name = f"{function.__module__}.{function.__qualname__}"
            texts = [LaunchConfig.of(config).text for config in tuner.configs]
            kernels[name] = {"key": list(tuner.keys), "candidates": texts}
    return kernels


def version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    kernels: dict[str, Any] = {}
    missing = []
    for module in sys.argv[1:]:
        found = autotuners(module)
        if found is None:
            missing.append(module)
        else:
            kernels.update(found)
    versions = {"triton": triton.__version__, **{name: version(name) for name in DISTRIBUTIONS}}
    print(json.dumps({"kernels": kernels, "missing": missing, "versions": versions, "cuda": torch.cuda.is_available()}))
