"""Failures that were reported in public of autotuning systems, each with the tests that show the right behaviour here.

A case that needs nothing of Triton but its autotuner is shown by tests that carry the mark ``stub``, and so on every
supported Triton. What no other file shows is tested below.
"""

from __future__ import annotations

import ast
import json
import logging
import statistics
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import pytest
import triton
from stub_kernels import Bench, FakeTensor, StubKernel, autotuner, configs, launch
from triton.runtime.autotuner import Autotuner

import tuning
from tuning import AutotunePolicy
from tuning.interception import resource_errors
from tuning.journal import read_journal
from tuning.manifest import manifest_bytes
from tuning.merge import merge
from tuning.spec import Key, LaunchConfig
from tuning.tables import Denied, Entry, TableFile, write_table

pytestmark = pytest.mark.stub

TESTS = Path(__file__).parents[1]
VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])

Level = Literal["stub", "pure", "gloo", "interp", "gpu"]


class Case(NamedTuple):
    """``source``: where it was reported, as project#number on GitHub. ``shown``: (level, file::test)."""

    source: str
    right: str
    shown: tuple[tuple[Level, str], ...]


def case(source: str, right: str, *shown: tuple[Level, str]) -> Case:
    return Case(source, right, shown)


INSTALL = "unit/test_installation.py::test_"
SEAM = "unit/test_interception.py::test_"
HERE = "unit/test_cases.py::test_"
GLOO = "multiprocess/test_verify_gloo.py::test_"

