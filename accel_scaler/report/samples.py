"""Bounded samples of a long run: bins over all windows, norms of some, totals of the clock."""

from __future__ import annotations

import math
from array import array
from collections import Counter
from dataclasses import dataclass, field

from ..telemetry import Names, Record, headroom

MAX_BINS = 1024
MAX_COLUMNS = 240
MAX_CELLS = 1 << 21


@dataclass(slots=True)
class Spread:
    """Of the finite numbers above 0 among some."""

    low: float = math.inf
    high: float = 0.0
    logs: float = 0.0
    """The sum of their natural logarithms."""
    count: int = 0
    bad: int = 0
    """Those that were inf or NaN."""

    @property
    def middle(self) -> float:
        """Their geometric mean."""
        return math.exp(self.logs / self.count)

    def add(self, value: float | None) -> None:
        """One more, if there is one."""
        if value is not None and 0 < value < math.inf:
            self.low, self.high = min(self.low, value), max(self.high, value)
            self.logs += math.log(value)
            self.count += 1
        elif value is not None and value != 0:  # inf or NaN
            self.bad += 1

    def merge(self, other: Spread) -> None:
        """Take in others."""
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)
        self.logs += other.logs
        self.count += other.count
        self.bad += other.bad


@dataclass(slots=True)
class Mean:
    """Of the finite numbers among some, of any sign."""

    low: float = math.inf
    high: float = -math.inf
    total: float = 0.0
    count: int = 0
    bad: int = 0
    """Those that were inf or NaN."""
    last: float | None = None
    """Finite or not; None: there was none."""

    @property
    def middle(self) -> float | None:
        """Their arithmetic mean; None: there is none, or their sum is more than a float holds."""
        return self.total / self.count if self.count and math.isfinite(self.total) else None

    def add(self, value: float | None) -> None:
        """One more, if there is one."""
        if value is None:
            return
        self.last = value
        if not math.isfinite(value):
            self.bad += 1
            return
        self.low, self.high = min(self.low, value), max(self.high, value)
        self.total += value
        self.count += 1

    def merge(self, later: Mean) -> None:
        """Take in those that follow."""
        self.low, self.high = min(self.low, later.low), max(self.high, later.high)
        self.total += later.total
        self.count += later.count
        self.bad += later.bad
        self.last = self.last if later.last is None else later.last


@dataclass(slots=True)
class Bin:
    """A few windows in a row, ``x`` to ``last_x`` (numbers of windows over all sessions)."""

    x: int
    last_x: int = 0
    windows: int = 0
    skips: int = 0
    scale: float = 0.0
    """Of the last of them."""
    scale_low: float = math.inf
    scale_high: float = 0.0
    norm: Spread = field(default_factory=Spread)
    largest: Spread = field(default_factory=Spread)
    """Of ``Record.largest_gradient``."""
    max_norm: float | None = None
    loss: Mean = field(default_factory=Mean)
    lr: tuple[float | None, ...] = ()
    """Of each group, in the last of them."""
    seconds: Mean = field(default_factory=Mean)
    """From the end of the window before to the end of each; not of a session's first."""
    update: Mean = field(default_factory=Mean)
    """Seconds that their updates took."""
    waited: Mean = field(default_factory=Mean)
    """Seconds of it that the training thread waited."""

    def add(self, x: int, record: Record, seconds: float | None = None) -> None:
        """One window more, ``seconds`` after the one before."""
        self.loss.add(record.loss)
        self.lr = record.lr
        self.seconds.add(seconds)
        self.update.add(record.optimizer_s)
        self.waited.add(record.waited_s)
        scale = record.scale
        self.last_x, self.scale = x, scale
        self.windows += 1
        self.skips += record.skipped
        self.scale_low = min(self.scale_low, scale)
        self.scale_high = max(self.scale_high, scale)
        self.norm.add(record.grad_norm)
        self.largest.add(record.largest_gradient)
        if record.max_norm is not None:
            self.max_norm = record.max_norm

    def merge(self, later: Bin) -> None:
        """Take in the bin that follows."""
        self.last_x = later.last_x
        self.windows += later.windows
        self.skips += later.skips
        self.scale = later.scale
        self.scale_low = min(self.scale_low, later.scale_low)
        self.scale_high = max(self.scale_high, later.scale_high)
        self.norm.merge(later.norm)
        self.largest.merge(later.largest)
        self.loss.merge(later.loss)
        self.lr = later.lr
        self.seconds.merge(later.seconds)
        self.update.merge(later.update)
        self.waited.merge(later.waited)
        if later.max_norm is not None:
            self.max_norm = later.max_norm


