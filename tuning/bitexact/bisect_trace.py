"""What one run did: every op that torch dispatched, and every call of a module in both directions, by digests.

Backward is seen by hooks on tensors, not by torch's full backward hooks, which forbid changing a module's inputs and
outputs in place: a module's outputs tell when its backward begins, and views of its inputs, which only it is given,
when it ends. A module that changes an input in place has no such end: only that its backward began is noted.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from tuning.bitexact.bisect_memory import UnwrittenMemory, named_arguments, storage_of
from tuning.bitexact.digest import measure_value, read_digests

__all__ = ["Entry", "Trace", "dispatch_mode", "hooks", "quietly"]

logger = logging.getLogger(__name__)

_Phase = Literal["forward", "backward"]

_UNWRITTEN = re.compile(r"aten\.(new_)?empty(_like|_strided|_permuted)?\.")
_OVERWRITES = re.compile(
    r"\.(_foreach_)?(copy|zero|fill|normal|uniform|bernoulli|random|exponential|geometric|cauchy|log_normal)_\."
    r"|\.\w*out\w*$"
)
_COLLECTIVE = ("c10d.", "_c10d_functional.")


@dataclass
class Entry:
    """One op, or one call of a module in one direction.

    Attributes:
        name: of the op with its overload, or the module's dotted name.
        phase: forward or backward.
        module: the one that was running.
        node: of autograd's graph, in backward.
        inputs: digests by place; not read yet while the run goes on.
        outputs: the same of what it computed.
        made: for each input, the op that made it.
        compared: whether the outputs mean anything.
        partly: inputs some of whose memory was never written.
    """

    name: str
    phase: _Phase
    module: str
    node: str
    inputs: Any
    outputs: Any = None
    made: Mapping[str, str] = dataclasses.field(default_factory=dict)
    compared: bool = True
    partly: frozenset[str] = frozenset()

    def same_place(self, other: Entry) -> bool:
        """Whether another run did the same here."""
        return (self.name, self.phase, self.module) == (other.name, other.phase, other.module)


class Trace:
    """What one run did. Digests stay where they were computed until :meth:`read`.

    Args:
        names: dotted name of each module that is to be named.
    """

    def __init__(self, names: Mapping[Any, str]) -> None:
        self.names = names
        self.ops: list[Entry] = []
        self.calls: list[Entry] = []
        self.running: list[tuple[_Phase, str]] = []
        self.makers: dict[int, str] = {}  # by storage; an address that is used again is written again
        self.memory = UnwrittenMemory()

    @property
    def module(self) -> str:
        """Dotted name of the module that is running."""
        import torch

        if torch._C._current_graph_task_id() == -1:
            # A backward that torch ended early leaves names behind.
            self.running = [each for each in self.running if each[0] == "forward"]
        return self.running[-1][1] if self.running else ""

    def read(self) -> None:
        """Copy all digests to the host, at once."""
        self.makers.clear()
        self.memory = UnwrittenMemory()
        entries = [*self.ops, *self.calls]
        empty = measure_value({"": None})
        for entry in entries:
            entry.outputs = entry.outputs or empty
        digests = iter(read_digests([each for entry in entries for each in (entry.inputs, entry.outputs)]))
        for entry in entries:
            entry.inputs, entry.outputs = next(digests), next(digests)


def _tensors(value: Any, *, deep: bool = False) -> dict[str, Any]:
    """Tensors within arguments or results, by place; what is no tensor is left out.

    Args:
        value: nested.
        deep: look into objects too that torch does not know the members of, such as dataclasses.
    """
    found: dict[str, Any] = {}
    _look(value, "", (), deep, found)
    return found


def _look(value: Any, name: str, above: tuple[int, ...], deep: bool, found: dict[str, Any]) -> None:
    # No inner function that calls itself: it would keep the tensors alive until the garbage collector comes, and
    # autograd treats a gradient that nobody else holds differently.
    import torch
    from torch.utils import _pytree

    for place, leaf in enumerate(_pytree.tree_leaves(value)):
        here = f"{name}{place}"
        if isinstance(leaf, torch.Tensor):
            found[here] = leaf
        elif deep and id(leaf) not in above and len(above) < 4:
            for inner, member in _members(leaf).items():
                _look(member, f"{here}.{inner}.", (*above, id(leaf)), deep, found)


def _members(value: Any) -> Mapping[str, Any]:
    import torch

    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    if isinstance(value, (type, torch.nn.Module)) or callable(value):
        return {}
    if dataclasses.is_dataclass(value):
        return {field.name: getattr(value, field.name, None) for field in dataclasses.fields(value)}
    return getattr(value, "__dict__", {})


def _measured(tensors: Mapping[str, Any]) -> Any:
    """Digests, unread, of those tensors that have bytes of a known kind."""
    try:
        return measure_value({name: t for name, t in tensors.items() if t.device.type != "meta"} or None, gather=False)
    except TypeError:
        known = {}
        for name, tensor in tensors.items():
            try:
                measure_value(tensor, gather=False)
                known[name] = tensor
            except TypeError:  # noqa: PERF203
                continue
        return measure_value(known or None, gather=False)


def dispatch_mode(trace: Trace) -> Any:
    """A mode that records each op in a trace."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    plain = torch.Tensor.__torch_dispatch__

    class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
        supports_higher_order_operators = True

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            # torch.compile would fall back to eager under a mode, and flex_attention, which uses it, would refuse.
            return True

        def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = kwargs or {}
            if torch._guards.CompileContext.try_get() is not None:
                return op(*args, **kwargs)  # torch.compile at work, which only the first run sees
            given = _tensors((args, kwargs))
            if any(type(t).__torch_dispatch__ != plain for t in given.values()):
                # Such a subclass turns the op into ops on plain tensors, which come here in their turn.
                return NotImplemented
            phase, node = _phase()
            if not isinstance(op, torch._ops.OpOverload):
                # One that takes functions, such as cond or flex_attention: what those compute is part of it.
                entry = Entry(op.name(), phase, trace.module, node, _measured(given), made=_made(trace, given))
                result = op(*args, **kwargs)
                entry.outputs = _measured(_tensors(result))
                _note_makers(trace, op.name(), _tensors(result), set(map(storage_of, given.values())))
                trace.ops.append(entry)
                return result
            return _record(trace, op, args, kwargs, given, phase, node)

    return Recorder()  # type: ignore[no-untyped-call]


