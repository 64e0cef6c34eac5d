"""How fast this machine copies between host memory and its device."""

from __future__ import annotations

import time

import torch

from ..devices import on_stream, pinned_zeros

COPIED = 256 << 20
"""Bytes of one copy that is timed."""


def copies(device: torch.device) -> tuple[dict[str, float], bool]:
    """GB/s of copies as offload makes them, the best of five: ``up`` to the device, ``down``, and
    the sum of ``both`` at once; and whether the host's memory is pinned. Synchronises."""
    there = [torch.zeros(COPIED // 4, device=device) for _ in range(2)]
    host, unpin = zip(*(pinned_zeros(COPIED // 4, there[0].device) for _ in there), strict=True)
    pairs = {"up": (there[0], host[0]), "down": (host[1], there[1])}
    streams = {way: torch.Stream(there[0].device) for way in pairs}

    def seconds(*ways: str) -> float:
        torch.accelerator.synchronize(device)
        start = time.perf_counter()
        for way in ways:
            with on_stream(streams[way]):
                pairs[way][0].copy_(pairs[way][1], non_blocking=True)
        torch.accelerator.synchronize(device)
        return time.perf_counter() - start

    def speed(*ways: str) -> float:
        found = [seconds(*ways) for _ in range(6)]
        return COPIED * len(ways) / min(found[1:]) / 1e9  # the first one does not count

    try:
        numbers = {"up": speed("up"), "down": speed("down"), "both": speed("up", "down")}
        return numbers, all(memory.is_pinned() for memory in host)
    finally:
        for each in filter(None, unpin):
            each()
