"""Chooses, by trying and timing both, whether updates run beside what follows. No torch.

A time is that from one step to the next, whatever is in it: micro-batches, data, an evaluation.
The ways take turns. The choice is made once the times of one way rank below those of the other
(Mann & Whitney 1947), which a pause or another program's burst hardly changes, and its mean is
below, too: where others want the cores, one window in twenty may take three times as long beside,
which ranks do not show. In the mean, what is far longer, an evaluation, counts as :data:`LONG`
medians.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable
from math import sqrt
from statistics import fmean, median

TURN, LONGEST_TURN = 4, 8
"""Steps in one of the first turns, and at most. The first and the last of a turn are not timed."""
FEW, MANY = 2, 7
"""After ``FEW`` rounds of two turns the choice is made if ranks are clear, after ``MANY`` by the
means alone. From the third round on turns are longer, by two steps a round."""
CLEAR = 1.7
"""The ranks are clear beyond so many standard deviations of what chance gives. One exception:"""
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
        self.is_beside, self._turns, self._left = False, 0, TURN - start
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
        self._left -= 1
        if self._left:
            return False
        self._turns += 1
        rounds = self._turns // 2
        self.is_beside = self._turns % 2 == 1
        self._left = min(TURN + 2 * max(rounds - FEW + 1, 0), LONGEST_TURN)
        answer = agree(self._answer(rounds)) if self._turns > 2 else 0
        if answer:
            self.means = self._means()
            self._measure(0)
            self._is_measuring, self.is_beside = False, answer > 1
        return bool(answer)

    def _means(self) -> tuple[float, float]:
        inside, beside = (self._times[way] or [0.0] for way in (False, True))
        most = LONG * max(median(inside), median(beside))
        return fmean(min(s, most) for s in inside), fmean(min(s, most) for s in beside)

    def _answer(self, rounds: int) -> int:
        """0: measure on; 1: inside ``step()``; 2: beside."""
        inside, beside = self._times[False], self._times[True]
        timed = min(len(inside), len(beside))
        if timed >= TURN - 2 and min(beside) > FAR * max(inside):
            return 1
        if rounds < FEW or timed < TURN:  # too early, or many were skipped
            return 0
        of_inside, of_beside = self._means()
        is_beside = of_beside < of_inside
        low, high = (beside, inside) if is_beside else (inside, beside)
        is_clear = rank_deviation(low, high) > CLEAR
        return 1 + is_beside if is_clear or rounds >= MANY else 0

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


def rank_deviation(low: list[float], high: list[float]) -> float:
    """How far the ranks of ``low`` lie below those of ``high``, in standard deviations of what
    chance gives where both are alike: the U test of Mann and Whitney (1947), ties count half."""
    order = sorted(high)
    above = sum(len(high) - (bisect_left(order, s) + bisect_right(order, s)) / 2 for s in low)
    pairs = len(low) * len(high)
    return (above - pairs / 2) / sqrt(pairs * (len(low) + len(high) + 1) / 12)
