"""The charts of a report as data: the page is drawn from these alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Literal

from ..console import counted, number
from ..telemetry import LARGEST
from .run_summary import Run
from .samples import Bin, Mean, Spread

Scale = Literal["linear", "log", "log2"]
MOST_SESSIONS = 30
"""Whose beginnings are drawn."""
SMOOTHED_FROM = 40
"""Bins; a shorter line is read as it is."""
MOST_SMOOTHING = 10.0
"""Bins to each side, after which a weight has fallen to 1/e; fewer where there are few bins."""
LEAST_WEIGHT = 0.01
"""Further away than that an average does not look."""
MANY_MARKS = 60
"""More would cover the line that they stand on."""
MOST_RATES = 4
"""Parameter groups whose learning rates are drawn."""


@dataclass(frozen=True, slots=True)
class Axis:
    """What all charts of a report have along the bottom: windows, counted over all sessions."""

    label: str
    last: int
    """The last window."""
    sessions: tuple[tuple[int, int], ...] = ()
    """Numbers of later sessions, and where they began; not all, of many."""


@dataclass(frozen=True, slots=True)
class Line:
    """One number over the bins; None: a bin without."""

    label: str
    y: list[float | None]
    hue: str
    """A name of ``theme.HUES``."""
    low: list[float | None] = field(default_factory=list)
    """The least of each bin where bins hold several windows, else empty."""
    high: list[float | None] = field(default_factory=list)
    holds: bool = False
    """A bin's number holds until the next bin: drawn in steps."""
    per_bin: str = ""
    """What a bin's number is where bins hold several windows."""
    faint: bool = False
    """Another line smooths this one."""


@dataclass(frozen=True, slots=True)
class Marks:
    """Bins in which something happened."""

    label: str
    hue: str
    shape: Literal["cross", "triangle", "tick"]
    bins: list[int]
    """Indices."""
    y: list[float | None]
    """None: at the upper edge; those of ticks at the lower."""


@dataclass(frozen=True, slots=True)
class Limit:
    """A height that means something."""

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

    def in_words(self, axis: Axis) -> str:
        """For who cannot see it: from where to where each line goes, and what is marked."""
        told = []
        for line in self.lines:
            shown = [y for y in line.y if y is not None]
            if not line.faint and shown:
                ends = f"from {number(shown[0])} to {number(shown[-1])}"
                told.append(f"{line.label} {ends}, between {_span(shown)}")
        told += [f"{marks.label}, marked" for marks in self.marks]
        told += [f"{limit.label}: a line at {number(limit.y)}" for limit in self.limits]
        return f"{self.title}, steps 0 to {axis.last}: {'; '.join(told) or 'nothing to draw'}."


def _span(shown: list[float]) -> str:
    return f"{number(min(shown))} and {number(max(shown))}"


