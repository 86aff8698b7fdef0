"""What Inductor times by itself and no policy can pin, with the setting that controls each.

These choices are made among candidates that Inductor generates anew for each graph, so there is no kernel with a name
and a key for which a table could hold an entry. Read in the sources of torch 2.6, 2.8, 2.9, 2.10, 2.11, 2.12, 2.13 and
2.14 (``torch/_inductor/config.py``, ``runtime/triton_heuristics.py``, ``select_algorithm.py``,
``fx_passes/pad_mm.py``): ``deterministic`` exists from 2.10 on, and ``combo_kernels``, ``multi_kernel`` and the
``max_autotune`` family in all of them.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import Any

from .spec import Json

__all__ = ["Unpinnable", "unpinnable"]


@dataclass(frozen=True, kw_only=True)
class Unpinnable:
    """One kind of choice that Inductor makes by a clock.

    Attributes:
        kind: a word for it, stable.
        what: what is timed, in words.
        setting: attribute of torch's Inductor settings that controls it, such as ``deterministic``.
        quiet: the value of the setting under which nothing is timed.
        switch: how to set it, in words.
        since: first torch release that has the setting.
        changes_bits: whether another choice can give other bits.
        timed: whether it may be timed in this process as it is set now; None where Inductor is not loaded.
    """

    kind: str
    what: str
    setting: str
    quiet: Json
    switch: str
    since: str
    changes_bits: bool
    timed: bool | None = None

    def to_json(self) -> Json:
        """JSON form."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


_KINDS = (
    Unpinnable(
        kind="generated reductions",
        what="block sizes and warps of the reductions that Inductor generates, among several candidates of its own",
        setting="deterministic",
        quiet=True,
        switch="TORCHINDUCTOR_DETERMINISTIC=1; deterministic mode sets it with torch's deterministic algorithms",
        since="2.10",
        changes_bits=True,
    ),
    Unpinnable(
        kind="generated elementwise kernels",
        what="block sizes and warps of the elementwise kernels that Inductor generates; no candidate changes results",
        setting="triton.autotune_pointwise",
        quiet=False,
        switch="torch._inductor.config.triton.autotune_pointwise = False",
        since="2.6",
        changes_bits=False,
    ),
    Unpinnable(
        kind="matrix multiplication and attention templates",
        what="libraries' kernels and Inductor's own templates, timed against each other under max_autotune",
        setting="max_autotune",
        quiet=False,
        switch="mode='max-autotune' of torch.compile or TORCHINDUCTOR_MAX_AUTOTUNE=1 turns it on; from torch 2.10 on "
        "deterministic overrides it",
        since="2.6",
        changes_bits=True,
    ),
    Unpinnable(
        kind="matrix multiplication templates alone",
        what="the same, for matrix multiplications only",
        setting="max_autotune_gemm",
        quiet=False,
        switch="TORCHINDUCTOR_MAX_AUTOTUNE_GEMM=1 turns it on; from torch 2.10 on deterministic overrides it",
        since="2.6",
        changes_bits=True,
    ),
    Unpinnable(
        kind="padded matrix multiplications",
        what="a matrix multiplication with and without padding to an aligned shape",
        setting="shape_padding",
        quiet=False,
        switch="TORCHINDUCTOR_SHAPE_PADDING=0; from torch 2.10 on deterministic overrides it",
        since="2.6",
        changes_bits=True,
    ),
    Unpinnable(
        kind="coordinate descent",
        what="candidates next to the chosen one, for generated kernels",
        setting="coordinate_descent_tuning",
        quiet=False,
        switch="TORCHINDUCTOR_COORDINATE_DESCENT_TUNING=1 turns it on; from torch 2.10 on deterministic keeps it off "
        "reductions",
        since="2.6",
        changes_bits=True,
    ),
    Unpinnable(
        kind="fusion",
        what="kernels fused and apart",
        setting="benchmark_fusion",
        quiet=False,
        switch="TORCHINDUCTOR_BENCHMARK_FUSION=1 turns it on",
        since="2.6",
        changes_bits=True,
    ),
    Unpinnable(
        kind="combined kernels",
        what="independent kernels launched as one and apart",
        setting="benchmark_combo_kernel",
        quiet=False,
        switch="torch._inductor.config.benchmark_combo_kernel = True turns it on",
        since="2.6",
        changes_bits=True,
    ),
    Unpinnable(
        kind="persistent and looped reductions",
        what="two forms of one reduction, timed as it runs",
        setting="triton.multi_kernel",
        quiet=0,
        switch="TORCHINDUCTOR_MULTI_KERNEL=1 turns it on",
        since="2.6",
        changes_bits=True,
    ),
)

_OVERRIDDEN = frozenset({"max_autotune", "max_autotune_gemm", "shape_padding"})
"""Settings that ``deterministic`` overrides where it is on."""


def unpinnable() -> tuple[Unpinnable, ...]:
    """Every kind of choice inside ``torch.compile`` that no policy reaches, with the setting that controls it.

    Imports nothing: ``timed`` is read off Inductor's settings where something else has loaded them.
    """
    config = sys.modules.get("torch._inductor.config")
    if config is None:
        return _KINDS
    return tuple(Unpinnable(**{**kind.to_json(), "timed": _timed(config, kind)}) for kind in _KINDS)


def _timed(config: Any, kind: Unpinnable) -> bool:
    if kind.setting in _OVERRIDDEN and getattr(config, "deterministic", False):
        return False
    value = config
    for name in kind.setting.split("."):
        value = getattr(value, name, None)
    # A setting that this torch lacks cannot have been switched: what it would control is done.
    return value is None or bool(value != kind.quiet)
