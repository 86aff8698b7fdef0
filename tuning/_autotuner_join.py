"""Join what packages define with what a run reached."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from ._autotuner_info import AutotunerInfo, ChoiceCount, Note, PolicyLike, Resets, judge, read_notes
from .interception import AutotunerFacts
from .spec import Choice, Key, Source

__all__ = ["join", "note_shared_names", "with_choices"]

_OBSERVED_MANY = 8
"""From this many different values of one key name in one run on, the key is said to fragment, whatever its name."""


def join(
    static: Iterable[AutotunerInfo],
    reached: Iterable[AutotunerFacts],
    choices: Iterable[Choice],
    *,
    policy: PolicyLike | None = None,
    deterministic: bool = False,
    compiled: Collection[str] = (),
) -> list[AutotunerInfo]:
    """Join what packages define with what a run reached. Pure.

    What a run showed goes over what was expected: an autotuner with choices is ``pinned`` or ``timed`` by what they
    say. Reached autotuners that the static list lacks (made by a function, or of other packages) are added.

    Args:
        static: from :func:`list_autotuners`.
        reached: facts of the autotuners that were launched.
        choices: the choices made in the run.
        policy: gives a state to those that were reached and made no choice.
        deterministic: as for :func:`take_inventory`.
        compiled: kernels that were traced into a compiled graph, where launches do not pass through the autotuner.
    """
    made: dict[str, list[Choice]] = {}
    for choice in choices:
        made.setdefault(choice.kernel, []).append(choice)
    runs: dict[str, list[AutotunerFacts]] = {}
    for read in reached:
        runs.setdefault(read.kernel.qualified_name, []).append(read)
    joined: list[AutotunerInfo] = []
    static = list(static)
    own = _matched(static, runs)
    for index, info in enumerate(static):
        launched = own.get(index)
        if launched is not None:
            info = replace(info, reached=True)
            if policy is not None:
                state, reason = judge(launched, policy, deterministic=deterministic)
                info = replace(info, state=state, reason=reason)
        joined.append(with_choices(info, made.get(info.kernel, ()), info.kernel in compiled))
    listed = {info.kernel for info in static}
    for name in sorted((runs.keys() | made.keys() | set(compiled)) - listed):
        joined += [
            with_choices(info, made.get(name, ()), name in compiled)
            for info in _unlisted(name, runs.get(name, ()), policy, deterministic)
        ]
    return note_shared_names(joined)


def _unlisted(
    name: str, reads: Sequence[AutotunerFacts], policy: PolicyLike | None, deterministic: bool
) -> Iterable[AutotunerInfo]:
    """Entries for what a run showed and no list has."""
    module = name.partition(".<locals>")[0].rpartition(".")[0]
    if not reads:
        yield AutotunerInfo(kernel=name, module=module, candidates=(), key_names=())
    for read in reads:
        state, reason = judge(read, policy, deterministic=deterministic)
        yield AutotunerInfo(
            kernel=name,
            module=module,
            candidates=read.candidates,
            key_names=read.key_names,
            arg_names=read.arg_names,
            hooks=read.hooks,
            pruner=read.pruner,
            resets=Resets(read.reset_to_zero, read.restore_value),
            wrapped=("autotuner", *read.inner),
            state=state,
            reason=reason,
            class_name=read.class_name,
            source_hash=read.kernel.source_hash,
            notes=read_notes(read, policy=policy),
            reached=True,
        )


def _matched(
    static: Sequence[AutotunerInfo], runs: Mapping[str, Sequence[AutotunerFacts]]
) -> dict[int, AutotunerFacts]:
    """The facts of the run that belong to each entry, by the entry's index: those with its candidates and key, else
    the only ones of its name."""
    count = Counter(info.kernel for info in static)
    found: dict[int, AutotunerFacts] = {}
    for index, info in enumerate(static):
        reads = runs.get(info.kernel, ())
        same = [read for read in reads if read.candidates == info.candidates and read.key_names == info.key_names]
        if same or (len(reads) == 1 and count[info.kernel] == 1):
            found[index] = (same or list(reads))[0]
    return found


class _Made(Protocol):
    """What is asked of a choice: one of this process, or one of a manifest."""

    @property
    def key(self) -> Key: ...
    @property
    def source(self) -> Source: ...
    @property
    def origin(self) -> str | None: ...


def with_choices(info: AutotunerInfo, choices: Sequence[_Made], compiled: bool) -> AutotunerInfo:
    """The entry with the choices that a run made for it, in their order."""
    notes = list(info.notes)
    if compiled:
        notes.append(Note("compiled", "launched from a compiled graph, past the autotuner"))
    if not choices:
        return replace(info, notes=tuple(notes))
    # The last choice of a key is the one that holds: a fallback follows the choice that it replaces.
    by_key = {choice.key.text: choice for choice in choices}
    counts = Counter((choice.source, choice.origin) for choice in by_key.values())
    listed = tuple(
        ChoiceCount(source, origin, keys)
        for (source, origin), keys in sorted(counts.items(), key=lambda item: (item[0][0], item[0][1] or ""))
    )
    timed = all(item.source == "timed" for item in listed)
    parts = [f"{item.keys} {item.source}" + (f" from {item.origin}" if item.origin else "") for item in listed]
    reason = f"{len(by_key)} key{'s' if len(by_key) != 1 else ''}: {', '.join(parts)}"
    if timed and info.state == "timed":
        reason = f"{info.reason}; {reason}"
    values: dict[str, set[str]] = {}
    for choice in by_key.values():
        for name, text in choice.key.values:
            values.setdefault(name, set()).add(text)
    for name, seen in values.items():
        if len(seen) >= _OBSERVED_MANY:
            notes.append(Note("may_fragment", f"key {name}: {len(seen)} different values in {len(by_key)} keys so far"))
    return replace(
        info, state="timed" if timed else "pinned", reason=reason, notes=tuple(notes), reached=True, choices=listed
    )


def note_shared_names(infos: Iterable[AutotunerInfo]) -> list[AutotunerInfo]:
    """Say where several autotuners have one kernel name: tables and choices cannot tell them apart."""
    infos = list(infos)
    counts = Counter(info.kernel for info in infos)
    return [
        replace(
            info, notes=(*info.notes, Note("shared_name", f"{counts[info.kernel]} autotuners have this kernel name"))
        )
        if counts[info.kernel] > 1 and not info.has("shared_name")
        else info
        for info in infos
    ]
