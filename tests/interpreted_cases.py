"""Kernels in Triton's interpreter, where a case needs real memory; ``python interpreted_cases.py CASE`` prints JSON.

A process of its own, since ``TRITON_INTERPRET`` is read when Triton is imported. Whatever is timed is counted.
"""

from __future__ import annotations

import json
import os
import sys
import types
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import triton
import triton.language as tl
from triton.runtime.driver import driver

import tuning

timed: list[int] = []


def stopwatch(call: Any, quantiles: Any = None, **options: Any) -> list[float]:
    call()
    timed.append(1)
    return [1.0, 1.0, 1.0]


# Triton 3.2 and 3.3 ask for a driver when an autotuner is made.
driver.set_active(types.SimpleNamespace(get_benchmarker=lambda: stopwatch))


def zero(named: dict[str, Any]) -> None:
    named["y"].zero_()


def configs(*blocks: int, **fields: Any) -> list[Any]:
    return [triton.Config({"BLOCK": block}, **fields) for block in blocks]


@triton.autotune(configs(16, 32), key=["n"], reset_to_zero=["y"], restore_value=["y"])
@triton.jit
def add_in_place(x, y, n, BLOCK: tl.constexpr):
    """Adds x to y where y is."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(y + offsets, tl.load(y + offsets, mask) + tl.load(x + offsets, mask), mask)


@triton.autotune(configs(16, 32, pre_hook=zero), key=["n"])
@triton.jit
def accumulate(x, y, n, BLOCK: tl.constexpr):
    """Adds x to y, which the config's hook has zeroed."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(y + offsets, tl.load(y + offsets, mask) + tl.load(x + offsets, mask), mask)


@triton.autotune([triton.Config({"BLOCK": 32, "HALF": 0}), triton.Config({"BLOCK": 32, "HALF": 1})], key=["n"])
@triton.jit
def write_half(x, y, n, BLOCK: tl.constexpr, HALF: tl.constexpr):
    """Writes one half of y: each config another one."""
    offsets = tl.arange(0, BLOCK)
    mask = (offsets < n) & (offsets // (BLOCK // 2) == HALF)
    tl.store(y + offsets, tl.load(x + offsets, mask), mask)


def pinned(**fields: Any) -> Any:
    return tuning.install(tuning.AutotunePolicy(mode="pinned", modules=("interpreted_cases",), **fields))


def in_place() -> Any:
    x, y = torch.ones(32), torch.full((32,), 5.0)
    seen = []
    with pinned():
        for _ in range(3):
            add_in_place[lambda meta: (triton.cdiv(32, meta["BLOCK"]),)](x, y, 32)
            seen.append(sorted(set(y.tolist())))
    return seen


def hooks(folder: str, tables: str) -> Any:
    """Pinned to what another process wrote, and with its hook."""
    x, y = torch.ones(32), torch.full((32,), 5.0)
    seen = []
    with pinned(table_path=(folder,) if tables else (), on_miss="error" if tables else "cheapest") as installed:
        for _ in range(3):
            accumulate[lambda meta: (triton.cdiv(32, meta["BLOCK"]),)](x, y, 32)
            seen.append(sorted(set(y.tolist())))
        if not tables:
            from tuning.freeze import freeze
            from tuning.tables import write_table

            for table in freeze(installed.manifest()).tables:
                write_table(folder, table)
        (choice,) = installed.choices
    return [seen, choice.source, choice.launch_config.text]


def half() -> Any:
    x, seen = torch.ones(32), []
    with pinned():
        for _ in range(2):
            y = torch.zeros(32)
            write_half[(1,)](x, y, 32)
            seen.append([float(y[0]), float(y[31])])
    return seen


@triton.autotune(configs(16, 32), key=["n"])
@triton.jit
def update(x, y, n, BLOCK: tl.constexpr):
    """Adds x to y where y is, and nothing restores y after a run that was timed."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(y + offsets, tl.load(y + offsets, mask) + tl.load(x + offsets, mask), mask)


def checked(folder: str, name: str, check: str) -> Any:
    """Record one kernel; what it left, and the notes of the journal."""
    from tuning.journal import find_journals, read_journal

    kernel = {"half": write_half, "update": update, "in_place": add_in_place, "hook": accumulate}[name]
    policy = tuning.AutotunePolicy(
        record_path=os.path.join(folder, name), modules=("interpreted_cases",), check_outputs=bool(check)
    )
    seen = []
    with tuning.install(policy):
        for _ in range(2):
            x, y = torch.ones(32), torch.zeros(32)
            kernel[lambda meta: (triton.cdiv(32, meta["BLOCK"]),)](x, y, 32)
            seen.append([float(y[0]), float(y[31])])
    (path,) = find_journals([os.path.join(folder, name)])
    return [seen, [record.note for record in read_journal(path).records if record.timings]]


def main(name: str, *arguments: str) -> None:
    """Print what a case gave."""
    result = {"in_place": in_place, "hooks": hooks, "half": half, "checked": checked}[name](*arguments)
    print(json.dumps({"result": result, "timed": len(timed), "triton": triton.__version__}))


if __name__ == "__main__":
    import interpreted_cases

    interpreted_cases.main(*sys.argv[1:])
