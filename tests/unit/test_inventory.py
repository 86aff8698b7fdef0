"""Finding autotuners in packages written for the purpose, what is said of each, and joining that with a run."""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import triton

from tuning._autotuner_search import search
from tuning._autotuner_source import ModuleSource, counts_tokens
from tuning.errors import InventoryError, TuningError
from tuning.interception import AutotunerFacts, facts, find_autotuner
from tuning.inventory import (
    AutotunerInfo,
    Coverage,
    Inventory,
    TableCoverage,
    coverage,
    join,
    known_archs,
    list_autotuners,
    package_without_init,
    rows,
    take_inventory,
)
from tuning.policy import AutotunePolicy
from tuning.spec import Choice, Key, LaunchConfig
from tuning.tables import Denied, Entry, TableFile, write_table

pytestmark = pytest.mark.stub

# Without a GPU, Triton 3.3 decorates only with a stopwatch of the caller's own, and 3.2 only with a driver, too.
HEAD = """
import functools
import triton
import triton.language as tl
from triton.runtime.autotuner import Autotuner, Heuristics

def bench(call, quantiles=None):
    return [1.0, 1.0, 1.0]

if triton.__version__.startswith("3.2."):
    from triton.runtime.driver import driver
    driver.set_active(type("Driver", (), {"get_benchmarker": lambda self: bench})())

def configs(*blocks):
    return [triton.Config({"BLOCK": block}) for block in blocks]

"""
KERNEL = """
@triton.autotune(configs=configs(16, 32), key=["n"], do_bench=bench)
@triton.jit
def {name}(x, n, BLOCK: tl.constexpr):
    pass

"""

Files = Mapping[str, str]
Maker = Callable[[str, Files], str]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Maker]:
    """Writes a package and returns its name; its modules, and the driver it may have set, are forgotten afterwards."""
    monkeypatch.syspath_prepend(tmp_path)
    if triton.__version__.startswith("3.2."):
        monkeypatch.setattr(triton.runtime.driver, "active", triton.runtime.driver.active)
    made: list[str] = []

    def write(name: str, files: Files) -> str:
        made.append(name)
        for path, text in files.items():
            file = tmp_path / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(textwrap.dedent(text))
        return name

    yield write
    for loaded in [module for module in sys.modules if module.partition(".")[0] in made]:
        del sys.modules[loaded]


def kernels(*names: str) -> str:
    return HEAD + "".join(KERNEL.format(name=name) for name in names)


def by_name(infos: Any) -> dict[str, AutotunerInfo]:
    return {info.kernel.rpartition(".")[2]: info for info in infos}


def kinds(info: AutotunerInfo) -> list[str]:
    return [note.kind for note in info.notes]


def note(info: AutotunerInfo, kind: str) -> str:
    return next(item.text for item in info.notes if item.kind == kind)


# --- finding ----------------------------------------------------------------------------------------------------------


HOSTILE = """
class Lazy:
    def __getattribute__(self, name):
        raise RuntimeError(f"not loaded yet: {name}")

class Classless:
    @property
    def __class__(self):
        raise RuntimeError("not loaded yet")

class Unreadable(Classless):
    def __init__(self):
        self.fn = self

a_lazy = Lazy()
a_classless = Classless()
an_unreadable = Unreadable()
a_list = [Lazy(), Classless()]
a_dict = {Lazy(): 1, "lazy": Lazy(), Classless(): 2, "kernel": None}

"""


def test_an_object_that_cannot_be_looked_at_hides_no_kernel(make: Maker, caplog: pytest.LogCaptureFixture) -> None:
    held = 'a_list.append(one)\na_dict["kernel"] = two\ndel one, two\n'
    name = make("inv_hostile", {"__init__.py": HOSTILE + kernels("one", "two", "zone") + held})
    with caplog.at_level(logging.DEBUG, logger="tuning.inventory"):
        found = take_inventory([name])
    assert list(by_name(found.autotuners)) == ["one", "two", "zone"]
    assert not found.problems
    assert "inv_hostile.a_lazy cannot be searched: RuntimeError" in caplog.messages
    assert "inv_hostile.a_classless cannot be searched: RuntimeError" in caplog.messages


def test_everything_below_a_package_is_found_once_and_described(make: Maker, tmp_path: Path) -> None:
    name = make(
        "inv_plain",
        {
            "__init__.py": "from .deep.kernels import one as again\n",
            "deep/__init__.py": "",
            "deep/kernels.py": kernels("one"),
            "other.py": "from .deep.kernels import one\n" + kernels("two"),
        },
    )
    found = take_inventory([name])
    assert [info.kernel for info in found.autotuners] == ["inv_plain.deep.kernels.one", "inv_plain.other.two"]
    assert found.candidates == 4
    assert found.problems == ()
    one = found.autotuners[0]
    lines = (tmp_path / "inv_plain/deep/kernels.py").read_text().splitlines()
    file, _, line = (one.origin or "").rpartition(":")
    assert file == str(tmp_path / "inv_plain/deep/kernels.py")
    assert lines[int(line) - 1].startswith("@triton.autotune")
    assert one.module == "inv_plain.deep.kernels"
    assert one.key_names == ("n",)
    assert one.candidates == tuple(LaunchConfig.of(triton.Config({"BLOCK": block})) for block in (16, 32))
    assert one.found_at == ("inv_plain.deep.kernels.one", "inv_plain.again", "inv_plain.other.one")
    assert one.wrapped == ("autotuner",)
    assert (one.state, one.reason, one.notes, one.reached) == ("found", "", (), False)
    assert list_autotuners(name) == list(found.autotuners)


