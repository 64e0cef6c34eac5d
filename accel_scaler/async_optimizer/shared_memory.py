"""Which tensors share memory, as two ``Parameter`` objects may.

Reads no element, and so waits for no update.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from ..scaling import local


def span_of(t: Tensor) -> tuple[int, int] | None:
    """The first address of a strided tensor and the one after its last; None: it has none."""
    if t.layout is not torch.strided or t.is_meta or not t.numel():
        return None
    start = t.data_ptr()
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return start, start + (last + 1) * t.element_size()


def place_of(t: Tensor) -> object:
    """Address, shape, strides and dtype: equal ones are one view of one memory."""
    return t.data_ptr(), t.shape, t.stride(), t.dtype


def held_by(p: Tensor) -> Tensor:
    """The tensor that has a parameter's memory: itself, or this rank's shard."""
    return local(p.detach()) if hasattr(p, "to_local") else p


def overlapping(params: Sequence[Tensor]) -> list[list[int]]:
    """Groups of tensors, by their indices, whose memory overlaps; ascending, each of two or more.

    Views that only interleave, as columns of one matrix do, count as well. Costs some microseconds
    a tensor. Does not synchronise.
    """
    with torch._C.DisableTorchFunctionSubclass():  # which waits for an update that is due
        return _overlapping(list(map(held_by, params)))


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
    return sorted(sorted(group) for group in groups if len(group) > 1)


def are_tied(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether memory of the first overlaps memory of the others."""
    groups = overlapping([*some, *others])
    return any(group[0] < len(some) <= group[-1] for group in groups)
