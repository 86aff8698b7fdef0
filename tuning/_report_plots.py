"""Pictures for the report's page, as SVG text: timings per candidate, where ranks differ, regret per rank.

Drawn by hand rather than by a plotting library: they are bars, lines and squares, they need no extra to be installed, a
page of three hundred keys stays small, and each part can carry a tooltip. Whatever comes out of a file passes through
:func:`escape`. Pure.
"""

from __future__ import annotations

import html
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tuning._merge_facts import CandidateFacts, KeyFacts, RecordingFacts
from tuning.spec import LaunchConfig

__all__ = ["MOST_KEYS", "MOST_ROWS", "RankRows", "disagreement_map", "escape", "regret_bars", "timing_plot"]

MOST_ROWS = 64
"""Rows of a map: more ranks than that share rows."""

MOST_KEYS = 80
"""Columns of a map: the keys that differ most."""

_MOST_POINTS = 32  # recordings drawn one by one; of more, the middle three fifths
_BEYOND = 2.0  # times slower than the best: no longer drawn to scale
_SAME, _UNKNOWN = "#e3e8ee", "#ffffff"
_OTHERS = ("#d1741f", "#1b6ca8", "#8a3f9e", "#3a8f4d", "#a33b3b")
_REST = "#444444"

_SMALL = ' fill="#55626f" font-size="10"'
_RANGE = 'stroke="#9aa8b5" stroke-width="3"'
_MIDDLE = 'stroke="#1c2733" stroke-width="1.5"'
_RECORDING = 'fill="#1b6ca8" fill-opacity="0.5"'
_FAR_RECORDING = 'fill="none" stroke="#1b6ca8"'

_Scale = Callable[[float], float]


def escape(text: str) -> str:
    """Text for HTML and SVG, attributes too; without anything that is no printable character."""
    return html.escape("".join(c if c.isprintable() else repr(c)[1:-1] for c in text))


