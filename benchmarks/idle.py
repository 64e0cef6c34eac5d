"""A step on a device beside stock Accelerate: does it wait for the host at the boundary?

    make bench-idle                  # on the simulated accelerator, about two minutes
    python benchmarks/idle.py        # on this machine's accelerator

A GPT-2 of 124M float32 parameters, fused AdamW, a clip in each step. *waits* reads the outcome of
the check before it prepares the update; *launches* is the package as it is. *To launch* is the
host's time from the end of its wait to the launch of the update, below 0 where it launches first.
Variants run in turn in one process. On the simulated accelerator kernels take an eighth of an
H200's speed and compute nothing, and the host's Python takes its real time.
"""

from __future__ import annotations

import argparse
import logging
import math
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from offload import LENGTH, Model, costs

from accel_scaler import attach
from accel_scaler.optimizer_step import overflow_check
from accel_scaler.scaling import SentCheck

VARIANTS = ("stock", "waits", "launches")
WARM_UP = 3


ENDS: dict[str, float] = {}
"""When the last wait ended, and when the last update was launched: ``perf_counter`` in seconds."""


def noting(function: Callable[..., Any], name: str, after: bool) -> Callable[..., Any]:
    """``function``, which notes the time of its end (``after``) or of its begin."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not after:
            ENDS[name] = time.perf_counter()
        result = function(*args, **kwargs)
        if after:
            ENDS[name] = time.perf_counter()
        return result

    return call


def step_of(variant: str, device: str) -> Callable[[], None]:
    """One step of a new model."""
    AcceleratorState._reset_state()
    accelerator = Accelerator()
    if variant != "stock":
        attach(accelerator)
    with torch.device(device):
        model = Model(768, 12)
        batch = torch.zeros(2, LENGTH, dtype=torch.long)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model, optimizer = accelerator.prepare(model, inner)
    can_send: Any = overflow_check.can_send

    def step() -> None:
        overflow_check.can_send = (lambda _: False) if variant == "waits" else can_send
        accelerator.backward(model(batch))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        overflow_check.can_send = can_send

    return step


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=12, help="timed ones; default: %(default)s")
    parser.add_argument("--steps", type=int, default=3, help="in a turn; default: %(default)s")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    device = torch.accelerator.current_accelerator()
    if device is None:
        parser.error("no accelerator here: make bench-idle simulates one")
    module: Any = torch.get_device_module(device)
    if hasattr(module, "set_cost"):
        module.set_cost(arithmetic=False, **costs("H200"))
    overflow_check.check_norms = noting(overflow_check.check_norms, "wait", True)
    SentCheck.read = noting(SentCheck.read, "wait", True)  # type: ignore[method-assign]
    torch._fused_adamw_ = noting(torch._fused_adamw_, "launch", False)
    steps = {variant: step_of(variant, device.type) for variant in VARIANTS}
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    gaps: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for turn in range(WARM_UP + args.turns):
        for variant, step in steps.items():
            module.synchronize()
            start = time.perf_counter()
            for _ in range(args.steps):
                step()
            module.synchronize()
            if turn >= WARM_UP:
                times[variant].append((time.perf_counter() - start) / args.steps)
                gaps[variant].append(ENDS["launch"] - ENDS.get("wait", math.nan))
            ENDS.clear()
    stock = statistics.median(times["stock"])
    print(f"torch {torch.__version__}, {device.type}")
    for variant, values in times.items():
        median = statistics.median(values)
        gap = f"{statistics.median(gaps[variant]) * 1e3:>9.2f} ms to launch"
        print(
            f"{variant:<10}{median * 1e3:>9.2f} ms{median / stock:>8.3f} of stock"
            f"{'' if variant == 'stock' else gap}",
            flush=True,
        )


if __name__ == "__main__":
    main()
