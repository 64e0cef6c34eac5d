"""A run of skips: what is seen and said of it, its end, and the three remedies, in their order."""

from __future__ import annotations

import itertools
import pickle
import re
from typing import Any

import pytest
import torch
from torch import nn

from accel_scaler import OverflowStreakError
from accel_scaler.scaling.losses import Losses
from accel_scaler.scaling.overflow_streak import (
    MOST_SCALES,
    Evidence,
    OverflowStreak,
    remedies,
    scale_path,
)
from accel_scaler.scaling.parameter_names import MOST_NAMES, ParameterNames

KINDS = {
    "parameters": "parameters are inf or NaN themselves",
    "forward": "h.3 overflows in its forward",
    "loss": "the loss was inf or NaN",
    "floor": "the scale stood at min_scale",
    "layer": "it began in ",
    "falling": "the scale was still falling",
    "below 1": "the scale is below 1",
    "find": "find_overflow='replay' names",
    "rate": "a lower learning rate",
    "float32": "train in float32",
}


def evidence(**seen: Any) -> Evidence:
    return Evidence(**({"windows": 10} | seen))


def order(found: list[str]) -> list[str]:
    """Which of the remedies these are."""
    return [next(kind for kind, start in KINDS.items() if text.startswith(start)) for text in found]


def advise(scale: float, **seen: Any) -> list[str]:
    return order(remedies(evidence(**seen), scale))


LAYER = {"looked": 6, "began": {"h.3.weight": 5, "h.1.weight": 1}}
BROKEN = {"broken": ["w", "b"], "bad_losses": 10}


@pytest.mark.parametrize(
    ("scale", "seen", "found", "words"),
    [
        (1024.0, {}, "falling, find, rate", "init_scale=1024, or raise max_consecutive_skips"),
        (
            1024.0,
            LAYER,
            "layer, falling, find",
            "h.3.weight in 5 of 6 windows: keep it in float32",
        ),
        # No majority.
        (1024.0, {"looked": 6, "began": {"a": 3, "b": 3}}, "falling, find, rate", ""),
        # A bad loss is no matter of the scale or of a layer.
        (0.5, {"bad_losses": 4} | LAYER, "loss, find, rate", "in 4 of these 10 windows"),
        (512.0, {"bad_losses": 10, "first": "x. "}, "loss, rate, float32", ""),
        (512.0, {"bad_losses": 9, "first": "x. "}, "loss, falling, rate", ""),
        # A module that overflows in its forward comes before the loss that it ruined.
        (
            512.0,
            {"bad_losses": 10, "first": "x. ", "module": "h.3"},
            "forward, loss, rate",
            "fp32_modules=['h.3']",
        ),
        (1.0, BROKEN | {"min_scale": 1.0}, "parameters, loss, find", "(w, b)"),
        (4.0, {"min_scale": 4.0}, "floor, find, rate", "min_scale=4:"),
        (8.0, {"min_scale": 4.0}, "falling, find, rate", ""),
        (0.25, {}, "below 1, find, rate", ""),
        (0.25, {"min_scale": 0.25}, "floor, below 1, find", ""),
        # Who has find_overflow is not told to set it.
        (1024.0, {"first": "forward of h.3: inf. "}, "falling, rate, float32", ""),
    ],
)
def test_the_likeliest_remedies_come_first(
    scale: float, seen: dict[str, Any], found: str, words: str
) -> None:
    assert ", ".join(advise(scale, **seen)) == found
    assert words in remedies(evidence(**seen), scale)[0]


def test_there_are_three_whatever_was_seen() -> None:
    assert len(remedies(Evidence(), 1.0)) == 3  # a plain scaler may raise before it has looked
    for scale, floor, bad, broken, began, first in itertools.product(
        (0.25, 1.0, 64.0), (None, 0.25, 1.0), (0, 3), ([], ["w"]), ({}, {"w": 9}), ("", "x. ")
    ):
        if floor is not None and scale < floor:
            continue
        seen = {"min_scale": floor, "bad_losses": bad, "broken": broken, "began": began}
        found = advise(scale, looked=9, first=first, **seen)
        assert len(found) == 3
        assert len(set(found)) == 3


