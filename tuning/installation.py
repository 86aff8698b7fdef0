"""Install a policy in this process. The only module with process-wide state.

``install`` validates everything that can be validated without touching a device, and only then replaces the previous
installation: whatever raises leaves the earlier policy in place. What needs a device (the arch, and with it the tables
that ship with the library) waits for the first launch that asks.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import logging
import os
import platform
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from . import __version__
from . import manifest as manifest_module
from ._check_classes import with_class
from ._launch_outputs import watch_outputs
from ._launch_replay import compiler_identity, readers_of_best_config
from ._selection_classes import Freedom, freedom
from .errors import DeterminismError, JournalError, PolicyError, TuningError
from .inductor import CompiledKernels
from .interception import AutotunerFacts, Interception, Treatment, current_arch, device_facts
from .journal import JournalWriter
from .manifest import AutotunerState, AutotunerUse, Launch, Manifest, TableUse, build_manifest, write_manifest
from .merge import near_ties
from .policy import AutotunePolicy
from .resumption import CarriedChoices, gather_choices
from .selection import Decision, Notice, decide
from .spec import Choice, Environment, Json, Kernel, Key, TuningRecord
from .tables import TableFile, Tables, archs_in, bundled_folder, load_tables, table_bytes
from .verification import DEFAULT_TIMEOUT_SECONDS, Launched, TorchCommunicator, Verifier

if TYPE_CHECKING:
    from .determinism import DeterministicMode

__all__ = [
    "Installation",
    "active_installation",
    "active_policy",
    "benchmarks_run",
    "choices",
    "deterministic_mode",
    "install",
    "load_state_dict",
    "maybe_verify_choices",
    "package_versions",
    "process_rank",
    "state_dict",
    "uninstall",
    "verify_choices",
]

logger = logging.getLogger("tuning")

_ON_A_MISS = {
    "cheapest": "the cheapest candidate",
    "model": "the static model's candidate",
    "nearest": "the nearest entry's candidate",
}
"""What is taken where no entry matches, by the choice's source."""

_lock = threading.RLock()
_current: Installation | None = None


def _group() -> Any:
    """``torch.distributed`` where this process has an initialised process group, else None."""
    distributed = sys.modules.get("torch.distributed")
    # While another thread imports it, it lacks what is asked here, and has no group.
    asked = [getattr(distributed, name, None) for name in ("is_available", "is_initialized")]
    return distributed if all(ask is not None and ask() for ask in asked) else None


def process_rank() -> int:
    """Rank of this process: from a launcher's ``RANK``, else from an initialised process group, else 0."""
    text = os.environ.get("RANK", "")
    if text.isdecimal():
        return int(text)
    distributed = _group()
    return 0 if distributed is None else int(distributed.get_rank())


