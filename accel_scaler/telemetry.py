"""What the scaler did: one record a window, the last ones kept, totals for all."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace

__all__ = ["History", "Record"]

KEPT_RECORDS = 4096
KEPT_CHANGES = 1024


@dataclass(frozen=True, slots=True)
class Record:
    """One accumulation window, as it stood when it closed."""

    index: int
    """Number of the window, from 0."""
    scale: float
    """The scale that produced its gradients."""
    next_scale: float
    """The scale of the window after it."""
    skipped: bool
    """An optimizer of this window was not stepped, because its gradients overflowed."""
    grad_norm: float | None
    """Total gradient norm, unscaled, before clipping; None where no norm was taken."""
    overflowed: tuple[str, ...] = ()
    """Names of tensors seen with non-finite gradients (the search stops at the first few)."""


class History:
    """A bounded memory of windows, and totals over all of them. Holds no tensors."""

    def __init__(self) -> None:
        self.records: deque[Record] = deque(maxlen=KEPT_RECORDS)
        self.scale_path: deque[tuple[int, float]] = deque(maxlen=KEPT_CHANGES)
        """``(window, scale)`` at each change of scale; the first entry is the start."""
        self.boundaries = 0
        self.skips = 0
        self.max_grad_norm: float | None = None
        self.told_low = False
        """The warning about a scale below 1 has been given."""

    def add(self, record: Record) -> None:
        """Append the record of a window, or amend it when its index is the last one's."""
        if self.records and self.records[-1].index == record.index:
            last = self.records[-1]
            self.skips += int(record.skipped) - int(last.skipped)
            if self.scale_path and self.scale_path[-1][0] == record.index + 1:
                self.scale_path.pop()
            if record.grad_norm is None:
                record = replace(record, grad_norm=last.grad_norm)
            self.records[-1] = record
        else:
            self.records.append(record)
            self.boundaries += 1
            self.skips += int(record.skipped)
        if not self.scale_path:
            self.scale_path.append((record.index, record.scale))
        if self.scale_path[-1][1] != record.next_scale:
            self.scale_path.append((record.index + 1, record.next_scale))
        norm = record.grad_norm
        if norm is not None and math.isfinite(norm):
            self.max_grad_norm = max(norm, self.max_grad_norm or 0.0)

    def summary(self) -> str:
        """A few lines of text: windows, skips, the path of the scale, the largest norm."""
        if not self.records:
            return "scaler: no window has closed yet"
        path = " -> ".join(f"{scale:g} (window {index})" for index, scale in self._short_path())
        norm = "not taken" if self.max_grad_norm is None else f"{self.max_grad_norm:.4g}"
        lines = [
            f"scaler: {self.boundaries} windows, {self.skips} skipped",
            f"scale: {path}",
            f"largest finite gradient norm: {norm}",
        ]
        names = self.last_overflow()
        if names:
            lines.append(f"last overflow seen in: {', '.join(names)}")
        return "\n".join(lines)

    def last_overflow(self) -> tuple[str, ...]:
        """Names in the latest kept record that has any."""
        return next((r.overflowed for r in reversed(self.records) if r.overflowed), ())

    def _short_path(self, most: int = 12) -> list[tuple[int, float]]:
        path = list(self.scale_path)
        return path if len(path) <= most else path[: most // 2] + path[-most // 2 :]
