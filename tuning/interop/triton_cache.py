"""Triton's own disk cache of timings (``*.autotune.json``, Triton 3.4 and later), read and written.

An autotuner with ``cache_results`` keeps, for each key, one file ``<hash>/<function>.autotune.json`` in Triton's cache
folder: ``key`` (values in order of declaration, then ``str`` of the dtypes in the order of the call) and
``configs_timings``, pairs of a config and its times in milliseconds, infinite where it failed. The hash covers Triton,
backend and target, the kernel's source, some environment, the key and every candidate; none of these stands in the
file. There is no file where the key is empty or a candidate has a ``pre_hook``.
(Read in ``Autotuner.check_disk_cache`` of Triton 3.4 to 3.9, where it is the same.)

**Reading** gives journals: each file is a recording, so :func:`tuning.merge.merge` pools them with others and treats
near ties as always. A file whose times are all 0 holds none: its config is taken over as reported. A journal names the
tensors of a key; where those names are not known, stand-ins are used (``dtype0`` and so on): such records merge with
each other only, and in the tables that are given besides, their entries know the sequence of dtypes alone.

**Writing** is left to Triton: the live autotuner's own ``check_disk_cache`` is called on a copy, with a benchmark that
reports our config alone, so hash, folder and content are Triton's. It needs what the hash covers: the installed kernel,
the target as the current device, and the same environment. What a launch's arguments decide (a pruner) cannot be
reproduced, and is a loss. Naming that method of an autotuner is all that this module knows of Triton's internals;
computing the hash here would copy a good part of them.
"""

from __future__ import annotations

import copy
import importlib
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from tuning._autotuner_search import python_function, search
from tuning.errors import TuningError, UnsupportedTritonError
from tuning.interception import AutotunerFacts, current_arch, facts, supported_triton
from tuning.interop._configs import read_config
from tuning.interop._documents import Node, find_files, parse, read_bytes
from tuning.interop._known import KnownKernels
from tuning.interop._result import Exported, Imported, Losses
from tuning.interop._rows import (
    Rows,
    call_sequences,
    check_arch,
    entry_of,
    entry_place,
    joined,
    list_lost_rows,
    python_key,
    raw_key,
)
from tuning.interop._values import Unportable, decode
from tuning.journal import Journal
from tuning.merge import merge
from tuning.spec import CandidateTiming, Environment, Kernel, Key, LaunchConfig, TuningRecord
from tuning.tables import Denied, Entry, TableFile

__all__ = ["SUFFIX", "parse_file", "read", "write"]

SUFFIX = ".autotune.json"
"""Ending of the files' names."""

_MOST_CANDIDATES = 4096
_SYSTEM = "Triton"


# --- reading ----------------------------------------------------------------------------------------------------------


def read(paths: Iterable[str | os.PathLike[str]], known: KnownKernels, arch: str | None) -> Imported:
    """Read files, and all files of cache folders.

    Args:
        paths: files, and folders such as ``~/.triton/cache``.
        known: has the kernels' qualified names, the names of their key arguments and, if at all, of their tensors.
        arch: what they were timed on; the files do not say.

    Raises:
        TableError: a file is none of Triton's, or ``arch`` is missing.
    """
    losses = Losses()
    its_arch = check_arch(arch, "triton-cache")
    journals: list[Journal] = []
    unnamed: set[tuple[str, str]] = set()
    reported = Rows(its_arch, losses)
    for path in find_files(paths, f"**/*{SUFFIX}", "files of Triton's cache"):
        _read_file(parse(read_bytes(path), path, infinite=True), known, its_arch, losses, journals, unnamed, reported)
    return _imported(journals, unnamed, losses, reported)


def parse_file(data: bytes, file: str, known: KnownKernels, arch: str) -> Imported:
    """Read the bytes of one file; its name is that of the kernel.

    Raises:
        TableError: they are none of Triton's.
    """
    losses = Losses()
    journals: list[Journal] = []
    unnamed: set[tuple[str, str]] = set()
    reported = Rows(arch, losses)
    _read_file(parse(data, file, infinite=True), known, arch, losses, journals, unnamed, reported)
    return _imported(journals, unnamed, losses, reported)