WRAPPED = (
    HEAD
    + """
def tuned(function):
    return triton.autotune(configs=configs(16, 32), key=["n"], do_bench=bench)(triton.jit(function))

def heuristics(kernel):
    return triton.heuristics({"EVEN": lambda args: True})(kernel)

def outside(x, n, EVEN: tl.constexpr, BLOCK: tl.constexpr): pass
outside = heuristics(tuned(outside))

@triton.autotune(configs=configs(16, 32), key=["n"], do_bench=bench)
@triton.heuristics({"EVEN": lambda args: True})
@triton.jit
def inside(x, n, EVEN: tl.constexpr, BLOCK: tl.constexpr): pass

def _partial(x, n, BLOCK: tl.constexpr): pass
def launch_with(kernel): ...
partial = functools.partial(launch_with, tuned(_partial))
del _partial

def _method(x, n, BLOCK: tl.constexpr): pass
run = tuned(_method).run
del _method

def _launcher(x, n, BLOCK: tl.constexpr): pass
launcher = [tuned(_launcher)[(1,)]]
del _launcher

def _wraps(x, n, BLOCK: tl.constexpr): pass
def wrapping(kernel):
    @functools.wraps(kernel)
    def launch(*args): ...
    return launch
wraps = wrapping(tuned(_wraps))
del _wraps

def _closure(x, n, BLOCK: tl.constexpr): pass
def closing(kernel):
    def launch(*args):
        return kernel
    return launch
closure = closing(tuned(_closure))
del _closure

def _in_dict(x, n, BLOCK: tl.constexpr): pass
def _in_list(x, n, BLOCK: tl.constexpr): pass
TABLE = {"a": {"b": tuned(_in_dict)}, 1: [None, (tuned(_in_list),)]}
del _in_dict, _in_list

def _default(x, n, BLOCK: tl.constexpr): pass
def launch_default(x, *, kernel=tuned(_default)): ...
del _default

def _positional(x, n, BLOCK: tl.constexpr): pass
def launch_positional(x, kernel=tuned(_positional)): ...
del _positional

def _in_key(x, n, BLOCK: tl.constexpr): pass
GRIDS = {tuned(_in_key): 1}
del _in_key

class Op:
    @triton.autotune(configs=configs(16, 32), key=["n"], do_bench=bench)
    @triton.jit
    def attribute(x, n, BLOCK: tl.constexpr): pass

    @staticmethod
    @functools.lru_cache
    def launch(kernel=None): ...

    def __init__(self, kernel):
        self.kernel = kernel

def _instance(x, n, BLOCK: tl.constexpr): pass
op = Op(tuned(_instance))
del _instance

def direct(x, n, BLOCK: tl.constexpr): pass
direct = Autotuner(triton.jit(direct), ["x", "n", "BLOCK"], configs(8), ["n"], None, None, do_bench=bench)
"""
)


@pytest.mark.parametrize(
    ("kernel", "where", "wrapped"),
    [
        ("outside", "outside", ("Heuristics", "autotuner")),
        ("inside", "inside", ("autotuner", "Heuristics")),
        ("_partial", "partial.args", ("partial", "autotuner")),
        ("_method", "run.__self__", ("method", "autotuner")),
        ("_launcher", "launcher[0].<closure self>", ("list", "function", "autotuner")),
        ("_wraps", "wraps.__wrapped__", ("function", "autotuner")),
        ("_closure", "closure.<closure kernel>", ("function", "autotuner")),
        ("_in_dict", "TABLE['a']['b']", ("dict", "dict", "autotuner")),
        ("_in_list", "TABLE[1][1][0]", ("dict", "list", "tuple", "autotuner")),
        ("_default", "launch_default.<default kernel>", ("function", "autotuner")),
        ("_positional", "launch_positional.<default>", ("function", "autotuner")),
        ("_in_key", "GRIDS.keys()", ("dict", "autotuner")),
        ("Op.attribute", "Op.attribute", ("class", "autotuner")),
        ("_instance", "op.kernel", ("Op", "autotuner")),
        ("direct", "direct", ("autotuner",)),
    ],
)
def test_a_kernel_is_found_behind(make: Maker, kernel: str, where: str, wrapped: tuple[str, ...]) -> None:
    name = make("inv_wrapped", {"__init__.py": "", "ops.py": WRAPPED})
    found = {info.kernel: info for info in list_autotuners(name)}
    assert len(found) == 15
    info = found[f"inv_wrapped.ops.{kernel}"]
    assert info.found_at[0] == f"inv_wrapped.ops.{where}"
    assert info.wrapped == wrapped


def test_searching_runs_no_code_of_the_objects_it_looks_at() -> None:
    class Trap:
        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} was asked for")

        @property
        def fn(self) -> Any:
            raise AssertionError("fn was asked for")

        @property
        def kernel(self) -> Any:
            raise AssertionError("kernel was asked for")

        def __eq__(self, other: object) -> bool:
            raise AssertionError("compared")

        __hash__ = None  # type: ignore[assignment]

    module = ModuleType("inv_trap")
    cycle: list[Any] = [Trap()]
    cycle.append(cycle)
    module.__dict__.update(trap=Trap(), held={"a": Trap()}, cycle=cycle)
    assert search({"inv_trap": module}, [__name__, "inv_trap"]) == ()


def test_the_nearest_place_says_how_a_kernel_is_wrapped(make: Maker) -> None:
    name = make(
        "inv_near",
        {
            "__init__.py": "",
            "kernels.py": kernels("one") + "SHARED = [one]\nAGAIN = SHARED\ndel one\n",
            "names.py": "from .kernels import SHARED\none = SHARED[0]\ndel SHARED\n",
        },
    )
    (info,) = take_inventory(name).autotuners
    # A container is gone through once, however often it is bound.
    assert info.found_at == (f"{name}.names.one", f"{name}.kernels.SHARED[0]")
    assert info.wrapped == ("autotuner",)


