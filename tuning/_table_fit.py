"""Whether an entry can ever be used by an autotuner that is at hand."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from tuning._table_rows import Denied, Entry
from tuning.spec import Key, LaunchConfig

__all__ = ["key_of", "misfit"]


def key_of(entry: Entry, arg_names: Sequence[str] = ()) -> Key:
    """The key that an entry stands for; the empty one for a ``*`` entry.

    Args:
        entry: the entry.
        arg_names: names for dtypes that an entry lists without names, where there are as many. Else they are named
            ``?0``, ``?1`` and so on: as a sequence they are what they were, and no row that names a tensor is of them.
    """
    if entry.key is None:
        return Key(())
    if entry.dtypes is not None:
        return Key(entry.key, entry.dtypes)
    dtypes = entry.dtype_sequence or ()
    names = arg_names if len(arg_names) == len(dtypes) else [f"?{at}" for at in range(len(dtypes))]
    return Key(entry.key, tuple(zip(names, dtypes, strict=True)))


def misfit(
    entry: Entry,
    candidates: Collection[LaunchConfig],
    key_names: Collection[str],
    arg_names: Collection[str] | None,
    denied: Callable[[str, Key], Mapping[LaunchConfig, Denied]],
) -> str:
    """Why an entry can never be used, in a few words; empty where it can.

    Args:
        entry: the entry.
        candidates: the autotuner's candidates before pruning.
        key_names: its declared key. A launch may lack some of these names, and has no others.
        arg_names: the kernel's parameters; None where they are not known.
        denied: what the tables deny for a kernel and key, such as :meth:`tuning.tables.Tables.denied`.
    """
    if entry.config not in candidates:
        return "its config is no candidate"
    foreign = {name for name, _ in entry.key or ()} - set(key_names)
    if foreign:
        return f"the kernel's key has no {', '.join(sorted(foreign))}"
    if arg_names is not None:
        absent = {name for name, _ in entry.dtypes or ()} - set(arg_names)
        if absent:
            return f"the kernel has no argument {', '.join(sorted(absent))}"
    if entry.config in denied(entry.kernel, key_of(entry)):
        return "its config is denied"
    return ""
