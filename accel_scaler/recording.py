"""What goes on record when a window closes."""

from __future__ import annotations

import logging
from collections.abc import Iterable

from .notes import Note
from .scaler import GradScaler
from .telemetry import History, Record
from .windows import Window

__all__ = ["record"]

logger = logging.getLogger("accel_scaler")


def record(
    scaler: GradScaler,
    history: History,
    window: Window,
    scale: float,
    notes: Iterable[Note],
    last: Note,
) -> None:
    """Add the window, or what one more optimizer (``last``) did in it, to ``history``."""
    scaler.culprits.count(last.names)
    names = dict.fromkeys(name for note in notes for name in note.names)
    if scaler.get_scale() < 1.0 and not history.told_low:
        history.told_low = True
        logger.warning(
            "the loss scale fell below 1, so gradients overflow whatever it is. Last seen in: "
            f"{', '.join(names) or 'no single tensor'}. min_scale keeps it up, "
            "max_consecutive_skips ends such a run. (Said once.)"
        )
    history.add(
        Record(
            index=window.index,
            scale=scale,
            next_scale=scaler.get_scale(),
            skipped=window.found_inf,
            grad_norm=None if last.norm is None else float(last.norm),
            overflowed=tuple(names),
        )
    )
