"""What the scaler did: the records of the last windows, totals for all."""

from __future__ import annotations

import math
from collections import deque
from copy import deepcopy
from dataclasses import replace
from typing import Any

from .diagnosis import Diagnosis, origin_of
from .float16 import headroom
from .outcome import Outcome, verdict
from .record import Record

KEPT_RECORDS = 4096
KEPT_DETAILS = 16
"""Records that keep what they know of single parameters: of thousands, most of the memory."""
KEPT_CHANGES = 1024


class History:
    """A bounded memory of windows, and totals over all of them. Holds no tensors.

    Args:
        is_scaled: the run has a loss scale; None: the first scale other than 1 tells.
        min_scale: the setting.
    """

    def __init__(self, is_scaled: bool | None = None, min_scale: float | None = None) -> None:
        self.records: deque[Record] = deque(maxlen=KEPT_RECORDS)
        self.scale_path: deque[tuple[int, float]] = deque(maxlen=KEPT_CHANGES)
        """``(window, scale)`` at each change of scale; the first entry is the start."""
        self.boundaries = 0
        self.skips = 0
        self.max_grad_norm: float | None = None
        self._diagnosis = Diagnosis()
        """Of all windows but the last, which may still be amended."""
        self._diagnosis.begin(is_scaled, min_scale)

    healed: tuple[str, ...] = ()
    """Modules that ``heal`` has put into float32, in order."""
    largest_unscaled: float | None = None
    """``Record.largest_gradient`` of the last window that was measured, unscaled."""

    @property
    def headroom(self) -> float | None:
        """How often the present scale can be doubled before the largest gradient of the last
        window that was measured overflows; a negative number says that float32 has added it up.
        None: nothing was measured. Only with ``telemetry``."""
        if self.largest_unscaled is None or not self.records:
            return None
        return headroom(self.largest_unscaled * self.records[-1].next_scale)

    def note_largest(self, largest: float | None, scale: float) -> None:
        """The largest scaled gradient of a window with this scale; None: not known."""
        if largest is not None and scale > 0:
            self.largest_unscaled = largest / scale

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
            if self.records:
                last = self.records[-1]
                self._diagnosis.add(last.index, last, origin_of(last))
            self.records.append(record)
            self.boundaries += 1
            self.skips += int(record.skipped)
            if len(self.records) > KEPT_DETAILS:
                old = self.records[-KEPT_DETAILS - 1]
                bare: dict[str, Any] = {"nonfinite": (), "underflow": ()}
                self.records[-KEPT_DETAILS - 1] = replace(old, norms=None, **bare)
        if not self.scale_path:
            self.scale_path.append((record.index, record.scale))
        if self.scale_path[-1][1] != record.next_scale:
            self.scale_path.append((record.index + 1, record.next_scale))
        norm = record.grad_norm
        if norm is not None and math.isfinite(norm):
            self.max_grad_norm = max(norm, self.max_grad_norm or 0.0)
        if record.healed:
            self.healed = tuple(dict.fromkeys(self.healed + record.healed))

    def complete(self, record: Record) -> None:
        """Put what came to be known later in the place of the last record."""
        if self.records and self.records[-1].index == record.index:
            self.records[-1] = record

    def summary(self) -> str:
        """A few lines of text: the verdict, windows, skips, the path of the scale, the largest
        norm, modules that were healed."""
        if not self.records:
            return "scaler: no window has closed yet"
        path = " -> ".join(f"{scale:.10g} (window {index})" for index, scale in self._short_path())
        norm = "not taken" if self.max_grad_norm is None else f"{self.max_grad_norm:.4g}"
        lines = [
            self.verdict(),
            f"scaler: {self.boundaries} windows, {self.skips} skipped",
            f"scale: {path}",
            f"largest finite gradient norm: {norm}",
        ]
        names = self.last_overflow()
        if names:
            lines.append(f"last overflow seen in: {', '.join(names)}")
        return "\n".join(lines)

    def verdict(self) -> str:
        """One or two sentences: whether the run trained up to now, what stopped it, what to do."""
        return verdict(self.outcome())

    def outcome(self) -> Outcome:
        """What the verdict is made from; the report finds the same in the file."""
        found = deepcopy(self._diagnosis)
        if self.records:
            last = self.records[-1]
            found.add(last.index, last, origin_of(last))
        return found.outcome("window {}".format)

    def last_overflow(self) -> tuple[str, ...]:
        """Names in the latest kept record that has any."""
        return next((r.overflowed for r in reversed(self.records) if r.overflowed), ())

    def progress(self) -> dict[str, float]:
        """What a progress bar shows: ``scale`` of the next window, ``skips`` so far, ``headroom``
        where it is known and the number of modules ``healed`` where there are any.

        >>> bar.set_postfix(accelerator.scaler_history.progress())
        """
        if not self.records:
            return {}
        scale = self.records[-1].next_scale
        found = {"scale": int(scale) if scale.is_integer() else scale, "skips": self.skips}
        room = self.headroom
        if room is not None and math.isfinite(room):
            found["headroom"] = round(room, 1)
        return found | ({"healed": len(self.healed)} if self.healed else {})

    def metrics(self) -> dict[str, float]:
        """The last window for experiment trackers, as ``scaler/...``; finite numbers only."""
        if not self.records:
            return {}
        last = self.records[-1]
        found = {
            "scaler/scale": last.next_scale,
            "scaler/skips": self.skips,
            "scaler/grad_norm": last.grad_norm,
            "scaler/clip_coefficient": last.clip_coefficient,
            "scaler/headroom": self.headroom,
        }
        return {k: v for k, v in found.items() if v is not None and math.isfinite(v)}

    def _short_path(self, most: int = 12) -> list[tuple[int, float]]:
        path = list(self.scale_path)
        return path if len(path) <= most else path[: most // 2] + path[-most // 2 :]
