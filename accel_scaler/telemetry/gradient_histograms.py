"""How the elements of each gradient are spread: unscaled, as they were before a clip.

Counted where the gradients are, in linear bins from the smallest to the largest element, without an
unscaled copy of them: the bins are unscaled instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..scaling import OptimizerRecord, Window, local
from .gradient_range import BATCH, DEVICE_BATCH, clips_of

BINS = 64
"""Of one histogram; wandb's own have as many."""

KNOWN = (torch.float16, torch.bfloat16, torch.float32)

NARROWEST = 1e-12
"""Half the width of the bin of a gradient that is all zeros."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """The elements of one parameter's gradient, unscaled."""

    name: str
    """The parameter's."""
    elements: int
    lowest: float
    highest: float
    total: float
    """The sum of them."""
    norm: float
    """The root of the sum of their squares."""
    counts: tuple[int, ...]
    """Elements in each of ``BINS`` bins of equal width; () where bins were not asked for."""

    @property
    def edges(self) -> list[float]:
        """Those of the bins, one more than there are bins."""
        low, high = self.lowest, self.highest
        if low == high:  # all are in the first
            width = max(abs(low) * 1e-6, NARROWEST)
            low, high = low - width, low + (2 * BINS - 1) * width
        return [low + (high - low) * i / BINS for i in range(BINS)] + [high]


@dataclass(slots=True)
class Spread:
    """What was found of some gradients on one device; the numbers may still be on their way."""

    names: Sequence[str]
    sizes: Sequence[int]
    figures: Tensor
    """Of each its lowest and highest element, their sum and their norm, float32, shape (n, 4)."""
    counts: Tensor | None
    """int64, shape (n, BINS)."""

    def read(self) -> Iterator[Histogram]:
        """Those of gradients that are finite. Synchronises if they are not there."""
        counts = [()] * len(self.names) if self.counts is None else self.counts.tolist()
        found = zip(self.names, self.sizes, self.figures.tolist(), counts, strict=True)
        for name, size, (low, high, total, norm), each in found:
            if all(map(math.isfinite, (low, high, total, norm))):
                yield Histogram(name, size, low, high, total, norm, tuple(each))


@torch.no_grad()
def spread_of(
    params: Sequence[Tensor],
    names: Sequence[str],
    window: Window,
    record: OptimizerRecord,
    with_bins: bool,
) -> tuple[list[Spread], bool]:
    """Look at gradients just before their step; and say whether these were all, and whole.

    Of a DTensor this rank's own elements; gradients that are sparse, float64 or of a tensor
    subclass that is not known are left out. Changes nothing, and does not synchronise.

    Args:
        params: of one optimizer.
        names: of each.
        record: the optimizer's, of this window: what is still due.
        with_bins: False: their extremes, sums and norms alone.
    """
    # Where something is still due nothing was done to them since the backward.
    untouched, scale = bool(record.deferred), 1.0 if window.before is None else window.before.scale
    clips = {} if untouched else clips_of(window)
    found: dict[torch.device, list[tuple[str, int, Tensor, Tensor | None]]] = {}
    is_whole = True
    for p, name in zip(params, names, strict=True):
        if p.grad is None:
            continue
        held = local(p.grad)
        is_whole &= held is p.grad
        coefficient = clips.get(id(p), 1.0)
        # A clip to 0 leaves nothing to tell of.
        if not _is_plain(held) or coefficient == 0:
            is_whole = False
        elif held.numel():
            figures, counts = _look(held, with_bins)
            found.setdefault(held.device, []).append(
                (name, held.numel(), figures / (scale if untouched else coefficient), counts)
            )
    spreads = []
    for each in found.values():
        group, sizes, all_figures, all_counts = zip(*each, strict=True)
        bins = torch.stack(all_counts) if with_bins else None
        spreads.append(Spread(group, sizes, torch.stack(all_figures), bins))
    return spreads, is_whole


def _is_plain(held: Tensor) -> bool:
    return (
        type(held) in (Tensor, torch.nn.Parameter)
        and held.layout is torch.strided
        and held.dtype in KNOWN
        and held.device.type != "meta"
    )


def _look(held: Tensor, with_bins: bool) -> tuple[Tensor, Tensor | None]:
    """Its figures as they are, and how many elements are in which bin."""
    low, high = (each.float() for each in torch.aminmax(held))
    total = held.sum(dtype=torch.float32)
    norm = torch.linalg.vector_norm(held, dtype=torch.float32)
    figures = torch.stack((low, high, total, norm))
    if not with_bins:
        return figures, None
    width = high - low
    width = torch.where(width > 0, width, torch.ones_like(width))
    counts = torch.zeros(BINS, dtype=torch.int64, device=held.device)
    for piece in _pieces(held):
        places = piece.float().sub(low).div_(width)
        # Within a piece float32 counts exactly. With bounds it need not ask the device for them.
        counts += torch.histc(places, BINS, 0, 1).to(torch.int64)
    return figures, counts


def _pieces(held: Tensor) -> Iterable[Tensor]:
    """Its elements, in the order of memory: a flat view, where it has no gaps."""
    order = sorted(range(held.ndim), key=held.stride, reverse=True)
    flat = held.permute(order).reshape(-1)
    return torch.split(flat, BATCH if held.device.type == "cpu" else DEVICE_BATCH)
