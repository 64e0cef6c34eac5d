"""Differences between the backends of devices.

Streams and events are ``torch.Stream``, ``torch.Event`` and ``torch.accelerator``, which a backend
outside of torch gets with its device guard. Modules such as ``torch.cuda`` are used only for what
those lack, and may lack it, too.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .errors import UnsupportedError


def present_type() -> str:
    """The type of this machine's accelerator, else ``"cpu"``."""
    # In this order: torch 2.6 raises if the current accelerator is requested and there is none.
    present = torch.accelerator.is_available() and torch.accelerator.current_accelerator()
    return present.type if present else "cpu"


def streams_of(device: torch.device) -> Streams | None:
    """The streams of ``device``; None for the CPU and for a device with one queue.

    Apple's MPS has one queue: all threads enqueue into it, and all streams of torch are the same.
    Raises ``UnsupportedError`` if the device runs beside the host, and torch has no streams for it.
    """
    if device.type == "cpu":
        return None
    try:
        if torch.Stream(device) == torch.Stream(device):
            return None
        present = torch.accelerator.current_accelerator()
        if present is not None and present.type == device.type:
            return Streams(device)
        why = f"torch.accelerator is {present}, not this device"
    except (RuntimeError, ValueError) as error:
        why = f"torch.Stream: {error}"
    raise UnsupportedError(
        f"the optimizer's parameters are on {device}, where its steps cannot be put in order with "
        f"forward and backward ({why}). Use step_mode='sync' without offload, float32 parameters, "
        "and no AsyncOptimizer."
    )


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
    status = Path("/proc/self/status")  # Linux; ru_maxrss begins with that of the parent process
    host = re.search(r"VmHWM:\s*(\d+) kB", status.read_text() if status.exists() else "")
    found = {"device_peak_bytes": ask(), "host_peak_bytes": int(host[1]) * 1024 if host else 0}
    return {name: size for name, size in found.items() if size}


def is_capturing() -> bool:
    """Whether this thread captures its operations in a graph, such as CUDA's."""
    module: Any = torch.get_device_module(present_type())
    asks = getattr(module, "is_current_stream_capturing", None)
    return asks is not None and bool(module.is_initialized() and asks())


class Streams:
    """The streams of one device; any thread may use them. Only ``synchronize`` waits for it."""

    def __init__(self, device: torch.device) -> None:
        if device.index is None:
            # Each thread has a current device of its own.
            device = torch.accelerator.current_stream().device
        self.device = device

    def new(self) -> torch.Stream:
        return torch.Stream(self.device)

    def current(self) -> torch.Stream:
        """This thread's stream on this device."""
        return torch.accelerator.current_stream(self.device)

    def synchronize(self) -> None:
        """Wait until all streams of the device are empty."""
        torch.accelerator.synchronize(self.device)

    @contextmanager
    def on(self, stream: torch.Stream) -> Iterator[None]:
        """In the block this thread's operations go to ``stream``, and its device is current."""
        elsewhere, here = torch.accelerator.current_stream(), self.current()
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(here)
            torch.accelerator.set_stream(elsewhere)

    def event(self) -> Any:
        """A new event, on which the host sleeps while it waits, where the backend can.

        Its methods take no stream, as it may be of another class than ``torch.Event``: it records
        and waits on the current one.
        """
        if self.device.type == "cuda":  # torch.Event leaves ``blocking`` out, and the host spins
            return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        return torch.Event(self.device, blocking=True)
