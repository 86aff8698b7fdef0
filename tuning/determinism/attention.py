"""Which attention backends are bit-exact, decided from the name before anything launches.

The decision needs no device and imports nothing, so a driver can make it before it starts workers. The order of the
rules is part of the contract:

1. a name that the caller registered: as registered;
2. Transformer Engine's backends (the caller says that they are its): allowed, it reads
   ``NVTE_ALLOW_NONDETERMINISTIC_ALGO=0`` and picks a deterministic one or none;
3. ``math`` as a whole part of the name, between ``.``, ``_``, ``/`` and ``-``: plain matrix products and a softmax,
   deterministic by construction; not where a family of rule 6 is in the name too, since ``aiter_math`` is AITER's;
4. ``*flash*``: has a deterministic backward that must be asked for, which the flash patch does. So ``_native_flash``
   is one of them, unless the caller registers it as native;
5. unset, ``native``, ``sdpa``, ``eager``: torch's own, covered by torch's flags;
6. everything else is rejected: sage, xformers, flex, aiter for a known reason, other names because nothing is known.

What is no name at all (a list, a number) is rejected before any rule.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from tuning.determinism.refusal import one_of, refuse

__all__ = [
    "AttentionKind",
    "AttentionVerdict",
    "check_attention_backend",
    "classify_backend",
    "register_attention_backend",
    "registered_attention_backends",
]

AttentionKind = Literal["math", "flash", "native", "transformer_engine", "rejected"]
"""``math``: deterministic by construction; ``flash``: needs the flash patch; ``native``: covered by torch's flags;
``transformer_engine``: covered by its environment variable; ``rejected``: not bit-exact, or not known to be."""

_KINDS: tuple[str, ...] = get_args(AttentionKind)

_NATIVE = frozenset({"native", "sdpa", "eager"})

_REJECTED: Mapping[str, str] = {
    "sage": "SageAttention quantises its operands and has no deterministic backward",
    "xformers": "xFormers' memory-efficient backward may add with atomics and cannot be told not to",
    "flex": "FlexAttention's kernels come from Inductor's templates, which neither torch's flags nor the pin cover",
    "aiter": "AITER's kernels have no deterministic switch that this mode can set",
}


@dataclass(frozen=True)
class AttentionVerdict:
    """What the mode makes of one attention backend.

    Attributes:
        name: the backend's name, or None where none is set.
        kind: which rule applies.
        reason: why.
    """

    name: str | None
    kind: AttentionKind
    reason: str

    @property
    def accepted(self) -> bool:
        """Whether a deterministic run may use it."""
        return self.kind != "rejected"

    @property
    def problem(self) -> str | None:
        """Why a deterministic run may not use it, in one sentence, or None."""
        if self.accepted:
            return None
        return one_of(
            "the attention backend",
            ["math", "*flash*", "native", "sdpa", "eager"],
            self.name,
            self.reason,
            "choose another backend, or register this one (register_attention_backend) if you know it to be bit-exact",
        )


_registered: dict[str, AttentionVerdict] = {}


def registered_attention_backends() -> tuple[AttentionVerdict, ...]:
    """The backends that callers registered, by name."""
    return tuple(_registered[name] for name in sorted(_registered))


def register_attention_backend(name: str, kind: AttentionKind, *, reason: str) -> Callable[[], None]:
    """Say what a backend of this name is, instead of the rules for names.

    Args:
        name: the whole name, in any case of letters.
        kind: which treatment it gets, such as ``native`` for ``_native_flash`` where that is torch's own kernel.
        reason: why, for reports.

    Returns:
        A function that takes the registration away again.

    Raises:
        DeterminismError: the kind is unknown, or name or reason is empty.
    """
    problems = []
    if kind not in _KINDS:
        problems.append(
            one_of("the kind of an attention backend", _KINDS, str(kind), "it chooses the treatment", "use one of them")
        )
    if not name or not reason:
        problems.append(f"an attention backend needs a name and a reason, got {name!r} and {reason!r}")
    refuse("this attention backend", problems)
    key = name.lower()
    before = _registered.get(key)
    verdict = AttentionVerdict(name, kind, reason)
    _registered[key] = verdict

    def unregister() -> None:
        if _registered.get(key) is verdict:
            del _registered[key]
            if before is not None:
                _registered[key] = before

    return unregister


def classify_backend(
    name: str | enum.Enum | None,
    *,
    library: Literal["transformer_engine"] | None = None,
    env: Mapping[str, str] | None = None,
) -> AttentionVerdict:
    """Which rule applies to an attention backend; see the module's docstring for their order.

    Args:
        name: the backend's name, or an enumeration member whose value it is; None or "" where none is set.
        library: ``transformer_engine`` where the name is one of Transformer Engine's own.
        env: the environment that Transformer Engine will see; None leaves its variable to the check of the environment.
    """
    value: object = name.value if isinstance(name, enum.Enum) else name
    text = value if value is None or isinstance(value, str) else repr(value)
    if not (name is None or isinstance(name, (str, enum.Enum))):
        reason = f"a backend is named by a string or an enumeration member, not by {type(name).__name__}"
        return AttentionVerdict(text, "rejected", reason)
    lowered = (text or "").lower()
    if lowered in _registered:
        known = _registered[lowered]
        return AttentionVerdict(text, known.kind, known.reason)
    if library == "transformer_engine":
        found = None if env is None else env.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO")
        if env is not None and found != "0":
            got = "unset" if found is None else repr(found)
            reason = f"Transformer Engine needs NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 for it, got {got}"
            return AttentionVerdict(text, "rejected", reason)
        return AttentionVerdict(
            text, "transformer_engine", "under NVTE_ALLOW_NONDETERMINISTIC_ALGO=0 it uses deterministic kernels only"
        )
    if not (value is None or isinstance(value, str)):
        reason = f"the enumeration member {name} has a value that is no name, so no rule for names applies to it"
        return AttentionVerdict(text, "rejected", reason)
    rejected = next((reason for part, reason in _REJECTED.items() if part in lowered), None)
    if rejected is None and "math" in re.split(r"[._/-]", lowered):
        return AttentionVerdict(text, "math", "matrix products and a softmax: deterministic by construction")
    if "flash" in lowered:
        return AttentionVerdict(text, "flash", "its entry points are bound to deterministic=True by the flash patch")
    if not lowered or lowered in _NATIVE:
        return AttentionVerdict(text, "native", "torch's own, covered by torch's deterministic algorithms")
    return AttentionVerdict(text, "rejected", rejected or "nothing is known about a backend of this name")


def check_attention_backend(
    name: str | enum.Enum | None,
    *,
    library: Literal["transformer_engine"] | None = None,
    env: Mapping[str, str] | None = None,
) -> AttentionVerdict:
    """:func:`classify_backend`, for callers that want an error.

    Raises:
        DeterminismError: the backend is rejected.
    """
    verdict = classify_backend(name, library=library, env=env)
    refuse("this attention backend", [verdict.problem] if verdict.problem else [])
    return verdict
