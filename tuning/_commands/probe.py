"""Observe which candidates compute the same bits: run a program and replay each launch with all of them.

``triton-tuning probe [flags] --out FILE -- script.py args`` or ``-m module args``. The program runs in this process
under the policy, pinned; each launch of an autotuner in scope is replayed once for each key and form, on copies, with
every candidate on several inputs. Candidates that leave the same bytes are one class: an observation on so many inputs,
no proof. Kernels whose ``best_config`` is read are judged by ``--step NAME``: a function of the script that takes the
number of an input, runs a step and returns its tensors by name. ``--compare A B`` sets two such files side by side.

The exit code is 1 where a kernel of ``config_invariant`` shows a difference, where ``--against`` is contradicted or
nothing could be held against it, where nothing was probed, or where compared files differ or have nothing in common.
Whatever ends the program early, what was found until then is written, marked ``incomplete``.
"""

from __future__ import annotations

import argparse
import logging
import os
import runpy
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

from .._console import Console, UsageError
from .._words import counted
from ..errors import DeterminismError, TuningError
from ._common import add_json, add_out, imports_elsewhere

if TYPE_CHECKING:
    from ..bitexact.probe import KeyProbe, Probe
    from ..installation import Installation
    from ..policy import AutotunePolicy

__all__ = ["SUMMARY", "add_arguments", "run"]

logger = logging.getLogger("tuning")

SUMMARY = "observe which candidates compute the same bits, over a program's own launches"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    from ..arguments import add_arguments as add_policy

    add_policy(parser)
    add_out(parser, "FILE", "write what was found to this file", required=False)
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
    from ..bitexact.probe import comparable, read_probe

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
    _check_places(options)
    against = read_probe(options.against) if options.against else None
    found, left_out = _probe(options, policy, argv, against)
    contradicted = found.contradicted(policy.config_invariant)
    held = None if against is None else comparable(against.keys, found.keys)
    code = int(bool(contradicted) or held == 0)
    if options.json:
        document = {"version": 1, "probe": found.to_json(), "config_invariant": list(found.config_invariant)}
        document |= {"contradicted": list(contradicted), "without_classes": list(left_out)}
        console.json(document if held is None else {**document, "held_against": held})
        return code
    _show(found, policy, contradicted, left_out, console)
    if against is not None:
        console.text(_held(held or 0, found, against, options.against), hanging=2, style="" if held else "bold red")
    console.line(f"wrote {options.out}")
    return code


def _held(held: int, found: Probe, against: Probe, file: str) -> str:
    text = f"{held} of {counted(len(found.keys), 'key')} could be held against {file}"
    if against.compiler != found.compiler:
        text += f": it is of {against.compiler}, this is {found.compiler}"
    elif against.arch != found.arch:
        text += f": it is of {against.arch}, this is {found.arch}"
    return text


def _check_places(options: argparse.Namespace) -> None:
    """Whether what will be found can be written, before a run that may take hours."""
    out = os.path.realpath(options.out)
    folder = os.path.realpath(options.classes) if options.classes else ""
    while folder and not os.path.lexists(folder):
        folder = os.path.dirname(folder)  # it is made, with all above it
    _check_place("--out", options.out, os.path.dirname(out), "not a regular file" if _is_no_file(out) else "")
    if folder:
        _check_place("--classes", options.classes, folder)


def _is_no_file(path: str) -> bool:
    return os.path.exists(path) and not os.path.isfile(path)


def _check_place(flag: str, given: str, folder: str, reason: str = "") -> None:
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        raise UsageError(f"probe: {flag} {given}: expected a place that can be written, found: {reason}")


def _probe(
    options: argparse.Namespace, policy: AutotunePolicy, argv: Sequence[str], against: Probe | None
) -> tuple[Probe, tuple[str, ...]]:
    from .. import installation
    from ..bitexact.probe import Probe, write_classes, write_probe

    left_out: tuple[str, ...] = ()
    found = Probe()
    try:
        with imports_elsewhere(), installation.install(policy, deterministic=options.deterministic_mode) as installed:
            try:
                _fill(found, options, installed, argv, against)
            except BaseException as error:
                found.incomplete = " ".join(f"{type(error).__name__}: {error}".split())[:500]
                raise
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
    finally:
        write_probe(options.out, found)
    return found, left_out


