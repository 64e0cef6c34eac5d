"""Pinned host memory in which masters and optimizer state rest between steps."""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from ..devices import pinned_zeros
from ..errors import UnsupportedError
from .arena import Arena
from .ring import copy_streams


class HostArena(Arena):
    """An arena whose memory is the host's, pinned: one flat buffer for each key.

    Args:
        device: where the parameters are.
        targets, has_masters: see :class:`Arena`.
    """

    def __init__(self, targets: Sequence[Tensor], device: torch.device, has_masters: bool) -> None:
        super().__init__(targets, torch.device("cpu"), has_masters)
        self.used_on = device
        self.memory: dict[str, Tensor] = {}

    def allocate(self, key: str) -> Tensor:
        """The buffer of ``key``, float32; zeros at first. Raises ``UnsupportedError`` where there
        is not enough memory."""
        if key not in self.memory:
            length = self.end(-1)
            try:
                self.memory[key], unpin = pinned_zeros(length, self.used_on)
            except RuntimeError as error:
                raise UnsupportedError(
                    f"offload='cpu': {length * 4 / 2**30:.2f} GiB of host memory cannot be had for "
                    f"{key!r} of {len(self.lengths)} parameters ({error}), 4 bytes an element; the "
                    "optimizer's other state and float32 copies (masters) take as much each. Free "
                    "host memory, train fewer parameters, or leave offload at 'none'."
                ) from error
            # Whoever drops the arena does not know whether a copy is under way.
            weakref.finalize(
                self, _release, self.memory[key], copy_streams(self.used_on), unpin
            ).atexit = False
        return self.memory[key]


def _release(memory: Tensor, streams: Sequence[Any], unpin: Callable[[], object] | None) -> None:
    """Let ``memory`` go once the copies of ``streams`` have ended."""
    for stream in streams:
        stream.synchronize()
    if unpin is not None:
        unpin()
    del memory


class WaitingState(defaultdict[Any, Any]):
    """``optimizer.state``, where copies to host memory may be under way: reads wait for them.

    Args:
        rest: called before each read; held weakly.
        entries: the state.
    """

    def __init__(self, rest: Callable[[], object], entries: dict[Any, Any]) -> None:
        super().__init__(dict, dict.items(entries))
        self._rest = weakref.WeakMethod(rest)

    def _wait(self) -> None:
        rest = self._rest()
        if rest is not None:
            rest()

    def copy(self) -> Any:
        """A plain one."""
        self._wait()
        return defaultdict(dict, dict.items(self))

    __copy__: Any = copy

    def __reduce__(self) -> Any:
        self._wait()
        return defaultdict, (dict, dict(dict.items(self)))


def _waiting(name: str) -> Callable[..., Any]:
    read = getattr(defaultdict, name)

    @wraps(read)
    def call(self: WaitingState, *args: Any) -> Any:
        self._wait()
        return read(self, *args)

    return call


for _name in ("__getitem__", "__iter__", "get", "values", "items", "pop", "popitem", "setdefault"):
    setattr(WaitingState, _name, _waiting(_name))
