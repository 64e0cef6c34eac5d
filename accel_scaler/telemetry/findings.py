"""What went wrong in a run and what to do: the findings of a diagnosis, and its verdict.

One function a finding, so that the live history, its verdict and the report cannot disagree. No
finding about an overflow advises to clip: that comes after the backward.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..console import counted, number, percent
from .diagnosis import MANY_SKIPPED, REPEATED, SMALLEST_SCALE, THE_LOSS, Diagnosis, Fall, Session

Level = Literal["bad", "warn", "note", "good"]
LEVELS: tuple[Level, ...] = ("bad", "warn", "note", "good")
LONG_SEARCH = 8
"""Skips of a search that a smaller init_scale would save."""
MAX_ERROR = 200
"""Characters of an error that are quoted."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that happened."""

    level: Level
    title: str
    """What happened: a sentence."""
    text: str = ""
    """Where to look and what to do; may be empty."""


def diagnose(run: Diagnosis) -> list[Finding]:
    """Everything found in a run, bad findings first."""
    rules = (streak, healed, loss, parameters, overflow, skips)
    return by_level(rule(run) for rule in rules)


def by_level(found: Iterable[Finding | None]) -> list[Finding]:
    """The findings among ``found``, bad ones first."""
    return sorted(filter(None, found), key=lambda finding: LEVELS.index(finding.level))


def verdict(run: Diagnosis, is_file: bool = False) -> str:
    """Whether the run trained, what stopped it, what to do: a few sentences.

    Args:
        is_file: the run is over or was killed, so how it ended is part of the verdict.
    """
    counts, others = skips(run), [f for f in diagnose(run) if f != skips(run)]
    problem = next((f for f in others if f.level == "bad" or run.kind == "partly"), None)
    last_good = run.place(run.last_x - run.streak) if run.windows > run.streak else "its start"
    head = {
        "untrained": "Nothing was trained",
        "stuck": f"Did not train past {last_good}",
        "diverged": "Diverged",
        "partly": "Trained in part",
        "trained": "Trained" if problem is None else "Trained with a problem",
    }[run.kind]
    sentences = [f"{head}: {counts.title[:1].lower()}{counts.title[1:]}"]
    for finding in (problem, healed(run)):
        if finding is not None:
            sentences.append(f"{finding.title} {finding.text}".rstrip())
    end = ending(run) if is_file else None
    if end is not None and end.level != "note":
        sentences.append(end.title)
    return " ".join(sentences)


def module_list(names: Sequence[str]) -> str:
    """The line for the config: ``fp32_modules: ['a', 'b.c']``."""
    return f"fp32_modules: [{', '.join(map(repr, names))}]"


# How it ended.


def ending(run: Diagnosis) -> Finding | None:
    """How the sessions of a file ended; None: as they should."""
    if not run.sessions:
        return None
    early = [
        f"Session {number_of} {how}."
        for number_of, session in enumerate(run.sessions[:-1], 1)
        if (how := _how_it_ended(run, session))
    ]
    before = early[-1] if early else ""
    if len(early) > 1:
        before += f" {counted(len(early) - 1, 'session')} before it ended early, too."
    how = _how_it_ended(run, run.sessions[-1])
    if run.error is not None:
        return Finding("bad", f"The run {how}.", before)
    if how:
        look = "Look at the last lines of its output, and the machine's log (out of memory?)."
        return Finding("warn", f"The run {how}, or still trains.", f"{look} {before}".rstrip())
    return Finding("note", before, "A later session went on from there.") if before else None


def _how_it_ended(run: Diagnosis, session: Session) -> str:
    """How a session ended; empty if it ended as it should."""
    at = "before its first window closed"
    if session.last_step >= 0:
        at = f"after {run.place(session.first_x + session.last_step)}"
    if session.error is None:
        return "" if session.ended else f"has no end line: it stopped {at} or was killed"
    error = session.error
    text = error if len(error) <= MAX_ERROR else f"{error[:MAX_ERROR]}..."
    return f"ended with an error {at}: {text.rstrip('.')}"


# What went wrong.


def streak(run: Diagnosis) -> Finding | None:
    """Every window was skipped, all of them or those at the end."""
    is_nothing = run.windows == run.skips > 0 and not run.healed
    if not run.is_stuck and not is_nothing:
        return None
    which = "All windows" if run.windows == run.streak else f"The last {run.streak:,} windows"
    what, remedy = _cause_of_streak(run)
    return Finding("bad", f"{which} {what}.", remedy)


def _cause_of_streak(run: Diagnosis) -> tuple[str, str]:
    """What the windows of the streak did, and what helps."""
    firsts = [first for x, first in run.firsts if x > run.last_x - run.streak]
    searches = run.streak == run.windows == run.kinds["search"]
    if firsts and not (searches and firsts[-1]["where"] in ("backward", "parameter")):
        return cause_of(firsts[-1])
    origins = run.streak_origins
    name, count = origins.most_common(1)[0] if origins else ("", 0)
    if name == THE_LOSS:
        remedy = f"A smaller scale does not help: look at these batches. {_replay_hint(run)}"
        return "had a loss of inf or NaN", remedy.rstrip()
    if searches:
        scale = number(run.last_scale)
        what = f"overflowed while the scale was searched for, down to {scale}"
        return what, f"Go on, or begin there, with a smaller init_scale ({scale})."
    module = name.rpartition(".")[0]
    if module and 2 * count > run.streak:
        return (
            f"overflowed, first in {name}",
            f"Keep its module in float32: {module_list([module])}.",
        )
    return "overflowed", "Run with find_overflow='replay' to see in which module it begins."


