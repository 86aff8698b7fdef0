"""The flash patch over modules of the shape of flash-attn's and diffusers'."""

from __future__ import annotations

import sys
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tuning.determinism import flash
from tuning.determinism.flash import DISPATCH_MODULE, patch_flash_attention
from tuning.errors import DeterminismError


def flash_attn_func(q: Any, k: Any, v: Any, dropout_p: float = 0.0, deterministic: bool = False) -> Any:
    return ("func", q, dropout_p, deterministic)


def flash_attn_varlen_func(q: Any, *, deterministic: bool = False) -> Any:
    return ("varlen", q, deterministic)


def flash_attn_with_kvcache(q: Any, cache: Any = None) -> Any:
    return ("kvcache", q)


def _flash_attn_backward(dout: Any, softcap: float, deterministic: bool, rng_state: Any = None) -> Any:
    return ("backward", dout, softcap, deterministic, rng_state)


FUNCTIONS = {f.__name__: f for f in (flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache)}


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Any:
    def make(name: str, **contents: Any) -> ModuleType:
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    return make


@pytest.fixture
def flash_attn(modules: Any, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """flash-attn 2 as installed, version 3 not."""
    monkeypatch.setattr(flash, "FLASH_MODULES", ("flash_attn", "flash_attn_interface"))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    monkeypatch.delitem(sys.modules, "flash_attn_interface")
    module: ModuleType = modules(
        "flash_attn", _flash_attn_backward=_flash_attn_backward, flash_attn_size=1, **FUNCTIONS
    )
    return module


@pytest.mark.parametrize("name", ["flash_attn", "f", "", b"flash"])
def test_a_lone_name_is_not_a_list_of_letters(name: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    monkeypatch.setattr(flash, "_load", lambda item: loaded.append(item) or "not installed")
    with pytest.raises(DeterminismError) as caught:
        patch_flash_attention(name)
    assert caught.value.problems == (f"modules must be a list of modules or names, got {name!r}: write [{name!r}]",)
    assert loaded == []


def test_each_entry_point_with_the_parameter_is_bound_and_others_are_skipped(flash_attn: Any) -> None:
    with patch_flash_attention() as patch:
        assert flash_attn.flash_attn_func(1, 2, 3) == ("func", 1, 0.0, True)
        assert flash_attn.flash_attn_varlen_func(1) == ("varlen", 1, True)
        assert flash_attn.flash_attn_with_kvcache is flash_attn_with_kvcache
        assert flash_attn._flash_attn_backward(1, 0.5, False, "rng") == ("backward", 1, 0.5, True, "rng")
        assert patch.bound == (
            "flash_attn._flash_attn_backward", "flash_attn.flash_attn_func", "flash_attn.flash_attn_varlen_func",
        )  # fmt: skip
        assert patch.skipped == (
            "flash_attn_interface (not installed)",
            "flash_attn.flash_attn_with_kvcache (no parameter 'deterministic')",
        )
        assert flash_attn.flash_attn_func.__name__ == "flash_attn_func"
    assert flash_attn.flash_attn_func is flash_attn_func
    assert flash_attn._flash_attn_backward is _flash_attn_backward


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [((1, 2, 3, 0.5, False), {}), ((1, 2, 3, 0.5), {"deterministic": False}), ((1, 2, 3, 0.5), {})],
)
def test_what_the_caller_passes_does_not_matter(flash_attn: Any, args: Any, kwargs: Any) -> None:
    with patch_flash_attention():
        assert flash_attn.flash_attn_func(*args, **kwargs) == ("func", 1, 0.5, True)


def test_a_direct_import_elsewhere_is_bound_too_and_put_back(flash_attn: Any, modules: Any) -> None:
    model = modules("some_model", attend=flash_attn_func)
    with patch_flash_attention():
        assert model.attend(1, 2, 3)[-1] is True
        late = modules("late_model", attend=flash_attn.flash_attn_func)
    assert model.attend is flash_attn_func
    assert late.attend is flash_attn_func


def test_applied_twice_it_is_bound_once_and_undone_in_order(flash_attn: Any) -> None:
    with patch_flash_attention() as outer:
        bound = flash_attn.flash_attn_func
        with patch_flash_attention() as inner:
            assert inner.bound == outer.bound
            assert flash_attn.flash_attn_func is bound
        assert flash_attn.flash_attn_func is bound
    assert flash_attn.flash_attn_func is flash_attn_func


def test_none_with_the_parameter_is_rejected_naming_what_was_found(modules: Any) -> None:
    old = modules("old_flash", flash_attn_func=lambda q: q, flash_attn_3_func=None, flash_attn_varlen_func=3)
    with pytest.raises(DeterminismError) as caught:
        patch_flash_attention([old, "no_such_flash_module"])
    assert str(caught.value) == (
        "deterministic mode refuses flash attention: no entry point has a parameter 'deterministic'; found: "
        "old_flash.flash_attn_3_func (None: its package is not installed), old_flash.flash_attn_func (no parameter "
        "'deterministic'), old_flash.flash_attn_varlen_func (not callable), no_such_flash_module (not installed): "
        "install "
        "flash-attn 2.4.1 or later, or choose another attention backend"
    )


def test_a_package_that_is_installed_but_broken_is_named(modules: Any, tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "broken_flash.py").write_text("raise OSError('undefined symbol: abc\\nmore')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(DeterminismError, match=r"broken_flash \(import fails with OSError: undefined symbol: abc\)"):
        patch_flash_attention(["broken_flash"])


def test_undo_refuses_a_place_that_somebody_else_has_patched(flash_attn: Any) -> None:
    patch = patch_flash_attention()
    ours = flash_attn.flash_attn_func
    flash_attn.flash_attn_func = len
    with pytest.raises(DeterminismError) as caught:
        patch.undo()
    assert str(caught.value) == (
        "cannot undo the flash-attention patch: flash_attn.flash_attn_func was replaced by somebody else since: undo "
        "that "
        "first, then undo this again"
    )
    assert flash_attn.flash_attn_varlen_func is flash_attn_varlen_func
    flash_attn.flash_attn_func = ours
    patch.undo()
    assert flash_attn.flash_attn_func is flash_attn_func


def test_a_torch_operator_is_bound_by_its_schema(modules: Any) -> None:
    import torch

    library = torch.library.Library("flash_patch_test", "DEF")
    library.define("_flash_attn_backward(Tensor x, bool deterministic, float eps=0.5) -> Tensor")
    library.impl("_flash_attn_backward", lambda x, deterministic, eps=0.5: x + deterministic + eps, "CPU")
    op = torch.ops.flash_patch_test._flash_attn_backward
    module = modules("op_flash", _wrapped_flash_attn_backward=op)
    with patch_flash_attention([module]):
        assert module._wrapped_flash_attn_backward(torch.zeros(1), False, 0.25).item() == 1.25
    assert module._wrapped_flash_attn_backward is op


# -- the dispatcher of diffusers ---------------------------------------------------------------------------------------


class Backend(str, Enum):
    FLASH_HUB = "flash_hub"
    SAGE_HUB = "sage_hub"
    FLASH_4_HUB = "flash_4_hub"


def dispatcher() -> dict[str, Any]:
    """The names that the patch knows in diffusers.models.attention_dispatch, with none of flash-attn installed."""
    hub = {
        Backend.FLASH_HUB: flash_attn_func,
        Backend.SAGE_HUB: flash_attn_func,
        Backend.FLASH_4_HUB: flash_attn_with_kvcache,
    }
    registry = {name: SimpleNamespace(kernel_fn=None, wrapped_backward_fn=None) for name in Backend}

    def load(backend: Backend) -> str:
        registry[backend].kernel_fn = hub[backend]
        return "loaded"

    return {
        "flash_attn_func": None, "flash_attn_varlen_func": None, "flash_attn_3_func": None,
        "flash_attn_3_varlen_func": None, "_HUB_KERNELS_REGISTRY": registry, "_maybe_download_kernel_for_backend": load,
    }  # fmt: skip


def test_the_four_dispatch_functions_are_bound(flash_attn: Any, modules: Any) -> None:
    names = ("flash_attn_func", "flash_attn_varlen_func", "flash_attn_3_func", "flash_attn_3_varlen_func")
    functions = {name: lambda q, deterministic=False: deterministic for name in names}
    dispatch = modules(DISPATCH_MODULE, **functions)
    with patch_flash_attention() as patch:
        assert [getattr(dispatch, name)(1) for name in names] == [True] * 4
        assert {f"{DISPATCH_MODULE}.{name}" for name in names} <= set(patch.bound)
    assert {name: getattr(dispatch, name) for name in names} == functions


def test_dispatch_functions_of_a_package_that_is_missing_are_listed(flash_attn: Any, modules: Any) -> None:
    modules(DISPATCH_MODULE, **dispatcher())
    with patch_flash_attention() as patch:
        assert f"{DISPATCH_MODULE}.flash_attn_3_func (None: its package is not installed)" in patch.skipped


def test_a_hub_kernel_is_bound_when_it_is_loaded(flash_attn: Any, modules: Any) -> None:
    dispatch = modules(DISPATCH_MODULE, **dispatcher())
    load, registry = dispatch._maybe_download_kernel_for_backend, dispatch._HUB_KERNELS_REGISTRY
    with patch_flash_attention() as patch:
        assert dispatch._maybe_download_kernel_for_backend(Backend.FLASH_HUB) == "loaded"
        assert registry[Backend.FLASH_HUB].kernel_fn(1, 2, 3)[-1] is True
        assert "hub kernel flash_hub.kernel_fn" in patch.bound
        dispatch._maybe_download_kernel_for_backend(Backend.SAGE_HUB)
        # Not of a flash family. (This module's own name for the function is bound now.)
        assert registry[Backend.SAGE_HUB].kernel_fn is FUNCTIONS["flash_attn_func"]
        with pytest.raises(DeterminismError) as caught:
            dispatch._maybe_download_kernel_for_backend(Backend.FLASH_4_HUB)
    assert str(caught.value) == (
        "deterministic mode refuses this attention backend: hub kernel flash_4_hub.kernel_fn (no parameter "
        "'deterministic') "
        "cannot be bound to deterministic=True: choose another attention backend"
    )
    assert dispatch._maybe_download_kernel_for_backend is load
    assert registry[Backend.FLASH_HUB].kernel_fn is flash_attn_func


def test_a_dispatcher_imported_later_is_patched_at_its_import(
    flash_attn: Any, modules: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "diffusers" / "models"
    folder.mkdir(parents=True)
    for path in (folder, folder.parent):
        (path / "__init__.py").write_text("")
    (folder / "attention_dispatch.py").write_text(
        "from flash_attn import flash_attn_func\ndef flash_attn_3_func(q, deterministic=False): return deterministic\n"
    )
    for name in ("diffusers", "diffusers.models", DISPATCH_MODULE):
        monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(tmp_path))
    import importlib

    with patch_flash_attention() as patch:
        dispatch = importlib.import_module(DISPATCH_MODULE)
        assert dispatch.flash_attn_3_func(1) is True
        assert dispatch.flash_attn_func(1, 2, 3)[-1] is True
        assert f"{DISPATCH_MODULE}.flash_attn_3_func" in patch.bound
    assert dispatch.flash_attn_3_func(1) is False
    assert dispatch.flash_attn_func is flash_attn_func
