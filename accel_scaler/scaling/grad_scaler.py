"""GradScaler: torch's, with windows, several threads, bounds, hysteresis and an end to skips."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from ..config import ScalerConfig, is_number, is_positive
from ..errors import ConfigError, OrderError, UnsupportedError
from .collectives import agree_on_overflow, is_sharded
from .fused_call import call_fused
from .gradients import (
    has_nonfinite_gradient,
    leaves_of,
    match_layout,
    parameters_of,
    unscale_in_place,
)
from .overflow_streak import OverflowStreak
from .parameter_names import ParameterNames
from .thread_windows import ThreadedScaler
from .update_rule import Rule, ScaleState
from .window import OptimizerRecord, Snapshot, Window, stepped

__all__ = ["GradScaler"]

T = TypeVar("T")


class GradientReader(Protocol):
    """What steps an optimizer, perhaps while the next backward runs."""

    @property
    def unscales(self) -> bool:
        """Its step reads and writes ``.grad`` on another thread."""

    def settle_gradients(self) -> None:
        """Wait until no step reads ``.grad``."""


class GradScaler(ThreadedScaler):
    """A drop-in ``torch.amp.GradScaler`` that several threads may use.

    In a plain loop it does what torch's does, call for call and bit for bit, except that a
    fused optimizer is skipped reliably: torch's CPU kernels apply the update when ``found_inf``
    is above 1, keep an uninitialised momentum buffer when the first step overflows, and ignore
    the strides of a gradient.

    *Threads.* The thread that calls :meth:`scale` first in a window is the training thread; only
    it may call :meth:`update`. Another thread may call :meth:`unscale_` and :meth:`step`: on the
    training thread's window as it stands, or, through :meth:`bind`, on the window that was open
    then, whatever the training thread does meanwhile.

    *Cost.* :meth:`scale`, :meth:`unscale_` and :meth:`update` do not synchronise with the device
    (``update`` does with ``hysteresis`` above 1 or ``max_consecutive_skips``). :meth:`step`
    synchronises once, unless the optimizer is fused, on a GPU, and has stepped before.

    Args:
        device: device type of the scale: ``"cuda"``, ``"cpu"``, ``"xpu"``, ...
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in torch.
        min_scale, max_scale: the scale stays within these after every update. None: no bound.
        hysteresis: overflows in a row before the scale backs off.
        max_consecutive_skips: skipped windows in a row that are allowed; one more makes
            :meth:`update` raise ``OverflowStreakError``, naming the tensors that overflowed.

    Raises:
        ConfigError: an argument out of its range, naming it and what is allowed.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        min_scale: float | None = None,
        max_scale: float | None = None,
        hysteresis: int = 1,
        max_consecutive_skips: int | None = None,
    ) -> None:
        if enabled:
            ScalerConfig(
                init_scale=init_scale,
                growth_factor=growth_factor,
                backoff_factor=backoff_factor,
                growth_interval=growth_interval,
                min_scale=min_scale,
                max_scale=max_scale,
                hysteresis=hysteresis,
                max_consecutive_skips=max_consecutive_skips,
            )
        self.parameter_names = ParameterNames()
        self.overflow_streak = OverflowStreak(
            max_consecutive_skips, min_scale, self.parameter_names
        )
        self._make_transient()
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )
        self._min_scale, self._max_scale = min_scale, max_scale
        self._hysteresis = hysteresis

    def scale(self, outputs: Any) -> Any:
        """Multiply a tensor, or each of a list, tuple or iterable, by the window's scale.

        Opens a window if none is open. Returns ``outputs`` itself where scaling is disabled.
        Does not synchronise.
        """
        if self._enabled and self._bound is None:
            self._notice_changes(self.open_window())
            self.overflow_streak.note_losses(_tensors(outputs))
        scaled = super().scale(outputs)
        if self._enabled and self._bound is None:
            self._wait_before_backward(scaled)
        if self._enabled and not self._known:
            # Until an optimizer is seen, only the graph tells whose gradients to check.
            leaves = {id(t): t for t in self._seen() + leaves_of(_tensors(scaled))}
            self._leaves = [weakref.ref(leaf) for leaf in leaves.values()]
        return scaled

    def _wait_before_backward(self, scaled: Any) -> None:
        """A backward adds to gradients that a step may still be reading, and asks nobody."""
        waiting = [
            ref for ref in self._steppers.values() if (s := ref()) is not None and s.unscales
        ]
        if waiting and not isinstance(scaled, (Tensor, list, tuple)):
            _settle_gradients(waiting)  # scaled one by one, later
        tensor: Any
        for tensor in _tensors(scaled) if waiting else ():
            if tensor.requires_grad:
                tensor.register_hook(partial(_settle_gradients, waiting))

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients in place by the scale of their window.

        Checks them for inf and NaN on the way. Once for each optimizer and window, after all
        of its gradients have accumulated. Does not synchronise.

        Raises:
            RuntimeError: called twice, or after :meth:`step`, in one window.
            UnsupportedError: (a ``ValueError``) a float16 gradient.
        """
        if not self._enabled:
            return
        with self._lock, self.inside(self._due_window()):
            self._forbid_stranger(optimizer)
            self._check_scale_growth_tracker("unscale_")
            window, record = self.known_window, self.record_of(optimizer)
            if self._bound is None:
                record.forbid_mixture(type(stepped(optimizer)).__name__)
            params = parameters_of(optimizer)
            done = window.unscaled_among(params) if record.stage is OptState.READY else []
            with _put_aside(done):
                super().unscale_(optimizer)
            for p in done:
                _add_check(record, p)
            if window.sealed and record.verdict is not None:
                record.decide(record.verdict)  # not what this rank finds, or on another stream
            record.count = len(params)
            if self._managed:
                window.unscaled.update(map(id, params))
            self._known.add(stepped(optimizer))

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        params = parameters_of(optimizer)
        if not allow_fp16:
            _forbid_fp16(params)
        return unscale_in_place(params, inv_scale, found_inf)

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale (unless done), then ``optimizer.step(*args, **kwargs)`` if all is finite.

        Returns what ``optimizer.step`` returns, None when it was skipped. Synchronises once,
        except for a fused optimizer on a GPU that has state for all its parameters: its kernel
        skips by itself.

        Raises:
            RuntimeError: called twice in one window, or with ``closure=``.
            AssertionError: before any :meth:`scale`, or an optimizer without gradients.
        """
        if not self._enabled:
            result: float | None = optimizer.step(*args, **kwargs)
            return result
        with self._lock:
            self._forbid_stranger(optimizer)
            self._known.add(stepped(optimizer))
            window = self._due_window()
        fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        outer, self._local.stepping = getattr(self._local, "stepping", None), optimizer
        try:
            with self.inside(window):
                self._before_step(optimizer)
                if not fused or "grad_scaler" in inspect.signature(optimizer.step).parameters:
                    return super().step(optimizer, *args, **kwargs)
                return self._step_fused(optimizer, *args, **kwargs)
        finally:
            self._local.stepping = outer
            self._after_step(optimizer)

    def _before_step(self, optimizer: Optimizer) -> None:
        window = self.known_window
        record = window.known(optimizer)
        if record is not None and self._bound is None:
            record.forbid_mixture(type(stepped(optimizer)).__name__)
        if stepped(optimizer) is not optimizer:
            window.record(optimizer)
            return
        if record is not None and record.deferred:
            raise OrderError(
                f"scaler.step({type(optimizer).__name__}): its gradients, clipped, still are "
                "scaled, which only the step of the AsyncOptimizer, or of the prepared optimizer, "
                "around it knows. Call that one's step()."
            )
        is_ready = record is None or record.stage is OptState.READY
        if is_ready and window.unscaled_among(parameters_of(optimizer)):
            self.unscale_(optimizer)

    def _after_step(self, optimizer: Optimizer) -> None:
        """In a window that another optimizer has closed already its verdict counts, too."""
        window = self._window
        if self._bound is None and window.closed:
            record = window.known(optimizer)
            if record is not None and record.found_inf and not window.found_inf:
                self.close_window(True)

    def is_stepping(self, optimizer: Optimizer) -> bool:
        """Whether this thread is inside :meth:`step` of this optimizer: its verdict is taken."""
        return getattr(self._local, "stepping", None) is optimizer

    def close_window(self, found_inf: bool) -> None:
        """Update the scale for the open window, before its optimizers step.

        Call it again for each further optimizer of the window: the update starts over from
        where the window began, with all verdicts so far, so that a window updates the scale
        once. :meth:`unscale_` keeps dividing by the window's own scale. Where scaling is
        disabled the window closes, with scale 1. Does not synchronise.
        """
        with self._lock:
            window = self._window
            if not self._enabled:
                window.before = ScaleState(1.0, 0)
                return
            if window.before is None:
                window.before = self.read_state()
                window.scale = None if self._live is None else self._live.clone()
            # Of others too, that somebody has unscaled or stepped by hand.
            found_inf = found_inf or any(each.found_inf for each in window.states.values())
            self.overflow_streak.window_closed(
                window.before.scale, found_inf and not window.found_inf
            )
            window.found_inf = window.found_inf or found_inf
            self.write_state(self.rule.advance(window.before, window.found_inf))

    def manage(self, optimizer: Optimizer, stepper: GradientReader) -> None:
        """A boundary steps this optimizer, by ``stepper`` (both held weakly).

        Where gradients are there already, and no loss was scaled, synchronises with the device.
        """
        self._known.add(optimizer)
        self._steppers[id(optimizer)] = weakref.ref(stepper)
        known = self._managed.get(id(optimizer))
        if known is None or known() is not optimizer:
            self._managed.pop(id(optimizer), None)  # of one that is gone: it comes last now
            self._managed[id(optimizer)] = weakref.ref(optimizer)
            if self._window.opened_by is None:  # else they may be of the window
                why = "had gradients before it was given to this scaler, not scaled by it"
                self._mark_carried_over(optimizer, parameters_of(optimizer), why)

    def release(self, *optimizers: Optimizer) -> None:
        """No boundary steps these any more."""
        for optimizer in optimizers:
            self._managed.pop(id(optimizer), None)
            self._steppers.pop(id(optimizer), None)

    @property
    def managed(self) -> list[Optimizer]:
        """Optimizers that a boundary steps, in the order they came: the same on every rank."""
        refs = list(self._managed.values())
        return [optimizer for ref in refs if (optimizer := ref()) is not None]

    def open_window(self) -> Window:
        """The open window; a new one if the last one was stepped."""
        with self._lock:
            if self._window.closed:
                before = self._window
                self._next_window()
                self._find_carried_over(before)
            if self._window.opened_by is None:
                self._window.opened_by = threading.get_ident()
            return self._window

    @property
    def window_scale(self) -> float:
        """The scale of the open window, or of the one that was closed last. As :meth:`get_scale`
        otherwise."""
        before = self._window.before
        return self.get_scale() if before is None else before.scale

    def abandon_window(self) -> None:
        """Give up the open window, if any: the next :meth:`scale` opens another.

        Gradients that it leaves unscaled have to be zeroed before that.
        """
        with self._lock:
            self._next_window()

    def _next_window(self) -> None:
        before = self._window
        super()._next_window()
        if not before.closed:  # given up, or ended by hand
            self._find_carried_over(before)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of ``torch.amp.GradScaler``. No-op if disabled.

        Raises:
            ConfigError: a missing entry, one that is no number, or a scale of 0 without
                ``min_scale`` to raise it; nothing has been changed.
            RuntimeError: an empty dict (from a disabled scaler).
        """
        if not self._enabled:
            return
        with self._lock:
            before = self.read_state().scale
            super().load_state_dict(state_dict)
            now = self.read_state().scale
            if now != before:
                why = f"has gradients scaled by {before:g}, and a state with {now:g} was loaded"
                for optimizer in self.managed:
                    self._mark_carried_over(optimizer, parameters_of(optimizer), why)

    def _mark_carried_over(self, optimizer: Optimizer, params: Iterable[Tensor], why: str) -> None:
        """Gradients that the next window's must not be added to, unless they are zeroed first."""
        if self._enabled and not Snapshot.of(params).is_zero:
            self._window.record(optimizer).carried_over = why

    def _find_carried_over(self, before: Window) -> None:
        """Of a window that ended without their optimizer's step (checked where some are left)."""
        managed = self.managed if self._enabled else []
        if not managed:
            return
        now = self.read_state().scale
        if before.before is not None:
            scale = before.before.scale
        else:
            scale = now if before.scale is None else float(before.scale)
        for optimizer in managed:
            record, params = before.known(optimizer), parameters_of(optimizer)
            stage = OptState.READY if record is None else record.stage
            if record is not None and stage is OptState.STEPPED:
                if record.still_scaled is not None:
                    record.still_scaled.unscale()
                continue
            if record is not None and record.carried_over:
                why = record.carried_over
            elif stage is OptState.UNSCALED or scale != now:
                how = (
                    "unscaled"
                    if stage is OptState.UNSCALED
                    else f"scaled by {scale:g}, now {now:g}"
                )
                why = f"sat out the window before with gradients in it, which are {how}"
            else:
                continue  # goes on accumulating
            self._mark_carried_over(optimizer, params, why)

    def _notice_changes(self, window: Window) -> None:
        """Before another loss is scaled: which gradients of the window are unscaled already?

        Where they are gone or zero (a batch thrown away after a look at its norm) their owner
        starts over: what comes next is scaled, and not checked yet. The others are remembered,
        for a backward must not add scaled gradients to them. In a plain loop, which no boundary
        steps, that is left to the caller, as torch does.
        """
        if window.closed:
            return
        for optimizer in self.managed:
            record = window.known(optimizer)
            if record is None:
                continue
            if record.carried_over and Snapshot.of(parameters_of(optimizer)).is_zero:
                record.carried_over = ""
            if record.stage is not OptState.UNSCALED:
                continue
            params = parameters_of(optimizer)
            record.unscaled_before = Snapshot.of(params)
            kept = not record.unscaled_before.is_zero
            if not agree_on_overflow(kept, params[0].device, self.sharded or is_sharded(params)):
                window.forget(optimizer)
        for key, (p, _) in list(window.unowned.items()):
            now = Snapshot.of([p])
            window.unowned[key] = p, now
            if now.is_zero:
                del window.unowned[key]

    def end_streak(self) -> None:
        """Raise ``OverflowStreakError`` if the run of skips is over its limit."""
        self.overflow_streak.check(self._consecutive_skips, self.get_scale)

    def _step_fused(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """torch's fused branch, with the skip decided on the host where the kernel cannot."""
        if "closure" in kwargs:
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        scale, _ = self._check_scale_growth_tracker("step")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        if state["stage"] is OptState.READY:
            self._check_inf_per_device(optimizer)
        params = [p for p in parameters_of(optimizer) if p.grad is not None]
        if params and not state["found_inf_per_device"]:  # unscale_() came before the gradients
            raise AssertionError("No inf checks were recorded for this optimizer.")
        found = self._total_found_inf(state, scale.device)
        on_host = scale.device.type == "cpu" or any(not optimizer.state.get(p) for p in params)
        if on_host and bool(found):
            self.overflow_streak.note_skip(optimizer, self._consecutive_skips)
            state["stage"] = OptState.STEPPED
            return None
        if scale.device.type == "cpu":
            match_layout(params)
        own = getattr(optimizer, "grad_scale", None)
        ready = state["stage"] is OptState.READY
        grad_scale = scale * (1.0 if own is None else own) if ready else own
        result = call_fused(optimizer, grad_scale, None if on_host else found, *args, **kwargs)
        state["stage"] = OptState.STEPPED
        return result

    def _maybe_opt_step(
        self, optimizer: Optimizer, optimizer_state: dict[str, Any], *args: Any, **kwargs: Any
    ) -> float | None:
        if any(v.item() for v in optimizer_state["found_inf_per_device"].values()):
            self.overflow_streak.note_skip(optimizer, self._consecutive_skips)
            skip = getattr(optimizer, "skip_step", None)  # an AsyncOptimizer wants to know
            if skip is not None:
                skip()
            return None
        result: float | None = optimizer.step(*args, **kwargs)
        return result

    @staticmethod
    def _total_found_inf(state: dict[str, Any], device: torch.device) -> Tensor:
        """The sum over devices, at most 1: torch's CPU kernels compare with exactly 1.0."""
        total = torch.zeros((), dtype=torch.float32, device=device)
        for found in state["found_inf_per_device"].values():
            total = total + found.to(device, non_blocking=True).reshape(())
        return total.clamp(max=1.0)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Close the window: back off after an overflow, else count towards growth.

        Args:
            new_scale: set the scale to this instead (a number or a one-element tensor on the
                scaler's device type); it is copied, and kept within the bounds.

        Does not synchronise on a GPU unless ``hysteresis`` > 1 or ``max_consecutive_skips``.

        Raises:
            OrderError: (a ``RuntimeError``) on another thread than the training thread.
            AssertionError: before any :meth:`scale`, or nothing was checked in this window.
            OverflowStreakError: too many skips in a row; the scale has been updated.
        """
        if not self._enabled:
            return
        with self._lock:
            self._forbid_other_thread("update")
            scale, tracker = self._check_scale_growth_tracker("update")
            if self._window.closed:
                # Its boundary has updated the scale, once for all of its optimizers.
                self._next_window()
                if new_scale is None:
                    return
            # A step still due on another thread divides by what this window was scaled with.
            self._window.scale = scale.clone()
            if new_scale is not None:
                self._set_scale(scale, new_scale)
                self._next_window()
                return
            records = [r for r in self._window.states.values() if r["found_inf_per_device"]]
            if not records:
                raise AssertionError("No inf checks were recorded prior to update.")
            if all(record.verdict is not None for record in records):  # the host knows
                self._apply_rule(scale, tracker, any(record.verdict for record in records))
            else:
                found = [self._total_found_inf(record, scale.device) for record in records]
                self._apply_rule(scale, tracker, torch.stack(found).amax())
            self._next_window()
            self.end_streak()

    def _apply_rule(self, scale: Tensor, tracker: Tensor, found_inf: Tensor | bool) -> None:
        waits = self._hysteresis > 1 or self.overflow_streak.limit is not None
        if isinstance(found_inf, bool) or waits or scale.device.type == "cpu":
            before, found = self.read_state(), bool(found_inf)
            self.overflow_streak.window_closed(before.scale, found)
            self.write_state(self.rule.advance(before, found))
            return
        torch._amp_update_scale_(
            scale,
            tracker,
            found_inf,
            self._growth_factor,
            self._backoff_factor,
            self._growth_interval,
        )
        self._keep_in_bounds(scale)

    def _keep_in_bounds(self, scale: Tensor) -> None:
        if self._min_scale is not None or self._max_scale is not None:
            scale.clamp_(self._min_scale, self._max_scale)

    def _set_scale(self, scale: Tensor, new_scale: float | Tensor) -> None:
        if isinstance(new_scale, Tensor):
            if (
                new_scale.device.type != self._device
                or new_scale.numel() != 1
                or new_scale.requires_grad
            ):
                raise AssertionError(
                    f"new_scale should be a number or a one-element tensor on {self._device!r} "
                    f"with requires_grad=False, got {new_scale!r}."
                )
            scale.copy_(new_scale.reshape(()))
        elif is_positive(new_scale):
            scale.fill_(new_scale)
        else:
            raise ConfigError(
                f"new_scale: got {new_scale!r}, expected a finite number > 0 (float32)."
            )
        self._keep_in_bounds(scale)

    def backoff(self, factor: float | None = None) -> None:
        """Multiply the scale by ``factor`` (default: the back-off factor) and end the window.

        For loops that look at :meth:`get_overflow_flag` themselves: the window counts as
        skipped if it overflowed, the growth tracker starts again, ``hysteresis`` is passed by.
        The gradients stay as they are; zero them. Synchronises.

        Raises:
            ConfigError: a factor outside (0, 1).
            OverflowStreakError: too many skips in a row; the scale has been updated.
        """
        if not self._enabled:
            return
        factor = self._backoff_factor if factor is None else factor
        if not (is_number(factor) and 0 < factor < 1):
            raise ConfigError(f"backoff: got factor={factor!r}, expected a number in (0, 1).")
        with self._lock:
            self._forbid_other_thread("backoff")
            scale, _ = self._check_scale_growth_tracker("backoff")
            skipped = not self._window.closed and self._overflowed(self._targets())
            if skipped:
                for target in self._targets():
                    self.overflow_streak.note_skip(target, self._consecutive_skips)
                self.overflow_streak.window_closed(self.get_scale(), True)
            rule = Rule(2.0, factor, 1, self._min_scale, self._max_scale)
            state = rule.advance(self.read_state(), True)
            skips = self._consecutive_skips + int(skipped)
            self._window.scale = scale.clone()
            self.write_state(ScaleState(state.scale, 0, skips))
            self._next_window()
            self.end_streak()

    def get_overflow_flag(self, *optimizers: Optimizer) -> bool:
        """Whether the gradients of this window hold an inf or a NaN.

        Looks at the gradients of ``optimizers``; without any, of every optimizer this scaler
        has seen; before it has seen one, of the parameters that the scaled outputs lead to.
        In a bound job the verdict is the one taken by :meth:`bind`. Synchronises.
        """
        if not self._enabled:
            return False
        with self._lock:
            return self._overflowed(list(optimizers) or self._targets())

    def _targets(self) -> list[Optimizer | Tensor]:
        here = self._per_optimizer_states
        bound = self._bound is not None
        known = [o for o in self._known if not bound or id(o) in here]
        return cast("list[Optimizer | Tensor]", known or self._seen())

    def _overflowed(self, targets: Iterable[Optimizer | Tensor]) -> bool:
        for target in targets:
            if isinstance(target, Tensor):
                if has_nonfinite_gradient(target):
                    return True
                continue
            state = self.known_window.known(target)
            if state and state["found_inf_per_device"]:
                if any(bool(f) for f in state["found_inf_per_device"].values()):
                    return True
                continue
            if any(map(has_nonfinite_gradient, parameters_of(target))):
                return True
        return False

    def _seen(self) -> list[Tensor]:
        return [leaf for ref in self._leaves if (leaf := ref()) is not None]


@contextmanager
def _put_aside(params: Iterable[Tensor]) -> Iterator[None]:
    """Without their gradients, for a while."""
    held = [(p, p.grad) for p in params]
    for p, _ in held:
        p.grad = None
    try:
        yield
    finally:
        for p, grad in held:
            p.grad = grad


def _add_check(record: OptimizerRecord, p: Tensor) -> None:
    """Look at a gradient that is unscaled already. Synchronises."""
    assert p.grad is not None
    flags = record["found_inf_per_device"]
    flag = torch.full((), float(has_nonfinite_gradient(p)), device=p.grad.device)
    flags[p.grad.device] = torch.maximum(flags.get(p.grad.device, flag), flag)


def _tensors(outputs: Any) -> list[Tensor]:
    """The tensors in nested lists and tuples; a lazy iterable is left alone."""
    if isinstance(outputs, Tensor):
        return [outputs]
    if isinstance(outputs, (list, tuple)):
        return [tensor for item in outputs for tensor in _tensors(item)]
    return []


def _settle_gradients(
    waiting: Iterable[weakref.ref[GradientReader]], _: Tensor | None = None
) -> None:
    for ref in waiting:
        stepper = ref()
        if stepper is not None:
            stepper.settle_gradients()


def _forbid_fp16(params: Iterable[Tensor]) -> None:
    for p in params:
        if p.grad is not None and p.grad.dtype is torch.float16:
            raise UnsupportedError(
                f"Attempting to unscale FP16 gradients: a parameter of shape {tuple(p.shape)} is "
                "float16. Step it through float32 masters: AsyncOptimizer(optimizer, model, "
                "scaler=scaler, mode='sync'), or attach(accelerator); or load the model in "
                "float32 (model.float()) and let autocast run it in float16."
            )
