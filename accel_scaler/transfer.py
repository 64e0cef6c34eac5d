"""Copies between a device and host memory, and the stream that updates run on.

The only file that knows streams, events and pinned memory. On a CPU nothing is asynchronous:
marks are None, and copies go from one host buffer to another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

__all__ = ["Lane"]


class Lane:
    """The side streams of one device: one for the optimizer's work, one for copies to the host.

    None of the methods waits on the host, except :meth:`wait_on_host`.
    """

    def __init__(self, device: torch.device) -> None:
        module: Any = None if device.type in ("cpu", "mps") else torch.get_device_module(device)
        if module is not None and device.index is None:
            # Another thread's current device is its own.
            device = torch.device(device.type, module.current_device())
        self.device, self._api = device, module
        self._home: Any = None
        """The stream that the training thread handed the last step over from."""
        with self._here():
            self._work: Any = None if module is None else module.Stream()
            self._down: Any = None if module is None else module.Stream()

    @contextmanager
    def _here(self) -> Iterator[None]:
        if self._api is None:
            yield
            return
        with self._api.device(self.device):
            yield

    def mark(self, home: bool = False) -> Any:
        """A point in the present stream of this thread; None on a CPU.

        ``home``: this is the stream that trains, which follows every mark that anybody follows.
        """
        if self._api is None:
            return None
        with self._here():
            if home:
                self._home = self._api.current_stream()
            event = self._api.Event()
            event.record()
            return event

    def follow(self, mark: Any) -> None:
        """What this thread, or the training thread, enqueues from here on comes after ``mark``."""
        if mark is None:
            return
        with self._here():
            stream = self._api.current_stream()
            stream.wait_event(mark)
            if self._home is not None and self._home != stream:
                self._home.wait_event(mark)

    def wait_on_host(self, mark: Any) -> None:
        """Block this thread until the device has come to ``mark``."""
        if mark is not None:
            mark.synchronize()

    @contextmanager
    def beside(self, after: Any) -> Iterator[None]:
        """Enqueue on the side stream, after the mark ``after``."""
        if self._api is None:
            yield
            return
        with self._here(), self._api.stream(self._work):
            self._work.wait_event(after)
            yield

    def keep(self, tensors: Iterable[Tensor | None]) -> None:
        """Their memory is not given to others before the side stream is done with them."""
        for tensor in tensors if self._api is not None else ():
            if tensor is None or tensor.device.type != self.device.type:
                continue
            if tensor.layout is torch.strided:
                tensor.record_stream(self._work)
            elif tensor.layout is torch.sparse_coo:
                tensor._indices().record_stream(self._work)
                tensor._values().record_stream(self._work)

    def host_like(
        self, tensors: Sequence[Tensor], dtype: torch.dtype | None = None
    ) -> list[Tensor]:
        """Host tensors of the same shapes and strides, in one buffer for each dtype.

        Pinned where the device is not the CPU. Uninitialised.
        """
        dtypes = [dtype or t.dtype for t in tensors]
        lengths = [_storage_length(t) for t in tensors]
        buffers: dict[torch.dtype, Tensor] = {}
        for kind in dict.fromkeys(dtypes):
            total = sum(n for n, d in zip(lengths, dtypes, strict=True) if d is kind)
            with self._here():
                buffers[kind] = torch.empty(total, dtype=kind, pin_memory=self._api is not None)
        used = dict.fromkeys(buffers, 0)
        views = []
        for t, length, kind in zip(tensors, lengths, dtypes, strict=True):
            start = used[kind]
            used[kind] += length
            views.append(buffers[kind].as_strided(t.shape, t.stride(), start))
        return views

    def down(self, source: Tensor, host: Tensor) -> Any:
        """Copy to the host behind this thread's stream; returns the mark of its end."""
        if self._api is None:
            host.copy_(source)
            return None
        with self._here():
            self._down.wait_stream(self._api.current_stream())
            with self._api.stream(self._down):
                host.copy_(source, non_blocking=True)
                source.record_stream(self._down)
                event = self._api.Event()
                event.record()
                return event

    def up(self, host: Tensor, target: Tensor, staging: Tensor | None = None) -> None:
        """Copy to the device, inside :meth:`beside`. ``staging``: pinned, of the target's dtype."""
        if staging is not None:
            host = staging.copy_(host)
        target.copy_(host, non_blocking=self._api is not None)

    @property
    def is_host(self) -> bool:
        """Whether the device's memory is the host's."""
        return self._api is None

    def reaches(self, tensor: Tensor) -> bool:
        """Whether copies of ``tensor`` run on this lane's streams."""
        return self.is_host or tensor.device == self.device


def _storage_length(t: Tensor) -> int:
    """Elements from the first to the last one that the strides reach."""
    if t.numel() == 0:
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
