"""Flash attention with its deterministic backward, wherever it was imported.

flash-attn's functions take ``deterministic=False``; the backward then adds the partial gradients of the queries with
atomics. The patch binds every entry point that has the parameter to True, whatever the caller passes: diffusers, for
one, passes its own False on. It covers

- flash-attn's modules (``flash_attn`` for version 2, ``flash_attn_interface`` for version 3) and each imported module
  that holds one of their functions under any name, such as diffusers' dispatch functions ``flash_attn_func``,
  ``flash_attn_varlen_func``, ``flash_attn_3_func`` and ``flash_attn_3_varlen_func``;
- the raw backward entry points, which diffusers calls directly under context parallelism;
- kernels that diffusers loads from a hub, at the moment it loads them.

A function captured elsewhere (a class attribute, a closure) before the patch keeps its default: patch before the model
is built. Names and behaviour are those of flash-attn 2.8 and diffusers 0.42.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any

from tuning.determinism.importing import ImportWatch
from tuning.determinism.patching import Patches, own_attributes
from tuning.determinism.refusal import refusal

__all__ = ["DISPATCH_MODULE", "FLASH_MODULES", "EntryPoint", "FlashPatch", "find_entry_points", "patch_flash_attention"]

FLASH_MODULES: tuple[str, ...] = ("flash_attn", "flash_attn.flash_attn_interface", "flash_attn_interface")
"""Modules of flash-attn whose entry points are bound; imported by the patch where they are installed."""

DISPATCH_MODULE = "diffusers.models.attention_dispatch"
"""The dispatcher of diffusers; patched where it is imported, and at its import."""

_NAMES = re.compile(r"(flash_attn(_3|_4)?(_\w+)?_func|flash_attn_with_kvcache|_(wrapped_)?flash_attn_\w*backward)$")
_PARAMETER = "deterministic"
_MARK = "__bound_deterministic__"


@dataclass(frozen=True)
class EntryPoint:
    """One function of a flash family.

    Attributes:
        name: module and name under which it was found.
        function: the function, or None where the name is bound to None (the package is not installed).
        position: index of the parameter ``deterministic`` among the positional ones, or None where it is keyword-only.
        reason: why it is skipped, or None where it can be bound.
    """

    name: str
    function: Any
    position: int | None = None
    reason: str | None = None

    def __str__(self) -> str:
        return self.name if self.reason is None else f"{self.name} ({self.reason})"


def _entry_point(name: str, function: Any) -> EntryPoint:
    if function is None:
        return EntryPoint(name, None, reason="None: its package is not installed")
    if not callable(function):
        return EntryPoint(name, function, reason="not callable")
    schema = getattr(getattr(function, "default", None), "_schema", None)
    if schema is not None:  # a torch operator: no Python signature, but a schema
        names = [argument.name for argument in schema.arguments]
        if _PARAMETER in names:
            return EntryPoint(name, function, names.index(_PARAMETER))
        return EntryPoint(name, function, reason="no parameter 'deterministic'")
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return EntryPoint(name, function, reason="its signature cannot be read")
    for index, parameter in enumerate(parameters):
        if parameter.name == _PARAMETER:
            positional = parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
            return EntryPoint(name, function, index if positional else None)
    return EntryPoint(name, function, reason="no parameter 'deterministic'")


def _bind(entry: EntryPoint) -> Callable[..., Any]:
    function, position = entry.function, entry.position

    def bound(*args: Any, **kwargs: Any) -> Any:
        if position is not None and len(args) > position:
            return function(*args[:position], True, *args[position + 1 :], **kwargs)
        kwargs[_PARAMETER] = True
        return function(*args, **kwargs)

    functools.update_wrapper(bound, function, updated=())
    setattr(bound, _MARK, True)
    return bound


def _is_bound(function: object) -> bool:
    return getattr(function, _MARK, False) is True


def _candidates(module: ModuleType) -> Iterator[tuple[str, Any]]:
    for name, value in sorted(own_attributes(module).items()):
        if _NAMES.match(name):
            yield name, value


def find_entry_points(modules: Sequence[ModuleType]) -> tuple[EntryPoint, ...]:
    """The entry points of flash families that ``modules`` hold, bindable or not, in order."""
    return tuple(
        _entry_point(f"{module.__name__}.{name}", value) for module in modules for name, value in _candidates(module)
    )


def _load(name: str) -> ModuleType | str:
    """The module, or why there is none."""
    if name in sys.modules and isinstance(sys.modules[name], ModuleType):
        return sys.modules[name]
    try:
        if importlib.util.find_spec(name.partition(".")[0]) is None:
            return "not installed"
        return importlib.import_module(name)
    except Exception as error:  # a package built for another torch fails in many ways
        return f"import fails with {type(error).__name__}: {error}".splitlines()[0]


class FlashPatch:
    """The patch, while it stands. Leaving its ``with`` block undoes it.

    Attributes:
        bound: entry points that are bound to ``deterministic=True``, as dotted names.
        skipped: entry points that were found but not bound, with the reason, and packages that are missing.
    """

    def __init__(self) -> None:
        self.bound: tuple[str, ...] = ()
        self.skipped: tuple[str, ...] = ()
        self._patches = Patches("the flash-attention patch")
        self._watch = ImportWatch([DISPATCH_MODULE], self._patch_late)

    def _patch(self, modules: Sequence[ModuleType]) -> None:
        # Found first, replaced afterwards: the same function is held by several modules, and a replacement under way
        # would make the later ones look bound already.
        found = find_entry_points(modules)
        bound, skipped = list(self.bound), list(self.skipped)
        replaced: list[object] = []
        for entry in found:
            if entry.reason is not None:
                skipped.append(str(entry))
                continue
            bound.append(entry.name)
            if not _is_bound(entry.function) and not any(entry.function is done for done in replaced):
                replaced.append(entry.function)
                self._patches.replace_everywhere(entry.function, _bind(entry))
        self.bound, self.skipped = tuple(bound), tuple(skipped)
        for module in modules:
            if module.__name__ == DISPATCH_MODULE:
                self._patch_hub(module)

    def _patch_late(self, module: ModuleType) -> None:
        self._patch([module])

    def _patch_hub(self, dispatch: ModuleType) -> None:
        """Bind the hub kernels that are loaded, and those that will be, in diffusers' registry of them."""
        registry = getattr(dispatch, "_HUB_KERNELS_REGISTRY", None)
        load = getattr(dispatch, "_maybe_download_kernel_for_backend", None)
        if not isinstance(registry, dict) or not callable(load):
            return
        for backend in registry:
            self._bind_hub_kernel(backend, registry[backend])

        @functools.wraps(load)
        def load_and_bind(backend: Any, *args: Any, **kwargs: Any) -> Any:
            result = load(backend, *args, **kwargs)
            if backend in registry:
                self._bind_hub_kernel(backend, registry[backend], required=True)
            return result

        self._patches.replace_everywhere(load, load_and_bind)

    def _bind_hub_kernel(self, backend: Any, config: Any, *, required: bool = False) -> None:
        label = str(getattr(backend, "value", backend))
        if "flash" not in label:
            return
        for attribute in ("kernel_fn", "wrapped_backward_fn"):
            function = getattr(config, attribute, None)
            if function is None or _is_bound(function):
                continue
            entry = _entry_point(f"hub kernel {label}.{attribute}", function)
            if entry.reason is None:
                self._patches.set(config, attribute, _bind(entry))
                self.bound = (*self.bound, entry.name)
            else:
                self.skipped = (*self.skipped, str(entry))
                if required and attribute == "kernel_fn":
                    raise refusal(
                        "this attention backend",
                        [f"{entry} cannot be bound to deterministic=True: choose another attention backend"],
                    )

    def undo(self) -> None:
        """Put every function back.

        Raises:
            DeterminismError: somebody else has patched one of the places since; the others are back.
        """
        self._watch.remove()
        self._patches.undo()

    def __enter__(self) -> FlashPatch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.undo()


