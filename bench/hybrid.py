"""A small hybrid language model: an SSD mixer, attention and a mixture of experts in each block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from bench.workloads import import_mamba_ssm


@dataclass(frozen=True)
class HybridShape:
    """Sizes of the model and of a batch."""

    blocks: int = 2
    width: int = 512
    heads: int = 8
    ssd_headdim: int = 64
    dstate: int = 64
    chunk_size: int = 128
    experts: int = 4
    vocabulary: int = 4096
    seqlen: int = 1024
    batch: int = 2


class SsdMixer(nn.Module):
    """Mamba-2 mixing by mamba_ssm's Triton kernels, with a depthwise causal convolution by torch."""

    def __init__(self, s: HybridShape) -> None:
        super().__init__()
        import_mamba_ssm()
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        self.scan = mamba_chunk_scan_combined
        self.s = s
        self.inner = 2 * s.width
        self.nheads = self.inner // s.ssd_headdim
        self.project = nn.Linear(s.width, 2 * self.inner + 2 * s.dstate + self.nheads, bias=False)
        self.convolve = nn.Conv1d(self.inner, self.inner, 4, groups=self.inner, padding=3)
        self.log_decay = nn.Parameter(torch.zeros(self.nheads))
        self.skip = nn.Parameter(torch.ones(self.nheads))
        self.dt_bias = nn.Parameter(torch.zeros(self.nheads))
        self.out = nn.Linear(self.inner, s.width, bias=False)

    def forward(self, u: Any) -> Any:
        """``u``: (batch, seqlen, width)."""
        s = self.s
        batch, seqlen, _ = u.shape
        sizes = [self.inner, self.inner, s.dstate, s.dstate, self.nheads]
        z, x, b, c, dt = self.project(u).split(sizes, dim=-1)
        x = F.silu(self.convolve(x.transpose(1, 2))[..., :seqlen].transpose(1, 2))
        y = self.scan(
            x.reshape(batch, seqlen, self.nheads, s.ssd_headdim).contiguous(),
            dt.contiguous(),
            -torch.exp(self.log_decay.float()),
            b.reshape(batch, seqlen, 1, s.dstate).contiguous(),
            c.reshape(batch, seqlen, 1, s.dstate).contiguous(),
            s.chunk_size,
            D=self.skip.float(),
            z=z.reshape(batch, seqlen, self.nheads, s.ssd_headdim).contiguous(),
            dt_bias=self.dt_bias.float(),
            dt_softplus=True,
        )
        return self.out(y.reshape(batch, seqlen, self.inner).to(u.dtype))


class Attention(nn.Module):
    """Causal attention by torch's scaled_dot_product_attention."""

    def __init__(self, s: HybridShape) -> None:
        super().__init__()
        self.heads = s.heads
        self.project = nn.Linear(s.width, 3 * s.width, bias=False)
        self.out = nn.Linear(s.width, s.width, bias=False)

    def forward(self, u: Any) -> Any:
        """``u``: (batch, seqlen, width)."""
        batch, seqlen, width = u.shape
        q, k, v = self.project(u).reshape(batch, seqlen, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(batch, seqlen, width))


class Experts(nn.Module):
    """Top-2 mixture of experts: tokens are gathered by expert and added back by index."""

    def __init__(self, s: HybridShape) -> None:
        super().__init__()
        self.router = nn.Linear(s.width, s.experts, bias=False)
        self.up = nn.Parameter(torch.empty(s.experts, s.width, 2 * s.width))
        self.down = nn.Parameter(torch.empty(s.experts, 2 * s.width, s.width))
        nn.init.normal_(self.up, std=0.02)
        nn.init.normal_(self.down, std=0.02)

    def forward(self, u: Any) -> Any:
        """``u``: (batch, seqlen, width)."""
        tokens = u.reshape(-1, u.shape[-1])
        weights, chosen = self.router(tokens).float().softmax(-1).topk(2, dim=-1)
        out = torch.zeros_like(tokens)
        for expert in range(self.up.shape[0]):
            rows, slot = torch.where(chosen == expert)
            hidden = F.silu(tokens[rows] @ self.up[expert]) @ self.down[expert]
            out = out.index_add(0, rows, hidden * weights[rows, slot, None].to(hidden.dtype))
        return out.reshape(u.shape)


class Block(nn.Module):
    """Norm and mix, three times."""

    def __init__(self, s: HybridShape) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(s.width) for _ in range(3))
        self.mixers = nn.ModuleList([SsdMixer(s), Attention(s), Experts(s)])

    def forward(self, u: Any) -> Any:
        """``u``: (batch, seqlen, width)."""
        for norm, mixer in zip(self.norms, self.mixers, strict=True):
            u = u + mixer(norm(u))
        return u


class Hybrid(nn.Module):
    """Embedding, blocks, head."""

    def __init__(self, s: HybridShape) -> None:
        super().__init__()
        self.embed = nn.Embedding(s.vocabulary, s.width)
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.blocks))
        self.norm = nn.RMSNorm(s.width)
        self.head = nn.Linear(s.width, s.vocabulary, bias=False)

    def forward(self, tokens: Any) -> Any:
        """``tokens``: (batch, seqlen) of integers; returns logits."""
        u = self.embed(tokens)
        for block in self.blocks:
            u = block(u)
        return self.head(self.norm(u))
