"""A telemetry file that is being written: what is new in it, and no byte read twice."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable

from ..errors import ConfigError
from ..telemetry import BrokenLineError, Record, Start, decode
from .reader import LONGEST_LINE, RunReader
from .run_summary import Run

CHUNK = 1 << 20
"""Bytes that are read at once."""
HEAD = 256
"""Bytes by which a file is known to have been written anew."""
RECENT = 50
"""Windows that the present speed is of."""


class Follower:
    """Reads a file as it grows, into a :class:`Run`.

    A file that is not there is waited for. One that has become shorter, or another one under its
    name, is begun again; what was left in the old one is read first.

    Args:
        path: the file.
        clock: seconds.
    """

    def __init__(self, path: str, clock: Callable[[], float] = time.monotonic) -> None:
        self.path = path
        self._clock = clock
        self._fd: int | None = None
        self._start: Start | None = None
        self.note = ""
        """What is odd about the file, or that it is not there yet."""
        self._begin()

    def _begin(self) -> None:
        self._reader = RunReader(self.path)
        self._tail = b""
        self._head = b""
        self._at = self._size = 0
        self._times: deque[float] = deque(maxlen=RECENT)
        self._last_index = -1
        self._new_at: float | None = None

    @property
    def run(self) -> Run:
        """All that was read."""
        return self._reader.run

    @property
    def is_over(self) -> bool:
        """The last session has its end line, and nothing follows it. One without a window is none:
        a launcher attached, and its script is about to."""
        last = self.run.sessions[-1] if self.run.sessions else None
        return last is not None and last.ended and not last.is_empty and self.share_read == 1

    @property
    def share_read(self) -> float:
        """Of the file as it was last, from 0 to 1."""
        return 1.0 if self._at >= self._size else self._at / self._size

    @property
    def windows_per_second(self) -> float | None:
        """Of the last windows; None: there are too few."""
        seconds = self._times[-1] - self._times[0] if self._times else 0.0
        return (len(self._times) - 1) / seconds if seconds > 0 else None

    @property
    def silent_s(self) -> float | None:
        """Seconds since there was something new; None: there was nothing at all."""
        return None if self._new_at is None else self._clock() - self._new_at

    def poll(self, most_s: float = 0.25) -> bool:
        """Read what is new, for at most about ``most_s`` seconds; whether there was anything.

        Raises:
            ConfigError: it cannot be read, or is not telemetry; one line.
        """
        try:
            if not self._is_open():
                return False
            return self._read(self._clock() + most_s)
        except OSError as error:
            raise ConfigError(
                f"{self.path}: cannot be read ({error.strerror or error}); "
                "expected a telemetry file."
            ) from None

    def close(self) -> None:
        """Let go of the file."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _is_open(self) -> bool:
        """There is a file to read, from where it was left or from its beginning."""
        if self._fd is None:
            try:
                self._fd = os.open(self.path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
            except FileNotFoundError:
                self.note = self.note or "waiting for the file"
                return False
            self.note = ""
            if self._at:
                self._begin()  # what was read is of the one that is gone
        held = os.fstat(self._fd)
        self._size = held.st_size
        if self._size < self._at or self._is_written_anew():
            self._begin()
            self._size = held.st_size
            self.note = "the file was begun again"
        elif self._at == self._size and self._is_another(held):
            self.close()
            self.note = "the file is gone; waiting for another"
            return self._is_open()
        return True

    def _is_written_anew(self) -> bool:
        return bool(self._head) and self._peek(len(self._head)) != self._head

    def _is_another(self, held: os.stat_result) -> bool:
        """Another file, or none, has its name by now."""
        try:
            now = os.stat(self.path)
        except FileNotFoundError:
            return True
        return (now.st_dev, now.st_ino) != (held.st_dev, held.st_ino)

    def _peek(self, count: int) -> bytes:
        assert self._fd is not None
        os.lseek(self._fd, 0, os.SEEK_SET)
        return os.read(self._fd, count)

    def _read(self, until: float) -> bool:
        assert self._fd is not None
        if len(self._head) < min(HEAD, self._size):
            self._head = self._peek(HEAD)
        os.lseek(self._fd, self._at, os.SEEK_SET)
        is_new = False
        while data := os.read(self._fd, CHUNK):
            is_new = True
            self._at += len(data)
            *lines, self._tail = (self._tail + data).split(b"\n")
            for line in lines:
                self._take(line + b"\n")
            if len(self._tail) > LONGEST_LINE:  # never held whole
                self._take(self._tail)
                self._tail = b""
            if self._clock() > until:
                break
        self._size = max(self._size, self._at)
        if is_new:
            self._new_at = self._clock()
        return is_new

    def _take(self, line: bytes) -> None:
        if self._start is not None and not self.run.sessions and not _is_start(line):
            self.run.open_session(self._start)  # emptied under its writer, who goes on
        found = self._reader.take(line)
        if isinstance(found, Start):
            self._start = found
        if isinstance(found, Record):
            if found.index <= self._last_index:  # another session's clock
                self._times.clear()
            self._last_index = found.index
            self._times.append(found.time)


def _is_start(line: bytes) -> bool:
    try:
        return isinstance(decode(line), Start)
    except BrokenLineError:
        return False
