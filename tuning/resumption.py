"""Choices that travel in a checkpoint: what a run launched, as plain data, and how a resumed run makes it again.

A run that is resumed after its tables have changed would compute other bits from that step on. So a checkpoint carries
the choices, and a resumed run launches, for the same kernel, key and arch, what was launched before: never silently
anything else. What it meets for the first time is chosen by the tables of the day.

**Form.** JSON data: ``format``, ``schema_version``, ``triton`` (the version that the choices were made under) and
``choices``, each in the form that it has in a manifest. Weighed and left: the manifest itself (it also holds host,
policy and versions, which a resumed run is free to change); a table (it has one config for a key, where a run may have
launched several, and no place for the rule that made a choice); pickled objects (a checkpoint is read years later, and
reading it must not run code).

**Several configs for a key.** The compiler sees more than the key, so a config may run out of resources at one launch
and not at another: then its replacement was launched too. Both are carried, the chosen one first and replacements in
the order of fallback, so that a launch that fails again meets the same replacement. Where only the replacement was
launched, it alone is carried, and is chosen at once.

Nothing here is process-wide, and choosing is a pure function of its arguments.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn, Protocol

from tuning._manifest_content import Launch, plain
from tuning._manifest_reader import CHOICE_SHAPE, Reader
from tuning.errors import TableError
from tuning.selection import Candidates, Decision, Notice, static_cost
from tuning.spec import (
    RESUMED_PREFIX,
    Choice,
    Json,
    Kernel,
    Key,
    LaunchConfig,
    canonical_json,
    first_detail,
    replaces,
)
from tuning.verification import Communicator

__all__ = ["FORMAT", "SCHEMA_VERSION", "CarriedChoices", "gather_choices"]

FORMAT = "triton-tuning choices"
"""Value of the member ``format``: tells the state from whatever else lies in a checkpoint."""

SCHEMA_VERSION = 1
"""Version of the state that this library writes, and the only one that it reads."""

_SHAPE = {"format": str, "schema_version": int, "triton": str, "choices": [CHOICE_SHAPE]}
_HEADER = struct.Struct(">Q32s")  # length and SHA-256 of a content
_LONGEST_CONTENT = 64 << 20  # about 100,000 choices
_LONGEST_EXCHANGE = 16 << 20


class _Denials(Protocol):
    """What is asked of tables: only what they deny. Their entries have no say in a resumed choice."""

    def denied(self, kernel: str, key: Key) -> Mapping[LaunchConfig, Any]: ...


class _StateReader(Reader):
    """The strict reader of manifests, for the choices alone."""

    def __init__(self) -> None:
        super().__init__(None)

    def _fail(self, where: str, expected: str, found: object, then: str = "") -> NoReturn:
        shown = found if isinstance(found, str) else json.dumps(found)
        shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
        raise TableError(
            f"state of choices: at {where}: expected {expected}, found {shown}{then}",
            where=where,
            expected=expected,
            found=shown,
        )

    def choices(self, state: object) -> tuple[str, tuple[Launch, ...]]:
        """The version of Triton and the choices of a state, in its order."""
        try:
            document = json.loads(canonical_json(state))
        except (TypeError, ValueError, RecursionError) as error:
            self._fail("$", "the JSON data that state_dict returned", str(error).splitlines()[0])
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            found = document.get("format", "an object without it") if isinstance(document, dict) else document
            self._fail("$.format", json.dumps(FORMAT), found, "; give what state_dict returned")
        version = document.get("schema_version")
        if type(version) is int and version != SCHEMA_VERSION:
            then = "; load it with the version of the library that wrote it"
            self._fail("$.schema_version", str(SCHEMA_VERSION), version, then)
        self._check(document, _SHAPE, "$")
        launches = []
        for place, row in enumerate(document["choices"]):
            launch = Launch(
                **{**row, "key": Key.from_json(row["key"]), "config": LaunchConfig.from_json(row["config"])}
            )
            if _row(launch) != row:
                self._fail(f"$.choices[{place}]", "canonical form", "the same facts in another form")
            if row["source"] == "timed":
                self._fail(f"$.choices[{place}].source", "a choice made without a clock", "timed")
            launches.append(launch)
        return document["triton"], tuple(launches)


def _row(launch: Launch) -> Json:
    return {**plain(launch), "key": launch.key.to_json(), "config": launch.config.to_json()}


def _order(launch: Launch, details: Sequence[str]) -> tuple[Any, ...]:
    """Among the choices of one key: what was chosen, then what stood in for it, in the order in which it is tried.

    Where what was chosen never ran, a resumed run begins with a replacement: it comes before those that replaced it.
    """
    replaced = launch.is_fallback and any(replaces(detail, launch.config) for detail in details)
    cost = static_cost(launch.config)
    return (launch.place, launch.is_fallback, not replaced, cost.footprint, cost.warps, launch.config.order)


@dataclass(frozen=True)
class CarriedChoices:
    """The choices of a run, in canonical order: by kernel, arch and key; see the module's docstring for those of one.

    Attributes:
        triton: version of Triton that they were made under; empty where not known.
        launches: the choices.
    """

    triton: str
    launches: tuple[Launch, ...]
    _by_place: dict[tuple[str, str, str], list[int]] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        by_place: dict[tuple[str, str, str], list[int]] = {}
        for index, launch in enumerate(self.launches):
            by_place.setdefault(launch.place, []).append(index)
        object.__setattr__(self, "_by_place", by_place)

    @classmethod
    def of(cls, launches: Iterable[Launch], triton: str) -> CarriedChoices:
        """Bring choices into order; of those with one config for one key, the last given stands.

        That a choice was itself carried over is not kept: a run that was resumed has the state that it was given.
        """
        distinct: dict[tuple[tuple[str, str, str], LaunchConfig], Launch] = {}
        details: dict[tuple[str, str, str], list[str]] = {}
        for each in launches:
            if each.source == "timed":
                continue
            name = (each.place, each.config)
            before = distinct.get(name)
            # A replacement that fails over from a carried one names that; what it stood in for at first stays.
            same = before is not None and before.is_fallback and each.is_fallback
            detail = before.detail if before is not None and same else first_detail(each.detail)
            distinct[name] = replace(each, detail=detail)
        for launch in distinct.values():
            details.setdefault(launch.place, []).append(launch.detail)
        return cls(triton, tuple(sorted(distinct.values(), key=lambda launch: _order(launch, details[launch.place]))))

    @classmethod
    def from_state(cls, state: object) -> CarriedChoices:
        """Inverse of :meth:`to_state`.

        Raises:
            TableError: ``state`` is not what :meth:`to_state` returned; names the place in it.
        """
        triton, launches = _StateReader().choices(state)
        return cls.of(launches, triton)

    @classmethod
    def from_text(cls, text: bytes | str) -> CarriedChoices:
        """As :meth:`from_state`, of the JSON text of a state."""
        try:
            state = json.loads(text)
        except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
            _StateReader()._fail("$", "a JSON document", str(error).splitlines()[0])
        return cls.from_state(state)

    def to_state(self) -> dict[str, Json]:
        """JSON data, equal for equal choices."""
        return {
            "format": FORMAT,
            "schema_version": SCHEMA_VERSION,
            "triton": self.triton,
            "choices": [_row(launch) for launch in self.launches],
        }

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernels, sorted."""
        return tuple(sorted({launch.kernel for launch in self.launches}))

    def conflicts(self, made: CarriedChoices) -> tuple[str, ...]:
        """Keys for which ``made`` begins with another config than these do, one line each."""
        return tuple(
            f"{kernel} [{launch.key}] on {arch}: {launch.config} is launched, {mine.config} is in the state"
            for (kernel, arch, _), [first, *_] in made._by_place.items()
            for launch in [made.launches[first]]
            for mine in [self.launches[index] for index in self._by_place.get(launch.place, ())[:1]]
            if mine.config != launch.config
        )

    # -- choosing --

    def decide(
        self, kernel: Kernel, key: Key, arch: str, candidates: Sequence[Any] | Candidates, tables: _Denials
    ) -> Decision | None:
        """The choice that was carried for a key, or None where there is none.

        Args:
            kernel, key, arch: as for :func:`tuning.selection.decide`.
            candidates: the live configs that the kernel's own pruning has left.
            tables: the tables of the arch.

        Raises:
            TableError: a carried config is no live candidate any more, or the tables have come to deny it, or two
                carried choices of one key could both be meant.
        """
        name = kernel.qualified_name
        indices = self._by_place.get((name, arch, key.text))
        if indices is None:
            return None
        read = candidates if isinstance(candidates, Candidates) else Candidates.of(candidates)
        live = dict(zip(read.ranked, read.live, strict=True))
        denied = tables.denied(name, key)
        chosen = [index for index in indices if not self.launches[index].is_fallback]
        if len(chosen) > 1:  # two autotuners over one kernel: the candidates say which choice was whose
            mine = [index for index in chosen if self.launches[index].config in live]
            if len(mine) > 1:
                self._fail(mine[1], "one choice for this key", f"two ({', '.join(self._text(i) for i in mine)})")
            theirs = set(chosen) - set(mine) if mine else set()
            indices = [
                index
                for index in indices
                if index not in theirs and (index in chosen or self.launches[index].config in live)
            ]
        configs = [self.launches[index].config for index in indices]
        for index, config in zip(indices, configs, strict=True):
            if config not in live:
                self._fail(index, "a config that is a live candidate", f"{config}, which no longer is one")
            if config in denied:
                row = denied[config]
                reason = f"{row.reason} ({row.source}; {row.origin or 'a table'})"
                self._fail(index, "a config that no table denies", f"{config}, which is denied: {reason}")
        first = self.launches[indices[0]]
        rest = [config for config in read.ranked if config not in denied and config not in configs]
        choice = Choice(name, key, live[configs[0]], first.source, first.origin, arch, _resumed(first.detail))
        notices: list[Notice] = []
        if kernel.source_hash is not None and first.source_hash is not None and kernel.source_hash != first.source_hash:
            text = f"{name} on {arch}: the kernel's source has changed since the checkpoint; its choice is used"
            notices.append(Notice("stale_source", text))
        return Decision(choice, tuple(live[config] for config in (*configs, *rest)), tuple(notices))

    def _text(self, index: int) -> str:
        return str(self.launches[index].config)

    def _fail(self, index: int, expected: str, found: str) -> NoReturn:
        launch, where = self.launches[index], f"$.choices[{index}].config"
        raise TableError(
            f"state of choices: at {where}: {launch.kernel} [{launch.key}] on {launch.arch}: expected {expected}, "
            f"found {found}. Resume with the version of the kernel and the tables that the run was started with, or "
            "start without the state",
            where=where,
            expected=expected,
            found=found,
        )

    def require_only_candidate(self, kernel: str, arch: str, config: LaunchConfig) -> None:
        """Refuse a kernel that has one candidate left, and another one than is carried for it.

        Raises:
            TableError: some carried config of this kernel and arch is not ``config``.
        """
        for index, launch in enumerate(self.launches):
            if (launch.kernel, launch.arch) == (kernel, arch) and launch.config != config:
                self._fail(index, "a config that is a live candidate", f"{launch.config}; the only one is {config}")

    @property
    def ambiguous(self) -> tuple[str, ...]:
        """Keys for which more than one config was chosen, not counting replacements; one line each."""
        lines = []
        for (kernel, arch, _), indices in self._by_place.items():
            chosen = [index for index in indices if not self.launches[index].is_fallback]
            if len(chosen) > 1:
                configs = ", ".join(self._text(index) for index in chosen)
                lines.append(f"{kernel} [{self.launches[chosen[0]].key}] on {arch}: {configs}")
        return tuple(lines)

    def arches_of(self, kernel: str, key: Key) -> tuple[str, ...]:
        """The arches for which a choice of this key is carried, sorted."""
        return tuple(sorted({a for name, a, text in self._by_place if name == kernel and text == key.text}))


