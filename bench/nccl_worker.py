"""One rank of the multi-GPU case; started by torchrun. Rank 0 prints one JSON object as its last line.

On GPUs the kernels are mamba_ssm's SSD at full size and the backend is NCCL; with ``--stub`` they are the real
autotuner over a stub kernel, and the backend is gloo, so that the same code runs anywhere.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tuning


class StubWorkload:
    """Launches keys of an autotuner over a stub kernel whose stopwatch disagrees between ranks on every other key."""

    def __init__(self, rank: int, keys: int = 8) -> None:
        import triton
        from triton.runtime.autotuner import Autotuner

        from bench.launch import Stub

        def bench(call: Callable[[], Any], quantiles: Any) -> list[float]:
            call()
            self._turn += 1
            block = 16 << ((self._turn - 1) % 3)
            best = 16 << (rank % 3) if self._key % 2 else 32
            return [1.0 if block == best else 2.0] * 3

        self._turn = self._key = 0
        self._keys = keys
        configs = [triton.Config({"BLOCK": block}) for block in (16, 32, 64)]
        stub = Stub(["x", "n", "BLOCK"])
        self._tuner = Autotuner(stub, stub.arg_names, configs, ["n"], None, None, do_bench=bench)

    def step(self) -> dict[str, Any]:
        """Launch every key once."""
        for key in range(self._keys):
            self._key = key
            self._tuner[(1,)](None, key)
        return {}


def _workload(options: argparse.Namespace, rank: int) -> Any:
    if options.stub:
        return StubWorkload(rank)
    from bench.workloads import Ssd, SsdShape

    return Ssd(SsdShape(), device=f"cuda:{torch.cuda.current_device()}", seed=rank)


def _modules(options: argparse.Namespace) -> tuple[str, ...]:
    return ("bench",) if options.stub else ("mamba_ssm",)


def _gathered(value: Any) -> list[Any]:
    """What every rank has, as JSON text, on every rank."""
    text = json.dumps(value).encode()
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    length = torch.tensor([len(text)], device=device)
    lengths = [torch.zeros_like(length) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, length)
    width = max(int(each) for each in lengths)
    mine = torch.zeros(width, dtype=torch.uint8, device=device)
    mine[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8).to(device)
    rows = [torch.zeros_like(mine) for _ in lengths]
    dist.all_gather(rows, mine)
    return [json.loads(bytes(row[: int(n)].cpu().tolist())) for row, n in zip(rows, lengths, strict=True)]


def _choices() -> list[str]:
    return sorted(f"{c.kernel} {c.key.text} {c.launch_config} {c.source}" for c in tuning.choices())


def record_and_pin(options: argparse.Namespace, rank: int) -> dict[str, Any]:
    """Record on all ranks at once, merge on rank 0, then run pinned with a strict check at every step."""
    from tuning.journal import find_journals, read_journal
    from tuning.merge import merge
    from tuning.tables import write_table

    workload = _workload(options, rank)
    folder = options.folder
    record = tuning.AutotunePolicy(record_path=str(folder / "journals" / "run"), modules=_modules(options))
    with tuning.install(record):
        workload.step()
        recorded = _choices()
        benchmarks = tuning.benchmarks_run()
    dist.barrier()
    if rank == 0:
        for table in merge(read_journal(path) for path in find_journals([str(folder / "journals")])).tables:
            write_table(folder / "tables", table)
    dist.barrier()
    pinned = tuning.AutotunePolicy(
        mode="pinned",
        table_path=(str(folder / "tables"),),
        on_miss="error",
        modules=_modules(options),
        verify_every=1,
        verify_strict=True,
    )
    with tuning.install(pinned):
        verdicts = []
        for step in range(1, 11):
            workload.step()
            verdicts.append(tuning.maybe_verify_choices(step))
        mine = {"choices": _choices(), "benchmarks": tuning.benchmarks_run(), "verdicts": verdicts}
    ranks = _gathered(mine)
    winners = _gathered(recorded)
    return {
        "keys": len(mine["choices"]),
        "benchmarks while recording, each rank": _gathered(benchmarks),
        "keys on which the recordings of the ranks disagree": len(set(winners[0]) - set(winners[1])),
        "same choices on every rank": all(each["choices"] == ranks[0]["choices"] for each in ranks),
        "benchmarks while pinned": sum(each["benchmarks"] for each in ranks),
        "strict checks passed": sum(each["verdicts"].count(True) for each in ranks),
    }


def stock(options: argparse.Namespace, rank: int) -> dict[str, Any]:
    """Triton times on every rank; the strict check names the keys on which ranks disagree."""
    workload = _workload(options, rank)
    with tuning.install(tuning.AutotunePolicy(mode="auto", modules=_modules(options), verify_strict=True)):
        workload.step()
        named: list[str] = []
        try:
            tuning.verify_choices()
        except tuning.DisagreementError as error:
            named = list(error.disagreements)
        keys = len(tuning.choices())
    ranks = _gathered(named)
    return {"keys": keys, "disagreements": named, "same report on every rank": all(each == ranks[0] for each in ranks)}


def chaos(options: argparse.Namespace, rank: int) -> dict[str, Any]:
    """Ranks pick different candidates on purpose: the check must stop the training loop on every rank."""
    workload = _workload(options, rank)
    policy = tuning.AutotunePolicy(
        mode="pinned", chaos=True, verify_every=1, verify_strict=True, modules=_modules(options)
    )
    stopped_at, count = None, 0
    with tuning.install(policy):
        try:
            for step in range(1, 6):
                workload.step()
                tuning.maybe_verify_choices(step)
        except tuning.DisagreementError as error:
            stopped_at, count = step, len(error.disagreements)
    return {"stopped at step, each rank": _gathered(stopped_at), "disagreements, each rank": _gathered(count)}


def cost(options: argparse.Namespace, rank: int) -> dict[str, Any]:
    """What a check costs with 300 keys: the first, which exchanges them, and later ones."""
    workload = StubWorkload(rank, keys=300)
    with tuning.install(tuning.AutotunePolicy(mode="pinned", modules=("bench",))):
        workload.step()
        dist.barrier()
        times = []
        for _ in range(41):
            begin = time.perf_counter()
            agreed = tuning.verify_choices()
            times.append(1e3 * (time.perf_counter() - begin))
            if not agreed:
                raise RuntimeError("pinned ranks disagree")
    later = statistics.quantiles(times[1:], n=10)
    return {"keys": 300, "first_ms": times[0], "later_median_ms": later[4], "later_p90_ms": later[8]}


def fsdp(options: argparse.Namespace, rank: int) -> dict[str, Any]:
    """Train a hybrid model for some steps under FSDP2; digests of losses and of every rank's weights."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    from bench.hybrid import Hybrid, HybridShape
    from bench.workloads import digest

    shape = HybridShape()
    policy = tuning.AutotunePolicy(modules=("mamba_ssm",), verify_every=1, verify_strict=options.deterministic)
    with tuning.install(policy, deterministic=options.deterministic) as installed:
        torch.manual_seed(1)
        model = Hybrid(shape).cuda()
        mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in model.blocks:
            fully_shard(block, mp_policy=mixed)
        fully_shard(model, mp_policy=mixed)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        data = torch.Generator(device="cuda").manual_seed(rank)
        losses, times, verdicts = [], [], []
        for step in range(1, 21):
            begin = time.perf_counter()
            tokens = torch.randint(shape.vocabulary, (shape.batch, shape.seqlen + 1), generator=data, device="cuda")
            logits = model(tokens[:, :-1]).float().flatten(0, 1)
            loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
            verdicts.append(tuning.maybe_verify_choices(step))
            torch.cuda.synchronize()
            times.append(1e3 * (time.perf_counter() - begin))
        weights = {name: tensor.to_local() for name, tensor in model.state_dict().items()}
        mine = {
            "losses": digest({"loss": torch.stack(losses)}),
            "weights": digest(weights),
            "benchmarks": installed.benchmarks,
            "last loss": float(losses[-1]),
        }
        mode = installed.mode
    return {
        "mode": mode,
        "deterministic": options.deterministic,
        "ranks": _gathered(mine),
        "checks that agreed": verdicts.count(True),
        "median_step_ms": statistics.median(times[1:]),
        "keys": len(installed.choices),
    }


