"""The record that hooks make of a window for the search: smallest and largest elements of tensors,
left on their device until somebody asks, and never a tensor."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..scaling import Pair

MAX_RANGES = 1 << 17
"""The most ranges of each kind that are kept where no window ever ends."""

MAX_USES = 256
"""The most calls remembered for one tensor, which may live through every forward of the run."""


class Range:
    """``(lo, hi)`` of one tensor; NaN in both where it holds a NaN."""

    __slots__ = ("_held", "values")

    def __init__(self, held: Tensor) -> None:
        self._held: Tensor | None = held
        self.values: Pair | None = None
        """Set by :meth:`read`."""

    @classmethod
    @torch.no_grad()
    def of(cls, tensor: Tensor) -> Range | None:
        """The range of a tensor; None for integers, empty tensors and tensors without memory.

        Does not synchronise.
        """
        values = _values(tensor)
        if values is None:
            return None
        low, high = torch.aminmax(values)
        if values.dtype is not torch.float64:  # autocast to float16 refuses to stack bfloat16
            low, high = low.float(), high.float()
        return cls(torch.stack((low, high)))

    @staticmethod
    def read(ranges: Iterable[Range]) -> None:
        """Fill in ``values``. Synchronises once for each device."""
        by_device: dict[torch.device, dict[Range, Tensor]] = {}
        for each in ranges:
            if each._held is not None:
                by_device.setdefault(each._held.device, {})[each] = each._held
        for held in by_device.values():
            rows = torch.cat([*held.values()]).view(-1, 2).tolist()
            for each, (lo, hi) in zip(held, rows, strict=True):
                each.values, each._held = (lo, hi), None

    @property
    def is_finite(self) -> bool:
        """False: the tensor held an inf or a NaN. Known only after :meth:`read`."""
        return self.values is None or all(map(math.isfinite, self.values))

    @property
    def is_masked(self) -> bool:
        """Whether -inf is the only non-finite value, as in a masked score."""
        return not self.is_finite and self.values is not None and self.values[1] < math.inf


def is_batched(tensor: Tensor) -> bool:
    """Whether the tensor stands for several gradients (``is_grads_batched``) and has no memory."""
    return bool(torch._C._functorch.is_legacy_batchedtensor(tensor))


def _values(tensor: Any) -> Tensor | None:
    """The elements that this rank holds, as a real strided tensor of a type with an order."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    if local.is_sparse:
        local = local._values()
    if (
        isinstance(local, torch._subclasses.FakeTensor)
        or local.is_meta
        or local.is_nested
        or is_batched(local)
        or local.layout is not torch.strided
    ):
        return None
    if local.is_complex():
        local = torch.view_as_real(local.resolve_conj())
    if not local.is_floating_point() or local.numel() == 0:
        return None
    return local.float() if local.element_size() == 1 else local


def pair_of(seen: Iterable[Entry | Gradient]) -> Pair | None:
    """The range of several entries or gradients; NaN wins; None for none at all."""
    pairs = [each.range.values for each in seen if each.range.values is not None]
    if any(math.isnan(value) for pair in pairs for value in pair):
        return math.nan, math.nan
    return (min(lo for lo, _ in pairs), max(hi for _, hi in pairs)) if pairs else None


def in_words(pair: Pair | None) -> str:
    """``in [-3.1, 4]``, or the infinity that it reached."""
    if pair is None:
        return "not seen"
    lo, hi = pair
    if math.isnan(lo) or math.isnan(hi):
        return "contains NaN"
    if math.isfinite(lo) and math.isfinite(hi):
        return f"in [{lo:.4g}, {hi:.4g}]"
    return "reached " + " and ".join(f"{x:g}" for x in dict.fromkeys(pair) if math.isinf(x))


@dataclass(frozen=True, eq=False)
class WatchedModule:
    name: str
    cls: str

    def __str__(self) -> str:
        return f"{self.name} ({self.cls})" if self.name else self.cls


class Entry(NamedTuple):
    """One tensor that went into a module or came out of it."""

    path: str
    range: Range
    requires_grad: bool

    @property
    def is_finite(self) -> bool:
        """Whether all is finite; -inf counts as finite in a mask of 0 and -inf."""
        if self.range.is_finite or self.range.values is None:
            return True
        return not self.requires_grad and self.range.values[1] <= 0


