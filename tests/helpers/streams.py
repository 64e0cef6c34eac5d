"""A device that exists only on paper: which operations on its streams are ordered, which race.

Tensors stay on the CPU and every operation runs at once. Beside it, a dispatch mode notes which
stream (or thread of the host) would have run it, and what it read and wrote; streams, events and
hand-overs between threads move vector clocks, as they order work on a CUDA device. An access that
nothing orders after an earlier conflicting one raises :class:`Race`. So do memory that one stream
gives back while another still uses it, and a host that touches what a copy has not finished.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Clock = dict[str, int]


class Race(AssertionError):  # noqa: N818
    """Two accesses that nothing orders."""


@dataclass
class Access:
    low: int
    high: int
    agent: str
    time: int
    writes: bool
    pool: str
    """Whose allocator the memory came from."""
    what: str

    def meets(self, low: int, high: int) -> bool:
        return self.low < high and low < self.high


def join(into: Clock, other: Clock) -> None:
    for agent, time in other.items():
        into[agent] = max(into.get(agent, 0), time)


class Stream:
    def __init__(self, device: PaperDevice, name: str) -> None:
        self.device, self.name = device, name
        self.clock: Clock = {}

    def wait_event(self, event: Event) -> None:
        join(self.clock, event.clock)

    def wait_stream(self, other: Stream) -> None:
        join(self.clock, other.clock)


class Event:
    def __init__(self, device: PaperDevice) -> None:
        self.device = device
        self.clock: Clock = {}

    def record(self) -> None:
        self.clock = dict(self.device.current().clock)

    def wait(self) -> None:
        self.device.current().wait_event(self)

    def synchronize(self) -> None:
        join(self.device.host_clock(), self.clock)

    def query(self) -> bool:
        """Only what the host has waited for is known to be done."""
        host = self.device.host_clock()
        return all(host.get(agent, 0) >= time for agent, time in self.clock.items())


class PaperDevice:
    """What ``Streams`` of a real device is to ``SideStreams`` in async_optimizer.

    Args:
        host_worker: tensors made from nothing on a thread other than the first are the host's.
    """

    def __init__(self, host_worker: bool) -> None:
        self.host_worker = host_worker
        self.main = threading.get_ident()
        self.home = Stream(self, "home")
        self.made: list[Stream] = []
        self.hosts: dict[int, Clock] = {}
        self.local = threading.local()
        self.lock = threading.RLock()
        self.accesses: list[Access] = []
        self.recorded: list[tuple[int, int, str]] = []
        self.host_memory: list[tuple[int, int]] = []
        self.pools: list[tuple[int, int, str]] = []
        self.operations: dict[str, int] = {}
        self.kept: list[Tensor] = []
        """The host's memory, so that what torch makes unseen never lies where that was."""

    # As Streams.

    def new(self) -> Stream:
        self.made.append(Stream(self, f"side {len(self.made) + 1}"))
        return self.made[-1]

    def event(self) -> Event:
        return Event(self)

    def current(self) -> Stream:
        stack = getattr(self.local, "streams", None)
        return stack[-1] if stack else self.home

    def synchronize(self) -> None:
        for clock in [self.home.clock, *(stream.clock for stream in self.made)]:
            join(self.host_clock(), clock)

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        self.local.streams = [*getattr(self.local, "streams", []), stream]
        try:
            with self.watch():
                yield
        finally:
            self.local.streams.pop()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Note this thread's operations."""
        if getattr(self.local, "watched", False):
            yield
            return
        self.local.watched = True
        try:
            with _Notes(self):
                yield
        finally:
            self.local.watched = False

    # What happens.

    def host_clock(self) -> Clock:
        return self.hosts.setdefault(threading.get_ident(), {})

    def make_host(self, t: Tensor) -> None:
        low, high = whole(t)
        self.forget(low, high)
        self.host_memory.append((low, high))
        self.pools.append((low, high, "host"))
        self.kept.append(t)

    def forget(self, low: int, high: int) -> None:
        self.accesses = [a for a in self.accesses if not a.meets(low, high)]
        self.recorded = [r for r in self.recorded if not (r[0] < high and low < r[1])]
        self.pools = [r for r in self.pools if not (r[0] < high and low < r[1])]
        self.host_memory = [r for r in self.host_memory if not (r[0] < high and low < r[1])]

    def is_host(self, t: Tensor) -> bool:
        low, _ = extent(t)
        return any(start <= low < end for start, end in self.host_memory)

    def pool_of(self, low: int) -> str:
        return next((pool for start, end, pool in self.pools if start <= low < end), "home")

    def record_stream(self, t: Tensor, stream: Stream) -> None:
        with self.lock:
            self.recorded.append((*whole(t), stream.name))

    def allocate(self, t: Tensor, pool: str) -> None:
        """``pool`` gives out memory: blocks of its own may still be in use elsewhere."""
        low, high = whole(t)
        kept = [a for a in self.accesses if a.meets(low, high) and a.pool == pool]
        recorded = [r for r in self.recorded if r[0] < high and low < r[1]]
        self.forget(low, high)
        for a in kept:
            if not any(r[0] <= a.low < r[1] and a.agent == r[2] for r in recorded):
                self.accesses.append(a)
        self.pools.append((low, high, pool))
        if pool == "host":
            self.host_memory.append((low, high))
            self.kept.append(t)

    def touch(self, agent: str, clock: Clock, t: Tensor, writes: bool, what: str) -> None:
        low, high = extent(t)
        if low == high:
            return
        for a in self.accesses:
            if a.meets(low, high) and (writes or a.writes) and clock.get(a.agent, 0) < a.time:
                raise Race(
                    f"{what} on {agent} {'writes' if writes else 'reads'} memory that {a.what} on "
                    f"{a.agent} {'writes' if a.writes else 'reads'}; nothing orders them"
                )
        if writes:
            self.accesses = [a for a in self.accesses if not (low <= a.low and a.high <= high)]
        new = Access(low, high, agent, clock[agent], writes, self.pool_of(low), what)
        self.accesses = [
            a
            for a in self.accesses
            if (a.low, a.high, a.agent, a.writes) != (low, high, agent, writes)
        ]
        self.accesses.append(new)

    def run(self, what: str, reads: list[Tensor], writes: list[Tensor], fresh: list[Tensor],
            waits: bool) -> None:  # fmt: skip
        """Order one operation and check what it touches."""
        given = [self.is_host(t) for t in [*reads, *writes]]
        on_host = self.host_worker and threading.get_ident() != self.main
        if given:
            on_host = all(given)
        host, stream = self.host_clock(), self.current()
        mixed = any(given) and not on_host and what != "copy_"
        if mixed:  # stands for a copy to the host, which is waited for
            join(host, stream.clock)
            on_host = True
        agent = f"host {threading.get_ident()}" if on_host else stream.name
        clock = host if on_host else stream.clock
        join(clock, host)
        clock[agent] = clock.get(agent, 0) + 1
        self.operations[agent] = self.operations.get(agent, 0) + 1
        for t in fresh:
            self.allocate(t, "host" if on_host else stream.name)
        for t in reads:
            self.touch(agent, clock, t, False, what)
        for t in [*writes, *fresh]:
            self.touch(agent, clock, t, True, what)
        if waits and not on_host:
            join(host, clock)


