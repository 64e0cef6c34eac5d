"""The parameters that an optimizer thread steps: aliases of the model's, or float32 masters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ..scaling import LOW_PRECISION, local
from .streams import Lane

__all__ = ["Slot", "make_slots", "needs_master", "place_of"]


def needs_master(p: Tensor, everywhere: bool) -> bool:
    """Whether ``p`` is updated through a float32 copy.

    float16 always: its smallest step near 1 is 1/1024. bfloat16 trains as torch does, in place,
    unless every parameter has a master.
    """
    return p.requires_grad and (everywhere or p.dtype is torch.float16)


class Slot:
    """One parameter of the model and what is stepped in its place."""

    __slots__ = (
        *("group", "guard", "host_grad", "is_master", "loaded", "param", "staging", "target"),
        "twin",
    )

    def __init__(self, param: Tensor, group: int) -> None:
        self.param, self.group = param, group
        with torch.no_grad():
            self.target = local(param.detach()).data
        """The model's memory, under a version counter of its own."""
        self.is_master = False
        self.twin = nn.Parameter(self.target, requires_grad=param.requires_grad)
        self.host_grad: Tensor | None = None
        self.staging: Tensor | None = None
        self.guard: Any = None
        """The handle of a hook that is asked before a backward adds to the gradient."""
        self.loaded: Tensor | None = None
        """A master from a state dict, until the next step: the model may be loaded after it."""

    def give_master(self, memory: Tensor) -> None:
        """Step ``memory`` (float32) from now on, starting from the parameter's values."""
        memory.copy_(self.target)
        self.is_master = True
        self.twin = nn.Parameter(memory, requires_grad=True)

    @property
    def is_rounded(self) -> bool:
        """The model holds less than the master."""
        return self.is_master and self.target.dtype in LOW_PRECISION

    @property
    def memory(self) -> tuple[Tensor, Tensor]:
        """What a step writes."""
        return self.target, self.twin.data

    @torch.no_grad()
    def refresh(self, master: Tensor | None = None) -> None:
        """Take over what was written to the parameter: a master stays where it rounds to it."""
        master = self.loaded if master is None else master
        kept = self.twin if master is None else master.to(self.twin.device, torch.float32)
        now = self.target.to(self.twin.device)
        if self.is_rounded and kept.shape == now.shape:
            self.twin.copy_(torch.where(kept.to(now.dtype) == now, kept, now.float()))
        else:
            self.twin.copy_(now)

    def publish(self, lane: Lane) -> None:
        """Write the master to the model, rounded to its dtype. Call without autograd."""
        if self.is_master:
            lane.up(self.twin.data, self.target, self.staging)


def make_slots(
    optimizer: Optimizer, lane: Lane, *, offload: bool, masters: bool, known: Iterable[Slot]
) -> list[Slot]:
    """A slot for each parameter, in the optimizer's order.

    ``known`` ones whose parameter is where it was are kept, with their masters.
    """
    old = {id(slot.param): slot for slot in known}
    slots: list[Slot] = []
    fresh: list[Slot] = []
    for number, group in enumerate(optimizer.param_groups):
        for p in group["params"]:
            slot = Slot(p, number)
            before = old.get(id(p))
            wanted = needs_master(p, masters)
            if (
                before is not None
                and place_of(before.target) == place_of(slot.target)
                and before.is_master == wanted
            ):
                before.group = number
                slot = before
            elif wanted:
                fresh.append(slot)
            slots.append(slot)
    _give_masters(fresh, lane, offload, old)
    # A model may go with its optimizer while the device still has an update of it to do.
    lane.keep(t for slot in slots if old.get(id(slot.param)) is not slot for t in slot.memory)
    return slots


def place_of(t: Tensor) -> object:
    """Which view of which memory: one that is equal reads and writes the same elements."""
    return t.data_ptr(), t.shape, t.stride(), t.dtype


@torch.no_grad()
def _give_masters(slots: Sequence[Slot], lane: Lane, offload: bool, old: dict[int, Slot]) -> None:
    targets = [slot.target for slot in slots]
    if not offload:
        for slot in slots:
            slot.give_master(torch.empty_like(slot.target, dtype=torch.float32))
    else:
        memory = lane.host_like(targets, torch.float32)
        grads = lane.host_like(targets)
        rounded = [] if lane.is_host else [s for s in slots if s.target.dtype in LOW_PRECISION]
        staging = dict(zip(rounded, lane.host_like([s.target for s in rounded]), strict=True))
        for slot, own, grad in zip(slots, memory, grads, strict=True):
            slot.give_master(own)
            slot.host_grad, slot.staging = grad, staging.get(slot)
    for slot in slots:
        before = old.get(id(slot.param))
        if before is not None and before.is_master:
            slot.loaded = before.loaded
            slot.refresh(before.twin.data if slot.loaded is None else slot.loaded)
