"""Whatever bytes a table file holds: a table that survives, or one typed error; fast and strict reading agree."""

from __future__ import annotations

import json
import re
import string
from random import Random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tuning._table_scan import _scan, load
from tuning.errors import TableError
from tuning.spec import Key, LaunchConfig, encode_value
from tuning.tables import Denied, Entry, TableFile, Tables, parse_table, table_bytes

names = st.sampled_from(["a", "b", "K", "chunk_size", "BLOCK_M", "_x", "num_warps"])
dtypes = st.sampled_from(["bfloat16", "float32", "int32", "fp8e4nv", "numpy.int64"])
words = st.text(string.printable, max_size=12)
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    words,
    st.binary(max_size=4),
    st.just((1, "x")),
    st.just([2.5]),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.tuples(inner, inner),
        st.lists(inner, max_size=3),
        st.dictionaries(st.one_of(words, st.integers()), inner, max_size=3),
    ),
    max_leaves=4,
)
pairs = st.dictionaries(names, values.map(encode_value), max_size=4).map(lambda found: tuple(found.items()))
dtype_pairs = st.dictionaries(names, dtypes, max_size=4).map(lambda found: tuple(found.items()))
evidence = st.dictionaries(
    st.sampled_from(["x", "devices", "regret", "a b"]),
    st.recursive(
        st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), words),
        lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(words, inner, max_size=3)),
        max_leaves=5,
    ),
    min_size=1,
)


@st.composite
def configs(draw: st.DrawFn) -> LaunchConfig:
    return LaunchConfig(
        tuple(sorted(draw(pairs))),
        draw(st.sampled_from([None, 1, 4, 32])),
        draw(st.one_of(st.none(), st.integers(0, 9))),
        draw(st.one_of(st.none(), st.integers(1, 4))),
        draw(st.one_of(st.none(), st.integers(1, 255))),
        draw(st.one_of(st.none(), st.text("abc.", min_size=1, max_size=5))),
        draw(st.sampled_from([(), (("waves", "2"),), (("knob", '"x"'), ("waves", "2"))])),
    )


@st.composite
def entries(draw: st.DrawFn) -> Entry:
    key = draw(st.one_of(st.none(), pairs))
    named = draw(st.booleans())
    config = draw(configs())
    others = [[other] for other in draw(st.lists(configs(), max_size=2, unique=True)) if other != config]
    return Entry(
        draw(st.sampled_from(["pack.m.k", "pack.m.f.<locals>.k", "pack.k2"])),
        key,
        draw(dtype_pairs) if key is not None and named else None,
        tuple(draw(st.lists(dtypes, max_size=4))) if key is not None and not named else None,
        config,
        draw(evidence),
        draw(st.one_of(st.none(), st.just("0123abcd"))),
        draw(st.sampled_from([None, tuple(map(tuple, [[config], *others]))])),
    )


@st.composite
def denials(draw: st.DrawFn) -> Denied:
    return Denied(
        "pack.m.k",
        draw(configs()),
        draw(st.one_of(st.none(), pairs)),
        "wrong",
        draw(words) or "s",
        None,
        draw(st.one_of(st.none(), dtype_pairs)),
    )


@st.composite
def tables(draw: st.DrawFn) -> TableFile:
    return TableFile(
        "sm90",
        "pack",
        draw(words),
        draw(words),
        draw(words),
        tuple(draw(st.lists(entries(), max_size=5, unique_by=lambda row: row.identity))),
        tuple(draw(st.lists(denials(), max_size=3, unique_by=lambda row: row.identity))),
        None,
        draw(st.integers(0, 200)),
    )


def content(table: TableFile) -> Any:
    """A table's content without the order of its rows and classes, in comparable form."""

    def row_of(entry: Entry) -> str:
        classes = None if entry.classes is None else sorted(sorted(c.text for c in group) for group in entry.classes)
        form = entry.dtypes if entry.dtypes is not None else entry.dtype_sequence
        facts = json.dumps(entry.evidence, sort_keys=True)
        return repr((entry.kernel, entry.key, form, entry.config, entry.source_hash, facts, classes))

    header = (table.arch, table.package, table.package_version, table.triton, table.device, table.multiprocessors)
    return (
        header,
        sorted(map(row_of, table.entries)),
        sorted(repr((*row.identity, row.reason, row.source)) for row in table.denied),
    )


