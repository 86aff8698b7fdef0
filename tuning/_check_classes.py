"""Configs of one bit class, as ranks tell each other of them.

A rank that may vary its config within a class sends, with the config that it launched, the class that it rests on: a
short digest of each member's text. Ranks agree on a key if some config is a member of the class of every one of them;
a config that was sent without a class is alone in its own. Two classes that share a member need not be equal, since
ranks may hold other tables, but whoever launched a member of either computed what the shared one computes.

The texts may come from a peer that nobody vouches for: whatever they are, this raises nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from functools import lru_cache

from tuning.spec import canonical_json

__all__ = ["class_labels", "with_class"]

_START = '{"class":['


def _digest(config: str) -> str:
    return hashlib.blake2b(config.encode(), digest_size=8).hexdigest()


def with_class(config: str, members: Iterable[str]) -> str:
    """The text that a rank sends for a config of a class; all are canonical texts of configs."""
    return canonical_json({"class": sorted(map(_digest, {*members, config})), "config": json.loads(config)})


@lru_cache(maxsize=4096)
def _taken_apart(text: str) -> tuple[str, frozenset[str]]:
    """The config and its class, of what a rank sent."""
    if text.startswith(_START):
        try:
            data = json.loads(text)
            members = data["class"]
            config = canonical_json(data["config"])
            if isinstance(data["config"], dict) and all(type(each) is str for each in members):
                return config, frozenset((*members, _digest(config)))
        except (ValueError, KeyError, TypeError, RecursionError):
            pass  # compared as it stands
    return text, frozenset((_digest(text),))


def class_labels(texts: Iterable[str]) -> dict[str, str]:
    """For each text the config that stands for it: the same one for texts whose classes share a member.

    Smaller classes come first, so a config sent without a class is never merged with another such one.
    """
    found = list(texts)
    if not any(text.startswith(_START) for text in found):
        return {text: text for text in found}
    labels: dict[str, str] = {}
    groups: list[tuple[str, frozenset[str]]] = []
    for text in sorted(set(found), key=lambda text: (len(_taken_apart(text)[1]), text)):
        config, members = _taken_apart(text)
        for place, (label, common) in enumerate(groups):
            if common & members:
                groups[place] = (label, common & members)
                labels[text] = label
                break
        else:
            groups.append((config, members))
            labels[text] = config
    return labels
