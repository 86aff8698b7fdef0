"""Faults as they occur in training, planted on purpose: each changes bits from run to run and nothing else."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import torch

_orders = itertools.count()
_lock = threading.Lock()


def next_order() -> int:
    """A number that no random state restores, as the arrival of threads at an atomic is not."""
    with _lock:
        return next(_orders)


@torch.library.custom_op("planted::atomic_add", mutates_args=())
def atomic_add(values: torch.Tensor, places: torch.Tensor, size: int) -> torch.Tensor:
    """Sum rows by place in an order that changes with each call, as atomic adds arrive on a GPU."""
    order = torch.randperm(len(values), generator=torch.Generator().manual_seed(next_order()))
    out = torch.zeros(size, values.shape[1], dtype=values.dtype)
    for row in order.tolist():
        out[places[row]] += values[row]
    return out


@atomic_add.register_fake
def _(values: torch.Tensor, places: torch.Tensor, size: int) -> torch.Tensor:
    return values.new_empty(size, values.shape[1])


class Gather(torch.autograd.Function):
    """Rows by index, whose backward adds by atomics."""

    @staticmethod
    def forward(ctx: Any, table: Any, places: Any) -> Any:
        ctx.save_for_backward(places)
        ctx.size = len(table)
        return table[places]

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        (places,) = ctx.saved_tensors
        return atomic_add(gradient.contiguous(), places, ctx.size), None


class AtomicAdd(torch.nn.Module):
    """Scatter in forward."""

    def forward(self, x: Any) -> Any:
        places = torch.arange(len(x)) % 2
        return x + atomic_add(x, places, 2)[places].detach()


class AtomicBackward(torch.nn.Module):
    """Scatter in backward alone."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(3, 8, generator=torch.Generator().manual_seed(0)))

    def forward(self, x: Any) -> Any:
        return x * Gather.apply(self.table, torch.arange(len(x)) % 3)


def write_behind(tensor: Any, place: int, pattern: int) -> None:
    """Set the bits of one float32 where torch does not see it, as a kernel of an extension does."""
    tensor.detach().numpy().view("int32").reshape(-1)[place] = pattern


class NanPayload(torch.nn.Module):
    """Masked positions are NaN; its payload differs from run to run."""

    def forward(self, x: Any) -> Any:
        masked = torch.zeros(3)
        write_behind(masked, 1, 0x7FC00000 + next_order() % 256)
        return x, masked + 0


class SwappedZero(torch.nn.Module):
    """Zeros whose sign differs from run to run."""

    def forward(self, x: Any) -> Any:
        zeros = torch.zeros(3)
        write_behind(zeros, 2, -(1 << 31) if next_order() % 2 else 0)
        return x, zeros.clone()


def plant(model: Any) -> Any:
    """In a model of the suite, by preset: an atomic add, a gradient that is wrong each time, a rank that fails."""
    import torch.distributed as dist

    mixers = {type(block.mixer).__name__ for block in model.blocks.values()}
    if "SsdMixer" in mixers:
        if dist.get_rank() == 2:
            raise RuntimeError("out of luck")
    elif model.places is not None:
        table = model.embed.weight
        model.embed.forward = lambda tokens: Gather.apply(table, tokens.flatten()).view(*tokens.shape, -1)
    elif dist.get_rank() == 0:
        model.blocks["0"].mlp.down.weight.register_hook(lambda gradient: gradient * 2)
    return model
