"""What the demo prints."""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Sequence
from typing import Any

from ._console import Console, shorten_path
from ._words import counted
from .demo import Demo
from .spec import Json

__all__ = ["show"]

_SHOWN = 3  # disagreements; each takes several lines


def show(console: Console, demo: Demo) -> None:
    """Print a demo's result."""
    where = "Triton's interpreter, on the CPU" if demo.device == "interpreter" else demo.device
    versions = ", ".join(f"{name} {version}" for name, version in demo.versions.items())
    console.heading("What ran")
    console.text(f"{demo.title}, from {demo.package}, on {where} ({versions})", indent=2, hanging=2)
    console.heading("Stages")
    for name, found in demo.stages.items():
        console.text(f"{name:<8}{found['seconds']:6.1f} s  {_stage(name, found, demo)}", indent=2, hanging=20)
    if demo.keys:
        _show_keys(console, demo)
    if "chaos" in demo.stages:
        _show_disagreements(console, demo.stages["chaos"]["disagreements"])
    console.heading("What was left")
    folder = os.path.relpath(demo.folder)
    folder = demo.folder if folder.startswith("..") else folder
    console.line(f"  {folder}")
    for kind, paths in demo.files.items():
        for path in paths:
            console.line(f"    {path}  ({_MEANING[kind]})")
    if "merge" in demo.stages:
        console.heading("Next")
        quoted = shlex.quote(folder)
        console.line(f"  triton-tuning report {quoted}/journals")
        console.line(f"  triton-tuning check {quoted}/tables")
        console.line("  triton-tuning demo --chaos")
    console.line()
    if demo.problems:
        for problem in demo.problems:
            console.text(f"FAILED: {problem}", hanging=2, style="bold red")
    else:
        console.text(_verdict(demo), style="bold green")


_MEANING = {
    "autotuners": "every autotuner found, as JSON",
    "journals": "what each process measured",
    "tables": "the merged table; --triton-autotune-table-path takes the folder tables",
    "manifests": "what each pinned process launched, and why",
    "logs": "what each process wrote",
    "result": "this result, as JSON",
}


def _stage(name: str, found: dict[str, Json], demo: Demo) -> str:
    if name == "list":
        total = f"{counted(found['autotuners'], 'autotuner')}, {counted(found['candidates'], 'candidate')}"
        return f"{total} in {' '.join(found['modules'])}"
    if name == "compile":
        return f"{found['processes']} processes compiled the candidates"
    if name == "record":
        timed = " and ".join(map(str, found["candidates_timed"]))
        return f"{found['processes']} processes timed {timed} candidates"
    if name == "merge":
        paths = ", ".join(shorten_path(path, demo.folder) for path in found["tables"])
        return (
            f"{found['keys']} keys of {found['kernels']} kernels into {paths}; Triton had chosen differently in the "
            f"two processes for {found['disagreeing_keys']}, and {found['near_tied_keys']} have near ties"
        )
    if name == "pinned":
        seen = sorted({digest for each in found["digests"] for digest in each})
        runs = f"{found['processes']} processes, {found['steps']} steps each"
        shown = f"one digest ({seen[0][:12]})" if len(seen) == 1 else f"{len(seen)} digests"
        verified = "verified each other at every step" if found["verified"] else "did NOT agree"
        return f"{runs}: {found['candidates_timed']} candidates timed, {shown}, {verified}"
    results = "different results" if len(set(found["digests"])) > 1 else "the same results all the same"
    caught = sum(found["caught"])
    return (
        f"{found['processes']} processes picked different candidates and got {results}; the verifier caught it on "
        f"{caught} of {found['processes']}"
    )


def _show_keys(console: Console, demo: Demo) -> None:
    console.heading("What was chosen, and why")
    rows = sorted(demo.keys, key=lambda row: (row["kernel"], row["key_text"]))
    for module, group in itertools.groupby(rows, key=lambda row: str(row["kernel"]).rpartition(".")[0]):
        console.line(f"  {module}", "bold")
        for row in group:
            name = str(row["kernel"]).rpartition(".")[2]
            values = " ".join(f"{key}={value}" for key, value in row["values"].items())
            console.text(f"{name}  {values}", indent=4, hanging=8, style="cyan")
            console.text(str(row["config"]), indent=6, hanging=8)
            console.text(_why(row), indent=6, hanging=8, style="dim")


def _show_disagreements(console: Console, lines: Sequence[str]) -> None:
    for line in lines[:_SHOWN]:
        console.text(line, indent=4, hanging=6)
    if len(lines) > _SHOWN:
        console.line(f"    ... and {len(lines) - _SHOWN} more in demo.json")


def _why(row: dict[str, Any]) -> str:
    parts = [f"{row['source']} entry of the table" if row["source"] == "exact" else str(row["source"])]
    if row["tied"]:
        parts.append(f"{row['tied']} of {row['candidates']} candidates within noise of the fastest")
    else:
        parts.append(f"the fastest of {row['candidates']} candidates")
    if len(row["winners"]) > 1:
        parts.append(f"left to Triton, the processes chose {len(row['winners'])} different ones")
    if row["failed"]:
        parts.append(f"{row['failed']} could not be launched")
    return "; ".join(parts)


def _verdict(demo: Demo) -> str:
    if "chaos" in demo.stages:
        return "The disagreement that was made on purpose was caught on both processes."
    return "Pinned from the table: nothing was timed, and every process and step computed the same bits."
