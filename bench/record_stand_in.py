"""An H200 that is not there: for collecting what a workload launches, and for compiling it, on any machine.

Kernels are decorated and specialised for it by the real Triton; launches do nothing, and so compile nothing. What
packages ask of ``torch.cuda`` as they are imported is answered as an H200 answers.
"""

from __future__ import annotations

import contextlib
import types
from typing import Any

from tuning._launch_target import compile_for

__all__ = ["ARCH", "NAME", "launch_nothing", "needed", "on_cpu", "pretend"]

ARCH = "sm90"
NAME = "stand-in for an H200"
"""Not the name of a GPU: nothing recorded with it may pass for a measurement."""
MULTIPROCESSORS = 132
CAPABILITY = (9, 0)


def needed() -> bool:
    """Whether this machine has no GPU that CUDA can use."""
    import torch

    return not torch.cuda.is_available()


def pretend() -> None:
    """Answer for the GPU, in Triton and in ``torch.cuda``, for good. Call it before packages are imported."""
    import torch

    compile_for(ARCH, multiprocessors=MULTIPROCESSORS)
    properties = types.SimpleNamespace(
        name=NAME,
        major=CAPABILITY[0],
        minor=CAPABILITY[1],
        multi_processor_count=MULTIPROCESSORS,
        warp_size=32,
        total_memory=141 << 30,
        shared_memory_per_block_optin=227 << 10,
        shared_memory_per_multiprocessor=228 << 10,
    )
    answers: dict[str, Any] = {
        "is_available": lambda: True,
        "get_device_name": lambda device=None: NAME,
        "get_device_capability": lambda device=None: CAPABILITY,
        "get_device_properties": lambda device=None: properties,
        "device": lambda device=None: contextlib.nullcontext(),
        "current_device": lambda: 0,
        "device_count": lambda: 1,
        "set_device": lambda device: None,
        "synchronize": lambda device=None: None,
        "is_current_stream_capturing": lambda: False,
        "get_rng_state": lambda device="cuda": torch.get_rng_state(),
        "is_initialized": lambda: False,
    }
    for name, answer in answers.items():
        setattr(torch.cuda, name, answer)


def launch_nothing() -> None:
    """From now on a launch of a kernel returns at once, and every candidate is timed at 1 ms.

    Functions that a package hands to ``torch.compile`` run as they are written.
    """
    import torch
    import triton.testing
    from triton.runtime.driver import driver
    from triton.runtime.jit import JITFunction

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        return None

    def bench(call: Any, quantiles: Any = None, **options: Any) -> list[float]:
        call()
        return [1.0, 1.0, 1.0]

    torch.compile = _as_written
    torch.Tensor.is_cuda = property(lambda tensor: True)  # also in a backward, which no mode reaches
    JITFunction.run = run
    triton.testing.do_bench = bench
    driver.active.get_benchmarker = lambda: bench


def _as_written(function: Any = None, **options: Any) -> Any:
    return function if function is not None else lambda inner: inner


def on_cpu() -> Any:
    """A context in which tensors are on a GPU by their word and on the CPU in truth; large products are left undone."""
    import torch
    from torch.overrides import TorchFunctionMode

    products = (torch.matmul, torch.mm, torch.nn.functional.linear, torch.Tensor.matmul, torch.Tensor.__matmul__)

    device = torch.Tensor.device.__get__

    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function == device:
                return torch.device("cuda", 0)
            args = tuple("cpu" if isinstance(value, torch.device) else value for value in args)
            kwargs = dict(kwargs or {})
            if kwargs.get("device") is not None:
                kwargs["device"] = "cpu"
            if function in products and len(args) > 1 and not torch.is_grad_enabled() and "out" not in kwargs:
                left, right = args[:2]
                columns = right.shape[0] if function is torch.nn.functional.linear else right.shape[-1]
                if left.dim() > 1 and right.dim() > 1:
                    return left.new_empty(*left.shape[:-1], columns)
            return function(*args, **kwargs)

    return OnCpu()