def test_imported_before_and_after_triton_autotune_was_swapped_both_are_found(
    make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """fla#798 and fla#1072: FLA swaps triton.autotune for its own; what was decorated earlier keeps Triton's."""
    swapping = (
        HEAD
        + """
class CachedAutotuner(Autotuner):
    def run(self, *args, **kwargs):
        return super().run(*args, **kwargs)

class ClosedAutotuner(Autotuner):
    def run(self, *args, **kwargs):
        return self.fn.run(*args, **kwargs)

def cached_autotune(configs, key, kind=CachedAutotuner, **ignored):
    return lambda fn: kind(fn, fn.arg_names, configs, key, None, None, do_bench=bench)
"""
    )
    name = make(
        "inv_swapped",
        {
            "__init__.py": "",
            "before.py": kernels("early"),
            "cache.py": swapping,
            "later.py": kernels("late"),
            "own.py": "from .cache import cached_autotune, ClosedAutotuner\n"
            + HEAD
            + '@cached_autotune(configs(1, 2), ["n"], ClosedAutotuner)\n@triton.jit\n'
            + "def closed(x, n, BLOCK: tl.constexpr): pass\n",
        },
    )
    __import__("inv_swapped.before")
    monkeypatch.setattr(triton, "autotune", __import__("inv_swapped.cache").cache.cached_autotune)
    found = by_name(take_inventory(name).autotuners)
    assert sorted(found) == ["closed", "early", "late"]
    assert found["early"].class_name == "triton.runtime.autotuner.Autotuner"
    assert found["late"].class_name == "inv_swapped.cache.CachedAutotuner"
    assert "before.py:" in str(found["early"].origin)
    assert "later.py:" in str(found["late"].origin)
    assert kinds(found["early"]) == []
    assert kinds(found["late"]) == ["own_run"]
    assert kinds(found["closed"]) == ["run_replaced"]
    assert "given the chosen candidate alone" in note(found["closed"], "run_replaced")


def test_the_order_of_the_list_is_that_of_kernel_names_whatever_was_asked_first(make: Maker) -> None:
    name = make("inv_order", {"__init__.py": "", "b.py": kernels("y", "x"), "a.py": kernels("z")})
    expected = [f"{name}.a.z", f"{name}.b.x", f"{name}.b.y"]
    assert [info.kernel for info in take_inventory([f"{name}.b", f"{name}.a"]).autotuners] == expected
    assert [info.kernel for info in take_inventory([name, f"{name}.a"]).autotuners] == expected


def test_a_module_alone_is_a_list_of_its_own(make: Maker) -> None:
    name = make(
        "inv_single", {"__init__.py": "", "a.py": kernels("one"), "b.py": "from .a import one\n" + kernels("two")}
    )
    found = take_inventory(f"{name}.b")
    assert [info.kernel for info in found.autotuners] == [f"{name}.b.two"]
    assert found.elsewhere == (f"{name}.a.one",)


def test_an_old_name_of_a_module_does_not_list_it_again(make: Maker) -> None:
    alias = "import sys\nfrom . import new\nsys.modules[__name__] = new\n"
    name = make("inv_alias", {"__init__.py": "", "new.py": kernels("one"), "an_old.py": alias})
    found = take_inventory(name)
    assert [info.found_at for info in found.autotuners] == [(f"{name}.new.one",)]
    assert found.problems == ()


def test_two_autotuners_of_one_kernel_name_are_two_and_say_so(make: Maker) -> None:
    first, second = (KERNEL.format(name="one").replace("configs(16, 32)", listed) for listed in ("MANY", "FEW"))
    text = HEAD + "MANY, FEW = configs(16, 32), configs(64)\n" + first + "first = one\n" + second
    name = make("inv_twice", {"__init__.py": text})
    found = take_inventory(name)
    assert [(len(info.candidates), info.declared) for info in found.autotuners] == [(2, 2), (1, 1)]
    assert all(note(info, "shared_name") == "2 autotuners have this kernel name" for info in found.autotuners)


# --- walking ----------------------------------------------------------------------------------------------------------


def test_what_does_not_import_is_a_problem_with_its_reason_and_its_decorators(make: Maker) -> None:
    name = make(
        "inv_broken",
        {
            "__init__.py": "",
            "missing.py": "import no_such_module_anywhere\n" + kernels("a", "b"),
            "exits.py": "import sys\nsys.exit('bye')\n",
            "syntax.py": "def f(:\n",
            "fine.py": kernels("c"),
        },
    )
    found = take_inventory(name)
    assert [info.kernel for info in found.autotuners] == [f"{name}.fine.c"]
    problems = {problem.module: problem for problem in found.problems}
    assert sorted(problems) == [f"{name}.exits", f"{name}.missing", f"{name}.syntax"]
    assert {problem.kind for problem in found.problems} == {"does not import"}
    missing = problems[f"{name}.missing"]
    assert missing.autotuners == 2
    assert missing.reason == "ModuleNotFoundError: No module named 'no_such_module_anywhere'"
    assert problems[f"{name}.exits"].reason == "SystemExit: bye"
    assert str(missing).startswith(f"{name}.missing: does not import (2 autotuners): ModuleNotFoundError")


def test_list_autotuners_warns_of_what_hides_autotuners(make: Maker, caplog: pytest.LogCaptureFixture) -> None:
    name = make(
        "inv_warned", {"__init__.py": "", "a.py": "raise ImportError('no')\n" + kernels("k"), "b.py": "raise OSError\n"}
    )
    with caplog.at_level(logging.INFO, "tuning"):
        assert list_autotuners(name) == []
    said = {record.getMessage(): record.levelno for record in caplog.records}
    assert said == {
        f"{name}.a: does not import (1 autotuner): ImportError: no": logging.WARNING,
        f"{name}.b: does not import: OSError": logging.INFO,
    }


def test_an_interrupt_is_no_problem_of_a_module(make: Maker) -> None:
    name = make("inv_interrupted", {"__init__.py": "", "a.py": "raise KeyboardInterrupt\n"})
    with pytest.raises(KeyboardInterrupt):
        take_inventory(name)


def test_a_package_whose_init_fails_is_walked_without_it_and_leaves_nothing_behind(make: Maker) -> None:
    name = make(
        "inv_headless",
        {
            "__init__.py": "from . import ops\nimport no_such_module_anywhere\n",
            "ops/__init__.py": "raise RuntimeError('no ops')\n",
            "ops/deep/__init__.py": "",
            "ops/deep/kernels.py": kernels("one"),
            "uses.py": "from .ops.deep.kernels import one\n",
            "wants.py": "from .ops import something\n",
        },
    )
    found = take_inventory(name)
    (wants,) = [problem.reason for problem in found.problems if problem.module == f"{name}.wants"]
    assert wants.endswith(f"({name}.ops is walked without its __init__)")
    found = replace(found, problems=tuple(problem for problem in found.problems if problem.reason != wants))
    assert [info.kernel for info in found.autotuners] == [f"{name}.ops.deep.kernels.one"]
    assert found.autotuners[0].found_at == (f"{name}.ops.deep.kernels.one", f"{name}.uses.one")
    assert [(problem.module, problem.kind, problem.reason) for problem in found.problems] == [
        (
            name,
            "walked without __init__",
            "package __init__ failed with RuntimeError: no ops; walking its folder without it",
        ),
        (
            f"{name}.ops",
            "walked without __init__",
            "package __init__ failed with RuntimeError: no ops; walking its folder without it",
        ),
    ]
    assert name not in sys.modules
    assert f"{name}.ops" not in sys.modules
    with pytest.raises(RuntimeError, match="no ops"):
        __import__(name)
    # Asked again, the same objects are there: nothing was imported twice.
    kept = sys.modules[f"{name}.ops.deep.kernels"]
    assert [info.kernel for info in take_inventory(f"{name}.ops.deep").autotuners] == [f"{name}.ops.deep.kernels.one"]
    assert sys.modules[f"{name}.ops.deep.kernels"] is kept


def test_package_without_init_lets_one_import_below_a_package(make: Maker) -> None:
    name = make("inv_lent", {"__init__.py": "import no_such_module_anywhere\n", "ops/k.py": kernels("one")})
    with package_without_init(name) as package:
        assert package is sys.modules[name]
        module = __import__(f"{name}.ops.k", fromlist=["one"])
    assert find_autotuner(module.one) is not None
    assert name not in sys.modules
    with pytest.raises(ImportError), package_without_init(name):
        raise ImportError
    assert name not in sys.modules


def test_a_package_that_imports_is_not_touched(make: Maker) -> None:
    name = make("inv_whole", {"__init__.py": "VALUE = 1\n"})
    with package_without_init(name) as package:
        assert package.VALUE == 1
    assert sys.modules[name] is package


def test_what_is_run_by_hand_is_not_imported_but_counted(make: Maker) -> None:
    bomb = "raise AssertionError('imported')\n"
    name = make(
        "inv_scripts",
        {
            "__init__.py": "",
            "__main__.py": bomb,
            "setup.py": bomb,
            "conftest.py": bomb,
            "tests/__init__.py": bomb,
            "test_ops.py": bomb + kernels("tested"),
            "ops_test.py": bomb,
            "run-me.py": bomb,
            "scripts/__init__.py": bomb,
            "loose/tool.py": bomb,
            "loose/kernels.py": kernels("loose"),
            "testing.py": kernels("library"),
            "contest.py": kernels("contest"),
            "data/readme.txt": "",
        },
    )
    found = take_inventory(name)
    names = [info.kernel.removeprefix(name + ".") for info in found.autotuners]
    assert names == ["contest.contest", "loose.kernels.loose", "testing.library"]
    assert {problem.kind for problem in found.problems} == {"skipped"}
    skipped = {problem.module.removeprefix(name + "."): problem.autotuners for problem in found.problems}
    assert skipped == {
        "__main__": 0,
        "conftest": 0,
        "ops_test": 0,
        "run-me": 0,
        "scripts": 0,
        "setup": 0,
        "test_ops": 1,
        "tests": 0,
    }


def test_a_folder_linked_into_itself_is_walked_once(make: Maker, tmp_path: Path) -> None:
    name = make("inv_linked", {"__init__.py": "", "a.py": kernels("one")})
    (tmp_path / name / "again").symlink_to(tmp_path / name, target_is_directory=True)
    assert [info.kernel for info in take_inventory(name).autotuners] == [f"{name}.a.one"]


def test_a_circle_of_imports_that_opens_later_is_no_problem(make: Maker) -> None:
    name = make(
        "inv_circle",
        {
            "__init__.py": "",
            "a.py": "from .b import from_b\n" + kernels("one") + "from_a = 1\n",
            "b.py": "from . import c\nfrom_b = 1\n",
            "c.py": "import sys\nif 'inv_circle.z' not in sys.modules:\n    from .a import from_a\n",
            "z.py": "",
        },
    )
    found = take_inventory(name)
    assert found.problems == ()
    assert [info.kernel for info in found.autotuners] == [f"{name}.a.one"]


def test_a_package_that_opens_later_replaces_its_stand_in_and_holds_its_modules(make: Maker) -> None:
    name = make(
        "inv_opens",
        {
            "__init__.py": "",
            "a/__init__.py": "from ..b import from_b\nfrom_a = 1\n",
            "a/kernels.py": kernels("one"),
            "b.py": "import sys\nif 'inv_opens.z' not in sys.modules:\n    from .a import from_a\nfrom_b = 1\n",
            "z.py": "",
        },
    )
    found = take_inventory(name)
    assert found.problems == ()
    assert [info.kernel for info in found.autotuners] == [f"{name}.a.kernels.one"]
    assert sys.modules[f"{name}.a"].from_a == 1  # type: ignore[attr-defined]
    assert sys.modules[f"{name}.a"].kernels is sys.modules[f"{name}.a.kernels"]  # type: ignore[attr-defined]


def test_a_package_that_stays_shut_keeps_its_stand_in_for_the_second_try(make: Maker) -> None:
    once = "import sys\nif 'inv_shut.z' not in sys.modules:\n    raise ImportError('partially initialized module')\n"
    name = make(
        "inv_shut",
        {
            "__init__.py": "",
            "a/__init__.py": "raise ImportError('partially initialized module, for good')\n",
            "a/kernels.py": once + kernels("one"),
            "z.py": "",
        },
    )
    found = take_inventory(name)
    assert [info.kernel for info in found.autotuners] == [f"{name}.a.kernels.one"]
    assert [problem.module for problem in found.problems] == [f"{name}.a"]
    assert f"{name}.a" not in sys.modules


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ("inv_absent_package", "inv_absent_package: no module named 'inv_absent_package' can be found here"),
        ("json.no_such_part", "json.no_such_part: no module named 'json.no_such_part' can be found here"),
        (["json", "not a name"], "modules: expected dotted names such as 'mamba_ssm.ops', found 'not a name'"),
        (["json", ""], "modules: expected dotted names such as 'mamba_ssm.ops', found ''"),
        ([3], "modules: expected dotted names such as 'mamba_ssm.ops', found 3"),
    ],
)
def test_a_name_that_cannot_be_listed_is_an_error(modules: Any, message: str) -> None:
    with pytest.raises(InventoryError) as caught:
        take_inventory(modules)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, TuningError)
    assert caught.value.reason
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.module, again.reason) == (str(caught.value), caught.value.module, caught.value.reason)


