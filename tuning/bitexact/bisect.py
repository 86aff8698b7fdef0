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
destination of an op that only overwrites it, nor views, which compute nothing. Where an op writes a part of such memory
the rest of it is left out (see :mod:`tuning.bitexact.bisect_memory`). Reading it before it is written is found: the
reader's inputs differ.

Each op costs two digests, which stay on the device until the run is over: a race between streams may still hide from
this, and be seen by :func:`tuning.bitexact.compare.compare_runs` alone. The trace is as long as the run has ops. An op
that takes functions (``torch.cond``, ``flex_attention``) is one op. What ``torch.compile`` compiled runs as compiled:
its kernels show as what torch does not dispatch, and modules within have no names. Nor have modules that ``torch.jit``
compiled. What a first call compiles or sets up may show as another sequence of ops: call the function once before. Of a
module that changes its input in place only the gradients that its backward was given are seen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tuning.bitexact.bisect_trace import Entry, Trace, dispatch_mode, hooks
from tuning.bitexact.difference import Difference, differences
from tuning.bitexact.digest import Digests, digest_value
from tuning.bitexact.kept_state import kept_state, run_values
from tuning.spec import Json

__all__ = ["Bisection", "Divergence", "bisect_runs"]


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
        result: the first value that differs of what the function returned or left in its state.
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
    shared: set[str] | None = None
    with kept_state(state) as restore:
        for run in range(2):
            if run:
                restore()
            trace = Trace(names)
            with hooks(trace), dispatch_mode(trace):
                value = function()
            values, shared = run_values(value, state, shared)
            results.append(digest_value(values, gather=False))
            trace.read()
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


def _walk(first: Sequence[Entry], second: Sequence[Entry], kind: Literal["op", "module"]) -> Divergence | None:
    """The first entry that differs though its inputs do not."""
    for number, (one, two) in enumerate(zip(first, second, strict=False)):
        place: dict[str, Any] = {"phase": one.phase, "module": one.module, "node": one.node, "number": number}
        if not one.same_place(two):
            return Divergence("sequence", one.name, output="order", detail=f"the other run did {two.name}", **place)
        changed = one.inputs.differing(two.inputs)
        if changed and kind == "op":
            # All before it agreed, so nothing that torch dispatched made this difference.
            made = one.made.get(changed[0], "given to the run")
            how = "changed where torch does not see it"
            if changed[0] in one.partly:
                how = f"read though it was never written whole, or {how}"
            detail = f"{how}, after {made}; {_digests(changed[0], one.inputs, two.inputs)}"
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
