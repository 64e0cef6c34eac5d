"""The end of an accumulation window: unscale, check, clip, update the scale, step. In this order.

Everything here runs on the training thread and decides on the host, so that a skipped step is
known (and the LR schedule can wait) whichever optimizer is used, fused or not. The boundary writes
its findings on an optimizer to the window, where every other call reads them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import isfinite
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from ..errors import OrderError, OverflowStreakError, UnsupportedError
from ..scaling import (
    LOW_PRECISION,
    DeferredUnscale,
    GradScaler,
    Losses,
    OptimizerRecord,
    Window,
    first_nonfinite,
    first_version,
    gradients_of,
    is_uniform,
    nonzero,
    parameters_of,
    stepped,
    total_norm,
)
from .clipping import Clipping
from .mistakes import ScaledClips
from .observer import Observer, Rerun
from .overflow_check import OverflowCheck
from .spikes import SpikeRule
from .stepper import Stepper, stepper_of

logger = logging.getLogger("accel_scaler")

MAX_IDLE_WINDOWS = 10
"""Windows that an optimizer may go without its first gradient before a warning is logged."""

_boundaries: WeakKeyDictionary[GradScaler, ref[Boundary]] = WeakKeyDictionary()


def boundary_of(scaler: GradScaler) -> Boundary | None:
    """The boundary at which this scaler's windows end, if there is one."""
    found = _boundaries.get(scaler)
    return None if found is None else found()


