"""The pictures of a report, drawn with matplotlib's objects; nothing global is touched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from .formatting import counted, number, shorten
from .run_summary import Offender, Run
from .theme import Theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["norm_figure", "offender_figure", "scale_figure", "timeline_figure", "worst_first"]

WIDTH = 8.6
DASHES = ("-", (0, (5, 2)), (0, (2, 1.5)), (0, (6, 2, 1.5, 2)))
BARS = 15
KINDS = {
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "clip": "#e69f00",
    "step": "#009e73",
    "optimizer": "#cc79a7",
    "wait": "",
}


def new_figure(title: str, height: float, theme: Theme, of: str = "") -> tuple[Figure, Axes]:
    """A figure of ``height`` inches, one axes, its title at the left; ``of``: the run's name."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    axes = figure.add_subplot()
    title += f" ({shorten(of, 30)})" if of else ""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", color=theme.ink, pad=10)
    axes.tick_params(length=3, labelsize=8.5)
    return figure, axes


def _steps_axis(axes: Axes, runs: Sequence[Run], theme: Theme) -> None:
    """Steps along the x axis, and where each later session began."""
    from matplotlib.ticker import FuncFormatter, MaxNLocator

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
        axes.axvline(x, color=theme.soft, linewidth=0.8, linestyle=(0, (1, 2)))
        if index % max(1, len(starts) // 6) == 0:
            axes.annotate(
                f"session {count}",
                (x, 1.0),
                xycoords=("data", "axes fraction"),
                xytext=(3, -2),
                textcoords="offset points",
                fontsize=7.5,
                color=theme.soft,
                va="top",
            )


def _legend(axes: Axes, runs: int = 1) -> None:
    """Above the axes beside the title; of several runs below, where there is room for names."""
    if not axes.get_legend_handles_labels()[0]:
        return
    if runs > 1:
        axes.figure.legend(loc="outside lower center", ncols=3)
        return
    axes.legend(
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        borderaxespad=0.2,
        ncols=3,
        handlelength=1.8,
        columnspacing=1.4,
    )


def _scale_line(run: Run, smallest: float) -> tuple[list[float], list[float]]:
    """The scale of every stretch of steps; from the bins where there were too many changes."""
    end = run.bins.done[-1].last_x
    if run.changes_lost:
        points = [(float(b.x), b.scale) for b in run.bins.done]
    else:
        points = [(float(x), scale) for x, scale in run.changes if x <= end]
    points.append((float(end), points[-1][1]))
    return [x for x, _ in points], [_drawn(scale, smallest) for _, scale in points]


def _drawn(scale: float, smallest: float) -> float:
    """A scale as it is drawn: within float32, whatever the file claims."""
    return min(max(scale, smallest), 2.0**128)


def _smallest(runs: Sequence[Run]) -> float:
    """What stands for a scale of 0 on a logarithmic axis: half the smallest that is above."""
    scales = [b.scale_low for run in runs for b in run.bins.done if b.scale_low > 0]
    return max(min(scales, default=1.0) / 2, 2.0**-150)


def scale_figure(runs: Sequence[Run], theme: Theme) -> Figure:
    """The loss scale over the steps (log2), every skipped window marked."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    figure, axes = new_figure("Loss scale", 3.3, theme)
    smallest = _smallest(runs)
    axes.set_yscale("log", base=2)
    for index, run in enumerate(runs):
        color, name = theme.runs[index], f"{shorten(run.label, 24)}: " if len(runs) > 1 else ""
        xs, ys = _scale_line(run, smallest)
        label = name + "scale" if not run.changes_lost else name + "scale, thinned out"
        axes.step(xs, ys, where="post", color=color, linestyle=DASHES[index], label=label)
        if run.changes_lost:
            axes.fill_between(
                [b.x for b in run.bins.done],
                [_drawn(b.scale_low, smallest) for b in run.bins.done],
                [_drawn(b.scale_high, smallest) for b in run.bins.done],
                color=color,
                alpha=0.2,
                linewidth=0,
                step="post",
            )
        skipped = [b for b in run.bins.done if b.skips]
        if skipped:
            axes.plot(
                [(b.x + b.last_x) / 2 for b in skipped],
                [_drawn(b.scale_high, smallest) for b in skipped],
                linestyle="none",
                marker="x",
                markersize=5.5,
                markeredgewidth=1.4,
                color=theme.bad if len(runs) == 1 else color,
                label=f"{name}{counted(run.skips, 'skipped window')}",
            )
    axes.yaxis.set_major_locator(LogLocator(base=2, numticks=7))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, high / 4), high * 1.2)
    axes.set_ylabel("scale (factor on the loss)")
    axes.grid(axis="y", linewidth=0.7)
    _steps_axis(axes, runs, theme)
    _legend(axes, len(runs))
    return figure


def _readable(norm: float) -> float:
    """A norm as it is drawn: beyond these a logarithmic axis has no room for its margins."""
    return min(max(norm, 1e-60), 1e60)


def norm_figure(runs: Sequence[Run], theme: Theme) -> Figure | None:
    """The gradient norm over the steps (log) and the clipping threshold; None: no finite norm."""
    runs_with = [run for run in runs if any(b.norms for b in run.bins.done)]
    if not runs_with:
        return None
    figure, axes = new_figure("Gradient norm, unscaled, before clipping", 3.3, theme)
    axes.set_yscale("log")
    for index, run in enumerate(runs):
        bins = [b for b in run.bins.done if b.norms]
        if not bins:
            continue
        color = theme.runs[index]
        label = shorten(run.label, 24) if len(runs) > 1 else "norm"
        if run.bins.width > 1:
            label += f", mean of {run.bins.width} windows (band: least to most)"
            axes.fill_between(
                [b.x for b in bins],
                [_readable(b.norm_low) for b in bins],
                [_readable(b.norm_high) for b in bins],
                color=color,
                alpha=0.22,
                linewidth=0,
            )
        width = 1.5 if run.bins.width > 1 or len(bins) < 300 else 1.0
        values = [_readable(b.norm or 0.0) for b in bins]
        axes.plot(
            [b.x for b in bins],
            values,
            color=color,
            linewidth=width,
            linestyle=DASHES[index],
            marker="." if len(bins) < 3 else None,
            label=label,
        )
    _threshold_lines(axes, runs, theme)
    _mark_bad_norms(axes, runs, theme)
    axes.set_ylabel("L2 norm")
    axes.grid(axis="y", linewidth=0.7)
    _steps_axis(axes, runs, theme)
    _plain_log_ticks(axes)
    _legend(axes, len(runs))
    return figure


def _threshold_lines(axes: Axes, runs: Sequence[Run], theme: Theme) -> None:
    """The clipping threshold over the steps; runs that clip alike share the longest one's line."""
    drawn: set[float] = set()
    for run in sorted(runs, key=lambda run: -len(run.bins.done) * run.bins.width):
        limits: list[float] = []
        for b in run.bins.done:
            if b.max_norm is None and b.skips == b.windows and limits:
                limits.append(limits[-1])  # nothing was clipped, but the threshold stood
            else:  # NaN, so no line, where there is no threshold
                there = b.max_norm and b.max_norm < math.inf
                limits.append(_readable(b.max_norm or 0.0) if there else math.nan)
        last = [limit for limit in limits if limit == limit][-1:]
        if last and last[0] not in drawn:
            drawn.add(last[0])
            xs = [float(b.x) for b in run.bins.done]
            (line,) = axes.step(xs, limits, where="post", color=theme.ink, linewidth=1.2)
            line.set(linestyle=(0, (4, 3)), label=f"clipped above {number(last[0])}")


def _mark_bad_norms(axes: Axes, runs: Sequence[Run], theme: Theme) -> None:
    """Norms that were inf or NaN have no height: a mark at the upper edge."""
    for index, run in enumerate(runs):
        bad = [b for b in run.bins.done if b.norms_bad]
        if bad:
            axes.plot(
                [(b.x + b.last_x) / 2 for b in bad],
                [0.985 - 0.03 * index] * len(bad),
                transform=axes.get_xaxis_transform(),
                linestyle="none",
                marker="v",
                markersize=4.5,
                markeredgewidth=0,
                color=theme.bad if len(runs) == 1 else theme.runs[index],
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


def worst_first(run: Run) -> list[Offender]:
    """The offenders, by the windows that began to overflow in them."""
    return sorted(run.offenders.values(), key=lambda o: (-o.began, -o.windows, -o.place, o.name))


def offender_figure(run: Run, theme: Theme, of: str = "") -> Figure | None:
    """Parameters that overflowed, in how many windows, and in how many it began there."""
    worst = worst_first(run)[:BARS]
    if not worst:
        return None
    more = len(run.offenders) - len(worst)
    title = "Parameters that overflowed" + (f", the first {BARS} of {more + BARS}" if more else "")
    figure, axes = new_figure(title, 1.1 + 0.24 * len(worst), theme, of)
    rows = range(len(worst))
    axes.barh(rows, [o.windows for o in worst], color=theme.line, height=0.68, label="overflowed")
    axes.barh(rows, [o.began for o in worst], color=theme.bad, height=0.68, label="began there")
    for row, offender in enumerate(worst):
        axes.annotate(
            f"{offender.windows}" + (f", began in {offender.began}" if offender.began else ""),
            (offender.windows, row),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            color=theme.ink,
        )
    axes.set_yticks(list(rows), [shorten(o.name, 46) for o in worst], color=theme.ink)
    axes.set_ylim(len(worst) - 0.4, -0.6)
    axes.set_xlim(0, 1.22 * max(o.windows for o in worst))
    axes.set_xlabel("windows")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    axes.xaxis.get_major_locator().set_params(integer=True)  # type: ignore[call-arg]
    _legend(axes)
    return figure


def timeline_figure(run: Run, theme: Theme, of: str = "") -> Figure | None:
    """What each thread did in a few windows; None where the file has no spans."""
    stretch = run.timing.stretch
    if stretch is None or not stretch.spans:
        return None
    session = run.sessions[run.session_of(stretch.first_x)]
    beside = session.settings.get("step_mode") in ("overlap", "delayed")
    steps = f"{run.place(stretch.first_x)} to {run.place(stretch.last_x)}"
    figure, axes = new_figure(f"Timeline, {steps}", 2.5 if beside else 1.9, theme, of)
    zero = min(start for _, start, _, _ in stretch.spans)
    for kind, color in KINDS.items():
        bars = [((s - zero) / 1e3, length / 1e3) for k, s, length, _ in stretch.spans if k == kind]
        if not bars:
            continue
        wait, other = kind == "wait", kind == "optimizer"
        # In sync the update runs inside the step: a narrower bar upon it.
        low, height = (-1.0, 0.7) if other and beside else (0.2, 0.3) if other else (0.0, 0.7)
        axes.broken_barh(
            bars,
            (low, height),
            facecolors=theme.paper if wait else color,
            edgecolor=theme.soft if wait else "none",
            hatch="//////" if wait else None,
            linewidth=0.5 if wait else 0,
            label=kind,
        )
    last = max(start + length for _, start, length, _ in stretch.spans)
    for offset, end in enumerate(stretch.ends):
        at = end * 1e3 - zero / 1e3
        if 0 < at <= (last - zero) / 1e3:
            axes.axvline(at, color=theme.ink, linewidth=0.8, linestyle=(0, (1, 1.5)))
            if offset == 0:
                axes.annotate(
                    f"end of {run.place(stretch.first_x)}",
                    (at, 0.98),
                    xycoords=("data", "axes fraction"),
                    xytext=(3, 0),
                    textcoords="offset points",
                    fontsize=7.5,
                    color=theme.soft,
                    va="top",
                )
    names = ["training thread", "optimizer thread"] if beside else ["training thread"]
    axes.set_yticks([0.35, -0.65][: len(names)], names, color=theme.ink)
    axes.set_ylim(-1.15 if beside else -0.15, 1.05)
    axes.set_xlim(0, max((last - zero) / 1e3, 1e-3))
    axes.set_xlabel("milliseconds")
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)
    figure.legend(loc="outside lower center", ncols=len(KINDS), handlelength=1.4)
    return figure
