"""The course of a run, from its records in order: the same live and from the file."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

from .record import End, Record, Start

SETTLED = 20
"""After so many steps in a row at one scale the scale is good."""
STUCK = 20
"""A run with so many skips in a row at its end no longer trains. The search for a scale takes 16
skips from the usual 65536 to 1."""
FAILING = 5
"""As ``STUCK``, for windows with inf or NaN in the forward, which no scale repairs."""
MANY_SKIPPED = 0.1
"""A run stepped in part if more than this share of its windows was skipped in the middle."""
ENDS = 5
"""Losses at each end of a session whose medians are compared: two odd batches do not move them."""
FAR = 10.0
"""The factor above the first losses from which on a loss has risen. A sum of losses may well rise
by less, in a GAN or with a term whose weight grows."""

Kind = Literal["untrained", "stuck", "diverged", "partly", "stepped"]
"""``untrained``: every window was skipped. ``stuck``: every window at the end was. ``diverged``:
the loss is inf or NaN now, or far above its first values. ``partly``: many windows were skipped in
the middle of training. ``stepped``: anything else; whether the steps were of use is not known."""
SkipKind = Literal["spike", "forward", "search", "growth", "other"]


@dataclass(slots=True)
class Span:
    """Windows of one kind: the first, the last, and how many."""

    first_x: int = -1
    last_x: int = -1
    count: int = 0

    def include(self, x: int) -> None:
        self.first_x, self.last_x = self.first_x if self.count else x, x
        self.count += 1


@dataclass(slots=True)
class Session:
    """A ``start`` line and the windows that follow it."""

    start: Start
    first_x: int
    last_step: int = -1
    seconds: float = 0.0
    ended: bool = False
    error: str | None = None
    first_losses: list[float] = field(default_factory=list)
    last_losses: deque[float] = field(default_factory=lambda: deque(maxlen=ENDS))
    lowest_loss: float = math.inf

    def add_loss(self, loss: float | None) -> None:
        if loss is not None and math.isfinite(loss):
            self.first_losses += [loss] * (len(self.first_losses) < ENDS)
            self.last_losses.append(loss)
            self.lowest_loss = min(self.lowest_loss, loss)

    @property
    def has_risen(self) -> bool:
        """Whether the last losses are far above the first; False where a loss was 0 or less, since
        a ratio says nothing then."""
        first, last = self.first_losses, self.last_losses
        return 0 < self.lowest_loss < math.inf and median(last) > FAR * median(first)


class Diagnosis:
    """Adds up the records of a run. Bounded; holds no tensors.

    ``x`` counts windows over all sessions. A scale is good once the run grew from it, or stepped at
    it 20 times in a row. ``kinds`` counts each skip under the first kind that fits:

    ``spike``: all gradients were finite, and the norm was above ``skip_norm_above``.

    ``forward``: the loss was inf or NaN, or the overflow began in the forward. The scale multiplies
    the loss afterwards, so no other scale helps, and the skip says nothing about the scale.

    ``search``: no scale is good yet, and the scale is above 1 and ``min_scale``. A session begins
    with an untried scale, unless its growth tracker goes on from a checkpoint. After a heal, which
    puts the scale back, the search begins again.

    ``growth``: the scale is above a good one. It grows until a window overflows, which is no loss.

    ``other``: anything else.
    """

    def __init__(self) -> None:
        self.sessions: list[Session] = []
        self.windows = self.skips = self.last_x = 0
        self.kinds: Counter[SkipKind] = Counter()
        self.last_kind: SkipKind | None = None
        self.others = Span()
        """Skips of kind ``other``."""
        self.is_scaled = False
        self.first_scale = self.last_scale = 0.0
        self.lowest: tuple[float, int] | None = None
        """The lowest scale, and the x of the window that had it or left it behind."""
        self.first: tuple[int, dict[str, Any]] | None = None
        """``(x, Record.first)`` of the last overflow whose beginning is known."""
        self.overflowed: tuple[str, ...] = ()
        """Names of the first few tensors of the last overflow."""
        self.bad = Span()
        """Windows with inf or NaN in the loss or the forward, or stepped with such a norm, except
        healed ones."""
        self.bad_steps = Span()
        """The stepped ones of ``bad``."""
        self.bad_at_end = 0
        """Bad windows in a row, up to the last window."""
        self.highest: tuple[float, int] | None = None
        """The largest finite norm, and the window's x."""
        self.healed: dict[str, int] = {}
        """Modules that ``heal`` put in float32, in order, and the x of the window."""
        self.retried = 0
        """Windows that overflowed, ran again and stepped."""
        self.streak = 0
        """Skipped windows in a row, up to the last window."""
        self.mistakes: list[str] = []
        """Mistakes of the script, each with the remedy."""

    def begin(self, start: Start) -> None:
        last = self.sessions[-1] if self.sessions else None
        if last is not None and last.ended and last.error is None and last.last_step < 0:
            # The launcher attached, then the script: nothing was trained with these settings.
            del self.sessions[-1]
        self.is_scaled |= start.facts.get("precision") not in ("no", "bf16", "fp8")
        self.sessions.append(Session(start, self.last_x + 1 if self.windows else 0))

    def add_mistake(self, text: str) -> None:
        if text and text not in self.mistakes:
            self.mistakes.append(text)

    def end(self, end: End) -> None:
        session = self.sessions[-1]
        session.seconds = max(session.seconds, end.time)
        session.ended, session.error = True, end.error

    def add(self, record: Record) -> None:
        """Add the next window of the session."""
        session = self.sessions[-1]
        x = session.first_x + record.index
        if session.last_step < 0:
            self.streak = self.bad_at_end = 0
            self._steps = 0
            # A growth tracker that goes on comes from a checkpoint.
            self._good_scale = record.scale if record.growth_tracker > 1 else None
        self.first_scale = self.first_scale if self.windows else record.scale
        session.last_step = record.index
        session.seconds = max(session.seconds, record.time)
        self.last_x = x
        self.windows += 1
        self.skips += record.skipped
        self.streak = self.streak + 1 if record.skipped else 0
        self.retried += record.retries > 0 and not record.skipped
        if record.first is not None:
            self.first = (x, record.first)
        self.overflowed = record.overflowed or self.overflowed
        session.add_loss(record.loss)
        self._add_norm(x, record)
        self._add_scale(x, record)
        for name in record.healed:
            self.healed.setdefault(name, x)
        if record.healed:  # the scale goes back up, and may be too high once more
            self._good_scale, self._steps, self.streak = None, 0, 0

    def _add_norm(self, x: int, record: Record) -> None:
        norm = record.grad_norm
        is_finite = norm is None or math.isfinite(norm)
        if norm is not None and is_finite:
            self.highest = max(self.highest or (-1.0, 0), (norm, x), key=lambda found: found[0])
        is_bad = failed_in_forward(record) or not (is_finite or record.skipped)
        if is_bad := is_bad and not record.healed:
            self.bad.include(x)
            if not record.skipped:
                self.bad_steps.include(x)
        self.bad_at_end = self.bad_at_end + 1 if is_bad else 0

    def _add_scale(self, x: int, record: Record) -> None:
        scale, after = record.scale, record.next_scale
        self.last_scale = after
        self.lowest = min(self.lowest or (math.inf, x), (min(scale, after), x))
        if not record.skipped:
            self._steps += 1
            if after > scale or (self._good_scale is None and self._steps >= SETTLED):
                self._good_scale = min(scale, self._good_scale or scale)
            return
        kind = self.last_kind = self._kind_of(record)
        self.kinds[kind] += 1
        if kind == "spike":
            return
        self._steps = 0
        if kind == "other":
            self.others.include(x)

    def _kind_of(self, record: Record) -> SkipKind:
        if record.spike and not record.found_inf:
            return "spike"
        if failed_in_forward(record):
            return "forward"
        if self._good_scale is not None:
            return "growth" if record.scale > self._good_scale else "other"
        return "search" if record.scale > max(1.0, self.floor) else "other"

    @property
    def settings(self) -> Mapping[str, Any]:
        return self.sessions[-1].start.settings

    @property
    def floor(self) -> float:
        """``min_scale`` of the last session; 0 without one."""
        return self.settings.get("min_scale") or 0.0

    @property
    def is_stuck(self) -> bool:
        """Whether too many windows were skipped at the end, or the skips ended the run."""
        error = (self.sessions[-1].error if self.sessions else None) or ""
        failing = min(self.streak, self.bad_at_end) >= FAILING
        ended = self.streak > 0 and error.startswith("OverflowStreakError")
        return self.streak >= STUCK or failing or ended

    @property
    def kind(self) -> Kind:
        """The course of the run in one word."""
        if self.skips == self.windows:
            return "untrained"
        if self.is_stuck:
            return "stuck"
        if (self.bad_at_end and not self.streak) or self.sessions[-1].has_risen:
            return "diverged"
        lost = self.kinds["other"] + self.kinds["forward"]
        return "partly" if lost > MANY_SKIPPED * self.windows and not self.healed else "stepped"

    def place(self, x: int) -> str:
        """``step 410``, or ``step 12 of session 2`` where there are several."""
        index = max(0, bisect_right([s.first_x for s in self.sessions], x) - 1)
        step = x - self.sessions[index].first_x
        return f"step {step}" + (f" of session {index + 1}" if len(self.sessions) > 1 else "")


def failed_in_forward(record: Record) -> bool:
    """Whether inf or NaN arose before the scale multiplied the loss, as far as is known."""
    first = record.first or {"where": ""}
    made = first.get("output") or ()  # in a live record inf is a text
    is_loss = first["where"] == "loss" and not all(math.isfinite(float(each)) for each in made)
    return record.has_bad_loss or first["where"] == "forward" or is_loss
