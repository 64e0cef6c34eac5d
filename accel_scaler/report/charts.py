"""The charts of a report as data: the page is drawn from these alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from ..console import counted, number
from ..telemetry import LARGEST
from .run import Run
from .samples import Mean

Scale = Literal["linear", "log", "log2"]
Numbers = list[float | None]
MAX_SESSIONS = 30
"""Sessions whose beginnings are drawn."""
MAX_MARKS = 60
"""More crosses would cover their line; then they are ticks at its lower edge."""
MAX_RATES = 4
"""Parameter groups whose learning rates are drawn."""
MAX_DRAWN = 1e60
"""Larger numbers leave an axis no room for its margins."""


@dataclass(frozen=True, slots=True)
class Axis:
    """The x axis of all charts: windows, counted over all sessions."""

    label: str
    last: int
    """The last window."""
    sessions: list[tuple[int, int]]
    """Numbers of later sessions, and where they began; not all, of many."""


@dataclass(frozen=True, slots=True)
class Line:
    """One number for each bin; None where a bin has none."""

    label: str
    y: Numbers
    hue: str
    """A name of ``html.HUES``."""
    low: Numbers = field(default_factory=list)
    """The least of each bin where bins hold several windows, else empty."""
    high: Numbers = field(default_factory=list)
    holds: bool = False
    """A bin's number holds until the next bin: drawn in steps."""
    per_bin: str = ""
    """What a bin's number is where bins hold several windows."""


