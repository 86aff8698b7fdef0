"""Config folders before FLA's own reader, as installed, in each of its modes; one table for a trainer and an engine."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest

from tuning import interop
from tuning.interop import FlaMode
from tuning.spec import Key, LaunchConfig
from tuning.tables import Entry, TableFile, Tables

ROOT = Path(__file__).parents[2]
TIME_LIMIT = 240
pytestmark = pytest.mark.peers("fla")

# FLA's module by itself: the package around it takes seconds to import. The mode is read when it is loaded.
ASK = """
import importlib.util, json, os, pathlib, sys
found = {}
for mode in sys.argv[2].split():
    os.environ["FLA_CACHE_MODE"] = mode
    spec = importlib.util.spec_from_file_location("fla_cache_" + mode, sys.argv[1])
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    folder = pathlib.Path(os.environ["FLA_CONFIG_DIR"])
    assert all(module.KernelConfigFile.from_file(path) for path in folder.glob("*.json"))
    keys = [module.AutotuneKey(tuple(key)) for key in json.loads(sys.argv[3])]
    found[mode] = [module.load_cached_config("kernel", key) for key in keys]
print(json.dumps(found))
"""


@cache
def reader() -> str:
    spec = importlib.util.find_spec("fla")
    assert spec is not None
    assert spec.submodule_search_locations
    return str(Path(next(iter(spec.submodule_search_locations))) / "ops" / "utils" / "cache.py")


def environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("FLA_", "TRITON_"))}
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH")]))
    return {**kept, **variables}


def ask_fla(folder: Path, keys: list[list[Any]]) -> dict[str, list[Any]]:
    """What FLA finds for the keys of a kernel, by mode."""
    arguments = [reader(), " ".join(get_args(FlaMode)), json.dumps(keys)]
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ASK, *arguments],
        env=environment(FLA_CONFIG_DIR=str(folder)),
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    found: dict[str, list[Any]] = json.loads(result.stdout)
    return found


def config(block: int, **fields: Any) -> LaunchConfig:
    return LaunchConfig.build({"BLOCK": block}, **fields)


def entry(block: int, key: Key | None, **fields: Any) -> Entry:
    rows = (None, None) if key is None else (key.values, key.dtypes)
    return Entry("pkg.m.kernel", *rows, None, config(block, **fields), {"measured": True})


def keyed(n: Any, flag: Any = True, x: str = "bfloat16", y: str = "float32") -> Key:
    return Key.of({"n": n, "flag": flag}, {"x": x, "y": y})


ROWS = (
    entry(16, keyed(128)),
    entry(32, keyed(64), num_warps=8, maxnreg=128, num_ctas=2, ir_override="k.ttgir"),
    entry(64, keyed(1.0, "word")),
    entry(128, keyed(None, (1, (2, 3)))),
    entry(256, None, num_stages=5),
)
ASKED = [
    keyed(128),
    keyed(64),
    keyed(1.0, "word"),
    keyed(1, "word"),
    keyed(None, (1, (2, 3))),
    keyed(4096),
    keyed(128, flag=1),
    keyed(128, x="float16"),
    keyed("128"),
]


def raw(key: Key) -> list[Any]:
    def plain(text: str) -> Any:
        value = json.loads(text)
        if isinstance(value, dict) and "tuple" in value:
            return [plain(json.dumps(item)) for item in value["tuple"]]
        return float(value["float"]) if isinstance(value, dict) else value

    return [*(plain(text) for _, text in key.values), *(f"torch.{dtype}" for _, dtype in key.dtypes)]


def differs_in_numbers_only(one: Key, other: Key) -> bool:
    """FLA's fuzzy rule: any number for any other; all else must be equal, and ``True`` equals 1."""

    def alike(one: Any, other: Any) -> bool:
        if isinstance(one, list) and isinstance(other, list):
            return len(one) == len(other) and all(map(alike, one, other))
        numbers = [isinstance(value, (int, float)) and not isinstance(value, bool) for value in (one, other)]
        return all(numbers) or bool(one == other)

    return alike(raw(one), raw(other))


def our_answer(tables: Iterable[TableFile], key: Key) -> LaunchConfig | None:
    found = Tables("sm90", [list(tables)])
    row = found.exact("pkg.m.kernel", key) or found.wildcard("pkg.m.kernel")
    return None if row is None else row.config


def answer(found: Any) -> LaunchConfig | None:
    if found is None:
        return None
    fields = {name: found[name] for name in ("num_warps", "num_stages", "num_ctas", "maxnreg", "ir_override")}
    return LaunchConfig.build(found["kwargs"], **fields)


