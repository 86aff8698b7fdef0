"""The command ``triton-tuning``, which is ``python -m tuning`` too.

Exit codes: 0: done, nothing amiss; 1: problems were found, or something could not be done; 2: it was called wrongly.
130 and 141: interrupted, and standard output closed by its reader, as for a process that the signal ended. Errors are
one line on standard error. With ``--json`` standard output holds one JSON document and nothing else.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO, TypeVar

from . import __version__
from ._commands import COMMANDS, load
from ._console import Console, UsageError
from .errors import PolicyError, TuningError

__all__ = ["main", "make_parser"]

_PROGRAM = "triton-tuning"
_PROBLEMS = 1
_USAGE = 2
_INTERRUPTED = 130
_PIPE_CLOSED = 141

_T = TypeVar("_T")


def make_parser() -> argparse.ArgumentParser:
    """The parser with all subcommands. ``options.run`` of what it returns is the chosen one's function."""
    parser = argparse.ArgumentParser(
        prog=_PROGRAM,
        description="Choose Triton autotuning configs without a stopwatch: record, merge, inspect, check.",
        epilog="Exit codes: 0 done, 1 problems found or something could not be done, 2 called wrongly.",
    )
    parser.add_argument("--version", action="version", version=f"{_PROGRAM} {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        command = load(name)
        sub = commands.add_parser(name, help=command.SUMMARY, description=command.__doc__)
        sub.formatter_class = _HelpFormatter
        command.add_arguments(sub)
        sub.set_defaults(run=command.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point.

    Args:
        argv: the arguments; those of the process when None.

    Returns:
        The exit code; see the module's docstring. What argparse itself refuses or answers raises ``SystemExit``.
    """
    parser = make_parser()
    try:
        with _standard_output():
            options = parser.parse_args(argv)
            with _messages(), _current_folder():
                return int(options.run(options, Console()))
    except (PolicyError, UsageError) as error:
        _complain(error)
        return _USAGE
    except TuningError as error:
        _complain(error)
        return _PROBLEMS
    except _OutputError as error:
        _complain(TuningError(f"standard output cannot be written: {error}; what was printed is not whole"))
        return _PROBLEMS
    except BrokenPipeError:
        return _PIPE_CLOSED
    except KeyboardInterrupt:
        sys.stderr.write(f"{_PROGRAM}: interrupted\n")
        return _INTERRUPTED


def _complain(error: TuningError) -> None:
    sys.stderr.write(f"{_PROGRAM}: error: {' '.join(error.message.split())}\n")


class _HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help whose long words, such as names of kernels, are never broken."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False)


class _OutputError(Exception):
    """Standard output could not be written, for another reason than that its reader went away."""


class _Output(io.TextIOBase):
    """Standard output, whose errors are told from those of all other files."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        return self._try(lambda: self._stream.write(text))

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, step: Callable[[], _T]) -> _T:
        try:
            return step()
        except BrokenPipeError:
            self._silence()
            raise
        except OSError as error:
            self._silence()
            raise _OutputError(error.strerror or str(error)) from error

    def _silence(self) -> None:
        # Else the interpreter would meet the same once more as it flushes at exit, and say so.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self._stream.fileno())

    def fileno(self) -> int:
        return self._stream.fileno()

    def isatty(self) -> bool:
        return self._stream.isatty()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding


@contextlib.contextmanager
def _standard_output() -> Iterator[None]:
    """Standard output that any name can be written to, whatever its encoding, and that is whole when this ends.

    Where it is closed from the start, nobody wants it, and it goes nowhere. What argparse prints and then leaves by
    ``SystemExit`` is looked after too.
    """
    stream = sys.stdout
    with contextlib.ExitStack() as undo:
        if stream is None:
            stream = undo.enter_context(open(os.devnull, "w"))
        elif isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
            undo.callback(stream.reconfigure, errors="strict")
        sys.stdout, before = _Output(stream), sys.stdout
        undo.callback(setattr, sys, "stdout", before)
        try:
            yield
        except SystemExit:
            sys.stdout.flush()
            raise
        else:
            sys.stdout.flush()


@contextlib.contextmanager
def _current_folder() -> Iterator[None]:
    """Modules of the current folder are found, after all others: by the console script as by ``python -m tuning``.

    Last, so that a folder named like an installed package hides nothing. Not where Python was told to keep unsafe
    paths out (``-P``, ``PYTHONSAFEPATH``).
    """
    folder = os.getcwd()
    if folder in sys.path or "" in sys.path or getattr(sys.flags, "safe_path", False):
        yield
        return
    sys.path.append(folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


@contextlib.contextmanager
def _messages() -> Iterator[None]:
    """Warnings of this library go to standard error, a line each; those of packages that it imports go nowhere."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"{_PROGRAM}: warning: %(message)s"))
    handler.setLevel(logging.WARNING)
    logger = logging.getLogger("tuning")
    propagate = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        with warnings.catch_warnings():
            if not sys.warnoptions:
                warnings.simplefilter("ignore")
            yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


if __name__ == "__main__":
    sys.exit(main())
