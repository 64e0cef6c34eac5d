"""Records of windows that are over, while the updates that belong to them may still run."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from ..optimizer_step import StepTiming
from .name_table import NameTable
from .record import Record, Span
from .writer import Journal

__all__ = ["Backlog", "OpenRecord"]

MOST_WAITING = 8
"""Records that wait for their updates to end; those of an update that hangs must not pile up."""


@dataclass(slots=True)
class OpenRecord:
    """A window on record, whose updates may still run."""

    record: Record
    timings: list[StepTiming] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    underflow: tuple[tuple[int, float, float], ...] = ()
    places: Sequence[int] = ()
    elements: Sequence[int] = ()
    _completed: Record | None = None

    @property
    def is_complete(self) -> bool:
        return all(timing.finished for timing in self.timings)

    def completed(self, table: NameTable) -> Record:
        """The record, with what is known only after the step; made once, when nothing follows."""
        if self._completed is None or not self.is_complete:
            self._completed = self._complete(table)
        return self._completed

    def _complete(self, table: NameTable) -> Record:
        timings = [t for t in self.timings if t.finished]
        spans = list(self.spans)
        if spans:  # somebody keeps them
            for t in timings:
                spans.append(("optimizer", t.start, t.busy))
                spans += [("wait", at, length, table.label(where)) for at, length, where in t.waits]
        busy = sum(t.busy for t in timings)
        waited = sum(t.busy if t.inline else sum(wait[1] for wait in t.waits) for t in timings)
        return replace(
            self.record,
            underflow=self.underflow,
            optimizer_s=busy if timings else None,
            waited_s=min(waited, busy) if timings else None,
            spans=tuple(spans),
        )


class Backlog:
    """Windows that are over, and go to the file in order once their updates are done."""

    def __init__(self, journal: Journal | None, table: NameTable) -> None:
        self.error: str | None = None
        """What ended the run."""
        self.open: OpenRecord | None = None
        """The window on record last: another optimizer may still join it."""
        self._journal, self._table = journal, table
        self._waiting: deque[OpenRecord] = deque()

    def add(self, window: OpenRecord) -> None:
        if self._journal is not None:
            self._waiting.append(window)
            self.drain()

    def drain(self, everything: bool = False) -> None:
        """Hand over those that are complete; with ``everything`` the others too, and write."""
        waiting = self._waiting
        while waiting and (everything or waiting[0].is_complete or len(waiting) > MOST_WAITING):
            window = waiting.popleft()
            if self._journal is not None:
                record = window.completed(self._table)
                self._journal.add(record, window.places, window.elements)
        if everything and self._journal is not None:
            self._journal.flush()

    def close(self) -> None:
        if self.open is not None:
            window, self.open = self.open, None
            self.add(window)
        self.drain(everything=True)
        if self._journal is not None:
            self._journal.close(self.error)
