"""Bit classes observed by replaying launches: planted differences are found, and the run does not feel the probe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tuning.bitexact._probe_classes import (
    CandidateProbe,
    InputProbe,
    KeyProbe,
    contradictions,
    deciding_fields,
    partition,
    refined,
)
from tuning.bitexact._probe_inputs import fill, input_names
from tuning.bitexact.probe import Probe, compare_probes, read_probe, write_probe
from tuning.errors import TableError
from tuning.spec import Key, LaunchConfig

TESTS = Path(__file__).parents[1]

RUN = """
import contextlib, json, logging, random, sys
sys.path[:0] = sys.argv[1:3]
from tuning.interpreter import use_interpreter
use_interpreter()
import probe_kernels as k
import torch
import tuning
from tuning import _launch_replay
from tuning._launch_replay import watch_launches
from tuning.bitexact.probe import probe_launches, probe_steps

SCOPE = lambda name: name.startswith("probe_kernels")
tuning.install(tuning.AutotunePolicy(mode="pinned", modules=("probe_kernels",)))
n = 200
x = k.numbers(n)
wide = k.numbers(4 * n).to(torch.float16)
felt = {}
state = torch.get_rng_state()
with probe_launches(SCOPE, inputs=5) as probe:
    total = torch.empty(1)
    k.total[(1,)](x, total, n)
    out = torch.full((n + 8,), 7.0)
    k.double[k.grid](x, out[4:-4], n)
    felt["double"] = bool(torch.equal(out[4:-4], x * 2) and (out[:4] == 7).all() and (out[-4:] == 7).all())
    y = torch.ones(n)
    k.add_to[k.grid](x, y, n)
    felt["in place, once"] = bool(torch.equal(y, x + 1))
    shared = x.clone()
    k.double[k.grid](shared, shared, n)
    felt["shared memory"] = bool(torch.equal(shared, x * 2))
    k.all_but_last[k.grid](x, torch.zeros(n), n)
    k.signed_zero[k.grid](x, torch.zeros(n + 1), n)
    k.racy[k.grid](x, torch.ones(1), torch.zeros(n), n)
    k.racy_throughout[k.grid](x, torch.ones(1), torch.zeros(n), n)
    value = k.sum_by_blocks(x)
    k.double[k.grid](x, out[4:-4], n)
    k.double[k.grid](x[:128], out[4:132], 128)
    k.double[k.grid](torch.arange(n), torch.zeros(n, dtype=torch.int64), n)
    k.sign_of_zeros[k.grid](torch.zeros(n), torch.empty(n), n)
    k.infinite_or_nan[k.grid](torch.full((n,), 3e38), torch.empty(n), n)
    k.add_once_or_twice[k.grid](x, torch.ones(n), n)
    memory = torch.zeros(n)
    k.add_by_address[k.grid](torch.tensor([memory.data_ptr()]), torch.zeros(n), n)
    felt["memory of no argument"] = bool((memory == 1).all())
    addresses = torch.tensor([3, memory.data_ptr() + 8])
    k.copy_integers[k.grid](addresses, torch.zeros_like(addresses), 2)
    k.copy_integers[k.grid](torch.tensor([3, 1 << 62, -1]), torch.zeros(3, dtype=torch.int64), 3)
felt["random state"] = bool(torch.equal(state, torch.get_rng_state()))
from triton.runtime.autotuner import Autotuner
seen = []
with watch_launches(SCOPE, lambda launch: seen.append(launch.kernel.bare_name)):
    capturing, _launch_replay.capturing = _launch_replay.capturing, lambda: True
    k.double[k.grid](x, out[4:-4], n)
    during = len(seen)
    _launch_replay.capturing = capturing
    k.double[k.grid](x, out[4:-4], n)
felt["a capture"] = (during, seen) == (0, ["double"])
said = []
logging.getLogger("tuning").addFilter(lambda record: said.append(record.getMessage()) or True)
with watch_launches(SCOPE, lambda launch: None):
    tuning.install(tuning.AutotunePolicy(mode="pinned", modules=("probe_kernels",)))
