"""Memory for float32 masters and optimizer state, and who has which place in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum, auto
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import UnsupportedError

ALIGNED = 16
"""Elements: each parameter begins at a multiple of 64 bytes."""


class Where(IntEnum):
    """Whether a fused kernel of torch can be called with a parameter's state."""

    NOWHERE = auto()
    """There is no state yet."""
    HERE = auto()
    """Yes: it is laid out for the kernel."""
    ELSEWHERE = auto()
    """No: the optimizer's own step uses it."""


class Arena:
    """Parameters side by side: masters in one buffer, state of their shape in others like it.

    ``optimizer.state[p]`` has views of them. What is replaced there is copied before the next step
    (:meth:`adopt`), and what was taken out is written to no more (:meth:`let_go`). Without masters
    the state stays where the optimizer has it, but for the counts of steps.

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
        self._length = 0
        for each in self.lengths:
            self.offsets.append(self._length)
            self._length += -(-each // ALIGNED) * ALIGNED
        self._views: dict[str, list[Tensor]] = {}
        self._given: set[tuple[str, int]] = set()
        """Key and slot of each view that was put into the optimizer's state."""
        self._make_counts()
        self._fits = [
            has_masters or (type(t) is Tensor and t.dtype is torch.float32 and is_dense(t))
            for t in targets
        ]
        self.where = [Where.NOWHERE] * len(targets)
        """The state of each slot."""

    def end(self, slot: int) -> int:
        """The offset at which the elements of ``slot`` end."""
        return self.offsets[slot] + self.lengths[slot]

    def views(self, key: str) -> list[Tensor]:
        """For each slot its view of the memory of ``key``, float32, zero at first. Raises
        ``UnsupportedError`` where there is not enough memory."""
        if key not in self._views:
            memory = self._allocate(key)
            self._views[key] = [self.view(memory, slot) for slot in range(len(self.shapes))]
        return self._views[key]

    def view(self, memory: Tensor, slot: int, begin: int = 0) -> Tensor:
        """One parameter's view of ``memory``, which begins at element ``begin`` of the arena."""
        place = memory.storage_offset() + self.offsets[slot] - begin
        return memory.as_strided(self.shapes[slot], self.strides[slot], place)

    def are_neighbours(self, slots: Sequence[int], views: Sequence[Tensor]) -> bool:
        """Whether ``views`` lie in memory at the distances that ``slots`` have here."""
        begin, start = views[0].data_ptr(), self.offsets[slots[0]]
        places = (begin + 4 * (self.offsets[slot] - start) for slot in slots)
        return all(map(int.__eq__, map(Tensor.data_ptr, views), places))

    def _allocate(self, key: str) -> Tensor:
        try:
            return torch.zeros(self._length, dtype=torch.float32, device=self.device)
        except RuntimeError as error:
            raise UnsupportedError(
                f"{self._length * 4 / 2**20:,.0f} MiB of memory on {self.device} cannot be had for "
                f"{key!r} of {len(self.shapes)} parameters ({error}). Without float32 masters "
                "(step_mode='sync' or 'overlap', offload='none', float32 weights) none is asked "
                "for."
            ) from error

    def fill(self, slot: int, entry: dict[str, Any], keys: Sequence[str], counts: bool) -> None:
        """Give a parameter with a master its first state: zeros."""
        for name in [*keys, *["step"] * counts]:
            self._give(name, slot, entry).zero_()
        self.where[slot] = Where.HERE

    def adopt(self, slot: int, entry: dict[str, Any], keys: Sequence[str], counts: bool) -> None:
        """Move a parameter's state here; what is unlike a fused kernel's stays where it is."""
        names, shape = [*keys, *["step"] * counts], self.shapes[slot]
        values = {name: entry[name] for name in names if entry.get(name) is not None}
        if not values and self._fits[slot] and (names or self.has_masters):
            self.where[slot] = Where.NOWHERE
            return
        shapes = [(v.shape if isinstance(v, Tensor) else None) for v in values.values()]
        is_alike = shapes == [torch.Size() if name == "step" else shape for name in names]
        if is_alike and not self.has_masters:
            held = [values[key] for key in keys]
            is_alike = self._fits[slot] and all(
                type(v) is Tensor and v.dtype is torch.float32 and v.stride() == self.strides[slot]
                for v in held
            )
        if not is_alike:
            self.where[slot] = Where.ELSEWHERE
            return
        for name in names if self.has_masters else names[len(keys) :]:
            view = self._view_of(name, slot)
            if not _is_same_memory(entry[name], view):
                view.copy_(entry[name])
                self._give(name, slot, entry)
        self.where[slot] = Where.HERE

    def let_go(self, entries: Mapping[int, dict[str, Any]]) -> None:
        """Write no more to state that is not in the ``entries`` of slots any more: whoever has
        taken it out may put it back, or into another entry."""
        lost = {
            (name, slot)
            for name, slot in self._given
            if not _is_same_memory(entries.get(slot, {}).get(name), self._view_of(name, slot))
        }
        self._given -= lost
        for name in {name for name, _ in lost}:
            if name == "step":
                self._make_counts()
            elif all(given != name for given, _ in self._given):
                del self._views[name]
            else:
                views = self._views[name]
                for slot in [slot for lost_name, slot in lost if lost_name == name]:
                    views[slot] = torch.empty_like(views[slot])

    def _make_counts(self) -> None:
        self.counts = torch.zeros(len(self.shapes), device=self.device)
        """The ``step`` in the state of each slot, float32, shape (n,)."""
        self._count_views = list(self.counts.unbind())

    def _give(self, name: str, slot: int, entry: dict[str, Any]) -> Tensor:
        self._given.add((name, slot))
        view, value = self._view_of(name, slot), entry.get(name, 0)
        if name == "step" and _is_movable(value, view):
            value.data = view  # a state dict that was loaded has the same tensor: it follows
        else:
            entry[name] = view.detach()  # its ``.data`` may be assigned
        return view

    def _view_of(self, name: str, slot: int) -> Tensor:
        return self._count_views[slot] if name == "step" else self.views(name)[slot]


