"""The pytest plugin: a fixture that holds the metrics of a test against a committed standard.

::

    def test_training(metric_standard):
        for step, batch in enumerate(batches):
            metric_standard.record("loss", train_step(batch), step)

The standard is a file in the folder ``standards`` beside the test's, ``<module>/<test>.json``. It is written by
``pytest --record-metric-standards`` alone, which refuses under CI; without a standard the test fails. The comparison
belongs to the test: a difference is a failure of it, not an error after it. ``--metric-plots FOLDER`` draws what
differs.
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from ..errors import MetricStandardError
from .metrics import MetricRecorder, compare_metrics
from .metrics_file import read_metrics, record_standard, refuse_under_ci

__all__ = [
    "MetricStandard",
    "metric_standard",
    "pytest_addoption",
    "pytest_configure",
    "pytest_runtest_call",
    "pytest_terminal_summary",
]

_OPTION = "--record-metric-standards"
_RECORDED = pytest.StashKey[list[str]]()
_STANDARDS = pytest.StashKey["list[MetricStandard]"]()
_PASSED = pytest.StashKey[bool]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("metric standards")
    group.addoption(
        _OPTION,
        action="store_true",
        dest="record_metric_standards",
        help="write the standards of the tests that run, instead of comparing with them; refused under CI",
    )
    group.addoption(
        "--metric-plots",
        metavar="FOLDER",
        help="for each test whose metrics differ, draw them in this folder (needs matplotlib)",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Refuse to record under CI, before any test runs."""
    config.stash[_RECORDED] = []
    if config.getoption("record_metric_standards"):
        try:
            refuse_under_ci()
        except MetricStandardError as error:
            raise pytest.UsageError(f"{_OPTION}: {error}") from None


class MetricStandard:
    """What the fixture gives: a recorder whose run is compared with the standard when the test has passed.

    Attributes:
        path: file of the standard.
        recorder: takes the metrics; see :class:`tuning.bitexact.metrics.MetricRecorder`.
        checked: whether the comparison, or the recording, has been.
    """

    def __init__(self, path: Path, *, rewrite: bool, plots: Path | None, again: str = f"pytest {_OPTION}") -> None:
        self.path = path
        self.recorder = MetricRecorder()
        self._rewrite = rewrite
        self._plots = plots
        self._again = again
        self._checked = False

    @property
    def checked(self) -> bool:
        """Whether the comparison, or the recording, has been."""
        return self._checked

    def record(self, name: str, value: Any, step: int | None = None) -> None:
        """Record what a metric is at a step; see :meth:`tuning.bitexact.metrics.MetricRecorder.record`.

        Raises:
            MetricStandardError: as there; or the test is over, and what comes now would be held against nothing.
        """
        if self._checked:
            raise MetricStandardError(
                f"metric {name!r}: expected it to be recorded while the test runs, found the comparison done: "
                "record it in the test, not in what tears it down",
                where=name,
            )
        self.recorder.record(name, value, step)

    def tolerate(self, name: str, *, reason: str, ulps: int = 0, absolute: float = 0.0, relative: float = 0.0) -> None:
        """Declare how far a metric may be off; see :meth:`tuning.bitexact.metrics.MetricRecorder.tolerate`."""
        self.recorder.tolerate(name, reason=reason, ulps=ulps, absolute=absolute, relative=relative)

    def variant(self, name: str) -> None:
        """Use a standard of its own for this device or set-up, such as ``sm90``: ``<test>.<name>.json``.

        Raises:
            MetricStandardError: the name has other characters than letters, digits, ``_`` and ``-``.
        """
        if not re.fullmatch(r"[\w-]+", name, re.ASCII):
            raise MetricStandardError(
                f"variant: expected letters, digits, _ and -, found {name!r}", where="variant", found=repr(name)
            )
        self.path = self.path.with_name(f"{self.path.name.removesuffix('.json')}.{name}.json")

    def check(self) -> bool:
        """Compare with the standard, or write it where that is asked for.

        Returns:
            Whether it was written.

        Raises:
            MetricStandardError: there is no standard, or it cannot be read or written; or nothing was recorded.
            AssertionError: the metrics differ from it.
        """
        self._checked = True
        run = self.recorder.finish()
        if not run.series:
            raise MetricStandardError("metric_standard: expected at least one metric to be recorded, found none")
        if self._rewrite:
            record_standard(self.path, run)
            return True
        if not self.path.exists():
            raise MetricStandardError(
                f"{self.path}: expected a standard of this test's metrics, found none: record it with "
                f"{self._again}, review it, and commit it",
                file=str(self.path),
            )
        standard = read_metrics(self.path)
        comparison = compare_metrics(standard, run)
        if comparison.passed:
            return False
        text = f"{self.path}: {comparison.text()}"
        text += f"\n  if the change is meant, record it with {self._again}, review it, and commit it"
        if self._plots is not None:
            from .metrics_plot import plot_metrics

            picture = self._plots / f"{self.path.parent.name}.{self.path.name.removesuffix('.json')}.html"
            plot_metrics(picture, standard, run, comparison)
            text += f"\n  drawn in {picture}"
        raise AssertionError(text)


@pytest.fixture
def metric_standard(request: pytest.FixtureRequest) -> Generator[MetricStandard, None, None]:
    """Holds the metrics of this test against its committed standard; see the plugin's documentation."""
    plots = request.config.getoption("metric_plots")
    rewrite = bool(request.config.getoption("record_metric_standards"))
    folder = request.path.parent / "standards" / request.path.stem
    plots = None if plots is None else request.config.invocation_params.dir / plots
    again = f"pytest {_OPTION} {shlex.quote(request.node.nodeid)}"
    standard = MetricStandard(folder / _file_name(request.node), rewrite=rewrite, plots=plots, again=again)
    # Not looked up among the test's arguments: a fixture of the user's own may have asked for this one while it ran.
    standards = request.node.stash.setdefault(_STANDARDS, [])
    standards.append(standard)
    yield standard
    standards.remove(standard)
    if not standard.checked and request.node.stash.get(_PASSED, False):
        pytest.fail("metric_standard: expected to be asked for before the test is over, found it not", pytrace=False)


def _file_name(item: pytest.Item) -> str:
    """One for each test of a module: its name with its class and parameters; a digest where that is no file name."""
    name = item.nodeid.partition("::")[2].replace("::", ".")
    plain = re.sub(r"[^A-Za-z0-9_.\[\]=-]", "_", name)[:100]
    return f"{plain}.json" if plain == name else f"{plain}-{hashlib.sha256(name.encode()).hexdigest()[:8]}.json"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Compare in the call phase, so that a difference fails the test."""
    __tracebackhide__ = True
    item.stash[_PASSED] = False
    result = yield
    item.stash[_PASSED] = True
    for standard in item.stash.get(_STANDARDS, []):
        problem = None
        try:
            written = standard.check()
        except (AssertionError, MetricStandardError) as error:
            problem = str(error)
        if problem is not None:  # raised here, not above, or the report would tell it twice
            pytest.fail(problem, pytrace=False)
        if written:
            item.config.stash[_RECORDED].append(os.fspath(standard.path))
            item.user_properties.append(("metric_standard_recorded", os.fspath(standard.path)))
    return result


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say which standards were written."""
    # Of workers (pytest-xdist) only the reports arrive, with what the test said of itself.
    told = {
        str(value)
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == "metric_standard_recorded"
    }
    written = sorted({*terminalreporter.config.stash.get(_RECORDED, []), *told})
    if written:
        terminalreporter.section("metric standards recorded: review and commit them")
        for path in written:
            terminalreporter.line(path)
