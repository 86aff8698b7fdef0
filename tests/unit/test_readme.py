"""The README's commands, code, tables and figures, held against what there is."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from recordings import record

import tuning
from tuning import cli, errors
from tuning.arguments import add_arguments, policy_from_args, policy_from_mapping
from tuning.callbacks.loops import CHOICES_FILE, STATE_KEY
from tuning.journal import JournalWriter
from tuning.policy import UNAVAILABLE, policy_fields
from tuning.spec import Environment, Key
from tuning.verification import DEFAULT_TIMEOUT_SECONDS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
FIGURES = json.loads((ROOT / "bench" / "results" / "ssd_h200.json").read_text())


def blocks(language: str) -> list[str]:
    return [text for found, text in BLOCKS if found == language]


# A backslash at the end of a line joins it with the next, as in a shell.
COMMANDS = [line for text in blocks("sh") for line in re.sub(r"\\\n\s*", "", text).splitlines()]
PROSE = " ".join(README.split())


def table(first_header: str) -> list[list[str]]:
    """The cells of the table whose first column has this header, without header and rule."""
    lines = README.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(f"| {first_header} |"))
    rows = []
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows


def flags_parser() -> argparse.ArgumentParser:
    return add_arguments(argparse.ArgumentParser(exit_on_error=False))


# --- commands ---------------------------------------------------------------------------------------------------------


def test_every_kind_of_block_is_tested_here():
    assert {language for language, _ in BLOCKS} == {"sh", "python", "yaml"}
    known = re.compile(r"(pip install -e '\.\[\w+\]' && [\w-]+( demo)?|triton-tuning .*|torchrun .* train\.py .*)$")
    assert [line for line in COMMANDS if not known.match(line)] == []


def test_the_two_commands_of_a_fresh_machine_stand_on_the_first_screen():
    first_screen = README.splitlines()[:36]
    assert "pip install -e '.[demo]' && triton-tuning demo" in first_screen
    assert "pip install -e '.[test]' && pytest" in first_screen


def test_what_is_installed_exists():
    text = (ROOT / "pyproject.toml").read_text()
    section = text.partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    extras = set(re.findall(r"^(\w+) = \[", section, re.MULTILINE))
    named = {extra for line in COMMANDS for extra in re.findall(r"\.\[(\w+)\]", line)}
    assert named == {"demo", "test"}
    sentence = re.findall(r"Further extras: (.*?)\. ", PROSE)[0]
    assert named | set(re.findall(r"`(\w+)`", sentence)) == extras
    assert 'triton-tuning = "tuning.cli:main"' in text


@pytest.mark.parametrize("line", [line for line in COMMANDS if "triton-tuning" in line])
def test_our_commands_parse(line: str):
    argv = shlex.split(line.rpartition("&& ")[2])
    assert argv[0] == "triton-tuning"
    assert cli.make_parser().parse_args(argv[1:]).command == argv[1]


@pytest.mark.parametrize("mention", sorted(set(re.findall(r"`triton-tuning ([a-z][^`]*)`", README))))
def test_commands_in_the_prose_parse(mention: str):
    argv = shlex.split(mention)
    if argv[:1] == ["list"] and len(argv) == 2:
        argv.insert(1, "PACKAGE")
    assert cli.make_parser().parse_args(argv).command in argv


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("torchrun")])
def test_flags_of_training_commands_make_a_policy(line: str):
    argv = shlex.split(line)
    policy = policy_from_args(flags_parser().parse_args(argv[argv.index("train.py") + 1 :]))
    assert policy.effective_mode() in ("record", "pinned")
    assert policy.modules == ("mamba_ssm", "fla")  # recorded and pinned alike
    assert policy.verify_every == (100 if policy.effective_mode() == "pinned" else 0)


def test_a_journals_name_is_the_one_said(tmp_path: Path):
    said = re.search(r"`<prefix>(\S+)`", README)
    assert said is not None
    with JournalWriter(str(tmp_path / "run"), Environment(arch="sm90", rank=3)) as writer:
        pass
    expected = "run" + said[1]
    for name, pattern in {"N": "3", "host": r"[\w-]+", "pid": str(os.getpid()), "random": "[0-9a-f]+"}.items():
        expected = expected.replace(f"<{name}>", pattern)
    assert re.fullmatch(expected, Path(writer.path).name)


def test_recording_merging_showing_and_checking_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Every command of ours that needs no installed package, in the order of the README, in one folder."""
    monkeypatch.chdir(tmp_path)
    training = next(line for line in COMMANDS if "record-path" in line)
    argv = shlex.split(training)
    policy = policy_from_args(flags_parser().parse_args(argv[argv.index("train.py") + 1 :]))
    assert policy.record_path is not None
    kernel = "mamba_ssm.ops.triton.ssd_bmm._bmm_chunk_fwd_kernel"
    key = Key.of({"chunk_size": 64, "K": 64, "IS_CAUSAL": False}, {"a_ptr": "float16"})
    with JournalWriter(policy.record_path, Environment(arch="sm90")) as writer:
        writer.write(record({16: 1.0, 32: 2.0}, kernel=kernel, source=None, key=key))
    ran = []
    for line in COMMANDS:
        command = shlex.split(line)
        if command[0] == "triton-tuning" and command[1] in ("report", "merge", "show"):
            assert cli.main(command[1:]) == 0, line
            ran.append(command[1])
    assert ran == ["report", "merge", "show"]
    assert "num_warps=4" in capsys.readouterr().out
    pinned = shlex.split(next(line for line in COMMANDS if "mode pinned" in line))
    policy = policy_from_args(flags_parser().parse_args(pinned[pinned.index("train.py") + 1 :]))
    with tuning.install(policy):
        pass  # reads the table that the command line wrote
    assert [path.name for path in Path(policy.table_path[0]).glob("*/*")] == ["mamba_ssm.json"]


