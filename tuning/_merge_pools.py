"""Accumulators of a merge: what all recordings of one kernel and key measured, as columns of numbers.

A merge of thousands of rank files holds millions of timings, so they are kept in arrays of doubles (24 bytes for each
candidate of each recording) and the records that they came from are let go. Recordings come in with the same candidates
in the same order nearly always: those are appended to one block, row by row, and the columns are cut out at the end.

**Records without timings.** One with a note is a warning about a key that was timed before: its note is kept, and it is
neither a recording nor a vote. One without is a recording if its journal timed nothing for that key: pruning left one
candidate, and Triton from 3.8 on launches it untimed. Otherwise it says how else the key was launched, and counts for
nothing. Which of them is which must not depend on the order of records, so it is settled at the end.

**Records of a broken context** (:mod:`tuning._merge_contexts`) hold the failure of the candidate that broke it, and
else no more than a part of the candidates: what was timed before is used only where no recording is whole, since a
candidate that all recordings timed would win over faster ones that one could not try.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import compress

from tuning._journal_measurements import Identity, Measurement
from tuning._merge_contexts import Breakage
from tuning.spec import Key, LaunchConfig

__all__ = ["ABSENT", "FAILED", "Column", "Pool", "median", "quantile"]

FAILED = math.inf
"""Stands in a column where the candidate failed."""

ABSENT = math.nan
"""Stands in a column where the candidate was not tried."""


def quantile(ordered: Sequence[float], part: float) -> float:
    """Linear quantile of sorted numbers; infinite of none."""
    if not ordered:
        return math.inf
    place = part * (len(ordered) - 1)
    at = int(place)
    low, high = ordered[at], ordered[min(at + 1, len(ordered) - 1)]
    # Between two equal numbers the interpolation could leave the last bit different from both.
    return low if low == high else low + (high - low) * (place - at)


def median(values: Iterable[float]) -> float:
    """Median of numbers in any order; infinite of none."""
    return quantile(sorted(values), 0.5)


class Column:
    """One candidate of one kernel and key. Each array has one number for each recording of that key.

    Attributes:
        config: the candidate.
        low, mid, high: 20th percentile, median and 80th percentile in milliseconds, or :data:`FAILED` or
            :data:`ABSENT`. All three are the median where a recording has nothing else.
        timed, failed: in how many recordings it was timed, and failed.
        broke: in how many others it failed and took the context of the process along; these are not in the arrays.
        errors: why it failed, each reason once.
    """

    __slots__ = ("broke", "config", "errors", "failed", "high", "low", "mid", "timed")

    def __init__(self, config: LaunchConfig, low: array[float], mid: array[float], high: array[float]) -> None:
        self.config = config
        self.low = low
        self.mid = mid
        self.high = high
        self.failed = low.count(FAILED)
        self.timed = sum(value < FAILED for value in low)
        self.broke = 0
        self.errors: set[str] = set()

    def times(self, numbers: Sequence[float], rows: Sequence[int] | None = None) -> list[float]:
        """Those of ``numbers`` (in ``rows``) that are times, sorted."""
        if rows is not None:
            numbers = [numbers[row] for row in rows]
        elif self.timed == len(numbers):
            return sorted(numbers)
        return sorted(value for value in numbers if value < FAILED)  # false for NaN, which ABSENT is


class _Block:
    """Recordings with the same candidates in the same order, one after the other."""

    __slots__ = ("high", "low", "mid", "sources", "winners")

    def __init__(self) -> None:
        self.low = array("d")
        self.mid = array("d")
        self.high = array("d")
        self.sources = array("L")
        self.winners = array("L")


_Place = tuple[Identity, tuple[int, ...], _Block, tuple[int, ...]]
_MOST_KNOWN = 64  # a reader that cannot keep its identities must not make every pool keep them


def _fill(times: Sequence[float] | None) -> Sequence[float]:
    return (FAILED,) * 3 if times is None else (times[0], times[-1], times[0])


class Pool:
    """All recordings of one kernel and key on one arch.

    Attributes:
        key: the key, in the first of the declaration orders seen.
        columns: the candidates; filled by :meth:`seal`. No result may depend on their order.
        sources: for each recording, the index of its journal.
        winners: for each recording, the index of the column of its winner.
        shared: number of recordings that are timings of an equal key of another type.
        notes: warnings of the records, each once.
        broken: for each candidate that broke the context of a process, what it broke.
    """

    __slots__ = (
        "_blocks", "_configs", "_errors", "_index", "_known", "_partial", "_untimed",
        "broken", "columns", "key", "notes", "shared", "sources", "winners",
    )  # fmt: skip

    def __init__(self, key: Key) -> None:
        self.key = key
        self.columns: tuple[Column, ...] = ()
        self.sources = array("L")
        self.winners = array("L")
        self.shared = 0
        self.notes: set[str] = set()
        self.broken: defaultdict[LaunchConfig, Breakage] = defaultdict(Breakage)
        # What was measured until the context broke, of use where nobody measured this key whole.
        self._partial: list[tuple[Measurement, int]] = []
        self._blocks: dict[tuple[int, ...], _Block] = {}
        self._configs: list[LaunchConfig] = []
        self._errors: dict[int, set[str]] = {}
        self._index: dict[LaunchConfig, int] = {}
        # Journal and winner of the records without timings, and whether all such records are of an equal key.
        self._untimed: dict[tuple[int, LaunchConfig], bool] = {}
        # Hashing configs costs more than all else that is done to timings, and a reader gives equal identities of
        # different files as one object: known by the object, which is kept alive here.
        self._known: dict[int, _Place] = {}

    def add(self, measurement: Measurement, source: int) -> None:
        """Add one recording, made by the journal with index ``source``."""
        identity, times = measurement.identity, measurement.times
        if measurement.note:
            self.notes.add(measurement.note)
        if not times:
            if not measurement.note:
                self._choose_key(identity.key)
                name = (source, identity.configs[measurement.winner])
                self._untimed[name] = self._untimed.get(name, True) and measurement.shared
            return
        known = self._known.get(id(identity))
        layout, block, places = (known or self._place(identity, len(times)))[1:]
        # Triton's benchmarker gives median, 20th and 80th percentile. Another one may give the median alone.
        filled = [item if item is not None and len(item) > 2 else _fill(item) for item in times]
        block.mid.extend([item[0] for item in filled])
        block.low.extend([item[1] for item in filled])
        block.high.extend([item[2] for item in filled])
        block.sources.append(source)
        block.winners.append(places[measurement.winner])
        if None in times:
            for index, item in enumerate(times):
                if item is None:
                    reason = measurement.errors.get(index, "failed")
                    self._errors.setdefault(layout[index], set()).add(reason)
        self.shared += measurement.shared

    def add_broken(self, measurement: Measurement, broke: int, source: int) -> Breakage:
        """Add a recording in which the candidate ``broke`` broke the context: what came after it was not tried."""
        if measurement.note:
            self.notes.add(measurement.note)
        identity, error = measurement.identity, measurement.errors[broke]
        self._choose_key(identity.key)
        found = self.broken[identity.configs[broke]]
        found.times += 1
        found.later += len(measurement.times) - broke - 1
        found.errors.add(error)
        self._errors.setdefault(self._column_of(identity.configs[broke]), set()).add(error)
        timed = [index for index in range(broke) if measurement.times[index] is not None]
        if timed:
            winner = min(timed, key=lambda index: (measurement.times[index] or (FAILED,))[0])
            less = Identity(identity.kernel, identity.key, identity.arch, identity.configs[:broke], None)
            errors = {index: text for index, text in measurement.errors.items() if index < broke}
            kept = Measurement(less, measurement.times[:broke], errors, winner, measurement.shared, "")
            self._partial.append((kept, source))
        return found

    def _place(self, identity: Identity, tried: int) -> _Place:
        """Where the timings of this identity go."""
        self._choose_key(identity.key)
        places = [self._column_of(config) for config in identity.configs]
        layout = tuple(places[:tried])
        place = (identity, layout, self._blocks.setdefault(layout, _Block()), tuple(places))
        if len(self._known) >= _MOST_KNOWN:
            self._known.clear()
        self._known[id(identity)] = place
        return place

    def _column_of(self, config: LaunchConfig) -> int:
        at = self._index.setdefault(config, len(self._configs))
        if at == len(self._configs):
            self._configs.append(config)
        return at

    def _choose_key(self, key: Key) -> None:
        # A call order is worth having: a record without one does not hide another's.
        mine, theirs = ((not one.call_order, one.values, one.dtypes, one.call_order) for one in (self.key, key))
        if theirs < mine:
            self.key = key

    def seal(self) -> None:
        """Cut the blocks into columns. Nothing can be added afterwards."""
        if not self._blocks:
            for measurement, source in self._partial:
                self.add(measurement, source)
        self._partial.clear()
        self.notes.update(f"{config} {found}" for config, found in self.broken.items())
        self._add_untimed()
        blocks, self._blocks = self._blocks, {}
        for block in blocks.values():
            self.sources.extend(block.sources)
            self.winners.extend(block.winners)
        columns = []
        for at, config in enumerate(self._configs):
            low, mid, high = array("d"), array("d"), array("d")
            for layout, block in blocks.items():
                places = list(compress(range(len(layout)), [found == at for found in layout]))
                for whole, part in ((low, block.low), (mid, block.mid), (high, block.high)):
                    whole.extend(_column(part, places, len(layout), len(block.sources)))
            column = Column(config, low, mid, high)
            column.errors = self._errors.get(at, set())
            column.broke = self.broken[config].times if config in self.broken else 0
            columns.append(column)
        self.columns = tuple(columns)
        self._known.clear()

    def _add_untimed(self) -> None:
        if not self._untimed:
            return
        timed = {source for block in self._blocks.values() for source in block.sources}
        block = _Block()
        for (source, winner), shared in self._untimed.items():
            if source not in timed:
                block.sources.append(source)
                block.winners.append(self._column_of(winner))
                self.shared += shared
        self._untimed.clear()
        if block.sources:
            self._blocks[()] = block

    def contents(self) -> list[tuple[float, ...]]:
        """For each recording all that it holds, to be compared: recordings with equal contents are interchangeable."""
        order = sorted(range(len(self.columns)), key=lambda at: self.columns[at].config.order)
        place = {at: float(rank) for rank, at in enumerate(order)}
        numbers: list[Iterable[float]] = [[place[winner] for winner in self.winners]]
        for at in order:
            column = self.columns[at]
            everywhere = column.timed + column.failed == len(self.sources)
            # NaN compares with nothing: a candidate that was not tried counts as below all times.
            numbers += [
                part if everywhere else [value if value <= FAILED else -1.0 for value in part]
                for part in (column.low, column.mid, column.high)
            ]
        return list(zip(*numbers, strict=True))


def _column(numbers: array[float], places: Sequence[int], width: int, rows: int) -> array[float]:
    if not places:
        return array("d", [ABSENT]) * rows
    first = numbers[places[0] :: width]
    for place in places[1:]:
        # Candidates that differ in their hooks alone are one config: the first listed counts, and all must succeed.
        other = numbers[place::width]
        first = array("d", [FAILED if there == FAILED else here for here, there in zip(first, other, strict=True)])
    return first
