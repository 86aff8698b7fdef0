"""The policy: what should happen to every autotuner in scope, as one frozen dataclass.

Every other surface is generated from its fields: the command-line flags, the YAML section and their help text come from
:func:`policy_fields`, which reads the dataclass. A field is therefore added in one place, here.

A policy is checked and brought to one normal form when it is built, so that two policies that mean the same compare
equal and everything that reads one may trust its types. Nothing here reads a file, the environment or a device.

The module is longer than most because the fields carry the text of every surface, and the checks stand beside them.
"""

from __future__ import annotations

import dataclasses
import os
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, get_args, get_type_hints

from tuning.errors import PolicyError

__all__ = [
    "DEFAULT_CONFIG_INVARIANT",
    "DEFAULT_MODULES",
    "UNAVAILABLE",
    "AutotunePolicy",
    "FieldKind",
    "Mode",
    "OnMiss",
    "PolicyField",
    "WithinClass",
    "policy_fields",
    "shown",
]

Mode = Literal["auto", "pinned", "record"]
OnMiss = Literal["cheapest", "nearest", "model", "error"]
WithinClass = Literal["pinned", "timed"]

FieldKind = Literal["choice", "modules", "kernels", "paths", "path", "pairs", "count", "switch"]
"""What a field holds, beyond its Python type: it decides how the field is checked and what its flag looks like."""

UNAVAILABLE: frozenset[tuple[str, str]] = frozenset()
"""(field, value) of each choice that the policy knows and this version cannot carry out.

This is the only place that says so: whoever builds one of these deletes its line, and the refusal, the help text and
the alternatives that messages offer follow.
"""

DEFAULT_MODULES: tuple[str, ...] = ("mamba_ssm", "transformer_engine", "megatron.core")
"""Default of ``modules``."""

# Transformer Engine 2.20.2 autotunes four kernels in this file, each over BLOCK_SIZE alone (64 to 4096; warps and
# stages are Triton's defaults). A kernel may keep Triton's timed choice only if no candidate can change a bit of what
# it writes:
#
# _permute_kernel: copies the elements of a row to the rows that it is routed to, or stores 0 there. No arithmetic;
#     BLOCK_SIZE says which program copies which columns.
# _unpermute_kernel: an output element is the sum, in float32, of its routed copies (times a probability where there is
#     one), in the order of the routing map, by a loop that BLOCK_SIZE does not enter; columns never meet. Product and
#     sum become one fma under every candidate: in the PTX of Triton 3.6 for sm80, sm90, sm100 and sm103 none is apart.
# _sort_chunks_by_map_kernel: copies rows to their new places. No arithmetic.
# _unpermute_bwd_with_merging_probs_kernel: NOT listed. Its gradient of the probabilities gathers BLOCK_SIZE partial
#     sums over the hidden dimension and then reduces them, so BLOCK_SIZE is the order of a floating-point sum.
#
# The file's other kernels (_row_id_map_pass_*, _make_chunk_sort_map_kernel) have no autotuner. Older releases have
# kernels of the same names in transformer_engine.pytorch.triton.permutation; nobody has examined those here, and they
# are pinned like everything else.
DEFAULT_CONFIG_INVARIANT: tuple[str, ...] = (
    "transformer_engine.common.triton.permutation._permute_kernel",
    "transformer_engine.common.triton.permutation._sort_chunks_by_map_kernel",
    "transformer_engine.common.triton.permutation._unpermute_kernel",
)
"""Default of ``config_invariant``; the reason for each name stands beside it in the source."""

# What 64 bits hold: every format that a policy or a choice travels in (MessagePack, JSON readers) can carry it.
_LARGEST = 2**63 - 1


def _pending(name: str, hint: object) -> str:
    pending = [choice for choice in get_args(hint) if (name, choice) in UNAVAILABLE]
    return f"; not available in this version: {', '.join(pending)}" if pending else ""


