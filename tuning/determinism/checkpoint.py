"""Which bytes of two checkpoints differ, and whether anything that was trained does.

Two runs that agree bit for bit can still write different checkpoint files: a flat buffer of a distributed optimizer is
padded to a round size and nobody writes the padding; a saved view brings its whole storage along. So each differing
byte is given a kind:

- ``trained value``: it belongs to an element of a tensor;
- ``unwritten padding``: it lies in a storage, but in no tensor over it, or in elements of a tensor that the caller's
  ``trained`` ranges leave out;
- ``structure``: it describes the tensors (names, shapes) or holds values that are none, such as a step count;
- ``container``: an archive's checksums and folder name, the identifier of a save: they follow from the rest or from
  where the file lies, and say nothing about the run;
- ``unclassified``: the file's format is not known.

Bytes are compared, never numbers: ``0.0`` and ``-0.0`` differ, and so do two NaNs with different payloads.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tuning.determinism.checkpoint_layout import (
    FileLayout,
    Storage,
    View,
    description,
    distributed_items,
    read_layout,
)
from tuning.determinism.refusal import refuse
from tuning.spec import Json

__all__ = ["ByteDifference", "ByteKind", "CheckpointComparison", "compare_checkpoints"]

ByteKind = Literal["trained value", "unwritten padding", "structure", "container", "unclassified"]

_HARMLESS: tuple[ByteKind, ...] = ("unwritten padding", "container")

_BLOCK = 1 << 24


@dataclass(frozen=True)
class ByteDifference:
    """Differing bytes of one kind in one tensor, storage or file.

    Attributes:
        file: name of the file within the checkpoint, "" where the checkpoint is one file.
        where: the tensor, or the storage, or what else the bytes belong to.
        kind: what they are.
        count: how many bytes differ.
        ranges: (first, end) of the differing bytes in the first checkpoint's file.
        shift: where the same bytes are in the second checkpoint's file, relative to the first.
        detail: more in words, such as the first element that differs.
    """

    file: str
    where: str
    kind: ByteKind
    count: int
    ranges: tuple[tuple[int, int], ...]
    shift: int = 0
    detail: str = ""

    def __str__(self) -> str:
        shown = ", ".join(f"{first}-{end - 1}" for first, end in self.ranges[:4])
        more = f" and {len(self.ranges) - 4} more ranges" if len(self.ranges) > 4 else ""
        place = f" at {shown}{more}" if shown else ""
        prefix = f"{self.file}: " if self.file else ""
        detail = f"; {self.detail}" if self.detail else ""
        return f"{prefix}{self.where}: {self.count} bytes differ{place} ({self.kind}{detail})"

    def to_json(self) -> Json:
        """JSON form."""
        return {
            "file": self.file,
            "where": self.where,
            "kind": self.kind,
            "count": self.count,
            "ranges": [list(pair) for pair in self.ranges],
            "shift": self.shift,
            "detail": self.detail,
        }


@dataclass(frozen=True)
class CheckpointComparison:
    """What :func:`compare_checkpoints` found.

    Attributes:
        files: names of the files that both checkpoints have.
        differences: all of them, by file.
    """

    files: tuple[str, ...]
    differences: tuple[ByteDifference, ...]

    @property
    def identical(self) -> bool:
        """Every byte is the same."""
        return not self.differences

    @property
    def trained_equal(self) -> bool:
        """No trained value differs, and nothing differs of which that cannot be said."""
        return all(difference.kind in _HARMLESS for difference in self.differences)

    @property
    def verdict(self) -> str:
        """The result in one line."""
        if self.identical:
            return f"identical: {len(self.files)} files, every byte"
        counts: dict[str, int] = {}
        for difference in self.differences:
            counts[difference.kind] = counts.get(difference.kind, 0) + difference.count
        listed = ", ".join(f"{count} of {kind}" for kind, count in sorted(counts.items()))
        what = "trained values are equal" if self.trained_equal else "not shown to be equal"
        return f"{what}: differing bytes: {listed}"

    def lines(self) -> tuple[str, ...]:
        """The verdict and every difference, one line each."""
        return (self.verdict, *map(str, self.differences))

    def to_json(self) -> Json:
        """JSON form."""
        return {
            "identical": self.identical,
            "trained_equal": self.trained_equal,
            "verdict": self.verdict,
            "files": list(self.files),
            "differences": [difference.to_json() for difference in self.differences],
        }


@contextmanager
def _mapped(path: Path) -> Iterator[memoryview]:
    with path.open("rb") as file:
        if path.stat().st_size == 0:
            yield memoryview(b"")
            return
        # Copy-on-write: torch wraps only writable buffers, and nothing is written.
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as mapped:
            view = memoryview(mapped)
            try:
                yield view
            finally:
                view.release()


def _differing(first: memoryview, second: memoryview) -> list[tuple[int, int]]:
    """(first, end) of every stretch in which two equally long views differ."""
    import torch

    ranges: list[tuple[int, int]] = []
    for start in range(0, len(first), _BLOCK):
        a, b = first[start : start + _BLOCK], second[start : start + _BLOCK]
        if a == b:
            continue
        # Copied blocks: a tensor over the mapping would keep the file open after the comparison.
        at = (
            (torch.frombuffer(bytearray(a), dtype=torch.uint8) != torch.frombuffer(bytearray(b), dtype=torch.uint8))
            .nonzero()
            .flatten()
        )
        cuts = (at[1:] - at[:-1] > 1).nonzero().flatten().tolist()
        firsts, lasts = [0, *(cut + 1 for cut in cuts)], [*cuts, len(at) - 1]
        for low, high in zip(at[firsts].tolist(), at[lasts].tolist(), strict=True):
            if ranges and ranges[-1][1] == start + low:
                ranges[-1] = (ranges[-1][0], start + high + 1)
            else:
                ranges.append((start + low, start + high + 1))
    return ranges


def _overlap(ranges: Sequence[tuple[int, int]], runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The parts of sorted ``ranges`` that lie in sorted ``runs``."""
    found, index = [], 0
    for low, high in ranges:
        while index < len(runs) and runs[index][1] <= low:
            index += 1
        at = index
        while at < len(runs) and runs[at][0] < high:
            found.append((max(low, runs[at][0]), min(high, runs[at][1])))
            at += 1
    return found


