"""Samples of a long run: bins of its windows, and the extremes of its modules."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ..telemetry import Record

MAX_BINS = 1024
SHOWN_MODULES = 3


@dataclass(slots=True)
class Mean:
    """Mean, range and count of the finite numbers of a series."""

    low: float = math.inf
    high: float = -math.inf
    total: float = 0.0
    count: int = 0
    bad: int = 0
    """How many numbers were inf or NaN; ``count`` is of the others."""
    last: float | None = None
    """The last number, finite or not; None if there was no number."""

    @property
    def middle(self) -> float | None:
        """The mean of the finite numbers; None if there are none, or their sum overflows."""
        return self.total / self.count if self.count and math.isfinite(self.total) else None

    @classmethod
    def of(cls, value: float | None) -> Mean:
        """The ``Mean`` of one number, or of no number for None."""
        if value is None:
            return cls()
        if not math.isfinite(value):
            return cls(bad=1, last=value)
        return cls(value, value, value, count=1, last=value)

    def merge(self, later: Mean) -> None:
        """Add the numbers of a later part."""
        self.low, self.high = min(self.low, later.low), max(self.high, later.high)
        self.total += later.total
        self.count += later.count
        self.bad += later.bad
        self.last = self.last if later.last is None else later.last


@dataclass(slots=True)
class Bin:
    """A few windows in a row, ``x`` to ``last_x`` (numbers of windows over all sessions)."""

    x: int
    last_x: int
    lr: tuple[float | None, ...]
    """The learning rate of each group in the last window."""
    series: dict[str, Mean]
    """The numbers of :func:`numbers_of`."""

    def merge(self, later: Bin) -> None:
        """Add the next bin."""
        self.last_x, self.lr = later.last_x, later.lr
        for name, mean in self.series.items():
            mean.merge(later.series[name])


def numbers_of(record: Record, seconds: float | None) -> dict[str, float | None]:
    """The numbers of a window by the names of their series."""
    norm, limit = record.grad_norm, math.inf if record.max_norm is None else record.max_norm
    return {
        "loss": record.loss,
        "scale": record.scale,
        "norm": norm,
        "limit": record.max_norm,
        "clipped": None if norm is None or not norm + limit < math.inf else float(norm > limit),
        "largest": record.largest_gradient,
        "skipped": record.scale if record.skipped else None,
        "spike": norm if record.spike and not record.found_inf else None,
        "retried": record.first_scale if record.retries and not record.skipped else None,
        "seconds": seconds,
        "update": None if record.optimizer_us is None else record.optimizer_us / 1e6,
        "waited": None if record.waited_us is None else record.waited_us / 1e6,
    }


class Bins:
    """At most ``MAX_BINS`` bins of equal width; neighbours merge when there are too many."""

    def __init__(self) -> None:
        self.width = 1
        self.done: list[Bin] = []

    def include(self, x: int, record: Record, seconds: float | None = None) -> None:
        """Add the next window, which ended ``seconds`` after the one before; None for the first
        window of a session."""
        series = {name: Mean.of(value) for name, value in numbers_of(record, seconds).items()}
        new, done = Bin(x, x, record.lr, series), self.done
        if done and done[-1].last_x - done[-1].x + 1 < self.width:
            done[-1].merge(new)
            return
        if len(done) == MAX_BINS:
            for first, second in zip(done[::2], done[1::2], strict=True):
                first.merge(second)
            del done[1::2]
            self.width *= 2
        done.append(new)

    def means(self, name: str) -> list[Mean]:
        """The mean of a series in each bin."""
        return [each.series[name] for each in self.done]

    def of_all(self, name: str, first_x: int = 0) -> Mean:
        """The mean over all windows without the bins before ``first_x``."""
        found = Mean()
        for each in self.done:
            if each.last_x >= first_x:
                found.merge(each.series[name])
        return found


@dataclass(slots=True)
class Module:
    """The extremes of the gradient norms of one module's parameters."""

    largest: float = 0.0
    """The largest finite norm."""
    largest_x: int = -1
    """The window of the largest norm."""
    bad: int = 0
    """How many windows overflowed with inf or NaN in this module."""
    first_bad: int = -1
    last_bad: int = -1


class Modules:
    """The modules by their names, in the order of the model."""

    def __init__(self) -> None:
        self.found: dict[str, Module] = {}
        self._names: tuple[str, ...] = ()
        self._each: list[Module] = []
        """The module of each of ``_names``."""

    def include(self, x: int, record: Record) -> None:
        """Add the norms of the next window."""
        if record.names is not self._names:
            self._names = record.names
            modules = [name.rpartition(".")[0] or name for name in record.names]
            self._each = [self.found.setdefault(name, Module()) for name in modules]
        for module, norm in zip(self._each, record.norms or (), strict=True):
            if module.largest < norm < math.inf:
                module.largest, module.largest_x = norm, x
            # A parameter without a gradient has the norm NaN, too, and may never have had another.
            elif record.found_inf and (norm == math.inf or (norm != norm and module.largest)):
                module.first_bad = module.first_bad if module.bad else x
                module.bad += module.last_bad < x
                module.last_bad = x

    def most(self, value: Callable[[Module], float]) -> list[tuple[str, Module]]:
        """The three modules with the largest ``value``, if it is above 0. Of equal ones the module
        nearest to the output comes first: from there a backward spreads inf and NaN."""
        some = [(name, module) for name, module in reversed(self.found.items()) if value(module)]
        return sorted(some, key=lambda each: -value(each[1]))[:SHOWN_MODULES]
