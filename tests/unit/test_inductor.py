"""Autotuned kernels inside torch.compile: what is pinned, what cannot be, and what keeps artefacts apart.

They run with the torch at hand. For the same on another release, install it beside, with the Triton it asks for, and
put it first: ``pip install --target FOLDER torch==2.12.1 && PYTHONPATH=FOLDER pytest tests/unit/test_inductor.py``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import triton
from symbolic_notices import SYMBOLIC

from tuning.inductor import CompiledKernels, unpinnable
from tuning.spec import LaunchConfig
from tuning.tables import Entry, TableFile, write_table

TESTS = Path(__file__).parents[1]
KERNELS = ("plain", "constant_key", "with_heuristics", "pruned", "inside_op")
PINS = {"BLOCK": 64, "num_warps": 4, "num_stages": 3}
WILDCARD = {"BLOCK": 128, "num_warps": 4, "num_stages": 3}
ALL = 4
HIT, MISS = {"hit": 1, "miss": 0}, {"hit": 0, "miss": 1}


def write_tables(folder: Path, warps: int = 4) -> str:
    """An exact entry for n=1000, differing in warps alone from what would be chosen without, and one for the rest."""
    rows = []
    for kernel in KERNELS:
        block = 128 if kernel == "pruned" else 64
        dtypes = (("x", "float32"), ("y", "float32"))
        evidence = {"source": "a test"}
        exact = LaunchConfig.build({"BLOCK": block}, num_warps=warps, num_stages=3)
        rest = LaunchConfig.build({"BLOCK": 128}, num_warps=4, num_stages=3)
        rows.append(Entry(f"__main__.{kernel}", (("n", "1000"),), dtypes, None, exact, evidence))
        rows.append(Entry(f"__main__.{kernel}", None, None, None, rest, evidence))
    write_table(folder, TableFile("sm90", "__main__", "1", triton.__version__, "none", tuple(rows), (), None))
    return str(folder)


def run_program(folder: Path, tables: str, *cases: str) -> dict[str, Any]:
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH"), str(TESTS.parent), str(TESTS)]))
    environment = {**os.environ, "PYTHONPATH": path, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    environment["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "cache")
    program = [sys.executable, str(TESTS / "compiled_kernels.py"), tables, *cases]
    ran = subprocess.run(program, capture_output=True, text=True, check=False, env=environment, cwd=folder)
    assert ran.returncode == 0, ran.stderr[-4000:]
    seen: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return {**seen, "log": ran.stderr}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("compiled")
    cases = ("eager_and_compiled", "dynamic", "replaced", "left_out", "run_as_it_is")
    return run_program(folder, write_tables(folder / "tables"), *cases)


@pytest.mark.parametrize("kernel", ["plain", "constant_key", "with_heuristics", "pruned"])
def test_a_compiled_kernel_has_the_config_that_its_key_gets_in_eager_and_no_other(seen: Any, kernel: str) -> None:
    got = seen["eager_and_compiled"][kernel]
    (configs,) = got["configs"]
    (config,) = configs  # one candidate in the generated code: nothing to time
    assert {name: config[name] for name in PINS} == {**PINS, "BLOCK": 128 if kernel == "pruned" else 64}
    ((name, key, chosen, source),) = got["choices"]
    assert (name, key, source) == (kernel, "n=1000 x:float32 y:float32", "exact")
    assert got["eager"] == got["choices"]  # the eager launch of this key makes no choice of its own
    assert got["launched"].startswith(f"BLOCK: {config['BLOCK']}, num_warps: 4")
    assert chosen == f"BLOCK={config['BLOCK']} num_warps=4 num_stages=3"
    assert got["compiled"] == [f"__main__.{kernel}"]
    assert (got["benchmarks"], got["graph_breaks"]) == (0, 0)


def test_a_symbolic_key_value_gets_the_wildcard_and_is_reported(seen: Any) -> None:
    got = seen["dynamic"]["plain"]
    first, second = got["runs"]
    assert [[{name: config[name] for name in WILDCARD} for config in configs] for configs in first["configs"]] == [
        [WILDCARD]
    ]
    assert second["configs"] == []  # one graph serves both
    key = 'n={"opaque":"torch.SymInt"} x:float32 y:float32'
    assert got["choices"] == [["plain", key, "BLOCK=128 num_warps=4 num_stages=3", "wildcard"]]
    assert tuple(kind for kind, _ in got["notices"]) == SYMBOLIC
    (_, traced), (_, message) = got["notices"]
    assert traced == "__main__.plain is traced into a compiled graph"
    assert "plain: n is not known" in message
    assert message in seen["log"]


def test_a_constexpr_key_value_is_known_however_dynamic_the_shapes(seen: Any) -> None:
    got = seen["dynamic"]["constant_key"]
    warps = [run["configs"][0][0]["num_warps"] for run in got["runs"]]
    assert warps == [4, 4]
    assert [(key.partition(" ")[0], source) for _, key, _, source in got["choices"]] == [
        ("n=1000", "exact"),
        ("n=2000", "wildcard"),
    ]
    assert got["notices"] == [["compiled", "__main__.constant_key is traced into a compiled graph"]]


def test_a_changed_pin_takes_effect_in_code_that_is_compiled_already_and_removal_restores(seen: Any) -> None:
    got = seen["replaced"]
    counts = {name: [len(configs) for configs in got[name]["configs"]] for name in got if name != "restored"}
    assert counts == {"before": [ALL], "first": [1], "again": [], "second": [1], "after": [ALL]}
    assert got["first"]["configs"][0][0]["BLOCK"] == 64
    assert got["second"]["configs"][0][0]["BLOCK"] == 128
    assert got["restored"] == [True, True]


def test_what_is_out_of_scope_or_recorded_stays_inductors_and_recording_says_so(seen: Any) -> None:
    got = seen["left_out"]
    assert [len(configs) for configs in got["out of scope"]["configs"]] == [ALL]
    assert [len(configs) for configs in got["record"]["configs"]] == [ALL]
    ((kind, message),) = got["record"]["notices"]
    assert kind == "compiled"
    assert "nothing of that is journaled" in message


def test_what_can_only_be_chosen_on_real_arguments_is_launched_eagerly_and_pinned(seen: Any) -> None:
    got = seen["left_out"]["content"]
    assert got["configs"] == []
    assert got["graph_breaks"] > 0
    assert [(kernel, source) for kernel, _, _, source in got["choices"]] == [("pruned_by_content", "cheapest")]
    assert "left out of the compiled graph and launched eagerly" in seen["log"]


def test_an_error_of_choosing_reaches_the_caller_as_it_is(seen: Any) -> None:
    assert "n=300" in seen["left_out"]["miss"]


def test_a_backend_without_code_generation_launches_the_choice_and_reaches_no_second_autotuner(seen: Any) -> None:
    got = seen["run_as_it_is"]
    assert [row[3] for row in got["choices"]] == ["exact"]
    assert got["autotuners"] == [["__main__.plain", ALL, "pinned"]]
    assert got["benchmarks"] == 0


def test_caches_on_disk_give_back_the_same_pin_and_never_another(tmp_path: Path) -> None:
    tables = [write_tables(tmp_path / str(warps), warps) for warps in (2, 4)]
    first, other, same = (run_program(tmp_path, table, "caches")["caches"] for table in (*tables, tables[0]))
    for what in ("kernel", "operator"):
        warps = [[config["num_warps"] for config in run[what]["configs"][0]] for run in (first, other, same)]
        assert warps == [[2], [4], [2]], what
        # A graph that AOTAutograd's cache gives back counts as one that Inductor's does.
        assert [run[what]["inductor"] for run in (first, other, same)] == [MISS, MISS, HIT], what


# --- hook points, without torch ---------------------------------------------------------------------------------------


def applied(fingerprint: str = "") -> CompiledKernels:
    return CompiledKernels(lambda autotuner, args, kwargs: None, lambda autotuner: frozenset(), lambda: fingerprint)


@pytest.fixture
def fake_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Modules of torch's names that are not loaded yet, whose source the test gives."""
    loaded = {name: module for name, module in sys.modules.items() if name == "torch" or name.startswith("torch.")}
    for name in loaded:
        monkeypatch.delitem(sys.modules, name)

    def write(source: str) -> None:
        for module, text in (("_higher_order_ops", source), ("_inductor", "")):
            package = tmp_path / "torch" / module
            package.mkdir(parents=True)
            (package / "__init__.py").write_text("")
            (package / "triton_kernel_wrap.py").write_text(text)
        (tmp_path / "torch" / "__init__.py").write_text('__version__ = "2.99.0"')
        monkeypatch.syspath_prepend(tmp_path)

    yield write
    for name in [name for name in sys.modules if name == "torch" or name.startswith("torch.")]:
        del sys.modules[name]  # those of the test; what was there before comes back next


