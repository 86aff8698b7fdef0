"""What the demo runs: one step, forward and backward, of kernels from an installed package.

The first package found is used: mamba_ssm's SSD, for which the figures in the README were measured; fla-core's and
megatron-core's have plain wheels that install anywhere. Sizes are those of a real model's layer on a GPU, and as small
as they can be in Triton's interpreter, which is thousands of times slower. ``compile`` is a third size for a GPU: cheap
to run, and compiled to the same binaries as ``full`` (the compiler sees which integers are 1 or divide by 16, not how
large they are).
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ._package_walk import package_without_init

__all__ = ["WORKLOADS", "Size", "Step", "Workload", "how_to_install", "installed_workloads"]

Size = Literal["full", "compile", "interpreter"]
"""How large to run: see the module's docstring."""

Step = Callable[[], dict[str, Any]]
"""Runs one forward and backward on fixed inputs and returns the output and every gradient, by name."""


@dataclass(frozen=True)
class Workload:
    """A step of one package's kernels.

    Attributes:
        package: importable name of the package.
        modules: prefixes of the kernels that it launches: the policy's scope, and what is listed.
        title: what is run, in words.
        sizes: the sizes, by name.
        make: builds the step for a device and one of the sizes.
    """

    package: str
    modules: tuple[str, ...]
    title: str
    sizes: dict[Size, dict[str, int]]
    make: Callable[[str, dict[str, int]], Step]

    def step(self, device: str, size: Size) -> Step:
        """Import the package's kernels and prepare a step.

        Args:
            device: ``cuda`` or ``cpu``.
            size: how large.
        """
        return self.make(device, self.sizes[size])


class _Inputs:
    """Random tensors that require gradients, the same in every process."""

    def __init__(self, device: str, dtype: Any) -> None:
        import torch

        self._torch = torch
        self._generator = torch.Generator(device="cpu").manual_seed(0)
        self._device = device
        self._dtype = dtype
        self.named: dict[str, Any] = {}

    def add(self, name: str, *sizes: int, scale: float = 1.0, dtype: Any = None, shift: float = 0.0) -> Any:
        values = self._torch.randn(*sizes, generator=self._generator) * scale + shift
        tensor = values.to(dtype or self._dtype).to(self._device).requires_grad_()
        self.named[name] = tensor
        return tensor

    def backward(self, **outputs: Any) -> dict[str, Any]:
        """The outputs and the gradients of all inputs with respect to their mean square."""
        for tensor in self.named.values():
            tensor.grad = None
        loss: Any = self._torch.stack([output.float().square().mean() for output in outputs.values()]).sum()
        loss.backward()
        gradients = {f"gradient of {name}": tensor.grad for name, tensor in self.named.items()}
        return {**{name: output.detach() for name, output in outputs.items()}, **gradients}


def _mamba_ssd(device: str, size: dict[str, int]) -> Step:
    import torch

    # Built without CUDA the package's own __init__ does not import; its Triton kernels do.
    with package_without_init("mamba_ssm"):
        combined = importlib.import_module("mamba_ssm.ops.triton.ssd_combined")
    inputs = _Inputs(device, torch.bfloat16 if device == "cuda" else torch.float32)
    tokens, heads, width, groups, state = (size[name] for name in ("tokens", "heads", "width", "groups", "state"))
    x = inputs.add("x", 1, tokens, heads, width)
    dt = inputs.add("dt", 1, tokens, heads)
    a = inputs.add("A", heads, scale=0.1, shift=-1.0, dtype=torch.float32)
    b = inputs.add("B", 1, tokens, groups, state, scale=0.3)
    c = inputs.add("C", 1, tokens, groups, state, scale=0.3)
    d = inputs.add("D", heads, dtype=torch.float32)
    z = inputs.add("z", 1, tokens, heads, width)
    bias = inputs.add("dt_bias", heads, scale=0.1, dtype=torch.float32)

    def step() -> dict[str, Any]:
        out = combined.mamba_chunk_scan_combined(
            x, dt, a, b, c, size["chunk"], D=d, z=z, dt_bias=bias, dt_softplus=True
        )
        return inputs.backward(output=out)

    return step


