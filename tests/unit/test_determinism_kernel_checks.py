"""Checks of model packages: what they report, and the refusals with their whole messages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tuning.determinism import kernel_checks
from tuning.determinism.kernel_checks import register_kernel_check, registered_kernel_checks, run_kernel_checks
from tuning.errors import DeterminismError


@pytest.fixture(autouse=True)
def _no_checks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(kernel_checks, "_checks", {})
    return


def test_nothing_registered_is_fine() -> None:
    assert run_kernel_checks() == ()


def test_a_check_that_finds_all_patched() -> None:
    register_kernel_check("model", lambda: {"b": True, "a": True})
    (report,) = run_kernel_checks()
    assert (report.package, report.patched, report.unpatched, report.problem) == ("model", ("a", "b"), (), None)


def test_unpatched_kernels_are_listed_beside_patched_ones_for_every_package() -> None:
    def broken() -> dict[str, bool]:
        raise LookupError("no kernels")

    register_kernel_check("model", lambda: {"scan": True, "mix": False, "gate": False})
    register_kernel_check("other", broken)
    register_kernel_check("third", lambda: {"only": 1})  # type: ignore[dict-item]  # not a bool: not known to be patched
    with pytest.raises(DeterminismError) as caught:
        run_kernel_checks()
    assert str(caught.value) == (
        "deterministic mode refuses these kernels: 3 problems: (1) model: kernels not patched: gate, mix; patched: "
        "scan: "
        "patch them before turning the mode on, or do without them; (2) other: its kernel check failed with "
        "LookupError: no "
        "kernels: fix the check; (3) third: kernels not patched: only; patched: none: patch them before turning the "
        "mode "
        "on, or do without them"
    )


def test_a_check_can_be_taken_away_and_replaced() -> None:
    first = register_kernel_check("model", lambda: {"a": False})
    second = register_kernel_check("model", lambda: {"a": True})
    first()  # replaced already: takes nothing away
    assert registered_kernel_checks() == ("model",)
    run_kernel_checks()
    second()
    assert registered_kernel_checks() == ()


def test_a_registration_is_checked() -> None:
    with pytest.raises(DeterminismError) as caught:
        register_kernel_check("", 3)  # type: ignore[arg-type]
    assert caught.value.problems == (
        "the package of a kernel check must be a non-empty string, got ''",
        "the kernel check must be callable, got int",
    )
