"""Metric standards: every bit goes through the file, and nothing that differs passes."""

from __future__ import annotations

import json
import math
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tuning.bitexact.metrics import MetricRecorder, Metrics, Tolerance, compare_metrics
from tuning.bitexact.metrics_file import read_metrics, record_standard, refuse_under_ci, write_metrics
from tuning.bitexact.metrics_values import decode, encode, ulp_distance, value_of
from tuning.cli import main
from tuning.errors import MetricStandardError

ROOT = Path(__file__).parents[2]
CI_VARIABLES = (
    "CI", "GITHUB_ACTIONS", "GITLAB_CI", "JENKINS_URL", "BUILD_NUMBER", "BUILDKITE", "TEAMCITY_VERSION", "TF_BUILD"
)  # fmt: skip


@pytest.fixture(autouse=True)
def _no_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in CI_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def run_of(**metrics: list[Any]) -> Metrics:
    recorder = MetricRecorder()
    for name, values in metrics.items():
        for value in values:
            recorder.record(name, value)
    return recorder.finish()


def float_of(bits: int) -> float:
    return struct.unpack("<d", struct.pack("<Q", bits))[0]


# --- bits -------------------------------------------------------------------------------------------------------------

EDGES = {
    "float64": (0, 1 << 63, 1, 0x3FF0000000000000, 0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000, 0xFFF0000000000000,
                0x7FF0000000000001, 0x7FF8000000000000, 0xFFF8000000000123),
    "float32": (0, 1 << 31, 1, 0x3F800001, 0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7F800001, 0x7FC00000, 0xFFC00123),
    "float16": (0, 1 << 15, 1, 0x3C01, 0x7BFF, 0x7C00, 0xFC00, 0x7C01, 0x7E00, 0xFE12),
    "bfloat16": (0, 1 << 15, 1, 0x3F81, 0x7F7F, 0x7F80, 0xFF80, 0x7F81, 0x7FC0, 0xFFC1),
}  # fmt: skip


@pytest.mark.parametrize(("dtype", "bits"), [(dtype, bits) for dtype, all_bits in EDGES.items() for bits in all_bits])
def test_every_kind_of_float_survives_as_text(dtype: str, bits: int) -> None:
    text = encode(dtype, bits)
    assert json.loads(json.dumps(text)) == text
    assert decode(dtype, text) == bits


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_all_values_of_sixteen_bits_survive(dtype: str) -> None:
    assert [bits for bits in range(1 << 16) if decode(dtype, encode(dtype, bits)) != bits] == []


