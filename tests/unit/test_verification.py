"""Checks between ranks without processes: the protocol in lockstep, the ledger, the bytes, the reports."""

from __future__ import annotations

import logging
import pickle
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgpack
import pytest

from tuning import _check_protocol
from tuning._check_contents import CONTENT_LIMIT, TEXT_LIMIT, bounded_text, digest_of, pack, prefix_within_limit, unpack
from tuning._check_ledger import Ledger
from tuning._check_transport import _Meetings, format_ranks
from tuning._config_text import differing_fields, readable_key
from tuning.errors import AbsentRankError, DisagreementError
from tuning.spec import Key, LaunchConfig
from tuning.verification import (
    HEADER_BYTES,
    Agreement,
    Exchange,
    Gather,
    GroupVerifier,
    Launched,
    MemoryGroup,
    RankSet,
    Verdict,
    Verifier,
    lockstep,
)


def config(block: int, warps: int = 4, **more: Any) -> str:
    return LaunchConfig.build({"BLOCK": block, "SPLIT": 2}, num_warps=warps, num_stages=3, **more).text


def launched(n: int, block: int = 64, kernel: str = "pkg.kernel", source: str = "exact", **more: Any) -> Launched:
    return Launched(kernel, Key.of({"N": n}, {"x": "float16"}).text, config(block), source, **more)


def group(size: int, members: Sequence[int] | None = None) -> list[Agreement]:
    members = tuple(members) if members is not None else tuple(range(size))
    return [Agreement(rank, members) for rank in range(size)]


def check(ranks: list[Agreement], *items: Iterable[Launched], step: int | None = None, strict: bool = False) -> Any:
    """One check, in which rank ``i`` launched ``items[i]`` (nothing, for ranks beyond); what all ranks found."""
    each = [*items, *[()] * (len(ranks) - len(items))]
    return same(lockstep([rank.check(mine, step=step, strict=strict) for rank, mine in zip(ranks, each, strict=True)]))


def same(outcomes: list[Any]) -> Any:
    first = outcomes[0]
    for other in outcomes[1:]:
        assert type(other) is type(first)
        if isinstance(first, Exception):
            assert (str(other), vars(other)) == (str(first), vars(first))
        else:
            assert other == first
    return first


def drive(
    ranks: list[Agreement], items: Sequence[Iterable[Launched]], tamper: Callable[[int, Any], Any]
) -> list[Verdict | DisagreementError]:
    """One check in which ``tamper(rank, request)`` may replace what a rank sends."""

    def bent(rank: int, agreement: Agreement) -> Any:
        inner = agreement.check(items[rank], step=1)
        try:
            request = next(inner)
            while True:
                request = inner.send((yield tamper(rank, request)))
        except StopIteration as done:
            return done.value

    return lockstep([bent(rank, agreement) for rank, agreement in enumerate(ranks)])


# --- the protocol


def test_a_header_has_at_most_64_bytes():
    assert HEADER_BYTES == 48


def test_nothing_new_is_one_gather_and_nothing_else():
    ranks = group(5)
    assert check(ranks) == Verdict(agreed=True, size=5, gathers=1, gathered_bytes=5 * 48)
    check(ranks, *[[launched(1)]] * 5)
    again = check(ranks, *[[launched(1)]] * 5, step=2)
    assert (again.gathers, again.exchanges, again.new, again.keys, again.compared) == (1, 0, 0, 1, 1)


