"""What is kept of windows: totals, amendments, bounds, text."""

from __future__ import annotations

import math

import pytest

from accel_scaler.telemetry.history import KEPT_RECORDS, History
from accel_scaler.telemetry.record import Record, Start


def record(index: int, skipped: bool = False, scale: float = 8.0, **rest: object) -> Record:
    values = {"next_scale": scale / 2 if skipped else scale, "grad_norm": 1.0, **rest}
    return Record(index, scale, skipped=skipped, **values)  # type: ignore[arg-type]


def test_a_second_optimizer_amends_the_record_of_its_window() -> None:
    history = History()
    history.add(record(0))
    history.add(record(1))
    history.add(record(1, skipped=True, grad_norm=5.0, overflowed=("w",)))
    assert (history.boundaries, history.skips, len(history.records)) == (2, 1, 2)
    assert "largest finite gradient norm: 5" in history.summary()
    assert history.last_overflow() == ("w",)
    history.add(record(1, skipped=True))
    assert (history.boundaries, history.skips) == (2, 1)


@pytest.mark.parametrize("norm", [math.inf, math.nan, None])
def test_a_norm_that_is_not_finite_is_not_the_largest(norm: float | None) -> None:
    history = History()
    history.add(record(0, grad_norm=norm))
    assert "largest finite gradient norm: not taken" in history.summary()
    history.add(record(1, grad_norm=0.0))
    assert "largest finite gradient norm: 0" in history.summary()


def test_memory_is_bounded_and_totals_are_not() -> None:
    history = History()
    windows = KEPT_RECORDS + 10
    for index in range(windows):
        history.add(record(index, skipped=True, scale=8.0 + index, next_scale=9.0 + index))
    assert len(history.records) == KEPT_RECORDS
    assert (history.boundaries, history.skips) == (windows, windows)
    assert history.records[-1].index == windows - 1


def test_the_summary_says_what_happened() -> None:
    history = History()
    assert history.summary() == "scaler: no step has ended yet"
    history.add(record(0, skipped=True, grad_norm=None, overflowed=("body.weight",)))
    assert "largest finite gradient norm: not taken" in history.summary()
    history.add(record(1, skipped=True, grad_norm=None, overflowed=("head.weight", "head.bias")))
    history.add(record(2, scale=4.0, grad_norm=1234.5678))
    assert history.summary().splitlines() == [
        "3 steps, 2 skipped (66.7 %): 2 while the scale was still being searched for.",
        "scale: 8 at first, 4 now",
        "largest finite gradient norm: 1235",
        "last overflow seen in: head.weight, head.bias",
    ]


def test_the_summary_of_a_run_without_a_scale_speaks_of_none() -> None:
    history = History(start=Start(facts={"precision": "bf16"}))
    history.add(record(0, found_inf=True, skipped=True, grad_norm=None, overflowed=("weight",)))
    history.add(record(1, skipped=True, spike=True, grad_norm=90.0))
    history.add(record(2, grad_norm=2.0))
    first, *rest = history.summary().splitlines()
    assert "3 steps, 2 skipped (66.7 %)" in first
    assert "1 as spikes of the gradient norm" in first
    assert rest == ["largest finite gradient norm: 90", "last inf or NaN seen in: weight"]
