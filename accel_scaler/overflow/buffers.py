"""The buffers of a model as they were before a forward."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor
from torch.nn import Module

from .gradients import version_of


class KeptBuffer(NamedTuple):
    """A buffer, as it was before a forward."""

    place: dict[str, Any]
    """The ``_buffers`` of its module."""
    name: str
    tensor: Tensor
    version: int
    copy: Tensor | None
    """None: no forward is known to write to it."""

    @property
    def is_written(self) -> bool:
        """Whether the buffer was written to since. A batch norm raises no version counter."""
        if self.name in ("running_mean", "running_var"):
            return True
        now = self.place.get(self.name)
        return now is not self.tensor or version_of(self.tensor) != self.version

    def restore(self) -> None:
        """Give the buffer its earlier values; version counters stay."""
        if self.copy is not None:
            self.place[self.name] = self.tensor
            self.tensor.data.copy_(self.copy)


class BufferCopies:
    """Copies the buffers that forwards write to; before a model's first forward every buffer."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, str], KeptBuffer] = {}
        """Each buffer as it was before the last forward of its model."""
        self._written: set[tuple[int, str]] = set()

    def keep(self, model: Module) -> list[KeptBuffer]:
        """Keep the buffers of a model that is about to run."""
        found = []
        for place in (module._buffers for module in model.modules()):
            for name, b in place.items():
                if b is None:
                    continue
                key, last = (id(place), name), self._last.get((id(place), name))
                if last is not None and last.is_written:
                    self._written.add(key)
                copy = b.detach().clone() if last is None or key in self._written else None
                found.append(KeptBuffer(place, name, b, version_of(b), copy))
                self._last[key] = found[-1]
        return found
