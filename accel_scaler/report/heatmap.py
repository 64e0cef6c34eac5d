"""The heat map of a report: the gradient norm of every parameter over the steps, as data."""

from __future__ import annotations

import math
import os
from array import array
from dataclasses import dataclass

from .formatting import layer_name
from .run_summary import Run

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
    """Norms as ``[row][column]``, float32, the largest of a row's. NaN: none there; inf: one was
    inf or NaN."""
    low: float
    """Where the colours begin; 0 has its own."""
    high: float
    """And end; inf has its own."""
    stride: int
    """Of how many windows with norms one is shown."""

    def labels(self, limit: int) -> list[str]:
        """What each row is called, in at most this many characters."""
        first = [names[0] for names in self.rows]
        shared = os.path.commonprefix(first) if len(first) > 1 else ""  # noqa: RUF071
        cut = shared.rfind(".") + 1
        if shared[:cut].rstrip(".").rpartition(".")[2].isdigit():
            cut = shared[: cut - 1].rpartition(".")[0].rfind(".") + 1  # keep the layer's number
        return [layer_name(name[cut:], limit) for name in first]

    def in_words(self) -> str:
        """For who cannot see it."""
        values = [value for row in self.table for value in row]
        bad = sum(value == math.inf for value in values)
        return (
            f"{self.title}: {len(self.rows)} rows, {len(self.columns)} steps, norms mostly from "
            f"{self.low:.3g} to {self.high:.3g}, {bad} of {len(values)} cells inf or NaN."
        )


def heatmap(run: Run) -> HeatMap | None:
    """None: no norms were kept."""
    if not run.norms.columns:
        return None
    rows = _rows(run)
    table = _table(run, rows)
    shown = sorted(v for row in table for v in row if 0 < v < math.inf) or [0.1, 1.0]
    low, high = (shown[round(share * (len(shown) - 1))] for share in (0.005, 0.995))
    return HeatMap(
        "heatmap",
        "Gradient norm by parameter, unscaled",
        "Parameters from the input (top) to the output (bottom). A backward runs upwards: what is "
        "non-finite low in a column spreads to all above.",
        rows,
        [x for x, _, _ in run.norms.columns],
        table,
        low,
        max(high, low * 1.01),
        run.norms.stride,
    )


def _rows(run: Run) -> list[list[str]]:
    names = sorted(
        {name for _, names, _ in run.norms.columns for name in names},
        key=lambda name: (run.places[name], name),
    )
    group = -(-len(names) // MAX_ROWS) or 1
    return [names[i : i + group] for i in range(0, len(names), group)]


def _table(run: Run, rows: list[list[str]]) -> list[array[float]]:
    row_of = {name: index for index, row in enumerate(rows) for name in row}
    table = [array("f", [math.nan]) * len(run.norms.columns) for _ in rows]
    for column, (_, names, norms) in enumerate(run.norms.columns):
        for name, norm in zip(names, norms, strict=True):
            row = table[row_of[name]]
            largest = norm if math.isfinite(norm) else math.inf
            row[column] = largest if math.isnan(row[column]) else max(row[column], largest)
    return table
