"""What became of a run, in one or two sentences: did it train, what stopped it, what to do."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ..console import counted, percent
from ..errors import BROKEN

STUCK = 20
"""Skips in a row at the end of a run: it did not train any more. The search for a scale takes 16
from the usual 65536 to 1."""

MANY_SKIPPED = 0.1
"""Of all windows, neither while the scale settled nor after it had grown: it trained in part."""

LONGEST_ERROR = 200
"""Letters of it: the whole of it stands below."""

THE_LOSS = "the loss"
"""Where an overflow began that is of no parameter."""


@dataclass(slots=True)
class Outcome:
    """What :func:`verdict` is made from, as far as it is known."""

    windows: int = 0
    skips: int = 0
    search_skips: int = 0
    growth_skips: int = 0
    scaled: bool = True
    scale: float = 0.0
    """Of the window that would come next."""
    is_over: bool = True
    """It has ended properly, or nobody knows otherwise."""
    error: str | None = None
    """What ended it."""
    last: str = ""
    """The last window: ``"step 12"``."""
    streak: int = 0
    """Skipped windows in a row, up to the last one."""
    trained_until: str = ""
    """The window before these; empty: there is none."""
    firsts: Sequence[dict[str, Any]] = ()
    """``Record.first`` of windows of the streak, in order."""
    all_firsts: Sequence[dict[str, Any]] = ()
    """The same of all windows."""
    origins: Counter[str] = field(default_factory=Counter)
    """In how many of its windows the overflow began where: a parameter, or the loss."""
    healed: Sequence[str] = ()
    norms: int = 0
    """Windows with a finite norm."""
    stepped_bad: str = ""
    """The first window that stepped though its norm was not finite; empty: none did."""
    loss_windows: int = 0
    """Windows whose loss was inf or NaN, but for those that healed the reason."""
    low: str = ""
    """``"the scale fell to 1 after step 12"``: where that is no ordinary fall."""


def verdict(of: Outcome) -> str:
    """The sentences."""
    if not of.windows:
        text = "Nothing was trained: no window closed"
        if of.error is not None:
            return f"{text} before it ended with an error: {_short(of.error)}"
        return f"{text}." if of.is_over else f"{text} before it was killed, or it has just begun."
    is_streak_error = of.error is not None and of.error.startswith("OverflowStreakError")
    if of.streak and (of.streak == of.windows or of.streak >= STUCK or is_streak_error):
        return _stuck(of) + _end(of)
    return _trained(of) + _end(of)


def module_list(names: Sequence[str]) -> str:
    """The line for the config: ``fp32_modules: ['a', 'b.c']``."""
    return f"fp32_modules: [{', '.join(map(repr, names))}]"


def _end(of: Outcome) -> str:
    if of.error is not None:
        return f" It ended with an error after {of.last}: {_short(of.error)}"
    if not of.is_over:
        return f" There is no end after {of.last}: it was killed, or is still going."
    return ""


def _short(error: str) -> str:
    """Its first sentence."""
    end = error.find(". ")
    text = error if end < 0 else error[: end + 1]
    text = text if len(text) <= LONGEST_ERROR else f"{text[:LONGEST_ERROR]}..."
    return text if text.endswith((".", "!", "?")) else f"{text}."


def _stuck(of: Outcome) -> str:
    what, remedy = _cause(of)
    if of.trained_until:
        begin = f"Did not train past {of.trained_until}: every window since ({of.streak:,}) {what}"
    elif of.windows == 1:
        begin = f"Nothing was trained: the only window {what}"
    else:
        begin = f"Nothing was trained: all {of.windows:,} windows {what}"
    healed = f" Healed before: {module_list(of.healed)}." if of.healed else ""
    return f"{begin}; {remedy}.{healed}"


def _cause(of: Outcome) -> tuple[str, str]:
    """What the windows of the streak did, and what helps."""
    if of.error is not None and BROKEN in of.error:
        return f"overflowed: {BROKEN}", "load the last good checkpoint"
    first = of.firsts[-1] if of.firsts else None
    searches = of.scale >= 1 and of.streak == of.windows < STUCK
    if first is not None and not (searches and first["where"] in ("backward", "parameter")):
        return told(first)
    name, count = of.origins.most_common(1)[0] if of.origins else ("", 0)
    if name == THE_LOSS:
        return (
            "had a loss of inf or NaN",
            "a smaller scale does not help: look at the data of these batches, and run with "
            "find_overflow='replay' to see whether the forward makes it",
        )
    if searches:
        return (
            f"overflowed while the scale was searched for, down to {of.scale:.10g}",
            f"go on, or begin there: init_scale={of.scale:.10g}",
        )
    module = name.rpartition(".")[0]
    if module and 2 * count > of.streak:
        return (
            f"overflowed, first in {name}",
            f"keep its module in float32: {module_list([module])}",
        )
    return "overflowed", "run with find_overflow='replay' to see in which module it begins"


def told(first: dict[str, Any]) -> tuple[str, str]:
    """What windows did and what helps, by what the overflow finder saw (``Record.first``)."""
    where, module, cls = first["where"], first["module"], first["class"]
    named = f"{module} ({cls})" if module else f"the model itself ({cls})"
    in_float32 = "compute that in float32"
    if module:
        in_float32 = f"keep it in float32: {module_list([module])}"
    if where == "loss":
        return "overflowed in the loss, outside of the model", "compute it in float32"
    if where == "forward":
        given = first.get("input") or ()
        if not all(math.isfinite(float(each)) for each in given):  # before a file, inf is a text
            return f"got inf or NaN as the input of {named}", "look at the data of these batches"
        return f"overflowed in the forward of {named}", in_float32
    if where == "parameter":
        return f"overflowed in a parameter's gradient of {named}", in_float32
    if not module:
        return "overflowed in the backward of the loss", "compute the loss in float32"
    return f"overflowed in the backward of {named}", in_float32


def _trained(of: Outcome) -> str:
    counts = f"{of.windows:,} window{'s' * (of.windows != 1)}"
    if not of.scaled:
        finite = ", every gradient norm finite" if of.norms and not of.stepped_bad else ""
        counts = f"{counts} without loss scaling{finite}"
    elif not of.skips:
        counts += ", none skipped"
    else:
        when = "" if of.healed else _when(of)  # what was healed is why, whenever that was
        counts += f", {of.skips:,} skipped ({percent(of.skips, of.windows)}){when}"
    but = []
    if of.stepped_bad:
        but.append(
            "the gradient norm was inf or NaN in windows that stepped all the same, first at "
            f"{of.stepped_bad}, so load a checkpoint before it"
        )
    if of.loss_windows:
        but.append(f"the loss itself was inf or NaN in {counted(of.loss_windows, 'window')}")
    if of.low:
        but.append(of.low)
    problems = f", but {'; '.join(but)}" if but else ""
    trained, other = of.windows - of.skips, of.skips - of.search_skips - of.growth_skips
    if of.healed:
        many = counted(len(of.healed), "module")
        begin = f"Trained with {many} healed" if trained else f"Nothing trained yet, {many} healed"
        return (
            f"{begin}{problems}: put `{module_list(of.healed)}` into the config. "
            f"{counts[0].upper()}{counts[1:]}."
        )
    if other > MANY_SKIPPED * of.windows:
        part = f"Trained in {trained:,} of {of.windows:,} windows only"
        causes = Counter(told(first) for first in of.all_firsts)
        cause = ""
        if causes:
            (what, remedy), _ = causes.most_common(1)[0]
            cause = f": most often it {what}; {remedy}"
        share = percent(of.skips, of.windows)
        return f"{part}{problems}{cause}. {of.skips:,} were skipped ({share}){_when(of)}."
    return f"Trained{problems}: {counts}."


def _when(of: Outcome) -> str:
    """Whether the skips are those that belong to every run."""
    other = of.skips - of.search_skips - of.growth_skips
    kinds = ["while the scale settled"] * (of.search_skips > 0)
    kinds += ["after it had grown"] * (of.growth_skips > 0)
    if not other:
        return f", all {' or '.join(kinds)}".replace("all after it", "all after the scale")
    part = "all" if other == of.skips else f"{other:,} of them"
    return f", {part} in the middle of training"
