"""Inputs to replay a launch on: as captured, random, and of magnitudes that show the order of a sum.

Values are made by integer arithmetic from the place of an element alone, and turned into floats by operations that are
exact. So the same tensor gets the same bits on every device, without a generator: torch's own numbers depend on the
number of multiprocessors. Integers are never changed: they are indices, offsets and lengths, and another value could
lead a kernel out of its memory. A tensor that is nowhere negative, or nowhere positive, stays so: decays and time steps
are such, and another sign would turn every result into infinity.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["fill", "holds_floats", "input_names", "poison"]

_MASK = (1 << 62) - 1
_POISON = 0x7E


def input_names(count: int) -> tuple[str, ...]:
    """Names of this many inputs: the captured one, then random ones and magnitudes in turn."""
    kinds = ("random", "magnitudes")
    return ("captured", *(f"{kinds[index % 2]} {index // 2}" for index in range(count - 1)))[:count]


def holds_floats(tensor: Any) -> bool:
    """Whether a tensor's elements are floats, or pairs of them."""
    return bool(tensor.is_floating_point() or tensor.is_complex())


def _bits(count: int, seed: int, device: Any) -> Iterator[tuple[int, Any]]:
    """Pieces of pseudo-random integers of 31 bits: their start, and the tensor. The finalizer of splitmix64's kind."""
    import torch

    step = 1 << 24
    for start in range(0, count, step):
        mixed = torch.arange(start, min(count, start + step), dtype=torch.int64, device=device)
        mixed.mul_(0x9E3779B97F4A7C1 | 1).add_(seed & _MASK)
        for shift, factor in ((30, 0x3F58476D1CE4E5B9), (27, 0x14D049BB133111EB)):
            mixed.bitwise_xor_(mixed >> shift).mul_(factor)
        yield start, (mixed >> 32) & 0x7FFFFFFF


def _seed(name: str, tensor_name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{name}/{tensor_name}".encode(), digest_size=7).digest(), "big")


def _scale(values: Any) -> tuple[float, int]:
    """A power of two near the mean magnitude of a tensor's finite values, and the sign that all have, or 0."""
    import math

    import torch

    finite = values[torch.isfinite(values)]
    if finite.numel() == 0:
        return 1.0, 0
    mean = float(finite.abs().mean())
    # Two devices may compute means that differ in the last place, hardly ever across the middle of an octave.
    scale = 2.0 ** max(-20, min(20, round(math.log2(mean)))) if 0 < mean < math.inf else 1.0
    low, high = float(finite.min()), float(finite.max())
    sign = 1 if low >= 0 and high > 0 else -1 if high <= 0 and low < 0 else 0
    return scale, sign


def fill(name: str, tensors: Mapping[str, Any]) -> None:
    """Write an input into copies of a launch's tensors, in place. ``captured`` leaves them as they are.

    Args:
        name: one of :func:`input_names`.
        tensors: by the names of the arguments. Elements that share memory are written by each tensor in turn.
    """
    import torch

    kind = name.partition(" ")[0]
    if kind == "captured":
        return
    for tensor_name, tensor in tensors.items():
        if not holds_floats(tensor) or tensor.numel() == 0:
            continue
        memory = _memory(tensor)
        if memory.is_complex():
            memory = torch.view_as_real(memory).reshape(-1)
        scale, sign = _scale(memory.to(torch.float32) if memory.element_size() < 4 else memory)
        for start, bits in _bits(memory.numel(), _seed(name, tensor_name), tensor.device):
            # From -1 up to 1 in steps of 2**-23: as many bits as a float32 holds, or a sum of few would be exact.
            values = ((bits & 0xFFFFFF) - (1 << 23)).to(torch.float32) * 2.0**-23
            if kind == "magnitudes":
                exponent = ((bits >> 24) & 0x7).to(torch.float32)
                # Around the scale; up to it where a sign is kept, for large decays give zero or infinity.
                values = values * torch.exp2(2 * exponent - (14 if sign else 8))
            if sign:
                values = values.abs() * sign
            memory[start : start + values.numel()].copy_(values * scale)


def _memory(tensor: Any) -> Any:
    """The memory that a tensor reaches, flat, in its dtype: what lies between its elements is a copy too."""
    import torch

    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return torch.as_strided(tensor, (last + 1,), (1,), tensor.storage_offset())


def poison(tensors: Mapping[str, Any], names: tuple[str, ...], pattern: int = _POISON) -> None:
    """Fill tensors with a byte, so that what a kernel leaves unwritten, or reads before writing, shows."""
    import torch

    for name in names:
        memory = _memory(tensors[name])
        if memory.numel():
            memory.view(torch.uint8).fill_(pattern)
