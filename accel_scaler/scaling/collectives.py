"""The only collectives of the package; see Note [Who comes to a collective]."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def is_sharded(parameters: Iterable[Any]) -> bool:
    """Whether there is a DTensor (FSDP2, tensor or expert parallelism), so that ranks may have
    different gradients."""
    return any(hasattr(kind, "placements") for kind in set(map(type, parameters)))


def has_ranks() -> bool:
    """Whether there are other ranks."""
    return dist.is_initialized() and dist.get_world_size() > 1


def pause_before_the_end() -> None:
    """Give Gloo's threads time to drop the last gathered objects. They need Python's lock for
    that: torch joins them while it has the lock, and hangs; and a thread that asks for the lock
    after Python's end ends the process with SIGABRT."""
    if has_ranks():
        time.sleep(0.1)


@torch.no_grad()
def reduce_partial_gradients(parameters: Iterable[Any]) -> None:
    """Give each DTensor gradient the placements of its parameter. A replicated parameter between
    sharded ones (a norm under sequence parallelism) has partial sums, which add up to the gradient.
    Communicates where placements differ."""
    for p in parameters:
        grad = p.grad
        if hasattr(grad, "placements") and grad.placements != p.placements:
            p.grad = grad.redistribute(p.device_mesh, p.placements)


def any_rank(answer: bool, device: torch.device, group: Any = None) -> bool:
    """Whether ``answer`` is True on any rank of ``group`` (None: of all). Communicates on
    ``device``, and synchronises with it and the other ranks."""
    flag = torch.full((), float(answer), dtype=torch.float32, device=device)
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group)
    return bool(flag)


def is_rank_0(group: Any = None) -> bool:
    """Whether this is the first rank of ``group`` (None: of all)."""
    return not dist.is_initialized() or dist.get_rank(group) == 0


def add_norms(norm: float, device: torch.device) -> float:
    """The 2-norm over all ranks from the ``norm`` of each rank's part. Communicates on ``device``,
    and synchronises with it."""
    square = torch.full((), norm, dtype=torch.float64, device=device) ** 2
    if dist.is_initialized():
        dist.all_reduce(square)
    return float(square.sqrt())


def gather_objects(value: T, device: torch.device) -> list[T]:
    """Every rank's ``value``, pickled on the way, in rank order. Communicates on ``device``, and
    synchronises with it and with the other ranks."""
    answers: list[Any] = [None] * dist.get_world_size()
    with torch.get_device_module(device.type).device(device) if device.index else nullcontext():
        dist.all_gather_object(answers, value)
    return answers


def whole(t: Any) -> Tensor:
    """The elements of a DTensor on all ranks, as a plain tensor; another tensor as it is.
    Communicates if ``t`` is a DTensor."""
    full: Tensor = t.full_tensor() if hasattr(t, "full_tensor") else t
    return full
