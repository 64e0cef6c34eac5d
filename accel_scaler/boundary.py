"""The end of an accumulation window: unscale, check, clip, update the scale, step. In this order.

Everything here runs on the training thread and decides on the host, so that a skipped step is
known (and the LR schedule can wait) whichever optimizer is used, fused or not.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from .agreement import agree_on_overflow
from .config import OrderError
from .fused import FusedAdam, step_fused
from .gradients import (
    MOST_NAMED,
    clip_coefficient,
    gradients_of,
    has_nonfinite_gradient,
    is_power_of_two,
    is_uniform,
    nonfinite,
    nonzero,
    parameters_of,
    scaled_norms,
)
from .scaler import GradScaler
from .telemetry import History, Record
from .windows import Window

__all__ = ["Boundary"]

logger = logging.getLogger("accel_scaler")


@dataclass(slots=True)
class _Note:
    """What the boundary knows of one optimizer in the present window."""

    found_inf: bool = False
    norm: Tensor | float | None = None
    grad_scale: Tensor | None = None
    """Left for the fused kernel to divide by: the gradients are still scaled, not clipped."""
    overflowed: Sequence[Tensor] = ()
    names: Sequence[str] = ()
    """Names of ``overflowed``, once it has been put on record."""


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
        self._notes: dict[int, _Note] = {}
        self._strays: set[int] = set()
        self._unscaled: list[tuple[int, Tensor, Tensor, int]] = []
        self._plans: weakref.WeakKeyDictionary[Optimizer, FusedAdam | None] = (
            weakref.WeakKeyDictionary()
        )
        self._told: set[str] = set()

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
            entries = [
                (id(optimizer), p, grad, grad._version)
                for p in parameters_of(optimizer)
                if (grad := p.grad) is not None
            ]
            kept = any(nonzero(grad) for _, _, grad, _ in entries)
            if agree_on_overflow(kept, self.device, self.sharded):
                self._unscaled += entries
                continue
            del window.states[id(optimizer)]
            self._notes.pop(id(optimizer), None)
            self._unscaled = [entry for entry in self._unscaled if entry[0] != id(optimizer)]
            self._strays.clear()

    def norm_so_far(self, parameters: Sequence[Tensor], norm_type: float) -> Tensor:
        """Off the boundary: the norm of what has accumulated, unscaled. Changes nothing."""
        if "norm" not in self._told:
            self._told.add("norm")
            logger.warning(
                "clip_grad_norm_ before the last micro-batch of an accumulation window clips "
                "nothing and returns the norm so far; the last micro-batch clips. (Said once.)"
            )
        total = torch.nn.utils.get_total_norm(gradients_of(parameters), norm_type)
        return total / self.scaler.get_scale()

    def unscale(self, optimizers: Iterable[Optimizer]) -> bool:
        """Unscale and check each optimizer that has gradients; once a window, later calls pass.

        Returns whether any of them overflowed. Synchronises with the device.
        """
        if not self.scaler.is_enabled():
            return False
        found = False
        for optimizer in filter(self._has_gradients, optimizers):
            note = self._check(optimizer)
            if note.grad_scale is not None:
                # Clipped before, for the kernel to do; somebody wants to see the outcome.
                torch._foreach_div_(gradients_of(parameters_of(optimizer)), note.grad_scale)
                note.grad_scale = None
            found = found or note.found_inf
        return found

    def _check(self, optimizer: Optimizer) -> _Note:
        """Unscale and check, unless that was done in this window."""
        note = self._note(optimizer)
        self._forbid_mixed(optimizer)
        if self._stage(optimizer) is OptState.READY:
            window = self.scaler.window
            with self.scaler.inside(window if window.closed else None):
                self.scaler.unscale_(optimizer)
            flags = window.states[id(optimizer)]["found_inf_per_device"].values()
            self._settle(note, any(bool(flag) for flag in flags))
        return note

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
            return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
        owners = self.owners(optimizers, parameters)
        notes = [self._note(owner) for owner in owners]
        if float(norm_type) == 2.0 and self._fits_one_pass(owners, parameters):
            norm = self._clip_in_one_pass(owners, notes, parameters, float(max_norm))
            if norm is not None:
                return norm
        strays_bad = self._unscale_strays(owners, parameters)
        if self.unscale(owners) or strays_bad:
            for note in notes:
                self._settle(note, True)
            return torch.full((), float("inf"), device=self.device)
        norm = torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type=norm_type)
        for note in notes:
            note.norm = norm
        return norm

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
            optimizer.step()
            return True
        if not self._has_gradients(optimizer):
            return True
        if self.scaler.window.opened_by is None:
            self._step_without_window(optimizer)
            return True
        note = self._check(optimizer)
        if note.found_inf and not note.overflowed:
            note.overflowed = self._look_for_culprits(optimizer)
        window = self.scaler.window
        self.scaler.close_window(note.found_inf)
        window.states[id(optimizer)]["stage"] = OptState.STEPPED
        if not note.found_inf:
            self._apply(optimizer, note.grad_scale)
        self._record(window, optimizer, note)
        self.scaler.end_streak()
        return not note.found_inf

    def _apply(self, optimizer: Optimizer, grad_scale: Tensor | None) -> None:
        if _takes_grad_scale(optimizer):
            plan = self._plans.get(optimizer)
            self._plans[optimizer] = step_fused(optimizer, plan, grad_scale)
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
        optimizer.step()

    def _fits_one_pass(self, owners: Sequence[Optimizer], parameters: Sequence[Tensor]) -> bool:
        """The parameters are just those of whole optimizers, none of them unscaled yet."""
        if self.sharded or any(self._stage(owner) is not OptState.READY for owner in owners):
            return False
        mine = [id(p) for owner in owners for p in parameters_of(owner) if p.grad is not None]
        asked = list(map(id, parameters))
        return (
            (mine == asked or (len(mine) == len(asked) and set(mine) == set(asked)))
            and is_power_of_two(self._window_scale())
            and is_uniform(gradients_of(parameters))
        )

    def _clip_in_one_pass(
        self,
        owners: Sequence[Optimizer],
        notes: Sequence[_Note],
        parameters: Sequence[Tensor],
        max_norm: float,
    ) -> Tensor | None:
        """One read for norm and check, one product for unscale and clip. None: not possible."""
        scale, grads = self._window_scale(), gradients_of(parameters)
        device = grads[0].device
        norms = scaled_norms(grads, torch.full((), 1.0 / scale, device=device))
        found = norms.total is None
        if found and not norms.overflowed:
            return None
        for owner, note in zip(owners, notes, strict=True):
            state = self.scaler.window.states[id(owner)]
            state["stage"] = OptState.UNSCALED
            state["found_inf_per_device"] = {device: torch.full((), float(found), device=device)}
            note.norm = None if found else norms.host_total
            note.overflowed = [parameters[i] for i in norms.overflowed]
            self._settle(note, found)
        if norms.total is None:
            return torch.full((), float("inf"), device=device)
        coefficient = clip_coefficient(norms.total, max_norm)
        if self.fold_unscale and all(map(_takes_grad_scale, owners)):
            for note in notes:
                note.grad_scale = scale / coefficient
        else:
            torch._foreach_mul_(grads, coefficient / scale)
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

    def _look_for_culprits(self, optimizer: Optimizer) -> list[Tensor]:
        """Some parameter with a non-finite gradient: the first few, to keep a skip cheap."""
        by_size = sorted(parameters_of(optimizer), key=lambda p: p.numel())
        return list(islice((p for p in by_size if has_nonfinite_gradient(p)), MOST_NAMED))

    def _record(self, window: Window, optimizer: Optimizer, note: _Note) -> None:
        culprits = self.scaler.culprits
        note.names = culprits.names(note.overflowed, optimizer)
        culprits.count(note.names)
        names = dict.fromkeys(name for each in self._notes.values() for name in each.names)
        if self.scaler.get_scale() < 1.0 and "low" not in self._told:
            self._told.add("low")
            logger.warning(
                "the loss scale fell below 1, so gradients overflow whatever it is. Last seen in: "
                f"{', '.join(names) or 'no single tensor'}. min_scale keeps it up, "
                "max_consecutive_skips ends such a run. (Said once.)"
            )
        self.history.add(
            Record(
                index=window.index,
                scale=self._window_scale(),
                next_scale=self.scaler.get_scale(),
                skipped=window.found_inf,
                grad_norm=None if note.norm is None else float(note.norm),
                overflowed=tuple(names),
            )
        )

    def _note(self, optimizer: Optimizer) -> _Note:
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
        return self._notes.setdefault(id(optimizer), _Note())

    def _enter_window(self) -> Window:
        """The present window; what was noted of another one is forgotten."""
        window = self.scaler.window
        if self._noted is not window:
            self._noted, self._notes = window, {}
            self._strays.clear()
            self._unscaled.clear()
        return window

    def _settle(self, note: _Note, found_inf: bool) -> None:
        note.found_inf = agree_on_overflow(found_inf, self.device, self.sharded)

    def _forbid_mixed(self, optimizer: Optimizer) -> None:
        for owner, p, grad, version in self._unscaled:
            if owner == id(optimizer) and (p.grad is not grad or grad._version != version):
                raise OrderError(
                    f"a backward added scaled gradients to the unscaled ones of "
                    f"{type(optimizer).__name__}: they were unscaled or clipped before the last "
                    "micro-batch. Accumulate under `with accelerator.accumulate(model):`, or clip "
                    "only after the last backward; then zero the gradients and go on."
                )

    def _stage(self, optimizer: Optimizer) -> Any:
        state = self.scaler.window.states.get(id(optimizer))
        return OptState.READY if state is None else state["stage"]

    def _window_scale(self) -> float:
        before = self.scaler.window.before
        return self.scaler.get_scale() if before is None else before.scale

    def _has_gradients(self, optimizer: Optimizer) -> bool:
        # A rank whose shard is empty still takes part in what the others decide.
        return self.sharded or any(p.grad is not None for p in parameters_of(optimizer))


def _takes_grad_scale(optimizer: Optimizer) -> bool:
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))
