"""What the scaler did: one record a window, the last ones kept, totals for all."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace
from typing import Any

__all__ = ["History", "Record", "Span"]

KEPT_RECORDS = 4096
KEPT_NORMS = 256
KEPT_OFFENDERS = 65_536
KEPT_CHANGES = 1024

Span = tuple[Any, ...]
"""``(kind, start, length)`` or ``(kind, start, length, where)``; seconds of ``perf_counter``."""


@dataclass(frozen=True, slots=True)
class Record:
    """One accumulation window, as it stood when it closed. Scalars are Python numbers."""

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
    found_inf: bool = False
    """Some gradient was not finite, on this rank or, where they must agree, another."""
    growth_tracker: int = 0
    """Windows without overflow since the last change of scale, after this one."""
    max_norm: float | None = None
    """What the total norm was clipped to; None where it was not."""
    clip_coefficient: float | None = None
    """What clipping multiplied the gradients by, at most 1; None where there was no clipping."""
    lr: tuple[float | None, ...] = ()
    """Learning rate of every group of the optimizers that ended in this window, in order."""
    loss_nonfinite: int = 0
    """How many of its losses were inf or NaN; looked at after an overflow only."""
    names: tuple[str, ...] = ()
    """What ``norms``, ``nonfinite`` and ``underflow`` count: parameter names, in their order."""
    norms: bytes | None = None
    """Unscaled norm of each parameter's gradient, before clipping: float32, the machine's order
    of bytes. Only with ``telemetry``; kept for the last windows."""
    nonfinite: tuple[tuple[int, int], ...] = ()
    """``(index in names, non-finite elements)`` of every offender. Only with ``telemetry``; kept
    for the last windows, and of models with thousands of parameters for the last skips."""
    underflow: tuple[tuple[int, float, float], ...] = ()
    """``(index in names, share of zeros, share of subnormals)`` of float16 gradients; kept for the
    last windows."""
    first: dict[str, Any] | None = None
    """Where the overflow began. Only with ``find_overflow``."""
    time: float = 0.0
    """When it ended: seconds since the start of the recording."""
    optimizer_s: float | None = None
    """How long its update took, wherever it ran. Host time."""
    waited_s: float | None = None
    """How long the training thread waited for it."""
    spans: tuple[Span, ...] = ()
    """What ran when. Only with ``telemetry``."""


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
        self._offending: deque[tuple[int, int]] = deque()
        """``(number of the record, its offenders)`` where there are any; numbers from 1."""
        self._offenders = 0

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
            self._forget_norms()
        self._forget_offenders(len(record.nonfinite))
        if not self.scale_path:
            self.scale_path.append((record.index, record.scale))
        if self.scale_path[-1][1] != record.next_scale:
            self.scale_path.append((record.index + 1, record.next_scale))
        norm = record.grad_norm
        if norm is not None and math.isfinite(norm):
            self.max_grad_norm = max(norm, self.max_grad_norm or 0.0)

    def complete(self, record: Record) -> None:
        """Put what came to be known later in the place of the last record."""
        if self.records and self.records[-1].index == record.index:
            self.records[-1] = record

    def _forget_norms(self) -> None:
        # With thousands of parameters these would be most of the memory.
        if len(self.records) > KEPT_NORMS:
            old = self.records[-KEPT_NORMS - 1]
            if old.norms is not None or old.spans or old.nonfinite or old.underflow:
                bare: dict[str, Any] = {"nonfinite": (), "underflow": ()}
                self.records[-KEPT_NORMS - 1] = replace(old, norms=None, spans=(), **bare)

    def _forget_offenders(self, count: int) -> None:
        """Keep few in all: one overflow of a large model is a tuple for each of its tensors."""
        offending = self._offending
        if offending and offending[-1][0] == self.boundaries:  # the last record was amended
            self._offenders -= offending.pop()[1]
        if count:
            offending.append((self.boundaries, count))
            self._offenders += count
        while len(offending) > 1 and (
            self._offenders > KEPT_OFFENDERS or offending[0][0] <= self.boundaries - KEPT_NORMS
        ):
            number, gone = offending.popleft()
            self._offenders -= gone
            place = number - self.boundaries - 1
            if -place <= len(self.records):
                self.records[place] = replace(self.records[place], nonfinite=())

    def summary(self) -> str:
        """A few lines of text: windows, skips, the path of the scale, the largest norm."""
        if not self.records:
            return "scaler: no window has closed yet"
        path = " -> ".join(f"{scale:.10g} (window {index})" for index, scale in self._short_path())
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

    def progress(self) -> dict[str, float]:
        """What a progress bar shows: ``scale`` of the next window, and ``skips`` so far.

        >>> bar.set_postfix(accelerator.scaler_history.progress())
        """
        if not self.records:
            return {}
        scale = self.records[-1].next_scale
        return {"scale": int(scale) if scale.is_integer() else scale, "skips": self.skips}

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
        }
        return {k: v for k, v in found.items() if v is not None and math.isfinite(v)}

    def _short_path(self, most: int = 12) -> list[tuple[int, float]]:
        path = list(self.scale_path)
        return path if len(path) <= most else path[: most // 2] + path[-most // 2 :]
