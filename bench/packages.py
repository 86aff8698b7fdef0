"""The packages' tests and checks under a pinned policy and without one: all pass on both sides.

Anything else is a problem, and exit code 1: a test that fails on both sides as well, a suite that did not finish, and
an autotuner in scope that was timed on the pinned side. Excepted are tests in :data:`REFUSALS` whose package refuses
what they ask for, in those words and on both sides.

Each suite is a pytest process of its own; all suites of a side run at once, for compiling takes most of the time. The
pinned side goes first and fills the compile cache for both. It is started as ``triton-tuning run`` would, so nothing in
the suites knows of the policy, and its manifests say what was launched and that nothing in scope was timed.

Suites: the operator checks of :mod:`bench.package_checks`, one process for each, and, where ``--tests`` names a folder
with ``mamba/test_determinism.py`` (it is in the source distribution of mamba-ssm), a part of that. The distributions on
the package index hold none of ``tests/ops`` of either project.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from bench import results
from tuning.manifest import read_manifest
from tuning.policy import AutotunePolicy
from tuning.program import environment

ROOT = Path(__file__).parents[1]
CHECKS = Path(__file__).with_name("package_checks.py")
MAMBA = (
    "test_kernel_close_to_default and chunk_scan_bwd_dx and 64-64",
    "test_kernel_close_to_default and chunk_state_bwd_db and 64-64",
    "test_combined_kernel_close_to_default and False and 64-64",
)
REFUSED = "produces incorrect results for gated chunk_bwd_dqkwg"
"""In what FLA says where it refuses a backward under Triton 3.4 to 3.7.0 on Hopper."""
REFUSALS = frozenset({"test_fla_simple_gla"})
"""Tests that may meet it, once their forward has passed."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--site", type=Path, help="folder with mamba_ssm, fla and einops, if they are not installed")
    parser.add_argument("--tests", type=Path, help="folder with mamba/test_determinism.py")
    parser.add_argument("--limit", type=float, default=500, help="seconds for both sides together (default: 500)")
    parser.add_argument("--only", help="suites whose name holds this text")
    parser.add_argument(
        "--interpret",
        action="store_true",
        help="in Triton's interpreter, where there is no GPU; that of Triton 3.6 cannot run FLA's kernels over chunks",
    )


