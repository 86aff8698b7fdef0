"""A picture of a comparison of metrics: the series of both sides, and how many ulp lie between them."""

from __future__ import annotations

import html
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .._atomic import write_atomically
from ..errors import MetricStandardError
from .metrics import MetricComparison, Metrics
from .metrics_values import Value, as_number, ulp_distance

__all__ = ["PLOT_SUFFIXES", "plot_metrics"]

PLOT_SUFFIXES = (".html", ".png", ".svg")
_MOST = 12
"""Metrics in one picture; those that differ come first."""


def plot_metrics(path: str | os.PathLike[str], standard: Metrics, run: Metrics, comparison: MetricComparison) -> None:
    """Draw, for each metric that both sides have, its two series above the distance between them in ulp.

    Of a tensor the first element that differs is drawn, else the first. ``.html`` holds the picture and the differences
    as text, without anything from elsewhere.

    Args:
        path: where to; the suffix, ``.html``, ``.png`` or ``.svg``, says what is written.
        standard: the one side.
        run: the other.
        comparison: of the two.

    Raises:
        MetricStandardError: the suffix is another, matplotlib is not installed, or the file cannot be written.
    """
    file = Path(path)
    suffix = file.suffix.lower()
    if suffix not in PLOT_SUFFIXES:
        expected = f"a name that ends in {', '.join(PLOT_SUFFIXES)}"
        raise MetricStandardError(
            f"{file}: expected {expected}, found {suffix or 'no suffix'}",
            file=str(file),
            expected=expected,
            found=suffix,
        )
    drawn = _draw(standard, run, comparison, "png" if suffix == ".png" else "svg")
    if suffix == ".html":
        text = html.escape(comparison.text(limit=200))
        svg = drawn.decode()[drawn.decode().index("<svg") :]
        title = "Metrics beside their standard"
        drawn = (
            f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title></head>\n'
            f"<body>\n<h1>{title}</h1>\n<pre>{text}</pre>\n{svg}\n</body></html>\n"
        ).encode("utf-8", "backslashreplace")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, drawn)
    except OSError as error:
        raise MetricStandardError(
            f"{file}: expected a place to write to, found: {error.strerror or error}", file=str(file)
        ) from None


def _draw(standard: Metrics, run: Metrics, comparison: MetricComparison, kind: str) -> bytes:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MetricStandardError(
            "a plot: expected matplotlib, found none: pip install 'triton-tuning[plot]'",
            expected="matplotlib",
            found="no such package",
        ) from None
    differing = {difference.metric: difference.index or 0 for difference in reversed(comparison.differences)}
    common = sorted(standard.series.keys() & run.series.keys(), key=lambda name: (name not in differing, name))[:_MOST]
    figure = Figure(figsize=(8, 1 + 3.2 * max(len(common), 1)), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.subplots(2 * len(common), 1, squeeze=False, height_ratios=[2, 1] * len(common)) if common else []
    if not common:
        figure.suptitle("no metric in common")
    for number, name in enumerate(common):
        there, here = standard.series[name], run.series[name]
        index = differing.get(name, 0)
        above, below = axes[2 * number][0], axes[2 * number + 1][0]
        above.plot(*_line(there, index), color="0.6", linewidth=3, label="standard")
        above.plot(*_line(here, index), color="tab:blue", linewidth=1, label="run")
        above.set_title(_plain(name))
        above.legend(loc="best", fontsize="small")
        steps = [step for step in there if step in here and _same_kind(there[step], here[step], index)]
        far = [ulp_distance(there[step].dtype, there[step].bits[index], here[step].bits[index]) for step in steps]
        below.bar(steps, [distance or 0 for distance in far], color="tab:red")
        below.set_ylabel("ulp")
        below.set_yscale("symlog")
        below.set_xlabel("step")
        first = min((d.step for d in comparison.differences if d.metric == name and d.step is not None), default=None)
        if first is not None:
            for axis in (above, below):
                axis.axvline(first, color="tab:red", linestyle=":", linewidth=1)
    stream = io.BytesIO()
    figure.savefig(stream, format=kind)
    return stream.getvalue()


def _line(series: Mapping[int, Value], index: int) -> tuple[list[int], list[float]]:
    steps = [step for step, value in series.items() if index < len(value.bits)]
    return steps, [as_number(series[step].dtype, series[step].bits[index]) for step in steps]


def _same_kind(there: Value, here: Value, index: int) -> bool:
    return there.dtype == here.dtype and index < min(len(there.bits), len(here.bits))


def _plain(name: str) -> str:
    """A name without what matplotlib would read as mathematics, or could not draw."""
    return name.encode("utf-8", "backslashreplace").decode().replace("$", r"\$")
