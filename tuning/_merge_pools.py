"""Accumulators of a merge: what all recordings of one kernel and key measured, as columns of numbers.

A merge of thousands of rank files holds millions of timings, so they are kept in arrays of doubles (24 bytes for each
candidate of each recording) and the records that they came from are let go. A column holds one number for each
recording of its key: a time in milliseconds, infinity where the candidate failed, NaN where it was not tried.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence

from tuning.spec import CandidateTiming, Key, LaunchConfig, TuningRecord

__all__ = ["Column", "Pool", "quantile"]

_FAILED = math.inf
_ABSENT = math.nan


def quantile(values: Iterable[float], part: float) -> float:
    """Linear quantile of some numbers, whatever their order; NaN of none."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    place = part * (len(ordered) - 1)
    at = int(place)
    low = ordered[at]
    # Between two equal numbers the interpolation could leave the last bit different from both.
    high = ordered[min(at + 1, len(ordered) - 1)]
    return low if low == high else low + (high - low) * (place - at)


class Column:
    """One candidate of one kernel and key.

    Attributes:
        config: the candidate.
        low, mid, high: 20th percentile, median and 80th percentile in each recording. All three are the median where a
            recording has nothing else.
        timed, failed: in how many recordings it was timed, and failed.
        errors: why it failed, each reason once.
    """

    __slots__ = ("config", "errors", "failed", "high", "low", "mid", "timed")

    def __init__(self, config: LaunchConfig, recordings: int) -> None:
        self.config = config
        self.low = array("d", [_ABSENT]) * recordings
        self.mid = array("d", [_ABSENT]) * recordings
        self.high = array("d", [_ABSENT]) * recordings
        self.timed = 0
        self.failed = 0
        self.errors: set[str] = set()

    def add(self, timing: CandidateTiming) -> None:
        """Append what a recording found."""
        times = timing.times_ms
        if times is None:
            self.low.append(_FAILED)
            self.mid.append(_FAILED)
            self.high.append(_FAILED)
            self.failed += 1
            self.errors.add(timing.error or "failed")
            return
        # Triton's benchmarker gives median, 20th and 80th percentile. Another one may give the median alone.
        mid = times[0]
        self.low.append(min(mid, times[1]) if len(times) > 1 else mid)
        self.mid.append(mid)
        self.high.append(max(mid, times[2]) if len(times) > 2 else mid)
        self.timed += 1

    def skip(self) -> None:
        """Append that a recording did not try it."""
        self.low.append(_ABSENT)
        self.mid.append(_ABSENT)
        self.high.append(_ABSENT)

    def pooled(self, numbers: Sequence[float], rows: Sequence[int] | None = None) -> float:
        """Median over the recordings (or ``rows`` of them) in which it was timed; NaN if there are none."""
        taken = numbers if rows is None else [numbers[row] for row in rows]
        return quantile((value for value in taken if value < _FAILED), 0.5)  # also false for NaN


class Pool:
    """All recordings of one kernel and key on one arch.

    Attributes:
        key: the key, in the first of the declaration orders seen.
        columns: the candidates, in the order in which they were met: no result may depend on it.
        sources: for each recording, the index of its journal.
        winners: for each recording, the index of the column of its winner.
        shared: number of recordings that are timings of an equal key of another type.
        notes: warnings of the records, each once.
    """

    __slots__ = ("_index", "_known", "columns", "key", "notes", "shared", "sources", "winners")

    def __init__(self, key: Key) -> None:
        self.key = key
        self.columns: list[Column] = []
        self.sources = array("L")
        self.winners = array("L")
        self.shared = 0
        self.notes: set[str] = set()
        self._index: dict[LaunchConfig, int] = {}
        # Hashing a config costs more than all else that is done to a timing, and a reader gives equal configs of
        # different files as one object: known by identity, kept alive here.
        self._known: dict[int, tuple[LaunchConfig, int]] = {}

    def add(self, record: TuningRecord, source: int) -> None:
        """Add one recording, made by the journal with index ``source``."""
        if record.key is not self.key:
            self._canonical_key(record.key)
        columns = self.columns
        recordings = len(self.sources)
        for timing in record.timings:
            column = columns[self._at(timing.config, recordings)]
            if len(column.low) == recordings:
                column.add(timing)
            elif timing.times_ms is None and column.low[-1] != _FAILED:
                # Candidates that differ in their hooks alone are one config, and it fails where one of them does.
                column.low[-1] = column.mid[-1] = column.high[-1] = _FAILED
                column.timed -= 1
                column.failed += 1
                column.errors.add(timing.error or "failed")
        winner = self._at(record.winner, recordings)
        for column in columns:
            if len(column.low) == recordings:
                column.skip()
        self.sources.append(source)
        self.winners.append(winner)
        self.shared += record.shared
        if record.note:
            self.notes.add(record.note)

    def _at(self, config: LaunchConfig, recordings: int) -> int:
        known = self._known.get(id(config))
        if known is None:
            at = self._index.setdefault(config, len(self.columns))
            if at == len(self.columns):
                self.columns.append(Column(config, recordings))
            known = self._known[id(config)] = (config, at)
        return known[1]

    def _canonical_key(self, key: Key) -> None:
        mine = (self.key.values, self.key.dtypes, self.key.call_order)
        theirs = (key.values, key.dtypes, key.call_order)
        # A call order is worth having: a record without one does not hide another's.
        if (not theirs[2], theirs) < (not mine[2], mine):
            self.key = key