def _svg(width: float, height: float, label: str, parts: Iterable[str]) -> str:
    return (
        f'<svg viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" role="img" '
        f'font-family="monospace" font-size="11" aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )


def _text(x: float, y: float, text: str, anchor: str = "start", more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(text)}</text>'


# ---------------------------------------------------------------------------------------------------------- timings


def timing_plot(facts: KeyFacts) -> str:
    """One row for each candidate that was timed, fastest first: each recording's 20th percentile, and their spread.

    The bar goes from the 20th to the 80th percentile and has its mark at the median (medians over the recordings); the
    band is what counts as tied. Empty where nothing was timed.
    """
    timed = [item for item in facts.candidates if item.timed]
    best = min((item.low_ms for item in timed if item.eligible), default=math.inf)
    best = best if best < math.inf else min((item.low_ms for item in timed), default=0.0)
    if not timed or best <= 0:
        return ""
    names = [str(item.config) for item in timed]
    left, width, row, top = 12 + 6.7 * max(map(len, names)), 420.0, 20, 26
    low, far = min(item.low_ms for item in timed), best * _BEYOND
    high = max(min(max(item.high_ms, item.low_ms), far) for item in timed)
    low, high = low - 0.04 * (high - low or low), min(high + 0.04 * (high - low or low), sys.float_info.max)
    span = high - low or 1.0  # of the least times that there are, no part is left

    def x(value: float) -> float:
        return left + width * ((min(max(value, low), high) - low) / span)

    bottom = top + row * len(timed)
    tied = max(x(best * (1 + facts.tolerance)) - x(best), 1)
    parts = [f'<rect x="{x(best):.1f}" y="{top}" width="{tied:.1f}" height="{bottom - top}" fill="#dcefe0"/>']
    for tick in range(5):
        value = low + (high - low) * tick / 4
        parts.append(f'<line x1="{x(value):.1f}" x2="{x(value):.1f}" y1="{top}" y2="{bottom}" stroke="#dde3ea"/>')
        parts.append(_text(x(value), top - 8, f"{value:.4g} ms", "middle", _SMALL))
    for number, (item, name) in enumerate(zip(timed, names, strict=True)):
        parts.append(_candidate_row(facts, item, name, x, left, top + row * number + row / 2, far, high))
    label = f"timings of {len(timed)} candidates"
    return _svg(left + width + 90, bottom + 6, label, parts)


def _candidate_row(
    facts: KeyFacts, item: CandidateFacts, name: str, x: _Scale, left: float, middle: float, far: float, high: float
) -> str:
    look = ' font-weight="bold"' if item.config == facts.choice else "" if item.eligible else ' fill="#a33b3b"'
    tip = f"{name}: 20 % {item.low_ms:.4g}, median {item.median_ms:.4g}, 80 % {item.high_ms:.4g} ms"
    parts = [f"<g><title>{escape(tip)}</title>", _text(left - 8, middle + 4, name, "end", look)]
    if item.low_ms > far:
        return "".join([*parts, _text(x(far) + 6, middle + 4, f"{item.low_ms:.4g} ms ▸"), "</g>"])
    row = f'y1="{middle}" y2="{middle}"'
    parts.append(f'<line x1="{x(item.low_ms):.1f}" x2="{x(item.high_ms):.1f}" {row} {_RANGE}/>')
    lows = sorted(low for low, _, _ in facts.timings(item.config) if low < math.inf)
    if len(lows) > _MOST_POINTS:
        start, end = x(lows[len(lows) // 5]), x(lows[-1 - len(lows) // 5])
        place = f'x="{start:.1f}" width="{max(end - start, 1):.1f}" y="{middle - 5}" height="10"'
        parts.append(f"<rect {place} {_RECORDING}/>")
    else:
        # One that lies beyond the edge is drawn there, and hollow.
        parts += [
            f'<circle cx="{x(value):.1f}" cy="{middle}" r="2.6" {_RECORDING if value <= high else _FAR_RECORDING}/>'
            for value in lows
        ]
    at = x(item.median_ms)
    parts.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{middle - 6}" y2="{middle + 6}" {_MIDDLE}/></g>')
    return "".join(parts)


# ------------------------------------------------------------------------------------------------------------ ranks


@dataclass(frozen=True)
class RankRows:
    """Which recordings share a row: each journal has its own, or where they are too many, neighbouring ranks one.

    Attributes:
        names: of the rows, by rank: ``3``, ``3 (2)`` for the second journal of rank 3, ``0-63``.
        places: row of each rank and journal.
    """

    names: tuple[str, ...]
    places: Mapping[tuple[int, str], int]

    @classmethod
    def of(cls, recordings: Iterable[RecordingFacts]) -> RankRows:
        """The rows for these recordings, of which there is at least one."""
        found = sorted({(item.environment.rank, item.path) for item in recordings})
        if len(found) <= MOST_ROWS:
            names: list[str] = []
            seen: Counter[int] = Counter()
            for rank, _ in found:
                seen[rank] += 1
                names.append(str(rank) if seen[rank] == 1 else f"{rank} ({seen[rank]})")
            return cls(tuple(names), {place: at for at, place in enumerate(found)})
        first, last = found[0][0], found[-1][0]
        size = -(-(last - first + 1) // MOST_ROWS)
        starts = range(first, last + 1, size)
        names = [str(start) if size == 1 else f"{start}-{min(start + size - 1, last)}" for start in starts]
        return cls(tuple(names), {(rank, path): (rank - first) // size for rank, path in found})

    def grouped(self, recordings: Iterable[RecordingFacts]) -> list[list[RecordingFacts]]:
        """Recordings by row."""
        rows: list[list[RecordingFacts]] = [[] for _ in self.names]
        for item in recordings:
            rows[self.places[item.environment.rank, item.path]].append(item)
        return rows


def disagreement_map(keys: Sequence[tuple[str, str, KeyFacts]]) -> str:
    """Ranks down, keys across: pale where a rank's winner is the merged choice, a colour for each other winner.

    Args:
        keys: for each key an anchor, a name, and the facts; at most :data:`MOST_KEYS` are drawn.
    """
    shown = keys[:MOST_KEYS]
    if not shown:
        return ""
    ranks = RankRows.of(item for _, _, facts in shown for item in facts.recordings)
    count = len(ranks.names)
    cell, left, top = 16, 90, 22
    parts = [_text(left - 8, top - 8, "rank", "end", _SMALL)]
    parts += [
        _text(left - 8, top + cell * row + cell - 4, ranks.names[row], "end", _SMALL)
        for row in range(count)
        if count <= 24 or row % 4 == 0
    ]
    for column, (anchor, name, facts) in enumerate(shown):
        at = left + cell * column
        parts.append(f'<a href="#{escape(anchor)}">' + _text(at + cell / 2, top - 8, str(column + 1), "middle", _SMALL))
        colours = _colours(facts)
        for row, found in enumerate(ranks.grouped(facts.recordings)):
            fill, tip = _cell(found, facts.choice, colours)
            place = f'x="{at}" y="{top + cell * row}" width="{cell - 1}" height="{cell - 1}"'
            words = f"{name}, rank {ranks.names[row]}: {tip}"
            parts.append(
                f'<rect {place} fill="{fill}" stroke="#c9d2db" stroke-width="0.5"><title>{escape(words)}</title></rect>'
            )
        parts.append("</a>")
    width, height = left + cell * len(shown) + 10, top + cell * count + 6
    return _svg(width, height, "winners by rank and key", parts)


def _colours(facts: KeyFacts) -> dict[LaunchConfig, str]:
    others = [config for config, _ in facts.winners if config != facts.choice]
    return {config: _OTHERS[at] if at < len(_OTHERS) else _REST for at, config in enumerate(others)}


def _cell(
    found: Sequence[RecordingFacts], choice: LaunchConfig | None, colours: dict[LaunchConfig, str]
) -> tuple[str, str]:
    if not found:
        return _UNKNOWN, "not recorded"
    votes = Counter(item.winner for item in found)
    # The most frequent other winner, if any: in a row of several recordings one that differs is to be seen.
    others = sorted((-count, config.order, config) for config, count in votes.items() if config != choice)
    tip = "; ".join(f"{config} ({count} of {len(found)})" for config, count in sorted(votes.items(), key=_by_votes))
    return (colours[others[0][2]] if others else _SAME), tip


def _by_votes(item: tuple[LaunchConfig, int]) -> tuple[int, object]:
    return (-item[1], item[0].order)


def regret_bars(facts: KeyFacts) -> str:
    """What the merged choice costs each rank: the worst regret of its recordings. Empty where none is known."""
    if not facts.regrets:
        return ""
    ranks = RankRows.of(facts.recordings)
    count = len(ranks.names)
    worst = [
        max((item.regret for item in found if item.regret is not None), default=None)
        for found in ranks.grouped(facts.recordings)
    ]
    most = max((value for value in worst if value is not None), default=0.0)
    left, bar, height, top = 60, max(7.0, min(22.0, 420 / count)), 70.0, 16.0
    scale = max(most, 0.01)
    parts = [
        f'<line x1="{left}" x2="{left + bar * count:.1f}" y1="{top + height}" y2="{top + height}" stroke="#dde3ea"/>',
        _text(left - 6, top + 6, f"{100 * scale:.1f} %", "end", _SMALL),
        _text(left - 6, top + height, "0", "end", _SMALL),
        _text(left, top + height + 14, ranks.names[0], "start", _SMALL),
    ]
    if count > 1:
        parts.append(
            _text(
                left + bar * count,
                top + height + 14,
                f"rank {ranks.names[-1]}",
                "end",
                _SMALL,
            )
        )
    for row, value in enumerate(worst):
        if value is None:
            continue
        size = max(height * value / scale, 1.0)
        tip = f"rank {ranks.names[row]}: {100 * value:.1f} % slower than the fastest candidate there"
        place = f'x="{left + bar * row:.1f}" y="{top + height - size:.1f}" width="{bar - 1:.1f}" height="{size:.1f}"'
        parts.append(f'<rect {place} fill="#d1741f"><title>{escape(tip)}</title></rect>')
    return _svg(left + bar * count + 60, top + height + 20, "regret of the merged choice by rank", parts)
