"""One update in flight: its gradients, its work on the optimizer thread, who waits for it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, MutableMapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ..devices import as_on_stream
from ..errors import StepError
from ..optimizer_step import ParameterPair, Replica, goes_to_master
from ..scaling import SMALL, DeferredUnscale
from .compile_session import beside_no_compile
from .pending_parameter import ParameterHold, hold_gradients, wait_for_gradients
from .worker import Task

_storage_of: Callable[[Tensor], int] = torch._C._storage_address  # type: ignore[attr-defined]
_count_of: Callable[[int], int] = torch._C._storage_Use_Count
_layout_of = attrgetter("layout")


@dataclass(slots=True)
class Update:
    """All that the optimizer thread gets for one step; dropped once its work is done."""

    grads: list[Tensor | None]
    """In the order of the parts, final once they are multiplied by ``deferred``."""
    deferred: DeferredUnscale
    begin: Callable[[], None]
    """Called first: lets masters take edits of the model. Bound, it keeps the stepper alive."""
    fn: Callable[[], object] | None = None
    """The function given to ``submit()``, which steps instead; None: the optimizer does."""
    stream: torch.Stream | None = None
    """The training thread's, on which ``fn`` runs; None: on a CPU."""


class InflightStep:
    """Made by :class:`.async_stepper.AsyncStepper` for each update; dies with it.

    It has a part for each part of the replica, a single one for a function given to ``submit()``.
    """

    def __init__(self, replica: Replica, update: Update) -> None:
        self.is_submitted = update.fn is not None
        # The task drops its function once it is done, and with it the update.
        work = partial(_run_submitted if self.is_submitted else _step_parts, replica, update)
        self.task = Task(work, 1 if self.is_submitted else len(replica.parts))
        self.hold: ParameterHold | None = None
        self.reads_in_place = False
        """It reads some gradients where they are."""
        self._replica = replica

    def hold_parameters(self, wait: Callable[[InflightStep, int], int]) -> None:
        """Make each use of a parameter ``wait`` for its part."""
        replica = self._replica
        ends, part_of = [part.end for part in replica.parts], replica.part_of
        if self.is_submitted:
            ends, part_of = [len(replica.params)], dict.fromkeys(part_of, 1)
        self.hold = ParameterHold(replica.params, ends, part_of, partial(wait, self))

    def hold_gradients(self, held: Sequence[Tensor | None]) -> None:
        """Make each use of the gradients that it reads in place wait until their part is done. They
        keep the task alone: a script may keep them."""
        for number, part in enumerate(self._replica.parts, 1):
            mine = [grad for grad in held[part.start : part.end] if grad is not None]
            hold_gradients(mine, partial(_await_gradient, self.task, number))
            self.reads_in_place = self.reads_in_place or bool(mine)


def _await_gradient(task: Task, part: int) -> None:
    if not task.wait(part):
        raise StepError(
            "a gradient was used that was lost with its step, which failed "
            f"({type(task.error).__name__}: {task.error})."
        ) from task.error


# Gradients on their way to the optimizer thread: read where they are, or copied.


def is_own(grad: Any) -> bool:
    """Whether another thread may read it where it is, since each later use can be seen. Not shards,
    sparse gradients, and those to whose memory others write unseen: DDP's buckets, a buffer of the
    user's."""
    is_plain = type(grad) is Tensor and grad.layout is torch.strided
    return is_plain and _count_of(_storage_of(grad)) == 1


def _own_ones(grads: Sequence[Any]) -> list[Tensor | None]:
    """``grads``, with None for each that is not its own (:func:`is_own`)."""
    if {Tensor} == set(map(type, grads)) and {torch.strided} == set(map(_layout_of, grads)):
        # Maps over C functions: with thousands of gradients a Python loop would show.
        counts = map(_count_of, map(_storage_of, grads))
        return [grad if count == 1 else None for grad, count in zip(grads, counts, strict=True)]
    return [grad if is_own(grad) else None for grad in grads]


def read_in_place(
    pairs: Sequence[ParameterPair], grads: Sequence[Tensor | None], deferred: DeferredUnscale
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """What the optimizer thread reads, and the ``grads`` that it reads in place, whose uses have to
    wait. The rest is copied; ``.grad`` is unscaled here, the copy there."""
    held = _own_ones(grads)
    taken = [
        grad if grad is None else grad.clone() if own is None else own.data
        for grad, own in zip(grads, held, strict=True)
    ]
    if deferred:
        copied = [grad if own is None else None for grad, own in zip(grads, held, strict=True)]
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


def guard_backward(
    pairs: Iterable[ParameterPair], guards: MutableMapping[ParameterPair, Any]
) -> None:
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


# The work, on the optimizer thread.


@torch.no_grad()
def _step_parts(replica: Replica, update: Update, task: Task) -> None:
    update.begin()
    for part in replica.parts:
        mine = slice(part.start, part.end)
        final = update.grads[mine]
        update.grads[mine] = [None] * len(final)
        task.spent += [g for g in final if g is not None and g.numel() <= SMALL]
        with beside_no_compile():
            replica.step_part(part, final, update.deferred)
        task.advance()


@torch.no_grad()
def _run_submitted(replica: Replica, update: Update, task: Task) -> None:
    assert update.fn is not None
    with as_on_stream(update.stream):
        update.begin()
        try:
            final = replica.bring(replica.ordered, update.grads, update.deferred)
            for pair, grad in zip(replica.ordered, final, strict=True):
                pair.stepped.grad = None if grad is None else grad.to(pair.stepped.device)
            del final
            update.grads.clear()
            with beside_no_compile():
                update.fn()
        finally:
            for pair in replica.pairs:
                pair.stepped.grad = None
        for pair in replica.pairs:
            pair.publish()
    task.advance()