k.double[k.grid](x, out[4:-4], n)
with watch_launches(SCOPE, lambda launch: None):
    tuning.uninstall()
    k.double[k.grid](x, out[4:-4], n)
felt["nobody is blamed"] = not [line for line in said if "somebody else" in line]
felt["all is back"] = Autotuner.run.__module__ == "triton.runtime.autotuner"
tuning.install(tuning.AutotunePolicy(mode="pinned", modules=("probe_kernels",)))
drawn = []
for watch in (contextlib.nullcontext, lambda: probe_launches(SCOPE, inputs=2)):
    torch.manual_seed(3), random.seed(3)
    with watch():
        k.draws[k.grid](x, torch.empty(n), n)
    drawn.append((float(torch.rand(1)), random.random()))
felt["numbers drawn"] = drawn[0] == drawn[1]
k.double[k.grid](x, out[4:-4], n)

def fails(launch):
    launch.launch(launch.candidates()[1], launch.args, launch.kwargs)
    raise KeyError("planted")

with watch_launches(SCOPE, fails):
    for kernel in (k.double, k.signed_zero):
        if kernel is k.signed_zero:
            kernel.__dict__.pop("best_config")
        try:
            kernel[k.grid](x, torch.empty(n + 1), n)
        except KeyError:
            pass
felt["best config after a failure"] = k.double.best_config.kwargs["BLOCK"] == 32
felt["no best config after a failure"] = "best_config" not in vars(k.signed_zero)
felt["best config"] = k.double.best_config is not None and k.double.best_config.kwargs["BLOCK"] == 32
felt["benchmarks"] = tuning.benchmarks_run()
before = len(probe.keys)
k.double[k.grid](wide, torch.zeros_like(wide), 4 * n)
felt["nothing after the block"] = len(probe.keys) == before

steps = probe_steps(lambda i: {"sum": k.sum_by_blocks(k.numbers(n, i))}, SCOPE, inputs=3)
flags = iter(range(100))
unsteady = probe_steps(lambda i: {"sum": k.sum_by_blocks(x) + next(flags)}, SCOPE)
kept = {}

def memoised(index):
    if index not in kept:
        kept[index] = k.sum_by_blocks(k.numbers(n, index))
    return {"sum": kept[index]}

def empty(index):
    k.sum_by_blocks(k.numbers(n, index))
    return {}

def not_a_number(index):
    k.sum_by_blocks(k.numbers(n, index))
    return {"loss": torch.full((3,), float("nan")), "zero": torch.zeros(2)}

silent = {each.__name__: probe_steps(each, SCOPE, inputs=2) for each in (memoised, empty, not_a_number)}

def two_forms(index):
    # The larger blocks are live at the second form alone.
    return {"first": k.pruned_total(k.numbers(60, index)), "second": k.pruned_total(k.numbers(n, index))}

