"""Whatever bytes a file of ours holds, from journal to probe: read, or refused by a typed error with a place.

Each reader sees at least 20,000 damaged files in a run: Hypothesis draws seeds, and each seed is a batch of damages to
a sound file, which costs a hundredth of an example for each. What a reader takes has to be fit for use. Other systems'
files have a run of their own, in test_interop_fuzz.py.
"""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recordings import config, environment, record

import tuning
from tuning._journal_frames import pack_frame
from tuning.bitexact.metrics import MetricRecorder, compare_metrics
from tuning.bitexact.metrics_file import read_metrics, write_metrics
from tuning.bitexact.probe import (
    CandidateProbe,
    Distance,
    InputProbe,
    KeyProbe,
    Probe,
    compare_probes,
    read_probe,
    write_probe,
)
from tuning.errors import JournalError, MetricStandardError, PolicyError, TableError
from tuning.journal import JournalWriter, read_journal
from tuning.manifest import Launch, build_manifest, manifest_bytes, manifest_from_bytes
from tuning.policy import AutotunePolicy
from tuning.spec import Key, LaunchConfig
from tuning.tables import Denied, Entry, TableFile, parse_table, table_bytes

SEEDS, BATCH = 100, 201

LAUNCH = Launch(
    "pkg.m.kernel",
    Key.of({"n": 128, "causal": True}, {"x": "bfloat16"}, ("x",)),
    LaunchConfig.build({"BLOCK": 64}),
    arch="sm90",
    source="exact",
    origin=None,
    source_hash="0123abcd",
)
ROWS = (
    Entry("pkg.k", (("a", "10"), ("b", '"x, y"')), (("p", "int8"),), None, LaunchConfig.build({"B": 1}), {"ranks": 8}),
    Entry("pkg.k", None, None, None, LaunchConfig.build({"B": 2}, maxnreg=64), {"reported_by": "me", "x": [1, "a"]}),
)
DENIED = (Denied("pkg.k", LaunchConfig.build({"B": 3}), None, "racy", "somebody"),)
POLICY = b"""other: {a: [1, 2]}
triton_autotune:
  mode: pinned
  modules: [fla, mamba_ssm]
  block_sizes: {BLOCK_M: 64}
  verify_every: 100
"""


def sound_table() -> bytes:
    return table_bytes(TableFile("sm90", "pkg", "1", "3.6.0", "d", ROWS, DENIED))


def sound_manifest() -> bytes:
    empty = build_manifest(library="1", mode="pinned", policy={"mode": "pinned"}, environment=environment())
    return manifest_bytes(replace(empty, choices=(LAUNCH, replace(LAUNCH, kernel="pkg.m.other"))))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "file"


