"""The end of an accumulation window: unscale, check, clip, update the scale, step. In this order.

Everything here runs on the training thread and decides on the host, so that a skipped step is
known (and the LR schedule can wait) whichever optimizer is used, fused or not.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from .agreement import whole
from .checks import Checks
from .config import OrderError, OverflowStreakError
from .culprits import first_nonfinite
from .due import Due, Timing, stepper_of
from .fused import FusedAdam, step_fused
from .gradients import (
    clip_coefficient,
    gradients_of,
    is_power_of_two,
    is_uniform,
    nonfinite,
    nonzero,
    parameters_of,
    reciprocal,
    scaled_norms,
)
from .interrupts import Undivided
from .notes import (
    Note,
    clip_scaled_norm,
    clip_scaled_value,
    dtypes_of,
    is_low,
    takes_grad_scale,
    total_norm,
)
from .recording import Measure
from .telemetry import History

__all__ = ["Boundary"]

logger = logging.getLogger("accel_scaler")


class Boundary(Checks):
    """Clips for, and steps, the optimizers of one accelerator."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.adopted: weakref.WeakSet[Any] = weakref.WeakSet()
        """The wrappers that step through this boundary."""
        self._plans: weakref.WeakKeyDictionary[Optimizer, FusedAdam | None] = (
            weakref.WeakKeyDictionary()
        )
        self._told = False
        self._index = 0
        """Number of the window, where nothing is scaled and so no window opens."""
        self._ended: set[int] = set()
        """Optimizers that have stepped in it."""

    @property
    def history(self) -> History:
        """What happened, one record a window."""
        return self.recorder.history

    def norm_so_far(self, parameters: Sequence[Tensor], norm_type: float) -> Tensor:
        """Off the boundary: the norm of what has accumulated, unscaled. Changes nothing."""
        if not self._told:
            self._told = True
            logger.warning(
                "clip_grad_norm_ before the last micro-batch of an accumulation window clips "
                "nothing and returns the norm so far; the last micro-batch clips. (Said once.)"
            )
        return total_norm(gradients_of(parameters), norm_type) / self.scaler.get_scale()

    def clip_norm(
        self,
        optimizers: Sequence[Optimizer],
        parameters: Sequence[Tensor],
        max_norm: float,
        norm_type: float = 2.0,
    ) -> Tensor:
        """Unscale what owns ``parameters``, clip their total norm to ``max_norm``.

        ``.grad`` is then what ``torch.nn.utils.clip_grad_norm_`` leaves after ``unscale_``, bit
        for bit; with ``fold_unscale`` and fused optimizers it stays scaled, for the kernel.
        After an overflow gradients stay as they were found.

        Returns the total norm before clipping, unscaled, float32, shape (); inf after an
        overflow. Synchronises with the device once for each optimizer, or once for all where
        unscale and clip are one product.
        """
        parameters = [p for p in parameters if p.grad is not None]
        if not parameters:
            return torch.tensor(0.0)
        if not self.scaler.is_enabled():
            return self._clip_unscaled(parameters, float(max_norm), float(norm_type))
        owners = self.owners(optimizers, parameters)
        notes = [self._note(owner) for owner in owners]
        ids = self._fit_for_one_pass(owners, parameters) if float(norm_type) == 2.0 else None
        if ids is not None:
            norm = self._clip_in_one_pass(owners, notes, parameters, float(max_norm), ids)
            if norm is not None:
                return norm
        strays_bad = self._unscale_strays(owners, parameters)
        low = any(map(is_low, owners))
        found = [self._check(o).found_inf for o in owners] if low else [self.unscale(owners)]
        if any(found) or strays_bad:
            for note in notes:
                self._settle(note, True)
            return torch.full((), float("inf"), device=self.device)
        if not low:
            return self._clip_unscaled(parameters, float(max_norm), float(norm_type))
        total = clip_scaled_norm(owners, notes, parameters, float(max_norm), float(norm_type))
        clipped = Measure(parameters, total, None, float(max_norm), norm_type=float(norm_type))
        self.recorder.measured(clipped)
        return total

    def _clip_unscaled(
        self, parameters: Sequence[Tensor], max_norm: float, norm_type: float
    ) -> Tensor:
        """``torch.nn.utils.clip_grad_norm_``; where they are wanted, it leaves each one's norm."""
        grads, each = gradients_of(parameters), None
        if self.recorder.keeps and norm_type == 2.0 and is_uniform(grads):
            each = torch.stack(list(torch._foreach_norm(grads)))
            total: Tensor = torch.linalg.vector_norm(each)
            torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total)
        else:
            total = whole(torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type))
        self.recorder.measured(Measure(parameters, total, each, max_norm, norm_type=norm_type))
        return total

    def note_norm(
        self, parameters: Sequence[Tensor], norm: Any, max_norm: float, norm_type: float
    ) -> None:
        """Somebody else has clipped: for the record, if there is one. Then it may communicate."""
        if self.recorder.is_asked:
            total, kind = whole(norm), float(norm_type)
            self.recorder.measured(
                Measure(parameters, total, max_norm=float(max_norm), norm_type=kind)
            )

    def clip_value(
        self, optimizers: Sequence[Optimizer], parameters: Sequence[Tensor], clip_value: float
    ) -> None:
        """Unscale what owns ``parameters``, clip each element to ``[-clip_value, clip_value]``."""
        owners = self.owners(optimizers, parameters)
        if not any(map(is_low, owners)):
            if not self.unscale(owners) and parameters:
                torch.nn.utils.clip_grad_value_(parameters, clip_value)
            return
        notes = [self._check(owner) for owner in owners]
        if not any(note.found_inf for note in notes):
            for owner, note in zip(owners, notes, strict=True):
                clip_scaled_value(owner, note, set(map(id, parameters)), float(clip_value))

    def step(self, optimizer: Optimizer) -> bool:
        """Finish the window for ``optimizer``: check, update the scale, then step or skip.

        Returns False if the step was skipped. Synchronises with the device once, unless
        :meth:`clip_norm` or :meth:`unscale` already have.

        Raises:
            OrderError: a second step in one window; gradients that no ``scale()`` produced;
                scaled gradients added to unscaled ones.
            OverflowStreakError: too many skips in a row.
        """
        start = time.perf_counter()
        if not self.scaler.is_enabled():
            self._step_unscaled(optimizer)
            self.recorder.end_step(start)
            return True
        if not self._has_gradients(optimizer):
            self._pass(optimizer)
            return True
        if self.scaler.window.opened_by is None:
            self._step_without_window(optimizer)
            return True
        note = self._check(optimizer)
        if note.found_inf and not note.overflowed:
            note.overflowed = first_nonfinite(optimizer)
        self._close_window(optimizer, note)
        self.recorder.end_step(start)
        try:
            self.scaler.end_streak()
        except OverflowStreakError as error:
            self.recorder.flush(f"{type(error).__name__}: {error}")
            raise
        return not note.found_inf

    def _pass(self, optimizer: Optimizer) -> None:
        """A window without a gradient for it: those that a step took before are of the past."""
        stepper, window = stepper_of(optimizer), self.scaler.window
        is_new = window.opened_by is not None and id(optimizer) not in window.states
        if stepper is not None and is_new:
            stepper.zero_taken(set_to_none=True)

    def _close_window(self, optimizer: Optimizer, note: Note) -> None:
        """Update the scale, then the parameters or not, and put it on record."""
        scaler, window, timing = self.scaler, self.scaler.window, None
        stepper = stepper_of(optimizer)
        if stepper is not None:
            stepper.wait("optimizer.step")
        with Undivided():  # the scale and the parameters move on together
            scaler.close_window(note.found_inf)
            window.states[id(optimizer)]["stage"] = OptState.STEPPED
            self.recorder.before_update(optimizer, window.index, note.found_inf)
            if not note.found_inf:
                timing = self._apply(optimizer, note.due)
            elif stepper is not None:
                stepper.skip()
        note.names = scaler.culprits.names(note.overflowed, optimizer)
        note.overflowed = ()  # not to keep a model alive that is dropped now
        scaler.culprits.count(note.names)
        if note.found_inf:
            scaler.culprits.look(optimizer, scaler.read_state().consecutive_skips - 1)
            scaler.culprits.tell_broken_statistics()
        names = dict.fromkeys(name for each in self._notes.values() for name in each.names)
        scale = self._window_scale()
        self.recorder.add(optimizer, window.index, scale, window.found_inf, names, timing)

    def _step_unscaled(self, optimizer: Optimizer) -> None:
        """Where nothing is scaled: step, and where somebody reads it, put it on record."""
        if not self.recorder.keeps:
            with Undivided():
                self._apply(optimizer, Due())
            return
        if id(optimizer) in self._ended:
            self._next_unscaled()
        self._ended.add(id(optimizer))
        self.recorder.before_update(optimizer, self._index, False)
        with Undivided():
            timing = self._apply(optimizer, Due())
        found = self.recorder.saw_nonfinite()
        self.recorder.add(optimizer, self._index, 1.0, found, (), timing)

    def _next_unscaled(self) -> None:
        self._index += 1
        self._ended.clear()
        self.recorder.forget()

    def before_backward(self, optimizers: Iterable[Optimizer]) -> None:
        """Call before each backward; see :meth:`Checks.forget_zeroed`."""
        if self._ended and not self.scaler.is_enabled():
            self._next_unscaled()
        self.forget_zeroed(optimizers)

    def _apply(self, optimizer: Optimizer, due: Due) -> Timing | None:
        """Step; returns when that runs, None where nothing was handed over."""
        stepper, start = stepper_of(optimizer), time.perf_counter()
        before = getattr(stepper or optimizer, "timing", None)
        if stepper is not None:
            stepper.step(due)
        elif takes_grad_scale(optimizer):
            plan = self._plans.get(optimizer)
            self._plans[optimizer] = step_fused(optimizer, plan, due.divide)
        else:
            optimizer.step()
        after = getattr(stepper or optimizer, "timing", None)  # an AsyncOptimizer's too
        if stepper is None and not isinstance(after, Timing):
            return Timing(start, time.perf_counter() - start, finished=True, inline=True)
        return None if after is before else after

    def _step_without_window(self, optimizer: Optimizer) -> None:
        """Nothing was scaled since the last step: only zero gradients are right as they are.

        ``torch.distributed.checkpoint`` steps on zeros to create state before it loads some.
        """
        if any(map(nonzero, gradients_of(parameters_of(optimizer)))):
            raise OrderError(
                f"{type(optimizer).__name__}.step(): there are gradients, but no loss was scaled "
                "since the last step. Call accelerator.backward(loss) instead of loss.backward()."
            )
        self._apply(optimizer, Due())

    def _fit_for_one_pass(
        self, owners: Sequence[Optimizer], parameters: Sequence[Tensor]
    ) -> list[int] | None:
        """Their ``id``, if they are just those of whole optimizers, none of them unscaled yet."""
        if self.sharded or any(self._stage(owner) is not OptState.READY for owner in owners):
            return None
        mine = [id(p) for owner in owners for p in parameters_of(owner) if p.grad is not None]
        asked = list(map(id, parameters))
        fits = (
            (mine == asked or (len(mine) == len(asked) and set(mine) == set(asked)))
            and (is_power_of_two(self._window_scale()) or all(map(is_low, owners)))
            and is_uniform(gradients_of(parameters), dtypes_of(owners))
        )
        return asked if fits else None

    def _clip_in_one_pass(
        self,
        owners: Sequence[Optimizer],
        notes: Sequence[Note],
        parameters: Sequence[Tensor],
        max_norm: float,
        ids: list[int],
    ) -> Tensor | None:
        """One read for norm and check, one product for unscale and clip. None: not possible."""
        scale, grads = self._window_scale(), gradients_of(parameters)
        device = grads[0].device
        inv_scale = torch.full((), reciprocal(scale), device=device)
        norms = scaled_norms(grads, inv_scale, self.recorder.keeps)
        found = norms.total is None
        if found and not norms.overflowed:
            return None
        for owner, note in zip(owners, notes, strict=True):
            self._put_check(owner, note, parameters, norms)
        if norms.total is None:
            return torch.full((), float("inf"), device=device)
        self.recorder.measured(Measure(parameters, norms.host_total, norms.each, max_norm, ids))
        coefficient = clip_coefficient(norms.total, max_norm)
        folded = self.fold_unscale and all(map(takes_grad_scale, owners))
        for owner, note in zip(owners, notes, strict=True):
            if folded:
                note.due = Due(divide=scale / coefficient)
            elif stepper_of(owner) is not None:
                note.due = Due(multiply=coefficient / scale)
        if not folded:
            rest = [o for o in owners if stepper_of(o) is None]
            own = grads if len(rest) == len(owners) else _gradients(rest)
            if own:
                torch._foreach_mul_(own, coefficient / scale)
        return norms.total

    def _unscale_strays(self, owners: Sequence[Optimizer], parameters: Sequence[Tensor]) -> bool:
        """Unscale, once a window, gradients that no optimizer here owns; True: not finite."""
        owned = {id(p) for owner in owners for p in parameters_of(owner)}
        strays = [p for p in parameters if id(p) not in owned]
        window = self._enter_window()
        for p in strays if window.opened_by is not None else ():
            if id(p) not in self._strays and p.grad is not None:
                self._strays.add(id(p))
                p.grad.div_(self._window_scale())
        return any(nonfinite(grad) for grad in gradients_of(strays))


def _gradients(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    return [grad for o in optimizers for grad in gradients_of(parameters_of(o))]