def test_a_module_asked_for_by_name_that_does_not_import_is_an_error(make: Maker) -> None:
    name = make("inv_top", {"__init__.py": "", "bad.py": "raise ValueError('bad\\nvalue')\n"})
    with pytest.raises(InventoryError, match=r"^inv_top\.bad does not import: ValueError: bad value; ") as caught:
        take_inventory(f"{name}.bad")
    assert caught.value.module == f"{name}.bad"
    assert caught.value.reason == "ValueError: bad value"


DRIVER_ADVICE = (
    "Triton 3.2 and 3.3 need an active GPU"
    if triton.__version__.startswith(("3.2.", "3.3."))
    else "the module asks Triton"
)


@pytest.mark.parametrize(
    ("raised", "advice"),
    [
        ("RuntimeError('0 active drivers ([]). There should only be one.')", DRIVER_ADVICE),
        ("RuntimeError('Found empty `transformer-engine` meta package installed.')", "NVTE_PROJECT_BUILDING=1"),
    ],
)
def test_a_known_reason_comes_with_its_remedy(
    make: Maker, monkeypatch: pytest.MonkeyPatch, raised: str, advice: str
) -> None:
    monkeypatch.delenv("NVTE_PROJECT_BUILDING", raising=False)
    name = make("inv_advised", {"__init__.py": "", "a.py": f"raise {raised}\n"})
    assert advice in take_inventory(name).problems[0].reason
    monkeypatch.setenv("NVTE_PROJECT_BUILDING", "1")
    assert (advice in take_inventory(name).problems[0].reason) == (advice != "NVTE_PROJECT_BUILDING=1")


def test_decorators_that_left_no_autotuner_are_named(make: Maker) -> None:
    text = (
        kernels("made")
        + "def build():\n"
        + textwrap.indent(KERNEL.format(name="later"), "    ")
        + "    return later\n"
        + "if False:\n"
        + textwrap.indent(KERNEL.format(name="never"), "    ")
        + "def plain(x, n, BLOCK: tl.constexpr): pass\n"
        + "try:\n    raise RuntimeError\n    plain = triton.autotune(configs=configs(1, 2), key=['n'])(plain)\n"
        + "except RuntimeError: pass\n"
    )
    name = make("inv_unmade", {"__init__.py": text})
    problems = {problem.kind: problem for problem in take_inventory(name).problems}
    assert problems.keys() == {"made when called", "not made"}
    assert problems["made when called"].reason.endswith("later in build")
    assert problems["made when called"].autotuners == 1
    assert problems["not made"].autotuners == 2
    assert "never at line" in problems["not made"].reason
    assert "plain at line" in problems["not made"].reason
    # Once the function has run and its autotuner is bound, it is listed and no longer missed.
    module = sys.modules[name]
    module.kept = module.build()  # type: ignore[attr-defined]
    again = take_inventory(name)
    assert "inv_unmade.build.<locals>.later" in [info.kernel for info in again.autotuners]
    assert [problem.kind for problem in again.problems] == ["not made"]