@dataclass(frozen=True, kw_only=True)
class AutotunePolicy:
    """What should happen to every autotuner that ``triton.autotune`` makes in the modules in scope.

    Fields are checked when the policy is built. Lists become tuples, a mapping or ``"NAME=VALUE"`` strings of block
    sizes become pairs sorted by name, and :class:`os.PathLike` becomes ``str``; a lone string where several names or
    paths are expected is an error, for it is as often meant to be several.

    Raises:
        PolicyError: a field has the wrong type or a value out of range, two fields contradict each other, or a choice
            is not available in this version. ``field``, ``value`` and ``expected`` are set.
    """

    mode: Mode | None = field(
        default=None,
        metadata={
            "kind": "choice",
            "help": "auto: Triton times the candidates and chooses; pinned: one candidate is chosen from tables and "
            "rules, and nothing is timed; record: Triton times and chooses, and every timing is journaled; unset: "
            "record where there is a record path, else pinned in deterministic mode, else auto",
        },
    )
    """How each autotuner in scope gets its config; None leaves it to :meth:`effective_mode`."""

    modules: tuple[str, ...] = field(
        default=DEFAULT_MODULES,
        metadata={
            "kind": "modules",
            "metavar": "MODULE",
            "help": "package prefixes in scope: mamba_ssm covers mamba_ssm.x, not mamba_ssm_x "
            f"(default: {' '.join(DEFAULT_MODULES)})",
        },
    )
    """Dotted names of the packages and modules whose autotuners the policy governs."""

    config_invariant: tuple[str, ...] = field(
        default=DEFAULT_CONFIG_INVARIANT,
        metadata={
            "kind": "kernels",
            "metavar": "KERNEL",
            "help": "qualified names of kernels whose result is the same bits under every config, which keep Triton's "
            "timed choice; with no names all in scope are pinned "
            f"(default: {' '.join(DEFAULT_CONFIG_INVARIANT)})",
        },
    )
    """Qualified names, module included, of kernels that are exempt from pinning and from comparison between ranks."""

    table_path: tuple[str, ...] = field(
        default=(),
        metadata={
            "kind": "paths",
            "metavar": "FOLDER",
            "help": "extra table folders, searched in this order before the packaged tables (default: none)",
        },
    )
    """Folders that hold ``<arch>/<package>.json``; the first that has an entry wins."""

    record_path: str | None = field(
        default=None,
        metadata={
            "kind": "path",
            "metavar": "PREFIX",
            "help": "journal prefix of record mode: each process writes a file of its own whose path begins so",
        },
    )
    """Where record mode writes; giving it and no mode means record mode."""

    remeasure: bool = field(
        default=False,
        metadata={
            "kind": "switch",
            "help": "while recording, time each candidate twice and those within noise of the fastest again, turn by "
            "turn, so that what disturbs a timing decides nothing; needs record_path (default: no)",
        },
    )
    """Whether record mode settles near ties by timing them again, interleaved. Its benchmarks take several times as
    long, its compiling as long as ever."""

    check_outputs: bool = field(
        default=False,
        metadata={
            "kind": "switch",
            "help": "while recording, run each winner once more on copies of the arguments as they were before timing, "
            "and report where its outputs are not its own; needs record_path (default: no)",
        },
    )
    """Whether record mode checks that a winner's outputs do not rest on what other candidates wrote while being timed.
    It holds copies of a launch's tensors meanwhile. What it finds is logged and stands in the journal."""

    on_miss: OnMiss = field(
        default="cheapest",
        metadata={
            "kind": "choice",
            "help": "rule for a key that no table entry matches: cheapest: the smallest static footprint; nearest: the "
            "closest entry of the same kernel; model: a static estimate; error: refuse "
            f"(default: cheapest){_pending('on_miss', OnMiss)}",
        },
    )
    """The rule when no table entry matches. None of them measures time."""

    block_sizes: tuple[tuple[str, int], ...] = field(
        default=(),
        metadata={
            "kind": "pairs",
            "metavar": "NAME=VALUE",
            "help": "prefer candidates that have these parameter values, in each kernel that has the parameter "
            "(default: none)",
        },
    )
    """(parameter, value) pairs, sorted by name; a mapping is taken too."""

    verify_every: int = field(
        default=0,
        metadata={
            "kind": "count",
            "metavar": "STEPS",
            "help": "compare what the ranks launched every this many steps; 0 never compares (default: 0)",
        },
    )
    """Steps between comparisons by :func:`maybe_verify_choices`; 0 means never."""

    verify_strict: bool = field(
        default=False,
        metadata={
            "kind": "switch",
            "help": "a disagreement between ranks raises, on every rank, instead of being logged (default: no)",
        },
    )
    """Whether a disagreement raises. It holds for explicit checks too, so it stands without ``verify_every``."""

    enumerate_autotuners: bool = field(
        default=False,
        metadata={
            "kind": "switch",
            "help": "log each autotuner with several configs as it is first reached, and whether it is pinned, timed "
            "(config-invariant) or outside the scope (default: no)",
        },
    )
    """Whether to log every autotuner that is reached, once each."""

    manifest_path: str | None = field(
        default=None,
        metadata={
            "kind": "path",
            "metavar": "FILE",
            "help": "write the run manifest, which says what was launched and why, to this file",
        },
    )
    """Where the run manifest goes; None writes none."""

    within_class: WithinClass = field(
        default="pinned",
        metadata={
            "kind": "choice",
            "help": "where a table knows which candidates give identical results: pinned: keep the table's choice; "
            f"timed: each rank times freely among those (default: pinned){_pending('within_class', WithinClass)}",
        },
    )
    """What may vary among candidates whose results are bit for bit the same."""

    chaos: bool = field(
        default=False,
        metadata={
            "kind": "switch",
            "help": "pick a different candidate on each rank on purpose, to see that a detector of disagreement "
            "detects; needs mode pinned (default: no)",
        },
    )
    """A positive control for detectors; needs ``mode="pinned"``, written out, so that it is never on by accident."""

    def __post_init__(self) -> None:
        for spec in policy_fields():
            object.__setattr__(self, spec.name, _NORMALISE[spec.kind](spec, getattr(self, spec.name)))
        self._check_together()

    def _check_together(self) -> None:
        if self.mode == "record" and self.record_path is None:
            raise _refusal(
                "record_path", "a journal prefix, since mode is 'record'", None, then="give one, such as 'journals/run'"
            )
        if self.mode in ("auto", "pinned") and self.record_path is not None:
            raise _refusal(
                "record_path",
                f"None, since mode is {self.mode!r}, which records nothing",
                self.record_path,
                then="drop it, or set mode to 'record'",
            )
        for name in ("remeasure", "check_outputs"):
            if getattr(self, name) and self.record_path is None:
                raise _refusal(
                    name,
                    "False, since nothing is recorded without a record_path",
                    True,
                    then=f"give a record_path, or drop {name}",
                )
        if self.chaos and self.mode != "pinned":
            raise _refusal(
                "chaos",
                f"False, since mode is {self.mode!r} and only pinned choices can be made to differ",
                True,
                then="set mode to 'pinned', or drop chaos",
            )

    def effective_mode(self, *, deterministic: bool = False) -> Mode:
        """The mode that holds: ``mode`` if set, else record with a ``record_path``, else pinned if ``deterministic``,
        else auto.

        Args:
            deterministic: whether the process runs in deterministic mode.
        """
        if self.mode is not None:
            return self.mode
        if self.record_path is not None:
            return "record"
        return "pinned" if deterministic else "auto"

    def in_scope(self, qualified_name: str) -> bool:
        """Whether a module or kernel of this qualified name lies in ``modules``, by whole components of the name."""
        return any(qualified_name == module or qualified_name.startswith(module + ".") for module in self.modules)

    def is_config_invariant(self, qualified_name: str) -> bool:
        """Whether the kernel of exactly this qualified name is listed in ``config_invariant``."""
        return qualified_name in self.config_invariant

    def changes(self) -> dict[str, Any]:
        """The fields that differ from the default policy, in the order of declaration: what a log should show."""
        values = {spec.name: (getattr(self, spec.name), spec.default) for spec in policy_fields()}
        return {name: value for name, (value, default) in values.items() if value != default}


