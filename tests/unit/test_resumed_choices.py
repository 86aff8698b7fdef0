"""state_dict and load_state_dict: a resumed run launches what the run before it launched, or fails clearly."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import pickle
import threading
from pathlib import Path
from typing import Any

import pytest
import triton
from stub_kernels import FakeTensor, StubKernel, autotuner, launch
from stub_kernels import configs as stub_configs
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import OutOfResources

import tuning
from tuning import AutotunePolicy, resumption
from tuning.resumption import CarriedChoices, gather_choices
from tuning.spec import Key, LaunchConfig
from tuning.tables import Denied, Entry, TableFile, write_table
from tuning.verification import MemoryGroup

pytestmark = pytest.mark.stub

KERNEL = "stub_kernels.kernel"
KEY = Key.of({"n": 8}, {"x": "float32", "y": "float32"})
RESUMED = "resumed from a checkpoint"


@pytest.fixture(autouse=True)
def _clean():
    before = dict(vars(Autotuner))
    yield
    tuning.uninstall()
    assert dict(vars(Autotuner)) == before


@pytest.fixture
def table(tmp_path):
    """Write the one table of the run: the config of every key, and what is denied."""

    def write(block: int, *denied: int) -> str:
        entry = Entry(KERNEL, None, None, None, LaunchConfig.build({"BLOCK": block}), {"source": "a test"})
        rows = tuple(Denied(KERNEL, LaunchConfig.build({"BLOCK": each}), None, "wrong", "a test") for each in denied)
        file = TableFile("cpu", "stub_kernels", "1", triton.__version__, "none", (entry,), rows, None)
        write_table(tmp_path / "tables", file)
        return str(tmp_path / "tables")

    return write


def configs(*blocks: int) -> list[Any]:
    return stub_configs(*blocks, num_stages=3)  # Triton's default differs between versions


def pinned(table_path: str | None = None, **fields: Any) -> AutotunePolicy:
    folders = () if table_path is None else (table_path,)
    return AutotunePolicy(mode="pinned", modules=("stub_kernels",), table_path=folders, **fields)


def run(tuner: Any, *ns: int, **kwargs: Any) -> list[int]:
    """Launch once for each key; the BLOCK of everything that was launched by this."""
    before = len(tuner.fn.launches)
    for n in ns:
        launch(tuner, FakeTensor(), FakeTensor(), n, **{"flag": True, **kwargs})
    return [int(dict(config.kwargs)["BLOCK"]) for config in tuner.fn.launches[before:]]


def saved(policy: AutotunePolicy, *ns: int, tuner: Any = None) -> dict[str, Any]:
    """The state of a run, as it comes back from a file."""
    with tuning.install(policy):
        run(autotuner(configs(16, 32, 64)) if tuner is None else tuner, *ns)
        return json.loads(json.dumps(tuning.state_dict()))


def out_of_resources(*blocks: int, when: Any = lambda named: True) -> StubKernel:
    def fails(config: LaunchConfig, named: dict[str, Any]) -> BaseException | None:
        return OutOfResources(9, 1, "shared memory") if named["BLOCK"] in blocks and when(named) else None

    return StubKernel(fails=fails)


def test_the_state_is_plain_data_and_equal_for_equal_runs(table):
    first = saved(pinned(table(32)), 8, 9)
    second = saved(pinned(table(32)), 9, 8)
    assert json.dumps(first, sort_keys=True) == json.dumps(second, sort_keys=True)
    assert first["format"] == "triton-tuning choices"
    assert (first["schema_version"], first["triton"]) == (1, triton.__version__)
    row = first["choices"][0]
    assert {**row, "origin": Path(row["origin"]).name, "source_hash": len(row["source_hash"])} == {
        "kernel": KERNEL,
        "key": {"values": [["n", 8]], "dtypes": [["x", "float32"], ["y", "float32"]], "call_order": ["x", "y"]},
        "arch": "cpu",
        "config": {"kwargs": {"BLOCK": 32}, "num_warps": 4, "num_stages": 3},
        "source": "wildcard",
        "origin": "stub_kernels.json",
        "detail": "",
        "source_hash": 16,
    }


def test_a_resumed_run_keeps_its_choices_though_tables_have_changed(table):
    state = saved(pinned(table(32)), 8)
    changed = pinned(table(64))
    tuner = autotuner(configs(16, 32, 64))
    with tuning.install(changed):
        tuning.load_state_dict(state)
        assert run(tuner, 8, 8, 9) == [32, 32, 64]
        carried, new = tuning.choices()
        assert carried.config is tuner.configs[1]
    assert (carried.source, carried.detail) == ("wildcard", RESUMED)
    assert carried.origin is not None
    assert carried.origin.endswith("stub_kernels.json")
    assert (new.source, new.detail) == ("wildcard", "")
    with tuning.install(changed):
        assert run(autotuner(configs(16, 32, 64)), 8) == [64]  # what a run without the state launches


def test_a_choice_without_a_table_is_carried_too(table):
    state = saved(pinned(), 8)
    with tuning.install(pinned(table(64), on_miss="error")):
        tuning.load_state_dict(state)
        assert run(autotuner(configs(16, 32, 64)), 8) == [16]
        (choice,) = tuning.choices()
    assert (choice.source, choice.origin) == ("cheapest", None)
    assert choice.detail == f"{RESUMED}; footprint 48, 4 warps"


def test_a_state_saved_before_everything_was_launched_again_is_whole_and_resumes_again(table):
    state = saved(pinned(table(32)), 8, 9)
    with tuning.install(pinned(table(64))):
        tuning.load_state_dict(state)
        run(autotuner(configs(16, 32, 64)), 9, 10)
        again = tuning.state_dict()
    assert [(row["key"]["values"][0][1], row["config"]["kwargs"]["BLOCK"]) for row in again["choices"]] == [
        (10, 64),
        (8, 32),
        (9, 32),
    ]
    with tuning.install(pinned(table(16))):
        tuning.load_state_dict(again)
        assert run(autotuner(configs(16, 32, 64)), 8, 9, 10) == [32, 32, 64]
        assert {choice.detail for choice in tuning.choices()} == {RESUMED}


@pytest.mark.parametrize("left", [(16, 64), (64,)], ids=["others", "one_other"])
def test_a_config_that_is_no_candidate_any_more_is_an_error_at_every_launch(table, left):
    state = saved(pinned(table(32)), 8)
    tuner = autotuner(configs(*left))
    with tuning.install(pinned(table(64))):
        tuning.load_state_dict(state)
        for _ in range(2):
            with pytest.raises(tuning.TableError) as caught:
                run(tuner, 8)
        assert tuning.choices() == ()
    assert tuner.fn.launches == []
    error = caught.value
    assert error.where == "$.choices[0].config"
    assert error.expected == "a config that is a live candidate"
    assert "BLOCK=32" in (error.found or "")
    for part in ("state of choices", KERNEL, "n=8", "on cpu", "\n"):
        assert (part in str(error)) == (part != "\n")
    assert vars(pickle.loads(pickle.dumps(error))) == vars(error)


def test_a_config_that_the_kernels_pruning_drops_is_an_error(table):
    state = saved(pinned(table(32)), 8)
    prune = {"early_config_prune": lambda configs, named, **kwargs: [c for c in configs if c.kwargs["BLOCK"] != 32]}
    with tuning.install(pinned()):
        tuning.load_state_dict(state)
        with pytest.raises(tuning.TableError, match="no longer is one"):
            run(autotuner(configs(16, 32, 64), prune_configs_by=prune), 8)


def test_one_candidate_left_and_the_same_one_is_fine(table):
    state = saved(pinned(table(32)), 8)
    with tuning.install(pinned()):
        tuning.load_state_dict(state)
        assert run(autotuner(configs(32)), 8) == [32]


def test_a_config_that_a_table_has_come_to_deny_is_an_error(table):
    state = saved(pinned(table(32)), 8)
    tuner = autotuner(configs(16, 32, 64))
    with tuning.install(pinned(table(64, 32))):
        tuning.load_state_dict(state)
        with pytest.raises(tuning.TableError, match=r"which is denied: wrong \(a test; .*stub_kernels.json\)"):
            run(tuner, 8)
    assert tuner.fn.launches == []


def test_what_is_denied_is_no_replacement_either(table):
    state = saved(pinned(table(32)), 8)
    tuner = autotuner(configs(16, 32, 64), stub=out_of_resources(32))
    with tuning.install(pinned(table(64, 16))):
        tuning.load_state_dict(state)
        assert run(tuner, 8) == [64]


def test_loading_after_a_launch_that_agrees_changes_nothing(table):
    state = saved(pinned(table(32)), 8, 9)
    tuner = autotuner(configs(16, 32, 64))
    with tuning.install(pinned(table(32))):
        run(tuner, 8)
        tuning.load_state_dict(state)
        assert run(tuner, 8, 9) == [32, 32]


def test_loading_after_a_launch_that_differs_names_the_choice_and_loads_nothing(table):
    state = saved(pinned(table(32)), 8, 9)
    tuner = autotuner(configs(16, 32, 64))
    with tuning.install(pinned(table(64))):
        run(tuner, 8)
        with pytest.raises(tuning.TuningError) as caught:
            tuning.load_state_dict(state)
        assert run(tuner, 9) == [64]
    message = str(caught.value)
    assert "1 choices already made differ" in message
    assert f"{KERNEL} [n=8 " in message
    assert "BLOCK=64 num_warps=4 num_stages=3 is launched, BLOCK=32 num_warps=4 num_stages=3 is in the state" in message


def test_a_replacement_that_was_launched_is_what_is_carried(table):
    """BLOCK=64 never ran. The resumed run does not try it again, though it could run by now."""
    state = saved(pinned(table(64)), 8, tuner=autotuner(configs(16, 32, 64), stub=out_of_resources(64, 16)))
    assert [row["config"]["kwargs"]["BLOCK"] for row in state["choices"]] == [32]
    assert state["choices"][0]["detail"].startswith("in place of BLOCK=64")
    with tuning.install(pinned(table(64))):
        tuning.load_state_dict(state)
        assert run(autotuner(configs(16, 32, 64)), 8) == [32]
        (choice,) = tuning.choices()
        assert choice.detail.startswith(f"{RESUMED}; in place of BLOCK=64")
        assert choice.is_fallback
        assert tuning.state_dict() == state
    # A launch that cannot run it falls back to the cheaper 16, which comes after it ever after.
    tuner = autotuner(configs(16, 32, 64), stub=out_of_resources(32, when=lambda named: named["flag"] == 2))
    with tuning.install(pinned(table(64))):
        tuning.load_state_dict(state)
        assert run(tuner, 8, flag=2) == [16]
        assert run(tuner, 8, flag=True) == [32]
        state = tuning.state_dict()
    assert [row["config"]["kwargs"]["BLOCK"] for row in state["choices"]] == [32, 16]
    with tuning.install(pinned(table(64))):
        tuning.load_state_dict(state)
        run(autotuner(configs(16, 32, 64), stub=out_of_resources(32)), 8)
        assert tuning.state_dict() == state


@pytest.mark.parametrize("flags", [(1, 2, 3), (2, 3), (3,), ()])
def test_a_resumed_run_that_does_the_same_has_the_state_that_it_was_given(table, flags):
    """BLOCK=64 fails for flags 2 and 3, BLOCK=16 for 3 too."""

    def stub() -> StubKernel:
        def fails(config: LaunchConfig, named: dict[str, Any]) -> BaseException | None:
            blocks = {1: (), 2: (64,), 3: (64, 16)}[named["flag"]]
            return OutOfResources(9, 1, "shared memory") if named["BLOCK"] in blocks else None

        return StubKernel(fails=fails)

    with tuning.install(pinned(table(64))):
        tuner = autotuner(configs(16, 32, 64), stub=stub())
        launched = [run(tuner, 8, flag=flag) for flag in flags]
        state = tuning.state_dict()
    for _ in range(3):
        with tuning.install(pinned(table(32))):
            tuning.load_state_dict(state)
            tuner = autotuner(configs(16, 32, 64), stub=stub())
            assert [run(tuner, 8, flag=flag) for flag in flags] == launched
            assert tuning.state_dict() == state


@pytest.mark.parametrize("flags", [(1, 2, 3), (3, 2, 1), (2, 3, 1)])
def test_a_choice_and_its_replacements_are_carried_in_the_order_of_fallback(table, flags):
    """BLOCK=64 fails for flags 2 and 3, BLOCK=16 for 3 too: whatever is met first, each launch gets its own again."""

    def stub() -> StubKernel:
        def fails(config: LaunchConfig, named: dict[str, Any]) -> BaseException | None:
            blocks = {1: (), 2: (64,), 3: (64, 16)}[named["flag"]]
            return OutOfResources(9, 1, "shared memory") if named["BLOCK"] in blocks else None

        return StubKernel(fails=fails)

    expected = {1: 64, 2: 16, 3: 32}
    with tuning.install(pinned(table(64))):
        tuner = autotuner(configs(16, 32, 64), stub=stub())
        assert [run(tuner, 8, flag=flag) for flag in flags] == [[expected[flag]] for flag in flags]
        state = tuning.state_dict()
    assert [row["config"]["kwargs"]["BLOCK"] for row in state["choices"]] == [64, 16, 32]
    with tuning.install(pinned(table(32))):
        tuning.load_state_dict(state)
        tuner = autotuner(configs(16, 32, 64), stub=stub())
        assert [run(tuner, 8, flag=flag) for flag in flags] == [[expected[flag]] for flag in flags]


def test_two_autotuners_over_one_kernel_get_their_own_choices_back():
    with tuning.install(pinned()):
        assert run(autotuner(configs(16, 32)), 8) == [16]
        assert run(autotuner(configs(64, 128)), 8) == [64]
        state = tuning.state_dict()
    with tuning.install(pinned(block_sizes=(("BLOCK", 128),))):
        tuning.load_state_dict(state)
        assert run(autotuner(configs(64, 128)), 8) == [64]
        assert run(autotuner(configs(16, 32)), 8) == [16]
        with pytest.raises(tuning.TableError, match=r"expected one choice for this key, found two \(BLOCK=16"):
            run(autotuner(configs(16, 64)), 8)
        with pytest.raises(tuning.TableError, match="expected a config that is a live candidate"):
            run(autotuner(configs(256, 512)), 8)


def test_another_triton_is_one_warning_and_stands_in_the_manifest(table, caplog):
    state = {**saved(pinned(table(32)), 8, 9), "triton": "3.1.0"}
    with tuning.install(pinned(table(64))) as installed, caplog.at_level(logging.WARNING, logger="tuning"):
        caplog.clear()
        tuning.load_state_dict(state)
        assert run(autotuner(configs(16, 32, 64)), 8, 9) == [32, 32]
        notices = installed.manifest().notices
    assert [kind for kind, _ in notices] == ["other_triton"]
    (message,) = [record.getMessage() for record in caplog.records]
    assert f"made under Triton 3.1.0, this is {triton.__version__}" in message


def test_the_same_triton_and_source_warn_of_nothing(table, caplog):
    state = saved(pinned(table(32)), 8)
    with tuning.install(pinned(table(64))), caplog.at_level(logging.WARNING, logger="tuning"):
        caplog.clear()
        tuning.load_state_dict(state)
        run(autotuner(configs(16, 32, 64)), 8)
    assert caplog.records == []


def test_a_changed_source_warns_and_is_used(table, caplog):
    state = saved(pinned(table(32)), 8)
    state["choices"][0]["source_hash"] = "0" * 64
    with tuning.install(pinned(table(64))), caplog.at_level(logging.WARNING, logger="tuning"):
        tuning.load_state_dict(state)
        assert run(autotuner(configs(16, 32, 64)), 8) == [32]
    assert "source has changed since the checkpoint" in caplog.text


def test_choices_for_another_arch_are_not_used_and_that_is_said(table, caplog):
    state = saved(pinned(table(32)), 8)
    state["choices"][0]["arch"] = "sm90"
    with tuning.install(pinned(table(64))), caplog.at_level(logging.WARNING, logger="tuning"):
        tuning.load_state_dict(state)
        assert run(autotuner(configs(16, 32, 64)), 8) == [64]
    assert "the loaded choices are for sm90, this is cpu" in caplog.text


def test_what_triton_timed_is_not_carried():
    with tuning.install(pinned(config_invariant=(KERNEL,))):
        run(autotuner(configs(16, 32)), 8)
        assert [choice.source for choice in tuning.choices()] == ["timed"]
        assert tuning.state_dict()["choices"] == []


@pytest.mark.parametrize("call", [tuning.state_dict, lambda: tuning.load_state_dict({})])
def test_without_a_policy_there_is_nothing_to_carry(call):
    with pytest.raises(tuning.TuningError, match="no policy is installed"):
        call()


@pytest.mark.parametrize(
    ("fields", "field"),
    [({"mode": "auto"}, "mode"), ({"record_path": "here"}, "mode"), ({"mode": "pinned", "chaos": True}, "chaos")],
)
def test_only_pinned_choices_can_be_carried(tmp_path, monkeypatch, table, fields, field):
    monkeypatch.chdir(tmp_path)
    state = saved(pinned(table(32)), 8)
    with tuning.install(AutotunePolicy(modules=("stub_kernels",), **fields)):
        for call in (tuning.state_dict, lambda: tuning.load_state_dict(state)):
            with pytest.raises(tuning.PolicyError, match="needs mode 'pinned' without chaos") as caught:
                call()
            assert caught.value.field == field


@pytest.mark.parametrize(
    ("fields", "field"), [({"modules": ("other",)}, "modules"), ({"config_invariant": (KERNEL,)}, "config_invariant")]
)
def test_a_scope_that_leaves_a_carried_kernel_to_the_clock_is_refused(table, fields, field):
    state = saved(pinned(table(32)), 8)
    policy = AutotunePolicy(**{"mode": "pinned", "modules": ("stub_kernels",), **fields})
    with tuning.install(policy), pytest.raises(tuning.PolicyError, match=f"the state holds choices of {KERNEL}") as e:
        tuning.load_state_dict(state)
    assert e.value.field == field


def broken(change: Any) -> Any:
    launches = CarriedChoices.of(
        [
            resumption.Launch(KERNEL, KEY, LaunchConfig.build({"BLOCK": 32}), "cheapest", None, "cpu", "", None),
        ],
        triton.__version__,
    )
    state = copy.deepcopy(launches.to_state())
    return change(state) or state


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda s: [s], "$.format"),
        (lambda s: {"a": {1, 2}}, "$"),
        (lambda s: {"a": float("nan")}, "$"),
        (lambda s: {"model": {}}, "$.format"),
        (lambda s: s.update(format="other"), "$.format"),
        (lambda s: s.update(schema_version=2), "$.schema_version"),
        (lambda s: s.update(schema_version="1"), "$.schema_version"),
        (lambda s: s.update(more=1), "$.more"),
        (lambda s: s.pop("triton") and None, "$"),
        (lambda s: s.update(choices={}), "$.choices"),
        (lambda s: s["choices"].append(3), "$.choices[1]"),
        (lambda s: s["choices"][0].pop("kernel") and None, "$.choices[0]"),
        (lambda s: s["choices"][0].update(kernel=3), "$.choices[0].kernel"),
        (lambda s: s["choices"][0].update(source="guess"), "$.choices[0].source"),
        (lambda s: s["choices"][0].update(source="timed"), "$.choices[0].source"),
        (lambda s: s["choices"][0]["config"].update(num_warps=True), "$.choices[0].config.num_warps"),
        (lambda s: s["choices"][0]["config"].update(num_ctas=1), "$.choices[0]"),
        (lambda s: s["choices"][0]["key"]["values"].append(["n"]), "$.choices[0].key.values[1]"),
    ],
)
def test_a_malformed_state_names_the_place_and_loads_nothing(change, where):
    tuner = autotuner(configs(16, 32))
    with tuning.install(pinned()):
        with pytest.raises(tuning.TableError, match=r"^state of choices: at ") as caught:
            tuning.load_state_dict(broken(change))
        assert run(tuner, 8) == [16]
    assert caught.value.where == where
    assert "\n" not in str(caught.value)


def test_the_state_that_is_broken_above_is_fine():
    with tuning.install(pinned()):
        tuning.load_state_dict(broken(lambda state: None))
        assert run(autotuner(configs(16, 32)), 8) == [32]


# -- all ranks --


def carried(*rows: tuple[int, int, str], triton: str = "3.6.0") -> CarriedChoices:
    """Choices by (n, BLOCK, detail)."""
    return CarriedChoices.of(
        [
            resumption.Launch(
                KERNEL, Key.of({"n": n}), LaunchConfig.build({"BLOCK": block}), "cheapest", None, "cpu", detail
            )
            for n, block, detail in rows
        ],
        triton,
    )


def gathered(*each: CarriedChoices, wrap: Any = lambda rank, communicator: communicator) -> list[Any]:
    group = MemoryGroup(len(each))
    results: list[Any] = [None] * len(each)

    def rank(index: int) -> None:
        try:
            results[index] = gather_choices(each[index], wrap(index, group.communicator(index)), 5.0)
        except Exception as error:
            results[index] = error

    threads = [threading.Thread(target=rank, args=(index,)) for index in range(len(each))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_all_ranks_get_the_choices_of_all():
    first, second = carried((1, 16, ""), (2, 16, "")), carried((2, 16, ""), (3, 64, ""))
    results = gathered(first, second, first, carried())
    assert results == [carried((1, 16, ""), (2, 16, ""), (3, 64, ""))] * 4
    assert gathered(first, first) == [first, first]


def test_a_replacement_on_one_rank_comes_after_the_choice_of_another():
    fallback = "in place of BLOCK=64, which failed"
    (result, _) = gathered(carried((1, 16, fallback)), carried((1, 64, "")))
    assert [launch.config for launch in result.launches] == [LaunchConfig.build({"BLOCK": b}) for b in (64, 16)]
    assert result.ambiguous == ()


def test_ranks_that_chose_differently_are_named():
    (result, _) = gathered(carried((1, 16, "")), carried((1, 64, "")))
    (line,) = result.ambiguous
    assert line.startswith(f"{KERNEL} [n=1] on cpu: BLOCK=16 ")
    assert "BLOCK=64" in line


class Lying:
    """A communicator whose rank announces another header than it should, or sends another content; counts exchanges."""

    exchanges = 0

    def __init__(self, inner: Any, header: bytes | None = None, content: bytes | None = None) -> None:
        self.inner, self.header, self.content = inner, header, content
        self.rank, self.ranks, self.meet = inner.rank, inner.ranks, inner.meet

    def gather(self, header: bytes, timeout: float) -> bytes:
        return self.inner.gather(self.header or header, timeout)

    def exchange(self, slots: int, width: int, mine: Any, timeout: float) -> bytes:
        self.exchanges += 1
        if self.content is not None:
            mine = dict.fromkeys(mine, self.content[:width])
        return self.inner.exchange(slots, width, mine, timeout)


def test_many_contents_go_in_several_exchanges(monkeypatch):
    each = [carried((n, 16, "")) for n in range(6)]
    monkeypatch.setattr(resumption, "_LONGEST_EXCHANGE", 2 * len(json.dumps(each[0].to_state())))
    counted: dict[int, Lying] = {}

    def wrap(rank: int, communicator: Any) -> Any:
        counted[rank] = Lying(communicator)
        return counted[rank]

    assert gathered(*each, wrap=wrap) == [carried(*((n, 16, "") for n in range(6)))] * 6
    assert [counted[rank].exchanges for rank in range(6)] == [3] * 6


@pytest.mark.parametrize(
    ("lie", "message"),
    [
        ({"content": b"[]"}, "other choices than it announced"),
        ({"header": resumption._HEADER.pack(1 << 60, b"x" * 32)}, "rank 1 announced 1152921504606846976 bytes"),
        ({"header": resumption._HEADER.pack(2, hashlib.sha256(b"[]").digest()), "content": b"[]"}, r"at \$.format"),
        ({"header": resumption._HEADER.pack(2, hashlib.sha256(b"\xff[").digest()), "content": b"\xff["}, "JSON"),
    ],
)
def test_a_rank_that_lies_is_an_error_on_all_ranks(lie, message):
    def wrap(rank: int, communicator: Any) -> Any:
        return Lying(communicator, **lie) if rank == 1 else communicator

    results = gathered(carried((1, 16, "")), carried((2, 16, "")), carried((1, 16, "")), wrap=wrap)
    for result in results:
        assert isinstance(result, tuning.TableError)
        with pytest.raises(tuning.TableError, match=message):
            raise result
