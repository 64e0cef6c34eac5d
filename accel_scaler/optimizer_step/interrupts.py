"""Signals held back while an update is made: Ctrl-C never leaves half of one behind."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

__all__ = ["Undivided"]

NUMBERS = tuple(
    int(getattr(signal, name))
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)
"""Those that end a run, or ask it for a checkpoint. A handler in C, or none, is left alone."""

# The C module behind it where there is one: without enumerations a step pays 7 us, not 47.
_module: Any = sys.modules.get("_signal", signal)
_get: Callable[[int], Any] = _module.getsignal
_set: Callable[[int, Any], Any] = _module.signal


class Undivided:
    """Python handlers of signals run after the block instead of in its midst.

    A handler that raises (Ctrl-C does) or saves a checkpoint then never meets an update of which
    some parameters have had their share and others not. A signal that comes a second time is
    handled at once, so that a block which does not end can be ended. Does nothing on another
    thread than the process's main one, where no handler runs, and inside another such block.
    """

    _inside = False

    __slots__ = ("_before", "_kept", "_outermost")

    def __init__(self) -> None:
        self._before: dict[int, Any] = {}
        self._kept: dict[int, FrameType | None] = {}
        self._outermost = False

    def __enter__(self) -> Undivided:
        if Undivided._inside or threading.current_thread() is not threading.main_thread():
            return self
        try:
            for number in NUMBERS:
                handler = _get(number)
                if callable(handler):
                    self._before[number] = handler
                    _set(number, self._keep)
            self._outermost = Undivided._inside = True
        except BaseException:  # one that is not held back yet
            self._restore()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if not self._outermost:
            return
        handlers = dict(self._before)
        self._restore()
        for number, frame in list(self._kept.items()):
            handlers[number](number, frame)

    def _restore(self) -> None:
        """The handlers that were there; a signal that comes meanwhile must not stop it."""
        self._outermost = Undivided._inside = False
        try:
            while self._before:
                number = next(iter(self._before))
                if _get(number) == self._keep:  # nobody else has set another since
                    _set(number, self._before[number])
                del self._before[number]
        finally:
            if self._before:
                self._restore()

    def _keep(self, number: int, frame: FrameType | None) -> None:
        if number in self._kept:
            self._before[number](number, frame)
        else:
            self._kept[number] = frame
