"""install and uninstall, and what a policy does to the real autotuner over a stub kernel."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from stub_kernels import Bench, FakeTensor, StubKernel, autotuner, configs, launch
from triton.runtime.autotuner import Autotuner
from triton.runtime.errors import OutOfResources

import tuning
from tuning import AutotunePolicy, inductor, installation, interception
from tuning.errors import JournalError
from tuning.inductor import CompiledKernels
from tuning.journal import read_journal
from tuning.spec import Key, LaunchConfig
from tuning.tables import Entry, TableFile, write_table

pytestmark = pytest.mark.stub

KERNEL = "stub_kernels.kernel"
SCOPE = ("stub_kernels",)


@pytest.fixture(autouse=True)
def _clean():
    before = dict(vars(Autotuner))
    yield
    tuning.uninstall()
    assert dict(vars(Autotuner)) == before


def pinned(**fields: Any) -> AutotunePolicy:
    return AutotunePolicy(mode="pinned", modules=SCOPE, **fields)


def blocks(tuner: Any) -> list[int]:
    return [int(dict(config.kwargs)["BLOCK"]) for config in tuner.fn.launches]


def run(tuner: Any, n: Any = 8, **kwargs: Any) -> Any:
    return launch(tuner, FakeTensor(), FakeTensor(), n, **{"flag": True, **kwargs})


def entry(block: int, key: Key | None = None, **fields: Any) -> Entry:
    return Entry(
        kernel=KERNEL,
        key=None if key is None else key.values,
        dtypes=None if key is None else key.dtypes,
        dtype_sequence=None,
        config=LaunchConfig.build({"BLOCK": block}),
        evidence={"source": "a test"},
        **fields,
    )


def write(folder: Path, *entries: Entry, arch: str = "cpu", denied: tuple[Any, ...] = ()) -> Path:
    return write_table(
        folder,
        TableFile(
            arch=arch,
            package="stub_kernels",
            package_version="1",
            triton=triton.__version__,
            device="none",
            entries=entries,
            denied=denied,
            path=None,
        ),
    )


KEY = Key.of({"n": 8}, {"x": "float32", "y": "float32"})


def test_pinned_without_a_table_takes_the_cheapest_and_never_benchmarks():
    tuner = autotuner(configs(64, 16, 32))
    with tuning.install(pinned()) as installed:
        for _ in range(3):
            run(tuner)
        assert installed.mode == "pinned"
        assert tuning.benchmarks_run() == 0
        (choice,) = tuning.choices()
    assert blocks(tuner) == [16, 16, 16]
    assert (choice.kernel, choice.source, choice.origin, choice.arch) == (KERNEL, "cheapest", None, "cpu")
    assert choice.config is tuner.configs[1]
    assert choice.key == KEY


def test_an_exact_entry_beats_a_wildcard_and_names_its_file(tmp_path):
    path = write(tmp_path, entry(32, KEY), entry(64))
    tuner = autotuner(configs(16, 32, 64))
    with tuning.install(pinned(table_path=(str(tmp_path),))):
        run(tuner)
        run(tuner, 9)
        first, second = tuning.choices()
    assert blocks(tuner) == [32, 64]
    assert (first.source, second.source) == ("exact", "wildcard")
    assert first.origin == second.origin == os.fspath(path)


def test_a_table_of_another_arch_in_this_arch_folder_is_refused_before_anything_changes(tmp_path):
    path = write(tmp_path, entry(32, KEY), arch="sm120")
    wrong = tmp_path / "sm121" / path.name
    wrong.parent.mkdir()
    path.rename(wrong)
    before = tuning.install(pinned())
    with pytest.raises(tuning.TableError) as caught:
        tuning.install(pinned(table_path=(str(tmp_path),)))
    assert caught.value.file == os.fspath(wrong)
    assert tuning.active_policy() is before.policy


def test_on_miss_error_names_the_fields_that_differ_and_launches_nothing(tmp_path):
    write(tmp_path, entry(32, KEY))
    tuner = autotuner(configs(16, 32))
    with tuning.install(pinned(table_path=(str(tmp_path),), on_miss="error")):
        run(tuner)
        with pytest.raises(tuning.TableMissError) as caught:
            run(tuner, 9)
    assert blocks(tuner) == [32]
    assert caught.value.kernel == KERNEL
    assert caught.value.closest
    assert "float32" not in "".join(caught.value.closest)


def test_an_entry_that_is_no_candidate_is_a_miss_warned_once(tmp_path, caplog):
    write(tmp_path, entry(48))
    tuner = autotuner(configs(16, 32))
    with caplog.at_level(logging.WARNING, "tuning"), tuning.install(pinned(table_path=(str(tmp_path),))):
        for n in range(4):
            run(tuner, n)
        assert {choice.source for choice in tuning.choices()} == {"cheapest"}
    assert caplog.text.count("BLOCK=48") == 1


def test_a_changed_source_is_used_and_warned_once(tmp_path, caplog):
    write(tmp_path, entry(32, source_hash="0123456789abcdef"))
    tuner = autotuner(configs(16, 32))
    with caplog.at_level(logging.WARNING, "tuning"), tuning.install(pinned(table_path=(str(tmp_path),))):
        for n in range(4):
            run(tuner, n)
    assert blocks(tuner) == [32] * 4
    assert len([record for record in caplog.records if "source" in record.getMessage()]) == 1


def test_an_unset_mode_is_auto_and_triton_decides():
    stub = StubKernel()
    tuner = autotuner(configs(16, 32), stub=stub, bench=Bench({16: 2.0, 32: 1.0}, stub))
    with tuning.install(AutotunePolicy(modules=SCOPE)) as installed:
        run(tuner)
        run(tuner)
        assert installed.mode == "auto"
        assert tuning.benchmarks_run() == 2
        (choice,) = tuning.choices()
    assert choice.source == "timed"
    assert choice.launch_config.kwargs == (("BLOCK", "32"),)


def test_config_invariant_kernels_keep_the_timed_choice_and_are_counted():
    tuner = autotuner(configs(16, 32))
    with tuning.install(pinned(config_invariant=(KERNEL,))) as installed:
        run(tuner)
        assert tuning.choices()[0].source == "timed"
        assert tuning.benchmarks_run() == 2
        assert [treatment for _, treatment in installed.reached] == ["observe"]


def test_kernels_outside_the_scope_are_timed_and_named_once(caplog):
    tuner = autotuner(configs(16, 32))
    with (
        caplog.at_level(logging.WARNING, "tuning"),
        tuning.install(AutotunePolicy(mode="pinned", modules=("stub_kernel", "json"))),
    ):
        run(tuner)
        run(tuner, 9)
        assert tuning.choices() == ()
        assert tuning.benchmarks_run() == 0
    assert tuner.do_bench.calls == 4
    assert caplog.text.count("outside the policy's modules") == 1
    assert KERNEL in caplog.text


def test_a_scope_that_matches_nothing_is_one_warning(caplog):
    with caplog.at_level(logging.WARNING, "tuning"):
        tuning.install(AutotunePolicy(mode="pinned", modules=("no_such_package_here.ops",)))
    assert len(caplog.records) == 1
    assert "no_such_package_here.ops" in caplog.text


def test_install_replaces_and_leaving_an_older_block_uninstalls_nothing():
    first = tuning.install(pinned())
    with first, tuning.install(pinned(on_miss="error")) as second:
        assert tuning.active_policy() is second.policy
        first.uninstall()
        assert tuning.active_policy() is second.policy
    assert tuning.active_policy() is None
    tuning.uninstall()


@pytest.mark.parametrize("value", ["pinned", {"mode": "pinned"}, 3])
def test_what_is_no_policy_is_refused(value):
    with pytest.raises(tuning.PolicyError, match="expected an AutotunePolicy"):
        tuning.install(value)
    assert tuning.active_policy() is None


def test_an_unwritable_record_path_raises_and_leaves_the_earlier_policy(tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("")
    before = tuning.install(pinned())
    with pytest.raises(tuning.JournalError):
        tuning.install(AutotunePolicy(record_path=str(blocker / "run"), modules=SCOPE))
    assert tuning.active_policy() is before.policy


def test_an_unusable_manifest_path_raises_and_leaves_no_journal(tmp_path):
    with pytest.raises(tuning.PolicyError, match="manifest_path"):
        tuning.install(
            AutotunePolicy(
                record_path=str(tmp_path / "run"), modules=SCOPE, manifest_path=str(tmp_path / "no" / "m.json")
            )
        )
    assert list(tmp_path.iterdir()) == []


def test_an_unsupported_triton_raises_and_changes_nothing(monkeypatch):
    monkeypatch.setattr(triton, "__version__", "9.1.0")
    with pytest.raises(tuning.UnsupportedTritonError) as caught:
        tuning.install(pinned())
    assert caught.value.found == "9.1.0"
    assert tuning.active_policy() is None


def test_recording_journals_each_key_and_replaying_makes_the_same_choices(tmp_path):
    """Record, merge, pin twice: the choice logs are byte-identical."""
    from tuning.merge import merge

    stub = StubKernel()
    tuner = autotuner(configs(16, 32, 64), stub=stub, bench=Bench({16: 3.0, 32: 1.0, 64: 2.0}, stub))
    with tuning.install(AutotunePolicy(record_path=str(tmp_path / "run"), modules=SCOPE)) as installed:
        for n in (8, 9, 8):
            run(tuner, n)
        path = installed.journal_path
    assert path is not None
    journal = read_journal(path)
    assert [record.winner.kwargs for record in journal.records] == [(("BLOCK", "32"),)] * 2
    assert journal.environment.arch == "cpu"
    assert journal.environment.triton
    for table in merge([journal]).tables:
        write_table(tmp_path / "tables", table)
    logs = []
    for _ in range(2):
        with tuning.install(pinned(table_path=(str(tmp_path / "tables"),))):
            for n in (8, 9, 8):
                run(tuner, n)
            assert tuning.benchmarks_run() == 0
            logs.append(json.dumps([choice.to_json() for choice in tuning.choices()]).encode())
    assert logs[0] == logs[1]
    assert blocks(tuner)[-6:] == [32] * 6


def test_recording_from_many_threads_leaves_one_valid_journal(tmp_path):
    class Slow(Bench):
        """Lets other threads come in between, which a stopwatch that takes no time does not."""

        def __call__(self, call: Any, quantiles: Any) -> Any:
            time.sleep(0.001)
            return super().__call__(call, quantiles)

    tuners = [autotuner(configs(16, 32), bench=Slow()) for _ in range(3)]
    failures = []

    def work(offset):
        try:
            for step in range(60):
                run(tuners[(step + offset) % 3], (step + offset) % 20)
        except Exception as error:
            failures.append(error)

    with tuning.install(AutotunePolicy(record_path=str(tmp_path / "run"), modules=SCOPE)) as installed:
        threads = [threading.Thread(target=work, args=(offset,)) for offset in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        path = installed.journal_path
    assert failures == []
    assert path is not None
    journal = read_journal(path)
    assert journal.torn_bytes == 0
    # Of 3 autotuners and 20 keys each thread launches each pair, and each pair is timed and written once.
    assert [tuner.do_bench.calls for tuner in tuners] == [2 * 20] * 3
    assert sorted(Counter(record.key.text for record in journal.records).values()) == [3] * 20


def test_tables_do_not_depend_on_the_cache_folder_of_the_recording(tmp_path, monkeypatch):
    """TRITON_CACHE_DIR changes mid-run; the replay gets the same configs."""
    from tuning.merge import merge

    stub = StubKernel()
    tuner = autotuner(configs(16, 32), stub=stub, bench=Bench({16: 2.0, 32: 1.0}, stub))
    with tuning.install(AutotunePolicy(record_path=str(tmp_path / "run"), modules=SCOPE)) as installed:
        run(tuner, 8)
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "elsewhere"))
        run(tuner, 9)
        path = installed.journal_path
    assert path is not None
    monkeypatch.delenv("TRITON_CACHE_DIR")
    tables = merge([read_journal(path)]).tables
    for table in tables:
        write_table(tmp_path / "tables", table)
    with tuning.install(pinned(table_path=(str(tmp_path / "tables"),))):
        run(tuner, 8)
        run(tuner, 9)
        assert [choice.source for choice in tuning.choices()] == ["exact", "exact"]
    assert blocks(tuner)[-2:] == [32, 32]


def test_a_hundred_values_of_a_key_cost_no_benchmark():
    tuner = autotuner(configs(16, 32))
    with tuning.install(pinned()):
        for n in range(100):
            run(tuner, n)
        assert tuning.benchmarks_run() == 0
        assert len(tuning.choices()) == 100


def test_the_fallback_is_the_same_on_every_rank_and_stands_in_the_choices():
    tuner = autotuner(
        configs(16, 32, 64),
        stub=StubKernel(
            fails=lambda config, named: OutOfResources(9, 1, "smem") if dict(config.kwargs)["BLOCK"] == "16" else None
        ),
    )
    with tuning.install(pinned()):
        run(tuner)
        (choice,) = tuning.choices()
    assert choice.launch_config.kwargs == (("BLOCK", "32"),)
    assert "OutOfResources" in choice.detail


def test_chaos_makes_ranks_differ_on_purpose(monkeypatch):
    seen = set()
    for rank in range(3):
        monkeypatch.setenv("RANK", str(rank))
        tuner = autotuner(configs(16, 32, 64))
        with tuning.install(pinned(chaos=True)):
            run(tuner)
            (choice,) = tuning.choices()
        assert choice.source == "chaos"
        seen.update(blocks(tuner))
    assert seen == {16, 32, 64}


def test_enumerating_logs_each_autotuner_once(caplog):
    tuner = autotuner(configs(16, 32), reset_to_zero=["y"])
    with caplog.at_level(logging.INFO, "tuning"), tuning.install(pinned(enumerate_autotuners=True)):
        run(tuner)
        run(tuner)
    assert caplog.text.count("(2 candidates, key ['n']): pinned") == 1
    assert "resets y to zero" in caplog.text


def test_nothing_is_installed_outside():
    assert tuning.active_policy() is None
    assert tuning.choices() == ()
    assert tuning.benchmarks_run() == 0
    assert tuning.verify_choices() is True
    assert tuning.maybe_verify_choices(0) is None


def test_verification_outside_a_process_group_agrees():
    with tuning.install(pinned(verify_every=10)):
        assert tuning.maybe_verify_choices(5) is None
        assert tuning.maybe_verify_choices(20) is True


def test_install_touches_no_device(monkeypatch, tmp_path):
    from triton.runtime.driver import driver

    asked = []
    monkeypatch.setattr(type(driver), "active", property(lambda self: asked.append("driver")), raising=False)
    torch = sys.modules.get("torch")
    if torch is not None:
        for name in ("is_available", "current_device", "get_device_properties"):
            monkeypatch.setattr(torch.cuda, name, lambda *args, name=name: asked.append(name))
    write(tmp_path / "tables", entry(32))
    with tuning.install(pinned(table_path=(str(tmp_path / "tables"),))):
        pass
    with tuning.install(AutotunePolicy(record_path=str(tmp_path / "run"), modules=SCOPE)):
        pass
    assert asked == []
    tuner = autotuner(configs(16, 32))
    with tuning.install(pinned()):
        run(tuner)
    assert asked, "the first launch asks which arch it is on: the counters do count"


def _fails(patch: Any, owner: Any, name: str, *, after: bool) -> None:
    """Let a method raise once, before or after it has done its work."""
    original, left = getattr(owner, name), [1]

    def failing(*args: Any, **kwargs: Any) -> Any:
        if left and not after:
            left.pop()
            raise RuntimeError("no")
        result = original(*args, **kwargs)
        if left:
            left.pop()
            raise RuntimeError("no")
        return result

    patch.setattr(owner, name, failing)


STEPS = [
    (installation.Interception, "apply", False),
    *((interception, name, False) for name in ("closed_kinds", "_named_like", "Stopwatch")),
    (CompiledKernels, "apply", False),
    *((CompiledKernels, "_patch", after) for after in (False, True)),
    (inductor, "_forget_compiled_code", False),
    (installation, "_restore", False),
]


@pytest.mark.parametrize("deterministic", [(False, False), (False, True), (True, False), (True, True)])
@pytest.mark.parametrize(("owner", "name", "after"), STEPS)
def test_whichever_step_of_an_activation_fails_the_earlier_policy_is_in_charge(
    monkeypatch, owner, name, after, deterministic
):
    first, second = deterministic
    if owner is installation and (not first or second):
        pytest.skip("deterministic mode is left only where it was on and is no longer wanted")
    before = tuning.install(pinned(block_sizes={"BLOCK": 32}), deterministic=first)
    flag = torch.are_deterministic_algorithms_enabled()
    tuner = autotuner(configs(64, 16, 32))
    run(tuner)
    made = len(tuning.choices())
    with monkeypatch.context() as patch:
        _fails(patch, owner, name, after=after)
        with pytest.raises(RuntimeError, match="no"):
            tuning.install(pinned(), deterministic=second)
    assert tuning.active_policy() is before.policy
    assert torch.are_deterministic_algorithms_enabled() is flag is first
    run(tuner)
    run(tuner, 9)
    assert blocks(tuner) == [32, 32, 32]
    assert len(tuning.choices()) == made + 1
    assert tuner.do_bench.calls == 0
    with tuning.install(pinned()):
        run(tuner)
        assert blocks(tuner)[-1] == 16
    # The fixture sees that Triton is as it was.


@pytest.mark.parametrize(("owner", "name", "after"), STEPS[:-1])
def test_an_activation_that_fails_where_nothing_was_installed_leaves_nothing(monkeypatch, owner, name, after):
    seen = list(sys.meta_path)
    with monkeypatch.context() as patch:
        _fails(patch, owner, name, after=after)
        with pytest.raises(RuntimeError, match="no"):
            tuning.install(pinned())
    assert tuning.active_policy() is None
    assert sys.meta_path == seen
    tuner = autotuner(configs(64, 16))
    run(tuner)
    assert tuner.do_bench.calls == 2


def test_a_method_that_cannot_be_replaced_leaves_those_before_it_with_the_earlier_policy(monkeypatch):
    class Guarded(type):
        def __setattr__(cls, name: str, value: Any) -> None:
            if name == "run" and not allowed:
                raise AttributeError("read only")
            super().__setattr__(name, value)

    def own(self: Any, *args: Any, **kwargs: Any) -> Any:
        return self.fn.run(*args, **kwargs, **self.configs[0].all_kwargs())

    allowed = [1]
    before = tuning.install(pinned(block_sizes={"BLOCK": 32}))
    kind = Guarded("Kind", (Autotuner,), {"run": own})
    tuner = autotuner(configs(64, 16, 32))
    allowed.clear()
    with pytest.raises(AttributeError, match="read only"):
        tuning.install(pinned())
    allowed.append(1)
    assert tuning.active_policy() is before.policy
    run(tuner)
    run(autotuner(configs(64, 32), kind=kind), 9)
    assert blocks(tuner) == [32]
    assert len(tuning.choices()) == 2


@pytest.mark.parametrize("owner", [installation.Interception, CompiledKernels])
def test_a_step_of_uninstalling_that_fails_keeps_no_other_from_being_taken(monkeypatch, tmp_path, owner):
    tuning.install(pinned(manifest_path=str(tmp_path / "m.json")), deterministic=True)
    with monkeypatch.context() as patch:
        _fails(patch, owner, "undo", after=True)
        with pytest.raises(RuntimeError, match="no"):
            tuning.uninstall()
    assert tuning.active_policy() is None
    assert not torch.are_deterministic_algorithms_enabled()
    assert (tmp_path / "m.json").exists()


def test_a_journal_that_cannot_be_written_at_the_end_is_closed_and_the_manifest_is_there(tmp_path, monkeypatch):
    policy = AutotunePolicy(
        mode="record", modules=SCOPE, record_path=str(tmp_path / "r"), manifest_path=str(tmp_path / "m.json")
    )
    tuning.install(policy)
    with monkeypatch.context() as patch:
        patch.setattr(installation._Session, "flush", lambda self: (_ for _ in ()).throw(JournalError("disk full")))
        with pytest.raises(JournalError, match="disk full"):
            tuning.uninstall()
    assert (tmp_path / "m.json").exists()


def test_a_launch_in_flight_while_the_policy_is_replaced_is_not_timed():
    """A launch that is already inside the old policy's method goes on under the new one."""
    tuner = autotuner(configs(16, 32, 64))
    tuning.install(pinned())
    entered = Autotuner.run
    tuning.install(pinned(block_sizes={"BLOCK": 64}))
    entered(tuner, FakeTensor(), FakeTensor(), 8, flag=True, grid=(1,), warmup=False)
    assert blocks(tuner) == [64]
    assert tuner.do_bench.calls == 0


