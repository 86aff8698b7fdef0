"""What a merge found, for each kernel and key: the facts that tables and reports are made from."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from tuning._merge_pools import FAILED, Pool, quantile
from tuning.spec import ComputedOnce, Environment, Json, Kernel, Key, LaunchConfig
from tuning.tables import TableFile

__all__ = ["CandidateFacts", "Confidence", "KeyFacts", "MergeResult", "RankFacts", "RecordingFacts"]

Confidence = Literal["clear", "tied", "noisy", "single", "none"]
"""How sure a choice is.

``clear``: no other candidate is within noise of the best. ``tied``: some are, and the fixed rule chose among them.
``noisy``: the spread of the timings exceeds what a tie may cover, so another recording may choose otherwise.
``single``: only one recording. ``none``: no candidate can be chosen.
"""


@dataclass(frozen=True)
class CandidateFacts:
    """One candidate of one key, over all recordings. Times are infinite where it was never timed.

    Attributes:
        config: the candidate.
        low_ms, median_ms, high_ms: median over the recordings of their 20th percentiles, medians, 80th percentiles.
        spread: width of the middle three fifths of the recordings' 20th percentiles, relative to their median: how
            much recordings differ.
        timed, failed: number of recordings in which it was timed, and failed.
        wins: number of recordings whose winner it is.
        eligible: whether it may be chosen: tried in as many recordings as any, failed in none, and not denied.
        tied: whether it is within noise of the best, the best itself included.
        errors: why it failed, sorted.
    """

    config: LaunchConfig
    low_ms: float
    median_ms: float
    high_ms: float
    spread: float
    timed: int
    failed: int
    wins: int
    eligible: bool
    tied: bool
    errors: tuple[str, ...]


@dataclass(frozen=True)
class RecordingFacts:
    """One recording of one key.

    Attributes:
        path: of the journal.
        environment: where it was made.
        winner: what Triton chose.
        winner_ms: its median there; infinite if it was not timed.
        regret: how much slower the merged choice was there than the fastest candidate there, as a fraction of the
            fastest one's time (both 20th percentiles); None where that is not known.
    """

    path: str
    environment: Environment
    winner: LaunchConfig
    winner_ms: float
    regret: float | None


@dataclass(frozen=True)
class RankFacts:
    """One rank's recordings of one key.

    Attributes:
        rank: the rank.
        hosts: where it ran, sorted.
        recordings: how many recordings it made.
        winners: the winners of its recordings, each once, in canonical order.
        regret: the worst regret of the merged choice in its recordings, as a fraction; None where it is not known.
    """

    rank: int
    hosts: tuple[str, ...]
    recordings: int
    winners: tuple[LaunchConfig, ...]
    regret: float | None


@dataclass(frozen=True)
class KeyFacts:
    """One kernel and key on one arch.

    Attributes:
        arch: the arch.
        kernel: the kernel, with the hash of the source that was timed.
        key: the key.
        choice: the merged choice, or None if no candidate can be chosen.
        candidates: all candidates, fastest first, those that were never timed last.
        tolerance: how much slower than the best a candidate may be and still be tied, as a fraction.
        spread: how far apart the best candidate's 20th percentile and median are, as a fraction of the median.
        confidence: how sure the choice is.
        stability: the fraction of merges with a part of the recordings left out that choose the same; None with fewer
            than two recordings, or where nothing was timed.
        alternatives: what those merges choose that do not choose the same.
        kept: whether a table given to the merge decided among tied candidates.
        shared: whether all recordings are timings of an equal key of another type.
        notes: the records' warnings, sorted.
    """

    arch: str
    kernel: Kernel
    key: Key
    choice: LaunchConfig | None
    candidates: tuple[CandidateFacts, ...]
    tolerance: float
    spread: float
    confidence: Confidence
    stability: float | None
    alternatives: tuple[LaunchConfig, ...]
    kept: bool
    shared: bool
    notes: tuple[str, ...]
    _pool: Pool = field(repr=False, compare=False)
    _origins: Sequence[tuple[str, Environment]] = field(repr=False, compare=False)

    @property
    def chosen(self) -> CandidateFacts | None:
        """The facts of the choice."""
        return next((item for item in self.candidates if item.config == self.choice), None)

    @property
    def runner_up(self) -> CandidateFacts | None:
        """The fastest eligible candidate besides the choice. Where candidates are tied it can be the faster one."""
        return next((item for item in self.candidates if item.eligible and item.config != self.choice), None)

    @property
    def near_ties(self) -> tuple[CandidateFacts, ...]:
        """The candidates within noise of the best, if they are more than one."""
        tied = tuple(item for item in self.candidates if item.tied)
        return tied if len(tied) > 1 else ()

    @property
    def failures(self) -> tuple[CandidateFacts, ...]:
        """The candidates that failed in a recording."""
        return tuple(item for item in self.candidates if item.failed)

    @property
    def recordings_count(self) -> int:
        """Number of recordings; cheaper than ``len(recordings)``."""
        return len(self._pool.sources)

    @ComputedOnce
    def winners(self) -> tuple[tuple[LaunchConfig, int], ...]:
        """The recordings' winners and how many chose each, most frequent first."""
        counts = Counter(self._pool.winners)
        found = [(self._pool.columns[at].config, count) for at, count in counts.items()]
        return tuple(sorted(found, key=lambda item: (-item[1], item[0].order)))

    @property
    def agreement(self) -> int:
        """Number of recordings whose winner is the choice."""
        return sum(count for config, count in self.winners if config == self.choice)

    @property
    def disagrees(self) -> bool:
        """Whether the recordings' winners differ."""
        return len(self.winners) > 1

    @ComputedOnce
    def regrets(self) -> tuple[float, ...]:
        """Regret of the choice in each recording where it is known, sorted; see :attr:`RecordingFacts.regret`."""
        return tuple(sorted(value for value in self._row_regrets if value is not None))

    @ComputedOnce
    def recordings(self) -> tuple[RecordingFacts, ...]:
        """Each recording, by rank, then by what it holds."""
        return tuple(map(self._recording, self._rows))

    @ComputedOnce
    def by_rank(self) -> tuple[RankFacts, ...]:
        """The recordings, grouped by rank."""
        groups: defaultdict[int, list[RecordingFacts]] = defaultdict(list)
        for item in self.recordings:
            groups[item.environment.rank].append(item)
        return tuple(
            RankFacts(
                rank,
                tuple(sorted({item.environment.host for item in found})),
                len(found),
                tuple(sorted({item.winner for item in found}, key=lambda config: config.order)),
                max((item.regret for item in found if item.regret is not None), default=None),
            )
            for rank, found in sorted(groups.items())
        )

    @ComputedOnce
    def ranks(self) -> tuple[int, ...]:
        """The ranks that recorded it."""
        return tuple(sorted({self._origins[source][1].rank for source in self._pool.sources}))

    @ComputedOnce
    def hosts(self) -> tuple[str, ...]:
        """The hosts that recorded it."""
        return tuple(sorted({self._origins[source][1].host for source in self._pool.sources}))

    @ComputedOnce
    def devices(self) -> tuple[str, ...]:
        """The kinds of device that recorded it."""
        return tuple(sorted({self._origins[source][1].device for source in self._pool.sources} - {""}))

    def timings(self, config: LaunchConfig) -> tuple[tuple[float, float, float], ...]:
        """20th percentile, median, 80th percentile of a candidate in each recording, in the order of ``recordings``.

        They are infinite where it failed and NaN where it was not tried.
        """
        column = next(column for column in self._pool.columns if column.config == config)
        return tuple((column.low[row], column.mid[row], column.high[row]) for row in self._rows)

    @ComputedOnce
    def _rows(self) -> tuple[int, ...]:
        contents = self._pool.contents()

        def order(row: int) -> tuple[object, ...]:
            path, environment = self._origins[self._pool.sources[row]]
            return (environment.rank, environment.host, environment.device, contents[row], path)

        return tuple(sorted(range(self.recordings_count), key=order))

    def _recording(self, row: int) -> RecordingFacts:
        path, environment = self._origins[self._pool.sources[row]]
        winner = self._pool.columns[self._pool.winners[row]]
        median = winner.mid[row]
        return RecordingFacts(
            path, environment, winner.config, median if median < FAILED else FAILED, self._row_regrets[row]
        )

    @ComputedOnce
    def _row_regrets(self) -> tuple[float | None, ...]:
        chosen = next((column for column in self._pool.columns if column.config == self.choice), None)
        if chosen is None:
            return (None,) * self.recordings_count
        # NaN compares with nothing: where a candidate was not tried it counts as infinitely slow.
        lows = [
            column.low
            if column.timed + column.failed == self.recordings_count
            else [value if value <= FAILED else FAILED for value in column.low]
            for column in self._pool.columns
        ]
        return tuple(
            mine / best - 1 if mine < FAILED and best > 0 and mine / best < FAILED else None
            for mine, best in zip(chosen.low, map(min, zip(*lows, strict=True)), strict=True)
        )

    def worst_regret(self) -> float | None:
        """The largest regret over the recordings, or None where none is known."""
        return self.regrets[-1] if self.regrets else None

    def median_regret(self) -> float | None:
        """The median regret over the recordings, or None where none is known."""
        return quantile(self.regrets, 0.5) if self.regrets else None


