"""Where the values of a checkpoint file lie, byte by byte.

Three formats are understood: the zip archives of ``torch.save``, the files of ``torch.distributed.checkpoint`` (such
archives one after the other, placed by ``.metadata``), and safetensors. Anything else is one stretch of bytes of which
nothing is known. Pickles are read as text and never loaded (:mod:`tuning.determinism.pickle_text`).
"""

from __future__ import annotations

import io
import json
import math
import struct
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tuning.determinism.pickle_text import Symbol, read_pickle_text

__all__ = ["METADATA", "FileLayout", "Storage", "View", "description", "distributed_items", "read_layout"]


@dataclass(frozen=True)
class View:
    """A tensor over a storage.

    Attributes:
        name: of the tensor, its keys joined by dots.
        itemsize: bytes per element.
        runs: (first, end) of each stretch of elements in the storage that belongs to it, sorted.
        shape: of the tensor.
    """

    name: str
    itemsize: int
    runs: tuple[tuple[int, int], ...]
    shape: tuple[int, ...] = ()


@dataclass
class Storage:
    """A stretch of a file that holds elements of tensors.

    Attributes:
        key: what identifies it in its file: ``0`` and so on in an archive, the tensor's name in safetensors.
        start, stop: its bytes in the file.
        views: the tensors over it.
    """

    key: str
    start: int
    stop: int
    views: list[View] = field(default_factory=list)


@dataclass(frozen=True)
class FileLayout:
    """What a checkpoint file consists of.

    Attributes:
        kind: ``torch``, ``distributed``, ``metadata`` (of a distributed checkpoint), ``safetensors`` or ``unknown``.
        storages: the stretches that hold elements, by key.
        records: (start, stop) of everything else that says something, such as the pickle of an archive, by name. What
            is in neither, such as an archive's checksums, follows from the rest.
    """

    kind: str
    storages: Mapping[str, Storage]
    records: Mapping[str, tuple[int, int]]


_ITEM_SIZES = {
    "BoolStorage": 1, "ByteStorage": 1, "CharStorage": 1, "ShortStorage": 2, "HalfStorage": 2, "BFloat16Storage": 2,
    "IntStorage": 4, "FloatStorage": 4, "LongStorage": 8, "DoubleStorage": 8, "ComplexFloatStorage": 8,
    "ComplexDoubleStorage": 16, "QInt8Storage": 1, "QUInt8Storage": 1, "QInt32Storage": 4, "UntypedStorage": 1,
}  # fmt: skip

_DTYPE_SIZES = {
    "bool": 1, "uint8": 1, "int8": 1, "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1, "int16": 2, "uint16": 2, "float16": 2, "bfloat16": 2, "int32": 4, "uint32": 4, "float32": 4,
    "complex32": 4, "int64": 8, "uint64": 8, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip

_SAFETENSORS_SIZES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8, "C64": 8,
}  # fmt: skip


