"""What a GradScaler remembers: settings, counters, state dict, pickling."""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..config import is_count, is_number
from ..errors import ConfigError, shown
from .overflow_streak import OverflowStreak
from .parameter_names import ParameterNames
from .update_rule import Rule, ScaleState
from .window import WAIT_LIMIT_S, Job, Window

__all__ = ["ScalerMemory"]

_TRANSIENT = (
    *("_window", "_last", "_live", "_mirror", "_local", "_lock", "_jobs", "_known", "_leaves"),
    *("_managed", "_steppers"),
)
_TORCH_KEYS = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")


class ScalerMemory(torch.amp.GradScaler):
    """The state behind :class:`accel_scaler.GradScaler`; torch's methods work on it unchanged."""

    _growth_tracker: Tensor | None
    parameter_names: ParameterNames
    overflow_streak: OverflowStreak
    """Of the windows skipped in a row, if the last one was."""
    _min_scale: float | None = None
    _max_scale: float | None = None
    _hysteresis: int = 1
    _consecutive_skips: int = 0
    _was_loaded: bool = False
    sharded: bool = False
    """Ranks hold different gradients, whatever the parameters say, so they agree on a verdict."""

    def _make_transient(self) -> None:
        """What belongs to this process and is not pickled."""
        self._window = Window()
        self._last: Window | None = None
        self._live: Tensor | None = None
        self._mirror: tuple[Tensor, int, Tensor, int, ScaleState] | None = None
        self._local = threading.local()
        self._lock = threading.RLock()
        self._jobs: weakref.WeakSet[Job[Any]] = weakref.WeakSet()
        self._known: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        """Optimizers whose gradients :meth:`get_overflow_flag` looks at."""
        self._managed: dict[int, weakref.ref[Optimizer]] = {}
        self._steppers: dict[int, weakref.ref[Any]] = {}
        """Optimizers that a boundary steps, under their ``id``, in the order they came."""
        self._leaves: list[weakref.ref[Tensor]] = []

    @property
    def _bound(self) -> Window | None:
        """The window this thread was sent to, other than the open one."""
        return getattr(self._local, "window", None)

    # torch's methods read the next two; they are those of the window this thread works in.

    @property
    def _scale(self) -> Tensor | None:
        bound = self._bound
        return self._live if bound is None or bound.scale is None else bound.scale

    @_scale.setter
    def _scale(self, value: Tensor | None) -> None:
        self._live = value

    @property
    def _per_optimizer_states(self) -> Any:
        return (self._bound or self._window).states

    @_per_optimizer_states.setter
    def _per_optimizer_states(self, value: Any) -> None:
        """torch assigns an empty dict where a window is over."""
        self._next_window()

    def _next_window(self) -> None:
        """Leave the window; a step still due on another thread finds it in ``_last``."""
        if self._window.opened_by is not None:
            self._window.let_go()
            self._last = self._window
        self.overflow_streak.next_window()
        self._window = Window(self._window.index + int(self._window.opened_by is not None))

    @property
    def rule(self) -> Rule:
        """The update rule with the present settings."""
        return Rule(
            self._growth_factor,
            self._backoff_factor,
            self._growth_interval,
            self._min_scale,
            self._max_scale,
            self._hysteresis,
        )

    @property
    def has_begun(self) -> bool:
        """Its scale comes from training: it has scaled a loss, or loaded a state."""
        return self._live is not None or self._was_loaded

    def read_state(self) -> ScaleState:
        """Scale and counters on the host. Synchronises only if the device has newer ones.

        On any thread: what one has read is not kept beside what another writes meanwhile.
        """
        with self._lock:
            return self._read_state()

    def _read_state(self) -> ScaleState:
        live, tracker, mirror = self._live, self._growth_tracker, self._mirror
        if live is None or tracker is None:
            return ScaleState(self._init_scale, self._init_growth_tracker, self._consecutive_skips)
        if (
            mirror is not None
            and mirror[0] is live
            and mirror[1] == live._version
            and mirror[2] is tracker
            and mirror[3] == tracker._version
        ):
            return mirror[4]
        state = ScaleState(float(live), int(tracker), self._consecutive_skips)
        self._mirror = (live, live._version, tracker, tracker._version, state)
        return state

    def write_state(self, state: ScaleState) -> None:
        """Set scale and counters. Does not synchronise."""
        with self._lock:
            self._write_state(state)

    def _write_state(self, state: ScaleState) -> None:
        self._consecutive_skips = state.consecutive_skips
        live, tracker = self._live, self._growth_tracker
        if live is None or tracker is None:
            self._init_scale, self._init_growth_tracker = state.scale, state.growth_tracker
            return
        live.fill_(state.scale)
        tracker.fill_(state.growth_tracker)
        self._mirror = (live, live._version, tracker, tracker._version, state)

    def _lazy_init_scale_growth_tracker(self, dev: torch.device | str) -> None:
        super()._lazy_init_scale_growth_tracker(torch.device(dev))

    def get_scale(self) -> float:
        """The scale as a float; 1.0 if disabled; in a bound job, its window's.

        Synchronises if the last update ran on the device.
        """
        if self._enabled and self._bound is None:
            return self.read_state().scale
        return super().get_scale()

    def _get_growth_tracker(self) -> int:
        return self.read_state().growth_tracker if self._enabled else 0

    def get_growth_factor(self, up_to_date: bool = False) -> float:
        """The growth factor; ``up_to_date=True`` waits for every bound job first."""
        self._wait_for_jobs(up_to_date)
        return super().get_growth_factor()

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the growth factor: a finite number of at least 1 (1: the scale never grows)."""
        if not (is_number(new_factor) and new_factor >= 1):
            raise ConfigError(f"growth_factor: got {new_factor!r}, expected a finite number >= 1.")
        super().set_growth_factor(new_factor)

    def get_backoff_factor(self, up_to_date: bool = False) -> float:
        """The back-off factor; ``up_to_date=True`` waits for every bound job first."""
        self._wait_for_jobs(up_to_date)
        return super().get_backoff_factor()

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the back-off factor: a number in (0, 1] (1: the scale never falls)."""
        if not (is_number(new_factor) and 0 < new_factor <= 1):
            raise ConfigError(f"backoff_factor: got {new_factor!r}, expected a number in (0, 1].")
        super().set_backoff_factor(new_factor)

    def get_growth_interval(self, up_to_date: bool = False) -> int:
        """The growth interval; ``up_to_date=True`` waits for every bound job first."""
        self._wait_for_jobs(up_to_date)
        return super().get_growth_interval()

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the growth interval: an integer of at least 1."""
        if not is_count(new_interval):
            raise ConfigError(
                f"growth_interval: got {shown(new_interval)}, expected an integer from 1 to 2**53."
            )
        super().set_growth_interval(new_interval)

    def _wait_for_jobs(self, up_to_date: bool) -> None:
        end = time.monotonic() + WAIT_LIMIT_S
        for job in list(self._jobs) if up_to_date else ():
            job.wait(max(end - time.monotonic(), 0.0))

    def state_dict(self) -> dict[str, Any]:
        """torch's five entries and ``_consecutive_skips``; {} if disabled. Plain numbers.

        torch's own scaler loads it too. Synchronises if the last update ran on the device.
        """
        state = super().state_dict()
        if self._enabled:
            state["_consecutive_skips"] = self._consecutive_skips
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of this class or of ``torch.amp.GradScaler``. No-op if disabled.

        Raises:
            ConfigError: a missing entry, one that is no number, or a scale of 0 without
                ``min_scale`` to raise it; nothing has been changed.
            RuntimeError: an empty dict (from a disabled scaler).
        """
        if not self._enabled:
            return
        if state_dict:
            missing = [key for key in _TORCH_KEYS if key not in state_dict]
            if missing:
                raise ConfigError(
                    f"scaler state dict: {missing[0]!r} is missing, got {sorted(state_dict)}; "
                    "expected what GradScaler.state_dict() returns."
                )
            for key in (*_TORCH_KEYS, "_consecutive_skips"):
                if not is_number(state_dict.get(key, 0)):
                    raise ConfigError(
                        f"scaler state dict: got {key}={state_dict[key]!r}, expected a number."
                    )
            if state_dict["scale"] <= 0 and self._min_scale is None:
                raise ConfigError(
                    f"scaler state dict: got scale={state_dict['scale']!r}, expected a number > 0. "
                    "A long run of skips has brought it there, and every window would be skipped "
                    "from here on. Load an earlier checkpoint, or set min_scale (1.0, say), which "
                    "the scale is raised to."
                )
        with self._lock:
            super().load_state_dict(state_dict)
            self._was_loaded = True
            self._mirror = None
            self._consecutive_skips = int(state_dict.get("_consecutive_skips", 0))
            state = self.read_state()
            bounded = replace(state, scale=self.rule.clamp(state.scale))
            if bounded != state:
                self.write_state(bounded)
            if self._window.closed:
                self._next_window()

    def __getstate__(self) -> dict[str, Any]:
        state = {key: value for key, value in self.__dict__.items() if key not in _TRANSIENT}
        if self._enabled:
            if self._window.states and not self._window.closed:
                raise AssertionError(
                    "A GradScaler instance may only be pickled at the beginning of an iteration, "
                    "or at the end after scaler.update()."
                )
            now = self.read_state()
            state["_init_scale"], state["_init_growth_tracker"] = now.scale, now.growth_tracker
            state["_growth_tracker"] = None
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._make_transient()
        if "culprits" in state:  # written before names and streak were two
            state["overflow_streak"] = state.pop("culprits")
            state["parameter_names"] = state["overflow_streak"].names = ParameterNames()
        super().__setstate__(state)
