"""How often recording Mamba-2's SSD step again gives the same configs, with and without ``remeasure`` (GPU).

Cold processes record it, the first with an empty compile cache, so many without ``remeasure`` and so many with it,
in turns. Each pair of recordings of one kind is compared: the winners that Triton would keep, and the choices of a
merge of each recording alone; and all ways to split them into two halves, each merged.
"""

from __future__ import annotations

import argparse
import itertools
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench import results
from bench.ssd import run_worker
from tuning.journal import Journal, find_journals, read_journal
from tuning.merge import merge


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of this case."""
    parser.add_argument("--recordings", type=int, default=4, help="recording processes of each kind")
    parser.add_argument("--keep", type=Path, help="folder for journals and compile caches")
    parser.add_argument("--journals", type=Path, nargs="+", help="compare these recordings instead of making any")


def choices(journals: Sequence[Journal]) -> dict[tuple[str, str], str]:
    """What a merge of these recordings chooses, by kernel and key."""
    return {(facts.kernel.qualified_name, facts.key.text): str(facts.choice) for facts in merge(journals).keys}


def winners(journal: Journal) -> dict[tuple[str, str], str]:
    """What Triton's timings of one recording, taken alone, have as the fastest."""
    return {(each.kernel.qualified_name, each.key.text): str(each.winner) for each in journal.records if each.timings}


def _agreeing(one: dict[tuple[str, str], str], two: dict[tuple[str, str], str]) -> dict[str, Any]:
    differing = sorted(name[0].rpartition(".")[2] for name in one if one[name] != two.get(name))
    return {"agree": len(one) - len(differing), "of": len(one), "differing": differing}


def compare(journals: Sequence[Journal]) -> dict[str, Any]:
    """Agreement between recordings, and between merges of halves of them."""
    pairs = list(itertools.combinations(journals, 2))
    found: dict[str, Any] = {
        "recordings": len(journals),
        "winners_of_two": [_agreeing(winners(one), winners(two)) for one, two in pairs],
        "merges_of_one": [_agreeing(choices([one]), choices([two])) for one, two in pairs],
        "merges_of_halves": [],
    }
    if len(journals) % 2 == 0 and len(journals) > 2:
        first, *others = range(len(journals))
        for rest in itertools.combinations(others, len(journals) // 2 - 1):
            half = {first, *rest}
            one = choices([journals[at] for at in sorted(half)])
            two = choices([journals[at] for at in range(len(journals)) if at not in half])
            found["merges_of_halves"].append(_agreeing(one, two))
    return found


def _show(kind: str, found: dict[str, Any]) -> None:
    for what in ("winners_of_two", "merges_of_one", "merges_of_halves"):
        if found[what]:
            counts = ", ".join(str(each["agree"]) for each in found[what])
            print(f"{kind:12} {what.replace('_', ' '):18} {counts} of {found[what][0]['of']} keys agree", flush=True)


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Run the case and return the result."""
    result: dict[str, Any] = {"case": "repeat", **results.circumstances(("triton", "torch", "mamba_ssm"))}
    if options.journals:
        result["given"] = compare([read_journal(path) for path in find_journals(options.journals)])
        _show("given", result["given"])
        return result
    keep = options.keep or Path(tempfile.mkdtemp(prefix="bench-repeat-"))
    keep.mkdir(parents=True, exist_ok=True)
    runs: dict[str, list[dict[str, Any]]] = {"as_it_is": [], "remeasured": []}
    for _ in range(options.recordings):
        for kind, done in runs.items():
            extra = ("--remeasure",) if kind == "remeasured" else ()
            prefix = str(keep / kind / "run")
            done.append(run_worker(keep / "cache", "--mode", "record", "--record-path", prefix, "--steps", "1", *extra))
    for kind, done in runs.items():
        result[kind] = compare([read_journal(path) for path in find_journals([str(keep / kind)])])
        result[kind]["first_step_s"] = [round(each["first_step_s"], 2) for each in done]
        result[kind]["benchmarks"] = [each["benchmarks"] for each in done]
        _show(kind, result[kind])
    shutil.rmtree(keep / "cache", ignore_errors=True)
    return result