@given(tables())
@settings(max_examples=100)
def test_what_is_written_is_read_back(table: TableFile) -> None:
    data = table_bytes(table)
    back = parse_table(data)
    assert content(back) == content(table)
    assert table_bytes(back) == data
    assert content(load(data, None, "sm90", "pack").table) == content(table)


@given(tables(), st.randoms(use_true_random=False))
@settings(max_examples=40)
def test_bytes_do_not_depend_on_the_order_of_rows(table: TableFile, random: Any) -> None:
    rows, denied = list(table.entries), list(table.denied)
    random.shuffle(rows)
    random.shuffle(denied)
    turned = TableFile(**{**vars(table), "entries": tuple(rows), "denied": tuple(denied)})
    assert table_bytes(turned) == table_bytes(table)


@given(tables(), st.sampled_from(["a.b", "pack.m.k", "pack.k2"]), pairs, dtype_pairs)
@settings(max_examples=60)
def test_lookup_of_a_lazily_loaded_file_is_that_of_a_parsed_one(
    table: TableFile, kernel: str, key: Any, types: Any
) -> None:
    data = table_bytes(table)
    lazy, eager = Tables("sm90", [[load(data, None, "sm90", "pack")]]), Tables("sm90", [[parse_table(data)]])
    wanted = [Key(key, types), *(Key(row.key, row.dtypes or ()) for row in table.entries if row.key is not None)]
    for each in wanted:
        assert lazy.exact(kernel, each) == eager.exact(kernel, each)
        assert lazy.denied(kernel, each) == eager.denied(kernel, each)
    assert lazy.wildcard(kernel) == eager.wildcard(kernel)
    assert lazy.entries(kernel) == eager.entries(kernel)
    assert lazy.kernels() == eager.kernels()


def outcome(data: bytes) -> Any:
    """The table's content, or the error's place; anything else than a TableError fails the test."""
    try:
        return content(parse_table(data, "f"))
    except TableError as error:
        told = error
    assert told.file == "f"
    assert all((told.where, told.expected, told.found))
    assert len(str(told)) < 1000
    return told.where


@given(st.binary(max_size=200))
@settings(max_examples=300)
def test_any_bytes(data: bytes) -> None:
    outcome(data)


ROWS = (
    Entry(
        "pack.k", None, None, None, LaunchConfig.build({"B": 1}), {"reported_by": "me", "ranks": 8, "x": [1, "a, b"]}
    ),
    Entry(
        "pack.k3",
        None,
        None,
        None,
        LaunchConfig.build({"B": 1}),
        {
            "best_ms": 0.5,
            "devices": ["a, b", "c"],
            "regret": {"median": 0.0, "worst": 0.25},
            "runner_up_ms": None,
            "shared": True,
            "tied": 0,
        },
    ),
    Entry("pack.k", (("a", "10"), ("b", '"x, y"')), (("p", "int8"),), None, LaunchConfig.build({}), {"best_ms": 0.5}),
    Entry(
        "pack.k",
        (("a", "-12"), ("b", "64")),
        None,
        ("int8", "int32"),
        LaunchConfig.build({"B": 1, "C": None}),
        {"measured": True},
    ),
    Entry("pack.k", (("a", '{"float":"1.0"}'),), (), None, LaunchConfig.build({"B": 1}, maxnreg=64), {"y": {"z": 1}}),
    Entry("pack.m.k", (), None, (), LaunchConfig.build({"B": 2}, num_ctas=2), {"note": "n"}, "0123abcd"),
)
TEXT = table_bytes(TableFile("sm90", "pack", "1", "3.6.0", "d", ROWS)).decode()
TOKENS = re.findall(r'"[^"]*"(?:: )?|[-\w.]+|[^\w"]+', TEXT)
ODD_TOKENS = [
    *"01 -0 -7 3 1.5 1.0 1e999 1e5 1E5 NaN true null [] {} [1] 12345678901234567890".split(),
    *r'"torch.int8" "*" "" "abc" "a\u0041" "a\" "\ud800" "é"'.split(),
    *('"x y"', '"\x01"', '"a": 1, "a": 2', "\n", ", "),
]
ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    3,
    2.5,
    1e300,
    "",
    "*",
    "torch.int8",
    "\ud800",
    [],
    {},
    [1],
    {"a": 1},
    {"float": "1"},
]