HOPIFIER = """
class TritonHOPifier:
    def call_triton_kernel(self, variable, args, kwargs, tx):
        return 'theirs'
"""


def load_tracer() -> ModuleType:
    import importlib

    return importlib.import_module("torch._higher_order_ops.triton_kernel_wrap")


def test_nothing_is_imported_and_a_module_is_patched_when_somebody_loads_it(fake_torch: Any) -> None:
    fake_torch(HOPIFIER)
    before = list(sys.meta_path)
    kernels = applied()
    kernels.apply()
    assert "torch" not in sys.modules
    module = load_tracer()
    assert module.__spec__ is not None
    assert type(module.__spec__.loader).__name__ == type(module.__loader__).__name__ == "SourceFileLoader"
    method = module.TritonHOPifier.call_triton_kernel
    assert method.__wrapped__ is not method
    assert method(module.TritonHOPifier(), SimpleNamespace(kernel=None), (), {}, None) == "theirs"
    kernels.undo()
    assert not hasattr(module.TritonHOPifier.call_triton_kernel, "__wrapped__")
    assert sys.meta_path == before


def test_a_new_policy_takes_over_what_is_patched(fake_torch: Any) -> None:
    fake_torch(HOPIFIER)
    first, second = applied(), applied()
    first.apply()
    original = load_tracer().TritonHOPifier.call_triton_kernel.__wrapped__
    second.apply(first)
    assert load_tracer().TritonHOPifier.call_triton_kernel.__wrapped__ is original
    second.undo()
    assert load_tracer().TritonHOPifier.call_triton_kernel is original


