"""Why windows were skipped: the scale was searched for, it had grown, or something else."""

from __future__ import annotations

import math

from .record import Record

SETTLED = 20
"""So many windows in a row without a skip: the first search for a scale is over."""

SEARCH_WINDOWS = 200
"""A search that is not over by then was none: the run kept overflowing."""

MOST_IN_A_ROW = 2
"""Skips that too large a scale explains: two halvings are within what batches differ by."""


class SkipKinds:
    """Counts skips by their kind, from the windows in order.

    ``growth``: at a scale above one that the run was well at and grew from, at most two in a row.
    It goes as high as it can, and batches differ: nothing is lost there.
    """

    def __init__(self) -> None:
        self.search = self.growth = self.other = 0
        self.begin()

    def begin(self) -> None:
        """A new session: the scale is searched for again."""
        self.streak = self._good = self._windows = self._skips = 0
        self._searching, self._well = True, math.inf

    def add(self, record: Record) -> bool | None:
        """One window.

        Returns whether the search ended with it: True, a scale that lasted was found; False, there
        is none. None: it goes on, or was over before.
        """
        self._windows += 1
        if record.skipped:
            self._good, self.streak = 0, self.streak + 1
            self._skips += 1
            self.search += self._searching
            grown = record.scale > self._well and self.streak <= MOST_IN_A_ROW
            self.growth += grown and not self._searching
            self.other += not grown and not self._searching
        else:
            self._good, self.streak = self._good + 1, 0
        ended = None
        if record.healed:  # the scale goes back to where it was, and may be too high once more
            ended = self._settle(True)
            self.begin()
            return ended
        if record.next_scale > record.scale:
            ended, self._well = self._settle(True), min(self._well, record.scale)
        if self._good >= SETTLED:
            return self._settle(True) or ended
        if self._windows >= SEARCH_WINDOWS:
            return self._settle(False) if ended is None else ended
        return ended

    def finish(self) -> bool | None:
        """No more windows of this session; as :meth:`add`."""
        return self._settle(self._good * 2 >= self._windows) if self._windows else None

    def _settle(self, found: bool) -> bool | None:
        if not self._searching:
            return None
        self._searching = False
        if not found:
            self.search -= self._skips
            self.other += self._skips
        return found
