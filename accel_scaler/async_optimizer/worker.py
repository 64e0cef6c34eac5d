"""The optimizer thread: tasks in order, finished part by part; no wait without an end."""

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
from .compile_session import waiting_for_step

logger = logging.getLogger("accel_scaler")

SWITCH_INTERVAL_S = 1e-4
"""While a task runs. With the interpreter's 5 ms a training thread that runs Python makes the
optimizer thread wait that long after each kernel."""

EXIT_LIMIT_S = 60.0
"""Longest wait for the task in hand when the interpreter exits."""


def default_threads() -> int:
    """Physical cores that this process may use / ranks on this host, less one, at least 1."""
    import psutil  # a third of what importing this package would take

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
        self.timing = StepTiming()
        self.spent: list[Any] = []
        """What it leaves to be dropped when nobody waits for it any more: dropping a tensor gives
        the interpreter's lock away, and beside Python code each takes long to get it back."""
        self.is_known = False
        """Somebody has been told that it failed."""
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._changed = threading.Condition()

    def advance(self) -> None:
        """One more part is done (called by the task itself)."""
        with self._changed:
            self.done += 1
            self._changed.notify_all()

    def execute(self) -> None:
        """Run on this thread; an exception is kept in ``error`` for whoever waits."""
        with self._changed:
            run, self._run = self._run, None
        if run is None:
            return
        timing = self.timing
        timing.start = time.perf_counter()
        try:
            run(self)
        except BaseException as error:
            self.error = error
        finally:
            run = None  # whoever waits may look at once whether what it held is let go
            timing.busy, timing.finished = time.perf_counter() - timing.start, True
            with self._changed:
                self.finished = True
                self._changed.notify_all()

    def abandon(self, error: BaseException) -> bool:
        """Handing it over failed with ``error``. True: it never ran and never will."""
        with self._changed:
            return self._run is not None and self.end(error)

    def end(self, error: BaseException) -> bool:
        """:meth:`execute` was left by ``error``, an interrupt between its lines. False: it had
        ended already."""
        with self._changed:
            if self.finished:
                return False
            self._run, self.error, self.finished = None, error, True
            self.timing.finished = self.is_known = True  # it is raised where it was handed over
            self._changed.notify_all()
            return True

    def wait(self, parts: int | None = None, limit_s: float = WAIT_LIMIT_S) -> bool:
        """Block until the first ``parts`` (default: all) are done; False if the task failed first.

        Raises:
            StepError: its thread is gone, this is a forked copy of the process, or ``limit_s``
                is over.
            OrderError: the caller is the task itself.
        """
        wanted = self.parts + 1 if parts is None else parts
        if not self.finished and self.done < wanted:
            self._check_alive()  # before the lock, which a fork may have copied locked
            end = time.monotonic() + limit_s
            with waiting_for_step(), self._changed:
                while not self.finished and self.done < wanted:
                    self._changed.wait(0.2)
                    self._check_alive()
                    if time.monotonic() > end:
                        self._raise_late(limit_s)
        if self.error is None or self.done >= wanted:
            return True
        self.is_known = True
        return False

    def _check_alive(self) -> None:
        """Raise if waiting for this task has no end."""
        if self.finished or self._thread is None:
            return
        if self._pid != os.getpid():
            raise StepError(
                f"this is process {os.getpid()}, forked from {self._pid} while the optimizer ran "
                "there; the thread that would finish the step exists only there. Call "
                "optimizer.synchronize() before forking."
            )
        # ``current_thread`` would make a thread of autograd's one of Python's for good.
        if self._thread.ident == threading.get_ident():
            raise OrderError(
                "a step waits for itself: code on the optimizer thread used a parameter of the "
                "model, or called synchronize(), state_dict() or the like. Inside submit(fn) use "
                "optimizer.param_groups, which are what is stepped there."
            )
        if not self._thread.is_alive() and not self.finished:
            raise StepError(
                "the optimizer thread is gone, its step was not finished. Load the last checkpoint."
            )

    def _raise_late(self, limit_s: float) -> None:
        raise StepError(
            f"waited {limit_s:g} s for the optimizer thread; {self.done} of {self.parts} parts of "
            "the step are done. It may be stuck in the optimizer's own step()."
        )


