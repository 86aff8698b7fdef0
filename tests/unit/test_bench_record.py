"""``python -m bench record`` without a GPU: all passes, resumed; what goes wrong is reported and the rest goes on."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path

import pytest
import triton

from bench import record as bench_record
from bench import record_pack
from bench.record_compile import BATCH, Compiling, Work, works
from bench.record_worker import NOT_TIMED, _FirstThatLaunches, _Journaled, _Short, known_winners
from bench.workloads import Tensor, find, workloads
from tests.recordings import environment, record
from tuning.journal import JournalWriter, find_journals, read_journal
from tuning.spec import CandidateTiming, Key

ROOT = Path(__file__).parents[2]

OWN = """
import torch
import triton
import triton.language as tl

from bench.workloads import Tensor, Workload


def prune(configs, named, **kwargs):
    return [config for config in configs if config.kwargs["BLOCK"] <= named["n"]]


@triton.autotune(
    configs=[triton.Config({"BLOCK": block}, num_warps=1) for block in (64, 128, 4096)],
    key=["n"],
    prune_configs_by={"early_config_prune": prune},
)
@triton.jit
def double(x, y, n, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + offsets, tl.load(x + offsets, mask=offsets < n) * 2, mask=offsets < n)


@triton.autotune(configs=[triton.Config({"BLOCK": block}, num_warps=1) for block in (32, 64)], key=["n"])
@triton.jit
def halve(x, y, n, BLOCK: tl.constexpr):
    tl.static_assert(BLOCK < 64)
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + offsets, tl.load(x + offsets, mask=offsets < n) / 2, mask=offsets < n)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        y = torch.empty_like(x)
        double[(1,)](x, y, x.numel())
        return y

    @staticmethod
    def backward(ctx, grad):
        y = torch.empty_like(grad)
        halve[(1,)](grad, y, grad.numel())
        return y


def broken(x):
    Doubled.apply(x)
    raise RuntimeError("no such thing")


def workload(name, call, size, backward=True):
    return Workload(f"own.{name}", f"own_workloads:{call}", {"*x": Tensor((size,), "float32")}, None, backward,
                    ("own_workloads",))


