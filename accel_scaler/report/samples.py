"""Bounded samples of a long run: bins over all windows, norms of some, the clock of a few."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from dataclasses import dataclass, field

__all__ = ["Bin", "Bins", "Heat", "Spans", "Timing"]

MAX_BINS = 1024
MAX_COLUMNS = 240
MAX_CELLS = 1 << 21
MAX_CULPRITS = 256
STRETCH = 8
SPANS_KEPT = 4096


@dataclass(slots=True)
class Bin:
    """A few windows in a row, ``x`` to ``last_x`` (numbers of windows over all sessions)."""

    x: int
    last_x: int
    windows: int = 0
    skips: int = 0
    scale: float = 0.0
    scale_low: float = math.inf
    scale_high: float = 0.0
    norm_low: float = math.inf
    norm_high: float = 0.0
    norm_logs: float = 0.0
    norms: int = 0
    """Finite norms above 0; ``norm_logs`` is the sum of their natural logarithms."""
    norms_bad: int = 0
    max_norm: float | None = None

    def merge(self, later: Bin) -> None:
        """Take in the bin that follows."""
        self.last_x = later.last_x
        self.windows += later.windows
        self.skips += later.skips
        self.scale = later.scale
        self.scale_low = min(self.scale_low, later.scale_low)
        self.scale_high = max(self.scale_high, later.scale_high)
        self.norm_low = min(self.norm_low, later.norm_low)
        self.norm_high = max(self.norm_high, later.norm_high)
        self.norm_logs += later.norm_logs
        self.norms += later.norms
        self.norms_bad += later.norms_bad
        if later.max_norm is not None:
            self.max_norm = later.max_norm

    @property
    def norm(self) -> float | None:
        """Geometric mean of the finite norms; None where there is none."""
        return math.exp(self.norm_logs / self.norms) if self.norms else None


class Bins:
    """At most ``MAX_BINS`` bins of equal width; neighbours merge when there are too many."""

    def __init__(self) -> None:
        self.width = 1
        self.done: list[Bin] = []

    def add(
        self, x: int, scale: float, skipped: bool, norm: float | None, max_norm: float | None
    ) -> None:
        """One window, in order of ``x``."""
        done = self.done
        if not done or done[-1].windows >= self.width:
            if len(done) >= MAX_BINS:
                self._halve()
            if not done or done[-1].windows >= self.width:
                done.append(Bin(x, x))
        last = done[-1]
        last.last_x = x
        last.windows += 1
        last.scale = scale
        if skipped:
            last.skips += 1
        if scale < last.scale_low:
            last.scale_low = scale
        if scale > last.scale_high:
            last.scale_high = scale
        if norm is not None:
            if not norm < math.inf:  # NaN too
                last.norms_bad += 1
            elif norm > 0:
                last.norms += 1
                last.norm_logs += math.log(norm)
                if norm < last.norm_low:
                    last.norm_low = norm
                if norm > last.norm_high:
                    last.norm_high = norm
        if max_norm is not None:
            last.max_norm = max_norm

    def _halve(self) -> None:
        for first, second in zip(self.done[::2], self.done[1::2], strict=True):
            first.merge(second)
        del self.done[1::2]
        self.width *= 2


class Heat:
    """Norms of every parameter for at most ``MAX_COLUMNS`` windows, evenly spread."""

    def __init__(self) -> None:
        self.columns: list[tuple[int, list[str], array[float]]] = []
        """``(x, names, float32 norms)``; the names are shared by columns."""
        self.stride = 1
        self._seen = 0
        self._cells = 0

    def wants(self) -> bool:
        """Whether the next window with norms is one to keep; asked once for each."""
        self._seen += 1
        return (self._seen - 1) % self.stride == 0

    def add(self, x: int, names: list[str], norms: array[float]) -> None:
        """Keep one window's norms; half the columns go when there are too many."""
        self.columns.append((x, names, norms))
        self._cells += len(norms)
        while len(self.columns) > MAX_COLUMNS or (
            self._cells > MAX_CELLS and len(self.columns) > 2
        ):
            del self.columns[1::2]
            self.stride *= 2
            self._cells = sum(len(norms) for _, _, norms in self.columns)


@dataclass(slots=True)
class Spans:
    """A stretch of windows with what was done when: ``(kind, start, length, where)`` in µs."""

    position: int
    first_x: int
    last_x: int
    windows: int = 0
    spans: list[tuple[str, int, int, str]] = field(default_factory=list)
    ends: list[float] = field(default_factory=list)
    """When each window's boundary ended, seconds; NaN where the file does not say."""


class Timing:
    """Totals of the clock, and one stretch of windows from the middle of the run."""

    def __init__(self) -> None:
        self.optimizer_us = 0
        self.waited_us = 0
        self.hidden_us = 0
        self.updates = 0
        self.totals: Counter[str] = Counter()
        """Microseconds by kind of span."""
        self.waits: Counter[str] = Counter()
        """Microseconds by where the training thread waited."""
        self._seen = 0
        self._stretches: list[Spans] = []

    def add(self, x: int, spans: list[tuple[str, int, int, str]], end: float, fresh: bool) -> None:
        """The spans of one window; ``fresh``: it begins a session."""
        for kind, _, length, where in spans:
            self.totals[kind] += length
            if kind == "wait":
                known = where in self.waits or len(self.waits) < MAX_CULPRITS
                self.waits[where if known else "elsewhere"] += length
        self._seen += 1
        # At powers of two: one of them is near the middle, however long the run turns out.
        if self._seen == 1 or (self._seen > STRETCH and self._seen & (self._seen - 1) == 0):
            self._stretches = [*self._stretches[-2:], Spans(self._seen, x, x)]
        last = self._stretches[-1]
        # A stretch has no gap: a new session's clock starts at 0, and so does the picture's.
        if last.windows < STRETCH and (last.windows == 0 or (last.last_x == x - 1 and not fresh)):
            last.last_x = x
            last.windows += 1
            last.spans += spans[: max(0, SPANS_KEPT - len(last.spans))]
            last.ends.append(end)

    @property
    def stretch(self) -> Spans | None:
        """Of the stretches kept, the longest, and of those the one nearest the middle."""
        return min(
            self._stretches,
            key=lambda s: (-s.windows, abs(s.position - self._seen / 2)),
            default=None,
        )
