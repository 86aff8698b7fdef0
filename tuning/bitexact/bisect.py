"""Where two runs part: the first module, the first backward, and the first op that differ though they were given equal.

::

    found = bisect_runs(step, modules=model, state=[model])
    print(found.op)       # aten.index_add.default in blocks.0.mlp, forward: ...

The function runs twice from the same state (see :mod:`tuning.bitexact.compare`). Both runs are traced by digests: each
call of a module by hooks (its inputs and outputs, and the gradients of both in backward), each op that torch dispatches
by a ``TorchDispatchMode`` (its inputs before it runs, its outputs and what it changed in place after). Then the traces
are walked together to the first entry whose outputs differ and whose inputs do not: that is the culprit, and what comes
after it only passes the difference on.

**What torch does not dispatch** (a Triton kernel, an extension that writes to raw pointers) shows as well: the inputs
of some op differ although no op before it produced another result. Then the entry names the tensor that was changed
behind torch's back, the op that had made it, and the module that was running; ``kind`` is ``outside of torch``. What a
collective brings is seen there too, since it may arrive after its op has returned.

Memory that ``empty`` and its kin return holds whatever lay there, so what they return is not compared, nor the
destination of an op that only overwrites it, nor views, which compute nothing. Reading it before it is written is
found: the reader's inputs differ.

Each op costs two digests, and waits for the device: a race between streams may hide from this, and be seen by
:func:`tuning.bitexact.compare.compare_runs` alone. The trace is as long as the run has ops. Backward hooks are torch's
full ones, and torch's limits on them hold (no in-place change of a module's inputs or outputs).
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from tuning.bitexact.compare import kept_state
from tuning.bitexact.difference import Difference, differences
from tuning.bitexact.digest import Digests, digest_value
from tuning.spec import Json

__all__ = ["Bisection", "Divergence", "bisect_runs"]

_UNWRITTEN = re.compile(r"aten\.(new_)?empty(_like|_strided|_permuted)?\.")
_OVERWRITES = re.compile(
    r"\.(copy|zero|fill|normal|uniform|bernoulli|random|exponential|geometric|cauchy|log_normal)_\.|\.\w*out\w*$"
)
_COLLECTIVE = ("c10d.", "_c10d_functional.")


@dataclass(frozen=True)
class Divergence:
    """The first entry of a trace that differs though it was given equal inputs.

    Attributes:
        kind: ``op``, ``module`` or ``outside of torch``; ``sequence`` where the second run did something else.
        name: the op with its overload, or the module's dotted name.
        phase: forward or backward.
        module: dotted name of the module that was running; empty outside of all, or where no modules were given.
        node: the node of autograd's graph that was running in backward; empty in forward.
        number: which op or call of a module this is in the run, from 0.
        output: what differs: the output's place, or the input that was changed.
        detail: more in words: digests, or what the other run did.
    """

    kind: Literal["op", "module", "outside of torch", "sequence"]
    name: str
    phase: Literal["forward", "backward"]
    module: str = ""
    node: str = ""
    number: int = 0
    output: str = ""
    detail: str = ""

    def __str__(self) -> str:
        where = f" in {self.module}" if self.module and self.module != self.name else ""
        node = f" ({self.node})" if self.node else ""
        lead = "" if self.kind in ("op", "module") else f"{self.kind}, before "
        return f"{lead}{self.name}{where}, {self.phase}{node}, number {self.number}: {self.output}: {self.detail}"

    def to_json(self) -> Json:
        """JSON form."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


@dataclass(frozen=True)
class Bisection:
    """Where two runs part. Everything is None where they are equal.

    Attributes:
        op: the first op that differs.
        module: the first module whose forward differs.
        backward: the first module whose backward differs.
        result: the first value of what the function returned that differs.
        ops: how many ops were traced in the first run.
        calls: how many calls of modules, forward and backward, were.
    """

    op: Divergence | None
    module: Divergence | None
    backward: Divergence | None
    result: Difference | None
    ops: int
    calls: int

    @property
    def equal(self) -> bool:
        """Whether no difference was found anywhere."""
        return not any((self.op, self.module, self.backward, self.result))

    def lines(self) -> list[str]:
        """A line for each finding."""
        found = {"op": self.op, "module": self.module, "backward": self.backward, "result": self.result}
        lines = [f"first {what} that differs: {finding}" for what, finding in found.items() if finding is not None]
        return lines or [f"no difference in {self.ops} ops and {self.calls} calls of modules"]

    def to_json(self) -> Json:
        """JSON form."""
        found = {"op": self.op, "module": self.module, "backward": self.backward, "result": self.result}
        return {
            "equal": self.equal,
            "ops": self.ops,
            "calls": self.calls,
            **{what: finding and finding.to_json() for what, finding in found.items()},
        }