def test_replacing_beneath_somebody_elses_patch_keeps_the_new_policy_in_charge(monkeypatch):
    tuner = autotuner(configs(16, 32, 64))
    original = Autotuner.run
    tuning.install(pinned())
    ours = Autotuner.run

    def theirs(self, *args, **kwargs):
        return ours(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Autotuner, "run", theirs)
        tuning.install(pinned(block_sizes={"BLOCK": 64}))
        run(tuner)
        run(tuner)
        tuning.uninstall()
    Autotuner.run = original
    assert blocks(tuner) == [64, 64]
    assert tuner.do_bench.calls == 0


def test_importing_the_package_imports_neither_torch_nor_triton():
    code = (
        "import sys, tuning; "
        "assert not {'torch', 'triton', 'msgpack', 'numpy'} & set(sys.modules), sorted(sys.modules); "
        "tuning.AutotunePolicy(); assert not {'torch', 'triton'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_the_manifest_says_what_ran_and_is_written_when_uninstalled(tmp_path):
    from tuning.manifest import read_manifest

    table = write(tmp_path / "tables", entry(32, KEY))
    path = tmp_path / "manifest.json"
    tuner = autotuner(configs(16, 32, 64))
    timed = autotuner(configs(16, 32), stub=StubKernel(fn=other_kernel))
    policy = AutotunePolicy(
        mode="pinned",
        modules=("stub_kernels",),
        table_path=(str(tmp_path / "tables"),),
        manifest_path=str(path),
    )
    with tuning.install(policy):
        run(tuner)
        run(tuner, 9)
        run(timed)
        assert not path.exists()
    manifest = read_manifest(path)
    assert [(launch.source, dict(launch.config.kwargs)["BLOCK"]) for launch in manifest.choices] == [
        ("exact", "32"),
        ("cheapest", "16"),
    ]
    assert manifest.benchmarks == ()
    assert {use.kernel: (use.state, use.reason) for use in manifest.autotuners} == {
        KERNEL: ("pinned", ""),
        f"{__name__}.other_kernel": ("timed", "outside the policy's modules"),
    }
    assert [use.path for use in manifest.tables] == [os.fspath(table)]
    assert manifest.environment.triton == triton.__version__


def other_kernel(x, y, n, flag, BLOCK):
    """Outside the scope."""


def test_each_rank_writes_a_manifest_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "3")
    with tuning.install(pinned(manifest_path=str(tmp_path / "manifest.json"))):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["manifest.rank3.json"]


