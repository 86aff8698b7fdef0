"""Find autotuners: those that packages define, joined with those that a process reached, and what covers each.

:func:`take_inventory` imports every module of the packages named, collects each autotuner once, whatever it is wrapped
in and wherever it is bound, and says what it could not look into: modules that do not import, decorators in functions
that have not run, decorators that left no autotuner. :func:`join` adds what a run showed. Nothing is launched or
compiled, and no device is asked.

**JSON.** ``to_json`` carries ``"version": 1``. States and note kinds are words, not numbers, and new ones may be added;
members are not renamed. Candidates are counted, and listed only on request: FLA alone has some four thousand.

The work is split: :mod:`tuning._package_walk` imports, :mod:`tuning._autotuner_search` searches objects,
:mod:`tuning._autotuner_source` reads sources, :mod:`tuning._autotuner_info` holds the value types and their states,
:mod:`tuning._autotuner_join` joins, with a manifest :mod:`tuning._autotuner_run`.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

from ._autotuner_info import (
    JSON_VERSION,
    AutotunerInfo,
    ChoiceCount,
    Note,
    NoteKind,
    PolicyLike,
    Problem,
    ProblemKind,
    Resets,
    State,
    TableCoverage,
    judge,
    read_notes,
    rows,
)
from ._autotuner_join import join, note_shared_names
from ._autotuner_run import join_manifests, policy_of
from ._autotuner_search import Binding, python_function, search
from ._autotuner_source import ImportedSources, parse_source
from ._package_walk import Unimported, package_without_init, walk
from ._table_fit import misfit
from .errors import InventoryError
from .interception import AutotunerFacts, facts, supported_triton
from .spec import Json
from .tables import Tables, archs_in, bundled_folder, load_tables

__all__ = [
    "AutotunerInfo",
    "ChoiceCount",
    "Coverage",
    "Inventory",
    "Note",
    "NoteKind",
    "PolicyLike",
    "Problem",
    "ProblemKind",
    "Resets",
    "State",
    "TableCoverage",
    "coverage",
    "join",
    "join_manifests",
    "known_archs",
    "list_autotuners",
    "package_without_init",
    "policy_of",
    "rows",
    "take_inventory",
]

logger = logging.getLogger("tuning.inventory")


class Coverage(NamedTuple):
    """How many autotuners the tables of an arch cover.

    Attributes:
        covered: those with at least one entry that can be used.
        total: those that have something to choose.
        percent: the ratio; 100 if nothing is left to choose, 0 if there is no autotuner at all, or if that nothing is
            left cannot be told from all having been cut at import.
    """

    covered: int
    total: int
    percent: float


@dataclass(frozen=True)
class Inventory:
    """What :func:`take_inventory` found.

    Attributes:
        modules: the packages and modules asked for.
        autotuners: each autotuner whose kernel lies in them, once, by kernel name.
        problems: what was not looked into, by module.
        elsewhere: kernels defined in other packages and bound in these: list their packages to see them.
    """

    modules: tuple[str, ...]
    autotuners: tuple[AutotunerInfo, ...]
    problems: tuple[Problem, ...] = ()
    elsewhere: tuple[str, ...] = ()

    @property
    def candidates(self) -> int:
        """Candidates of all autotuners together."""
        return sum(len(info.candidates) for info in self.autotuners)

    def to_json(self, *, configs: bool = False) -> Json:
        """JSON form; with every candidate if ``configs``."""
        return {
            "version": JSON_VERSION,
            "modules": list(self.modules),
            "autotuners": [info.to_json(configs=configs) for info in self.autotuners],
            "candidates": self.candidates,
            "problems": [problem.to_json() for problem in self.problems],
            "elsewhere": list(self.elsewhere),
        }


def list_autotuners(
    modules: str | Sequence[str],
    *,
    policy: PolicyLike | None = None,
    deterministic: bool = False,
    archs: Sequence[str] | None = None,
    table_path: Sequence[str | os.PathLike[str]] | None = None,
) -> list[AutotunerInfo]:
    """The autotuners of packages and modules; see :func:`take_inventory`, which also returns what could not be seen.

    What could not be seen and would make autotuners is logged as a warning.
    """
    found = take_inventory(modules, policy=policy, deterministic=deterministic, archs=archs, table_path=table_path)
    for problem in found.problems:
        logger.log(logging.WARNING if problem.autotuners else logging.INFO, "%s", problem)
    return list(found.autotuners)


def take_inventory(
    modules: str | Sequence[str],
    *,
    policy: PolicyLike | None = None,
    deterministic: bool = False,
    archs: Sequence[str] | None = None,
    table_path: Sequence[str | os.PathLike[str]] | None = None,
) -> Inventory:
    """Import packages and modules, everything below them included, and collect their autotuners.

    Importing runs the modules' top-level code. Names of tests, scripts and the like are not imported; a submodule that
    raises is a problem, not an error; a package whose ``__init__`` raises is walked without it.

    Args:
        modules: names, such as ``["mamba_ssm", "megatron.core"]``, or one name.
        policy: gives each autotuner its state; without one the state is ``found``.
        deterministic: whether the process runs in deterministic mode, which decides the mode of a policy without one.
        archs: the archs whose tables are looked up; None: every arch for which there is a table.
        table_path: folders of tables over the packaged ones; None: those of the policy.

    Raises:
        InventoryError: a name is malformed, not installed, or is a module whose import raises.
        UnsupportedTritonError: Triton is missing or outside the supported range.
        TableError: a table is malformed.
    """
    names = _names(modules)
    supported_triton()
    folders = tuple(table_path if table_path is not None else policy.table_path if policy is not None else ())
    tables = [load_tables(arch, folders) for arch in (known_archs(folders) if archs is None else archs)]
    unimported = {item.module: item for name in names for item in walk(name).unimported}
    problems = [_problem_of(item) for item in unimported.values()]
    scanned = _loaded(names)
    sources = ImportedSources(scanned)
    by_object: dict[int, list[Binding]] = {}
    for binding in search(scanned, names):
        by_object.setdefault(id(binding.autotuner), []).append(binding)
    infos: list[AutotunerInfo] = []
    elsewhere: set[str] = set()
    for bindings in by_object.values():
        try:
            read = facts(bindings[0].autotuner)
        except Exception as error:
            reason = f"{bindings[0].where}: {type(error).__name__}: {error}"
            problems.append(Problem(_module_of(bindings[0].where, scanned), "unreadable", reason, 1))
            continue
        kernel = read.kernel.qualified_name
        if not _under(kernel, names):
            elsewhere.add(kernel)
            continue
        covered = [_table_coverage(table, read) for table in tables]
        infos.append(_info(read, bindings, sources, covered, policy, deterministic))
    problems += sources.unmade()
    infos = note_shared_names(sorted(infos, key=lambda info: (info.kernel, info.origin or "", info.found_at)))
    ordered = tuple(sorted(problems, key=lambda problem: (problem.module, problem.kind, problem.reason)))
    return Inventory(names, tuple(infos), ordered, tuple(sorted(elsewhere)))


def known_archs(table_path: Sequence[str | os.PathLike[str]] = ()) -> tuple[str, ...]:
    """Every arch for which there is a packaged table or one in ``table_path``, ``sm90`` before ``sm100``."""
    folders = [folder for folder in (*table_path, bundled_folder()) if os.path.isdir(folder)]
    found = {arch for folder in folders for arch in archs_in(folder)}
    return tuple(
        sorted(found, key=lambda arch: [int(part) if part.isdigit() else part for part in re.split(r"(\d+)", arch)])
    )


def coverage(infos: Iterable[AutotunerInfo], arch: str, *, problems: Iterable[Problem] = ()) -> Coverage:
    """How many autotuners have a usable entry in the tables of ``arch``: the figure for a gate.

    Counted are autotuners that have something to choose: those reduced to one candidate at import count, uncovered;
    other singletons and config-invariant kernels do not count. Out of scope, or out of reach, is uncovered whatever
    the tables hold. No autotuner at all gives 0 percent: a gate that found nothing must not pass. Nor does one that
    found single candidates alone, of which it cannot tell whether they are what is left of more.

    Args:
        infos: the autotuners.
        arch: whose tables.
        problems: what was not looked into. The autotuners that its sources would make count, uncovered, unless the
            module is one that is run by hand or by a test runner.

    Raises:
        InventoryError: the autotuners were listed without the tables of this arch.
    """
    infos = list(infos)
    covered, total = 0, sum(problem.autotuners for problem in problems if problem.kind != "skipped")
    unknown = not infos  # whether nothing, or nothing that is known to be all, was found
    for info in infos:
        reduced = info.has("reduced_at_import")
        if info.has("config_invariant") or (len(info.candidates) == 1 and not reduced):
            unknown = unknown or not (info.has("config_invariant") or info.declared == 1)
            continue
        tables = next((item for item in info.tables if item.arch == arch), None)
        if tables is None:
            looked_up = ", ".join(item.arch for item in info.tables) or "none"
            raise InventoryError(
                f"coverage for {arch} was not looked up: expected {arch!r} among the archs that were listed "
                f"({looked_up}); list the autotuners with archs=[{arch!r}]",
                module=info.module,
                reason=f"archs looked up: {looked_up}",
            )
        total += 1
        reachable = not reduced and not info.has("run_replaced") and info.state not in ("outside scope", "not covered")
        covered += reachable and tables.covers
    percent = 100.0 * covered / total if total else (0.0 if unknown else 100.0)
    return Coverage(covered, total, percent)


# --- building one entry -----------------------------------------------------------------------------------------------


def _names(modules: str | Sequence[str]) -> tuple[str, ...]:
    names = (modules,) if isinstance(modules, str) else tuple(modules)
    for name in names:
        if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
            raise InventoryError(
                f"modules: expected dotted names such as 'mamba_ssm.ops', found {name!r}; correct the name",
                module=name if isinstance(name, str) else None,
                reason="not a dotted name",
            )
    return tuple(dict.fromkeys(names))


def _under(name: str, prefixes: Collection[str]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def _loaded(prefixes: Collection[str]) -> dict[str, ModuleType]:
    """Loaded modules under the prefixes, by name, each once: packages keep old names alive as second entries."""
    found: dict[str, ModuleType] = {}
    seen: set[int] = set()  # by identity: a module may define equality
    loaded = [(name, module) for name, module in list(sys.modules.items()) if isinstance(module, ModuleType)]
    for name, module in sorted(loaded, key=lambda item: (item[0] != item[1].__name__, item[0])):
        if _under(name, prefixes) and id(module) not in seen:
            seen.add(id(module))
            found[name] = module
    return dict(sorted(found.items()))


def _module_of(name: str, modules: Collection[str]) -> str:
    """The longest module name that a dotted name starts with; all but its last part where none is known."""
    prefix = name
    while "." in prefix:
        prefix = prefix.rpartition(".")[0]
        if prefix in modules:
            return prefix
    return name.rpartition(".")[0]


def _table_coverage(tables: Tables, read: AutotunerFacts) -> tuple[TableCoverage, list[str]]:
    """What the tables hold for an autotuner, and why which of their entries cannot be used."""
    entries = tables.entries(read.kernel.qualified_name)
    live = frozenset(read.candidates)
    reasons = [misfit(entry, live, read.key_names, read.arg_names, tables.denied) for entry in entries]
    stale = [reason for reason in reasons if reason]
    exact = sum(entry.key is not None for entry in entries)
    return TableCoverage(tables.arch, exact, exact < len(entries), len(stale)), stale


def _info(
    read: AutotunerFacts,
    bindings: Sequence[Binding],
    sources: ImportedSources,
    covered: Sequence[tuple[TableCoverage, list[str]]],
    policy: PolicyLike | None,
    deterministic: bool,
) -> AutotunerInfo:
    name = read.kernel.qualified_name
    function = python_function(bindings[0].autotuner)
    module = function.__module__ if function is not None else name.rpartition(".")[0]
    origin: str | None = None
    declared, through, fragmenting = None, None, {}
    if function is not None:
        code = function.__code__
        origin = f"{code.co_filename}:{code.co_firstlineno}"
        declared, through = sources.declared(module, function.__name__, code.co_firstlineno)
        fragmenting = sources.fragmenting(module, function.__name__, read)
    # The nearest place says best how it is wrapped; among equals the defining module's, then the first by name.
    places = sorted(bindings, key=lambda place: (place.steps, not place.where.startswith(module + "."), place.where))
    state, reason = judge(read, policy, deterministic=deterministic)
    return AutotunerInfo(
        kernel=name,
        module=module,
        candidates=read.candidates,
        key_names=read.key_names,
        arg_names=read.arg_names,
        hooks=read.hooks,
        pruner=read.pruner,
        resets=Resets(read.reset_to_zero, read.restore_value),
        wrapped=(*places[0].wrappers, "autotuner", *read.inner),
        state=state,
        reason=reason,
        class_name=read.class_name,
        source_hash=read.kernel.source_hash,
        origin=origin,
        found_at=tuple(dict.fromkeys(place.where for place in places)),
        declared=declared,
        tables=tuple(item for item, _ in covered),
        notes=read_notes(
            read,
            declared=declared,
            through=through,
            fragmenting=fragmenting,
            stale={item.arch: reasons for item, reasons in covered},
            policy=policy,
        ),
    )


def _problem_of(item: Unimported) -> Problem:
    source = parse_source(item.source)
    count = len(source.calls) if source is not None else 0
    return Problem(item.module, _KINDS[item.kind], item.reason, count)


_KINDS: Mapping[str, ProblemKind] = {
    "failed": "does not import",
    "walked": "walked without __init__",
    "skipped": "skipped",
}