def _made(trace: Trace, given: Mapping[str, Any]) -> dict[str, str]:
    storages = {place: storage_of(t) for place, t in given.items()}
    return {place: trace.makers[key] for place, key in storages.items() if key in trace.makers}


def _record(trace: Trace, op: Any, args: Any, kwargs: Any, given: Mapping[str, Any], phase: _Phase, node: str) -> Any:
    name, memory = str(op), trace.memory
    aliases = [a.alias_info.is_write for a in op._schema.arguments if a.alias_info]
    writes, collective = any(aliases), name.startswith(_COLLECTIVE)
    view = bool(aliases) and not writes
    written = list(_written(op, args, kwargs)) if writes else []
    identities = {id(t) for t in written}
    over = _OVERWRITES.search(name) is not None
    read, partly = {}, set()
    for place, tensor in given.items() if not (collective or view) else ():
        if id(tensor) not in identities:
            read[place] = tensor
            partly |= {place} if tensor in memory else set()
        elif not over:
            read[place] = memory.defined(tensor)
    entry = Entry(name, phase, trace.module, node, _measured(read), made=_made(trace, given), partly=frozenset(partly))
    result = op(*args, **kwargs)
    storages = set(map(storage_of, given.values()))
    for tensor in given.values() if collective else written:
        if collective:
            memory.drop(tensor)
        elif over:
            memory.overwritten(tensor)
        else:
            memory.changed(name, tensor, named_arguments(op, args, kwargs))
    outputs = _tensors(result)
    if writes or collective:
        outputs = {**outputs, **{f"argument {place}": t for place, t in given.items()}}
    unwritten = _UNWRITTEN.match(name) is not None
    for tensor in outputs.values():
        if unwritten:
            memory.add(tensor)
        elif storage_of(tensor) not in storages:
            memory.drop(tensor)  # an address that was used before
    entry.compared = not (unwritten or collective or view)
    entry.outputs = _measured({p: memory.defined(t) for p, t in outputs.items()} if entry.compared else {})
    # A view was made by who made its storage.
    _note_makers(trace, name, outputs, set() if writes or collective else storages)
    trace.ops.append(entry)
    return result


def _note_makers(trace: Trace, name: str, outputs: Mapping[str, Any], known: set[int]) -> None:
    where = f" in {trace.module}" if trace.module else ""
    for tensor in outputs.values():
        if storage_of(tensor) not in known:
            trace.makers[storage_of(tensor)] = f"{name} (op {len(trace.ops)}){where}"


def _written(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Any]:
    """The tensors among the arguments that the op changes."""
    for number, argument in enumerate(op._schema.arguments):
        if argument.alias_info and argument.alias_info.is_write:
            given = args[number] if number < len(args) else kwargs.get(argument.name)
            yield from _tensors(given).values()


def _phase() -> tuple[_Phase, str]:
    import torch

    if torch._C._current_graph_task_id() == -1:
        return "forward", ""
    node = torch._C._current_autograd_node()
    return "backward", "" if node is None else str(node.name())


