"""What became of a run, in one word and in sentences: did it train, what stopped it, the cure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from ..console import counted, percent
from ..errors import BROKEN

STUCK = 20
"""Skips in a row at the end of a run: it did not train any more. The search for a scale takes 16
from the usual 65536 to 1."""

FAILING = 5
"""So many suffice where all of them had inf or NaN in the forward, which no other scale mends."""

MANY_SKIPPED = 0.1
"""Of all windows, neither while the scale settled nor after it had grown: it trained in part."""

Kind = Literal["untrained", "stuck", "diverged", "partly", "trained"]
"""``untrained``: no parameter can have moved. ``stuck``: it skipped every window at the end.
``diverged``: the loss ran away, or is inf or NaN now. ``partly``: many windows were skipped, which
belongs to no ordinary run."""

LONGEST_ERROR = 200
"""Letters of it: the whole of it stands below."""

THE_LOSS = "the loss"
"""Where an overflow began that is of no parameter."""


@dataclass(slots=True)
class Outcome:
    """What :func:`verdict` is made from, as far as it is known."""

    windows: int = 0
    skips: int = 0
    forward_skips: int = 0
    """Of these, by their kind, as in ``SkipKinds``."""
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
    has_moved: bool = True
    """A window has stepped with a learning rate other than 0."""
    rise: tuple[float, float] | None = None
    """The loss ran away, from here to there."""
    bad_at_end: int = 0
    """Windows up to the last one with inf or NaN in the forward, or in the norm of a step."""
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

    @property
    def other_skips(self) -> int:
        """In the middle of training, though the forward was finite."""
        return self.skips - self.forward_skips - self.search_skips - self.growth_skips

    @property
    def is_stuck(self) -> bool:
        """So many skips at the end that it trained no more, or one that ended it."""
        failing = min(self.streak, self.bad_at_end) >= FAILING
        ended = self.error is not None and self.error.startswith("OverflowStreakError")
        return self.streak >= STUCK or failing or (self.streak > 0 and ended)

    @property
    def kind(self) -> Kind:
        """In one word."""
        if self.skips == self.windows or not self.has_moved:
            return "untrained"
        if self.is_stuck:
            return "stuck"
        if self.rise is not None or (self.bad_at_end and not self.streak):
            return "diverged"
        if self.other_skips + self.forward_skips > MANY_SKIPPED * self.windows and not self.healed:
            return "partly"
        return "trained"


def verdict(of: Outcome) -> str:
    """The sentences."""
    if not of.windows:
        text = "Nothing was trained: no window closed"
        if of.error is not None:
            return f"{text} before it ended with an error: {_short(of.error)}"
        return f"{text}." if of.is_over else f"{text} before it was killed, or it has just begun."
    if of.kind == "untrained" and of.skips < of.windows:
        return f"{_unmoved(of)}. {_sentence(_counts(of))}{_end(of)}"
    if of.is_stuck or (of.skips == of.windows and not of.healed):
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
    if of.skips < of.windows:
        begin = f"Did not train past {of.trained_until}: every window since ({of.streak:,}) {what}"
    elif of.windows == 1:
        begin = f"Nothing was trained: the only window {what}"
    else:
        begin = f"Nothing was trained: all {of.windows:,} windows {what}"
    return f"{begin}; {remedy}.{_healed_before(of)}"


def _healed_before(of: Outcome) -> str:
    return f" Healed before: {module_list(of.healed)}." if of.healed else ""


def _cause(of: Outcome) -> tuple[str, str]:
    """What the windows of the streak did, and what helps."""
    if of.error is not None and BROKEN in of.error:
        return f"overflowed: {BROKEN}", "load the last good checkpoint"
    first = of.firsts[-1] if of.firsts else None
    searches = of.streak == of.windows == of.search_skips
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


def ran_away(rise: tuple[float, float]) -> str:
    """Of ``Outcome.rise``."""
    before, now = rise
    return f"the loss rose from {before:.4g} to {now:.4g} (medians of its first and last windows)"


def _counts(of: Outcome) -> str:
    counts = f"{of.windows:,} window{'s' * (of.windows != 1)}"
    if not of.scaled:
        finite = ", every gradient norm finite" if of.norms and not of.stepped_bad else ""
        return f"{counts} without loss scaling{finite}"
    if not of.skips:
        return f"{counts}, none skipped"
    when = "" if of.healed else _when(of)  # what was healed is why, whenever that was
    return f"{counts}, {of.skips:,} skipped ({percent(of.skips, of.windows)}){when}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _unmoved(of: Outcome) -> str:
    many = "the only window" if of.windows == 1 else "every window"
    stepped = f"{many} that stepped" if of.skips else many
    return (
        f"Nothing was trained: the learning rate was 0 in {stepped}; look at the learning rates of "
        "the optimizer and of its schedule"
    )


def _trained(of: Outcome) -> str:
    counts = _counts(of)
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
    if of.kind == "diverged":
        return _diverged(of, but)
    if of.healed:
        many = counted(len(of.healed), "module")
        has_trained = of.skips < of.windows
        begin = (
            f"Trained with {many} healed" if has_trained else f"Nothing trained yet, {many} healed"
        )
        begin += f"{problems}: put `{module_list(of.healed)}` into the config"
        return f"{begin}. {_sentence(counts)}"
    if of.kind == "partly":
        part = f"Trained in {of.windows - of.skips:,} of {of.windows:,} windows only"
        causes = Counter(told(first) for first in of.all_firsts)
        cause = ""
        if causes:
            (what, remedy), _ = causes.most_common(1)[0]
            cause = f": most often it {what}; {remedy}"
        share = percent(of.skips, of.windows)
        return f"{part}{problems}{cause}. {of.skips:,} were skipped ({share}){_when(of)}."
    return f"Trained{problems}: {counts}."


def _diverged(of: Outcome, besides: Sequence[str]) -> str:
    if of.rise is not None:
        what = ran_away(of.rise)
    else:
        last = "the last window" if of.bad_at_end == 1 else f"the last {of.bad_at_end:,} windows"
        what = f"inf or NaN in {last}"
    remedy = "" if of.stepped_bad else ". Load a checkpoint before it, and lower the learning rate"
    begin = f"Diverged: {'; '.join([what, *besides])}{remedy}"
    return f"{begin}. {_sentence(_counts(of))}{_healed_before(of)}"


def _when(of: Outcome) -> str:
    """Whether the skips are those that belong to every run."""
    kinds = {
        "while the scale settled": of.search_skips,
        "after the scale had grown": of.growth_skips,
        "with inf or NaN in the forward": of.forward_skips,
        "in the middle of training": of.other_skips,
    }
    told = [f"{count:,} {when}" for when, count in kinds.items() if count]
    if len(told) == 1:
        return f", all {told[0].partition(' ')[2]}"
    return f": {', '.join(told[:-1])} and {told[-1]}"