forms = probe_steps(two_forms, SCOPE, inputs=2, every_kernel=True)
print(json.dumps({
    "probe": probe.to_json(),
    "invariant": probe.config_invariant,
    "listed": probe.contradicted(("probe_kernels.total", "probe_kernels.double")),
    "racy": probe.contradicted(("probe_kernels.racy", "probe_kernels.racy_throughout")),
    "felt": felt,
    "steps": [each.to_json() for each in steps],
    "silent": {name: [each.to_json() for each in probes] for name, probes in silent.items()},
    "forms": [each.to_json() for each in forms],
    "unsteady": [each.to_json() for each in unsteady],
}))
"""


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    pytest.importorskip("torch")
    from tuning.interpreter import numpy_problem

    triton = pytest.importorskip("triton")
    if numpy_problem(triton.__version__):
        pytest.skip("this numpy does not work with the interpreter of this Triton")
    command = [sys.executable, "-W", "error::RuntimeWarning", "-c", RUN, str(TESTS.parent), str(TESTS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, "CI": ""})
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


def probes(found: dict[str, Any], kernel: str) -> list[KeyProbe]:
    rows = [KeyProbe.from_json(row) for row in found["probe"]["keys"]]
    return [row for row in rows if row.kernel == f"probe_kernels.{kernel}"]


def test_the_run_does_not_feel_the_probe(found):
    felt = dict(found["felt"])
    assert felt.pop("benchmarks") == 0
    assert len(felt) == 13
    assert all(felt.values()), felt


def test_an_order_of_summation_makes_classes(found):
    (probe,) = probes(found, "total")
    assert [len(group) for group in probe.classes] == [1, 1, 1, 1]
    assert probe.tried == 5
    assert len(probe.distances) == 6
    assert all(distance.ulps >= 1 for distance in probe.distances)
    assert (probe.written, probe.in_place) == (("out",), ())
    assert deciding_fields(probe.classes).separate == ("BLOCK",)


def test_each_input_alone_tells_orders_of_summation_apart(found):
    (probe,) = probes(found, "total")
    assert [len(set(each.outputs)) > 1 for each in probe.inputs] == [True] * 5
    assert len({each.digest for each in probe.inputs}) == 5


def test_elementwise_arithmetic_is_one_class(found):
    for probe in probes(found, "double")[:3]:
        assert probe.single
        assert probe.verdict == "no difference observed on 5 inputs"
    assert set(deciding_fields(probe.classes).free) == {"BLOCK", "num_warps"}


def test_each_form_of_launch_is_probed_once(found):
    """Views of one buffer, memory shared by both arguments, the shorter one, integers; the second launch is known."""
    assert len(probes(found, "double")) == 4
    assert len({probe.form for probe in probes(found, "double")}) == 4


def test_one_input_does_not_count_as_several(found):
    """Integers are never filled, so what reads nothing else has one input."""
    probe = probes(found, "double")[3]
    assert probe.verdict == "no difference observed on 1 input"
    assert [each.name for each in probe.inputs] == ["captured"]


def test_the_same_input_twice_is_one():
    probe = key_probe([[config(1), config(2)]])
    assert replace(probe, inputs=probe.inputs * 3).tried == 1
    step = InputProbe("step 0", "", True, ("s=0",))
    steps = (step, replace(step, name="step 1"), replace(step, name="step 2", outputs=("s=1",)))
    assert replace(probe, inputs=steps).tried == 2


@pytest.mark.parametrize(("kernel", "ulps"), [("sign_of_zeros", 0.0), ("infinite_or_nan", None)])
def test_a_difference_counts_on_an_input_whose_outputs_are_not_finite_or_all_zero(found, kernel, ulps):
    (probe,) = probes(found, kernel)
    assert len(probe.classes) == 2
    assert probe.inputs[0].counted
    assert [(distance.ulps, distance.where) for distance in probe.distances] == [(ulps, "captured: out")]


def test_an_argument_that_is_read_and_written_is_not_poisoned(found):
    (probe,) = probes(found, "add_to")
    assert probe.in_place == probe.written == ("y",)
    assert probe.single
    (probe,) = probes(found, "add_once_or_twice")
    assert probe.in_place == ("y",)
    assert len(probe.classes) == 2
    assert probe.inputs[0].counted
    assert len(set(probe.inputs[0].outputs)) == 2


def test_an_element_left_unwritten_shows(found):
    (probe,) = probes(found, "all_but_last")
    assert len(probe.classes) == 2


def test_the_sign_of_a_zero_shows_though_no_float_lies_between(found):
    (probe,) = probes(found, "signed_zero")
    assert len(probe.classes) == 2
    assert [distance.ulps for distance in probe.distances] == [0.0]


def test_a_candidate_that_differs_from_itself_is_racy_and_in_no_class(found):
    (probe,) = probes(found, "racy")
    assert [config.kwargs for config in probe.racy] == [(("BLOCK", "64"),)]
    assert probe.classes == ((LaunchConfig.build({"BLOCK": 32}, num_stages=probe.candidates[0].config.num_stages),),)
    assert not probe.single


def test_a_kernel_whose_candidates_are_all_racy_is_no_silent_case(found):
    (probe,) = probes(found, "racy_throughout")
    assert probe.verdict == "all 2 launchable candidates are racy: each differs from itself"
    assert len(found["racy"]) == 2
    before = replace(probe, candidates=tuple(replace(each, racy=False, group=0) for each in probe.candidates))
    before = replace(before, inputs=(InputProbe("captured", "x=1", True, ("o=0",)),))
    (line,) = contradictions([before], [probe])
    assert "differs from itself" in line


def test_what_reaches_memory_of_no_argument_is_not_replayed(found):
    (probe,) = probes(found, "add_by_address")
    assert not probe.claims
    assert "makes pointers of integers (tl.pointer_type)" in probe.verdict
    held, plain = probes(found, "copy_integers")
    assert not held.claims
    assert "argument 'x' holds integers that are addresses of allocated memory" in held.verdict
    assert plain.single


def test_nothing_is_claimed_of_a_kernel_whose_best_config_is_read(found):
    (probe,) = probes(found, "partial_sums")
    assert not probe.claims
    assert probe.judged_by == "nothing"
    assert "reads best_config" in probe.verdict


def test_the_caller_judges_it_over_whole_steps(found):
    (probe,) = (KeyProbe.from_json(row) for row in found["steps"])
    assert probe.judged_by == "caller"
    assert [len(group) for group in probe.classes] == [1, 1, 1]
    assert probe.tried == 3
    assert {distance.groups for distance in probe.distances} == {(0, 1), (0, 2), (1, 2)}


def test_a_step_that_differs_from_itself_claims_nothing(found):
    (probe,) = (KeyProbe.from_json(row) for row in found["unsteady"])
    assert not probe.claims
    assert "differs from itself" in probe.verdict


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        ("memoised", "the step launches it no more when it is run again"),
        ("empty", "the step returned no tensors"),
        ("not_a_number", "no step's outputs could tell candidates apart"),
    ],
)
def test_a_step_that_can_show_nothing_claims_nothing(found, step, reason):
    (probe,) = (KeyProbe.from_json(row) for row in found["silent"][step])
    assert not probe.claims
    assert probe.judged_by == "nothing"
    assert reason in probe.verdict
    assert not probe.classes


def test_a_candidate_is_judged_at_the_forms_at_which_it_was_launched(found):
    short, long = (KeyProbe.from_json(row) for row in found["forms"])
    blocks = [[dict(config.kwargs)["BLOCK"] for group in probe.classes for config in group] for probe in (short, long)]
    assert blocks == [["32"], ["32", "64", "128"]]
    assert [len(group) for group in long.classes] == [1, 1, 1]
    assert short.form != long.form


def test_config_invariant_names_are_proposed_and_contradicted(found):
    assert found["invariant"] == ["probe_kernels.add_to", "probe_kernels.double"]
    (line,) = found["listed"]
    assert line.startswith("probe_kernels.total is listed in config_invariant")
    assert "4 classes" in line


# --- as data ----------------------------------------------------------------------------------------------------------


def config(block: int, **fields: Any) -> LaunchConfig:
    return LaunchConfig.build({"BLOCK": block}, **fields)


def key_probe(groups: list[list[LaunchConfig]], **fields: Any) -> KeyProbe:
    candidates = tuple(CandidateProbe(each, number) for number, group in enumerate(groups) for each in group)
    inputs = (InputProbe("captured", "x=1", True, tuple(f"o={number}" for number in range(len(groups)))),)
    values = {"source_hash": "ab" * 8, "form": "f" * 16, "arch": "sm90", "compiler": "c", "inputs": inputs, **fields}
    place = [values.pop(name) for name in ("source_hash",)]
    key = values.pop("key", Key.of({"n": 1}, {"x": "float32"}))
    form, arch, compiler = (values.pop(name) for name in ("form", "arch", "compiler"))
    return KeyProbe("p.kernel", *place, key, form, arch, compiler, "kernel", "", candidates, **values)


def test_partition_numbers_by_first_appearance():
    assert partition(["b", None, "a", "b"]) == (0, None, 1, 0)


def test_classes_of_several_forms_are_refined():
    a, b, c = config(1), config(2), config(4)
    assert refined([key_probe([[a, b, c]]), key_probe([[a], [b, c]])]) == ((a,), (b, c))
    assert refined([key_probe([[a, b, c]]), key_probe([[a, b]])]) == ((a, b),)
    assert refined([]) == ()


def test_the_fewest_fields_that_fix_the_class():
    rows = [[config(1, num_warps=4), config(1, num_warps=8)], [config(2, num_warps=4), config(2, num_warps=8)]]
    fields = deciding_fields(rows)
    assert (fields.separate, fields.free, fields.by) == (("BLOCK",), ("num_warps",), ("BLOCK",))
    crossed = [[config(1, num_warps=4), config(2, num_warps=8)], [config(1, num_warps=8), config(2, num_warps=4)]]
    assert deciding_fields(crossed).by == ("BLOCK", "num_warps")


def test_contradictions_are_bound_to_source_and_compiler():
    a, b = config(1), config(2)
    before, now = key_probe([[a, b]]), key_probe([[a], [b]])
    (line,) = contradictions([before], [now])
    assert "now they fall into 2 classes" in line
    assert contradictions([now], [before]) == ()
    for other in ({"compiler": "d"}, {"source_hash": "cd" * 8}, {"form": "0" * 16}, {"arch": "sm80"}):
        assert contradictions([key_probe([[a, b]], **other)], [now]) == ()


def test_a_probe_reads_back(tmp_path):
    probe = Probe("sm90", "device", 132, "c", [key_probe([[config(1)], [config(2)]])])
    write_probe(tmp_path / "p.json", probe)
    assert read_probe(tmp_path / "p.json") == probe
    write_probe(tmp_path / "p.json", replace(probe, incomplete="KeyError: 'x'"))
    assert read_probe(tmp_path / "p.json").incomplete == "KeyError: 'x'"


def test_what_would_hang_or_is_too_long_or_says_a_thing_twice_is_refused(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    write_probe(tmp_path / "p.json", Probe("sm90", "device", 132, "c", [key_probe([[config(1)], [config(2)]])]))
    text = (tmp_path / "p.json").read_text()
    (tmp_path / "twice.json").write_text(text.replace('"arch": "sm90"', '"arch": "sm80", "arch": "sm90"', 1))
    (tmp_path / "nan.json").write_text(text.replace('"multiprocessors": 132', '"multiprocessors": NaN'))
    for name, reason in (
        ("pipe", "expected a regular file"),
        ("", "found a folder"),
        ("twice.json", "a member that stands twice"),
        ("nan.json", "NaN, which is no number"),
    ):
        with pytest.raises(TableError, match=reason):
            read_probe(tmp_path / name)
    monkeypatch.setattr("tuning.bitexact.probe._MAX_BYTES", 100)
    with pytest.raises(TableError, match="at most 100 bytes"):
        read_probe(tmp_path / "p.json")


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda data: data.update(format="table"), "$.format"),
        (lambda data: data.update(schema_version=2), "$.schema_version"),
        (lambda data: data.update(arch=None), "$.arch"),
        (lambda data: data.update(incomplete=1), "$.incomplete"),
        (lambda data: data.update(more=1), "$"),
        (lambda data: data["keys"][0].update(kernel=5), "$.keys[0]"),
        (lambda data: data["keys"][0].update(judged_by="me"), "$.keys[0]"),
        (lambda data: data["keys"][0]["candidates"][0].update({"class": 7}), "$.keys[0]"),
        (lambda data: data["keys"][0]["inputs"][0].update(outputs=[]), "$.keys[0]"),
        (lambda data: data["keys"][0].update(distances=[{"classes": [0, 5], "ulps": 1.0, "where": ""}]), "$.keys[0]"),
        (lambda data: data["keys"][0].pop("form"), "$.keys[0]"),
        (lambda data: data["keys"][0].update(more=1), "$.keys[0]"),
        (lambda data: data["keys"][0]["candidates"][0].update(config={}), "$.keys[0]"),
    ],
)
def test_what_is_no_probe_is_refused_with_its_place(tmp_path, change, where):
    data = Probe("sm90", "device", 132, "c", [key_probe([[config(1)], [config(2)]])]).to_json()
    change(data)
    (tmp_path / "p.json").write_text(json.dumps(data))
    with pytest.raises(TableError) as caught:
        read_probe(tmp_path / "p.json")
    assert caught.value.where == where


def test_complex_elements_are_filled_as_pairs_of_floats():
    torch = pytest.importorskip("torch")
    values = torch.complex(torch.ones(8), torch.ones(8) * 4)[::2]
    fill("random 0", {"x": values})
    parts = torch.view_as_real(values)
    assert len(set(parts.flatten().tolist())) == 8


def test_inputs_are_named():
    assert input_names(1) == ("captured",)
    assert input_names(5) == ("captured", "random 0", "magnitudes 0", "random 1", "magnitudes 1")


# --- two probes -------------------------------------------------------------------------------------------------------


def test_two_devices_classes_and_bits_are_told_apart():
    a, b, c = config(1), config(2), config(4)
    here, there = key_probe([[a, b], [c]]), key_probe([[a, b], [c]])
    (pair,) = compare_probes([here], [there])
    assert pair.agrees
    assert str(pair) == "same classes; same bits for 3 of 3 candidates on 1 inputs"
    other_bits = replace(there, inputs=(InputProbe("captured", "x=1", True, ("o=0", "o=9")),))
    (pair,) = compare_probes([here], [other_bits])
    assert (pair.same_classes, pair.agrees, pair.differing) == (True, False, (c,))
    (pair,) = compare_probes([here], [key_probe([[a], [b, c]])])
    assert (pair.same_classes, pair.agrees) == (False, False)
    other_input = replace(there, inputs=(InputProbe("captured", "x=2", True, ("o=0", "o=9")),))
    (pair,) = compare_probes([here], [other_input])
    assert str(pair) == "same classes; no input was the same, so bits were not compared"
    (pair,) = compare_probes([here], [key_probe([[a, b], [c]], source_hash="cd" * 8)])
    assert str(pair) == "the kernel's source differs"
    assert compare_probes([here], [key_probe([[a]], form="0" * 16)]) == ()


# --- the command ------------------------------------------------------------------------------------------------------

SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
from tuning.interpreter import use_interpreter
use_interpreter()
import probe_kernels as k
import torch

x = k.numbers(200)
print("the program speaks")
k.total[(1,)](x, torch.empty(1), 200)
k.double[k.grid](x, torch.empty(200), 200)

def step(index):
    return {"sum": k.sum_by_blocks(k.numbers(200, index))}

step(0)
"""


