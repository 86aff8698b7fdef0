"""Lines of JSON on standard output, by which a measuring process speaks to the one that started it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["take_output"]


def take_output() -> Callable[..., None]:
    """Keep standard output for lines of JSON, and return what writes one from its keywords.

    Whatever else this process prints, and what its packages print, goes to standard error from now on.
    """
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    sys.stdout.flush()
    os.dup2(2, 1)

    def say(**fields: Any) -> None:
        lines.write(json.dumps(fields) + "\n")
        lines.flush()

    return say
