"""Several runs side by side: what differs between the first and each of the others."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass

from ..console import number, percent, written
from .run_summary import Run
from .samples import Bin, Mean

APART = 0.01
"""Of the larger of two mean losses: less is the noise of any two runs."""
SMOOTH = 20
"""Windows that a loss is the mean of where runs are compared."""
END_SHARE = 0.1
"""Of the windows that all runs have: the end of these."""
CIRCUMSTANCES = (
    *("precision", "device", "device_name", "ranks"),
    *("package", "python", "torch", "accelerate", "transformers"),
)
MOST_RATES = 4
"""Learning rates of a run's groups that are told."""
ABSENT = "-"


@dataclass(frozen=True, slots=True)
class Difference:
    """One line of the comparison."""

    name: str
    values: tuple[str, ...]
    """Of each run, in their order."""
    notes: tuple[str, ...] = ()
    """A sentence on the second run and each after it, against the first; may be empty."""


def differences(runs: Sequence[Run]) -> list[Difference]:
    """What differs, learning rates and settings first; then what came of it, also if it is alike.

    Of settings and versions those of each run's last session. Losses are compared window by window
    as far as all runs have them: a longer run is not better for its length.

    Args:
        runs: two or more; each is compared with the first.
    """
    if not all(run.sessions for run in runs):
        return []
    told = [*_rates(runs), *_settings(runs), *_circumstances(runs)]
    if not all(run.windows for run in runs):
        return told
    common = _Common(runs)
    told += [
        Difference("windows", tuple(str(run.windows) for run in runs)),
        *_losses(runs, common),
        Difference(
            "skipped",
            tuple(f"{run.skips} ({percent(run.skips, run.windows)})" for run in runs),
            common.notes(_skipped_alike, "the same windows were skipped"),
        ),
        Difference(
            "scale at last",
            tuple(number(run.last_scale) if run.is_scaled else ABSENT for run in runs),
            common.notes(_scaled_alike, "the same scale"),
        ),
    ]
    told += _measured(
        "windows a second",
        [run.windows_per_second for run in runs],
        lambda value: f"{value:.3g}",
        lambda mine, first: f"{mine / first:.2f} of the first",
    )
    told += _measured(
        "hidden of the update",
        [run.hidden_share for run in runs],
        lambda value: percent(value, 1),
    )
    return told


