"""Digests of tensors by their bytes, computed where the tensors are.

A digest stands for dtype, layout, shape, strides and every bit of every element: ``0.0`` and ``-0.0`` differ, and so do
two NaNs with different payloads. Only 16 bytes of each tensor travel to the host, and all of them in one copy.

**Function.** The bits of element ``i`` (its place in row-major order, whatever the strides) become an integer, ``i``
times an odd constant is added, and the sum goes through the finalizer of splitmix64 (Steele, Lea and Flood, "Fast
splittable pseudorandom number generators", OOPSLA 2014), a bijection of 64 bits; one more round gives a second word.
Both are summed over the tensor modulo 2**64. Integer addition is associative and commutative, so the digest depends on
no order of reduction, no chunk size and no device, and torch's integer kernels are exact.

**Collisions.** Tensors that differ in one element never share a digest: each step up to the sum is a bijection of that
element's bits. Tensors that differ in more elements collide, if the mixing is taken for random, with probability
2**-128 (2**-64 for each word). That is no guarantee against someone who looks for a collision: the function is not
cryptographic. A set of tensors is summed up by SHA-256 over the digests' text.

**Weighed and left.** SHA-256 of the bytes: a copy of each tensor to the host. CRC or a polynomial in row-major order: a
scan where this is a sum. XOR of the mixed words: equal changes in pairs could cancel, and torch has no such reduction.
A weighted sum without mixing: a change in the upper bits of a word, such as two signs, can cancel with an even weight.
A kernel of our own in Triton: faster by the passes over memory that it would save, but it is the thing under test here.

**Sharding.** The sum runs over places in the whole tensor. So the shards of a ``DTensor`` are digested where they
lie and added up: the digest is that of the full tensor under every layout across ranks. A tensor that is pending a
reduction (``Partial``), and every ``DTensor`` if ``gather`` is off, is digested shard by shard, with the shard's place
as part.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tuning.bitexact.digest_sums import sums
from tuning.spec import Json

__all__ = [
    "Digest",
    "Digests",
    "digest_gradients",
    "digest_module",
    "digest_optimizer",
    "digest_tensor",
    "digest_value",
    "flatten",
]


@dataclass(frozen=True)
class Digest:
    """The digest of one tensor, or of one plain value.

    Attributes:
        dtype: torch's name of the dtype, or the Python type of a plain value.
        shape: sizes; those of the whole tensor where it is sharded.
        strides: in elements; 0 for dimensions of at most one element, where they mean nothing.
        layout: torch's name of the layout, such as ``strided``; empty for a plain value.
        content: the two words in hexadecimal, or the value itself, its bits if it is a float.
        part: which shard this is; empty for a whole tensor.
    """

    dtype: str
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    layout: str = ""
    content: str = ""
    part: str = ""

    def differing(self, other: Digest) -> tuple[str, ...]:
        """Names of the fields that differ."""
        return tuple(f.name for f in dataclasses.fields(self) if getattr(self, f.name) != getattr(other, f.name))

    def to_json(self) -> Json:
        """JSON form, for :meth:`from_json`."""
        return {
            "dtype": self.dtype,
            "shape": list(self.shape),
            "strides": list(self.strides),
            "layout": self.layout,
            "content": self.content,
            "part": self.part,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Digest:
        """From its JSON form."""
        return cls(
            dtype=data["dtype"],
            shape=tuple(data["shape"]),
            strides=tuple(data["strides"]),
            layout=data["layout"],
            content=data["content"],
            part=data["part"],
        )

    def __str__(self) -> str:
        part = f" {self.part}" if self.part else ""
        return f"{self.dtype} {list(self.shape)} {list(self.strides)} {self.layout}{part} {self.content}"


class Digests(Mapping[str, Digest]):
    """Digests by name, in the order in which they were given.

    Args:
        entries: name to digest.
    """

    def __init__(self, entries: Mapping[str, Digest]) -> None:
        self._entries = dict(entries)

    def __getitem__(self, name: str) -> Digest:
        return self._entries[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Digests) and self._entries == other._entries

    __hash__ = None  # type: ignore[assignment]

    @property
    def root(self) -> str:
        """SHA-256 over all names and digests, sorted by name."""
        total = hashlib.sha256()
        for name in sorted(self._entries):
            total.update(f"{len(name)} {name} {self._entries[name]}\n".encode())
        return total.hexdigest()

    def differing(self, other: Digests) -> tuple[str, ...]:
        """Names whose digests differ, or that one side lacks: in this one's order, then what only the other has."""
        names = [name for name in self if other._entries.get(name) != self[name]]
        return (*names, *(name for name in other if name not in self))

    def to_json(self) -> dict[str, Json]:
        """JSON form, for :meth:`from_json`."""
        return {name: found.to_json() for name, found in self._entries.items()}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Digests:
        """From its JSON form."""
        return cls({name: Digest.from_json(found) for name, found in data.items()})


