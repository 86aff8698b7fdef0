"""Numbers in words, for messages and reports."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["a_few", "counted"]


def counted(count: int, noun: str) -> str:
    """``1 key``, ``2 keys``: for nouns whose plural ends in s, or ies for y after a consonant."""
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun[:-1]}ies" if noun.endswith(("ry", "ty")) else f"{count} {noun}s"


def a_few(names: Sequence[str], limit: int = 8, width: int = 60) -> str:
    """Names in a row, as many as a line of a message bears; what is left out is counted, and a long name is cut."""
    listed = [name if len(name) <= width else f"{name[: width - 3]}..." for name in names[:limit]]
    if len(names) > limit:
        listed.append(f"and {len(names) - limit} more")
    return ", ".join(listed)
