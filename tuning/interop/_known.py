"""What is known of kernels besides the files at hand: qualified names, names of key arguments, the order of calls.

Other systems keep less than our tables do: a bare name instead of a qualified one, key values without their names,
dtypes without their arguments and in the order of the call. What is missing is looked up here, in whatever is given:
an inventory, tables, journals, manifests, or a mapping from bare names. Nothing is guessed: what these do not say, or
say in two ways, stays unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from tuning._table_rows import Pairs
from tuning.errors import TuningError
from tuning.interop._configs import NAME
from tuning.interop._documents import Node
from tuning.interop._result import Losses
from tuning.journal import Journal, Scan
from tuning.manifest import Manifest
from tuning.spec import Kernel, Key
from tuning.tables import Entry, TableFile

__all__ = ["KERNEL", "AutotunerLike", "KnownKernels", "known_kernels"]

KERNEL = re.compile(r"[^\W\d]\w*(\.[^\s.]+)+")
"""A qualified name."""


@runtime_checkable
class AutotunerLike(Protocol):
    """What is read of an installed autotuner, such as :class:`tuning.inventory.AutotunerInfo`."""

    @property
    def kernel(self) -> str:
        """Qualified name."""

    @property
    def key_names(self) -> tuple[str, ...]:
        """Its declared key."""

    @property
    def hooks(self) -> tuple[str, ...]:
        """``config.pre_hook`` and others."""

    @property
    def class_name(self) -> str:
        """Qualified name of its class."""


class KnownKernels:
    """See the module's docstring; made by :func:`known_kernels`."""

    def __init__(self) -> None:
        self._chosen: dict[str, dict[str, None]] = {}
        self._names: dict[str, set[str]] = {}
        self._key_names: dict[str, set[tuple[str, ...]]] = {}
        self._keys: dict[tuple[str, str], set[tuple[Pairs, tuple[str, ...]]]] = {}
        self._orders: dict[tuple[str, frozenset[str]], set[tuple[str, ...]]] = {}
        self._signatures: dict[tuple[str, frozenset[str]], tuple[str, ...]] = {}
        self.hooks: dict[str, tuple[str, ...]] = {}
        """Hooks of the kernels of which they are known."""
        self.classes: dict[str, str] = {}
        """Qualified names of the classes of autotuners, of the kernels of which they are known."""

    # -- taking in --

    def add(self, source: object) -> None:
        """Take in one source, or each of several.

        Raises:
            TuningError: it is none of those that :func:`known_kernels` names.
        """
        if source is None:
            return
        if isinstance(source, KnownKernels):
            self._join(source)
        elif isinstance(source, TableFile):
            for entry in source.entries:
                self._add_entry(entry)
        elif isinstance(source, (Journal, Scan)):
            for measurement in source.measurements:
                self._add_key(measurement.identity.kernel.qualified_name, measurement.identity.key)
        elif isinstance(source, Manifest):
            for launch in source.choices:
                self._add_key(launch.kernel, launch.key)
            for use in source.autotuners:
                self._add_name(use.kernel, use.key_names)
        elif isinstance(source, Mapping):
            for bare, names in source.items():
                self._choose(bare, [names] if isinstance(names, str) else names)
        elif isinstance(source, AutotunerLike):
            self._add_name(source.kernel, source.key_names)
            self.hooks[source.kernel] = tuple(source.hooks)
            self.classes[source.kernel] = source.class_name
        elif isinstance(source, Iterable) and not isinstance(source, (str, bytes)):
            for item in source:
                self.add(item)
        else:
            raise TuningError(
                f"names: expected a mapping from bare to qualified names, autotuners, tables, journals or manifests, "
                f"found {type(source).__name__}"
            )

    def _choose(self, bare: object, names: Iterable[object]) -> None:
        for name in names:
            if not isinstance(bare, str) or not isinstance(name, str) or not KERNEL.fullmatch(name):
                raise TuningError(
                    f"names: expected a bare name with qualified names such as package.module.function, "
                    f"found {bare!r}: {name!r}"
                )
            self._chosen.setdefault(bare, {})[name] = None

    def _add_name(self, kernel: str, key_names: Sequence[str] | None) -> None:
        self._names.setdefault(Kernel(kernel).bare_name, set()).add(kernel)
        if key_names is not None:
            self._key_names.setdefault(kernel, set()).add(tuple(key_names))

    def _add_entry(self, entry: Entry) -> None:
        self._add_name(entry.kernel, None if entry.key is None else [name for name, _ in entry.key])
        if entry.key is not None and entry.dtypes is not None:
            place = (entry.kernel, Key(entry.key).values_text)
            self._keys.setdefault(place, set()).add((entry.dtypes, ()))

    def _add_key(self, kernel: str, key: Key) -> None:
        self._add_name(kernel, [name for name, _ in key.values])
        names = tuple(name for name, _ in key.dtypes)
        if not _are_names(names):  # a journal may hold any text
            return
        self._keys.setdefault((kernel, key.values_text), set()).add((key.dtypes, key.call_order))
        if set(key.call_order) == set(names):
            self._signatures[kernel, frozenset(names)] = names
            self._orders.setdefault((kernel, frozenset(names)), set()).add(key.call_order)

    def _join(self, other: KnownKernels) -> None:
        for bare, chosen in other._chosen.items():
            self._chosen.setdefault(bare, {}).update(chosen)
        for bare, found in other._names.items():
            self._names.setdefault(bare, set()).update(found)
        for kernel, names in other._key_names.items():
            self._key_names.setdefault(kernel, set()).update(names)
        for place, keys in other._keys.items():
            self._keys.setdefault(place, set()).update(keys)
        for tensors, orders in other._orders.items():
            self._orders.setdefault(tensors, set()).update(orders)
        self._signatures.update(other._signatures)
        self.hooks.update(other.hooks)
        self.classes.update(other.classes)

    # -- asking --

    def qualified(self, bare: str) -> tuple[str, ...]:
        """The qualified names that a bare one may stand for, sorted; those of a mapping before all others."""
        chosen = self._chosen.get(bare)
        return tuple(sorted(chosen if chosen else self._names.get(bare, set())))

    def resolve(self, name: str, node: Node, losses: Losses) -> str | None:
        """The qualified name that a file means; None, with the loss noted, where it is not known or that of several.

        Args:
            name: as in the file, qualified or bare.
            node: the place of the name.

        Raises:
            TableError: it is no name.
        """
        if "." in name:
            if not KERNEL.fullmatch(name):
                node.fail("the name of a kernel", f"the name {name[:80]!r}")
            return name
        found = self.qualified(name)
        if len(found) > 1:
            losses.add(
                "shared_name",
                node.place,
                f"{len(found)} kernels are named {name[:80]!r}, so nothing of it is taken over: say which is meant, "
                f"with a mapping (--kernel BARE=QUALIFIED) from the bare name to one of {', '.join(found)}",
            )
            return None
        if not found:
            losses.add(
                "unknown_kernel",
                node.place,
                f"no kernel named {name[:80]!r} is known, so nothing of it is taken over: give the package that has it,"
                " or a mapping from the bare name to the qualified one",
            )
            return None
        return found[0]

    def key_names(self, kernel: str, values: int) -> tuple[str, ...] | None:
        """Names of a key of so many values; None where they are not known for sure."""
        known = self._key_names.get(kernel, ())
        fitting = {names for names in known if len(names) == values == len(set(names)) and _are_names(names)}
        return next(iter(fitting)) if len(fitting) == 1 else None

    def name_dtypes(self, kernel: str, values: Pairs, sequence: tuple[str, ...]) -> Key | None:
        """The key with these values whose tensors, in the order of the call, have these dtypes; None: not known.

        Either this very key is known (from a table: with the tensors in the order of the signature), or all known calls
        of the kernel with so many tensors pass the same ones in the same order.
        """
        keys = [Key(values, dtypes, order) for dtypes, order in self._keys.get((kernel, Key(values).values_text), ())]
        fitting = [key for key in keys if key.call_dtype_sequence == sequence]
        if len({key.text for key in fitting}) == 1:
            return max(fitting, key=lambda key: (key.call_order, key.dtypes))
        if fitting:
            return None
        orders = {
            (order, self._signatures[kernel, names])
            for (owner, names), found in self._orders.items()
            if owner == kernel and len(names) == len(sequence)
            for order in found
        }
        if len(orders) != 1:
            return None
        order, signature = next(iter(orders))
        by_name = dict(zip(order, sequence, strict=True))
        return Key(values, tuple((name, by_name[name]) for name in signature), order)

    def call_sequences(self, entry: Entry) -> tuple[tuple[str, ...], ...] | None:
        """The dtypes of an entry in the order of each known call of its kernel; None where no call is known.

        The order does not matter where all dtypes are the same, and a sequence is in the order of a call already.
        """
        if entry.dtypes is None:
            return (entry.dtype_sequence or (),)
        by_name = dict(entry.dtypes)
        sequence = tuple(by_name.values())
        if len(set(sequence)) <= 1:
            return (sequence,)
        orders = self._orders.get((entry.kernel, frozenset(by_name)))
        if not orders:
            return None
        return tuple(sorted({tuple(by_name[name] for name in order) for order in orders}))


def _are_names(names: Iterable[str]) -> bool:
    return all(map(NAME.fullmatch, names))


def known_kernels(*sources: object) -> KnownKernels:
    """Gather what is known of kernels.

    Args:
        sources: any of: autotuners of an inventory, tables, journals, manifests, mappings from a bare name to a
            qualified one (or several), and iterables of these. None is nothing. A mapping decides where several
            kernels have one bare name.

    Raises:
        TuningError: something else.
    """
    known = KnownKernels()
    for source in sources:
        known.add(source)
    return known
