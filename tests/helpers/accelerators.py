"""The device under test, and what the tests of this folder ask of it, whichever it is.

``ACCEL_SCALER_TEST_DEVICE`` names it (``cuda:1``, ``xpu``); else it is the accelerator that torch
finds. Streams and events are torch's own, not those of a backend.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from accel_scaler.devices import on_stream

NAME = "ACCEL_SCALER_TEST_DEVICE"


def _found() -> torch.device | None:
    named = os.environ.get(NAME)
    if named:
        return torch.device(named)
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


_device = _found()
MISSING = f"no accelerator: torch finds none, and {NAME} is not set" if _device is None else ""
DEVICE = str(_device or "cpu")
"""For ``.to(DEVICE)`` in helpers; nothing runs where there is none."""
KIND = torch.device(DEVICE).type

LONG = 50_000_000
"""Cycles: some 30 ms, far longer than any step of the models here."""


def module() -> Any:
    """``torch.cuda``, ``torch.xpu``, ..."""
    return torch.get_device_module(KIND)


def has(name: str) -> bool:
    """Whether the backend's module has it."""
    return not MISSING and hasattr(module(), name)


def has_streams() -> bool:
    """Whether one stream can run beside another."""
    return not MISSING and torch.Stream(DEVICE) != torch.Stream(DEVICE)


def is_simulated() -> bool:
    """A backend outside of torch: numbers are the CPU's, and much is missing."""
    return torch._C._get_privateuse1_backend_name() == KIND


def current_stream() -> torch.Stream:
    return torch.accelerator.current_stream(DEVICE)


on = on_stream
"""What this thread enqueues in the block runs on the stream."""


def sleep(cycles: int = LONG) -> None:
    """Keep the present stream busy."""
    if has("_sleep"):
        module()._sleep(cycles)
        return
    wide = torch.ones(1024, 1024, device=DEVICE)
    for _ in range(cycles // 500_000):
        wide = wide @ wide / 1024.0


def event(timed: bool = False) -> torch.Event:
    """Recorded on the present stream."""
    made = torch.Event(DEVICE, enable_timing=timed)
    made.record(current_stream())
    return made


def synchronize() -> None:
    torch.accelerator.synchronize(DEVICE)


@contextmanager
def peak_bytes() -> Iterator[Callable[[], int]]:
    """Asked at the end: bytes of the device's memory in the worst moment, above those before."""
    gc.collect()  # what an earlier run left may not be freed inside of this one
    synchronize()
    torch.accelerator.empty_cache()
    torch.accelerator.reset_peak_memory_stats(DEVICE)
    before = torch.accelerator.memory_allocated(DEVICE)

    def taken() -> int:
        synchronize()
        return torch.accelerator.max_memory_allocated(DEVICE) - before

    yield taken


def sgd(params: Any) -> Any:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def fused_sgd(params: Any) -> Any:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True)


def adamw(params: Any) -> Any:
    return torch.optim.AdamW(params, lr=0.01)


def fused_adamw(params: Any) -> Any:
    return torch.optim.AdamW(params, lr=0.01, fused=True)


def assert_same(mine: list[Tensor], expected: list[Tensor]) -> None:
    """On a simulated device bit for bit; elsewhere within the rounding of its kernels."""
    assert len(mine) == len(expected) > 0
    for place, (a, b) in enumerate(zip(mine, expected, strict=True)):
        if is_simulated():
            assert torch.equal(a.cpu(), b.cpu()), place
        else:
            torch.testing.assert_close(a.cpu(), b.cpu(), rtol=1e-3, atol=1e-4)


def one_rank() -> None:
    """A group of this process alone; where torch has no backend for the device, one that copies."""
    backend = {"cuda": "cpu:gloo,cuda:nccl", "xpu": "cpu:gloo,xpu:xccl"}.get(KIND)
    if backend is not None:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
