"""Journals cut, damaged and forged at random: a prefix of the records or a clear error, and nothing else."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st
from recordings import config, environment, record

from tuning._journal_frames import pack_frame
from tuning.errors import JournalError
from tuning.journal import JournalWriter, read_journal
from tuning.spec import CandidateTiming, Kernel, Key, LaunchConfig, TuningRecord

times = st.floats(min_value=0, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner) | st.dictionaries(st.text(), inner, max_size=2),
    max_leaves=6,
)
names = st.from_regex(r"[A-Za-z_]\w{0,12}", fullmatch=True)
configs = st.builds(
    LaunchConfig.build,
    st.dictionaries(names, values, max_size=3),
    num_warps=st.none() | st.integers(1, 32),
    num_stages=st.none() | st.integers(0, 8),
    maxnreg=st.none() | st.integers(1, 255),
    ir_override=st.none() | st.text(),
    extra=st.dictionaries(names, st.integers(1, 9), max_size=2),
)
timings = st.builds(CandidateTiming, configs, st.lists(times, min_size=1, max_size=5).map(tuple)) | st.builds(
    CandidateTiming, configs, st.none(), st.text().map(lambda text: " ".join(text.split())[:900]) | st.none()
)


@st.composite
def records(draw: st.DrawFn) -> TuningRecord:
    found = tuple(draw(st.lists(timings, max_size=4)))
    return TuningRecord(
        Kernel(
            draw(st.from_regex(r"[a-z]\w{0,5}(\.[a-z_<>]{1,9}){1,3}", fullmatch=True)),
            draw(st.none() | st.just("ab" * 32)),
        ),
        Key.of(draw(st.dictionaries(names, values, max_size=3)), draw(st.dictionaries(names, names, max_size=3))),
        draw(st.sampled_from(["sm90", "sm103", "gfx942", "cpu"])),
        found,
        draw(st.sampled_from([item.config for item in found])) if found and draw(st.booleans()) else draw(configs),
        draw(st.booleans()),
        draw(st.none() | st.dictionaries(st.text(), st.integers() | st.floats(allow_nan=False, allow_infinity=False))),
        draw(st.text().map(lambda text: " ".join(text.split())[:900])),
    )


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@given(st.lists(records(), max_size=4))
def test_records_survive_exactly(folder: Path, written: list[TuningRecord]) -> None:
    with JournalWriter(str(folder / "rec"), environment()) as writer:
        for item in written:
            writer.write(item)
    found = read_journal(writer.path)
    Path(writer.path).unlink()
    assert found.records == tuple(written)
    # Dataclasses compare 0.0 and -0.0 as equal, and keys without their call order.
    assert repr([(item.key, item.timings) for item in found.records]) == repr([(i.key, i.timings) for i in written])
    assert found.torn_bytes == 0


WRITTEN = (
    record({16: 0.25, 32: None}),
    record({16: (0.1, 0.09, 0.3)}, key=Key.of({"n": -0.0}), specialization={"x": [16, True]}),
    record({config(64): 1.0, config(8, warps=1): 0.0}, kernel="pkg.TTJ1.TTJ1"),
)


@pytest.fixture(scope="module")
def sound(folder: Path) -> tuple[bytes, list[int]]:
    """The bytes of a journal of these, and the offset at which the head and each record end."""
    with JournalWriter(str(folder / "cut"), environment()) as writer:
        path = Path(writer.path)
        ends = [path.stat().st_size]
        for item in WRITTEN:
            writer.write(item)
            ends.append(path.stat().st_size)
    return path.read_bytes(), ends


def test_a_journal_cut_at_each_byte_reads_as_a_prefix(folder: Path, sound: tuple[bytes, list[int]]) -> None:
    data, ends = sound
    path = folder / "journal"
    for cut in range(len(data) + 1):
        path.write_bytes(data[:cut])
        found = read_journal(path)
        whole = sum(end <= cut for end in ends)
        assert found.records == WRITTEN[: max(whole - 1, 0)]
        assert found.torn_bytes == cut - (ends[whole - 1] if whole else 0)
        assert (found.environment == environment()) == (whole > 0)


def test_a_journal_whose_end_is_zeroed_from_each_byte_reads_as_a_prefix(
    folder: Path, sound: tuple[bytes, list[int]]
) -> None:
    data, ends = sound
    path = folder / "journal"
    for cut in range(ends[0], len(data)):
        path.write_bytes(data[:cut] + bytes(len(data) - cut))
        found = read_journal(path)
        whole = sum(end <= cut for end in ends)
        assert found.records == WRITTEN[: whole - 1]
        assert found.torn_bytes == len(data) - ends[whole - 1]


def readable(path: Path) -> bool:
    """Read the file. Any error but a clear :class:`JournalError` passes through."""
    try:
        found = read_journal(path)
    except JournalError as error:
        refused = error
    else:
        assert 0 <= found.torn_bytes <= path.stat().st_size
        return True
    assert refused.file == str(path)
    assert "\n" not in str(refused)
    assert len(str(refused)) < 1500 + len(str(path))
    return False


@given(st.binary(max_size=400))
def test_any_bytes_are_read_or_refused(folder: Path, data: bytes) -> None:
    (folder / "any").write_bytes(data)
    assert readable(folder / "any") == (not data.strip(b"\0") or b"TTJ1".startswith(data.rstrip(b"\0")[:4]))


edits = st.lists(
    st.tuples(st.sampled_from(["set", "insert", "delete", "copy"]), st.integers(0, 1 << 16), st.binary(max_size=24)),
    min_size=1,
    max_size=4,
)


@given(edits)
def test_a_mutated_journal_never_gives_a_record_that_was_not_written(
    folder: Path, sound: tuple[bytes, list[int]], changes: list[tuple[str, int, bytes]]
) -> None:
    data = bytearray(sound[0])
    for kind, place, piece in changes:
        at = place % (len(data) + 1)
        if kind == "set":
            data[at : at + len(piece)] = piece
        elif kind == "insert":
            data[at:at] = piece
        elif kind == "delete":
            del data[at : at + len(piece)]
        else:
            data[at:at] = data[at : at + 60]
    path = folder / "mutated"
    path.write_bytes(data)
    if readable(path):
        # Whole frames may be gone only from the end; a frame that was copied whole may come twice.
        assert set(map(repr, read_journal(path).records)) <= set(map(repr, WRITTEN))


objects = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


def parts(body: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The place of everything inside a body."""
    found = [path]
    if isinstance(body, dict):
        for name, value in body.items():
            found += parts(value, (*path, name))
    elif isinstance(body, list):
        for index, value in enumerate(body):
            found += parts(value, (*path, index))
    return found


