"""Rows of our own in a wandb run: none of the script's is dropped or moved, and none of ours."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from tracker_fakes import WandbRun

from accel_scaler.integrations import wandb_rows
from accel_scaler.integrations.wandb_rows import WINDOW, WandbRows

WINDOWS = 30

Log = Callable[[WandbRows, int, "int | None"], None]


def by_accelerate(rows: WandbRows, window: int, step: int | None) -> None:
    rows.before_log(step)
    rows.run.log({"loss": float(window)}, step=step)


def directly(rows: WandbRows, window: int, step: int | None) -> None:
    rows.run.log({"loss": float(window)}, step=step)


def at_windows(window: int) -> int | None:
    return window


def at_samples(window: int) -> int | None:
    return 64 * window


def at_epochs(window: int) -> int | None:
    return window // 10 if window % 10 == 9 else -1


def every_seventh(window: int) -> int | None:
    return window if window % 7 == 6 else -1


def without_steps(window: int) -> int | None:
    return None


def late(window: int) -> int | None:
    return window if window > 20 else -1


STYLES = [at_windows, at_samples, at_epochs, every_seventh, without_steps, late]


def ours(run: WandbRun) -> list[int]:
    return sorted(row[WINDOW] for row in run.rows.values() if WINDOW in row)


def script_rows(style: Callable[[int], int | None]) -> dict[int, float]:
    """What a run has of the script, where nobody else logs."""
    rows = WandbRows(WandbRun())
    for window in range(WINDOWS):
        if (step := style(window)) != -1:
            directly(rows, window, step)
    return {step: row["loss"] for step, row in rows.run.rows.items()}


@pytest.mark.parametrize("interval", [1, 3, 10])
@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("log", [by_accelerate, directly])
def test_all_of_both_arrive(log: Log, style: Callable[[int], int | None], interval: int) -> None:
    run = WandbRun()
    rows = WandbRows(run)
    for window in range(WINDOWS):
        if window % interval == 1 % interval and window >= interval:  # of the window before
            rows.add({WINDOW: window - 1, "scaler/scale": 2.0})
        if (step := style(window)) != -1:
            log(rows, window, step)
    rows.add({WINDOW: WINDOWS, "scaler/scale": 8.0})
    rows.finish()
    assert not run.dropped
    found = {step: row["loss"] for step, row in run.rows.items() if "loss" in row}
    assert found == script_rows(style)
    told = [w - 1 for w in range(interval, WINDOWS) if w % interval == 1 % interval]
    assert ours(run) == [*told, WINDOWS]
    assert run.summary["scaler/scale"] == 8.0
    assert run.axes == {WINDOW: None, "scaler/*": WINDOW}


def test_random_histories_lose_nothing() -> None:
    for seed in range(200):
        dice = random.Random(seed)
        run, step, said = WandbRun(), -1, []
        rows = WandbRows(run)
        for window in range(40):
            if dice.random() < 0.5:
                rows.add({WINDOW: window})
                said.append(window)
            if dice.random() < 0.3:
                step += dice.choice((0, 1, 1, 3, 20))
                step = max(step, 0)
                log = by_accelerate if dice.random() < 0.9 else directly
                log(rows, window, step)
        rows.finish()
        assert not run.dropped, seed
        assert ours(run) == said, seed


def test_a_row_stands_at_its_window_where_the_script_leaves_that_step() -> None:
    run = WandbRun()
    rows = WandbRows(run)
    for window in range(20):
        if window % 4 == 1:
            rows.add({WINDOW: window - 1})
        if window % 10 == 9:
            by_accelerate(rows, window, window)
    assert {step: row.get(WINDOW) for step, row in run.rows.items()} == {
        0: 0, 4: 4, 8: 8, 9: 12, 16: 16, 19: None,
    }  # fmt: skip


def test_until_the_end_the_summary_shows_the_newest() -> None:
    run = WandbRun()
    rows = WandbRows(run)
    for window in range(3):
        rows.add({WINDOW: window, "scaler/scale": float(window), "a histogram": object()})
    assert run.rows == {}
    assert run.summary == {WINDOW: 2, "scaler/scale": 2.0}
    rows.finish()
    assert ours(run) == [0, 1, 2]


def test_a_run_that_goes_on_has_steps_already() -> None:
    run = WandbRun()
    run.step = 500
    rows = WandbRows(run)
    rows.add({WINDOW: 0})
    rows.add({WINDOW: 1})
    by_accelerate(rows, 2, 600)
    rows.finish()
    assert not run.dropped
    assert ours(run) == [0, 1]


def test_what_waits_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wandb_rows, "MOST_ROWS", 10)
    monkeypatch.setattr(wandb_rows, "MOST_DETAILED", 3)
    run = WandbRun()
    rows = WandbRows(run)
    for window in range(100):
        row: dict[str, Any] = {WINDOW: window, "histogram": object()}
        rows.add(row)
    rows.finish()
    found = [row for _, row in sorted(run.rows.items())]
    assert 5 <= len(found) <= 10
    assert [row[WINDOW] for row in found] == sorted(row[WINDOW] for row in found)
    assert found[-1][WINDOW] == 99
    assert [("histogram" in row) for row in found[-3:]] == [True] * 3
    assert not any("histogram" in row for row in found[:-3])
