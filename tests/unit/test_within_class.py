"""A choice that may vary within its bit class: where there is evidence, and nowhere else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tuning._check_classes import class_labels, with_class
from tuning._selection_classes import freedom
from tuning.errors import DisagreementError
from tuning.policy import AutotunePolicy
from tuning.selection import decide
from tuning.spec import Kernel, Key, LaunchConfig
from tuning.tables import Entry, TableFile, Tables, parse_table, table_bytes
from tuning.verification import Agreement, Launched, lockstep

TESTS = Path(__file__).parents[1]
KERNEL = Kernel("pack.kernel", "ab" * 8)
KEY = Key.of({"n": 64}, {"x": "float32"})
COMPILER = "triton 3.6.0, backend 0"


@dataclass
class Config:
    """Has what is read of a ``triton.Config``."""

    kwargs: dict[str, int]
    num_warps: int = 4
    num_stages: int = 3
    pre_hook: None = None
    num_ctas: int = 1
    maxnreg: None = None


LIVE = [Config({"BLOCK": block}) for block in (16, 32, 64, 128)]
A, B, C, D = (LaunchConfig.build({"BLOCK": block}) for block in (16, 32, 64, 128))
RESTS_ON = {"compiler": COMPILER, "forms": ["f" * 16], "inputs": 5}


def tables(classes: Any = ((A, B), (C, D)), source: str | None = KERNEL.source_hash, **rests_on: Any) -> Tables:
    evidence = {"note": "a test", "probe": {**RESTS_ON, **rests_on}}
    if rests_on.get("compiler", "") is None:
        del evidence["probe"]
    entry = Entry(KERNEL.qualified_name, KEY.values, KEY.dtypes, None, B, evidence, source, classes)
    file = TableFile("sm90", "pack", "", "3.6.0", "", (entry,))
    return Tables("sm90", [[parse_table(table_bytes(file), "t.json")]])


def found(given: Tables, kernel: Kernel = KERNEL, key: Key = KEY, compiler: str = COMPILER, live: Any = LIVE) -> Any:
    decision = decide(kernel, key, "sm90", live, given, AutotunePolicy(within_class="timed"))
    return freedom(kernel, key, decision, given, compiler)


def test_the_class_of_the_chosen_config_chosen_one_first():
    free, reason = found(tables())
    assert reason == ""
    assert [config.kwargs["BLOCK"] for config in free.configs] == [32, 16]
    assert free.members == (A, B)
    assert (free.forms, free.inputs, free.origin) == (frozenset(["f" * 16]), 5, "t.json")


def test_choosing_does_not_depend_on_classes():
    policy = AutotunePolicy(within_class="timed")
    with_them, without = (decide(KERNEL, KEY, "sm90", LIVE, each, policy) for each in (tables(), tables(None)))
    assert with_them.choice == without.choice
    assert with_them.free is without.free is None


@pytest.mark.parametrize(
    ("given", "kernel", "compiler", "reason"),
    [
        (tables(None), KERNEL, COMPILER, ""),
        (tables(((B,), (A, C, D))), KERNEL, COMPILER, ""),
        (tables(), Kernel(KERNEL.qualified_name, "cd" * 8), COMPILER, "they are of kernel source"),
        (tables(), Kernel(KERNEL.qualified_name), COMPILER, "they are of kernel source"),
        (tables(source=None), KERNEL, COMPILER, "they are of kernel source None"),
        (tables(), KERNEL, "triton 3.7.1, backend 0", "they are of triton 3.6.0, backend 0, this is triton 3.7.1"),
        (tables(), KERNEL, "", "they are of triton"),
        (tables(compiler=None), KERNEL, COMPILER, "does not say what they rest on"),
        (tables(forms="f"), KERNEL, COMPILER, "names no forms"),
        (tables(inputs=0), KERNEL, COMPILER, "names no forms of launch or no inputs"),
        (tables(judged_by="caller"), KERNEL, COMPILER, "its caller's outputs were compared"),
        (tables(inputs=True), KERNEL, COMPILER, "names no forms of launch or no inputs"),
    ],
)
def test_no_evidence_no_freedom(given, kernel, compiler, reason):
    free, why = found(given, kernel, compiler=compiler)
    assert free is None
    assert reason in why
    assert bool(reason) == bool(why)


def test_another_key_has_no_evidence():
    assert found(tables(), key=Key.of({"n": 65}, {"x": "float32"})) == (None, "")


def test_candidates_that_are_not_live_are_not_offered():
    assert found(tables(), live=LIVE[1:]) == (None, "")


# --- ranks ------------------------------------------------------------------------------------------------------------


def verdicts(*sent: list[str], strict: bool = False) -> list[Any]:
    agreements = [Agreement(rank, range(len(sent))) for rank in range(len(sent))]
    checks = [
        agreement.check([Launched("pack.kernel", KEY.text, text, "timed") for text in texts], strict=strict)
        for agreement, texts in zip(agreements, sent, strict=True)
    ]
    return lockstep(checks)


def sent(config: LaunchConfig, *members: LaunchConfig) -> str:
    return with_class(config.text, [each.text for each in members])


def test_ranks_with_different_configs_of_one_class_agree():
    assert {each.agreed for each in verdicts([sent(A, A, B)], [sent(B, A, B)], [sent(A, A, B)])} == {True}


def test_a_rank_that_kept_the_pin_agrees_with_one_that_timed_in_its_class():
    assert {each.agreed for each in verdicts([B.text], [sent(A, A, B)])} == {True}


def test_different_classes_disagree_and_the_report_says_the_configs():
    first, *others = verdicts([sent(A, A, B)], [sent(C, C, D)], [sent(B, A, B)])
    assert not first.agreed
    assert all(each == first for each in others)
    (disagreement,) = first.disagreements
    assert [list(group.ranks) for group in disagreement.groups] == [[0, 2], [1]]
    assert "BLOCK=16" in str(disagreement)
    assert "BLOCK=64" in str(disagreement)
    assert all(isinstance(each, DisagreementError) for each in verdicts([sent(A, A, B)], [sent(C, C, D)], strict=True))


def test_configs_without_a_class_still_disagree():
    assert {each.agreed for each in verdicts([A.text], [B.text])} == {False}


def test_a_class_does_not_make_two_others_equal():
    """Ranks 0 and 2 hold no evidence; what rank 1 knows of its own launches says nothing of theirs."""
    first = verdicts([A.text], [sent(A, A, B)], [B.text])[0]
    assert [list(group.ranks) for group in first.disagreements[0].groups] == [[0, 1], [2]]


@pytest.mark.parametrize(
    "text",
    ['{"class":[', '{"class":[1],"config":{}}', '{"class":["a"]}', '{"class":["a"],"config":3}', '{"class":[' * 9999],
)
def test_what_a_peer_sends_raises_nothing(text):
    assert class_labels([text, A.text]) == {text: text, A.text: A.text}


# --- launches ---------------------------------------------------------------------------------------------------------

RUN = """
import json, logging, sys
sys.path[:0] = sys.argv[1:3]
folder = sys.argv[3]
from tuning.interpreter import use_interpreter
use_interpreter()
import probe_kernels as k
import torch
import tuning
from dataclasses import replace
from tuning.bitexact._probe_tables import write_classes
from tuning.bitexact.probe import probe_launches, probe_steps
from tuning.errors import DeterminismError
from tuning.tables import read_table, write_table

