"""Take over Triton's autotuners. The only module that names Triton's runtime internals.

The seam is the class: ``Autotuner.run``, ``.warmup`` and ``._bench`` are replaced on
``triton.runtime.autotuner.Autotuner`` itself, so every autotuner is reached however it was made: by
``triton.autotune``, under another name, built directly, by a subclass that calls through, before or after installation.
Replacing ``triton.autotune`` instead was rejected: it misses what is already decorated and what swaps the decorator.

What to do is decided elsewhere and passed in as :class:`Callbacks`; this module knows how.

**First launch of a key.** Everything happens on a *shadow*: a shallow copy of the autotuner, on which Triton's own
``prune_configs`` and ``run`` are called. Triton keeps per-launch state on the object (``nargs``, ``cache``,
``configs_timings``); on a shadow that state is private to the launch, so two threads cannot mix it up and nothing is
left behind on the real one. Pinned, the shadow has one candidate, which Triton launches without a benchmark.
Recording, the shadow has an empty cache and no disk cache, so that Triton times afresh.

**Later launches.** One dict lookup by raw key (see :mod:`tuning._launch_key`), then the JIT launch. ``best_config`` is
set before each launch: mamba_ssm's backward reads it afterwards to size its reductions. It is one attribute of one
object, as in Triton: of two threads that launch different keys of one autotuner at once, either may win. A hook that a
config is given later is called, as in Triton. Another list of candidates is noticed at once; a list that is changed in
place is noticed at the next new key or new kind of launch, since looking through it would cost every launch.

**Subclasses that need not call Triton's run** are reached by their own ``run``, which is replaced too, also where they
are defined later (:mod:`tuning._launch_methods` says which): it launches in its own way, on a shadow that has the
chosen candidate alone. Whether it heeds that is seen by the ``best_config`` that it leaves, and said where not.

**What is timed past all that**, by a ``run`` that was put there later or on the object, is counted where it reaches
``_bench`` or ``do_bench``, and said by name. A ``run`` that neither calls Triton's nor times by these is not seen.

**What hooks see.** A hook of a config gets the arguments by name, as in Triton. ``kernel.nargs``, which Triton sets on
the object for the time of a launch, is there while a pruner runs and not while a pinned launch's hooks do.

**Fallback.** A config that runs out of resources is replaced by the next in the decision's order, remembered per
specialization, since the compiler sees more than the key. Any other error of a launch is the caller's.

Differences between Triton 3.2 and 3.9 are met here: configs compare by identity in 3.2, ``PTXASError`` exists from 3.3,
``do_bench`` is a cached property from 3.4, and up to 3.7 a single surviving candidate is still benchmarked.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import inspect
import logging
import math
import operator
import re
import statistics
import textwrap
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, cast

from ._launch_arguments import CannotBeCopied, Copies, form_name, launch_form
from ._launch_key import KeyReader, constexpr_names
from ._launch_methods import Stopwatch, closed_kinds, is_closed, own_run, reaches_base
from ._launch_pointers import copies_to_replay
from ._launch_specialization import identity, jit_function, parameters, read_launch
from ._launch_within import Within, capturing, rehearse
from ._patches import ABSENT, Patch, leave_beneath, take_back
from .errors import TuningError, UnsupportedTritonError
from .spec import FALLBACK_PREFIX, CandidateTiming, Choice, Json, Kernel, Key, LaunchConfig, TuningRecord, dtype_name

__all__ = [
    "SUPPORTED_TRITON",
    "AutotunerFacts",
    "Callbacks",
    "DecisionLike",
    "Interception",
    "Treatment",
    "current_arch",
    "device_facts",
    "facts",
    "find_autotuner",
    "kernel_name",
    "launch_specialization",
    "live_candidates",
    "resource_errors",
    "running_under_interpreter",
    "seen_parameters",
    "source_hash",
    "supported_triton",
]

logger = logging.getLogger("tuning.interception")

SUPPORTED_TRITON = ((3, 2), (3, 10))
"""Versions of Triton that are supported: from the first, up to but without the second."""

Treatment = Literal["pinned", "record", "observe", "ignore"]
"""What happens to one autotuner: one candidate is chosen without a clock; Triton times and every timing is kept; Triton
decides and its choices are noted; or nothing at all. An autotuner with a single config is never more than ignored."""


# --- facts about Triton and its objects -------------------------------------------------------------------------------


def supported_triton() -> str:
    """The installed Triton's version.

    Raises:
        UnsupportedTritonError: Triton is missing, outside the supported range, or lacks a method that is replaced.
    """
    low, high = SUPPORTED_TRITON
    supported = f">={low[0]}.{low[1]},<{high[0]}.{high[1]}"
    try:
        import triton
        from triton.runtime.autotuner import Autotuner
    except ImportError as error:
        raise UnsupportedTritonError(
            f"triton cannot be imported ({error}): install triton{supported}", found=None, supported=supported
        ) from error
    found = str(triton.__version__)
    match = re.match(r"(\d+)\.(\d+)", found)
    if match is None or not low <= (int(match[1]), int(match[2])) < high:
        raise UnsupportedTritonError(
            f"triton {found} is not supported: expected triton{supported}; "
            "install a supported version, or a newer triton-tuning",
            found=found,
            supported=supported,
        )
    missing = [name for name in ("run", "warmup", "_bench", "prune_configs") if name not in vars(Autotuner)]
    if missing:
        raise UnsupportedTritonError(
            f"triton {found}: Autotuner has no {', '.join(missing)}; expected the autotuner of triton{supported}",
            found=found,
            supported=supported,
        )
    return found


def running_under_interpreter() -> bool:
    """Whether kernels run in Triton's interpreter (``TRITON_INTERPRET=1``)."""
    import triton

    knobs = getattr(triton, "knobs", None)
    if knobs is not None:
        return bool(knobs.runtime.interpret)
    import os

    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def current_arch() -> str:
    """Triton's current target: ``sm90``, ``gfx942`` and so on; ``cpu`` where there is no GPU target."""
    from triton.runtime.driver import driver

    if running_under_interpreter():
        return "cpu"
    try:
        current_target = driver.active.get_current_target
    except Exception:
        # No active driver is a RuntimeError or an AssertionError, by version; a driver of a test may lack the method.
        return "cpu"
    # A driver that is there and fails is not the absence of a GPU: its error is the caller's to see.
    target = current_target()
    arch = getattr(target, "arch", None)
    if getattr(target, "backend", None) == "cuda":
        return f"sm{arch}"
    return str(arch).partition(":")[0] if arch else "cpu"


def device_facts() -> tuple[str, int]:
    """Name and number of multiprocessors of the current device; ``("", 0)`` where there is no GPU or none is known."""
    import sys

    torch = sys.modules.get("torch")
    if torch is None or running_under_interpreter() or not torch.cuda.is_available():
        return "", 0
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return str(properties.name), int(properties.multi_processor_count)


def source_hash(function: Callable[..., Any]) -> str | None:
    """Hash of a kernel's own source, from ``def`` on: decorators, and so candidate lists, are not part of it.

    Functions that the kernel calls are not covered. None where the source is not at hand.
    """
    try:
        source = textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        return None
    match = re.search(r"^(async\s+)?def\s", source, re.MULTILINE)
    text = source[match.start() :] if match else source
    return hashlib.sha256(text.rstrip().encode()).hexdigest()[:16]


def find_autotuner(obj: object) -> tuple[Any, tuple[str, ...]] | None:
    """The autotuner inside a decorated kernel and the names of what is wrapped around it, outermost first; or None."""
    from triton.runtime.autotuner import Autotuner

    wrappers: list[str] = []
    for _ in range(16):
        if isinstance(obj, Autotuner):
            return obj, tuple(wrappers)
        inner = getattr(obj, "fn", None)
        if inner is None or inspect.isfunction(obj) or inspect.isclass(obj) or inspect.ismodule(obj):
            return None
        wrappers.append(type(obj).__name__)
        obj = inner
    return None


