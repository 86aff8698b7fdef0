"""Checks between real processes over gloo: what they find, and that nothing makes them hang.

Every scenario runs in all ranks; what each returns or raises comes back to the test. The processes come from a fork
server that has torch loaded, meet through a file, and are ended after ``DEADLINE`` seconds whatever they do.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from tuning import _check_transport
from tuning.errors import AbsentRankError, DisagreementError
from tuning.verification import GroupVerifier, Launched, TorchCommunicator, Verdict, Verifier

pytestmark = pytest.mark.multiprocess

DEADLINE = 60.0
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["torch.distributed", "tuning.verification"])


def _process(scenario: Callable[[int], Any], rank: int, size: int, path: str, result: Any) -> None:
    import torch.distributed as dist

    store = dist.FileStore(path, size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=20))
    dist.barrier()  # on a busy machine processes start far apart
    try:
        outcome = scenario(rank)
    except Exception as error:
        outcome = error
    result.send_bytes(pickle.dumps(outcome))
    # A rank that leaves breaks the connections of others that are still waiting for something.
    result.poll(DEADLINE)
    os._exit(0)


@pytest.fixture
def ranks(tmp_path: Any) -> Any:
    """Runs a scenario in processes and returns the outcome of each rank; None for a rank that died."""

    def run(size: int, scenario: Callable[[int], Any]) -> list[Any]:
        path = str(tmp_path / f"store-{uuid.uuid4().hex}")
        started = []
        for rank in range(size):
            here, there = PROCESSES.Pipe()
            process = PROCESSES.Process(target=_process, args=(scenario, rank, size, path, there), daemon=True)
            process.start()
            there.close()
            started.append((process, here))
        deadline = time.monotonic() + DEADLINE
        outcomes: list[Any] = []
        try:
            for rank, (_, pipe) in enumerate(started):
                if not pipe.poll(max(0.0, deadline - time.monotonic())):
                    pytest.fail(f"rank {rank} hangs")
                try:
                    outcomes.append(pickle.loads(pipe.recv_bytes()))
                except EOFError:
                    outcomes.append(None)
        finally:
            for process, pipe in started:
                pipe.close()
                process.kill()
                process.join()
                process.close()
        return outcomes

    return run


def launched(key: int, block: int, source: str = "timed", **more: Any) -> Launched:
    config = f'{{"kwargs":{{"BLOCK":{block}}},"num_stages":3,"num_warps":4}}'
    return Launched(
        f"pkg.mod.kernel_{key % 5}", f'{{"dtypes":[["x","float16"]],"values":[["N","{key}"]]}}', config, source, **more
    )


def same(outcomes: list[Any]) -> Any:
    """What all ranks returned; the error they all raised, by type and content."""
    first = outcomes[0]
    if isinstance(first, Exception):
        for other in outcomes[1:]:
            assert type(other) is type(first), outcomes
            assert (str(other), vars(other)) == (str(first), vars(first))
    else:
        assert all(outcome == first for outcome in outcomes), outcomes
    return first


# --- what a check finds


def _steps(rank: int) -> list[Verdict]:
    verifier = Verifier(timeout=10)
    alone = [launched(key, 64) for key in range(3)] if rank == 0 else []  # the others hold no key at all
    late = [launched(0, 64)] if rank == 1 else []
    differs = [launched(1, 128, "cheapest")] if rank == 1 else []
    return [
        verifier.check([], step=0),
        verifier.check(alone, step=1),
        verifier.check(late, step=2),
        verifier.check(differs, step=7),
        verifier.check([], step=8),
    ]


@pytest.mark.parametrize("size", [2, 3, 4])
def test_verdicts_over_steps_are_the_same_on_all_ranks(ranks: Any, size: int) -> None:
    none, alone, late, differs, after = same(ranks(size, _steps))
    assert (none.agreed, none.keys, none.gathers, none.exchanges) == (True, 0, 1, 0)
    assert (alone.agreed, alone.keys, alone.compared, alone.exchanges) == (True, 3, 0, 1)
    assert (late.agreed, late.compared, late.new) == (True, 1, 1)
    assert not differs.agreed
    # The launch of step 1 on rank 0 meets that of step 7 on rank 1.
    assert [str(each) for each in differs.disagreements] == [
        "pkg.mod.kernel_1 (N=1 x:float16): rank 0: BLOCK=64 [timed]; rank 1: BLOCK=128 [cheapest]"
    ]
    assert differs.fresh == differs.disagreements == after.disagreements
    assert (after.agreed, after.fresh, after.exchanges, after.step, after.size) == (False, (), 0, 8, size)


def _thirteen_of_22(rank: int, strict: bool) -> Verdict:
    items = [launched(key, 64 if key < 9 else 64 << (rank + key) % 3) for key in range(22)]
    items += [launched(100, 2**rank, exempt=True)]
    return Verifier(timeout=10).check(items, step=4, strict=strict)


def test_exactly_the_thirteen_of_22_keys_that_disagree_are_named(ranks: Any) -> None:
    verdict = same(ranks(4, functools.partial(_thirteen_of_22, strict=False)))
    assert verdict.compared == verdict.keys == 22
    assert [each.key for each in verdict.disagreements] == [launched(key, 0).key for key in range(9, 22)]
    assert str(verdict.disagreements[0]) == (
        "pkg.mod.kernel_4 (N=9 x:float16): ranks 0,3: BLOCK=64 [timed]; rank 1: BLOCK=128 [timed]; "
        "rank 2: BLOCK=256 [timed]"
    )


def test_a_disagreement_raises_on_all_ranks_where_strict(ranks: Any) -> None:
    error = same(ranks(3, functools.partial(_thirteen_of_22, strict=True)))
    assert type(error) is DisagreementError
    assert error.step == 4
    assert len(error.disagreements) == 13
    for key in range(9, 22):
        assert f"N={key} x:float16" in str(error)


def _allocate_by_config(rank: int) -> str:
    import torch
    import torch.distributed as dist

    block = 64 << rank
    verifier = Verifier(timeout=10)
    try:
        # Only one rank asks for strictness: it must hold for both, or the other would enter the collective below.
        verifier.check([launched(0, block)], step=1, strict=rank == 1)
    except DisagreementError as error:
        return str(error)
    dist.all_reduce(torch.zeros(block))
    return "entered a collective with a buffer of the wrong size"


def test_strict_raises_before_anything_depends_on_the_config(ranks: Any) -> None:
    assert "rank 0: BLOCK=64 [timed]; rank 1: BLOCK=128 [timed]" in same(ranks(2, _allocate_by_config))


def _subgroups(rank: int) -> tuple[int, list[Any]]:
    import torch.distributed as dist

    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    mine = groups[rank % 2]
    verifier = Verifier(timeout=10)
    no_member = verifier.check([launched(0, rank)], group=groups[1 - rank % 2])
    in_group = verifier.check([launched(0, 64 if rank % 2 == 0 or rank == 1 else 32)], group=mine, step=1)
    # The groups' ledgers are their own: the world has seen nothing yet.
    before = verifier.check([], step=2)
    in_world = verifier.check([launched(0, 64)], step=3)
    return rank % 2, [no_member, in_group, before, in_world]


def test_groups_smaller_than_the_world_have_ledgers_of_their_own(ranks: Any) -> None:
    outcomes = ranks(4, _subgroups)
    evens = same([found for odd, found in outcomes if not odd])
    odds = same([found for odd, found in outcomes if odd])
    assert (evens[0].agreed, evens[0].gathers, evens[0].size) == (True, 0, 1)
    assert (evens[1].agreed, evens[1].compared, evens[1].size) == (True, 1, 2)
    assert [str(each).partition(": ")[2] for each in odds[1].disagreements] == [
        "rank 1 (in the group: rank 0): BLOCK=64 [timed]; rank 3 (in the group: rank 1): BLOCK=32 [timed]"
    ]
    for found in (evens, odds):
        assert (found[2].keys, found[3].keys, found[3].compared, found[3].agreed) == (0, 1, 1, True)


def _collectives(rank: int) -> list[Any]:
    import torch.distributed as dist

    log: list[Any] = []

    def logged(name: str, call: Any) -> Any:
        @functools.wraps(call)
        def wrapper(tensor: Any, *args: Any, **kwargs: Any) -> Any:
            log.append((name, tensor.numel()))
            return call(tensor, *args, **kwargs)

        return wrapper

    for name in ("all_reduce", "all_gather_single", "all_gather_into_tensor", "all_gather", "broadcast", "barrier"):
        if hasattr(dist, name):
            setattr(dist, name, logged(name, getattr(dist, name)))
    verifier = Verifier(timeout=10)
    per_rank = [0, 1, 300, 7]
    verifier.check([], step=0)
    verifier.check([launched(key, 64 << rank % 2) for key in range(per_rank[rank])], step=1)
    verifier.check([launched(1000 + key, 64) for key in range(rank)], step=2)
    verifier.check([], step=3)
    return log


def test_ranks_with_different_numbers_of_keys_enter_the_same_collectives(ranks: Any) -> None:
    log = same(ranks(4, _collectives))
    headers = [size for name, size in log if name.startswith("all_gather")]
    assert headers == [4 * 48] * 4
    assert [name for name, _ in log if not name.startswith("all_gather")] == ["all_reduce"] * 2
    assert len(log) == 6


def _reinstalled(rank: int) -> list[Verdict]:
    verifier = Verifier(timeout=10)
    verifier.check([launched(0, 64)], step=1)
    if rank == 1:
        verifier = Verifier(timeout=10)
    mine = launched(1, 64 << rank)
    return [verifier.check([launched(0, 64), mine], step=2), verifier.check([], step=3)]


def test_a_rank_that_starts_afresh_is_compared_afresh(ranks: Any) -> None:
    first, second = same(ranks(3, _reinstalled))
    assert (first.compared, len(first.disagreements), first.gathers) == (2, 1, 2)
    assert any("ranks 0,2; rank 1" in note for note in first.notes)
    assert (second.gathers, second.notes, len(second.disagreements)) == (1, (), 1)


def _devices_picked(rank: int) -> list[str]:
    import torch

    events: list[str] = []

    class Watched(TorchCommunicator):
        @staticmethod
        def _pick_device(backends: str) -> Any:
            events.append(f"device of {backends}")
            return torch.device("cpu")

        def meet(self, step: int | None, timeout: float) -> None:
            super().meet(step, timeout)
            events.append("met")

    verifier = GroupVerifier(Watched(), timeout=10)
    events.append("made")  # a program may set the device of its rank from here on
    for step in range(2):
        verifier.check([launched(step, 64)], step=step)
    return events


def test_the_device_is_looked_up_at_each_check_once_all_ranks_are_there(ranks: Any) -> None:
    picked = same(ranks(2, _devices_picked))
    assert picked[0] == "made"
    assert picked.count("met") == 2
    checks = " ".join(picked[1:]).split("met")
    assert checks[0] == ""
    for check in checks[1:]:
        assert "device of" in check
        assert "gloo" in check


# --- ranks that lie


class Liar(TorchCommunicator):
    """Rank 1 sends something else than it should."""

    header: Callable[[bytes], bytes] = staticmethod(lambda header: header)
    content: Callable[[bytes], bytes] = staticmethod(lambda content: content)

    def gather(self, header: bytes, timeout: float) -> bytes:
        return super().gather(type(self).header(header), timeout)

    def exchange(self, slots: int, width: int, mine: Any, timeout: float) -> bytes:
        lies = {slot: type(self).content(content).ljust(width, b"\0")[:width] for slot, content in mine.items()}
        return super().exchange(slots, width, lies, timeout)


class Explodes:
    def __reduce__(self) -> Any:
        return (os._exit, (77,))


LIES: dict[str, tuple[dict[str, Callable[[bytes], bytes]], str]] = {
    "pickle": ({"content": lambda content: pickle.dumps(Explodes())}, "rank 1 sent a content that cannot be used"),
    "nothing": ({"content": lambda content: b""}, "rank 1 sent a content that cannot be used"),
    "bomb": ({"content": lambda content: b"\xdd\xff\xff\xff\xff" * 20}, "exceeds max_array_len"),
    "another content": (
        {"content": lambda content: content.replace(b"BLOCK", b"CLOCK")},
        "its digest is",
    ),
    "a length of 4 GB": (
        {"header": lambda header: header[:4] + b"\xff" * 4 + header[8:]},
        "rank 1 announced 4294967295 bytes",
    ),
    "another version": ({"header": lambda header: b"tv\x09" + header[3:]}, "run one version"),
    "noise": ({"header": lambda header: b"\xa5" * len(header)}, "rank 1 sent a header of magic a5a5"),
    "unknown flags": ({"header": lambda header: header[:3] + b"\x80" + header[4:]}, "unknown flags"),
    "a history": ({"header": lambda header: header[:-16] + os.urandom(16)}, "different histories"),
}


def _with_a_liar(rank: int) -> list[str]:
    """One check per lie, in one set of processes: the group is as good as before after each error."""
    said = []
    for place, (how, _) in enumerate(LIES.values()):
        kind = type("Lie", (Liar,), {name: staticmethod(call) for name, call in how.items()}) if rank == 1 else Liar
        verifier = GroupVerifier(kind(), timeout=10)
        try:
            verifier.check([launched(place, 64 << rank)], step=place)
            said.append("nothing found")
        except DisagreementError as error:
            said.append(f"{type(error).__name__} {error.step} {error}")
        verifier._communicator = TorchCommunicator()
        said.append(verifier.check([launched(place, 64)], step=place).report())
    return said


def test_whatever_a_rank_sends_is_an_error_on_all_ranks(ranks: Any) -> None:
    said = same(ranks(3, _with_a_liar))
    for place, (name, (_, expected)) in enumerate(LIES.items()):
        assert expected in said[2 * place], name
        assert said[2 * place].startswith("DisagreementError"), name
        assert "rank 1: BLOCK=128 and BLOCK=64" in said[2 * place + 1], name


def _cannot_prepare(rank: int) -> Verdict:
    item = launched(0, 64)
    return Verifier(timeout=10).check([replace(item, config=None) if rank == 2 else item], step=3)  # type: ignore[arg-type]


def test_a_fault_on_one_rank_is_told_to_all_instead_of_leaving_them(ranks: Any) -> None:
    error = same(ranks(3, _cannot_prepare))
    assert type(error) is DisagreementError
    assert "rank 2 could not prepare its launches" in str(error)


# --- ranks that are not there


def _absent_then_late(rank: int) -> list[Any]:
    found: list[Any] = []
    if rank == 2:
        time.sleep(4.0)
    try:
        Verifier(timeout=2.0).check([launched(0, 64)], step=5)
    except AbsentRankError as error:
        found.append((error.step, error.arrived, error.missing, str(error)))
    # The others are here long before rank 2 has learnt that it came too late for the check of step 5.
    found.append(Verifier(timeout=20).check([launched(0, 64)], step=6))
    return found


def test_an_absent_rank_is_named_and_may_come_to_the_next_check(ranks: Any) -> None:
    started = time.monotonic()
    outcomes = ranks(4, _absent_then_late)
    assert time.monotonic() - started < 20
    for rank, (absent, verdict) in enumerate(outcomes):
        assert absent[:3] == (5, (0, 1, 3), (2,))
        assert "rank 2 did not arrive at the check of step 5 within 2 s" in absent[3]
        assert ("came after the rest gave up" in absent[3]) == (rank == 2)
        assert (verdict.agreed, verdict.compared, verdict.size) == (True, 1, 4)


def _late_but_in_time(rank: int) -> Verdict:
    time.sleep(0.5 * rank)
    return Verifier(timeout=10).check([launched(0, 64)], step=1)


def test_a_late_rank_is_waited_for(ranks: Any) -> None:
    assert same(ranks(3, _late_but_in_time)).agreed


def _killed_before(rank: int) -> Verdict:
    if rank == 1:
        os._exit(9)
    return Verifier(timeout=2.0).check([launched(0, 64)], step=5)


def test_a_killed_rank_is_named(ranks: Any) -> None:
    first, dead, last = ranks(3, _killed_before)
    assert dead is None
    error = same([first, last])
    assert (type(error), error.step, error.arrived, error.missing) == (AbsentRankError, 5, (0, 2), (1,))


class DiesInside(TorchCommunicator):
    def gather(self, header: bytes, timeout: float) -> bytes:
        if self.rank == 1:
            time.sleep(0.2)
            os._exit(9)
        return super().gather(header, timeout)


def _killed_inside(rank: int) -> Verdict:
    _check_transport._COUNT_SECONDS = 2.0
    return GroupVerifier(DiesInside(), timeout=15).check([launched(0, 64)], step=5)


@pytest.mark.parametrize("size", [2, 4])
def test_a_rank_killed_within_a_check_is_named_by_all_that_live(ranks: Any, size: int) -> None:
    started = time.monotonic()
    outcomes = ranks(size, _killed_inside)
    # Not only its neighbours notice at once: nobody waits for the whole timeout.
    assert time.monotonic() - started < 14
    assert outcomes.pop(1) is None
    for error in outcomes:
        assert type(error) is AbsentRankError
        assert (error.step, error.missing) == (5, (1,))
        assert "rank 1 did not report back after a collective of the check of step 5 failed" in str(error)


def _absent_in_subgroup(rank: int) -> Verdict | None:
    import torch.distributed as dist

    group = dist.new_group([1, 2, 3])
    return Verifier(timeout=2.0).check([], group=group, step=2) if rank in (1, 3) else None


def test_an_absent_rank_of_a_subgroup_is_named_by_both_its_ranks(ranks: Any) -> None:
    error = same([ranks_ for ranks_ in ranks(4, _absent_in_subgroup) if ranks_ is not None])
    assert (error.arrived, error.missing) == ((0, 2), (1,))
    assert "rank 2 (in the group: rank 1) did not arrive" in str(error)
