"""Observe which candidates compute the same bits: run a program and replay each launch with all of them.

``triton-tuning probe [flags] --out FILE -- script.py args`` or ``-m module args``. The program runs in this process
under the policy, pinned; each launch of an autotuner in scope is replayed once for each key and form, on copies, with
every candidate on several inputs. Candidates that leave the same bytes are one class: an observation on so many inputs,
no proof. Kernels whose ``best_config`` is read are judged by ``--step NAME``: a function of the script that takes the
number of an input, runs a step and returns its tensors by name. ``--compare A B`` sets two such files side by side.

The exit code is 1 where a kernel of ``config_invariant`` shows a difference, where ``--against`` is contradicted, or
where compared files differ.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from .._console import Console, UsageError
from .._words import counted
from ..errors import TuningError
from ._common import add_json, imports_elsewhere

if TYPE_CHECKING:
    from ..bitexact.probe import KeyProbe, Probe
    from ..policy import AutotunePolicy

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "observe which candidates compute the same bits, over a program's own launches"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    from ..arguments import add_arguments as add_policy

    add_policy(parser)
    parser.add_argument("--out", metavar="FILE", help="write what was found to this file")
    parser.add_argument("--inputs", type=_positive, default=5, metavar="N", help="inputs to try (default: 5)")
    parser.add_argument("--repeats", type=_positive, default=2, metavar="N", help="runs on the first one (default: 2)")
    parser.add_argument("--classes", metavar="FOLDER", help="write the classes into the tables of this folder")
    parser.add_argument("--against", metavar="FILE", help="an earlier probe; fail at the first launch contradicting it")
    parser.add_argument("--step", metavar="NAME", help="function of the program that judges readers of best_config")
    parser.add_argument("--compare", nargs=2, metavar="FILE", help="compare two files instead of running a program")
    add_json(parser)
    parser.add_argument("-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="run a module")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="-- SCRIPT", help="Python file and its arguments")


def _positive(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 1000:
        raise argparse.ArgumentTypeError(f"expected a number from 1 to 1000, found {text!r}")
    return int(text)


def run(options: argparse.Namespace, console: Console) -> int:
    """Do it and return the exit code: 1 where something is contradicted or differs."""
    from ..arguments import policy_from_args

    if options.compare:
        return _compare(options.compare, console, json=options.json)
    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    argv = [*(options.module or ()), *program]
    if not argv or not options.out:
        raise UsageError(
            "probe: expected --out FILE and a program: triton-tuning probe --out FILE -- script.py args, or -m module"
        )
    if not options.module and not os.path.exists(argv[0]):
        raise UsageError(f"probe: {argv[0]} cannot be run: there is no such file")
    policy = policy_from_args(options)
    if policy.mode not in (None, "pinned"):
        raise UsageError(f"probe: expected mode pinned, found {policy.mode!r}: nothing is to be timed beside a replay")
    policy = replace(policy, mode="pinned")
    found, left_out = _probe(options, policy, argv)
    contradicted = found.contradicted(policy.config_invariant)
    if options.json:
        document = {"version": 1, "probe": found.to_json(), "config_invariant": list(found.config_invariant)}
        console.json({**document, "contradicted": list(contradicted), "without_classes": list(left_out)})
        return int(bool(contradicted))
    _show(found, policy, contradicted, left_out, console)
    console.line(f"wrote {options.out}")
    return int(bool(contradicted))


def _probe(options: argparse.Namespace, policy: AutotunePolicy, argv: Sequence[str]) -> tuple[Probe, tuple[str, ...]]:
    from .. import installation
    from ..bitexact.probe import probe_launches, probe_steps, read_probe, write_classes, write_probe

    against = read_probe(options.against) if options.against else None
    left_out: tuple[str, ...] = ()
    with imports_elsewhere(), installation.install(policy, deterministic=options.deterministic_mode) as installed:
        scope = policy.in_scope
        limits = {"inputs": options.inputs, "repeats": options.repeats}
        with probe_launches(scope, against=against, **limits) as found:
            names = _run(argv, module=bool(options.module))
        if options.step:
            step = names.get(options.step)
            if not callable(step):
                raise TuningError(
                    f"step: expected a function {options.step!r} in {argv[0]}, found {type(step).__name__}"
                )
            found.replace(probe_steps(_checked(step, options.step), scope, inputs=options.inputs))
        if options.classes:
            environment = installed.manifest().environment
            _, left_out = write_classes(
                options.classes,
                found.keys,
                installed.choices,
                device=found.device,
                multiprocessors=found.multiprocessors,
                triton=environment.triton,
                packages=dict(environment.packages),
            )
    write_probe(options.out, found)
    return found, left_out


def _checked(step: Callable[[int], Any], name: str) -> Callable[[int], Mapping[str, Any]]:
    def checked(index: int) -> Mapping[str, Any]:
        tensors = step(index)
        if not isinstance(tensors, Mapping) or not all(hasattr(each, "data_ptr") for each in tensors.values()):
            raise TuningError(f"step: expected {name}({index}) to return tensors by name, got {type(tensors).__name__}")
        return tensors

    return checked


@contextmanager
def _arguments(argv: Sequence[str]) -> Iterator[None]:
    before = sys.argv
    sys.argv = list(argv)
    try:
        yield
    finally:
        sys.argv = before


def _run(argv: Sequence[str], *, module: bool) -> Mapping[str, Any]:
    """Run a program to its end; its globals. What it raises passes through, but for a successful exit."""
    with _arguments(argv):
        try:
            if module:
                return runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
            return runpy.run_path(argv[0], run_name="__main__")
        except SystemExit as done:
            if done.code not in (None, 0):
                raise TuningError(f"probe: {argv[0]} ended with exit code {done.code}: nothing was written") from done
            return {}


def _show(
    found: Probe, policy: AutotunePolicy, contradicted: Sequence[str], left_out: Sequence[str], console: Console
) -> None:
    single = sum(each.single for each in found.keys)
    console.heading(f"{counted(len(found.keys), 'key')} probed on {found.arch or 'nothing'}, {found.compiler}")
    console.table(("kernel", "candidates", "verdict", "ulps", "decided by"), [_row(each) for each in found.keys])
    console.line(f"{single} of {counted(len(found.keys), 'key')}: no difference observed between any candidates")
    for name in found.config_invariant:
        tried = min(each.tried for each in found.of(name))
        listed = "stays in" if name in policy.config_invariant else "may be proposed for"
        count = counted(len(found.of(name)), "key")
        console.text(
            f"{name} {listed} config_invariant: no difference observed on {tried} inputs of {count}", hanging=2
        )
    for name in policy.config_invariant:
        if not found.of(name) and policy.in_scope(name):
            console.text(f"{name} is listed in config_invariant and was not reached", hanging=2)
    for line in contradicted:
        console.text(line, hanging=2, style="bold red")
    for line in left_out:
        console.text(f"no classes written: {line}", hanging=2)


def _row(each: KeyProbe) -> tuple[str, ...]:
    from ..bitexact.probe import deciding_fields

    worst = [distance.ulps for distance in each.distances]
    ulps = "" if not worst else "not comparable" if None in worst else f"{max(filter(None, worst), default=0):.0f}"
    launchable = sum(not candidate.failure for candidate in each.candidates)
    mark = ", atomics" if each.atomics else ""
    fields = deciding_fields(each.classes).by if len(each.classes) > 1 else ()
    return (each.kernel.rpartition(".")[2], str(launchable), each.verdict + mark, ulps, " ".join(fields))


def _compare(files: Sequence[str], console: Console, *, json: bool) -> int:
    from ..bitexact.probe import compare_probes, read_probe

    left, right = map(read_probe, files)
    pairs = compare_probes(left.keys, right.keys)
    differ = sum(not pair.agrees for pair in pairs if not pair.note)
    compared = sum(not pair.note for pair in pairs)
    if json:
        console.json({"version": 1, "compared": compared, "differ": differ, "keys": [pair.to_json() for pair in pairs]})
        return int(differ > 0)
    console.heading(f"{left.device or left.arch} and {right.device or right.arch}")
    console.table(("kernel", "comparison"), [(pair.kernel.rpartition(".")[2], str(pair)) for pair in pairs])
    console.line(f"{compared - differ} of {counted(compared, 'key')} agree")
    return int(differ > 0)