def test_the_size_of_an_exchange_is_that_of_distinct_contents_not_of_ranks():
    short, long = [launched(1)], [launched(n) for n in range(10)]
    lengths = [len(pack([(i.kernel, i.key, i.config, i.source) for i in items])) for items in (short, long)]
    for size in (2, 8, 64):
        verdict = check(group(size), *[short, long] * (size // 2))
        assert (verdict.exchanges, verdict.new) == (1, 2)
        assert verdict.exchanged_bytes == 2 * max(lengths)


def test_the_lowest_rank_with_a_content_contributes_it():
    sent: dict[int, list[int]] = {}

    def watch(rank: int, request: Any) -> Any:
        if isinstance(request, Exchange):
            sent[rank] = sorted(request.mine)
        return request

    same(drive(group(5), [[], [launched(1)], [launched(2)], [launched(1)], [launched(2)]], watch))
    assert sent == {0: [], 1: [0], 2: [1], 3: [], 4: []}


def test_a_content_that_was_met_before_is_not_exchanged_again():
    ranks = group(3)
    assert check(ranks, [launched(1)], step=3).exchanges == 1
    late = check(ranks, [], [launched(1)], step=7)
    assert (late.exchanges, late.new, late.compared) == (0, 0, 1)


def test_order_of_launch_makes_no_new_content_and_orders_the_report():
    one, two = launched(2, 32), launched(1, 32)
    verdict = check(group(3), [one, two], [two, one], [launched(1, 64), launched(2, 64)])
    assert verdict.new == 2
    # That of the lowest rank, on all ranks.
    assert [each.key for each in verdict.disagreements] == [one.key, two.key]


def test_a_choice_of_one_step_meets_that_of_a_later_step():
    ranks = group(2)
    assert check(ranks, [launched(1, 64)], step=3).agreed
    verdict = check(ranks, [], [launched(1, 32)], step=7)
    assert not verdict.agreed
    assert verdict.fresh == verdict.disagreements
    after = check(ranks, step=9)
    assert (after.disagreements, after.fresh) == (verdict.disagreements, ())


def test_keys_of_one_rank_alone_are_not_compared():
    verdict = check(group(3), [launched(1)], [launched(2)], [launched(3)])
    assert (verdict.agreed, verdict.keys, verdict.compared) == (True, 3, 0)


def test_exempt_launches_are_neither_sent_nor_compared():
    verdict = check(group(2), [launched(1, 32, exempt=True)], [launched(1, 64, exempt=True)])
    assert verdict == Verdict(agreed=True, size=2, gathers=1, gathered_bytes=96)


def test_a_different_source_is_no_disagreement():
    verdict = check(group(2), [launched(1, source="exact")], [launched(1, source="cheapest")])
    assert (verdict.agreed, verdict.compared) == (True, 1)


def test_strictness_of_one_rank_holds_for_all():
    ranks = group(3)
    outcomes = lockstep([rank.check([launched(1, 2 << place)], strict=place == 2) for place, rank in enumerate(ranks)])
    assert type(same(outcomes)) is DisagreementError
    # It stands: whoever goes on is told again.
    assert type(check(ranks, strict=True)) is DisagreementError
    assert not check(ranks, strict=False).agreed


def test_ranks_at_different_steps_are_noted():
    outcomes = lockstep([rank.check([], step=step) for rank, step in zip(group(4), (5, 5, 6, None), strict=True)])
    verdict = same(outcomes)
    assert verdict.step == 6
    assert verdict.notes == ("ranks are at different steps (rank 3: none; ranks 0,1: 5; rank 2: 6)",)


def test_a_rank_that_starts_afresh_makes_all_compare_afresh():
    ranks = group(3)
    check(ranks, [launched(1)], [launched(1)], [launched(2)])
    ranks[1] = Agreement(1, (0, 1, 2))
    verdict = check(ranks, [], [launched(1, 32)], [])
    assert (verdict.gathers, verdict.keys, len(verdict.disagreements)) == (2, 2, 1)
    assert verdict.notes == (
        "ranks had been told different things by earlier checks (ranks 0,2; rank 1); all was compared afresh",
    )
    assert check(ranks).gathers == 1


def test_more_contents_than_fit_are_exchanged_in_several_rounds(monkeypatch):
    monkeypatch.setattr(_check_protocol, "_EXCHANGE_LIMIT", 1000)
    contents = [[launched(n, 32 << n % 3)] for n in range(20)]
    width = max(len(pack([(i.kernel, i.key, i.config, i.source)])) for items in contents for i in items)
    verdict = check(group(20), *contents)
    assert (verdict.new, verdict.keys) == (20, 20)
    assert verdict.exchanges == -(-20 // (1000 // width))
    assert verdict.exchanged_bytes == 20 * width


def test_a_rank_with_more_news_than_fit_is_given_more_rounds():
    text = "x" * (TEXT_LIMIT - 100)
    many = [Launched(f"pkg.kernel_{n}", text + str(n), config(64), "exact") for n in range(100)]
    differs = Launched("pkg.kernel_99", many[99].key, config(32), "exact")
    verdict = check(group(2), many, [differs])
    assert verdict.keys == 100
    assert verdict.gathers > 1
    assert [each.kernel for each in verdict.disagreements] == ["pkg.kernel_99"]


def test_contents_that_are_remembered_are_bounded(monkeypatch):
    monkeypatch.setattr(_check_protocol, "_REMEMBERED_CONTENTS", 3)
    ranks = group(2)
    for n in range(10):
        check(ranks, [launched(n)])
        assert all(len(rank._contents) <= 3 for rank in ranks)
    # Forgotten contents are exchanged again; what they said is not forgotten.
    late = check(ranks, [], [launched(0, 32)])
    assert not late.agreed


def test_texts_that_are_too_long_to_send_still_tell_configs_apart():
    long = "y" * (TEXT_LIMIT + 1)
    items = [Launched("pkg.kernel", "key", long + end, "exact") for end in ("a", "b")]
    assert not check(group(2), [items[0]], [items[1]]).agreed
    assert check(group(2), [items[0]], [items[0]]).agreed


# --- ranks that lie


def replaced(**parts: Any) -> Callable[[int, Any], Any]:
    """Rank 1 sends another header: fields by name."""
    names = ("magic", "version", "flags", "length", "step", "digest", "history")

    def tamper(rank: int, request: Any) -> Any:
        if rank != 1 or not isinstance(request, Gather):
            return request
        fields = dict(zip(names, struct.unpack(">2sBBIq16s16s", request.header), strict=True))
        return Gather(struct.pack(">2sBBIq16s16s", *{**fields, **parts}.values()))

    return tamper


def content(data: bytes) -> Callable[[int, Any], Any]:
    """Rank 1 sends another content, and announces its length."""

    def tamper(rank: int, request: Any) -> Any:
        if rank != 1:
            return request
        if isinstance(request, Gather):
            return replaced(length=len(data))(rank, request)
        return Exchange(request.slots, request.width, dict.fromkeys(request.mine, data))

    return tamper


def endless(rank: int, request: Any) -> Any:
    """Rank 1 says of one and the same content, which all know, that more follows."""
    if rank != 1 or not isinstance(request, Gather):
        return request
    facts = [(item.kernel, item.key, item.config, item.source) for item in [launched(1, 32)]]
    return replaced(flags=2, length=len(pack(facts)), digest=digest_of(facts))(rank, request)


LIES = {
    "magic": (replaced(magic=b"zz"), "rank 1 sent a header of magic 7a7a"),
    "version": (replaced(version=2), "run one version of this library on all ranks"),
    "flags": (replaced(flags=0x40), "rank 1 sent unknown flags 0x40"),
    "length": (replaced(length=2**32 - 1), "rank 1 announced 4294967295 bytes"),
    "no length": (replaced(length=0), "rank 1 announced 0 bytes"),
    "no digest": (replaced(digest=bytes(16)), "only an empty one has digest 0"),
    "more of nothing": (replaced(length=0, digest=bytes(16), flags=2), "rank 1 announced 0 bytes"),
    "more without end": (endless, "a rank still had more to say after 256 rounds"),
    "history": (replaced(history=b"h" * 16), "ranks keep reporting different histories"),
    "digest": (replaced(digest=b"d" * 16), "rank 1 sent a content that cannot be used: its digest is"),
    "pickle": (content(pickle.dumps([1])), "rank 1 sent a content that cannot be used"),
    "cut": (content(b"\xda\xff"), "ends in the middle of a value"),
    "array": (content(b"\xdd\xff\xff\xff\xff"), "exceeds max_array_len"),
    "map": (content(b"\x80"), "holds a dict"),
    "none": (content(b"\xc0"), "holds a NoneType"),
    "true": (content(b"\xc3"), "holds a bool"),
    "float": (content(msgpack.packb(1.5)), "holds a float"),
    "bytes": (content(msgpack.packb(b"")), "holds a bytes"),
    "extension": (content(b"\xd4\x01\x00"), "exceeds max_ext_len"),
    "reserved": (content(b"\xc1"), "no MessagePack"),
    "not utf-8": (content(b"\xa1\xff"), "can't decode"),
}


@pytest.mark.parametrize("name", LIES)
def test_a_lie_is_one_error_on_all_ranks_and_does_no_lasting_harm(name):
    tamper, expected = LIES[name]
    ranks = group(3)
    error = same(drive(ranks, [[launched(1)], [launched(1, 32)], []], tamper))
    assert type(error) is DisagreementError
    assert expected in str(error)
    assert error.step == 1
    assert error.disagreements
    honest = check(ranks)
    assert [each.kernel for each in honest.disagreements] == ["pkg.kernel"]


def test_two_lengths_of_one_content_are_a_lie():
    error = same(drive(group(3), [[launched(1)]] * 3, replaced(length=77)))
    assert "announced a content of 77 bytes that others say has" in str(error)


def test_a_rank_that_cannot_prepare_tells_all(caplog):
    def broken() -> Iterable[Launched]:
        yield launched(1)
        raise KeyError("no such kernel")

    ranks = group(3)
    outcomes = lockstep([ranks[0].check([]), ranks[1].check(broken()), ranks[2].check([])])
    assert "rank 1 could not prepare its launches" in str(same(outcomes))
    # The cause stands where it happened, and there alone.
    assert [type(error.__cause__) for error in outcomes if isinstance(error, Exception)] == [
        type(None),
        KeyError,
        type(None),
    ]
    assert "no such kernel" in caplog.text


@pytest.mark.parametrize("step", ["seven", 2**63, object()], ids=["text", "too large", "object"])
def test_a_step_that_is_none_is_told_to_all(step):
    outcomes = lockstep([rank.check([], step=step if place else 1) for place, rank in enumerate(group(2))])
    assert "rank 1 could not prepare" in str(same(outcomes))


def test_a_protocol_that_would_hang_is_found_by_lockstep():
    ranks = group(2)
    with pytest.raises(RuntimeError, match="ask for a collective"):
        drive(ranks, [[], []], lambda rank, request: Exchange(1, 1, {}) if rank else request)


# --- the bytes


FACTS = (("k", "b", "c1", "exact"), ("k", "a", "c2", "exact"))


def test_a_content_comes_back_in_order_of_launch():
    assert unpack(pack(FACTS)) == FACTS
    assert digest_of(FACTS) == digest_of(FACTS[::-1])
    assert pack(FACTS) != pack(FACTS[::-1])
    assert len(pack(FACTS)) == len(pack(FACTS[::-1]))


def packed(*values: Any) -> bytes:
    return b"".join(msgpack.packb(value) for value in values)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (packed("a", "b"), "counts"),
        (packed(0), "counts"),
        (packed(1, "a"), "counts"),
        (packed(1, "a", 0, 0, 0), "counts"),
        (packed(2**60, "a", 0, 0, 0, 0), "counts"),
        (packed(-1, "a", 0, 0, 0, 0), "counts"),
        (packed(2, "b", "a", 0, 0, 0, 0), "sorted"),
        (packed(2, "a", "a", 0, 0, 0, 0), "sorted"),
        (packed(2, "a", 7, 0, 0, 0, 0), "sorted"),
        (packed(1, "a", 0, 0, 0, 1), "points to"),
        (packed(1, "a", 0, 0, 0, -1), "points to"),
        (packed(1, "a", 0, 0, 0, "a"), "points to"),
        (packed(1, "a", 0, 0, 0, 0) + b"\xa5ab", "middle of a value"),
        (packed(1, "x" * (TEXT_LIMIT + 1), 0, 0, 0, 0), "max_str_len"),
        (b"\x91" * 10_000, "max_array_len"),
    ],
)
def test_a_content_that_pack_would_not_write_is_refused(data, expected):
    with pytest.raises(ValueError, match=expected):
        unpack(data)


def test_a_prefix_within_the_limit_is_within_it():
    facts = [("kernel", f"{n:060000d}", "config", "exact") for n in range(100)]
    count = prefix_within_limit(facts)
    assert 0 < count < 100
    assert len(pack(facts[:count])) <= CONTENT_LIMIT < len(pack(facts[: count + 1])) + 200
    assert prefix_within_limit(facts[:3]) == 3


def test_a_short_text_is_sent_as_it_is():
    assert bounded_text("é" * 10) == "é" * 10
    cut = bounded_text("é" * TEXT_LIMIT)
    assert len(cut.encode()) <= TEXT_LIMIT
    assert cut != bounded_text("é" * TEXT_LIMIT + "x")


# --- the ledger


def test_sets_are_compared_not_single_configs():
    ledger = Ledger((0, 1))
    ledger.add([("k", "n", "a", "exact"), ("k", "n", "b", "cheapest")], 0b01)
    ledger.add([("k", "n", "a", "exact")], 0b10)
    (found,) = ledger.settle()
    assert [(list(g.ranks), g.configs, g.sources) for g in found.groups] == [
        ([0], ("a", "b"), ("cheapest", "exact")),
        ([1], ("a",), ("exact",)),
    ]
    # Rank 1 meets the same fallback later: neither ever launched what the other did not.
    ledger.add([("k", "n", "b", "cheapest")], 0b10)
    assert ledger.settle() == ()
    assert ledger.disagreements() == ()


def test_configs_that_crossed_stay_a_disagreement():
    ledger = Ledger((0, 1))
    ledger.add([("k", "n", "a", "timed")], 0b01)
    ledger.add([("k", "n", "b", "timed")], 0b10)
    assert len(ledger.settle()) == 1
    ledger.add([("k", "n", "b", "timed")], 0b01)
    ledger.settle()
    ledger.add([("k", "n", "a", "timed")], 0b10)
    ledger.settle()
    assert len(ledger.disagreements()) == 1


def test_saying_it_again_changes_nothing():
    ledger = Ledger((0, 1, 2))
    for _ in range(3):
        ledger.add([("k", "n", "a", "timed")], 0b011)
        ledger.add([("k", "n", "b", "timed")], 0b100)
        ledger.settle()
    assert (len(ledger), ledger.compared, len(ledger.disagreements())) == (1, 1, 1)


def test_a_disagreement_that_looks_as_before_is_not_fresh():
    ledger = Ledger((0, 1, 2))
    ledger.add([("k", "n", "a", "timed")], 0b001)
    ledger.add([("k", "n", "a", "exact")], 0b010)
    ledger.add([("k", "n", "b", "exact")], 0b100)
    assert len(ledger.settle()) == 1
    ledger.add([("k", "n", "a", "exact")], 0b001)
    assert ledger.settle() == ()


def test_a_disagreement_that_grows_is_fresh_again():
    ledger = Ledger((0, 1, 2))
    ledger.add([("k", "n", "a", "timed")], 0b001)
    ledger.add([("k", "n", "b", "timed")], 0b010)
    first = ledger.settle()
    ledger.add([("k", "n", "c", "timed")], 0b100)
    second = ledger.settle()
    assert len(first) == len(second) == 1
    assert ledger.disagreements() == second


def test_memory_grows_with_contents_and_not_with_ranks_times_keys():
    ranks = 16_384
    ledger = Ledger(range(ranks))
    facts = [("kernel", str(n), "config", "exact") for n in range(300)]
    ledger.add(facts, (1 << ranks) - 1)
    masks = {id(mask) for seen in ledger._seen.values() for mask in seen.ranks.values()}
    assert len(masks) == 1


# --- the words


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([], "ranks none"),
        ([3], "rank 3"),
        ([0, 1, 2, 3, 4, 5], "ranks 0-5"),
        ([6, 7], "ranks 6,7"),
        ([0, 8, 16, 24], "ranks 0-24 step 8"),
        ([0, 2, 3, 4], "ranks 0,2-4"),
        ([0, 1, 3, 4, 5, 9], "ranks 0,1,3-5,9"),
        ([n * n for n in range(40)], "ranks 0,1,4,9,16,25,36,49,64,81,100,121,... (40 in all)"),
    ],
)
def test_ranks_in_words(ranks, text):
    assert format_ranks(ranks) == text
    assert str(RankSet.of(ranks)) == text


