"""Rows of one kernel, indexed by what is known at a launch."""

from __future__ import annotations

from collections.abc import Iterable

from tuning._table_rows import Denied, Entry
from tuning.spec import Key, LaunchConfig

__all__ = ["DeniedIndex", "RowIndex"]


class RowIndex:
    """One layer's rows of one kernel, indexed."""

    def __init__(self, entries: Iterable[Entry]) -> None:
        self.wildcard: Entry | None = None
        self.named: dict[object, Entry] = {}
        self.sequence: dict[object, Entry] = {}
        self.multiset: dict[object, Entry | None] = {}
        for entry in entries:
            if entry.key is None:
                self.wildcard = entry
                continue
            values = tuple(sorted(entry.key))
            if entry.dtypes is not None:
                self.named[values, tuple(sorted(entry.dtypes))] = entry
                continue
            dtypes = entry.dtype_sequence or ()
            self.sequence[values, dtypes] = entry
            unordered = (values, tuple(sorted(dtypes)))
            self.multiset[unordered] = None if unordered in self.multiset else entry

    def exact(self, key: Key) -> Entry | None:
        """The entry for a key; :meth:`tuning.tables.Tables.exact` says which one if several would do."""
        values = tuple(sorted(key.values))
        entry = self.named.get((values, tuple(sorted(key.dtypes))))
        if entry is None and self.sequence:
            dtypes = key.dtype_sequence
            entry = self.sequence.get((values, dtypes)) or self.multiset.get((values, tuple(sorted(dtypes))))
        return entry


class DeniedIndex:
    """All layers' denied configs of one kernel, top layer first, grouped by the names that they constrain."""

    def __init__(self) -> None:
        self._groups: dict[tuple[tuple[str, ...], tuple[str, ...]], dict[object, list[tuple[int, Denied]]]] = {}
        self._count = 0

    def add(self, row: Denied) -> None:
        """Add a row that lies under those added before."""
        values, dtypes = sorted(row.key or ()), sorted(row.dtypes or ())
        names = tuple(name for name, _ in values), tuple(name for name, _ in dtypes)
        wanted = tuple(text for _, text in values), tuple(dtype for _, dtype in dtypes)
        self._groups.setdefault(names, {}).setdefault(wanted, []).append((self._count, row))
        self._count += 1

    def matching(self, key: Key) -> dict[LaunchConfig, Denied]:
        """The denied configs of a key, each with its topmost row."""
        values, dtypes = dict(key.values), dict(key.dtypes)
        found: list[tuple[int, Denied]] = []
        for (value_names, dtype_names), rows in self._groups.items():
            found += rows.get((tuple(map(values.get, value_names)), tuple(map(dtypes.get, dtype_names))), ())
        found.sort(key=lambda item: item[0], reverse=True)
        return {row.config: row for _, row in found}  # the topmost row of a config comes last and stays
