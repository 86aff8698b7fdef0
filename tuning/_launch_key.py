"""Read a launch's key from its arguments: once in full (:meth:`KeyReader.typed`), then fast (:meth:`KeyReader.fast`).

The full form is a :class:`~tuning.spec.Key`: text, typed, comparable between ranks. It is far too slow to build on
every launch, so later launches use a *raw* key: a flat tuple of values, their classes and dtypes, which is only ever
looked up in a dict. The raw key must never be coarser than the typed key, or one key would get another's config:

* ``True == 1 == 1.0`` in Python, so each value stands beside its class;
* values whose equality is looser than their encoding (floats: ``0.0 == -0.0``, NaN; tuples: ``(1,) == (True,)``), that
  cannot be hashed (lists), or that would keep an argument alive (tensors) are replaced by their encoded text. Which
  names hold such values is learnt from the launches themselves: the common case pays nothing for the rare one.

The tuple is built by a function generated for the number of positional arguments. Alternatives measured on a
12-argument kernel: a loop over the argument names costs several times as much, and a cache per call site cannot be had
without the caller's help.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .spec import Key, dtype_name, encode_value

__all__ = ["KeyReader", "constexpr_names"]

RawKey = tuple[Any, ...]
Extractor = Callable[[tuple[Any, ...], Mapping[str, Any]], RawKey]

_PLAIN = (type(None), bool, int, str)


class _Missing:
    """Stands for a key argument that the caller did not pass: Triton leaves it out of its key too."""


_MISSING = _Missing()


def _is_plain(value: object) -> bool:
    kind = type(value)
    return kind in _PLAIN or kind is _Missing or (kind.__module__ == "torch" and kind.__name__ == "dtype")


def _token(value: object) -> object:
    return (value, type(value)) if _is_plain(value) else encode_value(value)


def _is_torch_dtype(value: object) -> bool:
    kind = type(value)
    return kind.__module__ == "torch" and kind.__name__ == "dtype"


def _dtype_of(value: object) -> object:
    return value if _is_torch_dtype(value) else getattr(value, "dtype", None)


def constexpr_names(function: Callable[..., Any]) -> frozenset[str]:
    """Names of the parameters that a kernel's Python function annotates as ``constexpr``, under whatever name.

    An annotation that is text, as all are under ``from __future__ import annotations``, is looked up where the kernel
    is defined: ``C`` may stand for ``constexpr`` there.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return frozenset()
    return frozenset(each.name for each in parameters if _is_constexpr(each.annotation, function))


def _is_constexpr(annotation: object, function: Callable[..., Any]) -> bool:
    if isinstance(annotation, str):
        if "constexpr" in annotation:
            return True
        known = annotation.strip().split(".")
        namespace = inspect.getclosurevars(function).nonlocals if inspect.isfunction(function) else {}
        found = {**getattr(function, "__globals__", {}), **namespace}.get(known[0])
        for name in known[1:]:
            found = getattr(found, name, None)
        annotation = found
    return "constexpr" in getattr(annotation, "__name__", "")


