"""Accumulation windows, and the jobs that carry one to another thread."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from torch import Tensor
from torch.amp.grad_scaler import _refresh_per_optimizer_state

from .config import OrderError
from .rule import ScaleState

__all__ = ["WAIT_LIMIT_S", "Job", "Window"]

T = TypeVar("T")

WAIT_LIMIT_S = 600.0
"""Longest wait for a job on another thread, in seconds."""


class Window:
    """What belongs to one accumulation window: its scale, and each optimizer's progress in it.

    It opens with the first ``scale()`` after a step. ``states`` has torch's form: a dict with
    ``stage`` and ``found_inf_per_device`` for each ``id(optimizer)``.
    """

    __slots__ = ("before", "found_inf", "index", "opened_by", "scale", "sealed", "states")

    def __init__(self, index: int = 0) -> None:
        self.index = index
        self.opened_by: int | None = None
        """Thread that called ``scale()`` first; None: no gradient was scaled yet."""
        self.scale: Tensor | None = None
        """The window's own scale once it may outlive the scaler's current one."""
        self.states: defaultdict[int, dict[str, Any]] = defaultdict(_refresh_per_optimizer_state)
        self.before: ScaleState | None = None
        """Set when the boundary has updated the scale: where the update started from."""
        self.found_inf = False
        self.sealed = False
        """Its verdict was taken on the training thread; no other optimizer may join."""

    @property
    def closed(self) -> bool:
        """An optimizer has stepped; only further optimizers may still step in it."""
        return self.before is not None


class Job(Generic[T]):
    """A function bound to a window; call it once, on any thread."""

    def __init__(self, fn: Callable[[], T], window: Window, local: threading.local) -> None:
        self._fn, self._window, self._local = fn, window, local
        self._thread: threading.Thread | None = None
        self._claim = threading.Lock()
        self._done = threading.Event()

    def __call__(self) -> T:
        if not self._claim.acquire(blocking=False):
            raise OrderError(
                "a bound job runs once; call GradScaler.bind() again for the next window."
            )
        self._thread = threading.current_thread()
        outer = getattr(self._local, "window", None)
        self._local.window = self._window
        try:
            return self._fn()
        finally:
            self._local.window = outer
            self._done.set()

    def wait(self, limit_s: float = WAIT_LIMIT_S) -> None:
        """Block until the job has run; raise if its thread is gone or ``limit_s`` is over."""
        if self._thread is threading.current_thread():
            return
        end = time.monotonic() + limit_s
        while not self._done.wait(0.2):
            thread = self._thread
            if thread is not None and not thread.is_alive() and not self._done.is_set():
                raise OrderError(f"the thread {thread.name!r} died while it ran a bound job.")
            if time.monotonic() > end:
                state = "has not started" if thread is None else f"still runs on {thread.name!r}"
                raise OrderError(
                    f"waited {limit_s:g} s for a job bound to window {self._window.index}: it "
                    f"{state}. Run every job that GradScaler.bind() returns, or drop it."
                )
