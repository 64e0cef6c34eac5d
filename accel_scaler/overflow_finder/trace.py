"""What a window's forwards and backwards left behind for the search: ranges, never a tensor."""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.nn import Module

from .ranges import Pair, Range, joined

__all__ = [
    "Call",
    "Entry",
    "Gradient",
    "Listener",
    "Loss",
    "Own",
    "Pass",
    "Place",
    "Share",
    "Window",
]

MOST = 1 << 17
"""Ranges kept, of each kind, where no boundary ever comes."""


@dataclass(frozen=True, eq=False)
class Place:
    """One watched module."""

    name: str
    cls: str
    root: str
    """Class of the model it belongs to."""
    module: weakref.ref[Module]
    is_leaf: bool
    """It holds no other module."""
    has_code: bool
    """Its forward may do more than call the modules in it, one after the other."""

    def __str__(self) -> str:
        return f"{self.name} ({self.cls})" if self.name else self.cls


class Entry(NamedTuple):
    """One tensor that went into a module or came out of it."""

    path: str
    range: Range
    grad: bool
    """It requires a gradient."""
    dtype: torch.dtype

    @property
    def is_broken(self) -> bool:
        """Whether it holds what it should not; a mask of 0 and -inf may."""
        r = self.range
        return r.is_broken and not (not self.grad and r.is_masked and joined([r])[1] <= 0)


class Call:
    """One run of a module's forward."""

    __slots__ = ("depth", "edges", "inputs", "is_counted", "outputs", "parent", "place", "walk")

    def __init__(self, place: Place, parent: Call | None, walk: Pass) -> None:
        self.place, self.parent, self.walk = place, parent, walk
        self.depth: int = parent.depth + 1 if parent else 0
        self.is_counted = True
        """Not the second run of a checkpoint."""
        self.edges: list[tuple[Any, int]] = []
        """Where the gradients of its inputs go; while it runs."""
        self.inputs: list[Entry] = []
        self.outputs: list[Entry] = []

    @property
    def is_fed_badly(self) -> bool:
        return any(entry.is_broken for entry in self.inputs)

    @property
    def broken(self) -> list[Entry]:
        """Its outputs that are not finite."""
        return [entry for entry in self.outputs if entry.is_broken]

    def parents(self) -> Iterator[Call]:
        """From the next one outwards to the model."""
        call = self.parent
        while call is not None:
            yield call
            call = call.parent


class Pass:
    """One forward of a model, from the outermost watched module."""

    __slots__ = (
        "__weakref__",
        "events",
        "is_hooked",
        "is_reached",
        "micro",
        "order",
        "size",
        "window",
    )

    def __init__(self, order: int, micro: int, window: int) -> None:
        self.order, self.micro, self.window = order, micro, window
        self.events: list[tuple[bool, Call]] = []
        """``(left, call)``, in order of time: a module was entered, or left."""
        self.is_hooked = False
        """A gradient may come to one of its tensors."""
        self.is_reached = False
        """A gradient came."""
        self.size = 0


class Listener:
    """The calls that made one tensor, and those that took it."""

    __slots__ = ("consumers", "loss", "producers")

    def __init__(self) -> None:
        self.producers: list[Call] = []
        self.consumers: list[Call] = []
        self.loss: Loss | None = None


class Gradient(NamedTuple):
    """A gradient that arrived at a tensor."""

    micro: int
    listener: Listener
    range: Range


class Share(NamedTuple):
    """What one call added to the gradient of its input."""

    micro: int
    call: Call
    range: Range


class Own(NamedTuple):
    """A gradient that arrived at a parameter."""

    micro: int
    place: Place
    name: str
    range: Range


class Loss:
    """A loss, before it was scaled."""

    __slots__ = ("dtype", "micro", "range")

    def __init__(self, micro: int, range_: Range, dtype: str) -> None:
        self.micro, self.range, self.dtype = micro, range_, dtype


class Window:
    """Everything between two boundaries."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.backwards = 0
        self.passes: list[Pass] = []
        self.gradients: deque[Gradient] = deque(maxlen=MOST)
        self.shares: deque[Share] = deque(maxlen=MOST)
        self.own: deque[Own] = deque(maxlen=MOST)
        self.losses: deque[Loss] = deque(maxlen=MOST)
        self.latest: dict[Place, Call] = {}

    @property
    def micro(self) -> int:
        """The micro-batch whose backward is running."""
        return max(self.backwards - 1, 0)

    def open_pass(self, order: int) -> Pass:
        """A new forward; forgets the oldest ones, those without a backward first."""
        total = sum(p.size for p in self.passes)
        while total > MOST:
            oldest = next((p for p in self.passes if not p.is_reached), self.passes[0])
            self.passes.remove(oldest)
            total -= oldest.size
        made = Pass(order, self.backwards, self.number)
        self.passes.append(made)
        return made

    def arrive(self, listener: Listener, range_: Range) -> None:
        """A gradient came: also to forwards of an earlier window, as a generator's."""
        for call in (*listener.producers, *listener.consumers):
            walk = call.walk
            if walk.window != self.number:
                walk.window, walk.micro = self.number, self.micro
                self.passes.append(walk)
            elif not walk.is_reached:
                walk.micro = max(walk.micro, self.micro)
            walk.is_reached = True
        self.gradients.append(Gradient(self.micro, listener, range_))

    def ranges(self) -> Iterator[Range]:
        """All that were taken."""
        for walk in self.passes:
            for _, call in walk.events:
                yield from (entry.range for entry in call.inputs)
                yield from (entry.range for entry in call.outputs)
        yield from (each.range for each in self.gradients)
        yield from (each.range for each in self.shares)
        yield from (each.range for each in self.own)
        yield from (each.range for each in self.losses)

    def gradient_at_output(
        self, calls: Iterable[Call], micro: int, until: Gradient | None = None
    ) -> Pair | None:
        """Range of what came to the outputs of these calls in one backward, before ``until``."""
        wanted = set(map(id, calls))
        return pair_of(
            each.range
            for each in itertools.takewhile(lambda g: g is not until, self.gradients)
            if each.micro == micro and any(id(c) in wanted for c in each.listener.producers)
        )

    def calls_of(self, place: Place, micro: int) -> list[Call]:
        """The runs of one module in one micro-batch."""
        found = [
            call
            for walk in self.passes
            for left, call in walk.events
            if not left and call.place is place
        ]
        return [call for call in found if call.walk.micro == micro] or found


def pair_of(ranges: Iterable[Range]) -> Pair | None:
    """Of several; None for none at all."""
    found = list(ranges)
    return joined(found) if found else None
