"""Norms that clips and checks took of the gradients of one window."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from .gradients import on_host


@dataclass(slots=True, eq=False)
class GradNorm:
    """What one clip, or one check, saw of some gradients."""

    parameters: Sequence[Tensor]
    total: Tensor | float
    """Norm of all, unscaled."""
    each: Tensor | None = None
    """Norm of each, unscaled, float32, shape (n,); on the host, or on its way with ``total``."""
    max_norm: float | None = None
    ids: list[int] | None = None
    """Of ``parameters``, where they are known already."""
    norm_type: float = 2.0
    """Of ``total``; ``each`` are 2-norms."""
    later: list[GradNorm] = field(default_factory=list)
    """Further clips of what this one left."""

    @property
    def keys(self) -> set[int]:
        """The ``id`` of each of ``parameters``."""
        return set(map(id, self.parameters))

    def fetch(self) -> None:
        """Bring the numbers to the host. Synchronises if they are not there."""
        if isinstance(self.total, Tensor):
            if self.each is None or self.each.device != self.total.device:
                self.total = float(self.total)
            else:
                both = on_host(self.each, self.total)
                self.each, self.total = both[:-1], float(both[-1])

    @property
    def limit(self) -> float | None:
        """The smallest ``max_norm`` of this and the later clips by the same norm."""
        limits = [m.max_norm for m in self.later if m.norm_type == self.norm_type]
        return min((m for m in (self.max_norm, *limits) if m is not None), default=None)

    @property
    def coefficient(self) -> float | None:
        """What the clips multiplied by: each ``min(1, max_norm / (norm + 1e-6))``."""
        if self.max_norm is None:
            return None
        own = min(1.0, self.max_norm / (float(self.total) + 1e-6))
        return own * math.prod(m.coefficient or 0.0 for m in self.later)


class GradNorms:
    """The measures of one window, of disjoint parameters."""

    def __init__(self) -> None:
        self._found: dict[int, GradNorm] = {}
        """Under the ``id`` of each, in the order they came."""
        self._of: dict[int, GradNorm] = {}
        """Under the ``id`` of each parameter; made with the second measure."""
        self.knows_every_clip = True
        """False: a clip of some of what another clip took is not among these."""

    def __iter__(self) -> Iterator[GradNorm]:
        return iter(self._found.values())

    def add(self, new: GradNorm) -> None:
        """Note a measure. What was clipped before keeps the norm that it had then."""
        if not self._found:
            self._found[id(new)] = new
            return
        if not self._of:
            for measure in self:
                self._of.update(dict.fromkeys(measure.keys, measure))
        ids = new.keys
        others = {id(other): other for key in ids if (other := self._of.get(key)) is not None}
        for other in others.values():
            same = len(new.parameters) == len(other.parameters) and ids == other.keys
            if other.max_norm is not None and all(self._of.get(key) is other for key in ids):
                if same and new.max_norm is not None:
                    other.later.append(new)
                elif new.max_norm is not None:
                    self.knows_every_clip = False
                return
            self.knows_every_clip &= other.max_norm is None
            self._remove(other)
            if new.each is None and same:
                new.each, new.ids, new.parameters = other.each, other.ids, other.parameters
        self._found[id(new)] = new
        self._of.update(dict.fromkeys(ids, new))

    def _remove(self, measure: GradNorm) -> None:
        del self._found[id(measure)]
        for key in measure.keys:
            self._of.pop(key, None)

    def forget(self, parameters: Iterable[Tensor] | None = None) -> None:
        """Drop what was measured of any of ``parameters``; None: everything."""
        gone = None if parameters is None else set(map(id, parameters))
        for m in list(self):
            if gone is None or not gone.isdisjoint(m.keys):
                self._remove(m)

    def fetch(self) -> None:
        """Bring all numbers to the host."""
        for measure in self:
            measure.fetch()

    @property
    def are_finite(self) -> bool:
        """No norm is inf or NaN."""
        return all(math.isfinite(float(m.total)) for m in self)

    @property
    def total(self) -> float | None:
        """The norm of all together; None: none was taken, or not all by the same norm."""
        totals, kinds = [float(m.total) for m in self], {m.norm_type for m in self}
        if len(kinds) != 1:
            return None
        (kind,) = kinds
        if len(totals) == 1:
            return totals[0]
        if kind == 2.0:
            return math.hypot(*totals)
        if kind == 0.0:  # a count
            return sum(totals)
        return max(totals) if math.isinf(kind) else sum(t**kind for t in totals) ** (1 / kind)

    @property
    def clip(self) -> tuple[float | None, float | None]:
        """``max_norm`` and coefficient of the clip that took most; None: there was none."""
        clipped = [m for m in self if m.max_norm is not None]
        hardest = min(clipped, key=lambda m: m.coefficient or 0.0, default=None)
        return (None, None) if hardest is None else (hardest.limit, hardest.coefficient)
