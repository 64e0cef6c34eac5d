"""The step of one optimizer, handed to the optimizer thread: when it runs, who waits, how it fails.

``sync``: on the training thread (or awaited, with state in host memory). ``overlap``: part by part
in the model's order, each parameter awaited where it is used. ``delayed``: masters are updated, and
published one step late (:mod:`.delayed`). ``auto``: each step as in ``sync`` or as in ``overlap``.

Note [Steps on a device]
------------------------
A device runs the kernels of an ``overlap`` step beside those of the forward by itself, on the side
stream. So ``step()`` enqueues them, as it does in ``sync``: on the optimizer thread the same calls
would compete with the forward's for the interpreter's lock (H200, 48 tensors: 5 ms a window, where
AdamW takes 1 ms). The thread is for what the host does (a CPU's steps, ``offload``), for functions
given to ``submit()``, and for ``delayed``, which waits for the device in the middle of a step.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_module

from ..config import ScalerConfig
from ..devices import is_capturing
from ..errors import OrderError, StepError, UnsupportedError, listed
from ..optimizer_step import (
    InlineStepper,
    ModeChoice,
    Stepper,
    StepTiming,
    async_stepper_of,
    register,
    rule_of,
    unregister,
)
from ..scaling import (
    MAX_NAMES,
    DeferredUnscale,
    ParameterNames,
    is_rank_0,
    local,
    of_rank_0,
    parameters_of,
    reduce_partial_gradients,
)
from .delayed import DelayedUpdates, entry_of, without_master
from .grad_handoff import (
    forbid_sparse,
    guard_backward,
    is_shared,
    keep_sent,
    on_host,
    read_in_place,
    readable_in_place,
    send_down,
    unguard,
    unscaled_in_place,
)
from .inflight_step import MIN_WAIT_S, InflightStep, Update, WaitAt, gradient_wait
from .master_params import MASTER, MasterRule
from .pending_parameter import (
    GradientHold,
    hold_gradients,
    is_held,
    wait_for_gradients,
    wait_for_parameters,
)
from .preview import Previews
from .replica import Replica, is_empty
from .shared_memory import place_of
from .shared_parameters import enter, leave, refuse_sharing
from .streams import SideStreams
from .supported_optimizers import refuse_overlap
from .worker import Worker

logger = logging.getLogger("accel_scaler")

clock = time.perf_counter
"""What ``auto`` measures by."""

_version_of = attrgetter("_version")


class Stage(Enum):
    """Where a stepper stands between two steps."""

    IDLE = auto()
    """Model, masters and state are the newest."""
    RUNNING = auto()
    """A step is in flight."""
    COMPUTED = auto()
    """The step is done, and masters are newer than the model (``delayed``)."""
    PUBLISHING = auto()
    """Values are written outside of a step; after an interrupt a fence does it again."""
    CLOSED = auto()
    """The optimizer is torch's again."""


