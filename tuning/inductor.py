"""Autotuned kernels inside ``torch.compile``. The only module that names Inductor's internals.

A kernel that is traced is not launched through its autotuner: torch reads the candidates, computes a grid for each, and
Inductor writes them into generated code that times a copy of its own. Its ``deterministic`` setting does not keep it
from timing these.

**The seam** is ``TritonHOPifier.call_triton_kernel``, through which Dynamo and ``make_fx`` (``triton_op``,
``wrap_triton``) both take every traced launch. There the autotuner is replaced by a stand-in that has the chosen config
alone, before anything is read off it. What follows (heuristics, grids, code, the keys of caches) sees one candidate, so
nothing is left to time. Alternatives weighed: where the code is generated the autotuner's key names are gone and the
caches have been asked already; a custom graph pass gets a graph whose grids are computed; replacing the generated
code's own autotuner would compile every candidate first.

**The key.** Values that the graph is specialised on are what an eager launch would have: same key, same config.
``constexpr`` arguments are always such, since torch specialises on them. A number that stays symbolic (dynamic shapes)
has no value: it is encoded by its type, ``{"opaque":"torch.SymInt"}``, no exact entry matches, and the later rules
decide. The kernel's own pruning is run on the traced arguments. Where that fails, or choosing raises, the graph is
broken there: the launch is then eager, pinned, and its error the caller's.

**Stale artefacts.** Three things outlive a pin. Code that Dynamo has in this process is dropped when a policy is
installed, replaced or removed, if a kernel has been traced. Inductor's and AOTAutograd's caches on disk are keyed by
:class:`FxGraphHashDetails`; to these are added the configs of the traced kernels (AOTAutograd's key, and up to 2.7
Inductor's, lack them), and, for operators that hold a kernel which is not traced yet, a fingerprint of all pins.
Exported programs and ahead-of-time packages keep what they were made with.

**torch.** Hook points are those of 2.6 to 2.14. torch is not imported here: what is to be replaced is replaced as soon
as its module is loaded, by whomever. Where a hook point is missing, that is said, and traced kernels are not covered.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any

from ._inductor_timed import Unpinnable, unpinnable
from ._patches import Patch, take_back
from .errors import TuningError

__all__ = ["SUPPORTED_TORCH", "CompiledKernels", "Unpinnable", "unpinnable"]

logger = logging.getLogger("tuning.inductor")

SUPPORTED_TORCH = ((2, 6), (2, 15))
"""Releases of torch whose hook points are known: from the first, up to but without the second."""

_TRACER = "torch._higher_order_ops.triton_kernel_wrap"
_CACHES = "torch._inductor.codecache"

_RULES = "torch._dynamo.trace_rules"

_NAMESPACES_WITHOUT_KERNELS = frozenset(("_c10d_functional", "aten", "inductor", "prim", "prims"))

_Trace = Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any]


class _Unknown:
    """Stands for a traced argument that is neither a known value nor a tensor."""


class CompiledKernels:
    """Pins what is traced into compiled graphs, while it is applied.

    Args:
        trace: gets an autotuner, and positional and keyword arguments of a launch, of which tensors have no content
            and numbers may be symbolic; returns the autotuner to trace in its place, or None for the same.
        constexprs: names of an autotuner's ``constexpr`` parameters.
        fingerprint: text that differs wherever any pin may differ; empty while nothing is pinned.
    """

    def __init__(
        self, trace: _Trace, constexprs: Callable[[Any], frozenset[str]], fingerprint: Callable[[], str]
    ) -> None:
        self._trace = trace
        self._constexprs = constexprs
        self._fingerprint = fingerprint
        self._patches: dict[str, Patch] = {}
        self._watcher: _Watcher | None = None
        self._rules: tuple[Any, str] | None = None
        self._active = False
        self._nested = threading.local()

    # -- patching and undoing --

    def apply(self, previous: CompiledKernels | None = None) -> None:
        """Patch what is loaded of torch, now, and the rest once it is loaded; in place of ``previous`` if given.

        Where it fails, ``previous`` is in charge as before. One that has been replaced may be applied again, in place
        of what replaced it.
        """
        with contextlib.ExitStack() as undo:
            undo.callback(self._take_back if previous is None else functools.partial(previous._patch, self))
            self._patch(previous)
            _forget_compiled_code()
            undo.pop_all()

    def _patch(self, previous: CompiledKernels | None) -> None:
        self._active = True
        theirs = {} if previous is None else dict(previous._patches)
        self._patches = dict(theirs)  # those not replaced yet, should one of them fail, are ours to hand back
        if previous is not None:
            previous._retire()
        makers = {_TRACER: self._patch_tracer, _CACHES: self._patch_caches, _RULES: self._be_skipped}
        self._watcher = _Watcher({name: functools.partial(make, None) for name, make in makers.items()})
        sys.meta_path.insert(0, self._watcher)
        for name, make in makers.items():
            module = sys.modules.get(name)
            if module is not None:
                make(theirs.get(name), module)

    def undo(self) -> None:
        """Take the patches back. One that somebody else has patched over stays, and passes through."""
        self._take_back()
        _forget_compiled_code()

    def _take_back(self) -> None:
        try:
            take_back(reversed(self._patches.values()))
        finally:
            self._retire()

    def _retire(self) -> None:
        self._active = False
        self._patches = {}
        if self._watcher is not None:
            self._watcher.stop()
            self._watcher = None
        if self._rules is not None:
            rules, entry = self._rules
            self._rules = None
            if entry in rules.SKIP_DIRS:
                rules.SKIP_DIRS.remove(entry)
                rules._recompile_re()

    def _replace(
        self, theirs: Patch | None, module: ModuleType, owner_name: str, name: str, make: Callable[[Any], Any]
    ) -> None:
        if not self._active:
            return
        owner = getattr(module, owner_name, None)
        found = None if owner is None else vars(owner).get(name)
        if found is None:
            torch = sys.modules.get("torch")
            low, high = (".".join(map(str, version)) for version in SUPPORTED_TORCH)
            logger.warning(
                "torch %s: %s has no %s.%s, so kernels inside torch.compile are NOT pinned: Inductor times them; "
                "expected torch >=%s,<%s: use one of those, or launch these kernels outside of compiled code",
                getattr(torch, "__version__", "?"),
                module.__name__,
                owner_name,
                name,
                low,
                high,
            )
            return
        original = theirs.original if theirs is not None and found is theirs.replacement else found
        replacement = functools.wraps(original)(make(original))
        self._patches[module.__name__] = Patch(owner, name, original, replacement)
        setattr(owner, name, replacement)

    # -- tracing --

    def _be_skipped(self, theirs: Patch | None, module: Any) -> None:
        """Keep Dynamo, where it breaks the graph at a launch, from compiling the frames of this library."""
        if self._active and hasattr(module, "add") and hasattr(module, "SKIP_DIRS"):
            count = len(module.SKIP_DIRS)
            module.add(__name__.partition(".")[0])
            if len(module.SKIP_DIRS) > count:
                self._rules = (module, module.SKIP_DIRS[-1])

    def _patch_tracer(self, theirs: Patch | None, module: ModuleType) -> None:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def call_triton_kernel(hopifier: Any, variable: Any, args: Any, kwargs: Any, tx: Any) -> Any:
                # torch calls itself with autotuners that it makes of the first one: that one alone has the key.
                if not self._active or getattr(self._nested, "inside", False):
                    return original(hopifier, variable, args, kwargs, tx)
                self._nested.inside = True
                try:
                    variable = self._pinned(hopifier, variable, args, kwargs)
                    return original(hopifier, variable, args, kwargs, tx)
                finally:
                    self._nested.inside = False

            return call_triton_kernel

        self._replace(theirs, module, "TritonHOPifier", "call_triton_kernel", make)

    def _pinned(self, hopifier: Any, variable: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The traced kernel with the chosen config alone, where there is something to choose."""
        autotuner = variable.kernel
        if len(getattr(autotuner, "configs", ())) < 2:
            return variable
        constexprs = self._constexprs(autotuner)
        names = tuple(autotuner.arg_names)
        names = (*names, *("" for _ in range(len(args) - len(names))))

        def seen(name: str, value: Any) -> Any:
            # torch specialises the graph on these too, a little later.
            return _seen(variable.specialize_symbolic(value) if name in constexprs else value)

        positional = tuple(seen(name, value) for name, value in zip(names, args, strict=False))
        named = {name: seen(name, value) for name, value in kwargs.items()}
        try:
            stand_in = self._trace(autotuner, positional, named)
        except TuningError as error:
            problem = str(error)
        except Exception as error:
            problem = f"its config cannot be chosen while it is traced: {type(error).__name__}: {error}"
        else:
            return variable if stand_in is None else _with_kernel(hopifier, variable, stand_in)
        logger.warning("a traced kernel is left out of the compiled graph and launched eagerly: %s", problem)
        return hopifier.raise_unsupported(problem)

    # -- caches --

    def _patch_caches(self, theirs: Patch | None, module: ModuleType) -> None:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def __init__(details: Any, *args: Any, **kwargs: Any) -> None:
                original(details, *args, **kwargs)
                if self._active:
                    pins = self._pins_of(args[0] if args else kwargs.get("gm"))
                    if pins:
                        details.triton_tuning_pins = pins

            return __init__

        self._replace(theirs, module, "FxGraphHashDetails", "__init__", make)

    def _pins_of(self, graph: Any) -> tuple[str, ...]:
        """What in a graph depends on pins, as text; empty where nothing does."""
        fingerprint = self._fingerprint()
        if not fingerprint or graph is None:
            return ()
        found: list[str] = []
        side_table = sys.modules[_TRACER].kernel_side_table if _TRACER in sys.modules else None
        for node in _nodes(graph):
            index = node.kwargs.get("kernel_idx")
            if index is not None and side_table is not None:
                configs = getattr(side_table.get_kernel(index), "configs", ())
                found.append(repr([sorted(map(str, config.all_kwargs().items())) for config in configs]))
            elif _may_hold_a_kernel(node.target):
                found.append(fingerprint)
        return tuple(found)


