"""Journals: what is written comes back, what cannot be written or read says so, and nothing is lost on the way."""

from __future__ import annotations

import errno
import json
import logging
import math
import os
import re
import secrets
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from recordings import config, environment, record

from tuning._journal_bodies import MAX_ITEMS
from tuning._journal_frames import MAX_BODY, pack_frame
from tuning.errors import JournalError
from tuning.journal import JournalWriter, find_journals, read_journal, scan_journal
from tuning.spec import CandidateTiming, Environment, Kernel, Key, LaunchConfig, TuningRecord

RECORDS = (
    record({16: 0.3, 32: 0.1, 64: None}),
    record(
        {16: (0.1, 0.05, 1 / 3), 32: (5e-324, 0.0, 1.7976931348623157e308)},
        kernel="pkg.module.outer.<locals>.kernel",
        source=None,
        key=Key.of({"n": True, "f": -0.0, "t": (1, None, "é")}, {"x": "torch.int8", "a": "fp8"}, ["a", "x"]),
        shared=True,
        specialization={"x": [16, True], "scale": 0.5},
        note="depends on `eps`, which is not in the key",
    ),
    record({config(1, warps=8, num_ctas=2, maxnreg=64, ir_override="a.ttgir", extra={"waves_per_eu": 2}): 1.0}),
    record({16: None, 32: None}),
    record({16: 1.0}, winner=128),  # a winner that was not timed
    record({}, winner=16),
)


def written(folder: Path, *records: TuningRecord) -> tuple[Path, bytes]:
    with JournalWriter(str(folder / "rec"), environment()) as writer:
        for item in records:
            writer.write(item)
    path = Path(writer.path)
    return path, path.read_bytes()


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    path, _ = written(tmp_path, *RECORDS)
    journal = read_journal(path)
    assert journal.records == RECORDS
    assert journal.environment == environment()
    assert (journal.path, journal.torn_bytes) == (str(path), 0)
    assert journal.records[1].key.call_order == ("a", "x")
    assert [str(item.key.values) for item in journal.records] == [str(item.key.values) for item in RECORDS]
    assert math.copysign(1, RECORDS[1].timings[1].times_ms[1]) == 1  # type: ignore[index]


def test_a_scan_gives_the_same_records(tmp_path: Path) -> None:
    path, _ = written(tmp_path, *RECORDS)
    assert tuple(item.record() for item in scan_journal(path).measurements) == RECORDS
    assert tuple(item.record() for item in read_journal(path).measurements) == RECORDS


def test_equal_identities_of_different_files_are_one_object(tmp_path: Path) -> None:
    paths = [written(tmp_path, RECORDS[0])[0] for _ in range(2)]
    first, second = (scan_journal(path).measurements[0].identity for path in paths)
    assert first is second


def test_each_record_is_on_disk_when_write_returns(tmp_path: Path) -> None:
    with JournalWriter(str(tmp_path / "rec"), environment()) as writer:
        for count, item in enumerate(RECORDS, 1):
            writer.write(item)
            assert read_journal(writer.path).records == RECORDS[:count]


def test_a_record_is_one_write_and_is_synchronised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    write, sync = os.write, os.fdatasync

    def counted_write(fd: int, data: bytes) -> int:
        calls.append("write")
        return write(fd, data)

    def counted_sync(fd: int) -> None:
        calls.append("sync")
        sync(fd)

    with JournalWriter(str(tmp_path / "rec"), environment()) as writer:
        monkeypatch.setattr(os, "write", counted_write)
        monkeypatch.setattr(os, "fdatasync", counted_sync)
        writer.write(RECORDS[0])
    assert calls == ["write", "sync"]


def test_a_file_system_that_cannot_synchronise_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(fd: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "fdatasync", refuse)
    monkeypatch.setattr(os, "fsync", refuse)
    path, _ = written(tmp_path, RECORDS[0])
    assert read_journal(path).records == RECORDS[:1]


# ------------------------------------------------------------------------------------------------------------ files


def test_the_file_exists_before_anything_is_recorded(tmp_path: Path) -> None:
    path, _ = written(tmp_path / "new" / "folder")
    assert read_journal(path).records == ()
    assert re.fullmatch(r"rec\.rank0\.[\w-]+\.\d+\.[0-9a-f]{8}\.journal", path.name)
    assert f".{os.getpid()}." in path.name


def test_writers_with_one_prefix_never_share_a_file(tmp_path: Path) -> None:
    writers = [JournalWriter(str(tmp_path / "rec"), environment()) for _ in range(20)]
    assert len({writer.path for writer in writers}) == 20
    for writer in writers:
        writer.close()


def test_a_name_that_is_taken_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = iter(["aaaaaaaa", "aaaaaaaa", "bbbbbbbb"])
    monkeypatch.setattr(secrets, "token_hex", lambda size: next(tokens))
    first, before = written(tmp_path, *RECORDS)
    second, _ = written(tmp_path)
    assert first != second
    assert first.read_bytes() == before


