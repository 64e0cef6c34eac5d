"""Slots of device memory through which state in host memory passes, stretch after stretch.

Three streams take part. *Up* copies a stretch from host memory into a slot, the training stream
steps it there, *down* copies it back:

    up        load 0   load 1   load 2   load 3   load 4
    training           step 0   step 1   step 2   step 3
    down                        store 0  store 1  store 2

Note [Order of the streams]
---------------------------
A slot's memory comes from the pool of the training stream, which may still use it for what it held
before: up waits for that stream once, when the slot is made. From then on events order all: a load
waits until the slot's last store has ended, and the stretch's own, whose result it reads; the step
waits for the load, the store for the step. When a slot is let go, the stream that it was made on
waits for its last copy, and then uses the memory as its own. (``record_stream`` would have the
allocator wait for the host to see that copy's end. The host is far ahead by then, so memory would
be asked for anew.) The host waits for nothing, except in :meth:`Ring.settle`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..devices import is_host, on_stream, present_stream
from .arena import ALIGNED

if TYPE_CHECKING:
    from .offloaded import Stretch

GRAIN = 128
"""Elements: allocators count in 512 bytes."""

COUNT = 4
"""Slots in a ring: one is stepped, two are loaded, one is stored."""


class Slot:
    """Device memory for one stretch at a time."""

    def __init__(self, memory: Tensor, stream: Any) -> None:
        self.memory, self.stream = memory, stream
        """The memory, and the stream whose pool it is from."""
        self.views: dict[str, Tensor] = {}
        """What is in it: for each key shape (length,)."""
        self.loaded: Any = None
        self.stored: Any = None
        """The events at the end of its last load and store."""


class Ring:
    """The slots of one optimizer, and its use of the device's two copy streams."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        streams: Sequence[Any] = (None, None) if is_host(device) else copy_streams(device)
        self.up, self.down = streams
        self.free: list[Slot] = []
        """Slots that hold nothing; the first was stored first."""
        self.loaded: dict[Stretch, Slot] = {}
        """Stretches that are in slots."""
        self.made = 0
        """Bytes of all slots ever made."""
        self.is_settled = True
        """The host has waited for all stores."""

    @property
    def held(self) -> int:
        """Bytes in slots now."""
        return sum(slot.memory.nbytes for slot in chain(self.free, self.loaded.values()))

    @property
    def _stream(self) -> Any:
        """The stream that this thread uses."""
        return present_stream(self.device)

    def make(self, length: int) -> None:
        """Make a free slot for ``length`` elements on the stream that this thread uses. Raises
        ``torch.OutOfMemoryError``."""
        length = -(-length // GRAIN) * GRAIN
        memory = torch.empty(length, dtype=torch.float32, device=self.device)
        self.made += memory.nbytes
        self.up.wait_stream(self._stream)
        self.free.append(Slot(memory, self._stream))

    def load(self, stretch: Stretch) -> None:
        """Copy a stretch's host memory into the first free slot."""
        slot, length = self.free.pop(0), stretch.length
        self.loaded[stretch], sources = slot, stretch.homes
        space = -(-length // ALIGNED) * ALIGNED
        for before in (slot.stored, stretch.stored):
            if before is not None:
                self.up.wait_event(before)
        slot.views = {
            key: slot.memory[i * space : i * space + length] for i, key in enumerate(sources)
        }
        with on_stream(self.up):
            for key, source in sources.items():
                slot.views[key].copy_(source, non_blocking=True)
        slot.loaded = self._end_of(self.up)

    def begin(self, stretch: Stretch) -> dict[str, Tensor]:
        """What a stretch's slot holds, once the stream that this thread uses has waited for it."""
        slot = self.loaded[stretch]
        self._stream.wait_event(slot.loaded)
        return slot.views

    def store(self, stretch: Stretch) -> None:
        """Copy a stretch's slot to host memory, once the stream that this thread uses is here. The
        slot is free then."""
        slot, self.is_settled = self.loaded[stretch], False
        self.down.wait_stream(self._stream)
        with on_stream(self.down):
            for key, target in stretch.homes.items():
                target.copy_(slot.views[key], non_blocking=True)
        slot.stored = stretch.stored = self._end_of(self.down)
        self.free.append(self.loaded.pop(stretch))

    def _end_of(self, stream: Any) -> Any:
        event = torch.Event(self.device)  # the class of the streams: no other knows them
        event.record(stream)
        return event

    def drop(self) -> None:
        """Give the memory of all that is up back."""
        for slot in self.loaded.values():
            slot.stream.wait_stream(self.up)  # its load may have been interrupted
            self._release(slot)
        self.loaded.clear()

    def _release(self, slot: Slot) -> None:
        """Give a slot's memory back to its stream, which waits for the copies first."""
        for event in (slot.loaded, slot.stored):
            if event is not None:
                slot.stream.wait_event(event)
        if slot.stream != self._stream:
            slot.stream.wait_stream(self._stream)

    def release_smaller(self, length: int) -> None:
        """Release free slots with less than ``length`` elements."""
        for slot in [slot for slot in self.free if slot.memory.numel() < length]:
            self._release(slot)
            self.free.remove(slot)

    def release_free(self, allowed: int = 0) -> None:
        """Release free slots, the first stored first, until all slots have ``allowed`` bytes."""
        while self.free and self.held > allowed:
            self._release(self.free[0])
            self.free.pop(0)

    def settle(self) -> None:
        """Wait until all stores have ended: host memory may be read and written from here on."""
        if not self.is_settled:
            self.down.synchronize()
            self.is_settled = True


@cache
def copy_streams(device: torch.device) -> Sequence[Any]:
    """The streams for copies up and down, made once: each brings an allocator pool of its own."""
    return torch.Stream(device), torch.Stream(device)
