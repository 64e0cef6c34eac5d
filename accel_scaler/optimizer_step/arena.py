"""Where float32 masters and optimizer state lie in memory, and who has which place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from itertools import compress
from typing import Any
from weakref import ref as ref_of

import torch
from torch import Tensor, nn

from ..scaling import are_same

ALIGNED = 16
"""Elements: each parameter begins at a multiple of 64 bytes."""


class Arena:
    """Parameters side by side: their masters in one buffer, their step counts in another.

    The rest of the state is ``optimizer.state[p]``'s alone, so a tensor that a script takes out is
    freed, and one that it puts there is stepped where it is (:meth:`adopt`).

    Args:
        targets: the model's parameters, in the order of their slots.
        device: where the memory is.
        has_masters: each parameter has a float32 master.
    """

    def __init__(self, targets: Sequence[Tensor], device: torch.device, has_masters: bool) -> None:
        self.device, self.has_masters = device, has_masters
        self.shapes = [t.shape for t in targets]
        self.lengths = [t.numel() for t in targets]
        self.strides = [
            t.stride() if is_dense(t) else torch.empty_like(t, device="meta").contiguous().stride()
            for t in targets
        ]
        self.offsets: list[int] = []
        end = 0
        for each in self.lengths:
            self.offsets.append(end)
            end += -(-each // ALIGNED) * ALIGNED
        self.renew_counts()
        self._may_fit = [
            has_masters or (type(t) is Tensor and t.dtype is torch.float32 and is_dense(t))
            for t in targets
        ]
        self.fits = [False] * len(targets)
        """Of each slot, whether a fused kernel of torch can be called with its state."""

    def end(self, slot: int) -> int:
        """The offset at which the elements of ``slot`` end."""
        return self.offsets[slot] + self.lengths[slot]

    def view(self, memory: Tensor, slot: int, begin: int = 0) -> Tensor:
        """One parameter's view of ``memory``, which begins at element ``begin`` of the arena."""
        place = memory.storage_offset() + self.offsets[slot] - begin
        return memory.as_strided(self.shapes[slot], self.strides[slot], place)

    def allocate(self, key: str) -> Tensor:
        """Float32 memory for ``key`` of all parameters."""
        return torch.zeros(self.end(-1), dtype=torch.float32, device=self.device)

    def adopt(self, slot: int, entry: dict[str, Any], keys: Sequence[str], counts: bool) -> None:
        """Count a parameter's steps here, and see whether a fused kernel takes its state. State
        of a master is copied where it is laid out unlike the master."""
        names, shape = [*keys, *["step"] * counts], self.shapes[slot]
        values = {name: entry[name] for name in names if entry.get(name) is not None}
        shapes = [(v.shape if isinstance(v, Tensor) else None) for v in values.values()]
        is_alike = shapes == [torch.Size() if name == "step" else shape for name in names]
        unlike = [key for key in keys if is_alike and not self._is_laid_out(slot, values[key])]
        may_fit = self._may_fit[slot] and (not unlike or self.has_masters)
        self.fits[slot] = is_alike and may_fit
        if not self.fits[slot]:
            return
        for key in unlike:
            entry[key] = laid_out(values[key].float(), self.strides[slot])
        if counts:
            self.count_views[slot].copy_(entry["step"])
            self._give_count(slot, entry)

    def _is_laid_out(self, slot: int, value: Tensor) -> bool:
        is_plain = type(value) is Tensor and not value.is_inference()
        is_float32 = is_plain and value.dtype is torch.float32
        return is_float32 and value.stride() == self.strides[slot]

    def renew_counts(self) -> None:
        """Count in new memory from the next :meth:`adopt` on: whoever has taken a count out of the
        state may put it back, or into another entry."""
        self.counts = torch.zeros(len(self.shapes), dtype=torch.float32, device=self.device)
        """The ``step`` in the state of each slot, float32, shape (n,)."""
        self.count_views = list(self.counts.unbind())

    def _give_count(self, slot: int, entry: dict[str, Any]) -> None:
        value, view = entry["step"], self.count_views[slot]
        is_plain = type(value) is Tensor and not value.requires_grad and not value.is_inference()
        if is_plain and (value.dtype, value.device) == (view.dtype, view.device):
            value.data = view  # a state dict that was loaded has the same tensor: it follows
        else:
            entry["step"] = view.detach()  # its ``.data`` may be assigned


class Placed:
    """A parameter with a place in an arena, and the tensor that is stepped for it: the parameter
    itself, unless it has a master."""

    def __init__(self, param: Tensor, group: int, arena: Arena, slot: int) -> None:
        self.param = self.stepped = self.target = param
        self.group, self.arena, self.slot = group, arena, slot


class Held:
    """Parameters and optimizer state as they were, to see whether others are in their places.

    Args:
        owners: parameters, in whatever order.
        values: all values in the state. Tensors are held weakly, so a script can free them.
        placed: which of ``values`` must be at the same address, too: ``.data`` may be assigned.
    """

    def __init__(
        self, owners: Sequence[Any], values: Sequence[Any], placed: Iterable[bool] = ()
    ) -> None:
        self._owners, self._gone = owners, list[object]()
        self._refs = [
            ref_of(v, self._gone.append) if isinstance(v, Tensor) else partial(_itself, v)
            for v in values
        ]
        self._placed = [
            is_placed and type(v) in (Tensor, nn.Parameter) and v.layout is torch.strided
            for v, is_placed in zip(values, placed, strict=False)
        ]
        self._places = self._places_of(values)

    def _places_of(self, values: Sequence[Any]) -> list[int]:
        return list(map(Tensor.data_ptr, compress(values, self._placed)))

    def is_current(self, owners: Sequence[Any], values: Sequence[Any]) -> bool:
        """Whether these are the same objects, and the ``placed`` ones at their addresses."""
        return (
            not self._gone
            and are_same(owners, self._owners)
            and are_same(values, [ref() for ref in self._refs])
            and self._places_of(values) == self._places
        )


def _itself(value: Any) -> Any:
    return value


def length_of(t: Tensor) -> int:
    """How many elements the memory has from the first to the last that the strides reach."""
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return last + 1 if t.numel() else 0


def is_dense(t: Tensor) -> bool:
    """Whether its elements fill its memory, in whatever order."""
    return t.numel() == length_of(t)


def place_of(t: Tensor) -> object:
    """Address, shape, strides, dtype and device: equal ones are one view of one memory."""
    return t.data_ptr(), t.shape, t.stride(), t.dtype, t.device


def flat(t: Tensor) -> Tensor:
    """The elements of a dense tensor in its memory's order, shape (n,)."""
    return t.as_strided((t.numel(),), (1,), t.storage_offset())


def laid_out(t: Tensor, strides: tuple[int, ...]) -> Tensor:
    """A copy of ``t`` with these strides."""
    return torch.empty_strided(t.shape, strides, dtype=t.dtype, device=t.device).copy_(t)
