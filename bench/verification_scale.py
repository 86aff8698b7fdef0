"""Cost of a check between ranks, from 64 to 65,536 of them.

Simulated ranks run the library's own protocol over an in-memory group. What a rank sends depends on what it launched
and was told, and on nothing else, so ranks with the same launches send the same headers: each class of such ranks is
represented by one, whose header stands for all of its class in what is gathered. A few ranks (the first, one in the
middle, the last) carry out the whole check, and the first is timed, in seconds of its processor; that the shortcut
changes nothing is checked against a run in which every rank is carried out. Real processes over gloo give the cost of
what is not simulated: the collectives, and the store in which ranks meet.

Bytes are those that one rank receives: of an all-gather ``header x (ranks - 1)``, whatever its algorithm; of an
all-reduce of S bytes ``2 S (ranks - 1) / ranks``, as of a ring. Messages are given for rings and for trees (all-gather
by recursive doubling, all-reduce by a double tree): which of them a library takes depends on the size.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Generator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

from bench import results
from tuning._check_contents import pack
from tuning.spec import Key, LaunchConfig
from tuning.verification import (
    HEADER_BYTES,
    Agreement,
    GroupVerifier,
    Launched,
    TorchCommunicator,
    Verdict,
    lockstep,
)

KEYS = 300
RANKS = (64, 256, 1024, 4096, 16_384, 65_536)
CLASSES = (1, 8, 64)
ALL_DIFFERENT = (64, 256, 1024, 4096)
PROCESSES = (2, 4, 8)
STORE_REQUESTS = 5
"""Of each rank to the group's store in one check, if all arrive together: two additions, two looks, one reading."""

TARGET_RANKS = 16_384
STEADY_TARGET = 1 << 20
FIRST_TARGET = 64 << 20

_NAMES = (
    "chunk_scan_fwd",
    "chunk_state_fwd",
    "bmm_chunk_fwd",
    "state_passing_fwd",
    "chunk_cumsum_fwd",
    "chunk_scan_bwd_dc",
)
_DTYPES = dict.fromkeys(("x_ptr", "dt_ptr", "B_ptr", "C_ptr", "out_ptr", "z_ptr", "D_ptr"), "bfloat16")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of this case."""
    parser.add_argument("--ranks", type=int, nargs="+", default=list(RANKS), help="numbers of simulated ranks")
    parser.add_argument("--processes", type=int, nargs="*", default=list(PROCESSES), help="numbers of real processes")


def launches(which: int, keys: int = KEYS, block: int = 64) -> list[Launched]:
    """What a rank of one pipeline stage launched: keys of the length that Mamba-2's kernels have."""
    config = LaunchConfig.build(
        {"BLOCK_SIZE_M": block, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 32}, num_warps=4, num_stages=4
    )
    return [
        Launched(
            f"mamba_ssm.ops.triton.ssd_chunk_scan._{_NAMES[n % len(_NAMES)]}_kernel",
            Key.of({"chunk_size": 128, "hdim": 64 + n, "dstate": 128, "IS_CAUSAL": True, "stage": which}, _DTYPES).text,
            config.text,
            "exact",
        )
        for n in range(keys)
    ]


