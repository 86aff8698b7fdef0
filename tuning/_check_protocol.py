"""Whether the ranks of a group launched the same configs: the protocol of a check.

A check is called where all ranks of a group arrive. The core (:class:`Agreement`) does no communication: it is a
generator that asks for a gather or an exchange and is sent the result, so that the same code runs over
``torch.distributed``, between threads, and for tens of thousands of simulated ranks in one process.

**Protocol.** Each rank sends one header of 48 bytes: what it launched since the last check, as length and digest of its
content; the step; flags; and a digest of everything that earlier checks told it. From the gathered headers alone, which
are the same on all ranks, each derives what follows, whatever it holds itself:

1. a header that cannot be read, a length past the limit, a rank that reports a fault of its own: an error everywhere;
2. ranks whose history differs (one installed again, the others did not): all forget theirs, and gather once more, now
   for everything they ever launched;
3. contents not met before: the lowest rank with each contributes it, in one exchange of (contents x longest) bytes.
   Above 16 MiB it is cut into several, of whole contents, so that memory stays bounded though every rank differ;
4. a rank with more than 4 MiB of news says so in its header, and all go round again;
5. the contents go into the ledger of each rank, which gives the verdict.

Nothing new anywhere, the usual case, is one gather and nothing else.

**Weighed and left.** Gathering whole contents (``all_gather_object``) unpickles what peers send and moves ranks x
longest bytes: 1.6 GB to each of 16,384 ranks for 300 keys, where this moves one content. Hashing alone, without
contents, can say that ranks differ but not in what. A tree of comparisons moves less still when nobody agrees, but
takes as many rounds as the tree is deep and gives no rank the whole picture.
"""

from __future__ import annotations

import hashlib
import logging
import struct
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass

from tuning._check_contents import CONTENT_LIMIT, Fact, bounded_text, digest_of, pack, prefix_within_limit, unpack
from tuning._check_ledger import Ledger, RankSet, Verdict, at_step
from tuning.errors import DisagreementError

__all__ = ["HEADER_BYTES", "Agreement", "Exchange", "Gather", "Launched", "Request"]

logger = logging.getLogger("tuning.verification")

# Magic, version, flags, length of the content, step, digest of the content, digest of the history.
_HEADER = struct.Struct(">2sBBIq16s16s")
HEADER_BYTES = _HEADER.size
"""Bytes that each rank sends in every check; 16,384 ranks receive 0.75 MiB each."""

_MAGIC = b"tv"
_VERSION = 1
_STRICT, _MORE, _FAULT = 1, 2, 4
_NO_STEP = -1
_NOTHING = bytes(16)

_EXCHANGE_LIMIT = 16 << 20
_ROUNDS_LIMIT = 256
_REMEMBERED_CONTENTS = 4096


@dataclass(frozen=True)
class Launched:
    """One config that this rank launched for one kernel and key.

    Attributes:
        kernel: qualified name.
        key: canonical text of the key.
        config: canonical text of the config.
        source: the rule that chose it.
        exempt: True for config-invariant kernels, which may differ between ranks; they are neither sent nor compared.
    """

    kernel: str
    key: str
    config: str
    source: str
    exempt: bool = False


@dataclass(frozen=True)
class Gather:
    """Ask for the headers of all ranks, one after the other."""

    header: bytes


@dataclass(frozen=True)
class Exchange:
    """Ask for ``slots * width`` bytes, of which this rank contributes the slots in ``mine``."""

    slots: int
    width: int
    mine: Mapping[int, bytes]


Request = Gather | Exchange


@dataclass(frozen=True)
class _Header:
    """One distinct header and who sent it."""

    ranks: int
    flags: int
    length: int
    step: int
    digest: bytes
    history: bytes

    @property
    def sender(self) -> int:
        return (self.ranks & -self.ranks).bit_length() - 1


@dataclass
class _Tally:
    gathers: int = 0
    exchanges: int = 0
    gathered: int = 0
    exchanged: int = 0
    new: int = 0


