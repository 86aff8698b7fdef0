"""Reports of a merge: facts as JSON, as rows, and on a terminal.

Everything but :func:`open_console` and :func:`print_report` is pure. Rows are plain strings, so that a terminal, a page
and a test read the same. On a terminal they are laid out by ``rich`` where it is installed (extra ``report``) and as
plain text otherwise. Kernel names, host names and error texts come out of files: whatever could steer a terminal is
escaped, and nothing is taken as markup.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TextIO

from tuning._words import a_few, counted
from tuning.errors import JournalError
from tuning.merge import CandidateFacts, KeyFacts, MergeResult, RecordingFacts
from tuning.spec import Json, Key, LaunchConfig

__all__ = [
    "SCHEMA_VERSION",
    "Rows",
    "candidate_rows",
    "key_names",
    "open_console",
    "outlook",
    "overview_rows",
    "print_report",
    "rank_rows",
    "rank_text",
    "report_json",
    "report_rows",
    "select_kernels",
    "text_lines",
]

SCHEMA_VERSION = 1
"""Version of the JSON form."""

_MOST_LINES = 20  # of one kind below a table; the JSON form has all


@dataclass(frozen=True)
class Rows:
    """A table of strings.

    Attributes:
        title: what it shows.
        header: name of each column; numbers go to the right where a name ends with a colon, which is not shown.
        rows: the rows, each as long as the header.
        notes: lines to be read below it.
    """

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    notes: tuple[str, ...] = ()


# ------------------------------------------------------------------------------------------------------------ facts


def rank_text(ranks: Iterable[int]) -> str:
    """Ranks in words: ``0-5, 7``."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in spans)


def outlook(facts: KeyFacts) -> str:
    """What recording again would change, in one sentence; empty where the choice is clear and stable."""
    if facts.choice is None:
        return "no candidate works in all recordings: see the failures"
    if facts.alternatives:
        others = " or ".join(map(str, facts.alternatives))
        return f"recording again may choose {others}: so do merges of a part of these recordings"
    if facts.confidence == "single":
        return "one recording: record again to see what is noise"
    if facts.confidence == "noisy":
        spread = _percent(facts.spread)
        return f"timings spread by {spread}, more than a tie may cover: record again on an idle device"
    if facts.confidence == "tied":
        return f"{len(facts.near_ties)} candidates are within {_percent(facts.tolerance)}: the fixed rule decides"
    return ""


# ------------------------------------------------------------------------------------------------------------- JSON


def report_json(result: MergeResult, *, recordings: bool = True) -> Json:
    """The whole report as one JSON document; what is not known is null.

    Args:
        result: what :func:`tuning.merge.merge` gave.
        recordings: whether to have each single recording (``by_recording``), which is most of the document where there
            are thousands of ranks.
    """
    return {
        "version": SCHEMA_VERSION,
        **result.summary(),
        "torn": [{"journal": path, "bytes": count} for path, count in result.torn],
        "notes": list(result.notes),
        "results": [_key_json(facts, recordings) for facts in result.keys],
    }


