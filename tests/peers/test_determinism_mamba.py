"""The candidates of the installed mamba_ssm and megatron-core, in each order of imports, deterministic flag and mode.

Each order runs in a process of its own. The counts without any flag are the truth that the others are compared with.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

PROGRAM = """
import importlib.util, json, logging, sys, types, warnings
sys.path.insert(0, {root!r})
import torch
from bench.workloads import import_mamba_ssm
from tuning.determinism import DeterministicMode
warnings.simplefilter("ignore")
if {package!r} == "mamba_ssm":
    import_mamba_ssm()
else:
    # Bare packages: megatron.core wants a whole Transformer Engine, and ops imports its kernels with the decider.
    roots = list(importlib.util.find_spec("megatron").submodule_search_locations)
    for name in ("megatron.core", "megatron.core.ssm", "megatron.core.ssm.ops"):
        sys.modules[name] = types.ModuleType(name)
        sys.modules[name].__path__ = [root + name.removeprefix("megatron").replace(".", "/") for root in roots]
lines = []
class Keep(logging.Handler):
    def emit(self, record): lines.append(record.getMessage())
logging.getLogger("tuning").addHandler(Keep(logging.WARNING))
mode = DeterministicMode(env={{}}, keep_candidates=True, causal_conv1d="unused")
flag = lambda: torch.use_deterministic_algorithms(True)
decider = lambda: importlib.import_module({decider!r})

def kernels():
    importlib.import_module({kernels!r})
    counts = {{}}
    for name, module in list(sys.modules.items()):
        if name.startswith({package!r} + "."):
            for attribute, value in vars(module).items():
                for _ in range(4):
                    if isinstance(getattr(value, "configs", None), list):
                        counts[name + "." + attribute] = len(value.configs)
                        break
                    value = getattr(value, "fn", None)
    return counts

{order}
print(json.dumps([counts, [line for line in lines if "candidate" in line]]))
"""

PACKAGES = {
    "mamba_ssm": ("mamba_ssm.utils.determinism", "mamba_ssm.ops.triton.ssd_combined"),
    "megatron.core.ssm.ops": ("megatron.core.ssm.ops.determinism", "megatron.core.ssm.ops.ssd_combined"),
}
KEPT = {
    "mode, kernels": "mode.apply(); counts = kernels()",
    "flag, mode, kernels": "flag(); mode.apply(); counts = kernels()",
    "flag, decider, mode, kernels": "flag(); decider(); mode.apply(); counts = kernels()",
    "kernels, mode": "kernels(); mode.apply(); counts = kernels()",
}

pytestmark = pytest.mark.peers("mamba_ssm")


@cache
def run(package: str, order: str) -> Any:
    decider, kernels = PACKAGES[package]
    program = PROGRAM.format(root=str(ROOT), package=package, decider=decider, kernels=kernels, order=order)
    out = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout.splitlines()[-1])


@pytest.fixture(params=PACKAGES)
def package(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    # Looked for as a file: finding the spec would import the packages around it.
    root = importlib.util.find_spec(name.partition(".")[0])
    path = PACKAGES[name][0].replace(".", "/").partition("/")[2] + ".py"
    if root is None or not any((Path(folder) / path).exists() for folder in root.submodule_search_locations or ()):
        pytest.skip(f"this version has no {name}")
    return name


@pytest.mark.parametrize("order", KEPT)
def test_candidates_stay_whole(package: str, order: str) -> None:
    whole, _ = run(package, "counts = kernels()")
    assert max(whole.values()) > 5
    assert run(package, KEPT[order]) == [whole, []]


def test_kernels_reduced_before_the_mode_are_named_and_no_others(package: str) -> None:
    whole, _ = run(package, "counts = kernels()")
    counts, (line,) = run(package, "flag(); kernels(); mode.apply(); counts = kernels()")
    reduced = {name for name, count in counts.items() if count < whole[name]}
    assert reduced
    named = set(line.partition("was on by then: ")[2].partition(": the result")[0].split(", "))
    assert named == reduced
    assert line.startswith(f"{len(reduced)} kernels were left with one candidate")
