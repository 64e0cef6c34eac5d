"""The limit on skipped windows in a row: when it warns, when it ends the run, what it names."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from accel_scaler import OverflowStreakError
from accel_scaler.scaling.parameter_names import MAX_NAMES
from accel_scaler.scaling.skips import WARNS_AT, SkipStreak


def warned_at(streak: SkipStreak, counts: range, caplog: pytest.LogCaptureFixture) -> list[int]:
    """The counts of skips at which a warning is logged."""
    found = []
    for skips in counts:
        wants = streak.wants_names(skips - 1)
        with caplog.at_level(logging.WARNING):
            caplog.clear()
            streak.check(skips, lambda: 1.0)
        if caplog.records:
            found.append(skips)
        assert wants == bool(caplog.records), "names are looked for where they are logged"
    return found


def test_a_run_without_a_limit_is_warned_of_ever_more_rarely(
    caplog: pytest.LogCaptureFixture,
) -> None:
    streak = SkipStreak(None)
    assert warned_at(streak, range(1, 400), caplog) == [WARNS_AT, 10 * WARNS_AT]
    streak.check(0, lambda: 1.0)
    assert warned_at(streak, range(1, 40), caplog) == [WARNS_AT]


def test_where_nothing_is_scaled_the_first_skip_is_an_event(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is no search for a scale."""
    streak = SkipStreak(None)
    streak.names.update(["layer3"])
    for skips in (1, 2, 0, 1):
        streak.check(skips, None)
    (text,) = caplog.messages
    assert "layer3" in text
    assert "scale" not in text
    with pytest.raises(OverflowStreakError):
        SkipStreak(0).check(1, None)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(("limit", "at"), [(1, 1), (3, 1), (9, 3)])
def test_a_run_with_a_limit_is_warned_of_at_a_third_and_ends_after_it(
    limit: int, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    streak = SkipStreak(limit)
    assert warned_at(streak, range(1, limit), caplog) == ([at] if at < limit else [])
    streak.check(limit, lambda: 1.0)
    assert streak.wants_names(limit)
    with pytest.raises(OverflowStreakError, match=f"{limit + 1} steps in a row were skipped"):
        streak.check(limit + 1, lambda: 1.0)


def error_of(streak: SkipStreak, cause: Callable[[], str] = str) -> str:
    with pytest.raises(OverflowStreakError) as caught:
        streak.check(2, lambda: 0.125, cause)
    return str(caught.value)


def test_the_error_has_names_scale_and_origin_and_the_next_run_starts_over() -> None:
    streak = SkipStreak(1)
    streak.names.update(f"layer{i}" for i in range(MAX_NAMES + 2))
    streak.names.update(["layer3"])
    text = error_of(streak)
    assert "2 steps in a row were skipped, max_consecutive_skips=1 allows 1. " in text
    assert "layer3, layer0, layer1, layer2, layer4 and 2 more. The scale is now 0.125. " in text
    assert text.endswith(" Look at the data and the loss of these steps.")
    streak.names.update(["layer3"])
    streak.origin = "It began in layer4"  # names say less
    text = error_of(streak)
    assert text.endswith("It began in layer4. Look at the data and the loss of these steps.")
    assert "layer3" not in text
    streak.origin = "It began in layer4"
    text = error_of(streak, lambda: "Step 1: layer4. Next: heal.")
    assert text.endswith("before the run of skips. Step 1: layer4. Next: heal.")
    assert (streak.names, streak.origin) == ({}, "")
