"""Triton's disk cache of timings: its files read as journals, and written by Triton itself, in processes of their own.

Those processes have a driver that knows a target and no device: enough for Triton to name its files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import triton
from recordings import environment, journal, record

from tuning import interop
from tuning.errors import TableError
from tuning.interop import Imported, Loss
from tuning.journal import JournalWriter, read_journal
from tuning.merge import merge
from tuning.spec import CandidateTiming, Key, LaunchConfig
from tuning.tables import Entry, TableFile, table_bytes, write_table

ROOT = Path(__file__).parents[2]
CACHES = tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 4)
pytestmark = pytest.mark.stub


def theirs(block: int, **fields: Any) -> dict[str, Any]:
    base = {"num_warps": 4, "num_ctas": 1, "num_stages": 3, "maxnreg": None, "pre_hook": None, "ir_override": None}
    return {"kwargs": {"BLOCK": block}, **base, **fields}


def ours(block: int, **fields: Any) -> LaunchConfig:
    return LaunchConfig.build({"BLOCK": block}, **fields)


RAW_KEY = [128, True, "torch.float32", "torch.bfloat16"]
FILE: dict[str, Any] = {
    "key": RAW_KEY,
    "configs_timings": [
        [theirs(16), [3.0, 2.5, 3.5]],
        [theirs(32), [1.0, 0.9, 1.1]],
        [theirs(64, num_warps=8), [float("inf")] * 3],
    ],
}
NAMED = Key.of({"n": 128, "flag": True}, {"x": "bfloat16", "y": "float32"}, ("y", "x"))


class Autotuner:
    kernel = "pkg.m.kernel"
    key_names = ("n", "flag")
    hooks = ()
    class_name = "triton.runtime.autotuner.Autotuner"


def put(folder: Path, content: Any = FILE, name: str = "kernel.autotune.json", hash_: str = "ABC") -> Path:
    path = folder / hash_ / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def read(folder: Path, names: object = Autotuner()) -> Imported:
    return interop.read("triton-cache", [folder], arch="sm90", names=names)


def kinds(losses: tuple[Loss, ...]) -> list[str]:
    return [loss.kind for loss in losses]


def test_a_file_becomes_a_recording_of_all_candidates(tmp_path: Path) -> None:
    path = put(tmp_path)
    found = read(tmp_path, [Autotuner(), journal(record({64: 1.0}, kernel="pkg.m.kernel", key=NAMED))])
    (one,) = found.journals
    assert (one.path, one.environment.arch) == (str(path), "sm90")
    (rec,) = one.records
    assert (rec.kernel.qualified_name, rec.key, rec.key.call_order, rec.arch) == (
        "pkg.m.kernel",
        NAMED,
        ("y", "x"),
        "sm90",
    )
    assert rec.timings == (
        CandidateTiming(ours(16), (3.0, 2.5, 3.5)),
        CandidateTiming(ours(32), (1.0, 0.9, 1.1)),
        CandidateTiming(ours(64, num_warps=8), None, "infinite time in Triton's cache"),
    )
    assert rec.winner == ours(32)
    assert kinds(found.losses) == ["header"]
    (row,) = found.tables[0].entries
    assert (row.config, row.key, row.dtypes) == (ours(32), NAMED.values, NAMED.dtypes)
    assert row.evidence["best_ms"] == 1.0
    assert [denied.config for denied in found.tables[0].denied] == [ours(64, num_warps=8)]


def test_times_of_nothing_but_zeros_were_not_measured(tmp_path: Path) -> None:
    named = journal(record({64: 1.0}, kernel="pkg.m.kernel", key=NAMED))
    zeros = {**FILE, "configs_timings": [[FILE["configs_timings"][1][0], [0.0, 0.0, 0.0]]]}
    put(tmp_path, zeros)
    for names, dtypes in (([Autotuner(), named], NAMED.dtypes), (Autotuner(), None)):
        found = read(tmp_path, names)
        (row,) = found.tables[0].entries
        assert (row.config, row.key, row.dtypes) == (ours(32), NAMED.values, dtypes)
        assert row.evidence == {"reported_by": "Triton cache file kernel.autotune.json", "measured": False}
        assert (found.journals, kinds(found.losses)) == ((), ["evidence"])
    put(tmp_path, FILE, hash_="DEF")  # what was measured goes before it
    (row,) = read(tmp_path, [Autotuner(), named]).tables[0].entries
    assert row.evidence["measured"] is True
    put(tmp_path, {**FILE, "key": [64, *FILE["key"][1:]]}, hash_="DEF")
    entries = read(tmp_path, [Autotuner(), named]).tables[0].entries
    assert [row.evidence["measured"] for row in entries].count(True) == 1
    assert len(entries) == 2


def test_records_merge_with_those_of_a_journal(tmp_path: Path) -> None:
    put(tmp_path)
    known = journal(record({64: 1.0}, kernel="pkg.m.kernel", key=NAMED))
    (one,) = read(tmp_path, [Autotuner(), known]).journals
    mine = journal(
        record(
            {ours(16): 1.0, ours(32): 3.0, ours(64, num_warps=8): 2.0}, kernel="pkg.m.kernel", key=NAMED, source=None
        )
    )
    again = journal(*mine.records, path="b.journal")
    merged = merge([one, mine, again])
    (facts,) = merged.keys
    assert facts.recordings_count == 3
    assert facts.choice == ours(16)
    with JournalWriter(str(tmp_path / "rec"), environment()) as writer:
        writer.write(one.records[0])
    assert read_journal(writer.path).records == one.records


def test_without_names_of_the_tensors_the_table_has_their_dtypes_in_order(tmp_path: Path) -> None:
    put(tmp_path)
    found = read(tmp_path)
    assert kinds(found.losses) == ["unnamed_dtypes", "header", "denied"]
    (row,) = found.tables[0].entries
    assert (row.dtypes, row.dtype_sequence) == (None, ("float32", "bfloat16"))
    assert found.tables[0].denied == ()
    assert found.journals[0].records[0].key.dtypes == (("dtype0", "float32"), ("dtype1", "bfloat16"))
    assert table_bytes(found.tables[0])
    write_table(tmp_path, found.tables[0])
    put(tmp_path / "b", {**FILE, "key": [128, True]})
    assert kinds(read(tmp_path / "b").losses) == ["header"]


def test_the_winner_is_the_one_that_triton_takes(tmp_path: Path) -> None:
    """The least list of times, item by item; of equal ones the first. A single number is a time too."""
    pairs = [[theirs(16), [1.0, 0.9, 1.2]], [theirs(32), [1.0, 0.8, 1.3]], [theirs(64), [1.0, 0.8, 1.3]]]
    put(tmp_path, {"key": [128, True], "configs_timings": pairs})
    assert read(tmp_path).journals[0].records[0].winner == ours(32)
    put(tmp_path, {"key": [128, True], "configs_timings": [[theirs(16), 2], [theirs(32), 1.5]]})
    rec = read(tmp_path).journals[0].records[0]
    assert (rec.winner, rec.timings[0].times_ms) == (ours(32), (2.0,))
    again = [[theirs(16), 1.0], [theirs(32), 2.0], [theirs(16), 3.0]]
    put(tmp_path, {"key": [128, True], "configs_timings": again})
    assert read(tmp_path).journals[0].records[0].winner == ours(32)


def test_all_candidates_failed(tmp_path: Path) -> None:
    put(tmp_path, {"key": [128, True], "configs_timings": [[theirs(16), [float("inf")] * 3]]})
    found = read(tmp_path)
    assert found.tables == ()
    assert found.journals[0].records[0].timings[0].times_ms is None


def test_files_that_differ_in_what_the_hash_covers_are_pooled(tmp_path: Path) -> None:
    put(tmp_path)
    put(tmp_path, hash_="DEF")
    found = read(tmp_path, [Autotuner(), journal(record({64: 1.0}, kernel="pkg.m.kernel", key=NAMED))])
    assert len(found.journals) == 2
    assert kinds(found.losses) == ["header", "header"]
    assert "2 files have this key" in str(found.losses[1])
    assert len(found.tables[0].entries) == 1


def test_fields_of_a_vendor_are_fields_of_the_config(tmp_path: Path) -> None:
    pair = [theirs(16, waves_per_eu=2, pre_hook="f", num_consumer_groups=0), [1.0]]
    put(tmp_path, {"key": [128, True], "configs_timings": [pair], "x": 1})
    found = read(tmp_path)
    assert found.journals[0].records[0].winner == ours(16, extra={"waves_per_eu": 2})
    assert kinds(found.losses) == ["unknown_member", "hook", "header"]


def test_kernels_and_keys_that_nothing_knows(tmp_path: Path) -> None:
    put(tmp_path)
    assert kinds(read(tmp_path, None).losses) == ["unknown_kernel"]
    assert kinds(read(tmp_path, {"kernel": "pkg.m.kernel"}).losses) == ["unnamed_key"]
    assert kinds(read(tmp_path, {"kernel": ["a.kernel", "b.kernel"]}).losses) == ["shared_name"]


@pytest.mark.parametrize(
    ("change", "place"),
    [
        ({"key": 1}, "$.key"),
        ({"configs_timings": {}}, "$.configs_timings"),
        ({"configs_timings": []}, "$.configs_timings"),
        ({"configs_timings": [1]}, "$.configs_timings[0]"),
        ({"configs_timings": [[theirs(16)]]}, "$.configs_timings[0]"),
        ({"configs_timings": [[{}, [1.0]]]}, "$.configs_timings[0][0]"),
        ({"configs_timings": [[theirs(16), []]]}, "$.configs_timings[0][1]"),
        ({"configs_timings": [[theirs(16), [1.0] * 17]]}, "$.configs_timings[0][1]"),
        ({"configs_timings": [[theirs(16), [-1.0]]]}, "$.configs_timings[0][1][0]"),
        ({"configs_timings": [[theirs(16), [True]]]}, "$.configs_timings[0][1][0]"),
        ({"configs_timings": [[theirs(16), 10**400]]}, "$.configs_timings[0][1]"),
        ({"configs_timings": [[theirs(16), float("nan")]]}, "$.configs_timings[0][1]"),
        ({"configs_timings": [[theirs(16), 1.0]] * 4097}, "$.configs_timings"),
    ],
)
def test_what_is_no_file_of_the_cache(tmp_path: Path, change: Any, place: str) -> None:
    path = put(tmp_path, {**FILE, **change})
    with pytest.raises(TableError) as caught:
        read(tmp_path)
    assert (caught.value.file, caught.value.where) == (str(path), place)


# --- Triton itself ----------------------------------------------------------------------------------------------------

KERNELS = """
import triton
import triton.language as tl

