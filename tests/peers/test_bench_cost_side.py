"""One side of the case ``cost``, in a process of its own, over mamba_ssm's kernels in Triton's interpreter."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from bench import cost


@pytest.mark.peers("mamba_ssm", "numpy")
def test_a_side_is_repeatable_and_times_its_ranges(tmp_path: Path) -> None:
    name = "deterministic, cheapest"
    worker = cost.Worker(name, tmp_path, time.monotonic() + 250, "--side", name, "--device", "cpu")
    try:
        ready = worker.hear()
        cost._check({name: ready})
        assert len(ready["sources"]) > 10
        worker.tell("1")
        assert worker.hear() == {"measured": 1}
        worker.tell("")
        ranges = worker.hear()["ranges"]
        parts = {f"{part}, {way}" for part in ("SSD mixer", "attention", "mixture of experts")
                 for way in ("forward", "backward")}  # fmt: skip
        assert parts | {"step", "forward", "loss", "backward", "Optimizer.step#AdamW.step"} <= set(ranges)
        assert ranges["SSD mixer, forward"]["host"][0] < ranges["forward"]["host"][0] < ranges["step"]["host"][0]
    finally:
        worker.close()


def test_a_side_that_dies_says_why(tmp_path: Path) -> None:
    worker = cost.Worker("x", tmp_path, time.monotonic() + 100, "--device", "none")
    try:
        with pytest.raises(RuntimeError, match=r"(?s)x ended with 2: .*invalid choice: 'none'"):
            worker.hear()
    finally:
        worker.close()
