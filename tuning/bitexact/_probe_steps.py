"""Judge candidates by what their caller computes: a whole step is run once for each of them.

For kernels whose host code reads ``best_config``: what they write depends on the config in extent, and only what the
caller makes of it can be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tuning._launch_arguments import same_bytes
from tuning._launch_replay import Reached, compiler_identity, readers_of_best_config, watch_launches
from tuning.bitexact._probe_classes import CandidateProbe, Distance, InputProbe, JudgedBy, KeyProbe, partition
from tuning.bitexact._probe_replay import furthest, group_outputs, random_state_kept
from tuning.bitexact.digest import digest_tensor
from tuning.interception import current_arch, resource_errors
from tuning.spec import Key, LaunchConfig

__all__ = ["probe_steps"]


@dataclass
class _Target:
    """One kernel and key whose candidates are to be swapped in."""

    source_hash: str | None
    key: Key
    forms: dict[str, None]
    candidates: dict[LaunchConfig, None]


def probe_steps(
    step: Callable[[int], Mapping[str, Any]],
    in_scope: Callable[[str], bool],
    *,
    inputs: int = 1,
    every_kernel: bool = False,
    progress: Callable[[KeyProbe], None] | None = None,
) -> tuple[KeyProbe, ...]:
    """Judge candidates by what their caller computes: run a whole step with each of them swapped in alone.

    Args:
        step: runs one step on input number ``i`` and returns the tensors to compare, by name. It is called many times
            and must do the same each time: random numbers are restored for it, its own state is not.
        in_scope: by qualified name of the kernel.
        inputs: how many inputs there are.
        every_kernel: swap the candidates of every kernel; else only of those whose ``best_config`` is read.
        progress: told of each key that was probed.

    Returns:
        One probe for each kernel, key and form that the step launches. Where the step, run twice without a swap,
        differs from itself, nothing is claimed of any.
    """
    targets: dict[tuple[str, str], _Target] = {}
    forced: dict[tuple[str, str], LaunchConfig] = {}

    def reached(launch: Reached) -> Any:
        name = launch.kernel.qualified_name
        place = (name, launch.key.text)
        if not forced and (every_kernel or readers_of_best_config(launch.kernel)):
            target = targets.setdefault(place, _Target(launch.kernel.source_hash, launch.key, {}, {}))
            target.forms[launch.form] = None
            target.candidates.update((LaunchConfig.of(config), None) for config in launch.candidates())
        wanted = forced.get(place)
        if wanted is None:
            return None
        return next((config for config in launch.candidates() if LaunchConfig.of(config) == wanted), None)

    def run(index: int) -> dict[str, Any]:
        with random_state_kept():
            return {name: value.detach().clone() for name, value in step(index).items()}

    found: list[KeyProbe] = []
    with watch_launches(in_scope, reached):
        plain = [run(index) for index in range(inputs)]
        steady = all(_same(plain[index], run(index)) for index in range(inputs))
        compiler, arch = compiler_identity(), current_arch()
        for (name, _), target in targets.items():
            configs = sorted(target.candidates, key=lambda config: config.order)
            judged: JudgedBy = "caller"
            if steady:
                candidates, rows, distances = _swapped(configs, (name, target.key.text), forced, run, plain)
                reason = "the caller's outputs were compared, over a whole step"
            else:
                candidates, rows, distances = tuple(CandidateProbe(each, None) for each in configs), (), ()
                judged, reason = "nothing", "the step differs from itself when it is run twice with the same configs"
            for form in target.forms:
                place = (name, target.source_hash, target.key, form, arch, compiler)
                probe = KeyProbe(*place, judged, reason, candidates, rows, 2, distances)
                found.append(probe)
                if progress is not None:
                    progress(probe)
    return tuple(found)


def _same(left: Mapping[str, Any], right: Mapping[str, Any]) -> bool:
    return left.keys() == right.keys() and all(same_bytes(left[name], right[name]) for name in left)


def _swapped(
    configs: list[LaunchConfig],
    place: tuple[str, str],
    forced: dict[tuple[str, str], LaunchConfig],
    run: Callable[[int], dict[str, Any]],
    plain: list[dict[str, Any]],
) -> tuple[tuple[CandidateProbe, ...], tuple[InputProbe, ...], tuple[Distance, ...]]:
    failures: dict[int, str] = {}
    racy: set[int] = set()
    groups: list[list[int | None]] = []
    kept: list[dict[int, Any]] = []
    for index in range(len(plain)):
        outcomes: dict[int, Any] = {}
        numbers: list[int | None] = [None] * len(configs)
        for at, config in enumerate(configs):
            if at in failures or at in racy:
                continue
            forced[place] = config
            try:
                outputs = run(index)
                if index == 0 and not _same(outputs, run(index)):
                    racy.add(at)
                    continue
                numbers[at] = group_outputs(outputs, outcomes)
            except resource_errors() as error:
                failures[at] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            finally:
                del forced[place]
        groups.append(numbers)
        kept.append(outcomes)
    out = failures.keys() | racy
    final = partition([None if at in out else tuple(group[at] for group in groups) for at in range(len(configs))])
    candidates = tuple(
        CandidateProbe(config, final[at], at in racy, failures.get(at, "")) for at, config in enumerate(configs)
    )
    firsts = {number: at for at, number in reversed(list(enumerate(final))) if number is not None}
    rows = []
    for index, (numbers, outcomes) in enumerate(zip(groups, kept, strict=True)):
        digests = tuple(_digests(outcomes[numbers[firsts[number]] or 0]) for number in sorted(firsts))
        rows.append(InputProbe(f"step {index}", "", True, digests))
    return candidates, tuple(rows), _step_distances(firsts, groups, kept)


def _digests(outputs: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={digest_tensor(value).content}" for name, value in outputs.items())


def _step_distances(
    firsts: Mapping[int, int], groups: list[list[int | None]], kept: list[dict[int, Any]]
) -> tuple[Distance, ...]:
    found = []
    for left in sorted(firsts):
        for right in (number for number in sorted(firsts) if number > left):
            seen: list[tuple[float | None, str]] = []
            for index, (numbers, outcomes) in enumerate(zip(groups, kept, strict=True)):
                mine, theirs = numbers[firsts[left]], numbers[firsts[right]]
                if mine is None or theirs is None or mine == theirs:
                    continue
                seen.append(furthest(f"step {index}", outcomes[mine], outcomes[theirs]))
            if seen:
                ulps, where = max(seen, key=lambda item: float("inf") if item[0] is None else item[0])
                found.append(Distance((left, right), ulps, where))
    return tuple(found)
