"""Judge candidates by what their caller computes: a whole step is run once for each of them.

For kernels whose host code reads ``best_config``: what they write depends on the config in extent, and only what the
caller makes of it can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tuning._launch_arguments import same_bytes
from tuning._launch_replay import Reached, compiler_identity, readers_of_best_config, watch_launches
from tuning.bitexact._probe_classes import CandidateProbe, Distance, InputProbe, JudgedBy, KeyProbe, partition
from tuning.bitexact._probe_replay import furthest, group_outputs, random_state_kept, tells
from tuning.bitexact.digest import digest_tensor
from tuning.interception import current_arch, resource_errors
from tuning.spec import Key, LaunchConfig

__all__ = ["probe_steps"]


_Place = tuple[str, str, str]  # kernel, key and form


@dataclass
class _Target:
    """One kernel, key and form whose candidates are to be swapped in, and the inputs whose step launches it."""

    source_hash: str | None
    key: Key
    candidates: dict[LaunchConfig, None] = field(default_factory=dict)
    reached: dict[int, None] = field(default_factory=dict)


class _Swap:
    """Puts one candidate in the place of what would be launched at one place, and counts where it could."""

    def __init__(self) -> None:
        self.place: _Place | None = None
        self._config: LaunchConfig | None = None
        self.launched = self.missed = 0

    @contextmanager
    def of(self, place: _Place, config: LaunchConfig) -> Iterator[None]:
        """Launch ``config`` at ``place`` while the block runs; the counts are of the block."""
        self.place, self._config, self.launched, self.missed = place, config, 0, 0
        try:
            yield
        finally:
            self.place = self._config = None

    def taken(self, launch: Reached) -> Any:
        """The live config to launch; None where the candidate is not live at this launch."""
        found = next((config for config in launch.candidates() if LaunchConfig.of(config) == self._config), None)
        if found is None:
            self.missed += 1
        else:
            self.launched += 1
        return found


def probe_steps(
    step: Callable[[int], Mapping[str, Any]],
    in_scope: Callable[[str], bool],
    *,
    inputs: int = 1,
    every_kernel: bool = False,
    progress: Callable[[KeyProbe], None] | None = None,
) -> tuple[KeyProbe, ...]:
    """Judge candidates by what their caller computes: run a whole step with each of them swapped in alone.

    A candidate is swapped in at one form of launch at a time. It is in a class only if every step that launches the
    form launched it there, each time. An agreement counts only where an output holds a finite number that is not 0.

    Args:
        step: runs one step on input number ``i`` and returns the tensors to compare, by name. It is called many times
            and must do the same each time: random numbers are restored for it, its own state is not.
        in_scope: by qualified name of the kernel.
        inputs: how many inputs there are.
        every_kernel: swap the candidates of every kernel; else only of those whose ``best_config`` is read.
        progress: told of each key that was probed.

    Returns:
        One probe for each kernel, key and form that the step launches. Where the step, run twice without a swap,
        differs from itself, returns nothing, or launches nothing when it is run again, nothing is claimed.
    """
    targets: dict[_Place, _Target] = {}
    swap = _Swap()
    index_now = 0

    def reached(launch: Reached) -> Any:
        name = launch.kernel.qualified_name
        place = (name, launch.key.text, launch.form)
        if swap.place is not None:
            return swap.taken(launch) if swap.place == place else None
        if every_kernel or readers_of_best_config(launch.kernel):
            target = targets.setdefault(place, _Target(launch.kernel.source_hash, launch.key))
            target.candidates.update((LaunchConfig.of(config), None) for config in launch.candidates())
            target.reached[index_now] = None
        return None

    def run(index: int) -> dict[str, Any]:
        nonlocal index_now
        index_now = index
        with random_state_kept():
            return {name: value.detach().clone() for name, value in step(index).items()}

    found: list[KeyProbe] = []
    with watch_launches(in_scope, reached):
        plain = [run(index) for index in range(inputs)]
        steady = all(_same(plain[index], run(index)) for index in range(inputs))
        compiler, arch = compiler_identity(), current_arch()
        for (name, key, form), target in targets.items():
            configs = sorted(target.candidates, key=lambda config: config.order)
            candidates = tuple(CandidateProbe(each, None) for each in configs)
            rows: tuple[InputProbe, ...] = ()
            distances: tuple[Distance, ...] = ()
            if not steady:
                reason = "the step differs from itself when it is run twice with the same configs"
            elif not all(plain):
                reason = "the step returned no tensors, so there is nothing to compare"
            else:
                candidates, rows, distances = _swapped(configs, (name, key, form), target.reached, swap, run)
                reason = _nothing_to_claim(candidates, rows)
            judged: JudgedBy = "nothing" if reason else "caller"
            reason = reason or "the caller's outputs were compared, over a whole step"
            place = (name, target.source_hash, target.key, form, arch, compiler)
            probe = KeyProbe(*place, judged, reason, candidates, rows, 2, distances)
            found.append(probe)
            if progress is not None:
                progress(probe)
    return tuple(found)


def _same(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    return left.keys() == right.keys() and all(same_bytes(left[name], right[name]) for name in left)


_NOT_LAUNCHED = "not launched: the step, run again with it, launches nothing of this form"
_NOT_LIVE = "not launched: it is not live at every launch of this form"


def _nothing_to_claim(candidates: Iterable[CandidateProbe], rows: Iterable[InputProbe]) -> str:
    """Why nothing is claimed after all; empty where something is."""
    if any(each.racy for each in candidates):
        return ""
    if all(each.failure == _NOT_LAUNCHED for each in candidates):
        return "the step launches it no more when it is run again, so it keeps what it once computed"
    if not any(each.counted for each in rows):
        return "no step's outputs could tell candidates apart: none holds a finite number that is not 0"
    return ""


def _swapped(
    configs: list[LaunchConfig],
    place: _Place,
    indices: Iterable[int],
    swap: _Swap,
    run: Callable[[int], dict[str, Any]],
) -> tuple[tuple[CandidateProbe, ...], tuple[InputProbe, ...], tuple[Distance, ...]]:
    failures: dict[int, str] = {}
    racy: set[int] = set()
    groups: list[list[int | None]] = []
    kept: list[dict[int, Any]] = []
    names: list[str] = []
    for index in indices:
        outcomes: dict[int, Any] = {}
        numbers: list[int | None] = [None] * len(configs)
        for at, config in enumerate(configs):
            if at in failures or at in racy:
                continue
            try:
                with swap.of(place, config):
                    outputs = run(index)
                    if swap.missed or not swap.launched:
                        failures[at] = _NOT_LIVE if swap.missed else _NOT_LAUNCHED
                        continue
                    if not groups and not _same(outputs, run(index)):
                        racy.add(at)
                        continue
                numbers[at] = group_outputs(outputs, outcomes)
            except resource_errors() as error:
                failures[at] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        groups.append(numbers)
        kept.append(outcomes)
        names.append(f"step {index}")
    counts = [len(each) > 1 or any(tells(outputs, outputs) for outputs in each.values()) for each in kept]
    out = failures.keys() | racy
    counted = [numbers for numbers, counts_here in zip(groups, counts, strict=True) if counts_here]
    final = partition(
        [None if at in out or not counted else tuple(each[at] for each in counted) for at in range(len(configs))]
    )
    candidates = tuple(
        CandidateProbe(config, final[at], at in racy, failures.get(at, "")) for at, config in enumerate(configs)
    )
    firsts = {number: at for at, number in reversed(list(enumerate(final))) if number is not None}
    rows = []
    for name, numbers, outcomes, counts_here in zip(names, groups, kept, counts, strict=True):
        digests = tuple(_digests(outcomes[numbers[firsts[number]] or 0]) for number in sorted(firsts))
        rows.append(InputProbe(name, "", counts_here, digests if counts_here else ()))
    return candidates, tuple(rows), _step_distances(firsts, names, groups, kept)


def _digests(outputs: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={digest_tensor(value).content}" for name, value in outputs.items())


def _step_distances(
    firsts: Mapping[int, int], names: list[str], groups: list[list[int | None]], kept: list[dict[int, Any]]
) -> tuple[Distance, ...]:
    found = []
    for left in sorted(firsts):
        for right in (number for number in sorted(firsts) if number > left):
            seen: list[tuple[float | None, str]] = []
            for name, numbers, outcomes in zip(names, groups, kept, strict=True):
                mine, theirs = numbers[firsts[left]], numbers[firsts[right]]
                if mine is None or theirs is None or mine == theirs:
                    continue
                seen.append(furthest(name, outcomes[mine], outcomes[theirs]))
            if seen:
                ulps, where = max(seen, key=lambda item: float("inf") if item[0] is None else item[0])
                found.append(Distance((left, right), ulps, where))
    return tuple(found)
