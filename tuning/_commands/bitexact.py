"""Train small models twice under each of torch's ways to run them on several ranks, and compare every bit.

Presets: a GPT-like model, a Llama-like one, and a hybrid of Mamba-2 and attention. Cells: one device, DDP, FSDP2,
tensor, pipeline, interleaved pipeline and expert parallelism, FSDP2 with tensor parallelism, and interleaved stages
under FSDP2. Recipes: low-precision linear layers, on the GPUs that have the instructions. Outputs, losses and all
gradients must be equal bit for bit in two runs, in deterministic mode.

Exit code 1 where a bit differs, a cell fails, or nothing could be run.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from .._atomic import write_atomically
from .._console import Console, UsageError
from ..bitexact.suite import CELLS, PRESETS, RECIPE_NAMES, SuiteReport, run_suite
from ._common import add_json

__all__ = ["SUMMARY", "add_arguments", "run"]

SUMMARY = "train small models twice, on one rank and on several, and compare every bit"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments to its parser."""
    parser.add_argument("--preset", nargs="+", choices=PRESETS, default=PRESETS, help="models (default: all)")
    parser.add_argument("--cell", nargs="+", choices=CELLS, default=CELLS, help="ways to run them (default: all)")
    parser.add_argument(
        "--recipe", nargs="*", choices=RECIPE_NAMES, default=RECIPE_NAMES, help="low-precision recipes (default: all)"
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: GPUs where there are any, else CPUs"
    )
    parser.add_argument("--fresh", action="store_true", help="compare with a second group of processes too")
    parser.add_argument("--timeout", type=float, default=600.0, metavar="SECONDS", help="for each group of processes")
    parser.add_argument(
        "-o", "--out", "--output", dest="out", type=Path, metavar="FILE", help="write the report as JSON"
    )
    add_json(parser)


def run(options: argparse.Namespace, console: Console) -> int:
    """Do it and return the exit code: 1 where a bit differs, a cell fails, or nothing ran."""
    device = options.device
    if device == "auto":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    if not options.timeout > 0:
        raise UsageError(f"--timeout: expected a number of seconds above 0, found {options.timeout:g}")
    if options.out is not None and not options.out.absolute().parent.is_dir():
        raise UsageError(f"--out: {options.out}: expected a file in a folder that exists")
    report = run_suite(
        presets=options.preset,
        cells=options.cell,
        recipes=options.recipe,
        device=device,
        fresh=options.fresh,
        timeout=options.timeout,
    )
    if options.out is not None:
        try:
            write_atomically(options.out, (json.dumps(report.to_json(), indent=1) + "\n").encode())
        except OSError as error:
            raise UsageError(f"--out: {options.out}: cannot be written: {error.strerror or error}") from None
    if options.json:
        console.json(report.to_json())
    else:
        _show(report, console)
    return int(not report.passed)


def _show(report: SuiteReport, console: Console) -> None:
    versions = ", ".join(f"{name} {version}" for name, version in report.versions.items())
    console.line(f"{report.device}; {versions}; {report.seconds:.0f} s")
    rows = [
        (
            row.preset,
            f"{row.cell} {row.recipe}".strip(),
            row.outcome,
            str(row.values or ""),
            f"{row.seconds:.2f}" if row.values else "",
            row.detail,
        )
        for row in report.rows
    ]
    console.table(("preset", "cell", "bits", "tensors", "s", ""), rows)
    console.line(report.verdict, "bold green" if report.passed else "bold red")
