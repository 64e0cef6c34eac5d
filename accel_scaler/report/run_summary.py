"""What a report knows of a run: totals, falls of the scale, offenders. All of it bounded."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from copy import copy
from dataclasses import dataclass, field
from typing import Any

from ..telemetry import End, Names, Record, SkipKinds, Start
from .samples import Bins, Late, NormColumns, Range, Timing

MAX_FALLS = 8
MAX_FIRSTS = 50
MAX_HEALED = 256


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
class Fall:
    """Windows that overflowed with no growth of the scale between them."""

    first_x: int
    last_x: int
    high: float
    low: float
    skips: int = 0
    growth: int = 0
    """Those of the skips that belong to a scale that had grown."""
    search: bool = False
    """The search for a scale at the beginning of a session, and it found one."""
    origins: Counter[str] = field(default_factory=Counter)
    """In how many of them the overflow began where."""

    @property
    def doublings(self) -> float:
        """log2 of the ratio; inf when the scale reached 0."""
        if self.low >= self.high:
            return 0.0
        return math.log2(self.high) - math.log2(self.low) if self.low > 0 else math.inf


@dataclass(slots=True)
class Session:
    """One start line and what followed it."""

    first_x: int
    facts: dict[str, Any]
    settings: dict[str, Any]
    changed: tuple[str, ...] = ()
    """Which of these were other than their defaults."""
    windows: int = 0
    skips: int = 0
    last_step: int = -1
    seconds: float = 0.0
    ended: bool = False
    error: str | None = None

    def add(self, record: Record) -> None:
        """One window more."""
        self.last_step = record.index
        self.windows += 1
        self.skips += record.skipped
        self.seconds = max(self.seconds, record.time)

    def end(self, end: End) -> None:
        """Its end line."""
        self.seconds = max(self.seconds, end.time)
        self.ended, self.error = True, end.error

    @property
    def is_empty(self) -> bool:
        """It ended as it should, without a window."""
        return self.ended and self.error is None and not self.windows


class Run:
    """Everything a report says about one file. ``x`` counts windows over all its sessions."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.label = path
        self.sessions: list[Session] = []
        self.bins = Bins()
        self.norms = NormColumns()
        self.timing = Timing()
        self.late = Late()
        self.windows = self.skips = self.overflows = 0
        self.kinds = SkipKinds()
        self.longest_streak = self.longest_streak_x = 0
        self.first_scale = self.last_scale = 0.0
        self.lowest: tuple[float, int] | None = None
        """The lowest scale that a window was given or left behind, and the window's x."""
        self.falls: list[Fall] = []
        self.places: dict[str, int] = {}
        """Of each parameter, its position in the model's own order."""
        self.offenders: dict[str, Offender] = {}
        self.origins: Counter[str] = Counter()
        """In how many windows the overflow began where."""
        self.firsts: list[tuple[int, dict[str, Any]]] = []
        """``(x, Record.first)``."""
        self.firsts_lost = 0
        self.loss_windows = self.loss_first_x = self.loss_last_x = 0
        self.stepped_bad = self.stepped_bad_x = 0
        self.highest: tuple[float, int] | None = None
        """The largest finite norm, and the window's x."""
        self.limited = self.clipped = 0
        self.range = Range()
        self.healed: dict[str, int] = {}
        """Modules in float32 by ``heal``, in order, and the x of the window."""
        self.lines = self.broken = 0
        self.broken_first: tuple[int, str] | None = None
        self._fall: Fall | None = None

    def begin(self, start: Start) -> None:
        """A new session: the scale is searched for again."""
        self.finish()
        if self.sessions and self.sessions[-1].is_empty:
            # The launcher attached, then the script: nothing was trained with the first settings.
            del self.sessions[-1]
        self.late.begin()
        self.bins.begin()
        first_x = (
            self.sessions[-1].first_x + self.sessions[-1].last_step + 1 if self.sessions else 0
        )
        self.sessions.append(Session(first_x, start.facts, start.settings, start.changed))
        self.kinds.begin()

    def finish(self) -> None:
        """No more windows of this session."""
        self._close(is_search=self.kinds.finish() is True)

    def so_far(self) -> Run:
        """As it would be if no window came any more, to look at: it shares with this one what that
        does not change."""
        found = copy(self)
        found.falls, found.kinds, found._fall = list(self.falls), copy(self.kinds), copy(self._fall)
        found.finish()
        return found

    def add(self, record: Record, names: Names | None) -> None:
        """One window of the last session.

        Args:
            names: what it counts; None: that is not known.
        """
        session = self.sessions[-1]
        x = session.first_x + record.index
        session.add(record)
        self.windows += 1
        self.skips += record.skipped
        self.overflows += record.found_inf
        self.bins.add(x, record)
        self.timing.add(x, record)
        self.late.add(x, record)
        for name in record.healed[: MAX_HEALED - len(self.healed)]:
            self.healed.setdefault(name, x)
        self.range.add(x, record, names)
        self._add_norm(x, record)
        if record.has_bad_loss and not record.healed:
            self.loss_first_x = self.loss_first_x if self.loss_windows else x
            self.loss_windows += 1
            self.loss_last_x = x
        if names is not None and record.norms is not None:
            self.norms.add(x, names.names, record.norms)
        origin = self._add_overflow(x, record, names) if record.found_inf else None
        self._follow_scale(x, record, origin)

    def _add_norm(self, x: int, record: Record) -> None:
        norm, limit = record.grad_norm, record.max_norm
        if norm is None:
            return
        if not norm < math.inf:  # NaN too
            if not record.skipped:
                self.stepped_bad_x = self.stepped_bad_x if self.stepped_bad else x
                self.stepped_bad += 1
            return
        if self.highest is None or norm > self.highest[0]:
            self.highest = (norm, x)
        if limit is not None and limit < math.inf:
            self.limited += 1
            self.clipped += norm > limit

    def _add_overflow(self, x: int, record: Record, names: Names | None) -> str | None:
        """Count what overflowed; returns where it began, None where that is not known.

        That is what was seen first, else the loss, else the last layer of all.
        """
        offenders: list[Offender] = []
        if names is not None:
            offenders = [self._offender(x, names, i, count) for i, count in record.nonfinite]
        offenders.sort(key=lambda offender: -offender.place)
        first, began = record.first, next(iter(offenders), None)
        origin = began.name if began is not None else None
        if record.loss_nonfinite:
            origin, began = "the loss", None
        if first is not None:
            self._keep_first(x, first)
            module = first["module"]
            # A parameter of that module, the latest of them, or the parameter itself.
            inside = (o for o in offenders if o.name == module or o.name.startswith(module + "."))
            began = next(inside, None)
            origin = (began.name if began is not None else module) or None
            origin = "the loss" if first["where"] == "loss" else origin
        if began is not None:
            began.began += 1
        if origin is not None:
            self.origins[origin] += 1
        return origin

    def _offender(self, x: int, names: Names, index: int, count: int) -> Offender:
        name, place = names.names[index], names.places[index]
        offender = self.offenders.setdefault(name, Offender(name, place, first_x=x))
        offender.place, offender.elements = place, names.elements[index]
        offender.windows += 1
        offender.last_x = x
        offender.most = max(offender.most, count)
        return offender

    def _keep_first(self, x: int, first: dict[str, Any]) -> None:
        """The first reports and the last ones."""
        self.firsts.append((x, first))
        if len(self.firsts) > MAX_FIRSTS:
            del self.firsts[MAX_FIRSTS // 2]
            self.firsts_lost += 1

    def _follow_scale(self, x: int, record: Record, origin: str | None) -> None:
        scale, after = record.scale, record.next_scale
        if self.windows == 1:
            self.first_scale = scale
        self.last_scale = after
        low = min(scale, after)
        if self.lowest is None or low < self.lowest[0]:
            self.lowest = (low, x)
        growth = self.kinds.growth
        ended = self.kinds.add(record)
        if record.skipped:
            self._skip(x, scale, origin, self.kinds.growth > growth)
        if self._fall is not None and after < scale:
            self._fall.low = min(self._fall.low, after)
        if ended or after > scale:
            self._close(is_search=ended is True)

    def _skip(self, x: int, scale: float, origin: str | None, had_grown: bool) -> None:
        streak = self.kinds.streak
        if streak > self.longest_streak:
            self.longest_streak, self.longest_streak_x = streak, x - streak + 1
        if self._fall is None:
            self._fall = Fall(x, x, scale, scale)
        self._fall.last_x = x
        self._fall.skips += 1
        self._fall.growth += had_grown
        if origin is not None:
            self._fall.origins[origin] += 1

    def _close(self, is_search: bool) -> None:
        fall, self._fall = self._fall, None
        if fall is None:
            return
        fall.search = is_search
        self.falls.append(fall)
        if len(self.falls) > MAX_FALLS:
            self.falls.remove(min(self.falls, key=lambda f: (f.doublings, f.skips)))

    def worst_offenders(self) -> list[Offender]:
        """By the windows that began to overflow in them."""
        return sorted(
            self.offenders.values(), key=lambda o: (-o.began, -o.windows, -o.place, o.name)
        )

    @property
    def last_loss(self) -> float | None:
        """Of the last window that has one; inf and NaN too."""
        return next((b.loss.last for b in self.bins.done[::-1] if b.loss.last is not None), None)

    @property
    def windows_per_second(self) -> float | None:
        """Of the last session, its first window apart; None: it has no second one."""
        seconds, count = 0.0, 0
        for b in self.bins.done:
            if self.sessions and b.last_x >= self.sessions[-1].first_x:
                seconds, count = seconds + b.seconds.total, count + b.seconds.count
        return count / seconds if seconds > 0 else None

    @property
    def hidden_share(self) -> float | None:
        """Of the optimizer's time, what ran beside the training thread's work, from 0 to 1."""
        timing = self.timing
        return timing.hidden / timing.optimizer if timing.optimizer else None

    @property
    def last_x(self) -> int:
        """Of the last window; 0 where there is none."""
        return next((s.first_x + s.last_step for s in self.sessions[::-1] if s.windows), 0)

    def session_of(self, x: int) -> int:
        """Index of the session that window ``x`` belongs to."""
        return max(0, bisect_right([s.first_x for s in self.sessions], x) - 1)

    def place(self, x: int) -> str:
        """``step 410``, or ``step 12 of session 2`` where the file holds several."""
        index = self.session_of(x)
        step = x - self.sessions[index].first_x if self.sessions else x
        return f"step {step}" + (f" of session {index + 1}" if len(self.sessions) > 1 else "")