def _read_file(
    document: Node,
    known: KnownKernels,
    arch: str,
    losses: Losses,
    journals: list[Journal],
    unnamed: set[tuple[str, str]],
    reported: Rows,
) -> None:
    members = document.members("a key with its timings, as an object", ("key", "configs_timings"))
    for name in members:
        if name not in ("key", "configs_timings"):
            losses.add("unknown_member", members[name].place, f"the member {name[:80]!r} is not read")
    timings = _read_timings(members["configs_timings"], losses)
    kernel = known.resolve(os.path.basename(document.file).removesuffix(SUFFIX), document, losses)
    found = None if kernel is None else raw_key(members["key"], kernel, known, losses)
    if kernel is None or found is None:
        return
    values, sequence = found
    if not any(time for _, times in timings for time in times if time < float("inf")):
        # No kernel takes no time: whoever wrote this had a config and no timing, as this module's own export may.
        config = next((config for config, times in timings if max(times) < float("inf")), None)
        if config is not None:
            losses.add("evidence", document.place, f"{kernel}: its times are all 0, so they were made up: not measured")
            evidence = {"reported_by": f"Triton cache file {os.path.basename(document.file)}", "measured": False}
            reported.add(entry_of(kernel, values, sequence, config, evidence, known), document.place)
            return
    key = known.name_dtypes(kernel, values, sequence)
    if key is None:
        # Any names would do: they only have to be the same for the same key.
        key = Key(values, tuple((f"dtype{index}", dtype) for index, dtype in enumerate(sequence)))
        if sequence:
            unnamed.add((kernel, key.text))
            losses.add(
                "unnamed_dtypes",
                members["key"].place,
                f"{kernel}: which tensors have these dtypes is not known, so its record goes by stand-ins: merge it "
                "only with others of Triton's cache. A journal or manifest of a run knows the tensors",
            )
    # As Triton takes the least, comparing times one after the other; the first of equal ones.
    winner = min(timings, key=lambda item: item[1])[0]
    candidates = tuple(
        CandidateTiming(config, None, "infinite time in Triton's cache")
        if any(time == float("inf") for time in times)
        else CandidateTiming(config, times)
        for config, times in timings
    )
    record = TuningRecord(Kernel(kernel), key, arch, candidates, winner)
    journals.append(Journal(document.file, Environment(arch), (record,)))


def _read_timings(node: Node, losses: Losses) -> list[tuple[LaunchConfig, tuple[float, ...]]]:
    pairs = node.items("pairs of a config and its times")
    if not 0 < len(pairs) <= _MOST_CANDIDATES:
        node.fail(f"1 to {_MOST_CANDIDATES} pairs of a config and its times", f"{len(pairs)} of them")
    found: dict[LaunchConfig, tuple[float, ...]] = {}
    for pair in pairs:
        both = pair.items("a pair of a config and its times")
        if len(both) != 2:
            pair.fail("a pair of a config and its times", f"{len(both)} items")
        found[read_config(both[0], losses, extra=True)] = _read_times(both[1])
    return list(found.items())


def _read_times(node: Node) -> tuple[float, ...]:
    numbers = node.items("times") if type(node.value) is list else [node]
    if not 0 < len(numbers) <= 16:
        node.fail("1 to 16 times", f"{len(numbers)} of them")
    what = "a time in milliseconds, 0 or more"
    return tuple(
        item.value if type(item.value) is float and item.value >= 0 else float(item.count(what, 0)) for item in numbers
    )


def _imported(journals: list[Journal], unnamed: set[tuple[str, str]], losses: Losses, reported: Rows) -> Imported:
    if not journals:
        return Imported(reported.tables(), losses.all())
    losses.add(
        "header",
        "Triton's cache",
        "its files say neither device nor version of Triton nor source of the kernel: only the hash in their folder's "
        "name depends on these",
    )
    merged = merge(journals)
    for facts_of_key in merged.keys:
        if facts_of_key.recordings_count > 1:
            losses.add(
                "header",
                f"{facts_of_key.kernel.qualified_name} {facts_of_key.key}",
                f"{facts_of_key.recordings_count} files have this key and differ in what the hash covers: their "
                "timings are pooled",
            )
    tables = tuple(_without_stand_ins(table, unnamed, losses) for table in merged.tables)
    return Imported(joined(tables, reported.tables()), losses.all(), tuple(journals))


