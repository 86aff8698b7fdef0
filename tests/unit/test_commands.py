"""The commands that compare, freeze, convert and diagnose: exit codes, JSON, and what they leave behind."""

from __future__ import annotations

import dataclasses
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tuning.cli import main
from tuning.manifest import write_manifest
from tuning.tables import Denied, read_table, write_table

TABLES = Path(__file__).parents[2] / "tables"
JOURNALS = Path(__file__).parents[2] / "bench" / "data" / "journals"


def document(capsys: Any, *argv: str) -> tuple[int, Any]:
    code = main([*argv, "--json"])
    return code, json.loads(capsys.readouterr().out)


def test_diff_of_a_table_with_itself_is_no_change(capsys):
    path = str(TABLES / "sm100" / "mamba_ssm.json")
    assert main(["diff", path, path]) == 0
    assert capsys.readouterr().out.strip() == "no change"


def test_diff_names_a_changed_config_and_exits_with_1(capsys, tmp_path):
    folder = tmp_path / "sm100"
    folder.mkdir()
    text = (TABLES / "sm100" / "mamba_ssm.json").read_text()
    assert text.count('"BLOCK_SIZE_H": 8}') > 0
    (folder / "mamba_ssm.json").write_text(text.replace('"BLOCK_SIZE_H": 8}', '"BLOCK_SIZE_H": 16}', 1))
    code, found = document(capsys, "diff", str(TABLES / "sm100" / "mamba_ssm.json"), str(folder / "mamba_ssm.json"))
    assert code == 1
    assert [(change["what"], "BLOCK_SIZE_H" in change["after"]) for change in found["changes"]] == [("config", True)]


def test_diff_of_evidence_alone_is_shown_and_does_not_count(capsys, tmp_path):
    folder = tmp_path / "sm90"
    folder.mkdir()
    before = TABLES / "sm90" / "mamba_ssm.json"
    text = before.read_text()
    assert '"date": "2026-11-29"' in text
    after = folder / "mamba_ssm.json"
    after.write_text(text.replace('"date": "2026-11-29"', '"date": "2026-12-31"', 1))
    code, found = document(capsys, "diff", str(before), str(after))
    assert (code, found["changed"]) == (0, False)
    assert [(change["what"], change["counts"]) for change in found["changes"]] == [("evidence", False)]
    assert main(["diff", str(before), str(after)]) == 0
    assert capsys.readouterr().out.endswith("no change of what is chosen, and 1 other difference\n")


def test_diff_of_denials_counts_those_of_one_side_alone(capsys, tmp_path):
    before = read_table(TABLES / "sm90" / "mamba_ssm.json")
    first, *rest = before.denied
    for name, denied, changed in (
        ("fewer", tuple(rest), True),
        ("reason", (dataclasses.replace(first, reason="another reason"), *rest), False),
    ):
        after = write_table(tmp_path / name, dataclasses.replace(before, denied=denied))
        code, found = document(capsys, "diff", str(TABLES / "sm90" / "mamba_ssm.json"), str(after))
        assert (code, found["changed"], [change["what"] for change in found["changes"]]) == (
            int(changed),
            changed,
            ["denied"],
        )


def test_diff_of_two_ranks_that_agree_is_no_change(capsys, tmp_path, monkeypatch):
    from stub_kernels import FakeTensor, autotuner, configs, launch

    import tuning

    paths = []
    for rank, blocks in enumerate([(64, 16, 32), (64, 16, 32), (64, 32)]):
        monkeypatch.setenv("RANK", str(rank))
        paths.append(tmp_path / f"{rank}.json")
        policy = tuning.AutotunePolicy(mode="pinned", modules=("stub_kernels",))
        with tuning.install(policy) as installed:
            launch(autotuner(configs(*blocks)), FakeTensor(), FakeTensor(), 8, flag=True)
            write_manifest(paths[-1], installed.manifest())
    code, found = document(capsys, "diff", str(paths[0]), str(paths[1]))
    assert (code, found["changed"]) == (0, False)
    assert {change["what"] for change in found["changes"]} == {"place"}
    code, found = document(capsys, "diff", str(paths[0]), str(paths[2]))
    assert (code, found["changed"]) == (1, True)
    assert [change["what"] for change in found["changes"] if change["counts"]] == ["config"]


def test_diff_of_what_is_not_there_is_one_line(capsys):
    assert main(["diff", "no/such/table.json", "no/other.json"]) == 1
    error = capsys.readouterr().err
    assert error.startswith("triton-tuning: error: ")
    assert error.count("\n") == 1


def test_doctor_exits_with_1_when_something_would_be_refused(capsys, monkeypatch):
    for name in ("CUBLAS_WORKSPACE_CONFIG", "NCCL_ALGO"):
        monkeypatch.delenv(name, raising=False)
    assert document(capsys, "doctor")[0] == 0
    monkeypatch.setenv("NCCL_ALGO", "Tree")
    code, found = document(capsys, "doctor")
    assert code == 1
    assert "NCCL_ALGO" in json.dumps(found)
    assert main(["doctor", "--attention-backend", "sage"]) == 1
    assert "refused" in capsys.readouterr().out


