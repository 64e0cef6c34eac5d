"""The charts of a report as data, from which the page draws them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

from ..console import counted
from .reader import Run

Numbers = list[float | None]
Style = Literal["", "steps", "dashed"]
Edge = Literal["top", "bottom"]
MAX_DRAWN = 1e24
"""Larger numbers are drawn at this height: uPlot makes no axis for much larger ones."""
WIDE = 10.0
"""The range of losses from which on their axis is logarithmic: a spike flattens a linear one."""


@dataclass(frozen=True, slots=True)
class Line:
    """One number for each step; None where it has none."""

    label: str
    y: Numbers
    hue: str = "line-0"
    """The name of a colour in ``page.css``."""
    style: Style = ""
    """``"steps"``: a number holds until the next one."""
    gaps: list[int] = field(default_factory=list)
    """Places of numbers that were inf or NaN: the line stops there."""


@dataclass(frozen=True, slots=True)
class Marks:
    """The places of steps in which something happened."""

    label: str
    places: list[int]
    hue: str = "bad"
    edge: Edge = "top"
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

    def line(
        name: str, label: str, hue: str = "line-0", is_log: bool = False, style: Style = ""
    ) -> list[Line]:
        """A line of these numbers; none where there are none to draw."""
        values = run.series[name]
        y = [_drawable(value, is_log) for value in values]
        return [Line(label, y, hue, style, _bad(values))] if any(v is not None for v in y) else []

    def marks(name: str, label: str, hue: str = "bad", edge: Edge = "top") -> list[Marks]:
        found = [place for place, value in enumerate(run.series[name]) if value is not None]
        return [Marks(label, found, hue, edge)] if found else []

    def bad(name: str) -> list[Marks]:
        found = _bad(run.series[name])
        return [Marks("inf or NaN", found)] if found else []

    skipped = marks("skipped", counted(run.skips, "skipped step"), edge="bottom")
    spiked = marks("spike", counted(run.kinds["spike"], "skipped spike"), "warn")
    retried = marks("retried", f"{counted(run.retried, 'step')} run again", "warn")
    if norm := line("norm", "norm", is_log=True):
        norm += line("limit", "clipped above", "ink", is_log=True, style="dashed")
    hides = run.hidden > 0
    if times := line("ms", "whole step (ms)", "ink"):
        times += line("update", "optimizer's update (ms)", "optimizer")
        times += line("waited", "waiting for it (ms)", "wait") if hides else []
    losses = run.finite("loss")
    is_wide = min(losses, default=0.0) > 0 and max(losses) > WIDE * min(losses)
    found = [
        Chart(
            "loss",
            "Loss",
            "The training loss of each step, as it was given to backward (the mean of its "
            "micro-batches, on this rank). Where a step was skipped its batch trained nothing.",
            "log" if is_wide else "linear",
            line("loss", "loss"),
            skipped + bad("loss") + spiked,
        ),
        Chart(
            "scale",
            "Loss scale",
            "The factor on the loss. It halves when a step overflows, and that step is skipped "
            "or run again; after growth_interval steps without overflow it doubles.",
            "log2",
            line("scale", "scale", is_log=True, style="steps") if run.is_scaled else [],
            skipped + retried,
        ),
        Chart(
            "norm",
            "Gradient norm, unscaled, before clipping",
            "The norm of the whole gradient, as the optimizer would get it without clipping.",
            "log",
            norm,
            bad("norm") + spiked,
        ),
        Chart(
            "lr",
            "Learning rate",
            "The rate that the optimizer used for its first group of parameters. A schedule does "
            "not move at a skipped step.",
            "linear",
            line("lr", "learning rate"),
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
    ]
    return [chart for chart in found if chart.lines]


def _drawable(value: float | None, is_log: bool = False) -> float | None:
    """``value`` with six digits, and no larger than an axis can show; None for a value without a
    height: inf, NaN, and on a logarithmic axis 0 and less."""
    if value is None or not math.isfinite(value) or (is_log and value <= 0):
        return None
    value = min(max(value, 1 / MAX_DRAWN if is_log else -MAX_DRAWN), MAX_DRAWN)
    return value if value == int(value) and abs(value) < 2.0**53 else float(f"{value:.6g}")


def _bad(values: Iterable[float | None]) -> list[int]:
    """The places of inf and NaN."""
    return [at for at, value in enumerate(values) if value is not None and not math.isfinite(value)]