def test_a_process_that_ends_without_uninstalling_leaves_its_manifest(tmp_path):
    path = tmp_path / "manifest.json"
    code = f"import tuning; tuning.install(tuning.AutotunePolicy(mode='pinned', manifest_path={str(path)!r}))"
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, cwd=Path(__file__).parents[2])
    assert path.is_file()


def test_a_table_made_under_another_triton_is_used_and_warned_once(tmp_path, caplog):
    table = TableFile(
        arch="cpu",
        package="stub_kernels",
        package_version="1",
        triton="1.2.3",
        device="none",
        entries=(entry(32),),
        denied=(),
        path=None,
    )
    write_table(tmp_path, table)
    tuner = autotuner(configs(16, 32))
    with caplog.at_level(logging.WARNING, "tuning"), tuning.install(pinned(table_path=(str(tmp_path),))) as installed:
        for n in range(4):
            run(tuner, n)
        assert [kind for kind, _ in installed.manifest().notices] == ["other_triton"]
    assert blocks(tuner) == [32] * 4
    assert caplog.text.count("1.2.3") == 1


def test_what_the_earlier_policy_cannot_leave_behind_does_not_undo_the_new_one(tmp_path, caplog):
    folder = tmp_path / "gone"
    folder.mkdir()
    tuning.install(pinned(manifest_path=str(folder / "m.json")))
    folder.rmdir()
    second = tuning.install(pinned(on_miss="error"))
    assert tuning.active_policy() is second.policy
    assert "could not be written" in caplog.text