SCOPE = ("probe_kernels",)
n = 200
x, y = k.numbers(n), k.numbers(n, 1)

def launch(n=n, count=1):
    out = torch.zeros(1)
    for _ in range(count):
        k.total[(1,)](x, out, n)
    return out

def policy(**fields):
    return tuning.AutotunePolicy(mode="pinned", modules=SCOPE, **fields)

def add(times=1):
    total = y.clone()
    for _ in range(times):
        k.add_to[k.grid](x, total, n)
    return total

def first(m):
    out = torch.zeros(1)
    k.total_of_first[(1,)](x, out, n, m)
    return float(out)

def sums(index):
    return {"sum": k.sum_by_blocks(k.numbers(16, index))}  # one block holds all: each config gives the same bits

result = {}
with tuning.install(policy()) as installed:
    with probe_launches(lambda name: name.startswith(SCOPE), inputs=2) as probe:
        launch()
        plain = add()
        k.partial_sums[k.grid](x, torch.zeros(9), n)
        first(1), first(150)
    files, left_out = write_classes(folder, probe.keys, installed.choices, triton="3.6.0")
    result["written"] = [str(path.name) for path in files]
    result["left out"] = list(left_out)
    steps = probe_steps(sums, lambda name: name.startswith(SCOPE), inputs=2)
    write_classes(folder, steps, installed.choices, triton="3.6.0")