@pytest.mark.parametrize("dtype", EDGES)
def test_a_tensor_keeps_its_bits_also_of_a_signalling_nan(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    width = {"float64": 64, "float32": 32}.get(dtype, 16)
    integers = getattr(torch, f"int{width}")
    signed = [bits - (1 << width) if bits >> (width - 1) else bits for bits in EDGES[dtype]]
    tensor = torch.tensor(signed, dtype=integers).view(getattr(torch, dtype))
    value = value_of(tensor)
    assert (value.dtype, value.shape, value.bits) == (dtype, (len(signed),), EDGES[dtype])
    assert value_of(tensor[3]).shape == ()


def test_numpy_and_python_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    assert value_of(numpy.float32(-0.0)) == value_of(numpy.zeros((), numpy.float32) * numpy.float32(-1))
    assert value_of(numpy.float32(-0.0)).bits == (1 << 31,)
    assert value_of(numpy.float64(0.5)) == value_of(0.5)
    assert value_of(numpy.array([[1, -2]])).bits == (1, -2)
    assert (value_of(True).dtype, value_of(2**70).bits) == ("bool", (2**70,))
    assert value_of(numpy.arange(12, dtype=numpy.float32).reshape(3, 4)[:, ::2]).shape == (3, 2)


@pytest.mark.parametrize("given", ["1.0", None, 1j, [1.0], object()])
def test_what_is_no_number_is_refused_by_name(given: object) -> None:
    with pytest.raises(MetricStandardError, match=r"metric 'loss', step 0: expected a number"):
        MetricRecorder().record("loss", given)


@pytest.mark.parametrize("dtype", ["complex64", "float8_e4m3fn"])
def test_a_dtype_that_has_no_text_is_refused_by_name(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(MetricStandardError, match=f"found a Tensor of dtype {dtype}"):
        MetricRecorder().record("loss", torch.zeros(2, dtype=getattr(torch, dtype)))


@pytest.mark.parametrize(
    ("dtype", "given"),
    [
        ("float32", "0x1.0000001p+0"),  # more bits than it has
        ("float16", "0x1.0000000000000p+16"),  # beyond its largest
        ("bfloat16", "0x1.0100000000000p+0"),
        ("float64", "1.0"),  # another text of a value that has its own
        ("float64", "0x1p+0"),
        ("float64", "nan"),
        ("float64", 1.0),
        ("float32", "nan:0x7fc0"),
        ("float32", "nan:0x7f800000"),  # infinity
        ("float32", "nan:0x7fc0000g"),
        ("int8", 128),
        ("uint8", -1),
        ("int", True),
        ("bool", 1),
        ("int", "1"),
    ],
)
def test_text_that_is_no_value_of_the_dtype_is_refused(dtype: str, given: object) -> None:
    with pytest.raises(ValueError, match=r"hexadecimal|integer|true or false"):
        decode(dtype, given)


def test_ulps_are_steps_of_the_dtype() -> None:
    one = value_of(1.0).bits[0]
    assert ulp_distance("float64", one, value_of(math.nextafter(1.0, 2)).bits[0]) == 1
    assert ulp_distance("float64", one, one - 5) == 5
    assert ulp_distance("float32", 1, (1 << 31) | 1) == 2  # across zero
    assert ulp_distance("float32", 0, 1 << 31) == 0
    assert ulp_distance("float32", 0x7FC00000, 0) is None
    assert ulp_distance("int", 1, 2) is None


# --- recording --------------------------------------------------------------------------------------------------------


def test_a_tensor_is_recorded_as_it_was_then() -> None:
    torch = pytest.importorskip("torch")
    recorder = MetricRecorder()
    weight = torch.ones(3, requires_grad=True)
    recorder.record("w", weight)
    with torch.no_grad():
        weight.zero_()
    recorder.record("w", weight)
    series = recorder.finish().series["w"]
    assert [value.bits for value in series.values()] == [(0x3F800000,) * 3, (0,) * 3]


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("", 1.0), "name"),
        (("loss", 1.0, -1), "step"),
        (("loss", 1.0, True), "step"),
        (("loss", 1.0, 0), "a second value"),
        (("loss", 1), "expected float64, as before, found 'int'"),
    ],
)
def test_what_cannot_be_recorded_is_refused_and_changes_nothing(arguments: tuple[Any, ...], fault: str) -> None:
    recorder = MetricRecorder()
    recorder.record("loss", 0.5)
    with pytest.raises(MetricStandardError, match=fault):
        recorder.record(*arguments)
    assert recorder.finish().series == run_of(loss=[0.5]).series


def test_what_has_no_place_in_a_file_is_refused_when_it_is_recorded() -> None:
    torch = pytest.importorskip("torch")
    for value in (10**5000, torch.zeros(1, device="meta"), torch.ones(2).to_sparse()):
        with pytest.raises(MetricStandardError, match="metric 'm', step 0: expected "):
            MetricRecorder().record("m", value)


def test_steps_count_up_from_the_highest() -> None:
    recorder = MetricRecorder()
    recorder.record("loss", 1.0, 5)
    recorder.record("loss", 2.0)
    recorder.record("loss", 3.0, 2)
    assert list(recorder.finish().series["loss"]) == [2, 5, 6]


# --- comparing --------------------------------------------------------------------------------------------------------


