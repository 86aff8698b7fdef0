"""The command line: exit codes, one line for an error, one JSON document, and each command on small real input."""

from __future__ import annotations

import importlib
import json
import logging
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recordings import config, record

from tuning import __version__, cli
from tuning._commands import COMMANDS, load
from tuning._commands._common import check_archs
from tuning._merge_ties import SPREAD_LIMIT, TOLERANCE
from tuning.errors import JournalError, PolicyError, TableError
from tuning.journal import JournalWriter
from tuning.policy import AutotunePolicy
from tuning.spec import Environment, Key
from tuning.tables import Denied, Entry, TableFile, read_table, write_table

ROOT = Path(__file__).parents[2]

SOURCE = """
import os
import triton

def candidates():
    return [triton.Config({"BLOCK": block}, num_warps=4) for block in (16, 32, 64)]

@triton.autotune(configs=candidates(), key=["n"])
@triton.jit
def kernel(x_ptr, n, BLOCK):
    pass

@triton.autotune(configs=candidates(), key=["n"])
@triton.jit
def uncovered_kernel(x_ptr, n, BLOCK):
    pass

print("noise on standard output")
os.write(1, b"noise from below\\n")
"""
NOISE = ("noise on standard output", "noise from below")


def key(n: int) -> Key:
    return Key.of({"n": n}, {"x_ptr": "float16"})


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A package with two autotuned kernels, under a name of its own for each test."""
    name = f"cli_{request.node.name.partition('[')[0]}"
    (tmp_path / "site" / name).mkdir(parents=True)
    (tmp_path / "site" / name / "__init__.py").write_text("")
    (tmp_path / "site" / name / "ops.py").write_text(SOURCE)
    (tmp_path / "site" / name / "unrelated.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    importlib.invalidate_caches()
    return name


def write_journals(folder: Path, kernel: str, *, source: str | None = None, arch: str = "sm90") -> str:
    """Two ranks that disagree on one of two keys, and one candidate that fails."""
    for rank, times in enumerate(({16: 1.0, 32: 2.0, 64: None}, {16: 3.0, 32: 2.0, 64: None})):
        place = Environment(arch=arch, device="NVIDIA H200", triton="3.6.0", rank=rank, world_size=2, host="h")
        with JournalWriter(str(folder / "run"), place) as writer:
            writer.write(record(times, kernel=kernel, source=source, key=key(64), arch=arch))
            writer.write(record({16: 2.0, 32: 1.0}, kernel=kernel, source=source, key=key(128), arch=arch))
    return str(folder)


@pytest.fixture
def journals(tmp_path: Path, package: str) -> str:
    return write_journals(tmp_path / "journals", f"{package}.ops.kernel")


@pytest.fixture
def tables(tmp_path: Path, journals: str) -> str:
    assert cli.main(["merge", journals, "-o", str(tmp_path / "tables"), "--date", "2026-01-31"]) == 0
    return str(tmp_path / "tables")


def run_json(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> Any:
    """The document that a command prints, which must be all that it prints."""
    capsys.readouterr()
    assert cli.main([*argv, "--json"]) == code
    return json.loads(capsys.readouterr().out)


def error_of(capsys: pytest.CaptureFixture[str], *argv: str, code: int) -> str:
    """The one line on standard error."""
    capsys.readouterr()
    try:
        found: Any = cli.main(list(argv))
    except SystemExit as exit:
        found = exit.code
    written = capsys.readouterr()
    assert found == code
    assert written.out == ""
    *usage, line = [line for line in written.err.splitlines() if line not in NOISE]
    assert not usage or usage[0].startswith("usage: triton-tuning")
    return line


# --- the frame --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_help_a_summary_and_a_place_in_the_list(name: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="0"):
        cli.main([name, "--help"])
    text = capsys.readouterr().out
    assert text.startswith(f"usage: triton-tuning {name}")
    assert (load(name).__doc__ or "").strip().splitlines()[0] in text
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--help"])
    assert load(name).SUMMARY.partition(" ")[0] in capsys.readouterr().out


def test_each_module_of_a_command_is_registered():
    files = {path.stem for path in (ROOT / "tuning" / "_commands").glob("[!_]*.py")}
    assert files == {str(vars(load(name))["__name__"]).rpartition(".")[2] for name in COMMANDS}


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"triton-tuning {__version__}\n"


@pytest.mark.parametrize(
    "argv", [[], ["no_such_command"], ["merge"], ["list"], ["merge", "x", "-o", "y", "--rule", "z"]]
)
def test_a_wrong_call_exits_with_2(argv: list[str], capsys: pytest.CaptureFixture[str]):
    assert "error: " in error_of(capsys, *argv, code=2)


def raising(error: BaseException) -> Any:
    def run(options: Any, console: Any) -> int:
        raise error

    return run


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (PolicyError("field: wrong"), 2, "triton-tuning: error: field: wrong"),
        (TableError("tables/x.json:\n  broken"), 1, "triton-tuning: error: tables/x.json: broken"),
        (KeyboardInterrupt(), 130, "triton-tuning: interrupted"),
    ],
)
def test_an_error_of_ours_is_one_line_and_a_code(
    error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("tuning._commands.report.run", raising(error))
    assert error_of(capsys, "report", "x", code=code) == said


def test_a_fault_of_the_program_is_not_hidden(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tuning._commands.report.run", raising(ZeroDivisionError("ours")))
    with pytest.raises(ZeroDivisionError):
        cli.main(["report", "x"])


def test_warnings_of_the_library_are_lines_on_standard_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def run(options: Any, console: Any) -> int:
        logging.getLogger("tuning.inventory").warning("%s is odd", "this")
        return 0

    monkeypatch.setattr("tuning._commands.report.run", run)
    before = list(logging.getLogger("tuning").handlers)
    assert cli.main(["report", "x"]) == 0
    assert capsys.readouterr().err == "triton-tuning: warning: this is odd\n"
    assert logging.getLogger("tuning").handlers == before


def process(*argv: str, **options: Any) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    command = [sys.executable, "-m", "tuning", *argv]
    return subprocess.Popen(command, env=environment, text=True, stderr=subprocess.PIPE, **options)


def test_a_reader_that_goes_away_ends_it_quietly(tmp_path: Path):
    place = Environment(arch="sm90")
    with JournalWriter(str(tmp_path / "run"), place) as writer:
        for n in range(700):  # more text than a pipe holds
            writer.write(record({16: 1.0}, key=key(n)))
    reading, writing = os.pipe()
    running = process("report", str(tmp_path), stdout=writing)
    os.close(writing)
    os.read(reading, 1)
    os.close(reading)
    assert running.communicate(timeout=60)[1] == ""
    assert running.returncode == 141


def test_python_m_is_the_command(tmp_path: Path):
    running = process("report", str(tmp_path / "nothing"), stdout=subprocess.PIPE)
    out, err = running.communicate(timeout=60)
    assert (running.returncode, out) == (1, "")
    assert err.startswith("triton-tuning: error: no journal at ")


# --- list -------------------------------------------------------------------------------------------------------------


def test_list_shows_autotuners_and_coverage(package: str, tables: str, capsys: pytest.CaptureFixture[str]):
    capsys.readouterr()
    assert cli.main(["list", package, "--table", tables, "--arch", "sm90"]) == 0
    written = capsys.readouterr()
    assert f"{package}.ops\n  kernel  3 candidates; key n; entries sm90: 2\n" in written.out
    assert f"2 autotuners, 6 candidates in {package}\nsm90: tables cover 1 of 2 (50.0 %)\n" in written.out


def test_list_json_is_one_document_though_packages_print(package: str, tables: str, capfd: pytest.CaptureFixture[str]):
    found = run_json(capfd, "list", package, "--table", tables, "--arch", "sm90")
    assert [info["kernel"] for info in found["autotuners"]] == [
        f"{package}.ops.kernel",
        f"{package}.ops.uncovered_kernel",
    ]
    assert found["coverage"] == {"sm90": {"covered": 1, "total": 2, "percent": 50.0}}
    assert found["failed"] is False


def test_what_a_package_prints_goes_to_standard_error(package: str, capfd: pytest.CaptureFixture[str]):
    assert cli.main(["list", package]) == 0
    written = capfd.readouterr()
    for noise in NOISE:
        assert noise not in written.out
        assert noise in written.err


def test_list_names_what_inductor_times_on_request(package: str, capsys: pytest.CaptureFixture[str]):
    assert cli.main(["list", package]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "kinds of choice in compiled graphs are Inductor's own, whatever the policy: --inductor names them" in text
    assert "max-autotune" not in text
    assert cli.main(["list", package, "--inductor"]) == 0
    assert "mode='max-autotune'" in capsys.readouterr().out
    assert len(run_json(capsys, "list", package)["inductor"]) > 5


@pytest.mark.parametrize(
    ("arch", "hint"),
    [
        ("SM103", "did you mean sm103?"),
        ("sm_103", "did you mean sm103?"),
        ("h100", "did you mean sm90?"),
        ("GB200", "did you mean sm100?"),
        ("bogus", "there are tables for sm90, sm100, sm103, sm120, sm121"),
    ],
)
def test_an_arch_that_is_none_is_refused(arch: str, hint: str, package: str, capsys: pytest.CaptureFixture[str]):
    for argv in (("list", package), ("explain", package), ("show", "a.b"), ("check",), ("warmup", "journals")):
        assert error_of(capsys, *argv, "--arch", arch, code=2).endswith(f"found {arch!r}; {hint}")


def test_any_arch_that_is_written_as_one_or_has_tables_is_taken(package: str, tmp_path: Path):
    (tmp_path / "tables" / "other").mkdir(parents=True)
    (tmp_path / "tables" / "other" / "p.json").write_text("not looked into")
    for arch in ("sm42", "sm90a", "gfx90a", "gfx942", "cpu"):
        assert cli.main(["explain", package, "--arch", arch]) == 0
    check_archs(["other"], [str(tmp_path / "tables")])


def test_help_breaks_no_name(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        cli.main(["run", "--help"])
    text = capsys.readouterr().out
    assert all(name in text for name in AutotunePolicy().config_invariant)


@pytest.mark.parametrize(("percent", "code"), [("50", 0), ("50.1", 1)])
def test_list_is_a_gate(percent: str, code: int, package: str, tables: str, capsys: pytest.CaptureFixture[str]):
    argv = ("list", package, "--table", tables, "--arch", "sm90", "--fail-under", percent)
    assert run_json(capsys, *argv, code=code)["failed"] is bool(code)
    assert cli.main(list(argv)) == code
    assert ("FAILED: 50.0 % covered on sm90" in capsys.readouterr().out) is bool(code)


@pytest.mark.parametrize("argv", [[], ["--arch", "sm90", "--arch", "sm100"]])
def test_a_gate_needs_one_arch(argv: list[str], package: str, capsys: pytest.CaptureFixture[str]):
    assert "--fail-under: expected one --arch" in error_of(capsys, "list", package, "--fail-under", "5", *argv, code=2)


def test_a_percentage_is_one(package: str, capsys: pytest.CaptureFixture[str]):
    for text in ("101", "-1", "many", "nan"):
        assert "expected a percentage from 0 to 100" in error_of(
            capsys, "list", package, "--arch", "sm90", f"--fail-under={text}", code=2
        )


def test_list_of_what_is_not_installed(capsys: pytest.CaptureFixture[str]):
    assert "no module named 'no_such_package'" in error_of(capsys, "list", "no_such_package", code=1)


def test_list_goes_on_where_one_of_several_is_missing(package: str, capsys: pytest.CaptureFixture[str]):
    modules = ("no_such_package", package, "no_such_module")
    found = run_json(capsys, "list", *modules, code=1)
    assert [info["kernel"].rpartition(".")[2] for info in found["autotuners"]] == ["kernel", "uncovered_kernel"]
    missing = [item["module"] for item in found["problems"] if item["kind"] == "does not import"]
    assert missing == ["no_such_module", "no_such_package"]
    assert cli.main(["list", *modules]) == 1
    written = capsys.readouterr()
    assert f"2 autotuners, 6 candidates in {package}\n" in written.out
    for name in missing:
        assert f"triton-tuning: error: {name}: no module named" in written.err


def test_list_of_several_that_are_all_missing_names_each(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["list", "no_such_package", "no_such_module"]) == 1
    written = capsys.readouterr()
    assert written.out == ""
    assert [line.split(": ")[2] for line in written.err.splitlines()] == ["no_such_package", "no_such_module"]


@pytest.mark.parametrize("safe", [False, True])
def test_the_console_script_sees_the_current_folder_last(safe: bool, tmp_path: Path, package: str):
    """A script's own folder comes first in its path, as the console script's does; the current folder must follow."""
    (tmp_path / "bin").mkdir()
    script = tmp_path / "bin" / "script.py"
    script.write_text("import sys\nfrom tuning.cli import main\nsys.exit(main())\n")
    (tmp_path / "site" / "json.py").write_text("raise ImportError('hides what is installed')\n")
    command = [sys.executable, str(script), "list", package]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if safe:
        environment["PYTHONSAFEPATH"] = "1"
    done = subprocess.run(
        command, cwd=tmp_path / "site", env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    refused = safe and sys.version_info >= (3, 11)  # where Python first knows of it
    assert done.returncode == int(refused), done.stderr
    assert ("2 autotuners" in done.stdout) is not refused


def test_the_current_folder_leaves_the_path_again(journals: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    seen: list[list[str]] = []
    monkeypatch.setattr("tuning._commands.report.run", lambda options, console: seen.append(list(sys.path)) or 0)
    monkeypatch.setattr(sys, "path", [name for name in sys.path if name])
    before = list(sys.path)
    assert cli.main(["report", journals]) == 0
    assert seen == [[*before, str(tmp_path)]]
    assert sys.path == before


# --- merge and report -------------------------------------------------------------------------------------------------


def test_merge_writes_tables_and_says_so(
    tmp_path: Path, package: str, journals: str, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "out"
    assert cli.main(["merge", journals, "-o", str(out)]) == 0
    path = out / "sm90" / f"{package}.json"
    assert capsys.readouterr().out == (
        "2 journals, 4 records, 2 keys\n"
        f"wrote {path}: 2 entries, 1 denied\n"
        "recordings disagree on 1 key; near ties: 1; without a candidate that can be chosen: 0\n"
    )
    assert {entry.kernel for entry in read_table(path).entries} == {f"{package}.ops.kernel"}


def test_merge_json(tmp_path: Path, package: str, journals: str, capsys: pytest.CaptureFixture[str]):
    found = run_json(capsys, "merge", journals, "-o", str(tmp_path / "out"))
    assert (found["version"], found["keys"], found["disagreeing_keys"], found["torn"]) == (1, 2, 1, [])
    (written,) = found["tables"]
    assert (written["arch"], written["package"], written["entries"], written["denied"]) == ("sm90", package, 2, 1)
    assert Path(written["path"]).is_file()


def reviewed_table(folder: Path, package: str) -> TableFile:
    """What a person has made of a table: a denied config, an entry for a key that is not recorded again."""
    kernel, dtypes = f"{package}.ops.kernel", (("x_ptr", "float16"),)
    denied = Denied(kernel, config(16), None, "wrong results", "a person")
    unrecorded = Entry(kernel, (("n", "256"),), dtypes, None, config(64), {"measured": True, "note": "by hand"})
    again = Entry(kernel, (("n", "128"),), dtypes, None, config(16), {"measured": True, "note": "old"})
    table = TableFile("sm90", package, "1.0", "3.6.0", "NVIDIA H200", (unrecorded, again), (denied,))
    write_table(folder, table)
    return table


def test_merge_continues_the_table_in_its_folder(
    tmp_path: Path, package: str, journals: str, capsys: pytest.CaptureFixture[str]
):
    before = reviewed_table(tmp_path / "out", package)
    elsewhere = tmp_path / "out" / "sm90" / "not_recorded.json"
    elsewhere.write_text("not read")
    assert cli.main(["merge", journals, "-o", str(tmp_path / "out")]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "kept of the table before it: 1 entry, 1 denied; recorded again: 1 entry, 1 with another config" in said
    after = read_table(tmp_path / "out" / "sm90" / f"{package}.json")
    assert before.denied[0] in after.denied
    configs = {dict(entry.key or ())["n"]: entry.config for entry in after.entries}
    # 16 and 32 are within noise of each other at 64, and 32 is the fastest at 128.
    assert configs == {"64": config(32), "128": config(32), "256": config(64)}
    assert [entry.evidence for entry in after.entries if entry.config == config(64)] == [before.entries[0].evidence]
    assert elsewhere.read_text() == "not read"


def test_merge_says_in_json_what_it_kept(
    tmp_path: Path, package: str, journals: str, capsys: pytest.CaptureFixture[str]
):
    out = str(tmp_path / "out")
    (new,) = run_json(capsys, "merge", journals, "-o", out)["tables"]
    assert (new["kept"], new["replaced"]) == (None, False)
    reviewed_table(tmp_path / "out", package)
    (kept,) = run_json(capsys, "merge", journals, "-o", out)["tables"]
    assert kept["kept"] == {"entries": 1, "denied": 1, "recorded_again": 1, "changed": 1}
    assert (kept["entries"], kept["denied"], kept["replaced"]) == (3, 2, False)


def test_merge_replaces_where_it_is_told_to(
    tmp_path: Path, package: str, journals: str, capsys: pytest.CaptureFixture[str]
):
    out, fresh = tmp_path / "out", tmp_path / "fresh"
    reviewed_table(out, package)
    name = f"sm90/{package}.json"
    for argv in (["-o", str(fresh)], ["-o", str(out), "--replace"]):
        assert cli.main(["merge", journals, "--date", "2026-01-31", *argv]) == 0
    assert "the table before it was replaced, with what it denied" in capsys.readouterr().out
    assert (out / name).read_bytes() == (fresh / name).read_bytes()
    (table,) = run_json(capsys, "merge", journals, "-o", str(out), "--replace")["tables"]
    assert (table["kept"], table["replaced"]) == (None, True)
    (out / name).write_text("{")  # a table that cannot be read is said, and is replaced if that is wanted
    assert str(out / name) in error_of(capsys, "merge", journals, "-o", str(out), code=1)
    assert cli.main(["merge", journals, "-o", str(out), "--replace"]) == 0


def test_merge_of_one_arch_reads_the_tables_of_that_arch_alone(
    tmp_path: Path, package: str, journals: str, capsys: pytest.CaptureFixture[str]
):
    write_journals(tmp_path / "journals", f"{package}.ops.kernel", arch="sm100")
    reviewed_table(tmp_path / "out", package)
    other = tmp_path / "out" / "sm90" / f"{package}.json"
    before = other.read_bytes()
    found = run_json(capsys, "merge", journals, "-o", str(tmp_path / "out"), "--arch", "sm100")
    assert [(table["arch"], table["kept"]) for table in found["tables"]] == [("sm100", None)]
    assert other.read_bytes() == before


def test_commands_that_merge_read_scans(
    tmp_path: Path, package: str, journals: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    # Records of thousands of files cost three times as much, and the memory of an object for each timing.
    monkeypatch.delattr("tuning.journal.read_journal")
    for argv in (["merge", journals, "-o", str(tmp_path / "out")], ["report", journals], ["show", "kernel", journals]):
        assert cli.main(argv) == 0


def test_merge_dates_the_evidence(tmp_path: Path, tables: str, package: str):
    text = (Path(tables) / "sm90" / f"{package}.json").read_text()
    assert text.count('"date": "2026-01-31"') == 2


def test_merge_by_majority_and_of_one_arch(tmp_path: Path, journals: str, capsys: pytest.CaptureFixture[str]):
    write_journals(tmp_path / "journals", "other_package.ops.kernel", arch="sm100")
    found = run_json(capsys, "merge", journals, "-o", str(tmp_path / "out"), "--arch", "sm100", "--rule", "majority")
    assert (found["archs"], found["rule"]) == (["sm100"], "majority")
    assert [table["arch"] for table in found["tables"]] == ["sm100"]


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["--arch", "sm42"], 1, "no journal has 'sm42'; these journals have sm90"),
        (["--date", "2026-02-30"], 2, "2026-02-30"),
        (["--date", "today"], 2, "expected a date such as 2026-01-31"),
    ],
)
def test_merge_refuses(
    argv: list[str], code: int, said: str, tmp_path: Path, journals: str, capsys: pytest.CaptureFixture[str]
):
    assert said in error_of(capsys, "merge", journals, "-o", str(tmp_path / "out"), *argv, code=code)
    assert not (tmp_path / "out").exists()


def test_merge_of_nothing_recorded_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    JournalWriter(str(tmp_path / "run"), Environment(arch="sm90")).close()
    for argv in (["merge", str(tmp_path), "-o", str(tmp_path / "out")], ["report", str(tmp_path)]):
        said = error_of(capsys, *argv, code=1)
        assert f"{argv[0]}: " in said
        assert "found no record in 1 journal: most likely the kernels that ran lie outside the modules" in said
        assert "or none could be timed for want of a GPU" in said
    JournalWriter(str(tmp_path / "run"), Environment(arch="sm90")).close()
    assert "found no record in 2 journals" in error_of(capsys, "report", str(tmp_path), code=1)
    assert not (tmp_path / "out").exists()


def test_errors_of_a_merge_name_the_one_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with JournalWriter(str(tmp_path / "run"), Environment(arch="sm90")) as writer:
        writer.write(record({16: None}))
    for argv in (["--arch", "sm42"], []):
        options = cli.make_parser().parse_args(["merge", str(tmp_path), "-o", str(tmp_path / "out"), *argv])
        with pytest.raises(JournalError) as caught:
            options.run(options, None)
        assert caught.value.file == writer.path


def test_a_damaged_journal_is_one_line(journals: str, capsys: pytest.CaptureFixture[str]):
    path = next(Path(journals).iterdir())
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)
    for command in ("report", "merge"):
        extra = ["-o", "unused"] if command == "merge" else []
        assert str(path) in error_of(capsys, command, journals, *extra, code=1)


def test_a_torn_journal_is_reported(journals: str, capsys: pytest.CaptureFixture[str]):
    path = next(Path(journals).iterdir())
    path.write_bytes(path.read_bytes()[:-3])
    found = run_json(capsys, "report", journals)
    assert [item["journal"] for item in found["torn"]] == [str(path)]
    assert cli.main(["report", journals]) == 0
    assert "bytes of an interrupted record" in " ".join(capsys.readouterr().out.split())


def test_report_says_who_disagrees(package: str, journals: str, capsys: pytest.CaptureFixture[str]):
    found = run_json(capsys, "report", journals)
    by_n = {json.dumps(item["key"]["values"]): item for item in found["results"]}
    disagreed = by_n['[["n", 64]]']
    assert [winner["recordings"] for winner in disagreed["winners"]] == [1, 1]
    assert disagreed["failures"][0]["errors"] == ["OutOfResources: shared memory"]
    assert by_n['[["n", 128]]']["agreement"] == 2
    assert cli.main(["report", journals]) == 0
    text = capsys.readouterr().out
    assert "2 keys of 1 kernel from 2 journals; recordings disagree on 1 key; near ties: 1" in " ".join(text.split())
    assert f"Winners: {package}.ops.kernel n=64 x_ptr:float16 on sm90" in " ".join(text.split())


def test_report_shows_kernels_in_full_where_asked(package: str, journals: str, capsys: pytest.CaptureFixture[str]):
    capsys.readouterr()
    for argv in (["--kernel", package], ["--details"]):
        assert cli.main(["report", journals, *argv]) == 0
        text = " ".join(capsys.readouterr().out.split())
        assert "OutOfResources: shared memory" in text
        assert ("Merged choices" in text) is (argv == ["--details"])


def test_report_of_a_kernel_is_of_it_alone_in_every_form(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    folder = write_journals(tmp_path / "journals", "pkg.ops.kernel")
    write_journals(tmp_path / "journals", "pkg.other.second")
    capsys.readouterr()
    found = run_json(capsys, "report", folder, "--kernel", "second")
    assert {each["kernel"] for each in found["results"]} == {"pkg.other.second"}
    assert found["kernels"] == 1
    page = tmp_path / "page.html"
    assert cli.main(["report", folder, "--kernel", "second", "--html", str(page)]) == 0
    assert "second" in page.read_text()
    assert "pkg.ops" not in page.read_text()
    for form in ([], ["--json"], ["--html", str(page)]):
        said = error_of(capsys, "report", folder, "--kernel", "second", "--kernel", "sec", *form, code=1)
        assert "no kernel 'sec' was recorded: expected the name, module or package of one of pkg.ops.kernel" in said


def test_report_of_one_arch_and_rule(journals: str, capsys: pytest.CaptureFixture[str]):
    assert run_json(capsys, "report", journals, "--arch", "sm90", "--rule", "majority")["rule"] == "majority"
    assert "no journal has 'sm42'" in error_of(capsys, "report", journals, "--arch", "sm42", code=1)


@pytest.mark.parametrize(("columns", "blocks"), [("60", True), ("110", True), ("300", False)])
def test_a_report_fits_the_terminal_and_breaks_no_name(
    columns: str, blocks: bool, package: str, journals: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    monkeypatch.setenv("COLUMNS", columns)
    capsys.readouterr()
    assert cli.main(["report", journals, "--details"]) == 0
    lines = capsys.readouterr().out.splitlines()
    name = f"{package}.ops.kernel"
    assert [line for line in lines if name in line]
    assert not [line for line in lines if len(line) > int(columns) and " " in line.strip()]
    text = " ".join(" ".join(lines).split())
    assert ("wins 1, failures" in text or "slower 0.0 %, " in text) is blocks
    assert "config BLOCK=" not in text  # what names a block is not repeated in it


# --- check ------------------------------------------------------------------------------------------------------------


def test_check_of_tables_that_fit(tables: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("tuning._commands._tables.supported_triton", lambda: "3.6.0")
    assert run_json(capsys, "check", tables)["problems"] == 0
    assert cli.main(["check", tables]) == 0
    assert capsys.readouterr().out == "1 table, 2 entries, 1 denied config under Triton 3.6.0: no problem\n"


def test_check_finds_what_no_longer_fits(
    package: str, tables: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tuning._commands._tables.supported_triton", lambda: "3.9.0")
    path = Path(tables) / "sm90" / f"{package}.json"
    table = read_table(path)
    first, second = table.entries
    entries = (
        replace(first, source_hash="feedfeedfeedfeed"),
        replace(second, config=config(512)),
        replace(first, kernel=f"{package}.ops.gone"),
        replace(first, kernel=f"{package}.nowhere.kernel"),
    )
    denied = (Denied(f"{package}.ops.kernel", config(1024), None, "racy", "test"),)
    write_table(tables, replace(table, entries=entries, denied=denied))
    found = run_json(capsys, "check", tables, code=1)
    kinds = {(item["kernel"].rpartition(".")[2], item["kind"]) for item in found["findings"]}
    assert kinds == {
        ("", "other_triton"),
        ("gone", "missing_kernel"),
        ("kernel", "missing_kernel"),
        ("kernel", "not_a_candidate"),
        ("kernel", "idle_denial"),
        ("kernel", "stale_source"),
    }
    assert found["problems"] == len(found["findings"]) - 1 == 5
    assert cli.main(["check", tables]) == 1
    text = capsys.readouterr().out
    assert str(path) in text
    assert "5 problems" in text
    assert f"{package}.unrelated" not in sys.modules  # only what tables speak of is imported


def test_check_that_can_check_nothing_is_no_success(
    tmp_path: Path, tables: str, package: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tuning._commands._tables.supported_triton", lambda: "3.6.0")
    journals = write_journals(tmp_path / "elsewhere", "not_installed_here.ops.kernel")
    assert cli.main(["merge", journals, "-o", str(tmp_path / "other")]) == 0
    found = run_json(capsys, "check", str(tmp_path / "other"), code=1)
    assert (found["entries"], found["denied"], found["unchecked"], found["problems"]) == (2, 1, 3, 0)
    assert {item["kind"] for item in found["findings"]} <= {"unchecked", "other_triton"}
    assert found["findings"][-1]["kind"] == "unchecked"
    assert "not_installed_here" in found["findings"][-1]["message"]
    assert cli.main(["check", str(tmp_path / "other")]) == 1
    text = capsys.readouterr().out
    assert text.startswith("3 rows could not be checked:\n")
    assert text.endswith(
        "1 table, 2 entries, 1 denied config under Triton 3.6.0: "
        "nothing could be checked; install the packages that the tables are for\n"
    )


def test_check_passes_on_what_it_can_check_and_counts_the_rest(
    tmp_path: Path, tables: str, package: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("tuning._commands._tables.supported_triton", lambda: "3.6.0")
    journals = write_journals(tmp_path / "elsewhere", "not_installed_here.ops.kernel")
    assert cli.main(["merge", journals, "-o", tables]) == 0
    assert run_json(capsys, "check", tables)["unchecked"] == 3
    assert cli.main(["check", tables]) == 0
    assert capsys.readouterr().out.endswith(": no problem in the 3 rows that could be checked\n")


def test_check_lists_unreadable_tables_and_goes_on(tables: str, package: str, capsys: pytest.CaptureFixture[str]):
    (Path(tables) / "sm90" / "broken.json").write_text("{")
    found = run_json(capsys, "check", tables, code=1)
    assert [Path(item["file"]).name for item in found["unreadable"]] == ["broken.json"]
    assert found["entries"] == 2


def test_check_of_the_packaged_tables_reads_all_of_them(capsys: pytest.CaptureFixture[str]):
    capsys.readouterr()
    assert cli.main(["check", "--arch", "sm100", "--json"]) in (0, 1)  # which packages are installed decides
    found = json.loads(capsys.readouterr().out)
    assert found["files"] == len(list((ROOT / "tables" / "sm100").glob("*.json")))
    assert found["unreadable"] == []


@pytest.mark.parametrize(("arch", "said"), [(["--arch", "sm42"], "tables of sm42"), ([], "at least one")])
def test_check_refuses_a_folder_without_tables(
    arch: list[str], said: str, tmp_path: Path, tables: str, capsys: pytest.CaptureFixture[str]
):
    folder = tables if arch else str(tmp_path)
    assert said in error_of(capsys, "check", folder, *arch, code=1)
    assert "found nothing" in error_of(capsys, "check", str(tmp_path / "nothing"), code=1)


# --- show -------------------------------------------------------------------------------------------------------------


def test_show_brings_everything_about_a_kernel(
    package: str, journals: str, tables: str, capsys: pytest.CaptureFixture[str]
):
    name = f"{package}.ops.kernel"
    found = run_json(capsys, "show", name, journals, "--table", tables)
    assert found["kernel"] == name
    assert [item["config"]["kwargs"]["BLOCK"] for item in found["candidates"]] == [16, 32, 64]
    assert [entry["key"] for entry in found["entries"]] == ["n=64 x_ptr:float16", "n=128 x_ptr:float16"]
    assert [row["config"]["kwargs"]["BLOCK"] for row in found["denied"]] == [64]
    assert len(found["timings"]) == 2
    assert cli.main(["show", name, journals, "--table", tables]) == 0
    text = capsys.readouterr().out
    for part in (
        "Candidates, smallest",
        "Entries for sm90",
        "Denied",
        "n=64 x_ptr:float16 on sm90",
        "chosen",
        "failed",
    ):
        assert part in " ".join(text.split())


def test_show_takes_the_end_of_a_name(package: str, journals: str, capsys: pytest.CaptureFixture[str]):
    assert run_json(capsys, "show", "ops.kernel", journals)["kernel"] == f"{package}.ops.kernel"


def test_show_asks_back_where_a_name_is_ambiguous(
    tmp_path: Path, package: str, journals: str, capsys: pytest.CaptureFixture[str]
):
    write_journals(tmp_path / "journals", "other_package.ops.kernel")
    said = error_of(capsys, "show", "kernel", journals, code=2)
    assert f"{package}.ops.kernel" in said
    assert "other_package.ops.kernel" in said


def test_show_without_a_table_or_journal(package: str, capsys: pytest.CaptureFixture[str]):
    found = run_json(capsys, "show", f"{package}.ops.kernel")
    assert (len(found["candidates"]), found["entries"], found["timings"]) == (3, [], [])


def test_show_of_a_kernel_that_does_not_exist(package: str, capsys: pytest.CaptureFixture[str]):
    assert "expected a qualified name" in error_of(capsys, "show", "no_such_kernel", code=2)
    assert "no autotuner of this name" in error_of(capsys, "show", f"{package}.ops.gone", code=1)
    assert "no module named" in error_of(capsys, "show", "no_such_package.kernel", code=1)


# --- demo -------------------------------------------------------------------------------------------------------------


def test_demo_without_a_package_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr("tuning._demo_workloads.installed_workloads", tuple)
    monkeypatch.chdir(tmp_path)
    said = error_of(capsys, "demo", code=1)
    assert ": neither mamba_ssm, fla nor megatron.core is installed; run: pip install 'triton-tuning[demo]', or" in said
    assert said.endswith("in a checkout: pip install -e '.[demo]'")
    said = error_of(capsys, "demo", "--package", "mamba_ssm", code=1)
    assert ": mamba_ssm is not installed; run: pip install 'triton-tuning[mamba]', or in a checkout: pip" in said
    assert error_of(capsys, "demo", "--package", "megatron.core", code=1).endswith("run: pip install megatron-core")
    assert list(tmp_path.iterdir()) == []


def test_demo_refuses_what_it_cannot_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    import tuning._demo_workloads as workloads

    monkeypatch.setattr(workloads, "installed_workloads", lambda: workloads.WORKLOADS)
    (tmp_path / "kept").write_text("mine")
    common = ("demo", "--device", "interpreter")
    assert "is not empty" in error_of(capsys, *common, "--out", str(tmp_path), code=2)
    assert "File exists" in error_of(capsys, *common, "--out", str(tmp_path / "kept"), code=2)
    assert "expected one of mamba_ssm, fla, megatron.core" in error_of(capsys, *common, "--package", "x", code=2)
    assert (tmp_path / "kept").read_text() == "mine"


def printed(*arguments: str, stdout: Any = subprocess.PIPE, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tuning", *arguments],
        cwd=Path(__file__).parents[2],
        env={**os.environ, **environment},
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs a device that is always full")
@pytest.mark.parametrize(
    "arguments",
    ["report bench/data/journals", "--version", "diff tables/sm100/fla.json tables/sm103/fla.json --json"],
)
def test_a_full_disk_under_standard_output_is_one_line_and_a_failure(arguments: str):
    with open("/dev/full", "w") as full:
        done = printed(*arguments.split(), stdout=full)
    expected = "standard output cannot be written: No space left on device; what was printed is not whole"
    assert (done.returncode, done.stderr) == (1, f"triton-tuning: error: {expected}\n")


def test_a_standard_output_that_is_closed_from_the_start_hears_nothing():
    program = 'import os, sys; os.close(1); os.execv(sys.executable, [sys.executable, "-m", "tuning", "--version"])'
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=Path(__file__).parents[2], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_name_that_standard_output_cannot_spell_is_escaped(tmp_path: Path):
    with JournalWriter(str(tmp_path / "rec"), Environment(arch="sm90")) as writer:
        writer.write(record({16: 1.0, 32: 2.0}))
    odd = tmp_path / "h\xe9t\u2603.journal"
    Path(writer.path).rename(odd)
    with odd.open("ab") as file:
        file.write(b"TTJ1")  # torn, so that the report names the file
    done = printed("report", str(tmp_path), PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "h\\xe9t\\u2603.journal" in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["list", "..x"],
        ["list", "json", "a b"],
        ["list", ""],
        ["show", "a..b"],
        ["export", "--format", "megatron", "tables", "-o", "x", "--package", "a-b"],
        ["import", "--format", "megatron", "tables", "-o", "x", "--package", "a/b.py"],
    ],
)
def test_what_is_no_dotted_name_is_a_wrong_call(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    try:
        code = cli.main(arguments)
    except SystemExit as left:
        code = left.code
    assert code == 2
    assert "expected a" in capsys.readouterr().err


def test_help_explains_the_columns_of_reports_and_the_rule_for_ties(capsys: pytest.CaptureFixture[str]):
    said = {}
    for name in ("report", "merge"):
        with pytest.raises(SystemExit):
            cli.main([name, "--help"])
        said[name] = capsys.readouterr().out
    for column in (
        "agree",
        "tied",
        "failed",
        "regret",
        "confidence",
        "20 %",
        "slower",
        "differs",
        "timed, wins",
    ):
        assert f"\n  {column} " in said["report"] or f"\n  {column}, " in said["report"]
    limits = f"{TOLERANCE:.0%}".replace("%", " %"), f"{SPREAD_LIMIT:.0%}".replace("%", " %")
    assert all(limit in said["merge"] for limit in limits)
    assert f"up to {(TOLERANCE + SPREAD_LIMIT) * 100:.0f} % slower" in said["merge"]