def test_paths_are_those_of_the_moment_of_install(tmp_path, monkeypatch):
    write(tmp_path / "tables", entry(32), arch="sm100")
    (tmp_path / "tables" / ".git").mkdir()
    (tmp_path / "tables" / "notes").mkdir()
    (tmp_path / "run").mkdir()
    monkeypatch.chdir(tmp_path)
    tuner = autotuner(configs(16, 32))
    with tuning.install(pinned(table_path=("tables",), manifest_path="m.json")):
        monkeypatch.chdir(tmp_path / "run")
        run(tuner)
    assert (tmp_path / "m.json").is_file()
    assert list((tmp_path / "run").iterdir()) == []


def test_the_rank_of_a_group_that_is_gone_still_names_the_manifest(tmp_path, monkeypatch):
    import types

    group = types.SimpleNamespace(get_rank=lambda: 2, get_world_size=lambda: 4)
    tuner = autotuner(configs(16, 32))
    with tuning.install(pinned(manifest_path=str(tmp_path / "m.json"))) as installed:
        monkeypatch.setattr(installation, "_group", lambda: group)
        run(tuner)
        monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["m.rank2.json"]
    assert (installed.manifest().environment.rank, installed.manifest().environment.world_size) == (2, 4)


def test_the_manifest_of_the_run_is_one_call_and_its_module_stays_a_module():
    from tuning.manifest import read_manifest

    with tuning.install(pinned()) as installed:
        run(autotuner(configs(16, 32)))
        assert tuning.manifest() == installed.manifest()
        assert len(tuning.manifest().choices) == 1
    assert tuning.manifest.read_manifest is read_manifest
    with pytest.raises(tuning.TuningError, match="no policy is installed"):
        tuning.manifest()


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), "5", True])
def test_a_timeout_is_a_positive_number_of_seconds(timeout):
    from tuning.verification import Verifier

    with pytest.raises(ValueError, match="positive number of seconds"):
        Verifier(timeout=timeout)