@pytest.mark.peers("mamba_ssm")
def test_the_lists_as_written(capsys: pytest.CaptureFixture[str]):
    ran = 0
    for line in COMMANDS:
        command = shlex.split(line)
        if command[:2] == ["triton-tuning", "list"] and "fla" not in command:  # FLA alone imports for seconds
            assert cli.main(command[1:]) == 0, line
            ran += 1
    assert ran == 1
    assert "43 autotuners, 474 candidates in mamba_ssm" in capsys.readouterr().out


# --- code -------------------------------------------------------------------------------------------------------------

PRELUDE = f"""
import sys
sys.path[:0] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
from stub_kernels import FakeTensor, StubKernel, autotuner, configs, launch

def kernel(x, y, n, flag: "constexpr", BLOCK: "constexpr"):
    pass

kernel.__module__ = "mamba_ssm.ops.stub"
tuner = autotuner(configs(16, 32, 64), stub=StubKernel(fn=kernel))

def train_step():
    launch(tuner, FakeTensor(), FakeTensor(), 64, False)
"""


def run_block(code: str, *argv: str, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    done = subprocess.run(
        [sys.executable, "-c", PRELUDE + code, *argv],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["--triton-autotune-mode", "pinned", "--triton-autotune-verify-every", "10"],
        ["--triton-autotune-record-path=j/r"],
    ],
    ids=["as it is", "pinned", "record"],
)
def test_the_training_loop_runs(argv: list[str], tmp_path: Path):
    run_block(blocks("python")[0], *argv, cwd=tmp_path)
    assert len(list(tmp_path.glob("j/*.journal"))) == any("record" in word for word in argv)


def test_the_loop_has_the_three_lines_that_it_counts():
    numbered = re.findall(r"^ *(\S.*?)  # (\d)$", blocks("python")[0], re.MULTILINE)
    assert [number for _, number in numbered] == ["1", "2", "3"]
    assert all("tuning." in line for line, _ in numbered)


def test_the_pinned_block_runs_and_times_nothing(tmp_path: Path):
    counted, choice = run_block(blocks("python")[1], cwd=tmp_path).splitlines()
    assert counted == "0 candidates timed"
    assert choice.startswith("mamba_ssm.ops.stub.kernel n=64 ")
    assert "cheapest" in choice


def test_the_line_that_shows_misses_is_the_one_said(tmp_path: Path):
    said = re.findall(r"`(mode pinned: choices: [^`]*)`", PROSE)
    printed = run_block(blocks("python")[1] + "print(installed.summary())\n", cwd=tmp_path).splitlines()[-1]
    assert said == ["mode pinned: choices: M cheapest, N exact; 0 candidates timed"]
    assert printed == said[0].replace("M cheapest, N exact", "1 cheapest")


def test_the_resumable_loop_runs_and_resumes(tmp_path: Path):
    for _ in range(2):
        run_block(blocks("python")[2], cwd=tmp_path)
    assert [path.name for path in (tmp_path / "checkpoint").iterdir()] == ["triton_tuning.json"]


