"""Take FLA's gated delta nets off its autotuned kernels, while a block lasts.

FLA (flash-linear-attention, ``fla-core``) builds its kernels with several candidates each and times them on first use.
For the parts of GDN and GDN-2 the torch-native forms of this package stand in:

- ``l2norm``: normalisation of query and key, wherever FLA uses it, other delta rules included;
- ``causal_conv1d``: the short convolution;
- ``gated_delta_rule`` and ``gdn2``: the chunked recurrences.

Each is replaced twice. The public function is replaced in every module that has imported it, which also takes it out
of the reach of FLA's other backends. And ``apply`` of the autograd function behind it is redirected, which reaches
callers that captured the public function before: a model's attribute, say.

Modules that are not imported yet are changed right after they are. FLA itself is never imported from here. Arguments
that the torch-native form does not know, context parallelism for one, are refused at the call. Everything is as in
fla-core 0.6.0; where an FLA lacks what is to be replaced, that is an error, so that no part is silently left timed.

FLA's recurrent forms for decoding (``fused_recurrent_*``) have no candidates and are left alone; so are its other
kernels (KDA, GLA, the decoding convolution, and so on): put ``fla`` in the policy's modules to pin those.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType, TracebackType
from typing import Any

from tuning.determinism.importing import ImportWatch
from tuning.determinism.patching import MISSING, Patches, own_attributes
from tuning.determinism.refusal import one_of, refusal, refuse

__all__ = ["ALL_PARTS", "PARTS", "FlaReplacement", "Part", "replace_in_fla"]

logger = logging.getLogger("tuning.determinism")


@dataclass(frozen=True)
class Part:
    """One thing that is replaced in FLA.

    Attributes:
        name: of the part.
        modules: where FLA defines it; the first is the place in fla-core 0.6, the others those of earlier versions.
        functions: FLA's name for each function, and what stands in for it (``module:attribute``).
        autograd: the autograd function behind it, and what ``apply`` is redirected to; None where there is none.
    """

    name: str
    modules: tuple[str, ...]
    functions: Mapping[str, str]
    autograd: tuple[str, str] | None = None


PARTS: tuple[Part, ...] = (
    Part(
        "l2norm",
        ("fla.modules.norm.l2norm", "fla.modules.l2norm"),
        {
            "l2norm_fwd": "tuning.determinism.l2norm:l2norm_forward",
            "l2norm_bwd": "tuning.determinism.l2norm:l2norm_backward",
        },
    ),
    Part(
        "causal_conv1d",
        ("fla.modules.causal_conv1d.ops", "fla.modules.conv.causal_conv1d", "fla.modules.convolution"),
        {"causal_conv1d": "tuning.determinism.causal_conv1d:causal_convolution"},
        ("CausalConv1dFunction", "tuning.determinism.causal_conv1d:causal_convolution"),
    ),
    Part(
        "gated_delta_rule",
        ("fla.ops.gated_delta_rule.chunk",),
        {"chunk_gated_delta_rule": "tuning.determinism.gated_delta:chunk_gated_delta_rule"},
        ("ChunkGatedDeltaRuleFunction", "tuning.determinism.gated_delta:chunk_gated_delta_rule"),
    ),
    Part(
        "gdn2",
        ("fla.ops.gdn2.chunk",),
        {"chunk_gdn2": "tuning.determinism.gated_delta:chunk_gdn2"},
        ("ChunkGDN2Function", "tuning.determinism.gated_delta:chunk_gdn2"),
    ),
)
"""What can be replaced."""

ALL_PARTS: tuple[str, ...] = tuple(part.name for part in PARTS)
"""Their names."""

_MARK = "__torch_native__"


def _load(place: str) -> Callable[..., Any]:
    module, _, name = place.partition(":")
    # By its last part: this package may be loaded under another name.
    module = f".{module.rpartition('.')[2]}"
    function: Callable[..., Any] = getattr(importlib.import_module(module, __package__), name)
    return function


def _stand_in(original: Any, place: str) -> Callable[..., Any]:
    """A new object for each replacement, so that the undo can find it without finding our own function."""

    def torch_native(*args: Any, **kwargs: Any) -> Any:
        return _load(place)(*args, **kwargs)

    torch_native.__name__ = torch_native.__qualname__ = str(getattr(original, "__name__", place))
    torch_native.__doc__ = getattr(original, "__doc__", None)
    # FLA looks up its backends by the function that is innermost; this leads it there.
    torch_native.__wrapped__ = original  # type: ignore[attr-defined]
    setattr(torch_native, _MARK, True)
    return torch_native


def _apply(function_class: Any, place: str) -> staticmethod[..., Any]:
    """``apply`` with the positional arguments of FLA's ``forward``, passed on by name."""
    names = list(inspect.signature(function_class.forward).parameters)[1:]

    def apply(*args: Any) -> Any:
        return _load(place)(**dict(zip(names, args, strict=False)))

    setattr(apply, _MARK, True)
    return staticmethod(apply)


