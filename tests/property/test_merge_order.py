"""A merge depends on what was measured alone: not on order, names, rank numbers, or how records lie in files."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from recordings import environment, record

from tuning.journal import Journal
from tuning.merge import MergeResult, merge
from tuning.spec import Key, TuningRecord
from tuning.tables import table_bytes

# Few distinct values, so that equal times, ties at the edge and equal votes are common.
times = st.one_of(
    st.none(),
    st.sampled_from([0.0, 1.0, 1.005, 1.01, 1.0100000000000002, 1.02, 2.0]),
    st.tuples(*[st.floats(0.5, 2)] * 3),
    st.floats(0, 1e300).map(lambda value: (value,)),
)
blocks = st.sampled_from([16, 32, 64, 128])
rules = st.sampled_from(["pooled", "majority"])


@st.composite
def records(draw: st.DrawFn) -> TuningRecord:
    found = draw(st.dictionaries(blocks, times, min_size=1, max_size=4))
    winner = draw(st.sampled_from([*found, 256]))
    key = Key.of({"n": draw(st.sampled_from([1, True]))}, {"x": "int8"}, draw(st.sampled_from([(), ("x",)])))
    return record(
        found,
        winner=winner,
        key=key,
        kernel=draw(st.sampled_from(["pkg.a", "pkg.b", "other.a"])),
        arch=draw(st.sampled_from(["sm90", "sm100"])),
        shared=draw(st.booleans()),
        note=draw(st.sampled_from(["", "first", "second"])),
    )


@st.composite
def journals(draw: st.DrawFn) -> list[Journal]:
    count = draw(st.integers(1, 5))
    return [
        Journal(
            f"journal{index}",
            environment(draw(st.integers(0, 2)), host=draw(st.sampled_from("ab")), triton=draw(st.sampled_from("12"))),
            tuple(draw(st.lists(records(), max_size=4))),
        )
        for index in range(count)
    ]


def all_of(result: MergeResult) -> Any:
    """Everything that a merge says, as text."""
    return (
        [table_bytes(table) for table in result.tables],
        [(repr(facts), facts.winners, facts.regrets, facts.recordings) for facts in result.keys],
        result.summary(),
        result.notes,
    )


def tables_of(result: MergeResult) -> list[bytes]:
    return [table_bytes(table) for table in result.tables]


def choices(result: MergeResult) -> Any:
    return [
        (facts.arch, facts.kernel, facts.key.text, facts.choice, facts.confidence, facts.stability)
        for facts in result.keys
    ]


@given(journals(), rules, st.data())
def test_the_order_of_journals_records_and_candidates_does_not_matter(
    found: list[Journal], rule: Any, data: st.DataObject
) -> None:
    def shuffled(item: TuningRecord) -> TuningRecord:
        timings = tuple(data.draw(st.permutations(item.timings)))
        return TuningRecord(**{**vars(item), "timings": timings})

    again = [
        Journal(item.path, item.environment, tuple(map(shuffled, data.draw(st.permutations(item.records)))))
        for item in data.draw(st.permutations(found))
    ]
    assert all_of(merge(found, rule=rule)) == all_of(merge(again, rule=rule))


@given(journals(), rules, st.permutations(range(3)))
def test_the_numbers_of_ranks_and_the_names_of_files_do_not_matter(
    found: list[Journal], rule: Any, numbers: list[int]
) -> None:
    renamed = [
        Journal(
            f"x{len(found) - index}",
            environment(numbers[item.environment.rank], host=item.environment.host, triton=item.environment.triton),
            item.records,
        )
        for index, item in enumerate(found)
    ]
    assert tables_of(merge(found, rule=rule)) == tables_of(merge(renamed, rule=rule))
    assert choices(merge(found, rule=rule)) == choices(merge(renamed, rule=rule))


@given(journals(), rules)
def test_how_records_lie_in_files_does_not_matter(found: list[Journal], rule: Any) -> None:
    apart = [
        Journal(f"{item.path}.{index}", item.environment, (single,))
        for item in found
        for index, single in enumerate(item.records)
    ]
    assert tables_of(merge(found, rule=rule)) == tables_of(merge(apart, rule=rule))


@given(journals(), rules)
def test_a_choice_never_failed_and_is_never_denied(found: list[Journal], rule: Any) -> None:
    result = merge(found, rule=rule)
    recorded = [item for journal in found for item in journal.records]
    for facts in result.keys:
        mine = [
            timing
            for item in recorded
            if (item.arch, item.kernel, item.key.text) == (facts.arch, facts.kernel, facts.key.text)
            for timing in item.timings
        ]
        assert {timing.config for timing in mine} <= {item.config for item in facts.candidates}
        failed = {timing.config for timing in mine if timing.times_ms is None}
        timed = {timing.config for timing in mine if timing.times_ms is not None}
        assert (facts.choice is None) == (timed <= failed)
        if facts.choice is not None:
            assert facts.choice in timed - failed
    denied = {(table.arch, row.kernel, row.key, row.config) for table in result.tables for row in table.denied}
    chosen = {(table.arch, row.kernel, row.key, row.config) for table in result.tables for row in table.entries}
    assert denied & chosen == set()


@given(journals())
def test_merging_the_result_again_changes_nothing(found: list[Journal]) -> None:
    first = merge(found)
    again = merge(found, tables=first.tables)
    assert tables_of(again) == tables_of(first)
    assert [
        (entry.key, entry.config) for table in merge([], tables=first.tables).tables for entry in table.entries
    ] == [(entry.key, entry.config) for table in first.tables for entry in table.entries]


@given(
    st.lists(st.dictionaries(blocks, st.floats(0.5, 2), min_size=4, max_size=4), min_size=1, max_size=5),
    st.floats(0, 0.5),
)
def test_the_choice_is_the_largest_within_the_tolerance(runs: list[dict[int, float]], tolerance: float) -> None:
    journals = [Journal(str(rank), environment(rank), (record(run),)) for rank, run in enumerate(runs)]
    (facts,) = merge(journals, tolerance=tolerance).keys
    limit = min(item.low_ms for item in facts.candidates) * (1 + tolerance)
    within = [item.config for item in facts.candidates if item.low_ms <= limit]
    assert facts.choice == max(within, key=lambda found: int(dict(found.kwargs)["BLOCK"]))
