"""The cost of the guard in a bf16 or fp32 run: backward's end, clip, AdamW step, against stock.

    python benchmarks/guard.py               # about three minutes on two cores, 7 GB of memory

The peer is stock Accelerate with ``mixed_precision="bf16"`` and the fused AdamW, which steps
whatever the gradients hold. All variants run in turn in one process on the same float32 parameters
and gradients, in another order each turn; the ratios are of medians. ``again`` is stock once more:
how far two equal variants differ here. With a clip the norm is the check; without one the guard
reads the gradients once more.
"""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from boundary import CASES

from accel_scaler import attach

VARIANTS: dict[str, dict[str, Any] | None] = {
    "stock": None,
    "again": None,
    "off": {"skip_nonfinite": False},
    "guard": {},
    "4x": {"skip_norm_above": "4x"},
}
"""The settings of ``attach``; None: it is not called."""


class Bench:
    """One list of parameters, and each variant's step over it."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        self.params = [torch.nn.Parameter(torch.randn(shape) * 0.02) for shape in shapes]
        self.template = [torch.randn_like(p) * 1e-3 for p in self.params]
        self.grads = [torch.empty_like(p) for p in self.params]
        self.steps = {name: self.step(settings) for name, settings in VARIANTS.items()}

    def step(self, settings: dict[str, Any] | None) -> Callable[[bool], None]:
        accelerator = Accelerator(cpu=True, mixed_precision="bf16")
        if settings is not None:
            attach(accelerator, settings)
        optimizer = accelerator.prepare(torch.optim.AdamW(self.params, lr=1e-4, fused=True))

        def step(clips: bool) -> None:
            accelerator.backward(torch.zeros((), requires_grad=True))  # opens the window
            if clips:
                accelerator.clip_grad_norm_(self.params, 1.0)
            optimizer.step()
            assert not accelerator.optimizer_step_was_skipped

        return step

    def run(self, clips: bool, repeats: int, clock: Callable[[], float]) -> dict[str, float]:
        """Median seconds of each variant, in turn, in another order each turn."""
        times: dict[str, list[float]] = {name: [] for name in VARIANTS}
        order = random.Random(0)
        for turn in range(repeats + 2):
            for name in order.sample(list(VARIANTS), len(VARIANTS)):
                for p, grad, value in zip(self.params, self.grads, self.template, strict=True):
                    p.grad = grad.copy_(value)
                start = clock()
                self.steps[name](clips)
                if turn >= 2:
                    times[name].append(clock() - start)
                for p in self.params:
                    p.grad = None
        return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=25, help="timed turns (default: 25)")
    parser.add_argument("--case", choices=CASES, help="only this list of parameters")
    parser.add_argument("--cpu_time", action="store_true", help="where others use the cores, too")
    args = parser.parse_args()
    clock = time.process_time if args.cpu_time else time.perf_counter
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.machine()}")
    heads = "".join(f"{name:>8}" for name in VARIANTS if name != "stock")
    print(f"{'parameters':<14}{'step':<10}{'stock ms':>10}{heads}")
    for case in [args.case] if args.case else CASES:
        torch.manual_seed(0)
        bench = Bench(CASES[case])
        for clips in (True, False):
            times = bench.run(clips, args.repeats, clock)
            stock = times.pop("stock")
            ratios = "".join(f"{each / stock:>8.2f}" for each in times.values())
            label = "clip" if clips else "no clip"
            print(f"{case:<14}{label:<10}{stock * 1e3:>10.1f}{ratios}", flush=True)


if __name__ == "__main__":
    main()