def test_the_umask_decides_who_may_read(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        path, _ = written(tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_folder_as_prefix_means_files_inside(tmp_path: Path) -> None:
    for prefix in (str(tmp_path), f"{tmp_path}/fresh/"):
        with JournalWriter(prefix, environment(3)) as writer:
            assert Path(writer.path).parent == Path(prefix)
            assert Path(writer.path).name.startswith("rank3.")
        assert find_journals([prefix]) == (writer.path,)


def test_a_relative_prefix_stays_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with JournalWriter("rec", environment()) as writer:
        monkeypatch.chdir("/")
        writer._after_fork_in_child()
        writer.write(RECORDS[0])
    assert len(find_journals([tmp_path / "rec"])) == 2


@pytest.mark.parametrize("place", ["file/rec", "file/sub/rec", "nul\0byte"])
def test_what_cannot_be_created_is_said_at_once(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(
        JournalError, match=r"cannot be created: .*; give a record_path in a folder that can be"
    ) as info:
        JournalWriter(f"{tmp_path}/{place}", environment())
    assert info.value.file is not None
    assert os.listdir(tmp_path) == ["file"]


def test_a_folder_that_cannot_be_written_is_said_at_once() -> None:
    user = os.geteuid()
    with tempfile.TemporaryDirectory() as name:
        os.chmod(name, 0o555)
        try:
            if user == 0:
                os.seteuid(65534)  # permissions do not hold for root
            with pytest.raises(JournalError, match=r"cannot be created: Permission denied; give a record_path"):
                JournalWriter(f"{name}/rec", environment())
            with pytest.raises(JournalError, match="Permission denied"):
                JournalWriter(f"{name}/new/folder/rec", environment())
        finally:
            os.seteuid(user)
            os.chmod(name, 0o755)
        assert os.listdir(name) == []


def test_a_file_whose_head_cannot_be_written_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "write", fails_with(errno.ENOSPC))
    with pytest.raises(JournalError, match="No space left"):
        JournalWriter(str(tmp_path / "rec"), environment())
    assert os.listdir(tmp_path) == []


def test_an_environment_that_cannot_be_written_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=r"environment\.device must be str"):
        JournalWriter(str(tmp_path / "rec"), environment(device=None))
    assert os.listdir(tmp_path) == []


def test_an_environment_can_be_completed_later(tmp_path: Path) -> None:
    unknown = environment(arch="", device="", multiprocessors=0)
    with JournalWriter(str(tmp_path / "rec"), unknown) as writer:
        assert read_journal(writer.path).environment == unknown
        writer.describe(environment())
        writer.write(RECORDS[0])
        assert read_journal(writer.path).environment == environment()
        writer._after_fork_in_child()
        writer.write(RECORDS[0])
    assert read_journal(writer.path).environment == environment()


def test_a_closed_journal_says_so(tmp_path: Path) -> None:
    path, before = written(tmp_path, RECORDS[0])
    writer = JournalWriter(str(tmp_path / "rec"), environment())
    writer.close()
    writer.close()
    with pytest.raises(JournalError, match="is closed"):
        writer.write(RECORDS[0])
    assert path.read_bytes() == before


def test_threads_write_whole_frames(tmp_path: Path) -> None:
    keys = [[Key.of({"thread": thread, "n": n}) for n in range(25)] for thread in range(8)]
    with JournalWriter(str(tmp_path / "rec"), environment()) as writer:

        def work(mine: list[Key]) -> None:
            for key in mine:
                writer.write(record({16: 1.0, 32: None}, key=key))

        threads = [threading.Thread(target=work, args=(mine,)) for mine in keys]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    found = [item.key for item in read_journal(writer.path).records]
    assert sorted(key.text for key in found) == sorted(key.text for mine in keys for key in mine)


# ------------------------------------------------------------------------------------------------------- full disks


def fails_with(code: int, *, after: int = 0) -> Callable[..., int]:
    """An ``os.write`` that writes ``after`` bytes and then fails."""
    write = os.write
    done = False

    def failing(fd: int, data: bytes) -> int:
        nonlocal done
        if after and not done:
            done = True
            return write(fd, data[:after])
        raise OSError(code, os.strerror(code))

    return failing


@pytest.mark.parametrize("after", [0, 1, 16, 200])
def test_a_frame_that_does_not_fit_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: int) -> None:
    with JournalWriter(str(tmp_path / "rec"), environment()) as writer:
        writer.write(RECORDS[0])
        before = Path(writer.path).read_bytes()
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", fails_with(errno.ENOSPC, after=after))
            with pytest.raises(JournalError, match=r"No space left.*what was recorded before is kept") as info:
                writer.write(RECORDS[1])
        assert Path(writer.path).read_bytes() == before
        assert info.value.file == writer.path
        assert info.value.offset == len(before)
        writer.write(RECORDS[2])
    assert read_journal(writer.path).records == (RECORDS[0], RECORDS[2])


def test_a_short_write_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    with JournalWriter(str(tmp_path / "rec"), environment()) as writer:
        monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[:7]))
        writer.write(RECORDS[1])
    assert read_journal(writer.path).records == (RECORDS[1],)


