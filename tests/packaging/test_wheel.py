"""What is built from the repository: installed elsewhere, with the repository out of sight, it has every table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLES = ROOT / "tables"
ARCHS = sorted(path.name for path in TABLES.iterdir() if path.is_dir())
RUNTIME = {"msgpack", "torch", "triton"}
EXTRAS = {"demo", "mamba", "plot", "report", "test", "yaml"}

# Prints where the package came from, what a search for `tables` finds, and the entries of every table by arch.
PROBE = """
import importlib.util, json, sys
import tuning
from tuning.tables import bundled_folder, load_tables
spec = importlib.util.find_spec("tables")
print(json.dumps({
    "package": tuning.__file__,
    "folder": str(bundled_folder()),
    "tables_module": spec and [spec.origin, *(spec.submodule_search_locations or ())],
    "entries": {arch: sum(len(file.entries) for file in load_tables(arch).files) for arch in %r},
}))
"""


def call(*command: str | Path, cwd: Path, **environment: str) -> str:
    """Run a command away from this process's Python path; a failure shows what it printed."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIP_REQUIRE"))}
    result = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**inherited, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist, and a wheel made from that sdist."""
    folder = tmp_path_factory.mktemp("built")
    call(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, ROOT, cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel(built: Path) -> Path:
    [path] = built.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@pytest.fixture(scope="module")
def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh folder with the wheel in it, and nothing else."""
    folder = tmp_path_factory.mktemp("installed")
    install = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target")
    call(*install, folder, wheel, cwd=folder)
    return folder


def entries_in_the_repository() -> dict[str, int]:
    return {
        arch: sum(len(json.loads(path.read_text())["entries"]) for path in (TABLES / arch).glob("*.json"))
        for arch in ARCHS
    }


def test_there_are_tables_to_ship() -> None:
    assert {arch for arch, count in entries_in_the_repository().items() if count > 0} == {"sm90", "sm100", "sm103"}
    denied = {path.parent.name for path in TABLES.glob("*/*.json") if json.loads(path.read_text())["denied"]}
    assert set(ARCHS) == {"sm90", "sm100", "sm103"} | denied


def test_an_installed_wheel_loads_every_table(installed: Path, tmp_path: Path) -> None:
    # -I: neither the current folder, nor PYTHONPATH, nor the user's packages.
    program = f"import sys; sys.path.insert(0, {str(installed)!r})\n" + PROBE % ARCHS
    found = json.loads(call(sys.executable, "-I", "-c", program, cwd=tmp_path))
    assert Path(found["package"]) == installed / "tuning" / "__init__.py"
    assert Path(found["folder"]) == installed / "tuning" / "_tables"
    assert found["entries"] == entries_in_the_repository()


def test_the_wheel_has_one_top_level_package_and_no_module_among_the_tables(names: set[str], installed: Path) -> None:
    assert {name.partition("/")[0] for name in names if ".dist-info/" not in name} == {"tuning"}
    assert not (installed / "tables").exists()
    shipped = {name.removeprefix("tuning/_tables/") for name in names if name.startswith("tuning/_tables/")}
    assert shipped == {path.relative_to(TABLES).as_posix() for path in TABLES.rglob("*") if path.is_file()}
    assert not any(name.endswith(".py") for name in shipped)


def test_the_wheel_has_every_module_and_is_typed(names: set[str]) -> None:
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "tuning").rglob("*.py")}
    assert {name for name in names if name.endswith(".py")} == modules
    assert "tuning/py.typed" in names


def test_the_sdist_has_tests_and_tables(built: Path) -> None:
    [path] = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        files = {name.partition("/")[2] for name in archive.getnames()}
    tables = {path.relative_to(ROOT).as_posix() for path in TABLES.rglob("*.json")}
    assert tables | {"pyproject.toml", "README.md", "tests/conftest.py", "tests/packaging/test_wheel.py"} <= files
    assert not any("__pycache__" in name or name.startswith(".venv") for name in files)


def test_a_wheel_from_the_repository_equals_one_from_the_sdist(wheel: Path, tmp_path: Path) -> None:
    call(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, ROOT, cwd=tmp_path)
    [direct] = tmp_path.glob("*.whl")
    assert direct.read_bytes() == wheel.read_bytes()


def test_metadata(metadata: Message) -> None:
    assert metadata["Name"] == "triton-tuning"
    assert metadata["Requires-Python"] == ">=3.10"
    assert "Typing :: Typed" in metadata.get_all("Classifier", [])
    assert metadata.get_payload(), "the README is the description"
    assert set(metadata.get_all("Provides-Extra", [])) == EXTRAS


def test_pytest_finds_the_plugin(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        [name] = [name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt")]
        text = archive.read(name).decode()
    assert "[pytest11]\ntriton-tuning-metrics = tuning.bitexact.pytest_plugin\n" in text


def test_dependencies_are_few_and_none_is_pinned_to_one_version(metadata: Message) -> None:
    from packaging.requirements import Requirement

    requirements = [Requirement(line) for line in metadata.get_all("Requires-Dist", [])]
    runtime = {requirement.name: requirement.specifier for requirement in requirements if requirement.marker is None}
    assert set(runtime) == RUNTIME
    assert not any(part.operator in ("==", "===", "~=") for each in requirements for part in each.specifier)
    for version in ("3.2.0", "3.3.1", "3.4.0", "3.6.0", "3.9.0", "3.9.1"):
        assert version in runtime["triton"]
    for version in ("3.1.0", "3.10.0", "4.0.0"):
        assert version not in runtime["triton"]
    for version in ("2.6.0", "2.13.0+cpu", "2.15.0", "3.0.0"):
        assert version in runtime["torch"]
    mamba = {
        requirement.name for requirement in requirements if requirement.marker and "mamba" in str(requirement.marker)
    }
    assert mamba == {"mamba-ssm", "causal-conv1d"}


def test_the_command_is_the_module(installed: Path, tmp_path: Path) -> None:
    command = installed / "bin" / "triton-tuning"
    by_name = call(command, "--help", cwd=tmp_path, PYTHONPATH=str(installed))
    by_module = call(sys.executable, "-m", "tuning", "--help", cwd=tmp_path, PYTHONPATH=str(installed))
    assert by_name == by_module
    assert by_name.startswith("usage: triton-tuning ")


def test_an_editable_install_reads_the_tables_where_they_are(tmp_path: Path) -> None:
    backend = f"from hatchling.build import build_editable; build_editable({str(tmp_path)!r})"
    call(sys.executable, "-c", backend, cwd=ROOT)
    [wheel] = tmp_path.glob("*.whl")
    folder = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    assert not any(path.suffix == ".json" for path in folder.rglob("*")), "a copy would go stale"
    # addsitedir: what the interpreter does with its own site-packages, .pth files included.
    program = f"import site; site.addsitedir({str(folder)!r})\n" + PROBE % ARCHS
    found = json.loads(call(sys.executable, "-I", "-c", program, cwd=tmp_path))
    assert Path(found["package"]) == ROOT / "tuning" / "__init__.py"
    assert Path(found["folder"]) == TABLES
    assert found["entries"] == entries_in_the_repository()
    assert not found["tables_module"] or not any(str(ROOT) in str(place) for place in found["tables_module"])
