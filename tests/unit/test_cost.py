"""The cost of deterministic mode by range: what is timed, how two sides are joined, and the gate."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import pytest

from tuning.bitexact.cost import RangeTime, RangeTimes, measure_ranges, timed_ranges
from tuning.bitexact.cost_table import CostGate, CostRow, join_ranges, read_ranges, write_ranges
from tuning.cli import main
from tuning.errors import CostError

torch = pytest.importorskip("torch")

each_clock = pytest.mark.parametrize("clock", ["events", "profiler"])


def work(milliseconds: float) -> None:
    torch.ones(4).sum()
    time.sleep(milliseconds / 1e3)


# --- timing -----------------------------------------------------------------------------------------------------------


@each_clock
def test_ranges_are_timed_by_what_marks_them(clock: Any) -> None:
    def step() -> None:
        with torch.cuda.nvtx.range("outer"):
            work(4)
            for _ in range(2):
                with torch.profiler.record_function("inner"):
                    work(4)
        handle = torch.cuda.nvtx.range_start("started")
        torch.cuda.nvtx.range_push("pushed")
        work(4)
        torch.cuda.nvtx.range_pop()
        torch.cuda.nvtx.range_end(handle)

    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError):  # NVTX itself is not there: the timer stands in for it
            step()
    found = measure_ranges(step, side="default", steps=3, warmup=0, clock=clock)
    assert (found.side, found.source, found.steps) == ("default", clock, 3)
    calls = {name: found.ranges[name].calls for name in ("step", "outer", "inner", "started", "pushed")}
    assert calls == {"step": 1, "outer": 1, "inner": 2, "started": 1, "pushed": 1}
    median = {name: times.host[0] for name, times in found.ranges.items() if times.host is not None}
    assert median["step"] >= median["outer"] >= median["inner"] >= 8
    assert median["outer"] >= 12
    assert median["started"] >= median["pushed"] >= 4
    for times in found.ranges.values():
        assert times.host is not None
        assert times.host[1] <= times.host[0] <= times.host[2]
        assert (times.device is None) == (not torch.cuda.is_available())


@each_clock
def test_what_was_patched_is_put_back(clock: Any) -> None:
    places = [(torch.cuda.nvtx, name) for name in ("range_push", "range_pop", "range_start", "range_end")]
    places += [(torch.autograd.profiler.record_function, name) for name in ("__enter__", "__exit__")]
    before = [getattr(owner, name) for owner, name in places]

    def fail() -> None:
        assert [getattr(owner, name) for owner, name in places] != before
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        measure_ranges(fail, side="x", warmup=0, clock=clock)
    assert [getattr(owner, name) for owner, name in places] == before


def test_a_range_that_one_step_skips_took_no_time_in_it() -> None:
    with timed_ranges() as timer:
        for number in range(3):
            with timer.step():
                if number == 0:
                    with torch.profiler.record_function("seldom"):
                        work(2)
    seldom = timer.finish("x").ranges["seldom"]
    assert seldom.calls == pytest.approx(1 / 3)
    assert seldom.host is not None
    assert seldom.host[0] == seldom.host[1] == 0 < seldom.host[2]


@each_clock
def test_a_range_that_the_program_names_step_is_another_than_ours(clock: Any) -> None:
    def step() -> None:
        work(3)
        for _ in range(2):
            with torch.profiler.record_function("step"):
                work(1)

    found = measure_ranges(step, side="x", steps=2, warmup=0, clock=clock)
    assert found.steps == 2
    assert {name: times.calls for name, times in found.ranges.items()} == {"step": 1, "step (the program's own)": 2}
    own, theirs = (found.ranges[name].host for name in ("step", "step (the program's own)"))
    assert own is not None
    assert theirs is not None
    assert 2 <= theirs[0] < own[0]


def test_a_range_inside_a_capture_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now = False
    monkeypatch.setattr("tuning.bitexact.cost.capturing", lambda: now)
    with timed_ranges() as timer, timer.step(), torch.profiler.record_function("around"):
        for name, at_its_end in (("into it", True), ("within", True), ("out of it", False)):
            with torch.profiler.record_function(name):
                now = at_its_end
    assert set(timer.finish("x").ranges) == {"step", "around"}


def test_ranges_entered_on_other_threads_and_the_optimizers_count() -> None:
    import threading

    weight = torch.nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step() -> None:
        def mark() -> None:
            with torch.profiler.record_function("elsewhere"):
                work(1)

        thread = threading.Thread(target=mark)
        thread.start()
        thread.join()
        weight.sum().backward()
        optimizer.step()

    found = measure_ranges(step, side="x", steps=2)
    assert {"elsewhere", "Optimizer.step#SGD.step"} <= set(found.ranges)


def test_nothing_timed_is_an_error() -> None:
    with timed_ranges() as timer, pytest.raises(CostError, match="block of timed_ranges to be left"):
        timer.finish("x")
    with pytest.raises(CostError, match="at least one step"):
        timer.finish("x")
    with pytest.raises(CostError, match="clock: expected events or profiler, found 'wall'"):
        timed_ranges("wall")  # type: ignore[arg-type]


def test_the_slower_side_is_seen(tmp_path: Path) -> None:
    """Two sides for real: one range of the second takes 30 ms more, and the gate finds that one."""
    for side, extra in (("default", 0), ("deterministic", 30)):

        def step(extra: float = extra) -> None:
            with torch.profiler.record_function("mixer"):
                work(2 + extra)
            with torch.profiler.record_function("attention"):
                work(2)

        write_ranges(tmp_path / f"{side}.csv", measure_ranges(step, side=side, steps=3, warmup=1))
    table = join_ranges(*(read_ranges(tmp_path / f"{side}.csv") for side in ("default", "deterministic")))
    assert table.sides == ("default", "deterministic")
    assert {row.name for row in table.rows[:2]} == {"step", "mixer"}
    gate = CostGate(lost=15)
    assert sorted(problem.partition(":")[0] for problem in gate.problems(table)) == ["mixer", "step"]


# --- the table --------------------------------------------------------------------------------------------------------


def side_of(name: str, device: bool = False, **milliseconds: float) -> RangeTimes:
    def made(value: float) -> RangeTime:
        times = (value, value, value)
        return RangeTime(1, None if device else times, times if device else None)

    return RangeTimes(name, "events", "", 1, {key: made(value) for key, value in milliseconds.items()})


def test_rows_come_by_the_time_lost_and_those_of_one_side_last() -> None:
    table = join_ranges(side_of("a", x=1, y=5, z=3, gone=9), side_of("b", x=2, y=9, z=2.5, new=9))
    assert [(row.name, row.lost, row.ratio) for row in table.rows] == [
        ("y", 4, 1.8),
        ("x", 1, 2),
        ("z", -0.5, pytest.approx(2.5 / 3)),
        ("gone", None, None),
        ("new", None, None),
    ]
    more = table.with_row(CostRow("fill_uninitialized_memory", 1, 3))
    assert [row.name for row in more.rows][:3] == ["y", "fill_uninitialized_memory", "x"]


def test_sides_that_cannot_be_compared_are_refused() -> None:
    with pytest.raises(CostError, match="of the device on both sides or of the host on both"):
        join_ranges(side_of("a", device=True, x=1), side_of("b", x=1))
    here, there = side_of("a", x=1), side_of("b", x=1)
    with pytest.raises(CostError, match="expected two sides of one device, found cpu and gpu"):
        join_ranges(RangeTimes("a", "events", "cpu", 1, here.ranges), RangeTimes("b", "events", "gpu", 1, there.ranges))


@pytest.mark.parametrize(
    ("gate", "problems"),
    [
        (CostGate(ratio=2), []),
        (CostGate(ratio=1.9), ["x: 2.000 times as long, allowed 1.9 times"]),
        (CostGate(ratio=1.5, ranges=("y",)), ["y: 1.800 times as long, allowed 1.5 times"]),
        (CostGate(ratio=1.5, ignore_below=3), ["y: 1.800 times as long, allowed 1.5 times"]),
        (CostGate(lost=0.9), ["y: 4.000 ms lost, allowed 0.9 ms", "x: 1.000 ms lost, allowed 0.9 ms"]),
        (CostGate(lost=4), []),
        (CostGate(lost=0, ranges=("z",)), []),
    ],
)
def test_the_gate(gate: CostGate, problems: list[str]) -> None:
    assert gate.problems(join_ranges(side_of("a", x=1, y=5, z=3), side_of("b", x=2, y=9, z=2.5))) == problems


def test_a_range_that_one_side_lacks_is_a_problem_unless_it_is_allowed() -> None:
    table = join_ranges(side_of("a", step=1, fwd=0.5, gone=2), side_of("b", step=1, fwd=0.5, fill=50))
    lines = ["fill: b alone has it, 50.000 ms", "gone: a alone has it, 2.000 ms"]
    assert CostGate(ratio=1.01, lost=0.1).problems(table) == lines
    assert (
        CostGate(ratio=1.01, ignore_below=3).problems(join_ranges(side_of("a", x=9, gone=2), side_of("b", x=9))) == []
    )
    assert CostGate(ratio=1.01, one_sided=("fill", "gone")).problems(table) == []
    assert CostGate(ratio=1.01, ranges=("step",)).problems(table) == []
    renamed = join_ranges(side_of("a", step=1), side_of("b", steps=5))
    assert len(CostGate(ratio=1.01).problems(renamed)) == 2


@pytest.mark.parametrize(
    "limits", [{}, {"ignore_below": 1.0}, {"ratio": math.nan}, {"lost": -1.0}, {"lost": 1.0, "ignore_below": math.inf}]
)
def test_a_gate_without_a_limit_is_refused(limits: dict[str, float]) -> None:
    with pytest.raises(CostError, match="gate: "):
        CostGate(**limits)  # type: ignore[arg-type]


def test_a_gate_that_would_judge_nothing_is_an_error() -> None:
    table = join_ranges(side_of("a", x=1, gone=1), side_of("b", x=2))
    for name, why in (("gone", "one side alone has it"), ("other", "neither has it")):
        with pytest.raises(CostError, match=why):
            CostGate(lost=1, ranges=(name,)).problems(table)
    with pytest.raises(CostError, match="found none"):
        CostGate(lost=1, ignore_below=5).problems(table)
    assert CostGate(ratio=5).problems(join_ranges(side_of("a", x=0), side_of("b", x=1))) == [
        "x: from nothing, allowed 5 times"
    ]


# --- files ------------------------------------------------------------------------------------------------------------


def test_a_file_gives_back_what_was_written(tmp_path: Path) -> None:
    ranges = {'a, "b"': RangeTime(1.5, (1.0, 0.5, 2.0), None), "step": RangeTime(1, None, (3.0, 2.0, 4.0))}
    times = RangeTimes("deterministic", "profiler", "NVIDIA H200", 7, ranges)
    write_ranges(tmp_path / "d" / "t.csv", times)
    assert read_ranges(tmp_path / "d" / "t.csv") == times
    with pytest.raises(CostError, match="expected a place to write to"):
        write_ranges(tmp_path / "d" / "t.csv" / "below.csv", times)


@pytest.mark.parametrize(
    "name",
    [
        "a\nb",
        "a\rb",
        "a\r\nb",
        "a\x0cb",
        "\x1c",
        "\x85z",
        "a\u2028b",
        "\0",
        " a ",
        "#x",
        "",
        'a,"b',
        '"',
        "-",
        "\ufeff",
    ],
)
def test_whatever_a_range_is_named_it_is_read_back(name: str, tmp_path: Path) -> None:
    times = side_of("s\n", **{name: 1.0, "other": 2.0})
    write_ranges(tmp_path / "t.csv", times)
    assert read_ranges(tmp_path / "t.csv") == times
    nsys = PROJECTION + '"mine' + name.replace('"', '""') + '",PushPop,1000000,1000000,4,1.0,1.0\n'
    (tmp_path / "proj.csv").write_bytes(nsys.encode())
    assert f"mine{name}" in read_ranges(tmp_path / "proj.csv").ranges


def test_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CostError, match="half of a surrogate pair"):
        write_ranges(tmp_path / "t.csv", side_of("s", **{"\ud800": 1.0}))


HEAD = (
    '# {"format": "triton-tuning ranges", "version": 1, "side": "a", "source": "events", "device": "", "steps": 1}\n'
    "range,calls,device_ms,device_ms_p10,device_ms_p90,host_ms,host_ms_p10,host_ms_p90\n"
)


@pytest.mark.parametrize(
    ("text", "line", "expected"),
    [
        ("", 1, "a header of triton-tuning ranges, or the columns"),
        ("a,b\n1,2\n", 1, "a header of triton-tuning ranges, or the columns"),
        ("# x\n", 1, "version 1"),
        (HEAD.replace('"version": 1', '"version": 2'), 1, "version 1"),
        (HEAD.replace('"steps": 1', '"steps": 0'), 1, "version 1"),
        (HEAD.replace('"steps": 1', '"steps": "1"'), 1, "version 1"),
        (HEAD.splitlines()[0], 2, "the columns range,calls"),
        (HEAD.replace("calls", "call"), 2, "the columns range,calls"),
        (HEAD + "x,1,,,,1\n", 3, "8 cells"),
        (HEAD + "x,1,,,,1,1,1\nx,1,,,,1,1,1\n", 4, "each range once"),
        (HEAD + "x,1,,,,1,one,1\n", 3, "a number of at least 0 in column host_ms_p10"),
        (HEAD + "x,1,,,,1,,1\n", 3, "in column host_ms_p10"),
        (HEAD + "x,1,,,,-1,1,1\n", 3, "in column host_ms"),
        (HEAD + "x,1,nan,1,1,1,1,1\n", 3, "in column device_ms"),
        (HEAD + 'x,1,,,,1,1,"1\n', 3, "CSV"),
        (HEAD + "x,1,,,,,,\n", 3, "a time of the device or of the host"),
        ("Range,Total Time (ns),Instances\n", 2, "at least one range"),
        ("Range,Total Time (ns),Instances\nx,1\n", 2, "3 cells"),
        ("Range,Total Time (ns),Instances\nx,many,1\n", 2, "in column Total Time"),
    ],
)
def test_a_bad_file_is_one_error_that_names_the_line(text: str, line: int, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(CostError) as caught:
        read_ranges(path)
    assert (caught.value.file, caught.value.line) == (str(path), line)
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_not_there_or_no_text_is_one_error(tmp_path: Path) -> None:
    with pytest.raises(CostError, match="No such file"):
        read_ranges(tmp_path / "none.csv")
    (tmp_path / "b.csv").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CostError, match="no UTF-8"):
        read_ranges(tmp_path / "b.csv")


PROJECTION = """Processing [run.sqlite] with [nvtx_gpu_proj_sum.py]...

