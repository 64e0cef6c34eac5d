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

from .compensation import Ahead, Compensation, largest_on
from .preview_rules import pieces_of
from .replica import Part

Pieces = list[tuple[Tensor, ...]]
"""Of masters as they are, of what was shown of them, of masters as they were."""


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
        self._seen: Pieces = []
        self._off: list[Tensor] = []
        self._moved: list[Tensor] = []
        self._is_lost = False

    @torch.no_grad()
    def before_update(self, part: Part, grads: Sequence[Tensor | None]) -> None:
        """A part is about to be updated; ``grads`` as the model was shown their share, but where
        masters are."""
        found = zip(part.pairs, grads, self._factors[part.start : part.end], strict=True)
        due = [(p, g, f) for p, g, f in found if p.is_master and g is not None]
        masters = [pair.stepped.detach() for pair, *_ in due]
        with self._unless_full():
            copies = list(torch._foreach_mul(masters, 1.0)) if masters else []
            for (pair, grad, factor), master, old in zip(due, masters, copies, strict=True):
                shown: Tensor | None = pair.target
                if not self._reads_model:
                    shown = self._compensation.shown_on_host(pair, grad, self._ahead, factor)
                self._seen.append((master, old if shown is None else shown, old))

    @torch.no_grad()
    def after_update(self) -> None:
        """It was updated, and nothing made of it yet."""
        seen, self._seen = self._seen, []
        with self._unless_full():
            for exact, shown, old in map(_columns, _packs(seen)):
                self._off.append(torch.linalg.vector_norm(exact - shown))
                self._moved.append(torch.linalg.vector_norm(exact - old))

    def read(self) -> tuple[float, float] | None:
        """``(norm of exact - shown, norm of exact - before)``; None: not known."""
        if self._is_lost or not self._off:
            return None
        norms = torch.stack([*self._off, *self._moved]).tolist()
        return math.hypot(*norms[: len(self._off)]), math.hypot(*norms[len(self._off) :])

    @contextmanager
    def _unless_full(self) -> Iterator[None]:
        """No update is lost because there is no memory to look at it."""
        try:
            yield
        except torch.OutOfMemoryError:
            self._is_lost = True
        if self._is_lost:
            self._seen, self._off, self._moved = [], [], []


def _packs(seen: Pieces) -> Iterator[Pieces]:
    """Few calls for many small tensors; of large ones pieces, whose differences stay in a cache."""
    pack: Pieces = []
    size = 0
    for tensors in seen:
        largest = largest_on(tensors[0].device)
        for pieces in pieces_of(tensors, largest):
            if pack and (size >= largest or pack[-1][1].dtype is not pieces[1].dtype):
                yield pack
                pack, size = [], 0
            pack.append(pieces)
            size += pieces[0].numel()
    if pack:
        yield pack


def _columns(pack: Pieces) -> list[Tensor]:
    """Each of the three as one, float32, rounded as what was shown is."""
    kind = pack[0][1].dtype
    flat = [[piece.reshape(-1) for piece in column] for column in zip(*pack, strict=True)]
    whole = [column[0] if len(column) == 1 else torch.cat(column) for column in flat]
    return [t if kind is torch.float32 else t.to(kind).float() for t in whole]
