"""Skipped windows in a row: their limit, and warnings that name the tensors."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable

from ..console import counted
from ..errors import OverflowStreakError, listed
from .parameter_names import MAX_NAMES

logger = logging.getLogger("accel_scaler")

WARNS_AT = 30
"""Without a limit: skips in a row before a warning; the next ones follow after 10 and 100 times as
many. The first search for a scale takes 16 skips from the usual 65536 down to 1."""


class SkipStreak:
    """The present run of skipped windows. ``limit`` windows in a row are allowed, with None any
    number. The count itself is part of the scaler's state."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.names: Counter[str] = Counter()
        """Windows of this run in which the gradient of a tensor was not finite, by its name."""
        self.origin = ""
        """One sentence on the place of the last overflow, from an observer that has found it."""
        self._warns_at = 0
        self._is_told = False
        """The first skip where nothing is scaled was logged."""
        self._forget()

    def wants_names(self, skips: int) -> bool:
        """Whether one more skip after ``skips`` others logs a warning or ends the run. Otherwise
        names are not worth another read of every gradient."""
        return skips + 1 >= self._warns_at or (self.limit is not None and skips >= self.limit)

    def check(
        self, skips: int, get_scale: Callable[[], float] | None, cause: Callable[[], str] = str
    ) -> None:
        """Log a warning after a long run, and after the first skip where nothing is scaled, which
        is no search for a scale. Raise ``OverflowStreakError`` over the limit.

        Args:
            skips: skipped windows in a row; 0 where the last one was not skipped.
            get_scale: returns the present loss scale; None where nothing is scaled.
            cause: returns a text on the place of the overflows and the cure; "" if not known.
        """
        limit = self.limit
        if skips == 0:
            self._forget()
        elif limit is not None and skips > limit:
            text = f"{skips} steps in a row were skipped, max_consecutive_skips={limit} allows "
            text += f"{limit}. {self._describe(get_scale, cause)}"
            self._forget()
            raise OverflowStreakError(text)
        elif skips >= self._warns_at:
            self._warns_at = 10 * skips
            end = f"the run ends after {limit}" if limit is not None else "the run goes on"
            text = "%s skipped in a row; %s (max_consecutive_skips=%s). %s"
            logger.warning(
                text, counted(skips, "step"), end, limit, self._describe(get_scale, cause)
            )
        elif get_scale is None and not self._is_told:
            self._is_told = True
            text = "a step was skipped, as step_was_skipped says (logged once). %s"
            logger.warning(text, self._describe(get_scale, cause))

    def _describe(self, get_scale: Callable[[], float] | None, cause: Callable[[], str]) -> str:
        names = [] if self.origin else [name for name, _ in self.names.most_common()]
        tensors = listed(names[:MAX_NAMES], len(names))
        seen = f"Non-finite gradients in: {tensors}. " if names else ""
        scale = "" if get_scale is None else f"The scale is now {get_scale():g}. "
        origin = f"{self.origin}. " if self.origin else ""
        why = cause() or f"{origin}Look at the data and the loss of these steps."
        return f"{seen}{scale}Parameters are as before the run of skips. {why}"

    def _forget(self) -> None:
        self.names.clear()
        self.origin = ""
        self._warns_at = WARNS_AT if self.limit is None else max(1, self.limit // 3)
