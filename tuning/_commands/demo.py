"""Run the main job on an installed package's kernels: list, record, merge, run pinned, verify.

Two processes record and two run pinned, on a GPU where there is one, else in Triton's interpreter. Journals, table and
manifests are left in a folder.
"""

from __future__ import annotations

import argparse

from .._console import Console
from ._common import add_json

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "record, merge and run pinned on real kernels, in under two minutes"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    from ..demo import DEVICES

    parser.add_argument(
        "-o",
        "--out",
        "--output",
        dest="out",
        metavar="DIR",
        help="folder to leave everything in, new or empty (default: triton-tuning-demo, or the first free of "
        "triton-tuning-demo-2, -3 and so on)",
    )
    parser.add_argument(
        "--chaos",
        action="store_true",
        help="the positive control: both processes choose differently on purpose; exits with 0 if that is caught",
    )
    parser.add_argument(
        "--package", metavar="NAME", help="mamba_ssm, fla or megatron.core (default: the first of them that works)"
    )
    parser.add_argument("--device", choices=DEVICES, default="auto", help="where to run (default: auto)")
    add_json(parser)


def run(options: argparse.Namespace, console: Console) -> int:
    """Do it and return the exit code."""
    from .._demo_text import show
    from ..demo import run_demo

    found = run_demo(out=options.out, chaos=options.chaos, package=options.package, device=options.device)
    if options.json:
        console.json(found.to_json())
    else:
        show(console, found)
    return int(bool(found.problems))
