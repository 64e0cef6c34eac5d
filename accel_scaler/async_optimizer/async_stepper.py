"""The step of one optimizer, handed to the optimizer thread: when it runs, who waits, how it fails.

``sync``: on the training thread (or awaited, with state in host memory). ``overlap``: part by
part in forward order, each parameter awaited where it is used. ``delayed``: masters are updated
while the model has a preview of that (:mod:`.compensation`); they are published one step late.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, compress
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_module

from ..devices import is_capturing, refuse_capture
from ..errors import OrderError, StepError, UnsupportedError, listed
from ..optimizer_step import Stepper, StepTiming, async_stepper_of, register, unregister
from ..scaling import (
    MAX_NAMES,
    DeferredUnscale,
    ParameterNames,
    local,
    parameters_of,
    reduce_partial_gradients,
)
from .compensation import Compensation, choose_compensation
from .grad_handoff import (
    can_hold_gradients,
    forbid_sparse,
    guard_backward,
    is_shared,
    keep_sent,
    on_host,
    read_in_place,
    send_down,
    unguard,
    unscale_in_place,
)
from .inflight_step import SHORTEST_WAIT_S, InflightStep, LateGradients, wait_for_gradient
from .master_params import ParameterPair, shard_of
from .master_rule import MasterRule
from .pending_parameter import (
    GradientHold,
    any_pending,
    hold_gradients,
    is_held,
    settle_gradients,
    settle_pending,
)
from .replica import Replica, is_empty
from .shared_memory import place_of
from .shared_parameters import enter, find_shared, find_tied, leave, others_of, refuse_sharing
from .streams import SideStreams
from .supported_optimizers import refuse_overlap
from .worker import Task, Worker

logger = logging.getLogger("accel_scaler")

MASTER, PREVIEW, *_ = OWN_KEYS = ("master", "preview", "extrapolated")
"""Keys in a parameter's state entry, where the parameter itself says less: its float32 master; what
the next training forward is to see (``delayed``). The last one is in older files, and ignored."""


class AsyncStepper(Stepper):
    """Steps for ``optimizer``. Every method is the training thread's, except where said.

    Any thread may wait for the step in flight. ``lock`` guards what a wait leaves behind; nobody
    waits under it for a step that another thread has handed over.

    Args:
        mode: ``"sync"``, ``"overlap"`` or ``"delayed"``.
        offload: state and float32 masters in host memory.
        masters: which parameters are stepped through float32 masters.
        device: where the model's parameters are.
        delay_warmup_steps: so many first steps of ``delayed`` are not stale.
        delay_compensation: what ``delayed`` shows of an update before it is published.
        worker: the optimizer thread, perhaps shared with other steppers.
        parameter_names: names parameters in errors.
        guards_backward: no scaled loss tells of a backward, so a hook on each parameter does.
        fences_reads: in ``delayed``, with a watched model, a parameter that is used before the next
            training forward begins is the newest. Else it is what that forward is to see.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        mode: str,
        offload: bool,
        masters: MasterRule,
        device: torch.device,
        delay_warmup_steps: int = 0,
        delay_compensation: str = "none",
        worker: Worker,
        parameter_names: ParameterNames | None = None,
        guards_backward: bool = False,
        fences_reads: bool = False,
    ) -> None:
        if async_stepper_of(optimizer) is not None:
            raise OrderError(
                f"this {type(optimizer).__name__} is stepped by an AsyncOptimizer or an attached "
                "accelerator already; close() or detach() that one first."
            )
        refuse_overlap(optimizer, mode, masters, parameter_names or ParameterNames())
        self.optimizer, self.mode, self.offload, self.worker = optimizer, mode, offload, worker
        self.delay_warmup_steps = delay_warmup_steps
        self.parameter_names = parameter_names or ParameterNames()
        self.streams = SideStreams(device)
        self.replica = Replica(
            optimizer,
            self.streams,
            offload=offload,
            masters=masters,
            inline=mode == "sync" and not offload,
        )
        self.compensation: Compensation | None = None
        """Of ``delayed``, unless there is none."""
        if mode == "delayed" and choose_compensation(delay_compensation, optimizer) == "preview":
            self.compensation = Compensation(self.replica, self.streams)
        if mode != "sync" and not self.replica.splittable:
            logger.warning(
                "%s is stepped on the training thread, so nothing of it is hidden behind forward "
                "and backward: it is not one of torch's, whose steps treat each parameter alone",
                type(optimizer).__name__,
            )
        self.lock = threading.RLock()
        """Reentrant: a signal handler may look while its thread has it."""
        self.steps = 0
        """Updates handed over since the start."""
        self.was_skipped = False
        """The last boundary was one without an update."""
        self.hooks: Any = None
        """What makes others wait who look at the optimizer or its models."""
        self.timing: StepTiming | None = None
        """When the last update handed over ran, and who waited for it."""
        self.unpublished = False
        """Masters are newer than the model, which has what was shown of them (``delayed``)."""
        self.waits_at_root = False
        """A compiled or sharded model: its forward waits, not each use of a parameter."""
        self.waits_at_step = False
        """Something reads parameters that no hook can be put before: the step itself waits."""
        self.shared: frozenset[int] = frozenset()
        """``id`` of parameters that another optimizer steps too: it needs their gradients."""
        self._inflight: InflightStep | None = None
        self._guards_backward, self._fences_reads = guards_backward, fences_reads
        self._learning = False
        """The next step shows the order in which the forward uses parameters."""
        self._versions: list[int] = []
        """With masters: of each parameter when it last was what its master rounds to."""
        self._newer: list[Tensor] = []
        """Parameters of which a newer value waits to be published."""
        self._shown: list[tuple[ParameterPair, Tensor]] = []
        """What a fence has taken from the model, which the next training forward is to see."""
        self.sees_forwards = False
        """A model is watched, so it is known when a training forward begins."""
        self._preparation: Task | None = None
        """What is made for the next boundary."""
        self._saw_forward = False
        """A training forward of a watched model has begun since the last step."""
        self._noted_edits = False
        self._broken: str | None = None
        self._trainer = threading.current_thread()
        """The thread that trains, as far as is known."""
        register(self)
        enter(self)

    def claim(self) -> None:
        """This thread trains from here on: it steps, loads or closes, and is told of failures."""
        self._trainer = threading.current_thread()

    def claim_if_gone(self) -> None:
        """The same in a training forward, where the thread that trained before has ended."""
        if not self._trainer.is_alive():
            with self.lock:  # of several threads, the first
                if not self._trainer.is_alive():
                    self.claim()

    @property
    def is_trained_here(self) -> bool:
        """Whether this thread is the one that trains, or that one is gone."""
        return self._is_trainer or not self._trainer.is_alive()

    @property
    def _is_trainer(self) -> bool:
        # Asked on autograd's threads too, which ``current_thread`` would make Python's for good.
        return self._trainer.ident == threading.get_ident()

    @property
    def keeps_scaled(self) -> bool:
        """Some are float16 or bfloat16 and have masters: their gradients stay scaled."""
        if not self.replica.pairs:
            self.refresh()
        return self.replica.has_rounded or self.replica.rounds_now()

    @property
    def defers_unscale(self) -> bool:
        """One product, here or on the optimizer thread, unscales and clips."""
        return True

    @property
    def unscales(self) -> bool:
        """In ``overlap`` and ``delayed``: beside what comes after."""
        return self.mode != "sync"

    def settle_gradients(self) -> None:
        """Wait until no step reads ``.grad``. Any thread."""
        if self.mode != "sync":
            settle_gradients(self.replica.params)

    def refresh(self) -> None:
        """Take over what was changed from outside: groups, parameters, their values."""
        if self._broken is not None:
            raise StepError(self._broken)
        if any_pending():
            settle_pending(parameters_of(self.optimizer))  # of another optimizer's step
        is_current = self.replica.is_current()
        if not is_current:  # others may step what has come
            find_shared()
            find_tied(self)
            self._finish_others()
        self._finish_preparation()
        # Masters made in an evaluation are stepped outside of it.
        with self.lock, torch.inference_mode(False), self.streams.as_at_home():
            if self._inflight is not None:
                return  # of the thread that trains, which has asked for itself
            before, pairs = self.replica.params, self.replica.pairs
            if not is_current:
                refuse_sharing([(self.optimizer, self.mode, self.replica.masters)])
                refuse_overlap(
                    self.optimizer, self.mode, self.replica.masters, self.parameter_names
                )
                self.replica.follow()
                if self.compensation is not None:
                    self.compensation.follow()
                self._learning = self.mode != "sync" and self.replica.splittable
                self._follow_order(before)
                # The next forward is to see a frozen parameter as it is.
                self._shown = [each for each in self._shown if each[0].is_trained]
                unguard(pairs, kept=self.replica.pairs)
                if self.unpublished:
                    self._keep_newer(pairs)
            if self._versions:
                self._follow_edits()

    def _follow_edits(self) -> None:
        params, pairs = self.replica.params, self.replica.ordered
        edited = [i for i, p in enumerate(params) if p._version != self._versions[i]]
        if edited and self.unpublished:
            names = self._names([params[i] for i in edited])
            self._versions = [p._version for p in params]
            raise OrderError(
                f"{names} changed in place while a newer value was waiting to be published "
                "(step_mode='delayed'). The change is lost, the newer value stays. Call "
                "optimizer.synchronize() before changing parameters."
            )
        for i in edited:
            if self.compensation is not None and not pairs[i].holds_master:
                self._shown = [(pair, value) for pair, value in self._shown if pair is not pairs[i]]
            pairs[i].refresh()

    def step(self, deferred: DeferredUnscale | None = None) -> None:
        """Take the gradients and update, at once or on the optimizer thread.

        Blocks until the step before is finished; does not synchronise with the device.

        Raises:
            StepError: the step before failed, or the optimizer thread is gone.
            UnsupportedError: sparse gradients with offload, or a graph is being captured; nothing
                was taken.
        """
        if self.streams.copies_beside:
            refuse_capture("optimizer.step()")
        self.claim()
        self.was_skipped = False
        self._run_hooks("pre")
        self._finish_for_boundary()
        self.settle_gradients()
        if self.replica.is_sharded:
            reduce_partial_gradients(self.replica.params)
        grads = [p.grad for p in self.replica.params]
        if any(grad is not None for grad in grads):
            with self.lock:
                self._hand_over(grads, deferred or DeferredUnscale(), None)
        self._run_hooks("post")

    def submit(
        self, prepare: Callable[[], Callable[[], object]], deferred: DeferredUnscale | None = None
    ) -> None:
        """Run a function on the optimizer thread, with the gradients as they are now: they are its,
        so ``.grad`` is None then, except where another optimizer steps the parameter too.

        ``prepare`` returns it, once the step before is finished. What is ``deferred`` comes first.
        """
        if self.streams.copies_beside:
            refuse_capture("submit()")
        self.claim()
        self._finish_for_boundary()
        self.settle_gradients()
        find_shared()  # another may have come to need what is taken here
        fn = prepare()
        with self.lock:
            self._hand_over(
                [p.grad for p in self.replica.params], deferred or DeferredUnscale(), fn
            )

    def skip(self) -> None:
        """A boundary without an update; ``delayed`` publishes the one before all the same."""
        self.claim()
        self.was_skipped = True
        if self.mode == "delayed":
            self._shown = []
            self._synchronize(shown=False)

    def _finish_for_boundary(self) -> None:
        self.lift_fence()  # no forward that is seen came between
        self.finish("optimizer.step")
        self._finish_others()
        self.refresh()

    def follow_unseen_edits(self) -> None:
        """While nothing is in flight: as before a step, for whoever reads the masters."""
        with self.lock, torch.inference_mode(False), self.streams.as_at_home():
            if self._inflight is None and not self.unpublished and self.replica.has_masters:
                edited = self.replica.take_edits()
                if edited:
                    self._note_edits(edited)
                    ids = set(map(id, edited))
                    self._shown = [each for each in self._shown if id(each[0].param) not in ids]

    def _note_edits(self, params: list[Tensor]) -> None:
        """Log, once, that masters have followed what was written through ``.data``."""
        if self._noted_edits:
            return
        self._noted_edits = True
        logger.warning(
            "%s changed between two steps where torch counts no version, through .data for "
            "example. The float32 master took the new values over. Of large tensors only a sample "
            "is compared, so an edit of few elements may be missed: write `with torch.no_grad(): "
            "p.copy_(...)` instead of `p.data.copy_(...)`, which is always seen. (Logged once.)",
            self._names(params),
        )

    def _finish_others(self) -> None:
        for other in others_of(self):
            other.finish("optimizer.step")

    def _hand_over(
        self,
        found: Sequence[Tensor | None],
        deferred: DeferredUnscale,
        fn: Callable[[], object] | None,
    ) -> None:
        replica = self.replica
        if replica.has_masters:
            forbid_sparse(replica.ordered, found, self._names)
        replica.prepare(found, submitted=fn is not None)
        inline = fn is None and replica.inline
        was_unpublished, newer, shown = self.unpublished, self._newer, self._shown
        is_stale = self.mode == "delayed" and self.steps >= self.delay_warmup_steps
        compensation = self.compensation if fn is None else None
        if self.steps + 1 < self.delay_warmup_steps:
            compensation = None  # nor is the next one late
        is_late = is_stale and compensation is not None
        if is_late and compensation is not None and not compensation.knows(found):
            is_stale = is_late = False
        if not is_late and self.compensation is not None:
            self.compensation.forget()  # masters may go up through the memory that it lies in
        publishes_first = was_unpublished or is_late
        if deferred.divide is not None and (fn is not None or self.offload):
            # No kernel is given what stands in ``.grad``, which torch leaves unscaled.
            deferred = DeferredUnscale(multiply=1.0 / deferred.divide)
        grads = [None if grad is None else local(grad) for grad in found]
        if fn is not None:
            grads = self._own(grads)
        held: list[Tensor | None] = []
        sent: list[Any] = []
        if self.offload:
            unscale_in_place(replica.ordered, grads, deferred)
            deferred, there = on_host(deferred), grads
            grads, sent = send_down(replica.ordered, there, self.streams)
            if self.mode != "sync" and self.streams.copies_beside and not is_late:
                keep_sent(there, sent, self.streams)
        elif fn is None and self.mode != "sync" and not inline:
            grads, held = read_in_place(replica.ordered, grads, deferred)
            if self._guards_backward:
                guard_backward(replica.ordered)
        late, read_there = None, is_late and self.offload and not self.streams.is_host
        if read_there:  # else the model is where what is stepped is
            held = [
                grad if yes else None
                for grad, yes in zip(there, can_hold_gradients(there), strict=True)
            ]
        if is_late:
            late = LateGradients(
                [None if g is None else g.data for g in there] if read_there else grads,
                deferred,
                are_unscaled=self.offload,
                sent=sent if read_there else (),
                newer=set(map(id, newer)),
            )
        step = InflightStep(
            self,
            replica,
            self.streams,
            grads,
            sent,
            deferred,
            ready=self.streams.record(home=True),
            publishes_first=publishes_first,
            is_stale=is_stale,
            late=late,
            compensation=compensation,
            measures=self.measures_shown,
            fn=fn,
            number=self.steps + 1,
            on_edits=None if was_unpublished or not replica.has_masters else self._note_edits,
        )
        if replica.is_sharded:  # FSDP2 took them on a stream of its own
            self.streams.keep([local(grad) for grad in found if grad is not None], at_home=True)
        try:
            self._inflight = step
            if fn is not None:
                for p in replica.params:
                    if id(p) not in self.shared:
                        p.grad = None
            me, order = weakref.ref(self), step.order
            first = 1 if read_there else step.lead + 1
            for number, part in enumerate(replica.parts, first) if held else ():
                mine = [grad for grad in held[part.start : part.end] if grad is not None]
                wait = wait_for_gradient(me, step, number)
                hold_gradients(mine, GradientHold(wait, order, number))
            # Not what stays as it is: another branch's backward may still need it.
            stepped = [fn is not None or grad is not None for grad in found]
            written = compress(replica.params, stepped if is_late or not is_stale else ())
            torch.autograd.graph.increment_version([*(newer if publishes_first else ()), *written])
            self._newer = list(compress(replica.params, stepped)) if is_stale else []
            if replica.has_masters:
                self._versions = [p._version for p in replica.params]
            self.timing = step.timing
            self.steps += 1
            self._saw_forward = False
            self.unpublished, self._shown = is_stale, []
            self.optimizer.__dict__["_opt_called"] = True  # what an LR scheduler's wrapper sets
            self._launch(step, inline)
            if read_there and sum(g is not None for g in held) < sum(stepped):
                self.await_part(step, step.lead, "optimizer.step")  # others write to it unseen
        except BaseException as error:  # Ctrl-C, or no thread to be had
            if step.task.abandon(error):
                self._lose(step)
                self.unpublished, self._newer, self._shown = was_unpublished, newer, shown
                logger.error(
                    "%s: its update was not handed over (%s): no parameter has moved, its "
                    "gradients are lost. Training goes on with new ones.",
                    type(self.optimizer).__name__,
                    type(error).__name__,
                )
            elif inline:
                if step.task.end(error) or not isinstance(error, Exception):
                    logger.error("%s", step.failure(type(self.optimizer).__name__, self._names))
                self._lose(step)
                replica.return_groups()
            raise

    def _own(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Those that a function is given, for good: what others write to, or need, is copied."""
        return [
            grad.clone() if grad is not None and (is_shared(grad) or id(p) in self.shared) else grad
            for p, grad in zip(self.replica.params, grads, strict=True)
        ]

    def _launch(self, step: InflightStep, inline: bool) -> None:
        task = step.task
        if inline:
            task.timing.inline = True
            task.execute()
            if task.error is not None and not isinstance(task.error, Exception):
                raise task.error  # Ctrl-C and exit() go on as they would from optimizer.step()
            self.finish()
            return
        is_seen = self.mode != "sync" and step.is_seen_by_next_forward
        is_fenced = self._fences_reads and self.unpublished and self.sees_forwards
        if is_fenced and not self.waits_at_step:
            step.hold_parameters(self.await_part, self._learning, self._publish_for_reader)
        elif is_seen and not self.waits_at_step:
            # Behind a root that waits nobody meets a pending parameter, but for a compiled function
            # that calls it: dynamo traces our hooks to nothing.
            step.hold_parameters(self.await_part, self._learning)
        self.worker.submit(task)
        waits = step.hold is not None or (self.waits_at_root and not self.waits_at_step)
        if self.mode == "sync" or (is_seen and not waits):
            # Nobody would see the parameters used.
            if self.unpublished:
                self.await_part(step, step.lead, "optimizer.step")
            else:
                self.finish("optimizer.step")

    def await_part(self, step: InflightStep, part: int, where: str | None = None) -> int:
        """Wait for a part of ``step``; this thread's stream too. Any thread.

        Returns how many parts it need not ask for any more, at least ``part``.

        Raises:
            StepError: the step failed before it.
        """
        if self.streams.copies_beside:
            refuse_capture(where or "a parameter whose update is due")
        if not step.wait(part):
            self._finish(step, "forward")
        step.follow(part)
        if where != "optimizer.step" and not self._is_prepared:  # else settings may still move
            self._prepare()
        # Later parts are enqueued perhaps, but the device has not been told to wait for them.
        return part if self.streams.copies_beside else step.task.done

    def wait(self, where: str) -> bool:
        """Wait until the step in flight, if any, is over. False: it failed, as :meth:`finish` says.

        Raises:
            StepError: it will never be over.
        """
        step = self._inflight
        return True if step is None else self._wait(step, where)

    def _wait(self, step: InflightStep, where: str) -> bool:
        try:
            return step.wait()
        except StepError as error:
            with self.lock:
                if self._inflight is step:
                    self._broken = str(error)
                    self._lose(step)
            raise

    def finish(self, where: str = "synchronize", everywhere: bool = False) -> None:
        """Wait for the step in flight, if any. In ``delayed`` the model is as it was.

        ``everywhere``: for the device as well, and so on whatever stream it is looked at.

        Raises:
            StepError: it failed; says which parameters were updated. Once on the thread that
                trains: the next call works. Other threads are told until that one is.
        """
        step = self._inflight
        if step is not None:
            self._finish(step, where, everywhere)
        self._finish_preparation()

    def _finish_preparation(self) -> None:
        """Wait until nothing is made for the next boundary: it reads masters and state."""
        task = self._preparation
        if task is None:
            return
        start = time.perf_counter()
        try:
            ok = task.wait()
        except StepError:
            self._preparation = None  # its thread is gone, or in another process
            if self.compensation is not None:
                self.compensation.forget()
            raise
        if self._preparation is task:
            self._preparation = None
            if self.timing is not None and self._is_trainer:
                length = time.perf_counter() - start
                if length > SHORTEST_WAIT_S:
                    self.timing.waits.append((start, length))
            if not ok:
                self._drop_preparation()
                raise StepError(
                    f"what the next step of {type(self.optimizer).__name__} is to show of its "
                    f"update failed on the optimizer thread ({type(task.error).__name__}: "
                    f"{task.error}). Nothing has moved; the next call works."
                ) from task.error

    @property
    def _is_prepared(self) -> bool:
        return self.compensation is not None and self.compensation.has_settings

    def _drop_preparation(self) -> None:
        """What was made, or is being made, for the next boundary is not shown."""
        task, self._preparation = self._preparation, None
        if task is not None:
            task.wait()
        if self.compensation is not None:
            self.compensation.forget()

    def _prepare(self) -> None:
        """Make what the next boundary publishes, with the settings as they are now: a scheduler
        has moved them since the step. On the thread that trains; elsewhere nothing."""
        compensation, streams = self.compensation, self.streams
        if (
            compensation is None
            or self.steps < self.delay_warmup_steps
            or not self._is_trainer
            or not self.replica.pairs
            or (streams.copies_beside and is_capturing())
        ):
            return
        settings = compensation.new_settings()
        if settings is None:
            return
        after = streams.record_at_home()

        def prepare(_: Task) -> None:
            with streams.beside(after):
                streams.wait_for_side()  # what is to be overwritten may still be on its way up
                compensation.prepare(settings)

        self._preparation = task = Task(prepare, 0)
        try:
            self.worker.submit(task)
        except BaseException as error:  # Ctrl-C, or no thread to be had
            if task.abandon(error):
                self._preparation = None
                compensation.forget()
            raise

    def _publish_for_reader(self, is_recorded: bool) -> bool:
        """A parameter is used between a step and the next training forward: the newest is there.

        Returns False on another thread than the one that trains: it sees what a forward would.
        """
        if not self.is_trained_here:
            return False
        # What a backward needs the next forward must not overwrite: it sees the newest, too.
        self._synchronize(shown=not is_recorded)
        return True

    def lift_fence(self) -> None:
        """A training forward begins: parameters are what it is to see."""
        step = self._inflight
        if step is not None:
            step.lift_fence(keep=not self.waits_at_root)

    @property
    def has_hidden(self) -> bool:
        """A fence has published newer values than the next training forward is to see."""
        return bool(self._shown)

    def go_on(self) -> None:
        """A training forward begins: it sees what it would have seen without the fences before."""
        self.claim_if_gone()
        self.lift_fence()
        self._saw_forward = True
        if self.streams.copies_beside and is_capturing():
            return  # a graph reads what is there when it is replayed, and nothing may wait here
        if self._shown and not self.hooks.is_called_by_watched():
            with self.lock:  # another thread's forward begins after it, too
                if self._shown and self._is_trainer:
                    self._show_again()
        self._prepare()

    def _show_again(self) -> None:
        self.finish(everywhere=True)
        self.refresh()
        with self.lock, torch.inference_mode(False), torch.no_grad(), self.streams.as_at_home():
            self.streams.wait_for_all()
            if self.unpublished:
                self._publish_masters()  # this was interrupted before
            self.follow_unseen_edits()  # of parameters of which nothing is shown
            mine = {id(pair) for pair in self.replica.pairs}
            shown: list[tuple[ParameterPair, Tensor]] = []
            for pair, value in self._shown:
                if id(pair) in mine and pair.holds_master:
                    shown.append((pair, value))
                elif id(pair) in mine:
                    pair.refresh()  # changed since through ``.data``, which no version counts
            self._shown = shown
            # Before the first of them is written: who is interrupted here may save next.
            self._newer = [pair.param for pair, _ in shown]
            self.unpublished = bool(shown)
            for pair, value in shown:
                pair.target.copy_(value)
            self.streams.wait_on_host(self.streams.record())  # for whatever stream reads it
            torch.autograd.graph.increment_version(self._newer)
            self._versions = [p._version for p in self.replica.params]
            self._shown = []

    def _finish(self, step: InflightStep, where: str, everywhere: bool = False) -> None:
        if self.streams.copies_beside:
            refuse_capture(where)
        ok = self._wait(step, where)
        if everywhere:
            self.streams.follow_last(on_host=True)
        error, name = step.task.error, type(self.optimizer).__name__
        failure: StepError | None = None
        with self.lock:
            if self._inflight is step:
                step.follow()
                failure = None if ok else step.failure(name, self._names)
                self._release(step, learn=ok)
                if ok or self.is_trained_here:
                    self._inflight = None
                    if not ok:
                        self._drop_lost()
                    if not ok and self.unpublished and self.compensation is not None:
                        with torch.inference_mode(False):
                            self._drop_preparation()
                            self.streams.wait_for_all()
                            self._publish_masters()  # nothing shows an update that is lost
                if self.is_trained_here:
                    # Kernels that ran on one thread have made the worker's number the default of
                    # new threads.
                    torch.set_num_threads(torch.get_num_threads())
        if not ok:
            # None: the thread that trains was told while this one waited.
            raise failure or StepError(
                f"{name} failed on the optimizer thread ({type(error).__name__}: {error})."
            ) from error

    def _release(self, step: InflightStep, learn: bool = True) -> None:
        hold, step.hold = step.hold, None
        if hold is None:
            return
        hold.release()
        # Compiled code checks the class of its parameters before any of ours runs.
        if hold.was_traced and not self.waits_at_step:
            self.waits_at_step = True
            logger.info(
                "a compiled function reads parameters of %s: from here on step() waits until they "
                "are updated",
                type(self.optimizer).__name__,
            )
            if self.mode == "delayed" and self.sees_forwards and not self._saw_forward:
                logger.warning(
                    "step_mode='delayed': a compiled forward reads parameters, and none of the "
                    "given model is seen: evaluated through it they are not the newest. Give "
                    "AsyncOptimizer what torch.compile returned, or call synchronize() before."
                )
        if self._learning and learn:
            self._learning = False
            before = self.replica.params
            self.replica.reorder(hold.seen)
            self._follow_order(before)

    def _lose(self, step: InflightStep) -> None:
        """``step`` is given up. Under the lock."""
        self._inflight = None
        self._release(step, learn=False)
        self._drop_lost()

    def _drop_lost(self) -> None:
        """Gradients of a step that failed are gone: ``.grad`` is None."""
        for p in self.replica.params:
            if is_held(p.grad):
                p.grad = None

    def forgive(self) -> None:
        """State is about to be replaced: a lost step no longer matters."""
        self.claim()
        if self._broken is not None:
            self._broken = None
            self._drop_lost()

    def _follow_order(self, before: Sequence[Tensor]) -> None:
        """With masters: each parameter's last known version, where it stands in the parts now."""
        known = dict(zip(map(id, before), self._versions, strict=False))
        if self.replica.has_masters:
            self._versions = [known.get(id(p), p._version) for p in self.replica.params]
        else:
            self._versions = []

    def settle_parts(self, params: Iterable[Tensor]) -> None:
        """Wait for parameters that cannot be held (shards), part by part."""
        step, wanted = self._inflight, {id(p) for p in params}
        if step is None or not step.is_seen_by_next_forward:
            return
        last = 0
        for number, part in enumerate(self.replica.parts, 1):
            if any(id(pair.param) in wanted for pair in part.pairs):
                last = number
        if last:
            last += 0 if step.is_stale else step.lead
            self.await_part(step, min(last, step.task.parts), "forward")

    def finish_model(self) -> None:
        """Wait until the model is what the next forward shall see, all of it."""
        step = self._inflight
        if step is None:
            self.streams.follow_last()  # who waited for it may have been on another stream
        elif not step.is_stale:
            self.finish("forward")
        elif step.publishes_first:
            self.await_part(step, step.lead, "forward")
            if step.hold is not None:
                step.hold.release()

    def synchronize(self) -> None:
        """Finish the step in hand and publish it, so that the model and the state are the newest.

        Blocks until the device has done the update, so that it is seen on every stream.

        Raises:
            StepError: see :meth:`finish`.
            OrderError: in ``delayed`` another thread trains, beneath which the model would change.
        """
        self._synchronize(shown=True)

    def _synchronize(self, shown: bool) -> None:
        self.finish(everywhere=True)
        self.streams.follow_last(on_host=True)  # what was finished on one stream alone
        self._publish_newest(shown)

    @contextmanager
    def still(self) -> Iterator[None]:
        """:meth:`synchronize`, and no step of another thread begins until the end: it would add to
        dictionaries that are being read."""
        while True:
            self.synchronize()
            with self.lock:
                if self._inflight is None and not self.unpublished:
                    yield
                    return

    def _publish_newest(self, shown: bool) -> None:
        """``shown``: the next training forward is to see what the model has now."""
        with self.lock, torch.inference_mode(False):
            if self.unpublished and not self.is_trained_here:  # the other may just have gone on
                raise OrderError(
                    "step_mode='delayed': a newer value waits to be published, and this thread "
                    f"({threading.current_thread().name}) is not the one that trains "
                    f"({self._trainer.name}): its forward and backward would see two values. Call "
                    "optimizer.synchronize() on the thread that trains, then read here; or use "
                    "step_mode='overlap'."
                )
            if self.compensation is not None and self._inflight is None:
                self.compensation.forget()  # who looks may edit, too
            if self.unpublished and self._inflight is None:
                # Readers on other streams are in order before the next step, which this is not.
                self.streams.wait_for_all()
                self._follow_edits()
                is_known = bool(self._shown)  # by a fence that was interrupted
                if shown and not is_known and self.compensation is not None and self.sees_forwards:
                    newer = set(map(id, self._newer))
                    mine = (pair for pair in self.replica.pairs if id(pair.param) in newer)
                    pairs = [pair for pair in mine if pair.is_master and pair.is_trained]
                    self._shown = [(pair, pair.target.to("cpu", copy=True)) for pair in pairs]
                self._publish_masters()

    def _publish_masters(self) -> None:
        with torch.no_grad():
            for pair in self.replica.pairs:
                pair.publish(self.streams)
        self.streams.wait_on_host(self.streams.record())
        self.unpublished = False
        torch.autograd.graph.increment_version(self._newer)
        self._newer = []
        self._versions = [p._version for p in self.replica.params]

    def synchronize_memory(self, tensors: Iterable[Tensor]) -> None:
        """:meth:`synchronize`, where any of ``tensors`` shares a parameter's memory."""
        if self._inflight is None and not self.unpublished:
            return
        held = [local(t) for t in tensors]
        asked = {t.untyped_storage().data_ptr() for t in held if t.layout is torch.strided}
        mine = (pair.target.untyped_storage().data_ptr() for pair in self.replica.pairs)
        if not asked.isdisjoint(mine):
            self.synchronize()

    def begin_loading(self, state_dict: dict[str, Any]) -> None:
        """Before the optimizer loads ``state_dict``: a lost step no longer matters, and there is a
        master wherever one was saved."""
        self.forgive()
        self.synchronize()
        keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        # Not strict: torch refuses a state dict of another number of parameters.
        params = zip(keys, parameters_of(self.optimizer), strict=False)
        entries = state_dict["state"]
        self.replica.expect_masters(p for key, p in params if MASTER in _entry_of(entries, key))
        self.refresh()

    def load(self, state_dict: dict[str, Any], itself: bool = False) -> None:
        """After the optimizer has loaded ``state_dict``: where masters are, their state too, which
        it loads ``itself`` where it does so in a way of its own.

        An entry ``master`` holds where it rounds to the model's present parameter; what was shown
        of an update, where the model has the master then.
        """
        replica, shown = self.replica, None
        with torch.inference_mode(False), self.streams.as_at_home():
            if replica.masters.every or self.keeps_scaled:
                if not replica.is_current():
                    self.refresh()
                entries = {k: v for k, v in state_dict["state"].items() if isinstance(v, dict)}
                own = {k: {n: v.get(n) for n in OWN_KEYS} for k, v in entries.items()}
                rest = {
                    **state_dict["state"],
                    **{k: without_own(v) for k, v in entries.items()},
                }
                load = replica.load_itself if itself else replica.load_state
                saved = load({**state_dict, "state": rest}, {k: v[MASTER] for k, v in own.items()})
                shown = [own.get(index, {}) for index in saved]
        counts = [
            entry["step"]
            for entry in state_dict["state"].values()
            if isinstance(entry, dict) and "step" in entry
        ]
        if counts:  # a warm-up goes on where it was
            self.steps = int(max(map(float, counts)))
        self.refresh()
        if shown is not None:  # of a model that may be loaded after this
            self.import_shown(shown)

    def close(self) -> None:
        """Synchronise, give the optimizer back, remove what was put on parameters."""
        self.claim()
        try:
            self._synchronize(shown=False)
            self.settle_gradients()
        finally:
            if self._inflight is not None:
                self._release(self._inflight)
            unguard(self.replica.pairs)
            unregister(self.optimizer)
            leave(self)
            self.replica.return_groups()
            state = self.optimizer.state
            for p in [p for p, entry in state.items() if isinstance(p, Tensor) and is_empty(entry)]:
                del state[p]
            self._inflight = None

    def give_way(self) -> None:
        """Another optimizer owns the parameters from now on: whoever steps this one closes it."""
        if self.hooks is None:  # interrupted while it was made
            self.close()
        else:
            self.hooks.give_way()

    def release(self) -> None:
        """Once it is closed: keep no master and no copy of a parameter."""
        self.replica.let_go()
        self.compensation, self._newer, self._shown, self._versions = None, [], [], []

    def _run_hooks(self, when: str) -> None:
        """The optimizer's own and the global step hooks, on the training thread, as torch does.

        Raises:
            UnsupportedError: one of them changes the arguments of a step that has none.
        """
        everywhere = getattr(optimizer_module, f"_global_optimizer_{when}_hooks", {}).values()
        own = getattr(self.optimizer, f"_optimizer_step_{when}_hooks", {}).values()
        arguments: Any = (self.optimizer,), {}
        for hook in [*everywhere, *own] if when == "pre" else [*own, *everywhere]:
            result = hook(self.optimizer, *arguments)
            if when == "pre" and result is not None and result != arguments:
                raise UnsupportedError(
                    f"a step pre-hook of {type(self.optimizer).__name__} returned {result!r}, new "
                    "arguments for step(), which is called without any here. Return None."
                )

    def _keep_newer(self, before: Iterable[ParameterPair]) -> None:
        """Publish masters that a change from outside has ended, where the model still is.

        Raises:
            OrderError: it is elsewhere, or of another size.
        """
        now, moved = {id(pair.param): pair for pair in self.replica.pairs}, []
        for pair in before:
            if pair.is_master and now.get(id(pair.param)) is not pair:
                held = local(pair.param.detach())
                if place_of(held) == place_of(pair.target):
                    pair.publish(self.streams)
                else:
                    moved.append(pair.param)
        if moved:
            raise OrderError(
                f"{self._names(moved)} moved or changed shape while a newer value was waiting to "
                "be published (step_mode='delayed'). The newer value is lost, the change stays. "
                "Call optimizer.synchronize() before changing parameters."
            )

    def export_shown(self) -> list[dict[str, Tensor]]:
        """For each parameter, in the optimizer's order, what the model is to be given that its
        master does not say; call it when idle. Entries of a state dict."""
        shown = {id(pair): value for pair, value in self._shown}
        found: list[dict[str, Tensor]] = []
        for pair in self.replica.pairs:
            value = shown.get(id(pair))
            found.append({} if value is None else {PREVIEW: value.to(pair.stepped.device)})
        return found

    def import_shown(self, entries: Iterable[dict[str, Any]]) -> None:
        """What :meth:`export_shown` of an optimizer like this one gave; of another one nothing."""
        self._shown = []
        if self.compensation is None or not self.sees_forwards:
            return
        for pair, entry in zip(self.replica.pairs, entries, strict=True):
            shown = entry.get(PREVIEW)
            if shown is not None and pair.is_master:
                mine = shard_of(shown, pair.param).to("cpu", pair.target.dtype, copy=True)
                self._shown.append((pair, mine))

    def _names(self, params: Sequence[Tensor]) -> str:
        names = self.parameter_names.of(params[:MAX_NAMES], self.optimizer)
        return listed(names, len(params)) or "none"


def _entry_of(entries: dict[Any, Any], key: Any) -> dict[str, Any]:
    """One parameter's saved state; {}: there is none, or not as a dict."""
    entry = entries.get(key)
    return entry if isinstance(entry, dict) else {}


def without_own(entry: dict[str, Any]) -> dict[str, Any]:
    """A parameter's state without what only this package has in it."""
    return {key: value for key, value in entry.items() if key not in OWN_KEYS}


def holds_masters(state_dict: dict[str, Any]) -> bool:
    """Whether a state dict has float32 masters in it."""
    entries = state_dict.get("state", {})
    return any(MASTER in _entry_of(entries, key) for key in entries)


def without_shown(state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict saved in ``delayed``, for an optimizer that is not stepped so."""
    state = state_dict.get("state", {})
    if not any(
        isinstance(v, dict) and not v.keys().isdisjoint(OWN_KEYS[1:]) for v in state.values()
    ):
        return state_dict
    kept = {k: without_own(v) if isinstance(v, dict) else v for k, v in state.items()}
    return {**state_dict, "state": kept}
