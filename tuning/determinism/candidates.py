"""Keep the candidates of kernels whole, although their package would reduce them.

mamba_ssm (from 2.3) and megatron-core (``megatron.core.ssm.ops``, from 0.19) pass the candidates of each kernel
through ``autotune_configs`` while the kernel's module is imported. That function keeps one, the one with the smallest
tile, if ``MAMBA_DETERMINISTIC`` or torch's flag is on at that moment and ``TRITON_CACHE_AUTOTUNING=1`` is not. The
choice is reproducible, but about 1.6 times slower than the best one, and a table can no longer restore the fast one:
the candidate is gone. With a pinned policy the reduction serves no purpose, since pinning makes the choice
reproducible by itself.

So while the guard stands, that function gives back what it gets; nothing else of those packages changes, and their
deterministic reductions still follow torch's flag. Three orders of import:

- the deciding module is not imported yet: it is changed right after its own code has run, before any kernel module
  can call it;
- it is imported, kernel modules are not: it is changed at once;
- kernel modules are imported too: if they were reduced, it is too late, and a warning names them and the remedy.

Apply the guard only together with pinning. Whole candidates without a pin are timed, which is worse than reduced ones.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from tuning.determinism.importing import ImportWatch
from tuning.determinism.patching import MISSING, Patches, own_attributes

__all__ = ["REDUCERS", "CandidateGuard", "Reducer", "reduced_kernels"]

logger = logging.getLogger("tuning.determinism")


@dataclass(frozen=True)
class Reducer:
    """A function that reduces candidates at import.

    Attributes:
        module: where it is defined.
        function: its name; it takes the list of candidates and returns the list to use.
        flag: a global of that module that is True once it has reduced a list.
    """

    module: str
    function: str = "autotune_configs"
    flag: str = "_autotune_warning_issued"

    @property
    def package(self) -> str:
        """Whose kernels it reduces: the package that the module's own package is in (``mamba_ssm``)."""
        return self.module.rpartition(".")[0].removesuffix(".utils")


REDUCERS: tuple[Reducer, ...] = (
    Reducer("mamba_ssm.utils.determinism"),
    Reducer("megatron.core.ssm.ops.determinism"),
)
"""Seen in mamba-ssm 2.3.2.post1 and megatron-core 0.19.2."""


_MARK = "__keeps_candidates_whole__"


def _keep_whole(configs: Any) -> Any:
    """What stands in for a reducer does: gives the candidates back as they are."""
    return configs


def _stand_in() -> Callable[[Any], Any]:
    # One object for each reducer: the undo looks for it by identity and must know whose it is.
    def autotune_configs(configs: Any) -> Any:
        return _keep_whole(configs)

    setattr(autotune_configs, _MARK, True)
    return autotune_configs


def _single_candidate_kernels(module: ModuleType) -> Iterator[str]:
    for name, value in sorted(own_attributes(module).items()):
        inner = value
        for _ in range(4):  # heuristics around an autotuner: each wrapper holds the next as ``fn``
            configs = getattr(inner, "configs", None)
            if isinstance(configs, list):
                if len(configs) == 1:
                    yield f"{module.__name__}.{name}"
                break
            inner = getattr(inner, "fn", None)


def reduced_kernels(reducer: Reducer) -> tuple[str, ...]:
    """Kernels that this reducer has left with one candidate, as dotted names; empty if it has reduced nothing."""
    decider = sys.modules.get(reducer.module)
    if decider is None or own_attributes(decider).get(reducer.flag) is not True:
        return ()
    users = [
        module
        for name, module in sorted(sys.modules.items())
        if name.startswith(reducer.package + ".")
        and module is not decider
        and isinstance(module, ModuleType)
        and reducer.function in own_attributes(module)
    ]
    return tuple(kernel for module in users for kernel in _single_candidate_kernels(module))


class CandidateGuard:
    """While it stands, reducers give back the candidates that they get.

    Args:
        reducers: which ones.
    """

    def __init__(self, reducers: tuple[Reducer, ...] = REDUCERS) -> None:
        self.reducers = reducers
        self._patches = Patches("the guard that keeps candidates whole")
        self._watch = ImportWatch([reducer.module for reducer in reducers], self._imported)
        self._applied = False

    def _imported(self, module: ModuleType) -> None:
        for reducer in self.reducers:
            if reducer.module == module.__name__:
                self._keep_whole(module, reducer)

    def _keep_whole(self, module: ModuleType, reducer: Reducer) -> None:
        function = own_attributes(module).get(reducer.function, MISSING)
        if function is MISSING:
            logger.warning(
                "%s has no function %s: its package may reduce candidates in another way; check with the enumerator",
                reducer.module,
                reducer.function,
            )
        elif getattr(function, _MARK, False) is not True:
            self._patches.replace_everywhere(function, _stand_in())

    def reduced(self) -> tuple[str, ...]:
        """Kernels that were left with one candidate before the guard stood."""
        return tuple(kernel for reducer in self.reducers for kernel in reduced_kernels(reducer))

    def warning(self) -> str | None:
        """What to tell about :meth:`reduced`, with the remedy, or None."""
        kernels = self.reduced()
        if not kernels:
            return None
        return (
            f"{len(kernels)} kernels were left with one candidate when they were imported, because a deterministic "
            f"flag was on by then: {', '.join(kernels)}: the result is reproducible but slower, and no table can "
            "restore their other candidates; turn the mode on before importing them, or before MAMBA_DETERMINISTIC "
            "or torch's deterministic algorithms are switched on"
        )

    def apply(self) -> None:
        """Keep candidates whole from now on, and warn about kernels for which it is too late."""
        if self._applied:
            return
        self._applied = True
        text = self.warning()
        if text:
            logger.warning("%s", text)
        filters = sorted(name for name in os.environ if name.startswith("TRITON_AUTOTUNE_BLOCK"))
        if filters:
            logger.warning(
                "%s has no effect in deterministic mode: candidates stay whole; use the policy's block_sizes",
                ", ".join(filters),
            )
        for reducer in self.reducers:
            module = sys.modules.get(reducer.module)
            if isinstance(module, ModuleType):
                self._keep_whole(module, reducer)
        self._watch.install()

    def restore(self) -> None:
        """Let the packages decide again for modules imported from now on; nothing applied: does nothing."""
        if not self._applied:
            return
        self._applied = False
        self._watch.remove()
        self._patches.undo()
