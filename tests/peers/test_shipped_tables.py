"""Each shipped entry against the installed packages: the kernel is there, with this key, and the config is a candidate.

What is not there is listed here with the reason, so that a change of it goes red too.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tuning.spec import Key, encode_value
from tuning.tables import Entry, bundled_folder, load_tables, read_table

pytestmark = pytest.mark.peers("mamba_ssm", "megatron")

HERE = Path(__file__).parent
ARCHS = ("sm100", "sm103")
FUSIONS = "megatron.core.fusions"
MLA, MHC, OPS = f"{FUSIONS}.fused_mla_yarn_rope_apply", f"{FUSIONS}.fused_mhc_kernels", "megatron.core.ssm.ops"

# Kernels of Megatron-LM's main branch that no megatron-core up to 0.19.2 has.
NOT_IN_ANY_WHEEL = {
    **dict.fromkeys(
        (
            f"{MHC}._triton_h_agg_fwd_kernel",
            f"{MHC}._triton_hpb_bwd_g_hp_hr_kernel",
            f"{MHC}._triton_hpb_bwd_g_x_orig_kernel",
            f"{MHC}._triton_hpb_fwd_kernel",
            f"{MHC}._triton_sinkhorn_bwd_kernel",
            f"{MHC}._triton_sinkhorn_fwd_kernel",
        ),
        "the module is in Megatron-LM's main branch only",
    ),
    **dict.fromkeys(
        (
            f"{MLA}._mla_rope_bwd_inplace_kernel",
            f"{MLA}._mla_rope_bwd_kv_split_kernel",
            f"{MLA}._mla_rope_fwd_inplace_kernel",
            f"{MLA}._mla_rope_fwd_kv_split_kernel",
        ),
        "the name is in Megatron-LM's main branch only; the wheels have its predecessor",
    ),
}
# megatron-core leaves its RoPE kernels undecorated under a Triton older than 3.4 where there is no CUDA device.
PREDECESSORS = {
    "_mla_rope_fwd_inplace_kernel": "rotary_fwd_q_kernel",
    "_mla_rope_bwd_inplace_kernel": "rotary_bwd_q_kernel",
    "_mla_rope_fwd_kv_split_kernel": "rotary_fwd_kv_kernel",
    "_mla_rope_bwd_kv_split_kernel": "rotary_bwd_kv_kernel",
}
# Their candidates leave num_stages to Triton, whose default is 2 in 3.2 and 3 from 3.3 on, as in the published configs.
DEFAULT_STAGES = {
    f"mamba_ssm.ops.triton.{name}"
    for name in (
        "ssd_chunk_scan._chunk_scan_bwd_dz_kernel",
        "ssd_chunk_state._chunk_cumsum_bwd_kernel",
        "ssd_chunk_state._chunk_cumsum_fwd_kernel",
        "ssd_state_passing._state_passing_bwd_kernel",
        "ssd_state_passing._state_passing_fwd_kernel",
    )
}
# Copies of mamba_ssm's kernels: in 0.19, not in 0.16.
COPIES = dict.fromkeys(
    (
        f"{OPS}.ssd_bmm._bmm_chunk_fwd_kernel",
        f"{OPS}.ssd_chunk_scan._chunk_scan_fwd_kernel",
        f"{OPS}.ssd_chunk_state._chunk_cumsum_fwd_kernel",
        f"{OPS}.ssd_chunk_state._chunk_state_fwd_kernel",
        f"{OPS}.ssd_state_passing._state_passing_fwd_kernel",
    ),
    "megatron-core has megatron.core.ssm.ops from 0.17 on",
)


def shipped(arch: str) -> list[Entry]:
    return [row for path in sorted((bundled_folder() / arch).glob("*.json")) for row in read_table(path).entries]


@cache
def installed() -> dict[str, Any]:
    modules = sorted({row.kernel.rpartition(".")[0] for arch in ARCHS for row in shipped(arch)})
    # These two would shrink the candidate lists of mamba_ssm and of its copies to one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAMBA_")}
    done = subprocess.run(
        [sys.executable, HERE / "installed_candidates.py", *modules],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def at_least(distribution: str, major: int, minor: int) -> bool:
    found = installed()["versions"][distribution].split(".")
    return (int(found[0]), int(found[1])) >= (major, minor)


def has_predecessors() -> bool:
    return at_least("triton", 3, 4) or bool(installed()["cuda"])


def expected_missing() -> set[str]:
    missing = set(NOT_IN_ANY_WHEEL)
    if not at_least("megatron-core", 0, 17):
        missing |= set(COPIES)
    if not has_predecessors():
        missing |= {f"{MLA}.{name}" for name in PREDECESSORS.values()}
    return missing


@pytest.mark.parametrize("arch", ARCHS)
def test_every_kernel_is_there_or_listed_as_missing(arch: str) -> None:
    missing = {row.kernel for row in shipped(arch)} - installed()["kernels"].keys()
    assert missing == expected_missing()


@pytest.mark.parametrize("arch", ARCHS)
def test_every_config_is_a_live_candidate(arch: str) -> None:
    kernels = installed()["kernels"]
    rows = [row for row in shipped(arch) if row.kernel in kernels]
    gone = {row.kernel for row in rows if row.config.text not in kernels[row.kernel]["candidates"]}
    assert gone == (set() if at_least("triton", 3, 3) else DEFAULT_STAGES)
    # 16 of mamba_ssm, 43 of the predecessors
    assert len(rows) >= (59 if has_predecessors() else 16)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_key_names_what_the_autotuner_declares(arch: str) -> None:
    kernels = installed()["kernels"]
    for row in shipped(arch):
        if row.key is not None and row.kernel in kernels:
            assert [name for name, _ in row.key] == kernels[row.kernel]["key"], str(row)


@pytest.mark.parametrize("arch", ARCHS)
def test_every_published_row_is_found_under_its_name_and_aliases(arch: str) -> None:
    """The lookup of a launch finds it, whatever the tensor arguments are called."""
    tables = load_tables(arch)
    count = 0
    with (HERE.parents[1] / "bench" / "data" / "published_configs.csv").open(newline="") as stream:
        for published in csv.DictReader(stream):
            if published["arch"] != arch:
                continue
            count += 1
            module, name = published["module"], published["kernel"]
            kernels = [f"{module}.{name}"]
            if name in PREDECESSORS:
                kernels.append(f"{module}.{PREDECESSORS[name]}")
            copy = f"{OPS}.{module.rpartition('.')[2]}.{name}"
            if copy in COPIES:
                kernels.append(copy)
            for kernel in kernels:
                key = json.loads(published["key"])
                if key == "*":
                    entry = tables.wildcard(kernel)
                else:
                    dtypes = {f"argument_{index}": name for index, name in enumerate(json.loads(published["dtypes"]))}
                    entry = tables.exact(kernel, Key.of(key, dtypes))
                assert entry is not None, kernel
                kwargs = {name: encode_value(value) for name, value in json.loads(published["kwargs"]).items()}
                assert dict(entry.config.kwargs) == kwargs
                assert entry.config.num_warps == int(published["num_warps"])
                assert entry.config.num_stages == int(published["num_stages"])
                assert entry.evidence["reported_by"] == published["evidence"]
                assert entry.evidence["measured"] is False
                note = str(entry.evidence["note"])
                assert note.startswith("not measured here")
                assert (f"{module}.{name}" in note) == (kernel != f"{module}.{name}")
    assert count == 66


@pytest.mark.parametrize("arch", ARCHS)
def test_a_launch_of_the_copies_finds_the_adapted_entries(arch: str) -> None:
    """megatron-core's _bmm_chunk_fwd_kernel takes cu_chunk_seqlens too; so a launch has one dtype more."""
    tables = load_tables(arch)
    tensors = {"a_ptr": "bfloat16", "b_ptr": "bfloat16", "out_ptr": "float32"}
    values = {"chunk_size": 128, "K": 128, "IS_CAUSAL": False}
    original = tables.exact("mamba_ssm.ops.triton.ssd_bmm._bmm_chunk_fwd_kernel", Key.of(values, tensors))
    launched = Key.of(values, {**tensors, "cu_chunk_seqlens_ptr": "int32"})
    copy = tables.exact(f"{OPS}.ssd_bmm._bmm_chunk_fwd_kernel", launched)
    assert original is not None
    assert copy is not None
    assert copy.config == original.config
    assert "dtypes adapted" in str(copy.evidence["note"])
