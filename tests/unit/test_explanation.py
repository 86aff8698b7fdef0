"""What would be chosen elsewhere: the same as a run chooses, for journals and for packages, and what has no choice."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from recordings import config, environment, record

from tuning.cli import main
from tuning.explanation import OTHER_KEY, explain_autotuners, explain_journals
from tuning.inventory import take_inventory
from tuning.journal import JournalWriter, find_journals, scan_journal
from tuning.policy import AutotunePolicy
from tuning.selection import Candidates, decide
from tuning.spec import Key, LaunchConfig
from tuning.tables import Denied, Entry, TableFile, load_tables, write_table

JOURNALS = Path(__file__).parents[2] / "bench" / "data" / "journals"
KERNEL = "pkg.module.kernel"


def entry(key: Key | None, block: int, kernel: str = KERNEL) -> Entry:
    values, dtypes = (None, None) if key is None else (key.values, key.dtypes)
    return Entry(kernel, values, dtypes, None, config(block), {"reported_by": "a test"})


def key(n: int) -> Key:
    return Key.of({"n": n}, {"x_ptr": "bfloat16"})


def table(folder: Path, arch: str, *rows: Entry | Denied) -> str:
    entries = tuple(row for row in rows if isinstance(row, Entry))
    denied = tuple(row for row in rows if isinstance(row, Denied))
    package = rows[0].kernel.partition(".")[0]
    return str(write_table(folder, TableFile(arch, package, "1", "3.6.0", "", entries, denied)))


@pytest.fixture
def recorded(tmp_path: Path) -> str:
    with JournalWriter(str(tmp_path / "journals" / "run"), environment()) as writer:
        for n in (64, 128, 4096):
            writer.write(record({16: 1.0, 32: 2.0, 64: 3.0}, key=key(n)))
    return str(tmp_path / "journals")


def explained(*argv: str, capsys: Any) -> tuple[int, Any]:
    code = main(["explain", *argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("rule", ["cheapest", "nearest", "model"])
@pytest.mark.parametrize("arch", ["sm90", "sm103", "sm120"])
def test_a_journals_rows_are_the_choices_of_a_run(arch: str, rule: str) -> None:
    policy = AutotunePolicy(on_miss=rule)  # type: ignore[arg-type]
    rows = {(row.kernel, row.key): row for row in explain_journals(find_journals([JOURNALS]), arch, policy)}
    tables = load_tables(arch, neighbours=True)
    seen = 0
    for path in find_journals([JOURNALS]):
        for measurement in scan_journal(path).measurements:
            identity = measurement.identity
            if not measurement.times:  # a warning alone, with the winner for its only config
                continue
            live = Candidates.of_configs(reversed(identity.configs))
            decision = decide(identity.kernel, identity.key, arch, live, tables, policy)
            row = rows[identity.kernel.qualified_name, str(identity.key)]
            assert (row.config, row.source) == (decision.choice.config, decision.choice.source)
            assert (row.origin, row.detail) == (decision.choice.origin, decision.choice.detail)
            assert row.problem == ""
            seen += 1
    assert seen > len(rows) == 16
    # What stands in for live objects is what would be read of them.
    assert all(isinstance(row.config, LaunchConfig) for row in rows.values())


def test_each_rule_is_named_with_its_entry(recorded: str, tmp_path: Path, capsys: Any) -> None:
    tables = tmp_path / "tables"
    here = table(tables, "sm103", entry(key(128), 32))
    code, found = explained("--arch", "sm103", recorded, "--table", str(tables), "--on-miss", "nearest", capsys=capsys)
    rows = {row["key"].split()[0]: row for row in found["choices"]}
    assert (code, found["version"], found["arch"], found["without_choice"]) == (0, 1, "sm103", 0)
    assert [rows[f"n={n}"]["source"] for n in (64, 128, 4096)] == ["nearest", "exact", "nearest"]
    assert {row["origin"] for row in rows.values()} == {here}
    assert rows["n=4096"]["detail"] == "nearest of 1 usable entry: sm103, distance 32 (n=128 (not 4096))"
    # Elsewhere the same entry is another arch's.
    _, found = explained("--arch", "sm90", recorded, "--table", str(tables), "--on-miss", "nearest", capsys=capsys)
    row = next(row for row in found["choices"] if row["key"].startswith("n=128 "))
    assert (row["source"], row["origin"], row["config"]["kwargs"]) == ("nearest", here, {"BLOCK": 32})
    assert row["detail"] == "nearest of 1 usable entry: sm103, distance 1"
    assert "no usable entry of this arch" in row["notices"][0]


def test_no_choice_is_a_problem_and_says_why(recorded: str, tmp_path: Path, capsys: Any) -> None:
    assert main(["explain", "--arch", "sm103", recorded]) == 0
    assert "3 choices on sm103: cheapest 3" in capsys.readouterr().out
    code, found = explained("--arch", "sm103", recorded, "--on-miss", "error", capsys=capsys)
    assert (code, found["without_choice"]) == (1, 3)
    assert all("no table entry for n=" in row["problem"] for row in found["choices"])
    tables = tmp_path / "tables"
    table(tables, "sm103", *[Denied(KERNEL, config(block), None, "races", "a report") for block in (16, 32, 64)])
    assert main(["explain", "--arch", "sm103", recorded, "--table", str(tables)]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert "found all 3 denied" in text
    assert text.endswith("3 choices on sm103: no choice 3")


PACKAGE = """
import triton

