"""The exchange between ranks about an overflow.

Note [Ranks that explain together]
Ranks communicate about an overflow only where all of them are known to have it
(:meth:`.Ranks.all_have`) and to have the same settings. Otherwise each rank explains its own
overflows, no module is healed and nothing made again. In one window a rank may first be alone with
the overflow of one optimizer, and then be together with the others about the overflow of the next
one. Whatever it did alone it does again there, since the others wait for it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

import torch
from torch.optim import Optimizer

from ..scaling import (
    GradScaler,
    Origin,
    Window,
    gather_objects,
    has_ranks,
    is_rank_0,
    parameters_of,
)

logger = logging.getLogger("accel_scaler")

T = TypeVar("T")

ALONE = (
    "the ranks are not known to have overflowed together: they step alone, may run out of inputs "
    "(Join), have other settings, or were attached after prepare"
)
"""Why ranks do not run a window again."""


def raised(error: Exception) -> str:
    """Why a window cannot be made again that has raised this: the model did, or memory ran out."""
    return f"it raised {type(error).__name__}: {error}"


class Meeting:
    """The ranks that communicate about the present overflow: all, or this one alone."""

    def __init__(self, scaler: GradScaler) -> None:
        self._scaler = scaler
        self.is_everywhere = False
        """Whether every rank has the same settings."""
        self.is_together = False
        """Whether all ranks have the present overflow."""
        self._device = torch.device("cpu")
        self._said: set[str] = set()

    def meet(self, optimizers: Sequence[Optimizer], window: Window) -> None:
        """Find out whether all ranks have the overflow of these optimizers in this window."""
        self._device = parameters_of(optimizers[0])[0].device
        # An overflow that an optimizer has caught from another one may be this rank's alone.
        own = [each for each in optimizers if window.record(each).verdict is not False]
        self.is_together = self.is_everywhere and any(map(self._scaler.ranks.all_have, own))

    @property
    def is_alone(self) -> bool:
        """Whether there are other ranks, and they are not known to come here."""
        return has_ranks() and not self.is_together

    @property
    def speaks(self) -> bool:
        """Whether this rank writes the log for all ranks that are here."""
        return not self.is_together or is_rank_0()

    def warn_once(self, text: str, where: str = "") -> None:
        """Log this text, after ``where``, unless it was logged before."""
        if text not in self._said:
            self._said.add(text)
            logger.warning("%s%s", where, text)

    def gather(self, value: T) -> list[T]:
        """``value`` of every rank that is here."""
        return gather_objects(value, self._device) if self.is_together else [value]

    def any(self, answer: bool) -> bool:
        return any(self.gather(answer))

    def first(self, why: str) -> str:
        """The first rank's obstacle that is not ""."""
        return next(filter(None, self.gather(why)), "")

    def agreed(self, found: Origin | None) -> Origin | None:
        """The origin that the first rank has found, of ranks that have found a module, if any."""
        answers = [(n, other) for n, other in enumerate(self.gather(found)) if other is not None]
        if not self.is_together or not answers:
            return found
        rank, first = max(answers, key=lambda answer: bool(answer[1].module))
        return replace(first, text=f"{first.text} (rank {rank})")