def _fla_block(device: str, size: dict[str, int]) -> Step:
    import torch

    convolution = importlib.import_module("fla.modules.convolution").causal_conv1d
    normalised = importlib.import_module("fla.modules.l2norm").l2norm
    attention = importlib.import_module("fla.ops.simple_gla").parallel_simple_gla
    gated = importlib.import_module("fla.modules.fused_norm_gate").rms_norm_swish_gate_linear
    swiglu = importlib.import_module("fla.modules.activations").swiglu
    inputs = _Inputs(device, torch.bfloat16 if device == "cuda" else torch.float32)
    tokens, heads, width = (size[name] for name in ("tokens", "heads", "width"))
    model = heads * width
    q, k, v, gate = (inputs.add(name, 1, tokens, model) for name in ("q", "k", "v", "gate"))
    filters = [inputs.add(f"filter of {name}", model, 4, scale=0.5) for name in ("q", "k", "v")]
    decay = inputs.add("decay", 1, tokens, heads)
    weight = inputs.add("norm weight", model, scale=0.1, shift=1.0)
    projection = inputs.add("projection", model, model, scale=model**-0.5)

    def step() -> dict[str, Any]:
        mixed = (convolution(x, f, activation="silu") for x, f in zip((q, k, v), filters, strict=True))
        query, key, value = ((m[0] if isinstance(m, tuple) else m).view(1, tokens, heads, width) for m in mixed)
        log_decay = torch.nn.functional.logsigmoid(decay)
        read = attention(normalised(query), normalised(key), value, g=log_decay)[0].reshape(1, tokens, model)
        out = swiglu(gated(read, gate, weight, None, projection, None), gate)
        return inputs.backward(output=out)

    return step


def _megatron_rope(device: str, size: dict[str, int]) -> Step:
    import torch

    if device == "cpu":
        # megatron.core imports Transformer Engine where that is installed, whose wheel without CUDA refuses otherwise.
        os.environ.setdefault("NVTE_PROJECT_BUILDING", "1")
    with package_without_init("megatron.core.fusions"):
        importlib.import_module("megatron.core.parallel_state")  # opens a circle of imports that its __init__ opens
        rope = importlib.import_module("megatron.core.fusions.fused_mla_yarn_rope_apply")
    inputs = _Inputs(device, torch.bfloat16 if device == "cuda" else torch.float32)
    tokens, heads, width, rotary = (size[name] for name in ("tokens", "heads", "width", "rotary"))
    query = inputs.add("query", tokens, 1, heads, width + rotary)
    latent = inputs.add("key and value", tokens, 1, heads, 2 * width)
    position = inputs.add("key position", tokens, 1, 1, rotary)
    angles = torch.outer(torch.arange(tokens), 10_000.0 ** (-torch.arange(0, rotary, 2) / rotary)).repeat(1, 2)
    cos, sin = (table(angles).view(tokens, 1, 1, rotary).to(query) for table in (torch.cos, torch.sin))

    def step() -> dict[str, Any]:
        # The kernel rotates its argument in place, so it gets a copy of the leaf.
        rotated = rope.fused_apply_mla_rope_for_q(query.clone(), cos, sin, width, rotary)
        key, value = rope.fused_apply_mla_rope_for_kv(latent, position, cos, sin, rotary, width, width)
        return inputs.backward(query=rotated, key=key, value=value)

    return step


WORKLOADS: tuple[Workload, ...] = (
    Workload(
        "mamba_ssm",
        ("mamba_ssm.ops.triton",),
        "Mamba-2 SSD, forward and backward",
        {
            "full": {"tokens": 8192, "heads": 128, "width": 64, "groups": 8, "state": 128, "chunk": 128},
            "compile": {"tokens": 2048, "heads": 128, "width": 64, "groups": 8, "state": 128, "chunk": 128},
            "interpreter": {"tokens": 128, "heads": 1, "width": 16, "groups": 1, "state": 16, "chunk": 64},
        },
        _mamba_ssd,
    ),
    Workload(
        "fla",
        ("fla.modules", "fla.ops.simple_gla", "fla.ops.utils"),
        "a block of convolutions, decaying linear attention and gated norms, forward and backward",
        {
            "full": {"tokens": 4096, "heads": 16, "width": 128},
            "compile": {"tokens": 2048, "heads": 16, "width": 128},
            "interpreter": {"tokens": 64, "heads": 2, "width": 16},
        },
        _fla_block,
    ),
    Workload(
        "megatron.core",
        ("megatron.core.fusions",),
        "rotary embedding of multi-head latent attention, forward and backward",
        {
            "full": {"tokens": 4096, "heads": 128, "width": 128, "rotary": 64},
            "compile": {"tokens": 256, "heads": 128, "width": 128, "rotary": 64},
            "interpreter": {"tokens": 8, "heads": 4, "width": 16, "rotary": 16},
        },
        _megatron_rope,
    ),
)
"""In the order in which they are looked for."""


def how_to_install(package: str | None = None) -> str:
    """What to run where no workload's package is there, or where the one named is not."""
    if package == "megatron.core":
        return "run: pip install megatron-core"
    extra = "mamba" if package == "mamba_ssm" else "demo"
    return f"run: pip install 'triton-tuning[{extra}]', or in a checkout: pip install -e '.[{extra}]'"


def installed_workloads() -> tuple[Workload, ...]:
    """The workloads whose top-level package is installed; nothing is imported."""
    return tuple(
        workload for workload in WORKLOADS if importlib.util.find_spec(workload.package.partition(".")[0]) is not None
    )
