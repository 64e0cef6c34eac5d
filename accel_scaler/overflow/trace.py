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

from ..scaling import Pair, local

MAX_KEPT = 1 << 17
"""The most events of forwards, and gradients, that are kept where no window ever ends."""

MAX_USES = 256
"""The most calls remembered for one tensor, which may live through every forward of the run."""


class Range:
    """``(lo, hi)`` of one tensor; NaN in both where it holds a NaN."""

    __slots__ = ("_held", "_pair")

    def __init__(self, held: Tensor) -> None:
        self._held = held
        self._pair: Pair | None = None

    @classmethod
    @torch.no_grad()
    def of(cls, tensor: Any) -> Range | None:
        """The range of the elements that this rank holds. None where they have no order (integers,
        complex numbers), are not laid out in strides, or have no memory. Does not synchronise."""
        values = local(tensor)
        if (
            isinstance(values, torch._subclasses.FakeTensor)
            or values.is_meta
            or values.is_nested
            or is_batched(values)
            or values.layout is not torch.strided
            or not values.is_floating_point()
            or values.element_size() == 1
            or values.numel() == 0
        ):
            return None
        low, high = torch.aminmax(values)
        if values.dtype is not torch.float64:  # autocast to float16 refuses to stack bfloat16
            low, high = low.float(), high.float()
        return cls(torch.stack((low, high)))

    @staticmethod
    def read(ranges: Iterable[Range]) -> None:
        """Read many ranges. Synchronises once for each device."""
        by_device: dict[torch.device, list[Range]] = {}
        for each in ranges:
            if each._pair is None:
                by_device.setdefault(each._held.device, []).append(each)
        for found in by_device.values():
            rows = torch.cat([each._held for each in found]).view(-1, 2).tolist()
            for each, (lo, hi) in zip(found, rows, strict=True):
                each._pair = lo, hi

    @property
    def values(self) -> Pair:
        """Synchronises, where :meth:`read` has not read it."""
        if self._pair is None:
            Range.read([self])
        assert self._pair is not None
        return self._pair

    @property
    def is_finite(self) -> bool:
        """False: the tensor held an inf or a NaN."""
        return all(map(math.isfinite, self.values))

    @property
    def is_masked(self) -> bool:
        """Whether -inf is the only non-finite value, as in a masked score."""
        return not self.is_finite and self.values[1] < math.inf


def is_batched(tensor: Tensor) -> bool:
    """Whether the tensor stands for several gradients (``is_grads_batched``) and has no memory."""
    return bool(torch._C._functorch.is_legacy_batchedtensor(tensor))


def pair_of(seen: Iterable[Entry | Gradient]) -> Pair | None:
    """The range of several entries or gradients; NaN wins; None for none at all."""
    pairs = [each.range.values for each in seen]
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

    range: Range
    requires_grad: bool

    @property
    def is_finite(self) -> bool:
        """Whether all is finite; -inf counts as finite in a mask of 0 and -inf."""
        return self.range.is_finite or (not self.requires_grad and self.range.values[1] <= 0)


@dataclass(eq=False, slots=True)
class Call:
    """One run of a module's forward."""

    module: WatchedModule
    parent: Call | None
    micro: int
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
class Seen:
    """The facts about one version of a tensor, with the calls that made it and that took it."""

    version: int
    range: Range | None
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
    seen: Seen


class ParameterGradient(NamedTuple):
    micro: int
    range: Range
    module: WatchedModule
    name: str


class WindowTrace:
    """The record of one window."""

    def __init__(self) -> None:
        self.backwards = 0
        self.events: deque[tuple[bool, Call]] = deque(maxlen=MAX_KEPT)
        """``(is over, call)``, in order of time: a module's forward began, or was over."""
        self.losses: deque[Loss] = deque(maxlen=MAX_KEPT)
        self.gradients: deque[Gradient] = deque(maxlen=MAX_KEPT)
        self.parameter_gradients: deque[ParameterGradient] = deque(maxlen=MAX_KEPT)
        self.latest: dict[WatchedModule, Call] = {}

    @property
    def micro(self) -> int:
        """The micro-batch whose backward is running."""
        return max(self.backwards - 1, 0)

    def ranges(self) -> Iterator[Range]:
        for _, call in self.events:
            yield from (entry.range for entry in (*call.inputs, *call.outputs))
        for kind in (self.losses, self.gradients, self.parameter_gradients):
            yield from (each.range for each in kind)

    def micro_batches(self) -> list[int]:
        """The numbers of the micro-batches in which anything was seen."""
        kinds = (self.losses, self.gradients, self.parameter_gradients)
        seen = {each.micro for kind in kinds for each in kind}
        return sorted(seen | {call.micro for _, call in self.events})
