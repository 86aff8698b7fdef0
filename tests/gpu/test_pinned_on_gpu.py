"""Pinned launches of real kernels: graph capture, fallback, warmup, and no synchronisation."""

from __future__ import annotations

from typing import Any

import pytest

import tuning
from tuning import AutotunePolicy

pytestmark = pytest.mark.gpu

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def _clean():
    yield
    tuning.uninstall()


def pinned(**fields: Any) -> AutotunePolicy:
    return AutotunePolicy(mode="pinned", modules=("gpu_kernels",), **fields)


def grid(meta: dict[str, Any]) -> tuple[int]:
    return (-(-meta["n"] // meta["BLOCK"]),)


def test_the_first_launch_of_a_key_is_captured_in_a_graph_and_replays():
    """The kernel is compiled and loaded while a stream captures: in relaxed mode that is allowed."""
    from gpu_kernels import add_one

    x = torch.arange(1000, device="cuda", dtype=torch.float32)
    y = torch.zeros_like(x)
    with tuning.install(pinned()):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="relaxed"):
            add_one[grid](x, y, 1000)
        assert tuning.benchmarks_run() == 0
        assert y.count_nonzero() == 0, "captured, not run"
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, x + 1)


def test_a_warmed_up_key_is_captured_in_global_mode():
    from gpu_kernels import add_one

    x = torch.arange(1001, device="cuda", dtype=torch.float32)
    y = torch.zeros_like(x)
    with tuning.install(pinned()):
        add_one[grid](x, y, 1001)  # compiles and loads the module, as a first step before capture does
        y.zero_()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            add_one[grid](x, y, 1001)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(y, x + 1)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature")
def test_no_synchronisation_on_any_launch():
    from gpu_kernels import add_one

    x = torch.arange(1002, device="cuda", dtype=torch.float32)
    y = torch.zeros_like(x)
    with tuning.install(pinned()):
        try:
            torch.cuda.set_sync_debug_mode("error")
            for _ in range(3):
                add_one[grid](x, y, 1002)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_warmup_compiles_one_candidate_and_the_launch_uses_it():
    from gpu_kernels import add_one

    x = torch.arange(1003, device="cuda", dtype=torch.float32)
    y = torch.zeros_like(x)
    with tuning.install(pinned()):
        made = add_one.warmup(x, y, 1003, grid=(1,))
        assert len(made) == 1
        add_one[grid](x, y, 1003)
        (choice,) = tuning.choices()
    assert add_one.best_config.kwargs["BLOCK"] == choice.config.kwargs["BLOCK"] == 64
    assert torch.equal(y, x + 1)


def test_a_table_that_names_a_config_out_of_shared_memory_falls_back(tmp_path, caplog):
    from gpu_kernels import square

    from tuning.spec import LaunchConfig
    from tuning.tables import Entry, TableFile, write_table

    capability = "".join(map(str, torch.cuda.get_device_capability()))
    entry = Entry(
        kernel="gpu_kernels.square",
        key=None,
        dtypes=None,
        dtype_sequence=None,
        config=LaunchConfig.of(square.configs[0]),
        evidence={"source": "a test"},
    )
    table = TableFile(
        arch=f"sm{capability}",
        package="gpu_kernels",
        package_version="",
        triton="",
        device="",
        entries=(entry,),
        denied=(),
        path=None,
    )
    write_table(tmp_path, table)
    n = 256
    a, b = (torch.randn(n, n, device="cuda") for _ in range(2))
    c = torch.zeros(n, n, device="cuda")
    with tuning.install(pinned(table_path=(str(tmp_path),))):
        for _ in range(2):
            square[lambda meta: (n // meta["BLOCK"], n // meta["BLOCK"])](a, b, c, n)
        (choice,) = tuning.choices()
    assert choice.source == "wildcard"
    assert choice.config.kwargs["BLOCK"] == square.best_config.kwargs["BLOCK"] == 32
    assert "OutOfResources" in choice.detail
    assert caplog.text.count("in place of") == 1
    assert torch.allclose(c, a @ b, atol=1.0, rtol=1e-2)
