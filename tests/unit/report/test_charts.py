"""The charts and the heat map as data: what the page is drawn from is what is in the file."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import telemetry_files as t

from accel_scaler.report.charts import MAX_MARKS, MAX_RATES, Chart, charts
from accel_scaler.report.heatmap import MAX_ROWS, HeatMap, heatmap, shorten
from accel_scaler.report.html import MAX_SESSIONS, html_page, page_data
from accel_scaler.report.key_numbers import key_numbers
from accel_scaler.report.reader import read_run
from accel_scaler.report.run import Run
from accel_scaler.report.samples import MAX_BINS, Bins
from accel_scaler.telemetry import Record
from accel_scaler.telemetry.findings import skips

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
    run = read(tmp_path, windows(9, loss=float, largest_gradient=lambda s: 10.0))
    assert [each.name for each in charts(run)] == NAMES
    bare = read(tmp_path, [t.start(precision="no"), t.window(0, grad_norm=None, lr=[])])
    assert charts(bare) == []
    assert charts(read(tmp_path, [t.start()])) == []


def test_the_loss_is_drawn_as_it_is_and_skips_are_marked_on_it(tmp_path: Path) -> None:
    losses: list[Any] = [3.0, -1.5, "nan", 0.0, None, 2.0, "inf"]
    lines = windows(7, loss=lambda s: losses[s], skipped=lambda s: s in (1, 4))
    loss = chart("loss", read(tmp_path, lines))
    (line,) = loss.lines
    assert line.y == [3.0, -1.5, None, 0.0, None, 2.0, None]
    assert (line.low, line.high, line.per_bin) == ([], [], "")
    skipped, bad = loss.marks
    assert (skipped.label, skipped.bins, skipped.y) == ("2 skipped windows", [1, 4], [-1.5, None])
    assert (bad.label, bad.bins, bad.y) == ("inf or NaN", [2, 6], [None, None])


def test_a_spike_that_was_skipped_is_marked_on_the_loss_and_on_the_norm(tmp_path: Path) -> None:
    spike = {"skipped": True, "spike": True, "next_scale": 1.0, "grad_norm": 1e4}
    nan = {"skipped": True, "found_inf": True, "next_scale": 1.0, "grad_norm": "nan"}
    lines = [t.start(precision="bf16"), t.window(0, 1.0, loss=0.5), t.window(1, 1.0, loss=9.0)]
    lines[2] |= spike
    run = read(tmp_path, [*lines, t.window(2, 1.0, loss=0.5) | nan, t.window(3, 1.0, loss=0.25)])
    marks = {name: {m.label: m.bins for m in chart(name, run).marks} for name in ("loss", "norm")}
    assert marks["loss"] == {"2 skipped windows": [1, 2], "1 skipped spike": [1]}
    assert marks["norm"] == {"inf or NaN": [2], "1 skipped spike": [1]}
    assert {each.name for each in charts(run)} == {"loss", "norm", "lr", "time"}
    page = html_page(run)
    assert "1 spikes" in page
    for word in ("fp16", "float16", "oss scal", "growth"):
        assert word not in page.split("<h2>Settings")[0], word


def test_windows_that_ran_again_are_marked_on_the_scale_and_lost_nothing(tmp_path: Path) -> None:
    lines = windows(6)
    for step in (0, 3):
        lines[step + 1] |= {"retries": 2, "first_scale": 262144.0, "retry_us": 250_000}
    lines[5] |= {"retries": 16, "first_scale": 65536.0, "retry_us": 500_000} | {"skipped": True}
    run = read(tmp_path, lines)
    marks = {each.label: each.bins for each in chart("scale", run).marks}
    assert marks == {"1 skipped window": [4], "2 windows run again": [0, 3]}
    (again,) = [each for each in key_numbers(run) if "again" in each.name]
    assert (again.value, again.more[:4]) == ("2", "1 s;")
    assert "2 windows overflowed and ran again, in 1 s; batches lost: 1." in skips(run).title


def test_a_long_run_keeps_its_means_and_its_extremes(tmp_path: Path) -> None:
    count = 3000
    run = read(tmp_path, windows(count, loss=float, scale=lambda s: 2.0 ** (s % 2)))
    assert run.bins.width == 4
    raw = chart("loss", run).lines[0]
    assert raw.per_bin == "mean of 4 windows, band from the least to the most"
    assert raw.y == [pytest.approx(s + 1.5) for s in range(0, count, 4)]
    assert (raw.low, raw.high) == ([*range(0, count, 4)], [*range(3, count, 4)])
    (scale,) = chart("scale", run).lines
    assert (set(scale.y), set(scale.low), set(scale.high)) == ({2.0}, {1.0}, {2.0})


def test_many_skips_are_ticks_below_the_line_instead_of_crosses_on_it(tmp_path: Path) -> None:
    for count, shape in ((MAX_MARKS, "cross"), (MAX_MARKS + 1, "tick")):
        run = read(tmp_path, windows(2 * count, loss=float, skipped=lambda s: s % 2 == 0))
        for name in ("loss", "scale"):
            marks = chart(name, run).marks[0]
            assert (marks.shape, len(marks.bins)) == (shape, count)
            assert (marks.y == [None] * count) == (shape == "tick")


def test_groups_with_one_learning_rate_share_a_line(tmp_path: Path) -> None:
    run = read(tmp_path, windows(5, lr=lambda s: [0.1 * s, 0.1 * s, 0.5, "nan", 1.0, 2.0]))
    found = {line.label: line.y for line in chart("lr", run).lines}
    expected = [pytest.approx(0.1 * s) for s in range(5)]
    assert found == {"group 0, 1": expected, "group 2": [0.5] * 5}
    alone = read(tmp_path, windows(5, lr=lambda s: [0.1] * MAX_RATES))
    assert [x.label for x in chart("lr", alone).lines] == ["learning rate"]


def test_the_time_of_a_step_is_what_the_clock_says(tmp_path: Path) -> None:
    lines = t.story(6, lambda *_: False, with_times=True)
    lines += t.story(3, lambda *_: False)  # a session without times
    run = read(tmp_path, lines)
    found = {line.label: line.y for line in chart("time", run).lines}
    # Nobody knows when a session's first window began.
    assert found["whole step (ms)"] == [
        None,
        *[pytest.approx(100.0)] * 5,
        None,
        *[pytest.approx(100)] * 2,
    ]
    assert found["optimizer's update (ms)"] == [*[pytest.approx(30.0)] * 6, None, None, None]
    assert found["waiting for it (ms)"] == [*[pytest.approx(2.0)] * 6, None, None, None]
    assert run.windows_per_second == pytest.approx(10.0)


def test_numbers_of_gradients_have_their_limits(tmp_path: Path) -> None:
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
        assert line.y == values
        assert (limit.label, limit.y) == (label, height)
        assert [i for marks in found.marks for i in marks.bins] == bad


def test_beginnings_of_sessions_are_marked_but_not_too_many(tmp_path: Path) -> None:
    session = windows(3)
    axis = json.loads(page_data(read(tmp_path, session * 4), [], None))["axis"]
    assert axis == {"sessions": [[2, 3], [3, 6], [4, 9]], "last": 11}
    many = json.loads(page_data(read(tmp_path, session * 100), [], None))["axis"]["sessions"]
    assert 1 < len(many) <= MAX_SESSIONS
    assert all(x == 3 * (number - 1) for number, x in many)


def test_the_page_gets_these_numbers_and_nothing_that_json_lacks(tmp_path: Path) -> None:
    lines = windows(
        40,
        loss=lambda s: 1 / 3 if s else 1e300,
        grad_norm=lambda s: ["inf", "nan", 5e-324, 1e300, 0.0][s % 5],
        scale=lambda s: 0.0 if s == 9 else 2.0**40,
        lr=lambda s: ["inf"],
    )
    run = read(tmp_path, lines)
    found = charts(run)
    data = json.loads(page_data(run, found, None), parse_constant=pytest.fail)
    by_name = {each["name"]: each for each in data["charts"]}
    assert list(by_name) == [each.name for each in found]
    assert by_name["loss"]["lines"][0]["y"][1] == 0.333333
    assert by_name["scale"]["lines"][0]["y"][8:10] == [2**40, None]
    for each in data["charts"]:
        for line in each["lines"]:
            drawn = [y for y in line["y"] if y is not None]
            assert all(abs(y) <= 1e60 for y in drawn)
            assert each["scale"] == "linear" or min(drawn) > 0


# Bins.


@pytest.mark.parametrize("count", [1, 2, MAX_BINS, MAX_BINS + 1, 5000])
def test_bins_hold_every_window_once_whatever_their_number(count: int) -> None:
    rng = random.Random(count)
    losses = [rng.gauss(0, 2) for _ in range(count)]
    times = [0.5 + 0.25 * x + 0.001 * x * x for x in range(count)]
    bins = Bins()
    for x, loss in enumerate(losses):
        skipped = x % 5 == 0
        record = Record(x, 1.0, 1.0, skipped, None, loss=loss, time=times[x], max_norm=float(x))
        bins.include(x, record, times[x] - times[x - 1] if x else None)
    assert len(bins.done) <= MAX_BINS
    assert [b.windows for b in bins.done[:-1]] == [bins.width] * (len(bins.done) - 1)
    assert [b.x for b in bins.done[1:]] == [b.last_x + 1 for b in bins.done[:-1]]
    assert bins.done[-1].last_x == count - 1
    for b in bins.done:
        part, mean = losses[b.x : b.last_x + 1], b.series["loss"]
        assert b.windows == mean.count == len(part)
        assert (mean.low, mean.high, mean.last) == (min(part), max(part), part[-1])
        assert mean.middle == pytest.approx(sum(part) / len(part))
        assert (b.skips, b.max_norm) == (
            sum(x % 5 == 0 for x in range(b.x, b.last_x + 1)),
            b.last_x,
        )
        steps = [times[x] - times[x - 1] for x in range(b.x, b.last_x + 1) if x > 0]
        assert b.series["seconds"].total == pytest.approx(sum(steps))


# The heat map.


def heat_of(tmp_path: Path, names: list[str], *columns: list[float]) -> HeatMap:
    lines = [t.start(), t.names(names)]
    lines += [t.window(s, norms=t.norms(values)) for s, values in enumerate(columns)]
    heat = heatmap(read(tmp_path, lines))
    assert heat is not None
    return heat


def test_cells_are_the_norms_of_the_file(tmp_path: Path) -> None:
    heat = heat_of(tmp_path, ["a", "b"], [1.0, 0.5], [0.0, math.inf], [math.nan, 2.0])
    assert (heat.columns, heat.rows) == ([0, 1, 2], ["a", "b"])
    assert (heat.low, heat.high) == (0.5, 2.0)
    run = read(tmp_path, [t.start(), t.window(0)])
    data = json.loads(page_data(run, [], heat))["heatmap"]
    assert data["norms"] == [[1.0, 0.0, -1.0], [0.5, -1.0, 2.0]]


def test_norm_columns_are_evenly_spread_and_exact(tmp_path: Path) -> None:
    lines = [t.start(), t.names(["a", "b"])]
    lines += [t.window(s, norms=t.norms([s, s / 2])) for s in range(1000)]
    columns = read(tmp_path, lines).norms.columns
    assert [x for x, _, _ in columns] == list(range(0, 1000, 8))
    assert all(list(norms) == [x, x / 2] for x, _, norms in columns)


def test_labels_are_short_and_without_what_all_begin_with(tmp_path: Path) -> None:
    names = [f"model.h.{n}.attn.weight" for n in (1, 2, 11)]
    labels = heat_of(tmp_path, names, [1.0] * 3).wide
    assert labels == ["1.attn.weight", "2.attn.weight", "11.attn.weight"]
    assert heat_of(tmp_path, ["weight"], [1.0]).wide == ["weight"]
    assert shorten("a" * 50 + "z", 12) == "aaaa…aaaaaaz"
    assert all(len(shorten("y" * 90, limit)) == limit for limit in range(3, 40))


def test_parameters_beyond_the_rows_share_them(tmp_path: Path) -> None:
    names = [f"m.{n}" for n in range(MAX_ROWS + 1)]
    heat = heat_of(tmp_path, names, [1.0, 3.0, *[2.0] * (MAX_ROWS - 1)])
    assert (heat.rows[0], heat.rows[-1], heat.wide[0]) == ("m.0 to m.1", f"m.{MAX_ROWS}", "0")
    assert (heat.norms[0], heat.norms[-1]) == ([3.0], [2.0])
    heat = heat_of(tmp_path, names, [math.inf, 3.0, *[2.0] * (MAX_ROWS - 1)])
    assert heat.norms[:2] == [[-1.0], [2.0]]