def axis_of(run: Run) -> Axis:
    """The one axis of all charts; ``run`` has windows."""
    later = list(enumerate(run.sessions[1:], 2))
    shown = later[:: -(-len(later) // MOST_SESSIONS) or 1]
    return Axis(
        "step, counted on over all sessions" if later else "step",
        run.last_x,
        tuple((number_of, session.first_x) for number_of, session in shown),
    )


def charts(run: Run) -> list[Chart]:
    """Every chart there is data for, in the order of the page."""
    if not run.windows:
        return []
    found = [build(run) for build in (_loss, _scale, _norm, _rate, _time, _largest)]
    return [chart for chart in found if chart is not None]


def _per_bin(run: Run, what: str) -> str:
    width = run.bins.width
    return f"{what} of {width} windows, band from the least to the most" if width > 1 else ""


def _mean_line(run: Run, of: Callable[[Bin], Mean], what: str, hue: str) -> Line | None:
    """Numbers of any sign: their mean, and the least and most. None: there are none."""
    means, thinned = [of(b) for b in run.bins.done], run.bins.width > 1
    if all(mean.middle is None for mean in means):
        return None

    def drawn(value: Callable[[Mean], float | None]) -> list[float | None]:
        return [None if mean.middle is None else _drawable(value(mean)) for mean in means]

    return Line(
        what,
        drawn(lambda mean: mean.middle),
        hue,
        drawn(lambda mean: mean.low) if thinned else [],
        drawn(lambda mean: mean.high) if thinned else [],
        per_bin=_per_bin(run, "mean"),
    )


def _drawable(value: float | None) -> float | None:
    """What an axis can end at."""
    return None if value is None else min(max(value, -1e60), 1e60)


def _smoothed(values: list[float | None]) -> list[float | None]:
    """Averages with weights that fall off exponentially to both sides, so that nothing lags. At
    the beginning, where a loss falls fastest, from no further ahead than from behind."""
    present = [value for value in values if value is not None]
    decay = math.exp(-1 / min(MOST_SMOOTHING, len(present) / 20))
    reach = math.ceil(math.log(LEAST_WEIGHT) / math.log(decay))
    smooth = []
    for at in range(len(present)):
        near = range(max(0, at - reach), min(len(present), at + min(at, reach) + 1))
        weights = [decay ** abs(each - at) for each in near]
        total = sum(w * present[each] for w, each in zip(weights, near, strict=True))
        smooth.append(total / sum(weights))
    found = iter(smooth)
    return [None if value is None else next(found) for value in values]


def _loss(run: Run) -> Chart | None:
    """None: no loss was recorded."""
    line = _mean_line(run, lambda b: b.loss, "loss", "line-0")
    if line is None:
        return None
    lines = [line]
    if sum(y is not None for y in line.y) >= SMOOTHED_FROM:
        lines = [replace(line, faint=True), Line("smoothed", _smoothed(line.y), line.hue)]
    return Chart(
        "loss",
        "Loss",
        "The training loss of each step, as it was given to backward (the mean of its "
        "micro-batches, on this rank). Where a step was skipped its batch trained nothing.",
        "loss",
        "linear",
        lines,
        _skips(run, lambda b: _drawable(b.loss.middle)) + _bad(run, lambda b: b.loss),
    )


def _rate(run: Run) -> Chart | None:
    """None: no learning rate was recorded. Groups with equal rates share a line."""
    seen: dict[tuple[float | None, ...], list[int]] = {}
    for group in range(MOST_RATES):
        rates = tuple(_rate_of(b, group) for b in run.bins.done)
        if any(rate is not None for rate in rates):
            seen.setdefault(rates, []).append(group)
    lines = []
    for at, (shared, members) in enumerate(seen.items()):
        what = "learning rate"
        if len(seen) > 1:
            what += f" of group {', '.join(map(str, members))}"
        elif len(members) > 1:
            what += f" of {len(members)} groups"
        lines.append(Line(what, list(shared), f"line-{at}"))
    if not lines:
        return None
    return Chart(
        "lr",
        "Learning rate",
        "As the optimizer took it. A schedule does not move at a skipped step.",
        "learning rate",
        "linear",
        lines,
    )


def _rate_of(each: Bin, group: int) -> float | None:
    rate = each.lr[group] if group < len(each.lr) else None
    return rate if rate is None or math.isfinite(rate) else None


def _time(run: Run) -> Chart | None:
    """None: the file has no times that say anything."""
    whole = _mean_line(run, lambda b: b.seconds, "whole step", "ink")
    if whole is None:
        return None
    update = _mean_line(run, lambda b: b.update, "optimizer's update", "optimizer")
    waited = _mean_line(run, lambda b: b.waited, "waiting for it", "wait")
    return Chart(
        "time",
        "Step time",
        "From the end of the step before to the end of this one, by the clock of the host; how "
        "long the optimizer's update took, and how long the training thread waited for it. In "
        "overlap and delayed the rest of the update ran beside it.",
        "milliseconds",
        "linear",
        [_in_milliseconds(line) for line in (whole, update, waited) if line is not None],
    )


def _in_milliseconds(line: Line) -> Line:
    def times(values: list[float | None]) -> list[float | None]:
        return [None if value is None else _drawable(value * 1e3) for value in values]

    return replace(line, y=times(line.y), low=times(line.low), high=times(line.high))


def _scale(run: Run) -> Chart | None:
    """None: the run was not scaled."""
    if not run.is_scaled:
        return None
    bins, thinned = run.bins.done, run.bins.width > 1
    smallest = max(min((b.scale_low for b in bins if b.scale_low > 0), default=1.0) / 2, 2.0**-150)

    def drawn(scale: float) -> float:
        """Within float32, whatever the file claims; 0 has no place on a logarithmic axis."""
        return min(max(scale, smallest), 2.0**128)

    line = Line(
        "scale",
        [drawn(b.scale) for b in bins],
        "line-0",
        [drawn(b.scale_low) for b in bins] if thinned else [],
        [drawn(b.scale_high) for b in bins] if thinned else [],
        holds=True,
        per_bin=_per_bin(run, "last"),
    )
    return Chart(
        "scale",
        "Loss scale",
        "The factor on the loss. It halves when a window overflows, and that step is skipped; "
        "after growth_interval windows without overflow it doubles.",
        "scale (factor on the loss)",
        "log2",
        [line],
        _skips(run, lambda b: drawn(b.scale_high)),
    )


def _skips(run: Run, height: Callable[[Bin], float | None]) -> list[Marks]:
    """Every bin with a skipped window."""
    at = [i for i, b in enumerate(run.bins.done) if b.skips]
    if not at:
        return []
    label = counted(run.skips, "skipped window")
    if len(at) > MANY_MARKS:
        return [Marks(label, "bad", "tick", at, [None] * len(at))]
    return [Marks(label, "bad", "cross", at, [height(run.bins.done[i]) for i in at])]


def _readable(value: float) -> float:
    """As it is drawn: beyond these a logarithmic axis has no room for its margins."""
    return min(max(value, 1e-60), 1e60)


def _spread_line(run: Run, of: Callable[[Bin], Spread], name: str) -> Line | None:
    """Numbers above 0: their geometric mean, and the least and most. None: there are none."""
    spreads, thinned = [of(b) for b in run.bins.done], run.bins.width > 1
    if not any(each.count for each in spreads):
        return None

    def drawn(value: Callable[[Spread], float]) -> list[float | None]:
        return [_readable(value(each)) if each.count else None for each in spreads]

    return Line(
        name,
        drawn(lambda each: each.middle),
        "line-0",
        drawn(lambda each: each.low) if thinned else [],
        drawn(lambda each: each.high) if thinned else [],
        per_bin=_per_bin(run, "geometric mean"),
    )


def _bad(run: Run, of: Callable[[Bin], Spread | Mean]) -> list[Marks]:
    """Numbers that were inf or NaN have no height."""
    at = [i for i, b in enumerate(run.bins.done) if of(b).bad]
    return [Marks("inf or NaN", "bad", "triangle", at, [None] * len(at))] if at else []


def _norm(run: Run) -> Chart | None:
    """None: there is no finite norm."""
    line = _spread_line(run, lambda b: b.norm, "norm")
    if line is None:
        return None
    limits = [b.max_norm for b in run.bins.done if b.max_norm and b.max_norm < math.inf]
    return Chart(
        "norm",
        "Gradient norm, unscaled, before clipping",
        "The length of the whole gradient at each step, as the optimizer would see it without "
        "clipping.",
        "L2 norm",
        "log",
        [line],
        _bad(run, lambda b: b.norm),
        [Limit(f"clipped above {number(limit)}", _readable(limit)) for limit in limits[-1:]],
    )


def _largest(run: Run) -> Chart | None:
    """None: nobody measured it."""
    line = _spread_line(run, lambda b: b.largest, "largest gradient")
    if line is None:
        return None
    return Chart(
        "largest",
        "Headroom: the largest scaled gradient",
        "The largest element of the parameters' gradients, as the backward left them: multiplied "
        "by the scale. Each halving below float16's largest number is a doubling that the scale "
        "has left, as far as parameters tell; what float32 adds up may lie above.",
        "magnitude",
        "log",
        [line],
        limits=[Limit(f"end of float16, {number(LARGEST)}", LARGEST)],
    )
