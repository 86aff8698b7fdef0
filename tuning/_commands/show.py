"""Show one kernel: its candidates, the entries that tables have for it, and what journals measured.

KERNEL is a qualified name, or the end of one where only one kernel in tables and journals ends so.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .._console import Console, UsageError
from ._common import add_arch, add_journals, add_json, add_tables, check_archs, imports_elsewhere

if TYPE_CHECKING:
    from ..inventory import AutotunerInfo
    from ..merge import KeyFacts, MergeResult
    from ..spec import Json, LaunchConfig
    from ..tables import Tables

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "show one kernel: candidates, table entries, timings"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("kernel", metavar="KERNEL", help="qualified name of the kernel, or the end of it")
    add_journals(parser, optional=True)
    add_arch(parser, "show this arch alone (default: every arch that has a table or a timing)")
    add_tables(parser)
    add_json(parser)


def run(options: argparse.Namespace, console: Console) -> int:
    """Do it and return the exit code."""
    from ..errors import TableError
    from ..inventory import known_archs
    from ..tables import load_tables

    check_archs(options.arch, options.table)
    archs = options.arch or known_archs(options.table)
    tables = [load_tables(arch, options.table) for arch in archs]
    measured = _measured(options.journals, options.arch)
    keys = measured.keys if measured is not None else ()
    name = _resolve(options.kernel, {kernel for table in tables for kernel in table.kernels()}, keys)
    if measured is not None:
        mine = tuple(facts for facts in keys if facts.kernel.qualified_name == name)
        measured = dataclasses.replace(measured, keys=mine)
    info, reason = _installed(name)
    shown = _Shown(name, info, reason, tables, measured)
    if shown.is_empty:
        raise TableError(
            f"{name}: not found: no table and no journal given has it, and "
            f"{reason or 'its module has no autotuner of this name'}"
        )
    if options.json:
        console.json(shown.to_json())
    else:
        shown.print(console)
    return 0


def _measured(journals: Sequence[str], archs: Sequence[str] | None) -> MergeResult | None:
    if not journals:
        return None
    from ..journal import find_journals, scan_journal
    from ..merge import merge

    merged = merge(map(scan_journal, find_journals(journals)))
    return dataclasses.replace(merged, keys=tuple(facts for facts in merged.keys if not archs or facts.arch in archs))


def _resolve(text: str, in_tables: Iterable[str], keys: Iterable[KeyFacts]) -> str:
    """The qualified name that ends in ``text``, by whole components."""
    names = {*in_tables, *(facts.kernel.qualified_name for facts in keys)}
    if text in names:
        return text
    matching = sorted(name for name in names if name.endswith(f".{text}"))
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise UsageError(f"KERNEL: {text} is ambiguous: give one of {', '.join(matching)}")
    if "." not in text:
        raise UsageError(
            f"KERNEL: no table and no journal given has a kernel named {text}: expected a qualified name, such as "
            "mamba_ssm.ops.triton.ssd_bmm._bmm_chunk_fwd_kernel; `triton-tuning list PACKAGE` shows them"
        )
    return text


def _installed(name: str) -> tuple[AutotunerInfo | None, str | None]:
    """The installed autotuner; or why there is none."""
    from ..errors import TuningError
    from ..inventory import take_inventory

    module = name.partition(".<locals>")[0].rpartition(".")[0]
    if not all(part.isidentifier() for part in module.split(".")):
        raise UsageError(f"KERNEL: expected a qualified name such as package.module.kernel, found {name!r}")
    try:
        with imports_elsewhere():
            found = take_inventory(module, archs=())
    except TuningError as error:
        return None, error.message
    return next((info for info in found.autotuners if info.kernel == name), None), None


def _key(entry: Any) -> str:
    if entry.key is None:
        return "*"
    dtypes = [f"{name}:{dtype}" for name, dtype in entry.dtypes or ()] or list(entry.dtype_sequence or ())
    return " ".join([*(f"{name}={text}" for name, text in entry.key), *dtypes])


@dataclass
class _Shown:
    name: str
    info: AutotunerInfo | None
    reason: str | None
    tables: Sequence[Tables]
    measured: MergeResult | None

    @property
    def keys(self) -> Sequence[KeyFacts]:
        return self.measured.keys if self.measured is not None else ()

    @property
    def is_empty(self) -> bool:
        return self.info is None and not self.keys and not any(self._entries()) and not any(self._denied())

    def _entries(self) -> list[tuple[str, Any]]:
        return [(table.arch, entry) for table in self.tables for entry in table.entries(self.name)]

    def _denied(self) -> list[tuple[str, Any]]:
        return [
            (table.arch, row)
            for table in self.tables
            for file in table.files
            for row in file.denied
            if row.kernel == self.name
        ]

    def _candidates(self) -> list[tuple[LaunchConfig, Any]]:
        from ..selection import static_cost

        configs = self.info.candidates if self.info is not None else ()
        return sorted(
            ((config, static_cost(config)) for config in dict.fromkeys(configs)),
            key=lambda pair: (pair[1], pair[0].order),
        )

    def to_json(self) -> Json:
        from ..report import report_json

        return {
            "version": 1,
            "kernel": self.name,
            "autotuner": None if self.info is None else self.info.to_json(),
            "not_listed": self.reason,
            "candidates": [
                {"config": config.to_json(), "footprint": cost.footprint, "warps": cost.warps}
                for config, cost in self._candidates()
            ],
            "entries": [
                {
                    "arch": arch,
                    "key": _key(entry),
                    "config": entry.config.to_json(),
                    "source_hash": entry.source_hash,
                    "evidence": dict(entry.evidence),
                    "file": entry.origin,
                }
                for arch, entry in self._entries()
            ],
            "denied": [
                {
                    "arch": arch,
                    "config": row.config.to_json(),
                    "reason": row.reason,
                    "source": row.source,
                    "file": row.origin,
                }
                for arch, row in self._denied()
            ],
            "timings": report_json(self.measured)["results"] if self.measured is not None else [],
        }

    def print(self, console: Console) -> None:
        from ..report import candidate_rows
        from ._rows import print_rows

        console.line(self.name, "bold")
        if self.info is not None:
            console.text(f"key: {', '.join(self.info.key_names) or 'none'}", indent=2, hanging=4)
            for label, text in (
                ("source", self.info.origin),
                ("source hash", self.info.source_hash),
                ("hooks", ", ".join(self.info.hooks)),
                ("pruner", self.info.pruner),
            ):
                if text:
                    console.text(f"{label}: {text}", indent=2, hanging=4)
            for note in self.info.notes:
                console.text(f"note: {note.text}", indent=2, hanging=4)
            console.heading("Candidates, smallest static footprint first")
            console.table(
                ("footprint", "config"), [(str(cost.footprint), str(config)) for config, cost in self._candidates()]
            )
        elif self.reason:
            console.text(f"not listed: {self.reason}", indent=2, hanging=4)
        if self._entries():
            self._print_entries(console)
        if self._denied():
            console.heading("Denied")
            for arch, row in self._denied():
                console.text(f"{arch}  {row.config}: {row.reason} ({row.source})", indent=2, hanging=6)
        if self.keys:
            console.line()
            print_rows(console, [candidate_rows(facts) for facts in self.keys])

    def _print_entries(self, console: Console) -> None:
        groups: dict[tuple[str, str, str], list[Any]] = {}
        for arch, entry in self._entries():
            groups.setdefault((arch, entry.origin or "a table", _evidence(entry.evidence)), []).append(entry)
        for (arch, origin, evidence), entries in groups.items():
            console.heading(f"Entries for {arch}")
            console.text(origin, indent=2, hanging=4)
            console.text(evidence, indent=2, hanging=4)
            for entry in entries:
                console.text(f"{_key(entry)}  ->  {entry.config}", indent=4, hanging=8)


def _evidence(evidence: Any) -> str:
    plain = {name: value for name, value in evidence.items() if not isinstance(value, (dict, list, bool))}
    return "; ".join(f"{name.replace('_', ' ')}: {value}" for name, value in plain.items())
