"""``step_mode="auto"`` chooses by windows' times; here they are made up."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from itertools import combinations
from statistics import fmean, pstdev

import pytest

from accel_scaler.optimizer_step.mode_choice import (
    LONGEST_TURN,
    MANY,
    SPAN,
    TURN,
    ModeChoice,
    rank_deviation,
)

Length = Callable[[int, bool], float]
"""Seconds of a window, by its number and whether its update ran beside."""
MINUTE = 60.0


class Run:
    """Windows of made-up lengths, and what was chosen."""

    def __init__(self, length: Length, skipped: Callable[[int], bool] = lambda n: False) -> None:
        self.choice, self.length, self.skipped = ModeChoice(), length, skipped
        self.now = self.spent = 0.0
        self.modes: list[bool] = []
        self.decided: list[int] = []
        """Numbers of the windows at whose end it was decided."""

    def go_on(self, windows: int) -> Run:
        for _ in range(windows):
            number, stepped = len(self.modes), not self.skipped(len(self.modes))
            self.modes.append(self.choice.is_beside)
            if self.choice.note(self.now, stepped):
                self.decided.append(number)
            self.now += self.length(number, self.modes[-1] and stepped)
        return self

    def cost(self) -> float:
        """Its time over that of the better way throughout."""
        ways = (sum(self.length(n, way) for n in range(len(self.modes))) for way in (False, True))
        return self.now / min(ways)


@pytest.mark.parametrize("beside", [0.5, 0.6, 0.8, 0.97, 1.03, 1.2, 1.6, 1.99, 2.2, 3.4])
def test_the_faster_way_is_chosen_and_trying_costs_at_most_two_percent_of_500(
    beside: float,
) -> None:
    run = Run(lambda _, is_beside: beside if is_beside else 1.0).go_on(500)
    assert run.choice.is_beside == (beside < 1.0)
    assert len(run.decided) == 1
    assert run.cost() < 1.02
    assert run.choice.means == (1.0, pytest.approx(beside))


@pytest.mark.parametrize("beside", [0.6, 0.85, 0.95, 1.05, 1.15, 1.5])
@pytest.mark.parametrize("noise", [0.05, 0.3])
def test_noise_and_outliers_cost_little(beside: float, noise: float) -> None:
    costs = []
    for seed in range(40):
        r = random.Random(seed)
        factors = [r.gauss(1.0, noise) + 20.0 * (r.random() < 0.04) for _ in range(500)]
        run = Run(lambda n, way, f=factors: (beside if way else 1.0) * max(f[n], 0.1))
        costs.append(run.go_on(500).cost())
    assert sorted(costs)[20] < 1.02
    assert sum(costs) / len(costs) < 1.03


@pytest.mark.parametrize("slow_way", [False, True])
def test_what_takes_long_in_one_way_only_counts(slow_way: bool) -> None:
    """As beside where other programs want the cores; the medians are the same."""
    right = 0
    for seed in range(40):
        r = random.Random(seed)
        usual = [r.uniform(0.9, 1.1) for _ in range(500)]
        late = [t * (2.5 if r.random() < 0.15 else 1.0) for t in usual]
        run = Run(lambda n, way, t=(usual, late): t[way is slow_way][n]).go_on(500)
        right += run.choice.is_beside is not slow_way
    assert right > 32


@pytest.mark.parametrize("period", [5, 8, 2 * TURN + 1, SPAN])
def test_an_evaluation_of_a_minute_every_few_windows_counts_for_nothing(period: int) -> None:
    run = Run(lambda n, way: (0.8 if way else 1.0) + MINUTE * (n % period == 0)).go_on(500)
    assert run.choice.is_beside
    assert len(run.decided) == 1


@pytest.mark.parametrize("slow", [{1}, {6}, {7}, {6, 9}, {6, 7, 8, 9, 10}, set(range(5))])
def test_what_is_slow_in_both_ways_is_no_early_decision(slow: set[int]) -> None:
    """A pause, a while in which others use the machine, the first windows of a run."""
    run = Run(lambda n, way: 5.0 if n in slow else 0.8 if way else 1.0).go_on(500)
    assert run.choice.is_beside


def test_what_is_far_slower_beside_is_tried_for_one_turn() -> None:
    run = Run(lambda _, way: 2.5 if way else 1.0).go_on(500)
    assert sum(run.modes) == TURN
    assert run.decided == [3 * TURN]


@pytest.mark.parametrize("at", range(0, 24))
def test_one_pause_wherever_it_falls(at: int) -> None:
    run = Run(lambda n, way: (1.1 if way else 1.0) + MINUTE * (n == at)).go_on(500)
    assert not run.choice.is_beside
    assert len(run.decided) == 1


def test_a_change_for_good_is_measured_again() -> None:
    """The batch grows: what was hidden is not any more."""
    run = Run(lambda n, way: (0.8 if way else 1.0) if n < 300 else (2.4 if way else 2.0))
    run.go_on(300)
    assert (run.choice.is_beside, len(run.decided)) == (True, 1)
    run.go_on(4 * SPAN)
    assert (run.choice.is_beside, len(run.decided)) == (False, 2)
    assert run.choice.means == (2.0, pytest.approx(2.4))


def test_a_slow_drift_is_measured_again_once_it_has_added_up() -> None:
    run = Run(lambda n, way: (1.0 + n / 1000) * (0.8 if way else 1.0)).go_on(1000)
    assert all(run.modes[number + 1] for number in run.decided)
    assert 2 <= len(run.decided) <= 4


@pytest.mark.parametrize("length", [1, SPAN // 3, SPAN])
def test_a_change_that_passes_is_not(length: int) -> None:
    slow = range(200, 200 + length)
    run = Run(lambda n, way: (0.8 if way else 1.0) * (3.0 if n in slow else 1.0)).go_on(800)
    assert len(run.decided) == 1


def test_windows_beside_a_skip_do_not_count() -> None:
    """They are over sooner, or take far longer where the overflow is searched for."""
    skipped = {n for n in range(500) if n % 7 == 3 or n < 9}

    def length(n: int, is_beside: bool) -> float:
        return 0.1 if n in skipped else 50.0 if n - 1 in skipped else 0.8 if is_beside else 1.0

    run = Run(length, skipped.__contains__).go_on(500)
    assert run.choice.is_beside
    assert run.choice.means == (pytest.approx(1.0), pytest.approx(0.8))


def test_nothing_is_decided_while_every_window_is_skipped() -> None:
    run = Run(lambda n, way: 1.0, lambda n: True).go_on(200)
    assert run.decided == []
    run.skipped = lambda n: False
    assert run.go_on(2 * 2 * LONGEST_TURN * MANY).decided != []


def test_equal_ways_are_decided_in_the_end() -> None:
    run = Run(lambda n, way: 1.0 + (n * 7 % 10) / 10).go_on(2 * LONGEST_TURN * MANY)
    assert len(run.decided) == 1


def test_a_clock_that_stands_still_is_no_error() -> None:
    run = Run(lambda n, way: 0.0).go_on(500)
    assert len(run.decided) == 1
    assert run.choice.means == (0.0, 0.0)


def test_ranks_that_measure_otherwise_choose_what_rank_0_does() -> None:
    """They ask at the same windows, and no other ones."""
    answers: list[tuple[int, int]] = []
    windows = 700

    def lead(n: int, way: bool) -> float:
        return (0.8 if way else 1.0) if n < 300 else (2.4 if way else 2.0)

    def play(length: Length, agree: Callable[[int, int], int]) -> list[bool]:
        choice, now, modes = ModeChoice(), 0.0, []
        for n in range(windows):
            modes.append(choice.is_beside)
            choice.note(now, n % 11 != 4, lambda answer, n=n: agree(n, answer))
            now += length(n, modes[-1])
        return modes

    def told(n: int, answer: int) -> int:
        answers.append((n, answer))
        return answer

    expected = play(lead, told)
    left = list(answers)

    def asked(n: int, answer: int) -> int:
        at, given = left.pop(0)
        assert at == n
        return given

    for seed in range(5):
        left = list(answers)
        r = random.Random(seed)
        assert play(lambda n, way, r=r: r.random(), asked) == expected
        assert left == []


def test_the_rank_deviation_is_that_of_the_u_test_counted_out() -> None:
    """By every way to deal the values out, where all are as likely: mean and deviation of U."""
    low, high = [3.0, 1.0, 4.0], [1.5, 9.0, 2.6, 5.0]
    values = low + high

    def count(some: Iterable[float]) -> int:
        mine = set(some)
        return sum(a < b for a in mine for b in set(values) - mine)

    counts = [count(some) for some in combinations(values, len(low))]
    expected = (count(low) - fmean(counts)) / pstdev(counts)
    assert rank_deviation(low, high) == pytest.approx(expected)
    assert rank_deviation(high, low) == pytest.approx(-expected)
    assert rank_deviation([1.0, 1.0], [1.0]) == 0.0  # ties
