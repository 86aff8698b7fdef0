"""What the ranks of one group are known to have launched, and where they disagree.

Pure data: no communication, no clock. Two ledgers that were told the same facts in the same order are equal, so every
rank of a group derives the same verdict from its own copy.

**What is compared.** A rank's item for a kernel and key is the *set* of configs that it launched there: a key may be
launched with several, since a fallback depends on more than the key. Ranks agree on a key when all that launched it
launched the same set; a key seen by fewer than two ranks is not compared. Configs of one bit class count as one
(:mod:`tuning._check_classes`).

**Size.** Facts are kept by content, not by rank: for each kernel, key, config and source one integer whose bits are
the ranks. Memory grows with distinct facts and with an eighth of a byte per fact and rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tuning._check_classes import class_labels
from tuning._check_contents import Fact
from tuning._check_transport import format_ranks
from tuning._config_text import differing_fields, readable_key
from tuning.errors import DisagreementError

__all__ = ["ConfigGroup", "Disagreement", "Ledger", "RankSet", "Verdict", "at_step"]


@dataclass(frozen=True)
class RankSet:
    """A set of ranks, one bit each.

    Attributes:
        mask: bit ``r`` is set where rank ``r`` is a member.
    """

    mask: int

    @classmethod
    def of(cls, ranks: Iterable[int]) -> RankSet:
        """The set of these ranks."""
        flags = bytearray()
        for rank in ranks:
            byte = rank >> 3
            if byte >= len(flags):
                flags.extend(bytes(byte + 1 - len(flags)))
            flags[byte] |= 1 << (rank & 7)
        return cls(int.from_bytes(flags, "little"))

    def __iter__(self) -> Iterator[int]:
        return (rank for rank, bit in enumerate(reversed(bin(self.mask)[2:])) if bit == "1")

    def __len__(self) -> int:
        return bin(self.mask).count("1")

    def __contains__(self, rank: object) -> bool:
        return isinstance(rank, int) and rank >= 0 and bool(self.mask >> rank & 1)

    def __str__(self) -> str:
        return format_ranks(tuple(self))


@dataclass(frozen=True)
class ConfigGroup:
    """Ranks that launched the same set of configs for a key.

    Attributes:
        ranks: ranks within the group of processes that was checked.
        global_ranks: the same ranks, in the world.
        configs: canonical texts of the configs, sorted.
        sources: the rules that chose them, sorted.
    """

    ranks: RankSet
    global_ranks: RankSet
    configs: tuple[str, ...]
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Disagreement:
    """A key for which ranks launched different configs.

    Attributes:
        kernel: qualified name.
        key: text of the key.
        groups: ranks by what they launched; the group with the lowest rank first.
    """

    kernel: str
    key: str
    groups: tuple[ConfigGroup, ...]

    @property
    def name(self) -> str:
        """Kernel and key, readable."""
        return f"{self.kernel} ({readable_key(self.key)})"

    def __str__(self) -> str:
        """One line: kernel, key, then the ranks of each group and only those fields of the configs that differ."""
        show = differing_fields([config for group in self.groups for config in group.configs])
        parts = []
        for group in self.groups:
            inside = "" if group.ranks == group.global_ranks else f" (in the group: {group.ranks})"
            configs = " and ".join(show[config] for config in group.configs)
            parts.append(f"{group.global_ranks}{inside}: {configs} [{', '.join(group.sources)}]")
        return f"{self.name}: {'; '.join(parts)}"


class _Seen:
    """Who launched one kernel and key how."""

    __slots__ = ("compared", "crossed", "place", "ranks")

    def __init__(self, place: int) -> None:
        self.place = place
        self.compared = False
        self.crossed = False
        """Whether two ranks were ever seen with sets of which neither held the other."""
        self.ranks: dict[tuple[str, str], int] = {}
        """By config and source, the ranks as bits."""


class Ledger:
    """All launches of one group of ranks that a check has told of, and what follows from them.

    Args:
        members: the global rank of each member, by its rank within the group.
    """

    def __init__(self, members: Sequence[int]) -> None:
        self._members = tuple(members)
        self._world = self._members == tuple(range(len(self._members)))
        self._seen: dict[tuple[str, str], _Seen] = {}
        self._touched: set[tuple[str, str]] = set()
        self._standing: dict[tuple[str, str], Disagreement] = {}
        self._masks: dict[int, int] = {}
        self.compared = 0
        """Number of keys seen by two or more ranks, as of the last :meth:`settle`."""

    def __len__(self) -> int:
        return len(self._seen)

    def add(self, facts: Iterable[Fact], ranks: int) -> None:
        """Note that each rank whose bit is set in ``ranks`` launched each of these. Saying it twice changes nothing."""
        for kernel, key, config, source in facts:
            place = (kernel, key)
            seen = self._seen.get(place)
            if seen is None:
                seen = self._seen[place] = _Seen(len(self._seen))
            before = seen.ranks.get((config, source), 0)
            after = before | ranks
            if after != before:
                # One object per distinct set of ranks: at many thousand ranks the sets, not the facts, fill memory.
                seen.ranks[config, source] = self._masks.setdefault(after, after)
                self._touched.add(place)

    def settle(self) -> tuple[Disagreement, ...]:
        """Compare what was added since the last call; the disagreements that are new or differ from before."""
        fresh: list[Disagreement] = []
        for place in sorted(self._touched, key=lambda place: self._seen[place].place):
            seen = self._seen[place]
            configs: dict[str, int] = {}
            everyone = 0
            labels = class_labels(config for config, _ in seen.ranks)
            for (config, _), ranks in seen.ranks.items():
                label = labels[config]
                configs[label] = configs.get(label, 0) | ranks
                everyone |= ranks
            if not everyone & (everyone - 1):
                continue
            if not seen.compared:
                seen.compared = True
                self.compared += 1
            if all(ranks == everyone for ranks in configs.values()):
                # Ranks caught up. That settles a set that held more than another's; it does not undo that two ranks
                # launched one config here, another there, though by now both launched both.
                if not seen.crossed:
                    self._standing.pop(place, None)
                continue
            found = Disagreement(*place, self._groups(seen, configs, everyone))
            sets = sorted((frozenset(group.configs) for group in found.groups), key=len)
            seen.crossed |= any(not less <= more for less, more in pairwise(sets))
            if self._standing.get(place) != found:
                self._standing[place] = found
                fresh.append(found)
        self._touched.clear()
        self._masks = {}
        return tuple(fresh)

    def disagreements(self) -> tuple[Disagreement, ...]:
        """All that stand, in the order in which the group's lowest rank first launched the keys."""
        order = sorted(self._standing, key=lambda place: self._seen[place].place)
        return tuple(self._standing[place] for place in order)

    def _groups(self, seen: _Seen, configs: dict[str, int], everyone: int) -> tuple[ConfigGroup, ...]:
        parts: list[tuple[int, tuple[str, ...]]] = [(everyone, ())]
        for config in sorted(configs):
            launched = configs[config]
            split = [
                half for ranks, had in parts for half in ((ranks & launched, (*had, config)), (ranks & ~launched, had))
            ]
            parts = [(ranks, had) for ranks, had in split if ranks]
        parts.sort(key=lambda part: part[0] & -part[0])
        groups = []
        for mask, had in parts:
            ranks = RankSet(mask)
            in_world = ranks if self._world else RankSet.of(self._members[rank] for rank in ranks)
            sources = {source for (_, source), launched in seen.ranks.items() if launched & mask}
            groups.append(ConfigGroup(ranks, in_world, had, tuple(sorted(sources))))
        return tuple(groups)