def test_recording_names_what_lies_outside_its_scope(tmp_path, caplog):
    tuner = autotuner(configs(16, 32))
    with tuning.install(AutotunePolicy(record_path=str(tmp_path / "run"), modules=("json",))):
        run(tuner)
    assert caplog.text.count("nothing is journaled. Add 'stub_kernels' to modules to record it") == 1


def test_a_miss_is_said_once_for_a_kernel_that_a_table_knows(tmp_path, caplog):
    write(tmp_path, entry(32, KEY))
    tuner = autotuner(configs(16, 32))
    other = autotuner(configs(16, 32), stub=StubKernel(fn=other_kernel))
    policy = AutotunePolicy(mode="pinned", modules=("stub_kernels", __name__), table_path=(str(tmp_path),))
    with caplog.at_level(logging.INFO, "tuning"), tuning.install(policy) as installed:
        for n in (8, 9, 10):
            run(tuner, n)
            run(other, n)
        assert [kind for kind, _ in installed.manifest().notices] == ["miss"]
    assert caplog.text.count("one entry in the tables and none for [n=9") == 1
    assert "mode pinned: choices: 5 cheapest, 1 exact; 0 candidates timed" in caplog.text


@pytest.mark.parametrize("kind", ["fifo", "folder"])
def test_a_manifest_path_that_is_no_regular_file_is_refused(tmp_path, kind):
    path = tmp_path / "m"
    os.mkfifo(path) if kind == "fifo" else path.mkdir()
    with pytest.raises(tuning.PolicyError, match="is no regular file"):
        tuning.install(pinned(manifest_path=str(path)))
    assert not path.is_file()


