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
lie and added up: the digest is that of the full tensor under every layout across ranks, strided shards (FSDP2 over
tensor parallelism) among them. A tensor that is pending a reduction (``Partial``), one whose shards have other sizes
than its placements say, and every ``DTensor`` if ``gather`` is off, is digested shard by shard, with the shard's place
as part.

**Made of several.** Sparse, nested and quantized tensors, and subclasses that wrap tensors (``__tensor_flatten__``),
have digests of what they are made of; what that is, the subclass's type and its context are the part.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tuning.bitexact.digest_parts import Measured, as_tensor, measure
from tuning.spec import Json

__all__ = [
    "Digest",
    "Digests",
    "Pending",
    "digest_gradients",
    "digest_module",
    "digest_optimizer",
    "digest_tensor",
    "digest_value",
    "flatten",
    "measure_value",
    "read_digests",
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

    A mapping, sequence or dataclass that holds nothing counts as a plain value.

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
    if inner is not None and not inner:
        return {name: {} if isinstance(value, Mapping) else () if isinstance(value, tuple) else []}
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
    return read_digests([measure_value(value, gather=gather)])[0]


class Pending:
    """Digests whose content lies on the devices still; :func:`read_digests` reads it."""

    def __init__(self, found: dict[str, Digest], rows: list[tuple[list[str], Any]], alone: dict[str, Any]) -> None:
        self.found = found
        self.rows = rows
        self.alone = alone


def measure_value(value: Any, *, gather: bool = True) -> Pending:
    """Like :func:`digest_value`, but nothing is copied to the host yet.

    Raises:
        TypeError: there is something whose bits are not known.
    """
    import torch

    found: dict[str, Digest] = {}
    alone: dict[str, Any] = {}
    totals: dict[tuple[tuple[Any, ...], Any, int], dict[str, Any]] = {}
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        for name, leaf in flatten(value).items():
            tensor = as_tensor(leaf)
            if tensor is None:
                found[name] = Digest(type(leaf).__name__, content=_plain(leaf))
                continue
            each = measure(tensor, gather=gather)
            found[name] = Digest(each.dtype, each.shape, each.strides, each.layout, part=each.part)
            if each.alone is not None:
                alone[name] = each.alone
                each.total = torch.cat([each.total, each.total.new_full((1,), 0 if each.fits else 1)])
            totals.setdefault((each.groups, each.total.device, len(each.total)), {})[name] = each.total
        rows = []
        for (groups, *_), named in totals.items():
            together = torch.stack(list(named.values()))
            for group in groups:
                torch.distributed.all_reduce(together, group=group)
            rows.append((list(named), together))
    return Pending(found, rows, alone)


def read_digests(pending: Sequence[Pending]) -> list[Digests]:
    """Read what was measured: one copy to the host for each device, however many there are."""
    import torch

    by_device: dict[Any, list[Any]] = {}
    for each in pending:
        for _, row in each.rows:
            by_device.setdefault(row.device, []).append(row.flatten())
    with torch.no_grad():
        words = {device: iter(torch.cat(rows).tolist()) for device, rows in by_device.items()}
    found = []
    for each in pending:
        entries = dict(each.found)
        for names, row in each.rows:
            for name in names:
                first, second, *misfits = itertools.islice(words[row.device], row.shape[1])
                content = f"{first % (1 << 64):016x}{second % (1 << 64):016x}"
                entries[name] = dataclasses.replace(entries[name], content=content)
                if any(misfits):
                    entries[name] = _read_alone(each.alone[name]())
        found.append(Digests(entries))
    return found


def _read_alone(each: Measured) -> Digest:
    content = "".join(f"{word % (1 << 64):016x}" for word in each.total.tolist())
    return Digest(each.dtype, each.shape, each.strides, each.layout, content, each.part)


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
    if as_tensor(value) is None and not isinstance(value, (bool, int, float, complex, str, bytes, type(None))):
        expected = "tensors, numpy arrays, numbers, strings, bytes or None, in mappings, sequences or dataclasses"
        raise TypeError(f"{name or 'the value'}: cannot be digested: expected {expected}, found {type(value).__name__}")


def _plain(value: Any) -> str:
    if isinstance(value, float):
        return struct.pack(">d", value).hex()
    if isinstance(value, complex):
        return struct.pack(">dd", value.real, value.imag).hex()
    if isinstance(value, int) and value.bit_length() > 4096:  # Python refuses to write the digits of much larger ones
        return hex(value)
    return repr(value)
