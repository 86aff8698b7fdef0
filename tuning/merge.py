"""Merging journals into tables: one config for each kernel and key, the same whoever merges and however often.

:func:`merge` is pure. It depends on what was measured alone: not on the order or the names of files, the numbering of
ranks, the order of candidates (but after one that broke the context), a clock or a hash seed. What it decides, and why:

**The statistic** is the median, over all recordings, of each recording's 20th percentile. Everything that disturbs a
timing makes it longer, so the lower end of a recording's own distribution is nearer to the kernel's time than its
middle; the minimum would be nearer still, but Triton does not report it, and over many ranks a minimum would reward the
luckiest clock. The median over recordings is not moved by a slow GPU, a busy host or a process that was stopped.

**Failures** are dropped for good: a candidate that failed in one recording is not chosen, however fast it was in others
(fail closed), nor is one that some recordings did not even try while others were tried everywhere. One that failed in
each recording that tried it goes into the table's denied list. If no candidate is left there is no entry and nothing is
denied: then the fault is hardly the candidates'. A candidate that breaks the device's context makes all later ones of
its process fail: those failures count for nothing, and a recording so cut short only where none is whole.

**Nothing to time.** Where pruning leaves one candidate, Triton from 3.8 on launches it without timing it. If all
recordings of a key are such and name one winner, that is the choice; if they name several, there is none.

**Near ties.** Every candidate is tied whose statistic is within ``tolerance`` plus the measured spread of the best one;
the spread is the median over recordings of (median - 20th percentile) / median of the best candidate, at most
``spread_limit``. Among tied candidates the fixed rule ``tie_break`` decides, by default :func:`largest_first`: the
largest footprint. Why the largest: near the optimum a kernel's time is flat towards large tiles and ends at a wall
(the next size spills or does not launch), while towards small tiles it rises slowly, so that the small end of the tied
set is where candidates drop in and out with the noise. The figures, on the four recordings in
``bench/data/h200_ssd_timings.json`` (16 keys; agreement of two merges of two recordings each, 3 splits; of two single
recordings, 6 pairs; slowdown of the sum of all keys' times against always taking the fastest):

======================================================  =========  =========  ========
rule                                                    two + two  one + one  slowdown
======================================================  =========  =========  ========
fastest median, no ties (Triton's own)                  39 of 48   80 of 96   0
median, 2 % ties, smallest footprint                    40 of 48   80 of 96   0.14 %
median, 2 % ties, largest footprint                     42 of 48   79 of 96   0.03 %
20th percentile, 1 % + spread ties, smallest footprint  44 of 48   89 of 96   0.18 %
20th percentile, 1 % + spread ties, largest footprint   48 of 48   93 of 96   0.06 %
======================================================  =========  =========  ========

The rule was tuned on these very recordings, and three of the keys decide: the figures say what it does there. Any rule
flips where a candidate lies at the edge of the tied set. So a merge may be given the ``tables`` in force: where a
table's config is among the tied candidates it stays, and a table changes only for a reason.

**Sources.** Timings of different sources of one kernel are not timings of one thing. Records say the hash of the source
but not when they were made, so there is no newest: two hashes of one kernel are an error that names the files.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from tuning._merge_facts import CandidateFacts, Confidence, KeyFacts, MergeResult, RankFacts, RecordingFacts
from tuning._merge_gathered import Gathered
from tuning._merge_pools import FAILED, Pool, median, quantile
from tuning._merge_tables import TablesInForce, build_tables, collect_notes
from tuning._merge_ties import SPREAD_LIMIT, TOLERANCE, near_ties
from tuning._words import counted
from tuning.errors import JournalError, TuningError
from tuning.journal import Journal, Scan
from tuning.selection import static_cost
from tuning.spec import Environment, Kernel, LaunchConfig
from tuning.tables import TableFile

__all__ = [
    "CandidateFacts",
    "Confidence",
    "KeyFacts",
    "MergeResult",
    "RankFacts",
    "RecordingFacts",
    "Rule",
    "largest_first",
    "merge",
    "near_ties",
    "smallest_first",
]

Rule = Literal["pooled", "majority"]
"""How a choice is made: from the pooled timings, or by a plain vote of the recordings' winners."""

_PARTS = 8  # parts left out in turn to see how stable a choice is
_SAMPLE = 64  # recordings looked at for that: beyond it a median of all moves less than the tolerance


def largest_first(config: LaunchConfig) -> Any:
    """Sort key: the largest footprint first, then the most warps, then the last in canonical order.

    The footprint is :func:`tuning.selection.static_cost`'s, so the two orders of this library mean one thing by size.
    """
    cost = static_cost(config)
    return (-cost.footprint, -cost.warps, _Reversed(config.order))


def smallest_first(config: LaunchConfig) -> Any:
    """Sort key: the smallest footprint first, then the fewest warps, then canonical order."""
    cost = static_cost(config)
    return (cost.footprint, cost.warps, config.order)


