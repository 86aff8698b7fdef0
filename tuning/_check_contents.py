"""The bytes in which ranks tell each other what they launched.

MessagePack: a count of texts, the texts, sorted and each once; then four indices per launch (kernel, key,
config, source), in order of launch. It is read value by value, with nothing but text and integers accepted, so that a
hostile peer can make neither an object nor an allocation beyond its declared length, which the headers bound. The
digest is taken over the launches in sorted order: ranks that launched the same in another order have one content, and
the order that reports follow is that of the contributor. It is checked after the exchange, by all ranks, against bytes
that all ranks received alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgpack

__all__ = ["CONTENT_LIMIT", "TEXT_LIMIT", "Fact", "bounded_text", "digest_of", "pack", "prefix_within_limit", "unpack"]

Fact = tuple[str, str, str, str]
"""Kernel, key text, config text, source: what one rank launched, as it travels."""

CONTENT_LIMIT = 4 << 20
"""Longest content in bytes. 300 keys take about 50 KB."""

TEXT_LIMIT = 1 << 16
"""Longest text in a content, in bytes of UTF-8."""


def bounded_text(text: str) -> str:
    """The text, or where it is too long to send, its beginning and its digest, which tell it apart as well."""
    raw = text.encode()
    if len(raw) <= TEXT_LIMIT:
        return text
    start = raw[: TEXT_LIMIT - 64].decode(errors="ignore")
    return f"{start}... blake2b {hashlib.blake2b(raw, digest_size=16).hexdigest()}"


def pack(facts: Sequence[Fact]) -> bytes:
    """The content of these launches, in this order."""
    texts = sorted({text for fact in facts for text in fact})
    index = {text: place for place, text in enumerate(texts)}
    packer = msgpack.Packer(autoreset=False)
    packer.pack(len(texts))
    for text in texts:
        packer.pack(text)
    for fact in facts:
        for text in fact:
            packer.pack(index[text])
    return bytes(packer.bytes())


def prefix_within_limit(facts: Sequence[Fact]) -> int:
    """How many of these launches, from the first on, surely fit into one content."""
    size, texts = 16, set[str]()
    for count, fact in enumerate(facts):
        # No integer takes more than five bytes, nor does the head of a text.
        size += 4 * 5 + sum(len(text.encode()) + 5 for text in {*fact} - texts)
        texts.update(fact)
        if size > CONTENT_LIMIT:
            return count
    return len(facts)


def digest_of(facts: Sequence[Fact]) -> bytes:
    """Digest of these launches, whatever their order: 16 bytes."""
    return hashlib.blake2b(pack(sorted(facts)), digest_size=16).digest()


def unpack(content: bytes) -> tuple[Fact, ...]:
    """Inverse of :func:`pack`, for bytes that nobody vouches for.

    Raises:
        ValueError: this is not exactly what ``pack`` writes.
    """
    unpacker = msgpack.Unpacker(
        None,
        max_buffer_size=len(content),
        max_str_len=TEXT_LIMIT,
        max_array_len=0,
        max_map_len=0,
        max_bin_len=0,
        max_ext_len=0,
        strict_map_key=True,
    )
    unpacker.feed(content)
    values: list[Any] = []
    try:
        for value in unpacker:
            if type(value) is not str and type(value) is not int:
                raise ValueError(f"it holds a {type(value).__name__} where only text and integers may stand")
            values.append(value)
    except msgpack.exceptions.UnpackException as error:
        raise ValueError(f"it is no MessagePack ({type(error).__name__})") from None
    if unpacker.tell() != len(content):
        raise ValueError(f"it ends in the middle of a value, after {unpacker.tell()} of {len(content)} bytes")
    count = values[0] if values and type(values[0]) is int else -1
    texts, places = values[1 : 1 + count], values[1 + count :]
    if not 0 < count < len(values) or len(places) % 4 or not places:
        raise ValueError("its counts do not fit")
    if any(type(text) is not str for text in texts) or texts != sorted(set(texts)):
        raise ValueError("its texts are not sorted, each once")
    if any(type(place) is not int or not 0 <= place < count for place in places):
        raise ValueError("it points to a text that it does not hold")
    names = [texts[place] for place in places]
    return tuple((names[i], names[i + 1], names[i + 2], names[i + 3]) for i in range(0, len(names), 4))
