"""``python -m bench CASE [options]``: run one benchmark and write its result as JSON."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from bench import comparison, results

CASES = {
    "nccl": "several ranks: recorded at once and pinned, stock, chaos, and the cost of a check (GPUs, or a stub)",
    "launch": "host cost of a pinned launch beside the bare JIT function and stock Triton (GPU, or a stub anywhere)",
    "ssd": "record, merge and pin Mamba-2's SSD step in fresh processes, beside stock Triton (GPU)",
    "step": "time of the SSD step: stock, pinned, cheapest, each with deterministic algorithms off and on (GPU)",
    "record": "record many workloads for the tables: collect launches, compile all candidates, time alone (GPU)",
    "probe": "bit classes of the SSD step's kernels: which candidates compute the same bits (GPU, or the interpreter)",
    "bitexact": "digests and their speed, planted faults that are caught, and the bit-exact suite (GPU, or CPU)",
    "kernels": "kernel time of Mamba-2's SSD step: timed best, pinned from the table, cheapest (GPU)",
    "cost": "what deterministic mode costs a hybrid model, range by range, beside the default (GPU)",
    "warmup": "the first step of Mamba-2's SSD after a warmup, beside a full and an empty compile cache (GPU)",
    "packages": "operators of mamba_ssm and FLA against their references, pinned and not: the same pass (GPU)",
    "regret": "how much slower than the timed best each rule of choosing is, from journals (CPU)",
    "repeat": "how often recording the SSD step again gives the same configs, with and without remeasure (GPU)",
    "merge": "time and memory of merging up to 4,096 rank files of 300 keys (CPU)",
    "tables": "loading a table of 10,000 entries, looking keys up, memory, and importing the library (CPU)",
    "verification_scale": "a check between ranks, simulated for up to 65,536 of them (CPU)",
}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="case", required=True, metavar="CASE")
    for name, text in CASES.items():
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--out", type=Path, help="folder for the result (default: bench/results)")
        command.add_argument("--name", help="name of the result (default: the case and the device)")
        importlib.import_module(f"bench.{name}").add_arguments(command)
    command = commands.add_parser("compare", help="two results of one case, side by side")
    comparison.add_arguments(command)
    options = parser.parse_args()
    if options.case == "compare":
        sys.exit(comparison.main(options))
    result = importlib.import_module(f"bench.{options.case}").run(options)
    result = {"case": options.case, **result}
    path = results.write(options.name, result, options.out)
    print(f"wrote {path}", file=sys.stderr if getattr(options, "json", False) else sys.stdout)
    if result.get("problems"):
        sys.exit(1)


if __name__ == "__main__":
    main()
