"""A launcher that is told to end ends its job, too, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator

import psutil

__all__ = ["GRACE", "Ended", "end_children", "ended_by_signals", "shell_status"]

GRACE = 15.0
"""Seconds that the script has to end by itself (to write a checkpoint) once it has been told."""

LAST = 5.0
"""Seconds between SIGTERM and SIGKILL for what is left then."""


class Ended(BaseException):
    """SIGTERM or SIGHUP came; ``args[0]`` is its number. Not an Exception: it passes handlers."""


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Raise :class:`Ended` where SIGTERM and SIGHUP would end this process without clean-up.

    A signal that has a handler, or is ignored (nohup), stays so; only the main thread can do this.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # no SIGHUP on Windows
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                before[number] = signal.signal(number, _raise)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _raise(number: int, frame: object) -> None:
    raise Ended(number)


def end_children(error: BaseException) -> int:
    """End the processes that this one started, after ``error``; returns the exit status.

    A Ctrl-C has reached them already, through the terminal. Otherwise they get SIGTERM. After
    ``GRACE`` seconds, or a second signal, what is left gets SIGTERM and then SIGKILL.
    """
    number = error.args[0] if isinstance(error, Ended) else int(signal.SIGINT)
    own = psutil.Process()
    children, family = own.children(), own.children(recursive=True)
    try:
        if isinstance(error, Ended):
            _tell(children)  # they end their own children
        psutil.wait_procs(children, timeout=GRACE)
    finally:
        _tell(family)
        try:
            psutil.wait_procs(family, timeout=LAST)
        finally:
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
    return 128 + number


def _tell(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()


def shell_status(code: int) -> int:
    """An exit status as a shell gives it: 128 + n for a process that signal n ended."""
    return code if code >= 0 else 128 - code