WORKLOADS = (
    workload("first", "Doubled.apply", 256),
    workload("again", "Doubled.apply", 256),
    workload("broken", "broken", 512, False),
)
"""


def run(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    (folder / "own_workloads.py").write_text(OWN)
    command = [sys.executable, "-m", "bench", "record", "--stand-in", "--workloads", "own_workloads"]
    command += ["--jobs", "1", "--collectors", "2", "--out", str(folder / "rec"), *options]
    search = os.pathsep.join([str(folder), str(ROOT)])
    environ = {**os.environ, "PYTHONPATH": search}
    return subprocess.run(command, env=environ, cwd=folder, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, subprocess.CompletedProcess[str]]:
    folder = tmp_path_factory.mktemp("recorded")
    return folder, run(folder, "--waiting", "0", "--pack", str(folder / "packed.tar.xz"))


class TestWithoutGpu:
    def test_every_pass_is_done_and_the_table_at_the_end_says_so(self, recorded):
        _, done = recorded
        assert done.returncode == 0, done.stdout + done.stderr
        rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line.strip()}
        assert rows["collect"][:3] == ["2", "2", "3"]  # workloads without an error, kernels, keys
        assert rows["time1"][:4] == rows["time2"][:4] == ["2", "2", "3", "6"]

    def test_a_workload_that_fails_is_reported_and_the_others_go_on(self, recorded):
        folder, done = recorded
        rows = {row["name"]: row for row in json.loads((folder / "rec" / "summary.json").read_text())["workloads"]}
        assert {rows["own.first"][step] for step in ("collect", "time1", "time2")} == {"ok"}
        assert rows["own.broken"]["time2"].startswith("RuntimeError: no such thing (own_workloads.py:")
        assert "own.broken collect: RuntimeError: no such thing" in done.stdout

    def test_forward_and_backward_are_collected_with_the_candidates_that_pruning_leaves(self, recorded):
        folder, _ = recorded
        journal = read_journal(find_journals([folder / "rec" / "collect" / "own.first"])[0])
        blocks = {
            item.kernel.qualified_name: sorted(dict(each.config.kwargs)["BLOCK"] for each in item.timings)
            for item in journal.records
        }
        assert blocks == {"own_workloads.double": ["128", "64"], "own_workloads.halve": ["32", "64"]}
        assert all(item.specialization is not None for item in journal.records)

    def test_all_candidates_are_compiled_once_and_what_cannot_be_is_named(self, recorded):
        folder, _ = recorded
        summary = json.loads((folder / "rec" / "summary.json").read_text())
        # To the compiler both sizes of `double` are one launch.
        assert summary["compiled"] == 3
        (failed,) = summary["cannot_be_compiled"]
        assert failed.startswith("own_workloads.halve BLOCK=64") or '"BLOCK"' in failed
        assert "CompileTimeAssertionFailure" in failed
        kernels = {path.name for path in (folder / "rec" / "cache").glob("*/*.cubin")}
        assert kernels == {"double.cubin", "halve.cubin"}
        if triton.__version__ < "3.7":  # from then on one launcher serves all
            # Both kernels have one signature: one launcher, so that no launch builds it while the GPU is waited for.
            assert len(list((folder / "rec" / "cache").glob("*/__triton_launcher*.so"))) == 1

    def test_each_round_times_a_key_once(self, recorded):
        folder, _ = recorded
        for step in ("time1", "time2"):
            first, again = (
                json.loads((folder / "rec" / step / name / "result.json").read_text())
                for name in ("own.first", "own.again")
            )
            assert (len(first["new_keys"]), first["candidates_timed"], first["reused"]) == (2, 4, [])
            assert (again["new_keys"], again["candidates_timed"]) == ([], 0)
            assert again["reused"] == first["new_keys"]
            (path,) = find_journals([folder / "rec" / step / "own.again"])
            assert [(item.timings, item.note[:9]) for item in read_journal(path).records] == [((), "not timed")] * 2

    def test_started_again_it_does_nothing_over(self, recorded):
        folder, first = recorded
        before = {path: path.stat().st_mtime_ns for path in (folder / "rec").rglob("*.journal")}
        done = run(folder)
        assert done.returncode == 0, done.stderr
        of_a_workload = re.compile(r"^(collect|time1|time2): \d+/\d+ own\.", re.MULTILINE)
        assert len(of_a_workload.findall(first.stdout)) >= 6
        assert not of_a_workload.findall(done.stdout)
        assert before == {path: path.stat().st_mtime_ns for path in (folder / "rec").rglob("*.journal")}

    def test_what_a_kill_left_without_a_result_is_done_again(self, recorded, tmp_path):
        folder, _ = recorded
        shutil.copytree(folder / "rec", tmp_path / "rec")
        for step in ("collect", "time1"):
            (tmp_path / "rec" / step / "own.first" / "result.json").unlink()
        done = run(tmp_path, "--waiting", "0")
        assert done.returncode == 0, done.stderr
        assert "collect: 1/1 own.first: 2 kernels, 2 keys" in done.stdout
        assert "time1: 1/1 own.first: 2 kernels, 2 keys" in done.stdout
        result = json.loads((tmp_path / "rec" / "time1" / "own.first" / "result.json").read_text())
        # No result said that its keys were timed, whatever the journals held.
        assert (result["reused"], len(result["new_keys"])) == ([], 2)

    def test_what_failed_is_tried_again_when_asked_and_goes_on_from_what_it_timed(self, recorded, tmp_path):
        folder, _ = recorded
        shutil.copytree(folder / "rec", tmp_path / "rec")
        done = run(tmp_path, "--waiting", "0", "--retry-failed", "--passes", "time", "--rounds", "1")
        assert done.returncode == 0, done.stderr
        assert "time1: 1/1 own.broken: 1 kernels, 1 keys" in done.stdout
        tried = sorted((tmp_path / "rec" / "time1").glob("own.broken*"))
        assert [path.name for path in tried] == ["own.broken", "own.broken.try1"]
        first, second = (json.loads((path / "result.json").read_text()) for path in tried[::-1])
        assert (len(first["new_keys"]), second["new_keys"], second["reused"]) == (1, [], first["new_keys"])
        summary = json.loads((tmp_path / "rec" / "summary.json").read_text())
        assert summary["counts"]["time1 keys"] == 3

    def test_a_packed_recording_is_gone_on_from_elsewhere(self, recorded, tmp_path):
        folder, _ = recorded
        done = run(tmp_path, "--unpack", str(folder / "packed.tar.xz"), "--passes", "time", "--only", "own.broken")
        assert done.returncode == 0, done.stderr
        summary = json.loads((tmp_path / "rec" / "summary.json").read_text())
        assert summary["counts"]["time2 keys"] == 1
        assert summary["problems"] == []
        # What cannot be compiled is known; what was compiled is in no cache here.
        assert (summary["compiled"], len(summary["cannot_be_compiled"])) == (0, 1)

    def test_made_up_times_are_never_compacted(self, recorded, tmp_path):
        folder, _ = recorded
        with pytest.raises(ValueError, match="recorded without a GPU"):
            record_pack.compact(folder / "packed.tar.xz", tmp_path / "out")

    def test_a_compile_cache_is_carried_without_sources(self, recorded, tmp_path):
        folder, _ = recorded
        said = record_pack.pack_cache(folder / "rec" / "cache", "double", str(tmp_path / "cache.tar.xz"))
        assert said.startswith("2 compiled kernels")
        record_pack.unpack_cache(tmp_path / "cache.tar.xz", tmp_path / "cache")
        assert {path.suffix for path in (tmp_path / "cache").glob("*/*")} == {".json", ".cubin"}
        for group in (tmp_path / "cache").glob("*/__grp__*"):
            children = json.loads(group.read_text())["child_paths"]
            assert Path(children["double.cubin"]).read_bytes()[:4] == b"\x7fELF"

    def test_a_budget_that_is_over_ends_the_run_in_order(self, tmp_path):
        done = run(tmp_path, "--budget", "10")
        assert done.returncode == 0, done.stderr
        states = [row["time1"] for row in json.loads((tmp_path / "rec" / "summary.json").read_text())["workloads"]]
        assert states == ["not run"] * 3


class TestCatalog:
    def test_names_are_unique_and_every_package_is_there(self):
        names = [item.name for item in workloads()]
        assert len(names) == len(set(names))
        assert {item.package for item in workloads()} == {"mamba", "fla", "megatron", "transformer_engine"}

    def test_a_workload_is_data(self):
        def plain(value):
            if isinstance(value, (tuple, list)):
                return all(map(plain, value))
            return value is None or isinstance(value, (int, float, str, Tensor))

        for item in workloads():
            assert item.scope, item.name
            for value in (*item.arguments.values(), *(item.construct or {}).values()):
                assert plain(value), item.name
        assert [field.name for field in fields(Tensor)] == ["sizes", "dtype", "fill", "scale", "grad"]

    def test_found_by_name_by_start_and_by_glob(self):
        every = find(["mamba.ssd"])
        assert {item.name.partition("/")[0] for item in every} == {"mamba.ssd"}
        assert find([every[0].name]) == every[:1]
        assert {item.package for item in find(["*norm*"])} >= {"mamba", "fla"}
        with pytest.raises(ValueError, match="nothing_like_it: no workload has this name"):
            find(["nothing_like_it"])


class TestStopwatches:
    def test_one_candidate_is_launched_and_wins(self):
        stopwatch, launched = _FirstThatLaunches(), []

        def fails():
            raise RuntimeError("out of resources")

        with pytest.raises(RuntimeError):
            stopwatch(fails)
        assert stopwatch(lambda: launched.append(1)) == [1.0, 1.0, 1.0]
        assert stopwatch(lambda: launched.append(2)) == [2.0, 2.0, 2.0]
        assert launched == [1]

    def test_a_key_that_is_known_is_not_timed(self, monkeypatch):
        import triton.testing

        monkeypatch.setattr(triton.testing, "do_bench", lambda call, **options: options)
        stopwatch = _Short(5, 25)
        assert stopwatch(None, quantiles=(0.5,), warmup=100) == {"quantiles": (0.5,), "warmup": 5, "rep": 25}
        stopwatch.known = True
        assert stopwatch(None) == [NOT_TIMED] * 3
        assert stopwatch.candidates == 1


class TestJournaled:
    """What is journaled of a key is what was measured of it."""

    def test_a_key_that_was_not_timed_has_no_timings_and_a_note(self):
        journaled = _Journaled(launched_once=False)
        for item in (record({16: NOT_TIMED}), record({16: NOT_TIMED}, shared=True)):
            found = journaled(item)
            assert found.timings == ()
            assert found.note.startswith("not timed")
            assert found.winner == item.winner
        assert journaled.winners == {}

    def test_a_winner_is_known_to_others_unless_the_context_broke_before(self):
        journaled = _Journaled(launched_once=False)
        good, late = record({16: 1.0, 32: 2.0}), record({16: 1.0}, kernel="pkg.module.late")
        broken = record({16: 1.0, 32: None}, kernel="pkg.module.broken")
        error = replace(broken.timings[1], error="RuntimeError: CUDA error: an illegal memory access was encountered")
        broken = replace(broken, timings=(broken.timings[0], error))
        assert [journaled(item) for item in (good, broken, late)] == [good, broken, late]
        assert journaled.winners == {f"{good.kernel.qualified_name} {good.key.text}": good.winner.text}
        assert "illegal memory access" in journaled.broken

    def test_what_is_launched_once_says_so(self):
        assert "made up" in _Journaled(launched_once=True)(record({16: 1.0, 32: 2.0})).note

    def test_what_is_timed_is_known_from_finished_workloads_alone(self, tmp_path):
        for name, result in (
            ("a", {"winners": {"k 1": "c"}}),
            ("b", {"error": "no end after 9 s"}),
            ("c", None),
            ("d", {"winners": {"k 2": "d"}}),
        ):
            (tmp_path / name).mkdir()
            if result is not None:
                (tmp_path / name / "result.json").write_text(json.dumps(result))
        (tmp_path / "c" / "result.json.part").write_text('{"winn')
        assert known_winners(tmp_path) == {"k 1": "c", "k 2": "d"}


COMPILER = """
import json, sys, time
time.sleep(json.loads(sys.stdin.readline()).get("starts", 0))
print('{"ready": true}', flush=True)
for line in sys.stdin:
    print('{"loaded": true}', flush=True)
    for config in json.loads(line)["configs"]:
        if config == "hangs":
            time.sleep(60)
        if config == "dies":
            sys.exit(3)
        print(json.dumps({"config": config, "seconds": 0.1, "hash": "h"}), flush=True)
