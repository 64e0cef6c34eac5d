"""The report's page in Debian's chromium: what is drawn, what hover shows, and that nothing leaks.

Skipped where there is no browser. Takes about 15 s.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import telemetry_files as t

from accel_scaler import cli

pytest.importorskip("playwright.sync_api")
from page_picture import BROWSER, MISSING, chromium

pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(180),
    pytest.mark.skipif(BROWSER is None, reason=MISSING),
]
CHARTS = ["loss", "scale", "norm", "lr", "time"]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as browser:
        yield browser


class Seen:
    """A page, and all that it complained about or asked for."""

    def __init__(self, browser: Any, path: Path, width: int, **options: Any) -> None:
        size = {"width": width, "height": 900}
        self.context = browser.new_context(viewport=size, offline=True, **options)
        self.page = self.context.new_page()
        self.said: list[str] = []
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("dialog", lambda dialog: self.said.append(f"dialog {dialog.message}"))
        self.page.on("request", lambda request: self.said.append(f"asked for {request.url}"))
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-drawn]")
        assert self.said.pop(0) == f"asked for {path.as_uri()}"

    def __call__(self, script: str, argument: Any = None) -> Any:
        return self.page.evaluate(script, argument)

    def heads(self, *charts: str) -> set[str]:
        """Which window each of these charts shows the numbers of."""
        return {self.page.locator(f"#chart-{name} .at").inner_text() for name in charts}

    def readout(self, chart: str) -> str:
        return str(self.page.locator(f"#chart-{chart} .readout").inner_text())

    def point_at(self, chart: str, share: float, height: float = 0.5) -> None:
        """Move the mouse to this share of a chart's width."""
        over = self.page.locator(f"#chart-{chart} .u-over")
        over.evaluate("element => element.scrollIntoView({block: 'center'})")
        box = over.bounding_box()
        self.page.mouse.move(
            box["x"] + share * box["width"], box["y"] + height * box["height"], steps=2
        )


@pytest.fixture
def see(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Seen]]:
    """Write this run, report on it, look at the page; nothing may have been said at the end."""
    opened: list[Seen] = []

    def look(lines: list[Any], width: int = 1200, **options: Any) -> Seen:
        path, out = t.write(tmp_path / "run.jsonl", lines), tmp_path / "report.html"
        assert cli.main(["report", str(path), "-o", str(out)]) == 0
        opened.append(Seen(browser, out, width, **options))
        return opened[-1]

    yield look
    for each in opened:
        said = each.said
        each.context.close()
        assert said == []


def rich(count: int = 200) -> list[Any]:
    """A run that has everything: two skips, a loss, times, norms, measured gradients."""
    lines = t.story(count, lambda s, scale: scale > 32768, growth_interval=100, with_times=True)
    for line in lines:
        if line["kind"] == "window":
            step = line["step"]
            line |= {"loss": round(5 / (1 + step / 20) + 0.1 * (step % 3), 4)}
            line |= {"lr": [round(1e-3 * (1 - step / count), 7)]}
    return lines


PAINTED = """given => {
    const [name, share] = [given].flat();  // share: of the plot's width, for one column of it
    const canvas = document.querySelector(`#chart-${name} canvas`);
    const over = document.querySelector(`#chart-${name} .u-over`);
    const at = Math.round((over.offsetLeft + share * over.offsetWidth) * devicePixelRatio);
    const [left, width] = share === undefined ? [0, canvas.width] : [at, 1];
    const copy = new OffscreenCanvas(canvas.width, canvas.height);
    const context = copy.getContext("2d", {willReadFrequently: true});
    context.drawImage(canvas, 0, 0);
    const {data} = context.getImageData(left, 0, width, canvas.height);
    const colors = new Set();
    for (let i = 0; i < data.length; i += 4)
        if (data[i + 3] === 255) colors.add([data[i], data[i + 1], data[i + 2]].join());
    return [...colors];
}"""


STYLE = (files("accel_scaler.report") / "assets" / "page.css").read_text("utf-8")


def rgb(hue: str, scheme: int) -> str:
    """The colour on light (0) or dark (1) paper, as the pixels have it."""
    both = re.search(rf"--{hue}: light-dark\((\S+), (\S+)\)", STYLE)
    assert both is not None
    text = both[scheme + 1]
    return ",".join(str(int(text[i : i + 2], 16)) for i in (1, 3, 5))


def test_every_chart_is_drawn_in_the_colours_of_the_scheme(see: Any) -> None:
    seen = see(rich())
    assert seen("[...document.querySelectorAll('figure')].map(f => f.id.slice(6))") == CHARTS
    for chart in CHARTS:
        hue = "ink" if chart == "time" else "line-0"
        assert rgb(hue, 0) in seen(PAINTED, chart), chart
    assert rgb("bad", 0) in seen(PAINTED, "loss"), "no skip is marked"
    seen.page.click("#theme")
    assert rgb("line-0", 1) in seen(PAINTED, "scale")
    assert rgb("line-0", 0) not in seen(PAINTED, "scale")


