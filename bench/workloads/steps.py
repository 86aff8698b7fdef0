"""Run what a :class:`bench.workloads.Workload` describes. Torch and the packages are imported here, when asked for."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from .catalog import Tensor, Workload
from .ssd import import_mamba_ssm

__all__ = ["FILLS", "import_package", "prepare"]


def import_package(name: str) -> None:
    """Make the modules of a package that hold its Triton kernels importable, alone.

    They need none of the compiled parts, so that those may be missing. For mamba_ssm a module object that knows only
    the package's folder stands in where its extension is not built. For Transformer Engine and megatron-core such
    objects always stand in for the packages whose ``__init__`` imports compiled parts or most of the rest, unless a
    package is imported already: what is launched, and so recorded, is then the same on each machine. With them goes the
    matrix product that Transformer Engine's mHC takes from a compiled part: torch's is in its place.
    """
    if name == "mamba":
        import_mamba_ssm()
        return
    stand_ins = {
        "transformer_engine": ("transformer_engine", "transformer_engine.common", "transformer_engine.pytorch"),
        "megatron": ("megatron.core", "megatron.core.fusions", "megatron.core.ssm"),
    }
    for package in stand_ins.get(name, ()):
        if package not in sys.modules:
            _stand_in(package)
    if name == "transformer_engine":
        _without_gemm()
    elif name == "megatron":
        _without_utilities()


def _stand_in(package: str) -> None:
    parent, _, child = package.rpartition(".")
    if parent:
        importlib.import_module(parent)
    spec = importlib.util.find_spec(package)
    if spec is None or spec.submodule_search_locations is None:
        raise ImportError(f"{package} is not installed")
    module = types.ModuleType(package)
    module.__path__ = list(spec.submodule_search_locations)
    module.__spec__ = spec
    sys.modules[package] = module
    if parent:
        setattr(sys.modules[parent], child, module)


def _without_gemm() -> None:
    """Transformer Engine's mHC calls its own matrix product, a compiled part, for some gradients: torch's does here.

    Also where that part is built: between the stand-ins its package would load by half. The product is no Triton
    kernel, and nothing of it is in the key of one.
    """
    name = "transformer_engine.pytorch.cpp_extensions.gemm"
    if name in sys.modules:
        return
    import torch

    def general_gemm(a: Any, b: Any, out_dtype: Any = None, layout: str = "TN", out: Any = None, **rest: Any) -> Any:
        # Column-major A and B, as cuBLAS takes them: the row-major result is op(B) times op(A).
        left = b.t() if layout[1] == "T" else b
        right = a.t() if layout[0] == "T" else a
        found = torch.matmul(left.float(), right.float()).to(out_dtype or a.dtype)
        if out is not None:
            out.copy_(found if not rest.get("accumulate") else out + found)
            found = out
        return found, None, None, None

    module = types.ModuleType(name)
    module.general_gemm = general_gemm  # type: ignore[attr-defined]
    parent = types.ModuleType(name.rpartition(".")[0])
    parent.__path__ = []
    parent.gemm = module  # type: ignore[attr-defined]
    sys.modules[parent.__name__] = parent
    sys.modules[name] = module


def _without_utilities() -> None:
    """What the Triton modules of megatron-core take from its ``utils``, which imports most of the package."""
    name = "megatron.core.utils"
    if name not in sys.modules:
        module = types.ModuleType(name)
        module.null_decorator = lambda *args, **kwargs: lambda function: function  # type: ignore[attr-defined]
        sys.modules[name] = module


# --- tensors ----------------------------------------------------------------------------------------------------------


def _normal(torch: Any, spec: Tensor, generator: Any, device: str) -> Any:
    return torch.randn(*spec.sizes, generator=generator, dtype=torch.float32, device=device) * spec.scale


def _uniform(torch: Any, spec: Tensor, generator: Any, device: str) -> Any:
    return torch.rand(*spec.sizes, generator=generator, dtype=torch.float32, device=device) * spec.scale


def _log_decay(torch: Any, spec: Tensor, generator: Any, device: str) -> Any:
    return torch.nn.functional.logsigmoid(_normal(torch, spec, generator, device)) * spec.scale


def _sigmoid(torch: Any, spec: Tensor, generator: Any, device: str) -> Any:
    return torch.sigmoid(_normal(torch, spec, generator, device)) * spec.scale


def _unit(torch: Any, spec: Tensor, generator: Any, device: str) -> Any:
    return torch.nn.functional.normalize(_normal(torch, spec, generator, device), dim=-1) * spec.scale


def _tokens(torch: Any, spec: Tensor, generator: Any, device: str) -> Any:
    return torch.randint(0, int(spec.scale), spec.sizes, generator=generator, device=device)


def _bool(torch: Any, spec: Tensor, generator: Any, device: str) -> Any:
    """True in a share of ``scale``."""
    return torch.rand(*spec.sizes, generator=generator, device=device) < spec.scale


def _constant(torch: Any, spec: Tensor, generator: Any, device: str) -> Any:
    return torch.full(spec.sizes, spec.scale, dtype=torch.float32, device=device)


def _bounds(torch: Any, spec: Tensor, generator: Any, device: str) -> Any:
    """Bounds of sequences of equal length, ``scale`` tokens in all."""
    count = spec.sizes[0] - 1
    return torch.arange(count + 1, device=device) * (int(spec.scale) // count)


def _rising(torch: Any, spec: Tensor, generator: Any, device: str) -> Any:
    """0, 1, 2, ... along the last dimension, modulo ``scale``."""
    found = torch.arange(spec.sizes[-1], device=device) % int(spec.scale)
    return found.expand(spec.sizes).clone()


def _routing(torch: Any, spec: Tensor, generator: Any, device: str) -> Any:
    """For each row ``scale`` ones at random places, zeros elsewhere."""
    scores = torch.rand(*spec.sizes, generator=generator, device=device)
    chosen = scores.topk(int(spec.scale), dim=-1).indices
    return torch.zeros(spec.sizes, device=device).scatter_(-1, chosen, 1.0)


FILLS: dict[str, Callable[..., Any]] = {
    "normal": _normal,
    "uniform": _uniform,
    "log_decay": _log_decay,
    "sigmoid": _sigmoid,
    "unit": _unit,
    "tokens": _tokens,
    "bool": _bool,
    "constant": _constant,
    "bounds": _bounds,
    "rising": _rising,
    "routing": _routing,
}
"""How tensors are filled: log of a decay below 1, in (0, 1), of length 1 along the last dimension, integers below
``scale``, and so on."""


def _built(torch: Any, value: Any, generator: Any, device: str, backward: bool) -> Any:
    if isinstance(value, Tensor):
        found = FILLS[value.fill](torch, value, generator, device).to(getattr(torch, value.dtype))
        return found.requires_grad_(backward and value.grad and found.is_floating_point())
    if isinstance(value, (tuple, list)):
        return type(value)(_built(torch, item, generator, device, backward) for item in value)
    if isinstance(value, str) and value.startswith("torch."):
        return getattr(torch, value.removeprefix("torch."))
    return value


def _tensors(torch: Any, value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _tensors(torch, item)


def prepare(workload: Workload, device: str = "cuda", seed: int = 0) -> Callable[[], None]:
    """Import what a workload needs and make its inputs; what is returned runs one step.

    Args:
        workload: the workload.
        device: where its tensors are.
        seed: of the inputs, which are the same each time.
    """
    import torch

    import_package(workload.package)
    module, _, name = workload.call.partition(":")
    function: Any = importlib.import_module(module)
    for part in name.split("."):
        function = getattr(function, part)
    generator = torch.Generator(device=device).manual_seed(seed + zlib.crc32(workload.name.encode()))
    if workload.construct is not None:
        torch.manual_seed(seed)
        built = {key: _built(torch, value, generator, device, False) for key, value in workload.construct.items()}
        function = function(**built)
        function = function.to(device)
    arguments = {
        key: _built(torch, value, generator, device, workload.backward) for key, value in workload.arguments.items()
    }
    positional = [value for key, value in arguments.items() if key.startswith("*")]
    named = {key: value for key, value in arguments.items() if not key.startswith("*")}
    leaves = [item for item in _tensors(torch, list(arguments.values())) if item.requires_grad]

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        with torch.enable_grad() if workload.backward else torch.no_grad():
            found = [item for item in _tensors(torch, function(*positional, **named)) if item.requires_grad]
        if workload.backward:
            if not found:
                raise RuntimeError(f"{workload.name}: expected an output with a gradient, found none")
            torch.autograd.backward(found, [torch.ones_like(item) * 0.01 for item in found])

    return step
