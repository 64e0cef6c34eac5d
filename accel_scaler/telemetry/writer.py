"""The telemetry file: JSON lines, one a window, appended as training goes on.

The kinds of line, in order: ``start`` (settings and versions), ``names`` (of parameters; again
when they change), ``window``, ``end``. Each start begins a new run in the same file, so a resumed
run goes on behind the one before. A reader ignores kinds and keys that it does not know; a change
that older readers would misread raises ``FORMAT``.

In a ``window`` line ``norms`` is the base64 text of little-endian float32, one for each name:
``numpy.frombuffer(base64.b64decode(line["norms"]), "<f4")``; to write thousands of decimal numbers
a window would cost more than the step. Numbers that are not finite are the texts ``"inf"``,
``"-inf"`` and ``"nan"``, since JSON has none. Times are seconds, in spans microseconds, since the
``start`` line.
"""

from __future__ import annotations

import base64
import errno
import json
import logging
import math
import os
import stat
import sys
import time
import weakref
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ConfigError
from .record import Record

__all__ = ["FORMAT", "Journal", "check_path"]

logger = logging.getLogger("accel_scaler")

FORMAT = 1
"""Version of the file format."""

NEWLINE = ord("\n")

LONGEST_WAIT_S = 0.5
"""What a killed run may lose of its end. One by one, windows cost several times as much to write:
the step between them leaves nothing of ours in the processor's cache."""

MOST_WAITING = 64
"""Windows that are written together."""

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
        self.path = path
        self.start_s = time.perf_counter()
        """``perf_counter`` at the start line: the zero of all times in the file."""
        self._writer = _Writer(path)
        self._names: Sequence[str] | None = None
        self._waiting: list[tuple[Record, Sequence[int], Sequence[int]]] = []
        self._written_s = 0.0
        self._windows = self._skips = 0
        head = {"kind": "start", "format": FORMAT, "unix_time": time.time(), **facts}
        try:
            self._writer.put(_text(head))
        except OSError as error:
            self._writer.close()
            raise ConfigError(_complaint(path, error.strerror or str(error))) from error

    def add(self, record: Record, places: Sequence[int], elements: Sequence[int]) -> None:
        """Append one window, soon: some are written together, overflows at once.

        Args:
            places: where each of ``record.names`` stands in the model's own order.
            elements: how many elements each has.
        """
        self._waiting.append((record, places, elements))
        now = time.perf_counter()
        late = now - self._written_s >= LONGEST_WAIT_S or len(self._waiting) >= MOST_WAITING
        if late or record.found_inf:
            self._written_s = now
            self.flush()

    def flush(self) -> None:
        """Write what waits."""
        waiting, self._waiting = self._waiting, []
        for each in waiting:
            self._append(*each)

    def _append(self, record: Record, places: Sequence[int], elements: Sequence[int]) -> None:
        """One window, and before it the names of its parameters if they are new."""
        lines: list[str] = []
        if record.names and record.names is not self._names and record.names != self._names:
            head = {"kind": "names", "names": record.names, "places": places}
            lines.append(_text({**head, "elements": elements}))
        lines.append(self._window(record))
        self._windows += 1
        self._skips += record.skipped
        if self._writer.try_to_put(*lines):
            self._names = record.names or self._names

    def close(self, error: str | None = None) -> None:
        """Append the ``end`` line and close the file. Idempotent."""
        self.flush()
        if not self._writer.closed:
            line = {"kind": "end", "time": self._since(time.perf_counter())}
            line |= {"windows": self._windows, "skips": self._skips, "error": error}
            if self._writer.lost:
                line["lost"] = self._writer.lost
            self._writer.try_to_put(_text(line))
            self._writer.close()

    def _since(self, moment: float) -> float:
        return round(moment - self.start_s, 6)

    def _window(self, record: Record) -> str:
        text = _text(self._facts_of(record))
        if record.norms is None:
            return text
        # base64 needs no escapes: json would look for them in every letter.
        norms = base64.b64encode(_little_endian(record.norms)).decode("ascii")
        return f'{text[:-1]},"norms":"{norms}"}}'

    def _facts_of(self, record: Record) -> dict[str, Any]:
        line: dict[str, Any] = {
            "kind": "window",
            "step": record.index,
            "time": round(record.time, 6),
            "scale": record.scale,
            "next_scale": record.next_scale,
            "growth_tracker": record.growth_tracker,
            "found_inf": record.found_inf,
            "skipped": record.skipped,
            "grad_norm": number(record.grad_norm),
            "max_norm": number(record.max_norm),
            "clip_coefficient": number(record.clip_coefficient),
            "lr": list(map(number, record.lr)),
        }
        if record.nonfinite:
            line["nonfinite"] = record.nonfinite
        if record.loss_nonfinite:
            line["loss_nonfinite"] = record.loss_nonfinite
        if record.first is not None:
            line["first"] = record.first
        if record.underflow:
            line["underflow"] = [(i, round(z, 6), round(s, 6)) for i, z, s in record.underflow]
        if record.optimizer_s is not None:
            waited = record.waited_s or 0.0
            line["optimizer_us"] = _us(record.optimizer_s)
            line["waited_us"] = _us(waited)
            line["hidden_us"] = _us(max(record.optimizer_s - waited, 0.0))
        if record.spans:
            line["spans"] = [
                (kind, _us(start - self.start_s), _us(length), *where)
                for kind, start, length, *where in record.spans
            ]
        return line