@dataclass(frozen=True)
class PolicyField:
    """One field of the policy, as the surfaces that are generated from it see it.

    Attributes:
        name: of the field.
        kind: what it holds.
        default: its value in the default policy.
        help: one line for a reader of flags.
        metavar: placeholder for a value in a usage line; None for choices and switches.
        choices: the accepted values of a choice, unavailable ones included; else empty.
    """

    name: str
    kind: FieldKind
    default: Any
    help: str
    metavar: str | None
    choices: tuple[str, ...]


@cache
def policy_fields() -> tuple[PolicyField, ...]:
    """The fields of :class:`AutotunePolicy`, in the order of declaration."""
    hints = get_type_hints(AutotunePolicy)
    return tuple(
        PolicyField(
            name=item.name,
            kind=item.metadata["kind"],
            default=item.default,
            help=item.metadata["help"],
            metavar=item.metadata.get("metavar"),
            choices=_choices(hints[item.name]) if item.metadata["kind"] == "choice" else (),
        )
        for item in dataclasses.fields(AutotunePolicy)
    )


def _choices(hint: object) -> tuple[str, ...]:
    """The strings of a Literal, or of a union that holds one."""
    found: list[str] = []
    for argument in get_args(hint):
        found += [argument] if isinstance(argument, str) else _choices(argument)
    return tuple(found)


