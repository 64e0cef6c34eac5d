"""Scale and growth tracker where the device has them, and the same numbers on the host."""

from __future__ import annotations

from torch import Tensor

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
