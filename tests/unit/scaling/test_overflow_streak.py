"""What was seen in a run of skips, and which three remedies that leads to, in which order."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest

from accel_scaler.scaling.overflow_streak import MOST_SCALES, Evidence, remedies, scale_path

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
    for scale, floor, bad, broken, began, first in itertools.product(
        (0.25, 1.0, 64.0), (None, 0.25, 1.0), (0, 3), ([], ["w"]), ({}, {"w": 9}), ("", "x. ")
    ):
        if floor is not None and scale < floor:
            continue
        seen = {"min_scale": floor, "bad_losses": bad, "broken": broken, "began": began}
        found = advise(scale, looked=9, first=first, **seen)
        assert len(found) == 3
        assert len(set(found)) == 3


def test_without_a_window_there_is_advice_all_the_same() -> None:
    """A plain scaler may raise before it has looked."""
    assert len(remedies(Evidence(), 1.0)) == 3


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
