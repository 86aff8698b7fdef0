"""Who may import what, held by reading every module of the package."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tuning"

# Low to high. A part imports what lies below it, and itself. Siblings do not import each other.
LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"errors", "_atomic", "_bounded", "_patches", "_words"}),
    frozenset({"spec"}),
    frozenset({"policy", "selection", "tables", "journal", "merge", "verification", "manifest"}),
    frozenset({"interception", "inductor", "interpreter", "inventory", "determinism", "resumption"}),
    frozenset({"installation"}),
    frozenset({"arguments", "bitexact", "callbacks", "checking", "difference", "freeze", "interop", "report", "warmup"})
    | {"_console", "explanation"},
    frozenset({"demo", "program"}),
    frozenset({"cli"}),
    frozenset({"__main__"}),
)
SIBLINGS = {
    ("merge", "journal"): "merging is what turns journals ...",
    ("merge", "tables"): "... into tables",
    ("merge", "selection"): "equal times are told apart by the footprint that choosing ranks by",
    ("inventory", "interception"): "what an autotuner is, on the Triton at hand, is known there alone",
}
# A private module `_merge_facts` belongs to the public one that it was split off from, `merge`. Where the names differ:
PRIVATE_PARTS = {
    "_autotuner_": "inventory",
    "_check_": "verification",
    "_commands": "cli",
    "_config_": "spec",
    "_launch_": "interception",
    "_package_": "inventory",
    "_program_start": "program",
    "_table_": "tables",
}

TRITON_INTERNALS = r"triton\.(runtime|compiler|backends|knobs|tools|_[a-zA-Z]\w*)\b"
INDUCTOR_INTERNALS = r"torch\._inductor\b"
NAMED_ONLY_IN = {
    TRITON_INTERNALS: {"interception", "interpreter"},  # the latter: sets a driver in processes made for that alone
    INDUCTOR_INTERNALS: {"inductor", "determinism.torch_flags"},  # the latter: one setting, config.deterministic
}

# Everything else is loaded when it is first needed: torch and triton because they are slow and touch the machine, the
# packages of the extras because they may be missing. Modules that compute with tensors are loaded by nobody else early.
LOADED_WITH_EVERY_MODULE = {"msgpack"}
TENSOR_CODE = {"bitexact.cells", "bitexact.low_precision", "bitexact.models", "bitexact.suite_worker"}
TENSOR_CODE |= {"determinism.delta_chunks", "determinism.gated_delta", "determinism.l2norm"}
PYTEST_CODE = {"bitexact.pytest_plugin"}  # loaded by pytest alone

# What chooses or merges sees its arguments and nothing else.
PURE = (
    "spec",
    "selection",
    "_selection_classes",
    "_check_classes",
    "_selection_nearest",
    "_merge_pools",
    "_merge_facts",
    "_merge_tables",
)
IMPURE = {"datetime", "glob", "io", "logging", "os", "pathlib", "platform", "random", "secrets", "shutil", "socket"}
IMPURE |= {"subprocess", "sys", "tempfile", "threading", "time", "uuid"}

LONGEST = 400
LONG_FOR_A_REASON = {
    "_table_schema": "the reader of a format and its JSON Schema, side by side so that they do not drift apart",
    "installation": "the only process-wide state; splitting it would spread that state",
    "interception": "the only file that may name Triton's runtime internals",
    "policy": "every field stands with its metadata, from which flags, YAML and help are made",
    "selection": "every rule of choosing in the order in which they are tried",
    "spec": "the vocabulary of all other modules; the encoding and the types it identifies belong together",
}

EMPTY_NAMES = {"util", "utils", "manager", "managers", "helper", "helpers", "handler", "handlers"}


def module_name(path: Path) -> str:
    """``determinism.flash`` for ``tuning/determinism/flash.py``; the empty name for ``tuning/__init__.py``."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}
each_module = pytest.mark.parametrize("name", [pytest.param(name, id=name or "__init__") for name in MODULES])


@cache
def tree(name: str) -> ast.Module:
    return ast.parse(MODULES[name].read_text(encoding="utf-8"), str(MODULES[name]))


