"""The scale's numbers on the host: from one window's verdict to the next, in plain Python."""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class ScaleState:
    """The numbers that the rule carries from one window to the next."""

    scale: float
    """The loss scale, exactly a float32 once a loss was scaled."""
    growth_tracker: int
    """Windows in a row without overflow since the last growth or overflow."""
    consecutive_skips: int = 0
    """Overflowed windows in a row; spikes between them do not end the row."""
    spikes: int = 0
    """Windows skipped for their norm since the last window that was not skipped."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Growth, back-off, bounds and hysteresis.

    Growth and back-off equal torch's ``_amp_update_scale_``: products are taken in float64 and
    rounded to float32, and growth past float32's range is left out. ``hysteresis`` counts
    overflows in consecutive windows, as in Megatron-Core's ``DynamicGradScaler`` and in DeepSpeed
    with ``consecutive_hysteresis``: the first ``hysteresis - 1`` of a run keep the scale, every
    further one backs it off, and a finite window refills the count.
    """

    growth_factor: float
    backoff_factor: float
    growth_interval: int
    min_scale: float | None = None
    max_scale: float | None = None
    hysteresis: int = 1

    def advance(self, state: ScaleState, found_inf: bool) -> ScaleState:
        """The state after a window; ``found_inf``: its gradients overflowed."""
        if found_inf:
            skips = state.consecutive_skips + 1
            scale = state.scale
            if skips >= self.hysteresis:
                scale = self.clamp(scale * self.backoff_factor)
            return ScaleState(scale, 0, skips, state.spikes)
        tracker = state.growth_tracker + 1
        if tracker != self.growth_interval:
            return ScaleState(self.clamp(state.scale), tracker)
        grown = _float32(state.scale * self.growth_factor)
        return ScaleState(self.clamp(grown if math.isfinite(grown) else state.scale), 0)

    def clamp(self, scale: float) -> float:
        """``scale`` as a float32 within ``[min_scale, max_scale]``."""
        scale = _float32(scale)
        if self.min_scale is not None:
            scale = max(scale, _float32(self.min_scale))
        if self.max_scale is not None:
            scale = min(scale, _float32(self.max_scale))
        return scale


def _float32(value: float) -> float:
    return ctypes.c_float(value).value


Numbers = tuple[float, int]


class HostMirror:
    """Spares the host a question to the device for two numbers that the host wrote last."""

    def __init__(self) -> None:
        self._known: tuple[Tensor, Tensor, tuple[int, int], Numbers] | None = None
        """The two tensors, their versions when they were last read or written, and the numbers."""

    def read(self, scale: Tensor, tracker: Tensor) -> Numbers:
        """Scale and tracker. Synchronises only if the tensors were written to elsewhere."""
        numbers = self._numbers_of(scale, tracker) or (float(scale), int(tracker))
        self._known = scale, tracker, (scale._version, tracker._version), numbers
        return numbers

    def _numbers_of(self, scale: Tensor, tracker: Tensor) -> Numbers | None:
        """What is in the tensors; None where they were written to elsewhere."""
        known, versions = self._known, (scale._version, tracker._version)
        if known and known[0] is scale and known[1] is tracker and known[2] == versions:
            return known[3]
        return None

    def write(self, scale: Tensor, tracker: Tensor, numbers: Numbers) -> None:
        """Set both. Does not synchronise."""
        before = self._numbers_of(scale, tracker) or (None, None)
        if before[0] != numbers[0]:
            scale.fill_(numbers[0])
        if before[1] != numbers[1]:
            tracker.fill_(numbers[1])
        self._known = scale, tracker, (scale._version, tracker._version), numbers
