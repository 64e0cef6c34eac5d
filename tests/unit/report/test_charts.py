"""The charts as data: what the page is drawn from is what is in the file."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import telemetry_files as t

from accel_scaler.report.charts import (
    MANY_MARKS,
    MOST_RATES,
    MOST_SESSIONS,
    SMOOTHED_FROM,
    Chart,
    axis_of,
    charts,
)
from accel_scaler.report.page_data import page_data
from accel_scaler.report.reader import read_run
from accel_scaler.report.run_summary import Run

NAMES = ["loss", "scale", "norm", "lr", "time", "largest"]


def read(tmp_path: Path, lines: list[Any]) -> Run:
    return read_run(t.write(tmp_path / "run.jsonl", lines))


def windows(count: int, **of: Any) -> list[Any]:
    """Windows whose fields are what a function says of their number."""
    return [t.start(), *(t.window(s, **{k: f(s) for k, f in of.items()}) for s in range(count))]


def chart(name: str, run: Run) -> Chart:
    (one,) = [each for each in charts(run) if each.name == name]
    return one


def test_there_is_a_chart_of_all_there_is_and_the_loss_comes_first(tmp_path: Path) -> None:
    full = windows(9, loss=float, largest_gradient=lambda s: 10.0)
    run = read(tmp_path, full)
    assert [each.name for each in charts(run)] == NAMES
    bare = read(tmp_path, [t.start(precision="no"), t.window(0, grad_norm=None, lr=[])])
    assert charts(bare) == []
    assert charts(read(tmp_path, [t.start()])) == []
    for each in charts(run):
        assert each.lines
        assert each.in_words(axis_of(run)).startswith(f"{each.title}, steps 0 to 8: ")


def test_the_loss_is_drawn_as_it_is_and_what_was_skipped_is_marked_on_it(tmp_path: Path) -> None:
    losses: list[Any] = [3.0, -1.5, "nan", 0.0, None, 2.0, "inf"]
    lines = windows(7, loss=lambda s: losses[s], skipped=lambda s: s in (1, 4))
    loss = chart("loss", read(tmp_path, lines))
    (line,) = loss.lines
    assert line.y == [3.0, -1.5, None, 0.0, None, 2.0, None]
    assert (line.low, line.high, line.per_bin) == ([], [], "")
    skipped, bad = loss.marks
    assert (skipped.label, skipped.bins, skipped.y) == ("2 skipped windows", [1, 4], [-1.5, None])
    assert (bad.label, bad.bins, bad.y) == ("inf or NaN", [2, 6], [None, None])
    assert "from 3 to 2, between -1.5 and 3" in loss.in_words(axis_of(read(tmp_path, lines)))


def test_a_smoothed_loss_neither_lags_nor_leaves_what_it_smooths(tmp_path: Path) -> None:
    count, rng = 300, random.Random(0)
    noise = [rng.uniform(-0.5, 0.5) for _ in range(count)]
    lines = windows(count, loss=lambda s: None if s == 7 else 10 - s / 30 + noise[s])
    raw, smooth = chart("loss", read(tmp_path, lines)).lines
    assert (raw.faint, smooth.faint) == (True, False)
    assert raw.y[7] is None is smooth.y[7]
    inside = [y - (10 - s / 30) for s, y in enumerate(smooth.y[30:-30], 30) if y is not None]
    assert max(map(abs, inside)) < 0.25
    assert abs(sum(inside)) / len(inside) < 0.05  # a one-sided average would be 0.3 above
    same = chart("loss", read(tmp_path, windows(60, loss=lambda s: 2.5))).lines[1]
    assert same.y == [pytest.approx(2.5)] * 60
    falls = chart("loss", read(tmp_path, windows(300, loss=lambda s: math.exp(-s / 5)))).lines[1]
    assert falls.y[0] == pytest.approx(1.0)  # begins where the loss began, not where it went
    short = windows(SMOOTHED_FROM - 1, loss=float)
    assert len(chart("loss", read(tmp_path, short)).lines) == 1


def test_a_long_run_keeps_its_means_and_its_extremes(tmp_path: Path) -> None:
    count = 3000
    lines = windows(count, loss=float, scale=lambda s: 2.0 ** (s % 2))
    run = read(tmp_path, lines)
    width = run.bins.width
    assert width == 4
    raw = chart("loss", run).lines[0]
    assert raw.per_bin == "mean of 4 windows, band from the least to the most"
    assert raw.y == [pytest.approx(s + 1.5) for s in range(0, count, width)]
    assert (raw.low, raw.high) == ([*range(0, count, 4)], [*range(3, count, 4)])
    (scale,) = chart("scale", run).lines
    assert (set(scale.y), set(scale.low), set(scale.high)) == ({2.0}, {1.0}, {2.0})


def test_many_skips_are_ticks_below_the_line_instead_of_crosses_on_it(tmp_path: Path) -> None:
    for count, shape in ((MANY_MARKS, "cross"), (MANY_MARKS + 1, "tick")):
        run = read(tmp_path, windows(2 * count, loss=float, skipped=lambda s: s % 2 == 0))
        for name in ("loss", "scale"):
            marks = chart(name, run).marks[0]
            assert (marks.shape, len(marks.bins)) == (shape, count)
            assert (marks.y == [None] * count) == (shape == "tick")


def test_groups_with_one_learning_rate_share_a_line(tmp_path: Path) -> None:
    lines = windows(5, lr=lambda s: [0.1 * s, 0.1 * s, 0.5, "nan", 1.0, 2.0])
    run = read(tmp_path, lines)
    found = {line.label: line.y for line in chart("lr", run).lines}
    assert found == {
        "learning rate of group 0, 1": [0.1 * s for s in range(5)],
        "learning rate of group 2": [0.5] * 5,
    }
    alone = read(tmp_path, windows(5, lr=lambda s: [0.1] * MOST_RATES))
    assert [x.label for x in chart("lr", alone).lines] == [f"learning rate of {MOST_RATES} groups"]


def test_the_time_of_a_step_is_what_the_clock_says(tmp_path: Path) -> None:
    lines = t.story(6, lambda *_: False, with_times=True)
    lines += t.story(3, lambda *_: False)  # a session whose times are not there
    time = chart("time", read(tmp_path, lines))
    found = {line.label: line.y for line in time.lines}
    whole = found["whole step"]
    assert (whole[0], whole[6]) == (None, None)  # nobody knows when a session's first one began
    assert whole[1:6] == [pytest.approx(100.0)] * 5
    expected = {"optimizer's update": 30.0, "waiting for it": 2.0}
    assert {k: y for k, y in found.items() if k != "whole step"} == {
        label: [*[pytest.approx(ms)] * 6, None, None, None] for label, ms in expected.items()
    }


def test_a_run_that_was_not_scaled_has_no_scale(tmp_path: Path) -> None:
    plain = read(tmp_path, [t.start(precision="no"), t.window(0, 1.0), t.window(1, 1.0)])
    assert "scale" not in [each.name for each in charts(plain)]


def test_the_scale_is_that_of_each_window_and_every_skip_is_marked(tmp_path: Path) -> None:
    lines = t.story(300, lambda s, scale: scale > 16384, growth_interval=100)
    found = chart("scale", read(tmp_path, lines))
    given = [w for w in lines if w["kind"] == "window"]
    (line,), (marks,) = found.lines, found.marks
    assert (line.y, line.holds) == ([w["scale"] for w in given], True)
    skipped = [w for w in given if w["skipped"]]
    assert marks.label == f"{len(skipped)} skipped windows"
    assert (marks.bins, marks.y) == ([w["step"] for w in skipped], [w["scale"] for w in skipped])


def test_numbers_of_gradients_have_their_limits_and_those_without_height_are_marked(
    tmp_path: Path,
) -> None:
    norms: list[Any] = [1.0, 2.0, "inf", 0.5, "nan", 4.0]
    largest: list[Any] = [1000.0, None, 1100.0, None, None, None]
    more = {"grad_norm": norms, "largest_gradient": largest}
    of = {key: values.__getitem__ for key, values in more.items()}
    run = read(tmp_path, windows(6, max_norm=lambda s: 1.5, **of))
    expected: dict[str, tuple[list[Any], str, float, list[int]]] = {
        "norm": ([1.0, 2.0, None, 0.5, None, 4.0], "clipped above 1.5", 1.5, [2, 4]),
        "largest": (largest, "end of float16, 65504", 65504.0, []),
    }
    for name, (values, label, height, bad) in expected.items():
        found = chart(name, run)
        (line,), (limit,) = found.lines, found.limits
        assert line.y == [None if y is None else pytest.approx(y) for y in values], name
        assert (limit.label, limit.y) == (label, height)
        assert [i for marks in found.marks for i in marks.bins] == bad
    calm = read(tmp_path, windows(2))
    assert "largest" not in {each.name for each in charts(calm)}


def test_where_sessions_began_is_told_but_not_too_often(tmp_path: Path) -> None:
    session = windows(3)
    axis = axis_of(read(tmp_path, session * 4))
    assert (axis.sessions, axis.last) == (((2, 3), (3, 6), (4, 9)), 11)
    many = axis_of(read(tmp_path, session * 100)).sessions
    assert len(many) <= MOST_SESSIONS
    assert all(x == 3 * (number - 1) for number, x in many)


def test_the_page_gets_these_numbers_and_nothing_that_json_lacks(tmp_path: Path) -> None:
    lines = windows(
        40,
        loss=lambda s: 1 / 3 if s else 1e300,
        grad_norm=lambda s: ["inf", "nan", 5e-324, 1e300][s % 4],
        scale=lambda s: 0.0 if s == 9 else 2.0**40,
        lr=lambda s: ["inf"],
    )
    run = read(tmp_path, lines)
    found = charts(run)
    data = json.loads(page_data(run, axis_of(run), found, None), parse_constant=pytest.fail)
    assert [each["name"] for each in data["charts"]] == [each.name for each in found]
    (loss,) = [each for each in data["charts"] if each["name"] == "loss"]
    assert loss["lines"][0]["y"][1] == 0.333333
    (scale,) = [each for each in data["charts"] if each["name"] == "scale"]
    assert scale["lines"][0]["y"][0] == 2**40
    for each in data["charts"]:
        for line in each["lines"]:
            shown = [y for y in line["y"] if y is not None]
            assert all(math.isfinite(y) for y in shown)
            assert each["scale"] == "linear" or min(shown) > 0
