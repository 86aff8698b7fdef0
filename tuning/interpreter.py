"""Run autotuned kernels on the CPU: Triton's interpreter, and what else a process needs for it.

``TRITON_INTERPRET=1`` makes ``triton.jit`` build interpreted functions, which run on CPU tensors through numpy. The
autotuner works over them as it is, but for one thing: it asks the active driver for a benchmarker, and without a GPU
there is no driver. :func:`use_interpreter` sets one that can do that and nothing else, so that the real autotuner runs
from end to end: it prunes, times, caches and launches. Times are those of the interpreter on this CPU. They have
nothing to do with a GPU's, but they scatter as those do.

Meant for a process of its own, such as those of ``triton-tuning demo``: it changes the process for good.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
import types
from collections.abc import Callable, Sequence
from typing import Any

from .errors import TuningError, UnsupportedTritonError

__all__ = ["numpy_problem", "stand_in_for_cuda", "use_interpreter"]


def use_interpreter() -> None:
    """Let kernels that are decorated from now on run on CPU tensors in this process, autotuning included.

    Call it before triton is imported for the first time.

    Raises:
        TuningError: triton was imported without ``TRITON_INTERPRET=1``, or the installed numpy does not work with it.
        UnsupportedTritonError: triton is not installed.
    """
    if "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1":
        raise TuningError(
            "triton was imported before use_interpreter was called, without TRITON_INTERPRET=1 in the environment: "
            "call use_interpreter first, or start the process with that variable"
        )
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        import triton
    except ImportError as error:
        raise UnsupportedTritonError(f"triton cannot be imported ({error}): install it") from error
    problem = numpy_problem(triton.__version__)
    if problem is not None:
        raise TuningError(problem)
    triton.runtime.driver.set_active(_Driver())
    _drop_neutral_fields(triton.Config)


def numpy_problem(triton_version: str) -> str | None:
    """Why the installed numpy cannot serve the interpreter of this Triton, and what to do; None if it can."""
    try:
        import numpy
    except ImportError:
        return "Triton's interpreter needs numpy, which is not installed; run: pip install 'numpy<2.4'"
    # Observed: the interpreter of Triton 3.6 and older fails under numpy 2.4.
    if _release(numpy.__version__) >= (2, 4) and _release(triton_version) < (3, 7):
        return (
            f"numpy {numpy.__version__} does not work with the interpreter of Triton {triton_version}: expected "
            "numpy<2.4 for Triton 3.6 and older; run: pip install 'numpy<2.4'"
        )
    return None


def _release(version: str) -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", version)
    return (int(match[1]), int(match[2])) if match else (0, 0)


class _Driver:
    """All that the autotuner asks of a driver."""

    def get_benchmarker(self) -> Callable[..., Any]:
        return _benchmark


def _benchmark(call: Callable[[], Any], quantiles: Sequence[float] | None = None, **options: Any) -> Any:
    """Time one call in milliseconds. Like Triton's: one number, or as many as quantiles were asked for.

    An interpreted launch takes milliseconds at least and needs neither warming up nor a synchronisation.
    """
    started = time.perf_counter()
    call()
    elapsed = (time.perf_counter() - started) * 1e3
    return elapsed if quantiles is None else [elapsed] * len(quantiles)


_WARP_SPECIALIZATION = ("num_buffers_warp_spec", "num_consumer_groups", "reg_dec_producer", "reg_inc_consumer")


def _drop_neutral_fields(config: Any) -> None:
    """Triton 3.2 hands the kernel four fields that its interpreter does not know: leave them out where they are 0."""
    if not hasattr(config({}), _WARP_SPECIALIZATION[0]):
        return
    original = config.all_kwargs

    def all_kwargs(self: Any) -> Any:
        found = original(self)
        return {name: value for name, value in found.items() if name not in _WARP_SPECIALIZATION or value}

    config.all_kwargs = all_kwargs


def stand_in_for_cuda() -> None:
    """Let wrappers that ask torch for a CUDA device before they launch a kernel go on with CPU tensors.

    mamba_ssm's enter ``torch.cuda.device(...)`` and read the number of multiprocessors. In this process those two then
    do nothing and answer 1.
    """
    import torch

    def device(device: Any) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def get_device_properties(device: Any = None) -> types.SimpleNamespace:
        return types.SimpleNamespace(name="interpreter", multi_processor_count=1)

    cuda: Any = torch.cuda
    cuda.device = device
    cuda.get_device_properties = get_device_properties
