"""The report as one HTML page that needs nothing but itself: no server, no network."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from functools import cache
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from ..console import plain, written
from ..telemetry import Start, verdict
from .charts import Chart, charts
from .reader import Run
from .summary import TILES, find, key_numbers

WORDS = {"bad": "Problem", "warn": "Look", "note": "Note", "good": "Fine"}


def html_page(run: Run) -> str:
    """The whole page. All text is escaped; the browser runs the package's own script alone."""
    found = charts(run)
    body = [_verdict(run), _tiles(run)]
    others = [chart for chart in found if chart.name != "loss"]
    body += [_charts(run, [chart for chart in found if chart.name == "loss"])]
    body += ["<h2>Findings</h2>", _findings(run)]
    if run.windows:
        body += ["<h2>Charts</h2>", _charts(run, others), _modules(run)]
    rows = {each.name: each.value + f"; {each.more}" * bool(each.more) for each in key_numbers(run)}
    body += ["<h2>In numbers</h2>", _table("", rows)]
    body += ["<h2>Settings and versions</h2>", _settings(run)]
    style = _asset("uPlot.min.css") + "\n" + _asset("page.css")
    script = _asset("uPlot.iife.min.js") + "\n" + _asset("page.js")
    return Template(_asset("page.html")).substitute(
        title=escape(f"Optimizer steps: {run.label}"),
        body=plain("\n".join(body)),
        data=page_data(run, found),
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
    )


def page_data(run: Run, charts: Sequence[Chart]) -> str:
    """The script's data as JSON that stands safely inside a ``<script>``: ASCII, without ``<``,
    ``>`` and ``&``."""
    x, ends = run.bins.x, run.bins.ends
    data = {
        "x": [x[first] for first, _ in ends],
        "last": [x[last] for _, last in ends],
        "sessions": [session.first_x for session in run.sessions],
        "charts": [asdict(chart) for chart in charts],
    }
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for mark in "<>&":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text


@cache
def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text("utf-8")


def _hash(text: str) -> str:
    """The name of a script or style in a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _verdict(run: Run) -> str:
    is_bad = any(finding.level == "bad" for finding in find(run))
    level = "note" if not run.windows else "bad" if is_bad else "good"
    # That nothing was found wrong does not mean that the run is fine.
    word = "" if level == "good" else f'<span class="word">{WORDS[level]}</span>'
    return f'<p class="verdict {level}">{word}{escape(verdict(run, is_file=True))}</p>'


def _tiles(run: Run) -> str:
    parts = (
        f'<div class="tile"><dt>{escape(tile.name)}</dt><dd><span class="value">'
        f'{escape(tile.value)}</span><span class="sub">{escape(tile.more)}</span></dd></div>'
        for tile in key_numbers(run)[:TILES]
    )
    return f'<dl class="tiles">{"".join(parts)}</dl>'


def _findings(run: Run) -> str:
    rows = []
    for finding in find(run):
        more = f"<p>{escape(finding.text)}</p>" if finding.text else ""
        rows.append(
            f'<li class="{finding.level}"><p class="what"><span class="word">'
            f"{WORDS[finding.level]}</span>{escape(finding.title)}</p>{more}</li>"
        )
    return f'<ul class="findings">{"".join(rows)}</ul>'


def _charts(run: Run, charts: Sequence[Chart]) -> str:
    figures = []
    for chart in charts:
        caption = chart.caption
        if any(line.low for line in chart.lines):
            what = "last" if chart.name == "scale" else "mean"
            caption += f" A point is the {what} of {run.bins.width} steps, the band their range."
        figures.append(
            f'<figure class="card" id="chart-{chart.name}"><h3>{chart.title}</h3>'
            f'<div class="readout"></div><div class="plot" role="group" aria-label="{chart.title}">'
            f"</div><figcaption>{caption}</figcaption></figure>"
        )
    return f'<div class="charts">{"".join(figures)}</div>'


def _modules(run: Run) -> str:
    """The modules with the largest norms, and the modules with the most overflows, and when."""
    largest = run.modules.most(lambda module: module.largest)
    norms = {name: f"{each.largest:.3g} ({run.place(each.largest_x)})" for name, each in largest}
    most_bad = run.modules.most(lambda module: module.bad)
    bad = {name: f"{each.bad:,} (first: {run.place(each.first_bad)})" for name, each in most_bad}
    tables = [_table("largest gradient norm", norms)] * bool(norms)
    tables += [_table("steps with inf or NaN", bad)] * bool(bad)
    return "<h2>Modules</h2>" + _cards(tables) if tables else ""


def _cards(tables: Sequence[str]) -> str:
    cards = "".join(f'<div class="card">{table}</div>' for table in tables)
    return f'<div class="tables">{cards}</div>'


def _table(label: str, rows: Mapping[str, Any], marked: Collection[str] = ()) -> str:
    """A table of names and values, in which the names in ``marked`` stand out."""
    lines = [f"<tr><th></th><th>{escape(label)}</th></tr>"] if label else []
    for name, value in rows.items():
        other = ' class="other"' if name in marked else ""
        lines.append(f"<tr{other}><td>{escape(name)}</td><td>{escape(written(value))}</td></tr>")
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def _settings(run: Run) -> str:
    """Two tables: the run with its versions, and its settings."""
    last = run.sessions[-1].start if run.sessions else Start()
    where, known = {"file": run.path}, dict(last.facts)
    if "unix_time" in known:
        started = datetime.fromtimestamp(known.pop("unix_time"), timezone.utc)
        where["started"] = f"{started:%Y-%m-%d %H:%M} UTC"
    tables = _table("", where | known), _table("", last.settings, last.changed)
    return f'<p class="soft">Marked: not the default.</p>{_cards(tables)}'