def suites(tests: Path | None) -> dict[str, list[str]]:
    """Arguments of pytest, by name of the suite."""
    functions = [node.name for node in ast.parse(CHECKS.read_text()).body if isinstance(node, ast.FunctionDef)]
    found = {name: [f"{CHECKS}::{name}"] for name in functions if name.startswith("test_")}
    file = tests / "mamba" / "test_determinism.py" if tests is not None else None
    if file is not None:
        found |= {f"mamba_ssm's own {index}": [str(file), "-k", text] for index, text in enumerate(MAMBA)}
    return found


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Both sides."""
    started = time.monotonic()
    found = {name: arguments for name, arguments in suites(options.tests).items() if (options.only or "") in name}
    with tempfile.TemporaryDirectory(prefix="bench-packages-") as folder:
        base = _environment(options, Path(folder))
        sides = {}
        for side in ("pinned", "stock"):
            begin = time.monotonic()
            deadline = started + options.limit * (0.5 if side == "pinned" else 1.0)
            outcomes = _run(side, found, base, Path(folder), deadline)
            sides[side] = {"outcomes": outcomes, "seconds": round(time.monotonic() - begin, 1)}
        manifests = [read_manifest(path) for path in sorted(Path(folder).glob("*.manifest*.json"))]
    launched = {use.kernel: use.state for manifest in manifests for use in manifest.autotuners}
    timed = {kernel: count for manifest in manifests for kernel, count in manifest.benchmarks}
    differ = sorted(
        name
        for name in sides["pinned"]["outcomes"].keys() | sides["stock"]["outcomes"].keys()
        if sides["pinned"]["outcomes"].get(name) != sides["stock"]["outcomes"].get(name)
    )
    problems = problems_of(*(sides[side]["outcomes"] for side in ("pinned", "stock")), timed)
    result = {
        "case": "packages",
        **results.circumstances(("triton", "torch", "mamba_ssm", "fla-core")),
        "suites": sorted(found),
        "sides": sides,
        "differ": differ,
        "pinned_autotuners": sorted(kernel for kernel, state in launched.items() if state == "pinned"),
        "timed_in_scope": timed,
        "choices": sum(len(manifest.choices) for manifest in manifests),
        "problems": problems,
    }
    for name in sorted(sides["pinned"]["outcomes"].keys() | sides["stock"]["outcomes"].keys()):
        print(f"{name:70} {' '.join(str(sides[side]['outcomes'].get(name)) for side in sides)}")
    print(f"differ: {differ or 'none'}; autotuners pinned {len(result['pinned_autotuners'])}; timed in scope {timed}")
    for problem in problems:
        print(problem)
    print(f"seconds: pinned {sides['pinned']['seconds']}, stock {sides['stock']['seconds']}")
    return result


def problems_of(pinned: Mapping[str, str], stock: Mapping[str, str], timed: Mapping[str, int]) -> list[str]:
    """Whatever is not a pass on both sides, or a refusal on both sides that is expected; and what was timed."""
    found = []
    for name in sorted(pinned.keys() | stock.keys()):
        both = (pinned.get(name, "not run"), stock.get(name, "not run"))
        if both == ("passed", "passed") or (both == ("refused", "refused") and name in REFUSALS):
            continue
        found.append(f"{name}: pinned {both[0]}, stock {both[1]}")
    if not pinned:
        found.append("no test ran")
    return found + [f"{kernel}: {count} candidates timed on the pinned side" for kernel, count in sorted(timed.items())]


def state_of(case: ElementTree.Element) -> str:
    """The outcome of a test in pytest's report."""
    failures = [child for child in case if child.tag in ("failure", "error")]
    if failures:
        said = " ".join(f"{child.get('message') or ''} {child.text or ''}" for child in failures)
        return "refused" if REFUSED in said else "failed"
    return "skipped" if any(child.tag == "skipped" for child in case) else "passed"


def _environment(options: argparse.Namespace, folder: Path) -> dict[str, str]:
    path = [str(ROOT), *([str(options.site.resolve())] if options.site else []), os.environ.get("PYTHONPATH", "")]
    base = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, path)), "TRITON_CACHE_DIR": str(folder / "cache")}
    return {**base, "TRITON_INTERPRET": "1"} if options.interpret else base


def _run(side: str, found: dict[str, list[str]], base: dict[str, str], folder: Path, deadline: float) -> dict[str, str]:
    """Outcome of each test, by name; of a suite that had to be stopped, or crashed, one outcome of its own."""
    processes = {}
    for index, (name, arguments) in enumerate(found.items()):
        report = folder / f"{side}.{index}.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", str(folder)]
        command += ["-p", "bench.package_checks", "-p", "no:cacheprovider", f"--junitxml={report}", *arguments]
        env = base
        if side == "pinned":
            manifest = str(folder / f"{index}.manifest.json")
            policy = AutotunePolicy(mode="pinned", modules=("mamba_ssm", "fla"), manifest_path=manifest)
            env = environment(policy, base=base)
        log = (folder / f"{side}.{index}.log").open("w+")
        processes[name] = (subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=log), report, log)
    outcomes: dict[str, str] = {}
    for name, (process, report, log) in processes.items():
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            outcomes[name] = "not finished in time"
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
        for case in cases:
            outcomes[str(case.get("name"))] = state_of(case)
        if name not in outcomes and (not cases or process.returncode not in (0, 1)):
            outcomes[name] = f"{len(cases)} tests ran, exit code {process.returncode}"
        log.seek(0)
        if any(outcomes.get(str(case.get("name"))) == "failed" for case in cases) or not cases:
            print(f"--- {side}, {name}\n{log.read()[-1500:]}")
        log.close()
    return outcomes
