"""The findings of a report: those of the diagnosis, and what only the file shows."""

from __future__ import annotations

import math

from ..console import counted, number, percent
from ..telemetry import LARGEST, Finding, by_level, diagnose, ending
from .key_numbers import doublings
from .run import Run

MANY_CLIPPED = 0.5
LITTLE_HIDDEN = 0.5
MANY_ZERO = 0.5
MANY_SUBNORMAL = 0.1
FEW_SUBNORMAL = 0.01
"""Share of subnormals among the elements that are not zero. Zeros with fewer subnormals beside them
are no underflow: embedding rows that are not in the batch, inactive units."""
MUCH_ROOM = 4.0
"""Doublings of the scale that are left, from which on a larger scale is advised."""


def find(run: Run) -> list[Finding]:
    """Every finding of a run, bad ones first."""
    own = (clipping(run), underflow(run), waiting(run), broken_lines(run))
    return by_level([ending(run), *diagnose(run), *own])


def clipping(run: Run) -> Finding | None:
    if not run.limited or run.clipped <= MANY_CLIPPED * run.limited:
        return None
    limits = [b.max_norm for b in run.bins.done if b.max_norm is not None]
    mean = number(run.bins.of_all("norm").middle or math.inf)
    return Finding(
        "note",
        f"The gradient norm was above the clipping threshold in {percent(run.clipped, run.limited)}"
        f" of the windows (mean {mean}, threshold {number(limits[-1])}).",
        "Every such step has the same length, whatever the gradient; for many language models "
        "that is meant.",
    )


def underflow(run: Run) -> Finding | None:
    """Small gradients that are lost, and whether a larger scale could save them."""
    low = [
        (name, zero, tiny)
        for name, zero, tiny in run.underflow
        if tiny > MANY_SUBNORMAL
        or zero == 1
        or (zero > MANY_ZERO and tiny > FEW_SUBNORMAL * (1 - zero))
    ]
    if not low:
        return None
    low.sort(key=lambda u: -max(u[1], u[2]))
    each = ", ".join(
        f"{name} {percent(zero, 1)} zero and {percent(tiny, 1)} subnormal"
        for name, zero, tiny in low[:3]
    )
    what = (
        f"Underflow: {len(low)} of {counted(len(run.underflow), 'parameter')} measured at "
        f"{run.place(run.underflow_x)} had mostly zero or many subnormal float16 gradients ({each})"
    )
    room = run.room() if run.is_scaled and run.last_scale > 0 and run.zero_share != 1 else None
    if room is not None and run.largest is not None:
        largest = number(run.largest[0] * run.last_scale)
        what += f". At the last scale, {number(run.last_scale)}, the largest gradient takes "
        what += f"{largest} of float16's {number(LARGEST)}: {doublings(room)}"
    look = "Some zeros are meant: embedding rows not in the batch, unused experts."
    return Finding("warn", f"{what}.", f"{look} {_against_underflow(run, room)}".rstrip())


def _against_underflow(run: Run, room: float | None) -> str:
    if room is None:
        return ""
    if room < MUCH_ROOM or run.kinds["growth"] or run.kinds["other"]:
        return "Keep what overflows first in float32: it holds the scale down for all others."
    if run.is_held:
        return "Raise max_scale."
    if run.kinds["search"]:  # from init_scale it had to come down
        return "The scale grows by itself; a smaller growth_interval makes it sooner."
    better = number(run.last_scale * 2.0 ** int(min(room, 24.0) - 1))
    return f"init_scale={better}, say. The scale grows by itself, every growth_interval windows."


def waiting(run: Run) -> Finding | None:
    modes = {session.start.settings.get("step_mode") for session in run.sessions}
    if not run.optimizer_us or not modes & {"overlap", "delayed"}:
        return None
    text = f"{run.hidden} of the optimizer's time was hidden"
    if run.waited_us <= (1 - LITTLE_HIDDEN) * run.optimizer_us:
        return Finding("good", f"{text} behind the training thread's own work.")
    return Finding(
        "warn",
        f"Only {text}: the training thread waited {run.waited_us / 1e6:.3g} s in all.",
        "Leave the optimizer a core of its own (optimizer_threads, OMP_NUM_THREADS), or use "
        'step_mode="sync": there is too little to run beside.',
    )


def broken_lines(run: Run) -> Finding | None:
    if run.broken_first is None:
        return None
    line, why = run.broken_first
    return Finding(
        "note",
        f"{run.broken} of {counted(run.lines, 'line')} could not be read and left out (the first "
        f"is line {line}: {why}).",
    )