def test_compare_checkpoints_tells_equal_from_different(capsys, tmp_path):
    torch = pytest.importorskip("torch")
    torch.save({"w": torch.zeros(4)}, tmp_path / "a.pt")
    shutil.copy(tmp_path / "a.pt", tmp_path / "b.pt")
    torch.save({"w": torch.tensor([0.0, -0.0, 0.0, 0.0])}, tmp_path / "c.pt")
    assert document(capsys, "compare-checkpoints", str(tmp_path / "a.pt"), str(tmp_path / "b.pt"))[0] == 0
    assert document(capsys, "compare-checkpoints", str(tmp_path / "a.pt"), str(tmp_path / "c.pt"))[0] == 1
    (tmp_path / "ranges.json").write_text('{"w": [[0, "x"]]}')
    argv = ["compare-checkpoints", str(tmp_path / "a.pt"), str(tmp_path / "b.pt")]
    assert main([*argv, "--trained", str(tmp_path / "ranges.json")]) == 2
    assert "expected a JSON object" in capsys.readouterr().err


def test_export_and_import_of_megatron_tables(capsys, tmp_path):
    code, out = document(capsys, "export", "--format", "megatron", str(TABLES), "-o", str(tmp_path / "theirs"))
    assert code == 1, "evidence has no place there, and that is said"
    assert {loss["kind"] for loss in out["losses"]}
    written = [Path(path).name for path in out["files"]]
    assert {"sm100.json", "sm103.json"} <= set(written)
    code, back = document(capsys, "import", "--format", "megatron", *out["files"], "-o", str(tmp_path / "ours"))
    assert {Path(path).parent.name for path in back["files"]} >= {"sm100", "sm103"}
    assert main(["import", "--format", "fla", str(tmp_path), "-o", str(tmp_path / "x")]) == 1
    assert "arch" in capsys.readouterr().err


def test_what_a_format_does_not_carry_is_said_once_for_each_kind(capsys, tmp_path):
    assert main(["export", "--format", "megatron", str(TABLES), "-o", str(tmp_path)]) == 1
    text = capsys.readouterr().out
    assert len([line for line in text.splitlines() if line.startswith("not carried: ")]) < 10
    assert "times in all; --json lists each" in text
    one = TABLES / "sm100" / "mamba_ssm.json"
    assert main(["export", "--format", "megatron", str(one), "--output", str(tmp_path / "one")]) == 1


def test_import_continues_the_table_that_is_there(capsys, tmp_path):
    table = read_table(TABLES / "sm103" / "mamba_ssm.json")
    reviewed = replace(
        table,
        entries=(replace(table.entries[0], config=table.entries[1].config), table.entries[1]),
        denied=(Denied(table.entries[2].kernel, table.entries[3].config, None, "races", "a report"),),
    )
    out = tmp_path / "ours"
    write_table(out, reviewed)
    main(["export", "--format", "megatron", str(TABLES / "sm103" / "mamba_ssm.json"), "-o", str(tmp_path / "theirs")])
    (theirs,) = (tmp_path / "theirs").rglob("sm103.json")
    main(["import", "--format", "megatron", str(theirs), "-o", str(out), "--package", "mamba_ssm"])
    (written,) = (path for path in (out / "sm103").glob("*.json") if path.stem == "mamba_ssm")
    now = read_table(written)
    assert now.denied == reviewed.denied
    assert table.entries[1] in now.entries  # with its evidence
    main(["import", "--format", "megatron", str(theirs), "-o", str(out), "--package", "mamba_ssm", "--replace"])
    assert read_table(written).denied == ()


def test_merge_takes_tables_and_patterns(capsys, tmp_path):
    one = TABLES / "sm90" / "mamba_ssm.json"
    code, found = document(capsys, "merge", str(one), "-o", str(tmp_path / "one"))
    assert (code, found["journals"], [row["entries"] for row in found["tables"]]) == (0, 0, [16])
    assert (tmp_path / "one" / "sm90" / "mamba_ssm.json").read_bytes() == one.read_bytes()
    code, found = document(capsys, "merge", str(TABLES / "sm1*" / "mamba_ssm.json"), "--output", str(tmp_path / "two"))
    assert (code, [row["arch"] for row in found["tables"]]) == (0, ["sm100", "sm103"])
    journals = str(JOURNALS / "*")
    code, found = document(capsys, "merge", journals, str(TABLES), "-o", str(tmp_path / "both"))
    assert (code, found["journals"]) == (0, 4)
    assert {(row["arch"], row["denied"]) for row in found["tables"]} >= {("sm90", 2), ("sm120", 12)}


