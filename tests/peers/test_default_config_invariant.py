"""The default ``config_invariant`` list against the installed Transformer Engine.

Each of its permutation kernels is run under Triton's interpreter with every block size that its autotuner offers. Those
on the list must give the same bytes each time. The one left out must not: without that, the comparison would show
nothing. The interpreter knows no fused multiply-add, so the compiled code is looked at as well.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tuning.policy import DEFAULT_CONFIG_INVARIANT

pytestmark = pytest.mark.peers("transformer_engine")

MODULE = "transformer_engine.common.triton.permutation"
LEFT_OUT = f"{MODULE}._unpermute_bwd_with_merging_probs_kernel"

# Triton 3.2 and 3.3 ask for a driver when an autotuner is made, and without a GPU there is none. Only its benchmarker
# is looked up, and nothing here benchmarks.
DRIVER = """
import types
from triton.runtime.driver import driver
driver.set_active(types.SimpleNamespace(get_benchmarker=lambda: None))
"""

LIST = """
import json, sys
from triton.runtime.autotuner import Autotuner
from transformer_engine.common.triton import permutation
print(json.dumps({
    value.base_fn.__module__ + "." + value.base_fn.__qualname__: [
        [config.kwargs, config.num_warps == 4, config.pre_hook is None] for config in value.configs
    ]
    for value in vars(permutation).values() if isinstance(value, Autotuner)
}))
"""

RUN = """
import hashlib, json, sys
import torch
from transformer_engine.common.triton import permutation

TOKENS, EXPERTS, HIDDEN = 5, 4, 1100  # HIDDEN takes one block or many, and is a multiple of none
generator = torch.Generator().manual_seed(0)
routes = [[0, 2], [1], [0, 1, 2, 3], [], [3, 0, 1]]
rows = iter(torch.randperm(sum(map(len, routes)), generator=generator).tolist())
row_map = torch.full((TOKENS, 2 * EXPERTS + 1), -1, dtype=torch.int32)
for token, experts in enumerate(routes):
    for index, expert in enumerate(experts):
        row_map[token, index] = next(rows)
        row_map[token, EXPERTS + index] = expert
    row_map[token, 2 * EXPERTS] = len(experts)
OUT = sum(map(len, routes))

def random(*shape):
    return torch.randn(*shape, generator=generator)

def digest(*tensors):
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()

def strides(prefix, tensor, names):
    return {f"stride_{prefix}_{name}": stride for name, stride in zip(names, tensor.stride())}