def _without_stand_ins(table: TableFile, unnamed: set[tuple[str, str]], losses: Losses) -> TableFile:
    def stands_in(row: Entry | Denied) -> bool:
        return row.key is not None and (row.kernel, Key(row.key, row.dtypes or ()).text) in unnamed

    entries = tuple(
        replace(entry, dtypes=None, dtype_sequence=tuple(dtype for _, dtype in entry.dtypes or ()))
        if stands_in(entry)
        else entry
        for entry in table.entries
    )
    for row in table.denied:
        if stands_in(row):
            losses.add(
                "denied", row.kernel, f"{row.config} failed ({row.reason}), for tensors whose names are not known"
            )
    return replace(table, entries=entries, denied=tuple(row for row in table.denied if not stands_in(row)))


# --- writing ----------------------------------------------------------------------------------------------------------


def write(tables: Sequence[TableFile], folder: str | os.PathLike[str], known: KnownKernels) -> Exported:
    """Let Triton write its files into ``folder``, a cache folder as ``TRITON_CACHE_DIR`` names one.

    Imports the modules of the kernels. The process must see the device for which the files are meant. While it works,
    ``TRITON_CACHE_DIR`` of this process is ``folder``.

    Args:
        tables: those of another arch than the current device's are a loss.
        folder: made where it is missing.
        known: knows the order of calls.

    Raises:
        UnsupportedTritonError: the installed Triton has no such cache.
        TuningError: Triton cannot compute the hash here, such as without a device.
    """
    found = supported_triton()
    if tuple(map(int, re.findall(r"\d+", found)[:2])) < (3, 4):
        raise UnsupportedTritonError(
            f"triton {found} keeps no timings on disk: writing its cache needs triton>=3.4",
            found=found,
            supported=">=3.4",
        )
    losses = Losses()
    list_lost_rows(tables, _SYSTEM, losses)
    here = current_arch()
    before = _files_in(folder)
    for table in tables:
        if table.arch != here:
            losses.add(
                "other_arch",
                table.path or f"{table.arch}/{table.package}.json",
                f"the hash covers the target: this process runs on {here}, so none of {table.arch} can be written",
            )
            continue
        with _cache_folder(folder):
            _write_table(table, known, losses)
    return Exported(tuple(sorted(_files_in(folder) - before)), losses.all())


def _files_in(folder: str | os.PathLike[str]) -> set[Path]:
    return set(Path(folder).glob(f"*/*{SUFFIX}"))


_environment_lock = threading.Lock()


@contextmanager
def _cache_folder(folder: str | os.PathLike[str]) -> Iterator[None]:
    """Triton reads the variable at each use; there is no argument for it."""
    with _environment_lock:
        earlier = os.environ.get("TRITON_CACHE_DIR")
        os.environ["TRITON_CACHE_DIR"] = os.path.abspath(folder)
        try:
            yield
        finally:
            if earlier is None:
                del os.environ["TRITON_CACHE_DIR"]
            else:
                os.environ["TRITON_CACHE_DIR"] = earlier


def _write_table(table: TableFile, known: KnownKernels, losses: Losses) -> None:
    autotuners: dict[str, tuple[Any, str]] = {}
    slots: dict[object, LaunchConfig] = {}
    for entry in table.entries:
        place = entry_place(table, entry)
        if entry.key is None:
            losses.add("wildcard", place, "Triton's cache has one file for each key, and nothing for all keys")
            continue
        if entry.kernel not in autotuners:
            autotuners[entry.kernel] = _installed(entry.kernel)
        autotuner, reason = autotuners[entry.kernel]
        if autotuner is None:
            losses.add("not_found", place, reason)
            continue
        read = facts(autotuner)
        live = _live_config(autotuner, read, entry, place, losses)
        if live is None:
            continue
        try:
            values = [decode(text) for _, text in entry.key]
        except Unportable as error:
            losses.add("value", place, f"a key value cannot be written, nor can this row: {error}")
            continue
        for dtypes in call_sequences(table, entry, known, _SYSTEM, losses):
            key = (*values, *(f"torch.{dtype}" for dtype in dtypes))
            if not key:
                losses.add("lookup", place, "Triton keeps no file for an empty key")
                continue
            slot = slots.setdefault((entry.kernel, python_key(key)), entry.config)
            if slot != entry.config:
                losses.add(
                    "lookup",
                    place,
                    "another row's key is equal in Python (True, 1, 1.0), so Triton keeps one config for both",
                )
            _write_file(autotuner, key, live, entry, place, losses)


