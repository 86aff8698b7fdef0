"""The subcommands of ``triton-tuning``, one module each.

A module of this package is a command. It has a one-line ``SUMMARY``, ``add_arguments(parser)``, and ``run(options,
console)``, which does the work and returns the exit code: 0, or 1 where it found problems. It raises
:class:`tuning.errors.TuningError` for what the user has to put right, and imports what is slow inside of ``run``.
To add a command, add its module and its name here.
"""

from __future__ import annotations

import argparse
import importlib
from typing import Protocol, cast

from .._console import Console

__all__ = ["COMMANDS", "Command", "load"]

COMMANDS: tuple[str, ...] = (
    "run",
    "list",
    "merge",
    "report",
    "show",
    "explain",
    "check",
    "diff",
    "freeze",
    "import",
    "export",
    "warmup",
    "doctor",
    "compare-checkpoints",
    "bitexact",
    "metrics",
    "probe",
    "cost",
    "demo",
)
"""Names, in the order in which the help lists them."""


class Command(Protocol):
    """What a module of this package offers."""

    SUMMARY: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's arguments to its parser."""

    def run(self, options: argparse.Namespace, console: Console) -> int:
        """Do it and return the exit code."""


def load(name: str) -> Command:
    """The module of a command."""
    module = "import_" if name == "import" else name.replace("-", "_")  # the one that Python keeps for itself
    return cast(Command, importlib.import_module(f"{__name__}.{module}"))
