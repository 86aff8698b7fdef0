"""Records and journals for tests: made up, or the four recordings of a real workload."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tuning.journal import Journal
from tuning.spec import CandidateTiming, Environment, Kernel, Key, LaunchConfig, TuningRecord

SSD_TIMINGS = Path(__file__).parents[1] / "bench" / "data" / "h200_ssd_timings.json"
FAILED = None
Times = float | Sequence[float] | None


def config(block: int, *, warps: int = 4, stages: int = 3, **rest: Any) -> LaunchConfig:
    return LaunchConfig.build({"BLOCK": block}, num_warps=warps, num_stages=stages, **rest)


def environment(rank: int = 0, **changes: Any) -> Environment:
    fields: dict[str, Any] = {
        "arch": "sm90",
        "device": "NVIDIA H200",
        "multiprocessors": 132,
        "triton": "3.6.0",
        "torch": "2.11.0",
        "python": "3.11.7",
        "packages": (("pkg", "1.0"),),
        "rank": rank,
        "world_size": 8,
        "host": "host0",
    }
    return Environment(**{**fields, **changes})


def timing(candidate: LaunchConfig, times: Times, error: str = "OutOfResources: shared memory") -> CandidateTiming:
    """A number means median, 20th and 80th percentile alike: a timing without any spread."""
    if times is None:
        return CandidateTiming(candidate, None, error)
    return CandidateTiming(candidate, (times, times, times) if isinstance(times, (int, float)) else tuple(times))


def record(
    times: Mapping[Any, Times],
    *,
    kernel: str = "pkg.module.kernel",
    source: str | None = "0123abcd",
    key: Key | None = None,
    arch: str = "sm90",
    winner: Any = None,
    **rest: Any,
) -> TuningRecord:
    """A record of candidates (a block size stands for its config) and their times; the fastest is the winner."""
    timings = tuple(
        timing(candidate if isinstance(candidate, LaunchConfig) else config(candidate), found)
        for candidate, found in times.items()
    )
    if winner is None:
        fastest = min(timings, key=lambda item: item.times_ms[0] if item.times_ms else float("inf"))
        winner = fastest.config
    return TuningRecord(
        Kernel(kernel, source),
        key or Key.of({"n": 128}, {"x_ptr": "bfloat16"}),
        arch,
        timings,
        winner if isinstance(winner, LaunchConfig) else config(winner),
        **rest,
    )


def journal(*records: TuningRecord, rank: int = 0, path: str | None = None, **changes: Any) -> Journal:
    return Journal(path or f"rec.rank{rank}.journal", environment(rank, **changes), records)


def ssd_journals() -> tuple[Journal, ...]:
    """The recordings in ``bench/data``: mamba_ssm's SSD kernels in four cold processes on one NVIDIA H200."""
    data = json.loads(SSD_TIMINGS.read_text())

    def plain(fields: Mapping[str, Any]) -> LaunchConfig:
        return LaunchConfig.build(fields["kwargs"], num_warps=fields["num_warps"], num_stages=fields["num_stages"])

    def key(parts: Sequence[str]) -> Key:
        # The file has the values and dtypes of the key, not the arguments' names.
        values = [part for part in parts if not part.startswith("torch.")]
        dtypes = [part for part in parts if part.startswith("torch.")]
        return Key.of(
            {f"value{index}": json.loads(value.lower()) for index, value in enumerate(values)},
            {f"argument{index}": dtype for index, dtype in enumerate(dtypes)},
        )

    def run(index: int) -> Journal:
        records = [
            record(
                {plain(candidate["config"]): candidate["runs"][index] for candidate in entry["candidates"]},
                kernel=entry["kernel"],
                source=None,
                key=key(entry["key"]),
                arch=data["arch"],
                winner=plain(entry["winners"][index]),
            )
            for entry in data["entries"]
        ]
        packages = (("mamba_ssm", data["mamba_ssm"]),)
        return journal(*records, path=f"run{index}.journal", device=data["device"], packages=packages)

    return tuple(map(run, range(4)))
