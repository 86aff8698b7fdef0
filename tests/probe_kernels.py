"""Kernels whose candidates are known to agree or not, for the tests of probes, in Triton's interpreter.

Import it after :func:`tuning.interpreter.use_interpreter`.
"""

from __future__ import annotations

import itertools
import random

import torch
import triton
import triton.language as tl


def configs(name, *values, **fields):
    return [triton.Config({name: value}, **fields) for value in values]


@triton.autotune(configs=configs("BLOCK", 32, 64, 128, 256), key=["n"])
@triton.jit
def total(x, out, n, BLOCK: tl.constexpr):
    """A sum whose order is the block's: every block size gives other bits, unless one block holds it all."""
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        sums += tl.load(x + offsets, mask=offsets < n, other=0.0)
    tl.store(out, tl.sum(sums, axis=0))


@triton.autotune(configs=configs("BLOCK", 32, 64, 128) + configs("BLOCK", 64, num_warps=8), key=["n"])
@triton.jit
def double(x, out, n, BLOCK: tl.constexpr):
    """Each element for itself: every config gives the same bits."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + offsets, tl.load(x + offsets, mask=offsets < n) * 2.0, mask=offsets < n)


@triton.autotune(configs=configs("BLOCK", 32, 64), key=["n"])
@triton.jit
def add_to(x, y, n, BLOCK: tl.constexpr):
    """In place: y is read and written."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(y + offsets, tl.load(y + offsets, mask=mask) + tl.load(x + offsets, mask=mask), mask=mask)


@triton.autotune(configs=configs("BLOCK", 32, 64), key=["n"])
@triton.jit
def all_but_last(x, out, n, BLOCK: tl.constexpr):
    """With the larger block the last element is left unwritten."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    end = n - (BLOCK // 64)
    tl.store(out + offsets, tl.load(x + offsets, mask=offsets < n), mask=offsets < end)


@triton.autotune(configs=configs("BLOCK", 32, 64), key=["n"])
@triton.jit
def signed_zero(x, out, n, BLOCK: tl.constexpr):
    """The larger block negates zeros: equal as numbers, not as bits."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offsets, mask=offsets < n) * 0.0
    tl.store(out + offsets, value if BLOCK == 32 else -value, mask=offsets < n)
    tl.store(out + n, 1.0)


@triton.autotune(configs=configs("BLOCK", 32, 64), key=["n"])
@triton.jit
def sign_of_zeros(x, out, n, BLOCK: tl.constexpr):
    """As captured all elements are 0: the larger block leaves -0.0, and no other input would tell."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offsets, mask=offsets < n)
    tl.store(out + offsets, tl.where(value == 0.0, value * (1.0 if BLOCK == 32 else -1.0), value), mask=offsets < n)


@triton.autotune(configs=configs("BLOCK", 32, 64), key=["n"])
@triton.jit
def infinite_or_nan(x, out, n, BLOCK: tl.constexpr):
    """As captured all elements are large: one block makes them infinite, the other NaN."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offsets, mask=offsets < n)
    big = float("inf") if BLOCK == 32 else float("nan")
    tl.store(out + offsets, tl.where(value > 1e30, big, value), mask=offsets < n)


@triton.autotune(configs=configs("BLOCK", 32, 64), key=["n"])
@triton.jit
def add_once_or_twice(x, y, n, BLOCK: tl.constexpr):
    """In place, and other bits by block: garbage as large as a poisoned y would swallow the difference."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    value = tl.load(x + offsets, mask=mask)
    tl.store(y + offsets, tl.load(y + offsets, mask=mask) + (value if BLOCK == 32 else 2 * value), mask=mask)


def _draw(nargs):
    torch.rand(1)
    random.random()


@triton.autotune(configs=[triton.Config({"BLOCK": block}, pre_hook=_draw) for block in (32, 64)], key=["n"])
@triton.jit
def draws(x, out, n, BLOCK: tl.constexpr):
    """Each launch draws random numbers beside the kernel."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + offsets, tl.load(x + offsets, mask=offsets < n) * 2.0, mask=offsets < n)