class Bins:
    """At most ``MAX_BINS`` bins of equal width; neighbours merge when there are too many."""

    def __init__(self) -> None:
        self.width = 1
        self.done: list[Bin] = []
        self._before: float | None = None

    def begin(self) -> None:
        """A new session: its clock starts at 0."""
        self._before = None

    def add(self, x: int, record: Record) -> None:
        """One window, in order of ``x``."""
        seconds = None if self._before is None else max(record.time - self._before, 0.0)
        self._before = record.time
        done = self.done
        if len(done) == MAX_BINS and done[-1].windows == self.width:
            for first, second in zip(done[::2], done[1::2], strict=True):
                first.merge(second)
            del done[1::2]
            self.width *= 2
        if not done or done[-1].windows == self.width:
            done.append(Bin(x))
        done[-1].add(x, record, seconds)


class NormColumns:
    """Norms of every parameter for at most ``MAX_COLUMNS`` windows, evenly spread."""

    def __init__(self) -> None:
        self.columns: list[tuple[int, tuple[str, ...], array[float]]] = []
        """``(x, names, float32 norms)``; the names are shared by columns."""
        self.stride = 1
        self._seen = 0

    def add(self, x: int, names: tuple[str, ...], norms: bytes) -> None:
        """One window with norms; of those kept, half go when there are too many."""
        self._seen += 1
        if (self._seen - 1) % self.stride:
            return
        self.columns.append((x, names, array("f", norms)))
        most = min(MAX_COLUMNS, max(2, MAX_CELLS // max(1, len(names))))
        while len(self.columns) > most:
            del self.columns[1::2]
            self.stride *= 2


class Timing:
    """Totals of the clock in seconds."""

    def __init__(self) -> None:
        self.optimizer = self.waited = self.hidden = 0.0
        self.updates = 0

    def add(self, record: Record) -> None:
        """One window."""
        if record.optimizer_s is not None:
            self.updates += 1
            self.optimizer += record.optimizer_s
            self.waited += record.waited_s or 0.0
            self.hidden += record.hidden_s or 0.0


class Range:
    """How much of float16's range scaled gradients took, where that was measured."""

    def __init__(self) -> None:
        self.underflow: list[tuple[str, float, float]] = []
        """Of the last measured window: name, share of zeros, share of subnormals."""
        self.underflow_x = 0
        self.zero_share: float | None = None
        """Of the last measured window."""
        self.last: tuple[float, int] | None = None
        """The largest gradient there, unscaled, and the window's x."""
        self.least: tuple[float, int] | None = None
        """The least headroom, and the window's x."""

    def add(self, x: int, record: Record, names: Names | None) -> None:
        """One window."""
        if record.underflow and names is not None:
            self.underflow = [(names.names[i], zero, low) for i, zero, low in record.underflow]
            self.underflow_x = x
        if record.zero_share is not None:
            self.zero_share = record.zero_share
        if record.largest_gradient is None or not record.scale > 0:
            return
        self.last = (record.largest_gradient / record.scale, x)
        room = headroom(record.largest_gradient)
        if self.least is None or room < self.least[0]:
            self.least = (room, x)

    def room_at(self, scale: float) -> float | None:
        """Doublings of this scale until the largest of the last measured window overflows."""
        return None if self.last is None else headroom(self.last[0] * scale)


COMPENSATIONS = ("preview", "none")


class Late:
    """Of the updates that came a step late: what the model was shown, and how far that was off."""

    def __init__(self) -> None:
        self.kinds: Counter[str] = Counter()
        """Updates by what was shown of them."""
        self.error = Mean()

    def add(self, record: Record) -> None:
        """One window."""
        self.kinds.update(kind for kind in record.delay_compensation if kind in COMPENSATIONS)
        self.error.add(record.preview_error)
