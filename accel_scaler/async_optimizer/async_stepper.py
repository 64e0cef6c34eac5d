"""The step of one optimizer, handed to the optimizer thread: when it runs, who waits, how it fails.

``sync``: on the training thread (or awaited, with state in host memory). ``overlap``: part by
part in forward order, each parameter awaited where it is used. ``delayed``: masters are updated
while the model keeps the parameters before; they are published at the next boundary.
"""

from __future__ import annotations

import gc
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import chain, compress
from operator import attrgetter, itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_module

from ..devices import refuse_capture
from ..errors import OrderError, StepError, UnsupportedError
from ..optimizer_step import Stepper, async_stepper_of, register, unregister
from ..scaling import (
    LOW_PRECISION,
    DeferredUnscale,
    ParameterNames,
    local,
    parameters_of,
    reduce_partial_gradients,
)
from .grad_handoff import can_hold_gradients, forbid_sparse, is_part, send_down
from .inflight_step import Flight
from .master_params import ParameterPair
from .pending_parameter import (
    GradientHold,
    any_pending,
    hold_gradients,
    settle_gradients,
    settle_pending,
)
from .replica import Part, Replica
from .streams import PartEvents, SideStreams
from .worker import Task, Worker

__all__ = ["AsyncStepper", "refuse_sharing"]

logger = logging.getLogger("accel_scaler")

_steppers: list[weakref.ref[AsyncStepper]] = []
"""Those that step an optimizer."""

_sizes: list[int] = []
"""The lengths of all their groups when shared parameters were last looked for."""

_deref: Callable[[weakref.ref[AsyncStepper]], AsyncStepper | None] = weakref.ref.__call__
_groups_of, _params_of = attrgetter("optimizer.param_groups"), itemgetter("params")


