"""The torch-native L2 normalisation: FLA's formula, written out here a second time, and its own float64 form."""

from __future__ import annotations

import pytest
import torch

from tuning.determinism import l2_normalize
from tuning.determinism.l2norm import l2norm_backward, l2norm_forward


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


def rows(dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 7, 3, 64, generator=generator, dtype=torch.float64).to(dtype)


def test_the_epsilon_is_added_under_the_root() -> None:
    x = torch.tensor([[3.0, 4.0]])
    assert torch.equal(l2_normalize(x, eps=11.0), x / 6.0)  # sqrt(9 + 16 + 11)
    assert torch.equal(l2_normalize(torch.zeros(2, 8)), torch.zeros(2, 8))


@pytest.mark.parametrize(
    ("dtype", "bound"), [(torch.float64, 1e-15), (torch.float32, 1e-7), (torch.bfloat16, 3e-3), (torch.float16, 4e-4)]
)
def test_forward_and_backward_against_float64(dtype: torch.dtype, bound: float) -> None:
    x = rows(dtype).requires_grad_()
    dy = rows(dtype, seed=1)
    y = l2_normalize(x)
    y.backward(dy)
    exact = x.detach().double().requires_grad_()
    expected = exact / (exact.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    expected.backward(dy.double())
    assert (y.dtype, x.grad.dtype) == (dtype, dtype)  # type: ignore[union-attr]
    assert relative(y, expected) < bound
    assert relative(x.grad, exact.grad) < bound  # type: ignore[arg-type]


def test_gradcheck() -> None:
    x = rows(torch.float64)[:1, :2].requires_grad_()
    assert torch.autograd.gradcheck(l2_normalize, (x,))


def test_the_sum_is_float32_inside() -> None:
    # 256 ones and 255 values too small to count in bfloat16 one after the other.
    x = torch.full((1, 4096), 1.0, dtype=torch.bfloat16)
    _, reciprocal = l2norm_forward(x, eps=0.0)
    assert (reciprocal.dtype, reciprocal.item()) == (torch.float32, 1 / 64)


def test_the_backward_starts_from_the_rounded_output() -> None:
    x = rows(torch.bfloat16).requires_grad_()
    dy = rows(torch.bfloat16, seed=1)
    y = l2_normalize(x)
    y.backward(dy)
    wide = x.detach().float()
    reciprocal = 1 / (wide.square().sum(-1, keepdim=True) + 1e-6).sqrt()

    def formula(output: torch.Tensor) -> torch.Tensor:
        grad = dy.float()
        return (grad * reciprocal - (grad * output).sum(-1, keepdim=True) * output * reciprocal).to(torch.bfloat16)

    assert torch.equal(x.grad, formula(y.detach().float()))  # type: ignore[arg-type]
    assert not torch.equal(x.grad, formula(wide * reciprocal))  # type: ignore[arg-type]


def test_an_output_of_another_dtype() -> None:
    x = rows(torch.bfloat16).requires_grad_()
    y = l2_normalize(x, output_dtype=torch.float32)
    y.sum().backward()
    assert (y.dtype, x.grad.dtype) == (torch.float32, torch.bfloat16)  # type: ignore[union-attr]


def test_equal_values_give_equal_bits_whatever_the_strides() -> None:
    x = rows(torch.float32)
    strided = torch.empty(64, 2, 7, 3).permute(1, 2, 3, 0)
    strided.copy_(x)
    assert strided.stride() != x.stride()
    assert l2_normalize(strided).equal(l2_normalize(x))


def test_the_backward_takes_a_flat_gradient_as_fla_passes_it() -> None:
    x = rows(torch.float32)
    y, reciprocal = l2norm_forward(x)
    dy = rows(torch.float32, seed=1)
    assert torch.equal(l2norm_backward(y, reciprocal, dy.reshape(-1, 64)), l2norm_backward(y, reciprocal, dy))


def test_a_second_derivative_is_refused() -> None:
    x = rows(torch.float64).requires_grad_()
    dy = rows(torch.float64, seed=1).requires_grad_()
    (grad,) = torch.autograd.grad(l2_normalize(x), x, dy, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
