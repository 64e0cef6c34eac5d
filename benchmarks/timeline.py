"""What `sync` and `overlap` do when: the picture in the README, from measured spans.

    OMP_NUM_THREADS=1 python benchmarks/timeline.py assets/overlap.svg   # half a minute, two cores

The same windows in both modes: fp16, fused AdamW over 33 million parameters, clipping. The training
thread waits for a device in forward and backward; there is none, so it sleeps, each layer as long
as the last. All else is done and measured. Of the last windows those four in a row are drawn that
took least, in either mode: others use the machine, too. The text is grey and the background none:
legible on white and on black.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from accel_scaler import ScalerConfig, attach, detach
from accel_scaler.telemetry import Record

LAYERS, SIDE = 8, 2048
FORWARD_S, BACKWARD_S = 0.009, 0.012
"""Of one layer."""
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
    """What one thread did, in milliseconds from the picture's left."""

    kind: str
    start: float
    end: float


class OnADevice(torch.autograd.Function):
    """A layer that somebody else computes: the host launches it, and waits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        y = x + weight[0, 0]  # the first use: waits where the weight's update is due
        time.sleep(FORWARD_S)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        time.sleep(BACKWARD_S)
        return grad, torch.full_like(ctx.saved_tensors[0], 1e-3)


class Layer(nn.Module):
    """``SIDE`` x ``SIDE`` weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIDE, SIDE))

    def forward(self, x: Tensor) -> Tensor:
        return OnADevice.apply(x, self.weight)


def measured(mode: str) -> list[Bar]:
    """The bars of four windows in this mode."""
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        config = ScalerConfig(
            step_mode=mode, init_scale=1.0, optimizer_threads=1, telemetry=f"{folder}/run.jsonl",
            find_overflow="off",
        )  # fmt: skip
        accelerator = attach(Accelerator(cpu=True, mixed_precision="fp16"), config)
        model = nn.Sequential(*(Layer() for _ in range(LAYERS)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        model, optimizer = accelerator.prepare(model, optimizer)
        for _ in range(RUN):
            accelerator.backward(model(torch.ones(1)).sum())
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        records = [record for record in accelerator.scaler_history.records if record.spans]
        detach(accelerator)
    return bars(least_disturbed(records[1:-1]))


def least_disturbed(records: list[Record]) -> list[Record]:
    """The windows in a row that took least time, and the one before them."""
    runs = [records[i : i + WINDOWS + 1] for i in range(len(records) - WINDOWS)]
    return min(runs, key=lambda run: run[-1].time - run[0].time)


def bars(records: list[Record]) -> list[Bar]:
    """From the end of the first of these windows to that of the last."""
    zero, last = records[0].time, records[-1].time
    found = []
    for record in records:
        for kind, start, length, *_ in record.spans:
            begin, end = max(start, zero), min(start + length, last)
            if kind in COLORS and begin < end:
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
