"""What the compiler saw of a launch, kept as JSON, and arguments that make it see the same again.

A table says which config a key gets. To compile it, the compiler needs more: the type of every argument, which pointers
and integers are multiples of 16, which values are 1, and every ``constexpr``. Triton's own *specialization data* is
that, for one compiled candidate.

**Form.** What is kept is one launch without its config: the arguments as the caller passed them, a tensor reduced to
dtype, alignment, shape and strides, and beside them the part of Triton's specialization that they give rise to, as its
own binder reports it (type and specialization of each parameter). Alternatives weighed:

* The text that Triton's compile hooks carry. They are called only where a kernel is compiled, so not for a candidate
  that the process has already; what they carry belongs to one candidate, names no value of an argument that is not a
  constant (kernels prune and compute heuristics from such values), and differs between versions.
* Signature, constants and attributes, to be compiled through ``ASTSource``. How they are made from a launch, and
  turned into the key of the compile cache, differs between versions, and heuristics below an autotuner depend on the
  config. Stand-in arguments through ``JITFunction.run(warmup=True)`` take the very path of a launch, whatever the
  version, so the entry that they leave in the cache is the one that a launch looks up.

Triton's part is kept for two uses: it tells whether two launches differ for the compiler, and it proves, where the
version is the same, that the stand-ins are seen as the tensors were.

**Not kept**: arguments that stand for more than a tensor or a value (tensor descriptors, objects of unknown type). A
launch that has one is kept as the reason why it cannot be compiled ahead.
"""

from __future__ import annotations

import hashlib
import importlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .spec import Json, canonical_json, dtype_name, encode_value

__all__ = [
    "TensorStandIn",
    "heuristic_values",
    "identity",
    "jit_function",
    "parameters",
    "read_launch",
    "stand_in_arguments",
    "unsupported",
]

VERSION = 1
"""Version of the JSON form. It changes when an older reader could not use a newer form."""

_LAUNCH_ONLY = ("grid", "warmup")
_TWO_GIB = 2**31


class _CannotBeKept(Exception):
    pass


def jit_function(autotuner: Any) -> Any | None:
    """The compiled kernel under an autotuner; None where there is none, as under the interpreter."""
    layer = autotuner.fn
    for _ in range(16):
        if layer is None or hasattr(layer, "create_binder"):
            return layer
        layer = getattr(layer, "fn", None)
    return None


def parameters(jit: Any, binder: Callable[..., Any], named: Mapping[str, Any]) -> Json:
    """What Triton's binder makes of some of a kernel's arguments: ``[name, type, specialization]`` of each.

    The parameters that are not among ``named`` (the config's, and those that heuristics add) are left out.
    """
    required = [name for name, parameter in jit.signature.parameters.items() if parameter.default is parameter.empty]
    bound = binder(**{name: None for name in required if name not in named}, **named)
    pairs: dict[str, tuple[Any, Any]]
    if len(bound) == 3:
        pairs = dict(zip((param.name for param in jit.params), bound[1], strict=False))
    else:
        # Triton 3.2: types of all that is no constexpr, then the specialization of what may be specialised.
        typed = [param.name for param in jit.params if not param.is_constexpr]
        specialised = [param.name for param in jit.params if not (param.is_constexpr or param.do_not_specialize)]
        special = dict(zip(specialised, bound[1][len(typed) :], strict=True))
        pairs = {param.name: ("constexpr", bound[0][param.name]) for param in jit.params if param.is_constexpr}
        pairs |= {name: (kind, special.get(name)) for name, kind in zip(typed, bound[1], strict=False)}
    return [
        [param.name, _as_json(pairs[param.name][0]), _as_json(pairs[param.name][1])]
        for param in jit.params
        if param.name in named
    ]


