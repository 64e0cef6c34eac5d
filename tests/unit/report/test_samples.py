"""What the page draws over windows: loss, rates and times, in bins beside a slow count."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import telemetry_files as t

from accel_scaler.report.reader import read_run
from accel_scaler.report.run_summary import Run
from accel_scaler.report.samples import MAX_BINS, Mean


def read(tmp_path: Path, lines: list[Any]) -> Run:
    return read_run(t.write(tmp_path / "run.jsonl", lines))


def test_a_mean_is_of_finite_numbers_and_the_last_is_of_all() -> None:
    mean = Mean()
    assert (mean.middle, mean.last) == (None, None)
    for value in (-1.0, None, 4.0, math.nan, 0.0, math.inf, None):
        mean.add(value)
    assert (mean.low, mean.high, mean.middle, mean.bad) == (-1.0, 4.0, 1.0, 2)
    assert mean.last == math.inf
    later = Mean()
    mean.merge(later)
    assert mean.last == math.inf
    later.add(9.0)
    mean.merge(later)
    assert (mean.high, mean.middle, mean.last) == (9.0, 3.0, 9.0)
    mean.add(1e308)
    mean.add(1e308)
    assert mean.middle is None


@pytest.mark.parametrize("count", [1, 2, MAX_BINS, 3 * MAX_BINS + 5])
def test_loss_rates_and_times_of_every_window_are_in_a_bin(tmp_path: Path, count: int) -> None:
    times = [round(0.5 + 0.25 * s + 0.001 * s * s, 6) for s in range(count)]
    lines = [
        t.window(s, time=times[s], loss=100.0 / (s + 1), lr=[0.5 / (s + 1), None])
        | {"optimizer_us": 1000, "waited_us": 250}
        for s in range(count)
    ]
    run = read(tmp_path, [t.start(), *lines, t.end(count)])
    done, width = run.bins.done, run.bins.width
    assert sum(b.loss.count for b in done) == count
    for b in done:
        inside = range(b.x, b.last_x + 1)
        losses = [100.0 / (s + 1) for s in inside]
        assert b.loss.middle == pytest.approx(sum(losses) / len(losses))
        assert (b.loss.low, b.loss.high, b.loss.last) == (min(losses), max(losses), losses[-1])
        assert b.lr == (0.5 / (b.last_x + 1), None)
        steps = [times[s] - times[s - 1] for s in inside if s > 0]
        assert b.seconds.count == len(steps)
        assert b.seconds.total == pytest.approx(sum(steps))
        assert b.update.middle == pytest.approx(0.001)
        assert b.waited.middle == pytest.approx(0.00025)
    assert (width > 1) == (count > MAX_BINS)
    assert run.last_loss == 100.0 / count
    assert run.hidden_share == pytest.approx(0.75)
    speed = None if count == 1 else (count - 1) / (times[-1] - times[0])
    assert run.windows_per_second == pytest.approx(speed)


def test_each_session_has_its_own_clock_and_the_speed_is_that_of_the_last(tmp_path: Path) -> None:
    lines = [t.start(), *(t.window(s, time=50.0 + s) for s in range(5))]
    lines += [t.start(), *(t.window(s, time=7.0 + 0.5 * s) for s in range(5))]
    run = read(tmp_path, lines)
    assert [b.seconds.middle for b in run.bins.done] == [None, *[1.0] * 4, None, *[0.5] * 4]
    assert run.windows_per_second == 2.0


def test_a_file_from_before_there_were_losses_has_none(tmp_path: Path) -> None:
    run = read(tmp_path, [t.start(), t.window(0), t.window(1), t.end(2)])
    assert run.last_loss is None
    assert all(b.loss.count == b.loss.bad == 0 for b in run.bins.done)
    assert (run.hidden_share, run.bins.done[0].update.middle) == (None, None)


def test_a_loss_that_is_nan_at_last_is_told_as_it_is(tmp_path: Path) -> None:
    run = read(tmp_path, [t.start(), t.window(0, loss=1.5), t.window(1, loss="nan"), t.window(2)])
    assert run.last_loss is not None
    assert math.isnan(run.last_loss)
