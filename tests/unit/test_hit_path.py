"""The path of a pinned launch whose key is known: what it calls, what it writes, and what threads may do to it."""

from __future__ import annotations

import itertools
import random
import sys
import threading
import types
from collections import Counter
from typing import Any

import pytest
import triton
from stub_kernels import FakeTensor, StubKernel, autotuner, configs, launch

import tuning
from tuning import AutotunePolicy
from tuning.journal import find_journals, read_journal

pytestmark = pytest.mark.stub


@pytest.fixture(autouse=True)
def _clean():
    yield
    tuning.uninstall()


def pinned(**fields: Any) -> AutotunePolicy:
    return AutotunePolicy(mode="pinned", modules=("stub_kernels",), **fields)


class Silent(StubKernel):
    """Takes a launch without making anything of it, so that a profile shows the launch path alone."""

    def run(self, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
        return None


def profile(call: Any) -> list[str]:
    """Names of every Python and C function that a call enters."""
    seen: list[str] = []

    def trace(frame: Any, event: str, arg: Any) -> None:
        if event == "call":
            seen.append(frame.f_code.co_name)
        elif event == "c_call":
            seen.append(f"C {getattr(arg, '__qualname__', arg)}")

    sys.setprofile(trace)
    try:
        call()
    finally:
        sys.setprofile(None)
    return [name for name in seen if name != "C setprofile"]


@pytest.mark.parametrize("by_keyword", [False, True])
def test_a_hit_makes_no_string_takes_no_lock_and_calls_nothing_else(by_keyword):
    tuner = autotuner(configs(16, 32), stub=Silent(), key=("n", "flag"))
    start = tuner[(1,)]
    x, y = FakeTensor(), FakeTensor("torch.bfloat16")

    def call() -> None:
        if by_keyword:
            start(x=x, y=y, n=8, flag=True)
        else:
            start(x, y, 8, flag=True)

    with tuning.install(pinned()):
        call()
        call()
        found = profile(call)
    lookups = ["C getattr"] * 3  # the dtypes of x, y and n; the flag is a constexpr
    reads = ["C dict.get"] * (5 if by_keyword else 1)
    assert sorted(found) == sorted(
        ["call", "<lambda>", "run", "C id", "C dict.get", "C len", "extract", *lookups, *reads, "run"]
    )


def test_a_launch_that_is_not_a_hit_would_be_seen_to_make_strings():
    tuner = autotuner(configs(16, 32), stub=Silent())
    with tuning.install(pinned()):
        found = profile(lambda: launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True))
    assert any("RLock" in name for name in found)
    assert "encode_value" in found


def test_the_only_attribute_written_on_a_hit_is_best_config():
    written: list[str] = []
    tuner = autotuner(configs(16, 32))

    class Watched(type(tuner)):
        def __setattr__(self, name: str, value: Any) -> None:
            written.append(name)
            super().__setattr__(name, value)

    with tuning.install(pinned()):
        launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
        tuner.__class__ = Watched
        launch(tuner, FakeTensor(), FakeTensor(), 8, flag=True)
    assert written == ["best_config"]


def test_sixteen_threads_fifty_keys_mixed_modes_and_reinstalls(tmp_path):
    """Every launch runs a candidate, a pinned one runs the pin, and nothing is lost or left behind."""
    # All of it with one Triton; with the others, on which this runs too, enough to meet what differs in them.
    keys, launches = 50, 10_000 if triton.__version__.startswith("3.6.") else 1500
    stubs = [StubKernel() for _ in range(5)]
    tuners = [autotuner(configs(16, 32, 64), stub=stub) for stub in stubs]
    failures: list[BaseException] = []
    stop = threading.Event()
    policies = [
        pinned(),
        pinned(block_sizes={"BLOCK": 64}),
        AutotunePolicy(modules=("stub_kernels",)),
        AutotunePolicy(mode="record", modules=("stub_kernels",), record_path=str(tmp_path / "run")),
        pinned(config_invariant=("stub_kernels.kernel",)),
    ]

    def work(seed: int) -> None:
        choose = random.Random(seed)
        try:
            for _ in range(launches):
                tuner = tuners[choose.randrange(5)]
                assert launch(tuner, FakeTensor(), FakeTensor(), choose.randrange(keys), flag=True).startswith(
                    "launched"
                )
        except BaseException as error:
            failures.append(error)

    def reinstall() -> None:
        try:
            for policy in itertools.cycle(policies):
                if stop.is_set():
                    return
                tuning.install(policy)
                stop.wait(0.02)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(16)]
    switcher = threading.Thread(target=reinstall)
    tuning.install(policies[0])
    switcher.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    switcher.join()
    assert failures == []
    for path in find_journals([tmp_path]):  # each is whole, and has no key of one autotuner more often than there are
        timed = Counter(record.key.text for record in read_journal(path).records if record.timings)
        assert max(timed.values(), default=0) <= len(tuners)
    assert sum(len(stub.launches) for stub in stubs) >= 16 * launches
    with tuning.install(pinned()):
        for stub, tuner in zip(stubs, tuners, strict=True):
            stub.launches.clear()
            for n in range(keys):
                launch(tuner, FakeTensor(), FakeTensor(), n, flag=True)
            assert {dict(config.kwargs)["BLOCK"] for config in stub.launches} == {"16"}
        assert tuning.benchmarks_run() == 0


def test_installing_while_another_thread_imports_torch(monkeypatch):
    """What is in ``sys.modules`` then has some of its names, and no process group."""
    half = types.ModuleType("torch.distributed")
    half.is_available = lambda: True
    monkeypatch.setitem(sys.modules, "torch.distributed", half)
    with tuning.install(pinned()):
        assert tuning.maybe_verify_choices(1) is None


def test_sixteen_threads_pinned_each_launch_its_own_keys_config():
    stub = StubKernel()
    tuner = autotuner(configs(16, 32, 64), stub=stub)
    failures: list[BaseException] = []
    results: dict[int, set[str]] = {}

    def work(seed: int) -> None:
        choose = random.Random(seed)
        mine: dict[int, set[str]] = {}
        try:
            for _ in range(2000):
                n = choose.randrange(50)
                mine.setdefault(n, set()).add(launch(tuner, FakeTensor(), FakeTensor(), n, flag=True))
        except BaseException as error:
            failures.append(error)
        for n, found in mine.items():
            results.setdefault(n, set()).update(found)

    with tuning.install(pinned(chaos=True)):
        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        made = {dict(choice.key.values)["n"]: str(choice.launch_config) for choice in tuning.choices()}
    assert failures == []
    assert len(made) == 50
    assert len(set(made.values())) == 3, "chaos spreads keys over all candidates, so a mix-up would show"
    assert {n: found for n, found in results.items() if found != {f"launched {made[str(n)]}"}} == {}