@triton.autotune([triton.Config({"BLOCK": block}) for block in (64, 16, 32)], key=["n"])
@triton.jit
def kernel(x_ptr, n, BLOCK: triton.language.constexpr):
    pass

@triton.autotune([triton.Config({"BLOCK": 16})], key=["n"])
@triton.jit
def single(x_ptr, n, BLOCK: triton.language.constexpr):
    pass
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "explained_here.py").write_text(PACKAGE)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "explained_here", raising=False)
    return "explained_here"


def test_a_packages_rows_are_the_keys_that_any_table_has(package: str, tmp_path: Path, capsys: Any) -> None:
    name = f"{package}.kernel"
    tables = tmp_path / "tables"
    candidates = {block: LaunchConfig.build({"BLOCK": block}) for block in (16, 32, 64)}
    rows = [Entry(name, key(n).values, key(n).dtypes, None, candidates[b], {"reported_by": "a test"}) for n, b in
            ((64, 32), (128, 64))]  # fmt: skip
    here = table(tables, "sm103", rows[0])
    table(tables, "sm90", rows[1])
    infos = take_inventory(package, archs=()).autotuners
    assert len(infos) == 2

    def asked(rule: str) -> list[tuple[str, str | None, int | None, str | None]]:
        policy = AutotunePolicy(on_miss=rule, table_path=(str(tables),))  # type: ignore[arg-type]
        return [
            (
                row.key.split(" x_ptr")[0],
                row.source,
                dict(row.config.kwargs)["BLOCK"] if row.config else None,
                row.origin,
            )
            for row in explain_autotuners(infos, "sm103", policy)
        ]

    assert asked("cheapest") == [
        ("n=128", "cheapest", "16", None),
        ("n=64", "exact", "32", here),
        (OTHER_KEY, "cheapest", "16", None),
    ]
    assert asked("nearest") == [
        ("n=128", "nearest", "32", here),  # this arch's other key before the other arch's same one
        ("n=64", "exact", "32", here),
        (OTHER_KEY, "nearest", None, None),
    ]
    assert [row[1] for row in asked("model")] == ["model", "exact", "model"]
    assert asked("error")[2] == (OTHER_KEY, None, None, None)
    code, found = explained("--arch", "sm103", package, "--table", str(tables), "--on-miss", "error", capsys=capsys)
    assert (code, found["without_choice"]) == (1, 1)  # n=128, which a table of another arch has
    assert main(["explain", "--arch", "sm103", package]) == 0
    assert capsys.readouterr().out.endswith("1 choice on sm103: cheapest 1\n")


def test_dtypes_without_names_get_those_of_the_arguments(package: str, tmp_path: Path, capsys: Any) -> None:
    name, few = f"{package}.kernel", LaunchConfig.build({"BLOCK": 16})
    values = key(64).values
    listed = Entry(name, values, None, ("bfloat16",), LaunchConfig.build({"BLOCK": 32}), {"reported_by": "a test"})
    unknown = replace(listed, key=key(128).values, dtype_sequence=("bfloat16", "float32"))
    tables = tmp_path / "tables"
    table(tables, "sm90", listed, unknown)
    table(tables, "sm103", Denied(name, few, values, "races", "a report", dtypes=(("x_ptr", "bfloat16"),)))
    (info, _) = take_inventory(package, archs=()).autotuners
    rows = explain_autotuners([info], "sm103", AutotunePolicy(table_path=(str(tables),)))
    shown = {row.key: dict(row.config.kwargs)["BLOCK"] for row in rows if row.config is not None}
    assert shown == {
        "n=64 x_ptr:bfloat16": "32",  # 16 is denied
        "n=128 bfloat16 float32 (of which arguments is not known)": "16",
        OTHER_KEY: "16",
    }
    # An entry that names them goes before the signature.
    table(tables, "sm100", replace(entry(Key.of({"n": 1}, {"y": "float16"}), 16), kernel=name, config=few))
    rows = explain_autotuners([info], "sm103", AutotunePolicy(table_path=(str(tables),)))
    assert "n=64 y:bfloat16" in [row.key for row in rows]
    # With no entry here, the archs that have some are named.
    code, found = explained("--arch", "sm120", package, "--table", str(tables), "--on-miss", "error", capsys=capsys)
    said = [row["problem"] for row in found["choices"] if row["problem"]]
    assert code == 1
    assert all("no entry of this kernel for sm120; sm100 has 1 entry, sm90 has 2 entries." in text for text in said)


def test_config_invariant_kernels_are_left_to_triton(package: str) -> None:
    infos = take_inventory(package, archs=()).autotuners
    (row,) = explain_autotuners(infos, "sm90", AutotunePolicy(config_invariant=(f"{package}.kernel",)))
    assert (row.source, row.config) == ("timed", None)


def test_what_is_neither_journal_nor_package(tmp_path: Path, capsys: Any) -> None:
    assert main(["explain", "--arch", "sm90", str(tmp_path / "none.journal")]) == 1
    assert main(["explain", "--arch", "sm90", "no_such_package_here"]) == 1
    assert main(["explain", "--arch", "sm90", "json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert [line.partition(": error: ")[0] for line in err.strip().splitlines()] == ["triton-tuning"] * 3
    assert "nor is there a journal, a folder or a prefix of journals 'no_such_package_here' here" in err
    with pytest.raises(SystemExit) as caught:
        main(["explain", str(JOURNALS)])
    assert caught.value.code == 2
