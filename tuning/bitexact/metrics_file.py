"""The file of recorded metrics: JSON, a line for each step, floats as text that carries their bits.

Alternatives were a binary format, which no review could read; decimal numbers, which round or need a printer of their
own for each dtype, and have no NaN payload; and a line of JSON for each step with all metrics in it, in which a metric
of its own pace has no place. Names and steps are sorted, so the same run makes the same bytes but for its provenance.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
import stat
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._atomic import write_atomically
from ..errors import MetricStandardError
from .metrics import Metrics, Tolerance
from .metrics_values import DTYPES, Value, decode, encode

__all__ = [
    "FORMAT",
    "MAX_BYTES",
    "VERSION",
    "provenance",
    "read_metrics",
    "record_standard",
    "refuse_under_ci",
    "write_metrics",
]

FORMAT = "triton-tuning metrics"
VERSION = 1

MAX_BYTES = 256 << 20
"""What a file of recorded metrics may hold; a larger one is refused before it is read."""

_CI = (
    "CI", "GITHUB_ACTIONS", "GITLAB_CI", "JENKINS_URL", "BUILD_NUMBER", "BUILDKITE", "TEAMCITY_VERSION", "TF_BUILD"
)  # fmt: skip
_PACKAGES = ("torch", "triton", "triton-tuning")


def provenance() -> dict[str, str]:
    """Where and with what this process computes: date, device, versions. Touches no device."""
    found = {"date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(), "device": "cpu"}
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        found["device"] = str(torch.cuda.get_device_name())
        found["cuda"] = str(torch.version.cuda or torch.version.hip)
    found["machine"] = platform.machine()
    found["python"] = platform.python_version()
    return found | {package: version for package in _PACKAGES if (version := _version(package)) is not None}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def refuse_under_ci(environment: Mapping[str, str] | None = None) -> None:
    """Refuse to record a standard under a CI system: nobody reviews what a CI job overwrites.

    Raises:
        MetricStandardError: one of the variables that CI systems set (``CI``, and the own ones of GitHub Actions,
            GitLab, Jenkins, Buildkite, TeamCity and Azure Pipelines) is anything but nothing, ``0`` or ``false``.
    """
    given = os.environ if environment is None else environment
    for name in _CI:
        value = given.get(name, "")
        if value.lower() not in ("", "0", "false"):
            raise MetricStandardError(
                f"recording a standard: expected not to run under CI, found {name}={value}: record where you can "
                "review it, and commit the file",
                expected=f"{name} to be unset",
                found=value,
            )


def write_metrics(path: str | os.PathLike[str], metrics: Metrics) -> None:
    """Write a run to a file, whole or not at all. Its folder is made.

    Raises:
        MetricStandardError: it cannot be written.
    """
    file = Path(path)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, _serialize(metrics).encode())
    except OSError as error:
        raise MetricStandardError(
            f"{file}: expected a place to write to, found: {error.strerror or error}", file=str(file)
        ) from None


def record_standard(path: str | os.PathLike[str], metrics: Metrics) -> None:
    """Write a run as the standard that later ones are held against.

    Raises:
        MetricStandardError: under CI; nothing was recorded; or the file cannot be written.
    """
    refuse_under_ci()
    if not metrics.series:
        raise MetricStandardError(f"{Path(path)}: expected at least one metric to record, found none", file=str(path))
    write_metrics(path, metrics)


def _serialize(metrics: Metrics) -> str:
    def compact(value: Any) -> str:
        return json.dumps(value, ensure_ascii=True, allow_nan=False)

    lines = ["{", f'"format": {compact(FORMAT)},', f'"version": {VERSION},']
    lines.append(f'"provenance": {compact(dict(metrics.provenance))},')
    tolerances = {name: vars(tolerance) for name, tolerance in sorted(metrics.tolerances.items())}
    lines.append(f'"tolerances": {compact(tolerances)},')
    lines.append('"metrics": {')
    blocks = []
    for name, points in sorted(metrics.series.items()):
        dtype = next(iter(points.values())).dtype
        rows = ",\n".join(compact(_point(step, value)) for step, value in sorted(points.items()))
        blocks.append(f'{compact(name)}: {{"dtype": {compact(dtype)}, "points": [\n{rows}\n]}}')
    return "\n".join([*lines, ",\n".join(blocks), "}", "}"]) + "\n"


def _point(step: int, value: Value) -> list[Any]:
    texts = [encode(value.dtype, bits) for bits in value.bits]
    return [step, texts[0]] if not value.shape else [step, list(value.shape), texts]


def read_metrics(path: str | os.PathLike[str]) -> Metrics:
    """Read a file of recorded metrics.

    Raises:
        MetricStandardError: it is not there, or not such a file; with the place in it, what was expected and found.
    """
    return _Reader(os.fspath(path)).read()


class _Reader:
    def __init__(self, path: str) -> None:
        self.path = path

    def wrong(self, where: str, expected: str, found: object) -> MetricStandardError:
        shown = found if isinstance(found, str) and where == "$" else repr(found)
        shown = shown if len(shown) <= 60 else shown[:57] + "..."
        return MetricStandardError(
            f"{self.path}: {where}: expected {expected}, found {shown}",
            file=self.path,
            where=where,
            expected=expected,
            found=shown,
        )

    def read(self) -> Metrics:
        try:
            text = self.bytes().decode()
        except UnicodeDecodeError:
            raise self.wrong("$", "a file of recorded metrics", "bytes that are no UTF-8") from None
        try:
            document = json.loads(text, object_pairs_hook=self.once, parse_constant=self.constant)
        except (ValueError, RecursionError) as error:
            raise self.wrong("$", "JSON", str(error)) from None
        self.members("$", document, ("format", "version", "provenance", "tolerances", "metrics"))
        if document["format"] != FORMAT:
            raise self.wrong("$.format", repr(FORMAT), document["format"])
        if type(document["version"]) is not int or document["version"] != VERSION:
            raise self.wrong("$.version", f"{VERSION}, the only one that this release reads", document["version"])
        provenance = self.object("$.provenance", document["provenance"])
        for name, value in provenance.items():
            if type(value) is not str:
                raise self.wrong(f"$.provenance.{name}", "a text", value)
        metrics = self.object("$.metrics", document["metrics"])
        series = {name: self.series(f"$.metrics.{name}", value) for name, value in metrics.items()}
        given = self.object("$.tolerances", document["tolerances"])
        tolerances = {name: self.tolerance(f"$.tolerances.{name}", value) for name, value in given.items()}
        for name in tolerances:
            if name not in series:
                raise self.wrong(f"$.tolerances.{name}", "a metric of this file", name)
        return Metrics(series, tolerances, provenance, self.path)

    def bytes(self) -> bytes:
        try:
            # Looked at before it is opened: opening a named pipe would wait for a writer that may never come.
            found = os.stat(self.path)
            if not stat.S_ISREG(found.st_mode):
                kind = "a folder" if stat.S_ISDIR(found.st_mode) else "something else"
                raise self.wrong("$", "a regular file of recorded metrics", kind)
            if found.st_size > MAX_BYTES:
                raise self.wrong("$", f"a file of recorded metrics of at most {MAX_BYTES} bytes", str(found.st_size))
            with open(self.path, "rb") as stream:
                return stream.read(MAX_BYTES + 1)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise self.wrong("$", "a file of recorded metrics", reason) from None

    def once(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if name in found:
                raise ValueError(f"the name {name!r} twice in one object")
            found[name] = value
        return found

    def constant(self, text: str) -> Any:
        raise ValueError(f"{text}, which is no JSON: floats are text here")

    def object(self, where: str, value: Any) -> dict[str, Any]:
        if type(value) is not dict:
            raise self.wrong(where, "an object", value)
        return value

    def members(self, where: str, value: Any, names: tuple[str, ...]) -> None:
        members = self.object(where, value)
        if set(members) != set(names):
            raise self.wrong(where, f"the members {', '.join(names)}", ", ".join(sorted(members)) or "none")

    def tolerance(self, where: str, value: Any) -> Tolerance:
        self.members(where, value, ("reason", "ulps", "absolute", "relative"))
        try:
            return Tolerance(**value)
        except MetricStandardError as error:
            raise MetricStandardError(
                f"{self.path}: {where}.{error.where}: expected {error.expected}, found {error.found}",
                file=self.path,
                where=f"{where}.{error.where}",
                expected=error.expected,
                found=error.found,
            ) from None

    def series(self, where: str, value: Any) -> dict[int, Value]:
        self.members(where, value, ("dtype", "points"))
        dtype, points = value["dtype"], value["points"]
        if dtype not in DTYPES:
            raise self.wrong(f"{where}.dtype", f"one of {', '.join(DTYPES)}", dtype)
        if type(points) is not list or not points:
            raise self.wrong(f"{where}.points", "a list with at least one point", points)
        found: dict[int, Value] = {}
        last = -1
        for number, point in enumerate(points):
            place = f"{where}.points[{number}]"
            if type(point) is not list or len(point) not in (2, 3):
                raise self.wrong(place, "[step, value] or [step, shape, values]", point)
            step = point[0]
            if type(step) is not int or step <= last:
                raise self.wrong(f"{place}[0]", f"a step above {last}", step)
            found[step], last = self.value(place, dtype, point[1:]), step
        return found

    def value(self, place: str, dtype: str, parts: list[Any]) -> Value:
        shape, elements = ((), [parts[0]]) if len(parts) == 1 else parts
        first = f"{place}[{len(parts)}]"
        if len(parts) == 2:
            if type(shape) is not list or not shape or not all(type(size) is int and size >= 0 for size in shape):
                raise self.wrong(f"{place}[1]", "a shape: a list of sizes", shape)
            if type(elements) is not list or len(elements) != math.prod(shape):
                count = len(elements) if type(elements) is list else elements
                raise self.wrong(first, f"a list of {math.prod(shape)} values, as its shape says", count)
        bits = [self.element(first + (f"[{i}]" if shape else ""), dtype, element) for i, element in enumerate(elements)]
        return Value(dtype, tuple(shape), tuple(bits))

    def element(self, place: str, dtype: str, element: Any) -> int:
        try:
            return decode(dtype, element)
        except ValueError as error:
            raise self.wrong(place, str(error), element) from None
