"""Find the autotuners that a module's objects hold: bound by name, wrapped, in classes, containers and closures.

The search starts at the names of each module and goes through what commonly stands around a kernel: wrappers with a
``fn``, ``functools.partial`` and ``functools.wraps``, closures, defaults and attributes of functions, class attributes,
attributes of instances of the package's own classes, and dicts, lists, tuples and sets. It reads attributes statically,
so that no property, descriptor or lazy attribute runs.

What it cannot see is a kernel that exists only in the cache of a factory, or not yet: those are found in the source.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from types import FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any

from .interception import find_autotuner

__all__ = ["Binding", "python_function", "search"]

logger = logging.getLogger("tuning.inventory")

# Far enough for a wrapper in a dict in an attribute of an instance; a kernel further away is reached by a call.
_DEPTH = 7
_ATOMS = (type(None), bool, int, float, complex, str, bytes, bytearray, range, slice, ModuleType)
_CONTAINERS = (list, tuple, set, frozenset, deque)
_WRAPPED = ("__wrapped__", "__func__", "func", "fn", "_fn", "kernel", "_kernel")


@dataclass(frozen=True)
class Binding:
    """One place where an autotuner is bound.

    Attributes:
        autotuner: the object.
        where: the place, such as ``package.module.NAME`` or ``package.module.TABLE['key']``.
        steps: how many steps the place lies away from a module's name; 0 for the name itself.
        wrappers: what stands around the autotuner there, outermost first.
    """

    autotuner: Any
    where: str
    steps: int
    wrappers: tuple[str, ...]


@dataclass(frozen=True)
class _Item:
    value: Any
    where: str
    steps: int
    wrappers: tuple[str, ...]


def search(modules: Mapping[str, ModuleType], packages: Collection[str]) -> tuple[Binding, ...]:
    """Every binding found in ``modules``, nearest first, then in the order of modules and names.

    Args:
        modules: what to search, by name.
        packages: prefixes of the module names whose classes and instances are looked into.
    """
    bindings: list[Binding] = []
    seen: dict[int, Any] = {}  # by identity; holds the objects, so that no identity is used twice
    queue: deque[_Item] = deque()
    for module_name, module in modules.items():
        for name, value in list(vars(module).items()):
            queue.append(_Item(value, f"{module_name}.{name}", 0, ()))
    while queue:
        item = queue.popleft()
        value = item.value
        if issubclass(type(value), _ATOMS):  # not isinstance, which asks a lazy proxy for its class
            continue
        try:
            found = _autotuner_in(value)
        except Exception as error:  # an object that cannot even be looked at is no kernel, and hides none but its own
            logger.debug("%s cannot be searched: %s", item.where, type(error).__name__)
            continue
        if found is not None:
            autotuner, wrappers = found
            bindings.append(Binding(autotuner, item.where, item.steps, (*item.wrappers, *wrappers)))
            continue
        if item.steps >= _DEPTH or id(value) in seen:
            continue
        seen[id(value)] = value
        try:
            queue.extend(_inside(item, packages))
        except Exception as error:  # an object that cannot even be looked at; what it holds is its own
            logger.debug("%s cannot be searched: %s", item.where, type(error).__name__)
    return tuple(bindings)


def python_function(obj: Any) -> FunctionType | None:
    """The Python function at the bottom of a decorated kernel, or None."""
    for _ in range(16):
        if isinstance(obj, FunctionType):
            return obj
        obj = _static(obj, "fn", "func", "__wrapped__")
        if obj is None:
            return None
    return None


def _static(obj: Any, *names: str) -> Any:
    held = _attributes(obj)
    return next((held[name] for name in names if held.get(name) is not None), None)


def _attributes(obj: Any) -> Mapping[str, Any]:
    try:
        held = object.__getattribute__(obj, "__dict__")
    except (AttributeError, TypeError):
        return {}
    return held if isinstance(held, (dict, MappingProxyType)) else {}


def _autotuner_in(value: Any) -> tuple[Any, tuple[str, ...]] | None:
    # Only what holds something under `fn` is asked: on any other object the question could run code of its own.
    if isinstance(value, (FunctionType, type)) or inspect.getattr_static(value, "fn", None) is None:
        return None
    try:
        return find_autotuner(value)
    except Exception:  # an object whose attributes raise is no kernel
        return None


def _under(name: Any, packages: Collection[str]) -> bool:
    return isinstance(name, str) and any(name == package or name.startswith(package + ".") for package in packages)


def _inside(item: _Item, packages: Collection[str]) -> Iterator[_Item]:
    """What an object holds that may lead to a kernel."""
    value, where, steps, around = item.value, item.where, item.steps + 1, item.wrappers
    kind: str = type(value).__name__

    def held(inner: Any, suffix: str, wrapper: str = kind) -> _Item:
        return _Item(inner, where + suffix, steps, (*around, wrapper))

    if isinstance(value, FunctionType):
        yield from _inside_function(item)
        return
    if isinstance(value, type):
        if _under(value.__module__, packages):
            for name, inner in list(vars(value).items()):
                yield held(inner, f".{name}", "class")
        return
    if isinstance(value, dict):
        for key, inner in list(value.items()):
            yield held(inner, f"[{_shown(key)}]")
            yield held(key, ".keys()")
    elif isinstance(value, _CONTAINERS):
        for index, inner in enumerate(list(value)):
            yield held(inner, f"[{index}]" if isinstance(value, (list, tuple)) else "")
    elif isinstance(value, (functools.partial, functools.partialmethod)):
        yield held(value.func, ".func")
        for inner in (*value.args, *value.keywords.values()):
            yield held(inner, ".args")
    elif isinstance(value, (staticmethod, classmethod, MethodType)):
        yield held(value.__func__, "")
        yield held(getattr(value, "__self__", None), ".__self__")
    elif isinstance(value, property):
        for accessor in (value.fget, value.fset, value.fdel):
            yield held(accessor, "")
    attributes = _attributes(value)
    names = list(attributes) if _under(type(value).__module__, packages) else _WRAPPED
    for name in names:
        if name in attributes:
            yield held(attributes[name], f".{name}")


def _inside_function(item: _Item) -> Iterator[_Item]:
    function: FunctionType = item.value
    steps, around = item.steps + 1, (*item.wrappers, "function")
    for name, inner in list(vars(function).items()):
        yield _Item(inner, f"{item.where}.{name}", steps, around)
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
        try:
            inner = cell.cell_contents
        except ValueError:  # not assigned yet
            continue
        yield _Item(inner, f"{item.where}.<closure {name}>", steps, around)
    for inner in function.__defaults__ or ():
        yield _Item(inner, f"{item.where}.<default>", steps, around)
    for name, inner in (function.__kwdefaults__ or {}).items():
        yield _Item(inner, f"{item.where}.<default {name}>", steps, around)


def _shown(key: Any) -> str:
    # The exact type: any other key could run code of its own, and failing would hide the rest of its dict.
    return repr(key) if type(key) in (str, int, bool, type(None)) else type(key).__name__
