"""GradScaler: torch's, with windows, several threads, bounds, hysteresis and a limit on skips."""

from __future__ import annotations

import inspect
import operator
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary, WeakSet, ref

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from ..config import ScalerConfig, is_number, is_positive
from ..devices import present_type
from ..errors import ConfigError, OrderError, UnsupportedError, shown
from ..models import untraced
from .gradients import (
    first_nonfinite,
    gradients_of,
    has_nonfinite_gradient,
    leaves_of,
    match_layout,
    multiply_in_place,
    parameters_of,
    reciprocal,
    unscale_in_place,
)
from .parameter_names import ParameterNames
from .ranks import Ranks
from .skips import SkipStreak
from .thread_windows import ThreadWindows
from .update_rule import HostMirror, Rule, ScaleState
from .window import OptimizerRecord, Snapshot, Window, stepped

T = TypeVar("T")

_TORCH_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


class GradientReader(Protocol):
    """Updates an optimizer, perhaps on another thread."""

    def wait_for_gradients(self) -> None:
        """Wait until no update reads ``.grad``: a backward is about to add to it."""


class GradScaler(torch.amp.GradScaler):
    """A drop-in ``torch.amp.GradScaler`` that several threads may use.

    In a plain loop it equals torch's, call for call and bit for bit, except that it skips a
    fused optimizer reliably: torch's CPU kernels apply the update when ``found_inf`` is above 1,
    keep an uninitialised momentum buffer when the first step overflows, and ignore the strides
    of a gradient.

    *Threads.* The thread that calls :meth:`scale` first in a window is the training thread; only
    it may call :meth:`update`. Another thread may call :meth:`unscale_` and :meth:`step` on that
    window, or, in a job made by :meth:`bind`, on the window that was open when it was made.

    *Cost.* :meth:`scale`, :meth:`unscale_` and :meth:`update` do not synchronise with the device
    (``update`` does with ``hysteresis`` above 1 or ``max_consecutive_skips``). :meth:`step`
    synchronises once, unless the optimizer is fused, on a GPU, and has stepped before.

    Args:
        device: device type of the scale: ``"cuda"``, ``"cpu"``, ``"xpu"``, ... None: the type of
            ``torch.accelerator``, else the CPU. A number is ``init_scale``, the first argument of
            ``torch.cuda.amp.GradScaler``; give the others by name then.
        enabled: False: no scaling; :meth:`step` steps, everything else does nothing.

    The other arguments are the fields of :class:`ScalerConfig` with these names.

    Raises:
        ConfigError: an argument out of its range; it names the argument and the range.
    """

    _growth_tracker: Tensor | None

    # 1. torch's scaler.

    def __init__(
        self,
        device: str | float | None = None,
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
        device, init_scale = _device_and_scale(device, init_scale)
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
        self._min_scale, self._max_scale, self._hysteresis = min_scale, max_scale, hysteresis
        self._consecutive_skips = self._spikes = 0
        self._was_loaded = False
        self.skips = SkipStreak(max_consecutive_skips)
        self._make_transient()
        super().__init__(
            device, init_scale, growth_factor, backoff_factor, growth_interval, enabled
        )

    def _make_transient(self) -> None:
        """Make the attributes of this process, which are not pickled."""
        self._windows = ThreadWindows()
        self.ranks, self.parameter_names = Ranks(), ParameterNames()
        self._live: Tensor | None = None
        self._mirror = HostMirror()
        self._lock = threading.RLock()
        self._known: WeakSet[Optimizer] = WeakSet()
        """Optimizers whose gradients :meth:`get_overflow_flag` reads."""
        self._leaves: list[ref[Tensor]] = []
        """Until an optimizer is known: the parameters that a backward from the window's outputs
        reaches. Dropped with the window: torch swaps no parameter that has a weak reference."""
        self._managed: WeakKeyDictionary[Optimizer, ref[GradientReader]] = WeakKeyDictionary()
        """Optimizers that a boundary steps, in the order of their arrival, and their steppers."""

    # Note [torch's methods in the window of a thread]
    # torch.amp.GradScaler's methods read `_scale` and `_per_optimizer_states`, and assign an empty
    # dict to the latter where a window ends. Here both are properties: a thread that works on a
    # window of its own (`ThreadWindows.bound`) reads that window, every other thread the open one.

    @property
    def _scale(self) -> Tensor | None:
        bound = self._windows.bound
        return self._live if bound is None or bound.scale is None else bound.scale

    @_scale.setter
    def _scale(self, value: Tensor | None) -> None:
        self._live = value

    @property
    def _per_optimizer_states(self) -> Any:
        return self._windows.current.states

    @_per_optimizer_states.setter
    def _per_optimizer_states(self, value: Any) -> None:
        self._next_window()

    def _lazy_init_scale_growth_tracker(self, dev: Any) -> None:
        if self._live is None:  # Accelerate's FSDP2 calls it again (accelerate #4289)
            super()._lazy_init_scale_growth_tracker(dev)

    @untraced
    def scale(self, outputs: Any) -> Any:
        """Multiply a tensor, or each of a list, tuple or iterable, by the window's scale. Opens a
        window if none is open. Returns ``outputs`` itself where scaling is disabled. Waits for a
        step that reads gradients on another thread. Does not synchronise, unless a boundary has to
        look at gradients that an earlier call has left."""
        opens = self._enabled and self._windows.bound is None
        if opens:
            window = self.open_window()
            self._start_over_where_dropped(window)
            if self._managed:  # else nobody reads them
                window.losses.note(_tensors(outputs))
            for reader in list(self._managed.values()):  # a step may still read the gradients
                if (stepper := reader()) is not None:
                    stepper.wait_for_gradients()
        scaled = super().scale(outputs)
        if opens and not self._known:
            self._leaves += map(ref, leaves_of(_tensors(scaled)))
        return scaled

    @untraced
    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide the optimizer's gradients in place by the scale of their window, and check them.

        Call it once for each optimizer and window, after all gradients have accumulated.
        Synchronises only where optimizers share parameters.

        Raises:
            RuntimeError: called twice, or after :meth:`step`, in one window.
            UnsupportedError: (a ``ValueError``) a float16 gradient.
        """
        if not self._enabled:
            return
        optimizer = self._windows.meant(optimizer)
        with self._lock, self._windows.inside(self._windows.to_step()):
            self._check_scale_growth_tracker("unscale_")
            window, record = self._windows.current, self._record_to_step(optimizer)
            super().unscale_(optimizer)
            if record.verdict is not None:  # in a job: of all ranks, and not on another stream
                record.decide(record.verdict)
            if self._managed:
                window.unscaled.update(map(id, parameters_of(optimizer)))

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        params = parameters_of(optimizer)
        # Shared parameters that another optimizer has unscaled are only checked. Synchronises.
        if shared := self._windows.current.unscaled_among(params):
            keys = set(map(id, shared))
            params = [p for p in params if id(p) not in keys]
            found_inf = found_inf + float(any(map(has_nonfinite_gradient, shared)))
        for p in () if allow_fp16 else params:
            if p.grad is not None and p.grad.dtype is torch.float16:
                raise UnsupportedError(
                    f"Attempting to unscale FP16 gradients: a parameter of shape {tuple(p.shape)} "
                    "is float16. Step it through a float32 copy: AsyncOptimizer(optimizer, model, "
                    "scaler=scaler, step_mode='sync'), or attach(accelerator); or load the model "
                    "in float32 (model.float()) and let autocast run it in float16."
                )
        flags = unscale_in_place(params, inv_scale, found_inf)
        return flags or ({found_inf.device: found_inf} if shared else {})

    @untraced
    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Unscale (unless done), then ``optimizer.step(*args, **kwargs)`` if all is finite.

        Returns the result of ``optimizer.step``, None when it was skipped. Synchronises once,
        except for a fused optimizer on a GPU that has state for all its parameters: its kernel
        skips by itself.

        Raises:
            RuntimeError: called twice in one window, or with ``closure=``.
            AssertionError: before any :meth:`scale`, or no gradients and not fused, as in torch.
        """
        if not self._enabled:
            result: float | None = optimizer.step(*args, **kwargs)
            return result
        # Refused before there is a record, since torch pickles no scaler that has some.
        if "closure" in kwargs:
            raise RuntimeError("Closure use is not currently supported if GradScaler is enabled.")
        self._check_scale_growth_tracker("step")
        optimizer = self._windows.meant(optimizer)
        with self._lock:
            window = self._windows.to_step()
        fused = getattr(optimizer, "_step_supports_amp_scaling", False)
        try:
            with self._windows.inside(window, stepping=optimizer):
                self._before_step(optimizer)
                if fused and "grad_scaler" in inspect.signature(optimizer.step).parameters:
                    return super().step(optimizer, *args, **kwargs)
                return self._step(optimizer, fused, *args, **kwargs)
        finally:
            self._after_step(optimizer)

    def _record_to_step(self, optimizer: Optimizer) -> OptimizerRecord:
        """The record of an optimizer that is to be unscaled or stepped in the present window."""
        with self._lock:
            window = self._windows.current
            if window.wrappers and window.known(optimizer) is None:
                raise OrderError(
                    f"{type(optimizer).__name__} was not given to GradScaler.bind() with this job; "
                    "name every optimizer that the job unscales or steps."
                )
            record = window.record(optimizer)
            if self._windows.bound is None:
                record.forbid_mixture(type(stepped(optimizer)).__name__)
            self._known.add(stepped(optimizer))
            return record

    def _before_step(self, optimizer: Optimizer) -> None:
        record = self._record_to_step(optimizer)
        if stepped(optimizer) is not optimizer:
            return
        if record.deferred:
            raise OrderError(
                f"scaler.step({type(optimizer).__name__}): its gradients were clipped and still "
                "are scaled, which only the AsyncOptimizer or the prepared optimizer around it "
                "accounts for. Call that one's step()."
            )
        shared = self._windows.current.unscaled_among(parameters_of(optimizer))
        if record.stage is OptState.READY and shared:
            self.unscale_(optimizer)

    def _after_step(self, optimizer: Optimizer) -> None:
        """Add this optimizer's verdict to a window that another one has closed already."""
        window = self.window
        if window.closed and self._windows.bound is None:
            record = window.known(optimizer)
            if record is not None and record.found_inf and not window.found_inf:
                self.close_window(True)

    def _step(self, optimizer: Any, fused: bool, *args: Any, **kwargs: Any) -> float | None:
        """torch's step, but the host decides on the skip where a fused kernel cannot."""
        record, scale = self.record_of(optimizer), self._check_scale_growth_tracker("step")[0]
        if record.stage is OptState.STEPPED:
            raise RuntimeError("step() has already been called since the last update().")
        is_scaled = record.stage is OptState.READY
        if is_scaled:
            (self._check_inf_per_device if fused else self.unscale_)(optimizer)
        params = [p for p in parameters_of(optimizer) if p.grad is not None]
        if (params or not fused) and not record["found_inf_per_device"]:
            raise AssertionError("No inf checks were recorded for this optimizer.")
        found, on_cpu = self._total_found_inf(record, scale.device), scale.device.type == "cpu"
        # A kernel that makes its state leaves it uninitialised where it skips.
        on_host = not fused or on_cpu or any(not optimizer.state.get(p) for p in params)
        result: float | None = None
        if on_host and bool(found):
            self._note_skip(optimizer)
            if hasattr(optimizer, "skip_step"):  # an AsyncOptimizer
                optimizer.skip_step()
        elif fused:
            if on_cpu:
                match_layout(params, optimizer.state)
            grad_scale = scale if is_scaled else None
            result = call_fused(optimizer, grad_scale, None if on_host else found, *args, **kwargs)
        else:
            result = optimizer.step(*args, **kwargs)
        record.stage = OptState.STEPPED
        return result

    @staticmethod
    def _total_found_inf(record: OptimizerRecord, device: torch.device) -> Tensor:
        """The sum over devices, at most 1: torch's CPU kernels compare with exactly 1.0."""
        total = torch.zeros((), dtype=torch.float32, device=device)
        for found in record["found_inf_per_device"].values():
            total = total + found.to(device, non_blocking=True).reshape(())
        return total.clamp(max=1.0)

    @untraced
    def update(self, new_scale: float | Tensor | None = None) -> None:
        """Close the window: back off after an overflow, else count towards growth. Synchronises
        only with ``new_scale``, ``hysteresis`` > 1 or ``max_consecutive_skips``.

        Args:
            new_scale: the next scale, a number or a one-element tensor; kept within the bounds.

        Raises:
            ConfigError: ``new_scale`` is no number above 0.
            OrderError: (a ``RuntimeError``) on another thread than the training thread.
            AssertionError: before any :meth:`scale`, or nothing was checked in this window.
            OverflowStreakError: too many skips in a row; the scale has been updated.
        """
        if not self._enabled:
            return
        with self._lock:
            self._windows.forbid_other_thread("update")
            scale, tracker = self._check_scale_growth_tracker("update")
            if self.window.closed:
                # A boundary has updated the scale, once for all of its optimizers.
                self._next_window()
                if new_scale is None:
                    return
            # A step that is still due on another thread divides by this window's scale.
            self.window.scale = scale.clone()
            if new_scale is not None:
                number: Any = new_scale
                if isinstance(new_scale, Tensor) and new_scale.numel() == 1:
                    number = new_scale.item()
                if not is_positive(number):
                    raise ConfigError(
                        f"new_scale: got {new_scale!r}, expected a number > 0 (float32) or a "
                        "tensor of one."
                    )
                state = self.read_state()
                self.write_state(replace(state, scale=self.rule.clamp(float(number))))
                self._next_window()
                return
            records = [r for r in self.window.states.values() if r["found_inf_per_device"]]
            if not records:
                raise AssertionError("No inf checks were recorded prior to update.")
            found = [self._total_found_inf(record, scale.device) for record in records]
            found_inf = torch.stack(found).amax()
            waits = self._hysteresis > 1 or self.skips.limit is not None
            if waits or scale.device.type == "cpu":
                self.write_state(self.rule.advance(self.read_state(), bool(found_inf)))
            else:
                factors = self._growth_factor, self._backoff_factor, self._growth_interval
                torch._amp_update_scale_(scale, tracker, found_inf, *factors)
                if self._min_scale is not None or self._max_scale is not None:
                    scale.clamp_(self._min_scale, self._max_scale)
            self._next_window()
            self.check_skips()

    def get_scale(self) -> float:
        """The scale as a float; 1.0 if disabled. In a bound job: the scale of the job's window.
        Synchronises if the last update ran on the device."""
        if self._enabled and self._windows.bound is None:
            return self.read_state().scale
        return super().get_scale()

    def get_growth_factor(self, up_to_date: bool = False) -> float:
        """The growth factor; ``up_to_date=True`` waits for every bound job first."""
        if up_to_date:
            self._windows.wait_for_jobs()
        return super().get_growth_factor()

    def get_backoff_factor(self, up_to_date: bool = False) -> float:
        """The back-off factor; ``up_to_date=True`` waits for every bound job first."""
        if up_to_date:
            self._windows.wait_for_jobs()
        return super().get_backoff_factor()

    def get_growth_interval(self, up_to_date: bool = False) -> int:
        """The growth interval; ``up_to_date=True`` waits for every bound job first."""
        if up_to_date:
            self._windows.wait_for_jobs()
        return super().get_growth_interval()

    @untraced
    def get_overflow_flag(self, *optimizers: Optimizer) -> bool:
        """Whether the gradients of this window hold an inf or a NaN.

        Looks at the gradients of ``optimizers``; without any, of every optimizer this scaler
        has seen; before it has seen one, of the parameters that the window's outputs lead to.
        In a bound job the answer is the verdict of :meth:`bind`. Synchronises.
        """
        if not self._enabled:
            return False
        with self._lock:
            bound = self._windows.bound
            seen = [o for o in self._known if bound is None or bound.known(o) is not None]
            if chosen := optimizers or seen:
                return any(map(self._has_overflowed, chosen))
            leaves = (p for leaf in self._leaves if (p := leaf()) is not None)
            return any(map(has_nonfinite_gradient, leaves))

    def _has_overflowed(self, optimizer: Optimizer) -> bool:
        record = self._windows.current.known(optimizer)
        if record is not None and record["found_inf_per_device"]:
            return record.found_inf
        return any(map(has_nonfinite_gradient, parameters_of(optimizer)))

    @untraced
    def backoff(self, factor: float | None = None) -> None:
        """Multiply the scale by ``factor`` (default: the back-off factor) and end the window.

        For loops that look at :meth:`get_overflow_flag` themselves: the window counts as
        skipped if it overflowed, the growth tracker starts again, ``hysteresis`` is ignored. Zero
        the gradients; a boundary rescales gradients that are left. Synchronises.

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
            self._windows.forbid_other_thread("backoff")
            scale, _ = self._check_scale_growth_tracker("backoff")
            skipped = not self.window.closed and self.get_overflow_flag()
            for optimizer in self._known if skipped else ():
                self._note_skip(optimizer)
            self.window.scale = scale.clone()
            state = self.read_state()
            lower, skips = self.rule.clamp(state.scale * factor), state.consecutive_skips + skipped
            self.write_state(ScaleState(lower, 0, skips, state.spikes))
            self._next_window()
            self.check_skips()

    # 2. Jobs of other threads.

    @untraced
    def bind(self, fn: Callable[[], T], *optimizers: Optimizer) -> Callable[[], T]:
        """Tie ``fn`` to the open window, so that another thread can run it later, once.

        The gradients of ``optimizers`` are checked here, so that an :meth:`update` right after
        this call has the verdict. Inside ``fn``, ``unscale_``, ``step`` and ``get_scale`` work on a
        window of the job's own, with scale and verdict of the open one as host numbers. Leave
        the gradients alone until the job has run. Synchronises with the device, and with the other
        ranks where they hold different gradients.

        Raises:
            ConfigError: no optimizer given.
            AssertionError: before any :meth:`scale`.
            OrderError: no window is open.
        """
        if not optimizers:
            raise ConfigError("bind: got no optimizer, expected each one that the function steps.")
        if not self._enabled:
            return self._windows.bind(fn, Window())
        with self._lock:
            self._check_scale_growth_tracker("bind")
            window = self.window
            if window.closed or window.opened_by is None:
                raise OrderError(
                    "no loss was scaled: call scale() and backward before bind() or submit()."
                )
            for optimizer in optimizers:
                record, params = window.record(optimizer), parameters_of(optimizer)
                if not record["found_inf_per_device"]:
                    self._check_inf_per_device(optimizer)
                device = params[0].device
                record.decide(self.ranks.agree_on_overflow(record.found_inf, optimizer, device))
                self._known.add(stepped(optimizer))
            return self._windows.bind(fn, window.for_job(optimizers, self.read_state().scale))

    def is_stepping(self, optimizer: Optimizer) -> bool:
        """Whether this thread is inside :meth:`step` of ``optimizer``, after its check."""
        return self._windows.stepping is optimizer

    # 3. A boundary, which opens and closes windows for the optimizers that it steps.

    @property
    def window(self) -> Window:
        """The open window; after a step the last one, until :meth:`scale` opens the next."""
        return self._windows.open

    @property
    def window_scale(self) -> float:
        """The scale of :attr:`window`; the boundary's update does not change it."""
        before = self.window.before
        return self.get_scale() if before is None else before.scale

    def record_of(self, optimizer: Optimizer) -> OptimizerRecord:
        """The record of ``optimizer`` in the window that calls on this thread mean."""
        return self._windows.current.record(optimizer)

    def open_window(self) -> Window:
        """Return the open window, or open one where the last one was stepped."""
        with self._lock:
            if self.window.closed:
                self._next_window()
            if self.window.opened_by is None:
                self.window.opened_by = threading.get_ident()
            return self.window

    def close_window(self, found_inf: bool, is_spike: bool = False) -> None:
        """Update the scale at the end of the open window, before its optimizers step.

        Call it for each optimizer of the window. Each call starts from the state before the window,
        with all verdicts so far, so that a window updates the scale once. :meth:`unscale_` keeps
        dividing by the window's own scale. A spike does not move the scale. Synchronises only where
        gradients were unscaled by hand.
        """
        with self._lock:
            window = self.window
            if window.before is None:
                window.scale = None if self._live is None else self._live.clone()
                window.before = self.read_state()
            # Other optimizers may have been unscaled or stepped by hand.
            window.found_inf |= found_inf or any(r.found_inf for r in list(window.states.values()))
            window.is_spike |= is_spike
            before = window.before
            if window.is_spike and not window.found_inf:
                self.write_state(replace(before, spikes=before.spikes + 1))
            else:
                rule = self.rule if self._enabled else Rule(1.0, 1.0, 1)  # to count skips
                self.write_state(rule.advance(before, window.found_inf))

    def abandon_window(self) -> None:
        """Give up the open window, if any. Zero all gradients before the next :meth:`scale`."""
        with self._lock:
            self._next_window()

    def manage(self, optimizer: Optimizer, stepper: GradientReader) -> None:
        """Let a boundary step this optimizer; both are held weakly. Synchronises with the device
        where there are gradients and no loss was scaled."""
        self._known.add(optimizer)
        is_new = optimizer not in self._managed
        self._managed[optimizer] = ref(stepper)
        # In an open window its gradients are taken to be scaled.
        if is_new and (self.window.opened_by is None or self.window.closed):
            why = "had gradients before it was given to this scaler, not scaled by it"
            self._mark_carried_over(optimizer, why)

    def release(self, *optimizers: Optimizer) -> None:
        """End :meth:`manage`."""
        for optimizer in optimizers:
            self._managed.pop(optimizer, None)

    @property
    def managed(self) -> list[Optimizer]:
        """Optimizers that a boundary steps, in the order of their arrival, as on every rank."""
        return list(self._managed)

    def _note_skip(self, optimizer: Optimizer) -> None:
        if self.skips.wants_names(self._consecutive_skips + self._spikes):
            params = filter(has_nonfinite_gradient, parameters_of(optimizer))
            self.skips.names.update(self.parameter_names.of(params, optimizer))

    def check_skips(self, cause: Callable[[], str] = str) -> None:
        """Raise ``OverflowStreakError`` if the run of skips is over its limit. ``cause`` returns a
        text on where the overflows begin and on the cure; "" where these are not known."""
        skips = self._consecutive_skips + self._spikes
        self.skips.check(skips, self.get_scale if self._enabled else None, cause)

    def _next_window(self) -> None:
        """Leave the window. Gradients that were not stepped in it are rescaled to the next scale,
        or marked where that is not possible."""
        left = self._windows.next()
        self._leaves = []
        scaled: list[Optimizer] = []
        for optimizer in self.managed if self._enabled else ():
            record, params = left.record(optimizer), parameters_of(optimizer)
            is_stepped = record.stage is OptState.STEPPED
            # What it was skipped for is skipped again in the next window, if it is still there.
            if is_stepped and not (record.found_inf and not first_nonfinite(optimizer)):
                continue
            if not gradients_of(params):
                continue
            mixed = Snapshot(left.unscaled_among(params))  # by another optimizer, too
            is_scaled = record.stage is not OptState.UNSCALED and mixed.is_zero
            if is_scaled and not record.carried_over:
                scaled.append(optimizer)
                self.window.record(optimizer).carried_over = ""
            else:
                why = "sat out the step before with gradients in it, which are unscaled"
                self._mark_carried_over(optimizer, record.carried_over or why)
        if not scaled:
            return
        now = self.read_state().scale
        before = now if left.scale is None else float(left.scale)
        if now != before:
            # A gradient that another optimizer has stepped is zero: else this one were marked.
            each = {id(p): p for optimizer in scaled for p in parameters_of(optimizer)}
            multiply_in_place(gradients_of(each.values()), now * reciprocal(before))

    def _mark_carried_over(self, optimizer: Optimizer, why: str) -> None:
        """Let the next window refuse these gradients, unless they are zeroed first."""
        if self._enabled and not Snapshot(parameters_of(optimizer)).is_zero:
            self.window.record(optimizer).carried_over = why

    def _start_over_where_dropped(self, window: Window) -> None:
        """Forget optimizers whose unscaled gradients are gone or zero on every rank: a script has
        dropped the batch after a look at its norm. Remember the unscaled gradients of the others,
        since a backward may not add scaled ones to them. Only a boundary's optimizers are seen."""
        for optimizer in self.managed:
            record, params = window.known(optimizer), parameters_of(optimizer)
            if record is not None and record.carried_over and Snapshot(params).is_zero:
                record.carried_over = None
            if record is not None and record.stage is OptState.UNSCALED:
                before = record.unscaled_before = Snapshot(params)
                is_left, device = not before.is_zero, params[0].device
                if not self.ranks.agree_on_overflow(is_left, optimizer, device):
                    window.forget(optimizer)

    # 4. State.

    @property
    def rule(self) -> Rule:
        """The update rule with the present settings."""
        return Rule(
            self._growth_factor,
            self._backoff_factor,
            operator.index(self._growth_interval),  # a TypeError for no int, as in torch
            self._min_scale,
            self._max_scale,
            self._hysteresis,
        )

    @property
    def has_begun(self) -> bool:
        """Whether the scale comes from training: a loss was scaled, or a state loaded."""
        return self._live is not None or self._was_loaded

    @untraced
    def read_state(self) -> ScaleState:
        """Scale and counters, on any thread. Synchronises if the last update ran on the device."""
        with self._lock:
            if not self._enabled:
                return ScaleState(1.0, 0, self._consecutive_skips, self._spikes)
            live, tracker = self._live, self._growth_tracker
            if live is None or tracker is None:
                numbers = self._init_scale, self._init_growth_tracker
            else:
                numbers = self._mirror.read(live, tracker)
            return ScaleState(*numbers, self._consecutive_skips, self._spikes)

    def write_state(self, state: ScaleState) -> None:
        """Set scale and counters. Does not synchronise."""
        with self._lock:
            self._consecutive_skips, self._spikes = state.consecutive_skips, state.spikes
            if not self._enabled:
                return
            live, tracker = self._live, self._growth_tracker
            if live is None or tracker is None:
                self._init_scale, self._init_growth_tracker = state.scale, state.growth_tracker
            else:
                self._mirror.write(live, tracker, (state.scale, state.growth_tracker))

    def state_dict(self) -> dict[str, Any]:
        """torch's five entries and ``_consecutive_skips``, plain numbers that torch's own scaler
        loads, too; {} if disabled. Synchronises."""
        state = super().state_dict()
        if self._enabled:
            state["_consecutive_skips"] = self._consecutive_skips
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of ``torch.amp.GradScaler``. No-op if disabled.

        Raises:
            ConfigError: an entry that is missing or no number, or a scale not above 0 without
                ``min_scale`` to raise it; nothing has been changed.
            RuntimeError: an empty dict (from a disabled scaler).
        """
        if not self._enabled:
            return
        if state_dict:
            self._check_state(state_dict)
        with self._lock:
            before = self.read_state().scale
            super().load_state_dict(state_dict)
            self._was_loaded = True
            self._consecutive_skips = int(state_dict.get("_consecutive_skips", 0))
            state = self.read_state()
            self.write_state(replace(state, scale=self.rule.clamp(state.scale)))
            is_moved = bool(self._managed) and self.read_state().scale != before
            if is_moved and not self.window.closed:
                self.window.scale = torch.full((), before, dtype=torch.float32)
            if is_moved or self.window.closed:
                self._next_window()

    def _check_state(self, state_dict: dict[str, Any]) -> None:
        for key in (*_TORCH_KEYS, "_consecutive_skips"):
            value = state_dict.get(key, 0 if key == "_consecutive_skips" else None)
            if not is_number(value):
                raise ConfigError(
                    f"scaler state dict: got {key}={shown(value)}, expected a number: what "
                    "GradScaler.state_dict() returns."
                )
        if state_dict["scale"] <= 0 and self._min_scale is None:
            raise ConfigError(
                f"scaler state dict: got scale={state_dict['scale']!r}, expected a number > 0: a "
                "long run of skips has brought it there, and every step would be skipped. Load "
                "an earlier checkpoint, or set min_scale (1.0, say), which the scale is raised to."
            )

    def __getstate__(self) -> dict[str, Any]:
        # torch refuses records of optimizers in a pickle; a stepped window's are of no use.
        with self._windows.inside(Window() if self.window.closed else None):
            state = super().__getstate__()
        made = GradScaler.__new__(GradScaler)
        made._make_transient()
        return {key: value for key, value in state.items() if key not in {"_scale", *vars(made)}}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._make_transient()
        super().__setstate__(state)


def _device_and_scale(device: Any, scale: float) -> tuple[str, float]:
    if is_number(device) and scale == 2.0**16:
        device, scale = None, device
    device = present_type() if device is None else device
    try:
        torch.device(str(device))
    except RuntimeError as error:
        raise ConfigError(
            f"GradScaler: got device={device!r}, expected a device type, or init_scale alone: give "
            f"growth_factor and the others by name. torch says: {error}"
        ) from error
    return device, scale


def _tensors(outputs: Any) -> list[Tensor]:
    """The tensors in nested lists and tuples; a lazy iterable is left alone."""
    return [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]


def nothing_found(optimizer: Optimizer) -> Tensor | None:
    """``found_inf`` for finite gradients: None for torch's own optimizers, whose kernels then save
    a pass; for others a zero, float32, shape (), as from torch's scaler."""
    if type(optimizer).__module__.startswith("torch.optim."):
        return None
    params = parameters_of(optimizer)
    return torch.zeros((), dtype=torch.float32, device=params[0].device if params else "cpu")


def call_fused(
    optimizer: Any, grad_scale: Tensor | None, found_inf: Tensor | None, *args: Any, **kwargs: Any
) -> float | None:
    """Call ``optimizer.step(*args, **kwargs)`` of a fused optimizer, which divides gradients by
    ``grad_scale`` and does nothing where ``found_inf`` is 1; both float32, shape (), or None."""
    if found_inf is None:
        found_inf = nothing_found(optimizer)
    optimizer.grad_scale, optimizer.found_inf = grad_scale, found_inf
    try:
        result: float | None = optimizer.step(*args, **kwargs)
        return result
    finally:
        del optimizer.grad_scale, optimizer.found_inf
