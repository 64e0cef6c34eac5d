"""Is what an optimizer is about to step finite? Asked once a window, on the training thread."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isinf
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from .agreement import agree_on_overflow
from .config import OrderError, UnsupportedError
from .due import Due, stepper_of
from .gradients import (
    Norms,
    gradients_of,
    is_power_of_two,
    is_uniform,
    parameters_of,
    reciprocal,
    scaled_norms,
)
from .mixing import MixGuard
from .notes import Note, dtypes_of, is_low, takes_grad_scale, unscale_due
from .recording import Measure, Recorder
from .scaler import GradScaler
from .windows import Window

__all__ = ["Checks"]


class Checks:
    """The part of :class:`accel_scaler.boundary.Boundary` that unscales and checks.

    Args:
        scaler: whose windows these are.
        device: where gradients live and ranks communicate.
        fold_unscale: leave unscaling and clipping to the fused kernel where it can do them.
        sharded: ranks hold different gradients (FSDP), so they must agree on each verdict.
        recorder: puts windows on record; None: one in memory.
    """

    def __init__(
        self,
        scaler: GradScaler,
        device: torch.device,
        *,
        fold_unscale: bool = False,
        sharded: bool = False,
        recorder: Recorder | None = None,
    ) -> None:
        self.scaler, self.device = scaler, device
        self.fold_unscale, self.sharded = fold_unscale, sharded
        self.recorder = recorder or Recorder(scaler)
        self._noted: Window | None = None
        self._notes: dict[int, Note] = {}
        self._strays: set[int] = set()
        self._mixing = MixGuard()

    def forget_zeroed(self, optimizers: Iterable[Optimizer]) -> None:
        """Before each backward: remember the gradients that are unscaled already.

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
            self.recorder.forget(parameters_of(optimizer))
            self._mixing.forget(optimizer)
            self._strays.clear()

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
        norms = scaled_norms(grads, inv_scale, self.recorder.keeps)
        self._put_check(optimizer, note, params, norms)
        if norms.total is not None:
            self.recorder.measured(Measure(params, norms.host_total, norms.each))
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

    def owners(
        self, optimizers: Iterable[Optimizer], parameters: Iterable[Tensor]
    ) -> list[Optimizer]:
        """The optimizers that hold any of ``parameters``."""
        wanted = set(map(id, parameters))
        return [o for o in optimizers if not wanted.isdisjoint(map(id, parameters_of(o)))]

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
            self.recorder.forget()
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