def test_the_cursor_shows_the_numbers_of_one_window_in_all_charts(see: Any) -> None:
    lines = rich()
    seen = see(lines)
    seen.point_at("loss", 0.4)
    (head,) = seen.heads(*CHARTS)
    step = int(re.fullmatch(r"step (\d+)", head)[1])  # type: ignore[index]
    assert 70 < step < 90
    (line,) = [x for x in lines if x.get("step") == step]
    shown = {c: seen.readout(c).split() for c in CHARTS}
    assert f"{line['loss']:.4g}" in shown["loss"]
    assert f"{line['scale']:.0f}" in shown["scale"]
    assert f"{line['grad_norm']:.4g}" in shown["norm"]
    assert float(shown["lr"][-1]) == pytest.approx(line["lr"][0], rel=1e-3)
    assert {"30", "2", "100"} <= set(shown["time"])
    seen.page.mouse.move(0, 0)
    assert seen.heads(*CHARTS) == {"last"}
    assert str(lines[-2]["loss"]) in seen.readout("loss")


def test_keys_move_the_cursor_and_dragging_zooms_all_charts(see: Any) -> None:
    seen = see(rich())
    over = seen.page.locator("#chart-norm .u-over")
    over.focus()
    for key, step in (("ArrowLeft", 199), ("PageUp", 179), ("ArrowRight", 180)):
        seen.page.keyboard.press(key)
        assert seen.heads(*CHARTS) == {f"step {step}"}
        assert over.get_attribute("aria-valuetext").startswith(f"step {step}")
    reset = seen.page.locator("#zoom")
    seen.point_at("norm", 0.5)
    seen.page.mouse.down()
    seen.point_at("norm", 0.75)
    seen.page.mouse.up()
    assert reset.is_visible()
    seen.point_at("loss", 0.0)
    assert seen.heads(*CHARTS) <= {"step 99", "step 100", "step 101"}
    seen.page.keyboard.press("Escape")
    assert not reset.is_visible()


def test_paper_is_light(see: Any) -> None:
    seen = see(rich(), color_scheme="dark")
    assert rgb("line-0", 1) in seen(PAINTED, "scale")
    seen("dispatchEvent(new Event('beforeprint'))")
    assert rgb("line-0", 0) in seen(PAINTED, "scale")
    seen("dispatchEvent(new Event('afterprint'))")
    assert rgb("line-0", 1) in seen(PAINTED, "scale")


RUNS = {
    "one window": [t.start(), t.window(0)],
    "fp32": [t.start(precision="no"), *(t.window(s, 1.0) for s in range(50))],
    "long": t.story(3000, lambda s, _: s % 500 == 0, with_norms=False),
    "no window": [t.start()],
    "extremes": [
        t.start(),
        *(t.window(s, 10.0 ** (300 - 60 * s), loss=1e300, grad_norm=5e-324) for s in range(11)),
    ],
}


@pytest.mark.parametrize("lines", RUNS.values(), ids=RUNS)
def test_any_run_is_drawn(see: Any, lines: list[Any]) -> None:
    seen = see(lines)
    charts = seen("[...document.querySelectorAll('.plot')].map(p => p.parentElement.id.slice(6))")
    assert bool(charts) == (len(lines) > 1)
    for chart in charts:
        assert len(seen(PAINTED, chart)) > 1, chart


def test_a_line_stops_at_nan_and_goes_on_over_what_was_not_measured(see: Any) -> None:
    """Of eleven windows the losses of 3 to 7 are NaN but one, and each third has a norm."""
    windows: list[Any] = [t.window(s, loss=2.0) for s in range(11)]
    for step in (3, 4, 6, 7):
        windows[step]["loss"] = "nan"
    for step, window in enumerate(windows):
        window["grad_norm"] = None if step % 3 else 0.5
    seen, line = see([t.start(), *windows]), rgb("line-0", 0)
    drawn = {x: line in seen(PAINTED, ["loss", x / 10]) for x in (1.5, 3.5, 4.5, 5, 5.5, 8.5)}
    assert drawn == {1.5: True, 3.5: False, 4.5: False, 5: True, 5.5: False, 8.5: True}
    assert all(line in seen(PAINTED, ["norm", x / 10]) for x in (0.5, 1.5, 4.5, 7.5))


def test_a_hostile_file_runs_nothing(see: Any) -> None:
    evil = "</script><script>window.hit = 1</script>"
    image = "<img src=x onerror='window.hit = 1'>"
    names = [evil, image, "a\u2028b", "url(http://127.0.0.1:1/x)"]
    first = {"where": "forward", "module": evil, "class": image, "text": evil}
    bad = {"overflowed": [evil], "first": first, "norms": t.norms([4.0, 3.0, 2.0, 1.0])}
    lines = [t.start(device=evil, settings={evil: image}), t.names(names)]
    lines += [t.window(s, skipped=True, **bad) for s in range(3)]
    seen = see([*lines, t.end(3, image)])
    assert evil in seen.page.locator("td").all_inner_texts()
    assert seen("window.hit") is None
    # Not even what got into the page could run, or ask for anything.
    seen("""() => {
        const script = document.createElement("script");
        script.textContent = "window.hit = 1";
        document.body.append(script);
        const image = new Image();
        image.src = "http://127.0.0.1:1/x.png";
    }""")
    assert seen("window.hit") is None
    seen.page.wait_for_timeout(100)
    said, seen.said[:] = [text for text in seen.said if not text.startswith("asked for")], []
    assert [text.partition(" violates ")[0] for text in said] == [
        "Executing inline script",
        "Loading the image 'http://127.0.0.1:1/x.png'",
    ]