class _Call:
    """One call of a module: its forward, and what tells of its backward."""

    def __init__(self, trace: Trace, name: str, handles: list[Any]) -> None:
        self._trace, self._name, self._handles = trace, name, handles
        self._inputs: list[tuple[Any, Any]] = []
        self._backward: dict[int, Entry] = {}  # by autograd's task: a graph may be gone through more than once
        self._ends = False

    def begin(self, given: Any) -> Any:
        """Forward begins; gives the arguments to call the module with, or None for those that it has."""
        import torch
        from torch.utils import _pytree

        self._forward = Entry(self._name, "forward", self._name, "", quietly(_measured, _tensors(given, deep=True)))
        self._trace.running.append(("forward", self._name))
        if not torch.is_grad_enabled():
            return None
        views: dict[int, Any] = {}  # what is one tensor to the module stays one

        def view(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
                return leaf
            if id(leaf) not in views:
                views[id(leaf)] = _view(leaf)
            return views[id(leaf)]

        replaced = _pytree.tree_map(view, given)
        found = [each for each in {id(each): each for each in views.values()}.values() if each.grad_fn is not None]
        self._inputs = [(each, each.grad_fn) for each in found]
        if found:
            self._handles.append(torch.autograd.graph.register_multi_grad_hook(found, self._backward_ends))
        return replaced if views else None

    def end(self, result: Any) -> Any:
        """Forward is over; gives what takes the place of the module's result, or None."""
        import torch
        from torch.utils import _pytree

        self._leave("forward")
        self._forward.outputs = quietly(_measured, _tensors(result, deep=True))
        self._trace.calls.append(self._forward)
        if not torch.is_grad_enabled():
            return None
        inputs = {id(each) for each, _ in self._inputs}
        passed_on = any(id(each) in inputs for each in _tensors(result).values())
        if passed_on:
            # An input as it came: its gradient as an output is another tensor's than that as an input.
            result = _pytree.tree_map(lambda leaf: _view(leaf) if id(leaf) in inputs else leaf, result)
        changed = [each for each, node in self._inputs if each.grad_fn is not node]
        self._ends = bool(self._inputs) and not changed
        if changed:
            logger.info("%s changes its input in place: where its backward ends is not seen", self._name)
        outputs = [t for t in _tensors(result, deep=True).values() if t.requires_grad and id(t) not in inputs]
        if outputs:
            self._handles.append(torch.autograd.graph.register_multi_grad_hook(outputs, self._backward_begins))
        self._inputs = []
        return result if passed_on else None

    def _backward_begins(self, gradients: Sequence[Any]) -> None:
        import torch

        entry = Entry(self._name, "backward", self._name, "", quietly(_measured, _tensors(gradients)))
        if self._ends:
            self._trace.running.append(("backward", self._name))
            self._backward[torch._C._current_graph_task_id()] = entry
        else:
            self._trace.calls.append(entry)

    def _backward_ends(self, gradients: Sequence[Any]) -> None:
        import torch

        entry = self._backward.pop(torch._C._current_graph_task_id(), None)
        if entry is not None:
            self._leave("backward")
            entry.outputs = quietly(_measured, _tensors(gradients))
            self._trace.calls.append(entry)

    def _leave(self, phase: _Phase) -> None:
        running = self._trace.running
        if (phase, self._name) in running:
            del running[len(running) - 1 - running[::-1].index((phase, self._name)) :]


def _view(tensor: Any) -> Any:
    """A tensor of its own over the same memory, in autograd's graph; the tensor itself where it cannot be had."""
    import torch

    if tensor.layout != torch.strided or tensor.is_nested:
        return tensor
    try:
        return quietly(tensor.view_as, tensor)
    except (RuntimeError, NotImplementedError, TypeError):  # a subclass that has no views
        return tensor


@contextmanager
def hooks(trace: Trace) -> Iterator[None]:
    """Record each call of each named module, and know which one is running."""
    import torch

    calls: dict[Any, list[_Call]] = {}
    handles: list[Any] = []

    def begin(module: Any, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return None  # no part of what torch.compile compiles
        call = _Call(trace, trace.names[module], handles)
        calls.setdefault(module, []).append(call)
        return call.begin((args, kwargs))

    def end(module: Any, args: Any, result: Any) -> Any:
        if torch.compiler.is_compiling():
            return None
        return calls[module].pop().end(result) if calls.get(module) else None

    with ExitStack() as stack:
        stack.callback(lambda: [handle.remove() for handle in handles])
        for module in trace.names:
            if isinstance(module, torch.jit.ScriptModule):
                logger.info("%s is compiled by torch.jit, which has no such hooks: not named", trace.names[module])
                continue
            stack.callback(module.register_forward_pre_hook(begin, with_kwargs=True, prepend=True).remove)
            stack.callback(module.register_forward_hook(end).remove)
        yield


def quietly(function: Callable[..., Any], *args: Any) -> Any:
    """Without the ops that the digests need themselves in the trace."""
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():
        return function(*args)