def test_fla_finds_in_each_mode_what_our_reader_says_that_it_uses(tmp_path: Path) -> None:
    """Ours to theirs, before their reader; and theirs to ours, of what they use in that mode."""
    mine = TableFile("sm90", "pkg", "", "3.6.0", "", ROWS)
    interop.write("fla", [mine], tmp_path)
    asked = ask_fla(tmp_path, [raw(key) for key in ASKED])
    fuzzy = 0
    for mode in get_args(FlaMode):
        read = interop.read("fla", [tmp_path], arch="sm90", names=[mine], mode=mode)
        for key, found in zip(ASKED, asked[mode], strict=True):
            exact = any(row.key == key.values and row.dtypes == key.dtypes for row in ROWS)
            like = any(row.key and differs_in_numbers_only(Key(row.key, row.dtypes or ()), key) for row in ROWS)
            if mode in ("fuzzy", "full") and like and not exact:
                # The one thing that a table cannot carry; the reader says so.
                assert "lookup" in {loss.kind for loss in read.losses}
                assert answer(found) in {row.config for row in ROWS if row.key is not None}
                fuzzy += 1
            else:
                assert answer(found) == our_answer(read.tables, key), (mode, str(key))
    assert fuzzy > 2
    strict = [answer(found) for found in asked["strict"]]
    assert strict[:3] == [row.config for row in ROWS[:3]]
    assert asked["disabled"] == [None] * len(ASKED)


def test_a_file_that_went_through_our_tables_is_to_fla_the_same_file(tmp_path: Path) -> None:
    mine = TableFile("sm90", "pkg", "", "3.6.0", "", ROWS)
    interop.write("fla", [mine], tmp_path / "one")
    read = interop.read("fla", [tmp_path / "one"], arch="sm90", names=[mine])
    interop.write("fla", read.tables, tmp_path / "two")
    files = [(tmp_path / name / "kernel.json").read_bytes() for name in ("one", "two")]
    assert files[0] == files[1]


def test_a_bare_config_is_read_as_fla_reads_it(tmp_path: Path) -> None:
    bare = {
        "kwargs": {"BLOCK": 16},
        "num_warps": 8,
        "num_stages": 2,
        "num_ctas": 1,
        "maxnreg": None,
        "ir_override": None,
    }
    (tmp_path / "kernel.json").write_text(json.dumps(bare))
    asked = ask_fla(tmp_path, [raw(keyed(1))])
    for mode in get_args(FlaMode):
        read = interop.read("fla", [tmp_path], arch="sm90", names={"kernel": "pkg.m.kernel"}, mode=mode)
        assert answer(asked[mode][0]) == our_answer(read.tables, keyed(1)), mode


OWN_KERNELS = """
import triton
import triton.language as tl
from fla.ops.utils.cache import fla_cache_autotune

@fla_cache_autotune(configs=[triton.Config({"BLOCK": b}, num_warps=w) for b in (8, 16, 32) for w in (1, 2)], key=["n"])
@triton.jit
def scale_kernel(x, y, n, BLOCK: tl.constexpr):
    for start in range(0, n, BLOCK):
        at = start + tl.arange(0, BLOCK)
        tl.store(y + at, tl.load(x + at, mask=at < n).to(tl.float32) * 2, mask=at < n)
"""


def run(folder: Path, *arguments: object, **variables: str) -> Any:
    (folder / "own_kernels.py").write_text(OWN_KERNELS)
    program = Path(__file__).with_name("fla_interpreted.py")
    settings = environment(TRITON_CACHE_DIR=str(folder / "cache"), **variables)
    settings["PYTHONPATH"] = os.pathsep.join([str(folder), settings["PYTHONPATH"]])
    result = subprocess.run(
        [sys.executable, str(program), *map(str, arguments)],
        env=settings,
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_one_table_pins_a_training_process_and_an_engine_process(tmp_path: Path) -> None:
    """The same configs in both logs: here by this library, there by FLA's own strict mode, without it."""
    trained = run(tmp_path, "trainer", tmp_path)
    engine = run(tmp_path, "engine", FLA_CONFIG_DIR=str(tmp_path / "fla"), FLA_CACHE_MODE="strict")
    assert trained["second"] == trained["first"]
    assert [name for name, _ in trained["second"]] == ["l2norm_fwd_kernel", "l2norm_fwd_kernel", "scale_kernel"]
    for name, launched in trained["second"]:
        # Neither the cheapest candidate nor the first: the table alone brings both sides there.
        assert launched["BT" if name.startswith("l2norm") else "BLOCK"] == (32 if name.startswith("l2norm") else 16)
    assert engine["launched"] == trained["second"]
    assert engine["key that is not in the table"] == ["a candidate was timed"]
    assert trained["files"] == ["l2norm_fwd_kernel.json", "scale_kernel.json"]
    assert Counter(trained["losses"]) == {"evidence": 2, "header": 1}  # of the header, the version of fla-core
    assert trained["back"] == trained["table"]
