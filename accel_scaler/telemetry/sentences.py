"""A diagnosis in words: whether the run trained, what stopped it, what to do."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from ..console import counted, number, percent
from ..errors import BROKEN
from .diagnosis import THE_LOSS, Diagnosis
from .record import Record

MAX_ERROR = 200
"""Characters of an error."""


def verdict(run: Diagnosis, is_file: bool = False) -> str:
    """Whether it trained, what stopped it, what to do.

    Args:
        is_file: no end line means that the run was killed, or still trains.
    """
    end = _end(run) if is_file and run.sessions else ""
    if not run.windows:
        text = "Nothing was trained: no window closed"
        return f"{text} before {end}" if end else f"{text}."
    if run.skips < run.windows and not run.has_moved:
        text = (
            "Nothing was trained: the learning rate was 0 in every window that stepped; look at "
            f"the learning rates of the optimizer and of its schedule. {sentence(_counts(run))}"
        )
    elif run.is_stuck or (run.skips == run.windows and not run.healed):
        text = _stuck(run)
    else:
        text = _trained(run)
    return f"{text} After {run.place(run.last_x)} {end}" if end else text


def warning_of_low_scale(record: Record) -> str:
    """What is logged once the scale falls below 1."""
    names = ", ".join(record.overflowed) or "no single tensor"
    return (
        "the loss scale fell below 1, so gradients overflow whatever it is. Last seen in: "
        f"{names}. min_scale keeps it up, max_consecutive_skips ends such a run. (Logged once.)"
    )


def module_list(names: Sequence[str]) -> str:
    """The line for the config: ``fp32_modules: ['a', 'b.c']``."""
    return f"fp32_modules: [{', '.join(map(repr, names))}]"


def sentence(text: str) -> str:
    """``text`` with a capital letter and a full stop."""
    return f"{text[:1].upper()}{text[1:]}."


def ran_away(rise: tuple[float, float]) -> str:
    """Of ``Diagnosis.rise``."""
    first, last = rise
    return f"the loss rose from {first:.4g} to {last:.4g} (medians of its first and last windows)"


def cause_of(first: dict[str, Any]) -> tuple[str, str]:
    """What windows did and what helps, by what the overflow finder saw (``Record.first``)."""
    where, module, cls = first["where"], first["module"], first["class"]
    named = f"{module} ({cls})" if module else f"the model itself ({cls})"
    remedy = f"keep it in float32: {module_list([module])}" if module else "compute it in float32"
    if where == "loss":
        return "overflowed in the loss, outside of the model", remedy
    if where == "forward":
        given = first.get("input") or ()
        if not all(math.isfinite(float(each)) for each in given):  # in a live record inf is a text
            return f"got inf or NaN as the input of {named}", "look at the data of these batches"
        return f"overflowed in the forward of {named}", remedy
    if where == "parameter":
        return f"overflowed in a parameter's gradient of {named}", remedy
    return f"overflowed in the backward of {named if module else 'the loss'}", remedy


def _end(run: Diagnosis) -> str:
    """How the last session ended; empty: as it should."""
    session = run.sessions[-1]
    if session.error is None:
        begun = "is still going" if run.windows else "has just begun"
        return "" if session.ended else f"it was killed, or {begun}: there is no end line."
    first = session.error.partition(". ")[0]
    text = first if len(first) <= MAX_ERROR else f"{first[:MAX_ERROR]}..."
    return f"it ended with an error: {text.rstrip('.')}."


def _stuck(run: Diagnosis) -> str:
    what, remedy = _cause(run)
    if run.skips < run.windows:
        last_good = run.place(run.last_x - run.streak) if run.windows > run.streak else "its start"
        begin = f"Did not train past {last_good}: every window since ({run.streak:,}) {what}"
    else:
        begin = f"Nothing was trained: {counted(run.windows, 'window')} closed, each {what}"
    return f"{begin}; {remedy}.{_healed_before(run)}"


def _healed_before(run: Diagnosis) -> str:
    return f" Healed before: {module_list(list(run.healed))}." if run.healed else ""


def _cause(run: Diagnosis) -> tuple[str, str]:
    """What the windows of the streak did, and what helps."""
    if run.error is not None and BROKEN in run.error:
        return f"overflowed: {BROKEN}", "load the last good checkpoint"
    firsts = [first for x, first in run.firsts if x > run.last_x - run.streak]
    searches = run.streak == run.windows == run.kinds["search"]
    if firsts and not (searches and firsts[-1]["where"] in ("backward", "parameter")):
        return cause_of(firsts[-1])
    origins = run.streak_origins
    name, count = origins.most_common(1)[0] if origins else ("", 0)
    if name == THE_LOSS:
        return (
            "had a loss of inf or NaN",
            "a smaller scale does not help: look at the data of these batches, and run with "
            "find_overflow='replay' to see whether the forward makes it",
        )
    if searches:
        scale = number(run.last_scale)
        what = f"overflowed while the scale was searched for, down to {scale}"
        return what, f"go on, or begin there: init_scale={scale}"
    module = name.rpartition(".")[0]
    if module and 2 * count > run.streak:
        remedy = f"keep its module in float32: {module_list([module])}"
        return f"overflowed, first in {name}", remedy
    return "overflowed", "run with find_overflow='replay' to see in which module it begins"


def _counts(run: Diagnosis) -> str:
    counts = f"{run.windows:,} window{'s' * (run.windows != 1)}"
    if not run.is_scaled:
        is_finite = run.highest is not None and not run.stepped_bad.count
        return f"{counts} without loss scaling{', every gradient norm finite' * is_finite}"
    if not run.skips:
        return f"{counts}, none skipped"
    return f"{counts}, {skip_counts(run)}"


def skip_counts(run: Diagnosis) -> str:
    """``3 skipped (1.5 %): 2 while the scale settled and 1 after the scale had grown``."""
    kinds = {
        "while the scale settled": run.kinds["search"],
        "after the scale had grown": run.kinds["growth"],
        "with inf or NaN in the forward": run.kinds["forward"],
        "in the middle of training": run.kinds["other"],
    }
    parts = ", ".join(f"{count:,} {when}" for when, count in kinds.items() if count)
    return f"{run.skips:,} skipped ({percent(run.skips, run.windows)}): {parts}"


def _trained(run: Diagnosis) -> str:
    but = []
    if run.stepped_bad.count:
        but.append(
            "the gradient norm was inf or NaN in windows that stepped all the same, first at "
            f"{run.place(run.stepped_bad.first_x)}, so load a checkpoint before it"
        )
    if run.bad_losses.count:
        windows = counted(run.bad_losses.count, "window")
        but.append(f"the loss itself was inf or NaN in {windows}")
    fall = run.worst_fall()
    if low := run.low():
        but.append(low)
    elif fall is not None and run.is_deep(fall):
        but.append(f"the scale fell to {number(fall.low)} ({run.place(fall.last_x)})")
    counts = _counts(run)
    if run.kind == "diverged":
        return _diverged(run, but)
    problems = f", but {'; '.join(but)}" if but else ""
    if run.healed:
        begin = "Trained" if run.skips < run.windows else "Nothing trained yet,"
        begin = f"{begin} with {counted(len(run.healed), 'module')} healed{problems}"
        return f"{begin}: put `{module_list(list(run.healed))}` into the config. {sentence(counts)}"
    if run.kind == "partly":
        causes = Counter(cause_of(first) for _, first in run.firsts).most_common(1)
        cause = "".join(f": most often it {what}; {remedy}" for (what, remedy), _ in causes)
        return f"Trained in part{problems}{cause}. {sentence(counts)}"
    return f"Trained{problems}: {counts}."


def _diverged(run: Diagnosis, besides: Sequence[str]) -> str:
    rise = run.rise()
    last = "the last window" if run.bad_at_end == 1 else f"the last {run.bad_at_end:,} windows"
    what = f"inf or NaN in {last}" if rise is None else ran_away(rise)
    remedy = ". Load a checkpoint before it, and lower the learning rate"
    begin = f"Diverged: {'; '.join([what, *besides])}{'' if run.stepped_bad.count else remedy}"
    return f"{begin}. {sentence(_counts(run))}{_healed_before(run)}"
