"""A table that continues another: what is new goes over what was there, and nothing reviewed is lost."""

from __future__ import annotations

from dataclasses import replace

from tuning._table_rows import Entry, TableFile

__all__ = ["continued"]


def continued(new: TableFile, old: TableFile) -> TableFile:
    """``new`` over ``old``, which is for the same arch and package.

    An entry that both have with one config and one source stays as it was, with its evidence and classes. Entries that
    only one has stay, and so does every denied config.
    """
    entries: dict[object, Entry] = {entry.identity: entry for entry in old.entries}
    for entry in new.entries:
        before = entries.get(entry.identity)
        if before is None or (before.config, before.source_hash) != (entry.config, entry.source_hash):
            entries[entry.identity] = entry
    denied = {row.identity: row for row in (*new.denied, *old.denied)}
    counts = {table.multiprocessors for table in (new, old)} - {0}
    return replace(
        new,
        package_version=_listed(new.package_version, old.package_version),
        triton=_listed(new.triton, old.triton),
        device=_listed(new.device, old.device),
        entries=tuple(sorted(entries.values(), key=str)),
        denied=tuple(
            sorted(denied.values(), key=lambda row: (row.kernel, str(row.key), str(row.dtypes), row.config.order))
        ),
        multiprocessors=counts.pop() if len(counts) == 1 else 0,
    )


def _listed(*texts: str) -> str:
    return ", ".join(sorted({part for text in texts for part in text.split(", ") if part}))
