"""The few numbers of a run that one wants first."""

from __future__ import annotations

from dataclasses import dataclass

from ..console import number, percent
from .run_summary import Run

NONE = "\u2013"


@dataclass(frozen=True, slots=True)
class Tile:
    """A name, a value, and a few words on it, which may be empty."""

    name: str
    value: str
    more: str = ""


def tiles(run: Run) -> list[Tile]:
    """Always the same ones, in the same order; what the run does not have is a dash."""
    return [_windows(run), _skipped(run), _loss(run), _scale(run), _speed(run), _hidden(run)]


def _windows(run: Run) -> Tile:
    sessions = f"in {len(run.sessions)} sessions" if len(run.sessions) > 1 else ""
    return Tile("windows", f"{run.windows:,}", sessions)


def _skipped(run: Run) -> Tile:
    kinds = [
        (run.kinds.search, "searching"),
        (run.kinds.growth, "after growth"),
        (run.kinds.forward, "forward"),
        (run.kinds.other, "other"),
    ]
    parts = [f"{count} {what}" for count, what in kinds if count]
    share = percent(run.skips, run.windows)
    more = f"{share}: {', '.join(parts)}" if parts else share
    return Tile("skipped", f"{run.skips:,}", more)


def _loss(run: Run) -> Tile:
    if run.last_loss is None:
        return Tile("last loss", NONE, "not recorded" if run.windows else "")
    means = [b.loss.middle for b in run.bins.done if b.loss.middle is not None]
    lowest = min((b.loss.low for b in run.bins.done), default=0.0)
    more = f"{means[0]:.4g} at first, lowest {lowest:.4g}" if means else ""
    return Tile("last loss", f"{run.last_loss:.4g}", more)


def _scale(run: Run) -> Tile:
    if not run.windows or not run.is_scaled:
        return Tile("scale", NONE, "no loss scaling" if run.windows else "")
    lowest = f"lowest {number(run.lowest[0])}" if run.lowest is not None else ""
    return Tile("scale", number(run.last_scale), lowest)


def _speed(run: Run) -> Tile:
    speed, seconds = run.windows_per_second, sum(session.seconds for session in run.sessions)
    if speed is None:
        return Tile("windows a second", NONE)
    return Tile("windows a second", f"{speed:.3g}", f"{_duration(seconds)} in all")


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02} min"


def _hidden(run: Run) -> Tile:
    timing, share = run.timing, run.hidden_share
    if share is None:
        return Tile("optimizer hidden", NONE, "no times in the file" if run.windows else "")
    each = f"{timing.optimizer / timing.updates * 1e3:.3g} ms"
    return Tile("optimizer hidden", percent(share, 1), f"of {each} an update")
