"""A choice depends on its arguments' content alone: not on any order, the hash seed, the rank or the process."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from tuning.errors import TableError, TableMissError
from tuning.selection import Decision, cheapest_order, decide, static_cost
from tuning.spec import Kernel, Key, LaunchConfig
from tuning.tables import Denied, Entry, TableFile, Tables

ROOT = Path(__file__).parents[2]
KERNEL = "pack.m.kernel"
NAMES = ("BLOCK_M", "BV", "NUM_SMS", "EVEN")


@dataclass(frozen=True)
class Policy:
    on_miss: str = "cheapest"
    block_sizes: tuple[tuple[str, int], ...] = ()
    chaos: bool = False


@dataclass(frozen=True)
class Case:
    """All that a decision is a function of, as plain data."""

    key: Key
    candidates: tuple[LaunchConfig, ...]
    entries: tuple[Entry, ...]
    denied: tuple[Denied, ...]
    foreign: tuple[tuple[str, tuple[Entry, ...], tuple[Denied, ...]], ...]
    policy: Policy
    source_hash: str | None


def live(config: LaunchConfig) -> Any:
    """A live candidate with this content; vendor fields become attributes, as in Triton."""
    return SimpleNamespace(
        kwargs={name: json.loads(text) for name, text in config.kwargs},
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        num_ctas=config.num_ctas,
        maxnreg=config.maxnreg,
        ir_override=config.ir_override,
        pre_hook=None,
        **{name: json.loads(text) for name, text in config.extra},
    )


configs = st.builds(
    lambda kwargs, warps, stages, maxnreg, extra: LaunchConfig.build(
        kwargs, num_warps=warps, num_stages=stages, maxnreg=maxnreg, extra=extra
    ),
    st.dictionaries(st.sampled_from(NAMES), st.sampled_from([1, 2, 16, 64, 128, True, "ieee", None]), max_size=3),
    st.sampled_from([4, 8]),
    st.sampled_from([1, 2]),
    st.sampled_from([None, None, 64]),
    st.sampled_from([{}, {}, {"waves": 2}]),
)
keys = st.builds(
    lambda values, dtypes, turned: Key.of(
        dict(reversed(values.items())) if turned else values, dict(reversed(dtypes.items())) if turned else dtypes
    ),
    st.sampled_from([{"K": 1, "c": True}, {"K": 1, "c": 1}, {"K": 64}, {}]),
    st.sampled_from([{"x": "int8", "y": "int32"}, {"x": "int32", "y": "int8"}, {}]),
    st.booleans(),
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    candidates = tuple(draw(st.lists(configs, min_size=1, max_size=7)))
    some = st.one_of(st.sampled_from(candidates), st.sampled_from(candidates), configs)
    hashes = st.sampled_from([None, "aaaaaaaa", "bbbbbbbb"])
    key = draw(keys)

    def entry(kind: str) -> Entry:
        its_key = draw(st.one_of(st.just(key), keys))
        values, named, sequence = {
            "star": (None, None, None),
            "named": (its_key.values, its_key.dtypes, None),
            "sequence": (its_key.values, None, tuple(draw(st.permutations(its_key.dtype_sequence)))),
        }[kind]
        evidence = {"reported_by": "a test"}
        return Entry(
            KERNEL, values, named, sequence, draw(some), evidence, draw(hashes), origin=draw(st.just("t.json"))
        )

    entries = [entry(kind) for kind in draw(st.lists(st.sampled_from(["star", "named", "sequence"]), max_size=5))]

    def denials(most: int) -> tuple[Denied, ...]:
        at = st.one_of(st.none(), st.just(key.values), st.just((("K", "1"),)))
        rows = [Denied(KERNEL, draw(some), draw(at), "r", "s", "t.json") for _ in range(draw(st.integers(0, most)))]
        return tuple({row.identity: row for row in rows}.values())

    kinds = st.lists(st.sampled_from(["star", "named", "sequence"]), max_size=3)
    foreign = tuple(
        (arch, tuple({row.identity: row for row in [entry(kind) for kind in draw(kinds)]}.values()), denials(1))
        for arch in draw(st.lists(st.sampled_from(["sm100", "sm103", "gfx942"]), unique=True))
    )
    return Case(
        key,
        candidates,
        tuple({row.identity: row for row in entries}.values()),
        denials(3),
        foreign,
        Policy(
            draw(st.sampled_from(["cheapest", "nearest", "model", "error"])),
            tuple(draw(st.dictionaries(st.sampled_from(NAMES), st.sampled_from([16, 64]), max_size=2)).items()),
            draw(st.sampled_from([False, False, False, True])),
        ),
        draw(hashes),
    )


def outcome(case: Case, order: Any = None, rank: int = 0, rotate: int = 0) -> Any:
    """What a user can see of a decision, candidates by content; or the error. ``order`` turns every order there is."""

    def turned(rows: Any) -> list[Any]:
        rows = list(rows)
        if order is not None:
            order.shuffle(rows)
        return rows

    file = TableFile("sm90", "pack", "", "", "", tuple(turned(case.entries)), tuple(turned(case.denied)))
    key = Key(tuple(turned(case.key.values)), case.key.dtypes, tuple(turned(name for name, _ in case.key.dtypes)))
    policy = Policy(case.policy.on_miss, tuple(turned(case.policy.block_sizes)), case.policy.chaos)
    objects = [live(config) for config in turned(case.candidates)]
    for candidate in objects:
        candidate.kwargs = dict(turned(candidate.kwargs.items()))
    others = [
        Tables(arch, [[TableFile(arch, "pack", "", "", "", tuple(turned(entries)), tuple(turned(denied)))]])
        for arch, entries, denied in turned(case.foreign)
    ]
    tables = Tables("sm90", [[file]]).beside(others)
    try:
        found = decide(Kernel(KERNEL, case.source_hash), key, "sm90", objects, tables, policy, chaos_rank=rank)
    except (TableError, TableMissError) as error:
        return type(error).__name__, str(error).replace(str(key), str(case.key))
    assert any(found.choice.config is candidate for candidate in objects), "a choice is one of the live objects"
    assert all(any(one is candidate for candidate in objects) for one in found.order)
    assert found.order[0] is found.choice.config
    return seen(found)


def seen(decision: Decision) -> Any:
    choice = decision.choice
    return (
        (
            choice.kernel,
            choice.key.text,
            choice.launch_config.text,
            choice.source,
            choice.origin,
            choice.arch,
            choice.detail,
        ),
        tuple(LaunchConfig.of(candidate).text for candidate in decision.order),
        tuple((notice.kind, notice.message) for notice in decision.notices),
    )


@given(cases(), st.randoms(use_true_random=False))
@settings(max_examples=200)
def test_no_order_matters(case: Case, order: Any) -> None:
    first = outcome(case)
    event(first[0] if isinstance(first[0], str) else first[0][3])
    assert outcome(case, order) == first


@given(cases(), st.integers(0, 1000))
@settings(max_examples=60)
def test_the_rank_matters_only_in_chaos(case: Case, rank: int) -> None:
    case = replace(case, policy=replace(case.policy, chaos=False))
    assert outcome(case, rank=rank) == outcome(case)


@given(cases())
@settings(max_examples=60)
def test_chaos_spreads_over_all_that_is_left(case: Case) -> None:
    case = replace(case, policy=replace(case.policy, chaos=True))
    first = outcome(case)
    assume(first[0] != "TableError")
    count = len(first[1])
    picked = [outcome(case, rank=rank)[0][2] for rank in range(count)]
    assert sorted(picked) == sorted(first[1])


def _usable_abroad(
    entries: tuple[Entry, ...], denied: tuple[Denied, ...], values: dict[str, str], left: dict[str, LaunchConfig]
) -> set[str]:
    banned = {
        row.config.text for row in denied if row.key is None or all(values.get(name) == text for name, text in row.key)
    }
    return ({row.config.text for row in entries} & set(left)) - banned


@given(cases())
@settings(max_examples=200)
def test_denied_is_never_chosen_and_the_rules_come_in_order(case: Case) -> None:
    """An independent statement of the rules, over plain data."""
    values = dict(case.key.values)
    banned = {
        row.config.text
        for row in case.denied
        if row.key is None or all(values.get(name) == text for name, text in row.key)
    }
    left = {config.text: config for config in case.candidates if config.text not in banned}
    found = outcome(case)
    if not left:
        assert found[0] == "TableError"
        return
    if case.policy.chaos:
        assert found[0][2] in left
        return

    by_name = [
        row
        for row in case.entries
        if row.dtypes is not None and dict(row.key or ()) == values and dict(row.dtypes) == dict(case.key.dtypes)
    ]
    mine = case.key.dtype_sequence
    alike = [
        row
        for row in case.entries
        if row.dtype_sequence is not None
        and dict(row.key or ()) == values
        and sorted(row.dtype_sequence) == sorted(mine)
    ]
    in_order = [row for row in alike if row.dtype_sequence == mine]
    exact = (by_name or in_order or (alike if len(alike) == 1 else []))[:1]
    star = [row for row in case.entries if row.key is None]
    names = {name for config in left.values() for name, _ in config.kwargs}
    wanted = {(name, str(size)) for name, size in case.policy.block_sizes if name in names}
    sized = [config for config in left.values() if wanted <= set(config.kwargs)] if wanted else []

    expected: tuple[str, set[str]]
    if exact and exact[0].config.text in left:
        expected = ("exact", {exact[0].config.text})
    elif sized:
        expected = ("block_sizes", {config.text for config in sized})
    elif star and star[0].config.text in left:
        expected = ("wildcard", {star[0].config.text})
    elif case.policy.on_miss == "error":
        assert found[0] == "TableMissError"
        return
    elif case.policy.on_miss == "cheapest":
        expected = ("cheapest", set(left))
    else:
        # An independent statement of where nearest may look, by arch: live, denied neither here nor there.
        here = {row.config.text for row in case.entries} & set(left)
        abroad = {arch: _usable_abroad(entries, denied, values, left) for arch, entries, denied in case.foreign}
        cousins = set().union(*(found for arch, found in abroad.items() if arch.startswith("sm")))
        usable = here or cousins or abroad.get("gfx942", set())
        near = case.policy.on_miss == "nearest" and usable
        expected = ("nearest", usable) if near else ("model", set(left))
    (_, _, chosen, source, *_), order, _ = found
    assert source == expected[0]
    assert chosen in expected[1]
    best = min(static_cost(left[text]) for text in expected[1])
    assert source not in ("cheapest", "block_sizes") or static_cost(left[chosen]) == best
    assert sorted(order) == sorted(left)
    costs = [static_cost(left[text]) for text in order[1:]]
    assert costs == sorted(costs)


@given(st.lists(configs, min_size=1, max_size=6))
@settings(max_examples=100)
def test_cheapest_order_is_one_order_for_every_listing(found: list[LaunchConfig]) -> None:
    first = [LaunchConfig.of(candidate).text for candidate in cheapest_order(map(live, found))]
    assert len(first) == len(set(first)) == len({config.text for config in found})
    for listing in itertools.islice(itertools.permutations(found), 1, 24):
        assert [LaunchConfig.of(candidate).text for candidate in cheapest_order(map(live, listing))] == first


PROCESS = """
import json, random, sys
from types import SimpleNamespace
from tuning.selection import decide
from tuning.spec import Kernel, Key, LaunchConfig
from tuning.tables import load_tables

