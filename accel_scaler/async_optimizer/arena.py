"""Flat memory for float32 masters and their optimizer state."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError

MASTER = "master"
"""The key of a parameter's float32 master, here and in its saved state."""

ALIGNED = 16
"""Elements: each parameter begins at a multiple of 64 bytes."""


class Where(Enum):
    """Where a parameter's state is."""

    NOWHERE = auto()
    """There is none yet."""
    HERE = auto()
    """In the arena."""
    ELSEWHERE = auto()
    """In tensors unlike those that a fused kernel makes: the optimizer's own step uses them."""


class Arena:
    """Masters side by side in one buffer, and buffers alike for state of the parameters' shape.

    ``optimizer.state[p]`` has views of them. What is replaced there is copied back before the next
    step (:meth:`adopt`).

    Args:
        targets: the model's parameters, in the order of their slots.
        device: of the memory.

    Raises:
        UnsupportedError: there is not enough memory.
    """

    def __init__(self, targets: Sequence[Tensor], device: torch.device) -> None:
        self.device = device
        self.shapes = [t.shape for t in targets]
        self.strides = [
            t.stride() if is_dense(t) else torch.empty_like(t, device="meta").contiguous().stride()
            for t in targets
        ]
        self.lengths = [t.numel() for t in targets]
        self.offsets: list[int] = []
        length = 0
        for each in self.lengths:
            self.offsets.append(length)
            length += -(-each // ALIGNED) * ALIGNED
        self._length = length
        self.memory: dict[str, Tensor] = {}
        self._views: dict[str, list[Tensor]] = {}
        self.counts = torch.zeros(len(targets), device=device)
        """The ``step`` in each one's state."""
        self.count_views = list(self.counts.unbind())
        self.where = [Where.NOWHERE] * len(targets)
        """The state of each one."""

    def end(self, slot: int) -> int:
        """Where its elements end."""
        return self.offsets[slot] + self.lengths[slot]

    def views(self, key: str) -> list[Tensor]:
        """The memory of ``key``, zero at first, for each slot."""
        found = self._views.get(key)
        if found is None:
            self.memory[key] = memory = self._allocate(key)
            found = [self.view(memory, slot) for slot in range(len(self.shapes))]
            self._views[key] = found
        return found

    def view(self, memory: Tensor, slot: int, begin: int = 0) -> Tensor:
        """One parameter's view of ``memory``, which begins at element ``begin`` of the arena."""
        place = memory.storage_offset() + self.offsets[slot] - begin
        return memory.as_strided(self.shapes[slot], self.strides[slot], place)

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
        """Give a parameter its first state: zeros."""
        entry.update({key: self.views(key)[slot] for key in keys})
        if counts:
            entry["step"] = self.count_views[slot]
        self.where[slot] = Where.HERE

    def adopt(self, slot: int, entry: dict[str, Any], keys: Sequence[str], counts: bool) -> None:
        """Move a parameter's state here; what does not fit stays where it is."""
        found = [(key, self.shapes[slot]) for key in keys] + [("step", torch.Size())] * counts
        values = [entry.get(key) for key, _ in found]
        if all(value is None for value in values):
            for key, views in self._views.items():
                if key != MASTER and self.where[slot] is not Where.NOWHERE:
                    views[slot].zero_()  # a later first state begins here
            self.count_views[slot].zero_()
            self.where[slot] = Where.NOWHERE
            return
        if not all(
            getattr(v, "shape", None) == shape for v, (_, shape) in zip(values, found, strict=True)
        ):
            self.where[slot] = Where.ELSEWHERE
            return
        for key, _ in found:
            view = self.count_views[slot] if key == "step" else self.views(key)[slot]
            if entry[key] is not view:
                view.copy_(entry[key])
                entry[key] = view
        self.where[slot] = Where.HERE


def is_dense(t: Tensor) -> bool:
    """Whether its elements fill its memory, in whatever order."""
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return t.numel() == 0 or t.numel() == last + 1


def flat(t: Tensor) -> Tensor:
    """The elements of a dense tensor in its memory's order, shape (n,)."""
    return t.as_strided((t.numel(),), (1,), t.storage_offset())
