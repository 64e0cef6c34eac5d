"""What became of a run, from its records in order: the same live and from the file."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from ..console import number
from .outcome import THE_LOSS, Outcome
from .record import Record
from .skip_kinds import SkipKinds, failed_in_forward

MAX_FALLS = 8
MAX_FIRSTS = 50
MAX_HEALED = 256
DEEP_FALL = 6.0
"""Halvings of the scale, growth apart, that are no longer ordinary."""
REPEATED = 3

LEVEL = 5
"""Losses that say where the loss is."""
RAN_AWAY = 10.0
"""Times what it was at first."""
SMALL_LOSS = 0.1
"""A loss that begins nearer to 0, as a policy gradient's, is taken to begin here."""


@dataclass(slots=True)
class Fall:
    """Windows that overflowed with no growth of the scale between them."""

    first_x: int
    last_x: int
    high: float
    low: float
    skips: int = 0
    kinds: Counter[str] = field(default_factory=Counter)
    """Of these skips."""
    origins: Counter[str] = field(default_factory=Counter)
    """In how many of them the overflow began where."""

    @property
    def is_search(self) -> bool:
        """The scale settled, at the beginning of a session."""
        return 2 * self.kinds["search"] > self.skips

    @property
    def doublings(self) -> float:
        """log2 of the ratio; inf when the scale reached 0."""
        if self.low >= self.high:
            return 0.0
        return math.log2(self.high) - math.log2(self.low) if self.low > 0 else math.inf