def test_a_patch_of_somebody_else_stays(fake_torch: Any, caplog: pytest.LogCaptureFixture) -> None:
    fake_torch(HOPIFIER)
    kernels = applied()
    kernels.apply()
    owner = load_tracer().TritonHOPifier
    theirs = lambda *args: "somebody else's"  # noqa: E731
    owner.call_triton_kernel = theirs
    kernels.undo()
    assert owner.call_triton_kernel is theirs
    assert "patched by somebody else" in caplog.text


def test_a_torch_without_the_hook_point_is_named_and_left_alone(
    fake_torch: Any, caplog: pytest.LogCaptureFixture
) -> None:
    fake_torch("class SomethingElse: ...")
    kernels = applied()
    kernels.apply()
    load_tracer()
    assert "torch 2.99.0" in caplog.text
    assert "TritonHOPifier.call_triton_kernel" in caplog.text
    assert "NOT pinned" in caplog.text
    kernels.undo()


def test_what_cannot_be_pinned_is_named_with_its_switch_and_imports_nothing() -> None:
    program = (
        "import json, sys\n"
        "from tuning.inductor import unpinnable\n"
        "kinds = [kind.to_json() for kind in unpinnable()]\n"
        "assert not {'torch', 'triton'} & set(sys.modules)\n"
        "print(json.dumps(kinds))\n"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    kinds = json.loads(ran.stdout)
    assert len({kind["kind"] for kind in kinds}) == len(kinds)
    assert all(kind["timed"] is None and kind["switch"] for kind in kinds)
    assert any(kind["setting"] == "deterministic" and kind["changes_bits"] for kind in kinds)


def test_every_switch_exists_and_says_whether_it_is_on() -> None:
    import torch._inductor.config as config

    with config.patch({"deterministic": False, "max_autotune": True, "shape_padding": True}):
        timed = {kind.setting: kind.timed for kind in unpinnable()}
        assert {timed[name] for name in ("deterministic", "max_autotune", "shape_padding")} == {True}
    with config.patch({"deterministic": True, "max_autotune": True, "shape_padding": True}):
        timed = {kind.setting: kind.timed for kind in unpinnable()}
        assert {timed[name] for name in ("deterministic", "max_autotune", "shape_padding")} == {False}
    for kind in unpinnable():
        with config.patch({kind.setting: kind.quiet}):  # patch refuses a setting that torch does not have
            assert {each.kind: each.timed for each in unpinnable()}[kind.kind] is False
