"""The charts of a report as data, from which the page draws them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..console import counted
from ..telemetry import LARGEST
from .reader import Run

Numbers = list[float | None]
MAX_RATES = 4
"""Parameter groups whose learning rates are drawn."""
MAX_DRAWN = 1e24
"""Larger numbers are drawn at this height: uPlot makes no axis for much larger ones."""
WIDE = 10.0
"""The range of losses from which on their axis is logarithmic: a spike flattens a linear one."""


@dataclass(frozen=True, slots=True)
class Line:
    """One number for each bin; None where a bin has no number."""

    label: str
    y: Numbers
    hue: str = "line-0"
    """The name of a colour in ``page.css``."""
    low: Numbers = field(default_factory=list)
    """The least number of each bin; empty where a bin is a single window."""
    high: Numbers = field(default_factory=list)
    style: Literal["", "steps", "dashed"] = ""
    """``"steps"``: a bin's number holds until the next bin."""
    gaps: list[int] = field(default_factory=list)
    """Indices of the bins in which all numbers were inf or NaN: the line stops there."""


@dataclass(frozen=True, slots=True)
class Marks:
    """The indices of the bins in which something happened."""

    label: str
    bins: list[int]
    hue: str = "bad"
    edge: Literal["top", "bottom"] = "top"
    """At the top of the chart marks are triangles, at the bottom ticks."""


@dataclass(frozen=True, slots=True)
class Chart:
    """Lines over the steps."""

    name: str
    title: str
    caption: str
    scale: Literal["linear", "log", "log2"]
    lines: list[Line]
    marks: list[Marks] = field(default_factory=list)


def charts(run: Run) -> list[Chart]:
    """Every chart for which there is data, in the order of the page."""
    skipped = _marks(run, "skipped", counted(run.skips, "skipped step"), edge="bottom")
    spiked = _marks(run, "spike", counted(run.kinds["spike"], "skipped spike"), "warn")
    retried = _marks(run, "retried", f"{counted(run.retried, 'step')} run again", "warn")
    bad_loss, bad_norm = (_marks(run, name, "inf or NaN", of="bad") for name in ("loss", "norm"))
    if norm := _lines(run, "norm", "norm", is_log=True):
        norm += _limit("clipped above", [mean.last for mean in run.bins.means("limit")])
    if largest := _lines(run, "largest", "largest gradient", is_log=True):
        largest += _limit("end of float16", [LARGEST] * len(run.bins.ends))
    hides = run.hidden > 0
    if times := _lines(run, "seconds", "whole step (ms)", "ink", unit=1e3):
        times += _lines(run, "update", "optimizer's update (ms)", "optimizer", unit=1e3)
        times += _lines(run, "waited", "waiting for it (ms)", "wait", unit=1e3) if hides else []
    loss = run.bins.of_all("loss")
    is_wide = loss.low > 0 and loss.high > WIDE * loss.low
    found = [
        Chart(
            "loss",
            "Loss",
            "The training loss of each step, as it was given to backward (the mean of its "
            "micro-batches, on this rank). Where a step was skipped its batch trained nothing.",
            "log" if is_wide else "linear",
            _lines(run, "loss", "loss"),
            skipped + bad_loss + spiked,
        ),
        Chart(
            "scale",
            "Loss scale",
            "The factor on the loss. It halves when a step overflows, and that step is skipped "
            "or run again; after growth_interval steps without overflow it doubles.",
            "log2",
            _lines(run, "scale", "scale", is_log=True) if run.is_scaled else [],
            skipped + retried,
        ),
        Chart(
            "norm",
            "Gradient norm, unscaled, before clipping",
            "The norm of the whole gradient, as the optimizer would get it without clipping.",
            "log",
            norm,
            bad_norm + spiked,
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
            "The time from the end of one step to the end of the next, and of the optimizer's "
            "update"
            + ", and of the training thread's wait for it. The rest was hidden" * hides
            + ".",
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
            largest,
        ),
    ]
    return [chart for chart in found if chart.lines]


def _drawable(value: float | None, is_log: bool = False) -> float | None:
    """``value`` with six digits, and no larger than an axis can show; None for a value without a
    height: inf, NaN, and on a logarithmic axis 0 and less."""
    if value is None or not math.isfinite(value) or (is_log and value <= 0):
        return None
    value = min(max(value, 1 / MAX_DRAWN if is_log else -MAX_DRAWN), MAX_DRAWN)
    return value if value == int(value) and abs(value) < 2.0**53 else float(f"{value:.6g}")


def _lines(
    run: Run, name: str, label: str, hue: str = "line-0", is_log: bool = False, unit: float = 1.0
) -> list[Line]:
    """A line of the bins' means, of a scale's last numbers, times ``unit``; no line where there are
    no numbers."""
    means, is_scale = run.bins.means(name), name == "scale"

    def drawn(values: Numbers) -> Numbers:
        return [None if v is None else _drawable(v * unit, is_log) for v in values]

    y, low, high = drawn([m.last if is_scale else m.middle for m in means]), [], []
    if all(value is None for value in y):
        return []
    if run.bins.width > 1:
        low = drawn([m.low if m.count else None for m in means])
        high = drawn([m.high if m.count else None for m in means])
    gaps = [index for index, mean in enumerate(means) if mean.bad and not mean.count]
    return [Line(label, y, hue, low, high, "steps" if is_scale else "", gaps)]


def _limit(label: str, values: Sequence[float | None]) -> list[Line]:
    y = [_drawable(value, is_log=True) for value in values]
    return [] if all(value is None for value in y) else [Line(label, y, "ink", style="dashed")]


def _marks(
    run: Run,
    name: str,
    label: str,
    hue: str = "bad",
    edge: Literal["top", "bottom"] = "top",
    of: Literal["count", "bad"] = "count",
) -> list[Marks]:
    """Mark the bins in which a series has numbers, or bad ones; nothing where there are none."""
    bins = [index for index, mean in enumerate(run.bins.means(name)) if getattr(mean, of)]
    return [Marks(label, bins, hue, edge)] if bins else []


def _rates(run: Run) -> list[Line]:
    """The learning rate of each group; groups with equal rates share a line."""
    seen: dict[tuple[float | None, ...], list[str]] = {}
    for group in range(MAX_RATES):
        each = (dict(enumerate(run.bins.lr[last])) for _, last in run.bins.ends)
        rates = tuple(_drawable(found.get(group)) for found in each)
        if any(rate is not None for rate in rates):
            seen.setdefault(rates, []).append(str(group))
    return [
        Line(f"group {', '.join(groups)}" if len(seen) > 1 else "learning rate", [*y], f"line-{n}")
        for n, (y, groups) in enumerate(seen.items())
    ]
