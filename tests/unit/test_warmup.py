"""What a warmup leaves in Triton's cache is what a pinned run looks up, for a GPU that is not there."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import fake_gpu
import pytest
from triton.runtime.errors import OutOfResources

from tuning import _warmup_worker, cli
from tuning._launch_target import Compiled
from tuning._warmup_tasks import Task, read_recorded
from tuning.errors import JournalError, TuningError
from tuning.journal import JournalWriter, find_journals, read_journal
from tuning.policy import AutotunePolicy
from tuning.selection import Decision
from tuning.spec import Choice, Environment, Kernel, Key, LaunchConfig, TuningRecord
from tuning.tables import Entry, TableFile, write_table
from tuning.warmup import warm_up

pytest.importorskip("torch", reason="torch is not installed")

KERNELS = """
import torch
import triton
import triton.language as tl

SCOPE = "warmed"

def configs():
    return [triton.Config({"BLOCK": block}, num_warps=warps) for block, warps in ((256, 8), (64, 2), (128, 4))]

@triton.autotune(configs=configs(), key=["n"])
@triton.jit
def scale_kernel(x, y, n, factor, offset, flag: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n) * factor + offset
    if flag:
        value = value + 1
    tl.store(y + at, value, mask=at < n)

@triton.autotune(configs=[triton.Config({"BLOCK": b}) for b in (64, 128)], key=["kind"])
@triton.heuristics({"EVEN": lambda args: args["n"] % args["BLOCK"] == 0})
@triton.jit
def copy_kernel(x, y, n, kind: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    if EVEN:
        tl.store(y + at, tl.load(x + at))
    else:
        tl.store(y + at, tl.load(x + at, mask=at < n), mask=at < n)

def launch_all():
    x, y = torch.empty(4096), torch.empty(4097)
    scale_kernel[(1,)](x, y, 1024, 2.0, 3, flag=True)
    scale_kernel[(1,)](x, y, 1024, 2.0, 3, flag=True)
    scale_kernel[(1,)](x, y[1:], 1024, 2.0, 3, flag=True)  # not aligned
    scale_kernel[(1,)](x, y, 1024, 2.0, 1, flag=True)      # a value of 1
    scale_kernel[(1,)](x, y, 2048, 4.0, 5, flag=True)      # another key, the same to the compiler
    scale_kernel[(1,)](x.half(), y, n=1000, factor=2.0, offset=3, flag=False)
    copy_kernel[(1,)](x, y, 1024, "a")
    copy_kernel[(1,)](x, y, 1040, "a")                     # the same to the compiler, but for a heuristic
    copy_kernel[(1,)](x, y, 1024, kind=tl.float16)
"""
LAUNCHES = 8  # that differ in key or to the compiler
ENTRIES = 7  # of the cache


def in_process(site: Path, cache: Path, module: str, **fields: Any) -> Any:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), *sys.path]), "TRITON_CACHE_DIR": str(cache)}
    command = [sys.executable, fake_gpu.__file__, module, json.dumps(fields)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def has_libcuda() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


def kernels(cache: Path) -> set[str]:
    """Names of the entries that hold a kernel, rather than a C module."""
    return {path.parent.name for path in cache.glob("*/*.cubin")}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    (folder / "warmed.py").write_text(KERNELS)
    return folder


@pytest.fixture(scope="module")
def recorded(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recorded")
    in_process(site, folder / "cache", "warmed", mode="record", record_path=str(folder / "journals" / "run"))
    return folder / "journals"


@pytest.fixture(scope="module")
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache for tests which are not about what is in it."""
    return tmp_path_factory.mktemp("known")


@pytest.fixture
def shared_cache(site: Path, known: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(known))


@pytest.fixture
def cache(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def records(folder: Path) -> list[TuningRecord]:
    return [record for path in find_journals([folder]) for record in read_journal(path).records]


def table_for(folder: Path, kernel: str, config: LaunchConfig, source: list[TuningRecord]) -> Path:
    keys = {record.key.text: record.key for record in source if record.kernel.qualified_name == kernel}
    entries = [Entry(kernel, key.values, key.dtypes, None, config, {"source": "a test"}) for key in keys.values()]
    write_table(folder, TableFile("sm90", "warmed", "1", "3.6.0", "a device", tuple(entries), ()))
    return folder


def test_a_pinned_run_after_a_warmup_compiles_nothing(site: Path, recorded: Path, cache: Path) -> None:
    done = []
    report = warm_up([recorded], jobs=2, progress=lambda count, total, name: done.append((count, total)))
    assert report.failures == ()
    assert (report.arch, report.launches, len(report.warmed), report.same) == ("sm90", LAUNCHES, ENTRIES, 1)
    assert done == [(count, LAUNCHES) for count in range(1, LAUNCHES + 1)]
    warmed = kernels(cache)
    assert len(warmed) == ENTRIES
    built = [path.name.partition(".")[0] for path in cache.glob("*/*.so")]
    triton = tuple(map(int, version("triton").split(".")[:2]))
    assert ("cuda_utils" in built) is (triton < (3, 9) or has_libcuda())
    assert ("__triton_launcher" in built) is (triton < (3, 7))
    assert not any(item.notes for item in report.warmed)
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    choices = in_process(site, cache, "warmed", mode="pinned")
    assert kernels(cache) == warmed
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before
    assert {(item.kernel, item.key, item.config) for item in report.warmed} <= {tuple(choice) for choice in choices}
    again = warm_up([recorded], jobs=1)
    assert [item.cached for item in again.warmed] == [True] * ENTRIES
    assert not any(item.cached for item in report.warmed)


def test_a_run_without_it_compiles_the_same_entries(site: Path, recorded: Path, cache: Path, tmp_path: Path) -> None:
    warm_up([recorded], jobs=2)
    in_process(site, tmp_path / "cold", "warmed", mode="pinned")
    assert kernels(tmp_path / "cold") == kernels(cache)


def test_the_tables_choose(site: Path, recorded: Path, cache: Path, tmp_path: Path) -> None:
    config = LaunchConfig.build({"BLOCK": 256}, num_warps=8)
    folder = table_for(tmp_path / "tables", "warmed.scale_kernel", config, records(recorded))
    report = warm_up([recorded], policy=AutotunePolicy(table_path=[str(folder)]), jobs=1)
    chosen = {(item.kernel, item.config, item.source) for item in report.warmed}
    assert ("warmed.scale_kernel", str(config), "exact") in chosen
    assert {source for kernel, _, source in chosen if kernel == "warmed.copy_kernel"} == {"cheapest"}
    in_process(site, tmp_path / "cold", "warmed", mode="pinned", table_path=[str(folder)])
    assert kernels(tmp_path / "cold") == kernels(cache)


def test_a_journal_keeps_each_launch_that_differs_to_the_compiler_once(recorded: Path) -> None:
    found = records(recorded)
    kept = [record for record in found if record.specialization is not None]
    assert len(kept) == len(found) == LAUNCHES
    first, unaligned, one = (record for record in kept if "n=1024 " in str(record.key))
    assert [record.shared for record in (first, unaligned, one)] == [False, True, True]
    assert unaligned.timings == ()
    assert [len(record.timings) for record in (first, unaligned)] == [3, 0]

    def seen(record: TuningRecord, name: str) -> Any:
        return next(rest for at, *rest in record.specialization["parameters"] if at == name)

    assert seen(first, "x") == seen(unaligned, "x") == seen(first, "y")
    assert seen(unaligned, "y") != seen(first, "y")
    assert seen(first, "offset") != seen(one, "offset")
    assert seen(first, "flag") == ["constexpr", True]
    assert not {"BLOCK", "num_warps"} & {name for name, *_ in first.specialization["parameters"]}


def rewrite(source: Path, target: Path, change: Any) -> Path:
    with JournalWriter(f"{target}/run", Environment("sm90")) as writer:
        for record in records(source):
            writer.write(change(record))
    return target


@pytest.mark.usefixtures("shared_cache")
def test_what_cannot_be_compiled_is_said_and_the_rest_goes_on(recorded: Path, tmp_path: Path) -> None:
    def change(record: TuningRecord) -> TuningRecord:
        data = record.specialization
        if record.kernel.bare_name == "copy_kernel":
            return replace(record, kernel=replace(record.kernel, qualified_name="warmed.gone_kernel"))
        if "n=1000" in str(record.key):
            return replace(record, specialization=None)
        if "n=2048" in str(record.key):
            return replace(record, specialization={**data, "unsupported": "argument 'x' is odd"})
        if [name for name, kind, _ in data["parameters"] if name == "offset" and kind == "constexpr"]:
            parameters = [[name, "*i8", special] for name, _, special in data["parameters"]]
            return replace(record, specialization={**data, "parameters": parameters})
        return record

    report = warm_up([rewrite(recorded, tmp_path / "changed", change)], jobs=2)
    assert {item.kernel for item in report.warmed} == {"warmed.scale_kernel"}
    assert len(report.warmed) == 2
    text = "\n".join(map(str, report.failures))
    assert "no journal given holds a specialization" in text
    assert "argument 'x' is odd" in text
    assert "warmed has no autotuner of warmed.gone_kernel" in text
    assert "are not seen here as they were" in text
    assert len(report.failures) == 6


@pytest.mark.usefixtures("shared_cache")
def test_a_process_that_dies_takes_one_launch_with_it(
    recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deadly = tmp_path / "deadly"
    deadly.mkdir()
    (deadly / "fatal.py").write_text("import os, sys\nprint('about to end', file=sys.stderr)\nos._exit(7)\n")
    monkeypatch.syspath_prepend(str(deadly))

    def change(record: TuningRecord) -> TuningRecord:
        if record.kernel.bare_name == "copy_kernel" and 'kind="a"' in str(record.key) and not record.shared:
            return replace(record, kernel=replace(record.kernel, qualified_name="fatal.kernel"))
        return record

    report = warm_up([rewrite(recorded, tmp_path / "changed", change)], jobs=1)
    (failure,) = report.failures
    assert failure.kernel == "fatal.kernel"
    assert "ended with exit code 7: about to end" in failure.reason
    assert len(report.warmed) + report.same == LAUNCHES - 1


def test_tasks_survive_json(recorded: Path) -> None:
    tasks = read_recorded(find_journals([recorded])).tasks
    assert len(tasks) == LAUNCHES
    assert [Task.from_json(json.loads(json.dumps(task.to_json()))) for task in tasks] == list(tasks)


def test_journals_without_specialization_fail_clearly(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(__file__).parents[2] / "bench" / "data" / "journals"
    # Those that were recorded before journals kept it.
    older = [path for path in find_journals([folder]) if not any(r.specialization for r in read_journal(path).records)]
    assert len(older) == 3
    assert cli.main(["warmup", "--arch", "sm90", *older]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert out.count("no journal given holds a specialization of this key") == 16
    assert "0 compiled for sm90" in out


def test_the_command(recorded: Path, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["warmup", "--arch", "sm90", "--jobs", "2", str(recorded)]) == 0
    out = capsys.readouterr().out
    assert f"{LAUNCHES} of {LAUNCHES}  warmed." in out
    assert f"{ENTRIES} compiled for sm90, 0 in the cache before, 1 the same" in " ".join(out.split())
    assert cli.main(["warmup", "--json", "--arch", "sm90", "--jobs", "2", str(recorded)]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [item["cached"] for item in report["warmed"]] == [True] * ENTRIES
    assert 0 < report["start_up_s"] <= report["seconds"]


@pytest.mark.parametrize(("arch", "word"), [("cpu", "expected a GPU"), ("gfx942", "expected records of a hip GPU")])
def test_other_archs_are_refused(recorded: Path, arch: str, word: str) -> None:
    with pytest.raises((TuningError, JournalError), match=word):
        warm_up([recorded], arch=arch)


@pytest.mark.parametrize("jobs", [0, -1, 2.0, True])
def test_jobs_are_checked(recorded: Path, jobs: Any) -> None:
    with pytest.raises(TuningError, match="jobs: expected a positive number"):
        warm_up([recorded], jobs=jobs)


class Described:
    """A config as a decision holds it."""

    def __init__(self, block: int) -> None:
        self.kwargs = {"BLOCK": block}
        self.num_warps, self.num_stages = 4, 1


def chosen_of(*blocks: int) -> _warmup_worker.Chosen:
    order = tuple(Described(block) for block in blocks)
    key = Key.of({"n": 1})
    decision = Decision(Choice("m.kernel", key, order[0], "exact", None, "sm90"), order, ())
    return _warmup_worker.Chosen(Task(Kernel("m.kernel"), key, {}), None, (), {}, decision, [])


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> _warmup_worker.Compiler:
    """Compiles nothing: 512 needs too much shared memory, 256 too many registers, and 13 is an error of the kernel."""

    def compile_config(autotuner: Any, config: Any, args: Any, kwargs: Any) -> Compiled:
        block = config.kwargs["BLOCK"]
        if block == 256:
            raise OutOfResources(1, 2, "registers")
        if block == 13:
            raise ValueError("a fault of the kernel")
        return Compiled(f"hash {block}", 0.0, False, block << 10, None)

    monkeypatch.setattr(_warmup_worker, "compile_for", lambda arch, multiprocessors: None)
    monkeypatch.setattr(_warmup_worker, "compile_config", compile_config)
    monkeypatch.setattr(_warmup_worker, "build_launcher", lambda compiled, arch: None)
    return _warmup_worker.Compiler("sm90", AutotunePolicy())


@pytest.mark.parametrize(
    ("blocks", "launched", "reason"),
    [
        ((128, 64), 128, None),
        ((512, 128), 128, "524288 bytes of shared memory, of 232448"),
        ((256, 512, 64), 64, "OutOfResources"),
    ],
)
def test_what_lacks_resources_gives_way_as_in_a_launch(
    compiler: _warmup_worker.Compiler, blocks: tuple[int, ...], launched: int, reason: str | None
) -> None:
    warmed = compiler.compile(chosen_of(*blocks))
    assert warmed.hash == f"hash {launched}"
    assert f"BLOCK={launched} " in warmed.config
    assert len(warmed.notes) == (reason is not None)
    assert all(f"in place of BLOCK={blocks[0]}" in note and str(reason) in note for note in warmed.notes)


def test_where_nothing_can_be_launched_nothing_is_warmed(compiler: _warmup_worker.Compiler) -> None:
    with pytest.raises(TuningError, match="no candidate can be launched on sm90: 524288 bytes"):
        compiler.compile(chosen_of(512, 256))


def test_any_other_error_is_not_passed_over(compiler: _warmup_worker.Compiler) -> None:
    with pytest.raises(ValueError, match="a fault of the kernel"):
        compiler.compile(chosen_of(13, 64))
