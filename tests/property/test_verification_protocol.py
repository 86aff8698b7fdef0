"""Whatever ranks hold, and whatever one of them sends: one verdict, one sequence of collectives, no hang."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tuning import _check_protocol
from tuning._check_contents import digest_of, pack, unpack
from tuning.errors import DisagreementError
from tuning.verification import HEADER_BYTES, Agreement, Exchange, Gather, Launched, Verdict, lockstep

SIZES = st.integers(2, 6)
NAMES = st.sampled_from(["a", "b", "c"])
ITEMS = st.lists(
    st.builds(
        Launched, NAMES, NAMES, NAMES, st.sampled_from(["exact", "timed"]), st.integers(0, 9).map(lambda n: n == 0)
    ),
    max_size=6,
)
TEXT = st.text(max_size=20)


@st.composite
def histories(draw: Any) -> tuple[int, list[list[list[Launched]]]]:
    size = draw(SIZES)
    return size, draw(st.lists(st.lists(ITEMS, min_size=size, max_size=size), min_size=1, max_size=4))


def same(outcomes: list[Any]) -> Any:
    for other in outcomes[1:]:
        assert type(other) is type(outcomes[0])
        if isinstance(other, Exception):
            assert (str(other), vars(other)) == (str(outcomes[0]), vars(outcomes[0]))
        else:
            assert other == outcomes[0]
    return outcomes[0]


class Model:
    """What a check should find, the long way: every rank's launches, side by side."""

    def __init__(self, size: int) -> None:
        self.configs: list[dict[tuple[str, str], set[str]]] = [{} for _ in range(size)]
        self.crossed: set[tuple[str, str]] = set()

    def learn(self, step: list[list[Launched]]) -> None:
        for mine, items in zip(self.configs, step, strict=True):
            for item in items:
                if not item.exempt:
                    mine.setdefault((item.kernel, item.key), set()).add(item.config)

    def sets(self, place: tuple[str, str]) -> list[set[str]]:
        return [mine[place] for mine in self.configs if place in mine]

    def compared(self) -> set[tuple[str, str]]:
        return {place for mine in self.configs for place in mine if len(self.sets(place)) > 1}

    def disagreements(self) -> set[tuple[str, str]]:
        for place in self.compared():
            sets = self.sets(place)
            if any(not (one <= other or other <= one) for one in sets for other in sets):
                self.crossed.add(place)
        differ = {place for place in self.compared() if any(s != self.sets(place)[0] for s in self.sets(place))}
        return differ | self.crossed


@given(histories(), st.data())
def test_all_ranks_find_what_side_by_side_shows(history: Any, data: Any) -> None:
    size, steps = history
    ranks = [Agreement(rank, range(size)) for rank in range(size)]
    model = Model(size)
    for step, items in enumerate(steps):
        # Ranks may repeat what they said before, or not.
        said = [
            mine + (steps[step - 1][rank] if step and data.draw(st.booleans()) else [])
            for rank, mine in enumerate(items)
        ]
        model.learn(items)
        verdict = same(lockstep([rank.check(mine, step=step) for rank, mine in zip(ranks, said, strict=True)]))
        expected = model.disagreements()
        assert {(each.kernel, each.key) for each in verdict.disagreements} == expected
        assert verdict.agreed == (not expected)
        assert verdict.compared == len(model.compared())
        for each in verdict.disagreements:
            if (each.kernel, each.key) not in model.crossed:
                for part in each.groups:
                    for rank in part.ranks:
                        assert model.configs[rank][each.kernel, each.key] == set(part.configs)


@given(histories(), st.integers(0, 5), st.integers(0, 3))
def test_a_rank_that_forgets_changes_no_verdict(history: Any, which: int, when: int) -> None:
    size, steps = history
    ranks = [Agreement(rank, range(size)) for rank in range(size)]
    model = Model(size)
    for step, items in enumerate(steps):
        if step == when:
            ranks[which % size] = Agreement(which % size, range(size))
            model.configs[which % size] = {}
        model.learn(items)
        verdict = same(lockstep([rank.check(mine) for rank, mine in zip(ranks, items, strict=True)]))
        # What crossed before all was compared afresh is not remembered.
        differ = {place for place in model.compared() if any(s != model.sets(place)[0] for s in model.sets(place))}
        assert {(each.kernel, each.key) for each in verdict.disagreements} >= differ


@given(st.lists(ITEMS, min_size=3, max_size=3), st.integers(20, 400))
def test_limits_on_size_change_no_verdict(items: list[list[Launched]], limit: int) -> None:
    def verdict() -> Any:
        found = same(lockstep([Agreement(rank, range(3)).check(mine) for rank, mine in enumerate(items)]))
        return found.disagreements, found.compared, found.keys

    usual = verdict()
    before = _check_protocol._EXCHANGE_LIMIT
    _check_protocol._EXCHANGE_LIMIT = limit
    try:
        assert verdict() == usual
    finally:
        _check_protocol._EXCHANGE_LIMIT = before


@settings(max_examples=300)
@given(st.lists(ITEMS, min_size=3, max_size=3), st.data())
def test_whatever_one_rank_sends_all_find_the_same(items: list[list[Launched]], data: Any) -> None:
    """Rank 1 damages its headers and contents at will; the others must agree among themselves, and end."""

    def damage(raw: bytes) -> bytes:
        if not raw or data.draw(st.booleans()):
            return raw
        place = data.draw(st.integers(0, len(raw) - 1))
        some = data.draw(st.binary(min_size=1, max_size=min(8, len(raw) - place)))
        return raw[:place] + some + raw[place + len(some) :]

    def bent(rank: int, check: Any) -> Any:
        try:
            request = next(check)
            while True:
                if rank == 1 and isinstance(request, Gather):
                    request = Gather(damage(request.header))
                    assert len(request.header) == HEADER_BYTES
                elif rank == 1:
                    request = Exchange(
                        request.slots, request.width, {slot: damage(part) for slot, part in request.mine.items()}
                    )
                request = check.send((yield request))
        except StopIteration as done:
            return done.value

    ranks = [Agreement(rank, range(3)) for rank in range(3)]
    for _ in range(2):
        checks = [bent(rank, each.check(mine)) for rank, (each, mine) in enumerate(zip(ranks, items, strict=True))]
        outcome = same(lockstep(checks))
        assert isinstance(outcome, (Verdict, DisagreementError))


@given(st.lists(st.tuples(TEXT, TEXT, TEXT, TEXT), min_size=1, max_size=20, unique=True), st.randoms())
def test_contents_come_back_and_order_makes_no_new_digest(facts: list[Any], random: Any) -> None:
    assert unpack(pack(facts)) == tuple(facts)
    shuffled = facts[:]
    random.shuffle(shuffled)
    assert digest_of(shuffled) == digest_of(facts)
    assert len(pack(shuffled)) == len(pack(facts))


@settings(max_examples=500)
@given(st.binary(min_size=1, max_size=200))
def test_bytes_that_nobody_vouches_for_are_read_or_refused(raw: bytes) -> None:
    try:
        facts = unpack(raw)
    except ValueError:
        return
    assert all(isinstance(text, str) for fact in facts for text in fact)