@dataclass(frozen=True)
class AutotunerFacts:
    """What can be read off an autotuner without launching it.

    Attributes:
        kernel: qualified name and source hash.
        candidates: its candidates as plain data, in order.
        key_names: the declared key.
        arg_names: the kernel's parameters.
        reset_to_zero, restore_value: argument names that Triton resets or restores while benchmarking.
        hooks: which hooks exist: ``pre_hook``, ``post_hook`` (the caller's own), ``config.pre_hook``.
        pruner: ``early_config_prune``, ``perf_model``, both joined by ``+``, or empty.
        inner: names of what stands between the autotuner and the kernel, such as ``Heuristics``.
        class_name: qualified name of the autotuner's class.
        own_run: True where a subclass, a mixin of it, or the object itself replaces ``run``.
        calls_through: False where that ``run`` need not call the one it replaces. Pinned, it is given the chosen
            candidate alone; recording does not reach it.
        cache_results: True where Triton would keep timings on disk.
        on_object: True where ``run`` is set on the object itself: what it does is not known, and no policy reaches it
            but where it calls the class's.
    """

    kernel: Kernel
    candidates: tuple[LaunchConfig, ...]
    key_names: tuple[str, ...]
    arg_names: tuple[str, ...]
    reset_to_zero: tuple[str, ...]
    restore_value: tuple[str, ...]
    hooks: tuple[str, ...]
    pruner: str
    inner: tuple[str, ...]
    class_name: str
    own_run: bool
    calls_through: bool
    cache_results: bool
    on_object: bool = False


def kernel_name(function: Any) -> str:
    """Module and qualified name; what ``python -m pkg.train`` runs is ``pkg.train``, as where it is imported."""
    module = function.__module__
    if module in ("__main__", "__mp_main__"):  # the latter in a process that multiprocessing spawned
        spec = getattr(function, "__globals__", {}).get("__spec__")
        module = "__main__" if spec is None else spec.name
    return f"{module}.{function.__qualname__}"


def _kernel_of(autotuner: Any) -> Kernel:
    function = autotuner.base_fn
    return Kernel(kernel_name(function), source_hash(function))


def facts(autotuner: Any) -> AutotunerFacts:
    """Read an autotuner; nothing is launched, compiled or changed."""
    from triton.runtime.autotuner import Autotuner

    inner: list[str] = []
    layer = autotuner.fn
    while not inspect.isfunction(getattr(layer, "fn", None)) and getattr(layer, "fn", None) is not None:
        inner.append(type(layer).__name__)
        layer = layer.fn
    hooks = [name for name in ("pre_hook", "post_hook") if getattr(autotuner, f"user_defined_{name}", False)]
    if any(config.pre_hook is not None for config in autotuner.configs):
        hooks.append("config.pre_hook")
    pruners = [name for name in ("early_config_prune", "perf_model") if getattr(autotuner, name, None)]
    kind = type(autotuner)
    own = own_run(kind, Autotuner)
    on_object = "run" in vars(autotuner)
    return AutotunerFacts(
        kernel=_kernel_of(autotuner),
        candidates=tuple(LaunchConfig.of(config) for config in autotuner.configs),
        key_names=tuple(autotuner.keys),
        arg_names=tuple(autotuner.arg_names),
        reset_to_zero=tuple(autotuner.reset_to_zero),
        restore_value=tuple(autotuner.restore_value),
        hooks=tuple(hooks),
        pruner="+".join(pruners),
        inner=tuple(inner),
        class_name=f"{kind.__module__}.{kind.__qualname__}",
        own_run=on_object or own is not None,
        calls_through=not on_object and (own is None or reaches_base(_before_us(own[1]), Autotuner)),
        cache_results=bool(getattr(autotuner, "cache_results", False)),
        on_object=on_object,
    )


def resource_errors() -> tuple[type[BaseException], ...]:
    """What Triton raises where a config cannot be compiled or launched for lack of resources."""
    from triton.compiler.errors import CompileTimeAssertionFailure
    from triton.runtime import errors

    found: list[type[BaseException]] = [errors.OutOfResources, CompileTimeAssertionFailure]
    if hasattr(errors, "PTXASError"):
        found.append(errors.PTXASError)
    return tuple(found)


# --- what the compiler sees -------------------------------------------------------------------------------------------


def _binder(jit: Any) -> Callable[..., Any]:
    """The function of a JIT function that binds arguments and specialises on them, for the current device."""
    from triton.runtime.driver import driver

    if hasattr(jit, "device_caches"):
        found: Callable[..., Any] = jit.device_caches[driver.active.get_current_device()][-1]
        return found
    if jit.binder is None:  # Triton 3.2
        from triton.compiler import make_backend

        jit.create_binder(make_backend(driver.active.get_current_target()))
    binder: Callable[..., Any] = jit.binder
    return binder


