"""Copies between a device and host memory, and the stream that updates run on.

The only file that orders streams, by events, and knows pinned memory. On a CPU, and where one queue
keeps the order, nothing runs beside anything: events are None, and copies are waited for.

*Home* is the stream that the training thread hands steps over from, *side* the one that updates run
on, *down* the one of copies to the host. ``ready`` is home's event at the hand-over; side begins
after it, and each part of a step ends with an event of its own. For each kind of memory: who writes
and reads it, what orders that, and the streams that it is recorded on (``record_stream``).

Model's parameters
    Side writes them after ``ready``, and so after what home followed by then (in ``delayed`` first
    the previews, with this step's gradients). Home and the user's streams read them. A use waits
    for the event of its part, on its own stream and on home; until the device is past that event
    the class stays pending (:mod:`.pending_parameter`), so each other stream waits as well. A fence
    waits on the host until no stream has work left, then home publishes. Recorded on side.
Masters on the device
    Side writes and reads them; the training thread refreshes them from the model in home's order
    (``as_at_home``), with no step in flight. Recorded on side.
Gradients
    The backward's streams write them, home then multiplies, side reads and unscales them after
    ``ready``. A use meanwhile waits as for a parameter. The task holds them until it has
    enqueued its work; recorded on side, and on down if they are sent. Where other tensors share
    their memory, home copies them. FSDP2's come from a stream of its own: recorded on home.
Optimizer state, loaded or made by a step; step counts
    Side writes and reads it; home reads it after ``synchronize()``. Its memory may come from home's
    pool or from side's: recorded on both, before a step and after it. So is scratch, which steps
    inside ``step()`` use as well (``auto``).
Hyperparameters that are tensors, factors that unscale and clip
    Home writes copies of them at the hand-over, side reads them after ``ready``. Recorded on side.
Gradients on the host, pinned
    Down writes them after home; the optimizer thread waits for each copy's event, then reads. Sent
    once the step before is done.
Masters and state on the host
    The optimizer thread alone uses them while a step is in flight. The copy up reads masters on
    side: the thread waits for the last event before it writes them again.
Staging, pinned
    The optimizer thread writes it, side's copy up reads it and is waited for likewise. A pair holds
    it; torch keeps pinned memory that is dropped until its copies are done.

An optimizer that is dropped leaves all of that to the events: the task holds what it still
enqueues, recorded memory stays until the device is done with it, and the model's parameters, hooks
and gradients know the events without the optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

from ..devices import streams_of
from .shared_memory import length_of


class SideStreams:
    """The side streams of one device: one for the optimizer's work, one for copies to the host.
    ``wait_for_*``, ``wait_on_host``, ``follow_last(on_host=True)`` alone block the host."""

    def __init__(self, device: torch.device) -> None:
        streams = streams_of(device)
        self._backend: Any = streams
        """None: on a CPU, and where one queue keeps the order."""
        self.copies_beside = streams is not None
        """Copies run while this thread goes on."""
        self.device = device if streams is None else streams.device
        self.is_host = streams is None and device.type == "cpu"
        """The device's memory is the host's."""
        self.home: Any = None
        """The stream that the training thread handed the last step over from."""
        self._last: Any = None
        """The event of the last work on the side stream."""
        self.followed: Any = None
        """The last event given to :meth:`follow`."""
        self._known: Any = None
        """An event that the device is known to be past."""
        self._work: Any = None if streams is None else streams.new()
        self._down: Any = None if streams is None else streams.new()

    def record(self, home: bool = False) -> Any:
        """An event in this thread's present stream; None without streams. ``home``: that is the
        training stream, which follows every event that any stream follows."""
        if self._backend is None:
            return None
        stream = self._backend.current()
        if home:
            self.home = stream
        return self._record(stream)

    def _record(self, stream: Any) -> Any:
        with self._backend.on(stream):
            event = self._backend.event()
            event.record()
            return event

    def record_at_home(self) -> Any:
        """An event in the training stream."""
        return self.record() if self.home is None else self._record(self.home)

    def wait_for_side(self) -> None:
        """Block this thread until the device has done all work on the side stream."""
        self.wait_on_host(self._last)

    def follow(self, event: Any) -> None:
        """Order what this stream and the training stream enqueue from here on after ``event``."""
        if event is None or self._backend is None:
            return
        stream = self._backend.current()
        if event is self.followed and stream == self.home:
            return  # each parameter of a part asks
        for each in (stream,) if self.home in (None, stream) else (stream, self.home):
            with self._backend.on(each):
                event.wait()
        self.followed = event

    def wait(self, event: Any) -> None:
        """Order what this thread enqueues from here on after ``event``."""
        if event is not None:
            event.wait()

    def wait_on_host(self, event: Any) -> None:
        """Block this thread until the device is past ``event``."""
        if event is not None:
            event.synchronize()

    def is_past(self, event: Any) -> bool:
        """Whether the device is past ``event``: then all streams are after it."""
        return event is None or bool(event.query())

    def follow_last(self, on_host: bool = False) -> None:
        """:meth:`follow` the last work on the side stream, unless the device is past it.
        ``on_host``: block this thread for it, and so order every stream."""
        event = self._last
        if event is self._known:
            return  # not asked again: a graph may be being captured
        if on_host:
            self.wait_on_host(event)
        elif not self.is_past(event):
            self.follow(event)
            return
        self._known = event

    def wait_for_all(self) -> None:
        """Block this thread until the device has done all work on all streams."""
        if self._backend is not None:
            self._backend.synchronize()

    @contextmanager
    def beside(self, after: Any) -> Iterator[None]:
        """Enqueue on the side stream, after the event ``after``."""
        if self._backend is None:
            yield
            return
        with self._backend.on(self._work):
            after.wait()
            try:
                yield
            finally:
                self._last = self._record(self._work)

    @contextmanager
    def as_at_home(self) -> Iterator[None]:
        """Order what this thread enqueues after what the training stream has enqueued. That stream
        is not ordered after this: for it to read what is written here, wait on the host."""
        here = None if self._backend is None else self._backend.current()
        if here is not None and self.home not in (None, here):
            here.wait_stream(self.home)
        yield

    def keep(self, tensors: Iterable[Tensor | None], at_home: bool = False) -> None:
        """Record tensors on the side stream: their memory is not reused before that stream is done
        with them. ``at_home``: record them on the training stream and this thread's, too."""
        if self._backend is None:
            return
        others = {self._backend.current(), self.home} - {None} if at_home else set()
        streams = {self._work} | others
        for tensor in tensors:
            if tensor is not None and tensor.device.type == self.device.type:
                for held in _held(tensor):
                    for stream in streams:
                        held.record_stream(stream)

    def host_like(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Uninitialised host tensors of the same shapes, strides and dtypes, in few buffers. These
        are pinned where copies run beside the host; elsewhere there is one for each dtype."""
        kinds = [t.dtype for t in tensors]
        lengths = list(map(length_of, tensors))
        views: list[Tensor] = list(tensors)
        # Else another device would make the memory its own.
        with self._backend.on(self._backend.current()) if self.copies_beside else nullcontext():
            for kind in dict.fromkeys(kinds):
                mine = [i for i, each in enumerate(kinds) if each is kind]
                sizes = [lengths[i] for i in mine]
                for pack in packs(sizes) if self.copies_beside else [range(len(mine))]:
                    length, start = sum(sizes[i] for i in pack), 0
                    buffer = torch.empty(
                        length, dtype=kind, device="cpu", pin_memory=self.copies_beside
                    )
                    for i in pack:
                        t = tensors[mine[i]]
                        views[mine[i]] = buffer.as_strided(t.shape, t.stride(), start)
                        start += sizes[i]
        return views

    def down(self, source: Tensor, host: Tensor) -> Any:
        """Copy to the host, after this thread's stream; returns the event at the copy's end."""
        if self._backend is None:
            host.copy_(source)
            return None
        self._down.wait_stream(self._backend.current())
        with self._backend.on(self._down):
            host.copy_(source, non_blocking=True)
            source.record_stream(self._down)
            return self._record(self._down)

    def up(self, host: Tensor, target: Tensor, staging: Tensor | None = None) -> None:
        """Copy to the device in the present stream. ``staging``: pinned, of the target's dtype."""
        if staging is not None:
            host = staging.copy_(host)
        target.copy_(host, non_blocking=self._backend is not None)


class PartEvents:
    """The events at which the parts of one step end on the device. Refers to no optimizer."""

    def __init__(self, streams: SideStreams, ends: list[Any]) -> None:
        self._streams, self._ends = streams, ends

    def follow(self) -> None:
        """:meth:`SideStreams.follow` the end of all parts."""
        for event in self._ends[-1:]:
            self._streams.follow(event)

    def is_past(self, parts: int | None = None, *, wait: bool = False) -> bool:
        """Whether the device is past the first ``parts`` (default: all); ``wait`` until it is."""
        for event in self._ends[-1:] if parts is None else self._ends[parts - 1 : parts]:
            if wait:
                self._streams.wait_on_host(event)
            elif not self._streams.is_past(event):
                return False
        return True


def packs(lengths: Sequence[int]) -> list[list[int]]:
    """Indices of the lengths that share a buffer.

    torch's allocator rounds pinned memory up to a power of two, so one buffer for all could take
    twice what it holds. Here a buffer is the largest power of two that the rest fills, or what
    holds the largest length. It is filled from the largest one down, so little is lost to rounding.
    """
    left = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    found = []
    while left:
        total, largest = sum(lengths[i] for i in left), lengths[left[0]]
        room = max(1 << total.bit_length() >> 1, 1 << max(largest - 1, 0).bit_length())
        pack = []
        for i in left:
            if lengths[i] <= room:
                pack.append(i)
                room -= lengths[i]
        found.append(pack)
        taken = set(pack)
        left = [i for i in left if i not in taken]
    return found


def _held(t: Any) -> Iterator[Tensor]:
    """The tensors that hold the memory of ``t``, which may be sparse, a shard or a wrapper."""
    if hasattr(t, "__tensor_flatten__"):
        for name in t.__tensor_flatten__()[0]:
            yield from _held(getattr(t, name))
    elif t.layout is torch.sparse_coo:
        yield from (t._indices(), t._values())
    elif t.layout is torch.strided:
        yield t
