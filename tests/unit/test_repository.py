"""The repository speaks of itself alone: no path of somebody's machine, no tracker, nothing left behind."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Written so that this file does not match itself.
FORBIDDEN = {
    "a folder of one machine": re.compile(r"(?<![.\w])/(?:wor[k]|roo[t]|far[m]|hom[e]/\w+|User[s]/\w+)/"),
    "a tracker that readers cannot see": re.compile(r"\b(?:issu[e]|ticke[t]|tas[k]) ?#?\d+\b", re.IGNORECASE),
    "how the work was organised": re.compile(r"\b(?:sub-?agen[t]|coordinato[r]|DEVELOPER[S]\.md|COMPAS[S]\.md)\b"),
    "an unfinished place": re.compile(r"\b(?:TOD[O]|FIXM[E]|XX[X])\b"),
    "a conflict": re.compile(r"^(?:<{7}|>{7}) ", re.MULTILINE),
}
GENERATED = {"__pycache__", ".hypothesis", ".mypy_cache", ".pytest_cache", ".ruff_cache", "build", "dist"}


def tracked_files() -> list[Path]:
    """What is in the repository; in an unpacked sdist, what is there."""
    if (ROOT / ".git").exists():
        listing = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        return [ROOT / name for name in listing.split("\0") if name and (ROOT / name).is_file()]
    return [
        path
        for path in ROOT.rglob("*")
        if path.is_file() and not any(part in GENERATED or part.startswith(".venv") for part in path.parts)
    ]


FILES = tracked_files()


def text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return ""


def test_the_search_sees_the_repository() -> None:
    assert Path(__file__) in FILES
    assert ROOT / "pyproject.toml" in FILES


@pytest.mark.parametrize("what", FORBIDDEN)
def test_no_file_holds(what: str) -> None:
    found = [
        f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, match.start()) + 1}: {match[0]}"
        for path in FILES
        for text in [text_of(path)]
        for match in FORBIDDEN[what].finditer(text)
    ]
    assert found == []


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("a folder of one machine", "see " + "/wor" + "k/notes"),
        ("a folder of one machine", '"--out ' + "/roo" + 't/out"'),
        ("a tracker that readers cannot see", "as iss" + "ue #2 says"),
        ("how the work was organised", "the coordin" + "ator decides"),
        ("an unfinished place", "# TO" + "DO: later"),
        ("a conflict", "x\n" + "<" * 7 + " HEAD"),
    ],
)
def test_the_patterns_find_what_they_are_for(what: str, text: str) -> None:
    assert FORBIDDEN[what].search(text)


@pytest.mark.parametrize("text", ["triton#9368", "sm90/mamba_ssm.json", "a.b/work/c", "tasks 3 to 5", "homework/"])
def test_the_patterns_leave_the_rest_alone(text: str) -> None:
    assert not any(pattern.search(text) for pattern in FORBIDDEN.values())


def test_the_top_level_is_small() -> None:
    top = {path.relative_to(ROOT).parts[0] for path in FILES if ".git" not in path.relative_to(ROOT).parts}
    visible = {name for name in top if not name.startswith(".")} - {"PKG-INFO"}
    assert visible <= {"README.md", "LICENSE", "bench", "pyproject.toml", "tables", "tests", "tuning"}


def test_the_ci_script_can_be_run() -> None:
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