class FlaReplacement:
    """The replacement, while it stands. Leaving its ``with`` block undoes it.

    Args:
        parts: names out of :data:`ALL_PARTS`.

    Raises:
        DeterminismError: a part is unknown.
    """

    def __init__(self, parts: Sequence[str] = ALL_PARTS) -> None:
        known = {part.name: part for part in PARTS}
        refuse(
            "this replacement in FLA",
            [
                one_of("a part", list(known), str(part), "nothing else can be replaced", "choose one of them")
                for part in parts
                if part not in known
            ],
        )
        self.parts = tuple(known[part] for part in dict.fromkeys(parts))
        self._patches = Patches("the replacement in FLA")
        watched = [name for part in self.parts for name in part.modules]
        self._watch = ImportWatch(watched, self._imported)
        self._applied = False
        self._announced: set[str] = set()

    @property
    def places(self) -> tuple[str, ...]:
        """Where something is replaced now, as dotted names."""
        return self._patches.places

    def problems(self) -> list[str]:
        """Parts of the FLA that is imported in which there is nothing to replace."""
        found = []
        for part in self.parts:
            loaded = [sys.modules[name] for name in part.modules if isinstance(sys.modules.get(name), ModuleType)]
            lacking = [self._missing(part, module) for module in loaded]
            if loaded and all(lacking):
                found.append(self._problem(part, loaded[0], lacking[0]))
        return found

    @staticmethod
    def _missing(part: Part, module: ModuleType) -> list[str]:
        wanted = [*part.functions, *([part.autograd[0]] if part.autograd else [])]
        return [name for name in wanted if name not in own_attributes(module)]

    @staticmethod
    def _problem(part: Part, module: ModuleType, missing: Sequence[str]) -> str:
        version = own_attributes(sys.modules.get("fla")).get("__version__", "of unknown version")
        return (
            f"FLA {version} has no {', '.join(missing)} in {module.__name__} (what computes {part.name} there may be "
            "autotuned): use fla-core 0.6, or leave this part out and pin FLA's kernels"
        )

    def _imported(self, module: ModuleType) -> None:
        for part in self.parts:
            if module.__name__ in part.modules:
                missing = self._missing(part, module)
                if missing and module.__name__ == part.modules[0]:
                    raise refusal("this FLA", [self._problem(part, module, missing)])
                self._replace(part, module)

    def _replace(self, part: Part, module: ModuleType) -> None:
        if part.name not in self._announced:
            self._announced.add(part.name)
            logger.warning(
                "FLA's %s is replaced by a torch-native form while deterministic mode is on: reproducible, and slower "
                "(tuning/determinism/README.md has figures); DeterministicMode(fla=False) keeps FLA's, pinned",
                part.name,
            )
        for name, place in part.functions.items():
            original = own_attributes(module).get(name, MISSING)
            if original is not MISSING and getattr(original, _MARK, False) is not True:
                self._patches.replace_everywhere(original, _stand_in(original, place))
        if part.autograd is not None:
            function_class = own_attributes(module).get(part.autograd[0])
            if isinstance(function_class, type) and getattr(function_class.apply, _MARK, False) is not True:  # type: ignore[attr-defined]
                self._patches.set(function_class, "apply", _apply(function_class, part.autograd[1]))

    def apply(self) -> FlaReplacement:
        """Replace what is imported, and from now on what gets imported.

        Raises:
            DeterminismError: the FLA that is imported lacks what is to be replaced; nothing has been changed then.
        """
        if not self._applied:
            refuse("this FLA", self.problems())
            self._applied = True
            for part in self.parts:
                for name in part.modules:
                    module = sys.modules.get(name)
                    if isinstance(module, ModuleType):
                        self._replace(part, module)
            self._watch.install()
        return self

    def undo(self) -> None:
        """Put FLA back as it was; nothing applied: does nothing.

        Raises:
            DeterminismError: somebody else has patched one of the places since; the others are back.
        """
        self._watch.remove()
        self._applied = False
        self._patches.undo()

    def __enter__(self) -> FlaReplacement:
        return self.apply()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.undo()


def replace_in_fla(parts: Sequence[str] = ALL_PARTS) -> FlaReplacement:
    """Replace FLA's autotuned parts of GDN and GDN-2 by torch-native ones.

    Args:
        parts: names out of :data:`ALL_PARTS`; all of them by default.

    Returns:
        The replacement, applied. ``undo()``, or leaving its ``with`` block, puts FLA back.

    Raises:
        DeterminismError: a part is unknown, or the FLA that is imported lacks what is to be replaced.
    """
    return FlaReplacement(parts).apply()