class AsyncStepper(Stepper):
    """Steps ``optimizer``. Methods are for the training thread, except where documented.

    Any thread may wait for the step in flight. ``lock`` guards what a wait leaves behind; no thread
    waits under it for a step that another one has handed over.

    Args:
        config: ``step_mode``, ``offload``, ``master_weights`` and the fields of ``delayed`` count.
        device: where the model's parameters are.
        worker: the optimizer thread, perhaps shared with other steppers.
        parameter_names: names parameters in errors.
        guards_backward: put a hook on each parameter, so that a backward waits before it adds to a
            gradient that is still read; needed where no ``scale()`` announces the backward.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        config: ScalerConfig,
        *,
        device: torch.device,
        worker: Worker,
        parameter_names: ParameterNames | None = None,
        guards_backward: bool = False,
    ) -> None:
        if async_stepper_of(optimizer) is not None:
            raise OrderError(
                f"this {type(optimizer).__name__} is stepped by an AsyncOptimizer or an attached "
                "accelerator already; close() or detach() that one first."
            )
        masters, mode, offload = MasterRule.of(config), config.step_mode, config.offload == "cpu"
        self.optimizer, self.mode, self.worker = optimizer, mode, worker
        self.parameter_names = parameter_names or ParameterNames()
        refuse_overlap(optimizer, masters, self.parameter_names)
        self.choice = ModeChoice() if mode == "auto" else None
        self._chosen_by: tuple[float, float] | None = None
        """Times of a choice that no record has yet."""
        self.is_beside = mode not in ("sync", "auto")
        """Whether the update of the present window runs beside what comes after ``step()``."""
        self.reads_beside = mode != "sync"
        self.group: Any = None
        """The process group of the ranks that step together under DDP."""
        self.ddp_models: weakref.WeakSet[Any] = weakref.WeakSet()
        self.streams = SideStreams(device)
        self.replica = Replica(
            optimizer,
            self.streams,
            offload=offload,
            masters=masters,
            inline=mode == "sync" and not offload,
            stages=mode == "delayed",
        )
        self._inline = InlineStepper(optimizer, self.replica)
        has_kernel = rule_of(optimizer) is not None
        if offload and has_kernel and not all(g.get("fused") for g in optimizer.param_groups):
            logger.warning(
                "offload='cpu': %s without fused=True takes about five times as long on a CPU. "
                "Make it with fused=True (of the Trainer: optim='adamw_torch_fused').",
                type(optimizer).__name__,
            )
        self.delayed: DelayedUpdates | None = None
        if mode == "delayed":
            self.delayed = DelayedUpdates(
                self.replica, worker, config.delay_compensation, config.delay_warmup_steps
            )
        self.lock = threading.RLock()
        """Reentrant: a signal handler may look while its thread has it."""
        self.steps = 0
        """Updates handed over; after a load, counted on from the loaded state."""
        self.was_skipped = False
        """The last boundary was one without an update."""
        self.hooks: Any = None
        self.timing: StepTiming | None = None
        self.wait_at = WaitAt.USE
        self.sees_forwards = False
        """A model is watched, so it is known when a training forward begins."""
        self.stage = Stage.IDLE
        self._inflight: InflightStep | None = None
        """The step in flight; None in every stage but ``RUNNING``."""
        self._guards_backward = guards_backward
        self._versions: list[int] = []
        """With masters: the version of each parameter, in the optimizer's order, when it last was
        what its master rounds to."""
        self._logged_edits = False
        self._lost: str | None = None
        self._trainer = threading.current_thread()
        """The thread that trains, as far as is known."""
        register(self)
        enter(self)

    # Where it stands, and whose calls these are.

    @property
    def has_newer(self) -> bool:
        """Masters are newer than the model, now or once the step in flight is done."""
        return self.delayed is not None and bool(self.delayed.newer)

    @property
    def is_published(self) -> bool:
        """The model has the newest values."""
        return self.stage in (Stage.IDLE, Stage.CLOSED)

    def claim(self) -> None:
        """This thread trains from here on: failures are raised in it."""
        self._trainer = threading.current_thread()

    @property
    def is_trained_here(self) -> bool:
        """Whether this thread is the one that trains, or that one has ended."""
        # Asked on autograd's threads too, which ``current_thread`` would make Python's for good.
        return self._trainer.ident == threading.get_ident() or not self._trainer.is_alive()

    # What the boundary asks.

    @property
    def keeps_scaled(self) -> bool:
        """Some parameters are float16 or bfloat16 with masters: their gradients stay scaled."""
        if not self.replica.pairs:
            self.refresh()
        return self.replica.has_rounded or self.replica.rounds_now()

    @property
    def defers_unscale(self) -> bool:
        return self.choice is None or self.is_beside

    @property
    def unscales(self) -> bool:
        return self.is_beside

    def wait_for_gradients(self) -> None:
        """Wait until no step reads ``.grad``. Any thread."""
        if self.reads_beside:
            wait_for_gradients(self.replica.params)

    # Following what was changed from outside.

    def refresh(self) -> None:
        """Follow changes from outside: groups, parameters, their values."""
        self._wait_for_those_of_others()
        is_current = self.replica.is_current()
        self._finish_preparation()
        # Masters made in an evaluation are stepped outside of it.
        with self.lock, torch.inference_mode(False), self.streams.as_at_home():
            if self.stage is Stage.RUNNING:
                return  # of the thread that trains, which has refreshed for itself
            self._follow_edits()
            if not is_current:
                self._follow_parameters()

    def _wait_for_those_of_others(self) -> None:
        if self._lost is not None:
            raise StepError(self._lost)
        wait_for_parameters(parameters_of(self.optimizer))

    def _follow_parameters(self) -> None:
        replica = self.replica
        refuse_sharing([(self.optimizer, self.mode, replica.masters)])
        refuse_overlap(self.optimizer, replica.masters, self.parameter_names)
        moved: list[Tensor] = []
        if self.delayed is not None and self.has_newer:
            places = {id(p): place_of(local(p.detach())) for p in self.delayed.newer}
            pairs = [pair for pair in replica.pairs if id(pair.param) in places]
            moved = [p.param for p in pairs if places[id(p.param)] != place_of(p.target)]
            self._publish(self.delayed)
        before = replica.pairs
        # Without masters there are none yet.
        known = dict(zip(map(id, replica.known), self._versions, strict=False))
        replica.follow()
        unguard(before, kept=replica.pairs)
        if self.delayed is not None:
            self.delayed.follow()
        self._note_versions()
        if self._versions:
            self._versions = [
                known.get(id(p), version)
                for p, version in zip(replica.known, self._versions, strict=True)
            ]
        if moved:
            raise OrderError(
                f"{self._names(moved)} moved or changed shape while a newer value was waiting to "
                "be published (step_mode='delayed'), which is lost; the change stays. Call "
                "optimizer.synchronize() before changing parameters."
            )

    def _note_versions(self) -> None:
        params = self.replica.known if self.replica.has_masters else ()
        self._versions = list(map(_version_of, params))

    def _follow_edits(self) -> None:
        known = self._versions
        self._note_versions()
        edited = [
            pair
            for pair, now, version in zip(
                self.replica.pairs if known != self._versions else (),
                self._versions,
                known,
                strict=False,
            )
            if now != version
        ]
        if edited and self.has_newer:
            raise OrderError(
                f"{self._names([pair.param for pair in edited])} changed in place while a newer "
                "value was waiting to be published (step_mode='delayed'), which stays; the change "
                "is lost. Call optimizer.synchronize() before changing parameters."
            )
        for pair in edited:
            pair.refresh()
        if edited and self.delayed is not None and self.delayed.previews is not None:
            self.delayed.previews.forget()

    def order_by(self, model: Module) -> None:
        """Update in the order in which ``model`` defines its parameters: about a forward's."""
        self.finish()
        with self.lock:
            self.replica.order_by(Module.parameters(model))

    def follow_unseen_edits(self) -> None:
        """Copy edits made through ``.data`` to the masters, as a step does, before these are read.
        Does nothing while the masters are newer than the model."""
        with self.lock, torch.inference_mode(False), self.streams.as_at_home():
            if not (self.is_published and self.replica.has_masters):
                return
            edited = self.replica.take_edits()
            if edited:
                self._log_edits(edited)

    def _log_edits(self, params: list[Tensor]) -> None:
        if self._logged_edits:
            return
        self._logged_edits = True
        logger.warning(
            "%s changed where torch counts no version (.data). The float32 master has taken the "
            "new values, but of large tensors only a sample is compared: write `with "
            "torch.no_grad(): p.copy_(...)`, which is always seen. (Logged once.)",
            self._names(params),
        )

    # The boundary.

    def step(self, deferred: DeferredUnscale | None = None) -> None:
        """Take the gradients and update, at once, on the optimizer thread or on a side stream.

        Blocks until the step before is finished. Synchronises with the device for ``offload``,
        where ranks agree on ``auto``, and for masters on the device, which are compared with the
        model (after a check it has just been waited for). An error of the step before, or a
        refusal, comes before anything is taken; one of an update inside this call comes after it.
        """
        self.claim()
        self.was_skipped = False
        with self._choosing():
            self._step(deferred or DeferredUnscale())

    def step_idle(self) -> None:
        if self._hooks("pre") or self._hooks("post"):
            self.claim()
            self._step(DeferredUnscale(), is_idle=True)

    def _step(self, deferred: DeferredUnscale, is_idle: bool = False) -> None:
        if self.is_as_stock:
            self._finish_for_boundary(follows=False)
            self._inline.step(deferred)
            self.timing = self._inline.timing
            self.steps += 1
            return
        self._run_hooks("pre")
        self._finish_for_boundary()
        if self.replica.is_sharded:
            reduce_partial_gradients(self.replica.params)
        grads = [p.grad for p in self.replica.params]
        if any(grad is not None for grad in grads):
            with self.lock:
                self._hand_over(grads, deferred, None)
        elif self.delayed is not None and not is_idle:  # here the update before is due
            self.synchronize()
        self._run_hooks("post")

    def submit(
        self, prepare: Callable[[], Callable[[], object]], deferred: DeferredUnscale | None = None
    ) -> None:
        """Run a function on the optimizer thread with the gradients as they are now. It owns them:
        ``.grad`` is None then. ``prepare`` is called once the step before is finished, and returns
        the function. What is ``deferred`` is done first.
        """
        self.claim()
        with self._choosing():
            self._finish_for_boundary()
            fn = prepare()
            with self.lock:
                grads = [p.grad for p in self.replica.params]
                self._hand_over(grads, deferred or DeferredUnscale(), fn)

    def skip(self) -> None:
        """A boundary without an update; ``delayed`` publishes the one before all the same."""
        self.claim()
        self.was_skipped = True
        with self._choosing(stepped=False):
            if self.delayed is not None:
                self.synchronize()

    @property
    def is_as_stock(self) -> bool:
        """``auto`` now steps inside ``step()``, and ``sync`` would leave such a step to torch."""
        replica = self.replica
        is_inside = self.choice is not None and not (self.is_beside or replica.offload)
        return is_inside and not (self.keeps_scaled or replica.is_sharded)

    @contextmanager
    def _choosing(self, stepped: bool = True) -> Iterator[None]:
        """Around a boundary: in ``auto`` note it, and choose for the window that follows."""
        choice, timing = self.choice, self.timing
        if choice is None:
            yield
            return
        # A rank that is out of inputs steps no more: it could not agree. Stays set after ``Join``.
        is_joined = any(model._join_config.enable for model in self.ddp_models)
        mode = self.shown_mode
        is_decided = not is_joined and choice.note(clock(), stepped, self._agree)
        yield
        if is_decided:
            self._chosen_by = choice.means
        if self.timing is not None and self.timing is not timing:
            self.timing.step_mode = mode
            self.timing.mode_seconds, self._chosen_by = self._chosen_by, None
        # Not within a window, nor after an error: what is deferred was left to this mode's step.
        self.is_beside = choice.is_beside and not is_joined
        self.reads_beside |= self.is_beside
        if is_decided and choice.means is not None and is_rank_0(self.group):
            sync, overlap = choice.means
            logger.warning(  # what Python shows by default: who asks for ``auto`` wants to know
                "step_mode='auto': %s goes on in %r. A window takes %.4g ms in 'sync', %.4g ms in "
                "'overlap' (%+.1f %%).",
                type(self.optimizer).__name__,
                self.shown_mode,
                sync * 1e3,
                overlap * 1e3,
                100 * (overlap / sync - 1) if sync else 0.0,
            )

    @property
    def shown_mode(self) -> str:
        """The mode of the present window, where it is chosen."""
        return "overlap" if self.is_beside else "sync"

    @property
    def _enqueues(self) -> bool:
        """An update beside the training is enqueued by ``step()``. See Note [Steps on a device]."""
        return self.delayed is None and self.streams.copies_beside and not self.replica.offload

    def _agree(self, answer: int) -> int:
        is_common = self.group is not None or self.replica.is_sharded
        return of_rank_0(answer, self.streams.device, self.group) if is_common else answer

    def _finish_for_boundary(self, follows: bool = True) -> None:
        if self.stage is Stage.CLOSED:
            raise OrderError(
                f"a step of {type(self.optimizer).__name__} came after its stepper was closed. "
                "Make another AsyncOptimizer, or prepare the optimizer again."
            )
        if self.streams.copies_beside and is_capturing():
            raise UnsupportedError(
                "optimizer.step(): a graph is being captured on this stream, and cannot hold a "
                "step that runs beside it. Call optimizer.synchronize() before the capture, "
                "capture forward and backward, and step outside of it."
            )
        self.lift_fence()  # no forward that is seen came between
        self.finish()
        if follows:
            self.refresh()
        else:  # over thousands of tensors that takes a while
            self._wait_for_those_of_others()
        self.wait_for_gradients()
        self.reads_beside = self.is_beside

    def _hooks(self, when: str) -> list[Callable[..., Any]]:
        """The optimizer's own step hooks and the global ones, in torch's order."""
        everywhere = getattr(optimizer_module, f"_global_optimizer_{when}_hooks", {}).values()
        own = getattr(self.optimizer, f"_optimizer_step_{when}_hooks", {}).values()
        return [*everywhere, *own] if when == "pre" else [*own, *everywhere]

    def _run_hooks(self, when: str) -> None:
        """Call the step hooks on the training thread, as torch does."""
        arguments: Any = (self.optimizer,), {}
        hooks = self._hooks(when)
        if hooks:
            self.finish()  # they see the state after the update, the last or the present one
        for hook in hooks:
            result = hook(self.optimizer, *arguments)
            if when == "pre" and result is not None and result != arguments:
                raise UnsupportedError(
                    f"a step pre-hook of {type(self.optimizer).__name__} returned other arguments, "
                    "expected None: step() is called without arguments here. Change the gradients "
                    "in the hook instead."
                )

    # The hand-over.

    def _hand_over(
        self,
        found: Sequence[Tensor | None],
        deferred: DeferredUnscale,
        fn: Callable[[], object] | None,
    ) -> None:
        replica, delayed = self.replica, self.delayed
        if replica.has_masters:
            forbid_sparse(replica.ordered, found, self._names)
        replica.prepare(found)
        is_stale, previews = self._choose_delay(found, fn)
        is_beside = self.is_beside or replica.offload or fn is not None
        # See Note [Steps on a device].
        here = not is_beside or (fn is None and self._enqueues)
        update, held = self._take_gradients(found, deferred, fn, previews)
        step = InflightStep(
            self,
            replica,
            update,
            publishes_first=self.has_newer or previews is not None,
            is_stale=is_stale,
            is_beside=is_beside,
            number=self.steps + 1,
        )
        if replica.is_sharded:  # FSDP2 took them on a stream of its own
            self.streams.keep([local(grad) for grad in found if grad is not None], at_home=True)
        before = [] if delayed is None else delayed.newer
        # Not what stays as it is: another branch's backward may still need it.
        stepped = [
            p
            for p, grad in zip(replica.params, found, strict=True)
            if fn is not None or grad is not None
        ]
        reads_device = update.on_device is not None
        try:
            self.stage, self._inflight = Stage.RUNNING, step
            if fn is not None:
                for p in replica.params:
                    p.grad = None
            self._hold_gradients(step, held, 1 if reads_device else step.lead + 1)
            written = stepped if previews is not None or not is_stale else []
            torch.autograd.graph.increment_version([*(before if step.lead else ()), *written])
            if delayed is not None:
                delayed.newer = stepped if is_stale else []
            self._note_versions()
            self.timing = step.timing
            self.steps += 1
            self.optimizer.__dict__["_opt_called"] = True  # what an LR scheduler's wrapper sets
            self._launch(step, here)
            if reads_device and sum(grad is not None for grad in held) < len(stepped):
                self._await_part(step, step.lead)  # others write to it unseen
        except BaseException as error:  # Ctrl-C, or no thread to be had
            if step.task.abandon(error):
                if delayed is not None:
                    delayed.newer = before
                self._note_versions()
                self._lose(step)
                logger.error(
                    "%s: its update was not handed over (%s): no parameter has moved, its "
                    "gradients are lost. Training goes on with new ones.",
                    type(self.optimizer).__name__,
                    type(error).__name__,
                )
            elif here:
                step.follow()
                if not step.is_enqueued:
                    if step.task.end(error) or not isinstance(error, Exception):
                        logger.error("%s", step.failure(type(self.optimizer).__name__, self._names))
                    self._lose(step)
            raise

    def _choose_delay(
        self, found: Sequence[Tensor | None], fn: Callable[[], object] | None
    ) -> tuple[bool, Previews | None]:
        """Whether the update is published a boundary late, and what previews it until then."""
        delayed = self.delayed
        if delayed is None:
            return False, None
        is_stale = delayed.is_stale(self.steps)
        previews = delayed.previews if is_stale and fn is None else None
        if previews is not None and not previews.covers(found):
            is_stale, previews = False, None
        if previews is None and delayed.previews is not None:
            delayed.previews.forget()  # masters may go up through the memory of what is prepared
        return is_stale, previews

    def _take_gradients(
        self,
        found: Sequence[Tensor | None],
        deferred: DeferredUnscale,
        fn: Callable[[], object] | None,
        previews: Previews | None,
    ) -> tuple[Update, Sequence[Tensor | None]]:
        """What the update gets, and the gradients that it reads where they are."""
        replica, streams = self.replica, self.streams
        if deferred.divide is not None and (fn is not None or replica.sends):
            # No kernel is given what stands in ``.grad``, which torch leaves unscaled.
            deferred = DeferredUnscale(multiply=1.0 / deferred.divide)
        grads = list(found)
        if replica.is_sharded:
            grads = [None if grad is None else local(grad) for grad in found]
        held: Sequence[Tensor | None] = []
        sent: list[Any] = []
        on_device: list[Tensor | None] | None = None
        if fn is not None:
            grads = [g.clone() if g is not None and is_shared(g) else g for g in grads]  # for good
        if replica.sends:
            deferred.apply(unscaled_in_place(replica.ordered, grads))
            deferred, there = on_host(deferred), grads
            grads, sent = send_down(replica.ordered, there, streams)
            if previews is not None:
                held = readable_in_place(there)
                on_device = [None if grad is None else grad.data for grad in there]
            elif self.is_beside and streams.copies_beside and previews is None:
                keep_sent(there, sent, streams)
        elif fn is None and self.is_beside:
            grads, held = read_in_place(replica.ordered, grads, deferred)
        if self._guards_backward and self.is_beside and (held or any(sent)):
            guard_backward(replica.ordered)
        # While the model has previews, edits are not distinguished from them.
        looks = replica.has_masters and not self.has_newer
        update = Update(
            grads,
            deferred,
            sent,
            streams.record(home=True),
            previews,
            on_device,
            set(map(id, self.delayed.newer)) if self.delayed is not None else set(),
            fn=fn,
            on_edits=self._log_edits if looks else None,
        )
        return update, held

    def _hold_gradients(
        self, step: InflightStep, held: Sequence[Tensor | None], first: int
    ) -> None:
        """Make each use of ``held`` wait until its part is done; the first is number ``first``."""
        ref, order = weakref.ref(self), step.order
        for number, part in enumerate(self.replica.parts if held else (), first):
            mine = [grad for grad in held[part.start : part.end] if grad is not None]
            wait = gradient_wait(ref, step, number)
            hold_gradients(mine, GradientHold(wait, order, number))

    def _launch(self, step: InflightStep, here: bool) -> None:
        task = step.task
        is_seen = self.is_beside and step.is_seen_by_next_forward
        is_fenced = self.has_newer and self.sees_forwards
        if self.wait_at is not WaitAt.STEP and (is_seen or is_fenced):
            # Also where the forward waits: a compiled function may call it, and dynamo traces our
            # hooks to nothing.
            fence = self._publish_for_reader if is_fenced else None
            step.hold_parameters(self.await_part, fence)
        if not here:
            self.worker.submit(task)
        else:
            task.timing.inline = True
            task.execute()
            if task.error is not None and not isinstance(task.error, Exception):
                raise task.error  # Ctrl-C and exit() go on as they would from optimizer.step()
            if task.error is not None:
                self.finish()  # raises it
        is_awaited_later = step.hold is not None or self.wait_at is WaitAt.FORWARD
        if not self.is_beside or (is_seen and not is_awaited_later):
            if self.has_newer:
                self._await_part(step, step.lead)
            else:
                self.finish()

    # Waiting.

    def await_part(self, step: InflightStep, part: int) -> int:
        """Wait for a part of ``step``, and order this thread's stream after it. Any thread.

        Returns how many parts need not be waited for any more, at least ``part``.
        """
        self._await_part(step, part)
        if self.delayed is not None and not self.delayed.is_prepared:
            self._prepare()
        # Later parts may be enqueued, but this stream does not wait for them.
        return part if self.streams.copies_beside else step.task.done

    def _await_part(self, step: InflightStep, part: int) -> None:
        if not step.wait(part):
            self._finish(step)
        step.follow(part)

    def wait(self) -> bool:
        """Wait until the step in flight, if any, is over; False: it failed. Any thread."""
        step = self._inflight
        return step is None or self._wait(step)

    def _wait(self, step: InflightStep) -> bool:
        try:
            return step.wait()
        except StepError as error:
            with self.lock:
                if self._inflight is step:
                    self._lost = str(error)
                    self._lose(step)
            raise

    def finish(self, everywhere: bool = False) -> None:
        """Wait for the step in flight, if any. In ``delayed`` the model stays as it is.

        ``everywhere``: for the device as well, so that every stream sees the step done.

        Raises:
            StepError: it failed; says which parameters were updated. The thread that trains gets it
                once, and the next call works; other threads get it until then.
        """
        step = self._inflight
        if step is not None:
            self._finish(step, everywhere)
        self._finish_preparation()

    def _finish(self, step: InflightStep, everywhere: bool = False) -> None:
        ok = self._wait(step)
        if everywhere:
            self.streams.follow_last(on_host=True)
        error, name = step.task.error, type(self.optimizer).__name__
        failure: StepError | None = None
        with self.lock:
            if self._inflight is step:
                step.follow()
                failure = None if ok else step.failure(name, self._names)
                self._release(step)
                if self.is_trained_here:
                    # Kernels that ran on one thread have made the worker's number the default of
                    # new threads.
                    torch.set_num_threads(torch.get_num_threads())
                if ok or self.is_trained_here:
                    self._settle()
                    if not ok:
                        self._recover()
        if not ok:
            # None: the thread that trains got it while this one waited.
            raise failure or StepError(
                f"{name} failed on the optimizer thread ({type(error).__name__}: {error})."
            ) from error

    def _recover(self) -> None:
        """After a failed step: drop lost gradients, overwrite previews of the lost update."""
        self._drop_lost_gradients()
        if self.delayed is not None and self.delayed.previews is not None and self.has_newer:
            with torch.inference_mode(False):
                self.delayed.drop_preparation()
                self.streams.wait_for_all()
                self._publish(self.delayed)

    def _settle(self) -> None:
        """No step is in flight any more."""
        self._inflight = None
        if self.delayed is None:  # else a preview may still read it
            self.replica.give_back_state()
        self.stage = Stage.COMPUTED if self.has_newer else Stage.IDLE

    def _publish(self, delayed: DelayedUpdates) -> None:
        self.stage = Stage.PUBLISHING
        delayed.publish()
        self._note_versions()
        self.stage = Stage.IDLE

    def _release(self, step: InflightStep) -> None:
        hold, step.hold = step.hold, None
        if hold is None:
            return
        hold.release()
        # Compiled code checks the class of its parameters before any of ours runs.
        if hold.was_traced and self.wait_at is not WaitAt.STEP:
            self.wait_at = WaitAt.STEP
            logger.info(
                "a compiled function reads parameters of %s: from here on step() waits until they "
                "are updated",
                type(self.optimizer).__name__,
            )
            if self.delayed is not None and self.sees_forwards:
                logger.warning(
                    "step_mode='delayed': a compiled function reads parameters of %s, and its "
                    "calls are not watched: in an evaluation it reads values of one step before. "
                    "Give AsyncOptimizer, or prepare, the compiled model, or call synchronize() "
                    "first.",
                    type(self.optimizer).__name__,
                )

    def _lose(self, step: InflightStep) -> None:
        """Give up ``step``. Call it under the lock."""
        self._settle()
        self._release(step)
        self._drop_lost_gradients()

    def _drop_lost_gradients(self) -> None:
        for p in self.replica.params:
            if is_held(p.grad):
                p.grad = None

    def finish_parameters(self, params: Iterable[Tensor]) -> None:
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
            self.await_part(step, min(last, step.task.parts))

    def finish_model(self) -> None:
        """Wait until the whole model is what the next forward sees."""
        step = self._inflight
        if step is None:
            self.streams.follow_last()  # who waited for it may have been on another stream
        elif not step.is_stale:
            self.finish()
        elif step.lead:
            self.await_part(step, step.lead)
            if step.hold is not None:
                step.hold.release()

    # Fences, and the training forward after them.

    def synchronize(self) -> None:
        """Finish the step in flight and publish it: model and state are the newest then, on every
        stream. Synchronises with the device.

        Raises:
            StepError: see :meth:`finish`.
            OrderError: in ``delayed`` another thread trains; its model would change.
        """
        self.finish(everywhere=True)
        self.streams.follow_last(on_host=True)  # what was finished on one stream alone
        if self.delayed is not None:
            self._publish_newest(self.delayed)

    @contextmanager
    def still(self) -> Iterator[None]:
        """:meth:`synchronize`; no step of another thread adds to the state until the end."""
        while True:
            self.synchronize()
            with self.lock:
                if self.is_published:
                    yield
                    return

    def _publish_newest(self, delayed: DelayedUpdates) -> None:
        with self.lock, torch.inference_mode(False):
            if self.has_newer and not self.is_trained_here:  # the other may just have gone on
                raise OrderError(
                    "step_mode='delayed': a newer value is waiting to be published, and the thread "
                    f"{threading.current_thread().name} must not publish it while another trains, "
                    f"{self._trainer.name}. Call optimizer.synchronize() there before reading "
                    "here, or use step_mode='overlap'."
                )
            if self.stage is Stage.RUNNING:
                return
            if delayed.previews is not None:
                delayed.previews.forget()  # the caller may edit what it reads
            if self.has_newer:
                # Events order reads on other streams before the next step, but not before this.
                self.streams.wait_for_all()
                self._follow_edits()
                self._publish(delayed)
            self.replica.give_back_state()

    def _publish_for_reader(self) -> bool:
        """A parameter is used between a step and the next training forward: publish the newest.

        Returns False on a thread that does not train: that one sees what a forward would.
        """
        if not self.is_trained_here:
            return False
        self.synchronize()
        return True

    def lift_fence(self) -> None:
        """A training forward begins: parameters are what it is to see."""
        step = self._inflight
        if step is not None:
            # FSDP2 reads shards unseen, but a hook or a loss may read them as well.
            step.lift_fence(keep=self.wait_at is not WaitAt.FORWARD or self.replica.is_sharded)

    def begin_forward(self) -> None:
        """A training forward begins."""
        self.lift_fence()
        self._prepare()

    def _prepare(self) -> None:
        """Prepare the previews of the next boundary; does nothing on other threads, nor in the
        capture of a graph, where nothing may wait: a graph reads what is there at its replay."""
        is_captured = self.streams.copies_beside and is_capturing()
        if self.delayed is not None and self.is_trained_here and not is_captured:
            with self.lock:
                if self._inflight is None:  # entries of the state may be others by now
                    self.replica.share_state(())
                self.delayed.prepare(self.steps)

    def _finish_preparation(self) -> None:
        start = time.perf_counter()
        finished = self.delayed is not None and self.delayed.finish_preparation()
        if finished and self.timing and self.is_trained_here:
            length = time.perf_counter() - start
            if length > MIN_WAIT_S:
                self.timing.waits.append((start, length))

    # Loading and closing.

    def begin_loading(self, state_dict: dict[str, Any]) -> None:
        """Before the optimizer loads ``state_dict``: forget a lost step, make room for masters."""
        self.claim()
        if self._lost is not None:
            self._lost = None
            self._drop_lost_gradients()
        self.synchronize()
        keys = chain.from_iterable(group["params"] for group in state_dict["param_groups"])
        # Not strict: torch refuses a state dict of another number of parameters.
        params = zip(keys, parameters_of(self.optimizer), strict=False)
        entries = state_dict["state"]
        self.replica.expect_masters(p for key, p in params if MASTER in entry_of(entries, key))
        self.refresh()

    def load(self, state_dict: dict[str, Any]) -> None:
        """After the optimizer has loaded ``state_dict``: load masters and their state from it.

        A saved ``master`` counts as far as it rounds to the model's present parameter.
        """
        replica, entries = self.replica, state_dict["state"]
        with torch.inference_mode(False), self.streams.as_at_home():
            if replica.masters.every or self.keeps_scaled:
                if not replica.is_current():
                    self.refresh()
                rest = {k: without_master(entry) for k, entry in entries.items()}
                masters = {k: entry_of(entries, k).get(MASTER) for k in entries}
                replica.load_state({**state_dict, "state": rest}, masters)
                self._note_versions()
        counts = [float(e["step"]) for e in entries.values() if isinstance(e, dict) and "step" in e]
        if counts:  # a warm-up goes on where it was
            self.steps = int(max(counts))
        self.refresh()

    def close(self) -> None:
        """Synchronise, give the optimizer back, remove what was put on parameters."""
        self.claim()
        try:
            self.synchronize()
            self.wait_for_gradients()
        finally:
            if self._inflight is not None:
                self._release(self._inflight)
            unguard(self.replica.pairs)
            unregister(self.optimizer)
            leave(self)
            state = self.optimizer.state
            for p in [p for p, entry in state.items() if isinstance(p, Tensor) and is_empty(entry)]:
                del state[p]
            self.stage, self._inflight = Stage.CLOSED, None

    def give_way(self) -> None:
        """Another optimizer owns the parameters from now on: close this one."""
        hooks = self.hooks
        if hooks is None:  # interrupted while it was made
            self.close()
            return
        owner = None if hooks.owner is None else hooks.owner()
        if owner is None:
            hooks.close(is_replaced=True)
        else:
            owner()

    def release(self) -> None:
        """After :meth:`close`: keep no master and no copy of a parameter."""
        self.replica.let_go()
        self.delayed, self._versions = None, []

    def _names(self, params: Sequence[Tensor]) -> str:
        names = self.parameter_names.of(params[:MAX_NAMES], self.optimizer)
        return listed(names, len(params)) or "none"