def _number(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _configs(configs: Iterable[LaunchConfig]) -> list[Json]:
    return [config.to_json() for config in configs]


def _key_json(facts: KeyFacts, recordings: bool) -> Json:
    data: dict[str, Json] = {
        "arch": facts.arch,
        "kernel": facts.kernel.qualified_name,
        "source_hash": facts.kernel.source_hash,
        "key": facts.key.to_json(),
        "choice": None if facts.choice is None else facts.choice.to_json(),
        "time_ms": _number(facts.chosen.low_ms if facts.chosen else None),
        "confidence": facts.confidence,
        "stability": facts.stability,
        "alternatives": _configs(facts.alternatives),
        "outlook": outlook(facts),
        "tolerance": facts.tolerance,
        "spread": _number(facts.spread),
        "kept": facts.kept,
        "shared": facts.shared,
        "notes": list(facts.notes),
        "recordings": facts.recordings_count,
        "hosts": list(facts.hosts),
        "devices": list(facts.devices),
        "agreement": facts.agreement,
        "median_regret": _number(facts.median_regret()),
        "worst_regret": _number(facts.worst_regret()),
        "winners": [{"config": config.to_json(), "recordings": count} for config, count in facts.winners],
        "near_ties": _configs(item.config for item in facts.near_ties),
        "failures": [{"config": item.config.to_json(), "errors": list(item.errors)} for item in facts.failures],
        "candidates": len(facts.candidates),
        "timings": [_candidate_json(item) for item in facts.candidates],
        "by_rank": [
            {
                "rank": item.rank,
                "hosts": list(item.hosts),
                "recordings": item.recordings,
                "winners": _configs(item.winners),
                "worst_regret": _number(item.regret),
            }
            for item in facts.by_rank
        ],
    }
    if recordings:
        data["by_recording"] = [
            {
                "journal": item.path,
                "rank": item.environment.rank,
                "host": item.environment.host,
                "device": item.environment.device,
                "winner": item.winner.to_json(),
                "winner_ms": _number(item.winner_ms),
                "regret": _number(item.regret),
            }
            for item in facts.recordings
        ]
    return data


def _candidate_json(item: CandidateFacts) -> Json:
    numbers = {name: _number(getattr(item, name)) for name in ("low_ms", "median_ms", "high_ms", "spread")}
    counts = {name: getattr(item, name) for name in ("timed", "failed", "wins", "eligible", "tied")}
    return {"config": item.config.to_json(), **numbers, **counts}


# ------------------------------------------------------------------------------------------------------------- rows


def _percent(value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else f"{100 * value:.1f} %"


def _milliseconds(value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else f"{value:.4g}"


def key_names(keys: Sequence[KeyFacts]) -> list[tuple[str, str]]:
    """Kernel and key of each row, as short as tells them apart: the bare name, and the values without the dtypes."""
    full_names = defaultdict(set)
    for facts in keys:
        full_names[facts.kernel.bare_name].add(facts.kernel.qualified_name)
    values = Counter((facts.arch, facts.kernel, facts.key.values_text) for facts in keys)
    return [
        (
            facts.kernel.bare_name if len(full_names[facts.kernel.bare_name]) == 1 else facts.kernel.qualified_name,
            str(facts.key if values[facts.arch, facts.kernel, facts.key.values_text] > 1 else Key(facts.key.values)),
        )
        for facts in keys
    ]


def overview_rows(result: MergeResult) -> Rows:
    """One row for each kernel and key: the choice, how sure it is, and what it costs where another would have won."""
    several = len(result.archs) > 1
    names = key_names(result.keys)
    rows = tuple(
        (
            *([facts.arch] if several else []),
            kernel,
            key,
            str(facts.choice or "none"),
            _milliseconds(facts.chosen.median_ms if facts.chosen else None),
            f"{facts.agreement}/{facts.recordings_count}",
            str(len(facts.near_ties) or ""),
            str(len(facts.failures) or ""),
            _percent(facts.worst_regret()),
            facts.confidence,
        )
        for facts, (kernel, key) in zip(result.keys, names, strict=True)
    )
    columns = ("kernel", "key", "choice", "ms:", "agree:", "tied:", "failed:", "regret:", "confidence")
    counts = result.summary()
    keys, kernels, journals = (counted(counts[f"{noun}s"], noun) for noun in ("key", "kernel", "journal"))
    notes = [
        f"{keys} of {kernels} from {journals}; recordings disagree on {counted(counts['disagreeing_keys'], 'key')}; "
        f"near ties: {counts['near_tied_keys']}",
        *(f"{path}: {counted(count, 'byte')} of an interrupted record at the end" for path, count in result.torn),
        *result.notes,
        *_attention(result.keys, names),
    ]
    return Rows("Merged choices", (*(["arch"] if several else []), *columns), rows, tuple(notes))


def _attention(keys: Sequence[KeyFacts], names: Sequence[tuple[str, str]]) -> list[str]:
    """What recording again would change, for the keys where it would change something."""
    lines = [
        f"{kernel} {key}: {outlook(facts)}"
        for facts, (kernel, key) in zip(keys, names, strict=True)
        if facts.alternatives or facts.confidence == "noisy"
    ]
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"and {counted(len(lines) - _MOST_LINES, 'key')} more: see the JSON form"]
    single = sum(facts.confidence == "single" for facts in keys)
    if single:
        have = "has" if single == 1 else "have"
        lines.append(f"{counted(single, 'key')} {have} one recording: record again to see what is noise")
    return lines


def candidate_rows(facts: KeyFacts) -> Rows:
    """One row for each candidate of a kernel and key, fastest first."""
    best = min((item.low_ms for item in facts.candidates if item.eligible), default=math.inf)
    rows = tuple(
        (
            "chosen" if item.config == facts.choice else "tied" if item.tied else "" if item.eligible else "out",
            str(item.config),
            _milliseconds(item.median_ms),
            _milliseconds(item.low_ms),
            _milliseconds(item.high_ms),
            _percent(item.low_ms / best - 1 if best > 0 else None),
            _percent(item.spread),
            f"{item.timed}/{facts.recordings_count}",
            str(item.wins or ""),
            (f"failed {item.failed}: " + "; ".join(item.errors)) if item.failed else "",
        )
        for item in facts.candidates
    )
    header = ("", "config", "ms:", "20 %:", "80 %:", "slower:", "differs:", "timed:", "wins:", "failures")
    notes = [line for line in (outlook(facts), *facts.notes) if line]
    if facts.kept:
        notes.append("a table in force decided among the tied candidates")
    return Rows(f"{facts.kernel.qualified_name} {facts.key} on {facts.arch}", header, rows, tuple(notes))


def rank_rows(facts: KeyFacts) -> Rows:
    """The winners of one kernel and key, with the ranks that found them and what the merged choice costs there."""
    groups: defaultdict[LaunchConfig, list[RecordingFacts]] = defaultdict(list)
    for item in facts.recordings:
        groups[item.winner].append(item)
    rows = tuple(
        (
            str(winner),
            str(count),
            rank_text(item.environment.rank for item in groups[winner]),
            _percent(max((item.regret for item in groups[winner] if item.regret is not None), default=None)),
        )
        for winner, count in facts.winners
    )
    title = f"Winners: {facts.kernel.qualified_name} {facts.key} on {facts.arch}"
    return Rows(title, ("winner", "recordings:", "ranks", "regret:"), rows)


def select_kernels(result: MergeResult, kernels: Sequence[str]) -> MergeResult:
    """The result with some kernels alone: qualified names, bare names, or a package or module of theirs.

    Raises:
        JournalError: a name is none of those recorded.
    """
    for name in kernels:
        if not any(_is_named(facts, name) for facts in result.keys):
            found = sorted({facts.kernel.qualified_name for facts in result.keys})
            raise JournalError(
                f"no kernel {name!r} was recorded: expected the name, module or package of one of "
                f"{a_few(found, width=200) or 'none'}"
            )
    return replace(
        result, keys=tuple(facts for facts in result.keys if any(_is_named(facts, name) for name in kernels))
    )


def report_rows(result: MergeResult, *, kernels: Sequence[str] = (), details: bool = False) -> tuple[Rows, ...]:
    """The report as tables: an overview, and what is worth a closer look.

    Args:
        result: what :func:`tuning.merge.merge` gave.
        kernels: show these in full and no overview: qualified names, bare names, or a package or module of theirs.
        details: show all kernels in full.
    """
    if not kernels and not details:
        disagreeing = [facts for facts in result.keys if facts.disagrees]
        more = len(disagreeing) - _MOST_LINES
        notes = (f"and {counted(more, 'key')} more on which recordings disagree",) if more > 0 else ()
        tables = [overview_rows(result), *map(rank_rows, disagreeing[:_MOST_LINES])]
        return (*tables[:-1], replace(tables[-1], notes=tables[-1].notes + notes))
    named = [facts for facts in result.keys if not kernels or any(_is_named(facts, name) for name in kernels)]
    shown = [rows for facts in named for rows in (candidate_rows(facts), rank_rows(facts))]
    return tuple(shown if kernels else [overview_rows(result), *shown])


def _is_named(facts: KeyFacts, name: str) -> bool:
    full = facts.kernel.qualified_name
    return name in (full, facts.kernel.bare_name) or full.startswith(name + ".")


# --------------------------------------------------------------------------------------------------------- terminal


def _clean(text: str) -> str:
    """Text without anything that could steer a terminal."""
    return text if text.isprintable() else "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def text_lines(tables: Iterable[Rows]) -> tuple[str, ...]:
    """The report as lines of plain text."""
    lines: list[str] = []
    for table in tables:
        names = [name.removesuffix(":") for name in table.header]
        cells = [names, *([_clean(cell) for cell in row] for row in table.rows)]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines += ["", _clean(table.title)] if lines else [_clean(table.title)]
        for row in cells:
            aligned = (
                cell.rjust(width) if name.endswith(":") else cell.ljust(width)
                for cell, width, name in zip(row, widths, table.header, strict=True)
            )
            lines.append("  ".join(aligned).rstrip())
        lines += [f"  {_clean(note)}" for note in table.notes]
    return tuple(lines)


def open_console(stream: TextIO) -> Any:
    """A rich console that writes to ``stream``, or the stream itself where rich is not installed."""
    try:
        from rich.console import Console
    except ImportError:
        return stream
    return Console(file=stream)


def print_report(tables: Iterable[Rows], console: Any) -> None:
    """Write a report.

    Args:
        tables: from :func:`report_rows`.
        console: a ``rich.console.Console`` (see :func:`open_console`), or any text stream, which gets plain text.
    """
    if not hasattr(console, "print"):
        console.writelines(f"{line}\n" for line in text_lines(tables))
        return
    from rich.table import Table
    from rich.text import Text

    for found in tables:
        table = Table(title=Text(_clean(found.title)), title_justify="left")
        for name in found.header:
            # Texts, not strings: a string is taken for markup, and these come out of files.
            title = Text(name.removesuffix(":"))
            table.add_column(title, justify="right" if name.endswith(":") else "left", overflow="fold")
        for row in found.rows:
            table.add_row(*(Text(_clean(cell)) for cell in row))
        console.print(table)
        for note in found.notes:
            console.print(Text(_clean(note)))
