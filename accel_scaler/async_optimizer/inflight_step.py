"""One update in flight: its work on the optimizer thread, and who waits for which part of it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import InitVar, dataclass, field
from enum import IntEnum
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import StepError
from ..optimizer_step import StepTiming
from ..scaling import SMALL, DeferredUnscale
from .master_params import goes_to_master
from .pending_parameter import ParameterHold, can_hold_parameters
from .preview import Previews
from .replica import Part, Replica
from .streams import PartEvents
from .worker import Task


class WaitAt(IntEnum):
    """Where an update is awaited; a higher value only replaces a lower one."""

    USE = 0
    """Where a parameter is used."""
    FORWARD = 1
    """Before a forward that uses parameters unseen: compiled, sharded, ``DataParallel``."""
    STEP = 2
    """In ``step()``: something reads parameters, and no hook can wait before it does."""


MIN_WAIT_S = 1e-5
"""A shorter wait is not recorded: the part was done."""

MAX_WAITS = 128
"""Waits recorded of one update."""


@dataclass(slots=True)
class Update:
    """What the optimizer thread gets for one step; dropped once its work is done."""

    grads: list[Tensor | None]
    """In the order of the parts, final but for what is ``deferred``."""
    deferred: DeferredUnscale
    sent: list[Any]
    """For each gradient the event of its arrival in host memory, or None."""
    ready: Any
    """The event after which all of that may be read."""
    previews: Previews | None = None
    """Publish these first."""
    on_device: list[Tensor | None] | None = None
    """The gradients that ``previews`` read on the model's device; None: ``grads``."""
    newer: set[int] = field(default_factory=set)
    """``id`` of parameters whose masters are newer than the model."""
    fn: Callable[[], object] | None = None
    """The function given to ``submit()``, which steps instead; None: the optimizer does."""
    on_edits: Callable[[list[Tensor]], None] | None = None
    """Receives parameters that were edited where no version counts; None: do not look."""


