"""The telemetry file, open for appending while training goes on."""

from __future__ import annotations

import io
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .record import (
    FORMAT,
    BrokenLineError,
    Record,
    Start,
    decode,
    encode_line,
    encode_noted,
    encode_window,
)

if TYPE_CHECKING:  # it is not needed to read a file
    from ..config import ScalerConfig

logger = logging.getLogger("accel_scaler")

MAX_WAIT_S = 0.5
"""Seconds after which waiting windows are written, and which a killed run may lose. One write for
each window would take several times as long: a step evicts the writer from the processor's cache.
"""


class Journal:
    """A telemetry file, open for appending, in a directory that is made if need be. ``facts``: the
    contents of the ``start`` line, besides the time and the format.

    It never ends a training run: after a failed write (a full disk) it warns, and writes no more.
    Raises ``ConfigError`` for a path that cannot be written, and for a file of another kind or
    format, which is left alone.
    """

    def __init__(self, path: str, facts: Mapping[str, Any]) -> None:
        self.path = path = os.path.expanduser(path)
        self.start_s = time.perf_counter()
        """``perf_counter`` at the start line: the zero of all times in the file."""
        self.error: str | None = None
        """The error that ended the run."""
        self._names: tuple[str, ...] = ()
        self._waiting: list[Record] = []
        self._step = 0
        self._written_s = 0.0
        self._pid = os.getpid()
        start = encode_line("start", format=FORMAT, unix_time=time.time(), **facts)
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            if not (reason := _unlike(path)):
                self._file = io.FileIO(path, "a+")
                if self._file.tell():
                    self._file.seek(-1, os.SEEK_END)
                    start = start if self._file.read(1) == b"\n" else f"\n{start}"  # it was cut off
                self._put(start)
        except OSError as error:
            reason = str(error)
        if reason:
            raise ConfigError(
                f"telemetry: got {path!r}, which cannot be appended to: {reason}. Choose another "
                "path."
            )

    def add(self, record: Record) -> None:
        """Append the record of a window, or replace an earlier record of this window."""
        if self._waiting and self._waiting[-1].index == record.index:
            self._waiting.pop()
        elif time.perf_counter() - self._written_s >= MAX_WAIT_S:
            self.flush()
        self._waiting.append(record)
        self._step = record.index

    def note(self, values: Mapping[str, float], mistake: str = "") -> None:
        """Write numbers that belong to no window, or a mistake of the script, if there is one."""
        if values or mistake:
            self._try_to_put(encode_noted(self._step, values, mistake))

    def flush(self) -> None:
        """Write all windows, and new names before their norms."""
        self._written_s = time.perf_counter()
        lines = []
        for record in self._waiting:
            if record.names and record.names != self._names:
                self._names = record.names
                lines.append(encode_line("names", names=record.names))
            lines.append(encode_window(record))
        self._waiting.clear()
        self._try_to_put(*lines)

    def close(self, at_end: Callable[[], Mapping[str, float]] = dict) -> None:
        """Write the rest, the numbers of ``at_end`` and the ``end`` line. Idempotent."""
        self.flush()
        self.note(at_end())
        error = getattr(sys, "last_value", None)  # the exception that ends the process, at its exit
        if self.error is None and error is not None and not hasattr(sys, "ps1"):
            self.error = f"{type(error).__name__}: {error}"
        seconds = round(time.perf_counter() - self.start_s, 6)
        self._try_to_put(encode_line("end", time=seconds, error=self.error))
        self._file.close()

    def _put(self, *lines: str) -> None:
        data = memoryview("\n".join((*lines, "")).encode())
        while data:
            data = data[os.write(self._file.fileno(), data) :]

    def _try_to_put(self, *lines: str) -> None:
        """Append whole lines; where that fails, warn and close the file."""
        if self._file.closed or self._pid != os.getpid():  # a forked process has a copy
            return
        try:
            self._put(*lines)
        except OSError as error:
            self._file.close()
            logger.warning(
                f"telemetry={self.path!r} cannot be written any more: {error.strerror}. Training "
                "goes on without it."
            )


def path_of(config: ScalerConfig, rank: int) -> str | None:
    """The telemetry file of this rank: of rank 0 alone, unless the path has ``{rank}``. None for a
    rank without one."""
    path = os.fspath(config.telemetry or "")
    is_written = rank == 0 or "{rank}" in path
    return path.replace("{rank}", str(rank)) if path and is_written else None


def _unlike(path: str) -> str:
    """Why nothing is appended to the file that is there; "" if it is one of this format."""
    if not os.path.exists(path):
        return ""
    with open(path, "rb") as file:
        first = file.readline(1 << 16)
    try:
        start = decode(first) if first else Start()
    except BrokenLineError:
        start = None
    if not isinstance(start, Start):
        return "it exists and is not a telemetry file, so nothing was appended"
    if start.format != FORMAT:
        return f"it is of format {start.format}; this version writes {FORMAT}"
    return ""