def patch_flash_attention(modules: Sequence[ModuleType | str] | None = None) -> FlashPatch:
    """Bind every entry point of flash attention that has a parameter ``deterministic`` to True.

    Args:
        modules: modules, or their names, whose entry points are bound (a name is imported where it can be); None means
            flash-attn's own modules, where installed, and diffusers' dispatcher, where imported already or later.
            Whatever else has imported one of the bound functions gets the bound form too.

    Returns:
        The patch: what was bound, what was skipped, and ``undo()``. Applying it twice is fine: an entry point that is
        bound already counts as bound.

    Raises:
        DeterminismError: not one entry point can be bound (it names everything that was found), or ``modules`` is one
            name instead of a list of them. Nothing is changed then.
    """
    if isinstance(modules, (str, bytes)):  # a sequence too, of letters
        raise refusal(
            "flash attention",
            [f"modules must be a list of modules or names, got {modules!r}: write [{modules!r}]"],
        )
    wanted: list[ModuleType | str] = list(FLASH_MODULES if modules is None else modules)
    if modules is None and DISPATCH_MODULE in sys.modules:
        wanted.append(DISPATCH_MODULE)
    loaded: list[ModuleType] = []
    missing: list[str] = []
    for item in wanted:
        module = _load(item) if isinstance(item, str) else item
        if isinstance(module, str):
            missing.append(f"{item} ({module})")
        else:
            loaded.append(module)
    found = find_entry_points(loaded)
    if not any(entry.reason is None for entry in found):
        seen = ", ".join([*map(str, found), *missing]) or "nothing"
        raise refusal(
            "flash attention",
            [
                f"no entry point has a parameter 'deterministic'; found: {seen}: install flash-attn 2.4.1 or later, or "
                "choose another attention backend"
            ],
        )
    patch = FlashPatch()
    patch.skipped = tuple(missing)
    try:
        patch._patch(loaded)
        if modules is None:
            patch._watch.install()
    except BaseException:
        patch.undo()
        raise
    return patch
