"""Values of a metric as bits: to and from text that carries every bit, and how far two of them lie apart.

A value is held as the integer that its bytes make, together with the name of its dtype, so that no conversion can quiet
a NaN or round. As text a finite float is what :meth:`float.hex` gives, which every IEEE type up to 64 bits fits into
exactly (``-0x0.0p+0`` keeps its sign), and a NaN is ``nan:`` and its bits. Decimal digits would need a shortest
round-trip printer for each type; the bits alone could not be read in a review.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from .difference import ulp_place

__all__ = ["DTYPES", "Value", "as_number", "decode", "dtype_of", "encode", "exactly", "ulp_distance", "value_of"]


@dataclass(frozen=True)
class _FloatKind:
    width: int
    exponent: int
    to_float: Callable[[int], float]
    to_bits: Callable[[float], int]

    @property
    def mantissa(self) -> int:
        return self.width - 1 - self.exponent

    def is_nan(self, bits: int) -> bool:
        magnitude = bits & ((1 << (self.width - 1)) - 1)
        return magnitude > ((1 << self.exponent) - 1) << self.mantissa


def _unpack(integer: str, floating: str, shift: int = 0) -> tuple[Callable[[int], float], Callable[[float], int]]:
    def to_float(bits: int) -> float:
        return float(struct.unpack(floating, struct.pack(integer, bits << shift))[0])

    def to_bits(value: float) -> int:
        return int(struct.unpack(integer, struct.pack(floating, value))[0]) >> shift

    return to_float, to_bits


_FLOATS = {
    "float64": _FloatKind(64, 11, *_unpack("<Q", "<d")),
    "float32": _FloatKind(32, 8, *_unpack("<I", "<f")),
    "float16": _FloatKind(16, 5, *_unpack("<H", "<e")),
    "bfloat16": _FloatKind(16, 8, *_unpack("<I", "<f", 16)),
}
_INTEGERS = ("int", "int64", "int32", "int16", "int8", "uint8")
_WIDEST_INTEGER = 1 << 12  # bits: Python writes and reads integers of 4,300 decimal digits as text, and no more
DTYPES: tuple[str, ...] = (*_FLOATS, *_INTEGERS, "bool")
"""Dtypes that can be recorded, by name: ``float64`` is Python's float too, ``int`` Python's, of up to 4,096 bits."""


@dataclass(frozen=True)
class Value:
    """What a metric was at one step.

    Attributes:
        dtype: one of :data:`DTYPES`.
        shape: the shape of a tensor; ``()`` for a single number.
        bits: for each element, in row-major order, its bytes as an unsigned integer; integers as they are.
    """

    dtype: str
    shape: tuple[int, ...]
    bits: tuple[int, ...]


def _widest(dtype: str) -> tuple[int, int] | None:
    """The range of an integer dtype, both ends included; None for Python's own."""
    if dtype == "int":
        return None
    if dtype == "bool":
        return 0, 1
    width = int(dtype.lstrip("uint"))
    return (0, 2**width - 1) if dtype.startswith("u") else (-(2 ** (width - 1)), 2 ** (width - 1) - 1)


def dtype_of(given: Any) -> str:
    """The dtype of a Python number, a numpy scalar or array, or a tensor, whose elements are not looked at.

    Raises:
        TypeError: it is neither, has a dtype that is not among :data:`DTYPES`, is sparse, or has no bytes.
    """
    if type(given) in (bool, int, float):
        return {bool: "bool", int: "int", float: "float64"}[type(given)]
    name = str(getattr(given, "dtype", "")).rpartition(".")[2]
    if not hasattr(given, "shape") or name not in DTYPES:
        found = f"a {type(given).__name__}" + (f" of dtype {name}" if name else "")
        raise TypeError(f"expected a number, or an array or tensor of {', '.join(DTYPES)}; found {found}")
    layout = str(getattr(given, "layout", "torch.strided"))
    if layout != "torch.strided" or str(getattr(given, "device", "")) == "meta":
        found = "one on the meta device" if layout == "torch.strided" else f"one of layout {layout}"
        raise TypeError(f"expected a dense tensor that has bytes, found {found}")
    return name