FAKE_TORCHTITAN = """
from types import ModuleType

class Trainer:
    class Config: pass
    def __init__(self, config): self.step = 0
    def train_step(self, data_iterator): self.step += 1; train_step()
    def state_dict(self): return {"step": self.step}
    def load_state_dict(self, state): self.step = state["step"]
    def close(self): pass

sys.modules["torchtitan"] = ModuleType("torchtitan")
sys.modules["torchtitan.trainer"] = ModuleType("torchtitan.trainer")
sys.modules["torchtitan.trainer"].Trainer = Trainer
kernel.__module__ = "fla.ops.stub"
"""
RUN_TORCHTITAN = """
first = PinnedTrainer(None)
first.train_step(None)
state = first.state_dict()
first.close()
second = PinnedTrainer(None)
second.load_state_dict(state)
second.train_step(None)
print(second.step, tuning.choices()[0].detail.partition(";")[0])
second.close()
print(tuning.active_policy())
"""


def test_the_trainer_of_torchtitan_resumes(tmp_path: Path):
    printed = run_block(FAKE_TORCHTITAN + blocks("python")[3] + RUN_TORCHTITAN, cwd=tmp_path)
    assert printed.splitlines() == ["2 resumed from a checkpoint", "None"]


def test_the_callbacks_and_their_keys_are_named_as_they_are():
    for module in ("hf", "lightning"):
        assert f"`tuning.callbacks.{module}.TuningCallback(policy)`" in README
        assert (ROOT / "tuning" / "callbacks" / f"{module}.py").exists()
    assert f"`{CHOICES_FILE}` in the checkpoint's folder" in README
    assert f"under `{STATE_KEY}`" in README


def test_deterministic_mode_of_a_framework(tmp_path: Path):
    prelude = """
import argparse
import tuning
args = tuning.add_arguments(argparse.ArgumentParser()).parse_args(["--deterministic-mode"])
"""
    after = """
import torch
print(tuning.active_policy().effective_mode(deterministic=True), torch.are_deterministic_algorithms_enabled())
from tuning.determinism import mode_from_args
print(type(mode_from_args(args)).__name__)
"""
    printed = run_block(prelude + blocks("python")[4] + after, cwd=tmp_path)
    assert printed.splitlines() == ["pinned True", "DeterministicMode"]


NET = """
import itertools
import torch

model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters())
runs = itertools.count()

def step():
    optimizer.zero_grad()
    loss = model(torch.randn(4, 8) {fault}).sum()
    loss.backward()
    optimizer.step()
    return {{"loss": loss.detach()}}
"""


def test_runs_are_compared_and_the_first_op_that_differs_is_named(tmp_path: Path):
    equal = run_block(NET.format(fault="") + blocks("python")[5], cwd=tmp_path).splitlines()
    assert re.fullmatch(r"[0-9]+ values equal bit for bit in 2 runs", equal[0])
    assert re.fullmatch("[0-9a-f]{32,}", equal[-1])
    lines = run_block(NET.format(fault="+ next(runs)") + blocks("python")[5], cwd=tmp_path).splitlines()
    assert re.fullmatch(r"[1-9][0-9]* of [0-9]+ values differ between run 0 and run 1", lines[0])
    assert any(line.startswith("first op that differs: aten.add.Tensor, forward") for line in lines)


def test_every_python_block_is_run_above():
    assert len(blocks("python")) == 6


def test_the_yaml_section_is_the_policy_of_the_python_block():
    (text,) = blocks("yaml")
    from_yaml = policy_from_mapping(yaml.safe_load(text)["triton_autotune"])
    call = re.search(r"AutotunePolicy\((.*)\)", blocks("python")[1])
    assert call is not None
    assert from_yaml == eval(f"AutotunePolicy({call[1]})", {"AutotunePolicy": tuning.AutotunePolicy})


def test_every_public_name_that_is_mentioned_exists():
    mentioned = set(re.findall(r"\btuning\.([A-Za-z]\w*)", re.sub(r"\S*\.(?:json|md)\b", "", README)))
    assert mentioned
    assert mentioned - {"bitexact", "callbacks", "determinism"} <= set(tuning.__all__)


# --- tables and figures -----------------------------------------------------------------------------------------------


def test_the_flags_are_those_of_the_parser():
    listed = [cells[0].strip("`") for cells in table("flag")]
    added = [next(iter(action.option_strings)) for action in flags_parser()._actions if action.dest != "help"]
    assert listed == added
    assert listed[-1] == "--deterministic-mode"


