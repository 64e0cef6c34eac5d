"""Reads a telemetry file, also one that a crash has cut off: the diagnosis, and its numbers."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from pathlib import Path
from typing import NoReturn

from ..console import plain
from ..errors import ConfigError
from ..telemetry import FORMAT, BrokenLineError, Diagnosis, End, Noted, Record, Start, decode


class Run(Diagnosis):
    """Everything that a report knows about one file."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = path
        self.x: list[int] = []
        """The number of each window over all sessions."""
        self.series: defaultdict[str, list[float | None]] = defaultdict(list)
        """Numbers of each window by their names, as the file has them; None where it has none."""
        self.noted: dict[str, list[float]] = {}
        """Numbers that belong to no window."""
        self.lines = self.broken = 0

    def begin(self, start: Start) -> None:
        """Begin a session. Earlier sessions that trained nothing are left out: the new one may be
        their cure, and is to be judged by itself."""
        if self.windows == self.skips > 0 and not self.healed:
            Run.__init__(self, self.path)
        super().begin(start)

    def add(self, record: Record) -> None:
        """Add the next window of the session."""
        session = self.sessions[-1]
        seconds = max(record.time - session.seconds, 0.0) if session.last_step >= 0 else None
        super().add(record)
        self.x.append(self.last_x)
        numbers = {
            "loss": record.loss,
            "scale": record.scale,
            "norm": record.grad_norm,
            "limit": record.max_norm,
            "clip": record.clip_coefficient,
            "lr": record.lr[0] if record.lr else None,
            "skipped": record.scale if record.skipped else None,
            "spike": record.grad_norm if record.spike and not record.found_inf else None,
            "retried": record.first_scale if record.retries and not record.skipped else None,
            "ms": None if seconds is None else seconds * 1e3,
            "update": None if record.optimizer_us is None else record.optimizer_us / 1e3,
            "waited": None if record.waited_us is None else record.waited_us / 1e3,
        }
        for name, value in numbers.items():
            self.series[name].append(value)

    def note(self, found: Noted) -> None:
        """Add numbers that belong to no window, or a mistake."""
        self.add_mistake(found.mistake)
        for name, value in found.values.items():
            self.noted.setdefault(name, []).append(value)

    def finite(self, name: str) -> list[float]:
        """The finite numbers of a series."""
        return [v for v in self.series[name] if v is not None and math.isfinite(v)]

    @property
    def label(self) -> str:
        """The name of the file, and the rank where there are several."""
        facts = self.sessions[0].start.facts if self.sessions else {}
        rank = f" (rank {facts.get('rank', '?')})" if facts.get("ranks", 1) > 1 else ""
        return plain(Path(self.path).name + rank)

    @property
    def hidden(self) -> float:
        """Milliseconds of the updates for which the training thread did not wait."""
        return sum(self.finite("update")) - sum(self.finite("waited"))


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
        found = decode(line)
        if isinstance(found, Start):
            if found.format != FORMAT:
                raise ConfigError(
                    f"{run.path}, line {number}: telemetry of format {found.format}; this version "
                    f"reads {FORMAT}. Use the version of accel_scaler that wrote it."
                )
            run.begin(found)
        elif not run.sessions:
            _refuse(run, number, "another line first")
        elif isinstance(found, Record):
            if found.index <= (last := run.sessions[-1].last_step):
                raise BrokenLineError(f"step {found.index} after step {last}")
            run.add(found)
        elif isinstance(found, Noted):
            run.note(found)
        elif isinstance(found, End):
            run.end(found)
    except BrokenLineError as error:
        if not run.sessions:
            _refuse(run, number, str(error))
        run.broken += 1


def _refuse(run: Run, number: int, found: str) -> NoReturn:
    raise ConfigError(
        f"{run.path}, line {number}: not a telemetry file of accel_scaler: found {found}, "
        f'expected {{"kind":"start","format":{FORMAT},...}}; write one with telemetry=PATH.'
    )
