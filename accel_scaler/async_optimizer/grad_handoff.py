"""Gradients on their way to the optimizer thread: held, copied, or sent to host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..errors import UnsupportedError
from .master_params import ParameterPair
from .streams import SideStreams

__all__ = ["can_hold_gradients", "forbid_sparse", "is_part", "send_down"]


def can_hold_gradients(grads: Sequence[Tensor | None]) -> list[bool]:
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


def send_down(
    pairs: Sequence[ParameterPair], grads: Sequence[Tensor | None], streams: SideStreams
) -> list[Any]:
    """Copy each gradient to its pair's host buffer; for each the event of its end, or None.

    Once a step, and here: what is sent while a backward runs may be edited before the step
    through ``.data``, which no version counter sees.
    """
    return [
        None if grad is None or pair.host_grad is None else streams.down(grad, pair.host_grad)
        for pair, grad in zip(pairs, grads, strict=True)
    ]


def forbid_sparse(
    pairs: Sequence[ParameterPair],
    grads: Sequence[Tensor | None],
    names: Callable[[Sequence[Tensor]], str],
) -> None:
    """Raise ``UnsupportedError`` for a sparse gradient of a parameter with a master."""
    for pair, grad in zip(pairs, grads, strict=True):
        if grad is not None and pair.is_master and grad.layout is not torch.strided:
            raise UnsupportedError(
                f"{names([pair.param])} has a sparse gradient, which float32 masters (offload, "
                "step_mode 'delayed') do not take. Use Embedding(sparse=False), or step_mode "
                "'sync' or 'overlap' without offload."
            )
