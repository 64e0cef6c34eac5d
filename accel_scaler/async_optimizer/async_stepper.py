"""The step of one optimizer beside the next forward and backward: when it runs, who waits.

In ``overlap`` a step on a CPU is handed to the optimizer thread, which updates part by part in the
model's order; each parameter is awaited where it is next used. Where a use could not be seen (see
:meth:`AsyncStepper.watch`), and on a device, ``step()`` updates at once, as in ``sync``: the thread
has then only the functions given to ``submit()``.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import filterfalse
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.nn import Module
from torch.optim import Optimizer

from ..config import StepMode
from ..devices import warn_once
from ..errors import StepError
from ..models import inert, is_in_backward, unwrap
from ..optimizer_step import MasterRule, ReplicaStepper, goes_to_master, is_stepped, overlapping
from ..scaling import DeferredUnscale, ParameterNames, parameters_of
from .inflight_step import InflightStep, are_own, has_compiled
from .pending_parameter import can_hold_parameters, is_held, wait_for
from .worker import Worker

logger = logging.getLogger("accel_scaler")


class AsyncStepper(ReplicaStepper):
    """Steps ``optimizer``. Methods are for the training thread, except where documented.

    Any thread may wait for the step in flight. The replica's ``lock`` guards the state that a wait
    leaves behind; no thread waits under it for a step that another thread has handed over.

    Args:
        mode: ``"overlap"`` or ``"sync"``, in which the thread has functions of ``submit()`` alone.
        worker: the optimizer thread, perhaps shared with other steppers.
        guards_backward: put hooks on parameters, so that a backward waits before it adds to a
            gradient that is still read; needed where no ``scale()`` announces the backward.
        masters, parameter_names: see :class:`ReplicaStepper`.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        masters: MasterRule,
        mode: StepMode,
        *,
        worker: Worker,
        guards_backward: bool = False,
        parameter_names: ParameterNames | None = None,
    ) -> None:
        self.mode: StepMode = mode if _are_on_host(optimizer) else "sync"
        self.worker = worker
        super().__init__(optimizer, masters, parameter_names=parameter_names)
        self._inflight: InflightStep | None = None
        self._guards_backward = guards_backward
        self._guards: dict[int, Any] = {}
        """``id(parameter)`` -> the hook that makes a backward wait."""
        self._trainer = threading.current_thread()
        """The thread that trains, as far as is known."""
        self._models: weakref.WeakSet[Module] = weakref.WeakSet()
        """Watched ones."""
        self._evaluations: weakref.WeakKeyDictionary[Module, Any] = weakref.WeakKeyDictionary()
        """Handles of the hooks that make an evaluation of a whole model wait."""

    @property
    def reads_beside(self) -> bool:
        """A step is handed to the optimizer thread, which may read ``.grad`` until it is done."""
        return self.mode == "overlap"

    @property
    def is_trained_here(self) -> bool:
        """Whether this thread is the one that trains, or that one has ended."""
        # ``current_thread`` would make a thread of autograd's one of Python's for good.
        return self._trainer.ident == threading.get_ident() or not self._trainer.is_alive()

    def wait_for_gradients(self) -> None:
        """Wait until no step reads ``.grad``. Any thread."""
        self.synchronize()

    def watch(self, model: Module) -> None:
        """Update in the order in which ``model`` defines its parameters, about a forward's; in
        ``step()`` where it reads some unseen: scripted ones, other tensors in their memory."""
        super().watch(model)
        if model in self._models:
            return
        mine = set(map(id, parameters_of(self.optimizer)))
        if not mine.isdisjoint(map(id, Module.parameters(model))):
            self.parameter_names.add_module(model)
            self.synchronize()
            tensors = (*Module.parameters(model), *Module.buffers(model))
            self._look_for_ties([t for t in tensors if id(t) not in mine])
            if self.mode == "overlap":
                if any(isinstance(module, torch.jit.ScriptModule) for module in model.modules()):
                    self._step_inside("a ScriptModule reads its parameters")
                root = unwrap(model)
                if root not in self._evaluations:
                    hook = BeforeEvaluation(self)
                    self._evaluations[root] = root.register_forward_pre_hook(hook, prepend=True)
            with self.replica.lock:
                self.replica.order_by(Module.parameters(model))
        self._models.add(model)

    def _look_for_ties(self, others: Sequence[Tensor] = ()) -> None:
        """A read of another tensor in a trained parameter's memory, a frozen parameter or one of
        ``others``, would not wait for the update."""
        if self.mode == "sync":
            return
        params = parameters_of(self.optimizer)
        trained = list(dict.fromkeys(filter(is_stepped, params)))
        groups = overlapping([*trained, *filterfalse(is_stepped, params), *others])
        if any(group[0] < len(trained) for group in groups):
            self._step_inside("other tensors lie in the memory of its parameters")

    def _step_inside(self, why: str) -> None:
        """From now on ``step()`` waits for the update."""
        if self.mode == "overlap":
            self.mode = "sync"
            name = type(self.optimizer).__name__
            logger.warning("step_mode='overlap': %s steps as in 'sync' from now on: %s.", name, why)

    def refresh(self) -> None:
        wait_for(parameters_of(self.optimizer))  # another stepper's, too
        with self.replica.lock:
            if self._inflight is None:  # else the thread that trains has refreshed for itself
                super().refresh()

    def _follow_parameters(self) -> None:
        super()._follow_parameters()
        self._unguard()
        models, self._models = list(self._models), weakref.WeakSet()
        for model in models:
            self.watch(model)
        if not _are_on_host(self.optimizer):
            self._step_inside("it has parameters on a device")
        elif not can_hold_parameters(self.replica.params):
            self._step_inside("some of its parameters are DTensors, or of another subclass")
        self._look_for_ties()

    def take_edits(self) -> None:
        with self.replica.lock:
            if self._inflight is None:
                super().take_edits()

    def submit(
        self, prepare: Callable[[], Callable[[], object]], deferred: DeferredUnscale | None = None
    ) -> None:
        """Run a function on the optimizer thread with the gradients as they are now. It owns them:
        ``.grad`` is None then. ``prepare`` is called once the step before is finished, and returns
        the function. What is ``deferred`` is done first."""
        self._get_ready()
        fn = prepare()
        grads = [p.grad for p in self.replica.params]
        wait_for(grads)
        self._forbid_sparse(grads)
        with self.replica.lock:
            self.replica.prepare(grads)
            params = self.replica.params
            # It keeps them for good.
            own = [g if g is None or are_own([g]) else g.clone() for g in grads]
            self._launch(own, deferred or DeferredUnscale(), (), params, fn)
            for p in params:
                p.grad = None
        if self.mode == "sync":
            self.synchronize()

    def _get_ready(self) -> None:
        self._trainer = threading.current_thread()
        self.synchronize()
        if has_compiled():
            self._step_inside("torch.compile has compiled a function, which may read parameters")
        super()._get_ready()

    def _update(self, grads: Sequence[Tensor | None], deferred: DeferredUnscale) -> None:
        held = [grad for grad in grads if grad is not None]
        wait_for(held)
        is_own = are_own(held)
        if self.reads_beside and not is_own:
            warn_once(
                "step_mode='overlap': gradients are sparse, or share memory with other tensors; "
                "steps with such ones are made as in 'sync'."
            )
        if not (self.reads_beside and is_own):
            super()._update(grads, deferred)
            return
        self.replica.prepare(grads)
        if deferred:
            # Unseen by autograd, but for those that are unscaled on their way to a master.
            pairs = zip(self.replica.ordered, grads, strict=True)
            unscaled = [g for pair, g in pairs if g is not None and not goes_to_master(pair, g)]
            increment_version(unscaled)
        # Not those without a gradient: another branch's backward may still need them.
        params = zip(self.replica.params, grads, strict=True)
        written = [p for p, grad in params if grad is not None]
        taken = [None if grad is None else grad.data for grad in grads]
        self._launch(taken, deferred, held, written)

    def _launch(
        self,
        grads: list[Tensor | None],
        deferred: DeferredUnscale,
        held: Sequence[Tensor],
        written: Sequence[Tensor],
        fn: Callable[[], object] | None = None,
    ) -> None:
        """Hand an update to the optimizer thread, which reads ``held`` of the gradients where they
        are, and writes to the parameters ``written``. Under the lock."""
        self.worker.start()
        begin, fail = self._begin_update, self._finish
        step = InflightStep(self.replica, grads, deferred, begin, fail, fn)
        self._inflight = step
        try:
            step.hold(held)
            if self._guards_backward:
                self._guard(written)
            increment_version(written)
            self._note_versions()
            self.timing = step.timing
            self.steps += 1
            self.optimizer.__dict__["_opt_called"] = True  # what an LR scheduler's wrapper sets
            if self.mode == "overlap":
                step.hold(self.replica.params)
            self.worker.submit(step)
        except BaseException as error:  # Ctrl-C
            if step.abandon(error):
                self._leave(step)
                self._note_versions()
                logger.error(
                    "%s: its update was not handed over (%s): no parameter has moved, its "
                    "gradients are lost. Training goes on with new ones.",
                    type(self.optimizer).__name__,
                    type(error).__name__,
                )
            raise

    def _guard(self, params: Sequence[Any]) -> None:
        for p in params:
            if id(p) not in self._guards and p.requires_grad:
                wait = partial(_call, weakref.WeakMethod(self.synchronize))
                self._guards[id(p)] = p.register_hook(wait)

    def _unguard(self) -> None:
        for handle in self._guards.values():
            handle.remove()
        self._guards.clear()

    def wait(self) -> bool:
        step = self._inflight
        return step is None or step.wait()

    def synchronize(self) -> None:
        """Wait for the step in flight, if any: model and state are the newest then.

        Raises:
            StepError: it failed; says which parameters were updated. The thread that trains gets it
                once, and the next call works; other threads get it until then.
        """
        if (step := self._inflight) is not None:
            self._finish(step)

    def _finish(self, step: InflightStep) -> None:
        failure = None if step.wait() else self._failure_of(step)
        with self.replica.lock:
            if self._inflight is step and (failure is None or self.is_trained_here):
                self._leave(step)
        if self.is_trained_here:
            # Kernels that ran on one thread have made the worker's number the default of new
            # threads.
            torch.set_num_threads(torch.get_num_threads())
        if failure is not None:
            raise failure from step.error

    def _failure_of(self, step: InflightStep) -> StepError:
        error = step.error
        assert error is not None
        if not step.is_submitted:
            return self._failure(error, self.steps, step.done, "optimizer")
        return StepError(
            f"step {self.steps} of the function given to submit() failed on the optimizer thread "
            f"({type(error).__name__}: {error}). What it had stepped stays stepped. The gradients "
            "of this step are gone; the next step works with new ones."
        )

    def _leave(self, step: InflightStep) -> None:
        """``step`` is in flight no more; if it failed, its gradients are lost. Under the lock."""
        self._inflight = None
        self.replica.give_back_state()
        for p in self.replica.params if step.done < step.parts else ():
            if is_held(p.grad):
                p.grad = None
        step.release_all()

    @contextmanager
    def still(self) -> Iterator[None]:
        """:meth:`synchronize`; no step of another thread adds to the state until the end."""
        while True:
            self.synchronize()
            with self.replica.lock:
                if self._inflight is None:
                    yield
                    return

    def close(self) -> None:
        """As :class:`ReplicaStepper`, after the step in flight. Raises ``StepError`` where that
        failed; everything is removed all the same."""
        if self.is_closed:
            return
        try:
            self.synchronize()
        finally:
            if (step := self._inflight) is not None:
                self._leave(step)
            self._unguard()
            for handle in self._evaluations.values():
                handle.remove()
            super().close()


def _are_on_host(optimizer: Optimizer) -> bool:
    return all(p.device.type == "cpu" for p in parameters_of(optimizer))


def _call(method: weakref.WeakMethod[Callable[[], None]], _: Tensor) -> None:
    """A hook that keeps nothing alive."""
    if (found := method()) is not None:
        found()


class BeforeEvaluation:
    """A hook on a whole model: its evaluation waits for all parameters at once. torch's fast path
    of Transformer layers is not for pending ones, and a module may have kept a view of one. It
    refers to the stepper weakly, and does nothing in a copy of the model."""

    def __init__(self, stepper: AsyncStepper) -> None:
        self._stepper = weakref.ref(stepper)

    def __reduce__(self) -> Any:
        return inert()

    def __call__(self, module: Module, *_: Any) -> None:
        is_trained = torch.is_grad_enabled() and module.training
        if is_trained or torch.compiler.is_dynamo_compiling() or is_in_backward():
            return
        if (stepper := self._stepper()) is not None:
            stepper.synchronize()
