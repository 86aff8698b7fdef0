"""Numbers in words, for messages and reports."""

from __future__ import annotations

__all__ = ["counted"]


def counted(count: int, noun: str) -> str:
    """``1 key``, ``2 keys``: for nouns whose plural ends in s, or ies for y after a consonant."""
    if count == 1:
        return f"1 {noun}"
    return f"{count} {noun[:-1]}ies" if noun.endswith(("ry", "ty")) else f"{count} {noun}s"
