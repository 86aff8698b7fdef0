"""Two runs of one function, compared bit for bit: in one process with everything restored, or in fresh processes.

::

    comparison = compare_runs(step, state=[model, optimizer])
    comparison.require_equal()

Compared is whatever ``step`` returns (tensors and numbers, nested, see :func:`tuning.bitexact.digest.flatten`), and
what it leaves in the state: parameters, buffers and gradients of modules, optimizers, plain tensors, generators, and
whatever else has ``state_dict`` and ``load_state_dict``. Before each run the random number generators of Python, numpy
and torch (CPU and every CUDA device) are as they were before the first, and so is the state. Afterwards too, unless
told otherwise; see :mod:`tuning.bitexact.kept_state`.

What is hidden elsewhere (globals, files, a data loader's place) is the function's own affair; fresh processes leave no
such place.

Fresh processes exchange JSON and raw bytes, never pickles: the function is named, imported there, and called.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tuning._words import counted
from tuning.bitexact.difference import Difference, differences
from tuning.bitexact.digest import Digests, digest_value
from tuning.bitexact.kept_state import kept_state, random_state, restore_random_state, run_values
from tuning.errors import DeterminismError
from tuning.spec import Json

__all__ = ["Comparison", "compare_runs", "kept_state", "random_state", "require_values", "restore_random_state"]


@dataclass(frozen=True)
class Comparison:
    """What several runs of one function have in common.

    Attributes:
        runs: digests of each run.
        differences: between the first run and the first of the others that differs from it; empty where all are equal.
        other: number of that run, from 1; None where all are equal.
    """

    runs: tuple[Digests, ...]
    differences: tuple[Difference, ...] = ()
    other: int | None = None

    @property
    def equal(self) -> bool:
        """Whether every byte of every value is the same in all runs."""
        return self.other is None

    @property
    def first(self) -> Difference | None:
        """The first value that differs, in the order in which the function returned them, then those of the state."""
        return self.differences[0] if self.differences else None

    def lines(self) -> list[str]:
        """The verdict, and a line for each value that differs."""
        if self.equal:
            return [f"{counted(len(self.runs[0]), 'value')} equal bit for bit in {len(self.runs)} runs"]
        many = counted(len(self.runs[0]), "value")
        verb = "differs" if len(self.runs[0]) == 1 else "differ"
        head = f"{len(self.differences)} of {many} {verb} between run 0 and run {self.other}"
        return [head, *map(str, self.differences)]

    def require_equal(self) -> None:
        """Raise where a byte differs.

        Raises:
            DeterminismError: with a line for each value that differs.
        """
        if not self.equal:
            head, *rest = self.lines()
            more = f" and {len(rest) - 1} more" if len(rest) > 1 else ""
            message = f"two runs: expected equal bytes, found {head}: {rest[0]}{more}; bisect_runs names the op"
            raise DeterminismError(message, problems=rest)

    def to_json(self) -> Json:
        """JSON form."""
        return {
            "equal": self.equal,
            "roots": [run.root for run in self.runs],
            "values": len(self.runs[0]),
            "differences": [difference.to_json() for difference in self.differences],
        }


def compare_runs(
    function: Callable[[], Any],
    *,
    runs: int = 2,
    state: Sequence[Any] = (),
    keep_values: bool = True,
    restore_after: bool = True,
    gather: bool = True,
) -> Comparison:
    """Call ``function`` several times from the same state and compare what it returns and leaves there, bit for bit.

    Args:
        function: takes nothing; returns tensors and plain values, nested, or nothing where ``state`` tells it all.
        runs: how often to call it, at least twice.
        state: modules, optimizers, tensors and other stateful objects that a run changes. Each value of it that is not
            among what the function returned is compared too, as ``state[0].weight``.
        keep_values: keep a copy of the first run's tensors and of what it left in ``state``, on their devices, to tell
            the index and the ulps of a difference. Off: digests alone.
        restore_after: leave random state and ``state`` as they were before the first run, not as the last left them.
        gather: digest each ``DTensor`` as a whole: all of its ranks have to call this alike.

    Raises:
        ValueError: fewer than two runs, or there is nothing to compare.
        TypeError: something in ``state`` cannot be restored, or a run returned what has no known bits.
    """
    if runs < 2:
        raise ValueError(f"runs: expected at least 2, found {runs}")
    found: list[Digests] = []
    kept: dict[str, Any] = {}
    shared: set[str] | None = None
    with kept_state(state, after=restore_after) as restore:
        for number in range(runs):
            if number:
                restore()
            values, shared = run_values(function(), state, shared)
            found.append(digest_value(values, gather=gather))
            require_values(found[number], "the function")
            if number and found[number] != found[0]:
                here = values if keep_values else {}
                return Comparison(tuple(found), differences(found[0], found[number], (kept, here)), number)
            if not number and keep_values:
                kept = {name: _copied(leaf) for name, leaf in values.items()}
    return Comparison(tuple(found))


def require_values(found: Digests, what: str) -> None:
    """Refuse a run that gave nothing to compare: that nothing equals nothing shows nothing.

    Raises:
        ValueError: there is no tensor, number or text.
    """
    if all(each.dtype in ("NoneType", "dict", "list", "tuple") for each in found.values()):
        raise ValueError(
            f"{what}: expected at least one tensor or number to compare, found none: return what it computes, or give "
            "compare_runs as state what it changes"
        )


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if hasattr(leaf, "detach") else copy.deepcopy(leaf)
