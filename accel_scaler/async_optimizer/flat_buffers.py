"""An optimizer whose parameters are all small: few calls for thousands of tensors.

Each call into torch gives the interpreter's lock away and has to get it back; while the training
thread runs Python that takes longer than a small tensor's update. Gradients are gathered in one
buffer, one call unscales all of them, one addition counts the steps, and each part is one
call of the kernel. The numbers are those of the other way, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..optimizer_step import AdamGroup
from ..scaling import SMALL, DeferredUnscale
from .master_params import ParameterPair
from .streams import SideStreams

__all__ = ["SmallSteps"]


class SmallSteps:
    """For the copy of a fused ``Adam`` or ``AdamW``. The optimizer thread's.

    Args:
        pairs: in the order of the parts; all have state.
        ends: for each part, how many of ``pairs`` are stepped once it is done.
    """

    def __init__(
        self, copy: Any, pairs: Sequence[ParameterPair], ends: Sequence[int], streams: SideStreams
    ) -> None:
        self._copy = copy
        self._views = streams.host_like([pair.stepped.detach() for pair in pairs])
        self._sizes = list(map(Tensor.numel, self._views))
        self._starts = [0, *ends]
        self.groups: dict[int, AdamGroup] = {}
        self._parts: list[list[tuple[int, AdamGroup, list[Tensor]]]] = [[] for _ in ends]
        for number in sorted({pair.group for pair in pairs}):
            mine = [i for i, pair in enumerate(pairs) if pair.group == number]
            params = [pairs[i].stepped for i in mine]
            group = AdamGroup(copy, {**copy.param_groups[number], "params": params})
            self.groups[number] = group
            for part, (a, b) in zip(self._parts, pairwise(self._starts), strict=True):
                places = [place for place, i in enumerate(mine) if a <= i < b]
                if places:
                    views = [self._views[mine[place]] for place in places]
                    part.append((number, group.subset(places), views))

    @staticmethod
    def suits(pairs: Sequence[ParameterPair], streams: SideStreams) -> bool:
        """Small, dense parameters in host memory that are stepped in place."""
        return streams.is_host and all(
            pair.stepped.device.type == "cpu"  # not so where a device shares the host's memory
            and not pair.is_master
            and 0 < pair.stepped.numel() <= SMALL
            and pair.stepped.layout is torch.strided
            and torch._debug_has_internal_overlap(pair.stepped) == 0
            for pair in pairs
        )

    def begin(self, grads: list[Tensor], deferred: DeferredUnscale) -> bool:
        """Take all gradients, unscale them, count the step; False: a size is not right."""
        if list(map(Tensor.numel, grads)) != self._sizes:
            return False
        if deferred.multiply is not None:
            torch._foreach_mul_(grads, deferred.multiply)  # where ``.grad`` is
        torch._foreach_copy_(self._views, grads)
        for group in self.groups.values():
            group.counts.add_(1)
        return True

    def step(self, part: int, grads: list[Tensor], deferred: DeferredUnscale) -> None:
        """Update one part; ``grads`` are its gradients."""
        for number, group, views in self._parts[part]:
            group.update(self._copy.param_groups[number], views, deferred.divide)
        if deferred.divide is not None:  # as the kernel leaves them where it is given them
            torch._foreach_copy_(grads, self._views[self._starts[part] : self._starts[part + 1]])