def launch_specialization(autotuner: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Json:
    """What the compiler sees of a launch besides its config, as JSON; None where nothing is compiled, or not known.

    :mod:`tuning._launch_specialization` says what it holds. Nothing is compiled or launched.
    """
    jit = jit_function(autotuner)
    if jit is None:
        return None
    try:
        import triton

        return read_launch(autotuner, jit, _binder(jit), args, kwargs, str(triton.__version__))
    except Exception as error:
        # It costs a later start some time, and must never cost a recording its timings.
        logger.warning("%s: its specialization cannot be read: %s", _kernel_of(autotuner).qualified_name, error)
        return None


def seen_parameters(autotuner: Any, named: Mapping[str, Any]) -> Json:
    """Types and specializations that the compiler sees for arguments by name; see :func:`launch_specialization`."""
    jit = jit_function(autotuner)
    return None if jit is None else parameters(jit, _binder(jit), named)


_pruning = threading.RLock()


def live_candidates(autotuner: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The candidates that a kernel's own pruning leaves for a launch."""
    named = dict(zip(autotuner.arg_names, args, strict=False))
    shadow = _shadow(autotuner, nargs=named)
    if not (autotuner.early_config_prune or autotuner.perf_model):
        return list(shadow.prune_configs(kwargs))
    # A pruner may know its kernel and read the arguments off it, where Triton puts them. One thread at a time: what a
    # pruner leaves may depend on them, and must not depend on what another thread launches.
    with _pruning:
        before = vars(autotuner).get("nargs", ABSENT)
        autotuner.nargs = named
        try:
            return list(shadow.prune_configs(kwargs))
        finally:
            if before is ABSENT:
                del autotuner.nargs
            else:
                autotuner.nargs = before


# --- the seam ---------------------------------------------------------------------------------------------------------


class DecisionLike(Protocol):
    """What ``decide`` returns: the choice, and the live candidates left, chosen first, then in order of fallback.

    It may also have ``free`` (:mod:`tuning._selection_classes`): then each rank may launch what it finds the fastest of
    the chosen config's class.
    """

    @property
    def choice(self) -> Choice: ...  # noqa: D102
    @property
    def order(self) -> Sequence[Any]: ...  # noqa: D102


class Callbacks(Protocol):
    """What interception asks, and whom it tells. Called off the hot path; must be safe from several threads."""

    def reached(self, autotuner: AutotunerFacts) -> Treatment:
        """An autotuner is launched for the first time. Answers what to do with it."""

    def in_scope(self, kernel: str) -> bool:
        """Whether benchmarks of this kernel are counted."""

    def decide(self, kernel: Kernel, key: Key, arch: str, candidates: Sequence[Any]) -> DecisionLike:
        """A pinned autotuner meets a new key. May raise; the error reaches the caller of the kernel."""

    def chosen(self, choice: Choice) -> None:
        """A choice took effect, whether made by ``decide``, by a fallback, or by Triton."""

    def recorded(self, record: TuningRecord) -> None:
        """Recording: a key was timed. May raise."""

    def benchmarked(self, kernel: str) -> None:
        """One candidate of a kernel in scope is about to be timed."""

    def unreached(self, kernel: str, problem: str) -> None:
        """Candidates of a kernel in scope are timed past the policy: ``problem`` says by what, and what to do."""

    def traced(self, kernel: str, treatment: Treatment, key: Key | None) -> None:
        """A kernel is traced into a compiled graph; with its key where it is pinned there."""


_NearTies = Callable[[Sequence["Sequence[float] | None"]], Sequence[int]]
_WatchOutputs = Callable[[Any, Kernel, "tuple[Any, ...]", Any], "Callable[[Any], str] | None"]


class _Entry:
    """What a hit needs, for one key of one autotuner."""

    __slots__ = ("config", "decision", "fallbacks", "key", "kwargs", "noted", "within")

    def __init__(self, config: Any, key: Key, decision: DecisionLike | None) -> None:
        self.config = config
        self.kwargs: dict[str, Any] = config.all_kwargs()
        self.key = key
        self.decision = decision
        self.noted = False  # whether `chosen` was told that this config was launched
        free = getattr(decision, "free", None)
        self.within = None if free is None else Within(free)
        # None but where a hit has to look at more than the key.
        self.fallbacks: Mapping[tuple[Any, ...], _Entry] | None = None if free is None else {}


class _Plan:
    """All that is remembered of one autotuner while a policy is installed."""

    __slots__ = (
        "by_text",
        "configs",
        "entries",
        "fast",
        "kernel",
        "lock",
        "members",
        "pinned",
        "reader",
        "ref",
        "slots",
        "specializations",
        "treatment",
        "unkeyed",
        "warned",
        "winners",
    )

    def __init__(self, autotuner: Any, treatment: Treatment, kernel: Kernel, ref: weakref.ref[Any]) -> None:
        self.ref = ref
        self.treatment = treatment
        self.pinned = treatment == "pinned"
        self.kernel = kernel
        self.configs = autotuner.configs
        self.members = tuple(autotuner.configs)
        self.reader = KeyReader(autotuner.arg_names, autotuner.keys, constexpr_names(autotuner.base_fn))
        self.fast = self.reader.fast
        self.entries: dict[Any, _Entry] = {}
        self.by_text: dict[str, _Entry] = {}
        self.lock = threading.RLock()  # taken off the hot path only; re-entrant because hooks may launch kernels
        self.slots: dict[Any, tuple[tuple[CandidateTiming, ...], Any]] = {}
        self.unkeyed: dict[str, dict[str, str]] = {}
        self.warned: set[str] = set()
        self.winners: dict[str, dict[Any, Any]] = {}  # what a subclass's own run keeps, by the candidate it was given
        # By key: launches told apart as finely as cheaply, and what of it differs for the compiler.
        self.specializations: dict[str, tuple[set[tuple[Any, ...]], set[str]]] = {}

    def is_of(self, autotuner: Any) -> bool:
        """Whether the candidates are still those that were planned for: the same objects in the same list."""
        now = autotuner.configs
        return self.configs is now and len(now) == len(self.members) and all(map(operator.is_, now, self.members))

    def remember(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], entry: _Entry) -> None:
        """Let later launches like this one find the entry by raw key."""
        with self.lock:
            raw = self.reader.raw(args, kwargs)
            if self.fast is not self.reader.fast:
                # A key value of a new kind changed the shape of raw keys: those kept so far can no longer match. A
                # thread that pairs an old dict with the new extractor, or the other way round, finds nothing: raw
                # keys of the two shapes are never equal.
                self.entries = {}
                self.fast = self.reader.fast
            with contextlib.suppress(TypeError):  # an argument's dtype cannot be hashed: found by text each time
                self.entries[raw] = entry


def _named_like(original: Any, replacement: Any) -> Any:
    for name in ("__name__", "__qualname__", "__doc__"):
        if hasattr(original, name):  # a partial method has no name
            setattr(replacement, name, getattr(original, name))
    replacement.__wrapped__ = original
    return replacement


def _before_us(method: Any) -> Any:
    """What stands below a ``run`` that is ours."""
    return method._tuning_below if getattr(method, "_tuning_closed", False) else method


_DECIDED = "_tuning_decided"
"""Attribute of shadows: what they launch, and whether they time, was decided here."""


def _shadow(autotuner: Any, **changes: Any) -> Any:
    shadow = object.__new__(type(autotuner))
    shadow.__dict__.update(autotuner.__dict__)
    shadow.__dict__[_DECIDED] = True
    for name, value in changes.items():
        setattr(shadow, name, value)  # and not into __dict__, which a property of a subclass would hide
    return shadow


def _watched(config: Any, of_hook: list[BaseException]) -> Any:
    """A config to launch; with a hook, a twin that keeps what the hook raises: it is not the config's failure."""
    hook = config.pre_hook
    if hook is None:
        return config

    def pre_hook(*args: Any, **kwargs: Any) -> Any:
        try:
            return hook(*args, **kwargs)
        except BaseException as error:
            of_hook.append(error)
            raise

    twin = copy.copy(config)
    twin.pre_hook = pre_hook
    return twin


def _called(method: Any) -> Callable[..., Any]:
    """A partial method, or another descriptor, as a function of the object."""

    def call(autotuner: Any, *args: Any, **kwargs: Any) -> Any:
        return method.__get__(autotuner, type(autotuner))(*args, **kwargs)

    return call


def _one_line(error: BaseException) -> str:
    try:
        text = " ".join(str(error).split())
    except Exception:
        text = ""  # an error that cannot say what it is must not take the place of what it reports
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


def _times(value: Any) -> tuple[float, ...]:
    return tuple(float(item) for item in value) if isinstance(value, (list, tuple)) else (float(value),)


class Interception:
    """One installed set of patches.

    Args:
        callbacks: what decides and what is told.
        near_ties: which candidates recording times again, given each one's times, or None where it failed; None to
            leave all as they are found.
        outputs: looks at the arguments of a launch that recording is about to time; see
            :func:`tuning._launch_outputs.watch_outputs`.

    Raises:
        UnsupportedTritonError: see :func:`supported_triton`. Nothing was changed.
    """

    def __init__(
        self, callbacks: Callbacks, *, near_ties: _NearTies | None = None, outputs: _WatchOutputs | None = None
    ) -> None:
        supported_triton()
        self._callbacks = callbacks
        self._near_ties = near_ties
        self._watch_outputs = outputs
        self._plans: dict[int, _Plan] = {}
        self._plans_lock = threading.Lock()
        # By the autotuner that is traced, which is kept so that no other gets its id: what is traced for it, by config.
        self._stand_ins: dict[int, tuple[Any, dict[int, Any]]] = {}
        self._resource_errors = resource_errors()
        self._patches: list[Patch] = []
        self._successors: Mapping[str, Callable[..., Any]] = {}
        self._active = False
        # Of this thread: what collects timings, whose candidate is timed, and how many launches came to the seam.
        self._thread = threading.local()

    # -- patching and undoing --

    def apply(self, previous: Interception | None = None) -> None:
        """Patch Triton's autotuner class, in place of ``previous`` where one is given.

        Each method changes hands in one assignment, so that no launch falls between two policies and is timed. Where
        it fails, those that have changed hands go back, and ``previous`` is in charge as before. One that has been
        replaced may be applied again, in place of what replaced it.
        """
        from triton.runtime.autotuner import Autotuner

        makers: list[tuple[Any, str, Callable[[Any], Any]]] = [
            (Autotuner, "run", self._make_run),
            (Autotuner, "warmup", self._make_warmup),
            (Autotuner, "_bench", self._make_bench),
            (Autotuner, "do_bench", lambda original: Stopwatch(original, self._is_quiet, self._count)),
            (Autotuner, "__init__", self._make_init),
        ]
        makers += [(kind, "run", self._make_closed_run) for kind in closed_kinds(Autotuner, _before_us)]
        theirs = {(patch.owner, patch.name): patch for patch in previous._patches} if previous is not None else {}
        taken_over = {
            place: patch for place, patch in theirs.items() if vars(place[0]).get(place[1]) is patch.replacement
        }
        patches = []
        for owner, name, make in makers:
            over = taken_over.get((owner, name))
            original = vars(owner).get(name, ABSENT) if over is None else over.original
            patches.append(self._patch(owner, name, original, make))
        self._patches = patches
        self._successors = {}
        self._active = True
        with contextlib.ExitStack() as undo:
            undo.callback(self._retire, {})
            for patch in patches:
                before = vars(patch.owner).get(patch.name, ABSENT)
                setattr(patch.owner, patch.name, patch.replacement)
                undo.callback(take_back, [patch._replace(original=before)])
            undo.pop_all()
        if previous is not None:
            # A launch that entered the old method just before goes on in the new one. Where somebody else's patch
            # stands between the two, the old one is still called by the new one and must pass through.
            leave_beneath(patch for place, patch in theirs.items() if place not in taken_over)
            names = {patch.name for place, patch in taken_over.items() if place[0] is Autotuner}
            previous._retire({each.name: each.replacement for each in patches[:3] if each.name in names})

    @staticmethod
    def _patch(owner: Any, name: str, original: Any, make: Callable[[Any], Any]) -> Patch:
        replaced = original
        if original is ABSENT and name == "run":  # a mixin's
            replaced = next(vars(each)[name] for each in owner.__mro__[1:] if name in vars(each))
        made = make(replaced)
        return Patch(owner, name, original, made if name == "do_bench" else _named_like(replaced, made))

    def _make_init(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Reach subclasses that are defined, or get their ``run``, from now on: as their objects are made."""

        def __init__(autotuner: Any, *args: Any, **kwargs: Any) -> None:
            original(autotuner, *args, **kwargs)
            if self._active:
                self._reach(type(autotuner))

        return __init__

    def _reach(self, kind: Any) -> None:
        from triton.runtime.autotuner import Autotuner

        for each in kind.__mro__[: kind.__mro__.index(Autotuner)]:
            if not issubclass(each, Autotuner) or not is_closed(each, Autotuner, _before_us):
                continue
            with self._plans_lock:
                own = vars(each).get("run", ABSENT)
                if self._active and not getattr(own, "_tuning_closed", False):
                    patch = self._patch(each, "run", own, self._make_closed_run)
                    setattr(each, "run", patch.replacement)  # noqa: B010 -- a class's, and not this object's
                    self._patches.append(patch)

    def _retire(self, successors: Mapping[str, Callable[..., Any]]) -> None:
        self._successors = successors
        self._active = False
        self._patches = []
        with self._plans_lock:
            self._plans.clear()

    def undo(self) -> None:
        """Take the patches back, last first. One that somebody else has patched over stays, and passes through."""
        try:
            take_back(reversed(self._patches))
        finally:
            self._retire({})

    # -- plans --

    def _plan_of(self, autotuner: Any) -> _Plan:
        plan = self._plans.get(id(autotuner))
        return plan if plan is not None and plan.is_of(autotuner) else self._plan(autotuner)

    def _plan(self, autotuner: Any) -> _Plan:
        read = facts(autotuner)
        treatment = self._callbacks.reached(read)
        identity = id(autotuner)
        plans = self._plans

        def forget(ref: weakref.ref[Any]) -> None:
            plan = plans.get(identity)
            if plan is not None and plan.ref is ref:
                del plans[identity]

        plan = _Plan(autotuner, treatment, read.kernel, weakref.ref(autotuner, forget))
        with self._plans_lock:
            known = plans.get(identity)
            if known is not None and known.ref() is autotuner and known.is_of(autotuner):
                return known
            if self._active:
                plans[identity] = plan
        return plan

    # -- replacements --

    def _make_run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        plan_of = self._plans.get
        resource_errors = self._resource_errors
        off_path = self._off_path
        relaunch = self._relaunch
        fall_back = self._fall_back

        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            plan: Any = plan_of(id(self))
            if plan is None or not plan.pinned or plan.configs is not self.configs:
                return off_path(original, self, args, kwargs)
            try:
                entry = plan.entries[plan.fast[len(args)](args, kwargs)]
            except (KeyError, TypeError):
                return off_path(original, self, args, kwargs)
            if entry.fallbacks is not None:
                return relaunch(original, plan, self, entry, args, kwargs)
            config = self.best_config = entry.config
            if config.pre_hook is not None:
                config.pre_hook({**dict(zip(self.arg_names, args, strict=False)), **kwargs, **entry.kwargs})
            try:
                return self.fn.run(*args, **kwargs, **entry.kwargs)
            except resource_errors as error:
                return fall_back(original, plan, self, entry, args, kwargs, error)

        return run

    def _make_warmup(self, original: Callable[..., Any]) -> Callable[..., Any]:
        interception = self

        def warmup(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not interception._active:
                return interception._successors.get("warmup", original)(self, *args, **kwargs)
            plan = interception._plan_of(self)
            if plan.treatment != "pinned":
                return original(self, *args, **kwargs)
            return interception._pinned_warmup(original, plan, self, args, kwargs)

        return warmup

    def _make_bench(self, original: Callable[..., Any]) -> Callable[..., Any]:
        interception = self

        def _bench(self: Any, *args: Any, config: Any, **meta: Any) -> Any:
            return interception._timed(original, self, args, config, meta)

        return _bench

    def _timed(
        self, original: Callable[..., Any], autotuner: Any, args: tuple[Any, ...], config: Any, meta: Mapping[str, Any]
    ) -> Any:
        """One candidate's benchmark: counted, and kept where it is recorded."""
        thread = self._thread
        outer = getattr(thread, "timing", None)
        if not self._active or outer is autotuner:  # a subclass's own that calls Triton's
            return original(autotuner, *args, config=config, **meta)
        self._count(autotuner)
        thread.timing = autotuner
        try:
            collect = getattr(thread, "collect", None)
            if collect is None or collect.owner is not autotuner:
                return original(autotuner, *args, config=config, **meta)
            return collect.bench(original, args, config, meta)
        finally:
            thread.timing = outer

    def _is_quiet(self, autotuner: Any) -> bool:
        return not self._active or getattr(self._thread, "timing", None) is autotuner

    def _count(self, autotuner: Any) -> None:
        """A candidate is about to be timed: count it, and say so where no decision here led to it."""
        function = autotuner.base_fn
        name = f"{function.__module__}.{function.__qualname__}"
        if not self._callbacks.in_scope(name):
            return
        self._callbacks.benchmarked(name)
        if _DECIDED in vars(autotuner) or len(autotuner.configs) < 2:
            return
        plan = self._plan_of(autotuner)
        if plan.treatment in ("pinned", "record"):
            self._callbacks.unreached(name, self._past_policy(autotuner, plan.treatment))

    def _past_policy(self, autotuner: Any, treatment: Treatment) -> str:
        """By what candidates are timed that no decision led to, and what to do about it."""
        from triton.runtime.autotuner import Autotuner

        kind = type(autotuner)
        name = f"{kind.__module__}.{kind.__qualname__}"
        if "run" in vars(autotuner):
            by = f"the run that was set on a {name} object"
        elif own_run(kind, Autotuner) is not None:
            by = f"{name}.run"
        elif vars(Autotuner)["run"] not in [patch.replacement for patch in self._patches]:
            by = "what replaced Autotuner.run after the policy was installed"
        else:
            by = f"a call of the benchmark of a {name} object"
        what = "it is NOT pinned" if treatment == "pinned" else "nothing of that is journaled"
        return (
            f"{by} times candidates past the policy: {what}; let it call the run that it replaces, or be in place "
            "before the policy is installed and the kernel is made"
        )

    # -- subclasses that need not call Triton's run --

    def _make_closed_run(self, original: Any) -> Callable[..., Any]:
        interception = self
        call = original if inspect.isfunction(original) else _called(original)

        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not interception._active or _DECIDED in vars(self):
                return call(self, *args, **kwargs)
            return interception._closed_run(call, self, args, kwargs)

        run._tuning_closed = True  # type: ignore[attr-defined]
        run._tuning_below = original  # type: ignore[attr-defined]
        return run

    def _closed_run(self, original: Callable[..., Any], autotuner: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Let a subclass launch in its own way, on a shadow that has the chosen candidate alone."""
        plan = self._plan_of(autotuner)
        kind = f"{type(autotuner).__module__}.{type(autotuner).__qualname__}"
        if not plan.pinned or len(autotuner.configs) == 1:
            came = getattr(self._thread, "came", 0)
            result = original(autotuner, *args, **kwargs)
            if plan.treatment == "record" and getattr(self._thread, "came", 0) == came:
                text = f"{kind}.run did not call Triton's: it chooses by itself, and nothing is journaled"
                self._callbacks.unreached(plan.kernel.qualified_name, text)
            return result

        def alone(shadow: Any, *args: Any, **kwargs: Any) -> Any:
            (chosen,) = shadow.configs
            # One that times even a single candidate keeps its winners here and finds them at later launches.
            winners = plan.winners.setdefault(LaunchConfig.of(chosen).text, {})
            shadow = _shadow(shadow, cache=winners, early_config_prune=None, perf_model=None)
            result = original(shadow, *args, **kwargs)
            launched = getattr(shadow, "best_config", chosen)
            if launched is not chosen and LaunchConfig.of(launched) != LaunchConfig.of(chosen):
                self._callbacks.unreached(
                    plan.kernel.qualified_name,
                    f"{kind}.run did not call Triton's and launched {LaunchConfig.of(launched)} where it was given "
                    f"{LaunchConfig.of(chosen)} alone: it is NOT pinned; pin it where it takes its candidates from",
                )
            return result

        key = plan.reader.typed(args, kwargs)
        entry = plan.by_text.get(key.text)
        if entry is None:
            candidates = live_candidates(autotuner, args, kwargs)
            if not candidates:
                return original(autotuner, *args, **kwargs)
            decision = self._callbacks.decide(plan.kernel, key, current_arch(), candidates)
            entry = _Entry(decision.choice.config, key, decision)
        assert entry.decision is not None
        replaced = entry
        if entry.fallbacks:
            replaced = entry.fallbacks.get(plan.reader.specialization(args, kwargs), entry)
        autotuner.best_config = replaced.config
        of_hook: list[BaseException] = []
        try:
            result = alone(_shadow(autotuner, configs=[_watched(replaced.config, of_hook)]), *args, **kwargs)
        except self._resource_errors as error:
            if of_hook:
                raise
            return self._fall_back(alone, plan, autotuner, replaced, args, kwargs, error)
        with plan.lock:
            known = plan.by_text.setdefault(key.text, entry)
            tell = replaced is entry and not known.noted
            known.noted = known.noted or tell
        if tell:
            self._callbacks.chosen(entry.decision.choice)
        return result

    # -- everything but a pinned hit --

    def _off_path(self, original: Callable[..., Any], autotuner: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        if not self._active:
            return self._successors.get("run", original)(autotuner, *args, **kwargs)
        self._thread.came = getattr(self._thread, "came", 0) + 1
        if _DECIDED in vars(autotuner):
            return original(autotuner, *args, **kwargs)  # chosen already, also where a traced graph is run as it is
        plan = self._plan_of(autotuner)
        if plan.treatment == "ignore" or len(autotuner.configs) == 1:
            return original(autotuner, *args, **kwargs)
        try:
            entry = plan.entries.get(plan.fast[len(args)](args, kwargs))
        except (KeyError, TypeError):
            entry = None
        key = None
        if entry is None:
            key = plan.reader.typed(args, kwargs)
            self._say_opaque(plan, key)
            entry = plan.by_text.get(key.text)
            if entry is not None:
                plan.remember(args, kwargs, entry)
        if plan.treatment == "observe":
            return self._observe(original, plan, autotuner, entry, key, args, kwargs)
        if entry is None:
            assert key is not None
            tune = self._pin if plan.pinned else self._record
            return tune(original, plan, autotuner, key, args, kwargs)
        if plan.pinned:
            return self._relaunch(original, plan, autotuner, entry, args, kwargs)
        self._check_unkeyed(plan, entry, args, kwargs)
        self._check_specialization(plan, autotuner, entry, args, kwargs)
        return self._launch(autotuner, entry, args, kwargs)

    @staticmethod
    def _say_opaque(plan: _Plan, key: Key) -> None:
        """A key value of unknown type is told from others of its type by nothing: say so, once."""
        for name, text in key.values:
            if '{"opaque":' in text and f"opaque {name}" not in plan.warned:
                plan.warned.add(f"opaque {name}")
                logger.warning(
                    "%s: key argument %r holds %s, whose content has no stable text: all values of this type count as "
                    "one key and get one config",
                    plan.kernel.qualified_name,
                    name,
                    text,
                )

    def after_fork(self) -> None:
        """In a child process: locks that a thread of the parent may have held are made anew."""
        global _pruning
        _pruning = threading.RLock()
        self._plans_lock = threading.Lock()
        for plan in list(self._plans.values()):
            plan.lock = threading.RLock()

    @staticmethod
    def _begin(autotuner: Any, entry: _Entry, args: tuple[Any, ...], kwargs: Any) -> None:
        config = autotuner.best_config = entry.config
        if config.pre_hook is not None:
            config.pre_hook({**dict(zip(autotuner.arg_names, args, strict=False)), **kwargs, **entry.kwargs})

    def _launch(self, autotuner: Any, entry: _Entry, args: tuple[Any, ...], kwargs: Any) -> Any:
        self._begin(autotuner, entry, args, kwargs)
        return autotuner.fn.run(*args, **kwargs, **entry.kwargs)

    def _observe(
        self,
        original: Callable[..., Any],
        plan: _Plan,
        autotuner: Any,
        entry: _Entry | None,
        key: Key | None,
        args: tuple[Any, ...],
        kwargs: Any,
    ) -> Any:
        if entry is not None or key is None:
            return original(autotuner, *args, **kwargs)
        # On a shadow with the real cache: Triton leaves what it always does, and threads cannot mix up its `nargs`.
        shadow = _shadow(autotuner)
        try:
            result = original(shadow, *args, **kwargs)
        finally:
            for name in ("best_config", "configs_timings", "bench_time"):
                if name in shadow.__dict__:
                    setattr(autotuner, name, shadow.__dict__[name])
        entry = _Entry(shadow.best_config, key, None)
        choice = Choice(plan.kernel.qualified_name, key, entry.config, "timed", None, current_arch())
        self._register(plan, entry, args, kwargs, choice)
        return result

    def _register(self, plan: _Plan, entry: _Entry, args: tuple[Any, ...], kwargs: Any, choice: Choice | None) -> None:
        """Keep an entry under its key, once, and tell of the choice, once."""
        with plan.lock:
            known = plan.by_text.setdefault(entry.key.text, entry)
            plan.remember(args, kwargs, known)
            tell = choice is not None and not known.noted
            if tell:
                known.noted = True
        if tell and choice is not None:
            self._callbacks.chosen(choice)

    # -- pinned --

    def _pin(
        self,
        original: Callable[..., Any],
        plan: _Plan,
        autotuner: Any,
        key: Key,
        args: tuple[Any, ...],
        kwargs: Any,
    ) -> Any:
        candidates = live_candidates(autotuner, args, kwargs)
        if not candidates:
            # Triton has an error of its own for this, by version: let it speak.
            return original(_shadow(autotuner, cache={}), *args, **kwargs)
        decision = self._callbacks.decide(plan.kernel, key, current_arch(), candidates)
        entry = _Entry(decision.choice.config, key, decision)
        if entry.within is not None:
            with plan.lock:
                entry = plan.by_text.setdefault(key.text, entry)
            return self._relaunch(original, plan, autotuner, entry, args, kwargs)
        autotuner.best_config = entry.config
        of_hook: list[BaseException] = []
        try:
            result = original(_shadow(autotuner, configs=[_watched(entry.config, of_hook)]), *args, **kwargs)
        except self._resource_errors as error:
            if of_hook:
                raise
            return self._fall_back(original, plan, autotuner, entry, args, kwargs, error)
        self._register(plan, entry, args, kwargs, decision.choice)
        return result

    def _relaunch(
        self,
        original: Callable[..., Any],
        plan: _Plan,
        autotuner: Any,
        entry: _Entry,
        args: tuple[Any, ...],
        kwargs: Any,
    ) -> Any:
        """Launch a known key that has more than one config, or that was met in another raw form."""
        if entry.within is not None:
            freed = self._freed(original, plan, autotuner, entry, args, kwargs)
            if freed is not None:
                return self._launch(autotuner, freed, args, kwargs)
        replaced = entry
        if entry.fallbacks:
            replaced = entry.fallbacks.get(plan.reader.specialization(args, kwargs), entry)
        self._begin(autotuner, replaced, args, kwargs)
        try:
            result = autotuner.fn.run(*args, **kwargs, **replaced.kwargs)
        except self._resource_errors as error:
            return self._fall_back(original, plan, autotuner, replaced, args, kwargs, error)
        if replaced is entry and not entry.noted and entry.decision is not None:
            self._register(plan, entry, args, kwargs, entry.decision.choice)
        return result

    def _freed(
        self,
        original: Callable[..., Any],
        plan: _Plan,
        autotuner: Any,
        entry: _Entry,
        args: tuple[Any, ...],
        kwargs: Any,
    ) -> _Entry | None:
        """What this process found the fastest of the chosen config's class; None where the chosen one is launched."""
        within, decision = entry.within, entry.decision
        assert within is not None
        assert decision is not None
        form = launch_form(plan.reader, args, kwargs)
        if form in within:
            found: _Entry | None = within[form]
            return found
        if capturing():
            return None
        with plan.lock:
            if form in within:
                return self._freed(original, plan, autotuner, entry, args, kwargs)
            if form_name(form) not in within.free.forms:
                within.keep(form, None)
                return None
            ran, copies = self._rehearsed(plan, autotuner, entry, args, kwargs)
            tell = within.winner is None and copies is not None and len(ran) > 1
            if tell and copies is not None:
                within.winner = self._time_within(original, autotuner, ran, copies)
            if all(config is not within.winner for config in ran):
                within.keep(form, None)
                return None
            freed = _Entry(within.winner, entry.key, decision)
            within.keep(form, freed)
            plan.remember(args, kwargs, entry)
        if tell:
            pin, free = decision.choice, within.free
            detail = (
                f"timed within the class of {pin.launch_config} ({len(free.configs)} candidates, no difference "
                f"observed on {free.inputs} inputs)"
            )
            arch = current_arch()
            self._callbacks.chosen(Choice(pin.kernel, entry.key, freed.config, "timed", free.origin, arch, detail))
        return freed

    def _rehearsed(
        self, plan: _Plan, autotuner: Any, entry: _Entry, args: tuple[Any, ...], kwargs: Any
    ) -> tuple[list[Any], Copies | None]:
        """The live configs of a class that gave the same bytes on copies of these arguments, and the copies."""
        assert entry.within is not None
        name = plan.kernel.qualified_name
        try:
            copies = copies_to_replay(autotuner, args, kwargs)
        except CannotBeCopied as error:
            logger.warning("%s [%s]: launching the chosen config: %s", name, entry.key, error)
            return [], None

        def launch(config: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
            return self._launch(autotuner, _Entry(config, entry.key, None), args, kwargs)

        configs = entry.within.free.configs
        return rehearse(f"{name} [{entry.key}]", configs, copies, launch, self._resource_errors), copies

    @staticmethod
    def _time_within(original: Callable[..., Any], autotuner: Any, ran: list[Any], copies: Copies) -> Any:
        """The config that Triton times as the fastest of a class, on copies."""
        plain = {"cache": {}, "cache_results": False, "early_config_prune": None, "perf_model": None}
        shadow = _shadow(autotuner, configs=ran, **plain)
        args, kwargs, _ = copies.copy()
        original(shadow, *args, **kwargs)
        return shadow.best_config

    def _fall_back(
        self,
        original: Callable[..., Any],
        plan: _Plan,
        autotuner: Any,
        entry: _Entry,
        args: tuple[Any, ...],
        kwargs: Any,
        error: BaseException,
    ) -> Any:
        """The chosen config, or what replaces it, ran out of resources: launch the next that does not, and keep that.

        What a hook of a config raises, of another kernel's launch in it for example, is the caller's, whatever it is.
        """
        assert entry.decision is not None
        choice = entry.decision.choice
        of_hook: list[BaseException] = []
        for config in self._after(entry):
            autotuner.best_config = config
            try:
                result = original(_shadow(autotuner, configs=[_watched(config, of_hook)]), *args, **kwargs)
            except self._resource_errors:
                if of_hook:
                    raise
                continue
            if self._keep_fallback(plan, entry, config, args, kwargs):
                self._tell_of_fallback(choice, config, error)
            return result
        raise error

    @staticmethod
    def _keep_fallback(plan: _Plan, entry: _Entry, config: Any, args: tuple[Any, ...], kwargs: Any) -> bool:
        """Remember what replaces an entry's config for launches like this one; whether it is new for the key."""
        replacement = _Entry(config, entry.key, entry.decision)
        replacement.noted = True
        with plan.lock:
            known = plan.by_text.setdefault(entry.key.text, entry)
            specialization = plan.reader.specialization(args, kwargs)
            first = known.fallbacks is None or all(item.config is not config for item in known.fallbacks.values())
            known.fallbacks = {**(known.fallbacks or {}), specialization: replacement}
        return first

    @staticmethod
    def _after(entry: _Entry) -> list[Any]:
        assert entry.decision is not None
        order = list(entry.decision.order)
        position = next((index for index, config in enumerate(order) if config is entry.config), -1)
        return order[position + 1 :]

    def _tell_of_fallback(self, choice: Choice, config: Any, error: BaseException) -> None:
        detail = f"{FALLBACK_PREFIX}{choice.launch_config}, which failed with {_one_line(error)}"
        logger.warning("%s [%s]: launching %s %s", choice.kernel, choice.key, LaunchConfig.of(config), detail)
        self._callbacks.chosen(
            Choice(choice.kernel, choice.key, config, choice.source, choice.origin, choice.arch, detail)
        )

    def _pinned_warmup(
        self, original: Callable[..., Any], plan: _Plan, autotuner: Any, args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Compile the chosen config only. Compiling is a step of its own here, so any error moves on to the next."""
        if len(autotuner.configs) == 1:
            return original(autotuner, *args, **kwargs)
        key = plan.reader.typed(args, kwargs)
        entry = plan.by_text.get(key.text)
        if entry is None:
            candidates = live_candidates(autotuner, args, kwargs)
            if not candidates:
                return original(autotuner, *args, **kwargs)
            decision = self._callbacks.decide(plan.kernel, key, current_arch(), candidates)
            entry = _Entry(decision.choice.config, key, decision)
        failure: Exception | None = None
        assert entry.decision is not None
        choice = entry.decision.choice
        replaced = (entry.fallbacks or {}).get(plan.reader.specialization(args, kwargs), entry)
        for config in [replaced.config, *self._after(replaced)]:
            alone = _shadow(autotuner, configs=[config], early_config_prune=None, perf_model=None)
            try:
                result = original(alone, *args, **kwargs)
            except Exception as error:
                failure = failure or error
                continue
            if config is not entry.config:
                # As for a launch: other specializations of the key keep the config that was chosen.
                if self._keep_fallback(plan, entry, config, args, kwargs) and failure is not None:
                    self._tell_of_fallback(choice, config, failure)
                return result
            with plan.lock:
                known = plan.by_text.setdefault(key.text, entry)
                tell = not known.noted
                known.noted = True
            if tell:
                self._callbacks.chosen(choice)
            return result
        assert failure is not None
        raise failure

    # -- traced into a compiled graph --

    def constexprs(self, autotuner: Any) -> frozenset[str]:
        """Names of the ``constexpr`` parameters of an autotuner's kernel."""
        return constexpr_names(autotuner.base_fn)

    def trace(self, autotuner: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any | None:
        """What a compiled graph is to trace in an autotuner's place: one that has the chosen config alone.

        Args:
            autotuner: the autotuner.
            args, kwargs: of the traced launch. Tensors need a dtype and no content; a value that the graph does not
                know is an object of some type of its own, so that no other key equals this one.

        Returns:
            None where the autotuner is to be traced as it is: nothing is pinned there.

        Raises:
            TableError, TableMissError: see :func:`tuning.selection.decide`.
            Exception: whatever the kernel's own pruning raises on such arguments.
        """
        if not self._active or len(autotuner.configs) < 2:
            return None
        plan = self._plan_of(autotuner)
        key = plan.reader.typed(args, kwargs) if plan.pinned else None
        self._callbacks.traced(plan.kernel.qualified_name, plan.treatment, key)
        if key is None:
            return None
        entry = plan.by_text.get(key.text)
        if entry is None:
            candidates = live_candidates(autotuner, args, kwargs)
            if not candidates:
                return None
            decision = self._callbacks.decide(plan.kernel, key, current_arch(), candidates)
            entry = _Entry(decision.choice.config, key, decision)
        assert entry.decision is not None
        with plan.lock:
            entry = plan.by_text.setdefault(key.text, entry)
            tell = not entry.noted and not entry.fallbacks
            entry.noted = entry.noted or tell
        if tell and entry.decision is not None:
            self._callbacks.chosen(entry.decision.choice)
        # What an eager launch of this key had to fall back to is taken at once: a compiled one cannot fall back.
        config = [entry, *(entry.fallbacks or {}).values()][-1].config
        with self._plans_lock:
            kept = self._stand_ins.setdefault(id(autotuner), (autotuner, {}))[1]
            stand_in = kept.get(id(config))
            if stand_in is None:
                stand_in = _shadow(autotuner, configs=[config], cache={}, early_config_prune=None, perf_model=None)
                kept[id(config)] = stand_in
        return stand_in

    # -- recording --

    def _record(
        self,
        original: Callable[..., Any],
        plan: _Plan,
        autotuner: Any,
        key: Key,
        args: tuple[Any, ...],
        kwargs: Any,
    ) -> Any:
        with plan.lock:
            entry = plan.by_text.get(key.text)
            if entry is not None:
                return self._launch(autotuner, entry, args, kwargs)
            named = plan.reader.named(args, kwargs)
            slot = (
                tuple(named[name] for name in plan.reader.key_names if name in named),
                tuple(dtype_name(value.dtype) for value in named.values() if hasattr(value, "dtype")),
            )
            timed = plan.slots.get(slot)
            if timed is not None:
                timings, winner = timed
                self._keep_record(plan, autotuner, key, timings, winner, args, kwargs, shared=True)
                return self._launch(autotuner, plan.by_text[key.text], args, kwargs)
            shadow = _shadow(autotuner, cache={}, cache_results=False)
            collect = _Collector(shadow, _benchmarker(shadow, plan.kernel))
            if self._near_ties is not None:
                shadow.cache = _SettledWinners(collect, self._near_ties)
            shadow.do_bench = collect.do_bench
            self._watch_own_bench(shadow)
            compare = self._outputs_of(plan, autotuner, args, kwargs)
            note = ""
            previous = getattr(self._thread, "collect", None)
            self._thread.collect = collect
            try:
                result = original(shadow, *args, **kwargs)
                if compare is not None and shadow.cache:
                    note = self._checked(plan, key, compare, shadow.best_config)
                return result
            finally:
                self._thread.collect = previous
                if shadow.cache:
                    # What Triton would have left behind, where readers of an autotuner look for it.
                    winner = next(iter(shadow.cache.values()))
                    autotuner.cache.update(shadow.cache)
                    for name in ("best_config", "configs_timings", "bench_time"):
                        if name in shadow.__dict__:
                            setattr(autotuner, name, shadow.__dict__[name])
                    plan.slots[slot] = (tuple(collect.timings), winner)
                    timings = tuple(collect.timings)
                    self._keep_record(plan, autotuner, key, timings, winner, args, kwargs, shared=False, note=note)
                # It and what collects refer to each other, and one of them to the arguments: let these go now.
                vars(shadow).clear()

    def _watch_own_bench(self, shadow: Any) -> None:
        """Let a ``_bench`` of a subclass, or one that was set on the object, pass through here as Triton's does."""
        from triton.runtime.autotuner import Autotuner

        kind, on_object = type(shadow), vars(shadow).get("_bench")
        if on_object is None and kind._bench is vars(Autotuner)["_bench"]:
            return

        def own(shadow: Any, *args: Any, config: Any, **meta: Any) -> Any:
            method = on_object if on_object is not None else kind._bench.__get__(shadow, kind)
            return method(*args, config=config, **meta)

        def _bench(*args: Any, config: Any, **meta: Any) -> Any:
            return self._timed(own, shadow, args, config, meta)

        shadow._bench = _bench

    def _outputs_of(
        self, plan: _Plan, autotuner: Any, args: tuple[Any, ...], kwargs: Any
    ) -> Callable[[Any], str] | None:
        if self._watch_outputs is None:
            return None
        try:
            return self._watch_outputs(autotuner, plan.kernel, args, kwargs)
        except Exception as error:  # no memory for copies, say
            logger.warning("%s: outputs are not checked: %s", plan.kernel.qualified_name, _one_line(error))
            return None

    @staticmethod
    def _checked(plan: _Plan, key: Key, compare: Callable[[Any], str], winner: Any) -> str:
        """What the look at the outputs found; that it failed, where it did: the recording is worth keeping."""
        try:
            note = compare(winner)
        except Exception as error:
            note = f"the outputs could not be checked: {_one_line(error)}"
        if note:
            logger.warning("%s [%s]: %s", plan.kernel.qualified_name, key, note)
        return note

    def _keep_record(
        self,
        plan: _Plan,
        autotuner: Any,
        key: Key,
        timings: tuple[CandidateTiming, ...],
        winner: Any,
        args: tuple[Any, ...],
        kwargs: Any,
        *,
        shared: bool,
        note: str = "",
    ) -> None:
        arch = current_arch()
        choice = Choice(plan.kernel.qualified_name, key, winner, "timed", None, arch)
        plan.unkeyed[key.text] = plan.reader.unkeyed(args, kwargs)
        self._register(plan, _Entry(winner, key, None), args, kwargs, choice)
        seen = self._new_specialization(plan, autotuner, key, args, kwargs)
        record = TuningRecord(plan.kernel, key, arch, timings, LaunchConfig.of(winner), shared, seen, note)
        self._callbacks.recorded(record)

    @staticmethod
    def _new_specialization(
        plan: _Plan, autotuner: Any, key: Key, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> Json:
        """What the compiler sees of a launch; None if it has seen that for this key, or where it is not known."""
        fine = plan.reader.specialization(args, kwargs)
        if autotuner.fn is not jit_function(autotuner):
            # Heuristics in between see the values themselves.
            plain = [(name, value) for name, value in kwargs.items() if type(value) in (int, float)]
            fine += (*(value for value in args if type(value) in (int, float)), *sorted(plain))
        with plan.lock:
            launches, texts = plan.specializations.setdefault(key.text, (set(), set()))
            if fine in launches:
                return None
            launches.add(fine)
        seen = launch_specialization(autotuner, args, kwargs)
        if seen is None:
            return None
        text = identity(seen)
        with plan.lock:
            if text in texts:
                return None
            texts.add(text)
        return seen

    def _check_specialization(
        self, plan: _Plan, autotuner: Any, entry: _Entry, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        """A known key is launched as the compiler has not seen it yet: a start from a table needs to know of it."""
        seen = self._new_specialization(plan, autotuner, entry.key, args, kwargs)
        if seen is not None:
            winner = LaunchConfig.of(entry.config)
            record = TuningRecord(plan.kernel, entry.key, current_arch(), (), winner, shared=True, specialization=seen)
            self._callbacks.recorded(record)

    def _check_unkeyed(self, plan: _Plan, entry: _Entry, args: tuple[Any, ...], kwargs: Any) -> None:
        """A ``constexpr`` that is not in the key has another value than when the key was timed: say so, once."""
        timed_with = plan.unkeyed.get(entry.key.text, {})
        now = plan.reader.unkeyed(args, kwargs)
        changed = [name for name in now if name not in plan.warned and timed_with.get(name, now[name]) != now[name]]
        if not changed:
            return
        with plan.lock:
            changed = [name for name in changed if name not in plan.warned]
            plan.warned.update(changed)
        for name in changed:
            note = (
                f"argument {name!r} is not in the autotuner's key, yet it is {now[name]} here and was "
                f"{timed_with[name]} when the key was timed: one config serves both. Add {name!r} to the key"
            )
            logger.warning("%s [%s]: %s", plan.kernel.qualified_name, entry.key, note)
            timings = ()
            winner = LaunchConfig.of(entry.config)
            self._callbacks.recorded(
                TuningRecord(plan.kernel, entry.key, current_arch(), timings, winner, shared=True, note=note)
            )


def _benchmarker(autotuner: Any, kernel: Kernel) -> Callable[..., Any]:
    """What times candidates: the caller's own, else that of the active driver.

    Raises:
        TuningError: there is no active driver, as without a GPU.
    """
    try:
        return cast(Callable[..., Any], autotuner.do_bench)
    except RuntimeError as error:
        raise TuningError(
            f"{kernel.qualified_name}: recording times its candidates, and Triton finds nothing to time them on here "
            f"({_one_line(error)}): record where a GPU is visible, or choose with mode='pinned', which times nothing"
        ) from error


class _Collector:
    """Catches what Triton's benchmark finds for each candidate, failures included."""

    def __init__(self, owner: Any, bench: Callable[..., Any]) -> None:
        self.owner = owner
        self.timings: list[CandidateTiming] = []
        self._benched: list[Any] = []
        self._call: tuple[tuple[Any, ...], Any] = ((), {})
        self._bench = bench
        self._error: BaseException | None = None

    def do_bench(self, *args: Any, **kwargs: Any) -> Any:
        """Stands in for the benchmarker, which alone sees why a candidate failed: Triton keeps only infinite times."""
        try:
            return self._bench(*args, **kwargs)
        except Exception as error:
            self._error = error
            raise

    def bench(self, original: Callable[..., Any], args: tuple[Any, ...], config: Any, meta: Any) -> Any:
        """Time one candidate through Triton; a failure of any kind is kept and the next candidate follows."""
        self._error = None
        self._benched.append(config)
        self._call = (args, meta)
        try:
            found = original(self.owner, *args, config=config, **meta)
        except Exception as error:
            if self._error is None:
                raise  # not the candidate's: the caller's arguments clash with it, or a hook is broken
            self.timings.append(CandidateTiming(LaunchConfig.of(config), None, _one_line(error)))
            return [math.inf, math.inf, math.inf]
        finally:
            reason = _one_line(self._error) if self._error is not None else "infinite time"
            self._error = None  # its traceback leads back here, and to the arguments
        times = _times(found)
        if all(map(math.isfinite, times)):
            self.timings.append(CandidateTiming(LaunchConfig.of(config), times))
        else:
            self.timings.append(CandidateTiming(LaunchConfig.of(config), None, reason))
        return found

    def settle(self, winner: Any, near_ties: _NearTies) -> Any:
        """Time near ties again, turn by turn, put that in place of what was found, and return the winner then.

        First each candidate is timed once more, and its lower time counts: what disturbs a timing makes it longer, and
        one that was disturbed would not be near. Then those that are near are timed in turns, since what drifts
        (clocks, temperature) falls on all of them alike; every second round backwards, since it may fall on the later
        ones of a round. What is near by then joins them, and all are timed again: times taken together are not held
        against earlier ones. A candidate that fails now has failed.
        """
        configs = tuple(self._benched)
        if len(configs) < 2:
            return winner
        for at, found in self._in_turns(configs, range(len(configs))[::-1], 1).items():
            self.timings[at] = _lower(self.timings[at], *found)
        tied: set[int] = set()
        while not tied >= (near := {*near_ties([timing.times_ms for timing in self.timings])}):
            tied |= near
            if len(tied) < 2:
                break
            for at, found in self._in_turns(configs, sorted(tied), _ROUNDS).items():
                failed = next((timing for timing in found if timing.times_ms is None), None)
                columns = zip(*(timing.times_ms or () for timing in found), strict=False)
                self.timings[at] = failed or CandidateTiming(found[0].config, tuple(map(statistics.median, columns)))
        timed = [(timing.times_ms, at) for at, timing in enumerate(self.timings) if timing.times_ms is not None]
        return configs[min(timed)[1]] if timed else winner

    def _in_turns(self, configs: Sequence[Any], order: Sequence[int], rounds: int) -> dict[int, list[CandidateTiming]]:
        first, (args, meta) = self.timings, self._call
        again: dict[int, list[CandidateTiming]] = {at: [] for at in order}
        try:
            for number in range(rounds):
                for at in order if number % 2 == 0 else reversed(order):
                    self.timings = again[at]
                    self.owner._bench(*args, config=configs[at], **meta)
        finally:
            self.timings = first
        return again


def _lower(first: CandidateTiming, second: CandidateTiming) -> CandidateTiming:
    if first.times_ms is None or second.times_ms is None:
        return first if first.times_ms is None else second
    # By the 20th percentile where there is one, the lower end of a timing's own distribution.
    return min(first, second, key=lambda timing: (timing.times_ms or ())[1:2] or timing.times_ms or ())


_ROUNDS = 6  # even: a median lies between a round forwards and one backwards, and steady drift cancels out


class _SettledWinners(dict[Any, Any]):
    """Stands in for the cache where Triton keeps the winner once all candidates are timed, before it launches it."""

    def __init__(self, collect: _Collector, near_ties: _NearTies) -> None:
        super().__init__()
        self._collect = collect
        self._near_ties = near_ties

    def __setitem__(self, key: Any, winner: Any) -> None:
        super().__setitem__(key, self._collect.settle(winner, self._near_ties))
