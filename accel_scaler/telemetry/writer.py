"""The telemetry file, open for appending as training goes on."""

from __future__ import annotations

import errno
import logging
import os
import time
import weakref
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

__all__ = ["Journal", "check_path"]

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
        ConfigError: the path cannot be written, or is a file of another kind or a newer format.
    """

    def __init__(self, path: str, facts: Mapping[str, Any]) -> None:
        self.path = path = os.path.expanduser(path)
        self.start_s = time.perf_counter()
        """``perf_counter`` at the start line: the zero of all times in the file."""
        self._writer = _Writer(path)
        self._names = Names()
        self._windows = self._skips = 0
        try:
            self._writer.put(encode_start(time.time(), facts))
        except OSError as error:
            self._writer.close()
            raise ConfigError(_complaint(path, error.strerror or str(error))) from error

    def add(self, record: Record, names: Names) -> None:
        """Append one window, and before it the names of its parameters if they are new."""
        lines = [encode_window(record)]
        known = self._names.names
        if record.names and record.names is not known and record.names != known:
            lines.insert(0, encode_names(names))
        self._windows += 1
        self._skips += record.skipped
        if self._writer.try_to_put(*lines) and record.names:
            self._names = names

    def close(self, error: str | None = None) -> None:
        """Append the ``end`` line and close the file. Idempotent."""
        if not self._writer.closed:
            time_s = time.perf_counter() - self.start_s
            end = End(time_s, self._windows, self._skips, error, self._writer.lost)
            self._writer.try_to_put(encode_end(end))
            self._writer.close()


class _Writer:
    """Whole lines to a file descriptor, appended, unbuffered."""

    def __init__(self, path: str) -> None:
        self.lost = 0
        """Windows that could not be written."""
        self._path, self._pid = path, os.getpid()
        fd, self._torn = _open(path)
        self._fd: int | None = fd
        self._close = weakref.finalize(self, _close, fd, self._pid)

    @property
    def closed(self) -> bool:
        """Closed, or a copy in a forked process, which must not write."""
        return self._fd is None or self._pid != os.getpid()

    def put(self, *lines: str) -> None:
        """Append; raises ``OSError`` (then the next line begins afresh)."""
        if self.closed:
            return
        assert self._fd is not None
        text = "\n".join((*[""] * self._torn, *lines, ""))
        data = memoryview(text.encode())
        while data:
            done = os.write(self._fd, data)
            self._torn = data[done - 1] != NEWLINE
            data = data[done:]

    def try_to_put(self, *lines: str) -> bool:
        """Append, or warn, once, that it is not possible."""
        try:
            self.put(*lines)
        except OSError as error:
            if not self.lost:
                reason = error.strerror or errno.errorcode.get(error.errno or 0, "OSError")
                logger.warning(
                    f"telemetry={self._path!r} cannot be written: {reason}. Training goes on; "
                    "later windows are tried again. (Said once.)"
                )
            self.lost += 1
            return False
        return True

    def close(self) -> None:
        """Close the file; what follows is dropped."""
        self._fd = None
        self._close()


def _close(fd: int, pid: int) -> None:
    if pid == os.getpid():
        os.close(fd)


def check_path(path: str) -> None:
    """Look, without making or writing anything, whether ``path`` can be appended to.

    Raises:
        ConfigError: as :class:`Journal`; what only a write shows (a full disk) is not seen.
    """
    path = os.path.expanduser(path)
    folder = os.path.dirname(os.path.abspath(path))
    while not os.path.exists(folder):  # those below it are made
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder):
        raise ConfigError(_complaint(path, f"{folder!r} is not a directory"))
    if os.path.isdir(path):
        raise ConfigError(_complaint(path, "it is a directory"))
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise ConfigError(_complaint(path, "it may not be written"))
    if os.path.isfile(path):
        _is_torn(path)


def _open(path: str) -> tuple[int, bool]:
    """A descriptor, directories made; and whether the file's last line is cut off.

    Raises:
        ConfigError: it cannot be written, or is not telemetry.
    """
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        torn = os.path.isfile(path) and _is_torn(path)  # a pipe or a terminal has nothing to see
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666), torn
    except FileExistsError as error:
        reason = f"{os.path.dirname(path)!r} is not a directory"
        raise ConfigError(_complaint(path, reason)) from error
    except OSError as error:
        raise ConfigError(_complaint(path, error.strerror or str(error))) from error


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
    try:
        start = decode(first)
    except CutLineError:
        if first.startswith(b'{"kind"') and len(first) < LONGEST_START:
            return None  # its writer was killed at once, and perhaps another came since
        start = None
    except BrokenLineError:
        start = None
    if not isinstance(start, Start):
        return "it exists and is not a telemetry file, so nothing was appended"
    if start.format > FORMAT:
        return f"it exists, in format {start.format!r}; this version writes {FORMAT}"
    return None


def _complaint(path: str, reason: str) -> str:
    return f"telemetry: got {path!r}, which cannot be appended to: {reason}. Choose another path."
