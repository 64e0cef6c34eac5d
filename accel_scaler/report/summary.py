"""A run in words: its findings, its key numbers, and both as a text."""

from __future__ import annotations

import math
from typing import NamedTuple

from ..console import counted, number, percent
from ..telemetry import Finding, diagnose, ending, verdict
from .reader import Run

NONE = "\u2013"
NAMES = {
    "parameters_trained": "parameters trained",
    "parameter_bytes": "memory of the parameters",
    "device_peak_bytes": "peak memory, device",
    "host_peak_bytes": "peak memory, host",
}
"""Numbers that the recorder notes itself; metrics keep the names that the script gives them."""

TILES = 6
"""The first key numbers are the tiles of the page."""


def find(run: Run) -> list[Finding]:
    """Every finding of the diagnosis, and those that only the file shows; bad ones first."""
    return diagnose(run, ending(run), broken_lines(run))


def broken_lines(run: Run) -> Finding | None:
    if not run.broken:
        return None
    lines = counted(run.lines, "line")
    return Finding("note", f"{run.broken} of {lines} could not be read and were left out.")


class KeyNumber(NamedTuple):
    """A name, a value, and a few words about the value, which may be empty."""

    name: str
    value: str
    more: str = ""


def key_numbers(run: Run) -> list[KeyNumber]:
    """The tiles, with a dash for an unknown value, then the other numbers that the run has."""
    sessions = f"in {len(run.sessions)} sessions" if len(run.sessions) > 1 else ""
    names = {"search": "searching", "growth": "after growth", "spike": "spikes"}
    kinds = ", ".join(f"{count} {names.get(kind, kind)}" for kind, count in run.kinds.items())
    share = f"{percent(run.skips, run.windows)} of all" + f": {kinds}" * bool(kinds)
    hidden = KeyNumber("optimizer hidden", NONE, "no times in the file" if run.windows else "")
    if sum(update := run.finite("update")):
        each = f"{sum(update) / len(update):.3g} ms"
        hidden = KeyNumber("optimizer's update", each, "on average")
        if run.hidden > 0:
            part = percent(run.hidden, sum(update))
            hidden = KeyNumber("optimizer hidden", part, f"of {each} an update")
    found = [
        KeyNumber("steps", f"{run.windows:,}", sessions),
        KeyNumber("skipped", f"{run.skips:,}", share),
        _loss(run),
        *[_scale(run)] * run.is_scaled,
        _speed(run),
        hidden,
    ]
    if run.highest is not None:
        norm, x = run.highest
        found.append(KeyNumber("largest finite norm", f"{norm:.3g}", run.place(x)))
    if run.retried:
        found.append(KeyNumber("overflowed, ran again", f"{run.retried:,}", "not skipped"))
    if clips := run.finite("clip"):
        found.append(KeyNumber("clipped", percent(sum(c < 1 for c in clips), len(clips))))
    return found + [_noted(name, values) for name, values in run.noted.items()]


def _noted(name: str, values: list[float]) -> KeyNumber:
    """The last value of a number that belongs to no window, and the range of several values."""

    def text(value: float) -> str:
        if name.endswith("_bytes"):
            return f"{value / 1e6:,.1f} MB"
        return f"{value:,.0f}" if 1e4 < value < 2.0**53 else number(value)

    known = [value for value in values if math.isfinite(value)] or values
    low, high = text(min(known)), text(max(known))
    more = f"lowest {low}, highest {high}" if low != high else ""
    return KeyNumber(NAMES.get(name, name), text(values[-1]), more)


def _loss(run: Run) -> KeyNumber:
    losses = [loss for loss in run.series["loss"] if loss is not None]
    if not losses:
        return KeyNumber("last loss", NONE, "not recorded" if run.windows else "")
    finite = run.finite("loss")
    more = f"{finite[0]:.4g} at first, lowest {min(finite):.4g}" if finite else ""
    return KeyNumber("last loss", f"{losses[-1]:.4g}", more)


def _scale(run: Run) -> KeyNumber:
    if run.lowest is None:
        return KeyNumber("scale", NONE)
    low, x = run.lowest
    more = f"{number(run.first_scale)} at first, lowest {number(low)} ({run.place(x)})"
    return KeyNumber("scale", number(run.last_scale), more)


def _speed(run: Run) -> KeyNumber:
    if not sum(times := run.finite("ms")):
        return KeyNumber("steps a second", NONE)
    seconds = sum(session.seconds for session in run.sessions)
    text = f"{seconds:.3g} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    speed = len(times) / sum(times) * 1e3
    return KeyNumber("steps a second", f"{speed:.3g}", f"after the first step; {text} in all")


def in_words(run: Run) -> str:
    """A heading, the verdict, key numbers, then a paragraph a finding."""
    lines = [run.label, "=" * min(len(run.label), 80), verdict(run, is_file=True), ""]
    numbers = key_numbers(run)
    width = max(len(each.name) for each in numbers)
    for each in numbers:
        more = f"; {each.more}" if each.more else ""
        lines.append(f"{each.name:<{width}}  {each.value}{more}")
    marks = {"bad": "[!!]", "warn": "[! ]", "note": "[  ]", "good": "[ok]"}
    for finding in find(run):
        lines += ["", f"{marks[finding.level]} {finding.title}"]
        lines += [f"     {finding.text}"] if finding.text else []
    return "\n".join(lines)
