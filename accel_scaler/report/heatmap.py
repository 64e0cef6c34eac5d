"""The heat map of a report: the gradient norm of every parameter over the steps, as data."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass

from .run import Run

MAX_ROWS = 240


@dataclass(frozen=True, slots=True)
class HeatMap:
    """Rows: parameters in the model's order, from the input to the output. Columns: steps."""

    rows: list[str]
    """The names of each; more than ``MAX_ROWS`` parameters share rows with their neighbours."""
    wide: list[str]
    """The names without what all begin with, short."""
    narrow: list[str]
    """Still shorter."""
    columns: list[int]
    """The window of each."""
    norms: list[list[float | None]]
    """As ``[row][column]``, the largest each. None: there is none; -1: one was inf or NaN."""
    low: float
    """Where the colours begin; 0 has its own."""
    high: float
    """And end; inf has its own."""
    name: str = "heatmap"


def shorten(name: str, limit: int) -> str:
    """At most ``limit`` characters; the end of a layer's name says more than its beginning."""
    if len(name) <= limit:
        return name
    head = limit // 3
    return f"{name[:head]}…{name[head + 1 - limit :]}"


def heatmap(run: Run) -> HeatMap | None:
    """None: no norms were kept."""
    if not (columns := run.norms.columns):
        return None
    names = list(dict.fromkeys(name for _, names, _ in columns for name in names))
    group = -(-len(names) // MAX_ROWS) or 1
    rows = [names[i : i + group] for i in range(0, len(names), group)]
    row_of = {name: index // group for index, name in enumerate(names)}
    norms: list[list[float | None]] = [[None] * len(columns) for _ in rows]
    for column, (_, known, found) in enumerate(columns):
        for name, norm in zip(known, found, strict=True):
            row = norms[row_of[name]]
            before = row[column] or 0.0
            row[column] = max(before, norm) if math.isfinite(norm) and before >= 0 else -1.0
    finite = sorted(v for row in norms for v in row if v is not None and v > 0) or [0.1, 1.0]
    low, high = (finite[round(share * (len(finite) - 1))] for share in (0.005, 0.995))
    first = [row[0] for row in rows]
    shared = os.path.commonprefix(first) if len(first) > 1 else ""  # noqa: RUF071
    ends = [name[shared.rfind(".") + 1 :] for name in first]
    return HeatMap(
        [row[0] + (f" to {row[-1]}" if len(row) > 1 else "") for row in rows],
        [shorten(name, 30) for name in ends],
        [shorten(name, 17) for name in ends],
        [x for x, _, _ in columns],
        [[v if v is None else float(f"{v:.4g}") for v in row] for row in norms],
        low,
        max(high, low * 1.01),
    )
