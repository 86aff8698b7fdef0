"""Times of ranges as CSV, two sides joined into one table by the time lost, and a gate on it.

The CSV is ours (first line: ``#`` and a JSON object with the format's version, the side, the clock and the device) or
one that ``nsys stats --format csv`` writes for its reports ``nvtx_gpu_proj_sum`` (a range's kernels on the device) and
``nvtx_sum`` (the host). The columns of those are described in the user guide of Nsight Systems, in the part on
post-collection analysis; they hold sums over the whole capture, so both sides must capture as many steps, or mark each
step by a range named ``step``, by whose count they are divided. CSV rather than JSON because profilers write it and
spreadsheets read it.
"""

from __future__ import annotations

import csv
import io
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .._atomic import write_atomically
from ..errors import CostError
from ..spec import Json
from .cost import STEP, RangeTime, RangeTimes

__all__ = ["CostGate", "CostRow", "CostTable", "join_ranges", "read_ranges", "write_ranges", "write_table"]

_FORMAT = "triton-tuning ranges"
_VERSION = 1
_SPREAD = ("", "_p10", "_p90")
_COLUMNS = ("range", "calls", *(f"{c}_ms{part}" for c in ("device", "host") for part in _SPREAD))
_HEADER = {"format": str, "version": int, "side": str, "source": str, "device": str, "steps": int}


@dataclass(frozen=True)
class CostRow:
    """One range beside itself.

    Attributes:
        name: of the range.
        before: ms of each step on the first side; None where that side never entered it.
        after: on the second.
    """

    name: str
    before: float | None
    after: float | None

    @property
    def lost(self) -> float | None:
        """Ms that the second side takes longer; None where one side lacks the range."""
        return None if self.before is None or self.after is None else self.after - self.before

    @property
    def ratio(self) -> float | None:
        """How many times as long the second side takes; None where that means nothing."""
        return None if self.before is None or self.after is None or self.before <= 0 else self.after / self.before


@dataclass(frozen=True)
class CostTable:
    """Two sides, range by range, by the time lost, most first; ranges that one side lacks come last.

    Attributes:
        sides: names of the two.
        clock: ``device`` or ``host``: whose time it is.
        rows: the ranges.
    """

    sides: tuple[str, str]
    clock: str
    rows: tuple[CostRow, ...]

    def with_row(self, row: CostRow) -> CostTable:
        """The table with one more row, in its place."""
        return CostTable(self.sides, self.clock, _sorted([*self.rows, row]))

    def to_json(self) -> dict[str, Json]:
        """As ``triton-tuning cost --json`` prints it."""
        rows: list[Json] = [
            {"range": row.name, "before_ms": row.before, "after_ms": row.after, "lost_ms": row.lost, "ratio": row.ratio}
            for row in self.rows
        ]
        return {"version": 1, "sides": list(self.sides), "clock": self.clock, "rows": rows}


@dataclass(frozen=True, kw_only=True)
class CostGate:
    """How much a range may lose.

    Attributes:
        ratio: how many times as long the second side may take; None: as long as it likes.
        lost: how many ms of each step it may take longer; None: as many as it likes.
        ranges: the ranges that are judged; none: all, and one that only one side has is a problem.
        ignore_below: ranges shorter than this, in ms on both sides, are not judged unless they are named.
        one_sided: ranges that one side may lack.

    Raises:
        CostError: there is no limit to judge by, or one is no number of at least 0.
    """

    ratio: float | None = None
    lost: float | None = None
    ranges: tuple[str, ...] = ()
    ignore_below: float = 0.0
    one_sided: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.ratio is None and self.lost is None:
            raise CostError("gate: expected a ratio or ms lost to judge ranges by, found neither")
        for name in ("ratio", "lost", "ignore_below"):
            limit = getattr(self, name)
            if limit is not None and not 0 <= limit < math.inf:
                raise CostError(f"gate: {name}: expected a number of at least 0, found {limit}")

    def problems(self, table: CostTable) -> list[str]:
        """What the table holds beyond the gate, one sentence each.

        Raises:
            CostError: a range that is named is not on both sides, or there is none to judge.
        """
        by_name = {row.name: row for row in table.rows}
        for name in self.ranges:
            if by_name.get(name) is None or by_name[name].lost is None:
                have = "one side alone has it" if name in by_name else "neither has it"
                raise CostError(f"gate: range {name!r}: expected on both sides, found that {have}")
        missing = [
            f"{row.name}: {table.sides[row.before is None]} alone has it, {row.before or row.after or 0:.3f} ms"
            for row in table.rows
            if row.lost is None
            and not self.ranges
            and row.name not in self.one_sided
            and max(row.before or 0, row.after or 0) >= self.ignore_below
        ]
        judged = [
            row
            for row in table.rows
            if row.lost is not None
            and (row.name in self.ranges if self.ranges else max(row.before or 0, row.after or 0) >= self.ignore_below)
        ]
        if not judged and not missing:
            raise CostError("gate: expected a range on both sides to judge, found none")
        found = []
        for row in judged:
            slower, lost = row.ratio, row.lost
            if self.ratio is not None and (slower is None or slower > self.ratio) and (lost or 0) > 0:
                text = "from nothing" if slower is None else f"{slower:.3f} times as long"
                found.append(f"{row.name}: {text}, allowed {self.ratio:g} times")
            elif self.lost is not None and lost is not None and lost > self.lost:
                found.append(f"{row.name}: {lost:.3f} ms lost, allowed {self.lost:g} ms")
        return found + missing


