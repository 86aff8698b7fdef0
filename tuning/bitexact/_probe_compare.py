"""Two probes side by side, such as those of two devices: which classes are the same, and whether their bits are.

Classes are compared between candidates that both probes could launch. Bits can be compared only on inputs that were the
same, which their digests tell: random inputs are, wherever the captured tensors have the same magnitudes and signs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from tuning.bitexact._probe_classes import KeyProbe, partition
from tuning.spec import Json, Key, LaunchConfig

__all__ = ["Pair", "compare_probes"]


@dataclass(frozen=True)
class Pair:
    """One kernel, key and form that two probes have.

    Attributes:
        kernel, key, form: what.
        note: why it was not compared; empty where it was.
        same_classes: whether the candidates that both could launch fall into the same classes.
        inputs: number of inputs that were the same bit for bit.
        agreeing, differing: candidates whose outputs were the same bytes on all of these, and on not all.
    """

    kernel: str
    key: Key
    form: str
    note: str = ""
    same_classes: bool = False
    inputs: int = 0
    agreeing: tuple[LaunchConfig, ...] = ()
    differing: tuple[LaunchConfig, ...] = ()

    @property
    def agrees(self) -> bool:
        """Whether nothing that was compared differs."""
        return not self.note and self.same_classes and not self.differing

    def __str__(self) -> str:
        if self.note:
            return self.note
        classes = "same classes" if self.same_classes else "other classes"
        if not self.inputs:
            return f"{classes}; no input was the same, so bits were not compared"
        count = len(self.agreeing) + len(self.differing)
        return f"{classes}; same bits for {len(self.agreeing)} of {count} candidates on {self.inputs} inputs"

    def to_json(self) -> Json:
        """JSON form."""
        return {
            "kernel": self.kernel,
            "key": self.key.to_json(),
            "form": self.form,
            "note": self.note,
            "same_classes": self.same_classes,
            "inputs": self.inputs,
            "agreeing": [config.to_json() for config in self.agreeing],
            "differing": [config.to_json() for config in self.differing],
            "agrees": self.agrees,
        }


def compare_probes(left: Iterable[KeyProbe], right: Iterable[KeyProbe]) -> tuple[Pair, ...]:
    """Compare what two probes found for each kernel, key and form that both have, in the order of the first."""
    theirs = {(each.kernel, each.key.text, each.form): each for each in right}
    pairs = []
    for mine in left:
        other = theirs.get((mine.kernel, mine.key.text, mine.form))
        if other is not None:
            pairs.append(_pair(mine, other))
    return tuple(pairs)


def _pair(left: KeyProbe, right: KeyProbe) -> Pair:
    place = (left.kernel, left.key, left.form)
    if not left.claims or not right.claims:
        return Pair(*place, note="no claim on one side")
    if left.source_hash != right.source_hash:
        return Pair(*place, note="the kernel's source differs")
    mine, other = ({each.config: each.group for each in probe.candidates} for probe in (left, right))
    both = [config for config, group in mine.items() if group is not None and other.get(config) is not None]
    if not both:
        return Pair(*place, note="no candidate could be launched on both sides")
    same = partition([mine[config] for config in both]) == partition([other[config] for config in both])
    known = {each.name: each for each in right.inputs if each.counted and each.digest}
    shared = [
        (each, known[each.name])
        for each in left.inputs
        if each.counted and each.name in known and known[each.name].digest == each.digest
    ]
    agreeing: list[LaunchConfig] = []
    differing: list[LaunchConfig] = []
    for config in both if shared else ():
        here, there = mine[config] or 0, other[config] or 0
        equal = all(ours.outputs[here] == yours.outputs[there] for ours, yours in shared)
        (agreeing if equal else differing).append(config)
    return Pair(*place, "", same, len(shared), tuple(agreeing), tuple(differing))
