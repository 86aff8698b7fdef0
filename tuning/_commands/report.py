"""Say what the journals of recording runs hold: for each kernel and key what the recordings chose, how far they
disagree, and what a merge would choose. Nothing is written.
"""

from __future__ import annotations

import argparse
import itertools
from typing import TYPE_CHECKING

from .._console import Console, counted
from ._common import add_journals, add_json, add_rule

if TYPE_CHECKING:
    from ..merge import KeyFacts, MergeResult
    from ..spec import Json

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "say what journals hold: disagreement, near ties, failures, regret"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    add_journals(parser)
    parser.add_argument("--arch", metavar="ARCH", help="report on this arch alone (default: every arch recorded)")
    add_rule(parser)
    add_json(parser)


def run(options: argparse.Namespace, console: Console) -> int:
    """Do it and return the exit code."""
    from ..journal import find_journals, read_journal
    from ..merge import merge

    merged = merge(map(read_journal, find_journals(options.journals)), rule=options.rule, arch=options.arch)
    if options.json:
        console.json(_to_json(merged))
    else:
        _show(console, merged)
    return 0


def _to_json(merged: MergeResult) -> Json:
    return {
        "version": 1,
        **merged.summary(),
        "torn": [{"journal": path, "bytes": size} for path, size in merged.torn],
        "notes": list(merged.notes),
        "results": [_key_json(facts) for facts in merged.keys],
    }


def _key_json(facts: KeyFacts) -> Json:
    return {
        "arch": facts.arch,
        "kernel": facts.kernel.qualified_name,
        "source_hash": facts.kernel.source_hash,
        "key": facts.key.to_json(),
        "choice": None if facts.choice is None else facts.choice.to_json(),
        "confidence": facts.confidence,
        "stability": facts.stability,
        "recordings": facts.recordings_count,
        "agreement": facts.agreement,
        "winners": [{"config": config.to_json(), "recordings": count} for config, count in facts.winners],
        "near_ties": [item.config.to_json() for item in facts.near_ties],
        "failures": [{"config": item.config.to_json(), "errors": list(item.errors)} for item in facts.failures],
        "candidates": len(facts.candidates),
        "time_ms": None if facts.chosen is None else facts.chosen.low_ms,
        "median_regret": facts.median_regret(),
        "worst_regret": facts.worst_regret(),
        "notes": list(facts.notes),
    }


def _show(console: Console, merged: MergeResult) -> None:
    for (arch, module), group in itertools.groupby(
        merged.keys, key=lambda facts: (facts.arch, facts.kernel.qualified_name.rpartition(".")[0])
    ):
        console.line(f"{arch}  {module}", "bold")
        for facts in group:
            name = facts.kernel.qualified_name.rpartition(".")[2]
            console.text(f"{name}  {facts.key}", indent=2, hanging=6, style="cyan")
            chosen = facts.chosen
            if chosen is None:
                console.text("no candidate can be chosen", indent=4, hanging=6, style="red")
            else:
                console.text(f"{facts.choice}  {chosen.low_ms:.4g} ms", indent=4, hanging=6)
            console.text(_why(facts), indent=4, hanging=6)
            for note in facts.notes:
                console.text(f"note: {note}", indent=4, hanging=6)
    found = merged.summary()
    console.line()
    console.text(
        f"{counted(found['journals'], 'journal')}, {counted(found['records'], 'record')}, "
        f"{counted(found['keys'], 'key')} of {counted(found['kernels'], 'kernel')} on "
        f"{', '.join(found['archs']) or 'no arch'}; "
        f"recordings disagree on {counted(found['disagreeing_keys'], 'key')}; "
        f"near ties: {found['near_tied_keys']}; without a choice: {found['keys_without_choice']}"
    )
    for path, size in merged.torn:
        console.text(f"{path}: its last frame is torn ({size} bytes); all before it was read", hanging=2)
    for line in merged.notes:
        console.text(line, hanging=2)


def _why(facts: KeyFacts) -> str:
    total = counted(facts.recordings_count, "recording")
    parts = [f"{facts.confidence}: chosen in {facts.agreement} of {total}"]
    if facts.disagrees:
        others = [f"{config} in {count}" for config, count in facts.winners if config != facts.choice]
        parts.append(f"others chose {', '.join(others)}")
    if facts.near_ties:
        parts.append(f"{len(facts.near_ties)} of {len(facts.candidates)} candidates within {facts.tolerance:.1%}")
    if facts.failures:
        parts.append(f"{len(facts.failures)} of {len(facts.candidates)} failed")
    worst = facts.worst_regret()
    if worst:
        parts.append(f"at worst {worst:.1%} slower than the fastest of a recording")
    return "; ".join(parts)
