"""What reading or writing another system's files gives: tables or files, and what could not come along."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tuning.journal import Journal
from tuning.spec import Json
from tuning.tables import TableFile

__all__ = ["Exported", "Imported", "Loss", "LossKind", "Losses"]

LossKind = Literal[
    "call_order",
    "denied",
    "duplicate",
    "evidence",
    "header",
    "hook",
    "lookup",
    "mode",
    "not_a_candidate",
    "not_found",
    "other_arch",
    "shadowed",
    "shared_name",
    "stale",
    "unknown_kernel",
    "unknown_member",
    "unnamed_dtypes",
    "unnamed_key",
    "unread",
    "value",
    "wildcard",
]
"""What was lost.

``call_order``: the other side looks an entry up by dtypes in the order of the call, which is not known here.
``denied``: a denied config, which the format does not have. ``duplicate``: two rows that are one on the other side.
``evidence``: who measured an entry and how. ``header``: versions, device or source text. ``hook``: what runs beside a
launch. ``lookup``: the two sides look a key up by different rules. ``mode``: the mode in which the other side runs does
not use it. ``not_a_candidate``: the installed kernel has no such config. ``not_found``: the installed kernel was not
found. ``other_arch``: a row for another arch than was asked for. ``shadowed``: an earlier file hides this one.
``shared_name``: several kernels have this bare name, and the format knows no other. ``stale``: a file of before, which
the other side reads along with those written now. ``unknown_kernel``: a bare name that nothing resolves.
``unknown_member``: a member that is not read. ``unnamed_dtypes``: dtypes without the names of their arguments.
``unnamed_key``: key values without their names. ``unread``: the other side will not read the file. ``value``: a value
that the other side cannot hold, or not with its type. ``wildcard``: a ``*`` entry.
"""


@dataclass(frozen=True, order=True)
class Loss:
    """One thing that a format could not carry.

    Attributes:
        kind: see :data:`LossKind`.
        where: file and place in it, or table, kernel and key.
        message: what is lost, and what follows from it, in one line.
    """

    kind: LossKind
    where: str
    message: str

    def __str__(self) -> str:
        return f"{self.where}: {self.message}"

    def to_json(self) -> Json:
        """JSON form."""
        return {"kind": self.kind, "where": self.where, "message": self.message}


class Losses:
    """Collects losses, each once, in the order in which they are met."""

    def __init__(self) -> None:
        self._found: dict[Loss, None] = {}

    def add(self, kind: LossKind, where: str, message: str) -> None:
        """Note one."""
        self._found[Loss(kind, where, message)] = None

    def extend(self, losses: Iterable[Loss]) -> None:
        """Note several."""
        self._found.update(dict.fromkeys(losses))

    def all(self) -> tuple[Loss, ...]:
        """All of them."""
        return tuple(self._found)


@dataclass(frozen=True)
class Imported:
    """What was read.

    Attributes:
        tables: one for each arch and top-level package, sorted, ready for :func:`tuning.tables.write_table`.
        losses: what did not come along.
        journals: where the format holds timings, these as journals for :func:`tuning.merge.merge`; ``tables`` is then
            what they merge into by themselves.
    """

    tables: tuple[TableFile, ...]
    losses: tuple[Loss, ...] = ()
    journals: tuple[Journal, ...] = ()


@dataclass(frozen=True)
class Exported:
    """What was written.

    Attributes:
        files: the files, sorted.
        losses: what did not come along.
    """

    files: tuple[Path, ...]
    losses: tuple[Loss, ...] = ()
