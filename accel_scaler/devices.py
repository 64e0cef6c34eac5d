"""Differences between the backends of devices.

Streams are ``torch.Stream`` and ``torch.accelerator``, which a backend outside of torch gets with
its device guard. Modules such as ``torch.cuda`` are used only for what those lack, and may lack it,
too.
"""

from __future__ import annotations

import logging
import platform
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

logger = logging.getLogger("accel_scaler")


def present_type() -> str:
    """The type of this machine's accelerator, else ``"cpu"``."""
    # In this order: torch 2.6 raises if the current accelerator is requested and there is none.
    present = torch.accelerator.is_available() and torch.accelerator.current_accelerator()
    return present.type if present else "cpu"


def is_host(device: torch.device) -> bool:
    """Whether tensors on ``device`` are in the host's memory: a CPU's, or unified memory."""
    return device.type in ("cpu", "mps")


def present_stream(device: torch.device) -> torch.Stream | None:
    """This thread's stream on ``device``; None for the CPU and for MPS, which has one queue."""
    if is_host(device) or device.type != present_type():
        return None
    return torch.accelerator.current_stream(device)


def event_after(device: torch.device) -> Any:
    """An event behind all that this thread has enqueued on its stream of ``device``; the host
    sleeps while it waits for it, where the backend can."""
    if device.type == "cuda":  # torch.Event leaves ``blocking`` out, and the host spins
        event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(device))  # it does not know a torch.Stream
        return event
    event = torch.Event(device, blocking=True)
    event.record(torch.accelerator.current_stream(device))
    return event


@cache
def can_pin() -> bool:
    """Whether this machine's accelerator pins host memory, so that copies to it are awaited by
    events."""
    try:
        torch.empty(1, device="cpu", pin_memory=True)
    except (RuntimeError, NotImplementedError):
        return False
    return True


@contextmanager
def on_stream(stream: Any) -> Iterator[None]:
    """In the block this thread's operations go to ``stream``."""
    there = torch.accelerator.current_stream(stream.device)
    before = torch.accelerator.current_stream()
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(there)
        torch.accelerator.set_stream(before)  # which brings the present device back


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
        event_after(stream.device).synchronize()


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


class MemoryUse(NamedTuple):
    """Bytes of tensors on a device, as this process's allocator counts them."""

    now: int
    ever: int
    """All that was ever allocated, freed or not."""
    peak: int


def memory_use(device: torch.device) -> MemoryUse | None:
    """The memory in use; None where the backend does not count it. Does not synchronise."""
    module = torch.get_device_module(device)
    names = ("current", "allocated", "peak")
    if (ask := getattr(module, "memory_stats_as_nested_dict", None)) is not None:  # at a tenth
        counts = ask(device)["allocated_bytes"]["all"]
        return MemoryUse(*(counts[name] for name in names))
    stats = module.memory_stats(device) if hasattr(module, "memory_stats") else {}
    found = [stats[key] for name in names if (key := f"allocated_bytes.all.{name}") in stats]
    return MemoryUse(*found) if len(found) == len(names) else None


def total_memory(device: torch.device) -> int | None:
    """Bytes that ``device`` has; None where the backend does not say."""
    ask = getattr(torch.get_device_module(device), "mem_get_info", None)
    return None if ask is None else int(ask(device)[1])


def pinned_zeros(length: int, device: torch.device) -> tuple[Tensor, Callable[[], object] | None]:
    """Zeros in host memory that ``device`` can copy beside its kernels, float32, shape (length,),
    and the function that unpins it, where that is not the allocator's work.

    Memory that cannot be pinned stays pageable, and a warning says so once. Raises
    ``RuntimeError`` where there is not enough of it.
    """
    if device.type == "cuda":
        # torch rounds memory that it pins up to a power of two: 20 GiB would take 32.
        memory, runtime = torch.zeros(length, dtype=torch.float32), cast(Any, torch.cuda).cudart()
        code = int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 0) if length else 0)
        if code == 0:
            return memory, partial(runtime.cudaHostUnregister, memory.data_ptr())
        why = f"cudaHostRegister gave error {code}"
    else:
        try:
            return torch.zeros(length, dtype=torch.float32, pin_memory=True), None
        except (RuntimeError, NotImplementedError) as error:
            memory, why = torch.zeros(length, dtype=torch.float32), str(error)
    warn_once(
        f"offload='cpu': {memory.nbytes / 2**30:.2f} GiB of host memory cannot be pinned ({why}), "
        "so state is copied through the driver's buffers while the step waits, several times as "
        "slowly. Raise the limit of locked memory (ulimit -l; in a container --ulimit memlock=-1)."
    )
    return memory, None


def is_capturing() -> bool:
    """Whether this thread captures its operations in a graph, such as CUDA's."""
    module: Any = torch.get_device_module(present_type())
    asks = getattr(module, "is_current_stream_capturing", None)
    return asks is not None and bool(module.is_initialized() and asks())


def warn_where_idle(step_mode: str, offload: str, device: torch.device) -> None:
    """Log, once a process, a setting that has nothing to do on ``device``."""
    if offload == "cpu" and is_host(device):
        kind = device.type.upper()
        warn_once(f"offload='cpu': the model is on {kind}, so its state is in host memory anyway.")
    if step_mode == "overlap" and device.type != "cpu":
        warn_once(
            f"step_mode='overlap': on {device.type} parameters are updated as in 'sync'. A device "
            "has nothing to gain: its optimizer takes 2 to 5 per cent of a step."
        )


@cache
def warn_once(text: str) -> None:
    """Log a warning, once a process."""
    logger.warning("%s", text)
