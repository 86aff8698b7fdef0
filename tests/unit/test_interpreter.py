"""The real autotuner on CPU tensors, in processes made for it; and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from tuning import interpreter

ROOT = Path(__file__).parents[2]

PROGRAM = """
from tuning import interpreter
interpreter.use_interpreter()
import torch, triton
import triton.language as tl

@triton.autotune(configs=[triton.Config({"BLOCK": block}) for block in (4, 8)], key=["n"])
@triton.jit
def double(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, 2 * tl.load(x_ptr + at, mask=at < n), mask=at < n)

x = torch.arange(10.0)
y = torch.zeros(10)
double[lambda meta: (triton.cdiv(10, meta["BLOCK"]),)](x, y, 10)
assert torch.equal(y, 2 * x), y
times = list(double.configs_timings.values())
assert len(times) == 2 and all(len(t) == 3 and t[0] > 0 for t in times), times

interpreter.stand_in_for_cuda()
with torch.cuda.device(None):
    assert torch.cuda.get_device_properties(x.device).multi_processor_count == 1
print("ok")
"""


def in_a_process(program: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    return subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        cwd=ROOT,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_autotuner_runs_from_end_to_end(tmp_path: Path):
    path = tmp_path / "program.py"  # triton.jit reads the source of a kernel from its file
    path.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{PROGRAM}")
    done = in_a_process(f"import runpy; runpy.run_path({str(path)!r})")
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


def test_triton_imported_before_is_too_late():
    program = "import triton\nfrom tuning import interpreter\ninterpreter.use_interpreter()"
    done = in_a_process(program)
    assert "triton was imported before use_interpreter was called" in done.stderr
    assert in_a_process(program, TRITON_INTERPRET="1").returncode == 0


@pytest.mark.parametrize(
    ("numpy", "triton", "refused"),
    [
        ("2.4.0", "3.6.0", True),
        ("2.10.1", "3.2.0", True),
        ("3.0.0", "3.5.1", True),
        ("2.3.5", "3.6.0", False),
        ("2.4.0", "3.7.0", False),
        ("1.26.4", "3.2.0", False),
    ],
)
def test_numpy_is_checked_against_triton(numpy: str, triton: str, refused: bool, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "numpy", types.SimpleNamespace(__version__=numpy))
    problem = interpreter.numpy_problem(triton)
    assert (problem is not None) is refused
    if problem is not None:
        assert numpy in problem
        assert triton in problem
        assert "pip install 'numpy<2.4'" in problem


def test_missing_numpy_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "numpy", None)
    assert "not installed" in (interpreter.numpy_problem("3.6.0") or "")


def test_a_benchmark_gives_as_many_numbers_as_were_asked_for():
    bench: Any = interpreter._Driver().get_benchmarker()
    calls: list[int] = []
    assert len(bench(lambda: calls.append(1), quantiles=(0.5, 0.2, 0.8))) == 3
    assert bench(lambda: calls.append(1), warmup=1, rep=2) >= 0
    assert calls == [1, 1]


def test_fields_that_an_old_interpreter_does_not_know_are_left_out_where_they_are_0():
    class Config:
        """As in Triton 3.2."""

        def __init__(self, kwargs: dict[str, Any], num_buffers_warp_spec: int = 0, reg_dec_producer: int = 0) -> None:
            self.kwargs = kwargs
            self.num_buffers_warp_spec = num_buffers_warp_spec
            self.reg_dec_producer = reg_dec_producer

        def all_kwargs(self) -> dict[str, Any]:
            return {
                **self.kwargs,
                "num_buffers_warp_spec": self.num_buffers_warp_spec,
                "reg_dec_producer": self.reg_dec_producer,
            }

    interpreter._drop_neutral_fields(Config)
    assert Config({"BLOCK": 0}).all_kwargs() == {"BLOCK": 0}
    assert Config({}, reg_dec_producer=40).all_kwargs() == {"reg_dec_producer": 40}

    class Later:
        def __init__(self, kwargs: dict[str, Any]) -> None:
            self.kwargs = kwargs

        def all_kwargs(self) -> dict[str, Any]:
            return self.kwargs

    original = Later.all_kwargs
    interpreter._drop_neutral_fields(Later)
    assert Later.all_kwargs is original