order = random.Random(int(sys.argv[1]))
found = []
for arch in ("sm100", "sm103", "sm90"):
    tables = load_tables(arch, neighbours=True)
    names = list({"pack.m.none", *tables.kernels()})
    for name in names:
        keys = [Key(row.key or (), tuple((f"p{i}", d) for i, d in enumerate(row.dtype_sequence or ())))
                for row in tables.entries(name)] + [Key.of({"K": 1}, {"x": "int8"})]
        live = [SimpleNamespace(kwargs={"BLOCK": size, "W": warps}, num_warps=warps, num_stages=2)
                for size in (16, 64, 256) for warps in (2, 4, 8)]
        live += [SimpleNamespace(kwargs={k: json.loads(v) for k, v in row.config.kwargs},
                                 num_warps=row.config.num_warps, num_stages=row.config.num_stages)
                 for row in tables.entries(name)]
        order.shuffle(keys)
        for key in keys:
            order.shuffle(live)
            for rule, sizes, chaos in (("cheapest", (), False), ("cheapest", (("BLOCK", 64),), False),
                                       ("cheapest", (), True), ("nearest", (), False), ("model", (), False)):
                policy = SimpleNamespace(on_miss=rule, block_sizes=sizes, chaos=chaos)
                decision = decide(Kernel(name), key, arch, live, tables, policy, chaos_rank=3)
                found.append([decision.choice.to_json(), [LaunchConfig.of(c).text for c in decision.order],
                              [n.message for n in decision.notices]])
print(json.dumps(sorted(found, key=json.dumps), sort_keys=True))
"""


def test_processes_with_other_hash_seeds_agree() -> None:
    """Over every shipped table, and with every listing shuffled in each process."""
    outputs = {
        subprocess.run(
            [sys.executable, "-c", PROCESS, seed],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1", "4242")
    }
    assert len(outputs) == 1
    sources = {choice["source"] for choice, *_ in json.loads(outputs.pop())}
    assert sources == {"exact", "wildcard", "block_sizes", "cheapest", "chaos", "nearest", "model"}