PARTS = {"fsdp": fsdp, "record": record_and_pin, "stock": stock, "chaos": chaos, "cost": cost}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=sorted(PARTS))
    parser.add_argument("--folder", type=Path, required=True, help="folder that all ranks share")
    parser.add_argument("--stub", action="store_true", help="a stub kernel and gloo, in place of a GPU and NCCL")
    parser.add_argument("--deterministic", action="store_true", help="fsdp: deterministic mode")
    options = parser.parse_args()
    local = int(os.environ["LOCAL_RANK"])
    if options.stub:
        dist.init_process_group("gloo")
    else:
        device = torch.device("cuda", local % torch.cuda.device_count())
        torch.cuda.set_device(device)
        # Two ranks of one device cannot form an NCCL group.
        if int(os.environ["LOCAL_WORLD_SIZE"]) <= torch.cuda.device_count():
            dist.init_process_group("nccl", device_id=device)
        else:
            dist.init_process_group("gloo")
    found = {"backend": dist.get_backend(), "ranks": dist.get_world_size()}
    for part in options.parts:
        begin = time.perf_counter()
        result = PARTS[part](options, dist.get_rank())
        found[part] = {**result, "seconds": round(time.perf_counter() - begin, 2)}
    dist.barrier()
    dist.destroy_process_group()
    if int(os.environ["RANK"]) == 0:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
