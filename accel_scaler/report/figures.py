"""A report's charts as pictures, drawn with matplotlib's objects; nothing global is touched."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from ..console import number
from .charts import MANY_POINTS, Axis, Chart, Line, axis_of, charts
from .heatmap import HeatMap, heatmaps
from .run_summary import Run
from .samples import KINDS
from .theme import DASHES, LIGHT
from .timeline import Timeline, timelines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 8.6
NAMED_ROWS = 48
MARKERS = {
    "cross": ("x", 5.5, 1.4, 0.985),
    "triangle": ("v", 4.5, 0.0, 0.985),
    "tick": ("|", 5.5, 0.8, 0.15),
}
"""Of each shape the marker, its size, the width of its edge, and where it is without a height."""
RED = (0.91, 0.30, 0.10)
GREY = (0.55, 0.55, 0.55)


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture, not yet drawn."""

    name: str
    title: str
    height: float
    """Inches."""
    plot: Callable[[Axes], None]

    def draw(self, figure: Figure) -> Axes:
        """Draw it into a figure, or a part of one."""
        axes = figure.add_subplot()
        ink = LIGHT["ink"]
        axes.set_title(self.title, loc="left", fontsize=11, fontweight="bold", color=ink, pad=10)
        axes.tick_params(length=3, labelsize=8.5)
        self.plot(axes)
        return axes

    def figure(self) -> Figure:
        """A figure of it alone. Call it inside ``drawing()``."""
        figure = new_figure(self.height)
        self.draw(figure)
        return figure


def new_figure(height: float) -> Figure:
    """An empty one of this many inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(WIDTH, height), layout="constrained")


def stacked(found: Sequence[Picture]) -> Figure:
    """All of them in one figure, one below the other."""
    heights = [picture.height for picture in found]
    figure = new_figure(sum(heights))
    parts = figure.subfigures(len(found), squeeze=False, height_ratios=heights)
    for picture, part in zip(found, parts.flat, strict=True):
        picture.draw(part)
    return figure


def pictures(runs: Sequence[Run]) -> list[Picture]:
    """Every picture there is data for."""
    runs = [run for run in runs if run.windows]
    axis = axis_of(runs) if runs else Axis("", 0)
    found = []
    for chart in charts(runs):
        plot = partial(_plot_chart, chart=chart, axis=axis, runs=runs)
        found.append(Picture(chart.name, chart.title, 3.2, plot))
    for heat in heatmaps(runs):
        height = min(8.0, max(2.6, 1.4 + 0.155 * len(heat.rows)))
        plot = partial(_plot_heatmap, heat=heat, axis=axis)
        found.append(Picture(heat.name, heat.title, height, plot))
    for timeline in timelines(runs):
        height = 2.5 if timeline.beside else 1.9
        plot = partial(_plot_timeline, timeline=timeline)
        found.append(Picture(timeline.name, timeline.title, height, plot))
    return found


def _note(axes: Axes, text: str, at: tuple[float, float], offset: tuple[int, int]) -> None:
    """Small text; ``at``: x of the data, y of the axes from 0 to 1; ``offset`` in points."""
    axes.annotate(
        text,
        at,
        xycoords=("data", "axes fraction"),
        xytext=offset,
        textcoords="offset points",
        fontsize=7.5,
        color=LIGHT["soft"],
        va="top",
    )


def _plot_chart(axes: Axes, chart: Chart, axis: Axis, runs: Sequence[Run]) -> None:
    """Its lines with their bands, limits and marks."""
    if chart.scale == "log2":
        axes.set_yscale("log", base=2)
    else:
        axes.set_yscale(chart.scale)
    for line in chart.lines:
        _plot_line(axes, line, runs[line.run])
    for limit in chart.limits:
        axes.axhline(
            limit.y, color=LIGHT["ink"], linewidth=1.2, linestyle=(0, (4, 3)), label=limit.label
        )
    low, high = axes.get_ylim()
    if chart.scale == "log2":
        axes.set_ylim(min(low, high / 4), high * 1.2)
    elif chart.scale == "log" and chart.marks:
        axes.set_ylim(low, high * (high / low) ** 0.08)
    _plot_marks(axes, chart, runs)
    _ticks(axes, chart)
    _bottom(axes, axis)
    axes.set_ylabel(chart.unit)
    axes.grid(axis="y", linewidth=0.7)
    axes.figure.legend(loc="outside lower center", ncols=3)


def _plot_line(axes: Axes, line: Line, run: Run) -> None:
    bins, color = run.bins.done, LIGHT[line.hue]
    xs = [bins[i].x for i, y in enumerate(line.y) if y is not None]
    ys = [y for y in line.y if y is not None]
    if not ys:
        return
    if line.low:
        low, high = ([y for y in edge if y is not None] for edge in (line.low, line.high))
        step: Literal["post"] | None = "post" if line.holds else None
        axes.fill_between(xs, low, high, alpha=0.2, linewidth=0, color=color, step=step)
    if line.holds:
        xs, ys = [*xs, bins[-1].last_x], [*ys, ys[-1]]
    dash = DASHES[line.run]
    axes.plot(
        xs,
        ys,
        color=color,
        alpha=0.35 if line.faint else 1.0,
        linewidth=1.5 if line.low or len(ys) < MANY_POINTS else 1.0,
        linestyle=(0, dash) if dash else "-",
        drawstyle="steps-post" if line.holds else "default",
        marker="." if len(ys) < 3 else None,
        label=f"{line.label}, {line.per_bin}" if line.per_bin else line.label,
    )


def _plot_marks(axes: Axes, chart: Chart, runs: Sequence[Run]) -> None:
    """Those without a height at the upper edge."""
    edge = axes.get_xaxis_transform()
    for marks in chart.marks:
        bins = runs[marks.run].bins.done
        xs = [(bins[i].x + bins[i].last_x) / 2 for i in marks.bins]
        each = list(zip(xs, marks.y, strict=True))
        (marker, size, edge_width, top), label = MARKERS[marks.shape], marks.label
        for at in (
            [(x, y, axes.transData) for x, y in each if y is not None],
            [(x, top - 0.03 * marks.run, edge) for x, y in each if y is None],
        ):
            if at:
                axes.plot(
                    [x for x, *_ in at],
                    [y for _, y, _ in at],
                    transform=at[0][2],
                    linestyle="none",
                    marker=marker,
                    markersize=size,
                    markeredgewidth=edge_width,
                    color=LIGHT[marks.hue],
                    label=label,
                )
                label = "_"  # once


def _ticks(axes: Axes, chart: Chart) -> None:
    """Numbers instead of powers; between the decades too where there are few of them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    if chart.scale == "linear":
        return
    base: float = 2.0
    subs: tuple[float, ...] = (1.0,)
    if chart.scale == "log":
        low, high = axes.get_ylim()
        base, subs = 10.0, (1.0, 2.0, 5.0) if high / low < 300 else (1.0,)
    axes.yaxis.set_major_locator(LogLocator(base=base, subs=subs, numticks=8))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))


