"""Records on their way into the file, while the updates that belong to them may still run."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..optimizer_step import StepTiming
from ..scaling import Losses
from .record import Names, Record
from .writer import Journal

MAX_WAIT_S = 0.5
"""What a killed run may lose of its end. Windows written one by one take several times as long:
the step between them leaves nothing of the writer in the processor's cache."""

MAX_WAITING = 64
"""Windows that are written together; and those of an update that hangs must not pile up."""


@dataclass(slots=True)
class OpenRecord:
    """A window on record, which another optimizer may join and whose updates may still run."""

    record: Record
    late_losses: Losses | None = None
    """Still to be read: they are on their way to the host."""
    names: Names = field(default_factory=Names)
    timings: list[StepTiming] = field(default_factory=list)

    @property
    def is_complete(self) -> bool:
        return all(timing.finished for timing in self.timings)

    def complete(self) -> Record:
        """The record with what is known by now of its loss and its updates."""
        if self.late_losses is not None:
            self.record = replace(self.record, loss=self.late_losses.total())
            self.late_losses = None
        timings = [t for t in self.timings if t.finished]
        if timings:
            busy = sum(t.busy for t in timings)
            waited = sum(t.busy if t.inline else sum(wait[1] for wait in t.waits) for t in timings)
            self.record = replace(
                self.record,
                optimizer_us=round(busy * 1e6),
                waited_us=round(min(waited, busy) * 1e6),
                preview_error=_preview_error(timings),
            )
        if self.is_complete:
            self.timings = []  # they may hold parameters
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

    def append(self, window: OpenRecord) -> None:
        """Add a window; the one before is over."""
        waiting = self._waiting
        overflowed = bool(waiting) and waiting[-1].record.found_inf
        waiting.append(window)
        late = time.perf_counter() - self._written_s >= MAX_WAIT_S
        if late or overflowed or len(waiting) > MAX_WAITING:
            while len(waiting) > 1 and (waiting[0].is_complete or len(waiting) > MAX_WAITING):
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
        self._journal.append(window.complete(), window.names)


def _preview_error(timings: Sequence[StepTiming]) -> float | None:
    return max((t.preview_error for t in timings if t.preview_error is not None), default=None)