def _runs(offset: int, size: Sequence[int], stride: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """The stretches of elements that a strided tensor covers, sorted and merged."""
    if 0 in size:
        return ()
    dims = sorted((step, count) for count, step in zip(size, stride, strict=True) if count > 1 and step > 0)
    dense = 1
    while dims and dims[0][0] <= dense:
        step, count = dims.pop(0)
        dense = max(dense, step * (count - 1) + dense)
    starts = [offset]
    for step, count in dims:
        starts = [start + step * index for start in starts for index in range(count)]
    return _merge((start, start + dense) for start in starts)


def _merge(runs: Iterator[tuple[int, int]] | Sequence[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    merged: list[tuple[int, int]] = []
    for first, end in sorted(runs):
        if merged and first <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((first, end))
    return tuple(merged)


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, Symbol]]:
    """The tensors in an unpickled text, with their names."""
    if isinstance(value, Symbol):
        if value.name.startswith("torch._utils._rebuild") and value.args:
            inner = value.args[0]
            if isinstance(inner, Symbol) and inner.name == "persistent":
                yield name, value
            else:  # a parameter around a tensor
                yield from _tensors(inner, name)
            return
        for part in (value.args, value.state, value.items):
            yield from _tensors(part, name)
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            label = key.name if isinstance(key, Symbol) else str(key)
            yield from _tensors(entry, f"{name}.{label}" if name else label)
    elif isinstance(value, (list, tuple)):
        for index, entry in enumerate(value):
            yield from _tensors(entry, f"{name}.{index}" if name else str(index))


def _view(name: str, tensor: Symbol) -> tuple[str, View] | None:
    """The storage key and the view of a ``_rebuild_tensor`` call, or None where its arguments are unexpected."""
    args = tensor.args or ()
    identity = args[0].args[0] if args and isinstance(args[0], Symbol) and args[0].args else None
    if len(args) < 4 or not isinstance(identity, tuple) or len(identity) < 5:
        return None
    offset, size, stride = args[1:4]
    kind = identity[1].name.rpartition(".")[2] if isinstance(identity[1], Symbol) else ""
    itemsize = _ITEM_SIZES.get(kind)
    if tensor.name.endswith("_rebuild_tensor_v3") and len(args) > 6 and isinstance(args[6], Symbol):
        itemsize = _DTYPE_SIZES.get(args[6].name.rpartition(".")[2])
    if itemsize is None or not isinstance(offset, int) or not isinstance(size, tuple) or not isinstance(stride, tuple):
        return None
    return str(identity[2]), View(name, itemsize, _runs(offset, size, stride), size)


_DERIVED = ".data/serialization_id"
"""A hash that torch writes of an archive's names and checksums."""


def _archive(data: memoryview, base: int, prefix: str) -> tuple[dict[str, Storage], dict[str, tuple[int, int]]]:
    """Storages and records of one ``torch.save`` archive; ``data`` is the archive, ``base`` where it begins."""
    storages: dict[str, Storage] = {}
    records: dict[str, tuple[int, int]] = {}
    # A file object over the memoryview: BytesIO would copy the whole checkpoint.
    with zipfile.ZipFile(_Window(data)) as archive:
        text = None
        for entry in archive.infolist():
            _, _, name = entry.filename.partition("/")  # the folder is named after the file
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"{entry.filename} is compressed")
            names, extra = struct.unpack_from("<HH", data, entry.header_offset + 26)
            start = base + entry.header_offset + 30 + names + extra
            if name.startswith("data/"):
                key = name.removeprefix("data/")
                storages[key] = Storage(prefix + key, start, start + entry.file_size)
            elif name != _DERIVED:
                records[prefix + name] = (start, start + entry.file_size)
            if name == "data.pkl":
                text = read_pickle_text(archive.read(entry))
    for name, tensor in _tensors(text):
        found = _view(name, tensor)
        if found is not None and found[0] in storages:
            storages[found[0]].views.append(found[1])
    return {storage.key: storage for storage in storages.values()}, records


