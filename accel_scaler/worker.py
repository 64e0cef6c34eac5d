"""The optimizer thread: tasks in order, finished part by part; no wait without an end."""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable

import psutil
import torch

from .config import StepError
from .windows import WAIT_LIMIT_S

__all__ = ["Task", "Worker", "default_threads"]

logger = logging.getLogger("accel_scaler")

SWITCH_INTERVAL_S = 1e-4
"""While a task runs. With the interpreter's 5 ms a training thread that runs Python makes the
optimizer thread wait that long after each kernel."""

EXIT_LIMIT_S = 60.0
"""Longest wait for the task in hand when the interpreter exits."""


def default_threads() -> int:
    """Physical cores that this process may use / ranks on this host, less one, at least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = min(psutil.cpu_count(logical=False) or allowed or 1, allowed or 1)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return max(1, cores // max(ranks, 1) - 1)


class Task:
    """Work in ``parts`` that are finished in order; others wait for the first n of them."""

    def __init__(self, run: Callable[[Task], None], parts: int) -> None:
        self._run: Callable[[Task], None] | None = run
        self.parts = parts
        self.done = 0
        """Parts finished; only grows."""
        self.finished = False
        """Nothing more will happen: all parts are done, or ``error`` is set."""
        self.error: BaseException | None = None
        self.busy_s = 0.0
        """How long it ran."""
        self._worker: Worker | None = None
        self._changed = threading.Condition()

    def advance(self) -> None:
        """One more part is done (called by the task itself)."""
        with self._changed:
            self.done += 1
            self._changed.notify_all()

    def execute(self) -> None:
        """Run on this thread; an exception is kept in ``error`` for whoever waits."""
        run, self._run = self._run, None
        start = time.perf_counter()
        try:
            if run is not None:
                run(self)
        except BaseException as error:
            self.error = error
        finally:
            self.busy_s = time.perf_counter() - start
            with self._changed:
                self.finished = True
                self._changed.notify_all()

    def wait(self, parts: int | None = None, limit_s: float = WAIT_LIMIT_S) -> bool:
        """Block until the first ``parts`` (default: all) are done; False if the task failed first.

        Raises:
            StepError: its thread is gone, this is a forked copy of the process, or ``limit_s``
                is over.
        """
        wanted = self.parts if parts is None else parts
        whole = parts is None
        if not whole and self.done >= wanted:
            return True
        end = time.monotonic() + limit_s
        if self._worker is not None and not self.finished:
            self._worker.check_alive()  # before the lock, which a fork may have copied locked
        with self._changed:
            while not self.finished and (whole or self.done < wanted):
                self._changed.wait(0.2)
                if self.finished or (self.done >= wanted and not whole):
                    break
                if self._worker is not None:
                    self._worker.check_alive()
                if time.monotonic() > end:
                    raise StepError(
                        f"waited {limit_s:g} s for the optimizer thread; {self.done} of "
                        f"{self.parts} parts of the step are done. It may be stuck in the "
                        "optimizer's own step()."
                    )
        return self.error is None or self.done >= wanted


class _ShortInterval:
    """The interpreter's switch interval, short while any task runs, then as it was."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running = 0
        self._before = 0.0

    def __enter__(self) -> None:
        with self._lock:
            self._running += 1
            if self._running == 1:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before, SWITCH_INTERVAL_S))

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._running -= 1
            if self._running == 0:
                sys.setswitchinterval(self._before)


_short_interval = _ShortInterval()


class Worker:
    """One lasting thread that runs tasks in the order they were submitted.

    It starts with the first task, is a daemon, and is stopped by :meth:`stop`, by the garbage
    collector, or at exit, after the task in hand.

    Args:
        threads: of its CPU kernels; other threads keep theirs. None: :func:`default_threads`.
    """

    def __init__(self, threads: int | None = None) -> None:
        self.threads = default_threads() if threads is None else threads
        self._queue: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._stop: weakref.finalize[..., Worker] | None = None

    def submit(self, task: Task) -> None:
        """Run ``task`` after those submitted before.

        Raises:
            StepError: the thread is gone, or this is a forked copy of the process.
        """
        if self._thread is None:
            self._start()
        self.check_alive()
        task._worker = self
        self._queue.put(task)

    def check_alive(self) -> None:
        """Raise ``StepError`` if tasks submitted before can never finish."""
        if self._pid != os.getpid():
            raise StepError(
                f"this is process {os.getpid()}, forked from {self._pid} while the optimizer ran "
                "there; the thread that would finish the step exists only there. Call "
                "optimizer.synchronize() before forking."
            )
        if self._thread is not None and not self._thread.is_alive():
            raise StepError(
                "the optimizer thread is gone, its step was not finished. Load the last checkpoint."
            )

    def is_current(self) -> bool:
        """Whether the caller is this worker's thread."""
        return self._thread is threading.current_thread()

    def stop(self, limit_s: float = WAIT_LIMIT_S) -> None:
        """Finish what was submitted and end the thread; a later task starts another."""
        if self._stop is None or self._pid != os.getpid():
            return
        thread = self._thread
        self._stop.detach()
        self._stop = self._thread = None
        assert thread is not None
        _stop(self._queue, thread, limit_s)
        self._queue = queue.SimpleQueue()

    def _start(self) -> None:
        ready = threading.Event()
        own = torch.get_num_threads()
        self._pid = os.getpid()
        self._thread = threading.Thread(
            target=_loop,
            args=(self._queue, self.threads, ready),
            name="accel_scaler optimizer",
            daemon=True,
        )
        self._thread.start()
        ready.wait(WAIT_LIMIT_S)
        # What a thread sets becomes the default of threads born later; take that back.
        torch.set_num_threads(own)
        self._stop = weakref.finalize(self, _stop, self._queue, self._thread, EXIT_LIMIT_S)


def _loop(tasks: queue.SimpleQueue[Task | None], threads: int, ready: threading.Event) -> None:
    torch.set_num_threads(threads)
    ready.set()
    while (task := tasks.get()) is not None:
        with _short_interval:
            task.execute()
        del task  # its gradients


def _stop(tasks: queue.SimpleQueue[Task | None], thread: threading.Thread, limit_s: float) -> None:
    if not thread.is_alive() or thread is threading.current_thread():
        return
    tasks.put(None)
    thread.join(limit_s)
    if thread.is_alive():
        logger.error("the optimizer thread did not finish its step within %g s", limit_s)
