"""Kernels with faults, for the case ``bitexact``."""

import triton
import triton.language as tl


@triton.jit
def add_by_atomics(x, y, n, BLOCK: tl.constexpr):
    """Each program adds its elements to one number, in the order in which programs arrive."""
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.atomic_add(y, tl.sum(tl.load(x + offsets, mask=offsets < n, other=0.0)))


@triton.jit
def add_in_blocks(x, y, n, BLOCK: tl.constexpr):
    """One program adds all elements, block by block: the block size is the order of the additions."""
    total = tl.zeros((), tl.float32)
    for start in range(0, n, BLOCK):
        offsets = start + tl.arange(0, BLOCK)
        total += tl.sum(tl.load(x + offsets, mask=offsets < n, other=0.0))
    tl.store(y, total)


def autotuned(times):
    """``add_in_blocks`` with two candidates; ``times()`` gives what the stopwatch reads, in ms."""
    configs = [triton.Config({"BLOCK": block}) for block in (64, 1024)]

    def stopwatch(call, quantiles):
        call()
        found = times()
        return [found, found, found]

    return triton.autotune(configs=configs, key=["n"], do_bench=stopwatch)(add_in_blocks)