@dataclass(frozen=True)
class MergeResult:
    """What a merge gives.

    Attributes:
        tables: one table for each arch and top-level package, ready to be written, sorted.
        keys: facts for each arch, kernel and key, sorted.
        rule: ``pooled`` or ``majority``.
        journals, records: how many were merged.
        torn: (path, bytes) of the journals that end in a torn tail.
        archs: the archs merged.
        notes: what somebody should know who uses the tables, such as mixed versions, one line each, sorted.
    """

    tables: tuple[TableFile, ...]
    keys: tuple[KeyFacts, ...]
    rule: str
    journals: int
    records: int
    torn: tuple[tuple[str, int], ...]
    archs: tuple[str, ...]
    notes: tuple[str, ...]

    def summary(self) -> dict[str, Json]:
        """Counts, as JSON."""
        return {
            "rule": self.rule,
            "journals": self.journals,
            "records": self.records,
            "archs": list(self.archs),
            "keys": len(self.keys),
            "kernels": len({(facts.arch, facts.kernel.qualified_name) for facts in self.keys}),
            "disagreeing_keys": sum(facts.disagrees for facts in self.keys),
            "near_tied_keys": sum(bool(facts.near_ties) for facts in self.keys),
            "keys_without_choice": sum(facts.choice is None for facts in self.keys),
            "torn_journals": len(self.torn),
        }