def flatten(value: Any, name: str = "") -> dict[str, Any]:
    """Every tensor and plain value within nested mappings, sequences and dataclasses, by dotted name.

    Args:
        value: tensors, numpy arrays, numbers, strings, bytes and None, nested.
        name: the name of ``value`` itself.

    Raises:
        TypeError: something is in it whose bits this library does not know; its name is in the message.
    """
    inner: Mapping[Any, Any] | None = None
    if isinstance(value, Mapping):
        inner = value
    elif isinstance(value, (list, tuple)):
        inner = dict(zip(getattr(value, "_fields", range(len(value))), value, strict=True))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        inner = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
    if inner is None:
        _check_leaf(value, name)
        return {name: value}
    found: dict[str, Any] = {}
    for key, item in inner.items():
        for leaf, content in flatten(item, f"{name}.{key}" if name else str(key)).items():
            if leaf in found:
                raise TypeError(f"two values have the name {leaf!r}: expected keys that differ as text")
            found[leaf] = content
    return found


def digest_value(value: Any, *, gather: bool = True) -> Digests:
    """Digest every tensor and plain value in ``value``.

    Args:
        value: what :func:`flatten` takes; the names are its names.
        gather: digest a ``DTensor`` as a whole: all ranks of its mesh have to call this alike. Off: its local shard.

    Raises:
        TypeError: there is something whose bits are not known.
    """
    import torch

    leaves = flatten(value)
    found: dict[str, Digest] = {}
    totals: dict[str, Any] = {}
    to_add: dict[tuple[Any, ...], list[str]] = {}
    with torch.no_grad():
        for name, leaf in leaves.items():
            tensor = _as_tensor(leaf)
            if tensor is None:
                found[name] = Digest(type(leaf).__name__, content=_plain(leaf))
            elif _is_sharded(tensor):
                found[name], totals[name], groups = _digest_sharded(tensor, gather)
                if groups:
                    to_add.setdefault((groups, totals[name].device), []).append(name)
            else:
                found[name], totals[name] = _digest_local(tensor)
        for (groups, _), names in to_add.items():
            together = torch.stack([totals[name] for name in names])
            for group in groups:
                torch.distributed.all_reduce(together, group=group)
            totals.update(zip(names, together.unbind(), strict=True))
        words = _to_host(totals)
    for name, pair in words.items():
        content = "".join(f"{word % (1 << 64):016x}" for word in pair)
        found[name] = dataclasses.replace(found[name], content=content)
    return Digests(found)


def digest_tensor(tensor: Any, *, gather: bool = True) -> Digest:
    """Digest one tensor; see :func:`digest_value`."""
    return digest_value([tensor], gather=gather)["0"]


def digest_module(module: Any, *, gather: bool = True) -> Digests:
    """Digest parameters and buffers (those that are not saved too) of a ``torch.nn.Module``, by name."""
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    return digest_value(dict(named), gather=gather)


def digest_gradients(module: Any, *, gather: bool = True) -> Digests:
    """Digest the gradients of a module's parameters, by name; a gradient that is None counts as that."""
    return digest_value({name: parameter.grad for name, parameter in module.named_parameters()}, gather=gather)


def digest_optimizer(optimizer: Any, *, gather: bool = True) -> Digests:
    """Digest an optimizer's state (as its ``state_dict`` numbers it) and its parameter groups' settings."""
    state = optimizer.state_dict()
    return digest_value({"state": state["state"], "param_groups": state["param_groups"]}, gather=gather)


