"""Launch every autotuner of a package under a pinned policy, over a stub in place of its kernel; prints JSON.

``python pin_each.py PACKAGE``. The autotuner itself is the package's: its class, candidates, key and pruner. Only the
kernel under it is replaced, for there is no device; so heuristics that stand inside are left out.
"""

from __future__ import annotations

import copy
import gc
import inspect
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS.parent)]
warnings.simplefilter("ignore")
os.environ["NVTE_PROJECT_BUILDING"] = "1"

from fake_gpu import Driver  # noqa: E402
from stub_kernels import FakeTensor, StubKernel  # noqa: E402
from triton.runtime.autotuner import Autotuner  # noqa: E402
from triton.runtime.driver import driver  # noqa: E402

import tuning  # noqa: E402
from tuning.inventory import take_inventory  # noqa: E402


class Tensor(FakeTensor):
    """What pruners ask of a tensor besides."""

    shape = (64, 64, 64, 64)

    def element_size(self) -> int:
        return 2

    def numel(self) -> int:
        return 64**4


class Kernel(StubKernel):
    """Takes any argument of its own."""

    def run(self, *args: Any, **kwargs: Any) -> str:
        self.launches.append(kwargs)  # type: ignore[arg-type]
        return "launched"


def argument(tuner: Any, name: str) -> Any:
    parameter = inspect.signature(tuner.base_fn).parameters[name]
    number = name in tuner.keys or "constexpr" in str(parameter.annotation) or name.isupper() or "stride" in name
    return 64 if number else Tensor("torch.bfloat16")


def main(package: str) -> None:
    take_inventory(package)
    driver.set_active(Driver())  # one of the pruners asks for the device
    tuners = [
        found
        for found in gc.get_objects()
        if isinstance(found, Autotuner) and found.base_fn.__module__.startswith(package + ".")
    ]
    report: dict[str, Any] = {"autotuners": len(tuners), "pinned": 0, "single": 0, "problems": []}
    with tuning.install(tuning.AutotunePolicy(mode="pinned", modules=(package,), config_invariant=())) as installed:
        for tuner in tuners:
            name = f"{tuner.base_fn.__module__}.{tuner.base_fn.__qualname__}"
            stub = Kernel(fn=tuner.base_fn)
            copied = copy.copy(tuner)
            copied.fn, copied.cache, before = stub, {}, len(installed.choices)
            tunable = {key for config in tuner.configs for key in config.kwargs}
            named = {each: argument(tuner, each) for each in tuner.arg_names if each not in tunable}
            try:
                copied.run(grid=(1,), warmup=False, **named)
            except Exception as error:
                report["problems"].append(f"{name}: {type(error).__name__}: {error}")
                continue
            if len(tuner.configs) == 1:
                report["single"] += 1
                continue
            made = installed.choices[before:]
            launched = [choice.config for choice in made] == [copied.best_config] and len(stub.launches) == 1
            values = {key: stub.launches[0][key] for key in copied.best_config.kwargs}
            if launched and values == dict(copied.best_config.kwargs):
                report["pinned"] += 1
            else:
                report["problems"].append(f"{name}: {len(made)} choices, {len(stub.launches)} launches, {values}")
        report["benchmarks"] = installed.benchmarks
    print("\n" + json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
