"""What happened in a run, in words, the most important first.

One rule a subject, and one finding a rule: what two of them could say against each other is settled
where they are made. No finding about an overflow advises to clip: that comes after the backward.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from ..console import counted, number, percent
from ..telemetry import (
    LARGEST,
    MANY_SKIPPED,
    REPEATED,
    SMALLEST_SCALE,
    THE_LOSS,
    Fall,
    Session,
    cause_of,
    module_list,
    ran_away,
    sentence,
    skip_counts,
)
from .run import Run

Level = Literal["bad", "warn", "note", "good"]
LEVELS: tuple[Level, ...] = ("bad", "warn", "note", "good")
Subject = Literal[
    "windows",
    "end",
    "healed",
    "loss",
    "parameters",
    "overflow",
    "skips",
    "clipping",
    "range",
    "time",
    "file",
]
MANY_CLIPPED = 0.5
LITTLE_HIDDEN = 0.5
MANY_ZERO = 0.5
MANY_SUBNORMAL = 0.1
FEW_SUBNORMAL = 0.01
"""Of what is not zero. Zeros with fewer beside them are no underflow, which takes the smallest
first: rows of an embedding that are not in the batch, units that are off."""
MUCH_ROOM = 4.0
"""Doublings of the scale."""
LONG_SEARCH = 8
"""Skips."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What happened, what to look at, what to do; the last two may be empty."""

    level: Level
    what: str
    look: str = ""
    do: str = ""
    subject: Subject = "windows"


def find(run: Run) -> list[Finding]:
    """Every finding of a run, at most one of a subject: bad ones first, in the order of RULES."""
    rules: Mapping[Subject, Rule] = RULES
    if not run.windows:
        rules = {"end": _ending, "windows": _empty, "file": _broken}
    found = [
        replace(finding, subject=subject)
        for subject, rule in rules.items()
        if (finding := rule(run)) is not None
    ]
    return sorted(found, key=lambda finding: LEVELS.index(finding.level))


def facts(run: Run) -> list[tuple[str, str]]:
    """Key numbers as ``(name, value)``; what the run does not have is left out."""
    if not run.windows:
        return [("windows", "0")]
    sessions = f" in {len(run.sessions)} sessions" if len(run.sessions) > 1 else ""
    rows = [
        ("windows", f"{run.windows}{sessions}"),
        ("skipped", f"{run.skips} ({percent(run.skips, run.windows)})"),
    ]
    if run.last_loss is not None:
        rows.append(("last loss", f"{run.last_loss:.5g}"))
    if run.is_scaled and run.lowest is not None:
        first, last, (low, x) = number(run.first_scale), number(run.last_scale), run.lowest
        rows.append(("scale", f"{first} at first, {last} at last"))
        rows.append(("lowest scale", f"{number(low)} ({run.place(x)})"))
    if run.highest is not None:
        norm, x = run.highest
        rows.append(("largest finite norm", f"{number(norm)} ({run.place(x)})"))
    if run.limited:
        rows.append(("clipped", percent(run.clipped, run.limited)))
    room = run.room()
    if room is not None and run.largest is not None and run.least_room is not None:
        seen, (least, x) = run.place(run.largest[1]), run.least_room
        rooms = f"{_doublings(room)} at last (measured at {seen}), "
        rows.append(("headroom", f"{rooms}least {_doublings(least)} ({run.place(x)})"))
    if run.zero_share is not None:
        rows.append(("zero gradients", f"{percent(run.zero_share, 1)} of the elements"))
    if run.optimizer_us:
        rows.append(("update, each", f"{run.optimizer_us / run.updates / 1e3:.3g} ms"))
        rows.append(("of it hidden", _hidden(run)))
    if run.preview_error.middle is not None:
        rows.append(("preview off by", f"{run.preview_error.middle:.2g} of the update"))
    if (seconds := sum(session.seconds for session in run.sessions)) > 0:
        speed = run.windows_per_second
        rate = "" if speed is None else f", {speed:.3g} windows/s"
        rows.append(("time", f"{seconds:.3g} s{rate}"))
    return rows


def _hidden(run: Run) -> str:
    return percent(run.optimizer_us - run.waited_us, run.optimizer_us)


def _empty(run: Run) -> Finding:
    return Finding("note", "The file holds no windows.")