def value_of(given: Any) -> Value:
    """The value of a Python number, a numpy scalar or array, or a tensor, which is copied to the host.

    Raises:
        TypeError: as :func:`dtype_of`, or a Python integer has more than 4,096 bits.
    """
    dtype = dtype_of(given)
    if isinstance(given, float) and dtype == "float64":
        return Value(dtype, (), (_FLOATS[dtype].to_bits(given),))
    if type(given) in (bool, int):
        if int(given).bit_length() > _WIDEST_INTEGER:
            found = f"one of {int(given).bit_length()} bits"
            raise TypeError(f"expected an integer of at most {_WIDEST_INTEGER} bits, found {found}")
        return Value(dtype, (), (int(given),))
    return Value(dtype, tuple(int(size) for size in given.shape), _elements(given, dtype))


def _elements(given: Any, dtype: str) -> tuple[int, ...]:
    kind = _FLOATS.get(dtype)
    if hasattr(given, "detach"):
        import torch

        flat = given.detach().cpu().contiguous().reshape(-1)
        if kind is not None:
            # Read as integers: as floats, 32 bits of a signalling NaN would come back quiet.
            flat = flat.view({16: torch.int16, 32: torch.int32, 64: torch.int64}[kind.width])
        numbers: Sequence[int] = flat.tolist()
    else:
        flat = given.reshape(-1)
        numbers = flat.view(f"u{kind.width // 8}").tolist() if kind is not None else flat.tolist()
    mask = (1 << kind.width) - 1 if kind is not None else -1
    return tuple(int(number) & mask for number in numbers)


def encode(dtype: str, bits: int) -> str | int | bool:
    """One element as it stands in a file: a string for floats, a JSON number or boolean for the rest."""
    kind = _FLOATS.get(dtype)
    if kind is None:
        return bool(bits) if dtype == "bool" else bits
    if kind.is_nan(bits):
        return f"nan:0x{bits:0{kind.width // 4}x}"
    return kind.to_float(bits).hex()


def decode(dtype: str, given: Any) -> int:
    """The bits of one element as :func:`encode` wrote it.

    Raises:
        ValueError: it is of another type, or no value of this dtype. The message says what was expected.
    """
    kind = _FLOATS.get(dtype)
    if kind is None:
        wanted = bool if dtype == "bool" else int
        ends = _widest(dtype)
        if type(given) is not wanted or (ends is not None and not ends[0] <= given <= ends[1]):
            raise ValueError("true or false" if dtype == "bool" else f"an integer that {dtype} can hold")
        return int(given)
    expected = f"a {dtype} in the form of float.hex(), or nan: and {kind.width // 4} hexadecimal digits"
    if type(given) is not str:
        raise ValueError(expected)
    if given.startswith("nan:0x"):
        digits = given[6:]
        whole = len(digits) == kind.width // 4 and set(digits) <= set("0123456789abcdef")
        bits = int(digits, 16) if whole else 0
        if not kind.is_nan(bits):
            raise ValueError(expected)
        return bits
    try:
        number = float.fromhex(given)
        bits = kind.to_bits(number)
        same = kind.to_float(bits).hex() == number.hex() == given
    except (ValueError, OverflowError):
        same = False
    if not same or math.isnan(number):
        raise ValueError(expected)
    return bits


def as_number(dtype: str, bits: int) -> float:
    """The element as a float, for a plot; not to tell two apart by. An integer beyond all floats becomes infinite."""
    kind = _FLOATS.get(dtype)
    if kind is not None:
        return kind.to_float(bits)
    try:
        return float(bits)
    except OverflowError:
        return math.inf if bits > 0 else -math.inf


def exactly(dtype: str, bits: int) -> Fraction | None:
    """The element as the rational number that it is; None for a NaN and an infinity."""
    kind = _FLOATS.get(dtype)
    if kind is None:
        return Fraction(bits)
    number = kind.to_float(bits)
    return Fraction(number) if math.isfinite(number) else None


def ulp_distance(dtype: str, first: int, second: int) -> int | None:
    """How many steps of this dtype lie between two elements, given as bits; see :func:`.difference.ulp_place`.

    Both zeros are one place, so equal places need not be equal bits. None where there is no distance: a NaN on either
    side, or no float.
    """
    kind = _FLOATS.get(dtype)
    if kind is None or kind.is_nan(first) or kind.is_nan(second):
        return None
    return abs(int(ulp_place(first, kind.width)) - int(ulp_place(second, kind.width)))