class KeyReader:
    """Builds keys for one autotuner.

    Args:
        arg_names: parameter names of the kernel, in order.
        key_names: the autotuner's declared key. A name that is no parameter is ignored, as Triton does up to 3.8.
        constexprs: parameters that cannot hold tensors.
    """

    def __init__(self, arg_names: Sequence[str], key_names: Sequence[str], constexprs: frozenset[str]) -> None:
        self.arg_names = tuple(arg_names)
        self.key_names = tuple(dict.fromkeys(name for name in key_names if name in self.arg_names))
        self.constexprs = constexprs
        self._dtype_names = tuple(name for name in self.arg_names if name not in constexprs)
        self._encoded: frozenset[str] = frozenset()
        self._held: frozenset[str] = frozenset()  # parameters that were given a dtype itself
        self.fast: dict[int, Extractor] = {}

    def named(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The kernel's arguments by name, positional ones first, then keywords as the caller ordered them."""
        named = dict(zip(self.arg_names, args, strict=False))
        named.update((name, value) for name, value in kwargs.items() if name in self.arg_names)
        return named

    def typed(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Key:
        """The key of a launch; a torch dtype in place of a tensor (as ``warmup`` accepts) counts as one."""
        named = self.named(args, kwargs)
        dtypes: dict[str, str] = {}
        for name, value in named.items():
            if name in self.constexprs:
                continue
            if hasattr(value, "dtype"):
                dtypes[name] = dtype_name(value.dtype)
            elif _is_torch_dtype(value):
                dtypes[name] = dtype_name(value)
        return Key(
            tuple((name, encode_value(named[name])) for name in self.key_names if name in named),
            tuple((name, dtypes[name]) for name in self.arg_names if name in dtypes),
            tuple(dtypes),
        )

    def raw(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> RawKey:
        """The raw key of a launch. Called off the hot path: learns which names need encoding and generates code.

        Learning changes the shape of raw keys, so the caller must not keep raw keys from before a change:
        compare :attr:`fast` by identity.
        """
        named = self.named(args, kwargs)
        awkward = {name for name in self.key_names if name in named and not _is_plain(named[name])}
        held = {name for name in self._dtype_names if _is_torch_dtype(named.get(name))}
        if not awkward <= self._encoded or not held <= self._held:
            self._encoded |= awkward
            self._held |= held
            self.fast = {}
        count = len(args)
        extractor = self.fast.get(count)
        if extractor is None:
            extractor = self.fast[count] = self._generate(count)
        return extractor(args, kwargs)

    def _generate(self, count: int) -> Extractor:
        positional = {name: f"a{index}" for index, name in enumerate(self.arg_names[:count])}

        def read(name: str, default: str) -> str:
            return positional.get(name) or f"kw.get({name!r}{default})"

        lines: list[str] = []
        parts: list[str] = []
        for index, name in enumerate(self.key_names):
            source = read(name, ", MISSING")
            if name in self._encoded:
                parts.append(f"token({source})")
                continue
            if name not in positional:
                lines.append(f"    v{index} = {source}")
                source = f"v{index}"
            parts += [source, f"{source}.__class__"]
        for name in self._dtype_names:
            value = read(name, "")
            parts.append(f"held({value})" if name in self._held else f"dtype({value}, 'dtype', None)")
        unpack = ", ".join([*positional.values(), *(["*_"] if count > len(self.arg_names) else [])])
        body = [
            "def extract(args, kw):",
            *([f"    ({unpack},) = args"] if unpack else []),
            *lines,
            f"    return ({''.join(part + ', ' for part in parts)})" if parts else "    return ()",
        ]
        namespace: dict[str, Any] = {"MISSING": _MISSING, "token": _token, "dtype": getattr, "held": _dtype_of}
        exec("\n".join(body), namespace)
        extractor: Extractor = namespace["extract"]
        return extractor

    def unkeyed(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, str]:
        """Encoded values of the ``constexpr`` arguments that are not part of the key."""
        named = self.named(args, kwargs)
        return {
            name: encode_value(value)
            for name, value in named.items()
            if name in self.constexprs and name not in self.key_names
        }

    def specialization(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """What the compiler may tell launches of one key apart by: alignment, width, values equal to 1, its options.

        Deliberately at least as fine as Triton's own rules on every supported version, which differ: too fine means
        one needless retry of a config that cannot be launched, too coarse would launch it again.
        """
        parts: list[Any] = []
        for name, value in self.named(args, kwargs).items():
            if _is_torch_dtype(value):
                # Stands for a tensor where a kernel is warmed up; Triton takes it for an aligned one.
                parts.append((name, str(value), True))
            elif hasattr(value, "data_ptr"):
                parts.append((name, str(value.dtype), value.data_ptr() % 16 == 0))
            elif type(value) is int and name not in self.constexprs:
                width = 32 if -(2**31) <= value < 2**31 else 64 if value < 2**63 else 65
                parts.append((name, value == 1, value % 16 == 0, width))
            elif type(value) is float and name not in self.constexprs:
                parts.append((name, "float"))
            else:
                parts.append((name, encode_value(value)))
        for name, value in kwargs.items():
            if name not in self.arg_names and name not in ("grid", "warmup"):
                parts.append((name, encode_value(value)))  # an option of the compiler, such as num_warps
        return tuple(sorted(parts))