def _sorted(rows: Sequence[CostRow]) -> tuple[CostRow, ...]:
    def key(row: CostRow) -> tuple[bool, float, str]:
        lost = row.lost
        return lost is None, -(lost or 0.0), row.name

    return tuple(sorted(rows, key=key))


def join_ranges(before: RangeTimes, after: RangeTimes) -> CostTable:
    """Put two sides beside each other: the device's times where both have them, else the host's.

    Raises:
        CostError: the devices differ, or one side has the times of the device alone and the other those of the host.
    """
    devices = {before.device, after.device} - {""}
    if len(devices) > 1:
        raise CostError(f"join: expected two sides of one device, found {before.device} and {after.device}")
    on_device = before.has_device_times and after.has_device_times

    def taken(found: RangeTime) -> float | None:
        times = found.device if on_device else found.host
        return None if times is None else times[0]

    columns = [{name: taken(found) for name, found in side.ranges.items()} for side in (before, after)]
    if not on_device and not all(None not in column.values() for column in columns):
        raise CostError(
            "join: expected times of the device on both sides or of the host on both, found each on one side: "
            "take the same report of nsys for both"
        )
    rows = [CostRow(name, columns[0].get(name), columns[1].get(name)) for name in {**columns[0], **columns[1]}]
    return CostTable((before.side, after.side), "device" if on_device else "host", _sorted(rows))


# -- files -------------------------------------------------------------------------------------------------------------


def write_ranges(path: str | os.PathLike[str], times: RangeTimes) -> None:
    """Write one side as CSV, whole or not at all.

    Raises:
        CostError: it cannot be written.
    """
    header = {"format": _FORMAT, "version": _VERSION, "side": times.side, "source": times.source}
    header |= {"device": times.device, "steps": times.steps}
    stream = io.StringIO()
    stream.write(f"# {json.dumps(header)}\n")
    stream.write(_line(_COLUMNS))
    for name, found in times.ranges.items():
        both = [number for side in (found.device, found.host) for number in (side or ("", "", ""))]
        stream.write(_line([name, f"{found.calls:g}", *(f"{n:.6f}" if n != "" else "" for n in both)]))
    _write(path, stream.getvalue())


def write_table(path: str | os.PathLike[str], table: CostTable) -> None:
    """Write the joined table as CSV, whole or not at all.

    Raises:
        CostError: it cannot be written.
    """
    stream = io.StringIO()
    stream.write(_line(["range", f"{table.sides[0]} ms", f"{table.sides[1]} ms", "lost ms", "ratio"]))
    for row in table.rows:
        numbers = (row.before, row.after, row.lost, row.ratio)
        stream.write(_line([row.name, *("" if number is None else f"{number:.6f}" for number in numbers)]))
    _write(path, stream.getvalue())


def _line(cells: Sequence[str]) -> str:
    """One line of CSV. A program may name a range as it likes: a control character is quoted, as a comma is."""

    def quoted(cell: str) -> str:
        plain = not cell or (cell.isprintable() and cell == cell.strip() and not set(cell) & set(',"#'))
        return cell if plain else '"' + cell.replace('"', '""') + '"'

    return ",".join(map(quoted, cells)) + "\n"


def _write(path: str | os.PathLike[str], text: str) -> None:
    file = Path(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, text.encode())
    except UnicodeEncodeError as error:
        shown = ascii(text[error.start])
        raise CostError(f"{file}: expected names that are text, found half of a surrogate pair ({shown})") from None
    except OSError as error:
        reason = error.strerror or error
        raise CostError(f"{file}: expected a place to write to, found: {reason}", file=str(file)) from None


def read_ranges(path: str | os.PathLike[str]) -> RangeTimes:
    """Read one side: a CSV of :func:`write_ranges`, or one of nsys.

    Raises:
        CostError: it is not there, or is neither; with the line at fault.
    """
    file = os.fspath(path)
    try:
        with open(file, encoding="utf-8-sig", newline="") as stream:
            text = stream.read()
    except OSError as error:
        raise CostError(f"{file}: expected a CSV of ranges, found: {error.strerror}", file=file) from None
    except UnicodeDecodeError:
        raise CostError(f"{file}: expected a CSV of ranges, found bytes that are no UTF-8", file=file) from None
    if text.startswith("#"):
        return _read_own(file, text)
    return _read_nsys(file, text)