def _outside(ranges: Sequence[tuple[int, int]], runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The parts of sorted ``ranges`` that lie in none of the sorted ``runs``."""
    found = []
    for low, high in ranges:
        at = low
        for first, end in _overlap([(low, high)], runs):
            if first > at:
                found.append((at, first))
            at = end
        if at < high:
            found.append((at, high))
    return found


def _count(ranges: Sequence[tuple[int, int]]) -> int:
    return sum(end - first for first, end in ranges)


def _elements(view: View, allowed: Sequence[tuple[int, int]] | None) -> tuple[list[tuple[int, int]], bool]:
    """Byte runs within the storage of a view's trained elements, and whether the caller's ranges cut them."""
    runs = list(view.runs)
    if allowed is not None:
        kept, at = [], 0
        for first, end in view.runs:  # positions within the tensor, counted over its runs in storage order
            for low, high in _overlap([(at, at + end - first)], sorted(allowed)):
                kept.append((first + low - at, first + high - at))
            at += end - first
        runs = kept
    return [(first * view.itemsize, end * view.itemsize) for first, end in runs], allowed is not None


def _classify_storage(
    file: str, storage: Storage, shift: int, ranges: list[tuple[int, int]], trained: Mapping[str, Any]
) -> Iterator[ByteDifference]:
    rest = ranges
    for view in storage.views:
        everything, _ = _elements(view, None)
        values, cut = _elements(view, trained.get(view.name))
        differing = _overlap(ranges, values)
        if differing:
            element = differing[0][0] // view.itemsize
            yield _difference(
                file, f"tensor {view.name}".strip(), "trained value", differing, storage, shift,
                f"first in element {element} of its storage, {len(differing)} ranges",
            )  # fmt: skip
        if cut:
            padding = _outside(_overlap(ranges, everything), values)
            if padding:
                yield _difference(
                    file, f"tensor {view.name}".strip(), "unwritten padding", padding, storage, shift,
                    "outside the elements that are trained",
                )  # fmt: skip
        rest = _outside(rest, everything)
    if rest:
        names = ", ".join(view.name for view in storage.views) or "no tensor"
        yield _difference(
            file, f"storage {storage.key}", "unwritten padding", rest, storage, shift,
            f"belongs to no element of {names}",
        )  # fmt: skip


def _difference(
    file: str,
    where: str,
    kind: ByteKind,
    ranges: Sequence[tuple[int, int]],
    storage: Storage,
    shift: int,
    detail: str,
) -> ByteDifference:
    moved = tuple((first + storage.start, end + storage.start) for first, end in ranges)
    return ByteDifference(file, where, kind, _count(ranges), moved, shift, detail)


def _same_shape(first: Storage, second: Storage) -> bool:
    return first.stop - first.start == second.stop - second.start and first.views == second.views


def _compare_bytes(
    file: str, a: memoryview, b: memoryview, first: FileLayout, second: FileLayout, trained: Mapping[str, Any]
) -> Iterator[ByteDifference]:
    """All differences between two files whose bytes are not the same."""
    if first.kind == "unknown" or first.kind != second.kind:
        yield _whole(file, a, b, "unclassified", "its format is not known" if first.kind == second.kind else
                     f"the files are of kind {first.kind} and {second.kind}")  # fmt: skip
        return
    if first.kind == "metadata":
        same = description(a) == description(b)
        detail = "names the save; tensors and places are the same" if same else "describes other tensors or places"
        yield _whole(file, a, b, "container" if same else "structure", detail)
        return
    held = []
    for key, one in first.storages.items():
        other = second.storages.get(key)
        held.append((one.start, one.stop))
        if other is not None and _same_shape(one, other):
            ranges = _differing(a[one.start : one.stop], b[other.start : other.stop])
            yield from _classify_storage(file, one, other.start - one.start, ranges, trained)
        else:
            reason = "only in the first" if other is None else "has another size or shape in the second"
            yield _unmatched(file, one, reason)
    for key, other in second.storages.items():
        if key not in first.storages:
            yield _unmatched(file, other, "only in the second")
    for name in sorted({*first.records, *second.records}):
        mine, theirs = first.records.get(name), second.records.get(name)
        if mine is not None:
            held.append(mine)
        piece_a = a[mine[0] : mine[1]] if mine else memoryview(b"")
        piece_b = b[theirs[0] : theirs[1]] if theirs else memoryview(b"")
        if piece_a != piece_b:
            start = mine[0] if mine else 0
            yield _whole(file, piece_a, piece_b, "structure", "", where=name, start=start)
    if len(a) != len(b):
        yield _whole(file, a, b, "container", f"the files have {len(a)} and {len(b)} bytes")
    else:
        rest = _outside(_differing(a, b), sorted(held))
        if rest and all(
            key in second.storages and one.start == second.storages[key].start for key, one in first.storages.items()
        ):
            yield ByteDifference(file, "outside all records", "container", _count(rest), tuple(rest))


def _whole(
    file: str, a: memoryview, b: memoryview, kind: ByteKind, detail: str, *, where: str = "file", start: int = 0
) -> ByteDifference:
    """One difference for two stretches as they are; without positions where their lengths differ."""
    if len(a) != len(b):
        sizes = f"{len(a)} and {len(b)} bytes"
        return ByteDifference(file, where, kind, abs(len(a) - len(b)), (), 0, detail or f"has {sizes}")
    ranges = _differing(a, b)
    moved = tuple((first + start, end + start) for first, end in ranges)
    return ByteDifference(file, where, kind, _count(ranges), moved, 0, detail)


def _unmatched(file: str, storage: Storage, reason: str) -> ByteDifference:
    names = ", ".join(view.name for view in storage.views) or "no tensor"
    size = storage.stop - storage.start
    return ByteDifference(file, f"storage {storage.key}", "structure", size, (), 0, f"{reason}: {names}")


def _file_names(path: Path) -> dict[str, Path]:
    if path.is_dir():
        return {found.relative_to(path).as_posix(): found for found in sorted(path.rglob("*")) if found.is_file()}
    return {"": path}


def compare_checkpoints(
    first: str | Path, second: str | Path, *, trained: Mapping[str, Sequence[tuple[int, int]]] | None = None
) -> CheckpointComparison:
    """Compare two checkpoints byte by byte.

    Args:
        first, second: two files, or two folders whose files are compared by name. Understood are ``torch.save``,
            ``torch.distributed.checkpoint`` and safetensors; other files are compared without names.
        trained: for tensors that contain padding, such as a flat buffer of a distributed optimizer, the (first, end)
            ranges of elements that hold trained values; the other elements of those tensors count as padding.

    Returns:
        Every difference and what it is in.

    Raises:
        DeterminismError: a path does not exist, or one is a file and the other a folder.
    """
    one, other = Path(first), Path(second)
    absent = [path for path in (one, other) if not path.exists()]
    problems = [f"{path} must be a checkpoint file or folder, got nothing there" for path in absent]
    if not problems and one.is_dir() != other.is_dir():
        problems.append(f"both must be files or both folders, got {one} and {other}")
    refuse("this comparison", problems)
    names, others = _file_names(one), _file_names(other)
    differences = [
        ByteDifference(name, "file", "structure", path.stat().st_size, (), 0, f"only in the {label}")
        for label, mine, theirs in (("first", names, others), ("second", others, names))
        for name, path in mine.items()
        if name not in theirs
    ]
    both = tuple(name for name in names if name in others)
    for name in both:
        with _mapped(names[name]) as a, _mapped(others[name]) as b:
            if a == b:
                continue
            layouts = [_layout(path, data) for path, data in ((names[name], a), (others[name], b))]
            differences += _compare_bytes(name, a, b, layouts[0], layouts[1], trained or {})
    return CheckpointComparison(both, tuple(differences))


def _layout(path: Path, data: memoryview) -> FileLayout:
    return read_layout(path, data, distributed_items(path.parent).get(path.name, ()))