@pytest.fixture(scope="module")
def sound_metrics(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    recorder = MetricRecorder()
    for number in (0.5, -0.0, float("nan"), float("inf")):
        recorder.record("loss", number)
    recorder.record("tokens", 2**70)
    recorder.record("done", True)
    recorder.tolerate("loss", reason="adds with atomics", ulps=1, relative=0.5)
    path = tmp_path_factory.mktemp("sound") / "metrics.json"
    write_metrics(path, recorder.finish())
    return path.read_bytes()


@pytest.fixture(scope="module")
def sound_journal(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    with JournalWriter(str(tmp_path_factory.mktemp("sound") / "rec"), environment()) as writer:
        writer.write(record({16: 0.25, 32: None}))
        writer.write(record({config(64): (1.0, 0.9, 1.1)}, specialization={"x": [16]}, note="a note"))
    return Path(writer.path).read_bytes()


def read_as_journal(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    for each in read_journal(path).records:
        assert Key.from_json(each.key.to_json()) == each.key
        assert sorted([timing.config.order for timing in each.timings]) is not None


def read_as_table(path: Path, data: bytes) -> None:
    found = parse_table(data, str(path))
    assert parse_table(table_bytes(found)).denied is not None


def read_as_manifest(path: Path, data: bytes) -> None:
    found = manifest_from_bytes(data, file=str(path))
    assert manifest_from_bytes(manifest_bytes(found)) == found


def read_as_policy(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    assert isinstance(tuning.policy_from_yaml(path), AutotunePolicy)


def read_as_metrics(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    found = read_metrics(path)
    if found.series:
        assert compare_metrics(found, found).passed
    write_metrics(path, found)
    assert read_metrics(path) == found


def sound_probe() -> bytes:
    key = Key.of({"n": 128, "causal": True}, {"x": "bfloat16"}, ("x",))
    candidates = tuple(CandidateProbe(config(block), number) for number, block in enumerate((32, 64)))
    candidates += (CandidateProbe(config(128), None, racy=True), CandidateProbe(config(256), None, failure="too large"))
    inputs = (InputProbe("captured", "x=01", True, ("o=1", "o=2")), InputProbe("random 0", "x=02", False))
    row = KeyProbe("pkg.k", "0123", key, "f" * 16, "sm90", "c", "kernel", "", candidates, inputs)
    row = replace(row, distances=(Distance((0, 1), 3.0, "captured: o"),), written=("o",), atomics=True)
    return json.dumps(Probe("sm90", "device", 132, "c", [row, replace(row, form="0" * 16)]).to_json()).encode()


def read_as_probe(path: Path, data: bytes) -> None:
    path.write_bytes(data)
    found = read_probe(path)
    write_probe(path, found)
    assert read_probe(path) == found
    assert all(each.verdict for each in found.keys)
    assert len(compare_probes(found.keys, found.keys)) == len(found.keys)
    assert found.contradicted(found.config_invariant) == ()


def outcome(read: Callable[[Path, bytes], None], path: Path, data: bytes) -> bool:
    """Whether it is read. Any error but a typed one of a line that names the file fails the test."""
    try:
        read(path, data)
    except (JournalError, TableError, PolicyError, MetricStandardError) as error:
        refused = error
    else:
        return True
    assert str(path) in str(refused)
    assert "\n" not in str(refused)
    assert len(str(refused)) < 2500
    return False


PIECES = (
    b'"', b"{", b"[", b"]", b"}", b",", b":", b"NaN", b"1e999", b"-0", b"\\ud800", b"\0", b"\n", b"- ", b"*a", b"&a ",
    b"!!python/object/apply:os.system [x]", b"null", b"true", b"'", b"9" * 40, b"TTJ1", b"\xc1",
    b"\xdf\xff\xff\xff\xff", b"\xff" * 8, b"<<: ", b"? ", b"  ", b"\t", "é".encode(), b"\xed\xa0\x80",
)  # fmt: skip


def damaged(sound: bytes, random: Random) -> bytes:
    """Bytes changed, put in, taken out, doubled, swapped, and the file cut off."""
    data = bytearray(sound)
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        at, to = sorted(random.randrange(len(data) + 1) for _ in range(2))
        kind = random.random()
        if kind < 0.3 and at < len(data):
            data[at] = random.randrange(256)
        elif kind < 0.6:
            data[at:at] = random.choice(PIECES)
        elif kind < 0.75:
            del data[at : min(to, at + random.choice((1, 2, 20)))]
        elif kind < 0.85:
            data[at:at] = data[at:to]
        elif kind < 0.95:
            data[at : at + 2] = data[at : at + 2][::-1]
        else:
            del data[at:]
        if not data:
            break
    return bytes(data)


def reframed(sound: bytes, random: Random) -> bytes:
    """A journal one of whose bodies is damaged, under a checksum that is right."""
    found, at = [], 0
    while at < len(sound):
        length = int.from_bytes(sound[at + 4 : at + 8], "little")
        found.append(sound[at + 16 : at + 16 + length])
        at += length + 17
    which = random.randrange(len(found))
    found[which] = damaged(found[which], random)
    return b"".join(map(pack_frame, found))


def batch(read: Callable[[Path, bytes], None], path: Path, sound: bytes, seed: int, *ways: Any) -> None:
    random = Random(seed)
    for number in range(BATCH):
        outcome(read, path, ways[number % len(ways)](sound, random))


def test_a_run_looks_at_twenty_thousand_files_of_each_kind() -> None:
    assert SEEDS * BATCH >= 20_000


def test_the_sound_files_are_read(place: Path, sound_journal: bytes, sound_metrics: bytes) -> None:
    assert outcome(read_as_metrics, place, sound_metrics)
    assert outcome(read_as_journal, place, sound_journal)
    assert outcome(read_as_table, place, sound_table())
    assert outcome(read_as_manifest, place, sound_manifest())
    assert outcome(read_as_probe, place, sound_probe())
    assert outcome(read_as_policy, place, POLICY)


seeds = given(seed=st.integers(0, 2**32))


@seeds
@settings(max_examples=SEEDS)
def test_damaged_journals(seed: int, place: Path, sound_journal: bytes) -> None:
    batch(read_as_journal, place, sound_journal, seed, damaged, reframed, reframed)


@seeds
@settings(max_examples=SEEDS)
def test_damaged_tables(seed: int, place: Path) -> None:
    batch(read_as_table, place, sound_table(), seed, damaged)


@seeds
@settings(max_examples=SEEDS)
def test_damaged_manifests(seed: int, place: Path) -> None:
    batch(read_as_manifest, place, sound_manifest(), seed, damaged)


@seeds
@settings(max_examples=SEEDS)
def test_damaged_probes(seed: int, place: Path) -> None:
    batch(read_as_probe, place, sound_probe(), seed, damaged)


@seeds
@settings(max_examples=SEEDS)
def test_damaged_policies(seed: int, place: Path) -> None:
    pytest.importorskip("yaml")
    batch(read_as_policy, place, POLICY, seed, damaged)


@seeds
@settings(max_examples=SEEDS)
def test_damaged_metrics(seed: int, place: Path, sound_metrics: bytes) -> None:
    batch(read_as_metrics, place, sound_metrics, seed, damaged)


def hostile() -> Iterator[bytes]:
    yield b"[" * 200_000
    yield b"[" * 100_000 + b"]" * 100_000
    yield b'{"a":' * 50_000
    yield b"{" * 100_000
    yield b"a: " * 2_000
    yield b"- " * 2_000
    yield json.dumps({str(number): number for number in range(20_000)}).encode()
    yield b'{"a": ' + b"9" * 100_000 + b"}"
    yield b'{"schema": 1, "schema": 1}'
    yield b'{"entries": [NaN, Infinity, -Infinity,]}'
    # Each line ten times the one before it: a thousand million items if they were copied.
    lines = ["a0: &a0 [x]", *(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10))]
    yield "\n".join([*lines, "triton_autotune: {modules: *a9}"]).encode()
    yield b"triton_autotune: &a {modules: *a}"
    yield b"triton_autotune: !!python/object/apply:os.system ['touch /nowhere']"
    yield b"\0" * 100_000
    yield pack_frame(b"\xdd\xff\xff\xff\xff") * 3  # an array of four thousand million items
    yield pack_frame(b"\x91" * 100_000 + b"\x01")
    yield pack_frame(b"\xdb\xff\xff\xff\xff")


@pytest.mark.parametrize(
    "read",
    [read_as_journal, read_as_table, read_as_manifest, read_as_probe, read_as_policy, read_as_metrics],
)
def test_hostile_files_take_bounded_time_and_memory(read: Any, place: Path) -> None:
    if read is read_as_policy:
        pytest.importorskip("yaml")
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    for data in hostile():
        if not (read is read_as_journal and not data.strip(b"\0")):  # zeros are what a power loss leaves of a journal
            assert not outcome(read, place, data) or read is read_as_policy
    assert time.process_time() - started < 20
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 400 << 10