def bodies_of(data: bytes) -> list[Any]:
    found = []
    at = 0
    while at < len(data):
        length = int.from_bytes(data[at + 4 : at + 8], "little")
        body = msgpack.unpackb(data[at + 16 : at + 16 + length])
        if "identity" in body:
            body["identity"] = msgpack.unpackb(body["identity"])
        found.append(body)
        at += length + 17
    return found


@given(st.integers(0, 1 << 16), objects, st.booleans())
def test_a_forged_field_is_read_or_refused(
    folder: Path, sound: tuple[bytes, list[int]], choice: int, value: Any, remove: bool
) -> None:
    found = bodies_of(sound[0])
    places = [place for place in parts(found) if len(place) > 1]
    place = places[choice % len(places)]
    inside: Any = found
    for step in place[:-1]:
        inside = inside[step]
    if remove:
        del inside[place[-1]]
    else:
        inside[place[-1]] = value
    path = folder / "forged"
    with path.open("wb") as file:
        for body in found:
            if isinstance(body, dict) and "identity" in body:
                body["identity"] = msgpack.packb(body["identity"])
            file.write(pack_frame(msgpack.packb(body)))
    if readable(path):
        # What is accepted can be used: everything in it has a text, an order and a JSON form.
        for item in read_journal(path).records:
            assert json.loads(item.key.text)
            assert sorted([timing.config.order for timing in item.timings]) is not None
            assert Key.from_json(item.key.to_json()) == item.key
            assert LaunchConfig.from_json(item.winner.to_json()) == item.winner
