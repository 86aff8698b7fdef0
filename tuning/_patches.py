"""Attributes of other people's classes that are replaced, and put back."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, NamedTuple

__all__ = ["ABSENT", "Patch", "take_back"]

logger = logging.getLogger("tuning")

ABSENT = object()
"""In place of an original: the attribute was inherited, and is deleted to restore it."""


class Patch(NamedTuple):
    """One replaced attribute."""

    owner: Any
    name: str
    original: Any
    replacement: Any


def take_back(patches: Iterable[Patch]) -> None:
    """Restore what was there. What somebody else has patched over stays, and has to pass calls through from now on."""
    for patch in patches:
        if vars(patch.owner).get(patch.name) is not patch.replacement:
            logger.warning(
                "%s.%s was patched by somebody else after installation and is left alone; "
                "ours beneath it now passes every call through",
                patch.owner.__qualname__,
                patch.name,
            )
        elif patch.original is ABSENT:
            delattr(patch.owner, patch.name)
        else:
            setattr(patch.owner, patch.name, patch.original)