def test_a_manifest_is_written_through_a_link(tmp_path):
    (tmp_path / "real.json").write_text("")
    (tmp_path / "link.json").symlink_to("real.json")
    with tuning.install(pinned(manifest_path=str(tmp_path / "link.json"))):
        pass
    assert (tmp_path / "link.json").is_symlink()
    assert (tmp_path / "real.json").read_text()


def test_an_install_that_is_refused_late_leaves_no_journal(tmp_path, monkeypatch):
    def refuse(self, previous=None):
        raise RuntimeError("no")

    monkeypatch.setattr(installation.Interception, "apply", refuse)
    with pytest.raises(RuntimeError, match="no"):
        tuning.install(AutotunePolicy(record_path=str(tmp_path / "run"), modules=SCOPE))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("replace", [True, False])
def test_a_recording_policy_that_is_replaced_or_removed_while_a_launch_is_timed_costs_it_its_record_alone(
    tmp_path, caplog, replace
):
    class Switching(Bench):
        def __call__(self, call, quantiles):
            if not self.calls:
                switch = (lambda: tuning.install(pinned())) if replace else tuning.uninstall
                thread = threading.Thread(target=switch)
                thread.start()
                thread.join()
            return super().__call__(call, quantiles)

    tuner = autotuner(configs(16, 32), bench=Switching())
    first = tuning.install(AutotunePolicy(mode="record", modules=SCOPE, record_path=str(tmp_path / "r")))
    assert run(tuner).startswith("launched")
    said = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert said == [f"{KERNEL} [n=8 x:float32 y:float32]: timed while its policy was removed: it is not journaled"]
    assert read_journal(first.journal_path).records == ()