@triton.autotune(configs=configs("BLOCK", 32, 64), key=["n"])
@triton.jit
def total_of_first(x, out, n, m, BLOCK: tl.constexpr):
    """A sum of m elements, which is no part of the key: more than a block of them, and the order is the block's."""
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, m, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        sums += tl.load(x + offsets, mask=offsets < m, other=0.0)
    tl.store(out, tl.sum(sums, axis=0))


@triton.jit
def _at(addresses):
    return tl.load(addresses).to(tl.pointer_type(tl.float32))


@triton.autotune(configs=configs("BLOCK", 32, 64), key=["n"])
@triton.jit
def add_by_address(addresses, out, n, BLOCK: tl.constexpr):
    """Adds 1 to memory that no argument is, through a pointer that a function makes of an integer."""
    place = _at(addresses)
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(place + offsets, mask=offsets < n) + 1.0
    tl.store(place + offsets, value, mask=offsets < n)
    tl.store(out + offsets, value, mask=offsets < n)


@triton.autotune(configs=configs("BLOCK", 32, 64), key=["n"])
@triton.jit
def copy_integers(x, out, n, BLOCK: tl.constexpr):
    """Moves integers, whatever they mean."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + offsets, tl.load(x + offsets, mask=offsets < n), mask=offsets < n)


_calls = itertools.count(1)


def _change_scale(nargs):
    nargs["scale"].fill_(float(next(_calls)))


@triton.autotune(
    configs=[triton.Config({"BLOCK": 32}), triton.Config({"BLOCK": 64}, pre_hook=_change_scale)],
    key=["n"],
)
@triton.jit
def racy(x, scale, out, n, BLOCK: tl.constexpr):
    """The larger block's result differs each time, as with a race."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offsets, mask=offsets < n) * tl.load(scale)
    tl.store(out + offsets, value, mask=offsets < n)


@triton.autotune(configs=[triton.Config({"BLOCK": block}, pre_hook=_change_scale) for block in (32, 64)], key=["n"])
@triton.jit
def racy_throughout(x, scale, out, n, BLOCK: tl.constexpr):
    """Each result differs from the one before."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + offsets, tl.load(x + offsets, mask=offsets < n) * tl.load(scale), mask=offsets < n)


@triton.autotune(configs=configs("BLOCK", 32, 64, 128), key=["n"])
@triton.jit
def partial_sums(x, out, n, BLOCK: tl.constexpr):
    """One sum for each block: its caller reads how many there are off ``best_config``."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + tl.program_id(0), tl.sum(tl.load(x + offsets, mask=offsets < n, other=0.0), axis=0))


def sum_by_blocks(x):
    n = x.numel()
    out = torch.empty(triton.cdiv(n, 32))
    partial_sums[grid](x, out, n)
    return out[: triton.cdiv(n, partial_sums.best_config.kwargs["BLOCK"])].sum()


def _blocks_within(configs, named_args, **kwargs):
    return [config for config in configs if config.kwargs["BLOCK"] <= named_args["m"]]


@triton.autotune(configs=configs("BLOCK", 32, 64, 128), key=[], prune_configs_by={"early_config_prune": _blocks_within})
@triton.jit
def pruned(x, out, m, BLOCK: tl.constexpr):
    """A sum in the order of blocks, whose size is no part of the key: a block longer than it is pruned."""
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, m, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        sums += tl.load(x + offsets, mask=offsets < m, other=0.0)
    tl.store(out, tl.sum(sums, axis=0))


def pruned_total(x):
    out = torch.empty(1)
    pruned[(1,)](x, out, x.numel())
    return out


def grid(meta):
    return (triton.cdiv(meta["n"], meta["BLOCK"]),)


def numbers(count, seed=0):
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))
