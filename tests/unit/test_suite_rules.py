"""What tests/conftest.py promises, shown on a small suite of its own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"
CONFIG = """
[pytest]
addopts = -p no:cacheprovider -p no:xdist -ra --strict-markers --continue-on-collection-errors
markers =
    gpu: x
    multiprocess: x
    peers: x
"""
SUITE = {
    "peers/test_marked.py": "import pytest\n@pytest.mark.peers('json', 'no_such_peer')\ndef test_it(): pass\n",
    "peers/test_imports.py": "import pytest\npytest.importorskip('no_such_peer')\ndef test_it(): pass\n",
    "peers/test_imports_late.py": "import pytest\ndef test_it(): pytest.importorskip('no_such_peer')\n",
    "peers/test_other_reason.py": "import pytest\ndef test_it(): pytest.skip('this version has no such kernel')\n",
    "peers/test_present.py": "import pytest\n@pytest.mark.peers('json')\ndef test_it(): pass\n",
    "unit/test_marked_elsewhere.py": "import pytest\n@pytest.mark.peers('no_such_peer.part')\ndef test_it(): pass\n",
    "unit/test_optional.py": "import pytest\npytest.importorskip('no_such_peer')\ndef test_it(): pass\n",
    "multiprocess/test_several.py": (
        "def test_it(request): assert [m.name for m in request.node.iter_markers()] == ['multiprocess']\n"
    ),
    "unit/test_cache.py": (
        "import os\ndef test_it(): assert os.listdir(os.environ['TRITON_CACHE_DIR']) == []\n"
        "def test_given(): assert os.environ['TRITON_CACHE_DIR'] != os.environ.get('MINE')\n"
    ),
}
MISSING = {"marked", "imports", "imports_late", "marked_elsewhere"}
OTHERWISE_SKIPPED = {"optional", "other_reason"}
ON_A_GPU = {"gpu/test_device.py": "def test_it(): pass\n"}


def run(folder: Path, suite: dict[str, str] = SUITE, **environment: str) -> subprocess.CompletedProcess[str]:
    (folder / "pytest.ini").write_text(CONFIG)
    for file, source in suite.items():
        path = folder / "tests" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    shutil.copy(CONFTEST, folder / "tests")
    unset = ("CI", "TRITON_TUNING_REQUIRE_PEERS", "TRITON_CACHE_DIR")
    inherited = {name: value for name, value in os.environ.items() if name not in unset}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "--junitxml=report.xml"],
        cwd=folder,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def outcomes(folder: Path) -> dict[str, set[str]]:
    """Outcome (an empty word where it passed) to the files that have it."""
    found: dict[str, set[str]] = {}
    for case in ElementTree.parse(folder / "report.xml").iter("testcase"):
        file = re.search(r"test_(\w+)$", case.get("classname") or case.get("name", ""))
        assert file is not None
        found.setdefault(next((child.tag for child in case), ""), set()).add(file[1])
    return found


@pytest.mark.parametrize(
    "environment", [{}, {"CI": "true", "TRITON_TUNING_REQUIRE_PEERS": "0"}], ids=["by_hand", "waived"]
)
def test_a_missing_peer_is_skipped(tmp_path: Path, environment: dict[str, str]) -> None:
    result = run(tmp_path, **environment)
    assert result.returncode == 0, result.stdout
    assert outcomes(tmp_path) == {"": {"present", "several", "cache"}, "skipped": MISSING | OTHERWISE_SKIPPED}


@pytest.mark.parametrize("environment", [{"CI": "true"}, {"TRITON_TUNING_REQUIRE_PEERS": "1"}], ids=["ci", "asked"])
def test_a_missing_peer_fails_where_peers_are_required(tmp_path: Path, environment: dict[str, str]) -> None:
    result = run(tmp_path, **environment)
    assert result.returncode == 1, result.stdout
    assert outcomes(tmp_path) == {
        "": {"present", "several", "cache"},
        "skipped": OTHERWISE_SKIPPED,
        "failure": {"imports_late"},
        "error": MISSING - {"imports_late"},
    }
    assert "third-party packages are required here" in result.stdout


def test_a_gpu_test_skips_itself_without_a_device(tmp_path: Path) -> None:
    result = run(tmp_path, ON_A_GPU, CUDA_VISIBLE_DEVICES="")
    assert outcomes(tmp_path) == {"skipped": {"device"}}
    assert "needs a CUDA device; torch" in result.stdout


def test_a_wrong_setting_ends_the_run(tmp_path: Path) -> None:
    result = run(tmp_path, TRITON_TUNING_REQUIRE_PEERS="yes")
    assert result.returncode == pytest.ExitCode.USAGE_ERROR
    assert "TRITON_TUNING_REQUIRE_PEERS must be 0 or 1, got 'yes'" in result.stdout + result.stderr


def test_a_given_cache_folder_is_kept(tmp_path: Path) -> None:
    mine = tmp_path / "cache"
    mine.mkdir()
    run(tmp_path, TRITON_CACHE_DIR=str(mine), MINE=str(mine))
    assert outcomes(tmp_path)["failure"] == {"cache"}
    assert mine.exists()


@pytest.mark.parametrize(
    ("cases", "line", "status"),
    [
        ("<testcase/><testcase><skipped/></testcase>", "1 passed, 0 failed, 1 skipped", 0),
        ("<testcase/><testcase><failure/></testcase>", "1 passed, 1 failed, 0 skipped", 1),
        ("<testcase/><testcase><error/></testcase>", "1 passed, 1 failed, 0 skipped", 1),
        ("<testcase><skipped/></testcase>", "0 passed, 0 failed, 1 skipped", 1),
        ("", "0 passed, 0 failed, 0 skipped", 1),
    ],
)
def test_a_run_without_tests_is_no_success(tmp_path: Path, cases: str, line: str, status: int) -> None:
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")
    command = [sys.executable, str(CONFTEST.parents[1] / ".ci" / "count.py"), str(report)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.stdout.strip(), result.returncode) == (line, status)
