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
from itertools import filterfalse
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.optim import Optimizer

from ..config import StepMode
from ..devices import present_stream
from ..errors import StepError
from ..models import inert, is_compiled, is_in_backward, unwrap
from ..optimizer_step import (
    MasterRule,
    ParameterPair,
    ReplicaStepper,
    is_stepped,
    refuse_overlapping,
)
from ..scaling import DeferredUnscale, ParameterNames, parameters_of
from .inflight_step import InflightStep, Update, guard_backward, is_own, read_in_place
from .pending_parameter import can_hold_parameters, is_held, wait_for_gradients, wait_for_parameters
from .worker import Worker

logger = logging.getLogger("accel_scaler")


class AsyncStepper(ReplicaStepper):
    """Steps ``optimizer``. Methods are for the training thread, except where documented.

    Any thread may wait for the step in flight. ``lock`` guards the state that a wait leaves behind;
    no thread waits under it for a step that another thread has handed over.

    Args:
        mode: ``"overlap"`` or ``"sync"``, in which the thread has functions of ``submit()`` alone.
        worker: the optimizer thread, perhaps shared with other steppers.
        guards_backward: put a hook on each parameter, so that a backward waits before it adds to a
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
        self.mode, self.worker = mode, worker
        self.is_on_host = _are_on_host(optimizer)
        """All parameters are in host memory, where kernels need a thread to run beside."""
        super().__init__(optimizer, masters, parameter_names=parameter_names)
        self.lock = self.replica.lock
        """One for both, so that no thread has the one and waits for the other. Reentrant: a signal
        handler may look while its thread has it."""
        self._inflight: InflightStep | None = None
        self._guards_backward = guards_backward
        self._guards: weakref.WeakKeyDictionary[ParameterPair, Any] = weakref.WeakKeyDictionary()
        """Handles of the hooks that make a backward wait."""
        self._trainer = threading.current_thread()
        """The thread that trains, as far as is known."""
        self._models: weakref.WeakSet[Module] = weakref.WeakSet()
        """Watched ones."""
        self._evaluations: weakref.WeakKeyDictionary[Module, Any] = weakref.WeakKeyDictionary()
        """Handles of the hooks that make an evaluation of a whole model wait."""

    def _refuse_overlapping(self) -> None:
        if self.reads_beside:
            self._refuse_ties(())
        else:
            super()._refuse_overlapping()

    def _refuse_ties(self, others: Sequence[Tensor]) -> None:
        """Raise ``UnsupportedError`` where a trained parameter shares memory: a read of the other
        tensor, a frozen parameter or one of ``others``, would not wait for the update."""
        params = parameters_of(self.optimizer)
        trained = list(filter(is_stepped, params))
        others = [*filterfalse(is_stepped, params), *others]
        refuse_overlapping(self.optimizer, trained, self.parameter_names, others)

    @property
    def reads_beside(self) -> bool:
        """A step is handed to the optimizer thread, which may read ``.grad`` until it is done."""
        return self.mode == "overlap" and self.is_on_host

    @property
    def is_trained_here(self) -> bool:
        """Whether this thread is the one that trains, or that one has ended."""
        # ``current_thread`` would make a thread of autograd's one of Python's for good.
        return self._trainer.ident == threading.get_ident() or not self._trainer.is_alive()

    def wait_for_gradients(self) -> None:
        """Wait until no step reads ``.grad``. Any thread."""
        step = self._inflight
        if step is not None and step.reads_in_place:
            wait_for_gradients(self.replica.params)

    def watch(self, model: Module) -> None:
        """Update in the order in which ``model`` defines its parameters, about a forward's; in
        ``step()`` where it reads some unseen: compiled, scripted or sharded ones.

        Raises:
            UnsupportedError: other tensors of the model lie in the memory of its parameters.
        """
        super().watch(model)
        if model in self._models:
            return
        mine = set(map(id, parameters_of(self.optimizer)))
        if not mine.isdisjoint(map(id, Module.parameters(model))):
            self.parameter_names.add_module(model)
            if self.reads_beside:
                tensors = (*Module.parameters(model), *Module.buffers(model))
                self._refuse_ties([t for t in tensors if id(t) not in mine])
                root = unwrap(model)
                if root not in self._evaluations:
                    hook = BeforeEvaluation(self)
                    self._evaluations[root] = root.register_forward_pre_hook(hook, prepend=True)
            if self.mode == "overlap" and (why := unseen_read(model)) is not None:
                self._step_inside(why)
            self.synchronize()
            with self.lock:
                self.replica.order_by(Module.parameters(model))
        self._models.add(model)

    def _step_inside(self, why: str) -> None:
        """From the next step on, ``step()`` waits for the update."""
        if self.mode == "overlap":
            self.mode = "sync"
            name = type(self.optimizer).__name__
            logger.warning("step_mode='overlap': %s steps as in 'sync' from now on: %s.", name, why)

    def refresh(self) -> None:
        wait_for_parameters(parameters_of(self.optimizer))  # another stepper's, too
        with self.lock:
            if self._inflight is None:  # else the thread that trains has refreshed for itself
                super().refresh()

    def _follow_parameters(self) -> None:
        self.is_on_host = _are_on_host(self.optimizer)
        super()._follow_parameters()
        models, self._models = list(self._models), weakref.WeakSet()
        for model in models:
            self.watch(model)
        if self.mode == "overlap" and not can_hold_parameters(self.replica.params):
            self._step_inside("some of its parameters are DTensors, or of another subclass")

    def take_edits(self) -> None:
        with self.lock:
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
        self._forbid_sparse(grads)
        with self.lock:
            self.replica.prepare(grads)
            params = self.replica.params
            # It keeps them for good.
            own = [g if g is None or is_own(g) else g.clone() for g in grads]
            deferred, stream = deferred or DeferredUnscale(), present_stream(params[0].device)
            self._launch(Update(own, deferred, self._begin_update, fn, stream), (), params)
            for p in params:
                p.grad = None
        if self.mode == "sync":
            self.synchronize()

    def _get_ready(self) -> None:
        self._trainer = threading.current_thread()
        self.synchronize()
        super()._get_ready()

    def _update(self, grads: Sequence[Tensor | None], deferred: DeferredUnscale) -> None:
        if not self.reads_beside:
            super()._update(grads, deferred)
            return
        with self.lock:
            self.replica.prepare(grads)
            taken, held = read_in_place(self.replica.ordered, grads, deferred)
            if self._guards_backward:
                guard_backward(self.replica.ordered, self._guards)
            # Not those without a gradient: another branch's backward may still need them.
            params = zip(self.replica.params, grads, strict=True)
            written = [p for p, grad in params if grad is not None]
            self._launch(Update(taken, deferred, self._begin_update), held, written)

    def _launch(
        self, update: Update, held: Sequence[Tensor | None], written: Sequence[Tensor]
    ) -> None:
        """Hand an update to the optimizer thread, which reads the gradients ``held`` where they
        are, and writes to the parameters ``written``. Under the lock."""
        self.worker.start()
        step = self._inflight = InflightStep(self.replica, update)
        try:
            step.hold_gradients(held)
            torch.autograd.graph.increment_version(written)
            self._note_versions()
            self.timing = step.task.timing
            self.steps += 1
            self.optimizer.__dict__["_opt_called"] = True  # what an LR scheduler's wrapper sets
            if self.mode == "overlap":
                step.hold_parameters(self._await_part)
            self.worker.submit(step.task)
        except BaseException as error:  # Ctrl-C
            if step.task.abandon(error):
                self._note_versions()
                self._leave(step)
                logger.error(
                    "%s: its update was not handed over (%s): no parameter has moved, its "
                    "gradients are lost. Training goes on with new ones.",
                    type(self.optimizer).__name__,
                    type(error).__name__,
                )
            raise

    def _await_part(self, step: InflightStep, part: int) -> int:
        """Any thread, which needs the first ``part`` parts: returns how many are done by then."""
        if not step.task.wait(part):
            self._finish(step)
        return step.task.done

    def wait(self) -> bool:
        step = self._inflight
        return step is None or step.task.wait()

    def synchronize(self) -> None:
        """Wait for the step in flight, if any: model and state are the newest then.

        Raises:
            StepError: it failed; says which parameters were updated. The thread that trains gets it
                once, and the next call works; other threads get it until then.
        """
        if (step := self._inflight) is not None:
            self._finish(step)

    def _finish(self, step: InflightStep) -> None:
        failure = None if step.task.wait() else self._failure_of(step)
        with self.lock:
            if self._inflight is step and (failure is None or self.is_trained_here):
                self._leave(step)
        if self.is_trained_here:
            # Kernels that ran on one thread have made the worker's number the default of new
            # threads.
            torch.set_num_threads(torch.get_num_threads())
        if failure is not None:
            raise failure from step.task.error

    def _failure_of(self, step: InflightStep) -> StepError:
        error = step.task.error
        assert error is not None
        if not step.is_submitted:
            return self._failure(error, self.steps, step.task.done, "optimizer")
        return StepError(
            f"step {self.steps} of the function given to submit() failed on the optimizer thread "
            f"({type(error).__name__}: {error}). What it had stepped stays stepped. The gradients "
            "of this step are gone; the next step works with new ones."
        )

    def _leave(self, step: InflightStep) -> None:
        """``step`` is in flight no more; if it failed, its gradients are lost. Under the lock."""
        self._inflight = None
        self.replica.give_back_state()
        for p in self.replica.params if step.task.done < step.task.parts else ():
            if is_held(p.grad):
                p.grad = None
        hold, step.hold = step.hold, None
        if hold is not None:
            hold.release()
            if hold.was_traced:  # compiled code checks the class before any of ours runs
                self._step_inside("a compiled function reads its parameters")

    @contextmanager
    def still(self) -> Iterator[None]:
        """:meth:`synchronize`; no step of another thread adds to the state until the end."""
        while True:
            self.synchronize()
            with self.lock:
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
            wait_for_gradients(self.replica.params)
        finally:
            if (step := self._inflight) is not None:
                self._leave(step)
            for handle in (*self._guards.values(), *self._evaluations.values()):
                handle.remove()
            super().close()


def _are_on_host(optimizer: Optimizer) -> bool:
    return all(p.device.type == "cpu" for p in parameters_of(optimizer))


def unseen_read(model: Module) -> str | None:
    """Why some reads of the model's parameters cannot be seen; None: all can."""
    for name, module in model.named_modules():
        what = f"{name or type(module).__name__!r}"
        if isinstance(module, torch.jit.ScriptModule):
            return f"{what} is a ScriptModule"
        if is_compiled(module):  # its code checks the class of parameters before any of ours runs
            return f"{what} is compiled"
    return None


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
