"""Host cost of a launch: ours pinned, the bare JIT function, and stock Triton on a cache hit and with one config.

On a GPU the kernels are real and do next to nothing; elsewhere a stub stands in for the JIT function, and only ratios
and differences within one run mean anything. Sides are interleaved, so that a slow moment of the machine falls on all.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.util
import json
import logging
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench import results

CASES: dict[str, dict[str, Any]] = {
    "12 arguments": {"tensors": 6, "strides": 2, "flags": 0},
    "12 arguments, by keyword": {"tensors": 6, "strides": 2, "flags": 0, "keywords": True},
    "12 arguments, pre_hook": {"tensors": 6, "strides": 2, "flags": 0, "pre_hook": True},
    "12 arguments, Heuristics inside": {"tensors": 6, "strides": 2, "flags": 0, "heuristics": "inside"},
    "12 arguments, Heuristics outside": {"tensors": 6, "strides": 2, "flags": 0, "heuristics": "outside"},
    "20 arguments": {"tensors": 6, "strides": 8, "flags": 2},
    "36 arguments": {"tensors": 10, "strides": 19, "flags": 3},
    "12 arguments, FLA's autotuner": {"tensors": 6, "strides": 2, "flags": 0, "fla": "disabled"},
    "12 arguments, FLA_CACHE_MODE=strict": {"tensors": 6, "strides": 2, "flags": 0, "fla": "strict"},
}
"""In the two last cases the autotuner is FLA's subclass; strict: it finds its config in a file of FLA's config folder.

``TRITON_CACHE_AUTOTUNING=1`` is no case here: Triton reads it when it tunes, not on a hit.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this case."""
    parser.add_argument("--launches", type=int, default=500, help="launches per sample")
    parser.add_argument("--samples", type=int, default=41, help="samples per side")


class Stub:
    """Takes a launch as a JIT function does and drops it."""

    def __init__(self, names: list[str]) -> None:
        scope: dict[str, Any] = {"__name__": "bench.launch_kernels"}
        exec(f"def kernel({', '.join(names)}): pass", scope)
        self.fn = scope["kernel"]
        self.arg_names = names

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        """Drop it."""

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)


def _names(case: dict[str, Any]) -> list[str]:
    names = [f"t{index}" for index in range(case["tensors"])]
    names += ["k1", "k2", "k3"] + [f"s{index + 1}" for index in range(case["strides"])]
    return [*names, *(f"flag{index + 1}" for index in range(case["flags"])), "BLOCK"]


def _kernel(case: dict[str, Any], gpu: bool) -> Any:
    names = _names(case)
    if not gpu:
        return Stub(names)
    from bench import launch_kernels

    return getattr(launch_kernels, f"kernel{len(names)}")


def _sides(case: dict[str, Any], gpu: bool) -> dict[str, Callable[[], Any]]:
    """The same launch by each way in, as functions without arguments."""
    import torch
    import triton
    from triton.runtime.autotuner import Autotuner, Heuristics

    device = "cuda" if gpu else "cpu"
    kernel = _kernel(case, gpu)
    tensors = [torch.zeros(64, device=device) for _ in range(case["tensors"])]
    values: list[Any] = [*tensors, 128, 64, 32, *range(5, 5 + case["strides"]), *([True] * case["flags"])]
    names = list(kernel.arg_names)
    hook = (lambda named: None) if case.get("pre_hook") else None
    heuristics = {"BLOCK": lambda named: 16} if case.get("heuristics") else None

    def configs(count: int) -> list[Any]:
        tunable = [{} if heuristics else {"BLOCK": 16 << index} for index in range(count)]
        # With the tile under Heuristics the candidates differ in their warps alone.
        return [
            triton.Config(kwargs, num_warps=1 << index, num_stages=1, pre_hook=hook)
            for index, kwargs in enumerate(tunable)
        ]

    kind = Autotuner
    if case.get("fla"):
        from fla.ops.utils.cache import CachedAutotuner as kind

    def bench(call: Callable[[], Any], quantiles: Any) -> list[float]:
        call()
        if case.get("fla") == "strict":
            raise RuntimeError("a benchmark ran: FLA did not find its config in the file")
        return [1.0, 1.0, 1.0]

    def tuned(count: int) -> Any:
        inner = Heuristics(kernel, names, heuristics) if case.get("heuristics") == "inside" else kernel
        tuner = kind(inner, names, configs(count), ["k1", "k2", "k3"], None, None, do_bench=bench)
        if case.get("fla") == "strict":
            _write_fla_config(tuner, values)
        return Heuristics(tuner, names, heuristics) if case.get("heuristics") == "outside" else tuner

    bare = Heuristics(kernel, names, heuristics) if heuristics else kernel
    launch_fields = {"num_warps": 1, "num_stages": 1, "num_ctas": 1, **({} if heuristics else {"BLOCK": 16})}

    def launcher(top: Any, **fields: Any) -> Callable[[], Any]:
        start = top[(1,)]
        if case.get("keywords"):
            return functools.partial(start, **dict(zip(names, values, strict=False)), **fields)
        return functools.partial(start, *values, **fields)

    return {
        "bare JIT": launcher(bare, **launch_fields),
        "stock, one config": launcher(tuned(1)),
        "stock, hit": launcher(tuned(4)),
        "pinned": launcher(tuned(4)),
    }


def _write_fla_config(tuner: Any, values: list[Any]) -> None:
    """The file in which FLA, told to be strict, finds the first candidate for this launch."""
    from fla.ops.utils.cache import AutotuneKey

    key = AutotuneKey.build(tuner.arg_names, tuner.keys, tuple(values), {}).autotune_key
    config = {"kwargs": {"BLOCK": 16}, "num_warps": 1, "num_stages": 1, "num_ctas": 1}
    document = {"autotune_entries": {AutotuneKey.key_hash(key): {"config": config}}}
    (Path(os.environ["FLA_CONFIG_DIR"]) / f"{tuner.kernel_name}.json").write_text(json.dumps(document))


@contextlib.contextmanager
def _fla_mode(mode: str | None) -> Iterator[None]:
    """FLA's cache in this mode, with an empty config folder; FLA reads the variable once, when it is imported."""
    if mode is None:
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # FLA warns where there is no GPU
        from fla.ops.utils import cache
    before, folder = cache.FLA_CACHE_MODE, os.environ.get("FLA_CONFIG_DIR")
    with tempfile.TemporaryDirectory(prefix="bench-fla-") as empty:
        cache.FLA_CACHE_MODE = cache.FlaCacheMode(mode)
        os.environ["FLA_CONFIG_DIR"] = empty
        try:
            yield
        finally:
            cache.FLA_CACHE_MODE = before
            os.environ.pop("FLA_CONFIG_DIR")
            if folder is not None:
                os.environ["FLA_CONFIG_DIR"] = folder