# How it ended.


def _ended(run: Run, session: Session) -> str:
    """Empty: as it should."""
    at = "before its first window closed"
    if session.last_step >= 0:
        at = f"after {run.place(session.first_x + session.last_step)}"
    if session.error is not None:
        return f"ended with an error {at}: {session.error}"
    return "" if session.ended else f"has no end line: it stopped {at} or was killed"


def _ending(run: Run) -> Finding | None:
    if not run.sessions:
        return None
    early = [
        f"Session {number_of} {how}."
        for number_of, session in enumerate(run.sessions[:-1], 1)
        if (how := _ended(run, session))
    ]
    before = early[-1] if early else ""
    if len(early) > 1:
        before += f" {counted(len(early) - 1, 'session')} before it ended early, too."
    session = run.sessions[-1]
    how = _ended(run, session)
    if session.error is not None:
        return Finding("bad", f"The run {how}", before)
    if how:
        look = "The last lines of its output, and the machine's log (out of memory?)."
        return Finding("warn", f"The run {how}, or still trains.", f"{look} {before}".strip())
    return Finding("note", before, do="A later session went on from there.") if before else None


# What went wrong.


def _healed(run: Run) -> Finding | None:
    if not run.healed:
        return None
    each = ", ".join(f"{name} (from {run.place(x)} on)" for name, x in run.healed.items())
    return Finding(
        "note",
        f"heal has put {counted(len(run.healed), 'module')} in float32: {each}.",
        "What they cost: the time of their forwards and backwards.",
        f"{module_list(list(run.healed))} in the config does it from the start.",
    )


def _loss(run: Run) -> Finding | None:
    bad, rise = run.bad_losses, run.rise()
    if not bad.count:
        return rise and Finding(
            "bad",
            sentence(ran_away(rise)),
            "When it began to rise, and the learning rate and the gradient norm just before.",
            "Resume from a checkpoint before it, with a lower learning rate.",
        )
    steps = run.place(bad.first_x)
    if bad.count > 1:
        steps = f"{steps} to {run.place(bad.last_x)}"
    remedy = "Resume from a checkpoint before it: without loss scaling nothing skips such a step."
    if run.is_scaled:
        firsts = [first for x, first in run.firsts if bad.first_x <= x <= bad.last_x]
        cure = sentence(cause_of(firsts[-1])[1]) if firsts else _find_overflow_hint(run)
        smaller = "A smaller scale does not cure this, since it multiplies the loss afterwards."
        remedy = f"{smaller} {cure}".strip()
    return Finding(
        "bad",
        f"The loss itself was inf or NaN in {counted(bad.count, 'window')} ({steps}).",
        "The forward, not the gradients: the batch of that step, a division or log at 0, an "
        "activation above 65504 (float16's largest).",
        remedy,
    )


def _find_overflow_hint(run: Run) -> str:
    return "" if run.firsts else "Run again with find_overflow='replay' to see where it begins."


def _parameters(run: Run) -> Finding | None:
    if run.windows > run.skips and not run.has_moved:
        return Finding(
            "bad",
            "The learning rate was 0 in every window that stepped: no parameter has moved.",
            "The learning rates of the optimizer and of its schedule.",
        )
    bad = run.stepped_bad
    if not bad.count:
        return None
    return Finding(
        "bad",
        f"The gradient norm was inf or NaN in {counted(bad.count, 'window')} that "
        f"stepped all the same, first at {run.place(bad.first_x)}.",
        "The parameters after that step: they may hold NaN from then on.",
        "Resume from a checkpoint before it. Nothing skips such a step without loss scaling.",
    )


# What overflows, and how far the scale fell for it.


