"""The norms that clips and checks took of the gradients of one window."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from .gradients import on_host


@dataclass(eq=False)
class GradNorm:
    """The norm that one clip or one check took of some gradients."""

    parameters: Sequence[Tensor]
    total: Tensor | float
    """The norm of all gradients together, unscaled."""
    each: Tensor | None = None
    """The 2-norm of each, unscaled, float32, shape (n,); on the host once ``total`` is a float."""
    max_norm: float | None = None
    """The limit of a clip; None for a check."""
    norm_type: float = 2.0
    """The order of ``total``."""

    @cached_property
    def keys(self) -> frozenset[int]:
        """The ``id`` of each of ``parameters``."""
        return frozenset(map(id, self.parameters))

    def fetch(self) -> None:
        """Bring the numbers to the host. Synchronises if they are on a device."""
        if isinstance(self.total, Tensor):
            if self.each is None or self.each.device != self.total.device:
                self.total = float(self.total)
            else:
                both = on_host(self.each, self.total)
                self.each, self.total = both[:-1], float(both[-1])

    @property
    def coefficient(self) -> float:
        """The factor of the clip: ``min(1, max_norm / (norm + 1e-6))``."""
        limit = math.inf if self.max_norm is None else self.max_norm
        return min(1.0, limit / (float(self.total) + 1e-6))


class GradNorms:
    """All norms of one window. Iteration yields norms of disjoint sets of parameters: it takes
    clips before checks, then large sets before small ones, then early norms before late ones."""

    def __init__(self) -> None:
        self._taken: list[GradNorm] = []
        """All norms, in the order of their arrival."""

    def __iter__(self) -> Iterator[GradNorm]:
        seen: set[int] = set()
        by_rank = sorted(self._taken, key=lambda m: (m.max_norm is None, -len(m.parameters)))
        for measure in by_rank:
            if len(by_rank) == 1 or seen.isdisjoint(measure.keys):
                seen |= measure.keys
                yield measure

    def add(self, new: GradNorm) -> None:
        """Add a norm. A clip takes ``each`` from a check of the same parameters just before it."""
        last = self._taken[-1] if self._taken and new.each is None else None
        if last is not None and last.max_norm is None and last.keys == new.keys:
            new.each, new.parameters = last.each, last.parameters
        self._taken.append(new)

    def of(self, parameters: Iterable[Tensor]) -> float | None:
        """The first 2-norm of these ``parameters``, perhaps with others; None without one."""
        wanted = set(map(id, parameters))
        taken = (m for m in self._taken if m.norm_type == 2.0 and wanted <= m.keys)
        found = next(taken, None)
        return None if found is None else float(found.total)

    def forget(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Drop every norm that has some of ``parameters`` (None: all norms)."""
        gone = None if parameters is None else set(map(id, parameters))
        self._taken = [m for m in self._taken if gone is not None and gone.isdisjoint(m.keys)]

    def fetch(self) -> None:
        for measure in self._taken:
            measure.fetch()

    @property
    def clips(self) -> list[GradNorm]:
        """Norms of clips, in the order of their arrival; some may have the same parameters."""
        return [m for m in self._taken if m.max_norm is not None]

    @property
    def are_finite(self) -> bool:
        return all(math.isfinite(float(m.total)) for m in self._taken)

    @property
    def total(self) -> float | None:
        """The norm of all together; None without one, or with several unless all are 2-norms."""
        measures = list(self)
        totals = [float(m.total) for m in measures]
        if len(totals) == 1:
            return totals[0]
        return math.hypot(*totals) if {m.norm_type for m in measures} == {2.0} else None

    @property
    def clip(self) -> tuple[float | None, float | None]:
        """``max_norm`` and coefficient of the hardest clip; (None, None) without a clip."""
        hardest = min(self.clips, key=lambda clip: clip.coefficient, default=None)
        return (None, None) if hardest is None else (hardest.max_norm, hardest.coefficient)
