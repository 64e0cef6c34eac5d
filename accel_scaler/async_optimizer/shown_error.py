"""How far what the model was shown of a late update was off: one number a step, for telemetry.

Compared in the model's own dtype, so that showing nothing at all (the masters before) is off by
exactly what the update moves: to round float32 masters to float16 is nobody's error.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .compensation import Ahead, Compensation
from .replica import Part

SAMPLE = 1 << 16
"""At most so many elements of a tensor are compared, in equal steps over all of it: next to nothing
beside the update, in time and in memory."""


class ShownError:
    """Of one late step, on the thread that makes it. Reads parameters and writes none.

    Args:
        factors: what gradients are still to be multiplied by, in the order of the parts.
        reads_model: the model's memory is where masters are, and nobody writes to it meanwhile.
    """

    def __init__(
        self, compensation: Compensation, ahead: Ahead, factors: Sequence[float], reads_model: bool
    ) -> None:
        self._compensation, self._ahead, self._factors = compensation, ahead, factors
        self._reads_model = reads_model
        self._masters: list[tuple[Tensor, torch.dtype]] = []
        """Of the part that is updated, with the dtypes that the model has them in."""
        self._shown = self._before = torch.empty(0)
        """All of it in one tensor."""
        self._off: list[Tensor] = []
        self._moved: list[Tensor] = []
        """A norm a part, on its device until they are read."""

    @torch.no_grad()
    def before_update(self, part: Part, grads: Sequence[Tensor | None]) -> None:
        """A part is about to be updated; ``grads`` as the model was shown their share, but where
        masters are."""
        found: list[Tensor] = []
        factors = self._factors[part.start : part.end]
        for pair, grad, factor in zip(part.pairs, grads, factors, strict=True):
            if not pair.is_master or grad is None:
                continue
            shown = _sample(pair.target)
            if not self._reads_model and pair.ahead is not None:  # made again, in host memory
                shown, share = _sample(pair.ahead).clone(), self._ahead.shares[id(pair)]
                self._compensation.add_share(shown, shown, _sample(grad), share, factor)
            found.append(shown.float())
            self._masters.append((_sample(pair.stepped.detach()), shown.dtype))
        if found:
            self._shown, self._before = torch.cat(found), self._now()

    @torch.no_grad()
    def after_update(self) -> None:
        """It was updated."""
        if self._masters:
            exact = self._now()
            self._off.append(torch.linalg.vector_norm(exact - self._shown))
            self._moved.append(torch.linalg.vector_norm(exact - self._before))
            self._masters = []

    def read(self) -> tuple[float, float] | None:
        """``(norm of exact - shown, norm of exact - before)``; None: nothing was compared."""
        if not self._off:
            return None
        norms = torch.stack([*self._off, *self._moved]).tolist()
        return math.hypot(*norms[: len(self._off)]), math.hypot(*norms[len(self._off) :])

    def _now(self) -> Tensor:
        """Masters, rounded as the model has them."""
        return torch.cat([master.to(kind).float() for master, kind in self._masters])


def _sample(t: Tensor) -> Tensor:
    """Elements of ``t``, a view where its layout allows one; an odd step meets every column."""
    return t.reshape(-1)[:: -(-t.numel() // SAMPLE) | 1]