def _world_size() -> int:
    text = os.environ.get("WORLD_SIZE", "")
    if text.isdecimal() and int(text) > 0:
        return int(text)
    distributed = _group()
    return 1 if distributed is None else int(distributed.get_world_size())


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def package_versions(modules: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Versions of the distributions that provide the packages of these modules, by top-level package."""
    wanted = sorted({module.partition(".")[0] for module in modules})
    providers = importlib.metadata.packages_distributions()
    return tuple(
        (package, ", ".join(f"{name} {_version(name)}" for name in sorted(set(providers[package]))))
        for package in wanted
        if package in providers
    )


def _triton_version() -> str:
    return _version("triton") or str(getattr(sys.modules.get("triton"), "__version__", ""))


def _compilers() -> dict[str, str]:
    torch = sys.modules.get("torch")
    cuda = getattr(getattr(torch, "version", None), "cuda", None)
    return {"triton": _triton_version(), **({"cuda": str(cuda)} if cuda else {})}


def _write_or_drop(write: Callable[[Any], None], item: TuningRecord | Environment) -> None:
    """Write to the journal; what no journal holds is dropped with a warning, lest it hold up all that follows.

    Raises:
        JournalError: it cannot be written now.
    """
    try:
        write(item)
    except JournalError as error:
        if not error.permanent:
            raise
        logger.warning("%s; it is left out", error.message)


class _Session:
    """What interception asks and tells: one per installation; safe from several threads."""

    def __init__(self, policy: AutotunePolicy, mode: str) -> None:
        self.policy = policy
        self.mode = mode
        # Now: tables of the running arch are read at the first launch, when the working folder may be another.
        self.table_path = tuple(os.path.abspath(folder) for folder in policy.table_path)
        self.triton = _triton_version()
        self._place = (process_rank(), _world_size())
        self.lock = threading.RLock()
        self.choices: list[Choice] = []
        self.benchmarks: dict[str, int] = {}
        # By facts and not by name: nothing keeps two autotuners from being built over one kernel.
        self.reached_facts: dict[AutotunerFacts, Treatment] = {}
        self.writer: JournalWriter | None = None
        self._described = False
        self._tables: dict[str, Tables] = {}
        self._beside: dict[str, Tables] = {}
        self.compiled: set[str] = set()
        self._reduced: set[str] = set()
        self.said: set[tuple[str, str, str]] = set()
        self._missed: set[str] = set()
        self._kept: set[tuple[str, ...]] = set()
        self._unwritten: list[TuningRecord] = []
        self._ended = False
        # Where ranks may differ: by kernel, arch and key, what was chosen, and what it may be varied within.
        self.free: dict[tuple[str, str, str], tuple[Choice, Freedom]] = {}
        self._compiler = ""
        self._preloaded = False
        self.carried: CarriedChoices | None = None

    # -- tables --

    def preload(self) -> None:
        """Read every table of the user's folders, so that a malformed one is found before anything changes."""
        for folder in self.table_path:
            # Where there is no arch at all, loading any says what is wrong with the folder.
            for arch in (archs_in(folder) if os.path.isdir(folder) else ()) or ("cpu",):
                self.tables(arch)
        self._preloaded = True

    def place(self) -> tuple[int, int]:
        """Rank and world size; remembered, since a manifest is written when the process group may be gone."""
        if _group() is not None or os.environ.get("RANK"):
            self._place = (process_rank(), _world_size())
        return self._place

    def tables(self, arch: str) -> Tables:
        """The tables of an arch, read once."""
        with self.lock:
            found = self._tables.get(arch)
            if found is None:
                # The user's folders are read at install, whole: what comes or goes later is seen by no rank.
                folders = () if self._preloaded else self.table_path
                found = self._tables[arch] = load_tables(arch, folders)
            return found

    def tables_to_choose_from(self, arch: str) -> Tables:
        """The tables of an arch; with those of all others beside them where the policy's rule looks there."""
        if self.policy.on_miss != "nearest":
            return self.tables(arch)
        with self.lock:
            found = self._beside.get(arch)
            if found is None:
                known = {*archs_in(bundled_folder())}
                for folder in self.table_path if not self._preloaded else ():
                    known.update(archs_in(folder))
                known.update(self._tables)
                others = [self.tables(name) for name in sorted(known - {arch})]
                found = self._beside[arch] = self.tables(arch).beside(others)
            return found

    def table_files(self) -> tuple[TableFile, ...]:
        """Every table file read so far."""
        with self.lock:
            return tuple(file for arch in sorted(self._tables) for file in self._tables[arch].files)

    # -- interception's callbacks --

    def reached(self, autotuner: AutotunerFacts) -> Treatment:
        """Decide by scope and mode; say once what lies outside."""
        name = autotuner.kernel.qualified_name
        in_scope = self.policy.in_scope(name)
        invariant = self.policy.is_config_invariant(name)
        treatment: Treatment
        if not in_scope or len(autotuner.candidates) == 1:
            treatment = "ignore"
        elif self.mode == "auto" or invariant:
            treatment = "observe"
        else:
            treatment = "pinned" if self.mode == "pinned" else "record"
        if in_scope and len(autotuner.candidates) == 1:
            self.say_reduced(name)
        if self.carried is not None and in_scope and not invariant and len(autotuner.candidates) == 1:
            # Nothing will be asked about it, so what a checkpoint says of it would go unheard.
            self.carried.require_only_candidate(name, current_arch(), autotuner.candidates[0])
        with self.lock:
            first = autotuner not in self.reached_facts
            self.reached_facts[autotuner] = treatment
        if first and len(autotuner.candidates) > 1:
            self._announce(autotuner, name, in_scope, invariant)
        return treatment

    def say_reduced(self, kernel: str = "") -> None:
        """Warn of kernels in scope that their package left with one candidate, once for each package.

        Args:
            kernel: look for its package's alone.
        """
        if self.mode == "auto":
            return
        from .determinism.candidates import REDUCERS, CandidateGuard

        for reducer in REDUCERS:
            if kernel and not kernel.startswith(reducer.package + "."):
                continue
            if reducer.package in self._reduced or not self.policy.in_scope(reducer.package + ".kernel"):
                continue
            text = CandidateGuard((reducer,)).warning()
            if text is not None:
                self._reduced.add(reducer.package)
                self.say(kernel, Notice("reduced_at_import", text))

    def _announce(self, autotuner: AutotunerFacts, name: str, in_scope: bool, invariant: bool) -> None:
        count = len(autotuner.candidates)
        if not in_scope and self.mode != "auto":
            logger.warning(
                "%s has %d candidates and lies outside the policy's modules (%s): Triton times it%s. "
                "Add %r to modules to %s it",
                name,
                count,
                " ".join(self.policy.modules) or "none",
                "" if self.mode == "pinned" else ", and nothing is journaled",
                autotuner.kernel.package,
                "pin" if self.mode == "pinned" else "record",
            )
        elif self.policy.enumerate_autotuners:
            state = (
                "outside the policy's modules, timed"
                if not in_scope
                else "timed: it is config-invariant"
                if invariant
                else {"auto": "timed", "pinned": "pinned", "record": "timed and recorded"}[self.mode]
            )
            logger.info("autotuner %s (%d candidates, key %s): %s", name, count, list(autotuner.key_names), state)
        if in_scope and self.mode == "pinned" and autotuner.reset_to_zero and self.policy.enumerate_autotuners:
            logger.warning(
                "%s resets %s to zero while Triton benchmarks, and only then: a caller that relies on it for its first "
                "launch gets no reset from a pinned one, as it gets none from any later launch",
                name,
                ", ".join(autotuner.reset_to_zero),
            )

    def in_scope(self, kernel: str) -> bool:
        """Whether a kernel's benchmarks are counted."""
        return self.policy.in_scope(kernel)

    def decide(self, kernel: Kernel, key: Key, arch: str, candidates: Sequence[Any]) -> Decision:
        """Choose by a loaded checkpoint, else by the tables of the arch and the policy; say each notice once."""
        rank, _ = self.place()
        decision = self._resume(kernel, key, arch, candidates)
        if decision is None:
            tables = self.tables_to_choose_from(arch)
            decision = decide(kernel, key, arch, candidates, tables, self.policy, chaos_rank=rank, triton=self.triton)
        for notice in decision.notices:
            self.say(kernel.qualified_name, notice)
        if decision.choice.source in _ON_A_MISS:
            self._say_miss(kernel.qualified_name, key, arch, _ON_A_MISS[decision.choice.source])
        if self.policy.within_class == "timed" and not self.policy.chaos:
            return self._within_class(kernel, key, arch, decision)
        return decision

    def _within_class(self, kernel: Kernel, key: Key, arch: str, decision: Decision) -> Decision:
        """Say within which candidates the choice may be varied, where there is evidence."""
        name = kernel.qualified_name
        self._compiler = self._compiler or compiler_identity()
        free, reason = freedom(kernel, key, decision, self.tables(arch), self._compiler)
        readers = readers_of_best_config(kernel) if free is not None else ()
        if readers:
            free, reason = (
                None,
                f"bit classes do not count: {', '.join(readers)} reads best_config, so bits depend on it",
            )
        if reason:
            self.say(name, Notice("class_evidence", f"{name} on {arch}: {reason}; the chosen config is launched"))
        if free is None:
            return decision
        with self.lock:
            self.free[name, arch, key.text] = (decision.choice, free)
        return replace(decision, free=free)

    def class_of(self, choice: Choice) -> tuple[Choice, Freedom] | None:
        """What was chosen, and its class, where a choice was timed within it; None for every other choice."""
        if choice.source != "timed":
            return None
        with self.lock:
            return self.free.get((choice.kernel, choice.arch, choice.key.text))

    def _say_miss(self, kernel: str, key: Key, arch: str, taken: str) -> None:
        """Once for each kernel that a table knows: whoever made the table expects its entries to be used."""
        entries = len(self.tables(arch).entries(kernel))
        with self.lock:
            if not entries or kernel in self._missed:
                return
            self._missed.add(kernel)
        count = f"{entries} entries" if entries > 1 else "one entry"
        text = f"{kernel} on {arch}: {count} in the tables and none for [{key}]: {taken} is taken, "
        self.say(kernel, Notice("miss", text + "which may be slow; record this key. Later misses are not logged"))

    def _resume(self, kernel: Kernel, key: Key, arch: str, candidates: Sequence[Any]) -> Decision | None:
        carried = self.carried
        if carried is None:
            return None
        decision = carried.decide(kernel, key, arch, candidates, self.tables(arch))
        arches = () if decision is not None else carried.arches_of(kernel.qualified_name, key)
        if arches:
            text = f"the loaded choices are for {', '.join(arches)}, this is {arch}: tables and policy decide"
            self.say(kernel.qualified_name, Notice("other_arch", f"{kernel.qualified_name} [{key}]: {text}"))
        return decision

    def launched(self) -> CarriedChoices:
        """What a checkpoint carries of this run so far: not what was timed within a class, but what was chosen."""
        with self.lock:
            hashes = {each.kernel.qualified_name: each.kernel.source_hash for each in self.reached_facts}
            made = [(self.class_of(choice) or (choice,))[0] for choice in self.choices]
            return CarriedChoices.of([Launch.of(each, hashes.get(each.kernel)) for each in made], _triton_version())

    def say(self, kernel: str, notice: Notice) -> None:
        """Warn once, and keep it for the manifest."""
        with self.lock:
            mark = (kernel, notice.kind, notice.message)
            if mark in self.said:
                return
            self.said.add(mark)
        logger.warning("%s", notice.message)

    def chosen(self, choice: Choice) -> None:
        """Keep a choice, once: autotuners that are built anew, or get other candidates, make theirs again."""
        # Read now: a config may be changed in place later, and this is what is launched.
        mark = (choice.kernel, choice.arch, choice.key.text, choice.launch_config.text, choice.source, choice.detail)
        with self.lock:
            if mark in self._kept:
                return
            self._kept.add(mark)
            self.choices.append(choice)
        if self.policy.enumerate_autotuners:
            logger.info(
                "%s [%s]: %s (%s%s)",
                choice.kernel,
                choice.key,
                choice.launch_config,
                choice.source,
                f", {choice.origin}" if choice.origin else "",
            )

    def recorded(self, record: TuningRecord) -> None:
        """Journal a record; one that was timed while the policy was taken away is dropped, and that is said."""
        if self.writer is None:
            return
        with self.lock:
            if self._ended:
                # The launch that was timed is somebody's who has done nothing wrong: no error for it.
                text = "timed while its policy was removed: it is not journaled"
                logger.warning("%s [%s]: %s", record.kernel.qualified_name, record.key, text)
                return
            # Kept until it is written: a disk that is full now may have room at the next key, or at the end.
            self._unwritten.append(record)
            self.flush()

    def flush(self) -> None:
        """Write what could not be written before. What no journal holds is dropped with a warning, and not tried again.

        Raises:
            JournalError: it still cannot.
        """
        with self.lock:
            if self.writer is None or not self._unwritten:
                return
            if not self._described:
                _write_or_drop(self.writer.describe, self.environment(self._unwritten[0].arch))
                self._described = True
            while self._unwritten:
                _write_or_drop(self.writer.write, self._unwritten[0])
                del self._unwritten[0]

    def end(self) -> None:
        """Write what could not be written before, and close the journal whether or not that can be.

        Raises:
            JournalError: it cannot.
        """
        with self.lock:
            self._ended = True
            if self.writer is not None:
                try:
                    self.flush()
                finally:
                    self.writer.close()

    def benchmarked(self, kernel: str) -> None:
        """Count one benchmark."""
        with self.lock:
            self.benchmarks[kernel] = self.benchmarks.get(kernel, 0) + 1

    def unreached(self, kernel: str, problem: str) -> None:
        """Say once for each kernel in scope by what it is timed past the policy."""
        with self.lock:
            if not self.is_unreached(kernel):
                self.say(kernel, Notice("unreached", f"{kernel}: {problem}"))

    def is_unreached(self, kernel: str) -> bool:
        """Whether a kernel was timed past the policy."""
        with self.lock:
            return any(kind == "unreached" and name == kernel for name, kind, _ in self.said)

    # -- compiled graphs --

    def traced(self, kernel: str, treatment: Treatment, key: Key | None) -> None:
        """Keep which kernels are traced into compiled graphs; say what of a key is not known there, once."""
        with self.lock:
            self.compiled.add(kernel)
        if treatment == "record":
            text = "is traced into a compiled graph: Inductor times it there, and nothing of that is journaled"
            self.say(kernel, Notice("compiled", f"{kernel} {text}; record with torch.compile off"))
        unknown = [name for name, text in key.values if text.startswith('{"opaque":')] if key is not None else []
        if unknown:
            text = (
                f"{kernel}: {', '.join(unknown)} {'is' if len(unknown) == 1 else 'are'} not known where it is traced "
                f"into a compiled graph [{key}]: one config serves all values, which an eager launch need not get"
            )
            self.say(kernel, Notice("symbolic_key", text))

    def fingerprint(self) -> str:
        """Text that differs wherever any pin may; empty while nothing is pinned."""
        if self.mode != "pinned":
            return ""
        digest = hashlib.sha256(repr((__version__, self.triton, self.policy)).encode())
        self.tables(current_arch())
        for path in sorted(Path(bundled_folder()).rglob("*.json")):
            digest.update(path.read_bytes())
        for file in self.table_files():
            digest.update(table_bytes(file))
        if self.carried is not None:
            digest.update(repr(self.carried.to_state()).encode())
        if self.policy.chaos:
            digest.update(repr(self.place()).encode())
        return digest.hexdigest()

    # -- where we are --

    def environment(self, arch: str = "", *, touch_device: bool = True) -> Environment:
        """Where this process runs. Without ``touch_device`` nothing is asked of a driver."""
        device, multiprocessors = device_facts() if touch_device else ("", 0)
        rank, world_size = self.place()
        return Environment(
            arch=arch,
            device=device,
            multiprocessors=multiprocessors,
            triton=self.triton,
            torch=_version("torch"),
            python=platform.python_version(),
            packages=package_versions(self.policy.modules) if touch_device else (),
            rank=rank,
            world_size=world_size,
            host=socket.gethostname(),
        )


class Installation:
    """An installed policy; made by :func:`install`. As a context manager, leaving the block uninstalls.

    Attributes:
        policy: the policy.
        mode: the mode that holds.
        deterministic: whether deterministic mode was asked for.
        when_taken_out: told, once this is no longer in charge, of what is instead: None where nothing is.
    """

    def __init__(self, policy: AutotunePolicy, *, deterministic: bool | DeterministicMode = False) -> None:
        self.policy = policy
        self.when_taken_out: Callable[[Installation | None], None] = lambda successor: None
        self.deterministic = deterministic is not False
        self.mode = policy.effective_mode(deterministic=self.deterministic)
        self._session = _Session(policy, self.mode)
        self._verifier = Verifier()
        self._interception = Interception(
            self._session,
            near_ties=near_ties if policy.remeasure else None,
            outputs=watch_outputs if policy.check_outputs else None,
        )
        self._compiled = CompiledKernels(
            self._interception.trace, self._interception.constexprs, self._session.fingerprint
        )
        self._determinism: DeterministicMode | None = None if isinstance(deterministic, bool) else deterministic
        self._manifest_path = None if policy.manifest_path is None else Path(os.path.abspath(policy.manifest_path))
        self._closed = False
        self._pid = os.getpid()

    # -- life --

    def _prepare(self) -> None:
        """Everything that can fail, with nothing changed that outlives a failure."""
        session = self._session
        if self.mode == "pinned":
            session.preload()
        if self.deterministic:
            from .determinism import DeterministicMode

            if self._determinism is None:
                self._determinism = DeterministicMode()
            if self._determinism.pin is None:
                # Triton's own choice (auto) is only as reproducible as what the package reduces its candidates to.
                self._determinism.keep_candidates = self.mode != "auto"
            self._determinism.check()
        if self.policy.manifest_path is not None:
            _require_writable_folder(self.policy.manifest_path)
        if self.mode == "record":
            assert self.policy.record_path is not None
            session.writer = JournalWriter(self.policy.record_path, session.environment(touch_device=False))

    def _activate(self, previous: Installation | None) -> None:
        """Take over from ``previous``; on an error it is in charge as before."""
        mine = self._determinism
        theirs = None if previous is None else previous._determinism
        with contextlib.ExitStack() as undo:  # each step is taken back, last first, where a later one fails
            if mine is not None and theirs is not None:
                # Handed over and not undone and done again: NCCL and cuBLAS have read their variables by now.
                mine.take_over(theirs)
                undo.callback(theirs.take_over, mine)
            elif mine is not None:
                mine.apply()
                undo.callback(mine.restore)
            self._interception.apply(None if previous is None else previous._interception)
            undo.callback(_put_back, self._interception, None if previous is None else previous._interception)
            self._compiled.apply(None if previous is None else previous._compiled)
            undo.callback(_put_back, self._compiled, None if previous is None else previous._compiled)
            if mine is None and theirs is not None:
                undo.callback(theirs.apply)
                _restore(theirs)
            undo.pop_all()

    def _deactivate(self) -> None:
        with contextlib.ExitStack() as steps:  # all are taken, last named first, whatever one of them raises
            if self._determinism is not None:
                steps.callback(_restore, self._determinism)
            steps.callback(self._interception.undo)
            steps.callback(self._compiled.undo)

    def _close(self) -> None:
        """Write what is to be left behind. Called once, after the patches are gone or as the interpreter exits."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self._close_at_exit)
        logger.info("%s", self.summary())
        # A child that was forked and ends leaves the journal and the manifest to the process that installed the policy.
        if os.getpid() != self._pid:
            return
        with contextlib.ExitStack() as steps:  # what one of them cannot write is no reason not to write the rest
            steps.callback(self._write_manifest)
            steps.callback(self._session.end)

    def _write_manifest(self) -> None:
        path = self._manifest_path
        if path is not None:
            rank, _ = self._session.place()
            # Ranks of a run agree, or verification says where not: one file would be written by all of them at once.
            target = path if rank == 0 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")
            write_manifest(target, self.manifest())

    def _close_at_exit(self) -> None:
        try:
            self._close()
        except TuningError as error:
            # Nobody is left to catch it, and a traceback of the interpreter's own would hide what it says.
            logger.error("%s", error)

    def uninstall(self) -> None:
        """Uninstall this policy if it is still the installed one."""
        with _lock:
            if _current is self:
                uninstall()

    def __enter__(self) -> Installation:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.uninstall()

    def __repr__(self) -> str:
        changes = ", ".join(f"{name}={value!r}" for name, value in self.policy.changes().items())
        return f"<Installation mode={self.mode}{' deterministic' if self.deterministic else ''} {changes}>"

    # -- what happened --

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Choices made since installation, in order."""
        with self._session.lock:
            return tuple(self._session.choices)

    @property
    def benchmarks(self) -> int:
        """Benchmarks of single candidates, by autotuners in scope, since installation."""
        with self._session.lock:
            return sum(self._session.benchmarks.values())

    def summary(self) -> str:
        """One line: how many choices each rule made, and how many candidates were timed."""
        counts = Counter(choice.source for choice in self.choices)
        made = ", ".join(f"{count} {source}" for source, count in sorted(counts.items())) or "none"
        return f"mode {self.mode}: choices: {made}; {self.benchmarks} candidates timed"

    @property
    def reached(self) -> tuple[tuple[AutotunerFacts, Treatment], ...]:
        """Every autotuner launched since installation, by kernel name, with what was done to it."""
        with self._session.lock:
            return tuple(sorted(self._session.reached_facts.items(), key=lambda item: item[0].kernel.qualified_name))

    @property
    def compiled(self) -> tuple[str, ...]:
        """Names of the kernels with a choice of configs that were traced into compiled graphs since installation."""
        with self._session.lock:
            return tuple(sorted(self._session.compiled))

    @property
    def journal_path(self) -> str | None:
        """Path of this process's journal, in record mode."""
        return None if self._session.writer is None else self._session.writer.path

    def manifest(self) -> Manifest:
        """What ran so far."""
        session = self._session
        with session.lock:
            arches = sorted({choice.arch for choice in session.choices})
            kernels = {each.kernel.qualified_name: each.kernel.source_hash for each in session.reached_facts}
            benchmarks = dict(session.benchmarks)
            notices = [(kind, message) for _, kind, message in session.said]
            told = {kernel for kernel, kind, _ in session.said if kind == "compiled"}
            notices += [("compiled", f"{name} is traced into a compiled graph") for name in session.compiled - told]
        return build_manifest(
            library=_version("triton-tuning") or __version__,
            mode=self.mode,
            deterministic=self.deterministic,
            policy=self.policy,
            environment=session.environment("+".join(arches)),
            compilers=_compilers(),
            tables=[
                TableUse.of(file.path, file.arch, file.package, table_bytes(file)) for file in session.table_files()
            ],
            choices=self.choices,
            source_hashes=kernels,
            benchmarks=benchmarks,
            autotuners=[self._use(facts, treatment) for facts, treatment in self.reached],
            notices=notices,
        )

    def _use(self, facts: AutotunerFacts, treatment: Treatment) -> AutotunerUse:
        name = facts.kernel.qualified_name
        state: AutotunerState
        if len(facts.candidates) == 1:
            state, reason = "single", ""
        elif self._session.is_unreached(name):
            state, reason = "timed", "its run chooses past the policy"
        elif treatment == "pinned":
            state, reason = "pinned", ""
        elif treatment == "record":
            state, reason = "recorded", ""
        elif treatment == "ignore":
            state, reason = "timed", "outside the policy's modules"
        else:
            invariant = self.policy.is_config_invariant(name)
            state, reason = "timed", "config-invariant" if invariant else "mode auto"
        return AutotunerUse(name, len(facts.candidates), facts.key_names, state, reason)

    # -- checkpoints --

    def state_dict(self, *, all_ranks: bool = False, group: Any = None) -> dict[str, Json]:
        """See :func:`state_dict`."""
        self._require_pinned("state_dict")
        made = self._session.launched()
        carried = self._session.carried
        if carried is not None:  # a checkpoint soon after resuming holds what has not been launched again yet
            made = CarriedChoices.of((*carried.launches, *made.launches), made.triton)
        if all_ranks and _in_process_group():
            made = gather_choices(made, TorchCommunicator(group), DEFAULT_TIMEOUT_SECONDS)
            if made.ambiguous:
                logger.warning(
                    "the checkpoint has several configs for one key, so ranks disagreed or two autotuners share a "
                    "kernel: %s",
                    "; ".join(made.ambiguous),
                )
        return made.to_state()

    def load_state_dict(self, state: Mapping[str, Json]) -> None:
        """See :func:`load_state_dict`."""
        self._require_pinned("load_state_dict")
        session, policy = self._session, self.policy
        carried = CarriedChoices.from_state(state)
        for kernel in carried.kernels:
            outside, invariant = not policy.in_scope(kernel), policy.is_config_invariant(kernel)
            if outside or invariant:
                field = "modules" if outside else "config_invariant"
                raise PolicyError(
                    f"{field}: the state holds choices of {kernel}, which this policy leaves to Triton's timing "
                    f"({'outside modules' if outside else 'in config_invariant'}); resume with the scope of the run "
                    "that was saved",
                    field=field,
                    value=getattr(policy, field),
                    expected=f"a scope that pins {kernel}",
                )
        with session.lock:
            conflicts = carried.conflicts(session.launched())
            if conflicts:
                raise TuningError(
                    f"load_state_dict: {len(conflicts)} choices already made differ from the state: "
                    f"{'; '.join(conflicts)}. Load the state before the first kernel is launched"
                )
            session.carried = carried
        running = _triton_version()
        if carried.launches and carried.triton != running:
            text = f"the loaded choices were made under Triton {carried.triton or 'unknown'}, this is {running}: their "
            session.say("", Notice("other_triton", f"{text}configs are used, but the bits they compute may differ"))
        logger.info("loaded %d choices of %d kernels", len(carried.launches), len(carried.kernels))

    def _require_pinned(self, what: str) -> None:
        if self.mode == "pinned" and not self.policy.chaos:
            return
        field, value = ("chaos", True) if self.policy.chaos else ("mode", self.mode)
        reason = {"auto": "Triton's timing chooses", "record": "recording times every candidate afresh"}
        raise PolicyError(
            f"{field}: {what} needs mode 'pinned' without chaos, found {field} {value!r}, where "
            f"{reason.get(self.mode, 'each rank picks another candidate on purpose')}: no choice can be carried over",
            field=field,
            value=value,
            expected="mode pinned without chaos",
        )

    # -- agreement --

    def verify(self, group: Any = None, *, step: int | None = None, timeout: float | None = None) -> bool:
        """See :func:`verify_choices`."""
        # A generator: an error while it runs is told to all ranks, which would otherwise wait for this one.
        launched = self._launched()
        strict = self.policy.verify_strict
        return self._verifier.check(launched, group=group, step=step, strict=strict, timeout=timeout).agreed

    def _launched(self) -> Iterator[Launched]:
        for choice in self.choices:
            config, within = choice.launch_config.text, self._session.class_of(choice)
            yield Launched(
                kernel=choice.kernel,
                key=choice.key.text,
                config=config if within is None else with_class(config, (each.text for each in within[1].members)),
                source=choice.source,
                exempt=self.policy.is_config_invariant(choice.kernel),
            )


def _put_back(current: Any, previous: Any) -> None:
    """Put one kind of patches back in charge in place of those that took over from them; take them out if none were."""
    if previous is None:
        current.undo()
    else:
        previous.apply(current)


def _restore(mode: DeterministicMode) -> None:
    try:
        mode.restore()
    except DeterminismError as error:
        # All but what somebody else has patched since is back, and raising now would leave the rest undone.
        logger.warning("%s", error)


def _require_writable_folder(path: str) -> None:
    path = os.path.realpath(path)
    folder = os.path.dirname(path)
    problem = None
    if os.path.exists(path) and not os.path.isfile(path):
        problem = "is no regular file"
    elif not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        problem = f"lies in {folder}, which is no folder that can be written"
    elif len(os.fsencode(os.path.basename(path))) > 255:
        problem = "has a name of more than 255 bytes"
    if problem is not None:
        raise PolicyError(
            f"manifest_path: {path!r} {problem}; expected the path of a file in a writable folder",
            field="manifest_path",
            value=path,
            expected="the path of a file in a writable folder",
        )


def _importable(package: str) -> bool:
    if package in sys.modules:
        return True
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False


def install(policy: AutotunePolicy | None = None, *, deterministic: bool | DeterministicMode = False) -> Installation:
    """Put a policy in charge of every autotuner in scope, now and later, in place of the previous policy.

    Touches no device: call it as early as you like, before or after the kernels are imported.

    Args:
        policy: the policy; the default policy when None.
        deterministic: also put the whole process into deterministic mode, which makes pinned the default mode. A
            :class:`tuning.determinism.DeterministicMode` in place of True says more: the framework's arguments and the
            attention backend to check.

    Returns:
        The installation, a context manager whose block uninstalls when it is left.

    Raises:
        PolicyError: ``policy`` is not a policy, or a path in it cannot be used.
        TableError: a table of ``table_path`` is malformed or missing.
        JournalError: ``record_path`` cannot be written.
        UnsupportedTritonError: the installed Triton is not supported.
        DeterminismError: deterministic mode refuses this process.
        Whatever is raised, nothing has changed and the earlier policy is still installed.
    """
    global _current
    if policy is None:
        policy = AutotunePolicy()
    if not isinstance(policy, AutotunePolicy):
        raise PolicyError(
            f"policy: expected an AutotunePolicy or None, got {type(policy).__name__}; "
            "policy_from_mapping, policy_from_args and policy_from_yaml make one",
            value=policy,
            expected="an AutotunePolicy or None",
        )
    if not isinstance(deterministic, bool):
        from .determinism import DeterministicMode

        if not isinstance(deterministic, DeterministicMode):
            raise PolicyError(
                f"deterministic: expected a bool or a DeterministicMode, got {type(deterministic).__name__}",
                value=deterministic,
                expected="a bool or a DeterministicMode",
            )
    if "TRITON_TUNING_RUN" in os.environ:
        # The policy of `triton-tuning run` is installed as Triton is imported: before this one, not in the midst of it.
        with contextlib.suppress(ImportError):
            importlib.import_module("triton")
    with _lock:
        installation = Installation(policy, deterministic=deterministic)
        try:
            installation._prepare()
        except BaseException:
            if installation._session.writer is not None:
                installation._session.writer.close(discard=True)
            raise
        previous = _current
        try:
            installation._activate(previous)
        except BaseException:
            if installation._session.writer is not None:
                installation._session.writer.close(discard=True)
            raise
        _current = installation
        atexit.register(installation._close_at_exit)
    if previous is not None:
        try:
            previous._close()
        except TuningError as error:
            # The new policy is in charge: a caller who saw this raised would take it that nothing had changed.
            logger.error("what the earlier policy was to leave behind could not be written: %s", error)
        previous.when_taken_out(installation)
    if not installation.deterministic:  # deterministic mode has said it
        installation._session.say_reduced()
    packages = sorted({module.partition(".")[0] for module in policy.modules})
    if installation.mode != "auto" and not any(_importable(package) for package in packages):
        logger.warning(
            "the policy's modules (%s) match nothing that can be imported here: no autotuner will be in scope; "
            "name the packages whose kernels you run in modules",
            " ".join(policy.modules) or "none",
        )
    logger.info("installed: %r", installation)
    return installation


def uninstall() -> None:
    """Take the installed policy out and restore exactly what was there. Does nothing when none is installed."""
    global _current
    with _lock:
        installation, _current = _current, None
        if installation is None:
            return
        try:
            installation._deactivate()
        finally:
            try:
                installation.when_taken_out(None)
            finally:
                installation._close()


def deterministic_mode(policy: AutotunePolicy | None = None, **settings: Any) -> Installation:
    """Put the whole process into deterministic mode, autotuners pinned: ``install`` with a mode of these settings.

    Args:
        policy: the policy; the default one when None, whose mode is then pinned.
        settings: keywords of :class:`tuning.determinism.DeterministicMode`, such as ``args`` and ``attention_backend``.

    Raises:
        As :func:`install`.
    """
    from .determinism import DeterministicMode

    return install(policy, deterministic=DeterministicMode(**settings))


def active_installation() -> Installation | None:
    """The installation in charge, or None."""
    return _current


def active_policy() -> AutotunePolicy | None:
    """The policy in charge, or None."""
    installation = _current
    return None if installation is None else installation.policy


def choices() -> tuple[Choice, ...]:
    """Choices made since ``install``, in the order in which they were made; empty when nothing is installed."""
    installation = _current
    return () if installation is None else installation.choices


def benchmarks_run() -> int:
    """How many candidates autotuners in scope have timed since ``install``; 0 when nothing is installed."""
    installation = _current
    return 0 if installation is None else installation.benchmarks


def _require_installation(what: str) -> Installation:
    installation = _current
    if installation is None:
        raise TuningError(f"{what}: no policy is installed; call tuning.install() first, on every rank")
    return installation


def _in_process_group() -> bool:
    return _group() is not None


def verify_choices(group: Any = None, *, timeout: float | None = None) -> bool:
    """Compare what the ranks of a group have launched. Call it where all of them arrive.

    Args:
        group: a torch process group; the default group when None.
        timeout: how long to wait for a rank, in seconds; None: 300 s.

    Returns:
        Whether all agree, and the same on each rank. True outside a process group.

    Raises:
        DisagreementError: ranks disagree and the policy is strict, or a rank sent what cannot be read; on all ranks.
        AbsentRankError: a rank did not arrive in time.
        TuningError: no policy is installed on this rank though there is a process group.
    """
    if not _in_process_group():
        return True
    return _require_installation("verify_choices").verify(group, timeout=timeout)


def maybe_verify_choices(step: int, group: Any = None, *, timeout: float | None = None) -> bool | None:
    """:func:`verify_choices` at every step that is a multiple of the policy's ``verify_every``.

    Args:
        step: the training step, the same on all ranks.
        group: a torch process group; the default group when None.
        timeout: how long to wait for a rank, in seconds; None: 300 s.

    Returns:
        The verdict, or None where no check is due at this step or no policy is installed.

    Raises:
        As :func:`verify_choices`.
    """
    installation = _current
    if installation is None or installation.policy.verify_every == 0 or step % installation.policy.verify_every:
        return None
    return installation.verify(group, step=step, timeout=timeout)


def state_dict(*, all_ranks: bool = False, group: Any = None) -> dict[str, Json]:
    """The choices of this run, as JSON data for a checkpoint. What config-invariant kernels launched is not in it.

    Args:
        all_ranks: give the choices of all ranks of ``group``, on each of them. It is a collective: call it on all of
            them at the same place. Ranks may launch different kernels (stages of a pipeline), and a checkpoint that
            only rank 0 writes needs them all.
        group: a torch process group; the default group when None.

    Raises:
        TuningError: no policy is installed.
        PolicyError: the mode is not ``pinned``, or ``chaos`` is on.
        AbsentRankError: a rank did not arrive in time.
    """
    return _require_installation("state_dict").state_dict(all_ranks=all_ranks, group=group)


def load_state_dict(state: Mapping[str, Json]) -> None:
    """Launch what a checkpoint's run launched, for the same kernel, key and arch, although tables have changed since.

    Call it after ``install`` and before the first kernel is launched, on every rank. What the state does not have is
    chosen as ever. A carried config that is no live candidate any more, or that a table has come to deny, is a
    ``TableError`` at its launch: nothing else is launched in its place.

    Args:
        state: what :func:`state_dict` returned, possibly on another rank.

    Raises:
        TableError: ``state`` is malformed; names the place in it.
        PolicyError: the mode is not ``pinned``, ``chaos`` is on, or a kernel of the state is out of the policy's scope.
        TuningError: no policy is installed, or choices made already differ from the state.
        Whatever is raised, no choice has been loaded.
    """
    _require_installation("load_state_dict").load_state_dict(state)


class _ManifestModule(ModuleType):
    """``tuning.manifest`` is the module of manifests and, called, the manifest of the installed policy.

    The public name of the function is that of the module. Giving the module a call keeps both names, where a function
    that shadowed it would break ``tuning.manifest.read_manifest`` once this file is imported.
    """

    def __call__(self) -> Manifest:
        """What the installed policy has run so far.

        Raises:
            TuningError: no policy is installed.
        """
        return _require_installation("manifest").manifest()


manifest_module.__class__ = _ManifestModule


def _after_fork_in_child() -> None:
    """Make the locks anew that a thread of the parent may have held: it does not exist here to let them go."""
    global _lock
    _lock = threading.RLock()
    if _current is not None:
        _current._session.lock = threading.RLock()
        _current._interception.after_fork()


os.register_at_fork(after_in_child=_after_fork_in_child)