def _with_kernel(hopifier: Any, variable: Any, autotuner: Any) -> Any:
    """The traced kernel over another autotuner; torch keeps the place it came from where its version asks for one."""
    if hasattr(hopifier, "recreate_variable"):
        return hopifier.recreate_variable(variable, kernel=autotuner, kernel_idx=None, grid=variable.grid)
    return type(variable)(kernel=autotuner, kernel_idx=None, grid=variable.grid)


def _seen(value: Any) -> Any:
    """A traced argument as an eager launch would show it, so far as the graph knows it."""
    from torch._dynamo.variables.base import VariableTracker

    if not isinstance(value, VariableTracker):
        return _number(value)
    value = value.realize()
    if value.is_python_constant():
        return value.as_python_constant()
    variables: Any = importlib.import_module("torch._dynamo.variables")
    if isinstance(value, variables.SymNodeVariable):
        return _number(value.sym_num)
    # A Python number that the graph takes for an input is a tensor only inside of the graph.
    if isinstance(value, variables.TensorVariable) and not isinstance(value, variables.UnspecializedPythonVariable):
        return value.as_proxy().node.meta["example_value"]
    return _Unknown()


def _number(value: Any) -> Any:
    """A symbolic number that can have one value only is that value."""
    node = getattr(value, "node", None)
    for read in ("maybe_as_int", "maybe_as_float", "maybe_as_bool"):
        known = getattr(node, read, lambda: None)()
        if known is not None:
            return known
    return value


