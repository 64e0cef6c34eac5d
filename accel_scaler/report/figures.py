"""The pictures of a report, drawn with matplotlib's objects; nothing global is touched."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ..console import counted
from ..telemetry import LARGEST, TOO_FAR, Record
from .formatting import number, shorten
from .heatmap import draw_heatmap, heatmap_rows
from .run_summary import Run
from .samples import Bin, Spread
from .theme import BAD, INK, PAPER, RUNS, SOFT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH = 8.6
DASHES = ("-", (0, (5, 2)), (0, (2, 1.5)), (0, (6, 2, 1.5, 2)))
KINDS = {
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "clip": "#e69f00",
    "step": "#009e73",
    "optimizer": "#cc79a7",
    "wait": "",
}


@dataclass(frozen=True, slots=True)
class Picture:
    """One picture, not yet drawn."""

    name: str
    caption: str
    title: str
    height: float
    """Inches."""
    plot: Callable[[Axes], None]

    def draw(self, figure: Figure) -> Axes:
        """Draw it into a figure, or a part of one."""
        axes = figure.add_subplot()
        axes.set_title(self.title, loc="left", fontsize=11, fontweight="bold", color=INK, pad=10)
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
    found = [_scale(runs), _norm(runs), _largest(runs), _preview(runs)] if runs else []
    several = len(runs) > 1
    for build in (_heatmap, _timeline):
        for number_of, run in enumerate(runs, 1):
            of = f" ({shorten(run.label, 30)})" if several else ""
            found.append(build(run, of, f"-{number_of}" if several else ""))
    return [picture for picture in found if picture is not None]


def _shared_axis(axes: Axes, runs: Sequence[Run], label: str) -> None:
    """Steps along the x axis, what stands along the other, and where each later session began."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.set_ylabel(label)
    axes.grid(axis="y", linewidth=0.7)
    axes.figure.legend(loc="outside lower center", ncols=3)
    several = any(len(run.sessions) > 1 for run in runs)
    axes.set_xlabel("step, counted on over all sessions" if several else "step")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, steps=[1, 2, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    last = max((run.bins.done[-1].last_x for run in runs if run.bins.done), default=0)
    axes.set_xlim(-0.01 * max(last, 1), 1.01 * max(last, 1))
    if len(runs) > 1:
        return
    starts = [(n, s.first_x) for n, s in enumerate(runs[0].sessions[1:], 2)]
    for index, (count, x) in enumerate(starts[:60]):
        axes.axvline(x, color=SOFT, linewidth=0.8, linestyle=(0, (1, 2)))
        if index % max(1, len(starts) // 6) == 0:
            _note(axes, f"session {count}", (x, 1.0), (3, -2))


def _note(axes: Axes, text: str, at: tuple[float, float], offset: tuple[int, int]) -> None:
    """Small text; ``at``: x of the data, y of the axes from 0 to 1; ``offset`` in points."""
    axes.annotate(
        text,
        at,
        xycoords=("data", "axes fraction"),
        xytext=offset,
        textcoords="offset points",
        fontsize=7.5,
        color=SOFT,
        va="top",
    )


def _band(
    axes: Axes, bins: Sequence[Bin], low: list[float], high: list[float], **style: Any
) -> None:
    """From the least to the most of each bin."""
    axes.fill_between([b.x for b in bins], low, high, alpha=0.2, linewidth=0, **style)


def _scale(runs: Sequence[Run]) -> Picture:
    caption = (
        "The factor on the loss. It halves when a window overflows, and that step is skipped; "
        "after growth_interval windows without overflow it doubles."
    )
    return Picture("scale", caption, "Loss scale", 3.3, partial(_plot_scale, runs=runs))


def _plot_scale(axes: Axes, runs: Sequence[Run]) -> None:
    """The loss scale over the steps (log2), every skipped window marked."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    lows = [b.scale_low for run in runs for b in run.bins.done if b.scale_low > 0]
    smallest = max(min(lows, default=1.0) / 2, 2.0**-150)

    def drawn(scale: float) -> float:
        """Within float32, whatever the file claims; 0 has no place on a logarithmic axis."""
        return min(max(scale, smallest), 2.0**128)

    axes.set_yscale("log", base=2)
    for index, run in enumerate(runs):
        color, name = RUNS[index], f"{shorten(run.label, 24)}: " if len(runs) > 1 else ""
        bins, last = run.bins.done, run.bins.done[-1]
        label = name + ("scale" if run.bins.width == 1 else "scale, thinned out")
        xs, ys = [b.x for b in bins] + [last.last_x], [drawn(b.scale) for b in bins]
        axes.step(
            xs, [*ys, ys[-1]], where="post", color=color, linestyle=DASHES[index], label=label
        )
        if run.bins.width > 1:
            low, high = [drawn(b.scale_low) for b in bins], [drawn(b.scale_high) for b in bins]
            _band(axes, bins, low, high, color=color, step="post")
        skipped = [b for b in bins if b.skips]
        if skipped:
            axes.plot(
                [(b.x + b.last_x) / 2 for b in skipped],
                [drawn(b.scale_high) for b in skipped],
                linestyle="none",
                marker="x",
                markersize=5.5,
                markeredgewidth=1.4,
                color=BAD if len(runs) == 1 else color,
                label=f"{name}{counted(run.skips, 'skipped window')}",
            )
    axes.yaxis.set_major_locator(LogLocator(base=2, numticks=7))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    bottom, top = axes.get_ylim()
    axes.set_ylim(min(bottom, top / 4), top * 1.2)
    _shared_axis(axes, runs, "scale (factor on the loss)")


def _norm(runs: Sequence[Run]) -> Picture | None:
    """None: there is no finite norm."""
    if not any(b.norm.count for run in runs for b in run.bins.done):
        return None
    caption = (
        "The length of the whole gradient at each step, as the optimizer would see it without "
        "clipping."
    )
    title = "Gradient norm, unscaled, before clipping"
    return Picture("norm", caption, title, 3.3, partial(_plot_norm, runs=runs))


def _largest(runs: Sequence[Run]) -> Picture | None:
    """None: nobody measured it."""
    if not any(b.largest.count for run in runs for b in run.bins.done):
        return None
    caption = (
        "The largest element of the parameters' gradients, as the backward left them: multiplied "
        "by the scale. Each halving below float16's largest number is a doubling that the scale "
        "has left, as far as parameters tell; what float32 adds up may lie above."
    )
    title = "Largest scaled gradient"
    return Picture("largest", caption, title, 3.0, partial(_plot_largest, runs=runs))


def _preview(runs: Sequence[Run]) -> Picture | None:
    """None: no update was late, or nobody measured what was shown of it."""
    if not any(b.preview_error.count for run in runs for b in run.bins.done):
        return None
    caption = (
        "Of each update that came a step late: the norm of what the model was off by until then, "
        "against the norm of the update. 1: as if nothing had been shown of it."
    )
    title = "Late updates: how far off the preview was"
    return Picture("preview", caption, title, 3.0, partial(_plot_preview, runs=runs))


def _readable(norm: float) -> float:
    """A norm as it is drawn: beyond these a logarithmic axis has no room for its margins."""
    return min(max(norm, 1e-60), 1e60)


def _plot_norm(axes: Axes, runs: Sequence[Run]) -> None:
    """The gradient norm over the steps (log) and the clipping threshold."""
    _plot_spreads(axes, runs, _norm_of, "norm")
    _threshold_lines(axes, runs)
    _mark_bad(axes, runs, _norm_of)
    _plain_log_ticks(axes)
    _shared_axis(axes, runs, "L2 norm")


def _plot_preview(axes: Axes, runs: Sequence[Run]) -> None:
    """The error of previews over the steps (log), and where it is too large."""
    _plot_spreads(axes, runs, _preview_error_of, "error")
    _limit_line(axes, TOO_FAR, f"too far above {number(TOO_FAR)}")
    _mark_bad(axes, runs, _preview_error_of)
    _plain_log_ticks(axes)
    _shared_axis(axes, runs, "of the update")


def _plot_largest(axes: Axes, runs: Sequence[Run]) -> None:
    """The largest scaled gradient over the steps (log), and float16's largest number."""
    _plot_spreads(axes, runs, _largest_of, "largest gradient")
    _limit_line(axes, LARGEST, f"end of float16, {number(LARGEST)}")
    _plain_log_ticks(axes)
    _shared_axis(axes, runs, "magnitude")


def _largest_of(each: Bin) -> Spread:
    return each.largest


def _norm_of(each: Bin) -> Spread:
    return each.norm


def _preview_error_of(each: Bin) -> Spread:
    return each.preview_error


def _plot_spreads(axes: Axes, runs: Sequence[Run], of: Callable[[Bin], Spread], name: str) -> None:
    """One line a run over the steps, on a logarithmic axis."""
    axes.set_yscale("log")
    for index, run in enumerate(runs):
        bins, width = [b for b in run.bins.done if of(b).count], run.bins.width
        if not bins:
            continue
        color, spreads = RUNS[index], [of(b) for b in bins]
        label = shorten(run.label, 24) if len(runs) > 1 else name
        if width > 1:
            label += f", mean of {width} windows (band: least to most)"
            low = [_readable(each.low) for each in spreads]
            _band(axes, bins, low, [_readable(each.high) for each in spreads], color=color)
        axes.plot(
            [b.x for b in bins],
            [_readable(each.middle) for each in spreads],
            color=color,
            linewidth=1.5 if width > 1 or len(bins) < 300 else 1.0,
            linestyle=DASHES[index],
            marker="." if len(bins) < 3 else None,
            label=label,
        )


def _threshold_lines(axes: Axes, runs: Sequence[Run]) -> None:
    """The clipping threshold that each run ended with."""
    limits = set()
    for run in runs:
        given = [b.max_norm for b in run.bins.done if b.max_norm and b.max_norm < math.inf]
        limits.update(given[-1:])
    for limit in sorted(limits):
        label = f"clipped above {number(limit)}"
        _limit_line(axes, _readable(limit), label)


def _limit_line(axes: Axes, height: float, label: str) -> None:
    axes.axhline(height, color=INK, linewidth=1.2, linestyle=(0, (4, 3)), label=label)


def _mark_bad(axes: Axes, runs: Sequence[Run], of: Callable[[Bin], Spread]) -> None:
    """Numbers that were inf or NaN have no height: a mark at the upper edge."""
    for index, run in enumerate(runs):
        bad = [b for b in run.bins.done if of(b).bad]
        if bad:
            axes.plot(
                [(b.x + b.last_x) / 2 for b in bad],
                [0.985 - 0.03 * index] * len(bad),
                transform=axes.get_xaxis_transform(),
                linestyle="none",
                marker="v",
                markersize=4.5,
                markeredgewidth=0,
                color=BAD if len(runs) == 1 else RUNS[index],
                label="inf or NaN" if index == 0 else None,
            )
    low, high = axes.get_ylim()
    axes.set_ylim(low, high * (high / low) ** 0.08)


def _plain_log_ticks(axes: Axes) -> None:
    """Numbers instead of powers; between the decades too where there are few of them."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = axes.get_ylim()
    few = high / low < 300
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if few else (1.0,), numticks=8))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _heatmap(run: Run, of: str, suffix: str) -> Picture | None:
    """None: no norms were kept."""
    rows = heatmap_rows(run)
    if not rows:
        return None
    caption = (
        "Parameters from the input (top) to the output (bottom). A backward runs upwards: what is "
        "non-finite low in a column spreads to all above."
    )
    title = "Gradient norm by parameter, unscaled" + of
    height = min(8.0, max(2.6, 1.4 + 0.155 * len(rows)))
    plot = partial(draw_heatmap, run=run, rows=rows)
    return Picture("heatmap" + suffix, caption, title, height, plot)


def _timeline(run: Run, of: str, suffix: str) -> Picture | None:
    """None: the file has no spans."""
    if not run.timing.last:
        return None
    caption = (
        "What each thread did when, in the last steps. Hatched: the training thread waited for the "
        "optimizer."
    )
    (first, _), (last, _) = run.timing.last[0], run.timing.last[-1]
    beside = run.sessions[run.session_of(last)].settings.get("step_mode") in ("overlap", "delayed")
    title = f"Timeline, {run.place(first)} to {run.place(last)}{of}"
    records = [record for _, record in run.timing.last]
    plot = partial(_plot_timeline, records=records, beside=beside)
    return Picture("timeline" + suffix, caption, title, 2.5 if beside else 1.9, plot)


def _plot_timeline(axes: Axes, records: Sequence[Record], beside: bool) -> None:
    """What each thread did in a few windows, in milliseconds."""
    spans = [span for record in records for span in record.spans]
    zero = min(start for _, start, *_ in spans)
    last = max(start + length - zero for _, start, length, *_ in spans) * 1e3
    for kind, color in KINDS.items():
        bars = [((s - zero) * 1e3, length * 1e3) for k, s, length, *_ in spans if k == kind]
        if not bars:
            continue
        wait, other = kind == "wait", kind == "optimizer"
        # In sync the update runs inside the step: a narrower bar upon it.
        low, height = (-1.0, 0.7) if other and beside else (0.2, 0.3) if other else (0.0, 0.7)
        axes.broken_barh(
            bars,
            (low, height),
            facecolors=PAPER if wait else color,
            edgecolor=SOFT if wait else "none",
            hatch="//////" if wait else None,
            linewidth=0.5 if wait else 0,
            label=kind,
        )
    for number_of, record in enumerate(records):
        at = (record.time - zero) * 1e3
        if 0 < at <= last:
            axes.axvline(at, color=INK, linewidth=0.8, linestyle=(0, (1, 1.5)))
            if number_of == 0:
                _note(axes, f"end of step {record.index}", (at, 0.98), (3, 0))
    names = ["training thread", "optimizer thread"] if beside else ["training thread"]
    axes.set_yticks([0.35, -0.65][: len(names)], names, color=INK)
    axes.set_ylim(-1.15 if beside else -0.15, 1.05)
    axes.set_xlim(0, max(last, 1e-3))
    axes.set_xlabel("milliseconds")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.figure.legend(loc="outside lower center", ncols=len(KINDS), handlelength=1.4)
