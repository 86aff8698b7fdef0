"""The case ``packages`` without a GPU: what is a problem, and that its checks can be collected and refused."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from bench import packages

SAID = f"RuntimeError: Triton on Hopper GPUs {packages.REFUSED} (see the report)"


@pytest.mark.parametrize(
    ("pinned", "stock", "timed", "problems"),
    [
        ({"a": "passed"}, {"a": "passed"}, {}, []),
        ({"a": "failed"}, {"a": "passed"}, {}, ["a: pinned failed, stock passed"]),
        ({"a": "failed"}, {"a": "failed"}, {}, ["a: pinned failed, stock failed"]),
        ({"a": "passed"}, {}, {}, ["a: pinned passed, stock not run"]),
        ({"a": "refused"}, {"a": "refused"}, {}, ["a: pinned refused, stock refused"]),
        ({"test_fla_simple_gla": "refused"}, {"test_fla_simple_gla": "refused"}, {}, []),
        (
            {"test_fla_simple_gla": "refused"},
            {"test_fla_simple_gla": "passed"},
            {},
            ["test_fla_simple_gla: pinned refused, stock passed"],
        ),
        ({"a": "passed"}, {"a": "passed"}, {"k": 3}, ["k: 3 candidates timed on the pinned side"]),
        ({}, {}, {}, ["no test ran"]),
    ],
)
def test_what_is_not_a_pass_on_both_sides_is_a_problem(
    pinned: dict[str, str], stock: dict[str, str], timed: dict[str, int], problems: list[str]
) -> None:
    assert packages.problems_of(pinned, stock, timed) == problems


@pytest.mark.parametrize(
    ("inside", "state"),
    [
        ("", "passed"),
        ("<skipped/>", "skipped"),
        ('<failure message="AssertionError">assert 1 == 2</failure>', "failed"),
        (f'<failure message="{SAID}">trace</failure>', "refused"),
        ('<error message="no such module"/>', "failed"),
    ],
)
def test_the_state_of_a_test(inside: str, state: str) -> None:
    assert packages.state_of(ElementTree.fromstring(f"<testcase>{inside}</testcase>")) == state


def test_every_expected_refusal_is_a_check() -> None:
    assert packages.suites(None).keys() >= packages.REFUSALS
    assert {"test_fla_attention", "test_fla_stickbreaking_attention"} <= packages.suites(None).keys()
