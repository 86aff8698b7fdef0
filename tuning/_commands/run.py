"""Run a Python program, its worker processes included, under a policy, without a change to its code.

``triton-tuning run [flags] -- script.py args``, ``triton-tuning run [flags] -m module args``, or a command in place of
the script, such as ``-- torchrun --nproc-per-node 8 train.py``; the ``--`` ends a flag of several values. The program
takes this process over: its exit code, signals and arguments are its own, and nothing is left behind. The policy is
installed in each of its Python processes when that imports Triton. With a manifest path, each process that launched an
autotuner writes one, and the last lines on standard error name them.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator

from .._console import Console, UsageError
from ..errors import PolicyError

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "run a program under a policy, worker processes included"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    from ..arguments import add_arguments as add_policy

    add_policy(parser)
    parser.add_argument(
        "-m", dest="module", nargs=argparse.REMAINDER, metavar="MODULE", help="run a module, with the arguments behind"
    )
    parser.add_argument(
        "program", nargs=argparse.REMAINDER, metavar="-- PROGRAM", help="Python file or command, and its arguments"
    )


def run(options: argparse.Namespace, console: Console) -> int:
    """Do it; returns only by an error."""
    from ..arguments import policy_from_args
    from ..program import command_line, start

    program = options.program[1:] if options.program[:1] == ["--"] else options.program
    if options.module:
        # argparse ends the arguments behind an option at a "--", which here is one of the module's own.
        words: list[str] = [*options.module, *options.program]
    elif program and options.module is None:
        words = program
    else:
        expected = "run: expected a program: triton-tuning run [flags] -- script.py args, or -m module args"
        raise UsageError("; ".join([expected, *_swallowed(options)]))
    command = command_line(words[0], words[1:], module=bool(options.module))
    start(command, policy_from_args(options), deterministic=options.deterministic_mode)


def _swallowed(options: argparse.Namespace) -> Iterator[str]:
    """Which flag of several values took a program for one of them."""
    from ..program import command_line

    for dest, values in vars(options).items():
        for value in values if dest.startswith("triton_autotune_") and isinstance(values, list) else ():
            with contextlib.suppress(PolicyError):
                command_line(value)
                flag = f"--{dest.replace('_', '-')}"
                yield f"{flag} takes every word up to the next flag, and took {value!r}: put a -- before the program"