class AsyncStepper(Flight, Stepper):
    """Steps for ``optimizer``. Every method is the training thread's, except where said.

    Args:
        mode: ``"sync"``, ``"overlap"`` or ``"delayed"``.
        offload: state and float32 masters in host memory.
        device: where the model's parameters are.
        delay_warmup_steps: so many first steps of ``delayed`` are not stale.
        worker: the optimizer thread, perhaps shared with other steppers.
        parameter_names: names parameters in errors.
        guards_backward: no scaled loss tells of a backward, so a hook on each parameter does.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        mode: str,
        offload: bool,
        device: torch.device,
        delay_warmup_steps: int = 0,
        worker: Worker,
        parameter_names: ParameterNames | None = None,
        guards_backward: bool = False,
    ) -> None:
        if async_stepper_of(optimizer) is not None:
            raise OrderError(
                f"this {type(optimizer).__name__} is stepped by an AsyncOptimizer or an attached "
                "accelerator already; close() or detach() that one first."
            )
        super().__init__()
        refuse_sharing([(optimizer, mode)])
        self.optimizer, self.mode, self.offload, self.worker = optimizer, mode, offload, worker
        self.delay_warmup_steps = delay_warmup_steps
        self.parameter_names = parameter_names or ParameterNames()
        self.streams = SideStreams(device)
        self.replica = Replica(
            optimizer,
            self.streams,
            offload=offload,
            masters=mode == "delayed",
            inline=mode == "sync" and not offload,
        )
        if mode != "sync" and not self.replica.splittable:
            logger.warning(
                "%s is stepped on the training thread, so nothing of it is hidden behind forward "
                "and backward: it is not one of torch's, whose steps treat each parameter alone",
                type(optimizer).__name__,
            )
        self.steps = 0
        """Updates handed over since the start."""
        self.was_skipped = False
        """The last boundary was one without an update."""
        self._guards_backward = guards_backward
        self._shared: frozenset[int] = frozenset()
        """``id`` of parameters that another optimizer steps too: it needs their gradients."""
        self._newer: list[Tensor] = []
        """Parameters of which a newer value waits to be published."""
        register(self)
        _steppers.append(weakref.ref(self))
        _find_shared()

    @property
    def keeps_scaled(self) -> bool:
        """Some parameters are float16, or bfloat16 with masters: their gradients stay scaled."""
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
        # Masters made in an evaluation are stepped outside of it.
        with self.lock, torch.inference_mode(False), self.streams.as_at_home():
            if self._task is not None:
                return  # of the thread that trains, which has asked for itself
            before, pairs = self.replica.params, self.replica.pairs
            if not self.replica.is_current():
                refuse_sharing([(self.optimizer, self.mode)])
                self.replica.follow()
                _find_shared()
                self._learning = self.mode != "sync" and self.replica.splittable
                self._follow_order(before)
                _unguard(pairs, kept=self.replica.pairs)
                if self.unpublished:
                    self.keep_newer(pairs)
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
            self.synchronize()

    def _finish_for_boundary(self) -> None:
        self.finish("optimizer.step")
        if _sizes_now() != _sizes:
            _find_shared()  # add_param_group, perhaps another optimizer's
        if self._shared:
            for other in [e for e in _present() if e is not self and e._shared & self._shared]:
                other.finish("optimizer.step")
        self.refresh()

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
        replica.forget_loaded()
        stale = self.mode == "delayed" and self.steps >= self.delay_warmup_steps
        publish_first = self.unpublished
        parts = len(replica.parts)
        inline = fn is None and replica.inline
        if fn is not None and deferred.divide is not None:
            deferred = DeferredUnscale(multiply=1.0 / deferred.divide)
        grads = [None if grad is None else local(grad) for grad in found]
        if fn is not None:
            grads = self._own(grads)
        held: list[Tensor | None] = []
        events: list[Any] = []
        if self.offload:
            self._unscale_in_place(grads, deferred)
            deferred, events = _on_host(deferred), send_down(replica.ordered, grads, self.streams)
            self._keep_sent(grads, events)
            grads = [
                pair.host_grad if grad is not None and pair.host_grad is not None else grad
                for pair, grad in zip(replica.ordered, grads, strict=True)
            ]
        elif fn is None and self.mode != "sync" and not inline:
            grads, held = self._hold_gradients(grads, deferred)
        ready = self.streams.record(home=True)
        work = partial(self._work, grads, events, deferred, ready, publish_first, stale, fn)
        self._lead = parts * publish_first
        task = Task(work, (1 if fn is not None else parts) + self._lead)
        try:
            self._task, self._events, self._of_user = task, [], fn is not None
            if fn is not None:
                for p in replica.params:
                    if id(p) not in self._shared:
                        p.grad = None
            order = self.order_of_parts()
            for number, part in enumerate(replica.parts, self._lead + 1) if held else ():
                mine = [grad for grad in held[part.start : part.end] if grad is not None]
                hold_gradients(
                    mine, GradientHold(self.wait_for(task, self._events, number), order, number)
                )
            # Not what stays as it is: another branch's backward may still need it.
            stepped = [fn is not None or grad is not None for grad in found]
            written = compress(replica.params, () if stale else stepped)
            torch.autograd.graph.increment_version(
                [*(self._newer if publish_first else ()), *written]
            )
            self._newer = list(compress(replica.params, stepped)) if stale else []
            if replica.has_masters:
                self._versions = [p._version for p in replica.params]
            self.timing = task.timing
            self.steps += 1
            self.unpublished = stale
            self.optimizer.__dict__["_opt_called"] = True  # what an LR scheduler's wrapper sets
            self._launch(task, inline, publish_first, whole=fn is not None and not publish_first)
        except BaseException as error:  # Ctrl-C, or no thread to be had
            if task.abandon(error):
                self._task = None
                self._release(learn=False)
                self.drop_lost()
                self.unpublished = publish_first
                logger.error(
                    "%s: its update was not handed over (%s): no parameter has moved, its "
                    "gradients are lost. Training goes on with new ones.",
                    type(self.optimizer).__name__,
                    type(error).__name__,
                )
            raise

    def _hold_gradients(
        self, grads: Sequence[Tensor | None], deferred: DeferredUnscale
    ) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """What the optimizer thread reads, and which of ``grads`` it so shares: those wait."""
        shares = can_hold_gradients(grads)
        held = [grad if yes else None for grad, yes in zip(grads, shares, strict=True)]
        copied = [None if yes else grad for grad, yes in zip(grads, shares, strict=True)]
        taken = [
            grad if grad is None else grad.data if yes else grad.clone()
            for grad, yes in zip(grads, shares, strict=True)
        ]
        self._unscale_in_place(copied, deferred)
        if deferred.multiply is not None:  # there, which autograd would not see
            torch.autograd.graph.increment_version(self._unscaled_in_place(held))
        for pair in self.replica.ordered if self._guards_backward else ():
            if pair.guard is None and pair.param.requires_grad:
                param: Any = pair.param
                pair.guard = param.register_hook(partial(_before_adding, weakref.ref(param)))
        return taken, held

    def _own(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Those that a function is given, for good: what others write to, or need, is copied."""
        return [
            grad.clone() if grad is not None and (is_part(grad) or id(p) in self._shared) else grad
            for p, grad in zip(self.replica.params, grads, strict=True)
        ]

    def _unscale_in_place(self, grads: Sequence[Tensor | None], deferred: DeferredUnscale) -> None:
        """What is due, where a copy of ``grads`` is stepped."""
        mine = self._unscaled_in_place(grads)
        if mine and deferred.multiply is not None:
            torch._foreach_mul_(mine, deferred.multiply)
        elif mine and deferred.divide is not None and not self.offload:
            torch._foreach_div_(mine, deferred.divide)

    def _unscaled_in_place(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """All but those, float16 or bfloat16, that are unscaled on their way to a master."""
        return [
            grad
            for pair, grad in zip(self.replica.ordered, grads, strict=True)
            if grad is not None and not _goes_to_master(pair, grad)
        ]

    def _keep_sent(self, grads: Sequence[Tensor | None], events: Sequence[Any]) -> None:
        """Nobody writes to them before their copies have arrived."""
        if self.mode == "sync" or not self.streams.copies_beside:
            return
        for grad, event, shares in zip(grads, events, can_hold_gradients(grads), strict=True):
            if grad is None or event is None:
                continue
            if shares:
                hold_gradients(
                    [grad],
                    GradientHold(
                        partial(self.streams.follow, event), PartEvents(self.streams, [event])
                    ),
                )
            else:
                self.streams.follow(event)

    def _launch(self, task: Task, inline: bool, publish_first: bool, whole: bool) -> None:
        if inline:
            task.timing.inline = True
            task.execute()
            if task.error is not None and not isinstance(task.error, Exception):
                logger.error("%s", self._failure_of(task))
                self._task = None
                raise task.error  # Ctrl-C and exit() go on as they would from optimizer.step()
            self.finish()
            return
        seen_by_next_forward = publish_first or not self.unpublished
        if self.mode != "sync" and seen_by_next_forward:
            self.hold_parameters(task, whole)
        self.worker.submit(task)
        held = self._hold is not None or (self.waits_at_root and not self.waits_at_step)
        if self.mode == "sync" or (seen_by_next_forward and not held):
            # Nobody would see the parameters used.
            if self.unpublished:
                self._await(self._lead, "optimizer.step")
            else:
                self.finish("optimizer.step")

    def synchronize(self) -> None:
        """Finish the step in hand and publish it, so that the model and the state are the newest.

        Blocks until the device has done the update, so that it is seen on every stream.

        Raises:
            StepError: see :meth:`finish`.
            OrderError: in ``delayed`` another thread trains, beneath which the model would change.
        """
        self.finish(everywhere=True)
        self.streams.follow_last(on_host=True)  # what was finished on one stream alone
        if self.unpublished and not self.is_trained_here:
            raise OrderError(
                "step_mode='delayed': a newer value waits to be published, and this thread "
                f"({threading.current_thread().name}) is not the one that trains "
                f"({self._trainer.name}): its forward and backward would see two values. Call "
                "optimizer.synchronize() on the thread that trains, then read here; or use "
                "step_mode='overlap'."
            )
        self._publish_newest()

    @contextmanager
    def still(self) -> Iterator[None]:
        """:meth:`synchronize`, and no step of another thread begins until the end: it would add to
        dictionaries that are being read."""
        while True:
            self.synchronize()
            with self.lock:
                if self._task is None and not self.unpublished:
                    yield
                    return

    def _publish_newest(self) -> None:
        with self.lock, torch.inference_mode(False):
            if self.unpublished and self._task is None:
                # Readers on other streams are in order before the next step, which this is not.
                self.streams.wait_for_all()
                self._follow_edits()
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
        if self._task is None and not self.unpublished:
            return
        held = [local(t) for t in tensors]
        asked = {t.untyped_storage().data_ptr() for t in held if t.layout is torch.strided}
        mine = (pair.target.untyped_storage().data_ptr() for pair in self.replica.pairs)
        if not asked.isdisjoint(mine):
            self.synchronize()

    def load(self, state_dict: dict[str, Any], master: str) -> None:
        """After the optimizer has loaded ``state_dict``: where masters are, their state too.

        An entry ``master`` holds where it rounds to the model's present parameter.
        """
        replica = self.replica
        with torch.inference_mode(False), self.streams.as_at_home():
            if replica.masters or self.keeps_scaled:
                if not replica.is_current():
                    self.refresh()
                entries = {k: v for k, v in state_dict["state"].items() if isinstance(v, dict)}
                masters = {k: v.get(master) for k, v in entries.items()}
                rest = {
                    **state_dict["state"],
                    **{k: {n: t for n, t in v.items() if n != master} for k, v in entries.items()},
                }
                replica.load_state({**state_dict, "state": rest}, masters)
        counts = [
            entry["step"]
            for entry in state_dict["state"].values()
            if isinstance(entry, dict) and "step" in entry
        ]
        if counts:  # a warm-up goes on where it was
            self.steps = int(max(map(float, counts)))
        self.refresh()

    def close(self) -> None:
        """Synchronise, give the optimizer back, remove what was put on parameters."""
        self.claim()
        try:
            self.synchronize()
            self.settle_gradients()
        finally:
            self._release()
            _unguard(self.replica.pairs)
            unregister(self.optimizer)
            _steppers[:] = [ref for ref in _steppers if ref() is not self]
            _find_shared()
            state = self.optimizer.state
            for p in [p for p, entry in state.items() if isinstance(p, Tensor) and not entry]:
                del state[p]
            self._task = None

    # The work itself, on the optimizer thread.

    @torch.no_grad()
    def _work(
        self,
        grads: list[Tensor | None],
        sent: list[Any],
        deferred: DeferredUnscale,
        ready: Any,
        publish_first: bool,
        stale: bool,
        fn: Callable[[], object] | None,
        task: Task,
    ) -> None:
        # What the training thread steps itself is in order on its own stream.
        if task.timing.inline and self.replica.is_sharded:
            self.streams.keep(grads, at_home=True)  # FSDP2 took them on a stream of its own
        with nullcontext() if task.timing.inline else self._beside(grads, deferred, ready):
            try:
                for part in self.replica.parts if publish_first else ():
                    self._publish(part)
                    self._done(task)
                if self.offload:
                    # Masters are overwritten from here on; what was sent up has to be there.
                    self.streams.wait_on_host(self._events[-1] if self._events else ready)
                if fn is None:
                    self._update(grads, sent, deferred, stale, task)
                    return
                self._run(fn, grads, sent, deferred)
                for part in [] if stale else self.replica.parts:
                    self._publish(part)
                self._done(task)
            finally:
                if task.done < task.parts:  # a part has failed, perhaps after its first kernels
                    self._events.append(self.streams.record())

    @contextmanager
    def _beside(
        self, grads: list[Tensor | None], deferred: DeferredUnscale, ready: Any
    ) -> Iterator[None]:
        """On the side stream; all memory that is used there stays until it is done."""
        with self.streams.beside(ready):
            self.streams.keep([*grads, deferred.multiply, deferred.divide])
            self.replica.keep()
            try:
                yield
            finally:
                self.replica.keep()

    def _update(
        self,
        grads: list[Tensor | None],
        sent: list[Any],
        deferred: DeferredUnscale,
        stale: bool,
        task: Task,
    ) -> None:
        for part in self.replica.parts:
            mine = slice(part.start, part.end)
            final = self._bring(part, grads[mine], sent[mine], deferred.multiply)
            grads[mine] = [None] * len(final)
            self.replica.step_part(part, final, deferred.divide)
            if not stale:
                self._publish(part)
            self._done(task)

    def _done(self, task: Task) -> None:
        self._events.append(self.streams.record())
        task.advance()

    def _bring(
        self, part: Part, grads: list[Tensor | None], sent: list[Any], multiply: Tensor | None
    ) -> list[Tensor | None]:
        """Gradients as the part is stepped with, float32 for masters, times ``multiply``."""
        for event in sent:
            self.streams.wait_on_host(event)
        brought: list[Tensor | None] = []
        scaled: list[Tensor] = []
        for pair, grad in zip(part.pairs, grads, strict=True):
            if grad is not None:
                rounded = _goes_to_master(pair, grad)
                grad = grad.float() if rounded else grad
                if rounded or not self.offload:  # there it was unscaled before it was sent
                    scaled.append(grad)
            brought.append(grad)
        if multiply is not None and scaled:
            torch._foreach_mul_(scaled, multiply)
        return brought

    def _publish(self, part: Part) -> None:
        for pair in part.pairs if self.replica.has_masters else ():
            pair.publish(self.streams)

    def _run(
        self,
        fn: Callable[[], object],
        grads: list[Tensor | None],
        sent: list[Any],
        deferred: DeferredUnscale,
    ) -> None:
        pairs = self.replica.ordered
        try:
            for part in self.replica.parts:
                mine = slice(part.start, part.end)
                for pair, grad in zip(
                    part.pairs,
                    self._bring(part, grads[mine], sent[mine], deferred.multiply),
                    strict=True,
                ):
                    pair.stepped.grad = grad
            with self.replica.thread_context.around():
                fn()
        finally:
            for pair in pairs:
                pair.stepped.grad = None

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

    def know(self, model: Module) -> None:
        """Take parameters' names for error messages."""
        self.parameter_names.add_module(model)


def _present() -> list[AsyncStepper]:
    return list(filter(None, map(_deref, _steppers)))


def _sizes_now() -> list[int]:
    """Each step of each stepper looks at all, so nothing here is a call of Python's."""
    groups = chain.from_iterable(map(_groups_of, filter(None, map(_deref, _steppers))))
    return list(map(len, map(_params_of, groups)))


def _find_shared() -> None:
    """Tell every stepper which of its parameters others step, too."""
    for attempt in (1, 2):
        _steppers[:] = [ref for ref in _steppers if ref() is not None]
        _sizes[:] = _sizes_now()
        steppers = _present()
        held = [set(map(id, parameters_of(stepper.optimizer))) for stepper in steppers]
        counts = Counter(chain.from_iterable(held))
        for stepper, own in zip(steppers, held, strict=True):
            stepper._shared = frozenset(i for i in own if counts[i] > 1)
        if attempt == 2 or not any(stepper._shared for stepper in steppers):
            return
        del stepper, steppers
        gc.collect()  # an optimizer that nobody has any more steps nothing


def refuse_sharing(wanted: Sequence[tuple[Optimizer, str]]) -> None:
    """Raise ``UnsupportedError`` where two optimizers would have a master each for a parameter.

    Args:
        wanted: optimizers to be stepped, and the mode of each; those that are already count too.
    """
    said = _sharing(wanted)
    if said is not None:
        gc.collect()  # as above
        said = _sharing(wanted)
    if said is not None:
        raise UnsupportedError(said)


def _sharing(wanted: Sequence[tuple[Optimizer, str]]) -> str | None:
    asked = {id(optimizer) for optimizer, _ in wanted}
    present = [(e.optimizer, e.mode) for e in _present() if id(e.optimizer) not in asked]
    for place, (one, mode) in enumerate(wanted):
        own = set(map(id, parameters_of(one)))
        for other, its_mode in [*present, *wanted[:place]]:
            common = [p for p in parameters_of(other) if id(p) in own and p.requires_grad]
            rounded = any(p.dtype is torch.float16 for p in common)
            if common and (rounded or "delayed" in (mode, its_mode)):
                why = "the parameters are float16" if rounded else "step_mode='delayed'"
                return (
                    f"{type(one).__name__} shares {len(common)} parameters with a "
                    f"{type(other).__name__} that is stepped as well. Each would step float32 "
                    f"masters of its own ({why}) and not see the other's update. Use step_mode="
                    "'overlap' or 'sync' with float32 parameters, close() or detach() the other "
                    "one first, or put the parameters in one optimizer."
                )
    return None


def _goes_to_master(pair: ParameterPair, grad: Tensor) -> bool:
    return pair.is_master and grad.dtype in LOW_PRECISION


def _before_adding(ref: weakref.ref[Tensor], _: Tensor) -> None:
    """A backward is about to add to the gradient of a parameter."""
    p = ref()
    if p is not None:
        settle_gradients([p])


def _unguard(pairs: Iterable[ParameterPair], kept: Iterable[ParameterPair] = ()) -> None:
    staying = set(map(id, kept))
    for pair in pairs:
        if pair.guard is not None and id(pair) not in staying:
            pair.guard.remove()
            pair.guard = None


def _on_host(deferred: DeferredUnscale) -> DeferredUnscale:
    """The same numbers on the CPU; waits for the device, which the check has just done."""
    return DeferredUnscale(
        None if deferred.multiply is None else deferred.multiply.cpu(),
        None if deferred.divide is None else deferred.divide.cpu(),
    )
