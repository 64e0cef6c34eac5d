"""What the page's script draws from, as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from .charts import Axis, Chart
from .heatmap import HeatMap
from .run import Run


def page_data(run: Run, axis: Axis | None, charts: Sequence[Chart], heat: HeatMap | None) -> str:
    """JSON that stands safely inside a ``<script>``: ASCII, without ``<``, ``>`` and ``&``."""
    bins = run.bins.done
    data = {
        "run": {
            "label": run.label,
            "x": [b.x for b in bins],
            "last": [b.last_x for b in bins],
            "skips": [b.skips for b in bins],
            "sessions": [session.first_x for session in run.sessions],
        },
        "axis": axis and asdict(axis),
        "charts": [asdict(chart) for chart in charts],
        "heatmap": heat and _heatmap(heat),
    }
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for mark in "<>&":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text


def _heatmap(heat: HeatMap) -> dict[str, Any]:
    """A cell is null where there is no norm, -1 where one was inf or NaN."""

    def cell(value: float) -> float | None:
        if math.isnan(value):
            return None
        return -1.0 if value == math.inf else float(f"{value:.4g}")

    return {
        "name": heat.name,
        "rows": [each[0] + (f" to {each[-1]}" if len(each) > 1 else "") for each in heat.rows],
        "wide": heat.labels(30),
        "narrow": heat.labels(17),
        "columns": heat.columns,
        "low": heat.low,
        "high": heat.high,
        "norms": [[cell(value) for value in row] for row in heat.table],
    }
