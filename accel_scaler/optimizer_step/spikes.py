"""``skip_norm_above``: which gradient norm is a spike, so that its step is left out."""

from __future__ import annotations

from collections import deque
from math import inf, isfinite
from statistics import median
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

NORMS = 128
"""How many of the last norms make the median that a limit such as ``"4x"`` multiplies. A spike
among them moves a median by one place at most, but a mean by its size."""

FIRST = 16
"""Windows that such a limit lets pass first: until then there is no median."""


class SpikeRule:
    """The limit of each optimizer's gradient norm: an unscaled norm; ``"4x"``: so many times the
    running median; None: no limit.

    Norms of skipped spikes count in the median, so that a run whose norms stay high goes on after
    ``NORMS`` / 2 + 1 windows at the latest.
    """

    def __init__(self, limit: float | str | None = None) -> None:
        self._factor = float(limit[:-1]) if isinstance(limit, str) else None
        self._absolute = inf if limit is None or isinstance(limit, str) else limit
        self._norms: WeakKeyDictionary[Optimizer, deque[float]] = WeakKeyDictionary()

    def is_spike(self, optimizer: Optimizer, norm: float) -> bool:
        """Whether the norm is a spike. For the median it counts if it is finite and not 0."""
        if self._factor is None:
            return norm > self._absolute
        norms = self._norms.setdefault(optimizer, deque(maxlen=NORMS))
        limit = self._factor * median(norms) if len(norms) >= FIRST else inf
        norms += [norm] if norm and isfinite(norm) else []
        return norm > limit
