"""Why windows were skipped: the scale settled, it had grown, the forward failed, or another way."""

from __future__ import annotations

import math
from typing import Literal

from .record import Record

SETTLED = 20
"""So many windows in a row without a back-off: the scale has settled."""

MOST_HALVINGS = 2
"""Skips that batches which differ explain, where the scale has been well before."""

SkipKind = Literal["forward", "search", "growth", "other"]


class SkipKinds:
    """Counts skips by their kind, from the windows in order: each is of the first that fits.

    ``forward``: the loss was inf or NaN, or the overflow began in the forward. The scale multiplies
    the loss afterwards, so that no other scale helps; such a skip says nothing about the scale.

    ``search``: the scale settles. A session begins with a scale that nobody has tried: the skips
    before its first window that went well are of the search, and two more after it, since batches
    differ. It is over once the scale has grown, has not backed off for 20 windows in a row, or was
    1 or less, which scales no more; a session that goes on from a checkpoint (its growth tracker
    does) has settled before. After a heal, which puts the scale back, it is searched for again. So
    a run whose every second window overflows is not settling beyond its third skip.

    ``growth``: at a scale above one that the run grew from, at most two in a row. It goes as high
    as it can, and batches differ: nothing is lost there.

    ``other``: all else.
    """

    def __init__(self) -> None:
        self.forward = self.search = self.growth = self.other = 0
        self.begin()

    def begin(self) -> None:
        """A new session: the scale is searched for again."""
        self.is_settling, self.streak = True, 0
        self._is_first, self._went_well = True, False
        self._later = self._steady = 0
        """Skips of the search behind a window that went well; windows since the last back-off."""
        self._well = math.inf
        """The lowest scale that the run grew from."""

    def add(self, record: Record) -> SkipKind | None:
        """One window; returns the kind of its skip, None where it was not skipped."""
        if self._steady >= SETTLED or (self._is_first and record.growth_tracker > 1):
            self.is_settling = False
        self._is_first = False
        kind = self._skip(record) if record.skipped else None
        if kind is None:
            self.streak, self._went_well = 0, True
        if record.next_scale < record.scale and kind != "forward":
            self._steady = 0
        else:
            self._steady += 1
        if record.next_scale > record.scale and not record.skipped:
            self.is_settling, self._well = False, min(self._well, record.scale)
        if record.healed:  # the scale goes back to where it was, and may be too high once more
            self.begin()
            self._is_first = False
        return kind

    def _skip(self, record: Record) -> SkipKind:
        self.streak += 1
        if failed_in_forward(record):
            self.forward += 1
            return "forward"
        if self.is_settling and self._went_well:
            self._later += 1
        if record.scale <= 1 or self._later > MOST_HALVINGS:
            self.is_settling = False
        if self.is_settling:
            self.search += 1
            return "search"
        if record.scale > self._well and self.streak <= MOST_HALVINGS:
            self.growth += 1
            return "growth"
        self.other += 1
        return "other"


def failed_in_forward(record: Record) -> bool:
    """inf or NaN was there before the scale multiplied the loss, as far as anybody looked."""
    first = record.first or {"where": ""}
    made = first.get("output") or ()
    return (
        record.has_bad_loss
        or first["where"] == "forward"
        or (first["where"] == "loss" and not all(math.isfinite(float(each)) for each in made))
    )