# --- what is said of one ----------------------------------------------------------------------------------------------


def test_a_filter_at_import_is_detected_by_what_the_source_lists(make: Maker) -> None:
    text = (
        HEAD
        + """
def cheapest(found):
    return found[:1]

def whole(found):
    return found

def sizes():
    return 1, 2

MANY = configs(1, 2, 4)

@triton.autotune(
    configs=cheapest([triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32})]), key=["n"], do_bench=bench
)
@triton.jit
def reduced(x, n, BLOCK: tl.constexpr): pass

@triton.autotune(cheapest(whole(MANY)), ["n"], do_bench=bench)
@triton.jit
def by_name(x, n, BLOCK: tl.constexpr): pass

@triton.autotune(configs=whole([triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 32})]), key=["n"], do_bench=bench)
@triton.jit
def kept(x, n, BLOCK: tl.constexpr): pass

@triton.autotune(configs=[triton.Config({"BLOCK": 16})], key=["n"], do_bench=bench)
@triton.jit
def single(x, n, BLOCK: tl.constexpr): pass

@triton.autotune(configs=cheapest([triton.Config({"BLOCK": b}) for b in sizes()]), key=["n"], do_bench=bench)
@triton.jit
def unreadable(x, n, BLOCK: tl.constexpr): pass
"""
    )
    name = make("inv_reduced", {"__init__.py": text})
    found = by_name(take_inventory(name).autotuners)
    assert {kernel: info.declared for kernel, info in found.items()} == {
        "by_name": 3,
        "kept": 2,
        "reduced": 2,
        "single": 1,
        "unreadable": None,
    }
    assert {kernel for kernel, info in found.items() if info.has("reduced_at_import")} == {"by_name", "reduced"}
    assert note(found["reduced"], "reduced_at_import") == (
        "1 of 2 declared candidates left by inv_reduced.cheapest at import: a table cannot bring the others back"
    )
    assert note(found["by_name"], "reduced_at_import").startswith(
        "1 of 3 declared candidates left by inv_reduced.cheap"
    )
    assert {info.state for kernel, info in found.items() if kernel != "kept"} == {"singleton"}
    assert rows([found["reduced"]])[0]["candidates"] == "1 of 2"


@pytest.mark.parametrize(
    ("assigned", "configs", "declared", "through"),
    [
        ("CONFIGS = pick([1, 2])", "CONFIGS", 2, "pick"),
        ("CONFIGS: list = pick([1, 2])", "CONFIGS", 2, "pick"),
        ("CONFIGS = [1, 2]\nCONFIGS = pick(CONFIGS)", "CONFIGS", 2, "pick"),
        ("ALL = [1, 2]\nCONFIGS = [each for each in pick(ALL)]", "CONFIGS", 2, "pick"),
        ("", "[b for b in (1, 2) if b > 1]", 2, "the source's own if b > 1"),
        ("", "[(b, w) for b in [1, 2] for w in range(3) if b > w]", 6, "the source's own if b > w"),
        ("", "[1, 2][:1]", 2, "the source's own slice [:1]"),
        ("CONFIGS = [1, 2]\nFEW = CONFIGS[-1:]", "FEW", 2, "the source's own slice [-1:]"),
        ("", "list(filter(test, [1, 2, 3]))", 3, "filter"),
        ("", "pick([1, 2] + [3])", 3, "pick"),
        ("if FEW:\n    CONFIGS = pick([1, 2])\nelse:\n    CONFIGS = [3]", "CONFIGS", 1, None),
        ("CONFIGS = pick([1, 2])\nCONFIGS += [3]", "CONFIGS", 1, None),
        ("", "[w for b in [1, 2] for w in b]", None, None),
        ("", "[1, 2] if FEW else [3]", None, None),
        ("", "make()", None, None),
    ],
)
def test_what_the_source_lists_is_followed_through_names_and_forms(
    assigned: str, configs: str, declared: int | None, through: str | None
) -> None:
    source = ModuleSource(f"{assigned}\n@autotune(configs={configs})\ndef k(): ...\nCONFIGS = ALL = pick([4, 5, 6])\n")
    assert source.declared(source.calls[0], {"CONFIGS": [0]}) == (declared, through)


def test_what_is_written_out_is_reduced_only_where_nothing_is_left_to_choose(make: Maker) -> None:
    template = "\n".join(["@triton.autotune(configs={}, key=['n'], do_bench=bench)", *KERNEL.splitlines()[2:]])
    listed = "[triton.Config({'BLOCK': b}) for b in (1, 2, 4) if b > %d]"
    text = HEAD + template.format(listed % 2, name="one") + "\n" + template.format(listed % 1, name="two")
    found = by_name(take_inventory(make("inv_forms", {"__init__.py": text})).autotuners)
    assert [(found[name].declared, found[name].has("reduced_at_import")) for name in ("one", "two")] == [
        (3, True),
        (3, False),
    ]
    assert "1 of 3 declared candidates left by the source's own if b > 2" in note(found["one"], "reduced_at_import")


def test_a_known_determinism_filter_comes_with_its_remedy(make: Maker) -> None:
    text = "@f(configs=choose([1, 2]))\ndef k(): ...\n"
    choose: Any = type("choose", (), {"__module__": "mamba_ssm.utils.determinism", "__qualname__": "autotune_configs"})
    source = ModuleSource(text.replace("@f", "@autotune"))
    assert source.declared(source.calls[0], {"choose": choose}) == (2, "mamba_ssm.utils.determinism.autotune_configs")
    from tuning._autotuner_info import read_notes

    said = read_notes(read_of("k", 1), declared=2, through="mamba_ssm.utils.determinism.autotune_configs")
    assert "MAMBA_DETERMINISTIC" in said[0].text
    assert "TRITON_CACHE_AUTOTUNING=1" in said[0].text