def part_of(name: str) -> str:
    """The part of the package that a module belongs to."""
    top = name.partition(".")[0]
    if not top.startswith("_") or any(top in parts for parts in LAYERS):
        return top
    named = next((part for prefix, part in PRIVATE_PARTS.items() if top.startswith(prefix)), None)
    return named or top.split("_")[1]


def statements(node: ast.AST, *, typing_too: bool, functions_too: bool) -> Iterator[ast.AST]:
    """Every node below ``node``, without what only type checkers run, or the bodies of functions, if so asked."""
    for child in ast.iter_child_nodes(node):
        if not functions_too and isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            continue
        if not typing_too and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test):
            continue
        yield child
        yield from statements(child, typing_too=typing_too, functions_too=functions_too)


def imported(name: str, *, typing_too: bool = True, functions_too: bool = True) -> Iterator[str]:
    """Dotted names that a module imports, relative ones resolved; ``from a import b`` gives ``a.b``."""
    is_package = MODULES[name].name == "__init__.py"
    for node in statements(tree(name), typing_too=typing_too, functions_too=functions_too):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                here = ["tuning", *filter(None, name.split("."))]
                above = here[: len(here) - node.level + is_package]
                base = ".".join([*above, *filter(None, [base])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def parts_imported(name: str) -> set[str]:
    """The other parts of this package that a module imports."""
    found = set()
    for target in imported(name):
        root, _, rest = target.partition(".")
        if root == "tuning" and rest != "__version__":
            found.add(part_of(rest.partition(".")[0]) if rest else "")
    return found - {part_of(name)}


def layer(part: str) -> int:
    return next(index for index, parts in enumerate(LAYERS) if part in parts)


@each_module
def test_every_module_has_a_place(name: str) -> None:
    assert not name or any(part_of(name) in parts for parts in LAYERS), (
        f"tuning/{name}.py: name it in LAYERS, or its prefix in PRIVATE_PARTS"
    )


@each_module
def test_imports_point_downwards(name: str) -> None:
    part = part_of(name)
    if not any(part in parts for parts in LAYERS):
        return  # the package, which loads every name on demand, and what has no place yet: tested above
    for target in parts_imported(name):
        assert any(target in parts for parts in LAYERS), f"{name} imports {target or 'the package itself'}"
        assert layer(target) < layer(part) or (part, target) in SIBLINGS, (
            f"{name} imports {target}, which is not below it"
        )


def test_no_exception_is_left_over() -> None:
    used = {(part_of(name), target) for name in MODULES for target in parts_imported(name)}
    assert set(SIBLINGS) <= used
    assert {prefix for prefix in PRIVATE_PARTS if not any(name.startswith(prefix) for name in MODULES)} == set()
    assert set(LONG_FOR_A_REASON) | set(PURE) | TENSOR_CODE | PYTEST_CODE <= set(MODULES)


def spoken_names(name: str) -> Iterator[str]:
    """Every dotted name that a module imports, reaches by attributes, or holds in a string outside documentation."""
    yield from imported(name)
    prose = {id(node.value) for node in ast.walk(tree(name)) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Attribute):
            yield ast.unparse(node)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            yield node.value


@pytest.mark.parametrize("pattern", NAMED_ONLY_IN, ids=["triton", "inductor"])
def test_internals_are_named_in_one_file(pattern: str) -> None:
    naming = {name for name in MODULES for spoken in spoken_names(name) if re.search(rf"(?<![\w.]){pattern}", spoken)}
    assert {name for name in naming if not {name, part_of(name)} & NAMED_ONLY_IN[pattern]} == set()
    if pattern is TRITON_INTERNALS:
        assert naming  # the search does find what there is


@each_module
def test_loading_a_module_loads_nothing_heavy_or_optional(name: str) -> None:
    roots = {target.partition(".")[0] for target in imported(name, typing_too=False, functions_too=False)}
    allowed = LOADED_WITH_EVERY_MODULE | ({"torch"} if name in TENSOR_CODE else set())
    allowed |= {"pytest"} if name in PYTEST_CODE else set()
    assert roots - set(sys.stdlib_module_names) - {"tuning"} <= allowed
    early = {target.removeprefix("tuning.") for target in imported(name, typing_too=False, functions_too=False)}
    assert name in TENSOR_CODE or not any(target.startswith(f"{heavy}.") for target in early for heavy in TENSOR_CODE)


def test_importing_every_module_imports_neither_torch_nor_triton() -> None:
    names = [
        ".".join(filter(None, ["tuning", name])) for name in MODULES if name != "__main__" and name not in TENSOR_CODE
    ]
    program = (
        "import sys, importlib\n"
        "import tuning\n"
        "early = [name for name in sys.modules if name.startswith('tuning.')]\n"
        "assert not early, early\n"
        f"for name in {names!r}: importlib.import_module(name)\n"
        "heavy = {'torch', 'triton', 'numpy', 'yaml', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", PURE)
def test_what_chooses_and_merges_is_pure(name: str) -> None:
    assert {target.partition(".")[0] for target in imported(name)} & IMPURE == set()
    called = {
        node.func.id for node in ast.walk(tree(name)) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert called & {"open", "input", "print"} == set()


@each_module
def test_nothing_unpickles(name: str) -> None:
    targets = set(imported(name))
    assert {target.partition(".")[0] for target in targets} & {"marshal", "shelve", "dill", "cloudpickle"} == set()
    reading = re.compile(r"pickle\.(load|loads|Unpickler)")
    assert [spoken for spoken in spoken_names(name) if reading.fullmatch(spoken)] == []


@each_module
def test_no_input_is_checked_by_assert(name: str) -> None:
    # An assert may tell the type checker what the reader knows already.
    narrowing = re.compile(r"\w[\w.]* is not None|isinstance\(.*\)")
    asserts = [ast.unparse(node.test) for node in ast.walk(tree(name)) if isinstance(node, ast.Assert)]
    assert [test for test in asserts if not narrowing.fullmatch(test)] == []


@each_module
def test_a_long_module_has_a_reason(name: str) -> None:
    lines = len(MODULES[name].read_text(encoding="utf-8").splitlines())
    assert (lines > LONGEST) == (name in LONG_FOR_A_REASON), (
        f"{name or '__init__'} has {lines} lines: past {LONGEST} it needs a reason in LONG_FOR_A_REASON, and only then"
    )


def test_no_file_has_an_empty_name() -> None:
    files = [path for folder in ("tuning", "tests", "bench") for path in (ROOT / folder).rglob("*.py")]
    assert len(files) > len(MODULES)
    words = {
        word: path
        for path in files
        for part in path.relative_to(ROOT).with_suffix("").parts
        for word in part.split("_")
    }
    assert {word: path for word, path in words.items() if word in EMPTY_NAMES} == {}


def sort_key(name: str) -> tuple[int, str]:
    """Constants, classes, functions; each by name."""
    return (0 if name.isupper() else 1 if name.lstrip("_")[:1].isupper() else 2), name


def defined(name: str) -> set[str]:
    """Names without an underscore that a module itself defines at its top level."""
    found: set[str] = set()
    for node in tree(name).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found.update(target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
    return {found_name for found_name in found if not found_name.startswith("_")} - {"logger"}


@cache
def listed(name: str) -> tuple[str, ...]:
    """``__all__`` of a module, in its order."""
    literals = [
        node.value
        for node in tree(name).body
        if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == ["__all__"]
    ]
    assert len(literals) == 1, f"{name or '__init__'} has no __all__"
    return tuple(ast.literal_eval(literals[0]))


@each_module
def test_all_is_sorted_and_complete(name: str) -> None:
    if name == "__main__":
        return
    assert list(listed(name)) == sorted(set(listed(name)), key=sort_key)
    if not name.startswith("_"):
        assert defined(name) - set(listed(name)) == set(), "visible, and not in __all__"
    # What a module lists and does not define comes from a part of its own; the package itself loads on demand.
    own = {
        target.rpartition(".")[2]
        for target in imported(name)
        if target.startswith("tuning.") and part_of(target.split(".")[1]) == part_of(name)
    }
    assert not name or set(listed(name)) - defined(name) <= own, "in __all__, and neither defined here nor in a part"


@each_module
def test_modules_take_from_each_other_only_what_those_list(name: str) -> None:
    for target in imported(name):
        home, _, taken = target.removeprefix("tuning.").rpartition(".")
        if target.startswith("tuning.") and home in MODULES and ".".join(filter(None, [home, taken])) not in MODULES:
            assert taken in (*listed(home), "__version__"), f"{home or 'the package'} does not list {taken}"