class Simulation:
    """One group of ``size`` ranks, of which rank ``r`` launches what class ``r % classes`` does."""

    def __init__(self, size: int, classes: int) -> None:
        self.size, self.classes = size, classes
        self.members = tuple(range(size))
        self.whole = {rank: Agreement(rank, self.members) for rank in sorted({0, size // 2, size - 1})}

    def check(self, items: Sequence[Sequence[Launched]], step: int) -> tuple[Verdict, float]:
        """One check in which each class launched ``items[class]``; the verdict, and the time it took of rank 0.

        Only in a first check may classes differ in what they were told before.
        """
        self.seconds = 0.0
        whole = {rank: each.check(items[rank % self.classes], step=step) for rank, each in self.whole.items()}
        asked = {rank: self._advance(rank, check, None) for rank, check in whole.items()}
        headers = {rank % self.classes: asked[rank].header for rank in whole}
        for rank in whole:
            assert asked[rank].header == headers[rank % self.classes], "ranks of one class sent different headers"
        for number in range(self.classes if any(items) else 0):
            if number not in headers:
                headers[number] = next(Agreement(number, self.members).check(items[number], step=step)).header
        every = [headers.get(number, asked[0].header) for number in range(self.classes)]
        result = b"".join(every[rank % self.classes] for rank in range(self.size))
        # Rank c is the lowest of class c and contributes its content, in this order: digests would tell if it did not.
        contents = iter(pack([(i.kernel, i.key, i.config, i.source) for i in mine]) for mine in items if mine)
        while True:
            asked = {rank: self._advance(rank, check, result) for rank, check in whole.items()}
            if isinstance(asked[0], Verdict):
                break
            result = b"".join(next(contents).ljust(asked[0].width, b"\0") for _ in range(asked[0].slots))
        assert all(verdict == asked[0] for verdict in asked.values()), "ranks found different things"
        return asked[0], self.seconds

    def _advance(self, rank: int, check: Generator[Any, bytes, Verdict], result: bytes | None) -> Any:
        start = time.process_time()
        try:
            return next(check) if result is None else check.send(result)
        except StopIteration as done:
            return done.value
        finally:
            if rank == 0:
                self.seconds += time.process_time() - start


def _cost(size: int, verdict: Verdict, seconds: float) -> dict[str, Any]:
    rings = verdict.gathers * (size - 1) + verdict.exchanges * 2 * (size - 1)
    trees = (verdict.gathers + 2 * verdict.exchanges) * math.ceil(math.log2(size))
    return {
        "gathers": verdict.gathers,
        "exchanges": verdict.exchanges,
        "received_bytes": round(
            verdict.gathered_bytes * (size - 1) / size + 2 * verdict.exchanged_bytes * (size - 1) / size
        ),
        "messages_ring": rings,
        "messages_tree": trees,
        "cpu_seconds": round(seconds, 6),
    }


def simulate(size: int, classes: int) -> dict[str, Any]:
    """First check, a check with one late key on one class, and the steady state."""
    group = Simulation(size, classes)
    items = [launches(which) for which in range(classes)]
    first, first_seconds = group.check(items, 0)
    steady = [group.check([[]] * classes, step) for step in range(1, 6)]
    assert first.agreed
    assert first.keys == KEYS * classes
    assert steady[-1][0].agreed
    return {
        "ranks": size,
        "distinct_contents": classes,
        "content_bytes": first.exchanged_bytes // classes,
        "first": _cost(size, first, first_seconds),
        "steady": _cost(size, steady[-1][0], statistics.median(seconds for _, seconds in steady)),
        "gathering_whole_contents_bytes": (size - 1) * first.exchanged_bytes // classes,
    }


def simulate_all_different(size: int) -> dict[str, Any]:
    """The worst case, as of timing on every rank: each chose at random among four configs, for the same 300 keys."""
    group = Simulation(size, size)
    common = [launches(0, block=16 << which) for which in range(4)]
    chance = random.Random(0)
    items = [[chance.choice(candidates) for candidates in zip(*common, strict=True)] for _ in range(size)]
    first, seconds = group.check(items, 0)
    assert len(first.disagreements) == KEYS
    return {"ranks": size, "distinct_contents": size, "first": _cost(size, first, seconds)}


def validate(size: int = 64, classes: int = 8) -> None:
    """The shortcut gives what a run of all ranks gives."""
    items = [launches(which, keys=40) for which in range(classes)]
    items[3] = [*items[3], *launches(0, keys=5, block=32)]
    group = Simulation(size, classes)
    ranks = [Agreement(rank, range(size)) for rank in range(size)]
    for step, said in enumerate([items, [[]] * classes, items[::-1]]):
        every = lockstep([each.check(said[rank % classes], step=step) for rank, each in enumerate(ranks)])
        assert all(verdict == every[0] for verdict in every)
        if step < 2:
            assert group.check(said, step)[0] == every[0]


# --- real processes


def _process(rank: int, size: int, path: str, result: Any) -> None:
    import torch.distributed as dist

    store = (
        dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False) if rank == 0 else None
    )
    meeting = dist.FileStore(path, size)
    if store is not None:
        meeting.set("port", str(store.port))
    else:
        store = dist.TCPStore("127.0.0.1", int(meeting.get("port")), None, False, timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    verifier = GroupVerifier(TorchCommunicator())
    start = time.perf_counter()
    verdict = verifier.check(launches(rank % 2), step=0)
    first = time.perf_counter() - start
    assert verdict.keys == 2 * KEYS
    steady = []
    for step in range(1, 201):
        start = time.perf_counter()
        verifier.check([], step=step)
        steady.append(time.perf_counter() - start)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(2000):
        store.add("requests", 1)
    requests = 2000 / (time.perf_counter() - start)
    dist.barrier()
    result.send((first, steady, requests))
    dist.destroy_process_group()


def measure_processes(size: int) -> dict[str, Any]:
    """A first check of two distinct contents, 200 steady ones, and what one store answers to all at once."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(size):
            here, there = context.Pipe(duplex=False)
            processes.append(context.Process(target=_process, args=(rank, size, os.path.join(folder, "store"), there)))
            processes[-1].start()
            pipes.append(here)
        found = [pipe.recv() for pipe in pipes]
        for process in processes:
            process.join()
    return {
        "processes": size,
        "distinct_contents": 2,
        "first_seconds": round(max(first for first, _, _ in found), 6),
        "steady_median_seconds": round(statistics.median(found[0][1]), 6),
        "store_requests_per_second": round(sum(requests for _, _, requests in found)),
    }


# --- the case


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Simulate, measure, compare with the targets, and draw."""
    validate()
    simulated = []
    for classes in CLASSES:
        for size in options.ranks:
            simulated.append(simulate(size, classes))
            print(simulated[-1], flush=True)
    different = [simulate_all_different(size) for size in ALL_DIFFERENT if size <= max(options.ranks)]
    print(*different, sep="\n", flush=True)
    processes = [measure_processes(size) for size in options.processes]
    print(*processes, sep="\n", flush=True)
    rates = [row["store_requests_per_second"] for row in processes]
    at_target = [row for row in simulated if row["ranks"] == TARGET_RANKS]
    result = {
        "case": "verification_scale",
        **results.circumstances(("torch", "msgpack")),
        "keys": KEYS,
        "header_bytes": HEADER_BYTES,
        "targets": {
            "ranks": TARGET_RANKS,
            "steady_received_bytes": {
                "below": STEADY_TARGET,
                "found": max((row["steady"]["received_bytes"] for row in at_target), default=None),
            },
            "first_received_bytes": {
                "below": FIRST_TARGET,
                "found": max((row["first"]["received_bytes"] for row in at_target), default=None),
            },
        },
        "store_seconds_at_target_ranks": round(TARGET_RANKS * STORE_REQUESTS / max(rates), 2) if rates else None,
        "load_average": os.getloadavg()[0],
        "simulated": simulated,
        "simulated_all_different": different,
        "processes_gloo": processes,
    }
    folder = options.out or results.RESULTS
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "verification_scale.svg").write_text(draw(simulated))
    return result


_COLOURS = {1: "#1b6ca8", 8: "#d1741f", 64: "#3a8f4d"}


def draw(rows: Sequence[dict[str, Any]]) -> str:
    """Bytes received per rank over ranks, both logarithmic, as SVG."""
    left, top, width, height = 70, 40, 520, 300
    low, high = 2**10, 2**33
    sizes = sorted({row["ranks"] for row in rows})
    span = math.log2(sizes[-1] / sizes[0]) or 1.0

    def x(size: float) -> float:
        return left + width * math.log2(size / sizes[0]) / span

    def y(count: float) -> float:
        return top + height * (1 - math.log2(count / low) / math.log2(high / low))

    def line(points: list[tuple[float, float]], colour: str, dash: str = "") -> str:
        path = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in points)
        return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'

    def text(a: float, b: float, words: str, anchor: str = "start", colour: str = "#222") -> str:
        return f'<text x="{a:.0f}" y="{b:.0f}" text-anchor="{anchor}" fill="{colour}">{words}</text>'

    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 820 400" font-family="sans-serif" font-size="12">',
        '<rect width="820" height="400" fill="white"/>',
        text(left, 22, f"Bytes that one rank receives in a check, {KEYS} keys per content"),
    ]
    for power, name in ((10, "1 KiB"), (15, "32 KiB"), (20, "1 MiB"), (26, "64 MiB"), (30, "1 GiB")):
        place = y(2**power)
        parts.append(f'<line x1="{left}" x2="{left + width}" y1="{place:.1f}" y2="{place:.1f}" stroke="#ddd"/>')
        parts.append(text(left - 8, place + 4, name, "end"))
    parts += [text(x(size), top + height + 18, f"{size:,}", "middle") for size in sizes]
    parts.append(text(left + width / 2, top + height + 40, "ranks", "middle"))
    one = [row for row in rows if row["distinct_contents"] == 1]
    curves = [
        ("gathering whole contents", "#a33", "5 4", [row["gathering_whole_contents_bytes"] for row in one]),
        ("steady state", "#222", "", [row["steady"]["received_bytes"] for row in one]),
    ]
    for classes, colour in _COLOURS.items():
        mine = [row["first"]["received_bytes"] for row in rows if row["distinct_contents"] == classes]
        curves.append((f"first check, {classes} distinct", colour, "", mine))
    above = math.inf
    for name, colour, dash, counts in sorted(curves, key=lambda curve: curve[3][-1]):
        parts.append(line(list(zip(sizes, counts, strict=True)), colour, dash))
        # Curves may end close together; their names may not.
        above = min(y(counts[-1]) + 4, above - 15)
        parts.append(text(left + width + 12, above, name, colour=colour))
    return "\n".join([*parts, "</svg>"]) + "\n"


def main() -> None:
    """``python -m bench.verification_scale``."""
    parser = argparse.ArgumentParser(prog="python -m bench.verification_scale", description=__doc__)
    parser.add_argument("--out", type=Path, help="folder for the result (default: bench/results)")
    add_arguments(parser)
    options = parser.parse_args()
    result = run(options)
    result["command"] = " ".join(["python", "-m", "bench.verification_scale", *sys.argv[1:]])
    print(f"wrote {results.write('verification_scale', result, options.out)}")


if __name__ == "__main__":
    main()