@dataclass(eq=False, slots=True)
class Call:
    """One run of a module's forward."""

    module: WatchedModule
    parent: Call | None
    forward: Forward
    is_first: bool = True
    """False in the second run of activation checkpointing."""
    inputs: list[Entry] = field(default_factory=list)
    outputs: list[Entry] = field(default_factory=list)

    @property
    def bad_inputs(self) -> list[Entry]:
        return [entry for entry in self.inputs if not entry.is_finite]

    @property
    def bad_outputs(self) -> list[Entry]:
        return [entry for entry in self.outputs if not entry.is_finite]

    def parents(self) -> Iterator[Call]:
        """The calls around this one, from the innermost outwards to the model."""
        call = self.parent
        while call is not None:
            yield call
            call = call.parent


@dataclass(eq=False, slots=True)
class Forward:
    """One forward of a model, from the outermost watched module."""

    order: int
    micro: int
    window: int
    events: list[tuple[bool, Call]] = field(default_factory=list)
    """``(is over, call)``, in order of time: a module's forward began, or was over."""
    has_hooks: bool = False
    """Whether some tensor in it has a hook for its gradient."""
    got_gradient: bool = False
    size: int = 0

    def add(self, is_over: bool, call: Call) -> None:
        if self.size < MAX_RANGES:
            self.events.append((is_over, call))
            self.size += 1 + len(call.outputs if is_over else call.inputs)


@dataclass(eq=False, slots=True)
class Uses:
    """The calls that made one tensor, and the calls that took it."""

    producers: deque[Call] = field(default_factory=lambda: deque(maxlen=MAX_USES))
    consumers: deque[Call] = field(default_factory=lambda: deque(maxlen=MAX_USES))
    loss: Loss | None = None


class Loss(NamedTuple):
    """A loss, before it was scaled."""

    micro: int
    range: Range
    dtype: str


class Gradient(NamedTuple):
    micro: int
    range: Range
    uses: Uses


class ParameterGradient(NamedTuple):
    micro: int
    range: Range
    module: WatchedModule
    name: str


class WindowTrace:
    """The record of one window."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.backwards = 0
        self.forwards: list[Forward] = []
        self.losses: deque[Loss] = deque(maxlen=MAX_RANGES)
        self.gradients: deque[Gradient] = deque(maxlen=MAX_RANGES)
        self.parameter_gradients: deque[ParameterGradient] = deque(maxlen=MAX_RANGES)
        self.latest: dict[WatchedModule, Call] = {}

    @property
    def micro(self) -> int:
        """The micro-batch whose backward is running."""
        return max(self.backwards - 1, 0)

    def open_forward(self, order: int) -> Forward:
        """A new forward; forgets the oldest ones, but first any without a backward."""
        total = sum(each.size for each in self.forwards)
        while total > MAX_RANGES:
            oldest = next((f for f in self.forwards if not f.got_gradient), self.forwards[0])
            self.forwards.remove(oldest)
            total -= oldest.size
        made = Forward(order, self.backwards, self.number)
        self.forwards.append(made)
        return made

    def add_gradient(self, uses: Uses, range_: Range) -> None:
        """Note a gradient. It may have come to forwards of an earlier window, as a generator's."""
        for call in (*uses.producers, *uses.consumers):
            forward = call.forward
            if forward.window != self.number:
                forward.window, forward.micro = self.number, self.micro
                self.forwards.append(forward)
            elif not forward.got_gradient:
                forward.micro = max(forward.micro, self.micro)
            forward.got_gradient = True
        self.gradients.append(Gradient(self.micro, range_, uses))

    def ranges(self) -> Iterator[Range]:
        for forward in self.forwards:
            for _, call in forward.events:
                yield from (entry.range for entry in (*call.inputs, *call.outputs))
        for kind in (self.losses, self.gradients, self.parameter_gradients):
            yield from (each.range for each in kind)

    def micro_batches(self) -> list[int]:
        """The numbers of the micro-batches in which anything was seen."""
        kinds = (self.forwards, self.losses, self.gradients, self.parameter_gradients)
        return sorted({each.micro for kind in kinds for each in kind})
