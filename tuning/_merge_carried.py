"""What a recorded entry keeps of the one that a table has in its place: bit classes, and a note written by hand.

Both say something of a kernel's source, its candidates and what compiles them. Where the recordings are of the same,
they stay; where not, or where it is not known, they go, and it is said: nobody would look for them in a difference of
thousands of lines.
"""

from __future__ import annotations

from collections.abc import Collection
from collections.abc import Set as AbstractSet
from dataclasses import replace

from tuning._merge_contexts import BROKE
from tuning._merge_facts import KeyFacts
from tuning._table_rows import Entry
from tuning.spec import Environment, LaunchConfig

__all__ = ["UNTIMED", "carry_over"]

UNTIMED = "the only candidate that pruning left, not timed"
"""Note of an entry that no timing decided."""


def carry_over(
    entry: Entry, before: Entry, facts: KeyFacts, environments: Collection[Environment]
) -> tuple[Entry, tuple[str, ...]]:
    """The entry, with what holds of the one before it; and what is left out of that, a line each.

    Args:
        entry: made of ``facts``.
        before: the table's.
        facts: what was recorded.
        environments: where kernels of the package were recorded.
    """
    left_out: list[str] = []
    candidates = {item.config for item in facts.candidates}
    tritons = {each.triton for each in environments} - {""}
    if before.classes is not None:
        reason = _classes_fault(entry, before, candidates, tritons)
        if reason:
            left_out.append(f"the bit classes of the table are left out: {reason}; probe again")
        else:
            probe = {name: before.evidence[name] for name in ("probe",) if name in before.evidence}
            entry = replace(entry, classes=before.classes, evidence={**entry.evidence, **probe})
    made = str(entry.evidence.get("note", ""))
    note = _by_hand(before, made)
    if note:
        reason = _note_fault(entry, before, candidates, tritons)
        if reason:
            left_out.append(f"the table's note is left out ({note[:200]}): {reason}")
        else:
            entry = replace(entry, evidence={**entry.evidence, "note": "; ".join(filter(None, (made, note)))})
    return entry, tuple(left_out)


def _by_hand(before: Entry, made: str) -> str:
    """The parts of a note that no merge or freezing writes, and that are not in the new one."""
    note = before.evidence.get("note")
    if not isinstance(note, str) or "frozen_from" in before.evidence:
        return ""
    known = {UNTIMED, *made.split("; ")}
    return "; ".join(part for part in note.split("; ") if part not in known and BROKE not in part)


def _classes_fault(
    entry: Entry, before: Entry, candidates: AbstractSet[LaunchConfig], tritons: AbstractSet[str]
) -> str:
    members = {config for group in before.classes or () for config in group}
    if entry.source_hash is None or entry.source_hash != before.source_hash:
        return f"they are of the kernel's source {before.source_hash}, this is {entry.source_hash}"
    probe = before.evidence.get("probe")
    compiler = str(probe.get("compiler", "")) if isinstance(probe, dict) else ""
    version = compiler.partition(",")[0].removeprefix("triton ") or before.triton
    if tritons and version and tritons != {version}:
        return f"they are of Triton {version}, this is {', '.join(sorted(tritons))}"
    if not members.issuperset((entry.config,)) or not members.issubset(candidates):
        return "the candidates are others than those that were probed"
    return ""


def _note_fault(entry: Entry, before: Entry, candidates: AbstractSet[LaunchConfig], tritons: AbstractSet[str]) -> str:
    if before.source_hash is not None and before.source_hash != entry.source_hash:
        return f"it is of the kernel's source {before.source_hash}, this is {entry.source_hash}"
    if before.triton and tritons and not tritons <= set(before.triton.split(", ")):
        return f"it is of Triton {before.triton}, this is {', '.join(sorted(tritons))}"
    count = before.evidence.get("candidates")
    if type(count) is int and count != len(candidates):
        return f"it is of {count} candidates, these are {len(candidates)}"
    return ""