def _bottom(axes: Axes, axis: Axis) -> None:
    """Steps along the x axis, and where each later session began."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_xlabel(axis.label)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlim(-0.01 * max(axis.last, 1), 1.01 * max(axis.last, 1))
    for index, (session, x) in enumerate(axis.sessions):
        axes.axvline(x, color=LIGHT["soft"], linewidth=0.8, linestyle=(0, (1, 2)))
        if index % max(1, len(axis.sessions) // 6) == 0:
            _note(axes, f"session {session}", (x, 1.0), (3, -2))


def _plot_heatmap(axes: Axes, heat: HeatMap, axis: Axis) -> None:
    """Columns: steps. The largest norm of a row shows, and anything non-finite before that."""
    from matplotlib import colormaps
    from matplotlib.colors import LogNorm
    from matplotlib.patches import Patch
    from matplotlib.ticker import FuncFormatter, NullFormatter

    def clip(value: float) -> float:
        """NaN: there was no norm. Outside of the scale lie 0, and what is inf or NaN."""
        if math.isnan(value) or value == 0:
            return heat.low / 10 if value == 0 else value
        return 10 * heat.high if value == math.inf else min(max(value, heat.low), heat.high)

    colors = colormaps["viridis"].with_extremes(bad=(0, 0, 0, 0), under=GREY, over=RED)
    image = axes.imshow(
        [[clip(value) for value in row] for row in heat.table],
        norm=LogNorm(heat.low, heat.high),
        cmap=colors,
        aspect="auto",
        interpolation="none",
        origin="upper",
    )
    labels = heat.labels(34)
    shown = range(0, len(labels), -(-len(labels) // NAMED_ROWS))
    axes.set_yticks(shown, [labels[row] for row in shown])
    axes.tick_params(axis="y", length=0, labelsize=7.5, labelcolor=LIGHT["ink"])
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)
    columns = heat.columns
    ticks = sorted({round(i * (len(columns) - 1) / 6) for i in range(7)})
    axes.set_xticks(ticks, [number(columns[i]) for i in ticks])
    axes.set_xlabel(axis.label + (f", one in {heat.stride} shown" if heat.stride > 1 else ""))
    bar = axes.figure.colorbar(
        image, ax=axes, pad=0.015, aspect=30, fraction=0.05, extend="neither"
    )
    bar.set_label("L2 norm")
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    bar.ax.yaxis.set_minor_formatter(NullFormatter())
    bar.outline.set_visible(False)
    values = {value for row in heat.table for value in row if value in (0.0, math.inf)}
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


def _plot_timeline(axes: Axes, timeline: Timeline) -> None:
    """What each thread did in a few windows, in milliseconds."""
    for kind in KINDS:
        bars = [(bar.start, bar.length) for bar in timeline.bars if bar.kind == kind]
        if not bars:
            continue
        lane, top, height = timeline.lane_of(kind)
        wait = kind == "wait"
        axes.broken_barh(
            bars,
            (-lane + 0.7 * (1 - top - height), 0.7 * height),
            facecolors=LIGHT["paper" if wait else kind],
            edgecolor=LIGHT["soft"] if wait else "none",
            hatch="//////" if wait else None,
            linewidth=0.5 if wait else 0,
            label=kind,
        )
    for index, at in enumerate(timeline.ends):
        axes.axvline(at, color=LIGHT["ink"], linewidth=0.8, linestyle=(0, (1, 1.5)))
        if index == 0:
            _note(axes, timeline.first_end, (at, 0.98), (3, 0))
    lanes = timeline.lanes
    axes.set_yticks([0.35 - lane for lane in range(len(lanes))], lanes, color=LIGHT["ink"])
    axes.set_ylim(-1.15 if timeline.beside else -0.15, 1.05)
    axes.set_xlim(0, timeline.length)
    axes.set_xlabel("milliseconds")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.figure.legend(loc="outside lower center", ncols=len(KINDS), handlelength=1.4)
