"""The findings of a diagnosis, each with a remedy, and the verdict.

Each finding has one function, so that the live history, the verdict and the report agree. No
finding about an overflow advises to clip, since a clip comes after the backward.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

from ..console import counted, number, percent, written
from .diagnosis import MANY_SKIPPED, Diagnosis, Span

Level = Literal["bad", "warn", "note", "good"]
KEEPS = "keeps in float32 what overflows at any scale"
REPEATED, MANY = 3, 6
"""The numbers of overflows at good scales that make a finding, and a bad finding."""


@dataclass(frozen=True, slots=True)
class Finding:
    level: Level
    title: str
    text: str = ""
    """The place to look at, and the remedy."""


def diagnose(run: Diagnosis, *more: Finding | None) -> list[Finding]:
    """All findings about a run, and the findings in ``more``: bad ones first."""
    rules = (streak, mistakes, healed, loss, rise, overflow, skips)
    found = (*more, *(rule(run) for rule in rules))
    return sorted(filter(None, found), key=lambda finding: get_args(Level).index(finding.level))


def verdict(run: Diagnosis, is_file: bool = False) -> str:
    """A few sentences: how many windows stepped, the loss where it is known, a problem and its
    remedy; for a file also how the run ended."""
    counts, found = skips(run), diagnose(run)
    is_partly = run.kind == "partly"
    problem = next((f for f in found if f.level == "bad" or (is_partly and f != counts)), None)
    last_good = run.place(max(run.last_x - run.streak, 0)) if run.sessions else ""
    head = {
        "untrained": "Nothing was trained",
        "stuck": f"Did not train past {last_good}",
        "diverged": "Diverged",
        "partly": "Stepped in part",
        "stepped": "" if problem is None else "With a problem",
    }[run.kind]
    sentences = [f"{head}: {counts.title[:1].lower()}{counts.title[1:]}" if head else counts.title]
    if run.skips < run.windows and (last := run.sessions[-1]).first_losses:
        ends = last.first_losses[0], last.lowest_loss, last.last_losses[-1]
        which = " of the last session" * (len(run.sessions) > 1)
        sentences.append("Loss{}: first {}, lowest {}, last {}.".format(which, *map(number, ends)))
    for finding in (problem, healed(run)):
        if finding is not None:
            sentences.append(f"{finding.title} {finding.text}".rstrip())
    end = ending(run) if is_file else None
    return " ".join(sentences if end is None else [*sentences, end.title])


def is_well(run: Diagnosis) -> bool:
    """Whether there is nothing to be done, and nobody needs to read the verdict."""
    is_bad = any(finding.level == "bad" for finding in diagnose(run))
    return run.kind == "stepped" and not (run.healed or is_bad)


def ending(run: Diagnosis) -> Finding | None:
    """How the last session of a file ended; None for a proper end."""
    if not run.sessions:
        return None
    session, at = run.sessions[-1], "before its first step ended"
    if session.last_step >= 0:
        at = f"after {run.place(session.first_x + session.last_step)}"
    if session.error is not None:
        text = session.error[:200] + "..." * (len(session.error) > 200)
        return Finding("bad", f"The run ended with an error {at}: {text.removesuffix('.')}.")
    if session.ended:
        return None
    return Finding(
        "warn",
        f"The run has no end line: it stopped {at} or was killed, or still trains.",
        "Look at the last lines of its output, and the machine's log (out of memory?).",
    )


def streak(run: Diagnosis) -> Finding | None:
    """All windows were skipped, or all at the end."""
    is_nothing = run.windows == run.skips > 0 and not run.healed
    if not run.is_stuck and not is_nothing:
        return None
    which = "All steps" if run.windows == run.streak else f"The last {run.streak:,} steps"
    if _is_search(run):
        scale = number(run.last_scale)
        title = f"{which} overflowed while the scale was searched for, down to {scale}."
        return Finding("bad", title, cause_of_skips(run))
    return Finding("bad", f"{which} were skipped.", cause_of_skips(run))


def cause_of_skips(run: Diagnosis) -> str:
    """Where the skips at the end of a run begin, and the remedy."""
    if _is_search(run):
        return f"Train for longer, or begin there: {as_set('init_scale', run.last_scale)}."
    if run.last_kind == "spike":
        given = run.settings.get("skip_norm_above")
        return (
            f"The gradient norm is above skip_norm_above={given!r}. Look at the data of these "
            "steps, or raise it; 4x is four times the running median."
        )
    return _cause(run, run.last_x - run.streak)


def _is_search(run: Diagnosis) -> bool:
    """Whether all windows were skipped in search of a scale. A module that made a NaN would make it
    at any scale, so then it was no search."""
    first = run.first[1] if run.first else {}
    seen = (*(first.get("input") or ()), *(first.get("output") or ()))
    has_nan = any(math.isnan(float(each)) for each in seen)  # in a live record it is a text
    return run.streak == run.windows == run.kinds["search"] and not has_nan


def _cause(run: Diagnosis, before: int) -> str:
    """Where overflows began, and the remedy. ``before``: the window before the first overflow."""
    if run.first is None or run.first[0] <= before:
        return _unknown_cause(run)
    x, first = run.first
    where, module = f"{run.place(x).capitalize()}: {first['text'].rstrip('.')}.", first["module"]
    given = first["input"] or ()  # in a live record inf is a text
    if first["where"] == "forward" and not all(math.isfinite(float(each)) for each in given):
        return f"{where} Look at the data of these batches."
    if any(module == each or module.startswith(f"{each}.") for each in run.healed):
        return f"{where} heal keeps it in float32."
    rate = " A lower learning rate may help, too." * (run.skips < run.windows)
    if not (run.is_scaled and module):  # heal finds modules
        helps = "Compute it in float32, and look at" if run.is_scaled else "Look at"
        data = "its input" if module else "the data of these batches"
        return f"{where} {helps} {data}.{rate}"
    if run.settings.get("heal"):  # heal has tried the module by name
        helps = "heal has found no cure, as the log says. Train in bfloat16 or float32"
        return f"{where} {helps}.{rate}"
    names = in_float32(run)
    is_named = any(fnmatchcase(module, each) for name in names for each in (name, f"{name}.*"))
    by_name = "" if is_named else as_set("fp32_modules", [*names, module])
    helps = f"Next: {as_set('heal', True)}, which {KEEPS}"
    return f"{where} {helps}{'; or, by name, ' * bool(by_name)}{by_name}.{rate}"


def _unknown_cause(run: Diagnosis) -> str:
    seen = f"Last seen in: {', '.join(run.overflowed)}. " if run.overflowed else ""
    text = "Look at the data of these batches. " if run.bad.count else seen
    heals = run.is_scaled and run.settings.get("find_overflow") != "off"  # heal refuses that
    name, value = ("heal", True) if heals else ("find_overflow", "replay")
    if run.settings.get(name) == value:
        return text.rstrip()
    text += f"Next: {as_set(name, value)}, which names where it begins"
    return text + (f", and {KEEPS}." if heals else ".")


def in_float32(run: Diagnosis) -> list[str]:
    """The ``fp32_modules`` in force: names of the settings, and healed modules."""
    return list(dict.fromkeys((*run.settings.get("fp32_modules", ()), *run.healed)))


def as_set(name: str, value: Any) -> str:
    """A setting in code and, behind it, as a flag of ``accel-scaler launch``."""
    text = ",".join(value) if isinstance(value, list) else written(value)
    flag = f"--{name}" if value is True else f"--{name} {shlex.quote(text)}"
    return f"{name}={value!r} ({flag})"


def mistakes(run: Diagnosis) -> Finding | None:
    """The mistakes of the script, in the words of the log."""
    return Finding("bad", " ".join(run.mistakes)) if run.mistakes else None


def healed(run: Diagnosis) -> Finding | None:
    if not run.healed:
        return None
    each = ", ".join(f"{name} (from {run.place(x)} on)" for name, x in run.healed.items())
    title = f"heal has put {counted(len(run.healed), 'module')} in float32: {each}."
    setting = as_set("fp32_modules", in_float32(run))
    return Finding("note", title, f"To start that way next time, pass {setting}.")


def loss(run: Diagnosis) -> Finding | None:
    """The loss, the forward, or the norm of a step was inf or NaN."""
    if not run.bad.count:
        return None
    if run.is_scaled or not run.bad_steps.count:
        title = f"The forward or the loss was inf or NaN in {_windows_of(run, run.bad)}."
        title += " No scale helps." * run.is_scaled
        return Finding("bad", title, _cause(run, run.bad.first_x - 1))
    title = f"The loss or the gradient norm was inf or NaN in {_windows_of(run, run.bad_steps)}."
    return Finding("bad", title, "Each step was taken. Resume from a checkpoint before them.")


def rise(run: Diagnosis) -> Finding | None:
    if run.skips == run.windows or not run.sessions[-1].has_risen:
        return None
    text = "A lower learning rate or a longer warm-up may help. Resume from a checkpoint before it."
    return Finding("bad", "The loss rose far above its first values.", text)


def _windows_of(run: Diagnosis, span: Span) -> str:
    """``3 windows (step 4 to step 9)``."""
    last = f" to {run.place(span.last_x)}" if span.count > 1 else ""
    return f"{counted(span.count, 'step')} ({run.place(span.first_x)}{last})"


def overflow(run: Diagnosis) -> Finding | None:
    """Overflows in the middle of training, and how far the scale fell."""
    if not run.is_scaled and run.others.count:
        windows = _windows_of(run, run.others)
        title = f"Gradients were inf or NaN in {windows}, and no step was taken there."
        return Finding("warn", title, _cause(run, run.others.first_x - 1))
    if not run.is_scaled or run.lowest is None:
        return None
    (low, x), floor, count = run.lowest, run.floor, run.others.count
    is_low = run.skips > 0 and low <= max(1.0, floor)
    if not is_low and count < REPEATED:
        return None
    level: Level = "bad" if is_low or count >= MANY else "warn"
    at = f"its floor, min_scale = {number(floor)}" if low <= floor else number(low)
    windows = f", in {_windows_of(run, run.others)} of the middle of training" if count else ""
    title = f"Gradients overflowed, and the scale fell to {at} ({run.place(x)}){windows}."
    cause = "" if streak(run) else _cause(run, run.others.first_x - 1)
    return Finding(level, title, cause)


def skips(run: Diagnosis) -> Finding:
    """How many windows were skipped, and when: the finding that every run has."""
    if not run.windows:
        return Finding("note", "There were no steps.")
    counts, again = f"{run.windows:,} step{'s' * (run.windows != 1)}", ""
    if run.retried:
        again = f" {counted(run.retried, 'step')} overflowed and ran again; batches lost: "
        again += f"{run.skips:,}."
    if not run.skips:
        return Finding("note" if run.bad.count else "good", f"{counts}, none skipped.{again}")
    later = run.skips - run.kinds["search"]
    when = {
        "while the scale was still being searched for": run.kinds["search"],
        "after the scale had grown": run.kinds["growth"],
        "with inf or NaN in the forward": run.kinds["forward"],
        "in the middle of training": run.kinds["other"],
        "as spikes of the gradient norm": run.kinds["spike"],
    }
    parts = ", ".join(f"{count:,} {name}" for name, count in when.items() if count)
    title = f"{counts}, {run.skips:,} skipped ({percent(run.skips, run.windows)}): {parts}.{again}"
    if later > MANY_SKIPPED * run.windows:
        lost = "After the search " * run.is_scaled + percent(later, run.windows)
        return Finding("warn", title, f"{lost} of the steps trained nothing.")
    is_odd = later > run.kinds["growth"] or run.skips == run.windows or overflow(run)
    return Finding("note" if is_odd else "good", title)
