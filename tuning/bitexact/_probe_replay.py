"""Replay one launch with every candidate on several inputs, and group the candidates by the bytes that they leave.

All tensors of the call are compared, whether the kernel is thought to write them or not. Which ones it writes decides
only what is poisoned first: a tensor of floats that changed, and whose written part does not depend on what it
held before, is filled with a byte pattern before each run, so that an element that a candidate leaves unwritten shows.
Integers are never poisoned: a lock or an index of garbage could hang the device or lead out of memory.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tuning._launch_arguments import CannotBeCopied, Copies, same_bytes
from tuning._launch_replay import Reached, readers_of_best_config, uses_atomics
from tuning.bitexact._probe_classes import CandidateProbe, Distance, InputProbe, JudgedBy, KeyProbe, partition
from tuning.bitexact._probe_inputs import fill, holds_floats, input_names, poison
from tuning.bitexact.difference import most_ulps
from tuning.bitexact.digest import digest_tensor
from tuning.interception import resource_errors
from tuning.spec import LaunchConfig

__all__ = ["Outputs", "furthest", "group_outputs", "random_state_kept", "replay", "tells"]

Outputs = Mapping[str, Any]

_PATTERNS = (0x7E, 0x3A)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Restore the state of Python's and torch's random numbers, on the CPU and the current device, at the end."""
    import torch

    python, cpu = random.getstate(), torch.get_rng_state()
    # Asking whether there is one would start CUDA where nothing has used it yet.
    device = torch.cuda.get_rng_state() if torch.cuda._initialized else None
    try:
        yield
    finally:
        random.setstate(python)
        torch.set_rng_state(cpu)
        if device is not None:
            torch.cuda.set_rng_state(device)


def _equal(left: Outputs, right: Outputs) -> bool:
    return left.keys() == right.keys() and all(same_bytes(left[name], right[name]) for name in left)


def tells(outputs: Outputs, names: Iterable[str]) -> bool:
    """Whether it means anything that two outcomes of these names agree: some element is finite and not 0."""
    import torch

    for name in names:
        values = outputs[name]
        if not holds_floats(values):
            return True
        values = torch.view_as_real(values.resolve_conj()) if values.is_complex() else values
        values = values.to(torch.float64 if values.element_size() == 8 else torch.float32)
        if bool((torch.isfinite(values) & (values != 0)).any()):
            return True
    return False


class _Replayer:
    """Runs candidates of one launch on copies of its arguments."""

    def __init__(self, launch: Reached, copies: Copies) -> None:
        self._launch = launch
        self._captured = copies
        self._filled: tuple[str, Copies] = ("captured", copies)

    def _copies(self, name: str) -> Copies:
        """Copies of one input: made once, since writing it takes longer than copying it."""
        if name == "captured":
            return self._captured
        if self._filled[0] != name:
            args, kwargs, tensors = self._captured.copy()
            fill(name, tensors)
            self._filled = (name, Copies(tuple(self._launch.autotuner.arg_names), args, kwargs))
        return self._filled[1]

    def run(self, config: Any, name: str, poisoned: tuple[str, ...], pattern: int = _PATTERNS[0]) -> Outputs:
        """Run one candidate on a fresh copy of one input; all tensors afterwards. Raises what the launch raises."""
        args, kwargs, tensors = self._copies(name).copy()
        poison(tensors, poisoned, pattern)
        self._launch.launch(config, args, kwargs)
        return tensors

    def input(self, name: str) -> Outputs:
        """One input's tensors."""
        _, _, tensors = self._copies(name).copy()
        return tensors


def _first_that_runs(replayer: _Replayer, candidates: list[Any]) -> tuple[Any, dict[int, str]]:
    failures: dict[int, str] = {}
    for index, config in enumerate(candidates):
        try:
            replayer.run(config, "captured", ())
            return config, failures
        except resource_errors() as error:  # noqa: PERF203
            failures[index] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None, failures


