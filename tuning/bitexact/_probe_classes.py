"""Bit classes as data: which candidates gave equal results, what tells the classes apart, and where probes contradict.

Pure: nothing here launches or reads anything. A *class* is a set of candidates between which no difference was observed
on the inputs tried; that is never a proof, so every count of inputs travels with it.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, get_args

from tuning.errors import TableError
from tuning.spec import Json, Key, LaunchConfig

__all__ = [
    "CandidateProbe",
    "Distance",
    "InputProbe",
    "JudgedBy",
    "KeyProbe",
    "comparable",
    "config_fields",
    "contradictions",
    "deciding_fields",
    "partition",
    "refined",
]

JudgedBy = Literal["kernel", "caller", "nothing"]
"""Whose outputs were compared: the kernel's, its caller's, or nobody's, so that nothing is claimed."""


@dataclass(frozen=True)
class CandidateProbe:
    """What became of one candidate.

    Attributes:
        config: the candidate.
        group: number of its class; None where it is in none.
        racy: whether it differed from itself when it was run again: then it is in no class.
        failure: why it could not be launched, in one line; empty where it could.
    """

    config: LaunchConfig
    group: int | None
    racy: bool = False
    failure: str = ""

    def to_json(self) -> Json:
        """JSON form."""
        return {"config": self.config.to_json(), "class": self.group, "racy": self.racy, "failure": self.failure}


@dataclass(frozen=True)
class InputProbe:
    """One input that the candidates were run on.

    Attributes:
        name: ``captured``, ``random 0``, ``magnitudes 0`` and so on.
        digest: of the tensors that are read: equal where the inputs are equal bit for bit, on any device; empty where
            it is not known.
        counted: whether it says anything: candidates differed, or agreed in some finite value that is not 0.
        outputs: digest of the outputs of each class, in order of number; empty where it is not counted.
    """

    name: str
    digest: str
    counted: bool
    outputs: tuple[str, ...] = ()

    def to_json(self) -> Json:
        """JSON form."""
        return {"name": self.name, "digest": self.digest, "counted": self.counted, "outputs": list(self.outputs)}


@dataclass(frozen=True)
class Distance:
    """How far two classes are apart, at the worst element of all inputs.

    Attributes:
        groups: numbers of the two, the smaller first.
        ulps: units in the last place of the dtype; None where they cannot be told (NaN against a number, integers).
        where: input and tensor.
    """

    groups: tuple[int, int]
    ulps: float | None
    where: str

    def to_json(self) -> Json:
        """JSON form."""
        return {"classes": list(self.groups), "ulps": self.ulps, "where": self.where}


