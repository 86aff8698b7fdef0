"""The suite's low-precision formats, held against their definitions."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from tuning.bitexact.low_precision import (  # noqa: E402
    RECIPES,
    LowPrecisionLinear,
    missing_capability,
    quantize_mx,
    quantize_nv,
    quantize_whole,
    swap_linears,
    tiled,
)
from tuning.bitexact.suite import RECIPE_NAMES  # noqa: E402

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def sample(*shape: int) -> Any:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * torch.logspace(-3, 3, shape[-1])


def test_the_suite_knows_these_recipes() -> None:
    assert tuple(RECIPES) == RECIPE_NAMES
    assert missing_capability("mxfp8", torch.device("cpu")) == "needs a GPU of compute capability 10.0 or later"


@pytest.mark.parametrize("gradient", [False, True], ids=["e4m3", "e5m2"])
def test_a_whole_tensor_uses_the_range_of_its_format(gradient: bool) -> None:
    x = sample(8, 64)
    q, scale = quantize_whole(x, x.abs().amax(), gradient)
    assert q.dtype == (torch.float8_e5m2 if gradient else torch.float8_e4m3fn)
    assert q.float().abs().max() == torch.finfo(q.dtype).max
    error = (q.float() * scale - x).abs()
    assert (error <= x.abs() * (0.125 if gradient else 0.0625) + scale * 2**-9).all()
    assert quantize_whole(torch.zeros(2), torch.zeros(()), gradient)[0].float().tolist() == [0.0, 0.0]


def test_mx_blocks_of_32_share_a_power_of_two() -> None:
    x = sample(4, 128)
    q, exponents = quantize_mx(x)
    assert (q.dtype, exponents.dtype, exponents.shape) == (torch.float8_e4m3fn, torch.uint8, (4, 4))
    largest = x.view(4, 4, 32).abs().amax(-1)
    assert torch.equal(exponents.int() - 127, largest.log2().floor().int() - 8)
    back = q.float().view(4, 4, 32) * torch.exp2(exponents.float() - 127)[..., None]
    # What lies above 448 steps of the scale is cut off; the rest is rounded to 4 bits.
    top = 448 * torch.exp2(exponents.float() - 127)[..., None]
    blocks = x.view(4, 4, 32).clamp(-top, top)
    assert ((back - blocks).abs() <= blocks.abs() * 0.0625 + top / 448 * 2**-9).all()


def test_nv_elements_are_the_nearest_of_eight_and_ties_go_to_even() -> None:
    values = [*E2M1, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]
    x = torch.tensor([values, [-v for v in values]])
    codes, scales = quantize_nv(x)
    assert scales.float().tolist() == [[1.0], [1.0]]
    assert (codes.dtype, codes.shape) == (torch.uint8, (2, 8))
    both = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    found = [[E2M1[c & 7] * (-1 if c & 8 else 1) for c in row] for row in both.tolist()]
    expected = [*E2M1, 0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    assert found == [expected, [-v for v in expected]]


def test_nv_scales_bring_the_largest_of_16_to_six() -> None:
    x = sample(8, 64)
    _, scales = quantize_nv(x)
    assert (scales.dtype, scales.shape) == (torch.float8_e4m3fn, (8, 4))
    wanted = (x.view(8, 4, 16).abs().amax(-1) / 6).clamp(2**-9, 448)
    assert ((scales.float() - wanted).abs() <= wanted * 0.0625 + 2**-10).all()


def test_scales_lie_in_tiles_of_128_rows_and_4_columns() -> None:
    rows, columns = 160, 6
    scales = (torch.arange(rows * columns) % 251).to(torch.uint8).view(rows, columns)
    flat = tiled(scales)
    assert flat.numel() == 256 * 8
    for row in range(rows):
        for column in range(columns):
            tile = (row // 128) * 2 + column // 4
            place = tile * 512 + (row % 32) * 16 + (row % 128) // 32 * 4 + column % 4
            assert flat[place] == scales[row, column]
    assert flat.long().sum() == scales.long().sum()  # the rest is zero


@pytest.mark.parametrize("recipe", ["tensorwise_fp8", "delayed_fp8"])
def test_all_three_products_of_a_layer_are_near_those_of_the_layer_it_replaces(recipe: str) -> None:
    torch.manual_seed(0)
    linear = torch.nn.Linear(64, 32, bias=False).bfloat16()
    x = torch.randn(4, 16, 64).bfloat16().requires_grad_()
    gradient = torch.randn(4, 16, 32).bfloat16()
    expected = [linear(x), *torch.autograd.grad(linear(x), [x, linear.weight], gradient)]
    layer = LowPrecisionLinear(linear, recipe)
    try:
        found = [layer(x), *torch.autograd.grad(layer(x), [x, layer.weight], gradient)]
    except (RuntimeError, NotImplementedError) as error:
        pytest.skip(f"this torch has no scaled product on CPUs: {error}")
    for one, two in zip(found, expected, strict=True):
        assert one.dtype == two.dtype
        assert (one - two).float().norm() < 0.1 * two.float().norm()
        assert not torch.equal(one, two)


def test_a_delayed_scale_is_of_the_steps_before() -> None:
    layer = LowPrecisionLinear(torch.nn.Linear(32, 32, bias=False), "delayed_fp8")
    seen = [float(layer.amax("input", torch.full((2,), value))) for value in (2.0, 8.0, 1.0, 1.0)]
    assert seen == [2.0, 2.0, 8.0, 8.0]
    for _ in range(16):
        layer.amax("input", torch.ones(2))
    assert float(layer.amax("input", torch.ones(2))) == 1.0
    now = LowPrecisionLinear(torch.nn.Linear(32, 32, bias=False), "tensorwise_fp8")
    assert [float(now.amax("input", torch.full((2,), value))) for value in (2.0, 8.0)] == [2.0, 8.0]


def test_only_layers_that_fit_are_swapped() -> None:
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 32, bias=False), torch.nn.Linear(32, 64), torch.nn.Linear(64, 24, bias=False)
    )
    weight = model[0].weight
    assert swap_linears(model, "mxfp8") is model
    assert [type(layer).__name__ for layer in model] == ["LowPrecisionLinear", "Linear", "Linear"]
    assert model[0].weight is weight