def at_step(step: int | None) -> str:
    """The step for a message, with a blank before it; nothing where there is none."""
    return "" if step is None else f" at step {step}"


@dataclass(frozen=True)
class Verdict:
    """What a check found; equal on all ranks of the group.

    Attributes:
        agreed: True where no disagreement stands.
        disagreements: all that stand, those of earlier checks included, first launched first.
        fresh: those that this check found, or found changed.
        compared: number of keys that two or more ranks launched.
        keys: number of keys that any rank launched.
        new: number of contents that had to be exchanged.
        step: the training step; the latest, should ranks be at different ones; None where no rank gave one.
        size: number of ranks.
        gathers, exchanges: number of collectives of each kind in this check.
        gathered_bytes, exchanged_bytes: their size: bytes that each rank holds afterwards.
        notes: what else should be known, such as ranks at different steps.
    """

    agreed: bool
    disagreements: tuple[Disagreement, ...] = ()
    fresh: tuple[Disagreement, ...] = ()
    compared: int = 0
    keys: int = 0
    new: int = 0
    step: int | None = None
    size: int = 1
    gathers: int = 0
    exchanges: int = 0
    gathered_bytes: int = 0
    exchanged_bytes: int = 0
    notes: tuple[str, ...] = ()

    def report(self) -> str:
        """The verdict in words: a headline, then a line for each disagreement and note."""
        if self.agreed:
            head = f"{self.size} ranks agree on {self.compared} keys{at_step(self.step)}"
        else:
            head = (
                f"{self.size} ranks disagree on {len(self.disagreements)} of {self.compared} keys{at_step(self.step)}, "
                "in order of launch"
            )
        return "\n".join([head, *(f"  {line}" for line in (*self.disagreements, *self.notes))])

    def error(self) -> DisagreementError:
        """The disagreements as an error: the first in full, every other by name, all in full in its attribute."""
        first, *others = self.disagreements
        also = f"; also {', '.join(other.name for other in others)}" if others else ""
        return DisagreementError(
            f"ranks launched different configs for {len(self.disagreements)} of {self.compared} keys"
            f"{at_step(self.step)}; the first: {first}{also}; set mode pinned, with one table, on every rank",
            step=self.step,
            disagreements=[str(each) for each in self.disagreements],
        )