CASES = (
    case(
        "triton-lang/triton#9368",
        "tables do not depend on TRITON_CACHE_DIR, though it changes while recording",
        ("stub", INSTALL + "tables_do_not_depend_on_the_cache_folder_of_the_recording"),
    ),
    case(
        "NVIDIA/Megatron-LM#6966",
        "pinned: one set of configs everywhere; timed and verified: exactly the keys that disagree are named",
        ("stub", "multiprocess/test_ranks_gloo.py::test_pinned_has_one_set_of_configs_and_no_benchmark"),
        ("gloo", GLOO + "exactly_the_thirteen_of_22_keys_that_disagree_are_named"),
        (
            "gloo",
            "multiprocess/test_ranks_gloo.py::test_auto_names_exactly_the_keys_that_disagree_and_raises_on_every_rank",
        ),
    ),
    case(
        "sgl-project/sglang#35343",
        "candidates within noise are near ties, told apart by a rule that knows neither order nor rank",
        ("stub", HERE + "near_ties_are_settled_alike_in_whatever_order_they_were_recorded"),
        ("pure", "unit/test_merge.py::test_near_ties_do_not_depend_on_order_or_rank"),
    ),
    case(
        "flashinfer-ai/flashinfer#3186",
        "strict verification raises on both ranks before a size is derived from the config",
        ("gloo", GLOO + "strict_raises_before_anything_depends_on_the_config"),
    ),
    case(
        "flashinfer-ai/flashinfer#3920 vllm-project/vllm#57423",
        "the same collectives on every rank, however many keys each has",
        ("gloo", GLOO + "ranks_with_different_numbers_of_keys_enter_the_same_collectives"),
    ),
    case(
        "openxla/xla#7716",
        "a disagreement is an error on every rank before the next collective",
        ("gloo", GLOO + "a_disagreement_raises_on_all_ranks_where_strict"),
    ),
    case(
        "triton-lang/triton#11494",
        "two threads that meet a key at once launch the pinned config, and leave no state",
        ("stub", SEAM + "many_threads_launch_the_same_new_key_at_once"),
        ("stub", "unit/test_hit_path.py::test_sixteen_threads_pinned_each_launch_its_own_keys_config"),
    ),
    case(
        "triton-lang/triton#8437",
        "many threads, many keys: each is journaled once, in a valid file",
        ("stub", INSTALL + "recording_from_many_threads_leaves_one_valid_journal"),
        ("stub", SEAM + "recording_from_many_threads_records_each_key_once"),
    ),
    case(
        "triton-lang/triton#6547",
        "y += x with a reset and a restore of y: one launch, no reset, no restore",
        ("stub", SEAM + "reset_and_restore_never_run_when_pinned"),
        ("interp", HERE + "an_update_in_place_runs_once_a_launch_and_is_never_reset"),
    ),
    case(
        "triton-lang/triton#7181",
        "a caller that relies on reset_to_zero: the first call as all others, and the enumerator warns",
        ("stub", SEAM + "reset_and_restore_never_run_when_pinned"),
        ("stub", "unit/test_inventory.py::test_hooks_pruners_and_resets_are_said"),
    ),
    case(
        "triton-lang/triton#9230",
        "two configs that write one half each: pinned, the fault shows; recording runs the winner alone and reports it",
        ("interp", HERE + "a_kernel_that_is_wrong_under_each_config_shows_it"),
        ("interp", HERE + "outputs_that_a_winner_owes_to_other_candidates_are_reported_while_recording"),
    ),
    case(
        "triton-lang/triton#10596",
        "a new key under CUDA graph capture is captured: no synchronisation, no benchmark",
        ("gpu", "gpu/test_pinned_on_gpu.py::test_the_first_launch_of_a_key_is_captured_in_a_graph_and_replays"),
    ),
    case(
        "NVIDIA/TensorRT-LLM#16782",
        "record, replay twice: the logs of what was launched are equal byte for byte",
        ("stub", HERE + "two_replays_of_a_recording_leave_the_same_bytes"),
    ),
    case(
        "fla-org/flash-linear-attention#1147",
        "a key over a sequence length: no benchmark, flagged as unbounded, and nearest gives one config",
        ("stub", INSTALL + "a_hundred_values_of_a_key_cost_no_benchmark"),
        (
            "stub",
            "unit/test_inventory.py::test_a_key_that_grows_with_the_tokens_is_flagged_with_the_launch_that_says_so",
        ),
        ("stub", HERE + "nearest_gives_a_hundred_lengths_the_config_of_the_one_that_was_recorded"),
    ),
    case(
        "fla-org/flash-linear-attention#533 triton-lang/triton#7717",
        "a new key in each step costs far less than one benchmark",
        ("stub", HERE + "a_new_key_in_each_step_costs_little_and_a_known_one_less"),
    ),
    case(
        "pytorch/pytorch#189121",
        "what Inductor times by itself is listed, each with its switch",
        ("pure", "unit/test_inductor.py::test_what_cannot_be_pinned_is_named_with_its_switch_and_imports_nothing"),
        ("gpu", "gpu/test_inductor_on_gpu.py::test_without_a_policy_inductor_times_also_where_it_is_deterministic"),
    ),
    case(
        "pytorch/pytorch#143353",
        "a changed pin takes effect in code that is compiled already; no cache gives back another",
        (
            "pure",
            "unit/test_inductor.py::test_a_changed_pin_takes_effect_in_code_that_is_compiled_already_and_removal_restores",
        ),
        ("pure", "unit/test_inductor.py::test_caches_on_disk_give_back_the_same_pin_and_never_another"),
        (
            "gpu",
            "gpu/test_inductor_on_gpu.py::test_a_changed_pin_makes_a_new_artefact_and_the_same_pin_finds_the_old",
        ),
        ("gpu", "gpu/test_inductor_on_gpu.py::test_after_removal_inductor_decides_again"),
    ),
    case(
        "triton-lang/triton#9429",
        "key values of any kind keep their type: True, 1 and 1.0 stay apart",
        ("pure", "unit/test_spec.py::test_no_two_of_these_values_share_a_text"),
        ("stub", SEAM + "recording_gives_values_that_share_a_slot_of_triton_their_own_record"),
    ),
    case(
        "triton-lang/triton#4808",
        "keyword arguments in another order are one key and one choice",
        ("stub", SEAM + "keyword_order_does_not_matter"),
    ),
    case(
        "triton-lang/triton#10880",
        "configs that differ in one launch field alone are told apart everywhere",
        ("stub", SEAM + "configs_that_differ_in_one_launch_field_are_told_apart"),
    ),
    case(
        "IBM/triton-dejavu#1",
        "the live config runs with its hook, in a second process too",
        ("stub", SEAM + "config_hooks_run_on_every_launch_with_the_arguments_by_name"),
        ("interp", HERE + "a_config_pinned_in_a_second_process_runs_with_its_hook"),
    ),
    case(
        "FlagOpen/FlagGems#5832",
        "a config that does not compile for want of resources: the same next candidate on every rank, logged once",
        ("stub", HERE + "each_error_of_resources_gives_the_same_next_candidate_on_every_rank"),
        ("stub", INSTALL + "the_fallback_is_the_same_on_every_rank_and_stands_in_the_choices"),
        ("stub", SEAM + "a_plain_error_while_warming_up_falls_back"),
    ),
    case(
        "vllm-project/vllm#43119",
        "a constexpr outside the key that decides validity is named while recording",
        ("stub", SEAM + "recording_names_an_argument_outside_the_key_that_changes"),
    ),
    case(
        "vllm-project/vllm#41871",
        "a table of another arch in this arch's folder is refused; nearest may use it from its own, and says so",
        ("stub", INSTALL + "a_table_of_another_arch_in_this_arch_folder_is_refused_before_anything_changes"),
        ("stub", HERE + "nearest_takes_the_table_of_another_arch_and_says_which"),
    ),
    case(
        "ROCm/aiter#4469",
        "a table made under another Triton: the same choice, one warning, and check lists it",
        ("stub", INSTALL + "a_table_made_under_another_triton_is_used_and_warned_once"),
        ("pure", "unit/test_checking.py::test_another_triton_is_said_once_for_a_table"),
    ),
    case(
        "sgl-project/sglang#8513",
        "a table's config that runs out of shared memory: the fallback order",
        ("stub", SEAM + "a_config_out_of_resources_falls_back_in_order_and_is_remembered"),
        ("gpu", "gpu/test_pinned_on_gpu.py::test_a_table_that_names_a_config_out_of_shared_memory_falls_back"),
    ),
    case(
        "triton-lang/triton#6803",
        "a candidate that raises while compiling: pinned never meets it, record notes it and goes on",
        ("stub", SEAM + "a_plain_error_in_a_candidate_that_is_not_chosen_is_never_met"),
        ("stub", SEAM + "recording_keeps_a_failing_candidate_with_its_reason_and_goes_on"),
    ),
    case(
        "triton-lang/triton#11512",
        "eight writers in one folder and a reader: no lost or torn file",
        ("pure", "multiprocess/test_table_writers.py::test_eight_writers_and_a_reader"),
        ("pure", "multiprocess/test_journal_kill.py::test_many_processes_write_into_one_folder"),
    ),
    case(
        "fla-org/flash-linear-attention#798 fla-org/flash-linear-attention#1072",
        "kernels from before and after install, and with triton.autotune swapped: all covered, with their origin",
        ("stub", "unit/test_inventory.py::test_imported_before_and_after_triton_autotune_was_swapped_both_are_found"),
        ("stub", HERE + "decorated_before_and_after_install_and_by_a_swapped_autotune_all_are_pinned"),
        ("stub", SEAM + "subclasses_that_call_through_are_covered"),
    ),
    case(
        "unslothai/unsloth#10806",
        "2,500 pinned launches cost microseconds each",
        ("stub", "unit/test_hit_path.py::test_a_hit_makes_no_string_takes_no_lock_and_calls_nothing_else"),
        ("stub", HERE + "a_new_key_in_each_step_costs_little_and_a_known_one_less"),
        ("gpu", "gpu/test_driver_calls.py::test_launches_of_a_known_key_launch_and_do_not_wait"),
    ),
    case(
        "state-spaces/mamba utils/determinism.py, its cost rule",
        "tiles called BLOCK_M, BT, BV or BS count in the static cost, or it says that it cannot rank",
        ("pure", "unit/test_selection.py::TestStaticCost::test_every_tile_like_parameter_counts"),
        ("pure", "unit/test_selection.py::TestStaticCost::test_a_list_that_cannot_be_ranked_says_so"),
    ),
    case(
        "triton-lang/triton#9871 triton-lang/triton#10590",
        "a config that a table denies is removed before any rule",
        ("stub", HERE + "a_denied_config_is_removed_before_any_rule"),
        ("pure", "property/test_selection_pure.py::test_denied_is_never_chosen_and_the_rules_come_in_order"),
    ),
)


