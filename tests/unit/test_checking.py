"""Tables held against installed autotuners: each thing that can be amiss is found, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest

from tuning.checking import Finding, check_coverage, check_tables, modules_of
from tuning.spec import LaunchConfig
from tuning.tables import Denied, Entry, TableFile

KERNEL = "pkg.mod.kernel"


def config(block: int) -> LaunchConfig:
    return LaunchConfig.build({"BLOCK": block}, num_warps=4)


@dataclass(frozen=True)
class Autotuner:
    kernel: str = KERNEL
    candidates: tuple[LaunchConfig, ...] = (config(16), config(32))
    key_names: tuple[str, ...] = ("n", "flag")
    arg_names: tuple[str, ...] = ("x", "n", "flag", "BLOCK")
    source_hash: str | None = "aaaa"
    pruner: str = ""


def entry(block: int = 16, **changes: Any) -> Entry:
    fields: dict[str, Any] = {
        "kernel": KERNEL,
        "key": (("n", "64"),),
        "dtypes": (("x", "float16"),),
        "dtype_sequence": None,
        "config": config(block),
        "evidence": {},
        "source_hash": "aaaa",
    }
    return Entry(**{**fields, **changes})


def table(*entries: Entry, denied: tuple[Denied, ...] = (), triton: str = "3.6.0") -> TableFile:
    return TableFile("sm90", "pkg", "1.0", triton, "", entries, denied, path="tables/sm90/pkg.json")


def check(file: TableFile, *autotuners: Autotuner, **options: Any) -> tuple[Finding, ...]:
    return check_tables([file], autotuners, **{"triton": "3.6.1", **options})


def kinds(found: tuple[Finding, ...]) -> list[str]:
    return [finding.kind for finding in found]


def test_what_fits_gives_no_finding():
    wildcard = entry(32, key=None, dtypes=None)
    denied = Denied(KERNEL, config(32), (("n", "128"),), "racy", "somebody")
    assert check(table(entry(), wildcard, denied=(denied,)), Autotuner()) == ()


def test_a_config_that_is_no_candidate_is_named_with_its_key():
    (found,) = check(table(entry(), entry(64, key=(("n", "128"),))), Autotuner())
    assert (found.kind, found.kernel, found.is_problem) == ("not_a_candidate", KERNEL, True)
    assert found.file == "tables/sm90/pkg.json"
    assert found.entry == "n=128 x:float16"
    assert "BLOCK=64" in found.message
    assert "2 candidates" in found.message


def test_a_denied_config_that_is_no_candidate_is_named():
    (found,) = check(table(denied=(Denied(KERNEL, config(64), None, "racy", "somebody"),)), Autotuner())
    assert (found.kind, found.is_problem) == ("idle_denial", False)
    assert found.entry.startswith("denied BLOCK=64")


def test_a_missing_kernel_says_which_version_is_installed_and_which_the_table_is_of():
    unnamed = replace(table(entry()), package_version="")
    (found,) = check_tables([unnamed], [], triton="3.6.0", versions={"pkg": "pkg-core 2.0"})
    assert found.kind == "missing_kernel"
    assert "not in the installed pkg-core 2.0: 1 row never used here; the table is of a version that" in found.message
    (found,) = check_tables([table(entry())], [], triton="3.6.0")
    assert "not in the installed package: 1 row never used here; the table is of 1.0" in found.message


def test_uncovered_are_the_autotuners_with_a_choice_and_no_entry_on_an_arch():
    only = replace(Autotuner(), kernel="pkg.mod.single", candidates=(config(1),))
    installed = [Autotuner(), replace(Autotuner(), kernel="pkg.mod.other"), replace(Autotuner(), kernel="pkg.x"), only]
    other = replace(table(entry(kernel="pkg.mod.other")), arch="sm100")
    denied = Denied("pkg.x", config(64), None, "racy", "somebody")
    found = check_coverage([table(entry(), denied=(denied,)), other], installed, beside=["pkg.invariant"])
    assert [(each.file, each.kernel) for each in found] == [
        ("sm100", KERNEL),
        ("sm100", "pkg.x"),
        ("sm90", "pkg.mod.other"),
        ("sm90", "pkg.x"),
    ]
    assert {(each.kind, each.is_problem) for each in found} == {("uncovered", True)}
    assert check_coverage([table(entry())], installed, beside=["pkg.mod.other", "pkg.x"]) == ()


def test_what_can_never_be_used_covers_nothing():
    key, many = (("seqlen", "64"),), Autotuner()
    racy = Denied(KERNEL, config(16), None, "racy", "somebody")
    for rows in (
        table(entry(64)),
        table(entry(key=key)),
        table(entry(dtypes=(("absent", "float16"),))),
        table(entry(), denied=(racy,)),
        table(entry(key=None, dtypes=None), denied=(racy,)),
    ):
        (found,) = check_coverage([rows], [many])
        assert found.message == "no entry of sm90 can be used: the on-miss rule chooses; record it"
    elsewhere = replace(racy, key=(("n", "128"),))
    assert check_coverage([table(entry(), denied=(elsewhere,))], [many]) == ()


def test_an_entry_whose_config_its_own_table_denies_is_a_miss():
    racy = Denied(KERNEL, config(16), (("n", "64"),), "racy", "somebody")
    (found,) = check(table(entry(), denied=(racy,)), Autotuner())
    assert (found.kind, found.is_problem, found.entry) == ("denied_config", True, "n=64 x:float16")
    assert "denied by this table (racy)" in found.message


def test_a_dtype_of_an_argument_that_is_not_there_is_never_found():
    (found,) = check(table(entry(dtypes=(("y", "float16"),))), Autotuner())
    assert (found.kind, found.is_problem) == ("other_arguments", True)
    assert "names the dtype of y, which the installed kernel has not" in found.message
    assert check(table(entry(dtypes=(("y", "float16"),))), Autotuner(arg_names=())) == ()


def test_a_pruner_may_return_configs_of_its_own():
    found = check(table(entry(64)), Autotuner(pruner="early_config_prune"))
    assert kinds(found) == ["unchecked"]
    assert not found[0].is_problem


def test_a_changed_source_is_said_once_for_a_kernel():
    rows = table(entry(source_hash="bbbb"), entry(key=(("n", "1"),), source_hash="bbbb"))
    (found,) = check(rows, Autotuner())
    assert found.kind == "stale_source"
    assert "bbbb" in found.message
    assert "aaaa" in found.message


@pytest.mark.parametrize(("theirs", "installed"), [(None, "aaaa"), ("bbbb", None), ("aaaa", "aaaa")])
def test_an_unknown_source_is_not_a_changed_one(theirs: str | None, installed: str | None):
    assert check(table(entry(source_hash=theirs)), Autotuner(source_hash=installed)) == ()


def test_a_key_with_other_names_is_never_found():
    (found,) = check(table(entry(key=(("m", "64"), ("n", "1")))), Autotuner())
    assert found.kind == "other_key"
    assert "has m, which" in found.message


def test_a_key_may_have_fewer_names_than_declared():
    assert check(table(entry(key=())), Autotuner()) == ()


def test_a_missing_kernel_is_a_problem_only_where_its_module_was_looked_into():
    assert kinds(check(table(entry()))) == ["missing_kernel"]
    (found,) = check(table(entry()), unimported={"pkg.mod": "no CUDA here"})
    assert (found.kind, found.is_problem) == ("unchecked", False)
    assert "no CUDA here" in found.message
    assert kinds(check(table(entry()), unimported={"pkg.other": "x"})) == ["missing_kernel"]


def test_one_candidate_leaves_nothing_to_choose():
    (found,) = check(table(entry(64), entry(16, key=(("n", "1"),))), Autotuner(candidates=(config(16),)))
    assert found.kind == "single_candidate"
    assert "2 rows" in found.message


@pytest.mark.parametrize(
    ("made_under", "running", "expected"),
    [("3.4.0", "3.6.1", ["other_triton"]), ("3.6.0", "3.6.1", []), ("", "3.6.1", []), ("3.4.0", "", [])],
)
def test_another_triton_is_said_once_for_a_table(made_under: str, running: str, expected: list[str]):
    found = check(table(entry(), triton=made_under), Autotuner(), triton=running)
    assert kinds(found) == expected
    assert all(finding.kernel == "" for finding in found)


def test_findings_do_not_depend_on_the_order_of_what_is_given():
    other = "pkg.mod.another"
    rows = [entry(64), entry(128, key=(("n", "1"),)), entry(64, kernel=other)]
    autotuners = [Autotuner(), Autotuner(kernel=other)]
    forwards = check_tables([table(*rows), replace(table(*rows), path="a.json")], autotuners, triton="3.6.0")
    backwards = check_tables(
        [replace(table(*rows[::-1]), path="a.json"), table(*rows[::-1])], autotuners[::-1], triton="3.6.0"
    )
    assert forwards == backwards
    assert len(forwards) == 6
    assert [finding.file for finding in forwards] == ["a.json"] * 3 + ["tables/sm90/pkg.json"] * 3


def test_modules_are_those_that_define_the_kernels():
    denied = Denied("other.deep.mod.kernel", config(1), None, "r", "s")
    local = entry(kernel="pkg.mod.make.<locals>.kernel")
    assert modules_of([table(entry(), local, denied=(denied,))]) == ("other.deep.mod", "pkg.mod")
