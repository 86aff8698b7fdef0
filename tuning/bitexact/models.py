"""Small models of the suite: GPT-like, Llama-like, and a hybrid of Mamba-2 and attention.

Every dimension is read from the tensors at hand, so that the same code runs on a rank's share of the heads or experts.
A model may be cut to some of its blocks: pipeline stages are models without an embedding or a head.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import nn

__all__ = [
    "CPU_SIZES",
    "GPU_SIZES",
    "Attention",
    "Block",
    "Experts",
    "Mixture",
    "Mlp",
    "Model",
    "Preset",
    "Shape",
    "SsdMixer",
    "local",
]

Preset = Literal["gpt", "llama", "hybrid"]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a model and of a batch.

    Attributes:
        preset: which model.
        layers: blocks.
        width: features of a token.
        headdim: features of a head, of attention and of the SSD mixer.
        kv_heads: heads of keys and values in the presets that group queries.
        groups: groups of B and C of the SSD mixer.
        dstate: size of the SSD mixer's state.
        experts: experts of each mixture; 0 for a plain MLP.
        vocabulary: tokens.
        seqlen: tokens of a sequence.
        batch: sequences of the whole batch.
        chunk: chunk size of the SSD kernels.
        dtype: torch's name of the dtype of parameters and activations.
    """

    preset: Preset
    layers: int = 4
    width: int = 32
    headdim: int = 8
    kv_heads: int = 2
    groups: int = 2
    dstate: int = 8
    experts: int = 0
    vocabulary: int = 64
    seqlen: int = 16
    batch: int = 8
    chunk: int = 16
    dtype: str = "float32"


CPU_SIZES: dict[str, Any] = {}
"""Sizes for gloo on CPUs: tiny."""

GPU_SIZES: dict[str, Any] = {
    "width": 512,
    "headdim": 64,
    "dstate": 64,
    "vocabulary": 1024,
    "seqlen": 512,
    "chunk": 128,
    "dtype": "bfloat16",
}
"""Sizes for GPUs: small, and large enough for kernels to split their sums."""


