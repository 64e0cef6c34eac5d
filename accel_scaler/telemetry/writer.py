"""The telemetry file, open for appending as training goes on."""

from __future__ import annotations

import io
import logging
import os
import stat
import time
from collections.abc import Mapping
from typing import Any

from ..errors import ConfigError
from .record import (
    FORMAT,
    BrokenLineError,
    CutLineError,
    End,
    Names,
    Record,
    Start,
    decode,
    encode_end,
    encode_names,
    encode_start,
    encode_window,
)

logger = logging.getLogger("accel_scaler")

NEWLINE = ord("\n")

LONGEST_START = 1 << 16
"""Bytes that the first line of a telemetry file may have."""


class Journal:
    """A telemetry file that is open for appending. Never ends a training run.

    The file is opened and its ``start`` line written here, so that a path that cannot be written
    is known before training. Afterwards a failing write (a full disk) is a warning, once; later
    windows are tried again, and how many were lost stands in the ``end`` line.

    Args:
        path: the file; directories above it are made.
        facts: what the ``start`` line says of the run, besides the time and the format.

    Raises:
        ConfigError: the path cannot be written, is no regular file, or is a file of another kind
            or a newer format.
    """

    def __init__(self, path: str, facts: Mapping[str, Any]) -> None:
        self.path = path = os.path.expanduser(path)
        self.start_s = time.perf_counter()
        """``perf_counter`` at the start line: the zero of all times in the file."""
        self._names = Names()
        self._windows = self._skips = self._lost = 0
        self._pid = os.getpid()
        try:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
            _refuse_irregular(path)
            # A terminal has nothing to see.
            self._is_torn = os.path.isfile(path) and _is_torn(path)
            self._file = io.FileIO(path, "a")
            self._put(encode_start(time.time(), facts))
        except OSError as error:
            raise ConfigError(_complaint(path, str(error))) from error

    def add(self, record: Record, names: Names) -> None:
        """Append one window, and before it the names of its parameters if they are new."""
        lines = [encode_window(record)]
        known = self._names.names
        if record.names and record.names is not known and record.names != known:
            lines.insert(0, encode_names(names))
        self._windows += 1
        self._skips += record.skipped
        if self._try_to_put(*lines) and record.names:
            self._names = names

    def close(self, error: str | None = None) -> None:
        """Append the ``end`` line and close the file. Idempotent."""
        time_s = time.perf_counter() - self.start_s
        end = End(time_s, self._windows, self._skips, error, self._lost)
        self._try_to_put(encode_end(end))
        self._file.close()

    def _put(self, *lines: str) -> None:
        """Append whole lines; raises ``OSError`` (then the next line begins afresh)."""
        if self._file.closed or self._pid != os.getpid():  # a copy in a forked process
            return
        data = memoryview("\n".join((*[""] * self._is_torn, *lines, "")).encode())
        while data:
            done = os.write(self._file.fileno(), data)
            self._is_torn = data[done - 1] != NEWLINE
            data = data[done:]

    def _try_to_put(self, *lines: str) -> bool:
        """Append, or warn, once, that it is not possible."""
        try:
            self._put(*lines)
        except OSError as error:
            if not self._lost:
                logger.warning(
                    f"telemetry={self.path!r} cannot be written: {error.strerror}. Training goes "
                    "on; later windows are tried again. (Said once.)"
                )
            self._lost += 1
            return False
        return True


def refuse_unwritable(path: str) -> None:
    """Find out whether a :class:`Journal` could be opened, and open none.

    Raises:
        ConfigError: as the journal would.
    """
    path = os.path.expanduser(path)
    try:
        if os.path.exists(path):
            _refuse_irregular(path)
            if os.path.isfile(path):
                _is_torn(path)
                io.FileIO(path, "a").close()
        elif not os.path.basename(path):
            raise ConfigError(_complaint(path, "that is the name of a folder"))
    except OSError as error:
        raise ConfigError(_complaint(path, error.strerror or str(error))) from None


def _refuse_irregular(path: str) -> None:
    """Raise ``ConfigError`` for what is there and is neither a file nor a terminal:
    to open a pipe, and to write to it, would wait for whoever reads there."""
    if os.path.exists(path):
        mode = os.stat(path).st_mode
        if stat.S_ISDIR(mode):
            raise ConfigError(_complaint(path, "it is a folder"))
        if not (stat.S_ISREG(mode) or stat.S_ISCHR(mode)):
            reason = "it is no regular file; a pipe would let training wait for its reader"
            raise ConfigError(_complaint(path, reason))


def _is_torn(path: str) -> bool:
    with open(path, "rb") as file:
        first = file.readline(LONGEST_START)
        if not first:
            return False
        if (reason := _why_not_ours(first)) is not None:
            raise ConfigError(_complaint(path, reason))
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _why_not_ours(first: bytes) -> str | None:
    """What speaks against appending to a file whose first line begins so; None: nothing."""
    start = None
    try:
        start = decode(first)
    except BrokenLineError as error:
        if isinstance(error, CutLineError) and first.startswith(b'{"kind"'):
            return None  # its writer was killed at once, and perhaps another came since
    if not isinstance(start, Start):
        return "it exists and is not a telemetry file, so nothing was appended"
    if start.format > FORMAT:
        return f"it exists, in format {start.format!r}; this version writes {FORMAT}"
    return None


def _complaint(path: str, reason: str) -> str:
    return f"telemetry: got {path!r}, which cannot be appended to: {reason}. Choose another path."
