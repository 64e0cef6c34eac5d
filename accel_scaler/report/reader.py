"""Reads a telemetry file, also one that a crash has cut off: the diagnosis, and samples."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NoReturn

from ..console import plain
from ..errors import ConfigError
from ..telemetry import FORMAT, BrokenLineError, Diagnosis, End, Noted, Record, Start, decode
from .samples import Bins, Modules


class Run(Diagnosis):
    """Everything that a report knows about one file."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.names: tuple[str, ...] = ()
        """The names of the parameters whose norms follow; empty if their line was lost."""
        self.bins = Bins()
        self.modules = Modules()
        self.noted: dict[str, list[float]] = {}
        """Numbers that belong to no window."""
        self.lines = self.broken = 0
        self.broken_first: tuple[int, str] | None = None
        self.left_out = 0
        """How many sessions trained nothing and have other sessions behind them."""

    def begin(self, start: Start) -> None:
        """Begin a session. Earlier sessions that trained nothing are left out: the new one may be
        their cure, and is to be judged by itself."""
        if self.windows == self.skips > 0 and not self.healed:
            kept = self.lines, self.broken, self.broken_first, self.left_out + len(self.sessions)
            Run.__init__(self, self.path)
            self.lines, self.broken, self.broken_first, self.left_out = kept
        super().begin(start)

    def add(self, record: Record) -> None:
        """Add the next window of the session."""
        session = self.sessions[-1]
        seconds = max(record.time - session.seconds, 0.0) if session.last_step >= 0 else None
        super().add(record)
        self.bins.include(self.last_x, record, seconds)
        if record.names and record.norms:
            self.modules.include(self.last_x, record)

    def note(self, found: Noted) -> None:
        """Add numbers that belong to no window, or a mistake."""
        self.add_mistake(found.mistake)
        for name, value in found.values.items():
            self.noted.setdefault(name, []).append(value)

    @property
    def label(self) -> str:
        """The name of the file, and the rank where there are several."""
        facts = self.sessions[0].start.facts if self.sessions else {}
        rank = f" (rank {facts.get('rank', '?')})" if facts.get("ranks", 1) > 1 else ""
        return plain(Path(self.path).name + rank)

    @property
    def hidden(self) -> float:
        """Seconds of the updates for which the training thread did not wait."""
        return self.bins.of_all("update").total - self.bins.of_all("waited").total

    @property
    def windows_per_second(self) -> float | None:
        """The speed of the last session without its first window; None if it has no second one."""
        first_x = self.sessions[-1].first_x if self.sessions else 0
        seconds = self.bins.of_all("seconds", first_x)
        return seconds.count / seconds.total if seconds.total > 0 else None


def read_run(path: str | os.PathLike[str]) -> Run:
    """Add up one telemetry file.

    Lines that are cut off are counted in ``broken`` and skipped. An empty file
    gives a run without windows. Raises ``ConfigError``, of one line, for a file that cannot be
    read, is not telemetry, or has another format.
    """
    run = Run(os.fspath(path))
    try:
        with open(run.path, "rb") as file:
            for number, line in enumerate(file, 1):
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
        if not run.sessions:
            _refuse(run, number, str(error))
        run.broken += 1
        run.broken_first = run.broken_first or (number, str(error))
        run.names = ()  # the line may have held others


def _refuse(run: Run, number: int, found: str) -> NoReturn:
    raise ConfigError(
        f"{run.path}, line {number}: not a telemetry file of accel_scaler: found {found}, "
        f'expected {{"kind":"start","format":{FORMAT},...}}; write one with telemetry=PATH.'
    )
