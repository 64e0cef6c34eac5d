"""The few numbers of a run that one wants first."""

from __future__ import annotations

from dataclasses import dataclass

from ..console import number, percent
from .run import Run

NONE = "\u2013"


@dataclass(frozen=True, slots=True)
class Tile:
    """A name, a value, and a few words on it, which may be empty."""

    name: str
    value: str
    more: str = ""


def tiles(run: Run) -> list[Tile]:
    """Always the same ones, in the same order; what the run does not have is a dash."""
    sessions = f"in {len(run.sessions)} sessions" if len(run.sessions) > 1 else ""
    names = {"search": "searching", "growth": "after growth", "forward": "forward"}
    kinds = ", ".join(f"{count} {names.get(kind, kind)}" for kind, count in run.kinds.items())
    share = percent(run.skips, run.windows)
    return [
        Tile("windows", f"{run.windows:,}", sessions),
        Tile("skipped", f"{run.skips:,}", f"{share}: {kinds}" if kinds else share),
        _loss(run),
        _scale(run),
        _speed(run),
        _hidden(run),
    ]


def _loss(run: Run) -> Tile:
    if run.last_loss is None:
        return Tile("last loss", NONE, "not recorded" if run.windows else "")
    first = next((m.middle for m in run.bins.means("loss") if m.middle is not None), None)
    lowest = run.bins.of_all("loss").low
    more = "" if first is None else f"{first:.4g} at first, lowest {lowest:.4g}"
    return Tile("last loss", f"{run.last_loss:.4g}", more)


def _scale(run: Run) -> Tile:
    if run.lowest is None or not run.is_scaled:
        return Tile("scale", NONE, "no loss scaling" if run.windows else "")
    return Tile("scale", number(run.last_scale), f"lowest {number(run.lowest[0])}")


def _speed(run: Run) -> Tile:
    speed = run.windows_per_second
    if speed is None:
        return Tile("windows a second", NONE)
    seconds = sum(session.seconds for session in run.sessions)
    minutes = round(seconds / 60)
    text = f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"
    text = f"{seconds:.3g} s" if seconds < 120 else text
    return Tile("windows a second", f"{speed:.3g}", f"{text} in all")


def _hidden(run: Run) -> Tile:
    if not run.optimizer_us:
        return Tile("optimizer hidden", NONE, "no times in the file" if run.windows else "")
    hidden = percent(run.optimizer_us - run.waited_us, run.optimizer_us)
    each = run.optimizer_us / run.updates / 1e3
    return Tile("optimizer hidden", hidden, f"of {each:.3g} ms an update")
