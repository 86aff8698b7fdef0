"""Two runs of one function, compared bit for bit: in one process with everything restored, or in fresh processes.

::

    comparison = compare_runs(step, state=[model, optimizer])
    comparison.require_equal()

What a run is handed back is whatever ``step`` returns: tensors and numbers, nested, see
:func:`tuning.bitexact.digest.flatten`. Before each run the random number generators of Python, numpy and torch (CPU and
every CUDA device) are as they were before the first, and so is the state: parameters, buffers and gradients of modules,
optimizers, plain tensors, and whatever else has ``state_dict`` and ``load_state_dict``. Afterwards too, unless told
otherwise. What is hidden elsewhere (globals, files, a data loader's place) is the function's own affair; fresh
processes leave no such place.

Fresh processes exchange JSON and raw bytes, never pickles: the function is named, imported there, and called.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tuning.bitexact.difference import Difference, differences
from tuning.bitexact.digest import Digests, digest_value, flatten
from tuning.errors import DeterminismError
from tuning.spec import Json

__all__ = ["Comparison", "compare_runs", "kept_state", "random_state", "restore_random_state"]


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
        """The first value that differs, in the order in which the function returned them."""
        return self.differences[0] if self.differences else None

    def lines(self) -> list[str]:
        """The verdict, and a line for each value that differs."""
        if self.equal:
            return [f"{len(self.runs[0])} values equal bit for bit in {len(self.runs)} runs"]
        head = f"{len(self.differences)} of {len(self.runs[0])} values differ between run 0 and run {self.other}"
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
    """Call ``function`` several times from the same state and compare what it returns, bit for bit.

    Args:
        function: takes nothing; returns tensors and plain values, nested.
        runs: how often to call it, at least twice.
        state: modules, optimizers, tensors and other stateful objects that a run changes.
        keep_values: keep a copy of the first run's tensors on their devices, to tell the index and the ulps of a
            difference. Off: digests alone.
        restore_after: leave random state and ``state`` as they were before the first run, not as the last left them.
        gather: digest each ``DTensor`` as a whole: all of its ranks have to call this alike.

    Raises:
        ValueError: fewer than two runs.
        TypeError: something in ``state`` cannot be restored, or a run returned what has no known bits.
    """
    if runs < 2:
        raise ValueError(f"runs: expected at least 2, found {runs}")
    found: list[Digests] = []
    kept: dict[str, Any] = {}
    with kept_state(state, after=restore_after) as restore:
        for number in range(runs):
            if number:
                restore()
            value = function()
            found.append(digest_value(value, gather=gather))
            if number and found[number] != found[0]:
                here = flatten(value) if keep_values else {}
                return Comparison(tuple(found), differences(found[0], found[number], (kept, here)), number)
            if not number and keep_values:
                kept = {name: _copied(leaf) for name, leaf in flatten(value).items()}
    return Comparison(tuple(found))


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if hasattr(leaf, "detach") else copy.deepcopy(leaf)


def random_state() -> dict[str, Any]:
    """State of the random number generators: Python's, numpy's global one, torch's on the CPU and each CUDA device."""
    import torch

    state: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        state["numpy"] = sys.modules["numpy"].random.get_state()
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def restore_random_state(state: dict[str, Any]) -> None:
    """Set the generators back to what :func:`random_state` found."""
    import torch

    random.setstate(state["python"])
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        sys.modules["numpy"].random.set_state(state["numpy"])
    if "cuda" in state:
        torch.cuda.set_rng_state_all(state["cuda"])


@contextmanager
def kept_state(state: Sequence[Any], *, after: bool = True) -> Iterator[Callable[[], None]]:
    """Remember random state and ``state``; yields what puts both back, and does it at the end if ``after``.

    Raises:
        TypeError: something in ``state`` has no state that can be restored.
    """
    restores = [_restorer(item) for item in state]
    generators = random_state()

    def restore() -> None:
        for back in restores:
            back()
        restore_random_state(generators)

    try:
        yield restore
    finally:
        if after:
            restore()


def _restorer(item: Any) -> Callable[[], None]:
    import torch

    if isinstance(item, torch.nn.Module):
        tensors = [*item.parameters(), *item.buffers()]
        modes = [(module, module.training) for module in item.modules()]
        backs = [_tensor_restorer(tensor) for tensor in tensors]

        def back() -> None:
            for restore in backs:
                restore()
            for module, training in modes:
                module.training = training

        return back
    if isinstance(item, torch.Tensor):
        return _tensor_restorer(item)
    if isinstance(item, torch.optim.Optimizer):
        return _optimizer_restorer(item)
    if hasattr(item, "state_dict") and hasattr(item, "load_state_dict"):
        # A copy each time: what loads may keep the tensors and change them.
        saved = copy.deepcopy(item.state_dict())
        return lambda: item.load_state_dict(copy.deepcopy(saved))
    expected = "modules, tensors, or objects with state_dict and load_state_dict"
    raise TypeError(f"state: expected {expected}, found {type(item).__name__}")


def _optimizer_restorer(optimizer: Any) -> Callable[[], None]:
    # Not by load_state_dict, which casts float32 moments of a bfloat16 parameter to bfloat16.
    state = {parameter: copy.deepcopy(found) for parameter, found in optimizer.state.items()}
    settings = [copy.deepcopy({k: v for k, v in group.items() if k != "params"}) for group in optimizer.param_groups]

    def back() -> None:
        optimizer.state.clear()
        for parameter, found in state.items():
            optimizer.state[parameter] = copy.deepcopy(found)
        for group, saved in zip(optimizer.param_groups, settings, strict=True):
            for name in set(group) - set(saved) - {"params"}:
                del group[name]
            group.update(copy.deepcopy(saved))

    return back


def _tensor_restorer(tensor: Any) -> Callable[[], None]:
    import torch

    value = tensor.detach().clone()
    gradient = None if tensor.grad is None else tensor.grad.detach().clone()

    def back() -> None:
        with torch.no_grad():
            tensor.detach().copy_(value)
        tensor.grad = None if gradient is None else gradient.clone()

    return back
