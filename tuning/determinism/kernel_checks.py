"""Checks of model packages that bring kernels of their own.

A package that patches or replaces its own kernels for a deterministic run registers a check. It runs when a worker
turns the mode on, after everything else was patched, and says kernel by kernel whether it is deterministic now; one
that is not stops the worker before the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tuning.determinism.refusal import refuse

__all__ = ["KernelReport", "register_kernel_check", "registered_kernel_checks", "run_kernel_checks"]

_checks: dict[str, Callable[[], Mapping[str, bool]]] = {}


@dataclass(frozen=True)
class KernelReport:
    """What the check of one package found.

    Attributes:
        package: who registered it.
        patched: kernels that are deterministic now.
        unpatched: kernels that are not.
        error: what the check itself raised, or None.
    """

    package: str
    patched: tuple[str, ...]
    unpatched: tuple[str, ...]
    error: str | None = None

    @property
    def problem(self) -> str | None:
        """Why the mode refuses, or None."""
        if self.error is not None:
            return f"{self.package}: its kernel check failed with {self.error}: fix the check"
        if not self.unpatched:
            return None
        return (
            f"{self.package}: kernels not patched: {', '.join(self.unpatched)}; patched: "
            f"{', '.join(self.patched) or 'none'}: patch them before turning the mode on, or do without them"
        )


def register_kernel_check(package: str, check: Callable[[], Mapping[str, bool]]) -> Callable[[], None]:
    """Register the check of a model package; one registered earlier for the same package is replaced.

    Args:
        package: the package's name, for messages.
        check: called in each worker; gives for every kernel by name whether it is deterministic now.

    Returns:
        A function that takes the check away again.

    Raises:
        DeterminismError: the name is empty or the check cannot be called.
    """
    problems = []
    if not isinstance(package, str) or not package:
        problems.append(f"the package of a kernel check must be a non-empty string, got {package!r}")
    if not callable(check):
        problems.append(f"the kernel check must be callable, got {type(check).__name__}")
    refuse("this kernel check", problems)
    _checks[package] = check

    def unregister() -> None:
        if _checks.get(package) is check:
            del _checks[package]

    return unregister


def registered_kernel_checks() -> tuple[str, ...]:
    """The packages that registered a check, sorted."""
    return tuple(sorted(_checks))


def _run(package: str) -> KernelReport:
    try:
        states = dict(_checks[package]())
    except Exception as error:
        return KernelReport(package, (), (), f"{type(error).__name__}: {error}")
    patched = tuple(sorted(name for name, done in states.items() if done is True))
    return KernelReport(package, patched, tuple(sorted(set(states) - set(patched))))


def run_kernel_checks() -> tuple[KernelReport, ...]:
    """Run every registered check.

    Returns:
        What each found, by package.

    Raises:
        DeterminismError: a kernel is not patched, or a check failed; all packages are listed.
    """
    reports = tuple(_run(package) for package in registered_kernel_checks())
    refuse("these kernels", [report.problem for report in reports if report.problem])
    return reports
