"""When `sync` and `overlap` do their work: the picture in the README, from measured times.

    OMP_NUM_THREADS=1 python benchmarks/timeline.py assets/overlap.svg   # half a minute, two cores

The same training in both modes, on one thread each for forward and optimizer: float32, eight layers
of 4 million parameters each, fused AdamW, clipping. The picture shows the four windows in a row
that took least time in their mode, since other programs use the machine, too. The text is grey on
no background, so that it is legible on white and on black.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

from accel_scaler import attach, detach
from accel_scaler.integrations.attachment import attachment_of
from accel_scaler.optimizer_step import StepTiming

LAYERS, SIDE, ROWS = 8, 2048, 96
WINDOWS, RUN = 4, 20
COLORS = {
    "forward": "#79aede",
    "backward": "#3d78b8",
    "clip": "#9a9fa6",
    "optimizer": "#e0803c",
    "wait": "#f2d16b",
}
LABELS = {"clip": "check and clip", "wait": "waits for the update"}
INK = "#808893"
WIDTH, LEFT, LANE, BAR = 860, 178, 28, 20


@dataclass(frozen=True)
class Bar:
    """Work of one thread, in milliseconds from the picture's left."""

    kind: str
    start: float
    end: float


@dataclass
class Window:
    """The times of one training step, in seconds of ``perf_counter``."""

    spans: list[tuple[str, float, float]] = field(default_factory=list)
    """Work of the training thread: name, begin, end."""
    updates: list[StepTiming] = field(default_factory=list)
    end: float = 0.0

    @contextmanager
    def span(self, kind: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self.spans.append((kind, begin, time.perf_counter()))

    def all(self) -> Iterator[tuple[str, float, float]]:
        """With the update's own time, and the waits for it."""
        yield from self.spans
        for each in self.updates:
            yield "optimizer", each.start, each.start + each.busy
            yield from (("wait", at, at + length) for at, length in each.waits)


def measured(mode: str) -> list[Bar]:
    """The bars of four windows in this mode."""
    torch.manual_seed(0)
    accelerator: Any = attach(Accelerator(cpu=True), step_mode=mode, find_overflow="off")
    windows: list[Window] = []
    recorder = attachment_of(accelerator).recorder
    record = recorder.optimizer_stepped

    def stepped(optimizer: Any, window: Any, timing: StepTiming) -> None:
        windows[-1].updates.append(timing)
        record(optimizer, window, timing)

    recorder.optimizer_stepped = stepped
    model = nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(LAYERS)))
    x = torch.randn(ROWS, SIDE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(RUN):
        windows.append(window := Window())
        with window.span("forward"):
            loss = model(x).square().mean()
        with window.span("backward"):
            accelerator.backward(loss)
        with window.span("clip"):
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        window.end = time.perf_counter()
    detach(accelerator)
    return bars(least_disturbed(windows[1:-1]))


def least_disturbed(windows: list[Window]) -> list[Window]:
    """The windows in a row that took least time, and the one before them."""
    runs = [windows[i : i + WINDOWS + 1] for i in range(len(windows) - WINDOWS)]
    return min(runs, key=lambda run: run[-1].end - run[0].end)


def bars(windows: list[Window]) -> list[Bar]:
    """From the end of the first of these windows to that of the last."""
    zero, last = windows[0].end, windows[-1].end
    found = []
    for kind, start, stop in (each for window in windows for each in window.all()):
        begin, end = max(start, zero), min(stop, last)
        if begin < end:
            found.append(Bar(kind, (begin - zero) * 1e3, (end - zero) * 1e3))
    return found


def picture(modes: dict[str, list[Bar]]) -> str:
    """The SVG: a lane for each thread of each mode, on one scale of time."""
    last = max(bar.end for found in modes.values() for bar in found)
    unit = (WIDTH - LEFT - 90) / last
    parts, y = [], 8.0
    for mode, found in modes.items():
        beside = mode != "sync"
        end = max(bar.end for bar in found if bar.kind != "optimizer" or not beside)
        parts.append(text(0, y + 15, mode, "start", 'font-weight="600"'))
        for lane, name in enumerate(["training thread", "optimizer thread"][: 1 + beside]):
            top = y + lane * LANE
            parts.append(text(LEFT - 10, top + 15, name, "end", 'font-size="11"'))
            for bar in sorted(found, key=lambda bar: bar.kind == "wait"):
                if (bar.kind == "optimizer" and beside) == bool(lane):
                    parts.append(rect(bar, top, unit))
        right = LEFT + end * unit
        bottom = y + (1 + beside) * LANE - LANE + BAR
        parts.append(
            f'<path d="M{right:.1f} {y - 4:.1f}V{bottom + 4:.1f}" stroke="{INK}" '
            'stroke-dasharray="2 2"/>'
        )
        parts.append(text(right + 6, y + 15, f"{end:.0f} ms", "start"))
        y = bottom + 26
    x = float(LEFT)
    for kind in COLORS:
        if any(bar.kind == kind for found in modes.values() for bar in found):
            parts.append(
                rect(Bar(kind, (x - LEFT) / unit, (x - LEFT + 14) / unit), y - 4, unit, 12)
            )
            label = LABELS.get(kind, kind)
            parts.append(text(x + 20, y + 7, label, "start", 'font-size="12"'))
            x += 44 + 7.2 * len(label)
    about = f"{WINDOWS} training steps, measured: " + ", ".join(modes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 14:.0f}" '
        f'role="img" font-family="sans-serif" font-size="13">\n<title>{about}</title>\n'
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def rect(bar: Bar, top: float, unit: float, height: float = BAR) -> str:
    """One bar; a wait is drawn over the forward that waits."""
    return (
        f'<rect x="{LEFT + bar.start * unit:.1f}" y="{top:.1f}" '
        f'width="{max((bar.end - bar.start) * unit - 0.6, 0.4):.1f}" height="{height:g}" '
        f'fill="{COLORS[bar.kind]}"/>'
    )


def text(x: float, y: float, words: str, anchor: str, more: str = "") -> str:
    """Words at a place."""
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{INK}" text-anchor="{anchor}" {more}>{words}</text>'
    )


def main() -> None:
    """Measure and draw."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("output", type=Path, help="the SVG to write")
    args = parser.parse_args()
    modes = {mode: measured(mode) for mode in ("sync", "overlap")}
    args.output.write_text(picture(modes), encoding="utf-8")
    for mode, found in modes.items():
        print(f"{mode}: {WINDOWS} windows in {max(bar.end for bar in found):.0f} ms")


if __name__ == "__main__":
    main()
