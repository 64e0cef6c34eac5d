"""The cost of telemetry at a window boundary: check, clip, AdamW step, scale update, record.

    python benchmarks/telemetry.py           # about three minutes on two cores, 5 GB of memory

The same boundary of an attached accelerator without telemetry, and with the file on, in turn in
one process on the same parameters and gradients; the ratios are of medians, with the spread of
the ratios of neighbours. Goal: at most 1.02 with the file on. The window before is written in the
same boundary, so writing is counted. `skip` is a boundary whose gradients overflowed.
"""

from __future__ import annotations

import argparse
import logging
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from accelerate import Accelerator
from boundary import CASES, SCALE

from accel_scaler import ScalerConfig, attach

VARIANTS = ("off", "again", "on")
"""``again`` is ``off`` once more: how far two equal variants differ here."""


class Bench:
    """One list of parameters, and the boundary over it with telemetry off and on."""

    def __init__(self, shapes: list[tuple[int, ...]], folder: Path) -> None:
        self.params = [torch.nn.Parameter(torch.randn(shape) * 0.02) for shape in shapes]
        self.template = [torch.randn_like(p) * 1e-3 * SCALE for p in self.params]
        self.model = torch.nn.ParameterList(self.params)
        self.boundaries = {
            name: self.boundary(str(folder / "run.jsonl") if name == "on" else None)
            for name in VARIANTS
        }

    def boundary(self, path: str | None) -> tuple[Callable[[], object], Callable[[], None]]:
        """A function that opens a window, and the boundary at its end, which is timed."""
        config = ScalerConfig(init_scale=SCALE, telemetry=path)
        accelerator = attach(Accelerator(cpu=True, mixed_precision="fp16"), config)
        _, optimizer = accelerator.prepare(
            self.model, torch.optim.AdamW(self.params, lr=1e-4, fused=True)
        )
        scaler = accelerator.scaler

        def boundary() -> None:
            accelerator.clip_grad_norm_(self.params, 1.0)
            optimizer.step()
            scaler._scale.fill_(SCALE)

        return partial(scaler.scale, torch.ones(())), boundary

    def fill(self, overflow: bool) -> None:
        for p, value in zip(self.params, self.template, strict=True):
            p.grad = value.clone()
        if overflow:
            for p in self.params[: len(self.params) // 2]:
                p.grad.fill_(float("nan"))

    def run(self, overflow: bool, repeats: int) -> dict[str, list[float]]:
        """Seconds of each variant, taken in turn; who goes first changes from turn to turn."""
        times: dict[str, list[float]] = {name: [] for name in VARIANTS}
        for turn in range(repeats + 2):
            order = VARIANTS[turn % 3 :] + VARIANTS[: turn % 3]
            for name in order:
                opened, boundary = self.boundaries[name]
                opened()
                self.fill(overflow)
                start = time.perf_counter()
                boundary()
                if turn >= 2:
                    times[name].append(time.perf_counter() - start)
                for p in self.params:  # the next window is another scaler's
                    p.grad = None
        return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=45, help="timed turns (default: 45)")
    parser.add_argument("--case", choices=CASES, help="only this list of parameters")
    args = parser.parse_args()
    logging.getLogger("accel_scaler").setLevel(logging.ERROR)  # of skips in a row, which are meant
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")
    heads = f"{'off ms':>8}{'off again':>11}{'file on':>9}{'us':>8}"
    print(f"{'parameters':<14}{'boundary':<10}{heads}")
    for case in [args.case] if args.case else CASES:
        with tempfile.TemporaryDirectory() as folder:
            torch.manual_seed(0)
            bench = Bench(CASES[case], Path(folder))
            for overflow in (False, True):
                times = bench.run(overflow, args.repeats * (10 if len(bench.params) > 1000 else 1))
                median = {name: statistics.median(values) for name, values in times.items()}
                again, on = median["again"] / median["off"], median["on"] / median["off"]
                extra = (median["on"] - (median["off"] + median["again"]) / 2) * 1e6
                label = "skip" if overflow else "step"
                print(
                    f"{case:<14}{label:<10}{median['off'] * 1e3:>8.2f}{again:>11.3f}{on:>9.3f}"
                    f"{extra:>8.0f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
