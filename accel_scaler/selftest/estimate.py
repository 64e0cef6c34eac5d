"""What each mode hides on this device, and holds in memory, for a model of a given size.

In each mode a model of that size, or a smaller one, trains a few windows. Their time less that of
forward and backward alone is what the training waits for the optimizer; by how much it is less than
in ``sync`` is what the mode hides. Times are scaled linearly with the size.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections import Counter
from typing import Any

import torch
from accelerate.utils import broadcast_object_list
from torch import Tensor, nn

from .training import attached, optimizer_of

LARGEST_ON_A_CPU, LARGEST = 4_000_000, 128_000_000
"""Parameters that are timed at most: it ends soon, and fits a small device."""
BLOCKS, TURNS, WINDOWS = 12, 5, 2
ROOM, MOST_ROWS = 3.0, 8192
"""A batch has so many rows that forward and backward take ``ROOM`` times what ``sync`` waits, or
more; and on a device so many that its work takes the time, not launching its kernels."""
GROWTH = 1.5
"""Where twice the rows take less than that much longer, launching takes the time."""


class Trial:
    """A model of about ``size`` float32 parameters with AdamW, prepared by ``accelerator``."""

    def __init__(self, accelerator: Any, size: int) -> None:
        wide = max(8, round((size / BLOCKS / 8) ** 0.5 / 8) * 8)
        self.rows = torch.randn(MOST_ROWS, wide, device=accelerator.device)
        before = _held(self.rows.device)
        layers: list[nn.Module] = []
        with self.rows.device:
            for _ in range(BLOCKS):
                layers += [nn.LayerNorm(wide, elementwise_affine=False)]
                layers += [nn.Linear(wide, 4 * wide), nn.ReLU(), nn.Linear(4 * wide, wide)]
            model: Any = nn.Sequential(*layers)
        self.params = list(model.parameters())
        optimizer = optimizer_of(self.params, adam=True)
        optimizer.param_groups[0]["lr"] = 1e-6  # it learns nothing, and never overflows
        self.accelerator = accelerator
        self.model, self.optimizer = accelerator.prepare(model, optimizer)
        self.train(8)
        self.optimizer.synchronize()
        grads = [p.grad.detach() for p in self.params]  # Python sees what it holds
        self.held, self.size = _held(self.rows.device), sum(p.numel() for p in self.params)
        self.held.subtract(before)
        del grads

    def train(self, rows: int) -> None:
        self.optimizer.zero_grad()
        self.accelerator.backward(self.model(self.rows[:rows]).float().square().mean())
        self.accelerator.clip_grad_norm_(self.params, 1.0)
        self.optimizer.step()  # waits for the device: is the step to be skipped?
        if self.optimizer.step_was_skipped:
            raise RuntimeError("a window was skipped, so what was timed is no update")

    def work(self, rows: int) -> None:
        self.optimizer.zero_grad()
        self.model(self.rows[:rows]).float().square().mean().backward()
        float(self.params[0].grad[0, 0])  # waits, too

    def seconds(self, rows: int) -> tuple[float, float]:
        """From the end of one step to the next; and that less forward and backward alone. Both are
        taken in turn: a machine that others use is slow for both."""
        turns: list[list[float]] = []
        for _ in range(TURNS):
            turns.append([])
            for run in (self.train, self.work):
                self.optimizer.synchronize()
                run(rows)
                start = time.perf_counter()
                for _ in range(WINDOWS):
                    run(rows)
                turns[-1].append((time.perf_counter() - start) / WINDOWS)
        waits = statistics.median(window - work for window, work in turns)
        return statistics.median(window for window, _ in turns), waits


def _held(device: torch.device) -> Counter[str]:
    """Bytes of all tensors that Python can see, each memory once: on the device and elsewhere."""
    gc.collect()
    kinds = {kind for kind in map(type, gc.get_objects()) if issubclass(kind, Tensor)}
    # Others, as a compiler's, have no memory.
    kinds = {kind for kind in kinds if kind.__torch_dispatch__ == Tensor.__torch_dispatch__}
    tensors = [each for each in gc.get_objects() if type(each) in kinds]
    storages = [each.untyped_storage() for each in tensors if each.layout is torch.strided]
    held: Counter[str] = Counter()
    for kind, _, size in {(s.device.type, s.data_ptr(), s.nbytes()) for s in storages}:
        held["device" if kind == device.type else "host"] += size
    return held


def estimate(size: int, is_cpu: bool) -> tuple[list[dict[str, Any]], str]:
    """Each mode, and how all were timed, in words.

    ``window_ms``: forward, backward, clip and step. ``waits_ms``: less forward and backward.
    ``hidden``: the share of what ``sync`` waits with the same offload; None where that cannot be
    seen. Bytes a parameter between two windows, on a CPU all of them the device's: weights,
    gradients, state, masters.
    """
    found: list[dict[str, Any]] = []
    rows, sync = 32 if is_cpu else 512, 0.0
    for offload in ("none", "cpu"):
        for mode in ("sync", "overlap", "delayed"):
            settings = {"step_mode": mode, "offload": offload}
            with attached("no" if is_cpu else "fp16", **settings) as accelerator:
                trial = Trial(accelerator, min(size, LARGEST_ON_A_CPU if is_cpu else LARGEST))
                window, waits = trial.seconds(rows)
                before = math.inf
                while not found and rows < MOST_ROWS:
                    work = window - waits
                    launches = not is_cpu and work < GROWTH * before
                    is_short = launches or work < ROOM * waits
                    if not broadcast_object_list([is_short])[0]:  # as rank 0 has it
                        break
                    rows, before = rows * 2, work
                    window, waits = trial.seconds(rows)
                measured, held = trial.size, trial.held
                del trial  # its memory, too, before the next one's
            sync = waits if mode == "sync" else sync
            found.append(
                {
                    "mode": mode + ", offload" * (offload == "cpu"),
                    "window_ms": window * 1e3 * size / measured,
                    "waits_ms": waits * 1e3 * size / measured,
                    "device_bytes": held["device"] / measured,
                    "host_bytes": held["host"] / measured,
                    "hidden": 1 - waits / sync if sync > 0 else None,
                    "paste": f"accel_scaler: {{step_mode: {mode}, offload: {offload}}}",
                }
            )
    scaled = f", times scaled by {size / measured:.3g} to {size:,}" if size != measured else ""
    return found, f"AdamW, float32, {rows} rows a window, {measured:,} parameters timed{scaled}"
