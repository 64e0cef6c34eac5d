"""Which tensors have memory in common, asked of their storage: two ``Parameter`` objects may.

No element is read, so an update that is due is not awaited.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from ..scaling import local

Span = tuple[int, int]
"""Addresses of the first byte of a tensor's elements, and of the one after the last."""


def span_of(t: Tensor) -> Span | None:
    """Where the elements of a strided tensor lie; None: nowhere (empty, sparse, meta)."""
    if t.layout is not torch.strided or t.is_meta or not t.numel():
        return None
    start = t.data_ptr()
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return start, start + (last + 1) * t.element_size()


def place_of(t: Tensor) -> object:
    """Which view of which memory: one that is equal reads and writes the same elements."""
    return t.data_ptr(), t.shape, t.stride(), t.dtype


def held_by(p: Tensor) -> Tensor:
    """The tensor that has a parameter's memory: itself, or this rank's shard."""
    return local(p.detach()) if hasattr(p, "to_local") else p


def overlapping(params: Sequence[Tensor]) -> list[list[int]]:
    """Groups of tensors, by their indices, that have elements in common; ascending, each of two or
    more. Costs some microseconds a tensor. Does not synchronise.
    """
    with torch._C.DisableTorchFunctionSubclass():  # which waits for an update that is due
        return _overlapping(list(map(held_by, params)))


def are_one_view(params: Sequence[Tensor]) -> bool:
    """Whether all of them are the same view of one memory."""
    with torch._C.DisableTorchFunctionSubclass():
        return len({place_of(held_by(p)) for p in params}) == 1


def _overlapping(tensors: Sequence[Tensor]) -> list[list[int]]:
    found = [(str(t.device), span, i) for i, t in enumerate(tensors) if (span := span_of(t))]
    groups: list[list[int]] = []
    for _, mine in groupby(sorted(found), key=lambda each: each[0]):
        end = 0
        for _, (start, after), i in mine:
            if start < end:
                groups[-1].append(i)
            else:
                groups.append([i])
            end = max(end, after)
    return sorted(
        sorted(group)
        for group in groups
        if len(group) > 1 and _have_common_elements([tensors[i] for i in group])
    )


def _have_common_elements(tensors: Sequence[Tensor]) -> bool:
    """Whether spans that overlap are not only interleaved, as columns of one matrix are."""
    if len(set(map(place_of, tensors))) < len(tensors):
        return True
    spans = [span for t in tensors if (span := span_of(t))]
    first, after = min(start for start, _ in spans), max(end for _, end in spans)
    size = min(t.element_size() for t in tensors)
    if any(t.element_size() != size for t in tensors):
        return True
    taken = torch.zeros((after - first) // size, dtype=torch.bool, device="cpu")
    for t, (start, _) in zip(tensors, spans, strict=True):
        mine = taken.as_strided(t.shape, t.stride(), (start - first) // size)
        if bool(mine.any()):
            return True
        mine.fill_(True)
    return False
