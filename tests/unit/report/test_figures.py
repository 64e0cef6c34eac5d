"""The pictures: what is drawn is what is in the file, and nothing global is touched."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import telemetry_files as t
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from accel_scaler.report.command import write_page, write_pictures
from accel_scaler.report.figures import NAMED_ROWS, Picture, pictures, stacked
from accel_scaler.report.heatmap import MAX_ROWS
from accel_scaler.report.reader import read_run
from accel_scaler.report.run_summary import Run
from accel_scaler.report.theme import drawing

NAMES = ["scale", "norm", "lr", "time", "heatmap", "timeline"]


@pytest.fixture(autouse=True)
def style(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.name.startswith("test_drawing_leaves"):
        yield
        return
    with drawing():
        yield


def read(tmp_path: Path, lines: list[Any]) -> Run:
    return read_run(t.write(tmp_path / "run.jsonl", lines))


def picture(name: str, *runs: Run) -> Picture:
    (one,) = [each for each in pictures(runs) if each.name == name]
    return one


def drawn(name: str, *runs: Run) -> Axes:
    return picture(name, *runs).figure().axes[0]


def line(axes: Axes, label: str) -> tuple[list[float], list[float]]:
    """The data of the one line whose label contains this."""
    (one,) = [x for x in axes.get_lines() if label in str(x.get_label())]
    return [float(x) for x in one.get_xdata()], [float(y) for y in one.get_ydata()]  # type: ignore[union-attr]


def test_the_largest_gradient_is_drawn_where_it_was_measured(tmp_path: Path) -> None:
    lines = t.story(300, lambda *_: False)
    windows = [w for w in lines if w["kind"] == "window"]
    for step in (0, 100, 200):
        windows[step]["largest_gradient"] = 1000.0 + step
    run = read(tmp_path, lines)
    axes = drawn("largest", run)
    xs, ys = line(axes, "largest gradient")
    assert xs == [0.0, 100.0, 200.0]
    assert ys == pytest.approx([1000.0, 1100.0, 1200.0])
    assert line(axes, "end of float16")[1] == [65504.0, 65504.0]
    other = read(tmp_path, t.story(3, lambda *_: False))
    assert "largest" not in [p.name for p in pictures([other])]
    assert "largest" in [p.name for p in pictures([other, run])]


def test_the_scale_is_drawn_at_every_change_and_every_skip_is_marked(tmp_path: Path) -> None:
    lines = t.story(300, lambda s, scale: scale > 16384, growth_interval=100)
    windows = [w for w in lines if w["kind"] == "window"]
    axes = drawn("scale", read(tmp_path, lines))
    xs, ys = line(axes, "scale")
    at = {w["step"]: ys[max(i for i, x in enumerate(xs) if x <= w["step"])] for w in windows}
    assert at == {w["step"]: w["scale"] for w in windows}
    skipped = [w for w in windows if w["skipped"]]
    marks = line(axes, f"{len(skipped)} skipped windows")
    assert marks == ([w["step"] for w in skipped], [w["scale"] for w in skipped])
    assert axes.get_yscale() == "log"
    assert axes.get_lines()[0].get_drawstyle() == "steps-post"


def test_a_long_run_is_thinned_out_within_its_bounds(tmp_path: Path) -> None:
    lines = [t.start(), *(t.window(s, 2.0 ** (10 + s % 3), grad_norm=1.0 + s) for s in range(1500))]
    run = read(tmp_path, lines)
    axes = drawn("scale", run)
    xs, ys = line(axes, "last of 2 windows")
    assert (len(xs), set(ys) <= {2.0**10, 2.0**11, 2.0**12}) == (751, True)
    (band,) = axes.collections
    heights = band.get_paths()[0].vertices[:, 1]  # type: ignore[index]
    assert (heights.min(), heights.max()) == (2.0**10, 2.0**12)
    axes = drawn("norm", run)
    xs, ys = line(axes, "geometric mean of 2 windows")
    assert ys[0] == pytest.approx(math.sqrt(1.0 * 2.0))
    assert ys[-1] == pytest.approx(math.sqrt(1499.0 * 1500.0))


def test_norms_their_threshold_and_those_that_are_not_finite_are_drawn(tmp_path: Path) -> None:
    norms: list[Any] = [1.0, 2.0, "inf", 0.5, "nan", 4.0]
    lines = [t.start(), *(t.window(s, grad_norm=n, max_norm=1.5) for s, n in enumerate(norms))]
    axes = drawn("norm", read(tmp_path, lines))
    xs, ys = line(axes, "norm")
    assert xs == [0, 1, 3, 5]
    assert ys == pytest.approx([1.0, 2.0, 0.5, 4.0])
    assert set(line(axes, "clipped above 1.5")[1]) == {1.5}
    assert line(axes, "inf or NaN")[0] == [2, 4]


@pytest.mark.filterwarnings("error")
def test_numbers_of_any_size_are_drawn_without_a_warning(tmp_path: Path) -> None:
    norms: list[Any] = [1e-300, 1e300, 5e-324, 0.0, 1.7e308]
    limits, scales = [1e300, 1e-300, 0.0, "inf", 1e308], [1e300, 1e-300, 0.0, 1.0, 2.0]
    each = enumerate(zip(norms, limits, scales, strict=True))
    lines = [t.start()]
    lines += [t.window(x, s, grad_norm=n, max_norm=m) for x, (n, m, s) in each]
    stacked(pictures([read(tmp_path, lines)])).savefig(tmp_path / "all.png")


def test_there_is_a_picture_of_what_there_is_data_for(tmp_path: Path) -> None:
    assert pictures([read(tmp_path, [t.start()])]) == []
    bare = read(tmp_path, [t.start(), t.window(0, grad_norm=None, max_norm=None, lr=[])])
    assert [each.name for each in pictures([bare])] == ["scale"]
    full = read(tmp_path, t.story(9, lambda s, _: s == 1, with_spans=True))
    assert [each.name for each in pictures([full])] == NAMES
    both = [each.name for each in pictures([full, bare, full])]
    assert both == [*NAMES[:4], *(f"{name}-{n}" for name in NAMES[4:] for n in (1, 3))]


def pixels(axes: Axes) -> np.ndarray[Any, Any]:
    (image,) = axes.get_images()
    return np.asarray(image.to_rgba(image.get_array()))


def test_heatmap_rows_are_in_the_models_order_and_what_is_not_finite_has_its_own_colour(
    tmp_path: Path,
) -> None:
    naming = t.names(["last", "first", "middle"]) | {"places": [2, 0, 1]}
    values = [[3.0, 1.0, 2.0], [math.inf, 1.0, math.nan], [0.0, 1.0, 2.0]]
    lines = [t.start(), naming, *(t.window(s, norms=t.norms(v)) for s, v in enumerate(values))]
    axes = drawn("heatmap", read(tmp_path, lines))
    assert [x.get_text() for x in axes.get_yticklabels()] == ["first", "middle", "last"]
    found = pixels(axes)
    assert found.shape == (3, 3, 4)
    red, grey = found[2, 1], found[2, 2]
    assert (found[1, 1] == red).all()
    assert red[0] > 2 * red[1]
    assert grey[0] == grey[1] == grey[2]
    # Equal norms, equal colours; a larger norm is brighter.
    assert (found[0, 0] == found[0, 1]).all()
    assert found[0, 0, :3].sum() < found[1, 0, :3].sum() < found[2, 0, :3].sum()
    legend = axes.get_legend()
    assert legend is not None
    assert [x.get_text() for x in legend.get_texts()] == ["inf or NaN", "exactly 0"]


def test_many_parameters_share_rows_and_the_largest_norm_shows(tmp_path: Path) -> None:
    count = MAX_ROWS + 1
    names = [f"model.layers.{i // 10}.part{i % 10}.weight" for i in range(count)]
    values = [1.0] * count
    values[4] = math.inf
    lines = [t.start(), t.names(names), t.window(0, norms=t.norms(values))]
    axes = drawn("heatmap", read(tmp_path, lines))
    found = pixels(axes)
    assert len(found) <= MAX_ROWS
    odd = {row for row in range(len(found)) if (found[row, 0] != found[-1, 0]).any()}
    assert odd == {4 // -(-count // MAX_ROWS)}
    labels = [x.get_text() for x in axes.get_yticklabels()]
    assert NAMED_ROWS // 2 < len(labels) <= NAMED_ROWS
    assert labels[0] == "0.part0.weight"


@pytest.mark.parametrize(("mode", "lanes"), [("sync", 1), ("overlap", 2)])
def test_the_timeline_has_a_lane_for_each_thread(mode: str, lanes: int, tmp_path: Path) -> None:
    lines = t.story(20, lambda *_: False, with_spans=True)
    lines[0] = t.start(settings={"step_mode": mode})
    axes = drawn("timeline", read(tmp_path, lines))
    assert len(axes.get_yticks()) == lanes
    assert axes.get_title("left") == "Timeline, step 12 to step 19"
    extents = {}
    for bars in axes.collections:
        boxes = [path.get_extents() for path in bars.get_paths()]
        extents[bars.get_label()] = [(b.x0, b.x1, b.y0 < 0) for b in boxes]
    for kind in ("forward", "backward", "clip", "step", "optimizer", "wait"):
        spans = [s for x in range(12, 20) for s in t.spans_of(x)]
        mine = [(s[1] / 1e3 - 1200, (s[1] + s[2]) / 1e3 - 1200) for s in spans if s[0] == kind]
        assert [e[:2] for e in extents[kind]] == [pytest.approx(pair) for pair in mine]
        assert {e[2] for e in extents[kind]} == {kind == "optimizer" and lanes == 2}


def test_several_runs_are_told_apart_by_colour_dash_and_name(tmp_path: Path) -> None:
    runs = [read(tmp_path, t.story(50, lambda s, _, n=n: s < n)) for n in range(4)]
    for n, run in enumerate(runs):
        run.label = f"run {n}"
    for name in ("scale", "norm"):
        lines = [x for x in drawn(name, *runs).get_lines() if "run" in str(x.get_label())]
        lines = [x for x in lines if x.get_linestyle() != "None"]  # no marks
        assert [str(x.get_label())[:5] for x in lines] == [f"run {n}" for n in range(4)]
        assert len({x.get_color() for x in lines}) == 4
        assert len({str(x._unscaled_dash_pattern) for x in lines}) == 4  # type: ignore[attr-defined]


def test_stacked_pictures_are_those_that_stand_alone_one_below_the_other(tmp_path: Path) -> None:
    found = pictures([read(tmp_path, t.story(9, lambda s, _: s == 1, with_spans=True))])
    whole = stacked(found)
    whole.draw_without_rendering()
    assert whole.get_figheight() == pytest.approx(sum(each.height for each in found))
    titled = [axes for axes in whole.axes if axes.get_title("left")]
    assert [axes.get_title("left") for axes in titled] == [each.title for each in found]
    tops = [axes.get_window_extent().y1 for axes in titled]
    bottoms = [axes.get_window_extent().y0 for axes in titled]
    assert all(below < above for below, above in zip(tops[1:], bottoms, strict=False))


def test_drawing_leaves_matplotlib_as_it_was_and_draws_the_same_again(tmp_path: Path) -> None:
    before, loaded = dict(matplotlib.rcParams), "matplotlib.pyplot" in sys.modules
    run = read(tmp_path, t.story(9, lambda s, _: s == 1, with_spans=True))
    pages = [write_page([run], tmp_path / f"{n}.html").read_bytes() for n in range(2)]
    assert pages[0] == pages[1]
    write_pictures([run], tmp_path / "folder")
    assert dict(matplotlib.rcParams) == before
    assert ("matplotlib.pyplot" in sys.modules) == loaded
    assert not Figure().get_constrained_layout()
