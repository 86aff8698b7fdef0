"""Where two values differ first: by name, index, bits and distance in ulps.

The ulp distance of two floats is how many floats of their dtype lie between them, plus one: the finite numbers and
infinities in order, both zeros at one place. So ``0.0`` and ``-0.0`` are at distance 0 and still differ: the kind says
``sign of zero``. A NaN is at no distance from anything.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tuning.bitexact.digest import Digest, Digests
from tuning.bitexact.digest_parts import as_tensor, is_plain
from tuning.spec import Json

__all__ = [
    "Difference",
    "DifferenceKind",
    "compare_tensors",
    "differences",
    "most_ulps",
    "ulp_distance",
    "ulp_place",
]

_NUMBERS = ("bool", *(f"{sign}int{width}" for sign in ("", "u") for width in (8, 16, 32, 64)))

DifferenceKind = Literal["missing", "description", "value", "sign of zero", "nan", "bits"]


@dataclass(frozen=True)
class Difference:
    """One value that two runs computed differently.

    Attributes:
        name: dotted name of the value.
        kind: ``missing``: one run lacks it; ``description``: dtype, shape, strides or layout; ``value``: numbers
            differ; ``sign of zero``; ``nan``: a NaN's payload, or a NaN against a number; ``bits``: the bytes differ
            and the values are not at hand, or are no numbers.
        index: of the first element that differs, in row-major order; empty for a single value.
        count: how many elements differ; 0 where that is not known.
        first: that element in the first run, its bits in hexadecimal, or the description.
        second: the same of the other run.
        ulps: distance of the first elements that differ; None where there is none.
        most_ulps: the largest distance of all elements; None where there is none.
    """

    name: str
    kind: DifferenceKind
    index: tuple[int, ...] = ()
    count: int = 0
    first: str = ""
    second: str = ""
    ulps: int | None = None
    most_ulps: int | None = None

    def __str__(self) -> str:
        place = f"[{', '.join(map(str, self.index))}]" if self.index else ""
        text = f"{self.name}{place}: {self.first} and {self.second}"
        if self.ulps is not None:
            text += f", {self.ulps} ulp apart"
        if self.kind not in ("value", "description"):
            text += f" ({self.kind})"
        if self.count > 1:
            most = f", at most {self.most_ulps} ulp" if self.most_ulps is not None else ""
            text += f"; {self.count} elements differ{most}"
        return text

    def to_json(self) -> Json:
        """JSON form."""
        return {
            "name": self.name,
            "kind": self.kind,
            "index": list(self.index),
            "count": self.count,
            "first": self.first,
            "second": self.second,
            "ulps": self.ulps,
            "most_ulps": self.most_ulps,
        }


def differences(
    first: Digests, second: Digests, values: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {})
) -> tuple[Difference, ...]:
    """Every name whose digests differ, in the first run's order.

    Args:
        first: digests of one run.
        second: digests of the other.
        values: what both runs computed, by the same names, as far as it was kept.
    """
    return tuple(_difference(name, first.get(name), second.get(name), values) for name in first.differing(second))


def _difference(
    name: str, one: Digest | None, two: Digest | None, values: tuple[Mapping[str, Any], Mapping[str, Any]]
) -> Difference:
    if one is None or two is None:
        first, second = (str(found) if found else "absent" for found in (one, two))
        return Difference(name, "missing", first=first, second=second)
    fields = one.differing(two)
    if fields != ("content",):
        first, second = (", ".join(f"{f} {getattr(d, f)}" for f in fields if f != "content") for d in (one, two))
        return Difference(name, "description", first=first, second=second)
    if not one.layout:
        return _plain_difference(name, one, two)
    kept = [side[name] for side in values if name in side]
    if len(kept) == 2:
        found = compare_tensors(name, *kept)
        if found is not None:
            return found
    return Difference(name, "bits", first=f"digest {one.content}", second=f"digest {two.content}")


def _plain_difference(name: str, one: Digest, two: Digest) -> Difference:
    if one.dtype == "float":
        import torch

        pair = [
            torch.tensor([struct.unpack(">q", bytes.fromhex(found.content))[0]]).view(torch.float64)
            for found in (one, two)
        ]
        found = compare_tensors(name, *pair)
        if found is not None:
            return Difference(name, found.kind, (), 1, found.first, found.second, found.ulps, found.ulps)
    return Difference(name, "bits", (), 1, one.content, two.content)


def compare_tensors(name: str, first: Any, second: Any) -> Difference | None:
    """The first element of two tensors whose bits differ, or None where all bytes are equal.

    None too where a tensor is not one dense array of elements (sparse, nested, quantized, or a subclass that wraps
    others): what differs in those only their digests tell.

    The tensors stay where they are: an index and the two elements come to the host. A ``DTensor`` is compared by its
    local shard, and the index is the index in that.

    Raises:
        ValueError: the tensors differ in dtype or shape.
    """
    import torch

    pair = [as_tensor(t.to_local() if hasattr(t, "to_local") else t) for t in (first, second)]
    if not all(t is not None and is_plain(t) for t in pair):
        return None  # what differs is told by the digest alone
    pair = [t.resolve_conj().resolve_neg() for t in pair]
    if pair[0].dtype != pair[1].dtype or pair[0].shape != pair[1].shape:
        found = " and ".join(f"{t.dtype} {list(t.shape)}" for t in pair)
        raise ValueError(f"{name}: expected tensors of one dtype and shape, found {found}")
    if pair[0].is_complex():
        pair = [torch.view_as_real(t) for t in pair]
    dtype = pair[0].dtype
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    # Everything goes by the integers: torch cannot index tensors of some dtypes (packed and sub-byte ones).
    bits = [t.view(integers[t.element_size()]).contiguous().flatten() for t in pair]
    bits[1] = bits[1].to(bits[0].device)
    places = (bits[0] != bits[1]).nonzero().flatten()
    if places.numel() == 0:
        return None
    at = place = int(places[0])
    differing = [b[places] for b in bits]
    kind, ulps, most = ulp_distance([b.view(dtype) for b in differing], differing)
    index = []
    for size in reversed(pair[0].shape):
        at, here = divmod(at, size)
        index.append(here)
    shown = [_shown(b[place : place + 1], dtype) for b in bits]
    return Difference(name, kind, tuple(reversed(index)), places.numel(), shown[0], shown[1], ulps, most)


def most_ulps(first: Any, second: Any) -> int | None:
    """The largest ulp distance of two tensors' elements, 0 where all bytes are equal.

    None where some that differ are at no distance: a NaN, integers, and tensors of another dtype or shape.
    """
    import torch

    if first.dtype != second.dtype or first.shape != second.shape:
        return None
    found = compare_tensors("", first, second)
    if found is None or found.most_ulps is None:
        return 0 if found is None else None
    pair = [t.detach() for t in (first, second)]
    pair = [torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in pair]
    bits = [t.contiguous().flatten().view(torch.uint8).view(-1, t.element_size()) for t in pair]
    nan = [t.to(torch.float64 if t.element_size() == 8 else torch.float32).isnan().flatten() for t in pair]
    differ = (bits[0] != bits[1].to(bits[0].device)).any(1)
    return None if bool((differ & (nan[0] | nan[1].to(differ.device))).any()) else found.most_ulps


def _shown(bits: Any, dtype: Any) -> str:
    """One element, given as an integer of its width: the number where it is one, and its bits."""
    import torch

    width = 8 * dtype.itemsize
    raw = f"0x{int(bits.item()) % (1 << width):0{width // 4}x}"
    element = bits.cpu().view(dtype)
    if dtype.is_floating_point and width == 8:
        if str(dtype).startswith("torch.float4"):
            return raw  # two numbers in a byte
        return f"{element.to(torch.float32).item()!r} ({raw})"
    if dtype.is_floating_point or str(dtype).removeprefix("torch.") in _NUMBERS:
        return f"{element.item()!r} ({raw})"
    return raw


def ulp_place(bits: Any, width: int) -> Any:
    """Where a float stands among all floats of its dtype: an integer that grows by 1 from each to the next one.

    Both zeros stand at 0, infinity one beyond the largest finite number. The distance in ulps of two floats that are no
    NaN is the distance of their places; this is the one definition of it.

    Args:
        bits: of the float, its highest the sign: a Python integer, or a tensor of int64, for each element.
        width: how many bits the dtype has.
    """
    sign = -((bits >> (width - 1)) & 1)
    return ((bits & ((1 << (width - 1)) - 1)) ^ sign) - sign


def ulp_distance(values: list[Any], bits: list[Any]) -> tuple[DifferenceKind, int | None, int | None]:
    """Kind and ulp distance of the first of these elements, and the largest distance.

    Args:
        values: two tensors of one shape and floating-point dtype, whose elements differ in their bits.
        bits: the same as signed integers of the dtype's width.

    Returns:
        The kind and the distance of the first elements, and the largest distance of those that have one. Both are None
        for dtypes that are no floats with a sign.
    """
    import torch

    dtype = values[0].dtype
    if not dtype.is_floating_point or str(dtype).startswith(("torch.float4", "torch.float8_e8m0")):
        return "bits", None, None
    numbers = [v.to(torch.float64 if dtype.itemsize == 8 else torch.float32).to(bits[0].device) for v in values]
    nan = numbers[0].isnan() | numbers[1].isnan()
    zero = (numbers[0] == 0) & (numbers[1] == 0)
    ordered = [ulp_place(found.to(torch.int64), 8 * dtype.itemsize) for found in bits]
    low, high = torch.minimum(*ordered), torch.maximum(*ordered)
    # The difference of two float64 may need 64 bits without a sign: what wraps is read as such.
    apart = (high - low).masked_fill(nan, 0)
    smallest = -(1 << 63)
    most = (int((apart ^ smallest).max()) ^ smallest) % (1 << 64)
    if bool(nan[0]):
        return "nan", None, most or None
    return "sign of zero" if bool(zero[0]) else "value", int(apart[0]) % (1 << 64), most
