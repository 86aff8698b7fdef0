"""The files of journals: made so that no two processes have one, and brought to the disk."""

from __future__ import annotations

import errno
import logging
import os
import re
import secrets
import socket

from tuning.errors import JournalError

__all__ = ["SUFFIX", "create", "sync", "sync_folder"]

SUFFIX = ".journal"
"""Ending of every journal's name."""

_log = logging.getLogger("tuning.journal")


def create(prefix: str, rank: int) -> tuple[int, str]:
    """Create a file that no other process has, and its folder; its descriptor and its path.

    Raises:
        JournalError: it cannot be created.
    """
    inside = prefix.endswith(("/", os.sep)) or os.path.isdir(prefix)
    folder = prefix if inside else os.path.dirname(prefix)
    start = "" if inside else os.path.basename(prefix) + "."
    host = re.sub(r"[^A-Za-z0-9_-]", "_", socket.gethostname())[:64] or "host"
    path = folder
    try:
        if folder:
            os.makedirs(folder, exist_ok=True)
        while True:
            name = f"{start}rank{rank}.{host}.{os.getpid()}.{secrets.token_hex(4)}{SUFFIX}"
            path = os.path.join(folder, name)
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | getattr(os, "O_CLOEXEC", 0)
            try:
                return os.open(path, flags, 0o666), path
            except FileExistsError:
                continue
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise JournalError(
            f"journal {path}: cannot be created: {reason}; give a record_path in a folder that can be written",
            file=path,
        ) from error


# Some file systems have no way to synchronise. That is what "as the file system allows" means; it is no failure.
_NO_SYNC = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EROFS)


def sync(fd: int) -> None:
    """Bring what was written to the disk, as far as the file system can."""
    try:
        getattr(os, "fdatasync", os.fsync)(fd)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise


def sync_folder(folder: str) -> None:
    """Bring a new file's name to the disk, as far as the file system can."""
    try:
        fd = os.open(folder or ".", os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(fd)
    except OSError:
        _log.debug("folder %s cannot be synchronised", folder)
    finally:
        os.close(fd)
