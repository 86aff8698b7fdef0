"""Choosing: the order of rules, what each rule picks, and what a user is told."""

from __future__ import annotations

import ast
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tuning.errors import PolicyError, TableError, TableMissError, TuningError
from tuning.policy import AutotunePolicy
from tuning.selection import (
    Candidates,
    Decision,
    StaticCost,
    cheapest_order,
    choose,
    decide,
    static_cost,
    tile_names,
)
from tuning.spec import Kernel, Key, LaunchConfig
from tuning.tables import Denied, Entry, TableFile, Tables

KERNEL = Kernel("pack.m.kernel", "11112222")
KEY = Key.of({"K": 128, "causal": False}, {"x": "bfloat16", "y": "float32"})


@dataclass(frozen=True)
class Policy:
    """What is read of a policy."""

    on_miss: str = "cheapest"
    block_sizes: tuple[tuple[str, int], ...] = ()
    chaos: bool = False


def config(warps: int = 4, stages: int = 2, **kwargs: Any) -> Any:
    """A live candidate; a new object at each call."""
    return SimpleNamespace(kwargs=kwargs, num_warps=warps, num_stages=stages, pre_hook=None)


SMALL, MEDIUM, LARGE = config(BLOCK_M=32, BLOCK_N=32), config(BLOCK_M=64, BLOCK_N=64), config(BLOCK_M=128, BLOCK_N=128)
CANDIDATES = (MEDIUM, LARGE, SMALL)


def entry(candidate: Any, *, wildcard: bool = False, key: Key = KEY, **fields: Any) -> Entry:
    defaults: dict[str, Any] = {"origin": "t.json", "source_hash": None}
    return Entry(
        KERNEL.qualified_name,
        None if wildcard else key.values,
        None if wildcard else key.dtypes,
        None,
        LaunchConfig.of(candidate),
        {"reported_by": "a test"},
        **{**defaults, **fields},
    )


def denial(candidate: Any, **fields: Any) -> Denied:
    return Denied(
        **{
            "kernel": KERNEL.qualified_name,
            "config": LaunchConfig.of(candidate),
            "key": None,
            "reason": "races",
            "source": "a report",
            "origin": "d.json",
            **fields,
        }
    )


def tables(*entries: Entry, denied: Sequence[Denied] = (), arch: str = "sm90") -> Tables:
    return Tables(arch, [[TableFile(arch, "pack", "", "", "", tuple(entries), tuple(denied))]])


def decided(
    *entries: Entry,
    denied: Sequence[Denied] = (),
    candidates: Sequence[Any] = CANDIDATES,
    kernel: Kernel = KERNEL,
    key: Key = KEY,
    rank: int = 0,
    triton: str = "",
    **policy: Any,
) -> Decision:
    found = tables(*entries, denied=denied)
    return decide(kernel, key, "sm90", candidates, found, Policy(**policy), chaos_rank=rank, triton=triton)


def kinds(decision: Decision) -> list[str]:
    return [notice.kind for notice in decision.notices]


