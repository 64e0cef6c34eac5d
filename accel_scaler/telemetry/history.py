"""What the scaler did: the records of the last windows, a diagnosis of all."""

from __future__ import annotations

import math
from collections import deque
from copy import deepcopy
from dataclasses import replace

from ..console import number
from .diagnosis import Diagnosis, headroom
from .findings import verdict
from .record import Record, Start

KEPT_RECORDS = 4096
KEPT_DETAILS = 16
"""Records that keep what they know of single parameters: of thousands, most of the memory."""


class History:
    """A bounded memory of windows, and totals over all of them. Holds no tensors.

    Args:
        start: the precision and the settings; default: a run with a loss scale.
    """

    def __init__(self, start: Start | None = None) -> None:
        self.records: deque[Record] = deque(maxlen=KEPT_RECORDS)
        self.boundaries = 0
        self.skips = 0
        self.max_grad_norm: float | None = None
        self.healed: tuple[str, ...] = ()
        """Modules that ``heal`` has put into float32, in order."""
        self.largest_unscaled: float | None = None
        """The largest gradient of the last window that was measured, unscaled."""
        self._before = Diagnosis()
        """Of all windows but the last, which may still be amended."""
        self._before.begin(start or Start())

    @property
    def headroom(self) -> float | None:
        """How often the present scale can be doubled before the largest measured gradient overflows
        float16; negative if float32 has added it up beyond. None without ``telemetry``, and until
        the first measurement."""
        if self.largest_unscaled is None or not self.records:
            return None
        return headroom(self.largest_unscaled * self.records[-1].next_scale)

    def add(self, record: Record) -> None:
        """Append the record of a window, or amend it when its index is the last one's."""
        last = self.records[-1] if self.records else None
        if last is not None and last.index == record.index:
            self.skips += record.skipped - last.skipped
            if record.grad_norm is None:
                record = replace(record, grad_norm=last.grad_norm)
            self.records[-1] = record
        else:
            if last is not None:
                self._before.add(last)
            self.records.append(record)
            self.boundaries += 1
            self.skips += record.skipped
            if len(self.records) > KEPT_DETAILS:
                old = self.records[-KEPT_DETAILS - 1]
                bare = replace(old, norms=None, nonfinite=(), underflow=())
                self.records[-KEPT_DETAILS - 1] = bare
        norm = record.grad_norm
        if norm is not None and math.isfinite(norm):
            self.max_grad_norm = max(norm, self.max_grad_norm or 0.0)
        if record.healed:
            self.healed = tuple(dict.fromkeys(self.healed + record.healed))

    def complete(self, record: Record) -> None:
        """Replace the last record by one with what became known later."""
        self.records[-1] = record
        if record.largest_gradient is not None and record.scale > 0:
            self.largest_unscaled = record.largest_gradient / record.scale

    def diagnosis(self) -> Diagnosis:
        """What became of the run up to now; the report finds the same in the file."""
        found = deepcopy(self._before)
        if self.records:
            found.add(self.records[-1])
        return found

    def verdict(self) -> str:
        """A few sentences: whether the run trained up to now, what stopped it, what to do."""
        return verdict(self.diagnosis())

    def summary(self) -> str:
        """A few lines of text: verdict, skips, scale, largest norm, the last overflow."""
        if not self.records:
            return "scaler: no window has closed yet"
        run = self.diagnosis()
        norm = "not taken" if self.max_grad_norm is None else f"{self.max_grad_norm:.4g}"
        lines = [
            verdict(run),
            f"scaler: {self.boundaries} windows, {self.skips} skipped",
            f"scale: {number(run.first_scale)} at first, {number(run.last_scale)} now",
            f"largest finite gradient norm: {norm}",
        ]
        names = self.last_overflow()
        if names:
            lines.append(f"last overflow seen in: {', '.join(names)}")
        return "\n".join(lines)

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
