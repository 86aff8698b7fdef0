"""Keys of Megatron-LM's tables: one text for values and dtypes; :mod:`tuning.interop.megatron` says how it is made."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tuning._table_rows import Pairs
from tuning.interop._configs import NAME
from tuning.interop._documents import Node
from tuning.interop._result import Losses
from tuning.interop._rows import dtype_of
from tuning.interop._values import Unportable, str_of, value_of_str

__all__ = ["join_key", "read_key", "value_parts"]


def read_key(text: str, node: Node, losses: Losses) -> tuple[Pairs, tuple[str, ...]] | None:
    """Values and dtypes of a key that stands at ``node``; None for the wildcard.

    Raises:
        TableError: it is no key.
    """
    if text == "*":
        return None
    values: dict[str, str] = {}
    dtypes: list[str] = []
    for part in text.split("|") if text else ():
        name, equals, value = part.partition("=")
        if equals and not dtypes and NAME.fullmatch(name):
            if name in values:
                node.fail("a key that names each argument once", f"{name} twice")
            values[name], sure = value_of_str(value)
            if not sure:
                losses.add("value", node.place, f"{name}={value[:80]!r}: taken for a string, its type is lost")
            continue
        dtype = dtype_of(part)
        if dtype is None or equals:
            node.fail("a key of name=value parts and then dtypes, joined by |", f"the part {part[:80]!r}")
        if not part.startswith("torch."):
            losses.add("value", node.place, f"the dtype {part[:80]!r} is taken for a torch dtype")
        dtypes.append(dtype)
    return tuple(values.items()), tuple(dtypes)


def value_parts(key: Iterable[tuple[str, str]], place: str, losses: Losses) -> list[str] | None:
    """The parts ``name=value`` of a key; None, with the loss noted, where a value has no such text."""
    parts = []
    for name, text in key:
        try:
            value = str_of(text)
        except Unportable as error:
            losses.add("value", place, f"{name} cannot be written, nor can this row: {error}")
            return None
        if "|" in value:
            losses.add("value", place, f"{name} cannot be written, nor can this row: its text holds the separator |")
            return None
        if value_of_str(value)[0] != text:
            losses.add("value", place, f"{name}={text} is written as {value!r}, which does not say its type")
        parts.append(f"{name}={value}")
    return parts


def join_key(parts: Sequence[str], dtypes: Iterable[str]) -> str:
    """The text of a key of these parts and dtypes."""
    return "|".join([*parts, *(f"torch.{dtype}" for dtype in dtypes)])