def test_a_full_disk_that_shows_when_synchronising(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(fd: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with JournalWriter(str(tmp_path / "rec"), environment()) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", late)
            with pytest.raises(JournalError, match="quota"):
                writer.write(RECORDS[0])
        writer.write(RECORDS[1])
    assert read_journal(writer.path).records == (RECORDS[1],)


def test_an_interrupted_write_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(fd: int) -> None:
        raise KeyboardInterrupt

    with JournalWriter(str(tmp_path / "rec"), environment()) as writer:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", interrupted)
            with pytest.raises(KeyboardInterrupt):
                writer.write(RECORDS[0])
        writer.write(RECORDS[1])
    assert read_journal(writer.path).records == (RECORDS[1],)


def test_a_frame_that_cannot_be_taken_back_ends_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(fd: int, size: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with JournalWriter(str(tmp_path / "rec"), environment()) as writer:
        writer.write(RECORDS[0])
        first = writer.path
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "tuning"):
            patch.setattr(os, "write", fails_with(errno.ENOSPC, after=50))
            patch.setattr(os, "ftruncate", refuse)
            with pytest.raises(JournalError):
                writer.write(RECORDS[1])
        writer.write(RECORDS[2])
        assert writer.path != first
    assert "going on in a new file" in caplog.text
    torn, fresh = read_journal(first), read_journal(writer.path)
    assert (torn.records, torn.torn_bytes) == (RECORDS[:1], 50)
    assert fresh.records == (RECORDS[2],)


FILE_SIZE_LIMIT = """
import resource, sys
sys.path.insert(0, sys.argv[2])
from recordings import environment, record
from tuning.errors import JournalError
from tuning.journal import JournalWriter, read_journal
from tuning.spec import Key
writer = JournalWriter(sys.argv[1], environment())
resource.setrlimit(resource.RLIMIT_FSIZE, (5000, resource.RLIM_INFINITY))
kept = failed = 0
for n in range(40):
    try:
        writer.write(record({16: 1.0, 32: 2.0}, key=Key.of({"n": n})))
        kept += 1
    except JournalError as error:
        assert "File too large" in str(error), error
        failed += 1
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
writer.write(record({16: 1.0}))
journal = read_journal(writer.path)
print(kept, failed, len(journal.records), journal.torn_bytes)
"""


def test_a_real_limit_of_the_file_system(tmp_path: Path) -> None:
    # The kernel writes the part that still fits and refuses the rest, as it does on a full disk.
    tests = Path(__file__).parents[1]
    command = [sys.executable, "-c", FILE_SIZE_LIMIT, str(tmp_path / "rec"), str(tests)]
    result = subprocess.run(command, cwd=tests.parent, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    kept, failed, read, torn = map(int, result.stdout.split())
    assert kept > 0
    assert failed == 40 - kept > 0
    assert (read, torn) == (kept + 1, 0)


# ------------------------------------------------------------------------------------ files that others take away


@pytest.mark.parametrize("way", ["file", "folder", "replaced"])
def test_a_deleted_journal_is_written_anew_with_all_that_it_held(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, way: str
) -> None:
    folder = tmp_path / "journals"
    with JournalWriter(f"{folder}/rec", environment(3)) as writer:
        writer.write(RECORDS[0])
        first = writer.path
        if way == "file":
            os.unlink(first)
        elif way == "folder":
            shutil.rmtree(folder)
        else:
            (folder / "other").write_bytes(b"")
            os.replace(folder / "other", first)
        with caplog.at_level(logging.WARNING, "tuning"):
            writer.write(RECORDS[1])
            writer.write(RECORDS[2])
        assert writer.path != first
    (said,) = caplog.messages
    assert said == f"journal {first} was deleted while it was written: all that it held is in {writer.path}"
    found = read_journal(writer.path)
    assert (found.records, found.environment, found.torn_bytes) == (RECORDS[:3], environment(3), 0)


def test_a_journal_deleted_after_its_last_record_is_written_anew_at_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with JournalWriter(f"{tmp_path}/rec", environment()) as writer:
        writer.write(RECORDS[0])
        os.unlink(writer.path)
    assert "all that it held is in" in caplog.text
    assert read_journal(writer.path).records == RECORDS[:1]


def test_a_deleted_journal_that_cannot_be_written_anew_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "journals"
    with JournalWriter(f"{folder}/rec", environment()) as writer:
        writer.write(RECORDS[0])
        shutil.rmtree(folder)
        folder.write_text("a file")
        with pytest.raises(JournalError, match=r"was deleted while it was written, and .* cannot be created"):
            writer.write(RECORDS[1])
        folder.unlink()
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", fails_with(errno.ENOSPC))
            with pytest.raises(JournalError, match="No space left"):
                writer.write(RECORDS[1])
        assert os.listdir(folder) == []
        writer.write(RECORDS[2])  # the next one tries again, and nothing has been lost
        assert read_journal(writer.path).records == (RECORDS[0], RECORDS[2])
        shutil.rmtree(folder)
        folder.write_text("a file")
    assert "was deleted while" in caplog.text  # closing does not raise
    assert os.listdir(tmp_path) == ["journals"]


def test_a_discarded_journal_that_was_deleted_is_not_written_anew(tmp_path: Path) -> None:
    writer = JournalWriter(f"{tmp_path}/rec", environment())
    os.unlink(writer.path)
    writer.close(discard=True)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("left", [0, 10, 300])
def test_a_journal_that_somebody_cut_off_goes_on_in_a_new_file(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, left: int
) -> None:
    with JournalWriter(f"{tmp_path}/rec", environment()) as writer:
        writer.write(RECORDS[0])
        first = writer.path
        os.truncate(first, left)
        writer.write(RECORDS[1])
    assert "was cut off while it was written: going on, without what it held, in" in caplog.text
    assert read_journal(writer.path).records == RECORDS[1:2]
    assert read_journal(first).records == ()


def test_a_journal_that_was_moved_is_written_where_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with JournalWriter(f"{tmp_path}/rec", environment()) as writer:
        writer.write(RECORDS[0])
        os.rename(writer.path, tmp_path / "moved.journal")
        writer.write(RECORDS[1])
    assert not caplog.messages
    assert os.listdir(tmp_path) == ["moved.journal"]
    assert read_journal(tmp_path / "moved.journal").records == RECORDS[:2]


def refuses(code: int, descriptor: int, call: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(fd: int, *rest: Any) -> Any:
        if fd == descriptor:
            raise OSError(code, os.strerror(code))
        return call(fd, *rest)

    return refuse


@pytest.mark.parametrize("calls", [("fstat",), ("write", "ftruncate", "fdatasync", "close")])
def test_a_file_that_its_server_forgot_goes_on_in_a_new_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, calls: tuple[str, ...]
) -> None:
    with JournalWriter(f"{tmp_path}/rec", environment()) as writer:
        writer.write(RECORDS[0])
        first, descriptor = writer.path, writer._fd
        assert descriptor is not None
        with monkeypatch.context() as patch:
            for name in calls:
                patch.setattr(os, name, refuses(errno.ESTALE, descriptor, getattr(os, name)))
            writer.write(RECORDS[1])
        writer.write(RECORDS[2])
    assert writer.path != first
    assert read_journal(first).records == RECORDS[:1]
    assert read_journal(writer.path).records == RECORDS[1:3]
    assert len(caplog.messages) == 1


@pytest.mark.parametrize("call", ["fstat", "pread"])
def test_a_file_that_cannot_be_looked_at_is_an_error_and_may_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    with JournalWriter(f"{tmp_path}/rec", environment()) as writer:
        writer.write(RECORDS[0])
        if call == "pread":
            os.unlink(writer.path)
        descriptor = writer._fd
        assert descriptor is not None
        with monkeypatch.context() as patch:
            patch.setattr(os, call, refuses(errno.EIO, descriptor, getattr(os, call)))
            with pytest.raises(JournalError, match="cannot be looked at: Input/output error") as info:
                writer.write(RECORDS[1])
        assert (info.value.file, info.value.permanent) == (writer.path, False)
        writer.write(RECORDS[1])
    assert read_journal(writer.path).records == RECORDS[:2]


def test_a_journal_deleted_on_a_client_that_renames_it_is_written_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with JournalWriter(f"{tmp_path}/rec", environment()) as writer:
        writer.write(RECORDS[0])
        first = writer.path
        os.rename(first, tmp_path / ".nfs000000000000a1b200000001")
        writer.write(RECORDS[1])
    assert caplog.messages == [
        f"journal {first} was deleted while it was written: all that it held is in {writer.path}"
    ]
    assert read_journal(writer.path).records == RECORDS[:2]


def test_a_forked_child_discards_no_file_of_its_parent(tmp_path: Path) -> None:
    with JournalWriter(f"{tmp_path}/rec", environment()) as writer:
        writer.write(RECORDS[0])
        first = writer.path
        if (child := os.fork()) == 0:
            writer.close(discard=True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        writer.write(RECORDS[1])
        assert writer.path == first
    assert read_journal(first).records == RECORDS[:2]


# ------------------------------------------------------------------------------------- what a record may not hold


def test_times_that_are_no_times_become_failures(tmp_path: Path) -> None:
    times = [(math.inf,) * 3, (math.nan, 1.0, 1.0), (-1.0,), ()]
    odd = tuple(CandidateTiming(config(16 << index), values) for index, values in enumerate(times))
    good = CandidateTiming(config(8), (1.0, 0.5, 2.0))
    path, _ = written(tmp_path, TuningRecord(Kernel("pkg.k"), Key.of({}), "sm90", (*odd, good), good.config))
    found = read_journal(path).records[0].timings
    assert [item.times_ms for item in found] == [None, None, None, None, (1.0, 0.5, 2.0)]
    assert [item.error for item in found][:2] == [
        "times (inf, inf, inf) are no finite numbers from 0 up",
        "times (nan, 1.0, 1.0) are no finite numbers from 0 up",
    ]


def test_error_texts_become_one_line_of_bounded_length(tmp_path: Path) -> None:
    texts = ["two\nlines\tand \x1b[31mcolour", "x" * 5000, "half of a pair: \ud800"]
    timings = tuple(CandidateTiming(config(16 << index), None, text) for index, text in enumerate(texts))
    path, _ = written(tmp_path, TuningRecord(Kernel("pkg.k"), Key.of({}), "sm90", timings, timings[0].config))
    found = [item.error for item in read_journal(path).records[0].timings]
    assert found == ["two lines and \x1b[31mcolour", "x" * 997 + "...", "half of a pair: \\ud800"]


def test_many_long_errors_are_cut_to_fit(tmp_path: Path) -> None:
    timings = tuple(CandidateTiming(config(index), None, "y" * 900) for index in range(1500))
    path, _ = written(tmp_path, TuningRecord(Kernel("pkg.k"), Key.of({}), "sm90", timings, timings[0].config))
    errors = {item.error for item in read_journal(path).records[0].timings}
    assert errors == {"y" * 77 + "..."}


def test_what_a_reader_would_refuse_is_not_written(tmp_path: Path) -> None:
    deep: list[Any] = []
    for _ in range(40):
        deep = [deep]
    good = record({16: 1.0})
    bad = [
        record({16: 1.0}, kernel="../../etc/passwd.x"),
        record({16: 1.0}, kernel="nodots"),
        record({16: 1.0}, arch="../sm90"),
        record({16: 1.0}, arch=""),
        record({16: 1.0}, source="not hex"),
        record({16: 1.0}, key=Key.of({"deep": deep})),
        record({16: 1.0}, key=Key((("n", "1"), ("n", "2")))),
        record({16: 1.0}, key=Key((("n", "not json"),))),
        record({16: 1.0}, key=Key((("n", "1.5"),))),  # a number that is no encoding of a float
        record({16: 1.0}, key=Key((("n", "1" * (MAX_BODY + 1)),))),
    ]
    with JournalWriter(str(tmp_path / "rec"), environment()) as writer:
        for item in bad:
            with pytest.raises(JournalError, match=r"the record of kernel '.*' cannot be written: ") as info:
                writer.write(item)
            assert "\n" not in str(info.value)
            assert len(str(info.value)) < 800
            assert info.value.permanent
        writer.write(good)
    assert read_journal(writer.path).records == (good,)


@pytest.mark.parametrize("count", [MAX_ITEMS, MAX_ITEMS + 1, 20_000])
def test_a_record_of_too_many_candidates_keeps_the_fastest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    times: dict[Any, Any] = {block: float(count - block) for block in range(count)}
    times[0] = None
    whole = record(times, note="n is not in the key")
    with JournalWriter(str(tmp_path / "rec"), environment()) as writer:
        writer.write(whole)
    (found,) = read_journal(writer.path).records
    kept = len(found.timings)
    if count == MAX_ITEMS:
        assert (found, caplog.messages) == (whole, [])
        return
    assert found.timings == whole.timings[-kept:]
    assert found.winner == whole.winner
    said = f"of its {count} candidates the {kept} fastest are kept"
    assert found.note == f"n is not in the key; {said}"
    assert said in caplog.text


def test_a_record_too_long_for_a_frame_keeps_the_fastest(tmp_path: Path) -> None:
    times = {config(16, extra={"text": f"{at:04}" + "x" * 1000}): float(at) for at in range(3000)}
    with JournalWriter(str(tmp_path / "rec"), environment()) as writer:
        writer.write(record(times))
    (found,) = read_journal(writer.path).records
    assert [timing.config for timing in found.timings] == list(times)[: len(found.timings)]
    assert len(found.timings) >= 256


@pytest.mark.parametrize("value", [object(), float("nan"), "\udce4" * 3, json.loads("[" * 18 + "]" * 18)])
def test_a_record_with_a_specialization_that_cannot_be_written_goes_without(tmp_path: Path, value: Any) -> None:
    whole = record({16: 1.0, 32: 2.0}, specialization={"x": value})
    with JournalWriter(str(tmp_path / "rec"), environment()) as writer:
        writer.write(whole)
    (found,) = read_journal(writer.path).records
    if found != whole:  # half of a surrogate pair is written as it is escaped
        assert found == replace(whole, specialization=None, note="its specialization is left out")


def test_what_the_disk_refuses_may_be_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with JournalWriter(str(tmp_path / "rec"), environment()) as writer:
        monkeypatch.setattr(os, "write", fails_with(errno.ENOSPC))
        with pytest.raises(JournalError) as info:
            writer.write(RECORDS[0])
        assert not info.value.permanent


# ---------------------------------------------------------------------------------------------------------- reading


def test_zeros_at_the_end_are_a_torn_tail(tmp_path: Path) -> None:
    # What a power loss leaves where the file had grown already and the data had not been written.
    path, data = written(tmp_path, *RECORDS[:2])
    last = data.rindex(b"TTJ1")
    for kept in (last, last + 1, last + 4, last + 15, last + 16, last + 17, len(data) - 1):
        for zeros in (1, 100, 3 * MAX_BODY):
            path.write_bytes(data[:kept] + bytes(zeros))
            journal = read_journal(path)
            assert (journal.records, journal.torn_bytes) == (RECORDS[:1], kept + zeros - last)


def test_a_damaged_header_at_the_very_end_is_no_torn_one(tmp_path: Path) -> None:
    path, data = written(tmp_path, *RECORDS[:2])
    last = data.rindex(b"TTJ1")
    for place in range(4, 16):
        header = bytearray(data[last : last + 16])
        header[place] ^= 0xFF
        path.write_bytes(data[:last] + header)
        if header[-1]:
            with pytest.raises(JournalError, match=f"damaged at offset {last}"):
                read_journal(path)


def test_an_empty_file_is_a_journal_of_a_process_that_died_at_once(tmp_path: Path) -> None:
    path, data = written(tmp_path)
    for kept in (0, 3, 16, len(data) - 1):
        path.write_bytes(data[:kept])
        journal = read_journal(path)
        assert (journal.environment, journal.records, journal.torn_bytes) == (Environment(arch=""), (), kept)


@pytest.mark.parametrize("mask", [0x01, 0x80, 0xFF])
def test_any_changed_byte_is_damage_at_its_frame(tmp_path: Path, mask: int) -> None:
    path, data = written(tmp_path, *RECORDS[:2])
    starts = [found.start() for found in re.finditer(b"TTJ1", data)]
    for place in range(0, len(data), 7):
        changed = bytearray(data)
        changed[place] ^= mask
        path.write_bytes(changed)
        with pytest.raises(JournalError, match="damaged at offset") as info:
            read_journal(path)
        assert info.value.offset == max(start for start in starts if start <= place)
        assert info.value.file == str(path)


def test_a_cut_in_the_middle_is_damage(tmp_path: Path) -> None:
    path, data = written(tmp_path, *RECORDS[:3])
    second = [found.start() for found in re.finditer(b"TTJ1", data)][2]
    for hole in (1, 5, 16, 40):
        path.write_bytes(data[:second] + data[second + hole :])
        with pytest.raises(JournalError, match=f"damaged at offset {second}") as info:
            read_journal(path)
        assert info.value.offset == second
    path.write_bytes(data[: second + 30] + bytes(50) + data[second + 80 :])
    with pytest.raises(JournalError, match="checksum"):
        read_journal(path)


def test_a_hole_longer_than_all_that_follows_is_damage_too(tmp_path: Path) -> None:
    # The damaged frame then says that it goes on beyond the end, as a torn one does; but another one starts inside.
    path, data = written(tmp_path, record(dict.fromkeys(range(1, 60), 1.0)), record({16: 1.0}))
    start = [found.start() for found in re.finditer(b"TTJ1", data)][1]
    path.write_bytes(data[: start + 100] + data[start + 2500 :])
    with pytest.raises(JournalError, match=f"damaged at offset {start}"):
        read_journal(path)


def test_garbage_behind_the_last_frame_is_damage(tmp_path: Path) -> None:
    path, data = written(tmp_path, RECORDS[0])
    for garbage in (b"x", b"\0\0x", b"TTJ2", b"TTJ1" + b"x" * 20, bytes(2 * MAX_BODY) + b"x"):
        path.write_bytes(data + garbage)
        with pytest.raises(JournalError, match=f"damaged at offset {len(data)}"):
            read_journal(path)


def test_a_file_of_another_kind_is_no_journal(tmp_path: Path) -> None:
    path = tmp_path / "x.journal"
    path.write_text('{"arch": "sm90"}\n')
    with pytest.raises(JournalError, match=r"damaged at offset 0.*is it a journal at all"):
        read_journal(path)


def test_what_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(JournalError, match="is no regular file"):
            read_journal(path)
    with pytest.raises(JournalError, match=r"cannot be read: No such file"):
        read_journal(tmp_path / "missing")
    with pytest.raises(JournalError, match=r"cannot be read: .*null"):
        read_journal("nul\0byte")


HEAD = {
    "kind": "journal",
    "schema": 1,
    "environment": {
        "arch": "sm90", "device": "", "multiprocessors": 0, "triton": "", "torch": "", "python": "",
        "packages": [], "rank": 0, "world_size": 1, "host": "",
    },
}  # fmt: skip
CONFIG = {
    "kwargs": [["B", "1"]], "num_warps": 4, "num_stages": 3, "num_ctas": 1, "maxnreg": None, "ir_override": None,
    "extra": [],
}  # fmt: skip
IDENTITY = {
    "kernel": "pkg.k", "source_hash": None, "arch": "sm90", "values": [["n", "1"]], "dtypes": [], "call_order": [],
    "configs": [CONFIG], "specialization": None,
}  # fmt: skip
BODY = {
    "kind": "record", "identity": IDENTITY, "times": [[1.0, 1.0, 1.0]], "errors": [], "winner": 0, "shared": False,
    "note": "",
}  # fmt: skip


def forged(path: Path, *bodies: Any) -> Path:
    """A file with sound frames around any bodies: what somebody could write who knows the format."""
    frames = []
    for body in bodies:
        if isinstance(body, dict) and isinstance(body.get("identity"), dict):
            body = {**body, "identity": msgpack.packb(body["identity"])}
        frames.append(pack_frame(body if isinstance(body, bytes) else msgpack.packb(body)))
    path.write_bytes(b"".join(frames))
    return path


def test_the_forged_file_would_be_sound(tmp_path: Path) -> None:
    journal = read_journal(forged(tmp_path / "j", HEAD, BODY))
    assert journal.records[0].timings == (CandidateTiming(LaunchConfig.build({"B": 1}), (1.0, 1.0, 1.0)),)


def test_a_newer_schema_says_so(tmp_path: Path) -> None:
    newer = {**HEAD, "schema": 2, "more": True}
    with pytest.raises(JournalError, match=r"schema 2 is newer than 1.*update triton-tuning") as info:
        read_journal(forged(tmp_path / "j", newer))
    assert info.value.offset == 0


@pytest.mark.parametrize("schema", [0, -1, True, "1", None, 1.0])
def test_a_schema_that_never_was(tmp_path: Path, schema: Any) -> None:
    with pytest.raises(JournalError, match="schema must be 1, found"):
        read_journal(forged(tmp_path / "j", {**HEAD, "schema": schema}))


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "other"}, "kind must be"),
        ({"kind": None}, "kind must be"),
        ({"more": 1}, "record must be a map of"),
        ({"times": None}, "times must be a list"),
        ({"times": []}, ""),  # the only config is then a winner that was not tried
        ({"times": [[1.0], [1.0]]}, "times must be a list with one item for each of 1"),
        ({"times": [[]]}, "times must hold lists"),
        ({"times": [1.0]}, "times must hold lists"),
        ({"times": [[1]]}, "times must be finite floats"),
        ({"times": [[True]]}, "times must be finite floats"),
        ({"times": [["1"]]}, "times must be finite floats"),
        ({"times": [[None]]}, "times must be finite floats"),
        ({"times": [[-1.0]]}, "times must be finite floats"),
        ({"times": [[math.nan, 1.0]]}, "times must be finite floats"),
        ({"times": [[1.0, math.inf]]}, "times must be finite floats"),
        ({"times": [{"a": 1.0}]}, "times must hold lists"),
        ({"winner": 1}, "winner must be the index"),
        ({"winner": -1}, "winner must be the index"),
        ({"winner": True}, "winner must be the index"),
        ({"winner": 2**63}, "winner must be the index"),
        ({"errors": {}}, "errors must be list"),
        ({"errors": [[0]]}, "errors must be pairs"),
        ({"errors": [[1, "x"]]}, "errors must name each candidate at most once"),
        ({"errors": [[0, "x"], [0, "y"]]}, "errors must name each candidate at most once"),
        ({"shared": 0}, "shared must be bool"),
        ({"note": None}, "note must be str"),
        ({"note": b"bytes"}, "note must be str"),
        ({"identity": b"\xc1"}, "no MessagePack"),
        ({"identity": "text"}, "identity must be bytes"),
        ({"identity": b"\x91" * 2000}, "no MessagePack"),
        ({"times": nested(400)}, "times must be finite floats"),
    ],
)
def test_a_record_is_checked_field_by_field(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    path = forged(tmp_path / "j", HEAD, BODY, {**BODY, **changes})
    if not said:
        assert len(read_journal(path).records) == 2
        return
    with pytest.raises(JournalError, match=f"is not of this schema: .*{said}") as info:
        read_journal(path)
    assert info.value.offset == path.read_bytes().rindex(b"TTJ1")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kernel": ""}, "kernel must be a dotted name"),
        ({"kernel": "a"}, "kernel must be a dotted name"),
        ({"kernel": ".."}, "kernel must be a dotted name"),
        ({"kernel": "../x.y"}, "kernel must be a dotted name"),
        ({"kernel": "/abs.x"}, "kernel must be a dotted name"),
        ({"kernel": "a.b\x1b[31m"}, "kernel must be a dotted name"),
        ({"kernel": "a.b c"}, "kernel must be a dotted name"),
        ({"kernel": 1}, "kernel must be str"),
        ({"source_hash": "xyz"}, "source_hash must be"),
        ({"source_hash": 1}, "source_hash must be"),
        ({"arch": "a/b"}, "arch must be a name"),
        ({"arch": ".."}, "arch must be a name"),
        ({"values": [["n"]]}, "values must be a list of pairs"),
        ({"values": [["n", 1]]}, "values must be a list of pairs"),
        ({"values": {"n": "1"}}, "values must be list"),
        ({"values": [["n", "1"], ["n", "2"]]}, "names something twice"),
        ({"values": [["n", "NaN"]]}, "no canonical JSON"),
        ({"values": [["n", "1.0"]]}, "no canonical JSON"),
        ({"values": [["n", "[1, 2]"]]}, "no canonical JSON"),
        ({"values": [["n", '{"b":1,"a":1}']]}, "no canonical JSON"),
        ({"values": [["n", '{"a":1,"a":1}']]}, "no canonical JSON"),
        ({"values": [["n", "[" * 100_000]]}, "no canonical JSON"),
        ({"values": [["n", "[" * 17 + "]" * 17]]}, "nested deeper than 16"),
        ({"values": [["n", "9" * 10_000]]}, "no canonical JSON"),
        ({"dtypes": [["x", None]]}, "dtypes must be a list of pairs"),
        ({"call_order": [1]}, "call_order must be str"),
        ({"call_order": "x"}, "call_order must be list"),
        ({"configs": CONFIG}, "configs must be list"),
        ({"configs": [{}]}, "config must be a map"),
        ({"configs": [{**CONFIG, "num_warps": "4"}]}, "num_warps must be int or nil"),
        ({"configs": [{**CONFIG, "num_warps": True}]}, "num_warps must be int or nil"),
        ({"configs": [{**CONFIG, "ir_override": 1}]}, "ir_override must be str or nil"),
        ({"configs": [{**CONFIG, "kwargs": [["b", "1"], ["a", "1"]]}]}, "kwargs must be sorted"),
        ({"configs": [{**CONFIG, "kwargs": [["b", "x"]]}]}, "no canonical JSON"),
        ({"specialization": {}}, "specialization must be str"),
        ({"specialization": "{"}, "no canonical JSON"),
        ({"specialization": "NaN"}, "no canonical JSON"),
    ],
)
def test_an_identity_is_checked_field_by_field(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    path = forged(tmp_path / "j", HEAD, {**BODY, "identity": {**IDENTITY, **changes}})
    with pytest.raises(JournalError, match=said) as info:
        read_journal(path)
    assert info.value.offset == path.read_bytes().rindex(b"TTJ1")
    assert len(str(info.value)) < 700 + len(str(path))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rank": -1}, "rank must not be negative"),
        ({"rank": "0"}, "rank must be int"),
        ({"world_size": True}, "world_size must be int"),
        ({"host": None}, "host must be str"),
        ({"arch": "a b"}, "arch must be a name"),
        ({"packages": [["a", 1]]}, "packages must be a list of pairs"),
        ({"more": 1}, "environment must be a map of"),
    ],
)
def test_an_environment_is_checked_field_by_field(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    body = {**HEAD, "environment": {**HEAD["environment"], **changes}}  # type: ignore[dict-item]
    with pytest.raises(JournalError, match=said):
        read_journal(forged(tmp_path / "j", body))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (b"", "no MessagePack"),
        (b"\xc0", "kind must be"),
        (msgpack.packb([1, 2]), "kind must be"),
        (msgpack.packb({"kind": "journal"}) + b"\x00", "no MessagePack"),
        (msgpack.packb({1: 2}), "no MessagePack"),
        (b"\xdd\xff\xff\xff\xff", "no MessagePack"),  # an array of 4 billion
        (b"\xdf\xff\xff\xff\xff", "no MessagePack"),
        (b"\xdb\xff\xff\xff\xff", "no MessagePack"),
        (b"\xc6\xff\xff\xff\xff", "no MessagePack"),
        (msgpack.packb(msgpack.ExtType(1, b"x")), "no MessagePack"),
        (msgpack.packb(msgpack.Timestamp(1)), "no MessagePack"),
        (b"\xa1\xff", "no MessagePack"),  # a string that is not UTF-8
        (b"\xdc\x0f\xff" * 600, "no MessagePack"),
    ],
)
def test_a_body_is_messagepack_within_limits(tmp_path: Path, body: bytes, said: str) -> None:
    with pytest.raises(JournalError, match=said):
        read_journal(forged(tmp_path / "j", body))


