"""Call back right after a module has been executed for the first time.

Deterministic mode changes modules that may not be imported yet, and must not import them itself: that would cost
seconds, and would fail where a package is installed but broken. A finder at the head of ``sys.meta_path`` sees each
import; for the names it watches it asks the finders behind it and wraps the loader's ``exec_module``. The wrapper is an
attribute of that one loader object (import machinery makes a loader for each module) and is gone after it ran, so the
module's ``__loader__`` and ``__spec__`` are what they would have been.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__all__ = ["ImportWatch"]


class ImportWatch:
    """Calls ``on_import(module)`` after each watched module has run its own code.

    An exception of ``on_import`` makes the import fail with it. Modules imported before :meth:`install` are not
    reported: look them up in ``sys.modules``.
    """

    def __init__(self, names: Iterable[str], on_import: Callable[[ModuleType], None]) -> None:
        self.names = frozenset(names)
        self._on_import = on_import
        self._active = False

    def install(self) -> None:
        """Start watching; a second call does nothing."""
        if not self._active:
            self._active = True
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Stop watching; a second call does nothing."""
        self._active = False
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not self]

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Part of the import protocol: the spec that another finder has for a watched module, else None."""
        if not self._active or name not in self.names:
            return None
        # Only those behind: two watches that asked each other would never come to an end.
        behind = sys.meta_path[sys.meta_path.index(self) + 1 :] if self in sys.meta_path else []
        for finder in behind:
            if hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    self._wrap(spec.loader)
                    return spec
        return None

    def _wrap(self, loader: Any) -> None:
        execute = getattr(loader, "exec_module", None)
        if execute is None or isinstance(loader, type):
            # Built-in and frozen modules share one loader class; nothing that is watched is one of them.
            return

        def exec_module(module: ModuleType) -> None:
            vars(loader).pop("exec_module", None)
            execute(module)
            if self._active:
                self._on_import(module)

        loader.exec_module = exec_module