table = read_table(files[0])
result["steps"] = [len(e.classes) for e in table.entries if e.kernel.endswith("partial_sums")]
result["classes"] = {e.kernel: [len(g) for g in e.classes] for e in table.entries}
result["again"] = write_classes(folder, probe.keys, installed.choices)[0] == files and read_table(files[0]) == table

# A script in place of the stopwatch: what is timed later is the faster one, so the larger block.
class Faster:
    def __init__(self): self.calls = 0
    def __call__(self, call, quantiles=None):
        self.calls += 1
        call()
        return [1.0 / self.calls] * 3

for kernel in (k.add_to, k.total, k.double, k.total_of_first, k.partial_sums):
    kernel.do_bench = Faster()

with tuning.install(policy(table_path=(folder,), within_class="timed")) as installed:
    result["bits"] = bool(torch.equal(add(), plain) and torch.equal(add(3), y + x + x + x))
    launch(count=2)
    k.add_to[k.grid](x[:100], y.clone()[:100], n)   # another form: sizes that are not in the key
    result["best config"] = k.add_to.best_config.kwargs["BLOCK"]
    add()
    result["best config again"] = k.add_to.best_config.kwargs["BLOCK"]
    block = lambda c: c.launch_config.to_json()["kwargs"]["BLOCK"]
    result["choices"] = [[c.kernel, block(c), c.source, c.detail] for c in installed.choices]
    result["benchmarks"] = installed.benchmarks
    state = installed.state_dict()["choices"]
    result["state"] = [[c["kernel"], c["config"]["kwargs"]["BLOCK"], c["source"]] for c in state]
    result["sent"] = [each.config for each in installed._launched()]

with tuning.install(policy(table_path=(folder,))) as installed:
    add()
    result["pinned"] = [[c.launch_config.to_json()["kwargs"]["BLOCK"], c.source] for c in installed.choices]

with tuning.install(policy(table_path=(folder,), within_class="timed")) as installed:
    value = sums(0)["sum"]
    result["by caller"] = [[c.source, c.launch_config.to_json()["kwargs"]["BLOCK"]] for c in installed.choices]
    sums(1), sums(0)
    result["by caller said"] = [text for kind, text in installed.manifest().notices if kind == "class_evidence"]

# A table that claims what does not hold: fail closed.
wrong = [replace(e, classes=(tuple(c for group in e.classes for c in group),)) for e in table.entries]
write_table(folder, replace(table, entries=tuple(wrong)))
with tuning.install(policy(table_path=(folder,), within_class="timed")) as installed:
    try:
        launch()
        result["contradiction"] = "no error"
    except DeterminismError as error:
        result["contradiction"] = str(error)
    # The first form bears the class out, and the larger block is the faster one. The second does not.
    result["first form"] = first(1) == float(x[0])
    result["first form launched"] = [c.source for c in installed.choices if c.kernel.endswith("total_of_first")]
    for _ in range(2):
        try:
            first(150)
            result["second form"] = "no error"
        except DeterminismError as error:
            result["second form"] = str(error)