def test_the_planted_ulp_is_found_at_its_step() -> None:
    losses = [3.5, 2.25, 1.125, 0.7]
    off = [3.5, 2.25, math.nextafter(1.125, 2), 0.7]
    found = compare_metrics(run_of(loss=losses, norm=losses), run_of(loss=off, norm=losses))
    assert not found.passed
    (difference,) = found.differences
    assert (difference.metric, difference.step, difference.index, difference.ulps) == ("loss", 2, None, 1)
    assert found.text().splitlines() == [
        "1 difference from the standard, the first at step 2 (8 compared)",
        "  loss, step 2: 0x1.2000000000000p+0 (1.125) became 0x1.2000000000001p+0 (1.1250000000000002), 1 ulp away",
    ]


@pytest.mark.parametrize(
    ("there", "here", "text"),
    [
        (0.0, -0.0, "another sign of zero"),
        (float_of(0x7FF8000000000000), float_of(0x7FF8000000000001), "nan:0x7ff8000000000001"),
        (1.0, math.inf, "became inf"),
        (1, 1.0, "dtype int became float64"),
        (True, 1, "dtype bool became int"),
    ],
)
def test_what_compares_equal_but_has_other_bits_differs(there: Any, here: Any, text: str) -> None:
    assert compare_metrics(run_of(m=[there]), run_of(m=[there])).passed
    found = compare_metrics(run_of(m=[there]), run_of(m=[here]))
    assert [difference.step for difference in found.differences] == [0]
    assert text in found.text()


def test_metrics_and_steps_that_one_side_lacks_differ() -> None:
    found = compare_metrics(run_of(a=[1.0, 2.0], b=[1.0]), run_of(a=[1.0, 2.0, 3.0], c=[1.0]))
    assert [(d.metric, d.step, d.what) for d in found.differences] == [
        ("b", None, "missing"),
        ("c", None, "extra"),
        ("a", 2, "extra"),
    ]
    assert found.first is not None
    assert found.first.step == 2
    back = compare_metrics(run_of(a=[1.0, 2.0, 3.0]), run_of(a=[1.0, 2.0]))
    assert [str(difference) for difference in back.differences] == [
        "a, step 2: missing: the standard has 0x1.8000000000000p+1 (3.0)"
    ]


def test_a_tensor_differs_by_shape_or_at_an_element() -> None:
    numpy = pytest.importorskip("numpy")
    there = numpy.ones((2, 3), numpy.float32)
    here = there.copy()
    here[1, 0] = here[1, 2] = numpy.nextafter(numpy.float32(1), numpy.float32(0))
    found = compare_metrics(run_of(p=[there]), run_of(p=[here]))
    (difference,) = found.differences
    assert (difference.index, difference.ulps, difference.elements) == (3, 1, 2)
    assert "shape (2, 3) became (3, 2)" in compare_metrics(run_of(p=[there]), run_of(p=[there.reshape(3, 2)])).text()


def tolerated(run: Metrics, **tolerance: Any) -> Metrics:
    return Metrics(run.series, {"m": Tolerance(reason="adds with atomics", **tolerance)})


@pytest.mark.parametrize(
    ("tolerance", "there", "here", "passes"),
    [
        ({"ulps": 1}, 1.0, math.nextafter(1.0, 2), True),
        ({"ulps": 1}, 1.0, 1.0 + 2**-51, False),
        ({"ulps": 1}, 0.0, -0.0, True),
        ({"absolute": 0.5}, 1.0, 1.5, True),
        ({"absolute": 0.5}, 1.0, 1.75, False),
        ({"relative": 0.25}, -4.0, -5.0, True),
        ({"relative": 0.25}, -4.0, -5.5, False),
        ({"absolute": 1.0}, 3, 4, True),
        ({"absolute": 1.0}, math.inf, math.inf, True),
        ({"absolute": 1.0}, math.inf, 1.0, False),
        ({"ulps": 10**18}, 1.0, math.nan, False),
        ({"ulps": 1}, sys.float_info.max, math.inf, False),
        ({"absolute": 0.5}, 2**53, 2**53 + 1, False),
        ({"absolute": 0.5}, 10**400, 10**400 + 1, False),
        ({"absolute": 1.0}, 10**400, 10**400 + 1, True),
        ({"relative": 2**-53}, 2**60, 2**60 + 129, False),
        ({"relative": 2**-53}, 2**60, 2**60 + 128, True),
        ({"absolute": 1e300}, math.nan, 1.0, False),
    ],
)
def test_a_tolerance_allows_so_much(tolerance: dict[str, Any], there: Any, here: Any, passes: bool) -> None:
    found = compare_metrics(tolerated(run_of(m=[there]), **tolerance), run_of(m=[here]))
    assert found.passed is passes
    assert found.tolerated == int(passes and value_of(there) != value_of(here))


