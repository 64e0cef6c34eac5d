"""Which tensors share memory, as two ``Parameter`` objects may.

Reads no element, and so waits for no update.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..scaling import local
from .arena import length_of


def overlapping(params: Sequence[Tensor]) -> list[list[int]]:
    """Groups of tensors, by their indices, whose memory overlaps; ascending, each of two or more.

    Views that only interleave, as columns of one matrix do, count as well. Costs some microseconds
    a tensor. Does not synchronise.
    """
    found: list[tuple[str, int, int, int]] = []
    with torch._C.DisableTorchFunctionSubclass():  # which waits for an update that is due
        for i, p in enumerate(params):
            t = local(p.detach()) if hasattr(p, "to_local") else p
            if t.layout is torch.strided and not t.is_meta and t.numel():
                start = t.data_ptr()
                found.append((str(t.device), start, start + length_of(t) * t.element_size(), i))
    groups: list[list[int]] = []
    reached = "", 0
    for device, start, after, i in sorted(found):
        if (device, start) < reached:
            groups[-1].append(i)
        else:
            groups.append([i])
        reached = max(reached, (device, after))
    return sorted(sorted(group) for group in groups if len(group) > 1)
