"""When what the model is shown of late updates is too far off, and who is told."""

from __future__ import annotations

import logging
from collections import deque

from .record import Record

logger = logging.getLogger("accel_scaler")

TOO_FAR = 0.75
"""Of a mean of ``Record.preview_error``: more than what was seen to do no harm, which is 0.57 (see
docs/one-step-late.md); with no preview at all it is 1."""

RECENT = 20
"""Windows with a late update that the mean is of: one alone says little."""

REMEDY = (
    "Try delay_compensation='none', a lower learning rate or a warm-up "
    "(delay_warmup_steps) while updates are large; step_mode='overlap' shows exact ones."
)


class RecentErrors:
    """The mean error of the last previews."""

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=RECENT)

    def add(self, error: float) -> float | None:
        """The mean, with this one; None: of too few as yet."""
        self._last.append(error)
        return sum(self._last) / RECENT if len(self._last) == RECENT else None


class PreviewWatch:
    """Warns, once, where previews do harm."""

    def __init__(self) -> None:
        self._recent: RecentErrors | None = RecentErrors()

    def add(self, record: Record) -> None:
        """One window, with all that is known of it."""
        error = record.preview_error
        if error is None or self._recent is None:
            return
        mean = self._recent.add(error)
        if mean is not None and mean > TOO_FAR:
            self._recent = None
            logger.warning(
                "window %d: what the model was shown of late updates (step_mode='delayed') was off "
                "by %.3g times the update itself on average in the last %d; without any preview it "
                "would be 1. %s (Said once.)",
                record.index,
                mean,
                RECENT,
                REMEDY,
            )