common = {"row_id_map_ptr": row_map, **strides("row_id_map", row_map, ("token", "expert"))}
sizes = {"num_experts": EXPERTS, "hidden_size": HIDDEN}
tokens, expanded, scale = random(TOKENS, HIDDEN), random(OUT, HIDDEN), random(TOKENS, HIDDEN // 4)
probs = random(TOKENS, EXPERTS)
probs[2, 1] = 0.0  # a padded slot, which _permute_kernel fills with zeros
permuted_probs = random(OUT)
order = torch.tensor([1, 2, 0, 4, 3], dtype=torch.int32)  # not its own inverse: forward and backward differ

def permute(launch):
    out, out_probs, out_scale = torch.zeros(OUT, HIDDEN), torch.zeros(OUT), torch.zeros(OUT, HIDDEN // 4)
    launch(True, **common, **sizes, input_ptr=tokens, probs_ptr=probs, scale_ptr=scale, permuted_scale_ptr=out_scale,
        pad_offsets_ptr=None, output_buf_ptr=out, permuted_probs_buf_ptr=out_probs, scale_hidden_dim=HIDDEN // 4,
        num_tokens=TOKENS, num_out_tokens=OUT, **strides("input", tokens, ("token", "hidden")),
        **strides("output", out, ("token", "hidden")), **strides("probs", probs, ("token", "expert")),
        **strides("scale", scale, ("token", "hidden")), stride_permuted_probs_token=1,
        **strides("permuted_scale", out_scale, ("token", "hidden")), output_ptr=out, permuted_probs_ptr=out_probs,
        PERMUTE_PROBS=True, PERMUTE_SCALE=True, FUSION_PAD=False)
    return digest(out, out_probs, out_scale)

def unpermute(launch, merging):
    out, out_probs = torch.zeros(TOKENS, HIDDEN), torch.zeros(TOKENS, EXPERTS)
    launch(True, **common, **sizes, input_ptr=expanded, merging_probs_ptr=probs, permuted_probs_ptr=permuted_probs,
        pad_offsets_ptr=None, output_buf_ptr=out, unpermuted_probs_buf_ptr=out_probs,
        **strides("input", expanded, ("token", "hidden")), **strides("output", out, ("token", "hidden")),
        **strides("merging_probs", probs, ("token", "expert")), stride_permuted_probs_token=1,
        **strides("unpermuted_probs", out_probs, ("token", "expert")), output_ptr=out, unpermuted_probs_ptr=out_probs,
        PROBS_LOAD_WIDTH=4, WITH_MERGING_PROBS=merging, PERMUTE_PROBS=True, FUSION_UNPAD=False)
    return digest(out, out_probs)

def unpermute_bwd(launch):
    out, out_probs = torch.zeros(OUT, HIDDEN), torch.zeros(TOKENS, EXPERTS)
    launch(False, **common, **sizes, fwd_output_grad_ptr=tokens, fwd_input_ptr=expanded, merging_probs_ptr=probs,
        pad_offsets_ptr=None, **strides("fwd_output_grad", tokens, ("token", "hidden")),
        **strides("fwd_input_grad", out, ("token", "hidden")), **strides("fwd_input", expanded, ("token", "hidden")),
        **strides("merging_probs", probs, ("token", "expert")),
        **strides("merging_probs_grad", out_probs, ("token", "expert")), fwd_input_grad_ptr=out,
        merging_probs_grad_ptr=out_probs, PROBS_LOAD_WIDTH=4, FUSION_UNPAD=False)
    return digest(out, out_probs)

def sort_chunks(launch, forward):
    out, out_probs = torch.zeros(TOKENS, HIDDEN), torch.zeros(TOKENS)
    launch(True, input_ptr=tokens, row_id_map_ptr=order, probs_ptr=permuted_probs[:TOKENS], output_buf_ptr=out,
        **strides("input", tokens, ("token", "hidden")), **strides("output", out, ("token", "hidden")),
        stride_probs_token=1, stride_permuted_probs_token=1, output_ptr=out, permuted_probs_ptr=out_probs,
        hidden_size=HIDDEN, PERMUTE_PROBS=True, FORWARD=forward)
    return digest(out, out_probs)

RUNS = {
    "_permute_kernel": [permute],
    "_unpermute_kernel": [lambda launch: unpermute(launch, True), lambda launch: unpermute(launch, False)],
    "_sort_chunks_by_map_kernel": [lambda launch: sort_chunks(launch, True), lambda launch: sort_chunks(launch, False)],
    "_unpermute_bwd_with_merging_probs_kernel": [unpermute_bwd],
}
found = {}
for name, runs in RUNS.items():
    autotuner = getattr(permutation, name)
    found[name] = [
        [run(lambda by_column, **arguments: autotuner.fn[
            (TOKENS, -(-HIDDEN // config.kwargs["BLOCK_SIZE"])) if by_column else (TOKENS,)
        ](**arguments, **config.kwargs)) for config in autotuner.configs]
        for run in runs
    ]
print(json.dumps(found))
"""

COMPILE = """
import inspect, json, re
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from transformer_engine.common.triton import permutation

autotuner = permutation._unpermute_kernel
kernel = autotuner.fn
constants = {"num_experts": 8, "hidden_size": 4096, "PROBS_LOAD_WIDTH": 8, "WITH_MERGING_PROBS": True,
    "PERMUTE_PROBS": False, "FUSION_UNPAD": False}
found = {}
for config in autotuner.configs:
    fixed = {**constants, **config.kwargs}
    types = {name: "constexpr" if name in fixed else "i32" if name.startswith("stride") else "*fp32"
        for name in kernel.arg_names}
    types.update(row_id_map_ptr="*i32", pad_offsets_ptr="*i32", input_ptr="*bf16", output_ptr="*bf16")
    places = {(kernel.arg_names.index(name),): value for name, value in fixed.items()}
    if "constexprs" not in inspect.signature(ASTSource).parameters:  # Triton 3.2 names them
        places = fixed
    source = ASTSource(kernel, types, places)
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": config.num_warps}).asm["ptx"]
    found[str(config.kwargs)] = [
        len(re.findall(rf"\\b{name}\\.\\w*\\.?f32", ptx)) for name in ("fma", "mul", "add")
    ]
print(json.dumps(found))
"""


@pytest.fixture
def in_a_process(tmp_path):
    """Runs a program where Transformer Engine's kernels import from its plain wheel."""

    def run(program: str, **environment: str) -> dict[str, list]:
        settings = {"NVTE_PROJECT_BUILDING": "1", "TRITON_CACHE_DIR": str(tmp_path), **environment}
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", DRIVER + program],
            env={**os.environ, **settings},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run


def test_every_autotuner_of_the_module_is_accounted_for(in_a_process):
    found = in_a_process(LIST)
    assert set(found) == {*DEFAULT_CONFIG_INVARIANT, LEFT_OUT}
    for name, configs in found.items():
        # The argument for each name rests on BLOCK_SIZE being all that a candidate changes.
        sizes = [64, 128, 256, 512, 1024, 2048, 4096]
        assert configs == [[{"BLOCK_SIZE": size}, True, True] for size in sizes], name


def test_listed_kernels_give_the_same_bytes_under_every_config_and_the_other_does_not(in_a_process):
    found = in_a_process(RUN, TRITON_INTERPRET="1")
    digests = {f"{MODULE}.{name}": [set(of_one_run) for of_one_run in runs] for name, runs in found.items()}
    assert set(digests) == {*DEFAULT_CONFIG_INVARIANT, LEFT_OUT}
    for name in DEFAULT_CONFIG_INVARIANT:
        assert [len(of_one_run) for of_one_run in digests[name]] == [1] * len(digests[name]), name
    assert len(digests[LEFT_OUT][0]) > 1
    # Different runs of one kernel differ, so the digests do see the outputs.
    assert all(len(set.union(*runs)) == len(runs) for name, runs in digests.items() if name != LEFT_OUT)


def test_product_and_sum_contract_alike_under_every_config(in_a_process):
    found = in_a_process(COMPILE)
    assert len(found) == 7
    for config, (fused, products, sums) in found.items():
        assert fused > 0, config
        assert (products, sums) == (0, 0), config
