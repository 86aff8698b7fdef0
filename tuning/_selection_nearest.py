"""How far a table's entry lies from a launch: the distance that ``on_miss: nearest`` goes by.

The distance is a *factor*, 1 for the same key and larger for every difference. Each difference multiplies it:

==========================================================  ==========================================================
two positive integers under one name                        the larger over the smaller: 2 for twice the size
any other difference of a value, or a name that one lacks   16: ``IS_CAUSAL`` or a string selects other code
two dtypes of one kind and width (float16, bfloat16)        2
any other two dtypes, or a tensor that one lacks            4: it doubles or halves what a tile takes
==========================================================  ==========================================================

So a dtype weighs as much as two doublings of a size, and a flag as much as four. The numbers order what is compared;
they are not fitted. A product of ratios orders keys as a sum of logarithms would, and is exact: no rounding of one
machine's mathematics library can break a tie. Entries that know only a sequence of dtypes are compared as a bag, since
the order in which they were reported may be that of a call.

Entries of the running arch come before those of any other, however far their keys are: an optimum moves less with the
shape than with the arch. Then come archs of the same vendor, then all others. Among the entries of one of these three
groups the smaller factor comes first, then the arch whose number is closer, then a wildcard's after all keys, and ties
go by arch, key, dtypes and config in canonical order, never by file or position.
"""

from __future__ import annotations

import re
from collections import Counter
from fractions import Fraction
from typing import Protocol

from tuning.spec import Key, LaunchConfig, canonical_json, natural_order

__all__ = ["KeyedEntry", "factor_text", "nearest_order"]

_OTHER_VALUE = 16
_OTHER_DTYPE = 4
_SAME_WIDTH = 2
_DIGITS = 4000
_SHOWN = 10**15

Pairs = tuple[tuple[str, str], ...]


class KeyedEntry(Protocol):
    """What is compared of a table entry."""

    @property
    def key(self) -> Pairs | None: ...
    @property
    def dtypes(self) -> Pairs | None: ...
    @property
    def dtype_sequence(self) -> tuple[str, ...] | None: ...
    @property
    def config(self) -> LaunchConfig: ...


def _values(theirs: str | None, mine: str | None) -> Fraction:
    if theirs == mine:
        return Fraction(1)
    longest = max(len(theirs or ""), len(mine or ""))  # a table may hold digits that Python would not read as a number
    if theirs is not None and mine is not None and theirs.isdecimal() and mine.isdecimal() and longest <= _DIGITS:
        one, other = int(theirs), int(mine)
        if one and other:
            return Fraction(max(one, other), min(one, other))
    return Fraction(_OTHER_VALUE)


def _dtype(theirs: str | None, mine: str | None) -> int:
    if theirs == mine:
        return 1
    return _SAME_WIDTH if theirs and mine and _form(theirs) == _form(mine) else _OTHER_DTYPE


def _form(dtype: str) -> tuple[str, str]:
    """Kind and width: (``float``, ``16``) of ``bfloat16``."""
    found = re.match(r"b?([a-z]+)(\d+)", dtype)
    return (found[1], found[2]) if found else (dtype, "")


def _bags(theirs: tuple[str, ...], mine: tuple[str, ...]) -> int:
    ours, others = Counter(mine), Counter(theirs)
    left, right = sorted((ours - others).elements()), sorted((others - ours).elements())
    factor = 1
    for at in range(max(len(left), len(right))):
        factor *= _dtype(right[at] if at < len(right) else None, left[at] if at < len(left) else None)
    return factor


def _factor(entry: KeyedEntry, key: Key) -> Fraction:
    """How far an entry with a key lies from ``key``; 1 is the same."""
    theirs, mine = dict(entry.key or ()), dict(key.values)
    factor = Fraction(1)
    for name in theirs.keys() | mine.keys():  # a product of exact fractions: the same in any order
        factor *= _values(theirs.get(name), mine.get(name))
    if entry.dtypes is not None:
        tensors, ours = dict(entry.dtypes), dict(key.dtypes)
        for name in tensors.keys() | ours.keys():
            factor *= _dtype(tensors.get(name), ours.get(name))
        return factor
    return factor * _bags(entry.dtype_sequence or (), key.dtype_sequence)


def _vendor(arch: str) -> str:
    return re.sub(r"[0-9].*", "", arch)


def _number(arch: str) -> int:
    """``103`` of ``sm103``, ``0x90a`` of ``gfx90a``; 0 where there is none."""
    base = 16 if arch.startswith("gfx") else 10
    digits = re.search(r"[0-9][0-9a-f]*" if base == 16 else r"[0-9]+", arch)
    return int(digits[0], base) if digits else 0


def nearest_order(key: Key, arch: str, entry: KeyedEntry, its_arch: str) -> tuple[object, ...]:
    """Sort key of an entry of ``its_arch``: the least is the nearest to a launch of ``key`` on ``arch``.

    It tells any two entries apart that do not name the same config for the same key.
    """
    tier = 0 if its_arch == arch else 1 if _vendor(its_arch) == _vendor(arch) else 2
    wildcard = entry.key is None
    values = tuple((name, natural_order(text)) for name, text in sorted(entry.key or ()))
    dtypes = canonical_json(sorted(entry.dtypes or ()) if entry.dtypes is not None else entry.dtype_sequence)
    return (
        tier,
        wildcard,
        Fraction(1) if wildcard else _factor(entry, key),
        abs(_number(its_arch) - _number(arch)),
        its_arch,
        values,
        entry.dtypes is None,
        dtypes,
        entry.config.order,
    )


def factor_text(entry: KeyedEntry, key: Key) -> str:
    """The distance in words; a wildcard has none."""
    if entry.key is None:
        return "any key"
    factor = _factor(entry, key)
    whole = int(factor)
    if whole >= _SHOWN:  # past what is worth reading, and maybe past what a float or a text of digits may hold
        return f"distance {_scientific(whole)}"
    return f"distance {whole}" if factor.denominator == 1 else f"distance {float(factor):.4g}"


def _scientific(number: int) -> str:
    """``1.234e+400``, cut and not rounded."""
    power = number.bit_length() * 30103 // 100000  # of ten: right, or off by a few
    while 10**power > number:
        power -= 1
    while 10 ** (power + 1) <= number:
        power += 1
    digits = str(number * 1000 // 10**power)
    return f"{digits[0]}.{digits[1:]}e+{power}"