Range,Style,Total Proj Time (ns),Total Range Time (ns),Range Instances,Proj Avg (ns),Proj Med (ns)
:step,PushPop,40000000,50000000,4,10000000.0,10000000.0
:mixer,PushPop,8000000,9000000,8,1000000.0,1000000.0
"mine:a, b",StartEnd,4000000,4000000,4,1000000.0,1000000.0
"""
SUMMARY = """Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Style,Range
75.0,"6,000,000",2,3000000.0,3000000.0,3000000,3000000,0.0,PushPop,:forward
25.0,2000000,2,1000000.0,1000000.0,1000000,1000000,0.0,PushPop,:backward
"""


def test_the_reports_of_nsys_are_read(tmp_path: Path) -> None:
    (tmp_path / "proj.csv").write_text(PROJECTION)
    found = read_ranges(tmp_path / "proj.csv")
    assert (found.side, found.source, found.steps, found.has_device_times) == ("proj", "nsys", 4, True)
    assert {name: (times.calls, (times.device or (0,))[0]) for name, times in found.ranges.items()} == {
        "step": (1, 10),
        "mixer": (2, 2),
        "mine:a, b": (1, 1),
    }
    (tmp_path / "sum.csv").write_text(SUMMARY)
    found = read_ranges(tmp_path / "sum.csv")
    assert {name: times.host for name, times in found.ranges.items()} == {
        "forward": (6, 6, 6),
        "backward": (2, 2, 2),
    }
    assert (found.steps, found.has_device_times) == (1, False)


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_the_table_and_is_a_gate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before, after = str(tmp_path / "a.csv"), str(tmp_path / "b.csv")
    write_ranges(before, side_of("default", mixer=1, attention=5))
    write_ranges(after, side_of("deterministic", mixer=4, attention=5.5))
    assert main(["cost", before, after, "-o", str(tmp_path / "table.csv")]) == 0
    out = capsys.readouterr().out
    assert [line.split()[-1] for line in out.splitlines() if line.startswith("  ")] == ["range", "mixer", "attention"]
    assert (tmp_path / "table.csv").read_text() == (
        "range,default ms,deterministic ms,lost ms,ratio\n"
        "mixer,1.000000,4.000000,3.000000,4.000000\n"
        "attention,5.000000,5.500000,0.500000,1.100000\n"
    )
    assert main(["cost", before, after, "--max-slowdown", "4"]) == 0
    capsys.readouterr()
    assert main(["cost", before, after, "--max-slowdown", "3.9"]) == 1
    assert "mixer: 4.000 times as long, allowed 3.9 times" in capsys.readouterr().out
    assert main(["cost", before, after, "--max-lost", "0.4", "--range", "attention", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["problems"] == ["attention: 0.500 ms lost, allowed 0.4 ms"]
    assert [row["range"] for row in found["rows"]] == ["mixer", "attention"]
    write_ranges(after, side_of("deterministic", mixer=1, attention=5, fill=50))
    assert main(["cost", before, after, "--max-slowdown", "4"]) == 1
    assert "fill: deterministic alone has it, 50.000 ms" in capsys.readouterr().out
    assert main(["cost", before, after, "--max-slowdown", "4", "--one-sided", "fill"]) == 0
    assert main(["cost", before, after, "--range", "mixer"]) == 2
    assert main(["cost", before, str(tmp_path / "none.csv")]) == 1
    with pytest.raises(SystemExit, match="2"):
        main(["cost", before, after, "--max-lost", "-1"])