# --- the list itself --------------------------------------------------------------------------------------------------


@cache
def marks_of_tests(file: str) -> dict[str, bool]:
    """The tests of a file by name, methods as ``Class::name``; whether each runs on every Triton."""
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    whole = any(
        isinstance(node, ast.Assign)
        and "pytestmark" in ast.unparse(node.targets[0])
        and "mark.stub" in ast.unparse(node.value)
        for node in tree.body
    )
    found: dict[str, bool] = {}
    for node in tree.body:
        owner = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        for item in node.body if isinstance(node, ast.ClassDef) else [node]:
            if isinstance(item, ast.FunctionDef) and item.name.startswith("test_"):
                marked = any("mark.stub" in ast.unparse(decorator) for decorator in item.decorator_list)
                found[owner + item.name] = whole or marked
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.source.split()[0].split("/")[-1])
def test_each_case_is_shown_by_tests_that_exist_at_their_level(case: Case) -> None:
    assert case.shown
    for level, shown in case.shown:
        file, _, name = shown.partition("::")
        tests = marks_of_tests(file)
        assert name in tests, shown
        if level in ("stub", "interp"):
            assert tests[name], f"{shown} does not run on every Triton: mark it stub"
        assert (file.startswith("gpu/")) == (level == "gpu")
        assert level != "gloo" or file.startswith("multiprocess/")