class Placed:
    """A parameter with a place in an arena, and what is stepped for it: itself, unless it has a
    master."""

    staging: Tensor | None = None
    """Host memory, from which new values are sent to the device."""
    preview: Tensor | None = None
    """Host memory for the preview of the next update (``delayed``), in the model's dtype."""

    def __init__(self, param: Tensor, group: int, arena: Arena, slot: int) -> None:
        self.param = self.stepped = self.target = param
        self.group, self.arena, self.slot = group, arena, slot

    @property
    def has_state(self) -> bool:
        """Whether its state is laid out for the kernel, as of the last step handed over."""
        return self.arena.where[self.slot] is Where.HERE


class Held:
    """Objects as they were, to see whether others are in their places.

    Args:
        placed: tensors among these must be at the same address, too: ``.data`` may be assigned.
    """

    def __init__(self, values: Sequence[Any], placed: Sequence[Any]) -> None:
        self._values = values
        self._tensors = [
            each
            for each in placed
            if type(each) in (Tensor, nn.Parameter) and each.layout is torch.strided
        ]
        self._places = list(map(Tensor.data_ptr, self._tensors))

    def is_current(self, values: Sequence[Any]) -> bool:
        """Whether ``values`` are the same objects, and ``placed`` where they were."""
        places = map(Tensor.data_ptr, self._tensors)
        return are_same(values, self._values) and list(places) == self._places


def are_same(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether they hold the same objects."""
    return len(one) == len(other) and all(map(is_, one, other))


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


def _is_same_memory(value: object, view: Tensor) -> bool:
    """Whether ``value`` is the same view of the same memory as ``view``."""
    return type(value) is Tensor and place_of(value) == place_of(view)


def _is_movable(value: object, view: Tensor) -> bool:
    """Whether the ``data`` of ``value`` may be ``view``."""
    return (
        type(value) is Tensor
        and (value.dtype, value.device, value.shape) == (view.dtype, view.device, view.shape)
        and not value.requires_grad
        and not value.is_inference()
    )


def flat(t: Tensor) -> Tensor:
    """The elements of a dense tensor in its memory's order, shape (n,)."""
    return t.as_strided((t.numel(),), (1,), t.storage_offset())
