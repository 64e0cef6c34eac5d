"""Gradients on their way to the optimizer thread: taken over, copied, or sent to the host."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .config import UnsupportedError
from .slots import Slot
from .transfer import Lane

__all__ = ["Copied", "Intake"]

Copied = tuple[Tensor, int, Any, tuple[Tensor, ...]]
"""A gradient, its version when it was sent to the host, the mark of the copy's end, and what it was
multiplied by since."""

Arrival = tuple[Any, tuple[Tensor, ...]]
"""The mark of the copy's end and the factors, alone: the gradient's memory on the device is free by
then. The factors are on the host."""


class Intake:
    """Of one engine. The training thread's.

    Args:
        offload: gradients go to host memory.
        is_free: whether the host buffers may be written to, the step before being done.
    """

    def __init__(self, lane: Lane, offload: bool, is_free: Callable[[], bool]) -> None:
        self.lane, self.offload = lane, offload
        self.is_last_backward: Callable[[], bool] = lambda: True
        """Whether the backward that runs is the window's last: then gradients are final."""
        self._is_free = is_free
        self._slots: list[Slot] = []
        self._handles: list[Any] = []

    def watch(self, slots: list[Slot]) -> None:
        """Send each gradient down as soon as the backward has accumulated it."""
        self.close()
        self._slots = slots
        ref = weakref.ref(self)
        for number, slot in enumerate(slots if self.offload else ()):
            if slot.host_grad is None or not (slot.param.is_leaf and slot.param.requires_grad):
                continue
            if hasattr(slot.param, "to_local"):
                continue  # its gradient is a DTensor, made anew wherever it is asked for its shard

            # Not the slot itself: it holds the parameter, which holds its hooks where the garbage
            # collector does not look.
            def send(p: Tensor, number: int = number) -> None:
                intake, grad = ref(), p.grad
                if intake is None or grad is None or grad.layout is not torch.strided:
                    return  # the step refuses sparse ones, with the reason
                if intake._may_send():
                    slot = intake._slots[number]
                    slot.copied = intake._send(slot, grad)

            param: Any = slot.param
            self._handles.append(param.register_post_accumulate_grad_hook(send))

    def _may_send(self) -> bool:
        # Under DDP a gradient is final only after the all-reduce, later in the backward. From one
        # place of the host's memory to another nothing is gained by an early copy.
        return (
            self.lane.copies_beside
            and self.is_last_backward()
            and self._is_free()
            and not _has_ranks()
        )

    def close(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def own(self, grads: list[Tensor | None]) -> list[Tensor | None]:
        """Gradients that no later backward writes to: views of DDP's buckets are copied."""
        if self.offload or not _has_ranks():
            return grads
        return [grad.clone() if grad is not None and _is_part(grad) else grad for grad in grads]

    def forget(self) -> None:
        """What was sent is not wanted: the step is skipped."""
        for slot in self._slots if self.offload else ():
            slot.copied = None

    def unchanged(self) -> list[Slot]:
        """Those whose gradient is on its way to the host as it is now; it may be written to."""
        if not self.offload:
            return []
        sent = [slot for slot in self._slots if _is_sent(slot, slot.param.grad)]
        if sent:
            self.lane.follow_copies()  # or they would read what is about to be written
        return sent

    def multiplied(self, sent: Sequence[Slot], factor: Tensor) -> None:
        """The gradients of ``sent`` have been multiplied by ``factor``: float32, shape (), here
        on the host."""
        for slot in sent:
            assert slot.copied is not None
            grad, _, mark, factors = slot.copied
            slot.copied = grad, grad._version, mark, (*factors, factor)

    def copy_down(
        self, grads: list[Tensor | None]
    ) -> tuple[list[Tensor | None], list[Arrival | None]]:
        """Send to the host what the backward has not sent already, or has changed since.

        Returns the gradients that stay, and for each slot the mark of its copy; no marks without
        offload.
        """
        if not self.offload:
            return grads, []
        copies: list[Arrival | None] = []
        for slot, grad in zip(self._slots, grads, strict=True):
            if grad is None or slot.host_grad is None:
                copies.append(None)
                continue
            if _is_sent(slot, grad):
                assert slot.copied is not None
                sent = slot.copied
            else:
                sent = self._send(slot, grad)
                if _is_part(grad):
                    self.lane.follow(sent[2])  # the next backward writes to the same memory
            slot.copied = None
            copies.append(sent[2:])
        return [g if c is None else None for g, c in zip(grads, copies, strict=True)], copies

    def _send(self, slot: Slot, grad: Tensor) -> Copied:
        assert slot.host_grad is not None
        return grad, grad._version, self.lane.down(grad, slot.host_grad), ()

    def forbid_sparse(
        self, grads: Sequence[Tensor | None], names: Callable[[Sequence[Tensor]], str]
    ) -> None:
        """Raise ``UnsupportedError`` for a sparse gradient of a parameter with a master."""
        for slot, grad in zip(self._slots, grads, strict=True):
            if grad is not None and slot.is_master and grad.layout is not torch.strided:
                raise UnsupportedError(
                    f"{names([slot.param])} has a sparse gradient, which float32 masters (offload, "
                    "step_mode 'delayed') do not take. Use Embedding(sparse=False), or step_mode "
                    "'sync' or 'overlap' without offload."
                )


def _is_sent(slot: Slot, grad: Tensor | None) -> bool:
    sent = slot.copied
    return sent is not None and sent[0] is grad and sent[1] == sent[0]._version


def _is_part(grad: Tensor) -> bool:
    if grad.layout is not torch.strided:  # DDP reduces each of these by itself, into its own memory
        return False
    # A bucket of one parameter is as large as the gradient that views it.
    return grad._is_view() or grad.untyped_storage().nbytes() > grad.nbytes


def _has_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