@dataclass(frozen=True)
class KeyProbe:
    """What a probe found for one kernel, key and form of launch.

    Attributes:
        kernel: qualified name.
        source_hash: of its source; None where it is not at hand.
        key: the key.
        form: name of the launch's form: sizes, strides, alignments and values beyond the key.
        arch, compiler: what the candidates were compiled for and by.
        judged_by: whose outputs were compared.
        reason: why the caller's count and not the kernel's, or why nothing is claimed; else empty.
        candidates: the live candidates, in canonical order.
        inputs: the inputs tried.
        repeats: how often each candidate was run on the first input.
        distances: between classes, all pairs, where there are several.
        written: tensor arguments that the kernel writes; of them, `in_place` are read too.
        in_place: see above.
        atomics: whether the kernel's source names an atomic operation.
    """

    kernel: str
    source_hash: str | None
    key: Key
    form: str
    arch: str
    compiler: str
    judged_by: JudgedBy
    reason: str
    candidates: tuple[CandidateProbe, ...]
    inputs: tuple[InputProbe, ...] = ()
    repeats: int = 1
    distances: tuple[Distance, ...] = ()
    written: tuple[str, ...] = ()
    in_place: tuple[str, ...] = ()
    atomics: bool = False

    @property
    def tried(self) -> int:
        """Number of inputs on which the classes were compared: what is the same input twice counts once."""
        # Of a step's inputs no digest is known: what gave the same outputs may have been the same input.
        return len({each.digest or each.outputs for each in self.inputs if each.counted})

    @property
    def claims(self) -> bool:
        """Whether anything is claimed at all; that a candidate is racy is a claim."""
        return self.judged_by != "nothing" and (self.tried > 0 or bool(self.racy))

    @property
    def classes(self) -> tuple[tuple[LaunchConfig, ...], ...]:
        """The classes by number; racy candidates and such that cannot be launched are in none."""
        groups: dict[int, list[LaunchConfig]] = {}
        for each in self.candidates:
            if each.group is not None:
                groups.setdefault(each.group, []).append(each.config)
        return tuple(tuple(groups[number]) for number in sorted(groups))

    @property
    def racy(self) -> tuple[LaunchConfig, ...]:
        """Candidates that differ from themselves."""
        return tuple(each.config for each in self.candidates if each.racy)

    @property
    def single(self) -> bool:
        """Whether no difference was observed between any two candidates that can be launched."""
        return self.claims and not self.racy and len(self.classes) == 1

    @property
    def place(self) -> tuple[str, str, str, str]:
        """Arch, kernel, key and form."""
        return (self.arch, self.kernel, self.key.text, self.form)

    @property
    def verdict(self) -> str:
        """One line in words."""
        if not self.claims:
            return f"no claim: {self.reason or 'no input could tell candidates apart'}"
        if not self.classes:
            return f"all {len(self.racy)} launchable candidates are racy: each differs from itself"
        tried = f"on {self.tried} input{'s' * (self.tried != 1)}"
        racy = f", {len(self.racy)} racy" if self.racy else ""
        if self.single:
            return f"no difference observed {tried}"
        sizes = ", ".join(str(len(group)) for group in self.classes)
        return f"{len(self.classes)} classes ({sizes}){racy} {tried}"

    def to_json(self) -> Json:
        """JSON form, for :meth:`from_json`."""
        deciding = deciding_fields(self.classes)
        return {
            "kernel": self.kernel,
            "source_hash": self.source_hash,
            "key": self.key.to_json(),
            "form": self.form,
            "arch": self.arch,
            "compiler": self.compiler,
            "judged_by": self.judged_by,
            "reason": self.reason,
            "candidates": [each.to_json() for each in self.candidates],
            "inputs": [each.to_json() for each in self.inputs],
            "repeats": self.repeats,
            "distances": [each.to_json() for each in self.distances],
            "written": list(self.written),
            "in_place": list(self.in_place),
            "atomics": self.atomics,
            "fields": {"separate": list(deciding.separate), "free": list(deciding.free), "by": list(deciding.by)},
        }

    @classmethod
    def from_json(cls, data: Json, where: str = "$", file: str | None = None) -> KeyProbe:
        """Inverse of :meth:`to_json`.

        Raises:
            TableError: ``data`` is something else; it says where.
        """
        try:
            found = cls(
                data["kernel"],
                data["source_hash"],
                Key.from_json(data["key"]),
                data["form"],
                data["arch"],
                data["compiler"],
                data["judged_by"],
                data["reason"],
                tuple(
                    CandidateProbe(LaunchConfig.from_json(row["config"]), row["class"], row["racy"], row["failure"])
                    for row in data["candidates"]
                ),
                tuple(
                    InputProbe(row["name"], row["digest"], row["counted"], tuple(row["outputs"]))
                    for row in data["inputs"]
                ),
                data["repeats"],
                tuple(Distance(tuple(row["classes"]), row["ulps"], row["where"]) for row in data["distances"]),
                tuple(data["written"]),
                tuple(data["in_place"]),
                data["atomics"],
            )
            if _is_sound(found) and json.loads(json.dumps(found.to_json(), allow_nan=False)) == data:
                return found
            shown = "a row that does not read back the same"
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, RecursionError) as error:
            shown = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        expected = "one key of a probe, as `probe --out` writes it"
        raise TableError(
            f"{file or 'probe'}: {where}: expected {expected}, found {shown}; probe again with this version",
            file=file,
            where=where,
            expected=expected,
            found=shown,
        )


def _is_sound(found: KeyProbe) -> bool:
    """Whether every value is of its type, and the numbers of classes are those of the candidates."""
    texts = [found.kernel, found.form, found.arch, found.compiler, found.reason, *found.written, *found.in_place]
    texts += [each.failure for each in found.candidates] + [each.where for each in found.distances]
    texts += [text for each in found.inputs for text in (each.name, each.digest, *each.outputs)]
    flags = [found.atomics, *(each.racy for each in found.candidates), *(each.counted for each in found.inputs)]
    groups = sorted({each.group for each in found.candidates if each.group is not None})
    numbers = [found.repeats, *(number for each in found.distances for number in each.groups)]
    numbers += [each.group for each in found.candidates if each.group is not None]
    return (
        all(type(text) is str for text in texts)
        and all(type(flag) is bool for flag in flags)
        and all(type(number) is int and number >= 0 for number in numbers)
        and type(found.source_hash) in (str, type(None))
        and found.judged_by in get_args(JudgedBy)
        and groups == list(range(len(groups)))
        and all(len(each.groups) == 2 and max(each.groups) < len(groups) for each in found.distances)
        and all(each.ulps is None or (type(each.ulps) in (int, float) and each.ulps >= 0) for each in found.distances)
        and all(len(each.outputs) == (len(groups) if each.counted else 0) for each in found.inputs)
    )


