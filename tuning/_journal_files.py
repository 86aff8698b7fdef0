"""The files of journals: made so that no two processes have one, brought to the disk, and found again."""

from __future__ import annotations

import contextlib
import errno
import glob
import logging
import os
import re
import secrets
import socket
from collections.abc import Iterable

from tuning.errors import JournalError

__all__ = ["SUFFIX", "close", "create", "find_journals", "look_at", "sync", "sync_folder", "token"]

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


def token(path: str) -> str:
    """What no two processes have in the names of their journals; empty of a file that was given another name."""
    found = re.search(r"\.(\d+\.[0-9a-f]{8})\.journal$", os.path.basename(path))
    return found[1] if found else ""


def find_journals(arguments: Iterable[str | os.PathLike[str]]) -> tuple[str, ...]:
    """Expand what a user names into journal files, sorted, each once.

    An argument is a file, a folder (all journals in it), a glob, or the prefix that was given as ``record_path``.

    Raises:
        JournalError: an argument leads to no file.
    """
    found: dict[str, str] = {}
    for item in arguments:
        argument = os.fspath(item)
        if os.path.isfile(argument):
            paths = [argument]
        else:
            # A folder and a prefix may have one name: the prefix meant the files beside a folder made later.
            escaped = glob.escape(argument)
            paths = glob.glob(f"{escaped}.rank*{SUFFIX}") + glob.glob(os.path.join(escaped, f"*{SUFFIX}"))
            if not paths and glob.has_magic(argument):
                paths = [path for path in glob.glob(argument, recursive=True) if os.path.isfile(path)]
        if not paths:
            raise JournalError(
                f"no journal at {argument}: expected a file, a folder with *{SUFFIX} files, a glob, "
                "or the prefix given as record_path",
                file=argument,
            )
        for path in paths:
            file = os.path.realpath(path)
            found[file] = min(path, found.get(file, path), key=lambda name: (len(name), name))
    return tuple(sorted(found.values()))


def look_at(fd: int, path: str, end: int) -> tuple[str, bytes]:
    """What became of a journal while it was written, in words, and the ``end`` bytes that it held where they are known.

    Both are empty where it can be written on.

    Raises:
        OSError: that cannot be found out now.
    """
    try:
        status = os.fstat(fd)
        if status.st_size < end:
            return "was cut off", b""
        if status.st_nlink and not _is_renamed_away(status, path):
            return "", b""
        return "was deleted", os.pread(fd, end, 0)
    except OSError as error:
        if error.errno != errno.ESTALE:
            raise
        return "was forgotten by the server of its file system", b""


def _is_renamed_away(status: os.stat_result, path: str) -> bool:
    """Whether the file was deleted on this client of an NFS server, which renames it until it is closed."""

    def is_it(name: str) -> bool:
        found = os.stat(name)
        return (found.st_dev, found.st_ino) == (status.st_dev, status.st_ino)

    try:
        if is_it(path):
            return False
    except FileNotFoundError:
        pass
    except OSError:  # its folder cannot be looked into, which says nothing about the file
        return False
    for name in glob.glob(os.path.join(glob.escape(os.path.dirname(path)), ".nfs*")):
        with contextlib.suppress(OSError):
            if is_it(name):
                return True
    return False


def close(fd: int) -> None:
    """Close a journal's file. All that it holds was brought to the disk before, so a failure loses nothing."""
    with contextlib.suppress(OSError):
        os.close(fd)


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
