"""Differences between the backends of devices.

Streams are ``torch.Stream`` and ``torch.accelerator``, which a backend outside of torch gets with
its device guard. Modules such as ``torch.cuda`` are used only for what those lack, and may lack it,
too.
"""

from __future__ import annotations

import logging
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

logger = logging.getLogger("accel_scaler")


def present_type() -> str:
    """The type of this machine's accelerator, else ``"cpu"``."""
    # In this order: torch 2.6 raises if the current accelerator is requested and there is none.
    present = torch.accelerator.is_available() and torch.accelerator.current_accelerator()
    return present.type if present else "cpu"


def present_stream(device: torch.device) -> torch.Stream | None:
    """This thread's stream on ``device``; None for the CPU and for MPS, which has one queue."""
    if device.type in ("cpu", "mps") or device.type != present_type():
        return None
    return torch.accelerator.current_stream(device)


def new_event(device: torch.device) -> Any:
    """An event on which the host sleeps while it waits, where the backend can."""
    if device.type == "cuda":  # torch.Event leaves ``blocking`` out, and the host spins
        return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    return torch.Event(device, blocking=True)


@contextmanager
def as_on_stream(stream: torch.Stream | None) -> Iterator[None]:
    """In the block this thread's operations go to ``stream``; at its end the device is past them.
    None: nothing changes."""
    if stream is None:
        yield
        return
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        event = new_event(stream.device)
        event.record(stream)
        event.synchronize()


def device_name(device: torch.device) -> str:
    """The name of the model, such as ``"Tesla T4"``; the architecture of a CPU."""
    if device.type != "cpu":
        ask = getattr(torch.get_device_module(device), "get_device_name", None)
        return device.type if ask is None else str(ask(device))
    return platform.processor() or platform.machine()


def peak_memory() -> dict[str, float]:
    """Peak bytes of this process so far: of tensors on the accelerator, as its allocator counts,
    and of the whole process on the host; unknown ones are left out. Does not synchronise."""
    ask = getattr(torch.get_device_module(present_type()), "max_memory_allocated", int)
    status = Path("/proc/self/status")  # Linux; ru_maxrss begins with the parent process's
    host = re.search(r"VmHWM:\s*(\d+) kB", status.read_text() if status.exists() else "")
    found = {"device_peak_bytes": ask(), "host_peak_bytes": int(host[1]) * 1024 if host else 0}
    return {name: size for name, size in found.items() if size}


def is_capturing() -> bool:
    """Whether this thread captures its operations in a graph, such as CUDA's."""
    module: Any = torch.get_device_module(present_type())
    asks = getattr(module, "is_current_stream_capturing", None)
    return asks is not None and bool(module.is_initialized() and asks())


def warn_where_idle(step_mode: str, offload: str, device: torch.device) -> None:
    """Log, once a process, a setting that has nothing to do on ``device``."""
    if offload == "cpu" and device.type == "cpu":
        warn_once("offload='cpu': the model is on the CPU, so its state is in host memory anyway.")
    if step_mode == "overlap" and device.type != "cpu":
        warn_once(
            f"step_mode='overlap': on {device.type} parameters are updated as in 'sync'. A device "
            "has nothing to gain: its optimizer takes 2 to 5 per cent of a step."
        )


@cache
def warn_once(text: str) -> None:
    """Log a warning, once a process."""
    logger.warning("%s", text)
