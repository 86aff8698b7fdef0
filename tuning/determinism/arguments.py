"""Gates: options of a training framework that deterministic mode refuses.

A gate looks at one option of a namespace or mapping and says what value it must have and why. Options are never
flipped: a run must be the run that was asked for, so a wrong one is named and the user changes it. A framework adds
gates for its own options with :func:`register_argument_gate`.

Source of the built-in gates: Megatron-LM's determinism page and ``megatron/training/determinism.py``
(megatron-core 0.19.2).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from tuning.determinism.environment import apply_determinism_env, environment_problems
from tuning.determinism.refusal import refuse

__all__ = [
    "BUILT_IN_GATES",
    "ArgumentFinding",
    "ArgumentGate",
    "apply_determinism_to_args",
    "argument_gates",
    "argument_problems",
    "examine_arguments",
    "register_argument_gate",
]


@dataclass(frozen=True)
class ArgumentGate:
    """One option and the value that it must have.

    Attributes:
        name: of the option, as an attribute or key.
        reason: why any other value is refused.
        required: the value it must have; an option that is unset (absent or None) passes if ``required`` is False.
        follows: the option that decides while this one is unset, or None.
        owner: who registered the gate, for messages and listings.
    """

    name: str
    reason: str
    required: bool | int | str = False
    follows: str | None = None
    owner: str = "built in"


BUILT_IN_GATES: tuple[ArgumentGate, ...] = (
    ArgumentGate("cross_entropy_loss_fusion", "the fused loss is not bit-exact from run to run"),
    ArgumentGate("tp_comm_overlap", "overlapped tensor-parallel communication adds partial sums in order of arrival"),
    ArgumentGate(
        "moe_router_aux_loss_fusion",
        "the fused auxiliary loss of the router adds with atomics",
        follows="moe_router_fusion",
    ),
)

_registered: dict[str, ArgumentGate] = {}


def argument_gates() -> tuple[ArgumentGate, ...]:
    """All gates: the built-in ones, then those registered, by name."""
    return (*BUILT_IN_GATES, *(_registered[name] for name in sorted(_registered)))


def register_argument_gate(
    name: str,
    *,
    reason: str,
    required: bool | int | str = False,
    follows: str | None = None,
    owner: str = "registered",
) -> Callable[[], None]:
    """Add a gate for an option of one's own framework.

    Args:
        name: of the option, as an attribute or key of the arguments.
        reason: why any other value is refused; it stands in the error.
        required: the value the option must have.
        follows: another option whose value counts while this one is unset.
        owner: who registers it, such as the framework's name.

    Returns:
        A function that takes the gate away again.

    Raises:
        DeterminismError: no name or no reason is given, or another gate has that name and is not equal. Registering
            an equal gate twice is fine.
    """
    gate = ArgumentGate(name, reason, required, follows, owner)
    problems = [
        f"{what} of an argument gate must be a non-empty string, got {value!r}"
        for what, value in (("the name", name), ("the reason", reason))
        if not isinstance(value, str) or not value.strip()
    ]
    taken = next((other for other in argument_gates() if other.name == name), None)
    if taken is not None and taken != gate:
        problems.append(
            f"the argument gate {name} exists already ({taken.owner}: {taken.reason}), got another one for it from "
            f"{owner}: take the first away, or register an equal one"
        )
    refuse("this argument gate", problems)
    if taken is None:
        _registered[name] = gate

    def unregister() -> None:
        if _registered.get(name) is gate:
            del _registered[name]

    return unregister


@dataclass(frozen=True)
class ArgumentFinding:
    """What one gate makes of the arguments.

    Attributes:
        gate: the gate.
        present: the option, or the one it follows, exists and is not None.
        found: the value that counts.
        decided_by: the option that the value comes from.
        problem: why it is refused, or None.
    """

    gate: ArgumentGate
    present: bool
    found: object
    decided_by: str
    problem: str | None


# Subclasses of these may have a __dict__, but no options in it.
_NO_NAMESPACES = (str, bytes, bytearray, int, float, complex, list, tuple, set, frozenset)


def _shape_problem(args: object) -> str | None:
    """Why these are no arguments at all, or None where options can be read from them."""
    if isinstance(args, Mapping):
        return None
    # A class with slots holds attributes without a __dict__.
    holds = hasattr(args, "__dict__") or any(vars(base).get("__slots__") for base in type(args).__mro__)
    if holds and not isinstance(args, _NO_NAMESPACES):
        return None
    return f"the arguments must be a namespace or a mapping, got {type(args).__name__}: pass the parsed arguments"


def _value(args: object, name: str) -> object:
    return args.get(name) if isinstance(args, Mapping) else getattr(args, name, None)


def _examine(gate: ArgumentGate, args: object) -> ArgumentFinding:
    found, decided_by = _value(args, gate.name), gate.name
    if found is None and gate.follows is not None:
        found, decided_by = _value(args, gate.follows), gate.follows
    if found is None:
        ok = gate.required is False
    elif isinstance(gate.required, bool):
        ok = found is gate.required
    else:
        ok = type(found) is type(gate.required) and found == gate.required
    problem = None
    if not ok:
        unset = "" if decided_by == gate.name else f" (unset, so {decided_by} decides)"
        remedy = gate.name if decided_by == gate.name else f"{gate.name} or {decided_by}"
        problem = (
            f"{gate.name} must be {gate.required!r}, got {found!r}{unset} ({gate.reason}): set {remedy} to "
            f"{gate.required!r}"
        )
    return ArgumentFinding(gate, found is not None, found, decided_by, problem)


def examine_arguments(args: object) -> tuple[ArgumentFinding, ...]:
    """What every gate makes of the arguments, changing nothing.

    Args:
        args: a namespace (anything with attributes) or a mapping.

    Raises:
        DeterminismError: ``args`` is neither, such as a string, a number or a list: no option can be read from it, so
            no gate would ever see one.
    """
    problem = _shape_problem(args)
    refuse("these arguments", [problem] if problem else [])
    return tuple(_examine(gate, args) for gate in argument_gates())


def argument_problems(args: object) -> list[str]:
    """Everything for which the arguments are refused, one sentence each; nothing is changed.

    Args:
        args: a namespace (anything with attributes) or a mapping; that it is neither is a problem too.
    """
    problem = _shape_problem(args)
    if problem:
        return [problem]
    return [finding.problem for finding in examine_arguments(args) if finding.problem]


def apply_determinism_to_args(args: Any, *, env: MutableMapping[str, str] | None = None) -> tuple[ArgumentFinding, ...]:
    """Put the process that these arguments describe into deterministic mode, as far as a framework's own set-up can.

    In this order: every gate is checked, then the environment, and all problems of both go into one error; then unset
    environment variables are filled and torch's flags are set, for the rest of the process. The arguments themselves
    are never changed. Calling it again changes nothing more.

    It neither pins autotuners nor patches attention: :class:`~tuning.determinism.DeterministicMode` does.

    Args:
        args: a namespace (anything with attributes) or a mapping. An option that it lacks counts as unset.
        env: the environment to check and fill; None means ``os.environ``.

    Returns:
        What every gate found.

    Raises:
        DeterminismError: with every problem; nothing has been changed then.
    """
    target: MutableMapping[str, str] = os.environ if env is None else env
    problems = argument_problems(args)
    refuse("these arguments" if problems else "this environment", problems + environment_problems(target))
    findings = examine_arguments(args)
    apply_determinism_env(target)

    from tuning.determinism.torch_flags import set_torch_flags

    set_torch_flags()
    return findings