def test_a_tolerance_is_of_one_metric_alone() -> None:
    there, here = run_of(m=[1.0], n=[1.0]), run_of(m=[1.5], n=[1.5])
    found = compare_metrics(tolerated(there, absolute=1.0), here)
    assert [difference.metric for difference in found.differences] == ["n"]


@pytest.mark.parametrize(
    "fields",
    [
        {"reason": ""},
        {"reason": "x"},
        {"reason": "x", "ulps": -1},
        {"reason": "x", "ulps": 1.0},
        {"reason": "x", "absolute": math.inf},
        {"reason": "x", "absolute": 10**400},
        {"reason": "x", "relative": math.nan},
        {"reason": "x", "relative": "1"},
    ],
)
def test_a_tolerance_without_meaning_or_reason_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(MetricStandardError, match="a tolerance: "):
        Tolerance(**{"ulps": 0, **fields})


def test_a_declared_tolerance_has_to_be_that_of_the_standard() -> None:
    recorder = MetricRecorder()
    recorder.record("m", 1.0)
    recorder.tolerate("m", ulps=2, reason="adds with atomics")
    run = recorder.finish()
    with pytest.raises(MetricStandardError, match="none: bit for bit, found 2 ulp"):
        compare_metrics(run_of(m=[1.0]), run)
    with pytest.raises(MetricStandardError, match="found 2 ulp"):
        compare_metrics(tolerated(run_of(m=[1.0]), ulps=1), run)
    assert compare_metrics(tolerated(run_of(m=[1.0]), ulps=2), run).passed
    with pytest.raises(MetricStandardError, match="expected one, 2 ulp"):
        recorder.tolerate("m", ulps=3, reason="adds with atomics")
    recorder.tolerate("never", ulps=2, reason="x")
    with pytest.raises(MetricStandardError, match="'never': tolerance: expected a metric that is recorded"):
        recorder.finish()


# --- the file ---------------------------------------------------------------------------------------------------------


def everything() -> Metrics:
    torch = pytest.importorskip("torch")
    recorder = MetricRecorder()
    for index, bits in enumerate(EDGES["float64"]):
        recorder.record("edges", float_of(bits), 3 * index)
    recorder.record('loss "odd" \u00e9', torch.tensor(2.5, dtype=torch.bfloat16))
    recorder.record("log-probs", torch.linspace(-1, 1, 6).reshape(2, 3))
    recorder.record("log-probs", torch.empty(0, 4))
    recorder.record("tokens", 2**70)
    recorder.record("skipped", False)
    recorder.tolerate("log-probs", ulps=1, reason="adds with atomics")
    return recorder.finish()


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    run = everything()
    path = tmp_path / "a" / "b.json"
    write_metrics(path, run)
    back = read_metrics(path)
    assert (back.series, back.tolerances, back.provenance) == (run.series, run.tolerances, run.provenance)
    assert {"date", "device", "python", "machine"} <= set(back.provenance)
    write_metrics(tmp_path / "again.json", back)
    assert (tmp_path / "again.json").read_bytes() == path.read_bytes()
    assert '[0, "0x0.0p+0"],\n[3, "-0x0.0p+0"],\n' in path.read_text()
    assert [file.name for file in path.parent.iterdir()] == ["b.json"]


