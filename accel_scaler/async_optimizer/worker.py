"""The optimizer thread: runs tasks in order, part by part. Every wait for one has an end."""

from __future__ import annotations

import atexit
import logging
import os
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..errors import OrderError, StepError
from ..optimizer_step import StepTiming
from ..scaling import WAIT_LIMIT_S

logger = logging.getLogger("accel_scaler")

SWITCH_INTERVAL_S = 1e-4
"""The interpreter's switch interval while there is such a thread. With its 5 ms, a training thread
that runs Python makes the optimizer thread wait that long to begin, and after each kernel."""

MIN_WAIT_S, MAX_WAITS = 1e-5, 128
"""A shorter wait is not recorded (the part was done), nor more of them of one task."""

EXIT_LIMIT_S = 60.0
"""Longest wait for the task that runs when the interpreter exits."""


def default_threads() -> int:
    """Physical cores that this process may use / ranks on this host, less one, at least 1."""
    import psutil  # a third of what importing this package would take

    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    cores = min(psutil.cpu_count(logical=False) or allowed or 1, allowed or 1)
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE") or 1)
    return max(1, cores // max(ranks, 1) - 1)


class Task:
    """Work in ``parts`` that are finished in order; a wait is for the first n of them."""

    def __init__(self, run: Callable[[], None], parts: int) -> None:
        self._run: Callable[[], None] | None = run
        self.parts = parts
        self.done = 0
        """Parts finished; only grows."""
        self.finished = False
        """Nothing more will happen: all parts are done, or ``error`` is set."""
        self.error: BaseException | None = None
        self.timing = StepTiming()
        self.spent: list[Any] = []
        """Tensors that the thread drops at the end. Dropping one releases the interpreter's lock,
        and beside a thread that runs Python it takes long to get back."""
        self.thread: threading.Thread | None = None
        """The thread that it was submitted to, or that runs it."""
        self._changed = threading.Condition()

    def advance(self) -> None:
        """One more part is done (called by the task itself)."""
        with self._changed:
            self.done += 1
            self._changed.notify_all()

    def execute(self) -> None:
        """Run on this thread. An exception is logged, and stored in ``error``."""
        with self._changed:
            run, self._run = self._run, None
        if run is None:
            return
        self.thread = threading.current_thread()
        timing = self.timing
        timing.start = time.perf_counter()
        try:
            run()
        except BaseException as error:
            self.error, text = error, f"{type(error).__name__}: {error}"  # a log keeps no traceback
            logger.error("a step on the optimizer thread failed; the next call raises it: %s", text)
        finally:
            run = None  # a caller that waits may check at once whether its tensors are released
            timing.busy, timing.finished = time.perf_counter() - timing.start, True
            with self._changed:
                self.finished = True
                self._changed.notify_all()
            self.spent.clear()

    def abandon(self, error: BaseException) -> bool:
        """Fail with ``error``, which is raised where it was to be submitted. False: it runs
        already."""
        with self._changed:
            if self._run is None:
                return False
            self._run, self.error, self.finished = None, error, True
            self.timing.finished = True
            self._changed.notify_all()
            return True

    def wait(self, parts: int | None = None, limit_s: float = WAIT_LIMIT_S) -> bool:
        """Block until the first ``parts`` (default: all) are done; False if the task failed first.

        Raises:
            StepError: its thread is gone, this is a forked copy of the process, or ``limit_s``
                is over.
            OrderError: the caller is the task itself, or compiles code, which the step waits for.
        """
        wanted = self.parts + 1 if parts is None else parts
        if not self.finished and self.done < wanted:
            start = time.perf_counter()
            self._block(wanted, start + limit_s, limit_s)
            length = time.perf_counter() - start
            if length > MIN_WAIT_S and len(self.timing.waits) < MAX_WAITS:
                self.timing.waits.append((start, length))
        return self.error is None or self.done >= wanted

    def _block(self, wanted: int, end: float, limit_s: float) -> None:
        self._check_alive()  # before the lock, which a fork may have copied locked
        with self._changed:
            while not self.finished and self.done < wanted:
                self._changed.wait(0.2)
                self._check_alive()
                if time.perf_counter() > end:
                    raise StepError(
                        f"waited {limit_s:g} s for the optimizer thread; {self.done} of "
                        f"{self.parts} parts of the step are done. It may be stuck in the "
                        "optimizer's own step()."
                    )

    def _check_alive(self) -> None:
        """Raise if waiting for this task has no end."""
        thread = self.thread
        if self.finished or thread is None:
            return
        # ``current_thread`` would make a thread of autograd's one of Python's for good.
        if thread.ident == threading.get_ident():
            raise OrderError(
                "a step waits for itself: the optimizer's code, or a function given to submit(), "
                "used a parameter of the model or its .grad, or called synchronize(), state_dict() "
                "or the like. Inside submit(fn) use "
                "optimizer.param_groups: the parameters that are stepped there."
            )
        if torch._guards.CompileContext.try_get() is not None:
            raise OrderError(
                "torch.compile compiles code that uses a parameter whose update is running, and "
                "no step runs beside a compile. Call optimizer.synchronize() before the first call "
                "of compiled code, or use step_mode='sync'."
            )
        if not thread.is_alive() and not self.finished:
            raise StepError(
                "the optimizer thread is gone, its step was not finished. Close the optimizer, "
                "make another, and load the last checkpoint; in a process that was forked beside "
                "a step, call optimizer.synchronize() before forking."
            )


_running: dict[threading.Thread, queue.SimpleQueue[Task | None]] = {}
"""Threads that the interpreter's exit waits for."""

_interval = [0.0]
"""The interpreter's switch interval before it was shortened; 0: it is not."""


class Worker:
    """One lasting thread that runs tasks in the order in which they were submitted. Its CPU kernels
    use :func:`default_threads`; other threads keep theirs.

    It starts with the first task and is a daemon. :meth:`stop` and the interpreter's exit wait for
    its tasks. Where the worker is only dropped, nothing waits: the garbage collector runs on any
    thread, under whatever locks that thread holds.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None

    def submit(self, task: Task) -> None:
        """Run ``task`` after those submitted before. Where the thread is gone, or exists only in
        the process that this one was forked from, another is started. Tasks submitted before stay
        undone, and waiting for them raises."""
        self.start()
        task.thread = self.thread
        self._queue.put(task)

    def is_current(self) -> bool:
        """Whether the caller is this worker's thread."""
        return self.thread is not None and self.thread.ident == threading.get_ident()

    def stop(self, limit_s: float = WAIT_LIMIT_S) -> None:
        """Finish all submitted tasks and end the thread; a later task starts another."""
        thread, self.thread = self.thread, None
        if thread is not None:
            _join(thread, self._queue, limit_s)

    def start(self) -> None:
        """Start the thread, unless there is one. Raises ``RuntimeError`` where none can be had."""
        if self.thread is not None and self.thread.is_alive():
            return
        ready = threading.Event()
        own = torch.get_num_threads()
        self._queue = queue.SimpleQueue()
        arguments = self._queue, default_threads(), ready
        name = "accel_scaler optimizer"
        self.thread = threading.Thread(target=_loop, args=arguments, name=name, daemon=True)
        self.thread.start()
        ready.wait(WAIT_LIMIT_S)
        # What a thread sets becomes the default of threads born later; take that back.
        torch.set_num_threads(own)
        weakref.finalize(self, self._queue.put, None).atexit = False
        atexit.unregister(_join_all)
        atexit.register(_join_all)
        if (interval := sys.getswitchinterval()) > SWITCH_INTERVAL_S:
            _interval[0] = interval
            sys.setswitchinterval(SWITCH_INTERVAL_S)
        _running[self.thread] = self._queue


def _loop(tasks: queue.SimpleQueue[Task | None], threads: int, ready: threading.Event) -> None:
    torch.get_num_threads()  # a thread's first use of torch takes the process's number; before ours
    torch.set_num_threads(threads)
    ready.set()
    try:
        while (task := tasks.get()) is not None:
            task.execute()
            del task  # its gradients
    finally:
        _running.pop(threading.current_thread(), None)
        if not _running and _interval[0]:
            sys.setswitchinterval(_interval[0])
            _interval[0] = 0.0


def _join_all() -> None:
    for thread, tasks in list(_running.items()):
        _join(thread, tasks, EXIT_LIMIT_S)


def _join(thread: threading.Thread, tasks: queue.SimpleQueue[Task | None], limit_s: float) -> None:
    if thread is threading.current_thread() or not thread.is_alive():  # as after a fork
        return
    tasks.put(None)
    thread.join(limit_s)
    if thread.is_alive():
        logger.error("the optimizer thread did not finish its step within %g s", limit_s)
