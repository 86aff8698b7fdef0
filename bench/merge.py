"""What a merge of very many rank files costs: time and peak memory of ``triton-tuning merge``, on two cores, no GPU.

The files are made from the recordings in ``bench/data/journals``: their keys, repeated under further values until there
are enough, with all candidates; every rank has each time with noise of its own. The command runs in a process of its
own, limited to two cores, on files that the operating system has in memory, as after copying them there.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack

from bench import results
from tuning._journal_bodies import encode_environment, encode_record
from tuning._journal_frames import pack_frame
from tuning.journal import find_journals, read_journal
from tuning.spec import Environment, Key, TuningRecord
from tuning.tables import read_table

ROOT = Path(__file__).parents[1]
TARGET_RANKS, TARGET_KEYS = 4096, 300
TARGET_SECONDS, TARGET_BYTES = 60.0, 2 << 30
CORES = 2
NOISE = 0.01


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the case's options."""
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[256, 1024, TARGET_RANKS], help="numbers of rank files to merge"
    )
    parser.add_argument("--keys", type=int, default=TARGET_KEYS, help="keys in each file (default: %(default)s)")


def model(keys: int) -> tuple[Environment, list[TuningRecord]]:
    """Records as the committed recordings have them, with so many different keys."""
    journal = read_journal(find_journals([ROOT / "bench" / "data" / "journals"])[0])
    records = [record for record in journal.records if record.timings]
    found = []
    for number in range(keys):
        record = records[number % len(records)]
        values = (*record.key.values, ("copy", str(number // len(records))))
        found.append(replace(record, key=Key(values, record.key.dtypes, record.key.call_order), specialization=None))
    return journal.environment, found


def write_files(folder: str, ranks: Sequence[int], keys: int) -> None:
    """Write the journals of some ranks."""
    environment, records = model(keys)
    bodies = [msgpack.unpackb(encode_record(record, "")[0]) for record in records]
    for rank in ranks:
        chance = random.Random(rank)
        frames = [pack_frame(encode_environment(replace(environment, rank=rank, host=f"host{rank // 8}"), ""))]
        for body in bodies:
            noise = [1 + NOISE * chance.random() for _ in body["times"]]
            times = [
                None if found is None else [value * factor for value in found]
                for found, factor in zip(body["times"], noise, strict=True)
            ]
            timed = [(found, at) for at, found in enumerate(times) if found is not None]
            frames.append(pack_frame(msgpack.packb({**body, "times": times, "winner": min(timed)[1]})))
        Path(folder, f"run.rank{rank}.host{rank // 8}.1.00000000.journal").write_bytes(b"".join(frames))


def generate(folder: Path, ranks: int, keys: int) -> int:
    """Write the journals of ranks 0 to ``ranks``, on two cores; their size in bytes."""
    context = multiprocessing.get_context("spawn")
    workers = [
        context.Process(target=write_files, args=(str(folder), range(first, ranks, CORES), keys))
        for first in range(CORES)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
        if worker.exitcode:
            raise RuntimeError(f"a process that writes journals ended with {worker.exitcode}")
    return sum(path.stat().st_size for path in folder.iterdir())


def measure(journals: Path, out: Path) -> dict[str, Any]:
    """Run the command: its JSON, with wall and CPU seconds and peak memory in bytes."""
    if hasattr(os, "sched_getaffinity"):
        allowed = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, set(allowed[:CORES]))  # the child has it from us
    command = [sys.executable, "-m", "tuning", "merge", str(journals), "-o", str(out), "--json", "--date", "2026-01-01"]
    printed = out.with_suffix(".json")
    start = time.perf_counter()
    with printed.open("wb") as stream:
        actions = [(os.POSIX_SPAWN_DUP2, stream.fileno(), 1)]
        process = os.posix_spawn(sys.executable, command, {**os.environ, "PYTHONPATH": str(ROOT)}, file_actions=actions)
        _, status, usage = os.wait4(process, 0)
    wall = time.perf_counter() - start
    if hasattr(os, "sched_getaffinity"):
        os.sched_setaffinity(0, allowed)
    if status:
        raise RuntimeError(f"merge ended with status {os.waitstatus_to_exitcode(status)}")
    found = json.loads(printed.read_text())
    return {
        "journals": found["journals"],
        "records": found["records"],
        "keys": found["keys"],
        "disagreeing_keys": found["disagreeing_keys"],
        "wall_seconds": round(wall, 2),
        "cpu_seconds": round(usage.ru_utime + usage.ru_stime, 2),
        "peak_bytes": usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
        "load_average": round(os.getloadavg()[0], 2),
    }


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Generate, merge, check and measure, from few files to many."""
    _, records = model(options.keys)
    timings = sum(len(record.timings) for record in records)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as name:
        for ranks in sorted(options.ranks):
            journals, out = Path(name, f"journals{ranks}"), Path(name, f"tables{ranks}")
            journals.mkdir()
            size = generate(journals, ranks, options.keys)
            row = {"ranks": ranks, "bytes": size, **measure(journals, out)}
            tables = [read_table(path) for path in sorted(out.glob("*/*.json"))]
            entries = [entry for table in tables for entry in table.entries]
            if (row["journals"], row["records"], len(entries)) != (ranks, ranks * options.keys, options.keys):
                raise RuntimeError(f"merge lost something: {row}, {len(entries)} entries")
            if any(entry.evidence["recordings"] != ranks for entry in entries):
                raise RuntimeError("an entry does not have a recording of each rank")
            row["microseconds_per_record"] = round(1e6 * row["cpu_seconds"] / row["records"], 2)
            rows.append(row)
            print(
                f"{ranks:6} files of {options.keys} keys, {size / 2**20:7.0f} MiB: {row['wall_seconds']:7.2f} s "
                f"({row['cpu_seconds']:.2f} s of CPU), {row['peak_bytes'] / 2**20:6.0f} MiB, "
                f"{row['microseconds_per_record']} us a record",
                flush=True,
            )
            for path in journals.iterdir():
                path.unlink()
    target = next((row for row in rows if row["ranks"] == TARGET_RANKS and options.keys == TARGET_KEYS), None)
    return {
        "case": "merge",
        **results.circumstances(("msgpack",)),
        "cores_used": CORES,
        "keys": options.keys,
        "timings_per_file": timings,
        "rows": rows,
        "cpu_ratio_most_to_fewest_per_record": round(
            rows[-1]["microseconds_per_record"] / rows[0]["microseconds_per_record"], 2
        ),
        "targets": {
            "ranks": TARGET_RANKS,
            "keys": TARGET_KEYS,
            "wall_seconds": {"below": TARGET_SECONDS, "found": target and target["wall_seconds"]},
            "cpu_seconds": {"below": TARGET_SECONDS, "found": target and target["cpu_seconds"]},
            "peak_bytes": {"below": TARGET_BYTES, "found": target and target["peak_bytes"]},
        },
    }
