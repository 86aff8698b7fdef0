"""Read what somebody names within bounds: files of a limited size, and JSON of a limited number of values."""

from __future__ import annotations

import errno
import os
import stat

__all__ = ["count_values", "read_regular"]


def read_regular(path: str | os.PathLike[str], most: int) -> bytes:
    """The bytes of a regular file; of one that is longer than ``most`` bytes, the first ``most`` and one.

    Raises:
        OSError: there is no such file, it cannot be read, or it is a device, a pipe or a folder: such may have no end,
            or nobody who writes.
        ValueError: the path holds a NUL.
    """
    # Looked at before it is opened: opening a named pipe would wait for a writer that may never come.
    mode = os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    with open(path, "rb") as stream:
        return stream.read(most + 1)


def count_values(data: bytes) -> int:
    """At most so many values are in this JSON text; memory goes by them more than by bytes."""
    return 1 + data.count(b"[") + data.count(b"{") + data.count(b",")