def _installed(kernel: str) -> tuple[Any, str]:
    """The autotuner of a kernel, or None and why there is none."""
    module_name = kernel.partition(".<locals>")[0].rpartition(".")[0]
    reason = ""
    while module_name:
        try:
            module = importlib.import_module(module_name)
        except Exception as error:  # whatever a package's own code raises here
            reason = reason or f"{module_name} does not import ({type(error).__name__}: {' '.join(str(error).split())})"
            module_name = module_name.rpartition(".")[0]  # a kernel in a class
            continue
        for binding in search({module_name: module}, [module_name]):
            function = python_function(binding.autotuner)
            if function is not None and f"{function.__module__}.{function.__qualname__}" == kernel:
                return binding.autotuner, ""
        break
    return None, reason or "no autotuner of this name is in the installed package"


def _live_config(autotuner: Any, read: AutotunerFacts, entry: Entry, place: str, losses: Losses) -> Any:
    """The live candidate that an entry names; None, with the loss noted, where Triton would not use a file for it."""
    live = next((config for config in autotuner.configs if LaunchConfig.of(config) == entry.config), None)
    if live is None:
        losses.add("not_a_candidate", place, f"{entry.config} is none of the installed kernel's {len(read.candidates)}")
    elif len(read.candidates) == 1:
        losses.add("unread", place, "the installed autotuner has one candidate and asks no cache")
        return None
    elif "config.pre_hook" in read.hooks:
        losses.add("hook", place, "Triton keeps no file where a candidate has a pre_hook")
        return None
    elif read.pruner:
        losses.add("lookup", place, "the hash covers what the pruner leaves, which depends on a launch's arguments")
        return None
    elif not read.cache_results:
        losses.add(
            "unread",
            place,
            "the autotuner does not ask the cache: set TRITON_CACHE_AUTOTUNING=1 where it is to be read",
        )
    return live


def _write_file(autotuner: Any, key: tuple[Any, ...], live: Any, entry: Entry, place: str, losses: Losses) -> None:
    shadow = copy.copy(autotuner)
    shadow.cache = {}
    shadow.configs_timings = {}
    best = entry.evidence.get("best_ms")
    time = float(best) if isinstance(best, (int, float)) and 0 < best < float("inf") else 0.0

    def report() -> None:
        shadow.configs_timings = {live: [time, time, time]}

    try:
        shadow.check_disk_cache(key, list(autotuner.configs), report)
        # Asked again, Triton reads what it has: the same config, or a file that was there already.
        shadow.configs_timings = {}
        shadow.check_disk_cache(key, list(autotuner.configs), lambda: None)
    except Exception as error:
        raise TuningError(
            f"{entry.kernel}: Triton cannot compute the name of its file here ({type(error).__name__}: {error}); write "
            "its cache in a process that sees the device"
        ) from error
    kept: Mapping[Any, Any] = shadow.cache
    chosen = kept.get(key)
    if chosen is None:
        losses.add("unread", place, "Triton does not read back what it wrote: its cache is switched off or elsewhere")
    elif LaunchConfig.of(chosen) != entry.config:
        losses.add(
            "shadowed",
            place,
            f"Triton has timings for this key in that folder already, with {LaunchConfig.of(chosen)} the fastest: give "
            "another folder",
        )
    elif not time:
        losses.add("evidence", place, "no time of it is known, so its file says 0 ms, which is made up")