def _wrong(file: str, line: int, expected: str, found: object) -> CostError:
    shown = str(found)
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return CostError(f"{file}: line {line}: expected {expected}, found {shown}", file=file, line=line)


def _number(file: str, line: int, column: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise _wrong(file, line, f"a number of at least 0 in column {column}", repr(text))
    return value


def _rows(file: str, text: str, above: int) -> Iterator[tuple[int, list[str]]]:
    """The rows of CSV below so many lines, each with the number of the line that it ends in."""
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        for row in reader:
            yield above + reader.line_num, row
    except csv.Error as error:
        raise _wrong(file, above + reader.line_num, "CSV", str(error)) from None


def _read_own(file: str, text: str) -> RangeTimes:
    first, _, rest = text.partition("\n")
    try:
        header = json.loads(first[1:])
    except (ValueError, RecursionError):
        header = None
    fits = isinstance(header, dict) and {name: type(value) for name, value in header.items()} == _HEADER
    if not fits or header["format"] != _FORMAT or header["version"] != _VERSION or header["steps"] < 1:
        raise _wrong(file, 1, f"the header of {_FORMAT}, version {_VERSION}", first.rstrip("\r"))
    rows = _rows(file, rest, 1)
    _, columns = next(rows, (2, []))
    if tuple(columns) != _COLUMNS:
        raise _wrong(file, 2, f"the columns {','.join(_COLUMNS)}", ",".join(columns) or "nothing")
    ranges: dict[str, RangeTime] = {}
    for line, row in rows:
        if len(row) != len(_COLUMNS):
            raise _wrong(file, line, f"{len(_COLUMNS)} cells", len(row))
        if row[0] in ranges:
            raise _wrong(file, line, "each range once", repr(row[0]))
        clocks: list[tuple[float, float, float] | None] = []
        for place in (2, 5):
            cells = row[place : place + 3]
            if cells == ["", "", ""]:
                clocks.append(None)
                continue
            median, low, high = (_number(file, line, _COLUMNS[place + i], cell) for i, cell in enumerate(cells))
            clocks.append((median, low, high))
        if clocks == [None, None]:
            raise _wrong(file, line, "a time of the device or of the host", "neither")
        ranges[row[0]] = RangeTime(_number(file, line, "calls", row[1]), clocks[1], clocks[0])
    return RangeTimes(header["side"], header["source"], header["device"], header["steps"], ranges)


def _header(line: str) -> list[str]:
    try:
        return next(csv.reader([line]), []) if "Range" in line else []
    except csv.Error:
        return []


_NSYS = (("Total Proj Time (ns)", "Range Instances", True), ("Total Time (ns)", "Instances", False))


def _read_nsys(file: str, text: str) -> RangeTimes:
    # nsys may print what it is processing before the table.
    lines = text.split("\n")
    headers = [_header(line.rstrip("\r")) for line in lines]
    fitting = [
        (line, kind) for line, header in enumerate(headers) for kind in _NSYS if {"Range", *kind[:2]} <= set(header)
    ]
    if not fitting:
        expected = "a header of triton-tuning ranges, or the columns Range and " + " or ".join(k[0] for k in _NSYS)
        raise _wrong(file, 1, expected, lines[0] or "an empty file")
    start, kind = fitting[0]
    columns = headers[start]
    total, instances, on_device = kind
    sums: dict[str, tuple[float, float]] = {}
    for line, row in _rows(file, "\n".join(lines[start + 1 :]), start + 1):
        if not row:
            continue
        if len(row) != len(columns):
            raise _wrong(file, line, f"{len(columns)} cells", len(row))
        cells = dict(zip(columns, row, strict=True))
        name = cells["Range"].removeprefix(":")  # the default domain's
        time, calls = sums.get(name, (0.0, 0.0))
        time += 1e-6 * _number(file, line, total, cells[total].replace(",", ""))
        sums[name] = time, calls + _number(file, line, instances, cells[instances].replace(",", ""))
    if not sums:
        raise _wrong(file, start + 2, "at least one range", "none")
    steps = max(1, round(sums[STEP][1])) if STEP in sums else 1

    def made(time: float, calls: float) -> RangeTime:
        each = (time / steps,) * 3
        return RangeTime(calls / steps, None if on_device else each, each if on_device else None)

    ranges = {name: made(*found) for name, found in sums.items()}
    return RangeTimes(Path(file).stem, "nsys", "", steps, ranges)
