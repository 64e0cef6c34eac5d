"""What a tracker is to be alerted of, each once: modules healed, skips in a row, the floor."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

from ..console import counted
from .outcome import module_list
from .record import Record

USUAL_FLOOR = 1.0
"""Below it a scale makes gradients smaller than they are."""

AGAIN = 10
"""Times as many skips in a row are told of again."""


class Cause(IntEnum):
    """Why; the number is that of ``scaler/alert``, where a tracker has no alerts."""

    HEALED = 1
    """Modules run in float32 from now on."""
    STREAK = 2
    """Many windows in a row were skipped."""
    FLOOR = 3
    """The scale cannot fall, or it helps no more that it does."""
    ENDED = 4
    """``max_consecutive_skips`` ended the run."""

    @property
    def level(self) -> str:
        """``"INFO"``, ``"WARN"`` or ``"ERROR"``."""
        return {Cause.HEALED: "INFO", Cause.ENDED: "ERROR"}.get(self, "WARN")


@dataclass(frozen=True, slots=True)
class Alert:
    """One message."""

    cause: Cause
    title: str
    """Fewer than 64 letters, as trackers want it."""
    text: str


class Alarms:
    """Decides what is worth an alert.

    Args:
        min_scale: the scale's floor, if it has one.
    """

    def __init__(self, min_scale: float | None) -> None:
        self._min_scale = min_scale
        self._healed: set[str] = set()
        self._streak_from = 0
        self._told_floor = False

    def window(self, record: Record) -> Iterator[Alert]:
        """Of a window on record, or of one more optimizer in it."""
        new = [name for name in dict.fromkeys(record.healed) if name not in self._healed]
        if new:
            self._healed.update(new)
            many = f"{len(new)} modules run" if len(new) > 1 else "1 module runs"
            began = "" if record.first is None else f" ({record.first['text']})"
            yield Alert(
                Cause.HEALED,
                f"{many} in float32 now",
                f"Window {record.index}: {', '.join(new)}, found by heal{began}. In the config, "
                f"from the start: {module_list(new)}",
            )
        floor = self._min_scale
        at_floor = floor is not None and record.next_scale <= floor
        if not record.skipped or self._told_floor or record.healed:
            return
        if at_floor or record.next_scale < USUAL_FLOOR:
            self._told_floor = True
            where = f"min_scale={floor:g}" if at_floor else f"{record.next_scale:g}"
            seen = f" Last seen in: {', '.join(record.overflowed)}." if record.overflowed else ""
            began = "" if record.first is None else f" {record.first['text']}."
            yield Alert(
                Cause.FLOOR,
                "The loss scale is at its floor",
                f"Window {record.index} overflowed and left the scale at {where}: overflows from "
                f"here on cannot be met by a smaller one.{seen}{began}",
            )

    def streak(self, skips: int, text: str) -> Iterator[Alert]:
        """So many windows in a row were skipped; ``text`` is what the log says of it."""
        if skips >= self._streak_from:
            self._streak_from = AGAIN * skips
            yield Alert(Cause.STREAK, f"{counted(skips, 'window')} in a row overflowed", text)

    def ended(self, error: str) -> Iterator[Alert]:
        """Too many were."""
        yield Alert(Cause.ENDED, "Too many overflows in a row ended the run", error)
