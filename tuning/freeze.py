"""Freeze a run: turn the choices in its manifest into tables that make exactly these choices again.

Every choice of every rule becomes an exact entry, so a run with the tables alone and ``on_miss="error"`` launches what
the first one launched: nothing is left to a rule that a newer version, another list of candidates or a clock could
decide otherwise. A config that was launched in place of one that could not be is frozen itself, so the failure is not
repeated; wildcards are not used, so a key that the run did not have stays a miss.

A key may have several configs: the compiler sees more than the key, so what one launch could run another could not. A
table holds one config for a key. The one that is frozen is the one that was chosen, or, where that never ran, the first
in the order of fallback; at a launch that cannot run it the same failure leads to the same replacement again. So such
keys are reported, and are reproduced as far as the failures repeat. Where several configs were *chosen* for one key (in
several processes, say under ``chaos`` or ``auto``), one table cannot bring them back, and the report says so.

Kernels of ``config_invariant`` that Triton timed are frozen too, but a policy that lists them leaves them to the clock
whatever the tables hold: they are named, and such a run is not exact.

Pure: manifests in, tables out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from tuning.errors import TableError
from tuning.manifest import Launch, Manifest
from tuning.selection import static_cost
from tuning.spec import Json, Kernel, Key, LaunchConfig, replaces
from tuning.tables import Entry, TableFile

__all__ = ["Conflict", "Frozen", "freeze"]


@dataclass(frozen=True)
class Conflict:
    """A key for which several configs were launched.

    Attributes:
        arch, kernel, key: the key.
        frozen: the config in the table.
        configs: all that were launched, in the order in which they were met.
        reproduced: whether a run with the table launches each of them where it was launched, provided that what could
            not be launched still cannot.
    """

    arch: str
    kernel: str
    key: Key
    frozen: LaunchConfig
    configs: tuple[LaunchConfig, ...]
    reproduced: bool

    def __str__(self) -> str:
        others = ", ".join(str(config) for config in self.configs if config != self.frozen)
        then = (
            "which take its place again where it cannot be launched"
            if self.reproduced
            else "which were chosen too and will not be launched"
        )
        return f"{self.kernel} ({self.key}) on {self.arch}: frozen is {self.frozen}; the run also has {others}, {then}"

    def to_json(self) -> Json:
        """JSON form."""
        return {
            "arch": self.arch,
            "kernel": self.kernel,
            "key": self.key.to_json(),
            "frozen": self.frozen.to_json(),
            "configs": [config.to_json() for config in self.configs],
            "reproduced": self.reproduced,
        }


@dataclass(frozen=True)
class Frozen:
    """What freezing gives.

    Attributes:
        tables: one for each arch and top-level package, sorted, ready for :func:`tuning.tables.write_table`.
        conflicts: the keys with several configs, sorted.
        left_to_clock: kernels that Triton timed since the run's policy lists them in ``config_invariant``, sorted.
    """

    tables: tuple[TableFile, ...]
    conflicts: tuple[Conflict, ...]
    left_to_clock: tuple[str, ...] = ()

    @property
    def exact(self) -> bool:
        """Whether a run with the tables, under the same ``config_invariant``, launches what the manifests say."""
        return not self.left_to_clock and all(conflict.reproduced for conflict in self.conflicts)


def freeze(manifests: Manifest | Iterable[Manifest]) -> Frozen:
    """Tables that make the choices of a run again.

    Args:
        manifests: of a run: of one process, or of several of its ranks.

    Raises:
        TableError: the manifests hold no choice at all, or one kernel had several sources.
    """
    runs = (manifests,) if isinstance(manifests, Manifest) else tuple(manifests)
    places: dict[tuple[str, str, str], list[tuple[Launch, Manifest]]] = {}
    for run in runs:
        for launch in run.choices:
            places.setdefault((launch.arch, launch.kernel, launch.key.text), []).append((launch, run))
    if not places:
        raise TableError(
            f"freeze: expected choices in the manifest{'s' * (len(runs) != 1)}, found none; did the run launch an "
            "autotuner in scope?",
            expected="choices",
            found="none",
        )
    hashes = _source_hashes(runs)
    entries: dict[tuple[str, str], list[Entry]] = {}
    conflicts: list[Conflict] = []
    for (arch, kernel, _), launches in sorted(places.items()):
        entry, conflict = _freeze_key(launches, hashes.get((arch, kernel)))
        entries.setdefault((arch, Kernel(kernel).package), []).append(entry)
        if conflict is not None:
            conflicts.append(conflict)
    tables = tuple(_table(group, rows, runs) for group, rows in sorted(entries.items()))
    clock = {
        launch.kernel
        for run in runs
        for launch in run.choices
        if launch.source == "timed" and launch.kernel in (run.policy.get("config_invariant") or ())
    }
    return Frozen(tables, tuple(conflicts), tuple(sorted(clock)))


def _source_hashes(runs: Iterable[Manifest]) -> Mapping[tuple[str, str], str]:
    found: dict[tuple[str, str], str] = {}
    for run in runs:
        for launch in run.choices:
            if launch.source_hash is None:
                continue
            known = found.setdefault((launch.arch, launch.kernel), launch.source_hash)
            if known != launch.source_hash:
                raise TableError(
                    f"freeze: {launch.kernel} on {launch.arch} had two sources in these runs ({known} and "
                    f"{launch.source_hash}); freeze the runs of one version of the package",
                    expected="one source for each kernel",
                    found=f"{known} and {launch.source_hash}",
                )
    return found


def _freeze_key(launches: list[tuple[Launch, Manifest]], source_hash: str | None) -> tuple[Entry, Conflict | None]:
    configs = tuple(dict.fromkeys(launch.config for launch, _ in launches))
    chosen = tuple(dict.fromkeys(launch.config for launch, _ in launches if not launch.is_fallback))
    # Among replacements alone, the first in the order of fallback: at a launch that cannot run it the order leads on to
    # the others, as it did. In a resumed run that may be one that the others stood in for.
    replaced = [each for each in configs if any(replaces(launch.detail, each) for launch, _ in launches)]
    first = min(replaced or configs, key=lambda each: (static_cost(each), each.order))
    config = chosen[0] if chosen else first
    launch, run = next(item for item in launches if item[0].config == config)
    evidence: dict[str, Json] = {"frozen_from": f"run {run.digest}", "rule": launch.source}
    if launch.detail:
        evidence["note"] = launch.detail
    entry = Entry(launch.kernel, launch.key.values, launch.key.dtypes, None, config, evidence, source_hash)
    if len(configs) == 1:
        return entry, None
    return entry, Conflict(launch.arch, launch.kernel, launch.key, config, configs, len(chosen) <= 1)


def _table(group: tuple[str, str], entries: list[Entry], runs: Iterable[Manifest]) -> TableFile:
    arch, package = group
    # A run on devices of several archs names them all in its environment: then the device of each is not known.
    places = [run.environment for run in runs if any(launch.arch == arch for launch in run.choices)]
    alone = [place for place in places if place.arch == arch]
    counts = {place.multiprocessors for place in alone}
    return TableFile(
        arch,
        package,
        _listed(dict(place.packages).get(package, "") for place in places),
        _listed(place.triton for place in places),
        _listed(place.device for place in alone) if len(alone) == len(places) else "",
        tuple(entries),
        multiprocessors=counts.pop() if len(counts) == 1 and len(alone) == len(places) else 0,
    )


def _listed(texts: Iterable[str]) -> str:
    return ", ".join(sorted({text for text in texts if text}))