class _Window(io.RawIOBase):
    """A seekable, readable file over a memoryview, without a copy."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        origin = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: len(self._data)}[whence]
        self._at = max(0, origin + offset)
        return self._at

    def readinto(self, buffer: Any) -> int:
        piece = self._data[self._at : self._at + len(buffer)]
        buffer[: len(piece)] = piece
        self._at += len(piece)
        return len(piece)


METADATA = ".metadata"
"""The file of a distributed checkpoint that says what lies where."""


def description(data: memoryview) -> object:
    """What a ``.metadata`` file says about tensors and where they lie, comparable by value.

    It also holds the folder's path and an identifier of the save, which differ between any two saves and are left out.

    Raises:
        ValueError: it cannot be followed.
    """
    state = getattr(read_pickle_text(bytes(data)), "state", None)
    if not isinstance(state, Mapping) or "storage_data" not in state or "state_dict_metadata" not in state:
        raise ValueError("no metadata of a distributed checkpoint")
    return _plain([state["state_dict_metadata"], state.get("planner_data"), state["storage_data"]])


def _plain(value: Any) -> object:
    """A value with symbols spelled out as tuples, so that equal texts compare equal."""
    if isinstance(value, Symbol):
        return (value.name, _plain(value.args), _plain(value.state), _plain(value.items))
    if isinstance(value, Mapping):
        return [(_plain(key), _plain(entry)) for key, entry in value.items()]
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    return value


def distributed_items(folder: Path) -> dict[str, list[tuple[str, int, int]]]:
    """What ``.metadata`` of a distributed checkpoint says about its files.

    Returns:
        For each file name the (item name, offset, length) of what lies in it, by offset. Empty where there is no
        ``.metadata`` or it cannot be followed.
    """
    try:
        text = read_pickle_text((folder / METADATA).read_bytes())
        entries = text.state["storage_data"]
        pairs = [(index.state, info.state) for index, info in entries.items()]
        items: dict[str, list[tuple[str, int, int]]] = {}
        for index, info in pairs:
            offset = index.get("offset")
            if isinstance(offset, Symbol):  # a torch.Size
                offset = offset.args[0] if offset.args else ()
            at = "" if offset is None else str(list(offset))
            items.setdefault(info["relative_path"], []).append((f"{index['fqn']}{at}", info["offset"], info["length"]))
    except (OSError, ValueError, AttributeError, KeyError, TypeError, IndexError):
        return {}
    return {name: sorted(found, key=lambda item: item[1]) for name, found in items.items()}


def _safetensors(data: memoryview) -> tuple[dict[str, Storage], dict[str, tuple[int, int]]]:
    (length,) = struct.unpack_from("<Q", data, 0)
    header = json.loads(bytes(data[8 : 8 + length]))
    storages = []
    for name, entry in sorted(header.items()):
        if name != "__metadata__":
            first, end = entry["data_offsets"]
            shape = tuple(entry["shape"])
            view = View(name, _SAFETENSORS_SIZES.get(entry["dtype"], 1), ((0, math.prod(shape)),), shape)
            storages.append(Storage(name, 8 + length + first, 8 + length + end, [view]))
    storages += _gaps(storages, 8 + length, len(data))
    return {storage.key: storage for storage in storages}, {"header": (0, 8 + length)}


def _gaps(storages: Sequence[Storage], start: int, stop: int) -> list[Storage]:
    """Bytes of a data section that belong to no tensor, as storages without views."""
    gaps, at = [], start
    for storage in sorted(storages, key=lambda item: item.start):
        if storage.start > at:
            gaps.append(Storage(f"gap at {at - start}", at, storage.start))
        at = max(at, storage.stop)
    if at < stop:
        gaps.append(Storage(f"gap at {at - start}", at, stop))
    return gaps


def read_layout(path: Path, data: memoryview, items: Sequence[tuple[str, int, int]] = ()) -> FileLayout:
    """What the file consists of.

    Args:
        path: of the file; its suffix says whether it is safetensors.
        data: its bytes.
        items: for a file of a distributed checkpoint, what :func:`distributed_items` says about it.
    """
    storages: dict[str, Storage] = {}
    records: dict[str, tuple[int, int]] = {}
    try:
        if path.suffix == ".safetensors":
            kind = "safetensors"
            storages, records = _safetensors(data)
        elif items:
            kind = "distributed"
            for name, offset, length in items:
                found, described = _archive(data[offset : offset + length], offset, f"{name}/")
                for storage in found.values():
                    # An item of its own is a tensor without a name; an item of several values names each within it.
                    storage.views[:] = [replace(view, name=f"{name}.{view.name}".rstrip(".")) for view in storage.views]
                storages.update(found)
                records.update(described)
        elif bytes(data[:4]) == b"PK\x03\x04":
            kind = "torch"
            storages, records = _archive(data, 0, "")
        elif path.name == METADATA:
            kind = "metadata"
            description(data)
        else:
            kind = "unknown"
    except (ValueError, KeyError, TypeError, IndexError, AttributeError, struct.error, zipfile.BadZipFile):
        # A file that is not what it looks like is compared all the same, only without names.
        kind, storages, records = "unknown", {}, {}
    return FileLayout(kind, storages, records)
