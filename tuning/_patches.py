"""Attributes of other people's classes that are replaced, and put back."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

__all__ = ["ABSENT", "Patch", "leave_beneath", "take_back"]

logger = logging.getLogger("tuning")

ABSENT = object()
"""In place of an original: the attribute was inherited, and is deleted to restore it."""


class Patch(NamedTuple):
    """One replaced attribute."""

    owner: Any
    name: str
    original: Any
    replacement: Any


_beneath: list[Patch] = []  # given up, while something else of ours lay over them


def _is_ours(function: Any) -> bool:
    plain = getattr(function, "__func__", function)
    home = str(getattr(plain, "__globals__", {}).get("__name__", ""))
    return home.partition(".")[0] == __name__.partition(".")[0]


def leave_beneath(patches: Iterable[Patch]) -> None:
    """Give up patches over which something else of ours lies: taking that back skips them, too."""
    _beneath.extend(patches)


def take_back(patches: Iterable[Patch]) -> None:
    """Restore what was there. What somebody else has patched over stays, and has to pass calls through from now on.

    What lies beneath a later patch of ours has to pass calls through until that one is taken back.
    """
    for patch in patches:
        found = vars(patch.owner).get(patch.name)
        if found is patch.replacement:
            _restore(patch)
        elif _is_ours(found):
            leave_beneath([patch])
        else:
            logger.warning(
                "%s.%s was patched by somebody else after installation and is left alone; "
                "ours beneath it now passes every call through",
                patch.owner.__qualname__,
                patch.name,
            )


def _restore(patch: Patch) -> None:
    original = patch.original
    while given_up := next((each for each in _beneath if _lies_at(each, patch, original)), None):
        _beneath.remove(given_up)
        original = given_up.original
    if original is ABSENT:
        delattr(patch.owner, patch.name)
    else:
        setattr(patch.owner, patch.name, original)


def _lies_at(beneath: Patch, patch: Patch, original: Any) -> bool:
    return beneath.owner is patch.owner and beneath.name == patch.name and beneath.replacement is original
