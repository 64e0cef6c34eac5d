"""Reads a telemetry file, in bounded memory, and trusts nothing in it."""

from __future__ import annotations

import os
from functools import partial
from typing import NoReturn

from ..errors import ConfigError
from ..telemetry import FIRST_BYTES, FORMAT, BrokenLineError, End, Noted, Record, Start, decode
from .run import Run

MAX_LINE = 8 << 20
"""A longer line is read in pieces, each of which is broken: it is never held whole."""


def read_run(path: str | os.PathLike[str]) -> Run:
    """Add up one telemetry file. Memory does not grow with the number of windows.

    Lines that are cut off or hold nonsense are counted in ``broken`` and skipped. An empty file
    gives a run without windows. Raises ``ConfigError``, of one line, for a file that cannot be
    read, is not telemetry, or has another format.
    """
    run = Run(os.fspath(path))
    try:
        with open(run.path, "rb") as file:
            for number, line in enumerate(iter(partial(file.readline, MAX_LINE), b""), 1):
                if not line.isspace():
                    _read_line(run, number, line.strip())
    except OSError as error:
        raise ConfigError(
            f"{run.path}: cannot be read ({error.strerror or error}); expected a telemetry file."
        ) from None
    return run


def _read_line(run: Run, number: int, line: bytes) -> None:
    run.lines += 1
    try:
        found = decode(line, run.names)
        if isinstance(found, Start):
            if found.format != FORMAT:
                raise ConfigError(
                    f"{run.path}, line {number}: telemetry of format {found.format}; this version "
                    f"reads {FORMAT}. Use the version of accel_scaler that wrote it."
                )
            run.names = ()
            run.begin(found)
        elif not run.sessions:
            _refuse(run, number, "another line first")
        elif isinstance(found, Record):
            if found.index <= (last := run.sessions[-1].last_step):
                raise BrokenLineError(f"step {found.index} after step {last}")
            run.add(found)
        elif isinstance(found, tuple):
            run.names = found
        elif isinstance(found, Noted):
            run.note(found)
        elif isinstance(found, End):
            run.end(found)
    except BrokenLineError as error:
        # A start line cut off in the middle is telemetry all the same.
        if not run.sessions and not FIRST_BYTES.startswith(line[: len(FIRST_BYTES)]):
            _refuse(run, number, str(error))
        run.broken += 1
        run.broken_first = run.broken_first or (number, str(error))
        if not line.startswith((b'{"kind":"window"', b'{"kind": "window"')):
            run.names = ()  # the line may have held others


def _refuse(run: Run, number: int, found: str) -> NoReturn:
    raise ConfigError(
        f"{run.path}, line {number}: not a telemetry file of accel_scaler: found {found}, "
        f'expected {{"kind":"start","format":{FORMAT},...}}; write one with telemetry=PATH.'
    )
