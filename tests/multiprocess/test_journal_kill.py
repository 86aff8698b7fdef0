"""Journals of processes that are killed, forked and many: whatever happens, what was acknowledged is there."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from tuning.journal import find_journals, read_journal
from tuning.merge import merge
from tuning.tables import read_table, table_bytes, write_table

TESTS = Path(__file__).parents[1]

# Says on its standard output which records are on disk, so that the parent knows what must not be lost.
WORKER = """
import sys
sys.path.insert(0, sys.argv[2])
from recordings import environment, record
from tuning.journal import JournalWriter
from tuning.spec import Key
rank, count = int(sys.argv[3]), int(sys.argv[4])
writer = JournalWriter(sys.argv[1], environment(rank))
print(writer.path, flush=True)
times = {block: float(block) for block in range(1, 40)}
for n in range(count):
    writer.write(record(times, key=Key.of({"n": n}), note="x" * (n * 37 % 900)))
    print(n, flush=True)
"""


def start(prefix: Path, rank: int, count: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WORKER, str(prefix), str(TESTS), str(rank), str(count)]
    return subprocess.Popen(command, cwd=TESTS.parent, stdout=subprocess.PIPE, text=True)


def keys_of(path: str) -> list[int]:
    return [int(dict(item.key.values)["n"]) for item in read_journal(path).records]


def test_killed_at_random_instants_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    chance = random.Random(0)
    prefix = tmp_path / "rec"
    survivors = 0
    for attempt in range(12):
        process = start(prefix, rank=attempt % 2, count=100_000)
        assert process.stdout is not None
        path = process.stdout.readline().strip()
        time.sleep(chance.uniform(0, 0.15))
        process.send_signal(signal.SIGKILL)
        acknowledged = [int(line) for line in process.stdout.read().split()]
        assert process.wait() == -signal.SIGKILL
        process.stdout.close()
        found = keys_of(path)
        # In order, without a gap, and at most the one in flight more than was acknowledged.
        assert found == list(range(len(found)))
        assert len(acknowledged) <= len(found) <= len(acknowledged) + 1
        survivors += len(found)
    # Restarts into one prefix, two processes of each rank: one file each.
    assert survivors > 0
    assert len(find_journals([prefix])) == 12
    assert len(merge(map(read_journal, find_journals([prefix]))).keys) > 0


def test_many_processes_write_into_one_folder(tmp_path: Path) -> None:
    processes = [start(tmp_path / "deep" / "rec", rank=rank // 2, count=10) for rank in range(8)]
    outputs = [process.communicate()[0].split() for process in processes]
    assert [process.returncode for process in processes] == [0] * 8
    paths = find_journals([tmp_path / "deep" / "rec"])
    assert sorted(paths) == sorted(lines[0] for lines in outputs)
    assert [keys_of(path) for path in paths] == [list(range(10))] * 8
    assert Counter(read_journal(path).environment.rank for path in paths) == {0: 2, 1: 2, 2: 2, 3: 2}


# In processes of their own: this one has threads by now, and such a process may not fork.
FORK = """
import os, sys
sys.path.insert(0, sys.argv[2])
from recordings import environment, record
from tuning.journal import JournalWriter
from tuning.spec import Key
def write(n):
    writer.write(record({16: 1.0}, key=Key.of({"n": n})))
writer = JournalWriter(sys.argv[1], environment())
write(0)
parents = writer.path
# Some thread is inside write, with the lock, when the child is made: there the lock must not stay taken.
writer._lock.acquire()
child = os.fork()
if child == 0:
    write(1)
    os._exit(0 if writer.path != parents else 2)
writer._lock.release()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert writer.path == parents
write(2)
print(parents)
"""

FORKED_POOL = """
import multiprocessing, sys
sys.path.insert(0, sys.argv[2])
from recordings import environment, record
from tuning.journal import JournalWriter
from tuning.spec import Key
def write(n):
    writer.write(record({16: 1.0}, key=Key.of({"n": n})))
writer = JournalWriter(sys.argv[1], environment())
context = multiprocessing.get_context("fork")
children = [context.Process(target=write, args=(n,)) for n in range(4)]
for child in children: child.start()
for child in children: child.join()
assert [child.exitcode for child in children] == [0] * 4
print(writer.path)
"""


def run(script: str, prefix: Path) -> str:
    command = [sys.executable, "-W", "error", "-c", script, str(prefix), str(TESTS)]
    result = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_child_writes_a_file_of_its_own(tmp_path: Path) -> None:
    parents = run(FORK, tmp_path / "rec")
    found = {path: keys_of(path) for path in find_journals([tmp_path / "rec"])}
    assert found.pop(parents) == [0, 2]
    assert list(found.values()) == [[1]]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_children_of_multiprocessing_do_not_share_the_parents_file(tmp_path: Path) -> None:
    parents = run(FORKED_POOL, tmp_path / "rec")
    found = {path: keys_of(path) for path in find_journals([tmp_path / "rec"])}
    assert found.pop(parents) == []
    assert sorted(found.values()) == [[0], [1], [2], [3]]


EXITS = """
import sys, threading
sys.path.insert(0, sys.argv[2])
from recordings import environment, record
from tuning.journal import JournalWriter
writer = JournalWriter(sys.argv[1], environment())
writer.write(record({16: 1.0}))
if sys.argv[3] == "collected":
    del writer
elif sys.argv[3] == "raised":
    raise SystemExit(3)
"""


@pytest.mark.parametrize(("how", "status"), [("left", 0), ("collected", 0), ("raised", 3)])
def test_an_interpreter_that_ends_closes_its_file_quietly(tmp_path: Path, how: str, status: int) -> None:
    command = [sys.executable, "-W", "error", "-X", "dev", "-c", EXITS, str(tmp_path / "rec"), str(TESTS), how]
    result = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (status, "")
    (path,) = find_journals([tmp_path / "rec"])
    assert len(read_journal(path).records) == 1


def test_a_journal_can_be_read_while_it_is_written(tmp_path: Path) -> None:
    process = start(tmp_path / "rec", rank=0, count=150)
    assert process.stdout is not None
    path = process.stdout.readline().strip()
    seen = 0
    while process.poll() is None or seen == 0:
        found = keys_of(path)
        assert found == list(range(len(found)))
        assert len(found) >= seen
        seen = len(found)
    process.stdout.close()
    assert keys_of(path) == list(range(150))


def test_eight_writers_of_one_table_and_a_reader(tmp_path: Path) -> None:
    # Each merges other recordings into one folder. A reader sees one of the tables, whole.
    results = [merge([read_journal(start_and_wait(tmp_path / f"rec{index}", index))]).tables[0] for index in range(2)]
    allowed = {table_bytes(table) for table in results}
    assert len(allowed) == 2
    path = write_table(tmp_path / "tables", results[0])

    def work(index: int) -> None:
        for _ in range(20):
            write_table(tmp_path / "tables", results[index % 2])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert table_bytes(read_table(path)) in allowed
    for thread in threads:
        thread.join()
    assert table_bytes(read_table(path)) in allowed
    assert os.listdir(path.parent) == [path.name]


def start_and_wait(prefix: Path, rank: int) -> str:
    process = start(prefix, rank, count=2 + rank)
    return process.communicate()[0].split()[0]
