"""The numbers of a run's windows, in bins for the charts, and the extremes of its modules."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..telemetry import Record

MAX_BINS = 1024
SHOWN_MODULES = 3


@dataclass(frozen=True, slots=True)
class Mean:
    """Mean, range and count of the finite numbers of a series."""

    low: float
    high: float
    total: float
    count: int
    bad: int
    """How many numbers were inf or NaN; ``count`` is of the others."""
    last: float | None
    """The last number, finite or not; None if there was no number."""

    @property
    def middle(self) -> float | None:
        """The mean of the finite numbers; None if there are none, or their sum overflows."""
        return self.total / self.count if self.count and math.isfinite(self.total) else None


def mean_of(values: Iterable[float | None]) -> Mean:
    """The ``Mean`` of those numbers that are there."""
    known = [value for value in values if value is not None]
    finite = [value for value in known if math.isfinite(value)]
    low, high = min(finite, default=math.inf), max(finite, default=-math.inf)
    bad, last = len(known) - len(finite), known[-1] if known else None
    return Mean(low, high, sum(finite), len(finite), bad, last)


class Bins:
    """The numbers of every window, some 400 bytes each; at most ``MAX_BINS`` bins of equal width,
    a few windows in a row."""

    def __init__(self) -> None:
        self.x: list[int] = []
        """The numbers of windows over all sessions."""
        self.lr: list[tuple[float | None, ...]] = []
        """The learning rates of the groups."""
        self.series: defaultdict[str, list[float | None]] = defaultdict(list)

    def include(self, x: int, record: Record, seconds: float | None = None) -> None:
        """Add the next window, which ended ``seconds`` after the one before; None for the first
        window of a session."""
        self.x.append(x)
        self.lr.append(record.lr)
        norm, limit = record.grad_norm, math.inf if record.max_norm is None else record.max_norm
        numbers = {
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
        for name, value in numbers.items():
            self.series[name].append(value)

    @property
    def width(self) -> int:
        """The windows of a bin; the last one may have fewer."""
        return max(math.ceil(len(self.x) / MAX_BINS), 1)

    @property
    def ends(self) -> list[tuple[int, int]]:
        """The places of the first and the last window of each bin."""
        starts = range(0, len(self.x), self.width)
        return [(start, min(start + self.width, len(self.x)) - 1) for start in starts]

    def means(self, name: str) -> list[Mean]:
        """The mean of a series in each bin."""
        return [mean_of(self.series[name][first : last + 1]) for first, last in self.ends]

    def of_all(self, name: str, first_x: int = 0) -> Mean:
        """The mean over all windows from ``first_x`` on."""
        pairs = zip(self.x, self.series[name], strict=True)
        return mean_of(value for x, value in pairs if x >= first_x)


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
