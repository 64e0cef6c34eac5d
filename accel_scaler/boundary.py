"""The end of an accumulation window: unscale, check, clip, update the scale, step. In this order.

Everything here runs on the training thread and decides on the host, so that a skipped step is
known (and the LR schedule can wait) whichever optimizer is used, fused or not.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Sequence
from math import isinf
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from .agreement import agree_on_overflow, whole
from .config import OrderError, UnsupportedError
from .culprits import first_nonfinite
from .due import Due, stepper_of
from .fused import FusedAdam, step_fused
from .gradients import (
    Norms,
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
from .mixing import MixGuard
from .notes import (
    Note,
    clip_scaled_norm,
    clip_scaled_value,
    dtypes_of,
    is_low,
    takes_grad_scale,
    total_norm,
    unscale_due,
)
from .recording import record
from .scaler import GradScaler
from .telemetry import History
from .windows import Window

__all__ = ["Boundary"]

logger = logging.getLogger("accel_scaler")


class Boundary:
    """Clips for, and steps, the optimizers of one accelerator.

    Args:
        scaler: whose windows these are.
        device: where gradients live and ranks communicate.
        fold_unscale: leave unscaling and clipping to the fused kernel where it can do them.
        sharded: ranks hold different gradients (FSDP), so they must agree on each verdict.
    """

    def __init__(
        self,
        scaler: GradScaler,
        device: torch.device,
        *,
        fold_unscale: bool = False,
        sharded: bool = False,
    ) -> None:
        self.scaler, self.device = scaler, device
        self.fold_unscale, self.sharded = fold_unscale, sharded
        self.history = History()
        self.adopted: weakref.WeakSet[Any] = weakref.WeakSet()
        """The wrappers that step through this boundary."""
        self._noted: Window | None = None
        self._notes: dict[int, Note] = {}
        self._strays: set[int] = set()
        self._mixing = MixGuard()
        self._plans: weakref.WeakKeyDictionary[Optimizer, FusedAdam | None] = (
            weakref.WeakKeyDictionary()
        )
        self._told = False

    def before_backward(self, optimizers: Iterable[Optimizer]) -> None:
        """Call before each backward: remember the gradients that are unscaled already.

        Where they were zeroed since (a batch thrown away after a look at its norm), the
        optimizer starts over: what comes next is scaled, and not checked yet.
        """
        window = self.scaler.window
        if window.closed or not window.states:
            return
        for optimizer in optimizers:
            if self._stage(optimizer) is not OptState.UNSCALED:
                continue
            kept = self._mixing.remember(optimizer)
            if agree_on_overflow(kept, self.device, self.sharded):
                continue
            del window.states[id(optimizer)]
            self._notes.pop(id(optimizer), None)
            self._mixing.forget(optimizer)
            self._strays.clear()

    def norm_so_far(self, parameters: Sequence[Tensor], norm_type: float) -> Tensor:
        """Off the boundary: the norm of what has accumulated, unscaled. Changes nothing."""
        if not self._told:
            self._told = True
            logger.warning(
                "clip_grad_norm_ before the last micro-batch of an accumulation window clips "
                "nothing and returns the norm so far; the last micro-batch clips. (Said once.)"
            )
        return total_norm(gradients_of(parameters), norm_type) / self.scaler.get_scale()

    def unscale(self, optimizers: Iterable[Optimizer]) -> bool:
        """Unscale and check each optimizer that has gradients; once a window, later calls pass.

        Returns whether any of them overflowed. Synchronises with the device.
        """
        if not self.scaler.is_enabled():
            return False
        found = False
        for optimizer in filter(self._has_gradients, optimizers):
            note = self._check(optimizer)
            if not note.found_inf:
                unscale_due(optimizer, note)
            found = found or note.found_inf
        return found

    def _check(self, optimizer: Optimizer) -> Note:
        """Check, unless that was done in this window; unscale, or leave that as due."""
        note = self._note(optimizer)
        self._mixing.forbid(optimizer)
        if self._stage(optimizer) is not OptState.READY:
            return note
        window = self.scaler.window
        if stepper_of(optimizer) is not None and self._check_only(optimizer, note):
            return note
        if is_low(optimizer):
            raise UnsupportedError(
                f"{type(optimizer).__name__}: its float16 gradients are sharded, sparse or on "
                "several devices; load the model in float32."
            )
        with self.scaler.inside(window if window.closed else None):
            self.scaler.unscale_(optimizer)
        flags = window.states[id(optimizer)]["found_inf_per_device"].values()
        self._settle(note, any(bool(flag) for flag in flags))
        return note

    def _check_only(self, optimizer: Optimizer, note: Note) -> bool:
        """Check without unscaling, which stays due; False: not possible with these gradients."""
        params = [p for p in parameters_of(optimizer) if p.grad is not None]
        grads, scale = gradients_of(params), self._window_scale()
        exact = is_power_of_two(scale) or is_low(optimizer)
        if self.sharded or not exact or not is_uniform(grads, dtypes_of([optimizer])):
            return False
        inv_scale = torch.full((), reciprocal(scale), device=grads[0].device)
        norms = scaled_norms(grads, inv_scale)
        self._put_check(optimizer, note, params, norms)
        folded = self.fold_unscale and takes_grad_scale(optimizer)
        note.due = Due(divide=1.0 / inv_scale) if folded else Due(multiply=inv_scale)
        return True

    def _put_check(
        self, optimizer: Optimizer, note: Note, params: Sequence[Tensor], norms: Norms
    ) -> None:
        """Note a verdict where ``GradScaler`` looks for it too."""
        found, device = bool(norms.overflowed), params[0].device
        state = self.scaler.window.states[id(optimizer)]
        state["stage"] = OptState.UNSCALED
        state["found_inf_per_device"] = {device: torch.full((), float(found), device=device)}
        note.overflowed = [params[i] for i in norms.overflowed]
        self._settle(note, found)

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
            return whole(torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type))
        owners = self.owners(optimizers, parameters)
        notes = [self._note(owner) for owner in owners]
        if float(norm_type) == 2.0 and self._fits_one_pass(owners, parameters):
            norm = self._clip_in_one_pass(owners, notes, parameters, float(max_norm))
            if norm is not None:
                return norm
        strays_bad = self._unscale_strays(owners, parameters)
        low = any(map(is_low, owners))
        found = [self._check(o).found_inf for o in owners] if low else [self.unscale(owners)]
        if any(found) or strays_bad:
            for note in notes:
                self._settle(note, True)
            return torch.full((), float("inf"), device=self.device)
        if low:
            return clip_scaled_norm(owners, notes, parameters, float(max_norm), float(norm_type))
        norm = whole(torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type))
        for note in notes:
            note.norm = norm
        return norm

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

    def owners(
        self, optimizers: Iterable[Optimizer], parameters: Iterable[Tensor]
    ) -> list[Optimizer]:
        """The optimizers that hold any of ``parameters``."""
        wanted = set(map(id, parameters))
        return [o for o in optimizers if not wanted.isdisjoint(map(id, parameters_of(o)))]

    def step(self, optimizer: Optimizer) -> bool:
        """Finish the window for ``optimizer``: check, update the scale, then step or skip.

        Returns False if the step was skipped. Synchronises with the device once, unless
        :meth:`clip_norm` or :meth:`unscale` already have.

        Raises:
            OrderError: a second step in one window; gradients that no ``scale()`` produced;
                scaled gradients added to unscaled ones.
            OverflowStreakError: too many skips in a row.
        """
        if not self.scaler.is_enabled():
            self._apply(optimizer, Due())
            return True
        if not self._has_gradients(optimizer):
            return True
        if self.scaler.window.opened_by is None:
            self._step_without_window(optimizer)
            return True
        note = self._check(optimizer)
        if note.found_inf and not note.overflowed:
            note.overflowed = first_nonfinite(optimizer)
        window = self.scaler.window
        self.scaler.close_window(note.found_inf)
        window.states[id(optimizer)]["stage"] = OptState.STEPPED
        stepper = stepper_of(optimizer)
        if not note.found_inf:
            self._apply(optimizer, note.due)
        elif stepper is not None:
            stepper.skip()
        note.names = self.scaler.culprits.names(note.overflowed, optimizer)
        record(self.scaler, self.history, window, self._window_scale(), self._notes.values(), note)
        self.scaler.end_streak()
        return not note.found_inf

    def _apply(self, optimizer: Optimizer, due: Due) -> None:
        stepper = stepper_of(optimizer)
        if stepper is not None:
            stepper.step(due)
        elif takes_grad_scale(optimizer):
            plan = self._plans.get(optimizer)
            self._plans[optimizer] = step_fused(optimizer, plan, due.divide)
        else:
            optimizer.step()

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

    def _fits_one_pass(self, owners: Sequence[Optimizer], parameters: Sequence[Tensor]) -> bool:
        """The parameters are just those of whole optimizers, none of them unscaled yet."""
        if self.sharded or any(self._stage(owner) is not OptState.READY for owner in owners):
            return False
        mine = [id(p) for owner in owners for p in parameters_of(owner) if p.grad is not None]
        asked = list(map(id, parameters))
        return (
            (mine == asked or (len(mine) == len(asked) and set(mine) == set(asked)))
            and (is_power_of_two(self._window_scale()) or all(map(is_low, owners)))
            and is_uniform(gradients_of(parameters), dtypes_of(owners))
        )

    def _clip_in_one_pass(
        self,
        owners: Sequence[Optimizer],
        notes: Sequence[Note],
        parameters: Sequence[Tensor],
        max_norm: float,
    ) -> Tensor | None:
        """One read for norm and check, one product for unscale and clip. None: not possible."""
        scale, grads = self._window_scale(), gradients_of(parameters)
        device = grads[0].device
        norms = scaled_norms(grads, torch.full((), reciprocal(scale), device=device))
        found = norms.total is None
        if found and not norms.overflowed:
            return None
        for owner, note in zip(owners, notes, strict=True):
            self._put_check(owner, note, parameters, norms)
            note.norm = None if found else norms.host_total
        if norms.total is None:
            return torch.full((), float("inf"), device=device)
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

    def _note(self, optimizer: Optimizer) -> Note:
        window = self._enter_window()
        if window.opened_by is None:
            raise OrderError(
                "there are gradients to unscale, but no loss was scaled since the last step. "
                "Call accelerator.backward(loss) instead of loss.backward()."
            )
        if self._stage(optimizer) is OptState.STEPPED:
            raise OrderError(
                f"{type(optimizer).__name__} has already stepped in this window. Clip before "
                "optimizer.step(), and call accelerator.backward(loss) before the next step."
            )
        return self._notes.setdefault(id(optimizer), Note())

    def _enter_window(self) -> Window:
        """The present window; what was noted of another one is forgotten."""
        window = self.scaler.window
        if self._noted is not window:
            self._noted, self._notes = window, {}
            self._strays.clear()
            self._mixing.clear()
        return window

    def _settle(self, note: Note, found_inf: bool) -> None:
        lost = isinf(reciprocal(self._window_scale()))  # no gradient survived such a scale
        note.found_inf = agree_on_overflow(found_inf or lost, self.device, self.sharded)

    def _stage(self, optimizer: Optimizer) -> Any:
        state = self.scaler.window.states.get(id(optimizer))
        return OptState.READY if state is None else state["stage"]

    def _window_scale(self) -> float:
        before = self.scaler.window.before
        return self.scaler.get_scale() if before is None else before.scale

    def _has_gradients(self, optimizer: Optimizer) -> bool:
        # A rank whose shard is empty still takes part in what the others decide.
        return self.sharded or any(p.grad is not None for p in parameters_of(optimizer))


def _gradients(optimizers: Iterable[Optimizer]) -> list[Tensor]:
    return [grad for o in optimizers for grad in gradients_of(parameters_of(o))]
