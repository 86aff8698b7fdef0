"""Record every metric series of a short run, and compare later runs with it bit for bit.

::

    recorder = MetricRecorder()
    for batch in batches:
        loss = train_step(batch)
        recorder.record("loss", loss)
    run = recorder.finish()
    comparison = compare_metrics(read_metrics("loss.json"), run)
    assert comparison.passed, comparison.text()

The recorded run that others are held against is called the standard, and is committed. A value counts by its bytes:
``0.0`` and ``-0.0`` differ, so do NaNs of different payload, and so does another dtype. A metric, or a step of one,
that only one side has is a difference. A :class:`Tolerance` can be declared for a metric that is known not to be
bit-exact; it has to give its reason, and stands in the standard, so that a review sees it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from .._words import counted
from ..errors import MetricStandardError
from ..spec import Json
from .metrics_values import Value, dtype_of, encode, exactly, ulp_distance, value_of

__all__ = [
    "MetricComparison",
    "MetricDifference",
    "MetricRecorder",
    "Metrics",
    "Tolerance",
    "compare_metrics",
]


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """How far a metric may lie from its standard, element by element: within ``ulps``, or within the other two.

    Attributes:
        reason: why this metric is not bit-exact; not empty.
        ulps: as many steps of the dtype. 1 and more let the sign of a zero differ. Means nothing for integers.
        absolute: in the unit of the metric ...
        relative: ... plus this much of the standard's magnitude.
    """

    reason: str
    ulps: int = 0
    absolute: float = 0.0
    relative: float = 0.0

    def __post_init__(self) -> None:
        if type(self.reason) is not str or not self.reason.strip():
            raise _refused("a tolerance", "reason", "why the metric is not bit-exact, in words", self.reason)
        if type(self.ulps) is not int or self.ulps < 0:
            raise _refused("a tolerance", "ulps", "a whole number of at least 0", self.ulps)
        for name in ("absolute", "relative"):
            number = getattr(self, name)
            if type(number) not in (int, float) or not 0 <= number < math.inf:
                raise _refused("a tolerance", name, "a finite number of at least 0", number)
            try:
                object.__setattr__(self, name, float(number))
            except OverflowError:
                raise _refused("a tolerance", name, "a number that a float can hold", "a larger one") from None
        if not (self.ulps or self.absolute or self.relative):
            raise _refused("a tolerance", "ulps", "ulps, absolute or relative above 0", "none of them")

    def allows(self, dtype: str, standard: int, found: int) -> bool:
        """Whether one element, given as bits, is near enough. A NaN or an infinity is near nothing but itself."""
        if standard == found:
            return True
        there, here = exactly(dtype, standard), exactly(dtype, found)
        if there is None or here is None:
            return False
        distance = ulp_distance(dtype, standard, found)
        if distance is not None and distance <= self.ulps and self.ulps:
            return True
        return abs(here - there) <= Fraction(self.absolute) + Fraction(self.relative) * abs(there)

    def __str__(self) -> str:
        parts = [f"{self.ulps} ulp"] if self.ulps else []
        parts += [f"absolute {self.absolute:g}"] if self.absolute else []
        parts += [f"relative {self.relative:g}"] if self.relative else []
        return f"{', '.join(parts)} ({self.reason})"


def _refused(what: str, where: str, expected: str, found: object) -> MetricStandardError:
    shown = repr(found)[:60]
    return MetricStandardError(
        f"{what}: {where}: expected {expected}, found {shown}", where=where, expected=expected, found=shown
    )


@dataclass(frozen=True)
class Metrics:
    """What one run recorded.

    Attributes:
        series: for each metric its value at each step, steps ascending.
        tolerances: for each metric that is not held bit for bit, how far it may be off.
        provenance: where, when and with what it was recorded, as text by name.
        path: the file it was read from, or None.
    """

    series: Mapping[str, Mapping[int, Value]]
    tolerances: Mapping[str, Tolerance] = field(default_factory=dict)
    provenance: Mapping[str, str] = field(default_factory=dict)
    path: str | None = None


class MetricRecorder:
    """Collects the metrics of a run.

    A tensor is copied on its device when it is recorded, and read when the run is finished: recording does not wait for
    the GPU. Of a sharded tensor (``DTensor``) the whole is recorded, so that all ranks of its mesh must record it.
    """

    def __init__(self) -> None:
        self._series: dict[str, dict[int, Any]] = {}
        self._dtypes: dict[str, str] = {}
        self._tolerances: dict[str, Tolerance] = {}

    def record(self, name: str, value: Any, step: int | None = None) -> None:
        """Record what a metric is at a step.

        Args:
            name: of the metric; any text.
            value: a Python number, a numpy scalar or array, or a tensor, of any shape.
            step: a whole number of at least 0, once for each metric; None: one more than the metric's highest so far.

        Raises:
            MetricStandardError: the value, its dtype, the step or the name cannot be recorded.
        """
        if type(name) is not str or not name:
            raise _refused("a metric", "name", "a text that is not empty", name)
        series = self._series.get(name, {})
        if step is None:
            step = max(series, default=-1) + 1
        if type(step) is not int or step < 0:
            raise _refused(f"metric {name!r}", "step", "a whole number of at least 0", step)
        if step in series:
            raise _refused(f"metric {name!r}", f"step {step}", "each step once", "a second value")
        if hasattr(value, "full_tensor"):
            value = value.full_tensor()
        try:
            dtype = dtype_of(value)
            kept = value.detach().clone() if hasattr(value, "detach") else value_of(value)
        except TypeError as error:
            raise MetricStandardError(f"metric {name!r}, step {step}: {error}", where=name) from None
        known = self._dtypes.setdefault(name, dtype)
        if dtype != known:
            raise _refused(f"metric {name!r}", f"step {step}", f"{known}, as before", dtype)
        self._series.setdefault(name, {})[step] = kept

    def tolerate(self, name: str, *, reason: str, ulps: int = 0, absolute: float = 0.0, relative: float = 0.0) -> None:
        """Declare how far a metric may be off; see :class:`Tolerance`.

        Raises:
            MetricStandardError: a value cannot be used, or the metric has another tolerance already.
        """
        tolerance = Tolerance(reason=reason, ulps=ulps, absolute=absolute, relative=relative)
        if self._tolerances.setdefault(name, tolerance) != tolerance:
            raise _refused(f"metric {name!r}", "tolerance", f"one, {self._tolerances[name]}", str(tolerance))

    def finish(self) -> Metrics:
        """What was recorded so far, with its provenance; waits for the device.

        Raises:
            MetricStandardError: a tolerance was declared for a metric that was never recorded.
        """
        from .metrics_file import provenance

        unknown = sorted(set(self._tolerances) - set(self._series))
        if unknown:
            raise _refused(f"metric {unknown[0]!r}", "tolerance", "a metric that is recorded", "no value of it")
        series = {
            name: {step: kept if isinstance(kept, Value) else value_of(kept) for step, kept in sorted(points.items())}
            for name, points in sorted(self._series.items())
        }
        return Metrics(series, dict(self._tolerances), provenance())


@dataclass(frozen=True)
class MetricDifference:
    """One place where a run is not its standard.

    Attributes:
        metric: its name.
        step: where; None where the metric as a whole differs.
        index: of the element in row-major order; None for a single number, or where the value as a whole differs.
        what: ``value``, ``dtype``, ``shape``, ``missing`` (the standard alone has it) or ``extra`` (the run alone).
        standard: what the standard holds, as it stands in the file; None where there is nothing.
        found: what the run holds.
        ulps: the distance in steps of the dtype, where there is one.
        elements: how many elements of the value differ.
    """

    metric: str
    step: int | None
    index: int | None
    what: str
    standard: str | None
    found: str | None
    ulps: int | None = None
    elements: int = 1

    def __str__(self) -> str:
        place = f"{self.metric}" + ("" if self.step is None else f", step {self.step}")
        place += "" if self.index is None else f", element {self.index}"
        standard, found = _with_decimal(self.standard), _with_decimal(self.found)
        if self.what == "missing":
            return f"{place}: missing: the standard has {standard}"
        if self.what == "extra":
            return f"{place}: not in the standard: found {found}"
        text = f"{place}: {'' if self.what == 'value' else self.what + ' '}{standard} became {found}"
        if self.what == "value":
            far = {None: "", 0: ", another sign of zero"}.get(self.ulps, f", {self.ulps} ulp away")
            text += far + (f"; {self.elements} elements of it differ" if self.elements > 1 else "")
        return text


def _with_decimal(text: str | None) -> str | None:
    """The text that carries every bit, and beside it the number as a person reads it."""
    if text is None or not text.startswith(("0x", "-0x")):
        return text
    return f"{text} ({float.fromhex(text)!r})"


@dataclass(frozen=True)
class MetricComparison:
    """What comparing a run with its standard found.

    Attributes:
        differences: by step, those of whole metrics first; what a tolerance allows is not among them.
        compared: how many values both sides have.
        tolerated: how many of them differ as far as their tolerance allows.
        circumstances: what of the provenance differs, as ``(name, standard, run)``; a hint, never a difference.
    """

    differences: tuple[MetricDifference, ...]
    compared: int
    tolerated: int
    circumstances: tuple[tuple[str, str, str], ...] = ()

    @property
    def passed(self) -> bool:
        """No difference but for what tolerances allow."""
        return not self.differences

    @property
    def first(self) -> MetricDifference | None:
        """The difference at the earliest step; None where there is none."""
        at_steps = [difference for difference in self.differences if difference.step is not None]
        return next(iter([*at_steps, *self.differences]), None)

    def text(self, *, limit: int = 10) -> str:
        """For a person: the verdict, the first step that differs, then up to ``limit`` differences."""
        tolerated = f", {self.tolerated} of them within their tolerance" if self.tolerated else ""
        if self.passed:
            return f"equal bit for bit to the standard: {counted(self.compared, 'value')}{tolerated}"
        first = self.first
        where = "" if first is None or first.step is None else f", the first at step {first.step}"
        many = counted(len(self.differences), "difference")
        lines = [f"{many} from the standard{where} ({self.compared} compared{tolerated})"]
        lines += [f"  {difference}" for difference in self.differences[:limit]]
        if len(self.differences) > limit:
            lines.append(f"  and {len(self.differences) - limit} more")
        changed = ", ".join(f"{name} {there}, here {here}" for name, there, here in self.circumstances)
        if changed:
            lines.append(f"  recorded elsewhere: {changed}")
        return "\n".join(lines)

    def to_json(self) -> dict[str, Json]:
        """As ``triton-tuning metrics compare --json`` prints it."""
        return {
            "version": 1,
            "passed": self.passed,
            "compared": self.compared,
            "tolerated": self.tolerated,
            "first_step": None if self.first is None else self.first.step,
            "differences": [dict(vars(difference)) for difference in self.differences],
            "circumstances": [list(changed) for changed in self.circumstances],
        }


def compare_metrics(standard: Metrics, run: Metrics) -> MetricComparison:
    """Compare bit for bit, but for what the standard's tolerances allow.

    Raises:
        MetricStandardError: the run declares a tolerance that the standard does not hold. (One that the run does not
            speak of, as one read from a file, counts as the standard has it.) Or neither side has a metric: that
            nothing differs from nothing shows nothing.
    """
    if not standard.series and not run.series:
        what = f"{standard.path or 'the standard'} and {run.path or 'the run'}"
        raise MetricStandardError(
            f"{what}: expected at least one metric to compare, found none: record the metrics that are to be held",
            file=standard.path,
            expected="at least one metric",
            found="none",
        )
    for name, declared in run.tolerances.items():
        held = standard.tolerances.get(name)
        if name in standard.series and held != declared:
            what = f"metric {name!r}: tolerance: expected what the standard holds, {held or 'none: bit for bit'}"
            raise MetricStandardError(
                f"{what}, found {declared}; record the standard again to change it",
                file=standard.path,
                where=name,
                expected=str(held or "none"),
                found=str(declared),
            )
    found: list[MetricDifference] = []
    compared = tolerated = 0
    for name in sorted({*standard.series, *run.series}):
        there, here = standard.series.get(name), run.series.get(name)
        if there is None or here is None:
            side, what = (here, "extra") if there is None else (there, "missing")
            texts = _sides(what, counted(len(side or ()), "step"))
            found.append(MetricDifference(name, None, None, what, *texts))
            continue
        for step in sorted({*there, *here}):
            if step not in there or step not in here:
                what = "extra" if step in here else "missing"
                texts = _sides(what, _text((here if step in here else there)[step]))
                found.append(MetricDifference(name, step, None, what, *texts))
                continue
            compared += 1
            difference, within = _difference(name, step, there[step], here[step], standard.tolerances.get(name))
            tolerated += within
            found += [difference] if difference is not None else []
    found.sort(key=lambda difference: (-1 if difference.step is None else difference.step, difference.metric))
    mine, theirs = run.provenance, standard.provenance
    changed = [
        (name, theirs[name], mine[name])
        for name in sorted({*mine} & {*theirs} - {"date"})
        if mine[name] != theirs[name]
    ]
    return MetricComparison(tuple(found), compared, tolerated, tuple(changed))


def _sides(what: str, text: str) -> tuple[str | None, str | None]:
    return (None, text) if what == "extra" else (text, None)


def _text(value: Value) -> str:
    if not value.shape:
        return str(encode(value.dtype, value.bits[0]))
    return counted(len(value.bits), "element")


def _difference(
    name: str, step: int, there: Value, here: Value, tolerance: Tolerance | None
) -> tuple[MetricDifference | None, bool]:
    """The first element that differs beyond its tolerance, and whether the value differs within it."""
    for what in ("dtype", "shape"):
        old, new = getattr(there, what), getattr(here, what)
        if old != new:
            return MetricDifference(name, step, None, what, str(old), str(new)), False
    if there.bits == here.bits:
        return None, False
    dtype = there.dtype
    pairs: Sequence[tuple[int, tuple[int, int]]] = [
        (index, pair) for index, pair in enumerate(zip(there.bits, here.bits, strict=True)) if pair[0] != pair[1]
    ]
    beyond = [(i, pair) for i, pair in pairs if tolerance is None or not tolerance.allows(dtype, *pair)]
    if not beyond:
        return None, True
    index, (old, new) = beyond[0]
    return MetricDifference(
        name,
        step,
        index if there.shape else None,
        "value",
        str(encode(dtype, old)),
        str(encode(dtype, new)),
        ulp_distance(dtype, old, new),
        len(beyond),
    ), False
