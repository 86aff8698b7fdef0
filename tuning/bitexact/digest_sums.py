"""The sums that a digest is made of: integer arithmetic on a tensor's device, chunk by chunk; see :mod:`digest`."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

__all__ = ["sums"]

_CHUNK = {"cpu": 1 << 16}  # elements: what stays in a cache
_CHUNK_ELSEWHERE = 1 << 24  # 128 MiB as 64-bit integers, of which three live at once


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


_STEP = _signed(0x9E3779B97F4A7C15)
_SEED = _signed(0xD1B54A32D192ED03)
_ROUNDS = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)), (31, None))
_SECOND = ((29, _signed(0xFF51AFD7ED558CCD)), (32, None))


def sums(tensor: Any, offsets: Sequence[int], shape: Sequence[int]) -> Any:
    """Both words of a plain tensor that lies at ``offsets`` in one of ``shape``: two 64-bit integers on its device."""
    import torch

    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor, offsets, shape = torch.view_as_real(tensor), (*offsets, 0), (*shape, 2)
    bits = tensor.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()])
    steps = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    base = sum(offset * step for offset, step in zip(offsets, steps, strict=True))
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    for block, start in _blocks(bits, base, steps, _CHUNK.get(tensor.device.type, _CHUNK_ELSEWHERE)):
        total += _mixed(block, start, steps[len(steps) - block.dim() :])
    return total


def _blocks(bits: Any, base: int, steps: Sequence[int], most: int) -> Iterator[tuple[Any, int]]:
    """Blocks of at most ``most`` elements and the place of their first one; no copy is made."""
    if bits.numel() == 0:
        return
    if bits.numel() <= most:
        yield bits, base
        return
    row = bits.numel() // bits.shape[0]
    if row > most:
        for index in range(bits.shape[0]):
            yield from _blocks(bits[index], base + index * steps[0], steps[1:], most)
        return
    rows = most // row
    for index in range(0, bits.shape[0], rows):
        yield bits[index : index + rows], base + index * steps[0]


def _mixed(block: Any, start: int, steps: Sequence[int]) -> Any:
    import torch

    def places(count: int, step: int, first: int = 0) -> Any:
        return torch.arange(count, dtype=torch.int64, device=block.device).mul_(_wrapped(step)).add_(_wrapped(first))

    first = start * _STEP + _SEED
    if all(step == math.prod(block.shape[dim + 1 :]) for dim, step in enumerate(steps) if block.shape[dim] > 1):
        x = places(block.numel(), _STEP, first).view(block.shape).add_(block)
    else:
        x = block.to(torch.int64, copy=True, memory_format=torch.contiguous_format).add_(_wrapped(first))
        for dim, step in enumerate(steps):
            x.add_(places(block.shape[dim], step * _STEP).view(-1, *(1,) * (block.dim() - dim - 1)))
    _rounds(x, _ROUNDS)
    one = x.sum()
    _rounds(x, _SECOND)
    return torch.stack([one, x.sum()])


def _wrapped(value: int) -> int:
    return _signed(value % (1 << 64))


def _rounds(x: Any, rounds: Sequence[tuple[int, int | None]]) -> None:
    for shift, factor in rounds:
        # torch shifts the sign in, which would lose a bit.
        x.bitwise_xor_((x >> shift).bitwise_and_((1 << (64 - shift)) - 1))
        if factor is not None:
            x.mul_(factor)
