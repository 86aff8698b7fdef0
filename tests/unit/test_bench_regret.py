"""Regrets by hand: what each rule is charged with, what a held-out rule may not see, and what a fit finds."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from recordings import config, environment, record

from bench import regret
from tuning.journal import JournalWriter
from tuning.selection import ModelConstants
from tuning.spec import Kernel, Key, LaunchConfig, TuningRecord

ROOT = Path(__file__).parents[2]


def key(n: int) -> Key:
    return Key.of({"n": n}, {"x_ptr": "bfloat16"})


def recorded(folder: Path, *runs: Sequence[TuningRecord]) -> list[str]:
    paths = []
    for rank, records in enumerate(runs):
        with JournalWriter(str(folder / "run"), environment(rank)) as writer:
            for each in records:
                writer.write(each)
            paths.append(writer.path)
    return paths


def rules_of(paths: list[str]) -> tuple[list[regret.Sample], regret.Rules]:
    samples, _ = regret.read_samples(paths)
    return samples, regret.Rules(samples, paths)


def test_times_are_pooled_and_one_failure_fails(tmp_path: Path) -> None:
    first = record({16: (9.0, 2.0, 9.0), 32: 1.0, 64: 4.0})
    second = record({16: (9.0, 4.0, 9.0), 32: None, 64: 5.0})
    (sample,), facts = regret.read_samples(recorded(tmp_path, [first], [second]))
    assert sample.times == {config(16): 3.0, config(32): None, config(64): 4.5}
    assert (sample.best, sample.regret(config(64)), sample.regret(config(32))) == (3.0, 1.5, None)
    assert (facts["device"], facts["journals"], facts["records"]) == (["NVIDIA H200"], 2, 2)


def test_each_rule_is_charged_with_its_own_pick(tmp_path: Path) -> None:
    times = {64: 2.0, 16: 3.0, 32: 1.0, 128: None}
    (sample,), rules = rules_of(recorded(tmp_path, [record(times)]))
    picked = {rule: rules.pick(rule, sample)[0] for rule in regret.RULES}
    assert picked["table"] == picked["floor"] == config(32)
    assert picked["first"] == config(64)
    assert picked["cheapest"] == config(16)
    assert picked["median"] == config(32)
    figures = regret.measure([sample], lambda _: picked["first"])
    assert (figures["geomean"], figures["worst"], figures["time_over_best"], figures["failing"]) == (2.0, 2.0, 2.0, 0)
    failing = regret.measure([sample], lambda _: config(128))
    assert (failing["failing"], failing["failing_share"], failing["kernels"]) == (1, 1.0, {})
    assert math.isnan(failing["geomean"])
    assert failing["penalised_geomean"] == pytest.approx(regret.FAILING)
    assert (failing["partial"], figures["partial"]) == (True, False)
    assert figures["penalised_geomean"] == figures["geomean"]


def test_a_held_out_key_sees_the_other_keys_and_a_held_out_arch_none(tmp_path: Path) -> None:
    records = [
        record({16: 1.0, 32: 2.0, 64: 3.0}, key=key(64)),
        record({16: 3.0, 32: 2.0, 64: 1.0}, key=key(128)),
        record({16: 4.0, 32: 2.0, 64: 1.0}, key=key(4096)),
    ]
    samples, rules = rules_of(recorded(tmp_path, records))
    by_key = {dict(sample.key.values)["n"]: sample for sample in samples}
    near, source, detail = rules.pick("nearest key", by_key["128"])
    assert (near, source) == (config(16), "nearest")  # its own entry would say 64
    assert "distance 2 (n=64 (not 128))" in detail
    assert rules.pick("nearest key", by_key["4096"])[0] == config(64)
    assert rules.pick("nearest arch", by_key["128"])[1] == "model"


def test_kernels_weigh_the_same_whatever_their_number_of_keys(tmp_path: Path) -> None:
    records = [record({16: 4.0, 32: 1.0}, kernel="pkg.m.a", key=key(n)) for n in (1, 2, 3)]
    records.append(record({16: 1.0, 32: 4.0}, kernel="pkg.m.b"))
    samples, _ = regret.read_samples(recorded(tmp_path, records))
    figures = regret.measure(samples, lambda _: config(16))
    assert figures["geomean"] == pytest.approx(2.0)  # of 4 and 1
    assert figures["geomean_over_keys"] == pytest.approx(4 ** (3 / 4))
    assert figures["time_over_best"] == pytest.approx(13 / 4)
    assert figures["over_2"] == 3


def test_a_rule_whose_picks_fail_is_marked_and_penalised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [record({128: None, 16: 2.0, 32: 1.0}, key=key(1)), record({64: 1.0, 16: 3.0}, key=key(2))]
    paths = recorded(tmp_path, records)
    options = argparse.Namespace(
        journals=paths, table=[], recorded="", fit=False, json=False, plot=None, name=None, out=tmp_path
    )
    first = regret.run(options)["rules"]["first"]
    assert (first["geomean"], first["failing"], first["partial"]) == (1.0, 1, True)
    assert first["penalised_geomean"] == pytest.approx(4.0)
    rows = {line[:32].strip(): line.split() for line in capsys.readouterr().out.splitlines()}
    at = regret.RULES.index("first") - len(regret.RULES)
    assert rows["geometric mean over kernels"][at] == "1.000*"
    assert rows["the same, a failing pick as 16"][at] == "4.000"


def test_a_result_without_a_fit_does_not_replace_one_that_has_it(tmp_path: Path) -> None:
    path = tmp_path / "regret_nvidia.json"
    regret._keep_fit(path, {})
    path.write_text(json.dumps({"fit": {}}))
    regret._keep_fit(path, {"fit": {}})
    with pytest.raises(SystemExit, match="holds a fit, which this result has not: nothing is written"):
        regret._keep_fit(path, {})
    path.write_text("{}")
    regret._keep_fit(path, {})


def test_the_floor_gives_equal_lists_one_pick(tmp_path: Path) -> None:
    records = [
        record({16: 1.0, 32: 1.5, 64: 9.0}, key=key(1)),
        record({16: 9.0, 32: 1.5, 64: 1.0}, key=key(2)),
        record({16: 1.0, 32: 2.0}, key=key(3)),
    ]
    samples, rules = rules_of(recorded(tmp_path, records))
    picks = {dict(sample.key.values)["n"]: rules.pick("floor", sample)[0] for sample in samples}
    assert picks == {"1": config(32), "2": config(32), "3": config(16)}


def sample(name: str, best_warps: int) -> regret.Sample:
    times = {LaunchConfig.build({}, num_warps=warps): 1.0 + 3 * (warps != best_warps) for warps in (1, 2, 4, 8)}
    return regret.Sample(Kernel(name), key(1), "sm90", times)


def test_a_fit_finds_what_the_recording_says_and_leaves_out_what_it_says_it_does() -> None:
    samples = [sample("a.m.k", 8), sample("a.m.l", 8), sample("b.m.k", 8)]
    fit = regret.Fit(samples)
    found = fit.constants(range(3))
    assert found.bare_warps == 8
    assert found.warps > 0
    assert fit.loss(found, range(3)) == 0.0
    left = fit.left_out(lambda one: one.kernel.package)
    assert {name: (each["geomean"], each["keys"]) for name, each in left["groups"].items()} == {
        "a": (1.0, 2),
        "b": (1.0, 1),
    }
    # A package that wants what no other does is not known when it is left out.
    odd = regret.Fit([sample("a.m.k", 8), sample("b.m.k", 1)])
    groups = odd.left_out(lambda one: one.kernel.package)["groups"]
    assert [groups[name]["geomean"] for name in "ab"] == [4.0, 4.0]
    assert odd.left_out(lambda one: "all") == {}


def test_a_pick_that_cannot_launch_costs_a_fit_more_than_any_slow_one() -> None:
    times = {LaunchConfig.build({}, num_warps=4): None, LaunchConfig.build({}, num_warps=8): 1.0}
    failing = regret.Sample(Kernel("a.m.k"), key(1), "sm90", times)
    fit = regret.Fit([failing])
    at_four, at_eight = (ModelConstants(bare_warps=warps, middle_warps=0) for warps in (4, 8))
    assert fit.loss(at_eight, [0]) == 0.0
    assert fit.loss(at_four, [0]) == pytest.approx(math.log(16) + math.log(8))


def test_the_grid_is_of_the_constants_there_are() -> None:
    assert set(regret.GRID) == {*ModelConstants.__dataclass_fields__}


def test_without_a_timed_key_it_ends(tmp_path: Path) -> None:
    paths = recorded(tmp_path, [])
    options = argparse.Namespace(journals=paths, table=[], recorded="", fit=False, json=False, plot=None)
    with pytest.raises(SystemExit, match="expected a key with two or more timed candidates, found none"):
        regret.run(options)
    options.journals = [str(tmp_path / "none")]
    with pytest.raises(SystemExit, match="no journal at"):
        regret.run(options)


def test_the_recordings_kept_here(tmp_path: Path) -> None:
    """One document on standard output, the same in the file; and the bounds that nearest and model keep here."""
    argv = [sys.executable, "-m", "bench", "regret", "bench/data/journals", "--json", "--out", str(tmp_path)]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    (written,) = tmp_path.iterdir()
    assert json.loads(written.read_text()) == found
    rules = found["rules"]
    assert rules["nearest arch"]["time_over_best"] <= 1.06
    assert rules["model"]["geomean"] <= 1.12
    assert rules["model"]["worst"] <= 2
    assert rules["cheapest"]["geomean"] == pytest.approx(1.41, abs=0.01)
    assert [rules[rule]["failing"] for rule in ("model", "nearest key", "nearest arch", "table", "cheapest")] == [0] * 5
    assert rules["first"]["failing"] == 2
    assert {name for row in found["keys"] for name in row["rules"]} == set(regret.RULES)