@dataclass(frozen=True, slots=True)
class Marks:
    """Bins in which something happened."""

    label: str
    hue: str
    shape: Literal["cross", "triangle", "tick"]
    bins: list[int]
    """Indices."""
    y: Numbers
    """None: at the upper edge; those of ticks at the lower."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A horizontal line with a label."""

    label: str
    y: float


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over the steps."""

    name: str
    title: str
    caption: str
    unit: str
    scale: Scale
    lines: list[Line]
    marks: list[Marks] = field(default_factory=list)
    limits: list[Limit] = field(default_factory=list)


def axis_of(run: Run) -> Axis:
    """The one axis of all charts; ``run`` has windows."""
    later = [(number_of, each.first_x) for number_of, each in enumerate(run.sessions[1:], 2)]
    label = "step, counted on over all sessions" if later else "step"
    return Axis(label, run.last_x, later[:: -(-len(later) // MAX_SESSIONS) or 1])


def charts(run: Run) -> list[Chart]:
    """Every chart there is data for, in the order of the page."""
    found = [build(run) for build in (_loss, _scale, _norm, _rate, _time, _largest)]
    return [chart for chart in found if chart is not None]


def _drawable(value: float | None, is_log: bool = False) -> float | None:
    """``value`` within what an axis can show, six digits of it; None: it has no height."""
    if value is None or not math.isfinite(value) or (is_log and value <= 0):
        return None
    value = min(max(value, 1 / MAX_DRAWN if is_log else -MAX_DRAWN), MAX_DRAWN)
    return value if value == int(value) and abs(value) < 2.0**53 else float(f"{value:.6g}")


def _line(
    run: Run, name: str, label: str, hue: str = "line-0", is_log: bool = False, unit: float = 1.0
) -> Line | None:
    """The mean of each bin; of a scale the last. None: there are no numbers.

    Args:
        name: in ``SERIES``.
        unit: factor on the numbers.
    """
    means, holds, width = run.bins.means(name), name == "scale", run.bins.width

    def drawn(values: list[float | None]) -> Numbers:
        return [None if v is None else _drawable(v * unit, is_log) for v in values]

    y = drawn([m.last if holds else m.middle for m in means])
    if all(value is None for value in y):
        return None
    low, high, per_bin = list[float | None](), list[float | None](), ""
    if width > 1:
        low = drawn([m.low if m.count else None for m in means])
        high = drawn([m.high if m.count else None for m in means])
        what = "last" if holds else "mean"
        per_bin = f"{what} of {width} windows, band from the least to the most"
    return Line(label, y, hue, low, high, holds, per_bin)


def _skips(run: Run, height: Numbers) -> list[Marks]:
    """Every bin with a skipped window."""
    at = [i for i, b in enumerate(run.bins.done) if b.skips]
    if not at:
        return []
    label = counted(run.skips, "skipped window")
    if len(at) > MAX_MARKS:
        return [Marks(label, "bad", "tick", at, [None] * len(at))]
    return [Marks(label, "bad", "cross", at, [height[i] for i in at])]


def _bad(means: list[Mean]) -> list[Marks]:
    """Numbers that were inf or NaN have no height."""
    at = [i for i, mean in enumerate(means) if mean.bad]
    return [Marks("inf or NaN", "bad", "triangle", at, [None] * len(at))] if at else []


def _loss(run: Run) -> Chart | None:
    line = _line(run, "loss", "loss")
    if line is None:
        return None
    return Chart(
        "loss",
        "Loss",
        "The training loss of each step, as it was given to backward (the mean of its "
        "micro-batches, on this rank). Where a step was skipped its batch trained nothing.",
        "loss",
        "linear",
        [line],
        _skips(run, line.y) + _bad(run.bins.means("loss")),
    )


def _scale(run: Run) -> Chart | None:
    line = _line(run, "scale", "scale", is_log=True)
    if line is None or not run.is_scaled:
        return None
    return Chart(
        "scale",
        "Loss scale",
        "The factor on the loss. It halves when a window overflows, and that step is skipped; "
        "after growth_interval windows without overflow it doubles.",
        "scale (factor on the loss)",
        "log2",
        [line],
        _skips(run, line.high or line.y),
    )


def _norm(run: Run) -> Chart | None:
    line = _line(run, "norm", "norm", is_log=True)
    if line is None:
        return None
    limits = [y for b in run.bins.done if (y := _drawable(b.max_norm, is_log=True)) is not None]
    return Chart(
        "norm",
        "Gradient norm, unscaled, before clipping",
        "The length of the whole gradient at each step, as the optimizer would have it without "
        "clipping.",
        "L2 norm",
        "log",
        [line],
        _bad(run.bins.means("norm")),
        [Limit(f"clipped above {number(limit)}", limit) for limit in limits[-1:]],
    )


def _rate(run: Run) -> Chart | None:
    """Groups with equal rates share a line."""
    seen: dict[tuple[float | None, ...], list[int]] = {}
    for group in range(MAX_RATES):
        rates = tuple(_drawable(dict(enumerate(b.lr)).get(group)) for b in run.bins.done)
        if any(rate is not None for rate in rates):
            seen.setdefault(rates, []).append(group)
    if not seen:
        return None
    several = len(seen) > 1
    lines = [
        Line(
            f"group {', '.join(map(str, groups))}" if several else "learning rate",
            [*rates],
            f"line-{n}",
        )
        for n, (rates, groups) in enumerate(seen.items())
    ]
    caption = "As the optimizer took it. A schedule does not move at a skipped step."
    return Chart("lr", "Learning rate", caption, "learning rate", "linear", lines)


def _time(run: Run) -> Chart | None:
    whole = _line(run, "seconds", "whole step", "ink", unit=1e3)
    if whole is None:
        return None
    update = _line(run, "update", "optimizer's update", "optimizer", unit=1e3)
    waited = _line(run, "waited", "waiting for it", "wait", unit=1e3)
    return Chart(
        "time",
        "Step time",
        "From the end of the step before to the end of this one, by the clock of the host; how "
        "long the optimizer's update took, and how long the training thread waited for it. In "
        "overlap and delayed the rest of the update ran beside it.",
        "milliseconds",
        "linear",
        [line for line in (whole, update, waited) if line is not None],
    )


def _largest(run: Run) -> Chart | None:
    line = _line(run, "largest", "largest gradient", is_log=True)
    if line is None:
        return None
    return Chart(
        "largest",
        "Headroom: the largest scaled gradient",
        "The largest element of the parameters' gradients, as the backward left them: multiplied "
        "by the scale. Each halving below float16's largest number is a doubling that the scale "
        "has left, as far as parameters show it; what float32 adds up may lie above.",
        "magnitude",
        "log",
        [line],
        limits=[Limit(f"end of float16, {number(LARGEST)}", LARGEST)],
    )
