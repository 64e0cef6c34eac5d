"""The heatmap of a report: the gradient norm of every parameter over the steps."""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

from .formatting import number, shorten
from .run_summary import Run
from .theme import INK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_ROWS = 240
NAMED_ROWS = 48
RED = (0.91, 0.30, 0.10)
GREY = (0.55, 0.55, 0.55)


def heatmap_rows(run: Run) -> list[list[str]]:
    """The parameters of each row, in the model's order; empty where no norms were kept.

    More than ``MAX_ROWS`` parameters share rows with their neighbours.
    """
    names = sorted(
        {name for _, names, _ in run.norms.columns for name in names},
        key=lambda name: (run.places[name], name),
    )
    group = -(-len(names) // MAX_ROWS)
    return [names[i : i + group] for i in range(0, len(names), group)] if names else []


def draw_heatmap(axes: Axes, run: Run, rows: list[list[str]]) -> None:
    """Columns: steps. The largest norm of a row shows, and anything non-finite before that."""
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm
    from matplotlib.patches import Patch
    from matplotlib.ticker import FuncFormatter, NullFormatter

    table = _table(run, rows)
    values = [value for row in table for value in row]
    shown = sorted(value for value in values if 0 < value < math.inf) or [0.1, 1.0]
    low, high = (shown[round(share * (len(shown) - 1))] for share in (0.005, 0.995))
    high = max(high, low * 1.01)

    def clip(value: float) -> float:
        """NaN: there was no norm. Outside of the scale lie 0, and what is inf or NaN."""
        if math.isnan(value) or value == 0:
            return low / 10 if value == 0 else value
        return 10 * high if value == math.inf else min(max(value, low), high)

    colors = colormaps["viridis"].with_extremes(bad=(0, 0, 0, 0), under=GREY, over=RED)
    image = axes.imshow(
        [[clip(value) for value in row] for row in table],
        norm=LogNorm(low, high),
        cmap=colors,
        aspect="auto",
        interpolation="none",
        origin="upper",
    )
    _row_labels(axes, [row[0] for row in rows])
    _column_labels(axes, run)
    bar = axes.figure.colorbar(
        image, ax=axes, pad=0.015, aspect=30, fraction=0.05, extend="neither"
    )
    bar.set_label("L2 norm")
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    bar.ax.yaxis.set_minor_formatter(NullFormatter())
    bar.outline.set_visible(False)
    keys = [(RED, "inf or NaN", math.inf in values), (GREY, "exactly 0", 0.0 in values)]
    patches = [Patch(color=color, label=label) for color, label, there in keys if there]
    if patches:
        axes.legend(
            handles=patches,
            loc="lower right",
            bbox_to_anchor=(1.0, 1.0),
            borderaxespad=0.2,
            ncols=2,
            handlelength=1.0,
        )


def _table(run: Run, rows: list[list[str]]) -> list[list[float]]:
    """Norms as ``[row][column]``; NaN: none there; inf: one was inf or NaN."""
    row_of = {name: index for index, row in enumerate(rows) for name in row}
    table = [[math.nan] * len(run.norms.columns) for _ in rows]
    for column, (_, names, norms) in enumerate(run.norms.columns):
        for name, norm in zip(names, norms, strict=True):
            row = table[row_of[name]]
            largest = norm if math.isfinite(norm) else math.inf
            row[column] = largest if math.isnan(row[column]) else max(row[column], largest)
    return table


def _row_labels(axes: Axes, names: list[str]) -> None:
    """Every parameter where there is room, else every so many."""
    shared = os.path.commonprefix(names) if len(names) > 1 else ""  # noqa: RUF071
    cut = shared.rfind(".") + 1
    rows = range(0, len(names), -(-len(names) // NAMED_ROWS))
    axes.set_yticks(rows, [shorten(names[row][cut:], 34) for row in rows])
    axes.tick_params(axis="y", length=0, labelsize=7.5, labelcolor=INK)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)


def _column_labels(axes: Axes, run: Run) -> None:
    columns = run.norms.columns
    shown = sorted({round(i * (len(columns) - 1) / 6) for i in range(7)})
    axes.set_xticks(shown, [number(columns[i][0]) for i in shown])
    every = f", one in {run.norms.stride} shown" if run.norms.stride > 1 else ""
    axes.set_xlabel(f"step{every}" if len(run.sessions) < 2 else f"step over all sessions{every}")
