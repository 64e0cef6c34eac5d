"""How fast this machine copies between host memory and its device."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..devices import on_stream, pinned_zeros

COPIED = 256 << 20
"""Bytes of one copy that is timed."""


class Copies(NamedTuple):
    """GB/s of copies between host memory and the device; ``both``: the sum of the two ways."""

    up: float
    down: float
    both: float
    is_pinned: bool


def copies(device: torch.device) -> Copies:
    """Measure copies as offload makes them, the best of five. Synchronises with the device."""
    there = [torch.zeros(COPIED // 4, device=device) for _ in range(2)]
    host, unpin = zip(*(pinned_zeros(COPIED // 4, there[0].device) for _ in there), strict=True)
    pairs = {"up": (there[0], host[0]), "down": (host[1], there[1])}
    streams = {way: torch.Stream(there[0].device) for way in pairs}

    def speed(*ways: str) -> float:
        def copy() -> None:
            for way in ways:
                with on_stream(streams[way]):
                    pairs[way][0].copy_(pairs[way][1], non_blocking=True)

        return COPIED * len(ways) / best(copy, device) / 1e9

    try:
        is_pinned = all(memory.is_pinned() for memory in host)
        return Copies(speed("up"), speed("down"), speed("up", "down"), is_pinned)
    finally:
        for each in filter(None, unpin):
            each()


def best(function: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of five calls with what they enqueue on the device, after one that
    does not count."""
    found = []
    for _ in range(6):
        torch.accelerator.synchronize(device)
        start = time.perf_counter()
        function()
        torch.accelerator.synchronize(device)
        found.append(time.perf_counter() - start)
    return min(found[1:])
