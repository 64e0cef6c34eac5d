"""The losses of one window, before they are scaled: how many are inf or NaN, and their sum."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ..devices import Streams, streams_of
from ..errors import UnsupportedError

MAX_LOSSES = 1024
"""Of one window that are remembered."""


class Losses:
    """What was scaled in one window. Keeps no graph alive."""

    def __init__(self) -> None:
        self._values: list[Tensor] = []
        """Scalars; of another shape, or complex, whether all of it is finite."""
        self._is_a_number = True
        """Each was one real number, and all of them are there."""
        self._sum: float | None = None
        self._sent: tuple[Tensor, Any] | None = None
        """Pinned memory, and the event after which their sum is in it."""
        self._steps: set[int] = set()
        self._full = 1

    def note(self, losses: Iterable[Tensor]) -> None:
        """Remember some more. Does not synchronise."""
        for loss in losses:
            if len(self._values) == MAX_LOSSES:
                self._is_a_number = False
                return
            value = loss.detach()
            if value.numel() != 1 or value.is_complex():
                self._is_a_number = False
                value = torch.isfinite(value).all()
            self._values.append(value)
            self._sum = self._sent = None

    def note_step(self, step: int, accumulation: int) -> None:
        """The last one was of this micro-batch, and was divided by ``accumulation`` before."""
        self._steps.add(step)
        self._full = accumulation

    def bad(self) -> int:
        """How many are inf or NaN. Synchronises."""
        return sum(
            not bool(value if value.dtype is torch.bool else torch.isfinite(value).all())
            for value in self._values
        )

    def __bool__(self) -> bool:
        return bool(self._values)

    @property
    def is_there(self) -> bool:
        """Whether :meth:`total` returns without waiting for a device."""
        return self._sum is not None or all(v.device.type == "cpu" for v in self._values)

    def total(self) -> float | None:
        """The loss whose gradient the window has: the sum of all, on this rank.

        Accelerate divides each by ``gradient_accumulation_steps``, so that of a full window it is
        the mean over its micro-batches; of one that the end of the data cut short, which Accelerate
        divides all the same, it is made to be that too. Waits for what :meth:`send` has sent;
        synchronises where nothing was sent.

        Returns None where there was none, or one that is no single real number.
        """
        if self._sent is not None:
            host, event = self._sent
            event.synchronize()
            self._sum, self._sent = float(host), None
        if self._sum is None:
            values = self._scalars()
            if not values:
                return None
            numbers: list[Any] = [value.tolist() for value in values]
            self._sum = float(sum(numbers))
        return self._sum * (self._full / self._micro_batches)

    def send(self) -> None:
        """Their sum goes to the host, so that to read it later waits for nothing that is enqueued
        from here on. Does not synchronise."""
        if self._sum is not None:
            return
        values = self._scalars()
        devices = {value.device for value in values}
        streams = _streams_of(devices.pop()) if len(devices) == 1 else None
        if streams is None or any(value.dtype is torch.float64 for value in values):
            return
        with streams.on(streams.current()):  # pinned memory is of the device that is current
            host = torch.empty((), dtype=torch.float32, pin_memory=True)
            host.copy_(torch.stack(values).float().sum(), non_blocking=True)
            event = streams.event()
            event.record()
        self._sent = host, event

    def _scalars(self) -> list[Tensor]:
        """Each as a tensor of shape () that can be read without asking other ranks; empty: some
        cannot."""
        values = list(map(_local_value, self._values)) if self._is_a_number else []
        found = [value.reshape(()) for value in values if value is not None]
        return found if len(found) == len(values) else []

    @property
    def _micro_batches(self) -> int:
        """Accelerate counts ``step`` up in ``accumulate``, and sets it to 0 at the end of the data.
        Where it is 0 all the time nobody has called that."""
        if self._full == 1:
            return 1
        if self._steps == {0}:
            return min(len(self._values), self._full)
        return min(len(self._steps), self._full) or self._full


@cache
def _streams_of(device: torch.device) -> Streams | None:
    """None: the loss is read when it is wanted, which waits for the device."""
    try:
        return streams_of(device)
    except UnsupportedError:
        return None


def _local_value(value: Tensor) -> Tensor | None:
    """None: it is not all on this rank."""
    if isinstance(value, DTensor):
        is_whole = all(placement.is_replicate() for placement in value.placements)
        return value.to_local() if is_whole else None
    return None if value.device.type == "meta" else value
