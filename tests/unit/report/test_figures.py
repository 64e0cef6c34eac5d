"""The pictures: what is drawn is what is in the file, and nothing global is touched."""

from __future__ import annotations

import math
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pytest
import telemetry_files as t
from matplotlib.figure import Figure

from accel_scaler.report.figures import norm_figure, offender_figure, scale_figure, timeline_figure
from accel_scaler.report.heatmap import MAX_ROWS, heat_figure
from accel_scaler.report.reader import read_run
from accel_scaler.report.run_summary import Run
from accel_scaler.report.theme import DARK, IN_PAGE, LIGHT, VARIABLES, Theme, drawing, save_png, svg

ODD = [
    "a.$x_1$.w",
    "<script>alert(1)</script>",
    'q"] id="x',
    "]]>&amp;",
    "名前.weight",
    "n" * 10_000,
]


def read(tmp_path: Path, lines: list[Any]) -> Run:
    return read_run(t.write(tmp_path / "run.jsonl", lines))


def line(figure: Figure, label: str) -> tuple[list[float], list[float]]:
    """The data of the one line whose label contains this."""
    (one,) = [x for x in figure.axes[0].get_lines() if label in str(x.get_label())]
    return [float(x) for x in one.get_xdata()], [float(y) for y in one.get_ydata()]  # type: ignore[union-attr]


def texts(figure: Figure) -> list[str]:
    from matplotlib.text import Text

    return [x.get_text() for x in figure.findobj(Text) if x.get_text()]


def test_the_scale_is_drawn_at_every_change_and_every_skip_is_marked(tmp_path: Path) -> None:
    lines = t.story(300, lambda s, scale: scale > 16384, growth_interval=100)
    windows = [w for w in lines if w["kind"] == "window"]
    run = read(tmp_path, lines)
    with drawing(LIGHT):
        figure = scale_figure([run], LIGHT)
    xs, ys = line(figure, "scale")
    drawn = {w["step"]: ys[max(i for i, x in enumerate(xs) if x <= w["step"])] for w in windows}
    last = {**drawn, 299: windows[-1]["scale"]}
    assert last == {w["step"]: w["scale"] for w in windows}
    skipped = [w for w in windows if w["skipped"]]
    marks = line(figure, f"{len(skipped)} skipped windows")
    assert marks == ([w["step"] for w in skipped], [w["scale"] for w in skipped])
    assert figure.axes[0].get_yscale() == "log"
    assert figure.axes[0].get_lines()[0].get_drawstyle() == "steps-post"


def test_a_scale_of_zero_and_those_beyond_float32_are_drawn_at_its_edges(tmp_path: Path) -> None:
    lines = [t.start(), t.window(0, 1e300), t.window(1, 1e-300), t.window(2, 0.0, True), t.end()]
    run = read(tmp_path, lines)
    with drawing(LIGHT):
        figure = scale_figure([run], LIGHT)
        save_png(figure, tmp_path / "scale.png")
    ys = line(figure, "scale")[1]
    assert ys[0] == 2.0**128
    assert 0 < ys[-1] <= ys[1] <= 2.0**-149


def test_norms_their_threshold_and_those_that_are_not_finite_are_drawn(tmp_path: Path) -> None:
    norms: list[Any] = [1.0, 2.0, "inf", 0.5, "nan", 4.0]
    lines = [t.start(), *(t.window(s, grad_norm=n, max_norm=1.5) for s, n in enumerate(norms))]
    with drawing(LIGHT):
        figure = norm_figure([read(tmp_path, lines)], LIGHT)
    assert figure is not None
    xs, ys = line(figure, "norm")
    assert xs == [0, 1, 3, 5]
    assert ys == pytest.approx([1.0, 2.0, 0.5, 4.0])
    assert set(line(figure, "clipped above 1.5")[1]) == {1.5}
    assert line(figure, "inf or NaN")[0] == [2, 4]


def test_the_threshold_stands_through_skips_and_ends_where_clipping_does(tmp_path: Path) -> None:
    limits = [1.5, None, 1.5, None]
    lines: list[Any] = [t.start()]
    lines += [t.window(s, skipped=s == 1, max_norm=m) for s, m in enumerate(limits)]
    with drawing(LIGHT):
        figure = norm_figure([read(tmp_path, lines)], LIGHT)
    assert figure is not None
    assert line(figure, "clipped above")[1] == pytest.approx([1.5, 1.5, 1.5, math.nan], nan_ok=True)


@pytest.mark.filterwarnings("error")
def test_norms_of_any_size_are_drawn_without_a_warning(tmp_path: Path) -> None:
    norms = [1e-300, 1e300, 5e-324, 0.0, 1.7e308]
    limits = [1e300, 1e-300, 0.0, "inf", 1e308]
    pairs = enumerate(zip(norms, limits, strict=True))
    run = read(
        tmp_path, [t.start(), *(t.window(s, grad_norm=n, max_norm=m) for s, (n, m) in pairs)]
    )
    with drawing(LIGHT):
        figure = norm_figure([run], LIGHT)
        assert figure is not None
        save_png(figure, tmp_path / "norm.png")


