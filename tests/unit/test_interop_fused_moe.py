"""vLLM's and SGLang's fused MoE config files, as described: they are read, and never written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tuning import interop
from tuning.errors import TableError
from tuning.interop import Imported, fused_moe
from tuning.interop._known import known_kernels
from tuning.spec import Key, LaunchConfig
from tuning.tables import table_bytes, write_table

NAME = "E=8,N=3584,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json"
CONFIG = {
    "BLOCK_SIZE_M": 64,
    "BLOCK_SIZE_N": 128,
    "BLOCK_SIZE_K": 64,
    "GROUP_SIZE_M": 8,
    "num_warps": 4,
    "num_stages": 3,
}
FILE = {"1": CONFIG, "4096": {**CONFIG, "num_warps": 8, "SPLIT_K": 1}}


def put(folder: Path, name: str = NAME, content: Any = FILE) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(content))
    return folder / name


def read(path: Path, engine: str = "vllm-moe", **how: Any) -> Imported:
    return interop.read(engine, [path], arch="sm90", **how)


def test_the_problem_is_in_the_name_and_the_tokens_in_the_file(tmp_path: Path) -> None:
    found = read(put(tmp_path))
    (table,) = found.tables
    assert (table.arch, table.package, table.device, table.triton) == ("sm90", "vllm", "NVIDIA H200", "")
    one, many = sorted(table.entries, key=lambda row: int(dict(row.key or ())["M"]))
    assert one.kernel == "vllm.model_executor.layers.fused_moe.fused_moe.fused_moe_kernel"
    assert one.key == Key.of({"M": 1, "E": 8, "N": 3584, "dtype": "fp8_w8a8", "block_shape": (128, 128)}).values
    assert (one.dtypes, one.dtype_sequence) == (None, ())
    kwargs = {name: value for name, value in CONFIG.items() if not name.startswith("num_")}
    assert one.config == LaunchConfig.build(kwargs)
    assert many.config == LaunchConfig.build({**kwargs, "SPLIT_K": 1}, num_warps=8)
    assert one.evidence == {"reported_by": f"vllm-moe file {NAME}", "measured": False}
    assert [(loss.kind, loss.where) for loss in found.losses] == [("lookup", str(tmp_path / NAME))]
    assert "takes the nearest M" in found.losses[0].message
    assert table_bytes(table)
    write_table(tmp_path, table)


def test_the_version_of_triton_stands_in_the_file_or_in_the_folders_name(tmp_path: Path) -> None:
    assert read(put(tmp_path / "a", content={"triton_version": "3.5.1", **FILE})).tables[0].triton == "3.5.1"
    path = put(tmp_path / "configs" / "triton_3_4_0", NAME.replace(".json", "_down.json"))
    table = read(path, "sglang-moe").tables[0]
    assert (table.package, table.triton) == ("sglang", "3.4.0")
    assert ("variant", '"down"') in (table.entries[0].key or ())
    assert read(tmp_path / "configs", "sglang-moe").tables == (table,)


def test_a_mapping_says_which_kernel_is_meant(tmp_path: Path) -> None:
    path = put(tmp_path)
    assert read(path, names={"fused_moe_kernel": "mine.moe.fused_moe_kernel"}).tables[0].package == "mine"
    assert read(path, names={"other": "mine.moe.other"}).tables[0].package == "vllm"
    shared = read(path, names={"fused_moe_kernel": ["a.k", "b.k"]})
    assert (shared.tables, [loss.kind for loss in shared.losses]) == ((), ["shared_name"])


def test_several_problems_make_one_table_and_several_devices_none(tmp_path: Path) -> None:
    put(tmp_path)
    put(tmp_path, "E=16,N=64,device_name=NVIDIA_H200.json", {"1": CONFIG})
    assert len(read(tmp_path).tables[0].entries) == 3
    put(tmp_path, "E=16,N=64,device_name=AMD_Instinct_MI300X.json", {"1": CONFIG})
    with pytest.raises(TableError, match="read one device at a time"):
        read(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "E=8.json",
        "E=8,N=1,device_name=.json",
        "E=x,N=1,device_name=d.json",
        "E=1,N=-1,device_name=d.json",
        "E=1,device_name=d,N=1.json",
        "E=1,N=1,device_name=d,.json",
        "E=1,N=1,device_name=d,dtype.json",
        "E=1,N=1,device_name=d,E=2.json",
        "E=1,N=1,device_name=d,block_shape=[1,[2]].json",
        f"E={'9' * 30},N=1,device_name=d.json",
    ],
)
def test_names_that_say_no_problem(tmp_path: Path, name: str) -> None:
    path = put(tmp_path, name)
    with pytest.raises(TableError) as caught:
        read(path)
    assert (caught.value.file, caught.value.where) == (str(path), "file name")


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ([], "$"),
        ({"x": CONFIG}, "$.x"),
        ({"01": CONFIG}, '$["01"]'),
        ({"1": []}, '$["1"]'),
        ({"1": {"BLOCK_SIZE_M": 64}}, '$["1"]'),
        ({"1": {**CONFIG, "num_warps": 3}}, '$["1"].num_warps'),
        ({"1": {**CONFIG, "a b": 3}}, '$["1"]["a b"]'),
        ({"triton_version": 3}, "$.triton_version"),
    ],
)
def test_what_is_no_config_file(tmp_path: Path, content: Any, place: str) -> None:
    with pytest.raises(TableError) as caught:
        read(put(tmp_path, content=content))
    assert (caught.value.file, caught.value.where) == (str(tmp_path / NAME), place)


def test_bytes_can_be_read_without_a_file() -> None:
    found = fused_moe.parse_file(json.dumps(FILE).encode(), NAME, known_kernels(), "sm90")
    assert len(found.tables[0].entries) == 2