def test_the_defaults_of_the_flags_are_those_of_the_policy():
    shown = {
        cells[0].strip("`").removeprefix("--triton-autotune-").replace("-", "_"): cells[1] for cells in table("flag")
    }
    for field in policy_fields():
        default = field.default
        if field.name in ("mode", "config_invariant"):
            continue  # in words
        if field.name == "modules":
            expected = f"`{' '.join(default)}`"
        elif isinstance(default, bool):
            expected = "yes" if default else "no"
        elif isinstance(default, str):
            expected = f"`{default}`"
        else:
            expected = str(default) if default else {0: "0"}.get(default if type(default) is int else 1, "none")
        assert shown[field.name] == expected, field.name
    assert len(next(field for field in policy_fields() if field.name == "config_invariant").default) == 3
    assert shown["config_invariant"].startswith("three ")


def test_what_is_refused_in_this_version_is_said():
    meanings = {
        cells[0].strip("`").removeprefix("--triton-autotune-").replace("-", "_"): cells[2] for cells in table("flag")
    }
    refused = {
        (name, value)
        for name, text in meanings.items()
        for clause in text.split(";")
        if "refused in this version" in clause
        for value in re.findall(r"`(\w+)`", clause)
    }
    assert refused == UNAVAILABLE


def test_the_errors_are_all_there():
    listed = [cells[0].strip("`") for cells in table("error")]
    assert sorted([*listed, "TuningError"]) == sorted(errors.__all__)
    for name, when in ((cells[0].strip("`"), cells[1]) for cells in table("error")):
        found = re.search(r"also an? `(\w+)`", when)
        if found:
            parent: Any = getattr(errors, found[1], None) or ValueError
            assert issubclass(getattr(errors, name), parent)


def test_the_exit_codes_are_those_of_the_command_line():
    listed = {int(number) for cells in table("exit code of `triton-tuning`") for number in cells[0].split(", ")}
    assert listed == {0, cli._PROBLEMS, cli._USAGE, cli._INTERRUPTED, cli._PIPE_CLOSED}


def test_links_lead_to_files():
    targets = [target for target in re.findall(r"\]\(([^)#]+)", README) if "://" not in target]
    assert targets
    assert [target for target in targets if not (ROOT / target).is_file()] == []


def test_the_figures_are_the_committed_ones():
    rows = {cells[0]: cells[1:] for cells in table("")}
    recorded, pinned, stock = (FIGURES[name] for name in ("recorded", "pinned", "stock"))
    summary = FIGURES["summary"]

    def digests(runs: list[Any]) -> int:
        return len({digest for run in runs for digest in run["digests"]})

    def disagreeing(runs: list[Any]) -> int:
        seen: dict[Any, set[str]] = {}
        for run in runs:
            for choice in run["choices"]:
                seen.setdefault((choice["kernel"], choice["key"]), set()).add(choice["config"])
        return sum(len(configs) > 1 for configs in seen.values())

    def between(runs: list[Any]) -> str:
        times = [run["first_step_s"] for run in runs]
        return f"{min(times):.1f} to {max(times):.1f} s"

    assert rows == {
        "different digests of output and gradients": [
            f"{digests(stock)} in {len(stock)} processes",
            f"{digests(pinned)} in {len(pinned)} processes",
        ],
        "keys on which the processes chose differently": [
            f"{disagreeing(stock)} of {summary['keys']}",
            f"{disagreeing(pinned)} of {summary['keys']}",
        ],
        "candidates timed in each process": [str(stock[0]["benchmarks"]), str(pinned[0]["benchmarks"])],
        "first step, empty compile cache": [
            f"{recorded[0]['first_step_s']:.1f} s (recording)",
            f"{pinned[0]['first_step_s']:.1f} s",
        ],
        "first step, full compile cache": [between(stock), between(pinned[1:])],
    }
    prose = " ".join(README.split())
    assert {run["benchmarks"] for run in stock} == {120}
    assert {run["benchmarks"] for run in pinned} == {0}
    for fact in (
        FIGURES["device"],
        f"Triton {FIGURES['triton']}",
        f"torch {FIGURES['torch']}",
        f"{summary['keys']} tuning keys",
    ):
        assert fact in prose
    assert f"mamba_ssm {FIGURES['mamba_ssm'].split()[0]}" in prose


def test_the_time_that_a_check_waits_is_the_one_said():
    assert f"`AbsentRankError` after {DEFAULT_TIMEOUT_SECONDS:g} s" in " ".join(README.split())


def test_tables_that_ship_are_the_ones_named():
    sentence = re.findall(r"Tables for (.*?) come with", " ".join(README.split()))[0]
    named = set(re.findall(r"`(\w+)`", sentence))
    tables = {path: json.loads(path.read_text()) for path in (ROOT / "tables").glob("*/*.json")}
    shipped = {(path.parent.name, path.stem) for path, document in tables.items() if document["entries"]}
    assert named == {arch for arch, _ in shipped}
    also = re.findall(r"and for these, (.*?) lists of configs that are known to be wrong", PROSE)[0]
    assert named | set(re.findall(r"`(\w+)`", also)) == {
        path.parent.name for path, document in tables.items() if document["denied"]
    }
    without = re.findall(r"come with the library \((.*?)\) get `cheapest` everywhere", PROSE)[0].split(", ")
    assert without
    assert named.isdisjoint(without)
    assert "fla" not in {package for _, package in shipped}  # as the same sentence says