def test_hooks_pruners_and_resets_are_said(make: Maker) -> None:
    text = (
        HEAD
        + """
def prune(configs, named, **meta):
    return configs

@triton.autotune(
    configs=[triton.Config({"BLOCK": 16}, pre_hook=lambda nargs: None), triton.Config({"BLOCK": 32})],
    key=["n"], reset_to_zero=["x"], restore_value=["y"], prune_configs_by={"early_config_prune": prune}, do_bench=bench,
)
@triton.jit
def k(x, y, n, BLOCK: tl.constexpr): pass
"""
    )
    info = take_inventory(make("inv_hooks", {"__init__.py": text})).autotuners[0]
    assert info.hooks == ("config.pre_hook",)
    assert info.pruner == "early_config_prune"
    assert info.resets._asdict() == {"reset_to_zero": ("x",), "restore_value": ("y",)}
    assert kinds(info) == ["relies_on_reset_to_zero", "relies_on_restore_value"]
    assert note(info, "relies_on_reset_to_zero").startswith("Triton zeroes x while benchmarking")
    alone = take_inventory(make("inv_alone", {"__init__.py": text.replace(', triton.Config({"BLOCK": 32})', "")}))
    assert alone.autotuners[0].notes == ()  # never benchmarked, so never reset
    row = rows([info])[0]
    assert row["resets"] == "reset_to_zero: x; restore_value: y"
    assert row["notes"] == "relies on reset to zero, relies on restore value"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((name, True) for name in ("T", "NT", "M", "seqlen", "max_seqlen_q", "num_tokens", "n_tokens", "N_CTX")),
        *((name, True) for name in ("seq_len", "total_tokens", "kv_len", "context_length", "MAX_SEQLEN", "n_rows")),
        *((name, False) for name in ("t", "m", "BT", "D", "N", "IS_VARLEN", "chunk_size", "hidden", "NB", "BLOCK_M")),
    ],
)
def test_names_of_token_counts(name: str, expected: bool) -> None:
    assert counts_tokens(name) is expected


LAUNCHES = """
def norm(x, B, T, BT):
    NB = triton.cdiv(B * T, 1024)
    NC = triton.cdiv(BT, 16)
    BT2 = min(64, max(16, triton.next_power_of_2(T)))
    T_BUCKET = 0 if T < 8192 else T
    rows, cols = x.shape[0] * T, 4
    k[(NB,)](x, NB=NB, NC=NC, BT=BT2, T_BUCKET=T_BUCKET, R=rows // 2,
      C=cols, S=(T + 1) % 4, E=T if T else 1, F=len(x), I=triton.cdiv(D, T))

def other(x, meta):
    NB = 4
    k[(1,)](x, NB, G=meta.max_seqlen, H=unknown(T))
"""


def test_a_key_that_grows_with_the_tokens_is_flagged_with_the_launch_that_says_so() -> None:
    """fla#1147: cdiv(B*T, 1024) in the key gave a hundred values."""
    source = ModuleSource(LAUNCHES, "norm.py")
    names = ["NB", "NC", "BT", "T_BUCKET", "R", "C", "S", "E", "F", "G", "H", "I", "T", "D"]
    found = source.fragmenting("k", ["x", *names], names)
    assert list(found) == ["NB", "R", "E", "G", "T"]
    assert found["NB"] == "triton.cdiv(B * T, 1024) at norm.py:3, and T reads as a token count"
    assert found["R"] == "rows // 2 at norm.py:8, and T reads as a token count"
    assert found["G"] == "meta.max_seqlen at norm.py:13, and max_seqlen reads as a token count"
    assert found["T"] == "the name reads as a token count or sequence length"
    assert source.fragmenting("another", [], ["NB"]) == {}


def test_a_fragmenting_key_becomes_a_note_of_its_autotuner(make: Maker) -> None:
    text = kernels("k") + "def launch(x, T):\n    k[(1,)](x, n=triton.cdiv(T, 64))\n"
    info = take_inventory(make("inv_fragment", {"__init__.py": text})).autotuners[0]
    assert note(info, "may_fragment").startswith("key n: triton.cdiv(T, 64) at __init__.py:")


# --- states -----------------------------------------------------------------------------------------------------------


def test_states_under_a_policy(make: Maker) -> None:
    closed = """
class Closed(Autotuner):
    def run(self, *args, **kwargs):
        return None

def closed(x, n, BLOCK: tl.constexpr): pass
closed = Closed(triton.jit(closed), ["x", "n", "BLOCK"], configs(8, 16), ["n"], None, None, do_bench=bench)
"""
    single = KERNEL.format(name="single").replace("16, 32", "16")
    name = make("inv_states", {"__init__.py": kernels("tuned", "free") + single + closed})

    def states(**fields: Any) -> dict[str, str]:
        policy = AutotunePolicy(**{"modules": [name], "config_invariant": [f"{name}.free"], **fields})
        return {kernel: info.state for kernel, info in by_name(take_inventory(name, policy=policy).autotuners).items()}

    pinned = {"tuned": "pinned", "free": "timed", "single": "singleton", "closed": "pinned"}
    assert states(mode="pinned") == pinned
    assert states(record_path="journals/run") == {**pinned, "tuned": "timed", "closed": "not covered"}
    everything_timed = dict.fromkeys(("tuned", "free", "closed"), "timed") | {"single": "singleton"}
    assert states(mode="auto") == states() == everything_timed
    elsewhere = dict.fromkeys(("tuned", "free", "closed"), "outside scope") | {"single": "singleton"}
    assert states(mode="pinned", modules=["inv_state"]) == elsewhere
    infos = by_name(take_inventory(name, policy=AutotunePolicy(modules=[name]), deterministic=True).autotuners)
    assert infos["tuned"].state == "pinned"
    assert infos["tuned"].reason == "by tables, else by the on-miss rule (cheapest)"
    assert infos["closed"].reason.startswith("inv_states.Closed.run replaces Triton's")
    assert infos["single"].reason == "one candidate: nothing to choose"


# --- tables -----------------------------------------------------------------------------------------------------------


def entry(kernel: str, block: int, key: tuple[tuple[str, str], ...] | None) -> Entry:
    config = LaunchConfig.of(triton.Config({"BLOCK": block}))
    dtypes = None if key is None else (("x", "float32"),)
    return Entry(kernel, key, dtypes, None, config, {"measured": False, "note": "made up"})


def write(folder: Path, arch: str, package: str, *entries: Entry) -> None:
    write_table(
        folder,
        TableFile(
            arch=arch, package=package, package_version="1", triton="3.6.0", device="", entries=entries, denied=()
        ),
    )


