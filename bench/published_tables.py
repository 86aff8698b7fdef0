"""Write the shipped tables from what is committed here: ``python -m bench.published_tables [-o FOLDER]``.

Running this again gives the same bytes; a test holds that.

**Measured** (sm90): the merge of recordings. ``bench/data/journals`` holds four recordings of Mamba-2's SSD step, and
each folder ``bench/data/recordings/<date>`` what ``python -m bench record`` made and ``python -m bench.record_pack``
compacted. Where both have a key the SSD recordings' entry stands, of which there are more.

**Reported** (sm100, sm103): ``bench/data/published_configs.csv``, Mamba-2 SSD kernels of mamba_ssm, and MLA RoPE and
mHC kernels of Megatron-LM's main branch. Nothing in it was measured here, and each entry says so. Besides each row
under its own name, two kinds of alias are written, and their evidence says what they are:

* megatron-core 0.19 has copies of mamba_ssm's forward SSD kernels in ``megatron.core.ssm.ops``, under the same bare
  names, and the rows were published by bare name. The copies take other tensors, so each row is written twice: with the
  dtypes as reported, and with them adapted to the copy's signature (:data:`COPIES`).
* The kernels ``_mla_rope_*`` are not in megatron-core's wheels up to 0.19.2. Their predecessors there
  (:data:`PREDECESSORS`) have the same key arguments, tensors and candidates.

**Denied**: ``bench/data/denied_configs.json``, configs known to be wrong or racy on an arch, with reason and source.
A list in a row's config stands for all of its values. A table cannot limit a row to versions of Triton: it is denied
under all, which costs speed at most.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tuning.journal import find_journals, read_journal
from tuning.merge import merge
from tuning.spec import LaunchConfig, encode_value
from tuning.tables import Denied, Entry, TableFile, write_table

HERE = Path(__file__).resolve().parent

COPIES: Mapping[str, tuple[int | str, ...]] = {
    "ssd_bmm._bmm_chunk_fwd_kernel": (0, 1, 2, "int32"),
    "ssd_chunk_state._chunk_cumsum_fwd_kernel": (0, 1, 2, 3, 4, "int32"),
    "ssd_chunk_state._chunk_state_fwd_kernel": (0, 1, 2, 3, 4, "int32"),
    "ssd_state_passing._state_passing_fwd_kernel": (0, 1, 3, "int32", "int32"),
    "ssd_chunk_scan._chunk_scan_fwd_kernel": (0, 1, 2, 3, 5, 6, "int32", 7, 8, 9, "int32"),
}
"""Kernels of mamba_ssm.ops.triton that megatron-core 0.19.2 copies, and the dtypes of each copy's tensors in the order
of its signature: a number is a position in the reported dtypes. The copies always take cu_chunk_seqlens (int32), the
last two also seq_idx (int32); they do not take final_states and out_x. Read from megatron-core 0.19.2's source."""

PREDECESSORS = {
    "_mla_rope_fwd_inplace_kernel": "rotary_fwd_q_kernel",
    "_mla_rope_bwd_inplace_kernel": "rotary_bwd_q_kernel",
    "_mla_rope_fwd_kv_split_kernel": "rotary_fwd_kv_kernel",
    "_mla_rope_bwd_kv_split_kernel": "rotary_bwd_kv_kernel",
}
"""Kernels of Megatron-LM's main branch, and what megatron-core 0.16.1 and 0.19.2 have instead."""

NOT_MEASURED = "not measured here"
SSD_DATE = "2026-11-29"
"""When the recordings in ``bench/data/journals`` were made."""


def entry_of(row: Mapping[str, str]) -> Entry:
    """The entry of one row of the list."""
    key = json.loads(row["key"])
    wildcard = key == "*"
    return Entry(
        kernel=f"{row['module']}.{row['kernel']}",
        key=None if wildcard else tuple((name, encode_value(value)) for name, value in key.items()),
        dtypes=None,
        dtype_sequence=None if wildcard else tuple(json.loads(row["dtypes"])),
        config=LaunchConfig.build(
            json.loads(row["kwargs"]), num_warps=int(row["num_warps"]), num_stages=int(row["num_stages"])
        ),
        evidence={"reported_by": row["evidence"], "measured": False, "note": NOT_MEASURED},
    )


def aliases(entry: Entry) -> Iterator[Entry]:
    """The entries that one row also stands for."""
    module, _, bare = entry.kernel.rpartition(".")
    if bare in PREDECESSORS:
        note = f"{NOT_MEASURED}; reported for {entry.kernel}, of which this is the predecessor: same key and candidates"
        yield replace(entry, kernel=f"{module}.{PREDECESSORS[bare]}", evidence={**entry.evidence, "note": note})
    name = entry.kernel.removeprefix("mamba_ssm.ops.triton.")
    if name in COPIES and entry.dtype_sequence is not None:
        copy = f"megatron.core.ssm.ops.{name}"
        note = f"{NOT_MEASURED}; reported by bare name for {entry.kernel}, of which this is megatron-core 0.19's copy"
        yield replace(entry, kernel=copy, evidence={**entry.evidence, "note": note})
        adapted = tuple(entry.dtype_sequence[at] if isinstance(at, int) else at for at in COPIES[name])
        evidence = {**entry.evidence, "note": f"{note}; dtypes adapted to the tensors that the copy takes"}
        yield replace(entry, kernel=copy, dtype_sequence=adapted, evidence=evidence)


