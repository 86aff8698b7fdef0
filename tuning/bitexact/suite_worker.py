"""One rank of the suite: runs each cell twice and writes a line of JSON for each. Started by :mod:`suite`."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import math
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tuning.bitexact.cells import RUNNERS
from tuning.bitexact.compare import compare_runs
from tuning.bitexact.low_precision import swap_linears
from tuning.bitexact.models import CPU_SIZES, GPU_SIZES, Shape
from tuning.determinism import DeterministicMode
from tuning.errors import TuningError
from tuning.installation import install, uninstall
from tuning.policy import AutotunePolicy

__all__ = ["main"]

_TOLERANCE = 1e-3
_STEPS = 3  # of a recipe: a delayed scale is of the steps before


def main(request_file: str, rank: int) -> int:
    """Run every cell of the request on this rank; the exit code is 0 where all ran, whatever they found."""
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    ranks, on_gpu = request["ranks"], request["device"] == "cuda"
    torch.manual_seed(rank)
    if on_gpu:
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
        torch.set_num_threads(1)
    policy = AutotunePolicy(mode="pinned", modules=("mamba_ssm",))
    install(policy, deterministic=DeterministicMode(causal_conv1d="unused", fla=False))
    if ranks > 1:
        store = dist.FileStore(request["store"], ranks)  # type: ignore[attr-defined]
        backend = "nccl" if on_gpu else "gloo"
        timeout = timedelta(seconds=request["timeout"])
        dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
    try:
        with Path(request["results"], f"rank{rank}.jsonl").open("w", encoding="utf-8") as file:
            for number, cell in enumerate(request["cells"]):
                if cell["cell"] == "single" and rank:
                    continue
                found = _row(cell, request, device)
                file.write(json.dumps({"number": number, **found}) + "\n")
                file.flush()
                if found.get("raised") and ranks > 1 and cell["cell"] != "single":
                    return 1  # the other ranks wait in a collective of this cell
                gc.collect()
    finally:
        if ranks > 1:
            dist.destroy_process_group()
        uninstall()
    return 0


def _row(cell: dict[str, Any], request: dict[str, Any], device: torch.device) -> dict[str, Any]:
    started = time.monotonic()
    sizes = {**(GPU_SIZES if device.type == "cuda" else CPU_SIZES), **request["sizes"]}
    shape = Shape(preset=cell["preset"], experts=8 if cell["cell"] == "ep" else 0, **sizes)
    run = _recipe_step if cell["recipe"] else RUNNERS[cell["cell"]]
    prepare = _prepared(request["prepare"], cell["recipe"])
    loss: list[float] = []
    gradients: dict[str, Any] = {}

    def step() -> dict[str, Any]:
        found = run(shape, device, request["seed"], prepare)
        if "loss" in found:
            loss.append(float(found["loss"]))
        missing = [name for name, gradient in found["grads"].items() if gradient is None]
        if missing or not found["grads"]:
            raise TuningError(f"expected a gradient of every parameter, found none of {', '.join(missing) or 'any'}")
        gradients.update(found["grads"])
        return found

    parity = None
    try:
        comparison = compare_runs(step, runs=request["runs"], restore_after=False)
        if cell["cell"] != "single":
            one = RUNNERS["single"](shape, device, request["seed"], prepare)
            parity = _parity(gradients, one["grads"])
    except Exception as error:
        detail = f"{type(error).__name__}: {' '.join(str(error).split())[:500]}"
        return {"outcome": "failed", "detail": detail, "raised": True, "at": time.time()}
    problem = ""
    if not all(map(math.isfinite, [*loss, parity or 0.0])):
        problem = "the loss or a gradient is not finite"
    elif comparison.equal and shape.dtype == "float32" and (parity or 0.0) > _TOLERANCE:
        problem = f"a gradient is not one device's: expected up to {_TOLERANCE:g} of its largest, found {parity:g}"
    return {
        "outcome": "failed" if problem else "equal" if comparison.equal else "different",
        "detail": problem or str(comparison.first or ""),
        "at": time.time(),
        "values": len(comparison.runs[0]),
        "root": comparison.runs[0].root,
        "loss": loss[0] if loss and not problem else None,
        "parity": parity,
        "seconds": time.monotonic() - started,
    }


def _parity(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """The largest difference, relative to the largest element of the gradient.

    Elements far below the model's largest are noise (those of a key's bias are zero but for rounding), so a thousandth
    of the latter is added.
    """
    noise = 1e-3 * max(float(gradient.abs().max()) for gradient in expected.values())
    worst = 0.0
    for name, gradient in found.items():
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        apart = float((whole.float() - expected[name].float()).abs().max())
        worst = max(worst, apart / (float(expected[name].abs().max()) + noise))
    return worst


def _prepared(hook: str | None, recipe: str | None) -> Callable[[Any], Any]:
    change: Callable[[Any], Any] = lambda model: model  # noqa: E731
    if hook:
        module, _, name = hook.partition(":")
        change = getattr(importlib.import_module(module), name)

    def prepare(model: Any) -> Any:
        return change(swap_linears(model, recipe) if recipe else model)

    return prepare


def _recipe_step(shape: Shape, device: torch.device, seed: int, prepare: Callable[[Any], Any]) -> dict[str, Any]:
    """Several steps of one model, whose gradients add up."""
    models: list[Any] = []

    def once(model: Any) -> Any:
        if not models:
            models.append(prepare(model))
        return models[0]

    found = [RUNNERS["single"](shape, device, seed + step, once) for step in range(_STEPS)]
    return {**found[-1], "outputs": [step["output"] for step in found], "losses": [step["loss"] for step in found]}


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main(sys.argv[1], int(sys.argv[2])))
