"""Scale and growth tracker where the device has them, and the same numbers on the host."""

from __future__ import annotations

from torch import Tensor


class HostMirror:
    """Saves the host from asking the device for two numbers that it has itself written last."""

    def __init__(self) -> None:
        self._seen: tuple[Tensor, int, Tensor, int] | None = None
        """The two tensors, and their versions, that ``_numbers`` are those of."""
        self._numbers = (0.0, 0)
        self._unwritten: tuple[Tensor, Tensor] | None = None
        """Tensors that ``_numbers`` were being written to when something interrupted it."""

    def read(self, scale: Tensor, tracker: Tensor) -> tuple[float, int]:
        """Scale and tracker. Synchronises only if somebody else has written to the tensors."""
        self.finish()
        seen = self._seen
        if (
            seen is None
            or seen[0] is not scale
            or seen[1] != scale._version
            or seen[2] is not tracker
            or seen[3] != tracker._version
        ):
            self._numbers = float(scale), int(tracker)
            self._seen = (scale, scale._version, tracker, tracker._version)
        return self._numbers

    def write(self, scale: Tensor, tracker: Tensor, numbers: tuple[float, int]) -> None:
        """Set both, or, where it is interrupted, leave both to :meth:`finish`. Does not
        synchronise."""
        self._seen, self._numbers, self._unwritten = None, numbers, (scale, tracker)
        self.finish()

    def finish(self) -> None:
        """Do what an interrupted :meth:`write` has left."""
        if self._unwritten is not None:
            (scale, tracker), numbers = self._unwritten, self._numbers
            scale.fill_(numbers[0])
            tracker.fill_(numbers[1])
            self._seen = (scale, scale._version, tracker, tracker._version)
            self._unwritten = None