@pytest.mark.parametrize("files", [("mamba_ssm.json", "mamba_ssm.json"), ("", "")])
def test_diff_of_two_archs_pairs_their_entries(files, capsys):
    code, found = document(
        capsys, "diff", *(str(TABLES / arch / name) for arch, name in zip(("sm100", "sm103"), files, strict=True))
    )
    configs = [change for change in found["changes"] if change["what"] == "config"]
    assert code == 1
    assert 0 < len(configs) < 10
    assert all(change["before"] and change["after"] for change in configs)
    said = [change for change in found["changes"] if "arch, entries compared across" in change["name"]]
    assert [(change["before"], change["after"]) for change in said] == [("sm100", "sm103")]


def test_freezes_into_one_folder_continue_it(capsys, tmp_path):
    from stub_kernels import FakeTensor, autotuner, configs, launch

    import tuning

    tuner = autotuner(configs(64, 16, 32))
    for n in (8, 16):
        path = str(tmp_path / f"run{n}.json")
        with tuning.install(tuning.AutotunePolicy(mode="pinned", modules=("stub_kernels",), manifest_path=path)):
            launch(tuner, FakeTensor(), FakeTensor(), n, flag=True)
    out = tmp_path / "tables"
    for n in (8, 16):
        assert main(["freeze", str(tmp_path / f"run{n}.json"), "-o", str(out)]) == 0
    (path,) = out.glob("*/*.json")
    both = read_table(path)
    assert len(both.entries) == 2
    assert main(["freeze", str(tmp_path / "run*.json"), "--out", str(tmp_path / "again")]) == 0
    assert len(read_table(next((tmp_path / "again").glob("*/*.json"))).entries) == 2
    capsys.readouterr()
    # What was reviewed stays: evidence of the same choice, and what is denied, which a frozen choice cannot go past.
    reviewed = [replace(both.entries[0], evidence={"note": "reviewed"}), both.entries[1]]
    row = Denied(both.entries[1].kernel, both.entries[1].config, both.entries[1].key, "races", "a report")
    write_table(out, replace(both, entries=tuple(reviewed), denied=(row,)))
    code, found = document(capsys, "freeze", str(tmp_path / "run*.json"), "-o", str(out))
    assert (code, found["exact"], len(found["overruled"])) == (1, False, 1)
    now = read_table(path)
    assert (now.entries, now.denied) == (tuple(reviewed), (row,))
    assert main(["freeze", str(tmp_path / "run*.json"), "-o", str(out), "--replace"]) == 0
    assert read_table(path).denied == ()


def test_freeze_names_what_the_clock_will_choose_again(capsys, tmp_path):
    from stub_kernels import FakeTensor, autotuner, configs, launch

    import tuning

    tuner = autotuner(configs(64, 16, 32))
    name = f"{tuner.base_fn.__module__}.{tuner.base_fn.__qualname__}"
    path = tmp_path / "run.json"
    policy = tuning.AutotunePolicy(
        mode="pinned", modules=("stub_kernels",), config_invariant=(name,), manifest_path=str(path)
    )
    with tuning.install(policy):
        launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
    code, found = document(capsys, "freeze", str(path), "-o", str(tmp_path / "tables"))
    assert (code, found["exact"], found["left_to_clock"]) == (1, False, [name])
    assert main(["freeze", str(path), "-o", str(tmp_path / "tables")]) == 1
    text = " ".join(capsys.readouterr().out.split())
    assert f"{name}: timed by Triton in the run" in text
    assert "it is in config_invariant; to launch what the run launched, drop it from there" in text


def test_freeze_makes_a_table_of_a_manifest(capsys, tmp_path):
    from stub_kernels import FakeTensor, autotuner, configs, launch

    import tuning

    manifest = tmp_path / "manifest.json"
    policy = tuning.AutotunePolicy(mode="pinned", modules=("stub_kernels",), manifest_path=str(manifest))
    tuner = autotuner(configs(64, 16, 32))
    with tuning.install(policy):
        launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
    code, found = document(capsys, "freeze", str(manifest), "-o", str(tmp_path / "tables"))
    assert (code, found["conflicts"]) == (0, [])
    frozen = tuning.AutotunePolicy(
        mode="pinned", modules=("stub_kernels",), table_path=(str(tmp_path / "tables"),), on_miss="error"
    )
    with tuning.install(frozen):
        launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
        assert [choice.source for choice in tuning.choices()] == ["exact"]
    assert [dict(config.kwargs)["BLOCK"] for config in tuner.fn.launches] == ["16", "16"]


def test_freeze_of_a_run_without_choices_is_refused(capsys, tmp_path):
    import tuning

    manifest = tmp_path / "manifest.json"
    with tuning.install(tuning.AutotunePolicy(mode="pinned", modules=("json",), manifest_path=str(manifest))):
        pass
    assert main(["freeze", str(manifest), "-o", str(tmp_path)]) == 1
    assert "expected choices in the manifest" in capsys.readouterr().err
