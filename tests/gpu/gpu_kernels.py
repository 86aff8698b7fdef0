"""Small autotuned kernels for the tests on a GPU."""

import triton
import triton.language as tl


@triton.autotune(configs=[triton.Config({"BLOCK": block}) for block in (64, 128, 256)], key=["n"])
@triton.jit
def add_one(x, y, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n
    tl.store(y + offsets, tl.load(x + offsets, mask=mask) + 1.0, mask=mask)


def too_large_first(blocks):
    """Candidates for a matrix product, the first of which needs more shared memory than any GPU has."""
    return [triton.Config({"BLOCK": block}, num_stages=stages) for block, stages in blocks]


@triton.autotune(configs=too_large_first([(256, 8), (32, 2), (64, 2)]), key=["n"])
@triton.jit
def square(a, b, c, n, BLOCK: tl.constexpr):
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK, BLOCK), tl.float32)
    for start in range(0, n, BLOCK):
        inner = start + tl.arange(0, BLOCK)
        left = tl.load(a + rows[:, None] * n + inner[None, :])
        right = tl.load(b + inner[:, None] * n + columns[None, :])
        total += tl.dot(left, right)
    tl.store(c + rows[:, None] * n + columns[None, :], total)


@triton.autotune(configs=[triton.Config({"BLOCK": block}) for block in (256, 1024, 4096)], key=["n"])
@triton.jit
def row_sum(x, y, n, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(x + row * n + at, mask=at < n, other=0.0)
    tl.store(y + row, tl.sum(total, 0))
