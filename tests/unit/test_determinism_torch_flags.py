"""torch's flags: what is set, what the debug switch leaves on, and that everything comes back."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from tuning.determinism.torch_flags import (
    TorchFlags,
    deterministic_torch,
    read_torch_flags,
    restore_torch_flags,
    set_torch_flags,
)


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    before = read_torch_flags()
    yield
    restore_torch_flags(before)


def test_what_the_mode_sets() -> None:
    set_torch_flags()
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert torch.backends.cudnn.deterministic is True
    assert torch.backends.cudnn.benchmark is False
    assert torch.utils.deterministic.fill_uninitialized_memory is False  # type: ignore[attr-defined]


def test_an_op_without_a_deterministic_form_raises_instead_of_warning() -> None:
    with deterministic_torch(), pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        torch.zeros(3).put_(torch.tensor([0]), torch.tensor([1.0]))


def test_unwritten_memory_is_filled_only_with_the_debug_switch() -> None:
    with deterministic_torch(fill_uninitialized_memory=True):
        assert torch.empty(64).isnan().all()
    with deterministic_torch():
        zeros = torch.zeros(1 << 20)
        del zeros  # the allocator hands the same memory out again, unless somebody fills it
        assert not torch.empty(1 << 20).isnan().all()


UNUSUAL = {
    "deterministic_algorithms": True,
    "warn_only": True,
    "cudnn_deterministic": True,
    "cudnn_benchmark": True,
    "fill_uninitialized_memory": False,
    "inductor_deterministic": False,
}


@pytest.mark.parametrize("changes", [{}, *({name: value} for name, value in UNUSUAL.items()), UNUSUAL])
def test_a_block_restores_everything(changes: dict[str, Any]) -> None:
    restore_torch_flags(replace(read_torch_flags(), **changes))
    before = read_torch_flags()
    assert {name: asdict(before)[name] for name in changes} == changes
    with deterministic_torch() as held:
        assert held == before
        assert read_torch_flags() == replace(TorchFlags(), inductor_deterministic=True)
    assert read_torch_flags() == before


def test_a_block_that_fails_restores_everything() -> None:
    before = read_torch_flags()
    with pytest.raises(KeyError), deterministic_torch():
        raise KeyError
    assert read_torch_flags() == before


def test_blocks_nest() -> None:
    before = read_torch_flags()
    with deterministic_torch(fill_uninitialized_memory=True):
        with deterministic_torch():
            assert not read_torch_flags().fill_uninitialized_memory
        assert read_torch_flags().fill_uninitialized_memory
        assert read_torch_flags().deterministic_algorithms
    assert read_torch_flags() == before