class _Writer:
    """Whole lines to a file descriptor, appended, unbuffered."""

    def __init__(self, path: str) -> None:
        self.lost = 0
        """Windows that could not be written."""
        self._path, self._pid = path, os.getpid()
        self._torn = _open_check(path)
        try:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            self._fd: int | None = os.open(path, flags, 0o666)
        except OSError as error:
            raise ConfigError(_complaint(path, error.strerror or str(error))) from error
        self._close = weakref.finalize(self, _close, self._fd, self._pid)

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
    folder = os.path.dirname(os.path.abspath(path))
    while not os.path.exists(folder):  # those below it are made
        folder = os.path.dirname(folder)
    if not os.path.isdir(folder):
        raise ConfigError(_complaint(path, f"{folder!r} is not a directory"))
    if os.path.exists(path):
        _open_check(path)
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise ConfigError(_complaint(path, "it may not be written"))


def _open_check(path: str) -> bool:
    """Make directories, refuse a file that is not telemetry; whether its last line is cut off."""
    try:
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return False
    except FileExistsError as error:
        reason = f"{os.path.dirname(path)!r} is not a directory"
        raise ConfigError(_complaint(path, reason)) from error
    except OSError as error:
        raise ConfigError(_complaint(path, error.strerror or str(error))) from error
    if stat.S_ISDIR(mode):
        raise ConfigError(_complaint(path, "it is a directory"))
    if not stat.S_ISREG(mode):
        return False  # a pipe or a terminal: nothing to look at
    try:
        with open(path, "rb") as file:
            first = file.readline(LONGEST_START)
            if not first:
                return False
            _forbid_foreign(path, first)
            file.seek(-1, os.SEEK_END)
            return file.read(1) != b"\n"
    except OSError as error:
        raise ConfigError(_complaint(path, error.strerror or str(error))) from error


def _forbid_foreign(path: str, first: bytes) -> None:
    try:
        head = json.loads(first)
    except (ValueError, RecursionError):
        if first.startswith(b'{"kind"') and len(first) < LONGEST_START:
            return  # cut off: its writer was killed at once, and perhaps another came since
        head = None
    if not isinstance(head, dict) or head.get("kind") != "start":
        raise ConfigError(
            _complaint(path, "it exists and is not a telemetry file, so nothing was appended")
        )
    version = head.get("format")
    if not isinstance(version, int) or version > FORMAT:
        raise ConfigError(
            _complaint(path, f"it exists, in format {version!r}; this version writes {FORMAT}")
        )


def _complaint(path: str, reason: str) -> str:
    return f"telemetry: got {path!r}, which cannot be appended to: {reason}. Choose another path."


def number(value: float | None) -> float | str | None:
    """``value``, or its name where JSON has no number for it."""
    return value if value is None or math.isfinite(value) else str(value)


_text = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode


def _us(seconds: float) -> int:
    return round(seconds * 1e6)


def _little_endian(floats: bytes) -> bytes:
    if sys.byteorder == "little":
        return floats
    values = array("f", floats)
    values.byteswap()
    return values.tobytes()
