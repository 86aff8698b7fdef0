"""The sides of the case ``warmup`` in which Triton is alone."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from bench import warmup


@pytest.mark.parametrize("before", [None, "0"])
@pytest.mark.parametrize("fails", [False, True])
def test_stock_runs_share_a_cache_and_leave_the_environment(
    before: str | None, fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_CACHE_AUTOTUNING", raising=False)
    if before is not None:
        monkeypatch.setenv("TRITON_CACHE_AUTOTUNING", before)
    seen: list[Any] = []

    def run_worker(cache: Path, *arguments: str) -> dict[str, Any]:
        seen.append((os.environ.get("TRITON_CACHE_AUTOTUNING"), sorted(path.name for path in cache.iterdir())))
        (cache / f"run{len(seen)}").touch()
        if fails and len(seen) == 2:
            raise RuntimeError("it failed")
        return {"first_step_s": len(seen)}

    monkeypatch.setattr(warmup, "run_worker", run_worker)
    full = tmp_path / "full"
    full.mkdir()
    (full / "kernel").touch()
    if fails:
        with pytest.raises(RuntimeError, match="it failed"):
            warmup._stock(full, tmp_path / "scratch")
    else:
        assert list(warmup._stock(full, tmp_path / "scratch")) == [
            "full cache",
            "TRITON_CACHE_AUTOTUNING=1, writing",
            "TRITON_CACHE_AUTOTUNING=1, reading",
        ]
        assert seen == [(None, ["kernel"]), ("1", ["kernel", "run1"]), ("1", ["kernel", "run1", "run2"])]
    assert os.environ.get("TRITON_CACHE_AUTOTUNING") == before
    assert [path.name for path in full.iterdir()] == ["kernel"]
