"""How far what the model was shown of a late update was off, for whoever wants to know.

Compared in the model's own dtype, so that showing nothing at all (the masters before) is off by
exactly what the update moves: to round float32 masters to float16 is nobody's error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from .compensation import Ahead, Compensation
from .master_params import ParameterPair
from .replica import Part

TOGETHER = 64
"""Tensors whose differences are held at a time."""

Seen = tuple[ParameterPair, Tensor, Tensor | None]
"""A pair, what its master was before; what the model was shown, None: it has that still."""


class ShownError:
    """Of one late step, on the thread that makes it. Reads parameters and writes none.

    What the device is asked for is read once, at the end.

    Args:
        factors: what gradients are still to be multiplied by, in the order of the parts.
        reads_model: the model's memory is where masters are, and nobody writes to it meanwhile.
    """

    def __init__(
        self, compensation: Compensation, ahead: Ahead, factors: Sequence[float], reads_model: bool
    ) -> None:
        self._compensation, self._ahead, self._factors = compensation, ahead, factors
        self._reads_model = reads_model
        self._before: list[Seen] = []
        self._off: list[Tensor] = []
        self._moved: list[Tensor] = []
        self._is_lost = False

    @torch.no_grad()
    def before_update(
        self, part: Part, grads: Sequence[Tensor | None], before: Sequence[Tensor | None]
    ) -> None:
        """A part is about to be updated.

        Args:
            grads: as the model was shown their share, but where masters are.
            before: copies of masters that somebody has made already.
        """
        factors = self._factors[part.start : part.end]
        with self._unless_full():
            for pair, grad, factor, old in zip(part.pairs, grads, factors, before, strict=True):
                if grad is None or not pair.is_master:
                    continue
                kind = pair.target.dtype
                if old is None:
                    old = pair.stepped.detach().to(kind, copy=True)
                old, shown = old.to(kind), None
                if not self._reads_model:
                    shown = self._compensation.shown_on_host(pair, grad, self._ahead, factor)
                    shown = old if shown is None else shown
                self._before.append((pair, old, shown))

    @torch.no_grad()
    def after_update(self) -> None:
        """It was updated, and nothing made of it yet."""
        seen, self._before = self._before, []
        with self._unless_full():
            for start in range(0, len(seen), TOGETHER):
                some = seen[start : start + TOGETHER]
                exact = [pair.stepped.detach().to(pair.target.dtype).float() for pair, *_ in some]
                shown = [pair.target if mine is None else mine for pair, _, mine in some]
                self._off += _distances(exact, shown)
                self._moved += _distances(exact, [old for _, old, _ in some])

    def read(self) -> tuple[float, float] | None:
        """``(norm of exact - shown, norm of exact - before)``; None: not known."""
        if self._is_lost or not self._off:
            return None
        norms = torch.stack([*self._off, *self._moved]).tolist()
        return _root(norms[: len(self._off)]), _root(norms[len(self._off) :])

    @contextmanager
    def _unless_full(self) -> Iterator[None]:
        """No update is lost because there is no memory to look at it."""
        try:
            yield
        except torch.OutOfMemoryError:
            self._is_lost = True
        if self._is_lost:
            self._before, self._off, self._moved = [], [], []


def _distances(exact: list[Tensor], others: list[Tensor]) -> list[Tensor]:
    return list(torch._foreach_norm(torch._foreach_sub(exact, [t.float() for t in others])))


def _root(norms: Sequence[float]) -> float:
    """Of the sum of their squares."""
    return math.sqrt(sum(norm * norm for norm in norms))