def _resumed(detail: str) -> str:
    return f"{RESUMED_PREFIX}; {detail}" if detail else RESUMED_PREFIX


def gather_choices(mine: CarriedChoices, communicator: Communicator, timeout: float) -> CarriedChoices:
    """The choices of all ranks of a group together; the same on each rank. All ranks call this at the same place.

    Two collectives: the digest of each rank's choices, then each distinct content once. Nothing is unpickled.

    Args:
        mine: this rank's choices.
        communicator: the group.
        timeout: how long to wait for a rank, in seconds.

    Raises:
        AbsentRankError: a rank did not arrive in time.
        TableError: a rank sent what cannot be read; on all ranks.
    """
    content = canonical_json(mine.to_state()).encode()
    communicator.meet(None, timeout)
    gathered = communicator.gather(_HEADER.pack(len(content), hashlib.sha256(content).digest()), timeout)
    headers: list[tuple[int, bytes]] = list(_HEADER.iter_unpack(gathered))
    distinct = list(dict.fromkeys(headers))
    width = max(length for length, _ in distinct)
    if width > _LONGEST_CONTENT:
        rank = communicator.ranks[next(index for index, (length, _) in enumerate(headers) if length == width)]
        raise TableError(
            f"state of choices: rank {rank} announced {width} bytes, expected at most {_LONGEST_CONTENT}",
            expected=f"at most {_LONGEST_CONTENT} bytes",
            found=f"{width} bytes",
        )
    own = headers[communicator.rank]
    contents = [content] if len(distinct) == 1 else []
    at_once = max(1, _LONGEST_EXCHANGE // max(1, width))
    for start in range(0, len(distinct) if len(distinct) > 1 else 0, at_once):
        part = distinct[start : start + at_once]
        written = {part.index(own): content} if own in part and headers.index(own) == communicator.rank else {}
        every = communicator.exchange(len(part), width, written, timeout)
        contents += [every[slot * width : slot * width + length] for slot, (length, _) in enumerate(part)]
    for (_, digest), each in zip(distinct, contents, strict=True):
        if hashlib.sha256(each).digest() != digest:
            raise TableError(
                "state of choices: a rank sent other choices than it announced; see that all ranks run the same version"
            )
    states = [CarriedChoices.from_text(each) for each in contents]
    return CarriedChoices.of((launch for state in reversed(states) for launch in state.launches), mine.triton)