class Agreement:
    """One rank's state in one group: what it launched, what it told the others, what it was told.

    Args:
        rank: this rank, within the group.
        members: the global rank of each member.
    """

    def __init__(self, rank: int, members: Sequence[int]) -> None:
        self._rank = rank
        self._members = tuple(members)
        self._own: dict[Fact, None] = {}
        self._forget()

    def _forget(self) -> None:
        self._told: set[Fact] = set()
        self._history = _NOTHING
        self._ledger = Ledger(self._members)
        # Contents by digest, oldest first: a rank that gets later to what another launched need not send it again.
        self._contents: dict[bytes, tuple[Fact, ...]] = {}
        self._facts: dict[Fact, Fact] = {}

    def check(
        self, launched: Iterable[Launched], *, step: int | None = None, strict: bool = False
    ) -> Generator[Request, bytes, Verdict]:
        """One check: yields what it needs of the group, is sent the result, and returns the verdict.

        Args:
            launched: what this rank launched; what it said in earlier checks may be repeated or left out.
            step: the training step.
            strict: raise where a disagreement stands. If any rank asks for it, it holds for all.

        Raises:
            DisagreementError: on all ranks: a disagreement stands and a rank is strict; a rank sent what cannot be
                read or is not what its digest says; ranks run different versions of this protocol.
        """
        fault: Exception | None = None
        try:
            for item in launched:
                if not item.exempt:
                    fact = (
                        bounded_text(item.kernel),
                        bounded_text(item.key),
                        bounded_text(item.config),
                        bounded_text(item.source),
                    )
                    self._own.setdefault(fact)
            number = _NO_STEP if step is None else int(step)
            struct.pack(">q", number)
        except Exception as error:  # whatever it is, the other ranks are on their way: they must be told, not left
            fault, number = error, _NO_STEP
        tally = _Tally()
        notes: list[str] = []
        for _ in range(_ROUNDS_LIMIT):
            content, facts, more = self._next_content() if fault is None else (b"", (), False)
            flags = _STRICT * bool(strict) | _MORE * more | _FAULT * (fault is not None)
            digest = digest_of(facts) if facts else _NOTHING
            header = _HEADER.pack(_MAGIC, _VERSION, flags, len(content), number, digest, self._history)
            gathered = yield Gather(header)
            tally.gathers += 1
            tally.gathered += len(gathered)
            headers = self._read_headers(gathered, fault)
            if len({each.history for each in headers}) > 1:
                notes.append(self._start_over(headers, again=bool(notes)))
                continue
            yield from self._learn(headers, content, tally)
            if any(each.length for each in headers):
                self._history = hashlib.blake2b(self._history + gathered, digest_size=16).digest()
            self._told.update(facts)
            if not any(each.flags & _MORE for each in headers):
                break
        else:
            raise _fault_error([f"a rank still had more to say after {_ROUNDS_LIMIT} rounds"], _latest(headers))
        return self._verdict(headers, tally, notes)

    def _next_content(self) -> tuple[bytes, tuple[Fact, ...], bool]:
        """What this rank has not told yet, as bytes and as facts, up to the limit; and whether there is more."""
        if len(self._own) == len(self._told):
            return b"", (), False
        news = [fact for fact in self._own if fact not in self._told]
        fits = news[: prefix_within_limit(news)]
        return pack(fits), tuple(fits), len(fits) < len(news)

    def _read_headers(self, gathered: bytes, fault: Exception | None) -> list[_Header]:
        """The distinct headers, by lowest rank; raises on all ranks where one cannot be used."""
        size = len(self._members)
        first = gathered[:HEADER_BYTES]
        if gathered == first * size:
            senders = {first: (1 << size) - 1}
        else:
            lists: dict[bytes, list[int]] = {}
            for rank in range(size):
                lists.setdefault(gathered[rank * HEADER_BYTES : (rank + 1) * HEADER_BYTES], []).append(rank)
            senders = {raw: RankSet.of(ranks).mask for raw, ranks in lists.items()}
        headers: list[_Header] = []
        faults: list[str] = []
        lengths: dict[bytes, int] = {}
        step = _NO_STEP
        for raw, ranks in senders.items():
            magic, version, flags, length, number, digest, history = _HEADER.unpack(raw)
            wrong = None
            if magic != _MAGIC or version != _VERSION:
                wrong = (
                    f"sent a header of magic {magic.hex()} and version {version}, not {_MAGIC.hex()} and {_VERSION}; "
                    "run one version of this library on all ranks"
                )
                number = _NO_STEP
            elif flags & _FAULT:
                wrong = "could not prepare its launches; the cause is in the log of that rank"
            elif flags & ~(_STRICT | _MORE | _FAULT):
                wrong = f"sent unknown flags {flags:#x}"
            elif length > CONTENT_LIMIT or (length == 0) != (digest == _NOTHING) or (flags & _MORE and not length):
                wrong = (
                    f"announced {length} bytes with digest {digest.hex()} and flags {flags}; a content has 1 to "
                    f"{CONTENT_LIMIT} bytes, and only an empty one has digest 0"
                )
            elif length and lengths.setdefault(digest, length) != length:
                wrong = f"announced a content of {length} bytes that others say has {lengths[digest]}"
            if wrong is not None:
                faults.append(f"{self._name(ranks)} {wrong}")
            step = max(step, number)
            headers.append(_Header(ranks, flags, length, number, digest, history))
        if faults:
            if fault is not None:
                logger.error("this rank could not prepare its launches for a check: %s", fault, exc_info=fault)
            raise _fault_error(faults, None if step == _NO_STEP else step) from fault
        return headers

    def _start_over(self, headers: Sequence[_Header], again: bool) -> str:
        groups: dict[bytes, int] = {}
        for header in headers:
            groups[header.history] = groups.get(header.history, 0) | header.ranks
        who = "; ".join(self._name(ranks) for ranks in groups.values())
        if again:
            raise _fault_error([f"ranks keep reporting different histories ({who})"], _latest(headers))
        self._forget()
        return f"ranks had been told different things by earlier checks ({who}); all was compared afresh"

    def _learn(self, headers: Sequence[_Header], content: bytes, tally: _Tally) -> Generator[Request, bytes, None]:
        """Exchange the contents that are new, check them, and enter all that was announced into the ledger."""
        announced: dict[bytes, _Header] = {}
        ranks: dict[bytes, int] = {}
        for header in headers:
            if header.length:
                announced.setdefault(header.digest, header)
                ranks[header.digest] = ranks.get(header.digest, 0) | header.ranks
        for digest in announced:
            if digest in self._contents:
                self._ledger.add(self._contents[digest], ranks[digest])
        new = [header for digest, header in announced.items() if digest not in self._contents]
        width = max((header.length for header in new), default=0)
        at_once = max(1, _EXCHANGE_LIMIT // width) if width else 0
        tally.new += len(new)
        for start in range(0, len(new), at_once or 1):
            part = new[start : start + at_once]
            mine = {slot: content for slot, header in enumerate(part) if header.sender == self._rank}
            received = yield Exchange(len(part), width, mine)
            tally.exchanges += 1
            tally.exchanged += len(received)
            faults = []
            for slot, header in enumerate(part):
                try:
                    facts = unpack(received[slot * width : slot * width + header.length])
                    if digest_of(facts) != header.digest:
                        raise ValueError(f"its digest is {digest_of(facts).hex()}, announced was {header.digest.hex()}")
                except ValueError as error:
                    who = self._name(1 << header.sender)
                    faults.append(f"{who} sent a content that cannot be used: {error}")
                    continue
                self._ledger.add(facts, ranks[header.digest])
                # The same launch in many contents is kept once, texts and all.
                self._contents[header.digest] = tuple(self._facts.setdefault(fact, fact) for fact in facts)
            while len(self._contents) > _REMEMBERED_CONTENTS:
                del self._contents[next(iter(self._contents))]
            if faults:
                raise _fault_error(faults, _latest(headers))

    def _verdict(self, headers: Sequence[_Header], tally: _Tally, notes: list[str]) -> Verdict:
        steps: dict[int, int] = {}
        for header in headers:
            steps[header.step] = steps.get(header.step, 0) | header.ranks
        if len(steps) > 1:
            where = "; ".join(
                f"{self._name(ranks)}: {'none' if step == _NO_STEP else step}" for step, ranks in sorted(steps.items())
            )
            notes.append(f"ranks are at different steps ({where})")
        fresh = self._ledger.settle()
        standing = self._ledger.disagreements()
        verdict = Verdict(
            agreed=not standing,
            disagreements=standing,
            fresh=fresh,
            compared=self._ledger.compared,
            keys=len(self._ledger),
            new=tally.new,
            step=_latest(headers),
            size=len(self._members),
            gathers=tally.gathers,
            exchanges=tally.exchanges,
            gathered_bytes=tally.gathered,
            exchanged_bytes=tally.exchanged,
            notes=tuple(notes),
        )
        if standing and any(header.flags & _STRICT for header in headers):
            raise verdict.error()
        return verdict

    def _name(self, ranks: int) -> str:
        return str(RankSet.of(self._members[rank] for rank in RankSet(ranks)))


def _latest(headers: Sequence[_Header]) -> int | None:
    step = max(header.step for header in headers)
    return None if step == _NO_STEP else step


def _fault_error(faults: Sequence[str], step: int | None) -> DisagreementError:
    return DisagreementError(
        f"the check{at_step(step)} cannot be carried out: {'; '.join(faults)}", step=step, disagreements=faults
    )
