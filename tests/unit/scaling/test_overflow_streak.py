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
    "forward": "h.3 (Linear) overflows in its forward",
    "loss": "the loss was inf or NaN",
    "floor": "the scale stood at min_scale",
    "layer": "it began in ",
    "falling": "the scale was still falling",
    "below 1": "the scale is below 1",
    "find": "find_overflow=True names",
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


def test_a_scale_that_still_falls_needs_a_lower_start() -> None:
    assert advise(1024.0) == ["falling", "find", "rate"]
    (first, *_) = remedies(evidence(), 1024.0)
    assert "init_scale=1024, or raise max_consecutive_skips" in first


def test_one_layer_in_most_windows_comes_first() -> None:
    seen = {"looked": 6, "began": {"h.3.mlp.weight": 5, "h.1.mlp.weight": 1}}
    assert advise(1024.0, **seen) == ["layer", "falling", "find"]
    (first, *_) = remedies(evidence(**seen), 1024.0)
    assert "it began in h.3.mlp.weight in 5 of 6 windows: run that layer in float32" in first


def test_a_different_layer_each_time_is_none() -> None:
    seen = {"looked": 6, "began": {"a": 3, "b": 3}}  # no majority
    assert advise(1024.0, **seen) == ["falling", "find", "rate"]


def test_a_bad_loss_is_no_matter_of_the_scale_or_of_a_layer() -> None:
    seen = {"bad_losses": 4, "looked": 6, "began": {"a": 6}}
    assert advise(0.5, **seen) == ["loss", "find", "rate"]
    (first, *_) = remedies(evidence(**seen), 0.5)
    assert "in 4 of these 10 windows" in first


def test_where_every_loss_was_bad_no_scale_is_recommended() -> None:
    assert advise(512.0, bad_losses=10, first="x. ") == ["loss", "rate", "float32"]
    assert advise(512.0, bad_losses=9, first="x. ") == ["loss", "falling", "rate"]


def test_a_module_seen_to_overflow_in_its_forward_comes_before_the_loss_it_ruined() -> None:
    seen = {"bad_losses": 10, "first": "x. ", "module": "h.3 (Linear)"}
    assert advise(512.0, **seen) == ["forward", "loss", "rate"]
    (first, *_) = remedies(evidence(**seen), 512.0)
    assert "run that layer in float32" in first


def test_broken_parameters_come_before_everything() -> None:
    seen = {"broken": ["w", "b"], "bad_losses": 10}
    assert advise(1.0, min_scale=1.0, **seen) == ["parameters", "loss", "find"]
    (first, *_) = remedies(evidence(**seen), 1.0)
    assert "(w, b)" in first
    assert "load the last good checkpoint" in first


def test_at_the_floor_the_floor_is_named() -> None:
    assert advise(4.0, min_scale=4.0) == ["floor", "find", "rate"]
    assert advise(8.0, min_scale=4.0) == ["falling", "find", "rate"]
    (first, *_) = remedies(evidence(min_scale=4.0), 4.0)
    assert "min_scale=4:" in first


def test_below_one_a_smaller_scale_does_not_help() -> None:
    assert advise(0.25) == ["below 1", "find", "rate"]
    assert advise(0.25, min_scale=0.25) == ["floor", "below 1", "find"]


def test_who_has_find_overflow_is_not_told_to_set_it() -> None:
    assert advise(1024.0, first="forward of h.3: inf. ") == ["falling", "rate", "float32"]


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


def test_evidence_counts_windows_and_bad_losses_and_forgets() -> None:
    seen = evidence(windows=0, min_scale=2.0)
    for scale, bad in ((8.0, False), (4.0, True), (2.0, True)):
        seen.add(scale, bad)
    assert (seen.windows, seen.bad_losses, seen.scales) == (3, 2, [8.0, 4.0, 2.0])
    seen.looked, seen.began, seen.broken, seen.first = 1, {"w": 1}, ["w"], "x"
    seen.clear()
    assert seen == Evidence(min_scale=2.0)


def test_a_long_run_keeps_its_first_and_last_scales() -> None:
    seen = Evidence()
    for number in range(1000):
        seen.add(float(number), False)
    half = MOST_SCALES // 2
    assert len(seen.scales) == MOST_SCALES
    assert seen.scales[:half] == [float(n) for n in range(half)]
    assert seen.scales[half:] == [float(n) for n in range(1000 - half, 1000)]
    assert seen.windows == 1000


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
    ours, unlimited = streak(2), streak(None)
    ours.note_skip(optimizer, 1)
    assert ours.seen == {}
    ours.note_skip(optimizer, 2)
    ours.note_skip(fine, 2)  # what no optimizer is known of
    ours.note_skip(broken(3), 2)
    assert ours.seen == {"bad": 1, "a parameter of shape (3,)": 1}
    unlimited.note_skip(optimizer, 99)
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


def test_a_finite_window_forgets_the_offenders_and_a_pickle_does_not() -> None:
    ours = streak(1)
    ours.count(["w"])
    ours.check(1, lambda: 1.0)
    again = pickle.loads(pickle.dumps(ours))
    assert (again.limit, again.seen) == (1, {"w": 1})
    ours.check(0, lambda: 1.0)
    assert ours.seen == {}
