"""One process of the case ``cost``: trains the hybrid model under one side's settings, and times when it is told to.

Speaks lines of JSON: says ``ready`` with what its first steps did, then for each number on standard input times as many
steps, and on an empty line says its times and ends. ``--compile SHARE/OF`` compiles instead a share of the candidates
of the SSD kernels, so that the side that times them finds them in Triton's compile cache.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench.lines import take_output

SHAPE = {"blocks": 1, "width": 4096, "heads": 32, "dstate": 128, "experts": 4, "seqlen": 4096, "batch": 1}
"""The SSD keys of this model are those of the sm90 table: 128 heads of 64, state 128, chunks of 128, in bfloat16."""
TINY = {
    "blocks": 1, "width": 32, "heads": 2, "ssd_headdim": 16, "dstate": 16, "chunk_size": 32, "experts": 2,
    "vocabulary": 64, "seqlen": 64, "batch": 1,
}  # fmt: skip


def set_up(side: str, empty: Path) -> Any:
    """Put the side in charge, before torch touches the device; returns the installation, or None."""
    import tuning
    from tuning.determinism import DeterministicMode

    if side == "default":
        return None
    if side == "pinned":
        return tuning.install(tuning.AutotunePolicy(mode="pinned"))
    if side.endswith("cheapest"):
        # Without the tables that come with the library the on-miss rule is all there is.
        import tuning.tables

        tuning.tables.bundled_folder = lambda: empty
    mode = DeterministicMode(fill_uninitialized_memory=side.endswith("fill"))
    return tuning.install(deterministic=mode)


def mark(model: Any) -> None:
    """Enclose forward and backward of each part of the model in an NVTX range."""
    import torch

    nvtx = torch.cuda.nvtx

    def enter(name: str) -> Callable[..., None]:
        def hook(*arguments: Any) -> None:  # what a hook returned would replace what it saw
            nvtx.range_push(name)

        return hook

    def leave(*arguments: Any) -> None:
        nvtx.range_pop()

    parts = {"SsdMixer": "SSD mixer", "Attention": "attention", "Experts": "mixture of experts"}
    for module in model.modules():
        name = parts.get(type(module).__name__)
        if name is not None:
            module.register_forward_pre_hook(enter(f"{name}, forward"))
            module.register_forward_hook(leave)
            module.register_full_backward_pre_hook(enter(f"{name}, backward"))
            module.register_full_backward_hook(leave)


class Training:
    """The model, its optimizer, and a step over fixed data."""

    def __init__(self, device: str) -> None:
        import torch

        from bench.hybrid import Hybrid, HybridShape

        gpu = device == "cuda"
        self.shape = HybridShape(**(SHAPE if gpu else TINY))
        torch.manual_seed(0)
        with torch.device(device):
            # The interpreter's numpy has no bfloat16.
            self.model = Hybrid(self.shape).to(torch.bfloat16 if gpu else torch.float32)
        mark(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        generator = torch.Generator().manual_seed(1)
        size = (self.shape.batch, self.shape.seqlen + 1)
        self.tokens = torch.randint(0, self.shape.vocabulary, size, generator=generator).to(device)

    def gradients(self) -> None:
        """Forward, loss and backward."""
        import torch

        nvtx = torch.cuda.nvtx
        self.optimizer.zero_grad()
        with nvtx.range("forward"):
            logits = self.model(self.tokens[:, :-1])
        with nvtx.range("loss"):
            self.loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), self.tokens[:, 1:].flatten())
        with nvtx.range("backward"):
            self.loss.backward()

    def step(self) -> None:
        """One training step."""
        self.gradients()
        self.optimizer.step()

    def digest(self) -> str:
        """Over the bytes of the loss and of all gradients."""
        import torch

        total = hashlib.sha256(self.loss.detach().float().cpu().numpy().tobytes())
        for parameter in self.model.parameters():
            total.update(parameter.grad.contiguous().reshape(-1).view(torch.uint8).cpu().numpy().tobytes())
        return total.hexdigest()


def share_out(share: int, of: int, tuners: Sequence[Any]) -> None:
    """Leave every autotuner its share of the candidates, and no stopwatch: each is run once.

    All shares together are all candidates, spread evenly. Whoever has the largest, which may not fit the device, has
    the smallest too, and an empty share is the smallest.
    """

    def footprint(config: Any) -> int:
        product = int(config.num_stages)
        for value in config.kwargs.values():
            product *= value if isinstance(value, int) else 1
        return product

    def once(call: Callable[[], object], **options: Any) -> list[float]:
        call()
        return [1.0, 1.0, 1.0]

    for number, tuner in enumerate(sorted(tuners, key=lambda tuner: tuner.base_fn.__name__)):
        least, most = (extreme(tuner.configs, key=footprint) for extreme in (min, max))
        mine = [config for place, config in enumerate(tuner.configs) if (place + number) % of == share]
        tuner.configs = mine + ([least] if not mine or (most in mine and least not in mine) else [])
        tuner.__dict__["do_bench"] = once


def compile_share(share: int, of: int) -> None:
    """Run one SSD mixer forward and backward with a share of the candidates."""
    import torch
    from triton.runtime.autotuner import Autotuner

    from bench.hybrid import HybridShape, SsdMixer

    shape = HybridShape(**SHAPE)
    with torch.device("cuda"):
        mixer = SsdMixer(shape).to(torch.bfloat16)
        share_out(share, of, [found for found in gc.get_objects() if isinstance(found, Autotuner)])
        inputs = torch.randn(shape.batch, shape.seqlen, shape.width, dtype=torch.bfloat16, requires_grad=True)
    mixer(inputs).sum().backward()
    torch.cuda.synchronize()


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", default="default")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--empty", type=Path, required=True, help="folder of no tables")
    parser.add_argument("--compile", help="SHARE/OF")
    options = parser.parse_args()
    say = take_output()
    began = time.perf_counter()
    if options.device == "cpu":
        from tuning.interpreter import stand_in_for_cuda, use_interpreter

        use_interpreter()
        stand_in_for_cuda()
    if options.compile:
        compile_share(*map(int, options.compile.split("/")))
        say(ready=True, seconds=time.perf_counter() - began)
        return
    installed = set_up(options.side, options.empty)
    import torch

    import tuning
    from tuning.bitexact.cost import timed_ranges

    training = Training(options.device)
    first = time.perf_counter()
    digests = []
    with timed_ranges():  # which stands in for NVTX where there is none
        for _ in range(2):  # the same weights twice
            training.gradients()
            digests.append(training.digest())
    first = time.perf_counter() - first
    for _ in range(2 if options.device == "cuda" else 0):
        training.step()
    say(
        ready=True,
        seconds=time.perf_counter() - began,
        first_steps_s=first,
        same_bits_twice=len(set(digests)) == 1,
        digest=digests[0],
        benchmarks=None if installed is None else tuning.benchmarks_run(),
        sources=sorted(choice.source for choice in tuning.choices()),
        deterministic_algorithms=torch.are_deterministic_algorithms_enabled(),
    )
    timer = timed_ranges("events")
    for line in sys.stdin:
        if not line.strip():
            break
        with timer:
            for _ in range(int(line)):
                with timer.step():
                    training.step()
        say(measured=int(line))
    times = timer.finish(options.side)
    say(device=times.device, steps=times.steps, ranges={name: vars(found) for name, found in times.ranges.items()})
    if installed is not None:
        installed.uninstall()


if __name__ == "__main__":
    main()
