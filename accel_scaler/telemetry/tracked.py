"""Which windows experiment trackers are to be told of, and what."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..scaling import OptimizerRecord, Window
from .gradient_histograms import Histogram, Spread, spread_of
from .history import History
from .record import Record


@dataclass(frozen=True, slots=True)
class TrackedWindow:
    """What trackers get of one window."""

    index: int
    """Its number, from 0."""
    values: dict[str, float]
    """``scaler/...``; finite numbers."""
    histograms: tuple[Histogram, ...]
    """Of unscaled gradients; () of a window that was skipped, and where nobody can show them."""


@dataclass(slots=True)
class _Look:
    """At the gradients of one window."""

    is_whole: bool = True
    """At all of them, as they were before any clip."""
    spreads: list[Spread] = field(default_factory=list)
    """Still to be read."""
    found: list[Histogram] = field(default_factory=list)

    def read(self) -> None:
        for spread in self.spreads:
            found = list(spread.read())
            self.is_whole &= len(found) == len(spread.names)
            self.found += found
        self.spreads.clear()


class TrackedWindows:
    """Collects, of every ``interval``-th window, what trackers are to get.

    Numbers of gradients are read in the next window, when the device is idle anyway; so a window is
    sent when the next one has stepped, or when the recording is flushed.

    Args:
        interval: windows between two, the first of all among them.
    """

    def __init__(self, interval: int) -> None:
        self.interval = interval
        self.send: Callable[[TrackedWindow], None] | None = None
        self.wants_histograms: Callable[[], bool] = lambda: False
        self._looks: dict[int, _Look] = {}
        """By window: at most the one that is ending, and the one before."""
        self._sent = -1

    def is_due(self, window: int) -> bool:
        """Trackers are to be told of it."""
        return self.send is not None and window % self.interval == 0

    def look(
        self,
        params: Sequence[Tensor],
        names: Sequence[str],
        window: Window,
        record: OptimizerRecord,
    ) -> None:
        """At the gradients of one optimizer, which are finite. Does not synchronise."""
        look = self._looks.setdefault(window.index, _Look())
        found, is_whole = spread_of(params, names, window, record, self.wants_histograms())
        look.spreads += found
        # What an element was before a clip of its value is not known.
        look.is_whole &= is_whole and not window.clipped_values
        look.is_whole &= window.grad_norms.knows_every_clip

    def read(self, but: int = -1) -> None:
        """The numbers, of all windows but one. Synchronises if they are not there."""
        for window, look in self._looks.items():
            if window != but:
                look.read()

    def close(self, record: Record, history: History, is_scaled: bool) -> None:
        """A window is over; it is the last of ``history``."""
        look = self._looks.get(record.index, _Look(is_whole=False))
        self._looks = {
            window: each for window, each in self._looks.items() if window > record.index
        }
        if not self.is_due(record.index) or self.send is None or self._sent == record.index:
            return
        self._sent = record.index
        norm = None
        if look.found and look.is_whole:
            norm = math.hypot(*(each.norm for each in look.found))
            if is_scaled:
                largest = max(max(-each.lowest, each.highest) for each in look.found)
                history.note_largest(largest * record.scale, record.scale)
        values = history.metrics()
        if record.loss is not None and math.isfinite(record.loss):
            values["scaler/loss"] = record.loss
        if record.grad_norm is None and norm is not None:  # nobody has clipped
            values["scaler/grad_norm"] = norm
        shown = tuple(each for each in look.found if each.counts)
        self.send(TrackedWindow(record.index, values, shown))
