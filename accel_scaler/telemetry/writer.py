"""The telemetry file, open for appending while training goes on."""

from __future__ import annotations

import io
import logging
import os
import stat
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from ..errors import ConfigError
from .record import (
    FORMAT,
    BrokenLineError,
    CutLineError,
    Names,
    Record,
    Start,
    decode,
    encode_line,
    encode_window,
)

logger = logging.getLogger("accel_scaler")

MAX_START = 1 << 16
"""Bytes of the first line of a telemetry file."""


class Journal:
    """A telemetry file that is open for appending. Never ends a training run.

    The file is opened and its ``start`` line written here, so that a path that cannot be written
    is refused before training. Afterwards a failing write (a full disk) is a warning, once; later
    windows are tried again, and the ``end`` line has the number of lost ones.

    Args:
        path: the file; directories above it are made.
        facts: the contents of the ``start`` line, besides the time and the format.

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
            self._is_torn = _is_torn(path)
            self._file = io.FileIO(path, "a")
            self._put(encode_line("start", format=FORMAT, unix_time=time.time(), **facts))
        except OSError as error:
            raise _refusal(path, str(error)) from error

    def append(self, record: Record, names: Names) -> None:
        """Append one window, and before it the names of its parameters if they are new."""
        lines = [encode_window(record)]
        if record.names and record.names != self._names.names:
            lines.insert(0, encode_line("names", **asdict(names)))
        self._windows += 1
        self._skips += record.skipped
        if self._try_to_put(*lines) and record.names:
            self._names = names

    def close(self, error: str | None = None) -> None:
        """Append the ``end`` line and close the file. Idempotent."""
        end: dict[str, Any] = {"time": round(time.perf_counter() - self.start_s, 6)}
        end |= {"windows": self._windows, "skips": self._skips, "error": error}
        self._try_to_put(encode_line("end", **end, **({"lost": self._lost} if self._lost else {})))
        self._file.close()

    def _put(self, *lines: str) -> None:
        """Append whole lines; after an ``OSError`` the next line begins afresh."""
        if self._file.closed or self._pid != os.getpid():  # a copy in a forked process
            return
        data = memoryview("\n".join((*[""] * self._is_torn, *lines, "")).encode())
        while data:
            done = os.write(self._file.fileno(), data)
            self._is_torn = data[done - 1] != ord("\n")
            data = data[done:]

    def _try_to_put(self, *lines: str) -> bool:
        """Append, or warn, once, that it is not possible."""
        try:
            self._put(*lines)
        except OSError as error:
            if not self._lost:
                logger.warning(
                    f"telemetry={self.path!r} cannot be written: {error.strerror}. Training goes "
                    "on; later windows are tried again. (Logged once.)"
                )
            self._lost += 1
            return False
        return True


def refuse_unwritable(path: str) -> None:
    """Refuse what a :class:`Journal` would refuse; make nothing.

    Raises:
        ConfigError: as the journal would.
    """
    path = os.path.expanduser(path)
    try:
        if os.path.exists(path):
            _is_torn(path)
            io.FileIO(path, "a").close()
        elif not os.path.basename(path):
            raise _refusal(path, "that is the name of a folder")
    except OSError as error:
        raise _refusal(path, error.strerror or str(error)) from None


def _is_torn(path: str) -> bool:
    """Whether the last line of the file has no end; False where there is no file.

    Raises:
        ConfigError: this is no file, or one of another kind or a newer format.
    """
    if not os.path.exists(path):
        return False
    mode = os.stat(path).st_mode
    if stat.S_ISCHR(mode):  # a terminal, or the null device
        return False
    if not stat.S_ISREG(mode):  # writing to a pipe would wait for its reader
        kind = "a folder" if stat.S_ISDIR(mode) else "no regular file"
        raise _refusal(path, f"it is {kind}")
    with open(path, "rb") as file:
        first = file.readline(MAX_START)
        if not first:
            return False
        if (reason := _why_not_ours(first)) is not None:
            raise _refusal(path, reason)
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _why_not_ours(first: bytes) -> str | None:
    """Why nothing is appended to a file whose first line begins so; None: it may be."""
    start = None
    try:
        start = decode(first)
    except BrokenLineError as error:
        if isinstance(error, CutLineError) and first.startswith(b'{"kind"'):
            return None  # its writer was killed at once
    if not isinstance(start, Start):
        return "it exists and is not a telemetry file, so nothing was appended"
    if start.format > FORMAT:
        return f"it exists, in format {start.format!r}; this version writes {FORMAT}"
    return None


def _refusal(path: str, reason: str) -> ConfigError:
    return ConfigError(
        f"telemetry: got {path!r}, which cannot be appended to: {reason}. Choose another path."
    )