class _ShortInterval:
    """The interpreter's switch interval, short while any task is due, then as it was."""

    def __init__(self) -> None:
        self._lock, self._pid = threading.Lock(), os.getpid()
        self._due: set[Task] = set()
        self._before = self._ours = 0.0

    def begin(self, task: Task) -> None:
        """It is on its way: its thread would wait for the lock even to start it."""
        if self._pid != os.getpid():  # a fork may have copied the lock locked
            if self._due:
                self._put_back()
            self.__init__()  # type: ignore[misc]
        with self._lock:
            is_first = not self._due
            self._due.add(task)
            if is_first:
                self._before = sys.getswitchinterval()
                sys.setswitchinterval(min(self._before, SWITCH_INTERVAL_S))
                self._ours = sys.getswitchinterval()

    def end(self, task: Task) -> None:
        """It is done."""
        if self._pid == os.getpid():
            with self._lock:
                self._due.discard(task)
                if not self._due:
                    self._put_back()

    def _put_back(self) -> None:
        # Unless it was as short before, or somebody has set another since.
        if self._before != self._ours == sys.getswitchinterval():
            sys.setswitchinterval(self._before)


_short_interval = _ShortInterval()


class Worker:
    """One lasting thread that runs tasks in the order they were submitted.

    It starts with the first task, is a daemon, and ends after the task in hand: at :meth:`stop`
    and at exit, which wait for it, or when nobody has the worker any more, which does not: the
    garbage collector runs on any thread, and holds whatever locks that one has.

    Args:
        threads: of its CPU kernels; other threads keep theirs. "auto": :func:`default_threads`.
    """

    def __init__(self, threads: int | str = "auto") -> None:
        self.threads = default_threads() if threads == "auto" else int(threads)
        self._queue: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._failed: list[Task] = []
        self._thread: threading.Thread | None = None
        self._pid = os.getpid()
        self._stop: weakref.finalize[..., Worker] | None = None

    def submit(self, task: Task) -> None:
        """Run ``task`` after those submitted before.

        Where the thread is gone, or exists only in the process that this one was forked from,
        another is started: tasks submitted before stay undone, and whoever waits is told.
        """
        if self._thread is None or not self._thread.is_alive() or self._pid != os.getpid():
            self._start()
        task._thread, task._pid = self._thread, self._pid
        try:
            _short_interval.begin(task)
            self._queue.put(task)
        except BaseException:  # Ctrl-C
            _short_interval.end(task)
            raise

    def is_current(self) -> bool:
        """Whether the caller is this worker's thread."""
        return self._thread is not None and self._thread.ident == threading.get_ident()

    def stop(self, limit_s: float = WAIT_LIMIT_S) -> None:
        """Finish what was submitted and end the thread; a later task starts another."""
        if self._stop is None or self._pid != os.getpid():
            return
        thread = self._thread
        self._stop.detach()
        self._stop = self._thread = None
        assert thread is not None
        _stop(self._queue, thread, self._failed, limit_s)

    def _start(self) -> None:
        ready = threading.Event()
        own = torch.get_num_threads()
        self._pid, self._queue, self._failed = os.getpid(), queue.SimpleQueue(), []
        self._thread = threading.Thread(
            target=_loop,
            args=(self._queue, self.threads, ready, self._failed),
            name="accel_scaler optimizer",
            daemon=True,
        )
        self._thread.start()
        ready.wait(WAIT_LIMIT_S)
        # What a thread sets becomes the default of threads born later; take that back.
        torch.set_num_threads(own)
        self._stop = weakref.finalize(self, self._queue.put, None)
        self._stop.atexit = False
        atexit.unregister(_stop_all)  # so that it comes before what was registered by now
        atexit.register(_stop_all)
        _running[self._thread] = self._queue, self._failed


def _loop(
    tasks: queue.SimpleQueue[Task | None],
    threads: int,
    ready: threading.Event,
    failed: list[Task],
) -> None:
    torch.get_num_threads()  # a thread's first use of torch takes the process's number; before ours
    torch.set_num_threads(threads)
    ready.set()
    while (task := tasks.get()) is not None:
        task.execute()
        task.spent.clear()
        _short_interval.end(task)
        if task.error is not None:
            failed[:] = [*(other for other in failed if not other.is_known), task]
        del task  # its gradients
    _say_unknown(failed)
    _running.pop(threading.current_thread(), None)


_running: dict[threading.Thread, tuple[queue.SimpleQueue[Task | None], list[Task]]] = {}
"""Those that the end of the process waits for."""


def _stop_all() -> None:
    for thread, (tasks, failed) in list(_running.items()):
        if thread.is_alive():  # not one of the process that this was forked from
            _stop(tasks, thread, failed, EXIT_LIMIT_S)


def _say_unknown(failed: list[Task]) -> None:
    for task in failed:
        if not task.is_known:  # nobody asks any more
            task.is_known = True
            logger.error("the last optimizer step failed", exc_info=task.error)


def _stop(
    tasks: queue.SimpleQueue[Task | None],
    thread: threading.Thread,
    failed: list[Task],
    limit_s: float,
) -> None:
    if thread is threading.current_thread():
        return
    if thread.is_alive():
        tasks.put(None)
        thread.join(limit_s)
    if thread.is_alive():
        logger.error("the optimizer thread did not finish its step within %g s", limit_s)
    _say_unknown(failed)