class _Notes(TorchDispatchMode):
    def __init__(self, device: PaperDevice) -> None:
        super().__init__()
        self.device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with self.device.lock:  # one operation at a time, so that addresses stay who they are
            result = func(*args, **kwargs)
            schema = func._schema
            views = [r.alias_info is not None and not r.alias_info.is_write for r in schema.returns]
            if any(views):
                return result
            reads, writes = [], []
            for place, argument in enumerate(schema.arguments):
                value = args[place] if place < len(args) else kwargs.get(argument.name)
                info = argument.alias_info
                (writes if info is not None and info.is_write else reads).extend(tensors(value))
            known = {t.untyped_storage().data_ptr() for t in [*reads, *writes]}
            fresh = [t for t in tensors(result) if t.untyped_storage().data_ptr() not in known]
            name = schema.name.removeprefix("aten::")
            # A copy that may run on waits for nothing; what gives the host a number waits.
            waits = not schema.returns or not tensors(result)
            waits = waits and not name.startswith(("_foreach", "_fused", "_amp"))
            if name == "copy_":
                waits = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
                waits = waits and self.device.is_host(args[0]) != self.device.is_host(args[1])
                reads, writes = [args[1]], [args[0]]
            self.device.run(name, reads, writes, fresh, waits)
            return result


def tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in tensors(item)]
    return []


def extent(t: Tensor) -> tuple[int, int]:
    """The addresses from the first to the last element."""
    if t.numel() == 0:
        return 0, 0
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


def whole(t: Tensor) -> tuple[int, int]:
    """The addresses of its storage."""
    storage = t.untyped_storage()
    return storage.data_ptr(), storage.data_ptr() + storage.nbytes()
