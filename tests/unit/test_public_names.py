"""One import path: ``tuning`` has these names and no others, each loaded when it is first asked for."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import tuning
from tuning import errors

ROOT = Path(__file__).parents[2]

# Where each name lives. Adding a line here is adding to the public API.
HOMES = {
    "arguments": ["add_arguments", "policy_from_args", "policy_from_mapping", "policy_from_yaml", "policy_to_argv"],
    "errors": [
        "AbsentRankError",
        "CostError",
        "DeterminismError",
        "DisagreementError",
        "InventoryError",
        "JournalError",
        "MetricStandardError",
        "PolicyError",
        "TableError",
        "TableMissError",
        "TuningError",
        "UnsupportedTritonError",
    ],
    "installation": [
        "Installation",
        "active_policy",
        "benchmarks_run",
        "choices",
        "deterministic_mode",
        "install",
        "load_state_dict",
        "maybe_verify_choices",
        "state_dict",
        "uninstall",
        "verify_choices",
    ],
    "inventory": ["AutotunerInfo", "list_autotuners"],
    "policy": ["AutotunePolicy"],
    "spec": ["Choice"],
    "tables": ["Tables", "load_tables"],
}
NAMES = sorted(name for names in HOMES.values() for name in names)


def in_a_fresh_process(program: str) -> str:
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_all_is_this_list() -> None:
    assert tuning.__all__ == NAMES
    assert dir(tuning) == sorted([*NAMES, "__version__"])


def test_every_error_is_public() -> None:
    assert HOMES["errors"] == sorted(errors.__all__)


@pytest.mark.parametrize(("home", "name"), [(home, name) for home, names in HOMES.items() for name in names])
def test_a_name_is_the_object_of_its_module(home: str, name: str) -> None:
    assert getattr(tuning, name) is getattr(importlib.import_module(f"tuning.{home}"), name)
    assert getattr(tuning, name).__doc__


def test_nothing_is_loaded_before_it_is_asked_for() -> None:
    program = (
        "import sys, tuning\n"
        "print(sorted(name for name in sys.modules if name.startswith('tuning.')))\n"
        "tuning.TuningError\n"
        "print(sorted(name for name in sys.modules if name.startswith('tuning.')))\n"
        "print([name for name in ('torch', 'triton') if name in sys.modules])\n"
    )
    assert in_a_fresh_process(program).splitlines() == ["[]", "['tuning.errors']", "[]"]


def test_a_star_import_brings_the_names_and_neither_torch_nor_triton() -> None:
    program = (
        "import sys\nbefore = set(globals())\nfrom tuning import *\n"
        "print(sorted(set(globals()) - before - {'before'}))\n"
        "print([name for name in ('torch', 'triton') if name in sys.modules])\n"
    )
    assert in_a_fresh_process(program).splitlines() == [repr(NAMES), "[]"]


def test_importing_loads_only_the_standard_library_beside_itself() -> None:
    program = "import sys\nbefore = set(sys.modules)\nimport tuning\nprint(*(set(sys.modules) - before), sep='\\n')\n"
    loaded = {name.partition(".")[0] for name in in_a_fresh_process(program).splitlines()}
    assert "tuning" in loaded
    assert loaded - set(sys.stdlib_module_names) == {"tuning"}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'tuning' has no attribute 'instal'"):
        tuning.instal  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'instal'"):
        from tuning import instal  # noqa: F401


def test_type_checkers_see_the_same_names() -> None:
    import ast

    module = ast.parse((ROOT / "tuning" / "__init__.py").read_text())
    [block] = [node for node in module.body if isinstance(node, ast.If)]
    seen = {
        node.module: sorted(alias.name for alias in node.names)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
    }
    assert seen == {home: sorted(names) for home, names in HOMES.items()}
