"""The report as one HTML page that needs nothing but itself: no server, no network."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
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
    body = [_verdict(run), _tiles(run), _charts(each for each in found if each.name == "loss")]
    body += ["<h2>Findings</h2>", _findings(run)]
    if run.windows:
        body += ["<h2>Charts</h2>", _charts(each for each in found if each.name != "loss")]
    rows = {each.name: each.value + f"; {each.more}" * bool(each.more) for each in key_numbers(run)}
    body += ["<h2>In numbers</h2>", _table(rows)]
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
    data = {
        "x": run.x,
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


def _charts(charts: Iterable[Chart]) -> str:
    figures = (
        f'<figure class="card" id="chart-{chart.name}"><h3>{chart.title}</h3>'
        f'<div class="readout"></div><div class="plot" role="group" aria-label="{chart.title}">'
        f"</div><figcaption>{chart.caption}</figcaption></figure>"
        for chart in charts
    )
    return f'<div class="charts">{"".join(figures)}</div>'


def _table(rows: Mapping[str, Any]) -> str:
    lines = [
        f"<tr><td>{escape(name)}</td><td>{escape(written(value))}</td></tr>"
        for name, value in rows.items()
    ]
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def _settings(run: Run) -> str:
    """Two tables: the run with its versions, and the settings other than their defaults."""
    last = run.sessions[-1].start if run.sessions else Start()
    where, known = {"file": run.path}, dict(last.facts)
    if "unix_time" in known:
        started = datetime.fromtimestamp(known.pop("unix_time"), timezone.utc)
        where["started"] = f"{started:%Y-%m-%d %H:%M} UTC"
    changed = {name: last.settings.get(name) for name in last.changed}
    tables = _table(where | known), _table(changed or {"settings": "defaults"})
    cards = "".join(f'<div class="card">{table}</div>' for table in tables)
    return f'<div class="tables">{cards}</div>'
