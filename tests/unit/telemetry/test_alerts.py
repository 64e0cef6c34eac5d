"""What a tracker is alerted of: each cause once, and a streak again at ten times as many."""

from __future__ import annotations

from typing import Any

import pytest

from accel_scaler.telemetry.alerts import Alarms, Cause
from accel_scaler.telemetry.record import Record


def window(index: int, scale: float, skipped: bool = True, **more: Any) -> Record:
    values: dict[str, Any] = {"next_scale": scale / 2 if skipped else scale, **more}
    return Record(index, scale, skipped=skipped, grad_norm=None, **values)


def told(alarms: Alarms, *records: Record) -> list[tuple[Cause, str]]:
    return [(each.cause, each.text) for r in records for each in alarms.window(r)]


def test_levels_are_those_that_trackers_have() -> None:
    assert [cause.level for cause in Cause] == ["INFO", "WARN", "WARN", "ERROR"]
    assert list(map(int, Cause)) == [1, 2, 3, 4]


def test_the_floor_is_told_once_and_only_after_an_overflow() -> None:
    alarms = Alarms(min_scale=8.0)
    assert told(alarms, window(0, 8.0, skipped=False), window(1, 32.0)) == []
    first = {"text": "forward of a", "where": "forward", "module": "a", "class": "B"}
    low = window(2, 16.0, overflowed=("w", "b"), first=first)
    ((cause, text),) = told(alarms, low, low, window(3, 8.0, next_scale=8.0))
    assert cause is Cause.FLOOR
    assert text == (
        "Window 2 overflowed and left the scale at min_scale=8: overflows from here on cannot be "
        "met by a smaller one. Last seen in: w, b. forward of a."
    )


def test_without_a_floor_it_is_where_a_scale_helps_no_more() -> None:
    alarms = Alarms(None)
    assert told(alarms, window(0, 2.0)) == []
    ((cause, text),) = told(alarms, window(1, 1.0), window(2, 0.5))
    assert cause is Cause.FLOOR
    assert "left the scale at 0.5" in text


def test_each_healed_module_is_told_once() -> None:
    alarms = Alarms(8.0)
    healed = window(4, 8.0, next_scale=64.0, healed=("a", "b.c"))
    found = list(alarms.window(healed))
    assert [(f.cause, f.title) for f in found] == [(Cause.HEALED, "2 modules run in float32 now")]
    assert found[0].text.endswith("from the start: fp32_modules: ['a', 'b.c']")
    assert told(alarms, healed) == []  # the second optimizer of that window
    (again,) = alarms.window(window(9, 64.0, healed=("a", "d")))
    assert again.title == "1 module runs in float32 now"
    assert "fp32_modules: ['d']" in again.text


@pytest.mark.parametrize(
    ("asked", "told_at"), [((30, 300, 3000), [30, 300, 3000]), ((30, 30, 299, 300), [30, 300])]
)
def test_a_streak_is_told_again_at_ten_times_as_many(
    asked: tuple[int, ...], told_at: list[int]
) -> None:
    alarms = Alarms(None)
    found = [each for skips in asked for each in alarms.streak(skips, f"{skips} in a row")]
    assert [each.text for each in found] == [f"{skips} in a row" for skips in told_at]
    assert all(len(each.title) < 64 for each in found)
    (end,) = alarms.ended("OverflowStreakError: x")
    assert (end.cause, end.text) == (Cause.ENDED, "OverflowStreakError: x")
    assert len(end.title) < 64