def test_records_before_the_head_are_refused(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match="does not start with its environment"):
        read_journal(forged(tmp_path / "j", BODY))


def test_a_length_beyond_the_limit_is_refused_before_it_is_read(tmp_path: Path) -> None:
    frame = pack_frame(bytes(MAX_BODY + 1))
    (tmp_path / "j").write_bytes(frame[:16])
    with pytest.raises(JournalError, match=f"says {MAX_BODY + 1} bytes, more than {MAX_BODY}"):
        read_journal(tmp_path / "j")


def test_a_huge_hole_is_read_in_bounded_memory(tmp_path: Path) -> None:
    path, data = written(tmp_path, RECORDS[0])
    os.truncate(path, 1 << 26)
    start = time.perf_counter()
    assert read_journal(path).torn_bytes == (1 << 26) - len(data)
    assert time.perf_counter() - start < 30


def test_a_hole_longer_than_any_disk_takes_no_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, data = written(tmp_path, RECORDS[0])
    os.truncate(path, 1 << 42)
    start = time.perf_counter()
    assert read_journal(path).torn_bytes == (1 << 42) - len(data)
    assert time.perf_counter() - start < 10
    # Where the file system does not tell holes from zeros, so many are no torn tail.
    monkeypatch.delattr(os, "SEEK_DATA")
    start = time.perf_counter()
    with pytest.raises(JournalError, match=f"damaged at offset {len(data)}"):
        read_journal(path)
    assert time.perf_counter() - start < 10


