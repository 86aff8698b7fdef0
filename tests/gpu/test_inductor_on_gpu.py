"""Kernels inside torch.compile on a GPU: what is launched, what is timed, and what a changed pin changes.

Needs no conftest: ``pytest --noconftest -s tests/gpu/test_inductor_on_gpu.py`` prints one line for each finding.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from symbolic_notices import SYMBOLIC

import tuning
from tuning import AutotunePolicy
from tuning.interception import current_arch
from tuning.spec import LaunchConfig
from tuning.tables import Entry, TableFile, write_table

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("default"),  # torch.compile's own, which differ between releases
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

N = 100_003
DTYPES = (("x", "float32"), ("y", "float32"))


@pytest.fixture(autouse=True)
def timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[str]]:
    """Names of the kernels of which Inductor times a candidate, one for each time; caches are empty at first."""
    import torch._dynamo
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    names: list[str] = []
    bench = CachingAutotuner.bench

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(self.fn.__name__)
        return bench(self, *args, **kwargs)

    monkeypatch.setattr(CachingAutotuner, "bench", counted)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    torch._dynamo.reset()
    yield names
    tuning.uninstall()
    torch._dynamo.reset()


def pinned(**fields: Any) -> Any:
    return tuning.install(AutotunePolicy(mode="pinned", modules=("gpu_kernels",), **fields))


def table(folder: Path, exact: int, rest: int) -> str:
    """Rows of ``row_sum`` and ``add_one``: one for N elements, one for any other number."""
    rows = []
    for kernel in ("gpu_kernels.row_sum", "gpu_kernels.add_one"):
        for key, block in (((("n", str(N)),), exact), (None, rest)):
            config = LaunchConfig.build({"BLOCK": block})
            rows.append(Entry(kernel, key, DTYPES if key else None, None, config, {"source": "a test"}))
    write_table(folder, TableFile(current_arch(), "gpu_kernels", "1", "", "a test's", tuple(rows), (), None))
    return str(folder)


def add_one(x: Any) -> Any:
    import gpu_kernels

    y = torch.empty_like(x)
    n = x.numel()
    gpu_kernels.add_one[lambda meta: ((n + meta["BLOCK"] - 1) // meta["BLOCK"],)](x, y, n)
    return y


def row_sum(x: Any) -> Any:
    import gpu_kernels

    y = torch.empty(x.shape[0], device=x.device)
    gpu_kernels.row_sum[(x.shape[0],)](x, y, x.shape[1])
    return y


def generated(compiled: Callable[..., Any], *args: Any) -> tuple[Any, list[list[dict[str, Any]]]]:
    """What compiled code returns, and the configs in what was generated for it now; none where it is reused."""
    from torch._inductor.utils import run_and_get_code

    result, sources = run_and_get_code(compiled, *args)
    listed = [found for source in sources for found in re.findall(r"user_autotune\(\s*configs=(\[.*?\}\]),", source)]
    return result, [ast.literal_eval(text.replace("\\'", "'")) for text in listed]


def cache_counts(prefix: str = "fxgraph_cache") -> dict[str, int]:
    from torch._dynamo.utils import counters

    found = {name: int(counters["inductor"][f"{prefix}_{name}"]) for name in ("hit", "miss")}
    counters.clear()
    return found


def test_without_a_policy_inductor_times_also_where_it_is_deterministic(timed: list[str]) -> None:
    """The positive control: the counter that the other tests hold at zero does count."""
    import torch._inductor.config as config

    x = torch.rand(N, device="cuda")
    assert torch.equal(torch.compile(add_one)(x), x + 1)
    stock = len(timed)
    assert stock > 0
    if hasattr(config, "deterministic"):
        torch._dynamo.reset()
        with config.patch({"deterministic": True, "fx_graph_cache": False}):
            torch.compile(add_one)(torch.rand(N, device="cuda"))
    print(f"\ntimed without a policy: {stock}; more with Inductor's deterministic setting: {len(timed) - stock}")


def test_the_compiled_kernel_has_the_config_and_the_bits_of_the_eager_one(timed: list[str], tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(64, N, device="cuda")
    digests = {}
    for block in (256, 1024, 4096):
        with pinned(table_path=(table(tmp_path / str(block), block, 256),)) as installed:
            eager = row_sum(x)
            result, configs = generated(torch.compile(row_sum, fullgraph=True, dynamic=False), x)
            assert [[config["BLOCK"] for config in each] for each in configs] == [[block]]
            assert torch.equal(eager.view(torch.int32), result.view(torch.int32))
            (choice,) = installed.choices
            assert (choice.source, dict(choice.launch_config.kwargs)["BLOCK"]) == ("exact", str(block))
            assert installed.compiled == ("gpu_kernels.row_sum",)
            assert installed.benchmarks == 0
        digests[block] = eager.view(torch.int32).sum().item()
    assert timed == []
    assert len(set(digests.values())) > 1, "the configs were to differ in bits, or equal bits show nothing"
    print(f"\nbits by config, eager == compiled: {digests}; candidates timed: {len(timed)}")


def test_symbolic_sizes_share_the_wildcards_config_and_are_reported(timed: list[str], tmp_path: Path) -> None:
    with pinned(table_path=(table(tmp_path / "t", 64, 256),)) as installed:
        compiled = torch.compile(add_one, fullgraph=True, dynamic=True)
        x = torch.rand(N, device="cuda")
        result, configs = generated(compiled, x)
        assert [[config["BLOCK"] for config in each] for each in configs] == [[256]]
        assert torch.equal(result, x + 1)
        more = torch.rand(2 * N + 5, device="cuda")
        assert torch.equal(compiled(more), more + 1)
        assert [choice.source for choice in installed.choices] == ["wildcard"]
        assert [kind for kind, _ in installed.manifest().notices] == list(SYMBOLIC)
    assert timed == []


@contextlib.contextmanager
def watched() -> Iterator[list[list[list[dict[str, Any]]]]]:
    """The configs in each piece of code that is generated or loaded, one list for each, and nothing of Dynamo dropped.

    ``run_and_get_code`` cannot serve: it begins by dropping all that Dynamo has compiled, stale code included.
    """
    from torch._inductor.graph import GraphLowering

    pieces: list[list[list[dict[str, Any]]]] = []

    def saved(code: str) -> None:
        listed = re.findall(r"user_autotune\(\s*configs=(\[.*?\}\]),", code)
        pieces.append([ast.literal_eval(text.replace("\\'", "'")) for text in listed])

    with mock.patch.object(GraphLowering, "save_output_code", saved):
        yield pieces


def test_a_changed_pin_makes_a_new_artefact_and_the_same_pin_finds_the_old(timed: list[str], tmp_path: Path) -> None:
    x = torch.rand(N, device="cuda")
    compiled = torch.compile(add_one, fullgraph=True, dynamic=False)
    seen = []
    for block in (64, 128, 64):
        cache_counts()
        with pinned(table_path=(table(tmp_path / str(block), block, 256),)), watched() as pieces:
            for _ in range(2):  # called as a program calls it: only what installing has dropped is compiled anew
                assert torch.equal(compiled(x), x + 1)
            counts = cache_counts()
            seen.append((block, counts["hit"], counts["miss"]))
            # Where the code is found in the cache there may be none to look at.
            found = [[[config["BLOCK"] for config in each] for each in piece] for piece in pieces]
            assert found in ([[[block]]], *([[]] if counts["hit"] else []))
    assert seen == [(64, 0, 1), (128, 0, 1), (64, 1, 0)]
    assert timed == []
    print(f"\n(BLOCK, hits, misses) of Inductor's cache as the pin changes: {seen}")


def test_after_removal_inductor_decides_again(timed: list[str]) -> None:
    x = torch.rand(N, device="cuda")
    compiled = torch.compile(add_one, dynamic=False)
    with pinned():
        assert torch.equal(compiled(x), x + 1)
        assert timed == []
    with watched() as pieces:
        assert torch.equal(compiled(x), x + 1)
    assert [[len(each) for each in piece] for piece in pieces] == [[3]]
    assert timed


class _AddOne(torch.autograd.Function):
    """A kernel in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return add_one(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return add_one(gradient.contiguous())


def test_forward_and_backward_of_a_compiled_function_are_pinned(timed: list[str]) -> None:
    x = torch.rand(N, device="cuda", requires_grad=True)
    with pinned() as installed:
        torch.compile(lambda value: _AddOne.apply(value).sum(), dynamic=False)(x).backward()
        assert torch.equal(x.grad, torch.full_like(x, 2.0))
        assert {choice.kernel for choice in installed.choices} == {"gpu_kernels.add_one"}
        assert installed.benchmarks == 0
    assert timed == []


def test_a_compiled_kernel_replays_in_a_cuda_graph(timed: list[str]) -> None:
    x = torch.rand(N, device="cuda")
    with pinned():
        compiled = torch.compile(add_one, mode="reduce-overhead", dynamic=False)
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            result = compiled(x).clone()
        assert torch.equal(result, x + 1)
    assert timed == []