def test_tables_of_each_arch_are_counted_and_gate(make: Maker, tmp_path: Path) -> None:
    name = make(
        "inv_tables",
        {"__init__.py": kernels("exact", "star", "stale", "bare") + KERNEL.format(name="one").replace("16, 32", "8")},
    )
    folder = tmp_path / "tables"
    write(
        folder,
        "sm90",
        name,
        entry(f"{name}.exact", 16, (("n", "1"),)),
        entry(f"{name}.exact", 32, (("n", "2"),)),
        entry(f"{name}.exact", 64, (("n", "3"),)),
        entry(f"{name}.star", 16, None),
        entry(f"{name}.stale", 64, None),
    )
    write(folder, "sm77", name, entry(f"{name}.bare", 16, None))
    found = take_inventory(name, archs=["sm90", "sm77"], table_path=[folder])
    tables = {kernel: info.tables for kernel, info in by_name(found.autotuners).items()}
    nothing = TableCoverage("sm77", 0, False)
    assert tables["exact"] == (TableCoverage("sm90", 3, False, 1), nothing)
    assert tables["star"] == (TableCoverage("sm90", 0, True), nothing)
    assert tables["stale"] == (TableCoverage("sm90", 0, True, 1), nothing)
    assert tables["bare"] == (TableCoverage("sm90", 0, False), TableCoverage("sm77", 0, True))
    assert note(by_name(found.autotuners)["stale"], "stale_entries").startswith("1 of the sm90 entries")
    assert rows(found.autotuners)[1]["tables"] == "sm90: 3 (1 stale); sm77: -"
    assert coverage(found.autotuners, "sm90") == Coverage(2, 4, 50.0)
    assert coverage(found.autotuners, "sm77") == (1, 4, 25.0)
    with pytest.raises(InventoryError, match=r"coverage for sm80 was not looked up.*\(sm90, sm77\).*archs=\['sm80'\]"):
        coverage(found.autotuners, "sm80")
    policy = AutotunePolicy(table_path=[str(folder)], modules=[name])
    by_policy = take_inventory(name, archs=["sm90"], policy=policy)
    assert by_name(by_policy.autotuners)["star"].tables == (TableCoverage("sm90", 0, True),)


def test_every_arch_with_a_table_is_looked_up_by_default(make: Maker, tmp_path: Path) -> None:
    folder = tmp_path / "tables"
    write(folder, "sm77", "inv_archs")
    (folder / "sm99").mkdir()
    packaged = known_archs()
    assert {"sm100", "sm103"} <= set(packaged)
    assert known_archs([folder]) == ("sm77", *packaged)
    name = make("inv_archs", {"__init__.py": kernels("k")})
    info = take_inventory(name, table_path=[folder]).autotuners[0]
    assert [item.arch for item in info.tables] == ["sm77", *packaged]


def info_of(kernel: str = "p.m.k", *, candidates: int = 2, **fields: Any) -> AutotunerInfo:
    listed = tuple(LaunchConfig.of(triton.Config({"BLOCK": 2**index}, num_stages=3)) for index in range(candidates))
    return AutotunerInfo(kernel=kernel, module="p.m", candidates=listed, key_names=("n",), **fields)


COVERED = (TableCoverage("sm90", 1, False),)


@pytest.mark.parametrize(
    ("infos", "expected"),
    [
        ([], (0, 0, 0.0)),
        ([info_of(candidates=1, tables=COVERED, declared=1)], (0, 0, 100.0)),
        ([info_of(candidates=1, tables=COVERED)], (0, 0, 0.0)),
        ([info_of(tables=COVERED), info_of(tables=(TableCoverage("sm90", 0, False),))], (1, 2, 50.0)),
        ([info_of(tables=COVERED, state="outside scope")], (0, 1, 0.0)),
        ([info_of(tables=COVERED, state="not covered")], (0, 1, 0.0)),
        ([info_of(tables=COVERED, notes=(("run_replaced", ""),))], (0, 1, 0.0)),
        ([info_of(candidates=1, tables=COVERED, notes=(("reduced_at_import", ""),))], (0, 1, 0.0)),
        ([info_of(tables=(TableCoverage("sm90", 0, False),), notes=(("config_invariant", ""),))], (0, 0, 100.0)),
        ([info_of(tables=(TableCoverage("sm90", 1, True, 1),))], (1, 1, 100.0)),
        ([info_of(tables=(TableCoverage("sm90", 1, True, 2),))], (0, 1, 0.0)),
    ],
)
def test_coverage_counts_what_has_something_to_choose(
    infos: list[AutotunerInfo], expected: tuple[int, int, float]
) -> None:
    from tuning.inventory import Note

    infos = [replace(info, notes=tuple(Note(*item) for item in info.notes)) for info in infos]
    assert coverage(infos, "sm90") == expected


def test_what_was_not_looked_into_is_not_covered(make: Maker, tmp_path: Path) -> None:
    later = "def build():\n" + textwrap.indent(KERNEL.format(name="later"), "    ")
    twice = "if False:\n" + textwrap.indent(KERNEL.format(name="one"), "    ")
    files = {
        "__init__.py": kernels("one") + twice + later,
        "failing.py": "import nothing_of_this_name\n" + kernels("two", "three"),
        "test_it.py": kernels("four"),
    }
    name = make("inv_unseen", files)
    write(tmp_path / "tables", "sm90", name, entry(f"{name}.one", 16, None))
    found = take_inventory(name, archs=["sm90"], table_path=[tmp_path / "tables"])
    assert coverage(found.autotuners, "sm90") == (1, 1, 100.0)
    assert coverage(found.autotuners, "sm90", problems=found.problems) == (1, 4, 25.0)


def test_an_entry_that_can_never_be_used_covers_nothing(make: Maker, tmp_path: Path) -> None:
    pruned = KERNEL.format(name="pruned").replace("do_bench", "prune_configs_by={'early_config_prune': f}, do_bench")
    text = (
        kernels("denied", "key", "argument", "star") + "def f(configs, named, **meta):\n    return configs\n" + pruned
    )
    name = make("inv_misfit", {"__init__.py": text})
    rows_of = [
        entry(f"{name}.denied", 16, (("n", "1"),)),
        entry(f"{name}.key", 16, (("seqlen", "1"),)),
        replace(entry(f"{name}.argument", 16, (("n", "1"),)), dtypes=(("y", "float32"),)),
        entry(f"{name}.star", 16, None),
        entry(f"{name}.pruned", 64, None),
    ]
    denied = [Denied(f"{name}.{kernel}", rows_of[0].config, None, "racy", "somebody") for kernel in ("denied", "star")]
    write_table(tmp_path / "tables", TableFile("sm90", name, "1", "3.6.0", "", tuple(rows_of), tuple(denied)))
    found = take_inventory(name, archs=["sm90"], table_path=[tmp_path / "tables"])
    said = {kernel: note(info, "stale_entries") for kernel, info in by_name(found.autotuners).items()}
    assert {kernel: text.partition(" can never be used: ")[2] for kernel, text in said.items()} == {
        "denied": "its config is denied",
        "key": "the kernel's key has no seqlen",
        "argument": "the kernel has no argument y",
        "star": "its config is denied",
        "pruned": "its config is no candidate",
    }
    assert coverage(found.autotuners, "sm90") == (0, 5, 0.0)


# --- joining ----------------------------------------------------------------------------------------------------------