LEVELS: dict[str, set[Level]] = {
    "Megatron-LM#6966": {"stub", "gloo"},
    "flashinfer#3186": {"gloo"},
    "flashinfer#3920": {"gloo"},
    "xla#7716": {"gloo"},
    "triton#6547": {"stub", "interp"},
    "triton#9230": {"interp"},
    "triton#10596": {"gpu"},
    "pytorch#189121": {"gpu"},
    "pytorch#143353": {"gpu"},
    "triton-dejavu#1": {"interp"},
    "sglang#8513": {"stub", "gpu"},
    "unsloth#10806": {"stub", "gpu"},
}
"""Levels at which a report must be shown, at least; ``stub``, or ``pure``, which needs less, for every other one."""


def test_each_report_is_shown_at_each_of_its_levels() -> None:
    names = {case.source.split()[0].split("/")[-1]: case for case in CASES}
    assert set(LEVELS) <= set(names)
    missing = {
        name: lacking
        for name, case in names.items()
        if (lacking := LEVELS.get(name, {"stub"}) - {"stub" if level == "pure" else level for level, _ in case.shown})
    }
    assert missing == {}


def test_no_report_is_listed_twice() -> None:
    sources = [source for case in CASES for source in case.source.split() if "#" in source]
    assert len(sources) == len(set(sources))
    assert len(CASES) == 32


# --- what no other file shows -----------------------------------------------------------------------------------------

KERNEL = "stub_kernels.kernel"


def policy(mode: Any = "pinned", **fields: Any) -> AutotunePolicy:
    return AutotunePolicy(mode=mode, modules=("stub_kernels",), **fields)


def run(tuner: Any, n: Any = 8) -> int:
    launch(tuner, FakeTensor(), FakeTensor(), n, flag=True)
    return int(dict(tuner.fn.launches[-1].kwargs)["BLOCK"])


def write(folder: Path, *blocks_by_n: tuple[int, int], arch: str = "cpu", denied: tuple[Any, ...] = ()) -> Path:
    entries = []
    for n, block in blocks_by_n:
        key = Key.of({"n": n}, {"x": "float32", "y": "float32"})
        config = LaunchConfig.build({"BLOCK": block})
        entries.append(Entry(KERNEL, key.values, key.dtypes, None, config, evidence={"source": "a test"}))
    table = TableFile(arch, "stub_kernels", "1", triton.__version__, "none", tuple(entries), denied, None)
    return write_table(folder, table)


