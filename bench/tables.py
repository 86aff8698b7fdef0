"""Loading a table of many entries, looking keys up in it, the memory it takes, and importing the library (CPU).

A table is written whose entries look like recorded ones: kernels of one package with a key of three values and five
dtypes each. It is checked first, in a process of its own, that every entry is found and that other keys are not. Loads
and lookups are timed in further fresh processes, several of each; of lookups every one is timed by itself. Memory is
what Python has allocated (tracemalloc) and what the process holds (resident set), after loading and after looking up
every key. ``import``: of the package alone, and with what installing a policy and loading tables needs.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import results

TARGETS = {"load_ms": 100.0, "miss_us": 20.0, "import_ms": 50.0}
ARCH = "sm90"
PACKAGE = "mamba_ssm"
PER_KERNEL = 200
IMPORTS = {
    "import_ms": "import tuning",
    "import_and_names_ms": "import tuning; tuning.AutotunePolicy, tuning.install, tuning.load_tables",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this case."""
    parser.add_argument("--entries", type=int, default=10_000, help="entries of the table")
    parser.add_argument("--processes", type=int, default=7, help="fresh processes for each figure")


def kernel_name(number: int) -> str:
    """Of the kernel that an entry is for; ``number`` is the entry's."""
    return f"{PACKAGE}.ops.stub._kernel{number // PER_KERNEL}"


def key_of(number: int) -> Any:
    """The key of an entry."""
    from tuning.spec import Key

    names = ("x_ptr", "b_ptr", "dt_ptr", "dA_cumsum_ptr", "out_ptr")
    dtypes = dict(zip(names, ("bfloat16", "bfloat16", "float32", "float32", "bfloat16"), strict=True))
    return Key.of({"chunk_size": 128, "hdim": 16 * (number % PER_KERNEL + 1), "IS_CAUSAL": True}, dtypes)


def make_table(folder: Path, entries: int) -> Path:
    """Write a table of so many entries, and return its file."""
    from tuning.spec import LaunchConfig
    from tuning.tables import Entry, TableFile, write_table

    evidence = {
        "agreement": 3, "best_ms": 0.036256, "candidates": 9, "confidence": "clear", "date": "2026-01-01",
        "devices": ["a device"], "hosts": 1, "measured": True, "ranks": 1, "recordings": 4,
        "regret": {"median": 0.0, "worst": 0.3004}, "rule": "pooled", "runner_up_ms": 0.038192, "tied": 0,
    }  # fmt: skip

    def made(number: int) -> Entry:
        key = key_of(number)
        kwargs = {"BLOCK_SIZE_M": 16 << number % 4, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32}
        return Entry(
            kernel=kernel_name(number),
            key=key.values,
            dtypes=key.dtypes,
            dtype_sequence=None,
            config=LaunchConfig.build(kwargs, num_warps=4, num_stages=3, num_ctas=1),
            evidence=evidence,
        )

    table = TableFile(
        arch=ARCH,
        package=PACKAGE,
        package_version="",
        triton="",
        device="",
        entries=tuple(made(number) for number in range(entries)),
    )
    return write_table(folder, table)


