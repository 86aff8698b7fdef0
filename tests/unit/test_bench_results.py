"""What a result says of how it was made: the command, and nothing of the machine's folders."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import results

RESULTS = sorted((Path(__file__).parents[2] / "bench" / "results").glob("*.json"))


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("launch", "launch"),
        ("launch --out /somewhere/out --name x", "launch --out DIR --name x"),
        ("ssd --keep=/tmp/ssd --out=out --steps 3", "ssd --keep=DIR --out=DIR --steps 3"),
        ("ssd --ou out --k keep", "ssd --ou DIR --k DIR"),
        ("ssd --steps 3 --outer x -- --", "ssd --steps 3 --outer x -- --"),
    ],
)
def test_the_command_of_a_result_is_without_folders(
    arguments: str, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", *arguments.split()])
    assert results.circumstances()["command"] == f"python -m bench {shown}"


def test_an_argument_with_a_space_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["bench", "launch", "--name", "a name"])
    assert results.circumstances()["command"] == "python -m bench launch --name 'a name'"


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_the_results_that_are_kept_name_no_folder_in_their_command(path: Path) -> None:
    found = json.loads(path.read_text())
    command = found.get("command") or found.get("circumstances", {}).get("command")
    assert command
    assert not [part for part in command.split() if part.startswith(("/", "~"))]


def test_a_commit_says_when_the_files_are_not_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> None:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    monkeypatch.delenv("BENCH_COMMIT", raising=False)
    monkeypatch.setattr(results, "__file__", str(tmp_path / "results.py"))
    assert results.circumstances()["commit"] == "unknown"
    (tmp_path / "file").write_text("one")
    for arguments in (["init"], ["add", "file"], ["commit", "-m", "one"], ["tag", "-m", "a", "v1"]):
        git(*arguments)
    clean = results.circumstances()["commit"]
    assert len(clean) >= 7
    assert "v1" not in clean
    (tmp_path / "file").write_text("two")
    assert results.circumstances()["commit"] == f"{clean}-dirty"
    monkeypatch.setenv("BENCH_COMMIT", "given")
    assert results.circumstances()["commit"] == "given"


def test_a_result_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = results.write("a", {"n": 1, "device": "none"}, tmp_path)
    monkeypatch.setattr(Path, "replace", lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        results.write("a", {"n": 2, "device": "none"}, tmp_path)
    assert json.loads(path.read_text()) == {"n": 1, "device": "none"}
