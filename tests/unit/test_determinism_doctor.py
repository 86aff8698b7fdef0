"""What the doctor says, for environments and packages of one's choosing, and that it changes nothing."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tuning.determinism import causal_conv1d as conv
from tuning.determinism import doctor, kernel_checks, register_kernel_check
from tuning.determinism import doctor as doctor_function
from tuning.determinism.environment import VARIABLES
from tuning.determinism.torch_flags import read_torch_flags

module = sys.modules["tuning.determinism.doctor"]


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(**versions: str) -> None:
        found = {name.replace("_", "-"): version for name, version in versions.items()}
        monkeypatch.setattr(module, "_version", found.get)
        monkeypatch.setattr(conv, "_installed_version", lambda: found.get("causal-conv1d"))

    install()
    return install


def rows(section: str, **arguments: Any) -> dict[str, tuple[str, ...]]:
    report = doctor(**{"env": {}, **arguments})
    return {row.name: row.cells()[2:] for row in report.rows if row.section == section}


def test_an_empty_environment(packages: Any) -> None:
    found = rows("environment")
    assert list(found) == [variable.name for variable in VARIABLES]
    assert {name: cells[:3] for name, cells in found.items()} == {
        "NCCL_ALGO": ("set", "", "Ring"),
        "NCCL_DETERMINISTIC": ("set", "", "1"),
        "NCCL_EP_HT_EM_AG_SCAN_MODE": ("set", "", "1"),
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": ("set", "", "0"),
        "CUBLAS_WORKSPACE_CONFIG": ("set", "", ":4096:8"),
        "TRITON_CACHE_AUTOTUNING": ("unset", "", ""),
        "TRITON_CACHE_DIR": ("unset", "", ""),
        "TRITON_PRINT_AUTOTUNING": ("unset", "", ""),
        "MAMBA_DETERMINISTIC": ("unset", "", ""),
        "CAUSAL_CONV1D_DETERMINISTIC": ("unset", "", ""),
    }
    assert all(cells[3] for cells in found.values())
    assert found["NCCL_ALGO"][3] == (
        "the algorithm fixes the order in which ranks' values are added; Ring: one fixed order of ranks; bit-exact by "
        "construction"
    )


def test_accepted_refused_and_warned_variables(packages: Any) -> None:
    env = {"NCCL_ALGO": "Tree", "CUBLAS_WORKSPACE_CONFIG": ":16:8", "TRITON_PRINT_AUTOTUNING": "1"}
    found = rows("environment", env=env)
    assert found["NCCL_ALGO"][:3] == ("refused", "Tree", "")
    assert found["NCCL_ALGO"][3].startswith("NCCL_ALGO (a comma-separated list) must be one of Ring")
    assert found["CUBLAS_WORKSPACE_CONFIG"] == (
        "accepted", ":16:8", "", "eight buffers of 16 KiB; saves memory, and can make matrix products slower",
    )  # fmt: skip
    assert found["TRITON_PRINT_AUTOTUNING"][0] == "warning"
    report = doctor(env)
    assert [row.name for row in report.refused] == ["NCCL_ALGO"]
    assert report.verdict == "deterministic mode would be refused here, because of 1: NCCL_ALGO"
    assert doctor({}).verdict.startswith("deterministic mode would start here and set ")


def test_too_late(packages: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    monkeypatch.setattr(module, "too_late", lambda unset: [f"{unset[0]} must be set before, got unset"])
    late = [row for row in doctor().rows if row.found == "too late"]
    assert [row.cells() for row in late] == [
        ("environment", "NCCL_ALGO", "refused", "too late", "", "NCCL_ALGO must be set before, got unset")
    ]


def test_arguments(packages: Any) -> None:
    assert rows("arguments")["tp_comm_overlap"] == (
        "info", "", "",
        "must be False: overlapped tensor-parallel communication adds partial sums in order of arrival",
    )  # fmt: skip
    args = argparse.Namespace(tp_comm_overlap=True, moe_router_fusion=False)
    found = rows("arguments", args=args)
    assert found["tp_comm_overlap"][:2] == ("refused", "True")
    assert found["moe_router_aux_loss_fusion"][:2] == ("accepted", "False (moe_router_fusion)")
    assert found["cross_entropy_loss_fusion"][:2] == ("unset", "")


def test_torch_flags(packages: Any) -> None:
    now = read_torch_flags()
    found = rows("torch")
    assert found["deterministic_algorithms"][:3] == ("set", str(now.deterministic_algorithms), "True")
    assert found["warn_only"][:3] == ("accepted", "False", "")
    assert list(found) == [
        "deterministic_algorithms", "warn_only", "cudnn_deterministic", "cudnn_benchmark", "fill_uninitialized_memory",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "library", "env", "status", "becomes"),
    [
        (None, None, {}, "accepted", ""),
        ("flash", None, {}, "set", "deterministic=True"),
        ("flash", "transformer_engine", {}, "accepted", ""),
        ("flash", "transformer_engine", {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "1"}, "refused", ""),
        ("sage", None, {}, "refused", ""),
    ],
)
def test_attention(packages: Any, name: Any, library: Any, env: dict[str, str], status: str, becomes: str) -> None:
    found = rows("attention", attention_backend=name, attention_library=library, env=env)
    assert found["backend"][:3] == (status, name or "", becomes)


def test_packages(packages: Any) -> None:
    packages(torch="2.11.0", causal_conv1d="1.5.0", fla_core="0.6.0")
    found = rows("packages")
    assert found["torch"] == ("info", "2.11.0", "", "installed")
    assert found["causal-conv1d"][:2] == ("refused", "1.5.0")
    assert found["fla (gated delta nets)"] == (
        "set", "autotuned kernels", "torch-native",
        "replaced while the mode is on: l2norm, causal_conv1d, gated_delta_rule, gdn2",
    )  # fmt: skip
    packages(causal_conv1d="1.6.0")
    assert rows("packages") == {
        "causal-conv1d": ("accepted", "1.6.0", "", "1.6.0 and later have a deterministic backward")
    }


def test_candidates_and_kernel_checks(packages: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_checks, "_checks", {})
    packages(mamba_ssm="2.3.2", megatron_core="0.19.2")
    register_kernel_check("model", dict)
    decider = ModuleType("mamba_ssm.utils.determinism")
    decider._autotune_warning_issued = True  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, decider.__name__, decider)
    kernels = ModuleType("mamba_ssm.ops.triton.fake")
    kernels.autotune_configs, kernels.scan = len, SimpleNamespace(configs=[1])  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, kernels.__name__, kernels)
    found = rows("kernels")
    assert found["mamba_ssm"] == (
        "warning", "1 kernels with one candidate", "",
        "reduced at import, and slower for it: mamba_ssm.ops.triton.fake.scan; turn the mode on before importing them",
    )  # fmt: skip
    assert found["megatron.core.ssm.ops"][:3] == ("set", "", "candidates stay whole")
    assert found["model"][0] == "info"


def test_it_is_data_for_json_and_changes_nothing(packages: Any) -> None:
    before = dict(os.environ), read_torch_flags(), set(sys.modules)
    report = doctor_function()
    data = json.loads(json.dumps(report.to_json()))
    assert list(data) == ["refused", "verdict", "rows"]
    assert list(data["rows"][0]) == ["section", "name", "status", "found", "becomes", "reason"]
    assert len(data["rows"]) == len(report.rows)
    assert (dict(os.environ), read_torch_flags(), set(sys.modules)) == before


def test_it_imports_neither_torch_nor_what_it_looks_at() -> None:
    program = (
        "import sys; from tuning.determinism import doctor; report = doctor()\n"
        "assert report.rows\n"
        "bad = {'torch', 'triton', 'fla', 'mamba_ssm', 'megatron', 'causal_conv1d'} & set(sys.modules)\n"
        "assert not bad, bad"
    )
    root = Path(__file__).parents[2]
    out = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
