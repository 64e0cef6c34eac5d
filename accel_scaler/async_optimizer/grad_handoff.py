"""Gradients on their way to the optimizer thread: lent, copied, or sent to host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import UnsupportedError
from .master_params import Slot
from .streams import Lane

__all__ = ["can_be_lent", "forbid_sparse", "is_part", "send_down"]


def can_be_lent(grads: Sequence[Tensor | None]) -> list[bool]:
    """Which of them another thread may read where they are, since each later use can be seen.

    Not shards, sparse ones and views of DDP's buckets, which others write to unseen.
    """
    has_ranks = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    return [
        type(grad) is Tensor and grad.layout is torch.strided and not (has_ranks and is_part(grad))
        for grad in grads
    ]


def is_part(grad: Tensor) -> bool:
    """Whether its memory may be another tensor's, too."""
    if grad.layout is not torch.strided:  # DDP reduces each of these by itself, into its own memory
        return False
    # A bucket of one parameter is as large as the gradient that views it.
    return grad._is_view() or grad.untyped_storage().nbytes() > grad.nbytes


def send_down(slots: Sequence[Slot], grads: Sequence[Tensor | None], lane: Lane) -> list[Any]:
    """Copy each gradient to its slot's host buffer; for each the mark of its end, or None.

    Once a step, and here: what is sent while a backward runs may be edited before the step
    through ``.data``, which no version counter sees.
    """
    return [
        None if grad is None or slot.host_grad is None else lane.down(grad, slot.host_grad)
        for slot, grad in zip(slots, grads, strict=True)
    ]


def forbid_sparse(
    slots: Sequence[Slot],
    grads: Sequence[Tensor | None],
    names: Callable[[Sequence[Tensor]], str],
) -> None:
    """Raise ``UnsupportedError`` for a sparse gradient of a parameter with a master."""
    for slot, grad in zip(slots, grads, strict=True):
        if grad is not None and slot.is_master and grad.layout is not torch.strided:
            raise UnsupportedError(
                f"{names([slot.param])} has a sparse gradient, which float32 masters (offload, "
                "step_mode 'delayed') do not take. Use Embedding(sparse=False), or step_mode "
                "'sync' or 'overlap' without offload."
            )
