"""The findings of a report: those of the diagnosis, and what only the file shows."""

from __future__ import annotations

import math

from ..console import counted, number, percent
from ..telemetry import Finding, as_set, diagnose, ending
from .run import Run

MANY_CLIPPED = LITTLE_HIDDEN = 0.5


def find(run: Run) -> list[Finding]:
    """Every finding of a run, bad ones first."""
    return diagnose(run, *(rule(run) for rule in RULES))


def clipping(run: Run) -> Finding | None:
    if not run.limited or run.clipped <= MANY_CLIPPED * run.limited:
        return None
    limits = [b.max_norm for b in run.bins.done if b.max_norm is not None]
    mean = number(run.bins.of_all("norm").middle or math.inf)
    return Finding(
        "note",
        f"The gradient norm was above the clipping threshold in {percent(run.clipped, run.limited)}"
        f" of the windows (mean {mean}, threshold {number(limits[-1])}).",
        "All such steps are clipped to the same norm; for many language models that is intended.",
    )


def waiting(run: Run) -> Finding | None:
    modes = {session.start.settings.get("step_mode") for session in run.sessions}
    if not run.optimizer_us or "overlap" not in modes:
        return None
    text = f"{run.hidden} of the optimizer's time was hidden"
    if run.waited_us <= (1 - LITTLE_HIDDEN) * run.optimizer_us:
        return Finding(
            "good",
            f"{text} behind the training thread's own work.",
            "How much faster than sync this is, only a run in sync tells: compare their windows a "
            "second.",
        )
    return Finding(
        "warn",
        f"Only {text}: the training thread waited {run.waited_us / 1e6:.3g} s in all.",
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


RULES = (ending, clipping, waiting, broken_lines, left_out)
