"""The real Triton autotuner over a recording stub kernel: needs neither a GPU, nor torch, nor a compiler."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import triton
from triton.runtime.autotuner import Autotuner

from tuning.spec import LaunchConfig


class constexpr:
    """Stands in an annotation, where only its name is read."""


class FakeTensor:
    """Has what a launch reads of a tensor: a dtype, an address, and a value for hooks to change."""

    def __init__(self, dtype: str = "torch.float32", address: int = 0, value: float = 1.0) -> None:
        self.dtype = dtype
        self.address = address
        self.value = value

    def data_ptr(self) -> int:
        return self.address

    def zero_(self) -> None:
        self.value = 0.0

    def clone(self) -> FakeTensor:
        return FakeTensor(self.dtype, self.address, self.value)

    def copy_(self, other: FakeTensor) -> None:
        self.value = other.value


def kernel(x, y, n, flag: constexpr, BLOCK: constexpr):  # type: ignore[no-untyped-def]
    """The Python function under the stub; never executed."""


@dataclass
class StubKernel:
    """Records launches in place of a JIT function."""

    fn: Callable[..., Any] = kernel
    fails: Callable[[LaunchConfig, dict[str, Any]], BaseException | None] = lambda config, named: None
    effect: Callable[[dict[str, Any]], None] = lambda named: None
    launches: list[LaunchConfig] = field(default_factory=list)
    compiled: list[LaunchConfig] = field(default_factory=list)
    lock: Any = field(default_factory=threading.Lock)

    @property
    def arg_names(self) -> list[str]:
        return list(self.fn.__code__.co_varnames[: self.fn.__code__.co_argcount])

    def _config(self, kwargs: dict[str, Any], named: Mapping[str, Any]) -> LaunchConfig:
        core = {name: kwargs[name] for name in ("num_warps", "num_stages", "num_ctas") if name in kwargs}
        for name in ("maxnreg", "ir_override"):
            core[name] = kwargs.get(name)
        tunable = {name: value for name, value in named.items() if name.isupper()}
        return LaunchConfig.build(tunable, **core)

    def run(self, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> str:
        named = {**dict(zip(self.arg_names, args, strict=False))}
        named.update((name, value) for name, value in kwargs.items() if name in self.arg_names)
        config = self._config(kwargs, named)
        error = self.fails(config, named)
        if error is not None:
            raise error
        with self.lock:
            (self.compiled if warmup else self.launches).append(config)
        if not warmup:
            self.effect(named)
        return f"launched {config}"

    def warmup(self, *args: Any, grid: Any, **kwargs: Any) -> str:
        return self.run(*args, grid=grid, warmup=True, **kwargs)


def configs(*blocks: int, **fields: Any) -> list[Any]:
    # The default number of stages is 2 in Triton 3.2 and 3 later.
    return [triton.Config({"BLOCK": block}, **{"num_stages": 3, **fields}) for block in blocks]


class Bench:
    """A scripted stopwatch: times by BLOCK, in ms; counts its calls; runs the kernel once per call, as a real one."""

    def __init__(self, times: Mapping[int, float] | None = None, stub: StubKernel | None = None) -> None:
        self.times = times or {}
        self.stub = stub
        self.calls = 0

    def __call__(self, kernel_call: Callable[[], Any], quantiles: Sequence[float]) -> list[float]:
        self.calls += 1
        kernel_call()
        if self.stub is None or not self.times:
            return [1.0, 0.9, 1.1]
        block = int(dict(self.stub.launches[-1].kwargs)["BLOCK"])
        return [self.times[block], self.times[block] * 0.9, self.times[block] * 1.1]


def autotuner(
    candidates: Sequence[Any],
    *,
    key: Sequence[str] = ("n",),
    stub: Any = None,
    bench: Any = None,
    kind: type[Any] = Autotuner,
    **options: Any,
) -> Any:
    """An autotuner over a stub; ``.fn`` is the stub, ``.do_bench`` the scripted stopwatch."""
    stub = StubKernel() if stub is None else stub
    bench = Bench(stub=stub) if bench is None else bench
    reset = options.pop("reset_to_zero", None)
    restore = options.pop("restore_value", None)
    return kind(stub, stub.arg_names, list(candidates), list(key), reset, restore, do_bench=bench, **options)


def launch(tuner: Any, *args: Any, **kwargs: Any) -> Any:
    return tuner[(1,)](*args, **kwargs)