@given(st.integers(0, 2**32))
@settings(max_examples=25)
def test_any_value_in_any_place(seed: int) -> None:
    """A value lands in a random place of a sound table: no crash, and where it is refused the place is named."""
    random = Random(seed)
    for _ in range(40):
        document = place = json.loads(TEXT)
        while True:
            steps = list(place) if isinstance(place, dict) else list(range(len(place)))
            step = random.choice(steps)
            if not isinstance(place[step], (dict, list)) or not place[step] or random.random() < 0.2:
                break
            place = place[step]
        place[step] = random.choice([*ODD, document, ROWS[0].kernel])
        if place[step] is document:
            place[step] = json.loads(TEXT)
        outcome(json.dumps(document).encode())


def check_that_the_fast_path_is_right(text: str) -> None:
    data = text.encode()
    loaded = _scan(data, "f", "sm90", "pack")
    if loaded is not None:
        assert content(loaded.table) == outcome(data)


def test_no_odd_token_slips_through_the_fast_path() -> None:
    """Each token of a canonical file is replaced by each odd one: what the fast path takes, the strict reader takes."""
    for at in range(len(TOKENS)):
        for odd in ODD_TOKENS:
            check_that_the_fast_path_is_right("".join([*TOKENS[:at], odd, *TOKENS[at + 1 :]]))
    for found in re.finditer(r"\{[^{}]*\}|\[[^\[\]]*\]", TEXT):
        for empty in ("{}", "[]", "{ }"):
            check_that_the_fast_path_is_right(TEXT[: found.start()] + empty + TEXT[found.end() :])


@given(st.integers(0, 2**32))
@settings(max_examples=30)
def test_a_damaged_line_never_slips_through_the_fast_path(seed: int) -> None:
    """The same with several damages, with tokens of other places, and with removed and doubled ones."""
    random = Random(seed)
    for _ in range(100):
        tokens = list(TOKENS)
        for _ in range(random.randint(1, 2)):
            at = random.randrange(len(tokens))
            kind = random.choice(("odd", "other", "removed", "doubled"))
            alike = [token for token in TOKENS if token[-1] == tokens[at][-1]] or TOKENS
            tokens[at] = {
                "odd": random.choice(ODD_TOKENS),
                "other": random.choice(alike),
                "removed": "",
                "doubled": f"{tokens[at]}, {tokens[at]}" if random.random() < 0.5 else tokens[at] * 2,
            }[kind] or " "
        check_that_the_fast_path_is_right("".join(tokens))


@given(st.lists(entries(), min_size=1, max_size=4), st.data())
@settings(max_examples=40)
def test_doubled_rows_are_found_by_both(rows: list[Entry], data: st.DataObject) -> None:
    """Rows with one identity stand in a file twice, the second time in any order of members."""
    unique = list({row.identity: row for row in rows}.values())
    lines = [json.loads(table_bytes(TableFile("sm90", "pack", "", "", "", (row,))))["entries"][0] for row in unique]
    again = json.loads(json.dumps(data.draw(st.sampled_from(lines))))
    for member in ("key", "dtypes"):
        if isinstance(again.get(member), dict):
            again[member] = dict(data.draw(st.permutations(list(again[member].items()))))
    body = ",\n".join(map(json.dumps, [*lines, again]))
    head = table_bytes(TableFile("sm90", "pack", "", "", "", ())).decode().partition('"entries"')[0]
    twice = (head + '"entries": [\n' + body + '\n],\n"denied": []\n}\n').encode()
    assert _scan(twice, "f", "sm90", "pack") is None
    assert outcome(twice) == f"$.entries[{len(lines)}]"


@given(values)
@settings(max_examples=200)
def test_every_encoded_value_can_stand_in_a_key(value: Any) -> None:
    text = encode_value(value)
    row = Entry("pack.k", (("a", text),), (), None, LaunchConfig.build({"B": value}), {"reported_by": "me"})
    back = parse_table(table_bytes(TableFile("sm90", "pack", "", "", "", (row,)))).entries[0]
    assert back.key == (("a", text),)
    assert back.config == row.config