def test_a_set_of_ranks():
    ranks = RankSet.of([5, 1, 5, 64])
    assert (list(ranks), len(ranks)) == ([1, 5, 64], 3)
    assert 5 in ranks
    assert 4 not in ranks
    assert -1 not in ranks
    assert "5" not in ranks


def test_a_report_groups_ranks_and_shows_only_what_differs():
    items = [[launched(1, 64)]] * 6 + [[launched(1, 128, source="cheapest")]] * 2
    verdict = check(group(8), *items, step=40)
    assert verdict.report() == (
        "8 ranks disagree on 1 of 1 keys at step 40, in order of launch\n"
        "  pkg.kernel (N=1 x:float16): ranks 0-5: BLOCK=64 [exact]; ranks 6,7: BLOCK=128 [cheapest]"
    )
    assert check(group(2), [launched(1)], [launched(1)]).report() == "2 ranks agree on 1 keys"


def test_a_subgroup_is_named_by_both_kinds_of_rank():
    verdict = check(group(3, (4, 9, 14)), [launched(1, 64)], [launched(1, 128)], [launched(1, 128)])
    assert str(verdict.disagreements[0]).partition(": ")[2] == (
        "rank 4 (in the group: rank 0): BLOCK=64 [exact]; ranks 9,14 (in the group: ranks 1,2): BLOCK=128 [exact]"
    )


