"""The charts as data: they show what is in the file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import telemetry_files as t

from accel_scaler.report.charts import MAX_DRAWN, Chart, charts
from accel_scaler.report.html import html_page, page_data
from accel_scaler.report.reader import Run, read_run
from accel_scaler.report.summary import key_numbers
from accel_scaler.telemetry.findings import skips

NAMES = ["loss", "scale", "norm", "lr", "time"]


def read(tmp_path: Path, lines: list[Any]) -> Run:
    return read_run(t.write(tmp_path / "run.jsonl", lines))


def windows(count: int, **of: Any) -> list[Any]:
    """Windows whose fields are what a function says of their number."""
    return [t.start(), *(t.window(s, **{k: f(s) for k, f in of.items()}) for s in range(count))]


def chart(name: str, run: Run) -> Chart:
    (one,) = [each for each in charts(run) if each.name == name]
    return one


def test_there_is_a_chart_of_all_there_is_and_the_loss_comes_first(tmp_path: Path) -> None:
    run = read(tmp_path, windows(9, loss=float))
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
    assert (loss.scale, line.gaps) == ("linear", [2, 6])
    marks = {each.edge: (each.label, each.places) for each in loss.marks}
    assert marks == {"bottom": ("2 skipped steps", [1, 4]), "top": ("inf or NaN", [2, 6])}


def test_a_spike_that_was_skipped_is_marked_on_the_loss_and_on_the_norm(tmp_path: Path) -> None:
    spike = {"skipped": True, "spike": True, "next_scale": 1.0, "grad_norm": 1e4}
    nan = {"skipped": True, "found_inf": True, "next_scale": 1.0, "grad_norm": "nan"}
    lines = [t.start(precision="bf16"), t.window(0, 1.0, loss=0.5), t.window(1, 1.0, loss=9.0)]
    lines[2] |= spike
    run = read(tmp_path, [*lines, t.window(2, 1.0, loss=0.5) | nan, t.window(3, 1.0, loss=0.25)])
    marks = {name: {m.label: m.places for m in chart(name, run).marks} for name in ("loss", "norm")}
    assert marks["loss"] == {"2 skipped steps": [1, 2], "1 skipped spike": [1]}
    assert marks["norm"] == {"inf or NaN": [2], "1 skipped spike": [1]}
    assert {each.name for each in charts(run)} == {"loss", "norm", "lr", "time"}
    page = html_page(run)
    assert "1 spikes" in page
    for word in ("fp16", "float16", "oss scal", "growth"):
        assert word not in page.split("<h2>Settings")[0], word


def test_the_axis_of_a_loss_is_logarithmic_where_a_linear_one_would_flatten_it(
    tmp_path: Path,
) -> None:
    for losses, scale in (
        ([3.0, 2.0, 1e6, 1.5], "log"),  # a spike
        ([3.0, 2.0, "inf", 1.5], "linear"),
        ([3.0, 0.0, 1e6, 1.5], "linear"),  # 0 has no place on a logarithmic axis
        ([10.0, 5.0, 2.0, 1.0], "linear"),
    ):
        run = read(tmp_path, windows(4, loss=losses.__getitem__))
        assert chart("loss", run).scale == scale, losses


def test_an_update_that_is_awaited_is_drawn_once(tmp_path: Path) -> None:
    times = {"optimizer_us": lambda s: 30_000, "waited_us": lambda s: 30_000}
    time = chart("time", read(tmp_path, windows(3, **times)))
    assert [line.label for line in time.lines] == ["whole step (ms)", "optimizer's update (ms)"]
    assert "hidden" not in time.caption


def test_windows_that_ran_again_are_marked_on_the_scale_and_lost_nothing(tmp_path: Path) -> None:
    lines = windows(6)
    for step in (0, 3):
        lines[step + 1] |= {"retries": 2, "first_scale": 262144.0, "retry_us": 250_000}
    lines[5] |= {"retries": 16, "first_scale": 65536.0, "retry_us": 500_000} | {"skipped": True}
    run = read(tmp_path, lines)
    marks = {each.label: each.places for each in chart("scale", run).marks}
    assert marks == {"1 skipped step": [4], "2 steps run again": [0, 3]}
    (again,) = [each for each in key_numbers(run) if "again" in each.name]
    assert (again.value, again.more) == ("2", "not skipped")
    assert "2 steps overflowed and ran again; batches lost: 1." in skips(run).title


def test_the_learning_rate_is_that_of_the_first_group(tmp_path: Path) -> None:
    run = read(tmp_path, windows(5, lr=lambda s: [0.1 * s, 0.5, "nan"]))
    (line,) = chart("lr", run).lines
    assert line.y == [pytest.approx(0.1 * s) for s in range(5)]


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


def test_the_norm_has_its_limit(tmp_path: Path) -> None:
    norms: list[Any] = [1.0, 2.0, "inf", 0.5, "nan", 4.0]
    limits = [None, None, *[1.5] * 4]
    run = read(tmp_path, windows(6, max_norm=limits.__getitem__, grad_norm=norms.__getitem__))
    norm = chart("norm", run)
    assert {line.label: line.y for line in norm.lines} == {
        "norm": [1.0, 2.0, None, 0.5, None, 4.0],
        "clipped above": limits,
    }
    assert [marks.places for marks in norm.marks] == [[2, 4]]


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
    data = json.loads(page_data(run, found), parse_constant=pytest.fail)
    by_name = {each["name"]: each for each in data["charts"]}
    assert list(by_name) == [each.name for each in found]
    assert by_name["loss"]["lines"][0]["y"][1] == 0.333333
    assert by_name["scale"]["lines"][0]["y"][8:10] == [2**40, None]
    for each in data["charts"]:
        for line in each["lines"]:
            known = [y for y in line["y"] if y is not None]
            assert all(abs(y) <= MAX_DRAWN for y in known)
            assert each["scale"] == "linear" or min(known) > 0
