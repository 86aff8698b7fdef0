"""The frames of a journal file: checksummed pieces, and what tells a torn tail from damage.

Each frame is::

    magic  "TTJ1"                   4 bytes; the digit is the version of this layout
    length of the body              4 bytes, little-endian
    CRC-32 of the body              4 bytes
    CRC-32 of the 12 bytes before   4 bytes
    body                            up to 1 MiB
    end mark 0xC1                   1 byte, never zero, so that zeros at the end show a frame that was not finished

The header has a checksum of its own because the length decides where the next frame is looked for: a damaged length
must not pass for a frame that was cut off.
"""

from __future__ import annotations

import errno
import os
import struct
import zlib
from collections.abc import Iterator
from typing import BinaryIO

from tuning.errors import JournalError

__all__ = ["MAX_BODY", "bodies", "pack_frame"]

MAX_BODY = 1 << 20
"""Longest body that is written or read, in bytes: a thousand candidates take a fifth of it."""

_MOST_ZEROS = 64 << 20  # read behind a torn frame, which a file system may have filled up by some blocks

_MAGIC = b"TTJ1"
_HEADER = struct.Struct("<4sIII")
_END = b"\xc1"


def pack_frame(body: bytes) -> bytes:
    """The frame around a body."""
    head = _HEADER.pack(_MAGIC, len(body), zlib.crc32(body), 0)[:12]
    return head + struct.pack("<I", zlib.crc32(head)) + body + _END


def bodies(file: BinaryIO, size: int, name: str) -> Iterator[tuple[int, bytes | None, bytes]]:
    """Offset, body and header of each frame of a file; None as the body of a torn tail."""
    offset = 0
    while offset < size:
        header = file.read(_HEADER.size)
        fault = "no frame starts here"
        if len(header) == _HEADER.size:
            magic, length, body_crc, header_crc = _HEADER.unpack(header)
            if magic == _MAGIC and zlib.crc32(header[:-4]) == header_crc:
                if length > MAX_BODY:
                    raise JournalError(
                        f"journal {name}: the frame at offset {offset} says {length} bytes, more than {MAX_BODY}",
                        file=name,
                        offset=offset,
                    )
                body = file.read(length + 1)
                if len(body) > length and body.endswith(_END) and zlib.crc32(body[:-1]) == body_crc:
                    yield offset, body[:-1], header
                    offset += _HEADER.size + length + 1
                    continue
                fault = "the checksum of this frame is wrong"
        file.seek(offset)
        if not _is_torn(file, size - offset):
            hint = "" if offset else " (is it a journal at all?)"
            raise JournalError(
                f"journal {name}: damaged at offset {offset}: {fault}{hint}; "
                "restore the file from a copy, or leave it out",
                file=name,
                offset=offset,
            )
        yield offset, None, b""
        return


def _valid_header(header: bytes) -> bool:
    return header[:4] == _MAGIC and zlib.crc32(header[:12]) == int.from_bytes(header[12:16], "little")


def _is_torn(file: BinaryIO, size: int) -> bool:
    """Whether the ``size`` bytes from here on are what an interrupted write leaves of one frame."""
    start = file.tell()
    rest = file.read(min(size, _HEADER.size + MAX_BODY + 1))
    # Only zeros may follow the longest frame.
    if not _is_empty(file.fileno(), start + len(rest), start + size):
        return False
    written = rest.rstrip(b"\0")
    if len(written) < len(_MAGIC):
        return _MAGIC.startswith(written)
    if not written.startswith(_MAGIC) or _holds_header(rest[1:]):
        return False
    if len(written) <= _HEADER.size and not _valid_header(rest[: _HEADER.size]):
        # Cut inside the header: its checksum, which ends it, is not there. One that is there must be right.
        return len(written) < _HEADER.size
    if not _valid_header(rest[: _HEADER.size]):
        return False
    # The end mark is never zero: a frame that was written to its end has it, and then its checksum should be right.
    length: int = _HEADER.unpack(rest[: _HEADER.size])[1]
    return len(written) < _HEADER.size + length + 1


def _is_empty(fd: int, at: int, end: int) -> bool:
    """Whether the bytes from ``at`` to ``end`` are zeros; not where they are too many to look at.

    Holes are skipped, as long as they may be: a file is easily made longer than any disk.
    """
    read = 0
    while at < end and read < _MOST_ZEROS:
        if hasattr(os, "SEEK_DATA"):
            try:
                at = os.lseek(fd, at, os.SEEK_DATA)
            except OSError as error:
                if error.errno == errno.ENXIO:  # nothing but a hole up to the end
                    return True
                if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that does not say
                    raise
        piece = os.pread(fd, min(end - at, MAX_BODY), at)
        if not piece or piece.count(0) != len(piece):
            return at >= end
        at += len(piece)
        read += len(piece)
    return at >= end


def _holds_header(data: bytes) -> bool:
    at = data.find(_MAGIC)
    while at >= 0:
        if _valid_header(data[at : at + _HEADER.size]):
            return True
        at = data.find(_MAGIC, at + 1)
    return False
