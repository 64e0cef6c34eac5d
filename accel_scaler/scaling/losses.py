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

MOST_LOSSES = 1024
"""Of one window that are remembered."""


class Losses:
    """What was scaled in one window. Keeps no graph alive."""

    def __init__(self) -> None:
        self._values: list[Tensor] = []
        """Scalars; of another shape, or complex, whether all of it is finite."""
        self._is_a_number = True
        """Each was one real number, and all of them are there."""
        self._bad: int | None = None
        self._sum: float | None = None
        self._sent: tuple[Tensor, Any] | None = None
        """Pinned memory, and the event after which their sum is in it."""
        self._steps: set[int] = set()
        self._full = 1

    def note(self, losses: Iterable[Tensor]) -> None:
        """Remember some more. Does not synchronise."""
        for loss in losses:
            if len(self._values) == MOST_LOSSES:
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
        if self._bad is None:
            self._bad = sum(
                not bool(value if value.dtype is torch.bool else torch.isfinite(value).all())
                for value in self._values
            )
        return self._bad

    def __bool__(self) -> bool:
        return bool(self._values)

    @property
    def is_there(self) -> bool:
        """To read their sum waits for nobody."""
        return self._sum is not None or all(v.device.type == "cpu" for v in self._values)

    def total(self) -> float | None:
        """The loss whose gradient the window has: the sum of all.

        Accelerate divides each by ``gradient_accumulation_steps``, so that of a full window it is
        the mean over its micro-batches; of one that the end of the data cut short, which Accelerate
        divides all the same, it is made to be that too. On this rank. Waits for what
        :meth:`send` has sent; synchronises where nothing was sent or told.

        Returns None where there was none, or one that is no single real number.
        """
        if self._sent is not None:
            host, event = self._sent
            event.synchronize()
            self._sum, self._sent = float(host), None
        if self._sum is None:
            values = self._plain()
            if not values:
                return None
            numbers: list[Any] = [value.tolist() for value in values]
            self._sum = float(sum(numbers))
        return self._sum * (self._full / self._micro_batches)

    def sum_on(self, device: torch.device) -> Tensor | None:
        """Their sum, float32, shape (), to be brought to the host with other numbers, which
        :meth:`tell` is told of; None: they are elsewhere, or are no numbers of that kind. Does not
        synchronise."""
        values = self._plain()
        if not values or any(v.device != device or v.dtype is torch.float64 for v in values):
            return None
        return values[0].float() if len(values) == 1 else torch.stack(values).float().sum()

    def send(self) -> None:
        """Their sum goes to the host, unless it is there: to read it later waits for nothing that
        is enqueued from here on. Does not synchronise."""
        if self._sum is not None or not self._values:
            return
        device = self._values[0].device
        total = None if device.type == "cpu" else self.sum_on(device)
        streams = None if total is None else _streams_of(device)
        if total is None or streams is None:
            return
        with streams.on(streams.current()):  # pinned memory is of the device that is current
            host = torch.empty((), dtype=torch.float32, pin_memory=True)
            host.copy_(total, non_blocking=True)
            event = streams.event()
            event.record()
        self._sent = host, event

    def tell(self, total: float) -> None:
        """What :meth:`sum_on` gave has come to the host."""
        self._sum = total

    def _plain(self) -> list[Tensor]:
        """Each as a tensor of shape () that can be read without asking other ranks; empty: some
        cannot."""
        values = list(map(_whole, self._values)) if self._is_a_number else []
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
    """None: the loss is read when it is wanted, and whoever reads it waits."""
    try:
        return streams_of(device)
    except UnsupportedError:  # nothing depends on that here
        return None


def _whole(value: Tensor) -> Tensor | None:
    """None: it is not all here."""
    if isinstance(value, DTensor):
        is_whole = all(placement.is_replicate() for placement in value.placements)
        return value.to_local() if is_whole else None
    return None if value.device.type == "meta" else value