def local(tensor: Any) -> Any:
    """A rank's own part of a ``DTensor``; any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class Attention(nn.Module):
    """Causal attention by torch; rotary positions and grouped queries unless ``gpt``."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.headdim, self.rotary, bias = s.headdim, s.preset != "gpt", s.preset == "gpt"
        kv = s.width if s.preset == "gpt" else s.kv_heads * s.headdim
        self.q = nn.Linear(s.width, s.width, bias=bias)
        self.k = nn.Linear(s.width, kv, bias=bias)
        self.v = nn.Linear(s.width, kv, bias=bias)
        self.out = nn.Linear(s.width, s.width, bias=bias)

    def forward(self, x: Any) -> Any:
        """``x``: (batch, seqlen, width)."""
        q, k, v = (_heads(f(x), self.headdim).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.rotary:
            q, k = _rotated(q), _rotated(k)
            share = q.shape[1] // k.shape[1]
            k, v = k.repeat_interleave(share, dim=1), v.repeat_interleave(share, dim=1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def _heads(x: Any, size: int) -> Any:
    """The last dimension in heads of this size, as many as this rank has."""
    return x.reshape(*x.shape[:-1], -1, size)


def _rotated(x: Any) -> Any:
    half = x.shape[-1] // 2
    rate = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = torch.arange(x.shape[-2], device=x.device, dtype=torch.float32)[:, None] * rate
    one, two = x.float().chunk(2, dim=-1)
    turned = torch.cat([one * angle.cos() - two * angle.sin(), one * angle.sin() + two * angle.cos()], dim=-1)
    return turned.to(x.dtype)


class Mlp(nn.Module):
    """GELU with biases in ``gpt``, SwiGLU without elsewhere."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        bias = s.preset == "gpt"
        self.up = nn.Linear(s.width, 2 * s.width, bias=bias)
        self.gate = None if bias else nn.Linear(s.width, 2 * s.width, bias=False)
        self.down = nn.Linear(2 * s.width, s.width, bias=bias)

    def forward(self, x: Any) -> Any:
        """``x``: (batch, seqlen, width)."""
        return self.down(F.gelu(self.up(x)) if self.gate is None else F.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Several MLPs over tokens that are sorted by expert."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(s.experts, s.width, 2 * s.width) * 0.05)
        self.down = nn.Parameter(torch.randn(s.experts, 2 * s.width, s.width) * 0.05)

    def forward(self, tokens: Any, counts: Any) -> Any:
        """``tokens``: (tokens, width), sorted by expert; ``counts``: how many each expert has."""
        parts = tokens.split(counts.tolist())
        up, down = local(self.up), local(self.down)
        return torch.cat([F.silu(part @ up[e]) @ down[e] for e, part in enumerate(parts)])


class Mixture(nn.Module):
    """Top-2 mixture of experts without capacity; tokens move by permutations, so nothing is added by index."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.router = nn.Linear(s.width, s.experts, bias=False)
        self.experts = Experts(s)

    def forward(self, x: Any) -> Any:
        """``x``: (batch, seqlen, width)."""
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).float().softmax(-1).topk(2, dim=-1)
        order = chosen.flatten().argsort(stable=True)
        counts = (chosen.flatten()[:, None] == torch.arange(self.router.out_features, device=x.device)).sum(0)
        mixed = self.experts(tokens[order // 2], counts)
        back = mixed[order.argsort()].view(-1, 2, x.shape[-1])
        return (back * weights[..., None].to(back.dtype)).sum(1).view(x.shape)


class SsdMixer(nn.Module):
    """Mamba-2 mixing: mamba_ssm's Triton kernels on a GPU, the same sum written out in torch elsewhere."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        inner, self.headdim, self.dstate, self.chunk = 2 * s.width, s.headdim, s.dstate, s.chunk
        heads = inner // s.headdim
        self.z = nn.Linear(s.width, inner, bias=False)
        self.x = nn.Linear(s.width, inner, bias=False)
        self.b = nn.Linear(s.width, s.groups * s.dstate, bias=False)
        self.c = nn.Linear(s.width, s.groups * s.dstate, bias=False)
        self.dt = nn.Linear(s.width, heads, bias=False)
        self.kernel = nn.Parameter(torch.randn(inner, 1, 4) * 0.3)
        self.decay = nn.Parameter(torch.zeros(heads))
        self.skip = nn.Parameter(torch.ones(heads))
        self.dt_bias = nn.Parameter(torch.zeros(heads))
        self.out = nn.Linear(inner, s.width, bias=False)

    def forward(self, u: Any) -> Any:
        """``u``: (batch, seqlen, width)."""
        kernel, decay, skip, bias = (local(p) for p in (self.kernel, self.decay, self.skip, self.dt_bias))
        mixed = F.conv1d(F.pad(self.x(u).transpose(1, 2), (3, 0)), kernel, groups=kernel.shape[0])
        x = _heads(F.silu(mixed.transpose(1, 2)), self.headdim).contiguous()
        b, c = (_heads(f(u), self.dstate).contiguous() for f in (self.b, self.c))
        z = _heads(self.z(u), self.headdim).contiguous()
        scan = _scan_by_kernels if u.is_cuda else _scan_in_torch
        y = scan(x, self.dt(u).contiguous(), -decay.float().exp(), b, c, skip.float(), z, bias.float(), self.chunk)
        return self.out(y.flatten(2).to(u.dtype))


def _scan_by_kernels(x: Any, dt: Any, a: Any, b: Any, c: Any, d: Any, z: Any, bias: Any, chunk: int) -> Any:
    if "mamba_ssm" not in sys.modules and importlib.util.find_spec("selective_scan_cuda") is None:
        # The package imports its compiled extension, which these kernels do not need.
        spec = importlib.util.find_spec("mamba_ssm")
        if spec is None or spec.submodule_search_locations is None:
            raise ImportError("mamba_ssm is not installed: pip install 'triton-tuning[mamba]'")
        package = types.ModuleType("mamba_ssm")
        package.__path__ = list(spec.submodule_search_locations)
        sys.modules["mamba_ssm"] = package
    from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined  # type: ignore[import-untyped]

    return mamba_chunk_scan_combined(x, dt, a, b, c, chunk, D=d, z=z, dt_bias=bias, dt_softplus=True)


def _scan_in_torch(x: Any, dt: Any, a: Any, b: Any, c: Any, d: Any, z: Any, bias: Any, chunk: int) -> Any:
    """The state space dual as one masked matrix product: y_i = sum over j <= i of decay(j..i) (c_i . b_j) dt_j x_j."""
    dt = F.softplus(dt.float() + bias)
    total = (dt * a).cumsum(1)
    share = x.shape[2] // b.shape[2]
    scores = torch.einsum("blgn,bsgn->bgls", c.float(), b.float()).repeat_interleave(share, dim=1)
    spans = (total[:, :, None] - total[:, None]).permute(0, 3, 1, 2)
    causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
    weights = scores * spans.masked_fill(~causal, -torch.inf).exp()
    y = torch.einsum("bhls,bshp->blhp", weights, dt[..., None] * x.float()) + d[:, None] * x.float()
    return (y * F.silu(z.float())).to(x.dtype)


class Block(nn.Module):
    """Norm and mix, twice; in ``hybrid`` every other block mixes tokens by SSD."""

    def __init__(self, s: Shape, number: int) -> None:
        super().__init__()
        norm = nn.LayerNorm if s.preset == "gpt" else nn.RMSNorm
        self.first, self.second = norm(s.width), norm(s.width)
        self.mixer = SsdMixer(s) if s.preset == "hybrid" and number % 2 == 0 else Attention(s)
        self.mlp = Mixture(s) if s.experts else Mlp(s)

    def forward(self, x: Any) -> Any:
        """``x``: (batch, seqlen, width)."""
        x = x + self.mixer(self.first(x))
        return x + self.mlp(self.second(x))


class Model(nn.Module):
    """Embedding, blocks, norm and head.

    Args:
        s: sizes.
        seed: of the parameters. The same on every rank and for every cut: a cut model has the whole one's parameters.
    """

    def __init__(self, s: Shape, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embed: nn.Module | None = nn.Embedding(s.vocabulary, s.width)
            self.places: nn.Parameter | None = None
            if s.preset == "gpt":
                self.places = nn.Parameter(torch.randn(s.seqlen, s.width) * 0.02)
            self.blocks = nn.ModuleDict({str(number): Block(s, number) for number in range(s.layers)})
            self.norm: nn.Module | None = (nn.LayerNorm if s.preset == "gpt" else nn.RMSNorm)(s.width)
            self.head: nn.Module | None = nn.Linear(s.width, s.vocabulary, bias=False)
        self.to(getattr(torch, s.dtype))

    def cut(self, blocks: range) -> Model:
        """Keep only these blocks, the embedding if the first is among them, and the head if the last is."""
        last = max(map(int, self.blocks))
        for name in list(self.blocks):
            if int(name) not in blocks:
                del self.blocks[name]
        if 0 not in blocks:
            self.embed = self.places = None
        if last not in blocks:
            self.norm = self.head = None
        return self

    def forward(self, x: Any) -> Any:
        """``x``: tokens (batch, seqlen), or what the stage before returned (batch, seqlen, width)."""
        if self.embed is not None:
            x = self.embed(x)
        if self.places is not None:
            x = x + self.places
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None or self.norm is None else self.head(self.norm(x))
