"""Classes whose base comes from a package that may be missing."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

from tuning.errors import TuningError

__all__ = ["make_callback"]


def make_callback(events: type[Any], module: str, bases: Sequence[tuple[str, str]], install: str) -> type[Any]:
    """A class ``TuningCallback`` of ``module`` with the methods of ``events`` over the first base that is there.

    A package that the process has imported already goes first: of two that are installed it is the one in use.

    Args:
        events: the methods.
        module: name of the module that has the class.
        bases: (module, class) of each base to try, in order.
        install: what to install where none is there.

    Raises:
        TuningError: none of the packages can be imported.
    """
    problems = []
    for home, name in sorted(bases, key=lambda base: base[0] not in sys.modules):
        try:
            base = getattr(importlib.import_module(home), name)
        except ImportError as error:
            problems.append(str(error))
            continue
        made: type[Any] = type("TuningCallback", (events, base), {"__module__": module, "__doc__": events.__doc__})
        return made
    raise TuningError(f"{module}.TuningCallback needs {install}: {'; '.join(problems)}. pip install {install}")
