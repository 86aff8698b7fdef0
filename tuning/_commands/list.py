"""List the autotuners that packages define: candidates, keys, table coverage, and what needs attention.

Modules are imported, and everything below them. What cannot be imported is listed too. Where one of several MODULEs is
not there the others are listed, and the exit code is 1. With --manifest each autotuner is shown with what that run did
with it, and what the run launched besides is listed too.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from .._console import Console, UsageError
from .._words import counted
from ._common import add_arch, add_json, add_tables, check_archs, imports_elsewhere, module_name, percentage

if TYPE_CHECKING:
    from ..errors import InventoryError
    from ..inventory import Inventory

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "list the autotuners that packages define, and how far tables cover them"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    text = "package or module, such as mamba_ssm or fla.ops"
    parser.add_argument("modules", nargs="+", type=module_name, metavar="MODULE", help=text)
    add_arch(parser, "look up the tables of this arch (default: of every arch that has one)")
    add_tables(parser)
    parser.add_argument(
        "--manifest",
        action="append",
        default=[],
        metavar="FILE",
        help="join with the manifest of a run; may be repeated, once for each of its processes",
    )
    parser.add_argument(
        "--fail-under",
        type=percentage,
        metavar="PCT",
        help="exit with 1 if the tables of the one --arch cover less than this percentage of the autotuners",
    )
    parser.add_argument(
        "--inductor", action="store_true", help="name each kind of choice that Inductor times, and the setting for it"
    )
    add_json(parser)


def run(options: argparse.Namespace, console: Console) -> int:
    """Do it and return the exit code."""
    from ..inductor import unpinnable
    from ..inventory import coverage, join_manifests, policy_of, take_inventory
    from ..manifest import read_manifest

    if options.fail_under is not None and len(options.arch or ()) != 1:
        raise UsageError("--fail-under: expected one --arch with it, such as --arch sm90")
    check_archs(options.arch, options.table)
    manifests = [read_manifest(path) for path in options.manifest]
    policy = policy_of(manifests) if manifests else None
    deterministic = any(manifest.deterministic for manifest in manifests)
    with imports_elsewhere():
        take = partial(
            take_inventory, archs=options.arch, table_path=options.table, policy=policy, deterministic=deterministic
        )
        found, missing = _take(options.modules, take)
    _complain(missing)
    archs = sorted({item.arch for info in found.autotuners for item in info.tables})
    covered = {arch: coverage(found.autotuners, arch, problems=found.problems) for arch in options.arch or archs}
    if manifests:  # after counting: of what only the run shows, the tables were not looked up
        found = replace(found, autotuners=tuple(join_manifests(found.autotuners, manifests)))
    failed = options.fail_under is not None and covered[options.arch[0]].percent < options.fail_under
    if options.json:
        document = found.to_json()
        document["coverage"] = {arch: each._asdict() for arch, each in covered.items()}
        document["failed"] = failed
        document["inductor"] = [each.to_json() for each in unpinnable()]
        console.json(document)
        return int(failed or bool(missing))
    _show(console, found, covered, joined=bool(manifests))
    timed = unpinnable()
    if options.inductor:
        console.heading("Compiled graphs: timed by Inductor, whatever the policy")
        for each in timed:
            console.text(f"{each.kind}: {each.what}; {each.switch}", indent=2, hanging=6)
    else:
        text = "kinds of choice in compiled graphs are Inductor's own, whatever the policy: --inductor names them"
        console.text(f"{len(timed)} {text}", hanging=2, style="dim")
    if failed:
        arch = options.arch[0]
        console.line(f"FAILED: {covered[arch].percent:.1f} % covered on {arch}, below {options.fail_under:g} %", "red")
    return int(failed or bool(missing))


def _take(modules: Sequence[str], take: Callable[[Sequence[str]], Inventory]) -> tuple[Inventory, list[InventoryError]]:
    """The inventory of those modules that can be listed, the others among its problems; and their errors.

    Raises:
        InventoryError: none can be listed.
    """
    from ..errors import InventoryError
    from ..inventory import Problem

    left = list(dict.fromkeys(modules))
    missing: list[InventoryError] = []
    while True:
        try:
            found = take(left)
            break
        except InventoryError as error:
            if error.module not in left or left == [error.module]:
                _complain(missing)  # of several that are all missing each is named, the last one as any error
                raise
            left.remove(error.module)
            missing.append(error)
    problems = [Problem(error.module or "", "does not import", error.reason or "") for error in missing]
    ordered = sorted((*found.problems, *problems), key=lambda each: (each.module, each.kind, each.reason))
    return replace(found, problems=tuple(ordered)), missing


def _complain(errors: Sequence[InventoryError]) -> None:
    for error in errors:
        sys.stderr.write(f"triton-tuning: error: {' '.join(error.message.split())}\n")


def _show(console: Console, found: Any, covered: dict[str, Any], *, joined: bool) -> None:
    for module, group in itertools.groupby(found.autotuners, key=lambda info: info.module):
        console.line(module, "bold")
        for info in group:
            name = info.kernel.removeprefix(module + ".")
            console.text(f"{name}  {'; '.join(_facts(info, joined))}", indent=2, hanging=6)
    if found.problems:
        console.heading("Not looked into")
        for problem in found.problems:
            console.text(str(problem), indent=2, hanging=6)
    if found.elsewhere:
        console.heading("Bound here, defined elsewhere")
        for kernel in found.elsewhere:
            console.line(f"  {kernel}")
    console.line()
    if joined:
        states = Counter(info.state for info in found.autotuners)
        reached = sum(info.reached for info in found.autotuners)
        shown = ", ".join(f"{count} {state}" for state, count in sorted(states.items()))
        console.line(f"by the policy of the run: {shown}; {counted(reached, 'autotuner')} launched")
    total = f"{counted(len(found.autotuners), 'autotuner')}, {counted(found.candidates, 'candidate')}"
    console.line(f"{total} in {' '.join(found.modules)}")
    unseen = sum(problem.autotuners for problem in found.problems if problem.kind != "skipped")
    rest = f"; {unseen} not looked into, see above, and so not covered" if unseen else ""
    for arch, each in covered.items():
        console.line(f"{arch}: tables cover {each.covered} of {each.total} ({each.percent:.1f} %){rest}")


def _facts(info: Any, joined: bool) -> list[str]:
    facts = [f"{info.state}{': ' + info.reason if info.reason else ''}"] if joined else []
    facts.append(counted(len(info.candidates), "candidate"))
    facts.append(f"key {', '.join(info.key_names)}" if info.key_names else "no key")
    entries = [str(item) for item in info.tables if item.exact or item.wildcard]
    if entries:
        facts.append(f"entries {', '.join(entries)}")
    if info.wrapped != ("autotuner",):
        facts.append(" > ".join(info.wrapped))
    if info.hooks:
        facts.append(f"hooks {', '.join(info.hooks)}")
    if info.pruner:
        facts.append(f"pruned by {info.pruner}")
    return facts + [note.text for note in info.notes if note.kind != "cache_results"]
