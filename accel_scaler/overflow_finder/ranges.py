"""Smallest and largest elements of tensors, left on their device until somebody asks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["Range", "Ranges", "joined", "shown", "tensors_in"]

PACKED = 512
"""Ranges that share one tensor: one by one, each would take a block of the allocator."""

DEEPEST = 6
"""Nesting of containers up to which tensors are looked for."""

Pair = tuple[float, float]


class Range:
    """``(lo, hi)`` of one tensor; NaN in both where it holds a NaN."""

    __slots__ = ("_held", "_row", "values")

    def __init__(self, held: Tensor) -> None:
        self._held: Tensor | None = held
        self._row = 0
        self.values: Pair | None = None
        """Set by :meth:`Ranges.read`."""

    @property
    def is_broken(self) -> bool:
        """Whether the tensor held an inf or a NaN. Only after it was read."""
        return self.values is not None and not all(map(math.isfinite, self.values))

    @property
    def is_masked(self) -> bool:
        """Whether -inf is all that is wrong with it, as in a masked score."""
        return self.is_broken and joined([self])[1] < math.inf


class Ranges:
    """Takes ranges without synchronising, and reads many in one transfer a device."""

    def __init__(self) -> None:
        self._loose: dict[tuple[torch.device, torch.dtype], list[Range]] = {}

    @torch.no_grad()
    def take(self, tensor: Tensor) -> Range | None:
        """The range of a tensor; None for integers, empty tensors and those without memory."""
        values = _values(tensor)
        if values is None:
            return None
        held = torch.stack(torch.aminmax(values))
        if held.dtype is not torch.float64:
            held = held.float()
        made = Range(held)
        loose = self._loose.setdefault((held.device, held.dtype), [])
        loose.append(made)
        if len(loose) >= PACKED:
            _pack(loose)
            loose.clear()
        return made

    @staticmethod
    @torch.no_grad()
    def read(wanted: Iterable[Range]) -> None:
        """Fill in ``values``. Synchronises once for each device."""
        todo = {id(r): r for r in wanted if r.values is None}
        by_device: dict[torch.device, dict[int, Tensor]] = {}
        for r in todo.values():
            held = r._held
            assert held is not None
            by_device.setdefault(held.device, {})[id(held)] = held
        rows: dict[int, list[list[float]]] = {}
        for parts in by_device.values():
            flat = iter(torch.cat([t.view(-1, 2) for t in parts.values()]).tolist())
            for key, t in parts.items():
                rows[key] = [next(flat) for _ in range(t.numel() // 2)]
        for r in todo.values():
            lo, hi = rows[id(r._held)][r._row]
            r.values = (lo, hi)
        for r in todo.values():
            r._held = None

    def clear(self) -> None:
        """Forget what is not packed yet."""
        self._loose.clear()


def _pack(loose: list[Range]) -> None:
    open_ = [r for r in loose if r._held is not None]
    if not open_:
        return
    together = torch.stack([r._held for r in open_ if r._held is not None])
    for row, r in enumerate(open_):
        r._held, r._row = together, row


def _values(tensor: Any) -> Tensor | None:
    """The elements that this rank holds, as a real strided tensor of a type with an order."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if isinstance(local, torch._subclasses.FakeTensor) or local.is_meta or local.is_quantized:
        return None
    if local.is_sparse:
        local = local._values()
    elif local.is_nested or local.layout is not torch.strided:
        if not hasattr(local, "values") or local.is_mkldnn:
            return None
        local = local.values()
    if local.is_complex():
        local = torch.view_as_real(local.resolve_conj())
    if not local.is_floating_point() or local.numel() == 0:
        return None
    return local.float() if local.element_size() == 1 else local


def tensors_in(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Tensor]]:
    """``(path, tensor)`` for every tensor in tuples, lists, mappings and dataclasses."""
    if issubclass(type(value), torch._C.TensorBase):  # isinstance would wait for a pending one
        yield path, value
        return
    items: Iterable[tuple[Any, Any]] = ()
    if depth >= DEEPEST:
        return
    if isinstance(value, (list, tuple)):
        items = enumerate(value)
    elif isinstance(value, Mapping):
        items = value.items()
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = ((f.name, getattr(value, f.name, None)) for f in dataclasses.fields(value))
    for key, item in items:
        yield from tensors_in(item, f"{path}.{key}" if path else str(key), depth + 1)


def joined(ranges: Iterable[Range]) -> Pair:
    """The range of several; NaN wins; ``(inf, -inf)`` for none at all."""
    lo, hi = math.inf, -math.inf
    for r in ranges:
        if r.values is not None:
            if math.isnan(r.values[0]) or math.isnan(r.values[1]):
                return math.nan, math.nan
            lo, hi = min(lo, r.values[0]), max(hi, r.values[1])
    return lo, hi


def shown(pair: Pair | None) -> str:
    """In words: ``in [-3.1, 4]``, or what it reached."""
    if pair is None:
        return "not seen"
    lo, hi = pair
    if math.isnan(lo) or math.isnan(hi):
        return "holds nan"
    if math.isfinite(lo) and math.isfinite(hi):
        return f"in [{lo:.4g}, {hi:.4g}]"
    return "reached " + " and ".join(f"{x:g}" for x in dict.fromkeys(pair) if math.isinf(x))