def cause_of(first: dict[str, Any]) -> tuple[str, str]:
    """What windows did and what helps, by what the overflow finder saw (``Record.first``)."""
    where, module, cls = first["where"], first["module"], first["class"]
    named = f"{module} ({cls})" if module else f"the model itself ({cls})"
    remedy = f"Keep it in float32: {module_list([module])}." if module else "Compute it in float32."
    if where == "loss":
        return "overflowed in the loss, outside of the model", remedy
    if where == "forward":
        given = first.get("input") or ()
        if not all(math.isfinite(float(each)) for each in given):  # in a live record inf is a text
            return f"got inf or NaN as the input of {named}", "Look at the data of these batches."
        return f"overflowed in the forward of {named}", remedy
    if where == "parameter":
        return f"overflowed in a parameter's gradient of {named}", remedy
    return f"overflowed in the backward of {named if module else 'the loss'}", remedy


def _replay_hint(run: Diagnosis) -> str:
    return "" if run.firsts else "Run again with find_overflow='replay' to see where it begins."


def healed(run: Diagnosis) -> Finding | None:
    """``heal`` has put modules in float32."""
    if not run.healed:
        return None
    each = ", ".join(f"{name} (from {run.place(x)} on)" for name, x in run.healed.items())
    title = f"heal has put {counted(len(run.healed), 'module')} in float32: {each}."
    return Finding("note", title, f"For the config: {module_list(list(run.healed))}.")


def loss(run: Diagnosis) -> Finding | None:
    """The loss was inf or NaN, or ran away."""
    bad, rise = run.bad_losses, run.rise()
    if not bad.count:
        if rise is None:
            return None
        first, last = rise
        return Finding(
            "bad",
            f"The loss rose from {first:.4g} to {last:.4g} (medians of its first and last "
            "windows).",
            "Look at the learning rate and the gradient norm just before. Resume from a "
            "checkpoint before it, with a lower learning rate.",
        )
    steps = run.place(bad.first_x)
    if bad.count > 1:
        steps = f"{steps} to {run.place(bad.last_x)}"
    title = f"The loss itself was inf or NaN in {counted(bad.count, 'window')} ({steps})."
    look = "Look at the forward: the batch, a division or log at 0, an activation above 65504."
    if not run.is_scaled:
        remedy = "Resume from a checkpoint before it: without loss scaling such a step is taken."
        return Finding("bad", title, f"{look} {remedy}")
    firsts = [first for x, first in run.firsts if bad.first_x <= x <= bad.last_x]
    cure = cause_of(firsts[-1])[1] if firsts else _replay_hint(run)
    return Finding("bad", title, f"{look} A smaller scale does not help. {cure}".rstrip())


def parameters(run: Diagnosis) -> Finding | None:
    """No parameter has moved, or some may hold NaN."""
    if run.windows > run.skips and not run.has_moved:
        return Finding(
            "bad",
            "The learning rate was 0 in every window that stepped: no parameter has moved.",
            "Look at the learning rates of the optimizer and of its schedule.",
        )
    bad = run.stepped_bad
    if not bad.count:
        return None
    return Finding(
        "bad",
        f"The gradient norm was inf or NaN in {counted(bad.count, 'window')} that "
        f"stepped all the same, first at {run.place(bad.first_x)}.",
        "The parameters may hold NaN from then on: resume from a checkpoint before it.",
    )


# What overflows, and how far the scale fell for it.


def overflow(run: Diagnosis) -> Finding | None:
    """The lowest scale, the deepest fall, the layer that overflowed most often: one cause."""
    low, fall, often = _low(run), run.worst_fall(), _most_often_in(run)
    level: Level = "warn" if fall is not None or run.kinds["other"] else "note"
    if low or (fall is not None and run.is_deep(fall)):
        level = "bad"
    what, look = [], ""
    if low:
        what.append(low)
        look = "Gradients or activations are beyond float16, or NaN, at any scale."
    if fall is not None:
        what.append(_fall_text(run, fall))
        texts = [(x, f["text"]) for x, f in run.firsts if fall.first_x <= x <= fall.last_x]
        look = "Look at the batch, the learning rate and the gradient norm just before."
        look = next((f"At {run.place(x)}: {text}" for x, text in texts if text), look)
    if often and (fall is None or 2 * fall.origins[often] < run.origins[often]):
        total = counted(run.origins.total(), "overflow")
        what.append(f"{often} is where {run.origins[often]} of {total} began.")
    if not what:
        return None
    do = "" if level == "note" or streak(run) else _against_overflow(run, fall, often)
    return Finding(level, " ".join(what), f"{look} {do}".strip())