GOOD = {
    "format": "triton-tuning metrics",
    "version": 1,
    "provenance": {"date": "2026-01-01"},
    "tolerances": {},
    "metrics": {"loss": {"dtype": "float32", "points": [[0, "0x1.0000000000000p+0"], [2, "inf"]]}},
}


def loss(dtype: Any = "float32", points: Any = ((0, "inf"),)) -> dict[str, Any]:
    return {**GOOD, "metrics": {"loss": {"dtype": dtype, "points": [list(point) for point in points]}}}


@pytest.mark.parametrize(
    ("document", "where", "expected"),
    [
        ([], "$", "an object"),
        ({}, "$", "the members format, version"),
        ({**GOOD, "more": 1}, "$", "the members format, version"),
        ({**GOOD, "format": "x"}, "$.format", "'triton-tuning metrics'"),
        ({**GOOD, "version": 2}, "$.version", "1, the only one"),
        ({**GOOD, "version": True}, "$.version", "1, the only one"),
        ({**GOOD, "provenance": {"date": 1}}, "$.provenance.date", "a text"),
        ({**GOOD, "metrics": []}, "$.metrics", "an object"),
        ({**GOOD, "metrics": {"loss": {"dtype": "float32"}}}, "$.metrics.loss", "the members dtype, points"),
        (loss(dtype="float8"), "$.metrics.loss.dtype", "one of float64"),
        (loss(dtype=[]), "$.metrics.loss.dtype", "one of float64"),
        (loss(points=()), "$.metrics.loss.points", "at least one"),
        (loss(points=[[0]]), "$.metrics.loss.points[0]", "[step, value]"),
        (loss(points=[[1, "inf"], [1, "inf"]]), "$.metrics.loss.points[1][0]", "a step above 1"),
        (loss(points=[[-1, "inf"]]), "$.metrics.loss.points[0][0]", "a step above -1"),
        (loss(points=[["0", "inf"]]), "$.metrics.loss.points[0][0]", "a step above -1"),
        (loss(points=[[0, "1.5"]]), "$.metrics.loss.points[0][1]", "float.hex"),
        (loss(points=[[0, "0x1.0000000000001p+0"]]), "$.metrics.loss.points[0][1]", "a float32"),
        (loss(points=[[0, [2], ["inf"]]]), "$.metrics.loss.points[0][2]", "a list of 2 values"),
        (loss(points=[[0, [-2], ["inf"]]]), "$.metrics.loss.points[0][1]", "a shape"),
        (loss(points=[[0, [2], ["inf", 7]]]), "$.metrics.loss.points[0][2][1]", "float.hex"),
        ({**GOOD, "tolerances": {"loss": {}}}, "$.tolerances.loss", "the members reason"),
        (
            {**GOOD, "tolerances": {"loss": {"reason": "", "ulps": 1, "absolute": 0, "relative": 0}}},
            "$.tolerances.loss.reason",
            "why",
        ),
        (
            {**GOOD, "tolerances": {"other": {"reason": "x", "ulps": 1, "absolute": 0, "relative": 0}}},
            "$.tolerances.other",
            "a metric of this file",
        ),
    ],
)
def test_a_bad_file_is_one_error_that_names_the_place(document: Any, where: str, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text(json.dumps(document))
    with pytest.raises(MetricStandardError) as caught:
        read_metrics(path)
    assert (caught.value.file, caught.value.where) == (str(path), where)
    assert expected in str(caught.value.expected)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith(f"{path}: {where}: expected ")


@pytest.mark.parametrize(
    "data", [b"", b"{", b"\xff\xfe", b'{"a": NaN}', b'{"a": 1, "a": 2}', b"[" * 100_000, b"9" * 5000]
)
def test_what_is_no_json_is_one_error(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_bytes(data)
    with pytest.raises(MetricStandardError, match=r"m\.json: \$: expected "):
        read_metrics(path)


def test_the_good_file_of_these_tests_is_good(tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text(json.dumps(GOOD))
    assert list(read_metrics(tmp_path / "m.json").series["loss"]) == [0, 2]
    with pytest.raises(MetricStandardError, match="No such file"):
        read_metrics(tmp_path / "other.json")
    with pytest.raises(MetricStandardError, match="expected a place to write to"):
        write_metrics(tmp_path / "m.json" / "below.json", run_of(loss=[1.0]))


# --- recording a standard ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "refused"), [("true", True), ("1", True), ("x", True), ("0", False), ("", False)])
def test_a_standard_is_not_recorded_under_ci(
    value: str, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CI", value)
    path = tmp_path / "s.json"
    if refused:
        with pytest.raises(MetricStandardError, match=f"found CI={value}"):
            record_standard(path, run_of(loss=[1.0]))
    else:
        record_standard(path, run_of(loss=[1.0]))
    assert path.exists() is not refused


@pytest.mark.parametrize("name", CI_VARIABLES)
def test_every_ci_system_is_known_by_its_own_variable(name: str) -> None:
    with pytest.raises(MetricStandardError, match=f"found {name}=7") as caught:
        refuse_under_ci({name: "7"})
    assert caught.value.expected == f"{name} to be unset"
    refuse_under_ci({name: "false"})


def test_what_is_no_regular_file_or_too_large_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(MetricStandardError, match=r"pipe: \$: expected a regular file"):
        read_metrics(tmp_path / "pipe")
    with pytest.raises(MetricStandardError, match="found a folder"):
        read_metrics(tmp_path)
    write_metrics(tmp_path / "m.json", run_of(m=[1.0]))
    monkeypatch.setattr("tuning.bitexact.metrics_file.MAX_BYTES", 100)
    with pytest.raises(MetricStandardError, match="of at most 100 bytes"):
        read_metrics(tmp_path / "m.json")


def test_nothing_beside_nothing_is_no_proof(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "m.json")
    write_metrics(file, run_of())
    assert main(["metrics", "compare", file, file]) == 1
    assert "expected at least one metric to compare, found none" in " ".join(capsys.readouterr().err.split())
    assert not compare_metrics(run_of(), run_of(m=[1.0])).passed


def test_nothing_is_no_standard(tmp_path: Path) -> None:
    with pytest.raises(MetricStandardError, match="at least one metric"):
        record_standard(tmp_path / "s.json", run_of())
    assert list(tmp_path.iterdir()) == []


def document(capsys: Any, *argv: str) -> tuple[int, Any]:
    code = main([*argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_the_command_compares_shows_and_records(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    standard, same, off = (str(tmp_path / name) for name in ("s.json", "same.json", "off.json"))
    write_metrics(standard, tolerated(run_of(m=[1.0, 2.0], n=[1.0]), ulps=1))
    write_metrics(same, run_of(m=[math.nextafter(1.0, 2), 2.0], n=[1.0]))
    write_metrics(off, run_of(m=[1.0, 2.0], n=[math.nextafter(1.0, 2)]))
    code, found = document(capsys, "metrics", "compare", standard, same)
    assert (code, found["passed"], found["tolerated"]) == (0, True, 1)
    code, found = document(capsys, "metrics", "compare", standard, off)
    assert (code, found["first_step"], found["differences"][0]["ulps"]) == (1, 0, 1)
    assert main(["metrics", "compare", standard, off]) == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "n, step 0: 0x1.0000000000000p+0 (1.0) became 0x1.0000000000001p+0 (1.0000000000000002), 1 ulp away" in shown
    code, found = document(capsys, "metrics", "show", standard)
    assert (code, [row["metric"] for row in found["metrics"]]) == (0, ["m", "n"])
    assert main(["metrics", "show", standard]) == 0
    assert "1 ulp (adds with atomics)" in capsys.readouterr().out

    before = Path(standard).read_bytes()
    monkeypatch.setenv("CI", "true")
    assert main(["metrics", "record", off, standard]) == 1
    assert "CI=true" in capsys.readouterr().err
    assert Path(standard).read_bytes() == before
    monkeypatch.delenv("CI")
    code, found = document(capsys, "metrics", "record", off, standard)
    assert (code, len(found["changed"]["differences"])) == (0, 1)
    assert read_metrics(standard).tolerances == tolerated(run_of(m=[1.0]), ulps=1).tolerances
    assert main(["metrics", "compare", standard, off]) == 0
    assert main(["metrics", "compare", standard, str(tmp_path / "none.json")]) == 1
    with pytest.raises(SystemExit, match="2"):
        main(["metrics"])


# --- plots ------------------------------------------------------------------------------------------------------------


def test_a_plot_is_written_in_each_format(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    numpy = pytest.importorskip("numpy")
    there = {"a $x": [1.0, 2.0, math.inf], "p": [numpy.ones(3)], "gone": [1.0], "\ud800": [10**400]}
    here = {"a $x": [1.0, math.nextafter(2.0, 3), math.nan], "p": [numpy.array([1.0, 1.0, 2.0])], "new": [1.0]}
    here["\ud800"] = [10**400 + 1]
    standard, run = str(tmp_path / "s.json"), str(tmp_path / "r.json")
    write_metrics(standard, run_of(**there))
    write_metrics(run, run_of(**here))
    for suffix, starts in ((".png", b"\x89PNG"), (".svg", b"<?xml"), (".html", b"<!doctype html>")):
        file = tmp_path / f"plot{suffix}"
        assert main(["metrics", "compare", standard, run, "--plot", str(file)]) == 1
        assert file.read_bytes().startswith(starts)
    text = (tmp_path / "plot.html").read_text()
    assert "<svg" in text
    assert "a $x, step 1: 0x1.0000000000000p+1 (2.0) became 0x1.0000000000001p+1 (2.0000000000000004), 1 ulp" in text
    assert main(["metrics", "compare", standard, run, "--plot", str(tmp_path / "plot.pdf")]) == 1
    assert "expected a name that ends in .html, .png, .svg, found .pdf" in capsys.readouterr().err


def test_a_plot_without_matplotlib_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tuning.bitexact.metrics_plot import plot_metrics

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    run = run_of(m=[1.0])
    with pytest.raises(MetricStandardError, match=r"pip install 'triton-tuning\[plot\]'"):
        plot_metrics(tmp_path / "p.png", run, run, compare_metrics(run, run))
    assert list(tmp_path.iterdir()) == []


# --- the pytest plugin ------------------------------------------------------------------------------------------------

SUITE = """
import os
import pytest

OFF = float(os.environ.get("OFF", "0"))

@pytest.mark.parametrize("kind", ["a", "b/c"])
def test_training(metric_standard, kind):
    for step in range(4):
        metric_standard.record("loss", 1.0 + (OFF if step == 2 else 0.0), step)
    metric_standard.record("done", True)

class TestOther:
    def test_training(self, metric_standard):
        metric_standard.variant("cpu")
        metric_standard.tolerate("loss", ulps=1, reason="adds with atomics")
        metric_standard.record("loss", 1.0 + OFF)

def test_without(): pass
"""


def pytest_run(folder: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name not in (*CI_VARIABLES, "PYTEST_ADDOPTS")}
    inherited |= {"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tuning.bitexact.pytest_plugin"]
    return subprocess.run(
        [*command, *arguments],
        cwd=folder,
        env=inherited | environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_fixture_records_compares_and_finds_the_planted_ulp(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "test_it.py").write_text(SUITE)
    done = pytest_run(tmp_path)
    assert done.returncode == 1
    assert "3 failed, 1 passed" in done.stdout
    assert "record it with pytest --record-metric-standards" in done.stdout
    assert not (tmp_path / "standards").exists()

    done = pytest_run(tmp_path, "--record-metric-standards", CI="true")
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert "CI=true" in done.stderr
    assert not (tmp_path / "standards").exists()

    done = pytest_run(tmp_path, "--record-metric-standards")
    assert done.returncode == 0, done.stdout
    files = sorted(path.name for path in (tmp_path / "standards" / "test_it").iterdir())
    assert len(files) == 3
    assert {"TestOther.test_training.cpu.json", "test_training[a].json"} <= set(files)
    assert all(name in done.stdout for name in files)

    assert pytest_run(tmp_path, CI="true").returncode == 0
    done = pytest_run(tmp_path, "--metric-plots", "plots", OFF=str(2**-52))
    assert "2 failed, 2 passed" in done.stdout, "one ulp is within the tolerance of the third"
    assert "error" not in done.stdout.splitlines()[-1]
    difference = "loss, step 2: 0x1.0000000000000p+0 (1.0) became 0x1.0000000000001p+0 (1.0000000000000002), 1 ulp away"
    assert done.stdout.count(difference) == 2, "once for each test that fails"
    assert "During handling" not in done.stdout
    again = "if the change is meant, record it with pytest --record-metric-standards 'test_it.py::test_training[a]'"
    assert again in done.stdout
    assert len(list((tmp_path / "plots").iterdir())) == 2


MORE = """
import pytest

def test_records_nothing(metric_standard): pass

def test_fails_itself(metric_standard):
    metric_standard.record("loss", 1.0)
    assert 1 == 2

def test_skips(metric_standard):
    metric_standard.record("loss", 1.0)
    pytest.skip("not here")

def test_bad_value(metric_standard):
    metric_standard.record("loss", "1.0")
"""


def test_what_fails_or_skips_by_itself_records_nothing(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(MORE)
    done = pytest_run(tmp_path, "--record-metric-standards")
    assert "3 failed, 1 skipped" in done.stdout
    assert "metric_standard: expected at least one metric to be recorded, found none" in done.stdout
    assert "assert 1 == 2" in done.stdout
    assert "metric 'loss', step 0: expected a number" in done.stdout
    assert not (tmp_path / "standards").exists()


DYNAMIC = """
import unittest
import pytest

def test_plain(metric_standard): metric_standard.record("loss", 1.0)

def test_dynamic(request): request.getfixturevalue("metric_standard").record("loss", 1.0)

@pytest.fixture
def wrapped(metric_standard): return metric_standard

def test_wrapped(wrapped): wrapped.record("loss", 1.0)

@pytest.fixture
def wrapped_dynamically(request): return request.getfixturevalue("metric_standard")

def test_wrapped_dynamically(wrapped_dynamically): wrapped_dynamically.record("loss", 1.0)

class Case(unittest.TestCase):
    @pytest.fixture(autouse=True)
    def _keep(self, metric_standard): self.standard = metric_standard
    def test_case(self): self.standard.record("loss", 1.0)

@pytest.fixture
def late(wrapped):
    yield
    wrapped.record("late", 1.0)

def test_late(wrapped, late): wrapped.record("loss", 1.0)
"""


def test_however_the_fixture_is_asked_for_it_compares(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(DYNAMIC)
    done = pytest_run(tmp_path)
    assert "6 failed, 1 error" in done.stdout
    assert done.stdout.count("expected a standard of this test's metrics, found none") >= 6
    done = pytest_run(tmp_path, "--record-metric-standards", "-k", "not late")
    assert done.returncode == 0, done.stdout
    assert len(list((tmp_path / "standards" / "test_it").iterdir())) == 5
    (tmp_path / "test_it.py").write_text(DYNAMIC.replace('"loss", 1.0', '"loss", 2.0'))
    assert "5 failed" in pytest_run(tmp_path, "-k", "not late").stdout


def test_loading_the_plugin_loads_neither_torch_nor_triton() -> None:
    program = "import sys, tuning.bitexact.pytest_plugin\nprint({'torch', 'triton', 'matplotlib'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
