"""Autotuners of installed packages that are not plain: what a pinned policy does with them; prints JSON.

``python other_autotuners.py CASE``. Kernels are replaced by stubs, for there is no device.
"""

from __future__ import annotations

import copy
import importlib
import json
import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent), str(Path(__file__).parent)]
warnings.simplefilter("ignore")

from fake_gpu import Driver  # noqa: E402
from pin_each import Kernel, argument  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402

import tuning  # noqa: E402
from tuning.interception import find_autotuner  # noqa: E402
from tuning.spec import LaunchConfig  # noqa: E402
from tuning.tables import Entry, TableFile, write_table  # noqa: E402


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("tuning").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def over_stub(kernel: Any) -> Any:
    """A copy of a package's autotuner over a stub kernel."""
    found = find_autotuner(kernel)
    assert found is not None
    tuner = copy.copy(found[0])
    tuner.fn, tuner.cache = Kernel(fn=tuner.base_fn), {}
    return tuner


def arguments(tuner: Any, values: dict[str, Any]) -> dict[str, Any]:
    tunable = {key for config in tuner.configs for key in config.kwargs}
    return {name: argument(tuner, name) for name in tuner.arg_names if name not in tunable} | values


def launch(tuner: Any, **values: Any) -> Any:
    driver.set_active(Driver())  # type: ignore[arg-type]  # only now: as it is imported, FLA asks torch for a GPU's name
    tuner.run(grid=(1,), warmup=False, **arguments(tuner, values))
    return tuner.best_config


def pinned(*modules: str, **fields: Any) -> Any:
    return tuning.install(tuning.AutotunePolicy(mode="pinned", modules=modules, config_invariant=(), **fields))


def fla(order: str) -> dict[str, Any]:
    """FLA swaps ``triton.autotune`` as it is imported, for a subclass that reads its config folder first."""
    import triton

    folder = Path(tempfile.mkdtemp())
    os.environ.update(FLA_CONFIG_DIR=str(folder), FLA_CACHE_MODE="always")
    installed = pinned("fla") if order == "install, import" else None
    swapped_before = triton.autotune
    cache = importlib.import_module("fla.ops.utils.cache")
    cache.configure_fla_cache_autotune()
    module = importlib.import_module("fla.ops.utils.cumsum")
    installed = installed or pinned("fla")
    swapped = triton.autotune
    tuner = over_stub(module.chunk_local_cumsum_scalar_kernel)
    late = over_stub(triton.autotune(configs=tuner.configs, key=[])(triton.jit(tuner.base_fn)))
    asked: list[str] = []
    cache.load_cached_config = lambda name, key: asked.append(name)
    first, again = launch(tuner), launch(tuner)
    late_config = launch(late)
    result = {
        "class": type(tuner).__name__,
        "late": type(late).__name__,
        "swapped": swapped is not swapped_before,
        "asked": len(asked),
        "same": first is again and any(first is config for config in tuner.configs),
        "late_same": any(late_config is config for config in late.configs),
        "choices": [choice.source for choice in installed.choices],
        "benchmarks": installed.benchmarks,
        "candidates": len(tuner.configs),
    }
    tuning.uninstall()
    return {**result, "left": triton.autotune is swapped}


def transformer_engine() -> dict[str, Any]:
    """Its pruners return configs that they make at each call, none of which is in ``configs``."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    module = importlib.import_module("transformer_engine.common.triton.mhc")
    pruning = [
        (name, found[0])
        for name, value in sorted(vars(module).items())
        if (found := find_autotuner(value)) is not None and found[0].early_config_prune is not None
    ]
    seen = {}
    for name, real in pruning:
        tuner = over_stub(real)
        values = {"USE_SPLIT_K": False} if "USE_SPLIT_K" in tuner.arg_names else {}
        with pinned("transformer_engine"):
            chosen = launch(tuner, **values)
        live = tuner.early_config_prune(tuner.configs, {}, **arguments(tuner, values))
        last = LaunchConfig.of(live[-1])
        folder = tempfile.mkdtemp()
        row = Entry(f"{module.__name__}.{real.base_fn.__name__}", None, None, None, last, {"source": "a test"})
        write_table(folder, TableFile("sm90", "transformer_engine", "1", "", "a test's", (row,), (), None))
        with pinned("transformer_engine", table_path=(folder,)) as installed:
            configs = [launch(tuner, **values) for _ in range(2)]
            sources = [choice.source for choice in installed.choices]
        seen[name] = {
            "new": not any(chosen is config for config in tuner.configs),
            "by_table": [LaunchConfig.of(config) == last for config in configs],
            "sources": sources,
            "benchmarks": installed.benchmarks,
        }
    return seen


def reduced(order: str) -> dict[str, Any]:
    """mamba_ssm keeps one candidate of each kernel if it is imported under its deterministic flag."""
    from bench.workloads import import_mamba_ssm

    lines = Lines()
    os.environ["MAMBA_DETERMINISTIC"] = "1"
    import_mamba_ssm()
    kernels = "mamba_ssm.ops.triton.ssd_bmm"
    if order == "import, install":
        importlib.import_module(kernels)
    if order == "deterministic install, import":
        from tuning.determinism import DeterministicMode

        policy = tuning.AutotunePolicy(modules=("mamba_ssm",))
        installed = tuning.install(policy, deterministic=DeterministicMode(env={}, causal_conv1d="unused"))
    else:
        installed = pinned("mamba_ssm")
    module = importlib.import_module(kernels)
    tuner = over_stub(module._bmm_chunk_fwd_kernel)
    launch(tuner)
    launch(tuner)
    return {
        "candidates": len(tuner.configs),
        "warnings": [line for line in lines.lines if "one candidate" in line],
        "notices": [kind for kind, _ in installed.manifest().notices if kind == "reduced_at_import"],
    }


CASES = {
    "fla before": lambda: fla("install, import"),
    "fla after": lambda: fla("import, install"),
    "transformer_engine": transformer_engine,
    "reduced before": lambda: reduced("install, import"),
    "reduced after": lambda: reduced("import, install"),
    "reduced never": lambda: reduced("deterministic install, import"),
}

if __name__ == "__main__":
    print("\n" + json.dumps(CASES[sys.argv[1]]()))
