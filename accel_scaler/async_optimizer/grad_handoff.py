"""Gradients on their way to the optimizer thread: read where they are, or copied."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ..optimizer_step import ParameterPair, goes_to_master
from ..scaling import DeferredUnscale
from .pending_parameter import wait_for_gradients

_storage_of: Callable[[Tensor], int] = torch._C._storage_address  # type: ignore[attr-defined]
_count_of: Callable[[int], int] = torch._C._storage_Use_Count
_layout_of, _data_of = map(attrgetter, ("layout", "data"))


def _readable_in_place(grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    """``grads``, with None for each that another thread may not read where it is.

    It may where each later use can be seen. It may not read shards, sparse gradients, and those to
    whose memory others write unseen: DDP's buckets, a buffer of the user's.
    """
    found: list[Any] = list(grads)
    if {Tensor} == set(map(type, found)) and {torch.strided} == set(map(_layout_of, found)):
        # Maps over C functions: with thousands of gradients a Python loop would show.
        counts = map(_count_of, map(_storage_of, found))
        return [grad if count == 1 else None for grad, count in zip(found, counts, strict=True)]
    return [
        grad
        if type(grad) is Tensor and grad.layout is torch.strided and not is_shared(grad)
        else None
        for grad in found
    ]


def is_shared(grad: Tensor) -> bool:
    """Whether its memory is another tensor's, too."""
    if grad.layout is not torch.strided:  # DDP reduces each of these by itself, into its own memory
        return False
    return _count_of(_storage_of(grad)) > 1


def read_in_place(
    pairs: Sequence[ParameterPair], grads: Sequence[Tensor | None], deferred: DeferredUnscale
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """What the optimizer thread reads, and the ``grads`` that it reads in place, whose uses have to
    wait. The rest is copied; ``.grad`` is unscaled here, the copy there."""
    held = _readable_in_place(grads)
    if not deferred and set(map(type, held)) == {Tensor}:
        return list(map(_data_of, held)), held
    copied = [grad if own is None else None for grad, own in zip(grads, held, strict=True)]
    taken = [
        grad if grad is None else grad.clone() if own is None else own.data
        for grad, own in zip(grads, held, strict=True)
    ]
    if deferred:
        deferred.apply(_unscaled_in_place(pairs, copied))
        # On that thread, which autograd does not see.
        torch.autograd.graph.increment_version([g for _, g in _unscaled_in_place(pairs, held)])
    return taken, held


def _unscaled_in_place(
    pairs: Sequence[ParameterPair], grads: Sequence[Tensor | None]
) -> list[tuple[Tensor, Tensor]]:
    """Parameters and their gradients, but for those unscaled on their way to a master."""
    return [
        (pair.param, grad)
        for pair, grad in zip(pairs, grads, strict=True)
        if grad is not None and not goes_to_master(pair, grad)
    ]


def guard_backward(pairs: Iterable[ParameterPair], guards: dict[ParameterPair, Any]) -> None:
    """Put a hook on each parameter by which a backward waits before it adds to ``.grad``. Adds the
    handles to ``guards``."""
    for pair in pairs:
        if pair not in guards and pair.param.requires_grad:
            param: Any = pair.param
            # Not of the parameter: torch swaps none that has a weak reference.
            guards[pair] = param.register_hook(partial(_before_adding, weakref.ref(pair)))


def _before_adding(ref: weakref.ref[ParameterPair], _: Tensor) -> None:
    if (pair := ref()) is not None:
        wait_for_gradients([pair.param])
