"""Kernels that do next to nothing, so that a launch costs what the host spends on it. Imported on a GPU host only."""

import triton
import triton.language as tl


@triton.jit
def kernel12(x, y, z, u, v, w, k1, k2, k3, s1, s2, BLOCK: tl.constexpr):
    """Twelve parameters: six tensors, three key values, two strides, one tunable."""
    if k1 < 0:
        tl.store(x + tl.arange(0, BLOCK), 0.0)


@triton.jit
def kernel20(
    x, y, z, u, v, w, k1, k2, k3, s1, s2, s3, s4, s5, s6, s7, s8,
    flag1: tl.constexpr, flag2: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Twenty parameters: six tensors, three key values, eight strides, two flags, one tunable."""
    if k1 < 0:
        tl.store(x + tl.arange(0, BLOCK), 0.0)


@triton.jit
def kernel36(
    a, b, c, d, e, f, g, h, i, j, k1, k2, k3, s1, s2, s3, s4, s5, s6, s7, s8, s9, s10, s11, s12, s13, s14, s15, s16,
    s17, s18, s19, flag1: tl.constexpr, flag2: tl.constexpr, flag3: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Thirty-six parameters: ten tensors, three key values, nineteen strides, three flags, one tunable."""
    if k1 < 0:
        tl.store(a + tl.arange(0, BLOCK), 0.0)