# Another compiler: the pin, and a warning.
stale = [replace(e, evidence={**e.evidence, "probe": {**e.evidence["probe"], "compiler": "other"}}) for e in wrong]
write_table(folder, replace(table, entries=tuple(stale)))
with tuning.install(policy(table_path=(folder,), within_class="timed")) as installed:
    launch()
    add()
    result["stale"] = [[c.source, c.launch_config.to_json()["kwargs"]["BLOCK"]] for c in installed.choices]
    result["notices"] = [kind for kind, _ in installed.manifest().notices]
print(json.dumps(result))
"""


@pytest.fixture(scope="module")
def ran(tmp_path_factory) -> dict[str, Any]:
    pytest.importorskip("torch")
    from tuning.interpreter import numpy_problem

    triton = pytest.importorskip("triton")
    if numpy_problem(triton.__version__):
        pytest.skip("this numpy does not work with the interpreter of this Triton")
    folder = tmp_path_factory.mktemp("tables")
    command = [sys.executable, "-c", RUN, str(TESTS.parent), str(TESTS), str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def test_classes_are_written_beside_what_the_run_chose(ran):
    assert ran["written"] == ["probe_kernels.json"]
    assert ran["classes"] == {
        "probe_kernels.add_to": [2],
        "probe_kernels.partial_sums": [3],
        "probe_kernels.total": [1, 1, 1, 1],
        "probe_kernels.total_of_first": [1, 1],
    }
    assert ran["again"] is True
    (line,) = ran["left out"]
    assert line.startswith("probe_kernels.partial_sums")
    assert "reads best_config" in line


def test_the_fastest_of_the_class_is_launched_and_the_bits_stay(ran):
    assert ran["bits"] is True
    rows = {(kernel, source): (block, detail) for kernel, block, source, detail in ran["choices"]}
    block, detail = rows["probe_kernels.add_to", "timed"]
    assert block == 64
    assert "timed within the class of BLOCK=32" in detail
    assert "no difference observed on 2 inputs" in detail
    assert ran["benchmarks"] == 2


def test_what_has_no_evidence_gets_the_pin(ran):
    assert ran["best config"] == 32
    assert ran["best config again"] == 64
    assert ["probe_kernels.total", 32, "exact"] in [row[:3] for row in ran["choices"]]
    assert ["probe_kernels.add_to", 32, "exact"] in [row[:3] for row in ran["choices"]]
    assert ran["pinned"] == [[32, "exact"]]


def test_a_checkpoint_carries_the_chosen_config(ran):
    assert ["probe_kernels.add_to", 32, "exact"] in ran["state"]
    assert all(source != "timed" for _, _, source in ran["state"])


def test_what_is_sent_to_other_ranks_names_the_class(ran):
    timed = [text for text in ran["sent"] if text.startswith('{"class":[')]
    pin = next(text for text in ran["sent"] if '"BLOCK":32' in text and not text.startswith('{"class"'))
    assert len(timed) == 1
    assert len(set(class_labels([timed[0], pin]).values())) == 1


def test_a_class_that_does_not_hold_fails_closed(ran):
    assert "are in one bit class, and differ in out here" in ran["contradiction"]


def test_each_form_of_a_key_is_tried_again(ran):
    assert ran["first form"] is True
    assert ran["first form launched"] == ["timed"]
    assert "are in one bit class, and differ in out here" in ran["second form"]


def test_what_the_caller_judged_keeps_the_pin_and_says_so_once(ran):
    assert ran["steps"] == [1]
    assert ran["by caller"] == [["exact", 32]]
    (line,) = ran["by caller said"]
    assert "its caller's outputs were compared" in line


def test_evidence_of_another_compiler_does_not_count(ran):
    assert ran["stale"] == [["exact", 32], ["exact", 32]]
    assert ran["notices"].count("class_evidence") == 2


def test_a_decision_with_freedom_is_the_same_choice():
    decision = decide(KERNEL, KEY, "sm90", LIVE, tables(), AutotunePolicy())
    assert replace(decision, free=found(tables())[0]).choice == decision.choice