def recorded(folder: Path, times: dict[int, float], keys: range = range(8, 12)) -> Path:
    """A table of a recording in which the candidates took these times."""
    stub = StubKernel()
    tuner = autotuner(configs(*times), stub=stub, bench=Bench(times, stub))
    with tuning.install(policy("record", record_path=str(folder / "run"))) as installed:
        for n in keys:
            run(tuner, n)
        path = installed.journal_path
    assert path is not None
    merged = merge([read_journal(path)])
    for table in merged.tables:
        write_table(folder / "tables", table)
    return folder / "tables"


def test_near_ties_are_settled_alike_in_whatever_order_they_were_recorded(tmp_path: Path) -> None:
    """Candidates 0.1 % apart, listed and timed in two orders, each once the faster one."""
    chosen = set()
    for index, times in enumerate([{16: 1.0, 32: 1.001, 64: 3.0}, {64: 3.0, 32: 1.0, 16: 1.001}]):
        folder = tmp_path / str(index)
        folder.mkdir()
        tables = recorded(folder, times)
        with tuning.install(policy(table_path=(str(tables),), on_miss="error")):
            chosen.add(run(autotuner(configs(64, 16, 32))))
    assert len(chosen) == 1
    assert chosen <= {16, 32}


def test_two_replays_of_a_recording_leave_the_same_bytes(tmp_path: Path) -> None:
    tables = recorded(tmp_path, {16: 3.0, 32: 1.0, 64: 2.0})
    logs = []
    for order in ((16, 32, 64), (64, 16, 32)):
        with tuning.install(policy(table_path=(str(tables),), on_miss="error")) as installed:
            tuner = autotuner(configs(*order))
            assert [run(tuner, n) for n in (range(8, 12) if order[0] == 16 else range(11, 7, -1))] == [32] * 4
            assert {choice.source for choice in installed.choices} == {"exact"}
            document = json.loads(manifest_bytes(installed.manifest()))
            logs.append(json.dumps(document["run"]["choices"]))
    assert logs[0] == logs[1]


def test_nearest_gives_a_hundred_lengths_the_config_of_the_one_that_was_recorded(tmp_path: Path) -> None:
    write(tmp_path, (8192, 32))
    tuner = autotuner(configs(16, 32, 64))
    with tuning.install(policy(table_path=(str(tmp_path),), on_miss="nearest")) as installed:
        assert {run(tuner, n) for n in range(1, 101)} == {32}
        assert installed.benchmarks == 0
        assert {choice.source for choice in installed.choices} == {"nearest"}
        assert len(installed.choices) == 100


def test_nearest_takes_the_table_of_another_arch_and_says_which(tmp_path: Path) -> None:
    path = write(tmp_path, (8, 64), arch="sm120")
    with tuning.install(policy(table_path=(str(tmp_path),), on_miss="nearest")) as installed:
        assert run(autotuner(configs(16, 32, 64))) == 64
        (choice,) = installed.choices
    assert (choice.source, choice.origin) == ("nearest", str(path))
    assert "sm120" in choice.detail
    with tuning.install(policy(table_path=(str(tmp_path),))):
        assert run(autotuner(configs(16, 32, 64))) == 16


def test_a_new_key_in_each_step_costs_little_and_a_known_one_less() -> None:
    """Medians over 300 new keys and 2,500 known ones, against a launch of the bare kernel in the same run."""
    tuner = autotuner(configs(16, 32, 64))
    took: dict[str, list[float]] = {"new": [], "known": [], "bare": []}
    bare = {"grid": (1,), "warmup": False, "flag": True, **tuner.configs[0].all_kwargs()}
    with tuning.install(policy()) as installed:
        for kind, keys in (("new", list(range(300))), ("known", [index % 300 for index in range(2500)])):
            for n in keys:
                begin = time.perf_counter()
                launch(tuner, FakeTensor(), FakeTensor(), n, flag=True)
                took[kind].append(time.perf_counter() - begin)
                if kind == "known":  # in turns, so that what else the machine does falls on both
                    begin = time.perf_counter()
                    tuner.fn.run(FakeTensor(), FakeTensor(), n, **bare)
                    took["bare"].append(time.perf_counter() - begin)
        assert installed.benchmarks == 0
    new, known, alone = (statistics.median(took[kind]) for kind in ("new", "known", "bare"))
    assert known < new < 40 * alone, f"{new / alone:.1f} bare launches"
    assert known < 3 * alone, f"{known / alone:.2f} bare launches"


