"""What is known of one autotuner, as plain data, and what a policy makes of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, Protocol

from ._autotuner_declared import OWN_FORM
from .interception import AutotunerFacts
from .spec import Json, LaunchConfig, Source

__all__ = [
    "COLUMNS",
    "JSON_VERSION",
    "AutotunerInfo",
    "ChoiceCount",
    "Note",
    "NoteKind",
    "PolicyLike",
    "Problem",
    "ProblemKind",
    "Resets",
    "State",
    "TableCoverage",
    "judge",
    "read_notes",
    "rows",
]

JSON_VERSION = 1
"""Version of the JSON form of an inventory."""

State = Literal["found", "pinned", "timed", "outside scope", "singleton", "not covered"]
"""What a policy makes of an autotuner. ``found``: no policy was given. ``singleton``: one candidate, so nothing to
choose. ``not covered``: in scope and to be pinned or recorded, yet out of reach."""

NoteKind = Literal[
    "cache_results",
    "compiled",
    "config_invariant",
    "may_fragment",
    "own_run",
    "reduced_at_import",
    "relies_on_reset_to_zero",
    "relies_on_restore_value",
    "run_replaced",
    "shared_name",
    "stale_entries",
]

ProblemKind = Literal[
    "does not import", "walked without __init__", "skipped", "made when called", "not made", "unreadable"
]
"""Why part of a package was not looked into. ``made when called``: an autotuner that a function makes when it runs.
``not made``: a decorator at module level that left no autotuner, such as one in a branch not taken."""


class Note(NamedTuple):
    """Something worth knowing of one autotuner.

    Attributes:
        kind: what it is about.
        text: in words, with the reason.
    """

    kind: NoteKind
    text: str


class Resets(NamedTuple):
    """Argument names that Triton resets or restores while it benchmarks, and only then."""

    reset_to_zero: tuple[str, ...] = ()
    restore_value: tuple[str, ...] = ()


class TableCoverage(NamedTuple):
    """What the tables of one arch hold for one kernel.

    Attributes:
        arch: the arch.
        exact: number of entries for single keys.
        wildcard: whether there is a ``*`` entry.
        stale: how many of those entries can never be used, and so count as misses: the config is none of the listed
            candidates or is denied, or the kernel has no key or argument of a name that the entry has.
    """

    arch: str
    exact: int
    wildcard: bool
    stale: int = 0

    @property
    def covers(self) -> bool:
        """Whether at least one entry can be used."""
        return self.exact + self.wildcard > self.stale

    def __str__(self) -> str:
        parts = [*([str(self.exact)] if self.exact else []), *(["*"] if self.wildcard else [])]
        return f"{self.arch}: {'+'.join(parts) or '-'}" + (f" ({self.stale} stale)" if self.stale else "")


class ChoiceCount(NamedTuple):
    """How many keys were decided by one rule, from one file."""

    source: Source
    origin: str | None
    keys: int


@dataclass(frozen=True, kw_only=True)
class AutotunerInfo:
    """One autotuner.

    Attributes:
        kernel: qualified name of the kernel.
        module: the module that defines it.
        candidates: the candidates, in order.
        key_names: the declared key.
        arg_names: the kernel's parameters; empty where they are not known.
        hooks: ``pre_hook``, ``post_hook``, ``config.pre_hook``, where they exist.
        pruner: ``early_config_prune``, ``perf_model``, both joined by ``+``, or empty.
        resets: what Triton resets or restores while benchmarking.
        wrapped: the layers from the outside in, ``autotuner`` among them: ``("Heuristics", "autotuner")`` for
            heuristics outside. Empty layers of Python (classes, dicts, closures) stand first.
        state: what the policy makes of it.
        reason: why it has that state, in words.
        class_name: qualified name of the autotuner's class.
        source_hash: of the kernel's own source.
        origin: file and line of the kernel's first decorator, ``FILE:LINE``; None where it is not known.
        found_at: every place where it is bound, the nearest to a module's name first.
        declared: number of candidates in the source, before a filter at import; None where it cannot be read.
        tables: coverage by the tables of each arch asked for.
        notes: what else is worth knowing.
        reached: whether a run launched it.
        choices: by which rules its keys were decided in that run.
    """

    kernel: str
    module: str
    candidates: tuple[LaunchConfig, ...]
    key_names: tuple[str, ...]
    arg_names: tuple[str, ...] = ()
    hooks: tuple[str, ...] = ()
    pruner: str = ""
    resets: Resets = field(default=Resets())
    wrapped: tuple[str, ...] = ("autotuner",)
    state: State = "found"
    reason: str = ""
    class_name: str = ""
    source_hash: str | None = None
    origin: str | None = None
    found_at: tuple[str, ...] = ()
    declared: int | None = None
    tables: tuple[TableCoverage, ...] = ()
    notes: tuple[Note, ...] = ()
    reached: bool = False
    choices: tuple[ChoiceCount, ...] = ()

    def has(self, kind: NoteKind) -> bool:
        """Whether there is a note of this kind."""
        return any(note.kind == kind for note in self.notes)

    def to_json(self, *, configs: bool = False) -> Json:
        """JSON form; with the candidates themselves if ``configs``."""
        data: dict[str, Json] = {
            "kernel": self.kernel,
            "module": self.module,
            "candidates": len(self.candidates),
            "declared": self.declared,
            "key_names": list(self.key_names),
            "hooks": list(self.hooks),
            "pruner": self.pruner,
            "resets": {name: list(value) for name, value in self.resets._asdict().items()},
            "wrapped": list(self.wrapped),
            "class_name": self.class_name,
            "state": self.state,
            "reason": self.reason,
            "source_hash": self.source_hash,
            "origin": self.origin,
            "found_at": list(self.found_at),
            "tables": [item._asdict() for item in self.tables],
            "notes": [note._asdict() for note in self.notes],
            "reached": self.reached,
            "choices": [item._asdict() for item in self.choices],
        }
        if configs:
            data["configs"] = [config.to_json() for config in self.candidates]
        return data


@dataclass(frozen=True)
class Problem:
    """Part of a package that was not looked into, and so may hold autotuners that nobody listed.

    Attributes:
        module: the module.
        kind: what kept it out.
        reason: in one line.
        autotuners: how many autotuners its source would make, as far as can be read there.
    """

    module: str
    kind: ProblemKind
    reason: str
    autotuners: int = 0

    def to_json(self) -> Json:
        """JSON form."""
        return {"module": self.module, "kind": self.kind, "reason": self.reason, "autotuners": self.autotuners}

    def __str__(self) -> str:
        count = f" ({self.autotuners} autotuner{'s' if self.autotuners != 1 else ''})" if self.autotuners else ""
        return f"{self.module}: {self.kind}{count}: {self.reason}"


class PolicyLike(Protocol):
    """What is asked of a policy."""

    @property
    def modules(self) -> tuple[str, ...]: ...
    @property
    def on_miss(self) -> str: ...
    @property
    def table_path(self) -> tuple[str, ...]: ...
    def in_scope(self, qualified_name: str) -> bool: ...
    def is_config_invariant(self, qualified_name: str) -> bool: ...
    def effective_mode(self, *, deterministic: bool = False) -> str: ...


def judge(read: AutotunerFacts, policy: PolicyLike | None, *, deterministic: bool = False) -> tuple[State, str]:
    """The state that a policy gives an autotuner, and why."""
    name = read.kernel.qualified_name
    if len(read.candidates) == 1:
        return "singleton", "one candidate: nothing to choose"
    if policy is None:
        return "found", ""
    if not policy.in_scope(name):
        return (
            "outside scope",
            f"not under the policy's modules ({' '.join(policy.modules) or 'none'}): Triton times it",
        )
    mode = policy.effective_mode(deterministic=deterministic)
    if mode == "auto":
        return "timed", "mode auto: Triton chooses"
    if read.on_object:
        return "not covered", "run is set on the object itself: no policy reaches it unless it calls the class's run"
    if not read.calls_through and mode == "record":
        return "not covered", f"{read.class_name}.run replaces Triton's and need not call it: nothing is journaled then"
    if policy.is_config_invariant(name):
        return "timed", "config-invariant: no candidate changes its results, so Triton may choose"
    if mode == "record":
        return "timed", "mode record: Triton times it, and every timing is journaled"
    if not read.calls_through:
        return "pinned", (
            f"{read.class_name}.run replaces Triton's and need not call it: given the chosen candidate alone, where it "
            "heeds that; a run names it where not"
        )
    return "pinned", f"by tables, else by the on-miss rule ({policy.on_miss})"


def read_notes(
    read: AutotunerFacts,
    *,
    declared: int | None = None,
    through: str | None = None,
    fragmenting: Mapping[str, str] | None = None,
    stale: Mapping[str, Sequence[str]] | None = None,
    policy: PolicyLike | None = None,
) -> tuple[Note, ...]:
    """The notes that follow from what was read off an autotuner and its source.

    Args:
        read: the autotuner.
        declared: number of candidates in the source.
        through: qualified name of what the source passes them through.
        fragmenting: key names that may take a new value with every batch, with the reason.
        stale: for each arch, why entries of its tables can never be used, a reason for each entry.
        policy: the policy, if there is one.
    """
    notes: list[Note] = []
    count = len(read.candidates)
    # What the source writes out may well be a choice of its author's, unless it leaves nothing to choose.
    if through is not None and declared is not None and count < (2 if through.startswith(OWN_FORM) else declared):
        notes.append(Note("reduced_at_import", _reduced(count, declared, through)))
    for name, reason in (fragmenting or {}).items():
        notes.append(Note("may_fragment", f"key {name}: {reason}"))
    if count > 1:
        notes += _reset_notes(read)
    if read.own_run:
        what = "calls Triton's through"
        if not read.calls_through:
            what = "need not call Triton's: pinned, it is given the chosen candidate alone, which it may not heed; "
            what += "recording does not reach it where it does not"
        notes.append(Note("own_run" if read.calls_through else "run_replaced", f"{read.class_name}.run {what}"))
    if read.cache_results:
        notes.append(
            Note(
                "cache_results", "Triton keeps its timings on disk: later processes reuse them; recording bypasses that"
            )
        )
    name = read.kernel.qualified_name
    if policy is not None and policy.in_scope(name) and policy.is_config_invariant(name):
        notes.append(Note("config_invariant", "listed in config_invariant: keeps Triton's timed choice"))
    for arch, reasons in (stale or {}).items():
        if reasons:
            why = "; ".join(dict.fromkeys(reasons))
            notes.append(Note("stale_entries", f"{len(reasons)} of the {arch} entries can never be used: {why}"))
    return tuple(notes)


# Both filters are one design, read in mamba_ssm 2.3.2.post1 and megatron-core 0.19.2: under MAMBA_DETERMINISTIC=1 or
# torch's deterministic flag they keep one candidate, unless TRITON_CACHE_AUTOTUNING=1.
_DETERMINISM_FILTERS = ("mamba_ssm.utils.determinism.", "megatron.core.ssm.ops.determinism.")


def _reduced(count: int, declared: int, through: str) -> str:
    text = (
        f"{count} of {declared} declared candidates left by {through} at import: a table cannot bring the others back"
    )
    if through.startswith(_DETERMINISM_FILTERS):
        text += (
            "; import it with MAMBA_DETERMINISTIC unset or 0 and torch's deterministic algorithms still off, "
            "or with TRITON_CACHE_AUTOTUNING=1"
        )
    return text


def _reset_notes(read: AutotunerFacts) -> Iterable[Note]:
    if read.reset_to_zero:
        yield Note(
            "relies_on_reset_to_zero",
            f"Triton zeroes {', '.join(read.reset_to_zero)} while benchmarking and once after, never on a later "
            "launch; pinned, it is never zeroed: the caller must do it",
        )
    if read.restore_value:
        yield Note(
            "relies_on_restore_value",
            f"writes {', '.join(read.restore_value)} in place: Triton restores it between benchmark runs; pinned, the "
            "kernel runs once and nothing is restored",
        )


COLUMNS = ("kernel", "candidates", "key", "state", "tables", "wrapped", "hooks", "pruner", "resets", "notes")
"""Columns of :func:`rows`, in order."""


def rows(infos: Iterable[AutotunerInfo]) -> list[dict[str, str]]:
    """One row of text for each autotuner, with the columns of :data:`COLUMNS`, for whoever prints a table."""
    found: list[dict[str, str]] = []
    for info in infos:
        resets = [f"{kind}: {', '.join(names)}" for kind, names in info.resets._asdict().items() if names]
        count = str(len(info.candidates))
        found.append(
            {
                "kernel": info.kernel,
                "candidates": f"{count} of {info.declared}" if info.has("reduced_at_import") else count,
                "key": ", ".join(info.key_names),
                "state": info.state,
                "tables": "; ".join(map(str, info.tables)),
                "wrapped": " > ".join(info.wrapped) if info.wrapped != ("autotuner",) else "",
                "hooks": ", ".join(info.hooks),
                "pruner": info.pruner,
                "resets": "; ".join(resets),
                "notes": ", ".join(dict.fromkeys(note.kind.replace("_", " ") for note in info.notes)),
            }
        )
    return found
