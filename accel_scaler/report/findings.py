"""What happened in a run, in words, the most important first: from the aggregates alone.

One rule a subject, and one finding a rule: what two of them could say against each other is settled
where they are made. Against an overflow nobody is told to clip: that comes after the backward.
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
    MAX_FALLS,
    THE_LOSS,
    Fall,
    module_list,
    ran_away,
    told,
)
from .formatting import times
from .run_summary import Run, Session
from .samples import Spread

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
MANY_SKIPPED = 0.1
LITTLE_HIDDEN = 0.5
MANY_ZERO = 0.5
MANY_SUBNORMAL = 0.1
FEW_SUBNORMAL = 0.01
"""Of what is not zero. Zeros with fewer beside them are no underflow, which takes the smallest
first: rows of an embedding that are not in the batch, units that are off."""
MUCH_ROOM = 4.0
"""Doublings of the scale."""
LITTLE_ROOM = 1.0
REPEATED = 3
"""Overflows that began in one layer."""
LONG_STREAK = 5
MANY_SEARCHED = 8
MOST_SESSIONS = 3
"""Earlier ones that are told of."""


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
    if run.is_scaled:
        first, last = run.first_scale, run.last_scale
        rows.append(("scale", f"{number(first)} at first, {number(last)} at last"))
        if run.lowest is not None:
            rows.append(("lowest scale", f"{number(run.lowest[0])} ({run.place(run.lowest[1])})"))
    if run.highest is not None:
        rows.append(
            ("largest finite norm", f"{number(run.highest[0])} ({run.place(run.highest[1])})")
        )
    if run.limited:
        rows.append(("clipped", percent(run.clipped, run.limited)))
    room = run.range.room_at(run.last_scale)
    if room is not None and run.range.last is not None and run.range.least is not None:
        least, where = run.range.least
        rows.append(
            (
                "headroom",
                f"{_doublings(room)} at last (seen at {run.place(run.range.last[1])}), "
                f"least measured {_doublings(least)} ({run.place(where)})",
            )
        )
    if run.range.zero_share is not None:
        rows.append(("zero gradients", f"{percent(run.range.zero_share, 1)} of the elements"))
    timing = run.timing
    if timing.optimizer:
        rows.append(("update, each", f"{timing.optimizer / timing.updates * 1e3:.3g} ms"))
        rows.append(("of it hidden", percent(timing.hidden, timing.optimizer)))
    if run.late.kinds:
        kinds = run.late.kinds.most_common()
        rows.append(
            (
                "late updates",
                ", ".join(f"{percent(n, run.late.kinds.total())} {k}" for k, n in kinds),
            )
        )
    if run.late.error.middle is not None:
        rows.append(("preview off by", f"{run.late.error.middle:.2g} of the update"))
    if (seconds := sum(session.seconds for session in run.sessions)) > 0:
        speed = run.windows_per_second
        rate = "" if speed is None else f", {speed:.3g} windows/s"
        rows.append(("time", f"{seconds:.3g} s{rate}"))
    return rows


def setting(run: Run, name: str) -> float | None:
    """A numeric setting of the last session that has it."""
    for session in reversed(run.sessions):
        if (value := session.setting(name)) is not None:
            return value
    return None


def _empty(run: Run) -> Finding:
    return Finding("note", "The file holds no windows.")


# How it ended.


def _at(run: Run, session: Session) -> str:
    if session.last_step < 0:
        return "before its first window closed"
    return f"after {run.place(session.first_x + session.last_step)}"


def _ending(run: Run) -> Finding | None:
    if not run.sessions:
        return None
    earlier = [
        f"Session {number} {how}."
        for number, session in enumerate(run.sessions[:-1], 1)
        if (how := _ended(run, session))
    ]
    if len(earlier) > MOST_SESSIONS:
        more = f"So did {len(earlier) - MOST_SESSIONS} before."
        earlier = [*earlier[-MOST_SESSIONS:], more]
    before, session = " ".join(earlier), run.sessions[-1]
    if session.error is not None:
        return Finding("bad", f"The run {_ended(run, session)}", before)
    if not session.ended:
        what = f"The run has no end line: it stopped {_at(run, session)}, was killed, or is still"
        look = "The last lines of its output, and the machine's log (out of memory?)."
        return Finding("warn", f"{what} going.", f"{look} {before}".strip())
    return Finding("note", before, do="A later session went on from there.") if before else None


def _ended(run: Run, session: Session) -> str:
    """Empty: as it should."""
    if session.error is not None:
        return f"ended with an error {_at(run, session)}: {session.error}"
    return "" if session.ended else f"has no end line: it stopped {_at(run, session)} or was killed"


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
    rise = run.losses.rise()
    if not run.loss_windows:
        return rise and Finding(
            "bad",
            _sentence(ran_away(rise)),
            "When it began to rise, and the learning rate and the gradient norm just before.",
            "Resume from a checkpoint before it, with a lower learning rate.",
        )
    span = run.place(run.loss_first_x)
    if run.loss_windows > 1:
        span = f"{span} to {run.place(run.loss_last_x)}"
    if run.is_scaled:
        remedy = _find_overflow_hint(run)
        for x, first in run.firsts:
            if run.loss_first_x <= x <= run.loss_last_x:
                remedy = _sentence(told(first)[1])
        smaller = "A smaller scale does not cure this, since it multiplies the loss afterwards."
        remedy = f"{smaller} {remedy}"
    else:
        remedy = (
            "Resume from a checkpoint before it: without loss scaling nothing skips such a step."
        )
    return Finding(
        "bad",
        f"The loss itself was inf or NaN in {counted(run.loss_windows, 'window')} ({span}).",
        "The forward, not the gradients: the batch of that step, a division or log at 0, an "
        "activation above 65504 (float16's largest).",
        remedy,
    )


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _find_overflow_hint(run: Run) -> str:
    return "" if run.firsts else "Run again with find_overflow='replay' to see where it begins."


def _parameters(run: Run) -> Finding | None:
    if run.windows > run.skips and not run.has_moved:
        return Finding(
            "bad",
            "The learning rate was 0 in every window that stepped: no parameter has moved.",
            "The learning rates of the optimizer and of its schedule.",
        )
    if not run.stepped_bad:
        return None
    return Finding(
        "bad",
        f"The gradient norm was inf or NaN in {counted(run.stepped_bad, 'window')} that "
        f"stepped all the same, first at {run.place(run.stepped_bad_x)}.",
        "The parameters after that step: they may hold NaN from then on.",
        "Resume from a checkpoint before it. Nothing skips such a step without loss scaling.",
    )


# What overflows, and how far the scale fell for it.


def _overflow(run: Run) -> Finding | None:
    """The lowest scale, the deepest fall, the layer that overflowed most often: one cause."""
    low, falls, often = run.lowest_told(run.place), run.real_falls(), _most_often_in(run)
    fall = falls[0] if falls else None
    what, look = [], ""
    level: Level = "warn" if falls or run.kinds.other else "note"
    if low:
        level = "bad"
        why = "overflows from there on cannot be met by a smaller one"
        if run.lowest is not None and run.lowest[0] <= 1:
            why = "at 1 or less it no longer scales, and the overflow is not of its making"
        what.append(_sentence(f"{low}: {why}"))
        look = "Gradients or activations that are beyond float16, or NaN, at any scale."
    if fall is not None:
        level = "bad" if run.is_deep(fall) else level
        what.append(_fall_text(run, fall) + _other_falls(run, falls))
        look = _near(run, fall) or look
    if often and (fall is None or 2 * fall.origins[often] < run.origins[often]):
        total = counted(run.origins.total(), "overflow")
        how = "" if run.firsts else " (the last layer with inf or NaN; backward meets it first)"
        what.append(f"{often} is where {run.origins[often]} of {total} began{how}.")
        look = look or "Its gradients, its input's range, its learning rate."
    soon = _about_to_fail(run)
    if soon and not what:
        return Finding(
            "warn",
            f"About to fail: {soon}",
            "The gradient norm: does it grow?",
            _against_overflow(run, None, ""),
        )
    if not what:
        return None
    is_ordinary = level == "note"
    return Finding(
        level, " ".join(what), look, "" if is_ordinary else _against_overflow(run, fall, often)
    )


def _against_overflow(run: Run, fall: Fall | None, often: str) -> str:
    """What to do, by what is known of the cause."""
    name = often
    if fall is not None and fall.origins:
        name = fall.origins.most_common(1)[0][0]
    of_loss = run.loss_windows and fall is not None and 2 * fall.kinds["forward"] > fall.skips
    if name == THE_LOSS or of_loss:
        return "As for the loss (above)."
    if any(name == module or name.startswith(f"{module}.") for module in run.healed):
        return "heal has met it."
    module = name.rpartition(".")[0]
    which = (
        f"that layer in float32 ({module_list([module])})" if module else "that layer in float32"
    )
    if not name:
        which = "the layer with the largest gradients in float32"
    floor = setting(run, "min_scale")
    at_floor = floor is not None and run.last_scale <= floor and floor > 1
    lower = "Lower min_scale, or k" if at_floor else "K"
    text = f"{lower}eep {which}, or lower the learning rate."
    if run.lowest_told(run.place) and setting(run, "max_consecutive_skips") is None:
        text += " max_consecutive_skips ends a run that only skips."
    return f"{text} {_find_overflow_hint(run)}".strip()


def _most_often_in(run: Run) -> str:
    """The layer where most overflows began, if it is one; else nothing."""
    if not run.origins:
        return ""
    name, count = run.origins.most_common(1)[0]
    if name == THE_LOSS or count < REPEATED or 2 * count < run.origins.total():
        return ""
    return name


def _most_often(origins: Counter[str]) -> str:
    """``X overflowed 14 times``, or nothing where nobody knows."""
    if not origins:
        return ""
    name, count = origins.most_common(1)[0]
    if name == THE_LOSS:
        return f"the loss was inf or NaN {times(count)}"
    others = f", {counted(len(origins) - 1, 'other')} less often" if len(origins) > 1 else ""
    return f"{name} overflowed {times(count)}{others}"


def _fall_text(run: Run, fall: Fall) -> str:
    began = _most_often(fall.origins)
    start = run.place(fall.first_x)
    end = f": {began}." if began else "."
    if fall.low >= fall.high:
        skips = counted(fall.skips, "skip")
        return f"The scale stayed at {number(fall.low)} through {skips} from {start} on{end}"
    since = f"from {start} on, " if fall.last_x > fall.first_x else ""
    way = f"{since}from {number(fall.high)}, {counted(fall.skips, 'skip')}"
    return f"The scale fell to {number(fall.low)} after {run.place(fall.last_x)} ({way}){end}"


def _other_falls(run: Run, falls: list[Fall]) -> str:
    if len(falls) < 2:
        return ""
    others = counted(len(falls) - 1, "other fall")
    return f" And {'at least ' if len(run.falls) >= MAX_FALLS else ''}{others} like it."


def _near(run: Run, fall: Fall) -> str:
    for x, first in run.firsts:
        if fall.first_x <= x <= fall.last_x and first["text"]:
            return f"At {run.place(x)}: {first['text']}"
    return "What changed there: the batch, the learning rate, the gradient norm just before."


def _about_to_fail(run: Run) -> str:
    """At its floor the scale is almost too high; nothing where it is not so."""
    room, floor = _room(run), setting(run, "min_scale")
    at_floor = floor is not None and run.last_scale <= floor
    if room is None or not 0 <= room < LITTLE_ROOM or not (at_floor or run.last_scale <= 1):
        return ""
    end = "a scale below 1 helps nobody"
    if at_floor:
        end = f"min_scale = {number(floor or 0.0)} keeps the scale there"
    return f"{_largest_seen(run)}, and {end}: a gradient twice as large overflows."


# What was skipped.


def _skips(run: Run) -> Finding | None:
    if not run.skips:
        if run.stepped_bad or run.loss_windows:
            return None
        if run.overflows:
            word = counted(run.overflows, "window")
            return Finding("warn", f"{word} had inf or NaN gradients, none was skipped.")
        return Finding("good", f"No overflow in {counted(run.windows, 'window')}.")
    kinds, falls = run.kinds, run.real_falls()
    what, do = [], ""
    low = run.lowest_told(run.place)
    is_odd = kinds.other or kinds.forward or (kinds.search and run.healed) or low
    is_odd = is_odd or run.skips == run.windows
    level: Level = "note" if is_odd else "good"
    later = run.skips - kinds.search
    if later > MANY_SKIPPED * run.windows:
        level = "warn"
        what.append(
            f"{percent(later, run.windows)} of the windows were skipped after the search: so many "
            "batches trained nothing."
        )
        if 2 * kinds.growth > later:
            do = "Raise growth_interval, or lower max_scale: a growth is what most of them follow."
    if kinds.search:
        search = max((f for f in run.falls if f.is_search), key=lambda f: f.skips, default=None)
        way = f" ({number(search.high)} to {number(search.low)})" if search else ""
        why = ": normal, but for what was healed" if run.healed else ": normal"
        skips = counted(kinds.search, "skip")
        why = "" if low else why
        what.append(f"{skips} while the scale was first searched for{way}{why}.")
        if kinds.search >= MANY_SEARCHED and not do and not _is_held(run):
            do = "A smaller init_scale saves them."
    if kinds.growth:
        interval = setting(run, "growth_interval")
        every = f" every {number(interval)} windows" if interval else ""
        what.append(
            f"{counted(kinds.growth, 'skip')} after the scale had grown: normal, it tries a larger "
            f"one{every} and steps back."
        )
    if kinds.forward:
        what.append(
            f"{counted(kinds.forward, 'skip')} with inf or NaN in the forward: a smaller scale "
            "does not help against these."
        )
    if kinds.other and falls:
        what.append(f"{counted(kinds.other, 'skip')} besides, in falls of the scale (above).")
    elif kinds.other:
        began = _most_often(run.origins)
        what.append(
            f"{counted(kinds.other, 'skip')} besides, far apart" + (f": {began}." if began else ".")
        )
    is_told = any(f.first_x == run.longest_streak_x for f in falls[:1])
    if run.longest_streak >= LONG_STREAK and run.longest_streak > kinds.search and not is_told:
        level = "warn"
        what.append(
            f"The longest streak: {run.longest_streak} skips in a row from "
            f"{run.place(run.longest_streak_x)} on."
        )
    return Finding(level, " ".join(what), do=do)


# What was clipped.


def _clipping(run: Run) -> Finding | None:
    if not run.limited or run.clipped <= MANY_CLIPPED * run.limited:
        return None
    limits = [b.max_norm for b in run.bins.done if b.max_norm is not None]
    norms = Spread()
    for each in run.bins.done:
        norms.merge(each.norm)
    middle = number(norms.middle) if norms.count else "?"
    do = "Nothing, if it is meant, as it is for many language models."
    if not _is_unstable(run):  # else a longer step is the last that it needs
        do += " If not, raise the threshold towards the usual norm."
    return Finding(
        "note",
        f"The gradient norm was above the clipping threshold in "
        f"{percent(run.clipped, run.limited)} of the windows (geometric mean {middle}, "
        f"threshold {number(limits[-1])}).",
        "Whether that is meant: every such step has the same length, whatever the gradient.",
        do,
    )


def _is_unstable(run: Run) -> bool:
    """Something else is told to take shorter steps."""
    others = (rule(run) for rule in (_loss, _parameters, _overflow))
    return any(found is not None and found.do for found in others)


# How much of float16's range gradients took.


def _underflowing(run: Run) -> list[tuple[str, float, float]]:
    """Parameters whose gradients lost small elements: name, zeros, subnormals; worst first."""
    found = [
        (name, zero, low)
        for name, zero, low in run.range.underflow
        if low > MANY_SUBNORMAL
        or zero == 1
        or (zero > MANY_ZERO and low > FEW_SUBNORMAL * (1 - zero))
    ]
    return sorted(found, key=lambda u: -max(u[1], u[2]))


def _doublings(room: float) -> str:
    """``2.5 doublings``, none where float32 has added up more than float16 holds."""
    return f"{max(room, 0.0):.1f} doublings" if room < math.inf else "no gradient is above 0"


def _room(run: Run) -> float | None:
    """Doublings of the last scale until the largest gradient that was seen overflows."""
    if not run.is_scaled or not run.last_scale > 0 or run.range.zero_share == 1:
        return None
    return run.range.room_at(run.last_scale)


def _largest_seen(run: Run) -> str:
    assert run.range.last is not None
    unscaled, x = run.range.last
    return (
        f"at {run.place(x)} the largest gradient was {number(unscaled)}, so that at the last "
        f"scale, {number(run.last_scale)}, it takes {number(unscaled * run.last_scale)} of "
        f"float16's {number(LARGEST)}"
    )


def _range(run: Run) -> Finding | None:
    """Small gradients that are lost, and whether a larger scale could save them."""
    low, room = _underflowing(run), _room(run)
    if not low:
        return None
    each = ", ".join(
        f"{name} {percent(zero, 1)} zero and {percent(tiny, 1)} subnormal"
        for name, zero, tiny in low[:3]
    )
    what = (
        f"Underflow: {len(low)} of {counted(len(run.range.underflow), 'parameter')} measured at "
        f"{run.place(run.range.underflow_x)} had mostly zero or many subnormal float16 gradients "
        f"({each})."
    )
    if room is not None and room >= MUCH_ROOM:
        held = ", and max_scale holds it there" if _is_held(run) else ""
        what += (
            f" The scale could be higher: {_largest_seen(run)}, {_doublings(room)} below the end"
            f"{held}."
        )
    return Finding(
        "warn",
        what,
        "Whether those zeros are meant: embedding rows not in the batch, unused experts.",
        _against_underflow(run, room),
    )


def _is_held(run: Run) -> bool:
    ceiling = setting(run, "max_scale")
    return ceiling is not None and run.last_scale >= ceiling


def _against_underflow(run: Run, room: float | None) -> str:
    first = "keep what overflows first in float32, since it holds the scale down for all."
    if not run.is_scaled:
        return ""
    if room is not None and room < MUCH_ROOM:
        return f"There is little room for a larger scale ({_doublings(room)}): {first}"
    if run.kinds.growth or run.kinds.other:
        text = "Gradients of activations are what overflows at a larger scale: " + first
        return f"{text} {_find_overflow_hint(run)}".strip()
    better = "" if room is None else number(run.last_scale * 2.0 ** int(min(room, 24.0) - 1))
    if _is_held(run):
        return f"Raise max_scale, to {better} say." if better else "Raise max_scale."
    interval = setting(run, "growth_interval")
    grows = "It grows by itself"
    if interval is not None:
        grows = f"By itself it doubles after {number(interval)} windows without overflow"
    if run.kinds.search:  # from init_scale it had to come down
        return f"{grows}; a smaller growth_interval makes it sooner."
    larger = f"init_scale={better}, say." if better else "A larger init_scale."
    return f"{larger} {grows}."


# Time, and what was late.


def _waiting(run: Run) -> Finding | None:
    timing = run.timing
    modes = {session.settings.get("step_mode") for session in run.sessions}
    if not timing.optimizer or not modes & {"overlap", "delayed"}:
        return None
    share = timing.hidden / timing.optimizer
    text = f"{percent(timing.hidden, timing.optimizer)} of the optimizer's time was hidden"
    if share >= LITTLE_HIDDEN:
        return Finding("good", f"{text} behind the training thread's own work.")
    return Finding(
        "warn",
        f"Only {text}: the training thread waited {timing.waited:.3g} s in all.",
        do="Leave the optimizer a core of its own (optimizer_threads, OMP_NUM_THREADS), or use "
        'step_mode="sync": there is too little to run beside.',
    )


# The file.


def _broken(run: Run) -> Finding | None:
    if not run.broken:
        return None
    line, why = run.broken_first or (0, "")
    return Finding(
        "note",
        f"{counted(run.broken, 'line')} of {run.lines} could not be read and "
        f"{'was' if run.broken == 1 else 'were'} left out (the first is line {line}: {why}).",
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