def command(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "tuning", "probe", *arguments]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(TESTS.parent)}
    return subprocess.run(program, capture_output=True, text=True, check=False, cwd=folder, env=environment)


def test_the_command_probes_a_program_and_compares(tmp_path, found):
    (tmp_path / "script.py").write_text(SCRIPT)
    flags = ("--triton-autotune-modules", "probe_kernels", "--triton-autotune-config-invariant", "probe_kernels.total")
    run = ("--inputs", "2", "--step", "step", "--classes", "tables", *flags)
    first = command(tmp_path, "--json", "--out", "a.json", *run, "--", "script.py", str(TESTS))
    assert first.returncode == 1, first.stderr
    assert "the program speaks" in first.stderr
    document = json.loads(first.stdout)
    assert document["config_invariant"] == ["probe_kernels.double"]
    assert document["contradicted"][0].startswith("probe_kernels.total is listed")
    probe = read_probe(tmp_path / "a.json")
    assert [each.judged_by for each in probe.keys] == ["kernel", "kernel", "caller"]
    table = json.loads((tmp_path / "tables/cpu/probe_kernels.json").read_text())
    assert {row["kernel"]: len(row["classes"]) for row in table["entries"]} == {
        "probe_kernels.double": 1,
        "probe_kernels.partial_sums": 3,
        # Listed as config-invariant, so the run left it to the clock: there is no pin to write classes beside.
    }
    assert document["without_classes"][0].startswith("probe_kernels.total")

    merged = [
        replace(each, candidates=tuple(replace(one, group=0) for one in each.candidates), inputs=each.inputs[:1])
        for each in probe.keys[:1]
    ]
    inputs = (replace(merged[0].inputs[0], outputs=merged[0].inputs[0].outputs[:1]),)
    claims = replace(merged[0], inputs=inputs, distances=())
    write_probe(tmp_path / "claims.json", Probe(probe.arch, "", 0, probe.compiler, [claims]))
    contradicted = command(
        tmp_path, "--against", "claims.json", "--out", "b.json", *flags, "--", "script.py", str(TESTS)
    )
    assert contradicted.returncode == 1
    assert "bit classes are contradicted: probe_kernels.total" in contradicted.stderr
    broken_off = read_probe(tmp_path / "b.json")
    assert broken_off.incomplete.startswith("DeterminismError: bit classes are contradicted")
    assert [each.kernel for each in broken_off.keys] == ["probe_kernels.total"]

    same = command(tmp_path, "--compare", "a.json", "a.json")
    assert same.returncode == 0, same.stderr
    assert "3 of 3 keys agree" in same.stdout
    differs = command(tmp_path, "--compare", "a.json", "claims.json")
    assert differs.returncode == 1
    assert "0 of 1 key agree" in differs.stdout
    write_probe(tmp_path / "none.json", replace(probe, keys=[]))
    nothing = command(tmp_path, "--compare", "a.json", "none.json")
    assert nothing.returncode == 1
    assert "nothing was compared" in nothing.stdout

    other = [replace(each, compiler="another") for each in probe.keys]
    write_probe(tmp_path / "other.json", replace(probe, compiler="another", keys=other))
    unheld = command(tmp_path, "--against", "other.json", "--out", "c.json", *flags[:2], "--", "script.py", str(TESTS))
    assert unheld.returncode == 1
    text = " ".join(unheld.stdout.split())
    assert f"0 of 3 keys could be held against other.json: it is of another, this is {probe.compiler}" in text
    held = command(tmp_path, "--against", "a.json", "--out", "c.json", *flags[:2], "--", "script.py", str(TESTS))
    assert held.returncode == 0, held.stderr
    assert "2 of 3 keys could be held against a.json" in held.stdout


