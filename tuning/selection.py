"""Choosing one candidate without a clock: pure functions of their arguments.

Nothing here reads a clock, the environment, a device or a file, and nothing depends on the order of candidates or of
dicts, on the hash seed, the rank or the process. Given the same kernel, key, arch, tables and policy, every rank of
every run gets the same config.

**Order of rules** (:func:`decide`): denied configs are removed; then an exact table entry; then ``block_sizes``; then
the kernel's ``*`` entry; then the policy's on-miss rule. With ``chaos`` the rules after the first are replaced by a
pick that differs between ranks on purpose.

**Everything denied.** If the tables deny every live candidate, :class:`TableError` is raised. The alternative,
launching a denied candidate with a warning, would compute results that a reviewed table calls wrong; fail closed.

**The static cost** (:func:`static_cost`) is the product of the tile-like parameters and the stages, then the warps;
ties go by canonical order. *Tile-like* is every positive integer parameter, whatever its name, unless the name is known
to mean something else. A list of accepted names would be the other way round, but there is no convention to list. The
parameters of all candidates of mamba_ssm 2.3.2.post1, fla-core 0.6.0, megatron-core 0.16.1 and transformer_engine
2.20.2 are: BLOCK_M, BLOCK_N, BLOCK_H; BLOCK_SIZE and BLOCK_SIZE_C, _CS, _H, _K, _M, _N; STEP_SIZE_C, _K, _M; CHUNK_SIZE
(mamba3: how much of the sequence a program takes); B, BC, BD, BH, BK, BL, BM, BN, BQ, BR, BS, BT, BV (FLA; B is the
block of its activation kernels); all of them tiles; and three that are not: G (FLA's matmul: programs grouped for the
cache), NW (FLA's attention residual: num_warps once more) and DOT_PRECISION (a string). Added to these are names that
Triton's own tutorials and AMD's backend use: GROUP_SIZE_M, NUM_SMS, SPLIT_K, waves_per_eu, kpack, matrix_instr_nonkdim.
About half of FLA's autotuners and a third of mamba_ssm's vary warps and stages alone: there the cost says nothing about
size, and a notice says so.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from tuning._selection_classes import Freedom
from tuning._selection_nearest import KeyedEntry, factor_text, nearest_order
from tuning._words import counted
from tuning.errors import PolicyError, TableError, TableMissError, TuningError
from tuning.spec import Choice, Kernel, Key, LaunchConfig, Source

__all__ = [
    "MODEL",
    "Candidates",
    "Decision",
    "ModelConstants",
    "Notice",
    "StaticCost",
    "cheapest_order",
    "choose",
    "decide",
    "model_order",
    "static_cost",
    "tile_names",
]


class _EntryLike(KeyedEntry, Protocol):
    """What is read of a table entry."""

    @property
    def kernel(self) -> str: ...
    @property
    def source_hash(self) -> str | None: ...
    @property
    def origin(self) -> str | None: ...
    @property
    def triton(self) -> str: ...


class _DeniedLike(Protocol):
    """What is read of a denied config."""

    @property
    def reason(self) -> str: ...
    @property
    def source(self) -> str: ...
    @property
    def origin(self) -> str | None: ...


class _TablesLike(Protocol):
    """What is asked of tables; :class:`tuning.tables.Tables` is one."""

    def exact(self, kernel: str, key: Key) -> _EntryLike | None: ...
    def wildcard(self, kernel: str) -> _EntryLike | None: ...
    def denied(self, kernel: str, key: Key) -> Mapping[LaunchConfig, _DeniedLike]: ...
    def entries(self, kernel: str) -> Sequence[_EntryLike]: ...


class _NeighbourLike(_TablesLike, Protocol):
    """What is asked of the tables of another arch."""

    @property
    def arch(self) -> str: ...


class _PolicyLike(Protocol):
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
        kind: here ``denied``, ``not_a_candidate``, ``stale_source``, ``other_triton``, ``other_arch``,
            ``block_sizes_unmatched`` or ``unranked``; an installation adds ``miss``, ``reduced_at_import``,
            ``class_evidence``, ``compiled``, ``symbolic_key`` and ``unreached``.
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
        free: what the choice may be varied within; None: nothing.
    """

    choice: Choice
    order: tuple[Any, ...]
    notices: tuple[Notice, ...]
    free: Freedom | None = None


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
    r"""
      num_\w+ | nw                                         # counts (NUM_SMS); FLA's NW repeats num_warps
    | (\w+_)?(warps | stages | ctas | maxnreg)             # launch fields among the parameters
    | group(_size)?(_[a-z])? | g | (\w+_)?swizzle(_\w+)?   # the order in which programs visit tiles
    | (\w+_)?splits?(_\w+)?                               # how often a reduction is split
    | waves_per_eu | kpack | matrix_instr_nonkdim         # knobs of one vendor's compiler
    """,
    re.VERBOSE | re.IGNORECASE | re.ASCII,
)