def test_the_error_names_all_and_pickles():
    items = [[launched(n, 64 << rank) for n in range(13)] for rank in range(2)]
    error = check(group(2), *items, step=3, strict=True)
    assert type(error) is DisagreementError
    assert "\n" not in str(error)
    assert str(error).startswith(
        "ranks launched different configs for 13 of 13 keys at step 3; the first: pkg.kernel (N=0 x:float16): "
        "rank 0: BLOCK=64 [exact]; rank 1: BLOCK=128 [exact]; also pkg.kernel (N=1 x:float16), "
    )
    assert len(error.disagreements) == 13
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), vars(again)) == (str(error), vars(error))


def test_fields_that_differ():
    texts = [config(64), config(64, num_ctas=2), config(64, 8)]
    assert list(differing_fields(texts).values()) == [
        "num_ctas=1 num_warps=4",
        "num_ctas=2 num_warps=4",
        "num_ctas=1 num_warps=8",
    ] or list(differing_fields(texts).values()) == [
        "num_warps=4 num_ctas=1",
        "num_warps=4 num_ctas=2",
        "num_warps=8 num_ctas=1",
    ]


@pytest.mark.parametrize("text", ["", "not json", "[" * 50_000, "{}", '{"kwargs":3}', "a\nb\x1b[31m", "7", "null"])
def test_whatever_text_a_peer_sends_is_printed_on_one_line(text):
    shown = [readable_key(text), *differing_fields([text, "other"]).values()]
    assert all(line.isprintable() and len(line) < 300 for line in shown)


