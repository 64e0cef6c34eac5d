"""Kinds of devices: the one file that knows what their backends have and lack.

Streams and events are ``torch.Stream``, ``torch.Event`` and ``torch.accelerator``, which a backend
outside of torch gets with its device guard; modules such as ``torch.cuda`` are asked only for what
those lack, and may lack it too.
"""

from __future__ import annotations

import platform
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from .errors import UnsupportedError

__all__ = [
    "Streams",
    "device_name",
    "is_capturing",
    "present_type",
    "refuse_capture",
    "streams_of",
]


def present_type() -> str:
    """Type of the accelerator that torch finds in this machine, else ``"cpu"``."""
    # In this order: without a device torch 2.6 has an error for whoever asks for the current one.
    present = torch.accelerator.is_available() and torch.accelerator.current_accelerator()
    return present.type if present else "cpu"


def streams_of(device: torch.device) -> Streams | None:
    """The streams of ``device``; None where one queue, or the host itself, keeps the order.

    Apple's MPS is such a queue: all threads enqueue into it, and every stream that torch makes
    there is the same one.

    Raises:
        UnsupportedError: what runs there runs beside the host, and torch has no stream for it.
    """
    if device.type == "cpu":
        return None
    try:
        has_one_queue = torch.Stream(device) == torch.Stream(device)
    except (RuntimeError, ValueError) as error:
        raise _unordered(device, f"torch.Stream: {error}") from error
    if has_one_queue:
        return None
    present = torch.accelerator.current_accelerator()
    if present is None or present.type != device.type:
        raise _unordered(device, f"torch.accelerator is {present}, and gives no other's streams")
    return Streams(device)


def _unordered(device: torch.device, why: str) -> UnsupportedError:
    return UnsupportedError(
        f"the optimizer's parameters are on {device}, where its steps cannot be put in order with "
        f"forward and backward ({why}). Use step_mode='sync' without offload, float32 parameters, "
        "and no AsyncOptimizer; or a device whose backend has streams."
    )


def device_name(device: torch.device) -> str:
    """The name of the model, such as ``"Tesla T4"``; the architecture of a CPU."""
    if device.type != "cpu":
        ask = getattr(torch.get_device_module(device), "get_device_name", None)
        return device.type if ask is None else str(ask(device))
    return platform.processor() or platform.machine()


def is_capturing() -> bool:
    """Whether this thread's operations go into a graph (as of CUDA) instead of running."""
    present = torch.accelerator.current_accelerator()
    if present is None:
        return False
    module: Any = torch.get_device_module(present)
    asks = getattr(module, "is_current_stream_capturing", None)
    return asks is not None and bool(module.is_initialized() and asks())


def refuse_capture(call: str) -> None:
    """Raise ``UnsupportedError`` where a graph is being captured on this thread's stream.

    A graph holds operations of one thread that nobody waits for. A step waits for the device, to
    know of an overflow; and while a graph is captured no other thread may ask a device for memory.
    """
    if is_capturing():
        raise UnsupportedError(
            f"{call}: a graph is being captured on this stream. A step that is checked, or done by "
            "another thread, cannot be part of it. Call optimizer.synchronize() before the "
            "capture, capture forward and backward alone, and step outside of it."
        )


class Streams:
    """Of one device. Several threads may use it; a present stream is each thread's own.

    None of the methods waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        if device.index is None:
            # Another thread's current device is its own.
            device = torch.accelerator.current_stream().device
        self.device = device

    def new(self) -> torch.Stream:
        """One that runs beside the others."""
        return torch.Stream(self.device)

    def current(self) -> torch.Stream:
        """This thread's, on this device."""
        return torch.accelerator.current_stream(self.device)

    def synchronize(self) -> None:
        """Wait until all streams have done what they were given."""
        torch.accelerator.synchronize(self.device)

    @contextmanager
    def on(self, stream: torch.Stream) -> Iterator[None]:
        """This thread enqueues on ``stream``, whichever its device and stream were."""
        elsewhere, here = torch.accelerator.current_stream(), self.current()
        torch.accelerator.set_stream(stream)
        try:
            yield
        finally:
            torch.accelerator.set_stream(here)
            torch.accelerator.set_stream(elsewhere)

    def event(self) -> Any:
        """Not recorded yet. A host that waits for it sleeps, where the backend can.

        Give its methods no stream, for it may be of another class than ``torch.Event``: it records
        and waits on the present one.
        """
        if self.device.type == "cuda":  # torch.Event leaves ``blocking`` out, and the host spins
            return torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        return torch.Event(self.device, blocking=True)
