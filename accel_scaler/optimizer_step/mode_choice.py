"""Chooses, by trying and timing both, whether updates run beside what follows. No torch.

A time is that from one step to the next, whatever is in it: micro-batches, data, an evaluation.
The ways take turns, and the means of their times are compared: where other programs want the
cores, one window in twenty may take three times as long beside, which a median would not show. What
is far longer, an evaluation, counts as :data:`LONG` medians.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from statistics import fmean, median, quantiles

TURN = 4
"""Steps in a turn of one way; the first and the last of these are not timed."""
FEW, MANY = 2, 12
"""After ``FEW`` rounds of two turns the choice is made if the middle halves of the times lie apart,
after ``MANY`` in any case. One exception:"""
FAR = 2.0
"""If each step of the first turn beside takes more than so many times as long as every step inside,
before that turn and after it, there is no second turn: no pause looks like that."""
LONG = 2.0
"""A time counts as so many medians of the slower way at most."""
SPAN = 64
"""Steps after the decision that are compared with those just after it."""
CHANGED = 1.25
"""The factor by which their medians have to differ, two spans in a row, for a new choice."""


class ModeChoice:
    """Is called at each step, and decides how the update of the next one runs.

    Ranks that step together make the same choice: they call at the same steps, and what one of
    them answers goes through ``agree``.
    """

    def __init__(self) -> None:
        self.is_beside = False
        """How the next update runs: beside what follows, or inside ``step()``."""
        self.means: tuple[float, float] | None = None
        """Seconds a step, inside and beside, at the last decision; None: not yet."""
        self._modes: deque[bool | None] = deque(maxlen=3)
        """Whether each of the last steps ran beside; None: it was skipped."""
        self._last = 0.0
        self._measure(-1)

    def _measure(self, start: int) -> None:
        self._count, self._is_measuring = start, True
        self._times: dict[bool, list[float]] = {False: [], True: []}
        self._usual: float | None = None
        """The median just after the decision."""
        self._changes = 0

    def note(self, now: float, stepped: bool, agree: Callable[[int], int] = int) -> bool:
        """Note that a step begins, or is skipped. Returns whether this call has made the choice.

        Args:
            now: seconds, of any clock that does not go back.
            agree: returns what rank 0 gives it, on every rank.
        """
        self._modes.append(self.is_beside if stepped else None)
        # The steps around it ran the same way: else its time holds some of the other way's.
        is_alike = len(self._modes) == 3 and len(set(self._modes)) == 1 and stepped
        if is_alike and self._count > 0:
            self._times[self.is_beside].append(now - self._last)
        self._last = now
        self._count += 1
        if self._is_measuring:
            return self._take_turns(agree)
        if self._count % SPAN == 0 and agree(self._has_changed()):
            self._measure(0)
        return False

    def _take_turns(self, agree: Callable[[int], int]) -> bool:
        self.is_beside = self._count > 0 and self._count // TURN % 2 == 1
        turns, rest = divmod(self._count, TURN)
        if rest or turns < 3:
            return False
        answer = agree(self._answer(is_last=turns >= 2 * MANY))
        if answer:
            self.means = self._means()
            self._measure(0)
            self._is_measuring, self.is_beside = False, answer > 1
        return bool(answer)

    def _means(self) -> tuple[float, float]:
        inside, beside = (self._times[way] or [0.0] for way in (False, True))
        most = LONG * max(median(inside), median(beside))
        return fmean(min(s, most) for s in inside), fmean(min(s, most) for s in beside)

    def _answer(self, is_last: bool) -> int:
        """0: measure on; 1: inside ``step()``; 2: beside."""
        inside, beside = self._times[False], self._times[True]
        timed = min(len(inside), len(beside))
        if timed >= TURN - 2 and min(beside) > FAR * max(inside):
            return 1
        if timed < FEW * (TURN - 2):  # too early, or many were skipped
            return 0
        of_inside, of_beside = self._means()
        low, high = (beside, inside) if of_beside < of_inside else (inside, beside)
        is_clear = quantiles(low, method="inclusive")[2] < quantiles(high, method="inclusive")[0]
        return (2 if low is beside else 1) if is_clear or is_last else 0

    def _has_changed(self) -> int:
        times = self._times[self.is_beside]
        now = median(times) if times else self._usual
        self._times = {False: [], True: []}
        if now is None or self._usual is None:
            self._usual = now
            return 0
        is_same = self._usual <= now * CHANGED and now <= self._usual * CHANGED
        self._changes = 0 if is_same else self._changes + 1
        return int(self._changes == 2)
