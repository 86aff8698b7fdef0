"""How much slower than the timed best each rule of choosing is: ``python -m bench regret JOURNAL...``.

The **regret** of a choice is its time over the time of the fastest candidate of the same recording, 1 being the best.
Times are as :mod:`tuning.merge` counts them: the median, over recordings, of the 20th percentile. A candidate that
failed in any recording counts as failing. No GPU is needed: every candidate's time is in the journals.

=================  =====================================================================================================
rule               what it knows
=================  =====================================================================================================
``table``          the tables in force (``--table`` over the packaged ones), and under them the merge of these journals:
                   what was measured itself, so its regret is that of near ties and of the reviewed entries' age
``nearest key``    ``nearest``, without this key's own entry: the kernel's other keys, then other archs' tables
``nearest arch``   ``nearest``, without any table of this arch
``model``          ``model``, no table
``cheapest``       ``cheapest``, no table
``first``          the first candidate listed
``median``         the middle candidate in the order of ``cheapest``
``floor``          the best that *any* function of arch and candidate list could do: keys that share them share its pick
=================  =====================================================================================================

A pick that cannot launch has no regret. The plain figures leave it out, and so flatter a rule that fails: they are of
the picks that launch alone, and marked with ``*`` where there are others. A penalised mean counts each as 16.

Each kernel weighs the same in the geometric means: over its keys first, then over kernels. Sums of time weigh by time.

``--fit`` looks for the constants of ``model`` on a grid of round values, by coordinate descent from several starts, and
says what they would give on kernels, and on packages, that were left out of the fit. It changes nothing: the constants
stand in :data:`tuning.selection.MODEL`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.results import circumstances
from bench.results import path_of as results_path
from tuning.errors import TuningError
from tuning.journal import find_journals, scan_journal
from tuning.merge import merge
from tuning.policy import AutotunePolicy
from tuning.selection import MODEL, Candidates, ModelConstants, choose, model_order
from tuning.spec import Kernel, Key, LaunchConfig
from tuning.tables import TableFile, Tables, load_tables

RULES = ("table", "nearest key", "nearest arch", "model", "cheapest", "first", "median", "floor")
FAILING = 16.0
"""What a pick that cannot launch counts as in a fit and in penalised means, where another would launch."""

GRID: Mapping[str, tuple[int, ...]] = {
    "middle": (0, 1, 2, 4),
    "elements": (0, 1, 2, 4),
    "warps": (0, 1, 2, 4),
    "stages": (0, 1, 2),
    "middle_warps": (0, 1, 2, 4),
    "tile_elements": (8, 16, 32, 64),
    "flat_elements": (1, 2, 4, 8, 16, 32),
    "aim_warps": (2, 4, 8),
    "aim_stages": (1, 2, 3, 4),
    "bare_warps": (1, 2, 4, 8),
    "bare_stages": (1, 2, 3, 4),
}
"""Values that a fit tries for each constant."""


@dataclass(frozen=True, eq=False)
class Live:
    """A candidate as the rules read one."""

    kwargs: dict[str, Any]
    num_warps: int | None
    num_stages: int | None
    num_ctas: int | None
    maxnreg: int | None
    ir_override: str | None

    @classmethod
    def of(cls, config: LaunchConfig) -> Live:
        """The candidate that a config was read of; vendor fields become attributes, as in Triton."""
        kwargs = {name: json.loads(text) for name, text in config.kwargs}
        live = cls(kwargs, config.num_warps, config.num_stages, config.num_ctas, config.maxnreg, config.ir_override)
        vars(live).update({name: json.loads(text) for name, text in config.extra})
        return live


@dataclass(frozen=True, eq=False)
class Sample:
    """One recorded key: its candidates in Triton's order, and the time of each, None where it failed."""

    kernel: Kernel
    key: Key
    arch: str
    times: Mapping[LaunchConfig, float | None]
    ranked: tuple[LaunchConfig, ...] = field(init=False)
    live: tuple[Live, ...] = field(init=False)

    def __post_init__(self) -> None:
        live = tuple(map(Live.of, self.times))
        object.__setattr__(self, "live", live)
        object.__setattr__(self, "ranked", Candidates.of(live).ranked)

    @property
    def best(self) -> float:
        """Milliseconds of the fastest candidate."""
        return min(time for time in self.times.values() if time is not None)

    def regret(self, config: LaunchConfig) -> float | None:
        """Time over the best time; None where the config failed."""
        time = self.times[config]
        return None if time is None else time / self.best


