"""What deterministic mode costs, range by range: time the ranges that a program marks, once for each side.

::

    with timed_ranges() as timer:
        for batch in batches:
            with timer.step():
                train_step(batch)
    write_ranges("deterministic.csv", timer.finish("deterministic"))

A range is what ``torch.cuda.nvtx.range``, its push and pop, or ``torch.profiler.record_function`` encloses, so that
what is marked for a profiler is timed here without another word; torch's optimizers mark their step so. A range counts
with all that lies in it, nested ranges too: times of ranges do not add up to that of the step.

Two clocks: ``events`` brackets each range by two CUDA events on the current stream, which costs some microseconds and
sees waiting for other streams; ``profiler`` adds up the kernels that torch's profiler saw launched in it, by the
range's own thread. Without a GPU both have the host's time alone. By events, a range that begins or ends while a graph
is captured is left out. The table of two sides is in :mod:`cost_table`.
"""

from __future__ import annotations

import contextlib
import importlib
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal

from .._launch_within import capturing
from ..errors import CostError

__all__ = ["STEP", "RangeTime", "RangeTimer", "RangeTimes", "measure_ranges", "timed_ranges"]

STEP = "step"
"""The range that :meth:`RangeTimer.step` marks: all of one step."""

_THEIR_STEP = "step (the program's own)"  # a range of that name which the program marks: another than ours
_OUR_MARK = "triton-tuning: step"  # ours among the profiler's

_Clock = Literal["events", "profiler"]


def _torch() -> Any:
    # Untyped on purpose: torch's annotations of what is patched here are not complete.
    return importlib.import_module("torch")


@dataclass(frozen=True)
class RangeTime:
    """Times of one range, in ms for each step: the median over the steps, and the 10th and 90th percentiles.

    Attributes:
        calls: how often the range was entered, for each step on average.
        host: median, p10 and p90 of the host's time.
        device: of the device's time; None where no device was timed.
    """

    calls: float
    host: tuple[float, float, float] | None
    device: tuple[float, float, float] | None


@dataclass(frozen=True)
class RangeTimes:
    """Times of all ranges of one side.

    Attributes:
        side: what was timed, such as ``default`` or ``deterministic``.
        source: ``events``, ``profiler``, or ``nsys``.
        device: name of the device; ``cpu`` where there is none.
        steps: how many steps were timed.
        ranges: by name.
    """

    side: str
    source: str
    device: str
    steps: int
    ranges: dict[str, RangeTime]

    @property
    def has_device_times(self) -> bool:
        """Whether every range has a time on the device."""
        return bool(self.ranges) and all(found.device is not None for found in self.ranges.values())


@dataclass
class _Open:
    name: str
    began: float
    event: Any
    annotation: Any = None
    captured: bool = False