def result(name):
    return json.loads((ROOT / "bench" / "results" / f"{name}.json").read_text())


def test_the_costs_are_those_of_the_committed_results():
    launch = result("launch_h200")
    for name, sides in launch["times"].items():
        medians = [sides[side]["median_us"] for side in ("bare JIT", "pinned", "stock, one config", "stock, hit")]
        row = f"| {name} | {' | '.join(f'{value:.1f}' for value in medians)} |"
        assert row in README or name in ("12 arguments, pre_hook", "12 arguments, Heuristics outside"), row
    prose = " ".join(README.split())
    for fact in (f"Python {launch['python']}", launch["date"], f"`{launch['command'].split(' --out')[0]}`"):
        assert fact in prose
    cost = result("nccl_2x_h200")["cost"]
    assert f"takes {cost['later_median_ms']:.1f} ms, the first one {cost['first_ms']:.1f} ms" in prose
    warmup = result("warmup_h200")["summary"]
    empty, full, after, took = (
        warmup[name]
        for name in (
            "first step, pinned, empty cache [s]",
            "first step, pinned, full cache [s]",
            "first step, pinned, after warmup [s]",
            "warmup [s]",
        )
    )
    assert f"took {empty:.1f} s, after a warmup of {took:.1f} s it took {after:.1f} s, and {full:.1f} s" in prose


def test_the_versions_of_ci_are_those_it_runs():
    script = (ROOT / ".ci" / "run").read_text()
    others = re.findall(r"other_tritons=\((.*?)\)", script)[0].split()
    tritons = sorted({version.rpartition(".")[0] for version in others} | {"3.6"})
    assert 'stage "tests, Triton 3.6"' in script
    assert f"CI runs Python 3.11 with Triton {', '.join(tritons[:-1])} and {tritons[-1]}" in PROSE


def test_the_costs_of_deterministic_mode_are_the_measured_ones():
    first = result("determinism_h200")["runs"]["fla1"]
    names = {
        "gated delta rule": "gated_delta_rule",
        "GDN-2": "gdn2",
        "L2 norm": "l2norm",
        "short convolution": "causal_conv1d",
    }

    def shown(value: float | None) -> str:
        if value is None:
            return "refuses its backward"
        return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"

    rows = {name: [shown(first[part][side]) for side in ("native_ms", "fla_pinned_ms")] for name, part in names.items()}
    assert {cells[0]: cells[1:] for cells in table("part of FLA")} == rows
    native, theirs = (shown(first["delta_rule"][side]) for side in ("native_ms", "fla_pinned_ms"))
    assert f"the torch-native form took {native} ms and FLA's {theirs} ms" in PROSE


def test_the_words_that_are_explained_are_those_in_use():
    words = [cells[0] for cells in table("word")]
    source = " ".join(path.read_text() for path in (ROOT / "tuning").rglob("*.py"))
    assert len(words) == 5
    assert [word for word in words if word not in source.replace("_", " ")] == []


def test_the_recordings_of_the_sm90_table_are_counted():
    count = len(list((ROOT / "bench" / "data" / "journals").glob("*.journal")))
    assert (count, len(FIGURES["recorded"])) == (4, 3)
    assert "merges four recordings, one more than the three of the figures" in PROSE
    said = " ".join((ROOT / "bench" / "README.md").read_text().split())
    assert "`journals/` (four recordings" in said


def test_the_results_of_the_benchmarks_are_listed():
    listed = re.findall(r"^\| `(\w+)\.json`", (ROOT / "bench" / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.stem for path in (ROOT / "bench" / "results").glob("*.json"))


def test_lines_of_prose_are_short():
    long = [line for line in README.splitlines() if len(line) > 116 and not line.startswith("|")]
    assert long == []


def test_what_deterministic_mode_is_said_to_show_was_shown():
    claims = {claim["claim"]: claim["holds"] for claim in result("determinism_h200")["claims"]}
    for what in ("losses", "gradients", "weights"):
        assert claims[f"mode on, two processes: {what} equal"]
        assert claims[f"mode off, two processes: {what} differ"]
    assert all(claims.values())
    assert result("nccl_2x_h200")["equal digests"] == {"deterministic": True, "default": False}