def _fill(
    probe: Probe,
    options: argparse.Namespace,
    installed: Installation,
    argv: Sequence[str],
    against: Probe | None,
) -> None:
    """Run the program, and its step if one is named, and put what they show into ``probe``."""
    from ..bitexact.probe import contradictions, probe_launches, probe_steps

    limits = {"inputs": options.inputs, "repeats": options.repeats}
    in_scope = installed.policy.in_scope
    with _started_like_a_program(argv, module=bool(options.module)):
        with probe_launches(in_scope, against=against, **limits) as found:
            running = [True]
            installed.when_taken_out = _watched_still(installed, found, running)
            try:
                names = _run(argv, module=bool(options.module))
            finally:
                running.clear()
                for each in fields(found):
                    setattr(probe, each.name, getattr(found, each.name))
        if options.step:
            step = names.get(options.step)
            if not callable(step):
                raise TuningError(
                    f"step: expected a function {options.step!r} in {argv[0]}, found {type(step).__name__}"
                )
            judged = probe_steps(_checked(step, options.step), in_scope, inputs=options.inputs)
            probe.replace(judged)
            lines = contradictions(against.keys, judged) if against is not None else ()
            if lines:
                raise DeterminismError(f"bit classes are contradicted: {'; '.join(lines)}. Probe anew")
    if not probe.keys:
        raise TuningError(
            f"probe: expected {argv[0]} to launch an autotuner in scope with several candidates, found none: name its "
            "package in --triton-autotune-modules"
        )


def _watched_still(
    installed: Installation, found: Probe, running: Sequence[bool]
) -> Callable[[Installation | None], None]:
    """What to do where the program installs a policy of its own: its launches are probed as those of ours."""

    def taken_out(successor: Installation | None) -> None:
        if not running:
            return
        found.watch_again()
        if successor is None:
            logger.warning("the program uninstalled a policy: what it launches from here on, Triton times")
            return
        successor.when_taken_out = taken_out
        logger.warning(
            "the program installed a policy of its own, %r, in place of that of this probe, %r: its launches are "
            "probed all the same",
            successor,
            installed,
        )

    return taken_out


def _checked(step: Callable[[int], Any], name: str) -> Callable[[int], Mapping[str, Any]]:
    def checked(index: int) -> Mapping[str, Any]:
        tensors = step(index)
        if not isinstance(tensors, Mapping) or not all(hasattr(each, "data_ptr") for each in tensors.values()):
            raise TuningError(f"step: expected {name}({index}) to return tensors by name, got {type(tensors).__name__}")
        return tensors

    return checked


@contextmanager
def _started_like_a_program(argv: Sequence[str], *, module: bool) -> Iterator[None]:
    """Arguments, and what is imported from first, are those that Python gives a script or a module."""
    before = sys.argv
    first = os.getcwd() if module else os.path.dirname(os.path.realpath(argv[0]))
    sys.argv = list(argv)
    sys.path.insert(0, first)
    try:
        yield
    finally:
        sys.argv = before
        if first in sys.path:
            sys.path.remove(first)


def _run(argv: Sequence[str], *, module: bool) -> Mapping[str, Any]:
    """Run a program to its end; its globals. What it raises passes through, but for a successful exit."""
    try:
        if module:
            return runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
        return runpy.run_path(argv[0], run_name="__main__")
    except SystemExit as done:
        if done.code not in (None, 0):
            raise TuningError(
                f"probe: {argv[0]} ended with exit code {done.code}: what was found is written, marked incomplete"
            ) from done
        return _globals_of_main(done.__traceback__)


def _globals_of_main(traceback: TracebackType | None) -> Mapping[str, Any]:
    """The globals of the program that was left by an exit: those of its outermost frame."""
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__":
            return frame.f_globals
        traceback = traceback.tb_next
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
        return int(differ > 0 or not compared)
    console.heading(f"{left.device or left.arch} and {right.device or right.arch}")
    console.table(("kernel", "comparison"), [(pair.kernel.rpartition(".")[2], str(pair)) for pair in pairs])
    for file, probe in zip(files, (left, right), strict=True):
        if probe.incomplete:
            console.text(f"{file} is incomplete: {probe.incomplete}", hanging=2)
    if not compared:
        console.text("nothing was compared: no kernel, key and form of which both files claim something", hanging=2)
        return 1
    console.line(f"{compared - differ} of {counted(compared, 'key')} agree")
    return int(differ > 0)