ran = []
times = {16: 3.0, 32: 2.0, 64: 1.0}
caches = hasattr(triton.runtime.autotuner.Autotuner, "check_disk_cache")

class Stub(triton.JITFunction):
    def run(self, *args, grid=None, warmup=False, **kwargs):
        ran.append((self.__name__, kwargs["BLOCK"], kwargs["num_warps"]))

def bench(call, quantiles):
    import os
    assert os.environ.get("MAY_TIME"), "timed"
    call()
    return [times[ran[-1][1]]] * 3

def configs(**fields):
    return [triton.Config({"BLOCK": block}, num_warps=warps, **fields) for block in (16, 32, 64) for warps in (2, 4)]

def tuned(name, candidates=None, cache_results=True, **options):
    def kernel(x, y, n, flag: tl.constexpr, BLOCK: tl.constexpr):
        tl.store(y, tl.load(x))
    kernel.__name__ = kernel.__qualname__ = name
    return triton.autotune(
        configs=candidates or configs(), key=["n", "flag"], do_bench=bench, **cached(cache_results), **options
    )(Stub(kernel))

def cached(wanted):
    return {"cache_results": wanted} if caches else {}

plain = tuned("plain")
hooked = tuned("hooked", configs(pre_hook=lambda nargs: None))
pruned = tuned("pruned", prune_configs_by={"early_config_prune": lambda configs, nargs, **kwargs: configs})
single = tuned("single", configs()[:1])
uncached = tuned("uncached", cache_results=False)
keyless = triton.autotune(configs=configs(), key=[], do_bench=bench, **cached(True))(Stub(plain.fn.fn))
"""

SETUP = """
import json, os, sys, types, warnings
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
driver.set_active(types.SimpleNamespace(
    get_current_target=lambda: GPUTarget("cuda", 90, 32), get_current_device=lambda: 0,
    get_benchmarker=lambda: None, get_device_interface=lambda: None,
))
import cache_kernels