class TestOrderOfRules:
    EXACT, STAR = entry(LARGE), entry(MEDIUM, wildcard=True)
    WANTED = (("BLOCK_M", 64),)

    @pytest.mark.parametrize(
        ("entries", "policy", "source", "candidate"),
        [
            ((EXACT, STAR), {"block_sizes": (("BLOCK_M", 32),)}, "exact", LARGE),
            ((STAR,), {"block_sizes": (("BLOCK_M", 32),)}, "block_sizes", SMALL),
            ((STAR,), {}, "wildcard", MEDIUM),
            ((STAR,), {"on_miss": "error"}, "wildcard", MEDIUM),
            ((), {"block_sizes": (("BLOCK_M", 64),), "on_miss": "error"}, "block_sizes", MEDIUM),
            ((), {}, "cheapest", SMALL),
        ],
    )
    def test_the_first_that_applies(
        self, entries: Sequence[Entry], policy: dict[str, Any], source: str, candidate: Any
    ) -> None:
        decision = decided(*entries, **policy)
        assert decision.choice.source == source
        assert decision.choice.config is candidate
        assert decision.choice.origin == ("t.json" if source in ("exact", "wildcard") else None)
        assert decision.notices == ()

    def test_the_choice_says_what_it_is_for(self) -> None:
        choice = decided(self.EXACT).choice
        assert (choice.kernel, choice.key, choice.arch) == ("pack.m.kernel", KEY, "sm90")

    def test_the_fallback_order_is_the_chosen_one_then_cheapest(self) -> None:
        assert decided(self.EXACT).order == (LARGE, SMALL, MEDIUM)
        assert decided().order == (SMALL, MEDIUM, LARGE)
        assert decided(self.EXACT, denied=[denial(SMALL)]).order == (LARGE, MEDIUM)

    def test_an_entry_of_another_kernel_or_key_is_none(self) -> None:
        other = entry(LARGE, key=Key.of({"K": 64, "causal": False}, {"x": "bfloat16", "y": "float32"}))
        assert decided(other).choice.source == "cheapest"
        assert decided(self.EXACT, kernel=Kernel("pack.other.kernel")).choice.source == "cheapest"

    @pytest.mark.parametrize("value", [1, 0, "False", None, 0.0])
    def test_a_key_value_of_another_type_is_another_key(self, value: object) -> None:
        key = Key.of({"K": 128, "causal": value}, {"x": "bfloat16", "y": "float32"})
        assert decided(self.EXACT, key=key).choice.source == "cheapest"

    def test_a_kernel_may_be_given_by_name(self) -> None:
        for kernel in (KERNEL, KERNEL.qualified_name):
            assert choose(kernel, KEY, "sm90", CANDIDATES, tables(self.EXACT), Policy()).config is LARGE

    def test_the_real_policy_has_what_is_read(self) -> None:
        policy = AutotunePolicy(block_sizes={"BLOCK_M": 64})
        assert choose(KERNEL, KEY, "sm90", CANDIDATES, tables(), policy).config is MEDIUM

    def test_no_candidate_at_all(self) -> None:
        with pytest.raises(TuningError, match=r"pack\.m\.kernel on sm90: expected a candidate, found none"):
            decided(candidates=[])


class TestLiveObjects:
    def test_the_object_is_returned_hook_and_all(self) -> None:
        hooked = config(BLOCK_M=64, BLOCK_N=64)
        hooked.pre_hook = lambda arguments: None
        decision = decided(entry(MEDIUM), candidates=[SMALL, hooked])
        assert decision.choice.config is hooked
        assert decision.order == (hooked, SMALL)

    def test_of_equal_candidates_the_first_listed_stands_for_all(self) -> None:
        first, second = config(BLOCK_M=64, BLOCK_N=64), config(BLOCK_N=64, BLOCK_M=64)
        decision = decided(entry(MEDIUM), candidates=[LARGE, first, second])
        assert decision.choice.config is first
        assert decision.order == (first, LARGE)

    @pytest.mark.parametrize(
        "field",
        [{"ir_override": "a.ttir"}, {"maxnreg": 64}, {"num_ctas": 2}, {"waves_per_eu": 2}, {"num_warps": 8}],
    )
    def test_candidates_that_differ_in_one_field_are_told_apart(self, field: dict[str, Any]) -> None:
        plain, other = config(BLOCK_M=64), config(BLOCK_M=64)
        vars(other).update(field)
        for wanted in (plain, other):
            assert decided(entry(wanted), candidates=[plain, other]).choice.config is wanted
        assert decided(candidates=[plain, other], denied=[denial(plain)]).choice.config is other

    def test_triton_configs(self) -> None:
        triton = pytest.importorskip("triton")
        live = [
            triton.Config({"BLOCK_M": size, "BLOCK_N": 64}, num_warps=4, num_stages=3, pre_hook=print)
            for size in (128, 32, 64)
        ]
        assert decided(candidates=live).choice.config is live[1]
        again = triton.Config({"BLOCK_N": 64, "BLOCK_M": 128}, num_warps=4, num_stages=3)
        assert decided(entry(again), candidates=live).choice.config is live[0]

    def test_candidates_may_be_read_once(self) -> None:
        read = Candidates.of(CANDIDATES)
        assert decided(entry(LARGE), candidates=read) == decided(entry(LARGE))  # type: ignore[arg-type]
        assert choose(KERNEL, KEY, "sm90", read, tables(), Policy()).config is SMALL


