"""Value types: kernel, key, launch config, choice, and what a benchmark found.

Nothing here imports torch or triton; objects of theirs are read by their public attributes alone.

**Encoding of values.** Keys and config parameters are arbitrary Python values. Each is encoded as *canonical JSON
text*, and identity is equality of text. Alternatives were weighed: ``str(value)`` (Megatron-LM's) makes ``True``,
``"True"`` and ``1``/``1.0`` ambiguous; Python equality makes ``True == 1 == 1.0`` one key, as Triton's own cache does;
pickle is neither readable nor safe to read. JSON text is typed, lossless, hashable, sorts without regard to hash seed,
can be read in a review and needs no decoder of ours. JSON has null, booleans, integers and strings; everything else is
a one-member object whose name is the type: ``{"float":"1.0"}`` (``repr``, which round-trips, and keeps ``-0.0``),
``{"tuple":[...]}``, ``{"list":[...]}``, ``{"dtype":"bfloat16"}``, ``{"enum":"module.Class.MEMBER"}`` and so on. The
text is the same in tables, journals, checks between ranks and logs.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Generic, Literal, TypeVar, get_args, overload

__all__ = [
    "CONFIG_DEFAULTS",
    "FALLBACK_PREFIX",
    "RESUMED_PREFIX",
    "SOURCES",
    "CandidateTiming",
    "Choice",
    "ComputedOnce",
    "Environment",
    "Json",
    "Kernel",
    "Key",
    "LaunchConfig",
    "Source",
    "TuningRecord",
    "canonical_json",
    "dtype_name",
    "encode_value",
    "first_detail",
    "is_fallback",
    "natural_order",
    "replaces",
]

_T = TypeVar("_T")


class ComputedOnce(Generic[_T]):
    """A property that is computed at its first use and kept in the object.

    In place of ``functools.cached_property``, which up to Python 3.11 has one lock for all objects of a class: a child
    that is forked while another thread computes one would wait for that thread for ever. Here two threads may compute
    the same value, and either is kept.
    """

    def __init__(self, compute: Callable[[Any], _T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type[Any], name: str) -> None:
        self._name = name

    @overload
    def __get__(self, instance: None, owner: type[Any]) -> ComputedOnce[_T]: ...
    @overload
    def __get__(self, instance: object, owner: type[Any]) -> _T: ...
    def __get__(self, instance: Any, owner: type[Any]) -> Any:
        if instance is None:
            return self
        value = instance.__dict__[self._name] = self._compute(instance)
        return value


Json = Any
"""A value made of None, bool, int, str, list and dict with string keys."""

Source = Literal["exact", "block_sizes", "wildcard", "nearest", "model", "cheapest", "chaos", "timed"]
"""Which rule made a choice. ``timed``: Triton's own benchmark did."""

SOURCES: tuple[Source, ...] = get_args(Source)


def canonical_json(value: Json) -> str:
    """Compact JSON text with sorted members: equal values give equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def dtype_name(dtype: object) -> str:
    """Name of a dtype without its library's prefix: ``torch.bfloat16`` gives ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


_LONGEST_DECIMAL_BITS = 8192


def _qualified(obj: Any) -> str:
    return f"{getattr(obj, '__module__', '?')}.{getattr(obj, '__qualname__', getattr(obj, '__name__', '?'))}"


