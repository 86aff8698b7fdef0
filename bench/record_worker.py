"""One workload in a process of its own, for ``bench.record``. Prints one JSON object as its last line.

``collect``: of each autotuner's candidates one is launched, the first that can be; what is launched is journaled, with
what the compiler sees of it. ``time``: record mode with a short benchmark, once the GPU is free. A key that an earlier
workload of the same round has timed is not timed again: its winner is launched.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench import record_stand_in
from bench.workloads import find, prepare
from bench.workloads.steps import FILLS, import_package


class _FirstThatLaunches:
    """A stopwatch that launches candidates of a key until one succeeds, and makes that one the winner."""

    def __init__(self) -> None:
        self.found = False

    def __call__(self, call: Callable[[], Any], quantiles: Any = None, **options: Any) -> list[float]:
        if self.found:
            return [2.0, 2.0, 2.0]
        call()
        self.found = True
        return [1.0, 1.0, 1.0]


class _Short:
    """Triton's stopwatch for a few milliseconds a candidate; for a key that is known already, none at all."""

    def __init__(self, warmup_ms: int, rep_ms: int) -> None:
        import triton.testing

        self._bench = triton.testing.do_bench
        self._times = {"warmup": warmup_ms, "rep": rep_ms}
        self.known = False
        self.candidates = 0

    def __call__(self, call: Callable[[], Any], quantiles: Any = None, **options: Any) -> Any:
        if self.known:
            return [1.0, 1.0, 1.0]
        self.candidates += 1
        return self._bench(call, quantiles=quantiles, **self._times)


def _use(stopwatch: Any) -> None:
    """Every autotuner's benchmark, also of those that brought times of their own, goes through ``stopwatch``."""
    import triton.testing
    from triton.runtime.driver import driver

    driver.active.get_benchmarker = lambda: stopwatch  # type: ignore[method-assign]
    triton.testing.do_bench = stopwatch


def _watch_keys(started: Callable[[Any, Any, list[Any]], list[Any]]) -> None:
    """Call ``started`` with the candidates that are left of each key about to be tuned; it may leave fewer."""
    from triton.runtime.autotuner import Autotuner

    original = Autotuner.prune_configs

    def prune_configs(self: Any, kwargs: Any, *rest: Any) -> Any:
        return started(self, kwargs, list(original(self, kwargs, *rest)))

    Autotuner.prune_configs = prune_configs


def _identity(autotuner: Any, kwargs: Any) -> str:
    """Kernel and key of a launch that is about to be tuned."""
    from tuning._launch_key import KeyReader, constexpr_names
    from tuning.interception import facts

    reader = KeyReader(autotuner.arg_names, autotuner.keys, constexpr_names(autotuner.base_fn))
    key = reader.typed(tuple(autotuner.nargs.values()), kwargs)
    return f"{facts(autotuner).kernel.qualified_name} {key.text}"


@contextlib.contextmanager
def _alone(path: str | None) -> Iterator[None]:
    """The GPU to ourselves, among the processes of one recording."""
    if path is None:
        yield
        return
    with open(path, "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _timed_before(path: str | None) -> dict[str, str]:
    if path is None or not os.path.exists(path):
        return {}
    found: dict[str, str] = {}
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(json.JSONDecodeError):
            found.update(json.loads(line))
    return found


def _empty(torch: Any, spec: Any, generator: Any, device: str) -> Any:
    """Values are of no account where nothing is launched, and of integers only that they are in range."""
    return torch.empty(spec.sizes) if spec.dtype in ("bfloat16", "float32") else torch.zeros(spec.sizes)


def _run(options: argparse.Namespace) -> dict[str, Any]:
    (workload,) = find([options.name], options.workloads)
    stand_in = options.stand_in
    import torch

    if stand_in:
        record_stand_in.pretend()
        record_stand_in.launch_nothing()
        FILLS.update({name: _empty for name in FILLS if name not in ("bounds", "rising", "constant")})
    import tuning
    from tuning.spec import LaunchConfig

    import_package(workload.package)
    reused: list[str] = []
    keys: dict[str, str] = {}
    known: dict[str, str] = {}
    stopwatch: Any = _FirstThatLaunches()
    if options.mode == "time":
        stopwatch = _Short(options.warmup_ms, options.rep_ms)
    _use(stopwatch)

    def started(autotuner: Any, kwargs: Any, candidates: list[Any]) -> list[Any]:
        if isinstance(stopwatch, _FirstThatLaunches):
            stopwatch.found = False
        elif isinstance(stopwatch, _Short):
            identity = _identity(autotuner, kwargs)
            stopwatch.known = False
            for config in candidates:
                if known.get(identity) == LaunchConfig.of(config).text:
                    stopwatch.known = True
                    reused.append(identity)
                    return [config]
        return candidates

    _watch_keys(started)
    if not stand_in:
        torch.zeros(1, device="cuda")  # CUDA starts while another workload is timed
    began = time.perf_counter()
    with _alone(options.lock):
        waited = time.perf_counter() - began
        known.update(_timed_before(options.timed))
        policy = tuning.AutotunePolicy(
            mode="record", modules=tuple(workload.scope), config_invariant=(), record_path=options.record
        )
        error = None
        with tuning.install(policy) as installed:
            started_at = time.perf_counter()
            try:
                with record_stand_in.on_cpu() if stand_in else contextlib.nullcontext():
                    step = prepare(workload, "cpu" if stand_in else "cuda")
                    step()
                if not stand_in:
                    torch.cuda.synchronize()
            except Exception as failure:
                error = _described(failure)
            seconds = time.perf_counter() - started_at
            for choice in installed.choices:
                keys[f"{choice.kernel} {choice.key.text}"] = choice.launch_config.text
        new = {identity: winner for identity, winner in keys.items() if identity not in known}
        if options.timed is not None and new:
            with open(options.timed, "a", encoding="utf-8") as file:
                file.write(json.dumps(new) + "\n")
    return {
        "name": workload.name,
        "error": error,
        "kernels": sorted({identity.partition(" ")[0] for identity in keys}),
        "keys": len(keys),
        "new_keys": sorted(new),
        "reused": sorted(set(reused)),
        "candidates_timed": getattr(stopwatch, "candidates", 0),
        "seconds": round(seconds, 3),
        "waited_s": round(waited, 3),
    }


def _described(error: BaseException) -> str:
    """An error in one line, with where it came from."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(frame.filename).name}:{frame.lineno}"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:400]} ({place})"


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--name", required=True, help="of the workload")
    parser.add_argument("--workloads", nargs="+", default=[], help="modules with lists of workloads")
    parser.add_argument("--mode", choices=("collect", "time"), required=True)
    parser.add_argument("--record", required=True, help="prefix of the journal")
    parser.add_argument("--result", required=True, help="file for the result")
    parser.add_argument("--lock", help="file whose lock stands for the GPU")
    parser.add_argument("--timed", help="file of the keys that are timed already, a JSON object a line")
    parser.add_argument("--warmup-ms", type=int, default=5)
    parser.add_argument("--rep-ms", type=int, default=25)
    parser.add_argument("--stand-in", action="store_true", help="without a GPU: collect, and launch nothing")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    result = _run(options)
    part = Path(options.result + ".part")
    part.write_text(json.dumps(result), encoding="utf-8")
    part.replace(options.result)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