# --- threads, timeouts, groups


def in_threads(
    size: int, work: Callable[[Any], Any], ranks: Sequence[int] | None = None
) -> tuple[list[Any], list[Any]]:
    """What each rank of an in-memory group returned or raised, and the communicators."""
    memory = MemoryGroup(size, ranks)
    communicators = [memory.communicator(rank) for rank in range(size)]
    outcomes: list[Any] = [None] * size

    def run(rank: int) -> None:
        try:
            outcomes[rank] = work(communicators[rank])
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    return outcomes, communicators


def test_ranks_in_threads_call_the_same_collectives():
    def work(communicator: Any) -> list[Verdict]:
        verifier = GroupVerifier(communicator, timeout=10)
        rank = communicator.rank
        return [
            verifier.check([], step=0),
            verifier.check([launched(n, 64 << rank % 2) for n in range(rank)], step=1),
            verifier.check([launched(50 + n) for n in range(5 - rank)], step=2),
        ]

    outcomes, communicators = in_threads(5, work)
    _, second, third = same(outcomes)
    assert (second.compared, len(second.disagreements)) == (3, 3)
    assert third.compared == 7
    assert same([communicator.log for communicator in communicators])[:2] == [("meet",), ("gather", 48)]
    assert [entry[0] for entry in communicators[0].log] == ["meet", "gather"] + ["meet", "gather", "exchange"] * 2


