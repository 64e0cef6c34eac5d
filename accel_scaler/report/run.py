"""The summary of a run: its diagnosis, totals and samples. Its size is bounded."""

from __future__ import annotations

import math
from pathlib import Path

from ..console import percent, plain
from ..telemetry import Diagnosis, Noted, Record, Start
from .samples import Bins, Mean, Modules

MAX_NOTED = 50


class Run(Diagnosis):
    """Everything that a report knows about one file."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.names: tuple[str, ...] = ()
        """The names of the parameters whose norms follow; empty if their line was lost."""
        self.bins = Bins()
        self.modules = Modules()
        self.limited = self.clipped = 0
        """How many windows had a clip by norm, and in how many the norm was above the threshold."""
        self.updates = self.optimizer_us = self.waited_us = 0
        self.noted: dict[str, Mean] = {}
        """Numbers that belong to no window, of the first ``MAX_NOTED`` names."""
        self.lines = self.broken = 0
        self.broken_first: tuple[int, str] | None = None
        self.left_out = 0
        """How many sessions trained nothing and have other sessions behind them."""

    def begin(self, start: Start) -> None:
        """Begin a session. Earlier sessions that trained nothing are left out: the new one may be
        their cure, and is to be judged by itself."""
        if self.windows == self.skips > 0 and not self.healed:
            kept = self.lines, self.broken, self.broken_first, self.left_out + len(self.sessions)
            Run.__init__(self, self.path)
            self.lines, self.broken, self.broken_first, self.left_out = kept
        super().begin(start)

    def add(self, record: Record) -> None:
        """Add the next window of the session."""
        session = self.sessions[-1]
        seconds = max(record.time - session.seconds, 0.0) if session.last_step >= 0 else None
        super().add(record)
        x, norm, limit = self.last_x, record.grad_norm, record.max_norm
        self.bins.include(x, record, seconds)
        if norm is not None and norm < math.inf and limit is not None and limit < math.inf:
            self.limited += 1
            self.clipped += norm > limit
        if record.names and record.norms:
            self.modules.include(x, record)
        if record.optimizer_us is not None:
            self.updates += 1
            self.optimizer_us += record.optimizer_us
            self.waited_us += min(record.waited_us or 0, record.optimizer_us)

    def note(self, found: Noted) -> None:
        """Add numbers that belong to no window, or a mistake."""
        self.add_mistake(found.mistake)
        for name, value in found.values.items():
            if name in self.noted or len(self.noted) < MAX_NOTED:
                self.noted.setdefault(name, Mean()).merge(Mean.of(value))

    @property
    def label(self) -> str:
        """The name of the file, and the rank where there are several."""
        facts = self.sessions[0].start.facts if self.sessions else {}
        rank = f" (rank {facts.get('rank', '?')})" if facts.get("ranks", 1) > 1 else ""
        return plain(Path(self.path).name + rank)

    @property
    def hides(self) -> bool:
        """Whether the training thread did not wait for all of the updates' time."""
        return self.waited_us < self.optimizer_us

    @property
    def hidden(self) -> str:
        """The share of the updates' time that the training thread did not wait for."""
        return percent(self.optimizer_us - self.waited_us, self.optimizer_us)

    @property
    def windows_per_second(self) -> float | None:
        """The speed of the last session without its first window; None if it has no second one."""
        first_x = self.sessions[-1].first_x if self.sessions else 0
        seconds = self.bins.of_all("seconds", first_x)
        return seconds.count / seconds.total if seconds.total > 0 else None
