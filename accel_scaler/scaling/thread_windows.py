"""Which window a thread works in: the open one, the last one, or that of its job."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from torch.optim import Optimizer

from ..errors import ConfigError, OrderError
from .collectives import agree_on_overflow, is_sharded
from .gradients import parameters_of
from .scaler_state import ScalerMemory
from .window import Job, OptimizerRecord, Window, stepped

__all__ = ["ThreadedScaler"]

T = TypeVar("T")


class ThreadedScaler(ScalerMemory):
    """The part of :class:`accel_scaler.GradScaler` that keeps threads and windows apart."""

    @property
    def window(self) -> Window:
        """The open window, or the last one until :meth:`scale` opens the next."""
        return self._window

    @property
    def known_window(self) -> Window:
        """The window that calls on this thread mean."""
        return self._bound or self._window

    def record_of(self, optimizer: Optimizer) -> OptimizerRecord:
        """What is known of ``optimizer`` in the window that calls on this thread mean."""
        return self.known_window.record(optimizer)

    @contextmanager
    def inside(self, window: Window | None) -> Iterator[None]:
        """Within the block this thread's calls mean ``window`` (None: the open one)."""
        outer, self._local.window = self._bound, window
        try:
            yield
        finally:
            self._local.window = outer

    def _due_window(self) -> Window | None:
        """The window meant by a call on this thread; None: the open one, or the job's.

        Between windows another thread still works on the last one, whose gradients it holds.
        """
        last = self._last
        if self._bound is None and self._window.closed and self._enabled:
            return self._window  # its own scale, not the next one's
        if self._bound is not None or self._window.opened_by is not None or last is None:
            return self._bound
        return None if last.opened_by == threading.get_ident() else last

    def bind(self, fn: Callable[[], T], *optimizers: Optimizer) -> Job[T]:
        """Tie ``fn`` to the open window, so that another thread can run it later.

        The gradients of ``optimizers`` are checked here, before anything is handed over, so
        that :meth:`update` straight after has its verdict and never waits. Inside ``fn``,
        ``unscale_``, ``step`` and ``get_scale`` mean a window of the job's own, with the scale
        and the verdict of this one: host numbers, so that neither the training thread nor another
        stream writes to what the other reads. Leave these gradients alone until the job has run.

        Synchronises with the device, and with the other ranks where they hold other gradients.

        Returns:
            A callable without arguments, to be called once, on any thread.

        Raises:
            ConfigError: no optimizer given.
            AssertionError: before any :meth:`scale`.
        """
        if not optimizers:
            raise ConfigError("bind: got no optimizer, expected each one that the function steps.")
        if not self._enabled:
            return Job(fn, Window(), threading.local())
        with self._lock:
            self._check_scale_growth_tracker("bind")
            window = self._window
            if window.closed or window.opened_by is None:
                raise OrderError("bind: no window is open; call scale() and backward first.")
            for optimizer in optimizers:
                record, params = window.record(optimizer), parameters_of(optimizer)
                if not record["found_inf_per_device"]:
                    self._check_inf_per_device(optimizer)
                sharded = self.sharded or is_sharded(params)
                record.decide(agree_on_overflow(record.found_inf, params[0].device, sharded))
                self._known.add(stepped(optimizer))
            job = Job(fn, window.for_job(optimizers, self.read_state().scale), self._local)
            self._jobs.add(job)
            return job

    def _forbid_stranger(self, optimizer: Optimizer) -> None:
        """Inside a job, only optimizers whose gradients were checked before the hand-over."""
        bound = self._bound
        if bound is not None and bound.sealed and bound.known(optimizer) is None:
            raise OrderError(
                f"{type(optimizer).__name__} was not given to GradScaler.bind() with this job; "
                "name every optimizer that the job unscales or steps."
            )

    def _forbid_other_thread(self, call: str) -> None:
        owner = self._window.opened_by
        if self._bound is not None or (owner is not None and owner != threading.get_ident()):
            raise OrderError(
                f"{call}() was called on thread {threading.current_thread().name!r}; call it on "
                "the thread that called scale() for this window."
            )