def _overflow(run: Run) -> Finding | None:
    """The lowest scale, the deepest fall, the layer that overflowed most often: one cause."""
    low, fall, often = run.low(), run.worst_fall(), _most_often_in(run)
    what, look = [], ""
    level: Level = "warn" if fall is not None or run.kinds["other"] else "note"
    if low:
        level = "bad"
        why = "overflows from there on cannot be met by a smaller one"
        if run.lowest is not None and run.lowest[0] <= SMALLEST_SCALE:
            why = "at 1 or less it no longer scales, and the overflow is not of its making"
        what.append(sentence(f"{low}: {why}"))
        look = "Gradients or activations that are beyond float16, or NaN, at any scale."
    if fall is not None:
        level = "bad" if run.is_deep(fall) else level
        what.append(_fall_text(run, fall))
        texts = [(x, f["text"]) for x, f in run.firsts if fall.first_x <= x <= fall.last_x]
        look = "What changed there: the batch, the learning rate, the gradient norm just before."
        look = next((f"At {run.place(x)}: {text}" for x, text in texts if text), look)
    if often and (fall is None or 2 * fall.origins[often] < run.origins[often]):
        total = counted(run.origins.total(), "overflow")
        how = "" if run.firsts else " (the last layer with inf or NaN; backward meets it first)"
        what.append(f"{often} is where {run.origins[often]} of {total} began{how}.")
        look = look or "Its gradients, its input's range, its learning rate."
    if not what:
        return None
    do = "" if level == "note" else _against_overflow(run, fall, often)
    return Finding(level, " ".join(what), look, do)


def _against_overflow(run: Run, fall: Fall | None, often: str) -> str:
    """What to do, by what is known of the cause."""
    name = often
    if fall is not None and fall.origins:
        name = fall.origins.most_common(1)[0][0]
    of_loss = run.bad_losses.count and fall and 2 * fall.kinds["forward"] > fall.skips
    if name == THE_LOSS or of_loss:
        return "As for the loss (above)."
    if any(name == module or name.startswith(f"{module}.") for module in run.healed):
        return "heal keeps it in float32."
    module = name.rpartition(".")[0]
    which = f"that layer in float32 ({module_list([module])})" if module else "it in float32"
    if not name:
        which = "the layer with the largest gradients in float32"
    floor = run.setting("min_scale")
    at_floor = floor is not None and run.last_scale <= floor and floor > SMALLEST_SCALE
    text = f"{'Lower min_scale, or k' if at_floor else 'K'}eep {which}, or lower the learning rate."
    if run.low() and run.setting("max_consecutive_skips") is None:
        text += " max_consecutive_skips ends a run that only skips."
    return f"{text} {_find_overflow_hint(run)}".strip()


def _most_often_in(run: Run) -> str:
    """The layer where most overflows began, if it is one; else empty."""
    name, count = run.origins.most_common(1)[0] if run.origins else (THE_LOSS, 0)
    is_one = name != THE_LOSS and count >= REPEATED and 2 * count >= run.origins.total()
    return name if is_one else ""


def _most_often(origins: Counter[str]) -> str:
    """``: X overflowed 14 times``, or nothing where nobody knows."""
    if not origins:
        return ""
    name, count = origins.most_common(1)[0]
    times = {1: "once", 2: "twice"}.get(count, f"{count} times")
    if name == THE_LOSS:
        return f": the loss was inf or NaN {times}"
    others = f", {counted(len(origins) - 1, 'other')} less often" if len(origins) > 1 else ""
    return f": {name} overflowed {times}{others}"


def _fall_text(run: Run, fall: Fall) -> str:
    start, skips, began = run.place(fall.first_x), counted(fall.skips, "skip"), fall.origins
    if fall.low >= fall.high:
        held = f"The scale stayed at {number(fall.low)} through {skips} from {start} on"
        return f"{held}{_most_often(began)}."
    since = f"from {start} on, " if fall.last_x > fall.first_x else ""
    way = f"{since}from {number(fall.high)}, {skips}"
    end = run.place(fall.last_x)
    return f"The scale fell to {number(fall.low)} after {end} ({way}){_most_often(began)}."


# What was skipped.


