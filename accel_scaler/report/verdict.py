"""What became of a run, as the verdict wants to know it."""

from __future__ import annotations

from dataclasses import replace

from ..telemetry import Outcome, verdict
from .run_summary import Run


def verdict_on(run: Run) -> str:
    """The report's first sentence: whether it trained, what stopped it, what to do."""
    return verdict(outcome_of(run))


def outcome_of(run: Run) -> Outcome:
    """That of the records, and how the file ends."""
    session = run.sessions[-1] if run.sessions else None
    if session is None:
        return Outcome()
    return replace(run.outcome(run.place), is_over=session.ended, error=session.error)
