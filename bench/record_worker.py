"""One workload in a process of its own, for ``bench.record``, which finds its result in a file.

``collect``: of each autotuner's candidates one is launched, the first that can be; what is launched is journaled, with
what the compiler sees of it. ``time``: record mode with a short benchmark, once the GPU is free. A key that an earlier
workload of the same round has timed is not timed again: its winner is launched, and journaled without any timing.

What a round has timed is read from the results of the workloads that are done, so that a process that is killed leaves
nothing behind that others take for timed; and neither does one in which a candidate broke the CUDA context.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench import record_stand_in
from bench.results import write_whole
from bench.workloads import find, prepare
from bench.workloads.steps import FILLS, import_package
from tuning._merge_contexts import breaks_context

NOT_TIMED = 2.0**-500
"""Milliseconds that no stopwatch shows: Triton has to be told something of a candidate that is not timed, and by this
number a record that holds it is known, whichever way it came there."""
WARM_SECONDS = 0.2
"""For which the GPU works before a workload is timed, so that its clocks are up."""


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
            return [NOT_TIMED] * 3
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


def known_winners(folder: Path) -> dict[str, str]:
    """The winner of each key that the finished workloads of a round have timed: kernel and key to the config's text."""
    found: dict[str, str] = {}
    for path in sorted(folder.glob("*/result.json")):
        with contextlib.suppress(json.JSONDecodeError):
            found.update(json.loads(path.read_text(encoding="utf-8")).get("winners", {}))
    return found


class _Journaled:
    """Sees each record on its way to the journal: takes out timings that are none, and keeps the winners."""

    def __init__(self, launched_once: bool) -> None:
        self.winners: dict[str, str] = {}
        self.broken = ""
        self._launched_once = launched_once

    def __call__(self, record: Any) -> Any:
        """The record as it is to be journaled."""
        if any(timing.times_ms and min(timing.times_ms) == NOT_TIMED for timing in record.timings):
            return replace(record, timings=(), note="not timed: an earlier workload of this recording timed this key")
        if self._launched_once:
            record = replace(record, note="launched once and not timed: its times are made up")
        self.broken = self.broken or next((item.error for item in record.timings if breaks_context(item.error)), "")
        if record.timings and not self.broken:
            self.winners[f"{record.kernel.qualified_name} {record.key.text}"] = record.winner.text
        return record

    def watch(self) -> None:
        """From now on every journal of this process is written by way of this."""
        from tuning.journal import JournalWriter

        write = JournalWriter.write

        def through(writer: Any, record: Any) -> None:
            write(writer, self(record))

        JournalWriter.write = through  # type: ignore[method-assign]


def _warm_clocks(torch: Any) -> None:
    """Keep the GPU busy for a moment; what is timed right after idling is timed at low clocks."""
    ones = torch.ones(2048, 2048, device="cuda", dtype=torch.bfloat16)
    end = time.perf_counter() + WARM_SECONDS
    while time.perf_counter() < end:
        for _ in range(20):
            torch.mm(ones, ones)
        torch.cuda.synchronize()


def _empty(torch: Any, spec: Any, generator: Any, device: str) -> Any:
    """Values are of no account where nothing is launched, and of integers only that they are in range."""
    return torch.empty(spec.sizes) if spec.dtype in ("bfloat16", "float32") else torch.zeros(spec.sizes)


def _run(options: argparse.Namespace) -> None:
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
    journaled = _Journaled(options.mode == "collect")
    journaled.watch()
    began = time.perf_counter()
    # Up to here nothing touched the GPU: another workload may be timed on it.
    with _alone(options.lock):
        waited = time.perf_counter() - began
        if options.mode == "time":
            known.update(known_winners(Path(options.result).parents[1]))
            if not stand_in:
                _warm_clocks(torch)
        policy = tuning.AutotunePolicy(
            mode="record",
            modules=tuple(workload.scope),
            config_invariant=(),
            record_path=options.record,
            remeasure=options.remeasure,
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
        result = {
            "name": workload.name,
            "error": error,
            "finished": True,
            "kernels": sorted({identity.partition(" ")[0] for identity in keys}),
            "keys": len(keys),
            "new_keys": sorted(journaled.winners),
            "winners": journaled.winners,
            "broken": journaled.broken,
            "reused": sorted(set(reused)),
            "candidates_timed": getattr(stopwatch, "candidates", 0),
            "seconds": round(seconds, 3),
            "waited_s": round(waited, 3),
        }
        # Before the GPU is given up: whoever has it next knows what is timed.
        write_whole(Path(options.result), json.dumps(result))


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
    parser.add_argument("--remeasure", action="store_true", help="settle near ties by timing them again, in turns")
    parser.add_argument("--warmup-ms", type=int, default=5)
    parser.add_argument("--rep-ms", type=int, default=25)
    parser.add_argument("--stand-in", action="store_true", help="without a GPU: collect, and launch nothing")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    _run(options)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
