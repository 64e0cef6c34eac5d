"""What happened in a run, in words, the most important first: from the aggregates alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal

from ..console import counted, percent
from ..telemetry import LARGEST, RECENT, REMEDY, TOO_FAR, module_list
from .formatting import number, times
from .run_summary import MAX_FALLS, Fall, Run, Session
from .samples import Spread

Level = Literal["bad", "warn", "note", "good"]
LEVELS: tuple[Level, ...] = ("bad", "warn", "note", "good")
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
DEEP_FALL = 6.0
"""Halvings of the scale, growth apart, that are no longer ordinary."""
REPEATED = 3
WITHOUT_SCALE = ("no", "bf16", "fp8")


@dataclass(frozen=True, slots=True)
class Finding:
    """One sentence on what happened, what to look at, what to do; the last two may be empty."""

    level: Level
    what: str
    look: str = ""
    do: str = ""


def find(run: Run) -> list[Finding]:
    """Every finding of a run: bad ones first, and in the order of their rules."""
    if not run.windows:
        return [*_ending(run), *_broken(run), Finding("note", "The file holds no windows.")]
    found = [finding for rule in RULES for finding in rule(run)]
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
    if is_scaled(run):
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
                f"at least {_doublings(least)} ({run.place(where)})",
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
    if run.late.most is not None:
        mean, (most, x) = run.late.mean, run.late.most
        rows.append(
            ("preview off by", f"{mean:.2g} of the update, at most {most:.2g} ({run.place(x)})")
        )
    if (seconds := sum(session.seconds for session in run.sessions)) > 0:
        rows.append(("time", f"{seconds:.3g} s, {run.windows / seconds:.3g} windows/s"))
    return rows


def is_scaled(run: Run) -> bool:
    """Not an fp32 or bf16 run."""
    return not all(s.facts.get("precision") in WITHOUT_SCALE for s in run.sessions)


def setting(run: Run, name: str) -> float | None:
    """A numeric setting of the last session that has it."""
    for session in reversed(run.sessions):
        value = session.settings.get(name)
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return float(value)
    return None


def _at(run: Run, session: Session) -> str:
    if session.last_step < 0:
        return "before its first window closed"
    return f"after {run.place(session.first_x + session.last_step)}"


def _ending(run: Run) -> Iterable[Finding]:
    last = run.sessions[-1] if run.sessions else None
    for session in run.sessions:
        which = f"Session {run.sessions.index(session) + 1}" if session is not last else "The run"
        if session.error is not None:
            yield Finding(
                "bad",
                f"{which} ended with an error {_at(run, session)}: {session.error}",
                do="" if session is last else "A later session went on from there.",
            )
        elif not session.ended:
            yield Finding(
                "warn" if session is last else "note",
                f"{which} has no end line: it stopped {_at(run, session)}"
                + (", was killed, or is still going." if session is last else " or was killed."),
                "The last lines of its output, and the machine's log (out of memory?)."
                if session is last
                else "",
            )


def _healed(run: Run) -> Iterable[Finding]:
    if run.healed:
        each = ", ".join(f"{name} (from {run.place(x)} on)" for name, x in run.healed.items())
        yield Finding(
            "note",
            f"heal has put {counted(len(run.healed), 'module')} in float32: {each}.",
            "What they cost: the time of their forwards and backwards.",
            f"{module_list(list(run.healed))} in the config does it from the start.",
        )


def _loss(run: Run) -> Iterable[Finding]:
    if not run.loss_windows:
        return
    span = run.place(run.loss_first_x)
    if run.loss_windows > 1:
        span = f"{span} to {run.place(run.loss_last_x)}"
    yield Finding(
        "bad",
        f"The loss itself was inf or NaN in {counted(run.loss_windows, 'window')} ({span}).",
        "The forward, not the gradients: the batch of that step, a division or log at 0, an "
        "activation above 65504 (float16's largest).",
        "A smaller scale does not cure this, since it multiplies the loss afterwards. "
        + (_find_overflow_hint(run) or "Keep the layer named below in float32."),
    )


def _find_overflow_hint(run: Run) -> str:
    return "" if run.firsts else "Run again with find_overflow='replay' to see where it begins."


def _stepped(run: Run) -> Iterable[Finding]:
    if run.stepped_bad:
        yield Finding(
            "bad",
            f"The gradient norm was inf or NaN in {counted(run.stepped_bad, 'window')} that "
            f"stepped all the same, first at {run.place(run.stepped_bad_x)}.",
            "The parameters after that step: they may hold NaN from then on.",
            "Resume from a checkpoint before it. Nothing skips such a step without loss scaling.",
        )


def _floor(run: Run) -> Iterable[Finding]:
    if run.lowest is None or not is_scaled(run):
        return
    (low, x), floor = run.lowest, setting(run, "min_scale")
    if floor is not None and low <= floor:
        yield Finding(
            "bad",
            f"The scale reached its floor, min_scale = {number(floor)} ({run.place(x)}).",
            "Overflows from there on cannot be met by a smaller scale.",
            "Find what overflows (below); max_consecutive_skips ends a run that only skips.",
        )
    elif low <= 1.0:
        yield Finding(
            "bad",
            f"The scale fell to {number(low)} ({run.place(x)}): at 1 or less it no longer scales, "
            "and the overflow is not of its making.",
            "Gradients or activations that are beyond float16, or NaN, at any scale.",
            "Lower the learning rate, clip, or keep the layer named below in float32; min_scale "
            "and max_consecutive_skips stop such a run early.",
        )


def _most_often(origins: Counter[str]) -> str:
    """``X overflowed 14 times``, or nothing where nobody knows."""
    if not origins:
        return ""
    name, count = origins.most_common(1)[0]
    if name == "the loss":
        return f"the loss was inf or NaN {times(count)}"
    others = f", {counted(len(origins) - 1, 'other')} less often" if len(origins) > 1 else ""
    return f"{name} overflowed {times(count)}{others}"


def is_deep(run: Run, fall: Fall) -> bool:
    """It is no ordinary fall."""
    return fall.doublings >= DEEP_FALL or (run.lowest is not None and run.lowest[0] <= 1.0)


def real_falls(run: Run) -> list[Fall]:
    """Falls that are neither the search nor the price of a growth, the deepest first."""
    falls = [f for f in run.falls if not f.search and (f.doublings >= 2 or f.skips >= REPEATED)]
    falls.sort(key=lambda f: (-f.doublings, -f.skips))
    return falls if is_scaled(run) else []


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


def _falls(run: Run) -> Iterable[Finding]:
    """The deepest of them, and how many more."""
    falls = real_falls(run)
    if not falls:
        return
    worst = falls[0]
    others = counted(len(falls) - 1, "other fall") if len(falls) > 1 else ""
    if others and len(run.falls) >= MAX_FALLS:
        others = f"at least {others}"
    yield Finding(
        "bad" if is_deep(run, worst) else "warn",
        _fall_text(run, worst) + (f" And {others} like it." if others else ""),
        _near(run, worst),
        f"Keep that layer in float32, lower the learning rate or clip. {_find_overflow_hint(run)}",
    )


def _near(run: Run, fall: Fall) -> str:
    for x, first in run.firsts:
        if fall.first_x <= x <= fall.last_x and first["text"]:
            return f"At {run.place(x)}: {first['text']}"
    return "What changed there: the batch, the learning rate, the gradient norm just before."


def _repeated(run: Run) -> Iterable[Finding]:
    """One layer again and again, where the fall above did not already say so."""
    total = run.origins.total()
    if not total:
        return
    name, count = run.origins.most_common(1)[0]
    if name == "the loss" or count < REPEATED or 2 * count < total:
        return
    falls = real_falls(run)
    if falls and 2 * falls[0].origins[name] >= count:
        return
    ordinary = not run.kinds.other
    yield Finding(
        "note" if ordinary else "warn",
        f"{name} is where {count} of {counted(total, 'overflow')} began"
        + ("." if run.firsts else " (the last layer with inf or NaN; backward meets it first)."),
        "Its gradients, its input's range, its learning rate.",
        ""
        if ordinary
        else "Keep that one layer in float32 (a forward under autocast(enabled=False)).",
    )


def _skips(run: Run) -> Iterable[Finding]:
    if not run.skips:
        if run.overflows:
            word = counted(run.overflows, "window")
            yield Finding("warn", f"{word} had inf or NaN gradients, none was skipped.")
        elif not run.stepped_bad:
            yield Finding("good", f"No overflow in {counted(run.windows, 'window')}.")
        return
    if run.kinds.search:
        search = max((f for f in run.falls if f.search), key=lambda f: f.skips, default=None)
        way = f" ({number(search.high)} to {number(search.low)})" if search else ""
        why = "normal"
        if run.healed:
            why = "normal, but for what was healed"
        yield Finding(
            "good" if run.kinds.search == run.skips and not run.healed else "note",
            f"{counted(run.kinds.search, 'skip')} while the scale was first searched for{way}: "
            f"{why}.",
            do="A smaller init_scale saves them." if run.kinds.search >= 8 else "",
        )
    if run.kinds.growth:
        interval = setting(run, "growth_interval")
        every = f" every {number(interval)} windows" if interval else ""
        yield Finding(
            "good" if not run.kinds.other else "note",
            f"{counted(run.kinds.growth, 'skip')} after the scale had grown: normal, it tries a "
            f"larger one{every} and steps back.",
        )
    later = run.skips - run.kinds.search
    if later > MANY_SKIPPED * run.windows:
        yield Finding(
            "warn",
            f"{percent(later, run.windows)} of the windows were skipped after the search: so many "
            "batches trained nothing.",
            "A growth_interval too small for the run, or a layer that overflows at any scale.",
            "Raise growth_interval, or set max_scale, where every growth is followed by a skip.",
        )
    elif run.kinds.other and not real_falls(run):
        yield Finding(
            "note",
            f"{counted(run.kinds.other, 'skip')} besides, far apart"
            + (f": {began}." if (began := _most_often(run.origins)) else "."),
        )
    told = any(f.first_x == run.longest_streak_x for f in real_falls(run)[:1])
    if run.longest_streak >= 5 and run.longest_streak > run.kinds.search and not told:
        yield Finding(
            "warn",
            f"The longest streak: {run.longest_streak} skips in a row from "
            f"{run.place(run.longest_streak_x)} on.",
        )


def _clipping(run: Run) -> Iterable[Finding]:
    if run.limited and run.clipped > MANY_CLIPPED * run.limited:
        limits = [b.max_norm for b in run.bins.done if b.max_norm is not None]
        norms = Spread()
        for each in run.bins.done:
            norms.merge(each.norm)
        middle = number(norms.middle) if norms.count else "?"
        yield Finding(
            "warn",
            f"The gradient norm was above the clipping threshold in "
            f"{percent(run.clipped, run.limited)} of the windows (geometric mean {middle}, "
            f"threshold {number(limits[-1])}).",
            "Whether that is meant: every such step has the same length, whatever the gradient.",
            "Raise the threshold towards the usual norm, or lower the learning rate instead.",
        )


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


def _underflow(run: Run) -> Iterable[Finding]:
    low, room = _underflowing(run), run.range.room_at(run.last_scale)
    if not low:
        return
    each = ", ".join(
        f"{name} {percent(zero, 1)} zero and {percent(tiny, 1)} subnormal"
        for name, zero, tiny in low[:3]
    )
    do = "A larger scale: raise init_scale, or a smaller growth_interval; keep what overflows "
    if room is not None and room < MUCH_ROOM:
        do = f"There is little room for a larger scale ({_doublings(room)}): keep what overflows "
    yield Finding(
        "warn",
        f"Underflow: {len(low)} of {counted(len(run.range.underflow), 'parameter')} measured at "
        f"{run.place(run.range.underflow_x)} had mostly zero or many subnormal float16 gradients "
        f"({each}).",
        "Whether those zeros are meant: embedding rows not in the batch, unused experts.",
        do + "first in float32, since it holds the scale down for all.",
    )


def _doublings(room: float) -> str:
    """``2.5 doublings``, none where float32 has added up more than float16 holds."""
    return f"{max(room, 0.0):.1f} doublings" if room < math.inf else "no gradient is above 0"


def _headroom(run: Run) -> Iterable[Finding]:
    """A scale that could be higher, and one at its floor that is about to be too high."""
    room = run.range.room_at(run.last_scale) if is_scaled(run) and run.last_scale > 0 else None
    if room is None or run.range.last is None or run.range.zero_share == 1:
        return
    unscaled, x = run.range.last
    seen = (
        f"at {run.place(x)} the largest gradient was {number(unscaled)}, so that at the last "
        f"scale, {number(run.last_scale)}, it takes {number(unscaled * run.last_scale)} of "
        f"float16's {number(LARGEST)}"
    )
    floor, ceiling = setting(run, "min_scale"), setting(run, "max_scale")
    at_floor = floor is not None and run.last_scale <= floor
    if 0 <= room < LITTLE_ROOM and (at_floor or run.last_scale <= 1):
        end = "a scale below 1 helps nobody"
        if at_floor:
            end = f"min_scale = {number(floor or 0.0)} keeps the scale there"
        lower = "Lower min_scale, or k" if at_floor and run.last_scale > 1 else "K"
        yield Finding(
            "warn",
            f"About to fail: {seen}, and {end}: a gradient twice as large overflows.",
            "The gradient norm: does it grow?",
            f"{lower}eep the layer with the largest gradients in float32.",
        )
    elif room >= MUCH_ROOM and _underflowing(run):
        held = ceiling is not None and run.last_scale >= ceiling
        better = number(run.last_scale * 2.0 ** int(min(room, 24.0) - 1))
        interval = setting(run, "growth_interval")
        do = f"Raise max_scale, to {better} say." if held else f"init_scale={better}, say."
        if not held and (run.kinds.growth or run.kinds.other):
            do = (
                "Gradients of activations are what overflows at a larger scale: keep that layer in "
                "float32. " + _find_overflow_hint(run)
            ).strip()
        elif not held and interval is not None:
            do += f" By itself it doubles after {number(interval)} windows without overflow."
        yield Finding(
            "warn",
            f"The scale could be higher: {seen}, {_doublings(room)} below the end, while small "
            "gradients are lost (above)" + (", and max_scale holds it there." if held else "."),
            do=do,
        )


def _waiting(run: Run) -> Iterable[Finding]:
    timing = run.timing
    modes = {session.settings.get("step_mode") for session in run.sessions}
    if not timing.optimizer or not modes & {"overlap", "delayed"}:
        return
    share = timing.hidden / timing.optimizer
    text = f"{percent(timing.hidden, timing.optimizer)} of the optimizer's time was hidden"
    if share >= LITTLE_HIDDEN:
        yield Finding("good", f"{text} behind the training thread's own work.")
        return
    where = ""
    if timing.waits:
        name, spent = timing.waits.most_common(1)[0]
        where = f"Most waiting ({percent(spent, timing.waits.total())}) was at {name or 'unnamed'}."
    yield Finding(
        "warn",
        f"Only {text}: the training thread waited {timing.waited:.3g} s in all.",
        where,
        "Leave the optimizer a core of its own (optimizer_threads, OMP_NUM_THREADS), or use "
        'step_mode="sync": there is too little to run beside.',
    )


def _previews(run: Run) -> Iterable[Finding]:
    late = run.late
    if late.most is None:
        return
    if late.worst is not None and late.worst[0] > TOO_FAR:
        mean, x = late.worst
        yield Finding(
            "warn",
            f"What the model was shown of late updates was off by {mean:.3g} times the update "
            f"itself on average in the {RECENT} windows up to {run.place(x)}: without any preview "
            "it would be 1.",
            "The held-out loss beside a run with step_mode='overlap'.",
            REMEDY,
        )
        return
    most, x = late.most
    yield Finding(
        "good" if late.mean <= TOO_FAR else "note",
        f"What the model was shown of late updates was off by {late.mean:.2g} of the update on "
        f"average (at most {most:.2g}, {run.place(x)}); without any preview it would be 1.",
    )


def _broken(run: Run) -> Iterable[Finding]:
    if run.broken:
        line, why = run.broken_first or (0, "")
        yield Finding(
            "note",
            f"{counted(run.broken, 'line')} of {run.lines} could not be read and "
            f"{'was' if run.broken == 1 else 'were'} left out (the first is line {line}: {why}).",
        )


RULES: tuple[Callable[[Run], Iterable[Finding]], ...] = (
    _ending,
    _healed,
    _loss,
    _stepped,
    _falls,
    _floor,
    _repeated,
    _skips,
    _clipping,
    _underflow,
    _headroom,
    _waiting,
    _previews,
    _broken,
)
