"""Keeping candidates whole, over a package of the shape of mamba_ssm's and megatron-core's.

Each order of import runs in a process of its own, since a module is imported once.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tuning.determinism.candidates import REDUCERS, CandidateGuard, Reducer, reduced_kernels

DECIDER = """
import os

_autotune_warning_issued = False

def autotune_configs(configs):
    global _autotune_warning_issued
    if os.environ.get("FLAG") == "1":
        _autotune_warning_issued = True
        return configs[:1]
    return configs
"""
KERNELS = """
from {package}.determinism import autotune_configs

class Autotuner:
    def __init__(self, configs):
        self.configs = configs

class Heuristics:
    def __init__(self, fn):
        self.fn = fn

scan = Heuristics(Autotuner(autotune_configs([1, 2, 3])))
state = Autotuner(autotune_configs([4, 5]))
"""
PROGRAM = """
import json, logging, os, sys
from tuning.determinism.candidates import CandidateGuard
lines = []
class Keep(logging.Handler):
    def emit(self, record): lines.append(record.getMessage())
logging.getLogger("tuning").addHandler(Keep())
def kernels():
    import megatron.core.ssm.ops.kernels as module
    return [module.scan.fn.configs, module.state.configs]
guard = CandidateGuard()
"""

ORDERS = {
    "guard, flag, imports": "guard.apply(); os.environ['FLAG'] = '1'; found = kernels()",
    "flag, guard, imports": "os.environ['FLAG'] = '1'; guard.apply(); found = kernels()",
    "decider, guard, flag, kernels": (
        "import megatron.core.ssm.ops.determinism; guard.apply(); os.environ['FLAG'] = '1'; found = kernels()"
    ),
    "imports, guard, flag": "found = kernels(); guard.apply(); os.environ['FLAG'] = '1'",
}
WARNING = (
    "2 kernels were left with one candidate when they were imported, because a deterministic flag was on by then: "
    "megatron.core.ssm.ops.kernels.scan, megatron.core.ssm.ops.kernels.state: the result is reproducible but slower, "
    "and no "
    "table can restore their other candidates; turn the mode on before importing them, or before MAMBA_DETERMINISTIC "
    "or "
    "torch's deterministic algorithms are switched on"
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    package = "megatron.core.ssm.ops"
    folder = tmp_path
    for part in package.split("."):
        folder = folder / part
        folder.mkdir()
        (folder / "__init__.py").write_text("")
    (folder / "determinism.py").write_text(DECIDER)
    (folder / "kernels.py").write_text(KERNELS.format(package=package))
    return tmp_path


def run(tree: Path, body: str) -> Any:
    program = f"{PROGRAM}\n{body}\nprint(json.dumps([found, lines]))"
    path = os.pathsep.join([str(tree), os.getcwd()])
    out = subprocess.run(
        [sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout)


@pytest.mark.parametrize("order", ORDERS)
def test_candidates_stay_whole_in_whichever_order_things_are_imported(tree: Path, order: str) -> None:
    assert run(tree, ORDERS[order]) == [[[1, 2, 3], [4, 5]], []]


def test_without_the_guard_they_are_reduced(tree: Path) -> None:
    assert run(tree, "os.environ['FLAG'] = '1'; found = kernels()") == [[[1], [4]], []]


def test_kernels_that_were_reduced_before_are_named_with_the_remedy(tree: Path) -> None:
    assert run(tree, "os.environ['FLAG'] = '1'; found = kernels(); guard.apply()") == [[[1], [4]], [WARNING]]


def test_after_restore_the_package_decides_again(tree: Path) -> None:
    body = """
guard.apply()
found = [kernels()]
guard.restore()
os.environ['FLAG'] = '1'
import megatron.core.ssm.ops.determinism as decider, megatron.core.ssm.ops.kernels as module
found += [decider.autotune_configs([1, 2]), module.autotune_configs is decider.autotune_configs]
"""
    assert run(tree, body) == [[[[1, 2, 3], [4, 5]], [1], True], []]


def test_the_reducers_that_are_known() -> None:
    assert [(reducer.module, reducer.package) for reducer in REDUCERS] == [
        ("mamba_ssm.utils.determinism", "mamba_ssm"),
        ("megatron.core.ssm.ops.determinism", "megatron.core.ssm.ops"),
    ]


# -- in this process ---------------------------------------------------------------------------------------------------

REDUCER = Reducer("fake_ssm.utils.determinism")


def reduce(configs: list[int]) -> list[int]:
    return configs[:1]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(name: str, **contents: Any) -> ModuleType:
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return make


def test_two_guards_nest(fake: Any) -> None:
    decider = fake("fake_ssm.utils.determinism", autotune_configs=reduce)
    outer, inner = CandidateGuard((REDUCER,)), CandidateGuard((REDUCER,))
    outer.apply()
    inner.apply()
    assert decider.autotune_configs([1, 2]) == [1, 2]
    inner.restore()
    assert decider.autotune_configs([1, 2]) == [1, 2]
    outer.restore()
    outer.restore()
    assert decider.autotune_configs is reduce


def test_a_package_without_that_function_is_warned_about(fake: Any, caplog: pytest.LogCaptureFixture) -> None:
    fake("fake_ssm.utils.determinism")
    guard = CandidateGuard((REDUCER,))
    with caplog.at_level(logging.WARNING, logger="tuning"):
        guard.apply()
    guard.restore()
    assert [record.getMessage() for record in caplog.records] == [
        "fake_ssm.utils.determinism has no function autotune_configs: its package may reduce candidates in another "
        "way; "
        "check with the enumerator"
    ]


def test_filters_by_environment_lose_their_effect_and_it_is_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRITON_AUTOTUNE_BLOCK_SIZE_M", "64")
    guard = CandidateGuard(())
    with caplog.at_level(logging.WARNING, logger="tuning"):
        guard.apply()
    guard.restore()
    assert [record.getMessage() for record in caplog.records] == [
        "TRITON_AUTOTUNE_BLOCK_SIZE_M has no effect in deterministic mode: candidates stay whole; use the policy's "
        "block_sizes"
    ]


def test_reduced_kernels_needs_the_flag_of_the_decider(fake: Any) -> None:
    decider = fake("fake_ssm.utils.determinism", autotune_configs=reduce, _autotune_warning_issued=False)
    one, two = SimpleNamespace(configs=[1]), SimpleNamespace(configs=[1, 2])
    fake("fake_ssm.ops.kernels", autotune_configs=reduce, one=one, two=two)
    fake("fake_ssm_other.kernels", autotune_configs=reduce, three=one)
    assert reduced_kernels(REDUCER) == ()
    decider._autotune_warning_issued = True
    assert reduced_kernels(REDUCER) == ("fake_ssm.ops.kernels.one",)