class TestMissesAndNotices:
    GONE = config(BLOCK_M=16, BLOCK_N=16)

    @pytest.mark.parametrize("wildcard", [False, True])
    def test_an_entry_whose_config_is_no_candidate_is_a_miss(self, wildcard: bool) -> None:
        decision = decided(entry(self.GONE, wildcard=wildcard))
        assert decision.choice.source == "cheapest"
        (notice,) = decision.notices
        assert notice.kind == "not_a_candidate"
        which = "*" if wildcard else "exact"
        assert notice.message == (
            f"pack.m.kernel on sm90: the {which} entry in t.json names a config that is no live candidate "
            "(BLOCK_M=16 BLOCK_N=16 num_warps=4 num_stages=2); the next rule decides"
        )

    def test_after_a_miss_of_the_exact_entry_the_next_rules_follow_in_order(self) -> None:
        gone, star = entry(self.GONE), entry(MEDIUM, wildcard=True)
        assert decided(gone, star).choice.source == "wildcard"
        assert decided(gone, star, block_sizes=(("BLOCK_M", 32),)).choice.source == "block_sizes"

    def test_another_source_hash_is_used_and_said(self) -> None:
        decision = decided(entry(LARGE, source_hash="deadbeef"))
        assert decision.choice.config is LARGE
        (notice,) = decision.notices
        assert notice.kind == "stale_source"
        assert "source has changed since the exact entry in t.json was made; the entry is used" in notice.message

    def test_equal_and_unknown_hashes_are_not_worth_a_word(self) -> None:
        assert decided(entry(LARGE, source_hash="11112222")).notices == ()
        assert decided(entry(LARGE)).notices == ()
        unknown = Kernel(KERNEL.qualified_name)
        assert decided(entry(LARGE, source_hash="deadbeef"), kernel=unknown).notices == ()

    def test_a_hash_that_is_not_used_is_not_worth_a_word(self) -> None:
        star = entry(MEDIUM, wildcard=True, source_hash="deadbeef")
        assert decided(entry(LARGE, source_hash="11112222"), star).notices == ()

    @pytest.mark.parametrize(
        ("made", "running", "said"),
        [
            ("3.4.0", "3.8.0", True),
            ("3.4.0", "3.4.1", False),
            ("3.4.0+git12", "3.4.0", False),
            ("3.4.0, 3.8.0", "3.8.1", False),
            ("3.4.0, 3.6.0", "3.8.1", True),
            ("", "3.8.0", False),
            ("3.4.0", "", False),
        ],
    )
    def test_an_entry_made_under_another_triton_is_used_and_said(self, made: str, running: str, said: bool) -> None:
        decision = decided(entry(LARGE, triton=made), triton=running)
        assert decision.choice.config is LARGE
        assert decision.choice == decided(entry(LARGE)).choice
        assert kinds(decision) == (["other_triton"] if said else [])
        if said:
            assert f"made under Triton {made}, this is {running}; the entry is used" in decision.notices[0].message


