"""Journals: what record mode measured, written so that nothing but a broken disk can lose it, and read with suspicion.

**One file per rank and process.** A file is named ``<prefix>.rank<N>.<host>.<pid>.<token>.journal``, the token being
random, and created with ``O_CREAT | O_EXCL``. So two processes of one rank, a restart into the same prefix, a forked
child, and hosts that share a network file system never write into one file, and neither a lock file nor a rename is
needed, which such file systems carry out badly. The alternatives, one file per rank or one per run, need either.

**One frame per key.** A file is a sequence of checksummed frames (:mod:`tuning._journal_frames`) with MessagePack
bodies (:mod:`tuning._journal_bodies`): first the schema version and the environment, then one frame for each record,
written by one ``os.write`` on an ``O_APPEND`` descriptor as the key completes. Alternatives weighed: JSON lines
(floats survive, but neither length nor checksum, so that a torn line and a damaged one look alike); one MessagePack
map rewritten per key (needs a rename, and costs more with each key); SQLite (locks: unsafe on network file systems).

**What is promised.** Death of the process at any instant loses at most the frame in flight: no byte waits in a Python
buffer. Each frame is followed by ``fdatasync`` (the new file by ``fsync`` of its folder), so after a power loss too all
frames but the one in flight are there, as far as the file system keeps its word. It costs some milliseconds for each
key, which took a benchmark of all its candidates, and on network file systems it is also what brings a full disk to
light in time. A frame that cannot be written whole is taken back, so the file stays valid.

A file that is deleted while it is written would take its records along in silence: the descriptor goes on to work. So
the writer looks before each frame, and when it is closed, whether its file still has a name, and else writes all that
the file holds into a new one and says so. One that somebody cut off, or whose handle a server of a network file system
forgot, has lost its records; that is said, and the recording goes on in a new file. One that was moved is written where
it is.

**Reading.** A *torn tail* is what a death or a power loss leaves of the last frame: a part of it, or zeros where the
rest was allocated and never written. It is tolerated and counted. Anything else is damage and an error that names the
offset, above all a bad frame with another frame behind it. Bodies are checked field by field, lengths before anything
is allocated; nothing is unpickled or evaluated.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import logging
import os
import stat
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from tuning._journal_bodies import (
    SCHEMA_VERSION,
    Malformed,
    decode,
    encode_environment,
    encode_record,
)
from tuning._journal_files import SUFFIX, close, create, find_journals, look_at, sync, sync_folder
from tuning._journal_frames import bodies, pack_frame
from tuning._journal_measurements import Measurement
from tuning.errors import JournalError
from tuning.spec import Environment, TuningRecord

__all__ = [
    "SCHEMA_VERSION",
    "SUFFIX",
    "Journal",
    "JournalWriter",
    "Scan",
    "find_journals",
    "read_journal",
    "scan_journal",
]

_log = logging.getLogger("tuning.journal")


@dataclass(frozen=True)
class Journal:
    """What one journal file holds.

    Attributes:
        path: of the file.
        environment: where it was recorded; ``Environment(arch="")`` where the process died before that was written.
        records: in the order in which they were written.
        torn_bytes: bytes at the end that are the remains of a frame whose writing was interrupted.
        content: a digest of the frames, equal for copies of one file; empty where it was not read from one.
    """

    path: str
    environment: Environment
    records: tuple[TuningRecord, ...]
    torn_bytes: int = 0
    content: str = ""

    @property
    def measurements(self) -> tuple[Measurement, ...]:
        """The records in the form in which a scan gives them."""
        return tuple(map(Measurement.of, self.records))


@dataclass(frozen=True)
class Scan:
    """A journal without objects for its records: what reading thousands of files for a merge needs.

    Attributes:
        path, environment, torn_bytes, content: as in :class:`Journal`.
        measurements: the records, as they stand in the file.
    """

    path: str
    environment: Environment
    measurements: tuple[Measurement, ...]
    torn_bytes: int = 0
    content: str = ""


class JournalWriter:
    """Writes the journal of this process. Safe to use from several threads, and across a fork.

    The file is created here, so that what cannot be written is found before anything depends on it; a process that
    records nothing leaves a journal without records.

    Args:
        prefix: path prefix of the file. Its folder is created where it is missing. An existing folder, or a prefix
            that ends with a slash, means files inside that folder.
        environment: what to write at the head of the file; what is not known yet may follow by :meth:`describe`.

    Raises:
        JournalError: the file cannot be created; nothing is left behind.
    """

    def __init__(self, prefix: str, environment: Environment) -> None:
        # Made absolute, slash at the end and all: a child process may open its own file after a change of folder.
        self._prefix = os.path.join(os.getcwd(), os.fspath(prefix))
        self._environment = environment
        self._lock = threading.Lock()
        self._closed = False
        self._fd: int | None = None
        self._path = ""
        self._end = 0
        self._open()
        _writers.add(self)

    @property
    def path(self) -> str:
        """Path of the file being written; after a fork, in the child, empty until it writes to a file of its own."""
        return self._path

    def write(self, record: TuningRecord) -> None:
        """Append one record; it is on its way to the disk when this returns.

        Times that are not finite numbers from 0 up are written as failures. Error texts are brought to one line and
        at most 1,000 characters. A record that is too long, or whose specialization cannot be written, is written
        without its slower candidates and without that, with a note and a warning that say so.

        Raises:
            JournalError: the journal is closed, the record holds what a journal cannot (it is ``permanent`` then), or
                the file cannot be written (disk full, quota). What was written before stays valid, and a later call
                tries again.
        """
        body, left_out = encode_record(record, self._path)
        with self._lock:
            self._write_frame(pack_frame(body))
        if left_out:
            _log.warning("journal %s: %s [%s]: %s", self._path, record.kernel.qualified_name, record.key, left_out)

    def describe(self, environment: Environment) -> None:
        """Say better where the records are taken than was known when the file was created.

        A process that may not touch its device yet can open its journal without arch and device, and give them here
        before its first record. A reader takes the last environment of a file as that of all its records.

        Raises:
            JournalError: as for :meth:`write`.
        """
        frame = pack_frame(encode_environment(environment, self._path))
        with self._lock:
            self._environment = environment
            self._write_frame(frame)

    def close(self, *, discard: bool = False) -> None:
        """Close the file, and remove it if ``discard``. Nothing is lost without it; closing twice does nothing."""
        with self._lock:
            if not discard and self._fd is not None:
                try:
                    self._keep_file(self._fd)
                except JournalError as error:
                    _log.warning("%s", error.message)
            self._closed = True
            self._release()
        _writers.discard(self)
        if discard and self._path:
            Path(self._path).unlink(missing_ok=True)

    def __enter__(self) -> JournalWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<JournalWriter {self._path!r}{' closed' if self._closed else ''}>"

    def _write_frame(self, frame: bytes) -> None:
        if self._closed:
            raise JournalError(f"journal {self._path} is closed: open another JournalWriter", file=self._path)
        try:
            self._append(self._open() if self._fd is None else self._keep_file(self._fd), frame)
        except JournalError as error:
            # The server forgot the file between the look at it and the write: known only now.
            if self._fd is not None or getattr(error.__cause__, "errno", None) != errno.ESTALE:
                raise
            self._append(self._open(), frame)

    def _open(self, head: bytes = b"") -> int:
        head = head or pack_frame(encode_environment(self._environment, self._prefix))
        fd, self._path = create(self._prefix, self._environment.rank)
        self._fd, self._end = fd, 0
        # Also closes the descriptor when the writer is collected or the interpreter exits.
        self._finalizer = weakref.finalize(self, close, fd)
        try:
            self._append(fd, head)
            sync_folder(os.path.dirname(self._path))
        except BaseException:
            self._release()
            with contextlib.suppress(OSError):
                os.unlink(self._path)
            raise
        return fd

    def _keep_file(self, fd: int) -> int:
        """The descriptor to write to: that of a new file where ours has been deleted or cut off by somebody."""
        try:
            fate, held = look_at(fd, self._path, self._end)
        except OSError as error:
            raise JournalError(
                f"journal {self._path}: cannot be looked at: {error.strerror}; what was recorded before is kept where "
                "the file system kept it, and the next record tries again",
                file=self._path,
            ) from error
        if not fate:
            return fd
        before = path, _, finalizer = self._path, self._end, self._finalizer
        try:
            fresh = self._open(held)
        except JournalError as error:
            self._fd, (self._path, self._end, self._finalizer) = fd, before
            raise JournalError(
                f"journal {path} {fate} while it was written, and {error.message}",
                file=path,
            ) from error
        finalizer()
        _log.warning(
            "journal %s %s while it was written: %s %s",
            path,
            fate,
            "going on, without what it held, in" if not held else "all that it held is in",
            self._path,
        )
        return fresh

    def _append(self, fd: int, frame: bytes) -> None:
        try:
            # One call writes it all but where the disk fills up or a signal arrives; then the rest is tried.
            written = os.write(fd, frame)
            while written < len(frame):
                written += os.write(fd, frame[written:])
            sync(fd)
            self._end += len(frame)
        except OSError as error:
            self._take_back(fd)
            raise JournalError(
                f"journal {self._path}: cannot write a frame of {len(frame)} bytes at offset {self._end}: "
                f"{error.strerror}; what was recorded before is kept, free space or choose another record_path",
                file=self._path,
                offset=self._end,
            ) from error
        except BaseException:
            # Ctrl-C: whether all of it was written is not known.
            self._take_back(fd)
            raise

    def _take_back(self, fd: int) -> None:
        try:
            os.ftruncate(fd, self._end)
        except OSError:
            # A torn frame may stand there: it must stay the last one of its file, so the next record opens another.
            _log.warning("journal %s: cannot be cut back to offset %d, going on in a new file", self._path, self._end)
            self._release()

    def _release(self) -> None:
        if self._fd is not None:
            self._fd = None
            self._finalizer()

    def _after_fork_in_child(self) -> None:
        # The parent goes on writing to its file. The lock may have been held by a thread that does not exist here.
        self._lock = threading.Lock()
        self._release()
        self._path = ""


_writers: weakref.WeakSet[JournalWriter] = weakref.WeakSet()


def _leave_parents_files() -> None:
    for writer in list(_writers):
        writer._after_fork_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_parents_files)


def read_journal(path: str | os.PathLike[str]) -> Journal:
    """Read a journal, also one that is being written.

    Raises:
        JournalError: there is no such file, it is no journal, a newer version wrote it, or it is damaged other than by
            a torn tail; ``offset`` says where.
    """
    scan = scan_journal(path)
    records = tuple(measurement.record() for measurement in scan.measurements)
    return Journal(scan.path, scan.environment, records, scan.torn_bytes, scan.content)


def scan_journal(path: str | os.PathLike[str]) -> Scan:
    """Read and check a journal as :func:`read_journal` does, at a third of the cost.

    Raises:
        JournalError: as there.
    """
    name = os.fspath(path)
    environment: Environment | None = None
    measurements: list[Measurement] = []
    content = hashlib.blake2b(digest_size=16)
    torn = 0
    try:
        # Looked at before it is opened: opening a named pipe would wait for a writer that may never come.
        if not stat.S_ISREG(os.stat(name).st_mode):
            raise JournalError(f"journal {name}: is no regular file", file=name)
        with open(name, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            for offset, body, header in bodies(file, size, name):
                content.update(header)  # which has the body's checksum
                if body is None:
                    torn = size - offset
                    break
                item = _decode(body, name, offset)
                if isinstance(item, Environment):
                    environment = item
                elif environment is None:
                    raise JournalError(f"journal {name}: does not start with its environment", file=name, offset=offset)
                else:
                    measurements.append(item)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise JournalError(f"journal {name}: cannot be read: {reason}", file=name) from error
    return Scan(name, environment or Environment(arch=""), tuple(measurements), torn, content.hexdigest())


def _decode(body: bytes, name: str, offset: int) -> Environment | Measurement:
    try:
        return decode(body)
    except Malformed as error:
        raise JournalError(
            f"journal {name}: the frame at offset {offset} is not of this schema: {error}; "
            "leave the file out, or record again",
            file=name,
            offset=offset,
        ) from error
