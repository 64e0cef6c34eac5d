"""The findings of a report: the findings of the diagnosis, and some that only the file shows."""

from __future__ import annotations

from ..console import counted
from ..telemetry import Finding, as_set, diagnose, ending
from .run import Run

LITTLE_HIDDEN = 0.5


def find(run: Run) -> list[Finding]:
    """Every finding of a run, bad ones first."""
    return diagnose(run, *(rule(run) for rule in RULES))


def waiting(run: Run) -> Finding | None:
    modes = {session.start.settings.get("step_mode") for session in run.sessions}
    if "overlap" not in modes or run.waited_us <= (1 - LITTLE_HIDDEN) * run.optimizer_us:
        return None
    return Finding(
        "warn",
        f"Only {run.hidden} of the optimizer's time was hidden: the training thread waited "
        f"{run.waited_us / 1e6:.3g} s in all.",
        "There is too little work to hide it behind, or no core is free for it: lower "
        f"OMP_NUM_THREADS, or go back to {as_set(run, 'step_mode', 'sync')}.",
    )


def broken_lines(run: Run) -> Finding | None:
    if run.broken_first is None:
        return None
    line, why = run.broken_first
    return Finding(
        "note",
        f"{run.broken} of {counted(run.lines, 'line')} could not be read and were left out (the "
        f"first is line {line}: {why}).",
    )


def left_out(run: Run) -> Finding | None:
    if not run.left_out:
        return None
    sessions = counted(run.left_out, "earlier session")
    return Finding("note", f"Left out: {sessions} of this file that trained nothing.")


RULES = (ending, waiting, broken_lines, left_out)
