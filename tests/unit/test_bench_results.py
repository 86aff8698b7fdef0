"""What a result says of how it was made: the command, and nothing of the machine's folders."""

from __future__ import annotations

import json
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
