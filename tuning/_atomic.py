"""Write a file whole or not at all: the one recipe, for tables, manifests and what lies in checkpoints."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from pathlib import Path

__all__ = ["write_atomically"]


def write_atomically(path: Path, data: bytes) -> None:
    """Write or replace a file: a reader sees the old bytes or the new, and with several writers the last one wins.

    A symbolic link stays one: what it points to is written.

    The bytes are on the disk when this returns, and so is the name, where the file system can say so.

    Raises:
        OSError: it cannot be written; the file that was there is as it was, and nothing else is left.
    """
    # Beside the target, for a rename is atomic only within one file system; hidden and with another suffix, so that no
    # reader takes it for the file. The mode is that of any new file: what the umask leaves.
    path = Path(os.path.realpath(path))
    if path.exists() and not path.is_file():
        # A rename would put a file in the place of a device, such as /dev/null.
        raise OSError(errno.EINVAL, "not a regular file", os.fspath(path))
    temporary = path.parent / f".{secrets.token_hex(16)}.tmp"
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    with contextlib.suppress(OSError):  # some network file systems cannot sync a folder; the data itself is synced
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
