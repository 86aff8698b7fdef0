"""Kernels for the tests of bit classes on a GPU."""

import torch
import triton
import triton.language as tl


def blocks(*sizes):
    return [triton.Config({"BLOCK": size}) for size in sizes]


@triton.autotune(configs=blocks(64, 128, 256), key=["n"])
@triton.jit
def atomic_total(x, out, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(out, tl.sum(tl.load(x + offsets, mask=offsets < n, other=0.0), axis=0))


@triton.autotune(configs=blocks(256, 1024, 4096), key=["n"])
@triton.jit
def total(x, out, n, BLOCK: tl.constexpr):
    sums = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        sums += tl.load(x + offsets, mask=offsets < n, other=0.0)
    tl.store(out, tl.sum(sums, axis=0))


@triton.autotune(configs=blocks(128, 256, 512, 1024), key=["n"])
@triton.jit
def double(x, out, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + offsets, tl.load(x + offsets, mask=offsets < n) * 2.0, mask=offsets < n)


def _draw(nargs):
    torch.rand(1, device="cuda")


@triton.autotune(configs=[triton.Config({"BLOCK": block}, pre_hook=_draw) for block in (128, 256)], key=["n"])
@triton.jit
def add_once_or_twice(x, y, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    value = tl.load(x + offsets, mask=mask)
    tl.store(y + offsets, tl.load(y + offsets, mask=mask) + (value if BLOCK == 128 else 2 * value), mask=mask)


@triton.autotune(configs=blocks(32, 64), key=["n"])
@triton.jit
def copy_integers(x, out, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + offsets, tl.load(x + offsets, mask=offsets < n), mask=offsets < n)