def _to_json(value: Any) -> Json:
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        # Python refuses to write longer ones in decimal.
        return value if value.bit_length() <= _LONGEST_DECIMAL_BITS else {"int": hex(value)}
    if kind is float:
        return {"float": repr(value)}
    if isinstance(value, enum.Enum):
        return {"enum": f"{_qualified(kind)}.{value.name}"}
    if kind is tuple:
        return {"tuple": [_to_json(item) for item in value]}
    if kind is list:
        return {"list": [_to_json(item) for item in value]}
    if kind is dict:
        pairs = [[canonical_json(_to_json(k)), _to_json(v)] for k, v in value.items()]
        return {"dict": sorted(pairs, key=lambda pair: str(pair[0]))}
    if kind is bytes:
        return {"bytes": value.hex()}
    if kind is complex:
        return {"complex": [repr(value.real), repr(value.imag)]}
    if kind is frozenset or kind is set:
        return {kind.__name__: sorted((_to_json(item) for item in value), key=canonical_json)}
    if kind is range:
        return {"range": [value.start, value.stop, value.step]}
    if kind is functools.partial:
        return {"partial": [_to_json(value.func), _to_json(value.args), _to_json(value.keywords)]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [[field.name, _to_json(getattr(value, field.name))] for field in dataclasses.fields(value)]
        return {"dataclass": [_qualified(kind), fields]}
    module = kind.__module__ or ""
    root = module.partition(".")[0]
    if root == "torch" and kind.__name__ == "dtype":
        return {"dtype": dtype_name(value)}
    if root == "numpy" and not isinstance(value, type):
        if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
            item = value.item()
            # Where Python has no such type (long double), the item is the value again.
            return {"numpy": [str(value.dtype), repr(item) if type(item) is kind else _to_json(item)]}
        if "dtype" in kind.__name__.lower():
            return {"dtype": f"numpy.{value}"}
    if root == "torch" and kind.__name__ in ("device", "layout", "memory_format"):
        return {f"torch.{kind.__name__}": str(value)}
    if root in ("decimal", "_decimal", "fractions") and kind.__name__ in ("Decimal", "Fraction"):
        return {kind.__name__.lower(): str(value)}
    if root == "triton":
        if kind.__name__ == "constexpr":
            return {"constexpr": _to_json(value.value)}
        if kind.__name__ == "dtype":
            return {"dtype": f"triton.{value}"}
    if isinstance(value, type):
        return {"class": _qualified(value)}
    if hasattr(value, "dtype"):
        # Reading a device tensor would synchronise and the value would differ between steps: only its dtype is a key.
        return {"tensor": dtype_name(value.dtype)}
    if callable(value):
        function = getattr(value, "fn", value)
        code = getattr(function, "__code__", None)
        name = _qualified(function)
        # Names of functions made inside of others are not unique; the line of their code tells most of them apart.
        return {"function": name if code is None or "<" not in name else f"{name}:{code.co_firstlineno}"}
    if isinstance(value, (bool, int, float, str)):
        base = next(base for base in (bool, int, float, str) if isinstance(value, base))
        return {"subclass": [_qualified(kind), _to_json(base(value))]}
    if isinstance(value, tuple):
        return {"subclass": [_qualified(kind), [_to_json(item) for item in value]]}
    # No stable text exists for an unknown object (its repr may hold an address): its type is all that is kept.
    return {"opaque": _qualified(kind)}


def encode_value(value: object) -> str:
    """The canonical JSON text of one key value or config parameter; see the module's docstring.

    Two values have one text exactly when they have the same type and content. Tensors are encoded by dtype alone,
    functions by name, and objects of unknown type by their type alone (``opaque``).
    """
    return canonical_json(_to_json(value))


def natural_order(text: str) -> tuple[int, int, str]:
    """Sort key of encoded values: integers by number, then everything else by text."""
    value = json.loads(text)
    return (0, value, text) if type(value) is int else (1, 0, text)


@dataclass(frozen=True)
class Kernel:
    """A kernel: where it is defined, and a hash of its source.

    Attributes:
        qualified_name: module and qualified name of the Python function, joined by a dot.
        source_hash: hex digest of the kernel's own source text, or None where the source is not at hand.
    """

    qualified_name: str
    source_hash: str | None = field(default=None, compare=False)

    @property
    def package(self) -> str:
        """Top-level package: ``mamba_ssm`` of ``mamba_ssm.ops.triton.ssd_bmm._bmm_chunk_fwd_kernel``."""
        return self.qualified_name.partition(".")[0]

    @property
    def bare_name(self) -> str:
        """The function's name alone. Not unique: FLA reuses twelve, megatron.core copies seven of mamba_ssm's."""
        return self.qualified_name.rpartition(".")[2]


@dataclass(frozen=True)
class Key:
    """What a choice may depend on at a launch: the declared key values and the dtypes of the tensor arguments.

    Attributes:
        values: (name, encoded value) of each key argument, in the order in which the autotuner declares them.
        dtypes: (argument name, dtype) of each tensor argument, in the order of the kernel's signature.
        call_order: names of the tensor arguments as the caller passed them. Not part of identity: it is kept so that
            formats which know only a sequence of dtypes can be written.
    """

    values: tuple[tuple[str, str], ...]
    dtypes: tuple[tuple[str, str], ...] = ()
    call_order: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def of(
        cls, values: Mapping[str, object], dtypes: Mapping[str, object] | None = None, call_order: Iterable[str] = ()
    ) -> Key:
        """Build a key from plain Python values; ``dtypes`` may hold dtypes or their names."""
        return cls(
            tuple((name, encode_value(value)) for name, value in values.items()),
            tuple((name, dtype_name(dtype)) for name, dtype in (dtypes or {}).items()),
            tuple(call_order),
        )

    @classmethod
    def from_json(cls, data: Json) -> Key:
        """Inverse of :meth:`to_json`; the shape of ``data`` is the caller's to check."""
        return cls(
            tuple((name, canonical_json(value)) for name, value in data["values"]),
            tuple((name, dtype) for name, dtype in data["dtypes"]),
            tuple(data.get("call_order", ())),
        )

    def to_json(self) -> Json:
        """Lossless JSON form, the order of members included."""
        data: dict[str, Json] = {
            "values": [[name, json.loads(text)] for name, text in self.values],
            "dtypes": [[name, dtype] for name, dtype in self.dtypes],
        }
        if self.call_order:
            data["call_order"] = list(self.call_order)
        return data

    @ComputedOnce
    def text(self) -> str:
        """Canonical text: equal for equal keys, whatever the order of declaration."""
        return canonical_json(
            {
                "dtypes": sorted([name, dtype] for name, dtype in self.dtypes),
                "values": sorted([name, text] for name, text in self.values),
            }
        )

    @ComputedOnce
    def values_text(self) -> str:
        """Canonical text of the values alone, for entries that know no argument names for their dtypes."""
        return canonical_json(sorted([name, text] for name, text in self.values))

    @property
    def dtype_sequence(self) -> tuple[str, ...]:
        """Dtypes in the order of the kernel's signature."""
        return tuple(dtype for _, dtype in self.dtypes)

    @property
    def call_dtype_sequence(self) -> tuple[str, ...]:
        """Dtypes in the order of the call, as other systems record them; the signature's order where not known."""
        by_name = dict(self.dtypes)
        if not self.call_order:
            return self.dtype_sequence
        return tuple(by_name[name] for name in self.call_order if name in by_name)

    def __str__(self) -> str:
        values = [f"{name}={text}" for name, text in self.values]
        dtypes = [f"{name}:{dtype}" for name, dtype in self.dtypes]
        return " ".join(values + dtypes) or "(empty key)"


CONFIG_DEFAULTS: Mapping[str, Json] = {"num_ctas": 1, "maxnreg": None, "ir_override": None}
"""Fields of ``triton.Config`` that may be left out of a file, and what leaving them out means."""

_CORE_FIELDS = ("num_warps", "num_stages", "num_ctas", "maxnreg", "ir_override")
# Triton 3.2 and 3.3 carry four warp-specialisation fields whose neutral value is 0 (or None under the interpreter).
# A config that leaves them neutral is the same config on every version, so neutral values are not part of identity.
_KNOWN_FIELDS = frozenset((*_CORE_FIELDS, "kwargs", "pre_hook"))
# Values whose equality, given equal types, is equality of their encoding.
_INTERNED = frozenset((int, str, bool, type(None)))


@lru_cache(maxsize=1 << 16)
def _interned(names: tuple[str, ...], extra: tuple[str, ...], values: tuple[Any, ...], kinds: tuple[type, ...]) -> Any:
    """One object per content: a kernel meets the same few candidates at each new key, and encoding costs most."""
    count, end = len(names), len(names) + len(extra)
    return LaunchConfig.build(
        dict(zip(names, values, strict=False)),
        extra=dict(zip(extra, values[count:end], strict=True)),
        **dict(zip(_CORE_FIELDS, values[end:], strict=True)),
    )


@dataclass(frozen=True)
class LaunchConfig:
    """One candidate, as plain data: everything in a ``triton.Config`` that changes the compiled kernel, and no hooks.

    Attributes:
        kwargs: (name, encoded value), sorted by name.
        num_warps, num_stages, num_ctas, maxnreg, ir_override: as in ``triton.Config``.
        extra: (name, encoded value) of fields that a vendor or a version adds and that are not neutral, sorted by name.
    """

    kwargs: tuple[tuple[str, str], ...]
    num_warps: int | None = 4
    num_stages: int | None = 3
    num_ctas: int | None = 1
    maxnreg: int | None = None
    ir_override: str | None = None
    extra: tuple[tuple[str, str], ...] = ()

    @classmethod
    def of(cls, config: Any) -> LaunchConfig:
        """Read a live ``triton.Config`` of any supported version, or any object with its attributes."""
        fields = vars(config)
        core = tuple(fields.get(name, CONFIG_DEFAULTS.get(name)) for name in _CORE_FIELDS)
        extra = [
            (name, value)
            for name, value in fields.items()
            if name not in _KNOWN_FIELDS
            and value is not None
            and not (type(value) is int and value == 0)
            and not name.startswith("_")
        ]
        kwargs = config.kwargs
        values = (*kwargs.values(), *(value for _, value in extra), *core)
        kinds = tuple(map(type, values))
        if all(kind in _INTERNED for kind in kinds):
            interned: LaunchConfig = _interned(tuple(kwargs), tuple(name for name, _ in extra), values, kinds)
            return interned
        return cls.build(kwargs, extra=dict(extra), **dict(zip(_CORE_FIELDS, core, strict=True)))

    @classmethod
    def build(
        cls, kwargs: Mapping[str, object], *, extra: Mapping[str, object] | None = None, **core: Any
    ) -> LaunchConfig:
        """Build from plain values: ``LaunchConfig.build({"BLOCK": 64}, num_warps=8)``."""
        return cls(
            tuple(sorted((name, encode_value(value)) for name, value in kwargs.items())),
            extra=tuple(sorted((name, encode_value(value)) for name, value in (extra or {}).items())),
            **core,
        )

    @classmethod
    def from_json(cls, data: Json) -> LaunchConfig:
        """Inverse of :meth:`to_json`; the shape of ``data`` is the caller's to check."""
        return cls(
            tuple(sorted((name, canonical_json(value)) for name, value in data["kwargs"].items())),
            extra=tuple(sorted((name, canonical_json(value)) for name, value in data.get("extra", {}).items())),
            **{name: data.get(name, CONFIG_DEFAULTS.get(name)) for name in _CORE_FIELDS},
        )

    def to_json(self) -> Json:
        """JSON form: ``kwargs``, ``num_warps``, ``num_stages``, and only those other fields that are not default."""
        data: dict[str, Json] = {
            "kwargs": {name: json.loads(text) for name, text in self.kwargs},
            "num_warps": self.num_warps,
            "num_stages": self.num_stages,
        }
        for name, default in CONFIG_DEFAULTS.items():
            if getattr(self, name) != default:
                data[name] = getattr(self, name)
        if self.extra:
            data["extra"] = {name: json.loads(text) for name, text in self.extra}
        return data

    @ComputedOnce
    def text(self) -> str:
        """Canonical text: equal exactly for equal configs."""
        return canonical_json(self.to_json())

    @ComputedOnce
    def order(self) -> tuple[object, ...]:
        """Canonical order among configs: parameters by name, integers by number, then the launch fields."""
        return (
            tuple((name, natural_order(text)) for name, text in self.kwargs),
            *(-1 if n is None else n for n in (self.num_warps, self.num_stages, self.num_ctas, self.maxnreg)),
            self.ir_override or "",
            tuple((name, natural_order(text)) for name, text in self.extra),
        )

    def __str__(self) -> str:
        parts = [f"{name}={text}" for name, text in self.kwargs]
        parts += [f"num_warps={self.num_warps}", f"num_stages={self.num_stages}"]
        rest = {name: getattr(self, name) for name in CONFIG_DEFAULTS}
        parts += [f"{name}={value}" for name, value in rest.items() if value != CONFIG_DEFAULTS[name]]
        parts += [f"{name}={text}" for name, text in self.extra]
        return " ".join(parts)


FALLBACK_PREFIX = "in place of "
"""How the detail of a choice begins that stands in for one that could not be launched."""

RESUMED_PREFIX = "resumed from a checkpoint"
"""How the detail of a choice begins that a checkpoint carried over; what it said before follows after ``"; "``."""


def first_detail(detail: str) -> str:
    """What the detail of a choice said when it was first made, before any checkpoint carried it over."""
    while detail.startswith(RESUMED_PREFIX):
        detail = detail[len(RESUMED_PREFIX) :].removeprefix("; ")
    return detail


def is_fallback(detail: str) -> bool:
    """Whether a choice of this detail stands in for one that could not be launched, carried over or not."""
    return first_detail(detail).startswith(FALLBACK_PREFIX)


def replaces(detail: str, config: LaunchConfig) -> bool:
    """Whether a choice of this detail stands in for ``config``."""
    return first_detail(detail).startswith(f"{FALLBACK_PREFIX}{config}, ")


@dataclass(frozen=True, eq=False)
class Choice:
    """What was chosen for one kernel and key, by which rule, and from where.

    Attributes:
        kernel: qualified name.
        key: the key.
        config: the live ``triton.Config`` that is launched, hooks intact; never a rebuilt one.
        source: the rule that made the choice.
        origin: path of the table file, or None where no table was involved.
        arch: the architecture it was made for.
        detail: more in words, such as which entry was nearest and how far away, or what a fallback replaced.
    """

    kernel: str
    key: Key
    config: Any
    source: Source
    origin: str | None
    arch: str
    detail: str = ""

    @ComputedOnce
    def launch_config(self) -> LaunchConfig:
        """The config as plain data."""
        return LaunchConfig.of(self.config)

    @property
    def is_fallback(self) -> bool:
        """Whether it stands in for a choice that could not be launched."""
        return is_fallback(self.detail)

    def __eq__(self, other: object) -> bool:
        # By content: Triton 3.2 compares configs by identity, later versions in keyword order and hooks included.
        return isinstance(other, Choice) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @ComputedOnce
    def _identity(self) -> tuple[object, ...]:
        return (self.kernel, self.key.text, self.launch_config.text, self.source, self.origin, self.arch, self.detail)

    def to_json(self) -> Json:
        """JSON form for logs and manifests; the config as plain data."""
        return {
            "kernel": self.kernel,
            "key": self.key.to_json(),
            "config": self.launch_config.to_json(),
            "source": self.source,
            "origin": self.origin,
            "arch": self.arch,
            "detail": self.detail,
        }


@dataclass(frozen=True)
class Environment:
    """Where timings were taken. Strings are empty and counts 0 where something is not known.

    Attributes:
        arch: Triton's target, such as ``sm90``; ``cpu`` without a GPU target.
        device: the device's name.
        multiprocessors: number of multiprocessors.
        triton, torch, python: versions.
        packages: (name, version) of the distributions whose kernels are recorded.
        rank, world_size: of the process.
        host: host name.
    """

    arch: str
    device: str = ""
    multiprocessors: int = 0
    triton: str = ""
    torch: str = ""
    python: str = ""
    packages: tuple[tuple[str, str], ...] = ()
    rank: int = 0
    world_size: int = 1
    host: str = ""


@dataclass(frozen=True)
class CandidateTiming:
    """One candidate's benchmark.

    Attributes:
        config: the candidate.
        times_ms: median, 20th and 80th percentile in milliseconds, as Triton's benchmarker gives them; None
            if it failed.
        error: why it failed, in one line; None if it did not.
    """

    config: LaunchConfig
    times_ms: tuple[float, ...] | None
    error: str | None = None


@dataclass(frozen=True)
class TuningRecord:
    """What one benchmark of one key found on one rank.

    Attributes:
        kernel: the kernel.
        key: the typed key of the launch that set it off.
        arch: the architecture.
        timings: every candidate that survived pruning, failures included, in Triton's order.
        winner: the config that Triton launches from then on.
        shared: True where Triton had already timed an equal key of another type (``True``, ``1`` and ``1.0`` share one
            of its slots), and these are those timings.
        specialization: what else the compiler saw at that launch, as JSON; None where it is not known.
        note: a warning worth keeping, such as an argument outside the key that the result depends on.
    """

    kernel: Kernel
    key: Key
    arch: str
    timings: tuple[CandidateTiming, ...]
    winner: LaunchConfig
    shared: bool = False
    specialization: Json = None
    note: str = ""
