"""Gradients on their way to the optimizer thread: read in place, copied, or sent to host memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ..errors import UnsupportedError
from ..scaling import DeferredUnscale
from .master_params import ParameterPair, goes_to_master
from .pending_parameter import GradientHold, hold_gradients, wait_for_gradients
from .streams import PartEvents, SideStreams

_storage_of: Callable[[Tensor], int] = torch._C._storage_address  # type: ignore[attr-defined]
_count_of: Callable[[int], int] = torch._C._storage_Use_Count
_layout_of, _data_of = map(attrgetter, ("layout", "data"))


def readable_in_place(grads: Sequence[Tensor | None]) -> list[Tensor | None]:
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
    """What the optimizer thread reads, and those of ``grads`` that it reads in place.

    Uses of the latter have to wait. The rest is copied; ``.grad`` is unscaled here, the copy there.
    """
    held = readable_in_place(grads)
    if not deferred and set(map(type, held)) == {Tensor}:
        return list(map(_data_of, held)), held
    copied = [grad if own is None else None for grad, own in zip(grads, held, strict=True)]
    taken = [
        grad if grad is None else grad.clone() if own is None else own.data
        for grad, own in zip(grads, held, strict=True)
    ]
    deferred.apply(unscaled_in_place(pairs, copied))
    if deferred.multiply is not None:  # on that thread, which autograd does not see
        torch.autograd.graph.increment_version([g for _, g in unscaled_in_place(pairs, held)])
    return taken, held


def unscaled_in_place(
    pairs: Sequence[ParameterPair], grads: Sequence[Tensor | None]
) -> list[tuple[Tensor, Tensor]]:
    """Parameters and their gradients, but for those unscaled on their way to a master."""
    return [
        (pair.param, grad)
        for pair, grad in zip(pairs, grads, strict=True)
        if grad is not None and not goes_to_master(pair, grad)
    ]


def send_down(
    pairs: Sequence[ParameterPair], grads: Sequence[Tensor | None], streams: SideStreams
) -> tuple[list[Tensor | None], list[Any]]:
    """Copy gradients to their pairs' host buffers. Returns what is stepped, and each copy's event.

    They are sent at the step, not while a backward runs: they may be edited until then.
    """
    stepped, events = list(grads), [None] * len(grads)
    for place, (pair, grad) in enumerate(zip(pairs, grads, strict=True)):
        if grad is None or pair.host_grad is None:
            continue
        if grad.dtype is not pair.host_grad.dtype:  # Tensor.grad_dtype
            (pair.host_grad,) = streams.host_like([grad])
        events[place] = streams.down(grad, pair.host_grad)
        stepped[place] = pair.host_grad
    return stepped, events


def keep_sent(grads: Sequence[Tensor | None], events: Sequence[Any], streams: SideStreams) -> None:
    """Make writes to ``grads`` wait until their copies have arrived."""
    for grad, event in zip(readable_in_place(grads), events, strict=True):
        if event is None:
            continue
        if grad is None:
            streams.follow(event)
        else:
            hold = GradientHold(partial(streams.follow, event), PartEvents(streams, [event]))
            hold_gradients([grad], hold)


def on_host(deferred: DeferredUnscale) -> DeferredUnscale:
    """The same numbers on the CPU. Synchronises with the device, as the check has just done."""
    multiply, divide = (t if t is None else t.cpu() for t in (deferred.multiply, deferred.divide))
    clips = deferred.clips
    if clips:  # in one transfer
        each = torch.stack(list(clips.values())).cpu().unbind()
        clips = dict(zip(clips, each, strict=True))
    return DeferredUnscale(multiply, divide, clips)


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


def guard_backward(pairs: Iterable[ParameterPair]) -> None:
    """Put a hook on each parameter by which a backward waits before it adds to ``.grad``."""
    for pair in pairs:
        if pair.guard is None and pair.param.requires_grad:
            param: Any = pair.param
            # Not of the parameter: torch swaps none that has a weak reference.
            pair.guard = param.register_hook(partial(_before_adding, weakref.ref(pair)))


def _before_adding(ref: weakref.ref[ParameterPair], _: Tensor) -> None:
    if (pair := ref()) is not None:
        wait_for_gradients([pair.param])


def unguard(pairs: Iterable[ParameterPair], kept: Iterable[ParameterPair] = ()) -> None:
    """Remove the hooks of :func:`guard_backward`, but for those of ``kept``."""
    staying = set(map(id, kept))
    for pair in pairs:
        if pair.guard is not None and id(pair) not in staying:
            pair.guard.remove()
            pair.guard = None
