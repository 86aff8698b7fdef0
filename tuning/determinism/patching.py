"""Replace attributes and put them back: one list, undone in reverse.

Three rules, which OpenTelemetry's instrumentors also follow: an attribute that was inherited is deleted on undo and
not reassigned, so that a later change of the base class is seen; a place that somebody else has patched since is left
alone and named in an error; and the undo of everything else goes on.

Python binds names early: ``from flash_attn import flash_attn_func`` copies the function into the importing module. So
:meth:`Patches.replace_everywhere` looks for the object itself in every imported module, and the undo looks for the
replacement in the same way, which finds the modules that were imported in between.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from tuning.errors import DeterminismError

__all__ = ["MISSING", "Patches", "bindings_of", "own_attributes"]

MISSING: Any = object()
"""Stands for "the object itself has no such attribute" (a class may still inherit one)."""


def own_attributes(owner: object) -> Mapping[str, Any]:
    """The attributes that ``owner`` holds itself, or nothing where it has no dictionary."""
    found = getattr(owner, "__dict__", None)
    return found if isinstance(found, Mapping) else {}


def bindings_of(value: object) -> Iterator[tuple[ModuleType, str]]:
    """Every (module, name) among the imported modules whose value is this very object.

    Module dictionaries are read directly: ``getattr`` would set off the lazy imports of some packages.
    """
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            for name, bound in list(own_attributes(module).items()):
                if bound is value:
                    yield module, name


@dataclass(frozen=True)
class _Patch:
    owner: Any
    name: str
    before: Any
    value: Any

    @property
    def place(self) -> str:
        owner = getattr(self.owner, "__qualname__", None) or getattr(self.owner, "__name__", None)
        prefix = getattr(self.owner, "__module__", None) if getattr(self.owner, "__qualname__", None) else None
        return ".".join(str(part) for part in (prefix, owner or type(self.owner).__name__, self.name) if part)


class Patches:
    """Replacements made so far, newest last.

    Args:
        purpose: what the replacements are for, in words, used in errors.
    """

    def __init__(self, purpose: str) -> None:
        self.purpose = purpose
        self._patches: list[_Patch] = []
        self._swept: list[tuple[Any, Any]] = []

    def __len__(self) -> int:
        return len(self._patches)

    @property
    def places(self) -> tuple[str, ...]:
        """Where a replacement stands, as dotted names, in the order in which they were made."""
        return tuple(patch.place for patch in self._patches)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set one attribute of a module, class or object."""
        before = own_attributes(owner).get(name, MISSING)
        setattr(owner, name, value)
        self._patches.append(_Patch(owner, name, before, value))

    def replace_everywhere(self, original: object, replacement: object) -> int:
        """Replace an object in every imported module that holds it under any name; the number of places."""
        found = list(bindings_of(original))
        for module, name in found:
            self.set(module, name, replacement)
        self._swept.append((original, replacement))
        return len(found)

    def undo(self) -> None:
        """Put everything back, newest first.

        Raises:
            DeterminismError: a place holds what neither we nor the original owner put there. Everything else has been
                put back; calling again once the other patch is gone finishes the work.
        """
        foreign: list[_Patch] = []
        for patch in reversed(self._patches):
            current = own_attributes(patch.owner).get(patch.name, MISSING)
            if current is patch.before:
                continue
            if current is not patch.value:
                foreign.append(patch)
            elif patch.before is MISSING:
                delattr(patch.owner, patch.name)
            else:
                setattr(patch.owner, patch.name, patch.before)
        for original, replacement in reversed(self._swept):
            for module, name in list(bindings_of(replacement)):
                setattr(module, name, original)
        self._patches = foreign[::-1]
        self._swept = []
        if foreign:
            places = ", ".join(patch.place for patch in reversed(foreign))
            problems = [f"{places} was replaced by somebody else since: undo that first, then undo this again"]
            raise DeterminismError(f"cannot undo {self.purpose}: {problems[0]}", problems=problems)
