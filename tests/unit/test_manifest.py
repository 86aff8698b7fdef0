"""Manifests: canonical order, one digest for one run, a strict reader, whole files, and what a diff says."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import json
import os
import pathlib
import stat
import subprocess
import sys
import types
from dataclasses import replace
from typing import Any

import pytest

import tuning
from tuning._manifest_content import digest_of_run
from tuning.errors import TableError
from tuning.manifest import (
    SCHEMA_VERSION,
    AutotunerUse,
    Change,
    Manifest,
    TableUse,
    build_manifest,
    diff_manifests,
    manifest_bytes,
    manifest_from_bytes,
    read_manifest,
    write_manifest,
)
from tuning.policy import AutotunePolicy
from tuning.spec import Choice, Environment, Key, LaunchConfig, canonical_json

ENVIRONMENT = Environment(
    arch="sm90",
    device="NVIDIA H200",
    multiprocessors=132,
    triton="3.6.0",
    torch="2.11.0",
    python="3.11.9",
    packages=(("mamba_ssm", "mamba-ssm 2.3.2"), ("fla", "fla-core 0.6.0")),
    rank=3,
    world_size=8,
    host="node-7",
)


def config(block: int, warps: int = 4, **more: Any) -> Any:
    return types.SimpleNamespace(kwargs={"BLOCK": block}, num_warps=warps, num_stages=3, pre_hook=None, **more)


def choice(kernel: str = "mamba_ssm.ops.k", n: object = 64, block: int = 32, **more: Any) -> Choice:
    key = Key.of({"N": n, "flag": True}, {"x": "bfloat16", "y": "float32"}, ("y", "x"))
    facts = {"source": "exact", "origin": "tables/sm90/mamba_ssm.json", "arch": "sm90", **more}
    return Choice(kernel=kernel, key=key, config=config(block), **facts)


def manifest(**changes: Any) -> Manifest:
    facts: dict[str, Any] = {
        "library": "0.1.0",
        "mode": "pinned",
        "policy": AutotunePolicy(mode="pinned", modules=("mamba_ssm",), block_sizes={"BLOCK": 64}),
        "environment": ENVIRONMENT,
        "deterministic": True,
        "compilers": {"ptxas": "12.8.93"},
        "tables": [TableUse.of("tables/sm90/mamba_ssm.json", "sm90", "mamba_ssm", b"{}\n")],
        "choices": [
            choice(),
            choice(n=1.0, block=64, source="cheapest", origin=None),
            choice("mamba_ssm.ops.a", block=128, detail="BLOCK=256 ran out of shared memory"),
        ],
        "source_hashes": {"mamba_ssm.ops.k": "ab12cd34"},
        "benchmarks": {"mamba_ssm.ops.k": 0},
        "autotuners": [
            AutotunerUse("mamba_ssm.ops.k", 9, ("N", "flag"), "pinned"),
            AutotunerUse("fla.ops.f", 4, ("T",), "timed", "outside the policy's modules"),
        ],
        "notices": [("stale_source", "mamba_ssm.ops.k on sm90: the kernel's source has changed")],
    }
    return build_manifest(**{**facts, **changes})


def document(value: Manifest) -> Any:
    return json.loads(manifest_bytes(value))


def sealed(data: Any) -> bytes:
    """The document with a digest that fits whatever was done to it, as long as it has the shape of a run."""
    with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):
        data["digest"] = digest_of_run(data["run"])
    return json.dumps(data).encode()


def refusal(content: bytes) -> TableError:
    with pytest.raises(TableError) as caught:
        manifest_from_bytes(content, file="run.json")
    assert "\n" not in str(caught.value)
    assert caught.value.file == "run.json"
    return caught.value


# --- content


def test_a_manifest_comes_back_as_it_was(tmp_path):
    written = manifest()
    path = write_manifest(tmp_path / "run.json", written)
    read = read_manifest(path)
    assert read == written
    assert read.digest == written.digest
    assert manifest_bytes(read) == path.read_bytes() == manifest_bytes(written)


def test_it_says_what_ran():
    run = manifest()
    assert run.benchmarks_run == 0
    assert [each.kernel for each in run.timed] == ["fla.ops.f"]
    assert run.policy["block_sizes"] == [["BLOCK", 64]]
    assert set(run.policy) == {"mode", "modules", "block_sizes", *vars(AutotunePolicy())}
    assert run.tables[0].sha256 == hashlib.sha256(b"{}\n").hexdigest()
    assert manifest(benchmarks={"a.b": 7, "c.d": 5}).benchmarks_run == 12


def test_a_choice_carries_what_a_table_entry_needs():
    launch = manifest().choices[1]
    assert launch.kernel == "mamba_ssm.ops.k"
    # The order of declaration, types, and dtypes by argument name.
    assert launch.key.values == (("N", "64"), ("flag", "true"))
    assert launch.key.dtypes == (("x", "bfloat16"), ("y", "float32"))
    assert launch.key.call_order == ("y", "x")
    assert launch.config == LaunchConfig.build({"BLOCK": 32}, num_warps=4, num_stages=3)
    assert (launch.source, launch.arch, launch.source_hash) == ("exact", "sm90", "ab12cd34")
    assert read_back(manifest()).choices[1] == launch


def read_back(value: Manifest) -> Manifest:
    return manifest_from_bytes(manifest_bytes(value))


@pytest.mark.parametrize(
    ("field", "value"),
    [("num_ctas", 2), ("maxnreg", 128), ("ir_override", "k.ttir"), ("vendor_waves", 3)],
)
def test_every_field_of_a_config_survives(field, value):
    live = choice()
    object.__setattr__(live, "config", config(32, **{field: value}))
    assert read_back(manifest(choices=[live])).choices[0].config == live.launch_config


def test_equal_facts_in_any_order_give_the_same_bytes():
    first = manifest()
    shuffled = manifest(
        environment=replace(ENVIRONMENT, packages=ENVIRONMENT.packages[::-1]),
        choices=[
            choice("mamba_ssm.ops.a", block=128, detail="BLOCK=256 ran out of shared memory"),
            choice(n=1.0, block=64, source="cheapest", origin=None),
            choice(),
            choice(),
        ],
        autotuners=[
            AutotunerUse("fla.ops.f", 4, ("T",), "timed", "outside the policy's modules"),
            AutotunerUse("mamba_ssm.ops.k", 9, ("N", "flag"), "pinned"),
        ],
    )
    assert manifest_bytes(shuffled) == manifest_bytes(first)


def test_configs_of_one_key_keep_the_order_in_which_they_were_launched():
    for blocks in ([64, 32], [32, 64]):
        run = manifest(choices=[choice(block=block) for block in blocks])
        assert [launch.config.kwargs for launch in run.choices] == [(("BLOCK", str(block)),) for block in blocks]


def test_typed_keys_stay_apart():
    run = manifest(choices=[choice(n=n) for n in (1, 1.0, True)])
    assert len(run.choices) == 3
    assert len({launch.place for launch in read_back(run).choices}) == 3


def test_all_ranks_of_a_run_have_one_digest_and_another_run_has_another():
    run = manifest()
    elsewhere = manifest(environment=replace(ENVIRONMENT, rank=5, host="node-8"))
    assert elsewhere.digest == run.digest
    assert manifest_bytes(elsewhere) != manifest_bytes(run)
    others = [
        manifest(choices=[choice(block=16)]),
        manifest(mode="auto"),
        manifest(deterministic=False),
        manifest(policy=AutotunePolicy()),
        manifest(library="0.2.0"),
        manifest(environment=replace(ENVIRONMENT, triton="3.7.1")),
        manifest(environment=replace(ENVIRONMENT, device="NVIDIA B300")),
        manifest(compilers={"ptxas": "13.0"}),
        manifest(tables=[]),
        manifest(benchmarks={"a.b": 1}),
        manifest(autotuners=[]),
        manifest(notices=[]),
        manifest(source_hashes={}),
    ]
    assert len({each.digest for each in [run, *others]}) == len(others) + 1


def test_the_digest_is_that_of_the_canonical_text_of_the_run_without_its_paths():
    data = document(manifest())
    run = data["run"]
    for name in ("manifest_path", "record_path", "table_path"):
        del run["policy"][name]
    for table in run["tables"]:
        del table["path"]
    for each in run["choices"]:
        each["origin"] = each["origin"] and "sm90/mamba_ssm.json"
    assert data["digest"] == hashlib.sha256(canonical_json(run).encode()).hexdigest()
    assert data["schema_version"] == SCHEMA_VERSION == 1


def run_in(folder: str, separator: str = "/", **more: Any) -> Manifest:
    """A run whose files all lie in a folder of its own."""

    def path(*parts: str) -> str:
        return separator.join((folder, *parts))

    mamba, fla = path("tables", "sm90", "mamba_ssm.json"), path("tables", "sm90", "fla.json")
    facts: dict[str, Any] = {
        "policy": AutotunePolicy(
            mode="record",
            table_path=[path("tables")],
            manifest_path=path("run.json"),
            record_path=path("journals"),
        ),
        "tables": [TableUse.of(mamba, "sm90", "mamba_ssm", b"1"), TableUse.of(fla, "sm90", "fla", b"2")],
        "choices": [choice(origin=mamba), choice("fla.ops.f", origin=fla), choice(n=2, origin=None)],
        "notices": [
            ("stale_source", f"the kernel's source has changed since the exact entry in {mamba} was made"),
            ("denied", f"1 of 2 candidates are denied: BLOCK=16: racy (a person; {fla})"),
        ],
    }
    return manifest(**{**facts, **more})


def test_a_run_that_is_repeated_elsewhere_has_the_digest_of_the_first(tmp_path):
    first, second = run_in("/home/a"), run_in("a folder/b")
    assert first.digest == second.digest == run_in("C:\\runs", "\\").digest
    assert first.run != second.run  # the paths are in the document all the same
    for each in (first, second):
        read = read_manifest(write_manifest(tmp_path / "run.json", each))
        assert (read, read.digest) == (each, first.digest)


def test_the_digest_tells_apart_what_a_choice_came_from():
    run = run_in("/a")
    others = [
        run_in("/a", choices=[choice(origin="/a/tables/sm90/fla.json")]),
        run_in("/a", choices=[choice(origin="/a/tables/sm90/mamba_ssm.json")]),
        run_in("/a", choices=[choice(origin=None)]),
        run_in("/a", tables=[TableUse.of("/a/tables/sm90/fla.json", "sm90", "fla", b"other")]),
        run_in("/a", notices=[]),
        run_in("/a", policy=AutotunePolicy(mode="pinned", on_miss="error")),
    ]
    assert len({each.digest for each in [run, *others]}) == len(others) + 1


def test_the_bytes_do_not_depend_on_the_hash_seed():
    script = (
        "import hashlib; from test_manifest import *; print(hashlib.sha256(manifest_bytes(manifest())).hexdigest())"
    )
    paths = [str(pathlib.Path(__file__).parent), str(pathlib.Path(tuning.__file__).parents[1])]
    said = {
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(paths)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(said) == 1


def test_one_choice_stands_on_one_line():
    lines = manifest_bytes(manifest()).decode().splitlines()
    assert sum('"config":' in line for line in lines) == 3
    assert manifest_bytes(manifest()).endswith(b"}\n")


# --- files


def test_a_file_is_replaced_whole_and_nothing_else_is_left(tmp_path):
    path = tmp_path / "run.json"
    path.write_text("an older file")
    write_manifest(path, manifest())
    write_manifest(path, manifest(mode="auto"))
    assert read_manifest(path).mode == "auto"
    assert os.listdir(tmp_path) == ["run.json"]
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


def test_a_file_that_cannot_be_written_leaves_the_older_one(tmp_path, monkeypatch):
    path = write_manifest(tmp_path / "run.json", manifest())
    before = path.read_bytes()

    def full(handle: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(TableError, match="cannot be written \\(No space left on device\\)"):
        write_manifest(path, manifest(mode="auto"))
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["run.json"]


def test_the_content_is_on_disk_before_the_name_and_the_name_before_the_end(tmp_path, monkeypatch):
    steps: list[str] = []
    sync, rename = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda handle: (steps.append("sync"), sync(handle))[1])
    monkeypatch.setattr(os, "replace", lambda old, new: (steps.append("replace"), rename(old, new))[1])
    write_manifest(tmp_path / "run.json", manifest())
    assert steps == ["sync", "replace", "sync"]


def test_a_missing_folder_and_a_missing_file_are_errors_that_name_them(tmp_path):
    with pytest.raises(TableError, match=r"run\.json: cannot be written") as caught:
        write_manifest(tmp_path / "none" / "run.json", manifest())
    assert caught.value.file == str(tmp_path / "none" / "run.json")
    with pytest.raises(TableError, match=r"none\.json: cannot be read"):
        read_manifest(tmp_path / "none.json")
    os.mkfifo(tmp_path / "pipe")  # opening it would wait for a writer
    for place in (tmp_path / "pipe", pathlib.Path("/dev/zero")):
        with pytest.raises(TableError, match=r"cannot be read \(not a regular file\)") as caught:
            read_manifest(place)
        assert caught.value.file == str(place)
    with pytest.raises(TableError, match="at most 8388608 values, found more"):
        manifest_from_bytes(b"[" + b"[]," * (8 << 20) + b"[]]")


# --- the reader


def at(data: Any, *steps: Any) -> Any:
    for step in steps:
        data = data[step]
    return data


WRONG: list[tuple[str, tuple[Any, ...], Any, str, str]] = [
    ("version", ("schema_version",), "1", "$.schema_version", "an integer"),
    ("boolean version", ("schema_version",), True, "$.schema_version", "an integer"),
    ("unknown member", ("run", "surprise"), 1, "$.run.surprise", "an unknown member"),
    ("mode", ("run", "mode"), "fast", "$.run.mode", "one of auto, pinned, record"),
    ("deterministic", ("run", "deterministic"), 1, "$.run.deterministic", "true or false"),
    ("policy", ("run", "policy"), [], "$.run.policy", "an object"),
    ("count", ("run", "benchmarks"), [["k", True]], "$.run.benchmarks[0][1]", "an integer"),
    ("no pair", ("run", "benchmarks"), [["k"]], "$.run.benchmarks[0]", "an array of 2"),
    ("source", ("run", "choices", 1, "source"), "guess", "$.run.choices[1].source", "one of"),
    ("origin", ("run", "choices", 0, "origin"), 3, "$.run.choices[0].origin", "a string or null"),
    ("warps", ("run", "choices", 0, "config", "num_warps"), 4.0, "$.run.choices[0].config.num_warps", "an integer"),
    ("dtype", ("run", "choices", 0, "key", "dtypes", 0), ["x", 1], "$.run.choices[0].key.dtypes[0][1]", "a string"),
    ("key", ("run", "choices", 0, "key"), "*", "$.run.choices[0].key", "an object"),
    ("state", ("run", "autotuners", 0, "state"), "pined", "$.run.autotuners[0].state", "one of pinned, recorded"),
    ("host", ("place", "host"), None, "$.place.host", "a string"),
]


@pytest.mark.parametrize(("steps", "value", "where", "expected"), [row[1:] for row in WRONG], ids=[r[0] for r in WRONG])
def test_a_wrong_value_is_named_with_its_place(steps, value, where, expected):
    data = document(manifest())
    at(data, *steps[:-1])[steps[-1]] = value
    error = refusal(sealed(data))
    assert error.where == where
    assert expected in str(error)


@pytest.mark.parametrize("steps", [("digest",), ("run", "choices"), ("run", "choices", 0, "config"), ("place", "rank")])
def test_a_missing_member_is_named(steps):
    data = document(manifest())
    if steps != ("digest",):
        sealed(data)
    del at(data, *steps[:-1])[steps[-1]]
    assert f'an object with the member "{steps[-1]}"' in str(refusal(json.dumps(data).encode()))


def test_a_changed_file_is_refused():
    content = manifest_bytes(manifest()).replace(b'"BLOCK":32', b'"BLOCK":16')
    error = refusal(content)
    assert error.where == "$.digest"
    assert "the file was changed" in str(error)


def test_another_version_is_refused_before_anything_else():
    assert "$.schema_version: expected 1, found 2" in str(refusal(b'{"schema_version": 2, "other": []}'))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe\x00",
        b"{",
        b"[" * 100_000,
        b'{"schema_version": NaN}',
        b'{"schema_version": 1, "schema_version": 1}',
        b"1" * 10_000,
        b"null",
        b"[]",
    ],
    ids=["empty", "no text", "cut", "deep", "nan", "twice", "long number", "null", "array"],
)
def test_what_is_no_manifest_is_a_typed_error(content):
    assert refusal(content).where == "$"


def test_a_member_that_stands_twice_is_refused():
    content = manifest_bytes(manifest()).replace(b'"mode":"pinned"', b'"mode":"auto","mode":"pinned"', 1)
    assert '"mode" twice in one object' in str(refusal(content))


def test_a_default_that_is_spelt_out_is_refused():
    data = document(manifest())
    data["run"]["choices"][0]["config"]["num_ctas"] = 1
    assert "expected canonical form" in str(refusal(sealed(data)))


# --- diff


def test_equal_runs_have_no_difference():
    assert diff_manifests(manifest(), read_back(manifest())) == ()


def test_a_changed_config_comes_first_and_shows_only_what_differs():
    changed = manifest(
        mode="auto",
        choices=[
            choice(block=16),
            choice(n=1.0, block=64, source="exact", origin=None),
            choice("mamba_ssm.ops.new"),
        ],
    )
    said = [str(change) for change in diff_manifests(manifest(), changed)]
    key = "N=64 flag=true x:bfloat16 y:float32"
    real = key.replace("64", '{"float":"1.0"}')
    gone = "BLOCK=128 num_warps=4 num_stages=3"
    assert said == [
        f"config mamba_ssm.ops.a ({key}) on sm90: {gone} -> (absent)",
        f"config mamba_ssm.ops.k ({key}) on sm90: BLOCK=32 -> BLOCK=16",
        f"config mamba_ssm.ops.new ({key}) on sm90: (absent) -> BLOCK=32 num_warps=4 num_stages=3",
        f"source mamba_ssm.ops.k ({real}) on sm90: cheapest -> exact",
        "policy (mode that held): pinned -> auto",
    ]


def test_a_fallback_shows_as_a_second_config():
    fell = manifest(choices=[choice(), choice(block=16)])
    (change,) = diff_manifests(manifest(choices=[choice()]), fell)
    assert (change.before, change.after) == (
        "BLOCK=32 num_warps=4 num_stages=3",
        "BLOCK=32 num_warps=4 num_stages=3 then BLOCK=16 num_warps=4 num_stages=3",
    )


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"library": "0.2.0"}, Change("version", "triton-tuning", "0.1.0", "0.2.0")),
        ({"compilers": {}}, Change("version", "compiler ptxas", "12.8.93", None)),
        ({"benchmarks": {"a.b": 2}}, Change("benchmarks", "a.b", None, "2")),
        ({"deterministic": False}, Change("policy", "(deterministic mode)", "on", "off")),
        (
            {"source_hashes": {"mamba_ssm.ops.k": "ff"}},
            Change("kernel source", "mamba_ssm.ops.k", "ab12cd34", "ff"),
        ),
        ({"environment": replace(ENVIRONMENT, host="other")}, Change("place", "host", "node-7", "other")),
        (
            {"environment": replace(ENVIRONMENT, multiprocessors=148)},
            Change("device", "multiprocessors", "132", "148"),
        ),
        (
            {"tables": [TableUse.of("tables/sm90/mamba_ssm.json", "sm90", "mamba_ssm", b"")]},
            Change(
                "table",
                "sm90/mamba_ssm in tables/sm90/mamba_ssm.json",
                hashlib.sha256(b"{}\n").hexdigest(),
                hashlib.sha256(b"").hexdigest(),
            ),
        ),
        (
            {"notices": []},
            Change("notice", "stale_source: mamba_ssm.ops.k on sm90: the kernel's source has changed", "given", None),
        ),
        (
            {"autotuners": [AutotunerUse("mamba_ssm.ops.k", 9, ("N", "flag"), "pinned")]},
            Change("autotuner", "fla.ops.f", "timed, 4 candidates, key T (outside the policy's modules)", None),
        ),
    ],
)
def test_each_kind_of_change_is_said(changes, expected):
    assert diff_manifests(manifest(), manifest(**changes)) == (expected,)


def test_orders_that_are_no_part_of_a_keys_identity_show_too():
    other = choice()
    object.__setattr__(other, "key", replace(other.key, call_order=("x", "y")))
    (change,) = diff_manifests(manifest(choices=[choice()]), manifest(choices=[other]))
    assert change.what == "order of key"


def test_manifests_know_nothing_of_triton_or_interception():
    folder = pathlib.Path(tuning.__file__).parent
    for path in [folder / "manifest.py", *folder.glob("_manifest_*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            assert not [n for n in names if n and (n.startswith(("triton", "torch")) or "interception" in n)], path
