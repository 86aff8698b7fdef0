"""Keys and configs, as the canonical texts of :mod:`tuning.spec`, in words for reports.

The texts may come from a peer or a file that nobody vouches for: whatever they are, this raises nothing and prints one
line.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from tuning.spec import CONFIG_DEFAULTS

__all__ = ["differing_fields", "readable_key", "shortened"]


def _parsed(text: str) -> object:
    """JSON value of a text that another rank sent; the text itself where it is none."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def shortened(text: str, limit: int = 200) -> str:
    """The text on one line, cut after ``limit`` characters."""
    # Whatever a rank sent goes into logs: no control characters, no endless lines.
    safe = text if text.isprintable() else text.encode("unicode_escape").decode("ascii")
    return safe if len(safe) <= limit else f"{safe[:limit]}... ({len(safe)} characters)"


def readable_key(text: str) -> str:
    """``N=64 x:float16`` of the text of a :class:`tuning.spec.Key`; any other text as it is."""
    data: Any = _parsed(text)
    try:
        values = [f"{name}={value}" for name, value in data["values"]]
        dtypes = [f"{name}:{dtype}" for name, dtype in data["dtypes"]]
    except (KeyError, TypeError, ValueError):
        return shortened(text)
    return shortened(" ".join(values + dtypes)) or "empty key"


def _fields(text: str) -> dict[str, str] | None:
    """Fields of the text of a :class:`tuning.spec.LaunchConfig`, flat; None of any other text."""
    data = _parsed(text)
    if not isinstance(data, dict) or not isinstance(data.get("kwargs"), dict):
        return None
    extra = data.get("extra")
    core = {name: value for name, value in data.items() if name not in ("kwargs", "extra")}
    flat = {**data["kwargs"], **CONFIG_DEFAULTS, **core, **(extra if isinstance(extra, dict) else {})}
    return {name: json.dumps(value) for name, value in flat.items()}


def differing_fields(configs: Sequence[str]) -> dict[str, str]:
    """For each config, the fields in which these configs differ; whole texts where one cannot be taken apart."""
    fields = {config: _fields(config) for config in configs}
    known = {config: flat for config, flat in fields.items() if flat is not None}
    if len(known) < len(fields):
        return {config: shortened(config) for config in fields}
    names = dict.fromkeys(name for flat in known.values() for name in flat)
    differ = [name for name in names if len({flat.get(name) for flat in known.values()}) > 1]
    return {
        config: shortened(" ".join(f"{name}={flat.get(name, 'absent')}" for name in differ)) or shortened(config)
        for config, flat in known.items()
    }
