"""The report as one HTML page that needs nothing else: no script, no network, no other file.

It can be mailed and opened in ten years. What could fetch or run anything is forbidden by the page itself (its content
security policy allows its own style and no more), since names and error texts in it come out of files. Pure: the same
merge gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tuning._report_plots import MOST_KEYS, MOST_ROWS, disagreement_map, escape, regret_bars, timing_plot
from tuning._words import counted
from tuning.merge import KeyFacts, MergeResult
from tuning.report import Rows, candidate_rows, key_names, outlook, overview_rows, rank_rows

__all__ = ["page"]

_STYLE = """
body{font:14px/1.45 system-ui,sans-serif;color:#1c2733;max-width:1180px;margin:2em auto;padding:0 1em}
h1{font-size:1.5em}h2{font-size:1.15em;margin-top:2em}h3{font-size:1em;margin:1.2em 0 .3em}
table{border-collapse:collapse;margin:.4em 0}
th,td{padding:.25em .7em;border-bottom:1px solid #dde3ea;text-align:left;vertical-align:top}
th{font-weight:600;background:#f3f6f9}td.n,th.n{text-align:right;white-space:nowrap;font-variant-numeric:tabular-nums}
code,td.c{font-family:ui-monospace,monospace;font-size:.92em}
code{overflow-wrap:anywhere}
details{border:1px solid #dde3ea;border-radius:4px;margin:.5em 0;padding:.4em .8em}
summary{cursor:pointer;overflow-wrap:anywhere}
.wide{overflow-x:auto}.note{color:#55626f}
.badge{border-radius:3px;padding:0 .4em;background:#e3e8ee}
.noisy,.none,.single{background:#f6d9c0}.clear{background:#d5ead9}
svg{display:block;margin:.4em 0;max-width:none}
"""

_HEAD = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width">
<title>Recorded timings</title>
<style>"""


def page(result: MergeResult) -> str:
    """The page: an overview, what recording again would change, where ranks disagree, and each kernel and key in full.

    Args:
        result: what :func:`tuning.merge.merge` gave.
    """
    named = [(f"k{number}", name, facts) for number, (name, facts) in enumerate(_named(result))]
    return "".join(
        [
            _HEAD,
            _STYLE,
            "</style>\n</head>\n<body>\n<h1>Recorded timings</h1>\n",
            _overview(result, named),
            _outlooks(named),
            _map(named),
            "<h2>Kernels and keys</h2>\n",
            "<p class='note'>In the plots: dots are the 20th percentiles of single recordings (a bar: the middle three "
            "fifths of many), the grey line goes from the 20th to the 80th percentile, the mark is the median, and "
            "what lies in the green band counts as the same time. Red names cannot be chosen.</p>\n",
            *(_key(anchor, name, facts) for anchor, name, facts in named),
            "</body>\n</html>\n",
        ]
    )


_Named = tuple[str, str, KeyFacts]


def _named(result: MergeResult) -> Iterable[tuple[str, KeyFacts]]:
    several = len(result.archs) > 1
    for facts, (kernel, key) in zip(result.keys, key_names(result.keys), strict=True):
        yield f"{facts.arch} {kernel} {key}" if several else f"{kernel} {key}", facts


def _table(rows: Rows, links: Sequence[str] = ()) -> str:
    numeric = ["n" if name.endswith(":") else "" for name in rows.header]
    head = "".join(
        f'<th class="{kind}">{escape(name.removesuffix(":"))}</th>'
        for name, kind in zip(rows.header, numeric, strict=True)
    )
    body = []
    for number, row in enumerate(rows.rows):
        cells = [f'<td class="{kind or "c"}">{escape(cell)}</td>' for cell, kind in zip(row, numeric, strict=True)]
        if links:
            cells.insert(0, f'<td class="n"><a href="#{links[number]}">{number + 1}</a></td>')
        body.append(f"<tr>{''.join(cells)}</tr>\n")
    first = '<th class="n"></th>' if links else ""
    return f"<div class='wide'><table>\n<tr>{first}{head}</tr>\n{''.join(body)}</table></div>\n"


def _overview(result: MergeResult, named: Sequence[_Named]) -> str:
    rows = overview_rows(result)
    notes = "".join(f"<li>{escape(note)}</li>\n" for note in rows.notes if note not in _attention_of(result))
    return (
        f"<p>Rule: {escape(result.rule)}. {escape(', '.join(result.archs))}.</p>\n<ul>\n{notes}</ul>\n"
        f"<h2>Merged choices</h2>\n{_table(rows, [anchor for anchor, _, _ in named])}"
    )


def _attention_of(result: MergeResult) -> tuple[str, ...]:
    # The terminal's overview ends with what has a section of its own here.
    counts = 1 + len(result.torn) + len(result.notes)
    return overview_rows(result).notes[counts:]


def _outlooks(named: Sequence[_Named]) -> str:
    found = [(anchor, name, outlook(facts)) for anchor, name, facts in named]
    lines = "".join(
        f'<li><a href="#{anchor}"><code>{escape(name)}</code></a>: {escape(text)}</li>\n'
        for anchor, name, text in found
        if text
    )
    if not lines:
        return "<h2>What recording again would change</h2>\n<p>Nothing: each choice is clear and stable.</p>\n"
    return f"<h2>What recording again would change</h2>\n<ul>\n{lines}</ul>\n"


def _map(named: Sequence[_Named]) -> str:
    found = [item for item in named if item[2].disagrees or item[2].agreement < item[2].recordings_count]
    title = "<h2>Where ranks disagree</h2>\n"
    if not found:
        return f"{title}<p>Nowhere: on each key all recordings have one winner, the merged choice.</p>\n"
    found.sort(key=lambda item: item[2].agreement / item[2].recordings_count)
    names = "".join(
        f'<li><a href="#{anchor}"><code>{escape(name)}</code></a>: {facts.agreement} of '
        f"{counted(facts.recordings_count, 'recording')} found the choice</li>\n"
        for anchor, name, facts in found[:MOST_KEYS]
    )
    more = f"<p class='note'>{len(found) - MOST_KEYS} more keys are not drawn.</p>\n" if len(found) > MOST_KEYS else ""
    return (
        f"{title}<p class='note'>Pale: the winner there is the merged choice. A colour: another winner, one colour in "
        f"a column being one config. White: not recorded. More than {MOST_ROWS} journals share rows by rank, and a row "
        f"shows its most frequent other winner.</p>\n<div class='wide'>{disagreement_map(found)}</div>\n"
        f"<ol>\n{names}</ol>\n{more}"
    )


def _key(anchor: str, name: str, facts: KeyFacts) -> str:
    candidates = candidate_rows(facts)
    choice = escape(str(facts.choice or "no choice"))
    opened = " open" if facts.disagrees or facts.failures or facts.choice is None else ""
    notes = "".join(f"<p class='note'>{escape(note)}</p>\n" for note in candidates.notes)
    ranks = rank_rows(facts)
    regrets = regret_bars(facts)
    return (
        f'<details id="{anchor}"{opened}><summary><code>{escape(name)}</code> → <code>{choice}</code> '
        f'<span class="badge {escape(facts.confidence)}">{escape(facts.confidence)}</span></summary>\n'
        f"<p class='note'>{escape(candidates.title)}</p>\n{notes}"
        f"<div class='wide'>{timing_plot(facts)}</div>\n{_table(candidates)}"
        f"<h3>Winners by rank</h3>\n{_table(ranks)}"
        + (f"<h3>Regret of the merged choice by rank</h3>\n<div class='wide'>{regrets}</div>\n" if regrets else "")
        + "</details>\n"
    )
