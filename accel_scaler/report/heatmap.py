"""The heat map of a report: the gradient norm of every parameter over the steps."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from .figures import new_figure
from .formatting import number, shorten
from .run_summary import Run
from .theme import Theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["heat_figure"]

MAX_ROWS = 240
NAMED_ROWS = 48
BLOCK = re.compile(r"^(.*?\.\d+)(?:\.|$)")


def heat_figure(run: Run, theme: Theme, of: str = "") -> Figure | None:
    """Rows: parameters in the model's order; columns: steps. None where no norms were kept.

    More than ``MAX_ROWS`` parameters share rows with their neighbours (the largest norm shows).
    """
    import numpy as np
    from matplotlib import colormaps
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm
    from matplotlib.patches import Patch
    from matplotlib.ticker import FuncFormatter, NullFormatter

    rows = sorted(
        {name for _, names, _ in run.heat.columns for name in names},
        key=lambda name: (run.places[name], name),
    )
    if not rows:
        return None
    table, labels = _table(run, rows)
    shown = table[np.isfinite(table) & (table > 0)]
    low, high = np.quantile(shown, [0.005, 0.995]) if shown.size else (0.1, 1.0)
    scale = LogNorm(float(low), max(float(high), float(low) * 1.01), clip=True)
    with np.errstate(all="ignore"):
        colors = colormaps["viridis"](scale(np.where(table > 0, table, low)))
    missing = np.isnan(table) & ~_seen(run, rows, table.shape)
    bad = ~np.isfinite(table) & ~missing
    colors[missing] = (0, 0, 0, 0)
    colors[bad] = (0.91, 0.30, 0.10, 1)
    colors[table == 0] = (0.55, 0.55, 0.55, 1)
    height = min(8.0, max(2.6, 1.4 + 0.155 * len(labels)))
    figure, axes = new_figure("Gradient norm by parameter, unscaled", height, theme, of)
    axes.imshow(colors, aspect="auto", interpolation="none", origin="upper")
    _row_labels(axes, labels, theme)
    _column_labels(axes, run)
    bar = figure.colorbar(
        ScalarMappable(scale, colormaps["viridis"]), ax=axes, pad=0.015, aspect=30, fraction=0.05
    )
    bar.set_label("L2 norm")
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    bar.ax.yaxis.set_minor_formatter(NullFormatter())
    bar.outline.set_visible(False)
    keys = [((0.91, 0.30, 0.10), "inf or NaN", bad.any())]
    keys += [((0.55, 0.55, 0.55), "exactly 0", (table == 0).any())]
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
    return figure


def _grouping(count: int) -> int:
    return -(-count // MAX_ROWS)


def _table(run: Run, rows: list[str]) -> tuple[Any, list[str]]:
    """Norms as ``[row, column]`` in float64 (NaN: none), and a name for each row."""
    import numpy as np

    index = {name: row for row, name in enumerate(rows)}
    table = np.full((len(rows), len(run.heat.columns)), np.nan)
    for column, (_, names, norms) in enumerate(run.heat.columns):
        table[[index[name] for name in names], column] = np.asarray(norms, dtype=np.float64)
    group = _grouping(len(rows))
    if group == 1:
        return table, rows
    padded = np.full((-(-len(rows) // group) * group, table.shape[1]), np.nan)
    padded[: len(rows)] = table
    # A row shows its largest norm, and anything non-finite before that.
    stacked = padded.reshape(-1, group, table.shape[1])
    largest = np.where(np.isnan(stacked), -1.0, stacked).max(axis=1)
    return np.where(largest < 0, np.nan, largest), rows[::group]


def _seen(run: Run, rows: list[str], shape: tuple[int, ...]) -> Any:
    """Where a norm was recorded at all: a NaN there is a NaN, elsewhere it is nothing."""
    import numpy as np

    index = {name: row // _grouping(len(rows)) for row, name in enumerate(rows)}
    seen = np.zeros(shape, dtype=bool)
    for column, (_, names, _) in enumerate(run.heat.columns):
        seen[[index[name] for name in names], column] = True
    return seen


def _common(names: list[str]) -> int:
    """Length of the dotted beginning that all names share."""
    first, last = min(names).split("."), max(names).split(".")
    shared = 0
    for mine, other in zip(first[:-1], last[:-1], strict=False):
        if mine != other:
            break
        shared += len(mine) + 1
    return shared


def _row_labels(axes: Axes, names: list[str], theme: Theme) -> None:
    """Every parameter where there is room, else one name a block; lines between the blocks."""
    from itertools import groupby

    cut = _common(names) if len(names) > 1 else 0
    names = [name[cut:] for name in names]
    blocks: list[tuple[str, int, int]] = []
    for block, members in groupby(
        enumerate(names), key=lambda e: m[1] if (m := BLOCK.match(e[1])) else e[1]
    ):
        positions = [position for position, _ in members]
        blocks.append((block, positions[0], positions[-1]))
    if len(blocks) <= 64:
        for _, start, _ in blocks[1:]:
            axes.axhline(start - 0.5, color=theme.paper, linewidth=0.7)
    if len(names) <= NAMED_ROWS:
        ticks = [(float(row), name) for row, name in enumerate(names)]
    else:
        ticks, reach = [], -math.inf
        for block, start, end in blocks:
            middle = (start + end) / 2
            if middle - reach >= len(names) / 40:
                ticks.append((middle, block))
                reach = middle
    axes.set_yticks([position for position, _ in ticks], [shorten(name, 34) for _, name in ticks])
    axes.tick_params(axis="y", length=0, labelsize=7.5, labelcolor=theme.ink)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)


def _column_labels(axes: Axes, run: Run) -> None:
    columns = run.heat.columns
    count = len(columns)
    shown = sorted({round(i * (count - 1) / 6) for i in range(7)})
    axes.set_xticks(shown, [number(columns[i][0]) for i in shown])
    every = f", one in {run.heat.stride} shown" if run.heat.stride > 1 else ""
    axes.set_xlabel(f"step{every}" if len(run.sessions) < 2 else f"step over all sessions{every}")