def test_a_rank_that_stays_away_is_named_with_the_step():
    def work(communicator: Any) -> Any:
        if communicator.rank == 1:
            return None
        return GroupVerifier(communicator, timeout=0.2).check([launched(1)], step=12)

    outcomes, _ = in_threads(4, work, ranks=(8, 9, 10, 11))
    error = same([outcomes[0], *outcomes[2:]])
    assert type(error) is AbsentRankError
    assert (error.step, error.arrived, error.missing) == (12, (0, 2, 3), (1,))
    assert str(error).startswith(
        "rank 9 (in the group: rank 1) did not arrive at the check of step 12 within 0.2 s; "
        "ranks 8,10,11 (in the group: ranks 0,2,3) did"
    )


def test_fresh_disagreements_are_logged_once_by_one_rank(caplog):
    def work(communicator: Any) -> None:
        verifier = GroupVerifier(communicator, timeout=10)
        for step in range(3):
            verifier.check([launched(1, 64 << communicator.rank)], step=step)

    with caplog.at_level(logging.WARNING, "tuning"):
        in_threads(3, work)
    assert [record.getMessage() for record in caplog.records] == [
        "check at step 0: pkg.kernel (N=1 x:float16): rank 0: BLOCK=64 [exact]; rank 1: BLOCK=128 [exact]; "
        "rank 2: BLOCK=256 [exact]"
    ]


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan")])
def test_a_timeout_that_is_none_is_refused(timeout):
    with pytest.raises(ValueError, match="timeout must be a positive number of seconds"):
        Verifier(timeout=timeout)
    with pytest.raises(ValueError, match="timeout must be a positive number of seconds"):
        GroupVerifier(MemoryGroup(2).communicator(0), timeout=timeout)


