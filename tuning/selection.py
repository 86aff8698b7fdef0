"""Choosing one candidate without a clock: pure functions of their arguments.

Nothing here reads a clock, the environment, a device or a file, and nothing depends on the order of candidates or of
dicts, on the hash seed, the rank or the process. Given the same kernel, key, arch, tables and policy, every rank of
every run gets the same config.

**Order of rules** (:func:`decide`): denied configs are removed; then an exact table entry; then ``block_sizes``; then
the kernel's ``*`` entry; then the policy's on-miss rule. With ``chaos`` the rules after the first are replaced by a
pick that differs between ranks on purpose.

**Everything denied.** If the tables deny every live candidate, :class:`TableError` is raised. The alternative,
launching a denied candidate with a warning, would compute results that a reviewed table calls wrong; fail closed.

**The static cost** (:func:`static_cost`) is the product of the tile-like parameters and the stages, then the warps.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tuning.errors import PolicyError, TableError, TableMissError, TuningError
from tuning.spec import Choice, Kernel, Key, LaunchConfig, Source

__all__ = [
    "Decision",
    "Notice",
    "StaticCost",
    "cheapest_order",
    "choose",
    "decide",
    "static_cost",
    "tile_names",
]


class EntryLike(Protocol):
    """What is read of a table entry."""

    @property
    def kernel(self) -> str: ...
    @property
    def key(self) -> tuple[tuple[str, str], ...] | None: ...
    @property
    def dtypes(self) -> tuple[tuple[str, str], ...] | None: ...
    @property
    def dtype_sequence(self) -> tuple[str, ...] | None: ...
    @property
    def config(self) -> LaunchConfig: ...
    @property
    def source_hash(self) -> str | None: ...
    @property
    def origin(self) -> str | None: ...
    @property
    def triton(self) -> str: ...


class DeniedLike(Protocol):
    """What is read of a denied config."""

    @property
    def reason(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def origin(self) -> str | None: ...


class TablesLike(Protocol):
    """What is asked of tables; :class:`tuning.tables.Tables` is one."""

    def exact(self, kernel: str, key: Key) -> EntryLike | None: ...
    def wildcard(self, kernel: str) -> EntryLike | None: ...
    def denied(self, kernel: str, key: Key) -> Mapping[LaunchConfig, DeniedLike]: ...
    def entries(self, kernel: str) -> Sequence[EntryLike]: ...


class PolicyLike(Protocol):
    """What is read of a policy; :class:`tuning.policy.AutotunePolicy` is one."""

    @property
    def on_miss(self) -> str: ...
    @property
    def block_sizes(self) -> tuple[tuple[str, int], ...]: ...
    @property
    def chaos(self) -> bool: ...


@dataclass(frozen=True)
class Notice:
    """Something about a decision that a user should hear of once.

    Attributes:
        kind: ``denied``, ``not_a_candidate``, ``stale_source``, ``other_triton``, ``block_sizes_unmatched`` or
            ``unranked``.
        message: one line: what, where, and what follows from it.
    """

    kind: str
    message: str


@dataclass(frozen=True)
class Decision:
    """A choice, and what to do should it fail to launch.

    Attributes:
        choice: the choice.
        order: the live candidates that are not denied: the chosen one, then the others in the order of ``cheapest``.
        notices: what a user should hear of.
    """

    choice: Choice
    order: tuple[Any, ...]
    notices: tuple[Notice, ...]


@dataclass(frozen=True, order=True)
class StaticCost:
    """How large a candidate is, from its parameters alone; smaller sorts first.

    Attributes:
        footprint: product of the tile-like parameters and the stages.
        warps: number of warps.
    """

    footprint: int
    warps: int


_NOT_A_TILE = re.compile(
    r"""(?:
    (?:NUM|N|NB)_\w+ | \w*_NUM | NW | NS | NUM\w*         # counts: NUM_SMS, num_warps, and FLA's NW (warps)
    | \w*(?:WARPS?|STAGES?|CTAS|BUFFERS?)                 # launch fields under another name
    | \w*(?:GROUP|SWIZZLE)\w* | G                         # the order in which programs visit tiles
    | \w*SPLIT\w*                                         # how often the reduction is split
    | WAVES_PER_EU | KPACK | MATRIX_INSTR_\w+ | MAXNREG   # vendors' knobs
    )""",
    re.VERBOSE | re.IGNORECASE,
)


def _tile(name: str, text: str) -> int | None:
    """The value of a tile-like parameter; None for any other."""
    if not text.isdecimal() or _NOT_A_TILE.fullmatch(name):  # a positive integer's encoding is its digits alone
        return None
    return int(text) or None


def tile_names(config: LaunchConfig) -> tuple[str, ...]:
    """Names of the parameters that count as tile sizes, sorted."""
    return tuple(name for name, text in config.kwargs if _tile(name, text) is not None)


def static_cost(config: LaunchConfig) -> StaticCost:
    """The static cost of one candidate; see the module's docstring.

    No stages (0, or unset) count as one: there is still one tile in flight.
    """
    footprint = max(config.num_stages or 1, 1)
    for name, text in config.kwargs:
        footprint *= _tile(name, text) or 1
    return StaticCost(footprint, config.num_warps or 0)


def _cost_order(config: LaunchConfig) -> tuple[object, ...]:
    return (static_cost(config), config.order)


def _live(candidates: Iterable[Any]) -> dict[LaunchConfig, Any]:
    """Candidates by content. Of several that differ only in hooks, the first listed stands for all."""
    live: dict[LaunchConfig, Any] = {}
    for candidate in candidates:
        live.setdefault(LaunchConfig.of(candidate), candidate)
    return live


def cheapest_order(candidates: Iterable[Any]) -> tuple[Any, ...]:
    """The distinct candidates, smallest static cost first, ties in canonical order."""
    live = _live(candidates)
    return tuple(live[config] for config in sorted(live, key=_cost_order))


@dataclass(frozen=True)
class _Situation:
    """All that a rule may look at."""

    kernel: Kernel
    key: Key
    arch: str
    ranked: tuple[LaunchConfig, ...]  # live and not denied, cheapest first
    denied: Mapping[LaunchConfig, DeniedLike]
    tables: TablesLike
    policy: PolicyLike
    triton: str
    notices: list[Notice]

    @property
    def name(self) -> str:
        return self.kernel.qualified_name

    def notice(self, kind: str, message: str) -> None:
        self.notices.append(Notice(kind, f"{self.name} on {self.arch}: {message}"))


@dataclass(frozen=True)
class _Pick:
    config: LaunchConfig
    source: Source
    origin: str | None = None
    detail: str = ""


def _from_entry(situation: _Situation, entry: EntryLike | None, source: Source) -> _Pick | None:
    if entry is None:
        return None
    place = f"the {'*' if entry.key is None else 'exact'} entry in {entry.origin or 'a table'}"
    if entry.config in situation.denied:
        situation.notice("denied", f"{place} names a denied config ({entry.config}); the next rule decides")
        return None
    if entry.config not in situation.ranked:
        situation.notice(
            "not_a_candidate",
            f"{place} names a config that is no live candidate ({entry.config}); the next rule decides",
        )
        return None
    mine, theirs = situation.kernel.source_hash, entry.source_hash
    if mine is not None and theirs is not None and mine != theirs:
        situation.notice("stale_source", f"the kernel's source has changed since {place} was made; the entry is used")
    if situation.triton and entry.triton and _release(situation.triton) != _release(entry.triton):
        situation.notice(
            "other_triton",
            f"{place} was made under Triton {entry.triton}, this is {situation.triton}; the entry is used",
        )
    return _Pick(entry.config, source, entry.origin)


def _release(version: str) -> list[str]:
    return version.split(".")[:2]


def _cheapest_of(situation: _Situation, configs: Sequence[LaunchConfig], source: Source) -> _Pick:
    if len(configs) > 1 and not any(tile_names(config) for config in configs):
        situation.notice(
            "unranked",
            f"no candidate has a tile-like parameter, so their sizes cannot be ranked; "
            f"fewest stages, then fewest warps, then canonical order decide ({configs[0]})",
        )
    cost = static_cost(configs[0])
    return _Pick(configs[0], source, None, f"footprint {cost.footprint}, {cost.warps} warps")


def _block_sizes(situation: _Situation) -> _Pick | None:
    names = {name for config in situation.ranked for name, _ in config.kwargs}
    wanted = {(name, str(value)) for name, value in situation.policy.block_sizes if name in names}
    if not wanted:
        return None
    matching = [config for config in situation.ranked if wanted <= set(config.kwargs)]
    if not matching:
        text = " ".join(f"{name}={value}" for name, value in sorted(wanted))
        situation.notice("block_sizes_unmatched", f"no live candidate has block_sizes {text}; the next rule decides")
        return None
    return _cheapest_of(situation, matching, "block_sizes")


def _cheapest(situation: _Situation) -> _Pick:
    return _cheapest_of(situation, situation.ranked, "cheapest")


def _error(situation: _Situation) -> _Pick:
    closest = _closest(situation)
    shown = "; ".join(f"closest: {line}" for line in closest[:1]) or "the tables have no entry for this kernel"
    raise TableMissError(
        f"{situation.name} on {situation.arch}: no table entry for {situation.key}, and on_miss is 'error'; {shown}. "
        "Record and merge this key, or choose another on_miss",
        kernel=situation.name,
        key=str(situation.key),
        arch=situation.arch,
        closest=closest,
    )


_ON_MISS: Mapping[str, Callable[[_Situation], _Pick]] = {"cheapest": _cheapest, "error": _error}


def _differences(key: Key, entry: EntryLike) -> tuple[str, ...]:
    """The fields in which an entry differs from a key, as ``name=entry's value (not the key's)``."""
    if entry.key is None:
        return ()
    lines = _changed(dict(entry.key), dict(key.values), "=")
    if entry.dtypes is not None:
        lines += _changed(dict(entry.dtypes), dict(key.dtypes), ":")
    elif tuple(sorted(entry.dtype_sequence or ())) != tuple(sorted(key.dtype_sequence)):
        theirs, mine = entry.dtype_sequence or (), key.dtype_sequence
        if len(theirs) != len(mine):
            lines.append(f"{len(theirs)} dtypes (not {len(mine)})")
        lines += [
            f"dtype {index}:{their} (not {my})"
            for index, (their, my) in enumerate(zip(theirs, mine, strict=False))
            if their != my
        ]
    return tuple(lines)


def _changed(theirs: Mapping[str, str], mine: Mapping[str, str], mark: str) -> list[str]:
    names = [*theirs, *(name for name in sorted(mine) if name not in theirs)]
    return [
        f"{name}{mark}{theirs.get(name, 'absent')} (not {mine.get(name, 'absent')})"
        for name in sorted(names)
        if theirs.get(name) != mine.get(name)
    ]


def _closest(situation: _Situation, count: int = 3) -> tuple[str, ...]:
    found = []
    for entry in situation.tables.entries(situation.name):
        fields = _differences(situation.key, entry)
        text = ", ".join(fields)
        if not fields:
            state = "denied" if entry.config in situation.denied else "no live candidate"
            text = f"the {'*' if entry.key is None else 'same'} key, but its config is {state} ({entry.config})"
        found.append((len(fields), text, entry.config.order, entry.origin or ""))
    return tuple(f"{text} in {origin or 'a table'}" for _, text, _, origin in sorted(found)[:count])


def _chaos(situation: _Situation, rank: int) -> _Pick:
    configs = sorted(situation.ranked, key=lambda config: config.order)
    text = f"{situation.name}\n{situation.key.text}"
    offset = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    index = (rank + offset) % len(configs)
    return _Pick(configs[index], "chaos", None, f"candidate {index} of {len(configs)}")


def decide(
    kernel: Kernel,
    key: Key,
    arch: str,
    candidates: Sequence[Any],
    tables: TablesLike,
    policy: PolicyLike,
    *,
    chaos_rank: int = 0,
    triton: str = "",
) -> Decision:
    """Choose a candidate, say why, and rank the others in case it cannot be launched.

    Args:
        kernel: the kernel; entries are looked up by its qualified name.
        key: the key of the launch.
        arch: the arch that the tables are for.
        candidates: live configs that the kernel's own pruning has left; they are returned, never rebuilt.
        tables, policy: the tables and the policy.
        chaos_rank: rank, read only where the policy has ``chaos``.
        triton: the running version of Triton; only to say that an entry was made under another.

    Raises:
        TuningError: there is no candidate at all.
        TableError: the tables deny every candidate.
        TableMissError: no rule before it matched, and ``on_miss`` is ``error``.
        PolicyError: ``on_miss`` names a rule that does not exist.
    """
    name = kernel.qualified_name
    live = _live(candidates)
    if not live:
        raise TuningError(f"{name} on {arch}: expected a candidate, found none; the kernel's own pruning left nothing")
    denials = tables.denied(name, key)
    denied = {config: denials[config] for config in live if config in denials}
    notices: list[Notice] = []
    ranked = tuple(sorted((config for config in live if config not in denied), key=_cost_order))
    situation = _Situation(kernel, key, arch, ranked, denials, tables, policy, triton, notices)
    if denied:
        _say_denied(situation, denied, len(live))
    pick = _chaos(situation, chaos_rank) if policy.chaos else _by_rule(situation)
    choice = Choice(name, key, live[pick.config], pick.source, pick.origin, arch, pick.detail)
    order = (pick.config, *(config for config in ranked if config != pick.config))
    return Decision(choice, tuple(live[config] for config in order), tuple(notices))


def _by_rule(situation: _Situation) -> _Pick:
    rule = _ON_MISS.get(situation.policy.on_miss)
    if rule is None:
        raise PolicyError(
            f"on_miss: expected one of {', '.join(_ON_MISS)}, found {situation.policy.on_miss!r}",
            field="on_miss",
            value=situation.policy.on_miss,
            expected=" or ".join(_ON_MISS),
        )
    return (
        _from_entry(situation, situation.tables.exact(situation.name, situation.key), "exact")
        or _block_sizes(situation)
        or _from_entry(situation, situation.tables.wildcard(situation.name), "wildcard")
        or rule(situation)
    )


def _say_denied(situation: _Situation, denied: Mapping[LaunchConfig, DeniedLike], count: int) -> None:
    rows = "; ".join(
        f"{config}: {row.reason} ({row.source}; {row.origin or 'a table'})"
        for config, row in sorted(denied.items(), key=lambda item: item[0].order)
    )
    if not situation.ranked:
        raise TableError(
            f"{situation.name} on {situation.arch}: expected a candidate that is not denied, found all {count} denied: "
            f"{rows}. Correct the denied list, or use a version of the kernel with other candidates",
            file=next((row.origin for row in denied.values() if row.origin), None),
            where="$.denied",
            expected="a candidate that is not denied",
            found=f"all {count} denied",
        )
    situation.notice("denied", f"{len(denied)} of {count} candidates are denied and not considered: {rows}")


def choose(
    kernel: Kernel | str, key: Key, arch: str, candidates: Sequence[Any], tables: TablesLike, policy: PolicyLike
) -> Choice:
    """The choice of :func:`decide` alone; ``kernel`` may be given by its qualified name."""
    known = kernel if isinstance(kernel, Kernel) else Kernel(kernel)
    return decide(known, key, arch, candidates, tables, policy).choice
