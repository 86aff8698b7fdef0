"""``list --manifest``: what packages define, joined with what a run did with it."""

from __future__ import annotations

import importlib
import json
import sys
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from stub_kernels import FakeTensor, autotuner, configs, launch

import tuning
from tuning import cli
from tuning.errors import TableError
from tuning.inventory import AutotunerInfo, join_manifests, policy_of
from tuning.manifest import Manifest, write_manifest
from tuning.spec import LaunchConfig

pytestmark = pytest.mark.stub

PACKAGE = """
    import sys
    from stub_kernels import StubKernel, autotuner, configs

    def kernel_of(name):
        def kernel(x, y, n, flag, BLOCK): ...
        kernel.__qualname__ = kernel.__name__ = name
        kernel.__module__ = __name__
        return autotuner(configs(*BLOCKS.get(name, (16, 32))), stub=StubKernel(fn=kernel))

    BLOCKS = {"single": (16,)}
    pinned, moved, single, idle = (kernel_of(name) for name in ("pinned", "moved", "single", "idle"))
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "listed_run.py").write_text(textwrap.dedent(PACKAGE))
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("listed_run")
    yield module
    del sys.modules["listed_run"]


def run_of(package: Any, *names: str, **fields: Any) -> Manifest:
    policy = tuning.AutotunePolicy(
        **{"mode": "pinned", "modules": ("listed_run",), "config_invariant": ("listed_run.moved",), **fields}
    )
    with tuning.install(policy) as installed:
        for name in names:
            launch(getattr(package, name), FakeTensor(), FakeTensor(), 8, flag=True)
        launch(autotuner(configs(16, 32)), FakeTensor(), FakeTensor(), 8, flag=True)
        return installed.manifest()


def test_each_autotuner_is_shown_with_what_the_run_did_with_it(
    package: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "manifest.json"
    write_manifest(path, run_of(package, "pinned", "moved", "single"))
    argv = ["list", "listed_run", "--arch", "sm90", "--manifest", str(path)]
    capsys.readouterr()
    assert cli.main([*argv, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    states = {info["kernel"].rpartition(".")[2]: (info["state"], info["reached"]) for info in document["autotuners"]}
    assert states == {
        "pinned": ("pinned", True),
        "moved": ("timed", True),
        "single": ("singleton", True),
        "idle": ("pinned", False),
        "kernel": ("outside scope", True),  # launched, and in no listed package
    }
    reasons = {info["kernel"].rpartition(".")[2]: info["reason"] for info in document["autotuners"]}
    assert reasons["pinned"] == "1 key: 1 cheapest"
    assert "config-invariant" in reasons["moved"]
    assert document["inductor"]
    assert all(each["switch"] for each in document["inductor"])
    assert cli.main(argv) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "by the policy of the run: 1 outside scope, 2 pinned, 1 singleton, 1 timed; 4 autotuners launched" in text
    assert "compiled graphs are Inductor's own, whatever the policy: --inductor names them" in text


def test_ranks_are_joined_and_policies_are_not_mixed(package: Any) -> None:
    one, other = run_of(package, "pinned"), run_of(package, "idle")
    infos = [
        AutotunerInfo(
            kernel=f"listed_run.{name}",
            module="listed_run",
            candidates=(LaunchConfig.build({"BLOCK": 16}),),
            key_names=("n",),
        )
        for name in ("idle", "pinned")
    ]
    joined = join_manifests(infos, [one, other])
    assert [info.reached for info in joined if info.module == "listed_run"] == [True, True]
    assert policy_of([one, other]).modules == ("listed_run",)
    with pytest.raises(TableError, match="different policies"):
        policy_of([one, run_of(package, modules=("other",))])


def test_a_kernel_that_was_traced_into_a_graph_is_said_to_be_compiled(package: Any) -> None:
    found = run_of(package, "pinned")
    kernel = "listed_run.idle"
    noted = replace(found, notices=(("compiled", f"{kernel} is traced into a compiled graph"),))
    joined = {info.kernel: info for info in join_manifests([], [noted])}
    assert joined[kernel].has("compiled")
    assert not joined["listed_run.pinned"].has("compiled")


def test_a_policy_of_another_version_is_one_error(package: Any) -> None:
    found = run_of(package, "pinned")
    with pytest.raises(TableError, match=r"run\.policy"):
        policy_of([replace(found, policy={**found.policy, "on_miss": "guess"})])