class _Reversed:
    """Sorts backwards."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __lt__(self, other: _Reversed) -> bool:
        return bool(other.value < self.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Reversed) and self.value == other.value

    __hash__ = None  # type: ignore[assignment]


def merge(
    journals: Iterable[Journal | Scan],
    *,
    rule: Rule = "pooled",
    arch: str | None = None,
    tolerance: float = TOLERANCE,
    spread_limit: float = SPREAD_LIMIT,
    tie_break: Callable[[LaunchConfig], Any] = largest_first,
    date: str = "",
    tables: Iterable[TableFile] = (),
) -> MergeResult:
    """Merge journals, and tables if any, into one table for each arch and top-level package.

    Args:
        journals: taken one by one and let go again: given an iterator, thousands of files need the memory of their
            numbers only. Copies of one file count once, and a note says so.
        rule: ``pooled`` timings, or the ``majority`` of the recordings' winners, ties of votes by ``tie_break``.
        arch: merge this one alone.
        tolerance: what counts as the same time, as a fraction.
        spread_limit: most that the measured spread may add to it.
        tie_break: sort key; of tied candidates the least is chosen. It must tell all candidates apart.
        date: for the entries' evidence. A pure function has no clock.
        tables: entries that nothing was recorded for are carried over, denied configs stay denied, and of tied
            candidates the one that a table has stays chosen. Bit classes and notes written by hand stay where source,
            candidates and Triton are the same. Taken when all journals have been.

    Raises:
        JournalError: ``arch`` is in no journal and no table, or one kernel was recorded from different sources.
        TuningError: ``rule`` is not one of the two, or a number is negative or no number.
    """
    if rule not in get_args(Rule):
        raise TuningError(f"rule: expected pooled or majority, found {rule!r}")
    for name, value in (("tolerance", tolerance), ("spread_limit", spread_limit)):
        if not 0 <= value < float("inf"):
            raise TuningError(f"{name}: expected a fraction from 0 up, such as 0.01, found {value!r}")
    gathered = Gathered()
    for journal in journals:
        gathered.add(journal, arch)
    layers = tuple(tables)
    known = gathered.archs | {table.arch for table in layers}
    if arch is not None and arch not in known:
        raise JournalError(
            f"arch: no journal has {arch!r}; these journals have {', '.join(sorted(known)) or 'no records'}",
            file=gathered.origins[0][0] if len(gathered.origins) == 1 else None,
        )
    hashes = gathered.source_hashes()
    for pool in gathered.pools.values():
        pool.seal()
    kept = [table for table in layers if arch in (None, table.arch)]
    rules = _Rules(rule, tolerance, spread_limit, tie_break, TablesInForce(kept, tie_break))
    keys = tuple(
        _decide(rules, Kernel(kernel, hashes.get((found, kernel))), found, pool, gathered.origins)
        for (found, kernel, _), pool in sorted(gathered.pools.items(), key=lambda item: item[0])
        if pool.sources  # warnings alone are no recording
    )
    merged, left_out = build_tables(keys, gathered.environments, kept, rules.in_force, rule, date)
    notes = {*left_out, *collect_notes(keys, gathered.environments, rules.in_force, gathered.pools)}
    if gathered.copies:
        notes.add(f"{counted(gathered.copies, 'journal')} left out: the same bytes as another one, a copy of it")
    return MergeResult(
        merged,
        keys,
        rule,
        len(gathered.origins),
        gathered.records,
        tuple(sorted(gathered.torn)),
        tuple(sorted({facts.arch for facts in keys} | {table.arch for table in kept})),
        tuple(sorted(notes)),
    )


@dataclass(frozen=True)
class _Rules:
    rule: Rule
    tolerance: float
    spread_limit: float
    tie_break: Callable[[LaunchConfig], Any]
    in_force: TablesInForce


@dataclass
class _Standing:
    """Which columns of a pool are eligible and tied, on all its recordings or on some."""

    lows: dict[int, float] = field(default_factory=dict)
    tied: tuple[int, ...] = ()
    spread: float = 0.0
    tolerance: float = 0.0


def _eligible(rules: _Rules, arch: str, kernel: str, pool: Pool) -> list[int]:
    able = [
        at
        for at, column in enumerate(pool.columns)
        if column.timed
        and not column.failed
        and not column.broke
        and not (rules.in_force.denied and rules.in_force.is_denied(arch, kernel, pool.key, column.config))
    ]
    most = max((pool.columns[at].timed for at in able), default=0)
    return [at for at in able if pool.columns[at].timed == most]


def _stand(rules: _Rules, pool: Pool, eligible: Sequence[int], rows: Sequence[int] | None = None) -> _Standing:
    columns = pool.columns
    lows = {at: quantile(columns[at].times(columns[at].low, rows), 0.5) for at in eligible}
    lows = {at: low for at, low in lows.items() if low < FAILED}  # timed in these rows
    if not lows:
        return _Standing()
    best = min(lows, key=lambda at: (lows[at], rules.tie_break(columns[at].config)))
    spread = _spread(columns[best].low, columns[best].mid, rows)
    tolerance = rules.tolerance + min(spread, rules.spread_limit)
    limit = lows[best] * (1 + tolerance)
    return _Standing(lows, tuple(at for at, low in lows.items() if low <= limit), spread, tolerance)


def _spread(lows: Sequence[float], mids: Sequence[float], rows: Sequence[int] | None) -> float:
    pairs = zip(lows, mids, strict=True) if rows is None else ((lows[row], mids[row]) for row in rows)
    return median(max(0.0, 1 - low / mid) if mid > 0 else 0.0 for low, mid in pairs if mid < FAILED)


def _pick(rules: _Rules, pool: Pool, standing: _Standing, rows: Sequence[int] | None = None) -> int | None:
    """The column to choose, by either rule, without regard to tables in force."""
    wanted: Iterable[int] = standing.tied
    if rules.rule == "majority":
        votes: dict[int, int] = defaultdict(int)
        for winner in pool.winners if rows is None else (pool.winners[row] for row in rows):
            if winner in standing.lows:
                votes[winner] += 1
        # No winner is eligible: each of them failed somewhere else.
        most = max(votes.values(), default=0)
        wanted = [at for at, count in votes.items() if count == most] or standing.tied
    return min(wanted, key=lambda at: rules.tie_break(pool.columns[at].config), default=None)


def _only_survivor(rules: _Rules, arch: str, kernel: str, pool: Pool) -> int | None:
    """The one config that all recordings launched without timing or failing anything."""
    if len(pool.columns) != 1 or pool.columns[0].timed or pool.columns[0].failed or pool.columns[0].broke:
        return None
    return None if rules.in_force.is_denied(arch, kernel, pool.key, pool.columns[0].config) else 0


def _decide(
    rules: _Rules, kernel: Kernel, arch: str, pool: Pool, origins: Sequence[tuple[str, Environment]]
) -> KeyFacts:
    eligible = _eligible(rules, arch, kernel.qualified_name, pool)
    standing = _stand(rules, pool, eligible)
    at = _pick(rules, pool, standing)
    stability, alternatives = _stability(rules, pool, eligible, at)
    if at is None:
        at = _only_survivor(rules, arch, kernel.qualified_name, pool)
    kept = False
    choice = None if at is None else pool.columns[at].config
    if choice is not None and rules.rule == "pooled":
        incumbent = rules.in_force.incumbent(arch, kernel.qualified_name, pool.key)
        tied = {pool.columns[tie].config for tie in standing.tied}
        if incumbent != choice and incumbent in tied:
            choice, kept = incumbent, True
    recordings = len(pool.sources)
    confidence: Confidence = "clear"
    if choice is None:
        confidence = "none"
    elif recordings == 1:
        confidence = "single"
    elif standing.spread > rules.spread_limit:
        confidence = "noisy"
    elif len(standing.tied) > 1:
        confidence = "tied"
    return KeyFacts(
        arch,
        kernel,
        pool.key,
        choice,
        _candidates(pool, eligible, standing),
        standing.tolerance,
        standing.spread,
        confidence,
        stability,
        alternatives,
        kept,
        pool.shared == recordings,
        tuple(sorted(pool.notes)),
        pool,
        origins,
    )


def _candidates(pool: Pool, eligible: Sequence[int], standing: _Standing) -> tuple[CandidateFacts, ...]:
    wins: dict[int, int] = defaultdict(int)
    for winner in pool.winners:
        wins[winner] += 1
    found = []
    for at, column in enumerate(pool.columns):
        lows = column.times(column.low)
        low, width = quantile(lows, 0.5), quantile(lows, 0.8) - quantile(lows, 0.2) if lows else 0.0
        found.append(
            CandidateFacts(
                column.config,
                low,
                quantile(column.times(column.mid), 0.5),
                quantile(column.times(column.high), 0.5),
                width / low if low > 0 else 0.0,
                column.timed,
                column.failed + column.broke,
                wins[at],
                at in eligible,
                at in standing.tied,
                tuple(sorted(column.errors)),
            )
        )
    return tuple(
        sorted(found, key=lambda item: (not item.timed, item.low_ms if item.timed else 0.0, item.config.order))
    )


def _stability(
    rules: _Rules, pool: Pool, eligible: Sequence[int], choice: int | None
) -> tuple[float | None, tuple[LaunchConfig, ...]]:
    """How often the choice stays when a part of the recordings is left out, and what is chosen instead.

    It stands in for recording again.
    """
    recordings = len(pool.sources)
    if choice is None or recordings < 2:
        return None, ()
    content = pool.contents()
    rows = sorted(range(recordings), key=content.__getitem__)
    if recordings > _SAMPLE:
        rows = [rows[index * recordings // _SAMPLE] for index in range(_SAMPLE)]
    parts = min(_PARTS, len(rows))
    found: list[int] = []
    for part in range(parts):
        rest = [row for index, row in enumerate(rows) if index % parts != part]
        pick = _pick(rules, pool, _stand(rules, pool, eligible, rest), rest)
        found += [] if pick is None else [pick]
    others = {pool.columns[at].config for at in found if at != choice}
    return found.count(choice) / parts, tuple(sorted(others, key=lambda config: config.order))
