"""Reads a telemetry file, in bounded memory, and trusts nothing in it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, BinaryIO, NoReturn

from ..errors import ConfigError
from ..telemetry.decoding import (
    MAX_LINE,
    BrokenLineError,
    clean,
    finite,
    items,
    parse,
    setting,
    show,
    size,
    text_of,
    truth,
    whole,
)
from .run_summary import Run, Session
from .window_fields import Extra, Names

__all__ = ["FORMAT", "read_run"]

FORMAT = 1
"""The newest format of the file that this package knows."""
CHUNK = 1 << 20
MAX_STEP_GAP = 10_000_000
MAX_NAMES = 200_000
MAX_SETTINGS = 100
PLAIN = {"kind", "step", "time", "scale", "next_scale", "growth_tracker", "found_inf", "skipped"}
PLAIN |= {"grad_norm", "max_norm", "clip_coefficient", "lr"}


def read_run(path: str | os.PathLike[str]) -> Run:
    """Aggregate one telemetry file.

    Memory does not grow with the number of windows. Lines that are cut off or hold nonsense are
    counted in ``broken`` and skipped. An empty file gives a run without windows.

    Raises:
        ConfigError: the file cannot be read, is not telemetry, or has a newer format; one line.
    """
    name = os.fspath(path)
    try:
        with open(name, "rb") as file:
            reader = _Reader(name)
            for number, line in enumerate(_lines(file), 1):
                reader.take(number, line)
    except OSError as error:
        raise ConfigError(
            f"{name}: cannot be read ({error.strerror or error}); expected a telemetry file."
        ) from None
    reader.run.finish()
    return reader.run


def _is_start(value: object) -> bool:
    return type(value) is dict and value.get("kind") == "start" and "format" in value


def _what(value: object) -> str:
    """What a line that is sound JSON holds, in words."""
    if type(value) is not dict:
        return show(value)
    kind = value.get("kind")
    return f"a line of kind {show(kind)}" if "kind" in value else "an object without kind"


def _lines(file: BinaryIO) -> Iterator[bytes | None]:
    """The lines of a file; None for one longer than ``MAX_LINE``, which is never held whole.

    For the first one at once: it is no telemetry, and a device has no second.
    """
    rest, dropping, first_line = b"", False, True
    while chunk := file.read(CHUNK):
        first, *others = chunk.split(b"\n")
        rest = b"" if dropping else rest + first
        if len(rest) > MAX_LINE:
            rest, dropping = b"", True
            if first_line and not others:
                yield None
        if others:
            yield None if dropping else rest
            dropping = first_line = False
            yield from others[:-1]
            rest = others[-1]
    if dropping:
        yield None
    elif rest:
        yield rest


class _Reader:
    """Checks one line after another and hands what is sound to the run."""

    def __init__(self, path: str) -> None:
        self.run = Run(path)
        self.names: Names | None = None
        self._known: dict[str, str] = {}

    def take(self, number: int, line: bytes | None) -> None:
        """One line of the file, numbered from 1."""
        if line is not None and (not line or line.isspace()):
            return
        run = self.run
        run.lines += 1
        if run.lines == 1 and line is not None:
            line = line.removeprefix(b"\xef\xbb\xbf")
        value: Any = None
        try:
            value = parse(line)
            if not run.sessions and not _is_start(value):
                self._refuse(number, _what(value))
            if type(value) is not dict:
                raise BrokenLineError(f"expected an object, got {show(value)}")
            self._dispatch(number, value)
        except BrokenLineError as error:
            # A start line cut off in the middle is telemetry all the same.
            cut = line is not None and line.lstrip().startswith((b'{"kind"', b'{ "kind"'))
            if value is None and not run.sessions and not cut:
                self._refuse(number, str(error))
            run.broken += 1
            if run.broken_first is None:
                run.broken_first = (number, str(error))

    def _dispatch(self, number: int, value: dict[str, Any]) -> None:
        kind = value.get("kind")
        if kind == "window":
            self._window(value)
        elif kind == "names":
            self._names(value)
        elif kind == "start":
            self._start(number, value)
        elif kind == "end":
            self._end(value)
        elif type(kind) is not str:
            raise BrokenLineError(f"a line whose kind is {show(kind)}")

    def _refuse(self, number: int, found: str) -> NoReturn:
        raise ConfigError(
            f"{self.run.path}, line {number}: not a telemetry file of accel_scaler: found {found}, "
            f'expected {{"kind":"start","format":{FORMAT},...}}; write one with telemetry=PATH.'
        )

    def _start(self, number: int, value: dict[str, Any]) -> None:
        version = value.get("format")
        if type(version) is not int or version < 1:
            raise BrokenLineError(f"a start line whose format is {show(version)}")
        if version > FORMAT:
            raise ConfigError(
                f"{self.run.path}, line {number}: telemetry of format {show(version)}, the "
                f"newest this version knows is {FORMAT}; upgrade accel_scaler to read it."
            )
        self.names = None
        session = Session(self._next_x())
        self.run.begin(session)
        wrong = ""
        for key in ("package", "device", "precision", "torch", "accelerate"):
            if type(text := value.get(key)) is str:
                session.facts[key] = clean(text, 60)
            elif text is not None:
                wrong = key
        for key in ("rank", "ranks"):
            if type(count := value.get(key)) is int and 0 <= count < 2**31:
                session.facts[key] = count
            elif count is not None:
                wrong = key
        time = value.get("unix_time")
        if isinstance(time, (int, float)) and 0 <= time < 1e11:
            session.facts["unix_time"] = float(time)
        settings = value.get("settings", {})
        if type(settings) is dict:
            for key in list(settings)[:MAX_SETTINGS]:
                session.settings[clean(key, 60)] = setting(settings[key])
        else:
            wrong = "settings"
        if wrong:
            raise BrokenLineError(f"a start line whose {wrong} is {show(value[wrong])}")

    def _next_x(self) -> int:
        sessions = self.run.sessions
        return sessions[-1].first_x + sessions[-1].last_step + 1 if sessions else 0

    def _names(self, value: dict[str, Any]) -> None:
        # A bad line must not leave the last one's names in force.
        self.names = None
        names = [self._name(name) for name in items(value.get("names"))]
        places = [whole(p) for p in items(value.get("places", list(range(len(names)))))]
        elements = [whole(n) for n in items(value.get("elements", [0] * len(names)))]
        if not len(names) == len(places) == len(elements):
            raise BrokenLineError(
                f"{len(names)} names, {len(places)} places, {len(elements)} elements"
            )
        self.names = Names(names, places, elements)
        # Of a name that occurs twice the later place holds; it is one row all the same.
        self.run.places.update(zip(names, places, strict=True))

    def _name(self, name: object) -> str:
        """The name to show; one text for equal names, so that memory holds each once."""
        text = text_of(name)
        if text not in self._known and len(self._known) >= MAX_NAMES:
            raise BrokenLineError(f"more than {MAX_NAMES} different names")
        return self._known.setdefault(text, text)

    def _end(self, value: dict[str, Any]) -> None:
        error = value.get("error")
        session = self.run.sessions[-1]
        text = None if error is None else text_of(error, 600)
        session.seconds = max(session.seconds, size(value.get("time", 0.0)))
        session.ended, session.error = True, text

    def _session(self, step: int) -> Session:
        """The session that this step belongs to."""
        session = self.run.sessions[-1]
        if step > session.last_step:
            if step - session.last_step > MAX_STEP_GAP:
                raise BrokenLineError(f"step {step} after step {session.last_step}")
            return session
        if step:
            raise BrokenLineError(f"step {step} after step {session.last_step}")
        # Counting from 0 again without a start line: that line was lost.
        self.names = None
        session = Session(self._next_x(), started=False)
        self.run.begin(session)
        return session

    def _window(self, value: dict[str, Any]) -> None:
        """Everything is checked before anything is counted."""
        get = value.get
        step, scale, after = whole(get("step")), size(get("scale")), size(get("next_scale"))
        skipped, norm = truth(get("skipped")), get("grad_norm")
        found = truth(get("found_inf", skipped))
        end = size(get("time", 0.0))
        limit, coefficient = get("max_norm"), get("clip_coefficient")
        if norm is not None:
            norm = size(norm, False)
        if limit is not None:
            limit = size(limit, False)
        if coefficient is not None:
            size(coefficient)
        if type(tracker := get("growth_tracker", 0)) is not int:
            raise BrokenLineError(f"growth_tracker is {show(tracker)}")
        lr = items(get("lr", []))
        for rate in lr:
            if type(rate) is not float or rate - rate != 0.0:
                finite(rate)
        session = self._session(step)
        extra = None if value.keys() <= PLAIN else Extra(self.run, self.names, value)
        run, x = self.run, session.first_x + step
        session.last_step = step
        session.windows += 1
        run.windows += 1
        run.overflows += found
        if end > session.seconds:
            session.seconds = end
        if skipped:
            run.skips += 1
            session.skips += 1
        if lr:
            run.lr = lr[:64]
        run.bins.add(x, scale, skipped, norm, limit)
        if norm is not None:
            run.normed(x, norm, skipped, limit)
        culprit = extra.commit(x, end, session) if extra is not None else None
        run.follow(x, scale, after, skipped, culprit)
