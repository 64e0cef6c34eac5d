"""How far gradients are from an overflow, so that the scale grows only where it may last."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .gradients import largest_of

LOOKS = 32
"""How often the largest gradient is measured between two growths of the scale."""


class Headroom:
    """How far the largest scaled gradient is from an overflow.

    As TransformerEngine's history of largest elements and OpenSeq2Seq's LogMax it foresees one. A
    gradient of a parameter says little of the gradients of activations, so where an activation's
    overflows first, the level of that window is the limit, until gradients have been above it and
    finite.
    """

    def __init__(self, interval: int) -> None:
        self._every = max(interval // LOOKS, 1)
        self._seen: list[tuple[Tensor, float]] = []
        """Largest elements, shape (), and their scales."""
        self._limit = torch.finfo(torch.float16).max

    def look(self, parameters: Sequence[Tensor], window: int, scale: float) -> None:
        """Remember the largest gradient of some windows. Does not synchronise."""
        if window % self._every == 0:
            self._seen += [(each, scale) for each in _largest(parameters)]

    def has_overflowed(self, parameters: Sequence[Tensor], factor: float) -> None:
        """Lower the limit: these gradients overflowed when they were ``factor`` times as large.
        Synchronises."""
        largest = max(map(float, _largest(parameters)), default=math.inf)
        self._limit = min(self._limit, largest * factor)

    def level(self) -> float:
        """The largest gradient since the last call, unscaled. Synchronises."""
        seen, self._seen = [(float(largest), scale) for largest, scale in self._seen], []
        finite = [(x, scale) for x, scale in seen if math.isfinite(x)]
        if any(x >= self._limit for x, _ in finite):
            self._limit = torch.finfo(torch.float16).max
        return max((x / scale for x, scale in finite), default=0.0)

    def is_enough_for(self, level: float) -> bool:
        """Whether gradients of this size will not overflow, as far as is known."""
        return level < self._limit


def _largest(parameters: Sequence[Tensor]) -> list[Tensor]:
    """On each device the largest magnitude in any of their gradients."""
    found: dict[torch.device, list[Tensor]] = {}
    for each in largest_of(parameters).values():
        found.setdefault(each.device, []).append(each.float())
    return [torch.stack(each).amax() for each in found.values()]