def test_a_group_must_have_its_members():
    with pytest.raises(ValueError, match="a group of 3 ranks cannot have the members"):
        MemoryGroup(3, (0, 1))


def test_outside_a_process_group_ranks_agree_and_torch_is_not_imported():
    script = (
        "import sys; from tuning.verification import *\n"
        "verdict = Verifier().check([Launched('k', 'n', 'c', 'exact')], step=3, strict=True)\n"
        "assert verdict == Verdict(agreed=True, step=3), verdict\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


# --- meetings in a store


class Store:
    """The five calls of a key-value store that meetings need."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.looks = 0
        self._lock = threading.Lock()

    def add(self, key: str, amount: int) -> int:
        with self._lock:
            self.looks += amount == 0
            self.values[key] = int(self.values.get(key, 0)) + amount
            return int(self.values[key])

    def set(self, key: str, value: str) -> None:
        with self._lock:
            self.values[key] = value

    def get(self, key: str) -> Any:
        with self._lock:
            return self.values[key]

    def check(self, keys: list[str]) -> bool:
        with self._lock:
            return all(key in self.values for key in keys)

    def delete_key(self, key: str) -> bool:
        with self._lock:
            return self.values.pop(key, None) is not None


def meet_all(
    store: Store, size: int, timeout: float = 10.0, absent: Iterable[int] = (), late: float = 0.0
) -> list[Any]:
    outcomes: list[Any] = [None] * size

    def run(rank: int) -> None:
        if rank in absent:
            time.sleep(late)
        outcomes[rank] = _Meetings(store, rank, size).meet("check", timeout)

    threads = [
        threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size) if late or rank not in absent
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    return outcomes


def test_meetings_leave_a_constant_number_of_keys():
    store = Store()
    sizes = set()
    for _ in range(5):
        # Each time with new objects: nothing is kept in the process.
        assert meet_all(store, 4) == [((), False)] * 4
        sizes.add(len(store.values))
    assert sizes == {4 + 3}


def test_all_that_come_are_told_the_same_who_did_not():
    outcomes = meet_all(Store(), 5, timeout=0.2, absent=(1, 3))
    assert [outcome for outcome in outcomes if outcome] == [((1, 3), False)] * 3


def test_one_rank_alone_looks_for_the_missing():
    store = Store()
    meet_all(store, 40, timeout=0.3, absent=(7,))
    assert store.looks == 40


def test_a_rank_that_comes_after_the_rest_gave_up_is_told_so_and_meets_them_the_next_time():
    store = Store()
    outcomes = meet_all(store, 3, timeout=0.2, absent=(2,), late=0.6)
    assert outcomes == [((2,), False), ((2,), False), ((2,), True)]
    assert meet_all(store, 3) == [((), False)] * 3


def test_a_claimant_that_dies_leaves_an_error_not_a_wait(monkeypatch):
    monkeypatch.setattr("tuning._check_transport._OUTCOME_SECONDS", 0.1)
    store = Store()
    store.add("check/1/claim", 1)
    with pytest.raises(TimeoutError, match="never did"):
        _Meetings(store, 0, 2).meet("check", 0.1)
