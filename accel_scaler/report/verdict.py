"""What became of a run, as the verdict wants to know it."""

from __future__ import annotations

from collections import Counter

from ..telemetry import Outcome, verdict
from .findings import is_deep, is_scaled, lowest_told, real_falls
from .formatting import number
from .run_summary import Run


def verdict_on(run: Run) -> str:
    """The report's first sentence: whether it trained, what stopped it, what to do."""
    return verdict(outcome_of(run))


def outcome_of(run: Run) -> Outcome:
    """All of it from the aggregates."""
    session = run.sessions[-1] if run.sessions else None
    if session is None or not run.windows:
        error = None if session is None else session.error
        return Outcome(error=error, is_over=session is None or session.ended)
    last_x, streak = run.last_x, run.kinds.streak
    origins: Counter[str] = Counter()
    for fall in run.falls:
        if streak and fall.last_x == last_x:
            origins = fall.origins
    return Outcome(
        windows=run.windows,
        skips=run.skips,
        search_skips=run.kinds.search,
        growth_skips=run.kinds.growth,
        scaled=is_scaled(run),
        scale=run.last_scale,
        is_over=session.ended,
        error=session.error,
        last=run.place(last_x),
        streak=streak,
        trained_until=run.place(last_x - streak) if run.windows > streak else "",
        firsts=[first for x, first in run.firsts if x > last_x - streak],
        all_firsts=[first for _, first in run.firsts],
        origins=origins,
        healed=list(run.healed),
        norms=int(run.highest is not None),
        stepped_bad=run.place(run.stepped_bad_x) if run.stepped_bad else "",
        loss_windows=run.loss_windows,
        low=_low(run),
    )


def _low(run: Run) -> str:
    """Where the scale fell further than it does in an ordinary run."""
    if low := lowest_told(run):
        return low
    worst = next(iter(real_falls(run)), None)
    if worst is None or not is_deep(run, worst):
        return ""
    return f"the scale fell to {number(worst.low)} ({run.place(worst.last_x)})"