def heuristic_values(autotuner: Any, config: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Json:
    """What heuristics below an autotuner add to a launch with ``config``: ``[name, value]`` of each, in their order."""
    found: list[Json] = []
    layer = autotuner.fn
    seen = {**dict(zip(autotuner.arg_names, args, strict=False)), **kwargs, **config.all_kwargs()}
    while layer is not None and not hasattr(layer, "create_binder"):
        for name, function in (getattr(layer, "values", None) or {}).items():
            seen[name] = function(seen)
            found.append([name, _as_json(seen[name])])
        layer = getattr(layer, "fn", None)
    return found


def read_launch(
    autotuner: Any,
    jit: Any,
    binder: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    triton: str,
) -> Json:
    """A launch of an autotuner in the form that journals keep; see the module's docstring.

    Args:
        autotuner: the autotuner.
        jit, binder: the kernel and its binder on the device of the launch.
        args, kwargs: of the launch, as the autotuner got them.
        triton: the running version.
    """
    arg_names = autotuner.arg_names
    named = dict(zip(arg_names, args, strict=False))
    named.update((name, value) for name, value in kwargs.items() if name in arg_names)
    options = {name: value for name, value in kwargs.items() if name not in arg_names and name not in _LAUNCH_ONLY}
    data: dict[str, Json] = {"version": VERSION, "triton": triton, "parameters": parameters(jit, binder, named)}
    if jit is not autotuner.fn:
        # Heuristics turn values, which are specialised on only in part, into constants: launches differ by those too.
        values = [heuristic_values(autotuner, config, args, kwargs) for config in autotuner.configs]
        data["heuristics"] = hashlib.sha256(canonical_json(values).encode()).hexdigest()[:16]
    try:
        # A list of pairs: what comes first was passed by position, and pruning functions see the difference.
        data["arguments"] = [[name, _described(name, value)] for name, value in named.items()]
        data["positional"] = min(len(args), len(arg_names))
        data["options"] = [[name, _described(name, value)] for name, value in sorted(options.items())]
    except _CannotBeKept as error:
        data.pop("arguments", None)
        data["unsupported"] = str(error)
    return data


def identity(data: Json) -> str:
    """Text that is equal for launches which are the same to the compiler, but for their config."""
    parts = ("triton", "parameters", "heuristics", "options", "unsupported")
    return canonical_json([data.get(part) for part in parts])


def unsupported(data: Json) -> str | None:
    """Why a launch that a journal holds cannot be compiled ahead; None where it can."""
    if not isinstance(data, dict) or data.get("version") != VERSION:
        found = data.get("version") if isinstance(data, dict) else data
        return f"its specialization has a form that is not known here: expected version {VERSION}, found {found!r}"
    reason = data.get("unsupported")
    if reason is not None:
        return str(reason)
    missing = [name for name in ("parameters", "arguments", "positional", "options") if name not in data]
    return f"its specialization lacks {', '.join(missing)}" if missing else None


def stand_in_arguments(data: Json) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments that the compiler sees as it saw those of a launch. Imports torch."""
    named = [(name, _restored(value)) for name, value in data["arguments"]]
    count = data["positional"]
    kwargs = dict(named[count:])
    kwargs.update((name, _restored(value)) for name, value in data["options"])
    return tuple(value for _, value in named[:count]), kwargs


class TensorStandIn:
    """Has what Triton reads of a tensor that it does not launch with, and the shape that heuristics may read."""

    def __init__(self, dtype: Any, *, aligned: bool, small: bool, shape: Sequence[int], strides: Sequence[int]) -> None:
        self.dtype = dtype
        self.shape = tuple(shape)
        self._strides = tuple(strides)
        self._address = 0 if aligned else 1
        self._small = small

    @property
    def ndim(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    def data_ptr(self) -> int:
        """An address of the tensor's alignment."""
        return self._address

    def ptr_range(self) -> int:
        """A size that is within AMD's limit of 2 GiB if the tensor's storage was."""
        return 0 if self._small else _TWO_GIB

    def size(self, dim: int | None = None) -> Any:
        """As a tensor's."""
        return self.shape if dim is None else self.shape[dim]

    def stride(self, dim: int | None = None) -> Any:
        """As a tensor's."""
        return self._strides if dim is None else self._strides[dim]

    def numel(self) -> int:
        """As a tensor's."""
        count = 1
        for size in self.shape:
            count *= size
        return count

    def element_size(self) -> int:
        """As a tensor's."""
        return int(self.dtype.itemsize)


# --- values to JSON and back ------------------------------------------------------------------------------------------


def _as_json(value: Any) -> Json:
    return json.loads(encode_value(value))


def _described(name: str, value: Any) -> Json:
    if hasattr(value, "data_ptr") and hasattr(value, "dtype"):
        storage = getattr(value, "untyped_storage", None)
        shape = getattr(value, "shape", ())
        stride = getattr(value, "stride", None)
        return {
            "pointer": {
                "dtype": dtype_name(value.dtype),
                "aligned": value.data_ptr() % 16 == 0,
                "small": storage is None or storage().size() < _TWO_GIB,
                "shape": [int(size) for size in shape],
                "strides": [int(step) for step in stride()] if callable(stride) else [],
            }
        }
    kind = type(value)
    if kind is tuple or kind is list:
        return {kind.__name__: [_described(name, item) for item in value]}
    data = _as_json(value)
    if isinstance(data, dict) and next(iter(data)) not in _RESTORED:
        raise _CannotBeKept(
            f"argument {name!r} is a {kind.__module__}.{kind.__qualname__}, which a journal cannot hold"
        )
    return data


def _restored(data: Json) -> Any:
    if not isinstance(data, dict):
        return data
    ((form, content),) = data.items()
    return _RESTORED[form](content)


def _pointer(content: Json) -> TensorStandIn:
    content = dict(content)
    return TensorStandIn(_dtype(content.pop("dtype")), **content)


def _dtype(name: str) -> Any:
    if name.startswith("triton."):
        language = importlib.import_module("triton.language")
        found = [
            item for item in vars(language).values() if type(item).__name__ == "dtype" and f"triton.{item}" == name
        ]
        if not found:
            raise ValueError(f"the running Triton has no dtype {name.removeprefix('triton.')}")
        return found[0]
    return getattr(importlib.import_module("torch"), name)


def _constexpr(content: Json) -> Any:
    return importlib.import_module("triton.language").constexpr(_restored(content))


def _named_object(name: str) -> Any:
    """An object by its module and qualified name: an enum's member, or a function that a kernel is given."""
    parts = name.split(".")
    for count in range(len(parts) - 1, 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        for part in parts[count:]:
            found = getattr(found, part)
        return found
    raise ValueError(f"{name} cannot be imported")


_RESTORED: dict[str, Callable[[Any], Any]] = {
    "pointer": _pointer,
    "float": float,
    "tuple": lambda content: tuple(_restored(item) for item in content),
    "list": lambda content: [_restored(item) for item in content],
    "dtype": _dtype,
    "constexpr": _constexpr,
    "enum": _named_object,
    "function": _named_object,
}