def read_samples(paths: Iterable[str]) -> tuple[list[Sample], dict[str, Any]]:
    """Recorded keys with at least two candidates timed, by arch, kernel and key; and where they were recorded."""
    lows: dict[tuple[str, str, str], dict[LaunchConfig, list[float | None]]] = {}
    names: dict[tuple[str, str, str], tuple[Kernel, Key]] = {}
    environments = []
    records = 0
    for path in paths:
        scan = scan_journal(path)
        environments.append(scan.environment)
        for measurement in scan.measurements:
            identity = measurement.identity
            at = (identity.arch, identity.kernel.qualified_name, identity.key.text)
            names.setdefault(at, (identity.kernel, identity.key))
            records += 1
            for config, times in zip(identity.configs, measurement.times, strict=False):
                low = None if times is None else times[1 if len(times) > 2 else 0]
                lows.setdefault(at, {}).setdefault(config, []).append(low)
    samples = []
    for at, found in sorted(lows.items(), key=lambda item: item[0]):
        times = {config: _pooled(each) for config, each in found.items()}
        if len(times) > 1 and any(time is not None for time in times.values()):
            samples.append(Sample(*names[at], at[0], times))
    versions = {
        name: sorted({str(getattr(one, name)) for one in environments}) for name in ("device", "triton", "torch")
    }
    packages = sorted({" ".join(pair) for one in environments for pair in one.packages})
    return samples, {**versions, "packages": packages, "journals": len(environments), "records": records}


def _pooled(lows: Sequence[float | None]) -> float | None:
    known = [low for low in lows if low is not None]
    return statistics.median(known) if len(known) == len(lows) else None


