"""What every test can rely on: what needs a GPU or a third-party package says so, and nothing comes from earlier runs.

``TRITON_TUNING_REQUIRE_PEERS=1`` (the default where ``CI=true``) turns a test that is skipped because a third-party
package is missing into a failure: there, the packages are installed on purpose.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

TESTS = Path(__file__).parent
FOLDERS_THAT_MARK = ("gpu", "multiprocess", "peers")
ABSENT = re.compile(r"could not import|no module named|not installed|not importable", re.IGNORECASE)

# Without a clock, a random seed or a database of earlier failures, a run depends on the code alone.
# Explaining a failure traces every line of every example, failing or not: the fuzz tests would take many times as long.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate, Phase.target, Phase.shrink)
settings.register_profile("deterministic", derandomize=True, deadline=None, database=None, phases=PHASES)
settings.register_profile("explore", deadline=None, max_examples=2000, phases=PHASES)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "deterministic"))


def peers_are_required() -> bool:
    """Whether a missing third-party package is a failure."""
    value = os.environ.get("TRITON_TUNING_REQUIRE_PEERS")
    if value is None:
        return os.environ.get("CI") == "true"
    if value not in ("0", "1"):
        raise pytest.UsageError(f"TRITON_TUNING_REQUIRE_PEERS must be 0 or 1, got {value!r}")
    return value == "1"


def is_installed(package: str) -> bool:
    """Whether ``package`` can be found, without running it."""
    if package in sys.modules:  # a test may have put a bare module there, which has no spec
        return True
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:
        return False


def no_cuda_reason() -> str | None:
    """Why there is no CUDA device, or None where there is one."""
    if not is_installed("torch"):
        return "needs a CUDA device; torch is not installed"
    import torch

    return None if torch.cuda.is_available() else "needs a CUDA device; torch.cuda.is_available() is False"


def pytest_configure(config: pytest.Config) -> None:
    peers_are_required()  # a wrong value ends the run at once
    if "TRITON_CACHE_DIR" not in os.environ:
        # Triton (and FLA through it) keeps timings on disk; a run must not see those of an earlier one.
        folder = tempfile.TemporaryDirectory(prefix="triton-tuning-tests-", ignore_cleanup_errors=True)
        os.environ["TRITON_CACHE_DIR"] = folder.name
        config.add_cleanup(folder.cleanup)
        config.add_cleanup(lambda: os.environ.pop("TRITON_CACHE_DIR", None))


def folder_of(path: Path) -> str:
    """The kind of test, which is the folder right under ``tests``."""
    return path.relative_to(TESTS).parts[0] if TESTS in path.parents else ""


@pytest.hookimpl(tryfirst=True)  # before `-m` selects
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if (kind := folder_of(item.path)) in FOLDERS_THAT_MARK:
            item.add_marker(kind)


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := no_cuda_reason()):
        pytest.skip(reason)
    for marker in item.iter_markers("peers"):
        if missing := [name for name in marker.args if not is_installed(name)]:
            pytest.skip(f"not installed: {', '.join(missing)}")


def fail_if_peer_is_missing(report: Any) -> None:
    """Turn a skip for want of a third-party package into a failure, where those are required."""
    if report.skipped and not hasattr(report, "wasxfail") and peers_are_required():
        reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if ABSENT.search(reason):
            report.outcome = "failed"
            report.longrepr = f"third-party packages are required here (TRITON_TUNING_REQUIRE_PEERS or CI): {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if item.get_closest_marker("peers"):
        fail_if_peer_is_missing(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if folder_of(collector.path) == "peers":
        fail_if_peer_is_missing(report)
    return report