def in_rows(runs: Sequence[Run]) -> list[str]:
    """The comparison as plain text: a line each, and its notes below."""
    labels = [run.label for run in runs]
    found = differences(runs)
    rows = [("", *labels), *((each.name, *each.values) for each in found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [" against ".join((labels[0], ", ".join(labels[1:])))]
    lines.append("=" * min(len(lines[0]), 80))
    for row, each in zip(rows, [None, *found], strict=True):
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        lines.append("  ".join(cells).rstrip())
        for label, note in zip(labels[1:], () if each is None else each.notes, strict=False):
            if note:
                lines.append(" " * (widths[0] + 2) + (f"{label}: " if len(runs) > 2 else "") + note)
    return lines


def _rates(runs: Sequence[Run]) -> list[Difference]:
    """One line where a rate, or the way that it went, is not that of the first run."""
    told = [_rates_told(run) for run in runs]
    return _unlike(["learning rate"], [{"learning rate": each} if each else {} for each in told])


def _rates_told(run: Run) -> str:
    """Of each group, those that are alike once; empty: none was recorded."""
    groups: dict[str, None] = {}
    for group in range(max((len(b.lr) for b in run.bins.done), default=0)):
        rates = [b.lr[group] for b in run.bins.done if group < len(b.lr)]
        there = [rate for rate in rates if rate is not None]
        if not there:
            continue
        high, last = max(there), there[-1]
        ends = "" if min(there) == high else f" at most, {last:.4g} at last"
        groups[f"{high:.4g}{ends}"] = None
    more = f"; {len(groups) - MOST_RATES} more" if len(groups) > MOST_RATES else ""
    return "; ".join([*groups][:MOST_RATES]) + more


def _settings(runs: Sequence[Run]) -> list[Difference]:
    of = [run.sessions[-1].settings if run.sessions else {} for run in runs]
    names = dict.fromkeys(name for each in of for name in each if name != "telemetry")
    return _unlike(names, [{k: written(v) for k, v in each.items()} for each in of])


def _circumstances(runs: Sequence[Run]) -> list[Difference]:
    of = [run.sessions[-1].facts if run.sessions else {} for run in runs]
    return _unlike(CIRCUMSTANCES, [{k: written(v) for k, v in each.items()} for each in of])


def _unlike(names: Sequence[str] | dict[str, None], of: list[dict[str, str]]) -> list[Difference]:
    rows = ((name, tuple(each.get(name, ABSENT) for each in of)) for name in names)
    return [Difference(name, values) for name, values in rows if len(set(values)) > 1]


def _measured(
    name: str,
    values: Sequence[float | None],
    show: Callable[[float], str],
    against: Callable[[float, float], str] | None = None,
) -> list[Difference]:
    """A row, where some run has such a number."""
    if all(value is None for value in values):
        return []
    first, notes = values[0], []
    for value in values[1:]:
        is_known = against is not None and first and value is not None
        notes.append(against(value, first) if is_known else "")  # type: ignore[arg-type,misc]
    shown = tuple(ABSENT if value is None else show(value) for value in values)
    return [Difference(name, shown, tuple(notes))]


class _Common:
    """The windows that all runs have, in bins as wide as the widest of theirs."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self.runs = runs
        width = max(run.bins.width for run in runs)
        grids = [_grid(run, width) for run in runs]
        places = [
            place
            for place, bin_ in sorted(grids[0].items())
            if all(place in grid and grid[place].windows == bin_.windows for grid in grids)
        ]  # where one run ends within a bin, means of unlike windows are not compared
        self.width = width
        self.of = [[grid[place] for place in places] for grid in grids]
        """Of each run."""

    def notes(self, are_alike: Callable[[Bin, Bin], bool], what: str) -> tuple[str, ...]:
        """Of each run after the first: alike everywhere, or up to where."""
        return tuple(self._note(other, are_alike, what) for other in self.of[1:])

    def _note(self, other: list[Bin], are_alike: Callable[[Bin, Bin], bool], what: str) -> str:
        for mine, first in zip(other, self.of[0], strict=True):
            if not are_alike(mine, first):
                return f"{what} up to {self.before(first)}" if first.x else ""
        return f"{what} in all {self.windows} common windows" if other else ""

    @property
    def windows(self) -> int:
        return sum(b.windows for b in self.of[0])

    def before(self, at: Bin) -> str:
        return self.runs[0].place(at.x - 1)


def _grid(run: Run, width: int) -> dict[int, Bin]:
    found: dict[int, Bin] = {}
    for each in run.bins.done:
        place = each.x // width
        if place in found:
            found[place].merge(each)
        else:
            found[place] = deepcopy(each)
    return found


def _skipped_alike(one: Bin, other: Bin) -> bool:
    return one.skips == other.skips


def _scaled_alike(one: Bin, other: Bin) -> bool:
    return (one.scale, one.scale_low, one.scale_high) == (
        *(other.scale, other.scale_low, other.scale_high),
    )


def _lost_alike(one: Bin, other: Bin) -> bool:
    mine, theirs = one.loss, other.loss
    if (mine.count, mine.bad, mine.low, mine.high) != (
        *(theirs.count, theirs.bad, theirs.low, theirs.high),
    ):
        return False
    return math.isclose(mine.total, theirs.total, rel_tol=1e-12)  # added up in another order


def _losses(runs: Sequence[Run], common: _Common) -> list[Difference]:
    """The loss at the end of what all runs have, and where they part."""
    if any(run.last_loss is None for run in runs) or not common.of[0]:
        return []
    ends = [_mean(_last_tenth(bins)) for bins in common.of]
    notes = []
    for bins, alike in zip(common.of[1:], common.notes(_lost_alike, "equal"), strict=True):
        notes.append("; ".join(filter(None, (alike, _parting(bins, common)))))
    run, (first, last) = common.runs[0], (_last_tenth(common.of[0])[at] for at in (0, -1))
    span = run.place(last.last_x)
    if last.last_x > first.x:
        span = f"{run.place(first.x)} to {span}"
    shown = tuple("inf or NaN" if end is None else f"{end:.5g}" for end in ends)
    return [Difference(f"mean loss, {span}", shown, tuple(notes))]


def _last_tenth(bins: Sequence[Bin]) -> Sequence[Bin]:
    return bins[-max(1, round(END_SHARE * len(bins))) :]


def _parting(other: Sequence[Bin], common: _Common) -> str:
    """From where on the mean losses stay apart."""
    first = common.of[0]
    behind = max(1, SMOOTH // common.width)
    parted: Bin | None = None
    for end in range(1, len(first) + 1):
        mine, theirs = (_mean(bins[max(0, end - behind) : end]) for bins in (other, first))
        if mine is None or theirs is None:
            is_apart = (mine is None) != (theirs is None)
        else:
            is_apart = abs(mine - theirs) > APART * max(abs(mine), abs(theirs))
        if not is_apart:
            parted = None
        elif parted is None:
            parted = first[end - 1]
    over = f"{percent(APART, 1)} (means of {max(SMOOTH, common.width)} windows)"
    if parted is None:
        return f"within {over} at the end" if not _all_alike(other, first) else ""
    return f"apart by more than {over} from {common.runs[0].place(parted.x)} on"


def _mean(bins: Sequence[Bin]) -> float | None:
    mean = Mean()
    for each in bins:
        mean.merge(each.loss)
    return mean.middle


def _all_alike(one: Sequence[Bin], other: Sequence[Bin]) -> bool:
    return all(_lost_alike(*pair) for pair in zip(one, other, strict=True))