def _nodes(graph: Any) -> Iterator[Any]:
    modules: Iterable[Any] = graph.modules() if hasattr(graph, "modules") else (graph,)
    for module in modules:
        inner = getattr(module, "graph", None)
        yield from getattr(inner, "nodes", ())


def _may_hold_a_kernel(target: Any) -> bool:
    """Whether an operator may hold kernels that are traced after the caches have been asked: one from outside of torch.

    torch keeps a list of kernels for each such operator (from 2.9 on), found in its source, and does not find them all.
    """
    name = getattr(target, "_qualified_op_name", None) or getattr(target, "_name", None)  # a packet's, an overload's
    return "::" in str(name) and str(name).partition("::")[0] not in _NAMESPACES_WITHOUT_KERNELS


def _forget_compiled_code() -> None:
    """Drop what Dynamo has compiled in this process, if any of it may hold a kernel."""
    dynamo, tracer = sys.modules.get("torch._dynamo"), sys.modules.get(_TRACER)
    side_table = getattr(tracer, "kernel_side_table", None)
    if dynamo is None or not getattr(side_table, "id_to_kernel", None):
        return
    logger.info("pins change: code that torch.compile made of Triton kernels in this process is compiled anew")
    dynamo.reset_code_caches()


class _Watcher(importlib.abc.MetaPathFinder):
    """Calls back once a module has been loaded, by whomever; finds no module itself."""

    def __init__(self, wanted: Mapping[str, Callable[[ModuleType], None]]) -> None:
        self._wanted = wanted
        self._finding = threading.local()

    def stop(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._wanted or getattr(self._finding, "inside", False):
            return None
        self._finding.inside = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._finding.inside = False
        if spec is not None and spec.loader is not None:
            spec.loader = _TellingLoader(spec.loader, self._wanted[fullname])
        return spec


class _TellingLoader(importlib.abc.Loader):
    """Loads through another loader, puts that back in its place, and calls back."""

    def __init__(self, loader: Any, loaded: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._loaded = loaded

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        spec.loader = self._loader
        try:
            module: ModuleType | None = self._loader.create_module(spec)
        finally:
            spec.loader = self
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._loaded(module)