def test_a_run_without_norms_spans_or_offenders_has_no_such_pictures(tmp_path: Path) -> None:
    run = read(tmp_path, [t.start(), t.window(0, grad_norm=None, max_norm=None)])
    with drawing(LIGHT):
        assert norm_figure([run], LIGHT) is None
        assert heat_figure(run, LIGHT) is None
        assert offender_figure(run, LIGHT) is None
        assert timeline_figure(run, LIGHT) is None


def heat_pixels(figure: Figure) -> np.ndarray[Any, Any]:
    (image,) = figure.axes[0].get_images()
    return np.asarray(image.get_array())


def test_heat_rows_are_in_the_models_order_and_what_is_not_finite_has_its_own_colour(
    tmp_path: Path,
) -> None:
    naming = t.names(["last", "first", "middle"]) | {"places": [2, 0, 1]}
    lines = [t.start(), naming]
    values = [[3.0, 1.0, 2.0], [math.inf, 1.0, math.nan], [0.0, 1.0, 2.0]]
    lines += [t.window(s, norms=t.norms(v)) for s, v in enumerate(values)]
    with drawing(LIGHT):
        figure = heat_figure(read(tmp_path, lines), LIGHT)
    assert figure is not None
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["first", "middle", "last"]
    pixels = heat_pixels(figure)
    assert pixels.shape == (3, 3, 4)
    red, grey = pixels[2, 1], pixels[2, 2]
    assert (pixels[1, 1] == red).all()
    assert red[0] > 2 * red[1]
    assert grey[0] == grey[1] == grey[2]
    # Equal norms, equal colours; a larger norm is brighter.
    assert (pixels[0, 0] == pixels[0, 1]).all()
    assert pixels[0, 0, :3].sum() < pixels[1, 0, :3].sum() < pixels[2, 0, :3].sum()


