"""Smallest and largest elements of tensors, left on their device until somebody asks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..scaling import Pair


class Range:
    """``(lo, hi)`` of one tensor; NaN in both where it holds a NaN."""

    __slots__ = ("_held", "values")

    def __init__(self, held: Tensor) -> None:
        self._held: Tensor | None = held
        self.values: Pair | None = None
        """Set by :meth:`read`."""

    @classmethod
    @torch.no_grad()
    def of(cls, tensor: Tensor) -> Range | None:
        """The range of a tensor; None for integers, empty tensors and those without memory.

        Does not synchronise.
        """
        values = _values(tensor)
        if values is None:
            return None
        low, high = torch.aminmax(values)
        if values.dtype is not torch.float64:  # autocast to float16 refuses to stack bfloat16
            low, high = low.float(), high.float()
        return cls(torch.stack((low, high)))

    @staticmethod
    def read(ranges: Iterable[Range]) -> None:
        """Fill in ``values``. Synchronises once for each device."""
        by_device: dict[torch.device, dict[Range, Tensor]] = {}
        for each in ranges:
            if each._held is not None:
                by_device.setdefault(each._held.device, {})[each] = each._held
        for held in by_device.values():
            rows = torch.cat([*held.values()]).view(-1, 2).tolist()
            for each, (lo, hi) in zip(held, rows, strict=True):
                each.values, each._held = (lo, hi), None

    @property
    def is_finite(self) -> bool:
        """False: the tensor held an inf or a NaN. Only after it was read."""
        return self.values is None or all(map(math.isfinite, self.values))

    @property
    def is_masked(self) -> bool:
        """-inf is all that is wrong with it, as in a masked score."""
        return not self.is_finite and joined([self])[1] < math.inf


def is_batched(tensor: Tensor) -> bool:
    """Whether it is a gradient of a batched backward (``is_grads_batched``), which stands for
    several and has no memory."""
    return bool(torch._C._functorch.is_legacy_batchedtensor(tensor))


def _values(tensor: Any) -> Tensor | None:
    """The elements that this rank holds, as a real strided tensor of a type with an order."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if local.is_sparse:
        local = local._values()
    if (
        isinstance(local, torch._subclasses.FakeTensor)
        or local.is_meta
        or local.is_nested
        or is_batched(local)
        or local.layout is not torch.strided
    ):
        return None
    if local.is_complex():
        local = torch.view_as_real(local.resolve_conj())
    if not local.is_floating_point() or local.numel() == 0:
        return None
    return local.float() if local.element_size() == 1 else local


def joined(ranges: Iterable[Range]) -> Pair:
    """The range of several; NaN wins; ``(inf, -inf)`` for none at all."""
    lo, hi = math.inf, -math.inf
    for each in ranges:
        if each.values is not None:
            if math.isnan(each.values[0]) or math.isnan(each.values[1]):
                return math.nan, math.nan
            lo, hi = min(lo, each.values[0]), max(hi, each.values[1])
    return lo, hi


def in_words(pair: Pair | None) -> str:
    """``in [-3.1, 4]``, or what it reached."""
    if pair is None:
        return "not seen"
    lo, hi = pair
    if math.isnan(lo) or math.isnan(hi):
        return "holds nan"
    if math.isfinite(lo) and math.isfinite(hi):
        return f"in [{lo:.4g}, {hi:.4g}]"
    return "reached " + " and ".join(f"{x:g}" for x in dict.fromkeys(pair) if math.isinf(x))