@lru_cache(maxsize=1024)
def _means_a_tile(name: str) -> bool:
    return _NOT_A_TILE.fullmatch(name) is None


def _tile(name: str, text: str) -> int | None:
    """The value of a tile-like parameter; None for any other. The encoding of an integer is its digits alone."""
    return int(text) or None if text.isdecimal() and _means_a_tile(name) else None


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


@dataclass(frozen=True)
class ModelConstants:
    """What the static model aims at, and how much each aim weighs; see :func:`model_order`.

    The values come from ``python -m bench regret --fit JOURNAL...``, which tries few round ones for each, and says what
    they give on kernels and packages that were left out.

    Attributes:
        middle: weight of an octave by which a tile parameter lies off the middle of the list.
        elements: weight of an octave by which the elements of a thread lie off their aim.
        warps, stages: weight of an octave of warps off their aim, and of a stage.
        middle_warps: weight of an octave by which the warps lie off the middle of the list.
        tile_elements: elements of a thread where two or more parameters span the tile: 32 fill a quarter of the
            registers with accumulators and leave the rest to operands.
        flat_elements: the same where one parameter is the whole block: enough for loads of 16 bytes.
        aim_warps, aim_stages: number aimed at where tiles vary over the list.
        bare_warps, bare_stages: number aimed at where warps and stages alone vary.
    """

    middle: int = 2
    elements: int = 1
    warps: int = 1
    stages: int = 1
    middle_warps: int = 1
    tile_elements: int = 32
    flat_elements: int = 4
    aim_warps: int = 4
    aim_stages: int = 3
    bare_warps: int = 4
    bare_stages: int = 3


MODEL = ModelConstants()
"""The constants of ``on_miss: model``."""

_SIXTEENTH = 16  # of an octave: the unit in which sizes are compared, as whole numbers, the same on every machine

# Most shared memory of a block, in bytes: CUDA C++ Programming Guide, technical specifications per compute capability;
# AMD's: LDS of a compute unit, from the CDNA 2, 3 and 4 white papers.
_SHARED_KB = {"sm70": 96, "sm72": 96, "sm75": 64, "sm80": 163, "sm86": 99, "sm87": 163, "sm89": 99, "sm90": 227}
_SHARED_KB |= {"sm100": 227, "sm103": 227, "sm110": 227, "sm120": 99, "sm121": 99}
_SHARED_KB |= {"gfx90a": 64, "gfx942": 64, "gfx950": 160}

_FLAT = re.compile(r"(x|y)?block(_size)?|b", re.IGNORECASE | re.ASCII)  # no letter of an axis: the whole block


def _octaves(value: int) -> int:
    """Sixteenths of the base-2 logarithm, rounded down: whole-number arithmetic alone."""
    return int(min(value, 1 << 62) ** _SIXTEENTH).bit_length() - 1


