"""The window that a thread works on: the open one, the last one, or the window of its job."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar
from weakref import WeakKeyDictionary

from torch.optim import Optimizer

from ..errors import OrderError
from .window import Window

T = TypeVar("T")

WAIT_LIMIT_S = 600.0
"""The longest wait for a job on another thread, in seconds."""


class ThreadWindows:
    """The open window, the one before it, and the windows of jobs. A window belongs to the thread
    that opens it, the training thread."""

    def __init__(self) -> None:
        self.open = Window()
        """The open window; it stays here after it was closed, until :meth:`next`."""
        self._last: Window | None = None
        self._local = threading.local()
        self._jobs: WeakKeyDictionary[Window, threading.Event] = WeakKeyDictionary()
        """By the window of each job that is still referenced an event, set once the job has run."""

    @property
    def bound(self) -> Window | None:
        """The window of :meth:`inside` on this thread; None: the open one."""
        return getattr(self._local, "window", None)

    @property
    def stepping(self) -> Optimizer | None:
        """The optimizer that the scaler steps on this thread now."""
        return getattr(self._local, "stepping", None)

    @property
    def current(self) -> Window:
        """The window that calls on this thread mean."""
        return self.bound or self.open

    @contextmanager
    def inside(self, window: Window | None, stepping: Optimizer | None = None) -> Iterator[None]:
        """Within the block this thread's calls mean ``window`` (None: the open one)."""
        outer = self.bound, self.stepping
        self._local.window, self._local.stepping = window, stepping or self.stepping
        try:
            yield
        finally:
            self._local.window, self._local.stepping = outer

    def to_step(self) -> Window | None:
        """The window that an unscale or a step on this thread works on; None: the open one. Between
        windows another thread works on the last one, whose gradients it has."""
        if self.bound is not None:
            return self.bound
        if self.open.closed:
            return self.open  # its scale is not the scaler's any more
        last = self._last if self.open.opened_by is None else None
        return last if last is not None and last.opened_by != threading.get_ident() else None

    def meant(self, optimizer: Optimizer) -> Optimizer:
        """``optimizer``; in a job the wrapper around it that was given to ``bind``, if any."""
        return self.current.wrappers.get(id(optimizer), optimizer)

    def next(self) -> Window:
        """Leave the open window and return it; a step on another thread still finds it."""
        left = self.open
        if left.opened_by is not None:
            left.let_go()
            self._last = left
        self.open = Window(left.index + int(left.opened_by is not None))
        return left

    def bind(self, fn: Callable[[], T], window: Window) -> Callable[[], T]:
        """``fn`` as a job, to be run once on any thread; calls inside it mean ``window``."""
        done = self._jobs[window] = threading.Event()

        def job() -> T:
            try:
                with self.inside(window):
                    return fn()
            finally:
                done.set()

        return job

    def wait_for_jobs(self) -> None:
        """Block until every other job that is still referenced has run. Raises ``OrderError``
        after ``WAIT_LIMIT_S``."""
        end = time.monotonic() + WAIT_LIMIT_S
        for window, done in list(self._jobs.items()):
            left_s = max(end - time.monotonic(), 0.0)
            if window is not self.bound and not done.wait(left_s):
                raise OrderError(
                    f"waited {WAIT_LIMIT_S:g} s for a job bound to step {window.index}. Run "
                    "every job that GradScaler.bind() returns, or drop it."
                )

    def forbid_other_thread(self, call: str) -> None:
        """Raise ``OrderError`` in a job, or on a thread that has not opened the window."""
        owner = self.open.opened_by
        if self.bound is not None or (owner is not None and owner != threading.get_ident()):
            raise OrderError(
                f"{call}() was called on thread {threading.current_thread().name!r}; call it on "
                "the thread that called scale() for this step."
            )
