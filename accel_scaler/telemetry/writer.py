"""The telemetry file, open for appending while training goes on."""

from __future__ import annotations

import io
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
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

if TYPE_CHECKING:  # for the launcher's look at a path: these modules would import torch
    from ..config import ScalerConfig
    from ..optimizer_step import StepTiming
    from ..scaling import Losses

logger = logging.getLogger("accel_scaler")

MAX_WAIT_S = 0.5
"""Seconds after which waiting windows are written, and which a killed run may lose. One write for
each window would take several times as long: a step evicts the writer from the processor's cache.
"""
MAX_WAITING = 64
"""The most windows that wait."""


@dataclass(slots=True)
class OpenRecord:
    """The record of a window that another optimizer may join and whose updates may still run."""

    record: Record
    late_losses: Losses | None = None
    """Losses on their way to the host, still to be read."""
    timings: list[StepTiming] = field(default_factory=list)

    def complete(self) -> Record:
        """The record, with the loss and the times of updates as far as they are known by now."""
        if self.late_losses is not None:
            self.record = replace(self.record, loss=self.late_losses.total())
            self.late_losses = None
        if timings := [t for t in self.timings if t.finished]:
            busy = sum(t.busy for t in timings)
            waited = sum(t.busy if t.inline else sum(wait[1] for wait in t.waits) for t in timings)
            busy_us, waited_us = round(busy * 1e6), round(min(waited, busy) * 1e6)
            self.record = replace(self.record, optimizer_us=busy_us, waited_us=waited_us)
        return self.record


class Journal:
    """A telemetry file, open for appending, in a directory that is made if need be. ``facts``: the
    contents of the ``start`` line, besides the time and the format.

    It never ends a training run: after a failed write (a full disk) it warns, and writes no more.
    Windows are written in order, once the next one is there: some together, overflows at once.
    """

    def __init__(self, path: str, facts: Mapping[str, Any]) -> None:
        self.path = path = os.path.expanduser(path)
        self.start_s = time.perf_counter()
        """``perf_counter`` at the start line: the zero of all times in the file."""
        self.error: str | None = None
        """The error that ended the run."""
        self._names: tuple[str, ...] = ()
        self._waiting: list[OpenRecord] = []
        self._step = 0
        self._written_s = 0.0
        self._pid = os.getpid()
        refuse_unwritable(path)
        start = encode_line("start", format=FORMAT, unix_time=time.time(), **facts)
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            self._file = io.FileIO(path, "a+")
            if self._file.tell():
                self._file.seek(-1, os.SEEK_END)
                start = start if self._file.read(1) == b"\n" else f"\n{start}"  # it was cut off
            self._put(start)
        except OSError as error:
            raise _refusal(path, str(error)) from error

    def append(self, window: OpenRecord) -> None:
        """Append a window; from now on no optimizer joins the window before it."""
        overflowed = bool(self._waiting) and self._waiting[-1].record.found_inf
        late = time.perf_counter() - self._written_s >= MAX_WAIT_S
        if late or overflowed or len(self._waiting) == MAX_WAITING:
            self.flush()
        self._waiting.append(window)
        self._step = window.record.index

    def note(self, values: Mapping[str, float], mistake: str = "") -> None:
        """Write numbers that belong to no window, or a mistake of the script, if there is one."""
        if values or mistake:
            self._try_to_put(encode_noted(self._step, values, mistake))

    def flush(self) -> None:
        """Write all windows as far as they are known now, and new names before their norms."""
        self._written_s = time.perf_counter()
        lines = []
        for window in self._waiting:
            record = window.complete()
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


def refuse_unwritable(path: str) -> None:
    """Raise ``ConfigError`` for a path that cannot be written, and for a file of another kind or
    format. Creates nothing."""
    path, reason = os.path.expanduser(path), ""
    other = "it exists and is not a telemetry file, so nothing was appended"
    try:
        if not os.path.exists(path):
            folder = next(filter(os.path.exists, map(str, Path(path).absolute().parents)))
            if not (os.path.isdir(folder) and os.access(folder, os.W_OK)):
                reason = f"nothing can be made in {folder!r}"
        else:
            with io.FileIO(path, "a+") as file:
                file.seek(0)
                first = file.read(1 << 16).partition(b"\n")[0]
            start = decode(first) if first else Start()
            if not isinstance(start, Start):
                reason = other
            elif start.format != FORMAT:
                reason = f"it is of format {start.format}; this version writes {FORMAT}"
    except OSError as error:
        reason = error.strerror or str(error)
    except BrokenLineError:
        reason = other
    if reason:
        raise _refusal(path, reason)


def _refusal(path: str, reason: str) -> ConfigError:
    return ConfigError(
        f"telemetry: got {path!r}, which cannot be appended to: {reason}. Choose another path."
    )