def _low(run: Diagnosis) -> str:
    """A sentence if an overflow has brought the scale to its floor or to 1; else empty."""
    if run.lowest is None or not run.skips or not run.is_scaled:
        return ""
    (low, x), floor = run.lowest, run.setting("min_scale")
    if floor is not None and low <= floor:
        return f"The scale reached its floor, min_scale = {number(floor)} ({run.place(x)})."
    if low <= SMALLEST_SCALE:
        why = "at 1 or less it no longer scales, and an overflow is not of its making"
        return f"The scale fell to {number(low)} ({run.place(x)}): {why}."
    return ""


def _against_overflow(run: Diagnosis, fall: Fall | None, often: str) -> str:
    """What to do, by what is known of the cause."""
    name = often
    if fall is not None and fall.origins:
        name = fall.origins.most_common(1)[0][0]
    of_loss = run.bad_losses.count and fall and 2 * fall.kinds["forward"] > fall.skips
    if name == THE_LOSS or of_loss:
        return "As for the loss."
    if any(name == module or name.startswith(f"{module}.") for module in run.healed):
        return "heal keeps it in float32."
    module = name.rpartition(".")[0]
    which = f"that layer in float32 ({module_list([module])})" if module else "it in float32"
    if not name:
        which = "the layer with the largest gradients in float32"
    floor = run.setting("min_scale")
    at_floor = floor is not None and run.last_scale <= floor and floor > SMALLEST_SCALE
    text = f"{'Lower min_scale, or k' if at_floor else 'K'}eep {which}, or lower the learning rate."
    if _low(run) and run.setting("max_consecutive_skips") is None:
        text += " max_consecutive_skips ends a run that only skips."
    return f"{text} {_replay_hint(run)}".rstrip()


def _most_often_in(run: Diagnosis) -> str:
    """The layer where most overflows began, if it is one; else empty."""
    name, count = run.origins.most_common(1)[0] if run.origins else (THE_LOSS, 0)
    is_one = name != THE_LOSS and count >= REPEATED and 2 * count >= run.origins.total()
    return name if is_one else ""


def _most_often(origins: Counter[str]) -> str:
    """``: X overflowed 14 times``; empty where no origin is known."""
    if not origins:
        return ""
    name, count = origins.most_common(1)[0]
    what = "the loss was inf or NaN" if name == THE_LOSS else f"{name} overflowed"
    return f": {what} {counted(count, 'time')}"


def _fall_text(run: Diagnosis, fall: Fall) -> str:
    start, count, origins = run.place(fall.first_x), counted(fall.skips, "skip"), fall.origins
    if fall.low >= fall.high:
        held = f"The scale stayed at {number(fall.low)} through {count} from {start} on"
        return f"{held}{_most_often(origins)}."
    since = f"from {start} on, " if fall.last_x > fall.first_x else ""
    way = f"{since}from {number(fall.high)}, {count}"
    end = run.place(fall.last_x)
    return f"The scale fell to {number(fall.low)} after {end} ({way}){_most_often(origins)}."


# What was skipped.


def skips(run: Diagnosis) -> Finding:
    """How many windows were skipped, and when; every run has this finding."""
    if not run.windows:
        return Finding("note", "No window closed.")
    counts = f"{run.windows:,} window{'s' * (run.windows != 1)}"
    if not run.skips:
        is_bad = run.stepped_bad.count or run.bad_losses.count
        how = ", none skipped"
        if not run.is_scaled:
            is_finite = run.highest is not None and not run.stepped_bad.count
            how = " without loss scaling" + ", every gradient norm finite" * is_finite
        return Finding("note" if is_bad else "good", f"{counts}{how}.")
    kinds = run.kinds
    when = {
        "while the scale settled": kinds["search"],
        "after the scale had grown": kinds["growth"],
        "with inf or NaN in the forward": kinds["forward"],
        "in the middle of training": kinds["other"],
    }
    parts = ", ".join(f"{count:,} {name}" for name, count in when.items() if count)
    title = f"{counts}, {run.skips:,} skipped ({percent(run.skips, run.windows)}): {parts}."
    is_odd = kinds["other"] or kinds["forward"] or (kinds["search"] and run.healed) or _low(run)
    level: Level = "note" if is_odd or run.skips == run.windows else "good"
    later, text = run.skips - kinds["search"], []
    if later > MANY_SKIPPED * run.windows:
        level = "warn"
        text.append(
            f"After the search {percent(later, run.windows)} of the windows trained nothing."
        )
    if kinds["search"] >= LONG_SEARCH and not run.is_held:
        text.append("A smaller init_scale saves the skips of the search.")
    if level == "warn" and 2 * kinds["growth"] > later:
        text.append("Raise growth_interval, or lower max_scale: most skips follow a growth.")
    if kinds["other"] and run.worst_fall() is None:
        text.append(f"Those in the middle of training were far apart{_most_often(run.origins)}.")
    return Finding(level, title, " ".join(text))
