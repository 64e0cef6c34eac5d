"""What the page's script draws from, as JSON: the charts' own numbers, rounded."""

from __future__ import annotations

import base64
import json
import math
import sys
from array import array
from collections.abc import Sequence
from typing import Any

from .charts import Axis, Chart
from .heatmap import HeatMap
from .run_summary import Run


def page_data(run: Run, axis: Axis | None, charts: Sequence[Chart], heat: HeatMap | None) -> str:
    """JSON that stands safely inside a ``<script>``: ASCII, without ``<``, ``>`` and ``&``."""
    data = {
        "run": _run(run),
        "axis": axis and {"label": axis.label, "last": axis.last, "sessions": axis.sessions},
        "charts": [_chart(chart) for chart in charts],
        "heatmap": heat and _heatmap(heat),
    }
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    for mark in "<>&":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text


def rounded(value: float | None) -> float | int | None:
    """Six significant digits; whole numbers as they are. None: nothing to draw."""
    if value is None or not math.isfinite(value):
        return None
    if value == int(value) and abs(value) < 2.0**53:
        return int(value)
    return float(f"{value:.6g}")


def _run(run: Run) -> dict[str, Any]:
    bins = run.bins.done
    return {
        "label": run.label,
        "x": [b.x for b in bins],
        "last": [b.last_x for b in bins],
        "skips": [b.skips for b in bins],
        "sessions": [session.first_x for session in run.sessions],
    }


def _chart(chart: Chart) -> dict[str, Any]:
    return {
        "name": chart.name,
        "unit": chart.unit,
        "scale": chart.scale,
        "lines": [
            {
                "label": line.label,
                "hue": line.hue,
                "holds": line.holds,
                "faint": line.faint,
                "perBin": line.per_bin,
                "y": list(map(rounded, line.y)),
                "low": list(map(rounded, line.low)),
                "high": list(map(rounded, line.high)),
            }
            for line in chart.lines
        ],
        "marks": [
            {
                "label": marks.label,
                "hue": marks.hue,
                "shape": marks.shape,
                "bins": marks.bins,
                "y": list(map(rounded, marks.y)),
            }
            for marks in chart.marks
        ],
        "limits": [{"label": limit.label, "y": rounded(limit.y)} for limit in chart.limits],
    }


def _heatmap(heat: HeatMap) -> dict[str, Any]:
    values = array("f", (value for row in heat.table for value in row))
    if sys.byteorder != "little":
        values.byteswap()
    return {
        "name": heat.name,
        "rows": [each[0] + (f" to {each[-1]}" if len(each) > 1 else "") for each in heat.rows],
        "wide": heat.labels(30),
        "narrow": heat.labels(17),
        "columns": heat.columns,
        "low": heat.low,
        "high": heat.high,
        "norms": base64.b64encode(values.tobytes()).decode("ascii"),
    }
