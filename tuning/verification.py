"""Whether ranks launched the same configs: checks of a group of processes.

A check is called where all ranks of a group arrive. :mod:`tuning._check_protocol` says what is sent and how a verdict
follows, :mod:`tuning._check_contents` in which bytes, :mod:`tuning._check_ledger` what is remembered and compared, and
:mod:`tuning._check_transport` how ranks reach each other. Here they are joined: :class:`GroupVerifier` for one
communicator, :class:`Verifier` for any ``torch.distributed`` groups.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator, Iterable, Sequence
from typing import Any

from tuning._check_ledger import ConfigGroup, Disagreement, RankSet, Verdict, at_step
from tuning._check_protocol import HEADER_BYTES, Agreement, Exchange, Gather, Launched, Request
from tuning._check_transport import Communicator, MemoryGroup, TorchCommunicator, fill_slots
from tuning.errors import DisagreementError

__all__ = [
    "DEFAULT_TIMEOUT_SECONDS",
    "HEADER_BYTES",
    "Agreement",
    "Communicator",
    "ConfigGroup",
    "Disagreement",
    "Exchange",
    "Gather",
    "GroupVerifier",
    "Launched",
    "MemoryGroup",
    "RankSet",
    "Request",
    "TorchCommunicator",
    "Verdict",
    "Verifier",
    "lockstep",
]

logger = logging.getLogger("tuning.verification")

DEFAULT_TIMEOUT_SECONDS = 300.0
"""How long a check waits for a rank. Longer than the 110 s that a first step takes with an empty compile cache, since
ranks may be that far apart; shorter than the 600 s after which torch's NCCL watchdog ends the process unheard."""


def _positive(timeout: float) -> float:
    """``timeout``, if it is a positive number of seconds; a ``ValueError`` else."""
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}")
    return timeout


class GroupVerifier:
    """Checks of one group over one communicator.

    Args:
        communicator: this rank's view of the group.
        timeout: how long to wait for a rank, in seconds.
    """

    def __init__(self, communicator: Communicator, *, timeout: float = DEFAULT_TIMEOUT_SECONDS) -> None:
        if not timeout > 0:
            raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}")
        self._communicator = communicator
        self._timeout = timeout
        self._agreement = Agreement(communicator.rank, communicator.ranks)

    def check(
        self,
        launched: Iterable[Launched],
        *,
        step: int | None = None,
        strict: bool = False,
        timeout: float | None = None,
    ) -> Verdict:
        """Compare with the other ranks, who all call this too; see :meth:`tuning._check_protocol.Agreement.check`.

        Args:
            timeout: how long to wait for a rank at this check, in seconds; None: as set for all.

        Raises:
            DisagreementError: see :meth:`tuning._check_protocol.Agreement.check`.
            AbsentRankError: a rank did not arrive within the timeout, or was lost on the way.
        """
        communicator, timeout = self._communicator, self._timeout if timeout is None else _positive(timeout)
        communicator.meet(step, timeout)
        check = self._agreement.check(launched, step=step, strict=strict)
        try:
            request = next(check)
            while True:
                if isinstance(request, Gather):
                    result = communicator.gather(request.header, timeout)
                else:
                    result = communicator.exchange(request.slots, request.width, request.mine, timeout)
                request = check.send(result)
        except StopIteration as done:
            verdict: Verdict = done.value
        if communicator.rank == 0:
            for line in (*verdict.fresh, *verdict.notes):
                logger.warning("check%s: %s", at_step(verdict.step), line)
        return verdict


def lockstep(checks: Sequence[Generator[Request, bytes, Verdict]]) -> list[Verdict | DisagreementError]:
    """Carry out one check of all ranks of a group in one thread; for tests and for simulation.

    Args:
        checks: what :meth:`tuning._check_protocol.Agreement.check` returns, for each rank in order.

    Returns:
        For each rank what it found, or the error that it raised.

    Raises:
        RuntimeError: ranks asked for different collectives, so that a real group would hang.
    """
    outcomes: dict[int, Verdict | DisagreementError] = {}
    result: bytes | None = None
    while True:
        asked: list[Request] = []
        for rank, check in enumerate(checks):
            request = _advance(check, result, rank, outcomes)
            if request is not None:
                asked.append(request)
        if not asked:
            return [outcomes[rank] for rank in range(len(checks))]
        shapes = {
            ("gather", len(each.header)) if isinstance(each, Gather) else ("exchange", each.slots, each.width)
            for each in asked
        }
        if len(shapes) > 1 or len(asked) < len(checks):
            raise RuntimeError(f"{len(asked)} of {len(checks)} ranks ask for a collective, and for {sorted(shapes)}")
        if isinstance(asked[0], Gather):
            result = b"".join(each.header for each in asked if isinstance(each, Gather))
        else:
            mine = {slot: part for each in asked if isinstance(each, Exchange) for slot, part in each.mine.items()}
            result = fill_slots(asked[0].slots, asked[0].width, mine)


def _advance(
    check: Generator[Request, bytes, Verdict],
    result: bytes | None,
    rank: int,
    outcomes: dict[int, Verdict | DisagreementError],
) -> Request | None:
    try:
        return next(check) if result is None else check.send(result)
    except StopIteration as done:
        outcomes[rank] = done.value
    except DisagreementError as error:
        outcomes[rank] = error
    return None


class Verifier:
    """Checks of any number of ``torch.distributed`` groups, each with a ledger of its own.

    Args:
        timeout: how long to wait for a rank, in seconds.
    """

    def __init__(self, *, timeout: float = DEFAULT_TIMEOUT_SECONDS) -> None:
        self._timeout = _positive(timeout)
        self._groups: dict[str, tuple[Any, GroupVerifier]] = {}

    def check(
        self,
        launched: Iterable[Launched],
        *,
        group: Any = None,
        step: int | None = None,
        strict: bool = False,
        timeout: float | None = None,
    ) -> Verdict:
        """Compare with the other ranks of ``group`` (None: the world); see :meth:`GroupVerifier.check`.

        Outside a process group, in a group of one, and on a rank that is no member there is nobody to differ from: the
        verdict is that of agreement, without communication.
        """
        # Whoever has a process group has imported this already.
        dist: Any = sys.modules.get("torch.distributed")
        if dist is None or not dist.is_available() or not dist.is_initialized():
            return Verdict(agreed=True, step=step)
        group = dist.group.WORLD if group is None else group
        if group is dist.GroupMember.NON_GROUP_MEMBER or dist.get_world_size(group) == 1:
            return Verdict(agreed=True, step=step)
        known = self._groups.get(group.group_name)
        # Names come again after destroy_process_group: the ledger belongs to the group, not to its name.
        if known is None or known[0] is not group:
            known = (group, GroupVerifier(TorchCommunicator(group), timeout=self._timeout))
            self._groups[group.group_name] = known
        return known[1].check(launched, step=step, strict=strict, timeout=timeout)
