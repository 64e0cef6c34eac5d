"""The charts of a report as data: the page is drawn from these alone."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from ..console import counted, number
from ..telemetry import LARGEST
from .run import Run

Numbers = list[float | None]
MAX_MARKS = 60
"""More crosses would cover their line; then they are ticks at its lower edge."""
MAX_RATES = 4
"""Parameter groups whose learning rates are drawn."""
MAX_DRAWN = 1e60
"""Larger numbers leave an axis no room for its margins."""


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
    shape: Literal["cross", "triangle", "tick"]
    bins: list[int]
    """Indices."""
    y: Numbers
    """None: at the upper edge; those of ticks at the lower."""
    hue: str = "bad"


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
    scale: Literal["linear", "log", "log2"]
    lines: list[Line]
    marks: list[Marks] = field(default_factory=list)
    limits: list[Limit] = field(default_factory=list)


def charts(run: Run) -> list[Chart]:
    """Every chart there is data for, in the order of the page."""
    loss, norm = _lines(run, "loss", "loss"), _lines(run, "norm", "norm", is_log=True)
    scale = _lines(run, "scale", "scale", is_log=True) if run.is_scaled else []
    limits = [y for b in run.bins.done if (y := _drawable(b.max_norm, is_log=True)) is not None]
    if times := _lines(run, "seconds", "whole step (ms)", "ink", unit=1e3):
        times += _lines(run, "update", "optimizer's update (ms)", "optimizer", unit=1e3)
        times += _lines(run, "waited", "waiting for it (ms)", "wait", unit=1e3)
    found = [
        Chart(
            "loss",
            "Loss",
            "The training loss of each step, as it was given to backward (the mean of its "
            "micro-batches, on this rank). Where a step was skipped its batch trained nothing.",
            "linear",
            loss,
            _skips(run, loss) + _bad(run, "loss"),
        ),
        Chart(
            "scale",
            "Loss scale",
            "The factor on the loss. It halves when a window overflows, and that step is skipped "
            "or run again; after growth_interval windows without overflow it doubles.",
            "log2",
            scale,
            _skips(run, scale) + _retried(run),
        ),
        Chart(
            "norm",
            "Gradient norm, unscaled, before clipping",
            "The norm of the whole gradient, as the optimizer would get it without clipping.",
            "log",
            norm,
            _bad(run, "norm"),
            [Limit(f"clipped above {number(limit)}", limit) for limit in limits[-1:]],
        ),
        Chart(
            "lr",
            "Learning rate",
            "The rate that the optimizer used. A schedule does not move at a skipped step.",
            "linear",
            _rates(run),
        ),
        Chart(
            "time",
            "Step time (ms)",
            "The time from the end of one step to the end of the next, of the optimizer's update, "
            "and of the training thread's wait for it. What was not waited for was hidden.",
            "linear",
            times,
        ),
        Chart(
            "largest",
            "Headroom: the largest scaled gradient",
            "The largest element of the parameters' gradients, multiplied by the scale. How often "
            "it can double before it reaches float16's largest number is the headroom. Gradients "
            "that are added up in float32 may lie above that number.",
            "log",
            _lines(run, "largest", "largest gradient", is_log=True),
            limits=[Limit(f"end of float16, {number(LARGEST)}", LARGEST)],
        ),
    ]
    return [chart for chart in found if chart.lines]


def _drawable(value: float | None, is_log: bool = False) -> float | None:
    """``value`` within what an axis can show, six digits of it; None: it has no height."""
    if value is None or not math.isfinite(value) or (is_log and value <= 0):
        return None
    value = min(max(value, 1 / MAX_DRAWN if is_log else -MAX_DRAWN), MAX_DRAWN)
    return value if value == int(value) and abs(value) < 2.0**53 else float(f"{value:.6g}")


def _lines(
    run: Run, name: str, label: str, hue: str = "line-0", is_log: bool = False, unit: float = 1.0
) -> list[Line]:
    """The mean of each bin, of a scale the last, times ``unit``; none where there are no numbers.
    ``name`` is one of ``SERIES``."""
    means, holds, width = run.bins.means(name), name == "scale", run.bins.width

    def drawn(values: list[float | None]) -> Numbers:
        return [None if v is None else _drawable(v * unit, is_log) for v in values]

    y = drawn([m.last if holds else m.middle for m in means])
    if all(value is None for value in y):
        return []
    if width == 1:
        return [Line(label, y, hue, holds=holds)]
    low = drawn([m.low if m.count else None for m in means])
    high = drawn([m.high if m.count else None for m in means])
    what = "last" if holds else "mean"
    per_bin = f"{what} of {width} windows, band from the least to the most"
    return [Line(label, y, hue, low, high, holds, per_bin)]


def _skips(run: Run, lines: list[Line]) -> list[Marks]:
    """Every bin with a skipped window, on the first of ``lines``."""
    at = [i for i, b in enumerate(run.bins.done) if b.skips]
    if not at or not lines:
        return []
    label, height = counted(run.skips, "skipped window"), lines[0].y
    if len(at) > MAX_MARKS:
        return [Marks(label, "tick", at, [None] * len(at))]
    if lines[0].holds:
        height = lines[0].high or height
    return [Marks(label, "cross", at, [height[i] for i in at])]


def _retried(run: Run) -> list[Marks]:
    """At the upper edge: windows that overflowed, and were run again at a lower scale."""
    at = [i for i, mean in enumerate(run.bins.means("retried")) if mean.count]
    label = f"{counted(run.retried, 'window')} run again"
    return [Marks(label, "triangle", at, [None] * len(at), "warn")] if at else []


def _bad(run: Run, name: str) -> list[Marks]:
    """At the upper edge: numbers that were inf or NaN, and windows skipped as spikes."""
    bad = [i for i, mean in enumerate(run.bins.means(name)) if mean.bad]
    spikes = [i for i, norms in enumerate(run.bins.means("spike")) if norms.count]
    label = counted(run.kinds["spike"], "skipped spike")
    both = (("inf or NaN", bad, "bad"), (label, spikes, "warn"))
    return [Marks(what, "triangle", at, [None] * len(at), hue) for what, at, hue in both if at]


def _rates(run: Run) -> list[Line]:
    """Groups with equal rates share a line."""
    seen: dict[tuple[float | None, ...], list[str]] = {}
    for group in range(MAX_RATES):
        rates = tuple(_drawable(dict(enumerate(b.lr)).get(group)) for b in run.bins.done)
        if any(rate is not None for rate in rates):
            seen.setdefault(rates, []).append(str(group))
    return [
        Line(f"group {', '.join(groups)}" if len(seen) > 1 else "learning rate", [*y], f"line-{n}")
        for n, (y, groups) in enumerate(seen.items())
    ]