def _skips(run: Run) -> Finding | None:
    if not run.skips:
        if run.stepped_bad.count or run.bad_losses.count:
            return None
        if run.overflows:
            word = counted(run.overflows, "window")
            return Finding("warn", f"{word} had inf or NaN gradients, none was skipped.")
        return Finding("good", f"No overflow in {counted(run.windows, 'window')}.")
    kinds = run.kinds
    later = run.skips - kinds["search"]
    what, do = f"{sentence(skip_counts(run))}", ""
    is_odd = kinds["other"] or kinds["forward"] or (kinds["search"] and run.healed) or run.low()
    level: Level = "note" if is_odd or run.skips == run.windows else "good"
    if kinds["search"] >= LONG_SEARCH and not _is_held(run):
        do = "A smaller init_scale saves the skips of the search."
    if later > MANY_SKIPPED * run.windows:
        level = "warn"
        what += f" After the search {percent(later, run.windows)} of the windows trained nothing."
        if 2 * kinds["growth"] > later:
            do = "Raise growth_interval, or lower max_scale: a growth is what most of them follow."
    if kinds["forward"]:
        what += " A smaller scale does not help against inf or NaN in the forward."
    if kinds["other"] and run.worst_fall() is None:
        what += f" Those in the middle of training were far apart{_most_often(run.origins)}."
    return Finding(level, what, do=do)


# What was clipped.


def _clipping(run: Run) -> Finding | None:
    if not run.limited or run.clipped <= MANY_CLIPPED * run.limited:
        return None
    limits = [b.max_norm for b in run.bins.done if b.max_norm is not None]
    mean = number(run.bins.of_all("norm").middle or math.inf)
    return Finding(
        "note",
        f"The gradient norm was above the clipping threshold in {percent(run.clipped, run.limited)}"
        f" of the windows (mean {mean}, threshold {number(limits[-1])}).",
        "Whether that is meant: every such step has the same length, whatever the gradient.",
        "Nothing, if it is meant, as it is for many language models.",
    )


# How much of float16's range gradients took.


def _doublings(room: float) -> str:
    """``2.5 doublings``, none where float32 has added up more than float16 holds."""
    return f"{max(room, 0.0):.1f} doublings" if room < math.inf else "no gradient is above 0"


def _range(run: Run) -> Finding | None:
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
        what += f"{largest} of float16's {number(LARGEST)}: {_doublings(room)}"
    look = "Whether those zeros are meant: embedding rows not in the batch, unused experts."
    return Finding("warn", f"{what}.", look, _against_underflow(run, room))


def _is_held(run: Run) -> bool:
    ceiling = run.setting("max_scale")
    return ceiling is not None and run.last_scale >= ceiling


def _against_underflow(run: Run, room: float | None) -> str:
    if not run.is_scaled or room is None:
        return ""
    first = "keep what overflows first in float32, since it holds the scale down for all."
    if room < MUCH_ROOM:
        return f"There is little room for a larger scale: {first}"
    if run.kinds["growth"] or run.kinds["other"]:
        text = f"Gradients of activations are what overflows at a larger scale: {first}"
        return f"{text} {_find_overflow_hint(run)}".strip()
    if _is_held(run):
        return "Raise max_scale."
    if run.kinds["search"]:  # from init_scale it had to come down
        return "The scale grows by itself; a smaller growth_interval makes it sooner."
    better = number(run.last_scale * 2.0 ** int(min(room, 24.0) - 1))
    return f"init_scale={better}, say. The scale grows by itself, every growth_interval windows."


# Time, and the file.


def _waiting(run: Run) -> Finding | None:
    modes = {session.start.settings.get("step_mode") for session in run.sessions}
    if not run.optimizer_us or not modes & {"overlap", "delayed"}:
        return None
    text = f"{_hidden(run)} of the optimizer's time was hidden"
    if run.waited_us <= (1 - LITTLE_HIDDEN) * run.optimizer_us:
        return Finding("good", f"{text} behind the training thread's own work.")
    return Finding(
        "warn",
        f"Only {text}: the training thread waited {run.waited_us / 1e6:.3g} s in all.",
        do="Leave the optimizer a core of its own (optimizer_threads, OMP_NUM_THREADS), or use "
        'step_mode="sync": there is too little to run beside.',
    )


def _broken(run: Run) -> Finding | None:
    if run.broken_first is None:
        return None
    line, why = run.broken_first
    return Finding(
        "note",
        f"{run.broken} of {counted(run.lines, 'line')} could not be read and left out (the first "
        f"is line {line}: {why}).",
    )


Rule = Callable[[Run], Finding | None]

RULES: dict[Subject, Rule] = {
    "end": _ending,
    "healed": _healed,
    "loss": _loss,
    "parameters": _parameters,
    "overflow": _overflow,
    "skips": _skips,
    "clipping": _clipping,
    "range": _range,
    "time": _waiting,
    "file": _broken,
}