def _written(replayer: _Replayer, config: Any, names: tuple[str, ...]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The tensors that a launch writes, and those of them that it reads too, so far as these inputs show."""
    changed: dict[str, None] = {}
    for name in names[:2]:
        before = replayer.input(name)
        after = replayer.run(config, name, ())
        changed.update((key, None) for key in before if not same_bytes(before[key], after[key]))
    in_place = []
    for key in changed:
        if not holds_floats(replayer.input("captured")[key]):
            in_place.append(key)
            continue
        first, second = (replayer.run(config, "captured", (key,), pattern) for pattern in _PATTERNS)
        if not _same_where_written(first, second, key):
            in_place.append(key)
    return tuple(changed), tuple(in_place)


def _same_where_written(first: Outputs, second: Outputs, key: str) -> bool:
    """Whether two runs from different patterns differ only where both patterns are still there."""
    import torch

    for name in first:
        if name != key and not same_bytes(first[name], second[name]):
            return False
    left, right = (each[key].contiguous().reshape(-1).view(torch.uint8) for each in (first, second))
    width = first[key].element_size()
    kept = ((left == _PATTERNS[0]) & (right == _PATTERNS[1])).reshape(-1, width).all(1)
    return bool(((left == right).reshape(-1, width).all(1) | kept).all())


def replay(launch: Reached, compiler: str, *, inputs: int = 5, repeats: int = 2) -> KeyProbe:
    """Run a launch with every live candidate and group them. The launch's own arguments are not touched.

    Args:
        launch: the launch.
        compiler: :func:`tuning._launch_replay.compiler_identity`.
        inputs: how many inputs: the captured one, then random ones and magnitudes in turn.
        repeats: how often each candidate is run on the captured input, to see whether it agrees with itself.

    Raises:
        Exception: what a launch raises other than a lack of resources.
    """
    live = sorted(launch.candidates(), key=lambda config: LaunchConfig.of(config).order)

    def found(judged_by: JudgedBy, reason: str, candidates: tuple[CandidateProbe, ...], **more: Any) -> KeyProbe:
        name, source = launch.kernel.qualified_name, launch.kernel.source_hash
        more = {"atomics": uses_atomics(launch.autotuner), "repeats": repeats, **more}
        place = (name, source, launch.key, launch.form, launch.arch, compiler)
        return KeyProbe(*place, judged_by, reason, candidates, **more)

    unjudged = tuple(CandidateProbe(LaunchConfig.of(config), None) for config in live)
    readers = readers_of_best_config(launch.kernel)
    if readers:
        reason = f"{', '.join(readers)} reads best_config: only the caller's outputs can tell"
        return found("nothing", reason, unjudged)
    try:
        replayer = _Replayer(launch, launch.copies())
    except CannotBeCopied as error:
        return found("nothing", error.message, unjudged)
    with random_state_kept():
        first, failures = _first_that_runs(replayer, live)
        if first is None:
            return found("nothing", "no candidate can be launched", _probes(live, {}, set(), failures))
        names = input_names(inputs)
        written, in_place = _written(replayer, first, names)
        if not written:
            return found("nothing", "no tensor argument changed, so there is nothing to compare", unjudged)
        poisoned = tuple(name for name in written if name not in in_place)
        groups: list[list[int | None]] = []
        racy: set[int] = set()
        rows: list[tuple[str, str, bool, dict[int, str]]] = []
        worst = _Worst()
        for name in names:
            read = {key: value for key, value in replayer.input(name).items() if key not in poisoned}
            digest = _digest(read, tuple(read))
            if any(digest == known for _, known, _, _ in rows):
                continue  # integers stay as captured: where nothing else is read, this is an input that was tried
            numbers, representatives = _group(replayer, live, name, poisoned, repeats, failures, racy)
            # A difference counts whatever the values are. That zeros or infinities agree says nothing.
            counted = len(representatives) > 1 or any(tells(outputs, written) for outputs in representatives.values())
            left = {number: _digest(out, written) for number, out in representatives.items()}
            rows.append((name, digest, counted, left))
            if counted:
                worst.add(name, representatives, numbers)
                groups.append(numbers)
        signatures = [
            None if index in failures or index in racy or not groups else tuple(group[index] for group in groups)
            for index in range(len(live))
        ]
        final = partition(signatures)
        candidates = _probes(live, dict(enumerate(final)), racy, failures)
        probed = _inputs(rows, groups, final)
    return found(
        "kernel",
        "",
        candidates,
        inputs=probed,
        distances=worst.between(final),
        written=written,
        in_place=in_place,
    )


def _probes(
    live: list[Any], numbers: Mapping[int, int | None], racy: set[int], failures: Mapping[int, str]
) -> tuple[CandidateProbe, ...]:
    return tuple(
        CandidateProbe(LaunchConfig.of(config), numbers.get(index), index in racy, failures.get(index, ""))
        for index, config in enumerate(live)
    )


def _digest(tensors: Outputs, names: tuple[str, ...]) -> str:
    return " ".join(f"{name}={digest_tensor(tensors[name]).content}" for name in names)


def _group(
    replayer: _Replayer,
    live: list[Any],
    name: str,
    poisoned: tuple[str, ...],
    repeats: int,
    failures: dict[int, str],
    racy: set[int],
) -> tuple[list[int | None], dict[int, Outputs]]:
    """The class of each candidate on one input, and one outcome of each class."""
    numbers: list[int | None] = [None] * len(live)
    representatives: dict[int, Outputs] = {}
    for index, config in enumerate(live):
        if index in failures or index in racy:
            continue
        try:
            outputs = replayer.run(config, name, poisoned)
        except resource_errors() as error:
            failures[index] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            continue
        again = (repeats if name == "captured" else 1) - 1
        if any(not _equal(outputs, replayer.run(config, name, poisoned)) for _ in range(again)):
            racy.add(index)
            continue
        numbers[index] = group_outputs(outputs, representatives)
    return numbers, representatives


def group_outputs(outputs: Outputs, representatives: dict[int, Outputs]) -> int:
    """The number of the class that an outcome belongs to; a new one where it equals none."""
    for number, known in representatives.items():
        if _equal(outputs, known):
            return number
    number = len(representatives)
    representatives[number] = outputs
    return number


def _inputs(
    rows: list[tuple[str, str, bool, dict[int, str]]], groups: list[list[int | None]], final: tuple[int | None, ...]
) -> tuple[InputProbe, ...]:
    """Digests of the outputs by the final classes: on one input several of them may share an outcome."""
    firsts: dict[int, int] = {}
    for index, number in enumerate(final):
        if number is not None:
            firsts.setdefault(number, index)
    counted = iter(groups)
    found = []
    for name, digest, counts, outcomes in rows:
        outputs: tuple[str, ...] = ()
        if counts:
            numbers = next(counted)
            outputs = tuple(outcomes[int(numbers[firsts[number]] or 0)] for number in sorted(firsts))
        found.append(InputProbe(name, digest, counts, outputs))
    return tuple(found)


class _Worst:
    """The largest distance between candidates that differ on some input, kept by pairs of candidates' positions."""

    def __init__(self) -> None:
        self._found: list[tuple[list[int | None], dict[tuple[int, int], tuple[float | None, str]]]] = []

    def add(self, name: str, outcomes: Mapping[int, Outputs], numbers: list[int | None]) -> None:
        pairs: dict[tuple[int, int], tuple[float | None, str]] = {}
        keys = sorted(outcomes)
        for place, left in enumerate(keys):
            for right in keys[place + 1 :]:
                pairs[left, right] = furthest(name, outcomes[left], outcomes[right])
        self._found.append((numbers, pairs))

    def between(self, final: tuple[int | None, ...]) -> tuple[Distance, ...]:
        firsts: dict[int, int] = {}
        for index, number in enumerate(final):
            if number is not None:
                firsts.setdefault(number, index)
        found = []
        for left in sorted(firsts):
            for right in (number for number in sorted(firsts) if number > left):
                seen = []
                for numbers, pairs in self._found:
                    mine, theirs = numbers[firsts[left]], numbers[firsts[right]]
                    if mine is not None and theirs is not None and mine != theirs:
                        seen.append(pairs[min(mine, theirs), max(mine, theirs)])
                if seen:
                    ulps, where = max(seen, key=lambda item: float("inf") if item[0] is None else item[0])
                    found.append(Distance((left, right), ulps, where))
        return tuple(found)


def furthest(name: str, left: Outputs, right: Outputs) -> tuple[float | None, str]:
    """The largest distance in ulps between two outcomes, None where it cannot be told, and where it is."""
    worst: tuple[float | None, str] = (0.0, name)
    for key in left:
        if key in right and same_bytes(left[key], right[key]):
            continue
        ulps = most_ulps(left[key], right[key]) if key in right else None
        if ulps is None:
            return None, f"{name}: {key}"
        if worst[0] is not None and ulps >= worst[0]:
            worst = (float(ulps), f"{name}: {key}")
    return worst
