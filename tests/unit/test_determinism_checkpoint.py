"""Which bytes of two checkpoints differ, and what they are: each format, each kind of byte, and what is refused."""

from __future__ import annotations

import os
import struct
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from tuning.determinism import compare_checkpoints
from tuning.errors import DeterminismError

CONTAINER = "container"


def kinds(found: Any) -> dict[str, str]:
    """What differs, without an archive's own checksums."""
    return {difference.where: difference.kind for difference in found.differences if difference.kind != CONTAINER}


def save(path: Path, value: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    torch.save(value, path)
    return path


@pytest.fixture
def two(tmp_path: Path) -> Any:
    def write(one: Any, other: Any) -> tuple[Path, Path]:
        return save(tmp_path / "a" / "model.pt", one), save(tmp_path / "b" / "model.pt", other)

    return write


def test_equal_files_are_identical(two: Any) -> None:
    found = compare_checkpoints(*two({"w": torch.ones(3)}, {"w": torch.ones(3)}))
    assert found.identical
    assert found.trained_equal
    assert found.lines() == ("identical: 1 files, every byte",)


def test_a_trained_value_is_named_with_its_bytes(two: Any) -> None:
    first, second = torch.zeros(4, 4), torch.zeros(4, 4)
    second[2, 1] = 1.0  # 0000803f
    paths = two({"layer": {"w": first}, "step": 3}, {"layer": {"w": second}, "step": 3})
    found = compare_checkpoints(*paths)
    assert not found.identical
    assert not found.trained_equal
    (difference,) = [difference for difference in found.differences if difference.kind != CONTAINER]
    assert (difference.where, difference.kind, difference.count) == ("tensor layer.w", "trained value", 2)
    ((low, high),) = difference.ranges
    a, b = (path.read_bytes() for path in paths)
    assert (a[low:high], b[low:high]) == (b"\x00\x00", b"\x80\x3f")
    assert difference.detail == "first in element 9 of its storage, 1 ranges"
    assert found.verdict.startswith("not shown to be equal: differing bytes: ")
    assert str(difference) == (
        f"tensor layer.w: 2 bytes differ at {low}-{high - 1} (trained value; first in element 9 of its storage, 1 "
        "ranges)"
    )


def test_bytes_are_compared_and_not_numbers(two: Any) -> None:
    zeros = compare_checkpoints(*two({"w": torch.zeros(2)}, {"w": -torch.zeros(2)}))
    assert kinds(zeros) == {"tensor w": "trained value"}
    payload = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    nans = compare_checkpoints(*two({"w": torch.tensor([float("nan")])}, {"w": payload}))
    assert kinds(nans) == {"tensor w": "trained value"}


def test_a_storage_behind_a_view_is_padding(two: Any) -> None:
    def model(garbage: float) -> dict[str, torch.Tensor]:
        storage = torch.full((32,), garbage)
        storage[4:12] = 1.0
        return {"view": storage[4:12]}

    found = compare_checkpoints(*two(model(7.0), model(9.0)))
    assert kinds(found) == {"storage 0": "unwritten padding"}
    assert found.trained_equal
    assert not found.identical
    assert found.verdict.startswith("trained values are equal: ")
    (difference,) = [difference for difference in found.differences if difference.kind != CONTAINER]
    assert "belongs to no element of view" in str(difference)


def test_a_strided_view_covers_only_its_own_elements(two: Any) -> None:
    def model(gap: float, value: float) -> dict[str, torch.Tensor]:
        storage = torch.zeros(4, 6)
        storage[:, 3:] = gap
        storage[1, 1] = value
        return {"columns": storage[:, :3], "turned": storage[:, :3].t()}

    assert kinds(compare_checkpoints(*two(model(1, 5), model(2, 5)))) == {"storage 0": "unwritten padding"}
    assert kinds(compare_checkpoints(*two(model(1, 5), model(1, 6)))) == {
        "tensor columns": "trained value",
        "tensor turned": "trained value",
    }


def test_a_flat_buffer_whose_padding_the_caller_knows(two: Any) -> None:
    def model(value: float, padding: float) -> dict[str, torch.Tensor]:
        flat = torch.zeros(64)
        flat[:10], flat[20:50] = value, value
        flat[10:20], flat[50:] = padding, padding
        return {"flat": flat}

    trained = {"flat": [(20, 50), (0, 10)]}
    found = compare_checkpoints(*two(model(1, 5), model(1, 6)), trained=trained)
    assert kinds(found) == {"tensor flat": "unwritten padding"}
    assert found.trained_equal
    assert sum(d.count for d in found.differences if d.kind != CONTAINER) == 24  # one byte of each element differs
    found = compare_checkpoints(*two(model(1, 5), model(2, 5)), trained=trained)
    assert kinds(found) == {"tensor flat": "trained value"}
    without = compare_checkpoints(*two(model(1, 5), model(1, 6)))
    assert kinds(without) == {"tensor flat": "trained value"}  # nobody said that it is padding


def test_ranges_of_a_strided_tensor_count_its_own_elements(two: Any) -> None:
    def model(element: int) -> dict[str, torch.Tensor]:
        storage = torch.zeros(4, 6)
        columns = storage[:, :3]
        columns[element // 3, element % 3] = 1.0
        return {"columns": columns}

    trained = {"columns": [(4, 8)]}  # the last two of the second row, the first two of the third
    for element in range(12):
        found = compare_checkpoints(*two(model(11), model(element)), trained=trained)
        assert ("trained value" in {d.kind for d in found.differences}) == (4 <= element < 8)


def test_values_that_are_no_tensors_and_other_shapes_are_structure(two: Any) -> None:
    found = compare_checkpoints(*two({"step": 3}, {"step": 4}))
    assert kinds(found) == {"data.pkl": "structure"}
    assert not found.trained_equal
    found = compare_checkpoints(*two({"w": torch.zeros(2)}, {"w": torch.zeros(3)}))
    assert kinds(found) == {"storage 0": "structure", "data.pkl": "structure"}
    found = compare_checkpoints(*two({"w": torch.zeros(2)}, {"w": torch.zeros(2), "b": torch.zeros(1)}))
    assert kinds(found) == {"storage 1": "structure", "data.pkl": "structure"}
    assert "only in the second: b" in "\n".join(found.lines())


def test_the_name_of_a_file_is_no_difference_of_the_run(tmp_path: Path) -> None:
    model = {"w": torch.ones(3)}
    found = compare_checkpoints(save(tmp_path / "x" / "a.pt", model), save(tmp_path / "x" / "a_longer_name.pt", model))
    assert not found.identical
    assert found.trained_equal
    assert {difference.kind for difference in found.differences} == {CONTAINER}


def test_parameters_optimizer_states_and_dtypes(two: Any) -> None:
    def model(change: float) -> Any:
        half = torch.ones(3, dtype=torch.bfloat16)
        half[1] += change
        return {"p": torch.nn.Parameter(half), "state": {0: {"exp_avg": [torch.ones(2, dtype=torch.float64)]}}}

    assert kinds(compare_checkpoints(*two(model(0), model(1)))) == {"tensor p": "trained value"}
    one, other = model(0), model(0)
    other["state"][0]["exp_avg"][0][1] = 2
    assert kinds(compare_checkpoints(*two(one, other))) == {"tensor state.0.exp_avg.0": "trained value"}


def test_a_hostile_pickle_is_not_run(two: Any, tmp_path: Path) -> None:
    class Hostile:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "pwned"),)

    found = compare_checkpoints(*two({"w": torch.ones(1), "x": Hostile()}, {"w": torch.zeros(1), "x": Hostile()}))
    assert kinds(found) == {"tensor w": "trained value"}
    assert not (tmp_path / "pwned").exists()