@pytest.mark.parametrize("count", [MAX_ROWS + 1, 3 * MAX_ROWS])
def test_many_parameters_share_rows_and_the_largest_norm_shows(count: int, tmp_path: Path) -> None:
    names = [f"model.layers.{i // 10}.part{i % 10}.weight" for i in range(count)]
    values = [1.0] * count
    values[4] = math.inf
    lines = [t.start(), t.names(names), t.window(0, norms=t.norms(values))]
    with drawing(LIGHT):
        figure = heat_figure(read(tmp_path, lines), LIGHT)
    assert figure is not None
    pixels = heat_pixels(figure)
    assert len(pixels) <= MAX_ROWS
    odd = {row for row in range(len(pixels)) if (pixels[row, 0] != pixels[-1, 0]).any()}
    assert odd == {4 // -(-count // MAX_ROWS)}
    assert 5 <= len(figure.axes[0].get_yticks()) <= 42


def test_a_parameter_that_only_one_session_has_is_blank_in_the_other(tmp_path: Path) -> None:
    lines: list[Any] = []
    for names in (["a"], ["a", "b"]):
        lines += [t.start(), t.names(names), t.window(0, norms=t.norms([1.0] * len(names)))]
    with drawing(LIGHT):
        figure = heat_figure(read(tmp_path, lines), LIGHT)
    assert figure is not None
    assert [[float(p[3]) for p in row] for row in heat_pixels(figure)] == [[1, 1], [0, 1]]


def test_offenders_are_bars_of_their_counts(tmp_path: Path) -> None:
    lines = [t.start(), t.names(["a", "b"])]
    lines += [t.window(s, skipped=True, nonfinite=[[0, 1], [1, 1]][: 1 + s % 2]) for s in range(5)]
    with drawing(LIGHT):
        figure = offender_figure(read(tmp_path, lines), LIGHT)
    assert figure is not None
    widths = [float(patch.get_width()) for patch in figure.axes[0].patches]
    assert [x.get_text() for x in figure.axes[0].get_yticklabels()] == ["a", "b"]
    assert widths == [5, 2, 3, 2]


@pytest.mark.parametrize(("mode", "lanes"), [("sync", 1), ("overlap", 2), ("delayed", 2)])
def test_the_timeline_has_a_lane_for_each_thread(mode: str, lanes: int, tmp_path: Path) -> None:
    lines = t.story(20, lambda *_: False, with_spans=True)
    lines[0] = t.start(settings={"step_mode": mode})
    run = read(tmp_path, lines)
    with drawing(LIGHT):
        figure = timeline_figure(run, LIGHT)
    assert figure is not None
    axes = figure.axes[0]
    assert len(axes.get_yticks()) == lanes
    extents = {}
    for bars in axes.collections:
        boxes = [path.get_extents() for path in bars.get_paths()]
        extents[bars.get_label()] = [(b.x0, b.x1, b.y0 < 0) for b in boxes]
    stretch = run.timing.stretch
    assert stretch is not None
    zero = stretch.first_x * 100.0
    for kind in ("forward", "backward", "clip", "step", "optimizer", "wait"):
        spans = [s for x in range(stretch.first_x, stretch.last_x + 1) for s in t.spans_of(x)]
        mine = [(s[1] / 1e3 - zero, (s[1] + s[2]) / 1e3 - zero) for s in spans if s[0] == kind]
        assert [e[:2] for e in extents[kind]] == [pytest.approx(pair) for pair in mine]
        assert {e[2] for e in extents[kind]} == {kind == "optimizer" and lanes == 2}


def test_several_runs_are_told_apart_by_colour_dash_and_name(tmp_path: Path) -> None:
    runs = [read(tmp_path, t.story(50, lambda s, _, n=n: s < n)) for n in range(4)]
    for n, run in enumerate(runs):
        run.label = f"run {n}"
    with drawing(LIGHT):
        figure = scale_figure(runs, LIGHT)
    lines = [x for x in figure.axes[0].get_lines() if str(x.get_label()).endswith(": scale")]
    assert [str(x.get_label()) for x in lines] == [f"run {n}: scale" for n in range(4)]
    assert len({x.get_color() for x in lines}) == 4
    assert len({str(x._unscaled_dash_pattern) for x in lines}) == 4  # type: ignore[attr-defined]


def odd_run(tmp_path: Path) -> Run:
    bad = {"nonfinite": [[i, 1] for i in range(len(ODD))], "norms": t.norms([1.0] * len(ODD))}
    lines = [t.start(), t.names(ODD), *(t.window(s, skipped=True, **bad) for s in range(3))]
    run = read(tmp_path, lines)
    run.label = "$\\frac{$ <b>"
    return run


def every_svg(run: Run, prefix: str) -> list[str]:
    with drawing(IN_PAGE):
        figures = [scale_figure([run, run], IN_PAGE), heat_figure(run, IN_PAGE, run.label)]
        figures += [offender_figure(run, IN_PAGE, run.label)]
        return [svg(f, f"{prefix}{i}", "x") for i, f in enumerate(figures) if f is not None]


def test_names_from_the_file_are_text_in_the_svg_whatever_they_hold(tmp_path: Path) -> None:
    for text in every_svg(odd_run(tmp_path), "p"):
        root = ET.fromstring(text)  # well-formed: nothing of a name was taken as markup
        assert {e.tag.rpartition("}")[2] for e in root.iter()} <= {
            *("svg", "g", "path", "defs", "style", "use", "text", "image", "clipPath", "rect"),
            *("pattern", "tspan"),
        }
        said = [e.text for e in root.iter() if e.tag.endswith("text")]
        if any("script" in (s or "") for s in said):
            assert "<script>alert(1)</script>" in said
            assert "a.$x_1$.w" in said
            assert all(len(s or "") < 60 for s in said)


def test_ids_differ_between_pictures_and_every_reference_is_met(tmp_path: Path) -> None:
    pictures = every_svg(odd_run(tmp_path), "p")
    seen: set[str] = set()
    for text in pictures:
        tags = "".join(re.findall(r"<[^<>]+>", text))
        ids = re.findall(r'\sid="([^"]+)"', tags)
        assert len(ids) == len(set(ids))
        assert not seen & set(ids)
        seen |= set(ids)
        assert set(re.findall(r'(?:url\(#|href="#)([^")]+)', tags)) <= set(ids)


def test_every_colour_that_must_follow_the_page_is_a_variable(tmp_path: Path) -> None:
    """And no black of matplotlib's own, which nobody could see on a dark page."""
    for text in every_svg(odd_run(tmp_path), "p"):
        assert "#0102" not in text
        assert "var(--ink)" in text
        colors = set(re.findall(r"(?:fill|stroke): ?(#[0-9a-f]{6})", text))
        assert not colors & {"#000000", "#ffffff", "#262626"}
        assert "http" not in re.sub(r'xmlns(:\w+)?="[^"]*"', "", text)
    assert len(VARIABLES) == 5 + 4


def luminance(color: str) -> float:
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_text_and_lines_stand_out_from_the_paper(theme: Theme) -> None:
    """WCAG's ratios: 4.5 for text, 3 for lines."""
    paper = luminance(theme.paper)

    def ratio(color: str) -> float:
        low, high = sorted((paper, luminance(color)))
        return (high + 0.05) / (low + 0.05)

    assert min(map(ratio, (theme.ink, theme.soft))) >= 4.5
    assert min(map(ratio, (theme.bad, *theme.runs))) >= 3


def test_drawing_leaves_matplotlib_as_it_was(tmp_path: Path) -> None:
    before, loaded = dict(matplotlib.rcParams), "matplotlib.pyplot" in sys.modules
    every_svg(odd_run(tmp_path), "p")
    assert dict(matplotlib.rcParams) == before
    assert ("matplotlib.pyplot" in sys.modules) == loaded


def test_the_same_file_gives_the_same_picture(tmp_path: Path) -> None:
    assert every_svg(odd_run(tmp_path), "p") == every_svg(odd_run(tmp_path), "p")
