"""Write the tables of published configs from their list: ``python bench/published_tables.py [CSV] [-o FOLDER]``.

The list (``bench/data/published_configs.csv``) holds what others reported for sm100 and sm103: Mamba-2 SSD kernels of
mamba_ssm, and MLA RoPE and mHC kernels of Megatron-LM's main branch. Nothing in it was measured here, and each entry
says so. Running this again gives the same bytes.

Besides each row under its own name, two kinds of alias are written, and their evidence says what they are:

* megatron-core 0.19 has copies of mamba_ssm's forward SSD kernels in ``megatron.core.ssm.ops``, under the same bare
  names, and the rows were published by bare name. The copies take other tensors, so each row is written twice: with the
  dtypes as reported, and with them adapted to the copy's signature (:data:`COPIES`).
* The kernels ``_mla_rope_*`` are not in megatron-core's wheels up to 0.19.2. Their predecessors there
  (:data:`PREDECESSORS`) have the same key arguments, tensors and candidates.
"""

from __future__ import annotations

import argparse
import csv
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from tuning.spec import LaunchConfig, encode_value
from tuning.tables import Entry, TableFile, write_table

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


def main(arguments: list[str] | None = None) -> None:
    """Read the list, write the tables, and name each file written."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("csv", nargs="?", type=Path, default=HERE / "data" / "published_configs.csv")
    parser.add_argument("-o", "--output", type=Path, default=HERE.parent / "tables", metavar="FOLDER")
    options = parser.parse_args(arguments)
    with options.csv.open(newline="", encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    for table in tables_of(rows):
        path = write_table(options.output, table)
        print(f"{path}: {len(table.entries)} entries")


if __name__ == "__main__":
    main()
