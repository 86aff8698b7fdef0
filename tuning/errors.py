"""Everything this library raises on purpose.

::

    TuningError                     base of all; catch this to catch any of them
    ├── PolicyError                 a policy field, flag or YAML key is wrong (also a ValueError)
    ├── TableError                  a table file is malformed, foreign, or made for another arch
    ├── TableMissError              ``on_miss="error"`` and no entry matches
    ├── JournalError                a journal cannot be written, or is damaged, or lacks what was asked
    ├── DisagreementError           ranks launched different configs, or a rank sent what cannot be read
    │   └── AbsentRankError         a rank did not arrive at a check in time
    ├── InventoryError              a module whose autotuners were asked for cannot be listed
    ├── MetricStandardError         a file of metrics, or what is recorded into one, cannot be used
    ├── CostError                   a file of timed ranges, or what is measured for one, cannot be used
    ├── UnsupportedTritonError      the installed Triton lacks what interception needs
    └── DeterminismError            deterministic mode refuses the process as it is

Each error is one message (what is wrong, where, what was expected, what to do) plus the same facts as attributes.
All of them pickle: the attributes are keyword-only with defaults, so that the default protocol, which calls
``cls(message)`` and then restores ``__dict__``, brings back an equal error on another rank or in a parent process.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence

__all__ = [
    "AbsentRankError",
    "CostError",
    "DeterminismError",
    "DisagreementError",
    "InventoryError",
    "JournalError",
    "MetricStandardError",
    "PolicyError",
    "TableError",
    "TableMissError",
    "TuningError",
    "UnsupportedTritonError",
]


class TuningError(Exception):
    """Base class of every error that this library raises on purpose."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class PolicyError(TuningError, ValueError):
    """A policy field has a value that cannot be used.

    Attributes:
        field: name of the policy field, or of the unknown key; None when several fields together are at fault.
        value: the value found, as given.
        expected: what would have been accepted, in words.
    """

    def __init__(
        self, message: str, *, field: str | None = None, value: object = None, expected: str | None = None
    ) -> None:
        super().__init__(message)
        self.field = field
        self.value = value
        self.expected = expected

    def __reduce__(self) -> tuple[object, ...]:
        # The value is whatever the caller passed. One that does not pickle travels as its text: the error must travel.
        state = dict(vars(self))
        try:
            pickle.dumps(self.value)
        except Exception:
            state["value"] = repr(self.value)
        return type(self), self.args, state


class TableError(TuningError):
    """A table file cannot be used.

    Attributes:
        file: path of the file, or None where the table was built in memory.
        where: JSON path of the fault, such as ``$.entries[3].config.num_warps``.
        expected: what the place should hold, in words.
        found: what it holds, shortened.
    """

    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        where: str | None = None,
        expected: str | None = None,
        found: str | None = None,
    ) -> None:
        super().__init__(message)
        self.file = file
        self.where = where
        self.expected = expected
        self.found = found


class TableMissError(TuningError, LookupError):
    """No table entry matches, and the policy says that this is an error.

    Attributes:
        kernel: qualified name of the kernel.
        key: the key that was looked up, as text.
        arch: the architecture that was searched.
        closest: for the closest entries, the fields that differ, one line each.
    """

    def __init__(
        self,
        message: str,
        *,
        kernel: str | None = None,
        key: str | None = None,
        arch: str | None = None,
        closest: Sequence[str] = (),
    ) -> None:
        super().__init__(message)
        self.kernel = kernel
        self.key = key
        self.arch = arch
        self.closest = tuple(closest)


class JournalError(TuningError):
    """A journal cannot be written, is damaged, or does not hold what was asked for.

    Attributes:
        file: path of the journal.
        offset: byte offset of the damage, where there is one.
        permanent: whether writing the same thing again must fail again: it is the thing that no journal holds, and
            not the disk that is full.
    """

    def __init__(
        self, message: str, *, file: str | None = None, offset: int | None = None, permanent: bool = False
    ) -> None:
        super().__init__(message)
        self.file = file
        self.offset = offset
        self.permanent = permanent


class DisagreementError(TuningError):
    """Ranks launched different configs for the same key, or sent contents that cannot be read.

    Attributes:
        step: the training step of the check, or None.
        disagreements: one line for each kernel and key at fault, with ranks grouped by config.
    """

    def __init__(self, message: str, *, step: int | None = None, disagreements: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.step = step
        self.disagreements = tuple(disagreements)


class AbsentRankError(DisagreementError):
    """A rank of the group did not arrive at a check within the timeout.

    Attributes:
        arrived: the ranks (within the group) that did arrive.
        missing: the ranks that did not.
    """

    def __init__(
        self,
        message: str,
        *,
        step: int | None = None,
        disagreements: Sequence[str] = (),
        arrived: Sequence[int] = (),
        missing: Sequence[int] = (),
    ) -> None:
        super().__init__(message, step=step, disagreements=disagreements)
        self.arrived = tuple(arrived)
        self.missing = tuple(missing)


class InventoryError(TuningError):
    """Autotuners were asked for that cannot be listed: the module does not import, or the figure was not computed.

    Attributes:
        module: the module or package asked for, or None.
        reason: why, in one line.
    """

    def __init__(self, message: str, *, module: str | None = None, reason: str | None = None) -> None:
        super().__init__(message)
        self.module = module
        self.reason = reason


class MetricStandardError(TuningError):
    """A file of recorded metrics cannot be used, a value cannot be recorded, or a recording is refused.

    Attributes:
        file: path of the file, or None.
        where: the place in it, such as ``$.metrics.loss.points[3]``, or the metric at fault, or None.
        expected: what would have been accepted, in words.
        found: what was found, shortened.
    """

    def __init__(
        self,
        message: str,
        *,
        file: str | None = None,
        where: str | None = None,
        expected: str | None = None,
        found: str | None = None,
    ) -> None:
        super().__init__(message)
        self.file = file
        self.where = where
        self.expected = expected
        self.found = found


class CostError(TuningError):
    """A file of timed ranges cannot be read or written, two cannot be joined, or ranges cannot be timed.

    Attributes:
        file: path of the file, or None.
        line: the line at fault, from 1, or None.
    """

    def __init__(self, message: str, *, file: str | None = None, line: int | None = None) -> None:
        super().__init__(message)
        self.file = file
        self.line = line


class UnsupportedTritonError(TuningError):
    """The installed Triton is outside the supported range, or its autotuner lacks a part that we replace.

    Attributes:
        found: the version found, or None where Triton is not installed.
        supported: the range supported, in words.
    """

    def __init__(self, message: str, *, found: str | None = None, supported: str | None = None) -> None:
        super().__init__(message)
        self.found = found
        self.supported = supported


class DeterminismError(TuningError):
    """Deterministic mode refuses the process as it is.

    Attributes:
        problems: every problem found, one line each.
    """

    def __init__(self, message: str, *, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems = tuple(problems)
