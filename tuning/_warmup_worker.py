"""The process that compiles: reads tasks from standard input, answers on standard output, a line of JSON each.

It is told the target and the tables first. To each task it answers what it chose; it compiles when told to go on, which
is how two processes do not compile the same thing. What packages print goes to standard error.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from ._autotuner_search import search
from ._launch_specialization import heuristic_values, identity, stand_in_arguments
from ._launch_target import SHARED_MEMORY, Compiled, build_driver_module, build_launcher, compile_config, compile_for
from ._package_walk import package_without_init
from ._warmup_tasks import Failure, Task, Warmed
from .errors import InventoryError, TuningError
from .interception import facts, live_candidates, resource_errors, seen_parameters, supported_triton
from .policy import AutotunePolicy
from .selection import Decision, decide
from .spec import Json, LaunchConfig
from .tables import load_tables

__all__ = ["Compiler", "find_kernel", "main"]


def find_kernel(qualified_name: str, candidates: Sequence[str] = ()) -> Any:
    """The autotuner of a kernel, out of its package.

    Args:
        qualified_name: of the kernel.
        candidates: texts of configs; where several autotuners share the kernel, the one that has them all.

    Raises:
        TuningError: it cannot be imported, or there is none.
    """
    if "<locals>" in qualified_name or qualified_name.startswith("__main__."):
        raise TuningError(
            f"{qualified_name} cannot be imported by another process: expected a kernel at the top level of a module"
        )
    module = _module_of(qualified_name)
    by_identity = {id(item.autotuner): item.autotuner for item in search({module.__name__: module}, [module.__name__])}
    found = [item for item in by_identity.values() if facts(item).kernel.qualified_name == qualified_name]
    if len(found) > 1:
        found = [item for item in found if set(candidates) <= {config.text for config in facts(item).candidates}]
    if not found:
        raise TuningError(
            f"{module.__name__} has no autotuner of {qualified_name} here: expected the version of the package that "
            "was recorded"
        )
    return found[0]


def _module_of(qualified_name: str) -> ModuleType:
    failure: InventoryError | None = None
    name = qualified_name
    while "." in name:
        name = name.rpartition(".")[0]
        try:
            with package_without_init(name) as module:
                return module
        except InventoryError as error:
            failure = failure or error
    assert failure is not None
    raise failure


class Compiler:
    """Chooses and compiles for tasks, one after another, in this process.

    Args:
        arch: the target.
        policy: chooses.
        multiprocessors: of the device, where known.
        build_driver: also build at once what is not a kernel's own.
    """

    def __init__(
        self, arch: str, policy: AutotunePolicy, multiprocessors: int = 0, *, build_driver: bool = False
    ) -> None:
        self.triton = supported_triton()
        self.arch = arch
        self.policy = policy
        self.tables = load_tables(arch, policy.table_path, neighbours=policy.on_miss == "nearest")
        compile_for(arch, multiprocessors=multiprocessors)
        if build_driver:
            # While packages are imported. One process does it; what goes wrong is met again, and said, at a launcher.
            threading.Thread(target=_quietly, args=(build_driver_module, arch), daemon=True).start()
        self._resource_errors = resource_errors()

    def choose(self, task: Task) -> Chosen:
        """Choose for a task as a pinned launch does."""
        autotuner = find_kernel(task.kernel.qualified_name, task.candidates)
        args, kwargs = stand_in_arguments(task.specialization)
        named = {**dict(zip(autotuner.arg_names, args, strict=False)), **kwargs}
        seen = seen_parameters(autotuner, {name: value for name, value in named.items() if name in autotuner.arg_names})
        if task.specialization["triton"] == self.triton and seen != task.specialization["parameters"]:
            raise TuningError(
                "the kernel's arguments are not seen here as they were when it was recorded: expected "
                f"{task.specialization['parameters']}, found {seen}; install the recorded version of its package"
            )
        candidates = live_candidates(autotuner, args, kwargs)
        kernel = facts(autotuner).kernel
        decision = decide(kernel, task.key, self.arch, candidates, self.tables, self.policy, triton=self.triton)
        notes = [notice.message for notice in decision.notices]
        configs = {LaunchConfig.of(config).text for config in candidates}
        if task.candidates and set(task.candidates) != configs:
            notes.append(
                f"{len(configs)} candidates here, not the {len(task.candidates)} that were timed; where the run has "
                "others again, it may choose another"
            )
        return Chosen(task, autotuner, args, kwargs, decision, notes)

    def compile(self, chosen: Chosen) -> Warmed:
        """Compile what was chosen; where it lacks resources on this arch, what a launch would fall back to."""
        first = chosen.decision.choice
        reason = ""
        for config in chosen.decision.order:
            try:
                compiled = compile_config(chosen.autotuner, config, chosen.args, chosen.kwargs)
            except self._resource_errors as error:
                reason = reason or f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                continue
            limit = SHARED_MEMORY.get(self.arch)
            if limit is not None and compiled.shared_memory > limit:
                reason = reason or f"{compiled.shared_memory} bytes of shared memory, of {limit}"
                continue
            notes = list(chosen.notes)
            if reason:
                notes.append(f"in place of {first.launch_config}, which cannot be launched: {reason}")
            started = time.perf_counter()
            notes += self._launcher(compiled)
            return Warmed(
                chosen.task.kernel.qualified_name,
                str(chosen.task.key),
                str(LaunchConfig.of(config)),
                first.source,
                compiled.hash,
                compiled.seconds + time.perf_counter() - started,
                compiled.cached,
                tuple(notes),
            )
        raise TuningError(f"no candidate can be launched on {self.arch}: {reason}")

    def _launcher(self, compiled: Compiled) -> list[str]:
        try:
            build_launcher(compiled, self.arch)
        except Exception as error:
            return [f"its launcher, in C, cannot be built here and is left to the first launch: {_one_line(error)}"]
        return []


class Chosen:
    """A task with its kernel and what was chosen for it."""

    def __init__(
        self, task: Task, autotuner: Any, args: tuple[Any, ...], kwargs: Any, decision: Decision, notes: list[str]
    ) -> None:
        self.task, self.autotuner, self.args, self.kwargs = task, autotuner, args, kwargs
        self.decision, self.notes = decision, notes

    @property
    def digest(self) -> str:
        """Equal for what is compiled to one entry of the cache."""
        choice = self.decision.choice
        data = {**self.task.specialization, "heuristics": None}  # of all candidates; here those of one count
        values = heuristic_values(self.autotuner, choice.config, self.args, self.kwargs)
        text = [self.task.kernel.qualified_name, identity(data), choice.launch_config.text, values]
        return hashlib.sha256(json.dumps(text).encode()).hexdigest()


def _quietly(function: Callable[[str], None], arch: str) -> None:
    with contextlib.suppress(Exception):
        function(arch)


def _one_line(error: BaseException) -> str:
    if isinstance(error, TuningError):
        return " ".join(error.message.split())
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}" if text else type(error).__name__


def main() -> None:
    """Entry point of the process."""
    started = time.time()
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(value: Json) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    settings = json.loads(sys.stdin.readline())
    policy = AutotunePolicy(
        mode="pinned",
        table_path=tuple(settings["table_path"]),
        on_miss=settings["on_miss"],
        block_sizes=tuple((name, value) for name, value in settings["block_sizes"]),
    )
    try:
        compiler = Compiler(settings["arch"], policy, settings["multiprocessors"], build_driver=settings["first"])
    except Exception as error:
        answer({"refused": _one_line(error)})
        return
    began = min(settings["started"], started)
    ready = False
    for line in sys.stdin:
        task = Task.from_json(json.loads(line))
        name, key = task.kernel.qualified_name, str(task.key)
        try:
            chosen = compiler.choose(task)
            if not ready:
                ready = True
                answer({"ready": time.time() - began})
            answer({"digest": chosen.digest})
            if not json.loads(sys.stdin.readline()):
                continue
            answer({"warmed": compiler.compile(chosen).to_json()})
        except Exception as error:
            answer({"failed": Failure(name, key, _one_line(error)).to_json()})


if __name__ == "__main__":
    main()
