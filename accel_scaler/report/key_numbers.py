"""The key numbers of a run: the first six are the tiles of the page."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..console import number, percent
from ..telemetry import headroom
from .run import Run
from .samples import Mean

NONE = "\u2013"
TILES = 6


@dataclass(frozen=True, slots=True)
class KeyNumber:
    """A name, a value, and a few words about the value, which may be empty."""

    name: str
    value: str
    more: str = ""


NAMES = {
    "parameters_trained": "parameters trained",
    "parameter_bytes": "memory of the parameters",
    "device_peak_bytes": "peak memory, device",
    "host_peak_bytes": "peak memory, host",
}
"""Numbers that the recorder notes itself; metrics keep the names that the script gives them."""


def key_numbers(run: Run) -> list[KeyNumber]:
    """The tiles, with a dash for an unknown value, then the other numbers that the run has."""
    sessions = f"in {len(run.sessions)} sessions" if len(run.sessions) > 1 else ""
    names = {"search": "searching", "growth": "after growth", "spike": "spikes"}
    kinds = ", ".join(f"{count} {names.get(kind, kind)}" for kind, count in run.kinds.items())
    share = percent(run.skips, run.windows)
    hidden = KeyNumber("optimizer hidden", NONE, "no times in the file" if run.windows else "")
    if run.optimizer_us:
        each = f"{run.optimizer_us / run.updates / 1e3:.3g} ms"
        hidden = KeyNumber("optimizer's update", each, "on average")
        if run.hides:
            hidden = KeyNumber("optimizer hidden", run.hidden, f"of {each} an update")
    found = [
        KeyNumber("steps", f"{run.windows:,}", sessions),
        KeyNumber("skipped", f"{run.skips:,}", f"{share} of all" + f": {kinds}" * bool(kinds)),
        _loss(run),
        *[_scale(run)] * run.is_scaled,
        _speed(run),
        hidden,
    ]
    if run.highest is not None:
        norm, x = run.highest
        found.append(KeyNumber("largest finite norm", f"{norm:.3g}", run.place(x)))
    if run.retried:
        more = f"{run.retry_seconds:.3g} s; not skipped"
        found.append(KeyNumber("overflowed, ran again", f"{run.retried:,}", more))
    if run.limited:
        found.append(KeyNumber("clipped", percent(run.clipped, run.limited)))
    if run.largest is not None:
        last, measured = run.largest
        room = doublings(headroom(last * run.last_scale))
        found.append(KeyNumber("headroom", room, f"measured at {run.place(measured)}"))
    return found + [_noted(name, mean) for name, mean in run.noted.items()]


def doublings(room: float) -> str:
    """``2.5 doublings``; ``0.0`` where float32 has added up more than float16 holds."""
    return f"{max(room, 0.0):.1f} doublings" if room < math.inf else "no gradient is above 0"


def _noted(name: str, mean: Mean) -> KeyNumber:
    """The last value of a number that belongs to no window, and the range of several values."""

    def text(value: float) -> str:
        if name.endswith("_bytes"):
            return f"{value / 1e6:,.1f} MB"
        return f"{value:,.0f}" if 1e4 < value < 2.0**53 else number(value)

    low, high = text(mean.low), text(mean.high)
    return KeyNumber(
        NAMES.get(name, name),
        text(mean.last or 0.0),
        f"lowest {low}, highest {high}" * (low != high and mean.count > 1),
    )


def _loss(run: Run) -> KeyNumber:
    losses = run.bins.of_all("loss")
    if losses.last is None:
        return KeyNumber("last loss", NONE, "not recorded" if run.windows else "")
    first = next((m.middle for m in run.bins.means("loss") if m.middle is not None), None)
    more = "" if first is None else f"{first:.4g} at first, lowest {losses.low:.4g}"
    return KeyNumber("last loss", f"{losses.last:.4g}", more)


def _scale(run: Run) -> KeyNumber:
    if run.lowest is None:
        return KeyNumber("scale", NONE)
    low, x = run.lowest
    more = f"{number(run.first_scale)} at first, lowest {number(low)} ({run.place(x)})"
    return KeyNumber("scale", number(run.last_scale), more)


def _speed(run: Run) -> KeyNumber:
    if (speed := run.windows_per_second) is None:
        return KeyNumber("steps a second", NONE)
    seconds = sum(session.seconds for session in run.sessions)
    text = f"{seconds:.3g} s" if seconds < 120 else f"{seconds / 60:.0f} min"
    which = "after the first step" + " of the last session" * (len(run.sessions) > 1)
    return KeyNumber("steps a second", f"{speed:.3g}", f"{which}; {text} in all")