def test_a_long_run_keeps_its_first_and_last_scales() -> None:
    seen = Evidence()
    for number in range(1000):
        seen.add(float(number), number % 2 == 0)
    half = MOST_SCALES // 2
    assert len(seen.scales) == MOST_SCALES
    assert seen.scales[:half] == [float(n) for n in range(half)]
    assert seen.scales[half:] == [float(n) for n in range(1000 - half, 1000)]
    assert (seen.windows, seen.bad_losses) == (1000, 500)


@pytest.mark.parametrize(
    ("scales", "now", "text"),
    [
        ([], 4.0, "4"),
        ([8.0], 4.0, "8 -> 4"),
        ([8.0, 8.0, 8.0, 4.0, 4.0], 4.0, "8 -> 4"),
        ([65536.0, 32768.0], 16384.0, "65536 -> 32768 -> 16384"),
        ([1.0, 0.5], 0.25, "1 -> 0.5 -> 0.25"),
    ],
)
def test_the_path_leaves_repeats_out(scales: list[float], now: float, text: str) -> None:
    assert scale_path(scales, now) == text


def test_a_long_path_keeps_its_ends() -> None:
    text = scale_path([2.0**n for n in range(16, 0, -1)], 1.0)
    assert text == "65536 -> 32768 -> 16384 -> 8192 -> ... -> 8 -> 4 -> 2 -> 1"
    eight = scale_path([2.0**n for n in range(7, 0, -1)], 1.0)
    assert re.findall(r"\d+", eight) == [str(2**n) for n in range(7, -1, -1)]


def streak(limit: int | None = 1) -> OverflowStreak:
    return OverflowStreak(limit, None, ParameterNames())


def broken(*shape: int) -> nn.Parameter:
    """A parameter whose gradient holds an inf."""
    p = nn.Parameter(torch.zeros(shape))
    p.grad = torch.full(shape, float("inf"))
    return p


def test_only_the_skip_that_warns_or_ends_the_run_counts_offenders() -> None:
    fine, none, bad = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2)), broken(2)
    fine.grad = torch.ones(2)
    optimizer = torch.optim.SGD([("fine", fine), ("none", none), ("bad", bad)], lr=1.0)
    params, ours, unlimited = [fine, none, bad], streak(2), streak(None)
    ours.note_skip(params, optimizer, 1)
    assert ours.seen == {}
    ours.note_skip(params, optimizer, 2)
    ours.note_skip([fine, broken(3)], None, 2)
    assert ours.seen == {"bad": 1, "a parameter of shape (3,)": 1}
    unlimited.note_skip(params, optimizer, 99)
    assert unlimited.seen == {}


def test_nothing_is_raised_up_to_the_limit() -> None:
    streak(None).check(10**6, lambda: 1.0)
    streak(3).check(3, lambda: 1.0)
    with pytest.raises(OverflowStreakError, match="Non-finite gradients in: unknown tensors"):
        streak(3).check(4, lambda: 1.0)


def test_the_error_names_the_worst_first_and_counts_the_rest() -> None:
    ours = streak(1)
    ours.count(f"layer{i}" for i in range(MOST_NAMES + 2))
    ours.count(["layer3"])
    with pytest.raises(OverflowStreakError) as caught:
        ours.check(2, lambda: 0.125)
    text = str(caught.value)
    assert "Non-finite gradients in: layer3, layer0, layer1, layer2, layer4 and 2 more." in text
    assert "2 windows in a row overflowed, max_consecutive_skips=1 allows 1" in text
    assert "Scale: 0.125. " in text
    assert ours.seen == {}


def test_a_finite_window_forgets_the_run_and_a_pickle_does_not() -> None:
    ours = OverflowStreak(1, 2.0, ParameterNames())
    ours.count(["w"])
    ours.window_closed(8.0, True, Losses())
    ours.check(1, lambda: 1.0)
    again = pickle.loads(pickle.dumps(ours))
    assert (again.limit, again.seen, again.evidence.scales) == (1, {"w": 1}, [8.0])
    ours.check(0, lambda: 1.0)
    assert (ours.seen, ours.evidence) == ({}, Evidence(min_scale=2.0))