def test_a_record_that_could_not_be_written_is_written_with_the_next(tmp_path, monkeypatch):
    import errno

    tuner = autotuner(configs(16, 32))
    with tuning.install(AutotunePolicy(record_path=str(tmp_path / "run"), modules=SCOPE)) as installed:

        def full(fd, data):
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            with pytest.raises(tuning.JournalError, match="No space left"):
                run(tuner, 1)
        run(tuner, 1)
        run(tuner, 2)
        path = installed.journal_path
    journal = read_journal(path)
    assert [dict(record.key.values)["n"] for record in journal.records] == ["1", "2"]
    assert journal.environment.arch == "cpu"


def test_recording_without_anything_to_time_on_is_one_clear_error(tmp_path):
    class Deviceless(Autotuner):
        @property
        def do_bench(self):
            raise RuntimeError("0 active drivers ([]). There should only be one.")

        @do_bench.setter
        def do_bench(self, bench):
            pass

    tuner = autotuner(configs(16, 32), kind=Deviceless)
    with (
        tuning.install(AutotunePolicy(record_path=str(tmp_path / "run"), modules=SCOPE)),
        pytest.raises(tuning.TuningError, match=r"^stub_kernels\.kernel: recording times its .* 0 active drivers"),
    ):
        run(tuner, 1)


def test_a_record_that_no_journal_holds_is_dropped_and_holds_up_no_other(tmp_path, caplog):
    tuner = autotuner(configs(16, 32))
    with tuning.install(AutotunePolicy(record_path=str(tmp_path / "run"), modules=SCOPE)) as installed:
        for n in (1, "a" * (1 << 20), 3):
            run(tuner, n)
        run(autotuner(configs(*range(1, 4201))), 4)
        run(tuner, 5)
        path = installed.journal_path
    assert "more than the 1048576 of a frame; it is left out" in caplog.text
    records = read_journal(path).records
    assert [dict(record.key.values)["n"] for record in records] == ["1", "3", "4", "5"]
    assert "of its 4200 candidates the 4095 fastest are kept" in records[2].note


def test_a_choice_is_kept_once_and_as_it_was_launched():
    candidates = configs(16, 32)
    with tuning.install(pinned()) as installed:
        for _ in range(5):
            run(autotuner(configs(16, 32)))
        tuner = autotuner(candidates)
        run(tuner, 9)
        candidates[0].kwargs["BLOCK"] = 128
        assert [dict(choice.launch_config.kwargs)["BLOCK"] for choice in installed.choices] == ["16", "16"]