def _check_leaf(value: Any, name: str) -> None:
    if _as_tensor(value) is None and not isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        expected = "tensors, numpy arrays, numbers, strings, bytes or None, in mappings, sequences or dataclasses"
        raise TypeError(f"{name or 'the value'}: cannot be digested: expected {expected}, found {type(value).__name__}")


def _as_tensor(value: Any) -> Any:
    """A tensor over the same bits, or None where ``value`` has no array of them."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach()
    if type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, "__array__"):
        import numpy

        array = numpy.asarray(value)
        if array.dtype.kind in "OSUVMm" or not array.dtype.isnative:
            raise TypeError(f"cannot digest a numpy array of dtype {array.dtype}: expected native numbers")
        return torch.from_numpy(array.copy() if not array.flags.writeable or min((*array.strides, 0)) < 0 else array)
    return None


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return struct.pack(">d", value).hex()
    if isinstance(value, complex):
        return struct.pack(">dd", value.real, value.imag).hex()
    return repr(value)


def _to_host(totals: Mapping[str, Any]) -> dict[str, list[int]]:
    import torch

    by_device: dict[Any, list[str]] = {}
    for name, pair in totals.items():
        by_device.setdefault(pair.device, []).append(name)
    found: dict[str, list[int]] = {}
    for names in by_device.values():
        found.update(zip(names, torch.stack([totals[name] for name in names]).tolist(), strict=True))
    return found


def _describe(tensor: Any, part: str = "") -> Digest:
    import torch

    strides: tuple[int, ...] = ()
    if tensor.layout == torch.strided and not tensor.is_nested:
        strides = tuple(0 if size <= 1 else step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    shape = () if tensor.is_nested else tuple(tensor.shape)
    names = (str(tensor.dtype), str(tensor.layout))
    dtype, layout = (name.removeprefix("torch.") for name in names)
    return Digest(dtype, shape, strides, "nested" if tensor.is_nested else layout, part=part)


def _digest_local(tensor: Any) -> tuple[Digest, Any]:
    import torch

    if tensor.device.type == "meta":
        raise TypeError("cannot digest a tensor on the meta device: it has no bytes")
    parts = _components(tensor)
    if parts is None:
        return _describe(tensor), sums(tensor, (0,) * tensor.dim(), tuple(tensor.shape))
    total = torch.zeros(2, dtype=torch.int64, device=tensor.device)
    described = []
    for number, part in enumerate(parts, 1):
        total += number * sums(part, (0,) * part.dim(), tuple(part.shape))
        described.append(f"{part.dtype} {list(part.shape)}".removeprefix("torch."))
    return dataclasses.replace(_describe(tensor), part=", ".join(described)), total


def _components(tensor: Any) -> list[Any] | None:
    """The plain tensors that a sparse or nested tensor is made of; None for a plain one."""
    import torch

    if tensor.is_nested:
        if tensor.layout == torch.jagged:
            return [tensor.values(), tensor.offsets()]
        return list(tensor.unbind())
    if tensor.layout == torch.strided:
        return None
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]  # the public accessors refuse a tensor that is not coalesced
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    raise TypeError(f"cannot digest a tensor of layout {tensor.layout}: expected strided, sparse or nested")


def _is_sharded(tensor: Any) -> bool:
    import torch

    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def _digest_sharded(tensor: Any, gather: bool) -> tuple[Digest, Any, tuple[Any, ...]]:
    """The digest without its content, the local shard's part of the sums, and the groups to add them up over."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    local, mesh, placements = tensor.to_local(), tensor.device_mesh, tensor.placements
    shape, offsets = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    whole = all(p.is_shard() or p.is_replicate() for p in placements)
    if tuple(shape) != tuple(local.shape):
        # A layout whose places torch does not tell: digest the shard as a tensor of its own.
        whole, offsets = False, (0,) * local.dim()
    total = sums(local, tuple(offsets), tuple(tensor.shape) if whole or local.dim() else ())
    if gather and whole:
        groups = tuple(mesh.get_group(dim) for dim, p in enumerate(placements) if p.is_shard())
        return _describe(tensor), total, groups
    part = f"shard {list(local.shape)} at {list(offsets)} as {' '.join(map(str, placements))}"
    return _describe(tensor, part), total, ()
