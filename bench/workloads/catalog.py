"""What a workload is: a constructor or function, its arguments by shape, dtype and distribution, backward or not.

The lists are in :mod:`bench.workloads.mamba`, :mod:`bench.workloads.fla`, :mod:`bench.workloads.megatron` and
:mod:`bench.workloads.transformer_engine`: plain data, so that what a table was made from can be read off.
"""

from __future__ import annotations

import fnmatch
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["PACKAGES", "Tensor", "Workload", "find", "workloads"]

PACKAGES = ("mamba", "fla", "megatron", "transformer_engine")
"""The modules that hold lists, in the order in which they are recorded."""


@dataclass(frozen=True)
class Tensor:
    """A tensor argument.

    Attributes:
        sizes: its shape.
        dtype: name of its dtype in torch.
        fill: how it is filled, a name in :data:`bench.workloads.steps.FILLS`.
        scale: what the values are multiplied with; for ``tokens`` and ``bool`` see there.
        grad: whether a gradient is asked for, in workloads with a backward.
    """

    sizes: tuple[int, ...]
    dtype: str = "bfloat16"
    fill: str = "normal"
    scale: float = 1.0
    grad: bool = True


@dataclass(frozen=True)
class Workload:
    """One step of one operation at one shape.

    Attributes:
        name: package, operation and shape: ``fla.chunk_gla/h16k128v128``.
        call: ``module:name`` of a function; of a class where ``construct`` is given.
        arguments: by name; names that start with ``*`` are passed by position, in this order. A :class:`Tensor`
            stands for a tensor, a tuple or list for one of whatever it holds, anything else for itself.
        construct: keyword arguments of the constructor; None: ``call`` is a function.
        backward: whether gradients of all outputs that have any are computed, too.
        scope: the package whose autotuners it records.
        rank: workloads of rank 0 are recorded first, then those of rank 1 and so on: breadth before depth.
    """

    name: str
    call: str
    arguments: Mapping[str, Any]
    construct: Mapping[str, Any] | None = None
    backward: bool = True
    scope: Sequence[str] = field(default=())
    rank: int = 0

    @property
    def package(self) -> str:
        """The first part of its name."""
        return self.name.partition(".")[0]


def workloads(modules: Sequence[str] = ()) -> tuple[Workload, ...]:
    """All of them, in the order in which they are recorded.

    Args:
        modules: whose ``WORKLOADS`` to take instead of those here.
    """
    found: list[Workload] = []
    for module in modules or [f"bench.workloads.{package}" for package in PACKAGES]:
        found += importlib.import_module(module).WORKLOADS
    return tuple(sorted(found, key=lambda item: item.rank))


def find(patterns: Sequence[str] = (), modules: Sequence[str] = ()) -> tuple[Workload, ...]:
    """The workloads whose names match any of some patterns (a name, a part up to ``/`` or ``.``, or a glob); or all.

    Args:
        patterns: what to look for; none: everything.
        modules: as for :func:`workloads`.

    Raises:
        ValueError: a pattern matches none.
    """
    everything = workloads(modules)
    if not patterns:
        return everything
    chosen: set[str] = set()
    for pattern in patterns:
        matching = {
            item.name
            for item in everything
            if fnmatch.fnmatchcase(item.name, pattern) or item.name.startswith((f"{pattern}/", f"{pattern}."))
        }
        if not matching:
            raise ValueError(f"{pattern}: no workload has this name; python -m bench record --list shows them")
        chosen |= matching
    return tuple(item for item in everything if item.name in chosen)
