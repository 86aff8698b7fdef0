"""Two processes over gloo train a small model in deterministic mode: run twice, every digest is the same."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tuning.determinism import spawn_env
from tuning.determinism.environment import VARIABLES

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.multiprocess

WORKER = """
import hashlib, json, os, sys
from datetime import timedelta
rank, store, seed = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
before = {name: os.environ.get(name) for name in ("NCCL_ALGO", "NCCL_DETERMINISTIC", "CUBLAS_WORKSPACE_CONFIG")}
import torch
import torch.distributed as dist
from tuning.determinism import deterministic_mode, l2_normalize, chunk_gated_delta_rule, causal_convolution
torch.set_num_threads(1)
dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2, timeout=timedelta(seconds=60))
mode = deterministic_mode(args={"tp_comm_overlap": False}, attention_backend="native")

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(32, 24)
        self.conv = torch.nn.Parameter(torch.randn(24, 4) * 0.3)
        self.mix = torch.nn.Linear(24, 3 * 16 + 2)
        self.experts = torch.nn.Parameter(torch.randn(4, 16, 16) * 0.2)
        self.route = torch.nn.Linear(16, 4)
        self.out = torch.nn.Linear(16, 32)
    def forward(self, tokens):
        x = self.embed(tokens)
        x = causal_convolution(x, self.conv, activation="silu")[0]
        q, k, v, g, beta = self.mix(x).split([16, 16, 16, 1, 1], dim=-1)
        q, k, v = (y.unflatten(-1, (1, 16)) for y in (q, l2_normalize(k), v))
        h = chunk_gated_delta_rule(q, k, v, -g.exp(), beta.sigmoid(), chunk_size=8)[0].flatten(2)
        h = h + torch.nn.functional.scaled_dot_product_attention(h, h, h, is_causal=True)
        flat, gates = h.flatten(0, 1), self.route(h).flatten(0, 1).softmax(-1)
        weight, chosen = gates.max(-1)
        mixed = torch.zeros_like(flat)
        for e in range(4):
            rows = (chosen == e).nonzero().flatten()
            mixed = mixed.index_add(0, rows, weight[rows, None] * (flat[rows] @ self.experts[e]))
        return self.out(flat + mixed)

torch.manual_seed(seed)
model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.Generator().manual_seed(100 + rank)
digest = hashlib.sha256()
losses = []
for step in range(5):
    tokens = torch.randint(0, 32, (2, 17), generator=data)
    loss = torch.nn.functional.cross_entropy(model(tokens[:, :-1]), tokens[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
        digest.update(parameter.grad.numpy().tobytes())
    optimizer.step()
    losses.append(loss.item().hex())
for parameter in model.parameters():
    digest.update(parameter.detach().numpy().tobytes())
inside = torch.are_deterministic_algorithms_enabled()
mode.restore()
print(json.dumps({"before": before, "losses": losses, "digest": digest.hexdigest(), "inside": inside,
                  "after": torch.are_deterministic_algorithms_enabled()}))
dist.barrier()
dist.destroy_process_group()
"""


def train(folder: Path, seed: int) -> list[Any]:
    clean = {name: value for name, value in os.environ.items() if name not in {v.name for v in VARIABLES}}
    env = spawn_env(clean) | {"PYTHONPATH": str(ROOT)}
    folder.mkdir()
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(rank), str(folder / "store"), str(seed)],
            env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    found = []
    try:
        for worker in workers:
            out, error = worker.communicate(timeout=120)
            assert worker.returncode == 0, error
            found.append(json.loads(out.splitlines()[-1]))
    finally:
        for worker in workers:
            worker.kill()
    return found


def test_two_runs_agree_bit_for_bit_and_another_seed_does_not(tmp_path: Path) -> None:
    first, second, other = train(tmp_path / "1", 0), train(tmp_path / "2", 0), train(tmp_path / "3", 1)
    assert first == second
    assert first[0]["digest"] == first[1]["digest"]  # gradients are summed, so ranks hold the same weights
    assert first[0]["losses"] != first[1]["losses"]  # of different data
    assert first[0]["digest"] != other[0]["digest"]
    for rank in first:
        assert rank["before"] == {"NCCL_ALGO": "Ring", "NCCL_DETERMINISTIC": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        assert (rank["inside"], rank["after"]) == (True, False)
