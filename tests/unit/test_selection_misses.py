"""What is taken where no entry matches: the nearest entry by a distance written down here, or the static model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from tuning._selection_nearest import factor_text, nearest_order
from tuning.policy import AutotunePolicy
from tuning.selection import MODEL, Candidates, Decision, ModelConstants, decide, model_order
from tuning.spec import Kernel, Key, LaunchConfig
from tuning.tables import Denied, Entry, TableFile, Tables, load_tables, write_table

KERNEL = Kernel("pack.m.kernel", "11112222")
KEY = Key.of({"K": 128, "causal": False}, {"x": "bfloat16", "y": "float32"})


@dataclass(frozen=True)
class Policy:
    on_miss: str = "nearest"
    block_sizes: tuple[tuple[str, int], ...] = ()
    chaos: bool = False


def plain(block: int, warps: int = 4, stages: int = 3) -> LaunchConfig:
    return LaunchConfig.build({"BLOCK": block}, num_warps=warps, num_stages=stages)


def live(block: int, warps: int = 4, stages: int = 3) -> Any:
    return SimpleNamespace(kwargs={"BLOCK": block}, num_warps=warps, num_stages=stages, pre_hook=None)


def row(block: int, key: Key | None, **fields: Any) -> Entry:
    values, dtypes = (None, None) if key is None else (key.values, key.dtypes)
    given = {"origin": "t.json", **fields}
    return Entry(KERNEL.qualified_name, values, dtypes, None, plain(block), {"reported_by": "a test"}, **given)


def sequence(block: int, key: Key, *dtypes: str) -> Entry:
    return Entry(KERNEL.qualified_name, key.values, None, dtypes, plain(block), {"reported_by": "a test"})


def denial(block: int) -> Denied:
    return Denied(KERNEL.qualified_name, plain(block), None, "races", "a report", "d.json")


def tables(arch: str, *rows: Entry | Denied) -> Tables:
    entries = tuple(one for one in rows if isinstance(one, Entry))
    denied = tuple(one for one in rows if isinstance(one, Denied))
    return Tables(arch, [[TableFile(arch, "pack", "", "", "", entries, denied)]])


def decided(
    *here: Entry | Denied,
    others: Sequence[Tables] = (),
    blocks: Sequence[int] = (16, 32, 64, 128),
    triton: str = "",
    rule: str = "nearest",
) -> Decision:
    known = tables("sm90", *here).beside(others)
    return decide(KERNEL, KEY, "sm90", list(map(live, blocks)), known, Policy(rule), triton=triton)


def chosen(*here: Entry | Denied, **given: Any) -> tuple[int, str]:
    choice = decided(*here, **given).choice
    return choice.config.kwargs["BLOCK"], choice.source


def key(k: Any = 128, causal: Any = False, x: str = "bfloat16", y: str = "float32") -> Key:
    return Key.of({"K": k, "causal": causal}, {"x": x, "y": y})


class TestDistance:
    @pytest.mark.parametrize(
        ("other", "factor"),
        [
            (key(), "1"),
            (key(k=256), "2"),
            (key(k=64), "2"),
            (key(k=96), "1.333"),
            (key(k=8192), "64"),
            (key(k=0), "16"),  # no ratio to it
            (key(k=-128), "16"),
            (key(k=True), "16"),
            (key(k="128"), "16"),
            (key(k=128.0), "16"),
            (key(k=None), "16"),
            (key(causal=True), "16"),
            (key(causal=0), "16"),  # typed: an integer is no flag
            (key(x="float16"), "2"),
            (key(x="float32"), "4"),
            (key(x="int16"), "4"),
            (key(x="float8_e4m3fn"), "4"),
            (key(k=64, causal=True, x="float16", y="int32"), "256"),
            (Key.of({"K": 128}, {"x": "bfloat16", "y": "float32"}), "16"),
            (Key.of({"K": 128, "causal": False, "D": 1}, {"x": "bfloat16", "y": "float32"}), "16"),
            (Key.of({"K": 128, "causal": False}, {"x": "bfloat16"}), "4"),
            (Key.of({"causal": False, "K": 128}, {"y": "float32", "x": "bfloat16"}), "1"),
        ],
    )
    def test_each_difference_multiplies_it(self, other: Key, factor: str) -> None:
        assert factor_text(row(16, other), KEY) == f"distance {factor}"

    @pytest.mark.parametrize(
        ("dtypes", "factor"),
        [
            (("bfloat16", "float32"), "1"),
            (("float32", "bfloat16"), "1"),  # a call's order
            (("float16", "float32"), "2"),
            (("float32", "float32"), "4"),
            (("float32",), "4"),
            (("float32", "bfloat16", "int32"), "4"),
            ((), "16"),
        ],
    )
    def test_a_sequence_of_dtypes_is_compared_as_a_bag(self, dtypes: tuple[str, ...], factor: str) -> None:
        assert factor_text(sequence(16, KEY, *dtypes), KEY) == f"distance {factor}"

    def test_what_no_float_holds_is_said_all_the_same(self) -> None:
        assert factor_text(row(16, key(k=128 * 1234 * 10**400)), KEY) == "distance 1.234e+403"
        assert factor_text(row(16, key(k=128 * 10**15)), KEY) == "distance 1.000e+15"
        endless = replace(row(16, KEY), key=(("K", "1" * 5000), ("causal", "false")))
        assert factor_text(endless, KEY) == "distance 16"

    def test_it_is_exact_where_floats_would_round(self) -> None:
        huge = 10**30
        one, other = row(16, key(k=huge)), row(32, key(k=huge + 1))
        asked = key(k=1)
        assert nearest_order(asked, "sm90", one, "sm90") < nearest_order(asked, "sm90", other, "sm90")

    def test_archs_come_in_three_groups_and_closer_numbers_first(self) -> None:
        names = ["gfx942", "sm89", "sm80", "sm100", "sm103", "sm120", "sm75", "gfx90a", "sm90"]
        entry = row(16, KEY)
        found = sorted(names, key=lambda arch: nearest_order(KEY, "sm90", entry, arch))
        assert found == ["sm90", "sm89", "sm100", "sm80", "sm103", "sm75", "sm120", "gfx90a", "gfx942"]


class TestNearest:
    def test_the_closest_key_of_this_arch(self) -> None:
        far, near = row(16, key(k=4096)), row(64, key(k=256))
        assert chosen(far, near) == chosen(near, far) == (64, "nearest")
        choice = decided(far, near).choice
        assert choice.origin == "t.json"
        assert choice.detail == "nearest of 2 usable entries: sm90, distance 2 (K=256 (not 128))"

    def test_any_key_of_this_arch_before_the_same_key_of_another(self) -> None:
        other = tables("sm100", row(16, KEY))
        assert chosen(row(64, key(k=8192, causal=True)), others=[other]) == (64, "nearest")

    def test_another_arch_is_used_and_said(self) -> None:
        decision = decided(others=[tables("sm103", row(16, KEY)), tables("sm100", row(64, key(k=256)))])
        assert decision.choice.config.kwargs["BLOCK"] == 16  # the distance first, then the arch
        assert decision.choice.detail == "nearest of 2 usable entries: sm103, distance 1"
        (notice,) = decision.notices
        assert notice.kind == "other_arch"
        assert "the nearest entry in t.json, which is for sm103, is used" in notice.message
        assert chosen(others=[tables("sm103", row(16, KEY)), tables("sm100", row(64, KEY))]) == (64, "nearest")
        assert chosen(others=[tables("gfx942", row(16, KEY)), tables("sm120", row(64, key(k=1)))]) == (64, "nearest")
        assert chosen(others=[tables("gfx942", row(16, KEY))]) == (16, "nearest")

    def test_a_wildcard_of_another_arch_comes_after_its_keys(self) -> None:
        star = tables("sm100", row(16, None))
        assert chosen(others=[star, tables("sm120", row(64, key(k=1, causal=True)))]) == (64, "nearest")
        choice = decided(others=[star]).choice
        assert (choice.config.kwargs["BLOCK"], choice.detail) == (16, "nearest of 1 usable entry: sm100, any key")

    def test_what_is_no_candidate_or_denied_on_either_side_is_passed_over(self) -> None:
        near, far = row(64, key(k=256)), row(32, key(k=512))
        assert chosen(near, far, blocks=(16, 32)) == (32, "nearest")
        assert chosen(near, far, denial(64)) == (32, "nearest")
        abroad = tables("sm100", near, far, denial(64))
        assert chosen(others=[abroad]) == (32, "nearest")
        # What is denied there is no matter for an entry of a third arch.
        assert chosen(others=[tables("sm100", denial(64)), tables("sm103", near)]) == (64, "nearest")

    def test_an_exact_entry_that_cannot_be_used_is_a_miss(self) -> None:
        decision = decided(row(256, KEY), row(64, key(k=256)))
        assert decision.choice.source == "nearest"
        assert [notice.kind for notice in decision.notices] == ["not_a_candidate"]

    def test_without_a_usable_entry_the_model_decides(self) -> None:
        for here, others in (((), ()), ((row(256, key(k=1)),), ()), ((denial(64),), [tables("sm100", row(64, KEY))])):
            decision = decided(*here, others=others)
            assert decision.choice.source == "model"
            assert decision.choice.origin is None
            assert decision.choice.config.kwargs["BLOCK"] == decided(*here, rule="model").choice.config.kwargs["BLOCK"]

    def test_ties_go_by_key_and_never_by_place(self) -> None:
        low, high = row(64, key(k=64)), row(16, key(k=256))
        assert chosen(low, high) == chosen(high, low) == (64, "nearest")
        named, listed = row(64, key(k=64)), sequence(16, key(k=64), "bfloat16", "float32")
        assert chosen(named, listed) == chosen(listed, named) == (64, "nearest")
        layers = [[TableFile("sm90", "pack", "", "", "", (one,))] for one in (low, high)]
        for order in (layers, layers[::-1]):
            found = decide(KERNEL, KEY, "sm90", [live(16), live(64)], Tables("sm90", order), Policy())
            assert found.choice.config.kwargs["BLOCK"] == 64

    def test_a_changed_source_and_another_triton_are_said(self) -> None:
        old = row(64, key(k=256), source_hash="33334444", triton="3.4.0")
        assert [notice.kind for notice in decided(old, triton="3.6.0").notices] == ["stale_source", "other_triton"]

    def test_the_fallback_order_is_that_of_cheapest(self) -> None:
        order = decided(row(64, key(k=256))).order
        assert [one.kwargs["BLOCK"] for one in order] == [64, 16, 32, 128]

    def test_tables_are_loaded_with_those_of_all_archs(self, tmp_path: Any) -> None:
        for arch in ("sm90", "sm120"):
            write_table(tmp_path, TableFile(arch, "pack", "1", "3.6.0", "", (row(16, KEY),)))
        found = load_tables("sm90", [tmp_path], neighbours=True)
        others = {one.arch: one for one in found.others}
        assert {"sm100", "sm103", "sm120"} <= set(others)  # packaged ones too
        assert "sm90" not in others
        assert others["sm120"].entries(KERNEL.qualified_name)[0].config == plain(16)
        assert load_tables("sm90", [tmp_path]).others == ()
        missing = load_tables("sm42", [tmp_path], neighbours=True)
        assert {one.arch for one in missing.others} >= {"sm90", "sm100", "sm103", "sm120"}


def first(*configs: LaunchConfig, dtypes: Any = (), arch: str = "", constants: ModelConstants = MODEL) -> LaunchConfig:
    return model_order(Candidates.of_configs(configs).ranked, dtypes, arch, constants)[0]


def tile(m: int, n: int, k: int, warps: int = 4, stages: int = 3) -> LaunchConfig:
    return LaunchConfig.build({"M": m, "N": n, "K": k}, num_warps=warps, num_stages=stages)


class TestModel:
    @pytest.mark.parametrize(
        ("only", "expected"),
        [
            ({"middle": 1}, (64, 64, 4, 3)),
            ({"elements": 1, "tile_elements": 8}, (32, 32, 4, 3)),
            ({"elements": 1, "tile_elements": 128}, (128, 128, 4, 3)),
            ({"warps": 1, "aim_warps": 8}, (64, 64, 8, 3)),
            ({"stages": 1, "aim_stages": 5}, (64, 64, 2, 5)),
            ({}, (32, 32, 4, 3)),  # no weight at all: the order of cheapest
        ],
    )
    def test_each_weight_pulls_to_its_aim(self, only: dict[str, int], expected: tuple[int, ...]) -> None:
        shapes = [(32, 32, 4, 3), (64, 64, 4, 3), (128, 128, 4, 3), (64, 64, 8, 3), (64, 64, 2, 5)]
        configs = [LaunchConfig.build({"M": m, "N": n}, num_warps=w, num_stages=s) for m, n, w, s in shapes]
        none = dict.fromkeys(("middle", "elements", "warps", "stages", "middle_warps"), 0)
        found = first(*configs, constants=ModelConstants(**{**none, **only}))
        assert found == configs[shapes.index(expected)]  # type: ignore[arg-type]

    def test_lists_of_warps_and_stages_alone_have_aims_of_their_own(self) -> None:
        bare = [LaunchConfig.build({"BT": 64}, num_warps=w, num_stages=s) for w in (2, 4, 8) for s in (2, 3, 4)]
        constants = ModelConstants(bare_warps=8, bare_stages=2, middle_warps=0, aim_warps=2, aim_stages=4)
        found = first(*bare, constants=constants)
        assert (found.num_warps, found.num_stages) == (8, 2)

    def test_the_middle_of_the_warps_listed(self) -> None:
        lists = [LaunchConfig.build({}, num_warps=w, num_stages=3) for w in (8, 16, 32)]
        constants = ModelConstants(warps=0, middle_warps=1)
        assert first(*lists, constants=constants).num_warps == 16

    def test_one_parameter_counts_elements_only_where_it_is_the_whole_block(self) -> None:
        constants = ModelConstants(middle=0, warps=0, middle_warps=0, stages=0, elements=1, flat_elements=8)
        assert first(*map(plain, (64, 256, 1024, 4096)), constants=constants) == plain(1024)
        rows = [LaunchConfig.build({"BLOCK_M": size}) for size in (64, 256, 1024, 4096)]
        assert first(*rows, constants=constants) == rows[0]  # of an unknown other side: nothing to count

    def test_what_exceeds_the_archs_shared_memory_comes_last(self) -> None:
        small, large = tile(16, 16, 16), tile(128, 128, 64, stages=4)
        constants = ModelConstants(middle=0, warps=0, middle_warps=0, stages=0, tile_elements=128)
        wide, narrow = (("x", "float32"),), (("x", "bfloat16"), ("n", "int64"))
        # (128 + 128) * 64 elements of 4 stages: 256 KB of float32, 128 KB of bfloat16.
        assert first(small, large, dtypes=wide, arch="sm90", constants=constants) == small
        assert first(small, large, dtypes=narrow, arch="sm90", constants=constants) == large
        assert first(small, large, dtypes=narrow, arch="sm120", constants=constants) == small
        assert first(small, large, dtypes=wide, arch="sm999", constants=constants) == large  # no published limit known
        assert first(large, dtypes=wide, arch="sm90") == large  # nothing else is there

    def test_every_candidate_is_ordered_once_whatever_it_lacks(self) -> None:
        odd = [
            LaunchConfig.build({}, num_warps=None, num_stages=None),
            LaunchConfig.build({"M": 0, "T": "tf32"}, num_warps=4, num_stages=0),
            LaunchConfig.build({"M": 2**80, "N": 3}, num_warps=3, num_stages=1),
            LaunchConfig.build({"N": True, "K": None}, num_warps=64),
        ]
        ranked = Candidates.of_configs(odd).ranked
        found = model_order(ranked, (("x", "float64"),), "sm90")
        assert sorted(found, key=lambda one: one.order) == sorted(odd, key=lambda one: one.order)
        assert model_order((), (), "sm90") == ()

    def test_the_choice_names_the_rule(self) -> None:
        choice = decided(rule="model").choice
        assert (choice.source, choice.origin, choice.detail) == ("model", None, "static model, first of 4 candidates")

    def test_denied_is_never_taken(self) -> None:
        block, _ = chosen(rule="model")
        assert chosen(denial(block), rule="model")[0] != block

    def test_a_policy_may_ask_for_it(self) -> None:
        for rule in ("nearest", "model"):
            assert AutotunePolicy(on_miss=rule).on_miss == rule  # type: ignore[arg-type]
