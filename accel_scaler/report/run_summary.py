"""What a report knows of a run: totals, falls of the scale, offenders. All of it bounded."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from .samples import MAX_CULPRITS, Bins, Heat, Timing

__all__ = ["Fall", "First", "Offender", "Run", "Session"]

MAX_CHANGES = 4096
MAX_FALLS = 8
MAX_FIRSTS = 50
SETTLED = 20
"""So many windows in a row without a skip: the first search for a scale is over."""
SEARCH_WINDOWS = 200
"""A search that is not over by then was none: the run kept overflowing."""


@dataclass(slots=True)
class Offender:
    """A parameter seen with non-finite gradients."""

    name: str
    place: int
    windows: int = 0
    began: int = 0
    """Windows in which the overflow began here, as far as the order of the layers tells."""
    first_x: int = 0
    last_x: int = 0
    most: int = 0
    """The most non-finite elements it had in one window."""
    elements: int = 0


@dataclass(slots=True)
class First:
    """The first non-finite value of a window, as ``find_overflow`` saw it."""

    x: int
    where: str
    module: str
    class_name: str
    micro_batch: int | None
    input: tuple[float, float] | None
    output: tuple[float, float] | None
    text: str


@dataclass(slots=True)
class Fall:
    """Windows that overflowed with no growth of the scale between them."""

    first_x: int
    last_x: int
    high: float
    low: float
    skips: int = 0
    search: bool = False
    """The search for a scale at the beginning of a session, and it found one."""
    culprits: Counter[str] = field(default_factory=Counter)

    @property
    def doublings(self) -> float:
        """log2 of the ratio; inf when the scale reached 0."""
        if self.low >= self.high:
            return 0.0
        return math.log2(self.high) - math.log2(self.low) if self.low > 0 else math.inf

    def count(self, culprit: str | None) -> None:
        """One more window began to overflow in ``culprit``."""
        if culprit is not None and (culprit in self.culprits or len(self.culprits) < MAX_CULPRITS):
            self.culprits[culprit] += 1


@dataclass(slots=True)
class Session:
    """One start line and what followed it."""

    first_x: int
    facts: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    started: bool = True
    """False: its start line is missing."""
    windows: int = 0
    skips: int = 0
    last_step: int = -1
    seconds: float = 0.0
    ended: bool = False
    error: str | None = None


class Run:
    """Everything a report says about one file. ``x`` counts windows over all its sessions."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.label = path
        self.sessions: list[Session] = []
        self.bins = Bins()
        self.heat = Heat()
        self.timing = Timing()
        self.windows = self.skips = self.overflows = 0
        self.search_skips = self.growth_skips = self.other_skips = 0
        self.longest_streak = self.longest_streak_x = 0
        self.changes: list[tuple[int, float]] = []
        """``(x, scale)`` at each change; the first is the start."""
        self.changes_lost = 0
        self.lowest: tuple[float, int] | None = None
        """The lowest scale that a window was given or left behind, and the window's x."""
        self.last_scale: float | None = None
        self.falls: list[Fall] = []
        self.places: dict[str, int] = {}
        """Of each parameter, its position in the model's own order."""
        self.offenders: dict[str, Offender] = {}
        self.culprits: Counter[str] = Counter()
        self.firsts: list[First] = []
        self.firsts_lost = 0
        self.loss_windows = self.loss_first_x = self.loss_last_x = 0
        self.norms = self.norms_bad = self.stepped_bad = self.stepped_bad_x = 0
        self.highest: tuple[float, int] | None = None
        self.limited = self.clipped = 0
        self.lr: list[float] = []
        self.underflow: list[tuple[str, float, float]] = []
        self.underflow_x = 0
        self.lines = self.broken = self.nameless = 0
        self.broken_first: tuple[int, str] | None = None
        self._fall: Fall | None = None
        self._searching = True
        self._grew = False
        self._good = self._streak = 0

    def begin(self, session: Session) -> None:
        """A new session: the scale is searched for again."""
        self.finish()
        self.sessions.append(session)
        self._searching, self._grew, self._good, self._streak = True, False, 0, 0

    def finish(self) -> None:
        """No more windows of this session."""
        if self.sessions and self._searching and self.sessions[-1].windows:
            self._settle(self._good * 2 >= self.sessions[-1].windows)
        self._close()

    def normed(self, x: int, norm: float, skipped: bool, limit: float | None) -> None:
        """The total gradient norm of a window, maybe not finite, and where it is clipped."""
        self.norms += 1
        if not norm < math.inf:  # NaN too
            self.norms_bad += 1
            if not skipped:
                self.stepped_bad += 1
                self.stepped_bad_x = self.stepped_bad_x if self.stepped_bad > 1 else x
            return
        if self.highest is None or norm > self.highest[0]:
            self.highest = (norm, x)
        if limit is not None and limit < math.inf:
            self.limited += 1
            self.clipped += norm > limit

    def offended(
        self, x: int, name: str, place: int, count: int, elements: int, began: bool
    ) -> None:
        """A parameter had ``count`` non-finite elements of ``elements`` in window ``x``."""
        offender = self.offenders.get(name)
        if offender is None:
            offender = self.offenders[name] = Offender(name, place, first_x=x)
        offender.windows += 1
        offender.began += began
        offender.last_x = x
        offender.place, offender.elements = place, elements
        offender.most = max(offender.most, count)

    def blamed(self, culprit: str) -> None:
        """A window's overflow began there."""
        if culprit in self.culprits or len(self.culprits) < MAX_CULPRITS:
            self.culprits[culprit] += 1

    def saw_first(self, first: First) -> None:
        """Keep the first reports and the last ones."""
        self.firsts.append(first)
        if len(self.firsts) > MAX_FIRSTS:
            del self.firsts[MAX_FIRSTS // 2]
            self.firsts_lost += 1

    def follow(
        self, x: int, scale: float, after: float, skipped: bool, culprit: str | None
    ) -> None:
        """The story of the scale, one window on."""
        session = self.sessions[-1]
        if not self.changes or (self.last_scale != scale):
            self._change(x, scale)
        if after != scale:
            self._change(x + 1, after)
        self.last_scale = after
        low = min(scale, after)
        if self.lowest is None or low < self.lowest[0]:
            self.lowest = (low, x)
        if skipped:
            self._skip(x, scale, culprit)
        else:
            self._good += 1
            self._streak = 0
        if self._fall is not None and after < scale:
            self._fall.low = min(self._fall.low, after)
        if after > scale:
            if self._searching:
                self._settle(True)
            self._close()
            self._grew = True
        if self._searching:
            if self._good >= SETTLED:
                self._settle(True)
            elif session.windows >= SEARCH_WINDOWS:
                self._settle(False)

    def _change(self, x: int, scale: float) -> None:
        if len(self.changes) < MAX_CHANGES:
            self.changes.append((x, scale))
        else:
            self.changes_lost += 1

    def _skip(self, x: int, scale: float, culprit: str | None) -> None:
        self._good = 0
        self._streak += 1
        if self._streak > self.longest_streak:
            self.longest_streak, self.longest_streak_x = self._streak, x - self._streak + 1
        if self._searching:
            self.search_skips += 1
        elif self._grew:
            self.growth_skips += 1
        else:
            self.other_skips += 1
        self._grew = False
        if self._fall is None:
            self._fall = Fall(x, x, scale, scale)
        self._fall.last_x = x
        self._fall.skips += 1
        self._fall.count(culprit)

    def _settle(self, found: bool) -> None:
        """The search of this session is over; ``found``: a scale that lasted."""
        self._searching = False
        skips = self.sessions[-1].skips
        if not found:
            self.search_skips -= skips
            self.other_skips += skips
        elif self._fall is not None:
            self._fall.search = True
            self._close()

    def _close(self) -> None:
        fall, self._fall = self._fall, None
        if fall is None:
            return
        self.falls.append(fall)
        if len(self.falls) > MAX_FALLS:
            self.falls.remove(min(self.falls, key=lambda f: (f.doublings, f.skips)))

    def session_of(self, x: int) -> int:
        """Index of the session that window ``x`` belongs to."""
        return max(0, bisect_right([s.first_x for s in self.sessions], x) - 1)

    def place(self, x: int) -> str:
        """``step 410``, or ``step 12 of session 2`` where the file holds several."""
        index = self.session_of(x)
        step = x - self.sessions[index].first_x if self.sessions else x
        return f"step {step}" + (f" of session {index + 1}" if len(self.sessions) > 1 else "")
