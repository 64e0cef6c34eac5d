"""One update in flight: its work on the optimizer thread, and who waits for which part of it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from ..devices import as_on_stream
from ..errors import StepError
from ..optimizer_step import Replica, StepTiming
from ..scaling import SMALL, DeferredUnscale
from .compile_session import beside_no_compile
from .pending_parameter import GradientHold, ParameterHold, hold_gradients
from .worker import Task

MIN_WAIT_S = 1e-5
"""A shorter wait is not recorded: the part was done."""

MAX_WAITS = 128
"""Waits recorded of one update."""


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


class Waiting(Protocol):
    """Waits for a part of a step on the thread that needs it, and raises where the step failed."""

    def await_part(self, step: InflightStep, part: int) -> int: ...


@dataclass(eq=False)
class InflightStep:
    """Made by :class:`.async_stepper.AsyncStepper` for each update; dies with it.

    It has a part for each part of the replica, a single one for a function given to ``submit()``.
    """

    replica: Replica
    number: int
    """The update's number, for errors."""
    task: Task
    is_submitted: bool
    hold: ParameterHold | None = field(default=None, init=False)

    @classmethod
    def of(cls, replica: Replica, update: Update, number: int) -> InflightStep:
        """A step that has not begun."""
        is_submitted = update.fn is not None
        # The task drops its function once it is done, and with it the update.
        work = partial(_run_submitted if is_submitted else _step_parts, replica, update)
        task = Task(work, 1 if is_submitted else len(replica.parts))
        return cls(replica, number, task, is_submitted)

    @property
    def timing(self) -> StepTiming:
        """When it ran, and who waited for it."""
        return self.task.timing

    def hold_parameters(self, owner: Waiting) -> None:
        """Make each use of a parameter wait for its part."""
        replica = self.replica
        ends, part_of = [part.end for part in replica.parts], replica.part_of
        if self.is_submitted:
            ends, part_of = [len(replica.params)], dict.fromkeys(part_of, 1)
        self.hold = ParameterHold(replica.params, ends, part_of, partial(owner.await_part, self))

    def hold_gradients(self, owner: Waiting, held: Sequence[Tensor | None]) -> None:
        """Make each use of the gradients that it reads in place wait until their part is done."""
        ref, step = weakref.ref(owner), weakref.ref(self)
        for number, part in enumerate(self.replica.parts, 1):
            mine = [grad for grad in held[part.start : part.end] if grad is not None]
            hold_gradients(mine, GradientHold(_gradient_wait(ref, step, self.task, number)))

    def wait(self, parts: int | None = None) -> bool:
        """Block until ``parts`` (default: all) are done; False: it failed first. Any thread."""
        task, start = self.task, time.perf_counter()
        is_due = not (task.finished or (parts is not None and task.done >= parts))
        ok = task.wait(parts)
        length, waits = time.perf_counter() - start, task.timing.waits
        if is_due and length > MIN_WAIT_S and len(waits) < MAX_WAITS:
            waits.append((start, length))
        return ok


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


def _gradient_wait(
    owner: weakref.ref[Waiting], step: weakref.ref[InflightStep], task: Task, part: int
) -> Callable[[], object]:
    """The wait for a gradient that ``step`` reads; keeps neither owner nor step alive."""

    def wait() -> None:
        by, held = owner(), step()
        if by is not None and held is not None:
            by.await_part(held, part)
        elif not task.wait(part):
            raise StepError(
                "a gradient was used that was lost with its step, which failed "
                f"({type(task.error).__name__}: {task.error})."
            ) from task.error

    return wait
