"""How subclasses of an autotuner class launch and time: which ``run`` reaches the one it replaces, and by what clock.

**Reading a ``run``.** Its bytecode is read, nested functions included: it reaches the replaced one where it takes
``run`` off ``super()`` or off the base class by name. That ``super`` and ``run`` both occur says nothing: a method may
prune by ``super().prune_configs`` and launch by ``self.fn.run``. One that does both, or that has a clock of its own
beside, may take either way at a launch; it counts as closed, since a closed one is pinned by what it is given, whatever
it calls.
"""

from __future__ import annotations

import dis
import inspect
import itertools
from collections.abc import Callable
from types import CodeType
from typing import Any

from ._patches import ABSENT

__all__ = ["Stopwatch", "closed_kinds", "is_closed", "own_run", "reaches_base"]

_CLOCKS = frozenset(("_bench", "do_bench"))
_NO_STEP = frozenset(("CACHE", "PRECALL", "PUSH_NULL", "EXTENDED_ARG", "NOP", "RESUME"))
_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
_ALWAYS_JUMPS = ("JUMP_FORWARD", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
_FAR_ENOUGH = 6  # instructions between `super` and what is taken off `super(kind, self)`


def own_run(kind: type[Any], base: type[Any]) -> tuple[Any, Any] | None:
    """The class whose ``run`` a subclass has, and that method as it stands in the class; None where it is the base's.

    The class need not be a subclass of the base: a mixin may bring the method.
    """
    owner = next((each for each in kind.__mro__ if "run" in vars(each)), base)
    return None if owner is base else (owner, vars(owner)["run"])


def closed_kinds(base: type[Any], before_us: Callable[[Any], Any]) -> list[Any]:
    """Subclasses, at any depth, on which a ``run`` that may not reach the base's is to be replaced.

    Args:
        base: the autotuner class.
        before_us: gives what stands below a method that has been replaced already.
    """
    found: dict[Any, None] = {}

    def look(parent: type[Any]) -> None:
        for kind in parent.__subclasses__():
            if is_closed(kind, base, before_us):
                found.setdefault(kind)
            look(kind)

    look(base)
    return list(found)


def is_closed(kind: type[Any], base: type[Any], before_us: Callable[[Any], Any]) -> bool:
    """Whether it is on this class that a ``run`` is to be replaced: its own, or one that a mixin brings."""
    own = own_run(kind, base)
    if own is None or reaches_base(before_us(own[1]), base):
        return False
    owner = own[0]
    if owner is kind:
        return True
    # A parent's is replaced on the parent; a mixin's is left to its other users, and replaced on the first class here.
    return not issubclass(owner, base) and not any(
        parent is not base and issubclass(parent, base) and own_run(parent, base) == own for parent in kind.__mro__[1:]
    )


def reaches_base(method: Any, base: type[Any]) -> bool:
    """Whether a ``run`` always reaches the base's, so far as its code tells; True where there is no code to read."""
    function = getattr(method, "func", method)  # of a partial method
    function = inspect.unwrap(function) if callable(function) else function
    code = getattr(function, "__code__", None)
    if code is None:
        return True  # nothing can be read, and the benchmark itself will tell
    return not _times_or_launches(code) and _never_returns_without(code, function, base)


def _steps(code: CodeType) -> list[dis.Instruction]:
    return [step for step in dis.get_instructions(code) if step.opname not in _NO_STEP]


def _times_or_launches(code: CodeType) -> bool:
    """Whether it has a clock of its own, or launches what lies beneath the autotuner."""
    loads = [step for step in _steps(code) if step.opname.startswith("LOAD")]
    named = [step.argval if isinstance(step.argval, str) else "" for step in loads]
    return (
        not _CLOCKS.isdisjoint(named)
        or ("fn", "run") in itertools.pairwise(named)
        or any(_times_or_launches(step.argval) for step in loads if isinstance(step.argval, CodeType))
    )


def _never_returns_without(code: CodeType, function: Any, base: type[Any]) -> bool:
    """Whether every way from the start of a piece of code to a return passes the base's ``run``."""
    steps = _steps(code)
    at = {step.offset: index for index, step in enumerate(steps)}
    starts = sorted(at)
    pending, seen = [0], set[int]()
    while pending:
        index = pending.pop()
        if index in seen or index >= len(steps):
            continue
        seen.add(index)
        step = steps[index]
        if _takes_base_run(steps, index, function, base) or step.opname.startswith(("RAISE", "RERAISE")):
            continue
        if step.opname.startswith("RETURN"):
            return False
        target = step.argval if step.opcode in _JUMPS else None
        if target is not None:
            # What is jumped to may be one of those that count as no step: the next that counts then.
            pending.append(at[next((offset for offset in starts if offset >= target), starts[-1])])
        if target is None or not step.opname.startswith(_ALWAYS_JUMPS):
            pending.append(index + 1)
    return True


def _takes_base_run(steps: list[dis.Instruction], index: int, function: Any, base: type[Any]) -> bool:
    step = steps[index]
    if isinstance(step.argval, CodeType):  # of a function within: whoever makes one that does it means to call it
        inner = _steps(step.argval)
        return any(_takes_base_run(inner, each, function, base) for each in range(len(inner)))
    if step.argval != "run" or not step.opname.startswith("LOAD") or not index:
        return False
    return step.opname.startswith("LOAD_SUPER") or _is_base(steps[:index], function, base)


def _is_base(steps: list[dis.Instruction], function: Any, base: type[Any]) -> bool:
    """Whether what was loaded last is ``super(...)``, the base or a subclass of it."""
    last = steps[-1]
    if last.opname.startswith("CALL"):
        return any(step.argval == "super" for step in steps[-_FAR_ENOUGH:])
    if last.argval == base.__name__:
        return True
    known = getattr(function, "__globals__", {}).get(last.argval) if isinstance(last.argval, str) else None
    return inspect.isclass(known) and issubclass(known, base)


class Stopwatch:
    """Stands in for an autotuner class's ``do_bench``, so that a method that calls it directly is counted.

    A data descriptor, since Triton keeps the benchmarker on each object, from its start (3.2, 3.3) or from its first
    use on: it is still kept there, and what is read off the object while nothing is to be counted is that very object.

    Args:
        original: what the class had in this place, or :data:`~tuning._patches.ABSENT`.
        is_quiet: whether a benchmark of this autotuner is not to be counted here, since it is counted elsewhere.
        count: told of each benchmark.
    """

    def __init__(self, original: Any, is_quiet: Callable[[Any], bool], count: Callable[[Any], None]) -> None:
        self._original = original
        self._is_quiet = is_quiet
        self._count = count

    def __get__(self, autotuner: Any, owner: type[Any] | None = None) -> Any:
        if autotuner is None:
            return self._original if self._original is not ABSENT else self
        bench = vars(autotuner).get("do_bench", ABSENT)
        if bench is ABSENT:
            if self._original is ABSENT:
                raise AttributeError(f"{type(autotuner).__name__!r} object has no attribute 'do_bench'")
            bench = self._original.__get__(autotuner, owner)
        return bench if self._is_quiet(autotuner) else _Counted(bench, self, autotuner)

    def __set__(self, autotuner: Any, bench: Any) -> None:
        vars(autotuner)["do_bench"] = bench

    def __delete__(self, autotuner: Any) -> None:
        if vars(autotuner).pop("do_bench", ABSENT) is ABSENT:
            raise AttributeError("do_bench")

    def told(self, autotuner: Any) -> None:
        """A benchmark begins."""
        if not self._is_quiet(autotuner):
            self._count(autotuner)


class _Counted:
    """A benchmarker that counts its calls; for all else the one it stands for."""

    def __init__(self, bench: Any, stopwatch: Stopwatch, autotuner: Any) -> None:
        self._bench = bench
        self._stopwatch = stopwatch
        self._autotuner = autotuner

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._stopwatch.told(self._autotuner)
        return self._bench(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bench, name)