@dataclass(eq=False)
class InflightStep:
    """Made by :class:`.async_stepper.AsyncStepper` for each update; dies with it.

    It has a part for each part of the replica (a single one for a function given to ``submit()``).
    With ``publishes_first`` as many as the replica has come before, to publish masters or previews.
    """

    owner: InitVar[object]
    """Kept alive until the work is done."""
    replica: Replica
    update: InitVar[Update]
    publishes_first: InitVar[bool]
    is_stale: bool
    """The update is published at the next boundary."""
    is_beside: bool
    """Its kernels go to the side stream, not to that of the training thread."""
    number: int
    """The update's number, for errors."""
    hold: ParameterHold | None = None
    events: list[Any] = field(default_factory=list)
    """For each part done the event at its end on the device; one more after a failure."""

    def __post_init__(self, owner: object, update: Update, publishes_first: bool) -> None:
        self.streams, self.is_submitted = self.replica.streams, update.fn is not None
        parts = len(self.replica.parts)
        self.lead = parts if publishes_first else 0
        """Parts that only publish."""
        # The task drops its function once it is done, and with it gradients and owner.
        work = partial(self._work, owner, update)
        self.task = Task(work, self.lead + (1 if self.is_submitted else parts))

    @property
    def timing(self) -> StepTiming:
        """When it ran, and who waited for it."""
        return self.task.timing

    @property
    def is_enqueued(self) -> bool:
        """The side stream has all of its kernels."""
        return self.is_beside and self.task.finished and self.task.error is None

    @property
    def order(self) -> PartEvents | None:
        """The ends of its parts on the device; None where the host does the work itself."""
        return PartEvents(self.streams, self.events) if self.streams.copies_beside else None

    @property
    def is_seen_by_next_forward(self) -> bool:
        """Whether it writes to the model, before or after it computes."""
        return self.lead > 0 or not self.is_stale

    def hold_parameters(
        self, wait: Callable[[InflightStep, int], int], fence: Callable[[], bool] | None = None
    ) -> None:
        """Make each use of a parameter wait for its part, where uses can be seen. For the arguments
        see :class:`.pending_parameter.ParameterHold`."""
        replica = self.replica
        if not can_hold_parameters(replica.params):
            return
        ends, part_of = [part.end for part in replica.parts], replica.part_of
        if self.is_submitted and not self.is_stale:
            ends, part_of = [len(replica.params)], dict.fromkeys(part_of, 1)
        if self.lead and not self.is_stale:  # the forward needs what is computed
            ends = [0] * self.lead + ends
            part_of = {key: self.lead + part for key, part in part_of.items()}
        self.hold = ParameterHold(
            replica.params, ends, part_of, partial(wait, self), self.order, fence
        )

    def lift_fence(self, keep: bool) -> None:
        """A forward begins: parameters wait for their parts only; without ``keep`` for nothing."""
        if self.hold is not None and self.hold.fence is not None:
            self.hold.lift_fence()
            if not (keep and self.is_seen_by_next_forward):
                self.hold.release()
                self.hold = None

    def wait(self, parts: int | None = None) -> bool:
        """Block until ``parts`` (default: all) are done; False: it failed first. Any thread."""
        task, start = self.task, time.perf_counter()
        is_due = not (task.finished or (parts is not None and task.done >= parts))
        ok = task.wait(parts)
        length, waits = time.perf_counter() - start, task.timing.waits
        if is_due and length > MIN_WAIT_S and len(waits) < MAX_WAITS:
            waits.append((start, length))
        return ok

    def follow(self, parts: int | None = None) -> None:
        """Order what this thread enqueues now after part number ``parts``; None: after the last."""
        last = len(self.events) if parts is None else parts
        for event in self.events[max(last - 1, 0) : last]:
            self.streams.follow(event)

    def failure(self, name: str, names: Callable[[Sequence[Tensor]], str]) -> StepError:
        """The error: what failed, is updated, is lost; ``names`` writes parameters' names."""
        error, params = self.task.error, self.replica.params
        why = f"{type(error).__name__}: {error}"
        thread = "training" if self.timing.inline else "optimizer"
        updated = max(self.task.done - self.lead, 0)
        if self.is_submitted:
            name, moved = "the function given to submit()", "What it had stepped stays stepped."
        else:
            part = self.replica.parts[min(updated, len(self.replica.parts) - 1)]
            moved = (
                f"Updated: {names(params[: part.start])}. Of {names(params[part.start : part.end])}"
                " some may have moved, or their optimizer state. As before the step: "
                f"{names(params[part.end :])}."
            )
        return StepError(
            f"step {self.number} of {name} failed on the {thread} thread ({why}). {moved} The "
            "gradients of this step are gone; the next step works with new ones."
        )

    # The work, on the optimizer thread or in step().

    @torch.no_grad()
    def _work(self, owner: object, update: Update, task: Task) -> None:
        replica, streams = self.replica, self.streams
        with self._beside(update) if self.is_beside else nullcontext():
            try:
                if update.on_edits is not None and (edited := replica.take_edits()):
                    update.on_edits(edited)
                    if update.previews is not None:
                        update.previews.forget()
                replica.has_loaded = False
                if update.previews is not None:
                    self._publish_previews(update, update.previews)
                elif self.lead:
                    for part in replica.parts:
                        self._publish(part)
                        self._advance()
                if replica.offload:
                    # Masters are overwritten from here on; what was sent up has to be there.
                    streams.wait_on_host(self.events[-1] if self.events else update.ready)
                if update.fn is None:
                    self._step(update)
                else:
                    self._run(update, update.fn)
            finally:
                if task.done < task.parts:  # a part has failed, perhaps after its first kernels
                    self.events.append(streams.record())

    @contextmanager
    def _beside(self, update: Update) -> Iterator[None]:
        """Run on the side stream; memory that is used there is kept until that work is done."""
        with self.streams.beside(update.ready):
            self.streams.keep([*update.grads, *update.deferred.tensors])
            self.streams.keep(update.on_device or ())
            self.replica.keep()
            try:
                yield
            finally:
                self.replica.keep()

    def _publish_previews(self, update: Update, previews: Previews) -> None:
        """Publish what the next forward sees, part by part, before the update itself."""
        replica, on_device = self.replica, update.on_device
        grads = update.grads if on_device is None else on_device
        prepared, factors = previews.take(), self._factors(update, grads)
        for part in replica.parts:
            mine = slice(part.start, part.end)
            previews.publish(part, prepared, grads[mine], factors[mine], update.newer)
            if on_device is not None:
                for event in update.sent[mine]:  # writes to a gradient wait for this part alone
                    self.streams.wait(event)
                on_device[mine] = [None] * len(part.pairs)  # the update takes long, with copies
            self._advance()

    def _factors(self, update: Update, grads: Sequence[Tensor | None]) -> list[float]:
        """What each gradient is still to be multiplied by. Synchronises with the device."""
        replica = self.replica
        due = torch.stack(update.deferred.factors(replica.params)).tolist()
        # What was sent to host memory was unscaled before, but for the gradients of masters.
        return [
            1.0 if replica.sends and not (g is not None and goes_to_master(p, g)) else factor
            for p, g, factor in zip(replica.ordered, grads, due, strict=True)
        ]

    def _step(self, update: Update) -> None:
        replica, grads, deferred = self.replica, update.grads, update.deferred
        for part in replica.parts:
            mine = slice(part.start, part.end)
            final: list[Any] = grads[mine]
            for event in update.sent[mine]:
                self.streams.wait_on_host(event)
            grads[mine] = [None] * len(final)
            self.task.spent += [g for g in final if g is not None and g.numel() <= SMALL]
            follow = None if update.previews is None else update.previews.behind()
            replica.step_part(part, final, deferred, not self.is_stale, follow)
            self._advance()

    def _run(self, update: Update, fn: Callable[[], object]) -> None:
        replica = self.replica
        try:
            for part in replica.parts:
                mine = slice(part.start, part.end)
                for event in update.sent[mine]:
                    self.streams.wait_on_host(event)
                final = replica.bring(part.pairs, update.grads[mine], update.deferred)
                for pair, grad in zip(part.pairs, final, strict=True):
                    pair.stepped.grad = grad
            fn()
        finally:
            for pair in replica.pairs:
                pair.stepped.grad = None
        for part in [] if self.is_stale else replica.parts:
            self._publish(part)
        self._advance()

    def _advance(self) -> None:
        self.events.append(self.streams.record())
        self.task.advance()

    def _publish(self, part: Part) -> None:
        for pair in part.pairs if self.replica.has_masters else ():
            pair.publish(self.streams)


def gradient_wait(stepper: weakref.ref[Any], step: InflightStep, part: int) -> Callable[[], object]:
    """The wait for a gradient that ``step`` reads; keeps neither stepper nor step alive."""
    ref, task, events, streams = weakref.ref(step), step.task, step.events, step.streams

    def wait() -> None:
        owner, step = stepper(), ref()
        if owner is not None and step is not None:
            owner.await_part(step, part)
            return
        if not task.wait(part):
            raise StepError(
                "a gradient was used that was lost with its step, which failed "
                f"({type(task.error).__name__}: {task.error})."
            ) from task.error
        for event in events[part - 1 : part]:
            streams.follow(event)

    return wait