@dataclass
class _Entry:
    """One op, or one call of a module in one direction. ``made`` gives, for each input, the op that made it."""

    name: str
    phase: Literal["forward", "backward"]
    module: str
    node: str
    inputs: Any
    outputs: Any = None
    made: Mapping[str, str] | None = None
    compared: bool = True

    def same_place(self, other: _Entry) -> bool:
        return (self.name, self.phase, self.module) == (other.name, other.phase, other.module)


class _Trace:
    """What one run did. Digests stay where they were computed until all is done."""

    def __init__(self, names: Mapping[Any, str]) -> None:
        self.names = names
        self.ops: list[_Entry] = []
        self.calls: list[_Entry] = []
        self.running: list[str] = []
        self.makers: dict[int, str] = {}  # by storage; an address that is used again is written again

        self.unwritten: set[int] = set()  # storages too

    @property
    def module(self) -> str:
        return self.running[-1] if self.running else ""


def bisect_runs(function: Callable[[], Any], *, modules: Any = (), state: Sequence[Any] = ()) -> Bisection:
    """Run ``function`` twice from the same state and find where the two runs part.

    Args:
        function: takes nothing; returns tensors and plain values, nested.
        modules: a ``torch.nn.Module``, or several, whose submodules are to be named.
        state: what is restored between the runs; see :func:`tuning.bitexact.compare.compare_runs`.

    Raises:
        TypeError: something in ``state`` cannot be restored, or a run returned what has no known bits.
    """
    import torch

    roots = [modules] if isinstance(modules, torch.nn.Module) else list(modules)
    names: dict[Any, str] = {}
    for number, root in enumerate(roots):
        for name, module in root.named_modules():
            prefix = f"{number}." if len(roots) > 1 else ""
            names.setdefault(module, f"{prefix}{name or type(module).__name__}")
    traces, results = [], []
    with kept_state(state) as restore:
        for run in range(2):
            if run:
                restore()
            trace = _Trace(names)
            with _hooks(trace), _dispatch_mode(trace):
                value = function()
            results.append(digest_value(value, gather=False))
            trace.makers.clear()
            traces.append(trace)
    first, second = traces
    forward, backward = (
        [[c for c in t.calls if c.phase == phase] for t in traces] for phase in ("forward", "backward")
    )
    changed = differences(results[0], results[1])
    return Bisection(
        _walk(first.ops, second.ops, "op"),
        _walk(forward[0], forward[1], "module"),
        _walk(backward[0], backward[1], "module"),
        changed[0] if changed else None,
        len(first.ops),
        len(first.calls),
    )


def _walk(first: Sequence[_Entry], second: Sequence[_Entry], kind: Literal["op", "module"]) -> Divergence | None:
    """The first entry that differs though its inputs do not."""
    for number, (one, two) in enumerate(zip(first, second, strict=False)):
        place: dict[str, Any] = {"phase": one.phase, "module": one.module, "node": one.node, "number": number}
        if not one.same_place(two):
            return Divergence("sequence", one.name, output="order", detail=f"the other run did {two.name}", **place)
        changed = one.inputs.differing(two.inputs)
        if changed and kind == "op":
            # All before it agreed, so nothing that torch dispatched made this difference.
            made = (one.made or {}).get(changed[0], "given to the run")
            detail = (
                f"changed where torch does not see it, after {made}; {_digests(changed[0], one.inputs, two.inputs)}"
            )
            return Divergence("outside of torch", one.name, output=f"input {changed[0]}", detail=detail, **place)
        differing = one.outputs.differing(two.outputs) if one.compared and two.compared else ()
        if differing and not changed:
            detail = _digests(differing[0], one.outputs, two.outputs)
            return Divergence(kind, one.name, output=f"output {differing[0]}", detail=detail, **place)
    if len(first) != len(second):
        longer = max(first, second, key=len)
        entry = longer[min(len(first), len(second))]
        detail = f"the runs have {len(first)} and {len(second)} entries"
        return Divergence("sequence", entry.name, entry.phase, entry.module, output="length", detail=detail)
    return None


def _digests(name: str, one: Digests, two: Digests) -> str:
    pair = [side[name].content if name in side else "absent" for side in (one, two)]
    return f"digests {pair[0]} and {pair[1]}"


def _tensors(value: Any) -> dict[str, Any]:
    """Tensors within arguments or results, by place; what is no tensor is left out."""
    import torch
    from torch.utils import _pytree

    leaves, _ = _pytree.tree_flatten(value)
    return {str(place): leaf for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)}