def partition(signatures: Sequence[Hashable | None]) -> tuple[int | None, ...]:
    """Numbers of the classes of equal signatures, in order of first appearance; None stays in none."""
    numbers: dict[Hashable, int] = {}
    return tuple(None if sign is None else numbers.setdefault(sign, len(numbers)) for sign in signatures)


def refined(probes: Iterable[KeyProbe]) -> tuple[tuple[LaunchConfig, ...], ...]:
    """The classes that hold in every one of several probes: two configs stay together only where all of them say so.

    A config that some probe could not launch, or found racy, is in none.
    """
    signs: list[dict[LaunchConfig, int | None]] = [
        {each.config: each.group for each in probe.candidates} for probe in probes
    ]
    if not signs:
        return ()
    configs = [config for config in signs[0] if all(sign.get(config) is not None for sign in signs)]
    numbers = partition([tuple(sign[config] for sign in signs) for config in configs])
    groups: dict[int | None, list[LaunchConfig]] = {}
    for config, number in zip(configs, numbers, strict=True):
        groups.setdefault(number, []).append(config)
    return tuple(map(tuple, groups.values()))


def config_fields(config: LaunchConfig) -> dict[str, str]:
    """A config's fields by name: parameters, launch fields, further ones."""
    core = ("num_warps", "num_stages", "num_ctas", "maxnreg", "ir_override")
    return {**dict(config.kwargs), **{name: repr(getattr(config, name)) for name in core}, **dict(config.extra)}


@dataclass(frozen=True)
class _Fields:
    """Which fields of configs have to do with the classes.

    Attributes:
        separate: two candidates that differ in this field alone are in different classes.
        free: candidates that differ in this field alone exist, and are always in one class.
        by: the fewest fields whose values fix the class of every candidate.
    """

    separate: tuple[str, ...]
    free: tuple[str, ...]
    by: tuple[str, ...]


def deciding_fields(classes: Sequence[Sequence[LaunchConfig]]) -> _Fields:
    """Which fields separate the classes; all empty fields of the result where nothing can be told."""
    rows = [(config_fields(config), number) for number, group in enumerate(classes) for config in group]
    names = sorted({name for fields, _ in rows for name in fields})
    varying = [name for name in names if len({fields.get(name) for fields, _ in rows}) > 1]
    separate: set[str] = set()
    free: set[str] = set()
    for (left, mine), (right, theirs) in combinations(rows, 2):
        differ = [name for name in varying if left.get(name) != right.get(name)]
        if len(differ) == 1:
            (separate if mine != theirs else free).add(differ[0])
    return _Fields(tuple(sorted(separate)), tuple(sorted(free - separate)), _fewest(rows, varying))


def _fewest(rows: Sequence[tuple[Mapping[str, str], int]], names: Sequence[str]) -> tuple[str, ...]:
    for count in range(min(len(names), 6) + 1):
        for chosen in combinations(names, count):
            seen: dict[tuple[str | None, ...], int] = {}
            if all(seen.setdefault(tuple(map(fields.get, chosen)), number) == number for fields, number in rows):
                return chosen
    return tuple(names)


def comparable(before: Iterable[KeyProbe], now: Iterable[KeyProbe]) -> int:
    """How many of the later probes can be held against an earlier one: see :func:`contradictions`."""
    known = {(*each.place, each.source_hash, each.compiler) for each in before if each.claims}
    return sum(each.claims and (*each.place, each.source_hash, each.compiler) in known for each in now)


def contradictions(before: Iterable[KeyProbe], now: Iterable[KeyProbe]) -> tuple[str, ...]:
    """Pairs of candidates that an earlier probe has in one class and a later one in different ones, a line each.

    Only what is bound to the same arch, kernel source, compiler, key and form is compared.
    """
    known = {(*each.place, each.source_hash, each.compiler): each for each in before if each.claims}
    lines = []
    for later in now:
        earlier = known.get((*later.place, later.source_hash, later.compiler))
        if earlier is None or not later.claims:
            continue
        found = {each.config: each for each in later.candidates}
        for group in earlier.classes:
            racy = [config for config in group if config in found and found[config].racy]
            numbers = {found[config].group for config in group if config in found and not found[config].failure}
            if len(numbers) > 1 or racy:
                what = f"{racy[0]} differs from itself" if racy else f"they fall into {len(numbers)} classes"
                configs = "; ".join(map(str, group))
                lines.append(
                    f"{later.kernel} [{later.key}] form {later.form}: no difference had been observed between "
                    f"{configs} on {earlier.tried} inputs; now {what}"
                )
    return tuple(lines)
