"""One update in flight: its work on the optimizer thread, and who waits for which part of it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..errors import StepError
from ..optimizer_step import StepTiming
from ..scaling import DeferredUnscale
from .compensation import Compensation
from .grad_handoff import goes_to_master
from .pending_parameter import ParameterHold, can_hold_parameters
from .replica import Part, Replica
from .shown_error import ShownError
from .streams import PartEvents, SideStreams
from .worker import Task

SHORTEST_WAIT_S = 1e-5
"""A shorter one is none: the part was done."""

MOST_WAITS = 128
"""Noted of one update."""


@dataclass(frozen=True, slots=True)
class LateGradients:
    """What the model is given of a step whose update comes late: its gradients' share of it."""

    grads: list[Tensor | None]
    """In the order of the parts, where the model is."""
    deferred: DeferredUnscale
    are_unscaled: bool
    """But for those of masters that are float16 or bfloat16."""
    sent: Sequence[Any]
    """For each gradient the event of its arrival in host memory, or None."""
    newer: set[int]
    """``id`` of parameters that have not what their masters have."""


class InflightStep:
    """Made by :class:`.async_stepper.AsyncStepper` for each update; dies with it.

    It has a part for each part of the replica, after as many that only publish what the step
    before computed, if that waits to be published; a function of the user's is one part.

    Args:
        owner: lives until the work is done.
        grads: in the order of the parts, as they are stepped but for what is ``deferred``.
        sent: for each gradient the event of its arrival in host memory, or None.
        ready: the event after which all of that may be read.
        publishes_first: the step before was stale.
        is_stale: what this one computes is published at the next boundary.
        late: what the model is given until then; None: what the step before computed.
        compensation: how; None: not at all.
        measures: how far what the model is given is off, into ``timing``.
        fn: steps instead, on the optimizer thread.
        number: of the update, in errors.
        on_edits: the model has what was published, so edits of it that no version shows are looked
            for, and given to this. None: it has a preview.
    """

    def __init__(
        self,
        owner: object,
        replica: Replica,
        streams: SideStreams,
        grads: list[Tensor | None],
        sent: list[Any],
        deferred: DeferredUnscale,
        *,
        ready: Any,
        publishes_first: bool,
        is_stale: bool,
        late: LateGradients | None = None,
        compensation: Compensation | None = None,
        measures: bool = False,
        fn: Callable[[], object] | None,
        number: int,
        on_edits: Callable[[list[Tensor]], None] | None,
    ) -> None:
        self.replica, self.streams, self.number = replica, streams, number
        self.publishes_first, self.is_stale, self.is_of_user = publishes_first, is_stale, bool(fn)
        self.compensation, self._measures = compensation, measures
        parts = len(replica.parts)
        self.lead = parts * publishes_first
        """Parts that only publish what the step before computed."""
        self.events: list[Any] = []
        """Where on the device each part done ends; one more after a failure."""
        self.hold: ParameterHold | None = None
        # Gradients and owner go with the work, which the task drops once it is done.
        work = partial(self._work, owner, grads, sent, deferred, ready, late, fn, on_edits)
        self.task = Task(work, (parts if fn is None else 1) + self.lead)
        if is_stale:
            is_bare = late is None or compensation is None
            self.timing.delay_compensation = "none" if is_bare else "preview"

    @property
    def timing(self) -> StepTiming:
        """When it ran, and who waited for it."""
        return self.task.timing

    @property
    def order(self) -> PartEvents | None:
        """Its parts as the device does them; None where the host does."""
        return PartEvents(self.streams, self.events) if self.streams.copies_beside else None

    @property
    def is_seen_by_next_forward(self) -> bool:
        """It writes to the model, before or after it computes."""
        return self.publishes_first or not self.is_stale

    def hold_parameters(
        self,
        wait: Callable[[InflightStep, int], int],
        one_by_one: bool,
        fence: Callable[[bool], bool] | None = None,
    ) -> None:
        """Each use of a parameter waits for its part from now on, where uses can be seen.

        ``fence``: see :class:`.pending_parameter.ParameterHold`.
        """
        replica = self.replica
        if not can_hold_parameters(replica.params):
            return
        ends, part_of = replica.ends, replica.part_of
        if self.is_of_user and not self.is_stale:
            ends, part_of = [len(replica.params)], dict.fromkeys(part_of, 1)
        if self.lead and not self.is_stale:  # what it computes is to be seen, not what it finds
            ends = [0] * self.lead + ends
            part_of = {key: self.lead + part for key, part in part_of.items()}
        self.hold = ParameterHold(
            replica.params, ends, part_of, partial(wait, self), one_by_one, self.order, fence
        )

    def lift_fence(self, keep: bool) -> None:
        """A forward begins: parameters wait for their parts alone; not ``keep``: for nothing."""
        if self.hold is not None and self.hold.fence is not None:
            self.hold.fence = None
            if not (keep and self.is_seen_by_next_forward):
                self.hold.release()
                self.hold = None

    def wait(self, parts: int | None = None) -> bool:
        """Block until ``parts`` (default: all) are done; False: it failed first. Any thread.

        Raises:
            StepError: it will never be over.
        """
        task, start = self.task, time.perf_counter()
        is_due = not (task.finished or (parts is not None and task.done >= parts))
        ok = task.wait(parts)
        length, waits = time.perf_counter() - start, task.timing.waits
        if is_due and length > SHORTEST_WAIT_S and len(waits) < MOST_WAITS:
            waits.append((start, length))
        return ok

    def follow(self, parts: int | None = None) -> None:
        """What this thread enqueues comes after part number ``parts``; None: after the last."""
        last = len(self.events) if parts is None else parts
        for event in self.events[max(last - 1, 0) : last]:
            self.streams.follow(event)

    def failure(self, name: str, names: Callable[[Sequence[Tensor]], str]) -> StepError:
        """What failed, what is updated, what is lost; ``names`` says which parameters."""
        error, replica = self.task.error, self.replica
        what = f"{type(error).__name__}: {error}"
        if self.is_of_user:
            return StepError(
                f"the function given to submit(), step {self.number}, failed on the optimizer "
                f"thread ({what}). What it had stepped by then stays stepped; its gradients are "
                "gone. The next call works."
            )
        name = f"step {self.number} of {name}"  # skipped ones not counted
        updated = max(self.task.done - self.lead, 0)
        if not replica.splittable and not updated:
            return StepError(
                f"{name} failed on the training thread ({what}). It is stepped whole, as torch "
                f"does it: what it had updated by then of {names(replica.params)}, and of its "
                "state, stays updated. The gradients of this step are gone; the next step works "
                "with new ones."
            )
        end = replica.parts[updated - 1].end if updated else 0
        thread = "training" if self.timing.inline else "optimizer"
        return StepError(
            f"{name} failed on the {thread} thread ({what}). Updated: "
            f"{names(replica.params[:end])}. As before the step: {names(replica.params[end:])}; "
            "optimizer state may have moved for the next of these. The gradients of this step are "
            "gone; the next step works with new ones."
        )

    # The work, on the optimizer thread, or inline.

    @torch.no_grad()
    def _work(
        self,
        owner: object,
        grads: list[Tensor | None],
        sent: list[Any],
        deferred: DeferredUnscale,
        ready: Any,
        late: LateGradients | None,
        fn: Callable[[], object] | None,
        on_edits: Callable[[list[Tensor]], None] | None,
        task: Task,
    ) -> None:
        replica, streams = self.replica, self.streams
        # What the training thread steps itself is in order on its own stream.
        with nullcontext() if task.timing.inline else self._beside(grads, deferred, ready, late):
            try:
                if on_edits is not None and (edited := replica.take_edits()):
                    on_edits(edited)
                replica.forget_loaded()
                shown: ShownError | None = None
                if late is not None:
                    shown = self._publish_late(late)
                    late = None
                else:
                    for part in replica.parts if self.publishes_first else ():
                        self._publish(part)
                        self._done()
                if replica.offload:
                    # Masters are overwritten from here on; what was sent up has to be there.
                    streams.wait_on_host(self.events[-1] if self.events else ready)
                if fn is None:
                    self._update(grads, sent, deferred, shown)
                else:
                    self._run(fn, grads, sent, deferred)
            finally:
                if task.done < task.parts:  # a part has failed, perhaps after its first kernels
                    self.events.append(streams.record())

    @contextmanager
    def _beside(
        self,
        grads: list[Tensor | None],
        deferred: DeferredUnscale,
        ready: Any,
        late: LateGradients | None,
    ) -> Iterator[None]:
        """On the side stream; all memory that is used there stays until it is done."""
        with self.streams.beside(ready):
            self.streams.keep([*grads, *deferred.tensors])
            if late is not None and late.grads is not grads:
                self.streams.keep(late.grads)
            self.replica.keep()
            try:
                yield
            finally:
                self.replica.keep()

    def _publish_late(self, late: LateGradients) -> ShownError | None:
        """What the next forward sees, part by part, before the update itself."""
        assert self.compensation is not None
        ahead, replica = self.compensation.take(), self.replica
        due = torch.stack(late.deferred.factors(replica.params)).tolist()
        factors = [
            1.0 if late.are_unscaled and not (g is not None and goes_to_master(p, g)) else factor
            for p, g, factor in zip(replica.ordered, late.grads, due, strict=True)
        ]
        for part in replica.parts:
            mine = slice(part.start, part.end)
            self.compensation.publish(part, ahead, late.grads[mine], factors[mine], late.newer)
            for event in late.sent[mine]:  # whoever writes to a gradient waits for this part alone
                self.streams.wait(event)
            if late.sent:  # the update has copies, and takes long: the device's memory is free
                late.grads[mine] = [None] * len(part.pairs)
            self._done()
        if not self._measures:
            return None
        reads_model = self.streams.is_host or not replica.offload
        return ShownError(self.compensation, ahead, factors, reads_model)

    def _update(
        self,
        grads: list[Tensor | None],
        sent: list[Any],
        deferred: DeferredUnscale,
        shown: ShownError | None,
    ) -> None:
        replica = self.replica
        buffered = not deferred.clips and replica.fill_buffers(grads, deferred.multiply)
        if buffered:
            self.task.spent.append(grads)
        for part in replica.parts:
            mine = slice(part.start, part.end)
            found = grads[mine]
            if buffered:
                final = found
            else:
                final = self._bring(part, found, sent[mine], deferred)
                grads[mine] = [None] * len(final)
            if shown is not None:
                shown.before_update(part, found)
            del found
            try:
                replica.step_part(part, final, deferred.divide, buffered)
            except BaseException:
                if buffered:
                    replica.count_steps(-1, replica.parts[replica.parts.index(part) :])
                if not replica.splittable:  # what it had updated by then stays updated
                    self._publish(part)
                raise
            if not self.is_stale:
                self._publish(part)
            self._done()
            if shown is not None:
                shown.after_update()
        if shown is not None:
            self.timing.shown_error = shown.read()

    def _run(
        self,
        fn: Callable[[], object],
        grads: list[Tensor | None],
        sent: list[Any],
        deferred: DeferredUnscale,
    ) -> None:
        replica = self.replica
        try:
            for part in replica.parts:
                mine = slice(part.start, part.end)
                final = self._bring(part, grads[mine], sent[mine], deferred)
                for pair, grad in zip(part.pairs, final, strict=True):
                    pair.stepped.grad = grad
            with replica.thread_context.around():
                fn()
        finally:
            for pair in replica.pairs:
                pair.stepped.grad = None
        for part in [] if self.is_stale else replica.parts:
            self._publish(part)
        self._done()

    def _done(self) -> None:
        self.events.append(self.streams.record())
        self.task.advance()

    def _publish(self, part: Part) -> None:
        for pair in part.pairs if self.replica.has_masters else ():
            pair.publish(self.streams)

    def _bring(
        self,
        part: Part,
        grads: list[Tensor | None],
        sent: list[Any],
        deferred: DeferredUnscale,
    ) -> list[Tensor | None]:
        """Gradients as the part is stepped with, float32 for masters; but for what its kernel
        divides by, what is ``deferred`` is done to them."""
        for event in sent:
            self.streams.wait_on_host(event)
        brought, offload = list(grads), self.replica.offload
        scaled: list[tuple[Tensor, Tensor]] = []
        for place, (pair, grad) in enumerate(zip(part.pairs, grads, strict=True)):
            if grad is None:
                continue
            is_rounded = goes_to_master(pair, grad)
            final = brought[place] = grad.float() if is_rounded else grad
            # What was sent to host memory was unscaled before, but for these.
            if is_rounded or not offload:
                scaled.append((pair.param, final))
        if deferred.divide is None:
            deferred.apply(scaled)
        return brought


def wait_for_gradient(
    stepper: weakref.ref[Any], step: InflightStep, part: int
) -> Callable[[], object]:
    """What a gradient that ``step`` reads waits with; it keeps neither the stepper nor the step.

    ``stepper``: while it lives its ``await_part`` waits, and tells of a failure.
    """
    ref, task, events, streams = weakref.ref(step), step.task, step.events, step.streams

    def wait() -> None:
        owner, step = stepper(), ref()
        if owner is not None and step is not None:
            owner.await_part(step, part, "gradient")
            return
        if not task.wait(part):
            raise StepError(
                "a gradient was used that was lost with its step, which failed on the "
                f"optimizer thread ({type(task.error).__name__}: {task.error})."
            ) from task.error
        for event in events[part - 1 : part]:
            streams.follow(event)

    return wait
