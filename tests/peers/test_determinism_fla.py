"""The torch-native forms beside the installed FLA: same arguments, same numbers, and a replacement that undoes cleanly.

FLA's own kernels need a GPU; here its reference forms in torch, and its L2 kernel under Triton's interpreter, are what
the numbers are compared with.
"""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tuning.determinism import chunk_gated_delta_rule, chunk_gdn2, l2_normalize, replace_in_fla
from tuning.determinism.causal_conv1d import causal_convolution
from tuning.determinism.fla_replacement import PARTS, FlaReplacement
from tuning.errors import DeterminismError

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.peers("fla")


@pytest.fixture(scope="module")
def fla() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "Triton is not supported on current platform"
        for name in ("fla.ops.gated_delta_rule", "fla.ops.gdn2", "fla.modules", "fla.ops.kda"):
            importlib.import_module(name)
    return importlib.import_module("fla")


def module(name: str) -> Any:
    return sys.modules[name]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


def inputs(rule: str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    b, t, h, k, v = 2, 100, 2, 16, 8
    found = {"q": normal(b, t, h, k), "k": F.normalize(normal(b, t, h, k), dim=-1), "v": normal(b, t, h, v)}
    if rule == "gdn":
        found |= {"g": F.logsigmoid(normal(b, t, h)), "beta": normal(b, t, h).sigmoid()}
    else:
        found |= {"g": F.logsigmoid(normal(b, t, h, k)), "b": normal(b, t, h, k).sigmoid()}
        found |= {"w": normal(b, t, h, v).sigmoid()}
    return {name: tensor.to(dtype).requires_grad_() for name, tensor in found.items()}


@pytest.mark.parametrize(
    ("rule", "place", "references"),
    [
        ("gdn", "fla.ops.gated_delta_rule.naive", ["naive_recurrent_gated_delta_rule", "naive_chunk_gated_delta_rule"]),
        ("gdn2", "fla.ops.gdn2.naive", ["naive_recurrent_gdn2", "naive_chunk_gdn2"]),
    ],
)
def test_numbers_of_the_chunked_rules_are_those_of_flas_references(
    fla: Any, rule: str, place: str, references: list[str]
) -> None:
    function: Any = chunk_gated_delta_rule if rule == "gdn" else chunk_gdn2
    for reference in references:
        i = inputs(rule)
        o, state = function(**i, output_final_state=True)
        expected_o, expected_state = getattr(module(place), reference)(**i, output_final_state=True)
        assert relative(o, expected_o) < 1e-5
        assert relative(state, expected_state) < 1e-5
        grads = torch.autograd.grad(o.square().sum() + state.sum(), list(i.values()))
        expected = torch.autograd.grad(expected_o.square().sum() + expected_state.sum(), list(i.values()))
        for one, other in zip(grads, expected, strict=True):
            assert relative(one, other) < 1e-4


KERNEL = """
import os, sys, types, warnings, contextlib
os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, {root!r})
from triton.runtime.driver import driver
driver.set_active(types.SimpleNamespace(get_benchmarker=lambda: (lambda call, quantiles: (call(), [1.0] * 3)[1]),
    get_current_target=lambda: types.SimpleNamespace(backend="cpu", arch="", warp_size=32)))
warnings.simplefilter("ignore")
import torch
from fla.modules.norm import l2norm
from tuning.determinism.l2norm import l2norm_forward, l2norm_backward
for kernel in (l2norm.l2norm_fwd_kernel, l2norm.l2norm_bwd_kernel):
    kernel.configs = kernel.configs[:1]
generator, dtype = torch.Generator().manual_seed(0), getattr(torch, sys.argv[1])
x, dy = (torch.randn(6, 3, 64, generator=generator).to(dtype) for _ in range(2))
y, rstd = l2norm.l2norm_fwd(x)
dx = l2norm.l2norm_bwd(y, rstd, dy)
ours, reciprocal = l2norm_forward(x)
relative = lambda a, b: float((a.double() - b.double()).norm() / b.double().norm())
print(relative(ours, y), relative(reciprocal, rstd), relative(l2norm_backward(y, rstd, dy), dx))
"""


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-6), ("bfloat16", 5e-3)])
def test_numbers_of_l2norm_are_those_of_flas_kernel_interpreted(dtype: str, bound: float) -> None:
    # The interpreter rounds to bfloat16 by cutting off, so there one unit in the last place (2**-8) may differ.
    program = KERNEL.format(root=str(ROOT))
    out = subprocess.run([sys.executable, "-c", program, dtype], capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert max(map(float, out.stdout.split())) < bound


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_every_argument_of_flas_function_is_known_here(fla: Any, part: Any) -> None:
    defined = module(part.modules[0])
    pairs = [(getattr(defined, name), place) for name, place in part.functions.items()]
    if part.autograd:
        pairs.append((getattr(defined, part.autograd[0]).forward, part.autograd[1]))
    for theirs, place in pairs:
        source, _, name = place.partition(":")
        known = set(inspect.signature(getattr(importlib.import_module(source), name)).parameters)
        wanted = set(inspect.signature(theirs).parameters) - {"ctx", "kwargs"}
        assert wanted <= known, f"{name} does not know {sorted(wanted - known)}"


HOLDERS = [
    ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"),
    ("fla.ops.gated_delta_rule", "chunk_gdn"),
    ("fla.ops", "chunk_gated_delta_rule"),
    ("fla.ops.gdn2", "chunk_gdn2"),
    ("fla.ops.kda.chunk", "l2norm_fwd"),
    ("fla.ops.gated_delta_rule.chunk", "l2norm_bwd"),
    ("fla.modules.norm.l2norm", "l2norm_fwd"),
    ("fla.modules.causal_conv1d", "causal_conv1d"),
    ("fla.modules.convolution", "causal_conv1d"),
]


def test_the_replacement_reaches_every_holder_and_goes_away_again(fla: Any) -> None:
    before = {place: getattr(module(place[0]), place[1]) for place in HOLDERS}
    finders = list(sys.meta_path)
    classes = [getattr(module(part.modules[0]), part.autograd[0]) for part in PARTS if part.autograd]
    with replace_in_fla() as replacement:
        assert all(getattr(module(name), attribute) is not before[name, attribute] for name, attribute in HOLDERS)
        assert all("apply" in vars(cls) for cls in classes)
        assert len(replacement.places) >= len(HOLDERS)
        late = ModuleType("late_user_of_fla")
        vars(late)["rule"] = module("fla.ops").chunk_gated_delta_rule
        sys.modules["late_user_of_fla"] = late
    try:
        assert {place: getattr(module(place[0]), place[1]) for place in HOLDERS} == before
        assert not any("apply" in vars(cls) for cls in classes)
        assert late.rule is before["fla.ops", "chunk_gated_delta_rule"]
        assert replacement.places == ()
        assert sys.meta_path == finders
    finally:
        del sys.modules["late_user_of_fla"]


def test_public_functions_compute_in_torch(fla: Any) -> None:
    i, j = inputs("gdn", torch.bfloat16), inputs("gdn2", torch.bfloat16)
    x, weight = torch.randn(2, 9, 6), torch.randn(6, 4)
    with replace_in_fla():
        o, _ = module("fla.ops").chunk_gated_delta_rule(**i, use_qk_l2norm_in_kernel=True)
        o2, _ = module("fla.ops.gdn2").chunk_gdn2(**j)
        y, _ = module("fla.modules.causal_conv1d").causal_conv1d(x, weight, activation="silu", backend="triton")
        n = module("fla.modules.norm.l2norm").l2norm(x)
    assert torch.equal(o, chunk_gated_delta_rule(**i, use_qk_l2norm_in_kernel=True)[0])
    assert torch.equal(o2, chunk_gdn2(**j)[0])
    assert torch.equal(y, causal_convolution(x, weight, activation="silu")[0])
    assert torch.equal(n, l2_normalize(x))


def test_a_function_captured_before_computes_in_torch_too(fla: Any) -> None:
    captured = {
        "rule": module("fla.ops").chunk_gated_delta_rule,
        "rule2": module("fla.ops.gdn2").chunk_gdn2,
        "norm": module("fla.modules.norm.l2norm").l2norm,
        "conv": module("fla.modules.causal_conv1d").causal_conv1d,
    }
    i, j = inputs("gdn"), inputs("gdn2")
    x, weight = torch.randn(2, 9, 6), torch.randn(6, 4)
    with replace_in_fla():
        o, state = captured["rule"](**i, output_final_state=True, use_qk_l2norm_in_kernel=True, scale=0.5)
        o2, _ = captured["rule2"](**j)
        y, final = captured["conv"](x, weight, output_final_state=True, activation="silu")
        n = captured["norm"](x)
    expected = chunk_gated_delta_rule(**i, output_final_state=True, use_qk_l2norm_in_kernel=True, scale=0.5)
    assert torch.equal(o, expected[0])
    assert torch.equal(state, expected[1])
    assert torch.equal(o2, chunk_gdn2(**j)[0])
    assert torch.equal(y, causal_convolution(x, weight, activation="silu")[0])
    assert torch.equal(final, x[:, -4:].transpose(1, 2))
    assert torch.equal(n, l2_normalize(x))


def test_a_layer_of_fla_trains_under_the_replacement(fla: Any) -> None:
    layer = module("fla.modules.causal_conv1d").ShortConvolution(6, 4, bias=True)
    x = torch.randn(2, 9, 6, requires_grad=True)
    with replace_in_fla():
        y, _ = layer(x)
        y.sum().backward()
    assert y.shape == x.shape
    assert layer.weight.grad is not None
    assert layer.bias.grad is not None
    assert x.grad is not None


def test_context_parallelism_is_refused_at_the_call(fla: Any) -> None:
    with replace_in_fla(), pytest.raises(DeterminismError, match="cp_context is not supported by the torch-native"):
        module("fla.ops").chunk_gated_delta_rule(**inputs("gdn"), cp_context=object())


def test_only_the_parts_asked_for(fla: Any) -> None:
    before = module("fla.ops").chunk_gated_delta_rule
    with replace_in_fla(["l2norm"]):
        assert module("fla.ops").chunk_gated_delta_rule is before
        x = torch.randn(3, 4)
        assert torch.equal(module("fla.modules.norm.l2norm").l2norm(x), l2_normalize(x))


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(DeterminismError) as caught:
        replace_in_fla(["rope"])
    assert str(caught.value) == (
        "deterministic mode refuses this replacement in FLA: a part must be one of l2norm, causal_conv1d, "
        "gated_delta_rule, "
        "gdn2, got 'rope' (nothing else can be replaced): choose one of them"
    )


def test_an_fla_that_lacks_what_is_replaced_is_refused(fla: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(module("fla.ops.gdn2.chunk"), "ChunkGDN2Function")
    before = module("fla.modules.norm.l2norm").l2norm_fwd
    with pytest.raises(DeterminismError) as caught:
        replace_in_fla()
    assert str(caught.value) == (
        f"deterministic mode refuses this FLA: FLA {fla.__version__} has no ChunkGDN2Function in fla.ops.gdn2.chunk "
        "(what "
        "computes gdn2 there may be autotuned): use fla-core 0.6, or leave this part out and pin FLA's kernels"
    )
    assert module("fla.modules.norm.l2norm").l2norm_fwd is before


def test_undo_refuses_what_somebody_else_has_patched(fla: Any) -> None:
    replacement = FlaReplacement(["gdn2"]).apply()
    chunk = module("fla.ops.gdn2.chunk")
    ours, chunk.chunk_gdn2 = chunk.chunk_gdn2, len
    with pytest.raises(DeterminismError, match=r"fla\.ops\.gdn2\.chunk\.chunk_gdn2 was replaced by somebody else"):
        replacement.undo()
    chunk.chunk_gdn2 = ours
    replacement.undo()
    assert "apply" not in vars(chunk.ChunkGDN2Function)


LATE = """
import sys, warnings
sys.path.insert(0, {root!r})
warnings.simplefilter("ignore")
from tuning.determinism import replace_in_fla
replacement = replace_in_fla()
assert not any(name.partition(".")[0] == "fla" for name in sys.modules)
import torch
import fla.ops.gated_delta_rule as rule, fla.modules.l2norm as norm, fla.ops.kda.chunk as kda
from fla.ops.gdn2 import chunk_gdn2
print(norm.l2norm_fwd.__name__, kda.l2norm_fwd is norm.l2norm_fwd, bool(norm.l2norm(torch.ones(1, 4)).sum() > 1.9))
print(hasattr(rule.chunk_gated_delta_rule, "__torch_native__"))
replacement.undo()
left = [hasattr(function, "__torch_native__") for function in (rule.chunk_gated_delta_rule, norm.l2norm_fwd)]
print(*left, kda.l2norm_fwd is norm.l2norm_fwd)
"""


def test_fla_imported_under_the_replacement_is_replaced_and_put_back() -> None:
    out = subprocess.run([sys.executable, "-c", LATE.format(root=str(ROOT))], capture_output=True, text=True)
    assert (out.stdout, out.returncode) == ("l2norm_fwd True True\nTrue\nFalse False True\n", 0), out.stderr
