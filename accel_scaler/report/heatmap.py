"""The heat map of a report: the gradient norm of every parameter over the steps, as data."""

from __future__ import annotations

import math
import os
from array import array
from dataclasses import dataclass

from .run import Run

MAX_ROWS = 240


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Rows: parameters in the model's order, from the input to the output. Columns: steps."""

    name: str
    title: str
    caption: str
    rows: list[list[str]]
    """The parameters of each row; more than ``MAX_ROWS`` share rows with their neighbours."""
    columns: list[int]
    """The window of each."""
    table: list[array[float]]
    """Norms as ``[row][column]``, the largest each. NaN: none; inf: one was inf or NaN."""
    low: float
    """Where the colours begin; 0 has its own."""
    high: float
    """And end; inf has its own."""

    def labels(self, limit: int) -> list[str]:
        """The name of each row without what all begin with, in at most so many characters."""
        first = [names[0] for names in self.rows]
        shared = os.path.commonprefix(first) if len(first) > 1 else ""  # noqa: RUF071
        cut = shared.rfind(".") + 1
        return [shorten(name[cut:], limit) for name in first]


def shorten(name: str, limit: int) -> str:
    """At most ``limit`` characters; the end of a layer's name says more than its beginning."""
    if len(name) <= limit:
        return name
    head = limit // 3
    return f"{name[:head]}…{name[head + 1 - limit :]}"


def heatmap(run: Run) -> HeatMap | None:
    """None: no norms were kept."""
    columns = run.norms.columns
    if not columns:
        return None
    names = list(dict.fromkeys(name for _, names, _ in columns for name in names))
    group = -(-len(names) // MAX_ROWS) or 1
    rows = [names[i : i + group] for i in range(0, len(names), group)]
    table = _table(run, rows)
    finite = sorted(v for row in table for v in row if 0 < v < math.inf) or [0.1, 1.0]
    low, high = (finite[round(share * (len(finite) - 1))] for share in (0.005, 0.995))
    return HeatMap(
        "heatmap",
        "Gradient norm by parameter, unscaled",
        "Parameters from the input (top) to the output (bottom). A backward runs upwards: what is "
        "non-finite low in a column spreads to all above.",
        rows,
        [x for x, _, _ in columns],
        table,
        low,
        max(high, low * 1.01),
    )


def _table(run: Run, rows: list[list[str]]) -> list[array[float]]:
    row_of = {name: index for index, row in enumerate(rows) for name in row}
    table = [array("f", [math.nan]) * len(run.norms.columns) for _ in rows]
    for column, (_, names, norms) in enumerate(run.norms.columns):
        for name, norm in zip(names, norms, strict=True):
            row = table[row_of[name]]
            largest = norm if math.isfinite(norm) else math.inf
            row[column] = largest if math.isnan(row[column]) else max(row[column], largest)
    return table