def tables_of(rows: list[dict[str, str]]) -> Iterator[TableFile]:
    """The table files of a list, sorted by arch and package. What they were recorded with is not known."""
    found: dict[tuple[str, str], list[Entry]] = {}
    for row in rows:
        entry = entry_of(row)
        for each in (entry, *aliases(entry)):
            found.setdefault((row["arch"], each.kernel.partition(".")[0]), []).append(each)
    for (arch, package), entries in sorted(found.items()):
        yield TableFile(arch, package, package_version="", triton="", device="", entries=tuple(entries))


def denied_rows(data: Sequence[Mapping[str, Any]]) -> dict[str, list[Denied]]:
    """The denied configs of a list, by arch."""
    found: dict[str, list[Denied]] = {}
    for row in data:
        names = list(row["kwargs"])
        values = itertools.product(*row["kwargs"].values(), row["num_warps"], row["num_stages"])
        key = None if row["key"] == "*" else tuple((name, encode_value(value)) for name, value in row["key"].items())
        for *settings, warps, stages in values:
            kwargs = dict(zip(names, settings, strict=True))
            config = LaunchConfig.build(kwargs, num_warps=warps, num_stages=stages)
            for arch in row["archs"]:
                found.setdefault(arch, []).append(Denied(row["kernel"], config, key, row["reason"], row["source"]))
    return found


def with_denied(tables: Sequence[TableFile], denied: Mapping[str, Sequence[Denied]]) -> list[TableFile]:
    """Tables with denied configs added, in tables of their own where there is none."""
    found = {(table.arch, table.package): table for table in tables}
    for arch, rows in denied.items():
        for row in rows:
            at = (arch, row.kernel.partition(".")[0])
            table = found.get(at) or TableFile(*at, package_version="", triton="", device="", entries=())
            if all(row.identity != other.identity for other in table.denied):
                found[at] = replace(table, denied=(*table.denied, row))
    return [table for _, table in sorted(found.items())]


def measured(data: Path, denied: Mapping[str, Sequence[Denied]]) -> list[TableFile]:
    """The tables that the committed recordings merge into.

    Configs that are denied for another reason than failing to launch take no part in the merge.
    """
    (ssd,) = merge(map(read_journal, find_journals([data / "journals"])), date=SSD_DATE).tables
    layers: dict[tuple[str, str], TableFile] = {}
    known = with_denied([], denied)
    for folder in sorted(path for path in (data / "recordings").glob("*") if path.is_dir()):
        recorded = map(read_journal, find_journals([folder]))
        # A later recording continues all earlier ones, as ``triton-tuning merge`` does with a table that is there.
        for table in merge(recorded, date=folder.name, tables=[*layers.values(), *known]).tables:
            layers[table.arch, table.package] = table
    at = (ssd.arch, ssd.package)
    layers[at] = _under(ssd, layers[at]) if at in layers else ssd
    return list(layers.values())


def _under(upper: TableFile, lower: TableFile) -> TableFile:
    """One table of two: what the upper one has hides the same key in the lower one."""
    entries = {entry.identity: entry for entry in (*lower.entries, *upper.entries)}
    hidden = {(row.kernel, row.config, row.key, row.dtypes) for row in upper.denied}
    denied = [row for row in lower.denied if (row.kernel, row.config, row.key, row.dtypes) not in hidden]
    return replace(lower, entries=tuple(entries.values()), denied=(*upper.denied, *denied))


def shipped(data: Path = HERE / "data") -> list[TableFile]:
    """Every shipped table, sorted by arch and package."""
    with (data / "published_configs.csv").open(newline="", encoding="utf-8") as stream:
        reported = list(tables_of(list(csv.DictReader(stream))))
    denied = denied_rows(json.loads((data / "denied_configs.json").read_text(encoding="utf-8")))
    return with_denied([*reported, *measured(data, denied)], denied)


def main(arguments: list[str] | None = None) -> None:
    """Write the tables, and name each file written."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("data", nargs="?", type=Path, default=HERE / "data", help="folder with what they are made from")
    parser.add_argument("-o", "--output", type=Path, default=HERE.parent / "tables", metavar="FOLDER")
    options = parser.parse_args(arguments)
    for table in shipped(options.data):
        path = write_table(options.output, table)
        print(f"{path}: {len(table.entries)} entries, {len(table.denied)} denied configs")


if __name__ == "__main__":
    main()
