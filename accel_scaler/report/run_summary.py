"""What a report knows of a run: its diagnosis, samples, offenders. All of it bounded."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass
from typing import Any

from ..telemetry import THE_LOSS, Diagnosis, End, Names, Record, Start
from .samples import Bins, Late, NormColumns, Range, Timing

WITHOUT_SCALE = ("no", "bf16", "fp8")
"""Precisions."""


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

    def setting(self, name: str) -> float | None:
        """One that is a number."""
        value = self.settings.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
        return None

    @property
    def is_empty(self) -> bool:
        """It ended as it should, without a window."""
        return self.ended and self.error is None and not self.windows


class Run(Diagnosis):
    """Everything a report says about one file: the diagnosis of its records, and samples of them.
    ``x`` counts windows over all its sessions."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.label = path
        self.sessions: list[Session] = []
        self.bins = Bins()
        self.norms = NormColumns()
        self.timing = Timing()
        self.late = Late()
        self.overflows = 0
        self.places: dict[str, int] = {}
        """Of each parameter, its position in the model's own order."""
        self.offenders: dict[str, Offender] = {}
        self.origins: Counter[str] = Counter()
        """In how many windows the overflow began where."""
        self.limited = self.clipped = 0
        self.range = Range()
        self.lines = self.broken = 0
        self.broken_first: tuple[int, str] | None = None

    def open_session(self, start: Start) -> None:
        """A start line."""
        if self.sessions and self.sessions[-1].is_empty:
            # The launcher attached, then the script: nothing was trained with the first settings.
            del self.sessions[-1]
        self.bins.begin()
        first_x = (
            self.sessions[-1].first_x + self.sessions[-1].last_step + 1 if self.sessions else 0
        )
        self.sessions.append(Session(first_x, start.facts, start.settings, start.changed))

    def add_window(self, record: Record, names: Names | None) -> None:
        """One window of the last session.

        Args:
            names: what it counts; None: that is not known.
        """
        session = self.sessions[-1]
        x = session.first_x + record.index
        if not session.windows:
            is_scaled = session.facts.get("precision") not in WITHOUT_SCALE
            self.begin(is_scaled, session.setting("min_scale"))
        session.add(record)
        self.overflows += record.found_inf
        self.bins.add(x, record)
        self.timing.add(record)
        self.late.add(record)
        self.range.add(x, record, names)
        norm, limit = record.grad_norm, record.max_norm
        if norm is not None and norm < math.inf and limit is not None and limit < math.inf:
            self.limited += 1
            self.clipped += norm > limit
        if names is not None and record.norms is not None:
            self.norms.add(x, names.names, record.norms)
        self.add(x, record, self._add_overflow(x, record, names) if record.found_inf else None)

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
            origin, began = THE_LOSS, None
        if first is not None:
            module = first["module"]
            # A parameter of that module, the latest of them, or the parameter itself.
            inside = (o for o in offenders if o.name == module or o.name.startswith(module + "."))
            began = next(inside, None)
            origin = (began.name if began is not None else module) or None
            origin = THE_LOSS if first["where"] == "loss" else origin
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

    def session_of(self, x: int) -> int:
        """Index of the session that window ``x`` belongs to."""
        return max(0, bisect_right([s.first_x for s in self.sessions], x) - 1)

    def place(self, x: int) -> str:
        """``step 410``, or ``step 12 of session 2`` where the file holds several."""
        index = self.session_of(x)
        step = x - self.sessions[index].first_x if self.sessions else x
        return f"step {step}" + (f" of session {index + 1}" if len(self.sessions) > 1 else "")
