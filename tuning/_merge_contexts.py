"""Which failures say nothing of the candidates that have them: those in a context that an earlier one broke.

After an illegal memory access a CUDA context is of no use: whatever the process launches then fails with the same
error. The candidate that broke it failed of itself; those timed after it, in that record and in all later ones of the
process, were never tried. The errors' texts do not tell for sure (``CUDA error: invalid argument`` breaks nothing), but
what came after does: where anything was timed later, the context was whole.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tuning._journal_measurements import Measurement

__all__ = ["AFTER", "BROKE", "Breakage", "breaks_context", "find_break", "with_breaks"]

_BREAKING = (
    "CUDA error",
    "HIP error",
    "device-side assert",
    "illegal instruction",
    "illegal memory access",
    "misaligned address",
    "unspecified launch failure",
)


AFTER = -1
"""Stands for a candidate where the context broke before the first one."""


BROKE = "broke the device's context"
"""What is said of a candidate."""


@dataclass
class Breakage:
    """What one candidate of one key broke, in all journals.

    Attributes:
        times: how often.
        later: how many failures came after it, and are disregarded.
        errors: what was said as it broke.
    """

    times: int = 0
    later: int = 0
    errors: set[str] = field(default_factory=set)

    def __str__(self) -> str:
        often = "once" if self.times == 1 else f"{self.times} times"
        after = "failure after it is" if self.later == 1 else "failures after it are"
        why = "; ".join(sorted(self.errors))
        why = why if len(why) <= 200 else f"{why[:197]}..."
        return f"broke the device's context {often} ({why}): {self.later} {after} not held against the candidates"


def breaks_context(error: str | None) -> bool:
    """Whether a candidate's error may have left the process without a context that is of any use."""
    return error is not None and any(text in error for text in _BREAKING)


def find_break(measurements: Sequence[Measurement]) -> tuple[int, int] | None:
    """The measurement and the candidate with which the context of a process broke for good; None: it did not.

    Args:
        measurements: all of the process, in the order in which they were made.
    """
    found: tuple[int, int] | None = None
    for at, measurement in enumerate(measurements):
        if measurement.shared:  # a copy of timings that were made before
            continue
        if not measurement.errors:
            found = None if measurement.times else found
            continue
        for index, times in enumerate(measurement.times):
            if times is not None:
                found = None
            elif found is None and breaks_context(measurement.errors.get(index)):
                found = (at, index)
    return found


def with_breaks(measurements: Sequence[Measurement]) -> Iterator[tuple[Measurement, int | None]]:
    """Each measurement of a process, with the candidate that broke the context in it; None: it counts as it is.

    :data:`AFTER` stands where nothing in it counts, for it was made when the context was broken already.
    """
    broken = find_break(measurements)
    for at, measurement in enumerate(measurements):
        if broken is None or at < broken[0] or not measurement.errors:
            yield measurement, None
        elif at == broken[0]:
            yield measurement, broken[1]
        elif not measurement.shared:
            yield measurement, AFTER
        else:
            own = find_break([measurement._replace(shared=False)])
            yield measurement, None if own is None else own[1]
