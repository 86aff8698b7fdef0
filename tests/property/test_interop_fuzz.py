"""Whatever bytes another system's file holds: tables that survive, or one typed error that names file and place.

Each Hypothesis example is a seed for a batch of damages, so that a run looks at some twenty thousand files: arbitrary
bytes, damaged bytes of a sound file, any value in any place of one, doubled members, deep nesting, huge numbers.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuning.errors import TableError, TuningError
from tuning.interop import Imported, fla, fused_moe, known_kernels, megatron, triton_cache
from tuning.interop._documents import MAX_DEPTH
from tuning.journal import JournalWriter, read_journal
from tuning.tables import parse_table, table_bytes

SEEDS, BATCH = 40, 42


class Autotuner:
    hooks = ()
    class_name = "triton.runtime.autotuner.Autotuner"

    def __init__(self, kernel: str, *key_names: str) -> None:
        self.kernel, self.key_names = kernel, key_names


# "kernel" is known with keys of none to four names, and "twice" is the bare name of two kernels.
KNOWN = known_kernels(
    [Autotuner("pkg.m.kernel", *"abcd"[:count]) for count in range(5)],
    [Autotuner("pkg.m.twice"), Autotuner("pkg.n.twice")],
)

CONFIG = {"kwargs": {"BLOCK": 64, "x": "y"}, "num_warps": 4, "num_stages": 3, "num_ctas": 1, "maxnreg": None}
KEY = [128, True, "torch.float32", "torch.bfloat16"]
MEGATRON = {
    "arch": "sm90",
    "triton": "3.6.0",
    "packages": {"pkg": "1.0", "other": "2"},
    "source": "me",
    "kernels": {
        "pkg.m.kernel": {"a=128|b=True|torch.float32": CONFIG, "*": {**CONFIG, "ir_override": "f"}},
        "kernel": {"": CONFIG, "a=1.5|b=abc": CONFIG},
    },
}
RANK = {"sm90": {"pkg.m.kernel": {"a=1|torch.int8": CONFIG}, "kernel": {"*": CONFIG}}, "gfx942": {}}
FLA = {
    "kernel_name": "kernel",
    "triton_version": "3.6.0",
    "autotune_entries": {fla.key_hash(KEY): {"autotune_key": KEY, "config": CONFIG}},
    "default_config": CONFIG,
}
CACHE = {
    "key": KEY,
    "configs_timings": [[{**CONFIG, "pre_hook": None}, [1.0, 0.5, 2.0]], [{**CONFIG, "num_warps": 8}, [math.inf] * 3]],
}
FLAT = {"BLOCK_SIZE_M": 64, "GROUP_SIZE_M": 8, "num_warps": 4, "num_stages": 3}
MOE = {"triton_version": "3.6.0", "1": FLAT, "4096": {**FLAT, "num_warps": 8}}

READERS: dict[str, tuple[Callable[[bytes], Imported], Any]] = {
    "megatron": (lambda data: megatron.parse_table(data, "sm90.json", KNOWN), MEGATRON),
    "megatron rank": (lambda data: megatron.parse_rank_file(data, "f.rank0.json", KNOWN), RANK),
    "fla": (lambda data: fla.parse_file(data, "kernel.json", KNOWN, "sm90"), FLA),
    "fla, a bare config": (lambda data: fla.parse_file(data, "kernel.json", KNOWN, "sm90"), CONFIG),
    "triton cache": (lambda data: triton_cache.parse_file(data, "kernel.autotune.json", KNOWN, "sm90"), CACHE),
    "fused moe": (lambda data: fused_moe.parse_file(data, "E=8,N=64,device_name=d.json", KNOWN, "sm90"), MOE),
}
readers = pytest.mark.parametrize("name", READERS)


def outcome(name: str, data: bytes) -> str:
    """What a reader makes of a file. Anything but sound tables or one typed error with its place fails the test."""
    try:
        found = READERS[name][0](data)
    except TableError as error:
        refused = error
    else:
        for table in found.tables:
            rows = {row.identity: row.config for row in table.entries}
            assert {row.identity: row.config for row in parse_table(table_bytes(table)).entries} == rows
        assert all(loss.where and loss.message and "\n" not in str(loss) for loss in found.losses)
        return "read"
    assert all((refused.file, refused.where, refused.expected, refused.found))
    assert len(str(refused)) < 2000
    assert "\n" not in str(refused)
    return "refused"


def test_a_run_looks_at_twenty_thousand_files() -> None:
    assert 2 * len(READERS) * SEEDS * BATCH >= 20_000


def test_the_sound_files_are_read() -> None:
    for name, (read, document) in READERS.items():
        assert read(json.dumps(document).encode()).tables, name


@readers
@given(data=st.binary(max_size=300))
@settings(max_examples=150)
def test_any_bytes(name: str, data: bytes) -> None:
    outcome(name, data)


@readers
@given(
    document=st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=8)),
        lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)),
        max_leaves=12,
    )
)
@settings(max_examples=80)
def test_any_document(name: str, document: Any) -> None:
    outcome(name, json.dumps(document).encode())


@readers
@given(seed=st.integers(0, 2**32))
@settings(max_examples=SEEDS)
def test_damaged_bytes(name: str, seed: int) -> None:
    """Bytes of a sound file are changed, removed, doubled, moved; the file is cut off."""
    random = Random(seed)
    sound = json.dumps(READERS[name][1]).encode()
    for _ in range(BATCH):
        data = bytearray(sound)
        for _ in range(random.randint(1, 4)):
            at, to = sorted(random.randrange(len(data) + 1) for _ in range(2))
            kind = random.choice(("change", "insert", "remove", "double", "cut"))
            if kind == "change" and at < len(data):
                data[at] = random.randrange(256)
            elif kind == "insert":
                data[at:at] = random.choice(
                    (b'"', b"{", b"[", b"]", b"}", b",", b":", b"NaN", b"1e999", b"\\ud800", b"\0")
                )
            elif kind == "remove":
                del data[at : min(to, at + 20)]
            elif kind == "double":
                data[at:at] = data[at:to]
            elif random.random() < 0.2:
                del data[at:]
        outcome(name, bytes(data))


def nested(depth: int, kind: type) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind is list else {"a": value}
    return value


ODD: list[Any] = [
    None, True, False, -1, 0, 1, 3, 2**31, 10**30, -(10**40), 0.5, -0.0, 1e300, math.nan, math.inf, -math.inf,
    "", "*", "kernel", "twice", "nobody", "pkg.m.kernel", "torch.int8", "torch.", "a=1", "a=1|a=2", "|", "a" * 300,
    "\ud800", "\0", "a\nb", "../../x", "é", "True", "None", "1", "(1, 2)", "sm90", "a/b", "1 2",
    [], {}, [[]], [1, 2], {"a": 1}, {"float": "1.0"}, {"kwargs": {}, "num_warps": 4, "num_stages": 3},
    nested(4, list), nested(4, dict), nested(6, dict), nested(MAX_DEPTH, list), nested(60, dict),
]  # fmt: skip


def odd(random: Random) -> Any:
    """A copy: an odd container that a document holds may be changed by a later step, or put into itself."""
    return copy.deepcopy(random.choice(ODD))


def places(value: Any) -> list[tuple[Any, Any]]:
    """Every container of a document with each of its steps."""
    found = []
    queue = [value]
    while queue:
        item = queue.pop()
        steps = list(item) if isinstance(item, dict) else list(range(len(item))) if isinstance(item, list) else []
        found += [(item, step) for step in steps]
        queue += [item[step] for step in steps]
    return found


@readers
@given(seed=st.integers(0, 2**32))
@settings(max_examples=SEEDS)
def test_any_value_in_any_place(name: str, seed: int) -> None:
    """Values and names in a sound file are replaced by odd ones, by each other, or left out."""
    random = Random(seed)
    sound = json.dumps(READERS[name][1])
    for _ in range(BATCH):
        document = json.loads(sound)
        for _ in range(random.choice((1, 1, 2))):
            spots = places(document)
            if not spots:
                break
            place, step = random.choice(spots)
            other, its = random.choice(spots)
            kind = random.choice(("odd", "odd", "other", "removed", "renamed", "added"))
            if kind == "removed":
                del place[step]
            elif kind == "renamed" and isinstance(place, dict):
                names = [item for item in ODD if isinstance(item, str)]
                place[random.choice(names)] = place.pop(step)
            elif kind == "added" and isinstance(place, dict):
                place[random.choice([item for item in ODD if isinstance(item, str)])] = odd(random)
            else:
                place[step] = json.loads(json.dumps(other[its])) if kind == "other" else odd(random)
        outcome(name, json.dumps(document).encode())


@readers
def test_a_doubled_member_anywhere_is_refused(name: str) -> None:
    sound = json.dumps(READERS[name][1])
    for at, character in enumerate(sound):
        if character == "{" and sound[at + 1] == '"':
            member = sound[at + 1 :].partition(":")[0]
            assert outcome(name, f"{sound[:at]}{{{member}: 1, {sound[at + 1 :]}".encode()) == "refused"


@readers
@pytest.mark.parametrize("opening", ["[", '{"kernels":{"k":'])
def test_deep_nesting_and_large_files_take_bounded_time(name: str, opening: str) -> None:
    started = time.process_time()
    for data in (
        opening * 100_000,
        opening + "[" * 200_000 + "]" * 200_000,
        json.dumps({str(number): number for number in range(50_000)}),
        json.dumps([[1, {"a": 2}]] * 50_000),
        '{"a": ' + "9" * 100_000 + "}",
        '{"kernels": {"pkg.m.kernel": {"' + "a=1|" * 50_000 + '": {}}}, "arch": "sm90"}',
    ):
        outcome(name, data.encode())
    assert time.process_time() - started < 10


@given(seed=st.integers(0, 2**32))
@settings(max_examples=5)
def test_records_of_a_damaged_cache_can_be_journaled(seed: int, tmp_path_factory: pytest.TempPathFactory) -> None:
    random = Random(seed)
    for _ in range(BATCH):
        document = json.loads(json.dumps(CACHE))
        place, step = random.choice(places(document))
        place[step] = random.choice(ODD)
        try:
            found = READERS["triton cache"][0](json.dumps(document).encode())
        except TuningError:
            continue
        with JournalWriter(str(tmp_path_factory.mktemp("rec") / "x"), found.journals[0].environment) as writer:
            for journal in found.journals:
                for record in journal.records:
                    writer.write(record)
        assert read_journal(writer.path).records == tuple(r for journal in found.journals for r in journal.records)