def test_tables_that_go_away_after_install_are_not_missed(tmp_path):
    import shutil

    write(tmp_path / "tables", entry(32), arch="sm90")
    with tuning.install(pinned(table_path=(str(tmp_path / "tables"),))):
        shutil.rmtree(tmp_path / "tables")
        run(autotuner(configs(16, 32)))
        assert tuning.choices()[0].source == "cheapest"


def test_a_forked_child_leaves_the_manifest_to_its_parent_and_gets_locks_of_its_own(tmp_path):
    path = tmp_path / "m.json"
    tuner = autotuner(configs(16, 32))
    with tuning.install(pinned(manifest_path=str(path))) as installed:
        run(tuner, 1)
        with installed._session.lock:
            pid = os.fork()
            if pid == 0:
                worker = threading.Thread(target=run, args=(tuner, 2), daemon=True)
                worker.start()
                worker.join(20)
                installed._close()
                os._exit(0 if not worker.is_alive() and not path.exists() else 1)
            _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
    assert path.is_file()


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_children_forked_while_threads_meet_new_keys_meet_new_keys_too():
    tuners = [autotuner(configs(16, 32)) for _ in range(2)]
    stop = threading.Event()

    def work(seed: int) -> None:
        n = seed
        while not stop.is_set():
            run(tuners[n % 2], n)
            n += 3

    hung = 0
    with tuning.install(pinned()):
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
        for thread in threads:
            thread.start()
        for _ in range(20):
            child = os.fork()
            if child == 0:
                signal.alarm(10)  # ends it where it hangs
                for n in range(5):
                    run(tuners[n % 2], -1 - n)
                os._exit(0)
            hung += os.waitpid(child, 0)[1] != 0
        stop.set()
        for thread in threads:
            thread.join()
    assert hung == 0


def test_nearest_looks_at_other_keys_then_at_other_archs_and_keeps_their_files(tmp_path, caplog):
    abroad = write(tmp_path, entry(64, KEY), arch="sm103")
    tuner = autotuner(configs(16, 32, 64))
    policy = pinned(table_path=(str(tmp_path),), on_miss="nearest")
    with caplog.at_level(logging.WARNING, "tuning"), tuning.install(policy) as installed:
        run(tuner)
        run(tuner, 4096)
        assert tuning.benchmarks_run() == 0
        first, second = tuning.choices()
        tables = [table.arch for table in installed.manifest().tables]
    assert blocks(tuner) == [64, 64]
    assert (first.source, first.origin) == ("nearest", str(abroad))
    assert first.detail == "nearest of 1 usable entry: sm103, distance 1"
    assert "distance 512 (n=8 (not 4096))" in second.detail
    assert "sm103" in tables  # the choice hangs on it, so the manifest names it
    assert caplog.text.count("which is for sm103, is used") == 1
    write(tmp_path, entry(32, KEY))
    with tuning.install(pinned(table_path=(str(tmp_path),), on_miss="nearest")):
        run(tuner, 4096)
        (choice,) = tuning.choices()
    assert (blocks(tuner)[-1], choice.detail) == (32, "nearest of 2 usable entries: cpu, distance 512 (n=8 (not 4096))")


def test_tables_of_other_archs_are_read_at_install_and_not_at_a_launch(tmp_path):
    write(tmp_path, entry(64, KEY), arch="sm103")
    tuner = autotuner(configs(16, 32, 64))
    with tuning.install(pinned(table_path=(str(tmp_path),), on_miss="nearest")):
        write(tmp_path, entry(32, KEY), arch="sm103")
        write(tmp_path, entry(16, KEY))
        run(tuner)
    assert blocks(tuner) == [64]


def test_model_pins_without_a_benchmark_and_says_a_miss(tmp_path, caplog):
    write(tmp_path, entry(64, Key.of({"n": 5}, {"x": "float32", "y": "float32"})))
    tuner = autotuner(configs(16, 64, 512, 4096, 65536))
    policy = pinned(table_path=(str(tmp_path),), on_miss="model")
    with caplog.at_level(logging.WARNING, "tuning"), tuning.install(policy):
        run(tuner)
        assert tuning.benchmarks_run() == 0
        (choice,) = tuning.choices()
    assert (blocks(tuner), choice.source) == ([512], "model")
    assert "the static model's candidate is taken" in caplog.text


def test_an_installation_is_told_what_is_in_charge_instead():
    told: list[Any] = []
    first = tuning.install(pinned())
    first.when_taken_out = told.append
    second = tuning.install(pinned(block_sizes={"BLOCK": 16}))
    assert told == [second]
    second.when_taken_out = told.append
    tuning.uninstall()
    assert told == [second, None]