class TestDenied:
    def test_denied_candidates_are_removed_before_any_rule(self) -> None:
        decision = decided(denied=[denial(SMALL)])
        assert (decision.choice.config, decision.order) == (MEDIUM, (MEDIUM, LARGE))
        (notice,) = decision.notices
        assert notice.kind == "denied"
        assert notice.message == (
            "pack.m.kernel on sm90: 1 of 3 candidates are denied and not considered: "
            "BLOCK_M=32 BLOCK_N=32 num_warps=4 num_stages=2: races (a report; d.json)"
        )

    @pytest.mark.parametrize("wildcard", [False, True])
    def test_an_entry_does_not_allow_what_is_denied(self, wildcard: bool) -> None:
        decision = decided(entry(SMALL, wildcard=wildcard), denied=[denial(SMALL)])
        assert decision.choice.config is MEDIUM
        assert kinds(decision) == ["denied", "denied"]
        assert "names a denied config" in decision.notices[1].message

    def test_block_sizes_do_not_either(self) -> None:
        decision = decided(denied=[denial(SMALL)], block_sizes=(("BLOCK_M", 32),))
        assert decision.choice.config is MEDIUM
        assert kinds(decision) == ["denied", "block_sizes_unmatched"]

    def test_chaos_does_not_either(self) -> None:
        for rank in range(7):
            assert decided(denied=[denial(SMALL)], rank=rank, chaos=True).choice.config is not SMALL

    def test_other_configs_kernels_and_keys_are_not_concerned(self) -> None:
        rows = [
            denial(config(BLOCK_M=8)),
            denial(SMALL, kernel="pack.m.other"),
            denial(SMALL, key=(("K", "64"),)),
            denial(SMALL, dtypes=(("x", "float32"),)),
        ]
        assert decided(denied=rows) == decided()

    def test_if_everything_is_denied_nothing_is_launched(self) -> None:
        rows = [denial(LARGE), denial(SMALL, reason="wrong"), denial(MEDIUM)]
        for policy in ({}, {"on_miss": "error"}, {"chaos": True}):
            with pytest.raises(TableError) as caught:
                decided(entry(LARGE), denied=rows, **policy)
            error = caught.value
            assert str(error).startswith(
                "pack.m.kernel on sm90: expected a candidate that is not denied, found all 3 denied: "
                "BLOCK_M=32 BLOCK_N=32 num_warps=4 num_stages=2: wrong (a report; d.json); BLOCK_M=64"
            )
            assert (error.file, error.where, error.found) == ("d.json", "$.denied", "all 3 denied")
            assert "\n" not in str(error)

    def test_a_duplicate_candidate_is_denied_once(self) -> None:
        twin = config(BLOCK_M=32, BLOCK_N=32)
        assert "1 of 3" in decided(denied=[denial(SMALL)], candidates=[*CANDIDATES, twin]).notices[0].message