def test_the_search_behind_damage_is_linear(tmp_path: Path) -> None:
    path, data = written(tmp_path)
    path.write_bytes(data + b"x" + b"TTJ1" * 500_000)
    with pytest.raises(JournalError, match=f"damaged at offset {len(data)}"):
        read_journal(path)


# ---------------------------------------------------------------------------------------------------------- finding


def test_arguments_are_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (JournalWriter(str(tmp_path / "a" / "rec"), environment(rank)) for rank in (0, 1))
    other = JournalWriter(str(tmp_path / "b" / "re[c]"), environment())
    (tmp_path / "a" / "notes.txt").write_text("x")
    both = tuple(sorted([first.path, second.path]))
    assert find_journals([tmp_path / "a" / "rec"]) == both
    assert find_journals([tmp_path / "a"]) == both
    assert find_journals([f"{tmp_path}/a/*.journal"]) == both
    assert find_journals([f"{tmp_path}/**/*.journal"]) == tuple(sorted([*both, other.path]))
    assert find_journals([first.path, tmp_path / "a", f"{tmp_path}/a/../a/rec"]) == both
    assert find_journals([f"{tmp_path}/b/re[c]"]) == (other.path,)
    monkeypatch.chdir(tmp_path / "a")
    assert find_journals(["rec"]) == tuple(os.path.basename(path) for path in both)
    for writer in (first, second, other):
        writer.close()


@pytest.mark.parametrize("argument", ["missing", "missing/*.journal", "", "empty"])
def test_an_argument_that_leads_nowhere_is_named(tmp_path: Path, argument: str) -> None:
    (tmp_path / "empty").mkdir()
    place = f"{tmp_path}/{argument}" if argument else ""
    with pytest.raises(JournalError, match=r"no journal at .*: expected a file, a folder") as info:
        find_journals([place])
    assert info.value.file == place


def test_a_prefix_and_a_folder_of_one_name(tmp_path: Path) -> None:
    with JournalWriter(str(tmp_path / "rec"), environment()) as beside:
        pass
    (tmp_path / "rec").mkdir()
    with JournalWriter(str(tmp_path / "rec"), environment()) as inside:
        pass
    assert find_journals([tmp_path / "rec"]) == tuple(sorted([beside.path, inside.path]))