class LossLevels:
    """The finite losses of a session, at its beginning and now."""

    def __init__(self) -> None:
        self._first: list[float] = []
        self._last: deque[float] = deque(maxlen=LEVEL)
        self._count = 0

    def add(self, loss: float) -> None:
        """Of one more window."""
        self._first += [loss] * (len(self._first) < LEVEL)
        self._last.append(loss)
        self._count += 1

    def rise(self) -> tuple[float, float] | None:
        """Medians of the first losses and of the last, where these ran away: they are above ten
        times the largest of the first. Fewer than four losses say nothing."""
        size = min(LEVEL, self._count // 2)
        if size < 2:
            return None
        first, last = self._first[:size], list(self._last)[-size:]
        now = median(last)
        ran_away = now > RAN_AWAY * max(SMALL_LOSS, *map(abs, first))
        return (median(first), now) if ran_away else None


class Diagnosis:
    """Decides of what kind each skip was, and what became of the run. Bounded; holds no tensors.

    ``x`` counts windows; of a file with several sessions, over all of them.
    """

    def __init__(self) -> None:
        self.windows = self.skips = self.last_x = 0
        self.kinds = SkipKinds()
        self.longest_streak = self.longest_streak_x = 0
        self.is_scaled = False
        """It runs with a loss scale."""
        self._knows_scaled = False
        self.min_scale: float | None = None
        self.first_scale = self.last_scale = 0.0
        self.lowest: tuple[float, int] | None = None
        """The lowest scale that a window was given or left behind, and the window's x."""
        self.has_moved = False
        """A window has stepped with a learning rate that was not 0, or that nobody knows."""
        self.firsts: list[tuple[int, dict[str, Any]]] = []
        """``(x, Record.first)``."""
        self.firsts_lost = 0
        self.losses = LossLevels()
        self.loss_windows = self.loss_first_x = self.loss_last_x = 0
        """Those with a loss of inf or NaN, but for those that healed the reason."""
        self.bad_at_end = 0
        """Windows up to the last one that were not finite: the loss, or the norm of a step."""
        self.stepped_bad = self.stepped_bad_x = 0
        """Windows that stepped though their norm was not finite, and the first of them."""
        self.highest: tuple[float, int] | None = None
        """The largest finite norm, and the window's x."""
        self.healed: dict[str, int] = {}
        """Modules in float32 by ``heal``, in order, and the x of the window."""
        self._falls: list[Fall] = []
        self._fall: Fall | None = None

    def begin(self, is_scaled: bool | None = None, min_scale: float | None = None) -> None:
        """A new session: the scale is searched for again.

        Args:
            is_scaled: it runs with a loss scale; None: the first scale other than 1 tells.
            min_scale: the setting.
        """
        self._falls, self._fall = self.falls, None
        self.kinds.begin()
        self.losses, self.bad_at_end = LossLevels(), 0
        self.is_scaled |= bool(is_scaled)
        self._knows_scaled = is_scaled is not None
        self.min_scale = self.min_scale if min_scale is None else min_scale

    def add(self, x: int, record: Record, origin: str | None = None) -> None:
        """One window.

        Args:
            origin: where its overflow began; None: there was none, or nobody knows.
        """
        self.windows += 1
        self.skips += record.skipped
        self.last_x = x
        # A rate that nobody can read without waiting is None.
        self.has_moved |= not record.skipped and (not record.lr or any(r != 0 for r in record.lr))
        if not self._knows_scaled:
            self.is_scaled |= record.skipped or not record.scale == record.next_scale == 1
        for name in record.healed[: MAX_HEALED - len(self.healed)]:
            self.healed.setdefault(name, x)
        if record.first is not None:
            self._keep_first(x, record.first)
        self._add_loss(x, record)
        self._add_norm(x, record)
        self._follow_scale(x, record, origin)

    def _keep_first(self, x: int, first: dict[str, Any]) -> None:
        """The first reports and the last ones."""
        self.firsts.append((x, first))
        if len(self.firsts) > MAX_FIRSTS:
            del self.firsts[MAX_FIRSTS // 2]
            self.firsts_lost += 1

    def _add_loss(self, x: int, record: Record) -> None:
        if record.has_bad_loss and not record.healed:
            self.loss_first_x = self.loss_first_x if self.loss_windows else x
            self.loss_windows += 1
            self.loss_last_x = x
        elif record.loss is not None and math.isfinite(record.loss):
            self.losses.add(record.loss)

    def _add_norm(self, x: int, record: Record) -> None:
        norm = record.grad_norm
        is_bad = norm is not None and not math.isfinite(norm)
        stepped_bad = is_bad and not record.skipped
        if norm is not None and not is_bad and (self.highest is None or norm > self.highest[0]):
            self.highest = (norm, x)
        if stepped_bad:
            self.stepped_bad_x = self.stepped_bad_x if self.stepped_bad else x
            self.stepped_bad += 1
        failed = (stepped_bad or failed_in_forward(record)) and not record.healed
        self.bad_at_end = self.bad_at_end + 1 if failed else 0

    def _follow_scale(self, x: int, record: Record, origin: str | None) -> None:
        scale, after = record.scale, record.next_scale
        if self.windows == 1:
            self.first_scale = scale
        self.last_scale = after
        low = min(scale, after)
        if self.lowest is None or low < self.lowest[0]:
            self.lowest = (low, x)
        was_settling = self.kinds.is_settling
        kind = self.kinds.add(record)
        has_settled = was_settling and not self.kinds.is_settling
        if has_settled and self._fall is not None and self._fall.is_search:
            self._falls, self._fall = self.falls, None
        if kind is not None:
            fall = self._fall = self._fall or Fall(x, x, scale, scale)
            fall.last_x = x
            fall.skips += 1
            fall.kinds[kind] += 1
            fall.origins.update([origin] if origin else [])
            streak = self.kinds.streak
            if streak > self.longest_streak:
                self.longest_streak, self.longest_streak_x = streak, x - streak + 1
        if self._fall is not None and after < scale:
            self._fall.low = min(self._fall.low, after)
        if after > scale or record.healed:
            self._falls, self._fall = self.falls, None

    @property
    def falls(self) -> list[Fall]:
        """The deepest of them, in order."""
        found = [*self._falls, *filter(None, [self._fall])]
        if len(found) > MAX_FALLS:
            found.remove(min(found, key=lambda f: (f.doublings, f.skips)))
        return found

    def is_deep(self, fall: Fall) -> bool:
        """It is no ordinary fall."""
        return fall.doublings >= DEEP_FALL or (self.lowest is not None and self.lowest[0] <= 1.0)

    def real_falls(self) -> list[Fall]:
        """Falls that are neither the search nor the price of growth, the deepest first."""
        falls = [
            f
            for f in self.falls
            if not f.is_search
            and (f.skips > f.kinds["growth"] or f.doublings >= DEEP_FALL)
            and (f.doublings >= 2 or f.skips >= REPEATED)
        ]
        falls.sort(key=lambda f: (-f.doublings, -f.skips))
        return falls if self.is_scaled else []

    def lowest_told(self, place: Callable[[int], str]) -> str:
        """``the scale reached its floor, ...`` or ``the scale fell to 1 (...)``, where an overflow
        has brought it there; else nothing."""
        if self.lowest is None or not self.skips or not self.is_scaled:
            return ""
        (low, x), floor = self.lowest, self.min_scale
        if floor is not None and low <= floor:
            return f"the scale reached its floor, min_scale = {number(floor)} ({place(x)})"
        return f"the scale fell to {number(low)} ({place(x)})" if low <= 1 else ""

    def low(self, place: Callable[[int], str]) -> str:
        """Where the scale fell further than it does in an ordinary run."""
        if low := self.lowest_told(place):
            return low
        worst = next(iter(self.real_falls()), None)
        if worst is None or not self.is_deep(worst):
            return ""
        return f"the scale fell to {number(worst.low)} ({place(worst.last_x)})"

    def outcome(self, place: Callable[[int], str]) -> Outcome:
        """What the verdict is made from; how it ended is left to whoever knows.

        Args:
            place: names a window, as ``step 12``.
        """
        if not self.windows:
            return Outcome()
        kinds, last_x, fall = self.kinds, self.last_x, self._fall
        before = last_x - kinds.streak
        return Outcome(
            windows=self.windows,
            skips=self.skips,
            forward_skips=kinds.forward,
            search_skips=kinds.search,
            growth_skips=kinds.growth,
            scaled=self.is_scaled,
            scale=self.last_scale,
            last=place(last_x),
            streak=kinds.streak,
            trained_until=place(before) if self.windows > kinds.streak else "",
            has_moved=self.has_moved,
            rise=self.losses.rise(),
            bad_at_end=self.bad_at_end,
            firsts=[first for x, first in self.firsts if x > before],
            all_firsts=[first for _, first in self.firsts],
            origins=fall.origins if kinds.streak and fall else Counter(),
            healed=list(self.healed),
            norms=int(self.highest is not None),
            stepped_bad=place(self.stepped_bad_x) if self.stepped_bad else "",
            loss_windows=self.loss_windows,
            low=self.low(place),
        )


def origin_of(record: Record) -> str | None:
    """Where its overflow began, as far as a record alone knows."""
    first = record.first
    if first is not None:
        return THE_LOSS if first["where"] == "loss" else first["module"] or None
    return THE_LOSS if record.loss_nonfinite else next(iter(record.overflowed), None)
