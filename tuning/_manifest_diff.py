"""What changed between two runs, from their manifests."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tuning._config_text import differing_fields
from tuning._manifest_content import Launch, Manifest
from tuning.spec import canonical_json

__all__ = ["Change", "diff_manifests"]


@dataclass(frozen=True)
class Change:
    """One difference.

    Attributes:
        what: ``config``, ``source``, ``origin``, ``detail``, ``order of key``, ``kernel source``, ``benchmarks``,
            ``autotuner``, ``table``, ``policy``, ``version``, ``device``, ``place`` or ``notice``.
        name: what of it: a kernel and key, a field, a package.
        before, after: in the first and in the second run; None where it is not there at all.
    """

    what: str
    name: str
    before: str | None
    after: str | None

    def __str__(self) -> str:
        sides = ["(absent)" if side is None else side or "(empty)" for side in (self.before, self.after)]
        return f"{self.what} {self.name}: {sides[0]} -> {sides[1]}"


def diff_manifests(before: Manifest, after: Manifest) -> tuple[Change, ...]:
    """Every difference between two runs, none where their documents are equal.

    What decides bits comes first: configs, then how they came about, then what was timed, tables, policy, versions,
    device, place. For a config only the fields that differ are shown.
    """
    changes = [*_configs(before, after), *_provenance(before, after)]
    for what, sides in (
        ("benchmarks", [{kernel: str(count) for kernel, count in run.benchmarks} for run in (before, after)]),
        ("autotuner", [_autotuners(run) for run in (before, after)]),
        ("table", [_tables(run) for run in (before, after)]),
        ("policy", [_policy(run) for run in (before, after)]),
        ("version", [_versions(run) for run in (before, after)]),
        ("device", [_device(run) for run in (before, after)]),
        ("place", [_place(run) for run in (before, after)]),
        ("notice", [_notices(run) for run in (before, after)]),
    ):
        changes += _mappings(what, *sides)
    return tuple(changes)


def _mappings(what: str, before: Mapping[str, str], after: Mapping[str, str]) -> Iterable[Change]:
    for name in sorted(before.keys() | after.keys()):
        if before.get(name) != after.get(name):
            yield Change(what, name, before.get(name), after.get(name))


def _by_place(run: Manifest) -> dict[tuple[str, str, str], list[Launch]]:
    places: dict[tuple[str, str, str], list[Launch]] = {}
    for launch in run.choices:
        places.setdefault(launch.place, []).append(launch)
    return places


def _title(launch: Launch) -> str:
    return f"{launch.kernel} ({launch.key}) on {launch.arch}"


def _texts(launches: Sequence[Launch]) -> list[str]:
    return [launch.config.text for launch in launches]


def _configs(before: Manifest, after: Manifest) -> Iterable[Change]:
    old, new = _by_place(before), _by_place(after)
    for place in sorted(old.keys() | new.keys()):
        first, second = old.get(place, []), new.get(place, [])
        if _texts(first) == _texts(second):
            continue
        # Where a key is new, or several configs were launched for it, there is no pair of configs to tell apart.
        if len(first) == len(second) == 1:
            show = differing_fields(_texts([*first, *second]))
        else:
            show = {launch.config.text: str(launch.config) for launch in (*first, *second)}
        sides = [" then ".join(show[text] for text in _texts(side)) if side else None for side in (first, second)]
        yield Change("config", _title((first or second)[0]), *sides)


def _provenance(before: Manifest, after: Manifest) -> Iterable[Change]:
    old, new = _by_place(before), _by_place(after)
    for place in sorted(old.keys() & new.keys()):
        first, second = old[place], new[place]
        if _texts(first) != _texts(second):
            continue
        for what in ("source", "origin", "detail"):
            sides = [" then ".join(str(getattr(launch, what)) for launch in side) for side in (first, second)]
            if sides[0] != sides[1]:
                yield Change(what, _title(first[0]), *sides)
        # Equal keys may declare their arguments, or pass their tensors, in another order.
        sides = [" then ".join(canonical_json(launch.key.to_json()) for launch in side) for side in (first, second)]
        if sides[0] != sides[1]:
            yield Change("order of key", _title(first[0]), *sides)
    both = {place[0] for place in old} & {place[0] for place in new}
    hashes = [
        _joined((each.kernel, each.source_hash or "(unknown)") for each in run.choices if each.kernel in both)
        for run in (before, after)
    ]
    yield from _mappings("kernel source", *hashes)


def _joined(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """By name, all that is said of it."""
    values: dict[str, dict[str, None]] = {}
    for name, value in pairs:
        values.setdefault(name, {})[value] = None
    return {name: " and ".join(said) for name, said in values.items()}


def _autotuners(run: Manifest) -> dict[str, str]:
    return _joined(
        (
            each.kernel,
            f"{each.state}, {each.candidates} candidates, key {' '.join(each.key_names) or 'empty'}"
            + (f" ({each.reason})" if each.reason else ""),
        )
        for each in run.autotuners
    )


def _tables(run: Manifest) -> dict[str, str]:
    return _joined((f"{table.arch}/{table.package} in {table.path or 'memory'}", table.sha256) for table in run.tables)


def _policy(run: Manifest) -> dict[str, str]:
    fields = {name: json.dumps(value, sort_keys=True) for name, value in run.policy.items()}
    return {**fields, "(mode that held)": run.mode, "(deterministic mode)": "on" if run.deterministic else "off"}


def _versions(run: Manifest) -> dict[str, str]:
    where = run.environment
    return {
        "triton-tuning": run.library,
        "triton": where.triton,
        "torch": where.torch,
        "python": where.python,
        **{f"package {name}": version for name, version in where.packages},
        **{f"compiler {name}": version for name, version in run.compilers},
    }


def _device(run: Manifest) -> dict[str, str]:
    where = run.environment
    return {"arch": where.arch, "name": where.device, "multiprocessors": str(where.multiprocessors)}


def _place(run: Manifest) -> dict[str, str]:
    where = run.environment
    return {"host": where.host, "rank": str(where.rank), "world_size": str(where.world_size)}


def _notices(run: Manifest) -> dict[str, str]:
    return {f"{kind}: {message}": "given" for kind, message in run.notices}