def _measure(case: dict[str, Any], gpu: bool, launches: int, samples: int) -> dict[str, dict[str, float]]:
    import torch

    import tuning

    sides = _sides(case, gpu)
    policy = tuning.AutotunePolicy(mode="pinned", modules=("bench",))
    for name, launch in sides.items():
        if name != "pinned":
            launch()
    times: dict[str, list[float]] = {name: [] for name in sides}

    def sample(launch: Callable[[], Any]) -> float:
        if gpu:
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(launches):
            launch()
        spent = time.perf_counter() - begin
        if gpu:
            torch.cuda.synchronize()
        return 1e6 * spent / launches

    for _ in range(samples):
        for name in ("bare JIT", "stock, one config", "stock, hit"):
            times[name].append(sample(sides[name]))
        with tuning.install(policy):
            sides["pinned"]()
            times["pinned"].append(sample(sides["pinned"]))
            if tuning.benchmarks_run():
                raise RuntimeError("the pinned side ran a benchmark: it measures something else")
    found = {}
    for name, values in times.items():
        low, median, high = (
            statistics.quantiles(values, n=10)[0],
            statistics.median(values),
            statistics.quantiles(values, n=10)[8],
        )
        found[name] = {"median_us": median, "p10_us": low, "p90_us": high}
    return found


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run the case and return the result."""
    import torch

    gpu = torch.cuda.is_available()
    logging.getLogger("tuning").setLevel(logging.ERROR)  # the tunable under Heuristics leaves candidates without a tile
    table = {}
    print(f"{'us per launch (median)':36} {'bare JIT':>9} {'one cfg':>9} {'hit':>9} {'pinned':>9} {'over bare':>10}")
    skipped = []
    for title, case in CASES.items():
        if case.get("fla") and importlib.util.find_spec("fla") is None:
            skipped.append(title)
            print(f"{title:36} skipped: fla-core is not installed", flush=True)
            continue
        with _fla_mode(case.get("fla")):
            found = table[title] = _measure(case, gpu, options.launches, options.samples)
        medians = [found[name]["median_us"] for name in ("bare JIT", "stock, one config", "stock, hit", "pinned")]
        print(
            f"{title:36} {' '.join(f'{value:9.2f}' for value in medians)} {medians[3] - medians[0]:+10.2f}", flush=True
        )
    return {
        "case": "launch",
        **results.circumstances(("triton", "torch", "fla-core")),
        "kernel": "compiled, next to no work on the device" if gpu else "stub in place of the JIT function",
        "launches_per_sample": options.launches,
        "samples": options.samples,
        "times": table,
        "skipped": skipped,
    }