class Boundary:
    """Ends the windows of one scaler: checks, and steps or skips, its optimizers.

    Args:
        scaler: the scaler whose windows end here.
        device: where ranks communicate, and where a clip returns inf after an overflow.
        observers: receive each event in this order; one that finds out where an overflow began
            comes before one that reads it from the window.
        rerun: makes overflowed gradients anew.
        skip_nonfinite: check gradients of an unscaled loss, too; of a scaled loss they always are.
        skip_norm_above: see :class:`SpikeRule`.
    """

    def __init__(
        self,
        scaler: GradScaler,
        device: torch.device,
        *observers: Observer | None,
        rerun: Rerun | None = None,
        skip_nonfinite: bool = True,
        skip_norm_above: float | str | None = None,
    ) -> None:
        self.scaler, self.device = scaler, device
        self.observers = [each for each in observers if each is not None]
        checks, has_limit = skip_nonfinite or scaler.is_enabled(), skip_norm_above is not None
        self.check = OverflowCheck(scaler, device, self.observers, checks, has_limit, rerun)
        self.spikes = SpikeRule(skip_norm_above)
        self.clipping = Clipping(self.check)
        self.scaled_clips = ScaledClips()
        self._mistakes: set[str] = set()
        self._idle: WeakKeyDictionary[Optimizer, set[Losses] | None] = WeakKeyDictionary()
        """``Window.losses`` of the windows without a gradient of an optimizer; None: it has had
        one."""
        _boundaries[scaler] = ref(self)

    def add(self, optimizer: Optimizer) -> None:
        """Let this boundary step an optimizer."""
        self.scaler.manage(stepped(optimizer), stepper_of(optimizer))

    def before_backward(self, loss: Tensor, accumulation: int = 1, is_last: bool = True) -> None:
        """Call before each backward. Where nothing is scaled, this opens a window. May wait
        for a step that reads gradients which the backward adds to. ``accumulation``: the divisor of
        the loss. ``is_last``: the window's last backward, as far as is known."""
        managed = self.scaler.managed
        steppers = list(map(stepper_of, managed))
        for stepper in steppers:
            stepper.before_backward(is_last)
        window = self.scaler.window
        is_next = bool(window.losses) and not window.closed
        if is_next and not any(map(self._has_gradients, managed)):
            window.losses = Losses()  # the gradients of those before were dropped
        if not self.scaler.is_enabled():
            window = self.scaler.open_window()
            window.losses.note([loss], accumulation)
            for optimizer, stepper in zip(managed, steppers, strict=True):
                stepper.wait_for_gradients()
                self.check.forget(optimizer)
        for observer in self.observers:
            observer.before_backward(loss)

    def after_backward(self) -> None:
        """Call after each backward."""
        self.scaler.ranks.backward_ended()
        if self.scaler.is_enabled() and self.scaled_clips.tries > 0:
            versions = {id(each): first_version(each) for each in self.scaler.managed}
            self.scaler.window.versions = versions
        for observer in self.observers:
            observer.after_backward()

    def unscale(self, optimizers: Iterable[Optimizer]) -> bool:
        """Check and unscale each optimizer that has gradients, once a window. Returns whether any
        of them overflowed. Synchronises with the device."""
        optimizers = list(optimizers)
        return self.check.until_finite(lambda: self._unscale(optimizers))

    def _unscale(self, optimizers: Iterable[Optimizer]) -> bool:
        found = False
        for optimizer in filter(self._has_gradients, map(stepped, optimizers)):
            record = self.check.check(optimizer)
            if self.scaler.is_enabled():
                self.check.unscale(optimizer, record)
            found = found or record.found_inf
        return found

    @contextmanager
    def deferred_of(self, optimizer: Optimizer) -> Iterator[DeferredUnscale]:
        """What is deferred to the step within the block. Raises ``OrderError`` where gradients were
        changed since they were clipped."""
        record = self.scaler.record_of(optimizer)
        record.forbid_mixture(type(stepped(optimizer)).__name__)
        yield record.deferred  # after an error it is still to be done
        record.deferred, record.returned = DeferredUnscale(), None

    def step(self, optimizer: Optimizer) -> bool:
        """Finish the window for ``optimizer``: check, update the scale, then step or skip.

        Returns False if the step was skipped. Synchronises with the device once, unless a clip or
        :meth:`unscale` has done so already.

        Raises:
            OrderError: a second step in one window; gradients that no ``scale()`` produced;
                scaled gradients added to unscaled ones.
            StepError: the update before this one has failed, on another thread.
            OverflowStreakError: too many skips in a row.
        """
        optimizer = stepped(optimizer)
        scaler, stepper = self.scaler, stepper_of(optimizer)
        scaler.manage(optimizer, stepper)
        known = scaler.window.known(optimizer)  # a script may have dropped what overflowed
        if not self._has_gradients(optimizer) and not (
            known is not None and known.stage is not OptState.STEPPED and known.is_bad
        ):
            self._count_idle(optimizer)
            if not scaler.is_enabled():
                stepper.step_idle()
            return True
        is_over = known is not None and known.stage is OptState.STEPPED
        is_over = scaler.is_enabled() and (scaler.window.opened_by is None or is_over)
        # Where nothing was scaled since its last step only zero gradients are right as they are:
        # ``torch.distributed.checkpoint`` steps on them to create state before it loads some.
        if is_over and not any(map(nonzero, gradients_of(parameters_of(optimizer)))):
            stepper.step()
            return True
        self._idle[optimizer] = None
        self._name_scaled_clip(optimizer, known)
        record = self.check.until_finite(lambda: self.check.check(optimizer))
        has_moved = self._launch(optimizer, record, stepper)
        if scaler.window.known(optimizer) is not record:  # a clip that was read has spoilt them
            record = self.check.until_finite(lambda: self.check.check(optimizer))
        if record.found_inf:
            names = scaler.parameter_names.of
            record.names = record.names or names(first_nonfinite(optimizer), optimizer)
        elif self.check.wants_norm and self.spikes.is_spike(optimizer, self.check.norm(optimizer)):
            record.is_spike, scaler.skips.origin = True, "The gradient norm is a spike"
        elif record.deferred and not self._is_left_to(stepper):
            self.check.unscale(optimizer, record)
        elif record.deferred:
            # Its step unscales these in place, so another optimizer that has them must not.
            scaler.window.unscaled.update(map(id, parameters_of(optimizer)))
        stepper.wait()
        self._close(optimizer, scaler.window, record, stepper, has_moved)
        try:
            scaler.check_skips(self._cause_of_skips)
        except OverflowStreakError as error:
            for observer in self.observers:
                observer.run_ended(f"{type(error).__name__}: {error}")
            raise
        return not record.is_skipped

    def _cause_of_skips(self) -> str:
        return next(filter(None, (each.cause_of_skips() for each in self.observers)), "")

    def name_mistake(self, text: str | None) -> None:
        """Log a mistake of the script once, and tell the observers; None: there is none."""
        if text is None or text in self._mistakes:
            return
        self._mistakes.add(text)
        logger.warning("%s (Logged once.)", text)
        for observer in self.observers:
            observer.mistake_named(text)

    def _name_scaled_clip(self, optimizer: Optimizer, record: OptimizerRecord | None) -> None:
        """Where the script has written to gradients since the last backward, and they are scaled
        still, as far as is known: has it clipped them? Synchronises then."""
        before, now = self.scaler.window.versions, first_version(optimizer)
        if before.get(id(optimizer), now) == now or (record and record.stage is not OptState.READY):
            return
        grads = gradients_of(params := parameters_of(optimizer))
        if is_uniform(grads, LOW_PRECISION | {torch.float32}):
            norm, scale = float(total_norm(params, 2.0)), self.scaler.window_scale
            if isfinite(norm):
                self.name_mistake(self.scaled_clips.mistake(optimizer, norm, scale))

    def _has_gradients(self, optimizer: Optimizer) -> bool:
        groups = optimizer.param_groups
        if any(p.grad is not None for group in groups for p in group["params"]):
            return True
        # A rank whose shard is empty still takes part in the decision of all.
        return self.scaler.ranks.has_parts(optimizer)

    def _is_left_to(self, stepper: Stepper) -> bool:
        """Whether its step unscales gradients; else that is done in place before."""
        return (stepper.reads_beside or stepper.keeps_scaled) and not stepper.has_pre_hooks

    def _launch(self, optimizer: Optimizer, record: OptimizerRecord, stepper: Stepper) -> bool:
        """Enqueue the update before the outcome of the check is read, where that was left on the
        device; then read it. Returns whether the update has been made: see Note [Launch before you
        read]."""
        sent = record.unread
        if sent is None or stepper.has_pre_hooks:
            return False
        is_launched = False
        try:
            is_launched = stepper.launch(record.deferred, sent, record.gathered)
            record.settle()
            return is_launched and stepper.conclude(sent.is_finite and not record.is_skipped)
        except BaseException as error:  # the device goes on: the window must not be stepped again
            if not is_launched and isinstance(error, (OrderError, UnsupportedError)):
                return False  # step() refuses it, too, once the window is closed
            made = "some parameters may have moved"
            if is_launched:
                record.settle()
                has_moved = stepper.conclude(sent.is_finite and not record.is_skipped)
                made = "it was made" if has_moved else "it was not made"
            name = type(optimizer).__name__
            logger.error("the update of %s was interrupted: %s. Zero the gradients.", name, made)
            self.scaler.abandon_window()
            raise

    def _close(
        self,
        optimizer: Optimizer,
        window: Window,
        record: OptimizerRecord,
        stepper: Stepper,
        has_moved: bool,
    ) -> None:
        """Update the scale, then the parameters or not; ``has_moved``: that was done. The window is
        closed before a step begins: after an interrupt the next one is new."""
        self.scaler.close_window(record.found_inf, record.is_spike)
        record.stage = OptState.STEPPED
        for observer in self.observers:
            observer.before_update(optimizer, window)
        deferred, record.deferred = record.deferred, DeferredUnscale()
        if record.is_skipped:
            stepper.skip()
        elif not has_moved:
            stepper.step(deferred, record.gathered)
        timing = None if record.is_skipped else stepper.timing
        self.scaler.ranks.step_ended(optimizer)
        self.scaler.skips.names.update(record.names)
        record.let_go()  # a model may be dropped now
        for observer in self.observers:
            observer.optimizer_stepped(optimizer, window, timing)

    def _count_idle(self, optimizer: Optimizer) -> None:
        """Warn of an optimizer that never has a gradient, where torch's scaler raises at once. Here
        it may wait for its turn (GANs, adapters), and go without one once it has had one."""
        windows, window = self._idle.setdefault(optimizer, set()), self.scaler.window
        if windows is None or window.opened_by is None or len(windows) == MAX_IDLE_WINDOWS:
            return
        windows.add(window.losses)
        if len(windows) == MAX_IDLE_WINDOWS:
            logger.warning(
                "%s was due in %d steps and has never had a gradient, so it trains nothing. Its "
                "first parameter is %s. Make it from the parameters of the model that computes the "
                "loss, after that was loaded, resized, wrapped or moved; unfreeze them. (Logged "
                "once.)",
                type(optimizer).__name__,
                MAX_IDLE_WINDOWS,
                *self.scaler.parameter_names.of(parameters_of(optimizer)[:1], optimizer),
            )