def test_what_a_program_that_ends_early_showed_is_written(tmp_path, found):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "beside.py").write_text("WORD = 'a sibling of the script is imported'\n")
    (tmp_path / "sub" / "exits.py").write_text(f"import beside\nprint(beside.WORD)\n{SCRIPT}\nsys.exit(0)\n")
    (tmp_path / "sub" / "raises.py").write_text(SCRIPT + "\nraise KeyError('planted')\n")
    (tmp_path / "sub" / "fails.py").write_text(SCRIPT + "\nsys.exit(3)\n")
    (tmp_path / "sub" / "nothing.py").write_text("")
    flags = ("--inputs", "1", "--triton-autotune-modules", "probe_kernels")

    def run(name: str, *more: str) -> tuple[subprocess.CompletedProcess[str], Probe]:
        done = command(tmp_path, "--out", f"{name}.json", *flags, *more, "--", f"sub/{name}.py", str(TESTS))
        return done, read_probe(tmp_path / f"{name}.json")

    done, probe = run("exits", "--step", "step")
    assert done.returncode == 0, done.stderr
    assert "a sibling of the script is imported" in done.stderr
    assert (probe.incomplete, [each.judged_by for each in probe.keys]) == ("", ["kernel", "kernel", "caller"])
    for name, reason in (("raises", "KeyError: 'planted'"), ("fails", "ended with exit code 3")):
        done, probe = run(name)
        assert done.returncode == 1
        assert len(probe.keys) == 3
        assert reason in probe.incomplete
    done, probe = run("raises", "--step", "no_such_step")
    assert probe.incomplete
    done, probe = run("nothing")
    assert done.returncode == 1
    assert "expected sub/nothing.py to launch an autotuner in scope" in done.stderr
    assert probe.incomplete
    assert not probe.keys


