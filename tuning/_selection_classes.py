"""Within which candidates a choice may vary: those of the chosen config's bit class, where a table has evidence of it.

Evidence stands in an exact entry for the key: its ``classes``, and in its evidence the member ``probe``, which says
what they rest on: the compiler, the forms of the launches that were probed, and the number of inputs. It holds for the
same kernel source, arch (a table is of one), compiler, key and form. Anything that differs or is not known is no
evidence, and without evidence the choice stands.

Classes lie beside the choice and not in its place: which config is chosen never depends on them, so ranks with and
without evidence still compute the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tuning.spec import Choice, Json, Kernel, Key, LaunchConfig

__all__ = ["Freedom", "freedom"]


class _EntryLike(Protocol):
    @property
    def classes(self) -> tuple[tuple[LaunchConfig, ...], ...] | None: ...
    @property
    def evidence(self) -> Mapping[str, Json]: ...
    @property
    def source_hash(self) -> str | None: ...
    @property
    def origin(self) -> str | None: ...


class _TablesLike(Protocol):
    def exact(self, kernel: str, key: Key) -> _EntryLike | None: ...


class _DecisionLike(Protocol):
    @property
    def choice(self) -> Choice: ...
    @property
    def order(self) -> Sequence[Any]: ...


@dataclass(frozen=True)
class Freedom:
    """Candidates between which, and the chosen one, no difference was observed.

    Attributes:
        configs: the live ones, the chosen one first, then in the order of fallback.
        members: the whole class, in canonical order; some may not be live here.
        forms: names of the forms of launch that this was observed at.
        inputs: on how many inputs.
        origin: path of the table.
    """

    configs: tuple[Any, ...]
    members: tuple[LaunchConfig, ...]
    forms: frozenset[str]
    inputs: int
    origin: str | None


def freedom(
    kernel: Kernel, key: Key, decision: _DecisionLike, tables: _TablesLike, compiler: str
) -> tuple[Freedom | None, str]:
    """The freedom of a decision, or None where it has none; and why classes that the table has do not count, if so.

    Args:
        kernel: the kernel, with the hash of its source.
        key: the key.
        decision: what was decided: its choice, and the live candidates in order.
        tables: of the running arch.
        compiler: what compiles here.
    """
    entry = tables.exact(kernel.qualified_name, key)
    if entry is None or entry.classes is None:
        return None, ""
    place = f"the bit classes in {entry.origin or 'a table'} do not count"
    rests_on = entry.evidence.get("probe")
    if not isinstance(rests_on, dict):
        return None, f"{place}: its evidence does not say what they rest on"
    if kernel.source_hash is None or kernel.source_hash != entry.source_hash:
        return None, f"{place}: they are of kernel source {entry.source_hash}, this is {kernel.source_hash}"
    if not compiler or rests_on.get("compiler") != compiler:
        return None, f"{place}: they are of {rests_on.get('compiler')}, this is {compiler}"
    if rests_on.get("judged_by", "kernel") != "kernel":
        return None, f"{place}: its caller's outputs were compared, and they cannot be tried again at a launch"
    forms, inputs = rests_on.get("forms"), rests_on.get("inputs")
    if not isinstance(forms, list) or type(inputs) is not int or inputs < 1:
        return None, f"{place}: its evidence names no forms of launch or no inputs"
    pin = decision.choice.launch_config
    members = next((group for group in entry.classes if pin in group), ())
    live = tuple(config for config in decision.order if LaunchConfig.of(config) in members)
    if len(live) < 2:
        return None, ""  # nothing to vary
    order = sorted(members, key=lambda config: config.order)
    return Freedom(live, tuple(order), frozenset(map(str, forms)), inputs, entry.origin), ""
