"""What a check between ranks needs of a group: meet within a timeout, gather a header, exchange contents.

:class:`Communicator` is that need, as a protocol of three methods. :class:`TorchCommunicator` carries it out over any
``torch.distributed`` group and backend, :class:`MemoryGroup` over threads of one process. Torch is imported inside
functions only.

**Absent ranks.** Neither NCCL nor gloo can say which rank did not arrive, and a collective that one rank never enters
leaves the communicator unusable. So ranks meet in the group's key-value store *before* the first collective of a check:

- each rank adds one to its own counter, which gives the number of this meeting without any state in the process (a
  process that installs again, or retries after an error, stays in step), and one to the meeting's counter;
- whoever completes the meeting, or first runs out of time, claims the right to decide its outcome by a third counter
  and writes it down once. All others read that one outcome, so every rank goes on or every rank gives up; a rank that
  arrives late reads that the others gave up;
- the list of who is missing is made by the claimant alone, and only then.

That is two additions and a poll of each rank per check and a constant number of keys. Weighed and left: a key per rank
and meeting that everybody waits for (``size`` squared look-ups); ``monitored_barrier`` (gloo only, all through rank 0);
entering the collective first and asking the store on timeout (no store traffic, but NCCL's kernel then spins on the
device until its watchdog ends the process, so nobody reads the error); ``Store.wait`` instead of polling (it holds the
client's lock for as long as it waits, and cannot be interrupted). The interval of polling grows with the size of the
group, so that all ranks together ask the store at most some 50,000 times a second. That is also what one store was
measured to answer (``bench/results/verification_scale.json``), so a meeting of 16,384 ranks takes some 1.5 seconds.

**Exchange.** An all-reduce of bytes over disjoint slots: ``uint8`` and ``SUM``, which gloo and NCCL both reduce
(``MAX`` too; ``BOR`` is not NCCL's). A slot has one writer, so nothing is ever added up; should two ranks write one
slot, its digest no longer fits, on any rank. Broadcasts by each contributor would move half the bytes of a ring
all-reduce but take one collective per content. Collectives are waited for with the same timeout, by polling.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from tuning.errors import AbsentRankError

__all__ = ["Communicator", "MemoryCommunicator", "MemoryGroup", "TorchCommunicator", "fill_slots", "format_ranks"]

_OUTCOME_SECONDS = 30.0
"""How long the outcome of a meeting may take to be written once a rank has claimed it."""

_COUNT_SECONDS = 10.0
"""How long ranks wait for each other to be counted after a collective has failed."""


class Communicator(Protocol):
    """One rank's view of a group. All three methods are entered by all ranks in the same order."""

    @property
    def rank(self) -> int:
        """This rank, within the group."""

    @property
    def ranks(self) -> Sequence[int]:
        """The global rank of each member, by its rank within the group; its length is the group's size."""

    def meet(self, step: int | None, timeout: float) -> None:
        """Return when all ranks have called this; raise :class:`AbsentRankError` after ``timeout`` seconds."""

    def gather(self, header: bytes, timeout: float) -> bytes:
        """The headers of all ranks, one after the other; all have the same length."""

    def exchange(self, slots: int, width: int, mine: Mapping[int, bytes], timeout: float) -> bytes:
        """All slots, one after the other: ``slots * width`` bytes, each slot filled up with zeros by its one writer."""


def format_ranks(ranks: Sequence[int], limit: int = 12) -> str:
    """Ranks in a few words: ``ranks 0-5``, ``ranks 6,7``, ``ranks 0-56 step 8``, ``rank 3``.

    ``ranks`` is in ascending order. At most ``limit`` runs are written out; then follows how many ranks there are.
    """
    runs: list[str] = []
    start = 0
    while start < len(ranks):
        end = start + 1
        stride = ranks[end] - ranks[start] if end < len(ranks) else 0
        while end < len(ranks) and ranks[end] - ranks[end - 1] == stride:
            end += 1
        if end - start >= 3:
            runs.append(f"{ranks[start]}-{ranks[end - 1]}" + (f" step {stride}" if stride > 1 else ""))
        else:  # a pair is no run: its second member may begin one
            end = start + 1
            runs.append(str(ranks[start]))
        start = end
    text = ",".join(runs[:limit]) + (f",... ({len(ranks)} in all)" if len(runs) > limit else "")
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text or 'none'}"


def _at(step: int | None) -> str:
    return "" if step is None else f" of step {step}"


def _name(members: Sequence[int], ranks: Sequence[int]) -> str:
    """Ranks for an error: global ones, and the ranks within the group where those differ."""
    named = [ranks[member] for member in members]
    inside = "" if list(members) == named else f" (in the group: {format_ranks(members)})"
    return format_ranks(named) + inside


def _absent(members: Sequence[int], missing: Sequence[int], step: int | None, what: str) -> AbsentRankError:
    lost = set(missing)
    arrived = [rank for rank in range(len(members)) if rank not in lost]
    return AbsentRankError(
        f"{_name(missing, members)} {what}; {_name(arrived, members)} did; see what the missing are doing",
        step=step,
        arrived=arrived,
        missing=missing,
    )


