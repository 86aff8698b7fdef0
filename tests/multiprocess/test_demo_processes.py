"""The demo's processes: what they inherit, and that none outlives a failure."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest

from tuning._demo_processes import Job, clean_environment, run_workers
from tuning._demo_worker import Request, _turn
from tuning.errors import TuningError


def environment(tmp_path: Path) -> dict[str, str]:
    return clean_environment(os.environ, cache=str(tmp_path / "cache"), interpreted=True)


def test_what_would_decide_is_not_inherited():
    given = {
        "PATH": "/bin",
        "LD_LIBRARY_PATH": "/lib",
        "CUDA_VISIBLE_DEVICES": "3",
        "TRITON_LIBCUDA_PATH": "/cuda",
        "PYTHONPATH": "/mine",
        "TRITON_INTERPRET": "1",
        "TRITON_CACHE_DIR": "/shared",
        "TRITON_CACHE_AUTOTUNING": "1",
        "TRITON_PRINT_AUTOTUNING": "1",
        "TRITON_AUTOTUNE_BLOCK_SIZE_M": "64",
        "MAMBA_DETERMINISTIC": "1",
        "CAUSAL_CONV1D_DETERMINISTIC": "1",
        "FLA_CACHE_MODE": "x",
        "RANK": "7",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "7",
        "MASTER_ADDR": "elsewhere",
        "NCCL_ALGO": "Tree",
        "TORCHELASTIC_RUN_ID": "x",
        "OMP_NUM_THREADS": "64",
    }
    kept = clean_environment(given, cache="/tmp/c", interpreted=False)
    assert {name: kept.pop(name) for name in list(kept) if name in given and name != "PYTHONPATH"} == {
        "PATH": "/bin",
        "LD_LIBRARY_PATH": "/lib",
        "CUDA_VISIBLE_DEVICES": "3",
        "TRITON_LIBCUDA_PATH": "/cuda",
        "TRITON_CACHE_DIR": "/tmp/c",
        "OMP_NUM_THREADS": "1",
    }
    assert kept.pop("PYTHONPATH").endswith(":/mine")
    assert kept == {"GLOO_SOCKET_IFNAME": "lo", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    assert clean_environment(given, cache="/tmp/c", interpreted=True)["TRITON_INTERPRET"] == "1"


def test_a_worker_that_fails_is_named_with_its_last_words_and_the_others_end(tmp_path: Path):
    bad = Job("bad-1", Request("list", "no_such_package", "cpu"), environment(tmp_path))
    slow = Job("slow-0", Request("pinned", "fla", "cpu"), environment(tmp_path))
    with pytest.raises(
        TuningError, match=r"^demo: bad-1 failed: KeyError: 'no_such_package' \(all of it: .*bad-1\.log\)$"
    ):
        run_workers([slow, bad], tmp_path, timeout_s=60)
    assert slow.ended == -9
    assert "Traceback" in (tmp_path / "bad-1.log").read_text()


def test_a_worker_that_takes_too_long_is_ended(tmp_path: Path):
    slow = Job("slow-0", Request("pinned", "fla", "cpu"), environment(tmp_path))
    started = time.monotonic()
    with pytest.raises(TuningError, match=r"slow-0 did not end within 0\.2 s"):
        run_workers([slow], tmp_path, timeout_s=0.2)
    assert slow.ended == -9
    assert time.monotonic() - started < 20


def test_an_interruption_ends_the_workers(tmp_path: Path):
    def interrupt(jobs: object) -> None:
        raise KeyboardInterrupt

    slow = Job("slow-0", Request("pinned", "fla", "cpu"), environment(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        run_workers([slow], tmp_path, timeout_s=60, watch=interrupt)
    assert slow.ended == -9


def test_a_turn_is_had_by_one_at_a_time(tmp_path: Path):
    path = str(tmp_path / "turn")
    order: list[str] = []

    def wait_for_it() -> None:
        with _turn(path):
            order.append("second")

    with _turn(path):
        second = threading.Thread(target=wait_for_it)
        second.start()
        second.join(timeout=0.3)
        assert second.is_alive()
        order.append("first")
    second.join(timeout=10)
    assert order == ["first", "second"]
    with _turn(None), _turn(None):
        pass


def test_a_request_survives_the_command_line():
    request = Request(
        "compile", "fla", "cuda", size="compile", rank=1, ranks=2, picks=(0, 3), fields={"mode": "pinned"}
    )
    assert Request.from_json(request.to_json()) == request
