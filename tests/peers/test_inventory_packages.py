"""The autotuners of four packages, counted: each in a process of its own, for importing them whole changes a process.

The sizes are those of the releases named, with Triton 3.6 on a machine without a GPU. Candidates are made when a
package is imported, and some packages make fewer for other devices, so other releases of Triton are held to the number
of autotuners alone.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import triton

ROOT = Path(__file__).parents[2]
TIME_LIMIT = 240  # seconds; on a quiet machine the slowest, FLA, takes eight

# What the inventory found, and every live autotuner that the garbage collector knows: nothing may be missed.
PROGRAM = """
import gc, json, sys, warnings
warnings.simplefilter("ignore")
from tuning.inventory import coverage, take_inventory
from triton.runtime.autotuner import Autotuner

package = sys.argv[1]
found = take_inventory(package)
live = [
    obj.base_fn.__module__ + "." + obj.base_fn.__qualname__ for obj in gc.get_objects() if isinstance(obj, Autotuner)
]
document = found.to_json()
document["live"] = sorted(name for name in live if name.startswith(package + "."))
archs = [item["arch"] for item in document["autotuners"][0]["tables"]]
document["coverage"] = {arch: coverage(found.autotuners, arch) for arch in archs}
document["left"] = package in sys.modules
print("\\n" + json.dumps(document))
"""


@cache
def inventory_of(package: str, *environment: tuple[str, str], path: str = "") -> Any:
    # What the packages read at import is left to the test alone.
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MAMBA_", "FLA_", "NVTE_", "TRITON_AUTOTUNE_", "TRITON_CACHE_AUTOTUNING"))
    }
    kept["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), kept.get("PYTHONPATH"), path]))
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, package],
        env={**kept, **dict(environment)},
        capture_output=True,
        text=True,
        timeout=TIME_LIMIT,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    return json.loads(result.stdout.splitlines()[-1])


def require(distribution: str, version: str) -> None:
    found = importlib.metadata.version(distribution)
    if found != version:
        pytest.skip(f"the sizes are those of {distribution} {version}, and {found} is here")


def check_size(found: Any, autotuners: int, candidates: int) -> None:
    names = sorted(info["kernel"] for info in found["autotuners"])
    assert names == found["live"]
    assert len(names) == autotuners
    if triton.__version__.startswith("3.6."):
        assert found["candidates"] == candidates
    for info in found["autotuners"]:
        file, _, line = info["origin"].rpartition(":")
        assert Path(file).is_file()
        assert int(line) > 0
        assert info["source_hash"]


def notes(found: Any, kind: str) -> dict[str, str]:
    return {
        info["kernel"].rpartition(".")[2]: note["text"]
        for info in found["autotuners"]
        for note in info["notes"]
        if note["kind"] == kind
    }


def hidden(found: Any) -> dict[str, int]:
    """Autotuners in sources that could not be looked into, by module."""
    return {problem["module"]: problem["autotuners"] for problem in found["problems"] if problem["autotuners"]}


@pytest.mark.peers("mamba_ssm")
def test_mamba_ssm() -> None:
    require("mamba-ssm", "2.3.2.post1")
    found = inventory_of("mamba_ssm")
    check_size(found, 43, 474)
    assert hidden(found) == {}
    assert found["elsewhere"] == []
    top = [problem for problem in found["problems"] if problem["module"] == "mamba_ssm"]
    if top:  # a build without CUDA
        assert top[0]["kind"] == "walked without __init__"
        assert "No module named 'selective_scan_cuda'" in top[0]["reason"]
    assert found["left"] == (not top)
    wrapped = Counter(tuple(info["wrapped"])[:2] for info in found["autotuners"])
    assert wrapped == {("autotuner",): 40, ("autotuner", "Heuristics"): 3}
    assert notes(found, "reduced_at_import") == {}
    # Lists of candidates that the source spells out, whole.
    declared = {info["declared"] for info in found["autotuners"] if info["declared"] == info["candidates"]}
    assert len(declared) > 3
    for arch in ("sm100", "sm103"):
        covered, total, percent = found["coverage"][arch]
        assert total == 43
        assert 14 <= covered < 43
        assert percent == pytest.approx(100 * covered / total)


@pytest.mark.peers("mamba_ssm")
def test_mamba_ssm_reduced_by_its_determinism_flag() -> None:
    """Its SSD kernels keep one candidate of each list; its mamba3 kernels keep all."""
    require("mamba-ssm", "2.3.2.post1")
    whole = inventory_of("mamba_ssm")
    found = inventory_of("mamba_ssm", ("MAMBA_DETERMINISTIC", "1"))
    assert len(found["autotuners"]) == 43
    candidates = {info["kernel"]: info["candidates"] for info in whole["autotuners"]}
    lost = {info["kernel"] for info in found["autotuners"] if info["candidates"] < candidates[info["kernel"]]}
    reduced = notes(found, "reduced_at_import")
    assert {kernel.rpartition(".")[2] for kernel in lost} == set(reduced)
    assert len(lost) == 27
    assert not any("mamba3" in kernel for kernel in lost)
    assert all("mamba_ssm.utils.determinism.autotune_configs" in text for text in reduced.values())
    assert all("TRITON_CACHE_AUTOTUNING=1" in text for text in reduced.values())
    assert {info["state"] for info in found["autotuners"] if info["kernel"] in lost} == {"singleton"}
    # A table cannot bring the fast candidate back, so the gate counts none of them as covered.
    assert found["coverage"]["sm100"][0] < whole["coverage"]["sm100"][0]
    assert found["coverage"]["sm100"][1] == 43


@pytest.mark.peers("fla")
def test_fla_core(tmp_path: Path) -> None:
    """Its deltaformer kernels import two functions of ``fla.layers``, which another distribution holds."""
    require("fla-core", "0.6.0")
    folder = tmp_path / "fla" / "layers"
    folder.mkdir(parents=True)
    (folder / "utils.py").write_text("def pad_input(*args): ...\ndef unpad_input(*args): ...\n")
    found = inventory_of("fla", path=str(tmp_path))
    check_size(found, 259, 3959)
    assert hidden(found) == {"fla.ops.delta_rule.parallel": 2}
    layers_of = [info["wrapped"] for info in found["autotuners"]]
    wrapped = Counter("outside" if layers[0] == "Heuristics" else layers[-1] for layers in layers_of)
    assert wrapped == {"outside": 203, "autotuner": 52, "Heuristics": 4}
    assert len(notes(found, "cache_results")) > 200
    subclassed = [info for info in found["autotuners"] if info["class_name"] == "fla.ops.utils.cache.CachedAutotuner"]
    assert len(subclassed) == 62
    assert all([note["kind"] for note in info["notes"]].count("own_run") == 1 for info in subclassed)
    assert notes(found, "run_replaced") == {}
    # Reported in public as fla#1147.
    fragmenting = notes(found, "may_fragment")
    assert "key NB: triton.cdiv(T, 2048) at layernorm.py:" in fragmenting["layer_norm_fwd_kernel"]
    bare = Counter(info["kernel"].rpartition(".")[2] for info in found["autotuners"])
    assert sum(count > 1 for count in bare.values()) >= 12
    assert len({info["kernel"] for info in found["autotuners"]}) == 259


@pytest.mark.peers("fla")
def test_fla_core_by_itself_counts_what_it_cannot_import() -> None:
    require("fla-core", "0.6.0")
    if importlib.util.find_spec("fla.layers") is not None:
        pytest.skip("flash-linear-attention is here, and with it fla.layers")
    found = inventory_of("fla")
    check_size(found, 255, 3907)
    assert hidden(found) == {"fla.ops.delta_rule.parallel": 2, "fla.ops.deltaformer.parallel": 4}
    kinds = {problem["module"]: problem["kind"] for problem in found["problems"]}
    assert kinds["fla.ops.deltaformer"] == "walked without __init__"


@pytest.mark.peers("megatron.core")
def test_megatron_core() -> None:
    require("megatron-core", "0.16.1")
    found = inventory_of("megatron.core", ("NVTE_PROJECT_BUILDING", "1"))
    check_size(found, 4, 32)
    assert hidden(found) == {}
    assert {tuple(info["key_names"]) for info in found["autotuners"]} == {
        ("emb_dim", "head_num"),
        ("emb_dim", "k_dim", "v_dim", "head_num"),
    }
    assert notes(found, "relies_on_restore_value").keys() == {"rotary_fwd_q_kernel", "rotary_bwd_q_kernel"}


@pytest.mark.peers("transformer_engine")
def test_transformer_engine() -> None:
    require("transformer-engine", "2.20.2")
    found = inventory_of("transformer_engine", ("NVTE_PROJECT_BUILDING", "1"))
    check_size(found, 18, 130)
    assert set(hidden(found)) <= {"transformer_engine.pytorch.attention.fused_mla_q_uproj"}
    modules = Counter(info["module"].rpartition(".")[2] for info in found["autotuners"])
    assert modules == {"mhc": 13, "permutation": 4, "pad": 1}
    assert sum(info["pruner"] == "early_config_prune" for info in found["autotuners"]) > 0
    assert len(notes(found, "relies_on_reset_to_zero")) == 5
    assert all("the name reads as a token count" in text for text in notes(found, "may_fragment").values())
    assert len(notes(found, "may_fragment")) == 13


@pytest.mark.peers("transformer_engine")
def test_transformer_engine_without_its_compiled_part_says_how_to_list_it() -> None:
    require("transformer-engine", "2.20.2")
    if any(name.startswith("transformer-engine-") for name in installed()):
        pytest.skip("its compiled part is here")
    found = inventory_of("transformer_engine")
    reasons = [problem["reason"] for problem in found["problems"] if "NVTE_PROJECT_BUILDING=1" in problem["reason"]]
    assert reasons


def installed() -> set[str]:
    names = (distribution.metadata["Name"] for distribution in importlib.metadata.distributions())
    return {str(name).lower().replace("_", "-") for name in names}