class RangeTimer:
    """Times the ranges that are entered while it is active; see :func:`timed_ranges`."""

    def __init__(self, clock: _Clock = "events") -> None:
        torch = _torch()
        if clock not in ("events", "profiler"):
            raise CostError(f"clock: expected events or profiler, found {clock!r}")
        self._clock = clock
        self._cuda = torch.cuda.is_available()
        self._stacks = threading.local()
        self._lock = threading.Lock()
        self._closed: list[tuple[str, float, Any, Any]] = []
        self._samples: list[dict[str, tuple[int, float, float | None]]] = []
        self._undo: list[tuple[Any, str, Any]] = []
        self._profiler: Any = None
        self._handles: dict[int, _Open] = {}

    # -- what is entered and left ------------------------------------------------------------------------------------

    def _open(self, name: str) -> _Open:
        if self._clock == "profiler":
            torch = _torch()
            annotation = torch.profiler.record_function(name)
            annotation.__enter__()
            return _Open(name, 0.0, None, annotation)
        if capturing():  # what is captured does not run now, and its events have no time
            return _Open(name, 0.0, None, captured=True)
        return _Open(name, time.perf_counter(), self._now())

    def _close(self, opened: _Open) -> None:
        if opened.annotation is not None:
            opened.annotation.__exit__(None, None, None)
            return
        if opened.captured or capturing():
            return
        event = self._now()
        with self._lock:
            self._closed.append((opened.name, 1e3 * (time.perf_counter() - opened.began), opened.event, event))

    def _now(self) -> Any:
        if not self._cuda:
            return None
        torch = _torch()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @property
    def _stack(self) -> list[_Open]:
        if not hasattr(self._stacks, "open"):
            self._stacks.open = []
        stack: list[_Open] = self._stacks.open
        return stack

    def _push(self, name: str) -> None:
        self._stack.append(self._open(_theirs(name)))

    def _pop(self) -> None:
        if self._stack:  # else it was entered before the timer was
            self._close(self._stack.pop())

    # -- patches -----------------------------------------------------------------------------------------------------

    def __enter__(self) -> RangeTimer:
        torch = _torch()
        nvtx = torch.cuda.nvtx
        push, pop, start, end = nvtx.range_push, nvtx.range_pop, nvtx.range_start, nvtx.range_end

        def range_push(msg: str) -> Any:
            self._push(str(msg))
            return push(msg) if self._cuda else len(self._stack) - 1

        def range_pop() -> Any:
            self._pop()
            return pop() if self._cuda else len(self._stack)

        def range_start(msg: str) -> Any:
            opened = self._open(_theirs(str(msg)))
            handle = start(msg) if self._cuda else id(opened)
            self._handles[handle] = opened
            return handle

        def range_end(range_id: Any) -> None:
            opened = self._handles.pop(range_id, None)
            if opened is not None:
                self._close(opened)
            if self._cuda:
                end(range_id)

        for function in (range_push, range_pop, range_start, range_end):
            self._replace(nvtx, function.__name__, function)
        if self._clock == "events":
            self._patch_record_function(torch.autograd.profiler.record_function)
        else:
            activities = [torch.profiler.ProfilerActivity.CPU]
            activities += [torch.profiler.ProfilerActivity.CUDA] if self._cuda else []
            self._profiler = torch.profiler.profile(activities=activities)
            self._profiler.__enter__()
        return self

    def _patch_record_function(self, kind: Any) -> None:
        enter, leave = kind.__enter__, kind.__exit__
        timer = self

        def __enter__(self: Any) -> Any:
            found = enter(self)
            timer._push(self.name)
            return found

        def __exit__(self: Any, *error: Any) -> Any:
            timer._pop()
            return leave(self, *error)

        self._replace(kind, "__enter__", __enter__)
        self._replace(kind, "__exit__", __exit__)

    def _replace(self, owner: Any, name: str, function: Any) -> None:
        self._undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, function)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        while self._undo:
            owner, name, original = self._undo.pop()
            setattr(owner, name, original)
        if self._profiler is not None:
            self._profiler.__exit__(kind, error, traceback)

    # -- steps -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """One step: its ranges are summed, and it is a range itself. Waits for the device before and after."""
        self._wait()
        opened = self._open(STEP if self._clock == "events" else _OUR_MARK)
        try:
            yield
        except BaseException:
            self._close(opened)
            self._closed.clear()
            raise
        self._close(opened)
        self._wait()
        with self._lock:
            closed, self._closed = self._closed, []
        sums: dict[str, tuple[int, float, float | None]] = {}
        for name, host, first, last in closed:
            calls, spent, device = sums.get(name, (0, 0.0, None if first is None else 0.0))
            if first is not None and device is not None:
                device += first.elapsed_time(last)
            sums[name] = calls + 1, spent + host, device
        self._samples.append(sums)

    def _wait(self) -> None:
        if self._cuda:
            torch = _torch()
            torch.cuda.synchronize()

    def finish(self, side: str) -> RangeTimes:
        """The times, once the ``with`` block is left.

        Args:
            side: name of what was timed.

        Raises:
            CostError: no step was timed, or the block is not left yet.
        """
        if self._undo:
            raise CostError("finish: expected the with block of timed_ranges to be left, found it active")
        samples = self._samples if self._profiler is None else _profiled(self._profiler, self._cuda)
        if not samples:
            raise CostError("finish: expected at least one step to be timed, found none: enter timer.step()")
        device = "cpu"
        if self._cuda:
            torch = _torch()
            device = str(torch.cuda.get_device_name())
        return RangeTimes(side, self._clock, device, len(samples), _summary(samples))


