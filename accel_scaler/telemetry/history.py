"""The records of the last windows, and a diagnosis of all windows."""

from __future__ import annotations

import logging
import math
from collections import deque
from copy import deepcopy
from dataclasses import replace

from ..console import number
from .diagnosis import Diagnosis
from .findings import cause_of_skips, is_well, verdict
from .record import Record, Start

logger = logging.getLogger("accel_scaler")

KEPT_RECORDS = 4096


class History:
    """A bounded memory of windows, and totals over all of them. Holds no tensors. ``start``: the
    precision and the settings; by default of a run with a loss scale."""

    def __init__(self, start: Start | None = None) -> None:
        self.records: deque[Record] = deque(maxlen=KEPT_RECORDS)
        self.boundaries = 0
        self._reported = ""
        self._before = Diagnosis()
        """A diagnosis of all windows but the last, which another optimizer may still amend."""
        self._before.begin(start or Start())
        self.is_scaled = self._before.is_scaled

    @property
    def skips(self) -> int:
        """Windows that were skipped."""
        return self.diagnosis().skips

    @property
    def retried(self) -> int:
        """Windows that overflowed, ran again and stepped: their batches are not lost."""
        return self.diagnosis().retried

    @property
    def healed(self) -> tuple[str, ...]:
        """Modules that ``heal`` has put into float32, in order."""
        return tuple(self.diagnosis().healed)

    def add(self, record: Record) -> None:
        """Append the record of a window, or replace an earlier record of this window. Norms of
        parameters, which would take most of the memory, are left out."""
        record = record if record.norms is None else replace(record, names=(), norms=None)
        if self.records and self.records[-1].index == record.index:
            self.records[-1] = record
            return
        if self.records:
            self._before.add(self.records[-1])
        self.records.append(record)
        self.boundaries += 1

    def add_mistake(self, text: str) -> None:
        """Give the verdict a mistake of the script."""
        self._before.add_mistake(text)

    def diagnosis(self) -> Diagnosis:
        """A diagnosis of the run up to now; the report makes the same from the file."""
        found = deepcopy(self._before)
        if self.records:
            found.add(self.records[-1])
        return found

    def summary(self) -> str:
        """A few lines of text: verdict, scale, largest norm, the last overflow."""
        if not self.records:
            return "\n".join(("scaler: no step has ended yet", *self._before.mistakes))
        run, names = self.diagnosis(), self.last_overflow()
        norm = run.highest and run.highest[0]
        scale = f"scale: {number(run.first_scale)} at first, {number(run.last_scale)} now"
        lines = [verdict(run), *[scale] * self.is_scaled]
        lines += [f"largest finite gradient norm: {'not taken' if norm is None else f'{norm:.4g}'}"]
        what = "overflow" if self.is_scaled else "inf or NaN"
        return "\n".join(lines + [f"last {what} seen in: {', '.join(names)}"] * bool(names))

    def cause(self) -> str:
        """Where the present run of skips begins, and the remedy; "" without skips at the end."""
        run = self.diagnosis()
        run.overflowed = ()  # the scaler names them itself
        return cause_of_skips(run) if run.streak else ""

    def report(self) -> None:
        """Log the verdict if there is something to be done, each verdict once."""
        run = self.diagnosis()
        text = verdict(run)
        if run.windows and text != self._reported and not is_well(run):
            self._reported = text
            logger.warning("%s", text)

    def last_overflow(self) -> tuple[str, ...]:
        """Names in the latest kept record that has any."""
        return next((r.overflowed for r in reversed(self.records) if r.overflowed), ())

    def progress(self) -> dict[str, float]:
        """Numbers for a progress bar: ``scale`` of the next window, ``skips`` so far, windows
        ``retried`` and modules ``healed`` where there are any.

        >>> bar.set_postfix(accelerator.scaler_history.progress())
        """
        found = self._numbers("scale", "skips", "retried", "healed")
        if (scale := found.get("scale", 0.5)).is_integer():
            found["scale"] = int(scale)
        return found

    def metrics(self) -> dict[str, float]:
        """The last window for experiment trackers, as ``scaler/...``; finite numbers only."""
        found = self._numbers("scale", "skips", "grad_norm", "clip_coefficient")
        return {f"scaler/{name}": value for name, value in found.items()}

    def _numbers(self, *names: str) -> dict[str, float]:
        if not self.records:
            return {}
        last, run = self.records[-1], self.diagnosis()
        found = {
            "scale": last.next_scale if self.is_scaled else None,
            "skips": run.skips,
            "retried": run.retried or None,
            "healed": len(run.healed) or None,
            "grad_norm": last.grad_norm,
            "clip_coefficient": last.clip_coefficient,
        }
        return {k: v for k in names if (v := found[k]) is not None and math.isfinite(v)}
