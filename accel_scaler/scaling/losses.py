"""The losses of one window, before they are scaled: how many are inf or NaN, and their sum."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

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
    def are_on_host(self) -> bool:
        """To read them waits for nobody."""
        return all(value.device.type == "cpu" for value in self._values)

    def total(self) -> float | None:
        """The loss whose gradient the window has: the sum of all.

        Accelerate divides each by ``gradient_accumulation_steps``, so that of a full window it is
        the mean over its micro-batches; of one that the end of the data cut short, which Accelerate
        divides all the same, it is made to be that too. On this rank. Synchronises with a device
        other than the CPU.

        Returns None where there was none, or one that is no single real number.
        """
        values = [_plain(value) for value in self._values]
        if not values or not self._is_a_number or None in values:
            return None
        total = sum(float(value) for value in values if value is not None)
        return total * (self._full / self._micro_batches)

    @property
    def _micro_batches(self) -> int:
        """Accelerate counts ``step`` up in ``accumulate``, and sets it to 0 at the end of the data.
        Where it is 0 all the time nobody has called that."""
        if self._full == 1:
            return 1
        if self._steps == {0}:
            return min(len(self._values), self._full)
        return min(len(self._steps), self._full) or self._full


def _plain(value: Tensor) -> Tensor | None:
    """A tensor that can be read without asking other ranks; None: it cannot."""
    if isinstance(value, DTensor):
        is_whole = all(placement.is_replicate() for placement in value.placements)
        return value.to_local() if is_whole else None
    return None if value.device.type == "meta" else value
