"""What a tensor's digest is made of: its description and its sums, whatever it consists of; see :mod:`digest`.

A plain tensor is one sum. What is made of several tensors (sparse, nested, quantized, a subclass that wraps others) is
the sum of theirs, each times an odd number of its own, and its description names each of them. A shard of a ``DTensor``
is summed at its places in the whole tensor.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuning.bitexact.digest_sums import sums

__all__ = ["Measured", "as_tensor", "is_plain", "measure"]

_Runs = list[tuple[int, int]]


@dataclass
class Measured:
    """One tensor's description, and its sums on its device.

    Attributes:
        dtype: torch's name of the dtype.
        shape: sizes; those of the whole tensor where it is sharded.
        strides: in elements; 0 for dimensions of at most one element.
        layout: torch's name of the layout.
        part: which shard it is, or what it is made of.
        total: two 64-bit integers; those of the local shard alone where ``groups`` are given.
        groups: the process groups over which the sums have to be added up, the same on all ranks of a mesh.
        alone: where ``groups`` are given, measures the local shard as one of its own.
        fits: where ``groups`` are given, whether this shard has the size that its placements say.
    """

    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    layout: str
    part: str
    total: Any
    groups: tuple[Any, ...] = ()
    alone: Callable[[], Measured] | None = None
    fits: bool = True


def as_tensor(value: Any) -> Any:
    """A tensor over the same bits, or None where ``value`` has no array of them."""
    import torch

    if isinstance(value, torch.Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            value = value.detach()
            # A subclass that only adds attributes is its bits.
            plain = type(value) is torch.Tensor or _dispatches(value) or value.layout != torch.strided
            return value if plain else value.as_subclass(torch.Tensor)
    if type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "__array__"):
        import numpy

        array = numpy.asarray(value)
        if array.dtype.kind in "OSUVMm" or not array.dtype.isnative:
            raise TypeError(f"cannot digest a numpy array of dtype {array.dtype}: expected native numbers")
        return torch.from_numpy(array.copy() if not array.flags.writeable or min((*array.strides, 0)) < 0 else array)
    return None


def is_plain(tensor: Any) -> bool:
    """Whether a tensor is nothing but one dense array of elements."""
    import torch

    return not (_dispatches(tensor) or tensor.is_nested or tensor.is_quantized) and tensor.layout == torch.strided


def measure(tensor: Any, *, gather: bool) -> Measured:
    """Describe a tensor and sum it up where it is.

    Args:
        tensor: what :func:`as_tensor` gave.
        gather: measure a ``DTensor`` as a whole. Off: its local shard.

    Raises:
        TypeError: it has no bytes, or is of a kind whose bytes are not known.
    """
    import torch

    if tensor.device.type == "meta":
        raise TypeError("cannot digest a tensor on the meta device: it has no bytes")
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        raise TypeError("cannot digest a tensor inside a transform of torch.func: it stands for others")
    if _is_sharded(tensor):
        return _measure_sharded(tensor, gather)
    if is_plain(tensor):
        return _described(tensor, "", sums(tensor, (0,) * tensor.dim(), tuple(tensor.shape)))
    kind, parts = _parts(tensor)
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    told = [kind] if kind else []
    for number, (name, part) in enumerate(parts):
        found = measure(as_tensor(part), gather=False)
        total += (2 * number + 1) * found.total.to(total.device)
        lead = f"{name}: " if name else ""
        told.append(f"{lead}{found.dtype} {list(found.shape)}" + (f" ({found.part})" if found.part else ""))
    return _described(tensor, ", ".join(told), total)


def _dispatches(tensor: Any) -> bool:
    """Whether its type says itself what ops on it do, so that its own memory need not hold its elements."""
    import torch

    return bool(type(tensor).__torch_dispatch__ != torch.Tensor.__torch_dispatch__)


def _described(tensor: Any, part: str, total: Any) -> Measured:
    import torch

    strides: tuple[int, ...] = ()
    if tensor.layout == torch.strided and not tensor.is_nested:
        strides = tuple(0 if size <= 1 else step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    shape = () if tensor.is_nested else tuple(tensor.shape)
    dtype, layout = (str(name).removeprefix("torch.") for name in (tensor.dtype, tensor.layout))
    return Measured(dtype, shape, strides, "nested" if tensor.is_nested else layout, part, total)


def _parts(tensor: Any) -> tuple[str, list[tuple[str, Any]]]:
    """What a tensor is made of, by name where a name tells them apart, and a text for what is no tensor of it."""
    import torch

    if tensor.is_nested and tensor.layout == torch.jagged:
        if tensor.lengths() is None:
            kind, values = f"ragged at {tensor._ragged_idx}", [("", tensor.values())]
        else:
            # With lengths there are elements between the rows that belong to none of them.
            kind, values = f"ragged at {tensor._ragged_idx} with holes", [("", row) for row in tensor.unbind()]
            values.append(("lengths", tensor.lengths()))
        return kind, [*values, ("", tensor.offsets())]
    if _dispatches(tensor):
        return _wrapped_parts(tensor)
    if tensor.is_nested:
        return "", [("", part) for part in tensor.unbind()]
    if tensor.is_quantized:
        if tensor.qscheme() == torch.per_tensor_affine:
            kind = f"scale {tensor.q_scale().hex()}, zero point {tensor.q_zero_point()}"
            return kind, [("", tensor.int_repr())]
        scales, zeros = tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()
        kind = f"by channel {tensor.q_per_channel_axis()}"
        return kind, [("", tensor.int_repr()), ("scales", scales), ("zero points", zeros)]
    if tensor.layout == torch.sparse_coo:
        # The public accessors refuse a tensor that is not coalesced.
        return "", [("", tensor._indices()), ("", tensor._values())]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return "", [("", tensor.crow_indices()), ("", tensor.col_indices()), ("", tensor.values())]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return "", [("", tensor.ccol_indices()), ("", tensor.row_indices()), ("", tensor.values())]
    raise TypeError(f"cannot digest a tensor of layout {tensor.layout}: expected strided, sparse or nested")


def _wrapped_parts(tensor: Any) -> tuple[str, list[tuple[str, Any]]]:
    kind = f"{type(tensor).__module__}.{type(tensor).__qualname__}"
    if not hasattr(tensor, "__tensor_flatten__"):
        raise TypeError(f"cannot digest a {kind}: expected a subclass that says by __tensor_flatten__ what it wraps")
    names, context = tensor.__tensor_flatten__()
    text = _context(context, kind)
    return kind + ("" if text == "None" else f" {text}"), [(str(name), getattr(tensor, name)) for name in names]


def _context(value: Any, kind: str) -> str:
    """What a subclass says of itself besides its tensors, as a text that is the same in each process."""
    import torch

    if isinstance(value, enum.Enum):
        return str(value)
    if isinstance(value, (type(None), bool, int, float, complex, str, bytes)):
        return repr(value)
    if isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format)):
        return str(value)
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{_context(k, kind)}: {_context(v, kind)}" for k, v in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_context(item, kind) for item in value) + "]"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (f"{f.name}={_context(getattr(value, f.name), kind)}" for f in dataclasses.fields(value))
        return f"{type(value).__qualname__}({', '.join(fields)})"
    if hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    expected = "numbers, texts, dtypes, types and functions, nested"
    raise TypeError(f"cannot digest a {kind}: its context: expected {expected}, found {type(value).__name__}")


def _is_sharded(tensor: Any) -> bool:
    import torch

    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def _measure_sharded(tensor: Any, gather: bool) -> Measured:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    local, mesh, placements = tensor.to_local(), tensor.device_mesh, tensor.placements
    if isinstance(local, AsyncCollectiveTensor):
        local = local.wait()
    local = as_tensor(local)

    def alone(at: str = "") -> Measured:
        found = measure(local, gather=False)
        at = at or str([0] * local.dim())
        text = f"shard {list(found.shape)} at {at} as {' '.join(map(str, placements))}"
        return _described(tensor, f"{text} ({found.part})" if found.part else text, found.total)

    runs, coordinate = None, mesh.get_coordinate()
    if coordinate is not None and is_plain(local):
        runs = _places(tensor.shape, placements, [(mesh.size(dim), at) for dim, at in enumerate(coordinate)])
    if runs is None:
        return alone()
    fits = tuple(local.shape) == tuple(sum(length for _, length in dim) for dim in runs)
    if gather:
        # On this way all ranks add up, whether their own shards fit or not: which way to go follows from what is the
        # same on all of them, and that some shard does not fit is told by the sum.
        total = _sums_at(local, runs, tensor.shape) if fits else measure(local, gather=False).total
        groups = tuple(mesh.get_group(dim) for dim, p in enumerate(placements) if not p.is_replicate())
        return dataclasses.replace(_described(tensor, "", total), groups=groups, alone=alone, fits=fits)
    if not fits:
        return alone()
    told = [dim[0][0] if len(dim) == 1 else [start for start, _ in dim] for dim in runs]
    return dataclasses.replace(alone(str(told)), total=_sums_at(local, runs, tensor.shape))


def _sums_at(local: Any, runs: Sequence[_Runs], shape: Sequence[int]) -> Any:
    """The sums of a shard whose places in each dimension are these runs of ``(start, length)``."""
    import torch

    total = torch.zeros(2, dtype=torch.int64, device=local.device)
    within = [list(itertools.accumulate((length for _, length in dim), initial=0)) for dim in runs]
    for numbers in itertools.product(*(range(len(dim)) for dim in runs)):
        piece, offsets = local, []
        for dim, number in enumerate(numbers):
            start, length = runs[dim][number]
            piece = piece.narrow(dim, within[dim][number], length)
            offsets.append(start)
        total += sums(piece, tuple(offsets), tuple(shape))
    return total


def _places(
    shape: Sequence[int], placements: Sequence[Any], coordinate: Sequence[tuple[int, int]]
) -> list[_Runs] | None:
    """For each dimension the places of a shard; None where the placements do not tell them.

    Args:
        shape: of the whole tensor.
        placements: by dimension of the mesh.
        coordinate: by dimension of the mesh, its size and this rank's place in it.
    """
    found: list[_Runs] = [[(0, int(size))] for size in shape]
    for placement, (count, at) in zip(placements, coordinate, strict=True):
        if placement.is_replicate():
            continue
        factor = getattr(placement, "split_factor", None)
        if not (placement.is_shard() or factor is not None):
            return None
        pieces = _chunks(found[placement.dim], int(factor) if factor is not None else 1)
        found[placement.dim] = [run for piece in pieces for run in _chunks(piece, count)[at]] or [(0, 0)]
    return found


def _chunks(runs: _Runs, count: int) -> list[_Runs]:
    """As ``torch.chunk`` splits: pieces of one size, then a smaller one, then empty ones."""
    whole = sum(length for _, length in runs)
    size = -(-whole // count)
    return [_cut(runs, min(number * size, whole), min((number + 1) * size, whole)) for number in range(count)]


def _cut(runs: _Runs, begin: int, end: int) -> _Runs:
    found: _Runs = []
    at = 0
    for start, length in runs:
        low, high = max(begin, at), min(end, at + length)
        if low < high:
            here = start + low - at
            if found and sum(found[-1]) == here:
                found[-1] = (found[-1][0], found[-1][1] + high - low)
            else:
                found.append((here, high - low))
        at += length
    return found