"""


class TestCompiling:
    @pytest.fixture
    def task(self, tmp_path):
        specialization = {"version": 1, "triton": "3.6.0", "parameters": [], "arguments": [], "positional": 0}
        item = record({16: 1.0, 32: 2.0}, specialization={**specialization, "options": []})
        with JournalWriter(f"{tmp_path}/j/", environment()) as writer:
            writer.write(item)
        (found,), refused = works(find_journals([tmp_path / "j"]))
        assert refused == []
        return found[1]

    def compiling(self, tmp_path, timeout=2.0, **settings):
        return Compiling(tmp_path, dict(os.environ), 1, timeout, settings, command=(sys.executable, "-c", COMPILER))

    def test_a_candidate_that_hangs_or_kills_its_process_is_given_up_and_the_others_go_on(self, tmp_path, task):
        work = Work(task.task, ("a", "hangs", "b", "dies", "c"), "launch")
        compiling = self.compiling(tmp_path)
        compiling.run([work], time.monotonic() + 60, lambda count, of: None)
        assert compiling.done == {f"launch {name}" for name in work.configs}
        assert {at: error.rpartition(": ")[2] for at, error in compiling.failed.items()} == {
            "launch hangs": "no answer in 2 s",
            "launch dies": "its process died",
        }
        # Both may pass: the next run tries them again.
        again = self.compiling(tmp_path)
        assert again.done == {"launch a", "launch b", "launch c"}
        assert again.failed == {}

    def test_no_clock_runs_while_a_process_starts_up(self, tmp_path, task):
        compiling = self.compiling(tmp_path, timeout=0.5, starts=1.5)
        compiling.run([Work(task.task, ("a",), "launch")], time.monotonic() + 60, lambda count, of: None)
        assert (compiling.done, compiling.failed) == ({"launch a"}, {})

    def test_processes_that_never_get_ready_end_the_pass(self, tmp_path, task):
        compiling = self.compiling(tmp_path)
        compiling.command = (sys.executable, "-c", "raise SystemExit(1)")
        compiling.run([Work(task.task, ("a",), "launch")], time.monotonic() + 60, lambda count, of: None)
        assert (compiling.done, compiling.failed) == (set(), {})

    def test_what_is_done_is_remembered(self, tmp_path, task):
        work = Work(task.task, ("a", "b"), "launch")
        self.compiling(tmp_path).run([work], time.monotonic() + 60, lambda count, of: None)
        again = self.compiling(tmp_path)
        assert again.done == {"launch a", "launch b"}
        assert work.without(again.done) is None
        told = []
        again.run([work], time.monotonic() + 60, lambda count, of: told.append((count, of)))
        assert told == [(0, 0)]

    def test_candidates_are_handed_out_a_few_at_a_time_and_once(self, tmp_path):
        specialization = {"version": 1, "triton": "3.6.0", "parameters": [], "arguments": [], "positional": 0}
        times = {16 * (1 + number): 1.0 for number in range(2 * BATCH + 1)}
        for name in ("1", "2"):
            key = Key.of({"n": int(name)}, {"x_ptr": "bfloat16"})
            with JournalWriter(f"{tmp_path}/{name}/", environment()) as writer:
                writer.write(record(times, key=key, specialization={**specialization, "options": []}))
        found, _ = works([path for name in ("1", "2") for path in find_journals([tmp_path / name])])
        assert [len(work.configs) for _, work in found] == [BATCH, BATCH, 1]  # the compiler sees both keys alike
        assert {path for path, _ in found} == set(find_journals([tmp_path / "1"]))


class TestCompact:
    def write(self, folder: Path, step: str, name: str, *records, reused=(), finished=True) -> None:
        place = folder / step / name
        place.mkdir(parents=True)
        with JournalWriter(f"{place}/", environment()) as writer:
            for item in records:
                writer.write(item)
        if finished is not None:
            (place / "result.json").write_text(json.dumps({"reused": list(reused), "finished": finished}))

    def test_one_journal_for_each_package_and_round(self, tmp_path):
        for step in ("time1", "time2"):
            self.write(tmp_path / "rec", step, "a", record({16: 1.0, 32: 2.0}), record({16: 1.0}, kernel="other.k"))
        done = record_pack.compact(tmp_path / "rec", tmp_path / "out")
        names = ["other.1.journal", "other.2.journal", "pkg.1.journal", "pkg.2.journal"]
        assert sorted(path.name for path in done.files) == names
        assert [path.rpartition("/")[2] for path in find_journals([tmp_path / "out"])] == names
        assert (done.records, done.left_out) == (4, [])
        with pytest.raises(ValueError, match="holds journals already"):
            record_pack.compact(tmp_path / "rec", tmp_path / "out")

    def test_a_key_that_was_not_timed_again_is_left_out(self, tmp_path):
        item = record({16: 1.0, 32: 2.0})
        identity = f"{item.kernel.qualified_name} {item.key.text}"
        self.write(tmp_path / "rec", "time1", "a", item)
        self.write(tmp_path / "rec", "time1", "b", record({16: 1.0}), reused=[identity])
        (file,) = record_pack.compact(tmp_path / "rec", tmp_path / "out").files
        (kept,) = read_journal(file).records
        assert len(kept.timings) == 2

    def test_a_record_in_which_a_candidate_broke_the_context_is_left_out_and_named(self, tmp_path):
        good = record({16: 1.0, 32: None})
        timings = (
            good.timings[0],
            CandidateTiming(good.timings[1].config, None, "RuntimeError: CUDA error: misaligned"),
        )
        bad = record({16: 1.0}, kernel="pkg.module.bad")
        bad = type(bad)(bad.kernel, bad.key, bad.arch, timings, bad.winner)
        self.write(tmp_path / "rec", "time1", "a", good, bad)
        done = record_pack.compact(tmp_path / "rec", tmp_path / "out")
        (kept,) = read_journal(done.files[0]).records
        assert kept.kernel.qualified_name == "pkg.module.kernel"
        (line,) = done.left_out
        assert "pkg.module.bad" in line
        assert "misaligned" in line

    @pytest.mark.parametrize("finished", [None, False])
    def test_of_a_workload_that_did_not_end_only_times_that_differ_are_taken(self, tmp_path, finished):
        real, made_up = record({16: 5.0, 32: 6.0}, kernel="pkg.module.real"), record({16: 1.0})
        self.write(tmp_path / "rec", "time1", "a", real, made_up, finished=finished)
        self.write(tmp_path / "rec", "time1", "b", record({16: 3.0, 32: 4.0}))
        done = record_pack.compact(tmp_path / "rec", tmp_path / "out")
        kept = {item.kernel.qualified_name: item for item in read_journal(done.files[0]).records}
        assert [item.times_ms[0] for item in kept["pkg.module.kernel"].timings] == [3.0, 4.0]
        assert [item.times_ms[0] for item in kept["pkg.module.real"].timings] == [5.0, 6.0]
        (line,) = done.left_out
        assert "a did not end" in line

    def test_a_workload_that_ended_goes_before_one_that_did_not(self, tmp_path):
        self.write(tmp_path / "rec", "time1", "a", record({16: 9.0, 32: 8.0}), finished=None)
        self.write(tmp_path / "rec", "time1", "b", record({16: 3.0, 32: 4.0}))
        (kept,) = read_journal(record_pack.compact(tmp_path / "rec", tmp_path / "out").files[0]).records
        assert [item.times_ms[0] for item in kept.timings] == [3.0, 4.0]

    def test_a_compaction_that_fails_leaves_nothing_behind(self, tmp_path, monkeypatch):
        self.write(tmp_path / "rec", "time1", "a", record({16: 1.0, 32: 2.0}), record({16: 1.0}, kernel="other.k"))
        write, calls = record_pack._write, []

        def full(*arguments):
            calls.append(arguments)
            if len(calls) == 2:
                raise OSError("no space left on device")
            return write(*arguments)

        monkeypatch.setattr(record_pack, "_write", full)
        with pytest.raises(OSError, match="no space"):
            record_pack.compact(tmp_path / "rec", tmp_path / "out")
        assert [path.name for path in tmp_path.iterdir()] == ["rec"]
        monkeypatch.undo()
        assert record_pack.compact(tmp_path / "rec", tmp_path / "out").records == 2


class TestPack:
    def test_every_round_is_packed(self, tmp_path):
        for number in range(1, 12):
            place = tmp_path / "rec" / f"time{number}" / "a"
            place.mkdir(parents=True)
            (place / "result.json").write_text("{}")
        record_pack.pack(tmp_path / "rec", {}, tmp_path / "packed.tar.xz")
        record_pack.unpack(tmp_path / "packed.tar.xz", tmp_path / "again")
        assert len(list((tmp_path / "again").glob("time*/a/result.json"))) == 11

    def test_what_is_too_large_is_not_written_and_what_was_there_stays(self, tmp_path, monkeypatch):
        (tmp_path / "packed.tar.xz").write_bytes(b"before")
        (tmp_path / "rec").mkdir()
        monkeypatch.setattr(record_pack, "LIMIT", 10)
        with pytest.raises(ValueError, match="over 10: pack fewer workloads"):
            record_pack.pack(tmp_path / "rec", {}, tmp_path / "packed.tar.xz")
        assert (tmp_path / "packed.tar.xz").read_bytes() == b"before"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["packed.tar.xz", "rec"]

    def test_a_recording_that_is_too_large_to_pack_still_has_its_summary(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(record_pack, "LIMIT", 10)
        parser = argparse.ArgumentParser()
        bench_record.add_arguments(parser)
        options = parser.parse_args(["--stand-in", "--passes", "compile", "--pack", str(tmp_path / "packed.tar.xz")])
        options.out = tmp_path / "rec"
        (problem,) = bench_record.Recording(options, []).run()["problems"]
        assert "over 10" in problem
        assert problem in capsys.readouterr().out

    def test_remeasure_is_the_policys(self, tmp_path, monkeypatch):
        parser = argparse.ArgumentParser()
        bench_record.add_arguments(parser)
        given = []
        monkeypatch.setattr(bench_record.Recording, "_processes", lambda self, *arguments: given.append(arguments))
        for extra in ([], ["--remeasure"]):
            options = parser.parse_args(["--passes", "time", "--rounds", "1", *extra])
            options.out = tmp_path / "rec"
            summary = bench_record.Recording(options, []).run()
            assert summary["remeasure"] == bool(extra)
        assert ["--remeasure" in extra for *_, extra in given] == [False, True]
