"""The losses of one window before scaling: their sum, and the number that are inf or NaN."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..devices import event_after, present_stream
from .gradients import local


class Losses:
    """The losses of one window. Keeps no graph alive."""

    def __init__(self) -> None:
        self._values: list[Tensor] = []
        """Each loss, shape (); a flag, is it finite, for shards, vectors and complex numbers."""
        self._are_numbers = True
        self._divisor = 1
        self._sent: tuple[Tensor, Any] | None = None
        """Pinned memory, and the event after which the sum of the losses is in it."""

    def note(self, losses: Iterable[Tensor], divisor: int = 1) -> None:
        """Remember some more. Does not synchronise. ``divisor``: of their sum, the same for all
        losses of a window."""
        self._sent, self._divisor = None, divisor
        for loss in losses:
            if type(loss) is Tensor and loss.dim() == 0 and loss.is_floating_point():
                self._values.append(loss.detach())  # nearly always
                continue
            value = local(loss.detach())
            is_whole = all(each.is_replicate() for each in getattr(loss, "placements", ()))
            if value.numel() != 1 or value.is_complex() or not is_whole:
                self._are_numbers = False
                value = torch.isfinite(value).all()
            self._values.append(value.reshape(()))

    def bad(self) -> int:
        """The number of losses that are inf or NaN. Synchronises."""
        return sum(
            not bool(value if value.dtype is torch.bool else torch.isfinite(value))
            for value in self._values
        )

    def __bool__(self) -> bool:
        return bool(self._values)

    @property
    def is_there(self) -> bool:
        """Whether :meth:`total` returns without waiting for a device."""
        return all(value.device.type == "cpu" for value in self._values)

    def total(self) -> float | None:
        """The loss whose gradient the window has: the sum of all, on this rank, divided. Accelerate
        divides each loss by ``gradient_accumulation_steps``, so in a full window it is the mean
        over micro-batches. None without a loss, or with a loss that is not one real number. Waits
        for the copy of :meth:`send`; without one it synchronises."""
        if self._sent is not None:
            host, event = self._sent
            event.synchronize()
            return float(host)
        if not self._values or not self._are_numbers:
            return None
        numbers: list[Any] = [value.tolist() for value in self._values]
        return float(sum(numbers)) / self._divisor

    def send(self) -> None:
        """Begin to copy the sum to the host, so that :meth:`total` does not wait for operations
        that are enqueued after this call. Does not synchronise."""
        devices = {value.device for value in self._values}
        if len(devices) != 1 or not self._are_numbers:
            return
        if present_stream(device := devices.pop()) is None:
            return
        host = torch.empty((), dtype=torch.float32, device="cpu", pin_memory=True)
        total = torch.stack(self._values).float().sum() / self._divisor
        host.copy_(total, non_blocking=True)
        self._sent = host, event_after(device)