def _digest_all(tensors: Mapping[str, Any]) -> Digests:
    return digest_value({name: t for name, t in tensors.items() if t.device.type != "meta"}, gather=False)


def _dispatch_mode(trace: _Trace) -> Any:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            name = str(op)
            if any(type(t) not in (torch.Tensor, torch.nn.Parameter) for t in _tensors((args, kwargs)).values()):
                # A subclass turns the op into ops on plain tensors, which come here in their turn.
                return NotImplemented
            given = _tensors((args, kwargs))
            phase, node = _phase()
            storages = {place: _storage(t) for place, t in given.items()}
            made = {place: trace.makers[key] for place, key in storages.items() if key in trace.makers}
            aliases = [a.alias_info.is_write for a in op._schema.arguments if a.alias_info]
            writes, collective = any(aliases), name.startswith(_COLLECTIVE)
            entry = _Entry(name, phase, trace.module, node, None, made=made)
            read = given
            if collective or (aliases and not writes):
                read = {}
            elif writes:
                written = {id(t) for t in _written(op, args, kwargs)}
                over = _OVERWRITES.search(name) is not None
                read = {
                    place: t
                    for place, t in given.items()
                    if id(t) not in written or not (over or storages[place] in trace.unwritten)
                }
                trace.unwritten -= {storages[place] for place, t in given.items() if id(t) in written}
            entry.inputs = _digest_all(read)
            result = op(*args, **kwargs)
            outputs = _tensors(result)
            if writes or collective:
                outputs = {**outputs, **{f"argument {place}": t for place, t in given.items()}}
            unwritten = _UNWRITTEN.match(name) is not None
            entry.compared = not (unwritten or collective or (aliases and not writes))
            entry.outputs = _digest_all(outputs if entry.compared else {})
            where = f" in {trace.module}" if trace.module else ""
            for tensor in outputs.values():
                if (
                    writes or collective or _storage(tensor) not in storages.values()
                ):  # a view was made by who made its storage
                    trace.makers[_storage(tensor)] = f"{name} (op {len(trace.ops)}){where}"
                if unwritten:
                    trace.unwritten.add(_storage(tensor))
                elif _storage(tensor) not in storages.values():
                    trace.unwritten.discard(_storage(tensor))
            trace.ops.append(entry)
            return result

    return Recorder()  # type: ignore[no-untyped-call]


def _written(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """The tensors among the arguments that the op changes."""
    for number, argument in enumerate(op._schema.arguments):
        if argument.alias_info and argument.alias_info.is_write:
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from _tensors(given).values()


def _storage(tensor: Any) -> int:
    import torch

    return int(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else id(tensor)


def _phase() -> tuple[Literal["forward", "backward"], str]:
    import torch

    if torch._C._current_graph_task_id() == -1:
        return "forward", ""
    node = torch._C._current_autograd_node()
    return "backward", "" if node is None else str(node.name())


@contextmanager
def _hooks(trace: _Trace) -> Iterator[None]:
    """Record each call of each named module, and know which one is running."""
    pending: dict[tuple[Any, str], list[_Entry]] = {}

    def begin(phase: Literal["forward", "backward"], module: Any, given: Any) -> None:
        name = trace.names[module]
        entry = _Entry(name, phase, name, "", _quietly(_digest_all, _tensors(given)))
        pending.setdefault((module, phase), []).append(entry)
        trace.running.append(name)

    def end(phase: Literal["forward", "backward"], module: Any, result: Any) -> None:
        name = trace.names[module]
        if name in trace.running:
            # A backward that torch ended early leaves names behind.
            del trace.running[len(trace.running) - 1 - trace.running[::-1].index(name) :]
        if pending.get((module, phase)):
            entry = pending[module, phase].pop()
            entry.outputs = _quietly(_digest_all, _tensors(result))
            trace.calls.append(entry)

    handles = []
    for module in trace.names:
        handles += [
            module.register_forward_pre_hook(
                lambda m, args, kwargs: begin("forward", m, (args, kwargs)), with_kwargs=True, prepend=True
            ),
            module.register_forward_hook(lambda m, args, result: end("forward", m, result)),
            module.register_full_backward_pre_hook(lambda m, grads: begin("backward", m, grads)),
            module.register_full_backward_hook(lambda m, grads, outs: end("backward", m, grads)),
        ]
    try:
        with warnings.catch_warnings():
            # Of an embedding, say, whose inputs are integers: its hook fires with the gradients of its outputs.
            warnings.filterwarnings("ignore", message="Full backward hook is firing when gradients are computed")
            yield
    finally:
        for handle in handles:
            handle.remove()


def _quietly(function: Callable[..., Any], *args: Any) -> Any:
    """Without the ops that the digests need themselves in the trace."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        return function(*args)
