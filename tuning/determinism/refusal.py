"""How deterministic mode says no: one error that lists every problem."""

from __future__ import annotations

from collections.abc import Sequence

from tuning.errors import DeterminismError

__all__ = ["one_of", "refusal", "refuse"]


def one_of(name: str, accepted: Sequence[str], found: str | None, why: str, remedy: str) -> str:
    """The sentence of every reader: ``X must be one of ..., got ...``, why, and what to do."""
    got = "nothing" if found is None else repr(found)
    return f"{name} must be one of {', '.join(accepted)}, got {got} ({why}): {remedy}"


def refusal(subject: str, problems: Sequence[str]) -> DeterminismError:
    """The error that lists ``problems``, numbered where there are several, on one line."""
    if len(problems) == 1:
        listed = problems[0]
    else:
        listed = f"{len(problems)} problems: " + "; ".join(f"({n}) {text}" for n, text in enumerate(problems, 1))
    return DeterminismError(f"deterministic mode refuses {subject}: {listed}", problems=problems)


def refuse(subject: str, problems: Sequence[str]) -> None:
    """Raise :func:`refusal` unless ``problems`` is empty."""
    if problems:
        raise refusal(subject, problems)
