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
from .findings import find
from .heatmap import HeatMap, heatmap
from .key_numbers import TILES, key_numbers
from .run import Run

MAX_SESSIONS = 30
"""Sessions whose beginnings are drawn."""
WORDS = {"bad": "Problem", "warn": "Look", "note": "Note", "good": "Fine"}
HUES = {
    "ink": ("#1b1f24", "#e6edf3"),
    "soft": ("#57606a", "#9aa4af"),
    "line": ("#d8dee4", "#30363d"),
    "paper": ("#ffffff", "#161b22"),
    "ground": ("#f5f7f9", "#0d1117"),
    "bad": ("#c84e00", "#ff8f4a"),
    "warn": ("#8a6100", "#e3b341"),
    "good": ("#1a7f37", "#4ac26b"),
    "line-0": ("#0072b2", "#58b0ea"),
    "line-1": ("#b5407c", "#f08fc0"),
    "line-2": ("#00795a", "#3fcf9d"),
    "line-3": ("#8a6100", "#e3b341"),
    "optimizer": ("#cc79a7", "#e39bc4"),
    "wait": ("#6e7781", "#8b949e"),
}
"""Of each name the colour on light and on dark paper. Told apart by those who see colours
differently as well (after Okabe and Ito)."""


def html_page(run: Run) -> str:
    """The whole page. All text is escaped; the browser runs the package's own script alone."""
    found, heat = charts(run), heatmap(run)
    body = [_verdict(run), _about(run), _tiles(run)]
    others = [chart for chart in found if chart.name != "loss"]
    if run.windows:
        loss = [_chart(chart, True) for chart in found if chart.name == "loss"]
        body += ['<div class="charts">', *loss, "</div>"]
    body += ["<h2>Findings</h2>", _findings(run)]
    if run.windows:
        body += ["<h2>Charts</h2>", '<div class="charts">']
        alone = others[-1] if len(others) % 2 else None
        body += [_chart(chart, chart is alone) for chart in others]
        body += [HEATMAP] if heat is not None else []
        body += ["</div>", NUMBERS]
    rows = {each.name: f"{each.value} {each.more}".rstrip() for each in key_numbers(run)}
    body += ["<h2>In numbers</h2>", _table(run.label, rows)]
    body += ["<h2>Settings and versions</h2>", _settings(run)]
    style, script = _style(), _asset("uPlot.iife.min.js") + "\n" + _asset("page.js")
    return Template(_asset("page.html")).substitute(
        title=escape(f"Optimizer steps: {run.label}"),
        body="\n".join(body),
        data=page_data(run, found, heat),
        style=style,
        style_hash=_hash(style),
        script=script,
        script_hash=_hash(script),
    )


NUMBERS = (
    '<details id="numbers"><summary>All numbers of these charts as a table</summary>'
    '<div class="wide"></div></details>'
)


def page_data(run: Run, charts: Sequence[Chart], heat: HeatMap | None) -> str:
    """What the script draws from, as JSON that stands safely inside a ``<script>``: ASCII, without
    ``<``, ``>`` and ``&``."""
    bins, starts = run.bins.done, [session.first_x for session in run.sessions]
    later = list(enumerate(starts, 1))[1:]
    data = {
        "run": {
            "label": run.label,
            "x": [b.x for b in bins],
            "last": [b.last_x for b in bins],
            "skips": [b.skips for b in bins],
            "sessions": starts,
        },
        "axis": {"last": run.last_x, "sessions": later[:: -(-len(later) // MAX_SESSIONS) or 1]},
        "charts": [asdict(chart) for chart in charts],
        "heatmap": heat and asdict(heat),
    }
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for mark in "<>&":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text


@cache
def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text("utf-8")


def _style() -> str:
    light, dark = (
        "".join(f"--{name}:{both[which]};" for name, both in HUES.items()) for which in (0, 1)
    )
    return (
        f":root{{{light}}}\n:root[data-theme=dark]{{{dark}}}\n"
        f"@media screen and (prefers-color-scheme:dark){{:root:not([data-theme]){{{dark}}}}}\n"
        f"{_asset('uPlot.min.css')}\n{_asset('page.css')}"
    )


def _hash(text: str) -> str:
    """As a content security policy names what may run."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _about(run: Run) -> str:
    if not run.sessions:
        return ""
    session = run.sessions[-1]
    known, settings = session.start.facts, session.start.settings
    parts = [str(known[key]) for key in ("device_name", "device", "precision") if key in known]
    parts = ["no autocast" if part == "no" else part for part in parts]
    if "step_mode" in settings:
        parts.append(f"step_mode {settings['step_mode']}")
    if known.get("ranks", 1) > 1:
        parts.append(f"rank {known.get('rank', '?')} of {known['ranks']}")
    if "unix_time" in known:
        parts.append(_when(known["unix_time"]))
    return f'<p class="about soft">{escape(" · ".join(parts))}</p>'


def _when(moment: float) -> str:
    return f"{datetime.fromtimestamp(moment, timezone.utc):%Y-%m-%d %H:%M} UTC"


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


def _figure(name: str, title: str, caption: str, classes: str = "", key: str = "") -> str:
    return (
        f'<figure class="card{classes}" id="chart-{name}"><div class="head"><h3>{escape(title)}'
        f'</h3></div>{key}<div class="readout"></div><div class="plot" role="group" '
        f'aria-label="{escape(title)}"></div><figcaption>{escape(caption)}</figcaption></figure>'
    )


def _chart(chart: Chart, is_wide: bool) -> str:
    points = dict.fromkeys(line.per_bin for line in chart.lines if line.per_bin)
    caption = " ".join([chart.caption, *(f"Each point: the {text}." for text in points)])
    return _figure(chart.name, chart.title, caption, " whole" if is_wide else "")


HEATMAP = _figure(
    "heatmap",
    "Gradient norm by parameter, unscaled",
    "Parameters from the input (top) to the output (bottom). A backward runs upwards: inf or NaN "
    "that begins low in a column spreads to all parameters above.",
    " whole heatmap",
    '<div class="key"><span>L2 norm <span class="ramp-low"></span><span class="ramp"></span>'
    '<span class="ramp-high"></span></span><span class="key-bad"><i class="swatch"></i>inf or '
    'NaN</span><span class="key-zero"><i class="swatch"></i>exactly 0</span></div>',
)


def _table(label: str, rows: Mapping[str, Any], marked: Collection[str] = ()) -> str:
    """Names and values; the names in ``marked`` stand out."""
    lines = [f"<tr><th></th><th>{escape(label)}</th></tr>"]
    for name, value in rows.items():
        other = ' class="other"' if name in marked else ""
        lines.append(f"<tr{other}><td>{escape(name)}</td><td>{escape(written(value))}</td></tr>")
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def _settings(run: Run) -> str:
    """Two tables: what ran where, and the settings."""
    last = run.sessions[-1].start if run.sessions else Start()
    where, known = {"file": plain(run.path)}, dict(last.facts)
    if "unix_time" in known:
        where["started"] = _when(known.pop("unix_time"))
    tables = _table(run.label, where | known), _table(run.label, last.settings, last.changed)
    cards = "".join(f'<div class="card">{each}</div>' for each in tables)
    return f'<p class="soft">Marked: not the default.</p><div class="tables">{cards}</div>'