def test_differences_across_blocks_are_one_range(two: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from tuning.determinism import checkpoint

    monkeypatch.setattr(checkpoint, "_BLOCK", 7)
    found = compare_checkpoints(
        *two({"w": torch.zeros(40, dtype=torch.uint8)}, {"w": torch.ones(40, dtype=torch.uint8)})
    )
    (difference,) = [difference for difference in found.differences if difference.kind != CONTAINER]
    assert difference.count == 40
    assert len(difference.ranges) == 1


# -- a distributed checkpoint ------------------------------------------------------------------------------------------


@pytest.fixture
def distributed(tmp_path: Path) -> Any:
    import torch.distributed.checkpoint as dcp

    def write(name: str, state: Any) -> Path:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(state, checkpoint_id=str(tmp_path / name), no_dist=True)
        return tmp_path / name

    return write


def test_a_distributed_checkpoint(distributed: Any) -> None:
    def state(value: float, step: int = 1) -> Any:
        return {"model": {"w": torch.full((4, 4), value), "b": torch.ones(3)}, "step": step}

    same = compare_checkpoints(distributed("a", state(1)), distributed("b", state(1)))
    assert same.trained_equal
    assert {difference.kind for difference in same.differences} <= {CONTAINER}  # an identifier of the save
    changed = compare_checkpoints(distributed("c", state(1)), distributed("d", state(2)))
    assert kinds(changed) == {"tensor model.w[0, 0]": "trained value"}
    step = compare_checkpoints(distributed("e", state(1)), distributed("f", state(1, step=2)))
    assert kinds(step) == {"step/data.pkl": "structure"}
    shape = compare_checkpoints(distributed("g", state(1)), distributed("h", {"model": {"w": torch.ones(2)}}))
    assert not shape.trained_equal
    assert ".metadata" in {difference.file for difference in shape.differences if difference.kind == "structure"}


# -- safetensors -------------------------------------------------------------------------------------------------------


def safetensors(path: Path, value: float, gap: bytes = b"", note: str = "") -> Path:
    """Written out by hand, to have a gap between two tensors."""
    import json

    first, second = struct.pack("<2f", 1.0, value), struct.pack("<1f", 3.0)
    header: dict[str, Any] = {
        "a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
        "b": {"dtype": "F32", "shape": [1], "data_offsets": [8 + len(gap), 12 + len(gap)]},
    }
    if note:
        header["__metadata__"] = {"note": note}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + first + gap + second)
    return path


