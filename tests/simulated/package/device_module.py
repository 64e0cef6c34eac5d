"""``torch.<NAME>``: the functions of ``torch.cuda`` that tests need."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from . import _C

NAME = os.environ.get("SIM_NAME", "simdev")
Device = torch.device | str | int | None


def _index(d: Device) -> int:
    if d is None:
        return _C.get_device()
    if isinstance(d, int):
        return d
    d = torch.device(d)
    return _C.get_device() if d.index is None else d.index


class device:  # noqa: N801
    """Make a device the current one in a ``with`` block."""

    def __init__(self, d: Device) -> None:
        self.idx = _index(d)
        self.prev = -1

    def __enter__(self) -> None:
        self.prev = _C.exchange_device(self.idx)

    def __exit__(self, *_: object) -> None:
        _C.exchange_device(self.prev)


class Stream(torch.Stream):
    """A stream of the pool. Priorities have no effect."""

    def __new__(cls, device: Device = None, priority: int = 0, **kwargs: Any) -> Stream:
        if kwargs:
            return super().__new__(cls, priority=priority, **kwargs)
        return super().__new__(cls, torch.device(NAME, _index(device)), priority=priority)


def Event(  # noqa: N802
    enable_timing: bool = False, blocking: bool = False, interprocess: bool = False
) -> torch.Event:
    """A function, since ``torch.Event.elapsed_time`` takes no subclass."""
    return torch.Event(torch.device(NAME, _C.get_device()), enable_timing=enable_timing)


@contextlib.contextmanager
def stream(s: torch.Stream | None) -> Iterator[None]:
    """Enqueue on this stream in a ``with`` block."""
    if s is None:
        yield
        return
    prev = current_stream(s.device)
    before = _C.exchange_device(s.device.index)
    torch._C._accelerator_setStream(s)
    try:
        yield
    finally:
        torch._C._accelerator_setStream(prev)
        _C.exchange_device(before)


def current_stream(d: Device = None) -> torch.Stream:
    return torch._C._accelerator_getStream(_index(d))


def set_stream(s: torch.Stream) -> None:
    torch._C._accelerator_setStream(s)


def synchronize(d: Device = None) -> None:
    torch._C._accelerator_synchronizeDevice(_index(d))


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None:
    pass


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return _C.device_count()


def current_device() -> int:
    return _C.get_device()


def set_device(d: Device) -> None:
    _C.exchange_device(_index(d))


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


def is_bf16_supported() -> bool:
    return True


def get_rng_state(device: Device = None) -> Tensor:
    """Random kernels run with the CPU's default generator."""
    return torch.default_generator.get_state()


def set_rng_state(state: Tensor, device: Device = None) -> None:
    torch.default_generator.set_state(state)


def manual_seed(seed: int) -> None:
    pass


def manual_seed_all(seed: int) -> None:
    pass


def initial_seed() -> int:
    return torch.default_generator.initial_seed()


_MODES = {"default": 0, "warn": 1, "error": 2}


def set_sync_debug_mode(mode: str | int) -> None:
    """Warn at each synchronisation, or raise."""
    _C.set_sync_mode(_MODES[mode] if isinstance(mode, str) else mode)


def get_sync_debug_mode() -> int:
    return _C.get_sync_mode()


def _sleep(cycles: float) -> None:
    """Keep the current stream busy, for cycles of 1.66 GHz as on a V100."""
    _C.sleep_us(int(cycles / 1660))


# Memory is counted for each device as CUDA's allocator counts it where nothing is fragmented.
OutOfMemoryError = torch.OutOfMemoryError
empty_cache = _C.empty_cache
set_memory = _C.set_memory
"""How many bytes each device has; 0 sets no limit."""


def memory_stats(d: Device = None) -> dict[str, int]:
    return torch.accelerator.memory_stats(_index(d))


def memory_allocated(d: Device = None) -> int:
    return memory_stats(d)["allocated_bytes.all.current"]


def max_memory_allocated(d: Device = None) -> int:
    return memory_stats(d)["allocated_bytes.all.peak"]


def memory_reserved(d: Device = None) -> int:
    return memory_stats(d)["reserved_bytes.all.current"]


def max_memory_reserved(d: Device = None) -> int:
    return memory_stats(d)["reserved_bytes.all.peak"]


def reset_peak_memory_stats(d: Device = None) -> None:
    torch.accelerator.reset_peak_memory_stats(_index(d))


def reset_accumulated_memory_stats(d: Device = None) -> None:
    torch.accelerator.reset_accumulated_memory_stats(_index(d))


def mem_get_info(d: Device = None) -> tuple[int, int]:
    """Free and total bytes; where no limit is set, the total is the address space."""
    return torch.accelerator.get_memory_info(_index(d))


def stream_count(d: Device = None) -> int:
    """How many streams were ever made beside the default one."""
    return _C.stream_count(_index(d))


_UNITS = {"up_gbps": 1e9, "down_gbps": 1e9, "memory_gbps": 1e9, "tflops": 1e12, "launch_us": 1e-6}


def set_cost(*, arithmetic: bool = True, **speeds: float) -> None:
    """Let time pass for copies and kernels; a speed that is left out costs none.

    Args:
        arithmetic: False lets time pass and counts memory, but computes and copies nothing, so a
            model can have its real size.
        speeds: ``up_gbps``, ``down_gbps``, ``memory_gbps``, ``tflops`` and ``launch_us``. Without
            any of them the cost model is off.
    """
    if unknown := speeds.keys() - _UNITS.keys():
        raise TypeError(f"set_cost: got {sorted(unknown)}, expected some of {list(_UNITS)}")
    for d in range(device_count()):
        synchronize(d)
    _C.set_cost(*(speeds.get(name, 0.0) * unit for name, unit in _UNITS.items()), arithmetic)


def cost_stats(d: Device = None, reset: bool = False) -> dict[str, float]:
    """For how many seconds each engine was busy, and by how much a stream was ever late, in us."""
    return _C.cost_stats(_index(d), reset)


set_delay, set_poison = _C.set_delay, _C.set_poison
set_check, set_strict = _C.set_check, _C.set_strict
races, clear_races, stats = _C.races, _C.clear_races, _C.stats
