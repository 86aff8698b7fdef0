"""What counts as the same time: the numbers of a merge, and the near ties of a single recording."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["SPREAD_LIMIT", "TOLERANCE", "near_ties"]

TOLERANCE = 0.01
"""Two times count as the same within this fraction of the lesser one, ..."""

SPREAD_LIMIT = 0.15
"""... and the measured spread of the fastest candidate, of which this much counts at most."""


def near_ties(times: Sequence[Sequence[float] | None]) -> tuple[int, ...]:
    """The candidates of one recording that a merge of it alone would take for tied, the fastest included.

    Args:
        times: for each candidate the median, the 20th and the 80th percentile in milliseconds, or the median alone;
            None where it failed.

    Returns:
        Their indices in order; none where nothing was timed, and the fastest alone where no other is near.
    """
    lows = {at: item[1 if len(item) > 1 else 0] for at, item in enumerate(times) if item}
    if not lows:
        return ()
    best = min(lows, key=lambda at: (lows[at], at))
    middle = (times[best] or (0.0,))[0]
    spread = max(0.0, 1 - lows[best] / middle) if middle > 0 else 0.0
    limit = lows[best] * (1 + TOLERANCE + min(spread, SPREAD_LIMIT))
    return tuple(at for at, low in lows.items() if low <= limit)