def _middle(values: Iterable[int]) -> int:
    """Twice the median."""
    found = sorted(values)
    return found[(len(found) - 1) // 2] + found[len(found) // 2] if found else 0


def _element_bytes(dtypes: Sequence[tuple[str, str]]) -> int:
    """Of the widest float among the tensors, of which a matrix product's operands are cast to one; 2 if none is."""
    found = [int(width[1]) // 8 for _, dtype in dtypes if (width := re.search(r"float(8|16|32|64)", dtype))]
    return max(found, default=2)


def _shared_bytes(config: LaunchConfig, dtypes: Sequence[tuple[str, str]]) -> int:
    """Rough shared memory of a tiled product: each stage holds a slice of both operands; 0 for fewer than 3 tiles."""
    sizes = sorted(size for name, text in config.kwargs if (size := _tile(name, text)))
    if len(sizes) < 3:
        return 0
    return (sizes[-1] + sizes[-2]) * sizes[-3] * max(config.num_stages or 1, 1) * _element_bytes(dtypes)


def model_order(
    ranked: Sequence[LaunchConfig],
    dtypes: Sequence[tuple[str, str]] = (),
    arch: str = "",
    constants: ModelConstants = MODEL,
) -> tuple[LaunchConfig, ...]:
    """Candidates by the static model, the one that it would launch first.

    **Why these features.** Whoever wrote the list centred it on what they expected to be good, so the *middle* of each
    tile parameter is the best guess where nothing else is known; the ends of a list are there for extreme shapes. A
    thread's *elements* (product of the two largest tile parameters over the threads) say more where they can be
    counted: too many spill, too few leave the tensor cores idle. Then the *warps* and *stages* that most kernels like
    on most GPUs. What needs more shared memory than the arch publishes, by the size of its operands' slices, comes
    after all that does not. Ties go to the smaller footprint, then canonical order.

    Args:
        ranked: distinct candidates in the order of ``cheapest``.
        dtypes: (name, dtype) of the tensors; the widest float is taken for the operands'.
        arch: whose published limit holds; an unknown one has none.
        constants: what to aim at; others than :data:`MODEL` are for fitting.
    """
    sizes = [{name: size for name, text in config.kwargs if (size := _tile(name, text))} for config in ranked]
    spread: dict[str, list[int]] = {}
    for each in sizes:
        for name, size in each.items():
            spread.setdefault(name, []).append(_octaves(size))
    middles = {name: _middle(found) for name, found in spread.items()}
    middle_warps = _middle(_octaves(config.num_warps or 1) for config in ranked)
    bare = all(len(set(found)) == 1 for found in spread.values())
    limit = _SHARED_KB.get(arch, 0) * 1024
    c = constants
    aim_warps, aim_stages = (c.bare_warps, c.bare_stages) if bare else (c.aim_warps, c.aim_stages)

    def cost(at: int) -> tuple[bool, int, int]:
        config, found = ranked[at], sizes[at]
        warps, stages = _octaves(config.num_warps or 1), max(config.num_stages or 1, 1)
        total = c.middle * sum(abs(2 * _octaves(size) - middles[name]) for name, size in found.items())
        largest = sorted(map(_octaves, found.values()))[-2:]
        flat = len(found) == 1 and all(_FLAT.fullmatch(name) for name in found)
        if flat or len(found) > 1:
            aim = _octaves(c.flat_elements if flat else c.tile_elements)
            total += 2 * c.elements * abs(sum(largest) - warps - _octaves(32) - aim)
        total += 2 * c.warps * abs(warps - _octaves(aim_warps)) + c.middle_warps * abs(2 * warps - middle_warps)
        total += 2 * c.stages * abs(stages - aim_stages) * _SIXTEENTH
        return limit > 0 and _shared_bytes(config, dtypes) > limit, total, at

    return tuple(ranked[at] for at in sorted(range(len(ranked)), key=cost))


@dataclass(frozen=True)
class Candidates:
    """Candidates read once, for callers that decide about the same ones for key after key.

    Attributes:
        ranked: their contents, smallest static cost first, ties in canonical order.
        live: the live objects in the same order. Of several that differ only in hooks, the first listed stands for all.
    """

    ranked: tuple[LaunchConfig, ...]
    live: tuple[Any, ...]

    @classmethod
    def of(cls, candidates: Iterable[Any]) -> Candidates:
        """Read live configs; see :meth:`tuning.spec.LaunchConfig.of`."""
        found: dict[LaunchConfig, Any] = {}
        for candidate in candidates:
            found.setdefault(LaunchConfig.of(candidate), candidate)
        ranked = tuple(sorted(found, key=lambda config: (static_cost(config), config.order)))
        return cls(ranked, tuple(found[config] for config in ranked))

    @classmethod
    def of_configs(cls, configs: Iterable[LaunchConfig]) -> Candidates:
        """Candidates of which only the contents are known; these stand for the live objects."""
        ranked = tuple(sorted(set(configs), key=lambda config: (static_cost(config), config.order)))
        return cls(ranked, ranked)


def cheapest_order(candidates: Iterable[Any]) -> tuple[Any, ...]:
    """The distinct candidates, smallest static cost first, ties in canonical order."""
    return Candidates.of(candidates).live


@dataclass(frozen=True)
class _Situation:
    """All that a rule may look at."""

    kernel: Kernel
    key: Key
    arch: str
    ranked: tuple[LaunchConfig, ...]  # live and not denied, cheapest first
    denied: Mapping[LaunchConfig, _DeniedLike]
    tables: _TablesLike
    policy: _PolicyLike
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


def _from_entry(situation: _Situation, entry: _EntryLike | None, source: Source) -> _Pick | None:
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
    _say_age(situation, entry, place)
    return _Pick(entry.config, source, entry.origin)


def _say_age(situation: _Situation, entry: _EntryLike, place: str) -> None:
    """Say where an entry that is used was made of another source or under another Triton."""
    mine, theirs = situation.kernel.source_hash, entry.source_hash
    if mine is not None and theirs is not None and mine != theirs:
        situation.notice("stale_source", f"the kernel's source has changed since {place} was made; the entry is used")
    if situation.triton and entry.triton and _release(situation.triton) not in map(_release, entry.triton.split(", ")):
        situation.notice(
            "other_triton",
            f"{place} was made under Triton {entry.triton}, this is {situation.triton}; the entry is used",
        )


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
    shown = f"closest: {'; '.join(closest)}"
    if not closest:
        others: Sequence[_NeighbourLike] = getattr(situation.tables, "others", ())
        counts = [(other.arch, len(other.entries(situation.name))) for other in others]
        has = ", ".join(f"{arch} has {counted(count, 'entry')}" for arch, count in counts if count)
        shown = f"the tables have no entry of this kernel for {situation.arch}" + (f"; {has}" if has else "")
    raise TableMissError(
        f"{situation.name} on {situation.arch}: no table entry for {situation.key}, and on_miss is 'error'; {shown}. "
        "Record and merge this key, or choose another on_miss",
        kernel=situation.name,
        key=str(situation.key),
        arch=situation.arch,
        closest=closest,
    )


def _model(situation: _Situation) -> _Pick:
    config = model_order(situation.ranked, situation.key.dtypes, situation.arch)[0]
    return _Pick(config, "model", None, f"static model, first of {counted(len(situation.ranked), 'candidate')}")


def _nearest(situation: _Situation) -> _Pick:
    """The nearest usable entry: its config is live and denied neither here nor by the tables that it stands in."""
    name, key, arch = situation.name, situation.key, situation.arch
    others: Sequence[_NeighbourLike] = getattr(situation.tables, "others", ())
    usable: list[tuple[tuple[object, ...], str, _EntryLike]] = []
    for its_arch, tables in [(arch, situation.tables), *((other.arch, other) for other in others)]:
        denied = situation.denied if its_arch == arch else tables.denied(name, key)
        usable += [
            (nearest_order(key, arch, entry, its_arch), its_arch, entry)
            for entry in tables.entries(name)
            if entry.config in situation.ranked and entry.config not in denied
        ]
    if not usable:
        return _model(situation)
    _, its_arch, entry = min(usable, key=lambda item: item[0])
    place = f"the nearest entry in {entry.origin or 'a table'}"
    if its_arch != arch:
        situation.notice("other_arch", f"no usable entry of this arch; {place}, which is for {its_arch}, is used")
    _say_age(situation, entry, place)
    fields = ", ".join(_differences(key, entry))
    return _Pick(
        entry.config,
        "nearest",
        entry.origin,
        f"nearest of {counted(len(usable), 'usable entry')}: {its_arch}, {factor_text(entry, key)}"
        + (f" ({fields})" if fields else ""),
    )


_ON_MISS: Mapping[str, Callable[[_Situation], _Pick]] = {
    "cheapest": _cheapest,
    "nearest": _nearest,
    "model": _model,
    "error": _error,
}


def _differences(key: Key, entry: _EntryLike) -> tuple[str, ...]:
    """The fields in which an entry differs from a key, as ``name=entry's value (not the key's)``."""
    if entry.key is None:
        return ()
    lines = _changed(dict(entry.key), dict(key.values), "=")
    if entry.dtypes is not None:
        lines += _changed(dict(entry.dtypes), dict(key.dtypes), ":")
    elif entry.dtype_sequence is not None:
        theirs, mine = entry.dtype_sequence, key.dtype_sequence
        if len(theirs) != len(mine):
            lines.append(f"number of dtypes={len(theirs)} (not {len(mine)})")
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
    exact = situation.tables.exact(situation.name, situation.key)
    found = []
    for entry in situation.tables.entries(situation.name):
        fields = () if entry is exact else _differences(situation.key, entry)
        text = ", ".join(fields)
        if not fields:
            if entry.config in situation.denied:
                state = "its config is denied"
            elif entry.config not in situation.ranked:
                state = "its config is no live candidate"
            else:
                state = "another entry lies over it"
            text = f"the {'*' if entry.key is None else 'same'} key, but {state} ({entry.config})"
        found.append((len(fields), text, entry.origin or ""))
    return tuple(f"{text} in {origin or 'a table'}" for _, text, origin in sorted(found)[:count])


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
    candidates: Sequence[Any] | Candidates,
    tables: _TablesLike,
    policy: _PolicyLike,
    *,
    chaos_rank: int = 0,
    triton: str = "",
) -> Decision:
    """Choose a candidate, say why, and rank the others in case it cannot be launched.

    Args:
        kernel: the kernel; entries are looked up by its qualified name.
        key: the key of the launch.
        arch: the arch that the tables are for.
        candidates: live configs that the kernel's own pruning has left; they are returned, never rebuilt. Callers that
            ask again and again about the same ones may read them once (:class:`Candidates`).
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
    read = candidates if isinstance(candidates, Candidates) else Candidates.of(candidates)
    if not read.ranked:
        raise TuningError(f"{name} on {arch}: expected a candidate, found none; the kernel's own pruning left nothing")
    denied = tables.denied(name, key)
    ranked, live = read.ranked, read.live
    if denied:
        left = [position for position, config in enumerate(ranked) if config not in denied]
        ranked, live = tuple(ranked[position] for position in left), tuple(live[position] for position in left)
    situation = _Situation(kernel, key, arch, ranked, denied, tables, policy, triton, [])
    if len(ranked) < len(read.ranked):
        _say_denied(situation, read.ranked)
    pick = _chaos(situation, chaos_rank) if policy.chaos else _by_rule(situation)
    at = ranked.index(pick.config)
    choice = Choice(name, key, live[at], pick.source, pick.origin, arch, pick.detail)
    return Decision(choice, (live[at], *live[:at], *live[at + 1 :]), tuple(situation.notices))


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


def _say_denied(situation: _Situation, candidates: Sequence[LaunchConfig]) -> None:
    found = sorted((config for config in candidates if config in situation.denied), key=lambda config: config.order)
    rows = [(config, situation.denied[config]) for config in found]
    text = "; ".join(f"{config}: {row.reason} ({row.source}; {row.origin or 'a table'})" for config, row in rows)
    if situation.ranked:
        situation.notice("denied", f"{len(rows)} of {len(candidates)} candidates are denied and not considered: {text}")
        return
    raise TableError(
        f"{situation.name} on {situation.arch}: expected a candidate that is not denied, found all {len(rows)} denied: "
        f"{text}. Correct the denied list, or use a version of the kernel with other candidates",
        file=next((row.origin for _, row in rows if row.origin), None),
        where="$.denied",
        expected="a candidate that is not denied",
        found=f"all {len(rows)} denied",
    )


def choose(
    kernel: Kernel | str,
    key: Key,
    arch: str,
    candidates: Sequence[Any] | Candidates,
    tables: _TablesLike,
    policy: _PolicyLike,
) -> Choice:
    """The choice of :func:`decide` alone; ``kernel`` may be given by its qualified name."""
    known = kernel if isinstance(kernel, Kernel) else Kernel(kernel)
    return decide(known, key, arch, candidates, tables, policy).choice