class TestStaticCost:
    @pytest.mark.parametrize(
        ("kwargs", "footprint"),
        [
            ({"BLOCK_M": 64, "BLOCK_N": 32}, 2048),
            ({"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 16}, 32768),
            ({"BT": 64, "BV": 32}, 2048),
            ({"BS": 16, "BK": 32, "BC": 2}, 1024),
            ({"B": 512}, 512),
            ({"CHUNK_SIZE": 64}, 64),
            ({"BLOCK_SIZE_C": 256, "STEP_SIZE_C": 64}, 16384),
            ({"TILE": 8, "rows_per_program": 4}, 32),
            ({"BM": 64, "G": 4}, 64),
            ({"BLOCK": 64, "GROUP_SIZE_M": 8}, 64),
            ({"BLOCK": 64, "GROUP_M": 8, "GROUP_SIZE": 4, "GROUP": 2}, 64),
            ({"BT": 64, "NW": 8}, 64),
            ({"BLOCK": 64, "NUM_SMS": 132, "num_warps": 8, "NUM_STAGES": 4}, 64),
            ({"BLOCK": 64, "SPLIT_K": 4, "NUM_SPLITS": 2, "KV_SPLITS": 8, "split": 2}, 64),
            ({"BLOCK": 64, "waves_per_eu": 2, "kpack": 2, "matrix_instr_nonkdim": 16}, 64),
            ({"BLOCK": 64, "SWIZZLE": 8, "XCD_SWIZZLE": 4, "swizzle_size": 2}, 64),
            ({"BLOCK": 64, "EVEN_K": True, "USE_TMA": False}, 64),
            ({"BLOCK": 64, "ZERO": 0, "NEGATIVE": -1, "HALF": 0.5, "NAME": "128", "NONE": None}, 64),
            ({}, 1),
        ],
    )
    def test_every_tile_like_parameter_counts(self, kwargs: dict[str, Any], footprint: int) -> None:
        cost = static_cost(LaunchConfig.build(kwargs, num_warps=8, num_stages=3))
        assert cost == StaticCost(3 * footprint, 8)

    @pytest.mark.parametrize(("stages", "footprint"), [(None, 64), (0, 64), (1, 64), (2, 128)])
    def test_no_stages_count_as_one(self, stages: int | None, footprint: int) -> None:
        assert static_cost(LaunchConfig.build({"B": 64}, num_stages=stages)).footprint == footprint

    def test_no_warps_sort_first(self) -> None:
        assert static_cost(LaunchConfig.build({}, num_warps=None)) < static_cost(LaunchConfig.build({}, num_warps=1))

    def test_names_are_told(self) -> None:
        assert tile_names(LaunchConfig.build({"BV": 2, "BT": 1, "NUM_SMS": 8, "X": "a"})) == ("BT", "BV")

    def test_footprint_then_warps_then_canonical_order(self) -> None:
        ranked = [
            config(BT=16, BV=16, warps=8, stages=1),
            config(BT=16, BV=32, warps=2, stages=1),
            config(BT=16, BV=16, warps=4),
            config(BT=16, BV=32, warps=4, stages=1),
            config(BT=32, BV=16, warps=4, stages=1),
            config(BT=128, BV=4, warps=4, stages=1),
            config(BT=64, BV=64, warps=1, stages=1),
        ]
        assert cheapest_order(ranked[::-1]) == tuple(ranked)
        assert cheapest_order(ranked[3:] + ranked[:3]) == tuple(ranked)

    def test_duplicates_are_dropped(self) -> None:
        assert cheapest_order([MEDIUM, config(BLOCK_N=64, BLOCK_M=64), SMALL]) == (SMALL, MEDIUM)

    def test_a_list_that_cannot_be_ranked_says_so(self) -> None:
        live = [config(warps=8, stages=2), config(warps=4, stages=3), config(warps=4, stages=2)]
        decision = decided(candidates=live)
        assert decision.choice.config is live[2]
        assert decision.order == (live[2], live[0], live[1])
        (notice,) = decision.notices
        assert notice.kind == "unranked"
        assert "no candidate has a tile-like parameter" in notice.message
        assert "num_warps=4 num_stages=2" in notice.message

    def test_it_is_said_only_where_the_ranking_decided(self) -> None:
        live = [config(warps=8), config(warps=4)]
        assert decided(entry(live[0]), candidates=live).notices == ()
        assert decided(candidates=live[:1]).notices == ()
        assert decided(candidates=[config(NUM_SMS=8), config(NUM_SMS=16)]).notices[0].kind == "unranked"
        assert decided(candidates=[config(BT=8), config(NUM_SMS=16)]).notices == ()

    def test_the_choice_says_what_it_cost(self) -> None:
        assert decided().choice.detail == "footprint 2048, 4 warps"


class TestBlockSizes:
    def test_the_cheapest_of_those_that_match(self) -> None:
        live = [config(BLOCK_M=64, BLOCK_N=size) for size in (128, 32, 64)] + [config(BLOCK_M=32, BLOCK_N=16)]
        assert decided(candidates=live, block_sizes=(("BLOCK_M", 64),)).choice.config is live[1]
        assert decided(candidates=live, block_sizes=(("BLOCK_M", 64), ("BLOCK_N", 128))).choice.config is live[0]

    def test_names_that_the_kernel_has_not_are_left_aside(self) -> None:
        wanted = (("BLOCK_M", 64), ("BT", 16))
        assert decided(block_sizes=wanted).choice.config is MEDIUM
        decision = decided(block_sizes=(("BT", 16),))
        assert (decision.choice.source, decision.notices) == ("cheapest", ())

    def test_a_name_that_only_some_candidates_have_counts(self) -> None:
        live = [config(BLOCK_M=16), config(BLOCK_M=64, SPLIT_K=4)]
        assert decided(candidates=live, block_sizes=(("SPLIT_K", 4),)).choice.config is live[1]

    def test_all_applicable_pairs_must_match(self) -> None:
        decision = decided(block_sizes=(("BLOCK_N", 32), ("BLOCK_M", 64)))
        assert decision.choice.source == "cheapest"
        assert kinds(decision) == ["block_sizes_unmatched"]
        assert "no live candidate has block_sizes BLOCK_M=64 BLOCK_N=32" in decision.notices[0].message

    def test_values_are_integers(self) -> None:
        live = [config(EVEN=True, BLOCK=64), config(EVEN=1, BLOCK=128)]
        assert decided(candidates=live, block_sizes=(("EVEN", 1),)).choice.config is live[1]


class TestError:
    def miss(self, *entries: Entry, **arguments: Any) -> TableMissError:
        with pytest.raises(TableMissError) as caught:
            decided(*entries, on_miss="error", **arguments)
        error = caught.value
        assert (error.kernel, error.key, error.arch) == ("pack.m.kernel", str(arguments.get("key", KEY)), "sm90")
        assert "\n" not in str(error)
        back = pickle.loads(pickle.dumps(error))
        assert (str(back), back.closest, back.key) == (str(error), error.closest, error.key)
        return error

    def test_without_any_entry(self) -> None:
        error = self.miss()
        assert error.closest == ()
        assert str(error) == (
            "pack.m.kernel on sm90: no table entry for K=128 causal=false x:bfloat16 y:float32, and on_miss is "
            "'error'; the tables have no entry of this kernel for sm90. Record and merge this key, or choose another "
            "on_miss"
        )

    def test_only_the_fields_that_differ_are_shown_closest_first(self) -> None:
        dtypes = {"x": "bfloat16", "y": "float32"}
        error = self.miss(
            entry(SMALL, key=Key.of({"K": 64, "causal": True}, dtypes)),
            entry(SMALL, key=Key.of({"K": 128, "causal": False}, {**dtypes, "y": "bfloat16"})),
            entry(SMALL, key=Key.of({"K": 128}, {**dtypes, "z": "int32"})),
            entry(SMALL, key=Key.of({"K": 64, "causal": 1}, {"x": "float16", "y": "float16"})),
        )
        assert error.closest == (
            "y:bfloat16 (not float32) in t.json",
            "K=64 (not 128), causal=true (not false) in t.json",
            "causal=absent (not false), z:int32 (not absent) in t.json",
        )
        assert "closest: y:bfloat16 (not float32) in t.json; K=64 (not 128)" in str(error)

    def test_sequences_of_dtypes(self) -> None:
        def sequence(*dtypes: str, **values: Any) -> Entry:
            key = Key.of({"K": 128, "causal": False, **values})
            return Entry(KERNEL.qualified_name, key.values, None, dtypes, LaunchConfig.of(SMALL), {"reported_by": "me"})

        assert self.miss(sequence("bfloat16", "bfloat16")).closest == ("dtype 1:bfloat16 (not float32) in a table",)
        assert self.miss(sequence("bfloat16")).closest == ("number of dtypes=1 (not 2) in a table",)
        turned = sequence("float32", "bfloat16", K=64)
        assert self.miss(turned).closest == (
            "K=64 (not 128), dtype 0:float32 (not bfloat16), dtype 1:bfloat16 (not float32) in a table",
        )

    def test_dtypes_in_another_order_match_unless_two_entries_would(self) -> None:
        def sequence(*dtypes: str) -> Entry:
            config_ = LaunchConfig.of(config(BLOCK_M=16))
            return Entry(KERNEL.qualified_name, KEY.values, None, dtypes, config_, {"reported_by": "me"})

        key = Key.of({"K": 128, "causal": False}, {"x": "int8", "y": "int16", "z": "int32"})
        one, other = sequence("int16", "int8", "int32"), sequence("int32", "int16", "int8")
        (line,) = self.miss(one, key=key).closest
        assert line.startswith("the same key, but its config is no live candidate")
        assert self.miss(one, other, key=key).closest == (
            "dtype 0:int16 (not int8), dtype 1:int8 (not int16) in a table",
            "dtype 0:int32 (not int8), dtype 2:int8 (not int32) in a table",
        )

    def test_an_entry_that_matches_but_cannot_be_used(self) -> None:
        gone = config(BLOCK_M=16, BLOCK_N=16)
        text = "its config is no live candidate (BLOCK_M=16 BLOCK_N=16 num_warps=4 num_stages=2) in t.json"
        assert self.miss(entry(gone)).closest == (f"the same key, but {text}",)
        assert self.miss(entry(gone, wildcard=True)).closest == (f"the * key, but {text}",)
        (line,) = self.miss(entry(SMALL), denied=[denial(SMALL)]).closest
        assert line.startswith("the same key, but its config is denied (BLOCK_M=32")

    def test_an_entry_under_one_that_cannot_be_used(self) -> None:
        upper = Entry(
            KERNEL.qualified_name,
            KEY.values,
            None,
            KEY.dtype_sequence,
            LaunchConfig.of(config(BLOCK_M=16)),
            {"reported_by": "me"},
        )
        files = [[TableFile("sm90", "pack", "", "", "", (row,))] for row in (upper, entry(SMALL))]
        with pytest.raises(TableMissError) as caught:
            decide(KERNEL, KEY, "sm90", CANDIDATES, Tables("sm90", files), Policy("error"))
        assert sorted(line.partition("(")[0] for line in caught.value.closest) == [
            "the same key, but another entry lies over it ",
            "the same key, but its config is no live candidate ",
        ]


class TestOtherRules:
    @pytest.mark.parametrize("rule", ["closest", "fastest"])
    def test_a_rule_that_does_not_exist_is_refused_whatever_the_tables_hold(self, rule: str) -> None:
        for entries in ((), (entry(LARGE),)):
            with pytest.raises(
                PolicyError, match=f"on_miss: expected one of cheapest, nearest, model, error, found '{rule}'"
            ) as caught:
                decided(*entries, on_miss=rule)
            assert (caught.value.field, caught.value.value) == ("on_miss", rule)


class TestChaos:
    def test_neighbouring_ranks_differ_and_each_candidate_is_reached(self) -> None:
        found = [decided(entry(LARGE), rank=rank, chaos=True).choice for rank in range(6)]
        assert {choice.source for choice in found} == {"chaos"}
        assert {id(choice.config) for choice in found[:3]} == {id(candidate) for candidate in CANDIDATES}
        assert [choice.config for choice in found[:3]] == [choice.config for choice in found[3:]]
        assert found[0].origin is None
        assert found[0].detail.endswith(" of 3")

    def test_a_rank_does_not_pick_the_same_number_everywhere(self) -> None:
        picked = {id(decided(key=Key.of({"K": k}), chaos=True).choice.config) for k in range(20)}
        assert len(picked) == 3

    def test_the_fallback_order_is_that_of_cheapest(self) -> None:
        for rank in range(3):
            decision = decided(rank=rank, chaos=True)
            assert decision.order[1:] == tuple(c for c in (SMALL, MEDIUM, LARGE) if c is not decision.choice.config)

    def test_the_rank_is_read_nowhere_else(self) -> None:
        assert decided(rank=0) == decided(rank=5)

    def test_candidates_are_numbered_in_canonical_order(self) -> None:
        """Not by cost, which another version may count differently."""
        live = [config(BT=16, BV=128), config(BT=32, BV=32), config(BT=64, BV=8)]
        assert cheapest_order(live) == (live[2], live[1], live[0])
        picked = {rank: decided(candidates=live, rank=rank, chaos=True).choice for rank in range(3)}
        for choice in picked.values():
            assert choice.detail == f"candidate {live.index(choice.config)} of 3"

    def test_the_pick_is_written_down(self) -> None:
        """It is the same in each version: a hash of ours, over text."""
        assert [decided(rank=rank, chaos=True).choice.detail for rank in (0, 1, 2)] == [
            "candidate 1 of 3",
            "candidate 2 of 3",
            "candidate 0 of 3",
        ]


def test_nothing_impure_is_imported() -> None:
    tree = ast.parse((Path(__file__).parents[2] / "tuning" / "selection.py").read_text(encoding="utf-8"))
    roots = {
        (node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
        for node in ast.walk(tree)
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    assert roots == {
        *("__future__", "collections.abc", "dataclasses", "functools", "hashlib", "re", "typing"),
        *("tuning._selection_classes", "tuning._selection_nearest", "tuning._words", "tuning.errors", "tuning.spec"),
    }