class Rules:
    """Every rule over the samples, each choosing by :func:`tuning.selection.choose` where the product does."""

    def __init__(self, samples: Sequence[Sample], paths: Sequence[str], folders: Sequence[str] = ()) -> None:
        merged = merge(map(scan_journal, paths)).tables
        self._tables: dict[str, Tables] = {}
        for arch in {sample.arch for sample in samples}:
            known = load_tables(arch, folders, neighbours=True)
            layers: list[list[TableFile]] = [[file] for file in known.files]
            layers.append([table for table in merged if table.arch == arch])
            self._tables[arch] = Tables(arch, layers).beside(known.others)
        self._floor = _floor(samples)

    def pick(self, rule: str, sample: Sample) -> tuple[LaunchConfig, str, str]:
        """The config that a rule picks, the source of the choice, and its detail."""
        if rule == "first":
            return next(iter(sample.times)), rule, ""
        if rule == "median":
            return sample.ranked[(len(sample.ranked) - 1) // 2], rule, ""
        if rule == "floor":
            return self._floor[id(sample)], rule, ""
        tables = self._tables[sample.arch]
        nothing = Tables(sample.arch, [])
        held: dict[str, tuple[Tables, str]] = {
            "table": (tables, "cheapest"),
            "nearest arch": (nothing.beside(tables.others), "nearest"),
            "model": (nothing, "model"),
            "cheapest": (nothing, "cheapest"),
        }
        if rule == "nearest key":
            held[rule] = (_without_key(tables, sample), "nearest")
        known, on_miss = held[rule]
        policy = AutotunePolicy(mode="pinned", on_miss=on_miss)  # type: ignore[arg-type]
        choice = choose(sample.kernel, sample.key, sample.arch, sample.live, known, policy)
        return choice.launch_config, choice.source, choice.detail


def _without_key(tables: Tables, sample: Sample) -> Tables:
    """The kernel's entries without any for this key, ``*`` included, and without what recording it came to deny."""
    name = sample.kernel.qualified_name
    kept = [entry for entry in tables.entries(name) if entry.key is not None]
    denied = tuple(row for file in tables.files for row in file.denied if row.kernel == name and row.key is None)
    while True:
        left = TableFile(tables.arch, sample.kernel.package, "", "", "", tuple(kept), denied)
        found = Tables(tables.arch, [[left]])
        own = found.exact(name, sample.key)
        if own is None:
            return found.beside(tables.others)
        kept.remove(own)


def _floor(samples: Sequence[Sample]) -> dict[int, LaunchConfig]:
    groups: defaultdict[tuple[str, tuple[LaunchConfig, ...]], list[Sample]] = defaultdict(list)
    for sample in samples:
        groups[sample.arch, sample.ranked].append(sample)
    picks = {}
    for (_, ranked), group in groups.items():
        costs = [sum(math.log(one.regret(config) or FAILING) for one in group) for config in ranked]
        picks.update({id(one): ranked[costs.index(min(costs))] for one in group})
    return picks


def measure(samples: Sequence[Sample], pick: Callable[[Sample], LaunchConfig | None]) -> dict[str, Any]:
    """Figures of one rule: regret by kernel and over all, and how many of its picks cannot launch."""
    by_kernel: defaultdict[str, list[float]] = defaultdict(list)
    penalised: defaultdict[str, list[float]] = defaultdict(list)
    failing = 0
    chosen_ms = best_ms = 0.0
    answered = 0
    for sample in samples:
        config = pick(sample)
        if config is None:
            continue
        answered += 1
        regret = sample.regret(config)
        kernel = f"{sample.kernel.qualified_name} ({sample.arch})"
        penalised[kernel].append(FAILING if regret is None else regret)
        if regret is None:
            failing += 1
            continue
        by_kernel[kernel].append(regret)
        chosen_ms += regret * sample.best
        best_ms += sample.best
    kernels = {name: {"geomean": _geomean(found), "worst": max(found)} for name, found in sorted(by_kernel.items())}
    return {
        "keys": answered,
        "geomean": _geomean([each["geomean"] for each in kernels.values()]),
        "geomean_over_keys": _geomean([regret for found in by_kernel.values() for regret in found]),
        "worst": max((each["worst"] for each in kernels.values()), default=math.nan),
        "time_over_best": chosen_ms / best_ms if best_ms else math.nan,
        "penalised_geomean": _geomean([_geomean(found) for found in penalised.values()]),
        "partial": failing > 0,
        "over_2": sum(regret > 2 for found in by_kernel.values() for regret in found),
        "failing": failing,
        "failing_share": failing / answered if answered else 0.0,
        "kernels": kernels,
    }


def _geomean(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


# --- fitting the model ------------------------------------------------------------------------------------------------


class Fit:
    """Finds constants of the model on some of the samples; what is known of others is used for nothing."""

    def __init__(self, samples: Sequence[Sample]) -> None:
        self.samples = samples
        self._known: dict[ModelConstants, list[float]] = {}

    def losses(self, constants: ModelConstants) -> list[float]:
        """Logarithm of each sample's regret, which counts once more above 2, the worst that is accepted."""
        found = self._known.get(constants)
        if found is None:
            found = self._known[constants] = [_loss(sample, constants) for sample in self.samples]
        return found

    def loss(self, constants: ModelConstants, members: Sequence[int]) -> float:
        """Mean over the kernels of ``members``, positions of samples."""
        losses = self.losses(constants)
        kernels: defaultdict[str, list[float]] = defaultdict(list)
        for at in members:
            kernels[self.samples[at].kernel.qualified_name].append(losses[at])
        return statistics.fmean(statistics.fmean(found) for found in kernels.values())

    def constants(self, members: Sequence[int]) -> ModelConstants:
        """The best constants found for ``members``; of equal ones the first met, from the smallest weights up."""
        starts = [
            ModelConstants(middle=1, elements=0, warps=0, stages=0, middle_warps=1),
            ModelConstants(middle=1, elements=1, warps=1, stages=1, middle_warps=1),
            ModelConstants(middle=0, elements=1, warps=1, stages=1, middle_warps=0),
        ]
        ends = [self._descend(start, members) for start in starts]
        return min(ends, key=lambda each: self.loss(each, members))

    def _descend(self, best: ModelConstants, members: Sequence[int]) -> ModelConstants:
        least = self.loss(best, members)
        while True:
            before = least
            for name, values in GRID.items():
                for value in values:
                    tried = dataclasses.replace(best, **{name: value})
                    loss = self.loss(tried, members)
                    if loss < least - 1e-4:
                        best, least = tried, loss
            if least == before:
                return best

    def left_out(self, group: Callable[[Sample], str]) -> dict[str, Any]:
        """What constants that are fitted without a group give on it, for each group; empty for one group alone."""
        names = sorted({group(sample) for sample in self.samples})
        if len(names) < 2:
            return {}
        fitted: dict[str, ModelConstants] = {}
        for number, name in enumerate(names, 1):
            members = [at for at, sample in enumerate(self.samples) if group(sample) != name]
            fitted[name] = self.constants(members)
            if sys.stderr.isatty():
                print(f"\r{number} of {len(names)} left out", end="\r", file=sys.stderr, flush=True)
        groups = {}
        for name, constants in fitted.items():
            members = [sample for sample in self.samples if group(sample) == name]
            figures = measure(members, lambda sample: _by_model(sample, fitted[group(sample)]))
            del figures["kernels"]
            groups[name] = {**figures, "constants": dataclasses.asdict(constants)}
        whole = measure(self.samples, lambda sample: _by_model(sample, fitted[group(sample)]))
        return {**whole, "groups": groups}


def _by_model(sample: Sample, constants: ModelConstants) -> LaunchConfig:
    return model_order(sample.ranked, sample.key.dtypes, sample.arch, constants)[0]


def _loss(sample: Sample, constants: ModelConstants) -> float:
    loss = math.log(sample.regret(_by_model(sample, constants)) or FAILING)
    return loss + max(0.0, loss - math.log(2))


# --- the case ---------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the case."""
    parser.add_argument("journals", nargs="+", metavar="JOURNAL", help="journal, folder, glob, or record_path's prefix")
    parser.add_argument("--table", action="append", default=[], metavar="FOLDER", help="tables over the packaged ones")
    parser.add_argument("--recorded", default="", metavar="DATE", help="when the journals were recorded, to be kept")
    parser.add_argument("--fit", action="store_true", help="fit the model's constants, and validate by leaving out")
    parser.add_argument("--json", action="store_true", help="print the result as JSON, and nothing else, on stdout")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the regrets (needs matplotlib)")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Compute every rule's regret over the journals, print it, and return the result."""
    try:
        paths = find_journals(options.journals)
        samples, recorded = read_samples(paths)
        if not samples:
            raise SystemExit(f"{options.journals[0]}: expected a key with two or more timed candidates, found none")
        rules = Rules(samples, paths, options.table)
    except TuningError as error:
        raise SystemExit(error.message) from None
    figures, sources, keys = {}, {}, [_row_of(sample) for sample in samples]
    for rule in RULES:
        picks = {id(sample): rules.pick(rule, sample) for sample in samples}
        figures[rule] = measure(samples, lambda sample, picks=picks: picks[id(sample)][0])
        sources[rule] = dict(sorted(Counter(source for _, source, _ in picks.values()).items()))
        for row, sample in zip(keys, samples, strict=True):
            config, source, detail = picks[id(sample)]
            row["rules"][rule] = {
                "regret": sample.regret(config),
                "config": str(config),
                "source": source,
                **({"detail": detail} if detail else {}),
            }
    result = {
        "case": "regret",
        **circumstances(),
        # Of the recording: what this machine has, which chooses and times nothing, does not matter.
        **{name: ", ".join(recorded[name]) or "none" for name in ("device", "triton", "torch")},
        "recorded": {**recorded, **({"date": options.recorded} if options.recorded else {})},
        "statistic": "time over the fastest candidate's; median over recordings of the 20th percentile",
        "constants": dataclasses.asdict(MODEL),
        "rules": {rule: {"sources": sources[rule], **figures[rule]} for rule in RULES},
        "keys": keys,
    }
    if options.fit:
        result["fit"] = _fit(samples)
    if options.plot:
        plot(result, options.plot)
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        show(result)
    _keep_fit(results_path(options.name, result, options.out), result)
    return result


def _keep_fit(path: Path, result: Mapping[str, Any]) -> None:
    """Refuse to put a result without a fit in place of one that has it, which takes long to find."""
    if "fit" not in result and path.exists() and "fit" in json.loads(path.read_text(encoding="utf-8")):
        raise SystemExit(
            f"{path}: holds a fit, which this result has not: nothing is written; give --fit, --name or --out"
        )


def _row_of(sample: Sample) -> dict[str, Any]:
    return {
        "kernel": sample.kernel.qualified_name,
        "key": str(sample.key),
        "arch": sample.arch,
        "candidates": len(sample.times),
        "cannot_launch": sum(time is None for time in sample.times.values()),
        "best_ms": sample.best,
        "rules": {},
    }


def _fit(samples: Sequence[Sample]) -> dict[str, Any]:
    fit = Fit(samples)
    constants = fit.constants(range(len(samples)))
    whole = measure(samples, lambda sample: _by_model(sample, constants))
    del whole["kernels"]
    return {
        "constants": dataclasses.asdict(constants),
        "on_what_it_was_fitted_to": whole,
        "kernel_left_out": fit.left_out(lambda sample: sample.kernel.qualified_name),
        "package_left_out": fit.left_out(lambda sample: sample.kernel.package),
    }


def show(result: Mapping[str, Any]) -> None:
    """Print the regrets: each kernel's, then those over all."""
    rules = result["rules"]
    names = sorted({name for figures in rules.values() for name in figures["kernels"]})
    short = {name: name if len(name) <= 58 else f"...{name[-55:]}" for name in names}
    width = max(map(len, short.values()), default=6)
    print(f"{'regret: geometric mean over keys':{width}}" + "".join(f"{rule:>14}" for rule in RULES))
    for name in names:
        cells = [rules[rule]["kernels"].get(name) for rule in RULES]
        print(
            f"{short[name]:{width}}"
            + "".join(f"{cell['geomean']:14.3f}" if cell else f"{'fails':>14}" for cell in cells)
        )
    print()
    for label, figure, form in (
        ("geometric mean over kernels", "geomean", ".3f"),
        ("the same, a failing pick as 16", "penalised_geomean", ".3f"),
        ("geometric mean over keys", "geomean_over_keys", ".3f"),
        ("worst", "worst", ".3f"),
        ("sum of time over the best's", "time_over_best", ".3f"),
        ("keys above 2", "over_2", "d"),
        ("picks that cannot launch", "failing", "d"),
    ):
        whole = figure in ("penalised_geomean", "failing")
        marks = ["*" if rules[rule]["partial"] and not whole else "" for rule in RULES]
        cells = [f"{format(rules[rule][figure], form)}{mark}" for rule, mark in zip(RULES, marks, strict=True)]
        print(f"{label:{width}}" + "".join(f"{cell:>14}" for cell in cells))
    if any(rules[rule]["partial"] for rule in RULES):
        print("* of the picks that launch alone")
    device = " ".join(result["recorded"]["device"])
    print(f"\n{len(result['keys'])} keys of {len(names)} kernels, recorded on {device}")
    if "fit" in result:
        _show_fit(result["fit"])


def _show_fit(fit: Mapping[str, Any]) -> None:
    print(f"\nfitted: {' '.join(f'{name}={value}' for name, value in fit['constants'].items())}")
    for name in ("on_what_it_was_fitted_to", "kernel_left_out", "package_left_out"):
        found = fit[name]
        text = (
            f"geometric mean {found['geomean']:.3f}, worst {found['worst']:.3f}, {found['over_2']} keys above 2, "
            f"{found['failing']} of {found['keys']} picks cannot launch"
            if found
            else "one group alone: nothing to leave out"
        )
        print(f"{name.replace('_', ' ')}: {text}")
        for group, each in found.get("groups", {}).items() if name == "package_left_out" else ():
            print(f"    {group}: geometric mean {each['geomean']:.3f}, worst {each['worst']:.3f}, {each['keys']} keys")


def plot(result: Mapping[str, Any], path: Path) -> None:
    """Draw each rule's regrets, sorted, on a logarithmic axis."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("--plot: expected matplotlib to be installed: pip install 'triton-tuning[plot]'") from None
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for rule in RULES:
        regrets = sorted(row["rules"][rule]["regret"] for row in result["keys"] if row["rules"][rule]["regret"])
        share = [100 * (at + 1) / len(result["keys"]) for at in range(len(regrets))]
        axes.step(share, regrets, where="pre", label=f"{rule} ({result['rules'][rule]['geomean']:.3f})")
    axes.set_yscale("log", base=2)
    axes.set_yticks([1, 1.25, 1.5, 2, 3, 4, 8], ["1", "1.25", "1.5", "2", "3", "4", "8"])
    axes.set_xlabel(f"% of {len(result['keys'])} keys at most so slow; what is missing cannot launch")
    axes.set_ylabel("time over the fastest candidate's")
    axes.set_title(f"Regret of each rule, {' '.join(result['recorded']['device'])} (geometric mean over kernels)")
    axes.legend(fontsize="small")
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