class _Meetings:
    """Meetings of ``size`` ranks in a key-value store; see the module's docstring."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store = store
        self._rank = rank
        self._size = size
        self._interval = max(0.001, size * 2e-5)
        self.place = ""

    def meet(self, label: str, timeout: float) -> tuple[tuple[int, ...], bool]:
        """Ranks that did not come to this meeting (none: everybody did), and whether this rank came too late.

        Raises:
            TimeoutError: a rank claimed the outcome and never wrote it.
        """
        store = self.store
        number = store.add(f"{label}/rank/{self._rank}", 1)
        self.place = f"{label}/{number}"
        count = store.add(f"{self.place}/arrived", 1)
        outcome = f"{self.place}/outcome"
        if count == self._size or not self._poll(outcome, timeout):
            if store.add(f"{self.place}/claim", 1) == 1:
                missing = [] if count == self._size else self._missing(label, number)
                store.set(outcome, json.dumps(missing))
            elif not self._poll(outcome, _OUTCOME_SECONDS):
                raise TimeoutError("the rank that was to say who is missing never did")
        missing = json.loads(store.get(outcome))
        if count == self._size and not missing:
            # Everybody is here, so everybody has read the outcome of the meeting before.
            for name in ("arrived", "claim", "outcome"):
                store.delete_key(f"{label}/{number - 1}/{name}")
        return tuple(missing), self._rank in missing

    def _missing(self, label: str, number: int) -> list[int]:
        return [r for r in range(self._size) if self.store.add(f"{label}/rank/{r}", 0) < number]

    def _poll(self, key: str, timeout: float) -> bool:
        deadline = time.monotonic() + timeout
        pause = self._interval
        while not self.store.check([key]):
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(pause * 1.5, max(1.0, self._interval))
        return True


class TorchCommunicator:
    """A ``torch.distributed`` group of any backend; the world where ``group`` is None.

    Tensors live on the CPU where the group has a backend for it, else on the device of the group's device type that is
    current at the collective: a program may make the group, or this, before it sets the device of its rank.

    Attributes:
        rank: this rank, within the group.
        ranks: global rank of each member.
        collectives: how many collectives were entered so far.
    """

    def __init__(self, group: Any = None, *, store: Any = None) -> None:
        import torch.distributed

        dist: Any = torch.distributed
        self._group = group if group is not None else dist.group.WORLD
        self.rank: int = dist.get_rank(self._group)
        self.ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(self._group))
        self.collectives = 0
        self._step: int | None = None
        if store is None:
            # Torch has no public name for the store that a group was made with; this one exists from 2.6 to 2.13.
            store = dist.distributed_c10d._get_default_store()
        name = f"triton-tuning/{self._group.group_name}"
        self._meetings = _Meetings(dist.PrefixStore(name, store), self.rank, len(self.ranks))
        self._backends: str = dist.get_backend_config(self._group)

    @staticmethod
    def _pick_device(backends: str) -> Any:
        """``cpu:gloo,cuda:nccl`` gives the CPU, ``cuda:nccl`` the current CUDA device."""
        import torch

        kinds = [part.partition(":")[0] for part in backends.split(",")]
        if "cpu" in kinds:
            return torch.device("cpu")
        return torch.device(kinds[0], getattr(torch, kinds[0]).current_device())

    def meet(self, step: int | None, timeout: float) -> None:
        """See :class:`Communicator`.

        Raises:
            AbsentRankError: a rank did not come, or the store does not answer.
        """
        self._step = step
        missing, late = self._count("check", timeout)
        if missing:
            what = f"did not arrive at the check{_at(step)} within {timeout:g} s"
            raise _absent(self.ranks, missing, step, what + " (this one came after the rest gave up)" * late)

    def _count(self, label: str, timeout: float) -> tuple[tuple[int, ...], bool]:
        try:
            return self._meetings.meet(label, timeout)
        except (RuntimeError, OSError, ValueError) as error:
            raise AbsentRankError(
                f"the check{_at(self._step)} cannot find out which ranks arrived, because the group's store failed "
                f"({_first_line(error)}); see whether the process that hosts it lives",
                step=self._step,
                arrived=(self.rank,),
            ) from error

    def _run(self, start: Callable[[], Any], timeout: float) -> None:
        """Start a collective and wait for it; its failure becomes one error, on all ranks that live.

        A rank that dies inside a check breaks the connection of its neighbours only. The first rank to notice leaves a
        mark in the store, which the others look for while they wait; then all that live are counted once more.
        """
        self.collectives += 1
        mark = f"{self._meetings.place}/failed"
        try:
            work = start()
            self._wait(work, mark, timeout)
            work.wait()
        except (RuntimeError, TimeoutError) as error:
            with contextlib.suppress(RuntimeError):
                self._meetings.store.set(mark, "1")
            missing, _ = self._count(mark, min(timeout, _COUNT_SECONDS))
            what = f"did not report back after a collective of the check{_at(self._step)} failed"
            if missing:
                raise _absent(self.ranks, missing, self._step, f"{what} ({_first_line(error)})") from error
            raise AbsentRankError(
                f"a collective of the check{_at(self._step)} failed though all ranks live ({_first_line(error)}); "
                "see the backend's own log",
                step=self._step,
                arrived=range(len(self.ranks)),
            ) from error

    def _wait(self, work: Any, mark: str, timeout: float) -> None:
        now = time.monotonic()
        deadline, look, pause = now + timeout, now + 1.0, 2e-5
        while not work.is_completed():
            now = time.monotonic()
            if now >= deadline:
                raise TimeoutError(f"no result within {timeout:g} s")
            if now >= look:
                look = now + max(1.0, len(self.ranks) * 2e-5)
                if self._meetings.store.check([mark]):
                    raise TimeoutError("another rank saw it fail")
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)

    def gather(self, header: bytes, timeout: float) -> bytes:
        """See :class:`Communicator`."""
        import torch
        import torch.distributed as dist

        # Renamed in torch 2.13, where the old name warns.
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        device = self._pick_device(self._backends)
        result = bytearray(len(header) * len(self.ranks))
        host = torch.frombuffer(result, dtype=torch.uint8)
        mine = torch.frombuffer(bytearray(header), dtype=torch.uint8).to(device)
        every = host.to(device)
        self._run(lambda: all_gather(every, mine, group=self._group, async_op=True), timeout)
        if every is not host:
            host.copy_(every)
        return bytes(result)

    def exchange(self, slots: int, width: int, mine: Mapping[int, bytes], timeout: float) -> bytes:
        """See :class:`Communicator`."""
        import torch
        import torch.distributed as dist

        result = bytearray(fill_slots(slots, width, mine))
        host = torch.frombuffer(result, dtype=torch.uint8)
        every = host.to(self._pick_device(self._backends))
        self._run(lambda: dist.all_reduce(every, dist.ReduceOp.SUM, group=self._group, async_op=True), timeout)
        if every is not host:
            host.copy_(every)
        return bytes(result)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]


def fill_slots(slots: int, width: int, mine: Mapping[int, bytes]) -> bytes:
    """All slots, one after the other: those in ``mine`` filled up with zeros, the others zero."""
    return b"".join(mine.get(slot, b"").ljust(width, b"\0") for slot in range(slots))


class MemoryGroup:
    """A group whose ranks are threads of this process; for tests and for simulation.

    Args:
        size: number of ranks.
        ranks: global rank of each member; ``0 .. size-1`` where not given.
    """

    def __init__(self, size: int, ranks: Sequence[int] | None = None) -> None:
        self.ranks = tuple(ranks) if ranks is not None else tuple(range(size))
        if len(self.ranks) != size or size < 1:
            raise ValueError(f"a group of {size} ranks cannot have the members {self.ranks}")
        self._changed = threading.Condition()
        self._round = _Round()

    def communicator(self, rank: int) -> MemoryCommunicator:
        """The view of one rank."""
        return MemoryCommunicator(self, rank)

    def share(self, rank: int, value: Any, timeout: float) -> dict[int, Any]:
        """The value of each rank; without those that did not come within ``timeout`` seconds."""
        with self._changed:
            here = self._round
            here.values[rank] = value
            complete = len(here.values) == len(self.ranks)
            if complete or not self._changed.wait_for(lambda: here.closed, timeout):
                here.closed = True
                self._round = _Round()
                self._changed.notify_all()
            return here.values


class _Round:
    """One meeting of a :class:`MemoryGroup`; nobody joins it once it is closed."""

    def __init__(self) -> None:
        self.values: dict[int, Any] = {}
        self.closed = False


class MemoryCommunicator:
    """One rank of a :class:`MemoryGroup`.

    Attributes:
        rank: this rank, within the group.
        ranks: global rank of each member.
        log: what was called, in order: ``("meet",)``, ``("gather", length)`` or ``("exchange", slots, width)``.
    """

    def __init__(self, group: MemoryGroup, rank: int) -> None:
        self._group = group
        self.rank = rank
        self.ranks: tuple[int, ...] = group.ranks
        self.log: list[tuple[str | int, ...]] = []

    def _share(self, value: Any, step: int | None, timeout: float) -> dict[int, Any]:
        values = self._group.share(self.rank, value, timeout)
        missing = [rank for rank in range(len(self.ranks)) if rank not in values]
        if missing:
            raise _absent(self.ranks, missing, step, f"did not arrive at the check{_at(step)} within {timeout:g} s")
        return values

    def meet(self, step: int | None, timeout: float) -> None:
        """See :class:`Communicator`."""
        self.log.append(("meet",))
        self._share(True, step, timeout)

    def gather(self, header: bytes, timeout: float) -> bytes:
        """See :class:`Communicator`."""
        self.log.append(("gather", len(header)))
        every = self._share(header, None, timeout)
        return b"".join(every[rank] for rank in range(len(self.ranks)))

    def exchange(self, slots: int, width: int, mine: Mapping[int, bytes], timeout: float) -> bytes:
        """See :class:`Communicator`."""
        self.log.append(("exchange", slots, width))
        every = self._share(dict(mine), None, timeout)
        return fill_slots(slots, width, {slot: content for part in every.values() for slot, content in part.items()})