def test_safetensors(tmp_path: Path) -> None:
    def compare(*contents: Any) -> Any:
        one, other = (safetensors(tmp_path / f"{n}.safetensors", *content) for n, content in enumerate(contents))
        return compare_checkpoints(one, other)

    assert compare((2.0,), (2.0,)).identical
    assert kinds(compare((2.0,), (5.0,))) == {"tensor a": "trained value"}
    gap = compare((2.0, b"wxyz"), (2.0, b"wxyv"))
    assert kinds(gap) == {"storage gap at 8": "unwritten padding"}
    assert gap.trained_equal
    assert kinds(compare((2.0, b"", "x"), (2.0, b"", "y"))) == {"header": "structure"}


# -- anything else -----------------------------------------------------------------------------------------------------


def test_files_of_an_unknown_format_are_not_called_equal(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"abcd")
    (tmp_path / "b.bin").write_bytes(b"abXd")
    found = compare_checkpoints(tmp_path / "a.bin", tmp_path / "b.bin")
    assert [(d.where, d.kind, d.ranges) for d in found.differences] == [("file", "unclassified", ((2, 3),))]
    assert not found.trained_equal


@pytest.mark.parametrize("content", [b"PK\x03\x04 and then nothing", b"", b"PK\x03\x04" + bytes(200)])
def test_a_broken_archive_is_compared_as_bytes(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.pt").write_bytes(content)
    (tmp_path / "b.pt").write_bytes(content + b"!")
    found = compare_checkpoints(tmp_path / "a.pt", tmp_path / "b.pt")
    assert [(d.kind, d.count) for d in found.differences] == [("unclassified", 1)]


def test_folders_are_compared_file_by_file(tmp_path: Path) -> None:
    for name, value in (("one", 1.0), ("two", 2.0)):
        save(tmp_path / name / "same.pt", {"w": torch.ones(2)})
        save(tmp_path / name / "model.pt", {"w": torch.full((2,), value)})
    (tmp_path / "one" / "extra.txt").write_text("x")
    found = compare_checkpoints(tmp_path / "one", tmp_path / "two")
    assert found.files == ("model.pt", "same.pt")
    assert ("extra.txt", "structure") in {(d.file, d.kind) for d in found.differences}
    assert {d.file for d in found.differences} == {"extra.txt", "model.pt"}
    assert found.to_json()["trained_equal"] is False
    assert len(found.to_json()["differences"]) == len(found.differences)


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DeterminismError) as caught:
        compare_checkpoints(tmp_path / "none", tmp_path / "neither")
    assert str(caught.value) == (
        f"deterministic mode refuses this comparison: 2 problems: (1) {tmp_path / 'none'} must be a checkpoint file or "
        f"folder, got nothing there; (2) {tmp_path / 'neither'} must be a checkpoint file or folder, got nothing there"
    )
    with pytest.raises(DeterminismError) as caught:
        compare_checkpoints(tmp_path / "file", tmp_path)
    assert caught.value.problems == (f"both must be files or both folders, got {tmp_path / 'file'} and {tmp_path}",)
