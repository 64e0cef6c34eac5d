"""Records on their way into the file, while the updates that belong to them may still run."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..optimizer_step import StepTiming
from ..scaling import Losses
from .gradient_range import RangeTotals
from .record import Names, Record
from .writer import Journal

LONGEST_WAIT_S = 0.5
"""What a killed run may lose of its end. One by one, windows cost several times as much to write:
the step between them leaves nothing of ours in the processor's cache."""

MOST_WAITING = 64
"""Windows that are written together; and those of an update that hangs must not pile up."""


@dataclass(slots=True)
class OpenRecord:
    """A window on record, which another optimizer may join and whose updates may still run."""

    record: Record
    late_losses: Losses | None = None
    """Still to be read: they are on their way to the host."""
    names: Names = field(default_factory=Names)
    timings: list[StepTiming] = field(default_factory=list)
    range: RangeTotals = field(default_factory=RangeTotals)
    _is_closed: bool = False

    @property
    def is_complete(self) -> bool:
        return all(timing.finished for timing in self.timings)

    def read_loss(self) -> None:
        """Put it on record: after the window's update it is there, or soon."""
        late, self.late_losses = self.late_losses, None
        if late is not None:
            self.record = replace(self.record, loss=late.total())

    def close(self) -> Record:
        """The record, now with what is known of the updates; nothing is added to it any more."""
        if self._is_closed:
            return self.record
        timings = [t for t in self.timings if t.finished]
        busy = sum(t.busy for t in timings)
        waited = sum(t.busy if t.inline else sum(wait[1] for wait in t.waits) for t in timings)
        self.record = replace(
            self.record,
            underflow=self.range.underflow,
            largest_gradient=self.range.largest,
            zero_share=self.range.zero_share,
            optimizer_s=busy if timings else None,
            waited_s=min(waited, busy) if timings else None,
            delay_compensation=tuple(t.delay_compensation for t in timings if t.delay_compensation),
            preview_error=_preview_error(timings),
        )
        self._is_closed = True
        self.timings.clear()  # they may hold parameters
        return self.record


class RecordQueue:
    """Windows in order. The last one is open; the others go to the file when they are complete.

    Some are written together, overflows at once.
    """

    def __init__(self, journal: Journal) -> None:
        self.error: str | None = None
        """What ended the run."""
        self._journal = journal
        self._waiting: deque[OpenRecord] = deque()
        self._written_s = 0.0

    def add(self, window: OpenRecord) -> None:
        """A new window is on record: the one before is over."""
        waiting = self._waiting
        overflowed = bool(waiting) and waiting[-1].record.found_inf
        waiting.append(window)
        late = time.perf_counter() - self._written_s >= LONGEST_WAIT_S
        if late or overflowed or len(waiting) > MOST_WAITING:
            while len(waiting) > 1 and (waiting[0].is_complete or len(waiting) > MOST_WAITING):
                self._write()

    def flush(self) -> None:
        """Write all, with what is known of them now."""
        while self._waiting:
            self._write()

    def close(self) -> None:
        """Write the rest and the end line."""
        self.flush()
        self._journal.close(self.error)

    def _write(self) -> None:
        self._written_s = time.perf_counter()
        window = self._waiting.popleft()
        window.read_loss()
        self._journal.add(window.close(), window.names)


def _preview_error(timings: Sequence[StepTiming]) -> float | None:
    found = [t.shown_error for t in timings if t.shown_error is not None]
    if not found:
        return None
    off, moved = (math.hypot(*norms) for norms in zip(*found, strict=True))
    return off / moved if moved else None