def read_of(kernel: str, candidates: int = 2) -> AutotunerFacts:
    from stub_kernels import autotuner, configs

    read = facts(autotuner(configs(*(2**index for index in range(candidates)))))
    return replace(read, kernel=replace(read.kernel, qualified_name=kernel))


def choice(kernel: str, n: int, source: Any = "exact", origin: str | None = "t/sm90/p.json") -> Choice:
    return Choice(kernel, Key.of({"n": n}), triton.Config({"BLOCK": 1}), source, origin, "sm90")


def test_join_says_by_which_rule_and_file_keys_were_decided() -> None:
    static = [info_of("p.m.a"), info_of("p.m.b"), info_of("p.m.c")]
    choices = [
        choice("p.m.a", 1),
        choice("p.m.a", 2),
        choice("p.m.a", 3, "cheapest", None),
        choice("p.m.b", 1, "timed", None),
    ]
    joined = by_name(join(static, [read_of("p.m.a"), read_of("p.m.b")], choices))
    assert (joined["a"].state, joined["a"].reached) == ("pinned", True)
    assert joined["a"].reason == "3 keys: 1 cheapest, 2 exact from t/sm90/p.json"
    assert [tuple(item) for item in joined["a"].choices] == [("cheapest", None, 1), ("exact", "t/sm90/p.json", 2)]
    assert (joined["b"].state, joined["b"].reason) == ("timed", "1 key: 1 timed")
    assert joined["c"] == static[2]


def test_join_keeps_the_last_choice_of_a_key() -> None:
    choices = [choice("p.m.a", 1), choice("p.m.a", 1, "cheapest", None)]
    assert join([info_of("p.m.a")], [], choices)[0].reason == "1 key: 1 cheapest"


def test_join_gives_reached_autotuners_the_state_of_the_policy() -> None:
    static = [info_of("p.m.a"), info_of("q.m.b"), info_of("p.m.free")]
    policy = AutotunePolicy(mode="pinned", modules=["p"], config_invariant=["p.m.free"])
    reads = [read_of("p.m.a"), read_of("q.m.b"), read_of("p.m.free")]
    timed = [choice("p.m.free", 1, "timed", None)]
    joined = by_name(join(static, reads, timed, policy=policy))
    assert (joined["a"].state, joined["a"].reached, joined["a"].choices) == ("pinned", True, ())
    assert joined["b"].state == "outside scope"
    assert joined["free"].state == "timed"
    assert joined["free"].reason.startswith("config-invariant: ")
    assert joined["free"].reason.endswith("; 1 key: 1 timed")


def test_join_adds_what_no_list_has() -> None:
    reads = [read_of("p.m.build.<locals>.made", 3)]
    choices = [choice("p.m.build.<locals>.made", 1), choice("r.m.gone", 1)]
    joined = join([info_of("p.m.a")], reads, choices, compiled=["c.m.k"])
    assert [info.kernel for info in joined] == ["p.m.a", "c.m.k", "p.m.build.<locals>.made", "r.m.gone"]
    made = joined[2]
    assert (made.module, len(made.candidates), made.state, made.reached) == ("p.m", 3, "pinned", True)
    assert kinds(joined[1]) == ["compiled"]
    assert joined[3].state == "pinned"


def test_join_tells_two_autotuners_of_one_name_apart_by_their_candidates() -> None:
    static = [info_of("p.m.a"), info_of("p.m.a", candidates=3)]
    read = replace(read_of("p.m.a", 3), key_names=("n",))
    assert [info.reached for info in join(static, [read], [])] == [False, True]


def test_many_observed_values_of_a_key_are_flagged_whatever_its_name() -> None:
    few = join([info_of("p.m.a")], [], [choice("p.m.a", n) for n in range(7)])[0]
    many = join([info_of("p.m.a")], [], [choice("p.m.a", n) for n in range(100)])[0]
    assert not few.has("may_fragment")
    assert note(many, "may_fragment") == "key n: 100 different values in 100 keys so far"


def test_join_does_not_depend_on_the_order_of_what_was_reached() -> None:
    static = [info_of("p.m.a"), info_of("p.m.b")]
    reads = [read_of("p.m.a"), read_of("p.m.b"), read_of("z.k"), read_of("y.k")]
    choices = [choice("p.m.a", 1), choice("p.m.b", 2), choice("p.m.b", 3, "cheapest", None), choice("y.k", 1)]
    assert join(static, reads, choices) == join(static, reads[::-1], choices[::-1])


# --- forms ------------------------------------------------------------------------------------------------------------


def test_json_is_one_plain_document(make: Maker) -> None:
    name = make("inv_json", {"__init__.py": kernels("k"), "bad.py": "raise OSError('x')\n"})
    found = take_inventory(name, archs=["sm100"])
    data = found.to_json()
    assert json.loads(json.dumps(data)) == data
    assert data["version"] == 1
    assert data["modules"] == [name]
    assert data["candidates"] == 2
    assert data["problems"] == [
        {"module": f"{name}.bad", "kind": "does not import", "reason": "OSError: x", "autotuners": 0}
    ]
    (one,) = data["autotuners"]
    assert one["kernel"] == f"{name}.k"
    assert one["candidates"] == 2
    assert "configs" not in one
    assert one["tables"] == [{"arch": "sm100", "exact": 0, "wildcard": False, "stale": 0}]
    assert list(found.to_json(configs=True)["autotuners"][0]["configs"][0]["kwargs"]) == ["BLOCK"]


def test_rows_have_the_same_columns_for_every_autotuner(make: Maker) -> None:
    infos = take_inventory(make("inv_rows", {"__init__.py": "", "ops.py": WRAPPED}), archs=[]).autotuners
    table = rows(infos)
    assert len(table) == 15
    assert {tuple(row) for row in table} == {
        ("kernel", "candidates", "key", "state", "tables", "wrapped", "hooks", "pruner", "resets", "notes")
    }
    shown = {row["kernel"].rpartition(".")[2]: row for row in table}
    assert shown["outside"]["wrapped"] == "Heuristics > autotuner"
    assert shown["direct"]["wrapped"] == ""
    assert shown["outside"]["candidates"] == "2"


def test_an_inventory_pickles_and_compares_by_content(make: Maker) -> None:
    found = take_inventory(make("inv_pickled", {"__init__.py": kernels("k")}))
    assert pickle.loads(pickle.dumps(found)) == found
    assert found != Inventory(found.modules, ())


def test_the_same_list_whatever_the_hash_seed(make: Maker, tmp_path: Path) -> None:
    name = make("inv_seeded", {"__init__.py": "", "ops.py": WRAPPED + "KEPT = {outside, inside, partial}\n"})
    code = f"import json, tuning.inventory as i; print(json.dumps(i.take_inventory({name!r}).to_json()))"
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join([root, str(tmp_path), *filter(None, sys.path)])
    outputs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(outputs) == 1