@pytest.mark.parametrize("error", resource_errors(), ids=lambda error: error.__name__)
def test_each_error_of_resources_gives_the_same_next_candidate_on_every_rank(
    error: type[BaseException], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = {
        "OutOfResources": (300, 200, "shared memory"),
        "CompileTimeAssertionFailure": (None, None, "tl.static_assert"),
    }
    made = error(*arguments.get(error.__name__, ("ptxas fatal",)))
    launched = set()
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        caplog.clear()
        stub = StubKernel(fails=lambda config, named: made if dict(config.kwargs)["BLOCK"] == "16" else None)
        tuner = autotuner(configs(64, 16, 32), stub=stub)
        with tuning.install(policy()), caplog.at_level(logging.WARNING, "tuning"):
            launched |= {run(tuner) for _ in range(3)}
            assert tuning.choices()[-1].detail.startswith("in place of BLOCK=16")
        assert len(caplog.records) == 1
    assert launched == {32}


def test_decorated_before_and_after_install_and_by_a_swapped_autotune_all_are_pinned(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Swapped(Autotuner):
        """As FLA's: keeps Triton's signature and calls through."""

        def run(self, *args: Any, **kwargs: Any) -> Any:
            return super().run(*args, **kwargs)

    before = autotuner(configs(64, 16))
    monkeypatch.setattr(triton, "autotune", lambda *args, **kwargs: None)
    swapped_before = autotuner(configs(64, 16), kind=Swapped)
    with tuning.install(policy()) as installed:
        tuners = [before, swapped_before, autotuner(configs(64, 16)), autotuner(configs(64, 16), kind=Swapped)]
        assert [run(tuner) for tuner in tuners] == [16] * 4
        assert installed.benchmarks == 0
        classes = {read.class_name.rpartition(".")[2] for read, _ in installed.reached}
    assert classes == {"Autotuner", "Swapped"}


def test_a_denied_config_is_removed_before_any_rule(tmp_path: Path) -> None:
    racy = Denied(kernel=KERNEL, key=None, config=LaunchConfig.build({"BLOCK": 32}), reason="racy", source="a test")
    write(tmp_path, (8, 32), denied=(racy,))
    for fields in ({}, {"block_sizes": {"BLOCK": 32}}, {"on_miss": "nearest"}):
        with tuning.install(policy(table_path=(str(tmp_path),), **fields)):
            assert run(autotuner(configs(32, 64))) == 64


# --- in the interpreter -----------------------------------------------------------------------------------------------

interpreted = pytest.mark.skipif(
    VERSION == (3, 2), reason="Triton 3.2's interpreter does not take the arguments of its own autotuner's configs"
)


def interpret(*arguments: str, timed: int = 0) -> Any:
    program = [sys.executable, "-W", "ignore", str(TESTS / "interpreted_cases.py"), *arguments]
    result = subprocess.run(program, capture_output=True, text=True, check=False, timeout=120)
    assert result.returncode == 0, result.stderr[-2000:]
    document = json.loads(result.stdout)
    assert document["timed"] == timed
    assert document["triton"] == triton.__version__
    return document["result"]


@interpreted
def test_an_update_in_place_runs_once_a_launch_and_is_never_reset() -> None:
    assert interpret("in_place") == [[6.0], [7.0], [8.0]]


@interpreted
def test_a_kernel_that_is_wrong_under_each_config_shows_it() -> None:
    assert interpret("half") == [[1.0, 0.0], [1.0, 0.0]]


@interpreted
def test_outputs_that_a_winner_owes_to_other_candidates_are_reported_while_recording(tmp_path: Path) -> None:
    seen, (note,) = interpret("checked", str(tmp_path), "half", "yes", timed=2)
    assert seen == [[1.0, 1.0], [1.0, 0.0]], "the fault is hidden in the first launch alone"
    assert "16 of 32 elements of argument 'y', first at (16,): 1.0 after timing, 0.0 when it runs alone" in note


@interpreted
def test_a_kernel_that_timing_has_updated_again_and_again_is_reported_while_recording(tmp_path: Path) -> None:
    seen, (note,) = interpret("checked", str(tmp_path), "update", "yes", timed=2)
    assert seen == [[3.0, 3.0], [1.0, 1.0]]
    assert "32 of 32 elements of argument 'y', first at (0,): 3.0 after timing, 1.0 when it runs alone" in note


@interpreted
@pytest.mark.parametrize("kernel", ["in_place", "hook"])
def test_outputs_that_are_reset_or_restored_while_timing_are_the_winners_own(tmp_path: Path, kernel: str) -> None:
    seen, notes = interpret("checked", str(tmp_path), kernel, "yes", timed=2)
    assert (seen, notes) == ([[1.0, 1.0], [1.0, 1.0]], [""])


@interpreted
def test_outputs_are_not_checked_unasked(tmp_path: Path) -> None:
    assert interpret("checked", str(tmp_path), "half", "", timed=2)[1] == [""]


@interpreted
def test_a_config_pinned_in_a_second_process_runs_with_its_hook(tmp_path: Path) -> None:
    first = interpret("hooks", str(tmp_path), "")
    second = interpret("hooks", str(tmp_path), "tables")
    assert first[0] == second[0] == [[1.0], [1.0], [1.0]]
    assert (first[1], second[1]) == ("cheapest", "exact")
    assert first[2] == second[2]


# --- what Triton does by itself ---------------------------------------------------------------------------------------


def timed(tuner: Any, n: Any = 8) -> int:
    """Number of candidates that stock Triton times in one launch."""
    calls = tuner.do_bench.calls
    run(tuner, n)
    return int(tuner.do_bench.calls - calls)


def test_triton_compares_configs_by_identity_in_3_2_and_by_value_later() -> None:
    one, other = triton.Config({"BLOCK": 16}), triton.Config({"BLOCK": 16})
    assert (one == other) == (VERSION > (3, 2))
    assert one.num_stages == (2 if VERSION == (3, 2) else 3)


def test_triton_gives_true_one_and_one_point_zero_one_slot() -> None:
    tuner = autotuner(configs(16, 32))
    assert [timed(tuner, value) for value in (1, True, 1.0)] == [2, 0, 0]


def test_triton_times_a_single_survivor_of_a_pruner_up_to_3_7() -> None:
    def prune(candidates: Any, named: Any, **kwargs: Any) -> Any:
        return candidates[:1]

    tuner = autotuner(configs(16, 32), prune_configs_by={"early_config_prune": prune})
    assert timed(tuner) == (1 if VERSION <= (3, 7) else 0)


def test_triton_refuses_a_key_that_is_no_argument_from_3_9_on() -> None:
    if VERSION >= (3, 9):
        with pytest.raises(Exception, match="nothing"):
            autotuner(configs(16, 32), key=("n", "nothing"))
        return
    tuner = autotuner(configs(16, 32), key=("n", "nothing"))
    assert timed(tuner) == 2


def test_triton_resets_while_it_times_and_once_after_and_never_later() -> None:
    stub = StubKernel(effect=lambda named: setattr(named["y"], "value", named["y"].value + 1))
    tuner = autotuner(configs(16, 32), stub=stub, reset_to_zero=["y"])
    tensor = FakeTensor(value=7.0)
    seen = []
    for _ in range(3):
        launch(tuner, FakeTensor(), tensor, 8, flag=True)
        seen.append(tensor.value)
    assert seen == [1.0, 2.0, 3.0]
