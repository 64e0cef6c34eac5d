"""Scale and growth tracker where the device has them, and the same numbers on the host."""

from __future__ import annotations

from torch import Tensor


class HostMirror:
    """Saves the host from asking the device for two numbers that it has itself written last."""

    def __init__(self) -> None:
        self._tensors: tuple[Tensor, Tensor] | None = None
        self._versions = (0, 0)
        """Of the tensors, when ``_numbers`` were theirs."""
        self._numbers = (0.0, 0)
        self._is_unwritten = False
        """An interrupt has ended :meth:`write`: the tensors may not have both numbers yet."""

    def read(self, scale: Tensor, tracker: Tensor) -> tuple[float, int]:
        """Scale and tracker. Synchronises only if the tensors were written to elsewhere."""
        self.finish()
        known = self._tensors
        is_same = known is not None and known[0] is scale and known[1] is tracker
        if not is_same or self._versions != (scale._version, tracker._version):
            self._numbers = float(scale), int(tracker)
            self._tensors, self._versions = (scale, tracker), (scale._version, tracker._version)
        return self._numbers

    def write(self, scale: Tensor, tracker: Tensor, numbers: tuple[float, int]) -> None:
        """Set both; after an interrupt the next :meth:`finish` does. Does not synchronise."""
        self._versions = -1, -1  # first: an interrupt may come between any two of these lines
        self._tensors, self._numbers = (scale, tracker), numbers
        self._is_unwritten = True
        self.finish()

    def finish(self) -> None:
        """Complete an interrupted :meth:`write`."""
        if self._is_unwritten and self._tensors is not None:
            scale, tracker = self._tensors
            scale.fill_(self._numbers[0])
            tracker.fill_(self._numbers[1])
            self._versions = scale._version, tracker._version
            self._is_unwritten = False