@pytest.mark.parametrize("flag", ["--out", "--classes"])
def test_a_place_that_cannot_be_written_is_found_before_the_run(tmp_path, flag, capsys, monkeypatch):
    from tuning.cli import main

    monkeypatch.chdir(tmp_path)
    (tmp_path / "script.py").write_text("raise KeyError('it ran')\n")
    (tmp_path / "file").write_text("")
    places = {"--out": "out.json", "--classes": "tables", flag: "file/below"}
    arguments = [word for pair in places.items() for word in pair]
    assert main(["probe", *arguments, "--", "script.py"]) == 2
    assert f"{flag} file/below: expected a place that can be written" in capsys.readouterr().err
    assert main(["probe", "--out", str(tmp_path), "--", "script.py"]) == 2
    assert "not a regular file" in capsys.readouterr().err


OWN_POLICY = """
import sys
sys.path.insert(0, sys.argv[1])
from tuning.interpreter import use_interpreter
use_interpreter()
import probe_kernels as k
import torch
import tuning
if sys.argv[2] == "none":
    tuning.uninstall()
else:
    tuning.install(tuning.AutotunePolicy(mode=sys.argv[2], modules=("probe_kernels",)))
k.total[(1,)](k.numbers(200), torch.empty(1), 200)
"""


@pytest.mark.parametrize("mode", ["pinned", "auto", "none"])
def test_a_program_with_a_policy_of_its_own_is_probed(tmp_path, mode, found):
    (tmp_path / "script.py").write_text(OWN_POLICY)
    flags = ("--inputs", "2", "--triton-autotune-modules", "probe_kernels", "--triton-autotune-on-miss=model")
    done = command(tmp_path, "--out", "a.json", *flags, "--", "script.py", str(TESTS), mode)
    assert done.returncode == 0, done.stderr
    assert [each.kernel for each in read_probe(tmp_path / "a.json").keys] == ["probe_kernels.total"]
    said = {"none": "the program uninstalled a policy"}.get(mode, f"a policy of its own, <Installation mode={mode}")
    assert said in done.stderr
    assert (mode == "none") or "in place of that of this probe, <Installation mode=pinned" in done.stderr
    assert "somebody else" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected --out FILE and a program"),
        (["--out", "f"], "expected --out FILE and a program"),
        (["--out", "f", "--", "no_such_file.py"], "no_such_file.py cannot be run"),
        (["--out", "f", "--triton-autotune-mode", "auto", "-m", "json"], "expected mode pinned, found 'auto'"),
    ],
)
def test_what_is_called_wrongly(tmp_path, arguments, message, capsys, monkeypatch):
    from tuning.cli import main

    monkeypatch.chdir(tmp_path)
    assert main(["probe", *arguments]) == 2
    assert message in capsys.readouterr().err
