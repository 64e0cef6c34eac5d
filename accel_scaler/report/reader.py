"""Reads a telemetry file, in bounded memory, and trusts nothing in it."""

from __future__ import annotations

import os
from functools import partial
from typing import NoReturn

from ..errors import ConfigError
from ..telemetry import FORMAT, BrokenLineError, CutLineError, End, Names, Record, Start, decode
from .run_summary import Run

LONGEST_LINE = 8 << 20
"""A longer line is read in pieces, each of which is broken: it is never held whole."""


def read_run(path: str | os.PathLike[str]) -> Run:
    """Aggregate one telemetry file.

    Memory does not grow with the number of windows. Lines that are cut off or hold nonsense are
    counted in ``broken`` and skipped. An empty file gives a run without windows.

    Raises:
        ConfigError: the file cannot be read, is not telemetry, or has a newer format; one line.
    """
    reader = RunReader(os.fspath(path))
    try:
        with open(reader.run.path, "rb") as file:
            for line in iter(partial(file.readline, LONGEST_LINE), b""):
                reader.take(line)
    except OSError as error:
        raise ConfigError(
            f"{reader.run.path}: cannot be read ({error.strerror or error}); "
            "expected a telemetry file."
        ) from None
    return reader.run


class RunReader:
    """Hands one line after another to the run."""

    def __init__(self, path: str) -> None:
        self.run = Run(path)
        self.names: Names | None = None
        self._number = 0

    def take(self, line: bytes) -> None:
        """The next line of the file; one that cannot be used is counted.

        Raises:
            ConfigError: it is not telemetry, or of a newer format; one line.
        """
        self._number += 1
        if line.isspace():
            return
        run, number = self.run, self._number
        run.lines += 1
        try:
            found = decode(line.strip(), self.names)
            if isinstance(found, Start):
                self._start(number, found)
            elif not run.sessions:
                self._refuse(number, "another line first")
            elif isinstance(found, Record):
                if found.index <= (last := run.sessions[-1].last_step):
                    raise BrokenLineError(f"step {found.index} after step {last}")
                run.add_window(found, self.names)
            elif isinstance(found, Names):
                self.names = found
                # Of a name that occurs twice the later place holds; it is one row all the same.
                run.places.update(zip(found.names, found.places, strict=True))
            elif isinstance(found, End):
                run.sessions[-1].end(found)
        except BrokenLineError as error:
            # A start line cut off in the middle is telemetry all the same.
            cut = isinstance(error, CutLineError) and line.lstrip().startswith(b'{"kind"')
            if not run.sessions and not cut:
                self._refuse(number, str(error))
            if not line.startswith((b'{"kind":"window"', b'{"kind": "window"')):
                self.names = None  # it may have said other ones
            run.broken += 1
            run.broken_first = run.broken_first or (number, str(error))

    def _refuse(self, number: int, found: str) -> NoReturn:
        raise ConfigError(
            f"{self.run.path}, line {number}: not a telemetry file of accel_scaler: found {found}, "
            f'expected {{"kind":"start","format":{FORMAT},...}}; write one with telemetry=PATH.'
        )

    def _start(self, number: int, start: Start) -> None:
        if start.format > FORMAT:
            raise ConfigError(
                f"{self.run.path}, line {number}: telemetry of format {start.format}, the "
                f"newest this version knows is {FORMAT}; upgrade accel_scaler to read it."
            )
        self.names = None
        self.run.open_session(start)
