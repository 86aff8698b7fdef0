"""Arguments and output that several commands share."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import glob
import os
import re
import sys
from collections.abc import Iterator, Sequence

from .._console import UsageError
from .._words import counted
from ..errors import JournalError

__all__ = [
    "add_arch",
    "add_journals",
    "add_json",
    "add_out",
    "add_rule",
    "add_tables",
    "check_archs",
    "expanded",
    "imports_elsewhere",
    "module_name",
    "no_records",
    "percentage",
]


_ARCH = re.compile(r"sm\d+[a-z]?|gfx[0-9a-f]+|cpu")
_DEVICES = {"a100": "sm80", "l4": "sm89", "l40": "sm89", "l40s": "sm89", "h100": "sm90", "h200": "sm90"}
_DEVICES |= {"gh200": "sm90", "b200": "sm100", "gb200": "sm100", "b300": "sm103", "gb300": "sm103"}


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add ``--json``."""
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")


def add_out(parser: argparse.ArgumentParser, metavar: str, text: str, *, required: bool = True) -> None:
    """Add ``--out``, which may be written ``-o`` or ``--output`` too."""
    parser.add_argument("-o", "--out", "--output", dest="out", required=required, metavar=metavar, help=text)


def expanded(paths: Sequence[str]) -> list[str]:
    """The paths, patterns that no shell has expanded replaced by what they match; one that matches nothing stays."""
    return [
        found
        for path in paths
        for found in ([path] if os.path.lexists(path) else sorted(glob.glob(path, recursive=True)) or [path])
    ]


def add_journals(parser: argparse.ArgumentParser, *, optional: bool = False) -> None:
    """Add the journals to read."""
    parser.add_argument(
        "journals",
        nargs="*" if optional else "+",
        metavar="JOURNAL",
        help="journal file, folder of journals, glob, or the prefix given as record_path",
    )


def add_rule(parser: argparse.ArgumentParser) -> None:
    """Add ``--rule``."""
    parser.add_argument(
        "--rule",
        choices=("pooled", "majority"),
        default="pooled",
        help="choose by the timings of all recordings together, or by a vote of their winners (default: pooled)",
    )


def add_arch(parser: argparse.ArgumentParser, text: str) -> None:
    """Add ``--arch``, which may be repeated."""
    parser.add_argument("--arch", action="append", metavar="ARCH", help=f"{text}; may be repeated")


def check_archs(archs: Sequence[str] | None, folders: Sequence[str] = ()) -> None:
    """Refuse what is neither written as Triton writes an arch nor one that has tables, here or in ``folders``.

    Raises:
        UsageError: an arch is none.
    """
    from ..inventory import known_archs

    for arch in archs or ():
        if _ARCH.fullmatch(arch):
            continue
        known = known_archs(folders)
        if arch in known:
            continue
        plain = re.sub(r"[^a-z0-9]", "", arch.lower())
        meant = _DEVICES.get(plain) or (plain if _ARCH.fullmatch(plain) else None)
        meant = meant or next(iter(difflib.get_close_matches(plain, known, n=1)), None)
        hint = f"did you mean {meant}?" if meant else f"there are tables for {', '.join(known)}"
        raise UsageError(f"--arch: expected an arch such as sm90, gfx942 or cpu, found {arch!r}; {hint}")


def add_tables(parser: argparse.ArgumentParser) -> None:
    """Add ``--table``, which may be repeated."""
    parser.add_argument(
        "--table",
        action="append",
        default=[],
        metavar="FOLDER",
        help="folder of tables over the packaged ones; may be repeated, the first on top",
    )


def module_name(text: str) -> str:
    """The dotted name of a module or package, for argparse."""
    if not text or not all(part.isidentifier() for part in text.split(".")):
        raise argparse.ArgumentTypeError(f"expected a dotted name such as mamba_ssm.ops, found {text!r}")
    return text


def percentage(text: str) -> float:
    """A number from 0 to 100, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 100:
        raise argparse.ArgumentTypeError(f"expected a percentage from 0 to 100, found {text!r}")
    return value


def no_records(command: str, paths: Sequence[str]) -> JournalError:
    """The error of a command that was given journals in which nothing is recorded."""
    expected, found = "at least one key that was timed in record mode", f"no record in {counted(len(paths), 'journal')}"
    return JournalError(
        f"{command}: {paths[0] if len(paths) == 1 else paths[0] + ' and others'}: expected {expected}, found {found}: "
        "most likely the kernels that ran lie outside the modules of the policy that recorded, or none ran, or none "
        "could be timed for want of a GPU, which the run said then; record again on a GPU, with "
        "--triton-autotune-modules PACKAGE",
        file=paths[0] if len(paths) == 1 else None,
    )


@contextlib.contextmanager
def imports_elsewhere() -> Iterator[None]:
    """While packages are imported, what they print goes to standard error: standard output belongs to the command."""
    sys.stdout.flush()
    try:
        kept = os.dup(1)
    except OSError:  # closed: then nobody prints there
        yield
        return
    try:
        os.dup2(2, 1)
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 1)
        os.close(kept)