_BRIEFLY = reprlib.Repr()
_BRIEFLY.maxlevel = 3
_BRIEFLY.maxdict = _BRIEFLY.maxlist = _BRIEFLY.maxset = _BRIEFLY.maxfrozenset = _BRIEFLY.maxtuple = 12
_BRIEFLY.maxstring = _BRIEFLY.maxother = _BRIEFLY.maxlong = 120


def shown(value: object) -> str:
    """``value`` for an error message: its repr, on one line, cut where it is long."""
    try:
        # A few lines of YAML, each naming the one before several times, stand for thousands of millions of items.
        container = isinstance(value, (dict, list, set, frozenset, tuple))
        text = " ".join((_BRIEFLY.repr(value) if container else repr(value)).splitlines())
    except Exception:
        # Somebody else's repr may raise, and that of an int of thousands of digits does.
        return f"<{type(value).__name__} that cannot be printed>"
    return text if len(text) <= 120 else f"{text[:117]}..."


def _refusal(name: str, expected: str, value: object, *, at: str = "", then: str = "") -> PolicyError:
    """The error for one field. Every message begins with the field's name: other surfaces replace it by their own."""
    message = f"{name}{at}: expected {expected}, got {shown(value)}"
    return PolicyError(f"{message}; {then}" if then else message, field=name, value=value, expected=expected)