def _resident() -> int:
    """Bytes of this process that are in memory (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def worker(kind: str, folder: str, entries: int) -> dict[str, Any]:
    """One fresh process: ``check``, ``time`` or ``memory``."""
    import tracemalloc

    import tuning.tables

    load = tuning.tables.load_tables
    # The tables that come with the library would be loaded too; the kernels of this one are not in them.
    if kind == "memory":
        tracemalloc.start()
    allocated, resident = tracemalloc.get_traced_memory()[0], _resident()
    began, busy = time.perf_counter(), time.process_time()
    tables = load(ARCH, [folder])
    found: dict[str, Any] = {
        "load_ms": 1e3 * (time.perf_counter() - began),
        "load_cpu_ms": 1e3 * (time.process_time() - busy),  # without what other processes took
    }

    def memory() -> dict[str, float]:
        return {
            "allocated_MB": (tracemalloc.get_traced_memory()[0] - allocated) / 1e6,
            "resident_MB": (_resident() - resident) / 1e6,
        }

    if kind == "memory":
        after_load = memory()
    keys = [(kernel_name(number), key_of(number)) for number in range(entries)]
    if kind == "memory":
        keys_alone = tracemalloc.get_traced_memory()[0] - allocated - 1e6 * after_load["allocated_MB"]
        for kernel, key in keys:
            tables.exact(kernel, key)
        after_all = memory()
        after_all["allocated_MB"] -= keys_alone / 1e6
        del after_all["resident_MB"]  # the keys that were asked for are in it
        return {"after_load": after_load, "after_all_lookups": after_all}
    others = [(kernel, _other(key)) for kernel, key in keys]
    if kind == "check":
        missing = sum(tables.exact(kernel, key) is None for kernel, key in keys)
        wrong = sum(tables.exact(kernel, key) is not None for kernel, key in others)
        return {"missing": missing, "wrong": wrong}

    def timed(asked: list[Any]) -> list[float]:
        spent = []
        for kernel, key in asked:
            begin = time.perf_counter()
            tables.exact(kernel, key)
            tables.wildcard(kernel)
            spent.append(1e6 * (time.perf_counter() - begin))
        return spent

    first = timed(others[:1])[0]
    miss, hit, again = timed(others), timed(keys), timed(keys)
    unknown = timed([(f"{kernel}_unknown", key) for kernel, key in keys])
    found["first_lookup_us"] = first
    for name, spent in (("miss", miss), ("hit_first", hit), ("hit_again", again), ("unknown_kernel", unknown)):
        deciles = statistics.quantiles(spent, n=100)
        found |= {f"{name}_us": statistics.median(spent), f"{name}_p99_us": deciles[98]}
    return found


def _other(key: Any) -> Any:
    """A key like it that no entry has."""
    from tuning.spec import Key

    return Key.of({"chunk_size": 256, "hdim": 64, "IS_CAUSAL": True}, dict(key.dtypes))


def _process(*arguments: str) -> Any:
    root = str(Path(__file__).resolve().parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH", "")]))}
    done = subprocess.run(
        [sys.executable, *arguments], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments[:3])} failed:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run the case and return the result."""
    figures: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="bench-tables-") as folder:
        size = make_table(Path(folder), options.entries).stat().st_size

        def ask(kind: str) -> Any:
            return _process("-m", "bench.tables", kind, folder, str(options.entries))

        checked = ask("check")
        if checked != {"missing": 0, "wrong": 0}:
            raise RuntimeError(f"of {options.entries} entries {checked}: expected all found, and no other key")
        for _ in range(options.processes):
            for name, value in ask("time").items():
                figures.setdefault(name, []).append(value)
            for name, text in IMPORTS.items():
                program = (
                    f"import sys, time; began = time.perf_counter(); {text}; spent = time.perf_counter() - began; "
                    "assert not {'torch', 'triton'} & set(sys.modules); print(1e3 * spent)"
                )
                figures.setdefault(name, []).append(_process("-c", program))
        memory = ask("memory")
    medians = {name: statistics.median(values) for name, values in figures.items()}
    met = {name: medians[name] < limit for name, limit in TARGETS.items()}
    print(f"{options.entries} entries, {size / 1e6:.1f} MB, medians of {options.processes} processes")
    for name, median in medians.items():
        limit = f"target {TARGETS[name]:g}: {'met' if met[name] else 'missed'}" if name in TARGETS else ""
        print(f"  {name:24} {median:10.3f}  {limit}")
    print(f"  memory after load: {memory['after_load']}, after looking up every key: {memory['after_all_lookups']}")
    return {
        "case": "tables",
        **results.circumstances(("triton", "torch", "msgpack")),
        "entries": options.entries,
        "file_bytes": size,
        "processes": options.processes,
        "medians": medians,
        "lowest": {name: min(values) for name, values in figures.items()},
        "highest": {name: max(values) for name, values in figures.items()},
        "memory": memory,
        "targets": TARGETS,
        "met": met,
    }


if __name__ == "__main__":
    print(json.dumps(worker(sys.argv[1], sys.argv[2], int(sys.argv[3]))))
