"""A launch's arguments where results are compared: copies to replay it on, and the form that tells launches apart.

**Copies.** A replay must not be felt by the run, so it works on copies. Tensors that share memory share it in the
copies too, each keeps its offset, strides and alignment (to 256 bytes), and only the span that the arguments reach is
copied: a parameter may be a view into a buffer of many gigabytes.

**Form.** Whether two configs compute the same bits may depend on more than the key: on sizes that are not part of it,
which set how often a loop runs, and on all that the compiler sees (alignment, values equal to 1). So evidence is bound
to the *form* of a launch: dtype, shape, strides and alignment of each tensor, which of them begin at one address, every
integer, every ``constexpr``, every option. What tensors hold, and the value of a float that is no ``constexpr``, is
data and no part of it. A grid that is a function is taken to be one of the arguments and the config.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Mapping
from typing import Any

from ._launch_key import KeyReader
from .errors import TuningError
from .spec import encode_value

__all__ = ["CannotBeCopied", "Copies", "form_name", "launch_form", "same_bytes"]

_ALIGNMENT = 256
_PLAIN = (int, bool, str, type(None))


class CannotBeCopied(TuningError):
    """An argument holds memory that is not known how to copy, so the launch cannot be replayed."""


def launch_form(reader: KeyReader, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    """The form of a launch, to be looked up in a dict; see the module's docstring."""
    named = dict(zip(reader.arg_names, args, strict=False))
    named.update(kwargs)
    parts: list[tuple[Any, ...]] = []
    addresses: dict[int, str] = {}
    for name in sorted(named):
        value = named[name]
        kind = type(value)
        if hasattr(value, "data_ptr"):
            shape, stride = getattr(value, "shape", ()), getattr(value, "stride", tuple)
            address = value.data_ptr()
            first = addresses.setdefault(address, name)
            parts.append((name, value.dtype, tuple(shape), tuple(stride()), address % 16 == 0, first))
        elif kind in _PLAIN:
            parts.append((name, kind.__name__, value))
        elif kind is float and name not in reader.constexprs:
            parts.append((name, "float"))
        elif name == "grid" and callable(value):
            continue
        else:
            parts.append((name, encode_value(value)))
    return tuple(parts)


def form_name(form: tuple[Any, ...]) -> str:
    """Sixteen hexadecimal digits that stand for a form, the same in every process."""
    return hashlib.blake2b(repr(form).encode(), digest_size=8).hexdigest()


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _holds_memory(value: object) -> bool:
    if isinstance(value, (tuple, list)):
        return any(_is_tensor(item) or _holds_memory(item) for item in value)
    return hasattr(value, "data_ptr") or _is_tensor(getattr(value, "base", None))


class Copies:
    """Makes copies of one launch's arguments.

    Args:
        arg_names: the kernel's parameters.
        args, kwargs: of the launch.

    Attributes:
        tensors: the tensors by name, in the order of the call.

    Raises:
        CannotBeCopied: an argument holds memory other than as a plain strided tensor.
    """

    def __init__(self, arg_names: tuple[str, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._args = args
        self._kwargs = dict(kwargs)
        self._positions = dict(zip(arg_names, range(len(args)), strict=False))
        named = {**dict(zip(arg_names, args, strict=False)), **kwargs}
        self.tensors: dict[str, Any] = {}
        for name, value in named.items():
            if _is_tensor(value) and type(value).__module__.partition(".")[0] == "torch" and _is_strided(value):
                self.tensors[name] = value.detach()
            elif _holds_memory(value):
                raise CannotBeCopied(
                    f"argument {name!r} is a {type(value).__module__}.{type(value).__qualname__}: expected a plain "
                    "strided tensor wherever memory is passed"
                )
        self._spans = _spans(self.tensors)

    def copy(self) -> tuple[tuple[Any, ...], dict[str, Any], dict[str, Any]]:
        """Arguments, keyword arguments and tensors by name, all of memory of their own."""
        import torch

        tensors: dict[str, Any] = {}
        for names, storage, device, low, high in self._spans:
            source = torch.empty(0, dtype=torch.uint8, device=device).set_(storage, low, (high - low,), (1,))
            offset = (storage.data_ptr() + low) % _ALIGNMENT
            memory = torch.empty(high - low + 2 * _ALIGNMENT, dtype=torch.uint8, device=device)
            start = (offset - memory.data_ptr()) % _ALIGNMENT
            memory[start : start + high - low].copy_(source)
            for name in names:
                original = self.tensors[name]
                at = start + original.storage_offset() * original.element_size() - low
                view = torch.empty(0, dtype=original.dtype, device=device)
                place, strides = at // original.element_size(), original.stride()
                tensors[name] = view.set_(memory.untyped_storage(), place, original.shape, strides)
        args, kwargs = list(self._args), dict(self._kwargs)
        for name, tensor in tensors.items():
            if name in self._positions and name not in kwargs:
                args[self._positions[name]] = tensor
            else:
                kwargs[name] = tensor
        return tuple(args), kwargs, {name: tensors[name] for name in self.tensors}


def _is_strided(tensor: Any) -> bool:
    return str(tensor.layout) == "torch.strided" and tensor.device.type != "meta"


def _spans(tensors: Mapping[str, Any]) -> list[tuple[list[str], Any, Any, int, int]]:
    """Tensors by the storage that they share, with the first byte that they reach of it and the one after the last."""
    spans: dict[tuple[Any, int], tuple[list[str], Any, Any, int, int]] = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        low = tensor.storage_offset() * tensor.element_size()
        last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        high = low + (last + 1) * tensor.element_size() if tensor.numel() else low
        known = spans.get((tensor.device, storage.data_ptr()))
        if known is not None and tensor.numel():
            names, _, _, first, end = known
            low, high = min(low, first), max(high, end)
            names = [*names, name]
        else:
            names = [name]
        mark = (tensor.device, storage.data_ptr() if tensor.numel() else -len(spans) - 1)
        spans[mark] = (names, storage, tensor.device, low, high)
    return list(spans.values())


def _as_bytes(tensor: Any) -> Any:
    import torch

    return tensor.contiguous().view(torch.uint8) if tensor.ndim else tensor.reshape(1).view(torch.uint8)


def same_bytes(left: Any, right: Any) -> bool:
    """Whether two tensors hold the same bits in every element: 0.0 and -0.0 differ, and so do payloads of NaN."""
    import torch

    if left.dtype != right.dtype or left.shape != right.shape:
        return False
    return bool(torch.equal(_as_bytes(left), _as_bytes(right)))