def _or(words: Sequence[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _choice(spec: PolicyField, value: Any) -> str | None:
    if value is None and spec.default is None:
        return None
    usable = [repr(choice) for choice in spec.choices if (spec.name, choice) not in UNAVAILABLE]
    if not isinstance(value, str) or value not in spec.choices:
        unset = ["None (unset)"] if spec.default is None else []
        raise _refusal(spec.name, _or(usable + unset), value)
    if (spec.name, value) in UNAVAILABLE:
        expected = _or(usable)
        raise PolicyError(
            f"{spec.name}: {value!r} is not available in this version; use {expected}",
            field=spec.name,
            value=value,
            expected=expected,
        )
    return spec.choices[spec.choices.index(value)]


def _sequence(name: str, what: str, value: Any) -> Sequence[Any]:
    """``value`` as a sequence of items. Sets are refused with all else: their order, and so the text of a policy, would
    depend on the hash seed."""
    if isinstance(value, (str, os.PathLike)):
        raise _refusal(name, f"a list of {what}", value, then="put it in a list, even if it is the only one")
    if not isinstance(value, Sequence) or isinstance(value, (bytes, bytearray, memoryview)):
        raise _refusal(name, f"a list of {what}", value)
    return value


def _dotted(name: str) -> bool:
    return all(part.isidentifier() for part in name.split("."))


def _modules(spec: PolicyField, value: Any) -> tuple[str, ...]:
    items = _sequence(spec.name, "module names", value)
    for index, item in enumerate(items):
        if not isinstance(item, str) or not _dotted(item):
            raise _refusal(spec.name, "a dotted module name such as 'megatron.core'", item, at=f"[{index}]")
    return tuple(str.__str__(item) for item in items)


def _kernels(spec: PolicyField, value: Any) -> tuple[str, ...]:
    items = _sequence(spec.name, "qualified kernel names", value)
    for index, item in enumerate(items):
        # A kernel made inside a function is called module.function.<locals>.kernel. A name without a module could never
        # match, so it is refused: bare names are not unique.
        parts = item.replace(".<locals>.", ".") if isinstance(item, str) else ""
        if "." not in parts or not _dotted(parts):
            expected = "a qualified name, module and function, such as 'package.module.kernel'"
            raise _refusal(spec.name, expected, item, at=f"[{index}]")
    return tuple(str.__str__(item) for item in items)


def _one_path(name: str, value: Any, *, at: str = "", unset: str = "") -> str:
    path = value
    if isinstance(value, os.PathLike):
        path = os.fspath(value)
    if not isinstance(path, str):
        raise _refusal(name, f"a path (str or os.PathLike){unset}", value, at=at)
    if not path or "\0" in path:
        raise _refusal(name, f"a path that is not empty and holds no NUL{unset}", value, at=at)
    # argparse drops a value that is exactly "--" up to Python 3.12; this spelling of the same path survives.
    return "./--" if path == "--" else str.__str__(path)


def _path(spec: PolicyField, value: Any) -> str | None:
    return None if value is None else _one_path(spec.name, value, unset=", or None")


def _paths(spec: PolicyField, value: Any) -> tuple[str, ...]:
    items = _sequence(spec.name, "folders", value)
    return tuple(_one_path(spec.name, item, at=f"[{index}]") for index, item in enumerate(items))


def _pairs(spec: PolicyField, value: Any) -> tuple[tuple[str, int], ...]:
    if isinstance(value, Mapping):
        items: Sequence[Any] = list(value.items())
    else:
        items = _sequence(spec.name, "NAME=VALUE pairs, or a mapping", value)
    sizes: dict[str, int] = {}
    for index, item in enumerate(items):
        at = "" if isinstance(value, Mapping) else f"[{index}]"
        pair = _split(item) if isinstance(item, str) else item
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise _refusal(spec.name, "a NAME=VALUE pair such as BLOCK_SIZE_M=64", item, at=at)
        name, size = pair
        if not isinstance(name, str) or not name.isidentifier():
            raise _refusal(spec.name, "the name of a kernel parameter, such as 'BLOCK_SIZE_M'", name, at=at)
        if name in sizes:
            raise _refusal(spec.name, f"one value for {name!r}", [sizes[name], size], at=at, then="keep one")
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= _LARGEST:
            raise _refusal(spec.name, f"an integer from 1 to 2**63 - 1 for {name!r}", size, at=at)
        sizes[str.__str__(name)] = int(size)
    return tuple(sorted(sizes.items()))


def _split(text: str) -> tuple[str, int | str] | None:
    """The two sides of ``NAME=VALUE``; a value that is no decimal integer stays text, for the caller to refuse."""
    name, equals, size = text.partition("=")
    if not equals:
        return None
    # The bound on digits keeps int() within its own limit; what is longer is out of range in any case.
    return name, int(size) if re.fullmatch(r"-?[0-9]{1,30}", size) else size


def _count(spec: PolicyField, value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _LARGEST:
        raise _refusal(spec.name, "an integer from 0 to 2**63 - 1", value)
    return int(value)


def _switch(spec: PolicyField, value: Any) -> bool:
    if not isinstance(value, bool):
        quoted = isinstance(value, str) and value.lower() in ("true", "false", "yes", "no", "on", "off")
        raise _refusal(spec.name, "true or false", value, then="write it without quotes" if quoted else "")
    return value


_NORMALISE: Mapping[FieldKind, Callable[[PolicyField, Any], Any]] = {
    "choice": _choice,
    "modules": _modules,
    "kernels": _kernels,
    "paths": _paths,
    "path": _path,
    "pairs": _pairs,
    "count": _count,
    "switch": _switch,
}