def _theirs(name: str) -> str:
    return _THEIR_STEP if name == STEP else name


def _profiled(profiler: Any, cuda: bool) -> list[dict[str, tuple[int, float, float | None]]]:
    """Of each step the calls, host ms and device ms of each range that the profiler saw."""
    torch = _torch()
    on_host = torch.autograd.DeviceType.CPU
    marks = [event for event in profiler.events() if event.is_user_annotation and event.device_type == on_host]
    steps = sorted((event.time_range for event in marks if event.name == _OUR_MARK), key=lambda span: span.start)
    samples: list[dict[str, tuple[int, float, float | None]]] = [{} for _ in steps]
    for event in marks:
        place = next((n for n, span in enumerate(steps) if span.start <= event.time_range.start <= span.end), None)
        if place is None or event.name.startswith("ProfilerStep"):
            continue
        name = STEP if event.name == _OUR_MARK else _theirs(event.name)
        calls, host, device = samples[place].get(name, (0, 0.0, 0.0 if cuda else None))
        if device is not None:
            device += 1e-3 * event.device_time_total
        samples[place][name] = calls + 1, host + 1e-3 * event.time_range.elapsed_us(), device
    return samples


def _summary(samples: Sequence[dict[str, tuple[int, float, float | None]]]) -> dict[str, RangeTime]:
    found: dict[str, list[tuple[int, float, float | None]]] = defaultdict(list)
    for name in dict.fromkeys(name for sample in samples for name in sample):
        # A range that a step did not enter took no time in it.
        device = next(sample[name][2] for sample in samples if name in sample)
        absent = 0, 0.0, None if device is None else 0.0
        found[name] = [sample.get(name, absent) for sample in samples]
    return {
        name: RangeTime(
            statistics.fmean(calls for calls, _, _ in values),
            _spread([host for _, host, _ in values]),
            _spread([device for _, _, device in values if device is not None]) if values[0][2] is not None else None,
        )
        for name, values in found.items()
    }


def _spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Median, 10th and 90th percentile."""
    ordered = sorted(values)

    def at(share: float) -> float:
        place = share * (len(ordered) - 1)
        low = int(place)
        high = min(low + 1, len(ordered) - 1)
        return ordered[low] + (place - low) * (ordered[high] - ordered[low])

    return at(0.5), at(0.1), at(0.9)


def timed_ranges(clock: _Clock = "events") -> RangeTimer:
    """Time, in a ``with`` block, the ranges that the program marks; the block's value is the timer.

    Args:
        clock: ``events`` or ``profiler``; see the module's documentation.

    Raises:
        CostError: another clock.
    """
    return RangeTimer(clock)


def measure_ranges(
    step: Callable[[], object], *, side: str, steps: int = 20, warmup: int = 3, clock: _Clock = "events"
) -> RangeTimes:
    """Run a step some times without a clock, then ``steps`` times with one.

    Args:
        step: does one step.
        side: name of what is timed.
        steps: how many to time.
        warmup: how many to run before.
        clock: ``events`` or ``profiler``.

    Raises:
        CostError: the clock is another, or there is no step to time.
    """
    for _ in range(warmup):
        step()
    with timed_ranges(clock) as timer:
        for _ in range(steps):
            with timer.step():
                step()
    return timer.finish(side)