class Tensor:
    def __init__(self, dtype):
        self.dtype = "torch." + dtype

def launch(kernel, x, y, n, **flag):
    kernel[(1,)](Tensor(x), y=Tensor(y), n=n, **(flag or {"flag": True}))
"""

WRITE = (
    SETUP
    + """
import tuning
from tuning import interop
from tuning.tables import read_table
found = []
for argument in sys.argv[2:]:
    done = interop.write("triton-cache", [read_table(path) for path in argument.split(os.pathsep)], sys.argv[1])
    found.append({
        "files": [str(path) for path in done.files],
        "losses": [[loss.kind, str(loss)] for loss in done.losses],
        "variable": os.environ.get("TRITON_CACHE_DIR"),
    })
print(json.dumps(found))
"""
)

LAUNCH = (
    SETUP
    + """
assert "tuning" not in sys.modules
for n in (128, True, 1.5):
    launch(cache_kernels.plain, "bfloat16", "float32", n)
best = cache_kernels.plain.best_config
print(json.dumps([cache_kernels.ran, best.kwargs, best.num_warps]))
"""
)


def process(program: str, folder: Path, *arguments: object, **variables: str) -> Any:
    (folder / "cache_kernels.py").write_text(KERNELS)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    path = os.pathsep.join(filter(None, [str(folder), str(ROOT), os.environ.get("PYTHONPATH")]))
    result = subprocess.run(
        [sys.executable, "-c", program, *map(str, arguments)],
        env={**kept, "PYTHONPATH": path, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def row(block: int, key: Key | None, kernel: str = "plain", warps: int = 2) -> Entry:
    config = ours(block, num_warps=warps)
    parts = (None, None) if key is None else (key.values, key.dtypes)
    return Entry(f"cache_kernels.{kernel}", *parts, None, config, {"best_ms": 0.5})


def keyed(n: Any = 128, x: str = "bfloat16", y: str = "float32") -> Key:
    return Key.of({"n": n, "flag": True}, {"x": x, "y": y})


@pytest.mark.skipif(not CACHES, reason="this Triton keeps no timings on disk")
def test_a_config_without_a_time_is_written_with_one_that_is_called_made_up(tmp_path: Path) -> None:
    unknown = replace(row(16, keyed(x="int8", y="int8")), evidence={"measured": False, "best_ms": 0.0})
    (done,) = process(WRITE, tmp_path, tmp_path / "cache", put_table(tmp_path, unknown))
    assert [kind for kind, _ in done["losses"]] == ["evidence", "evidence"]
    assert "says 0 ms, which is made up" in done["losses"][1][1]
    (path,) = done["files"]
    assert [times for _, times in json.loads(Path(path).read_text())["configs_timings"]] == [[0.0] * 3]


def put_table(folder: Path, *rows: Entry, arch: str = "sm90") -> Path:
    return write_table(folder / "tables", TableFile(arch, "cache_kernels", "", "", "", rows))


needs_cache = pytest.mark.skipif(not CACHES, reason="this Triton keeps no timings on disk")


@needs_cache
def test_triton_takes_the_config_from_the_file_that_was_written(tmp_path: Path) -> None:
    rows = [row(16, keyed()), row(32, keyed(True), warps=4), row(64, keyed(1.5))]
    (done,) = process(WRITE, tmp_path, tmp_path / "cache", put_table(tmp_path, *rows), TRITON_CACHE_DIR="/elsewhere")
    assert len(done["files"]) == 3
    assert [kind for kind, _ in done["losses"]] == ["evidence", "call_order", "call_order", "call_order"]
    assert done["variable"] == "/elsewhere"
    ran, kwargs, warps = process(LAUNCH, tmp_path, TRITON_CACHE_DIR=str(tmp_path / "cache"))
    assert [tuple(item) for item in ran] == [("plain", 16, 2), ("plain", 32, 4), ("plain", 64, 2)]
    assert (kwargs, warps) == ({"BLOCK": 64}, 2)


@needs_cache
def test_files_that_triton_wrote_are_read_and_written_again(tmp_path: Path) -> None:
    """Theirs to ours to theirs: the same names, and the same config for each key."""
    first = process(LAUNCH, tmp_path, TRITON_CACHE_DIR=str(tmp_path / "theirs"), MAY_TIME="1")

    class Known:
        kernel = "cache_kernels.plain"
        key_names = ("n", "flag")
        hooks = ()
        class_name = "triton.runtime.autotuner.Autotuner"

    found = read(tmp_path / "theirs", Known())
    assert [len(one.records[0].timings) for one in found.journals] == [6, 6, 6]
    assert all(one.records[0].winner == ours(64, num_warps=2) for one in found.journals)
    # Candidates with equal times are a tie, which the fixed rule of a merge decides by the larger footprint.
    assert {entry.config for entry in found.tables[0].entries} == {ours(64, num_warps=4)}
    path = write_table(tmp_path / "tables", found.tables[0])
    (done,) = process(WRITE, tmp_path, tmp_path / "ours", path)
    names = [
        sorted(p.relative_to(tmp_path / side) for p in (tmp_path / side).rglob("*.json")) for side in ("theirs", "ours")
    ]
    assert names[0] == names[1]
    assert len(names[0]) == 3
    assert [kind for kind, _ in done["losses"]] == ["evidence"]
    second = process(LAUNCH, tmp_path, TRITON_CACHE_DIR=str(tmp_path / "ours"))
    assert [item[1:] for item in second[0]] == [[64, 4]] * 3
    assert first[0][-1][1] == 64


@needs_cache
def test_what_triton_would_not_use_is_said(tmp_path: Path) -> None:
    rows = [
        row(16, None),
        row(99, keyed()),
        row(16, keyed(), "hooked"),
        row(16, keyed(), "pruned"),
        row(16, keyed(), "single"),
        row(16, keyed(), "uncached"),
        row(16, keyed(), "absent"),
        row(16, Key.of({})),
        row(16, Key((("n", '{"dtype":"int8"}'), ("flag", "true")), ())),
        row(16, keyed(1, "int8", "int8")),
        row(32, keyed(True, "int8", "int8")),
    ]
    foreign = put_table(tmp_path, row(16, keyed()), arch="sm100")
    elsewhere = write_table(
        tmp_path / "tables",
        TableFile(
            "sm90", "no_such_package", "", "", "", (Entry("no_such_package.m.k", (), (), None, ours(16), {"a": 1}),)
        ),
    )
    tables = map(str, (put_table(tmp_path, *rows), foreign, elsewhere))
    (done,) = process(WRITE, tmp_path, tmp_path / "cache", os.pathsep.join(tables))
    lost = {}
    for kind, text in done["losses"]:
        if kind not in ("evidence", "call_order"):
            lost.setdefault(kind, []).append(text)
    assert {kind: len(texts) for kind, texts in lost.items()} == {
        "wildcard": 1,
        "not_a_candidate": 1,
        "hook": 1,
        "lookup": 3,
        "unread": 2,
        "not_found": 2,
        "value": 1,
        "other_arch": 1,
    }
    assert any("no autotuner of this name" in text for text in lost["not_found"])
    assert any("no_such_package.m does not import (ModuleNotFoundError: " in text for text in lost["not_found"])
    assert any("what the pruner leaves" in text for text in lost["lookup"])
    assert any("no file for an empty key" in text for text in lost["lookup"])
    assert any("equal in Python" in text for text in lost["lookup"])
    assert any("set TRITON_CACHE_AUTOTUNING=1" in text for text in lost["unread"])
    assert sorted(Path(path).name for path in done["files"]) == [
        "plain.autotune.json",
        "plain.autotune.json",
        "uncached.autotune.json",
    ]


@needs_cache
def test_what_lies_in_the_folder_already_is_not_overwritten(tmp_path: Path) -> None:
    one, other = (put_table(tmp_path / str(block), row(block, keyed())) for block in (16, 32))
    first, again, last = process(WRITE, tmp_path, tmp_path / "cache", one, one, other)
    assert len(first["files"]) == 1
    assert (again["files"], [kind for kind, _ in again["losses"]]) == ([], ["evidence", "call_order"])
    assert (last["files"], last["losses"][-1][0]) == ([], "shadowed")


REFUSED = """
import json, sys, types
from triton.runtime.driver import driver
target = types.SimpleNamespace(backend="strange", arch="sm90", warp_size=32)
driver.set_active(types.SimpleNamespace(get_current_target=lambda: target, get_benchmarker=lambda: None))
import cache_kernels
from tuning import errors, interop
from tuning.tables import read_table
try:
    interop.write("triton-cache", [read_table(sys.argv[2])], sys.argv[1])
except errors.TuningError as error:
    print(json.dumps([type(error).__name__, str(error)]))
"""


def test_a_process_that_cannot_name_the_files_is_told(tmp_path: Path) -> None:
    path = put_table(tmp_path, row(16, keyed()))
    kind, text = process(REFUSED, tmp_path, tmp_path / "cache", path)
    if CACHES:
        assert kind == "TuningError"
        assert "cache_kernels.plain: Triton cannot compute the name of its file here" in text
    else:
        assert kind == "UnsupportedTritonError"
        assert "keeps no timings on disk: writing its cache needs triton>=3.4" in text
